"""Positions: what a log says about how far each link's shards are. Pure; derived from leaf headers in log order.

A bridge resumes from here and nowhere else: the last INTENT, the last ACK, and the INTENTs without an answer. On
the ingress side the last ACK is the last delivery. Invariants: the state is a function of the leaves applied, in
order; `Positions.decode(p.encode()) == p`; both the number of link shards and of unanswered intents are bounded.
Callers: audit.trail (applies), bridge and region (ask through it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from audit.leaf import GapKind, Header, Kind, Side
from felix.errors import CorruptionError

LINK_SHARDS_MAX: Final = 65_536
"""Streams' shards with positions in one log; about 1 kB each."""
UNANSWERED_MAX: Final = 4_096
"""INTENTs of one link shard without an ACK: far more than any window in flight, and still little memory. Appends
already on their way to the disk may pass it by as many."""

UNREADABLE_MAX: Final = 1_000
"""Leaves that cannot be read, remembered by index; none is ever written by this version."""


class ShardName(NamedTuple):
    """A shard on its way into one stream of one region, whoever carries it.

    Two grants may let one stream cross under two names: each destination stream has every record once."""

    source_region: str
    destination_region: str
    stream: str
    shard: int
    destination_stream: str

    @classmethod
    def of(cls, header: Header) -> ShardName:
        """The one that a leaf is about."""
        return cls(
            header.source_region,
            header.destination_region,
            header.stream,
            header.shard,
            header.destination_stream,
        )


class LinkShard(NamedTuple):
    """One shard of one stream on its way over one bridge to one stream of one region."""

    bridge: str
    source_region: str
    destination_region: str
    stream: str
    shard: int
    destination_stream: str

    @classmethod
    def of(cls, header: Header) -> LinkShard:
        """The link shard that a leaf is about."""
        return cls(header.bridge, *ShardName.of(header))

    @property
    def shard_name(self) -> ShardName:
        """The shard without its bridge."""
        return ShardName(*self[1:])


class Crossing(NamedTuple):
    """One batch as its INTENT or ACK leaves describe it, all parts together. Offsets with both ends included."""

    number: int
    """the index of its first leaf"""
    leaves: int
    time_ms: int
    incarnation: bytes
    source_epoch: int
    grant_id: str
    first_offset: int
    last_offset: int
    records: int
    source_batch_sha256: bytes
    envelope_sha256: bytes
    destination_first_offset: int | None
    destination_last_offset: int | None
    attempt: int


class _State(msgspec.Struct):
    key: LinkShard
    intent: Crossing | None = None
    ack: Crossing | None = None
    unanswered: list[Crossing] = []


class _Snapshot(msgspec.Struct):
    size: int
    last_leaf_hash: bytes
    states: list[_State]
    unreadable: list[int]
    charged_bytes: dict[str, int]
    version: Literal[6]
    """A snapshot of another version is not taken: one of version 0.1 has none, and does not say which leaves could not be
    read; up to version 3, positions of two destination streams were one; up to version 4, ranges without records were free;
    up to version 5, what another grant announced again still waited for its answer."""


# Made here: shards and logs are opened on several threads, and msgspec learns a type at its first use, not safely on two.
_snapshot: Final = msgspec.msgpack.Decoder(_Snapshot)


def _crossing(number: int, header: Header) -> Crossing:
    assert header.first_offset is not None and header.last_offset is not None
    return Crossing(
        number,
        1,
        header.time_ms,
        header.incarnation,
        header.source_epoch,
        header.grant_id,
        header.first_offset,
        header.last_offset,
        header.records,
        header.source_batch_sha256,
        header.envelope_sha256,
        header.destination_first_offset,
        header.destination_last_offset,
        header.attempt,
    )


def _joined(before: Crossing, header: Header) -> Crossing:
    """`before` with one more part."""
    assert header.last_offset is not None
    return before._replace(
        leaves=before.leaves + 1,
        last_offset=header.last_offset,
        records=before.records + header.records,
        destination_last_offset=header.destination_last_offset,
    )


def _begins_again(header: Header, announced: Crossing) -> bool:
    """Whether an INTENT or GAP of another grant begins at or before an INTENT that was not answered: what that one announced had not
    arrived, or not by this bridge (audit.accounting)."""
    return (
        header.grant_id != announced.grant_id
        and header.incarnation == announced.incarnation
        and header.first_offset is not None
        and header.first_offset <= announced.first_offset
    )


def _is_settled(header: Header, announced: Crossing) -> bool:
    """Whether a GAP of what another bridge brought meanwhile, under the same grant, lies behind the beginning of an INTENT that was not answered: another
    one brought that, too, or nobody asks for its receipt any more (audit.accounting)."""
    return (
        header.grant_id == announced.grant_id
        and header.incarnation == announced.incarnation
        and header.last_offset is not None
        and announced.first_offset <= header.last_offset
    )


