"""The port of the runtime: where time and randomness come from. Every object that needs them gets them when it is made.

Invariants: no code outside `felix.runtime` reads a clock or draws random numbers by itself (ruff's banned-api forbids it), so
that one object provides both for a whole region, a bridge agent or a client. Timers are the event loop's own (`call_later`): a
caller that passes another runtime must use a loop that agrees with its clock.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from random import Random as Random
from typing import Any, Protocol

import msgspec


class Clock(Protocol):
    """Clocks that must not be mixed: what people agree on, and what only goes forward."""

    def now_ms(self) -> int:
        """The wall clock, in ms since the Unix epoch. It may jump, back too."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back. The event loop's `time` counts from the same moment."""

    def monotonic_ns(self) -> int:
        """The same in ns, where differences are small."""

    def boot_ms(self) -> int:
        """In ms, never back, and it counts the time that the machine was suspended: other machines' leases ran on."""


class Worker(Protocol):
    """Work that runs in the background: one step after the other, never two at once."""

    def start(self) -> None:
        """Do the first step soon."""

    def wake(self) -> None:
        """Do a step soon. Does not block; from any thread."""

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether the condition holds; looked at now and after each step, for so long. Blocks."""

    def join(self) -> None:
        """Wait for the last step, which must have been asked for. Blocks."""


Step = Callable[[], float | None]
"""Does all that is due. Seconds after which it is to be called again at the latest (`math.inf`: once it is woken); None: it was
the last one."""


class Runtime(msgspec.Struct, frozen=True):
    """The runtime of one process, real or simulated."""

    clock: Clock
    random: Random
    """For keys and nonces as well as for the spread of retries: on a real machine its source is the kernel's."""
    pool: Callable[[int, str], Executor]
    """Makes a pool of so many threads, under this name, for blocking work; the caller shuts it down. Work that needs no threads
    of its own uses those of the loop (`asyncio.to_thread`).
    """
    worker: Callable[[Step, str], Worker]
    """Makes a worker of these steps, under this name. It needs no event loop."""
    ask: Callable[[Coroutine[Any, Any, Any], Any, float], Any]
    """From a thread: what a coroutine gives that an event loop, the second argument, carries out, within so many seconds. Blocks.
    Raises what the coroutine raises, and TimeoutError."""
    process: Callable[[], str] = str
    """What this process is called for people, in what brokers show of their clients; empty where it has no name."""
