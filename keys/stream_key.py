"""Stream keys of a region of several brokers: the records that the metadata store has of them, and the data keys derived from them.

A record is JSON, written in one way only: what decodes to it and is not these bytes is refused. Its secret is wrapped by a root key and
bound to all else in the record and to the region, so no field of it, and no record of another stream or region, can stand in its place.

A derived data key is ``HKDF-Expand(secret of the stream key, context derived-data-key: region, stream, incarnation, stream key id, shard,
epoch, key id)``. It is stored nowhere: whoever can unwrap the stream key opens what it sealed. Its id has 11 random bytes, which one sealer
draws for itself, so no two sealers share a key, whatever became of the store, the disk or the epoch.

Values; what is handed a provider blocks on it. Used by `keys.shared`, and by who keeps the records.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import suppress
from typing import Annotated, Final

import msgspec

from felix.context import bind
from felix.errors import CorruptionError, FelixError, TamperError
from felix.names import StreamName
from keys.envelope import INCARNATION_BYTES, SECRET_BYTES, DataKey
from keys.errors import KeyUnknownError
from keys.hierarchy import KeyState
from keys.key_id import KEY_ID_BYTES, KeyKind, check_key_id
from keys.link import derive
from keys.provider import KeyProvider
from keys.wrapping import WRAPPED_BYTES_MAX

ROOTS_MAX: Final = 64
"""Root keys of a region that are not destroyed: each rotation adds one, and retired ones are destroyed."""
_ORDER: Final = {KeyState.PENDING: 0, KeyState.ACTIVE: 1, KeyState.DECRYPT_ONLY: 2}
_PROOF: Final = bytes(32)
"""What each root has wrapped once: who holds a root can tell that it is the one that is meant."""

_HexId = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * KEY_ID_BYTES}}}$")]
_Time = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Wrapped = Annotated[bytes, msgspec.Meta(min_length=1, max_length=WRAPPED_BYTES_MAX)]


class StreamKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The key of one incarnation of a stream, wrapped under `root`. Ids and the incarnation are hex."""

    stream: str
    incarnation: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * INCARNATION_BYTES}}}$")]
    key: _HexId
    root: _HexId
    wrapped: _Wrapped
    at_ms: _Time

    @property
    def key_id(self) -> bytes:
        """16 bytes."""
        return bytes.fromhex(self.key)

    def context(self, region: str) -> bytes:
        """What its wrapping is bound to: all but the wrapped bytes."""
        return bind(
            "shared-stream-key",
            region,
            self.stream,
            bytes.fromhex(self.incarnation),
            self.key_id,
            bytes.fromhex(self.root),
            self.at_ms,
        )

    def encode(self) -> bytes:
        """As it stands in the store and on the brokers' disks."""
        return msgspec.json.encode(self)

    def secret(self, region: str, provider: KeyProvider) -> bytes:
        """32 bytes. Blocks on the provider. Raises TamperError where the record was changed or belongs elsewhere, KeyUnknownError where
        the root is not there, KeyProviderError."""
        return provider.unwrap(bytes.fromhex(self.root), self.wrapped, self.context(region))


def wrap_stream_key(
    region: str,
    provider: KeyProvider,
    *,
    stream: StreamName,
    incarnation: bytes,
    key_id: bytes,
    root: bytes,
    secret: bytes,
    at_ms: int,
) -> StreamKey:
    """The record of this secret under `root`. Blocks on the provider, and raises what it raises."""
    assert len(secret) == SECRET_BYTES and len(incarnation) == INCARNATION_BYTES
    check_key_id(key_id, region, KeyKind.STREAM)
    bare = StreamKey(
        stream=str(stream),
        incarnation=incarnation.hex(),
        key=key_id.hex(),
        root=root.hex(),
        wrapped=b"\0",
        at_ms=at_ms,
    )
    return msgspec.structs.replace(bare, wrapped=provider.wrap(root, secret, bare.context(region)))


def decode_stream_key(data: bytes, region: str, where: str, incarnation: str = "") -> StreamKey:
    """Raises CorruptionError where this is no record of a stream key of the region, or of another incarnation than is meant (hex; empty:
    any). `where` names it to a person."""
    try:
        record = msgspec.json.decode(data, type=StreamKey)
        check_key_id(record.key_id, region, KeyKind.STREAM)
        check_key_id(bytes.fromhex(record.root), region, KeyKind.ROOT)
        StreamName.parse(record.stream)
    except (msgspec.MsgspecError, FelixError) as error:
        raise CorruptionError(f"{where} holds no key of a stream of {region}: {error}.") from error
    if record.encode() != data:
        raise CorruptionError(f"{where} was changed: no broker writes a stream key like this.")
    if incarnation not in ("", record.incarnation):
        raise CorruptionError(
            f"{where} holds the key of incarnation {record.incarnation} of {record.stream}, which stands elsewhere."
        )
    return record


