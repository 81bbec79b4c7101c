"""`felix` commands whose imports are done: what to call in place of `python -m cli.main` where starting up is not the point.

One server (warm.server) for each test process, and for each network namespace that it asks for, started at first use; it ends with the
process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

_held: list[IO[bytes]] = []
"""The server's standard input: it serves until this process has ended."""


@cache
def warm_socket(*within: str) -> str:
    """Where the server of this process listens; that of a place of its own where `within` is what to run it by (`ip netns exec …`)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FELIX_")}
    server = subprocess.Popen(
        [*within, sys.executable, "-P", str(HERE / "server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        start_new_session=True,  # Ctrl-C is for the tests, which pass it on
    )
    assert server.stdin is not None and server.stdout is not None
    _held.append(server.stdin)
    with server.stdout as said:
        path = said.readline().decode().strip()
    assert path, "the server of commands did not start"
    return path


def warm_command(*words: str, within: Sequence[str] = ()) -> list[str]:
    """The argument list that runs `felix WORDS`. `within`: as of `warm_socket`."""
    return warm_script("felix", *words, within=within)


def warm_script(program: str | os.PathLike[str], *words: str, within: Sequence[str] = ()) -> list[str]:
    """The argument list that runs a Python script with these words."""
    socket = warm_socket(*within)
    return [sys.executable, "-I", "-S", str(HERE / "client.py"), socket, str(program), *words]
