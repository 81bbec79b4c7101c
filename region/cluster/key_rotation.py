"""Rotating the keys of a region of several brokers: any of them may be asked, each follows by the store, and says so there.

Data keys: `keys/rotated` gets a new id, each broker ends the keys that it seals with and puts that id into its `keys/brokers/<id>`. Whoever asked waits for
the brokers that are alive. One that is not has fresh keys after its start.

The root key, each step by compare-and-swap, and resumed by the next call after a crash:
1. a root is made in this broker's provider, and `keys/roots` names it as pending;
2. each broker says which roots it holds; while one lacks the pending root, nothing is changed, and the error names it;
3. `keys/roots`: the pending root is active, the old one decrypt-only. New stream keys are wrapped under it from here on;
4. the others are wrapped anew, record by record, those of deleted streams excepted. Each names its root, so it opens before and after;
5. each broker says under which roots its copies are. The old root's file may go once all say: under the new one alone.

Destroying keys: a stream's goes in the transaction that deletes the stream, which leaves a record in `keys/destroyed`; retired roots go in the transaction
that takes them out of `keys/roots`. Each broker destroys what it has of them, and says up to which of these records it has, also after it was down, and
which roots among them it keeps because they are in use: such a record holds up no other. Whoever has the audit log then writes the leaf (region.streams.erasure).

No plain key, and no root, ever goes through the store. One event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Final, TypeVar

import msgspec

from felix.backoff import Backoff
from felix.errors import Code, CorruptionError, FelixError, RequestError, UnavailableError
from felix.names import StreamName
from felix.news import News
from felix.runtime.port import Runtime
from felix.tasks import end_tasks
from keys.hierarchy import KeyEvent, KeyState, next_state
from keys.key_id import KeyKind, kind_of
from keys.keyring import RootRotation
from keys.stream_key import ROOTS_MAX, Root, Roots, StreamKey, decode_stream_key, prove_root
from region.cluster.stream_keys import RETRY, SWAPS_MAX, StreamKeys
from region.metadata.destroyed_keys import DestroyedKeys, Held, remove_made_up
from region.metadata.port import MetadataStore, OutcomeUnknownError
from region.metadata.records import DeletedStream, DestroyedKey, Keys, decode, encode
from region.metadata.transaction import OPERATIONS_MAX, Absent, Compare, Entry, Event, ModRevision, Put

log = logging.getLogger("felix.region.stream_keys")

CONFIRM_S: Final = 10.0
"""How long a rotation waits for the other brokers; they answer within milliseconds while the store does."""
LOOK_S: Final = 2.0
"""How often a broker looks whether a root that it lacks was brought."""
REWRAPPED_AT_ONCE: Final = 60
"""Stream keys of one transaction, which makes two compares for each."""
assert 2 * REWRAPPED_AT_ONCE <= OPERATIONS_MAX
RETIRED_KEPT: Final = 16
"""Retired roots that `keys/roots` still names though nothing is wrapped under them: well below ROOTS_MAX."""
assert RETIRED_KEPT < ROOTS_MAX // 2

_Id = Annotated[str, msgspec.Meta(max_length=64)]
R = TypeVar("R")


class Rotated(msgspec.Struct, frozen=True):
    """The last rotation of data keys, and the one before it. `stream`: of which; empty: of all."""

    id: _Id
    before: _Id
    stream: str
    at_ms: int


class Followed(msgspec.Struct, frozen=True):
    """How far a broker follows: the last rotation of data keys, the roots that it holds, and those under which its copies of stream keys are
    (None: it did not say), as hex ids. `destroyed`: it has nothing any more of the keys whose records in `keys/destroyed` were first written at this
    revision or before, but for `kept`: roots that are in use there."""

    rotated: _Id
    roots: tuple[str, ...]
    under: tuple[str, ...] | None = None
    destroyed: int = 0
    kept: tuple[str, ...] = ()


class KeyRotation:
    """One per broker. `brokers`: every broker of the region, with the address of each that is alive."""

    def __init__(
        self,
        store: MetadataStore,
        keys: StreamKeys,
        broker: str,
        brokers: Callable[[], Mapping[str, str]],
        runtime: Runtime,
    ) -> None:
        self._store = store
        self._shared = keys
        self._keyring = keys.keyring
        self._keys = Keys(keys.keyring.region)
        self.ledger = DestroyedKeys(store, keys.keyring.region)
        """the keys that the region destroyed"""
        self.on_news: list[Callable[[], None]] = []
        """called when a key is destroyed, or a broker says how far it follows"""
        self._destroyed = 0
        self._kept: tuple[str, ...] = ()
        self._broker = broker
        self._brokers = brokers
        self._runtime = runtime
        self._followed: dict[str, Followed] = {}
        self._rotated: Rotated | None = None
        self._seen: Rotated | None = None
        self._said: Followed | None = None
        self._news = News()
        self._wake = asyncio.Event()
        self._one = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        keys.on_other(self._hear)
        keys.on_under(self._wake.set)

    async def start(self) -> None:
        """Follow from now on; what was rotated before this start is no news, as nothing was sealed yet."""
        self._seen = self._rotated
        self._task = asyncio.get_running_loop().create_task(self._follow(), name="key rotation")
        self._wake.set()

    async def close(self) -> None:
        """Follow no more."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None

    # -- what may be asked -----------------------------------------------------------------------------

    async def rotate_data(self, stream: StreamName | None) -> str:
        """Every broker takes fresh data keys (of `stream`, or of all). A sentence for a person, which names those that have not said so.

        Raises UnavailableError where the store does not answer: then nothing was rotated, or all of it once the store answers.
        """
        key, made = self._keys.key_rotated(), None
        for _ in range(SWAPS_MAX):
            entry = await self._store.get(key)
            before = None if entry is None else _decode(entry, Rotated)
            made = Rotated(
                self._runtime.random.randbytes(8).hex(),
                "" if before is None else before.id,
                "" if stream is None else str(stream),
                self._keyring.now_ms(),
            )
            compare = ModRevision(key, 0 if entry is None else entry.mod_revision)
            if (await self._store.transact([compare], [Put(key, msgspec.json.encode(made))])).succeeded:
                break
        else:
            raise UnavailableError(f"{key} was changed by others {SWAPS_MAX} times meanwhile.")
        silent = await self._silent(lambda followed: followed.rotated == made.id)
        what = "all streams" if stream is None else str(stream)
        if not silent:
            return f"Every broker takes fresh data keys for {what} with its next batches."
        return (
            f"The brokers take fresh data keys for {what} with their next batches. Not confirmed within {CONFIRM_S:.0f} s by {', '.join(silent)}: "
            "they follow once they reach the metadata store, or by their next start."
        )

    async def destroy_retired_roots(self, by: str) -> list[bytes]:
        """Have every broker destroy the roots that rotations retired; their ids. `by`: who asks (SPIFFE id).

        Raises RequestError(CONFLICT) where something is wrapped under one of them, or a broker's copies may be; UnavailableError, KeyProviderError,
        TamperError.
        """
        async with self._one:
            roots = await self._shared.renew_roots()
            active, retired = roots.active, roots.in_state(KeyState.DECRYPT_ONLY)
            if roots.in_state(KeyState.PENDING):
                raise _unfinished("A rotation of the root key is under way")
            await self._rewrap(active)
            if retired and (behind := await self._behind(active)):
                raise _unfinished(
                    f"The copies of stream keys at {', '.join(behind)} may be under a retired root key"
                )
            for root in retired:
                await self._drop_root(root, by)
            return [root.key_id for root in retired]

    def holding(self, created: int, key: str = "") -> tuple[str, ...]:
        """The brokers of the region that may have something of a destroyed key, by its id in hex, whose record was first written at this revision."""
        return tuple(
            sorted(
                name
                for name in self._brokers()
                if (said := self._followed.get(name)) is None or said.destroyed < created or key in said.kept
            )
        )

    def is_known(self, record: DestroyedKey) -> bool:
        """Whether this broker has the key still, whatever the store says."""
        if record.level == "root":
            return self._needs_root(record.key)
        return any(known.key == record.key for known in self._keyring.records())

    def is_foreign(self, held: Held) -> bool:
        """Whether this is no broker's record: its key is in use, or another kind of key than the record says (a data key, or a root as a
        stream's key). It gets no leaf, and nothing is destroyed for it."""
        record = held.record
        if _is_misnamed(record):
            return True
        if record.level == "root":
            return self._shared.roots.find(record.key) is not None
        # A broker that has yet to carry out the deletion knows the key still.
        return self._broker not in self.holding(held.created, record.key) and self.is_known(record)

    async def is_marked(self, record: DestroyedKey) -> bool:
        """Whether a stream was deleted with this key, as the record says it: they are written in one transaction. A root has no such mark, and
        one that cannot be read says nothing. Raises UnavailableError."""
        if record.level == "root":
            return True
        entry = await self._store.get(self._keys.deleted(record.incarnation)) if record.incarnation else None
        if entry is None:
            return False
        try:
            mark = decode(entry.value, DeletedStream, entry.key)
        except CorruptionError as error:
            log.error("a destroyed key gets no leaf: %s", error)
            return False
        # A region of one broker keeps its keys elsewhere, and its marks name none.
        return (mark.name, mark.by) == (record.stream, record.by) and mark.key in ("", record.key)

    async def rotate_root(self) -> RootRotation:
        """A new root wraps every stream key; see this module's docstring for the steps. The old one can still unwrap. While a rotation of
        before is not through at every broker, that one is gone on with, and no other root is made.

        Raises RequestError(CONFLICT) where a broker lacks the new root: what was done stays, and the next call goes on; UnavailableError,
        KeyProviderError, TamperError.
        """
        async with self._one:
            roots = await self._shared.renew_roots()
            active = roots.active
            retired = max(roots.in_state(KeyState.DECRYPT_ONLY), key=lambda root: root.at_ms, default=None)
            if retired is not None and not roots.in_state(KeyState.PENDING):
                # A rotation of before, which a crash interrupted, or in which a broker was down.
                done = await self._rewrap(active)
                behind = await self._behind(active)
                if done or behind:
                    return RootRotation(retired.key_id, active.key_id, done, behind)
            roots = await self._propose()
            (pending, *_) = roots.in_state(KeyState.PENDING)
            await self._require_everywhere(pending)
            new = (await self._activate(pending)).active
            done = await self._rewrap(new)
            return RootRotation(active.key_id, new.key_id, done, await self._behind(new))

    # -- the root, step by step ------------------------------------------------------------------------

    async def _propose(self) -> Roots:
        roots = await self._shared.renew_roots()
        if roots.in_state(KeyState.PENDING):
            return roots
        made = await asyncio.to_thread(self._make_root)
        return await self._change_roots(
            lambda known: known if known.in_state(KeyState.PENDING) else Roots((*known.roots, made))
        )

    def _make_root(self) -> Root:
        keyring = self._keyring
        root = keyring.provider.create_root()
        return prove_root(keyring.region, keyring.provider, root, KeyState.PENDING, keyring.now_ms())

    async def _require_everywhere(self, pending: Root) -> None:
        """Raises RequestError(CONFLICT) where a broker of the region does not hold the root."""
        lacking = await self._silent(lambda followed: pending.key in followed.roots, also_dead=True)
        if lacking:
            holders = sorted(name for name, said in self._followed.items() if pending.key in said.roots)
            raise RequestError(
                f"Root key {pending.key} was made, and is not used yet: {', '.join(lacking)} of the region's brokers have not said that they hold it.",
                code=Code.CONFLICT,
                hint=f"Copy keys/roots/{pending.key}.key from the region folder of {' or '.join(holders) or self._broker} into theirs, readable by its user alone, "
                "start those that are down, then rotate again: it goes on with this key.",
            )

    async def _activate(self, pending: Root) -> Roots:
        now_ms = self._keyring.now_ms()

        def activated(known: Roots) -> Roots:
            if pending.key not in {root.key for root in known.in_state(KeyState.PENDING)}:
                # Another broker was asked, too, and was first.
                return known
            return Roots(
                tuple(
                    msgspec.structs.replace(
                        root, state=next_state(root.state, KeyEvent.ACTIVATE), at_ms=now_ms
                    )
                    if root.key == pending.key
                    else msgspec.structs.replace(
                        root, state=next_state(root.state, KeyEvent.RETIRE), at_ms=now_ms
                    )
                    if root.state is KeyState.ACTIVE
                    else root
                    for root in self._without_the_oldest(known)
                )
            )

        return await self._change_roots(activated)

    def _without_the_oldest(self, known: Roots) -> list[Root]:
        used = {record.root for record in self._keyring.records()}
        idle = [root for root in known.roots if root.state is KeyState.DECRYPT_ONLY and root.key not in used]
        left = {root.key for root in sorted(idle, key=lambda root: root.at_ms)[:-RETIRED_KEPT]}
        return [root for root in known.roots if root.key not in left]

    async def _drop_root(self, root: Root, by: str) -> None:
        """Name it no more, and in the same transaction as destroyed."""
        key, gone = self._keys.key_roots(), self._keys.destroyed_key(root.key)
        record = DestroyedKey(key=root.key, level="root", by=by, at_ms=self._keyring.now_ms())
        for _ in range(SWAPS_MAX):
            roots = await self._shared.renew_roots()
            if roots.find(root.key) is None:
                return
            left = Roots(tuple(each for each in roots.roots if each.key != root.key))
            is_named = ModRevision(key, self._shared.roots_revision)
            with suppress(OutcomeUnknownError):
                await remove_made_up(self._store, gone, is_named)
                await self._store.transact(
                    [is_named, Absent(gone)], [Put(key, left.encode()), Put(gone, encode(record))]
                )
        raise UnavailableError(f"{key} or {gone} was changed by others {SWAPS_MAX} times meanwhile.")

    async def _change_roots(self, change: Callable[[Roots], Roots]) -> Roots:
        key = self._keys.key_roots()
        for _ in range(SWAPS_MAX):
            roots = await self._shared.renew_roots()
            wanted = change(roots)
            if wanted == roots:
                return roots
            with suppress(OutcomeUnknownError):
                await self._store.transact(
                    [ModRevision(key, self._shared.roots_revision)], [Put(key, wanted.encode())]
                )
        raise UnavailableError(f"{key} was changed by others {SWAPS_MAX} times meanwhile.")

    async def _rewrap(self, root: Root) -> int:
        """Wrap every record that is under another root anew; how many were."""
        start, after, done = self._keys.stream_key(""), "", 0
        while True:
            page = await self._store.range(start, limit=REWRAPPED_AT_ONCE, after=after)
            if not page.entries:
                return done
            done += await self._rewrap_these(page.entries, root)
            if not page.more:
                return done
            after = page.entries[-1].key

    async def _rewrap_these(self, entries: tuple[Entry, ...], root: Root) -> int:
        wrapped = await asyncio.to_thread(self._wrap_anew, entries, root)
        if not wrapped:
            return 0
        if await self._swap(wrapped):
            return len(wrapped)
        # One of them was changed, or its stream was deleted: then its key stays as it is, and whoever follows the store removes it.
        done = 0
        for one in wrapped:
            for _ in range(SWAPS_MAX):
                entry = await self._store.get(one.key)
                again = [] if entry is None else await asyncio.to_thread(self._wrap_anew, (entry,), root)
                mark = await self._store.get(self._mark(one))
                if not again or (mark is not None and await self._is_deleted(one)):
                    break
                if await self._swap(again, mark):
                    done += 1
                    break
        return done

    async def _is_deleted(self, wrapped: Entry) -> bool:
        number = wrapped.key.removeprefix(self._keys.stream_key(""))
        record = decode_stream_key(wrapped.value, self._keyring.region, wrapped.key, number)
        return await self._shared.is_deleted(number, record.stream)

    async def _swap(self, wrapped: list[Entry], mark: Entry | None = None) -> bool:
        """`mark`: the one of all of these that is no deletion's."""
        revision = 0 if mark is None else mark.mod_revision
        with suppress(OutcomeUnknownError):
            compares: list[Compare] = [ModRevision(entry.key, entry.mod_revision) for entry in wrapped]
            compares += [ModRevision(self._mark(entry), revision) for entry in wrapped]
            result = await self._store.transact(compares, [Put(entry.key, entry.value) for entry in wrapped])
            return result.succeeded
        return False

    def _mark(self, entry: Entry) -> str:
        return self._keys.deleted(entry.key.removeprefix(self._keys.stream_key("")))

    def _wrap_anew(self, entries: tuple[Entry, ...], root: Root) -> list[Entry]:
        """Those that are under another root, wrapped under this one, with the revision that they were read at. Blocks on the provider.
        A record that is not to be used stays as it is, and says so."""
        keyring, made = self._keyring, []
        for entry in entries:
            number = entry.key.removeprefix(self._keys.stream_key(""))
            record = decode_stream_key(
                entry.value, keyring.region, f"{entry.key} in the metadata store", number
            )
            if record.root == root.key:
                continue
            keyring.check(record)
            made.append(
                Entry(
                    entry.key, self._wrapped(record, root).encode(), entry.create_revision, entry.mod_revision
                )
            )
        return made

    def _wrapped(self, record: StreamKey, root: Root) -> StreamKey:
        keyring = self._keyring
        secret = record.secret(keyring.region, keyring.provider)
        bare = msgspec.structs.replace(record, root=root.key)
        return msgspec.structs.replace(
            bare, wrapped=keyring.provider.wrap(root.key_id, secret, bare.context(keyring.region))
        )

    async def _behind(self, root: Root) -> tuple[str, ...]:
        """The brokers of which nobody knows that their copies are all under this root, after CONFIRM_S at most."""
        return tuple(
            await self._silent(
                lambda followed: followed.under is not None and {*followed.under} <= {root.key},
                also_dead=True,
            )
        )

    # -- following -------------------------------------------------------------------------------------

    async def _silent(self, holds: Callable[[Followed], bool], *, also_dead: bool = False) -> list[str]:
        """The brokers of which it does not hold within CONFIRM_S; of those that are alive, or of all."""

        def lacking() -> list[str]:
            return sorted(
                name
                for name, address in self._brokers().items()
                if (also_dead or address or name == self._broker)
                and ((said := self._followed.get(name)) is None or not holds(said))
            )

        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_S):
                await self._news.until(lambda: not lacking())
        return lacking()

    def _hear(self, event: Event) -> None:
        start = self._keys.key_broker("")
        try:
            if self.ledger.hear(event):
                pass
            elif event.key.startswith(start):
                name = event.key.removeprefix(start)
                if event.entry is None:
                    self._followed.pop(name, None)
                else:
                    self._followed[name] = _decode(event.entry, Followed)
            elif event.key == self._keys.key_rotated():
                self._rotated = None if event.entry is None else _decode(event.entry, Rotated)
        except CorruptionError as error:
            log.error("%s", error)
            return
        self._wake.set()
        self._news.tell()
        for listener in self.on_news:
            listener()

    async def _follow(self) -> None:
        backoff, lacks = Backoff(RETRY, self._runtime.random), False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if lacks else None):
                    await self._wake.wait()
            self._wake.clear()
            try:
                lacks = await self._follow_once()
                backoff.reset()
                continue
            except FelixError as error:
                log.warning("rotations of keys cannot be followed: %s", error)
            except Exception:
                # A broker that follows none would go on with keys that were to end.
                log.exception("following rotations of keys failed")
            self._wake.set()
            await asyncio.sleep(backoff.next_ms() / 1_000)

    async def _follow_once(self) -> bool:
        """End what is to end, and say so. Whether the root that is to be the next one is missing here."""
        rotated = self._rotated
        if rotated is not None and rotated != self._seen:
            is_next = rotated.before == ("" if self._seen is None else self._seen.id)
            stream = StreamName.parse(rotated.stream) if rotated.stream and is_next else None
            self._keyring.rotate_data(stream)
            self._seen = rotated
        owes = not await self._follow_destroyed()
        roots = self._shared.roots
        held = await asyncio.to_thread(roots.held, self._keyring.region, self._keyring.provider)
        said = Followed(
            "" if self._seen is None else self._seen.id,
            held,
            self._keyring.roots_in_use(),
            self._destroyed,
            self._kept,
        )
        if said != self._said or self._followed.get(self._broker) != said:
            await self._store.transact(
                [], [Put(self._keys.key_broker(self._broker), msgspec.json.encode(said))]
            )
            self._said = said
        pending = {root.key for root in roots.in_state(KeyState.PENDING)}
        return owes or not pending <= set(held)

    async def _follow_destroyed(self) -> bool:
        """Destroy what this broker has of the keys that the region destroyed. False where something of that is to be tried again; nothing else waits for
        it. A root that is in use is kept, whatever its record says, and looked at again with every change of keys and roots."""
        newest = self.ledger.newest
        if newest == self._destroyed and not self._kept:
            return True
        try:
            if not await self._shared.settle(newest):
                return False
        except FelixError as error:
            log.warning("destroyed keys cannot be let go of: %s", error)
            return False
        kept, is_done = [], True
        for held in self.ledger.all():
            key = held.record.key
            if held.record.level != "root" or _is_misnamed(held.record):
                continue
            if newest == self._destroyed and key not in self._kept:
                continue
            if self._needs_root(key):
                kept.append(key)
                if key not in self._kept:
                    log.error(
                        "Root key %s is in use here, and the metadata store says that it is to be destroyed: it stays.",
                        key,
                    )
                continue
            try:
                await asyncio.to_thread(self._keyring.destroy_root, bytes.fromhex(key))
            except FelixError as error:
                log.warning("a root key that the region destroyed is here still: %s", error)
                is_done = False
                if key in self._kept:
                    kept.append(key)
        self._kept = tuple(sorted(kept))
        if is_done:
            self._destroyed = newest
        return is_done

    def _needs_root(self, root: str) -> bool:
        """Whether the region names it, or a key that this broker has is wrapped under it: whoever wrote that it is destroyed is no broker."""
        return self._shared.roots.find(root) is not None or root in self._keyring.roots_in_use()


def _is_misnamed(record: DestroyedKey) -> bool:
    """Whether the key, by its id, is no key of the record's level."""
    kind = KeyKind.ROOT if record.level == "root" else KeyKind.STREAM
    return kind_of(bytes.fromhex(record.key)) is not kind


def _unfinished(why: str) -> RequestError:
    return RequestError(
        f"{why}: no root key was destroyed.",
        code=Code.CONFLICT,
        hint="Start the brokers that are down, run felix keys rotate root until it names none, then try again.",
    )


def _decode(entry: Entry, kind: type[R]) -> R:
    try:
        return msgspec.json.decode(entry.value, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"{entry.key} in the metadata store cannot be read: {error}.") from error
