"""Links between the brokers of a region: one connection for each pair, on which they speak of their shards.

Of two brokers the one whose id is less calls. Both prove who they are, as in every session: the called one by its certificate in TLS, which
has its own name, and the caller by a signature in the handshake (felix.session); both are brokers of this region. Then each opens three
streams, for what is short, for frames of logs, and for requests (region.replication.wire).

What is sent may be lost: where a link goes down, or where more waits than may. Nothing is sent twice, and each of the streams keeps
its order.

Invariants:
- nothing is heard of a peer, nor is a link up, before its identity is proved and is that of the broker that was called, or that says hello,
  and the region's records know that broker: a certificate alone makes no member;
- frames that wait are at most BULK_WAITING_BYTES_MAX for each link; what is short never waits behind them;
- a link on which nothing was heard for SILENT_MS is over, and is called again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from felix.address import Address
from felix.backoff import Backoff, BackoffPolicy
from felix.errors import Code, FelixError, ProtocolError, RequestError
from felix.identity import NONCE_BYTES, Binding, Identity, Proof, prove
from felix.messages import Challenge, Limits, Welcome
from felix.news import News
from felix.peer import Peer, TrustBundle, verify_peer
from felix.runtime.port import Runtime
from felix.session import Authenticated, ClientSession, Established, Refused, ServerSession
from felix.tasks import end_tasks
from felix.transport.port import ClientTls, Connection, Engine, Handler, TransportLimits
from region.cluster.records import ShardId
from region.replication.wire import (
    ASK_BYTES_MAX,
    FEATURES,
    Answered,
    Asked,
    Beat,
    Hello,
    Lane,
    PeerDecoder,
    Said,
    Told,
    encode,
    encode_answered,
    encode_asked,
    encode_beat,
    encode_hello,
    encode_preface,
    lane_of,
)  # fmt: skip

log = logging.getLogger("felix.region.replication")

BEAT_MS: Final = 500
"""A link says so often that it is there, besides what it has to say."""
CLOCK_BEATS: Final = 4
"""A peer's clock is told by the quickest of so many of its beats: one that came late says that the peer's clock is behind."""
SILENT_MS: Final = 2_000
"""Four beats: a peer that says nothing for so long is gone, or so slow that it would leave every in-sync set."""
BULK_WAITING_BYTES_MAX: Final = 32 << 20
"""Frames that wait for one link: four logs' windows. Beyond that they are dropped, and their followers ask again."""
CONTROL_BACKLOG_BYTES_MAX: Final = 8 << 20
"""With so much on its way to a peer that takes nothing, what is short is dropped, too."""
REQUESTS_BACKLOG_BYTES_MAX: Final = 2 * ASK_BYTES_MAX
"""With so much on its way, a request is not sent, and fails at once: its asker waits."""
EARLY_MAX: Final = 4
"""Requests that may arrive before their peer's hello: their senders have seen this end's."""
HANDSHAKE_S: Final = 10.0
"""From the first byte to the hello."""
CALL_S: Final = 3.0
"""For the transport's part of it: a peer that was cut off is called anew soon after it can be reached."""
RETRY: Final = BackoffPolicy(first_ms=50, ceiling_ms=2_000)
"""Between calls of a peer that does not answer."""
PEER_ALPN: Final = "felix-peer/1"
"""The protocol of links, which brokers speak on the port that clients call, too."""
LINK_LIMITS: Final = TransportLimits(
    backlog_high_bytes=1 << 20,
    backlog_low_bytes=1 << 18,
    keepalive_ms=0,
    idle_timeout_ms=10_000,
)
"""Frames wait here, where what is short can pass them, and not in the engine. Beats keep a link alive."""
SOFTWARE: Final = "felix broker"
_DIGITS: Final = re.compile(r"\d+")
_NO_REQUESTS: Final = Limits(batch_bytes_max=0, subscriptions_max=0, streams_max=0, requests_max=0)


@dataclass(frozen=True, slots=True)
class LocalBroker:
    """This broker, as it says hello."""

    broker: str
    region: str
    mesh: str
    registration: int
    folder: str

    def server_name(self, broker: str) -> str:
        """What the certificate of a broker of this region has."""
        return f"{broker}.{self.region}.{self.mesh}"


Heard = Callable[[str, Said], None]
Requested = Callable[[str, Asked | Answered], None]
Linked = Callable[[str, bool], None]


