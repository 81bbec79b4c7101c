"""A scripted broker: the real server session and the real frames over an in-memory transport, with what a test wants
to happen. It keeps the rules that a broker keeps (sequences, credit both ways) and fails a test that breaks them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

from msgspec.structs import replace

from felix.batch import BATCH_BYTES_MAX, Batch, NewRecord, decode_batch, decode_records, encode_batch
from felix.correlations import CORRELATION_MAX
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.frames import (
    FRAME_HEADER_BYTES,
    AppendedBody,
    Credit,
    Frame,
    FrameDecoder,
    FrameType,
    GapBody,
    encode_frame,
    frame_header,
)
from felix.identity import Identity
from felix.messages import (
    Answer,
    CreateStream,
    DescribeStream,
    Done,
    Goodbye,
    Limits,
    ListStreams,
    OpenPublisher,
    PublisherOpened,
    Request,
    ShardState,
    StreamPage,
    StreamState,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Welcome,
    decode_request,
    encode_error,
    encode_message,
)
from felix.names import SpiffeId
from felix.peer import TrustBundle, verify_peer
from felix.profile import Profile
from felix.session import Authenticated, CreditGranted, Requested, ServerSession
from felix.settings import Durability, Retention
from felix.transport.memory import MemoryConnection, MemoryEngine, MemoryNetwork
from felix.transport.port import Connection, ServerTls
from keys.authority import RegionAuthority, create_authority

NOW_MS = 1_800_000_000_000
SERVER_NAME = "b1.us-east.acme"


@cache
def authority() -> RegionAuthority:
    return create_authority("us-east", "acme", now_ms())


def now_ms() -> int:
    return int(time.time() * 1000)


@cache
def identity(name: str = "app") -> Identity:
    return authority().issue_identity(SpiffeId("us-east", "acme", "client", name), now_ms())


@cache
def server_tls() -> ServerTls:
    """A broker's certificate, for tests over real engines."""
    made = authority().issue_identity(
        SpiffeId("us-east", "acme", "broker", "b1"), now_ms(), dns_names=[SERVER_NAME]
    )
    return ServerTls(made.chain_pem, made.key_pem())


def profile(*addresses: str) -> Profile:
    return Profile(
        region="us-east",
        mesh="acme",
        addresses=addresses or ("broker:7443",),
        authority=authority().anchor().root_pem,
        identity=identity(),
        server_name=SERVER_NAME,
    )


# -- the transport ---------------------------------------------------------------------------------------


class ScriptedEngine(MemoryEngine):
    """Connects to scripted brokers by the host of their address, over a network that delays nothing."""

    def __init__(self, **brokers: ScriptedBroker) -> None:
        self.network = MemoryNetwork(Random(1))
        super().__init__(self.network, "client")
        self.brokers: dict[str, ScriptedBroker] = dict(brokers)
        self.attempts: list[str] = []

    async def connect(self, host: str, port: int, *more: object, **how: object) -> MemoryConnection:
        self.attempts.append(host)
        broker = self.brokers.get(host)
        if broker is None or broker.down:
            raise UnavailableError(f"Nobody answers at {host}.", code=Code.DISCONNECTED)
        if self.network.listener(host, port) is None:
            await self.listen(host, port, server_tls(), lambda: BrokerSession(broker))
        return await super().connect(host, port, *more, **how)


# -- the broker ------------------------------------------------------------------------------------------


BATCHES_REMEMBERED = 32
"""Of a producer, as a broker does: more than a client has in flight (docs/wire.md)."""


