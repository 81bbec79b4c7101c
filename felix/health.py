"""A process's health page: `/metrics` for Prometheus, `/livez` (it answers), `/readyz` (it serves) and `/syncz` (it serves, and has all that it should), with the
reason.

The server runs on a thread of its own; it reads numbers and never calls into what it reports of. Brokers and bridge
agents use it; applications need not.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from felix.address import Address
from felix.errors import AddressInUseError, Code, RequestError

ACCEPT_AGAIN_S: Final = 0.2
"""How soon a connection is looked at again that could not be taken."""


class _Server(ThreadingMixIn, WSGIServer):
    """Keeps a descriptor back: where the process may open no more files, one connection at a time is answered, which says so."""

    daemon_threads = True
    _spare: int | None = None
    _spare_lock = Lock()

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
        metrics = make_wsgi_app(registry)

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "")
            if path == "/metrics":
                page: Iterable[bytes] = metrics(environ, start_response)
                return page
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
