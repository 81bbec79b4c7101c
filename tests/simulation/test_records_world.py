"""Seeds of the world of records: nobody leads who lacks what was committed, and in the end everything is led."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from cluster.samples import eligible_if_alive
from long_runs import IS_LONG, count
from simulation.records_world import BrokenError, play

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
    """A rule, what stands in its place, and a seed that misses it."""

    rule: str
    owner: object
    name: str
    instead: Callable[..., Any]
    seed: int


def elect_anyone(record: ShardRecord, brokers: election.Brokers) -> list[str]:
    return [broker for broker in record.replicas if brokers.registration(broker)]


def keep_all(file: object, node: Any, *_: object) -> int:
    since: int = node.kept_since
    return since


TWINS = (
    Twin("eligible by what is recorded", election, "is_eligible", eligible_if_alive, 2),
    Twin("members of isr and elr alone", transactions, "candidates", elect_anyone, 2),
    Twin("what a power cut took is known by the registration", registration, "kept_since", keep_all, 2),
)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.rule)
def test_a_rule_that_is_switched_off_is_missed(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin.owner, twin.name, twin.instead)
    # Its own seed first, which only saves time.
    seeds = [twin.seed, *range(TWIN_SEEDS_MAX)] if IS_LONG else [twin.seed]
    for seed in seeds:
        try:
            play(seed)
        except (BrokenError, FelixError):
            return
    pytest.fail(f"nothing of {len(seeds)} seeds missed it")
