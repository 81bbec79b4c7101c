"""Tiles and entry bundles of C2SP tlog-tiles: paths, encodings, and reading hashes back. Pure over a `Files` port.

Invariants: a path is one of the specification's (level and index without leading zeroes beyond its 3-digit
groups); a bundle decodes only if it holds exactly as many entries as its width says; a partial tile or bundle is
a prefix of every wider one of the same index. Source: https://c2sp.org/tlog-tiles.
Callers: audit.trail, audit.verify, audit.proof, audit.spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, Protocol

from audit.merkle import HASH_BYTES, TILE_HEIGHT, TILE_WIDTH, Tree, complete_root, edge_widths, split_hashes
from felix.errors import TamperError

CHECKPOINT_PATH: Final = "checkpoint"
COSIGNED_PATH: Final = "checkpoint.cosigned"
"""The newest checkpoint that a witness cosigned; the plain one is usually some seconds ahead of it."""
WITNESSED_PATH: Final = "checkpoint.witnessed"
"""The newest one that had collected more cosignatures than the one that followed it has so far."""
KEPT_PATH: Final = "checkpoint.kept"
"""Of a copy: further notes that were cosigned and that neither of these stands for (`audit.cosigned_notes`)."""
KEPT_MAX: Final = 64
"""Notes there. With n cosigners that are known there are seldom more than n of which none says all that another does."""
COPIED_PATH: Final = "copied"
"""Stands in the folder of a log that several brokers have copies of: nobody writes into it alone."""
WAL_FOLDER: Final = "wal"

_TILES_KEPT: Final = 64
_WIDTH_DIGITS_MAX: Final = 3
"""Of a partial tile's name: a longer one is none, and a name may be of any length where a log is served by URL."""
"""Tiles that `TileHashes` keeps: a proof touches at most two per level."""
_LENGTH: Final = Struct(">H")


class Files(Protocol):
    """The files of one log, by path relative to its folder, with / between the parts."""

    def read(self, path: str) -> bytes | None:
        """The file's bytes, None where there is none. Raises TamperError of what cannot be a file of a log."""
        ...

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty where there is none."""
        ...


class MemoryFiles:
    """The memory twin of `audit.tile_disk.Folder`, for logs that were fetched, and for tests."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = {} if files is None else files

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def names(self, folder: str) -> list[str]:
        start = folder + "/"
        return sorted({path[len(start) :].split("/")[0] for path in self.files if path.startswith(start)})


def index_path(index: int) -> str:
    """A tile's index as path elements: 1234067 is x001/x234/067."""
    assert index >= 0
    path = f"{index % 1000:03d}"
    while index := index // 1000:
        path = f"x{index % 1000:03d}/{path}"
    return path


def _path(kind: str, index: int, width: int) -> str:
    assert 0 < width <= TILE_WIDTH
    path = f"tile/{kind}/{index_path(index)}"
    return path if width == TILE_WIDTH else f"{path}.p/{width}"


def tile_path(level: int, index: int, width: int = TILE_WIDTH) -> str:
    """`tile/<L>/<N>` or, where `width` is below 256, `tile/<L>/<N>.p/<W>`."""
    return _path(str(level), index, width)


def bundle_path(index: int, width: int = TILE_WIDTH) -> str:
    """`tile/entries/<N>`, likewise."""
    return _path("entries", index, width)


def encode_bundle(leaves: Iterable[bytes]) -> bytes:
    """An entry bundle: each leaf behind its length in 16 bits."""
    parts: list[bytes] = []
    for leaf in leaves:
        parts += (_LENGTH.pack(len(leaf)), leaf)
    return b"".join(parts)


def decode_bundle(data: bytes, width: int) -> list[memoryview]:
    """The leaves of a bundle, as views. Raises TamperError unless there are exactly `width`."""
    leaves: list[memoryview] = []
    view, at = memoryview(data), 0
    while at < len(data):
        if len(leaves) == width:
            raise TamperError(f"An entry bundle holds more than the {width} entries that belong there.")
        if at + 2 > len(data):
            raise TamperError("An entry bundle ends inside a length.")
        (length,) = _LENGTH.unpack_from(data, at)
        at += 2
        if at + length > len(data):
            raise TamperError(f"An entry bundle ends inside its entry {len(leaves)}.")
        leaves.append(view[at : at + length])
        at += length
    if len(leaves) != width:
        raise TamperError(f"An entry bundle holds {len(leaves)} entries where {width} belong.")
    return leaves


