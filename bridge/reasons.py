"""What the agent's loops fail with, told once for each sentence. Callers: bridge.agent, and its parts."""

from __future__ import annotations

import logging

from felix.errors import FelixError


class Reasons:
    """One per agent; `log` is where its warnings go."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last: dict[str, str] = {}

    def say(self, what: str, error: FelixError | OSError) -> None:
        """Warn of a failure of `what`, once for each sentence."""
        if self.is_new(what, str(error)):
            self._log.warning("%s: %s", what, error)

    def is_new(self, what: str, sentence: str) -> bool:
        """Whether `what` did not fail so the last time."""
        is_new = self._last.get(what) != sentence
        self._last[what] = sentence
        return is_new
