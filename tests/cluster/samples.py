"""Records and views of small clusters, for tests: brokers are named by one letter, shards by a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from region.cluster import election
from region.cluster.records import (
    BrokerRecord,
    ClusterKeys,
    Health,
    NodeRecord,
    Record,
    ShardId,
    ShardRecord,
    encode,
)
from region.cluster.view import ClusterView
from region.metadata.transaction import Entry, Snapshot

KEYS = ClusterKeys("us-east")
STREAM = "ab" * 16
SHARD = ShardId(STREAM, 0)
ELECTION = "0000000000ff00ff"
"""Of which the next epoch is one above the last (region.log.epochs)."""
DELETED = f"{KEYS.prefix}deleted/{STREAM}"


def node(registration: int = 5, **changed: Any) -> NodeRecord:
    """A broker whose folder has been the same since its first start, and was never cut off from power."""
    told: dict[str, Any] = {
        "folder": "0f" * 16,
        "registration": registration,
        "boot": "boot-1",
        "whole_since": 1,
        "kept_since": 1,
        "host": "h1",
    }
    return NodeRecord(**(told | changed))


def broker(registration: int = 5, *, is_open: bool = True, **changed: Any) -> BrokerRecord:
    """A broker that is alive, with its logs open."""
    told: dict[str, Any] = {
        "registration": registration,
        "folder": "0f" * 16,
        "host": "h1",
        "client_address": "h1:7443",
        "peer_address": "h1:7443",
        "health": Health(open=is_open),
    }
    return BrokerRecord(**(told | changed))


def shard_record(isr: dict[str, int], elr: dict[str, int] | None = None, **changed: Any) -> ShardRecord:
    """A shard of a, b and c with min 2 in epoch 7, led by the first of `isr`."""
    told: dict[str, Any] = {
        "stream": "acme/payments/orders",
        "epoch": 7,
        "election": ELECTION,
        "leader": next(iter(isr), ""),
        "replicas": ("a", "b", "c"),
        "isr": isr,
        "elr": elr or {},
        "min": 2,
    }
    return ShardRecord(**(told | changed))


def view_of(
    nodes: Mapping[str, NodeRecord | int],
    alive: Mapping[str, BrokerRecord | int] | None = None,
    shards: Mapping[int, ShardRecord] | None = None,
    **others: Record,
) -> ClusterView:
    """What a process knows that has read these records; each has a revision of its own, in this order from 10 on."""
    records: dict[str, Record] = {
        KEYS.node(name): node(of) if isinstance(of, int) else of for name, of in nodes.items()
    }
    if alive is None:
        alive = {name: of if isinstance(of, int) else of.registration for name, of in nodes.items()}
    records |= {KEYS.broker(name): broker(of) if isinstance(of, int) else of for name, of in alive.items()}
    records |= {KEYS.shard(ShardId(STREAM, number)): of for number, of in (shards or {}).items()}
    records |= {KEYS.prefix + name: of for name, of in others.items()}
    view = ClusterView(KEYS)
    entries = tuple(
        Entry(key, encode(record, key), at, at) for at, (key, record) in enumerate(records.items(), 10)
    )
    view.load(Snapshot(entries, 10 + len(entries)))
    return view


def changed(record: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(record, **fields)


def eligible_if_alive(record: ShardRecord, member: str, brokers: election.Brokers) -> bool:
    """What a twin of `election.is_eligible` answers: it asks nothing of the registration that the record has."""
    return member in record.members() and brokers.registration(member) > 0
