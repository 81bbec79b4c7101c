"""A folder to run a page's commands in, and the commands of a page."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from doc_commands import DOCS, DocCommand, commands, script, write_felix

from cli.process import read_state

SCRIPT_S = 240
"""Far more than a page takes: seconds."""


class Place:
    """A folder to work in, with a home of its own, and a `felix` in its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        write_felix(path / "bin")
        (path / "examples").symlink_to(DOCS.parent / "examples")
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FELIX_")},
            "PATH": f"{path / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(DOCS.parent),
            "HOME": str(path),
            "FELIX_HOME": str(path / "felix-home"),
            "FELIX_REGION": "us-east",
        }

    def run(self, found: list[DocCommand], **more: str) -> str:
        """What the commands printed; fails where one ended otherwise than its page says."""
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", script(found)],
            cwd=self.path,
            env={**self._environment, **more},
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    def shell(self, *lines: str) -> str:
        """Commands that no page has: what a page leaves to its reader."""
        return self.run([DocCommand(line, 0) for line in lines])

    def close(self) -> None:
        for pid_file in (self.path / "felix-home").glob("**/*.pid"):
            state = read_state(pid_file)
            if state is not None:
                os.kill(state["pid"], signal.SIGTERM)


def page(name: str, **replaced: str) -> list[DocCommand]:
    """A page's commands, with words of it replaced that stand for the reader's own; each has to be there."""
    text = (DOCS / name).read_text()
    found = commands(text)
    for words, by in replaced.items():
        assert any(words in each.text for each in found), f"docs/{name} has no {words!r}"
        found = [DocCommand(each.text.replace(words, by), each.code) for each in found]
    return found
