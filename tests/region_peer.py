"""A peer that speaks to a broker over the transport port alone, so that it can say what no client would."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec

import felix
from felix.batch import NewRecord, encode_batch
from felix.errors import FelixError
from felix.frames import Frame, FrameDecoder, FrameType, encode_frame
from felix.identity import NONCE_BYTES, Binding, Identity, Proof, prove
from felix.identity_file import load_identity
from felix.messages import Answer, Challenge, Request, decode_answer, decode_error, encode_message
from felix.session import ClientSession, Established
from felix.transport.port import ClientTls, Connection, engine_named
from keys.bundle import decode_bundle
from region.folder import RegionFolder

LOOK_S = 0.001
ASK_S = 0.02
WAIT_S = 120.0
"""Longest wait for something that must happen; only a failing test waits this long."""
SESSION_DOCUMENTS = 100
"""Of another region's bridge in one session: one without a grant there may send some hundred kilobytes in all."""


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait for something that nobody announces. `condition` may be async, and ask a broker: then it is asked more seldom."""
    async with asyncio.timeout(timeout_s):
        while True:
            found, pause_s = condition(), LOOK_S
            if isinstance(found, Awaitable):
                found, pause_s = await found, ASK_S
            if found:
                return
            await asyncio.sleep(pause_s)


def encode_request(request: Request, correlation: int = 1) -> bytes:
    return encode_message(FrameType.REQUEST, request, correlation)


def batch_frame(
    payloads: list[bytes], correlation: int = 1, *, shard: int = 0, producer: int = 0, sequence: int = 0
) -> bytes:
    """A whole BATCH frame."""
    batch = encode_batch(
        [NewRecord(payload) for payload in payloads],
        shard=shard,
        producer_id=producer,
        producer_epoch=0,
        base_sequence=sequence,
    )
    return encode_frame(FrameType.BATCH, batch.encode(), correlation)


@dataclass
class RawPeer:
    """A transport handler that keeps every frame it was sent."""

    folder: RegionFolder
    identity: Identity
    region: str = "us-east"
    connection: Connection | None = None
    control: int = -1
    frames: dict[int, list[Frame]] = field(default_factory=dict)
    closed_with: tuple[int, str] | None = None
    challenge: Challenge | None = None
    binding: Binding | None = None
    established: Established | None = None
    alter_proof: Callable[[Proof], Proof] = lambda proof: proof
    _decoders: dict[int, FrameDecoder] = field(default_factory=dict)
    _session: ClientSession | None = None

    # -- transport handler

    def connected(self, connection: Connection) -> None:
        self.connection = connection

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        decoder = self._decoders.setdefault(stream_id, FrameDecoder())
        for frame in decoder.feed(data):
            kept = msgspec.structs.replace(frame, body=memoryview(bytes(frame.body)))
            self.frames.setdefault(stream_id, []).append(kept)
        if stream_id == self.control and self._session is not None and self.established is None:
            try:
                for event in self._session.receive(data):
                    if isinstance(event, Established):
                        self.established = event
            except FelixError:
                return
            out = self._session.take_output()
            if out:
                self.send(out)

    def stream_reset(self, stream_id: int, code: int) -> None: ...
    def drained(self) -> None: ...

    def closed(self, code: int, reason: str) -> None:
        self.closed_with = (code, reason)

    # -- what tests do

    @property
    def peer(self) -> Connection:
        assert self.connection is not None
        return self.connection

    def go_deaf(self) -> None:
        """From now on every datagram to this peer is lost."""
        self.peer._owner.datagrams_received = lambda *_: None  # type: ignore[attr-defined]

    def send(self, data: bytes, stream_id: int | None = None, *, end: bool = False) -> None:
        """Nothing where the broker has closed already."""
        if not self.peer.is_closed:
            self.peer.send(self.control if stream_id is None else stream_id, data, end=end)

    def open_control(self) -> None:
        self.control = self.peer.open_stream(bidirectional=True)

    def open_stream(self) -> int:
        return self.peer.open_stream(bidirectional=False)

    async def handshake(self) -> None:
        """Come in as `identity`. Raises what the broker refuses it with."""

        def answer(challenge: Challenge, binding: Binding) -> Proof:
            self.challenge, self.binding = challenge, binding
            return self.alter_proof(prove(self.identity, binding))

        self.open_control()
        self._session = ClientSession(
            region=self.region,
            software="raw",
            nonce=os.urandom(NONCE_BYTES),
            leaf_sha256=self.peer.server_leaf_sha256,
            prove=answer,
        )
        self.send(self._session.take_output())
        await until(lambda: self.established or self.errors() or self.closed_with)
        if self.established is None:
            raise self.errors()[-1]

    def of(self, type_: FrameType, stream_id: int | None = None) -> list[Frame]:
        found = self.frames.get(self.control if stream_id is None else stream_id, [])
        return [frame for frame in found if frame.type is type_]

    def errors(self, correlation: int | None = None, stream_id: int | None = None) -> list[FelixError]:
        return [
            decode_error(frame.body)
            for frame in self.of(FrameType.ERROR, stream_id)
            if correlation is None or frame.correlation == correlation
        ]

    def answers(self, correlation: int) -> list[Answer]:
        return [
            decode_answer(frame.body)
            for frame in self.of(FrameType.ANSWER)
            if frame.correlation == correlation
        ]

    async def ask(self, request: Request, correlation: int, stream_id: int | None = None) -> Answer:
        """One request's answer. Raises what it is refused with."""
        self.send(encode_request(request, correlation), stream_id)
        await until(lambda: self.answers(correlation) or self.errors(correlation) or self.closed_with)
        if self.errors(correlation):
            raise self.errors(correlation)[0]
        assert self.answers(correlation), f"the session ended first: {self.closed_with}"
        return self.answers(correlation)[0]

    async def ending(self) -> FelixError:
        """The error that ended the session."""
        await until(lambda: self.closed_with)
        return self.errors(0)[-1]


