"""F7: bytes that cross without a leaf. A bridge of another region asks for everything there is, and chooses every text."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bridge_mesh import BRIDGE, STREAM, Mesh
from region_peer import RawPeer, encode_request, raw_peer, until

from audit.leaf import Kind
from felix import messages
from felix.errors import Code, FelixError
from felix.frames import FrameType
from felix.identity import Identity
from felix.identity_file import load_identity
from felix.messages import Message, OpenIngest, OpenPublisher, OpenTransactions, Start, encode_message
from felix.quota import QuotaLimits
from felix.runtime.real import now_ms
from felix.settings import NamespaceSettings, SubscriptionChange
from felix.transaction_messages import Fence
from region.bootstrap import issue_identity
from region.config import load_config
from region.session.audience import AUDIENCES, Audience, audience_of, request_name

Tally = Callable[[str, int], None]
ENGINES = ("qh3", "aioquic")
REQUESTS: tuple[type[Message], ...] = tuple(messages.ANSWERS)
GRANT = "g-" + "a" * 16
EXCHANGES = frozenset(
    {
        messages.OpenConsumer,
        messages.OpenCache,
        messages.WatchCache,
        messages.OpenQueue,
        messages.OpenRelay,
        OpenTransactions,
        OpenIngest,
    }
)
VALUES: dict[str, Any] = {
    "stream": STREAM, "grant": GRANT, "from_region": "us-east", "source": "us-east", "destination": "eu-west", "links": [], "name": "n", "identity": "i", "rights": [],
    "scope": "tenant", "limits": QuotaLimits(), "unset": [], "namespace": "acme/ops", "settings": NamespaceSettings(),
    "kind": "export", "body": b"x", "level": "data", "subscription": 1, "change": SubscriptionChange(), "shard": 0,
    "shards": 1, "incarnation": b"i" * 16, "epoch": 1, "transfer_key": b"k", "signature": b"s", "key": b"k" * 16,
    "public_key": b"p", "checkpoint": b"c", "proof": [], "origin": "us-east.acme/audit", "cosigned": b"c",
    "credit_bytes": 0, "what": "streams", "statement": b"s", "start": Start("earliest"), "csr": b"c",
    "broker": "b1", "address": "127.0.0.1:1",
}  # fmt: skip
"""A value for each field that a request must have."""

pytestmark = pytest.mark.parametrize("engine", ENGINES)


def sample(request: type[Message]) -> Message:
    """A request of this kind that says as little as it may."""
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(request):
        if field.required:
            fields[field.name] = VALUES[field.name]
    return request(**fields)


@pytest.fixture
async def mesh(tmp_path: Path, engine: str) -> AsyncIterator[Mesh]:
    """eu-west alone serves; us-east is who attacks it."""
    mesh = Mesh.make(tmp_path)
    await mesh.start("eu-west", engine=engine)
    try:
        yield mesh
    finally:
        await mesh.stop("eu-west")


def attackers(mesh: Mesh) -> dict[Audience, Identity]:
    """One identity of each class that has no right at all."""
    found = {Audience.FOREIGN_BRIDGE: load_identity(mesh.us.identity(BRIDGE))}
    for audience in (Audience.CLIENT, Audience.BRIDGE, Audience.BROKER):
        name = f"nobody-{audience}"
        issue_identity(mesh.eu, load_config(mesh.eu.config), audience, name, now_ms())
        found[audience] = load_identity(mesh.eu.identity(name))
    return found


def peer_of(mesh: Mesh, engine: str, identity: Identity) -> Any:
    return raw_peer(
        mesh.eu, mesh.nodes["eu-west"].address, identity=identity, engine=engine, region="eu-west"
    )


async def ask(peer: RawPeer, request: Message, correlation: int) -> FelixError | None:
    """What the request is refused with, on the stream that it belongs on; None where it is answered."""
    stream = peer.control
    if type(request) in EXCHANGES:
        stream = peer.peer.open_stream(bidirectional=True)
    elif isinstance(request, OpenPublisher):
        stream = peer.open_stream()
    peer.send(encode_request(request, correlation), stream)
    answered = stream if type(request) in EXCHANGES else peer.control

    def said() -> list[Any]:
        return [frame for frame in peer.frames.get(answered, []) if frame.correlation == correlation]

    await until(lambda: said() or peer.closed_with)
    assert peer.closed_with is None, peer.closed_with
    errors = peer.errors(correlation, answered)
    return errors[0] if errors else None


def files(*folders: Path) -> Iterator[bytes]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                yield path.read_bytes()


def holding(canary: bytes, *folders: Path) -> int:
    return sum(canary in data for data in files(*folders))


def test_every_request_has_a_row(engine: str) -> None:
    assert set(AUDIENCES) == set(REQUESTS)


async def test_each_class_is_answered_what_its_rows_say_and_nothing_else(
    mesh: Mesh, engine: str, tally: Tally
) -> None:
    refused = answered = 0
    for audience, identity in attackers(mesh).items():
        assert audience_of(identity.spiffe_id, "eu-west") is audience
        async with peer_of(mesh, engine, identity) as peer:
            for number, request in enumerate(REQUESTS, 1):
                error = await ask(peer, sample(request), number)
                row = AUDIENCES[request]
                if audience in row.audiences and not row.by_right:
                    assert (
                        error is None or f"may not ask for {request_name(request)}." not in error.sentence
                    ), request
                    answered += 1
                else:
                    refusal = Code.NOT_FOUND_OR_FORBIDDEN if audience in row.audiences else Code.FORBIDDEN
                    assert error is not None and error.code is refusal, request
                    assert request_name(request) in error.sentence
                    refused += 1
            assert peer.closed_with is None
    tally("requests refused by class", refused)
    tally("requests that are the class's own", answered)


async def test_no_journal_holds_what_a_peer_without_rights_wants_fenced(
    mesh: Mesh, engine: str, tally: Tally, attack_scale: int
) -> None:
    tried = 0
    for audience, identity in attackers(mesh).items():
        canary = f"canary-{os.urandom(8).hex()}-{audience.name.lower()}"
        async with peer_of(mesh, engine, identity) as peer:
            for _ in range(2):
                stream = peer.peer.open_stream(bidirectional=True)
                frames = [encode_request(OpenTransactions(), 1)]
                frames += [
                    encode_message(FrameType.CALL, Fence(f"{canary}-{number}".ljust(255, ".")), number + 2)
                    for number in range(100 * attack_scale)
                ]
                tried += len(frames) - 1
                peer.send(b"".join(frames), stream)
                await until(lambda s=stream: peer.errors(1, s) or peer.closed_with)
                (error,) = peer.errors(stream_id=stream)
                assert error.code in (Code.FORBIDDEN, Code.NOT_FOUND_OR_FORBIDDEN)
        assert not holding(canary.encode(), mesh.eu.root)
    assert len(mesh.nodes["eu-west"].transactions.open) == 0
    tally("fences refused", tried)


async def test_a_client_whose_last_right_is_taken_fences_no_more(mesh: Mesh, engine: str) -> None:
    identity = attackers(mesh)[Audience.CLIENT]
    name = str(identity.spiffe_id)
    async with mesh.operator("eu-west") as operator, peer_of(mesh, engine, identity) as peer:
        await operator.put_rights(name, ["subscribe acme/ops/*"])
        stream = peer.peer.open_stream(bidirectional=True)
        peer.send(encode_request(OpenTransactions(), 1), stream)
        await until(lambda: peer.of(FrameType.ANSWER, stream))
        peer.send(encode_message(FrameType.CALL, Fence("mine"), 2), stream)
        await until(lambda: peer.of(FrameType.REPLY, stream))
        await operator.put_rights(name, [])
        await until(lambda: peer.errors(0, stream))
        assert peer.errors(0, stream)[0].code is Code.FORBIDDEN


async def test_refused_requests_leave_hashes_and_none_of_the_peers_words(
    mesh: Mesh, engine: str, tally: Tally, attack_scale: int
) -> None:
    """What looks like a grant, a stream and a region, and is none here, stands in the log as its hash."""
    identity = attackers(mesh)[Audience.FOREIGN_BRIDGE]
    chosen: list[str] = []
    async with peer_of(mesh, engine, identity) as peer:
        for _ in range(6 * attack_scale):
            word = os.urandom(5).hex().translate(str.maketrans("0189", "ghij"))
            grant, region = f"g-{word:a<16}", f"r-{os.urandom(8).hex()}"
            stream = f"acme/{os.urandom(8).hex()}/{os.urandom(8).hex()}"
            request = msgspec.structs.replace(
                sample(OpenIngest), grant=grant, stream=stream, from_region=region
            )
            error = await ask(peer, request, 1)
            assert error is not None
            chosen += [grant, stream, region]
    for text in ("No such grant [/x] \x1b[2J", "g-" + "A" * 16, "g-" + "a" * 16 + "\n"):
        # What cannot be a grant's id is no request at all.
        async with peer_of(mesh, engine, identity) as peer:
            bad = msgspec.structs.replace(sample(OpenIngest), grant=text)
            peer.send(encode_request(bad), peer.peer.open_stream(bidirectional=True))
            assert (await peer.ending()).code is Code.FRAME_MALFORMED
            chosen.append(text)
    await mesh.stop("eu-west")
    for text in chosen:
        assert not holding(text.encode(), mesh.eu.root / "data"), text
    denials = mesh.headers(mesh.ingress_folder, Kind.DENY)
    assert f"sha256:{hashlib.sha256(chosen[0].encode()).hexdigest()}" in [leaf.grant_id for leaf in denials]
    assert all(leaf.sentence.startswith("It was refused with ") for leaf in denials)
    assert mesh.verify_ingress().ok
    tally("chosen texts that stand nowhere", len(chosen))
