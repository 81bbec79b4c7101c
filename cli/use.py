"""`felix use`: which region commands are about where none is named."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cli.output import note, out
from cli.setting import REGION_VARIABLE, choose_region, default_region, known_regions, set_default_region
from felix.errors import RequestError
from felix.visible import visible


def use(
    name: Annotated[str, typer.Argument(help="The region; show which it is if left out.")] = "",
    clear: Annotated[bool, typer.Option("--clear", help="Have no default region any more.")] = False,
) -> None:
    """Keep a default region for commands that name none; FELIX_REGION wins over it, and --region over both."""
    if name and clear:
        raise RequestError("A region and --clear do not go together.", hint="Give one of them.")
    if clear:
        set_default_region("")
    elif name:
        set_default_region(choose_region(name))
    chosen = default_region() or (known_regions()[0] if len(known_regions()) == 1 else "")
    out.print(f"{chosen or 'no region'} is used where none is named")
    set_by_variable = os.environ.get(REGION_VARIABLE, "")
    if set_by_variable and set_by_variable != chosen:
        note(f"but {REGION_VARIABLE} is {visible(set_by_variable)}, which wins")
