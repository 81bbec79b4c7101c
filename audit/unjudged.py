"""What could not be judged: an exception that nobody foresaw, at one leaf, becomes what is told of that leaf.

A log's owner chooses what its leaves say. Where our code fails at one of them, whoever reads goes on with the next, and says of this one
that nobody knows what it is worth: never that it holds. So nobody's leaf keeps the others from being read, and no mistake of ours
lets a log pass. The traceback goes into the process's log: there the mistake is found.

Callers: audit.verify, audit.trail, audit.spark, bridge.egress_disk. Each has one place where a leaf is judged, and asks here there.
"""

from __future__ import annotations

import logging
import traceback
from typing import Final

from felix.visible import visible

log = logging.getLogger("felix.audit.unjudged")

TRACEBACKS_MAX: Final = 4
"""Of one reader: a log may have as many such leaves as it has leaves."""


class Unjudged:
    """Tells of what one reader could not judge."""

    def __init__(self, reader: str) -> None:
        """`reader`: what is being read, for the process's log."""
        self._reader = reader
        self._told = 0

    def sentence(self, error: Exception, what: str) -> str:
        """What is told of a leaf, or of what else `what` names."""
        if self._told < TRACEBACKS_MAX:
            self._told += 1
            log.error("%s: %s could not be judged", visible(self._reader), visible(what))
            # Line by line, and made safe: an exception quotes what others wrote, and this may run where no formatter is set.
            for line in "".join(traceback.format_exception(error)).splitlines():
                log.error("    %s", visible(line))
        return (
            f"{what} could not be judged: {visible(type(error).__name__)}. Nothing is known of what it says."
        )
