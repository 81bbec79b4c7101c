"""The stream keys of a region of several brokers: wrapped, in the metadata store, followed by every broker, with a copy on each one's disk.

The first key of an incarnation that is written is its key: it is made by compare-and-swap, together with the absence of the mark of a
deletion. A deleted stream's key goes in the transaction that deletes the stream (region.metadata.catalog). What the store loses otherwise, or
shows as it was before, is put back from the copies: keys and roots only go forward.

Invariants:
- a key is synced in this broker's copy before it is used here;
- a record is used only after it was unwrapped; one that fails, or is another key than the one known, changes nothing and is in `faults`;
- a deleted stream's key stays destroyed: a record that stands beside the mark of a deletion is not used, and is removed from the store;
- a mark that stands beside the record of its stream is no deletion's, which takes that record away with the same transaction: no key goes for it;
- no plain key leaves the process; cryptography and the disk are threads' work.

Order: `open`, once the broker is registered; then `ensure` before a stream's logs are opened; `close`. One event loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import aclosing, suppress
from typing import Final, NamedTuple, Protocol

from felix.backoff import Backoff, BackoffPolicy
from felix.bounded import BoundedMap
from felix.errors import Code, CorruptionError, FelixError, RequestError, TamperError, UnavailableError
from felix.names import StreamName
from felix.runtime.port import Runtime
from felix.tasks import end_tasks
from keys.errors import KeyProviderError, KeyUnknownError
from keys.hierarchy import KeyState, StreamEntry
from keys.shared import SharedKeyring
from keys.stream_key import (
    Roots,
    StreamKey,
    decode_roots,
    decode_stream_key,
    is_roots,
    prove_root,
    wrap_stream_key,
)
from region.cluster.stored_keys import StoredKeys
from region.metadata.port import CompactedError, MetadataStore, OutcomeUnknownError
from region.metadata.records import Keys, decode_stream
from region.metadata.transaction import Absent, Delete, Entry, Event, ModRevision, Put

log = logging.getLogger("felix.region.stream_keys")

RETRY: Final = BackoffPolicy(first_ms=100, ceiling_ms=5_000)
"""Between tries to reach a store that is away, or to write a copy."""
SWAPS_MAX: Final = 16
"""Tries at one record while others change it."""
DELETIONS_REMEMBERED_MAX: Final = 1_024
"""Of late: a key is not taken anew where the mark of its stream's deletion went as well."""
MARKS_ASKED_MAX: Final = 16
"""Marks of deletions that are asked for one by one; for more, as at a start, all are loaded."""
_ROOTS: Final = ""
"""Where the roots stand among incarnations."""
_INCARNATION: Final = re.compile(r"[0-9a-f]{32}")


class Copies(Protocol):
    """The file of a broker's copies (keys.store.KeyStore)."""

    bodies: list[bytes]

    @property
    def failure(self) -> str: ...
    def trouble(self) -> str: ...
    def open_again(self, bodies: Iterable[bytes]) -> None: ...
    def append(self, bodies: Iterable[bytes]) -> None: ...
    def rewrite(self, bodies: Iterable[bytes]) -> None: ...
    def close(self) -> None: ...


class _Seen(NamedTuple):
    """A record as the store showed it at a revision; None: it was gone."""

    revision: int
    value: bytes | None


