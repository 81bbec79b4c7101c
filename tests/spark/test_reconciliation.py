"""What a register's row says of the reconciliation: that of its own bridge and names at the destination, and of nobody else's."""

from __future__ import annotations

from typing import Any

from audit.spark.reconciliation import (
    DIFFERS,
    ONE_SIDE,
    OPEN,
    RECONCILED,
    VERSION_1,
    states_by_stream,
    worst_state,
)


def shard(status: str, bridge: str | None = "first", name: str | None = "orders") -> dict[str, Any]:
    return {
        "source_region": "us-east", "destination_region": "eu-west", "bridge": bridge, "stream": "orders",
        "destination_stream": name, "status": status,
    }  # fmt: skip


def row(*names: str | None, bridge: str | None = "first") -> dict[str, Any]:
    return shard("", bridge, None) | {"destination_streams": list(names)}


def test_a_row_has_the_worst_of_its_own_shards() -> None:
    for better, worse in ((RECONCILED, OPEN), (OPEN, ONE_SIDE), (ONE_SIDE, VERSION_1), (VERSION_1, DIFFERS)):
        states = states_by_stream([shard(better), shard(worse), shard(better)])
        assert worst_state(row("orders"), states) == worse


def test_what_one_bridge_did_is_said_of_no_other() -> None:
    states = states_by_stream([shard(DIFFERS), shard(RECONCILED, "second"), shard(OPEN, None)])
    assert worst_state(row("orders"), states) == DIFFERS
    assert worst_state(row("orders", bridge="second"), states) == RECONCILED
    assert worst_state(row("orders", bridge=None), states) == OPEN


def test_what_crossed_under_one_name_is_said_of_no_other() -> None:
    states = states_by_stream([shard(DIFFERS, name="copied"), shard(RECONCILED), shard(OPEN, name=None)])
    assert worst_state(row("copied"), states) == DIFFERS
    assert worst_state(row("orders"), states) == RECONCILED
    assert worst_state(row("copied", "orders"), states) == DIFFERS
    assert worst_state(row(), states) == OPEN, "leaves that name none"
    assert worst_state(row("elsewhere"), states) is None
