"""What a process takes, as `/proc` says it: memory, processor time, wake-ups, open files. Counts hold on a busy machine where times do not."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class ProcessUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of one process at one moment. `private_bytes`: resident, without what files hold; `wakeups`: voluntary context switches of all
    its threads since their start."""

    private_bytes: int
    cpu_s: float
    wakeups: int
    files: int

    @classmethod
    def of(cls, pid: int) -> ProcessUse:
        """Raises OSError where the process is gone, or the system has no `/proc`."""
        folder = _PROC / str(pid)
        after = _stat(folder)
        return cls(
            private_bytes=_field(folder / "status", "RssAnon") << 10,
            cpu_s=(int(after[11]) + int(after[12])) / _TICKS_PER_S,
            wakeups=sum(
                _field(task / "status", "voluntary_ctxt_switches") for task in (folder / "task").iterdir()
            ),
            files=sum(1 for _ in (folder / "fd").iterdir()),
        )


def children_of(pid: int) -> list[int]:
    """The processes that this one started and that are there still."""
    found = []
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                if int(_stat(folder)[1]) == pid:
                    found.append(int(folder.name))
    return found


def _stat(folder: Path) -> list[str]:
    """The fields behind the name in parentheses, which may hold anything; the first is the state."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _field(path: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
