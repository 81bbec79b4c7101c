"""`felix bench fanout`: Felix beside Redis and NATS, on the same payloads in the same run. cli.benchmark.fanout says how it
is measured. The verbs are registered by cli.bench.

What is not installed is left out, with a sentence that says how to get it; that is no failure.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cli.benchmark.accounting import PAYLOAD_BYTES_MIN, Account
from cli.benchmark.fanout import FanoutPlan, FanoutReport, FanoutResult, measure_fanout
from cli.benchmark.figures import LatencySpread, Spread
from cli.benchmark.systems import FELIX, SYSTEMS
from felix.batch import BATCH_BYTES_MAX
from felix.errors import Code, RequestError

EXIT_UNRECONCILED: Final = 6
QUICK_FANOUT: Final = FanoutPlan(subscribers=(1, 4), repeats=1, load_s=0.4, paced_s=0.4, budget_s=45)
SUBSCRIBERS_MAX: Final = 64

R = TypeVar("R")

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)

SystemOption = Annotated[
    list[str] | None, typer.Option("--system", help=f"Of {', '.join(SYSTEMS)}; may be repeated.")
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        help="Where all measured state goes for the while (default: the folder for temporary files).",
        exists=True,
        file_okay=False,
    ),
]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", help="Rounds over all cases; 0: 3, or 1 with --quick.", min=0, max=100)
]
QuickOption = Annotated[bool, typer.Option("--quick", help="One short round, under a minute.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, with the values of every round.")]


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
    report = _measured(lambda said: measure_fanout(plan, folder, said))
    _say_skipped(report.skipped)
    if not report.is_lossless:
        print_losses([(str(result.case), result.account) for result in report.results])
        raise typer.Exit(EXIT_UNRECONCILED)
    if json:
        _print_json(report)
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
    """The plan that the options ask for. Raises RequestError(CONFIG_INVALID)."""
    plan = QUICK_FANOUT if quick else FanoutPlan()
    chosen = msgspec.structs.replace(
        plan,
        systems=known_systems(systems) or plan.systems,
        subscribers=tuple(subscribers or plan.subscribers),
        payload_bytes=tuple(sizes or plan.payload_bytes),
        chunk=chunk,
        repeats=repeats or plan.repeats,
    )
    for count in chosen.subscribers:
        if not 1 <= count <= SUBSCRIBERS_MAX:
            raise RequestError(
                f"{count} subscribers cannot be measured.",
                code=Code.CONFIG_INVALID,
                hint=f"From 1 to {SUBSCRIBERS_MAX}.",
            )
    for each in chosen.payload_bytes:
        if each < PAYLOAD_BYTES_MIN or (each + 8) * chunk > BATCH_BYTES_MAX // 2:
            raise RequestError(
                f"{chunk} records of {each} bytes cannot be measured.",
                code=Code.CONFIG_INVALID,
                hint=f"A payload has {PAYLOAD_BYTES_MIN} bytes at least (they carry the accounting), "
                f"a chunk {BATCH_BYTES_MAX // 2} at most.",
            )
    return chosen


def known_systems(systems: Sequence[str] | None) -> tuple[str, ...]:
    """Raises RequestError(CONFIG_INVALID) where one is not known."""
    for name in systems or ():
        if name not in SYSTEMS:
            raise RequestError(
                f"There is no system {name!r}.",
                code=Code.CONFIG_INVALID,
                hint=f"One of {', '.join(SYSTEMS)}.",
            )
    return tuple(systems or ())


def _measured(measure: Callable[[Callable[[str], None]], R]) -> R:
    logging.getLogger("felix").setLevel(logging.WARNING)
    with _err.status("starting") as status:
        return measure(status.update)


def _say_skipped(skipped: Sequence[str]) -> None:
    for sentence in skipped:
        _err.print(sentence, markup=False)


def _print_json(report: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


def print_losses(accounts: Sequence[tuple[str, Account]]) -> None:
    """The books of every case that does not reconcile, on standard error."""
    for case, account in accounts:
        if not account.is_lossless:
            items = msgspec.to_builtins(account).items()
            found = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in items)
            _err.print(f"{case}: not lossless: {found}", style="bold red", markup=False)
    _err.print("No rate stands for records that did not all come once and in order.", markup=False)


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
    _out.print(table)
    records = sum(result.account.received for result in report.results)
    servers = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    _out.print(
        f"{records:,} records delivered, to each subscriber once, in order and unchanged, in {report.seconds:.0f} s "
        f"on {report.machine.cpus} CPUs, Python {report.machine.python}{'; ' + servers if servers else ''}"
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
