"""The first seeds of two regions and their bridge. `make simulate WORLD=mesh` runs more."""

from __future__ import annotations

from simulation.doubt_world import DoubtWorld
from simulation.mesh_world import MeshWorld
from simulation.restored_world import RestoredWorld
from simulation.world import simulate, simulate_or_explain

SEEDS = 5


def test_what_crosses_is_announced_once_in_order_and_evident_whatever_happens() -> None:
    counts: dict[str, int] = {}
    for seed in range(SEEDS):
        for what, number in simulate_or_explain(seed, MeshWorld).counts.items():
            counts[what] = counts.get(what, 0) + number
    assert counts["starts"] > 4 * SEEDS and counts["crossed"] > 8 * SEEDS


def test_a_source_that_lacks_what_crossed_stops_its_link() -> None:
    counts: dict[str, int] = {}
    for seed in range(3):
        for what, number in simulate_or_explain(seed, RestoredWorld).counts.items():
            counts[what] = counts.get(what, 0) + number
    assert counts["lost at the source"] and counts["stopped"]


def test_nothing_arrives_behind_a_revocation_where_a_disk_fails_in_the_middle() -> None:
    counts: dict[str, int] = {}
    for seed in range(3):
        for what, number in simulate_or_explain(seed, DoubtWorld).counts.items():
            counts[what] = counts.get(what, 0) + number
    assert counts["failed writes"] and counts["failed openings"] and counts["revoke"]


def test_a_seed_of_a_mesh_replays_exactly() -> None:
    assert simulate(3, MeshWorld).events == simulate(3, MeshWorld).events
