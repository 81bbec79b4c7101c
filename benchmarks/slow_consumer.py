"""The measurement of a slow consumer: what a subscriber that takes nothing costs the broker, and the others of its stream.

One round, on one durable stream: single records at an even pace to a subscriber that reads, alone; then another one subscribes and takes
nothing, while a backlog of many times what the broker keeps in memory is published; the same pace beside it; and once more
while the slow one wakes up and reads everything from the disk. The broker's resident memory and its budgets are sampled all the
while. Both subscribers keep the books: every record once, in order, unchanged.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import msgspec

from cli.benchmark.accounting import Account
from cli.benchmark.figures import Latency, LatencySpread, Spread
from cli.benchmark.measurement import WHOLE_TIMEOUT_S, Machine, machine
from cli.benchmark.processes import Processes, next_message
from cli.benchmark.roles import (
    Case,
    Collect,
    DeliverLoad,
    Got,
    Load,
    Prepare,
    Release,
    Sent,
    bench_client,
    broker,
    publisher,
    subscriber,
)
from region.log.shard_settings import PENDING_BYTES_MAX
from region.session.publishing import PUBLISH_WINDOW_BYTES
from region.streams.settings import HOT_BYTES

ALONE: Final = "alone"
STALLED: Final = "beside one that takes nothing"
WAKING: Final = "while it catches up"
PHASES: Final = (ALONE, STALLED, WAKING)
CREDIT_BYTES: Final = 2 << 20
"""What the slow one lets come before it reads."""
BACKLOG_BATCH: Final = 64
SAMPLE_S: Final = 0.05
CONNECTIONS: Final = 3
"""Publisher and two subscribers."""
TRANSPORT_BYTES: Final = 16 << 20
"""Windows of one connection (docs/operations.md)."""
DELIVERY_BYTES: Final = 4 << 20
"""Waiting for one connection (docs/operations.md)."""
RESIDENT_BYTES_MAX: Final = (
    HOT_BYTES + PUBLISH_WINDOW_BYTES + PENDING_BYTES_MAX + CONNECTIONS * (TRANSPORT_BYTES + DELIVERY_BYTES)
)
"""What the limits of docs/operations.md let this much work add to the broker's resident memory."""


class SlowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `per_second`: single records; `backlog_bytes`: of payload, published while the slow one takes nothing."""

    engine: str = "qh3"
    seconds: float = 3.0
    per_second: float = 200.0
    payload_bytes: int = 1024
    backlog_bytes: int = 160 << 20
    repeats: int = 3


class SlowPhase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase over all rounds; ratios against the phase alone of the same round."""

    phase: str
    latency: LatencySpread
    p50_ratio: Spread
    p99_ratio: Spread


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's memory, in bytes: resident before the first backlog and at most, what the limits allow it to grow by, and the most
    that was in use of each budget beside its limit."""

    resident_before: int
    resident_most: int
    growth_allowed: int
    budgets: dict[str, tuple[int, int]]

    @property
    def is_within(self) -> bool:
        """True where no limit was passed."""
        grown = self.resident_most - self.resident_before
        return grown <= self.growth_allowed and all(used <= limit for used, limit in self.budgets.values())


class SlowReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks slow-consumer --json` prints. `catch_up`: bytes per second of the slow one once it reads."""

    kind: str
    machine: Machine
    plan: SlowPlan
    seconds: float
    phases: list[SlowPhase]
    catch_up: Spread
    memory: MemoryReport
    reader: Account
    slow: Account

    @property
    def is_lossless(self) -> bool:
        return self.reader.is_lossless and self.slow.is_lossless


class Wake(msgspec.Struct, frozen=True):
    """The slow one reads from now on."""


async def sleeper(pipe: Pipe, home: Path, engine: str) -> None:
    """The slow subscriber: Prepare subscribes, Wake begins to read, Collect settles the books."""
    async with bench_client(home, engine) as client:
        load: DeliverLoad | None = None
        pipe.send(None)
        while (command := await next_message(pipe)) is not None:
            match command:
                case Prepare():
                    load = DeliverLoad(client, pipe, command)
                    await load.subscribe(credit_bytes=CREDIT_BYTES)
                    pipe.send(None)
                case Wake():
                    assert load is not None
                    await load.open()
                    pipe.send(None)
                case Collect():
                    assert load is not None
                    pipe.send(await load.collect(command.sent))
                case Release():
                    assert load is not None
                    await load.close()
                    pipe.send(None)


