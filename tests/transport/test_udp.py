"""The socket on its own: batches, order, and what happens while the kernel takes nothing.

A pair of local datagram sockets stands in for the network where a full queue is needed: unlike UDP, whose
loopback drops, they say so.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest
from transport.recorder import eventually

from felix.transport.udp import SMALL_BYTES, UNPROBED_READS, Address, UdpSocket, open_socket

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


class Counted:
    """A socket, and how often it was asked for a datagram."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.reads = 0

    def recvmsg_into(self, buffers: list[bytearray], ancillary: int) -> object:
        self.reads += 1
        return self._sock.recvmsg_into(buffers, ancillary)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


async def test_a_socket_that_held_one_small_datagram_is_asked_once_for_each_of_the_next_seven() -> None:
    loop = asyncio.get_running_loop()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.setblocking(False)
    counted, reader = Counted(left), Reader()
    udp = UdpSocket(cast("socket.socket", counted), loop, reader)
    reads = []
    for number in range(1 + UNPROBED_READS + 1):
        before = counted.reads
        right.send(b"%d" % number)
        await eventually(lambda number=number: len(reader.datagrams) == number + 1)  # type: ignore[misc]
        reads.append(counted.reads - before)
    assert reads == [2] + [1] * UNPROBED_READS + [2]
    udp.close()
    right.close()


async def test_what_else_a_socket_held_is_read_in_the_next_iterations_and_then_as_one_burst() -> None:
    loop = asyncio.get_running_loop()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.setblocking(False)
    counted, reader = Counted(left), Reader()
    udp = UdpSocket(cast("socket.socket", counted), loop, reader)
    right.send(b"alone")
    await eventually(lambda: len(reader.datagrams) == 1)
    passes = reader.passes
    sent = [b"%d" % number for number in range(UNPROBED_READS)]
    for datagram in sent:
        right.send(datagram)
    await eventually(lambda: len(reader.datagrams) == 1 + len(sent))
    assert reader.datagrams[1:] == sent
    assert reader.passes == passes + len(sent)
    # Nobody has looked since: the next pass does, and so finds a burst, and so does the one after it.
    for _ in range(2):
        passes, known = reader.passes, len(reader.datagrams)
        for datagram in sent:
            right.send(datagram)
        await eventually(lambda known=known: len(reader.datagrams) == known + len(sent))  # type: ignore[misc]
        assert reader.passes == passes + 1
    udp.close()
    right.close()


async def test_a_large_datagram_is_followed_by_all_that_the_socket_holds() -> None:
    loop = asyncio.get_running_loop()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.setblocking(False)
    reader = Reader()
    udp = UdpSocket(left, loop, reader)
    right.send(b"alone")
    await eventually(lambda: len(reader.datagrams) == 1)
    passes = reader.passes
    for datagram in (bytes(SMALL_BYTES), b"1", b"2"):
        right.send(datagram)
    await eventually(lambda: len(reader.datagrams) == 4)
    assert reader.passes == passes + 1
    udp.close()
    right.close()