def derive_data_key(
    region: str, record: StreamKey, secret: bytes, shard: int, epoch: int, key_id: bytes
) -> DataKey:
    """The data key of this id under a stream key. Raises KeyScopeError where the id is of another region or kind."""
    check_key_id(key_id, region, KeyKind.DERIVED)
    incarnation = bytes.fromhex(record.incarnation)
    return DataKey(
        key_id,
        region,
        StreamName.parse(record.stream),
        incarnation,
        shard,
        epoch,
        derive(
            secret,
            "derived-data-key",
            region,
            record.stream,
            incarnation,
            record.key_id,
            shard,
            epoch,
            key_id,
        ),
    )


class Root(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A root key: `proof` is a constant that it has wrapped, bound to region and id. The key itself is with the brokers' providers."""

    key: _HexId
    state: KeyState
    at_ms: _Time
    proof: _Wrapped

    @property
    def key_id(self) -> bytes:
        """16 bytes."""
        return bytes.fromhex(self.key)

    def check(self, region: str, provider: KeyProvider) -> None:
        """Whether the provider has this root. Blocks on it. Raises KeyUnknownError where it has none of this id, TamperError where it
        has another one under it, KeyProviderError."""
        provider.unwrap(self.key_id, self.proof, _proof_context(region, self.key_id))


class Roots(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The root keys of a region that are not destroyed. One of them is active."""

    roots: Annotated[tuple[Root, ...], msgspec.Meta(min_length=1, max_length=ROOTS_MAX)]

    @property
    def active(self) -> Root:
        """The one that wraps new stream keys."""
        return next(root for root in self.roots if root.state is KeyState.ACTIVE)

    def in_state(self, state: KeyState) -> list[Root]:
        """Those in one state."""
        return [root for root in self.roots if root.state is state]

    def encode(self) -> bytes:
        """As it stands in the store."""
        return msgspec.json.encode(self)

    def remember(self, known: Roots | None, held: Container[str]) -> Roots:
        """Those of these that are `held` or were known, and as retired what was known and is named no more; of those the newest, ROOTS_MAX
        roots in all. So nobody who holds no root has one forgotten."""
        before = {} if known is None else {root.key: root for root in known.roots}
        kept = [root for root in self.roots if root.key in before or root.key in held]
        named = {root.key for root in kept}
        gone = [
            msgspec.structs.replace(root, state=KeyState.DECRYPT_ONLY)
            for root in before.values()
            if root.key not in named
        ]
        gone.sort(key=lambda root: root.at_ms, reverse=True)
        return Roots((*kept, *gone[: ROOTS_MAX - len(kept)]))

    def went_back(self, known: Roots) -> bool:
        """Whether one of these stands as it cannot stand after what is known: in an earlier state, or in the same one of another time."""
        before = {root.key: root for root in known.roots}
        return any(
            _ORDER[root.state] < _ORDER[then.state] or (root.state is then.state and root != then)
            for root in self.roots
            if (then := before.get(root.key)) is not None
        )

    def held(self, region: str, provider: KeyProvider) -> tuple[str, ...]:
        """The hex ids of those that the provider has. Blocks on it. Raises KeyProviderError."""
        found = []
        for root in self.roots:
            with suppress(KeyUnknownError, TamperError):
                root.check(region, provider)
                found.append(root.key)
        return tuple(found)

    def find(self, root: str) -> Root | None:
        """The one of this hex id."""
        return next((each for each in self.roots if each.key == root), None)

    def is_older(self, root: str, other: str) -> bool:
        """Whether `root` was retired before `other` was, if that was at all; by hex id. Of roots that are not named nothing is said."""
        one, two = self.find(root), self.find(other)
        if one is None or two is None or one.state is not KeyState.DECRYPT_ONLY:
            return False
        return two.state is not KeyState.DECRYPT_ONLY or one.at_ms < two.at_ms


def prove_root(region: str, provider: KeyProvider, key_id: bytes, state: KeyState, at_ms: int) -> Root:
    """The record of a root that the provider has. Blocks on it, and raises what it raises."""
    return Root(key_id.hex(), state, at_ms, provider.wrap(key_id, _PROOF, _proof_context(region, key_id)))


def decode_roots(data: bytes, region: str, where: str) -> Roots:
    """Raises CorruptionError where these are no roots of the region, or not exactly one is active."""
    try:
        found = msgspec.json.decode(data, type=Roots)
        for root in found.roots:
            check_key_id(root.key_id, region, KeyKind.ROOT)
    except (msgspec.MsgspecError, FelixError) as error:
        raise CorruptionError(f"{where} does not say which root keys {region} has: {error}.") from error
    if found.encode() != data or len(found.in_state(KeyState.ACTIVE)) != 1:
        raise CorruptionError(f"{where} was changed: it names no one active root key of {region}.")
    return found


def is_roots(data: bytes) -> bool:
    """Whether these are the bytes of roots, where a file has them beside stream keys."""
    return data.startswith(b'{"roots"')


def _proof_context(region: str, key_id: bytes) -> bytes:
    return bind("root-proof", region, key_id)
