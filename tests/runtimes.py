"""Runtimes whose clocks a test sets."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from felix.runtime.port import Runtime
from felix.runtime.real import REAL, SystemClock


class _Wall(SystemClock):
    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms()


def with_wall(now_ms: Callable[[], int]) -> Runtime:
    """This machine's, apart from the wall clock: `now_ms` says what it shows."""
    return replace(REAL, clock=_Wall(now_ms))


class _Boot(SystemClock):
    def __init__(self, boot_ms: Callable[[], int]) -> None:
        self._boot_ms = boot_ms

    def boot_ms(self) -> int:
        return self._boot_ms()


def with_boot(boot_ms: Callable[[], int]) -> Runtime:
    """The same with the clock that leases go by."""
    return replace(REAL, clock=_Boot(boot_ms))
