"""Who is let in: each wrong identity has its own sentence and code, and a session ends with its certificate."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from pathlib import Path

import pytest
from region_home import make_region, running
from region_peer import client, raw_peer, take, until

import felix
from felix import Code, RequestError
from felix.frames import FrameType
from felix.identity import Identity, Proof
from felix.identity_file import load_identity
from felix.messages import ClientHello, Prove, encode_message
from felix.names import SpiffeId
from felix.runtime.real import now_ms
from keys.authority import RegionAuthority, create_authority, load_authority
from keys.bundle import decode_bundle
from region.bootstrap import trust_region
from region.folder import RegionFolder
from region.node import Node

CREW = "acme/ops/crew"
SVC = SpiffeId("us-east", "acme", "client", "orders-svc")


@pytest.fixture(scope="module")
def authority(folder: RegionFolder) -> RegionAuthority:
    return load_authority(folder.authority, "us-east", "acme")


async def refused(node: Node, identity: Identity, **options: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        async with raw_peer(node.folder, node.address, identity=identity, **options):  # type: ignore[arg-type]
            pass
    assert caught.value.sentence
    return caught.value


async def later(node: Node, identity: Identity) -> RequestError:
    """Two hours later, by the broker's clock."""
    node.broker.clock_ms = lambda: now_ms() + 7_200_000
    try:
        return await refused(node, identity)
    finally:
        node.broker.clock_ms = now_ms


async def test_each_wrong_identity_is_refused_in_its_own_words(
    node: Node, authority: RegionAuthority, tmp_path: Path
) -> None:
    now = now_ms()
    good = authority.issue_identity(SVC, now)
    foreign = load_identity(make_region(tmp_path / "other", "eu-west").identity("operator"))
    expired = authority.issue_identity(SVC, now, lifetime=timedelta(hours=1))
    impostor = create_authority("us-east", "acme", now).issue_identity(SVC, now)
    found = {
        "another region": await refused(node, foreign),
        "expired": await later(node, expired),
        "another authority": await refused(node, impostor),
        "a stolen chain": await refused(
            node, good, alter_proof=lambda proof: Proof(proof.chain_pem, impostor.sign("x", proof.signature))
        ),
        "half a chain": await refused(
            node, good, alter_proof=lambda proof: Proof(proof.chain_pem[:300], proof.signature)
        ),
        "an authority's own": await refused(
            node,
            good,
            alter_proof=lambda proof: Proof(
                b"-----BEGIN" + proof.chain_pem.split(b"-----BEGIN")[2], proof.signature
            ),
        ),
    }
    codes = {what: error.code for what, error in found.items()}
    assert codes == {
        "another region": Code.WRONG_REGION,
        "expired": Code.IDENTITY_EXPIRED,
        "another authority": Code.IDENTITY_REFUSED,
        "a stolen chain": Code.IDENTITY_REFUSED,
        "half a chain": Code.IDENTITY_REFUSED,
        "an authority's own": Code.IDENTITY_REFUSED,
    }
    sentences = [error.sentence for error in found.values()]
    assert len(set(sentences)) == len(sentences), sentences
    await until(lambda: not node.broker.sessions)
    assert node.broker.metrics.authenticated == 0


async def test_a_trusted_region_s_client_is_not_let_in_either(folder: RegionFolder, tmp_path: Path) -> None:
    own = make_region(tmp_path / "own", "us-east")
    other = make_region(tmp_path / "other", "eu-west")
    trust_region(own, decode_bundle(other.bundle.read_bytes()), now_ms())
    async with running(own) as node:
        error = await refused(node, load_identity(other.identity("operator")))
        assert error.code is Code.WRONG_REGION
        assert "only a bridge" in error.sentence


async def test_a_replayed_proof_is_of_no_use(node: Node, authority: RegionAuthority) -> None:
    heard: list[Proof] = []

    def listen(proof: Proof) -> Proof:
        heard.append(proof)
        return proof

    good = authority.issue_identity(SVC, now_ms())
    async with raw_peer(node.folder, node.address, identity=good, alter_proof=listen):
        pass
    error = await refused(node, good, alter_proof=lambda _: heard[0])
    assert error.code is Code.IDENTITY_REFUSED
    assert "is not over this session's messages" in error.sentence


async def test_a_session_ends_with_its_certificate(node: Node, operator: felix.RegionClient) -> None:
    """Its peer's time is moved, not the clock: a certificate that lasts for seconds is not issued."""
    await operator.create_stream(CREW)
    async with raw_peer(node.folder, node.address) as peer:
        for session in list(node.broker.sessions):
            assert session.peer is not None
            assert session._timeout is not None
            session._timeout.cancel()
            session.peer = dataclasses.replace(session.peer, not_after_ms=now_ms() + 200)
            session._identity_ended()
        error = await peer.ending()
        assert error.code is Code.IDENTITY_EXPIRED
        assert "has expired" in error.sentence
        assert error.hint


async def test_a_client_renews_and_comes_back(node: Node, authority: RegionAuthority, tmp_path: Path) -> None:
    """The SDK reads its identity anew with each connection."""
    await asyncio.sleep(0)
    async with client(node.folder) as region:
        await region.create_stream(CREW)
        for session in list(node.broker.sessions):
            session.close(0, "for the test")
        offset = await region.stream(CREW).publish(b"after")
        async with region.stream(CREW).subscribe("earliest") as reader:
            assert (await take(reader, 1))[0].offset == offset
        assert region.reconnects == 1


async def test_a_hello_to_nobody_is_answered(node: Node) -> None:
    async with raw_peer(node.folder, node.address, proved=False) as peer:
        peer.open_control()
        peer.send(encode_message(FrameType.HANDSHAKE, ClientHello([1, 2, 3], "us-east", bytes(32))))
        await until(lambda: peer.of(FrameType.HANDSHAKE))
        peer.send(encode_message(FrameType.HANDSHAKE, Prove(b"x" * 60_000, b"y")))
        assert (await peer.ending()).code in (Code.IDENTITY_REFUSED, Code.FRAME_TOO_LARGE)
