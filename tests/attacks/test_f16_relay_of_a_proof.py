"""F16: whoever holds one broker's TLS key passes another broker's challenge to its client, and the client's proof back.

The relay here is a server with a genuine certificate of broker b1, the region's name in it, which it did not get by proving
anything to b2; an operator connects to it. Every message between the two passes through its hands, as it is or changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from region_home import make_region, running
from region_peer import raw_peer, until

from felix.errors import Code, FelixError
from felix.frames import Frame, FrameDecoder, FrameType, encode_frame
from felix.identity import Binding, Identity, Proof, prove
from felix.identity_file import load_identity
from felix.messages import ClientHello, decode_error, decode_handshake, encode_message
from felix.names import SpiffeId
from felix.runtime.real import now_ms
from felix.session import ClientSession
from felix.transport.port import ENGINE_NAMES, ClientTls, Connection, ServerTls, engine_named
from keys.authority import load_authority
from region.folder import RegionFolder
from region.node import Node

Tally = Callable[[str, int], None]
Change = Callable[[Frame], bytes]


def as_it_is(frame: Frame) -> bytes:
    return encode_frame(frame.type, frame.body, frame.correlation)


def hello_with(**changes: object) -> Change:
    """Fields of the client's first message replaced on the way."""

    def change(frame: Frame) -> bytes:
        message = decode_handshake(frame.body)
        if not isinstance(message, ClientHello):
            return as_it_is(frame)
        return encode_message(FrameType.HANDSHAKE, msgspec.structs.replace(message, **changes))

    return change


class Outward:
    """The relay's connection to b2: what comes back goes to the client."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.decoder = FrameDecoder()
        self.stream = -1
        self.errors: list[FelixError] = []
        self.welcomed = False
        self.connection: Connection | None = None

    def connected(self, connection: Connection) -> None:
        self.connection = connection
        self.stream = connection.open_stream(bidirectional=True)

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        for frame in self.decoder.feed(data):
            if frame.type is FrameType.ERROR:
                self.errors.append(decode_error(frame.body))
            elif frame.type is FrameType.HANDSHAKE:
                self.welcomed = self.welcomed or b"welcome" in bytes(frame.body[:20])
            if self.relay.client is not None and not self.relay.client.is_closed:
                self.relay.client.send(0, as_it_is(frame))

    def stream_reset(self, stream_id: int, code: int) -> None: ...
    def drained(self) -> None: ...
    def closed(self, code: int, reason: str) -> None: ...


class Relay:
    """The server that the client believes to be its region's broker."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self.client: Connection | None = None
        self.outward = Outward(self)
        self.decoder = FrameDecoder()

    def connected(self, connection: Connection) -> None:
        self.client = connection
        connection.admit()

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        assert self.outward.connection is not None
        for frame in self.decoder.feed(data):
            if not self.outward.connection.is_closed:
                self.outward.connection.send(self.outward.stream, self.change(frame))

    def stream_reset(self, stream_id: int, code: int) -> None: ...
    def drained(self) -> None: ...
    def closed(self, code: int, reason: str) -> None: ...


async def attempt(node: Node, folder: RegionFolder, engine: str, change: Change) -> FelixError:
    """An operator connects to the relay; what b2 says to the relay."""
    root_pem = load_authority(folder.authority, "us-east", "acme").anchor().root_pem
    b1 = load_authority(folder.authority, "us-east", "acme").issue_identity(
        SpiffeId("us-east", "acme", "broker", "b1"), now_ms(), dns_names=("b1.us-east.acme", "us-east.acme")
    )
    relay = Relay(change)
    listener = await engine_named(engine).listen(
        "127.0.0.1", 0, ServerTls(b1.chain_pem, b1.key_pem()), lambda: relay
    )
    tls = ClientTls(root_pem, "us-east.acme")
    outward = await engine_named(engine).connect(*node.address, tls, relay.outward)
    try:
        async with raw_peer(folder, listener.address, engine=engine, proved=False) as victim:
            identity = victim.identity
            victim.open_control()
            victim._session = ClientSession(
                region="us-east",
                software="victim",
                nonce=bytes(32),
                leaf_sha256=victim.peer.server_leaf_sha256,
                prove=lambda _, binding: prove(identity, binding),
            )
            victim.send(victim._session.take_output())
            await until(lambda: relay.outward.errors or relay.outward.welcomed)
    finally:
        outward.close()
        await listener.close()
    assert not relay.outward.welcomed, "the relay is an operator"
    return relay.outward.errors[0]


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_a_relayed_proof_is_refused(tmp_path: Path, engine: str, tally: Tally) -> None:
    folder = make_region(tmp_path, "us-east")
    operator = load_identity(folder.identity("operator"))
    cases: list[tuple[Change, Code]] = [
        (as_it_is, Code.IDENTITY_REFUSED),
        (hello_with(nonce=bytes(range(32))), Code.IDENTITY_REFUSED),
        (hello_with(features=["less"]), Code.IDENTITY_REFUSED),
        (hello_with(versions=[2, 3]), Code.IDENTITY_REFUSED),
        (hello_with(versions=[1]), Code.VERSION_UNSUPPORTED),
        (hello_with(nonce=b""), Code.PROTOCOL),
    ]
    async with running(folder, broker="b2", engine=engine) as node:
        for change, code in cases:
            error = await attempt(node, folder, engine, change)
            assert error.code is code, error
        assert node.broker.metrics.authenticated == 0
        async with raw_peer(folder, node.address, engine=engine):
            assert node.broker.metrics.authenticated == 1
        # What a client signs for another certificate, or signed under version 1, opens nothing either.
        for forged in (
            lambda binding: prove(operator, binding._replace(leaf_sha256=bytes(32))),
            lambda binding: _version_1(operator, binding),
        ):
            with pytest.raises(FelixError) as refused:
                await _prove_with(folder, node, engine, forged)
            assert refused.value.code is Code.IDENTITY_REFUSED
        assert node.broker.metrics.authenticated == 1
    tally("relayed and rebound proofs", len(cases) + 2)


def _version_1(identity: Identity, binding: Binding) -> Proof:
    """Over the broker's nonce, the region and the server's name, as release 0.1 signed it."""
    challenge = decode_handshake(memoryview(binding.challenge))
    parts = (challenge.nonce, b"us-east", b"us-east.acme")  # type: ignore[union-attr]
    message = b"".join(len(part).to_bytes(4) + part for part in parts)
    return Proof(identity.chain_pem, identity.sign("identity", message))


async def _prove_with(
    folder: RegionFolder, node: Node, engine: str, forge: Callable[[Binding], Proof]
) -> None:
    async with raw_peer(folder, node.address, engine=engine, proved=False) as peer:

        def forged(_: Proof) -> Proof:
            assert peer.binding is not None
            return forge(peer.binding)

        peer.alter_proof = forged
        await peer.handshake()
