"""Where tests of this folder get random numbers from: a seed of the test's own, or `FELIX_ATTACK_SEED`, from which each test derives other ones.

Without the variable a test draws what it always draws. A test that takes the `chance` fixture is one that draws: `make attack` repeats it, with
another seed each time (run.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import hypothesis
import pytest

SEED = "FELIX_ATTACK_SEED"


@dataclass(frozen=True, slots=True)
class Chance:
    """Random numbers of a run. Equal values draw alike."""

    seed: str | None
    """of the run; none: each test's own seed alone counts"""

    def __call__(self, own: int | str) -> Random:
        """Random numbers of whoever has this seed of its own."""
        return Random(own if self.seed is None else f"{self.seed} {own}")


def chance_of_run() -> Chance:
    """By the environment."""
    return Chance(os.environ.get(SEED))


def properties(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test whose examples Hypothesis draws: it counts as one that draws, and takes the run's seed where there is one."""
    drawing: Callable[..., Any] = pytest.mark.usefixtures("chance")(test)
    seed = chance_of_run().seed
    return drawing if seed is None else hypothesis.seed(seed)(drawing)
