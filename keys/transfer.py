"""Crossing a border: a transfer key sealed to the destination region, and batches sealed under it.

A `TransferKey` belongs to one link, shard and source epoch (keys.link derives it). It travels once per session, at the opening of
an ingest stream: sealed (keys.hybrid) to the destination's public import key with the whole `TransferScope` as
context, and signed by the agent's identity, so that the destination knows who sent it. An envelope carries one range
of source offsets, contiguous with the one before it, with the records of it that cross, perhaps none.

Envelope, big-endian::

    0   magic "FE"         2     32 incarnation      16   of the source stream
    2   version            1     48 transfer key id  16
    3   flags, zero        1     64 scope            16   first bytes of SHA-256 over the transfer scope
    4   shard              4     80 ciphertext length 4   tag included
    8   source epoch       4     84 signature length  4
    12  records crossing   4
    16  base offset        8     88 ciphertext, then the signature
    24  last offset        8

Plaintext: ``u32 n``, then n × ``u32`` offset of a crossing record above the base offset, ascending (n is 0 where every
offset of the range crosses), then, where records cross, one batch as felix.batch encodes it.

Seal: AES-256-GCM-SIV (RFC 8452) under a key derived from the transfer key's secret and scope; the nonce is four zero
bytes and the base offset; additional data is `felix/transfer-envelope/1`, a zero byte and the first 80 bytes of the
header. The signature is ECDSA P-256 (RFC 6979, deterministic) by the agent, for the purpose `transfer-envelope`, over
scope and SHA-256 of the same 80 bytes and the ciphertext.

Invariants:
- the same range and records under the same key give the same bytes, signature included: a retry repeats itself;
- nothing is opened before its signature holds, and nothing of another link, shard, incarnation, epoch, position or
  key opens at all;
- lengths are checked against named limits before anything is copied.

Pure. Agents seal, destination brokers open.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import ge
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from felix.batch import BATCH_BYTES_MAX, FLAG_SEALED, OFFSET_MAX, RECORDS_MAX, Batch, Buffer, decode_batch
from felix.context import bind, purpose_prefix
from felix.errors import Code, RequestError, TamperError
from felix.identity import Identity
from felix.names import SpiffeId, StreamName
from felix.peer import SIGNATURE_BYTES_MAX, Peer
from keys.errors import KeyScopeError
from keys.hybrid import OVERHEAD_BYTES, HybridKeyPair, HybridPublicKey
from keys.key_id import KEY_ID_BYTES, KeyKind, check_key_id

ENVELOPE_HEADER_BYTES: Final = 88
RANGE_OFFSETS_MAX: Final = 1 << 32
"""Offsets that one envelope may cover: a record's place in it is a u32."""
_TAG_BYTES: Final = 16
_COUNT: Final = struct.Struct(">I")
CIPHERTEXT_BYTES_MAX: Final = _COUNT.size + 4 * RECORDS_MAX + BATCH_BYTES_MAX + _TAG_BYTES
ENVELOPE_BYTES_MAX: Final = ENVELOPE_HEADER_BYTES + CIPHERTEXT_BYTES_MAX + SIGNATURE_BYTES_MAX
"""One batch at its largest, with an offset for each record."""
TRANSFER_KEY_BYTES: Final = KEY_ID_BYTES + OVERHEAD_BYTES + 32
"""A transfer key as it travels: its id, and its sealed secret."""

_MAGIC: Final = b"FE"
_VERSION: Final = 1
_HEADER: Final = struct.Struct(">2sBBIIIQQ16s16s16sII")
_BOUND_BYTES: Final = 80
assert _HEADER.size == ENVELOPE_HEADER_BYTES
_AAD_PREFIX: Final = purpose_prefix("transfer-envelope")


class EnvelopeError(RequestError):
    """An envelope that does not have the shape of one, or belongs elsewhere."""

    default_code = Code.ENVELOPE_INVALID


