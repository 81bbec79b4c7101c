"""Byte budgets: what is taken fits, what does not is refused, and every limit comes from region.yaml."""

import pytest

from felix.errors import RequestError
from policy.quantity import Size
from region.config import VIEW_BUDGET_BYTES_MIN, LimitsConfig
from region.limits.budget import Budget, Budgets


def test_a_budget_refuses_what_does_not_fit_and_takes_nothing_then() -> None:
    budget = Budget("queue", 10)
    assert budget.take(10)
    assert not budget.take(1)
    assert (budget.used_bytes, budget.refused) == (10, 1)
    budget.give(4)
    assert budget.take(4)


def test_every_budget_gets_its_limit_from_the_configuration() -> None:
    budgets = Budgets()
    limits = LimitsConfig(
        cache_budget=Size(5 << 20), queue_budget=Size(3 << 20), transactions_budget=Size(2 << 20)
    )
    budgets.limit(limits.budgets)
    assert {budget.name for budget in budgets.all()} == set(limits.budgets)
    assert budgets.cache.limit_bytes == 5 << 20
    assert budgets.queue.limit_bytes == 3 << 20
    assert budgets.transactions.limit_bytes == 2 << 20
    assert budgets.publish.limit_bytes == LimitsConfig().publish_budget


@pytest.mark.parametrize("name", ["cache_budget", "queue_budget", "transactions_budget"])
def test_a_budget_that_could_not_hold_one_batch_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        LimitsConfig(**{name: Size(VIEW_BUDGET_BYTES_MIN - 1)})
    assert name in caught.value.sentence
