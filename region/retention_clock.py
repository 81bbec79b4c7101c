"""The clock that records are deleted by at their age, over the starts of a broker.

A machine may start with a clock that is ahead (one that was kept in local time, or whose battery is empty), and set it right a minute later. What it deleted until
then would be gone. So the broker remembers how late it was, and one that starts much later by its clock goes on from there for an hour (`HeldClock`), as it does
where its clock is set ahead while it serves. A broker that really stood still for as long deletes an hour later, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from felix.storage.port import Files
from felix.storage.small_file import load_checked, save_checked
from felix.told import Told
from region.views.wall_clock import HELD_MS, HeldClock

NAME: Final = "retention"
"""The file in the data folder: the ms since the Unix epoch, in decimal, up to which records have been deleted by their age."""
SAVE_MS: Final = 60_000
"""How often it is written, at most."""
AWAY_MS: Final = 600_000
"""A broker that was away for less goes by its clock at once: what it could delete too early is so much younger at most."""

log = logging.getLogger("felix.region.retention_clock")


class RetentionClock:
    """One per broker. Made before anything is deleted; `wall_ms` and `boot_ms` as `HeldClock` has them. Reads the file: blocks for a moment."""

    def __init__(
        self, files: Files, data: Path, wall_ms: Callable[[], int], boot_ms: Callable[[], int], told: Told
    ) -> None:
        self._files = files
        self._path = data / NAME
        self._boot_ms = boot_ms
        self._told = told
        self._saved_ms: int | None = None
        """by `boot_ms`"""
        last_ms, now_ms = self._load(), wall_ms()
        away_ms = now_ms - last_ms if last_ms and now_ms - last_ms > AWAY_MS else 0
        if away_ms:
            log.info(
                "the clock is %d minutes past the time that this broker knew last: for %d minutes it deletes by their age what it would have "
                "deleted then, in case the clock is wrong",
                away_ms // 60_000,
                HELD_MS // 60_000,
            )
        self._clock = HeldClock(wall_ms, boot_ms, ahead_ms=away_ms)

    def _load(self) -> int:
        """0 where nothing is known."""
        try:
            payload = load_checked(self._files, self._path)
            return int(payload) if payload is not None else 0
        except (OSError, ValueError) as error:
            log.warning(
                "%s cannot be read, so records are deleted by the clock as it is: %s", self._path, error
            )
            return 0

    async def now_ms(self) -> int:
        """By which records are deleted now. It is written down at most each SAVE_MS; where that fails, it is tried again."""
        now_ms, boot_ms = self._clock.now_ms(), self._boot_ms()
        if self._saved_ms is None or boot_ms - self._saved_ms >= SAVE_MS:
            try:
                await asyncio.to_thread(save_checked, self._files, self._path, b"%d" % now_ms)
            except OSError as error:
                if self._told.begins():
                    log.warning("%s could not be written: %s", self._path, error)
            else:
                self._saved_ms = boot_ms
                self._told.ends()
        return now_ms
