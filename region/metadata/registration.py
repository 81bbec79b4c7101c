"""Which broker serves the region: registered in the metadata store under a lease, one at a time.

Every broker leads every shard and signs the region's one audit log, so two of them on one store would write two histories under
one name. `brokers/<id>` says who serves; it goes with its lease. `registered` says who registered last, stays, and is compared by
every registration, so that of two that register at once only one does.

Invariants:
- of all brokers that registered in one store, at most one has a `refusal` of None at any time: a holder counts its lease from
  before each renewal was sent;
- a broker takes over at once only what its own lock proves dead (`FolderLock.identity`); for anything else it waits until the
  lease must have ended;
- a broker that lost its lease registers again by itself, as if it had just started.

Used by `region.startup` for stores that several processes can open; an embedded store is locked by its file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final, Self

import msgspec

from felix.errors import Code, FelixError, UnavailableError
from region.metadata.genesis import region_prefix
from region.metadata.lease import Lease
from region.metadata.port import MetadataStore, OutcomeUnknownError
from region.metadata.transaction import Delete, Entry, ModRevision, Put, Write

log = logging.getLogger("felix.region.registration")

EXPIRY_SLACK_MS: Final = 2_000
"""How long after its time a store may still show what a lease held: etcd looks twice a second, and deletes by consensus."""
LOOK_MS: Final = 250
"""How often a broker that waits for another one's lease looks; etcd ends leases in steps of half a second."""
RETRY_MS: Final = 1_000
"""How soon a broker that lost its registration tries again."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A broker that serves. `lock`: `FolderLock.identity` of its data folder, empty where unknown. `process`, `host`, `folder` and
    `since_ms` (since the Unix epoch) are for people; `lease_ms` is how long it may stay silent."""

    broker: str
    host: str
    process: int
    folder: str
    lock: str
    lease_ms: int
    since_ms: int

    def __str__(self) -> str:
        return f"broker {self.broker} (process {self.process} on {self.host}, {self.folder})"


class Registration:
    """This broker's place in the store. Make it with `open`, run `keep` beside it, end it with `close`."""

    def __init__(self, store: MetadataStore, region: str, holder: Holder) -> None:
        self._store = store
        self._region = region
        self._holder = holder
        self._brokers = region_prefix(region) + "brokers/"
        self._last = region_prefix(region) + "registered"
        self._lease: Lease | None = None
        self._why = "it is not registered yet"

    @classmethod
    async def open(cls, store: MetadataStore, region: str, holder: Holder) -> Self:
        """Register, where need be after the lease of a broker that is gone has ended.

        Raises UnavailableError(SERVED_ELSEWHERE) where another broker serves the region, and what the store raises.
        """
        registration = cls(store, region, holder)
        await registration._register()
        return registration

    def refusal(self) -> UnavailableError | None:
        """Why this broker may not write now, or None. For each append, so cheap; callable from every thread."""
        lease = self._lease
        if lease is not None and lease.remaining_ms():
            return None
        return UnavailableError(
            f"Broker {self._holder.broker} does not write: its registration in the metadata store has ended, and another broker "
            f"may serve {self._region} ({self._why}).",
            code=Code.NOT_LEADER,
            hint="It registers again by itself once the store answers and no other broker serves.",
            retry_after_ms=RETRY_MS,
        )

    async def keep(self) -> None:
        """Register again whenever the lease was lost. Runs until it is cancelled."""
        while True:
            assert self._lease is not None
            await self._lease.lost.wait()
            self._why = self._lease.reason.removesuffix(".")
            log.error("%s", self.refusal())
            while self._lease.lost.is_set():
                try:
                    await self._register()
                except FelixError as error:
                    if (why := error.sentence.removesuffix(".")) != self._why:
                        self._why = why
                        log.error("not registered: %s", error)
                    await asyncio.sleep(RETRY_MS / 1_000)
            log.warning("broker %s of %s is registered again, and writes", self._holder.broker, self._region)

    async def close(self) -> None:
        """Let another broker register at once. Where the store does not answer, the lease ends by itself."""
        if self._lease is not None:
            with contextlib.suppress(FelixError):
                await self._lease.revoke()

    async def _register(self) -> None:
        """1. Who registered last.
        2. Who is registered: what our own lock proves dead is replaced; for others we wait until their lease must have ended.
        3. Our own entry under a new lease, if nobody has registered since 1; else from the beginning.
        """
        waited_from_ms: int | None = None
        while True:
            last = await self._store.get(self._last)
            entries = (await self._store.load(self._brokers)).entries
            others = [entry for entry in entries if not self._is_ours(_decode(entry))]
            if others:
                now = self._store.clock.boot_ms()
                if waited_from_ms is None:
                    waited_from_ms = now
                    log.info("waiting for the lease of %s to end", _name(others[0]))
                if now - waited_from_ms > max(map(self._silence_ms, others)):
                    raise self._served_by(others[0])
                await asyncio.sleep(LOOK_MS / 1_000)
                continue
            if await self._take(last, [entry.key for entry in entries]):
                return

    async def _take(self, last: Entry | None, ours: list[str]) -> bool:
        lease = await self._store.grant(self._holder.lease_ms)
        key = self._brokers + self._holder.broker
        value = msgspec.json.encode(msgspec.structs.replace(self._holder, lease_ms=lease.ttl_ms))
        writes: list[Write] = [Delete(old) for old in ours if old != key]
        writes += [Put(key, value, lease.id), Put(self._last, value)]
        taken = False
        try:
            compare = ModRevision(self._last, 0 if last is None else last.mod_revision)
            taken = (await self._store.transact([compare], writes)).succeeded
            if taken:
                self._lease = lease
        except OutcomeUnknownError:
            # If it happened, the entry is ours, and the next try replaces it.
            pass
        finally:
            if not taken:
                with contextlib.suppress(FelixError):
                    await lease.revoke()
        return taken

    def _is_ours(self, holder: Holder | None) -> bool:
        return holder is not None and holder.lock != "" and holder.lock == self._holder.lock

    def _silence_ms(self, entry: Entry) -> int:
        holder = _decode(entry)
        return (self._holder if holder is None else holder).lease_ms + EXPIRY_SLACK_MS

    def _served_by(self, entry: Entry) -> UnavailableError:
        return UnavailableError(
            f"Another broker serves {self._region}: {_name(entry)} is registered in {self._store.where} and alive. "
            f"Broker {self._holder.broker} of {self._holder.folder} does not start beside it: both would lead every shard and "
            "sign the same audit log.",
            code=Code.SERVED_ELSEWHERE,
            hint="A region has one broker. Stop the other one first, or give this one a region of its own.",
        )


def is_holder(value: bytes) -> bool:
    """Whether a record says that a broker serves the region alone."""
    try:
        msgspec.json.decode(value, type=Holder)
    except msgspec.MsgspecError:
        return False
    return True


def _decode(entry: Entry) -> Holder | None:
    """None for an entry that cannot be read, such as a later version's: somebody else's in any case."""
    try:
        return msgspec.json.decode(entry.value, type=Holder)
    except msgspec.MsgspecError:
        return None


def _name(entry: Entry) -> str:
    holder = _decode(entry)
    return f"a broker that is registered as {entry.key}" if holder is None else str(holder)
