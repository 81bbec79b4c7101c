"""`python -m benchmarks shards` and `sessions`: what many idle things cost one broker. The modules of these names say how it is measured."""

from __future__ import annotations

import logging
from typing import Annotated, Final

import msgspec
import typer

from benchmarks.options import FolderOption, JsonOption, QuickOption, measured
from benchmarks.sessions import SessionsPlan, SessionsReport, measure_sessions
from benchmarks.shards import ShardsPlan, ShardsReport, measure_shards
from cli.exits import EXIT_UNRECONCILED
from cli.output import err, out, print_json

QUICK_SHARDS: Final = ShardsPlan(shards=400, sample=20, idle_s=3.0)

QUICK_SESSIONS: Final = SessionsPlan(sessions=200, sample=20, idle_s=3.0)

ShardsOption = Annotated[
    int, typer.Option("--shards", help="0: 10,000, or 400 with --quick.", min=0, max=100_000)
]


def shards(
    shards: ShardsOption = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """Memory, wake-ups, making and restart of many idle shards on one broker."""
    plan = QUICK_SHARDS if quick else ShardsPlan()
    if shards:
        plan = msgspec.structs.replace(plan, shards=shards)
    report = measured(lambda said: measure_shards(plan, folder, said), logging.ERROR)
    print_json(report, kind="Benchmark") if json else print_shards(report)
    if not report.is_whole:
        err.print(
            f"{report.lost} reads of {report.checked} did not find what was written, and "
            f"{report.restarted_shards} of {report.made[-1].shards} shards came back."
        )
        raise typer.Exit(EXIT_UNRECONCILED)


def sessions(
    sessions: Annotated[
        int, typer.Option("--sessions", help="0: 5,000, or 200 with --quick.", min=0, max=100_000)
    ] = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """Memory and wake-ups of many idle sessions on one broker."""
    plan = QUICK_SESSIONS if quick else SessionsPlan()
    if sessions:
        plan = msgspec.structs.replace(plan, sessions=sessions)
    report = measured(lambda said: measure_sessions(plan, folder, said), logging.ERROR)
    print_json(report, kind="Benchmark") if json else print_sessions(report)
    if report.unanswered:
        err.print(f"{report.unanswered} of {report.asked} sessions were not answered.")
        raise typer.Exit(EXIT_UNRECONCILED)


def print_sessions(report: SessionsReport) -> None:
    """Lines for people."""
    out.print(
        f"{report.opened:,} sessions, {report.open_cpu_s * 1e3 / max(1, report.opened):.2f} ms of the broker's processor time each"
    )
    if report.refused:
        out.print(f"then refused: {report.refused}")
    out.print(f"memory: {report.bytes_per_session / 1024:.1f} KiB a session")
    out.print(
        f"idle: {report.wakeups_per_s:.1f} wake-ups a second, {report.idle_cpu_share:.1%} of a processor"
    )
    out.print(f"asked in the end: {report.asked}, of them not answered {report.unanswered}")


def print_shards(report: ShardsReport) -> None:
    """Lines for people."""
    before = 0
    for part in report.made:
        count, before = part.shards - before, part.shards
        out.print(
            f"{part.shards:6,} shards: the last {count:,} made in {part.seconds:.1f} s, "
            f"{part.broker_cpu_s * 1e3 / max(1, count):.2f} ms of the broker's processor time each"
        )
    if report.refused:
        out.print(f"then refused: {report.refused}")
    out.print(
        f"memory: {report.bytes_per_shard / 1024:.1f} KiB a shard, {report.restarted_bytes_per_shard / 1024:.1f} after a restart; "
        f"{report.files:,} files open"
    )
    out.print(
        f"idle: {report.wakeups_per_s:.1f} wake-ups a second, {report.wakeups_per_s_empty:.1f} with no shard; "
        f"{report.idle_cpu_share:.1%} of a processor"
    )
    restart = report.restart
    out.print(
        f"restart: stopped in {restart.stop_s:.1f} s, served again after {restart.start_s:.1f} s "
        f"({restart.start_cpu_s:.1f} s of processor time)"
    )
    out.print(
        f"killed: served again after {report.killed.start_s:.1f} s ({report.killed.start_cpu_s:.1f} s of processor time)"
    )
    out.print(f"checked: {report.checked} reads of what was written, {report.lost} wrong")
