"""What seeds found in the product, each by the least script that showed it."""

from __future__ import annotations

import pytest
from simulation.region_world import HOST, RegionWorld
from simulation.script import Step
from simulation.world import JOINS, simulate


def test_a_queue_whose_disk_is_full_does_not_keep_its_broker_busy() -> None:
    """Its journal refused each lease at once; each refusal brought a replay, and each replay the next lease."""
    simulate(
        107,
        RegionWorld,
        (
            Step("fault", "full", 0.001, HOST, 0.4, 99),
            Step("balances", JOINS, 0.0),
            Step("invoices", JOINS, 0.0),
            Step("invoices", "put, to be done slowly", 0.0, number=10),
        ),
    )


def test_a_queue_whose_journal_ended_with_its_first_entry_does_not_keep_its_broker_busy() -> None:
    """There was nothing to read again, so that each replay succeeded at once, and the next lease ended in the next one."""
    simulate(
        348,
        RegionWorld,
        (
            Step("fault", "clock", 0.019, HOST, 0.008, 236),
            Step("fault", "sync", 0.0011, HOST, 0.189, 111),
            Step("orders", JOINS, 0.0),
            Step("invoices", JOINS, 0.0),
            Step("invoices", "put", 0.0, number=1),
        ),
    )


def test_a_position_that_was_told_is_not_taken_back_by_a_crash() -> None:
    """It was told, and retention went by it, before its acknowledgement was durable."""
    simulate(
        2554,
        RegionWorld,
        (
            Step("fault", "slow", 0.006516139600583996, HOST, 0.004423222284007338, 232),
            Step("fault", "slow", 0.0018664816324798835, HOST, 0.009214443439285566, 36),
            Step("fault", "kill", 0.2196987302507501, HOST, 0.0023131183108401434, 58),
            Step("billing", JOINS, 0.0),
            Step("orders", JOINS, 0.0),
            Step("orders", "publish", 0.0, number=1),
            Step("orders", "publish", 0.001, number=5),
        ),
    )


def test_no_position_is_told_while_a_journal_is_read_again() -> None:
    """Its broker waited for a disk while it described the subscription, and by then had let go of what it knew."""
    simulate(
        3634,
        RegionWorld,
        (
            Step("fault", "slow", 0.0342969717867036, HOST, 0.7076371145666346, 138),
            Step("fault", "sync", 0.3150072102118364, HOST, 0.5493666631099399, 147),
            Step("orders", JOINS, 0.0),
            Step("orders", "publish", 0.001, number=4),
            Step("orders", "publish", 0.0, number=2),
            Step("orders", "publish", 0.001, number=3),
            Step("billing", JOINS, 0.0),
        ),
    )


@pytest.mark.parametrize("seed", [10466, 13210, 16530])
def test_a_view_whose_journal_could_not_be_opened_is_opened_later(seed: int) -> None:
    """A disk was full when the journal's first epoch began: its log stayed open, and each later opening was refused for that."""
    simulate(seed, RegionWorld)


def test_a_queue_that_was_opened_while_its_broker_may_not_write_is_worked_on_once_it_may() -> None:
    """It followed neither its log nor the clock until somebody opened it again, and its workers got nothing."""
    simulate(
        29,
        RegionWorld,
        (
            Step("fault", "fence", 0.109, HOST, 0.457),
            Step("invoices", JOINS, 0.0),
            Step("invoices", "put", 0.3, number=7),
        ),
    )
