"""The port of the runtime: where time and chance come from. Whoever needs them is handed them when it is made.

Invariants: nothing outside `felix.runtime` reads a clock or draws chance by itself (ruff's banned-api says so), so that one
object decides both for a whole region, a bridge agent or a client. Timers are the event loop's own (`call_later`): who hands
in another runtime runs on a loop that agrees with its clock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from random import Random as Random
from typing import Protocol


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


@dataclass(frozen=True, slots=True)
class Runtime:
    """What one process, real or simulated, runs on."""

    clock: Clock
    random: Random
    """For keys and nonces as well as for the spread of retries: on a real machine its source is the kernel's."""
    pool: Callable[[int, str], Executor]
    """Makes so many threads, under this name, for work that blocks; whoever made it shuts it down. Work that needs no
    threads of its own goes to those of the loop (`asyncio.to_thread`)."""
