"""The life of one log's records: appends, compaction, offload, retention, backups, a folder that is lost, kills and full disks, in any order.

Each of these has a model of its own beside it (test_compaction.py, test_offload.py, test_model.py); here they meet. What is checked after each step:
the log holds what it is to hold and nothing else, whole and in the order in which it was written; a repeated batch is known; the store has what the
log says, and nothing that nobody knows of; verification calls nothing damaged that a start takes.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final
from uuid import uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log.building import IDENTITY, compact, keyed, masked, placed, restore_shard
from log.test_compaction import Crash, CrashingFiles, Written
from log.test_offload import failing, tag
from long_runs import count

from felix.batch import TOMBSTONE_HEADER, Record, decode_batch, decode_records
from felix.errors import CorruptionError, UnavailableError
from felix.settings import Retention
from felix.storage.disk import DiskFiles
from felix.storage.port import Files
from region.log import fsspec_store as store
from region.log.disk import DiskLog
from region.log.errors import NotLocalError, OffsetOutOfRangeError
from region.log.frame import Frame
from region.log.offloader import (
    FetchedCache,
    Offloader,
    Restoration,
    check_object,
    fetch,
    is_lost,
)
from region.log.point import LogPoint
from region.log.producers import ProducerTable, Remembered
from region.log.segment_limits import SegmentLimits
from region.log.verify import verify_shard

LIMITS: Final = SegmentLimits(segment_bytes_max=1_200)
KEYS: Final = [b"a", b"b", b"c", b"d"]


class FullFiles(DiskFiles):
    """The real calls; after so many bytes there is no room for more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT and self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, flags)

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        wanted = b"".join(buffers)
        # What stands there already takes no more room.
        part = wanted[: max(self.room, self.size(descriptor) - position)]
        if wanted and not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= max(0, position + len(part) - self.size(descriptor))
        return super().pwritev(descriptor, [part], position)


