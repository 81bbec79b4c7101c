"""The measurement as a whole: which cases, in which order, and what comes of them.

All repeats of a case are taken in rounds: round after round, each case once, beside its yardsticks in the same
round. A machine that is slower for a while is then slower for both, and ratios are taken round by round. The first
round is always whole; no case of a later one begins once `budget_s` is over.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from cli.benchmark.accounting import Account
from cli.benchmark.disk import measure_sync
from cli.benchmark.figures import Latency, LatencySpread, Spread
from cli.benchmark.processes import Processes
from cli.benchmark.raw_quic import measure_echo, measure_relay
from cli.benchmark.roles import (
    Case,
    Collect,
    Got,
    Load,
    Prepare,
    Release,
    Sent,
    broker,
    publisher,
    subscriber,
)
from felix.transport.port import ENGINE_NAMES

Kind = Literal["publish", "deliver"]

DURABILITIES: Final = ("fsync", "interval", "ephemeral")
HALF: Final = 0.5
"""Of the rate at full load: where latency is looked at. At full load it only shows how much is under way."""
LONE_RECORDS: Final = 300
LONE_PER_SECOND: Final = 250.0
"""Where a lone record is followed to a subscriber."""
RELAY_CHUNK_SMALL_BYTES: Final = 2048
RELAY_BYTES: Final = 48 << 20
RELAY_SMALL_BYTES: Final = 24 << 20
WHOLE_TIMEOUT_S: Final = 600.0
"""However slow the machine is: a measurement that takes longer has hung."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. Times in seconds; `records_max` bounds one phase and so the memory it takes."""

    kind: Kind
    engines: Sequence[str] = ENGINE_NAMES
    durabilities: Sequence[str] = DURABILITIES
    payload_bytes: Sequence[int] = (256, 1024)
    batch_records: Sequence[int] = (1, 64)
    shards: int = 1
    repeats: int = 3
    load_s: float = 1.0
    paced_s: float = 0.6
    records_max: int = 600_000
    relay_bytes: int = RELAY_BYTES
    budget_s: float = 300.0

    def cases(self, engine: str) -> list[Case]:
        """The cases of one engine."""
        return [
            Case(engine, durability, size, batch)
            for durability in self.durabilities
            for size in self.payload_bytes
            for batch in self.batch_records
        ]


class Yardstick(msgspec.Struct, frozen=True):
    """What the engine does without Felix: `relay` in bytes/s by chunk size, `echo` of 64 bytes."""

    engine: str
    relay_bytes_per_second: dict[int, Spread]
    echo: LatencySpread


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One case over all its repeats. Rates at full load; `bytes` are payload bytes; `share` is of the raw relay's.

    `loaded`, `half`, `lone`: latency at full load, at half of that rate, and one record at a time.
    """

    case: Case
    repeats: int
    records_per_second: Spread
    bytes_per_second: Spread
    relay_bytes_per_second: Spread
    share: Spread
    loaded: LatencySpread | None
    half: LatencySpread | None
    lone: LatencySpread | None
    account: Account


class Machine(msgspec.Struct, frozen=True):
    """Where this was measured."""

    cpus: int
    system: str
    python: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `felix bench --json` prints."""

    kind: Kind
    machine: Machine
    plan: Plan
    seconds: float
    sync: LatencySpread
    yardsticks: list[Yardstick]
    results: list[CaseResult]

    @property
    def is_lossless(self) -> bool:
        return all(result.account.is_lossless for result in self.results)


class _Round(msgspec.Struct, frozen=True, kw_only=True):
    """One case in one round."""

    rate: float
    relay: float
    loaded: Latency | None
    half: Latency | None
    lone: Latency | None
    account: Account


def machine() -> Machine:
    """This one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(usable, f"{platform.system()} {platform.release()}", platform.python_version())


def measure(plan: Plan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None) -> Report:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for a while.

    `said` is called with what is being measured. Raises UnavailableError where a process fails or does not finish.
    """
    begun = time.monotonic()
    syncs: list[Latency] = []
    rounds: dict[Case, list[_Round]] = {}
    relays: dict[tuple[str, int], list[float]] = {}
    echoes: dict[str, list[Latency]] = {}
    with tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as home:
        for engine in plan.engines:
            root = Path(home) / engine
            root.mkdir()
            limit = begun + WHOLE_TIMEOUT_S
            with Processes(limit, what=f"The measurement over {engine}") as processes:
                bench = _Bench(plan, processes, root, engine)
                # Each engine has its share of the time.
                until = begun + plan.budget_s * (plan.engines.index(engine) + 1) / len(plan.engines)
                for number in range(plan.repeats):
                    if number and time.monotonic() >= until:
                        break
                    said(f"{engine}: the disk and raw QUIC, round {number + 1} of {plan.repeats}")
                    syncs.append(measure_sync(root))
                    echo = measure_echo(engine, count=500)
                    echoes.setdefault(engine, []).append(echo)
                    beside: dict[int, float] = {}
                    for case in plan.cases(engine):
                        if number and time.monotonic() >= until:
                            break
                        chunk = case.payload_bytes * case.batch_records
                        said(f"{case}, round {number + 1} of {plan.repeats}")
                        if chunk not in beside:
                            beside[chunk] = _relay(plan, engine, chunk)
                            relays.setdefault((engine, chunk), []).append(beside[chunk])
                        rounds.setdefault(case, []).append(bench.round(case, beside[chunk]))
    sync = LatencySpread.of(syncs)
    assert sync is not None
    return Report(
        kind=plan.kind,
        machine=machine(),
        plan=plan,
        seconds=time.monotonic() - begun,
        sync=sync,
        yardsticks=[_yardstick(engine, relays, echoes[engine]) for engine in plan.engines],
        results=[_result(case, taken) for case, taken in rounds.items()],
    )


