"""The console's HTTP server: one page, and what happens as server-sent events, to those who hold a key. An asyncio shell.

    GET  /          the page; it holds no data, so anyone who reaches the address may have it
    POST /session   Authorization: Bearer TICKET; answers with a key, and the ticket is used up
    GET  /events    Authorization: Bearer KEY; text/event-stream, an event for each look at the mesh

It listens on 127.0.0.1. Tickets and keys are 256 random bits and travel in a header alone: no cookie that another port of this host could
be sent, nothing that another site's page can make a browser add. A request under another Host (DNS rebinding) or from another Origin
is refused, no answer allows one, and nothing is served but these three. Whatever a viewer can make this process hold or wait for has a bound below;
a viewer that does not read is dropped. Caller: cli.console.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec

log = logging.getLogger("felix.console")

HOST: Final = "127.0.0.1"
VIEWERS_MAX: Final = 8
"""Open event streams: a page for some people, no monitoring system (that is /metrics)."""
KEYS_MAX: Final = 32
"""Keys that were given; the oldest is forgotten for a new one."""
CONNECTIONS_MAX: Final = 64
EVENTS_WAITING_MAX: Final = 4
"""Events that wait for one viewer, at 2 s each: who is further behind is dropped, and its page connects again."""
HEAD_BYTES_MAX: Final = 16_384
REQUEST_S: Final = 10.0
"""For a request's head, and to send any answer but events."""
SEND_S: Final = 10.0
"""For one event, from the first byte to where the kernel has nearly all of it."""
UNSENT_BYTES_MAX: Final = 65_536
"""Of one viewer, in this process, before it waits for the viewer to read."""

_REASONS: Final = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    413: "Content Too Large", 421: "Misdirected Request", 431: "Request Header Fields Too Large", 503: "Service Unavailable",
}  # fmt: skip


class Page(NamedTuple):
    """A page of one file, and the policy under which a browser runs its own script and style, and nothing else."""

    body: bytes
    policy: str

    @classmethod
    def of(cls, text: str) -> Page:
        """The only <style> and <script> of the page are allowed by their hashes (CSP 3, section 2.3.1)."""
        style, script = (
            b64encode(sha256(text.split(f"<{tag}>")[1].split(f"</{tag}>")[0].encode()).digest()).decode()
            for tag in ("style", "script")
        )
        policy = (
            f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; connect-src 'self'; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
        )
        return cls(text.encode(), policy)


