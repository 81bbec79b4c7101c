"""`python -m benchmarks fairness` and `python -m benchmarks slow-consumer`: what one client notices of another. The modules fairness and slow_consumer
say how it is measured.
"""

from __future__ import annotations

import logging
from typing import Annotated, Final

import msgspec
import typer
from rich.table import Table

from benchmarks.fairness import ELSEWHERE, FairnessPlan, FairnessReport, measure_fairness
from benchmarks.options import FolderOption, JsonOption, QuickOption, measured
from benchmarks.slow_consumer import SlowPlan, SlowReport, measure_slow_consumer
from cli.benchmark.accounting import Account
from cli.benchmark.figures import LatencySpread, Spread
from cli.exits import EXIT_UNRECONCILED
from cli.output import err, out, print_json
from felix.errors import Code, RequestError
from felix.transport.port import ENGINE_NAMES
from policy.quantity import Rate, Size

QUICK_FAIRNESS: Final = FairnessPlan(seconds=1.0, repeats=1)
QUICK_SLOW: Final = SlowPlan(seconds=1.0, repeats=1, backlog_bytes=80 << 20)
ENGINE: Final = FairnessPlan().engine
PER_SECOND: Final = FairnessPlan().per_second
QUOTA: Final = str(Rate(FairnessPlan().quota_bytes))
LOGGED: Final = logging.ERROR
"""Sessions that are slowed down say so, as they should; here it is what is asked for."""
BACKLOG_BYTES_MIN: Final = 80 << 20
"""Ten times what a shard keeps in memory."""


EngineOption = Annotated[str, typer.Option("--engine", help=f"Of {', '.join(ENGINE_NAMES)}.")]
SecondsOption = Annotated[
    float, typer.Option("--seconds", help="Of each phase; 0: 3, or 1 with --quick.", min=0, max=60)
]
PaceOption = Annotated[
    float, typer.Option("--per-second", help="Single records that are followed.", min=10, max=2000)
]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", help="Rounds; 0: 3, or 1 with --quick.", min=0, max=100)
]