class Positions:
    """The positions after the leaves applied so far."""

    def __init__(self) -> None:
        self._states: dict[LinkShard, _State] = {}
        self._of_shard: dict[ShardName, list[_State]] = {}
        """the same states, of every bridge that carries a shard"""
        self.unreadable: list[int] = []
        """leaves that cannot be read, ascending; the first UNREADABLE_MAX of them"""
        self._charged_bytes: dict[str, int] = {}

    def apply(self, number: int, header: Header | None) -> None:
        """Take the leaf with index `number` into account. Kinds that move no position change nothing.

        None stands for a leaf that cannot be read: it moves nothing, and is remembered.
        """
        if header is None:
            if len(self.unreadable) < UNREADABLE_MAX:
                self.unreadable.append(number)
            return
        if header.kind is Kind.GAP and header.gap is GapKind.ELSEWHERE:
            known = self._states.get(LinkShard.of(header))
            if known is not None:
                known.unanswered = [
                    each
                    for each in known.unanswered
                    if not (_begins_again(header, each) or _is_settled(header, each))
                ]
        if header.kind not in (Kind.INTENT, Kind.ACK):
            return
        if header.kind is Kind.INTENT or header.side is Side.INGRESS:
            grant = header.grant_id
            self._charged_bytes[grant] = self._charged_bytes.get(grant, 0) + header.charged_bytes
        key = LinkShard.of(header)
        state = self._states.get(key)
        if state is None:
            state = _State(key, unanswered=[])
            self._keep(state)
        if header.kind is Kind.INTENT:
            if header.part and state.intent is not None and state.unanswered:
                state.intent = state.unanswered[-1] = _joined(state.intent, header)
            else:
                state.intent = _crossing(number, header)
                state.unanswered = [each for each in state.unanswered if not _begins_again(header, each)]
                state.unanswered.append(state.intent)
        elif header.part and state.ack is not None:
            state.ack = _joined(state.ack, header)
        else:
            state.ack = _crossing(number, header)
            if header.side is Side.EGRESS:
                state.unanswered = [
                    intent for intent in state.unanswered if intent.envelope_sha256 != header.envelope_sha256
                ]

    def _keep(self, state: _State) -> None:
        self._states[state.key] = state
        self._of_shard.setdefault(state.key.shard_name, []).append(state)

    def refuses(self, headers: list[Header]) -> str:
        """Why one append of these leaves, all of one link shard, would pass a limit; empty where it would not."""
        first = next((header for header in headers if header.kind in (Kind.INTENT, Kind.ACK)), None)
        if first is None:
            return ""
        state = self._states.get(LinkShard.of(first))
        if state is None:
            return (
                f"it has {LINK_SHARDS_MAX} link shards already"
                if len(self._states) >= LINK_SHARDS_MAX
                else ""
            )
        if first.kind is Kind.INTENT and len(state.unanswered) >= UNANSWERED_MAX:
            return f"{UNANSWERED_MAX} intents of {first.stream}, shard {first.shard}, are without an answer"
        return ""

    def charged_bytes(self, grant_id: str) -> int:
        """What was announced (egress) or appended (ingress) under this grant, in all its leaves, as its budget counts it."""
        return self._charged_bytes.get(grant_id, 0)

    def last_intent(self, key: LinkShard) -> Crossing | None:
        """The newest INTENT of this link shard."""
        state = self._states.get(key)
        return None if state is None else state.intent

    def last_ack(self, key: LinkShard) -> Crossing | None:
        """The newest ACK of this link shard."""
        state = self._states.get(key)
        return None if state is None else state.ack

    def newest_incarnation(self, shard: ShardName) -> bytes:
        """Under which incarnation the newest range of this shard arrived, whichever bridge brought it; empty where none did."""
        newest = max(self._arrived(shard), key=lambda ack: ack.number, default=None)
        return b"" if newest is None else newest.incarnation

    def arrived_below(self, shard: ShardName, incarnation: bytes) -> int:
        """Below which source offset records of this shard arrived under this incarnation, whichever bridge brought them.

        Each bridge's newest range is remembered: it says all of the `newest_incarnation`, and less of those before it."""
        return max(
            (ack.last_offset + 1 for ack in self._arrived(shard) if ack.incarnation == incarnation), default=0
        )

    def brought_below(self, key: LinkShard, incarnation: bytes) -> int | None:
        """As `arrived_below`, of one bridge's own ranges; None where its newest one is of another incarnation, and the log alone knows."""
        state = self._states.get(key)
        if state is None or state.ack is None:
            return 0
        return state.ack.last_offset + 1 if state.ack.incarnation == incarnation else None

    def _arrived(self, shard: ShardName) -> Iterator[Crossing]:
        """The newest range that each bridge brought of a shard."""
        return (state.ack for state in self._of_shard.get(shard, ()) if state.ack is not None)

    def unanswered(self, key: LinkShard) -> tuple[Crossing, ...]:
        """INTENTs without an ACK, oldest first: what a bridge sends again when it starts."""
        state = self._states.get(key)
        return () if state is None else tuple(state.unanswered)

    def keys(self) -> list[LinkShard]:
        """Every link shard with a position, sorted."""
        return sorted(self._states)

    def encode(self, size: int, last_leaf_hash: bytes) -> bytes:
        """A snapshot after `size` leaves, the last of which has this hash."""
        return msgspec.msgpack.encode(
            _Snapshot(
                size, last_leaf_hash, list(self._states.values()), self.unreadable, self._charged_bytes, 6
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> tuple[Positions, int, bytes]:
        """Positions, size and last leaf hash of a snapshot. Raises CorruptionError; the caller rebuilds instead."""
        try:
            snapshot = _snapshot.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptionError(f"The snapshot of positions does not decode: {error}.") from error
        positions = cls()
        for state in snapshot.states:
            positions._keep(state)
        positions.unreadable = snapshot.unreadable
        positions._charged_bytes = snapshot.charged_bytes
        return positions, snapshot.size, snapshot.last_leaf_hash
