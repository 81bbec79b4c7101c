"""Hashing and proofs: the published vectors, and every proof of random trees, whole and mutated."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.merkle import (
    EMPTY_ROOT,
    Tree,
    complete_root,
    consistency_proof,
    edge_widths,
    inclusion_proof,
    leaf_hash,
    node_hash,
    root_from_nodes,
    verify_consistency,
    verify_inclusion,
)
from felix.errors import TamperError

# The eight leaves, roots and proofs below are the ones published with the Certificate Transparency reference
# implementation for RFC 6962 (certificate-transparency, cpp/merkletree/merkle_tree_test.cc) and repeated in
# github.com/transparency-dev/merkle, testonly/reference data.
LEAVES = [
    b"",
    b"\x00",
    b"\x10",
    b"\x20\x21",
    b"\x30\x31",
    b"\x40\x41\x42\x43",
    b"\x50\x51\x52\x53\x54\x55\x56\x57",
    b"\x60\x61\x62\x63\x64\x65\x66\x67\x68\x69\x6a\x6b\x6c\x6d\x6e\x6f",
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
INCLUSION = [
    (0, 8, ["96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4"]),
    (5, 8, ["bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7"]),
    (2, 3, ["fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"]),
    (1, 5, ["6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b"]),
]  # fmt: skip
CONSISTENCY = [
    (1, 8, ["96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4"]),
    (6, 8, ["0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7"]),
    (2, 5, ["5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b"]),
]  # fmt: skip


class Hashes:
    """The definition of RFC 6962 2.1, by its recursion, over a list of leaves; complete subtrees by level."""

    def __init__(self, leaves: list[bytes]) -> None:
        self.rows = [[sha256(b"\0" + leaf).digest() for leaf in leaves]]
        while len(self.rows[-1]) > 1:
            row = self.rows[-1]
            self.rows.append(
                [sha256(b"\1" + row[i] + row[i + 1]).digest() for i in range(0, len(row) - 1, 2)]
            )

    def __call__(self, level: int, index: int) -> bytes:
        return self.rows[level][index]


def definition(leaves: list[bytes]) -> bytes:
    if not leaves:
        return sha256(b"").digest()
    if len(leaves) == 1:
        return sha256(b"\0" + leaves[0]).digest()
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return sha256(b"\1" + definition(leaves[:split]) + definition(leaves[split:])).digest()


def grown(leaves: list[bytes]) -> Tree:
    tree = Tree()
    for leaf in leaves:
        tree.add(leaf_hash(leaf))
    return tree


def test_the_published_roots() -> None:
    assert Tree().root() == EMPTY_ROOT
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    for size in range(1, 9):
        assert grown(LEAVES[:size]).root().hex() == ROOTS[size - 1]
        assert root_from_nodes(size, Hashes(LEAVES)).hex() == ROOTS[size - 1]


@pytest.mark.parametrize(("index", "size", "path"), INCLUSION)
def test_the_published_inclusion_proofs(index: int, size: int, path: list[str]) -> None:
    assert [hash_.hex() for hash_ in inclusion_proof(index, size, Hashes(LEAVES[:size]))] == path
    verify_inclusion(
        leaf_hash(LEAVES[index]),
        index,
        size,
        [bytes.fromhex(h) for h in path],
        bytes.fromhex(ROOTS[size - 1]),
    )


@pytest.mark.parametrize(("old", "new", "proof"), CONSISTENCY)
def test_the_published_consistency_proofs(old: int, new: int, proof: list[str]) -> None:
    assert [hash_.hex() for hash_ in consistency_proof(old, new, Hashes(LEAVES[:new]))] == proof
    roots = [bytes.fromhex(root) for root in ROOTS]
    verify_consistency(old, roots[old - 1], new, roots[new - 1], [bytes.fromhex(h) for h in proof])


def leaves_of(size: int) -> list[bytes]:
    return [b"leaf %d" % i for i in range(size)]


@given(st.integers(0, 2_000))
@settings(max_examples=60)
def test_the_tree_is_the_definition_and_grows_back_from_its_edge(size: int) -> None:
    leaves = leaves_of(size)
    tree = grown(leaves)
    assert tree.root() == definition(leaves)
    assert [len(row) for row in tree.edge][: len(edge_widths(size))] == edge_widths(size)
    again = Tree.from_edge(size, tree.edge)
    assert again.root() == tree.root()
    assert again.add(b"x" * 32) == tree.add(b"x" * 32)
    assert again.root() == tree.root()


def test_full_tiles_are_handed_out_once_lower_levels_first() -> None:
    tree, found = Tree(), []
    for leaf in leaves_of(256 * 256 + 1):
        found += tree.add(leaf_hash(leaf))
    assert [(tile.level, tile.number) for tile in found[-2:]] == [(0, 255), (1, 0)]
    assert len(found) == 257 and all(tile.width == 256 for tile in found)
    level_0 = [complete_root([t.hashes[i : i + 32] for i in range(0, 8192, 32)]) for t in found[:256]]
    assert b"".join(level_0) == found[-1].hashes
    assert [(tile.level, tile.number, tile.width) for tile in tree.partial_tiles()] == [
        (0, 256, 1),
        (2, 0, 1),
    ]


def test_an_edge_of_another_size_is_refused() -> None:
    tree = grown(leaves_of(300))
    for size in (299, 301, 44, 0):
        with pytest.raises(TamperError):
            Tree.from_edge(size, tree.edge)


@given(st.data(), st.integers(1, 700))
@settings(max_examples=150)
def test_every_inclusion_proof_holds_and_no_mutated_one_does(data: st.DataObject, size: int) -> None:
    leaves = leaves_of(size)
    index = data.draw(st.integers(0, size - 1))
    root = grown(leaves).root()
    leaf = leaf_hash(leaves[index])
    path = inclusion_proof(index, size, Hashes(leaves))
    verify_inclusion(leaf, index, size, path, root)
    mutations = [
        (leaf_hash(b"another"), index, size, path, root),
        (leaf, index, size, [*path, b"\0" * 32], root),
        (leaf, index, size, path, leaf_hash(b"another")),
        (leaf, size, size, path, root),
        (leaf, -1, size, path, root),
    ]
    if size > 1:
        mutations.append((leaf, (index + 1) % size, size, path, root))
    if path:
        at = data.draw(st.integers(0, len(path) - 1))
        bit = data.draw(st.integers(0, 255))
        changed = bytearray(path[at])
        changed[bit // 8] ^= 1 << bit % 8
        mutations += [
            (leaf, index, size, [*path[:at], bytes(changed), *path[at + 1 :]], root),
            (leaf, index, size, path[:-1], root),
            (leaf, index, size, [*path[:at], *path[at + 1 :]], root),
        ]
    for mutation in mutations:
        with pytest.raises(TamperError):
            verify_inclusion(*mutation)


@given(st.data(), st.integers(1, 700))
@settings(max_examples=150)
def test_every_consistency_proof_holds_and_no_mutated_one_does(data: st.DataObject, new: int) -> None:
    leaves = leaves_of(new)
    old = data.draw(st.integers(0, new))
    old_root, new_root = grown(leaves[:old]).root(), grown(leaves).root()
    proof = consistency_proof(old, new, Hashes(leaves))
    verify_consistency(old, old_root, new, new_root, proof)
    other = leaf_hash(b"another")
    mutations = [
        (old, other, new, new_root, proof),
        (old, old_root, new, new_root, [*proof, other]),
        (new + 1, old_root, new, new_root, proof),
        (-1, old_root, new, new_root, proof),
    ]
    if old:
        # From an empty log everything follows; from another one only what continues it.
        mutations.append((old, old_root, new, other, proof))
    if proof:
        at = data.draw(st.integers(0, len(proof) - 1))
        bit = data.draw(st.integers(0, 255))
        changed = bytearray(proof[at])
        changed[bit // 8] ^= 1 << bit % 8
        mutations += [
            (old, old_root, new, new_root, [*proof[:at], bytes(changed), *proof[at + 1 :]]),
            (old, old_root, new, new_root, proof[:-1]),
            (old, old_root, new, new_root, proof[1:]),
        ]
    for mutation in mutations:
        with pytest.raises(TamperError):
            verify_consistency(*mutation)


def test_a_fork_has_no_consistency_proof() -> None:
    leaves = leaves_of(300)
    forked = [*leaves[:100], b"changed", *leaves[101:], b"more"]
    proof = consistency_proof(300, 301, Hashes(forked))
    with pytest.raises(TamperError):
        verify_consistency(300, grown(leaves).root(), 301, grown(forked).root(), proof)


def test_node_hash_is_domain_separated_from_leaf_hash() -> None:
    left, right = leaf_hash(b"a"), leaf_hash(b"b")
    assert node_hash(left, right) == sha256(b"\x01" + left + right).digest() != leaf_hash(left + right)
