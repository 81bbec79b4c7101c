"""Connection: one region, reached and reached again; below client, publisher and subscription, above the transport.

A `Link` is one QUIC connection and the session on it: it gives bytes to the sans-IO `ClientSession`, returns answers to their
callers, and keeps the session's publish credit. A `RegionConnection` is the actor: it makes links, one after the other, with
backoff, and tells its attachments (publishers and feeds) when one stands and when it is gone.

Invariants:

- a correlation id is in use at most once in a session; an answer that no caller waits for is ignored;
- no batch leaves beyond publish credit, nor while the transport's backlog is above its high-water mark;
- an event stream's bytes are bounded by the credit that its subscription gave, also before it is claimed;
- `link_up` and `link_down` alternate, `link_dead` comes last and once; all on the event loop.

Only felix/ itself and the bridge agent (bridge.wire) may use this module; applications use `felix.client`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from typing import Any, Final, Literal, Protocol, TypeVar, cast, get_args

import msgspec

from felix.address import Address
from felix.backoff import Backoff, BackoffPolicy
from felix.bounded import BoundedMap
from felix.errors import (
    Code,
    FelixError,
    NotLeaderError,
    ProtocolError,
    RequestError,
    UnavailableError,
    error_for,
)
from felix.frames import AppendedBody, Frame, FrameDecoder, FrameType, encode_frame
from felix.identity import NONCE_BYTES, Binding, Identity, Proof, prove
from felix.messages import (
    ANSWERS,
    Answer,
    AnswerT,
    Challenge,
    Goodbye,
    Limits,
    Repeatable,
    Request,
    Subscribe,
    Subscribed,
    Throttled,
    Unsubscribe,
    Welcome,
    decode_answer,
    encode_message,
    encode_request,
)
from felix.names import StreamName
from felix.profile import Credentials, Profile, load_credentials
from felix.relay import RelayPath
from felix.routing import ELSEWHERE_S, LEADERS_MAX, Routes
from felix.runtime.port import Random, Runtime
from felix.runtime.real import REAL
from felix.session import (
    Acknowledged,
    Answered,
    ClientSession,
    CreditGranted,
    CreditLine,
    Established,
    LeaveAsked,
    Refused,
    grant_frame,
)
from felix.tasks import end_tasks
from felix.transport.port import (
    ClientTls,
    Connection,
    Engine,
    NobodyListensError,
    TransportLimits,
    engine_named,
)

SOFTWARE: Final = "felix-python/0.1"
THROTTLED_GRACE_S: Final = 2.0
"""The broker says about once a second what slows a session down; after so much silence it is believed to be over."""
CONNECT_TIMEOUT_S: Final = 10.0
"""Until the first session stands: covers a broker that is just starting, short enough for a person to wait."""
ATTEMPT_TIMEOUT_S: Final = 5.0
"""For one address, transport and session handshake together; then the next address is tried."""
SILENT_S: Final = 1.0
"""Whoever waits for an answer and has heard nothing for so long asks whether the broker is there. One that was killed and started again on its port
refuses nothing: only silence tells."""
READER_SILENT_S: Final = 2.0
"""The same for whoever only reads, where the region has several brokers: another one may lead its stream by now, and has more for it. A region of one
broker has nobody else to ask; there the transport's keep-alive tells, after some 12 s."""
REQUEST_TIMEOUT_S: Final = 30.0
"""A request with its answer, reconnects included."""
GOODBYE_DRAIN_S: Final = 5.0
"""How long answers are still awaited on a session that the broker asked to leave."""
GOODBYE_PAUSE_MS_MAX: Final = 60_000
"""However long a broker asks its clients to stay away, they look again after a minute."""
RELAY_AFTER_S: Final = 1.5
"""How long a leader's own address is tried before the first connection's broker is asked to relay: the second packet of a handshake whose first was
lost leaves after 1 s (RFC 9002, section 6.2.2), and has half a second to come back."""
RELAY_AGAIN_S: Final = 300.0
"""So long a leader that was reached through another broker is asked for there first: firewalls and port-forwards stay for the day."""
HOPS_MAX: Final = 2
"""Brokers that one request is sent on to before it pauses: two that name each other have not heard of the same election."""
CORRELATION_MAX: Final = (1 << 32) - 1

Relaying = Literal["auto", "always", "never"]
"""Whether a leader is reached through the first connection's broker: where its own address does not answer, always, or not at all."""
RELAYING: Final[tuple[Relaying, ...]] = get_args(Relaying)

_EVENT_TYPES: Final = frozenset({FrameType.ANSWER, FrameType.BATCH, FrameType.GAP, FrameType.ERROR})

_log = logging.getLogger("felix.connection")

T = TypeVar("T")


class SessionInfo(msgspec.Struct, frozen=True):
    """The session that stands now: who answered, as whom we came, what is allowed."""

    session: str
    identity: str
    region: str
    mesh: str
    broker: str
    rights: tuple[str, ...]
    limits: Limits
    engine: str
    address: Address
    relayed_by: str = ""
    """the broker through which this one is reached, where it is not reached itself"""


class Pending(Protocol):
    """A caller that waits for the frames of one correlation id."""

    def answered(self, answer: Answer) -> None: ...

    def acknowledged(self, appended: AppendedBody) -> None: ...

    def refused(self, error: FelixError) -> None: ...


class EventSink(Protocol):
    """Where an event stream's frames go (felix.subscription)."""

    def event(self, frame: Frame) -> None:
        """Raises ProtocolError where the frame breaks the protocol: the link ends."""

    def event_end(self, error: FelixError | None) -> None:
        """The stream is over; `error` is what the broker said, None where it said nothing."""


