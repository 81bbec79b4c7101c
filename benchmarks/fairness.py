"""The measurement of fairness: what a tenant that works quietly notices of one that takes all it gets.

One round is four phases: the quiet tenant alone; beside a noisy one at a broker of its own on the same machine; beside the same at the
same broker, without a quota; and with one. The second is the control: there the two share processors and disk, and nothing of Felix's, so
that what the third costs beyond it is the broker's own doing.
The quiet tenant publishes single durable records at an even pace, and its latency is from the making of a record to its
subscriber's hand. The noisy tenant publishes as much as it can into several shards, and reads it as well. Ratios are
taken round by round, each against the phase alone of its own round. Both tenants keep the books of everything that they publish.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

import felix
from cli.benchmark.accounting import Account
from cli.benchmark.figures import Latency, LatencySpread, Spread
from cli.benchmark.measurement import WHOLE_TIMEOUT_S, Machine, machine
from cli.benchmark.processes import Processes
from cli.benchmark.roles import (
    REGION,
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
from felix.profile import load_profile
from felix.quota import QuotaLimits

QUIET: Final = "quiet"
NOISY: Final = "noisy"
ALONE: Final = "alone"
ELSEWHERE: Final = "beside noise at another broker"
UNBOUND: Final = "beside noise"
BOUND: Final = "beside noise with a quota"
PHASES: Final = (ALONE, ELSEWHERE, UNBOUND, BOUND)
LEAD_S: Final = 0.4
"""The noise begins so long before what is measured."""
TRAIL_S: Final = 0.3
"""And lasts so much longer, so that none of what is measured is without it."""


class FairnessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `per_second`: records of the quiet tenant; `quota_bytes`: publishing and delivery of the noisy one, each, per
    second, in the third phase."""

    engine: str = "qh3"
    seconds: float = 3.0
    per_second: float = 200.0
    quiet_bytes: int = 256
    noisy_bytes: int = 512
    noisy_batch: int = 64
    noisy_shards: int = 4
    noisy_records_max: int = 600_000
    quota_bytes: int = 4 << 20
    repeats: int = 3


class PhaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One phase over all rounds. `p50_ratio`, `p99_ratio`: against the phase alone; `p99_of_control`: against that beside noise at another
    broker; `noise`: bytes per second that reached the noisy
    tenant's subscriber."""

    phase: str
    latency: LatencySpread
    p50_ratio: Spread
    p99_ratio: Spread
    p99_of_control: Spread
    noise: Spread
    account: Account


class FairnessReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks fairness --json` prints."""

    kind: str
    machine: Machine
    plan: FairnessPlan
    seconds: float
    results: list[PhaseResult]

    @property
    def is_lossless(self) -> bool:
        return all(result.account.is_lossless for result in self.results)


def measure_fairness(
    plan: FairnessPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> FairnessReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for a while.

    Raises UnavailableError where a process fails or does not finish.
    """
    begun = time.monotonic()
    latencies: dict[str, list[Latency]] = {phase: [] for phase in PHASES}
    noises: dict[str, list[float]] = {phase: [] for phase in PHASES}
    accounts = dict.fromkeys(PHASES, Account())
    with (
        tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as home,
        Processes(begun + WHOLE_TIMEOUT_S, what="The measurement of fairness") as processes,
    ):
        shared, other = Path(home) / "shared", Path(home) / "other"
        for each in (shared, other):
            processes.answer(processes.start(broker, each, plan.engine))
        quiet = _Tenant(processes, shared, plan.engine, QUIET)
        noisy, far = (_Tenant(processes, each, plan.engine, NOISY) for each in (shared, other))
        for number in range(plan.repeats):
            for phase in PHASES:
                said(f"{phase}, round {number + 1} of {plan.repeats}")
                limits = QuotaLimits(publish_bytes=plan.quota_bytes, delivery_bytes=plan.quota_bytes)
                asyncio.run(_set_quota(shared, limits if phase == BOUND else None))
                beside = {ALONE: None, ELSEWHERE: far}.get(phase, noisy)
                latency, noise, account = _phase(plan, quiet, beside)
                latencies[phase].append(latency)
                noises[phase].append(noise)
                accounts[phase] += account
    return FairnessReport(
        kind="fairness",
        machine=machine(),
        plan=plan,
        seconds=time.monotonic() - begun,
        results=[_result(phase, latencies, noises[phase], accounts[phase]) for phase in PHASES],
    )


def _phase(plan: FairnessPlan, quiet: _Tenant, noisy: _Tenant | None) -> tuple[Latency, float, Account]:
    """One phase on new streams: the quiet tenant's latency, the noise, and the books of both."""
    lone = Load(plan.seconds, 1 << 20, batches_per_second=plan.per_second)
    quiet.prepare(Case(plan.engine, "fsync", plan.quiet_bytes, 1), 1)
    # The first records find everything cold: nobody's latency.
    quiet.begin(Load(0.2, 1 << 20, batches_per_second=plan.per_second))
    quiet.finish()
    noise, account = 0.0, Account()
    if noisy is not None:
        noisy.prepare(Case(plan.engine, "fsync", plan.noisy_bytes, plan.noisy_batch), plan.noisy_shards)
        noisy.begin(Load(LEAD_S + plan.seconds + TRAIL_S, plan.noisy_records_max))
        time.sleep(LEAD_S)
    quiet.begin(lone)
    got = quiet.finish()
    account += got.account
    if noisy is not None:
        heard = noisy.finish()
        account += heard.account
        noise = heard.rate * plan.noisy_bytes
        noisy.release()
    quiet.release()
    assert got.latency is not None
    return got.latency, noise, account


class _Tenant:
    """A publisher and a subscriber in processes of their own."""

    def __init__(self, processes: Processes, home: Path, engine: str, tenant: str) -> None:
        self._processes = processes
        self._tenant = tenant
        self._streams = 0
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

    def prepare(self, case: Case, shards: int) -> None:
        self._streams += 1
        wanted = Prepare(f"{self._tenant}/fairness/run-{self._streams}", case, shards, followed=True)
        self._ask(self._publisher, wanted)
        self._ask(self._subscriber, wanted)

    def begin(self, load: Load) -> None:
        self._publisher.send(load)

    def finish(self) -> Got:
        """Wait for what was begun, and until its subscriber has everything."""
        sent: Sent = self._processes.answer(self._publisher)
        got: Got = self._ask(self._subscriber, Collect(sent))
        return got

    def release(self) -> None:
        self._ask(self._subscriber, Release())
        self._ask(self._publisher, Release())


async def _set_quota(home: Path, limits: QuotaLimits | None) -> None:
    profile = await asyncio.to_thread(load_profile, REGION, home=home)
    async with felix.connect(profile=profile) as client:
        if limits is None:
            await client.delete_quota("tenant", NOISY)
        else:
            await client.put_quota("tenant", NOISY, limits)


def _result(
    phase: str, latencies: dict[str, list[Latency]], noises: list[float], account: Account
) -> PhaseResult:
    spread = LatencySpread.of(latencies[phase])
    assert spread is not None
    pairs = list(zip(latencies[phase], latencies[ALONE], strict=True))
    controls = zip(latencies[phase], latencies[ELSEWHERE], strict=True)
    return PhaseResult(
        phase=phase,
        latency=spread,
        p50_ratio=Spread.of([held.p50_us / alone.p50_us for held, alone in pairs]),
        p99_ratio=Spread.of([held.p99_us / alone.p99_us for held, alone in pairs]),
        p99_of_control=Spread.of([held.p99_us / control.p99_us for held, control in controls]),
        noise=Spread.of(noises),
        account=account,
    )
