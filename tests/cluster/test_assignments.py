"""Who leads a stream, by the records: all of its shards under one's present registration, or none."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.samples import SHARD, STREAM, broker, node, shard_record, view_of

from region.cluster.assignments import Assignments, Leader
from region.cluster.records import BrokerRecord, NodeRecord, ShardRecord, Yielded

NODES: dict[str, NodeRecord | int] = {"a": node(), "b": node()}
ALIVE: dict[str, BrokerRecord | int] = {
    "a": broker(client_address="h1:7443"),
    "b": broker(client_address="h2:7443"),
}


def led(leader: str, **changed: Any) -> ShardRecord:
    return shard_record({leader: 5}, leader=leader, **({"replicas": (leader,), "min": 1} | changed))


def assignments(*records: ShardRecord, of: str = "a", registration: int = 5) -> Assignments:
    view = view_of(NODES, ALIVE, dict(enumerate(records)))
    return Assignments(view, of, lambda: registration)


def test_a_broker_leads_a_stream_whose_shards_all_name_it() -> None:
    found = assignments(led("a", epoch=7), led("a", epoch=9))
    assert found.epochs(STREAM, 2) == {0: 7, 1: 9}
    assert found.epochs(STREAM, 3) == {} and found.epochs(STREAM, 3, {2}) == {0: 7, 1: 9}, (
        "of those that are led"
    )
    assert found.leader(STREAM, 1) == Leader("a", "h1:7443", 9)


@pytest.mark.parametrize(
    "second",
    [
        None,
        led("b"),
        led("a", yielded=Yielded(7, "drain")),
        shard_record({"a": 5}, leader="", replicas=("a",), min=1),
    ],
    ids=["not placed yet", "another's", "yielded", "vacant"],
)
def test_a_stream_of_which_one_shard_is_not_led_here_is_not_led_here(second: ShardRecord | None) -> None:
    records = [led("a"), *([] if second is None else [second])]
    assert assignments(*records).epochs(STREAM, 2) == {}


@pytest.mark.parametrize("registration", [0, 4, 6])
def test_what_was_led_before_a_restart_is_not_led_without_an_election(registration: int) -> None:
    assert assignments(led("a"), registration=registration).epochs(STREAM, 1) == {}


def test_the_leader_of_a_vacant_or_yielded_shard_is_nobody() -> None:
    vacant = shard_record({"a": 5}, leader="", replicas=("a",), min=1)
    assert assignments(vacant).leader(STREAM) is None
    assert assignments(led("a", yielded=Yielded(7, "drain"))).leader(STREAM) is None
    assert assignments().leader(STREAM) is None


def test_a_leader_that_is_not_alive_has_no_address_and_keeps_its_streams() -> None:
    record = shard_record({"c": 5}, leader="c", replicas=("c",), min=1)
    found = assignments(record)
    assert found.leader(STREAM) == Leader("c", "", 7)
    assert found.placed(STREAM) == "c"
    vacant = shard_record({"c": 5}, leader="", replicas=("c",), min=1)
    assert assignments(vacant).placed(STREAM) == "c"
    assert assignments().placed(SHARD.incarnation) == ""
