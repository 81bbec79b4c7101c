"""The control stream, both ends against each other without a network, with real certificates."""

import itertools
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_runs import count

from felix.errors import Code, FelixError, ProtocolError, RequestError
from felix.frames import HANDSHAKE_BYTES_MAX, AppendedBody, FrameType, encode_frame
from felix.identity import NONCE_BYTES, Binding, Identity, Proof, prove
from felix.messages import (
    ClientHello,
    Done,
    Limits,
    ListLinks,
    Prove,
    Welcome,
    encode_error,
    encode_message,
)
from felix.names import SpiffeId
from felix.peer import Peer, TrustBundle, verify_peer
from felix.session import (
    Acknowledged,
    Answered,
    Authenticated,
    ClientSession,
    CreditLine,
    CreditWindow,
    Established,
    Refused,
    Requested,
    ServerSession,
)
from keys.authority import RegionAuthority, create_authority

NOW_MS = 1_767_225_600_000
LEAF = bytes(range(32))
"""SHA-256 of the certificate that the broker showed."""
LIMITS = Limits(batch_bytes_max=1 << 20, subscriptions_max=256, streams_max=1024, requests_max=256)


@pytest.fixture(scope="module")
def authority() -> RegionAuthority:
    return create_authority("us-east", "acme", NOW_MS)


@pytest.fixture(scope="module")
def client_identity(authority: RegionAuthority) -> Identity:
    return authority.issue_identity(SpiffeId("us-east", "acme", "client", "orders"), NOW_MS)


def make_server(authority: RegionAuthority, leaf: bytes = LEAF) -> ServerSession:
    bundle = TrustBundle([authority.anchor()])

    def verify(proof: Proof, binding: Binding) -> Peer:
        return verify_peer(proof, binding, bundle, NOW_MS)

    return ServerSession(
        region="us-east",
        mesh="acme",
        broker="b1",
        nonce=os.urandom(NONCE_BYTES),
        leaf_sha256=leaf,
        verify=verify,
    )


def make_client(identity: Identity, region: str = "us-east") -> ClientSession:
    return ClientSession(
        region=region,
        software="test",
        nonce=os.urandom(NONCE_BYTES),
        leaf_sha256=LEAF,
        prove=lambda _, binding: prove(identity, binding),
    )


def established(authority: RegionAuthority, identity: Identity) -> tuple[ServerSession, ClientSession]:
    server, client = make_server(authority), make_client(identity)
    assert server.receive(client.take_output(), NOW_MS) == []
    assert client.receive(server.take_output()) == []
    (event,) = server.receive(client.take_output(), NOW_MS)
    assert isinstance(event, Authenticated)
    assert event.peer.spiffe_id == identity.spiffe_id
    server.welcome(Welcome("s1", str(identity.spiffe_id), 1000, LIMITS))
    (welcomed,) = client.receive(server.take_output())
    assert isinstance(welcomed, Established)
    assert welcomed.welcome.publish_credit_bytes == 1000
    return server, client


def test_a_session_is_established_and_carries_requests_both_ways(
    authority: RegionAuthority, client_identity: Identity
) -> None:
    server, client = established(authority, client_identity)
    client.send(encode_message(FrameType.REQUEST, ListLinks(), 5))
    assert server.receive(client.take_output(), NOW_MS) == [Requested(5, ListLinks())]
    server.send(encode_message(FrameType.ANSWER, Done("ok"), 5))
    server.send(AppendedBody(7, NOW_MS, 2000).encode(6))
    server.send(encode_error(RequestError("no", code=Code.FORBIDDEN, hint="ask"), 8))
    answered, acknowledged, refused = client.receive(server.take_output())
    assert answered == Answered(5, Done("ok"))
    assert acknowledged == Acknowledged(6, AppendedBody(7, NOW_MS, 2000))
    assert isinstance(refused, Refused)
    assert (refused.error.code, str(refused.error)) == (Code.FORBIDDEN, "no ask")


