"""Merkle tree hashing, proofs and their verification, as in RFC 6962 section 2.1 and RFC 9162 section 2.1. Pure.

`Tree` grows leaf by leaf and keeps only its right edge: for each tile level the hashes that do not yet fill a
tile (a compact range in radix 256). What fills a tile is handed out and forgotten, so memory is logarithmic.

Proofs are computed from a `Node` function that gives the hash of a complete subtree; where the hashes come
from (tiles on disk, a list in a test) is the caller's business. Callers: audit.*, audit.spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from felix.errors import TamperError

HASH_BYTES: Final = 32
TILE_HEIGHT: Final = 8
TILE_WIDTH: Final = 1 << TILE_HEIGHT
PROOF_HASHES_MAX: Final = 128
"""A path in a tree of 2^63 leaves has at most 63 hashes, a consistency proof at most 64 and one more."""

EMPTY_ROOT: Final = sha256(b"").digest()
"""RFC 6962 2.1: the hash of an empty list."""

Node = Callable[[int, int], bytes]
"""`node(level, index)`: the hash of the complete subtree over leaves index·2^level .. (index+1)·2^level."""


def leaf_hash(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256(0x00 ‖ data)."""
    state = sha256(b"\x00")
    state.update(data)
    return state.digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 ‖ left ‖ right)."""
    return sha256(b"\x01" + left + right).digest()


def complete_root(hashes: Sequence[bytes]) -> bytes:
    """The root over 2^n hashes of equal height."""
    assert hashes and not len(hashes) & (len(hashes) - 1)
    row = list(hashes)
    while len(row) > 1:
        row = [node_hash(row[i], row[i + 1]) for i in range(0, len(row), 2)]
    return row[0]


def split_hashes(tile: bytes) -> list[bytes]:
    """The hashes of a tile, 32 bytes each. Raises TamperError where the length is no multiple of 32."""
    if len(tile) % HASH_BYTES:
        raise TamperError(f"A tile of {len(tile)} bytes is not a row of {HASH_BYTES}-byte hashes.")
    return [tile[i : i + HASH_BYTES] for i in range(0, len(tile), HASH_BYTES)]


class Tile(NamedTuple):
    """Up to 256 consecutive hashes of one tile level."""

    level: int
    number: int
    hashes: bytes

    @property
    def width(self) -> int:
        """How many hashes, 1 to 256."""
        return len(self.hashes) // HASH_BYTES


class Tree:
    """A growing tree of which the right edge alone is in memory.

    - `size` leaves were added; `edge[l]` holds the hashes of level 8·l that lie in no full tile, 0 to 255 of them;
    - `len(edge[l]) == (size >> 8·l) & 255`, so edge and size determine each other's shape;
    - every full tile was handed out by `add` exactly once, lower levels first.
    """

    __slots__ = ("edge", "size")

    def __init__(self) -> None:
        self.size = 0
        self.edge: list[list[bytes]] = [[]]

    @classmethod
    def from_edge(cls, size: int, edge: Sequence[Sequence[bytes]]) -> Tree:
        """A tree as it was at `size`, from its partial tiles. Raises TamperError where their widths do not fit."""
        tree = cls()
        tree.size, tree.edge = size, [list(row) for row in edge] or [[]]
        widths = [len(row) for row in tree.edge]
        if widths[: len(edge_widths(size))] != edge_widths(size) or any(widths[len(edge_widths(size)) :]):
            raise TamperError(f"Partial tiles of widths {widths} are not the right edge of {size} leaves.")
        return tree

    def add(self, hash_: bytes) -> list[Tile]:
        """Add one leaf hash. Returns the tiles that became full by it, usually none."""
        row = self.edge[0]
        row.append(hash_)
        self.size += 1
        if len(row) < TILE_WIDTH:
            return []
        full, level = [], 0
        while len(self.edge[level]) == TILE_WIDTH:
            row = self.edge[level]
            full.append(Tile(level, (self.size >> TILE_HEIGHT * (level + 1)) - 1, b"".join(row)))
            self.edge[level] = []
            level += 1
            if level == len(self.edge):
                self.edge.append([])
            self.edge[level].append(complete_root(row))
        return full

    def partial_tiles(self) -> list[Tile]:
        """The tiles of the right edge, lower levels first; none is empty."""
        return [
            Tile(level, self.size >> TILE_HEIGHT * (level + 1), b"".join(row))
            for level, row in enumerate(self.edge)
            if row
        ]

    def root(self) -> bytes:
        """The tree's hash, RFC 6962's MTH."""
        root: bytes | None = None
        for row in self.edge:
            end = len(row)
            while end:
                # From the right, complete subtrees grow: the lowest set bit is the rightmost one.
                width = end & -end
                peak = complete_root(row[end - width : end])
                root = peak if root is None else node_hash(peak, root)
                end -= width
        return EMPTY_ROOT if root is None else root


def edge_widths(size: int) -> list[int]:
    """The widths of the partial tiles of a tree of `size` leaves, level 0 first; a width may be 0."""
    widths = [size & (TILE_WIDTH - 1)]
    while size := size >> TILE_HEIGHT:
        widths.append(size & (TILE_WIDTH - 1))
    return widths


def _subtrees(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The complete subtrees (level, index) that make up the leaves start..end, left to right."""
    while start < end:
        level = (end - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        yield level, start >> level
        start += 1 << level


def _range_hash(start: int, end: int, node: Node) -> bytes:
    """MTH(D[start:end]) for a range that the recursion of RFC 6962 visits (its start is aligned)."""
    parts = [node(level, index) for level, index in _subtrees(start, end)]
    root = parts.pop()
    while parts:
        root = node_hash(parts.pop(), root)
    return root


def root_from_nodes(size: int, node: Node) -> bytes:
    """The root of the first `size` leaves."""
    return _range_hash(0, size, node) if size else EMPTY_ROOT


def _split(count: int) -> int:
    """The largest power of two smaller than `count` (count > 1)."""
    return 1 << ((count - 1).bit_length() - 1)


def inclusion_proof(index: int, size: int, node: Node) -> list[bytes]:
    """PATH(index, D[size]) of RFC 6962 2.1.1: the sibling hashes from the leaf up to the root."""
    if not 0 <= index < size:
        raise ValueError(f"leaf {index} is not in a tree of {size}")
    path, start, end = [], 0, size
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            path.append(_range_hash(middle, end, node))
            end = middle
        else:
            path.append(_range_hash(start, middle, node))
            start = middle
    return path[::-1]


def consistency_proof(old: int, new: int, node: Node) -> list[bytes]:
    """PROOF(old, D[new]) of RFC 6962 2.1.2. Empty where `old` is 0 or equals `new`."""
    if not 0 <= old <= new:
        raise ValueError(f"there is no consistency from {old} to {new} leaves")
    if old in (0, new):
        return []
    proof, start, end, whole = [], 0, new, True
    while start + old != end:
        middle = start + _split(end - start)
        if start + old <= middle:
            proof.append(_range_hash(middle, end, node))
            end = middle
        else:
            proof.append(_range_hash(start, middle, node))
            old -= middle - start
            start, whole = middle, False
    if not whole:
        proof.append(_range_hash(start, end, node))
    return proof[::-1]


def verify_inclusion(
    leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes, what: str = "The leaf"
) -> None:
    """Check that the leaf hash `leaf` is the one at `index` in the tree of `size` leaves with this root.

    RFC 9162 section 2.1.3.2. Raises TamperError, with `what` as the subject of the sentence.
    """
    if not 0 <= index < size:
        raise TamperError(f"{what} {index} cannot be in a tree of {size} leaves.")
    position, last, result = index, size - 1, leaf
    for sibling in path:
        if last == 0:
            raise TamperError(f"{what} {index}: its inclusion path is longer than the tree is high.")
        if position & 1 or position == last:
            result = node_hash(sibling, result)
            while not position & 1 and position:
                position >>= 1
                last >>= 1
        else:
            result = node_hash(result, sibling)
        position >>= 1
        last >>= 1
    if last or result != root:
        raise TamperError(
            f"{what} {index} is not in the tree of {size} leaves: its inclusion path does not hold."
        )


def verify_consistency(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Check that the tree of `old` leaves is a prefix of the one of `new` leaves.

    RFC 9162 section 2.1.4.2. Raises TamperError.
    """
    wrong = TamperError(
        f"The log of {new} leaves does not continue the one of {old}: the proof does not hold."
    )
    if not 0 <= old <= new:
        raise wrong
    if old == new:
        if proof or old_root != new_root:
            raise wrong
        return
    if old == 0:
        if proof or old_root != EMPTY_ROOT:
            raise wrong
        return
    hashes = list(proof)
    if not old & (old - 1):
        hashes.insert(0, old_root)
    if not hashes:
        raise wrong
    position, last = old - 1, new - 1
    while position & 1:
        position >>= 1
        last >>= 1
    of_old = of_new = hashes[0]
    for sibling in hashes[1:]:
        if last == 0:
            raise wrong
        if position & 1 or position == last:
            of_old = node_hash(sibling, of_old)
            of_new = node_hash(sibling, of_new)
            while not position & 1 and position:
                position >>= 1
                last >>= 1
        else:
            of_new = node_hash(of_new, sibling)
        position >>= 1
        last >>= 1
    if last or of_old != old_root or of_new != new_root:
        raise wrong
