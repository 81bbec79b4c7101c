"""Link: one QUIC connection and the session on it.

It gives bytes to the sans-IO `ClientSession`, returns answers to their callers (felix.correlations), sends the frames of event streams to their
subscriptions (felix.event_streams), and keeps the session's publish credit.

Invariants:

- an answer that no caller waits for is ignored;
- no batch leaves beyond publish credit, nor while the transport's backlog is above its high-water mark;
- everybody who waits on a link is told of its end before the connection is.

On the event loop. Made by felix.connection; used by what lives on a region's links.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, cast

from felix.correlations import Correlations, Pending
from felix.errors import (
    Code,
    FelixError,
    NotLeaderError,
    ProtocolError,
    UnavailableError,
    error_for,
    protocol_breach,
)
from felix.event_streams import EventSink, EventStreams
from felix.frames import AppendedBody, FrameType, encode_frame
from felix.identity import NONCE_BYTES, Binding, Proof
from felix.messages import (
    ANSWERS,
    Answer,
    AnswerT,
    Challenge,
    Goodbye,
    Limits,
    Request,
    Subscribe,
    Subscribed,
    Throttled,
    Unsubscribe,
    Welcome,
    encode_message,
    encode_request,
)
from felix.runtime.port import Random
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
from felix.transport.port import Connection, TransportLimits

SOFTWARE: Final = "felix-python/0.1"
THROTTLED_GRACE_S: Final = 2.0
"""The broker says about once a second what slows a session down; after so much silence it is believed to be over."""
SILENT_S: Final = 1.0
"""Whoever waits for an answer and has heard nothing for so long asks whether the broker is there. One that was killed and started again on its port
refuses nothing: only silence tells."""
BATCH_UNANSWERED_S: Final = 60.0
"""A batch that a broker which is heard has not answered for so long is sent again, with all behind it, in another session: half of what a publisher tries it for. A broker whose disk hangs
answers in no session; one that this session's streams or its engine keep from answering does in the next."""
READER_SILENT_S: Final = 2.0
"""The same for whoever only reads, where the region has several brokers: another one may lead its stream by now, and has more for it. A region of one
broker has nobody else to ask; there the transport's keep-alive tells, after some 12 s."""

_log = logging.getLogger("felix.connection")


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

    def link_down(self, error: FelixError) -> None:
        """It lives on this link no more. The link may stand, where it moves to another one: what it had there it gives up."""

    def link_dead(self, error: FelixError) -> None:
        """There will be no further link; also called where one is attached to a dead connection."""


class _Ask:
    """One request's answer. A cancelled ask stays registered until its answer comes, so that it can be undone."""

    __slots__ = ("_link", "future")

    def __init__(self, link: Link, future: asyncio.Future[Answer]) -> None:
        self._link, self.future = link, future

    def answered(self, answer: Answer) -> None:
        self._link.release_ask()
        if not self.future.done():
            self.future.set_result(answer)
        else:
            self._undo(answer)

    def abandon(self) -> None:
        """Whoever asked was cancelled. The answer may have come before that was heard."""
        if self.future.done() and not self.future.cancelled() and self.future.exception() is None:
            self._undo(self.future.result())

    def _undo(self, answer: Answer) -> None:
        if isinstance(answer, Subscribed):
            self._link.forget_subscription(answer.subscription, unsubscribe=True)

    def acknowledged(self, appended: AppendedBody) -> None:
        raise protocol_breach("The broker acknowledged a batch where a request was asked.")

    def refused(self, error: FelixError) -> None:
        self._link.release_ask()
        if not self.future.done():
            self.future.set_exception(error)


