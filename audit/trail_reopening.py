"""Opening a log again whose disk has failed for a moment, by the process that writes it; and saying so of a disk that does not answer.

Invariants: tries come at the times of `felix.reopening`; each that fails is a line in the log, and so is the one that does not. A log that stopped for another reason than its disk is left alone:
it is for a person. Callers: bridge.agent, region.node; each looks once a second, and says first to all who use the log that it has stopped.
"""

from __future__ import annotations

import logging
from typing import Final

from audit.errors import AuditUnavailableError
from audit.trail import Trail
from felix.reopening import SOUND_ALONE_MS, Reopening
from felix.runtime.port import Clock
from felix.told import Told

log = logging.getLogger("felix.audit.reopening")

LOOK_S: Final = 1.0
"""How often is looked whether a log has stopped, and may be tried again."""


class TrailReopening:
    """Of one log that has no copies."""

    def __init__(self, trail: Trail, clock: Clock) -> None:
        self._trail, self._clock = trail, clock
        self._reopening = Reopening(sound_ms=SOUND_ALONE_MS)
        self._failed: AuditUnavailableError | None = None
        self._hung_told = Told(clock.monotonic)
        self.opened = 0
        """how often it was, since the start"""

    def is_due(self) -> bool:
        """Whether it has stopped, and is to be tried now. Looked at each second."""
        if hung := self._trail.hung:
            if self._hung_told.begins():
                log.error("%s", hung)
        elif self._hung_told.ends():
            log.warning("the disk of the audit log %s answers again", self._trail.key.name)
        failure = self._trail.stopped
        if failure is not self._failed:
            self._failed = failure
            if failure is not None:
                log.error("%s", failure)
                self._reopening.failed(self._now_ms())
        return failure is not None and self._trail.may_reopen and self._reopening.is_due(self._now_ms())

    def open(self) -> bool:
        """Try it. Blocks. False where it failed; then it is due again later."""
        try:
            self._trail.reopen()
        except Exception as error:
            # Also what is damaged: a disk that answers again may have it whole.
            self._failed = self._trail.stopped
            self._reopening.failed(self._now_ms())
            log.error(
                "the audit log %s could not be opened again, and is tried in %d s: %s",
                self._trail.key.name, self._reopening.pause_ms // 1000, error,
            )  # fmt: skip
            return False
        self._failed = None
        self._reopening.opened(self._now_ms())
        self.opened += 1
        log.warning("the audit log %s is open again, and goes on", self._trail.key.name)
        return True

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)
