"""A shard that nobody can lead by rule is recovered from the copy that has the most, on real brokers and a real etcd."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from cluster.audited import home_of, verified
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import payloads, take

import felix
from audit.leaf import Header, Kind, decode_header
from audit.unclean_leaf import UncleanElection
from felix.errors import RequestError
from region.cluster.records import ShardId, ShardRecord
from region.cluster.transactions import Transaction, state_unclean
from region.log.companions import JournalKind
from region.node import Node
from region.replication import repairer

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd
STREAM = "acme/ops/orders"


@pytest.fixture
async def region(tmp_path: Path, etcd: EtcdProcess) -> AsyncIterator[ClusteredRegion]:
    async with serving(tmp_path, etcd, 3) as region:
        yield region


async def unclean_leaves(region: ClusteredRegion, count: int) -> list[Header]:
    """Those of the log, which verifies, once it has so many and the store tells of no more."""
    home = await home_of(region)
    mirror = region.clustered(home).member.mirror
    async with asyncio.timeout(60):
        await mirror.until(lambda: not mirror.view.unclean)
        found = list[Header]()
        while len(found) < count:
            await asyncio.sleep(0.1)
            headers = map(decode_header, verified(region, home))
            found = [header for header in headers if header.kind is Kind.UNCLEAN]
    return found


def record_of(region: ClusteredRegion, name: str, number: int = 0) -> ShardRecord:
    stream = region.nodes[name].broker.streams.get(felix.StreamName.parse(STREAM))
    assert stream is not None
    return region.clustered(name).member.mirror.view.shards[ShardId(stream.record.incarnation, number)]


async def until_it(
    region: ClusteredRegion, name: str, holds: Callable[[ShardRecord], bool], number: int = 0
) -> None:
    """Wait until a broker knows a record of the stream of which this holds."""
    async with asyncio.timeout(60):
        await region.clustered(name).member.until(lambda: holds(record_of(region, name, number)))


async def lose(region: ClusteredRegion, leader: str, *left: str) -> None:
    """The folder of a leader that has stopped is lost, and it begins a new one beside these: nobody leads, nor is a member."""
    config = region.config.of_broker(leader)
    shutil.rmtree(region.folder.root / config.data)
    await region.start(*left)
    region.nodes[leader] = await Node.start(region.folder, config, replace_folder=True)
    await until_it(region, left[0], lambda record: not record.leader and not record.members())


async def until_two_have(client: felix.RegionClient, what: str) -> str:
    """What status says of the shard that nobody leads, once it says of two copies that they have this."""
    said = ""
    async with asyncio.timeout(30):
        while said.count(f"has {what}") < 2:
            await asyncio.sleep(0.1)
            problems = (await client.describe()).alarms
            said = next((each for each in problems if each.startswith(f"Nobody leads {STREAM}")), "")
    return said


async def test_the_command_that_status_gives_keeps_what_the_copies_have_that_are_left(
    region: ClusteredRegion, caplog: pytest.LogCaptureFixture
) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3, min_in_sync=1)
        await region.in_sync("b1", STREAM)
    leader = record_of(region, "b1").leader
    others = [name for name in region.names if name != leader]
    async with region.client(leader) as client:
        for number in range(20):
            await client.stream(STREAM).publish(b"%d" % number)
        await region.stop(*others)
        await client.stream(STREAM).publish(b"alone")
    await region.stop(leader)
    await lose(region, leader, *others)
    async with region.client(others[0]) as client:
        said = await until_two_have(client, "records to 19")
        assert f"{leader} has no records" in said
        found = re.search(r"--from (\S+) --accept-loss", said)
        assert found is not None and found[1] in others
        with pytest.raises(RequestError, match=f"{leader} has no records and lacks 20 of them: "):
            await client.recover_shard(STREAM, 0, leader)
        with pytest.raises(RequestError, match="has no records and lacks 20 of them"):
            await client.recover_shard(STREAM, 0, leader, lost=others, powered_off=True)
        # Also where nobody hears that it was done: once, and the log says who asked.
        region.lose_answers(others[0])
        assert "with records to 19" in await client.recover_shard(STREAM, 0, found[1])
        assert f"has shard 0 of {STREAM} led by broker {found[1]}" in caplog.text
        await region.in_sync(others[0], STREAM)
        assert await payloads(client, STREAM, 20) == [b"%d" % number for number in range(20)]


async def test_a_copy_that_was_given_up_and_comes_back_says_at_every_broker_what_it_cut(
    region: ClusteredRegion,
) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3, min_in_sync=1)
        await region.in_sync("b1", STREAM)
    leader = record_of(region, "b1").leader
    others = [name for name in region.names if name != leader]
    async with region.client(leader) as client:
        for number in range(3):
            await client.stream(STREAM).publish(b"%d" % number)
        await region.stop(*others)
        for number in range(3, 5):
            await client.stream(STREAM).publish(b"%d" % number)
    await region.stop(leader)
    await region.start(*others)
    await region.heard()
    async with region.client(others[0]) as client:
        assert "with records to 2" in await client.recover_shard(
            STREAM, 0, others[1], lost=[leader], powered_off=True
        )
        await region.start(leader)
        await region.in_sync(others[0], STREAM)
        (shown,) = (await client.describe_stream(STREAM)).state
        assert shown.unclean == shown.leader_epoch
        (leaf,) = await unclean_leaves(region, 1)
        assert leaf.actor.endswith("/operator/operator") and leaf.action == "recover-shard"
        assert (leaf.stream, leaf.shard, leaf.source_epoch) == (STREAM, 0, shown.unclean)
        assert (
            f"Broker {others[1]}, whose copy ends before record 3, leads" in leaf.sentence
            and f"Given up: {leader} (said to be powered off)" in leaf.sentence
        )
        # Once, whoever writes the log later, also where the store tells it again.
        home = await home_of(region)
        said = UncleanElection.decode(leaf.document, "the leaf")
        await region.stop(home)
        next_home = await home_of(region)
        mirror = region.clustered(next_home).member.mirror
        again = state_unclean(mirror.view.keys, said)
        assert await mirror.commit(Transaction((), (again,)))
        assert await unclean_leaves(region, 1) == [leaf]
        await region.start(home)
        said = ""
        async with asyncio.timeout(30):
            while not said:
                await asyncio.sleep(0.1)
                problems = (await client.describe()).alarms
                said = next((each for each in problems if "were cut" in each), "")
        assert said.startswith(
            f"The copy of shard 0 of {STREAM} at broker {leader}: records 3 to 4 were cut"
        ), said


async def test_of_copies_with_the_same_records_the_one_with_the_longer_journal_is_the_shard(
    region: ClusteredRegion,
) -> None:
    async with region.client("b1") as client:
        await client.create_queue(STREAM, replicas=3, min_in_sync=1)
        await region.in_sync("b1", STREAM)
    leader = record_of(region, "b1").leader
    longer, shorter = (name for name in region.names if name != leader)
    async with region.client(leader) as client:
        for number in range(5):
            await client.queue(STREAM).put(b"%d" % number)
        await region.stop(shorter)
        for job in await client.queue(STREAM).lease(3):
            await job.ack()
        await region.stop(longer)
    await region.stop(leader)
    await lose(region, leader, longer, shorter)
    async with region.client(longer) as client:
        said = await until_two_have(client, "records to 4")
        assert f"--from {longer} --accept-loss" in said
        with pytest.raises(
            RequestError,
            match=rf"{longer} is alive and has records to 4 with entries \d+ to \d+ of the queue journal",
        ):
            await client.recover_shard(STREAM, 0, shorter)
        await client.recover_shard(STREAM, 0, longer)
        await region.in_sync(longer, STREAM)
        assert (await client.queue(STREAM).describe()).ready == 2, "what was acknowledged is so still"


async def test_jobs_in_the_place_of_lost_ones_are_done_after_a_copy_was_recovered_whose_journal_goes_further(
    region: ClusteredRegion,
) -> None:
    """As one that was being made has it: the journal is there long before the records are."""
    async with region.client("b1") as client:
        await client.create_queue(STREAM, replicas=3, min_in_sync=1)
        await region.in_sync("b1", STREAM)
    leader = record_of(region, "b1").leader
    further, other = (name for name in region.names if name != leader)
    journal = f"{JournalKind.QUEUE.number(0):05}"

    def folder_of(name: str) -> Path:
        data = region.folder.root / region.config.of_broker(name).data / "streams"
        (found,) = data.glob(f"acme~ops~orders~*/{journal}")
        return found

    async def done(client: felix.RegionClient, count: int) -> list[bytes]:
        found: list[bytes] = []
        async with asyncio.timeout(60):
            while len(found) < count:
                for job in await client.queue(STREAM).lease(count - len(found), wait=1):
                    found.append(bytes(job.payload))
                    await job.ack()
        return found

    async with region.client(leader) as client:
        for number in range(5):
            await client.queue(STREAM).put(b"%d" % number)
        await region.stop(further, other)
        for number in range(5, 10):
            await client.queue(STREAM).put(b"%d" % number)
        assert len(await done(client, 10)) == 10
    await region.stop(leader)
    behind = folder_of(further)
    shutil.rmtree(behind)
    shutil.copytree(folder_of(leader), behind)
    await lose(region, leader, further, other)
    async with region.client(further) as client:
        said = await until_two_have(client, "records to 4")
        assert f"--from {further} --accept-loss" in said
        await client.recover_shard(STREAM, 0, further)
        await region.in_sync(further, STREAM)
        for number in range(100, 112):
            await client.queue(STREAM).put(b"%d" % number)
        assert await done(client, 12) == [b"%d" % number for number in range(100, 112)]


def damage(region: ClusteredRegion, name: str, number: int, where: float) -> None:
    """Change some bytes of the segment that a broker's copy of a shard ends with."""
    data = region.folder.root / region.config.of_broker(name).data / "streams"
    (segment,) = data.glob(f"acme~ops~orders~*/{number:05}/*.seg")
    with segment.open("r+b") as file:
        at = int(segment.stat().st_size * where)
        file.seek(at)
        found = file.read(8)
        file.seek(at)
        file.write(bytes(byte ^ 0xFF for byte in found))


