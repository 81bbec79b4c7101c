"""Exchange: the client's end of a bidirectional stream to one view (queue, cache, consumer, transaction) of a region.

Calls are pipelined: many may be under way, and their replies come in any order. When the link is lost, the exchange reopens on
the next link by itself. Pending calls then fail with UnavailableError(DISCONNECTED), because their outcome is unknown, unless
the caller declared the call idempotent: then it is sent again. When the exchange ends for good, pending and later calls fail
with the error that ended it.

In a region of several brokers the exchange lives at its stream's leader. A broker that does not lead says who does (NOT_LEADER):
the exchange moves there, which is a lost link to whoever calls.

Invariants: at most `calls_max` calls are under way; an event is given to the listener in the order it came, between `opened` and
`lost`; after `close` nothing is called any more. On the event loop. Only felix/ itself may use this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeGuard

from felix.backoff import Backoff
from felix.connection import RegionConnection
from felix.errors import Code, FelixError, NotLeaderError, RequestError, UnavailableError, protocol_breach
from felix.frames import Credit, Frame, FrameDecoder, FrameType
from felix.link import Link
from felix.messages import Answer, Message, Request, decode_answer, decode_error, encode_call, encode_request
from felix.names import StreamName

CALLS_MAX: Final = 256
"""Calls of one exchange under way at once, well below what a broker refuses."""
CORRELATION_MAX: Final = (1 << 32) - 1
_OPENING: Final = 1
"""The correlation of the request that opens an exchange."""
MOVES_AT_ONCE: Final = 2
"""Brokers that send an exchange on before it pauses: two that name each other have not heard of the same election."""

_INBOUND: Final = frozenset(
    {FrameType.ANSWER, FrameType.REPLY, FrameType.ERROR, FrameType.BATCH, FrameType.GAP}
)


class Listener(Protocol):
    """Receives the events that are not replies to calls."""

    def opened(self, answer: Answer) -> None:
        """The exchange stands, or stands again."""

    def lost(self, error: FelixError) -> None:
        """It does not any more; it will be opened again, unless `ended` follows."""

    def ended(self, error: FelixError) -> None:
        """It will not be opened again: the broker refuses it, or the connection is closed for good."""

    def event(self, event: Any) -> None:
        """A decoded REPLY that no call asked for."""

    def frame(self, frame: Frame) -> None:
        """A BATCH or GAP frame; copy what is kept of its body."""


class Exchange:
    """One exchange, kept open over reconnects. `open`, then `call`, then `close`."""

    def __init__(
        self,
        connection: RegionConnection,
        request: Callable[[], Request[Any]],
        decode_reply: Callable[[memoryview], Any],
        listener: Listener | None = None,
        *,
        stream: StreamName | None = None,
        calls_max: int = CALLS_MAX,
    ) -> None:
        """`request` makes the request that opens the exchange, for every link again. `stream`: whose leader it is with."""
        self._connection = connection
        self._stream = stream
        self._request = request
        self._decode_reply = decode_reply
        self._listener = listener
        self._room = asyncio.Semaphore(calls_max)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._undo: dict[int, Callable[[Any], object]] = {}
        """Of calls that are not answered: what is done with the reply where nobody waits for it any more."""
        self._last_correlation = 0
        self._standing_link: Link | None = None
        """The link that stands, whether the exchange is open on it or not."""
        self._link: Link | None = None
        self._stream_id = -1
        self._moves = 0
        self._decoder = FrameDecoder(_INBOUND)
        self._opening = 0
        self._standing = asyncio.Event()
        self._is_open = False
        self._answer: Answer | None = None
        self._dead: FelixError | None = None
        self._refusal: UnavailableError | None = None
        """why it was not opened when it was tried last"""
        self._reopen: asyncio.TimerHandle | None = None
        self._backoff = Backoff(connection.policy, connection.runtime.random)

    # -- life -----------------------------------------------------------------------------------------

    async def open(self, *, timeout_s: float | None = None) -> Answer:
        """Open it, and return what the broker answered. Raises what the broker refuses it with, UnavailableError(TIMEOUT)."""
        self._connection.attach(self, self._stream)
        await self._until_open(self._limit_s(timeout_s))
        assert self._answer is not None
        return self._answer

    def close(self) -> None:
        """End it; calls under way fail. Idempotent."""
        self._listener = None
        self._end(UnavailableError("The exchange was closed by this client.", code=Code.DISCONNECTED))

    @property
    def is_over(self) -> bool:
        """True once it will not be opened again."""
        return self._dead is not None

    @property
    def is_open(self) -> bool:
        """True while calls go out at once."""
        return self._is_open

    @property
    def why_not_open(self) -> str:
        """As a sentence; empty where it is not known."""
        # Where it was tried all the time, what the broker said last says more than that it took long.
        return self._connection.why_unreached if self._refusal is None else self._refusal.sentence

    @property
    def _what_to_do(self) -> str:
        told = "" if self._is_open or self._refusal is None else self._refusal.hint
        return told or "Is the region up? `felix region status` tells."

    # -- calls ----------------------------------------------------------------------------------------

    async def call(
        self,
        message: Message,
        *,
        again: bool,
        timeout_s: float | None = None,
        undo: Callable[[Any], object] | None = None,
    ) -> Any:
        """One call and its reply, decoded. `again`: asking twice does no harm, so a lost or refused-for-now one is. One that a broker
        refuses because it does not lead the stream has done nothing, and is asked again whatever it is. `undo` is called with a reply
        that comes after the caller was cancelled, or had waited long enough.

        Raises what the broker refuses it with, or ended the exchange with meanwhile; UnavailableError: TIMEOUT, or DISCONNECTED
        where it is not known whether it was carried out.
        """
        limit_s = self._limit_s(timeout_s)
        backoff: Backoff | None = None
        if not again and self._is_open and not self._room.locked():
            try:
                return await self._call_at_once(message, limit_s, undo)
            except NotLeaderError as error:
                if self._dead is not None:
                    raise
                backoff = Backoff(self._connection.policy, self._connection.runtime.random)
                await asyncio.sleep(backoff.after_ms(error) / 1000)
        try:
            async with asyncio.timeout(limit_s), self._room:
                while True:
                    if not self._is_open:
                        await self._wait_open()
                    try:
                        return await self._ask(message, undo)
                    except UnavailableError as error:
                        if not (again or isinstance(error, NotLeaderError)) or self._dead is not None:
                            raise
                        backoff = backoff or Backoff(self._connection.policy, self._connection.runtime.random)
                        await asyncio.sleep(backoff.after_ms(error) / 1000)
        except TimeoutError:
            raise self._unanswered(message, limit_s) from None

    async def _call_at_once(
        self, message: Message, limit_s: float, undo: Callable[[Any], object] | None
    ) -> Any:
        """As `call` where nothing has to be waited for first: a timer instead of a timeout, which costs more than the rest."""
        await self._room.acquire()
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        try:
            number, future = self._post(message, loop)
            timer = loop.call_later(limit_s, self._time_out, future, message, limit_s)
            return await self._reply(number, future, undo)
        finally:
            if timer is not None:
                timer.cancel()
            self._room.release()

    def _time_out(self, future: asyncio.Future[Any], message: Message, limit_s: float) -> None:
        if not future.done():
            future.set_exception(self._unanswered(message, limit_s))

    def _unanswered(self, message: Message, limit_s: float) -> UnavailableError:
        why = "" if self._is_open else self.why_not_open
        return UnavailableError(
            f"{type(message).__name__} was not answered by region {self._connection.profile.region} within {limit_s:g} s. {why}".rstrip(),
            code=Code.TIMEOUT,
            hint=self._what_to_do,
        )

    async def _ask(self, message: Message, undo: Callable[[Any], object] | None) -> Any:
        number, future = self._post(message, asyncio.get_running_loop())
        return await self._reply(number, future, undo)

    async def _reply(
        self, number: int, future: asyncio.Future[Any], undo: Callable[[Any], object] | None
    ) -> Any:
        if undo is not None:
            self._undo[number] = undo
        try:
            return await future
        except asyncio.CancelledError:
            if undo is not None and future.done() and not future.cancelled() and future.exception() is None:
                # It came in the event loop iteration in which the caller was cancelled.
                undo(future.result())
            raise
        finally:
            # One that is given up and can be undone stays until its reply comes.
            if number not in self._undo:
                self._calls.pop(number, None)

    def _post(self, message: Message, loop: asyncio.AbstractEventLoop) -> tuple[int, asyncio.Future[Any]]:
        """Send a call; its correlation id, and what will have its reply."""
        link = self._link
        assert link is not None
        number = self._last_correlation
        while True:
            number = number + 1 if number < CORRELATION_MAX else 1
            if number not in self._calls:
                break
        frame = encode_call(message, number)
        self._last_correlation = number
        future: asyncio.Future[Any] = loop.create_future()
        self._calls[number] = future
        link.send_exchange(self._stream_id, frame)
        return number, future

    def tell(self, message: Message) -> None:
        """A call without waiting for its reply. Dropped if the exchange is not open."""
        if self._is_open and self._link is not None:
            self._last_correlation = self._last_correlation % CORRELATION_MAX + 1
            if self._last_correlation not in self._calls:
                frame = encode_call(message, self._last_correlation)
                self._link.send_exchange(self._stream_id, frame)

    def extend_credit(self, limit_bytes: int) -> None:
        """Let the broker deliver this much in all since the exchange was opened on this link."""
        if self._is_open and self._link is not None:
            self._link.send_exchange(self._stream_id, Credit(0, limit_bytes).encode())

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._connection.request_timeout_s if timeout_s is None else timeout_s

    async def _until_open(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._wait_open()
        except TimeoutError:
            raise UnavailableError(
                f"{type(self._request()).__name__} was not answered by region {self._connection.profile.region} within "
                f"{limit_s:g} s. {self.why_not_open}".rstrip(),
                code=Code.TIMEOUT,
                hint=self._what_to_do,
            ) from None

    async def _wait_open(self) -> None:
        while not self._is_open:
            if self._dead is not None:
                raise self._dead
            self._standing.clear()
            await self._standing.wait()

    # -- felix.link.Attachment ------------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        if self._dead is not None:
            return
        self._standing_link = link
        if self._reopen is None or self._moves <= MOVES_AT_ONCE:
            self._begin(link)

    def _begin(self, link: Link) -> None:
        self._decoder = FrameDecoder(_INBOUND)
        try:
            request = encode_request(self._request(), _OPENING)
        except RequestError as error:
            # Not the link's concern, nor that of others who live on it.
            self._end(error)
            return
        try:
            self._stream_id = link.open_exchange(self)
        except UnavailableError as error:
            self._again(error)
            return
        self._link = link
        self._opening = _OPENING
        link.send_exchange(self._stream_id, request)

    def link_down(self, error: FelixError) -> None:
        self._standing_link = None
        stream_id, link = self._stream_id, self._link
        self._lose(error)
        if link is not None:
            # It may stand: the exchange moves to another one.
            link.close_exchange(stream_id)

    def link_dead(self, error: FelixError) -> None:
        self._end(error)

    # -- felix.link.ExchangeSink ----------------------------------------------------------------

    def exchange_data(self, data: bytes, end: bool) -> None:
        link, stream_id = self._link, self._stream_id
        if link is None:
            return
        for frame in self._decoder.feed(data):
            self._receive(frame)
            if self._link is not link or self._stream_id != stream_id:
                return  # it was refused, and may be open elsewhere by now
        if end:
            self._lose(UnavailableError("The broker ended the exchange.", code=Code.DISCONNECTED))
            self._again(None)

    def exchange_end(self, error: FelixError | None) -> None:
        if error is None:
            # Only the stream was reset; a lost link is reported with `link_down`.
            self._lose(UnavailableError("The broker reset the exchange.", code=Code.DISCONNECTED))
            self._again(None)

    def _receive(self, frame: Frame) -> None:
        listener = self._listener
        match frame.type:
            case FrameType.REPLY if frame.correlation:
                future = self._calls.get(frame.correlation)
                undo = self._undo.pop(frame.correlation, None)
                if future is not None and not future.done():
                    future.set_result(self._decode_reply(frame.body))
                elif undo is not None:
                    del self._calls[frame.correlation]
                    undo(self._decode_reply(frame.body))
            case FrameType.REPLY:
                if listener is not None:
                    listener.event(self._decode_reply(frame.body))
            case FrameType.ERROR:
                self._refused(frame.correlation, decode_error(frame.body))
            case FrameType.ANSWER:
                if not self._opening or frame.correlation != self._opening:
                    raise protocol_breach("An exchange was answered twice.")
                self._opening = 0
                self._answer = decode_answer(frame.body)
                self._is_open = True
                self._moves = 0
                self._refusal = None
                self._backoff.reset()
                if listener is not None:
                    listener.opened(self._answer)
                self._standing.set()
            case _:
                if listener is not None:
                    listener.frame(frame)

    def _refused(self, correlation: int, error: FelixError) -> None:
        future = self._calls.get(correlation)
        if future is not None:
            undo = self._undo.pop(correlation, None)
            if not future.done():
                future.set_exception(_unknown(error, error.retry_after_ms) if _is_of_lease(error) else error)
            elif undo is not None:
                del self._calls[correlation]
        elif not correlation or correlation == self._opening:
            # The exchange as a whole: worth another try only where the broker says that it will pass.
            if not isinstance(error, UnavailableError):
                self._end(error)
                return
            stream_id, link = self._stream_id, self._link
            self._lose(error)
            if link is None:
                return
            link.close_exchange(stream_id)
            if isinstance(error, NotLeaderError):
                self._moves = self._moves + 1 if error.address else 0
                if self._moves > MOVES_AT_ONCE:
                    self._again(error)
                link.moved(error)  # may bring the leader's link at once
            if self._link is None:
                self._again(error)

    # -- endings --------------------------------------------------------------------------------------

    def _lose(self, error: FelixError) -> None:
        if self._link is None:
            return
        was_open, self._is_open = self._is_open, False
        self._link = None
        self._opening = 0
        calls, self._calls = self._calls, {}
        self._undo.clear()
        is_final = self._dead is not None and not isinstance(error, UnavailableError)
        unanswered = error if is_final else _unknown(error)
        for future in calls.values():
            if not future.done():
                future.set_exception(unanswered)
        if was_open and self._listener is not None:
            self._listener.lost(error)

    def _again(self, error: UnavailableError | None) -> None:
        """Open it again on the link that stands, after a while."""
        self._refusal = error or self._refusal
        if self._dead is not None or self._reopen is not None:
            return
        delay_s = self._backoff.after_ms(error) / 1000
        self._reopen = asyncio.get_running_loop().call_later(delay_s, self._open_again)

    def _open_again(self) -> None:
        self._reopen = None
        link = self._standing_link
        if self._link is None and link is not None and link.is_usable:
            self._begin(link)

    def _end(self, error: FelixError) -> None:
        if self._dead is not None:
            return
        self._dead = error
        stream_id, link = self._stream_id, self._link
        self._lose(error)
        if link is not None:
            link.close_exchange(stream_id)
        self._connection.detach(self)
        if self._reopen is not None:
            self._reopen.cancel()
            self._reopen = None
        self._standing.set()
        if self._listener is not None:
            self._listener.ended(error)


def _is_of_lease(error: FelixError) -> TypeGuard[NotLeaderError]:
    """Whether a broker that carried a call out may not answer for it: another one may lead the stream by now."""
    return isinstance(error, NotLeaderError) and not (error.stream or error.leader)


def _unknown(error: FelixError, retry_after_ms: int | None = None) -> UnavailableError:
    """`retry_after_ms`: where the exchange stands, and asking again may do."""
    return UnavailableError(
        f"The call was not answered: {error.sentence}",
        code=Code.DISCONNECTED,
        hint="Whether it was carried out is not known; look before asking again.",
        retry_after_ms=retry_after_ms,
    )
