"""Consumer: one consumer's exchange. It delivers the shards that its subscription gives it, and hands on what it calls.

Whole batches go out as region.delivery sends them, within the credit and the budgets of any delivery; only where the subscription
says that there is room. Invariant: an event about a shard leaves before the batches that it is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from felix.consumer_messages import (
    RANGES_MAX,
    Ack,
    Acknowledged,
    Altered,
    Assigned,
    Leave,
    Nack,
    Redelivery,
    Release,
    Renew,
    Revoked,
    Skip,
)
from felix.errors import Code, FelixError, ProtocolError, RequestError
from felix.messages import ConsumerOpened, OpenConsumer, Request
from felix.names import SpiffeId
from felix.ranges import RangeSet, chunks
from region.delivery import Subscription, subscription_refusal
from region.exchange import Exchange
from region.limits.quota import Throttle
from region.subscriptions.progress import Redelivered
from region.subscriptions.subscription import DurableSubscription

Opening = Callable[[SpiffeId, OpenConsumer], Awaitable[tuple[DurableSubscription, bool]]]
"""The subscription that a consumer asks for, and whether it was made for it. Raises what refuses the consumer."""


class _Sink:
    """What region.delivery asks of a session, for one exchange."""

    def __init__(self, exchange: Exchange, failed: Callable[[], None]) -> None:
        """`failed`: the delivery is about to end by a fault that is not the consumer's."""
        self._exchange = exchange
        self._failed = failed

    @property
    def identity(self) -> SpiffeId | None:
        return self._exchange.identity

    @property
    def ended(self) -> bool:
        return self._exchange.over

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        self._exchange.deliver(data)
        if end:
            self._exchange.end()

    def may_send(self) -> bool:
        return self._exchange.may_send()

    def settle_delivery(self) -> int:
        return self._exchange.session.settle_delivery()

    def throttled(self, throttle: Throttle) -> None:
        self._exchange.session.throttled(throttle)

    def drop_subscription(self, number: int) -> None:
        self._failed()