def fairness(
    quota: Annotated[
        str, typer.Option("--quota", help="Of the noisy tenant in the last phase, for each direction.")
    ] = QUOTA,
    engine: EngineOption = ENGINE,
    seconds: SecondsOption = 0.0,
    per_second: PaceOption = PER_SECOND,
    repeats: RepeatsOption = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """Latency of a quiet tenant alone, beside a noisy one at another broker and at its own, and beside it with a quota."""
    plan = QUICK_FAIRNESS if quick else FairnessPlan()
    plan = msgspec.structs.replace(
        plan,
        engine=_known(engine),
        seconds=seconds or plan.seconds,
        per_second=per_second,
        quota_bytes=int(Rate.parse(quota)),
        repeats=repeats or plan.repeats,
    )
    report = measured(lambda said: measure_fairness(plan, folder, said), LOGGED)
    settle([(result.phase, result.account) for result in report.results])
    print_json(report, kind="Benchmark") if json else print_fairness(report)


def slow_consumer(
    backlog: Annotated[
        str, typer.Option("--backlog", help="Published while the slow one takes nothing; 80 MiB or more.")
    ] = "",
    engine: EngineOption = ENGINE,
    seconds: SecondsOption = 0.0,
    per_second: PaceOption = PER_SECOND,
    repeats: RepeatsOption = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """Memory of the broker and latency of others beside a subscriber that takes nothing, and while it catches up."""
    plan = QUICK_SLOW if quick else SlowPlan()
    plan = msgspec.structs.replace(
        plan,
        engine=_known(engine),
        seconds=seconds or plan.seconds,
        per_second=per_second,
        backlog_bytes=int(Size.parse(backlog)) if backlog else plan.backlog_bytes,
        repeats=repeats or plan.repeats,
    )
    if plan.backlog_bytes < BACKLOG_BYTES_MIN:
        raise RequestError(
            f"A backlog of {Size(plan.backlog_bytes)} shows nothing.",
            code=Code.INVALID,
            hint=f"At least {Size(BACKLOG_BYTES_MIN)}, ten times what a shard keeps in memory.",
        )
    report = measured(lambda said: measure_slow_consumer(plan, folder, said), LOGGED)
    settle([("the one that reads", report.reader), ("the slow one", report.slow)])
    print_json(report, kind="Benchmark") if json else print_slow(report)
    if not report.memory.is_within:
        err.print("The broker took more memory than its limits allow.", style="bold red")
        raise typer.Exit(EXIT_UNRECONCILED)


def _known(engine: str) -> str:
    if engine not in ENGINE_NAMES:
        raise RequestError(
            f"There is no engine {engine!r}.",
            code=Code.INVALID,
            hint=f"One of {', '.join(ENGINE_NAMES)}.",
        )
    return engine


def settle(books: list[tuple[str, Account]]) -> None:
    """Exit code 6 where a record was lost, repeated, changed or out of order."""
    wrong = [(what, account) for what, account in books if not account.is_lossless]
    for what, account in wrong:
        found = ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in msgspec.to_builtins(account).items()
        )
        err.print(f"{what}: not lossless: {found}", style="bold red")
    if wrong:
        err.print("No latency stands for records that did not all come once and in order.")
        raise typer.Exit(EXIT_UNRECONCILED)


def print_fairness(report: FairnessReport) -> None:
    """A table for people."""
    plan = report.plan
    table = _table(
        f"A quiet tenant, {plan.per_second:.0f} durable records a second, beside a noisy one: median of the rounds "
        "(lowest – highest)",
        ("p50 / p99 ms", "p50 of alone", "p99 of alone", "p99 of control", "noise MB/s"),
    )
    for result in report.results:
        table.add_row(
            result.phase,
            _latency(result.latency),
            spread_of(result.p50_ratio),
            spread_of(result.p99_ratio),
            spread_of(result.p99_of_control),
            f"{result.noise.median / 1e6:,.1f}" if result.noise.median else "",
        )
    out.print(table)
    out.print(f"the control: {ELSEWHERE}, where only processors and disk are shared")
    out.print(f"the quota: {Rate(plan.quota_bytes)} of publishing, and the same of delivery")
    _closing(sum((result.account for result in report.results), Account()), plan.repeats, report.seconds)


def print_slow(report: SlowReport) -> None:
    """A table for people."""
    plan, memory = report.plan, report.memory
    table = _table(
        f"{plan.per_second:.0f} durable records a second to a subscriber, beside one with a backlog of "
        f"{plan.backlog_bytes >> 20} MiB: median of the rounds (lowest – highest)",
        ("p50 / p99 ms", "p50 of alone", "p99 of alone"),
    )
    for phase in report.phases:
        table.add_row(
            phase.phase, _latency(phase.latency), spread_of(phase.p50_ratio), spread_of(phase.p99_ratio)
        )
    out.print(table)
    out.print(f"the slow one caught up with {report.catch_up.median / 1e6:,.0f} MB/s")
    grown = memory.resident_most - memory.resident_before
    out.print(
        f"the broker's resident memory: {memory.resident_before >> 20} MiB before, {grown >> 20} MiB more at most; "
        f"its limits allow {memory.growth_allowed >> 20} MiB more"
    )
    used = ", ".join(
        f"{name} {most / (1 << 20):.1f} of {limit >> 20}"
        for name, (most, limit) in memory.budgets.items()
        if most
    )
    out.print(f"budgets at most, in MiB: {used}")
    _closing(report.reader + report.slow, plan.repeats, report.seconds)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _closing(account: Account, rounds: int, seconds: float) -> None:
    out.print(
        f"{account.received:,} records, each found once, in order and unchanged; {rounds} "
        f"round{'s' if rounds > 1 else ''} in {seconds:.0f} s"
    )


def spread_of(spread: Spread) -> str:
    if len(spread.values) == 1:
        return f"{spread.median:.2f}"
    return f"{spread.median:.2f} ({spread.low:.2f} – {spread.high:.2f})"


def _latency(latency: LatencySpread) -> str:
    return f"{latency.p50_us.median / 1e3:.2f} / {latency.p99_us.median / 1e3:.2f}"
