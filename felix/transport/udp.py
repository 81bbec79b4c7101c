"""One UDP socket on the event loop, read and written in batches.

Reading takes what the kernel has, up to a bound per event loop iteration, with receive offload (GRO) where there is one:
many datagrams of one sender come as one buffer. Writing hands runs of equal datagrams to the kernel in one
call (segmentation offload, GSO) where there is one. Both fall back to one datagram per call.

Invariants: a datagram that the kernel does not take yet is kept, in order, and the socket is `blocked` until
all kept ones left; whoever writes asks `blocked` first, so that no more than one pass of each writer is kept.
A datagram that the kernel refuses for good (too big for the path, no route) is dropped: QUIC resends what matters.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

Address = tuple[str, int] | tuple[str, int, int, int]

RECEIVE_CALLS_MAX: Final = 16
"""Reads per event loop iteration: at most 1 MiB with offload, so that one busy socket does not hold up the others."""

SMALL_BYTES: Final = 16_384
"""A first read of less may have been all that the socket held; a busy peer's is larger, with offload or on loopback."""

UNPROBED_READS: Final = 7
"""Small reads after which a socket is not read again at once, where the last such reading found nothing: a call for nothing costs as much as
one that reads. If there was more after all, the next event loop iteration reads it, and every eighth looks."""

RECEIVE_BYTES: Final = 65_536
"""One read: the largest datagram, and the largest buffer that receive offload makes."""

SEGMENTS_MAX: Final = 64
"""Datagrams per segmented write (UDP_MAX_SEGMENTS of older kernels)."""

SEGMENTED_BYTES_MAX: Final = 65_000
"""Bytes per segmented write: the kernel builds one IP packet of it first, which ends at 65,535."""

_SOL_UDP: Final = 17
_UDP_SEGMENT: Final = 103
_UDP_GRO: Final = 104
_IP_MTU_DISCOVER: Final = 10
_IP_PMTUDISC_PROBE: Final = 3
_IPV6_MTU_DISCOVER: Final = 23
_SO_RCVBUFFORCE: Final = 33
_SO_SNDBUFFORCE: Final = 32
_SEGMENT_SIZE: Final = struct.Struct("=H")
_GRO_SIZE: Final = struct.Struct("=i")
_CONTROL_BYTES: Final = socket.CMSG_SPACE(_GRO_SIZE.size)
_NO_OFFLOAD: Final = frozenset((errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOPROTOOPT))
_REFUSED: Final = frozenset((errno.ECONNREFUSED, errno.ECONNRESET))


class Receiver(Protocol):
    """Who reads the socket."""

    def datagrams_received(self, data: bytes, segment_bytes: int, address: Address) -> None:
        """`data`: datagrams of one sender, back to back, each of `segment_bytes`, the last one maybe shorter."""

    def pass_ended(self) -> None:
        """All that this event loop iteration reads was handed over."""

    def peer_refused(self) -> None:
        """On a connected socket: the peer's machine says that nobody listens there."""


class Writer(Protocol):
    """Who waits for a blocked socket."""

    def writable(self) -> None: ...


class Datagrams(Protocol):
    """What a connection sends its datagrams through: a socket, or a path."""

    @property
    def blocked(self) -> bool:
        """Nothing is taken now: `wait_writable` instead of `send`."""

    def send(self, datagrams: list[bytes], address: Address | None) -> None:
        """Send in order. `address` None: to the one peer that there is."""

    def wait_writable(self, writer: Writer) -> None:
        """Call `writer.writable()` once it is no longer blocked."""

    def forget(self, writer: Writer) -> None:
        """`writer` no longer waits."""

    def close(self) -> None:
        """Nothing more is sent or received. Idempotent."""


class PathReceiver(Receiver, Protocol):
    """Who reads a path."""

    def path_ended(self) -> None:
        """Nothing more will come, and nothing sent arrives."""


class DatagramPath(Datagrams, Protocol):
    """A way for datagrams to one address and back that is not a socket of this machine's own (felix.relay)."""

    @property
    def datagram_bytes(self) -> int:
        """The largest datagram that may be sent."""

    def receive_for(self, receiver: PathReceiver, address: Address) -> None:
        """Give `receiver` what comes, as of `address`."""


def is_loopback(address: Address) -> bool:
    """Whether it is this machine itself, whose path carries large datagrams."""
    with suppress(ValueError):
        return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
    return False


