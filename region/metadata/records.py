"""The catalog's records: what they hold, when they are valid, how they stand in the store.

Records that Felix itself interprets are JSON, so that a person can read them with `etcdctl get`. Signed
documents (grants, policies, bundles) stand as the bytes that were signed. Pure; used by `catalog` and `mirror`.

Invariants: a `StreamConfig` that came through `check_stream_config` is valid; `decode` gives back what `encode`
was given, or raises CorruptionError that names the key. Unknown fields are passed over, not refused: an
older broker reads what a newer one wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Final, Literal, TypeVar, get_args

import msgspec

from felix.errors import Code, CorruptionError, RequestError, of_later_release
from felix.names import SpiffeId, StreamName, parse_region, parse_subscription
from felix.settings import NO_VIEWS, Durability, Retention, SubscriptionSettings, Views
from policy.access import RIGHTS_PER_IDENTITY_MAX, parse_rights

REPLICAS_MAX: Final = 7
"""Copies of a shard: six brokers may fail. Each costs the leader a write over the network for each batch."""
SHARDS_MAX: Final = 256
"""Shards of one stream; each has files, a lease of attention and a place in every rebalance."""
REMOVED_REMEMBERED_MAX: Final = 1_024
"""Removed incarnations that a broker remembers, the newest: what was read of one a moment ago does not bring it back."""
INTERVAL_MS_MAX: Final = 60_000
"""An `interval` stream may lose so much at a crash; who wants to lose more wants `ephemeral`."""
RETENTION_AGE_MS_MIN: Final = 10
"""Retention works on whole segments, whenever the broker sweeps; what lives shorter is no record."""
RETENTION_BYTES_MIN: Final = 1 << 20
"""One batch of the largest size per shard; less could delete what was acknowledged a moment ago."""
RING_BYTES_MIN: Final = 1 << 20
"""One batch of the largest size."""
RING_BYTES_MAX: Final = 4 << 30
RING_BYTES_DEFAULT: Final = 64 << 20
INCARNATION_BYTES: Final = 16
SUBSCRIPTION_ID_BYTES: Final = 8
FORMER_TTLS_MAX: Final = 256
"""Times that a cache's own ttl may be altered: each is remembered for as long as the cache is there."""
ACKS: Final = ("quorum", "leader")
DURABILITY_KINDS: Final = ("fsync", "interval", "ephemeral")
DocumentKind = Literal["grants", "revocations", "denies"]
Side = Literal["export", "import", "approval", "state"]

AUDIT_STREAM: Final = StreamName("felix", "system", "audit")
"""Has the leaves of the audit log, where brokers copy it. It stands in no catalog, so nobody reads or writes it but the brokers themselves."""

_DOCUMENT_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_Record = TypeVar("_Record", bound=msgspec.Struct)
Word = Annotated[str, msgspec.Meta(max_length=255)]
"""No longer than a message has room for: whoever can write the store could keep all other records from being listed."""
Ms = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Unix time, in milliseconds."""


class FormerTtl(msgspec.Struct, frozen=True, array_like=True):
    """A cache's own ttl up to a time: values appended until then that name none still go by it."""

    until_ms: int
    ttl_ms: int


