"""The hash of each entry bundle of a log, held to the root once: what is read again later is what was verified. Pure over `Files`.

A report reads a log several times, and a log may lie where its owner serves it: what answers rightly while it is verified may
answer otherwise afterwards. With these hashes each later reading is held to the checkpoint by itself. 32 bytes for 256 leaves.
Callers: audit.spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from audit.merkle import (
    HASH_BYTES,
    TILE_HEIGHT,
    TILE_WIDTH,
    Tree,
    complete_root,
    leaf_hash,
    root_from_nodes,
    split_hashes,
)
from audit.tile import Files, bundle_path, read_bundle, read_tile
from felix.errors import TamperError


class BundleRoots(NamedTuple):
    """Of a tree of `size` leaves, the root over each bundle's leaves, one after the other."""

    size: int
    roots: bytes

    def of(self, bundle: int) -> bytes:
        """The root over this bundle's leaves."""
        return self.roots[bundle * HASH_BYTES : (bundle + 1) * HASH_BYTES]

    def read_bundle(self, files: Files, bundle: int) -> list[memoryview]:
        """The leaves of a bundle. Raises TamperError where they are not those of this tree."""
        leaves = read_bundle(files, bundle, self.size)
        if root_over(map(leaf_hash, leaves)) != self.of(bundle):
            raise TamperError(
                f"{bundle_path(bundle, len(leaves))} is not what was verified: it changed meanwhile, or is served differently."
            )
        return leaves


def root_over(hashes: Iterable[bytes]) -> bytes:
    """The root over the leaves with these hashes, 256 at most."""
    tree = Tree()
    for each in hashes:
        tree.add(each)
    return tree.root()


def read_bundle_roots(files: Files, size: int, root: bytes) -> BundleRoots:
    """From the tiles: a 256th of the level-0 tiles' bytes. Raises TamperError where they do not have this root."""
    full, width = divmod(size, TILE_WIDTH)
    roots = b"".join(read_tile(files, 1, at, size) for at in range(-(-full // TILE_WIDTH)))
    edge = split_hashes(read_tile(files, 0, full, size)) if width else []

    def node(level: int, index: int) -> bytes:
        if level < TILE_HEIGHT:
            first = (index << level) - full * TILE_WIDTH
            return complete_root(edge[first : first + (1 << level)])
        first = index << level - TILE_HEIGHT
        return complete_root(
            split_hashes(roots[first * HASH_BYTES : (first + (1 << level - TILE_HEIGHT)) * HASH_BYTES])
        )

    if root_from_nodes(size, node) != root:
        raise TamperError(f"The tiles do not hash to the root of the {size} leaves in the checkpoint.")
    return BundleRoots(size, roots + (root_over(edge) if width else b""))
