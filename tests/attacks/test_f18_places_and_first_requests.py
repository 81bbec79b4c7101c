"""F18: what known peers cost without a right: first requests that never become whole, and all of a broker's sessions.

The finding: 8 sessions with 90 streams took 195 MiB while every budget said 0; a foreign bridge without a grant held 6 of 6
sessions, the operator was refused, and no quota could be set for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import msgspec
import pytest
from bridge_mesh import BRIDGE, Mesh, two_regions
from quic_stranger import CONTROL, Stranger, fragments, stream_frame
from region_home import make_region
from region_peer import RawPeer, client, encode_request, raw_peer, until
from region_process import BrokerProcess, fixed_region

from felix.errors import Code, FelixError, UnavailableError
from felix.frames import FRAME_HEADER_BYTES
from felix.identity_file import load_identity
from felix.messages import DocumentPage, ListDocuments, ListStreams, PutQuota
from felix.quota import QuotaLimits
from felix.runtime.real import now_ms
from felix.transport.port import ENGINE_NAMES
from keys.bundle import decode_bundle
from policy.quantity import Size
from region.bootstrap import issue_identity, trust_region
from region.config import LimitsConfig, load_config
from region.session.client_session import (
    REQUESTS_HELD_BYTES_MAX,
    RIGHTLESS_BACKLOG_BYTES_MAX,
    RIGHTLESS_BYTES_MAX,
    RIGHTLESS_REQUESTS_MAX,
)
from region.streams.places import FOREIGN_PER_IDENTITY

Tally = Callable[[str, int], None]
ALLOWED_BYTES = 64 << 20
STREAM = "acme/ops/crew"
REQUEST_HEAD = (256 << 10).to_bytes(4) + b"\x10" + bytes(7)
"""The header of a request of 256 KiB, which never comes whole."""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


@pytest.mark.parametrize("engine", ENGINE_NAMES)
@pytest.mark.parametrize("kind", ["publish streams", "exchanges", "control stream"])
async def test_requests_that_are_not_whole_are_charged(
    tmp_path: Path, engine: str, kind: str, tally: Tally
) -> None:
    """From an identity with every right: what one session holds is bounded, what all hold is in the budget, and it goes back."""
    mesh = Mesh.make(tmp_path)
    limits = LimitsConfig(exchange_budget=Size(4 << 20))
    node = await mesh.start("us-east", limits=limits, engine=engine)
    budget = node.broker.budgets.exchange
    sessions, streams, most = 8, 90, 0
    try:
        async with AsyncExitStack() as stack:
            peers: list[RawPeer] = [
                await stack.enter_async_context(raw_peer(mesh.us, node.address, engine=engine))
                for _ in range(sessions)
            ]
            for peer in peers:
                body = REQUEST_HEAD + bytes(200 << 10)
                if kind == "control stream":
                    peer.send(body)
                    continue
                for _ in range(streams):
                    if peer.peer.is_closed:
                        break
                    peer.send(body, peer.peer.open_stream(bidirectional=kind == "exchanges"))
                    await asyncio.sleep(0)
                    most = max(most, budget.used_bytes)
            if kind == "control stream":
                await until(lambda: budget.used_bytes == sessions * (FRAME_HEADER_BYTES + (200 << 10)))
            else:
                assert 0 < most <= budget.limit_bytes
                await until(lambda: all(peer.closed_with for peer in peers))
                assert {peer.closed_with[0] for peer in peers if peer.closed_with} == {Code.LIMIT_MEMORY}
        await until(lambda: not budget.used_bytes)
        async with client(mesh.us) as own:
            await own.create_stream(STREAM)
            await own.stream(STREAM).publish(b"still here")
    finally:
        await mesh.stop("us-east")
    assert REQUESTS_HELD_BYTES_MAX == 1 << 20
    tally("requests that never became whole", sessions * (streams if kind != "control stream" else 1))


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_answers_that_nobody_reads_are_few_without_a_right(
    mesh: Mesh, engine: str, tally: Tally
) -> None:
    """Large documents are put by its own region; a bridge without a grant lists them over and over, and takes nothing."""
    await mesh.stop("eu-west")
    node = await mesh.start("eu-west", engine=engine)
    asked, answer = 60, DocumentPage({str(number): bytes(200_000) for number in range(1)})

    async def pages(*_: object) -> DocumentPage:
        return answer

    node.services.requests.answer = pages  # type: ignore[method-assign, assignment]
    identity = load_identity(mesh.us.identity(BRIDGE))
    async with raw_peer(mesh.eu, node.address, identity=identity, engine=engine, region="eu-west") as peer:
        assert peer.established is not None
        assert peer.established.welcome.limits.requests_max == RIGHTLESS_REQUESTS_MAX
        (session,) = (each for each in node.broker.sessions if each.identity == identity.spiffe_id)
        connection = session.connection  # type: ignore[attr-defined]
        peer.go_deaf()
        most = 0
        for number in range(1, asked + 1):
            peer.send(encode_request(ListDocuments("grant"), number))
            await asyncio.sleep(0.005)
            most = max(most, connection.backlog_bytes())
        await until(lambda: session.ended)  # type: ignore[attr-defined]
        assert 0 < most <= RIGHTLESS_BACKLOG_BYTES_MAX + RIGHTLESS_REQUESTS_MAX * (256 << 10)
    tally("answers that nobody reads", asked)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_a_foreign_bridge_takes_few_places_and_a_quota_counts_for_it(
    mesh: Mesh, engine: str, tally: Tally
) -> None:
    await mesh.stop("eu-west")
    node = await mesh.start("eu-west", engine=engine)
    node.broker.config = replace_limits(node.broker.config, sessions=6)
    identity = load_identity(mesh.us.identity(BRIDGE))
    tried = 12

    def held() -> int:
        return sum(each.identity == identity.spiffe_id and not each.ended for each in node.broker.sessions)

    async def come(stack: AsyncExitStack) -> tuple[int, int]:
        """Let in, and the most sessions held at once."""
        found = most = 0
        for _ in range(tried):
            try:
                await stack.enter_async_context(
                    raw_peer(mesh.eu, node.address, identity=identity, engine=engine, region="eu-west")
                )
                found += 1
            except UnavailableError as error:
                assert error.code is Code.LIMIT_SESSIONS
                assert error.retry_after_ms
            most = max(most, held())
        return found, most

    # Without a quota each further session takes the place of the bridge's own that was silent longest: an agent that is
    # killed again and again is not kept out by its dead.
    async with AsyncExitStack() as stack:
        assert await come(stack) == (tried, 1)
        gauges = node.broker.gauges()
        assert gauges["sessions_foreign_limit"] == 1
        async with mesh.operator("eu-west") as operator:
            await operator.request(ListStreams())
    await until(lambda: not node.broker.sessions)
    node.broker.config = replace_limits(node.broker.config, sessions=400)
    async with AsyncExitStack() as stack:
        assert await come(stack) == (tried, FOREIGN_PER_IDENTITY)
        await until(lambda: len(node.broker.sessions) == FOREIGN_PER_IDENTITY)
    await until(lambda: not node.broker.sessions)
    async with mesh.operator("eu-west") as operator:
        for sessions in (2, 7):
            state = await operator.request(
                PutQuota("identity", str(identity.spiffe_id), QuotaLimits(sessions=sessions, requests=3))
            )
            assert state.limits.sessions == sessions  # type: ignore[attr-defined]
            async with AsyncExitStack() as stack:
                assert await come(stack) == (sessions, sessions)
            await until(lambda: len(node.broker.sessions) == 1)
        with pytest.raises(FelixError) as wrong:
            await operator.request(
                PutQuota("identity", "spiffe://us-east.acme/client/orders", QuotaLimits(sessions=1))
            )
        assert wrong.value.code is Code.WRONG_REGION
    tally("sessions that a foreign bridge asked for", 4 * tried)


def replace_limits(config: object, **limits: object) -> object:
    return msgspec.structs.replace(config, limits=msgspec.structs.replace(config.limits, **limits))  # type: ignore


class Border:
    """A broker of us-east as a process, and a bridge of eu-west that it trusts and has granted nothing."""

    def __init__(self, home: Path, engine: str) -> None:
        self.folder = fixed_region(home, extra=f"engine: {engine}\n")
        other = make_region(home, "eu-west")
        issue_identity(other, load_config(other.config), "bridge", "eu-to-us", now_ms())
        trust_region(self.folder, decode_bundle(other.bundle.read_bytes()), now_ms())
        self.identity = load_identity(other.identity("eu-to-us"))
        self.process = BrokerProcess(self.folder, home)
        self.address = ("127.0.0.1", int(self.process.wait()["address"].rpartition(":")[2]))
        self.root_pem = decode_bundle(self.folder.bundle.read_bytes()).bundle.root_pem.encode()
        asyncio.run(self.own_people(first=True))
        self.idle_bytes = self.most_bytes = self.process.rss_bytes()

    async def own_people(self, *, first: bool = False) -> None:
        async with asyncio.timeout(120), client(self.folder) as own:
            if first:
                await own.create_stream(STREAM)
            await own.stream(STREAM).publish(b"still here")


@pytest.fixture(params=ENGINE_NAMES)
def border(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Border]:
    made = Border(tmp_path, request.param)
    try:
        yield made
    finally:
        made.process.terminate()


def test_memory_under_a_foreign_bridge_without_a_grant(
    border: Border, attack_scale: int, tally: Tally
) -> None:
    """It comes as often as it can; each session sends fragments, floods behind holes and requests that never become whole."""
    held, tried, wire = 0, 0, 0
    for _ in range(attack_scale):
        with ExitStack() as stack:
            for number in range(2 * FOREIGN_PER_IDENTITY):
                stranger = stack.enter_context(Stranger(border.address, border.root_pem, "us-east.acme"))
                tried += 1
                if not stranger.handshake() or not stranger.prove(border.identity, "us-east"):
                    continue
                held += 1
                at = (
                    len(stranger.quic._streams[CONTROL].sender._buffer)
                    + stranger.quic._streams[CONTROL].sender._buffer_start
                )
                kinds: list[Iterator[bytes]] = [
                    fragments(50_000, first=at + 7),
                    (stream_frame(CONTROL, at + 1 + 1_000 * n, bytes(1_000)) for n in range(600)),
                    (
                        stream_frame(stream, 0, REQUEST_HEAD + bytes(1_100))
                        for stream in (*range(4, 364, 4), *range(2, 362, 4))
                    ),
                    fragments(50_000, stream_id=2),
                ]
                wire += stranger.say(kinds[number % len(kinds)])
                stranger.pump()
                border.most_bytes = max(border.most_bytes, border.process.rss_bytes())
            asyncio.run(border.own_people())
            border.most_bytes = max(border.most_bytes, border.process.rss_bytes())
    grown = border.most_bytes - border.idle_bytes
    assert held >= FOREIGN_PER_IDENTITY * attack_scale
    assert grown <= ALLOWED_BYTES, f"grew by {grown >> 20} MiB"
    assert "Traceback" not in border.process.log.read_text()
    assert RIGHTLESS_BYTES_MAX <= 512 << 10
    tally("sessions of a foreign bridge without a grant", held)
    tally("bytes that they sent", wire)
