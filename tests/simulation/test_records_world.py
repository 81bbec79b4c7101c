"""Seeds of the world of records: nobody leads who lacks what was committed, and in the end everything is led."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from cluster.samples import eligible_if_alive
from long_runs import count
from simulation.records_world import BrokenError, play
from simulation.switching import missed, patched

from felix.errors import FelixError
from region.cluster import election, registration, transactions
from region.cluster.records import ShardRecord

SEEDS = count(30, 2_000)
TWIN_SEEDS_MAX = 400


def test_whoever_leads_has_what_is_committed_and_in_the_end_everything_is_led() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        counts.update(play(seed).counts)
    assert min(counts.values()) > SEEDS / 4, counts


class Twin(NamedTuple):
    """A rule, how it is switched off, and a seed that missed it when it was last looked for: it is tried first, which only saves time."""

    rule: str
    off: Callable[[pytest.MonkeyPatch], None]
    seed: int


def elect_anyone(record: ShardRecord, brokers: election.Brokers) -> list[str]:
    return [broker for broker in record.replicas if brokers.registration(broker)]


def keep_all(file: object, node: Any, *_: object) -> int:
    since: int = node.kept_since
    return since


TWINS = (
    Twin("eligible by what is recorded", patched(election, "is_eligible", eligible_if_alive), 2),
    Twin("members of isr and elr alone", patched(transactions, "candidates", elect_anyone), 2),
    Twin(
        "what a power cut took is known by the registration", patched(registration, "kept_since", keep_all), 8
    ),
)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.rule)
def test_a_rule_that_is_switched_off_is_missed(twin: Twin) -> None:
    assert missed(twin, play, (BrokenError, FelixError), TWIN_SEEDS_MAX, anew=False) is not None
