"""Whether to say that something began or is over, where it may come and go many times a second, such as a full disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

TOLD_AGAIN_S: Final = 60.0
"""What was over and begins again is said again after this."""


class Told:
    """`monotonic`: seconds. What begins within TOLD_AGAIN_S of when that was said last is not said, nor is its end."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._is_told, self._last_s = False, -math.inf

    def begins(self) -> bool:
        """It is so: whether to say it now."""
        now_s = self._monotonic()
        if self._is_told or now_s - self._last_s < TOLD_AGAIN_S:
            return False
        self._is_told, self._last_s = True, now_s
        return True

    def ends(self) -> bool:
        """It is so no more: whether to say that, since it was said to be."""
        was_told, self._is_told = self._is_told, False
        return was_told
