"""How the shards and brokers of a cluster stand, counted from its records, and whether one broker has all that it should. Pure.

Counted is what is to be known of a region as a whole, so one broker tells it: the controller, or each while there is none.
"""

from __future__ import annotations

from typing import Final

from region.cluster.view import ClusterView

SHOWN: Final = 3
"""Shards that a sentence names."""


def counts(view: ClusterView, broker: str, audit_home: str, *, is_answered: bool = True) -> dict[str, float]:
    """By name, as `broker` is to show them: all 0 but the first where another one is the controller. `audit_home`: the broker that writes the
    audit log; empty while nobody does. `is_answered`: whether the metadata store answers the broker. Where it does not, the view may be of long ago, also
    that there is a controller. From every thread."""
    controller = view.controller if is_answered else None
    tells = is_answered and (controller is None or controller.broker == broker)
    alive, nodes = set(view.alive), dict(view.nodes)
    under = below = without = 0
    leads = {each: 0 for each, node in nodes.items() if each in alive and not node.drain}
    # The event loop may change the table meanwhile.
    for record in list(view.shards.values()) if tells else ():
        if record.leader in leads:
            leads[record.leader] += 1
        under += len(record.isr) < len(record.replicas)
        below += len(record.isr) < record.min
        without += record.leader not in alive
    return {
        "cluster_controller_missing": float(controller is None),
        "cluster_brokers_away": float(len(nodes.keys() - alive)) if tells else 0.0,
        "cluster_brokers_draining": float(sum(node.drain for node in nodes.values())) if tells else 0.0,
        "cluster_shards_under_replicated": float(under),
        "cluster_shards_below_min": float(below),
        "cluster_shards_without_leader": float(without),
        "cluster_leaders_most": float(max(leads.values(), default=0)),
        "cluster_leaders_fewest": float(min(leads.values(), default=0)),
        "cluster_audit_log_without_home": float(tells and audit_home not in alive),
        "cluster_frozen": float(tells and view.frozen is not None),
    }


def out_of_sync(view: ClusterView, broker: str, registration: int) -> str:
    """Why not every copy of `broker` is in sync since its start under `registration`, as a sentence without its end; empty where all are. From every
    thread."""
    missing = [
        f"{record.stream} shard {shard.number}"
        for shard, record in list(view.shards.items())
        if broker in record.replicas and record.isr.get(broker) != registration
    ]
    if not missing:
        return ""
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return f"not in sync at broker {broker}: {', '.join(sorted(missing)[:SHOWN])}{more}"
