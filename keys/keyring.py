"""The keyring: what a broker asks for data keys, and what rotates and destroys them.

Invariants:
- a key id of another region or kind is refused before any lookup or cryptography (KeyScopeError);
- a data key is durable, wrapped, in the key file before it seals its first batch, and is given out for writing once;
- an unwrapped data key is compared with its commitment before it is used;
- a destroyed stream never gets a key again under the same incarnation, and its wrapped keys are gone from the file;
- what is unwrapped is bounded: DATA_KEYS_CACHED_MAX and STREAM_KEYS_CACHED_MAX.

Rotating the root, each step safe against a crash (docs/keys.md):
1. the provider makes a new root, and the key file names it as pending; an interrupted rotation goes on with that one;
2. every stream key is unwrapped under the old root and wrapped under the new, in memory;
3. a whole new key file with the new root active and the old one decrypt-only takes the place of the old file, in one
   step. A crash before it leaves the old file and a pending root; after it, the rotation is done. No data is touched.
The old root stays until `destroy_retired_roots`.

Threads: every method may be called from any thread; one lock serializes those that touch the tree. `ShardSealer.seal`
belongs to its shard's writer thread; it takes the keyring's lock only when a fresh data key is due. `rotate_data` from
another thread takes effect with the next batch. Everything here may block on the disk or on the key provider: never
on an event loop. One process has a region's keyring open at a time.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from weakref import WeakSet

from felix.batch import Batch
from felix.bounded import BoundedMap
from felix.errors import Code, CorruptionError, RequestError, TamperError
from felix.names import StreamName, parse_region
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from keys.envelope import INCARNATION_BYTES, SECRET_BYTES, BatchSealer, DataKey
from keys.errors import KeyDestroyedError, KeyProviderError, KeyScopeError, KeyUnknownError
from keys.file_provider import FileKeyProvider
from keys.hierarchy import (
    DataEntry,
    Hierarchy,
    KeyEvent,
    KeyState,
    RootEntry,
    StreamEntry,
    decode_entry,
    encode_entry,
    next_state,
)
from keys.key_id import RANDOM_BYTES, KeyKind, check_key_id, new_key_id
from keys.link import LinkSecrets, tag
from keys.provider import KeyProvider
from keys.store import KEY_FILE, KeyStore, MemoryKeyStore, create_store, read_entries
from keys.wrapping import NONCE_BYTES, unwrap, wrap

DATA_KEYS_CACHED_MAX: Final = 1_024
"""Unwrapped data keys in memory: a reader that goes back through epochs needs one after the other, a broker about one
per shard it reads."""
STREAM_KEYS_CACHED_MAX: Final = 256
"""Unwrapped stream keys in memory: saves a call to the key provider for every data key."""
ROOTS: Final = "roots"
"""The folder of the file provider, beside the key file."""


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key as `felix keys list` shows it; no secret, no wrapped bytes. `shard` and `epoch` are -1 above data keys."""

    level: str
    key_id: bytes
    state: KeyState
    at_ms: int
    stream: str = ""
    incarnation: bytes = b""
    shard: int = -1
    epoch: int = -1
    wrapped_by: bytes = b""


class RootRotation(NamedTuple):
    """What a rotation did: stream keys now wrapped under `new_root`. `behind`: of several brokers, those that have not said that all their copies
    are under it: they need the old root still."""

    old_root: bytes
    new_root: bytes
    stream_keys: int
    behind: tuple[str, ...] = ()


class WritingKeys(Protocol):
    """What a sealer asks for data keys."""

    @property
    def now_ms(self) -> Callable[[], int]: ...

    def data_key_for_writing(self, stream: StreamName, incarnation: bytes, shard: int, epoch: int) -> DataKey:
        """A data key that was never used."""
        ...


