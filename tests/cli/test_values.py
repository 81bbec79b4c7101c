"""Values that a command takes as they are, and those that typer converts: the same either way, and without pydantic where it can be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.main import get_command_from_info
from typer.models import CommandInfo

from cli.command import Command
from cli.values import is_as_wanted

seen: dict[str, Any] = {}


def function(
    name: Annotated[str, typer.Argument()] = "",
    count: Annotated[int, typer.Option(min=0)] = 3,
    rate: Annotated[float | None, typer.Option()] = None,
    form: Annotated[Literal["red", "blue"], typer.Option()] = "red",
    word: Annotated[list[str] | None, typer.Option()] = None,
    number: Annotated[list[int] | None, typer.Option()] = None,
    file: Annotated[Path | None, typer.Option()] = None,
    quick: Annotated[bool, typer.Option()] = False,
) -> None:
    seen.update(locals())


DEFAULTS: dict[str, Any] = {
    "name": "", "count": 3, "rate": None, "form": "red", "word": None, "number": None, "file": None, "quick": False,
}  # fmt: skip


def run(words: str, *, plain: bool) -> dict[str, Any]:
    """What the function got, from a command of `felix` or from one of typer alone. Raises typer's errors."""
    seen.clear()
    info = CommandInfo(name="f", callback=function, cls=Command if plain else None)
    made = get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)
    made.main(words.split(), standalone_mode=False)
    return dict(seen)


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("", {}),
        ("acme --form blue --quick", {"name": "acme", "form": "blue", "quick": True}),
        ("--word a --word b", {"word": ["a", "b"]}),
        ("--count 7 --rate 2.5 --number 1 --number 2", {"count": 7, "rate": 2.5, "number": [1, 2]}),
        ("--file x/y", {"file": Path("x/y")}),
    ],
)
def test_a_function_gets_what_typer_would_give_it(words: str, changed: dict[str, Any]) -> None:
    assert run(words, plain=True) == run(words, plain=False) == DEFAULTS | changed


@pytest.mark.parametrize("words", ["--count many", "--count -1", "--form green", "--number x"])
def test_a_wrong_value_is_refused_with_typer_s_own_sentence(words: str) -> None:
    said = []
    for plain in (True, False):
        with pytest.raises(typer.TyperException) as caught:
            run(words, plain=plain)
        said.append(caught.value.format_message())
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("value", "annotation", "wanted"),
    [
        ("x", str, True),
        ("x", str | None, True),
        ("7", int, False),
        (7, int, True),
        (True, int, False),
        (("a",), list[str], True),
        (("a", 1), list[str], False),
        ("red", Literal["red"], True),
        ("green", Literal["red"], False),
        ("x", Path, False),
        ("x", str | int, False),
    ],
)
def test_what_is_taken_as_it_is(value: object, annotation: Any, wanted: bool) -> None:
    assert is_as_wanted(value, annotation) is wanted
