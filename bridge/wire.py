"""The wire as the agent uses it: sealed batches from the source, envelopes to the destination; below the link actor.

Both live on one `felix.link.Link` and end with it: an agent that loses a session begins anew from positions, so
nothing here resumes by itself. Everything runs on the event loop.

Invariants: what came and was not consumed never passes `credit_bytes`; a receipt is handed on in the order in which it
came; after the end nothing is handed on any more.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from felix.errors import Code, FelixError, NotLeaderError, ProtocolError, UnavailableError
from felix.frames import (
    FRAME_HEADER_BYTES,
    Frame,
    FrameDecoder,
    FrameType,
    GapBody,
    decode_gap,
    encode_frame,
)
from felix.link import Link
from felix.messages import (
    IngestOpened,
    OpenIngest,
    Start,
    Subscribe,
    Subscribed,
    decode_answer,
    decode_error,
    encode_message,
)
from felix.session import CreditWindow

OPEN_TIMEOUT_S: Final = 30.0
"""A stream that is not opened by then: the region is not well, and the link tries anew."""

_RECEIPT: Final = struct.Struct(">Q")
_INGEST_TYPES: Final = frozenset({FrameType.ANSWER, FrameType.RECEIPT, FrameType.ERROR})


class SealedBatch(msgspec.Struct, frozen=True, gc=False):
    """One sealed batch as it stands in the source's log; `frame_bytes` go back as credit once it is dealt with."""

    frame_bytes: int
    body: memoryview


def _ended(what: str) -> UnavailableError:
    return UnavailableError(f"{what} was ended by the broker.", code=Code.DISCONNECTED, retry_after_ms=100)


def _silent(what: str) -> UnavailableError:
    return UnavailableError(f"The {what} was not opened within {OPEN_TIMEOUT_S:g} s.", code=Code.TIMEOUT)


class SealedFeed:
    """The event stream of one shard under one grant. Make it with `open`."""

    def __init__(self, link: Link, credit_bytes: int, arrived: asyncio.Event) -> None:
        self._link = link
        self._window = CreditWindow(credit_bytes)
        self._queue: deque[SealedBatch | GapBody] = deque()
        self._arrived = arrived
        self._subscription = 0
        self._end: FelixError | None = None
        self.subscribed: Subscribed

    @classmethod
    async def open(
        cls,
        link: Link,
        stream: str,
        grant: str,
        *,
        shard: int,
        offset: int,
        incarnation: bytes,
        credit_bytes: int,
        arrived: asyncio.Event,
    ) -> SealedFeed:
        """Subscribe to one shard from `offset` on; `arrived` is set whenever something came, or the stream ended.

        Raises what the broker refuses it with, UnavailableError.
        """
        feed = cls(link, credit_bytes, arrived)
        request = Subscribe(
            stream,
            Start("earliest", offsets={shard: offset}),
            shards=[shard],
            credit_bytes=credit_bytes,
            incarnation=incarnation,
            grant=grant,
        )
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                answer = await link.ask(request)
        except TimeoutError:
            raise _silent("subscription") from None
        feed.subscribed = answer
        feed._subscription = answer.subscription
        link.claim(answer.subscription, feed)
        link.over.add_done_callback(feed._link_over)
        return feed

    def _link_over(self, over: asyncio.Future[FelixError]) -> None:
        self.event_end(over.result())

    @property
    def held_bytes(self) -> int:
        """Frame bytes that came and are not dealt with."""
        return self._window.held_bytes

    def take_nowait(self) -> SealedBatch | GapBody | None:
        """The next in order, None where nothing waits. Raises what ended the stream once nothing is left before it."""
        if self._queue:
            return self._queue.popleft()
        if self._end is not None:
            raise self._end
        return None

    def consumed(self, frame_bytes: int) -> None:
        """So many bytes are dealt with, and may be sent anew."""
        self._window.finish(frame_bytes)
        if self._window.announcement_due and self._end is None:
            self._link.extend_credit(self._subscription, self._window.announce())

    def close(self) -> None:
        """Nothing more is wanted."""
        if self._end is None and not self._link.is_over:
            self._link.forget_subscription(self._subscription, unsubscribe=True)
        self._link.over.remove_done_callback(self._link_over)
        self.event_end(_ended("The subscription"))
        self._queue.clear()

    # -- felix.event_streams.EventSink --------------------------------------------------------------------

    def event(self, frame: Frame) -> None:
        if self._end is not None:
            return
        match frame.type:
            case FrameType.BATCH:
                size = FRAME_HEADER_BYTES + len(frame.body)
                self._window.receive(size)
                self._queue.append(SealedBatch(size, frame.body))
            case FrameType.GAP:
                self._queue.append(decode_gap(frame.body))
            case FrameType.ERROR:
                self.event_end(decode_error(frame.body))
            case _:
                raise ProtocolError("An event stream says twice whose it is.", code=Code.STATE)
        self._arrived.set()

    def event_end(self, error: FelixError | None) -> None:
        if self._end is None:
            self._end = error or _ended("The event stream")
        self._arrived.set()


