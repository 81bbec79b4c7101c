"""What a shard is opened with: what its stream asks of it, what the broker injects, and where segments are moved to and from."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Final

from felix.batch import Batch, BatchHeader
from felix.errors import FelixError
from felix.runtime.port import Clock, Runtime
from felix.runtime.real import REAL
from felix.settings import FSYNC, Compaction, Deduplication, Durability, Offload, Retention
from region.log.offload import TagOf
from region.log.offloader import RATE_BYTES, FetchedCache
from region.log.open_logs import OpenLogs
from region.log.ring import RING_BYTES_MAX, RING_ENTRIES_MAX
from region.log.ring_pool import RingPool
from region.log.segment import no_commitment
from region.log.segment_limits import SegmentLimits

PENDING_BYTES_MAX: Final = 32 << 20
"""Appended and not yet durable, per shard: several groups ahead of a slow disk, and no more."""


def same_batch(batch: Batch) -> Batch:
    """The seal and its opening for a stream that is kept unsealed."""
    return batch


def no_prefix(header: BatchHeader) -> bytes:
    """Delivery bytes without a frame of the wire around them."""
    return b""


def no_tag(purpose: str, data: bytes) -> bytes:
    """The tag of a stream that is kept unsealed."""
    return b""


def always_allowed() -> None:
    """Appends of a log whose region no other broker can serve meanwhile."""


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """What a stream asks of its shards. Bytes and ms; see the constants for the reasons."""

    durability: Durability = FSYNC
    retention: Retention = field(default_factory=Retention)
    segments: SegmentLimits = field(default_factory=SegmentLimits)
    compaction: Compaction | None = None
    offload: Offload | None = None
    ring_bytes_max: int = RING_BYTES_MAX
    ring_entries_max: int = RING_ENTRIES_MAX
    pending_bytes_max: int = PENDING_BYTES_MAX
    deduplication: Deduplication | None = None
    first_offset: int = 0
    """Where a log begins that is not there yet; a durable one goes on from its log."""

    def altered(self, wanted: ShardSettings) -> ShardSettings:
        """What a shard that was opened with these goes by once `wanted` is asked for while it serves: all of it but what it was opened with."""
        return replace(wanted, **{name: getattr(self, name) for name in OPENED_WITH})


OPENED_WITH: Final = (
    "durability",
    "ring_bytes_max",
    "ring_entries_max",
    "pending_bytes_max",
    "first_offset",
)
"""Settings that a shard keeps for as long as it is open. A new setting can be altered unless it stands here."""


@dataclass(frozen=True, slots=True)
class ShardHooks:
    """What the broker injects: called in threads of the pools, `seal` by a commit and a compaction at once, `open_batch`
    by many.

    A batch to seal carries its final header; a data key is of one leader epoch, so `seal` chooses it by the
    header's. `seal` gives the batch as it stands on disk, `open_batch` undoes it (also for batches of older
    keys); `commitment` is asked for each new segment; `frame_prefix` gives what precedes a plain batch in
    delivery. `refusal` is asked for each append, on the loop: why the broker may not append now, or None.
    """

    seal: Callable[[Batch], Batch] = same_batch
    open_batch: Callable[[Batch], Batch] = same_batch
    commitment: Callable[[], bytes] = no_commitment
    frame_prefix: Callable[[BatchHeader], bytes] = no_prefix
    tag: TagOf = no_tag
    """Of the manifests of offloaded segments (region.log.seal.LogSeal)."""
    refusal: Callable[[], FelixError | None] = always_allowed
    runtime: Runtime = REAL
    rings: RingPool | None = None
    """Where a durable shard's newest records take their memory; None: its own bound is all."""
    open_logs: OpenLogs | None = None
    """Who bounds how many shards have files open for writing; None: nobody."""

    def clock_ms(self) -> int:
        """The wall clock."""
        return self.runtime.clock.now_ms()


@dataclass(frozen=True, slots=True)
class ShardStore:
    """What moves segments to and from stores: threads of their own, one bounded cache, and a rate, of the whole broker. `fetch_pool`: readers do not wait
    for uploads; None: `pool`."""

    pool: Executor
    cache: FetchedCache = field(default_factory=FetchedCache)
    rate_bytes: int = RATE_BYTES
    clock: Clock = REAL.clock
    fetch_pool: Executor | None = None