async def test_a_shard_that_its_leader_cannot_open_stops_alone_and_is_recovered_from_another_copy(
    region: ClusteredRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is set aside stays until it was looked at.
    monkeypatch.setattr(repairer, "SCRUB_LOOK_S", 3_600.0)
    async with region.client("b1") as client:
        await client.create_stream(STREAM, shards=2, replicas=3)
        await region.in_sync("b1", STREAM)
        for number in range(40):
            await client.stream(STREAM).publish(b"%d" % number, shard=number % 2)
    await region.stop()
    for place, name in enumerate(region.names):
        damage(region, name, 1, 0.2 + place * 0.3)
    await region.start(*region.names)
    await until_it(region, "b1", lambda record: not record.leader and bool(record.failed), 1)
    (failed,) = record_of(region, "b1", 1).failed
    other = next(name for name in region.names if name != failed)
    async with region.client(other) as client:
        # The others go on: their copies are whole.
        async with asyncio.timeout(30):
            assert await client.stream(STREAM).publish(b"more", shard=0) == 20
        async with asyncio.timeout(30):
            async with client.stream(STREAM).subscribe(start="earliest", shards=[0]) as records:
                read = [bytes(record.payload) for record in await take(records, 21)]
        assert read == [*(b"%d" % number for number in range(0, 40, 2)), b"more"]
        state = await client.describe_stream(STREAM)
        assert state.state[0].stopped == "" and "No broker leads" in state.state[1].stopped
        async with asyncio.timeout(30):
            said = ""
            while f"{failed} cannot open its copy" not in said:
                await asyncio.sleep(0.1)
                said = (await client.describe()).alarms[0]
        assert said.startswith(f"Nobody leads {STREAM} shard 1: {failed} has a copy that failed.")
        found = re.search(r"--from (\S+) --lost (\S+) --accept-loss", said)
        assert found is not None and found[2] == failed != found[1]
        with pytest.raises(RequestError, match="must be named as lost, too"):
            await client.recover_shard(STREAM, 1, found[1])
        with pytest.raises(RequestError, match=f"{failed} cannot open its copy"):
            await client.recover_shard(STREAM, 1, failed)
        assert "leads shard 1" in await client.recover_shard(STREAM, 1, found[1], lost=[failed])
        await region.in_sync(other, STREAM)
        async with asyncio.timeout(30):
            assert await client.stream(STREAM).publish(b"anew", shard=1) == 0
            assert await client.stream(STREAM).publish(b"more", shard=0) == 21
    async with region.client(failed) as client:
        # What is left of the copy that could not be opened stands beside the new one, and status says where.
        async with asyncio.timeout(30):
            told = list[str]()
            while not told or "in sync again: may be removed" not in told[0]:
                await asyncio.sleep(0.1)
                told = [
                    each for each in (await client.describe()).remarks if "set damaged logs aside" in each
                ]
    assert re.search(
        rf"Broker {failed} set .* [\d,]+ bytes that nothing reads: (\S+\.damaged) \(shard 1 of", told[0]
    )
