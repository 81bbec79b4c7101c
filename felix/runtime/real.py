"""The machine that we run on: its clocks, and its kernel's source of random bytes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import SystemRandom
from typing import Final

from felix.runtime.port import Runtime

_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """`felix.runtime.port.Clock` of this machine."""

    monotonic = staticmethod(time.monotonic)
    monotonic_ns = staticmethod(time.monotonic_ns)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        return time.clock_gettime_ns(_BOOT) // 1_000_000


def _pool(threads: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix=name)


REAL: Final = Runtime(SystemClock(), SystemRandom(), _pool)
"""SystemRandom has no state: threads and forked processes may share it, and its bytes are fit for keys."""

now_ms: Final = REAL.clock.now_ms
"""This machine's wall clock, for processes that run on no other."""