@dataclass(frozen=True, slots=True)
class TransferScope:
    """All that a transfer key is for. Sizes: `incarnation` 16 bytes, `terms_hash` 32 bytes."""

    source_region: str
    destination_region: str
    stream: StreamName
    incarnation: bytes
    destination: StreamName
    shard: int
    epoch: int
    grant_id: str
    terms_hash: bytes
    bridge: SpiffeId
    _encoded: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.source_region == self.destination_region:
            raise KeyScopeError(f"A transfer within {self.source_region} crosses no border.")
        if self.bridge.kind != "bridge" or self.bridge.region != self.source_region:
            raise KeyScopeError(f"{self.bridge} is not a bridge of {self.source_region}.")
        if len(self.incarnation) != 16 or len(self.terms_hash) != 32:
            raise KeyScopeError("An incarnation has 16 bytes and a hash of terms 32.")
        encoded = bind(
            "transfer-scope",
            self.source_region,
            self.destination_region,
            str(self.stream),
            self.incarnation,
            str(self.destination),
            self.shard,
            self.epoch,
            self.grant_id,
            self.terms_hash,
            str(self.bridge),
        )
        object.__setattr__(self, "_encoded", encoded)

    def encode(self) -> bytes:
        """Every field behind its length; what keys and signatures bind."""
        return self._encoded

    def reference(self) -> bytes:
        """16 bytes that stand for the scope in an envelope's header."""
        return hashlib.sha256(self._encoded).digest()[:16]

    def __str__(self) -> str:
        return (
            f"{self.stream} shard {self.shard} epoch {self.epoch}, {self.source_region} to "
            f"{self.destination_region}, grant {self.grant_id}"
        )


@dataclass(frozen=True, slots=True)
class TransferKey:
    """The key of one link, shard and source epoch. `secret` has 32 bytes and is in no repr."""

    key_id: bytes
    scope: TransferScope
    secret: bytes = field(repr=False)
    _cipher: AESGCMSIV = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_key_id(self.key_id, self.scope.source_region, KeyKind.TRANSFER)
        if len(self.secret) != 32:
            raise KeyScopeError(f"A transfer key has 32 secret bytes, not {len(self.secret)}.")
        info = bind("transfer-seal", self.key_id, self.scope.encode())
        object.__setattr__(self, "_cipher", AESGCMSIV(HKDFExpand(SHA256(), 32, info).derive(self.secret)))


class SealedTransferKey(NamedTuple):
    """A transfer key on its way: `sealed` is the key id and the sealed secret, `signature` the agent's over it."""

    sealed: bytes
    signature: bytes

    @property
    def key_id(self) -> bytes:
        """16 bytes; not to be trusted before `open_transfer_key`."""
        return self.sealed[:KEY_ID_BYTES]


def seal_transfer_key(key: TransferKey, recipient: HybridPublicKey, agent: Identity) -> SealedTransferKey:
    """For the destination whose import key `recipient` is. Raises KeyScopeError where `agent` is not the bridge."""
    if agent.spiffe_id != key.scope.bridge:
        raise KeyScopeError(f"{agent.spiffe_id} cannot send a transfer key of {key.scope.bridge}.")
    sealed = key.key_id + recipient.seal(key.secret, _key_info(key.key_id, key.scope))
    return SealedTransferKey(sealed, agent.sign("transfer-key", _key_message(key.scope, sealed)))


def open_transfer_key(
    sealed: bytes, signature: bytes, scope: TransferScope, pair: HybridKeyPair, agent: Peer
) -> TransferKey:
    """The key, at the destination: signature first, then the seal. `agent` is who the session proved.

    Raises KeyScopeError for another bridge or a key id of another region, EnvelopeError(ENVELOPE_INVALID) for a wrong
    length, TamperError(TAMPERED) where signature or seal do not hold for `scope`.
    """
    if agent.spiffe_id != scope.bridge:
        raise KeyScopeError(f"{agent.spiffe_id} sent a transfer key, but the grant names {scope.bridge}.")
    if len(sealed) != TRANSFER_KEY_BYTES:
        raise EnvelopeError(f"A sealed transfer key has {TRANSFER_KEY_BYTES} bytes, not {len(sealed)}.")
    key_id = sealed[:KEY_ID_BYTES]
    check_key_id(key_id, scope.source_region, KeyKind.TRANSFER)
    if not agent.signed("transfer-key", _key_message(scope, sealed), signature):
        raise TamperError(
            f"The transfer key for {scope} is not signed by {agent.spiffe_id} for this link.",
            hint="Both regions must have the same grant: compare stream, destination and hash of terms.",
        )
    secret = pair.open(sealed[KEY_ID_BYTES:], _key_info(key_id, scope), f"the transfer key for {scope}")
    return TransferKey(key_id, scope, secret)


def _key_info(key_id: bytes, scope: TransferScope) -> bytes:
    return bind("transfer-key-seal", key_id, scope.encode())


def _key_message(scope: TransferScope, sealed: bytes) -> bytes:
    return bind("transfer-key-message", scope.encode(), sealed)


class EnvelopeHeader(NamedTuple):
    """The fixed header. Offsets are the source's; `records` is how many of the range cross."""

    shard: int
    epoch: int
    records: int
    base_offset: int
    last_offset: int
    incarnation: bytes
    key_id: bytes
    scope: bytes
    ciphertext_length: int
    signature_length: int

    @property
    def next_offset(self) -> int:
        """The source offset that the next envelope begins at."""
        return self.last_offset + 1

    def encode(self) -> bytes:
        """The 88 bytes."""
        return _HEADER.pack(_MAGIC, _VERSION, 0, *self)


