"""A statement that a region's broker signs: key id, body and signature in one frame. Pure.

Ed25519 over ``b"felix/<purpose>/1\\0"`` and the body's bytes; the body is a MessagePack map of a struct's fields, the whole a
MessagePack map of key_id, body and signature. Invariants: `form.open(form.sign(b, …), …) == b`; a body is used only after `open`
returned. Callers: audit.receipt, audit.stream_statement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Generic, TypeVar

import msgspec

from audit.leaf import Id16, names_stand_once
from felix.errors import LaterReleaseError, TamperError, of_later_release, why_undecoded
from keys.signing import SigningKey, VerifyKey

Body = TypeVar("Body", bound=msgspec.Struct)


class _Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key_id: Id16
    body: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


_encoder: Final = msgspec.msgpack.Encoder()
_frame: Final = msgspec.msgpack.Decoder(_Signed)


@dataclass(frozen=True, slots=True)
class ReceiptKeys:
    """The keys under which one region's statements verify: not a mapping, so that nobody adds another region's to it."""

    region: str
    ingress_origin: str
    """the log that the region's receipts are about"""
    by_id: Mapping[bytes, bytes]
    """Ed25519 public keys by the key id that statements name"""

    @classmethod
    def of(cls, region: str, ingress_origin: str, publics: Iterable[bytes]) -> ReceiptKeys:
        """From Ed25519 public keys as a bundle lists them."""
        return cls(region, ingress_origin, {VerifyKey(public).key_id: public for public in publics})


class SignedForm(Generic[Body]):
    """One kind of such statements."""

    def __init__(self, kind: type[Body], purpose: str, what: str, bytes_max: int) -> None:
        """`purpose` is what is signed for, `what` the statement's name in sentences, `bytes_max` its limit, frame included."""
        self._bodies = msgspec.msgpack.Decoder(kind)
        self._purpose, self._what, self._bytes_max = purpose, what, bytes_max

    def sign(self, body: Body, key: SigningKey) -> bytes:
        """The signed statement's bytes."""
        encoded = _encoder.encode(body)
        data = _encoder.encode(_Signed(key.key_id, encoded, key.sign(self._purpose, encoded)))
        assert len(data) <= self._bytes_max
        return data

    def open(self, data: bytes, keys: ReceiptKeys) -> Body:
        """Verify and read. Raises TamperError where the key is none of that region's, the signature does not hold, or the body
        is none of this kind; LaterReleaseError, which is one, where a later release signed it. That the body speaks of that region is for the caller to ask."""
        signed = self._read(data)
        public = keys.by_id.get(signed.key_id)
        if public is None:
            raise TamperError(
                f"A {self._what} is signed by the key {signed.key_id.hex()}, which is none of {keys.region}'s receipt keys."
            )
        if not VerifyKey(public).holds(self._purpose, signed.body, signed.signature):
            raise TamperError(f"A {self._what}'s signature does not hold.")
        return self._decode(signed, LaterReleaseError)

    def signer(self, data: bytes) -> bytes:
        """The id of the key that it says signed it. Raises TamperError."""
        return self._read(data).key_id

    def read_unverified(self, data: bytes) -> Body:
        """The body without its signature checked. Raises TamperError."""
        return self._decode(self._read(data))

    def _read(self, data: bytes) -> _Signed:
        if len(data) > self._bytes_max:
            raise TamperError(f"{len(data)} bytes are not a {self._what}.")
        try:
            signed = _frame.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TamperError(f"A {self._what} does not decode: {why_undecoded(error)}.") from error
        self._require_names_once(data, signed)
        return signed

    def _decode(self, signed: _Signed, later: type[TamperError] = TamperError) -> Body:
        """`later`: what is raised of what only a later release knows."""
        try:
            body = self._bodies.decode(signed.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            hint = of_later_release(error)
            kind = later if hint else TamperError
            raise kind(
                f"A {self._what}'s body does not decode: {why_undecoded(error)}.", hint=hint
            ) from error
        self._require_names_once(signed.body, body)
        return body

    def _require_names_once(self, data: bytes, value: msgspec.Struct) -> None:
        if not names_stand_once(data, value):
            raise TamperError(f"A {self._what} has a name twice.")
