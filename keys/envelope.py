"""The seal of a batch at rest: AES-256-GCM under a data key that belongs to one shard in one leader epoch.

Body of a sealed batch::

    0        counter       8   big-endian; the nonce is four zero bytes and these
    8        ciphertext    n   of the body as it stood (compressed, if it was)
    8 + n    tag          16

Additional data: `felix/batch/1`, a zero byte, then region, stream, incarnation and key id, each behind its
length, then `BatchHeader.immutable_fields()` (version, flags, shard, base offset, append time, leader epoch,
count, producer, plain length, base sequence).

The header of a sealed batch has FLAG_SEALED, the key id, and length and checksum of the sealed body; all else
stays. Opening gives back exactly what was sealed.

Invariants:
- one data key has at most one sealer, ever, in one process, and a sealer never gives out a counter twice; with a
  data key fresh for every process start, neither a crash nor a fork can bring a nonce back. A derived key is as fresh
  as the random id that it is derived from, and whoever drew that id alone seals with it;
- the AES key is derived from the data key's secret and its whole scope, and so is the commitment: a wrong secret
  is found before it is used, and a secret under another stream's name opens nothing.

Pure. The log seals, brokers and granted bridges open. A sealer may be shared between threads.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from msgspec.structs import replace

from felix.batch import (
    BATCH_BYTES_MAX,
    FLAG_SEALED,
    HEADER_BYTES,
    NO_KEY_ID,
    Batch,
    BatchHeader,
    body_checksum,
)
from felix.context import bind
from felix.errors import Code, RequestError, TamperError
from felix.names import StreamName
from keys.errors import KeyExhaustedError, KeyScopeError
from keys.key_id import KeyKind, check_key_id, kind_of

SECRET_BYTES: Final = 32
INCARNATION_BYTES: Final = 16
COUNTER_BYTES: Final = 8
TAG_BYTES: Final = 16
SEAL_BYTES: Final = COUNTER_BYTES + TAG_BYTES
"""What a seal adds to a body."""
SEALABLE_BYTES_MAX: Final = BATCH_BYTES_MAX - HEADER_BYTES - SEAL_BYTES
"""The largest body that still fits into a batch once it is sealed."""
DATA_KEY_BATCHES_MAX: Final = 1 << 28
"""Batches under one data key: with 1 MiB each that is 2^44 blocks, an advantage of about 2^-40 against GCM
(NIST SP 800-38D, appendix B and C give the bounds)."""
DATA_KEY_AGE_MS_MAX: Final = 24 * 3_600_000
"""How long one data key seals: a leaked key opens at most a day of one shard."""

_COUNTER: Final = struct.Struct(">Q")
_NONCE_PREFIX: Final = bytes(4)


def _expand(secret: bytes, info: bytes) -> bytes:
    return HKDFExpand(SHA256(), 32, info).derive(secret)


@dataclass(frozen=True, slots=True)
class DataKey:
    """The key of one shard in one leader epoch, stored or derived. `secret` has 32 bytes and is in no repr, log or error.

    Sizes: `key_id` 16 bytes, `incarnation` 16 bytes.
    """

    key_id: bytes
    region: str
    stream: StreamName
    incarnation: bytes
    shard: int
    epoch: int
    secret: bytes = field(repr=False)
    _cipher: AESGCM = field(init=False, repr=False, compare=False)
    _bound: bytes = field(init=False, repr=False, compare=False)
    _sealer_made: threading.Lock = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_derived = kind_of(self.key_id) is KeyKind.DERIVED
        check_key_id(self.key_id, self.region, KeyKind.DERIVED if is_derived else KeyKind.DATA)
        if len(self.secret) != SECRET_BYTES or len(self.incarnation) != INCARNATION_BYTES:
            raise KeyScopeError(
                f"A data key has {SECRET_BYTES} secret bytes and {INCARNATION_BYTES} of incarnation, "
                f"not {len(self.secret)} and {len(self.incarnation)}."
            )
        object.__setattr__(self, "_cipher", AESGCM(_expand(self.secret, self._scope("data-key-seal"))))
        object.__setattr__(
            self, "_bound", bind("batch", self.region, str(self.stream), self.incarnation, self.key_id)
        )
        object.__setattr__(self, "_sealer_made", threading.Lock())

    def _scope(self, purpose: str) -> bytes:
        return bind(
            purpose, self.region, str(self.stream), self.incarnation, self.shard, self.epoch, self.key_id
        )

    def commitment(self) -> bytes:
        """32 bytes that only this secret in this scope gives; says nothing about the secret.

        They stand beside the wrapped key and in the log's segment headers (GCM alone does not commit to a key).
        """
        return _expand(self.secret, self._scope("data-key-commitment"))

    def claim_sealer(self) -> bool:
        """True for the first caller only: that one may seal. A key that was read back from disk is claimed at once."""
        return self._sealer_made.acquire(blocking=False)


class BatchSealer:
    """Seals batches under one data key, counting. Safe to share between threads.

    - `batches` is the next counter; it only grows, and no value of it is used twice.
    """

    __slots__ = ("_lock", "_process", "batches", "data_key", "started_ms")

    def __init__(self, data_key: DataKey, started_ms: int = 0) -> None:
        """`started_ms` is when the key began to seal; its age counts from there.

        Raises KeyScopeError where the key has a sealer already: two would count the same nonces.
        """
        if not data_key.claim_sealer():
            raise KeyScopeError(
                f"Data key {data_key.key_id.hex()} has a sealer already, or was made by an earlier process.",
                hint="Take a fresh data key from the keyring for every sealer.",
            )
        self.data_key = data_key
        self.started_ms = started_ms
        self.batches = 0
        self._process = os.getpid()
        self._lock = threading.Lock()

    def due(self, now_ms: int) -> bool:
        """True once the key's limit of batches or age is reached and the next batch needs a fresh key."""
        return self.batches >= DATA_KEY_BATCHES_MAX or now_ms - self.started_ms >= DATA_KEY_AGE_MS_MAX

    def seal(self, batch: Batch) -> Batch:
        """The sealed batch. Offsets, append time and epoch must be final: they are bound.

        Raises KeyScopeError for a batch of another shard or epoch or one that is sealed already,
        RequestError(BATCH_TOO_LARGE), KeyExhaustedError.
        """
        key, header = self.data_key, batch.header
        if header.flags & FLAG_SEALED:
            raise KeyScopeError(f"{_which(header)} is sealed already.")
        if header.shard != key.shard or header.leader_epoch != key.epoch:
            raise KeyScopeError(
                f"{_which(header)} cannot be sealed with the key of shard {key.shard}, epoch {key.epoch}."
            )
        if len(batch.body) > SEALABLE_BYTES_MAX:
            raise RequestError(
                f"{_which(header)} has a body of {len(batch.body)} bytes; sealed, at most {SEALABLE_BYTES_MAX} fit.",
                code=Code.BATCH_TOO_LARGE,
                hint="Publish smaller batches.",
            )
        if os.getpid() != self._process:
            raise KeyScopeError(
                f"Data key {key.key_id.hex()} belongs to process {self._process}; a forked copy would repeat its nonces."
            )
        with self._lock:
            counter = self.batches
            if counter >= DATA_KEY_BATCHES_MAX:
                raise KeyExhaustedError(
                    f"Data key {key.key_id.hex()} has sealed {counter} batches, its limit; a fresh one is needed."
                )
            self.batches = counter + 1
        front = _COUNTER.pack(counter)
        sealed = key._cipher.encrypt(
            _NONCE_PREFIX + front, batch.body, key._bound + header.immutable_fields()
        )
        body = front + sealed
        return Batch(
            replace(
                header,
                flags=header.flags | FLAG_SEALED,
                key_id=key.key_id,
                body_length=len(body),
                body_checksum=body_checksum(body),
            ),
            body,
        )


