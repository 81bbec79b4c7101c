"""Settings of a stream beyond its shards: what an acknowledgement means, what it keeps, and which view it has.

Each struct below the first two is one capability that a stream may have or not; a stream without it carries nothing. They stand in
requests (felix.messages) and in the catalog (region.metadata.records) alike, so that a client, the wire and the store
use the same words. Durations in ms, sizes in bytes. Pure; `check` raises RequestError(CONFIG_INVALID) that names the
setting, what it was and what is allowed.

Invariants: a stream is at most one of queue and cache; a cache is compacted; what is compacted is not offloaded.
"""

from math import isfinite
from typing import Final, TypeVar

import msgspec

from felix.errors import Code, RequestError

DAY_MS: Final = 24 * 3_600_000
DURATION_MS_MAX: Final = 366 * DAY_MS
"""Nothing here waits longer than a year."""
VISIBILITY_MS_MIN: Final = 100
"""A lease shorter than a slow round trip would be lost before it arrives."""
VISIBILITY_MS_MAX: Final = 12 * 3_600_000
"""A lease may be asked for so long."""
ATTEMPTS_MAX: Final = 10_000
DEAD_SUFFIX: Final = ".dead"
"""Of a dead-letter stream that nobody named otherwise."""
CACHE_BYTES_MIN: Final = 1 << 20
CACHE_BYTES_DEFAULT: Final = 64 << 20
CACHE_LAG_MS: Final = 120_000
"""Records of a cache stay so long whatever follows: they are how a broker knows repeated operations after a restart."""
IDS_MAX: Final = 1_000_000
"""Message ids remembered per shard; about 100 bytes each."""
URL_CHARS_MAX: Final = 1_024
EXCHANGES_DEFAULT: Final = 2
"""Exchanges of a client's cache: a large value on one does not hold up what travels on the other."""
TRANSACTION_TIMEOUT_S: Final = 30.0
"""A transaction that is open for longer is aborted by the broker; it names its own limit."""
_Settings = TypeVar("_Settings", bound=msgspec.Struct)


def milliseconds(seconds: float) -> int:
    """Raises RequestError where it is no number of seconds."""
    if not isfinite(seconds):
        raise RequestError(f"A time of {seconds} s; it is a number of seconds.")
    return round(seconds * 1000)


class Durability(msgspec.Struct, frozen=True, omit_defaults=True):
    """The meaning of a stream's acknowledgements. `kind` is fsync (the record is on the disk), interval (in the file, and on the
    disk within `interval_ms`) or ephemeral (in memory).
    """

    kind: str = "fsync"
    interval_ms: int = 0


FSYNC: Final = Durability()
EPHEMERAL: Final = Durability("ephemeral")


class Retention(msgspec.Struct, frozen=True, omit_defaults=True):
    """Retention of a stream: records are deleted when they are older than `age_ms`, or when a shard is larger than `size_bytes`;
    0 means unlimited. `acked`: only records that every durable subscription has acknowledged are deleted, once they are over one
    of the two.
    """

    age_ms: int = 0
    size_bytes: int = 0
    acked: bool = False


class Compaction(msgspec.Struct, frozen=True, omit_defaults=True):
    """Keep the last record of every key. Tombstones stay for `tombstone_ms`; records younger than `lag_ms` all stay."""

    tombstone_ms: int = DAY_MS
    lag_ms: int = 0

    def check(self) -> None:
        _within("compaction tombstones", self.tombstone_ms, 1_000, DURATION_MS_MAX, "ms")
        _within("compaction lag", self.lag_ms, 0, DURATION_MS_MAX, "ms")


class Deduplication(msgspec.Struct, frozen=True, omit_defaults=True):
    """Remember producers' message ids, per shard: for `window_ms`, at most `ids_max` of them."""

    window_ms: int = 600_000
    ids_max: int = 100_000

    def check(self) -> None:
        _within("deduplication window", self.window_ms, 1_000, 7 * DAY_MS, "ms")
        _within("deduplication ids", self.ids_max, 1, IDS_MAX, "ids per shard")