class ShardSealer:
    """Seals one shard's batches in one leader epoch, taking a fresh data key whenever one is due.

    - a batch that begins after `end_key` returned is sealed under a new key.
    """

    __slots__ = (
        "__weakref__", "_is_ended", "_keyring", "_lock", "_sealer", "epoch", "incarnation", "shard", "stream",
    )  # fmt: skip

    def __init__(
        self, keyring: WritingKeys, stream: StreamName, incarnation: bytes, shard: int, epoch: int
    ) -> None:
        self._keyring = keyring
        self.stream = stream
        self.incarnation = incarnation
        self.shard = shard
        self.epoch = epoch
        self._sealer: BatchSealer | None = None
        self._is_ended = False
        self._lock = threading.Lock()

    def seal(self, batch: Batch) -> Batch:
        """The sealed batch. Blocks on the disk where a fresh data key is due.

        Raises as `BatchSealer.seal` and `Keyring.data_key_for_writing` do.
        """
        with self._lock:
            now_ms = self._keyring.now_ms()
            if self._is_ended or self._sealer is None or self._sealer.due(now_ms):
                # First: whoever ends the key while the next one is taken ends that one.
                self._is_ended, self._sealer = False, None
                key = self._keyring.data_key_for_writing(
                    self.stream, self.incarnation, self.shard, self.epoch
                )
                self._sealer = BatchSealer(key, now_ms)
            return self._sealer.seal(batch)

    def data_key(self) -> DataKey | None:
        """The key that sealed the last batch, for the log's segment header; None before the first."""
        sealer = self._sealer
        return None if sealer is None else sealer.data_key

    @property
    def started_ms(self) -> int:
        """When the key in use began to seal; 0 before the first batch."""
        sealer = self._sealer
        return 0 if sealer is None else sealer.started_ms

    def end_key(self) -> None:
        """The next batch takes a fresh key. Waits for nothing."""
        self._is_ended = True