def measure_slow_consumer(
    plan: SlowPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> SlowReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for a while.

    Raises UnavailableError where a process fails or does not finish.
    """
    begun = time.monotonic()
    latencies: dict[str, list[Latency]] = {phase: [] for phase in PHASES}
    reader, slow = Account(), Account()
    rates: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as home,
        Processes(begun + WHOLE_TIMEOUT_S, what="The measurement of a slow consumer") as processes,
    ):
        serving = processes.start(broker, Path(home), plan.engine)
        processes.answer(serving)
        bench = _Bench(plan, processes, Path(home))
        memory = _Memory(Path(home), plan.engine, processes.pid_of(serving))
        for number in range(plan.repeats):
            said(f"round {number + 1} of {plan.repeats}")
            got, late = bench.round(number, latencies, memory)
            reader += got.account
            slow += late.account
            rates.append(late.rate * plan.payload_bytes)
    phases = []
    for phase in PHASES:
        spread = LatencySpread.of(latencies[phase])
        assert spread is not None
        pairs = list(zip(latencies[phase], latencies[ALONE], strict=True))
        phases.append(
            SlowPhase(
                phase=phase,
                latency=spread,
                p50_ratio=Spread.of([held.p50_us / alone.p50_us for held, alone in pairs]),
                p99_ratio=Spread.of([held.p99_us / alone.p99_us for held, alone in pairs]),
            )
        )
    return SlowReport(
        kind="slow-consumer",
        machine=machine(),
        plan=plan,
        seconds=time.monotonic() - begun,
        phases=phases,
        catch_up=Spread.of(rates),
        memory=memory.report(),
        reader=reader,
        slow=slow,
    )


class _Bench:
    """Publisher, a subscriber that reads, and one that is slow."""

    def __init__(self, plan: SlowPlan, processes: Processes, home: Path) -> None:
        self._plan = plan
        self._processes = processes
        ours, theirs = processes.pair()
        self._publisher = processes.start(publisher, ours, home, plan.engine)
        self._reader = processes.start(subscriber, theirs, home, plan.engine)
        self._slow = processes.start(sleeper, home, plan.engine)
        ours.close()
        theirs.close()
        for pipe in (self._publisher, self._reader, self._slow):
            processes.answer(pipe)

    def _ask(self, pipe: Any, command: object) -> Any:
        pipe.send(command)
        return self._processes.answer(pipe)

    def _paced(self, seconds: float) -> tuple[Sent, Got]:
        sent: Sent = self._ask(
            self._publisher, Load(seconds, 1 << 20, batches_per_second=self._plan.per_second)
        )
        got: Got = self._ask(self._reader, Collect(sent))
        return sent, got

    def round(self, number: int, latencies: dict[str, list[Latency]], memory: _Memory) -> tuple[Got, Got]:
        """What the reader and the slow one have in the end."""
        plan = self._plan
        case = Case(plan.engine, "fsync", plan.payload_bytes, 1)
        wanted = Prepare(f"bench/slow/run-{number}", case, 1, followed=True)
        self._ask(self._publisher, wanted)
        self._ask(self._reader, wanted)
        self._paced(0.2)
        memory.begin()
        _, got = self._paced(plan.seconds)
        _keep(latencies, ALONE, got)
        self._ask(self._slow, msgspec.structs.replace(wanted, followed=False))
        with memory.sampled():
            burst = Load(600.0, plan.backlog_bytes // plan.payload_bytes, batch_records=BACKLOG_BATCH)
            sent: Sent = self._ask(self._publisher, burst)
            self._ask(self._reader, Collect(sent))
            _, got = self._paced(plan.seconds)
            _keep(latencies, STALLED, got)
            self._ask(self._slow, Wake())
            sent, got = self._paced(plan.seconds)
            _keep(latencies, WAKING, got)
            late: Got = self._ask(self._slow, Collect(sent))
        self._ask(self._slow, Release())
        self._ask(self._reader, Release())
        self._ask(self._publisher, Release())
        return got, late


def _keep(latencies: dict[str, list[Latency]], phase: str, got: Got) -> None:
    assert got.latency is not None
    latencies[phase].append(got.latency)


class _Memory:
    """Samples the broker's resident memory and its budgets, in a thread of its own."""

    def __init__(self, home: Path, engine: str, pid: int) -> None:
        self._home = home
        self._engine = engine
        self._status = Path(f"/proc/{pid}/status")
        self._before = 0
        self._most = 0
        self._budgets: dict[str, tuple[int, int]] = {}
        self._stop = threading.Event()

    def begin(self) -> None:
        """What is resident before the first backlog; later rounds find more, and are held against the same."""
        self._before = self._before or self._resident()

    def _resident(self) -> int:
        """0 where the system does not say."""
        try:
            text = self._status.read_text()
        except OSError:
            return 0
        return next(
            (int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmRSS:")), 0
        )

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample while the block runs."""
        self._stop.clear()
        thread = threading.Thread(target=lambda: asyncio.run(self._sample()), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    async def _sample(self) -> None:
        async with bench_client(self._home, self._engine) as client:
            while not self._stop.is_set():
                self._most = max(self._most, self._resident())
                gauges = (await client.describe()).gauges
                for name, limit in gauges.items():
                    if name.endswith("_bytes_limit"):
                        used = int(gauges[name.removesuffix("_limit")])
                        name = name.removesuffix("_bytes_limit")
                        self._budgets[name] = (max(used, self._budgets.get(name, (0, 0))[0]), int(limit))
                await asyncio.sleep(SAMPLE_S)

    def report(self) -> MemoryReport:
        """What was seen."""
        return MemoryReport(
            resident_before=self._before,
            resident_most=max(self._most, self._before),
            growth_allowed=RESIDENT_BYTES_MAX,
            budgets=self._budgets,
        )
