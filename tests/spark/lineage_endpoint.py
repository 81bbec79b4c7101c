"""Who is sent lineage: a real HTTP server that keeps it, and a report that was posted to one."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from felix.errors import UnavailableError


class Again(NamedTuple):
    """A second report of the same logs: its folder, how it ended, and what was posted."""

    out: Path
    error: UnavailableError
    bodies: list[Any]


class Endpoint:
    """The server. `status` is its answer to everything."""

    def __init__(self, status: int = 201) -> None:
        self.paths: list[str] = []
        self.bodies: list[Any] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint.paths.append(self.path)
                endpoint.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return None

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
