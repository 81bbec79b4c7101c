"""What a durable shard has on its disk, and what changes it there: the half of region.log.shard that an ephemeral shard does without.

Only region.log.shard makes one and calls it, on the loop; what a method says it does in a thread, a thread of the commit pool does.

Invariants:
- groups of appends are written in the order in which they were put (region.log.group_commit), by one thread at a time, which holds the
  folder's lock; so does whatever else changes the folder (region.log.folder_writer);
- what stands for a batch (a note, a leader epoch) is on the disk before the batch is;
- of a log that has copies (region.log.copies) a group is written here and told to them; they sync, cut and close it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from felix.batch import Batch
from felix.lazy_event import LazyThreadEvent
from felix.storage.port import Files, is_full
from region.log import maintenance
from region.log.ahead import Ahead, Note
from region.log.copies import Copies
from region.log.core import Pending, WriteRefused, Written
from region.log.disk import DiskLog
from region.log.disk_reader import DiskReader
from region.log.folder_writer import FolderWriter
from region.log.frame import Frame, note_frames
from region.log.group_commit import GroupCommit
from region.log.maintenance import Maintenance
from region.log.origin import Origin
from region.log.point import LogPoint
from region.log.producers import ProducerTable
from region.log.recovery import Recovered
from region.log.ring import Entry
from region.log.segment import ShardIdentity
from region.log.shard_settings import ShardHooks, ShardSettings, ShardStore
from region.log.states import State


class Found(NamedTuple):
    """What was there when the shard was opened."""

    folder: Path
    files: Files
    disk: DiskLog
    recovered: Recovered
    ahead: Ahead
    notes: list[Note]


def recover(
    folder: Path,
    files: Files,
    identity: ShardIdentity,
    settings: ShardSettings,
    hooks: ShardHooks,
    *,
    full_verify: bool,
    synced: bool,
) -> Found:
    """In a thread: bring the folder in order and read what a start has to know. Raises CorruptionError, OSError."""
    ahead = Ahead(folder, files)
    disk, recovered = DiskLog.open(
        folder,
        identity,
        now_ms=hooks.clock_ms(),
        files=files,
        limits=settings.segments,
        commitment=hooks.commitment,
        runtime=hooks.runtime,
        full_verify=full_verify,
        origin=Origin(LogPoint(settings.first_offset)),
        open_logs=hooks.open_logs,
        synced=synced,
    )
    # Here, and not when they are asked for: one visit to a thread less for each shard of a start.
    try:
        return Found(folder, files, disk, recovered, ahead, ahead.read())
    except OSError:
        disk.abandon()
        raise


def found_of(copies: Copies, files: Files) -> Found:
    """Of a log that has copies and is open: its notes stand in the log."""
    disk = copies.disk
    recovered = Recovered(list(disk.segments), disk.annotations, disk.epochs, copies.producers, disk.report)
    return Found(disk.folder, files, disk, recovered, Ahead(disk.folder, files), [])


class Shard(maintenance.Shard, Protocol):
    """What its files ask of a shard, and tell it, on the loop."""

    def group_ended(self, event: Written | WriteRefused) -> None:
        """What became of a group."""

    def sync_ended(self, elapsed_ns: int) -> None:
        """A sync that `sync_soon` asked for is done."""

    def plain_entry(self, batch: Batch) -> Entry:
        """In any thread: a batch as readers get it."""


class ShardFiles:
    """See the module."""

    def __init__(
        self,
        shard: Shard,
        found: Found,
        hooks: ShardHooks,
        commit_pool: Executor,
        read_pool: Executor,
        store: ShardStore,
        copies: Copies | None,
    ) -> None:
        """`copies`: who keeps the others."""
        self._shard = shard
        self._hooks = hooks
        self._copies = copies
        self._syncs_groups = shard.settings.durability.kind == "fsync"
        self.disk = found.disk
        self.ahead = found.ahead
        self._notes_found = found.notes
        # Ends what moves to and from a store.
        self._ending = LazyThreadEvent()
        self._segments_seen = found.disk.segment_count
        self.writer = FolderWriter(
            found.folder, found.disk.writer, commit_pool, asyncio.get_running_loop(), shard.stop
        )
        self.groups = GroupCommit(commit_pool, found.folder, self._write, self._tell_written)
        self.reader = DiskReader(
            found.disk,
            found.files,
            store,
            read_pool,
            shard.counters,
            folder=found.folder,
            ending=self._ending,
            failed=shard.stop,
            repair=None if copies is None else copies.repair,
        )
        self.maintenance = Maintenance(
            shard,
            found.disk,
            found.files,
            hooks,
            store,
            folder=found.folder,
            writer=found.disk.writer,
            ending=self._ending,
            copies=copies,
        )

    @property
    def offload_waiting_bytes(self) -> int:
        """Bytes of closed segments that are in no store."""
        return sum(one.segment_bytes for one in self.disk.segments[:-1] if one.remote is None)

    def dirty_bytes(self, high_watermark: int) -> int:
        """Bytes of closed segments that hold what was not compacted yet."""
        clean_to = self.disk.compaction.clean_to
        spans = self.disk.dirty_spans(high_watermark)
        return sum(one.segment_bytes for one in spans if one.next_offset > clean_to)

    # Groups of appends.

    def _write(self, group: Sequence[Pending]) -> int:
        """In a thread: seal, write and, where acknowledgements ask for it, sync a group; ns the sync took."""
        with self.writer.lock:
            disk, copies = self.disk, self._copies
            notes = [item.note for item in group if item.note]
            if notes and copies is None:
                self.ahead.write(notes)
            frames = []
            for item in group:
                if item.batch:
                    item.entry = self._shard.plain_entry(item.batch)
                    sealed = self._hooks.seal(item.batch)
                elif item.annotation or item.frees_slot:
                    sealed = None
                else:
                    continue
                if item.note is not None and copies is not None:
                    # Whoever leads next has it where it has what it is for.
                    frames += note_frames(item.note.data, item.answer.base_offset, item.epoch)
                frames.append(Frame(sealed, item.answer.base_offset, item.epoch, item.slot, item.annotation))
            if not frames:
                return 0
            if copies is not None:
                return self._write_beside(copies, frames)
            disk.begin_epoch(frames[0].leader_epoch)
            disk.write(frames, self._hooks.clock_ms())
            if not self._syncs_groups:
                return 0
            begun = self._hooks.runtime.clock.monotonic_ns()
            disk.sync()
            return self._hooks.runtime.clock.monotonic_ns() - begun

    def _write_beside(self, copies: Copies, frames: Sequence[Frame]) -> int:
        """They are sent to the other copies after the write and before the sync, which is not asked for here."""
        prev = self.disk.end_point
        self.disk.write(frames, self._hooks.clock_ms())
        # On the loop before the group is told to be written.
        self.writer.tell(lambda: copies.written(prev, frames))
        return 0

    def _tell_written(self, event: Written | WriteRefused) -> None:
        """In a thread: what became of a group."""
        self.writer.tell(lambda: self._shard.group_ended(event))

    def take_notes_found(self) -> list[Note]:
        """What a crash left open; empty the next time."""
        found, self._notes_found = self._notes_found, []
        return found

    # What else changes the folder.

    def submit(self, work: Callable[[], None], *, optional: bool = False) -> None:
        """As `FolderWriter.submit`, while the shard serves."""
        if self._shard.state in (State.SERVING, State.FULL):
            self.writer.submit(work, optional=optional)

    def sync_soon(self) -> None:
        """Sync what is written, in a thread; `sync_ended` says when."""
        sync, clock = self.disk.sync, self._hooks.runtime.clock

        def timed() -> None:
            begun = clock.monotonic_ns()
            sync()
            elapsed = clock.monotonic_ns() - begun
            self.writer.tell(lambda: self._shard.sync_ended(elapsed))

        self.submit(timed)

    def segments_changed(self) -> None:
        """Their number is another than before, and not because one was rolled."""
        self._segments_seen = self.disk.segment_count

    def save_producers_of_a_rolled_segment(self) -> None:
        """Where a segment was rolled: what is before it need not be read again to know the producers."""
        disk, reader = self.disk, self.reader
        if disk.segment_count == self._segments_seen:
            return
        self._segments_seen = disk.segment_count
        snapshot, offset = self._shard.producers_snapshot(), self._shard.high_watermark
        truncations = reader.truncations

        def save() -> None:
            # A truncation in between made the snapshot claim what is no longer there.
            if truncations == reader.truncations:
                disk.save_producers(snapshot, offset)

        self.submit(save, optional=True)

    async def let_go(self, delete: Callable[[], int], producers: bytes, offset: int) -> int:
        """Delete old segments; how many. `producers` is kept before, as of `offset`: what they alone tell of them; empty where there are none."""
        disk = self.disk

        def work() -> int:
            if not producers:
                return delete()
            try:
                disk.save_producers(producers, offset)
            except OSError:
                # On a full disk it is more urgent that something goes; then there may be room.
                count = delete()
                with suppress(OSError):
                    disk.save_producers(producers, offset)
                return count
            return delete()

        return await self.writer.change(work)

    async def truncate(self, cut: LogPoint) -> ProducerTable:
        """Cut every entry that reaches past `cut`; the producers that are left."""
        with self.reader.truncating():
            return await self.writer.change(self.disk.truncate, cut)

    # Closing.

    def end(self) -> None:
        """Begin nothing more beside appends, and break off what moves to and from a store."""
        self.maintenance.end()
        self._ending.set()

    async def ended(self) -> None:
        """Nobody reads or changes closed segments any more."""
        await self.reader.ended()
        await self.maintenance.ended()

    async def close(self, producers: bytes) -> None:
        """Sync and close, with `producers` beside the log where there are any. Raises as `FolderWriter.change`."""

        def finish() -> None:
            try:
                if producers:
                    self.disk.save_producers(producers)
            except OSError as error:
                # It is only a shortcut; recovery reads the log instead.
                if not is_full(error):
                    raise
            finally:
                self.ahead.close()
                self.disk.close()

        await self.writer.change(finish)

    async def abandon(self) -> None:
        """Close a failed shard's files as they are."""
        await self.writer.change(self.disk.abandon)
        await self.writer.change(self.ahead.close)
