"""`felix bench report`: how long a report takes, over how many audited records. cli.benchmark.reporting measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.benchmark.reporting import QUICK_SIZES, RECORDS_MAX, SIZES, ReportPlan, ReportTimes, measure_reports
from cli.exits import EXIT_UNRECONCILED
from cli.output import err, out, print_json, table


def report(
    records: Annotated[
        list[int] | None,
        typer.Option(
            help=f"Records of the logs; may be repeated. Left out: {', '.join(f'{size:,}' for size in SIZES)}.",
            min=1,
            max=RECORDS_MAX,
        ),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            "--batch",
            help="Records of one batch. Long ones stand in several leaves, which the two sides cut differently.",
            min=1,
            max=50_000,
        ),
    ] = ReportPlan().batch_records,
    streams: Annotated[int, typer.Option("--streams", help="Streams that cross.", min=1, max=1_000)] = 2,
    shards: Annotated[int, typer.Option("--shards", help="Shards of each stream.", min=1, max=64)] = 2,
    master: Annotated[str, typer.Option(help="A Spark master; this machine if left out.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{', '.join(f'{size:,}' for size in QUICK_SIZES)} records.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            help="Where the logs go for the while (default: the folder for temporary files): 140 bytes a record.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time of `felix audit report` over synthetic logs of several sizes; exit code 6 where a record is not accounted for."""
    plan = ReportPlan(
        sizes=tuple(records or (QUICK_SIZES if quick else SIZES)),
        batch_records=batch,
        streams=streams,
        shards=shards,
        master=master or None,
    )
    with err.console.status("starting") as status:
        times = measure_reports(plan, folder, status.update)
    if not times.is_accounted:
        for size in times.sizes:
            for problem in size.problems:
                err.print(f"{size.records:,} records: {problem}", style="bold red")
        err.print("No rate stands for records that a report does not account for.")
        raise typer.Exit(EXIT_UNRECONCILED)
    if json:
        print_json(times)
    else:
        print_times(times)


def print_times(times: ReportTimes) -> None:
    """A table for people."""
    table(
        f"felix audit report, batches of {times.plan.batch_records:,}",
        ["records#", "leaves#", "logs MB#", "seconds#", "records/s#", "CPU s#", "CPU µs a record#", "largest process MiB#", "all processes MiB#", "logs made in s#"],
        [
            [
                size.records,
                size.books.egress_leaves + size.books.ingress_leaves,
                f"{size.books.log_bytes / 1e6:,.0f}",
                size.seconds,
                f"{size.rate:,.0f}",
                size.cpu_seconds,
                f"{size.cpu_seconds / size.records * 1e6:,.1f}",
                size.process_bytes_max >> 20,
                size.tree_bytes_max >> 20 or None,
                size.made_s,
            ]
            for size in times.sizes
        ],
    )  # fmt: skip
    whole = sum(size.records for size in times.sizes)
    out.print(
        f"{whole:,} records, each accounted for: crossed or withheld once, acknowledged and delivered once, alike on both "
        f"sides; on {times.machine.cpus} CPUs, Python {times.machine.python}"
    )
