"""The measurement of a region of several brokers: what they take, and what a record costs them, by brokers, copies and acks.

Regions of one, two and three brokers are measured in turn, each with its etcd, all processes of their own on this machine; one region runs at a time. One
client publishes the same load in every case: batches into several streams of one shard, of which each broker leads as many as the others. Then single
records, one at a time, whose acknowledgement is timed. Everything is read back and settled before a rate counts.

On one machine brokers share its processors and its disk, so rates do not grow with their number; processor time per record is what carries over to
machines of their own.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final

import msgspec

import felix
from benchmarks.brokers import Brokers, all_in_sync
from cli.benchmark.accounting import Account
from cli.benchmark.disk import measure_sync
from cli.benchmark.figures import Latency, LatencySpread, Spread
from cli.benchmark.measurement import Machine, machine
from cli.benchmark.processes import Processes, next_message
from cli.benchmark.roles import Case, DeliverLoad, Load, Prepare, PublishLoad, Sent, bench_client

ENGINE: Final = "qh3"
STREAMS: Final = 6
"""As many for each of one, two or three brokers."""
IN_FLIGHT: Final = 16
"""Batches of a stream that wait for their acknowledgement at once: with all streams, enough to keep two processors busy."""
WHOLE_TIMEOUT_S: Final = 3_600.0


class CopiesCase(msgspec.Struct, frozen=True, order=True):
    """Brokers of the region, copies of each stream, and what an acknowledgement waits for (`quorum`, `leader`)."""

    brokers: int
    copies: int
    acks: str

    def __str__(self) -> str:
        brokers = f"{self.brokers} broker{'s' if self.brokers > 1 else ''}"
        return f"{brokers}, 1 copy" if self.copies == 1 else f"{brokers}, {self.copies} copies, {self.acks}"


FIRST: Final = CopiesCase(1, 1, "quorum")
TWO_COPIES: Final = CopiesCase(3, 2, "quorum")
THREE_COPIES: Final = CopiesCase(3, 3, "quorum")
CASES: Final = (
    FIRST,
    CopiesCase(2, 1, "quorum"),
    CopiesCase(3, 1, "quorum"),
    TWO_COPIES,
    THREE_COPIES,
    CopiesCase(3, 3, "leader"),
)


class CopiesPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `seconds` of load for each case, `records_max` of each stream, `lone` single records."""

    seconds: float = 2.0
    payload_bytes: int = 256
    batch_records: int = 64
    records_max: int = 60_000
    lone: int = 200
    repeats: int = 3
    cases: tuple[CopiesCase, ...] = CASES


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One case in one round. Rates in records per second; processor time in µs for each record, of all brokers and of etcd."""

    rate: float
    broker_cpu_us: float
    etcd_cpu_us: float
    lone: Latency | None
    led: list[int]
    """streams that each broker led"""
    account: Account


class CopiesResult(msgspec.Struct, frozen=True, kw_only=True):
    """One case over all rounds. `rate_ratio`, `cpu_ratio`: against the first case, one broker with one copy, in the same round."""

    case: CopiesCase
    rate: Spread
    broker_cpu_us: Spread
    etcd_cpu_us: Spread
    rate_ratio: Spread
    cpu_ratio: Spread
    lone: LatencySpread | None
    led: list[int]
    account: Account


class CopiesReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks cluster --json` prints. `third_copy_cpu_us`: what the third copy adds to the brokers' processor time for
    a record; None where it was not measured. `sync`: a write with `fdatasync` on this disk."""

    kind: str
    machine: Machine
    plan: CopiesPlan
    seconds: float
    sync: LatencySpread | None
    results: list[CopiesResult]
    third_copy_cpu_us: Spread | None

    @property
    def is_lossless(self) -> bool:
        return all(result.account.is_lossless for result in self.results)


class Make(msgspec.Struct, frozen=True):
    """Make the streams of a case, all copies in sync. Answered with how many streams each broker leads."""

    prefix: str
    case: CopiesCase
    plan: CopiesPlan


class Publish(msgspec.Struct, frozen=True):
    """The load. Answered with Published once all of it is acknowledged."""


class Published(msgspec.Struct, frozen=True):
    """Records per second, and how many there were."""

    rate: float
    records: int


class Settle(msgspec.Struct, frozen=True):
    """Single records, then read everything back, and delete the streams. Answered with Settled."""


class Settled(msgspec.Struct, frozen=True):
    lone: Latency | None
    account: Account


async def writer(pipe: Pipe, progress: Pipe, home: Path) -> None:
    """The client of a region: carries out Make, Publish and Settle until the parent is done."""
    async with bench_client(home, ENGINE) as client:
        load: _Load | None = None
        pipe.send(None)
        while (command := await next_message(pipe)) is not None:
            match command:
                case Make():
                    load = _Load(client, progress, command)
                    pipe.send(await load.make())
                case Publish():
                    assert load is not None
                    pipe.send(await load.publish())
                case Settle():
                    assert load is not None
                    pipe.send(await load.settle())