@dataclass
class Shard:
    """A log in memory, and the producers' sequences as a broker keeps them."""

    batches: list[Batch] = field(default_factory=list)
    start: int = 0
    producers: dict[int, tuple[int, list[tuple[int, int, int]]]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.batches[-1].header.next_offset if self.batches else self.start

    def append(self, batch: Batch) -> int:
        header = batch.header
        if header.producer_id:
            epoch, known = self.producers.get(header.producer_id, (header.producer_epoch, []))
            if header.producer_epoch < epoch:
                raise RequestError("fenced", code=Code.PRODUCER_FENCED)
            if header.producer_epoch > epoch:
                known = []
            expected = known[-1][1] if known else 0
            for first, following, offset in known[-BATCHES_REMEMBERED:]:
                if (first, following) == (header.base_sequence, header.base_sequence + header.records):
                    return offset
            if header.base_sequence != expected:
                raise RequestError(
                    f"sequence {header.base_sequence}, expected {expected}", code=Code.SEQUENCE_GAP
                )
            known.append((header.base_sequence, header.base_sequence + header.records, self.end))
            self.producers[header.producer_id] = (header.producer_epoch, known)
        offset = self.end
        self.batches.append(
            batch.with_header(replace(header, base_offset=offset, append_time_ms=NOW_MS + len(self.batches)))
        )
        return offset


@dataclass
class StreamLog:
    shards: list[Shard]
    incarnation: bytes = field(default_factory=lambda: os.urandom(16))
    durability: Durability = field(default_factory=Durability)

    def payloads(self, shard: int = 0) -> list[bytes]:
        return [bytes(r.payload) for batch in self.shards[shard].batches for r in decode_records(batch)]


class ScriptedBroker:
    """What outlives a session: the logs, and the script."""

    def __init__(
        self,
        *,
        publish_credit_bytes: int = 1 << 22,
        limits: Limits | None = None,
        region: str = "us-east",
        mesh: str = "acme",
    ) -> None:
        self.region, self.mesh = region, mesh
        self.publish_credit_bytes = publish_credit_bytes
        self.limits = limits or Limits(BATCH_BYTES_MAX, 256, 64, 64)
        self.streams: dict[str, StreamLog] = {}
        self.sessions: list[BrokerSession] = []
        self.down = False
        self.clock_ahead_ms = 0
        self.leaf_sha256 = b""
        """Of the certificate that it believes to have shown; empty: the real one."""
        self.requests: list[Request] = []
        self.received: list[Batch] = []
        """Batches in the order in which they came, repeated ones too."""
        self.on_batch: Callable[[BrokerSession, Batch, int], bool] | None = None
        """Called before a batch is appended; True: the script dealt with it."""
        self.on_request: Callable[[BrokerSession, Request, int], bool] | None = None
        self.hold_acks = False
        self.in_flight = 127
        self.hold_credit = False
        self.breaches: list[str] = []

    def create(self, name: str, shards: int = 1) -> StreamLog:
        self.streams[name] = StreamLog([Shard() for _ in range(shards)])
        return self.streams[name]

    def fill(self, name: str, payloads: list[bytes], *, per_batch: int = 3, shard: int = 0) -> None:
        log = self.streams[name].shards[shard]
        for at in range(0, len(payloads), per_batch):
            log.append(encode_batch([NewRecord(p) for p in payloads[at : at + per_batch]], shard=shard))
        self.deliver()

    def deliver(self) -> None:
        for session in self.sessions:
            session.deliver()

    @property
    def session(self) -> BrokerSession:
        return self.sessions[-1]

    def check(self) -> None:
        assert not self.breaches, self.breaches


@dataclass
class Cursor:
    stream: str
    stream_id: int
    subscription: int
    offsets: dict[int, int]
    limit: int
    used: int = 0
    over: bool = False


class BrokerSession:
    """One session of the scripted broker; the transport's handler."""

    def __init__(self, broker: ScriptedBroker, connection: Connection | None = None) -> None:
        self.broker = broker
        self.connection = connection
        self.control = 0
        self.session: ServerSession
        if connection is not None:
            self.connected(connection)
        self.decoders: dict[int, FrameDecoder] = {}
        self.publishers: dict[int, OpenPublisher] = {}
        self.credit_limit = broker.publish_credit_bytes
        self.credit_used = 0
        self.cursors: dict[int, Cursor] = {}
        self.held: deque[tuple[int, int, int]] = deque()
        self.correlations: set[int] = set()
        self.ended_streams: set[int] = set()
        self.closed_with: tuple[int, str] | None = None
        broker.sessions.append(self)

    # transport handler

    def connected(self, connection: Connection) -> None:
        self.connection = connection
        connection.admit()
        broker = self.broker
        self.session = ServerSession(
            region=broker.region,
            mesh=broker.mesh,
            broker="b1",
            nonce=os.urandom(32),
            leaf_sha256=broker.leaf_sha256 or connection.server_leaf_sha256,
            verify=lambda proof, binding: verify_peer(
                proof, binding, TrustBundle([authority().anchor()]), now_ms() + broker.clock_ahead_ms
            ),
        )

    def stream_reset(self, stream_id: int, code: int) -> None:
        self.ended_streams.add(stream_id)

    def drained(self) -> None: ...

    def closed(self, code: int, reason: str) -> None:
        self.closed_with = (code, reason)

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        if stream_id == self.control:
            self._control(data)
            return
        decoder = self.decoders.setdefault(stream_id, FrameDecoder())
        for frame in decoder.feed(data):
            self._publish_frame(stream_id, frame)
        if end:
            decoder.finish()
            self.ended_streams.add(stream_id)

    # control

    def _control(self, data: bytes) -> None:
        try:
            events = self.session.receive(data, now_ms())
        except FelixError as error:
            self.send(encode_error(error))
            self.connection.close(int(error.code), error.sentence)
            return
        for event in events:
            match event:
                case Authenticated(peer):
                    self.session.welcome(
                        Welcome(
                            f"s{len(self.broker.sessions)}",
                            str(peer.spiffe_id),
                            self.broker.publish_credit_bytes,
                            self.broker.limits,
                            ["publish */*/*"],
                        )
                    )
                case Requested(correlation, request):
                    self._own(correlation)
                    self._request(correlation, request)
                case CreditGranted(subscription, limit):
                    if subscription in self.cursors:
                        self.cursors[subscription].limit = max(self.cursors[subscription].limit, limit)
                        self.deliver()
        self.flush()

    def flush(self) -> None:
        out = self.session.take_output()
        if out and not self.connection.is_closed:
            self.connection.send(self.control, out)

    def send(self, frame: bytes) -> None:
        if not self.connection.is_closed:
            self.session.send(frame)
            self.flush()

    def answer(self, correlation: int, answer: Answer) -> None:
        self.send(encode_message(FrameType.ANSWER, answer, correlation))

    def refuse(self, correlation: int, error: FelixError) -> None:
        self.send(encode_error(error, correlation))

    def _own(self, correlation: int) -> None:
        if correlation in self.correlations or not 0 < correlation <= CORRELATION_MAX:
            self.broker.breaches.append(f"correlation {correlation} came twice")
        self.correlations.add(correlation)

    def _request(self, correlation: int, request: Request[Any]) -> None:
        self.broker.requests.append(request)
        if self.broker.on_request is not None and self.broker.on_request(self, request, correlation):
            return
        match request:
            case DescribeStream(stream):
                self._with(correlation, stream, lambda log: self.answer(correlation, _state(stream, log)))
            case CreateStream(stream=stream, shards=shards):
                if stream in self.broker.streams:
                    self.refuse(correlation, RequestError(f"{stream} exists.", code=Code.ALREADY_EXISTS))
                else:
                    self.answer(correlation, _state(stream, self.broker.create(stream, shards)))
            case ListStreams(after=after):
                names = sorted(name for name in self.broker.streams if name > after)
                page = StreamPage([_state(n, self.broker.streams[n]) for n in names[:2]], len(names) > 2)
                self.answer(correlation, page)
            case Subscribe():
                self._with(
                    correlation, request.stream, lambda log: self._subscribe(correlation, request, log)
                )
            case Unsubscribe(subscription):
                cursor = self.cursors.pop(subscription, None)
                if cursor is not None and not cursor.over:
                    self.connection.send(cursor.stream_id, b"", end=True)
                self.answer(correlation, Done())
            case _:
                self.answer(correlation, Done("done"))

    def _with(self, correlation: int, stream: str, act: Callable[[StreamLog], None]) -> None:
        log = self.broker.streams.get(stream)
        if log is None:
            self.refuse(
                correlation,
                RequestError(f"No stream {stream}.", code=Code.NOT_FOUND_OR_FORBIDDEN, hint="Create it."),
            )
        else:
            act(log)

    # publishing

    def _publish_frame(self, stream_id: int, frame: Frame) -> None:
        if frame.type is FrameType.REQUEST:
            request = decode_request(frame.body)
            self._own(frame.correlation)
            assert isinstance(request, OpenPublisher)
            self.publishers[stream_id] = request
            self.broker.requests.append(request)
            if self.broker.on_request is not None and self.broker.on_request(
                self, request, frame.correlation
            ):
                return
            self._with(
                frame.correlation,
                request.stream,
                lambda log: self.answer(
                    frame.correlation,
                    PublisherOpened(len(log.shards), log.incarnation, self.broker.in_flight),
                ),
            )
            return
        assert frame.type is FrameType.BATCH, frame.type
        opened = self.publishers[stream_id]
        amount = FRAME_HEADER_BYTES + len(frame.body)
        self.credit_used += amount
        if self.credit_used > self.credit_limit:
            self.broker.breaches.append(f"{self.credit_used} bytes sent, {self.credit_limit} granted")
        if opened.acks == "all":
            self._own(frame.correlation)
        batch = decode_batch(bytes(frame.body))
        self.broker.received.append(batch)
        if self.broker.on_batch is not None and self.broker.on_batch(self, batch, frame.correlation):
            return
        self.append(batch, frame.correlation, amount, opened)

    def append(self, batch: Batch, correlation: int, amount: int, opened: OpenPublisher) -> None:
        log = self.broker.streams[opened.stream]
        try:
            offset = log.shards[batch.header.shard].append(batch)
        except RequestError as error:
            self.give_credit(amount)
            if opened.acks == "all":
                self.refuse(correlation, error)
            return
        if opened.acks == "none":
            self.give_credit(amount)
        elif self.broker.hold_acks:
            self.held.append((correlation, offset, amount))
        else:
            self.acknowledge(correlation, offset, amount)
        self.deliver()

    def acknowledge(self, correlation: int, offset: int, amount: int) -> None:
        if not self.broker.hold_credit:
            self.credit_limit += amount
        self.send(AppendedBody(offset, NOW_MS, self.credit_limit).encode(correlation))

    def give_credit(self, amount: int) -> None:
        self.credit_limit += amount
        self.send(Credit(0, self.credit_limit).encode())

    def release(self) -> None:
        while self.held:
            self.acknowledge(*self.held.popleft())

    # delivering

    def _subscribe(self, correlation: int, request: Subscribe, log: StreamLog) -> None:
        if request.incarnation and request.incarnation != log.incarnation:
            self.refuse(correlation, RequestError("It was created anew.", code=Code.CONFLICT))
            return
        starts = {}
        for number in request.shards or range(len(log.shards)):
            shard = log.shards[number]
            match request.start.kind:
                case "earliest":
                    start = shard.start
                case "latest":
                    start = shard.end
                case "offset":
                    start = request.start.value
                case _:
                    later = [
                        b.header for b in shard.batches if b.header.append_time_ms >= request.start.value
                    ]
                    start = later[0].base_offset if later else shard.end
            starts[number] = request.start.offsets.get(number, start)
            if starts[number] > shard.end:
                self.refuse(
                    correlation, RequestError(f"The next one is {shard.end}.", code=Code.OFFSET_OUT_OF_RANGE)
                )
                return
        subscription = 1000 + correlation
        stream_id = self.connection.open_stream(bidirectional=False)
        said = Subscribed(subscription, request.stream, log.incarnation, starts)
        self.cursors[subscription] = Cursor(
            request.stream, stream_id, subscription, dict(starts), request.credit_bytes
        )
        # The event stream may overtake the control stream; here it does, whenever something is there already.
        self.connection.send(stream_id, encode_message(FrameType.ANSWER, said))
        self.deliver()
        self.answer(correlation, said)

    def deliver(self) -> None:
        for cursor in list(self.cursors.values()):
            log = self.broker.streams.get(cursor.stream)
            if log is None or cursor.over or self.connection.is_closed:
                continue
            for number, offset in cursor.offsets.items():
                shard = log.shards[number]
                if offset < shard.start:
                    self.event(cursor, GapBody(number, 1, offset, shard.start).encode())
                    cursor.offsets[number] = offset = shard.start
                for batch in shard.batches:
                    header = batch.header
                    if header.next_offset <= offset:
                        continue
                    frame = frame_header(FrameType.BATCH, header.total_length) + batch.encode()
                    if cursor.used + len(frame) > cursor.limit:
                        break
                    cursor.used += len(frame)
                    cursor.offsets[number] = offset = header.next_offset
                    self.event(cursor, frame)

    def event(self, cursor: Cursor, frame: bytes) -> None:
        self.connection.send(cursor.stream_id, frame)

    def end_subscription(self, error: FelixError) -> None:
        for cursor in self.cursors.values():
            cursor.over = True
            self.connection.send(cursor.stream_id, encode_error(error), end=True)

    # script

    def goodbye(self, reason: str = "maintenance", reconnect_after_ms: int = 0) -> None:
        self.send(encode_message(FrameType.GOODBYE, Goodbye(reason, reconnect_after_ms)))

    def drop(self) -> None:
        """The connection is gone, as in a crash."""
        self.connection.close(int(Code.DISCONNECTED), "gone")

    def ping(self) -> None:
        self.send(encode_frame(FrameType.PING, b"12345678"))


def _state(name: str, log: StreamLog) -> StreamState:
    return StreamState(
        name, log.incarnation, len(log.shards), log.durability, Retention(), 0, NOW_MS,
        [ShardState(i, s.start, s.end, s.end, 1) for i, s in enumerate(log.shards)],
    )  # fmt: skip
