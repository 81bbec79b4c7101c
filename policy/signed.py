"""Signed documents: bytes, the region that signed them, and an Ed25519 signature that outsiders can check.

The signature (RFC 8032) is over ``b"felix/<purpose>/1\\0" + body``: a signature made for one purpose is none for
another. The body is canonical JSON, or for a residency policy the YAML text itself, comments included.

Canonical JSON here: UTF-8, members sorted by name, no white space, whole numbers only. For texts without control
characters that is RFC 8785 (JSON Canonicalization Scheme).

As a file, a document is JSON that a person can read (two spaces of indentation); as a token, base64url in one line.

Invariants:
- a file or token is accepted only as exactly the bytes that `encode_file` or `encode_token` write, so no two
  different files are the same document, and an edited one is refused, wherever it was edited;
- parsing proves nothing: only `verify` does, against keys that the caller trusts for the region.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self, TypeVar, cast

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from felix.errors import Code, FelixError, RequestError, of_later_release
from felix.names import parse_region
from felix.remembered import Remembered, digest_of

FILE_BYTES_MAX: Final = 768 * 1024
"""What is read, also of a log: a policy of the largest size, escaped as a JSON text. What is signed and put is shorter (policy.approval)."""
KEY_ID_BYTES: Final = 16
SIGNATURE_BYTES: Final = 64
VERDICTS_BYTES_MAX: Final = 12 << 20
"""What is remembered of which documents hold, some 30,000 of them: more than six regions may keep in another. A changed grant book is a
new object, of mostly the same documents."""
BODIES_BYTES_MAX: Final = 16 << 20
"""What is remembered of documents' bodies. Reading one again costs much less than a signature. Verdicts and bodies, of documents and of approvals,
stay below what strangers may make a broker hold."""
NUMBER_MAX: Final = (1 << 53) - 1
"""What every JSON reader holds exactly (RFC 7493)."""

T = TypeVar("T")
Trusted = Mapping[str, Sequence[bytes]]
"""Region to its policy keys: raw Ed25519 public keys, 32 bytes each. Whoever reads a log adds those that ended there (audit.keys_in_log)."""


class Purpose(StrEnum):
    """What a signature is for."""

    EXPORT = "grant-export"
    IMPORT = "grant-import"
    STANDING = "grant-standing"
    DENY = "bridge-deny"
    POLICY = "residency-policy"
    APPROVAL = "grant-approval"
    """By a person, with an identity of kind `approver` (policy.approval); no `SignedDocument`."""


class SignatureError(RequestError):
    """A document that is not what its region signed."""

    default_code = Code.GRANT_INVALID


def canonical(value: object) -> bytes:
    """Canonical JSON of structs, dicts, lists, texts, whole numbers, booleans and null."""
    return msgspec.json.encode(value, order="sorted")


def key_id(public_key: bytes) -> str:
    """What names a policy key: the first 16 bytes of the SHA-256 of the raw public key, in hex."""
    return hashlib.sha256(public_key).digest()[:KEY_ID_BYTES].hex()


def raw_public_key(key: Ed25519PrivateKey | Ed25519PublicKey) -> bytes:
    """The 32 bytes of a key's public half."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes_raw()


def encode_file(file: msgspec.Struct) -> bytes:
    """A signed document for people: JSON with two spaces of indentation, ending in a line feed."""
    return msgspec.json.format(canonical(file), indent=2) + b"\n"


def encode_token(file: msgspec.Struct) -> str:
    """The same as one line of base64url without padding, for a terminal or a chat."""
    return urlsafe_b64encode(canonical(file)).rstrip(b"=").decode()


