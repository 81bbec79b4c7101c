"""Compaction: the last record of every key stays where it was, whatever fails and whoever reads meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from log.building import (
    IDENTITY,
    FailingFiles,
    append,
    batch_of,
    compact,
    first_segment,
    keyed,
    masked,
    open_disk,
    placed,
    serving,
    stored,
    write_batches,
)
from long_runs import count

from felix.batch import TOMBSTONE_HEADER, Batch, Record, decode_batch, decode_records
from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.settings import Compaction, Retention
from felix.storage.disk import DiskFiles
from felix.storage.port import Files
from region.log.compaction import (
    COMPACTION_NAME,
    DIRTY_AGE_MS,
    DIRTY_SEGMENTS_MAX,
    CompactionState,
    DirtySpan,
    KeyMap,
    is_due,
    judge,
)
from region.log.disk import DiskLog
from region.log.frame import Frame
from region.log.offload import Offloaded
from region.log.point import LogPoint
from region.log.producer_snapshots import PRODUCERS_NAME
from region.log.segment import parse_segment_name
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardHooks, ShardLog, ShardSettings
from region.log.verify import verify_shard

LIMITS = SegmentLimits(segment_bytes_max=1_500)
KEYS = [b"a", b"b", b"c", b"d", b"e"]


class Written(NamedTuple):
    """A record as the model knows it."""

    key: bytes | None
    payload: bytes
    is_tombstone: bool
    time_ms: int


def held(log: DiskLog, offset: int | None = None, max_bytes: int = 4_096) -> list[Record]:
    """Every record that the log holds, read batch range by batch range; each read goes on behind the one before."""
    found: list[Record] = []
    at = log.start_offset if offset is None else offset
    while batches := log.read(at, max_bytes, log.end_offset):
        for batch in batches:
            assert batch.header.next_offset > at
            found += [
                record for record in decode_records(masked(decode_batch(batch.data))) if record.offset >= at
            ]
            at = batch.header.next_offset
    assert at == log.end_offset, "behind a hole there is always an entry"
    return found


def latest(records: Sequence[Record]) -> dict[bytes, bytes]:
    """What a cache would make of them."""
    state: dict[bytes, bytes] = {}
    for record in records:
        if record.key is not None:
            if TOMBSTONE_HEADER in record.headers:
                state.pop(bytes(record.key), None)
            else:
                state[bytes(record.key)] = bytes(record.payload)
    return state


# -- decisions -----------------------------------------------------------------------------------------


def records_of(*keys: bytes | None, base: int = 0, time_ms: int = 0) -> list[Record]:
    return [Record(base + at, time_ms, key, {}, b"") for at, key in enumerate(keys)]


def test_of_each_key_the_last_record_stays_and_those_without_a_key_all_do() -> None:
    records = records_of(b"a", b"b", None, b"a", b"c")
    keys = KeyMap()
    keys.add([*records, *records_of(b"b", base=5)])
    verdicts = judge(records, keys, tombstones_before_ms=0, keep=-1)
    assert verdicts.runs == [(2, 3)] and verdicts.removed == 2


def test_a_key_that_the_map_does_not_know_stays() -> None:
    assert judge(records_of(b"a"), KeyMap(), tombstones_before_ms=0, keep=-1).runs == [(0, 1)]


def test_an_old_tombstone_goes_a_young_one_and_the_newest_record_stay() -> None:
    tombstone = Record(7, 100, b"a", {TOMBSTONE_HEADER: b""}, b"")
    keys = KeyMap()
    keys.add([tombstone])
    gone = judge([tombstone], keys, tombstones_before_ms=101, keep=-1)
    assert (gone.runs, gone.tombstones_removed, gone.last_tombstone) == ([], 1, 7)
    assert judge([tombstone], keys, tombstones_before_ms=100, keep=-1).removed == 0
    assert judge([tombstone], keys, tombstones_before_ms=101, keep=7).removed == 0


def test_a_pass_is_due_by_ratio_by_number_and_by_age() -> None:
    clean = DirtySpan(100, 1_000, 10)
    assert not is_due([], 0, now_ms=0, lag_ms=0)
    assert not is_due([clean], 100, now_ms=10, lag_ms=0)
    assert not is_due([clean, DirtySpan(200, 999, 20)], 100, now_ms=30, lag_ms=0)
    assert is_due([clean, DirtySpan(200, 1_000, 20)], 100, now_ms=30, lag_ms=0)
    assert not is_due([clean, DirtySpan(200, 1_000, 20)], 100, now_ms=30, lag_ms=11), "too young"
    small = [DirtySpan(101 + at, 1, 20) for at in range(DIRTY_SEGMENTS_MAX)]
    assert is_due([clean, *small], 100, now_ms=30, lag_ms=0)
    assert not is_due([clean, *small[1:]], 100, now_ms=30, lag_ms=0)
    assert is_due([clean, DirtySpan(200, 1, 20)], 100, now_ms=20 + DIRTY_AGE_MS, lag_ms=0)


# -- one log -------------------------------------------------------------------------------------------


def test_offsets_stay_and_a_split_batch_keeps_times_and_sequences(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=LIMITS)
    append(log, keyed((b"a", b"1"), (b"b", b"2"), (b"c", b"3"), (b"a", b"4"), producer=9, sequence=40), 1_234)
    append(log, keyed((b"b", b"5"), (None, b"6")))
    log.roll(1_000)
    report = compact(log)
    assert report is not None and report.records_removed == 2
    batches = log.read(0, 10_000, log.end_offset)
    headers = [batch.header for batch in batches]
    assert [(one.base_offset, one.records) for one in headers] == [(2, 2), (4, 2)]
    assert (headers[0].base_sequence, headers[0].producer_id) == (42, 9)
    assert headers[0].append_time_ms == 1_234
    assert [(record.offset, bytes(record.payload)) for record in held(log)] == [
        (2, b"3"),
        (3, b"4"),
        (4, b"5"),
        (5, b"6"),
    ]
    log.close()


def test_a_cursor_in_a_hole_gets_the_next_entry_also_in_the_next_segment(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=SegmentLimits(segment_bytes_max=200))
    for at in range(20):
        append(log, keyed((b"k", b"%d" % at), (None, b"x" * 150) if at in (3, 12) else (b"k", b"y")))
    log.roll(1_000)
    compact(log)
    offsets = [record.offset for record in held(log)]
    assert offsets == [7, 25, 39]
    for offset in range(log.start_offset, log.end_offset):
        assert [record.offset for record in held(log, offset, 1)] == [at for at in offsets if at >= offset]
    assert log.offset_for_time(0, log.end_offset) == 7
    log.close()
    again = open_disk(tmp_path, full_verify=True)
    assert [record.offset for record in held(again)] == offsets
    again.close()


def test_the_newest_closed_record_stays_even_as_an_old_tombstone(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=LIMITS)
    append(log, keyed((b"a", b"1"), (b"b", b"2")))
    append(log, keyed((b"a", None), (b"b", None)))
    log.roll(1_000)
    report = compact(log)
    assert report is not None and report.tombstones_removed == 1
    assert [record.offset for record in held(log)] == [3]
    assert log.compaction.tombstones_from == 3
    append(log, keyed((b"c", b"3")))
    log.roll(1_000)
    compact(log)
    assert [record.offset for record in held(log)] == [4]
    assert log.compaction.tombstones_from == 4
    log.close()
    assert open_disk(tmp_path).compaction.tombstones_from == 4


def test_small_segments_are_gathered(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=LIMITS)
    for at in range(30):
        append(log, keyed((b"k%d" % at, b"v")))
        log.roll(1_000)
    assert log.segment_count == 31
    compact(log)
    assert log.segment_count < 8 and len(held(log)) == 30
    log.close()


def test_a_compressed_batch_stays_compressed(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=LIMITS)
    append(log, keyed(*[(b"k%d" % (at % 3), b"payload" * 50) for at in range(40)], compress=True))
    log.roll(1_000)
    report = compact(log)
    assert report is not None and report.records_removed == 37
    (batch,) = log.read(0, 10_000, log.end_offset)
    assert batch.header.records == 3 and batch.header.body_length < 3 * 350
    assert [record.offset for record in held(log)] == [37, 38, 39]
    log.close()


def test_a_bound_on_the_keys_ends_a_pass_and_the_next_one_goes_on(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=LIMITS)
    for at in range(60):
        append(log, keyed((b"k%d" % (at % 20), b"%d" % at)))
    log.roll(1_000)
    reached = [0]
    while report := compact(log, keys_bytes_max=1_000):
        assert report.clean_to > reached[-1]
        reached.append(report.clean_to)
    assert len(reached) > 3 and reached[-1] == 60
    assert [record.offset for record in held(log)] == list(range(40, 60))
    log.close()


def test_a_missing_or_changed_state_file_costs_no_record(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=LIMITS)
    append(log, keyed((b"a", b"1"), (b"a", b"2"), (b"b", b"3")))
    log.roll(1_000)
    compact(log)
    log.close()
    (tmp_path / COMPACTION_NAME).write_bytes(b"rubbish")
    again = open_disk(tmp_path)
    assert (again.compaction.clean_to, again.compaction.tombstones_from) == (0, 3), "in doubt, all of them"
    assert latest(held(again)) == {b"a": b"2", b"b": b"3"}
    again.close()


def test_a_batch_cut_out_of_a_compacted_segment_is_damage(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=LIMITS)
    for at in range(4):
        append(log, keyed((b"a", b"1"), (b"k%d" % at, b"2")))
    log.roll(1_000)
    compact(log)
    log.close()
    (path,) = (path for path in tmp_path.glob("*.seg") if parse_segment_name(path.name) == (0, 1))
    data = path.read_bytes()
    second = data.index(b"FE", data.index(b"FE") + 2)
    third = data.index(b"FE", second + 2)
    path.write_bytes(data[:second] + data[third:])
    with pytest.raises(CorruptionError):
        open_disk(tmp_path)


@pytest.mark.parametrize("how", ["done", "killed", "restarted", "state lost"])
def test_what_records_went_for_cannot_be_cut_though_its_own_segment_was_left_as_it_is(
    tmp_path: Path, how: str
) -> None:
    log = open_disk(tmp_path)
    append(log, keyed((b"k", b"first"), (None, b"stays")))
    log.roll(1_000)
    append(log, keyed((b"k", b"second")))
    log.roll(1_000)
    append(log, keyed((b"j", b"active")))
    # Each segment is a group of its own, and in the second one there is nothing to remove.
    log.limits = SegmentLimits(segment_bytes_max=100)
    files = DiskFiles()
    if how == "killed":
        save, states = log.save_compaction, 0

        def killed(state: CompactionState) -> None:
            nonlocal states
            states += 1
            if states == 3:
                raise Crash
            save(state)

        log.save_compaction = killed  # type: ignore[method-assign]
        with pytest.raises(Crash):
            compact(log, files=files)
        log.abandon()
        log = open_disk(tmp_path)
    else:
        compact(log, files=files)
    assert [one.generation for one in log.segments] == [1, 0, 0]
    if how in ("restarted", "state lost"):
        log.close()
        if how == "state lost":
            (tmp_path / COMPACTION_NAME).unlink()
        log = open_disk(tmp_path)
    assert log.fixed_to == LogPoint(3)
    with pytest.raises(RequestError) as refused:
        log.truncate(LogPoint(2))
    assert refused.value.code is Code.UNSUPPORTED
    log.truncate(LogPoint(3))
    assert latest(held(log)) == {b"k": b"second"}
    log.close()


@pytest.mark.parametrize("at", range(1, 6))
def test_a_cut_during_a_pass_takes_no_record_along_for_one_that_is_cut(tmp_path: Path, at: int) -> None:
    log = open_disk(tmp_path, limits=SegmentLimits(segment_bytes_max=100))
    append(log, keyed((b"k", b"first"), (None, b"stays")))
    append(log, keyed((b"k", b"second")))
    append(log, keyed((b"j", b"active")))
    calls = 0

    def pace() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            with suppress(RequestError):
                log.truncate(LogPoint(2))

    with suppress(FileNotFoundError):
        compact(log, pace=pace)
    assert b"k" in latest(held(log)) and log.compaction.fixed_to <= log.end_offset
    log.close()
    log = open_disk(tmp_path)
    assert b"k" in latest(held(log))
    log.close()


@pytest.mark.parametrize("at", [2, 4, 12, 22])
def test_what_went_to_a_store_during_a_pass_stays_as_it_is(tmp_path: Path, at: int) -> None:
    """The stream was altered meanwhile, from one to the other: what the store has is what the log is there."""
    log = open_disk(tmp_path, limits=SegmentLimits(segment_bytes_max=600))
    for number in range(10):
        append(log, keyed((b"k", b"%d" % number * 100)))
    log.limits = LIMITS
    calls = 0

    def pace() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            entries = [
                Offloaded(
                    f"memory://x/{one.base_offset}",
                    one.header.encode(),
                    one.next_offset,
                    one.segment_bytes,
                    0,
                    "",
                )
                for one in log.segments[1:4]
                if not one.generation
            ]
            log.follow_offloaded(entries, log.end_offset)

    compact(log, pace=pace)
    named = {one.base_offset for one in log.offload.segments}
    assert {one.base_offset for one in log.segments if one.remote} == named
    found = [bytes(one.payload) for one in held(log)]
    log.close()
    assert verify_shard(tmp_path, IDENTITY).is_whole
    log = open_disk(tmp_path, limits=LIMITS)
    assert [bytes(one.payload) for one in held(log)] == found
    assert all(not one.generation for one in log.segments if one.remote)
    log.close()


def test_a_compacted_log_cannot_be_cut_where_it_was_compacted(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=LIMITS)
    append(log, keyed((b"a", b"1"), (b"a", b"2")))
    log.roll(1_000)
    compact(log)
    append(log, keyed((b"b", b"3")))
    append(log, keyed((b"b", b"4")))
    with pytest.raises(RequestError) as refused:
        log.truncate(LogPoint(1))
    assert refused.value.code is Code.UNSUPPORTED
    log.truncate(LogPoint(3))
    assert latest(held(log)) == {b"a": b"2", b"b": b"3"}
    log.close()


@given(
    st.lists(
        st.tuples(st.none() | st.sampled_from(KEYS), st.none() | st.binary(max_size=30)),
        min_size=1,
        max_size=20,
    ),
    st.data(),
    st.booleans(),
)
@settings(max_examples=count(150, 400), deadline=None)
def test_a_part_of_a_batch_holds_its_records(
    records: list[tuple[bytes | None, bytes | None]], data: st.DataObject, compress: bool
) -> None:
    from felix.batch import cut_batch

    batch = placed(keyed(*records, producer=3, sequence=8, compress=compress), 100, 5)
    first = data.draw(st.integers(0, len(records) - 1))
    count = data.draw(st.integers(1, len(records) - first))
    part = decode_batch(cut_batch(batch, first, count).encode())
    whole = [(one.offset, one.key, dict(one.headers), one.payload) for one in decode_records(batch)]
    cut = [(one.offset, one.key, dict(one.headers), one.payload) for one in decode_records(part)]
    assert cut == whole[first : first + count]
    assert part.header.base_sequence == 8 + first


# -- against a model, with crashes ---------------------------------------------------------------------


class Crash(BaseException):
    """The machine stops here."""


class CrashingFiles(DiskFiles):
    """The real calls; after so many that change something, none does anything any more."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            self._count()
        return super().open(path, flags)

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        self._count()
        return super().pwritev(descriptor, buffers, position)

    def sync(self, descriptor: int) -> None:
        self._count()
        super().sync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        self._count()
        super().sync_folder(folder)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)