def _is_batch(pending: Pending) -> bool:
    """Requests may take long; what is asked says how."""
    return not isinstance(pending, _Ask)


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
        client: Callable[[bytes], bytes] = lambda nonce: b"",
    ) -> None:
        """`client`: its client's id (messages.ClientHello), given this link's nonce. `over` is called with the error that ended the session, once everybody who waits on this link was told; `moved` with
        each word of the broker that another one leads a stream. `is_of_several`: the region has several brokers."""
        self._loop = asyncio.get_running_loop()
        self._told_over = over
        self._moved = moved
        self._region = region
        self._prove = prove
        self._random = random
        self._client = client
        self._backlog_high_bytes = limits.backlog_high_bytes
        self._connection: Connection | None = None
        self._session: ClientSession | None = None
        self._control = -1
        self._waiting = Correlations()
        self._silence: asyncio.TimerHandle | None = None
        self._oldest_batch = 0
        self._oldest_since = 0.0
        self._is_of_several = is_of_several
        self._reading: asyncio.TimerHandle | None = None
        self._asks: asyncio.Semaphore | None = None
        self._events = EventStreams()
        self._exchanges: dict[int, ExchangeSink] = {}
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
        nonce = self._random.randbytes(NONCE_BYTES)
        self._session = ClientSession(
            region=self._region,
            software=SOFTWARE,
            nonce=nonce,
            leaf_sha256=connection.server_leaf_sha256,
            prove=self._prove,
            client=self._client(nonce),
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
        self._events.reset(stream_id)

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
        return bool(self._waiting)

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
                    self._waiting.acknowledged(correlation, appended)
                case Answered(0, Throttled() as notice):
                    self._throttled(notice)
                case Answered(correlation, answer):
                    self._waiting.answered(correlation, answer)
                case Refused(0, error):
                    raise error
                case Refused(correlation, error):
                    self._waiting.refused(correlation, error)
                    if isinstance(error, NotLeaderError):
                        self._moved(error)
                case CreditGranted(subscription, limit_bytes):
                    if subscription:
                        raise protocol_breach("The broker sent delivery credit, which only a client gives.")
                    self.credit.extend(limit_bytes)
                case Established(welcome):
                    self._welcome(welcome)
                    if self.established.done():
                        # Whoever waited was cancelled, and is about to close it.
                        continue
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
        waiting = self._waiting.end()
        exchanges, self._exchanges = self._exchanges, {}
        self._events.clear()
        self._senders.clear()
        for timer in (self._silence, self._reading):
            if timer is not None:
                timer.cancel()
        for each in waiting:
            if isinstance(each, _Ask):
                each.refused(error)
        for exchange in exchanges.values():
            exchange.exchange_end(error)
        self._told_over(self, error)

    def close(self) -> None:
        """End the connection from our side."""
        self.fail(UnavailableError("The connection was closed by this client.", code=Code.DISCONNECTED))

    # -- requests -------------------------------------------------------------------------------------

    def register(self, pending: Pending) -> int:
        """A correlation id under which `pending` is called, once."""
        number = self._waiting.register(pending)
        if self._silence is None:
            self._silence = self._loop.call_later(SILENT_S, self._look_for_silence)
        return number

    def _look_for_silence(self) -> None:
        self._silence = None
        if not self._waiting or self.over.done():
            return
        if self.established.done() and self._loop.time() - self.connection.heard_at >= SILENT_S:
            # Where it is not acknowledged either, the transport ends the connection.
            self.send_control(encode_frame(FrameType.PING, b""))
        self._look_for_unanswered()
        self._silence = self._loop.call_later(SILENT_S, self._look_for_silence)

    def _look_for_unanswered(self) -> None:
        """A batch that waits and waits: whatever stands still on this connection, another one may not."""
        now, oldest = self._loop.time(), self._waiting.oldest(_is_batch)
        if oldest != self._oldest_batch:
            self._oldest_batch, self._oldest_since = oldest, now
        elif oldest and now - self._oldest_since >= BATCH_UNANSWERED_S and self.leaving is None:
            waited = f"a batch was sent and not answered for {BATCH_UNANSWERED_S:g} s"
            _log.warning("%s by %s: it is sent again in another session", waited, self._region)
            self.leave(Goodbye(waited, 0))

    def _look_for_readers(self) -> None:
        """As `_look_for_silence`, for who waits for records alone."""
        if self.over.done():
            return
        if (
            self._events.has_readers or self._exchanges
        ) and self._loop.time() - self.connection.heard_at >= READER_SILENT_S:
            self.send_control(encode_frame(FrameType.PING, b""))
        self._reading = self._loop.call_later(READER_SILENT_S, self._look_for_readers)

    def watch(self, refused: Callable[[FelixError], None]) -> int:
        """A correlation id under which any number of refusals may come, until `unwatch`."""
        return self._waiting.watch(refused)

    def unwatch(self, correlation: int) -> None:
        self._waiting.unwatch(correlation)

    def forget(self, correlation: int) -> bool:
        """The caller no longer waits for this one; later frames for it are ignored. Whether nothing had come for it."""
        return self._waiting.forget(correlation)

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
        except BaseException:
            self._waiting.forget(correlation)
            self.release_ask()
            raise
        if isinstance(request, Subscribe):
            self._events.subscribing(request.credit_bytes)
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
        except asyncio.CancelledError:
            if stream_id is not None and ask.future.cancelled():
                # Whoever gives it up resets its stream; a broker that hears of that first answers nothing.
                # What came between the cancellation and this has released it.
                if self.forget(correlation):
                    self.release_ask()
            else:
                ask.abandon()
            raise
        finally:
            if isinstance(request, Subscribe):
                self._events.subscribing(-request.credit_bytes)

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

    def will_send(self) -> None:
        """A callback is scheduled that will send (felix.transport.port.Connection.will_send)."""
        if not self.over.done():
            self.connection.will_send()

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
        try:
            self._events.claim(subscription, sink)
        except FelixError as error:
            self.fail(error)

    def forget_subscription(self, subscription: int, *, unsubscribe: bool) -> None:
        """Nothing of this subscription is wanted any more; stragglers are dropped."""
        self._events.forget(subscription)
        if unsubscribe and not self.over.done():
            # The answer is of no interest; an id of its own keeps it from being anybody else's.
            request = encode_message(FrameType.REQUEST, Unsubscribe(subscription), self._waiting.unused())
            self.send_control(request)

    def extend_credit(self, subscription: int, limit_bytes: int) -> None:
        """Let the broker send a subscription this much in all."""
        self.send_control(grant_frame(subscription, limit_bytes))

    def _receive_event(self, stream_id: int, data: bytes, end: bool) -> None:
        # RFC 9000, section 2.1: the two lowest bits say who opened a stream and whether it is unidirectional.
        if stream_id & 3 != 3:
            raise protocol_breach(f"Data came on stream {stream_id}, which is no event stream.")
        if not self.established.done():
            raise protocol_breach("An event stream came before the session stood.")
        self._events.receive(stream_id, data, end)