def read_tile(files: Files, level: int, index: int, size: int) -> bytes:
    """The tile at (level, index) of a tree of `size` leaves; a wider one is cut. Raises TamperError."""
    there = size >> TILE_HEIGHT * level
    width = min(TILE_WIDTH, there - index * TILE_WIDTH)
    assert width > 0
    found = _read_at_least(files, str(level), index, width)
    if found is None:
        raise TamperError(f"The tile {tile_path(level, index, width)} is missing.")
    data, _ = found
    if len(data) < width * HASH_BYTES or len(data) % HASH_BYTES:
        raise TamperError(f"The tile {tile_path(level, index, width)} has {len(data)} bytes.")
    return data[: width * HASH_BYTES]


def read_bundle(files: Files, index: int, size: int) -> list[memoryview]:
    """The leaves of bundle `index` of a log of `size` leaves. Raises TamperError."""
    found = find_bundle(files, index, size)
    if found is None:
        path = bundle_path(index, min(TILE_WIDTH, size - index * TILE_WIDTH))
        raise TamperError(f"The entry bundle {path} is missing.")
    return found


def find_bundle(files: Files, index: int, size: int) -> list[memoryview] | None:
    """As `read_bundle`; None where no file has that bundle's leaves."""
    width = min(TILE_WIDTH, size - index * TILE_WIDTH)
    assert width > 0
    found = _read_at_least(files, "entries", index, width)
    return None if found is None else decode_bundle(*found)[:width]


def read_entries(files: Files, start: int, end: int, size: int) -> Iterator[tuple[int, memoryview]]:
    """The leaves start..end (end not included) of a log of `size` leaves, with their indexes. Raises TamperError."""
    for number in range(start // TILE_WIDTH, -(-min(end, size) // TILE_WIDTH)):
        for index, leaf in enumerate(read_bundle(files, number, size), number * TILE_WIDTH):
            if start <= index < end:
                yield index, leaf


def _read_at_least(files: Files, kind: str, index: int, width: int) -> tuple[bytes, int] | None:
    """The file of this width, or a wider one of which it is a prefix (C2SP: a partial tile may be gone once the full one is there); and how
    wide it is. A log that goes on may replace each of them before it is read: they are listed again as long as that changes."""
    for held in (width, TILE_WIDTH):
        if (data := files.read(_path(kind, index, held))) is not None:
            return data, held
    listed = list[int]()
    for _ in range(TILE_WIDTH):
        found = [held for held in partial_widths(files, kind, index) if held > width]
        for held in (*found, TILE_WIDTH):
            if (data := files.read(_path(kind, index, held))) is not None:
                return data, held
        if found == listed:
            return None
        listed = found
    return None


def partial_widths(files: Files, kind: str, index: int) -> list[int]:
    """Which partial tiles of this index are there. `kind` is a level in decimal, or "entries"."""
    names = files.names(f"tile/{kind}/{index_path(index)}.p")
    plain = (
        int(name) for name in names if name.isascii() and name.isdecimal() and len(name) <= _WIDTH_DIGITS_MAX
    )
    return sorted(width for width in plain if 0 < width < TILE_WIDTH)


class TileHashes:
    """`audit.merkle.Node` over the tiles of a log, for a tree of `size` leaves."""

    def __init__(self, files: Files, size: int) -> None:
        self._files = files
        self._size = size
        self._kept: dict[tuple[int, int], bytes] = {}

    def __call__(self, level: int, index: int) -> bytes:
        """The hash of a complete subtree. Raises TamperError where its tile is missing or too short."""
        tile_level, height = divmod(level, TILE_HEIGHT)
        first = index << height
        tile_index, at = divmod(first, TILE_WIDTH)
        tile = self._kept.get((tile_level, tile_index))
        if tile is None:
            tile = read_tile(self._files, tile_level, tile_index, self._size)
            if len(self._kept) >= _TILES_KEPT:
                self._kept.clear()
            self._kept[tile_level, tile_index] = tile
        hashes = tile[at * HASH_BYTES : (at + (1 << height)) * HASH_BYTES]
        assert len(hashes) == HASH_BYTES << height
        return complete_root(split_hashes(hashes))


def read_tree(files: Files, size: int) -> Tree:
    """The tree at `size`, from its partial tiles alone. Raises TamperError where one is missing.

    The caller compares its root with a checkpoint.
    """
    edge = []
    for level, width in enumerate(edge_widths(size)):
        tile = read_tile(files, level, size >> TILE_HEIGHT * (level + 1), size) if width else b""
        edge.append(split_hashes(tile))
    return Tree.from_edge(size, edge)
