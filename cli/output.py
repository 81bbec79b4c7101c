"""What the commands print: tables for people on standard output, JSON with `--json`, notices on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

PIPE_COLUMNS: Final = 200
"""Where output goes into a file or a pipe there is no terminal to fit."""


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPE_COLUMNS)


out = _console(stderr=False)
err = _console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON document. Structs become objects, bytes base64 (msgspec), times stay numbers."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for people; columns that end in `#` are numbers and stand to the right."""
    made = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(
            column.rstrip("#"), justify="right" if column.endswith("#") else "left", overflow="fold"
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, str) else format_cell(cell) for cell in row))
    out.print(made)


def format_cell(value: object) -> str:
    """Numbers with thousands separators, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def iso(time_ms: int) -> str:
    """ISO 8601 in UTC, to the second; empty for 0."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if time_ms else ""


def progress(*, counted: bool = True) -> Progress:
    """A progress bar on standard error."""
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn()]
    if counted:
        columns.append(MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=err)


def note(text: str) -> None:
    """A line on standard error."""
    err.print(text, markup=False)
