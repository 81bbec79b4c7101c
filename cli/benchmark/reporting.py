"""How long a report takes over how many records: logs of several sizes are made, and `run_report` is run over each.

Each size has a process of its own (with its own JVM), so that CPU seconds and memory are that size's alone. No rate
stands unless the report accounts for every record that was made: crossed, withheld, acknowledged, delivered, bytes and
leaves are compared with the books that the maker of the logs kept, and both sides must reconcile without a finding.
"""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from cli.benchmark.audit_logs import LogBooks, LogPlan, make_logs
from cli.benchmark.measurement import Machine, machine
from cli.benchmark.tree_memory import TreeMemory
from felix.errors import UnavailableError

if TYPE_CHECKING:
    from audit.spark.report import ReportResult

SIZES: Final = (200_000, 2_000_000, 20_000_000)
QUICK_SIZES: Final = (10_000, 50_000, 200_000)
RECORDS_MAX: Final = 200_000_000
"""Some 28 GB of logs."""
LOG_BYTES_PER_RECORD: Final = 140
"""An entry of 68 bytes on each side: for asking whether the disk has room."""
LOG_BYTES_PER_BATCH: Final = 3_000
"""Headers of INTENT, receipt and arrival, and their hashes in tiles (measured: 2,900 with one record a batch, 1,500 with 2,000)."""


class ReportPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    sizes: tuple[int, ...] = SIZES
    batch_records: int = 2_000
    streams: int = 2
    shards: int = 2
    master: str | None = None


class ReportSize(msgspec.Struct, frozen=True, kw_only=True):
    """One size. Seconds of the report from its start to the written page; CPU seconds are user and system, of all its
    processes together; memory is the resident size, at most, of the largest of them, and of all of them at one moment."""

    records: int
    books: LogBooks
    made_s: float
    seconds: float
    cpu_seconds: float
    process_bytes_max: int
    tree_bytes_max: int = 0
    """0 where this system does not say (cli.benchmark.tree_memory)"""
    problems: tuple[str, ...] = ()
    """a sentence for each number that is not what was made"""

    @property
    def rate(self) -> float:
        """Records, crossed or withheld, a second."""
        return self.records / self.seconds


class ReportTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What `felix bench report --json` prints."""

    machine: Machine
    plan: ReportPlan
    sizes: list[ReportSize]

    @property
    def is_accounted(self) -> bool:
        return not any(size.problems for size in self.sizes)


def measure_reports(
    plan: ReportPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> ReportTimes:
    """Measure every size, with all state in a folder below `folder` that is removed at the end. Blocks for a while.

    Raises UnavailableError where there is no room for the logs, or a process fails.
    """
    context, sizes = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as home:
        for records in plan.sizes:
            batches = -(-records // plan.batch_records)
            need = records * LOG_BYTES_PER_RECORD + batches * LOG_BYTES_PER_BATCH
            free = shutil.disk_usage(home).free
            if need > free:
                raise UnavailableError(
                    f"Logs of {records:,} records need {need / 1e9:.1f} GB, {home} has {free / 1e9:.1f}.",
                    hint="Name another disk with --folder, or fewer records with --records.",
                )
            said(f"{records:,} records")
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_measure, args=(theirs, plan, records, str(Path(home) / str(records)))
            )
            process.start()
            theirs.close()
            try:
                while isinstance(answer := ours.recv(), str):
                    said(f"{records:,} records: {answer}")
            except EOFError:
                raise UnavailableError(
                    f"The report over {records:,} records failed; see its output."
                ) from None
            finally:
                process.join()
            sizes.append(answer)
    return ReportTimes(machine=machine(), plan=plan, sizes=sizes)


def unaccounted(result: ReportResult, books: LogBooks) -> tuple[str, ...]:
    """A sentence for each number in which the report and the books of what was made differ."""
    totals = result.report.totals
    statuses = {row["status"] for row in result.report.reconciliation.records()}
    covered = sum(row["covered"] for row in result.report.reconciliation.records())
    found = {
        "records crossed": (totals.records, books.crossed),
        "records withheld": (totals.withheld, books.withheld),
        "records acknowledged": (totals.acknowledged, books.crossed),
        "records delivered": (totals.delivered, books.crossed),
        "bytes crossed": (totals.record_bytes, books.bytes),
        "offsets covered": (covered, books.crossed + books.withheld),
        "record entries": (result.record_entries, 2 * books.crossed + books.withheld),
        "leaves": (result.leaves, books.egress_leaves + books.ingress_leaves),
        "differences, open and breaches": (totals.differences + totals.open + totals.breaches, 0),
    }
    sentences = [
        f"{name}: {said:,} in the report, {made:,} made"
        for name, (said, made) in found.items()
        if said != made
    ]
    if statuses != {"reconciled"}:
        sentences.append(f"the shards are {', '.join(sorted(statuses)) or 'not there'}")
    return tuple(sentences)


def _measure(pipe: Pipe, plan: ReportPlan, records: int, home: str) -> None:
    """One size, in a process of its own: sentences, then a ReportSize."""
    from audit.spark.report import run_report

    try:
        began = time.monotonic()
        pipe.send("making the logs")
        logs = make_logs(
            Path(home),
            LogPlan(
                records=records, batch_records=plan.batch_records, streams=plan.streams, shards=plan.shards
            ),
        )
        made_s, before = time.monotonic() - began, _cpu_seconds()
        began = time.monotonic()
        with TreeMemory() as memory:
            result = run_report(
                [logs.egress, logs.ingress],
                Path(home) / "report",
                trust=logs.trust,
                master=plan.master,
                tell=pipe.send,
            )
        seconds = time.monotonic() - began
        pipe.send(
            ReportSize(
                records=records,
                books=logs.books,
                made_s=made_s,
                seconds=seconds,
                cpu_seconds=_cpu_seconds() - before,
                process_bytes_max=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
                tree_bytes_max=memory.bytes_max,
                problems=unaccounted(result, logs.books),
            )
        )
    finally:
        pipe.close()
        shutil.rmtree(home, ignore_errors=True)


def _cpu_seconds() -> float:
    """Of this process and of its descendants that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
