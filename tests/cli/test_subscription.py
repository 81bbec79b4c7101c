"""`felix subscription` against a real broker, as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from region_process import BrokerProcess, fixed_region
from typer.testing import CliRunner

from cli.main import app
from felix.errors import FelixError

ORDERS = "acme/payments/orders"
Felix = Callable[..., str]


@pytest.fixture
def felix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Felix]:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    broker = BrokerProcess(fixed_region(tmp_path), tmp_path)
    broker.wait()

    def run(*command: str, given: str = "", refused: bool = False) -> str:
        done = CliRunner().invoke(app, command, input=given)
        if refused:
            assert isinstance(done.exception, FelixError)
        else:
            assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    try:
        yield run
    finally:
        broker.kill()


def test_a_subscription_from_its_creation_to_its_end(felix: Felix) -> None:
    felix("stream", "create", ORDERS)
    felix("stream", "publish", ORDERS, given="one\ntwo\nthree\n")
    said = felix(
        "subscription", "create", ORDERS, "billing", "--from", "earliest", "--max-attempts", "3", "--ack-timeout", "10s"
    )  # fmt: skip
    assert said == f"billing of {ORDERS} is created, from earliest\n"
    assert felix("subscription", "consume", ORDERS, "billing", "--count", "2") == "one\ntwo\n"
    assert felix("subscription", "consume", ORDERS, "billing", "--no-ack", "--count", "1") == "three\n"
    (row,) = felix("subscription", "consume", ORDERS, "billing", "--count", "1", "--json").splitlines()
    assert json.loads(row)["offset"] == 2
    state = json.loads(felix("subscription", "describe", ORDERS, "billing", "--json"))
    assert state["shards"][0]["committed"] == 3 and state["settings"]["retries"]["attempts_max"] == 3
    assert "billing" in felix("subscription", "list", ORDERS)
    felix("subscription", "seek", ORDERS, "billing", "@1")
    assert felix("subscription", "consume", ORDERS, "billing", "--wait", "1s") == "two\nthree\n"
    described = felix("subscription", "describe", ORDERS, "billing")
    assert "attempts 3" in described and "Shards" in described
    said = felix(
        "subscription", "alter", ORDERS, "billing", "--max-attempts", "4", "--ack-timeout", "20s", "--inactive-ttl", "7d"
    )  # fmt: skip
    assert said.startswith(f"billing of {ORDERS} is changed: ack timeout 20s, attempts 4, ")
    state = json.loads(
        felix(
            "subscription",
            "alter",
            ORDERS,
            "billing",
            "--inactive-ttl",
            "none",
            "--max-unacked",
            "9",
            "--json",
        )
    )
    settings = state["settings"]
    assert (settings["unacked_max"], settings["ack_timeout_ms"]) == (9, 20_000)
    assert "inactive_ttl_ms" not in settings or settings["inactive_ttl_ms"] == 0
    assert state["shards"][0]["committed"] == 3
    felix("subscription", "alter", ORDERS, "billing", refused=True)
    felix("subscription", "seek", ORDERS, "billing", "nowhere", refused=True)
    felix("subscription", "delete", ORDERS, "billing", "--yes")
    felix("subscription", "describe", ORDERS, "billing", refused=True)
    assert json.loads(felix("subscription", "list", "--json")) == {"kind": "SubscriptionList", "items": []}