class Keyring:
    """All keys of one region. Make one with `create_keyring` and `open_keyring`."""

    def __init__(
        self,
        region: str,
        provider: KeyProvider,
        store: KeyStore | MemoryKeyStore,
        *,
        runtime: Runtime = REAL,
    ) -> None:
        """Reads the tree from `store`, which it closes with itself. Raises CorruptionError, KeyProviderError."""
        if provider.region != region:
            raise KeyScopeError(
                f"The key provider holds root keys of {provider.region}, and this is {region}."
            )
        self.region = region
        self.now_ms = runtime.clock.now_ms
        self._random = runtime.random.randbytes
        self._provider = provider
        self._store = store
        self._lock = threading.RLock()
        self._tree = Hierarchy(region)
        for body in store.bodies:
            self._tree.apply(decode_entry(body))
        store.bodies.clear()
        root = self._tree.active_root()
        if root is None:
            raise CorruptionError(f"The key file of {region} names no active root key.")
        if root not in provider.root_key_ids():
            raise KeyProviderError(
                f"The active root key {root.hex()} of {region} is not in its key provider.",
                hint="Bring the root key back; without it no stream of the region can be read.",
            )
        self._stream_secrets: BoundedMap[bytes, bytes] = BoundedMap(STREAM_KEYS_CACHED_MAX)
        self._data_keys: BoundedMap[bytes, DataKey] = BoundedMap(DATA_KEYS_CACHED_MAX)
        self._active: dict[tuple[bytes, int], bytes] = {}
        self._sealers: WeakSet[ShardSealer] = WeakSet()

    @property
    def failure(self) -> str:
        """Why its file takes no keys; empty where it does. From any thread."""
        return self._store.failure

    def trouble(self) -> str:
        """The same, or that the file's disk does not answer, with what to do. From any thread."""
        return self._store.trouble()

    def open_again(self) -> None:
        """Go on after a failure of the file's disk: a new file, with every key that was given out and none that was refused, takes its place. Blocks. Raises
        UnavailableError; then it can be tried again."""
        with self._lock:
            self._store.open_again([encode_entry(entry) for entry in self._tree.entries()])

    @property
    def cut_bytes(self) -> int:
        """How much of a torn tail opening cut off the key file: 0 unless a crash interrupted a write."""
        return self._store.cut_bytes

    def close(self) -> None:
        """Let another process have the key file. Nothing can be asked afterwards."""
        with self._lock:
            self._store.close()
            self._data_keys.clear()
            self._stream_secrets.clear()

    # -- sealing and opening ---------------------------------------------------------------------------

    def sealer(self, stream: StreamName, incarnation: bytes, shard: int, epoch: int) -> ShardSealer:
        """What a shard's log seals with in one leader epoch. No key is made before the first batch."""
        sealer = ShardSealer(self, stream, incarnation, shard, epoch)
        with self._lock:
            self._sealers.add(sealer)
        return sealer

    def data_key_for_writing(self, stream: StreamName, incarnation: bytes, shard: int, epoch: int) -> DataKey:
        """A data key that was never used; durable when this returns. Each call gives another.

        Most callers want `sealer`, which knows when to ask. Raises KeyDestroyedError, UnavailableError where the disk is full or fails,
        KeyProviderError, KeyUnknownError where the root is gone.
        """
        if len(incarnation) != INCARNATION_BYTES:
            raise RequestError(f"An incarnation has {INCARNATION_BYTES} bytes, not {len(incarnation)}.")
        with self._lock:
            parent = self._stream_key_for_writing(stream, incarnation)
            key = DataKey(
                new_key_id(self.region, KeyKind.DATA, self._random(RANDOM_BYTES)),
                self.region,
                stream,
                incarnation,
                shard,
                epoch,
                self._random(SECRET_BYTES),
            )
            bare = DataEntry(key.key_id, parent.key_id, shard, epoch, b"", key.commitment(), self.now_ms())
            wrapped = wrap(
                self._stream_secret(parent),
                parent.key_id,
                key.secret,
                bare.context(self.region, parent),
                self._random(NONCE_BYTES),
            )
            self._append(
                DataEntry(bare.key_id, bare.stream_key_id, shard, epoch, wrapped, bare.commitment, bare.at_ms)
            )
            self._active[parent.key_id, shard] = key.key_id
            self._cache(key)
            return key

    def data_key(self, key_id: bytes) -> DataKey:
        """The key that a sealed batch names, for opening it.

        Raises KeyScopeError for an id of another region or kind, KeyUnknownError, KeyDestroyedError, TamperError
        where the stored key was changed, KeyProviderError.
        """
        check_key_id(key_id, self.region, KeyKind.DATA)
        with self._lock:
            cached = self._data_keys.use(key_id)
            if cached is not None:
                return cached
            entry = self._tree.data.get(key_id)
            if entry is None:
                raise KeyUnknownError(
                    f"Data key {key_id.hex()} is not in the key file of {self.region}.",
                    hint="Was the key file restored from a backup that is older than the data?",
                )
            parent = self._tree.streams[entry.stream_key_id]
            if parent.state is KeyState.DESTROYED:
                raise _destroyed(parent)
            key = unwrap_data_key(
                self.region,
                entry,
                parent.stream,
                parent.incarnation,
                parent.key_id,
                self._stream_secret(parent),
            )
            key.claim_sealer()
            self._cache(key)
            return key

    def opening_key(
        self, stream: StreamName, incarnation: bytes, shard: int, epoch: int, key_id: bytes
    ) -> DataKey:
        """The key that a sealed batch of this place names. A stored key says itself where it belongs, so the id suffices here.

        Raises as `data_key`.
        """
        return self.data_key(key_id)

    def stream_keys(self) -> list[tuple[StreamEntry, bytes]]:
        """Every stream key that is not destroyed, with its secret: what becomes the region's once it has several brokers.

        Raises TamperError, KeyProviderError.
        """
        with self._lock:
            return [
                (entry, self._stream_secret(entry))
                for entry in self._tree.streams.values()
                if entry.state is KeyState.ACTIVE
            ]

    def live_streams(self) -> list[StreamEntry]:
        """Every stream key that is not destroyed."""
        with self._lock:
            return [entry for entry in self._tree.streams.values() if entry.state is KeyState.ACTIVE]

    def state_of(self, key_id: bytes) -> KeyState | None:
        """The state of a root or stream key; None where it is not known."""
        with self._lock:
            entry = self._tree.roots.get(key_id) or self._tree.streams.get(key_id)
            return None if entry is None else entry.state

    def data_entries(self) -> dict[bytes, list[DataEntry]]:
        """The data keys of each incarnation, wrapped; of destroyed ones none."""
        found: dict[bytes, list[DataEntry]] = {}
        with self._lock:
            for entry in self._tree.data.values():
                parent = self._tree.streams[entry.stream_key_id]
                if parent.state is KeyState.ACTIVE:
                    found.setdefault(parent.incarnation, []).append(entry)
        return found

    def has(self, key_id: bytes) -> bool:
        """Whether it knows a data key of this id."""
        with self._lock:
            return key_id in self._tree.data

    def link_secrets(
        self, stream: StreamName, incarnation: bytes, grant_id: str, terms_hash: bytes, pseudonyms: str
    ) -> LinkSecrets:
        """What a bridge derives a grant's keys from (keys.link): the same each time, until the stream is destroyed.

        Raises KeyDestroyedError, KeyProviderError.
        """
        with self._lock:
            entry = self._stream_key_for_writing(stream, incarnation)
            return LinkSecrets.of_stream(self._stream_secret(entry), grant_id, terms_hash, pseudonyms)

    def tag(self, stream: StreamName, incarnation: bytes, shard: int, purpose: str, data: bytes) -> bytes:
        """See keys.shared.RegionKeys. Raises KeyDestroyedError, KeyProviderError."""
        with self._lock:
            secret = self._stream_secret(self._stream_key_for_writing(stream, incarnation))
        return tag(secret, purpose, data, self.region, str(stream), incarnation, shard)

    # -- rotation and destruction ----------------------------------------------------------------------

    def rotate_data(self, stream: StreamName | None = None) -> int:
        """The next batch of every shard (of `stream`, or of all) gets a fresh data key. Returns how many keys ended.

        No key is made here, so a shard that is not written to costs nothing.
        """
        with self._lock:
            sealers = [s for s in self._sealers if stream is None or s.stream == stream]
            ended = [
                place
                for place in self._active
                if stream is None or self._tree.streams[place[0]].stream == str(stream)
            ]
            for place in ended:
                del self._active[place]
        for sealer in sealers:
            sealer.end_key()
        return len(ended)

    def rotate_root(self) -> RootRotation:
        """A new root wraps every stream key; see this module's docstring for the steps. The old one can still unwrap.

        Sealing goes on meanwhile; fresh data keys wait. Raises KeyProviderError, TamperError, UnavailableError: in
        each case the old root is still the active one.
        """
        with self._lock:
            old = self._tree.active_root()
            assert old is not None
            now = self.now_ms()
            new = self._tree.pending_root()
            if new is None:
                new = self._provider.create_root()
                self._append(RootEntry(new, KeyState.PENDING, now))
            plan = self._tree.copy()
            plan.apply(RootEntry(old, next_state(KeyState.ACTIVE, KeyEvent.RETIRE), now))
            plan.apply(RootEntry(new, next_state(KeyState.PENDING, KeyEvent.ACTIVATE), now))
            moved = plan.wrapped_under(old)
            for entry in moved:
                context = entry.context(self.region)
                secret = self._provider.unwrap(old, entry.wrapped, context)
                wrapped = self._provider.wrap(new, secret, context)
                plan.apply(
                    StreamEntry(
                        entry.key_id,
                        entry.stream,
                        entry.incarnation,
                        new,
                        wrapped,
                        entry.state,
                        entry.at_ms,
                    )
                )
            self._replace_tree(plan)
            return RootRotation(old, new, len(moved))

    def retired_roots(self) -> list[bytes]:
        """The ids of the roots that a rotation retired and that are not destroyed, those that still wrap a key left out."""
        with self._lock:
            return [
                root.key_id
                for root in self._tree.roots.values()
                if root.state is KeyState.DECRYPT_ONLY and not self._tree.wrapped_under(root.key_id)
            ]

    def destroy_root(self, key_id: bytes) -> None:
        """Destroy a retired root that wraps nothing any more; again is no error. From then on older copies of the key file cannot be used.

        Raises RequestError(CONFLICT) where it is in use, KeyUnknownError, KeyProviderError.
        """
        with self._lock:
            root = self._tree.roots.get(key_id)
            if root is None:
                raise KeyUnknownError(f"The key file of {self.region} names no root key {key_id.hex()}.")
            if root.state is KeyState.DESTROYED:
                return
            if root.state is not KeyState.DECRYPT_ONLY or self._tree.wrapped_under(key_id):
                raise RequestError(
                    f"Root key {key_id.hex()} is in use.",
                    code=Code.CONFLICT,
                    hint="Rotate the root key first: felix keys rotate root.",
                )
            self._provider.destroy(key_id)
            state = next_state(root.state, KeyEvent.DESTROY)
            self._append(RootEntry(key_id, state, self.now_ms()))

    def destroy_retired_roots(self) -> list[bytes]:
        """Destroy every root that a rotation retired and nothing needs any more. Returns their ids.

        Do it once no older copy of the key file is needed, and after `destroy` where the destruction has to hold for those copies too. Raises
        KeyProviderError.
        """
        with self._lock:
            gone = self.retired_roots()
            for key_id in gone:
                self.destroy_root(key_id)
            return gone

    def destroy(self, stream: StreamName, incarnation: bytes | None = None) -> list[bytes]:
        """Destroy the keys of every incarnation of a stream, or of one: what they sealed can never be read again here.

        Returns the ids of the stream keys that are destroyed now, none where there were none. The wrapped keys are
        gone from the key file when this returns, and from memory once no object references them. Raises UnavailableError: nothing is destroyed then,
        and it is to be tried again.
        """
        with self._lock:
            plan = self._tree.copy()
            gone = {
                entry.key_id
                for entry in plan.streams.values()
                if entry.stream == str(stream)
                and incarnation in (None, entry.incarnation)
                and entry.state is not KeyState.DESTROYED
            }
            if not gone:
                return []
            now = self.now_ms()
            for key_id in gone:
                entry = plan.streams[key_id]
                state = next_state(entry.state, KeyEvent.DESTROY)
                plan.apply(StreamEntry(key_id, entry.stream, entry.incarnation, b"", b"", state, now))
            for data in list(plan.data.values()):
                if data.stream_key_id in gone:
                    plan.apply(
                        DataEntry(data.key_id, data.stream_key_id, data.shard, data.epoch, b"", b"", now)
                    )
                    self._data_keys.pop(data.key_id)
            self._replace_tree(plan)
            for key_id in gone:
                self._stream_secrets.pop(key_id)
        self.rotate_data(stream)
        return sorted(gone)

    def list(self, stream: StreamName | None = None) -> list[KeyInfo]:
        """Every key of the region, or of one stream with the roots: roots, then stream keys, then data keys."""
        with self._lock:
            tree, active = self._tree, set(self._active.values())
            found = [
                KeyInfo("root", root.key_id, root.state, root.at_ms)
                for root in sorted(tree.roots.values(), key=lambda root: (root.at_ms, root.key_id))
            ]
            streams = [s for s in tree.streams.values() if stream is None or s.stream == str(stream)]
            found += [
                KeyInfo("stream", s.key_id, s.state, s.at_ms, s.stream, s.incarnation, wrapped_by=s.root_id)
                for s in streams
            ]
            wanted = {s.key_id: s for s in streams}
            for data in tree.data.values():
                parent = wanted.get(data.stream_key_id)
                if parent is None:
                    continue
                if parent.state is KeyState.DESTROYED:
                    state = KeyState.DESTROYED
                else:
                    state = KeyState.ACTIVE if data.key_id in active else KeyState.DECRYPT_ONLY
                found.append(
                    KeyInfo(
                        "data",
                        data.key_id,
                        state,
                        data.at_ms,
                        parent.stream,
                        parent.incarnation,
                        data.shard,
                        data.epoch,
                        parent.key_id,
                    )
                )
            return found

    # -- inside, under the lock ------------------------------------------------------------------------

    def _stream_key_for_writing(self, stream: StreamName, incarnation: bytes) -> StreamEntry:
        key_id = self._tree.by_incarnation.get((str(stream), incarnation))
        if key_id is not None:
            entry = self._tree.streams[key_id]
            if entry.state is KeyState.DESTROYED:
                raise _destroyed(entry)
            return entry
        root = self._tree.active_root()
        assert root is not None
        key_id = new_key_id(self.region, KeyKind.STREAM, self._random(RANDOM_BYTES))
        secret = self._random(SECRET_BYTES)
        bare = StreamEntry(key_id, str(stream), incarnation, root, b"", KeyState.ACTIVE, self.now_ms())
        wrapped = self._provider.wrap(root, secret, bare.context(self.region))
        entry = StreamEntry(key_id, str(stream), incarnation, root, wrapped, KeyState.ACTIVE, bare.at_ms)
        self._append(entry)
        return entry

    def _stream_secret(self, entry: StreamEntry) -> bytes:
        secret = self._stream_secrets.use(entry.key_id)
        if secret is None:
            secret = self._provider.unwrap(entry.root_id, entry.wrapped, entry.context(self.region))
            self._stream_secrets.put(entry.key_id, secret)
        return secret

    def _append(self, entry: RootEntry | StreamEntry | DataEntry) -> None:
        self._store.append([encode_entry(entry)])
        self._tree.apply(entry)

    def _replace_tree(self, plan: Hierarchy) -> None:
        self._store.rewrite([encode_entry(entry) for entry in plan.entries()])
        self._tree = plan

    def _cache(self, key: DataKey) -> None:
        self._data_keys.put(key.key_id, key)