def open_batch(data_key: DataKey, batch: Batch) -> Batch:
    """The batch as it was before it was sealed.

    Raises TamperError(TAMPERED) where anything in it, or the key, the shard, the stream or the region, is not what
    was sealed; the sentence names the batch. Raises KeyScopeError for a batch that is not sealed.
    """
    header = batch.header
    if not header.flags & FLAG_SEALED:
        raise KeyScopeError(f"{_which(header)} is not sealed.")
    if header.key_id != data_key.key_id:
        raise _tampered(header, data_key, f"it was sealed with key {header.key_id.hex()}")
    if header.shard != data_key.shard or header.leader_epoch != data_key.epoch:
        raise _tampered(
            header, data_key, f"the key belongs to shard {data_key.shard}, epoch {data_key.epoch}"
        )
    body = memoryview(batch.body)
    if len(body) != header.body_length or len(body) < SEAL_BYTES:
        raise _tampered(header, data_key, f"{len(body)} bytes of body are not what was sealed")
    nonce = _NONCE_PREFIX + body[:COUNTER_BYTES]
    try:
        plain = data_key._cipher.decrypt(
            nonce, body[COUNTER_BYTES:], data_key._bound + header.immutable_fields()
        )
    except InvalidTag:
        raise _tampered(
            header, data_key, "its body, its header, or the place it was found in was changed"
        ) from None
    return Batch(
        replace(
            header,
            flags=header.flags & ~FLAG_SEALED,
            key_id=NO_KEY_ID,
            body_length=len(plain),
            body_checksum=body_checksum(plain),
        ),
        plain,
    )


def _which(header: BatchHeader) -> str:
    last = header.base_offset + header.records - 1
    return f"The batch of shard {header.shard}, offsets {header.base_offset} to {last}, epoch {header.leader_epoch},"


def _tampered(header: BatchHeader, data_key: DataKey, why: str) -> TamperError:
    return TamperError(
        f"{_which(header)} of {data_key.stream} in {data_key.region} "
        f"cannot be opened with key {data_key.key_id.hex()}: {why}.",
        hint="Keep the segment as it is, and repair it from a replica or a snapshot.",
    )
