"""What is known of a log that was closed while its stream goes on, and what has to be there when it is open again. Pure."""

from __future__ import annotations

from typing import NamedTuple

from region.log.point import LogPoint


class Left(NamedTuple):
    """Whoever opens the log next in this process finds all of it."""

    acknowledged: LogPoint
    epoch: int
    """of what was appended last; 0 where the next append was to begin one"""
    failed: bool
    """whether its disk had failed, so that it was not closed in order"""


def what_is_missing(found: LogPoint, acknowledged: LogPoint) -> str:
    """What a log that is open again, and ends at `found`, lacks of what was acknowledged; empty where it has all."""
    if found >= acknowledged:
        return ""
    return f"ends at {found.offset}, and up to {acknowledged.offset} was acknowledged"
