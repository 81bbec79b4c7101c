"""The first seeds of one broker and its clients, and the rules without which some of them fail. `make simulate` runs more."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation import world
from simulation.region_world import RegionWorld
from simulation.script import Step, shrink
from simulation.switching import switched_off
from simulation.twins import TWINS, Twin, caught
from simulation.world import FailedError, script_of, simulate, simulate_or_explain

SLICES, SLICE = 10, 192
"""1,920 seeds. In slices, so that a busy machine does not take one for stuck."""


@pytest.mark.parametrize("number", range(SLICES))
def test_what_is_promised_is_kept_whatever_happens(number: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(number * SLICE, (number + 1) * SLICE):
        counts.update(simulate_or_explain(seed, RegionWorld).counts)
    assert counts["starts"] > 2 * SLICE
    assert all(counts[what] > SLICE for what in ("acknowledged", "jobs", "cache", "cursor"))


def test_a_seed_replays_exactly() -> None:
    for seed in range(4):
        assert simulate(seed, RegionWorld).events == simulate(seed, RegionWorld).events
    assert simulate(0, RegionWorld).digest != simulate(1, RegionWorld).digest


@pytest.mark.parametrize(
    "twin", [each for each in TWINS if each.seed is not None], ids=lambda twin: twin.rule
)
def test_a_rule_that_is_switched_off_is_missed(twin: Twin) -> None:
    assert caught(twin) is not None


def test_a_failing_seed_is_told_by_its_last_events_and_the_least_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "SHRINK_TRIES_MAX", 30)
    twin = TWINS[0]
    first = caught(twin)
    assert first is not None
    seed = int(str(first).split("seed ")[1].split(":")[0])
    with switched_off(twin), pytest.raises(FailedError) as told:
        simulate_or_explain(seed, RegionWorld)
    events, least = told.value.__notes__
    assert "the last events" in events and first.events[-1] in events
    assert 0 < least.count("\n") < len(script_of(seed, RegionWorld))


def test_shrinking_keeps_the_steps_that_it_takes_and_no_others() -> None:
    script = tuple(Step("client", "does", 0.0, number=number) for number in range(20))
    needed = {script[3], script[17]}
    assert set(shrink(script, lambda left: needed <= set(left), 1_000)) == needed
    tries: list[object] = []

    def refuse(left: object) -> bool:
        tries.append(left)
        return False

    shrink(script, refuse, 7)
    assert len(tries) == 7
