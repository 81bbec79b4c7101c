"""What a shard counts, for whoever exports it. Counters only grow; gauges are properties of the shard."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ShardCounters:
    """Bytes are plain batch bytes (header and body), times in ns. Written by the shard alone."""

    batches: int = 0
    records: int = 0
    appended_bytes: int = 0
    duplicates: int = 0
    repeated_ids: int = 0
    groups: int = 0
    syncs: int = 0
    sync_ns: int = 0
    hot_reads: int = 0
    disk_reads: int = 0
    disk_read_bytes: int = 0
    refused_memory: int = 0
    refused_disk_full: int = 0
    segments_deleted: int = 0
    compactions: int = 0
    compactions_failed: int = 0
    compaction_read_bytes: int = 0
    compaction_written_bytes: int = 0
    compaction_removed_records: int = 0
    compaction_ns: int = 0
    offloaded_segments: int = 0
    offloaded_bytes: int = 0
    offload_failed: int = 0
    fetched_segments: int = 0
    fetched_bytes: int = 0
