"""Options and surroundings that the commands of `python -m benchmarks` share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cli.output import err

R = TypeVar("R")

FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        help="Where all measured state goes for the while (default: the folder for temporary files).",
        exists=True,
        file_okay=False,
    ),
]
QuickOption = Annotated[bool, typer.Option("--quick", help="One short round, under a minute.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, with the values of every round.")]


def measured(measure: Callable[[Callable[[str], None]], R], level: int) -> R:
    """What `measure` finds, with how far it is for people; `level`: below it Felix logs nothing meanwhile."""
    logging.getLogger("felix").setLevel(level)
    with err.console.status("starting") as status:
        return measure(status.update)