class Offload(msgspec.Struct, frozen=True, omit_defaults=True):
    """Copy closed segments to `url` (fsspec) and keep the newest `local_bytes` of a shard on the broker's disk."""

    url: str
    local_bytes: int = 1 << 30

    def check(self) -> None:
        if not 0 < len(self.url) <= URL_CHARS_MAX:
            raise _invalid(f"an offload URL of {len(self.url)} characters; 1 to {URL_CHARS_MAX} are allowed")
        _within("offload local bytes", self.local_bytes, 0, 1 << 50, "bytes")


class Retries(msgspec.Struct, frozen=True, omit_defaults=True):
    """Retries of a record that was not acknowledged: redelivered after `interval_ms`, doubled each time up to `interval_ms_max`,
    at most `attempts_max` deliveries in all (0: unlimited), then moved to the dead-letter stream (`dead_letter`; empty: the
    stream's own name with `.dead`).
    """

    attempts_max: int = 5
    interval_ms: int = 1_000
    interval_ms_max: int = 300_000
    dead_letter: str = ""

    def check(self) -> None:
        _within("attempts", self.attempts_max, 0, ATTEMPTS_MAX, "attempts (0: without bound)")
        _within("retry interval", self.interval_ms, 0, DURATION_MS_MAX, "ms")
        _within("longest retry interval", self.interval_ms_max, self.interval_ms, DURATION_MS_MAX, "ms")

    def delay_ms(self, attempts: int) -> int:
        """How long a record waits that was delivered `attempts` times (1 or more) without success."""
        # The exponent is bounded before it is used: 2**10000 is no delay.
        return min(self.interval_ms << min(max(0, attempts - 1), 40), self.interval_ms_max)


class QueueSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """A queue: records are leased for `visibility_ms` unless the worker asks otherwise. With `ordered_by_key` one
    record of a key is leased at a time."""

    visibility_ms: int = 30_000
    retries: Retries = Retries()
    ordered_by_key: bool = False

    def check(self) -> None:
        _within("visibility", self.visibility_ms, VISIBILITY_MS_MIN, VISIBILITY_MS_MAX, "ms")
        self.retries.check()


class CacheSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """A cache: the latest value of each key, at most `bytes_max` per shard in memory. Beyond it the least recently used
    are evicted, or writes refused (`eviction`: lru or refuse). `ttl_ms`: of a put that names none; 0 is without end."""

    bytes_max: int = CACHE_BYTES_DEFAULT
    ttl_ms: int = 0
    eviction: str = "lru"

    def check(self) -> None:
        _within("cache bytes", self.bytes_max, CACHE_BYTES_MIN, 1 << 40, "bytes per shard")
        _within("ttl", self.ttl_ms, 0, DURATION_MS_MAX, "ms")
        if self.eviction not in ("lru", "refuse"):
            raise _invalid(f"eviction {self.eviction[:40]!r}; it is lru or refuse")


class SubscriptionSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """A durable subscription. `start` (earliest or latest) counts where it has no position yet. What is delivered and
    not acknowledged after `ack_timeout_ms` is delivered again; at most `unacked_max` records per shard are out at a
    time. Without a consumer for `inactive_ttl_ms` it is deleted (0: never). `exclusive`: one consumer has all shards, the
    others stand by."""

    start: str = "latest"
    ack_timeout_ms: int = 30_000
    retries: Retries = Retries(attempts_max=0)
    unacked_max: int = 100_000
    inactive_ttl_ms: int = 0
    exclusive: bool = False

    def check(self) -> None:
        if self.start not in ("earliest", "latest"):
            raise _invalid(
                f"a start of {str(self.start)[:40]!r}; it is earliest or latest",
                "To begin at an offset or a time, make the subscription first: Stream.create_subscription(name, begin=…), or "
                "felix subscription create --from. One that is there is moved by seek.",
            )
        _within("ack timeout", self.ack_timeout_ms, VISIBILITY_MS_MIN, DAY_MS, "ms")
        _within("records out at a time", self.unacked_max, 1, 10_000_000, "records per shard")
        _within("inactive ttl", self.inactive_ttl_ms, 0, DURATION_MS_MAX, "ms (0: never)")
        self.retries.check()


class RetriesChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes to Retries; None keeps the setting. `dead_letter` empty: the stream's own name with `.dead` again."""

    attempts_max: int | None = None
    interval_ms: int | None = None
    interval_ms_max: int | None = None
    dead_letter: str | None = None


class QueueChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes to QueueSettings; None keeps the setting."""

    visibility_ms: int | None = None
    retries: RetriesChange | None = None
    ordered_by_key: bool | None = None


class CacheChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes to CacheSettings; None keeps the setting."""

    bytes_max: int | None = None
    ttl_ms: int | None = None
    eviction: str | None = None


class SubscriptionChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes to SubscriptionSettings; None keeps the setting. `start` and `exclusive` cannot be changed."""

    ack_timeout_ms: int | None = None
    retries: RetriesChange | None = None
    unacked_max: int | None = None
    inactive_ttl_ms: int | None = None


def altered(settings: _Settings, change: msgspec.Struct) -> _Settings:
    """The settings with what `change` names. They are not checked."""
    named: dict[str, object] = {}
    for field in change.__struct_fields__:
        value = getattr(change, field)
        if isinstance(value, RetriesChange):
            value = altered(getattr(settings, field), value)
        if value is not None:
            named[field] = value
    return msgspec.structs.replace(settings, **named)


class Views(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Every optional capability of a stream, in one value."""

    queue: QueueSettings | None = None
    cache: CacheSettings | None = None
    compaction: Compaction | None = None
    deduplication: Deduplication | None = None
    offload: Offload | None = None

    def check(self) -> None:
        for part in (self.queue, self.cache, self.compaction, self.deduplication, self.offload):
            if part is not None:
                part.check()
        if self.offload is not None and self.compacted is not None:
            raise _invalid(
                "a compacted stream that is offloaded",
                "Compaction keeps a stream small; offload is for history that is to be kept. Make two streams.",
            )
        if self.queue is not None and (self.cache is not None or self.compaction is not None):
            raise _invalid(
                "a queue that is a cache or compacted",
                "A queue's records go once they are acknowledged; make two streams.",
            )

    @property
    def compacted(self) -> Compaction | None:
        """How the stream is compacted: a cache always is, after CACHE_LAG_MS."""
        if self.compaction is None and self.cache is not None:
            return Compaction(lag_ms=CACHE_LAG_MS)
        return self.compaction


NO_VIEWS: Final = Views()
AUTO_STREAMS_MAX: Final = 100_000
"""Streams of one namespace that are made by their first use."""


class NamespaceSettings(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """With `auto_create`, a stream of the namespace is made by its first use, with what stands here, while there are fewer than
    `streams_max`. Durability as a stream's: `durability` is fsync, interval (with `interval_ms`) or ephemeral."""

    auto_create: bool = False
    shards: int = 1
    durability: str = "fsync"
    interval_ms: int = 0
    retention_ms: int = 0
    retention_bytes: int = 0
    streams_max: int = 1_000

    def check(self) -> None:
        _within("streams of a namespace", self.streams_max, 1, AUTO_STREAMS_MAX, "streams")


def _within(what: str, value: int, least: int, most: int, unit: str) -> None:
    if not least <= value <= most:
        raise _invalid(f"{what} of {value}; {least} to {most} {unit} are allowed")


def _invalid(sentence: str, hint: str = "") -> RequestError:
    return RequestError(f"Settings: {sentence}.", code=Code.CONFIG_INVALID, hint=hint)
