"""What the plays of bad disks take a sync that failed for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cluster.failing_syncs import Syncs, without


def test_what_is_left_of_ranges() -> None:
    assert without([(0, 10)], (3, 5)) == [(0, 3), (5, 10)]
    assert without([(3, 5)], (0, 10)) == []
    assert without([(0, 3), (8, 9)], (3, 8)) == [(0, 3), (8, 9)]


def test_after_a_sync_that_failed_none_does_anything_before_what_it_dropped_is_written_again(
    tmp_path: Path,
) -> None:
    told, synced = tmp_path / "told", list[int]()
    syncs = Syncs(told)
    sync = syncs.failing(synced.append)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        syncs.pwritev(file, [b"first", b"."], 0)
        sync(file)
        syncs.pwritev(file, [b"second"], 6)
        told.write_text("file")
        with pytest.raises(OSError, match="Input/output"):
            sync(file)
        syncs.pwritev(file, [b"third"], 12)
        sync(file)
        assert synced == [file]
        syncs.pwritev(file, [b"second"], 6)
        sync(file)
        assert synced == [file] * 2
        syncs.pwritev(file, [b"fourth"], 17)
        told.write_text("file")
        with pytest.raises(OSError, match="Input/output"):
            sync(file)
        syncs.ftruncate(file, 17)
        sync(file)
        assert synced == [file] * 3
    finally:
        os.close(file)
