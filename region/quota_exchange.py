"""The brokers of a region tell each other once a second what is used of limits there (region.limits.quota_shares).

Bounds: one question of each peer is under way; ACCOUNTS_TOLD_MAX accounts are told of. Where nobody has a limit nothing is told. Nobody waits for
it: what a peer told last counts, and one that is silent has its even share. Callers: startup, node. On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Annotated, Final

import msgspec

from felix.errors import FelixError
from felix.tasks import end_tasks
from region.broker import Broker
from region.copies.peer_requests import PeerRequest, PeerRequests
from region.limits.quota_shares import ACCOUNTS_TOLD_MAX, Region, Use

log = logging.getLogger("felix.region.quota")

TELL_S: Final = 2.0
"""A peer that has not answered by then is told again."""


class TellUse(PeerRequest, frozen=True, tag="tell_use"):
    """What is used of limits at the asker."""

    uses: Annotated[list[Use], msgspec.Meta(max_length=ACCOUNTS_TOLD_MAX)]


class UseHeard(msgspec.Struct, frozen=True, array_like=True):
    pass


class QuotaExchange:
    """One per broker of several. `alive`: the brokers that serve now."""

    def __init__(self, broker: Broker, requests: PeerRequests, alive: Callable[[], Collection[str]]) -> None:
        self._broker = broker
        self._requests = requests
        self._alive = alive
        self._now = broker.runtime.clock.monotonic
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._turning: asyncio.Task[None] | None = None
        self._region = broker.quotas.region = Region(broker.broker_id)
        self._region.look(alive(), self._now())
        requests.serve(TellUse, self._hear)
        broker.share_quotas = self.turn

    async def _hear(self, peer: str, told: TellUse) -> UseHeard:
        self._region.hear(peer, told.uses, self._now())
        return UseHeard()

    def turn(self) -> None:
        """Once a second, after use was measured."""
        # Of limits that went, accounts were told at once.
        if self._broker.quotas.are_limited and (self._turning is None or self._turning.done()):
            self._turning = asyncio.ensure_future(self._turn())

    async def _turn(self) -> None:
        """Tell the others, and take shares by what all told."""
        quotas, alive = self._broker.quotas, sorted(self._alive())
        self._region.look(alive, self._now())
        uses: list[Use] = []
        for part in quotas.parts():
            uses += quotas.uses(part)
            await asyncio.sleep(0)
        told = TellUse(quotas.told(uses))
        self._region.hear(self._requests.own, told.uses, self._now())
        for peer in alive:
            if peer != self._requests.own and peer not in self._telling and self._requests.is_up(peer):
                self._telling[peer] = asyncio.ensure_future(self._tell(peer, told))
        for part in quotas.parts():
            self._broker.shares_rose(quotas.take_shares(part))
            await asyncio.sleep(0)

    async def _tell(self, peer: str, told: TellUse) -> None:
        try:
            await self._requests.ask(peer, told, UseHeard, timeout_s=TELL_S)
        except FelixError as error:
            log.debug("broker %s was not told of use: %s", peer, error)
        finally:
            del self._telling[peer]

    async def close(self) -> None:
        """Tell nobody any more."""
        self._broker.share_quotas = lambda: None
        await end_tasks(*self._telling.values(), *([self._turning] if self._turning else []))
