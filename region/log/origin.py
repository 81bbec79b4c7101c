"""Where a log begins that is not there yet: a new stream's at 0, a copy's where what it is copied from begins by now.

What stands before its first entry is told by nothing in the log, so it comes with it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from region.log.epochs import EpochStart
from region.log.point import LogPoint


@dataclass(frozen=True, slots=True)
class Origin:
    """A log's beginning, and what was true there: the annotation of each slot, what was known of the producers (a snapshot, or empty),
    and the leader epochs that had begun before."""

    point: LogPoint = LogPoint(0)  # noqa: RUF009 - a tuple
    annotations: Mapping[int, bytes] = field(default_factory=dict[int, bytes])
    producers: bytes = b""
    epochs: tuple[EpochStart, ...] = ()