class PeerLinks:
    """All links of one broker. One event loop, no locks."""

    def __init__(
        self,
        engine: Engine,
        me: LocalBroker,
        identity: Callable[[], Identity],
        bundle: Callable[[], TrustBundle],
        authorities_pem: bytes,
        heard: Heard,
        linked: Linked,
        *,
        is_member: Callable[[str, int, str], bool],
        mirror_revision: Callable[[], int],
        runtime: Runtime,
        accept_limits: TransportLimits = LINK_LIMITS,
        requested: Requested = lambda peer, message: None,
    ) -> None:
        """`requested` is told of requests and their answers, as `heard` of shards. `is_member`: whether the records know a broker of this id, registration and
        folder, or of an earlier registration. `accept_limits`: of connections that others made (`accept`). `identity` and `bundle` are asked for each link: certificates are renewed. `heard` and `linked` are called on the loop, `linked`
        with True before anything is heard of a peer, and with False after the last."""
        self.me = me
        self.dropped = 0
        """Frames that were not sent for want of room; for metrics."""
        self._clocks: dict[str, tuple[int, ...]] = {}
        """By peer: its wall clock less this broker's `boot_ms`, with each of its last beats."""
        self._known_clocks: dict[str, int] = {}
        self.clock_offsets: Sequence[int] = ()
        """The same of every peer that was heard, in order, also where its link is down: clocks go on. Without those that are no brokers of the region any more. Made anew, so that
        any thread may read it."""
        self._engine = engine
        self._identity = identity
        self._bundle = bundle
        self._authorities_pem = authorities_pem
        self._heard = heard
        self._linked = linked
        self._requested = requested
        self.is_member = is_member
        self._mirror_revision = mirror_revision
        self._runtime = runtime
        self._accept_limits = accept_limits
        self._addresses: dict[str, str] = {}
        self._apart: dict[str, tuple[int, str]] = {}
        """Brokers that are alive and to which no link stands: since when (`boot_ms`), and why the last call failed, where this broker calls."""
        self._callers: dict[str, asyncio.Task[None]] = {}
        self._up: dict[str, Link] = {}
        self._strangers: set[Link] = set()
        self._beats: asyncio.Task[None] | None = None
        self._news = News()

    # -- what the host asks ----------------------------------------------------------------------------

    def accept(self) -> Handler:
        """For whoever listens: what is done with a connection that speaks PEER_ALPN."""
        return Link(self, None, self._accept_limits)

    def know(self, addresses: Mapping[str, str], brokers: Collection[str]) -> None:
        """The brokers that are alive, each with its address for peers (`host:port`), and all that are registered: nothing is kept of others."""
        self._known_clocks = {
            broker: clock for broker, clock in self._known_clocks.items() if broker in brokers
        }
        self.clock_offsets = sorted(self._known_clocks.values())
        self._addresses = {
            broker: address for broker, address in addresses.items() if broker != self.me.broker
        }
        now_ms = self.boot_ms()
        self._apart = {
            broker: self._apart.get(broker, (now_ms, ""))
            for broker in self._addresses
            if broker not in self._up
        }
        loop = asyncio.get_running_loop()
        if self._beats is None:
            self._beats = loop.create_task(self._beat(), name="peer beats")
        for broker in self._addresses:
            if self.me.broker < broker and (broker not in self._callers or self._callers[broker].done()):
                self._callers[broker] = loop.create_task(self._call(broker), name=f"link to {broker}")

    def is_up(self, peer: str) -> bool:
        """Whether a link to this broker stands."""
        return peer in self._up

    def ahead_of(self, peer: str) -> int | None:
        """How far this broker's wall clock is ahead of a peer's, in ms; too high by what the quickest of its last beats took. None before the first. A step of the
        own clock shows at once, one of the peer's within CLOCK_BEATS beats. On any thread."""
        clocks = self._clocks.get(peer)
        return None if clocks is None else self.now_ms() - self.boot_ms() - max(clocks)

    def apart(self) -> dict[str, tuple[int, str]]:
        """The brokers that are alive and to which no link stands: for how long (ms), and why, where this broker knows."""
        now_ms = self.boot_ms()
        return {broker: (now_ms - since_ms, why) for broker, (since_ms, why) in self._apart.items()}

    @property
    def peers(self) -> list[str]:
        """Brokers that a link stands to."""
        return sorted(self._up)

    def send(self, peer: str, shard: ShardId, message: Told) -> None:
        """Say something of a shard to a peer; it may be lost."""
        link = self._up.get(peer)
        if link is not None:
            link.say(encode(shard, message, link.features))

    def request(self, peer: str, message: Asked | Answered) -> bool:
        """Send a request, or the answer to one. False where it was not sent: no link stands, or too much is on its way."""
        link = self._up.get(peer)
        if link is None:
            return False
        return link.say(encode_asked(message) if isinstance(message, Asked) else encode_answered(message))

    async def room(self, peer: str) -> None:
        """Return once more frames may be sent to a peer without waiting for long, or its link is down."""
        await self._news.until(lambda: (link := self._up.get(peer)) is None or link.has_room())

    async def close(self) -> None:
        """End all links. Nobody listens for more."""
        tasks = [*self._callers.values(), *([self._beats] if self._beats else [])]
        self._callers, self._addresses = {}, {}
        await end_tasks(*tasks)
        for link in [*self._up.values(), *self._strangers]:
            link.end(Code.SHUTTING_DOWN, "the broker stops")
        self._news.tell()

    # -- calling ---------------------------------------------------------------------------------------

    async def _call(self, broker: str) -> None:
        """Keep a link to a broker for as long as it is alive."""
        backoff = Backoff(RETRY, self._runtime.random)
        told = ""
        while broker in self._addresses:
            link = Link(self, broker, LINK_LIMITS)
            self._strangers.add(link)
            try:
                address = Address.parse(self._addresses[broker])
                tls = ClientTls(self._authorities_pem, self.me.server_name(broker))
                await self._engine.connect(
                    address.host, address.port, tls, link, LINK_LIMITS, PEER_ALPN, timeout=CALL_S
                )
                was_up = await link.over
                if was_up:
                    backoff.reset()
                error: FelixError | None = link.error
            except FelixError as failed:
                error = failed
            finally:
                self._strangers.discard(link)
            if error is not None and broker in self._apart:
                self._apart[broker] = self._apart[broker][0], error.sentence
            # What says the time says something else each time.
            if error is not None and (said := _DIGITS.sub("", error.sentence)) != told:
                told = said
                log.warning("the link to broker %s: %s", broker, error)
            await asyncio.sleep(backoff.next_ms() / 1_000)

    # -- what links tell -------------------------------------------------------------------------------

    def check_caller(self, proof: Proof, binding: Binding) -> Peer:
        """Whoever calls is a broker of this region. Raises RequestError."""
        peer = verify_peer(
            proof, binding, self._bundle(), self._runtime.clock.now_ms(), expected_kinds={"broker"}
        )
        name = peer.spiffe_id
        if (name.region, name.mesh) != (self.me.region, self.me.mesh) or name.name == self.me.broker:
            raise RequestError(
                f"{name} is no other broker of region {self.me.region}.",
                code=Code.IDENTITY_REFUSED,
                hint="Only the brokers of one region replicate its logs. Over borders, streams cross by bridges.",
            )
        return peer

    def prove(self, binding: Binding) -> Proof:
        return prove(self._identity(), binding)

    def nonce(self) -> bytes:
        return self._runtime.random.randbytes(NONCE_BYTES)

    def hello(self) -> bytes:
        return encode_hello(Hello(self.me.broker, self.me.registration, self.me.folder, FEATURES))

    def now_ms(self) -> int:
        return self._runtime.clock.now_ms()

    def stranger(self, link: Link) -> None:
        """Somebody calls."""
        self._strangers.add(link)

    def came_up(self, link: Link) -> None:
        """The peer is who it says, and has said hello. An older link of the same broker is over: it may not know yet."""
        older = self._up.pop(link.peer, None)
        if older is not None:
            self._linked(link.peer, False)
            older.end(Code.DISCONNECTED, "another link took its place")
        self._strangers.discard(link)
        self._up[link.peer] = link
        self._apart.pop(link.peer, None)
        self._linked(link.peer, True)

    def went_down(self, link: Link) -> None:
        self._strangers.discard(link)
        if self._up.get(link.peer) is link:
            del self._up[link.peer]
            if link.peer in self._addresses:
                self._apart[link.peer] = self.boot_ms(), ""
            self._clocks.pop(link.peer, None)
            self._linked(link.peer, False)
        self._news.tell()

    def heard(self, link: Link, said: Said | Beat | Asked | Answered) -> None:
        if self._up.get(link.peer) is not link:
            return
        if isinstance(said, Beat):
            before = self._clocks.get(link.peer, ())
            self._clocks[link.peer] = clocks = (*before, said.clock_ms - self.boot_ms())[-CLOCK_BEATS:]
            self._known_clocks[link.peer] = max(clocks)
            self.clock_offsets = sorted(self._known_clocks.values())
        elif isinstance(said, Said):
            self._heard(link.peer, said)
        else:
            self._requested(link.peer, said)

    def has_room(self) -> None:
        """Some link has room again."""
        self._news.tell()

    async def _beat(self) -> None:
        clock = self._runtime.clock
        looked_ms = clock.boot_ms()
        while True:
            await asyncio.sleep(BEAT_MS / 1_000)
            now_ms = clock.boot_ms()
            # What arrived while this process stood still was not heard yet.
            is_late = now_ms - looked_ms > 2 * BEAT_MS
            looked_ms = now_ms
            beat = encode_beat(Beat(clock.now_ms(), self._mirror_revision()))
            for link in list(self._up.values()):
                if is_late:
                    link.heard_ms = now_ms
                elif now_ms - link.heard_ms > SILENT_MS:
                    link.end(Code.DISCONNECTED, f"nothing was heard for {SILENT_MS} ms")
                    continue
                link.say(beat)

    def boot_ms(self) -> int:
        return self._runtime.clock.boot_ms()


