"""Going on with a key file whose disk has failed for a moment, by the process that has it open; and saying so of a disk that does not answer.

Invariants: tries come at the times of `felix.reopening`; each that fails is a line in the log, and so is the one that does not. Caller: region.own_files, which looks once a second.
"""

from __future__ import annotations

import logging
from typing import Protocol

from felix.errors import FelixError
from felix.reopening import SOUND_ALONE_MS, Reopening
from felix.runtime.port import Clock
from felix.told import Told

log = logging.getLogger("felix.keys.reopening")


class KeyFile(Protocol):
    """What has a key file open, and knows what was acknowledged of it: keys.keyring.Keyring, region.cluster.stream_keys.StreamKeys."""

    @property
    def failure(self) -> str:
        """Why the file takes nothing; empty where it does. From any thread."""
        ...

    def trouble(self) -> str:
        """The same, or that its disk does not answer, with what to do. From any thread."""
        ...

    def open_again(self) -> None:
        """Put a new file in its place. Blocks. Raises UnavailableError."""
        ...


class KeyFileReopening:
    """Of one key file."""

    def __init__(self, file: KeyFile, clock: Clock) -> None:
        self._file, self._clock = file, clock
        self._reopening = Reopening(sound_ms=SOUND_ALONE_MS)
        self._has_failed = False
        self._hung_told = Told(clock.monotonic)
        self.opened = 0
        """how often it was opened again, since the start"""

    def trouble(self) -> str:
        """See KeyFile."""
        return self._file.trouble()

    def is_due(self) -> bool:
        """Whether it has failed, and is to be tried now."""
        failure = self._file.failure
        hung = "" if failure else self._file.trouble()
        if hung:
            if self._hung_told.begins():
                log.error("%s", hung)
        elif self._hung_told.ends():
            log.warning("the disk of a key file answers again")
        if failure and not self._has_failed:
            log.error("%s", failure)
            self._reopening.failed(self._now_ms())
        self._has_failed = bool(failure)
        return self._has_failed and self._reopening.is_due(self._now_ms())

    def open(self) -> None:
        """Try it. Blocks. Where it fails it is due again later."""
        try:
            self._file.open_again()
        except FelixError as error:
            self._reopening.failed(self._now_ms())
            log.error(
                "the key file could not be written anew, and is tried in %d s: %s",
                self._reopening.pause_ms // 1_000, error.sentence,
            )  # fmt: skip
            return
        self._has_failed = False
        self._reopening.opened(self._now_ms())
        self.opened += 1
        log.warning("the key file is written anew, and takes keys again")

    def _now_ms(self) -> int:
        return self._clock.boot_ms()
