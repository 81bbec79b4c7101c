"""The form of a command's output: for people (`table`, `wide`) or for programs (`json`, `yaml`, `name`).

It is chosen by `-o`, or by `--json`, which is the same as `-o json`; where there is no command, as after a wrong word, it is
read off the words themselves (`read_off`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

Form = Literal["table", "wide", "json", "yaml", "name"]
FORMS: Final[tuple[Form, ...]] = get_args(Form)
DATA_FORMS: Final[tuple[Form, ...]] = ("json", "yaml", "name")
"""Those that a program reads."""


class Chosen:
    """The form of the command that runs, its words, what it was given, and the sentences it would have said to people."""

    def __init__(self) -> None:
        self.form: Form = "table"
        self.command = ""
        self.arguments: dict[str, Any] = {}
        self.sentences: list[str] = []
        self.printed = False
        """True once it gave data: then its sentences are for people alone."""

    def begin(self, form: Form, command: str = "", arguments: dict[str, Any] | None = None) -> None:
        """A command begins."""
        self.form, self.command, self.arguments = form, command, arguments or {}
        self.sentences, self.printed = [], False

    @property
    def is_data(self) -> bool:
        """True where a program reads what is printed."""
        return self.form in DATA_FORMS


chosen: Final = Chosen()


def read_off(words: Sequence[str]) -> Form:
    """The form that these words ask for; `table` where they ask for none or for one that does not exist."""
    found: Form = "table"
    for at, word in enumerate(words):
        if word == "--":
            break
        value = None
        if word == "--json":
            value = "json"
        elif word in ("-o", "--output"):
            value = words[at + 1] if at + 1 < len(words) else None
        elif word.startswith("--output="):
            value = word.removeprefix("--output=")
        elif word.startswith("-o") and not word.startswith("--"):
            value = word[2:].removeprefix("=")
        if value in FORMS:
            found = value
    return found