@dataclass(frozen=True, slots=True)
class TransferEnvelope:
    """A sealed range of one shard on its way. `hash` is what audit leaves and receipts name it by."""

    header: EnvelopeHeader
    ciphertext: bytes | memoryview
    signature: bytes

    @property
    def hash(self) -> bytes:
        """SHA-256 over the header's first 80 bytes and the ciphertext: 32 bytes."""
        digest = hashlib.sha256(self.header.encode()[:_BOUND_BYTES])
        digest.update(self.ciphertext)
        return digest.digest()

    def encode(self) -> bytes:
        """As it travels."""
        return b"".join((self.header.encode(), self.ciphertext, self.signature))


class Crossing(NamedTuple):
    """What an envelope held: `batch` is None where nothing of the range crossed; one source offset per record."""

    batch: Batch | None
    source_offsets: Sequence[int]


def decode_envelope(data: Buffer) -> TransferEnvelope:
    """One whole envelope, nothing after it; the ciphertext is a view into `data`. Its seal is not looked at.

    Raises EnvelopeError(ENVELOPE_INVALID).
    """
    if len(data) < ENVELOPE_HEADER_BYTES:
        raise EnvelopeError(
            f"{len(data)} bytes are fewer than an envelope's header, {ENVELOPE_HEADER_BYTES}."
        )
    magic, version, flags, *fields = _HEADER.unpack_from(data)
    header = EnvelopeHeader(*fields)
    if magic != _MAGIC or version != _VERSION or flags:
        raise EnvelopeError(
            f"Magic {magic!r}, version {version}, flags {flags:#04x} are not FE, {_VERSION}, 0."
        )
    if not _COUNT.size + _TAG_BYTES <= header.ciphertext_length <= CIPHERTEXT_BYTES_MAX or not (
        0 < header.signature_length <= SIGNATURE_BYTES_MAX
    ):
        raise EnvelopeError(
            f"{header.ciphertext_length} bytes of ciphertext and {header.signature_length} of signature; "
            f"at most {CIPHERTEXT_BYTES_MAX} and {SIGNATURE_BYTES_MAX} are allowed."
        )
    _check_range(header)
    end = ENVELOPE_HEADER_BYTES + header.ciphertext_length
    if len(data) != end + header.signature_length:
        raise EnvelopeError(
            f"{len(data)} bytes where the envelope's header says {end + header.signature_length}."
        )
    view = memoryview(data)
    return TransferEnvelope(header, view[ENVELOPE_HEADER_BYTES:end], bytes(view[end:]))


def _check_range(header: EnvelopeHeader) -> None:
    span = header.last_offset - header.base_offset + 1
    if header.last_offset > OFFSET_MAX:
        raise EnvelopeError(f"Offset {header.last_offset} is over the highest one, {OFFSET_MAX}.")
    if not 0 < span <= RANGE_OFFSETS_MAX or not 0 <= header.records <= min(span, RECORDS_MAX):
        raise EnvelopeError(
            f"{header.records} records cannot cross from offsets {header.base_offset} to {header.last_offset}."
        )


def _nonce(base_offset: int) -> bytes:
    return bytes(4) + base_offset.to_bytes(8, "big")


def _message(scope: TransferScope, digest: bytes) -> bytes:
    return bind("transfer-envelope-message", scope.encode(), digest)


def seal_envelope(
    key: TransferKey,
    agent: Identity,
    *,
    base_offset: int,
    last_offset: int,
    batch: Batch | None,
    source_offsets: Sequence[int],
) -> TransferEnvelope:
    """Seal the range `base_offset` to `last_offset` (both included), of which `batch` holds the crossing records.

    `source_offsets` has one offset per record, ascending. `batch` is None where none crosses. Raises
    EnvelopeError where range, offsets and batch do not fit, KeyScopeError where `agent` is not the link's bridge.
    """
    scope = key.scope
    if agent.spiffe_id != scope.bridge:
        raise KeyScopeError(f"{agent.spiffe_id} cannot send for {scope.bridge}.")
    records = 0 if batch is None else batch.header.records
    if len(source_offsets) != records:
        raise EnvelopeError(f"{records} records cross, but {len(source_offsets)} source offsets are given.")
    if batch is not None and batch.header.flags & FLAG_SEALED:
        raise EnvelopeError("The batch is still sealed under a key of its source.")
    parts: list[bytes | memoryview]
    if records == last_offset - base_offset + 1:
        parts = [_COUNT.pack(0)]
        if list(source_offsets) != list(range(base_offset, last_offset + 1)):
            raise EnvelopeError("The source offsets are not those of the range.")
    else:
        deltas = [offset - base_offset for offset in source_offsets]
        if not _ascending(deltas, last_offset - base_offset):
            raise EnvelopeError("The source offsets do not ascend within the range.")
        parts = [_COUNT.pack(records), struct.pack(f">{records}I", *deltas)]
    if batch is not None:
        parts += (batch.header.encode(), batch.body)
    plaintext = b"".join(parts)
    header = EnvelopeHeader(
        scope.shard, scope.epoch, records, base_offset, last_offset, scope.incarnation, key.key_id,
        scope.reference(), len(plaintext) + _TAG_BYTES, 0,
    )  # fmt: skip
    _check_range(header)
    if header.ciphertext_length > CIPHERTEXT_BYTES_MAX:
        raise EnvelopeError(
            f"{header.ciphertext_length} bytes in one envelope; {CIPHERTEXT_BYTES_MAX} are allowed."
        )
    bound = _AAD_PREFIX + header.encode()[:_BOUND_BYTES]
    ciphertext = key._cipher.encrypt(_nonce(base_offset), plaintext, bound)
    unsigned = TransferEnvelope(header, ciphertext, b"")
    signature = agent.sign("transfer-envelope", _message(scope, unsigned.hash))
    return TransferEnvelope(header._replace(signature_length=len(signature)), ciphertext, signature)