def unwrap_data_key(
    region: str, entry: DataEntry, stream: str, incarnation: bytes, stream_key_id: bytes, stream_secret: bytes
) -> DataKey:
    """A stored data key, by the secret of the stream key that wraps it. Raises TamperError."""
    secret = unwrap(
        stream_secret, stream_key_id, entry.wrapped, entry.context_of(region, stream, incarnation)
    )
    key = DataKey(
        entry.key_id, region, StreamName.parse(stream), incarnation, entry.shard, entry.epoch, secret
    )
    if not hmac.compare_digest(key.commitment(), entry.commitment):
        raise TamperError(
            f"Data key {entry.key_id.hex()} of {stream} is not the one its commitment stands for."
        )
    return key


def _destroyed(entry: StreamEntry) -> KeyDestroyedError:
    return KeyDestroyedError(
        f"The key of {entry.stream} was destroyed; what was written to it cannot be read or added to.",
        hint="A stream that is created anew under this name has a key of its own.",
    )


def open_provider(folder: Path, region: str, runtime: Runtime = REAL) -> KeyProvider:
    """Where the root keys are that the key file in `folder` names: files in `folder/roots`. Every command and broker comes by its provider
    here, whether one broker has the region's keys or several share them. Blocks."""
    return FileKeyProvider(folder / ROOTS, region, runtime.random)