class _Load:
    """Of one case: a publisher for each stream."""

    def __init__(self, client: felix.RegionClient, progress: Pipe, wanted: Make) -> None:
        self._client = client
        self._progress = progress
        self._case = wanted.case
        self._plan = plan = wanted.plan
        case = Case(ENGINE, "fsync", plan.payload_bytes, plan.batch_records)
        names = [f"bench/cluster/{wanted.prefix}-{number}" for number in range(STREAMS)]
        self._prepared = [Prepare(name, case, 1, followed=False) for name in names]
        self._loads: list[PublishLoad] = []

    async def make(self) -> list[int]:
        """Streams with all copies in sync, and publishers; returns how many streams each broker leads."""
        client, case = self._client, self._case
        for wanted in self._prepared:
            await client.create_stream(wanted.stream, replicas=case.copies, acks=case.acks)
        for wanted in self._prepared:
            await all_in_sync(client, wanted.stream, case.copies)
            load = PublishLoad(client, self._progress, wanted)
            await load.open()
            self._loads.append(load)
        return [each.leads for each in (await client.describe()).brokers]

    async def publish(self) -> Published:
        plan = self._plan
        load = Load(plan.seconds, plan.records_max, in_flight=IN_FLIGHT)
        sent = await asyncio.gather(*(each.run(load) for each in self._loads))
        return Published(sum(each.rate for each in sent), sum(sum(each.counts.values()) for each in sent))

    async def settle(self) -> Settled:
        one = Load(WHOLE_TIMEOUT_S, self._plan.lone, in_flight=1, batch_records=1)
        none = Load(0.0, 1)
        sent = [await self._loads[0].run(one), *[await each.run(none) for each in self._loads[1:]]]
        account = Account()
        for wanted, load, each in zip(self._prepared, self._loads, sent, strict=True):
            account += await self._read_back(wanted, each)
            await load.close()
            await self._client.delete_stream(wanted.stream)
        return Settled(sent[0].latency, account)

    async def _read_back(self, wanted: Prepare, sent: Sent) -> Account:
        reading = DeliverLoad(self._client, self._progress, wanted)
        try:
            await reading.open()
            return (await reading.collect(sent)).account
        finally:
            await reading.close()


def measure_copies(
    plan: CopiesPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> CopiesReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for minutes.

    Raises UnavailableError where a process fails or does not finish, RequestError where there is no etcd.
    """
    begun = time.monotonic()
    taken: dict[CopiesCase, list[Round]] = {case: [] for case in plan.cases}
    syncs: list[Latency] = []
    with tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as name:
        regions: dict[int, Brokers] = {}
        for count in sorted({case.brokers for case in plan.cases}):
            home = Path(name) / str(count)
            home.mkdir()
            regions[count] = Brokers(home, count)
        for number in range(plan.repeats):
            syncs.append(measure_sync(Path(name)))
            # In turn from either end: what grows slower or faster meanwhile is not the first region's alone.
            for count in list(regions) if number % 2 == 0 else reversed(list(regions)):
                cases = [case for case in plan.cases if case.brokers == count]
                _measure_region(plan, number, regions[count], cases, taken, begun, said)
    return report_of(plan, taken, syncs, seconds=time.monotonic() - begun)


def report_of(
    plan: CopiesPlan, taken: dict[CopiesCase, list[Round]], syncs: list[Latency], *, seconds: float
) -> CopiesReport:
    """What was taken, by case, its rounds in the order measured; ratios are against the plan's first case."""
    first = taken[plan.cases[0]]
    return CopiesReport(
        kind="cluster",
        machine=machine(),
        plan=plan,
        seconds=seconds,
        sync=LatencySpread.of(syncs),
        results=[_result(case, rounds, first) for case, rounds in taken.items()],
        third_copy_cpu_us=_third_copy(taken),
    )


def _measure_region(
    plan: CopiesPlan,
    number: int,
    brokers: Brokers,
    cases: list[CopiesCase],
    taken: dict[CopiesCase, list[Round]],
    begun: float,
    said: Callable[[str], None],
) -> None:
    said(f"{len(brokers.names)} brokers start, round {number + 1} of {plan.repeats}")
    with (
        brokers.running(),
        Processes(begun + WHOLE_TIMEOUT_S, what="The measurement of a cluster") as processes,
    ):
        ours, theirs = processes.pair()
        client = processes.start(writer, theirs, brokers.home)
        theirs.close()
        processes.answer(client)
        for at, case in enumerate(cases):
            said(f"{case}, round {number + 1} of {plan.repeats}")
            client.send(Make(f"{number}-{at}", case, plan))
            led = processes.answer(client)
            before, etcd_before = brokers.cpu_s()
            client.send(Publish())
            published: Published = processes.answer(client)
            after, etcd_after = brokers.cpu_s()
            client.send(Settle())
            settled: Settled = processes.answer(client)
            taken[case].append(
                Round(
                    rate=published.rate,
                    broker_cpu_us=(after - before) * 1e6 / published.records,
                    etcd_cpu_us=(etcd_after - etcd_before) * 1e6 / published.records,
                    lone=settled.lone,
                    led=led,
                    account=settled.account,
                )
            )
        ours.close()


def _result(case: CopiesCase, rounds: list[Round], first: list[Round]) -> CopiesResult:
    account = Account()
    for each in rounds:
        account += each.account
    pairs = list(zip(rounds, first, strict=True))
    return CopiesResult(
        case=case,
        rate=Spread.of([each.rate for each in rounds]),
        broker_cpu_us=Spread.of([each.broker_cpu_us for each in rounds]),
        etcd_cpu_us=Spread.of([each.etcd_cpu_us for each in rounds]),
        rate_ratio=Spread.of([each.rate / of.rate for each, of in pairs]),
        cpu_ratio=Spread.of([each.broker_cpu_us / of.broker_cpu_us for each, of in pairs]),
        lone=LatencySpread.of([each.lone for each in rounds]),
        led=rounds[0].led,
        account=account,
    )


def _third_copy(taken: dict[CopiesCase, list[Round]]) -> Spread | None:
    pairs = list(zip(taken.get(THREE_COPIES, []), taken.get(TWO_COPIES, []), strict=True))
    return Spread.of([three.broker_cpu_us - two.broker_cpu_us for three, two in pairs]) if pairs else None
