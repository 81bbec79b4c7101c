"""What a test took: seconds, and seconds of processors, of its process and of all that it started. From `/proc` (Linux).

`FELIX_RECORD_TIMES=FILE make test` adds a line for each test. What waits much and computes little is waste of another kind than what computes.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RECORD_TIMES = "FELIX_RECORD_TIMES"
"""Names the file."""
_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree_cpu_s(root: int) -> float:
    """Of a process, of those below it, and of those below it that have ended and were waited for. Not of a process whose parent ended
    before it: nothing says any more whose it was."""
    took: dict[int, float] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            # The name in parentheses may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            took[int(folder.name)] = sum(map(int, fields[11:15])) / _TICKS_PER_S
            children[int(fields[1])].append(int(folder.name))
    total, todo = 0.0, [root]
    while todo:
        number = todo.pop()
        total += took.get(number, 0.0)
        todo += children[number]
    return total


@contextmanager
def recorded(nodeid: str) -> Iterator[None]:
    """Add a line about what happens inside to the file that the environment names; where it names none, do nothing."""
    path = os.environ.get(RECORD_TIMES)
    if not path:
        yield
        return
    began, before = time.monotonic(), tree_cpu_s(os.getpid())
    yield
    seconds, cpu_s = time.monotonic() - began, tree_cpu_s(os.getpid()) - before
    with open(path, "a") as lines:
        lines.write(f"{seconds:8.2f} s {cpu_s:8.2f} cpu s  {nodeid}\n")