def open_envelope(key: TransferKey, envelope: TransferEnvelope, agent: Peer) -> Crossing:
    """What crossed. In this order: does it belong to this key's link; did `agent` sign it; does it open; does it hold.

    That it follows on what was recorded last is for the caller to check (`header.base_offset`). Raises
    EnvelopeError(ENVELOPE_INVALID) for another link's envelope or contents of the wrong shape, TamperError(TAMPERED)
    where signature or seal do not hold.
    """
    scope, header = key.scope, envelope.header
    which = f"The envelope of {scope}, source offsets {header.base_offset} to {header.last_offset},"
    if (header.scope, header.key_id, header.shard, header.epoch, header.incarnation) != (
        scope.reference(), key.key_id, scope.shard, scope.epoch, scope.incarnation,
    ):  # fmt: skip
        raise EnvelopeError(
            f"{which} belongs to another link, shard, epoch, incarnation or key than the one that was opened."
        )
    _check_range(header)
    if agent.spiffe_id != scope.bridge or not agent.signed(
        "transfer-envelope", _message(scope, envelope.hash), envelope.signature
    ):
        raise TamperError(f"{which} is not signed by {scope.bridge}.")
    bound = _AAD_PREFIX + header.encode()[:_BOUND_BYTES]
    try:
        plaintext = key._cipher.decrypt(_nonce(header.base_offset), envelope.ciphertext, bound)
    except (InvalidTag, ValueError):
        raise TamperError(
            f"{which} does not open with transfer key {key.key_id.hex()}: it was changed or moved."
        ) from None
    return _decode_crossing(header, memoryview(plaintext), which)


def _decode_crossing(header: EnvelopeHeader, plaintext: memoryview, which: str) -> Crossing:
    (count,) = _COUNT.unpack_from(plaintext)
    span = header.last_offset - header.base_offset + 1
    if count != (0 if header.records == span else header.records):
        raise EnvelopeError(f"{which} lists {count} offsets for {header.records} records.")
    body_at = _COUNT.size + 4 * count
    if len(plaintext) < body_at:
        raise EnvelopeError(f"{which} is cut off within its offsets.")
    source_offsets: Sequence[int]
    if header.records == span:
        source_offsets = range(header.base_offset, header.last_offset + 1)
    else:
        deltas = struct.unpack_from(f">{count}I", plaintext, _COUNT.size)
        if not _ascending(deltas, span - 1):
            raise EnvelopeError(f"{which} lists offsets that do not ascend within its range.")
        source_offsets = [header.base_offset + delta for delta in deltas]
    if not header.records:
        if len(plaintext) != body_at:
            raise EnvelopeError(f"{which} says that nothing crosses, and carries {len(plaintext)} bytes.")
        return Crossing(None, source_offsets)
    try:
        batch = decode_batch(plaintext[body_at:])
    except RequestError as error:
        raise EnvelopeError(f"{which} carries no sound batch. {error.sentence}") from error
    if batch.header.records != header.records or batch.header.flags & FLAG_SEALED:
        raise EnvelopeError(f"{which} carries a batch of {batch.header.records} records, or a sealed one.")
    return Crossing(batch, source_offsets)


def _ascending(deltas: Sequence[int], last: int) -> bool:
    """True where the numbers rise from at least 0 to at most `last`."""
    if not deltas:
        return True
    return deltas[0] >= 0 and deltas[-1] <= last and not any(map(ge, deltas, deltas[1:]))