class StreamKeys:
    """One per broker of several. `first_root`: the root key that a region without a record of its roots begins with; it blocks."""

    def __init__(
        self,
        store: MetadataStore,
        keyring: SharedKeyring,
        copies: Copies,
        first_root: Callable[[], bytes],
        broker: str,
        runtime: Runtime,
    ) -> None:
        self.faults: dict[str, FelixError] = {}
        """by incarnation (empty: the roots), why the store's record of it is not used"""
        self._store = store
        self._keyring = keyring
        self._copies = copies
        # One thread: what was begun is finished before the next, also where who asked for it is gone.
        self._disk = runtime.pool(1, "felix-stream-keys")
        self._first_root = first_root
        self._runtime = runtime
        self._stored = StoredKeys(store, keyring, broker)
        self._keys = Keys(keyring.region)
        self._prefix = f"{self._keys.prefix}keys/"
        self._copied: dict[str, bytes] = {}
        self._changed: dict[str, _Seen] = {}
        self._deleted: BoundedMap[str, int] = BoundedMap(DELETIONS_REMEMBERED_MAX)
        self._wake = asyncio.Event()
        self._draining = asyncio.Lock()
        self._revision = 0
        self._settled = 0
        self._roots_revision = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._others: list[Callable[[Event], None]] = []
        self._under_listeners: list[Callable[[], None]] = []

    def on_other(self, listener: Callable[[Event], None]) -> None:
        """Tell `listener`, before `open`, of what stands beside the keys of streams, and of each change of it and of the roots."""
        self._others.append(listener)

    def on_under(self, listener: Callable[[], None]) -> None:
        """Tell `listener` when keys here are under other roots than before."""
        self._under_listeners.append(listener)

    @property
    def keyring(self) -> SharedKeyring:
        """What seals and opens."""
        return self._keyring

    @property
    def roots(self) -> Roots:
        """As they are known."""
        assert self._keyring.roots is not None
        return self._keyring.roots

    @property
    def roots_revision(self) -> int:
        """At which revision they were written."""
        return self._roots_revision

    async def renew_roots(self) -> Roots:
        """The roots as the store has them now. Raises as `open`."""
        async with self._draining:
            await self._read_roots()
        return self.roots

    async def open(self) -> None:
        """Load, check this broker's root key, bring in what it had of its own, then follow.

        Raises UnavailableError where the store does not answer, KeyProviderError where the region's root key is not here or is another
        one, CorruptionError.
        """
        for body in self._copies.bodies:
            if is_roots(body):
                self._copied[_ROOTS] = body
            else:
                record = decode_stream_key(body, self._keyring.region, "A copy of a stream's key")
                self._copied[record.incarnation] = body
                # What was copied had been unwrapped.
                self._keyring.take(record)
        self._copies.bodies.clear()
        await self.renew_roots()
        await self._load()
        await self._adopt_own()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._follow(), name="stream keys"),
            loop.create_task(self._work(), name="stream keys' copies"),
        ]

    async def settle(self, revision: int) -> bool:
        """Act on what was heard of. Whether every deletion up to `revision` of the store is carried out in what this broker has of keys: its copies,
        keyrings of before and memory. Raises what keeps it from that."""
        if self._settled < revision:
            await self._drain()
        return self._settled >= revision

    async def is_deleted(self, number: str, name: str) -> bool:
        """Whether the stream of this name and incarnation (hex) was deleted: it has a mark, and no record any more. Raises UnavailableError."""
        if await self._store.get(self._keys.deleted(number)) is None:
            return False
        return number not in await self._living({number: name})

    @property
    def failure(self) -> str:
        """Why the file of copies takes none; empty where it does. From any thread."""
        return self._copies.failure

    def trouble(self) -> str:
        """The same, or that its disk does not answer, with what to do. From any thread."""
        return self._copies.trouble()

    def open_again(self) -> None:
        """Go on after a failure of the disk: a new file, with every copy that was made, takes the place of the old one. Blocks. Raises UnavailableError; then it can
        be tried again. What could not be copied meanwhile is tried by itself."""
        self._disk.submit(lambda: self._copies.open_again(list(self._copied.values()))).result()

    async def close(self) -> None:
        """Follow no more, and forget every secret."""
        await end_tasks(*self._tasks)
        await self._on_disk(self._copies.close)
        self._disk.shutdown(wait=False)
        await asyncio.to_thread(self._keyring.close)

    async def ensure(self, name: StreamName, incarnation: bytes) -> None:
        """Have the key of a stream, and make it where it has none.

        Raises UnavailableError where the store does not answer or the copy cannot be written, RequestError(NOT_FOUND) where the stream was
        deleted, CorruptionError and TamperError where the store's record is not the stream's, KeyProviderError.
        """
        if self._keyring.find(incarnation) is None:
            number = incarnation.hex()
            entry = await self._store.get(self._keys.stream_key(number))
            if entry is None:
                entry = await self._make(name, incarnation)
            self._note(number, _Seen(entry.mod_revision, entry.value))
            await self._drain()
        record = self._keyring.find(incarnation)
        if record is None:
            raise self.faults.get(incarnation.hex()) or _was_deleted(name)
        if record.stream != str(name):
            raise CorruptionError(
                f"{self._keys.stream_key(record.incarnation)} in the metadata store is the key of {record.stream}, not of {name}.",
                hint="Put the metadata store back as it was.",
            )
        await self._stored.fetch(incarnation)

    # -- making ----------------------------------------------------------------------------------------

    async def _make(self, name: StreamName, incarnation: bytes) -> Entry:
        """The key of the stream that is in the store from now on: this one, or the one that another broker made first."""

        def make() -> StreamKey:
            return self._keyring.make(name, incarnation, self.roots.active.key_id)

        entry = await self._put_first(incarnation.hex(), make)
        if entry is None:
            raise _was_deleted(name)
        return entry

    async def _put_first(self, incarnation: str, make: Callable[[], StreamKey]) -> Entry | None:
        """The first record of an incarnation, by us with what `make` gives in a thread, or by another broker; None where the stream was
        deleted."""
        key, mark = self._keys.stream_key(incarnation), self._keys.deleted(incarnation)
        for _ in range(SWAPS_MAX):
            value = (await asyncio.to_thread(make)).encode()
            roots = ModRevision(self._keys.key_roots(), self._roots_revision)
            try:
                result = await self._store.transact([Absent(key), Absent(mark), roots], [Put(key, value)])
                if result.succeeded:
                    return Entry(key, value, result.revision, result.revision)
            except OutcomeUnknownError:
                pass
            entry = await self._store.get(key)
            if entry is not None:
                return entry
            if await self._store.get(mark) is not None:
                return None
            await self.renew_roots()
        raise UnavailableError(
            f"{key} could not be written: it was changed by others {SWAPS_MAX} times meanwhile.",
            retry_after_ms=RETRY.ceiling_ms,
        )

    async def _former_streams(self) -> list[StreamEntry]:
        """What the key file of the region's folder has, from before its brokers shared keys. A damaged one keeps no broker from starting: no stream
        needs it, and what of it is to be destroyed waits (`SharedKeyring.destroy_own`)."""
        try:
            return await asyncio.to_thread(self._keyring.former_streams)
        except (RequestError, CorruptionError) as error:
            log.error(
                "The key file of the region's folder, which is of before its brokers shared keys, cannot be read: %s No stream needs it. What it may hold of "
                "deleted streams is not destroyed while it is there: put it back from a backup, or remove it.",
                error,
            )
            return []

    async def _adopt_own(self) -> None:
        """The keys that this broker made for itself, before keys were shared, become the keys of their streams."""
        own, keyring = self._keyring.own, self._keyring
        for former in await self._former_streams():
            if await self.is_deleted(former.incarnation.hex(), former.stream):
                await self._destroy_own(former.incarnation)
        if own is None:
            return
        moved = 0
        for held, secret in await asyncio.to_thread(own.stream_keys):
            if keyring.find(held.incarnation) is not None:
                continue

            def again(held: StreamEntry = held, secret: bytes = secret) -> StreamKey:
                return wrap_stream_key(
                    keyring.region,
                    keyring.provider,
                    stream=StreamName.parse(held.stream),
                    incarnation=held.incarnation,
                    key_id=held.key_id,
                    root=self.roots.active.key_id,
                    secret=secret,
                    at_ms=held.at_ms,
                )

            number = held.incarnation.hex()
            entry = await self._put_first(number, again)
            if entry is None:
                if await self.is_deleted(number, held.stream):
                    await self._destroy_own(held.incarnation)
                continue
            self._note(number, _Seen(entry.mod_revision, entry.value))
            moved += 1
        await self._drain()
        stored = await self._stored.bring()
        if moved or stored:
            log.info(
                "the keys of %d streams, and %d data keys, were brought into the metadata store",
                moved,
                stored,
            )

    async def _destroy_own(self, incarnation: bytes) -> None:
        for _ in range(SWAPS_MAX):
            try:
                await asyncio.to_thread(self._keyring.destroy_own, incarnation)
                return
            except RequestError as error:
                if error.code is not Code.CONFLICT:
                    raise
                # Brokers of one machine share the region's folder.
                await asyncio.sleep(RETRY.first_ms / 1_000)
        raise UnavailableError(
            "The keys of before the brokers shared them are in use by another process.",
            retry_after_ms=RETRY.ceiling_ms,
        )

    # -- roots -----------------------------------------------------------------------------------------

    async def _read_roots(self) -> None:
        """The roots as the store has them now; where it has none, the ones that were known last, or the first."""
        key = self._keys.key_roots()
        for _ in range(SWAPS_MAX):
            entry = await self._store.get(key)
            if entry is not None:
                await self._take_roots(entry)
                if self._roots_revision == entry.mod_revision:
                    return
            else:
                value = self._copied.get(_ROOTS)
                if value is None:
                    value = await asyncio.to_thread(self._begin)
                await self._swap_roots(0, value)
        raise UnavailableError(f"{key} was changed by others {SWAPS_MAX} times while it was read.")

    def _begin(self) -> bytes:
        root = self._first_root()
        found = prove_root(
            self._keyring.region, self._keyring.provider, root, KeyState.ACTIVE, self._keyring.now_ms()
        )
        return Roots((found,)).encode()

    async def _swap_roots(self, revision: int, value: bytes) -> None:
        with suppress(OutcomeUnknownError):
            await self._store.transact(
                [ModRevision(self._keys.key_roots(), revision)], [Put(self._keys.key_roots(), value)]
            )

    async def _take_roots(self, entry: Entry) -> None:
        """Go by these roots. Raises CorruptionError, KeyProviderError where the active one is not here. Where they are older than what is
        known, what is known is put back, and they are not taken."""
        region, key = self._keyring.region, entry.key
        found = decode_roots(entry.value, region, f"{key} in the metadata store")
        held = self._copied.get(_ROOTS)
        known, shown = self._keyring.known_roots, self._keyring.roots
        if known is None and held is not None:
            known = decode_roots(held, region, "The copy of the region's roots")
        if known is not None and found.went_back(known):
            log.error("%s shows root keys as they were before; what is known of them is put back.", key)
            await self._swap_roots(entry.mod_revision, known.encode())
            return
        await asyncio.to_thread(self._check_root, found)
        held_roots = await asyncio.to_thread(found.held, region, self._keyring.provider)
        remembered = found.remember(known, held_roots)
        if held != (copied := remembered.encode()):
            await self._copy({_ROOTS: copied}, set())
        self._keyring.roots, self._keyring.known_roots = found, remembered
        self._roots_revision = entry.mod_revision
        self.faults.pop(_ROOTS, None)
        if found != shown:
            self._tell(Event(key, entry))

    def _check_root(self, roots: Roots) -> None:
        root, region = roots.active, self._keyring.region
        try:
            root.check(region, self._keyring.provider)
        except KeyUnknownError as error:
            raise KeyProviderError(
                f"Root key {root.key} of {region}, under which its brokers keep the keys of streams, is not in this broker's key provider.",
                hint=f"Copy keys/roots/{root.key}.key from another broker's region folder into this one's, readable by its user alone.",
            ) from error
        except TamperError as error:
            raise KeyProviderError(
                f"This broker's key provider has another key under the id {root.key} than the other brokers of {region}.",
                hint=f"Copy keys/roots/{root.key}.key from another broker's region folder; or the metadata store was changed: put it back.",
            ) from error

    # -- following -------------------------------------------------------------------------------------

    async def _load(self) -> None:
        snapshot = await self._store.load(self._prefix)
        self._revision = snapshot.revision
        self._note(_ROOTS, _Seen(snapshot.revision, None))
        start = self._keys.stream_key("")
        found = {
            entry.key.removeprefix(start): _Seen(entry.mod_revision, entry.value)
            for entry in snapshot.entries
            if entry.key.startswith(start)
        }
        for gone in self._copied.keys() - found.keys() - {_ROOTS}:
            self._note(gone, _Seen(snapshot.revision, None))
        for number, seen in found.items():
            self._note(number, seen)
        for entry in snapshot.entries:
            if not entry.key.startswith(start):
                self._tell(Event(entry.key, entry))
        await self._drain()

    async def _follow(self) -> None:
        backoff, is_whole = Backoff(RETRY, self._runtime.random), True
        while True:
            try:
                if not is_whole:
                    await self._load()
                    is_whole = True
                changes = self._store.watch(self._prefix, self._revision + 1)
                async with aclosing(changes):
                    async for change in changes:
                        backoff.reset()
                        for event in change.events:
                            self._hear(event, change.revision)
                        self._revision = change.revision
            except CompactedError as error:
                log.warning("loading the keys of streams again: %s", error)
                is_whole = False
            except FelixError as error:
                log.warning("the keys of streams cannot be followed: %s", error)
            except Exception:
                # A broker that follows no more would keep deleted keys.
                log.exception("following the keys of streams failed")
                is_whole = False
            await asyncio.sleep(backoff.next_ms() / 1_000)

    def _hear(self, event: Event, revision: int) -> None:
        value = None if event.entry is None else event.entry.value
        start = self._keys.stream_key("")
        if event.key.startswith(start):
            self._note(event.key.removeprefix(start), _Seen(revision, value))
            return
        if event.key == self._keys.key_roots():
            self._note(_ROOTS, _Seen(revision, value))
        else:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        for listener in self._others:
            listener(event)

    def _note(self, number: str, seen: _Seen) -> None:
        if number != _ROOTS and not _INCARNATION.fullmatch(number):
            # Nothing of ours, and no stream goes by it.
            return
        waiting = self._changed.get(number)
        if waiting is not None and waiting.revision > seen.revision:
            return
        if seen.value is not None and (self._deleted.look(number) or 0) > seen.revision:
            return
        self._changed[number] = seen
        self._wake.set()

    async def _work(self) -> None:
        backoff = Backoff(RETRY, self._runtime.random)
        while True:
            await self._wake.wait()
            try:
                await self._drain()
                backoff.reset()
                continue
            except FelixError as error:
                log.error("the keys of streams cannot be kept: %s", error)
            except Exception:
                log.exception("keeping the keys of streams failed")
            await asyncio.sleep(backoff.next_ms() / 1_000)

    async def _drain(self) -> None:
        """Act on all that changed. Raises what keeps it from being acted on; then it is tried again."""
        async with self._draining:
            changed, self._changed = self._changed, {}
            through = self._revision
            self._wake.clear()
            try:
                if changed.pop(_ROOTS, None) is not None:
                    await self._follow_roots()
                await self._settle(changed)
                # Not the larger one: a store that was put back begins at an older revision.
                self._settled = through
            except BaseException:
                for number, seen in changed.items():
                    self._note(number, seen)
                raise

    async def _follow_roots(self) -> None:
        try:
            await self._read_roots()
        except UnavailableError:
            self._note(_ROOTS, _Seen(0, None))
            raise
        except FelixError as error:
            # Streams that are served go on; what is opened anew says why it cannot be.
            self.faults[_ROOTS] = error
            log.error("the root keys cannot be followed: %s", error)

    async def _settle(self, changed: dict[str, _Seen]) -> None:
        """Take, put back or destroy keys, as the store says."""
        found = {
            number: seen.value
            for number, seen in changed.items()
            if seen.value is not None and seen.value != self._copied.get(number)
        }
        for number in changed.keys() - found.keys():
            self.faults.pop(number, None)
        under = self._keyring.roots_in_use()
        shown = await self._read_marks(changed)
        marks = await self._without_living(shown, found)
        # What a store shows again after its deletion was carried out here is deleted, also where the mark is gone.
        deleted = marks.keys() | {number for number in changed if self._deleted.look(number) is not None}
        good, older = await asyncio.to_thread(
            self._judge, {number: value for number, value in found.items() if number not in deleted}
        )
        gone = [number for number, seen in changed.items() if seen.value is None]
        for number in deleted:
            self._deleted.put(number, changed[number].revision)
            self._keyring.forget(bytes.fromhex(number))
        await self._copy({number: found[number] for number in good}, deleted)
        for number, record in good.items():
            self._keyring.take(record)
            self.faults.pop(number, None)
        for number in deleted:
            await self._stored.drop(bytes.fromhex(number))
            await self._destroy_own(bytes.fromhex(number))
        for number, mark in marks.items():
            if changed[number].value is not None:
                await self._remove_again(number, changed[number], mark)
        for number in gone:
            if number not in deleted:
                await self._put_back(number, shown.get(number))
        for number in older:
            await self._put_newer(number, changed[number])
        if self._keyring.roots_in_use() != under:
            for listener in self._under_listeners:
                listener()

    def _judge(self, found: dict[str, bytes]) -> tuple[dict[str, StreamKey], list[str]]:
        """The records that may be taken, and of which ones a newer is known; of the others `faults` says why. Blocks on the provider."""
        good: dict[str, StreamKey] = {}
        older: list[str] = []
        for number, value in found.items():
            key = self._keys.stream_key(number)
            try:
                record = decode_stream_key(
                    value, self._keyring.region, f"{key} in the metadata store", number
                )
                if self._keyring.is_older(record):
                    older.append(number)
                    continue
                self._keyring.check(record)
            except FelixError as error:
                self.faults[number] = error
                log.error("a stream's key is not used: %s", error)
                continue
            good[number] = record
        return good, older

    async def _read_marks(self, numbers: Collection[str]) -> dict[str, Entry]:
        """The marks of those of these whose streams were deleted."""
        if len(numbers) > MARKS_ASKED_MAX:
            start = f"{self._keys.prefix}deleted/"
            entries = (await self._store.load(start)).entries
            return {
                number: entry for entry in entries if (number := entry.key.removeprefix(start)) in numbers
            }
        found = {number: await self._store.get(self._keys.deleted(number)) for number in numbers}
        return {number: entry for number, entry in found.items() if entry is not None}

    async def _without_living(self, marks: dict[str, Entry], found: dict[str, bytes]) -> dict[str, Entry]:
        """Those of these marks that a deletion can have left. `found`: the keys that the store shows now."""
        names = {
            number: name
            for number in marks
            # What was carried out here is not asked again.
            if self._deleted.look(number) is None and (name := self._name_of(number, found.get(number)))
        }
        living = await self._living(names)
        return {number: mark for number, mark in marks.items() if number not in living}

    def _name_of(self, number: str, value: bytes | None) -> str:
        """Whose key it is, as it is known here, or else as the store shows it; empty where neither says it."""
        known = self._keyring.find(bytes.fromhex(number))
        if known is not None or value is None:
            return "" if known is None else known.stream
        try:
            return decode_stream_key(
                value, self._keyring.region, self._keys.stream_key(number), number
            ).stream
        except FelixError:
            return ""

    async def _living(self, names: dict[str, str]) -> set[str]:
        """The incarnations, of these with the names of their streams, whose streams the store has."""
        start = f"{self._keys.prefix}streams/"
        if len(names) > MARKS_ASKED_MAX:
            entries = (await self._store.load(start)).entries
        else:
            asked = [await self._store.get(start + name) for name in {*names.values()}]
            entries = tuple(entry for entry in asked if entry is not None)
        living = set()
        for entry in entries:
            try:
                stream = decode_stream(entry.value, entry.key, entry.mod_revision)
            except FelixError:
                # Another's work to tell; a mark decides then.
                continue
            if names.get(stream.incarnation) == stream.name:
                living.add(stream.incarnation)
                log.error(
                    "%s in the metadata store says that %s was deleted, which is there: it was written by something other than Felix, and the stream's key is kept. "
                    "Remove it.",
                    self._keys.deleted(stream.incarnation),
                    stream.name,
                )
        return living

    async def _remove_again(self, number: str, shown: _Seen, mark: Entry) -> None:
        """The store shows the key of a stream that was deleted; or showed it before it heard of the deletion, and then this changes nothing."""
        key = self._keys.stream_key(number)
        with suppress(OutcomeUnknownError):
            result = await self._store.transact(
                [ModRevision(key, shown.revision), ModRevision(mark.key, mark.mod_revision)], [Delete(key)]
            )
            if result.succeeded:
                log.error(
                    "%s was put back into the metadata store, by something other than Felix, after its stream was deleted: it is not used, and is removed.",
                    key,
                )

    async def _put_back(self, number: str, mark: Entry | None) -> None:
        """The store lost a key that no deletion explains; `mark` is none's."""
        value = self._copied.get(number)
        if value is None:
            return
        key = self._keys.stream_key(number)
        log.error("%s is gone from the metadata store, and no stream was deleted: it is put back.", key)
        no_deletion = ModRevision(self._keys.deleted(number), 0 if mark is None else mark.mod_revision)
        try:
            await self._store.transact([Absent(key), no_deletion], [Put(key, value)])
        except OutcomeUnknownError:
            self._note(number, _Seen(self._revision, None))

    async def _put_newer(self, number: str, shown: _Seen) -> None:
        """The store shows a key as it was before its root was rotated."""
        key = self._keys.stream_key(number)
        log.error(
            "%s is shown as it was before the rotation of the root key: what is known of it is put back.", key
        )
        try:
            await self._store.transact([ModRevision(key, shown.revision)], [Put(key, self._copied[number])])
        except OutcomeUnknownError:
            self._note(number, shown)

    async def _copy(self, found: dict[str, bytes], gone: set[str]) -> None:
        """Sync copies of these, and none of those, on this broker's disk. Raises UnavailableError, KeyProviderError."""
        gone = gone & self._copied.keys()
        if not found and not gone:
            return
        if gone or found.keys() & self._copied.keys():
            kept = {number: body for number, body in self._copied.items() if number not in gone} | found
            await self._on_disk(lambda: self._copies.rewrite(kept.values()))
            self._copied = kept
        else:
            await self._on_disk(lambda: self._copies.append(found.values()))
            self._copied |= found

    async def _on_disk(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, work)


def _was_deleted(name: StreamName) -> RequestError:
    return RequestError(f"The stream {name} was deleted, and its key with it.", code=Code.NOT_FOUND)
