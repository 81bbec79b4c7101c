"""What seeds found in the product, each by the least script that showed it."""

from __future__ import annotations

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
