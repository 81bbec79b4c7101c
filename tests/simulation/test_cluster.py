"""The first seeds of a cluster's cores, and the rules without which some of them fail. `make simulate WORLD=cluster` runs more."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation import cluster_world
from simulation.cluster_checks import BrokenError
from simulation.cluster_twins import TWINS, Twin, caught
from simulation.cluster_world import Fault, Scene, draw, simulate_cluster, simulate_cluster_or_explain
from simulation.switching import switched_off
from slow_runs import only_slow

SLICES, SLICE = 3, 50
"""150 seeds, some seconds."""
MORE_SLICES, MORE_SLICE = 10, 185
"""With those 2,000, a minute of a processor."""


@only_slow
@pytest.mark.parametrize("number", range(MORE_SLICES))
def test_it_is_kept_by_two_thousand_seeds(number: int) -> None:
    first, counts = SLICES * SLICE + number * MORE_SLICE, Counter[str]()
    for seed in range(first, first + MORE_SLICE):
        counts.update(simulate_cluster_or_explain(seed).counts)
    assert counts["acknowledged"] > 10 * MORE_SLICE and counts["epochs"] > MORE_SLICE


@pytest.mark.parametrize("number", range(SLICES))
def test_what_is_promised_is_kept_whatever_fails(number: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(number * SLICE, (number + 1) * SLICE):
        counts.update(simulate_cluster_or_explain(seed).counts)
    assert counts["acknowledged"] > 10 * SLICE
    assert counts["epochs"] > SLICE
    assert all(
        counts[what]
        for what in (
            "power",
            "crashes",
            "swaps applied",
            "ticks left out",
            "checkpoints",
            "read",
            "told committed",
            "offloaded",
            "answered early",
            "stops in time",
            "drained",
            "rebalanced",
            "altered",
        )
    )


def test_a_late_mark_of_a_store_that_went_back_freezes_no_region_that_was_reconciled_meanwhile() -> None:
    simulate_cluster_or_explain(16331)


def test_a_sync_that_returns_late_takes_nothing_back() -> None:
    simulate_cluster_or_explain(17190)


def test_a_leader_that_lost_its_lease_tells_nothing_by_one_of_a_store_that_went_back() -> None:
    """It was replaced before the store went back, and its watch had shown neither."""
    simulate_cluster_or_explain(248197)


def test_what_an_ill_copy_had_acknowledged_is_committed_by_a_leader_that_does_not_know_that_it_left() -> None:
    assert simulate_cluster_or_explain(205279).counts["ill copies left"]


def test_a_record_that_retention_took_is_not_appended_again() -> None:
    assert simulate_cluster_or_explain(215895).counts["trims"]


def test_nobody_intrudes_in_the_name_of_a_leader_that_has_just_left_the_sets() -> None:
    assert simulate_cluster_or_explain(220333).counts["ill copies left"]


def test_a_lane_is_waited_for_although_another_one_is_led_by_nobody() -> None:
    assert simulate_cluster_or_explain(236312).counts["vacant"]


def test_a_copy_that_is_to_be_begun_anew_may_lack_what_was_given_up() -> None:
    faults = (Fault(1_524, "recovered", 2, 2, 5_034, 54_331), Fault(4_163, "trim", 0, 2, 514, 56_558))
    assert simulate_cluster(364, Scene(faults=faults)).counts["recovered"]


def test_a_move_that_changes_the_leader_alone_waits_for_no_copy_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As it was before there were operators.
    monkeypatch.setattr(cluster_world, "OPERATED", 0.0)
    assert simulate_cluster_or_explain(48688).counts["moves done"]


def test_producers_that_reach_a_leader_of_before_which_stood_still_send_under_their_sequences_elsewhere() -> (
    None
):
    """Its watch has not shown it the next leader (decision 0185)."""
    counts: Counter[str] = Counter()
    faults = (Fault(2_500, "store deaf", 0, 0, 5_500, 0), Fault(2_510, "pause", 0, 0, 4_500, 0))
    for seed in range(25):
        counts.update(simulate_cluster(seed, Scene(faults=faults, numbered=True)).counts)
    assert counts["gaps not told"] > 5 and counts["sent again"] and not counts["gaps told"]


def test_a_seed_replays_exactly() -> None:
    for seed in range(3):
        first, again = simulate_cluster(seed), simulate_cluster(seed)
        assert (first.events, first.counts, first.steps) == (again.events, again.counts, again.steps)
    assert simulate_cluster(0).events != simulate_cluster(1).events


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.rule)
def test_a_rule_that_is_switched_off_is_missed(twin: Twin) -> None:
    assert caught(twin) is not None


def test_a_failing_seed_is_told_by_its_last_events_and_the_least_that_fails() -> None:
    twin = next(each for each in TWINS if each.seed is not None)
    first = caught(twin)
    assert first is not None
    with switched_off(twin), pytest.raises(BrokenError) as told:
        simulate_cluster_or_explain(first.seed)
    events, again, least = told.value.__notes__
    assert "the last events" in events
    assert f"FIRST={first.seed}" in again
    assert least.count("\n") <= len(draw(first.seed).faults)