def _relay(plan: Plan, engine: str, chunk: int) -> float:
    whole = plan.relay_bytes // 2 if chunk < RELAY_CHUNK_SMALL_BYTES else plan.relay_bytes
    return measure_relay(engine, chunk, whole).bytes_per_second


class _Bench:
    """The three processes of one engine, and one case after the other through them."""

    def __init__(self, plan: Plan, processes: Processes, home: Path, engine: str) -> None:
        self._plan = plan
        self._processes = processes
        self._count = 0
        processes.answer(processes.start(broker, home, engine))
        ours, theirs = processes.pair()
        self._publisher = processes.start(publisher, ours, home, engine)
        self._subscriber = processes.start(subscriber, theirs, home, engine)
        ours.close()
        theirs.close()
        processes.answer(self._publisher)
        processes.answer(self._subscriber)

    def _ask(self, pipe: Any, command: object) -> Any:
        pipe.send(command)
        return self._processes.answer(pipe)

    def round(self, case: Case, relay: float) -> _Round:
        """Measure one case on a new stream."""
        plan = self._plan
        self._count += 1
        followed = plan.kind == "deliver"
        prepare = Prepare(f"bench/{plan.kind}/run-{self._count}", case, plan.shards, followed)
        self._ask(self._publisher, prepare)
        self._ask(self._subscriber, prepare)
        full = Load(plan.load_s, plan.records_max)
        rate, loaded, account = self._phase(followed, full)
        half = lone = None
        if rate:
            pace = HALF * rate / case.batch_records
            _, half, account = self._phase(
                followed, Load(plan.paced_s, plan.records_max, batches_per_second=pace), account
            )
        if case.batch_records == 1:
            # A subscriber is measured at rest: at once after each acknowledgement, three processes compete for the CPUs.
            pace = LONE_PER_SECOND if followed else 0.0
            one = Load(plan.paced_s, LONE_RECORDS, in_flight=1, batches_per_second=pace)
            _, lone, account = self._phase(followed, one, account)
        if not followed:
            account = self._collect(self._sent).account
        self._ask(self._subscriber, Release())
        self._ask(self._publisher, Release())
        return _Round(rate=rate, relay=relay, loaded=loaded, half=half, lone=lone, account=account)

    def _phase(
        self,
        followed: bool,
        load: Load,
        account: Account = Account(),  # noqa: B008 - frozen
    ) -> tuple[float, Latency | None, Account]:
        sent = self._sent = self._load(load)
        if not followed:
            return sent.rate, sent.latency, account
        got = self._collect(sent)
        return got.rate, got.latency, got.account

    def _load(self, load: Load) -> Sent:
        sent: Sent = self._ask(self._publisher, load)
        return sent

    def _collect(self, sent: Sent) -> Got:
        got: Got = self._ask(self._subscriber, Collect(sent))
        return got


def _yardstick(engine: str, relays: dict[tuple[str, int], list[float]], echoes: list[Latency]) -> Yardstick:
    echo = LatencySpread.of(echoes)
    assert echo is not None
    chunks = {chunk: Spread.of(rates) for (of, chunk), rates in sorted(relays.items()) if of == engine}
    return Yardstick(engine, chunks, echo)


def _result(case: Case, taken: list[_Round]) -> CaseResult:
    size = case.payload_bytes
    account = Account()
    for each in taken:
        account += each.account
    return CaseResult(
        case=case,
        repeats=len(taken),
        records_per_second=Spread.of([each.rate for each in taken]),
        bytes_per_second=Spread.of([each.rate * size for each in taken]),
        relay_bytes_per_second=Spread.of([each.relay for each in taken]),
        share=Spread.of([each.rate * size / each.relay for each in taken]),
        loaded=LatencySpread.of([each.loaded for each in taken]),
        half=LatencySpread.of([each.half for each in taken]),
        lone=LatencySpread.of([each.lone for each in taken]),
        account=account,
    )