class Consumer:
    """An exchange's handler, and a member of a durable subscription."""

    def __init__(self, exchange: Exchange, opening: Opening) -> None:
        self._exchange = exchange
        self._opening = opening
        self._subscription: DurableSubscription | None = None
        self._delivery: Subscription | None = None
        self._number = 0
        self._left = False
        self.name = ""

    @property
    def identity(self) -> SpiffeId:
        return self._exchange.identity

    # -- the exchange's handler ------------------------------------------------------------------------

    def open(self, correlation: int, request: Request[Any]) -> None:
        assert isinstance(request, OpenConsumer)
        self._exchange.spawn(correlation, self._open(correlation, request))

    async def _open(self, correlation: int, request: OpenConsumer) -> None:
        exchange = self._exchange
        try:
            subscription, created = await self._opening(exchange.identity, request)
        except FelixError as error:
            exchange.fail(error, correlation)
            return
        refused = subscription.refusal() or self._refusal(subscription)
        if exchange.over or refused is not None:
            if refused is not None:
                exchange.fail(refused, correlation)
            return
        try:
            meter = exchange.charge()
            meter.hold("subscriptions")
        except FelixError as error:
            exchange.fail(error, correlation)
            return
        self.name = request.consumer or exchange.identity.name
        self._subscription = subscription
        self._delivery = Subscription(
            exchange.broker,
            _Sink(exchange, self._excuse),
            0,
            0,
            subscription.stream,
            {},
            request.credit_bytes,
            None,
            meter,
            subscription,
        )
        self._number = subscription.join(self)
        stream = subscription.stream
        exchange.opened(
            correlation,
            ConsumerOpened(
                self._number,
                stream.incarnation,
                stream.shard_count,
                subscription.definition.settings,
                created,
            ),
        )
        subscription.enter(self._number)

    def _excuse(self) -> None:
        self._left = True

    def call(self, correlation: int, call: Any) -> None:
        subscription, exchange = self._subscription, self._exchange
        if subscription is None:
            # Not a breach: what was under way when the consumer left comes after it.
            exchange.refuse(correlation, _left())
            return
        refused = subscription.refusal()
        if refused is not None:
            exchange.refuse(correlation, refused)
            return

        def done(error: FelixError | None, fenced: list[int] | None = None) -> None:
            if error is not None:
                exchange.refuse(correlation, error)
            else:
                exchange.reply(correlation, Acknowledged(fenced or []))

        match call:
            case Ack(acks=acks):
                if len({each.shard for each in acks}) != len(acks):
                    raise ProtocolError("An ack names a shard twice.", code=Code.FRAME_MALFORMED)
                subscription.ack(self._number, acks, done)
            case Nack():
                subscription.nack(self._number, call, done)
            case Renew():
                subscription.renew(self._number, call.shard, call.generation, call.offset)
                done(None)
            case Release():
                subscription.released(self._number, call.shard, call.generation)
                self._let_go(call.shard)
                done(None)
            case Leave():
                self._left = True
                self._leave()
                done(None)
            case _:
                raise AssertionError(call)

    def credit(self, limit_bytes: int) -> None:
        if self._delivery is not None:
            self._delivery.credit(limit_bytes)

    def pump(self) -> None:
        if self._delivery is not None:
            self._delivery.pump()

    def rights_changed(self) -> None:
        if self._subscription is not None:
            refused = self._refusal(self._subscription)
            if self._subscription.stream.elsewhere is not None and refused is not None:
                # All at once: none may get what another one had.
                self._subscription.dismiss(refused)
            elif refused is not None:
                self._left = True
                self._exchange.fail(refused)

    def _refusal(self, subscription: DurableSubscription) -> FelixError | None:
        exchange = self._exchange
        return subscription_refusal(exchange.broker, exchange.identity, subscription.stream, None)

    def closed(self) -> None:
        if self._delivery is not None:
            self._delivery.close()
        self._leave()

    def _leave(self) -> None:
        subscription, self._subscription = self._subscription, None
        if self._delivery is not None:
            self._delivery.close()
        if subscription is not None:
            # A broker that stops ends its consumers without any fault of theirs.
            subscription.leave(self._number, died=not self._left and not self._exchange.broker.leaving)

    # -- the subscription's member ---------------------------------------------------------------------

    def assigned(self, shard: int, generation: int, position: int, skip: RangeSet) -> None:
        assert self._delivery is not None
        parts = list(chunks(skip, RANGES_MAX))
        self._exchange.event(Assigned(shard, generation, position, parts[0] if parts else []))
        for part in parts[1:]:
            self._exchange.event(Skip(shard, generation, part))
        self._delivery.take_up(shard, position)
        self.wake()

    def revoked(self, shard: int, generation: int, drain_ms: int) -> None:
        self._let_go(shard)
        self._exchange.event(Revoked(shard, generation, drain_ms))

    def _let_go(self, shard: int) -> None:
        if self._delivery is not None and self._delivery.delivers(shard):
            self._delivery.let_go(shard)

    def redelivered(self, shard: int, generation: int, again: Redelivered) -> None:
        assert self._delivery is not None
        for part in chunks(again.ranges, RANGES_MAX):
            self._exchange.event(Redelivery(shard, generation, part, again.attempt))
        self._delivery.redelivery(shard, again.ranges)
        self.wake()

    def altered(self, ack_timeout_ms: int) -> None:
        self._exchange.event(Altered(ack_timeout_ms))

    def wake(self) -> None:
        asyncio.get_running_loop().call_soon(self.pump)

    def dismiss(self, error: FelixError) -> None:
        self._left = True
        self._subscription = None
        self._exchange.fail(error)


def _left() -> RequestError:
    return RequestError(
        "This consumer has left its subscription.",
        code=Code.CONSUMER_FENCED,
        hint="Its unacknowledged records are redelivered to the shard's present consumer.",
    )
