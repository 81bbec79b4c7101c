"""The log against a list: append, read, truncate, retention, reopen and crash in any order give the same records."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log.building import batch_of, first_segment, open_disk, placed, stored
from long_runs import count

from felix.batch import decode_batch, decode_records
from felix.settings import Retention
from region.log.disk import DiskLog
from region.log.durable_mark import MARK_NAME, decode_mark
from region.log.errors import OffsetOutOfRangeError
from region.log.frame import Frame
from region.log.point import LogPoint
from region.log.segment_limits import SegmentLimits

LIMITS = SegmentLimits(segment_bytes_max=1_500)


class LogAgainstList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="felix-log-"))
        self.log: DiskLog = open_disk(self.folder, limits=LIMITS)
        self.start = 0
        self.records: list[bytes] = []
        self.ends = {0}
        self.times: list[int] = []
        self.clock = 1_000
        self.annotations: dict[int, bytes] = {}
        self.unsynced_from: int | None = None

    @initialize()
    def empty(self) -> None:
        assert stored(self.log) == []

    @property
    def end(self) -> int:
        return len(self.records)

    @rule(
        groups=st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=4), min_size=1, max_size=5),
        annotated=st.booleans(),
        later=st.integers(0, 50),
    )
    def append(self, groups: list[list[bytes]], annotated: bool, later: int) -> None:
        self.clock += later
        frames = []
        for payloads in groups:
            batch = placed(batch_of(*payloads), self.end, self.clock)
            annotation = b"@%d" % self.end if annotated else b""
            frames.append(Frame(batch, self.end, 0, len(payloads), annotation))
            if annotated:
                self.annotations[len(payloads)] = annotation
            self.records += payloads
            self.times += [self.clock] * len(payloads)
            self.ends.add(self.end)
        self.log.write(frames, self.clock)
        self.log.sync()

    @rule(slot=st.integers(0, 3), note=st.binary(min_size=1, max_size=20))
    def annotate(self, slot: int, note: bytes) -> None:
        self.log.write([Frame(None, self.end, 0, slot, note)], self.clock)
        self.log.sync()
        self.annotations[slot] = note

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = open_disk(self.folder, limits=LIMITS)
        assert self.log.report.cut_bytes == 0

    @rule(full=st.booleans())
    def crash_and_verify(self, full: bool) -> None:
        self.log.abandon()
        self.log = open_disk(self.folder, limits=LIMITS, full_verify=full)

    @rule(lost=st.integers(1, 300), payload=st.binary(max_size=100))
    def crash_in_a_write(self, lost: int, payload: bytes) -> None:
        self.log.write([Frame(placed(batch_of(payload), self.end, self.clock), self.end, 0)], self.clock)
        self.log.abandon()
        mark = decode_mark((self.folder / MARK_NAME).read_bytes())
        assert mark is not None
        path = max(self.folder.glob("*.seg"))
        data = path.read_bytes()
        path.write_bytes(data[: max(mark.synced_to, len(data) - lost)])
        self.log = open_disk(self.folder, limits=LIMITS)

    @rule(data=st.data())
    def lose_an_index(self, data: st.DataObject) -> None:
        indexes = sorted(self.folder.glob("*.idx"))
        if indexes:
            data.draw(st.sampled_from(indexes)).unlink()

    @precondition(lambda self: self.end > self.start)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.start, self.end - 1))
        self.log.truncate(LogPoint(offset))
        end = max(at for at in self.ends if at <= offset)
        self.ends = {at for at in self.ends if at <= end}
        del self.records[end:], self.times[end:]
        # Which annotations go with the batches is the recovery tests' subject.
        self.annotations = dict(self.log.annotations)

    @rule(kept=st.integers(1, 5_000))
    def retain(self, kept: int) -> None:
        deleted = self.log.delete_old(Retention(size_bytes=kept), self.clock, below=self.end)
        assert self.log.start_offset >= self.start and self.log.start_offset in self.ends
        self.start = self.log.start_offset
        assert not deleted or self.log.bytes_held >= kept

    @rule(data=st.data(), max_bytes=st.integers(1, 5_000))
    def read(self, data: st.DataObject, max_bytes: int) -> None:
        offset = data.draw(st.integers(0, self.end + 1))
        if not self.start <= offset <= self.end:
            with pytest.raises(OffsetOutOfRangeError) as gap:
                self.log.read(offset, max_bytes, self.end)
            assert (gap.value.first_offset, gap.value.next_offset) == (self.start, self.end)
            return
        batches = self.log.read(offset, max_bytes, self.end)
        found = [record for batch in batches for record in decode_records(decode_batch(batch.data))]
        assert [bytes(record.payload) for record in found if record.offset >= offset] == self.records[
            offset : offset + len([record for record in found if record.offset >= offset])
        ]
        assert bool(batches) == (offset < self.end)
        assert len(batches) <= 1 or sum(len(batch.data) for batch in batches) <= max_bytes

    @rule(data=st.data())
    def seek_time(self, data: st.DataObject) -> None:
        time_ms = data.draw(st.integers(900, self.clock + 2))
        expected = next(
            (at for at in range(self.start, self.end) if self.times[at] >= time_ms),
            self.end,
        )
        assert self.log.offset_for_time(time_ms, self.end) == expected

    @invariant()
    def same_records(self) -> None:
        assert self.log.end_offset == self.end
        assert stored(self.log) == self.records[self.start :]
        assert self.log.annotations == self.annotations

    def teardown(self) -> None:
        self.log.close()
        assert first_segment(self.folder).exists()
        shutil.rmtree(self.folder)


TestLogAgainstList = LogAgainstList.TestCase
TestLogAgainstList.settings = settings(max_examples=count(60, 150), stateful_step_count=30, deadline=None)
