"""The measurement of fan-out: one publisher, n subscribers, every system with the same payloads in the same run.

All cases are taken once per round, the systems of a case one after the other, in the reverse order every other round; a
ratio is taken within a round. A rate counts what all subscribers received together. Latency is taken at one pace for all
systems, one record at a time, from the making of the payload to each subscriber's hand.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.fanout_roles import (
    READERS,
    Collect,
    Got,
    Load,
    Prepare,
    Release,
    Sent,
    publish,
    subscribe,
)
from benchmarks.peers import Peers, running_peers
from benchmarks.systems import FELIX, SYSTEMS, Place
from cli.benchmark.accounting import Account
from cli.benchmark.figures import Latency, LatencySpread, Spread, rate_per_second
from cli.benchmark.measurement import WHOLE_TIMEOUT_S, Machine, machine
from cli.benchmark.processes import Processes
from cli.benchmark.roles import WARM_SHARE, broker

PACE_PER_SECOND: Final = 250.0
"""Single records, of which each has arrived everywhere before the next is made."""
KEPT_BYTES_MAX: Final = 192 << 20
"""What the subscribers of one process keep of a phase, for the accounting."""
RECORD_BYTES_MORE: Final = 160
"""What a kept record costs beside its payload, with the systems that deliver records one by one."""


class FanoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. Times in seconds."""

    systems: Sequence[str] = tuple(SYSTEMS)
    subscribers: Sequence[int] = (1, 4, 16)
    payload_bytes: Sequence[int] = (256,)
    chunk: int = 64
    repeats: int = 3
    load_s: float = 0.8
    paced_s: float = 0.6
    records_max: int = 150_000
    budget_s: float = 240.0
    engine: str = "qh3"

    def records_of(self, subscribers: int, payload_bytes: int) -> int:
        """Records of one phase at full load."""
        of_process = -(-subscribers // READERS)
        kept = KEPT_BYTES_MAX // (of_process * (payload_bytes + RECORD_BYTES_MORE))
        return max(self.chunk, min(self.records_max, kept))


class FanoutCase(msgspec.Struct, frozen=True, order=True):
    """One system before so many subscribers."""

    subscribers: int
    payload_bytes: int
    system: str

    def __str__(self) -> str:
        return f"{self.system}, {self.subscribers} × {self.payload_bytes} B"


class FanoutResult(msgspec.Struct, frozen=True, kw_only=True):
    """One case over all its rounds: records/s of all subscribers together; latency of single records at PACE_PER_SECOND;
    `felix`: the rate of each Felix system over this one's, round by round."""

    case: FanoutCase
    promise: str
    repeats: int
    delivered_per_second: Spread
    paced: LatencySpread | None
    felix: dict[str, Spread]
    account: Account


class FanoutReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks fanout --json` prints."""

    machine: Machine
    plan: FanoutPlan
    seconds: float
    versions: dict[str, str]
    skipped: list[str]
    results: list[FanoutResult]

    @property
    def is_lossless(self) -> bool:
        return all(result.account.is_lossless for result in self.results)


class _Round(msgspec.Struct, frozen=True):
    rate: float
    paced: Latency | None
    account: Account


def measure_fanout(
    plan: FanoutPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> FanoutReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for a while.

    Raises UnavailableError where a process fails or does not finish.
    """
    begun = time.monotonic()
    rounds: dict[FanoutCase, dict[int, _Round]] = {}
    servers = {SYSTEMS[system].server for system in plan.systems}
    with (
        tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as home,
        running_peers(Path(home) / "peers", servers) as peers,
        Processes(begun + WHOLE_TIMEOUT_S, what="The measurement of fan-out") as processes,
    ):
        systems = [
            name for name in plan.systems if not SYSTEMS[name].server or SYSTEMS[name].server in peers.ports
        ]
        bench = _Bench(plan, processes, peers, Path(home))
        for number in range(plan.repeats):
            for size in plan.payload_bytes:
                for subscribers in plan.subscribers:
                    if number and time.monotonic() - begun >= plan.budget_s:
                        break
                    for system in systems if number % 2 == 0 else reversed(systems):
                        case = FanoutCase(subscribers, size, system)
                        said(f"{case}, round {number + 1} of {plan.repeats}")
                        rounds.setdefault(case, {})[number] = bench.round(case)
    return FanoutReport(
        machine=machine(),
        plan=plan,
        seconds=time.monotonic() - begun,
        versions=peers.versions,
        skipped=peers.skipped,
        results=[_result(case, taken, rounds) for case, taken in rounds.items()],
    )


class _Bench:
    def __init__(self, plan: FanoutPlan, processes: Processes, peers: Peers, home: Path) -> None:
        self._plan = plan
        self._processes = processes
        self._count = 0
        place = Place(home=home, engine=plan.engine, ports=peers.ports)
        processes.answer(processes.start(broker, home, plan.engine))
        pairs = [processes.pair() for _ in range(READERS)]
        self._publisher = processes.start(publish, [ours for ours, _ in pairs], place)
        self._readers = [processes.start(subscribe, theirs, place) for _, theirs in pairs]
        for ours, theirs in pairs:
            ours.close()
            theirs.close()
        for pipe in (self._publisher, *self._readers):
            processes.answer(pipe)

    def _ask(self, pipes: Sequence[Any], command: object) -> list[Any]:
        for pipe in pipes:
            pipe.send(command)
        return [self._processes.answer(pipe) for pipe in pipes]

    def round(self, case: FanoutCase) -> _Round:
        """Measure one case on a new stream."""
        plan = self._plan
        self._count += 1
        stream = f"run-{self._count}"
        # An idle process of subscribers would hold the publisher back for ever: it has nobody who could be behind.
        shares = [
            case.subscribers // READERS + (number < case.subscribers % READERS) for number in range(READERS)
        ]
        readers = [pipe for pipe, share in zip(self._readers, shares, strict=True) if share]
        prepare = Prepare(case.system, stream, case.payload_bytes, len(readers))
        self._ask([self._publisher], prepare)
        for pipe, share in zip(readers, shares, strict=False):
            self._ask([pipe], msgspec.structs.replace(prepare, readers=share))
        load = Load(plan.load_s, plan.records_of(case.subscribers, case.payload_bytes), plan.chunk)
        full = self._phase(readers, load)
        arrived = sorted(event for got in full for event in got.arrived)
        account = sum((got.account for got in full), Account())
        paced: Latency | None = None
        if account.is_lossless:
            lone = self._phase(readers, Load(plan.paced_s, plan.records_max, 1, PACE_PER_SECOND))
            paced = Latency.of([time_ns for got in lone for time_ns in got.times_ns])
            account = sum((got.account for got in lone), Account())
        self._ask(readers, Release())
        self._ask([self._publisher], Release())
        return _Round(rate_per_second(arrived, WARM_SHARE), paced, account)

    def _phase(self, readers: Sequence[Any], load: Load) -> list[Got]:
        sent: list[Sent] = self._ask([self._publisher], load)
        got: list[Got] = self._ask(readers, Collect(sent[0]))
        return got


def _result(
    case: FanoutCase, taken: dict[int, _Round], rounds: dict[FanoutCase, dict[int, _Round]]
) -> FanoutResult:
    felix: dict[str, Spread] = {}
    for name in FELIX:
        beside = rounds.get(msgspec.structs.replace(case, system=name))
        if beside is not None and name != case.system:
            ratios = [
                beside[number].rate / each.rate
                for number, each in taken.items()
                if number in beside and each.rate
            ]
            if ratios:
                felix[name] = Spread.of(ratios)
    return FanoutResult(
        case=case,
        promise=SYSTEMS[case.system].promise,
        repeats=len(taken),
        delivered_per_second=Spread.of([each.rate for each in taken.values()]),
        paced=LatencySpread.of([each.paced for each in taken.values()]),
        felix=felix,
        account=sum((each.account for each in taken.values()), Account()),
    )