class ExchangeSink(Protocol):
    """Where the bytes go that come back on a bidirectional stream of ours (bridge.wire)."""

    def exchange_data(self, data: bytes, end: bool) -> None:
        """Raises ProtocolError where they break the protocol: the link ends."""

    def exchange_end(self, error: FelixError | None) -> None:
        """Nothing more will come: the peer gave the stream up (None), or the link is over. Called at most once."""


class Sender(Protocol):
    """A publisher that waits for credit or for the backlog to fall."""

    def pump(self) -> None: ...


class Attachment(Protocol):
    """Something that lives on a region through its links."""

    def link_up(self, link: Link) -> None: ...

    def link_down(self, error: FelixError) -> None: ...

    def link_dead(self, error: FelixError) -> None:
        """There will be no further link; also called where one is attached to a dead connection."""


def protocol_breach(sentence: str, code: Code = Code.STATE) -> ProtocolError:
    """A violation of the protocol by the broker."""
    return ProtocolError(
        sentence, code=code, hint="The broker is broken or of another release; the session was ended."
    )


class _Ask:
    """One request's answer. A cancelled ask stays registered until its answer comes, so that it can be undone."""

    __slots__ = ("_link", "future")

    def __init__(self, link: Link, future: asyncio.Future[Answer]) -> None:
        self._link, self.future = link, future

    def answered(self, answer: Answer) -> None:
        self._link.release_ask()
        if not self.future.done():
            self.future.set_result(answer)
        elif isinstance(answer, Subscribed):
            self._link.forget_subscription(answer.subscription, unsubscribe=True)

    def acknowledged(self, appended: AppendedBody) -> None:
        raise protocol_breach("The broker acknowledged a batch where a request was asked.")

    def refused(self, error: FelixError) -> None:
        self._link.release_ask()
        if not self.future.done():
            self.future.set_exception(error)


class _EventStream:
    """One event stream: its decoder, and its frames until a subscription claims them."""

    __slots__ = ("decoder", "dropped", "ended", "held", "sink", "subscription")

    def __init__(self) -> None:
        self.decoder = FrameDecoder(_EVENT_TYPES)
        self.subscription = 0
        self.sink: EventSink | None = None
        self.held: list[Frame] = []
        self.ended = False
        self.dropped = False


