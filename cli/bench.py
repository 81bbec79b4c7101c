"""`felix bench`: what Felix moves on this machine, and how long a record takes. cli.benchmark says how it is measured.

A rate is printed only for what came whole, once and in order; otherwise the books are printed, and the exit code is 6.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.table import Table

from cli import bench_report
from cli.benchmark.accounting import PAYLOAD_BYTES_MIN
from cli.benchmark.crossing import ENGINES, CrossingPlan, CrossingReport, measure_crossing
from cli.benchmark.figures import LatencySpread, Spread
from cli.benchmark.measurement import DURABILITIES, CaseResult, Kind, Plan, Report, measure
from cli.exits import EXIT_UNRECONCILED
from cli.output import err, out, print_json
from felix.batch import BATCH_BYTES_MAX
from felix.errors import Code, RequestError
from felix.transport.port import ENGINE_NAMES

QUICK: Final = Plan(
    kind="publish",
    payload_bytes=(256,),
    repeats=1,
    load_s=0.4,
    paced_s=0.3,
    relay_bytes=16 << 20,
    budget_s=45,
)
"""Well under a minute."""

QUICK_CROSSING: Final = CrossingPlan(records=20_000, lone_records=100, repeats=1)
CROSSING_BATCH_MAX: Final = 2_000
"""Records of some 340 bytes, each with an audit entry: well below what one batch and its leaves may have."""

app = typer.Typer(no_args_is_help=True)
app.command("report")(bench_report.report)


EngineOption = Annotated[
    list[str] | None, typer.Option("--engine", help=f"Of {', '.join(ENGINE_NAMES)}; may be repeated.")
]
DurabilityOption = Annotated[
    list[str] | None, typer.Option("--durability", help=f"Of {', '.join(DURABILITIES)}; may be repeated.")
]
SizeOption = Annotated[
    list[int] | None, typer.Option("--size", help="Bytes of one record's payload; may be repeated.")
]
BatchOption = Annotated[
    list[int] | None, typer.Option("--batch", help="Records of one batch; may be repeated.")
]
ShardsOption = Annotated[int, typer.Option("--shards", help="Shards of the stream.", min=1, max=64)]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", help="Rounds over all cases; 0: 3, or 1 with --quick.", min=0, max=100)
]
QuickOption = Annotated[bool, typer.Option("--quick", help="One short round, under a minute.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, with the values of every round.")]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        help="Where the measured state goes for the while (default: the folder for temporary files). "
        "Name one on the disk that is to be measured.",
        exists=True,
        file_okay=False,
    ),
]


@app.command("publish")
def publish(
    engine: EngineOption = None,
    durability: DurabilityOption = None,
    size: SizeOption = None,
    batch: BatchOption = None,
    shards: ShardsOption = 1,
    repeats: RepeatsOption = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """Acknowledged records per second, and how long an acknowledgement takes."""
    _bench(plan_of("publish", engine, durability, size, batch, shards, repeats, quick), folder, json)


@app.command("deliver")
def deliver(
    engine: EngineOption = None,
    durability: DurabilityOption = None,
    size: SizeOption = None,
    batch: BatchOption = None,
    shards: ShardsOption = 1,
    repeats: RepeatsOption = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """Records per second from a publisher to a subscriber, and how long a record takes on the way."""
    _bench(plan_of("deliver", engine, durability, size, batch, shards, repeats, quick), folder, json)


@app.command("bridge")
def bridge(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            help=f"Of {', '.join(ENGINE_NAMES)}; may be repeated; {', '.join(ENGINES)} if left out.",
        ),
    ] = None,
    records: Annotated[
        int, typer.Option("--records", help="Of each burst; 0: 50,000, or 20,000 with --quick.", min=0)
    ] = 0,
    batch: Annotated[
        int, typer.Option("--batch", help="Records of one batch.", min=1, max=CROSSING_BATCH_MAX)
    ] = CrossingPlan().batch_records,
    shards: ShardsOption = 1,
    repeats: RepeatsOption = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """Records per second from one region into another under a grant, audited, and how long a record takes."""
    plan = crossing_plan_of(engine, records, batch, shards, repeats, quick)
    logging.getLogger("felix").setLevel(logging.WARNING)
    with err.console.status("starting") as status:
        report = measure_crossing(plan, folder, status.update)
    if not report.is_reconciled:
        for result in report.results:
            for problem in result.settlement.problems:
                err.print(f"{result.engine}: does not reconcile: {problem}", style="bold red")
        err.print("No rate stands for records that did not all cross once, audited.")
        raise typer.Exit(EXIT_UNRECONCILED)
    if json:
        print_json(report)
    else:
        print_crossing(report)


def crossing_plan_of(
    engines: list[str] | None, records: int, batch: int, shards: int, repeats: int, quick: bool
) -> CrossingPlan:
    """The plan that the options ask for. Raises RequestError(INVALID)."""
    plan = QUICK_CROSSING if quick else CrossingPlan()
    _require_known("engine", engines or (), ENGINE_NAMES)
    return msgspec.structs.replace(
        plan,
        engines=tuple(engines or plan.engines),
        records=records or plan.records,
        batch_records=batch,
        shards=shards,
        repeats=repeats or plan.repeats,
    )


def _require_known(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    for value in values:
        if value not in known:
            raise RequestError(
                f"There is no {name} {value!r}.",
                code=Code.INVALID,
                hint=f"One of {', '.join(known)}.",
            )


def plan_of(
    kind: Kind,
    engines: list[str] | None,
    durabilities: list[str] | None,
    sizes: list[int] | None,
    batches: list[int] | None,
    shards: int,
    repeats: int,
    quick: bool,
) -> Plan:
    """The plan that the options ask for. Raises RequestError(INVALID)."""
    plan = QUICK if quick else Plan(kind=kind)
    chosen = msgspec.structs.replace(
        plan,
        kind=kind,
        engines=tuple(engines or plan.engines),
        durabilities=tuple(durabilities or plan.durabilities),
        payload_bytes=tuple(sizes or plan.payload_bytes),
        batch_records=tuple(batches or plan.batch_records),
        shards=shards,
        repeats=repeats or plan.repeats,
    )
    _require_known("engine", chosen.engines, ENGINE_NAMES)
    _require_known("durability", chosen.durabilities, DURABILITIES)
    for size in chosen.payload_bytes:
        for batch in chosen.batch_records:
            if size < PAYLOAD_BYTES_MIN or batch < 1 or (size + 8) * batch > BATCH_BYTES_MAX // 2:
                raise RequestError(
                    f"{batch} records of {size} bytes cannot be measured.",
                    code=Code.INVALID,
                    hint=f"A payload has {PAYLOAD_BYTES_MIN} bytes at least (they carry the accounting), "
                    f"a batch {BATCH_BYTES_MAX // 2} at most.",
                )
    return chosen


def _bench(plan: Plan, folder: Path | None, json: bool) -> None:
    # The broker's sessions come and go a lot here; only what is wrong is of interest.
    logging.getLogger("felix").setLevel(logging.WARNING)
    with err.console.status("starting") as status:
        report = measure(plan, folder, status.update)
    if json:
        print_json(report)
    elif report.is_lossless:
        print_report(report)
    if not report.is_lossless:
        print_losses(report)
        raise typer.Exit(EXIT_UNRECONCILED)


def print_losses(report: Report) -> None:
    """The books of every case that does not reconcile, on standard error."""
    for result in report.results:
        if not result.account.is_lossless:
            account = msgspec.to_builtins(result.account)
            found = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in account.items())
            err.print(f"{result.case}: not lossless: {found}", style="bold red")
    err.print("No rate stands for records that did not all come once and in order.")


def print_report(report: Report) -> None:
    """Tables for people."""
    what = "acknowledged" if report.kind == "publish" else "delivered"
    shape = f"{report.plan.shards} shard" + ("s" if report.plan.shards > 1 else "")
    title = f"{what.capitalize()}, {shape}: median of the rounds (lowest – highest)"
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for column in ("engine", "durability"):
        table.add_column(column)
    for column in (
        "bytes", "batch", "records/s", "MB/s", "relay MB/s", "of relay",
        "half load p50 / p99 ms", "full load p50 / p99 ms", "lone p50 / p99 ms",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for result in report.results:
        table.add_row(*_row(result))
    out.print(table)
    for yardstick in report.yardsticks:
        out.print(f"raw QUIC echo over {yardstick.engine}: {_latency(yardstick.echo)} ms")
    out.print(f"one write and fdatasync: {_latency(report.sync)} ms")
    records = sum(result.account.published for result in report.results)
    rounds = max(result.repeats for result in report.results)
    out.print(
        f"{records:,} records published, each found once, in order and unchanged; {rounds} "
        f"round{'s' if rounds > 1 else ''} in {report.seconds:.0f} s on {report.machine.cpus} CPUs, "
        f"Python {report.machine.python}"
    )


def print_crossing(report: CrossingReport) -> None:
    """Tables for people."""
    shards = report.plan.shards
    for result in report.results:
        table = Table(
            title=f"Across a border over {result.engine}, {shards} shard{'s' if shards > 1 else ''}, batches of "
            f"{report.plan.batch_records}: median of the rounds (lowest – highest)",
            title_justify="left",
            header_style="bold",
            pad_edge=False,
        )
        table.add_column("")
        table.add_column("records/s", justify="right")
        table.add_column("beside it", justify="right")
        table.add_row(
            "crossed, from the first publish to the last arrival",
            _spread(result.crossing, 1, 0),
            _spread(result.of_publish, 100, 1) + " % of publishing",
        )
        table.add_row(
            "crossed, a backlog",
            _spread(result.catch_up, 1, 0),
            _spread(result.of_local, 100, 1) + " % of local",
        )
        table.add_row("published at the source alone, fsync", _spread(result.publish, 1, 0), "")
        table.add_row("read by a local subscriber", _spread(result.local, 1, 0), "")
        out.print(table)
        out.print(
            f"a single record, p50 / p99: {_latency(result.lone)} ms to a subscriber at the destination, "
            f"{_latency(result.lone_publish)} ms to its acknowledgement at the source"
        )
        found = result.settlement
        out.print(
            f"{found.published:,} published = {found.crossed:,} crossed + {found.withheld:,} withheld; "
            f"{found.crossed:,} INTENT entries = {found.acknowledged:,} acknowledged = {found.delivered:,} "
            f"delivered; {found.egress_leaves:,} egress and {found.ingress_leaves:,} ingress leaves verify"
        )
    out.print(f"one write and fdatasync: {_latency(report.sync)} ms")
    rounds = max(result.repeats for result in report.results)
    out.print(
        f"{rounds} round{'s' if rounds > 1 else ''} in {report.seconds:.0f} s on {report.machine.cpus} CPUs, "
        f"Python {report.machine.python}"
    )


def _row(result: CaseResult) -> tuple[str, ...]:
    case = result.case
    return (
        case.engine,
        case.durability,
        f"{case.payload_bytes:,}",
        str(case.batch_records),
        _spread(result.records_per_second, 1, 0),
        f"{result.bytes_per_second.median / 1e6:,.1f}",
        f"{result.relay_bytes_per_second.median / 1e6:,.0f}",
        _spread(result.share, 100, 1) + " %",
        _latency(result.half),
        _latency(result.loaded),
        _latency(result.lone),
    )


def _spread(spread: Spread, factor: float, digits: int) -> str:
    middle = f"{spread.median * factor:,.{digits}f}"
    if len(spread.values) == 1:
        return middle
    return f"{middle} ({spread.low * factor:,.{digits}f} – {spread.high * factor:,.{digits}f})"


def _latency(latency: LatencySpread | None) -> str:
    if latency is None:
        return ""
    return f"{latency.p50_us.median / 1e3:.2f} / {latency.p99_us.median / 1e3:.2f}"
