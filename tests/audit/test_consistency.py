"""A tree begins with another one where a consistency proof of its tiles says so, and the tiles prove nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.checkpoint import Checkpoint
from audit.consistency import continues
from audit.merkle import EMPTY_ROOT, Tree, leaf_hash
from audit.tile import MemoryFiles, tile_path
from felix.errors import TamperError

SIZE_MAX = 70_000
"""Over 65,536 leaves a tree has three levels of tiles."""
ORIGIN = "us-east.acme/audit"


def grown(size: int, other_from: int = SIZE_MAX) -> tuple[MemoryFiles, list[bytes]]:
    """The tiles of a log of so many leaves, others from one on, and the root at each size up to 600 and at the last 600."""
    tree, files, roots = Tree(), dict[str, bytes](), [EMPTY_ROOT]
    for at in range(size):
        leaf = at.to_bytes(4, "big") + (b"other" if at >= other_from else b"")
        for tile in tree.add(leaf_hash(leaf)):
            files[tile_path(tile.level, tile.number)] = tile.hashes
        roots.append(tree.root() if at < 600 or at >= size - 600 else b"")
    for tile in tree.partial_tiles():
        files[tile_path(tile.level, tile.number, tile.width)] = tile.hashes
    return MemoryFiles(files), roots


def checkpoint(roots: list[bytes]) -> Checkpoint:
    return Checkpoint(ORIGIN, len(roots) - 1, roots[-1])


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 600])
def test_it_continues_each_tree_that_it_was_and_no_other(size: int) -> None:
    files, roots = grown(size)
    for before in range(size + 1):
        assert continues(files, checkpoint(roots), before, roots[before])
        assert not continues(files, checkpoint(roots), before, roots[before - 1] if before else roots[1])
    assert not continues(files, checkpoint(roots), size + 1, roots[size])
    assert not continues(files, checkpoint(roots), -1, EMPTY_ROOT)


def test_it_does_so_over_three_levels_with_two_tiles_a_level() -> None:
    files, roots = grown(SIZE_MAX)
    for before in (1, 255, 300, 600, SIZE_MAX - 300, SIZE_MAX):
        read = Counting(files.files)
        assert continues(read, checkpoint(roots), before, roots[before])
        assert read.readings <= 2 * 3


class Counting(MemoryFiles):
    readings = 0

    def read(self, path: str) -> bytes | None:
        found = super().read(path)
        self.readings += found is not None
        return found


FORGED = grown(600, other_from=40)
HONEST = grown(600)


@given(st.integers(41, 600), st.lists(st.booleans(), max_size=12))
def test_no_answers_show_an_honest_root_under_another_history(before: int, rightly: list[bool]) -> None:
    """Each reading is answered from one of the two logs."""

    class Served(MemoryFiles):
        def read(self, path: str) -> bytes | None:
            is_right = rightly.pop() if rightly else False
            return (HONEST if is_right else FORGED)[0].read(path)

    assert not continues(Served(), checkpoint(FORGED[1]), before, HONEST[1][before])


def test_a_tile_that_is_missing_is_told_and_one_that_was_changed_shows_nothing() -> None:
    files, roots = grown(600)
    path = tile_path(0, 1)
    tile = files.files.pop(path)
    with pytest.raises(TamperError, match="missing"):
        continues(files, checkpoint(roots), 300, roots[300])
    files.files[path] = bytes(32) + tile[32:]
    assert not continues(files, checkpoint(roots), 300, roots[300])
