"""How long a disk has not answered what it was asked for, so that one that hangs is told of. Of one file or log; from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

HUNG_S: Final = 10.0
"""A disk that has not answered for so long is said to hang."""


class DiskWaits:
    """`monotonic`: seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._asked_s: dict[str, float] = {}

    @contextmanager
    def asked(self, what: str = "") -> Iterator[None]:
        """The disk is asked for something, and may hang. `what`: of things that are asked for side by side, each has a name of its own."""
        self._asked_s[what] = self._monotonic()
        try:
            yield
        finally:
            self._asked_s.pop(what, None)

    def told(self, who: str) -> str:
        """The sentence that `who` waits for a disk that hangs; empty where none does."""
        since_s = min(tuple(self._asked_s.values()), default=None)
        waits_s = 0.0 if since_s is None else self._monotonic() - since_s
        if waits_s < HUNG_S:
            return ""
        # One sentence for so long: it is shown, and compared, more often.
        return f"{who} waits for its disk, which has not answered for {waits_s // HUNG_S * HUNG_S:.0f} s."
