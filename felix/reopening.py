"""When a log whose disk has failed is opened again in the same process. Pure.

A passing error is over soon, and a disk that is broken stays so: the first try comes quickly, each later one after twice the pause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

REOPEN_MS_MIN: Final = 5_000
"""Before the first try: by then another copy leads, where there is one, and a device that was reset answers again."""
REOPEN_MS_MAX: Final = 600_000
"""Between two tries at most. Each reads the end of the log, and may cost an election where it fails again."""
SOUND_MS: Final = 3_600_000
"""A log that was open for so long since it failed last begins with the shortest pause again."""
SOUND_ALONE_MS: Final = 60_000
"""The same of a file or log that nobody else has: there a try costs little."""


@dataclass(slots=True)
class Reopening:
    """Of one log, one shard, or one stream."""

    pause_ms: int = 0
    due_ms: int = 0
    """when it is tried next"""
    opened_ms: int = -1
    """when it was open again; -1: it is not"""
    sound_ms: int = SOUND_MS

    def failed(self, now: int) -> None:
        """It has failed, or could not be opened."""
        is_sound = self.opened_ms >= 0 and now - self.opened_ms >= self.sound_ms
        doubled = min(REOPEN_MS_MAX, 2 * self.pause_ms)
        self.pause_ms = REOPEN_MS_MIN if is_sound else max(REOPEN_MS_MIN, doubled)
        self.due_ms, self.opened_ms = now + self.pause_ms, -1

    def opened(self, now: int) -> None:
        """It is open again."""
        self.opened_ms = now

    def is_due(self, now: int) -> bool:
        """Whether it is to be tried."""
        return self.opened_ms < 0 and now >= self.due_ms
