"""The machine that we run on: its clocks, and its kernel's source of random bytes."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from random import SystemRandom
from typing import Any, Final

from felix.runtime.port import Runtime, Step, Worker

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


class ThreadWorker:
    """`felix.runtime.port.Worker` with a thread of its own, which does not outlive the process."""

    def __init__(self, step: Step, name: str) -> None:
        self._step = step
        self._wanted = threading.Event()
        self._stepped = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wanted.set()

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        limit = time.monotonic() + timeout_s
        with self._stepped:
            while not condition():
                left_s = limit - time.monotonic()
                if self._ended or left_s <= 0:
                    return condition()
                self._stepped.wait(left_s)
        return True

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            while (pause_s := self._step()) is not None:
                self._tell()
                self._wanted.wait(None if pause_s == math.inf else max(0.0, pause_s))
                # Before the step, so that a request that comes during the step is not lost.
                self._wanted.clear()
        finally:
            self._ended = True
            self._tell()

    def _tell(self) -> None:
        with self._stepped:
            self._stepped.notify_all()


def _worker(step: Step, name: str) -> Worker:
    return ThreadWorker(step, name)


def _ask(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, timeout_s: float) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result(timeout_s)


def _process() -> str:
    # Asked each time: a forked process is another one.
    return f"{socket.gethostname()}:{os.getpid()}"


REAL: Final = Runtime(SystemClock(), SystemRandom(), _pool, _worker, _ask, _process)
"""SystemRandom has no state: threads and forked processes may share it, and its bytes are fit for keys."""

now_ms: Final = REAL.clock.now_ms
"""This machine's wall clock, for processes that run on no other."""