@dataclass
class History:
    """What was written to one folder, as far as nothing was put back."""

    written: list[Written] = field(default_factory=list)
    start: int = 0
    sequences: dict[int, int] = field(default_factory=dict)
    """Of each producer, the next one."""
    tombstones_before: int = 0

    def copy(self) -> History:
        return replace(self, written=list(self.written), sequences=dict(self.sequences))


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="felix-life-"))
        self.folder, self.backup = self.home / "log", self.home / "backup"
        self.place = f"memory://life/{uuid4().hex}"
        self.cache = FetchedCache(3_000)
        self.clock = 10_000
        self.epoch = 0
        self.now = History()
        self.saved = History()
        self.of_epoch: dict[int, History] = {}
        """What the log in this epoch was of."""
        self.given_up: set[str] = set()
        """Objects of histories that are no more."""
        self.table = ProducerTable()
        self._open()

    # -- opening ---------------------------------------------------------------------------------------

    def _open(self, *, full: bool = False) -> None:
        if not is_lost(self.folder, DiskFiles()):
            verdict = verify_shard(self.folder, IDENTITY)
            assert verdict.is_whole, verdict.findings
        self.log, recovered = DiskLog.open(
            self.folder, IDENTITY, now_ms=self.clock, limits=LIMITS, full_verify=full
        )
        self.table = recovered.producers
        self.epoch += 1
        self.log.begin_epoch(self.epoch)
        self.of_epoch[self.epoch] = self.now
        known = {producer: batches[-1].next_sequence for producer, batches in self.table}
        assert known == self.now.sequences
        assert not list(self.folder.glob("*.tmp"))

    def _with(self, files: Files, work: Callable[[], object]) -> bool:
        """Whether it came to an end; else the process was killed, or there was no room."""
        whole, self.log._files = self.log._files, files
        parts = (self.log._snapshots, self.log._written)
        before = [part._files for part in parts]
        for part in parts:
            part._files = files
        try:
            work()
        except (Crash, OSError):
            return False
        finally:
            self.log._files = whole
            for part, real in zip(parts, before, strict=True):
                part._files = real
        return True

    def _killed(self, full: bool = False) -> None:
        self.log.abandon()
        self._open(full=full)

    # -- what is done ----------------------------------------------------------------------------------

    def _save_producers(self) -> None:
        self.log.save_producers(self.table.encode(self.log.end_offset), self.log.end_offset)

    def _append(self, records: Sequence[tuple[bytes | None, bytes | None]], producer: int) -> None:
        now, before = self.now, self.log.segment_count
        sequence = now.sequences.get(producer, 0)
        base = self.log.end_offset
        batch = masked(
            placed(keyed(*records, producer=producer, sequence=sequence), base, self.clock, self.epoch)
        )
        self.log.write([Frame(batch, base, self.epoch, 1, b"@%d" % base)], self.clock)
        self.log.sync()
        now.written += [Written(key, payload or b"", payload is None, self.clock) for key, payload in records]
        now.sequences[producer] = sequence + len(records)
        self.table.record(producer, Remembered(0, sequence, sequence + len(records), base, self.clock))
        self.table.settle(self.log.end_offset)
        if self.log.segment_count != before:
            self._save_producers()

    @rule(
        groups=st.lists(
            st.lists(
                st.tuples(st.none() | st.sampled_from(KEYS), st.none() | st.binary(max_size=80)),
                min_size=1,
                max_size=5,
            ),
            min_size=1,
            max_size=8,
        ),
        producer=st.integers(1, 4),
        later=st.integers(0, 500),
    )
    def append(
        self, groups: list[list[tuple[bytes | None, bytes | None]]], producer: int, later: int
    ) -> None:
        self.clock += later
        for records in groups:
            self._append(records, producer)

    @initialize(chance=st.integers(0, 2**32))
    def filled(self, chance: int) -> None:
        self.fill(chance)

    @rule(chance=st.integers(0, 2**32))
    def fill(self, chance: int) -> None:
        """So much that there are closed segments."""
        random = Random(chance)
        for _ in range(random.randrange(8, 25)):
            self.clock += random.choice((0, 0, 20, 200))
            records = [
                (
                    random.choice((None, *KEYS, *KEYS)),
                    None if random.random() < 0.2 else random.randbytes(random.choice((1, 60, 150))),
                )
                for _ in range(random.randrange(1, 5))
            ]
            self._append(records, random.randrange(1, 5))

    @rule(snapshot=st.booleans())
    def roll(self, snapshot: bool) -> None:
        if self.log.segments[-1].next_offset > self.log.segments[-1].base_offset:
            self.log.roll(self.clock)
            if snapshot:
                self._save_producers()

    def _compact(self, files: Files, lag_ms: int, tombstone_ms: int, keys_bytes_max: int) -> None:
        self.now.tombstones_before = max(self.now.tombstones_before, self.clock - tombstone_ms)
        compact(
            self.log,
            now_ms=self.clock,
            lag_ms=lag_ms,
            tombstone_ms=tombstone_ms,
            keys_bytes_max=keys_bytes_max,
            files=files,
            producers=self.table.encode(self.log.end_offset),
        )

    # As region.log.maintenance: what is in a store is not compacted.
    @precondition(lambda self: not self.log.offload.segments)
    @rule(
        lag_ms=st.sampled_from([0, 0, 500]),
        tombstone_ms=st.integers(1, 1_500),
        keys_bytes_max=st.sampled_from([200, 1 << 20]),
        calls=st.none() | st.integers(0, 40),
    )
    def compact(self, lag_ms: int, tombstone_ms: int, keys_bytes_max: int, calls: int | None) -> None:
        files = DiskFiles() if calls is None else CrashingFiles(calls)
        if not self._with(files, lambda: self._compact(files, lag_ms, tombstone_ms, keys_bytes_max)):
            self._killed()

    def _offload(self, files: Files, local_bytes: int) -> None:
        offloader = Offloader(
            self.log, files, self.place, local_bytes, writer=nullcontext(), pace=store.no_pace, tag=tag
        )
        offloader.run(self.log.end_offset, self.log.epochs.starts, upload=True)

    @rule(local_bytes=st.sampled_from([0, 1_000, 3_000]), calls=st.none() | st.integers(0, 25))
    def offload(self, local_bytes: int, calls: int | None) -> None:
        files = DiskFiles() if calls is None else CrashingFiles(calls)
        if not self._with(files, lambda: self._offload(files, local_bytes)):
            self._killed()

    @rule(names=st.sampled_from([("put_file",), ("put_bytes",), ("digest_of",), ("delete",)]))
    def offload_to_a_store_that_fails(self, names: tuple[str, ...]) -> None:
        with pytest.MonkeyPatch.context() as patch, failing(patch, *names), suppress(UnavailableError):
            self._offload(DiskFiles(), 0)

    def _retain(self, kept: int) -> None:
        self._save_producers()
        self.log.delete_old(Retention(size_bytes=kept), self.clock, below=self.log.end_offset)

    @rule(kept=st.integers(1_000, 6_000), calls=st.none() | st.integers(0, 20))
    def retain(self, kept: int, calls: int | None) -> None:
        files = DiskFiles() if calls is None else CrashingFiles(calls)
        if not self._with(files, lambda: self._retain(kept)):
            self._killed()
        assert self.log.start_offset >= self.now.start
        self.now.start = self.log.start_offset

    @rule(
        what=st.sampled_from(["compact", "offload", "retain", "roll"]),
        room=st.integers(0, 3_000),
        killed=st.booleans(),
    )
    def on_a_full_disk(self, what: str, room: int, killed: bool) -> None:
        files = FullFiles(room)
        if what == "compact":
            if self.log.offload.segments:
                return
            self._with(files, lambda: self._compact(files, 0, 500, 1 << 20))
        elif what == "offload":
            self._with(files, lambda: self._offload(files, 0))
        elif what == "retain":
            self._with(files, lambda: self._retain(1_500))
            self.now.start = self.log.start_offset
        elif self.log.segments[-1].next_offset > self.log.segments[-1].base_offset:
            self._with(files, lambda: self.log.roll(self.clock))
        if killed:
            self._killed()
        else:
            # Without room nothing fails for good: the log goes on.
            self.log._written.require_sound()

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """As a follower does whose log parts from its leader's."""
        first = self.log.fixed_to.offset
        if first >= self.log.end_offset:
            return
        offset = data.draw(st.integers(first, self.log.end_offset - 1))
        # What another history shares with this one stays there.
        self.now = self.now.copy()
        with suppress(OffsetOutOfRangeError):
            self.table = self.log.truncate(LogPoint(offset))
            del self.now.written[self.log.end_offset :]
            self.now.sequences = {producer: batches[-1].next_sequence for producer, batches in self.table}
            self._killed()

    @rule(full=st.booleans(), kill=st.booleans())
    def restart(self, full: bool, kill: bool) -> None:
        if kill:
            self._killed(full)
        else:
            self.log.save_producers(self.table.encode(self.log.end_offset))
            self.log.close()
            self._open(full=full)

    @rule(data=st.data())
    def lose_a_file_that_is_made_anew(self, data: st.DataObject) -> None:
        if lost := sorted(self.folder.glob("*.idx")):
            data.draw(st.sampled_from(lost)).unlink()

    # -- backups, and a folder that is lost ------------------------------------------------------------

    def _store_names(self) -> set[str]:
        return {name.removesuffix(".json") for name in store.list_names(self.place)}

    @rule()
    def back_up(self) -> None:
        self.log.close()
        shutil.rmtree(self.backup, ignore_errors=True)
        shutil.copytree(self.folder, self.backup)
        self.saved = self.now.copy()
        self._open()

    @precondition(lambda self: self.backup.exists())
    @rule()
    def put_back(self) -> None:
        self.log.close()
        aside = self.home / "aside"
        shutil.move(self.folder, aside)
        shutil.copytree(self.backup, self.folder)
        log, _ = DiskLog.open(self.folder, IDENTITY, now_ms=self.clock, limits=LIMITS)
        there = self._store_names()
        is_there = {one.url.rpartition("/")[2] for one in log.offload.segments} <= there
        log.close()
        if is_there:
            shutil.rmtree(aside)
            self.now = self.saved.copy()
        else:
            # Retention deleted some of it in the store since: reads of these wait for retention here.
            shutil.rmtree(self.folder)
            shutil.move(aside, self.folder)
        self._open()
        self.given_up |= there

    @rule(calls=st.none() | st.integers(0, 20), others=st.booleans())
    def lose_the_folder(self, calls: int | None, others: bool) -> None:
        if not any(name.endswith(".seg.json") for name in store.list_names(self.place)):
            return
        try:
            Restoration(self.place, self.home / "elsewhere", IDENTITY, DiskFiles(), tag)
        except CorruptionError:
            # An object of a history that was given up lies before a hole that retention made: an operator looks at that (decision 0248, Left).
            assert self.given_up
            return
        self.log.close()
        shutil.rmtree(self.folder)
        while True:
            files = DiskFiles() if calls is None else CrashingFiles(calls)
            calls = None
            with suppress(Crash):
                restored = restore_shard(self.place, self.folder, IDENTITY, files, tag)
                break
            if not is_lost(self.folder, files):
                # It was whole by then.
                shutil.rmtree(self.folder)
        if others and restored.others:
            shutil.rmtree(self.folder)
            restored = restore_shard(
                self.place, self.folder, IDENTITY, DiskFiles(), tag, epoch=restored.others[0].epoch
            )
        self.given_up |= self._store_names()
        self.now = self.of_epoch[restored.history.epoch].copy()
        assert restored.end <= len(self.now.written)
        del self.now.written[restored.end :]
        self.now.start = restored.start
        self.now.tombstones_before = 0
        # Of producers, as the documentation says, what that segment tells.
        log, recovered = DiskLog.open(self.folder, IDENTITY, now_ms=self.clock, limits=LIMITS)
        self.now.sequences = {
            producer: batches[-1].next_sequence for producer, batches in recovered.producers
        }
        log.abandon()
        self._open()

    # -- what is so after each step ----------------------------------------------------------------------

    def _held(self) -> list[Record]:
        found: list[Record] = []
        at, log = self.log.start_offset, self.log
        while at < log.end_offset:
            try:
                batches = log.read(at, 4_096, log.end_offset)
            except NotLocalError as error:
                assert error.segment.remote is not None
                fetch(
                    DiskFiles(), error.segment.remote, error.segment.fetched_path, self.cache, store.no_pace
                )
                continue
            assert batches, "behind a hole there is always an entry"
            for batch in batches:
                assert batch.header.next_offset > at
                found += [
                    record
                    for record in decode_records(masked(decode_batch(batch.data)))
                    if record.offset >= at
                ]
                at = batch.header.next_offset
        return found

    @invariant()
    def the_log_holds_what_it_is_to_hold(self) -> None:
        now, log = self.now, self.log
        assert (log.start_offset, log.end_offset) == (now.start, len(now.written))
        there = {}
        for record in self._held():
            written = now.written[record.offset]
            key = None if record.key is None else bytes(record.key)
            assert (key, bytes(record.payload), record.timestamp_ms) == (
                written.key,
                written.payload,
                written.time_ms,
            )
            assert (TOMBSTONE_HEADER in record.headers) == written.is_tombstone
            there[record.offset] = written
        last = {written.key: at for at, written in enumerate(now.written) if written.key is not None}
        for at in range(now.start, len(now.written)):
            written = now.written[at]
            if at not in there:
                assert written.key is not None and at < log.segments[-1].base_offset
                # What nothing follows is gone only as a tombstone, and all that it deletes before it.
                if last[written.key] == at:
                    assert written.is_tombstone and at < log.compaction.tombstones_from
                    assert not any(one.key == written.key for one in there.values())

    @invariant()
    def the_store_has_what_the_log_says(self) -> None:
        offloaded = self.log.offload
        names = self._store_names()
        for one in offloaded.segments:
            check_object(one)
        known = {url.rpartition("/")[2] for url in offloaded.urls}
        assert names <= known | self.given_up
        assert not {one.url for one in offloaded.segments} & set(offloaded.pending_deletion)
        remote = {one.base_offset for one in self.log.segments if one.remote}
        assert remote == {one.base_offset for one in offloaded.segments}
        assert not any(one.generation for one in self.log.segments if one.remote)

    @invariant()
    def what_is_counted_is_there(self) -> None:
        assert self.log.bytes_held == sum(path.stat().st_size for path in self.folder.glob("*.seg"))

    def teardown(self) -> None:
        self.log.close()
        verdict = verify_shard(self.folder, IDENTITY, check_object=check_object)
        assert verdict.is_whole, verdict.findings
        shutil.rmtree(self.home)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=count(60, 300), stateful_step_count=30, deadline=None)
