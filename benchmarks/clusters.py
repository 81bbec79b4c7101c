"""`python -m benchmarks cluster`, `failover` and `new-copy`: a region of several brokers. The modules copies, failover and new_copy say how it is measured."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from benchmarks.copies import CopiesPlan, CopiesReport, measure_copies
from benchmarks.dead_leader import DeadLeaderPlan, DeadLeaderReport, measure_dead_leader
from benchmarks.failover import FailoverPlan, FailoverReport, measure_failover
from benchmarks.new_copy import NewCopyPlan, NewCopyReport, measure_new_copy
from benchmarks.options import FolderOption, JsonOption, QuickOption, measured
from benchmarks.tenants import settle, spread_of
from cli.benchmark.figures import LatencySpread, Spread
from cli.output import out, print_json, table
from policy.quantity import Duration, Size

QUICK_COPIES: Final = CopiesPlan(seconds=1.0, records_max=20_000, lone=100, repeats=1)
QUICK_FAILOVER: Final = FailoverPlan(kills=1, lease_ms=2_000)
QUICK_DEAD_LEADER: Final = DeadLeaderPlan(kills=1, lease_ms=2_000)
QUICK_NEW_COPY: Final = NewCopyPlan(gib=0.05, seconds=3.0)
LOGGED: Final = logging.CRITICAL
"""Clients say that brokers went, as they should; here it is what is asked for."""


def cluster(
    batch: Annotated[
        int, typer.Option("--batch", help="Records in a batch.", min=1, max=1000)
    ] = CopiesPlan().batch_records,
    seconds: Annotated[
        float,
        typer.Option("--seconds", help="Of load for each case; 0: 2, or 1 with --quick.", min=0, max=60),
    ] = 0.0,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Rounds; 0: 3, or 1 with --quick.", min=0, max=100)
    ] = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """Rate and processor time of one, two and three brokers, with one copy and with several."""
    plan = QUICK_COPIES if quick else CopiesPlan()
    plan = msgspec.structs.replace(
        plan, batch_records=batch, seconds=seconds or plan.seconds, repeats=repeats or plan.repeats
    )
    report = measured(lambda said: measure_copies(plan, folder, said), LOGGED)
    settle([(str(result.case), result.account) for result in report.results])
    print_json(report, kind="Benchmark") if json else print_copies(report)


def failover(
    kills: Annotated[
        int, typer.Option("--kills", help="Of each signal; 0: 5, or 1 with --quick.", min=0, max=1000)
    ] = 0,
    lease: Annotated[
        str,
        typer.Option(
            "--lease", help="Of a broker, as in 2s; unless said: as by default, or 2s with --quick."
        ),
    ] = "",
    shards: Annotated[
        int,
        typer.Option(
            "--shards",
            help="Measure the death of a broker that leads so many, and not one stream: 3 kills, or 1 with --quick.",
            min=0,
            max=5000,
        ),
    ] = 0,
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """How long writers wait when the leader of their stream is killed, or stopped in order; or one that leads many shards is killed."""
    lease_ms = int(Duration.parse(lease)) if lease else 0
    if shards:
        _dead_leader(shards, kills, lease_ms, quick, folder, json)
        return
    plan = QUICK_FAILOVER if quick else FailoverPlan()
    plan = msgspec.structs.replace(plan, kills=kills or plan.kills, lease_ms=lease_ms or plan.lease_ms)
    report = measured(lambda said: measure_failover(plan, folder, said), LOGGED)
    settle([("the stream with three copies", report.account)])
    print_json(report, kind="Benchmark") if json else print_failover(report)


def _dead_leader(
    shards: int, kills: int, lease_ms: int, quick: bool, folder: Path | None, json: bool
) -> None:
    plan = QUICK_DEAD_LEADER if quick else DeadLeaderPlan()
    plan = msgspec.structs.replace(
        plan, shards=shards, kills=kills or plan.kills, lease_ms=lease_ms or plan.lease_ms
    )
    report = measured(lambda said: measure_dead_leader(plan, folder, said), LOGGED)
    settle([("streams with three copies", report.account)])
    print_json(report, kind="Benchmark") if json else print_dead_leader(report)


def new_copy(
    gib: Annotated[
        float,
        typer.Option("--gib", help="That the stream holds; 0: 1, or 0.05 with --quick.", min=0, max=1000),
    ] = 0.0,
    seconds: Annotated[
        float,
        typer.Option("--seconds", help="Before and after; 0: 20, or 3 with --quick.", min=0, max=600),
    ] = 0.0,
    per_second: Annotated[
        float, typer.Option("--per-second", help="Small durable records.", min=1, max=10_000)
    ] = NewCopyPlan().per_second,
    repeats: Annotated[int, typer.Option("--repeats", help="Rounds.", min=1, max=100)] = 1,
    copy_rate: Annotated[
        str, typer.Option("--copy-rate", help="storage.copy_rate, as in 16MiB; unless said: as by default.")
    ] = "",
    quick: QuickOption = False,
    folder: FolderOption = None,
    json: JsonOption = False,
) -> None:
    """How long publishers wait while a full stream gets a third copy."""
    plan = QUICK_NEW_COPY if quick else NewCopyPlan()
    plan = msgspec.structs.replace(
        plan,
        gib=gib or plan.gib,
        seconds=seconds or plan.seconds,
        per_second=per_second,
        repeats=repeats,
        copy_rate=Size.parse(copy_rate) if copy_rate else 0,
    )
    report = measured(lambda said: measure_new_copy(plan, folder, said), LOGGED)
    settle([("the stream with a new copy", report.account)])
    print_json(report, kind="Benchmark") if json else print_new_copy(report)


def print_copies(report: CopiesReport) -> None:
    """A table for people."""
    plan = report.plan
    table(
        f"Batches of {plan.batch_records} records of {plan.payload_bytes} bytes, fsync: median of the rounds (lowest – highest)",
        ("", "records/s#", "of first#", "CPU µs a record#", "of first#", "etcd's#", "lone p50 / p99 ms#", "led"),
        [
            (
                str(result.case),
                f"{result.rate.median:,.0f}",
                spread_of(result.rate_ratio),
                spread_of(result.broker_cpu_us),
                spread_of(result.cpu_ratio),
                f"{result.etcd_cpu_us.median:.2f}",
                "" if result.lone is None else _latency(result.lone),
                "/".join(map(str, result.led)),
            )
            for result in report.results
        ],
    )  # fmt: skip
    if report.third_copy_cpu_us is not None:
        out.print(f"the third copy: {spread_of(report.third_copy_cpu_us)} µs of the brokers' CPU a record")
    if report.sync is not None:
        out.print(f"a write with fdatasync: p50 {report.sync.p50_us.median / 1e3:.2f} ms")
    count = sum(result.account.received for result in report.results)
    out.print(
        f"{count:,} records, each found once, in order and unchanged; {plan.repeats} rounds in {report.seconds:.0f} s"
    )


def print_failover(report: FailoverReport) -> None:
    """Lines for people."""
    out.print(
        f"lease {Duration(report.lease_ms)}; longest time without an acknowledgement, seconds: {report.undisturbed_s:.2f} undisturbed"
    )
    for each in report.pauses:
        found = each.seconds
        out.print(
            f"{each.signal} to the leader, {len(found.values)} times: median {found.median:.2f}, worst {found.high:.2f}, best {found.low:.2f}"
        )
    out.print(
        f"{report.account.received:,} acknowledged records, each found once, in order, at its offset; {report.seconds:.0f} s"
    )


def print_dead_leader(report: DeadLeaderReport) -> None:
    """A table for people."""
    taken, plan = report.taken, report.plan
    what = {
        "elected_first": "first elected",
        "elected_last": "all elected",
        "served_last": "all served by their new leaders",
        "written_first": "first record acknowledged",
        "written_last": "a record acknowledged in each",
    }
    table(
        f"{plan.shards} shards of a killed broker, lease {Duration(report.lease_ms)}: seconds since the store had its lease no more, median of {plan.kills} (lowest – highest)",
        ("", "s#"),
        [(said, spread_of(taken[name])) for name, said in what.items()],
    )
    out.print(
        f"the lease was gone {spread_of(taken['gone'])} s after the kill; processor time of the other two brokers {spread_of(taken['cpu'])} s from the kill on"
    )
    out.print(
        f"{report.account.received:,} acknowledged records, each found once, in order, at its offset; {report.seconds:.0f} s"
    )


def print_new_copy(report: NewCopyReport) -> None:
    """A table for people."""
    plan = report.plan
    table(
        f"{plan.per_second:.0f} records of {plan.payload_bytes} bytes a second, fsync, while a stream of {plan.gib:g} GiB gets a third copy: "
        "median of the rounds (lowest – highest)",
        ("", "p50 / p99 ms#", "worst ms#", "p50 of before#", "p99 of before#"),
        [
            (
                each.phase,
                _latency(each.latency),
                f"{each.worst_us.median / 1e3:.1f}",
                spread_of(each.p50_ratio),
                spread_of(each.p99_ratio),
            )
            for each in report.phases
        ],
    )
    mib = Spread.of([rate / (1 << 20) for rate in report.copy_rate.values])
    out.print(f"the copy was in sync after {spread_of(report.copy_s)} s: {spread_of(mib)} MiB a second")
    out.print(
        f"{report.account.received:,} records, each found once, in order and unchanged; {plan.repeats} rounds in {report.seconds:.0f} s"
    )


def _latency(latency: LatencySpread) -> str:
    return f"{latency.p50_us.median / 1e3:.2f} / {latency.p99_us.median / 1e3:.2f}"
