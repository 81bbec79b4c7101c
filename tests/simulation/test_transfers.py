"""The first seeds of transactions on a disk that fails now and then. `make simulate WORLD=transfers` runs more."""

from __future__ import annotations

from collections import Counter

from simulation.transfers import TransferWorld
from simulation.world import simulate, simulate_or_explain

SEEDS = 40


def test_a_job_stands_in_both_streams_once_whatever_happens() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        counts.update(simulate_or_explain(seed, TransferWorld).counts)
    assert counts["transfers"] > 8 * SEEDS and counts["left to itself"] > SEEDS // 10


def test_a_seed_replays_exactly() -> None:
    assert simulate(1, TransferWorld).events == simulate(1, TransferWorld).events
