"""Which shards cannot leave a broker that is drained, because too few others may have their copies; and which have too few brokers as it is. Pure.

A shard goes on with one copy less where no other broker is left for it, but never with fewer than its `min` (transactions.move): what a move there would
lead to is counted as the placement counts it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Set
from typing import Final, NamedTuple

from region.cluster.membership import place_of
from region.cluster.records import ShardId, ShardRecord
from region.cluster.view import ClusterView
from region.metadata.records import AUDIT_STREAM

SHOWN: Final = 3
"""Streams that a sentence names."""


class Bound(NamedTuple):
    """A shard that has too few brokers. `others`: how many may have a copy, besides those that leave; `needed`: how many copies a commit needs."""

    shard: ShardId
    stream: str
    others: int
    needed: int


def bound(view: ClusterView, leaving: Set[str], staying: Container[str] = ()) -> list[Bound]:
    """What stays on the brokers `leaving`, once they are drained and all others are as they are; and what has still to leave brokers that are drained
    already, and then could not. `staying`: incarnations of streams that stay whatever brokers there are, which are not counted."""
    drained, found = drained_of(view), []
    for shard, record in sorted(view.shards.items(), key=lambda item: (item[1].stream, item[0])):
        place = place_of(record)
        if shard.incarnation in staying or (leaving | drained).isdisjoint(place):
            continue
        others, needed = len(_may_have(view, record, leaving)), max(record.min, 1)
        if others >= needed:
            continue
        if leaving.isdisjoint(place) and len(_may_have(view, record, frozenset())) < needed:
            continue  # it stays already
        found.append(Bound(shard, record.stream, others, needed))
    return found


def short(view: ClusterView, shards: Iterable[ShardId]) -> list[Bound]:
    """Of these shards those to which nothing is written whatever the copies that they have do: too few brokers may have one. Of a broker that is drained the copy
    counts that it still has."""
    found = []
    for shard in shards:
        record = view.shards[shard]
        has = {*record.replicas, *record.target} & view.nodes.keys()
        others = len(has.union(_may_have(view, record, frozenset())))
        if others < record.min:
            found.append(Bound(shard, record.stream, others, record.min))
    return found


def drained_of(view: ClusterView) -> frozenset[str]:
    """The brokers that nothing is to stay on."""
    return frozenset(broker for broker, node in view.nodes.items() if node.drain)


def drained_with(view: ClusterView, found: list[Bound]) -> Set[str]:
    """Brokers that are drained already and have what was found."""
    return drained_of(view).intersection(
        broker for each in found for broker in place_of(view.shards[each.shard])
    )


def _may_have(view: ClusterView, record: ShardRecord, leaving: Set[str]) -> list[str]:
    """Brokers that are not drained, and are alive or have a copy."""
    has = place_of(record)
    return [
        broker
        for broker, node in view.nodes.items()
        if not node.drain and broker not in leaving and (broker in view.alive or broker in has)
    ]


def sentence(found: list[Bound]) -> str:
    """Which streams stay, and for want of what; without an end."""
    streams = {each.stream: each for each in found}
    said = [
        f"{'the audit log' if each.stream == str(AUDIT_STREAM) else each.stream} needs {each.needed} {'copy' if each.needed == 1 else 'copies'} and {each.others} "
        f"{'broker' if each.others == 1 else 'brokers'} may have one"
        for each in [*streams.values()][:SHOWN]
    ]
    more = f", and {len(streams) - SHOWN:,} more streams" if len(streams) > SHOWN else ""
    return "; ".join(said) + more


def way_out(view: ClusterView, found: list[Bound], leaving: Set[str], region: str) -> str:
    """What a person does: before the brokers `leaving` are drained, where there are any."""
    unusable = {broker for broker, node in view.nodes.items() if node.drain or broker not in view.alive}
    drained = sorted(drained_of(view) & view.alive.keys() - leaving)
    # Of one that is drained, starting it is not enough.
    away = sorted(unusable - view.alive.keys() - drained_of(view) - leaving)
    needed = max(each.needed for each in found) + len(leaving | unusable)
    first = " first" if leaving else ""
    ways = [
        f"Have {needed} brokers{first} (felix region scale {needed} --region {region}, where all are on one machine)"
    ]
    if drained:
        ways.append(f"felix region undrain {drained[0]}")
    if away:
        ways.append(f"start {', '.join(away)}")
    # The audit log has as many copies as it was made with. Of a stream that is not served nothing is altered.
    if leaving and found[0].others and all(each.stream != str(AUDIT_STREAM) for each in found):
        fewer = f"--replicas {found[0].others} --min-in-sync {found[0].others}"
        ways.append(f"have fewer copies: felix stream alter {found[0].stream} {fewer}")
    return f"{', or '.join(ways)}."