def open_socket(
    family: int,
    *,
    bind: Address | None = None,
    connect: Address | None = None,
    buffer_bytes: int,
) -> socket.socket:
    """A non-blocking UDP socket that never fragments, with buffers as large as the kernel grants. OSError."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        for forced, plain in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            try:
                if sys.platform != "linux":
                    raise PermissionError
                sock.setsockopt(socket.SOL_SOCKET, forced, buffer_bytes)
            except OSError:
                sock.setsockopt(socket.SOL_SOCKET, plain, buffer_bytes)
        if sys.platform == "linux":
            # Never fragmented, and the kernel's idea of the path is not trusted: QUIC probes by itself.
            with suppress(OSError):
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
                else:
                    sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
            with suppress(OSError):
                sock.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        if bind is not None:
            sock.bind(bind)
        if connect is not None:
            sock.connect(connect)
    except BaseException:
        sock.close()
        raise
    return sock


class UdpSocket:
    """See the module. Made and used on the event loop; `close` releases the socket."""

    __slots__ = (
        "_buffer",
        "_closed",
        "_kept",
        "_loop",
        "_receiver",
        "_segmentation",
        "_sock",
        "_unprobed",
        "_view",
        "_waiting",
        "blocked",
    )

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        receiver: Receiver,
        buffer: bytearray | None = None,
    ) -> None:
        """`buffer`: of RECEIVE_BYTES, which sockets of one event loop may share."""
        self._sock = sock
        self._loop = loop
        self._receiver = receiver
        self._segmentation = sys.platform == "linux"
        self._buffer = bytearray(RECEIVE_BYTES) if buffer is None else buffer
        self._view = memoryview(self._buffer)
        self._kept: deque[tuple[list[bytes], Address | None]] = deque()
        self._waiting: dict[Writer, None] = {}
        self._closed = False
        self._unprobed = 0
        """Small reads that may still pass for all that there is."""
        self.blocked = False
        """The kernel takes nothing now; `wait_writable` instead of `send`."""
        loop.add_reader(sock.fileno(), self._read)

    @property
    def local_address(self) -> Address:
        address: Address = self._sock.getsockname()
        return address

    def close(self) -> None:
        """Stop reading and writing, release the socket. What was kept is dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.blocked = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._kept.clear()
        self._waiting.clear()
        self._sock.close()

    # reading

    def _read(self) -> None:
        receive = self._sock.recvmsg_into
        buffers = [self._buffer]
        view = self._view
        receiver = self._receiver
        refused = False
        for at in range(RECEIVE_CALLS_MAX):
            if self._closed:
                return
            try:
                size, control, _, address = receive(buffers, _CONTROL_BYTES)
            except (BlockingIOError, InterruptedError):
                if at == 1:
                    self._unprobed = UNPROBED_READS
                break
            except OSError as error:
                if error.errno in _REFUSED:
                    refused = True
                    continue
                break
            if size == 0:
                continue
            segment = size
            for _, kind, value in control:
                if kind == _UDP_GRO and len(value) >= _GRO_SIZE.size:
                    segment = _GRO_SIZE.unpack_from(value)[0] or size
            receiver.datagrams_received(bytes(view[:size]), segment, address)
            if size >= SMALL_BYTES:
                self._unprobed = 0
            elif self._unprobed:
                self._unprobed -= 1
                break
        if not self._closed:
            receiver.pass_ended()
        # Last: what arrived before may be the peer's goodbye.
        if refused and not self._closed:
            receiver.peer_refused()

    # writing

    def send(self, datagrams: list[bytes], address: Address | None) -> None:
        """Send in order; keeps what the kernel does not take. `address` None: the connected peer."""
        if self._closed:
            return
        if self.blocked:
            self._kept.append((datagrams, address))
            return
        rest = self._send(datagrams, address)
        if rest:
            self._kept.append((rest, address))
            self.blocked = True
            self._loop.add_writer(self._sock.fileno(), self._write)

    def wait_writable(self, writer: Writer) -> None:
        """Call `writer.writable()` once the socket is no longer blocked."""
        if not self._closed:
            self._waiting[writer] = None

    def forget(self, writer: Writer) -> None:
        """`writer` no longer waits."""
        self._waiting.pop(writer, None)

    def _write(self) -> None:
        while self._kept:
            datagrams, address = self._kept.popleft()
            rest = self._send(datagrams, address)
            if rest:
                self._kept.appendleft((rest, address))
                return
        self.blocked = False
        self._loop.remove_writer(self._sock.fileno())
        waiting, self._waiting = self._waiting, {}
        for writer in waiting:
            if self.blocked:
                self._waiting[writer] = None
            else:
                writer.writable()

    def _send(self, datagrams: list[bytes], address: Address | None) -> list[bytes]:
        """What the kernel did not take."""
        at = 0
        count = len(datagrams)
        refused = False
        while at < count:
            size = len(datagrams[at])
            end = at + 1
            if self._segmentation and end < count:
                stop = min(count, at + max(1, min(SEGMENTS_MAX, SEGMENTED_BYTES_MAX // max(1, size))))
                while end < stop and len(datagrams[end]) == size:
                    end += 1
                if end < stop and len(datagrams[end]) < size:
                    end += 1
            try:
                if end - at == 1:
                    self._send_one(datagrams[at], address)
                else:
                    self._send_run(datagrams[at:end], size, address)
            except (BlockingIOError, InterruptedError):
                return datagrams[at:]
            except OSError as error:
                if end - at > 1 and error.errno in _NO_OFFLOAD:
                    self._segmentation = False
                    continue
                if error.errno in _REFUSED and not refused:
                    # It answers an earlier datagram; this one was not sent. Once more, and tell the reader.
                    refused = True
                    self._loop.call_soon(self._tell_refused)
                    continue
                if error.errno == errno.EMSGSIZE:
                    # The kernel says so twice: now, and to the next write, which would be lost for nothing.
                    self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if end - at > 1:
                        for datagram in datagrams[at:end]:
                            with suppress(OSError):
                                self._send_one(datagram, address)
            at = end
        return []

    def _send_one(self, datagram: bytes, address: Address | None) -> None:
        if address is None:
            self._sock.send(datagram)
        else:
            self._sock.sendto(datagram, address)

    def _send_run(self, datagrams: Sequence[bytes], size: int, address: Address | None) -> None:
        control = ((_SOL_UDP, _UDP_SEGMENT, _SEGMENT_SIZE.pack(size)),)
        if address is None:
            self._sock.sendmsg(datagrams, control)
        else:
            self._sock.sendmsg(datagrams, control, 0, address)

    def _tell_refused(self) -> None:
        if not self._closed:
            self._receiver.peer_refused()
