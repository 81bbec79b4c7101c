"""The socket on its own: batches, order, and what happens while the kernel takes nothing.

A pair of local datagram sockets stands in for the network where a full queue is needed: unlike UDP, whose
loopback drops, they say so.
"""

from __future__ import annotations

import asyncio
import socket

import pytest
from transport.recorder import eventually

from felix.transport.udp import Address, UdpSocket, open_socket

BUFFER_BYTES = 1 << 20


class Reader:
    def __init__(self) -> None:
        self.datagrams: list[bytes] = []
        self.passes = 0
        self.refusals = 0

    def datagrams_received(self, data: bytes, segment_bytes: int, address: Address) -> None:
        self.datagrams += [data[at : at + segment_bytes] for at in range(0, len(data), segment_bytes)]

    def pass_ended(self) -> None:
        self.passes += 1

    def peer_refused(self) -> None:
        self.refusals += 1


class Waiter:
    def __init__(self) -> None:
        self.calls = 0

    def writable(self) -> None:
        self.calls += 1


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_runs_of_many_sizes_arrive_whole_and_in_order(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    loop = asyncio.get_running_loop()
    try:
        sock = open_socket(family, bind=(host, 0), buffer_bytes=BUFFER_BYTES)
    except OSError:
        pytest.skip(f"no {host} here")
    reader = Reader()
    receiver = UdpSocket(sock, loop, reader)
    sender = UdpSocket(
        open_socket(family, connect=receiver.local_address, buffer_bytes=BUFFER_BYTES), loop, Reader()
    )
    sizes = [1200] * 70 + [300] + [1452] * 3 + [1453, 1453, 1200] + [30_000] * 3 + [1, 2, 3, 65_000, 7]
    sent = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    sender.send(sent, None)
    await eventually(lambda: len(reader.datagrams) == len(sent))
    assert reader.datagrams == sent
    assert reader.passes < len(sent)
    sender.close()
    receiver.close()
    receiver.close()


async def test_a_socket_that_takes_nothing_keeps_order_and_tells_who_waits() -> None:
    loop = asyncio.get_running_loop()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.setblocking(False)
    right.setblocking(False)
    udp = UdpSocket(left, loop, Reader())
    waiter, gone = Waiter(), Waiter()
    # Each longer than the one before: never a run, which only UDP can segment.
    sent = [b"%d" % number + bytes(number) for number in range(2000)]
    udp.send(sent[:1500], None)
    assert udp.blocked
    udp.send(sent[1500:], None)
    udp.wait_writable(waiter)
    udp.wait_writable(gone)
    udp.forget(gone)
    got: list[bytes] = []
    while len(got) < len(sent):
        got.append(await asyncio.wait_for(loop.sock_recv(right, 4096), 10))
    assert got == sent
    await eventually(lambda: waiter.calls == 1)
    assert not udp.blocked
    assert gone.calls == 0
    udp.close()
    right.close()


async def test_a_datagram_too_large_is_dropped_and_the_next_ones_leave() -> None:
    loop = asyncio.get_running_loop()
    reader = Reader()
    receiver = UdpSocket(
        open_socket(socket.AF_INET, bind=("127.0.0.1", 0), buffer_bytes=BUFFER_BYTES), loop, reader
    )
    sender = UdpSocket(
        open_socket(socket.AF_INET, connect=receiver.local_address, buffer_bytes=BUFFER_BYTES), loop, Reader()
    )
    sender.send([b"before", bytes(65_508), b"after"], None)
    await eventually(lambda: len(reader.datagrams) == 2)
    assert reader.datagrams == [b"before", b"after"]
    sender.close()
    receiver.close()


async def test_a_connected_socket_is_told_that_nobody_listens() -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    reader = Reader()
    udp = UdpSocket(open_socket(socket.AF_INET, connect=address, buffer_bytes=BUFFER_BYTES), loop, reader)
    udp.send([b"anybody?"], None)
    await eventually(lambda: reader.refusals > 0)
    udp.close()