class Link:
    """One connection: `felix.transport.port.Handler`, for both ends."""

    def __init__(self, links: PeerLinks, called: str | None, limits: TransportLimits) -> None:
        """`called`: whom this end has called; None at the other end. `limits`: the connection's."""
        self.peer = called or ""
        self.features: tuple[str, ...] = ()
        """of the peer, as it says hello"""
        self.error: FelixError | None = None
        self.heard_ms = 0
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it was up, once it is over."""
        self._links = links
        self._called = called
        self._backlog_bytes_max = limits.backlog_high_bytes
        self._connection: Connection | None = None
        self._session: ClientSession | ServerSession | None = None
        self._session_stream: int | None = None
        self._proved = called or ""
        self._decoders: dict[int, PeerDecoder] = {}
        self._streams: dict[Lane, int] = {}
        self._is_up = False
        self._early: list[Asked | Answered] = []
        """requests that overtook the hello, which is on another stream"""
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._timeout: asyncio.TimerHandle | None = None

    # -- the transport's calls -------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self._connection = connection
        links = self._links
        leaf = connection.server_leaf_sha256
        self._timeout = asyncio.get_running_loop().call_later(
            HANDSHAKE_S, self.end, Code.HANDSHAKE_TIMEOUT, "the handshake took too long"
        )
        me = links.me
        if self._called is not None:
            self._session = ClientSession(
                region=me.region, software=SOFTWARE, nonce=links.nonce(), leaf_sha256=leaf, prove=self._prove
            )
            self._session_stream = connection.open_stream(bidirectional=True)
            self._flush()
        else:
            links.stranger(self)
            self._session = ServerSession(
                region=me.region, mesh=me.mesh, broker=me.broker, nonce=links.nonce(), leaf_sha256=leaf,
                verify=links.check_caller,
            )  # fmt: skip

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        try:
            if stream_id & 2:
                self._hear(stream_id, data)
            elif self._session_stream in (None, stream_id):
                self._session_stream = stream_id
                self._greet(data)
            else:
                raise ProtocolError("A link has one stream for its handshake.", code=Code.STATE)
            if end:
                raise ProtocolError("A stream of a link ended before the link did.", code=Code.STATE)
        except FelixError as error:
            self.error = error
            self.end(error.code, error.sentence)

    def stream_reset(self, stream_id: int, code: int) -> None:
        self.end(Code.STATE, "a stream of the link was reset")

    def drained(self) -> None:
        self._pump()

    def closed(self, code: int, reason: str) -> None:
        if self.error is None and reason:
            self.error = ProtocolError(f"It ended ({code}): {reason}.")
        self._finish()

    # -- the handshake ---------------------------------------------------------------------------------

    def _prove(self, challenge: Challenge, binding: Binding) -> Proof:
        if challenge.broker != self._called or challenge.mesh != self._links.me.mesh:
            raise RequestError(
                f"Broker {self._called} was called, and {challenge.broker} of {challenge.mesh} answers.",
                code=Code.IDENTITY_REFUSED,
                hint="Two brokers may have the same address in the metadata store; look at their listen addresses.",
            )
        return self._links.prove(binding)

    def _flush(self) -> None:
        assert self._session is not None and self._connection is not None and self._session_stream is not None
        out = self._session.take_output()
        if out and not self._connection.is_closed:
            self._connection.send(self._session_stream, out)

    def _greet(self, data: bytes) -> None:
        session, links = self._session, self._links
        if isinstance(session, ClientSession):
            for event in session.receive(data):
                if isinstance(event, Refused):
                    raise event.error
                if isinstance(event, Established):
                    self._open()
            self._flush()
            return
        assert isinstance(session, ServerSession) and self._connection is not None
        for told in session.receive(data, links.now_ms()):
            if not isinstance(told, Authenticated):
                raise ProtocolError("A link carries no requests.", code=Code.STATE)
            self._proved = told.peer.spiffe_id.name
            self._connection.admit()
            session.welcome(Welcome(links.me.broker, str(told.peer.spiffe_id), 0, _NO_REQUESTS))
        self._flush()

    def _open(self) -> None:
        """Both streams, and hello."""
        assert self._connection is not None
        for lane in Lane:
            self._streams[lane] = self._connection.open_stream(bidirectional=False)
            self._connection.send(self._streams[lane], encode_preface(lane))
        self._connection.send(self._streams[Lane.CONTROL], self._links.hello())

    def _hello(self, hello: Hello) -> None:
        if hello.broker != self._proved or self._is_up:
            raise ProtocolError(
                f"Broker {self._proved} says that it is {hello.broker}.", code=Code.IDENTITY_REFUSED
            )
        if not self._links.is_member(hello.broker, hello.registration, hello.folder):
            raise RequestError(
                f"Broker {hello.broker} is not registered in the region as it says (registration {hello.registration}).",
                code=Code.IDENTITY_REFUSED,
                hint="A broker that has just been started is heard once its record has been read here; it calls again by itself.",
            )
        self.peer, self.features = hello.broker, hello.features
        if self._called is None:
            self._open()
        if self._timeout is not None:
            self._timeout.cancel()
        self._is_up = True
        self.heard_ms = self._links.boot_ms()
        self._links.came_up(self)
        early, self._early = self._early, []
        for said in early:
            self._links.heard(self, said)

    # -- what is said ----------------------------------------------------------------------------------

    def _hear(self, stream_id: int, data: bytes) -> None:
        if not self._proved or (self._called and not self._streams):
            raise ProtocolError("A peer spoke before its handshake was done.", code=Code.STATE)
        decoder = self._decoders.get(stream_id)
        if decoder is None:
            if len(self._decoders) == len(Lane):
                raise ProtocolError("A link has a stream for each lane, and no more.", code=Code.STATE)
            decoder = self._decoders[stream_id] = PeerDecoder()
        for said in decoder.feed(data):
            self.heard_ms = self._links.boot_ms()
            if isinstance(said, Hello):
                self._hello(said)
            elif self._is_up:
                self._links.heard(self, said)
            elif isinstance(said, Asked | Answered):
                if len(self._early) >= EARLY_MAX:
                    raise ProtocolError("A peer asks, and says no hello.", code=Code.STATE)
                self._early.append(said)

    def has_room(self) -> bool:
        """Whether less than half of what may wait does."""
        return self._waiting_bytes < BULK_WAITING_BYTES_MAX // 2

    def say(self, encoded: bytes) -> bool:
        """Send it, or drop it where too much waits. Whether it is on its way."""
        connection = self._connection
        if connection is None or connection.is_closed or not self._is_up:
            return False
        lane = lane_of(encoded)
        if lane is Lane.BULK:
            has_room = self._waiting_bytes + len(encoded) <= BULK_WAITING_BYTES_MAX
        else:
            most = CONTROL_BACKLOG_BYTES_MAX if lane is Lane.CONTROL else REQUESTS_BACKLOG_BYTES_MAX
            has_room = connection.backlog_bytes() < most
        if not has_room:
            self._links.dropped += 1
            return False
        if lane is Lane.BULK:
            self._waiting.append(encoded)
            self._waiting_bytes += len(encoded)
            self._pump()
        else:
            connection.send(self._streams[lane], encoded)
        return True

    def _pump(self) -> None:
        connection = self._connection
        if connection is None or connection.is_closed:
            return
        had_room = self.has_room()
        while self._waiting and connection.backlog_bytes() < self._backlog_bytes_max:
            encoded = self._waiting.popleft()
            self._waiting_bytes -= len(encoded)
            connection.send(self._streams[Lane.BULK], encoded)
        if not had_room and self.has_room():
            self._links.has_room()

    # -- the end ---------------------------------------------------------------------------------------

    def end(self, code: int, reason: str) -> None:
        """End the connection."""
        if self._connection is not None and not self._connection.is_closed:
            self._connection.close(code, reason)
        self._finish()

    def _finish(self) -> None:
        if self.over.done():
            return
        self.over.set_result(self._is_up)
        if self._timeout is not None:
            self._timeout.cancel()
        self._waiting.clear()
        self._waiting_bytes = 0
        self._links.went_down(self)
