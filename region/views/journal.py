"""The journal: where a view keeps what does not stand in the stream's own records.

A view (a queue, a stream's subscriptions, the transactions) is a state machine. A decision gives entries; the view applies them
at once, hands them to `append`, and answers its caller when `done` comes: by then they are as durable as the stream. After a
restart `replay` gives the entries back, in order. The journal is a companion log of the stream (StreamTable.open_companion),
so it is sealed, synced, verified and deleted as the stream's records are.

So that it does not grow for ever, the view's whole state is written into it from time to time, as entries too (a snapshot), and
what stands before is let go. The log stays the only truth: there is no snapshot beside it.

Invariants:
- `done` is called once per append, in order, on the loop;
- after a refused append nothing is appended until the entries have been replayed: the view has applied what is not there;
- an unfinished snapshot counts for nothing; what is below the newest finished one is never replayed;
- an entry that was appended while a snapshot was being written is replayed after it.

Entries stand as payloads: one byte for the kind, then the view's bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from felix.batch import NewRecord, decode_batch, decode_payloads, encode_batch
from felix.errors import Code, CorruptionError, FelixError, UnavailableError
from region.gather import Done, awaited, ignore
from region.log.shard import Appended, ShardLog

log = logging.getLogger("felix.region.views")

ENTRY_BYTES_MAX: Final = (1 << 20) - 4_096
"""One entry and its kind fit a batch, seal included."""
BATCH_BYTES: Final = 256 << 10
"""Entries of one iteration of the event loop are written together, in batches of about this size."""
SNAPSHOT_BYTES_MIN: Final = 4 << 20
"""A snapshot is not worth its writing before so much has been appended since the last one."""
SNAPSHOT_RATIO: Final = 4
"""Nor before the journal is so many times as large as the last one: writing it costs a bounded share of all writing."""
PENDING_BYTES_MAX: Final = 8 << 20
"""Waiting for the disk before decisions are refused: a quarter of what the log itself lets wait."""
_READ_BYTES: Final = 1 << 20


class _Kind(IntEnum):
    ENTRY = 0
    BEGIN = 1
    PART = 2
    END = 3


class _Snapshot(NamedTuple):
    """Offsets of its first and last entry in the journal, and its bytes."""

    begin: int
    end: int
    size: int


class Journal:
    """One journal. `log` is None for an ephemeral stream: then nothing is kept, and every append is done at once."""

    def __init__(
        self,
        log: ShardLog | None,
        snapshot: Callable[[], Iterable[bytes]],
        *,
        snapshot_bytes_min: int = SNAPSHOT_BYTES_MIN,
    ) -> None:
        """`snapshot` gives the view's whole state as entries; it is called between two decisions."""
        self._log = log
        self._snapshot = snapshot
        self._snapshot_bytes_min = snapshot_bytes_min
        self._last_snapshot_bytes = 0
        self._since_snapshot = 0
        self._queue: list[tuple[bytes, Done]] = []
        self._flush_due = False
        self._lost: FelixError | None = None
        self._under_way = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._snapshot_task: asyncio.Task[None] | None = None
        self.snapshots = 0
        if log is not None:
            log.subscribe_tail(self._look_for_end)

    def _look_for_end(self) -> None:
        if self._log is not None and self._log.failure is not None:
            self._settled.set()

    @property
    def lost(self) -> FelixError | None:
        """Why an append was refused, until the journal has been replayed."""
        return self._lost

    def refusal(self) -> FelixError | None:
        """Why nothing may be decided now: the journal is to be replayed, takes nothing for a while (its disk is full, say), or more
        waits for the disk than is good."""
        if self._lost is not None:
            return self._lost
        if self._log is not None and (held := self._log.held_back() or self._log.no_room()):
            return held
        if self._log is not None and self._log.pending_bytes > PENDING_BYTES_MAX:
            return UnavailableError(
                f"{self._log.pending_bytes} bytes of this view wait for the disk.",
                code=Code.LIMIT_MEMORY,
                retry_after_ms=50,
            )
        return None

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return self._log.disk_bytes if self._log is not None else 0

    # -- reading ---------------------------------------------------------------------------------------

    async def replay(self) -> AsyncIterator[bytes]:
        """The entries that make up the state: of the newest finished snapshot, then what came after it was taken.

        Waits for what is under way. The view begins empty, and appends nothing meanwhile. Raises what ended the log, what reading
        it raises, CorruptionError.
        """
        await self.settled()
        if self._log is None:
            self._lost = None
            return
        if self._log.failure is not None:
            # Of a log that has ended nothing is read where it holds nothing, and each append would bring the next replay.
            raise self._log.failure
        newest = await self._newest_snapshot()
        start = self._log.log_start_offset
        if newest is not None:
            start = newest.begin
            async for offset, kind, entry in self._read(newest.begin):
                if offset >= newest.end:
                    break
                if kind is _Kind.PART:
                    yield entry
        async for _, kind, entry in self._read(start):
            if kind is _Kind.ENTRY:
                yield entry
        self._last_snapshot_bytes = newest.size if newest else 0
        self._since_snapshot = max(0, self._log.disk_bytes - self._last_snapshot_bytes)
        # Not before: a replay that fails, or is given up, leaves the view with half a state.
        self._lost = None

    async def _newest_snapshot(self) -> _Snapshot | None:
        assert self._log is not None
        newest: _Snapshot | None = None
        begin, size = -1, 0
        async for offset, kind, entry in self._read(self._log.log_start_offset):
            if kind is _Kind.BEGIN:
                begin, size = offset, 0
            elif kind is _Kind.PART:
                size += len(entry)
            elif kind is _Kind.END and begin >= 0:
                newest, begin = _Snapshot(begin, offset, size), -1
        return newest

    async def _read(self, offset: int) -> AsyncIterator[tuple[int, _Kind, bytes]]:
        shard = self._log
        assert shard is not None
        end = shard.high_watermark
        while offset < end:
            for entry in await shard.read(offset, _READ_BYTES):
                batch = decode_batch(entry.data)
                for number, payload in enumerate(decode_payloads(batch), entry.base_offset):
                    if number < offset:
                        continue
                    if not payload or payload[0] not in list(_Kind):
                        raise CorruptionError(
                            f"Entry {number} of a journal of {shard.identity.stream} is none."
                        )
                    yield number, _Kind(payload[0]), bytes(payload[1:])
                offset = entry.next_offset

    # -- writing ---------------------------------------------------------------------------------------

    def append(self, entry: bytes, done: Done) -> None:
        """Write one entry. `done` is called with None once it is durable, or with why it is not and will not be.

        The view has applied it already. What is appended in one iteration of the event loop is written together. `done` may be called
        before this returns. Ask `refusal` before deciding: an append that the log has no room for costs a replay.
        """
        assert len(entry) < ENTRY_BYTES_MAX
        if self._lost is not None:
            done(self._lost)
        elif self._log is None:
            done(None)
        else:
            self._queue.append((b"\0" + entry, done))
            if not self._flush_due:
                self._flush_due = True
                asyncio.get_running_loop().call_soon(self._flush)

    async def written(self, entry: bytes) -> None:
        """`append`, awaited: the entry is durable when this returns. Raises why it is not."""
        await awaited(lambda done: self.append(entry, done))

    def _flush(self) -> None:
        self._flush_due = False
        queue, self._queue = self._queue, []
        group: list[tuple[bytes, Done]] = []
        size = 0
        for item in queue:
            if group and size + len(item[0]) > BATCH_BYTES:
                self._write(group)
                group, size = [], 0
            group.append(item)
            size += len(item[0])
        if group:
            self._write(group)
        if self._since_snapshot >= max(self._snapshot_bytes_min, SNAPSHOT_RATIO * self._last_snapshot_bytes):
            self._begin_snapshot()

    def _write(self, group: list[tuple[bytes, Done]]) -> None:
        def done(error: FelixError | None) -> None:
            for _, each in group:
                try:
                    each(error)
                except Exception:
                    # One view's mistake must not keep the others of its group waiting.
                    log.exception("the receiver of a journal's answer failed")

        self._append([payload for payload, _ in group], done)

    def _append(self, payloads: list[bytes], done: Done) -> None:
        shard = self._log
        assert shard is not None
        if self._lost is not None:
            done(self._lost)
            return

        def appended(result: Appended | FelixError) -> None:
            self._under_way -= 1
            if isinstance(result, FelixError):
                if self._lost is None:
                    self._lost = result
                    log.warning("a journal of %s was refused: %s", shard.identity.stream, result)
                done(self._lost)
            else:
                done(None)
            if not self._under_way:
                self._settled.set()

        self._under_way += 1
        if shard.failure is None:
            self._settled.clear()
        batch = encode_batch([NewRecord(payload) for payload in payloads])
        self._since_snapshot += batch.header.total_length
        shard.append_nowait(batch, appended)

    def _begin_snapshot(self) -> None:
        """Take the state as it is now; its parts follow as the log has room, with newer entries between them."""
        shard = self._log
        if self._lost is not None or shard is None or self._snapshot_task is not None:
            return
        parts = [b"\2" + part for part in self._snapshot()]
        begin = shard.log_end_offset
        self._last_snapshot_bytes = sum(map(len, parts))
        self._since_snapshot = 0
        self._append([bytes([_Kind.BEGIN])], ignore)
        self._snapshot_task = asyncio.ensure_future(self._write_snapshot(begin, parts))

    async def _write_snapshot(self, begin: int, parts: list[bytes]) -> None:
        assert self._log is not None
        try:
            group: list[bytes] = []
            size = 0
            for part in parts:
                if group and size + len(part) > BATCH_BYTES:
                    await self._appended(group)
                    group, size = [], 0
                group.append(part)
                size += len(part)
            await self._appended([*group, bytes([_Kind.END])])
            self.snapshots += 1
            await self._log.trim(begin)
        except FelixError as error:
            # Nothing is lost: the older one still counts, and what could not be let go stays until the next one.
            log.warning("a snapshot of %s was not finished: %s", self._log.identity.stream, error)
        finally:
            self._snapshot_task = None

    async def _appended(self, payloads: list[bytes]) -> None:
        await awaited(lambda done: self._append(payloads, done))

    async def settled(self) -> None:
        """Write the waiting entries, and wait until all that is under way is answered. Of a log that has ended nothing is waited for: what
        it cannot commit any more, as it is led elsewhere, is answered when it is closed."""
        if self._flush_due:
            self._flush()
        await self._settled.wait()

    async def close(self) -> None:
        """As `settled`; no snapshot is finished. The log's opener closes it."""
        if self._snapshot_task is not None:
            self._snapshot_task.cancel()
        await self.settled()