def parse_exactly(
    data: bytes | str,
    bytes_max: int,
    read: Callable[[bytes], T],
    file_of: Callable[[T], msgspec.Struct],
    unreadable: Callable[[str], SignatureError],
) -> T:
    """What `read` makes of a file's or a token's JSON, where the bytes are just those that `file_of` it is written as.

    `unreadable` makes the error of a sentence's end. Raises it.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > bytes_max:
        raise unreadable(f"it has {len(raw)} bytes, and {bytes_max} are allowed")
    if raw.startswith(b"{"):
        document = read(raw)
        if raw not in (encode_file(file_of(document)), canonical(file_of(document))):
            raise unreadable("it was edited or reformatted since it was signed")
        return document
    line = raw.strip()
    try:
        packed = urlsafe_b64decode(line + b"=" * (-len(line) % 4))
    except ValueError:
        raise unreadable("it is neither a JSON file nor a base64 token") from None
    document = read(packed)
    if line != encode_token(file_of(document)).encode():
        raise unreadable("the token was edited since it was signed")
    return document


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: Any
    key: str
    purpose: Purpose
    region: str
    signature: str


@dataclass(frozen=True, slots=True)
class SignedDocument:
    """A body and its signature. That the signature holds is `verify`'s to say."""

    purpose: Purpose
    region: str
    key: str
    body: bytes
    signature: bytes

    def _file(self) -> _File:
        body: Any = self.body.decode() if self.purpose is Purpose.POLICY else msgspec.json.decode(self.body)
        signature = urlsafe_b64encode(self.signature).rstrip(b"=").decode()
        return _File(body=body, key=self.key, purpose=self.purpose, region=self.region, signature=signature)

    def encode_file(self) -> bytes:
        """Readable JSON that ends in a line feed."""
        return encode_file(self._file())

    def encode_token(self) -> str:
        """One line of base64url without padding, for a terminal or a chat."""
        return encode_token(self._file())

    @classmethod
    def parse(cls, data: bytes | str) -> Self:
        """A file or a token. Raises SignatureError for anything that was not written by this class."""
        return parse_exactly(data, FILE_BYTES_MAX, cls._from_json, cls._file, _unreadable)

    @classmethod
    def _from_json(cls, data: bytes) -> Self:
        try:
            file = msgspec.json.decode(data, type=_File)
            parse_region(file.region)
            padding = "=" * (-len(file.signature) % 4)
            signature = urlsafe_b64decode(file.signature.encode("ascii") + padding.encode())
            if isinstance(file.body, str) is not (file.purpose is Purpose.POLICY):
                raise _unreadable("its body is not of the kind that its purpose asks for")
            body = file.body.encode() if isinstance(file.body, str) else canonical(file.body)
            document = cls(file.purpose, file.region, file.key, body, signature)
            document._file()
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            reason = (
                str(error) if isinstance(error, msgspec.ValidationError) else "it is not a signed document"
            )
            raise _unreadable(reason) from None
        except FelixError as error:
            raise error if isinstance(error, SignatureError) else _unreadable(error.sentence) from None
        return document


def _unreadable(reason: str) -> SignatureError:
    return SignatureError(
        f"The signed document cannot be read: {reason.removesuffix('.')}.",
        hint=of_later_release(reason) or "Fetch it again from the region that signed it.",
    )


def _message(purpose: Purpose, body: bytes) -> bytes:
    return b"felix/" + purpose.encode() + b"/1\0" + body


def sign(purpose: Purpose, region: str, body: bytes, key: Ed25519PrivateKey) -> SignedDocument:
    """The document that `region` signs with its policy key."""
    parse_region(region)
    signature = key.sign(_message(purpose, body))
    return SignedDocument(purpose, region, key_id(raw_public_key(key)), body, signature)


def verify(document: SignedDocument, trusted: Trusted) -> None:
    """Raises SignatureError(GRANT_INVALID) unless a key trusted for the document's region signed it.

    1. the region is known; 2. the key id is one of that region's keys; 3. the signature holds.
    """
    keys = tuple(trusted.get(document.region, ()))
    question = digest_of(
        document.purpose, document.region, document.key, document.body, document.signature, *keys
    )
    refused = _verdicts.ask(question, lambda: _refusal(document, keys), _weight_of_words)
    if refused is not None:
        sentence, hint = refused
        raise SignatureError(sentence, hint=hint)


_verdicts: Final = Remembered[tuple[str, str] | None](VERDICTS_BYTES_MAX)
_bodies: Final = Remembered[Any](BODIES_BYTES_MAX)


def _weight_of_words(words: tuple[str, str] | None) -> int:
    return 0 if words is None else 2 * sum(map(len, words))


def _refusal(document: SignedDocument, keys: tuple[bytes, ...]) -> tuple[str, str] | None:
    """Why the document is not believed, and what to do; None where the signature holds. Both outcomes are remembered: each change of a
    book verifies all its documents again, and forged ones must not cost more than genuine ones."""
    if not keys:
        return (
            f"The document is signed by {document.region}, whose policy key is not known here.",
            "Take that region's bundle.json and trust it first: felix region trust FILE --fingerprint …; on a machine without a region, name it with --bundle.",
        )
    found = next((key for key in keys if key_id(key) == document.key), None)
    if found is None:
        return (
            f"The document is signed with the key {document.key[:32]}, which is none of {document.region}'s policy keys.",
            "Import that region's current bundle, or treat the document as forged.",
        )
    try:
        Ed25519PublicKey.from_public_bytes(found).verify(
            document.signature, _message(document.purpose, document.body)
        )
    except (InvalidSignature, ValueError):
        return (
            f"The signature of {document.region} does not hold: the document was forged or changed.",
            "Do not use it; fetch it again from the region that signed it.",
        )
    return None


def decode_body(document: SignedDocument, type_: type[T], purpose: Purpose) -> T:
    """The body as a struct. Raises SignatureError where it is of another purpose, malformed or not canonical."""
    if document.purpose is not purpose:
        raise _unreadable(f"it is a {document.purpose}, where a {purpose} is needed")
    body = document.body
    question = digest_of(type_.__qualname__, body)
    return cast(T, _bodies.ask(question, lambda: _decode(body, type_), lambda _: 4 * len(body)))


def _decode(body: bytes, type_: Any) -> Any:
    try:
        value = msgspec.json.decode(body, type=type_)
    except FelixError as error:
        raise _unreadable(error.sentence) from None
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _unreadable(str(error)) from None
    if canonical(value) != body:
        raise _unreadable("its body is not in canonical form")
    return value
