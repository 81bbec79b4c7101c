"""The tree of a region's keys: roots, stream keys under them, data keys under those; their states; what is persisted.

Invariants, kept by `Hierarchy.apply` on both sides of the disk:
- every id is of its region and kind; a key's parent is in the tree before it;
- a (stream, incarnation) has one stream key, for ever: a destroyed one is never followed by another;
- at most one root is active; a state changes only along TRANSITIONS;
- a destroyed key has no wrapped bytes left, and neither have the keys below it.

Data keys are `active` only in the process that made them: what is read back from disk is `decrypt-only`. Pure; the
keyring calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from felix.context import bind
from felix.errors import Code, CorruptionError, RequestError
from felix.names import StreamName
from keys.errors import KeyDestroyedError
from keys.key_id import KEY_ID_BYTES, KeyKind, check_key_id
from keys.wrapping import WRAPPED_BYTES_MAX


class KeyState(StrEnum):
    """Where a key stands. `pending` and `decrypt-only` keys wrap and seal nothing new."""

    PENDING = "pending"
    ACTIVE = "active"
    DECRYPT_ONLY = "decrypt-only"
    DESTROYED = "destroyed"


class KeyEvent(StrEnum):
    """What happens to a key."""

    ACTIVATE = "activate"
    RETIRE = "retire"
    DESTROY = "destroy"


TRANSITIONS: Final[dict[tuple[KeyState, KeyEvent], KeyState]] = {
    (KeyState.PENDING, KeyEvent.ACTIVATE): KeyState.ACTIVE,
    (KeyState.PENDING, KeyEvent.DESTROY): KeyState.DESTROYED,
    (KeyState.ACTIVE, KeyEvent.RETIRE): KeyState.DECRYPT_ONLY,
    (KeyState.ACTIVE, KeyEvent.DESTROY): KeyState.DESTROYED,
    (KeyState.DECRYPT_ONLY, KeyEvent.DESTROY): KeyState.DESTROYED,
}
"""Every change of state there is; docs/keys.md prints it."""


def next_state(state: KeyState, event: KeyEvent) -> KeyState:
    """Raises KeyDestroyedError from `destroyed`, RequestError(CONFLICT) for any other change that is not in the table."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        if state is KeyState.DESTROYED:
            raise KeyDestroyedError(f"A destroyed key cannot {event}.")
        raise RequestError(f"A key that is {state} cannot {event}.", code=Code.CONFLICT)
    return following