class CompactedLogAgainstDict(RuleBasedStateMachine):
    """Every record that was written is known; what the log holds is held against it after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="felix-log-"))
        self.log = open_disk(self.folder, limits=LIMITS)
        self.written: list[Written] = []
        self.clock = 10_000
        self.start = 0
        self.tombstones_before = 0
        self.annotation = b""

    @rule(
        groups=st.lists(
            st.lists(
                st.tuples(st.none() | st.sampled_from(KEYS), st.none() | st.binary(max_size=80)),
                min_size=1,
                max_size=6,
            ),
            min_size=1,
            max_size=4,
        ),
        later=st.integers(0, 500),
        compress=st.booleans(),
    )
    def append(
        self, groups: list[list[tuple[bytes | None, bytes | None]]], later: int, compress: bool
    ) -> None:
        self.clock += later
        frames = []
        for records in groups:
            batch = masked(placed(keyed(*records, compress=compress), len(self.written), self.clock))
            self.annotation = b"@%d" % len(self.written)
            frames.append(Frame(batch, len(self.written), 0, 1, self.annotation))
            self.written += [
                Written(key, payload or b"", payload is None, self.clock) for key, payload in records
            ]
        self.log.write(frames, self.clock)
        self.log.sync()

    @rule()
    def close_segment(self) -> None:
        if self.log.segments[-1].next_offset > self.log.segments[-1].base_offset:
            self.log.roll(self.clock)

    def _compact(self, files: Files, lag_ms: int, tombstone_ms: int, keys_bytes_max: int) -> None:
        self.tombstones_before = max(self.tombstones_before, self.clock - tombstone_ms)
        compact(
            self.log,
            now_ms=self.clock,
            lag_ms=lag_ms,
            tombstone_ms=tombstone_ms,
            keys_bytes_max=keys_bytes_max,
            files=files,
        )

    @rule(
        lag_ms=st.sampled_from([0, 0, 100, 1_000]),
        tombstone_ms=st.integers(1, 2_000),
        keys_bytes_max=st.sampled_from([1, 300, 1 << 20]),
    )
    def compact(self, lag_ms: int, tombstone_ms: int, keys_bytes_max: int) -> None:
        self._compact(DiskFiles(), lag_ms, tombstone_ms, keys_bytes_max)

    @rule(calls=st.integers(0, 40), tombstone_ms=st.integers(1, 2_000), full=st.booleans())
    def crash_in_a_compaction(self, calls: int, tombstone_ms: int, full: bool) -> None:
        crashing = CrashingFiles(calls)
        whole, self.log._files = self.log._files, crashing
        try:
            self._compact(crashing, 0, tombstone_ms, 1 << 20)
        except Crash:
            pass
        finally:
            self.log._files = whole
        self.log.abandon()
        self.log = open_disk(self.folder, limits=LIMITS, full_verify=full)
        assert not list(self.folder.glob("*.tmp"))

    @rule(full=st.booleans())
    def reopen(self, full: bool) -> None:
        self.log.close()
        self.log = open_disk(self.folder, limits=LIMITS, full_verify=full)
        assert self.log.report.cut_bytes == 0

    @rule(data=st.data())
    def lose_an_index(self, data: st.DataObject) -> None:
        indexes = sorted(self.folder.glob("*.idx"))
        if indexes:
            data.draw(st.sampled_from(indexes)).unlink()

    @rule(kept=st.integers(1_000, 6_000))
    def retain(self, kept: int) -> None:
        self.log.delete_old(Retention(size_bytes=kept), self.clock, below=self.log.end_offset)
        self.start = self.log.start_offset

    @rule(data=st.data(), max_bytes=st.integers(1, 3_000))
    def read(self, data: st.DataObject, max_bytes: int) -> None:
        offset = data.draw(st.integers(self.start, len(self.written)))
        everything = [record.offset for record in held(self.log)]
        assert [record.offset for record in held(self.log, offset, max_bytes)] == [
            at for at in everything if at >= offset
        ]

    @rule(data=st.data())
    def seek_time(self, data: st.DataObject) -> None:
        time_ms = data.draw(st.integers(9_900, self.clock + 2))
        at = self.log.offset_for_time(time_ms, self.log.end_offset)
        records = held(self.log)
        assert all(record.timestamp_ms < time_ms for record in records if record.offset < at)
        assert all(record.timestamp_ms >= time_ms for record in records if record.offset >= at)

    @invariant()
    def nothing_is_missing_that_should_be_there(self) -> None:
        assert self.log.end_offset == len(self.written)
        records = held(self.log)
        offsets = [record.offset for record in records]
        assert offsets == sorted(set(offsets))
        for record in records:
            written = self.written[record.offset]
            key = None if record.key is None else bytes(record.key)
            assert (key, bytes(record.payload), record.timestamp_ms) == (
                written.key,
                written.payload,
                written.time_ms,
            )
            assert (TOMBSTONE_HEADER in record.headers) == written.is_tombstone
        present = set(offsets)
        clean_to, tombstones_from = self.log.compaction.clean_to, self.log.compaction.tombstones_from
        last = {written.key: at for at, written in enumerate(self.written) if written.key is not None}
        for at in range(self.start, len(self.written)):
            written = self.written[at]
            if at in present:
                continue
            assert written.key is not None and at < self.log.segments[-1].base_offset
            if last[written.key] == at:
                assert written.is_tombstone and written.time_ms < self.tombstones_before
            if written.is_tombstone and not any(
                self.written[later].key == written.key for later in range(at + 1, len(self.written))
            ):
                assert at < tombstones_from
        below = [self.written[at].key for at in offsets if at < clean_to and self.written[at].key is not None]
        assert len(below) == len(set(below)), "below what is clean each key stands once"

    @invariant()
    def the_state_is_the_models(self) -> None:
        model = latest(
            [
                Record(
                    at, one.time_ms, one.key, {TOMBSTONE_HEADER: b""} if one.is_tombstone else {}, one.payload
                )
                for at, one in enumerate(self.written)
                if at >= self.start
            ]
        )
        assert latest(held(self.log)) == model
        if self.written:
            assert self.log.annotations == {1: self.annotation}

    def teardown(self) -> None:
        self.log.close()
        shutil.rmtree(self.folder)


TestCompactedLogAgainstDict = CompactedLogAgainstDict.TestCase
TestCompactedLogAgainstDict.settings = settings(
    max_examples=count(80, 250), stateful_step_count=30, deadline=None
)


# -- the shard -----------------------------------------------------------------------------------------


def shard_settings(**more: object) -> ShardSettings:
    return ShardSettings(
        segments=SegmentLimits(segment_bytes_max=4_000),
        compaction=Compaction(**more),  # type: ignore[arg-type]
        ring_bytes_max=1_000,
    )


HOOKS = ShardHooks(seal=masked, open_batch=masked)


def files_of(folder: Path) -> dict[str, bytes]:
    """Segments and what is on its way to be one."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if ".seg" in path.name}


