"""Allowances: what crossed under each grant of one log, against the budget and the rate in its terms. Pure; fed with leaves in order.

Summed are the bytes of the records that INTENT (egress) and ACK leaves (ingress) list, in all link shards of the log, and EMPTY_RANGE_BYTES for each
envelope without any: what the agent asks for before it announces an envelope, and the destination before it takes one. What both charge to a
grant is leaf by leaf (`Header.charged_bytes`), and never less: so whoever held itself to the budget is below it here too, however its
ranges were cut into leaves, and also where a batch was announced again under another grant. A resend of an envelope has no leaf. Where an
envelope without records begins where the one before it of its shard did and ends later, the two count once: a gap had grown before its first one
was answered, which agents of before did not ask for again. Every further one that begins there counts, whoever wrote it. Of version 1 the bytes
are those of the payloads, and no envelope without any counts.

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
"""Told is what crossed faster than this many times the rate, in whatever stretch of time that was most."""


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
class _Pace:
    """How fast records cross under one grant, by the times of their leaves: a bucket that RATE_FACTOR times the rate drains. So a burst is as
    clear after a quiet month as in the first minute.

    Invariant: `level` is what crossed since `since_ms`, without what drained since then; both begin anew whenever it is empty, and where times run back.
    """

    rate: int
    last_ms: int = 0
    since_ms: int = 0
    size: int = 0
    largest: int = 0
    """batch since then: one may be taken at once, however large"""
    level: int = 0
    worst: Faster | None = None
    excess: int = 0

    def take(self, index: int, header: Header, batch: int) -> None:
        """The next crossing; `batch`: bytes of its batch so far."""
        time_ms = header.time_ms
        self.level -= RATE_FACTOR * self.rate * max(0, time_ms - self.last_ms) // 1000
        # How long something took is not known where the clock was set back between its leaves: what follows is counted by itself.
        ran_back = time_ms < self.last_ms - RATE_SLACK_MS
        if self.level <= 0 or ran_back:
            self.level, self.size, self.largest, self.since_ms = 0, 0, 0, time_ms
        self.last_ms = time_ms if ran_back else max(self.last_ms, time_ms)
        self.level += header.listed_bytes
        self.size += header.listed_bytes
        self.largest = max(self.largest, batch)
        excess = self.level - self.largest - RATE_FACTOR * self.rate * RATE_SLACK_MS // 1000
        if excess > self.excess:
            self.excess = excess
            span_ms = self.last_ms - self.since_ms
            self.worst = Faster(index, header.grant_id, self.size, span_ms, self.rate)


class _Part(NamedTuple):
    """Which leaf of which envelope, where that has several."""

    shard: LinkShard
    envelope: bytes
    number: int


class _Empty(NamedTuple):
    """Offsets of an envelope without records. `one_was_free`: of the run of them that begin at this offset, one has counted nothing."""

    first: int | None
    last: int | None
    one_was_free: bool


@dataclass(slots=True)
class _Use:
    size: int = 0
    part: _Part | None = None
    batch: int = 0
    """bytes of the batch that the newest leaf is of"""
    empty_bytes: int = 0
    """what the envelopes without records count"""
    empty: dict[tuple[LinkShard, bytes], _Empty] = field(default_factory=dict)
    """the newest of these in each shard and incarnation"""
    pace: _Pace | None = None
    """where the grant has a rate, and the log is its bridge's"""

    def count(self, header: Header) -> None:
        """Take the bytes that a leaf lists. An envelope's leaves stand one behind the other; what only has the name of the envelope before it
        is one of its own."""
        part = None if header.parts == 1 else _Part(LinkShard.of(header), header.envelope_sha256, header.part)
        goes_on = part is not None and self.part == part._replace(number=header.part - 1)
        self.batch = header.listed_bytes + (self.batch if goes_on else 0)
        self.part = part
        self.size += header.listed_bytes

    def count_empty(self, header: Header) -> None:
        """Take an envelope that lists no bytes."""
        shard = LinkShard.of(header), header.incarnation
        first, last, before = header.first_offset, header.last_offset, self.empty.get(shard)
        one_was_free = before is not None and before.first == first and before.one_was_free
        is_free = (
            first is not None
            and last is not None
            and before is not None
            and before.last is not None
            and before.first == first
            and before.last < last
            and not one_was_free
        )
        if before is not None or len(self.empty) < LINK_SHARDS_MAX:
            self.empty[shard] = _Empty(first, last, is_free or one_was_free)
        if not is_free:
            self.empty_bytes += EMPTY_RANGE_BYTES


class Allowances:
    """The grants of a log after the crossings so far. As many are held as whoever asks knows the terms of."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def take(self, index: int, header: Header, allowed: Allowed, version: int) -> str:
        """Take the next crossing, in a leaf of this version, under a grant whose terms allow this. Returns what is wrong with it, or nothing."""
        if not any(allowed):
            return ""
        use = self._uses.get(header.grant_id)
        if use is None:
            is_paced = allowed.rate_bytes and header.side is Side.EGRESS
            use = _Use(pace=_Pace(allowed.rate_bytes) if is_paced else None)
            self._uses[header.grant_id] = use
        size = header.listed_bytes
        use.count(header)
        is_empty = version > 1 and not use.batch and header.part == header.parts - 1
        if is_empty:
            use.count_empty(header)
        elif not size:
            return ""
        elif use.pace is not None:
            use.pace.take(index, header, use.batch)
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
        """Of each grant where all but the largest batch crossed faster than the rate, by the times of the leaves, the worst stretch."""
        for use in self._uses.values():
            if use.pace is not None and use.pace.worst is not None:
                yield use.pace.worst


def crosses(header: Header) -> bool:
    """Whether records cross by this leaf: an INTENT, or an arrival."""
    return (header.kind, header.side) in ((Kind.INTENT, Side.EGRESS), (Kind.ACK, Side.INGRESS))
