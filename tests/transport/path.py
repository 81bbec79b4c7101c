"""A path between a client and a server that a test can make worse: loss, and a client's port that changes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Self


class Path:
    """Forwards datagrams between whoever sends to `port` and one server."""

    def __init__(
        self,
        server: tuple[str, int],
        lose: Callable[[], bool] = lambda: False,
        lose_answer: Callable[[], bool] | None = None,
    ) -> None:
        """`lose` is asked for each datagram of the client; `lose_answer`, else `lose`, for each of the server."""
        self._server = server
        self._lose = lose
        self._lose_answer = lose_answer or lose
        self._client: tuple[str, int] | None = None
        self.lost = 0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._front = self._open()
        self._front.bind(("127.0.0.1", 0))
        self._loop.add_reader(self._front, self._to_server)
        self._back = self._open_back()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        for sock in (self._front, self._back):
            self._loop.remove_reader(sock)
            sock.close()

    @property
    def port(self) -> int:
        port: int = self._front.getsockname()[1]
        return port

    def change_port(self) -> None:
        """From now on the server sees another port, and what it sends to the old one is gone."""
        self._loop.remove_reader(self._back)
        self._back.close()
        self._back = self._open_back()

    def _open(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 4_000_000)
        return sock

    def _open_back(self) -> socket.socket:
        sock = self._open()
        sock.connect(self._server)
        self._loop.add_reader(sock, self._to_client)
        return sock

    def _to_server(self) -> None:
        while True:
            try:
                data, self._client = self._front.recvfrom(65_536)
                if self._lose():
                    self.lost += 1
                else:
                    self._back.send(data)
            except OSError:
                return

    def _to_client(self) -> None:
        while True:
            try:
                data = self._back.recv(65_536)
                if self._lose_answer():
                    self.lost += 1
                elif self._client is not None:
                    self._front.sendto(data, self._client)
            except OSError:
                return
