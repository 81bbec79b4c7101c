"""What every command of `felix` has in common: how its usage and its options are written in `--help`."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, Final, get_args, get_origin

from typer.core import TyperArgument, TyperCommand, TyperOption

_METAVARS: Final = {str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH"}
"""What stands for a value in help, by its type; a choice shows what can be chosen."""


class Command(TyperCommand):
    """A command whose help names arguments as `NAME` or `[NAME]`, and values by what they are."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if isinstance(parameter, TyperOption) and not parameter.is_flag and parameter.metavar is None:
                parameter.metavar = _metavar(parameter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`[OPTIONS] NAME [PREFIX]`."""
        return ["[OPTIONS]", *(_shown(each) for each in self.params if isinstance(each, TyperArgument))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then options, each with its help."""
        arguments, options = [], []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if isinstance(parameter, TyperArgument):
                arguments.append((_shown(parameter), parameter.help or ""))
            else:
                options.append(record)
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _shown(argument: TyperArgument) -> str:
    name = argument.name.rstrip("_").upper()
    return (name if argument.required else f"[{name}]") + ("…" if argument.nargs != 1 else "")


def _metavar(option: TyperOption) -> str | None:
    """None where typer's own is the best: what can be chosen."""
    if option.type_descriptor.choices is not None:
        return None
    kind = option.type_descriptor.annotation
    while get_origin(kind) is not None:
        kind = next(each for each in get_args(kind) if each is not NoneType)
    return _METAVARS.get(kind, "VALUE")
