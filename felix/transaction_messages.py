"""Messages of a transactions' exchange: calls of the client, replies of the broker. docs/wire.md has the rules.

A transaction is named by 16 bytes that its client draws at random. Every call may be asked again after a lost answer.
"""

from typing import Annotated, Any, Final

import msgspec

from felix.errors import Code, ProtocolError
from felix.messages import Message, Name, Natural
from felix.names import StreamName
from felix.queue_messages import RUNS_MAX, Held

TRANSACTIONS_STREAM: Final = StreamName("felix", "system", "transactions")
"""Its companion log is the journal of transactions, and of several brokers its leader decides them. It has no records, and nobody but the brokers
may open it."""
ID_BYTES: Final = 16
PARTS_MAX: Final = 512
"""Batches and acknowledgements of one transaction."""

TransactionId = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Index = Annotated[int, msgspec.Meta(ge=0, le=PARTS_MAX)]


class Begin(Message, frozen=True, tag="begin"):
    """`epoch` is what `fence` answered, for a `transactional_id`; without one, 0."""

    id: TransactionId
    timeout_ms: Natural
    transactional_id: Name = ""
    epoch: Natural = 0


class Begun(Message, frozen=True, tag="begun"):
    """`begun_ms` is the broker's time; `commit` carries it back."""

    begun_ms: Natural


class Fence(Message, frozen=True, tag="fence"):
    """A new instance of `transactional_id`: what older ones have open is aborted."""

    transactional_id: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class FencedAt(Message, frozen=True, tag="fenced_at"):
    epoch: Natural


class Resolve(Message, frozen=True, tag="resolve"):
    """Asks for the shards of a stream that the transaction will publish into."""

    stream: Name


class Resolved(Message, frozen=True, tag="resolved"):
    shards: Natural
    incarnation: bytes


class Stage(Message, frozen=True, tag="stage"):
    """One batch, without producer id. `index` counts what is staged, acknowledgements included."""

    id: TransactionId
    index: Index
    stream: Name
    incarnation: bytes
    batch: bytes


class QueueAcks(msgspec.Struct, frozen=True, array_like=True):
    """Jobs of one queue that a transaction acknowledges. `incarnation` and `epochs` are the broker's: of the queue, and by shard the leader epochs that its records had, each
    with its first offset."""

    queue: Name
    held: Annotated[list[Held], msgspec.Meta(min_length=1, max_length=RUNS_MAX)]
    incarnation: bytes = b""
    epochs: dict[int, list[int]] = {}


class StageAcknowledgement(Message, frozen=True, tag="stage_acknowledgement"):
    """Acknowledgements of a `view`: subscription (`body`: consumer_messages.SubscriptionAcks) or queue (`body`: QueueAcks)."""

    id: TransactionId
    index: Index
    view: Name
    body: bytes


class Staged(Message, frozen=True, tag="staged"):
    pass


class Commit(Message, frozen=True, tag="commit"):
    """`staged`: how many batches and acknowledgements the client has staged."""

    id: TransactionId
    staged: Index
    begun_ms: Natural


class Committed(Message, frozen=True, tag="committed"):
    """Per batch in the order of staging: the offset of its first record where they follow each other, else of each record; -1
    where it is in its shard and the broker does not know where."""

    offsets: list[list[int]]


class Abort(Message, frozen=True, tag="abort"):
    id: TransactionId


class Aborted(Message, frozen=True, tag="aborted"):
    pass


Call = Begin | Fence | Resolve | Stage | StageAcknowledgement | Commit | Abort
Reply = Begun | FencedAt | Resolved | Staged | Committed | Aborted

_call_decoder: Final = msgspec.msgpack.Decoder(Call)
_reply_decoder: Final = msgspec.msgpack.Decoder(Reply)


def decode_call(body: memoryview) -> Any:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    return _decode(_call_decoder, body, "call to a transaction")


def decode_reply(body: memoryview) -> Any:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    return _decode(_reply_decoder, body, "reply of a transaction")


def _decode(decoder: Any, body: memoryview, what: str) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"A malformed {what}: {error}.", code=Code.FRAME_MALFORMED) from error
