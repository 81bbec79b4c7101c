"""Handlers that note what they are called with, and servers that echo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from felix.transport.port import Connection

WAIT_S = 120.0
"""Longest wait for something that must happen; only a failing test waits this long."""


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody announces."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - no event is set for it
            await asyncio.sleep(0.005)


class Recorder:
    """A handler that keeps everything; `until` waits for a condition on it."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.received: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.drained_count = 0
        self.closed_with: list[tuple[int, str]] = []
        self.calls: list[str] = []
        self._changed = asyncio.Event()

    def _note(self, call: str) -> None:
        assert not self.closed_with, f"{call} after closed"
        self.calls.append(call)
        self._changed.set()

    def connected(self, connection: Connection) -> None:
        self._note("connected")
        self.connection = connection
        connection.admit()

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        self._note("stream_data")
        assert stream_id not in self.ended
        self.received.setdefault(stream_id, bytearray()).extend(data)
        if end:
            self.ended.add(stream_id)

    def stream_reset(self, stream_id: int, code: int) -> None:
        self._note("stream_reset")
        self.resets[stream_id] = code

    def drained(self) -> None:
        self._note("drained")
        self.drained_count += 1

    def closed(self, code: int, reason: str) -> None:
        self._note("closed")
        self.closed_with.append((code, reason))

    async def until(self, condition: Callable[[Recorder], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    @property
    def peer(self) -> Connection:
        assert self.connection is not None
        return self.connection


class Echo(Recorder):
    """Sends back what comes on bidirectional streams, and opens a stream of its own for each that it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[int, int] = {}

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        super().stream_data(stream_id, data, end)
        answer = stream_id
        if stream_id & 2:
            if stream_id not in self._answers:
                self._answers[stream_id] = self.peer.open_stream(bidirectional=False)
            answer = self._answers[stream_id]
        self.peer.send(answer, data, end=end)
