"""Streams of one copy whose disk fails for a moment: their logs are opened again in the same process, with all that was acknowledged, or stay stopped."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from long_runs import count
from transaction_home import Plain

from felix.batch import NewRecord, decode_batch, decode_records, encode_batch
from felix.errors import Code, FelixError, NotLeaderError, UnavailableError
from felix.frames import FRAME_HEADER_BYTES
from felix.names import StreamName
from felix.runtime.simulated import SimulatedLoop, simulated
from felix.settings import Deduplication, Durability, Views
from felix.storage.memory import MemoryDisk
from region.limits.budget import Budgets
from region.log.companions import JournalKind
from region.log.directory import LogDirectory
from region.log.message_ids import MessageIds
from region.log.shard import Appended, ShardLog
from region.metadata.records import Stream, StreamConfig
from region.streams.hosted import HostedStream
from region.streams.table import StreamTable

NAME = StreamName.parse("acme/payments/orders")
DATA = Path("/felix/data")
JOURNAL = JournalKind.QUEUE.number(0)


class Elections:
    """What a broker of several leads (region.streams.hosted.Leading): a stream of one copy, in one epoch or not."""

    epoch = 3

    def epochs(self, record: Stream) -> dict[int, int]:
        return dict.fromkeys(range(record.config.shards), self.epoch) if self.epoch else {}

    def leader_of(self, record: Stream, shard: int) -> str:
        return "b1" if self.epoch else "b2"

    def members(self, record: Stream, shard: int) -> tuple[list[str], list[str]]:
        return [], []

    def unclean(self, record: Stream, shard: int) -> int:
        return 0

    def copies(self, record: Stream, number: int) -> None:
        """One alone."""

    async def forget(self, incarnation: str) -> None:
        """There is nothing beside its folder."""

    def not_leader(self, record: Stream, shard: int) -> NotLeaderError:
        return NotLeaderError("Not here.", stream=record.name)


class Scene:
    """One broker's streams over a disk in memory, on a simulated loop."""

    def __init__(self, loop: SimulatedLoop, disk: MemoryDisk, elections: Elections | None = None) -> None:
        self.loop, self.disk = loop, disk
        runtime = simulated(loop, 1_800_000_000_000)
        self.budgets = Budgets()
        self.directory = LogDirectory(DATA, "us-east", files=disk.mount(), runtime=runtime)
        self.streams = StreamTable(
            self.directory, self.budgets.ring, lambda *_: Plain(), runtime=runtime, leading=elections
        )
        self.stream: HostedStream

    async def open(self, **config: Any) -> HostedStream:
        record = Stream(name=str(NAME), incarnation="ab" * 16, created_ms=1, config=StreamConfig(**config))
        self.stream = await self.streams.open(record)
        return self.stream

    def shard(self, number: int = 0) -> ShardLog:
        return self.stream.shard(number)

    async def publish(self, *payloads: bytes, shard: int = 0, sequence: int = -1) -> Appended:
        batch = encode_batch(
            [NewRecord(each) for each in payloads],
            shard=shard,
            producer_id=0 if sequence < 0 else 7,
            base_sequence=max(sequence, 0),
        )
        return await self.shard(shard).append(batch)

    async def records(self, number: int = 0, log: ShardLog | None = None) -> list[bytes]:
        log = self.shard(number) if log is None else log
        found: list[bytes] = []
        offset = log.log_start_offset
        while offset < log.high_watermark:
            for entry in await log.read(offset, 1 << 20):
                prefix = FRAME_HEADER_BYTES if log.identity.shard < 1 << 16 else 0
                found += [
                    bytes(record.payload) for record in decode_records(decode_batch(entry.data[prefix:]))
                ]
                offset = entry.next_offset
        return found

    def fail(self, *calls: str, of: str = "", times: int = 1, error: int = errno.EIO) -> None:
        """The next calls of these, of files with this in their path, fail so often."""
        left = times

        def on_call(call: str, path: Path) -> None:
            nonlocal left
            if call in calls and of in str(path) and left:
                left -= 1
                raise OSError(error, os.strerror(error), str(path))

        self.disk.on_call = on_call

    async def until(self, holds: Callable[[], object], within_s: float = 60) -> None:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def contents(disk: MemoryDisk, folder: Path) -> dict[Path, bytes]:
    """The files of a log, as they are read."""
    found, files = {}, disk.mounted
    for path in [each for each in disk.files() if each.parent == folder]:
        descriptor = files.open(path, os.O_RDONLY)
        found[path] = files.pread(descriptor, files.size(descriptor), 0)
        files.close(descriptor)
    return found