@asynccontextmanager
async def raw_peer(
    folder: RegionFolder,
    address: tuple[str, int],
    *,
    identity: Identity | None = None,
    engine: str | None = None,
    proved: bool = True,
    **options: object,
) -> AsyncIterator[RawPeer]:
    """A connection to a broker; with `proved`, a session of the operator (or of `identity`)."""
    peer = RawPeer(folder, identity or load_identity(folder.identity("operator")), **options)  # type: ignore[arg-type]
    bundle = decode_bundle(folder.bundle.read_bytes()).bundle
    await engine_named(engine).connect(
        *address,
        ClientTls(bundle.root_pem.encode(), f"{bundle.region}.{bundle.mesh}"),
        peer,
    )
    try:
        if proved:
            await peer.handshake()
        yield peer
    finally:
        peer.peer.close()


def client(
    folder: RegionFolder, identity: str = "", engine: str = "", **options: object
) -> felix.RegionClient:
    """The SDK's client of a region, with waits that suit a test."""
    profile = felix.load_profile(folder.root.name, identity=identity, home=folder.root.parent)
    return felix.connect(
        profile=replace(profile, engine=engine),
        backoff=felix.BackoffPolicy(first_ms=5, ceiling_ms=100),
        **options,  # type: ignore[arg-type]
    )


async def take(subscription: felix.Subscription, count: int, timeout_s: float = 60.0) -> list[felix.Record]:
    """The next records; payloads and keys as bytes of their own."""
    found: list[felix.Record] = []
    async with asyncio.timeout(timeout_s):
        while len(found) < count:
            found.append(await anext(subscription))
    return found


async def payloads(region: felix.RegionClient, stream: str, count: int) -> list[bytes]:
    """Of the first records of a stream."""
    async with region.stream(stream).subscribe(start="earliest") as records:
        return [bytes(record.payload) for record in await take(records, count)]
