"""The keyring of one of several brokers: stream keys come from the region's metadata store, and data keys are derived from them.

Invariants:
- a key is taken after it was unwrapped once (`check`), and never replaced by another key of the same incarnation;
- each sealer draws the id of its data key from fresh random bytes, so nothing that a store, a disk or another broker says can bring a
  nonce back;
- a key that was forgotten opens and seals nothing more, here;
- what is unwrapped is bounded, as in `keys.keyring`; what is known of wrapped keys is one small record for each stream.

What such a broker sealed while each had its own keyring names stored data keys: `own` has this broker's, and `take_stored` takes those of others.

Threads: every method may be called from any thread. `take`, `forget`, `find` and `rotate_data` wait for nothing. The others may block on the
key provider: never on an event loop. No lock is held while they do.
"""

from __future__ import annotations

import hmac
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet

from felix.bounded import BoundedMap
from felix.errors import Code, CorruptionError, RequestError, TamperError
from felix.names import StreamName
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from keys.envelope import SECRET_BYTES, DataKey
from keys.errors import KeyProviderError, KeyScopeError, KeyUnknownError
from keys.hierarchy import DataEntry, KeyState, StreamEntry
from keys.key_id import RANDOM_BYTES, KeyKind, kind_of, new_key_id
from keys.keyring import (
    DATA_KEYS_CACHED_MAX,
    STREAM_KEYS_CACHED_MAX,
    KeyInfo,
    Keyring,
    ShardSealer,
    active_root,
    live_streams,
    open_keyring,
    open_provider,
    unwrap_data_key,
)
from keys.link import LinkSecrets, tag
from keys.provider import KeyProvider
from keys.store import KEY_FILE, KeyStore, create_store
from keys.stream_key import (
    Roots,
    StreamKey,
    decode_stream_key,
    derive_data_key,
    is_roots,
    wrap_stream_key,
)

COPIES: Final = "shared"
"""The folder of a broker's copies of stream keys, in its folder of keys: a key file whose entries are the store's records."""


class RegionKeys(Protocol):
    """What a broker asks of its keys, alone or as one of several."""

    def sealer(self, stream: StreamName, incarnation: bytes, shard: int, epoch: int) -> ShardSealer:
        """What a shard's log seals with in one leader epoch."""
        ...

    def opening_key(
        self, stream: StreamName, incarnation: bytes, shard: int, epoch: int, key_id: bytes
    ) -> DataKey:
        """The key that a sealed batch of this place names."""
        ...

    def link_secrets(
        self, stream: StreamName, incarnation: bytes, grant_id: str, terms_hash: bytes, pseudonyms: str
    ) -> LinkSecrets:
        """What a bridge derives a grant's keys from."""
        ...

    def tag(self, stream: StreamName, incarnation: bytes, shard: int, purpose: str, data: bytes) -> bytes:
        """What only who has this stream's key can say of `data`: HMAC-SHA-256 under a key of one shard and purpose (keys.link.tag)."""
        ...

    def rotate_data(self, stream: StreamName | None = None) -> int:
        """The next batch of every shard gets a fresh data key."""
        ...

    def list(self, stream: StreamName | None = None) -> list[KeyInfo]:
        """Keys by level, without secrets."""
        ...


@dataclass(frozen=True, slots=True)
class _Held:
    """A stream key in use: its record, and what it unwrapped to."""

    record: StreamKey
    secret: bytes


