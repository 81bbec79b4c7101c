"""The processes of a fan-out: one publisher, and subscribers over connections of their own, spread over READERS processes.

The same two roles drive every system, with the same payloads, the same chunks and the same bound on what is under way:
each process of subscribers tells the publisher how far its slowest one is. So no system is measured at filling buffers, and
none drops a record because a buffer was full.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Final

import msgspec

from benchmarks.systems import FanoutReader, FanoutWriter, Payloads, Place, fanout_reader, fanout_writer
from cli.benchmark.accounting import Account, Ledger, Made, checksum_of, fillers, made_at_ns, payloads_of
from cli.benchmark.processes import next_message, send_whole

READERS: Final = 2
"""Processes of subscribers. More than there are CPUs would measure the machine's scheduler."""
IN_FLIGHT: Final = 16
"""Chunks that wait for their acknowledgement at once, where the system acknowledges."""
WINDOW_BYTES: Final = 4 << 20
"""Under way to the slowest subscriber, at most: Felix's default credit of one subscription."""
PROGRESS_RECORDS: Final = 512
PROGRESS_S: Final = 0.02
"""How often a process of subscribers says how far they are: after so many records, and at least so often."""
STILL_S: Final = 20.0
"""Silence for so long means loss. Longer than a busy disk holds up the systems that sync."""
AFTER_S: Final = 0.05
"""How long what must not come is still listened for."""


class Prepare(msgspec.Struct, frozen=True):
    """Open one system's stream: its writer, before `readers` processes of subscribers, or so many subscribers of it."""

    system: str
    stream: str
    payload_bytes: int
    readers: int


class Load(msgspec.Struct, frozen=True):
    """Publish for `seconds` or up to `records_max`, `chunk` records at a time. `per_second` 0: as fast as it goes."""

    seconds: float
    records_max: int
    chunk: int
    per_second: float = 0.0


class Sent(msgspec.Struct, frozen=True):
    """What was published since the stream was made."""

    records: int
    checksum: int


class Collect(msgspec.Struct, frozen=True):
    """The publisher is done with a phase; all this must come."""

    sent: Sent


class Got(msgspec.Struct, frozen=True):
    """What the subscribers of one process received: arrivals (time in ns, records) and latencies (ns) of this phase, and
    the account, summed over the subscribers, since the stream was made."""

    arrived: list[tuple[int, int]]
    times_ns: list[int]
    account: Account


class Release(msgspec.Struct, frozen=True):
    """The case is over."""


async def publish(pipe: Pipe, progress: list[Pipe], place: Place) -> None:
    """Carry out Prepare, Load and Release."""
    load: _Load | None = None
    pipe.send(None)
    try:
        while (command := await next_message(pipe)) is not None:
            match command:
                case Prepare():
                    load = _Load(command, progress, place)
                    await load.open()
                    pipe.send(None)
                case Load():
                    assert load is not None
                    pipe.send(await load.run(command))
                case Release():
                    assert load is not None
                    await load.close()
                    load = None
                    pipe.send(None)
    finally:
        if load is not None:
            await load.close()


class _Load:
    def __init__(self, wanted: Prepare, progress: list[Pipe], place: Place) -> None:
        self._writer: FanoutWriter = fanout_writer(wanted.system, place, wanted.stream)
        self._filling = fillers(wanted.payload_bytes)
        self._stream = wanted.stream
        self._progress = progress[: wanted.readers]
        self._reached = [0] * wanted.readers
        self._records = 0
        self._made: list[Made] = []
        self._window = max(1, WINDOW_BYTES // wanted.payload_bytes)
        self._room = asyncio.Event()

    async def open(self) -> None:
        await self._writer.open()
        loop = asyncio.get_running_loop()
        for number, pipe in enumerate(self._progress):
            loop.add_reader(pipe.fileno(), self._progressed, number, pipe)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        for pipe in self._progress:
            loop.remove_reader(pipe.fileno())
        await self._writer.close()

    def _progressed(self, number: int, pipe: Pipe) -> None:
        try:
            stream, reached = pipe.recv()
        except (EOFError, ConnectionResetError):
            # The subscribers are gone; the parent hears of it, too.
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            return
        # What is left in the pipe from an earlier case says nothing of this one.
        if stream == self._stream:
            self._reached[number] = reached
            self._room.set()

    async def run(self, load: Load) -> Sent:
        until = time.monotonic() + load.seconds
        last = self._records + load.records_max
        if load.per_second:
            await self._paced(load, until, last)
        else:
            await asyncio.gather(*(self._work(load.chunk, until, last) for _ in range(IN_FLIGHT)))
        return Sent(self._records, checksum_of(self._made, self._filling).get(0, 0))

    async def _work(self, chunk: int, until: float, last: int) -> None:
        while self._records < last and time.monotonic() < until:
            if self._records + chunk - min(self._reached) > self._window:
                self._room.clear()
                await self._room.wait()
                continue
            await self._publish(chunk)

    async def _paced(self, load: Load, until: float, last: int) -> None:
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(last - self._records):
                due = begun + number * load.chunk / load.per_second
                if due >= until:
                    break
                wait = due - time.monotonic()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._publish(load.chunk))

    async def _publish(self, chunk: int) -> None:
        made = Made(0, self._records, chunk, time.monotonic_ns())
        self._records += chunk
        self._made.append(made)
        await self._writer.publish(payloads_of(made, self._filling))


