"""`felix` on a disk and by a clock that fail as they are told to, for tests: `python -m failing_disk WORDS` with TOLD_BY naming a file.

The file has one fault a line, as JSON; it is read again whenever it changes, and what it says holds until then:

    {"call": "sync", "path": "/wal/", "error": "EIO", "times": 1}     the next such call of a path that has this text in it fails
    {"call": "sync", "path": "/wal/", "hang_s": 20, "times": 1}       it returns so much later
    {"clock_ms": 3600000}                                             the wall clock is so much ahead (or, negative, behind)

Calls: open, write, sync, sync_folder, truncate, rename, remove, read. A sync that failed has dropped what it should have brought to the disk, and a later one of
the same file does nothing before that was written again (cluster.failing_syncs).
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cluster.failing_syncs import Syncs

from cli.main import main

TOLD_BY: Final = "TESTS_FAILING_DISK"
LOOK_S: Final = 0.01
"""How long a look at the file that tells of faults counts."""


class Faults:
    """What this process was told."""

    def __init__(self, told_by: Path) -> None:
        self._told_by = told_by
        self._lock = threading.Lock()
        self._version: tuple[int, int] | None = None
        self._faults: list[dict[str, Any]] = []
        self._looked_s = -1.0
        self.clock_ms = 0

    def _look(self) -> None:
        """Under the lock."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            status = _stat(self._told_by)
        except FileNotFoundError:
            self._version, self._faults, self.clock_ms = None, [], 0
            return
        version = (status.st_mtime_ns, status.st_ino)
        if version != self._version:
            self._version = version
            self._faults = [json.loads(line) for line in self._told_by.read_text().splitlines()]
            self.clock_ms = sum(each.get("clock_ms", 0) for each in self._faults)

    def at(self, call: str, path: str) -> None:
        """This call is about to be made of this path. Raises OSError where it is to fail."""
        if path == str(self._told_by) or path.startswith(f"{self._told_by}."):
            return
        with self._lock:
            self._look()
            fault = next((each for each in self._faults if self._is_of(each, call, path)), None)
            if fault is None:
                return
            fault["times"] = fault.get("times", 1 << 30) - 1
            with Path(f"{self._told_by}.done").open("a") as done:
                done.write(f"{call} {path}\n")
        if hang_s := fault.get("hang_s"):
            time.sleep(hang_s)
        if name := fault.get("error"):
            number = getattr(errno, name)
            raise OSError(number, os.strerror(number), path)

    @staticmethod
    def _is_of(fault: dict[str, Any], call: str, path: str) -> bool:
        return (
            fault.get("call") == call
            and bool(fault.get("times", 1))
            and fault["path"] in path
            and fault.get("but", "\0") not in path
        )

    def offset_ms(self) -> int:
        with self._lock:
            self._look()
            return self.clock_ms


_stat, _open, _replace, _rename, _unlink = os.stat, os.open, os.replace, os.rename, os.unlink
_pwritev, _pwrite, _ftruncate, _pread, _time_ns, _time = (
    os.pwritev, os.pwrite, os.ftruncate, os.pread, time.time_ns, time.time,
)  # fmt: skip


def _path_of(file: int) -> str:
    return os.readlink(f"/proc/self/fd/{file}")


def fail_as_told(told_by: Path) -> None:
    """From now on, in this process."""
    faults = Faults(told_by)
    syncs = _Told(told_by, faults)
    os.fsync, os.fdatasync = syncs.failing(os.fsync), syncs.failing(os.fdatasync)  # type: ignore[assignment]

    def of_file(call: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def told(file: int, *rest: Any) -> Any:
            faults.at(call, _path_of(file))
            return work(file, *rest)

        return told

    def of_path(call: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def told(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, (str, os.PathLike)):
                faults.at(call, os.fspath(path))
            return work(path, *rest, **more)

        return told

    os.pwritev, os.pwrite = of_file("write", syncs.pwritev), of_file("write", syncs.pwrite)  # type: ignore[assignment]
    os.ftruncate, os.pread = of_file("truncate", syncs.ftruncate), of_file("read", _pread)  # type: ignore[assignment]
    opened = of_path("open", _open)

    def open_noted(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        file: int = opened(path, flags, *rest, **more)
        if flags & (os.O_CREAT | os.O_TRUNC) and not os.fstat(file).st_size:
            # A new file, perhaps with the number of one that is gone.
            syncs._note(file, None, 0)
        return file

    os.open, os.replace, os.rename = open_noted, of_path("rename", _replace), of_path("rename", _rename)  # type: ignore[assignment]
    os.unlink = of_path("remove", _unlink)  # type: ignore[assignment]
    time.time_ns = lambda: _time_ns() + faults.offset_ms() * 1_000_000  # type: ignore[assignment]
    time.time = lambda: _time() + faults.offset_ms() / 1000  # type: ignore[assignment]


class _Told(Syncs):
    def __init__(self, told_by: Path, faults: Faults) -> None:
        super().__init__(told_by)
        self._faults = faults

    def _fails(self, file: int) -> bool:
        is_folder = stat.S_ISDIR(os.fstat(file).st_mode)
        try:
            self._faults.at("sync_folder" if is_folder else "sync", _path_of(file))
        except OSError:
            return True
        return False


if __name__ == "__main__":
    fail_as_told(Path(os.environ[TOLD_BY]))
    main()