class SharedKeyring:
    """One per broker of several. `own`: the keyring that it had before keys were shared; it is closed with this one."""

    def __init__(
        self,
        region: str,
        provider: KeyProvider,
        own: Keyring | None = None,
        *,
        former: Path | None = None,
        runtime: Runtime = REAL,
    ) -> None:
        """`former`: the folder of the keyring that the region had while one broker served it, which nobody has open."""
        if provider.region != region:
            raise KeyScopeError(
                f"The key provider holds root keys of {provider.region}, and this is {region}."
            )
        self.region = region
        self.provider = provider
        self.own = own
        self._former = former
        self._runtime = runtime
        self.now_ms = runtime.clock.now_ms
        self.roots: Roots | None = None
        """as the store says; set by who follows it"""
        self.known_roots: Roots | None = None
        """those of these that are or were held here, and those that the store named before; set with `roots`"""
        self._random = runtime.random.randbytes
        self._lock = threading.Lock()
        self._records: dict[bytes, StreamKey] = {}
        self._under: Counter[str] = Counter()
        self._held: BoundedMap[bytes, _Held] = BoundedMap(STREAM_KEYS_CACHED_MAX)
        self._data_keys: BoundedMap[tuple[bytes, bytes, int, int], DataKey] = BoundedMap(DATA_KEYS_CACHED_MAX)
        self._sealers: WeakSet[ShardSealer] = WeakSet()
        self._stored: dict[bytes, dict[bytes, DataEntry]] = {}

    def close(self) -> None:
        """Forget every secret. Nothing can be asked afterwards."""
        with self._lock:
            self._records.clear()
            self._under.clear()
            self._stored.clear()
            self._held.clear()
            self._data_keys.clear()
        if self.own is not None:
            self.own.close()

    # -- what the store says ---------------------------------------------------------------------------

    def find(self, incarnation: bytes) -> StreamKey | None:
        """The key of an incarnation, where it is known."""
        with self._lock:
            return self._records.get(incarnation)

    def records(self) -> list[StreamKey]:
        """Every key that is known."""
        with self._lock:
            return list(self._records.values())

    def make(self, stream: StreamName, incarnation: bytes, root: bytes) -> StreamKey:
        """A new key of a stream, not taken: the first one that is in the store is the stream's. Raises what the provider raises."""
        return wrap_stream_key(
            self.region,
            self.provider,
            stream=stream,
            incarnation=incarnation,
            key_id=new_key_id(self.region, KeyKind.STREAM, self._random(RANDOM_BYTES)),
            root=root,
            secret=self._random(SECRET_BYTES),
            at_ms=self.now_ms(),
        )

    def roots_in_use(self) -> tuple[str, ...]:
        """Under which roots the known keys are wrapped, as hex ids in order."""
        with self._lock:
            return tuple(sorted(self._under))

    def is_older(self, record: StreamKey) -> bool:
        """Whether this is what is known of its incarnation, as it was before a root's rotation wrapped it anew: what is known is to stand in
        its place. Blocks on the provider. Raises KeyProviderError."""
        known, roots = self.find(bytes.fromhex(record.incarnation)), self.known_roots
        if known is None or roots is None or (known.key, known.stream) != (record.key, record.stream):
            return False
        if not roots.is_older(record.root, known.root):
            return False
        try:
            self._secret(known)
        except (KeyUnknownError, TamperError):
            # It may be one that nobody can unwrap any more, and the older one can be.
            return False
        return True

    def check(self, record: StreamKey) -> None:
        """Whether this may be taken: it unwraps, and to the same secret as what is known of its incarnation. Where what is known is under a
        root that is not here any more, and this under the active one, nothing is compared: its id and place are the same, and its
        wrapping binds both.

        Raises TamperError, KeyUnknownError and KeyProviderError as unwrapping does, CorruptionError where it is another key.
        """
        known = self.find(bytes.fromhex(record.incarnation))
        if record == known:
            return
        if known is not None and self.known_roots is not None and self.known_roots.find(record.root) is None:
            raise CorruptionError(
                f"The key of {record.stream} in the metadata store is wrapped under root key {record.root}, which is none of the region's.",
                hint="Put the metadata store back as it was. The broker goes on with the key that it has.",
            )
        secret = record.secret(self.region, self.provider)
        if known is None:
            return
        is_same = (known.key, known.stream) == (record.key, record.stream)
        if is_same:
            try:
                is_same = hmac.compare_digest(self._secret(known), secret)
            except KeyUnknownError:
                if self.roots is None or record.root != self.roots.active.key:
                    raise
        if not is_same:
            raise CorruptionError(
                f"The metadata store has another key for {record.stream} than the one that sealed its records: {record.key}, not {known.key}.",
                hint="Put the metadata store back as it was: a stream keeps its key. The broker goes on with the one that it has.",
            )

    def take(self, record: StreamKey) -> None:
        """Use this key from now on; it was checked."""
        incarnation = bytes.fromhex(record.incarnation)
        with self._lock:
            self._count_out(self._records.get(incarnation))
            self._records[incarnation] = record
            self._under[record.root] += 1
            # A root's rotation wraps it anew: what it unwraps to stays.
            held = self._held.pop(incarnation)
            if held is not None:
                self._held.put(incarnation, _Held(record, held.secret))

    def take_stored(self, incarnation: bytes, entries: Iterable[DataEntry]) -> None:
        """Know these stored data keys of an incarnation, wrapped as they are."""
        with self._lock:
            self._stored.setdefault(incarnation, {}).update((entry.key_id, entry) for entry in entries)

    def forget(self, incarnation: bytes) -> bool:
        """The key is destroyed: nothing of this incarnation is opened or sealed any more. Whether it was known."""
        with self._lock:
            known = self._records.pop(incarnation, None)
            self._count_out(known)
            self._stored.pop(incarnation, None)
            self._held.pop(incarnation)
            for place in [place for place in self._data_keys if place[1] == incarnation]:
                self._data_keys.pop(place)
            sealers = [sealer for sealer in self._sealers if sealer.incarnation == incarnation]
        for sealer in sealers:
            sealer.end_key()
        return known is not None

    def destroy_own(self, incarnation: bytes) -> None:
        """Destroy what keyrings of before the brokers shared keys have of an incarnation: this broker's own, and the one of the region's folder.
        Blocks on the disk. Raises KeyProviderError, UnavailableError; RequestError(CONFLICT) where another broker is about to do it."""
        if self.own is not None:
            _destroy_in(self.own, incarnation)
        if any(entry.incarnation == incarnation for entry in self.former_streams()):
            try:
                former = open_keyring(
                    self._former_folder, self.region, provider=self.provider, runtime=self._runtime
                )
            except KeyProviderError:
                # The root that wraps what it has is destroyed.
                return
            try:
                _destroy_in(former, incarnation)
            finally:
                former.close()

    def former_streams(self) -> list[StreamEntry]:
        """The stream keys that the keyring of the region's folder has still. Blocks on the disk. Raises RequestError, CorruptionError."""
        if self._former is None or not (self._former / KEY_FILE).exists():
            return []
        return live_streams(self._former, self.region)

    @property
    def _former_folder(self) -> Path:
        assert self._former is not None
        return self._former

    def destroy_root(self, key_id: bytes) -> None:
        """Destroy a retired root here: in the provider, and its copy in this broker's own keyring, which goes over to a root of its own. Again is no
        error. Blocks. Raises KeyProviderError, TamperError, UnavailableError."""
        if self.own is not None and self.own.state_of(key_id) not in (None, KeyState.DESTROYED):
            if self.own.state_of(key_id) is KeyState.ACTIVE:
                self.own.rotate_root()
            self.own.destroy_retired_roots()
        self.provider.destroy(key_id)

    # -- sealing and opening ---------------------------------------------------------------------------

    def sealer(self, stream: StreamName, incarnation: bytes, shard: int, epoch: int) -> ShardSealer:
        """What a shard's log seals with in one leader epoch. No id is drawn before the first batch."""
        sealer = ShardSealer(self, stream, incarnation, shard, epoch)
        with self._lock:
            self._sealers.add(sealer)
        return sealer

    def data_key_for_writing(self, stream: StreamName, incarnation: bytes, shard: int, epoch: int) -> DataKey:
        """A data key that was never used: derived for an id that is drawn now. Nothing is written.

        Raises KeyUnknownError, TamperError, KeyProviderError.
        """
        record = self._known(stream, incarnation)
        key_id = new_key_id(self.region, KeyKind.DERIVED, self._random(RANDOM_BYTES))
        return derive_data_key(self.region, record, self._secret(record), shard, epoch, key_id)

    def opening_key(
        self, stream: StreamName, incarnation: bytes, shard: int, epoch: int, key_id: bytes
    ) -> DataKey:
        """The key that a sealed batch of this place names; whichever broker sealed it.

        Raises KeyScopeError for an id of another region or kind, KeyUnknownError, TamperError, KeyProviderError; for a stored key as
        `Keyring.data_key`.
        """
        if kind_of(key_id) is KeyKind.DATA and self.own is not None and self.own.has(key_id):
            return self.own.data_key(key_id)
        place = (key_id, incarnation, shard, epoch)
        with self._lock:
            cached = self._data_keys.use(place)
            stored = self._stored.get(incarnation, {}).get(key_id)
        if cached is not None:
            return cached
        if kind_of(key_id) is KeyKind.DATA and stored is None:
            return self.data_key(key_id)
        record = self._known(stream, incarnation)
        if stored is not None:
            key = unwrap_data_key(
                self.region, stored, record.stream, incarnation, record.key_id, self._secret(record)
            )
        else:
            key = derive_data_key(self.region, record, self._secret(record), shard, epoch, key_id)
        # Whoever drew the id seals with it, and nobody else.
        key.claim_sealer()
        with self._lock:
            if incarnation in self._records:
                self._data_keys.put(place, key)
        return key

    def data_key(self, key_id: bytes) -> DataKey:
        """A stored data key, of before keys were shared. Raises KeyUnknownError, and as `Keyring.data_key`."""
        if kind_of(key_id) is KeyKind.DERIVED:
            raise RequestError(
                f"Data key {key_id.hex()} is derived: which one it is depends on the stream, shard and epoch of what it sealed.",
                code=Code.UNSUPPORTED,
            )
        if self.own is None:
            raise KeyUnknownError(
                f"Data key {key_id.hex()} is not known here: it is of before the brokers of {self.region} shared their keys.",
                hint="The broker that sealed it has it in keys/keys.log in its data folder, and brings it to the others at its start.",
            )
        return self.own.data_key(key_id)

    def link_secrets(
        self, stream: StreamName, incarnation: bytes, grant_id: str, terms_hash: bytes, pseudonyms: str
    ) -> LinkSecrets:
        """What a bridge derives a grant's keys from (keys.link): the same from every broker, until the stream is deleted.

        Raises KeyUnknownError, TamperError, KeyProviderError.
        """
        secret = self._secret(self._known(stream, incarnation))
        return LinkSecrets.of_stream(secret, grant_id, terms_hash, pseudonyms)

    def tag(self, stream: StreamName, incarnation: bytes, shard: int, purpose: str, data: bytes) -> bytes:
        """See RegionKeys. Raises KeyUnknownError, TamperError, KeyProviderError."""
        secret = self._secret(self._known(stream, incarnation))
        return tag(secret, purpose, data, self.region, str(stream), incarnation, shard)

    def rotate_data(self, stream: StreamName | None = None) -> int:
        """The next batch of every shard (of `stream`, or of all) that this broker writes gets a fresh data key. Returns how many keys
        ended."""
        with self._lock:
            sealers = [s for s in self._sealers if stream is None or s.stream == stream]
        ended = sum(sealer.data_key() is not None for sealer in sealers)
        for sealer in sealers:
            sealer.end_key()
        return ended

    def list(self, stream: StreamName | None = None) -> list[KeyInfo]:
        """Roots, then stream keys; then the data keys that this broker seals with now: derived keys are stored nowhere, so no broker knows
        of those of others."""
        roots = self.roots.roots if self.roots is not None else ()
        found = [KeyInfo("root", root.key_id, root.state, root.at_ms) for root in roots]
        with self._lock:
            records = [r for r in self._records.values() if stream is None or r.stream == str(stream)]
            sealers = [s for s in self._sealers if stream is None or s.stream == stream]
        found += [
            KeyInfo(
                "stream",
                record.key_id,
                KeyState.ACTIVE,
                record.at_ms,
                record.stream,
                bytes.fromhex(record.incarnation),
                wrapped_by=bytes.fromhex(record.root),
            )
            for record in records
        ]
        parents = {record.incarnation: record.key_id for record in records}
        for sealer in sealers:
            key, parent = sealer.data_key(), parents.get(sealer.incarnation.hex())
            if key is None or parent is None:
                continue
            found.append(
                KeyInfo(
                    "data",
                    key.key_id,
                    KeyState.ACTIVE,
                    sealer.started_ms,
                    str(key.stream),
                    key.incarnation,
                    key.shard,
                    key.epoch,
                    parent,
                )
            )
        return found

    # -- inside ----------------------------------------------------------------------------------------

    def _known(self, stream: StreamName, incarnation: bytes) -> StreamKey:
        record = self.find(incarnation)
        if record is None or record.stream != str(stream):
            raise KeyUnknownError(
                f"The key of {stream} (incarnation {incarnation.hex()}) is not known to this broker: the stream was deleted, or its key is not in the metadata store.",
                hint="Where the stream was not deleted, put the metadata store back, or start the broker that led the stream: it keeps a copy.",
            )
        return record

    def _count_out(self, record: StreamKey | None) -> None:
        if record is not None:
            self._under[record.root] -= 1
            if not self._under[record.root]:
                del self._under[record.root]

    def _secret(self, record: StreamKey) -> bytes:
        incarnation = bytes.fromhex(record.incarnation)
        with self._lock:
            held = self._held.use(incarnation)
        if held is not None and held.record == record:
            return held.secret
        secret = record.secret(self.region, self.provider)
        with self._lock:
            if self._records.get(incarnation) == record:
                self._held.put(incarnation, _Held(record, secret))
        return secret