async def subscribe(pipe: Pipe, progress: Pipe, place: Place) -> None:
    """Carry out Prepare, Collect and Release."""
    group: _Readers | None = None
    pipe.send(None)
    try:
        while (command := await next_message(pipe)) is not None:
            match command:
                case Prepare():
                    group = _Readers(command, progress, place)
                    await group.open()
                    pipe.send(None)
                case Collect():
                    assert group is not None
                    send_whole(pipe, await group.collect(command.sent))
                case Release():
                    assert group is not None
                    await group.close()
                    group = None
                    pipe.send(None)
    finally:
        if group is not None:
            await group.close()


class _Books:
    """One subscriber: what came, kept as it is until a phase is over, and then compared byte for byte."""

    __slots__ = ("_kept", "_news", "arrived", "ledger", "records", "times_ns")

    def __init__(self, payload_bytes: int, news: Callable[[], None]) -> None:
        self.ledger = Ledger(payload_bytes)
        self.records = 0
        self.arrived: list[tuple[int, int]] = []
        self.times_ns: list[int] = []
        self._kept: list[Payloads] = []
        self._news = news

    def take(self, payloads: Payloads) -> None:
        now_ns = time.monotonic_ns()
        self.arrived.append((now_ns, len(payloads)))
        self.times_ns.append(now_ns - made_at_ns(payloads[0]))
        self._kept.append(payloads)
        self.records += len(payloads)
        self._news()

    def settle(self) -> None:
        """Into the ledger. A record's place among those that arrived is the only offset that all systems have."""
        kept, self._kept = self._kept, []
        offset = self.records - sum(map(len, kept))
        for payloads in kept:
            self.ledger.receive(0, enumerate(payloads, offset))
            offset += len(payloads)


class _Readers:
    def __init__(self, wanted: Prepare, progress: Pipe, place: Place) -> None:
        self._wanted = wanted
        self._progress = progress
        self._news = asyncio.Event()
        self._books = [_Books(wanted.payload_bytes, self._news.set) for _ in range(wanted.readers)]
        self._readers: list[FanoutReader] = [
            fanout_reader(wanted.system, place, wanted.stream) for _ in range(wanted.readers)
        ]
        self._telling: asyncio.Task[None] | None = None

    async def open(self) -> None:
        for reader, books in zip(self._readers, self._books, strict=True):
            await reader.open(books.take)
        self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait([self._telling])
        for reader in self._readers:
            await reader.close()

    def _reached(self) -> int:
        return min(books.records for books in self._books)

    async def _tell(self) -> None:
        told, told_at = -1, 0.0
        while True:
            await self._news.wait()
            self._news.clear()
            reached, now = self._reached(), time.monotonic()
            if reached - told >= PROGRESS_RECORDS or (reached > told and now - told_at >= PROGRESS_S):
                told, told_at = reached, now
                self._progress.send((self._wanted.stream, reached))

    async def collect(self, sent: Sent) -> Got:
        """Wait for all that was published, then for what must not come, and settle the books of every subscriber."""
        before, still_since = -1, time.monotonic()
        while self._reached() < sent.records:
            received = sum(books.records for books in self._books)
            if received != before:
                before, still_since = received, time.monotonic()
            elif time.monotonic() - still_since >= STILL_S:
                break
            await asyncio.sleep(PROGRESS_S)
        await asyncio.sleep(AFTER_S)
        self._progress.send((self._wanted.stream, self._reached()))
        arrived: list[tuple[int, int]] = []
        times_ns: list[int] = []
        account = Account()
        for books in self._books:
            books.settle()
            arrived += books.arrived
            times_ns += books.times_ns
            books.arrived, books.times_ns = [], []
            account += books.ledger.close({0: sent.records}, {0: sent.checksum})
        return Got(arrived, times_ns, account)
