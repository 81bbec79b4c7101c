"""`python -m benchmarks fanout`, `queue` and `cache`: Felix beside Redis and NATS, on the same payloads in the same run. The modules
fanout, queueing and caching say how it is measured.

What is not installed is left out, with a sentence that says how to get it; that is no failure.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Annotated, Final

import msgspec
import typer
from rich.table import Table

from benchmarks.caching import STAMP_BYTES, CacheAccount, CachePlan, CacheReport, measure_cache
from benchmarks.fanout import FanoutPlan, FanoutReport, FanoutResult, measure_fanout
from benchmarks.options import FolderOption, JsonOption, QuickOption, measured
from benchmarks.queueing import QueueAccount, QueuePlan, QueueReport, measure_queue
from benchmarks.systems import CACHES, FELIX, QUEUES, SYSTEMS
from cli.benchmark.accounting import PAYLOAD_BYTES_MIN, Account
from cli.benchmark.figures import LatencySpread, Spread
from cli.exits import EXIT_UNRECONCILED
from cli.output import err, out, print_json
from felix.batch import BATCH_BYTES_MAX
from felix.errors import Code, RequestError

QUICK_FANOUT: Final = FanoutPlan(subscribers=(1, 4), repeats=1, load_s=0.4, paced_s=0.4, budget_s=45)
QUICK_QUEUE: Final = QueuePlan(repeats=1, jobs=2_000, paced_jobs=60, budget_s=45)
QUICK_CACHE: Final = CachePlan(repeats=1, calls=2_000, lone_calls=300, budget_s=45)
SUBSCRIBERS_MAX: Final = 64


SystemOption = Annotated[
    list[str] | None, typer.Option("--system", help=f"Of {', '.join(SYSTEMS)}; may be repeated.")
]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", help="Rounds over all cases; 0: 3, or 1 with --quick.", min=0, max=100)
]


def fanout(
    system: SystemOption = None,
    subscribers: Annotated[
        list[int] | None, typer.Option("--subscribers", help="How many; may be repeated: 1, 4, 16.")
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option("--size", help="Bytes of one payload; may be repeated.")
    ] = None,
    chunk: Annotated[
        int, typer.Option("--chunk", help="Records handed over at a time.", min=1, max=1024)
    ] = FanoutPlan().chunk,
    repeats: RepeatsOption = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """One publisher, many subscribers: records per second and latency, beside Redis and NATS where they are installed."""
    plan = fanout_plan_of(system, subscribers, size, chunk, repeats, quick)
    report = measured(lambda said: measure_fanout(plan, folder, said), logging.WARNING)
    _say_skipped(report.skipped)
    if not report.is_lossless:
        print_losses([(str(result.case), result.account) for result in report.results])
        raise typer.Exit(EXIT_UNRECONCILED)
    if json:
        print_json(report, kind="Benchmark")
    else:
        print_fanout(report)


def fanout_plan_of(
    systems: Sequence[str] | None,
    subscribers: Sequence[int] | None,
    sizes: Sequence[int] | None,
    chunk: int,
    repeats: int,
    quick: bool,
) -> FanoutPlan:
    """The plan that the options ask for. Raises RequestError(INVALID)."""
    plan = QUICK_FANOUT if quick else FanoutPlan()
    chosen = msgspec.structs.replace(
        plan,
        systems=known_systems(systems, SYSTEMS) or plan.systems,
        subscribers=tuple(subscribers or plan.subscribers),
        payload_bytes=tuple(sizes or plan.payload_bytes),
        chunk=chunk,
        repeats=repeats or plan.repeats,
    )
    for count in chosen.subscribers:
        if not 1 <= count <= SUBSCRIBERS_MAX:
            raise RequestError(
                f"{count} subscribers cannot be measured.",
                code=Code.INVALID,
                hint=f"From 1 to {SUBSCRIBERS_MAX}.",
            )
    for each in chosen.payload_bytes:
        if each < PAYLOAD_BYTES_MIN or (each + 8) * chunk > BATCH_BYTES_MAX // 2:
            raise RequestError(
                f"{chunk} records of {each} bytes cannot be measured.",
                code=Code.INVALID,
                hint=f"A payload has {PAYLOAD_BYTES_MIN} bytes at least (they carry the accounting), "
                f"a chunk {BATCH_BYTES_MAX // 2} at most.",
            )
    return chosen


def queue(
    system: Annotated[
        list[str] | None, typer.Option("--system", help=f"Of {', '.join(QUEUES)}; may be repeated.")
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option("--workers", help="How many; may be repeated: 1, 8.", min=1, max=64)
    ] = None,
    size: Annotated[
        int, typer.Option("--size", help="Bytes of one payload.", min=PAYLOAD_BYTES_MIN, max=65_536)
    ] = QueuePlan().payload_bytes,
    lease: Annotated[
        int, typer.Option("--lease", help="Jobs leased and acknowledged at a time.", min=1, max=256)
    ] = QueuePlan().lease,
    jobs: Annotated[
        int, typer.Option("--jobs", help="Of each burst; 0: 8,000, or 2,000 with --quick.", min=0)
    ] = 0,
    repeats: RepeatsOption = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """Put, lease, acknowledge: jobs per second and latency, beside Redis and JetStream where they are installed."""
    plan = QUICK_QUEUE if quick else QueuePlan()
    plan = msgspec.structs.replace(
        plan,
        systems=known_systems(system, QUEUES) or plan.systems,
        workers=tuple(workers or plan.workers),
        payload_bytes=size,
        lease=lease,
        jobs=jobs or plan.jobs,
        repeats=repeats or plan.repeats,
    )
    report = measured(lambda said: measure_queue(plan, folder, said), logging.WARNING)
    _say_skipped(report.skipped)
    if not report.is_lossless:
        print_losses([(str(result.case), result.account) for result in report.results])
        raise typer.Exit(EXIT_UNRECONCILED)
    if json:
        print_json(report, kind="Benchmark")
    else:
        print_queue(report)


def cache(
    system: Annotated[
        list[str] | None, typer.Option("--system", help=f"Of {', '.join(CACHES)}; may be repeated.")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", help="Calls under way; may be repeated: 1, 32.", min=1, max=256),
    ] = None,
    size: Annotated[
        int, typer.Option("--size", help="Bytes of one value.", min=STAMP_BYTES, max=65_536)
    ] = CachePlan().value_bytes,
    calls: Annotated[
        int, typer.Option("--calls", help="Of each operation; 0: 5,000, or 2,000 with --quick.", min=0)
    ] = 0,
    repeats: RepeatsOption = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """Put and get: calls per second and latency, beside Redis and NATS where they are installed."""
    plan = QUICK_CACHE if quick else CachePlan()
    plan = msgspec.structs.replace(
        plan,
        systems=known_systems(system, CACHES) or plan.systems,
        concurrency=tuple(concurrency or plan.concurrency),
        value_bytes=size,
        calls=calls or plan.calls,
        repeats=repeats or plan.repeats,
    )
    report = measured(lambda said: measure_cache(plan, folder, said), logging.WARNING)
    _say_skipped(report.skipped)
    if not report.is_lossless:
        print_losses([(str(result.case), result.account) for result in report.results])
        raise typer.Exit(EXIT_UNRECONCILED)
    if json:
        print_json(report, kind="Benchmark")
    else:
        print_cache(report)


def known_systems(systems: Sequence[str] | None, known: Collection[str]) -> tuple[str, ...]:
    """Raises RequestError(INVALID) where one is not known."""
    for name in systems or ():
        if name not in known:
            raise RequestError(
                f"There is no system {name!r}.", code=Code.INVALID, hint=f"One of {', '.join(known)}."
            )
    return tuple(systems or ())


def _say_skipped(skipped: Sequence[str]) -> None:
    for sentence in skipped:
        err.print(sentence)


def print_losses(accounts: Sequence[tuple[str, Account | QueueAccount | CacheAccount]]) -> None:
    """The books of every case that does not reconcile, on standard error."""
    for case, account in accounts:
        if not account.is_lossless:
            items = msgspec.to_builtins(account).items()
            found = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in items)
            err.print(f"{case}: not lossless: {found}", style="bold red")
    err.print("No rate stands for what was lost, repeated or wrong.")


def print_fanout(report: FanoutReport) -> None:
    """A table for people."""
    table = Table(
        title="One publisher, n subscribers: median of the rounds (lowest – highest)",
        title_justify="left",
        header_style="bold",
        pad_edge=False,
    )
    for column in ("n", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("system")
    table.add_column("an acknowledged record is")
    for column in ("delivered records/s", *(f"{name} is" for name in FELIX), "single p50 / p99 ms"):
        table.add_column(column, justify="right")
    shape = None
    for result in sorted(report.results, key=_in_order):
        case = result.case
        if shape not in (None, (case.subscribers, case.payload_bytes)):
            table.add_section()
        shape = (case.subscribers, case.payload_bytes)
        table.add_row(
            str(case.subscribers),
            f"{case.payload_bytes:,}",
            case.system,
            result.promise,
            spread(result.delivered_per_second, 0),
            *(ratio(result.felix.get(name)) for name in FELIX),
            latency(result.paced),
        )
    out.print(table)
    records = sum(result.account.received for result in report.results)
    _print_end(f"{records:,} records delivered, to each subscriber once, in order and unchanged", report)


def print_queue(report: QueueReport) -> None:
    """A table for people."""
    table = _table(
        "Queues: median of the rounds (lowest – highest)",
        ("workers", "system", "an acknowledged job is"),
        (
            "put/s",
            "finished/s",
            "Felix puts",
            "Felix finishes",
            "put to hand p50 / p99 ms",
            "ack p50 / p99 ms",
        ),
    )
    workers = 0
    for result in sorted(
        report.results, key=lambda each: (each.case.workers, QUEUES.index(each.case.system))
    ):
        if workers not in (0, result.case.workers):
            table.add_section()
        workers = result.case.workers
        table.add_row(
            str(workers),
            result.case.system,
            result.promise,
            spread(result.put_per_second, 0),
            spread(result.finished_per_second, 0),
            ratio(result.felix_put),
            ratio(result.felix),
            latency(result.to_hand),
            latency(result.to_ack),
        )
    out.print(table)
    jobs = sum(result.account.finished for result in report.results)
    _print_end(f"{jobs:,} jobs, each finished once and nothing left", report)


def print_cache(report: CacheReport) -> None:
    """A table for people."""
    table = _table(
        "Caches: median of the rounds (lowest – highest)",
        ("at once", "system", "an acknowledged put is"),
        ("get/s", "put/s", "Felix gets", "Felix puts", "get p50 / p99 ms", "put p50 / p99 ms"),
    )
    concurrency = 0
    for result in sorted(
        report.results, key=lambda each: (each.case.concurrency, CACHES.index(each.case.system))
    ):
        if concurrency not in (0, result.case.concurrency):
            table.add_section()
        concurrency = result.case.concurrency
        table.add_row(
            str(concurrency),
            result.case.system,
            result.promise,
            spread(result.get_per_second, 0),
            spread(result.put_per_second, 0),
            ratio(result.felix_get),
            ratio(result.felix_put),
            latency(result.get),
            latency(result.put),
        )
    out.print(table)
    got = sum(result.account.got for result in report.results)
    _print_end(f"{got:,} gets, each of the newest value", report)


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for column in words:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _print_end(what: str, report: FanoutReport | QueueReport | CacheReport) -> None:
    servers = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    out.print(
        f"{what}, in {report.seconds:.0f} s on {report.machine.cpus} CPUs, Python {report.machine.python}"
        f"{'; ' + servers if servers else ''}"
    )


def _in_order(result: FanoutResult) -> tuple[int, int, int]:
    case = result.case
    return case.payload_bytes, case.subscribers, list(SYSTEMS).index(case.system)


def spread(figure: Spread, digits: int, factor: float = 1.0) -> str:
    """Median, and lowest to highest where there was more than one round."""
    middle = f"{figure.median * factor:,.{digits}f}"
    if len(figure.values) == 1:
        return middle
    return f"{middle} ({figure.low * factor:,.{digits}f} – {figure.high * factor:,.{digits}f})"


def ratio(figure: Spread | None) -> str:
    """How many times as fast Felix is."""
    return "" if figure is None else spread(figure, 2) + " ×"


def latency(figure: LatencySpread | None) -> str:
    """p50 and p99 in ms."""
    return "" if figure is None else f"{figure.p50_us.median / 1e3:.2f} / {figure.p99_us.median / 1e3:.2f}"