async def everything(shard: ShardLog, offset: int = 0) -> list[Record]:
    found: list[Record] = []
    while entries := await shard.read(offset, 2_000):
        for entry in entries:
            found += [one for one in decode_records(decode_batch(entry.data)) if one.offset >= offset]
            offset = entry.next_offset
    return found


async def test_readers_see_every_last_value_while_their_log_is_compacted(tmp_path: Path) -> None:
    chance = random.Random(5)
    with ThreadPoolExecutor(1) as pool:
        async with serving(tmp_path, shard_settings(), HOOKS) as shard:
            wanted: dict[bytes, bytes] = {}
            stop = asyncio.Event()

            async def follow() -> int:
                rounds = 0
                while not stop.is_set():
                    before = dict(wanted)
                    ends_at = shard.high_watermark
                    seen = await everything(shard, shard.log_start_offset)
                    offsets = [record.offset for record in seen]
                    assert offsets == sorted(set(offsets))
                    found = latest([record for record in seen if record.offset < ends_at])
                    later = {bytes(record.key) for record in seen if record.key and record.offset >= ends_at}
                    for key, value in before.items():
                        assert found.get(key, b"") >= value or key in later
                    rounds += 1
                    await shard.offset_for_time(0)
                return rounds

            readers = [asyncio.create_task(follow()) for _ in range(3)]
            for at in range(400):
                key, value = b"k%d" % chance.randrange(12), b"%06d" % at * 10
                await shard.append(keyed((key, value), (b"z%d" % chance.randrange(6), b"")))
                wanted[key] = value
                if at % 25 == 24:
                    await shard.compact(shard._hooks.clock_ms(), pool, share=1)
            stop.set()
            assert all(rounds > 0 for rounds in await asyncio.gather(*readers))
            assert shard.counters.compaction_removed_records > 500 and shard.failure is None
            assert shard.compacted_to > 0


