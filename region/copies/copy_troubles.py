"""What keeps a broker's own copies from being whole or in sync, told to the others: only it knows, and a person may ask any of them.

Invariant: who does not answer soon is left out, so nobody waits for a broker that hangs; what is said is of now, and kept nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from felix.errors import FelixError
from region.copies.peer_requests import PeerRequest, PeerRequests

ANSWER_S: Final = 1.0
"""It is in memory there."""
TOLD_MAX: Final = 20
"""Sentences of one broker, the rest is counted: where a disk is full there is one for each copy."""


class TroublesAsk(PeerRequest, frozen=True, tag="copy-troubles"):
    """What is wrong with your copies?"""


class TroublesTold(msgspec.Struct, frozen=True, array_like=True):
    """Sentences that name the broker; `more`: how many there are beside them."""

    sentences: list[str]
    more: int


class CopyTroubles:
    """Of one broker: asks the others, and answers."""

    def __init__(self, requests: PeerRequests, own: Callable[[str], list[str]]) -> None:
        """`own`: what is wrong with this broker's copies, for another broker that asks."""
        self._requests = requests
        self._own = own
        requests.serve(TroublesAsk, self._told)

    async def _told(self, peer: str, asked: TroublesAsk) -> TroublesTold:
        own = self._own(peer)
        return TroublesTold(own[:TOLD_MAX], max(0, len(own) - TOLD_MAX))

    async def hear(self, brokers: Iterable[str]) -> list[str]:
        """What these say, but this one, in their order; those without a link are not asked."""

        async def one(broker: str) -> list[str]:
            try:
                told = await self._requests.ask(broker, TroublesAsk(), TroublesTold, timeout_s=ANSWER_S)
            except (FelixError, msgspec.MsgspecError):
                return []
            more = [f"Broker {broker} has {told.more:,} more such copies."] if told.more else []
            return [*told.sentences, *more]

        names = [name for name in brokers if name != self._requests.own and self._requests.is_up(name)]
        return [sentence for each in await asyncio.gather(*map(one, names)) for sentence in each]
