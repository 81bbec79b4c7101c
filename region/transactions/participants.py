"""The views whose acknowledgements a transaction can carry, as the coordinator asks them (applier.Participant)."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from felix.consumer_messages import SubscriptionAcks
from felix.errors import Code, RequestError
from felix.names import SpiffeId, StreamName
from felix.transaction_messages import QueueAcks
from policy.access import Verb
from region.broker import Broker
from region.gather import awaited
from region.queue.service import QueueService
from region.subscriptions.service import SubscriptionService

_subscription: Final = msgspec.msgpack.Decoder(SubscriptionAcks)
_queue: Final = msgspec.msgpack.Decoder(QueueAcks)


def _decode(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise RequestError(f"Acknowledgements of a transaction do not decode: {error}.") from error


class SubscriptionParticipant:
    """Durable subscriptions: what is acknowledged is kept from everybody else between the check and the commit."""

    def __init__(self, broker: Broker, service: SubscriptionService) -> None:
        self._broker = broker
        self._service = service

    def stream_of(self, body: bytes) -> StreamName:
        acks: SubscriptionAcks = _decode(_subscription, body)
        return StreamName.parse(acks.stream)

    def stage(self, identity: SpiffeId, body: bytes) -> None:
        acks: SubscriptionAcks = _decode(_subscription, body)
        self._broker.require(identity, Verb.SUBSCRIBE, StreamName.parse(acks.stream))

    async def prepare(self, identity: SpiffeId, body: bytes) -> bytes:
        self.stage(identity, body)
        acks = self._service.identified(_decode(_subscription, body))
        refused = self._service.check([acks])
        if refused is not None:
            raise refused
        return msgspec.msgpack.encode(acks)

    def abandon(self, body: bytes) -> None:
        self._service.abandon([_decode(_subscription, body)])

    async def apply(self, body: bytes) -> None:
        acks = [_decode(_subscription, body)]
        refused = await self._service.ready(acks)
        if refused is not None:
            raise refused
        await awaited(lambda done: self._service.apply(acks, done))


class QueueParticipant:
    """Queues: a job that is about to be acknowledged is kept from everybody else between the check and the commit."""

    def __init__(self, broker: Broker, service: QueueService) -> None:
        self._broker = broker
        self._service = service

    def stream_of(self, body: bytes) -> StreamName:
        acks: QueueAcks = _decode(_queue, body)
        return StreamName.parse(acks.queue)

    def stage(self, identity: SpiffeId, body: bytes) -> None:
        acks: QueueAcks = _decode(_queue, body)
        self._broker.require(identity, Verb.SUBSCRIBE, StreamName.parse(acks.queue))

    async def prepare(self, identity: SpiffeId, body: bytes) -> bytes:
        acks: QueueAcks = _decode(_queue, body)
        incarnation, epochs = await self._service.check_acks(
            identity, StreamName.parse(acks.queue), acks.held
        )
        return msgspec.msgpack.encode(msgspec.structs.replace(acks, incarnation=incarnation, epochs=epochs))

    def abandon(self, body: bytes) -> None:
        acks: QueueAcks = _decode(_queue, body)
        self._service.abandon_acks(StreamName.parse(acks.queue), acks.incarnation, acks.held)

    async def apply(self, body: bytes) -> None:
        acks: QueueAcks = _decode(_queue, body)
        try:
            await self._service.apply_acks(
                StreamName.parse(acks.queue), acks.incarnation, acks.held, acks.epochs
            )
        except RequestError as error:
            # The queue is gone, or is a stream of another kind by now.
            if error.code not in (Code.NOT_FOUND, Code.UNSUPPORTED):
                raise
