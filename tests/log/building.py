"""What the log's tests build with: batches, a shard's parts, and file layers that fail on purpose."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

from msgspec.structs import replace

from felix.batch import (
    TOMBSTONE_HEADER,
    Batch,
    NewRecord,
    body_checksum,
    decode_batch,
    decode_records,
    encode_batch,
)
from felix.storage.disk import DiskFiles
from felix.storage.port import Files
from region.log.compaction import CompactionReport
from region.log.compactor import Compactor, PassSettings
from region.log.disk import DiskLog
from region.log.frame import Frame
from region.log.offload import TagOf
from region.log.offloader import Restoration, RestoredShard
from region.log.ring import Entry
from region.log.segment import ShardIdentity
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardHooks, ShardLog, ShardSettings

IDENTITY = ShardIdentity("us-east", "acme/payments/orders", bytes(range(16)), 3)
SMALL = SegmentLimits(segment_bytes_max=2_000)


def batch_of(*payloads: bytes, producer: int = 0, epoch: int = 0, sequence: int = 0) -> Batch:
    return encode_batch(
        [NewRecord(payload) for payload in payloads],
        shard=IDENTITY.shard,
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
    )


def placed(batch: Batch, base_offset: int, time_ms: int = 1_000, epoch: int = 0) -> Batch:
    header = replace(
        batch.header,
        shard=IDENTITY.shard,
        base_offset=base_offset,
        append_time_ms=time_ms,
        leader_epoch=epoch,
    )
    return Batch(header, batch.body)


def masked(batch: Batch) -> Batch:
    """A stand-in for a seal that is its own inverse: other bytes of the same length, other checksum."""
    body = bytes(byte ^ 0x5A for byte in batch.body)
    return Batch(replace(batch.header, body_checksum=body_checksum(body)), body)


def payloads_of(entries: Sequence[Entry], start: int = 0) -> list[bytes]:
    return [
        bytes(record.payload)
        for entry in entries
        for record in decode_records(decode_batch(entry.data))
        if record.offset >= start
    ]


def first_segment(folder: Path) -> Path:
    return min(folder.glob("*.seg"))


def flip(path: Path, content: bytes) -> None:
    """Change one bit of where `content` stands in a file."""
    data = bytearray(path.read_bytes())
    data[data.index(content)] ^= 1
    path.write_bytes(data)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something is so; a test's timeout bounds it."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - what is waited for is not an event
            await asyncio.sleep(0.002)


def open_disk(folder: Path, files: Files | None = None, **more: object) -> DiskLog:
    return DiskLog.open(folder, IDENTITY, now_ms=1_000, files=files, **more)[0]  # type: ignore[arg-type]


def write_batches(log: DiskLog, batches: Sequence[Batch], *, time_ms: int = 1_000) -> None:
    """One group: written together, not synced."""
    offset = log.end_offset
    frames = []
    for batch in batches:
        ready = placed(batch, offset, time_ms)
        frames.append(Frame(ready, offset, 0))
        offset = ready.header.next_offset
    log.write(frames, time_ms)


def keyed(
    *records: tuple[bytes | None, bytes | None], producer: int = 0, sequence: int = 0, compress: bool = False
) -> Batch:
    """Key and payload of each; a payload of None is a tombstone."""
    return encode_batch(
        [
            NewRecord(payload or b"", key, {TOMBSTONE_HEADER: b""} if payload is None else None)
            for key, payload in records
        ],
        shard=IDENTITY.shard,
        producer_id=producer,
        base_sequence=sequence,
        compress=compress,
    )


def compact(
    log: DiskLog,
    *,
    now_ms: int = 1_000_000,
    lag_ms: int = 0,
    tombstone_ms: int = 1_000,
    keys_bytes_max: int = 1 << 20,
    files: Files | None = None,
    producers: bytes = b"",
    pace: Callable[[], None] = lambda: None,
) -> CompactionReport | None:
    """One pass. `pace` is called before each batch that is read."""
    return Compactor(
        log,
        files or DiskFiles(),
        PassSettings(now_ms, lag_ms, tombstone_ms, log.end_offset, keys_bytes_max),
        seal=masked,
        open_batch=masked,
        writer=nullcontext(),
        pace=pace,
    ).run(producers, ())


def restore_shard(
    base: str,
    folder: Path,
    identity: ShardIdentity,
    files: Files,
    tag: TagOf,
    *,
    unverified: bool = False,
    epoch: int | None = None,
    accept_gap: bool = False,
) -> RestoredShard:
    """As `felix log restore` does it, of one shard."""
    restoration = Restoration(
        base, folder, identity, files, tag, unverified=unverified, epoch=epoch, accept_gap=accept_gap
    )
    restoration.begin()
    return restoration.finish()


def append(log: DiskLog, batch: Batch, time_ms: int = 1_000) -> None:
    ready = masked(placed(batch, log.end_offset, time_ms))
    log.write([Frame(ready, ready.header.base_offset, 0)], time_ms)
    log.sync()


def stored(log: DiskLog) -> list[bytes]:
    """Every payload that the log holds, read batch range by batch range."""
    found, offset = [], log.start_offset
    while batches := log.read(offset, 4_096, log.end_offset):
        for batch in batches:
            found += [bytes(record.payload) for record in decode_records(decode_batch(batch.data))]
            offset = batch.header.next_offset
    return found


@asynccontextmanager
async def serving(
    folder: Path | None,
    settings: ShardSettings | None = None,
    hooks: ShardHooks | None = None,
    files: Files | None = None,
) -> AsyncIterator[ShardLog]:
    with ThreadPoolExecutor(4) as pool:
        shard = await ShardLog.open(
            folder,
            IDENTITY,
            settings or ShardSettings(),
            hooks or ShardHooks(),
            commit_pool=pool,
            read_pool=pool,
            files=files,
        )
        try:
            yield shard
        finally:
            await shard.close()


class FailingFiles(DiskFiles):
    """The real calls, each of which fails while its error number is set. Paths opened are kept by descriptor."""

    def __init__(self) -> None:
        self.sync_error = 0
        self.write_error = 0
        self.small_error = 0
        """Of a write to `offloaded`."""
        self.room: int | None = None
        """Bytes that may still be written to segments before the disk is full."""
        self.room_left: int | None = None
        """What the file system says is free, where it is asked."""
        self.syncs = 0
        self.opened: dict[int, str] = {}

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        self.opened[descriptor] = path.name
        return descriptor

    def free_bytes(self, folder: Path) -> int:
        return super().free_bytes(folder) if self.room_left is None else self.room_left

    def _is_segment(self, descriptor: int) -> bool:
        return ".seg" in self.opened[descriptor]

    def sync(self, descriptor: int) -> None:
        if self._is_segment(descriptor):
            self.syncs += 1
            if self.sync_error:
                raise OSError(self.sync_error, os.strerror(self.sync_error))
        super().sync(descriptor)

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        if self.small_error and "offloaded" in self.opened[descriptor]:
            raise OSError(self.small_error, os.strerror(self.small_error))
        if self._is_segment(descriptor):
            if self.write_error:
                raise OSError(self.write_error, os.strerror(self.write_error))
            if self.room is not None:
                wanted = b"".join(buffers)
                if not self.room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                part = wanted[: self.room]
                self.room -= len(part)
                return super().pwritev(descriptor, [part], position)
        return super().pwritev(descriptor, buffers, position)
