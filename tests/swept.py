"""Temporary folders of tests: emptied once their test has passed, and removed when all have ended.

A file system without a journal gives no new file the inode of one that was deleted within the last five seconds (ext4), and looks past each of
those whenever a file is made: where every test removed its folder at once, that was a tenth of what the whole run computed.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

NAME_MAX = 30
"""Characters of a test's name in its folder's: paths of sockets have room for about a hundred in all."""

_FAILED = pytest.StashKey[bool]()
_passed: list[Path] = []
_numbers = itertools.count()


def note(item: pytest.Item, report: pytest.TestReport) -> None:
    """Remember whether a test failed, as it was set up or ran."""
    if report.failed:
        item.stash[_FAILED] = True


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As pytest's own; what a failed test leaves stays for the next run."""
    name = re.sub(r"\W", "_", request.node.name)[:NAME_MAX]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(_numbers)}"
    path.mkdir(mode=0o700)
    yield path
    if not request.node.stash.get(_FAILED, False):
        _empty(path)
        _passed.append(path)


def _empty(folder: Path) -> None:
    """Give back what the files take on the disk. One that has a name elsewhere keeps its bytes."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and status.st_size and status.st_nlink == 1:
                    os.truncate(path, 0)


def sweep() -> None:
    """Remove the folders of all tests that passed."""
    for path in _passed:
        shutil.rmtree(path, ignore_errors=True)
    _passed.clear()
