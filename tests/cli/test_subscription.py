"""`felix subscription` against a real broker, as a user types it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from region_process import BrokerProcess, fixed_region
from typer.testing import CliRunner

from cli.main import app
from felix import sync
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


def test_a_subscription_begins_at_an_offset_or_a_time(felix: Felix) -> None:
    felix("stream", "create", ORDERS)
    felix("stream", "publish", ORDERS, given="one\ntwo\nthree\n")
    said = felix("subscription", "create", ORDERS, "at-offset", "--from", "@2")
    assert said == f"at-offset of {ORDERS} is created, from @2\n"
    assert felix("subscription", "consume", ORDERS, "at-offset", "--count", "1") == "three\n"
    felix("subscription", "create", ORDERS, "an-hour-ago", "--from", "1h")
    assert felix("subscription", "consume", ORDERS, "an-hour-ago", "--count", "1") == "one\n"
    felix("subscription", "create", ORDERS, "beyond", "--from", "@17", refused=True)
    felix("subscription", "create", ORDERS, "ever", "--from", "yesterday", refused=True)
    assert felix("subscription", "list", ORDERS, "-o", "name").split() == ["an-hour-ago", "at-offset"]
    felix("subscription", "seek", ORDERS, "an-hour-ago", "10m")
    assert felix("subscription", "consume", ORDERS, "an-hour-ago", "--wait", "1s") == "one\ntwo\nthree\n"


def test_records_are_looked_up_by_key_and_time(felix: Felix) -> None:
    """What an incident asks for: what one key said, up to a moment; and it ends by itself."""
    felix("stream", "create", ORDERS, "--shards", "3")
    for each in range(30):
        felix("stream", "publish", ORDERS, "--key-field", "key", given=f'{{"key":"{each % 3}","n":{each}}}\n')
    lines = felix("stream", "subscribe", ORDERS, "--until-end", "--key", "1", "--json").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["key"], row["value"]["n"]) for row in rows] == [("1", n) for n in range(1, 30, 3)]
    middle = rows[5]["time"]
    until = felix("stream", "subscribe", ORDERS, "--key", "1", "--until", middle, "--json").splitlines()
    assert [json.loads(line)["value"]["n"] for line in until] == [1, 4, 7, 10, 13]
    after = felix("stream", "subscribe", ORDERS, "--key", "1", "--from", middle, "--until-end").splitlines()
    assert [json.loads(line)["n"] for line in after] == [16, 19, 22, 25, 28]
    everything = felix("stream", "subscribe", ORDERS, "--from", "1h", "--until-end").splitlines()
    assert sorted(json.loads(line)["n"] for line in everything) == list(range(30))
    assert felix("stream", "subscribe", ORDERS, "--until", "1h") == ""
    assert felix("stream", "subscribe", ORDERS, "--key", "nobody", "--until-end") == ""
    felix("stream", "subscribe", ORDERS, "--until", "2999-01-01", refused=True)


def test_dead_letters_are_delivered_to_their_subscription_again(felix: Felix) -> None:
    felix("stream", "create", ORDERS)
    felix("subscription", "create", ORDERS, "billing", "--from", "earliest", "--max-attempts", "1")
    felix("stream", "publish", ORDERS, given="one\ntwo\nthree\n")
    with sync.connect("us-east") as region, region.stream(ORDERS).consumer("billing") as consumer:
        for _ in range(3):
            assert consumer.nack(next(consumer), reason="broken")
        limit = time.monotonic() + 60
        while region.stream(ORDERS).describe_subscription("billing").dead < 3 and time.monotonic() < limit:
            time.sleep(0.01)
        (held,) = region.queue(f"{ORDERS}.dead").lease(1)
        said = felix("subscription", "redrive", ORDERS, "billing", "--records", "1")
        assert said == f"1 dead letter is delivered to billing of {ORDERS} again\n"
        done = CliRunner().invoke(app, ["subscription", "redrive", ORDERS, "billing"])
        assert done.stdout == f"1 dead letter is delivered to billing of {ORDERS} again\n"
        assert "1 dead letter is left where they lie: a worker or a transaction holds them." in done.stderr
        held.release()
        state = json.loads(felix("subscription", "redrive", ORDERS, "billing", "--json"))
        assert state == {"kind": "Redrive", "redriven": 1, "gone": 0, "held": 0, "full": False}
        again = [next(consumer) for _ in range(3)]
        assert sorted(record.payload for record in again) == [b"one", b"three", b"two"]
        assert {record.attempt for record in again} == {1}


def test_a_redrive_of_a_queue_that_is_none_names_the_command_for_subscriptions(felix: Felix) -> None:
    """Those of a subscription are a queue by themselves, and go back to it alone."""
    felix("stream", "create", ORDERS)
    felix("queue", "create", f"{ORDERS}.dead")
    done = CliRunner().invoke(app, ["queue", "redrive", ORDERS])
    assert isinstance(done.exception, FelixError)
    assert done.exception.hint.endswith(f"felix subscription redrive {ORDERS} NAME")
    done = CliRunner().invoke(app, ["queue", "redrive", f"{ORDERS}.dead"])
    assert done.exit_code == 0
    assert (
        f"felix queue redrive {ORDERS})" in done.stderr
        and f"felix subscription redrive {ORDERS} NAME)" in done.stderr
    )
