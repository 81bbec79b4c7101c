"""What is on its way into a stream is waited for before its shards are opened again."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transaction_home import Plain

from felix.batch import NewRecord, encode_batch
from felix.errors import FelixError
from felix.names import SpiffeId, StreamName
from felix.storage.memory import MemoryDisk
from region.crossing.ingest import IngestService, IngestStream
from region.crossing.landings import ASKS_S, Landings
from region.limits.budget import Budgets
from region.log.directory import LogDirectory
from region.log.errors import StorageFailedError
from region.log.shard import Appended, ShardHooks, ShardLog, ShardSettings
from region.metadata.records import Stream, StreamConfig
from region.streams.hosted import HostedStream
from region.streams.table import StreamTable


class Feeding:
    def replaced(self) -> None:
        """Nobody else feeds it."""


async def test_a_stream_is_settled_once_nothing_is_on_its_way_into_it() -> None:
    landings, feeding = Landings(), Feeding()
    name, other = StreamName.parse("acme/ops/crew"), StreamName.parse("acme/ops/jobs")
    first, second = (landings.claim(name, shard, 7, feeding) for shard in range(2))
    first.begin(10)
    first.begin(20)
    second.begin(5)
    await landings.settled(other)
    settled = asyncio.ensure_future(landings.settled(name))
    for landing, base in ((first, 10), (second, 5), (first, 20)):
        await asyncio.sleep(0)
        assert not settled.done()
        landing.end(base)
    await settled


def test_records_wait_for_a_bridge_from_the_first_question_since_it_brought_something() -> None:
    landings, name = Landings(), StreamName.parse("acme/ops/crew")
    one, other = (SpiffeId("us-east", "acme", "bridge", each) for each in ("one", "other"))
    place = (name, 0, 7)
    asked = [landings.waits_s(*place, one, now_s) for now_s in (100.0, 104.0, 109.0)]
    assert asked == [0.0, 4.0, 9.0]
    assert landings.waits_s(name, 1, 7, one, 109.0) == 0.0, "each link shard by itself"
    landings.brought(*place)
    assert landings.waits_s(*place, one, 110.0) == 0.0
    # The other one took over, and stands still now.
    assert landings.waits_s(*place, other, 112.0) == 0.0
    assert landings.waits_s(*place, other, 115.0) == 3.0
    assert landings.waits_s(*place, other, 115.0 + ASKS_S + 1) == 0.0, "nobody stood by meanwhile"


def test_of_what_nobody_asks_any_more_nothing_is_remembered() -> None:
    landings, name = Landings(), StreamName.parse("acme/ops/crew")
    bridge = SpiffeId("us-east", "acme", "bridge", "one")
    for shard in range(100):
        landings.waits_s(name, shard, 7, bridge, shard * (ASKS_S + 1))
    assert len(landings._waits) == 1


def everything(_: object) -> bool:
    return True


async def test_whoever_ends_a_grant_waits_for_what_is_in_doubt_where_a_disk_has_failed() -> None:
    """Behind a revocation's leaf nothing may stand that arrived under the grant: a range whose write failed may be there once its shard is open again."""
    landings, feeding = Landings(), Feeding()
    name, other = StreamName.parse("acme/ops/crew"), StreamName.parse("acme/ops/jobs")
    landings.streams_opened()
    landing = landings.claim(name, 1, 7, feeding)
    landing.begin(10)
    draining = asyncio.ensure_future(landings.drained(everything, everything))
    await asyncio.sleep(0)
    landings.in_doubt(name, 1)
    landing.end(10)
    await asyncio.sleep(0.01)
    assert not draining.done(), "it was on its way, and is in doubt now"
    await landings.drained(everything, lambda each: each == other)
    landings.opened(name, [0])
    landings.opened(other)
    await asyncio.sleep(0.01)
    assert not draining.done(), "another shard, and another stream"
    landings.opened(name, [0, 1])
    await draining
    landings.in_doubt(name, 1)
    landings.opened(name)
    await landings.drained(everything, everything)


