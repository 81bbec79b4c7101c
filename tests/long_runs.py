"""What `make test-long` does more of: larger counts, and tests that take long and rarely break.

`make test` runs a smaller count of each, and something else of each kind that only `make test-long` runs.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import seed

IS_LONG = "FELIX_LONG" in os.environ


def count(quick: int, long: int) -> int:
    """How often: in `make test`, and in `make test-long`."""
    return long if IS_LONG else quick


def seeded(machine: type, number: int) -> type:
    """A state machine whose examples are those of round `number`: the same in each run of `make test`, others in each `make test-long`."""

    class Seeded(machine):  # type: ignore[misc]
        pass

    return seed(random.getrandbits(32) if IS_LONG else number)(Seeded)


only_long = pytest.mark.skipif(not IS_LONG, reason="make test-long runs this")
