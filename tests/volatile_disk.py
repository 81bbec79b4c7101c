"""A disk with a page cache below processes that do not know of it: calls fail as they are told to, a sync that failed drops what it should have brought there, and the power
can be cut. For what Python does not do itself (SQLite) and what it does (volatile_disk.c says how). Needs gcc.

    disk = VolatileDisk(folder, aside, seed)   # `aside`: a folder that is not below `folder`, on the same file system
    process = Popen(…, env=os.environ | disk.environment())
    disk.fail("sync", "metadata.db-wal", errno.EIO)
    process.kill(); disk.cut()                 # `folder` has what was on the disk, and of what was under way some
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

PAGE: Final = 4_096
_SOURCE: Final = Path(__file__).with_name("volatile_disk.c")


def library() -> Path:
    """The library to preload, made where there is none of this source. Skips the test where there is no compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc makes the disk that fails")
    made = Path(tempfile.gettempdir()) / f"felix-volatile-disk-{os.getuid()}-{_SOURCE.stat().st_mtime_ns}.so"
    if not made.exists():
        own = made.with_suffix(f".{os.getpid()}")
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(own), str(_SOURCE), "-ldl"], check=True)
        own.replace(made)
    return made


class VolatileDisk:
    """Below `folder`. What is there as this is made is on the disk."""

    def __init__(self, folder: Path, aside: Path, seed: int, *, drops: int = 60, forgets: int = 40) -> None:
        """Of a hundred pages that a failed sync should have brought to the disk it `drops` so many, and of these the page cache `forgets` so many."""
        self.folder, self.aside = folder, aside
        self._shares = drops, forgets
        self.random = random.Random(seed)
        self.told_by = aside / "faults"
        folder.mkdir(parents=True, exist_ok=True)
        self._begin(self._names())

    def environment(self) -> dict[str, str]:
        """For a process on this disk."""
        return {
            "LD_PRELOAD": str(library()),
            "TESTS_VOLATILE_OF": str(self.folder),
            "TESTS_VOLATILE_DISK": str(self.aside),
            "TESTS_VOLATILE_FAULTS": str(self.told_by),
            "TESTS_VOLATILE_SHARES": "{},{}".format(*self._shares),
            "TESTS_VOLATILE_SEED": str(self.random.randrange(1 << 30)),
        }

    def fail(
        self, call: str, path: str, number: int, *, skip: int = 0, times: int = 1, seconds: int = 0
    ) -> None:
        """From now on, in place of what was told before; `path`: a part of it."""
        self.fail_each([(call, path, number, skip, times, seconds)])

    def fail_each(self, faults: list[tuple[str, str, int, int, int, int]]) -> None:
        """`call, path, errno, skip, times, seconds` of each."""
        new = self.told_by.with_suffix(".new")
        new.write_text("".join(" ".join(map(str, each)) + "\n" for each in faults))
        new.replace(self.told_by)

    def heal(self) -> None:
        """Nothing fails any more."""
        self.told_by.unlink(missing_ok=True)

    def failed(self) -> list[str]:
        """The calls that failed, or hung: `call errno path`."""
        done = Path(f"{self.told_by}.done")
        return done.read_text().splitlines() if done.exists() else []

    def _names(self) -> dict[Path, Path]:
        return {path: path for path in self.folder.rglob("*") if path.is_file()}

    def cut(self) -> None:
        """The power goes: nobody has a file open any more. What was not synced is there in part."""
        chance = self.random
        now = {path: path.stat().st_ino for path in self._names()}
        names = {}
        for entry in (self.aside / "names").iterdir():
            number, path = entry.name.split(" ", 1)
            names[Path(path.replace("%", "/"))] = int(number)
        if chance.random() < 0.5:
            # The journal had got so far.
            names = now
        there = {number: path for path, number in now.items()}
        after = self.aside / "after"
        shutil.rmtree(after, ignore_errors=True)
        after.mkdir()
        made: dict[Path, Path] = {}
        for path, number in names.items():
            if path.name.endswith("-shm"):
                continue
            cached = there.get(number, self.aside / "kept" / str(number))
            made[path] = self._as_on_disk(after / str(len(made)), cached, number)
        for path in now:
            path.unlink()
        for path, source in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, path)
        self._begin({path: path for path in made})

    def _as_on_disk(self, target: Path, cached: Path, number: int) -> Path:
        chance = self.random
        blocks, dropped = self.aside / "blocks" / str(number), self.aside / "dropped" / str(number)
        data = bytearray(blocks.read_bytes() if blocks.exists() else b"")
        unwritten = dropped.read_bytes() if dropped.exists() else b""
        mode = 0o600
        if cached.exists():
            mode = cached.stat().st_mode & 0o777
            pages = cached.read_bytes()
            if chance.random() < 0.5:
                data = data[: len(pages)] + bytes(max(0, len(pages) - len(data)))
            share = chance.choice((0.0, 0.5, 1.0))
            for at in range(0, min(len(data), len(pages)), PAGE):
                if unwritten[at // PAGE : at // PAGE + 1] != b"\1" and chance.random() < share:
                    page = pages[at : min(at + PAGE, len(data))]
                    data[at : at + len(page)] = page
        target.write_bytes(data)
        target.chmod(mode)
        return target

    def _begin(self, files: dict[Path, Path]) -> None:
        for each in ("blocks", "dropped", "names", "kept"):
            shutil.rmtree(self.aside / each, ignore_errors=True)
            (self.aside / each).mkdir(parents=True)
        for path in files:
            number = path.stat().st_ino
            shutil.copyfile(path, self.aside / "blocks" / str(number))
            (self.aside / "names" / f"{number} {str(path).replace('/', '%')}").touch()
