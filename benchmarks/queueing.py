"""The measurement of queues: put, lease, acknowledge, every system with the same jobs in the same run.

Per round and system, on a new queue: a burst is put while nobody works; then workers empty it, leasing and acknowledging
many at a time; then single jobs are put at one pace for all systems, and each is followed into a worker's hand and to its
acknowledgement. A job is finished when the queue has answered the acknowledgement.

The books: every job put was handed out and acknowledged exactly once, its payload byte for byte what it must be, and the queue
itself says that nothing is left.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.fanout_roles import STILL_S
from benchmarks.peers import Peers, running_peers
from benchmarks.systems import QUEUES, SYSTEMS, Job, Place, QueueWorker, queue_worker, queue_writer
from cli.benchmark.accounting import FILLERS, Made, fillers, filling_of, made_at_ns, payloads_of, sequence_of
from cli.benchmark.figures import Latency, LatencySpread, Spread, rate_per_second
from cli.benchmark.measurement import WHOLE_TIMEOUT_S, Machine, machine
from cli.benchmark.processes import Processes, next_message, send_whole
from cli.benchmark.roles import WARM_SHARE, broker

PACE_PER_SECOND: Final = 200.0
"""Single jobs, of which each is finished before the next is put."""
PUTS_IN_FLIGHT: Final = 16
ROLE_IDLE_S: Final = 0.02


class QueuePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `lease`: jobs that a worker leases and acknowledges at a time; `chunk`: jobs put at a time."""

    systems: Sequence[str] = QUEUES
    workers: Sequence[int] = (1, 8)
    payload_bytes: int = 256
    chunk: int = 32
    lease: int = 32
    jobs: int = 8_000
    paced_jobs: int = 120
    repeats: int = 3
    budget_s: float = 150.0
    engine: str = "qh3"


class QueueCase(msgspec.Struct, frozen=True, order=True):
    """One system with so many workers."""

    workers: int
    system: str

    def __str__(self) -> str:
        return f"{self.system}, {self.workers} worker{'s' if self.workers > 1 else ''}"


class QueueAccount(msgspec.Struct, frozen=True, kw_only=True):
    """In jobs."""

    put: int = 0
    finished: int = 0
    lost: int = 0
    handed_out_twice: int = 0
    damaged: int = 0
    left: int = 0
    """not finished, as the queue itself says at the end"""

    @property
    def is_lossless(self) -> bool:
        """True where every job was finished once."""
        wrong = self.lost or self.handed_out_twice or self.damaged or self.left
        return not wrong and self.finished == self.put

    def __add__(self, other: QueueAccount) -> QueueAccount:
        return QueueAccount(
            put=self.put + other.put,
            finished=self.finished + other.finished,
            lost=self.lost + other.lost,
            handed_out_twice=self.handed_out_twice + other.handed_out_twice,
            damaged=self.damaged + other.damaged,
            left=self.left + other.left,
        )


class QueueResult(msgspec.Struct, frozen=True, kw_only=True):
    """One case over all rounds: jobs/s put and finished; latency of single jobs from put to hand, and from hand to the
    answered acknowledgement; `felix`: Felix's finished jobs/s over this system's, round by round."""

    case: QueueCase
    promise: str
    repeats: int
    put_per_second: Spread
    finished_per_second: Spread
    to_hand: LatencySpread | None
    to_ack: LatencySpread | None
    felix: Spread | None
    felix_put: Spread | None
    account: QueueAccount


class QueueReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks queue --json` prints."""

    machine: Machine
    plan: QueuePlan
    seconds: float
    versions: dict[str, str]
    skipped: list[str]
    results: list[QueueResult]

    @property
    def is_lossless(self) -> bool:
        return all(result.account.is_lossless for result in self.results)


# the roles


class Prepare(msgspec.Struct, frozen=True):
    """Open the queue (writer), or so many workers of it."""

    system: str
    queue: str
    payload_bytes: int
    workers: int
    lease: int


class Put(msgspec.Struct, frozen=True):
    """Put so many jobs, `chunk` at a time; `per_second` 0: as fast as it goes."""

    jobs: int
    chunk: int
    per_second: float = 0.0


class Work(msgspec.Struct, frozen=True):
    """Work until so many jobs are finished since the queue was made, or nothing comes any more."""

    until: int


class Left(msgspec.Struct, frozen=True):
    """What does the queue itself say is left?"""


class Release(msgspec.Struct, frozen=True):
    """The case is over."""


class Worked(msgspec.Struct, frozen=True):
    """Finished since `Work` came: events (time in ns, jobs); latencies in ns; sequence numbers, as often as handed out."""

    finished: list[tuple[int, int]]
    to_hand_ns: list[int]
    to_ack_ns: list[int]
    sequences: list[int]
    damaged: int


async def put(pipe: Pipe, place: Place) -> None:
    """Carry out Prepare, Put, Left and Release. Answers Put with the events of its acknowledgements."""
    writer = None
    filling: list[bytes] = []
    at = 0
    pipe.send(None)
    try:
        while (command := await next_message(pipe)) is not None:
            match command:
                case Prepare():
                    writer = queue_writer(command.system, place, command.queue)
                    filling = fillers(command.payload_bytes)
                    at = 0
                    await writer.open()
                    pipe.send(None)
                case Put():
                    assert writer is not None
                    events = await _put(writer.put, filling, at, command)
                    at += command.jobs
                    send_whole(pipe, events)
                case Left():
                    assert writer is not None
                    pipe.send(await writer.left())
                case Release():
                    assert writer is not None
                    await writer.close()
                    writer = None
                    pipe.send(None)
    finally:
        if writer is not None:
            await writer.close()


async def _put(
    do: Callable[[list[bytes]], Any], filling: list[bytes], first: int, wanted: Put
) -> list[tuple[int, int]]:
    events: list[tuple[int, int]] = []
    starts = iter(range(first, first + wanted.jobs, wanted.chunk))

    async def one(start: int) -> None:
        count = min(wanted.chunk, first + wanted.jobs - start)
        await do(payloads_of(Made(0, start, count, time.monotonic_ns()), filling))
        events.append((time.monotonic_ns(), count))

    async def several() -> None:
        for start in starts:
            await one(start)

    if not wanted.per_second:
        await asyncio.gather(*(several() for _ in range(PUTS_IN_FLIGHT)))
    else:
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, start in enumerate(starts):
                wait = begun + number * wanted.chunk / wanted.per_second - time.monotonic()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(one(start))
    return sorted(events)


async def work(pipe: Pipe, place: Place) -> None:
    """Carry out Prepare, Work and Release."""
    crew: _Crew | None = None
    pipe.send(None)
    try:
        while (command := await next_message(pipe)) is not None:
            match command:
                case Prepare():
                    crew = _Crew(command, place)
                    await crew.open()
                    pipe.send(None)
                case Work():
                    assert crew is not None
                    send_whole(pipe, await crew.work(command.until))
                case Release():
                    assert crew is not None
                    await crew.close()
                    crew = None
                    pipe.send(None)
    finally:
        if crew is not None:
            await crew.close()


class _Crew:
    """The workers of one queue, in this process."""

    def __init__(self, wanted: Prepare, place: Place) -> None:
        self._lease = wanted.lease
        self._filling = fillers(wanted.payload_bytes)
        self._workers: list[QueueWorker] = [
            queue_worker(wanted.system, place, wanted.queue) for _ in range(wanted.workers)
        ]
        self._finished = 0
        self._news_at = 0.0
        self._over = False

    async def open(self) -> None:
        for worker in self._workers:
            await worker.open()

    async def close(self) -> None:
        for worker in self._workers:
            await worker.close()

    async def work(self, until: int) -> Worked:
        worked = Worked([], [], [], [], 0)
        self._over, self._news_at = False, time.monotonic()
        damaged = [0]
        tasks = [asyncio.ensure_future(self._one(worker, worked, damaged)) for worker in self._workers]
        while self._finished < until and time.monotonic() - self._news_at < STILL_S:
            # Looked at now and then: an event per job would be measured, too.
            await asyncio.sleep(ROLE_IDLE_S)
            for task in tasks:
                if task.done():
                    task.result()
        # What a worker has leased it finishes; a poll that waits ends by itself, with no job or with a superfluous one.
        self._over = True
        await asyncio.gather(*tasks)
        return msgspec.structs.replace(worked, finished=sorted(worked.finished), damaged=damaged[0])

    async def _one(self, worker: QueueWorker, worked: Worked, damaged: list[int]) -> None:
        while not self._over:
            jobs: list[Job] = await worker.lease(self._lease)
            if not jobs:
                continue
            in_hand_ns = time.monotonic_ns()
            await worker.ack(jobs)
            now_ns = time.monotonic_ns()
            worked.finished.append((now_ns, len(jobs)))
            worked.to_hand_ns.append(in_hand_ns - made_at_ns(jobs[0].payload))
            worked.to_ack_ns.append(now_ns - in_hand_ns)
            for job in jobs:
                sequence = sequence_of(job.payload)
                worked.sequences.append(sequence)
                damaged[0] += filling_of(job.payload) != self._filling[sequence % FILLERS]
            self._finished += len(jobs)
            self._news_at = time.monotonic()


# the measurement


class _Round(msgspec.Struct, frozen=True, kw_only=True):
    put: float
    finished: float
    to_hand: Latency | None
    to_ack: Latency | None
    account: QueueAccount


def measure_queue(
    plan: QueuePlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> QueueReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for a while.

    Raises UnavailableError where a process fails or does not finish.
    """
    begun = time.monotonic()
    rounds: dict[QueueCase, dict[int, _Round]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as home,
        running_peers(Path(home) / "peers", {SYSTEMS[name].server for name in plan.systems}) as peers,
        Processes(begun + WHOLE_TIMEOUT_S, what="The measurement of queues") as processes,
    ):
        systems = [name for name in plan.systems if SYSTEMS[name].server in ("", *peers.ports)]
        bench = _Bench(plan, processes, peers, Path(home))
        for number in range(plan.repeats):
            for workers in plan.workers:
                if number and time.monotonic() - begun >= plan.budget_s:
                    break
                for system in systems if number % 2 == 0 else reversed(systems):
                    case = QueueCase(workers, system)
                    said(f"{case}, round {number + 1} of {plan.repeats}")
                    rounds.setdefault(case, {})[number] = bench.round(case)
    return QueueReport(
        machine=machine(),
        plan=plan,
        seconds=time.monotonic() - begun,
        versions=peers.versions,
        skipped=peers.skipped,
        results=[_result(case, taken, rounds) for case, taken in rounds.items()],
    )


class _Bench:
    def __init__(self, plan: QueuePlan, processes: Processes, peers: Peers, home: Path) -> None:
        self._plan = plan
        self._processes = processes
        self._count = 0
        place = Place(home=home, engine=plan.engine, ports=peers.ports)
        processes.answer(processes.start(broker, home, plan.engine))
        self._writer = processes.start(put, place)
        self._crew = processes.start(work, place)
        processes.answer(self._writer)
        processes.answer(self._crew)

    def _ask(self, pipe: Any, command: object) -> Any:
        pipe.send(command)
        return self._processes.answer(pipe)

    def round(self, case: QueueCase) -> _Round:
        """Measure one case on a new queue."""
        plan = self._plan
        self._count += 1
        prepare = Prepare(case.system, f"queue-{self._count}", plan.payload_bytes, case.workers, plan.lease)
        self._ask(self._writer, prepare)
        self._ask(self._crew, prepare)
        events = self._ask(self._writer, Put(plan.jobs, plan.chunk))
        drained: Worked = self._ask(self._crew, Work(plan.jobs))
        whole = plan.jobs + plan.paced_jobs
        self._crew.send(Work(whole))
        self._ask(self._writer, Put(plan.paced_jobs, 1, PACE_PER_SECOND))
        single: Worked = self._processes.answer(self._crew)
        left = self._ask(self._writer, Left())
        self._ask(self._crew, Release())
        self._ask(self._writer, Release())
        return _Round(
            put=rate_per_second(events, WARM_SHARE),
            finished=rate_per_second(drained.finished, WARM_SHARE),
            to_hand=Latency.of(single.to_hand_ns),
            to_ack=Latency.of(single.to_ack_ns),
            account=settle_queue(
                whole, [*drained.sequences, *single.sequences], drained.damaged + single.damaged, left
            ),
        )


def settle_queue(put: int, finished: Sequence[int], damaged: int, left: int) -> QueueAccount:
    """The books: the jobs [0, put), against the sequence numbers of those that were acknowledged."""
    once = set(finished)
    return QueueAccount(
        put=put,
        finished=len(finished),
        lost=len(set(range(put)) - once),
        handed_out_twice=len(finished) - len(once),
        damaged=damaged,
        left=left,
    )


def _result(
    case: QueueCase, taken: dict[int, _Round], rounds: dict[QueueCase, dict[int, _Round]]
) -> QueueResult:
    beside = rounds.get(msgspec.structs.replace(case, system="felix-fsync"), {})
    both = [number for number in taken if number in beside and case.system != "felix-fsync"]
    return QueueResult(
        case=case,
        promise=SYSTEMS[case.system].promise,
        repeats=len(taken),
        put_per_second=Spread.of([each.put for each in taken.values()]),
        finished_per_second=Spread.of([each.finished for each in taken.values()]),
        to_hand=LatencySpread.of([each.to_hand for each in taken.values()]),
        to_ack=LatencySpread.of([each.to_ack for each in taken.values()]),
        felix=Spread.of([beside[number].finished / taken[number].finished for number in both])
        if both
        else None,
        felix_put=Spread.of([beside[number].put / taken[number].put for number in both]) if both else None,
        account=sum((each.account for each in taken.values()), QueueAccount()),
    )
