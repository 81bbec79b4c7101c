"""The leaders of the streams that transactions concern, as the coordinator reaches them over the brokers' links.

What is asked before the decision is refused with the leader's answer; what is asked after it is asked until it is answered. Requests may be
asked again without harm (region.transactions.lanes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, Protocol, TypeVar

import msgspec

from felix.errors import Code, RequestError, UnavailableError
from felix.names import SpiffeId, StreamName
from region.broker import Broker
from region.clustered import Clustered
from region.copies.peer_requests import ASK_S, PeerRequest, PeerRequests
from region.metadata.records import Stream
from region.transactions.lane_messages import (
    AbandonAcknowledgements,
    Abandoned,
    Acknowledged,
    ApplyLane,
    CheckLane,
    LaneApplied,
    LaneChecked,
    LaneShown,
    Placed,
    PrepareAcknowledgements,
    Prepared,
    ShowLane,
)
from region.transactions.positions import placings
from region.transactions.state import UNKNOWN_OFFSET, Part

ASK_BYTES: Final = 4 << 20
"""Of batches and acknowledgements in one request: a third of the largest (replication.wire.ASK_BYTES_MAX), and a part of a link's backlog."""
SHOW_S: Final = 3.0
"""A leader that does not answer by then shows what it hides by itself, some time later (lanes.HIDDEN_S)."""

Offsets = dict[tuple[int, int], tuple[int, ...]]
_AnswerT = TypeVar("_AnswerT", bound=msgspec.Struct)


class Leaders(Protocol):
    """What the coordinator asks of streams' leaders, by the streams' names."""

    async def check(self, stream: str, incarnation: bytes, shards: Sequence[int]) -> int:
        """The last transaction that these shards know. Raises why nothing may be committed that they would have to take."""

    async def prepare(
        self, stream: str, view: str, owner: SpiffeId, body: bytes, transaction: bytes
    ) -> Prepared:
        """As `applier.Participant.prepare`, by the stream's leader."""

    async def abandon(self, stream: str, view: str, body: bytes) -> None:
        """It was not decided; a leader that does not hear of it asks."""

    async def apply(
        self, stream: str, term: int, parts: Sequence[Part], acknowledged: Sequence[Acknowledged], number: int
    ) -> Offsets:
        """Committed up to `number`: the offsets of the parts. Raises FelixError where it is to be asked again."""

    async def show(self, stream: str, number: int) -> None:
        """Show what was applied up to `number`. Raises FelixError where nobody was reached."""


class StreamLeaders:
    """`Leaders`, over the links to the other brokers; this one asks itself the same."""

    def __init__(self, broker: Broker, clustered: Clustered, requests: PeerRequests) -> None:
        self._broker = broker
        self._clustered = clustered
        self._requests = requests

    async def check(self, stream: str, incarnation: bytes, shards: Sequence[int]) -> int:
        asked = CheckLane(stream, incarnation.hex(), sorted(shards))
        return (await self._ask(stream, asked, LaneChecked)).newest

    async def prepare(
        self, stream: str, view: str, owner: SpiffeId, body: bytes, transaction: bytes
    ) -> Prepared:
        asked = PrepareAcknowledgements(stream, view, str(owner), body, transaction)
        return await self._ask(stream, asked, Prepared)

    async def abandon(self, stream: str, view: str, body: bytes) -> None:
        await self._ask(stream, AbandonAcknowledgements(view, body), Abandoned)

    async def apply(
        self, stream: str, term: int, parts: Sequence[Part], acknowledged: Sequence[Acknowledged], number: int
    ) -> Offsets:
        record = await self._record(stream)
        incarnation = "" if record is None else record.incarnation
        here = [part for part in parts if part.incarnation.hex() == incarnation]
        found: Offsets = {(part.number, part.index): (UNKNOWN_OFFSET,) for part in parts}
        if record is None:
            return found
        for group in _groups(here, acknowledged):
            batches = [each for each in group if isinstance(each, Placed)]
            settled = [each for each in group if isinstance(each, Acknowledged)]
            asked = ApplyLane(stream, incarnation, term, number, batches, settled)
            answer = await self._ask(stream, asked, LaneApplied)
            for placed, offsets in zip(batches, answer.offsets, strict=True):
                found[placed.part.number, placed.part.index] = offsets
        return found

    async def show(self, stream: str, number: int) -> None:
        record = await self._record(stream)
        if record is not None:
            asked = ShowLane(stream, record.incarnation, number)
            await self._ask(stream, asked, LaneShown, timeout_s=SHOW_S)

    async def _record(self, stream: str) -> Stream | None:
        """None where there is no such stream any more, as the catalog itself says."""
        hosted = self._broker.streams.get(StreamName.parse(stream))
        if hosted is not None:
            return hosted.record
        try:
            return await self._broker.catalog.describe_stream(StreamName.parse(stream))
        except RequestError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return None

    async def _ask(
        self, stream: str, asked: PeerRequest, answer: type[_AnswerT], *, timeout_s: float = ASK_S
    ) -> _AnswerT:
        record = await self._record(stream)
        leader = "" if record is None else self._clustered.leader_of(record, 0)
        if not leader:
            raise not_served(stream)
        try:
            return await self._requests.ask(leader, asked, answer, timeout_s=timeout_s)
        except UnavailableError as error:
            if error.code is Code.NOT_LEADER:
                # To the client it would say that the coordinator has moved.
                raise not_served(stream) from error
            raise


def not_served(stream: str) -> UnavailableError:
    """What a transaction is answered that concerns a stream without a leader."""
    return UnavailableError(
        f"No broker leads {stream} at the moment, or another one since just now.",
        hint="Try again: with copies, another broker is elected within a lease.",
        retry_after_ms=200,
    )


def _groups(
    parts: Sequence[Part], acknowledged: Sequence[Acknowledged]
) -> Iterator[list[Placed | Acknowledged]]:
    """What is asked at a time: in order, acknowledgements last, each within ASK_BYTES or one of them; one group where there is nothing."""
    shards: dict[int, list[Part]] = {}
    for part in parts:
        shards.setdefault(part.shard, []).append(part)
    placed = (Placed(part, before) for some in shards.values() for part, before in placings(some))
    wanted: Iterator[Placed | Acknowledged] = chain(placed, acknowledged)
    group: list[Placed | Acknowledged] = []
    size = 0
    for each in wanted:
        length = len(each.part.batch if isinstance(each, Placed) else each.body)
        if group and size + length > ASK_BYTES:
            yield group
            group, size = [], 0
        group.append(each)
        size += length
    yield group
