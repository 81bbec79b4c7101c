"""Messages of a cache's exchanges: calls and replies, and the events of a watch, as MessagePack arrays.

A message is an array whose first element is its number, then its fields in the order they stand here; what an older peer leaves
away has its default. Positions instead of names: a get with its answer is what a cache does most, and both are small.
The frame's limit bounds every message (felix.frames.CALL_BYTES_MAX), the limits named here what is in it.

A *version* is the offset of the record that wrote the value, plus one: 0 is the version of a key that is not there.
A *ttl* in a call: DEFAULT_TTL is what the cache was made with, 0 without end. In a reply: ms left, 0 without end.
"""

from typing import Annotated, Any, Final

import msgspec

from felix.batch import BATCH_BYTES_MAX, KEY_BYTES_MAX
from felix.errors import Code, ProtocolError
from felix.messages import Message, Natural
from felix.settings import DURATION_MS_MAX

VALUE_BYTES_MAX: Final = BATCH_BYTES_MAX - (16 << 10)
"""One value with its key, headers and seal fits a batch."""
KEYS_MAX: Final = 4_096
"""Keys of one call: the broker carries a call out in one event loop iteration."""
DEFAULT_TTL: Final = -1
OPERATION_BYTES: Final = 16

Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=KEY_BYTES_MAX)]
Prefix = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES_MAX)]
Value = Annotated[bytes, msgspec.Meta(max_length=VALUE_BYTES_MAX)]
Ttl = Annotated[int, msgspec.Meta(ge=DEFAULT_TTL, le=DURATION_MS_MAX)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_MAX)]
Operation = Annotated[bytes, msgspec.Meta(min_length=OPERATION_BYTES, max_length=OPERATION_BYTES)]
Signed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]


class Positional(Message, frozen=True, array_like=True):
    """Base of these messages."""


# -- calls ---------------------------------------------------------------------------------------------


class Get(Positional, frozen=True, tag=1):
    """Answered with Found. Without `value`, the answer has only version and ttl."""

    key: Key
    value: bool = True


class Put(Positional, frozen=True, tag=2):
    """Answered with Stored."""

    key: Key
    value: Value
    ttl_ms: Ttl = DEFAULT_TTL


class Delete(Positional, frozen=True, tag=3):
    """Answered with Stored: the tombstone's version, 0 where there was nothing."""

    key: Key


class CompareAndSet(Positional, frozen=True, tag=4):
    """Answered with Compared. `version` 0: only where the key is not there. A repeated `operation` is carried out once."""

    key: Key
    value: Value
    version: Natural
    operation: Operation
    ttl_ms: Ttl = DEFAULT_TTL


class Increment(Positional, frozen=True, tag=5):
    """Answered with Counted. `ttl_ms` counts where the key is made by it. A repeated `operation` is carried out once."""

    key: Key
    by: Signed
    operation: Operation
    ttl_ms: Ttl = DEFAULT_TTL


class GetMany(Positional, frozen=True, tag=6):
    """Answered with FoundMany."""

    keys: Keys


class PutMany(Positional, frozen=True, tag=7):
    """Answered with StoredMany, once all are durable. Where it is refused, some may have been stored."""

    items: Annotated[list[tuple[Key, Value]], msgspec.Meta(max_length=KEYS_MAX)]
    ttl_ms: Ttl = DEFAULT_TTL


class DeleteMany(Positional, frozen=True, tag=8):
    """As PutMany."""

    keys: Keys


class Scan(Positional, frozen=True, tag=9):
    """Answered with Page: keys of one shard after `after`, in order. Each page is of one moment."""

    shard: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    prefix: Prefix = b""
    after: Prefix = b""
    limit: Limit = 500
    values: bool = True


class Stats(Positional, frozen=True, tag=10):
    """Answered with CacheStats."""


# -- replies -------------------------------------------------------------------------------------------


