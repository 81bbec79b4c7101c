"""The metadata store port: what a region asks of its store, and the bounds that hold for every store.

A store is an ordered map from text keys to bytes with one revision counter. Every change is a transaction; a
transaction that changes something has the next revision. The model, its compare rules and its revision 1 for
an empty store are etcd's (etcd v3 API, KV and Watch), so that etcd needs no translation.

Invariants:
- a transaction happens as a whole or not at all, and its events carry one revision and arrive together;
- a watch yields every change to its prefix from the revision it was asked for, in order, each once, or it
  ends with `CompactedError`; it never skips;
- nothing larger than the bounds below reaches a store.

`MetadataStore` checks arguments here, once; the stores implement the methods with an underscore.
Used by `genesis`, `catalog` and the region's controller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final, Self
from weakref import WeakSet

from felix.errors import Code, RequestError, UnavailableError
from felix.runtime.port import Clock
from region.metadata.lease import LEASE_TTL_MS_MAX, LEASE_TTL_MS_MIN, Lease

KEY_BYTES_MAX: Final = 512
"""The longest key of ours (a stream's shard) has about 250 bytes; keys are held in memory by every store."""
VALUE_BYTES_MAX: Final = 1 << 20
"""etcd accepts requests of 1.5 MiB by default; a record and its transaction fit in."""
OPERATIONS_MAX: Final = 128
"""Compares, and writes, of one transaction: etcd's default `--max-txn-ops`."""
TRANSACTION_BYTES_MAX: Final = 5 << 18
"""1.25 MiB of keys and values in one transaction: below etcd's default `--max-request-bytes` with room for framing."""
RANGE_LIMIT_MAX: Final = 1_000
"""Entries of one page; a page may also be cut short by `PAGE_BYTES_MAX`."""
PAGE_BYTES_MAX: Final = 8 << 20
"""Bytes that one page may make this process allocate. A single entry is never larger."""
FIRST_REVISION: Final = 1
"""The revision of a store that nobody has written to."""


class OutcomeUnknownError(UnavailableError):
    """The answer to a write was lost: it may have happened or not. Read before writing again."""


class CompactedError(RequestError):
    """The changes from the wanted revision on are not in the store's history: load again, then watch from there."""

    default_code = Code.OFFSET_OUT_OF_RANGE


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and its value. `lease` is 0 where none is bound."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """Entries in key order as of `revision`. With `more`, the next page starts after the last key."""

    entries: tuple[Entry, ...]
    revision: int
    more: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything under a prefix. A watch from `revision + 1` brings it up to date, whatever changed while loading."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class ModRevision:
    """Holds while the key was last changed at `revision`; 0 means that the key is absent."""

    key: str
    revision: int

    def holds(self, entry: Entry | None) -> bool:
        """Whether it holds of the key's entry."""
        return (0 if entry is None else entry.mod_revision) == self.revision


@dataclass(frozen=True, slots=True)
class Absent:
    """Holds while there is no such key."""

    key: str

    def holds(self, entry: Entry | None) -> bool:
        """Whether it holds of the key's entry."""
        return entry is None


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Holds while the key exists with exactly this value."""

    key: str
    value: bytes

    def holds(self, entry: Entry | None) -> bool:
        """Whether it holds of the key's entry."""
        return entry is not None and entry.value == self.value


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key. `lease` binds it to a lease; 0 unbinds it from the one it had."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key; an absent one is no error and makes no event."""

    key: str


Compare = ModRevision | Absent | ValueIs
Write = Put | Delete


@dataclass(frozen=True, slots=True)
class TransactResult:
    """`revision`: the one this transaction made, or the store's present one where it changed nothing."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Event:
    """One key changed. `entry` is None where it was deleted."""

    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Change:
    """All events of one revision under the watched prefix. Resume from `revision + 1`."""

    revision: int
    events: tuple[Event, ...]


def _refuse(sentence: str, hint: str = "") -> RequestError:
    return RequestError(sentence, hint=hint)


def encode_key(key: str, what: str = "key") -> bytes:
    """UTF-8 of a key or prefix, bounded. Raises RequestError(INVALID)."""
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        raise _refuse(f"A metadata {what} is not valid Unicode text: {key[:80]!r}.") from None
    if len(encoded) > KEY_BYTES_MAX:
        raise _refuse(
            f"The metadata {what} {key[:60]!r}… has {len(encoded)} bytes; at most {KEY_BYTES_MAX} are allowed."
        )
    if any(byte < 0x20 or byte == 0x7F for byte in encoded):
        raise _refuse(f"The metadata {what} {key[:80]!r} contains a control character.")
    return encoded


def prefix_end(prefix: bytes) -> bytes | None:
    """The first key after all keys with this prefix; None where there is no end (an empty prefix)."""
    trimmed = prefix.rstrip(b"\xff")
    return None if not trimmed else trimmed[:-1] + bytes([trimmed[-1] + 1])


def check_transaction(compares: Sequence[Compare], writes: Sequence[Write]) -> None:
    """Raises RequestError(INVALID) for what no store accepts; the sentence names the bound."""
    for what, operations in (("compares", len(compares)), ("writes", len(writes))):
        if operations > OPERATIONS_MAX:
            raise _refuse(
                f"A metadata transaction with {operations} {what} was refused; at most {OPERATIONS_MAX} are allowed.",
                "Split it, and make each part correct by itself.",
            )
    total = 0
    for operation in (*compares, *writes):
        key_bytes = len(encode_key(operation.key))
        if not key_bytes:
            raise _refuse("A metadata key is empty.")
        value_bytes = len(operation.value) if isinstance(operation, Put | ValueIs) else 0
        if value_bytes > VALUE_BYTES_MAX:
            raise _refuse(
                f"The value for metadata key {operation.key!r} has {value_bytes} bytes; "
                f"at most {VALUE_BYTES_MAX} are allowed.",
                "Metadata holds configuration and signed documents; data belongs in a stream.",
            )
        total += key_bytes + value_bytes
    if total > TRANSACTION_BYTES_MAX:
        raise _refuse(
            f"A metadata transaction of {total} bytes was refused; at most {TRANSACTION_BYTES_MAX} are allowed.",
            "Split it, and make each part correct by itself.",
        )
    keys = [write.key for write in writes]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _refuse(f"A metadata transaction writes the key {twice!r} twice.", "Write each key once.")


class MetadataStore(ABC):
    """The port. Every method raises UnavailableError (its hint names the store or its endpoints) when the store
    cannot answer within its time limit, and after `close`."""

    def __init__(self, where: str, clock: Clock) -> None:
        """`where`: the store as a person knows it, for sentences: a path or endpoints."""
        self.where = where
        self.clock = clock
        self._leases: WeakSet[Lease] = WeakSet()
        self._closed = False

    async def get(self, key: str) -> Entry | None:
        """The entry of a key, or None. Linearizable: it sees every write that was acknowledged before."""
        self._check_open()
        if not encode_key(key):
            raise _refuse("A metadata key is empty.")
        return await self._get(key)

    async def range(self, prefix: str, *, limit: int = RANGE_LIMIT_MAX, after: str = "") -> Page:
        """One page of the keys that start with `prefix` and sort after `after`, in byte order.

        A page holds `limit` entries at most, and fewer where values are large; go by `more`.
        """
        self._check_open()
        encode_key(prefix, "prefix")
        encode_key(after)
        if not 1 <= limit <= RANGE_LIMIT_MAX:
            raise _refuse(f"A page of {limit} entries was asked for; 1 to {RANGE_LIMIT_MAX} are allowed.")
        return await self._range(prefix, limit, after)

    async def load(self, prefix: str) -> Snapshot:
        """Everything under `prefix`, page by page; see Snapshot for what its revision promises."""
        page = await self.range(prefix)
        revision, entries = page.revision, list(page.entries)
        while page.more:
            page = await self.range(prefix, after=entries[-1].key)
            entries.extend(page.entries)
        return Snapshot(tuple(entries), revision)

    async def transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        """Make all `writes` if all `compares` hold, else none.

        Raises LeaseLostError where a put names a lease that is gone, and OutcomeUnknownError where the answer
        was lost on the way.
        """
        self._check_open()
        check_transaction(compares, writes)
        return await self._transact(compares, writes)

    def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]:
        """Changes under `prefix` from `from_revision` on, without end; see the module's invariants.

        Raises CompactedError where that history is gone or was never made (a store put back from a backup),
        UnavailableError where the store stays away; after the latter, watch again from the last revision + 1.
        """
        self._check_open()
        encode_key(prefix, "prefix")
        if from_revision < FIRST_REVISION:
            raise _refuse(f"A watch from revision {from_revision} was asked for; revisions begin at 1.")
        return self._watch(prefix, from_revision)

    async def grant(self, ttl_ms: int, *, keep: bool = True) -> Lease:
        """A new lease. With `keep` it is renewed in the background. The store may grant a longer TTL than asked."""
        self._check_open()
        if not LEASE_TTL_MS_MIN <= ttl_ms <= LEASE_TTL_MS_MAX:
            raise _refuse(
                f"A lease of {ttl_ms} ms was asked for; {LEASE_TTL_MS_MIN} to {LEASE_TTL_MS_MAX} are allowed."
            )
        sent_ms = self.clock.boot_ms()
        lease_id, granted_ms = await self._lease_grant(ttl_ms)
        lease = Lease(
            lease_id,
            granted_ms,
            sent_ms=sent_ms,
            renew=self._lease_renew,
            revoke=self._lease_revoke,
            clock_ms=self.clock.boot_ms,
        )
        self._leases.add(lease)
        if keep:
            lease.keep_alive()
        return lease

    async def close(self) -> None:
        """Let go of the store. Leases are not revoked: they run out by themselves unless revoked before."""
        if self._closed:
            return
        self._closed = True
        for lease in list(self._leases):
            lease.lose("The metadata store was closed in this process.")
        await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError(
                f"The metadata store {self.where} was closed in this process.", code=Code.SHUTTING_DOWN
            )

    @abstractmethod
    async def _get(self, key: str) -> Entry | None: ...

    @abstractmethod
    async def _range(self, prefix: str, limit: int, after: str) -> Page: ...

    @abstractmethod
    async def _transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult: ...

    @abstractmethod
    def _watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]: ...

    @abstractmethod
    async def _lease_grant(self, ttl_ms: int) -> tuple[int, int]:
        """Answers the lease's id and its TTL in ms."""

    @abstractmethod
    async def _lease_renew(self, lease_id: int) -> int:
        """Answers the TTL in ms; raises LeaseLostError."""

    @abstractmethod
    async def _lease_revoke(self, lease_id: int) -> None:
        """Deletes what is bound to it; a lease that is gone is no error."""

    @abstractmethod
    async def _close(self) -> None: ...
