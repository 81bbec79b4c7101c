"""What files under deploy/ and pages under docs/ call: `felix` words, held to the command line itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from cli.main import app

DEPLOY = Path(__file__).parents[1] / "deploy"


class UnknownWordError(Exception):
    """A command, an option or a number of arguments that the command line does not have."""


def check_words(words: list[str]) -> None:
    """Parse `felix WORDS` to its last option, running nothing. Raises UnknownWordError."""
    command: Any = typer.main.get_command(app)
    parent: Any = None
    name: str | None = "felix"
    while True:
        try:
            context = command.make_context(name, list(words), parent=parent)
            if not isinstance(command, TyperGroup):
                return
            rest = [*context._protected_args, *context.args]
            name, command, words = command.resolve_command(context, rest)
        except Exception as error:  # the command line brings its own kinds of errors
            if not hasattr(error, "format_message"):
                raise
            raise UnknownWordError(error.format_message()) from error
        parent = context