class Found(Positional, frozen=True, tag=32):
    """`version` 0: not there. `ttl_ms`: what is left, at least 1; 0: without end."""

    version: int
    value: bytes = b""
    ttl_ms: int = 0


class Stored(Positional, frozen=True, tag=33):
    """Durable as the cache's durability says, and seen by every get from now on."""

    version: int


class Compared(Positional, frozen=True, tag=34):
    """Whether the value was set, and the version that the key has now."""

    is_set: bool
    version: int


class Counted(Positional, frozen=True, tag=35):
    """The number that the key has now."""

    value: int
    version: int


class FoundMany(Positional, frozen=True, tag=36):
    """In the order asked; fewer than asked where the values fill a frame: ask again for the rest."""

    entries: list[tuple[int, bytes, int]]


class StoredMany(Positional, frozen=True, tag=37):
    """In the order given."""

    versions: list[int]


class Page(Positional, frozen=True, tag=38):
    """(key, version, value, ttl_ms) of the shard as it is at `offset`. `more`: ask on after the last key."""

    entries: list[tuple[bytes, int, bytes, int]]
    offset: int
    more: bool = False


class CacheStats(Positional, frozen=True, tag=39):
    """Of all shards, since the broker began to serve them. Bytes as the cache counts them (docs/cache.md)."""

    keys: int
    size_bytes: int
    limit_bytes: int
    hits: int
    misses: int
    puts: int
    deletes: int
    expired: int
    evicted: int
    watches: int


# -- events of a watch ---------------------------------------------------------------------------------

PUT, DELETED, EXPIRED, EVICTED = 0, 1, 2, 3
"""The kinds of changes, by their numbers in Changes."""


class Reset(Positional, frozen=True, tag=64):
    """The whole state follows; whatever was known before is void. Changes begin at `offsets`."""

    offsets: dict[int, int]


class Initial(Positional, frozen=True, tag=65):
    """(key, version, value, expires_at_ms): part of the state. A version may be of after the reset's offset: then changes that
    follow with a version not above it are included already."""

    shard: int
    entries: list[tuple[bytes, int, bytes, int]]


class Changes(Positional, frozen=True, tag=66):
    """(kind, key, version, value, expires_at_ms) in the log's order; it delivers the shard's changes up to `next_offset`."""

    shard: int
    next_offset: int
    changes: list[tuple[int, bytes, int, bytes, int]]


class Ready(Positional, frozen=True, tag=67):
    """All keys that existed when the watch began, or was reset, have been delivered."""


CacheCall = Get | Put | Delete | CompareAndSet | Increment | GetMany | PutMany | DeleteMany | Scan | Stats
CacheReply = Found | Stored | Compared | Counted | FoundMany | StoredMany | Page | CacheStats
WatchEvent = Reset | Initial | Changes | Ready

_call_decoder: Final = msgspec.msgpack.Decoder(CacheCall)
_reply_decoder: Final = msgspec.msgpack.Decoder(CacheReply)
_event_decoder: Final = msgspec.msgpack.Decoder(WatchEvent)


def decode_call(body: memoryview) -> CacheCall:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    try:
        call: CacheCall = _call_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _malformed("call to a cache", error) from error
    return call


def decode_reply(body: memoryview) -> CacheReply:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    try:
        reply: CacheReply = _reply_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _malformed("reply of a cache", error) from error
    return reply


def decode_event(body: memoryview) -> WatchEvent:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    try:
        event: WatchEvent = _event_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _malformed("event of a watch", error) from error
    return event


def no_call(body: memoryview) -> Any:
    """A watch takes no calls. Raises ProtocolError(FRAME_MALFORMED)."""
    raise ProtocolError(
        f"A call of {len(body)} bytes on a watch, which takes none.", code=Code.FRAME_MALFORMED
    )


def _malformed(what: str, error: Exception) -> ProtocolError:
    return ProtocolError(f"A malformed {what}: {error}.", code=Code.FRAME_MALFORMED)
