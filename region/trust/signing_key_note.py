"""What the region's audit log says of its policy and receipt keys, in the metadata store: for brokers that have no copy of the log, or one that is behind.

The broker that writes the log signs it with the log's key. Whoever can write the store, and has no key, cannot stop a broker by it: a note says which keys were given up, no
key of now is among those at any time, and so an earlier note that is put back stops nobody who has the keys of now. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal, Self

import msgspec

from audit.leaf import KEY_ID_BYTES
from felix.errors import RequestError, TamperError
from keys.bundle import RegionBundle
from keys.signing import SIGNATURE_BYTES, SigningKey, VerifyKey
from region.trust.changed_log_key import log_keys_of
from region.trust.signing_key_leaves import ENDED_MAX, LoggedKey, LoggedKeys, Role

NOTE_BYTES_MAX: Final = 64 * 1024 + 2 * ENDED_MAX * 32
"""Of each role ENDED_MAX keys of 16 bytes, in base64, and room for more fields."""
TIME_MS_MAX: Final = 253_402_300_799_999
"""The last year that a date can say."""
_PURPOSE: Final = "signing-keys-of-log"


class SigningKeyNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`keys`: by role, what the log of `region` says. `signature`: Ed25519, by a key of that log, over all else as JSON with sorted names."""

    format: Literal[1] = 1
    region: str
    mesh: str
    keys: dict[Role, LoggedKey]
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""

    @classmethod
    def sign(cls, own: RegionBundle, keys: LoggedKeys, key: SigningKey) -> Self:
        """`key`: the one that signs the log."""
        note = cls(region=own.region, mesh=own.mesh, keys=dict(keys))
        return msgspec.structs.replace(note, signature=key.sign(_PURPOSE, note._signed_bytes()))

    def encode(self) -> bytes:
        """As it stands in the store."""
        return msgspec.json.encode(self)

    def holds_under(self, keys: Iterable[VerifyKey]) -> bool:
        """Whether one of these keys signed it."""
        return any(key.holds(_PURPOSE, self._signed_bytes(), self.signature) for key in keys)

    def _signed_bytes(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(self, signature=b""), order="sorted")


_decoder: Final = msgspec.json.Decoder(SigningKeyNote)


def decode_note(data: bytes, own: RegionBundle) -> SigningKeyNote:
    """A note of this region, under a key that signs its log now. Raises RequestError for its shape or whose it is, TamperError for the signature."""
    if len(data) > NOTE_BYTES_MAX:
        raise RequestError(f"It has {len(data):,} bytes; {NOTE_BYTES_MAX:,} are allowed.")
    try:
        note = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"It is no note of signing keys: {error}.") from None
    if (note.region, note.mesh) != (own.region, own.mesh):
        # What it says is anybody's who can write the store.
        raise RequestError("It is of another region.")
    if not all(0 <= each.time_ms <= TIME_MS_MAX for each in note.keys.values()):
        raise RequestError("It has a time that no date says.")
    if not all(map(_is_of_keys, note.keys.values())):
        # Who has the log's key could make the note that the log's broker writes in its place too large to be read.
        raise RequestError("It names what is no key.")
    if not note.holds_under(_log_keys(own)):
        raise TamperError(
            f"No key signed it that signs the audit log of {own.region} by the bundle in this folder."
        )
    return note


def _is_of_keys(said: LoggedKey) -> bool:
    ids = (*said.ended, *([said.key_id] if said.key_id else []))
    return len(said.ended) <= ENDED_MAX and all(len(each) == KEY_ID_BYTES for each in ids)


def _log_keys(own: RegionBundle) -> list[VerifyKey]:
    """The Ed25519 keys of the region's own log that have not ended: a thief may have the others."""
    return [VerifyKey(key.public) for key in log_keys_of(own) if key.to_size is None]