async def test_a_repeated_batch_is_known_after_its_records_are_gone_and_a_restart(tmp_path: Path) -> None:
    first = keyed((b"a", b"1"), (b"b", b"x" * 4_000), producer=77)
    with ThreadPoolExecutor(1) as pool:
        async with serving(tmp_path, shard_settings(), HOOKS) as shard:
            begun = await shard.append(first)
            await shard.append(keyed((b"a", b"3"), (b"b", b"x" * 4_000), producer=78))
            await shard.append(keyed((b"c", b"x" * 4_000)))
            await shard.compact(shard._hooks.clock_ms(), pool, share=1)
            assert [record.offset for record in await everything(shard)][:1] == [2]
    for lost in ((), (PRODUCERS_NAME,)):
        for name in lost:
            (tmp_path / name).unlink()
        async with serving(tmp_path, shard_settings(), HOOKS) as shard:
            again = await shard.append(first)
            assert again.duplicate and again.base_offset == begun.base_offset
            with pytest.raises(RequestError):
                await shard.append(keyed((b"a", b"7"), producer=77, sequence=9))


async def test_epochs_stand_after_their_batches_are_gone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        async with serving(tmp_path, shard_settings(), HOOKS) as shard:
            for epoch in (1, 2, 3):
                await shard.begin_epoch(epoch)
                await shard.append(keyed((b"a", b"x" * 4_000)))
            await shard.append(keyed((b"b", b"1")))
            starts = shard.epochs.starts
            report = await shard.compact(shard._hooks.clock_ms(), pool, share=1)
            assert report is not None and report.records_removed == 2
    (tmp_path / "epochs").unlink()
    async with serving(tmp_path, shard_settings(), HOOKS) as shard:
        assert shard.epochs.starts == starts


