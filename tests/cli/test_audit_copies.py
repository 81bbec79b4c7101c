"""Several copies of one audit log on a machine: the furthest is read, and copies of different histories are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from audit_log import Link, log_signer

from audit.leaf import Leaf
from audit.trail import Trail
from cli.audit_copies import furthest_copy
from felix.errors import TamperError

DENIED = Link().deny().header


def leaves(count: int, *, since_ms: int = 0) -> list[Leaf]:
    times = range(since_ms, since_ms + count)
    return [Leaf(msgspec.structs.replace(DENIED, time_ms=DENIED.time_ms + time)) for time in times]


def write(path: Path, content: Sequence[Leaf]) -> Path:
    trail = Trail.open(path, log_signer())
    if content:
        trail.append_nowait(content, lambda first, error: None)
    trail.close()
    return path


@pytest.mark.parametrize(("short", "long"), [(0, 3), (2, 2), (2, 3), (3, 300), (256, 300), (257, 300)])
def test_the_copy_that_goes_furthest_is_read_whichever_stands_first(
    tmp_path: Path, short: int, long: int
) -> None:
    copies = [write(tmp_path / "short", leaves(short)), write(tmp_path / "long", leaves(long))]
    assert furthest_copy(copies) == copies[short != long]
    assert furthest_copy(copies[::-1]) == copies[1]
    assert furthest_copy([tmp_path / "none", *copies, tmp_path / "nor here"]) in copies


@pytest.mark.parametrize(("size", "others"), [(1, 1), (1, 2), (2, 1), (3, 300), (300, 257)])
def test_copies_of_different_histories_are_told(tmp_path: Path, size: int, others: int) -> None:
    one = write(tmp_path / "b1", leaves(size))
    other = write(tmp_path / "b2", leaves(others, since_ms=1))
    for paths in ([one, other], [other, one]):
        with pytest.raises(TamperError, match="different histories") as told:
            furthest_copy(paths)
        assert str(one) in str(told.value) and str(other) in str(told.value)


def test_a_folder_without_a_copy_is_no_history(tmp_path: Path) -> None:
    held = write(tmp_path / "b1", leaves(1))
    (tmp_path / "b2").mkdir()
    (tmp_path / "b3").mkdir()
    (tmp_path / "b3/checkpoint").write_bytes(b"not a note")
    assert furthest_copy([tmp_path / "b3", tmp_path / "b2", held]) == held
    assert furthest_copy([tmp_path / "b4", tmp_path / "b2"]) == tmp_path / "b2"
    assert furthest_copy([tmp_path / "b4"]) == tmp_path / "b4"
