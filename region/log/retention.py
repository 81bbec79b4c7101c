"""Retention: which whole segments may go. Values in, a number out; the caller deletes.

With `acked`, time or size is not enough: nothing goes that a durable subscription has not acknowledged (`hold`, the lowest
committed offset of all of them). As long as nobody has said where that is, nothing goes.

A limit is a promise in two directions: nothing younger than `age_ms` and nothing within the newest
`size_bytes` is deleted; what is beyond goes in whole segments. Disk use is therefore up to the limit and one
segment. By age the segment that is written to is closed after a part of the age, so that records go soon after their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from felix.settings import Retention

AGE_PARTS: Final = 8
"""Records go at the latest so much of their age after it: an eighth, and one sweep."""
AGE_PART_MS_MIN: Final = 50
"""Closing a segment takes two syncs; a lifetime of milliseconds is not worth more of them than this."""


def segment_age_ms(retention: Retention) -> int | None:
    """How long after its first batch a segment is closed, so that it can go by age; None where age is no limit."""
    return max(retention.age_ms // AGE_PARTS, AGE_PART_MS_MIN) if retention.age_ms else None


class SegmentSpan(NamedTuple):
    """One segment as retention sees it. `last_time_ms` is -1 where it holds no batch."""

    base_offset: int
    next_offset: int
    segment_bytes: int
    last_time_ms: int


def plan_deletion(
    segments: Sequence[SegmentSpan], retention: Retention, now_ms: int, *, hold: int | None = None
) -> int:
    """How many segments, counted from the oldest, are to be deleted. The last one, being active, never is.

    `hold`: with `acked`, the offset from which on everything stays; None where no durable subscription holds anything.
    """
    total = sum(segment.segment_bytes for segment in segments)
    count = 0
    for segment in segments[:-1]:
        aged = retention.age_ms > 0 and segment.last_time_ms + retention.age_ms < now_ms
        beyond = 0 < retention.size_bytes <= total - segment.segment_bytes
        held = retention.acked and hold is not None and segment.next_offset > hold
        if held or (not aged and not beyond):
            break
        total -= segment.segment_bytes
        count += 1
    return count
