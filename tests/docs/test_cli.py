"""docs/cli.md has a section for every command of `felix`, with every option and argument, and every exit code."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cli import exits, main
from cli.commands import HIDDEN

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
EVERYWHERE = PAGE.split("## What applies to all")[1].split("\n## ")[0]


def commands(command: Any, path: tuple[str, ...] = ("felix",)) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by the words that call it."""
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(path), command
        return
    for name, held in below.items():
        if name.startswith(HIDDEN):
            continue
        yield from commands(held, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(main.app)))


def section(words: str) -> str:
    """From the command's heading to the next one."""
    found = re.search(
        rf"^##+ {re.escape(words)}( [^a-z\n].*| stream .*)?\n(.*?)(?=^## |^### |\Z)", PAGE, re.M | re.S
    )
    assert found, f"docs/cli.md has no section for `{words}`"
    return found[0]


@pytest.mark.parametrize("words", COMMANDS)
def test_command_is_described_with_its_options(words: str) -> None:
    text = section(words)
    for parameter in COMMANDS[words].params:
        if parameter.param_type_name != "option" or parameter.name in ("output_form", "json"):
            continue  # said once, for all commands
        for option in parameter.opts if parameter.opts[0] not in EVERYWHERE else parameter.opts[:1]:
            assert f"`{option}`" in text, f"`{words}` is described without {option}"


def test_options_of_every_command_are_described_once() -> None:
    for option in ("--output", "-o", "--json", "--help", "-h", "--version"):
        assert f"`{option}`" in EVERYWHERE


def test_no_command_is_described_that_does_not_exist() -> None:
    described = re.findall(r"^##+ (felix(?: [a-z-]+)+)", PAGE, re.M)
    groups = {" ".join(words.split()[:2]) for words in COMMANDS}
    for words in described:
        known = words in COMMANDS or words in groups or words.removesuffix(" stream") in COMMANDS
        assert known, f"`{words}` does not exist"


def test_exit_codes_are_listed() -> None:
    listed = set(re.findall(r"^\| (\d+) \|", EVERYWHERE, re.M))
    constants = {str(value) for name, value in vars(exits).items() if name.startswith("EXIT_")}
    assert constants | {"0", "10", "11", "12", "20"} == listed