_KeyId = Annotated[bytes, msgspec.Meta(min_length=KEY_ID_BYTES, max_length=KEY_ID_BYTES)]
_Wrapped = Annotated[bytes, msgspec.Meta(max_length=WRAPPED_BYTES_MAX)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_Time = Annotated[int, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """Base of what a key file holds, one after the other."""


class RootEntry(Entry, frozen=True, tag="root"):
    """A root key's state from `at_ms` on. The key itself is with the provider."""

    key_id: _KeyId
    state: KeyState
    at_ms: _Time


class StreamEntry(Entry, frozen=True, tag="stream"):
    """The key of one incarnation of a stream, wrapped under `root_id`; both empty once destroyed."""

    key_id: _KeyId
    stream: str
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    root_id: bytes
    wrapped: _Wrapped
    state: KeyState
    at_ms: _Time

    def context(self, region: str) -> bytes:
        """What its wrapping is bound to, whichever root wraps it."""
        return bind("stream-key", region, self.stream, self.incarnation, self.key_id)


class DataEntry(Entry, frozen=True, tag="data"):
    """A data key, wrapped under its stream key; no wrapped bytes once destroyed."""

    key_id: _KeyId
    stream_key_id: _KeyId
    shard: _Small
    epoch: _Small
    wrapped: _Wrapped
    commitment: Annotated[bytes, msgspec.Meta(max_length=32)]
    at_ms: _Time

    def context(self, region: str, stream: StreamEntry) -> bytes:
        """What its wrapping is bound to."""
        return self.context_of(region, stream.stream, stream.incarnation)

    def context_of(self, region: str, stream: str, incarnation: bytes) -> bytes:
        """The same, of the stream whose key wraps it."""
        return bind(
            "data-key",
            region,
            stream,
            incarnation,
            self.stream_key_id,
            self.shard,
            self.epoch,
            self.key_id,
        )


AnyEntry = RootEntry | StreamEntry | DataEntry
_decoder: Final = msgspec.msgpack.Decoder(AnyEntry)
_encoder: Final = msgspec.msgpack.Encoder()


def encode_entry(entry: AnyEntry) -> bytes:
    """MessagePack, a map with the field `is` saying which."""
    return _encoder.encode(entry)


def decode_entry(data: bytes) -> AnyEntry:
    """Raises CorruptionError where these are not the bytes of an entry."""
    try:
        entry: AnyEntry = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"A key file holds an entry that cannot be read: {error}.") from error
    return entry


@dataclass(slots=True)
class Hierarchy:
    """All keys of a region by id, built by applying entries in order."""

    region: str
    roots: dict[bytes, RootEntry] = field(default_factory=dict)
    streams: dict[bytes, StreamEntry] = field(default_factory=dict)
    data: dict[bytes, DataEntry] = field(default_factory=dict)
    by_incarnation: dict[tuple[str, bytes], bytes] = field(default_factory=dict)

    def apply(self, entry: AnyEntry) -> None:
        """Raises CorruptionError where the entry breaks an invariant of the tree."""
        try:
            match entry:
                case RootEntry():
                    self._apply_root(entry)
                case StreamEntry():
                    self._apply_stream(entry)
                case DataEntry():
                    self._apply_data(entry)
        except RequestError as error:
            raise CorruptionError(f"Key {entry.key_id.hex()} in the key file: {error.sentence}") from error

    def _apply_root(self, entry: RootEntry) -> None:
        check_key_id(entry.key_id, self.region, KeyKind.ROOT)
        if entry.state is KeyState.ACTIVE:
            active = self.active_root()
            _require(active in (None, entry.key_id), "two roots would be active")
        self.roots[entry.key_id] = entry

    def _apply_stream(self, entry: StreamEntry) -> None:
        check_key_id(entry.key_id, self.region, KeyKind.STREAM)
        StreamName.parse(entry.stream)
        place = (entry.stream, entry.incarnation)
        _require(self.by_incarnation.get(place, entry.key_id) == entry.key_id, "its stream has another key")
        known = self.streams.get(entry.key_id)
        _require(
            known is None or (known.stream, known.incarnation) == place, "it would change to another stream"
        )
        if entry.state is KeyState.DESTROYED:
            _require(not entry.wrapped and not entry.root_id, "it is destroyed but not gone")
        else:
            _require(entry.state is KeyState.ACTIVE, f"a stream key is never {entry.state}")
            _require(known is None or known.state is not KeyState.DESTROYED, "it would come back")
            _require(entry.root_id in self.roots and bool(entry.wrapped), "its root is not known")
        self.streams[entry.key_id] = entry
        self.by_incarnation[place] = entry.key_id

    def _apply_data(self, entry: DataEntry) -> None:
        check_key_id(entry.key_id, self.region, KeyKind.DATA)
        stream = self.streams.get(entry.stream_key_id)
        _require(stream is not None, "its stream key is not known")
        assert stream is not None
        destroyed = stream.state is KeyState.DESTROYED
        _require(destroyed == (not entry.wrapped), "its state is not that of its stream key")
        _require(entry.key_id not in self.data or destroyed, "it is there twice")
        self.data[entry.key_id] = entry

    def active_root(self) -> bytes | None:
        """The root that wraps new stream keys."""
        return self._root_in(KeyState.ACTIVE)

    def pending_root(self) -> bytes | None:
        """The root that a rotation made and has not gone over to yet."""
        return self._root_in(KeyState.PENDING)

    def _root_in(self, state: KeyState) -> bytes | None:
        return next((root.key_id for root in self.roots.values() if root.state is state), None)

    def wrapped_under(self, root_id: bytes) -> list[StreamEntry]:
        """The stream keys that need this root."""
        return [entry for entry in self.streams.values() if entry.root_id == root_id]

    def entries(self) -> Iterator[AnyEntry]:
        """The whole tree as the shortest list of entries that builds it again, parents first."""
        # The old root comes before the new one, and retired, so that no two are ever active on the way.
        yield from sorted(self.roots.values(), key=lambda root: (root.state is KeyState.ACTIVE, root.key_id))
        yield from self.streams.values()
        yield from self.data.values()

    def copy(self) -> Hierarchy:
        """An independent tree with the same entries, for planning a change."""
        return Hierarchy(
            self.region, dict(self.roots), dict(self.streams), dict(self.data), dict(self.by_incarnation)
        )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RequestError(f"{what}.")
