"""Allowances: what crossed under each grant of one log, against the budget and the rate in its terms. Pure; fed with leaves in order.

Summed are the bytes of the records that INTENT (egress) and ACK leaves (ingress) list, in all link shards of the log, and EMPTY_RANGE_BYTES for each
envelope without any: what the agent asks for before it announces an envelope, and the destination before it takes one. What both charge to a
grant is leaf by leaf (`Header.charged_bytes`), and never less: so whoever held itself to the budget is below it here too, however its
ranges were cut into leaves, and also where a batch was announced again under another grant. A resend of an envelope has no leaf. An
envelope without records that begins where the one before it of its shard did counts once with it: a gap had grown before its first one was
answered, which agents of before did not ask for again. Of version 1 the bytes are those of the payloads, and no envelope without any counts.

A budget that was passed is a mistake of the crossing that passes it. A rate is compared with the times of INTENT leaves, which are their
writer's word, so it is told and breaks no rule; arrivals come in bursts. Callers: audit.verify.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from audit.leaf import EMPTY_RANGE_BYTES, Header, Kind, Side
from audit.position import LINK_SHARDS_MAX, LinkShard

RATE_SLACK_MS: Final = 60_000
"""An agent that is started again begins with a second's worth and one batch, and its clock may have been set: of a shorter time nothing is
concluded."""
RATE_FACTOR: Final = 2
"""Told is what crossed faster than this many times the rate."""


class Allowed(NamedTuple):
    """What a grant's terms allow; 0 is no limit."""

    budget_bytes: int
    rate_bytes: int
    """a second"""


class Faster(NamedTuple):
    """What crossed under a grant faster than its rate allows."""

    leaf: int
    """the last of them"""
    grant_id: str
    size: int
    span_ms: int
    rate_bytes: int


@dataclass(slots=True)
class _Use:
    allowed: Allowed
    side: Side
    size: int = 0
    first_ms: int = 0
    last_ms: int = 0
    leaf: int = -1
    envelope: bytes = b""
    batch: int = 0
    """bytes of the batch that the newest leaf is of"""
    largest: int = 0
    """batch"""
    empty_bytes: int = 0
    """what the envelopes without records count"""
    empty: dict[tuple[LinkShard, bytes], int | None] = field(default_factory=dict)
    """where the newest of these began in each shard and incarnation"""

    def count_empty(self, header: Header) -> None:
        """Take an envelope that lists no bytes."""
        shard = LinkShard.of(header), header.incarnation
        if header.first_offset is not None and self.empty.get(shard) == header.first_offset:
            return
        if shard in self.empty or len(self.empty) < LINK_SHARDS_MAX:
            self.empty[shard] = header.first_offset
        self.empty_bytes += EMPTY_RANGE_BYTES


class Allowances:
    """The grants of a log after the crossings so far. As many are held as whoever asks knows the terms of."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def take(self, index: int, header: Header, allowed: Allowed, version: int) -> str:
        """Take the next crossing, in a leaf of this version, under a grant whose terms allow this. Returns what is wrong with it, or nothing."""
        if not any(allowed):
            return ""
        use = self._uses.setdefault(header.grant_id, _Use(allowed, header.side))
        size, time_ms = header.listed_bytes, header.time_ms
        use.batch = size + (use.batch if use.envelope == header.envelope_sha256 else 0)
        use.envelope, use.largest = header.envelope_sha256, max(use.largest, use.batch)
        use.size += size
        is_empty = version > 1 and not use.batch and header.part == header.parts - 1
        if is_empty:
            use.count_empty(header)
        elif size:
            use.first_ms = time_ms if use.leaf < 0 else min(use.first_ms, time_ms)
            use.last_ms, use.leaf = max(use.last_ms, time_ms), index
        else:
            return ""
        if not allowed.budget_bytes or use.size + use.empty_bytes <= allowed.budget_bytes:
            return ""
        what = f"{header.kind.name} under grant {header.grant_id}"
        most = f"the {allowed.budget_bytes:,} bytes that its terms allow altogether"
        if header.side is Side.EGRESS:
            return f"{what}: by it more had crossed than {most}."
        return (
            f"{what}: by it more had arrived than {most}. Its bridge sent more than it may; brokers that lead several of its shards hear of each other "
            "after a window."
        )

    def faster(self) -> Iterator[Faster]:
        """Where all but the largest batch crossed faster than the rate, by the times of the leaves."""
        for grant_id, use in self._uses.items():
            rate, span_ms = use.allowed.rate_bytes, use.last_ms - use.first_ms
            most = RATE_FACTOR * rate * (span_ms + RATE_SLACK_MS) // 1000
            if rate and use.side is Side.EGRESS and use.size - use.largest > most:
                yield Faster(use.leaf, grant_id, use.size, span_ms, rate)


def crosses(header: Header) -> bool:
    """Whether records cross by this leaf: an INTENT, or an arrival."""
    return (header.kind, header.side) in ((Kind.INTENT, Side.EGRESS), (Kind.ACK, Side.INGRESS))
