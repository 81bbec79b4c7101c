"""A log's tree on disk: its leaves in entry bundles, and the tiles above them.

Invariants: a bundle and the tiles that a leaf fills are written when it comes, their rows of the index behind them; where the disk has no room, before
anything else is written (`write_full`); what is not full is written by `write_edge`, and durable on its return; partial files that full ones have replaced are removed by `tidy`, which the caller calls behind a
checkpoint. Blocks; one thread at a time. Caller: audit.trail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from audit.leaf import Header, read_header
from audit.merkle import TILE_WIDTH, Tile, Tree, leaf_hash
from audit.range_index import INDEX_PATH, bundle_rows
from audit.tile import TileHashes, bundle_path, encode_bundle, index_path, tile_path
from audit.tile_disk import Folder


class _Full(NamedTuple):
    number: int
    leaves: list[bytes]
    headers: list[Header | None]
    tiles: Sequence[Tile]


class TreeFiles:
    """The tree of one open log."""

    def __init__(self, folder: Folder, tree: Tree, bundle: list[bytes]) -> None:
        """`bundle`: the leaves of the last bundle, where it is not full."""
        self._folder, self._tree = folder, tree
        self._bundle = list(bundle)
        self._headers = [read_header(leaf) for leaf in bundle]
        self.last_leaf_hash = TileHashes(folder, tree.size)(0, tree.size - 1) if tree.size else b""
        self._partial_bundles = [bundle_path(tree.size // TILE_WIDTH, len(bundle))] if bundle else []
        # Of the last checkpoint that was shown.
        self._shown_bundle = self._partial_bundles[0] if bundle else ""
        self._obsolete: list[str] = []
        self._unwritten: deque[_Full] = deque()

    @property
    def size(self) -> int:
        """How many leaves the tree has."""
        return self._tree.size

    def root(self) -> bytes:
        """The tree's hash."""
        return self._tree.root()

    def take(self, leaf: bytes, header: Header | None) -> None:
        """One leaf into the tree; full tiles and bundles onto the disk. Raises OSError: it is in the tree then, and `write_full` is to be called again."""
        self.last_leaf_hash = leaf_hash(leaf)
        self._bundle.append(leaf)
        self._headers.append(header)
        full = self._tree.add(self.last_leaf_hash)
        if full:
            self._unwritten.append(_Full(full[0].number, self._bundle, self._headers, full))
            self._bundle, self._headers = [], []
            self.write_full()

    def write_full(self) -> None:
        """What is full and has not found room yet, onto the disk. Raises OSError."""
        while self._unwritten:
            number, leaves, headers, tiles = self._unwritten[0]
            self._folder.write(bundle_path(number), encode_bundle(leaves))
            for tile in tiles:
                self._folder.write(tile_path(tile.level, tile.number), tile.hashes)
            self._folder.append(INDEX_PATH, bundle_rows(number, headers))
            self._obsolete.append(f"entries/{index_path(number)}")
            self._obsolete += [f"{tile.level}/{index_path(tile.number)}" for tile in tiles]
            self._unwritten.popleft()

    def write_edge(self) -> None:
        """The tiles and the bundle that are not full, durable, names included."""
        folder = self._folder
        self.write_full()
        if self._bundle:
            path = bundle_path(self.size // TILE_WIDTH, len(self._bundle))
            folder.write(path, encode_bundle(self._bundle))
            # A checkpoint that could not be written is tried again at the same size.
            if path not in self._partial_bundles[-1:]:
                self._partial_bundles.append(path)
        for tile in self._tree.partial_tiles():
            folder.write(tile_path(tile.level, tile.number, tile.width), tile.hashes)
        folder.flush()

    def tidy(self) -> None:
        """Remove what full files have made superfluous. Losing this to a crash does no harm."""
        # The bundle of the checkpoint before this one stays: a reader may hold that.
        kept = {self._shown_bundle, *self._partial_bundles[-1:]}
        for path in self._partial_bundles:
            if path not in kept:
                self._folder.remove(path)
        self._partial_bundles = [path for path in self._partial_bundles if path in kept]
        self._shown_bundle = self._partial_bundles[-1] if self._partial_bundles else ""
        for where in self._obsolete:
            folder = f"tile/{where}.p"
            for name in self._folder.names(folder):
                self._folder.remove(f"{folder}/{name}")
            self._folder.remove_folder(folder)
            self._partial_bundles = [
                name for name in self._partial_bundles if not name.startswith(f"{folder}/")
            ]
        self._obsolete.clear()