async def test_a_compaction_that_finds_no_room_leaves_all_as_it_was(tmp_path: Path) -> None:
    files = FailingFiles()
    with ThreadPoolExecutor(1) as pool:
        async with serving(tmp_path, shard_settings(), HOOKS, files) as shard:
            for at in range(40):
                await shard.append(keyed((b"a", b"%d" % at * 100)))
            now_ms = shard._hooks.clock_ms()
            before = files_of(tmp_path)
            files.room_left = 0
            with pytest.raises(UnavailableError) as refused:
                await shard.compact(now_ms, pool, share=1)
            assert refused.value.code is Code.DISK_FULL
            files.room_left = None
            files.room = 100
            with pytest.raises(UnavailableError) as refused:
                await shard.compact(now_ms, pool, share=1)
            assert refused.value.code is Code.DISK_FULL
            files.room = None
            assert files_of(tmp_path) == before
            assert shard.counters.compactions_failed == 2 and not shard.compaction_due(now_ms)
            assert len(await everything(shard)) == 40
            assert await shard.compact(now_ms, pool, share=1) is not None
            assert len(await everything(shard)) < 10


async def test_a_key_that_is_gone_ends_the_pass_and_nothing_else(tmp_path: Path) -> None:
    keys = {"there": True}

    def opens(batch: Batch) -> Batch:
        if not keys["there"]:
            raise UnavailableError("The key provider does not answer.")
        return masked(batch)

    with ThreadPoolExecutor(1) as pool:
        async with serving(tmp_path, shard_settings(), ShardHooks(seal=masked, open_batch=opens)) as shard:
            for at in range(40):
                await shard.append(keyed((b"a", b"%d" % at * 100)))
            keys["there"] = False
            with pytest.raises(UnavailableError):
                await shard.compact(shard._hooks.clock_ms(), pool, share=1)
            keys["there"] = True
            await shard.append(keyed((b"a", b"after")))
            assert len(await everything(shard)) == 41