class Link:
    """One QUIC connection and the session on it; the Handler that the transport calls."""

    def __init__(
        self,
        *,
        region: str,
        prove: Callable[[Challenge, Binding], Proof],
        limits: TransportLimits,
        random: Random,
        over: Callable[[Link, FelixError], None],
        moved: Callable[[NotLeaderError], None] = lambda error: None,
        is_of_several: bool = False,
    ) -> None:
        """`over` is called with the error that ended the session, once everybody who waits on this link was told; `moved` with
        each word of the broker that another one leads a stream. `is_of_several`: the region has several brokers."""
        self._loop = asyncio.get_running_loop()
        self._told_over = over
        self._moved = moved
        self._region = region
        self._prove = prove
        self._random = random
        self._backlog_high_bytes = limits.backlog_high_bytes
        self._connection: Connection | None = None
        self._session: ClientSession | None = None
        self._control = -1
        self._pending: dict[int, Pending] = {}
        self._silence: asyncio.TimerHandle | None = None
        self._is_of_several = is_of_several
        self._reading: asyncio.TimerHandle | None = None
        self._watchers: dict[int, Callable[[FelixError], None]] = {}
        self._last_correlation = 0
        self._asks: asyncio.Semaphore | None = None
        self._streams: dict[int, _EventStream] = {}
        self._sinks: dict[int, EventSink] = {}
        self._forgotten: set[int] = set()
        self._exchanges: dict[int, ExchangeSink] = {}
        self._subscribing_bytes = 0
        self._senders: deque[Sender] = deque()
        self._resuming = False
        self._error: FelixError | None = None
        self.established: asyncio.Future[Established] = self._loop.create_future()
        self.over: asyncio.Future[FelixError] = self._loop.create_future()
        self.leaving: Goodbye | None = None
        self.leave_asked = asyncio.Event()
        self.credit = CreditLine(0)
        self.window_bytes = 0
        """Publish credit of a session with nothing on its way: no frame may be longer."""
        self.limits: Limits | None = None
        self._throttle: Throttled | None = None
        self._throttled_until = 0.0

    # -- what the transport calls ---------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self._connection = connection
        self._session = ClientSession(
            region=self._region,
            software=SOFTWARE,
            nonce=self._random.randbytes(NONCE_BYTES),
            leaf_sha256=connection.server_leaf_sha256,
            prove=self._prove,
        )
        self._control = connection.open_stream(bidirectional=True)
        self._flush()

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        try:
            exchange = self._exchanges.get(stream_id)
            if stream_id == self._control:
                self._receive_control(data, end)
            elif exchange is not None:
                exchange.exchange_data(data, end)
                if end:
                    self.close_exchange(stream_id)
            elif stream_id & 3 != 0:
                self._receive_event(stream_id, data, end)
        except FelixError as error:
            self.fail(error)

    def stream_reset(self, stream_id: int, code: int) -> None:
        if stream_id == self._control:
            self.fail(protocol_breach("The broker reset the control stream."))
            return
        exchange = self._exchanges.get(stream_id)
        if exchange is not None:
            self.close_exchange(stream_id)
            exchange.exchange_end(None)
            return
        stream = self._streams.pop(stream_id, None)
        if stream is not None and stream.sink is not None:
            self._sinks.pop(stream.subscription, None)
            stream.sink.event_end(None)

    def drained(self) -> None:
        self._resume()

    def closed(self, code: int, reason: str) -> None:
        self._finish(self._error or self._closing_error(code, reason))

    def _closing_error(self, code: int, reason: str) -> FelixError:
        """The error that the end of the connection stands for. The broker's ERROR frame may be lost; its close has the same
        code.
        """
        said = f": {reason}" if reason else ""
        sentence = f"The connection to region {self._region} ended{said}."
        if 100 <= code < 500 and code not in (Code.PROTOCOL, Code.HANDSHAKE_TIMEOUT, Code.DISCONNECTED):
            return error_for(code, reason or sentence)
        return UnavailableError(sentence, code=Code.DISCONNECTED)

    # -- the session ----------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.over.done()

    @property
    def is_usable(self) -> bool:
        """True while new requests and batches may be sent."""
        return not self.over.done() and self.leaving is None and self.established.done()

    @property
    def waits(self) -> bool:
        """True while answers are outstanding."""
        return bool(self._pending)

    @property
    def connection(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def _flush(self) -> None:
        assert self._session is not None
        if not self.over.done() and not self.connection.is_closed:
            out = self._session.take_output()
            if out:
                self.connection.send(self._control, out)

    def send_control(self, frame: bytes) -> None:
        """Queue one frame for the control stream; dropped where the link is over."""
        if self.over.done():
            return
        assert self._session is not None
        self._session.send(frame)
        self._flush()

    def _receive_control(self, data: bytes, end: bool) -> None:
        assert self._session is not None
        events = self._session.receive(data)
        credit_before = self.credit.limit_bytes
        for event in events:
            match event:
                case Acknowledged(correlation, appended):
                    self.credit.extend(appended.credit_limit_bytes)
                    waiting = self._pending.pop(correlation, None)
                    if waiting is not None:
                        waiting.acknowledged(appended)
                case Answered(0, Throttled() as notice):
                    self._throttled(notice)
                case Answered(correlation, answer):
                    waiting = self._pending.pop(correlation, None)
                    if waiting is not None:
                        waiting.answered(answer)
                case Refused(0, error):
                    raise error
                case Refused(correlation, error):
                    waiting = self._pending.pop(correlation, None)
                    if waiting is not None:
                        waiting.refused(error)
                    elif correlation in self._watchers:
                        self._watchers[correlation](error)
                    if isinstance(error, NotLeaderError):
                        self._moved(error)
                case CreditGranted(subscription, limit_bytes):
                    if subscription:
                        raise protocol_breach("The broker sent delivery credit, which only a client gives.")
                    self.credit.extend(limit_bytes)
                case Established(welcome):
                    self._welcome(welcome)
                    self.established.set_result(event)
                    if self._is_of_several:
                        self._reading = self._loop.call_later(READER_SILENT_S, self._look_for_readers)
                case LeaveAsked(goodbye):
                    self.leave(goodbye)
        self._flush()
        if self.credit.limit_bytes > credit_before:
            self._resume()
        if end:
            raise UnavailableError("The broker ended the session.", code=Code.DISCONNECTED)

    @property
    def throttled(self) -> Throttled | None:
        """The quota that slows this session down now, as the broker last said; None where none does."""
        return self._throttle if self._loop.time() < self._throttled_until else None

    def _throttled(self, notice: Throttled) -> None:
        if self.throttled is None:
            _log.warning(
                "%s slows this session down: %s %s may %d per second",
                notice.limit, notice.scope, notice.name, notice.per_second,
            )  # fmt: skip
        self._throttle = notice
        self._throttled_until = self._loop.time() + notice.wait_ms / 1000 + THROTTLED_GRACE_S

    def leave(self, goodbye: Goodbye) -> None:
        """Nothing new is begun on this link; it ends once what was asked for is answered."""
        self.leaving = goodbye
        self.leave_asked.set()

    def _welcome(self, welcome: Welcome) -> None:
        self.limits = welcome.limits
        self.credit = CreditLine(welcome.publish_credit_bytes)
        self.window_bytes = welcome.publish_credit_bytes
        self._asks = asyncio.Semaphore(max(1, welcome.limits.requests_max))

    def fail(self, error: FelixError) -> None:
        """End the connection because of received data; every waiting caller gets this error."""
        if self.over.done():
            return
        self._error = error
        if self._connection is not None and not self._connection.is_closed:
            self._connection.close(int(error.code), error.sentence[:200])
        self._finish(error)

    def _finish(self, error: FelixError) -> None:
        if self.over.done():
            return
        self.over.set_result(error)
        self.leave_asked.set()
        if not self.established.done():
            self.established.set_exception(error)
            # The caller that opened the link may have given it up already.
            self.established.exception()
        pending, self._pending = self._pending, {}
        exchanges, self._exchanges = self._exchanges, {}
        self._streams.clear()
        self._sinks.clear()
        self._senders.clear()
        self._watchers.clear()
        for timer in (self._silence, self._reading):
            if timer is not None:
                timer.cancel()
        for waiting in pending.values():
            if isinstance(waiting, _Ask):
                waiting.refused(error)
        for exchange in exchanges.values():
            exchange.exchange_end(error)
        self._told_over(self, error)

    def close(self) -> None:
        """End the connection from our side."""
        self.fail(UnavailableError("The connection was closed by this client.", code=Code.DISCONNECTED))

    # -- requests -------------------------------------------------------------------------------------

    def register(self, pending: Pending) -> int:
        """A correlation id under which `pending` is called, once."""
        number = self._new_correlation()
        self._pending[number] = pending
        if self._silence is None:
            self._silence = self._loop.call_later(SILENT_S, self._look_for_silence)
        return number

    def _look_for_silence(self) -> None:
        self._silence = None
        if not self._pending or self.over.done():
            return
        if self.established.done() and self._loop.time() - self.connection.heard_at >= SILENT_S:
            # Where it is not acknowledged either, the transport ends the connection.
            self.send_control(encode_frame(FrameType.PING, b""))
        self._silence = self._loop.call_later(SILENT_S, self._look_for_silence)

    def _look_for_readers(self) -> None:
        """As `_look_for_silence`, for who waits for records alone."""
        if self.over.done():
            return
        if (
            self._sinks or self._exchanges
        ) and self._loop.time() - self.connection.heard_at >= READER_SILENT_S:
            self.send_control(encode_frame(FrameType.PING, b""))
        self._reading = self._loop.call_later(READER_SILENT_S, self._look_for_readers)

    def _new_correlation(self) -> int:
        number = self._last_correlation
        while True:
            number = number + 1 if number < CORRELATION_MAX else 1
            if number not in self._pending and number not in self._watchers:
                self._last_correlation = number
                return number

    def watch(self, refused: Callable[[FelixError], None]) -> int:
        """A correlation id under which any number of refusals may come, until `unwatch`."""
        number = self._new_correlation()
        self._watchers[number] = refused
        return number

    def unwatch(self, correlation: int) -> None:
        self._watchers.pop(correlation, None)

    def forget(self, correlation: int) -> None:
        """The caller no longer waits for this one; later frames for it are ignored."""
        self._pending.pop(correlation, None)

    def release_ask(self) -> None:
        """One answer came, so that another request may be asked."""
        assert self._asks is not None
        self._asks.release()

    async def ask(self, request: Request[AnswerT], *, stream_id: int | None = None) -> AnswerT:
        """One request and its answer, on the control stream or as the first frame of `stream_id`.

        Raises what the broker refused it with, or the error that ended the link; ProtocolError where the answer is to
        another request; RequestError(FRAME_TOO_LARGE) where it is larger than a broker takes, which would end the session.
        """
        if self._asks is None or self.over.done():
            raise self._gone()
        await self._asks.acquire()
        if self.over.done():
            self._asks.release()
            raise self._gone()
        ask = _Ask(self, self._loop.create_future())
        correlation = self.register(ask)
        try:
            frame = encode_request(request, correlation)
        except RequestError:
            del self._pending[correlation]
            self.release_ask()
            raise
        if isinstance(request, Subscribe):
            self._subscribing_bytes += request.credit_bytes
        try:
            if stream_id is None:
                self.send_control(frame)
            else:
                self.connection.send(stream_id, frame)
            answer = await ask.future
            if not isinstance(answer, ANSWERS[type(request)]):
                raise ProtocolError(
                    f"The broker answered a {type(request).__name__} with a {type(answer).__name__}.",
                    hint="Use a client and a broker of neighbouring releases.",
                )
            return cast(AnswerT, answer)
        finally:
            if isinstance(request, Subscribe):
                self._subscribing_bytes -= request.credit_bytes

    def _gone(self) -> FelixError:
        if self.over.done():
            return self.over.result()
        return UnavailableError("The session does not stand yet.", code=Code.DISCONNECTED)

    # -- bidirectional streams ------------------------------------------------------------------------

    def open_exchange(self, sink: ExchangeSink) -> int:
        """A new bidirectional stream whose answers go to `sink`. Raises UnavailableError where none can be opened."""
        if not self.is_usable:
            raise self._gone()
        stream_id = self.connection.open_stream(bidirectional=True)
        self._exchanges[stream_id] = sink
        return stream_id

    def close_exchange(self, stream_id: int) -> None:
        """Nothing more is sent on it, and what still comes back is dropped. Where the broker ended it, this half is ended too: an open one
        would keep its place among the session's streams."""
        if self._exchanges.pop(stream_id, None) is not None:
            self.send_exchange(stream_id, b"", end=True)

    def moved(self, error: NotLeaderError) -> None:
        """The broker said on an exchange that another one leads its stream."""
        self._moved(error)

    def send_exchange(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Bytes on an exchange; dropped where the connection is closed, which its end is about to say."""
        if not self.over.done() and not self.connection.is_closed:
            self.connection.send(stream_id, data, end=end)

    # -- publishing -----------------------------------------------------------------------------------

    def may_send(self, amount: int) -> bool:
        """True where `amount` bytes of BATCH frame fit the credit and the transport's backlog is not high."""
        return (
            self.leaving is None
            and not self.over.done()
            and not self.connection.is_closed
            and amount <= self.credit.limit_bytes - self.credit.used_bytes
            and self.connection.backlog_bytes() < self._backlog_high_bytes
        )

    def send_batch(self, stream_id: int, frame: bytes) -> None:
        """Send a BATCH frame; the caller asked `may_send` in the same event loop iteration."""
        self.credit.use(len(frame))
        self.connection.send(stream_id, frame)

    @property
    def is_high(self) -> bool:
        """The transport's backlog is high, or the link is over."""
        connection = self.connection
        return (
            self.over.done() or connection.is_closed or connection.backlog_bytes() >= self._backlog_high_bytes
        )

    def wait_to_send(self, sender: Sender) -> None:
        """`sender.pump` is called once credit came or the backlog fell. Asking twice is asking once."""
        if sender not in self._senders:
            self._senders.append(sender)

    def _resume(self) -> None:
        if self._resuming or self.over.done():
            return
        self._resuming = True
        try:
            for _ in range(len(self._senders)):
                if not self._senders:
                    break
                self._senders.popleft().pump()
        finally:
            self._resuming = False

    # -- event streams --------------------------------------------------------------------------------

    def claim(self, subscription: int, sink: EventSink) -> None:
        """Send this subscription's frames to `sink`: those already received at once, later ones as they arrive."""
        self._sinks[subscription] = sink
        for stream in list(self._streams.values()):
            if stream.subscription == subscription and stream.sink is None and not stream.dropped:
                stream.sink = sink
                held, stream.held = stream.held, []
                try:
                    self._deliver(stream, held)
                except FelixError as error:
                    self.fail(error)
                    return
                if stream.ended:
                    self._end_stream(stream)

    def forget_subscription(self, subscription: int, *, unsubscribe: bool) -> None:
        """Nothing of this subscription is wanted any more; stragglers are dropped."""
        self._sinks.pop(subscription, None)
        seen = [stream for stream in self._streams.values() if stream.subscription == subscription]
        for stream in seen:
            self._drop(stream)
        if not seen:
            self._forgotten.add(subscription)
        if unsubscribe and not self.over.done():
            # The answer is of no interest; an id of its own keeps it from being anybody else's.
            request = encode_message(FrameType.REQUEST, Unsubscribe(subscription), self._new_correlation())
            self.send_control(request)

    def extend_credit(self, subscription: int, limit_bytes: int) -> None:
        """Let the broker send a subscription this much in all."""
        self.send_control(grant_frame(subscription, limit_bytes))

    def _drop(self, stream: _EventStream) -> None:
        # It stays known until its end, so that late frames on it are not mistaken for those of a new stream.
        stream.dropped = True
        stream.sink = None
        stream.held.clear()

    def _receive_event(self, stream_id: int, data: bytes, end: bool) -> None:
        # RFC 9000, section 2.1: the two lowest bits say who opened a stream and whether it is unidirectional.
        if stream_id & 3 != 3:
            raise protocol_breach(f"Data came on stream {stream_id}, which is no event stream.")
        if not self.established.done():
            raise protocol_breach("An event stream came before the session stood.")
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _EventStream()
        frames = [] if stream.dropped else stream.decoder.feed(data)
        if not stream.subscription and frames:
            self._name_stream(stream, frames.pop(0))
        if stream.dropped:
            if end:
                del self._streams[stream_id]
            return
        if stream.sink is not None:
            self._deliver(stream, frames)
        elif frames:
            stream.held += frames
        if stream.sink is None:
            unclaimed = sum(
                len(frame.body) for each in self._streams.values() if each.sink is None for frame in each.held
            )
            if unclaimed > self._subscribing_bytes + (1 << 16):
                raise protocol_breach(
                    "An event stream carried more than its subscription asked for.", Code.CREDIT_EXCEEDED
                )
        if end:
            stream.decoder.finish()
            stream.ended = True
            if stream.sink is not None:
                self._end_stream(stream)

    def _name_stream(self, stream: _EventStream, first: Frame) -> None:
        answer = decode_answer(first.body) if first.type is FrameType.ANSWER else None
        if not isinstance(answer, Subscribed):
            raise protocol_breach("An event stream does not begin with whose it is.")
        stream.subscription = answer.subscription
        if answer.subscription in self._forgotten:
            self._forgotten.discard(answer.subscription)
            self._drop(stream)
            return
        stream.sink = self._sinks.get(answer.subscription)

    def _deliver(self, stream: _EventStream, frames: list[Frame]) -> None:
        sink = stream.sink
        assert sink is not None
        for frame in frames:
            sink.event(frame)

    def _end_stream(self, stream: _EventStream) -> None:
        for stream_id, each in list(self._streams.items()):
            if each is stream:
                del self._streams[stream_id]
        sink = self._sinks.pop(stream.subscription, None)
        if sink is not None:
            sink.event_end(None)


def _is_of_cluster(error: UnavailableError) -> bool:
    """Whether a broker says that the request is another one's, so that it has done nothing."""
    return isinstance(error, NotLeaderError) and bool(error.stream or error.leader)


class _Lost:
    """Tells a client's routes when a link to a leader ends (Attachment)."""

    def __init__(self, routes: Routes[Attachment], address: str, leader: RegionConnection) -> None:
        self._routes, self._address, self._leader = routes, address, leader

    def link_up(self, link: Link) -> None: ...

    def link_down(self, error: FelixError) -> None:
        # Once all others on that link were told that it is down.
        asyncio.get_running_loop().call_soon(self._routes.lost, self._address, self._leader)

    def link_dead(self, error: FelixError) -> None:
        self.link_down(error)


class RegionConnection:
    """The actor that keeps one region connected."""

    def __init__(
        self,
        profile: Profile,
        *,
        engine: Engine | None = None,
        transport_limits: TransportLimits | None = None,
        backoff: BackoffPolicy | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        wait_for_broker: bool = True,
        runtime: Runtime = REAL,
        first: RegionConnection | None = None,
        profile_only: bool = False,
        relay: Relaying = "never",
    ) -> None:
        """`wait_for_broker`: False raises at once, in `open`, if no process listens at any address of the profile. `first`: the client's
        first connection, where this one is to a leader; None: it is the first. `profile_only`: a broker that names
        another one's address is followed only to an address of the profile. `relay`: whether the first connection's broker carries
        those to leaders."""
        self.profile = profile
        self._wait_for_broker = wait_for_broker
        self.request_timeout_s = request_timeout_s
        self.runtime = runtime
        self.policy = backoff or BackoffPolicy()
        self.reconnects = 0
        self._engine = engine
        self._limits = transport_limits or TransportLimits()
        self._connect_timeout_s = connect_timeout_s
        self._addresses = cycle(profile.parsed_addresses())
        self._attachments: dict[Attachment, None] = {}
        self._link: Link | None = None
        self._linked = asyncio.Event()
        self._info: SessionInfo | None = None
        self.identity: Identity | None = None
        """As whom the newest session came; None before the first."""
        self._dead: FelixError | None = None
        self._task: asyncio.Task[None] | None = None
        self._first = first
        self._relay = relay
        self._relayed: BoundedMap[str, float] = BoundedMap(LEADERS_MAX)
        """leaders' addresses that did not answer, until when they are asked for through this connection first"""
        known = [str(address) for address in profile.parsed_addresses()]
        self._routes: Routes[Attachment] = (
            first._routes
            if first is not None
            else Routes(
                self,
                self._to_leader,
                self.policy,
                runtime,
                self._address,
                (lambda address: address in known) if profile_only else (lambda address: True),
                known=known,
                with_broker=lambda: "" if self._info is None else self._info.broker,
            )
        )

    # -- life -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect for the first time.

        Raises UnavailableError where no address answers in time, RequestError where identity, region or profile are
        wrong, ProtocolError where the peer does not speak this protocol.
        """
        assert self._task is None, "a connection is opened once"
        loop = asyncio.get_running_loop()
        if self._engine is None:
            self._engine = engine_named(self.profile.engine or None)
        link = await self._establish(loop.time() + self._connect_timeout_s)
        self._task = loop.create_task(self._run(link), name=f"felix-{self.profile.region}")

    async def close(self) -> None:
        """End the connection; every waiting caller gets an error. Idempotent."""
        if self._first is None:
            await self._routes.close()
        self._die(
            UnavailableError(
                f"The connection to region {self.profile.region} was closed by this client.",
                code=Code.DISCONNECTED,
            )
        )
        if self._task is not None:
            await end_tasks(self._task)
        link = self._link
        if link is not None:
            link.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await link.connection.wait_closed()

    @property
    def session(self) -> SessionInfo:
        """The newest session, also while a new one is being made. Raises UnavailableError before the first."""
        if self._info is None:
            raise UnavailableError(
                "There is no session yet.", code=Code.DISCONNECTED, hint="Use `async with felix.connect(…)`."
            )
        return self._info

    @property
    def link(self) -> Link | None:
        """The link that stands, if one does."""
        return self._link if self._link is not None and self._link.is_usable else None

    def attach(self, attachment: Attachment, stream: StreamName | None = None) -> None:
        """Tell it of links from now on; of the present one at once. `stream`: what it lives on; where the region has several brokers,
        it is told of links to that stream's leader."""
        if stream is None:
            self.join(attachment)
        else:
            self._routes.attach(attachment, stream)

    def detach(self, attachment: Attachment) -> None:
        self._routes.detach(attachment)
        self.part(attachment)

    def join(self, attachment: Attachment) -> None:
        """As `attach`, for the links of this connection itself."""
        if self._dead is not None:
            attachment.link_dead(self._dead)
            return
        self._attachments[attachment] = None
        if self.link is not None:
            attachment.link_up(self.link)

    def part(self, attachment: Attachment) -> None:
        """As `detach`, for this connection itself."""
        self._attachments.pop(attachment, None)

    def _address(self) -> str:
        return "" if self._info is None else str(self._info.address)

    def _to_leader(self, address: str) -> RegionConnection:
        """A connection to one broker of the region, as this one is made."""
        leader = RegionConnection(
            replace(self.profile, addresses=(address,)),
            engine=self._engine,
            transport_limits=self._limits,
            backoff=self.policy,
            connect_timeout_s=ATTEMPT_TIMEOUT_S,
            request_timeout_s=self.request_timeout_s,
            wait_for_broker=False,
            runtime=self.runtime,
            first=self,
            relay=self._relay,
        )
        leader.join(_Lost(self._routes, address, leader))
        return leader

    # -- requests -------------------------------------------------------------------------------------

    async def request(self, request: Request[AnswerT], *, timeout_s: float | None = None) -> AnswerT:
        """One request and its answer, within `timeout_s` (None: the connection's own).

        A request that was not yet sent waits for a link. If its answer was lost, it is retried if it is idempotent, else it
        raises UnavailableError(DISCONNECTED): the outcome is unknown. Raises the broker's refusal.
        """
        limit_s = self.request_timeout_s if timeout_s is None else timeout_s
        backoff = Backoff(self.policy, self.runtime.random)
        last: FelixError | None = None
        try:
            async with asyncio.timeout(limit_s):
                asked, hops = self, 0
                unled_s: float | None = None
                while True:
                    try:
                        link = await asked._wait_for_link()
                        return await link.ask(request)
                    except UnavailableError as error:
                        if self._dead is not None:
                            raise
                        last = error
                        elsewhere = self._led_elsewhere(error)
                        if elsewhere is not None and elsewhere is not asked and hops < HOPS_MAX:
                            asked, hops = elsewhere, hops + 1
                            continue
                        if not (isinstance(request, Repeatable) or _is_of_cluster(error)):
                            raise self._unknown_outcome(request, error) from error
                        unled_s = self.runtime.clock.boot_ms() / 1000 if unled_s is None else unled_s
                        beside = self._beside(asked, error, unled_s)
                        asked, hops = beside or self, 0
                    await asyncio.sleep(backoff.next_ms(last.retry_after_ms) / 1000)
        except TimeoutError:
            why = last.sentence if last else "No broker answered."
            raise UnavailableError(
                f"{type(request).__name__} was not answered by region {self.profile.region} within {limit_s:g} s. {why}",
                code=Code.TIMEOUT,
                hint="Is the region up? `felix region status` tells."
                if isinstance(request, Repeatable)
                else "Whether it was carried out is not known; look before asking again.",
            ) from last

    async def at_leader(self, stream: StreamName, use: Callable[[Link], Awaitable[T]]) -> T:
        """What `use` does on a link to the broker that leads a stream: for what lives on one link, and ends with it.

        Raises what `use` raises, but follows NotLeaderError; UnavailableError where no link stands in time."""
        reach = self._routes.reach(stream)
        asked, hops = reach if isinstance(reach, RegionConnection) else self, 0
        while True:
            try:
                async with asyncio.timeout(self.request_timeout_s):
                    link = await asked._wait_for_link()
            except TimeoutError:
                raise UnavailableError(
                    f"No session with {', '.join(asked.profile.addresses)} of region {self.profile.region} stands.",
                    code=Code.TIMEOUT,
                ) from None
            try:
                return await use(link)
            except NotLeaderError as error:
                elsewhere = self._led_elsewhere(error)
                if elsewhere is None or elsewhere is asked or hops >= HOPS_MAX:
                    raise
                asked, hops = elsewhere, hops + 1

    def take_profile(self, profile: Profile) -> None:
        """Go on with another certificate or authority: every session begins anew, now."""
        self.profile = profile
        for each in (self, *self._routes.leaders()):
            assert isinstance(each, RegionConnection)
            if each is not self:
                each.profile = replace(profile, addresses=each.profile.addresses)
            if each.link is not None:
                each.link.close()

    def _led_elsewhere(self, error: FelixError) -> RegionConnection | None:
        """The connection to the broker that a refusal names."""
        if not isinstance(error, NotLeaderError) or not error.address:
            return None
        if not self._routes.may_call(error.address):
            raise UnavailableError(
                f"{self.profile.region} names its broker {error.leader} at {error.address}, which is none of the addresses given for it.",
                code=Code.NOT_LEADER,
                hint=f"Add {error.address} to the addresses of {self.profile.region}, if its operators say so.",
                retry_after_ms=1_000,
            ) from error
        reach = self._routes.at(error.address, error.leader)
        return reach if isinstance(reach, RegionConnection) else None

    def _beside(self, asked: RegionConnection, error: FelixError, since_s: float) -> RegionConnection | None:
        """Another broker, where the one asked has named nobody for a while: it may be cut off from those who know."""
        if (
            not isinstance(error, NotLeaderError)
            or self.runtime.clock.boot_ms() / 1000 - since_s < ELSEWHERE_S
        ):
            return None
        reach = self._routes.beside(asked._address())
        return reach if isinstance(reach, RegionConnection) else None

    def _unknown_outcome(self, request: Request[Any], error: UnavailableError) -> UnavailableError:
        if error.code is not Code.DISCONNECTED:
            return error
        return UnavailableError(
            f"The connection to region {self.profile.region} was lost before {type(request).__name__} was answered.",
            code=Code.DISCONNECTED,
            hint="Whether it was carried out is not known; look (describe, list) before asking again.",
        )

    async def _wait_for_link(self) -> Link:
        while True:
            if self._dead is not None:
                raise self._dead
            if self.link is not None:
                return self.link
            self._linked.clear()
            await self._linked.wait()

    # -- the actor ------------------------------------------------------------------------------------

    async def _run(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(self.policy, self.runtime.random)
        while True:
            began = loop.time()
            await link.leave_asked.wait()
            pause_ms = 0
            if link.leaving is not None and not link.is_over:
                pause_ms = link.leaving.reconnect_after_ms
                _log.info("the session with %s ends: %s", self.profile.region, link.leaving.reason)
                await self._let_finish(link)
                link.close()
            # A session that falls as soon as it stands must not be made again in a tight circle.
            if (loop.time() - began) * 1000 >= self.policy.ceiling_ms:
                backoff.reset()
            await asyncio.sleep(backoff.next_ms(min(pause_ms, GOODBYE_PAUSE_MS_MAX)) / 1000)
            try:
                link = await self._establish(None)
            except FelixError as error:
                self._die(error)
                return
            self.reconnects += 1

    def begin_anew(self, why: str) -> None:
        """Reconnect, as when a broker leaves: pending answers are still awaited, and everything open resumes."""
        link = self.link
        if link is not None:
            link.leave(Goodbye(f"{why}: the session begins anew", 0))

    async def _let_finish(self, link: Link) -> None:
        deadline = asyncio.get_running_loop().time() + GOODBYE_DRAIN_S
        while link.waits and not link.is_over and asyncio.get_running_loop().time() < deadline:
            await asyncio.wait([link.over], timeout=0.02)

    async def _establish(self, deadline: float | None) -> Link:
        """A link that stands. Tries address after address; without a deadline, for as long as it takes."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(self.policy, self.runtime.random)
        tried = deserted = 0
        while True:
            address = next(self._addresses)
            tried += 1
            left_s = ATTEMPT_TIMEOUT_S if deadline is None else max(0.05, deadline - loop.time())
            error: FelixError
            try:
                return await self._attempt(address, min(ATTEMPT_TIMEOUT_S, left_s))
            except UnavailableError as caught:
                error = caught
                deserted = deserted + 1 if isinstance(caught, NobodyListensError) else 0
            except ProtocolError as caught:
                # A handshake that was too slow may be quick the next time; anything else will be wrong again.
                if caught.code is not Code.HANDSHAKE_TIMEOUT:
                    raise
                error = caught
            if deadline is None and tried % len(self.profile.addresses):
                continue
            if deadline is not None and not self._wait_for_broker and deserted >= len(self.profile.addresses):
                raise UnavailableError(
                    f"No broker of region {self.profile.region} listens at {', '.join(self.profile.addresses)} (UDP).",
                    hint=f"Start it with `felix region up {self.profile.region}`, or check the addresses.",
                    retry_after_ms=error.retry_after_ms,
                ) from error
            wait_s = backoff.next_ms(error.retry_after_ms) / 1000
            _log.info("%s:%d of %s: %s", *address, self.profile.region, error.sentence)
            if deadline is not None and loop.time() + wait_s >= deadline:
                raise UnavailableError(
                    f"No broker of region {self.profile.region} answered at {', '.join(self.profile.addresses)} within "
                    f"{self._connect_timeout_s:g} s: {error.sentence}",
                    code=error.code,
                    hint=f"Start it with `felix region up {self.profile.region}`, or check the addresses.",
                    retry_after_ms=error.retry_after_ms,
                ) from error
            if deadline is not None and tried % len(self.profile.addresses):
                continue
            await asyncio.sleep(wait_s)

    async def _attempt(self, address: Address, timeout_s: float) -> Link:
        assert self._engine is not None
        # Read at each connect, off the loop, so that a renewed certificate is used without a restart.
        credentials = await asyncio.to_thread(load_credentials, self.profile)
        link = Link(
            region=self.profile.region,
            prove=lambda challenge, binding: self._prove(credentials, challenge, binding),
            limits=self._limits,
            random=self.runtime.random,
            over=self._link_over,
            moved=lambda error: self._routes.learned(error, str(address)),
            is_of_several=self._first is not None or len(self.profile.addresses) > 1,
        )
        tls = ClientTls(credentials.root_pem, self.profile.tls_name)
        try:
            async with asyncio.timeout(timeout_s):
                relayed_by = await self._dial(address, tls, link, timeout_s)
                established = await link.established
        except TimeoutError:
            error = UnavailableError(f"{address} did not answer within {timeout_s:.1f} s.", code=Code.TIMEOUT)
            link.fail(error)
            raise error from None
        except asyncio.CancelledError:
            link.close()
            raise
        welcome, challenge = established
        self._info = SessionInfo(
            welcome.session, welcome.identity, challenge.region, challenge.mesh, challenge.broker,
            tuple(welcome.rights), welcome.limits, link.connection.engine_name, address, relayed_by,
        )  # fmt: skip
        self._link = link
        self.identity = credentials.identity
        if link.is_over:
            raise UnavailableError("The session ended as soon as it stood.", code=Code.DISCONNECTED)
        for attachment in list(self._attachments):
            attachment.link_up(link)
        self._linked.set()
        return link

    async def _dial(self, address: Address, tls: ClientTls, link: Link, timeout_s: float) -> str:
        """Connect `link` to an address, itself or through the first connection's broker; that broker's id, empty where it is not needed."""
        loop, first = asyncio.get_running_loop(), self._first
        until = loop.time() + timeout_s
        if first is None or self._relay == "never" or not first._may_relay:
            await self._dial_directly(address, tls, link, timeout_s)
            return ""
        name = str(address)
        if self._relay == "always" or loop.time() < (first._relayed.use(name) or 0.0):
            try:
                return await self._dial_through(first, address, tls, link, until)
            except (UnavailableError, RequestError):
                first._relayed.pop(name)
                if self._relay == "always":
                    raise
            await self._dial_directly(address, tls, link, max(0.05, until - loop.time()))
            return ""
        try:
            await self._dial_directly(address, tls, link, min(RELAY_AFTER_S, timeout_s / 2))
            return ""
        except FelixError as error:
            # Whoever answers at an address that a firewall or NAT takes elsewhere may be anybody; nothing but a TLS hello was said.
            failed = error
        try:
            by = await self._dial_through(first, address, tls, link, until)
        except RequestError:
            raise failed from None
        first._relayed.put(name, loop.time() + RELAY_AGAIN_S)
        _log.info("%s of %s is reached through %s: %s", address, self.profile.region, by, failed.sentence)
        return by

    async def _dial_directly(self, address: Address, tls: ClientTls, link: Link, timeout_s: float) -> None:
        assert self._engine is not None
        await self._engine.connect(address.host, address.port, tls, link, self._limits, timeout=timeout_s)

    async def _dial_through(
        self, first: RegionConnection, address: Address, tls: ClientTls, link: Link, until: float
    ) -> str:
        assert self._engine is not None
        if first.link is None:
            raise UnavailableError(
                f"No session stands that could carry one to {address}.", code=Code.DISCONNECTED
            )
        path = RelayPath(first.link)
        await path.open(str(address))
        left_s = max(0.05, until - asyncio.get_running_loop().time())
        await self._engine.connect(
            address.host, address.port, tls, link, self._limits, timeout=left_s, path=path
        )
        return first.session.broker

    @property
    def _may_relay(self) -> bool:
        """Whether this connection's broker carries others."""
        return self.link is not None and self.session.limits.relays_max > 0

    def _prove(self, credentials: Credentials, challenge: Challenge, binding: Binding) -> Proof:
        if challenge.mesh != self.profile.mesh:
            raise RequestError(
                f"Asked for mesh {self.profile.mesh!r} and reached {challenge.mesh!r}; nothing was sent there.",
                code=Code.WRONG_REGION,
                hint="Check the addresses in the profile.",
            )
        return prove(credentials.identity, binding)

    def _link_over(self, link: Link, error: FelixError) -> None:
        if link is not self._link:
            return
        for attachment in list(self._attachments):
            attachment.link_down(error)

    def _die(self, error: FelixError) -> None:
        if self._dead is not None:
            return
        self._dead = error
        attachments, self._attachments = list(self._attachments), {}
        for attachment in attachments:
            attachment.link_dead(error)
        self._linked.set()
