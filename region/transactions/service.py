"""A client's transactions over an exchange: calls in, the coordinator's decisions out.

A transaction belongs to the identity that began it, not to the exchange: a client that lost its connection goes on over the
next one. What is left open ends with its own timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from felix.batch import decode_header
from felix.errors import Code, FelixError, RequestError
from felix.messages import Request, TransactionsOpened
from felix.transaction_messages import (
    Abort,
    Aborted,
    Begin,
    Begun,
    Commit,
    Committed,
    Fence,
    FencedAt,
    Resolve,
    Resolved,
    Stage,
    StageAcknowledgement,
    Staged,
    decode_call,
)
from region.broker import Broker
from region.exchange import Exchange
from region.ports import Exchanging, Role
from region.transactions.coordinator import Coordinator
from region.transactions.open_transactions import OPEN_PER_IDENTITY_MAX


class TransactionService:
    """Opens exchanges of transactions."""

    def __init__(self, broker: Broker, coordinator: Coordinator) -> None:
        self._broker = broker
        self._coordinator = coordinator

    def open(self, session: Exchanging, stream_id: int) -> Role:
        return Exchange(
            self._broker, session, stream_id, lambda made: _Handler(self._coordinator, made), decode_call
        )


class _Handler:
    """One exchange."""

    def __init__(self, coordinator: Coordinator, exchange: Exchange) -> None:
        self._coordinator = coordinator
        self._exchange = exchange

    def open(self, correlation: int, request: Request[Any]) -> None:
        if self._exchange.broker.clustered is None:
            self._opened(correlation)
        else:
            self._exchange.spawn(correlation, self._open(correlation))

    async def _open(self, correlation: int) -> None:
        try:
            await self._coordinator.find()
        except FelixError as error:
            self._exchange.fail(error, correlation)
        else:
            self._opened(correlation)

    def _opened(self, correlation: int) -> None:
        limits = self._exchange.broker.config.limits
        self._exchange.opened(
            correlation,
            TransactionsOpened(
                int(limits.transaction_timeout), int(limits.transaction_bytes), OPEN_PER_IDENTITY_MAX
            ),
        )

    def call(self, correlation: int, call: Any) -> None:
        exchange, coordinator = self._exchange, self._coordinator
        if (elsewhere := coordinator.elsewhere) is not None:
            # The whole of it goes to the next coordinator, and asks again there.
            exchange.fail(elsewhere)
            return
        owner = exchange.identity
        match call:
            case Begin(transaction_id, timeout_ms, transactional_id, epoch):
                begun = coordinator.open.begin(
                    owner, transaction_id, timeout_ms, transactional_id, epoch, self._hold
                )
                exchange.reply(correlation, Begun(begun.begun_ms))
            case Resolve(stream):
                hosted = coordinator.open.resolve(owner, stream)
                exchange.reply(correlation, Resolved(hosted.shard_count, hosted.incarnation))
            case Stage(transaction_id, index, stream, incarnation, batch):
                wait_s = self._charge(stream, batch)
                coordinator.open.stage(owner, transaction_id, index, stream, incarnation, batch)
                if wait_s:
                    exchange.spawn(correlation, self._staged_later(correlation, wait_s))
                else:
                    exchange.reply(correlation, Staged())
            case StageAcknowledgement(transaction_id, index, view, body):
                coordinator.open.acknowledge(owner, transaction_id, index, view, body)
                exchange.reply(correlation, Staged())
            case Abort(transaction_id):
                exchange.spawn(correlation, self._abort(correlation, transaction_id))
            case Commit():
                exchange.spawn(correlation, self._commit(correlation, call))
            case Fence(transactional_id):
                exchange.spawn(correlation, self._fence(correlation, transactional_id))

    def _hold(self) -> Callable[[], None]:
        meter = self._exchange.meter
        assert meter is not None
        meter.hold("transactions")
        return lambda: meter.release("transactions")

    def _charge(self, stream: str, batch: bytes) -> float:
        """Count a batch as published when it is staged; seconds that its answer is to wait. Raises where it is refused."""
        meter = self._exchange.session.meter_for(stream)
        refused = meter.refusal(len(batch))
        if refused is not None:
            raise refused
        throttle = meter.published(len(batch), decode_header(batch).records)
        if throttle is None:
            return 0.0
        self._exchange.session.throttled(throttle)
        return throttle.wait_s

    async def _staged_later(self, correlation: int, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        self._exchange.reply(correlation, Staged())

    async def _commit(self, correlation: int, call: Commit) -> None:
        exchange = self._exchange
        outcome = await self._coordinator.commit(exchange.identity, call.id, call.staged, call.begun_ms)
        exchange.reply(correlation, Committed([list(each) for each in outcome.offsets]))

    async def _abort(self, correlation: int, transaction_id: bytes) -> None:
        await self._coordinator.abort(self._exchange.identity, transaction_id)
        self._exchange.reply(correlation, Aborted())

    async def _fence(self, correlation: int, transactional_id: str) -> None:
        epoch = await self._coordinator.fence(self._exchange.identity, transactional_id)
        self._exchange.reply(correlation, FencedAt(epoch))

    def credit(self, limit_bytes: int) -> None: ...

    def pump(self) -> None: ...

    def rights_changed(self) -> None:
        """Rights are asked when a batch is staged, and again at the commit; without any there is nothing to ask for."""
        exchange = self._exchange
        if not exchange.broker.has_right(exchange.identity):
            exchange.fail(
                RequestError(
                    f"{exchange.identity} has no right in {exchange.broker.region} any more.",
                    code=Code.FORBIDDEN,
                )
            )

    def closed(self) -> None: ...
