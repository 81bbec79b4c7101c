"""How far the copies of a shard go, asked of each broker that is alive: before one of them leads outside the rules, and for a person who is to say which.

Invariant: what a broker says is of the copy that it has open, under its present registration. One that does not answer has said nothing; one
that cannot open its copy says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from felix.errors import FelixError, UnavailableError
from region.cluster.election import JournalEnd, LogEnd, Unopened
from region.cluster.records import ShardId
from region.copies.peer_requests import PeerRequest, PeerRequests
from region.replication.host import ReplicaHost

ANSWER_S: Final = 2.0
"""It is in memory there; who has not answered by then is not well."""


class EndAsk(PeerRequest, frozen=True, tag="copy-end"):
    """How far does the copy of a shard go?"""

    incarnation: str
    shard: int


class EndTold(msgspec.Struct, frozen=True, array_like=True):
    """As `LogEnd` has it; `unopened`: why there is nothing to say of it."""

    registration: int
    last_epoch: int
    election: str
    end: tuple[int, int]
    journals: tuple[JournalEnd, ...]
    unopened: str = ""


class CopyEnds:
    """Of one broker: asks others and itself, and answers."""

    def __init__(self, requests: PeerRequests, host: ReplicaHost) -> None:
        self._requests = requests
        self._host = host
        requests.serve(EndAsk, self._told)

    async def _told(self, peer: str, asked: EndAsk) -> EndTold:
        shard = ShardId(asked.incarnation, asked.shard)
        found, why = self._host.end_of(shard), self._host.why_unknown(shard)
        if found is not None:
            return EndTold(found.registration, found.last_epoch, found.election, found.end, found.journals)
        if why:
            return EndTold(self._host.registration, 0, "", (0, 0), (), why)
        raise UnavailableError(f"Broker {self._requests.own} has no copy of shard {shard.number} open.")

    async def hear(self, shard: ShardId, brokers: Iterable[str]) -> dict[str, LogEnd | Unopened]:
        """What each of these says; who does not is left out."""
        asked = EndAsk(shard.incarnation, shard.number)

        async def one(broker: str) -> LogEnd | Unopened | None:
            try:
                told = await self._requests.ask(broker, asked, EndTold, timeout_s=ANSWER_S)
            except (FelixError, msgspec.MsgspecError):
                return None
            if told.unopened:
                return Unopened(told.registration, told.unopened)
            return LogEnd(told.registration, told.last_epoch, told.election, told.end, told.journals)

        names = list(brokers)
        found = await asyncio.gather(*map(one, names))
        return {name: each for name, each in zip(names, found, strict=True) if each is not None}
