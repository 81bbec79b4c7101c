"""Every `felix …` that a page names, in a block or in a sentence, is a command that exists, with options that it has."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/runbooks/*.md", "examples/**/*.md", "sdk/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"  # which names what was
)
COMMAND: Any = typer.main.get_command(app)


def named(page: str) -> list[str]:
    """Commands as the page writes them: in sentences between backticks, in blocks a line each, `\\` continuing it. Pure."""
    page = page.replace("\\\n", " ")
    inline = re.findall(r"`(?:\$ )?(felix [a-z][^`\n]*)`", page)
    blocks = "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", page, re.M | re.S))
    return inline + re.findall(r"^(?:\$ )?(felix [a-z][^#|;&\n]*)", blocks, re.M)


def unknown(words: list[str]) -> str:
    """The first word that the command line does not have; empty where it has all. Values and arguments are not looked at. Pure."""
    command, path = COMMAND, "felix"
    for at, word in enumerate(words):
        below = getattr(command, "commands", None)
        if below is None:
            known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
            used = [each.split("=")[0] for each in words[at:] if re.match(r"--?[a-z]", each)]
            return next((f"{path} {option}" for option in used if option not in known), "")
        if word.startswith("-"):
            continue
        if not re.fullmatch(r"[a-z-]+", word):
            return ""  # a placeholder, as in `felix bridge …`
        if path == "felix region" and word == "founding":
            return ""  # docs/keys.md names a context of signatures so
        if word not in below:
            return f"{path} {word}"
        command, path = below[word], f"{path} {word}"
    return ""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_commands_that_exist(path: Path) -> None:
    wrong = {line: found for line in named(path.read_text()) if (found := unknown(line.split()[1:]))}
    assert not wrong


def test_what_does_not_exist_is_found() -> None:
    assert unknown(["stream", "lst"]) == "felix stream lst"
    assert unknown(["stream", "list", "--colour"]) == "felix stream list --colour"
    assert unknown(["stream", "list", "acme/", "-o", "name"]) == ""
    assert named("`felix a b` and\n```\n$ felix c \\\n  d  # e\n```\n") == ["felix a b", "felix c    d  "]
