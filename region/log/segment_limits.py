"""When a segment is closed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SEGMENT_BYTES_MAX: Final = 256 << 20
"""Large enough that a roll is rare, small enough that retention is fine-grained and a tail scan takes a second."""
SEGMENT_AGE_MS: Final = 24 * 3_600_000
"""Retention by age deletes whole segments, so one must not stay open for longer than a day."""


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """When a segment is closed and the next one begins: bytes, or ms since its first batch."""

    segment_bytes_max: int = SEGMENT_BYTES_MAX
    segment_age_ms: int = SEGMENT_AGE_MS