def test_a_client_that_reached_another_region_signs_nothing(
    authority: RegionAuthority, client_identity: Identity
) -> None:
    server, client = make_server(authority), make_client(client_identity, region="eu-west")
    with pytest.raises(RequestError) as refused:
        server.receive(client.take_output(), NOW_MS)
    assert refused.value.code is Code.WRONG_REGION
    # And a broker that does not refuse by itself gets no proof either.
    hello = encode_message(FrameType.HANDSHAKE, ClientHello([2], "us-east", bytes(32)))
    server = make_server(authority)
    server.receive(hello, NOW_MS)
    with pytest.raises(RequestError, match="nothing was sent"):
        client.receive(server.take_output())
    assert client.take_output() == b""


def test_a_proof_for_another_nonce_is_refused(authority: RegionAuthority, client_identity: Identity) -> None:
    server, client = make_server(authority), make_client(client_identity)
    server.receive(client.take_output(), NOW_MS)
    stale = prove(client_identity, Binding(b"another hello", b"another challenge", LEAF))
    with pytest.raises(RequestError) as refused:
        server.receive(encode_message(FrameType.HANDSHAKE, Prove(stale.chain_pem, stale.signature)), NOW_MS)
    assert refused.value.code is Code.IDENTITY_REFUSED
    assert not server.established


def test_nothing_but_the_handshake_is_heard_before_it(authority: RegionAuthority) -> None:
    for frame in (
        encode_message(FrameType.REQUEST, ListLinks(), 1),
        encode_frame(FrameType.PING, b"12345678"),
    ):
        with pytest.raises(ProtocolError) as refused:
            make_server(authority).receive(frame, NOW_MS)
        assert refused.value.code is Code.STATE


def test_an_unproved_peer_can_send_only_so_much(authority: RegionAuthority) -> None:
    server = make_server(authority)
    with pytest.raises(ProtocolError, match="before the handshake"):
        first = encode_frame(FrameType.HANDSHAKE, bytes(HANDSHAKE_BYTES_MAX))
        for at in range(0, len(first), 1000):
            server.receive(first[at : at + 1000], NOW_MS)


def test_versions_that_do_not_meet_are_refused(authority: RegionAuthority) -> None:
    hello = encode_message(FrameType.HANDSHAKE, ClientHello([99], "us-east", bytes(32)))
    with pytest.raises(ProtocolError) as refused:
        make_server(authority).receive(hello, NOW_MS)
    assert refused.value.code is Code.VERSION_UNSUPPORTED


@settings(
    max_examples=count(300, 1_000), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(body=st.binary(max_size=12), type_=st.sampled_from(list(FrameType)), correlation=st.integers(0, 3))
def test_any_control_frame_is_understood_or_refused(
    authority: RegionAuthority,
    client_identity: Identity,
    body: bytes,
    type_: FrameType,
    correlation: int,
) -> None:
    raw = encode_frame(type_, body[:8] if type_ in (FrameType.PING, FrameType.PONG) else body, correlation)
    server, client = established(authority, client_identity)
    for receive in (lambda: server.receive(raw, NOW_MS), lambda: client.receive(raw)):
        try:
            receive()
        except FelixError as error:
            assert error.code // 100 in (1, 2)


@given(st.lists(st.integers(1, 400), max_size=100))
def test_credit_bounds_what_is_held(sizes: list[int]) -> None:
    window, line = CreditWindow(1000), CreditLine(1000)
    held: list[int] = []
    for size in sizes:
        while line.left_bytes < size:
            window.finish(held.pop(0))
            line.extend(window.announce())
        line.use(size)
        window.receive(size)
        held.append(size)
        assert window.held_bytes == sum(held) <= 1000


def test_a_peer_that_ignores_credit_is_a_protocol_error() -> None:
    window = CreditWindow(100)
    window.receive(100)
    window.finish(100)
    with pytest.raises(ProtocolError) as refused:
        window.receive(1)
    assert refused.value.code is Code.CREDIT_EXCEEDED


def test_an_old_grant_changes_nothing() -> None:
    line = CreditLine(100)
    for limit in itertools.chain([300], range(0, 300, 50)):
        line.extend(limit)
    assert line.left_bytes == 300
