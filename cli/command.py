"""What every command of `felix` has in common: `-o` and `--json`, and how its usage and its options are written in `--help`.

A command with the parameter `json` learns from it that data is wanted, and passes the data to `cli.output.print_json`. One that
only reports what it did has no such parameter: its sentences become an object of the kind Done.
"""

from __future__ import annotations

from copy import copy
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from cli.form import Form, chosen
from cli.values import PlainValues

_METAVARS: Final = {str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH"}
"""The placeholder of a value in help, by its type; a choice shows its values."""


_FORM: Final = "output_form"
_JSON: Final = "json"


@cache
def _shared_options() -> dict[str, TyperOption]:
    """The options of every command, by name, as typer makes them of a function."""

    def function(
        output_form: Annotated[
            Form, typer.Option("--output", "-o", help="table, wide, json, yaml or name.", show_default=False)
        ] = "table",
        json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    ) -> None:
        pass

    host = typer.Typer(add_completion=False, rich_markup_mode=None)
    host.command()(function)
    found = PlainValues.of(typer.main.get_command(host).params)
    return {
        each.name: each for each in found if isinstance(each, TyperOption) and each.name in (_FORM, _JSON)
    }


class Command(PlainValues, TyperCommand):
    """A command of `felix`, its output in the form that is asked for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._takes_json = any(each.name == _JSON for each in self.params)
        shared = _shared_options()
        self.params += [copy(shared[_FORM]), *([] if self._takes_json else [copy(shared[_JSON])])]
        for parameter in self.params:
            if isinstance(parameter, TyperOption) and not parameter.is_flag and parameter.metavar is None:
                parameter.metavar = _metavar(parameter)

    def invoke(self, ctx: Any) -> Any:
        """Run it, and where data is wanted and it gave none, print what it said as data."""
        form: Form = ctx.params.pop(_FORM)
        json = bool(ctx.params[_JSON] if self._takes_json else ctx.params.pop(_JSON))
        if json and form == "table":
            form = "json"
        words = ctx.command_path.split(" ", 1)[-1] if ctx.parent is not None else str(self.name)
        given = {
            name: value
            for name, value in ctx.params.items()
            if name != _JSON and value not in (None, "", False)
        }
        chosen.begin(form, words, given)
        if self._takes_json:
            ctx.params[_JSON] = chosen.is_data
        try:
            value = super().invoke(ctx)
            if chosen.is_data and not chosen.printed and chosen.sentences:
                from cli.output import print_done

                print_done()
        finally:
            chosen.begin("table")
        return value

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