class FormerCache(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a cache's settings were, as far as its log is still read by them: `ttls`, oldest first."""

    ttls: tuple[FormerTtl, ...] = ()


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner chooses for a stream. `ring_bytes`: memory per shard of an `ephemeral` stream. `former_cache`: of a
    cache that was altered. `dead_letter_by`: who named the stream for a queue's dead letters; they flow there while that
    identity may publish there. `replicas`: copies of each shard, on as many brokers; `min_in_sync`: how many of them a commit needs, 0: a
    majority. `acks`: of several copies, `quorum` (acknowledged when committed) or `leader` (when durable on the leader, before the others
    have it; a commit needs one copy then)."""

    shards: int = 1
    durability: Durability = Durability()
    retention: Retention = Retention()
    ring_bytes: int = RING_BYTES_DEFAULT
    views: Views = NO_VIEWS
    former_cache: FormerCache = FormerCache()
    dead_letter_by: str = ""
    replicas: int = 1
    min_in_sync: int = 0
    acks: str = "quorum"


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as it stands in the catalog. `incarnation`: 16 random bytes as hex, made at creation: a stream
    that is created again under an old name is another stream. `revision` is not stored; it is the store's."""

    name: Word
    incarnation: Word
    created_ms: Ms
    config: StreamConfig
    revision: int = 0


class DeletedStream(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of an explicit deletion, by incarnation. Without it, no broker deletes a stream's data."""

    name: Word
    incarnation: Word
    deleted_ms: Ms
    by: Word = ""
    """who deleted it (SPIFFE id); empty in a mark of before"""
    key: Word = ""
    """the id (hex) of its key, where that stood in the store"""


class DestroyedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that is to be destroyed, or was: what its KEY leaf in the audit log says, and how far that is. `key` and `incarnation` are hex; a root
    key has no stream. Written before the key is destroyed, or with it, and kept for ever."""

    key: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    level: Literal["root", "stream"]
    stream: Word = ""
    incarnation: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{32})?\Z")] = ""
    by: Word = ""
    at_ms: Ms
    since: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """so many leaves the audit log had before the key's leaf was first appended; None: it was not yet"""
    leaf: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """the index of its leaf, once that is durable"""


def check_destroyed_key(record: DestroyedKey) -> None:
    """Raises RequestError(NAME_INVALID) where its leaf would have another text than the names that Felix writes."""
    if record.by:
        SpiffeId.parse(record.by)
    if record.level == "stream":
        StreamName.parse(record.stream)
    if bool(record.stream) != (record.level == "stream") or bool(record.incarnation) != bool(record.stream):
        raise RequestError(
            f"A destroyed key of level {record.level} has a stream and an incarnation where it is a stream's, and none where it is a root.",
            code=Code.NAME_INVALID,
        )


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """A durable subscription. `id`: 8 random bytes as hex, made at creation; its progress stands under it. `incarnation`: the
    stream's whose records it counts. `dead_letter_by`: who named the stream for its dead letters, where not the creator.
    `revision` is not stored; it is the store's."""

    stream: Word
    name: Word
    id: Word
    incarnation: Word
    creator: Word
    created_ms: Ms
    settings: SubscriptionSettings
    dead_letter_by: Word = ""
    revision: int = 0


class Rights(msgspec.Struct, frozen=True):
    """What one identity may do, as texts such as `publish acme/payments/*` (policy.access)."""

    rights: tuple[str, ...] = ()


class PolicyPointer(msgspec.Struct, frozen=True):
    """Which policy version is in force. The signed document stands beside it, under its version."""

    version: int


class Policy(msgspec.Struct, frozen=True):
    """The residency policy in force: its version and the signed bytes."""

    version: int
    document: bytes


class Document(msgspec.Struct, frozen=True):
    """Signed bytes under an id, and the revision at which they were written."""

    id: str
    document: bytes
    revision: int


def _invalid(name: StreamName | str, sentence: str, hint: str = "") -> RequestError:
    return RequestError(f"Stream {name}: {sentence}.", code=Code.CONFIG_INVALID, hint=hint)


def check_stream_config(name: StreamName, config: StreamConfig) -> None:
    """Raises RequestError(CONFIG_INVALID) that says which setting, what it was and what is allowed."""
    durability, retention = config.durability, config.retention
    if name == AUDIT_STREAM:
        raise _invalid(
            name, "the name is the audit log's, which brokers keep themselves", "Choose another name."
        )
    if not 1 <= config.shards <= SHARDS_MAX:
        raise _invalid(name, f"{config.shards} shards; 1 to {SHARDS_MAX} are allowed")
    if durability.kind not in DURABILITY_KINDS:
        raise _invalid(name, f"durability {durability.kind!r}; it is fsync, interval or ephemeral")
    if durability.kind == "interval":
        if not 1 <= durability.interval_ms <= INTERVAL_MS_MAX:
            raise _invalid(
                name,
                f"durability interval of {durability.interval_ms} ms; 1 to {INTERVAL_MS_MAX} ms are allowed",
                "Write it as interval:50ms.",
            )
    elif durability.interval_ms:
        raise _invalid(
            name,
            f"durability {durability.kind} has no interval, but {durability.interval_ms} ms is given",
            "Leave the interval away, or choose durability interval.",
        )
    if retention.age_ms and retention.age_ms < RETENTION_AGE_MS_MIN:
        raise _invalid(
            name, f"retention of {retention.age_ms} ms; at least {RETENTION_AGE_MS_MIN} ms, or 0 for no bound"
        )
    if retention.size_bytes and retention.size_bytes < RETENTION_BYTES_MIN:
        raise _invalid(
            name,
            f"retention of {retention.size_bytes} bytes per shard; at least {RETENTION_BYTES_MIN}, or 0 for no bound",
        )
    if retention.acked and not (retention.age_ms or retention.size_bytes):
        raise _invalid(
            name,
            "retention acked without an age or a size: what nobody subscribes to would go at once, or never",
            "Give it an age as well, as in 1h,acked.",
        )
    if not RING_BYTES_MIN <= config.ring_bytes <= RING_BYTES_MAX:
        raise _invalid(
            name, f"a ring of {config.ring_bytes} bytes; {RING_BYTES_MIN} to {RING_BYTES_MAX} are allowed"
        )
    config.views.check()
    _check_copies(name, config)
    if durability.kind == "ephemeral" and (config.views.compaction or config.views.offload):
        what = "compacted" if config.views.compaction else "offloaded"
        raise _invalid(
            name,
            f"it is ephemeral, so nothing of it is on disk that could be {what}",
            "Choose durability fsync or interval.",
        )
    if config.views.cache is not None and (retention.age_ms or retention.size_bytes):
        raise _invalid(
            name,
            "a cache with retention, which would let go of values that nobody has replaced",
            "Give its values a ttl, and bound it with the cache's bytes.",
        )


def is_replicated(config: StreamConfig) -> bool:
    """Whether a stream has more than one copy."""
    return config.replicas > 1


def rests_on_commits(config: StreamConfig) -> bool:
    """Whether what a stream's leader acknowledges rests on a commit, and so on no lease."""
    return is_replicated(config) and config.acks == "quorum"


def min_in_sync(config: StreamConfig) -> int:
    """How many copies a commit needs."""
    return config.min_in_sync or (1 if config.acks == "leader" else config.replicas // 2 + 1)


def one_copy_since(config: StreamConfig) -> str:
    """What a stream is that has one copy so far; empty where it may have several."""
    return "ephemeral" if config.durability.kind == "ephemeral" else ""


def _check_copies(name: StreamName, config: StreamConfig) -> None:
    if not 1 <= config.replicas <= REPLICAS_MAX:
        raise _invalid(name, f"{config.replicas} copies; 1 to {REPLICAS_MAX} are allowed")
    if not 0 <= config.min_in_sync <= config.replicas:
        raise _invalid(
            name,
            f"an acknowledgement that waits for {config.min_in_sync} of {config.replicas} copies; it can wait for 1 to "
            f"{config.replicas}, or 0 for a majority",
        )
    if config.acks not in ACKS:
        raise _invalid(name, f"acks {config.acks[:40]!r}; it is quorum or leader")
    if config.acks == "leader":
        if config.replicas == 1:
            raise _invalid(
                name,
                "acks leader of a stream of one copy: its leader has all of it, so quorum says the same",
                "Leave --acks away, or give it several copies with --replicas.",
            )
        if config.views.queue is not None or config.views.cache is not None:
            raise _invalid(
                name,
                "acks leader of a queue or a cache, whose answers stand for good: what it told could be lost with its leader",
                "Leave --acks away.",
            )
        if config.min_in_sync > 1:
            raise _invalid(
                name,
                f"acks leader, and {config.min_in_sync} copies that an acknowledgement waits for: it waits for the leader alone",
                "Leave --min-in-sync away, or choose acks quorum.",
            )
    what = one_copy_since(config) if config.replicas > 1 else ""
    if what:
        raise _invalid(
            name,
            f"{config.replicas} copies of a stream that is {what}, which has one copy so far",
            "Leave --replicas away, or say --replicas 1.",
        )


def check_stream_update(name: StreamName, old: StreamConfig, new: StreamConfig) -> None:
    """Raises RequestError(CONFIG_INVALID) for a change that existing data does not survive."""
    check_stream_config(name, new)
    if new.shards != old.shards:
        raise _invalid(
            name,
            f"it has {old.shards} shards and cannot get {new.shards}: keys would change their shard and lose "
            "their order",
            "Create another stream and copy into it.",
        )
    if new.acks != old.acks:
        raise _invalid(
            name,
            "what an acknowledgement waits for (acks) is decided when it is created",
            "Create another stream and copy into it.",
        )
    if (new.durability.kind == "ephemeral") != (old.durability.kind == "ephemeral"):
        raise _invalid(
            name,
            f"durability cannot change from {old.durability.kind} to {new.durability.kind}: one is in memory, "
            "the other on disk",
            "Create another stream and copy into it.",
        )
    if (
        old.views.queue
        and new.views.queue
        and old.views.queue.ordered_by_key != new.views.queue.ordered_by_key
    ):
        raise _invalid(
            name,
            "whether it is ordered by key is decided when it is created: records of a key may be with several workers "
            "now, and would be again after a restart",
            "Create another queue and move what is left into it.",
        )
    if len(new.former_cache.ttls) > FORMER_TTLS_MAX:
        raise _invalid(
            name,
            f"its ttl was altered {FORMER_TTLS_MAX} times, the most that are remembered",
            "Name a ttl with each put, or create another cache.",
        )
    for view in ("queue", "cache"):
        if (getattr(new.views, view) is None) != (getattr(old.views, view) is None):
            raise _invalid(
                name,
                f"whether it is a {view} is decided when it is created",
                "Create another stream and copy into it.",
            )


def canonical_rights(identity: SpiffeId, texts: Iterable[str]) -> tuple[str, ...]:
    """Each right as `Right.__str__` writes it, sorted, none twice. Raises RequestError where one is no right or
    there are too many."""
    rights = {str(right) for text in texts for right in parse_rights(text)}
    if len(rights) > RIGHTS_PER_IDENTITY_MAX:
        raise RequestError(
            f"{identity} would have {len(rights)} rights; at most {RIGHTS_PER_IDENTITY_MAX} are allowed.",
            hint="Use patterns, as in publish acme/payments/*.",
        )
    return tuple(sorted(rights))


class Keys:
    """The keys of one region, made in one place. `prefix` ends in a slash."""

    def __init__(self, region: str) -> None:
        self.prefix = f"/felix/1/{parse_region(region)}/"

    def stream(self, name: StreamName) -> str:
        """Of a stream's record."""
        return f"{self.prefix}streams/{name}"

    def made(self, tenant: str) -> str:
        """Of the name of the stream of a tenant that was made last, where its streams are counted."""
        return f"{self.prefix}made/{tenant}"

    def deleted(self, incarnation: str) -> str:
        """Of the mark of a deleted stream."""
        if len(incarnation) != 2 * INCARNATION_BYTES:
            raise RequestError(f"{incarnation[:80]!r} is not an incarnation id: expected 32 hex digits.")
        return f"{self.prefix}deleted/{incarnation}"

    def frozen(self) -> str:
        """Of the mark that the store went back to an earlier state (region.cluster.records.FrozenRecord)."""
        return f"{self.prefix}frozen"

    def rights(self, identity: SpiffeId) -> str:
        """Of an identity's rights: its SPIFFE id without the scheme."""
        return f"{self.prefix}rights/{str(identity).removeprefix('spiffe://')}"

    def subscription(self, stream: StreamName, name: str) -> str:
        """Of a durable subscription."""
        return f"{self.prefix}subscriptions/{stream}/{parse_subscription(name)}"

    def document(self, kind: DocumentKind, side: Side, document_id: str) -> str:
        """Of a grant, a revocation or a denial."""
        if kind not in get_args(DocumentKind) or side not in get_args(Side):
            raise RequestError(f"There are no {kind!r} documents of side {side!r}.")
        if not _DOCUMENT_ID.fullmatch(document_id):
            raise RequestError(
                f"{document_id[:80]!r} is not a document id: expected 1 to 128 letters, digits and . _ -."
            )
        return f"{self.prefix}{kind}/{side}/{document_id}"

    def policy_pointer(self) -> str:
        """Of the record that says which policy is in force."""
        return f"{self.prefix}policy/current"

    def policy_version(self, version: int) -> str:
        """Of a policy's signed bytes; versions sort as text."""
        return f"{self.prefix}policy/versions/{version:010}"

    def trusted(self, region: str) -> str:
        """Of another region's bundle of authorities."""
        return f"{self.prefix}trusted/{parse_region(region)}"

    def pin(self, region: str) -> str:
        """Of the pin that this region signed of another one's bundle."""
        return f"{self.prefix}pins/{parse_region(region)}"

    def signing_keys(self) -> str:
        """Of what the region's audit log says of its policy and receipt keys, for brokers that have no copy of it."""
        return f"{self.prefix}signing_keys/of_log"

    def log_keys(self) -> str:
        """Of the words that keys of the region's own audit log have ended, each signed with the key that did (region.trust.changed_log_key)."""
        return f"{self.prefix}log_keys/ended"

    def stream_key(self, incarnation: str) -> str:
        """Of the wrapped key of a stream, where several brokers share it; empty: what all of them begin with."""
        return f"{self.prefix}keys/streams/{incarnation}"

    def key_roots(self) -> str:
        """Of the root keys under which several brokers keep the keys of streams."""
        return f"{self.prefix}keys/roots"

    def key_rotated(self) -> str:
        """Of the last rotation of several brokers' data keys."""
        return f"{self.prefix}keys/rotated"

    def key_broker(self, broker: str) -> str:
        """Of how far one of several brokers follows rotations of keys; empty: what all of them begin with."""
        return f"{self.prefix}keys/brokers/{broker}"

    def destroyed_key(self, key: str) -> str:
        """Of a destroyed key, by its id in hex; empty: what all of them begin with."""
        return f"{self.prefix}keys/destroyed/{key}"

    def stored_keys(self, incarnation: str, broker: str = "", page: int = 0) -> str:
        """Of data keys of a stream that a broker of several stored before they shared keys; without `broker`: what all of them begin with."""
        return f"{self.prefix}stored_keys/{incarnation}/" + (f"{broker}/{page:04}" if broker else "")

    def stored_keys_of(self, broker: str) -> str:
        """Of how many such keys a broker has brought."""
        return f"{self.prefix}stored_keys/of/{broker}"

    def witness(self, origin_hash: str) -> str:
        """Of what this region cosigned last of a log, by the SHA-256 of its origin in hex."""
        return f"{self.prefix}witness/{origin_hash}"

    def namespace(self, namespace: str) -> str:
        """Of a namespace's settings, by `tenant/namespace`."""
        tenant, _, rest = namespace.partition("/")
        StreamName(tenant, rest, "x")  # raises NAME_INVALID
        return f"{self.prefix}namespaces/{namespace}"

    def quota(self, holder: str | SpiffeId) -> str:
        """Of the limits of a tenant or an identity; a tenant's name has no slash, an identity's has."""
        if isinstance(holder, SpiffeId):
            return f"{self.prefix}quotas/{str(holder).removeprefix('spiffe://')}"
        StreamName(holder, "x", "x")  # raises NAME_INVALID for what is no tenant
        return f"{self.prefix}quotas/{holder}"


def encode_subscription(subscription: Subscription) -> bytes:
    """JSON of a subscription, without what is not stored."""
    fields = msgspec.structs.asdict(subscription)
    del fields["revision"]
    return msgspec.json.encode(fields)


def decode_subscription(value: bytes, key: str, revision: int) -> Subscription:
    """A subscription's record, checked as a stream's is."""
    subscription = decode(value, Subscription, key)
    try:
        if not key.endswith(
            f"/subscriptions/{StreamName.parse(subscription.stream)}/{parse_subscription(subscription.name)}"
        ):
            raise RequestError(f"it calls itself {subscription.name} of {subscription.stream}.")
        if len(bytes.fromhex(subscription.id)) != SUBSCRIPTION_ID_BYTES:
            raise RequestError(f"its id is {subscription.id!r}.")
        subscription.settings.check()
    except (RequestError, ValueError) as error:
        raise CorruptionError(
            f"The metadata record {key} is not valid: {error}",
            hint="It was changed by something other than Felix; put the record right, or put back a backup.",
        ) from error
    return msgspec.structs.replace(subscription, revision=revision)


def encode(record: msgspec.Struct) -> bytes:
    """JSON of a record."""
    return msgspec.json.encode(record)


def decode(value: bytes, kind: type[_Record], key: str) -> _Record:
    """A record from its JSON. Raises CorruptionError that names the key."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptionError(
            f"The metadata record {key} cannot be read: {error}.",
            hint=of_later_release(error)
            or "It was changed by something other than Felix; put the record right, or put back a backup.",
        ) from error


class _FormerRetention(msgspec.Struct, frozen=True):
    bytes: int = 0


class _FormerConfig(msgspec.Struct, frozen=True):
    retention: _FormerRetention = _FormerRetention()


class _FormerStream(msgspec.Struct):
    """A stream as it was written when its retention by size was called `bytes`."""

    config: _FormerConfig


def decode_stream(value: bytes, key: str, revision: int) -> Stream:
    """A stream's record, checked: what stands in the store may have been written by hand."""
    stream = decode(value, Stream, key)
    if b'"bytes"' in value and not stream.config.retention.size_bytes:
        former = decode(value, _FormerStream, key).config.retention.bytes
        retention = msgspec.structs.replace(stream.config.retention, size_bytes=former)
        config = msgspec.structs.replace(stream.config, retention=retention)
        stream = msgspec.structs.replace(stream, config=config)
    try:
        name = StreamName.parse(stream.name)
        check_stream_config(name, stream.config)
        if not key.endswith(f"/streams/{name}"):
            raise RequestError(f"it calls itself {name}.")
        if len(bytes.fromhex(stream.incarnation)) != INCARNATION_BYTES:
            raise RequestError(f"its incarnation id is {stream.incarnation!r}.")
    except (RequestError, ValueError) as error:
        raise CorruptionError(
            f"The metadata record {key} is not valid: {error}",
            hint="It was changed by something other than Felix; put the record right, or put back a backup.",
        ) from error
    return msgspec.structs.replace(stream, revision=revision)
