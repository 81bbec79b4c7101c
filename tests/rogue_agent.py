"""A bridge agent that is not ours: it has a bridge's identity and a grant, and builds what it sends by itself.

Batches, envelopes and their seals are put together here from docs/wire.md, byte by byte, so that a test can send what the
product's own code would never make: a header twice, bytes behind a compressed frame, offsets beyond the last one. What
it borrows is the session below (tests/region_peer.py) and the seal of the transfer key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import xxhash
import zstandard
from bridge_mesh import BRIDGE, STREAM, Mesh, until
from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from region_peer import RawPeer, encode_request, raw_peer

from audit.receipt import Receipt, open_receipt
from audit.stream_statement import Epoch
from felix.errors import FelixError
from felix.frames import Frame, FrameType, encode_frame
from felix.identity import Identity
from felix.identity_file import load_identity
from felix.messages import IngestOpened, OpenIngest, decode_answer, decode_error
from felix.names import StreamName
from keys.key_id import KeyKind, new_key_id
from keys.transfer import TransferKey, TransferScope, seal_transfer_key
from policy.transform import TransformSpec

INCARNATION = b"i" * 16


class Wild(NamedTuple):
    """One record: headers as pairs, because a rogue may send one name twice; or raw, because they may be no headers."""

    payload: bytes
    key: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ((b"felix-path", b"us-east"),)
    raw_headers: bytes | None = None

    def encoded_headers(self) -> bytes:
        if self.raw_headers is not None:
            return self.raw_headers
        if not self.headers:
            return b""
        return struct.pack(">H", len(self.headers)) + b"".join(
            struct.pack(">H", len(name)) + name + struct.pack(">I", len(value)) + value
            for name, value in self.headers
        )

    @property
    def size(self) -> int:
        return len(self.payload) + len(self.key) + len(self.encoded_headers())


def wild_batch(
    records: Sequence[Wild],
    *,
    compress: bool = False,
    behind: bytes = b"",
    shard: int = 0,
    producer: int = 0,
    time_ms: int = 1_760_000_000_000,
    flags_more: int = 0,
    plain_length: int | None = None,
    squeeze: Callable[[bytes], bytes] | None = None,
) -> bytes:
    """One batch, header and body. `behind` stands behind the body's columns, or behind its zstd frame; `squeeze` makes that frame."""
    keys, headers = [record.key for record in records], [record.encoded_headers() for record in records]
    columns = [[record.payload for record in records]]
    flags = flags_more
    if any(keys):
        flags |= 0x04
        columns.append(keys)
    if any(headers):
        flags |= 0x08
        columns.append(headers)
    body = b""
    for column in columns:
        end, ends = 0, []
        for value in column:
            end += len(value)
            ends.append(end)
        body += struct.pack(f">{len(ends)}I", *ends)
    for column in (*columns[1:], columns[0]):
        body += b"".join(column)
    length = len(body) if plain_length is None else plain_length
    if compress or squeeze is not None:
        flags |= 0x01
        body = (squeeze or zstandard.ZstdCompressor(level=1).compress)(body)
    body += behind
    head = struct.pack(
        ">2sBBIQqIIQIIQ16sII", b"FX", 1, flags, shard, 0, time_ms, 0, len(records), producer, 0, length, 0, bytes(16),
        len(body), 0,
    ) + struct.pack(">Q", xxhash.xxh3_64_intdigest(body))  # fmt: skip
    return head + struct.pack(">Q", xxhash.xxh3_64_intdigest(head)) + body


def bound(purpose: str, *parts: bytes | str) -> bytes:
    """docs/wire.md, "Contexts"."""
    raw = [part.encode() if isinstance(part, str) else part for part in parts]
    return f"felix/{purpose}/1\0".encode() + b"".join(struct.pack(">I", len(part)) + part for part in raw)


def wild_envelope(
    key: TransferKey,
    agent: Identity,
    base: int,
    last: int,
    batch: bytes,
    records: int,
    offsets: Sequence[int] | None = None,
) -> bytes:
    """An envelope whose seal and signature hold, whatever it says. `offsets`: of the crossing records, None for all."""
    scope = key.scope
    if offsets is None:
        plain = struct.pack(">I", 0) + batch
    else:
        plain = (
            struct.pack(f">I{len(offsets)}I", len(offsets), *(offset - base for offset in offsets)) + batch
        )
    head = struct.pack(
        ">2sBBIIIQQ16s16s16s", b"FE", 1, 0, scope.shard, scope.epoch, records, base, last, scope.incarnation, key.key_id,
        hashlib.sha256(scope.encode()).digest()[:16],
    )  # fmt: skip
    secret = HKDFExpand(SHA256(), 32, bound("transfer-seal", key.key_id, scope.encode())).derive(key.secret)
    sealed = AESGCMSIV(secret).encrypt(
        bytes(4) + struct.pack(">Q", base), plain, b"felix/transfer-envelope/1\0" + head
    )
    digest = hashlib.sha256(head + sealed).digest()
    signature = agent.sign("transfer-envelope", bound("transfer-envelope-message", scope.encode(), digest))
    return head + struct.pack(">II", len(sealed), len(signature)) + sealed + signature


