"""What a stream's settings in the catalog mean for its shards, and for the memory that they take. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from felix.batch import BatchHeader
from felix.frames import FrameType, frame_header
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardSettings
from region.metadata.records import StreamConfig

HOT_BYTES: Final = 8 << 20
"""Of a durable shard's newest records in memory, at most: subscribers that keep up never read the disk."""
SHARD_BYTES: Final = 32 << 10
"""Of the ring budget for each durable shard that is open, whether it is used or not: twice what an idle one was measured to take, so that
the number of shards is bounded by memory as all else is (`python -m benchmarks shards`)."""

COMPACTED_SEGMENTS: Final = SegmentLimits(segment_bytes_max=32 << 20, segment_age_ms=600_000)
"""Only closed segments are compacted, so those of a compacted stream are closed sooner."""
OFFLOADED_SEGMENTS: Final = SegmentLimits(segment_bytes_max=64 << 20, segment_age_ms=3_600_000)
"""What is read back is fetched segment by segment, and what was written is in the store an hour later."""
COMPANION_RING_BYTES: Final = 128 << 10
"""Of a companion log in memory. It is read once, when it is opened."""


def delivery_frame(header: BatchHeader) -> bytes:
    """What stands before a batch on an event stream: one encoding serves every subscriber."""
    return frame_header(FrameType.BATCH, header.total_length)


def shard_settings(config: StreamConfig, ring_bytes: int) -> ShardSettings:
    """What the catalog's settings mean for a shard."""
    compaction = config.views.compacted
    deduplication = config.views.deduplication
    if compaction is not None and deduplication is not None:
        # Which ids were seen is read from the records: they stay as long as their ids are asked for.
        compaction = msgspec.structs.replace(
            compaction, lag_ms=max(compaction.lag_ms, deduplication.window_ms)
        )
    return ShardSettings(
        config.durability,
        config.retention,
        COMPACTED_SEGMENTS if compaction else OFFLOADED_SEGMENTS if config.views.offload else SegmentLimits(),
        compaction=compaction,
        offload=config.views.offload,
        ring_bytes_max=ring_bytes,
        deduplication=config.views.deduplication,
    )


def least_bytes(config: StreamConfig) -> int:
    """Of the ring budget, for all shards of a stream: reserved as long as it is open."""
    ephemeral = config.durability.kind == "ephemeral"
    return (config.ring_bytes if ephemeral else SHARD_BYTES) * config.shards
