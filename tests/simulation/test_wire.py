"""The first seeds of one region over the real QUIC engines. `make simulate WORLD=wire` runs more."""

from __future__ import annotations

from collections import Counter

from long_runs import count
from simulation.wire_world import WireRegionWorld
from simulation.world import simulate_or_explain

SEEDS = count(6, 200)


def test_a_region_keeps_its_promises_over_datagrams_too() -> None:
    counts: Counter[str] = Counter()
    for seed in range(1, SEEDS + 1):
        counts.update(simulate_or_explain(seed, WireRegionWorld).counts)
    assert counts["acknowledged"] > 10 * SEEDS and counts["pauses"]
