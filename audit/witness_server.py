"""The witness's HTTP interface: add-checkpoint, and the newest cosigned checkpoints for monitors. An asyncio shell.

    POST <prefix>/add-checkpoint
    GET  <prefix>/<origin hash>/checkpoint

HTTP/1.1 with keep-alive, on a plain or a TLS socket; nothing of HTTP that the two calls do not need (no chunked requests,
no compression). Everything a stranger can make this process hold or wait for has a bound below: heads, bodies, time of a
request and of a TLS handshake, idle time, connections in all and from one address, and who loses one where all are taken (audit.witness_admission). A connection counts from when it is accepted until its descriptor is given back. Decisions and the disk are in one thread, so they are made
one after the other. Source: https://c2sp.org/tlog-witness. Callers: cli.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from audit.witness_admission import Admission, Limits, Network
from audit.witness_protocol import ADD_CHECKPOINT, REQUEST_BYTES_MAX
from audit.witness_service import Answer, FewLines, WitnessService
from felix.runtime.real import REAL
from felix.structs import prepare_structs

log = logging.getLogger("felix.audit.witness")

HEAD_BYTES_MAX: Final = 16_384
"""A request's first line and headers."""
_UNFIT: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""What no line of a head has. A proxy before this server may take a lone line feed for the end of a line."""
_BACKLOG: Final = 100
_ACCEPT_AGAIN_S: Final = 0.2
_FAILURES_TOLD_MAX: Final = 5
"""In a minute, with a traceback each: who finds one of our mistakes writes no more than that into the log."""
_REASONS: Final = {
    200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout",
    409: "Conflict", 411: "Length Required", 413: "Content Too Large", 422: "Unprocessable Content",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of one server."""

    connections: int = 512
    """at 16 KiB of head and 135 KiB of body each: 75 MiB at the worst"""
    connections_of_one: int = 64
    """from one address, or one IPv6 /64: nobody has them all"""
    connections_of_clients: int = 64
    """of all of them, those that strangers do not get where the operator names clients"""
    request_s: float = 10.0
    """from a request's first byte to its last, and again to send the answer; for a TLS handshake, and for the other end to close"""
    idle_s: float = 30.0
    """between two requests of a connection"""


class _Head(NamedTuple):
    method: str
    path: str
    keep_alive: bool
    headers: dict[str, str]


