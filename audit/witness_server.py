"""The witness's HTTP interface: add-checkpoint, and the newest cosigned checkpoints for monitors. An asyncio shell.

    POST <prefix>/add-checkpoint
    GET  <prefix>/<origin hash>/checkpoint

HTTP/1.1 with keep-alive, on a plain or a TLS socket; nothing of HTTP that the two calls do not need (no chunked requests,
no compression). Everything a stranger can make this process hold or wait for has a bound below: heads, bodies, time of a
request, idle time, connections in all and from one address. Decisions and the disk are in one thread, so they are made
one after the other. Source: https://c2sp.org/tlog-witness. Callers: cli.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from audit.witness_protocol import ADD_CHECKPOINT, REQUEST_BYTES_MAX
from audit.witness_service import Answer, WitnessService
from felix.runtime.real import REAL

log = logging.getLogger("felix.audit.witness")

HEAD_BYTES_MAX: Final = 16_384
"""A request's first line and headers."""
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
    """from one address: nobody has them all"""
    request_s: float = 10.0
    """from a request's first byte to its last, and again to send the answer"""
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
    ) -> None:
        """`prefix`: what stands before the calls in a path, for a witness behind a proxy: "/witness"."""
        self.port = port
        self._service, self._host, self._tls = service, host, tls
        self._prefix = prefix.rstrip("/")
        self._limits = limits or ServerLimits()
        self._worker = REAL.pool(1, "witness")
        self._connections: set[asyncio.Task[None]] = set()
        self._from: Counter[str] = Counter()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; `port` is the one that was taken. Raises OSError where the address cannot be used."""
        handshake_s = None if self._tls is None else self._limits.request_s
        self._server = await asyncio.start_server(
            self._accept,
            self._host,
            self.port,
            limit=HEAD_BYTES_MAX,
            ssl=self._tls,
            ssl_handshake_timeout=handshake_s,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, end what is open, let the decision on hand finish."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
        await asyncio.to_thread(self._worker.shutdown)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        peer = str((writer.get_extra_info("peername") or ("?",))[0])
        if (
            len(self._connections) >= self._limits.connections
            or self._from[peer] >= self._limits.connections_of_one
        ):
            await self._finish(writer, Answer(503, b"This witness has as many connections as it takes.\n"))
            return
        self._connections.add(task)
        self._from[peer] += 1
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            self._connections.discard(task)
            self._from[peer] -= 1
            if not self._from[peer]:
                del self._from[peer]
            writer.close()

    async def _finish(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._limits.request_s):
                writer.write(_encode(answer, keep_alive=False))
                await writer.drain()
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request of a connection. True where another may follow."""
        async with asyncio.timeout(self._limits.idle_s):
            first = await reader.read(1)
        if not first:
            return False
        keep_alive = False
        try:
            async with asyncio.timeout(self._limits.request_s):
                head = await _read_head(first, reader)
                body = await _read_body(head, reader, writer)
            answer = await self._answer(head, body)
            keep_alive = head.keep_alive
        except _Refused as refused:
            answer = refused.answer
        except TimeoutError:
            answer = Answer(408, b"The request took too long.\n")
        async with asyncio.timeout(self._limits.request_s):
            writer.write(_encode(answer, keep_alive=keep_alive))
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
                if head.method != "GET":
                    return Answer(405, b"A checkpoint is read with GET.\n")
                return await loop.run_in_executor(self._worker, self._service.checkpoint, hash_)
        except Exception:
            # A disk that failed, most likely: nothing was signed, and the client tries again.
            log.exception("a request failed")
            return Answer(500, b"This witness cannot decide at the moment.\n")
        return Answer(404, b"This is a witness (c2sp.org/tlog-witness): POST add-checkpoint.\n")


async def _read_head(first: bytes, reader: asyncio.StreamReader) -> _Head:
    try:
        raw = first + await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused(431, f"A request's head has {HEAD_BYTES_MAX} bytes at most.") from None
    lines = raw.decode("latin-1")[:-4].split("\r\n")
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
    if head.headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await reader.readexactly(size)


def _encode(answer: Answer, *, keep_alive: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"Connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
    )
    return head.encode() + answer.body