async def test_closing_ends_a_compaction(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        async with serving(tmp_path, shard_settings(), HOOKS) as shard:
            for at in range(60):
                await shard.append(keyed((b"a", b"%d" % at * 500)))
            # At this share it would sleep for hours.
            compaction = asyncio.create_task(shard.compact(shard._hooks.clock_ms(), pool, share=1e-6))
            await asyncio.sleep(0.05)
            await shard.close()
            with pytest.raises(UnavailableError) as ended:
                await compaction
            assert ended.value.code is Code.SHUTTING_DOWN
    async with serving(tmp_path, shard_settings(), HOOKS) as shard:
        assert latest(await everything(shard)) == {b"a": b"59" * 500}


async def test_damage_found_by_a_compaction_stops_the_shard(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        async with serving(tmp_path, shard_settings(), HOOKS) as shard:
            for at in range(40):
                await shard.append(keyed((b"a", b"%d" % at * 100)))
            path = first_segment(tmp_path)
            data = bytearray(path.read_bytes())
            data[-20] ^= 1
            path.write_bytes(data)
            with pytest.raises(CorruptionError):
                await shard.compact(shard._hooks.clock_ms(), pool, share=1)
            assert shard.failure is not None


def test_unkeyed_logs_are_as_before(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=SegmentLimits(segment_bytes_max=300))
    write_batches(log, [batch_of(b"one"), batch_of(b"two")])
    log.sync()
    log.roll(1_000)
    report = compact(log)
    assert report is not None and report.records_removed == 0
    assert stored(log) == [b"one", b"two"]
    log.close()
