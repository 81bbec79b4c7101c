"""A process's health page: `/metrics` for Prometheus, `/livez` (it answers), `/readyz` (it serves) and `/syncz` (it serves, and has all that it should), with the
reason.

The server runs on a thread of its own, and each connection on one, of which there are few; it reads numbers and never calls into what it reports of. Whoever
reaches the address is answered, and takes no more of the process than the limits below. Brokers and bridge agents use it; applications need not.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Lock, Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from felix.address import Address
from felix.errors import AddressInUseError, Code, RequestError

log = logging.getLogger("felix.health")

ACCEPT_AGAIN_S: Final = 0.2
"""How soon a connection is looked at again that could not be taken."""
CONNECTIONS_MAX: Final = 32
"""Each has a thread and a descriptor, of which the process needs its own. The oldest makes room for a new one: a probe is answered at once, whoever else hangs on."""
COLLECTING_MAX: Final = 2
"""Pages of metrics that are made at once: of ten thousand streams, one takes 20 MB and some seconds of a processor."""
COLLECT_WAIT_S: Final = 10.0
"""For a place among those: as long as Prometheus waits, unless it is told otherwise."""


class _Server(ThreadingMixIn, WSGIServer):
    """Keeps a descriptor back: where the process may open no more files, one connection at a time is answered, which says so."""

    daemon_threads = True
    request_queue_size = CONNECTIONS_MAX
    _spare: int | None = None
    _spare_lock = Lock()

    def __init__(self, *given: Any) -> None:
        self._open: dict[socket.socket, None] = {}
        """in the order in which they came"""
        self._open_lock = Lock()
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open[request] = None
            if len(self._open) > CONNECTIONS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                # Its thread finds that nothing more comes, and closes it.
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of a connection that hangs, or ends in the middle, nothing is said."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("a request for the health page failed")

    def server_activate(self) -> None:
        super().server_activate()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        with self._spare_lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)
            with suppress(OSError):
                return super().get_request()
        # It is still there, and would be looked at again at once.
        time.sleep(ACCEPT_AGAIN_S)
        raise BlockingIOError(errno.EAGAIN, "no descriptor is free")

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.pop(request, None)
        super().shutdown_request(request)
        with self._spare_lock, suppress(OSError):
            if self._spare is None:
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def server_close(self) -> None:
        super().server_close()
        with self._spare_lock:
            if self._spare is not None:
                os.close(self._spare)
            self._spare = None


class _Quiet(WSGIRequestHandler):
    timeout = 10
    """Seconds without a word after which a scraper's connection, and its thread, end."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass

    def get_stderr(self) -> Any:
        """Where wsgiref writes of readers that do not read: nowhere. What fails here is logged here."""
        return io.StringIO()


class HealthServer:
    """Serves from the moment it is made until `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        collector: Collector,
        ready: Callable[[], str],
        in_sync: Callable[[], str] | None = None,
    ) -> None:
        """`ready` returns why the process does not serve, or an empty string; `in_sync`, why another one may not be stopped because of what this
        one lacks, as `ready` unless said. Raises RequestError: port in use."""
        checks: dict[str, Callable[[], str]] = {
            "/livez": lambda: "",
            "/readyz": ready,
            "/syncz": in_sync or ready,
        }
        registry = CollectorRegistry()
        registry.register(collector)
        metrics, places = make_wsgi_app(registry), BoundedSemaphore(COLLECTING_MAX)

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "")
            if path == "/metrics":
                if not places.acquire(timeout=COLLECT_WAIT_S):
                    start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
                    return [f"Felix: {COLLECTING_MAX} others are asking for metrics already\n".encode()]
                try:
                    page: Iterable[bytes] = metrics(environ, start_response)
                    return page
                except Exception:
                    log.exception("metrics could not be collected")
                    raise
                finally:
                    places.release()
            if (check := checks.get(path)) is not None:
                reason = check()
                status = "503 Service Unavailable" if reason else "200 OK"
                body = json.dumps({"ok": not reason, "reason": reason}).encode()
                start_response(status, [("Content-Type", "application/json")])
                return [body + b"\n"]
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"Felix: /metrics, /livez, /readyz or /syncz\n"]

        try:
            self._server = make_server(host, port, app, _Server, _Quiet)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(str(Address(host, port)), "TCP") from error
            raise RequestError(
                f"The health address {host}:{port} cannot be used: {error.strerror or error}.",
                code=Code.CONFIG_INVALID,
                hint="Set another one with `health:` in the configuration, or leave it out for none.",
            ) from error
        self.address = (host, self._server.server_port)
        self._thread = Thread(target=self._server.serve_forever, name="felix-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and join the thread. Blocks."""
        self._server.shutdown()
        self._thread.join(timeout=5)
        self._server.server_close()