def _destroy_in(keyring: Keyring, incarnation: bytes) -> None:
    for entry in keyring.live_streams():
        if entry.incarnation == incarnation:
            keyring.destroy(StreamName.parse(entry.stream), incarnation)


def open_copies(
    folder: Path, region: str, *, monotonic: Callable[[], float] = REAL.clock.monotonic
) -> KeyStore:
    """The file of a broker's copies, made where there is none; locked until it is closed. Blocks.

    Raises RequestError(CONFLICT, FORBIDDEN, WRONG_REGION), CorruptionError.
    """
    if not (folder / COPIES / KEY_FILE).exists():
        create_store(folder / COPIES, region, ())
    return KeyStore(folder / COPIES, region, monotonic=monotonic)


def open_stored(folder: Path, shared: Path, region: str) -> SharedKeyring:
    """A broker's keys from its disk alone, for who reads its logs while it does not run. `shared`: the region's own keys, with the roots. Blocks.

    Raises as `open_copies` and `open_keyring`.
    """
    copies = open_copies(folder, region)
    try:
        own = open_keyring(folder, region) if (folder / KEY_FILE).exists() else None
        keyring = SharedKeyring(region, open_provider(shared, region), own)
        for body in copies.bodies:
            if not is_roots(body):
                keyring.take(decode_stream_key(body, region, "A copy of a stream's key"))
        return keyring
    finally:
        copies.close()


def find_first_root(folder: Path, region: str, provider: KeyProvider) -> bytes:
    """The root key that several brokers begin with: the one that the region's key file in `folder` names, else the only one. Blocks.

    Raises KeyProviderError where there is none, or it cannot be told which.
    """
    named = active_root(folder, region)
    found = provider.root_key_ids()
    if named is None and len(found) == 1:
        return found[0]
    if named is None or named not in found:
        raise KeyProviderError(
            f"{folder} does not have the root key of {region}.",
            hint="Copy the folder keys of the region's folder from where the region was initialised: all its brokers need the same root key.",
        )
    return named
