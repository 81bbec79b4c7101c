"""Exchanges: bidirectional streams that a client opens, each to one view of a stream or to one link's ingest.

The first frame says what the exchange is; `PendingHandler` reads it and lets the session put the right role in its place. A view
then speaks through an `Exchange`: CALL frames in, REPLY and ERROR frames out, under correlation ids that are the exchange's own,
in any order; BATCH frames where a view delivers, CREDIT frames where it is granted.

Invariants: every call is answered once, unless the exchange ends; what is unanswered, and what has come of an incomplete frame, is
held within the broker's `exchange` budget; at most CALLS_MAX calls of one exchange are under way; while the connection's backlog is
above its limit no call is handled, so a client that asks and does not read holds calls here, and not answers; a handler hears of
the end once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from felix.errors import Code, FelixError, ProtocolError, RequestError, UnavailableError
from felix.frames import (
    CONTROL_BYTES_MAX,
    FRAME_HEADER_BYTES,
    Frame,
    FrameDecoder,
    FrameType,
    decode_credit,
)
from felix.messages import Message, Request, decode_request, encode_error, encode_message
from felix.names import SpiffeId
from felix.tasks import TaskSet
from region.broker import Broker
from region.limits.quota import Meter
from region.ports import Exchanging, Role

log = logging.getLogger("felix.region.exchange")

CALLS_MAX: Final = 1_024
"""Calls of one exchange under way at once; a client keeps below half of it."""
LOOK_BYTES: Final = 256 << 10
"""Sent before it is looked at whether the connection takes more: a look costs more than a small answer."""
_INBOUND: Final = frozenset({FrameType.REQUEST, FrameType.CALL, FrameType.CREDIT})

OpenRole = Callable[[Exchanging, int], Role]
"""Makes the role of a stream, by session and stream id; the role is then given the stream's bytes from the first on."""


class PendingHandler:
    """A new exchange until its first frame is whole. `become` puts the role that it asks for in this one's place."""

    def __init__(
        self,
        session: Exchanging,
        stream_id: int,
        openers: Mapping[type[Message], OpenRole],
        admit: Callable[[type[Message]], None],
        become: Callable[[int, Role], None],
    ) -> None:
        """`admit` raises RequestError where this session may not begin such an exchange, NotLeaderError where another broker has it."""
        self._session = session
        self._stream_id = stream_id
        self._openers = openers
        self._admit = admit
        self._become = become
        self._held = b""
        self._charged = 0

    def data(self, data: bytes, end: bool) -> None:
        self._held += data
        first = self._first()
        if first is None:
            self._session.hold_request(len(data))
            self._charged += len(data)
            if len(self._held) > FRAME_HEADER_BYTES + CONTROL_BYTES_MAX or end:
                raise ProtocolError("An exchange begins with one whole request.", code=Code.FRAME_MALFORMED)
            return
        self.closed()
        asked = type(decode_request(first.body))
        opener = self._openers.get(asked)
        if opener is None:
            raise ProtocolError("This request does not begin an exchange.", code=Code.STATE)
        try:
            self._admit(asked)
        except (RequestError, UnavailableError) as error:
            self._session.send(self._stream_id, encode_error(error, first.correlation), end=True)
            self._session.end_role(self)
            self._held = b""
            return
        role = opener(self._session, self._stream_id)
        held, self._held = self._held, b""
        self._become(self._stream_id, role)
        role.data(held, end)

    def _first(self) -> Frame | None:
        """The first frame, once it is whole. What follows it is the role's to judge."""
        if len(self._held) < FRAME_HEADER_BYTES:
            return None
        length = int.from_bytes(self._held[:4])
        # The decoder checks type and length before the body has come.
        frames = FrameDecoder(frozenset({FrameType.REQUEST})).feed(self._held[: FRAME_HEADER_BYTES + length])
        return frames[0] if frames else None

    @property
    def meter(self) -> None:
        """It uses no stream yet."""

    def pump(self) -> None: ...

    def rights_changed(self) -> None: ...

    def closed(self) -> None:
        """Give back what is charged: the role that follows charges what it holds itself."""
        self._session.hold_request(-self._charged)
        self._charged = 0


