"""The hash of each bundle, held to the root, and what is read again under it."""

from __future__ import annotations

import pytest

from audit.bundle_roots import BundleRoots, read_bundle_roots
from audit.merkle import EMPTY_ROOT, Tree, leaf_hash
from audit.tile import MemoryFiles, bundle_path, encode_bundle, tile_path
from felix.errors import TamperError

LEAVES = [b"leaf %d" % at for at in range(66_000)]


def log_of(leaves: list[bytes]) -> tuple[MemoryFiles, bytes]:
    """The files of a log of these leaves, and its root."""
    files, tree = dict[str, bytes](), Tree()
    for leaf in leaves:
        for tile in tree.add(leaf_hash(leaf)):
            files[tile_path(tile.level, tile.number)] = tile.hashes
    for tile in tree.partial_tiles():
        files[tile_path(tile.level, tile.number, tile.width)] = tile.hashes
    for first in range(0, len(leaves), 256):
        held = leaves[first : first + 256]
        files[bundle_path(first // 256, len(held))] = encode_bundle(held)
    return MemoryFiles(files), tree.root()


@pytest.mark.parametrize("size", [0, 1, 3, 255, 256, 257, 511, 512, 1_000, 65_536, 65_537, 66_000])
def test_bundles_of_a_log_hash_to_its_root(size: int) -> None:
    files, root = log_of(LEAVES[:size])
    held = read_bundle_roots(files, size, root)
    assert held.size == size and len(held.roots) == 32 * -(-size // 256)
    for bundle in {0, size // 512, (size - 1) // 256} if size else set[int]():
        leaves = LEAVES[bundle * 256 : min(size, bundle * 256 + 256)]
        assert list(map(bytes, held.read_bundle(files, bundle))) == leaves
    with pytest.raises(TamperError, match="do not hash to the root"):
        read_bundle_roots(files, size, bytes(32) if root == EMPTY_ROOT else EMPTY_ROOT)


@pytest.mark.parametrize("size", [1, 200, 256, 700])
def test_what_is_served_otherwise_later_is_not_taken(size: int) -> None:
    files, root = log_of(LEAVES[:size])
    held = read_bundle_roots(files, size, root)
    for at in {0, size // 2, size - 1}:
        other, _ = log_of([*LEAVES[:at], b"another", *LEAVES[at + 1 : size]])
        with pytest.raises(TamperError, match="served differently"):
            held.read_bundle(other, at // 256)
    shorter = BundleRoots(size, held.roots)
    with pytest.raises(TamperError):
        shorter.read_bundle(log_of(LEAVES[: size - 1])[0], (size - 1) // 256)
