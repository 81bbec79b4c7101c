"""Retention: which whole segments may go. Values in, a number out; the caller deletes.

A limit is a promise in two directions: nothing younger than `age_ms` and nothing within the newest
`bytes_kept` is deleted; what is beyond goes in whole segments. Disk use is therefore up to the limit and one
segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Retention:
    """What a stream keeps. None means without limit; with both, what either limit lets go is deleted."""

    age_ms: int | None = None
    bytes_kept: int | None = None


class SegmentSpan(NamedTuple):
    """One segment as retention sees it. `last_time_ms` is -1 where it holds no batch."""

    base_offset: int
    next_offset: int
    segment_bytes: int
    last_time_ms: int


def plan_deletion(segments: Sequence[SegmentSpan], retention: Retention, now_ms: int) -> int:
    """How many segments, counted from the oldest, are to be deleted. The last one, being active, never is."""
    total = sum(segment.segment_bytes for segment in segments)
    count = 0
    for segment in segments[:-1]:
        aged = retention.age_ms is not None and segment.last_time_ms + retention.age_ms < now_ms
        beyond = retention.bytes_kept is not None and total - segment.segment_bytes >= retention.bytes_kept
        if not aged and not beyond:
            break
        total -= segment.segment_bytes
        count += 1
    return count