class RogueAgent:
    """One session of the bridge at the destination, under one grant."""

    def __init__(
        self,
        mesh: Mesh,
        peer: RawPeer,
        grant: str,
        terms_hash: bytes,
        *,
        stream: str = STREAM,
        destination: str = "",
        incarnation: bytes = INCARNATION,
        epoch: int = 1,
    ) -> None:
        self.mesh, self.peer = mesh, peer
        scope = TransferScope(
            "us-east", "eu-west", StreamName.parse(stream), incarnation, StreamName.parse(destination or stream), 0,
            epoch, grant, terms_hash, peer.identity.spiffe_id,
        )  # fmt: skip
        self.key = TransferKey(new_key_id("us-east", KeyKind.TRANSFER, b"r" * 11), scope, b"k" * 32)
        self.stream = -1
        self.position = 0
        self._read = 0

    async def open(self, start: int = 0, shards: int = 1, statement: bytes | None = None) -> IngestOpened:
        """Open an ingest stream. Raises what it is refused with.

        Without a `statement`, with one that the source region signs for what is asked, its log beginning at `start`.
        """
        scope = self.key.scope
        sealed = seal_transfer_key(
            self.key, self.mesh.bundle("eu-west").hybrid_import_key(), self.peer.identity
        )
        if statement is None:
            statement = self.mesh.statement(
                stream=str(scope.stream),
                incarnation=scope.incarnation,
                shards=shards,
                epochs=(Epoch(scope.epoch, 0),),
                log_start=start,
            )
        request = OpenIngest(
            scope.grant_id, "us-east", str(scope.stream), 0, shards, scope.incarnation, scope.epoch,
            sealed.sealed, sealed.signature, statement,
        )  # fmt: skip
        self.stream = self.peer.peer.open_stream(bidirectional=True)
        self._read = 0
        self.peer.send(encode_request(request), self.stream)
        await until(lambda: self._answers() or self.peer.closed_with, "an answer")
        self._raise()
        opened = decode_answer(self.peer.of(FrameType.ANSWER, self.stream)[0].body)
        assert isinstance(opened, IngestOpened)
        self.position = opened.position
        return opened

    def _answers(self) -> list[Frame]:
        return self.peer.frames.get(self.stream, [])

    def _raise(self) -> None:
        errors: list[FelixError] = [
            decode_error(frame.body) for frame in self.peer.of(FrameType.ERROR, self.stream)
        ]
        if not errors and self.peer.closed_with:
            errors = self.peer.errors(0) or [
                FelixError(f"The connection was closed: {self.peer.closed_with}.")
            ]
        if errors:
            raise errors[0]

    def send(self, records: Sequence[Wild], *, base: int | None = None, **batch: object) -> int:
        """One envelope of consecutive offsets. Returns the offset after it."""
        at = self.position if base is None else base
        data = wild_batch(records, **batch)  # type: ignore[arg-type]
        last = at + len(records) - 1
        self.send_envelope(wild_envelope(self.key, self.peer.identity, at, last, data, len(records)))
        return last + 1

    def send_nothing(self, base: int, last: int) -> None:
        """An envelope without records."""
        self.send_envelope(wild_envelope(self.key, self.peer.identity, base, last, b"", 0, ()))

    def send_envelope(self, envelope: bytes) -> None:
        self.peer.send(encode_frame(FrameType.TRANSFER, envelope), self.stream)

    async def receipt(self) -> Receipt:
        """The next one. Raises what the broker refuses instead."""
        wanted = self._read + 1
        await until(
            lambda: (
                len(self.peer.of(FrameType.RECEIPT, self.stream)) >= wanted
                or self.peer.of(FrameType.ERROR, self.stream)
                or self.peer.closed_with
            ),
            "a receipt",
        )
        receipts = self.peer.of(FrameType.RECEIPT, self.stream)
        if len(receipts) < wanted:
            self._raise()
        self._read = wanted
        frame = receipts[wanted - 1]
        self.position = struct.unpack_from(">Q", frame.body)[0]
        return open_receipt(bytes(frame.body[8:]), self.mesh.trust.region("eu-west").receipt_keys)

    async def cross(self, records: Sequence[Wild], **batch: object) -> Receipt:
        """Send one envelope and wait for its receipt."""
        self.send(records, **batch)
        return await self.receipt()

    async def refused(self, records: Sequence[Wild], **batch: object) -> FelixError:
        """Send one envelope that must be refused, wait for the refusal, and end this side of the ingest stream."""
        self.send(records, **batch)
        try:
            receipt = await self.receipt()
        except FelixError as error:
            self.peer.send(b"", self.stream, end=True)
            return error
        raise AssertionError(f"it was taken: {receipt}")


async def granted(mesh: Mesh, **changes: object) -> tuple[str, bytes]:
    """A grant in force at the destination, any JSON object if nothing else is said: its id and hash of terms."""
    body, export, accepted = mesh.sign_grant(**{"transform": TransformSpec(), **changes})
    await mesh.agree("eu-west", body, export, accepted)
    return body.grant, bytes.fromhex(body.terms_hash)


@asynccontextmanager
async def rogue_agent(
    mesh: Mesh,
    grant: tuple[str, bytes],
    *,
    bridge: str = BRIDGE,
    engine: str | None = None,
    address: tuple[str, int] | None = None,
    **options: object,
) -> AsyncIterator[RogueAgent]:
    """A session with a bridge's identity at the destination, or by way of another address."""
    identity = load_identity(mesh.us.identity(bridge))
    address = address or mesh.nodes["eu-west"].address
    async with raw_peer(mesh.eu, address, identity=identity, engine=engine, region="eu-west") as peer:
        yield RogueAgent(mesh, peer, *grant, **options)  # type: ignore[arg-type]
