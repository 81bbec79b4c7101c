"""A slow disk for tests, to find those that take what is durable a moment later for what is so already: `make test SLOW_DISK=60`.

Python's syncs are slowed in the processes that run tests (conftest.py) and in commands that are forked (warm/server.py); SQLite's own are not.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

SLOW_DISK_MS = "TESTS_SLOW_DISK_MS"
"""By how many milliseconds a sync takes longer at most, a third of it at least. It does not begin with FELIX_, which warm processes are not given."""


def slow_down() -> None:
    """Slow this process's syncs, and those of what it forks, where that is asked for."""
    most_s = float(os.environ.get(SLOW_DISK_MS) or 0) / 1000
    if most_s:
        os.fsync, os.fdatasync = _slowed(os.fsync, most_s), _slowed(os.fdatasync, most_s)


def _slowed(sync: Callable[..., None], most_s: float) -> Callable[..., None]:
    chance = random.Random()

    def slowed(file: object) -> None:
        time.sleep(chance.uniform(most_s / 3, most_s))
        sync(file)

    return slowed