class IngestChannel:
    """The ingest stream of one shard at the destination. Make it with `open`."""

    def __init__(
        self, link: Link, received: Callable[[int, bytes], None], ended: Callable[[FelixError], None]
    ) -> None:
        self._link = link
        self._received = received
        self._ended = ended
        self._decoder = FrameDecoder(_INGEST_TYPES)
        self._stream_id = -1
        self._open = asyncio.get_running_loop().create_future()
        self._closed = False
        self.opened: IngestOpened

    @classmethod
    async def open(
        cls,
        link: Link,
        request: OpenIngest,
        received: Callable[[int, bytes], None],
        ended: Callable[[FelixError], None],
    ) -> IngestChannel:
        """Open it. `received(next position, receipt)` is called per receipt, `ended(error)` once, on the loop.

        Raises what the destination refuses it with, UnavailableError.
        """
        channel = cls(link, received, ended)
        channel._stream_id = link.open_exchange(channel)
        link.connection.send(channel._stream_id, encode_message(FrameType.REQUEST, request, 1))
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                channel.opened = await channel._open
        except TimeoutError:
            channel.close()
            raise _silent("ingest stream") from None
        except BaseException:
            channel.close()
            raise
        return channel

    def send(self, envelope: bytes) -> None:
        """One envelope. What may be on the way is the caller's to keep (IngestOpened)."""
        if not self._closed:
            self._link.connection.send(self._stream_id, encode_frame(FrameType.TRANSFER, envelope))

    def close(self) -> None:
        """Nothing more is sent, and no receipt taken. `ended` is not called after this."""
        if not self._closed:
            self._closed = True
            self._link.close_exchange(self._stream_id)

    # -- felix.link.ExchangeSink -----------------------------------------------------------------

    def exchange_data(self, data: bytes, end: bool) -> None:
        for frame in self._decoder.feed(data):
            if self._closed:
                return
            if frame.type is FrameType.ERROR:
                self._finish(decode_error(frame.body))
            elif frame.type is FrameType.ANSWER:
                answer = decode_answer(frame.body)
                if self._open.done() or not isinstance(answer, IngestOpened):
                    raise ProtocolError("An ingest stream was answered with something else.", code=Code.STATE)
                self._open.set_result(answer)
            elif not self._open.done() or len(frame.body) < _RECEIPT.size:
                raise ProtocolError("A receipt came where none is due.", code=Code.STATE)
            else:
                (position,) = _RECEIPT.unpack_from(frame.body)
                self._received(position, bytes(frame.body[_RECEIPT.size :]))
        if end:
            self._finish(_ended("The ingest stream"))

    def exchange_end(self, error: FelixError | None) -> None:
        self._finish(error or _ended("The ingest stream"))

    def _finish(self, error: FelixError) -> None:
        if self._closed:
            return
        self._closed = True
        self._link.close_exchange(self._stream_id)
        if isinstance(error, NotLeaderError):
            self._link.moved(error)
        if self._open.done():
            self._ended(error)
        else:
            self._open.set_exception(error)
