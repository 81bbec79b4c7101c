"""The metadata store port: what a region asks of its store, and the bounds that hold for every store.

A store is an ordered map from text keys to bytes with one revision counter. Every change is a transaction; a
transaction that changes something has the next revision. The model, its compare rules and its revision 1 for
an empty store are etcd's (etcd v3 API, KV and Watch), so that etcd needs no translation.

Invariants:
- a transaction happens as a whole or not at all, and its events carry one revision and arrive together;
- a watch yields every change to its prefix from the revision it was asked for, in order, each once, or it
  ends with `CompactedError`; it never skips;
- nothing larger than the bounds here and in `transaction` reaches a store.

`MetadataStore` checks arguments here, once; the stores implement the methods with an underscore.
Used by `genesis`, `catalog` and the region's controller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Final, Self
from weakref import WeakSet

from felix.errors import Code, RequestError, UnavailableError
from felix.runtime.port import Clock
from region.metadata.lease import LEASE_TTL_MS_MAX, LEASE_TTL_MS_MIN, Lease
from region.metadata.transaction import (
    Change,
    Compare,
    Entry,
    Page,
    Snapshot,
    TransactResult,
    Write,
    check_transaction,
    encode_key,
)

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
            raise RequestError("A metadata key is empty.")
        return await self._get(key)

    async def range(self, prefix: str, *, limit: int = RANGE_LIMIT_MAX, after: str = "") -> Page:
        """One page of the keys that start with `prefix` and sort after `after`, in byte order.

        A page holds `limit` entries at most, and fewer where values are large; go by `more`.
        """
        self._check_open()
        encode_key(prefix, "prefix")
        encode_key(after)
        if not 1 <= limit <= RANGE_LIMIT_MAX:
            raise RequestError(
                f"A page of {limit} entries was asked for; 1 to {RANGE_LIMIT_MAX} are allowed."
            )
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
            raise RequestError(f"A watch from revision {from_revision} was asked for; revisions begin at 1.")
        return self._watch(prefix, from_revision)

    async def grant(self, ttl_ms: int, *, keep: bool = True) -> Lease:
        """A new lease. With `keep` it is renewed in the background. The store may grant a longer TTL than asked."""
        self._check_open()
        if not LEASE_TTL_MS_MIN <= ttl_ms <= LEASE_TTL_MS_MAX:
            raise RequestError(
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

    def silent_members(self) -> dict[str, int]:
        """Members of the store that do not answer this process, by name, and for how long in ms. A store of one process has none."""
        return {}

    def trouble(self) -> str:
        """That the store of this process does not answer, or waits for its disk, with what to do; empty where that is not so, and of a store that runs
        elsewhere. From any thread."""
        return ""

    def hung(self) -> str:
        """The same, where it waits for its disk alone."""
        return ""

    @property
    def opened_again(self) -> int:
        """How often the store of this process was opened again after an error of its disk."""
        return 0

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
