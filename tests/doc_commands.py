"""The commands of a page of docs/: its `sh` blocks, cut into commands, and the script that runs them as a reader would."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from warm.commands import warm_command

DOCS = Path(__file__).parents[1] / "docs"


class DocCommand(NamedTuple):
    """One command as it stands on the page, and the exit code that its comment names."""

    text: str
    code: int


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a file's tests where there is no such package. It is not imported: each process would wait seconds for what commands load."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"could not import {package!r}")


def commands(page: str) -> list[DocCommand]:
    """Every command of the page's `sh` blocks, from top to bottom. Pure."""
    found = []
    for block in re.findall(r"^```sh[^\n]*\n(.*?)^```", page, re.M | re.S):
        for text in _cut(block):
            code = re.search(r"# exit code (\d+)$", text)
            found.append(DocCommand(text, int(code[1]) if code else 0))
    return found


def _cut(block: str) -> Iterator[str]:
    """At each end of a line that ends a command: no here-document, quote or continuation is open there."""
    held: list[str] = []
    ending = ""
    for line in block.splitlines():
        held.append(line)
        if ending:
            ending = "" if line == ending else ending
        elif here := re.search(r"<<'(\w+)'$", line):
            ending = here[1]
        whole = "\n".join(held)
        if not ending and not line.endswith("\\") and (whole.count('"') % 2 == 0 or "<<'" in whole):
            yield whole
            held = []
    assert not any(held), f"a command without its end: {held}"


def script(found: list[DocCommand]) -> str:
    """A bash script that ends at the first command with another exit code than the page says. Pure."""
    return "\n".join(
        f"{each.text}\ncode=$?; [ $code -eq {each.code} ] || "
        f'{{ echo "exit code $code, not {each.code}" >&2; exit 99; }}'
        for each in found
    )


def write_felix(folder: Path) -> None:
    """Put a `felix` into the folder that is quick to start, and a `python` that is this one."""
    folder.mkdir()
    for name, words in (("felix", warm_command()), ("python", [sys.executable])):
        path = folder / name
        path.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in words) + ' "$@"\n')
        path.chmod(0o755)
