"""A relay: the datagrams of a connection to one broker of the region, carried by a session with another one.

For clients that reach one broker's address alone. The connection inside is QUIC as ever, from this client to that broker: its TLS, its
proof of identity, its credit. The broker in between carries datagrams and sees nothing in them (region/relay.py, docs/wire.md).

Invariants: nothing waits here: while the session's backlog is high the path is blocked, and the connection inside keeps what it has; the path
ends with its session, and with the connection inside. On the event loop; used by `felix.connection` alone.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from felix.errors import Code, FelixError, ProtocolError, UnavailableError
from felix.frames import FrameDecoder, FrameType, decode_datagrams, trains
from felix.messages import OpenRelay, RelayOpened, decode_answer, decode_error, encode_message
from felix.transport.udp import Address, PathReceiver, Writer

_INBOUND: Final = frozenset({FrameType.ANSWER, FrameType.ERROR, FrameType.DATAGRAMS})
_OPENING: Final = 1
"""The correlation id of the one request of a stream."""


class Sink(Protocol):
    """As `felix.link.ExchangeSink`."""

    def exchange_data(self, data: bytes, end: bool) -> None: ...

    def exchange_end(self, error: FelixError | None) -> None: ...


class Sender(Protocol):
    """As `felix.link.Sender`."""

    def pump(self) -> None: ...


class Session(Protocol):
    """What carries a relay (felix.link.Link)."""

    @property
    def is_high(self) -> bool:
        """Its backlog is high, or it is over: nothing more is to be given to it."""

    def open_exchange(self, sink: Sink) -> int: ...

    def close_exchange(self, stream_id: int) -> None: ...

    def send_exchange(self, stream_id: int, data: bytes) -> None: ...

    def wait_to_send(self, sender: Sender) -> None:
        """`sender.pump` is called once the backlog fell."""


class RelayPath:
    """A `felix.transport.udp.DatagramPath`. `open`, then give it to an engine, which closes it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._decoder = FrameDecoder(_INBOUND)
        self._opened: asyncio.Future[RelayOpened] = asyncio.get_running_loop().create_future()
        self._stream_id = -1
        self.is_over = False
        """Nothing passes any more."""
        self._receiver: PathReceiver | None = None
        self._address: Address = ("", 0)
        self._waiting: dict[Writer, None] = {}
        self.datagram_bytes = 0

    async def open(self, address: str) -> str:
        """Have the session's broker carry datagrams to the broker at an address; that one's id. Raises what it refuses with, and
        UnavailableError where the session ends. Bound it with a timeout."""
        self._stream_id = self._session.open_exchange(self)
        request = encode_message(FrameType.REQUEST, OpenRelay(address), _OPENING)
        self._session.send_exchange(self._stream_id, request)
        try:
            opened = await self._opened
        except BaseException:
            self.close()
            raise
        self.datagram_bytes = opened.datagram_bytes
        return opened.broker

    # -- felix.transport.udp.DatagramPath --------------------------------------------------------------

    @property
    def blocked(self) -> bool:
        return self._session.is_high

    def send(self, datagrams: list[bytes], address: Address | None) -> None:
        if not self.is_over:
            frames = b"".join(train.encode() for train in trains(datagrams))
            self._session.send_exchange(self._stream_id, frames)

    def wait_writable(self, writer: Writer) -> None:
        if not self.is_over:
            self._waiting[writer] = None
            self._session.wait_to_send(self)

    def forget(self, writer: Writer) -> None:
        self._waiting.pop(writer, None)

    def receive_for(self, receiver: PathReceiver, address: Address) -> None:
        self._receiver, self._address = receiver, address
        if self.is_over:
            asyncio.get_running_loop().call_soon(receiver.path_ended)

    def close(self) -> None:
        self._end(UnavailableError("The relay was closed by this client.", code=Code.DISCONNECTED))

    # -- felix.link.Sender -----------------------------------------------------------------------

    def pump(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for writer in waiting:
            writer.writable()

    # -- felix.link.ExchangeSink -----------------------------------------------------------------

    def exchange_data(self, data: bytes, end: bool) -> None:
        came = False
        for frame in self._decoder.feed(data):
            if self.is_over:
                return
            if frame.type is FrameType.ERROR:
                self._end(decode_error(frame.body))
                return
            if frame.type is FrameType.ANSWER:
                answer = decode_answer(frame.body)
                if not isinstance(answer, RelayOpened) or self._opened.done():
                    raise ProtocolError("A broker opens a relay once, and answers nothing else there.")
                self._opened.set_result(answer)
                continue
            train, receiver = decode_datagrams(frame.body), self._receiver
            if receiver is None:
                continue
            if not train.data:
                receiver.peer_refused()
                continue
            came = True
            receiver.datagrams_received(bytes(train.data), train.segment_bytes, self._address)
        if came and self._receiver is not None:
            self._receiver.pass_ended()
        if end:
            self.exchange_end(None)

    def exchange_end(self, error: FelixError | None) -> None:
        self._end(error or UnavailableError("The broker ended the relay.", code=Code.DISCONNECTED))

    def _end(self, error: FelixError) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._session.close_exchange(self._stream_id)
        self._waiting.clear()
        if not self._opened.done():
            self._opened.set_exception(error)
            # Whoever opened it may have given up.
            self._opened.exception()
        if self._receiver is not None:
            asyncio.get_running_loop().call_soon(self._receiver.path_ended)
