"""A region of several brokers is operated: copies are moved off a broker and back, made and dropped; a broker that stops hands on what it leads."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from cluster.audited import key_leaf
from cluster.clustered_region import ClusteredRegion, publishing, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import payloads, until
from slow_runs import only_slow

import felix
from audit.submission import SubmissionStatus
from cli.top import _Brokers
from felix.errors import AddressInUseError, Code, RequestError
from felix.messages import BrokerState, RegionState
from region import clustered
from region.cluster.election import has_yielded
from region.cluster.records import ShardId, ShardRecord
from region.log.directory import shard_folder
from region.node import Node

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd
STREAM = "acme/ops/orders"
NAMES = ("b1", "b2", "b3", "b4")


@pytest.fixture
async def region(tmp_path: Path, etcd: EtcdProcess) -> AsyncIterator[ClusteredRegion]:
    async with serving(tmp_path, etcd, len(NAMES)) as region:
        yield region


def record_of(region: ClusteredRegion, name: str = "b1") -> ShardRecord:
    stream = region.nodes[name].broker.streams.get(felix.StreamName.parse(STREAM))
    assert stream is not None
    return region.clustered(name).member.mirror.view.shards[ShardId(stream.record.incarnation, 0)]


async def until_it(region: ClusteredRegion, holds: Callable[[ShardRecord], bool], name: str = "b1") -> None:
    """Wait until a broker knows a record of the stream of which this holds."""
    async with asyncio.timeout(90):
        await region.clustered(name).member.until(lambda: holds(record_of(region, name)))


def settled(*brokers: str) -> Callable[[ShardRecord], bool]:
    return lambda record: (
        set(record.replicas) == set(record.isr) == set(brokers)
        and not record.target
        and record.leader in brokers
        and not has_yielded(record)
    )


def of(state: RegionState, name: str) -> BrokerState:
    return next(each for each in state.brokers if each.broker == name)


def folder_of(region: ClusteredRegion, name: str) -> Path:
    # Of whichever broker has heard of the stream already.
    known = (node.broker.streams.get(felix.StreamName.parse(STREAM)) for node in region.nodes.values())
    stream = next(filter(None, known))
    data = region.folder.root / region.config.of_broker(name).data / "streams"
    return shard_folder(data, stream.name, bytes.fromhex(stream.record.incarnation), 0)


def copies(region: ClusteredRegion, broker: str) -> int:
    """Shards that a broker has a copy of, or is to get, one that is its only one not counted."""
    records = region.clustered("b1").member.mirror.view.shards.values()
    return sum(
        broker in (*record.replicas, *record.target) and len({*record.replicas, *record.target}) > 1
        for record in records
    )


async def test_a_drained_broker_gives_its_copies_away_under_load_and_gets_some_again(
    region: ClusteredRegion,
) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3)
        for name in NAMES:
            region.clustered(name).receives = lambda stream: stream.name == "fed"
        await client.create_stream("acme/ops/fed")
        async with publishing(client, STREAM) as published:
            drained = record_of(region).leader
            home = folder_of(region, drained)
            others = [name for name in NAMES if name != drained]
            await client.drain_broker(drained)
            await until_it(region, settled(*others))
            # The audit log's copy moves, too.
            async with asyncio.timeout(90):
                await region.clustered("b1").member.until(lambda: not copies(region, drained))

            async def nothing_moves() -> bool:
                return not (await client.describe()).moving

            # Another broker is asked, which may hear of it later.
            await until(nothing_moves)
            state = await client.describe()
            assert of(state, drained).is_drained and of(state, drained).copies == 0
            assert of(state, drained).in_sync == 0
            assert all(of(state, name).in_sync == of(state, name).copies > 0 for name in others)
            await until(lambda: not home.exists())
            before = len(published)
            await until(lambda: len(published) >= before + 20)
        assert await payloads(client, STREAM, len(published)) == published
        # What another region feeds stays where it is.
        with pytest.raises(RequestError, match="is fed by another region"):
            await client.alter_stream("acme/ops/fed", replicas=2)
        assert sum(each.alone for each in state.brokers) == 1
        await client.create_stream("acme/ops/later", replicas=3)
        assert of(await client.describe(), drained).copies == 0, "nothing more is placed there"
        await client.drain_broker(drained, drain=False)
        assert not of(await client.describe(), drained).is_drained
        await region.heard()  # the controller too
        moves = await client.rebalance(dry_run=True)
        assert moves.total >= 1 and any(drained in move.then for move in moves.moves)
        begun = await client.rebalance()
        async with asyncio.timeout(90):
            await region.clustered("b1").member.until(lambda: copies(region, drained) > 0)

        async def all_have_moved() -> bool:
            told = await client.rebalance(dry_run=True, since=begun.revision)
            return not (told.total or told.under_way or told.unled) and told.moved >= begun.total

        await until(all_have_moved)
        with pytest.raises(RequestError, match="never registered") as refused:
            await client.drain_broker("b9")
        assert refused.value.code is Code.NOT_FOUND


async def test_status_says_of_each_broker_how_many_records_its_copies_lack(region: ClusteredRegion) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3, min_in_sync=1)
        await until_it(region, lambda record: len(record.isr) == 3)
        record = record_of(region)
        away = next(name for name in record.replicas if name not in (record.leader, "b1"))

        async def lags() -> dict[str, int]:
            return {each.broker: each.lag_records for each in (await client.describe()).brokers}

        await client.stream(STREAM).publish(b"before")
        await region.stop(away)
        for number in range(20):
            await client.stream(STREAM).publish(b"%d" % number)

        async def one_lacks_what_came_since() -> bool:
            found = await lags()
            # The audit log is copied as well.
            return 20 <= found.pop(away) < 40 and set(found.values()) == {0}

        await until(one_lacks_what_came_since)
        await region.start(away)

        async def nothing() -> bool:
            return set((await lags()).values()) == {0}

        await until(nothing)


async def test_copies_are_made_and_dropped_while_the_stream_serves(region: ClusteredRegion) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=2)
        for number in range(10):
            await client.stream(STREAM).publish(b"%d" % number)
        altered = await client.alter_stream(STREAM, replicas=4)
        assert (altered.replicas, altered.min_in_sync) == (4, 3)
        await until_it(region, lambda record: settled(*NAMES)(record) and record.min == 3)
        await client.alter_stream(STREAM, replicas=2, min_in_sync=1)
        await until_it(
            region, lambda record: len(record.replicas) == 2 and not record.target and record.min == 1
        )
        for number in range(10, 20):
            assert await client.stream(STREAM).publish(b"%d" % number) == number
        assert await payloads(client, STREAM, 20) == [b"%d" % number for number in range(20)]
        for asked, sentence in (
            ({"replicas": 5}, "5 copies, and us-east has 4 brokers"),
            ({"min_in_sync": 3}, "waits for 3 of 2 copies"),
        ):
            with pytest.raises(RequestError, match=sentence):
                await client.alter_stream(STREAM, **asked)  # type: ignore[arg-type]


async def test_a_broker_that_stops_in_order_hands_on_what_it_leads_before_it_says_goodbye(
    region: ClusteredRegion,
) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3)
        await client.stream(STREAM).publish(b"x")
        stopped = record_of(region).leader
        watcher = next(name for name in NAMES if name != stopped)
        seen: list[tuple[str, bool]] = []

        def look(known: object) -> None:
            record = record_of(region, watcher)
            seen.append((record.leader, stopped in region.clustered(watcher).member.mirror.view.alive))

        region.clustered(watcher).member.mirror.on_change(look)
        await region.stop(stopped)
        led = [alive for leader, alive in seen if leader not in ("", stopped)]
        assert led and led[0], f"{seen} another one led while the one that stops was still there"
    async with region.client(watcher) as client:
        assert await client.stream(STREAM).publish(b"y") == 1


@only_slow
async def test_leaders_that_a_restart_left_uneven_are_told_once_they_stand_until_they_were_evened_out(
    region: ClusteredRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"acme/ops/s{number}" for number in range(4)]
    async with region.client("b1") as client:

        async def remarks() -> list[str]:
            return [each for each in (await client.describe()).remarks if each.startswith("Leaders are")]

        for name in names:
            await client.create_stream(name, replicas=4)
        for name in names:
            await region.in_sync("b1", name)
        for name in ("b2", "b3", "b4"):
            await region.stop(name)
            await region.start(name)
        for name in names:
            await region.in_sync("b1", name)
        assert len({region.leader("b1", name) for name in names}) < 4, (
            "the one that was restarted last leads nothing"
        )
        assert not await remarks(), "another broker may be about to be restarted"
        monkeypatch.setattr(clustered, "LEADERS_STAND_MS", 0)
        await until(remarks)
        (told,) = await remarks()
        assert "`felix region rebalance --region us-east` evens them out" in told
        await client.rebalance()

        async def are_even() -> bool:
            moves = await client.rebalance(dry_run=True)
            return not (moves.total or moves.under_way or await remarks())

        await until(are_even)


async def test_a_rebalancing_is_ended_at_any_broker_and_what_moves_arrives(region: ClusteredRegion) -> None:
    names = [f"acme/ops/s{number}" for number in range(12)]
    async with region.client("b1") as client, region.client("b2") as other:

        async def all_stands() -> bool:
            state = await client.describe()
            return (
                len(state.brokers) == 4
                and not state.moving
                and all(each.in_sync == each.copies for each in state.brokers)
            )

        async def nothing_moves() -> bool:
            return not (await client.rebalance(dry_run=True)).under_way

        # The audit log gets its copies as brokers come.
        await until(all_stands)
        await until(nothing_moves)
        ended = await other.stop_rebalancing()
        assert not ended.is_asked
        await client.drain_broker("b4")
        for name in names:
            await client.create_stream(name, replicas=2)
        await until(all_stands)
        await client.drain_broker("b4", drain=False)
        begun = await client.rebalance()
        assert begun.is_asked and begun.total > 2
        # Another broker may not have heard of the word yet.
        ended = await other.stop_rebalancing(since=begun.revision)
        assert ended.is_asked and ended.total
        await until(nothing_moves)
        told = await client.rebalance(dry_run=True)
        assert not told.is_asked and told.total, "what had not begun stays where it is"
        assert not [each for each in (await client.describe()).remarks if "are being moved" in each]
        await until(all_stands)
        await asyncio.sleep(1)
        assert not (await client.rebalance(dry_run=True)).under_way
        # Asked for again, it goes on.
        await client.rebalance()

        async def all_is_even() -> bool:
            moves = await client.rebalance(dry_run=True)
            return not (moves.total or moves.under_way or moves.is_asked)

        await until(all_is_even)


async def test_a_broker_whose_folder_is_lost_gets_a_new_one_and_what_only_it_had_is_recovered_by_name(
    region: ClusteredRegion,
) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=4)
        await client.stream(STREAM).publish(b"x")
        # One copy each, on every broker.
        alone = [f"acme/ops/alone{number}" for number in range(8)]
        for name in alone:
            await client.create_stream(name)
            await client.stream(name).publish(b"x")
        lost = next(name for name in ("b4", "b3", "b2") if name != record_of(region).leader)
        (gone, *_) = [name for name in alone if region.leader("b1", name) == lost]
        config = region.config.of_broker(lost)
        await region.stop(lost)

        async def nobody_leads_what_only_it_had() -> bool:
            told = await client.rebalance(dry_run=True)
            return told.unled >= 1 and told.moved == 0

        await until(nobody_leads_what_only_it_had)
        shutil.rmtree(region.folder.root / config.data)
        with pytest.raises(RequestError, match="had another data folder"):
            await Node.start(region.folder, config)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind((config.listen.host, config.listen.port))
            with pytest.raises(AddressInUseError):
                await Node.start(region.folder, config, replace_folder=True)
        with pytest.raises(RequestError, match="had another data folder"):
            await Node.start(region.folder, config)
        region.nodes[lost] = await Node.start(region.folder, config, replace_folder=True)
        await until_it(region, settled(*NAMES))
        with pytest.raises(RequestError, match="leads the shard"):
            await client.recover_shard(STREAM, 0, lost)
        with pytest.raises(RequestError, match="is no living replica"):
            await client.recover_shard(gone, 0, "b1", lost=[lost])
        assert "in epoch" in await client.recover_shard(gone, 0, lost)
        assert await client.stream(gone).publish(b"y") == 0


async def test_a_shard_that_is_led_below_its_min_is_not_recovered_and_is_told_what_it_needs(
    region: ClusteredRegion,
) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3)
        await client.stream(STREAM).publish(b"x")
    record = record_of(region)
    for name in record.replicas:
        if name != record.leader:
            await region.stop(name)
    async with region.client(record.leader) as client:
        await until(lambda: len(record_of(region, record.leader).isr) == 1)
        with pytest.raises(RequestError, match="leads the shard") as refused:
            await client.recover_shard(STREAM, 0, record.leader)
    assert "once 2 copies are in sync, and 1 is" in refused.value.hint


async def test_two_drains_at_once_do_not_leave_too_few_brokers_between_them(region: ClusteredRegion) -> None:
    async with region.client("b1") as one, region.client("b2") as two:
        await one.create_stream(STREAM, replicas=3, min_in_sync=3)
        await region.heard()
        told = await asyncio.gather(one.drain_broker("b1"), two.drain_broker("b2"), return_exceptions=True)
        refused = [each for each in told if each is not None]
        assert len(refused) == 1 and "cannot all go" in str(refused[0])


async def test_a_broker_that_is_gone_for_good_is_retired_once_no_shard_names_it(
    region: ClusteredRegion,
) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3)
        await client.stream(STREAM).publish(b"x")
        gone = next(name for name in record_of(region).replicas if name != "b1")
        with pytest.raises(RequestError, match="b9 was never registered") as unknown:
            await client.retire_broker("b9")
        assert unknown.value.hint == "The region's brokers are b1, b2, b3, b4."
        with pytest.raises(RequestError, match="is alive"):
            await client.retire_broker(gone)
        await client.drain_broker(gone)
        async with asyncio.timeout(90):
            await region.clustered("b1").member.until(lambda: not copies(region, gone))
        await region.stop(gone)
        await region.heard()
        # Also where nobody hears that it was done.
        region.lose_answers("b1")
        await client.retire_broker(gone)
        assert gone not in {each.broker for each in (await client.describe()).brokers}


async def test_top_shows_what_goes_through_all_brokers(
    region: ClusteredRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(region.folder.root.parent))
    names = [f"acme/ops/s{number}" for number in range(4)]
    async with region.client("b1") as client, AsyncExitStack() as stack:
        for name in names:
            await client.create_stream(name, replicas=1)
        assert len({region.leader("b1", name) for name in names}) > 1
        brokers = _Brokers("us-east", "", client, stack)
        assert await brokers.look("", "", "in") is None
        for name in names:
            await client.stream(name).publish(b"record")
        found = await brokers.look("", "", "in")
        assert found is not None and found.broker == "b1, b2, b3, b4"
        assert sorted(each.stream for each in found.streams if each.in_records) == names
        # One that is away is left out.
        await region.stop("b4")
        async with asyncio.timeout(60):
            while found is None or found.broker != "b1, b2, b3":
                found = await brokers.look("", "", "in")


async def test_a_region_whose_metadata_store_is_away_says_that_it_has_no_controller(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """Nobody serves then, and what brokers last heard, the controller among it, is of before: every page says so."""
    async with serving(tmp_path, etcd, lease_ms=2_000) as region:

        def shown(name: str) -> list[tuple[float, float]]:
            found = [node.gauges.values() for node in region.nodes.values()]
            return [(each["ready"], each[name]) for each in found]

        missing = "cluster_controller_missing"
        await until(lambda: shown(missing) == [(1, 0)] * 3)
        etcd.kill()
        try:
            await until(lambda: shown(missing) == [(0, 1)] * 3)
            assert shown("cluster_brokers_away") == [(0, 0)] * 3, "nobody knows"
        finally:
            etcd.start()
        await until(lambda: shown(missing) == [(1, 0)] * 3)


async def test_a_broker_that_has_a_copy_of_the_audit_log_no_more_shows_none_of_its_leaves(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """What its disk has of it stays as it is: some of the newest leaves would never be cosigned there."""
    async with serving(tmp_path, etcd, count=4) as region:

        def shown(broker: str, name: str = "audit_leaves") -> float:
            return region.nodes[broker].gauges.values()[name]

        def copies() -> frozenset[str]:
            audit = region.clustered("b1").member.audit.stream
            return frozenset() if audit is None else region.clustered("b1").replicas_of(audit)

        await until(lambda: len(copies()) == 3 and region.clustered("b1").audit_home in region.nodes)
        home = region.clustered("b1").audit_home
        await until(lambda: region.clustered(home).has_audit_log)
        await region.nodes[home].services.governance.trail.append([key_leaf(0)])
        had = copies()
        await until(lambda: all(shown(broker) == 1 for broker in had))
        left = next(broker for broker in sorted(had) if broker != home)
        await region.drain(left)
        await until(lambda: left not in copies() and all(shown(broker) == 1 for broker in copies()))
        # As of an outside witness that has not cosigned the newest leaves.
        behind = SubmissionStatus("witness.example/w1", "https://witness.example", 0, 9_000, 0, "")
        for node in region.nodes.values():
            node.services.governance.witnessing._submissions = type(
                "One", (), {"status": lambda self: [behind]}
            )()  # type: ignore[assignment]
        await until(lambda: shown(left) == 0)
        assert {broker for broker in region.nodes if shown(broker, "audit_witness_lag_ms")} == copies()
        assert region.nodes[left].services.governance.trail.status().durable == 1
