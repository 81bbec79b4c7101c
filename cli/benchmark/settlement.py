"""The settlement of a bridge's measurement: what was published, what both audit logs say, and what was delivered.

It holds where published = crossed + withheld, crossed = acknowledged = landed = delivered, every offset of the stream
stands in exactly one INTENT or WITHHELD entry, the ingress log has the same entries byte for byte, both logs verify,
and each was cosigned by the other region. Pure; the logs are read by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from audit.leaf import ENTRY_BYTES, Kind, Leaf
from cli.benchmark.departures import Arrivals, is_withheld

_OFFSET_BYTES: Final = 8


@dataclass(slots=True)
class LogBooks:
    """One log's entries of one stream, by kind and shard, in the order of the log; `verdict`: what does not verify."""

    entries: dict[Kind, dict[int, list[bytes]]] = field(default_factory=dict)
    acknowledged: int = 0
    """records of ACK leaves, with a receipt each"""
    leaves: int = 0
    cosigned: int = 0
    verdict: list[str] = field(default_factory=list)

    def take(self, leaves: Iterable[Leaf], stream: str) -> None:
        """Leaves of the log, in order."""
        for leaf in leaves:
            self.leaves += 1
            header = leaf.header
            if header.stream != stream:
                continue
            kept = self.entries.setdefault(header.kind, {}).setdefault(header.shard, [])
            kept += [
                bytes(leaf.entries[at : at + ENTRY_BYTES]) for at in range(0, len(leaf.entries), ENTRY_BYTES)
            ]
            if header.kind is Kind.ACK:
                self.acknowledged += header.records

    def of(self, kind: Kind, shard: int) -> list[bytes]:
        """Entries of one kind in one shard."""
        return self.entries.get(kind, {}).get(shard, [])

    def count(self, kind: Kind) -> int:
        """Entries of one kind."""
        return sum(len(held) for held in self.entries.get(kind, {}).values())


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of all rounds, each from its own source, and a sentence for each thing that does not hold."""

    published: int
    """acknowledged to the publisher"""
    crossed: int
    """INTENT entries of the egress log"""
    withheld: int
    """WITHHELD entries of the egress log"""
    acknowledged: int
    """records of the egress log's ACK leaves"""
    landed: int
    """ACK entries of the ingress log"""
    delivered: int
    """handed to the subscriber at the destination"""
    egress_leaves: int
    ingress_leaves: int
    problems: list[str]

    @property
    def is_reconciled(self) -> bool:
        return not self.problems


def settle(
    published: Mapping[int, int], arrivals: Arrivals, egress: LogBooks, ingress: LogBooks
) -> Settlement:
    """`published`: records by shard; their offsets are 0 and on."""
    problems: list[str] = []
    for name, log in (("egress", egress), ("ingress", ingress)):
        problems += [f"the {name} log does not verify: {sentence}" for sentence in log.verdict]
        if not log.cosigned:
            problems.append(f"nobody has cosigned the {name} log")
    for shard, count in sorted(published.items()):
        intents, stayed = egress.of(Kind.INTENT, shard), egress.of(Kind.WITHHELD, shard)
        crossed, withheld = _offsets(intents), _offsets(stayed)
        wanted = [sequence for sequence in range(count) if not is_withheld(sequence)]
        if crossed != wanted:
            problems.append(
                f"shard {shard}: {len(crossed):,} INTENT entries over {len(set(crossed)):,} records; "
                f"{len(wanted):,} have to cross, one INTENT each, in order"
            )
        if withheld != [sequence for sequence in range(count) if is_withheld(sequence)]:
            problems.append(f"shard {shard}: {len(withheld):,} WITHHELD entries are not those that must stay")
        if ingress.of(Kind.ACK, shard) != intents:
            problems.append(f"shard {shard}: the ingress log has other entries than the egress log")
    found = Settlement(
        published=sum(published.values()),
        crossed=egress.count(Kind.INTENT),
        withheld=egress.count(Kind.WITHHELD),
        acknowledged=egress.acknowledged,
        landed=ingress.count(Kind.ACK),
        delivered=arrivals.delivered,
        egress_leaves=egress.leaves,
        ingress_leaves=ingress.leaves,
        problems=problems,
    )
    if found.published != found.crossed + found.withheld:
        problems.append(
            f"published {found.published:,} is not crossed {found.crossed:,} + withheld {found.withheld:,}"
        )
    if not found.crossed == found.acknowledged == found.landed == found.delivered:
        problems.append(
            f"crossed {found.crossed:,}, acknowledged {found.acknowledged:,}, landed {found.landed:,} and "
            f"delivered {found.delivered:,} differ"
        )
    if not arrivals.is_clean:
        wrong = ", ".join(
            f"{name} {value}"
            for name, value in msgspec.to_builtins(arrivals).items()
            if value and name != "delivered"
        )
        problems.append(f"at the destination: {wrong}")
    return found


def _offsets(entries: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(entry[:_OFFSET_BYTES], "big") for entry in entries]
