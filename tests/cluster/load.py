"""Clients of one replicated shard that go on whatever happens, and note it all in a history: writers, readers, and one that asks who leads."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from cluster.history import History, Seen, Told

import felix
from felix.errors import FelixError
from felix.messages import ListStreams

IN_FLIGHT = 16
"""Records of a writer that are not acknowledged yet."""
ASK_S = 0.1
NOBODY: Mapping[str, felix.RegionClient] = {}
WAIT_S = 120.0
"""Longest wait for something that must happen; only a failing run waits this long."""


def seen_in(record: felix.Record) -> Seen:
    """A record as a writer made it."""
    writer, _, number = bytes(record.payload).decode().partition(":")
    return Seen(record.offset, writer, int(number), record.timestamp_ms)


class Load:
    """`pause_s`: what a writer waits after each answer, so that a long run has no more records than it can judge."""

    def __init__(
        self, region: felix.RegionClient, stream: str, history: History, *, pause_s: float = 0.0
    ) -> None:
        self.history = history
        self._region = region
        self._stream = stream
        self._pause_s = pause_s
        self._is_over = asyncio.Event()
        self._work: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def going_on(
        self, writers: int = 1, readers: int = 1, brokers: Mapping[str, felix.RegionClient] = NOBODY
    ) -> AsyncIterator[None]:
        """Until the block ends. `brokers`: clients that ask one broker each, by its name. Then each record that was sent is acknowledged, and each reader has been given all of them."""
        begin = asyncio.get_running_loop().create_task
        writing = [begin(self._write(f"w{number}")) for number in range(writers)]
        others = [begin(self._read(f"r{number}")) for number in range(readers)]
        others += [begin(self._ask(region, broker)) for broker, region in brokers.items()]
        self._work = [*writing, *others]
        try:
            yield
            self._is_over.set()
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*writing)
                while not self._have_read(len(self.history.acknowledged)):
                    self._look()
                    await asyncio.sleep(0.02)
            # Without a word of a leader, nothing that brokers say of themselves was judged.
            assert not brokers or any(self.history.told.values()), "no broker said how far the shard goes"
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)

    async def goes_on(self, records: int) -> None:
        """So many more are acknowledged, and every reader is given so many more."""
        acknowledged = len(self.history.acknowledged) + records
        read = {reader: len(seen) + records for reader, seen in self.history.read.items()}
        async with asyncio.timeout(WAIT_S):
            while len(self.history.acknowledged) < acknowledged or any(
                len(self.history.read[reader]) < count for reader, count in read.items()
            ):
                self._look()
                await asyncio.sleep(0.02)

    def _have_read(self, count: int) -> bool:
        return all(len(seen) >= count for seen in self.history.read.values())

    def _look(self) -> None:
        for task in self._work:
            if task.done() and not self._is_over.is_set():
                task.result()

    async def _write(self, writer: str) -> None:
        waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        async with self._region.stream(self._stream).publisher(deadline_ms=600_000) as publisher:
            while waiting or not self._is_over.is_set():
                while len(waiting) < IN_FLIGHT and not self._is_over.is_set():
                    number = self.history.sends(writer)
                    payload = b"%s:%d" % (writer.encode(), number)
                    answer = asyncio.ensure_future(publisher.publish(payload))
                    answer.add_done_callback(lambda done, number=number: self._told(writer, number, done))
                    waiting.append((number, answer))
                await waiting.popleft()[1]
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)

    def _told(self, writer: str, number: int, done: asyncio.Future[int]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.history.was_told(writer, number, done.result())

    async def _read(self, reader: str) -> None:
        self.history.read[reader] = []
        async with self._region.stream(self._stream).subscribe(start="earliest") as records:
            async for record in records:
                seen = seen_in(record)
                self.history.saw(reader, seen.offset, seen.writer, seen.number, seen.append_ms)

    async def _ask(self, region: felix.RegionClient, broker: str) -> None:
        told = self.history.told.setdefault(broker, [])
        while True:
            asked = time.monotonic()
            try:
                # What this broker says, whoever leads: a description would be asked for at the leader.
                (stream,) = (await region.connection.request(ListStreams(self._stream, "", 1))).streams
            except (FelixError, ValueError):
                pass
            else:
                state = stream.state[0]
                if state.leader_epoch and not state.stopped:
                    told.append(Told(asked, broker, state.leader_epoch, state.high_watermark))
            await asyncio.sleep(ASK_S)


async def stored_in(region: felix.RegionClient, stream: str) -> list[Seen]:
    """The whole shard as it stands, once nobody writes."""
    stored: list[Seen] = []
    async with asyncio.timeout(WAIT_S):
        end = (await region.describe_stream(stream)).state[0].high_watermark
        async with region.stream(stream).subscribe(start="earliest") as records:
            while len(stored) < end:
                stored.append(seen_in(await anext(records)))
    return stored
