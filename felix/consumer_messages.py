"""Messages of a consumer's exchange: calls of the consumer, replies and events of the broker.

Ranges are flat lists of offsets: first, next, first, next (felix.ranges). `generation` says which assignment of the shard is
meant: a new one with every assignment, greater than all before it, also over restarts of the broker. docs/wire.md has the rules.
"""

from typing import Annotated, Any, Final

import msgspec

from felix.errors import Code, ProtocolError
from felix.messages import Message, Natural

RANGES_MAX: Final = 8_192
"""Ranges in one message; longer sets are sent in several."""
SHARDS_MAX: Final = 256

Ranges = Annotated[list[Natural], msgspec.Meta(max_length=2 * RANGES_MAX)]
ShardNumber = Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]


class ShardAck(msgspec.Struct, frozen=True, omit_defaults=True):
    """Acknowledged records of one shard: `ranges`, and all up to and including `through` (-1: none)."""

    shard: ShardNumber
    generation: Natural
    ranges: Ranges = []
    through: Offset = -1


class SubscriptionAcks(msgspec.Struct, frozen=True):
    """Acknowledgements of one durable subscription that a transaction carries. `incarnation`, `subscription` and `epochs` are the broker's: of the stream,
    the id of the subscription, and by shard the leader epochs that the records had, each with its first offset."""

    stream: Annotated[str, msgspec.Meta(max_length=255)]
    name: Annotated[str, msgspec.Meta(max_length=255)]
    acks: Annotated[list[ShardAck], msgspec.Meta(max_length=SHARDS_MAX)]
    incarnation: bytes = b""
    subscription: str = ""
    epochs: dict[int, list[int]] = {}


class Ack(Message, frozen=True, tag="ack"):
    acks: Annotated[list[ShardAck], msgspec.Meta(max_length=SHARDS_MAX)]


class Nack(Message, frozen=True, tag="nack"):
    """Deliver again after `delay_ms`; -1: as the subscription's retries say."""

    shard: ShardNumber
    generation: Natural
    ranges: Ranges
    delay_ms: Annotated[int, msgspec.Meta(ge=-1, le=366 * 24 * 3_600_000)] = -1
    reason: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class Renew(Message, frozen=True, tag="renew"):
    """Restart the ack timeout of the shard's delivered records from `offset` on."""

    shard: ShardNumber
    generation: Natural
    offset: Natural


class Release(Message, frozen=True, tag="release"):
    """The shard is given back; what is out of it was not worked on."""

    shard: ShardNumber
    generation: Natural


class Leave(Message, frozen=True, tag="leave"):
    """Everything is given back; the consumer is about to end."""


class Acknowledged(Message, frozen=True, tag="acknowledged"):
    """Carried out, and durable. `fenced`: shards whose part was not, because another generation counts."""

    fenced: list[int] = msgspec.field(default_factory=list)


class Assigned(Message, frozen=True, tag="assigned"):
    """The shard is this consumer's; batches follow from `position` on. `skip`: records of them that are not meant."""

    shard: int
    generation: Natural
    position: Natural
    skip: Ranges = msgspec.field(default_factory=list)


class Skip(Message, frozen=True, tag="skip"):
    """More of an assignment's `skip`."""

    shard: int
    generation: Natural
    ranges: Ranges


class Revoked(Message, frozen=True, tag="revoked"):
    """Give the shard back within `drain_ms`, after acknowledging what is in hand; 0: it is another's already."""

    shard: int
    generation: Natural
    drain_ms: Natural


class Altered(Message, frozen=True, tag="altered"):
    """The subscription's ack timeout is this now, for what is handed out from here on."""

    ack_timeout_ms: Natural


class Redelivery(Message, frozen=True, tag="redelivery"):
    """Batches with these records follow; only these of them are meant, and this is their `attempt`-th delivery."""

    shard: int
    generation: Natural
    ranges: Ranges
    attempt: Natural


Call = Ack | Nack | Renew | Release | Leave
Reply = Acknowledged | Altered | Assigned | Skip | Revoked | Redelivery

_call_decoder: Final = msgspec.msgpack.Decoder(Call)
_reply_decoder: Final = msgspec.msgpack.Decoder(Reply)


def decode_call(body: memoryview) -> Call:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    call: Call = _decode(_call_decoder, body)
    return call


def decode_reply(body: memoryview) -> Reply:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    reply: Reply = _decode(_reply_decoder, body)
    return reply


def _decode(decoder: Any, body: memoryview) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(
            f"A malformed message of a consumer: {error}.", code=Code.FRAME_MALFORMED
        ) from error
