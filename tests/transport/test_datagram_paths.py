"""A connection over a path of its user's making, in place of a socket: blocked, refused and ended."""

from __future__ import annotations

import asyncio

import pytest
from transport.certificates import Authority
from transport.recorder import Echo, Recorder, eventually

from felix.errors import Code, UnavailableError
from felix.transport.port import ENGINE_NAMES, ClientTls, NobodyListensError, engine_named
from felix.transport.udp import Address, PathReceiver, UdpSocket, Writer, open_socket

NAME = "b1.us-east.acme"
SAID_AT: tuple[str, int] = ("far.example", 7443)


class Detour:
    """A `DatagramPath` that goes through a socket here, to somewhere else than the connection is told."""

    def __init__(self, to: Address, datagram_bytes: int = 1472) -> None:
        self.blocked = False
        self.closes = 0
        self.datagram_bytes = datagram_bytes
        self.longest = 0
        self.receiver: PathReceiver | None = None
        self.address: Address = SAID_AT
        self._waiting: dict[Writer, None] = {}
        self._udp = UdpSocket(
            open_socket(2, connect=to, buffer_bytes=1 << 20), asyncio.get_running_loop(), self
        )

    def datagrams_received(self, data: bytes, segment_bytes: int, address: Address) -> None:
        assert self.receiver is not None
        self.receiver.datagrams_received(data, segment_bytes, self.address)

    def pass_ended(self) -> None:
        assert self.receiver is not None
        self.receiver.pass_ended()

    def peer_refused(self) -> None:
        assert self.receiver is not None
        self.receiver.peer_refused()

    def receive_for(self, receiver: PathReceiver, address: Address) -> None:
        self.receiver, self.address = receiver, address

    def send(self, datagrams: list[bytes], address: Address | None) -> None:
        assert not self.blocked and address is None
        self.longest = max(self.longest, *map(len, datagrams))
        self._udp.send(datagrams, None)

    def wait_writable(self, writer: Writer) -> None:
        self._waiting[writer] = None

    def forget(self, writer: Writer) -> None:
        self._waiting.pop(writer, None)

    def close(self) -> None:
        self.closes += 1
        self._udp.close()

    def let_go(self) -> None:
        self.blocked = False
        waiting, self._waiting = self._waiting, {}
        for writer in waiting:
            writer.writable()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make()


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_a_connection_over_a_path_is_one_and_ends_with_it(engine: str, authority: Authority) -> None:
    served: list[Recorder] = []

    def serve() -> Recorder:
        served.append(Echo())
        return served[-1]

    listener = await engine_named(engine).listen("127.0.0.1", 0, authority.server(NAME), serve)
    path, recorder = Detour(listener.address), Recorder()
    connection = await engine_named(engine).connect(
        *SAID_AT, ClientTls(authority.pem, NAME), recorder, path=path
    )
    assert connection.peer_address == SAID_AT
    stream = connection.open_stream(bidirectional=True)
    path.blocked = True
    sent = bytes(range(256)) * 800
    connection.send(stream, sent, end=True)
    await asyncio.sleep(0)
    assert not served[0].received
    path.let_go()
    await recorder.until(lambda seen: stream in seen.ended)
    assert recorder.received[stream] == sent and path.longest <= 1472
    assert path.receiver is not None
    path.receiver.path_ended()
    await eventually(lambda: bool(recorder.closed_with))
    assert recorder.closed_with == [(Code.DISCONNECTED, "the way to the server ended")]
    assert path.closes == 1
    await listener.close()


async def test_a_path_is_closed_where_no_connection_comes_of_it(authority: Authority) -> None:
    listener = await engine_named().listen("127.0.0.1", 0, authority.server(NAME), Recorder)
    address = listener.address
    await listener.close()
    path = Detour(address)
    with pytest.raises(NobodyListensError):
        await engine_named().connect(*SAID_AT, ClientTls(authority.pem, NAME), Recorder(), path=path)
    assert path.closes == 1
    path = Detour(address)
    path.blocked = True
    attempt = asyncio.ensure_future(
        engine_named().connect(*SAID_AT, ClientTls(authority.pem, NAME), Recorder(), path=path)
    )
    await eventually(lambda: path.receiver is not None)
    assert path.receiver is not None
    path.receiver.path_ended()
    with pytest.raises(UnavailableError, match="The way to the server ended"):
        await attempt
    assert path.closes == 1
