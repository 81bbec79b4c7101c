"""The shard on the event loop: group commit, failures, disk full, readers, retention, producers across restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from log.building import (
    IDENTITY,
    SMALL,
    FailingFiles,
    batch_of,
    first_segment,
    flip,
    masked,
    payloads_of,
    serving,
    until,
)
from msgspec.structs import replace
from runtimes import with_wall
from small_disk import small_disk

from felix.batch import BATCH_BYTES_MAX, Batch, BatchHeader, body_checksum
from felix.errors import (
    Code,
    CorruptionError,
    FelixError,
    OffsetMismatchError,
    RequestError,
    UnavailableError,
)
from felix.names import StreamName
from felix.settings import EPHEMERAL, Durability, Retention
from felix.storage.disk import DiskFiles
from keys.envelope import BatchSealer, DataKey, open_batch
from keys.key_id import KeyKind, new_key_id
from region.log.disk_reader import READ_FAILURES_MAX
from region.log.errors import OffsetOutOfRangeError
from region.log.point import LogPoint
from region.log.segment import ANNOTATION_BYTES_MAX, ANNOTATION_SLOTS_MAX
from region.log.segment_limits import SegmentLimits
from region.log.shard import TRANSITIONS, Appended, Event, ShardHooks, ShardLog, ShardSettings, State

pytestmark = pytest.mark.timeout(60)


async def read_all(shard: ShardLog, start: int | None = None) -> list[bytes]:
    offset = shard.log_start_offset if start is None else start
    found: list[bytes] = []
    while entries := await shard.read(offset, 10_000):
        found += payloads_of(entries, offset)
        offset = entries[-1].next_offset
    return found


async def test_group_commit_serves_many_appends_with_few_syncs_and_keeps_their_order(tmp_path: Path) -> None:
    files = FailingFiles()
    async with serving(tmp_path, files=files) as shard:
        files.syncs = 0
        answers = await asyncio.gather(*(shard.append(batch_of(b"%d" % number)) for number in range(1_000)))
        assert [answer.base_offset for answer in answers] == list(range(1_000))
        assert files.syncs == shard.counters.syncs <= 10
        assert shard.counters.batches == shard.counters.records == 1_000
        assert shard.pending_bytes == 0
        assert await read_all(shard) == [b"%d" % number for number in range(1_000)]


async def test_acknowledgement_comes_after_the_sync_and_before_it_nobody_reads(tmp_path: Path) -> None:
    files = FailingFiles()
    events: list[str] = []

    class Watched(FailingFiles):
        def sync(self, descriptor: int) -> None:
            super().sync(descriptor)
            if self._is_segment(descriptor):
                events.append("synced")

    files = Watched()
    async with serving(tmp_path, files=files) as shard:
        events.clear()
        shard.subscribe_tail(lambda: events.append(f"tail {shard.high_watermark}"))
        shard.append_nowait(batch_of(b"one"), lambda answer: events.append(f"acknowledged {answer!r}"))
        assert shard.log_end_offset == 1 and shard.high_watermark == 0
        assert shard.read_hot(0, 100) == []
        await until(lambda: len(events) >= 3)
        assert events[0] == "synced"
        assert events[1].startswith("acknowledged Appended(base_offset=0")
        assert events[2] == "tail 1"


async def test_interval_acknowledges_after_the_write_and_syncs_later(tmp_path: Path) -> None:
    files = FailingFiles()
    settings = ShardSettings(durability=Durability("interval", 20))
    async with serving(tmp_path, settings, files=files) as shard:
        files.syncs = 0
        for number in range(50):
            await shard.append(batch_of(b"%d" % number))
        assert files.syncs < 50
        await until(lambda: shard.counters.syncs > 0)
    async with serving(tmp_path, settings) as shard:
        assert len(await read_all(shard)) == 50


async def test_ephemeral_answers_at_once_and_touches_no_disk() -> None:
    settings = ShardSettings(durability=EPHEMERAL, ring_bytes_max=1_000, first_offset=500)
    async with serving(None, settings) as shard:
        answers: list[Appended | FelixError] = []
        tails: list[int] = []
        shard.subscribe_tail(lambda: tails.append(shard.high_watermark))
        for number in range(20):
            shard.append_nowait(batch_of(b"%d" % number), answers.append)
        assert [answer.base_offset for answer in answers if isinstance(answer, Appended)] == list(
            range(500, 520)
        )
        await asyncio.sleep(0)
        assert tails == [520], "one wake-up for what one event loop iteration appended"
        assert shard.ring_bytes <= 1_000
        with pytest.raises(OffsetOutOfRangeError) as gap:
            shard.read_hot(500, 100)
        assert gap.value.first_offset == shard.log_start_offset > 500
        assert await read_all(shard) == [b"%d" % (at - 500) for at in range(shard.log_start_offset, 520)]


async def test_failed_sync_stops_the_shard_and_is_never_retried(tmp_path: Path) -> None:
    files = FailingFiles()
    async with serving(tmp_path, files=files) as shard:
        await shard.append(batch_of(b"kept"))
        files.sync_error = errno.EIO
        answers = await asyncio.gather(
            *(shard.append(batch_of(b"lost %d" % number)) for number in range(20)), return_exceptions=True
        )
        assert all(
            isinstance(answer, UnavailableError) and answer.code is Code.SHARD_STOPPED for answer in answers
        )
        failed_syncs = files.syncs
        files.sync_error = 0
        with pytest.raises(UnavailableError):
            await shard.append(batch_of(b"later"))
        with pytest.raises(UnavailableError):
            await shard.read(0, 100)
        assert files.syncs == failed_syncs
        assert shard.state is State.FAILED
    assert files.syncs == failed_syncs, "closing does not try again either"
    async with serving(tmp_path) as shard:
        assert (await read_all(shard))[0] == b"kept"


async def test_failed_sync_of_an_interval_shard_stops_it_loudly(tmp_path: Path) -> None:
    files = FailingFiles()
    settings = ShardSettings(durability=Durability("interval", 5))
    async with serving(tmp_path, settings, files=files) as shard:
        files.sync_error = errno.EIO
        woken = asyncio.Event()
        await shard.append(batch_of(b"one"))
        shard.subscribe_tail(woken.set)
        await asyncio.wait_for(woken.wait(), 20)
        assert shard.state is State.FAILED
        with pytest.raises(UnavailableError):
            await shard.append(batch_of(b"two"))


async def test_failed_write_stops_the_shard(tmp_path: Path) -> None:
    files = FailingFiles()
    async with serving(tmp_path, files=files) as shard:
        files.write_error = errno.EIO
        with pytest.raises(UnavailableError) as stopped:
            await shard.append(batch_of(b"one"))
        assert stopped.value.code is Code.SHARD_STOPPED
        assert shard.state is State.FAILED


async def test_full_disk_refuses_rolls_back_reads_on_and_resumes(tmp_path: Path) -> None:
    files = FailingFiles()
    async with serving(tmp_path, files=files) as shard:
        await shard.append(batch_of(b"before", producer=9))
        held = shard.disk_bytes
        files.room = 70
        refused = await asyncio.gather(
            *(shard.append(batch_of(b"x" * 50, producer=9, sequence=1 + at)) for at in range(30)),
            return_exceptions=True,
        )
        assert {error.code for error in refused if isinstance(error, FelixError)} == {Code.DISK_FULL}
        assert len(refused) == 30 and shard.state is State.FULL
        assert first_segment(tmp_path).stat().st_size == held, "the partial write is gone"
        assert await read_all(shard) == [b"before"]
        assert (shard.log_end_offset, shard.pending_bytes) == (1, 0)
        files.room = None
        while True:
            try:
                answer = await shard.append(batch_of(b"after", producer=9, sequence=1))
                break
            except UnavailableError as error:
                assert error.code is Code.DISK_FULL and error.retry_after_ms
                await asyncio.sleep(0.02)
        assert answer.base_offset == 1 and not answer.duplicate
        assert shard.state is State.SERVING
    async with serving(tmp_path) as shard:
        assert await read_all(shard) == [b"before", b"after"]
        assert shard.report.cut_bytes == 0


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "256k") as folder:
        yield folder


def grow(file_system: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", file_system], check=True)


async def test_real_full_file_system(small_file_system: Path) -> None:
    folder = small_file_system / "shard"
    async with serving(folder) as shard:
        count = 0
        with pytest.raises(UnavailableError) as full:
            while True:
                await shard.append(batch_of(b"%06d" % count * 500))
                count += 1
        assert full.value.code is Code.DISK_FULL and count > 10
        assert len(await read_all(shard)) == count
        with pytest.raises(UnavailableError):
            await shard.append(batch_of(b"still full" * 500))
        grow(small_file_system)
        while shard.state is State.FULL:
            await asyncio.gather(shard.append(batch_of(b"room")), return_exceptions=True)
            await asyncio.sleep(0.02)
        assert len(await read_all(shard)) == count + 1
    async with serving(folder) as shard:
        assert len(await read_all(shard)) == count + 1


async def test_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with serving(tmp_path) as shard:
        await shard.append(batch_of(b"one"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (shard.disk_bytes + 100, hard))
        try:
            with pytest.raises(UnavailableError) as full:
                await shard.append(batch_of(b"x" * 1_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert full.value.code is Code.DISK_FULL
        assert await read_all(shard) == [b"one"]


async def test_one_receiver_that_fails_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))

    def broken(_: object) -> None:
        raise ValueError("a mistake of the caller's")

    async with serving(tmp_path) as shard:
        shard.subscribe_tail(lambda: broken(None))
        shard.append_nowait(batch_of(b"one"), broken)
        assert (await shard.append(batch_of(b"two"))).base_offset == 1
    assert len(reported) == 2


async def test_pending_bytes_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path, ShardSettings(pending_bytes_max=1_000)) as shard:
        answers = await asyncio.gather(
            *(shard.append(batch_of(b"x" * 100)) for _ in range(20)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, FelixError)]
        assert 0 < len(refused) < 20
        assert {error.code for error in refused} == {Code.LIMIT_MEMORY}
        assert shard.counters.refused_memory == len(refused)
        assert (await shard.append(batch_of(b"later"))).base_offset == 20 - len(refused)


async def test_batches_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as shard:
        huge = batch_of(b"x" * (BATCH_BYTES_MAX - 120))
        with pytest.raises(RequestError) as large:
            await shard.append(huge)
        assert large.value.code is Code.BATCH_TOO_LARGE
        with pytest.raises(RequestError):
            await shard.append(None)
        with pytest.raises(RequestError):
            await shard.append(batch_of(b"x"), annotation=bytes(ANNOTATION_BYTES_MAX + 1))
        sealed = batch_of(b"x")
        with pytest.raises(RequestError):
            await shard.append(sealed.with_header(replace(sealed.header, flags=2)))
        await asyncio.gather(
            *(shard.append(None, annotation=b"at", slot=slot) for slot in range(ANNOTATION_SLOTS_MAX))
        )
        with pytest.raises(RequestError):
            await shard.append(None, annotation=b"at", slot=ANNOTATION_SLOTS_MAX)
        freed: list[Appended | FelixError] = []
        shard.free_slot_nowait(5, freed.append)
        shard.free_slot_nowait(5, freed.append)
        await until(lambda: len(freed) == 2)
        await shard.append(None, annotation=b"at", slot=ANNOTATION_SLOTS_MAX)


async def test_body_that_does_not_fit_its_header_never_reaches_the_log(tmp_path: Path) -> None:
    good = batch_of(b"payload")
    other = Batch(good.header, bytes(len(good.body)))
    shorter = Batch(good.header, good.body[:-1])
    empty = Batch(replace(good.header, body_length=0, body_checksum=body_checksum(b"")), b"")
    async with serving(tmp_path, ShardSettings(ring_bytes_max=1)) as shard:
        for bad in (other, shorter):
            with pytest.raises(RequestError) as malformed:
                await shard.append(bad)
            assert malformed.value.code is Code.BATCH_MALFORMED
        await shard.append(empty)
        await shard.append(good)
        assert len(await shard.read(0, 1_000)) == 2, "a body without bytes is read back as it was"
    async with serving(tmp_path) as shard:
        assert shard.high_watermark == 2


async def test_what_is_sealed_on_disk_is_delivered_plain_hot_and_cold(tmp_path: Path) -> None:
    hooks = ShardHooks(
        seal=masked, open_batch=masked, commitment=lambda: b"key", frame_prefix=lambda _: b"PFX"
    )
    settings = ShardSettings(ring_bytes_max=1)
    async with serving(tmp_path, settings, hooks) as shard:
        for number in range(20):
            await shard.append(batch_of(b"secret %d" % number))
        cold = await shard.read(0, 1)
        hot = shard.read_hot(19, 1)
        assert shard.read_hot(0, 1) is None and hot is not None
        for entry, number in ((cold[0], 0), (hot[0], 19)):
            assert entry.data[:3] == b"PFX"
            assert payloads_of([replace(entry, data=entry.data[3:])]) == [b"secret %d" % number]
        sealed = await shard.read_sealed(0, 100_000)
        assert [entry.base_offset for entry in sealed] == list(range(20))
        assert b"secret" not in b"".join(entry.data for entry in sealed)
    assert b"secret" not in first_segment(tmp_path).read_bytes()


async def test_only_what_is_synced_is_read_sealed_and_the_tail_hears_of_it(tmp_path: Path) -> None:
    interval = ShardSettings(Durability("interval", 60_000))
    async with serving(tmp_path, interval) as shard:
        await shard.append(batch_of(b"0"))
        assert (shard.high_watermark, shard.synced_offset) == (1, 0)
        assert len(await shard.read(0, 1_000)) == 1, "whoever reads within the region sees it at once"
        assert await shard.read_sealed(0, 1_000) == []
        heard: list[int] = []
        unsubscribe = shard.subscribe_tail(lambda: heard.append(shard.synced_offset))
        assert shard._files is not None
        shard._files.sync_soon()
        await until(lambda: 1 in heard)
        unsubscribe()
        assert [entry.base_offset for entry in await shard.read_sealed(0, 1_000)] == [0]
        await shard.append(batch_of(b"1", b"2"))
        assert [entry.base_offset for entry in await shard.read_sealed(0, 1_000)] == [0]
        assert await shard.read_sealed(1, 1_000) == []
    async with serving(tmp_path, interval) as shard:
        assert shard.synced_offset == 3, "recovery syncs what it lets stand"
        assert len(await shard.read_sealed(0, 1_000)) == 2


async def test_real_seal_across_epochs_and_restart(tmp_path: Path) -> None:
    stream = StreamName.parse(IDENTITY.stream)
    keys: dict[bytes, DataKey] = {}
    sealers: dict[int, BatchSealer] = {}
    for epoch in (0, 1):
        key = DataKey(
            new_key_id("us-east", KeyKind.DATA, bytes([epoch]) * 11),
            *("us-east", stream, IDENTITY.incarnation, IDENTITY.shard, epoch, bytes([epoch]) * 32),
        )
        keys[key.key_id], sealers[epoch] = key, BatchSealer(key)

    hooks = ShardHooks(
        seal=lambda batch: sealers[batch.header.leader_epoch].seal(batch),
        open_batch=lambda batch: open_batch(keys[batch.header.key_id], batch),
        commitment=lambda: next(iter(keys.values())).commitment(),
    )
    async with serving(tmp_path, ShardSettings(ring_bytes_max=1), hooks) as shard:
        await asyncio.gather(*(shard.append(batch_of(b"%d" % number)) for number in range(50)))
        await shard.begin_epoch(1)
        await asyncio.gather(*(shard.append(batch_of(b"%d" % number)) for number in range(50, 100)))
        assert await read_all(shard) == [b"%d" % number for number in range(100)]
        hot, cold = shard.read_hot(99, 1), await shard.read(98, 1)
        assert hot and payloads_of(hot + cold) == [b"99", b"98"]
    async with serving(tmp_path, hooks=hooks) as shard:
        assert await read_all(shard) == [b"%d" % number for number in range(100)]
        again = await shard.read(99, 1)
        assert bytes(again[0].data) == bytes(hot[0].data), "what disk gives is what memory gave"


async def test_refusal_by_the_seal_refuses_the_group_and_nothing_else(tmp_path: Path) -> None:
    broken = False

    def seal(batch: Batch) -> Batch:
        if broken:
            raise UnavailableError("The key provider does not answer.", code=Code.KEY_PROVIDER)
        return masked(batch)

    async with serving(tmp_path, hooks=ShardHooks(seal=seal, open_batch=masked)) as shard:
        await shard.append(batch_of(b"one"))
        broken = True
        with pytest.raises(UnavailableError) as refused:
            await shard.append(batch_of(b"two"))
        assert refused.value.code is Code.KEY_PROVIDER
        broken = False
        assert (await shard.append(batch_of(b"three"))).base_offset == 1
        assert await read_all(shard) == [b"one", b"three"]


async def test_unexpected_failure_of_a_hook_stops_the_shard(tmp_path: Path) -> None:
    def seal(batch: Batch) -> Batch:
        raise KeyError("a mistake of ours")

    async with serving(tmp_path, hooks=ShardHooks(seal=seal)) as shard:
        with pytest.raises(FelixError, match="KeyError"):
            await shard.append(batch_of(b"one"))
        assert shard.state is State.FAILED


async def test_header_fields_of_the_broker_are_set_and_times_never_go_back(tmp_path: Path) -> None:
    headers: list[BatchHeader] = []

    def seal(batch: Batch) -> Batch:
        headers.append(batch.header)
        return batch

    now = [0]
    async with serving(tmp_path, hooks=ShardHooks(seal=seal, runtime=with_wall(lambda: now[0]))) as shard:
        await shard.begin_epoch(4)
        for now[0] in (5_000, 4_000, 6_000):
            await shard.append(batch_of(b"a", b"b"))
        assert [(h.base_offset, h.append_time_ms, h.leader_epoch, h.shard) for h in headers] == [
            (0, 5_000, 4, 3),
            (2, 5_000, 4, 3),
            (4, 6_000, 4, 3),
        ]
        assert [await shard.offset_for_time(at) for at in (0, 5_000, 5_001, 6_000, 6_001)] == [0, 0, 4, 4, 6]


async def test_retention_moves_the_start_and_late_readers_get_an_explicit_gap(tmp_path: Path) -> None:
    clock = 1_000
    settings = ShardSettings(segments=SMALL, retention=Retention(age_ms=10_000), ring_bytes_max=1)
    async with serving(tmp_path, settings, ShardHooks(runtime=with_wall(lambda: clock))) as shard:
        for number in range(60):
            await shard.append(batch_of(b"%d" % number * 20))
            clock += 500
        assert shard.segment_count > 3
        assert await shard.sweep(clock) > 0
        start = shard.log_start_offset
        assert start > 0
        with pytest.raises(OffsetOutOfRangeError) as gap:
            await shard.read(0, 100)
        assert gap.value.code is Code.OFFSET_OUT_OF_RANGE and gap.value.first_offset == start
        assert await read_all(shard) == [b"%d" % number * 20 for number in range(start, 60)]
        assert await shard.sweep(clock + 10**9) > 0
        assert shard.segment_count == 1
        assert shard.high_watermark == 60
    async with serving(tmp_path, settings) as shard:
        assert shard.high_watermark == 60
        assert await read_all(shard) == [b"%d" % number * 20 for number in range(shard.log_start_offset, 60)]


async def test_readers_while_appending_see_every_record_once_and_in_order(tmp_path: Path) -> None:
    settings = ShardSettings(segments=SMALL, ring_bytes_max=2_000)
    total = 600
    async with serving(tmp_path, settings, ShardHooks(seal=masked, open_batch=masked)) as shard:

        async def reader(max_bytes: int) -> list[bytes]:
            found: list[bytes] = []
            offset = 0
            moved = asyncio.Event()
            unsubscribe = shard.subscribe_tail(moved.set)
            while len(found) < total:
                moved.clear()
                entries = await shard.read(offset, max_bytes)
                if not entries:
                    await moved.wait()
                    continue
                found += payloads_of(entries, offset)
                offset = entries[-1].next_offset
            unsubscribe()
            return found

        async def writer() -> None:
            for start in range(0, total, 20):
                await asyncio.gather(*(shard.append(batch_of(b"%d" % (start + at))) for at in range(20)))

        readers = [asyncio.create_task(reader(size)) for size in (1, 500, 5_000, 100_000)]
        await writer()
        expected = [b"%d" % number for number in range(total)]
        assert all(found == expected for found in await asyncio.gather(*readers))


async def test_producers_are_deduplicated_across_restart_and_in_flight(tmp_path: Path) -> None:
    def numbered(sequence: int, epoch: int = 0) -> Batch:
        return batch_of(b"%d" % sequence, producer=77, epoch=epoch, sequence=sequence)

    async with serving(tmp_path) as shard:
        first, repeated = await asyncio.gather(shard.append(numbered(0)), shard.append(numbered(0)))
        assert (first.base_offset, repeated.base_offset) == (0, 0)
        assert (first.duplicate, repeated.duplicate) == (False, True)
        for sequence in range(1, 6):
            await shard.append(numbered(sequence))
    for snapshot_kept in (True, False):
        if not snapshot_kept:
            (tmp_path / "producers").unlink()
        async with serving(tmp_path) as shard:
            assert shard.report.producers_rebuilt is not snapshot_kept
            again = await shard.append(numbered(5))
            assert (again.base_offset, again.duplicate) == (5, True)
            with pytest.raises(RequestError) as gap:
                await shard.append(numbered(7))
            assert gap.value.code is Code.SEQUENCE_GAP
    async with serving(tmp_path) as shard:
        assert (await shard.append(numbered(0, epoch=1))).base_offset == 6
        with pytest.raises(RequestError) as fenced:
            await shard.append(numbered(6))
        assert fenced.value.code is Code.PRODUCER_FENCED
        assert await read_all(shard) == [b"0", b"1", b"2", b"3", b"4", b"5", b"0"]


async def test_snapshot_that_knows_more_than_the_log_is_not_believed(tmp_path: Path) -> None:
    """What an interval stream acknowledged and lost with the power is not a duplicate when it is sent again."""

    def numbered(sequence: int) -> Batch:
        return batch_of(b"%d" % sequence, producer=5, sequence=sequence)

    async with serving(tmp_path) as shard:
        for sequence in range(3):
            await shard.append(numbered(sequence))
        kept = shard.disk_bytes
        for sequence in range(3, 20):
            await shard.append(numbered(sequence))
    lose_after(tmp_path, kept)
    async with serving(tmp_path) as shard:
        assert shard.high_watermark == 3
        answer = await shard.append(numbered(3))
        assert (answer.base_offset, answer.duplicate) == (3, False)


def lose_after(folder: Path, position: int) -> None:
    """Cut the log by hand, as documented: the bytes and the mark that vouches for them."""
    path = first_segment(folder)
    path.write_bytes(path.read_bytes()[:position])
    (folder / "mark").unlink()


async def test_duplicate_of_a_batch_that_fails_fails_with_it(tmp_path: Path) -> None:
    files = FailingFiles()
    async with serving(tmp_path, files=files) as shard:
        files.room = 10
        batch = batch_of(b"once", producer=5)
        answers = await asyncio.gather(shard.append(batch), shard.append(batch), return_exceptions=True)
        assert all(isinstance(answer, UnavailableError) for answer in answers)
        assert await read_all(shard) == []


async def test_truncation_forgets_records_epochs_positions_and_sequences(tmp_path: Path) -> None:
    def numbered(sequence: int) -> Batch:
        return batch_of(b"%d" % sequence, producer=5, sequence=sequence)

    async with serving(tmp_path, ShardSettings(segments=SMALL)) as shard:
        await shard.begin_epoch(1)
        for sequence in range(20):
            await shard.append(numbered(sequence), annotation=b"@%d" % sequence)
        await shard.begin_epoch(2)
        for sequence in range(20, 40):
            await shard.append(numbered(sequence), annotation=b"@%d" % sequence)
        assert shard.segment_count > 2
        assert shard.epochs.end_of(1, shard.log_end_offset).start_offset == 20
        await shard.truncate(LogPoint(10))
        assert (shard.high_watermark, shard.log_end_offset) == (10, 10)
        assert [start.epoch for start in shard.epochs.starts] == [1]
        assert shard.annotations == {0: b"@9"}
        assert (await shard.append(numbered(10))).base_offset == 10
        with pytest.raises(OffsetOutOfRangeError):
            await shard.truncate(LogPoint(1_000))
        with pytest.raises(RequestError):
            await shard.begin_epoch(0)
    async with serving(tmp_path) as shard:
        assert await read_all(shard) == [b"%d" % number for number in range(11)]
        assert shard.epochs.current == 1


async def test_epoch_is_durable_before_its_first_batch_and_survives(tmp_path: Path) -> None:
    async with serving(tmp_path) as shard:
        await shard.append(batch_of(b"a"))
        await shard.begin_epoch(3)
        assert shard.epochs.current == 3
    async with serving(tmp_path) as shard:
        assert [tuple(start) for start in shard.epochs.starts] == [(3, 1)]
        await shard.append(batch_of(b"b"))
    (tmp_path / "epochs").unlink()
    async with serving(tmp_path) as shard:
        assert [tuple(start) for start in shard.epochs.starts] == [(3, 1)], "rebuilt from the batches"


async def test_too_many_open_files_refuse_what_needs_one_and_stop_nothing(tmp_path: Path) -> None:
    class Exhausted(DiskFiles):
        is_exhausted = False

        def open(self, path: Path, flags: int) -> int:
            if self.is_exhausted:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            return super().open(path, flags)

    files = Exhausted()
    settings = ShardSettings(segments=SegmentLimits(segment_bytes_max=400), ring_bytes_max=100)
    async with serving(tmp_path, settings, files=files) as shard:
        for number in range(4):
            await shard.append(batch_of(b"%d" % number * 200))
        files.is_exhausted = True
        for _ in range(2):
            with pytest.raises(UnavailableError, match="Too many open files") as read:
                await shard.read(0, 100)
            with pytest.raises(UnavailableError, match="Too many open files") as appended:
                # It would close the segment first.
                await shard.append(batch_of(b"refused" * 50))
            assert read.value.code is appended.value.code is Code.UNAVAILABLE
            assert read.value.retry_after_ms and appended.value.retry_after_ms
        assert shard.state is State.SERVING
        files.is_exhausted = False
        assert payloads_of(await shard.read(0, 1)) == [b"0" * 200]
        assert (await shard.append(batch_of(b"4"))).base_offset == 4


class Unreadable(DiskFiles):
    """Of which the next reads fail."""

    reads_fail = 0

    def pread(self, descriptor: int, length: int, position: int) -> bytes:
        if self.reads_fail:
            self.reads_fail -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(descriptor, length, position)


async def test_a_read_that_the_disk_does_not_answer_is_refused_and_stops_nothing(tmp_path: Path) -> None:
    files = Unreadable()
    async with serving(tmp_path, ShardSettings(ring_bytes_max=1), files=files) as shard:
        for number in range(4):
            await shard.append(batch_of(b"%d" % number * 200))
        for _ in range(3):
            # Often in all, but not in a row.
            for _ in range(READ_FAILURES_MAX - 1):
                files.reads_fail = 1
                with pytest.raises(UnavailableError, match="cannot be read now") as refused:
                    await shard.read(0, 100)
                assert refused.value.code is Code.UNAVAILABLE and refused.value.retry_after_ms
            assert payloads_of(await shard.read(0, 1)) == [b"0" * 200]
        assert shard.state is State.SERVING
        assert (await shard.append(batch_of(b"4"))).base_offset == 4


async def test_a_disk_that_answers_no_read_stops_the_shard(tmp_path: Path) -> None:
    files = Unreadable()
    async with serving(tmp_path, ShardSettings(ring_bytes_max=1), files=files) as shard:
        for number in range(4):
            await shard.append(batch_of(b"%d" % number * 200))
        files.reads_fail = 1_000
        for _ in range(READ_FAILURES_MAX):
            assert shard.state is State.SERVING
            with pytest.raises(UnavailableError):
                await shard.read(0, 100)
        assert shard.state is State.FAILED
        files.reads_fail = 0


async def test_damage_found_while_reading_stops_the_shard(tmp_path: Path) -> None:
    async with serving(tmp_path, ShardSettings(ring_bytes_max=1)) as shard:
        for number in range(5):
            await shard.append(batch_of(b"payload %d" % number))
        path = first_segment(tmp_path)
        flip(path, b"payload 1")
        with pytest.raises(CorruptionError, match=path.name):
            await shard.read(0, 10_000)
        with pytest.raises(CorruptionError):
            await shard.append(batch_of(b"more"))
        assert shard.state is State.FAILED


async def test_positions_without_a_batch_are_durable_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as shard:
        await shard.append(batch_of(b"a"), annotation=b"@1", slot=9)
        answer = await shard.append(None, annotation=b"@2", slot=9)
        assert answer.base_offset == 1
        await shard.append(batch_of(b"b"))
        assert await read_all(shard) == [b"a", b"b"]
        assert [entry.base_offset for entry in await shard.read_sealed(0, 1_000)] == [0, 1]
    async with serving(tmp_path) as shard:
        assert shard.annotations == {9: b"@2"}
        assert shard.high_watermark == 2


async def test_closing_answers_what_is_pending_and_refuses_the_rest(tmp_path: Path) -> None:
    async with serving(tmp_path) as shard:
        pending = [asyncio.ensure_future(shard.append(batch_of(b"%d" % number))) for number in range(50)]
        await asyncio.sleep(0)
        await shard.close()
        assert [answer.base_offset for answer in await asyncio.gather(*pending)] == list(range(50))
        with pytest.raises(UnavailableError):
            await shard.append(batch_of(b"late"))
        await shard.close()
        assert shard.state is State.STOPPED


def test_no_event_leads_out_of_the_end_states() -> None:
    for (state, event), following in TRANSITIONS.items():
        if state is State.STOPPED:
            assert following is State.STOPPED
        if state is State.FAILED:
            assert following in (State.FAILED, State.STOPPED)
        if event is Event.FAILURE:
            assert following in (State.FAILED, State.STOPPED)


async def test_a_condition_holds_only_where_the_log_ends_there_pending_batches_counted(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as shard:
        first = asyncio.ensure_future(shard.append(batch_of(b"a", b"b")))
        await asyncio.sleep(0)
        with pytest.raises(OffsetMismatchError) as mismatch:
            await shard.append(batch_of(b"x"), expected_offset=0)
        assert mismatch.value.log_end == 2, "a and b are on their way"
        assert (await shard.append(batch_of(b"c"), expected_offset=2)).base_offset == 2
        assert (await first).base_offset == 0
        assert await read_all(shard) == [b"a", b"b", b"c"]


async def test_of_many_who_expect_the_same_end_one_appends(tmp_path: Path) -> None:
    async with serving(tmp_path) as shard:
        answers = await asyncio.gather(
            *(shard.append(batch_of(b"%d" % n), expected_offset=0) for n in range(20)), return_exceptions=True
        )
        assert [answer for answer in answers if isinstance(answer, Appended)] == [answers[0]]
        assert {error.log_end for error in answers[1:] if isinstance(error, OffsetMismatchError)} == {1}


async def test_a_conditional_batch_that_is_repeated_gets_its_offset_also_after_a_restart(
    tmp_path: Path,
) -> None:
    batch = batch_of(b"once", producer=7)
    async with serving(tmp_path) as shard:
        assert (await shard.append(batch, expected_offset=0)).base_offset == 0
        assert (await shard.append(batch, expected_offset=0)).duplicate
    async with serving(tmp_path) as shard:
        again = await shard.append(batch, expected_offset=0)
        assert (again.base_offset, again.duplicate) == (0, True)
        with pytest.raises(OffsetMismatchError):
            await shard.append(batch_of(b"next", producer=7, sequence=1), expected_offset=0)
        accepted = await shard.append(batch_of(b"next", producer=7, sequence=1), expected_offset=1)
        assert accepted.base_offset == 1, "a refused condition leaves no mark on the producer's sequence"


async def test_held_visibility_answers_appends_and_shows_them_in_one_turn(tmp_path: Path) -> None:
    async with serving(tmp_path) as shard:
        await shard.append(batch_of(b"before"))
        tails: list[int] = []
        shard.subscribe_tail(lambda: tails.append(shard.high_watermark))
        shard.hold_visibility()
        shard.hold_visibility()
        assert (await shard.append(batch_of(b"hidden", producer=3))).base_offset == 1
        assert (await shard.append(batch_of(b"hidden", producer=3))).duplicate
        assert (shard.high_watermark, shard.log_end_offset, tails) == (1, 2, [])
        assert await read_all(shard) == [b"before"]
        shard.release_visibility()
        assert shard.high_watermark == 1, "another hold is left"
        shard.release_visibility()
        assert shard.high_watermark == 2
        await asyncio.sleep(0)
        assert tails == [2]
        assert await read_all(shard) == [b"before", b"hidden"]


async def test_a_refused_group_takes_back_nothing_that_is_durable_and_hidden(tmp_path: Path) -> None:
    files = FailingFiles()
    async with serving(tmp_path, files=files) as shard:
        shard.hold_visibility()
        await shard.append(batch_of(b"durable"))
        files.room = 0
        with pytest.raises(UnavailableError):
            await shard.append(batch_of(b"refused"))
        files.room = None
        assert shard.log_end_offset == 1
        shard.release_visibility()
        assert await read_all(shard) == [b"durable"]


async def test_a_hold_that_lasts_is_bounded_by_what_may_be_pending(tmp_path: Path) -> None:
    async with serving(tmp_path, ShardSettings(pending_bytes_max=2_000)) as shard:
        shard.hold_visibility()
        with pytest.raises(UnavailableError) as refused:
            for _ in range(100):
                await shard.append(batch_of(b"x" * 100))
        assert refused.value.code is Code.LIMIT_MEMORY
        shard.release_visibility()
        await shard.append(batch_of(b"room again"))
