"""The memory of a process and everything below it, at its highest: looked at a few times a second while something runs.

Resident bytes, added up over the processes of the tree at one moment. Pages that two of them share (a worker that was
forked) count for each, so this is an upper bound. From `/proc`; where there is none (not Linux), 0. Callers: cli.benchmark.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

LOOK_S: Final = 0.25
"""Between two looks: a Spark worker lives for seconds, and a look reads two short files per process of the machine."""
_PROC: Final = Path("/proc")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def tree_bytes(root: int, proc: Path = _PROC) -> int:
    """Resident bytes of a process and its descendants, now. Processes that end meanwhile count for nothing."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for folder in proc.glob("[0-9]*"):
        number = int(folder.name)
        try:
            # The name in parentheses may hold anything; what follows the last one is the state and the parent.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            resident[number] = int((folder / "statm").read_text().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(number)
    total, todo = 0, [root]
    while todo:
        number = todo.pop()
        total += resident.get(number, 0)
        todo += children.get(number, [])
    return total


class TreeMemory:
    """`with TreeMemory() as memory: …`; afterwards `memory.bytes_max`. Of this process and its descendants."""

    def __init__(self) -> None:
        self.bytes_max = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tree-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        own = os.getpid()
        while True:
            self.bytes_max = max(self.bytes_max, tree_bytes(own))
            if self._ended.wait(LOOK_S):
                return