@pytest.mark.parametrize(("is_read_on", "is_deleted"), [(True, False), (False, False), (True, True)])
async def test_a_range_whose_write_failed_is_in_doubt_until_its_shard_has_its_leaves(
    is_read_on: bool, is_deleted: bool
) -> None:
    """By the code of an ingest stream, over a real log: not where its log was closed by then, which is open anew; nor where the stream is being deleted, which may have been
    told before the disk answered."""
    landings, disk = Landings(), MemoryDisk()
    landings.streams_opened()
    name = StreamName.parse("acme/ops/crew")
    directory = LogDirectory(Path("/data"), "eu-central", files=disk.mount())
    plain = Plain()
    hooks = ShardHooks(plain.seal, plain.open_batch, plain.commitment)
    shard = await directory.open_shard(name, bytes(16), 3, ShardSettings(), hooks)
    await shard.append(encode_batch([NewRecord(b"before")]))
    governance = SimpleNamespace(audit=None, arrivals=None)
    broker = SimpleNamespace(region="eu-central", mesh="acme", broker_id="b1")
    service: Any = IngestService(broker, governance, landings, None, None)  # type: ignore[arg-type]
    service.broker = SimpleNamespace(metrics=SimpleNamespace(refused=lambda error: None), budgets=Budgets())
    session = SimpleNamespace(
        send=lambda *_, **__: None, end_role=lambda _: None, hold_request=lambda _: None
    )
    stream: Any = IngestStream(service, session, 1)  # type: ignore[arg-type]
    stream._shard, stream._hosted = shard, SimpleNamespace(name=name, removed=is_deleted)
    stream._meter = SimpleNamespace(give_back=lambda charge: None)
    stream._landing = landings.claim(name, 3, 7, stream)
    stream._landing.begin(10)
    way: Any = SimpleNamespace(
        note=shard.take_note(b"its leaves"), charge=1, header=SimpleNamespace(base_offset=10)
    )

    def fail(call: str, path: Path) -> None:
        if call == "sync" and ".seg" in path.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    disk.on_call = fail
    answered = asyncio.Event()

    def appended(result: Appended | FelixError) -> None:
        assert isinstance(result, StorageFailedError)
        if is_read_on:
            stream._appended(way, result)
        answered.set()

    shard.append_nowait(encode_batch([NewRecord(b"arrived")]), appended, note=way.note)
    async with asyncio.timeout(10):
        await answered.wait()
    disk.on_call = None
    draining = asyncio.ensure_future(landings.drained(everything, everything))
    await asyncio.sleep(0.01)
    assert draining.done() is is_deleted
    await directory.close_shard(name, bytes(16), 3)
    if is_deleted:
        pass
    elif is_read_on:
        # Its sibling is served, and it is not yet.
        await service.settle(name, [])
        await asyncio.sleep(0.01)
        assert not draining.done()
        again = await directory.open_shard(name, bytes(16), 3, ShardSettings(), hooks)
        assert again.take_notes_found(), "what `settle` goes by"
        await service.settle(name, [again])
    else:
        stream._appended(way, shard.failure)
    await draining
    await directory.close()


@pytest.mark.parametrize(
    ("error", "is_waited_for"),
    [(errno.EIO, True), (errno.ENOSPC, True), (errno.EMFILE, True), (0, True), (errno.EIO, False)],
)
async def test_what_landed_in_a_shard_that_cannot_be_opened_at_a_start_is_waited_for(
    error: int, is_waited_for: bool
) -> None:
    """Whatever keeps it from being opened, for a moment or, where it is damaged, until a person comes: where nothing is noted in its folder, nobody waits."""
    landings, disk, loop = Landings(), MemoryDisk(), asyncio.get_running_loop()
    landings.streams_opened()
    governance: Any = SimpleNamespace(audit=None, arrivals=None)
    broker: Any = SimpleNamespace(region="eu-central", mesh="acme", broker_id="b1")
    service: Any = IngestService(broker, governance, landings, None, None)  # type: ignore[arg-type]
    record = Stream(name="acme/ops/crew", incarnation="ab" * 16, created_ms=1, config=StreamConfig(shards=2))

    async def start() -> tuple[StreamTable, LogDirectory, HostedStream]:
        directory = LogDirectory(Path("/data"), "eu-central", files=disk.mount())
        table = StreamTable(directory, Budgets().ring, lambda *_: Plain())
        table.before_found.append(service.settle)
        return table, directory, await table.open(record)

    table, directory, stream = await start()
    shard, answer = stream.shard(1), loop.create_future()
    note = shard.take_note(b"its leaves") if is_waited_for else None
    shard.append_nowait(encode_batch([NewRecord(b"arrived")], shard=1), answer.set_result, note=note)
    assert isinstance(await answer, Appended)
    await table.close()
    await directory.close()
    if not error:
        segment = next(each for each in disk.files() if "/00001/" in str(each) and each.suffix == ".seg")
        disk.flip(segment, 100)

    def fail(call: str, path: Path) -> None:
        if error and call in ("open", "names") and "/00001" in str(path):
            raise OSError(error, os.strerror(error), str(path))

    disk.on_call = fail
    table, directory, stream = await start()
    assert isinstance(stream.find(1), FelixError) and isinstance(stream.find(0), ShardLog)
    draining = asyncio.ensure_future(landings.drained(everything, everything))
    await asyncio.sleep(0.01)
    assert draining.done() is not is_waited_for
    landings.opened(stream.name, [0, 1])
    await draining
    disk.on_call = None
    await table.close()
    await directory.close()
