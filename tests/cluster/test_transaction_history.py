"""The judge of transactions refuses, by the rule that it breaks, each history that must not be (cluster.transaction_history)."""

from __future__ import annotations

import pytest
from cluster.transaction_history import RULES, Outcome, Place, Record, TransactionHistory

A, B = "acme/ops/a", "acme/ops/b"


def history(outcome: Outcome) -> tuple[TransactionHistory, dict[Place, Record]]:
    """A transaction of one record in each of two streams, whole."""
    stored = {Place(A, 0, 0): Record("w", 0, 0), Place(B, 0, 0): Record("w", 0, 1)}
    held = TransactionHistory({("w", 0): 2}, {("w", 0): outcome})
    if outcome is Outcome.COMMITTED:
        held.told = {record: place for place, record in stored.items()}
    return held, stored


def test_what_is_whole_or_not_there_is_accepted() -> None:
    for outcome in (Outcome.COMMITTED, Outcome.UNKNOWN):
        held, stored = history(outcome)
        held.check(stored)
    for outcome in (Outcome.ABORTED, Outcome.UNKNOWN):
        history(outcome)[0].check({})


@pytest.mark.parametrize("rule", RULES)
def test_what_breaks_a_rule_is_refused_by_its_name(rule: str) -> None:
    held, stored = history(Outcome.ABORTED if rule == "undone" else Outcome.COMMITTED)
    match rule:
        case "half":
            held.told.pop(stored.pop(Place(B, 0, 0)))
        case "doubled":
            stored[Place(A, 1, 0)] = Record("w", 0, 0)
        case "lost":
            stored.clear()
            held.told.clear()
        case "moved":
            stored[Place(A, 0, 1)] = stored.pop(Place(A, 0, 0))
    with pytest.raises(AssertionError) as refused:
        held.check(stored)
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == [rule]


def test_a_record_says_which_it_is() -> None:
    assert Record.decode(Record("w", 3, 1).encode()) == Record("w", 3, 1)
