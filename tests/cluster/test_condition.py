"""What one of several brokers shows of its region, and when it says that it is in sync."""

from __future__ import annotations

import pytest
from cluster.samples import node, shard_record, view_of
from prometheus_client import CollectorRegistry

from cli.ready import _ask
from felix.address import Address
from felix.errors import UnavailableError
from felix.health import HealthServer
from region.cluster.condition import counts, out_of_sync
from region.cluster.records import ControllerRecord, FrozenRecord

SHARDS = {
    0: shard_record({"a": 5, "b": 5, "c": 5}),
    1: shard_record({"a": 5, "b": 5}),
    2: shard_record({"c": 5}),
}
NODES = {"a": 5, "b": node(drain=True), "c": 5}


def test_each_state_of_a_region_is_counted_by_its_controller_alone() -> None:
    records = {"controller": ControllerRecord("a", 5), "frozen": FrozenRecord("a", "older")}
    view = view_of(NODES, {"a": 5, "b": 5}, SHARDS, **records)
    assert counts(view, "a", "c") == {
        "cluster_controller_missing": 0,
        "cluster_brokers_away": 1,
        "cluster_brokers_draining": 1,
        "cluster_shards_under_replicated": 2,
        "cluster_shards_below_min": 1,
        "cluster_shards_without_leader": 1,
        "cluster_leaders_most": 2,
        "cluster_leaders_fewest": 2,
        "cluster_audit_log_without_home": 1,
        "cluster_frozen": 1,
    }
    assert not any(counts(view, "b", "c").values()), "the controller tells it"
    for broker in "ab":
        cut_off = counts(view, broker, "c", is_answered=False)
        assert cut_off.pop("cluster_controller_missing") == 1, "whoever it was when the store last answered"
        assert not any(each for name, each in cut_off.items() if "leaders" not in name)
    alone = counts(view_of(NODES, {"a": 5, "b": 5}, SHARDS), "b", "a")
    assert alone["cluster_controller_missing"] == 1
    assert alone["cluster_shards_under_replicated"] == 2, "nobody else tells it"
    assert alone["cluster_audit_log_without_home"] == 0


def test_leaders_are_counted_at_the_brokers_that_may_lead() -> None:
    leading = {
        number: shard_record({leader: 5}, leader=leader, replicas=(leader,), min=1)
        for number, leader in enumerate("aaab" + "dddd")
    }
    told = counts(view_of({"a": 5, "b": 5, "c": 5, "d": node(drain=True)}, shards=leading), "a", "a")
    assert (told["cluster_leaders_most"], told["cluster_leaders_fewest"]) == (3, 0)
    away = counts(view_of({"a": 5, "b": 5, "c": 5, "d": 5}, {"a": 5, "b": 5, "d": 5}, leading), "a", "a")
    assert (away["cluster_leaders_most"], away["cluster_leaders_fewest"]) == (4, 1)


def test_a_broker_is_in_sync_once_every_shard_of_it_has_it_since_its_start() -> None:
    view = view_of(NODES, shards=dict.fromkeys(range(5), SHARDS[0]))
    assert out_of_sync(view, "a", 5) == "" == out_of_sync(view, "d", 1)
    assert out_of_sync(view, "b", 6).endswith("and 2 more"), "it was in sync before it was started again"


def test_a_health_page_says_apart_whether_it_serves_and_whether_it_is_in_sync() -> None:
    lacks = ["acme/ops/orders shard 0 is not in sync"]
    page = HealthServer("127.0.0.1", 0, CollectorRegistry(), lambda: "", lambda: "".join(lacks))
    try:
        address = Address(*page.address)
        _ask(address, "Broker b1", "/readyz")
        with pytest.raises(UnavailableError, match="orders shard 0 is not in sync"):
            _ask(address, "Broker b1", "/syncz")
        lacks.clear()
        _ask(address, "Broker b1", "/syncz")
    finally:
        page.close()