def rewrite(disk: MemoryDisk, folder: Path, wanted: dict[Path, bytes]) -> None:
    for path in contents(disk, folder):
        disk.mounted.remove(path)
    for path, data in wanted.items():
        descriptor = disk.mounted.open(path, os.O_RDWR | os.O_CREAT)
        disk.mounted.pwritev(descriptor, (data,), 0)
        disk.mounted.close(descriptor)


def play(
    scene: Callable[[Scene], Coroutine[Any, Any, None]], seed: int = 1, elections: Elections | None = None
) -> None:
    """The scene; then the power goes, and what is there at the next start is what was read last, where all was acknowledged after a sync."""
    loop, disk = SimulatedLoop(Random(seed)), MemoryDisk()

    async def run() -> None:
        made = Scene(loop, disk, elections)
        await scene(made)
        expected = [await made.records(number) for number in range(made.stream.shard_count)]
        config = made.stream.record.config
        disk.lose_power(loop.random)
        after = Scene(loop, disk)
        await after.open(shards=config.shards, durability=config.durability)
        found = [await after.records(number) for number in range(config.shards)]
        assert found == expected
        await after.streams.close()
        await after.directory.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


@pytest.mark.parametrize("seed", range(count(3, 60)))
@pytest.mark.parametrize("call", ["sync", "pwritev"])
def test_a_shard_whose_disk_fails_once_is_served_again_without_a_restart(
    call: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What the failed call left in the page cache is written anew: the power goes afterwards."""

    async def scene(made: Scene) -> None:
        stream = await made.open()
        told: list[bool] = []
        made.streams.on_change(lambda each: told.append(each.ceased))
        await made.publish(b"first")
        failed, epoch = made.shard(), made.shard().epochs.current
        made.fail(call)
        with pytest.raises(UnavailableError) as refused:
            await made.publish(b"in doubt")
        assert refused.value.code is Code.SHARD_STOPPED and refused.value.retry_after_ms
        assert "opened again by itself" in "".join(made.streams.disks.problems())
        await made.until(lambda: made.streams.reopener.opened)
        assert made.shard() is not failed and told == [True, False]
        assert not made.streams.disks.problems() and not stream.left
        await made.publish(b"last")
        assert made.shard().epochs.current == epoch, "it is the same log"
        assert await made.records() in ([b"first", b"last"], [b"first", b"in doubt", b"last"])

    caplog.set_level(logging.WARNING, "felix.region.streams")
    play(scene, seed)
    assert sum("are open again" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("seed", range(count(2, 30)))
@pytest.mark.parametrize("call", ["pwritev", "sync", "sync_folder", "rename", "open", "truncate", "pread"])
def test_whatever_call_fails_once_nobody_has_to_restart_the_broker(call: str, seed: int) -> None:
    """Of two shards, with what is published asked for again until it is answered; also while they are opened again."""

    async def scene(made: Scene) -> None:
        await made.open(shards=2)
        random, acknowledged = made.loop.random, [list[bytes](), list[bytes]()]

        async def publish(number: int, sequence: int) -> None:
            payload = b"%d" % sequence
            while True:
                try:
                    await made.publish(payload, shard=number, sequence=sequence)
                    break
                except UnavailableError:
                    await asyncio.sleep(0.2)
            acknowledged[number].append(payload)

        for sequence in range(40):
            if sequence % 8 == 4:
                seen, which = 0, random.randrange(1, 12)

                def on_call(called: str, path: Path, which: int = which) -> None:
                    nonlocal seen
                    if called == call:
                        seen += 1
                        if seen == which:
                            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

                made.disk.on_call = on_call
            await asyncio.gather(publish(0, sequence), publish(1, sequence))
        made.disk.on_call = None
        await made.until(lambda: len(made.stream.serving) == 2 and not made.streams.disks.problems(), 700)
        assert [await made.records(0), await made.records(1)] == acknowledged

    play(scene, seed)


@pytest.mark.parametrize("interval", [False, True])
def test_what_a_producer_sends_again_is_known_where_its_write_had_failed(interval: bool) -> None:
    """It may stand there or not; either way it stands there once afterwards, in the order of its sequence."""
    answers = set()
    for seed in range(12):

        async def scene(made: Scene, seed: int = seed) -> None:
            await made.open(durability=Durability("interval", 50) if interval else Durability("fsync"))
            await made.publish(b"0", sequence=0)
            made.fail("sync" if seed % 2 else "pwritev", of=".seg")
            with pytest.raises(UnavailableError):
                await made.publish(b"1", sequence=1)
                await made.until(lambda: made.shard().failure, 5)
                await made.publish(b"2", sequence=2)
            await made.until(lambda: made.streams.reopener.opened)
            again = await made.publish(b"1", sequence=1)
            answers.add(again.duplicate)
            assert again.base_offset == 1
            await made.publish(b"2", sequence=2)
            assert await made.records() == [b"0", b"1", b"2"]
            await made.until(lambda: made.shard().synced_offset == 3)

        play(scene, seed)
    assert True in answers


def test_a_disk_that_stays_broken_is_tried_seldom_and_disturbs_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(made: Scene) -> None:
        stream = await made.open(shards=2)
        await made.publish(b"a", shard=0)
        await made.publish(b"b", shard=1)
        made.fail("sync", "open", of="/00000/", times=10**9)
        with pytest.raises(UnavailableError):
            await made.publish(b"refused", shard=0)
        other = made.shard(1)
        await asyncio.sleep(300)
        assert made.shard(1) is other and not made.streams.reopener.opened
        await made.publish(b"c", shard=1)
        with pytest.raises(UnavailableError, match="opened again by itself"):
            await made.publish(b"refused", shard=0)
        tries = [line for line in caplog.messages if "cannot be opened again" in line]
        assert 3 <= len(tries) <= 7, tries
        assert "acme/payments/orders shard 0)" in "".join(made.streams.disks.problems())
        assert stream.describe(detail=True).state[0].stopped
        made.disk.on_call = None
        await made.until(lambda: made.streams.reopener.opened, 700)
        await made.publish(b"d", shard=0)
        assert await made.records(0) in ([b"a", b"d"], [b"a", b"refused", b"d"])
        assert await made.records(1) == [b"b", b"c"]

    caplog.set_level(logging.WARNING, "felix.region.streams")
    play(scene)


@pytest.mark.parametrize("what", ["damaged", "older"])
def test_a_shard_that_has_not_what_it_acknowledged_stays_stopped_and_says_so(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nothing on its disk tells that: what this process had acknowledged does."""

    async def scene(made: Scene) -> None:
        stream = await made.open(shards=2)
        await made.publish(b"a")
        folder = made.directory.shard_folder(NAME, bytes.fromhex(stream.record.incarnation), 0)
        older = contents(made.disk, folder)
        await made.publish(b"b" * 500)
        made.fail("sync", of="/00000/")
        with pytest.raises(UnavailableError):
            await made.publish(b"in doubt")
        made.disk.on_call = None
        if what == "older":
            rewrite(made.disk, folder, older)
        else:
            segment = next(
                each for each in made.disk.files() if each.parent == folder and each.suffix == ".seg"
            )
            made.disk.flip(segment, 8 * 300)
        await made.until(lambda: "not all there any more" in "".join(made.streams.disks.problems()))
        await asyncio.sleep(1_000)
        assert not made.streams.reopener.opened and not made.streams.reopener.is_waiting(stream)
        with pytest.raises(FelixError) as refused:
            await made.publish(b"refused")
        assert refused.value.code is Code.SHARD_STOPPED and refused.value.retry_after_ms is None
        await made.publish(b"other", shard=1)
        assert "not all there any more" in "".join(made.streams.disks.problems())
        assert sum("not opened again before a restart" in line for line in caplog.messages) >= 1
        raise StoppedScene

    caplog.set_level(logging.WARNING, "felix.region.streams")
    with pytest.raises(StoppedScene):
        play(scene)


class StoppedScene(Exception):
    """There is nothing to be read at the end."""


def test_a_journal_whose_disk_fails_is_opened_again_with_its_stream() -> None:
    """What a view keeps beside the shards: it is closed with them, and opens the same log again."""

    async def scene(made: Scene) -> None:
        stream = await made.open()
        closed: list[str] = []

        async def close() -> None:
            closed.append("closed")

        journal = await made.streams.open_companion(stream, JOURNAL)
        assert journal is not None
        stream.closing.append(close)
        await journal.append(encode_batch([NewRecord(b"kept")]))
        await made.publish(b"a")
        made.fail("sync", of=f"/{JOURNAL:05}/")
        with pytest.raises(UnavailableError):
            await journal.append(encode_batch([NewRecord(b"in doubt")]))
        await made.publish(b"b")
        assert not closed
        await made.until(lambda: made.streams.reopener.opened)
        assert closed and made.streams.disks.problems() == []
        again = await made.streams.open_companion(stream, JOURNAL)
        assert again is not None and again is not journal
        assert (await made.records(log=again))[0] == b"kept"
        await again.append(encode_batch([NewRecord(b"more")]))
        assert await made.records() == [b"a", b"b"]

    play(scene)


def test_one_copy_at_one_of_several_brokers_is_led_on_in_its_epoch_where_it_still_leads() -> None:
    elections = Elections()

    async def scene(made: Scene) -> None:
        stream = await made.open()
        await made.publish(b"a")
        made.fail("sync")
        with pytest.raises(UnavailableError):
            await made.publish(b"in doubt")
        await made.until(lambda: made.streams.reopener.opened)
        assert stream.epochs == {0: 3} and made.shard().epochs.current == 3
        await made.publish(b"b")
        made.fail("sync")
        with pytest.raises(UnavailableError):
            await made.publish(b"in doubt, too")
        elections.epoch = 0
        with pytest.raises(UnavailableError, match="has failed"):
            # It is not to be copied before it is seen whether all is there.
            await made.streams.release(NAME)
        await asyncio.sleep(20)
        assert not stream.replicas and not made.streams.reopener.is_waiting(stream)
        assert isinstance(stream.elsewhere, NotLeaderError)
        elections.epoch = 8
        await made.streams.reassign(NAME)
        assert made.shard().epochs.current == 8 and not stream.left
        await made.streams.release(NAME)
        await made.publish(b"c")
        found = [each for each in await made.records() if not each.startswith(b"in doubt")]
        assert found == [b"a", b"b", b"c"]

    play(scene, elections=elections)


def test_what_arrived_and_waits_for_its_leaf_is_told_before_anybody_reads_it() -> None:
    """Of a shard that is opened again: its notes are there, and what they are for is read once that is done."""

    async def scene(made: Scene) -> None:
        found: list[bytes] = []

        async def prepare(_: StreamName, shards: Sequence[ShardLog], __: Sequence[int]) -> None:
            for shard in shards:
                found.extend(note.data for note in shard.take_notes_found())
                await shard.clear_notes()

        made.streams.before_found.append(prepare)
        await made.open()
        failed = made.shard()
        note = failed.take_note(b"its leaf")
        landed: list[Appended | FelixError] = []
        failed.append_nowait(encode_batch([NewRecord(b"arrived")]), landed.append, note=note)
        await made.until(lambda: landed)
        assert isinstance(landed[0], Appended) and failed.high_watermark == 0
        made.fail("sync", of=".seg")
        with pytest.raises(UnavailableError):
            await made.publish(b"in doubt")
        await made.until(lambda: made.streams.reopener.opened)
        assert found == [b"its leaf"]
        assert (await made.records())[0] == b"arrived"
        failed.release_note(note)
        assert failed.ring_bytes == 0, "of the log that is closed nothing is shown any more"

    play(scene)


def test_a_stream_is_gone_that_is_deleted_while_its_disk_fails() -> None:
    async def scene(made: Scene) -> None:
        stream = await made.open()
        await made.publish(b"a")
        made.fail("sync", "open", of="/00000/", times=10**9)
        with pytest.raises(UnavailableError):
            await made.publish(b"refused")
        await asyncio.sleep(20)
        await made.streams.remove(NAME, stream.record.incarnation)
        assert not made.streams.reopener.is_waiting(stream) and not list(made.streams)
        await asyncio.sleep(1_000)
        assert made.budgets.ring.used_bytes == 0 and not made.directory.stored()
        raise StoppedScene

    with pytest.raises(StoppedScene):
        play(scene)


def test_what_is_closed_to_be_served_again_is_on_the_disk_where_the_broker_ends_meanwhile() -> None:
    """One shard has failed; the other is closed with it, on a slow disk, with what was acknowledged and not synced yet."""
    durability, interrupted = Durability("interval", 3_600_000), 0
    for seed in range(12):
        loop, disk = SimulatedLoop(Random(seed)), MemoryDisk()

        async def run(loop: SimulatedLoop = loop, disk: MemoryDisk = disk) -> bool:
            made, acknowledged, is_over = Scene(loop, disk), list[bytes](), False
            await made.open(shards=2, durability=durability)

            async def publish() -> None:
                while not is_over:
                    payload = b"%d" % len(acknowledged)
                    try:
                        await made.publish(payload, shard=1)
                        acknowledged.append(payload)
                    except FelixError:
                        await asyncio.sleep(0.05)

            publishing = asyncio.ensure_future(publish())
            made.fail("pwritev", of="/00000/")
            with pytest.raises(UnavailableError):
                await made.publish(b"in doubt", shard=0)
            made.disk.on_call = None
            await asyncio.sleep(4.9)
            loop.work_s_max = 0.5
            await made.until(lambda: not made.stream.replicas)
            await made.streams.close()
            await made.directory.close()
            is_over = True
            await publishing
            disk.lose_power(loop.random)
            after = Scene(loop, disk)
            await after.open(shards=2, durability=durability)
            assert (await after.records(1))[: len(acknowledged)] == acknowledged and acknowledged
            await after.streams.close()
            await after.directory.close()
            return not made.streams.reopener.opened

        try:
            interrupted += loop.run_until_complete(run())
        finally:
            loop.close()
    assert interrupted


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOSPC])
def test_a_sibling_that_finds_no_descriptors_or_room_as_its_stream_is_served_again_is_tried_again(
    error: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What serves is closed with what had failed; of that, no restart is needed either."""

    async def scene(made: Scene) -> None:
        stream = await made.open(shards=2)
        told: list[list[int]] = []
        made.streams.on_change(lambda each: told.append(each.unopened))
        for number in range(2):
            await made.publish(b"first", shard=number)
        made.fail("sync", of="/00000")
        with pytest.raises(UnavailableError):
            await made.publish(b"in doubt")
        cease = made.streams._cease

        async def cease_and_lack(each: HostedStream) -> None:
            await cease(each)
            made.fail("open", of="/00001", error=error)

        made.streams._cease = cease_and_lack  # type: ignore[method-assign]
        await made.until(lambda: made.streams.reopener.opened)
        made.streams._cease = cease  # type: ignore[method-assign]
        assert stream.unopened == [1] and told[-1] == [1]
        (problem,) = made.streams.disks.problems()
        assert "shard 1" in problem
        refused = stream.find(1)
        assert isinstance(refused, UnavailableError) and refused.retry_after_ms
        assert not any("its logs are open again" in line for line in caplog.messages)
        # What the follower does, which is told of it.
        await made.streams.open(stream.record)
        assert not stream.unopened and not made.streams.disks.problems() and not stream.left
        for number in range(2):
            await made.publish(b"last", shard=number)

    play(scene)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
def test_a_shard_that_cannot_be_read_as_it_is_opened_is_tried_again(error: int) -> None:
    """Its message ids are read from the records, which is no part of its recovery."""

    async def scene(made: Scene) -> None:
        config: dict[str, Any] = {"views": Views(deduplication=Deduplication())}
        stream = await made.open(**config)
        await made.publish(b"first")
        await made.streams.close()
        made.streams = StreamTable(
            made.directory,
            made.budgets.ring,
            lambda *_: Plain(),
            runtime=simulated(made.loop, 1_800_000_000_000),
        )
        read_ids = ShardLog._read_ids

        async def fail_first(shard: ShardLog, window: MessageIds) -> None:
            made.fail("pread" if error == errno.EIO else "open", of="/00000", error=error)
            await read_ids(shard, window)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ShardLog, "_read_ids", fail_first)
            stream = await made.open(**config)
        assert stream.unopened == [0] and made.streams.disks.problems()
        await made.open(**config)
        assert not stream.unopened
        await made.publish(b"last")

    play(scene)


@pytest.mark.parametrize("is_mounted_over", [False, True])
def test_a_folder_that_is_away_for_a_while_is_not_begun_anew(is_mounted_over: bool) -> None:
    """A file system that was unmounted, or another one mounted over it: what is acknowledged meanwhile would be there, and a log that is opened would have lost all."""

    async def scene(made: Scene) -> None:
        stream = await made.open(shards=2)
        for number in range(2):
            await made.publish(b"first", shard=number)
        files, away = made.disk.mounted, DATA.with_name("away")
        files.rename(DATA, away)
        if is_mounted_over:
            files.make_folder(DATA)
        made.fail("sync", of="/00000")
        with pytest.raises(UnavailableError):
            await made.publish(b"in doubt")
        other = StreamName.parse("acme/payments/other")
        record = Stream(name=str(other), incarnation="cd" * 16, created_ms=1, config=StreamConfig())
        new = await made.streams.open(record)
        await asyncio.sleep(60)
        assert not made.streams.reopener.opened and not new.serving and stream.failed == [0]
        for each in (stream, new):
            refused = each.find(0)
            assert isinstance(refused, UnavailableError) and "Put it back" in str(refused)
        assert not files.exists(DATA) or not files.names(DATA), "nothing is written there"
        # What is open goes on where it was opened.
        await made.publish(b"second", shard=1)
        if is_mounted_over:
            files.remove_folder(DATA)
        files.rename(away, DATA)
        await made.until(lambda: made.streams.reopener.opened == 2, within_s=1_200)
        assert not made.streams.disks.problems() and not stream.left
        for number in range(2):
            await made.publish(b"last", shard=number)
        assert await made.records(1) == [b"first", b"second", b"last"]
        await made.streams.remove(other, record.incarnation)

    play(scene)