def create_keyring(
    folder: Path,
    region: str,
    *,
    provider: KeyProvider | None = None,
    runtime: Runtime = REAL,
) -> None:
    """The first root key and key file of a region, in `folder`; roots go to `open_provider` unless a provider is given.

    Raises RequestError(ALREADY_EXISTS) where there is a key file, KeyProviderError.
    """
    parse_region(region)
    if (folder / KEY_FILE).exists():
        raise RequestError(
            f"{folder} holds the keys of a region already; they are not overwritten.",
            code=Code.ALREADY_EXISTS,
            hint="Whatever was sealed under them needs them.",
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    roots = provider or open_provider(folder, region, runtime)
    state = next_state(KeyState.PENDING, KeyEvent.ACTIVATE)
    create_store(
        folder, region, [encode_entry(RootEntry(roots.create_root(), state, runtime.clock.now_ms()))]
    )


def active_root(folder: Path, region: str) -> bytes | None:
    """Which root key the key file in `folder` names as the active one, read without taking its lock; None where there is no file.

    Raises RequestError(FORBIDDEN), CorruptionError.
    """
    if not (folder / KEY_FILE).exists():
        return None
    return _read_tree(folder, region).active_root()


def live_streams(folder: Path, region: str) -> list[StreamEntry]:
    """The stream keys of the key file in `folder` that are not destroyed, read without taking its lock. Raises as `active_root`, and
    RequestError(NOT_FOUND)."""
    tree = _read_tree(folder, region)
    return [entry for entry in tree.streams.values() if entry.state is KeyState.ACTIVE]


def _read_tree(folder: Path, region: str) -> Hierarchy:
    tree = Hierarchy(region)
    for body in read_entries(folder, region):
        tree.apply(decode_entry(body))
    return tree


def open_keyring(
    folder: Path,
    region: str,
    *,
    provider: KeyProvider | None = None,
    runtime: Runtime = REAL,
) -> Keyring:
    """The keyring of a region, locked for this process until it is closed.

    Raises RequestError: NOT_FOUND, CONFLICT where a process has it, FORBIDDEN, WRONG_REGION; CorruptionError;
    KeyProviderError where the active root is not there.
    """
    parse_region(region)
    store = KeyStore(folder, region, monotonic=runtime.clock.monotonic)
    try:
        roots = provider or open_provider(folder, region, runtime)
        return Keyring(region, roots, store, runtime=runtime)
    except BaseException:
        store.close()
        raise