class Handler(Protocol):
    """One view's side of an exchange."""

    def open(self, correlation: int, request: Request[Any]) -> None:
        """The first request; answer it with `Exchange.opened`, `refuse` or `fail`."""

    def call(self, correlation: int, call: Any) -> None:
        """A decoded call; answer it now or later."""

    def credit(self, limit_bytes: int) -> None:
        """The client takes so many bytes in all (see frames.Credit)."""

    def pump(self) -> None:
        """The connection takes more: send what waits."""

    def rights_changed(self) -> None:
        """The client's rights have changed; end what they no longer allow."""

    def closed(self) -> None:
        """The exchange is over; release what is held."""


class Exchange:
    """A role: the frames of one exchange, for its handler."""

    def __init__(
        self,
        broker: Broker,
        session: Exchanging,
        stream_id: int,
        make_handler: Callable[[Exchange], Handler],
        decode_call: Callable[[memoryview], Any],
    ) -> None:
        """`decode_call` raises ProtocolError(FRAME_MALFORMED)."""
        self.broker = broker
        self.session = session
        self._stream_id = stream_id
        self._decode_call = decode_call
        self._decoder = FrameDecoder(_INBOUND)
        self._sizes: dict[int, int] = {}
        self._held: deque[tuple[int, Any]] = deque()
        self._unlooked_bytes = 0
        self._partial = 0
        self._tasks = TaskSet()
        self._asked = False
        self._is_open = False
        self._over = False
        self.meter: Meter | None = None
        self._stream = ""
        self._handler = make_handler(self)

    @property
    def identity(self) -> SpiffeId:
        """Who has opened it."""
        identity = self.session.identity
        assert identity is not None
        return identity

    @property
    def over(self) -> bool:
        """True once nothing can be sent any more."""
        return self._over or self.session.ended

    # -- role ------------------------------------------------------------------------------------------

    def data(self, data: bytes, end: bool) -> None:
        for frame in self._decoder.feed(data):
            if self._over:
                return
            if frame.type is FrameType.CALL:
                self._call(frame)
            elif frame.type is FrameType.CREDIT:
                self._handler.credit(decode_credit(frame.body).limit_bytes)
            elif self._asked:
                raise ProtocolError("An exchange is opened once.", code=Code.STATE)
            else:
                self._asked = True
                self._begin(frame.correlation, decode_request(frame.body))
        self._hold_partial()
        if end and not self._over:
            self._decoder.finish()
            self.end()

    def _begin(self, correlation: int, request: Request[Any]) -> None:
        self._stream = getattr(request, "stream", "")
        try:
            self.charge()
        except (RequestError, UnavailableError) as error:
            self.fail(error, correlation)
            return
        self._handler.open(correlation, request)

    def _call(self, frame: Frame) -> None:
        if not self._is_open:
            raise ProtocolError("A call came before the exchange was opened.", code=Code.STATE)
        correlation, size = frame.correlation, FRAME_HEADER_BYTES + len(frame.body)
        if not correlation or correlation in self._sizes:
            raise ProtocolError(f"Correlation id {correlation} is in use or none.", code=Code.FRAME_MALFORMED)
        call = self._decode_call(frame.body)
        assert self.meter is not None
        refusal: FelixError | None = self.meter.requested()
        if refusal is not None:
            pass
        elif len(self._sizes) >= CALLS_MAX:
            refusal = UnavailableError(
                f"{CALLS_MAX} calls of this exchange are under way, the most that are allowed.",
                code=Code.LIMIT_RATE,
                retry_after_ms=50,
            )
        elif not self.broker.budgets.exchange.take(size):
            refusal = no_memory(self.broker)
        if refusal is not None:
            self._send_error(correlation, refusal)
            return
        self._sizes[correlation] = size
        if self._held or not self._takes_answers():
            self._held.append((correlation, call))
        else:
            self._handle(correlation, call)

    def _takes_answers(self) -> bool:
        """True while the client reads what it asks for; else `pump` comes once it does."""
        if self._unlooked_bytes >= LOOK_BYTES:
            if not self.session.may_send():
                return False
            self._unlooked_bytes = 0
        return True

    def _handle(self, correlation: int, call: Any) -> None:
        try:
            self._handler.call(correlation, call)
        except (RequestError, UnavailableError) as error:
            self.refuse(correlation, error)

    def _hold_partial(self) -> None:
        """Received bytes of an incomplete frame are held, and count."""
        held = 0 if self._over else self._decoder.held_bytes
        budget = self.broker.budgets.exchange
        if held > self._partial:
            if not budget.take(held - self._partial):
                raise no_memory(self.broker)
        else:
            budget.give(self._partial - held)
        self._partial = held

    def pump(self) -> None:
        while self._held and not self._over and self._takes_answers():
            try:
                self._handle(*self._held.popleft())
            except ProtocolError as error:
                self.session.fail(error)
                return
        if not self._over:
            self._handler.pump()

    def rights_changed(self) -> None:
        if not self._over:
            self._handler.rights_changed()

    def closed(self) -> None:
        if self._over:
            return
        self._over = True
        self._tasks.cancel()
        budget = self.broker.budgets.exchange
        budget.give(sum(self._sizes.values()) + self._partial)
        self._sizes.clear()
        self._held.clear()
        self._partial = 0
        self._handler.closed()

    # -- what a handler does ---------------------------------------------------------------------------

    def charge(self) -> Meter:
        """What it is charged to. A handler that waits while it opens asks again once it has the stream: where the exchange began before the stream was here, its tenant would be
        charged nothing until the end. Raises UnavailableError(LIMIT_SESSIONS)."""
        self.meter = meter = self.session.meter_for(self._stream)
        return meter

    def opened(self, correlation: int, answer: Message) -> None:
        """Answer the first request: calls may come now."""
        self._is_open = True
        self._send(encode_message(FrameType.ANSWER, answer, correlation))

    def reply(self, correlation: int, answer: Message) -> None:
        """Answer a call. Of several brokers one without its lease may not: another one's answers may be others by now."""
        fence = self.broker.fence()
        if fence is not None:
            self.refuse(correlation, fence)
            return
        self._release(correlation)
        self._send(encode_message(FrameType.REPLY, answer, correlation))

    def refuse(self, correlation: int, error: FelixError) -> None:
        """Answer a call, or the first request, with an error."""
        self._release(correlation)
        self._send_error(correlation, error)

    def event(self, event: Message) -> None:
        """Tell the client something that it did not call for."""
        self._send(encode_message(FrameType.REPLY, event))

    def deliver(self, data: bytes) -> None:
        """Whole frames as they are: batches, gaps. The caller has asked `may_send`, and keeps to its credit."""
        self._send(data)

    def may_send(self) -> bool:
        """True while the connection and the broker's delivery budget take more; `pump` comes where they do again."""
        return not self._over and self.session.may_send()

    def spawn(self, correlation: int, work: Coroutine[None, None, None]) -> None:
        """Run what a call needs time for. An error that it raises answers the call."""
        task = self._tasks.begin(self._guard(correlation, work))
        # One that is cancelled before it begins has not awaited the work.
        task.add_done_callback(lambda _: work.close())

    def fail(self, error: FelixError, correlation: int = 0) -> None:
        """Say why, and end the exchange; the session goes on."""
        if not self._over:
            self._send_error(correlation, error)
            self.end()

    def end(self) -> None:
        """End the exchange in order."""
        if self._over:
            return
        self._send(b"", end=True)
        self.session.end_role(self)
        self.closed()

    async def _guard(self, correlation: int, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except FelixError as error:
            self.refuse(correlation, error)
        except Exception as error:
            log.exception("a call failed")
            self.refuse(
                correlation, FelixError(f"The broker failed: {type(error).__name__}.", code=Code.INTERNAL)
            )

    def _release(self, correlation: int) -> None:
        self.broker.budgets.exchange.give(self._sizes.pop(correlation, 0))

    def _send_error(self, correlation: int, error: FelixError) -> None:
        self.broker.metrics.refused(error)
        self._send(encode_error(error, correlation))

    def _send(self, data: bytes, *, end: bool = False) -> None:
        if not self._over:
            self._unlooked_bytes += len(data)
            self.session.send(self._stream_id, data, end=end)


def no_memory(broker: Broker) -> UnavailableError:
    """The `exchange` budget is used up."""
    return UnavailableError(
        f"Requests and calls that wait for their rest or their answers hold the {broker.budgets.exchange.limit_bytes} bytes that this broker gives them.",
        code=Code.LIMIT_MEMORY,
        hint="Try again, or have limits.exchange_budget raised.",
        retry_after_ms=50,
    )