class _Refused(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Head(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]


class _Viewer:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.events: asyncio.Queue[bytes] = asyncio.Queue(EVENTS_WAITING_MAX)


class ConsoleServer:
    """`start`, `publish` as often as there is news, `close`. `dropped`: viewers that did not keep up, since the start."""

    def __init__(self, page: Page, opened: Callable[[], None] = lambda: None) -> None:
        """`opened` is called when a ticket was used: there is a new one."""
        self.port = 0
        self.dropped = 0
        self.watched = asyncio.Event()
        """set while there is a viewer"""
        self._page, self._opened = page, opened
        self._ticket = secrets.token_urlsafe(32)
        self._keys: deque[str] = deque(maxlen=KEYS_MAX)
        self._viewers: set[_Viewer] = set()
        self._last = b""
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where one viewer can open the page, once. The ticket stands in the fragment, which no browser sends."""
        return f"http://{HOST}:{self.port}/#{self._ticket}"

    async def start(self, port: int) -> None:
        """Listen; 0 takes any port. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, HOST, port, limit=HEAD_BYTES_MAX)
        self.port = self._server.sockets[0].getsockname()[1]

    def publish(self, data: bytes) -> None:
        """One event, a line of JSON, to every viewer; a viewer with too many waiting events is dropped. Does not block."""
        self._last = b"data: " + data + b"\n\n"
        for viewer in tuple(self._viewers):
            try:
                viewer.events.put_nowait(self._last)
            except asyncio.QueueFull:
                self._drop(viewer)

    async def close(self) -> None:
        """Stop listening, and end what is open."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    def _drop(self, viewer: _Viewer) -> None:
        self.dropped += 1
        viewer.writer.transport.abort()
        self._leave(viewer)

    def _leave(self, viewer: _Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            self.watched.clear()

    # -- connections -----------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            async with asyncio.timeout(REQUEST_S):
                looks_on = await self._answer(reader, writer)
            if looks_on:
                await self._stream(reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        except Exception:
            log.exception("a connection of the console failed")
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; True where it is to get events, which is not done here."""
        try:
            head = await _read_head(reader)
            self._check_place(head)
            if (head.method, head.path) == ("GET", "/"):
                await self._send(writer, 200, self._page.body, "text/html; charset=utf-8")
            elif (head.method, head.path) == ("POST", "/session"):
                key = self._exchange(head)
                self._opened()
                await self._send(writer, 200, msgspec.json.encode({"key": key}), "application/json")
            elif (head.method, head.path) == ("GET", "/events"):
                self._check_key(head)
                if len(self._viewers) >= VIEWERS_MAX:
                    raise _Refused(503, f"{VIEWERS_MAX} viewers look on already.")
                return True
            elif head.path in ("/", "/session", "/events"):
                raise _Refused(405, "This is not how it is asked for.")
            else:
                raise _Refused(404, "There is nothing here.")
        except _Refused as refused:
            await self._send(writer, refused.status, f"{refused}\n".encode(), "text/plain; charset=utf-8")
        return False

    async def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes, kind: str) -> None:
        writer.write(self._headers(status, kind, f"Content-Length: {len(body)}\r\n") + body)
        await writer.drain()

    def _headers(self, status: int, kind: str, more: str = "") -> bytes:
        return (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n{more}Content-Security-Policy: {self._page.policy}\r\n"
            "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
            "Cross-Origin-Resource-Policy: same-origin\r\nCross-Origin-Opener-Policy: same-origin\r\n"
            "Connection: close\r\n\r\n"
        ).encode()

    def _check_place(self, head: _Head) -> None:
        """A page of another site that was pointed at this address, or asks across, gets nothing."""
        own = {f"{HOST}:{self.port}", f"localhost:{self.port}"}
        host = head.headers.get("host", "")
        if host not in own:
            raise _Refused(421, "The console is not served under this name.")
        origin = head.headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            raise _Refused(403, "The console answers its own page alone.")

    def _exchange(self, head: _Head) -> str:
        if not hmac.compare_digest(_bearer(head), self._ticket.encode()):
            raise _Refused(
                401, "This link was used, or is none. The terminal where the console runs shows another."
            )
        self._ticket, key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._keys.append(key)
        return key

    def _check_key(self, head: _Head) -> None:
        given = _bearer(head)
        # Every key is compared, so that the time says nothing of which one it is.
        if not sum([hmac.compare_digest(given, key.encode()) for key in self._keys]):
            raise _Refused(401, "This key is not known here: the console was started anew.")

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        viewer = _Viewer(writer)
        writer.transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        writer.write(self._headers(200, "text/event-stream; charset=utf-8"))
        if self._last:
            viewer.events.put_nowait(self._last)
        self._viewers.add(viewer)
        self.watched.set()
        sending = asyncio.ensure_future(self._send_events(viewer))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            # A viewer says nothing more: whatever comes, the end most likely, ends it.
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            self._leave(viewer)

    async def _send_events(self, viewer: _Viewer) -> None:
        while True:
            event = await viewer.events.get()
            try:
                async with asyncio.timeout(SEND_S):
                    viewer.writer.write(event)
                    await viewer.writer.drain()
            except TimeoutError:
                self._drop(viewer)
                return


def _bearer(head: _Head) -> bytes:
    scheme, _, given = head.headers.get("authorization", "").partition(" ")
    return given.encode() if scheme == "Bearer" else b""


async def _read_head(reader: asyncio.StreamReader) -> _Head:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused(431, f"A request's head has {HEAD_BYTES_MAX} bytes at most.") from None
    lines = raw.decode("latin-1")[:-4].split("\r\n")
    words = lines[0].split(" ")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            raise _Refused(400, "A header of the request cannot be read.")
        headers[name.lower()] = value.strip()
    if len(words) != 3 or words[2] != "HTTP/1.1":
        raise _Refused(400, "This is not an HTTP/1.1 request.")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise _Refused(413, "No request here has a body.")
    return _Head(words[0], words[1], headers)
