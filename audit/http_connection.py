"""A connection to a web server that may answer as it likes: it ends in time, whatever it waits for. Blocks: for a thread of its own, never an event loop.

A socket's timeout is for each read, and bytes may trickle in for ever; `http.client` lets its socket go once an answer's headers were read, and `ssl` does
before a handshake. So the connection is held a second time, and ended by that. By the standard library: redirections are not followed, proxies of the environment not used.
Callers: audit.witness_client, audit.spark.http_files.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult


class HttpConnection:
    """One to a server, made with the first request. One request at a time; `shut` may come from another thread."""

    def __init__(self, parts: SplitResult, tls: ssl.SSLContext | None) -> None:
        """`parts`: of a URL with a host; its path counts for nothing."""
        self._host, self._tls = parts.hostname or "", tls
        self._port = parts.port or (80 if tls is None else 443)
        self._http = http.client.HTTPConnection(parts.netloc.rpartition("@")[2])
        self._guard: socket.socket | None = None
        """the same connection, whatever is made of its socket"""
        self._is_shut = False

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What is done in the block takes so long and no longer: it raises OSError or HTTPException then."""
        timer = threading.Timer(seconds, self.shut)
        timer.daemon = True
        timer.start()
        try:
            yield
            # What came until it was shut looks whole where an answer has no length.
            self._require_open()
        finally:
            timer.cancel()

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, wait_s: float
    ) -> http.client.HTTPResponse:
        """The answer, whose body is to be read. `wait_s`: how long nothing may come. Raises OSError, HTTPException, ValueError."""
        if self._guard is None:
            plain = socket.create_connection((self._host, self._port), wait_s)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._http.sock = plain
            self._guard = plain.dup()
            self._require_open()
            if self._tls is not None:
                self._http.sock = self._tls.wrap_socket(plain, server_hostname=self._host)
        self._http.request(method, path, body, dict(headers))
        return self._http.getresponse()

    def _require_open(self) -> None:
        if self._is_shut:
            raise TimeoutError("it took too long")

    def shut(self) -> None:
        """End what is under way, and do nothing more."""
        self._is_shut = True
        if (guard := self._guard) is not None:
            with suppress(OSError):
                guard.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let it go."""
        self._http.close()
        if self._guard is not None:
            self._guard.close()