class _Refused(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.answer = Answer(status, sentence.encode() + b"\n")


class WitnessServer:
    """`start`, then `close`."""

    def __init__(
        self,
        service: WitnessService,
        host: str,
        port: int,
        *,
        prefix: str = "",
        tls: ssl.SSLContext | None = None,
        limits: ServerLimits | None = None,
        clients: Sequence[Network] = (),
    ) -> None:
        """`prefix`: what stands before the calls in a path, for a witness behind a proxy: "/witness". `clients`: from where connections are taken whoever else wants them."""
        self.port = port
        self._service, self._host, self._tls = service, host, tls
        self._prefix = prefix.rstrip("/")
        self._limits = limits or ServerLimits()
        self._worker = REAL.pool(1, "witness")
        self._connections: set[asyncio.Task[None]] = set()
        most = self._limits
        bounds = Limits(most.connections, most.connections_of_one, most.connections_of_clients)
        self._admission: Admission[asyncio.Task[None]] = Admission(bounds, clients)
        self._accepting: list[asyncio.Task[None]] = []
        self._failures = FewLines(_FAILURES_TOLD_MAX)

    async def start(self) -> None:
        """Listen; `port` is the one that was taken. Raises OSError where the address cannot be used."""
        prepare_structs()
        sockets = await _listen(self._host, self.port)
        self.port = sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        self._accepting = [loop.create_task(self._accept(sock), name="witness") for sock in sockets]

    async def close(self) -> None:
        """Stop listening, end what is open, let the decision on hand finish."""
        for task in (*self._accepting, *self._connections):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._connections, return_exceptions=True)
        await asyncio.to_thread(self._worker.shutdown)

    async def _accept(self, listening: socket.socket) -> None:
        """Take connections, and count them before anything else: a server of asyncio tells of one only after its TLS handshake."""
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    sock, address = await loop.sock_accept(listening)
                except OSError as error:
                    # It was closed before it was taken, or the system has no descriptor left.
                    log.warning("a connection could not be taken: %s", error)
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                    continue
                peer = str((address or ("?",))[0])
                admitted = self._admission.admit(peer)
                if not admitted.is_taken:
                    self._refuse(sock)
                    continue
                task = loop.create_task(self._serve(sock), name="witness connection")
                self._connections.add(task)
                self._admission.add(task, peer)
                task.add_done_callback(self._ended)
                if admitted.evicted is not None:
                    # It may not have begun; it closes its socket only where it has.
                    await asyncio.sleep(0)
                    admitted.evicted.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._admission.remove(task)

    def _refuse(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            # With TLS, to say so would take a handshake.
            if self._tls is None:
                answer = Answer(503, b"This witness has as many connections as it takes.\n")
                sock.send(_encode(answer, keep_alive=False))
                sock.shutdown(socket.SHUT_WR)

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, until its descriptor is given back."""
        loop, limits = asyncio.get_running_loop(), self._limits
        reader = asyncio.StreamReader(HEAD_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        timeout_s = None if self._tls is None else limits.request_s
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock,
                ssl=self._tls, ssl_handshake_timeout=timeout_s, ssl_shutdown_timeout=timeout_s,
            )  # fmt: skip
        except OSError:
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            while await self._one(reader, writer):
                pass
            writer.close()
            async with asyncio.timeout(limits.request_s):
                await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        except Exception:
            self._tell_failure("a connection failed")
        finally:
            # What the other end does not take, or does not close, holds no descriptor.
            transport.abort()

    def _tell_failure(self, what: str) -> None:
        if (more := self._failures.more(int(REAL.clock.monotonic()))) is not None:
            log.exception("%s%s", what, more)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request of a connection. True where another may follow."""
        async with asyncio.timeout(self._limits.idle_s):
            first = await reader.read(1)
        if not first:
            return False
        keep_alive = is_head = False
        try:
            async with asyncio.timeout(self._limits.request_s):
                head = await _read_head(first, reader)
                is_head = head.method == "HEAD"
                body = await _read_body(head, reader, writer)
            answer = await self._answer(head, body)
            keep_alive = head.keep_alive
        except _Refused as refused:
            answer = refused.answer
        except TimeoutError:
            answer = Answer(408, b"The request took too long.\n")
        if writer.is_closing():
            # The other end has gone. uvloop takes it for a mistake of ours to write then.
            return False
        async with asyncio.timeout(self._limits.request_s):
            writer.write(_encode(answer, keep_alive=keep_alive, has_body=not is_head))
            await writer.drain()
        return keep_alive

    async def _answer(self, head: _Head, body: bytes) -> Answer:
        loop = asyncio.get_running_loop()
        path = head.path.removeprefix(self._prefix) if head.path.startswith(f"{self._prefix}/") else ""
        try:
            if path == f"/{ADD_CHECKPOINT}":
                if head.method != "POST":
                    return Answer(405, b"add-checkpoint is a POST.\n")
                return await loop.run_in_executor(self._worker, self._service.add_checkpoint, body)
            hash_, _, rest = path[1:].partition("/")
            if rest == "checkpoint" and len(hash_) == 64:
                if head.method not in ("GET", "HEAD"):
                    return Answer(405, b"A checkpoint is read with GET.\n")
                return await loop.run_in_executor(self._worker, self._service.checkpoint, hash_)
        except Exception:
            # A disk that failed, most likely: nothing was signed, and the client tries again.
            self._tell_failure("a request failed")
            return Answer(500, b"This witness cannot decide at the moment.\n")
        return Answer(404, b"This is a witness (c2sp.org/tlog-witness): POST add-checkpoint.\n")


async def _listen(host: str, port: int) -> list[socket.socket]:
    """On each address that the host has. Raises OSError."""
    loop, found = asyncio.get_running_loop(), list[socket.socket]()
    infos = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            sock = socket.socket(family, kind, protocol)
            found.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
    except BaseException:
        for sock in found:
            sock.close()
        raise
    return found


async def _read_head(first: bytes, reader: asyncio.StreamReader) -> _Head:
    try:
        raw = first + await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused(431, f"A request's head has {HEAD_BYTES_MAX} bytes at most.") from None
    lines = raw.decode("latin-1")[:-4].split("\r\n")
    if any(map(_UNFIT.search, lines)):
        raise _Refused(400, "The head of the request has control characters.")
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise _Refused(400, "This is not an HTTP/1.1 request.")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name in headers and name == "content-length"):
            raise _Refused(400, "A header of the request cannot be read.")
        headers[name] = value.strip()
    connection = headers.get("connection", "").lower()
    keep_alive = words[2] == "HTTP/1.1" and "close" not in connection
    return _Head(words[0], words[1].partition("?")[0], keep_alive, headers)


async def _read_body(head: _Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    if "transfer-encoding" in head.headers:
        raise _Refused(411, "Send the request with a Content-Length.")
    text = head.headers.get("content-length")
    if text is None:
        if head.method == "POST":
            raise _Refused(411, "Send the request with a Content-Length.")
        return b""
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise _Refused(400, "The Content-Length cannot be read.")
    size = int(text)
    if size > REQUEST_BYTES_MAX:
        raise _Refused(413, f"A request has {REQUEST_BYTES_MAX} bytes at most.")
    if head.headers.get("expect", "").lower() == "100-continue" and not writer.is_closing():
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await reader.readexactly(size)


def _encode(answer: Answer, *, keep_alive: bool, has_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"Connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
    )
    return head.encode() + (answer.body if has_body else b"")
