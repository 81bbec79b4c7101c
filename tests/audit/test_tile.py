"""Tiles and bundles: the specification's paths and widths, round trips, hashes read back, missing and short files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.merkle import Tree, inclusion_proof, leaf_hash, root_from_nodes, verify_inclusion
from audit.tile import (
    Files,
    MemoryFiles,
    TileHashes,
    bundle_path,
    decode_bundle,
    encode_bundle,
    index_path,
    partial_widths,
    read_bundle,
    read_entries,
    read_tree,
    tile_path,
)
from audit.tile_disk import Folder
from felix.errors import TamperError


def test_paths_are_those_of_the_specification() -> None:
    assert index_path(1234067) == "x001/x234/067"
    assert tile_path(0, 0) == "tile/0/000"
    assert tile_path(1, 273, 112) == "tile/1/273.p/112"
    assert bundle_path(1000) == "tile/entries/x001/000"
    assert bundle_path(5, 1) == "tile/entries/005.p/1"


def build(size: int) -> MemoryFiles:
    """The files of a log of `size` small leaves, as a log of that size must serve them."""
    files, tree, leaves = MemoryFiles(), Tree(), list[bytes]()
    for at in range(size):
        leaves.append(b"leaf %d" % at)
        for tile in tree.add(leaf_hash(leaves[-1])):
            files.files[tile_path(tile.level, tile.number)] = tile.hashes
            if not tile.level:
                files.files[bundle_path(tile.number)] = encode_bundle(leaves)
                leaves = []
    for tile in tree.partial_tiles():
        files.files[tile_path(tile.level, tile.number, tile.width)] = tile.hashes
    if leaves:
        files.files[bundle_path(size // 256, len(leaves))] = encode_bundle(leaves)
    return files


def test_a_tree_of_70000_has_the_tiles_that_the_specification_lists() -> None:
    names = [name for name in build(70_000).files if "entries" not in name]
    level = {at: [name for name in names if name.startswith(f"tile/{at}/")] for at in (0, 1, 2)}
    assert sum("." not in name for name in level[0]) == 273
    assert [name for name in level[0] if "." in name] == ["tile/0/273.p/112"]
    assert level[1] == ["tile/1/000", "tile/1/001.p/17"]
    assert level[2] == ["tile/2/000.p/1"]
    assert len(names) == 274 + 2 + 1


@given(st.integers(1, 1_500), st.data())
@settings(max_examples=40, deadline=None)
def test_proofs_come_from_tiles_alone(size: int, data: st.DataObject) -> None:
    files, tree = build(size), Tree()
    for at in range(size):
        tree.add(leaf_hash(b"leaf %d" % at))
    assert read_tree(files, size).root() == tree.root()
    index = data.draw(st.integers(0, size - 1))
    path = inclusion_proof(index, size, TileHashes(files, size))
    verify_inclusion(leaf_hash(b"leaf %d" % index), index, size, path, tree.root())
    older = data.draw(st.integers(1, size))
    before = Tree()
    for at in range(older):
        before.add(leaf_hash(b"leaf %d" % at))
    assert root_from_nodes(older, TileHashes(files, size)) == before.root()
    leaves = read_bundle(files, index // 256, size)
    assert leaves[index % 256] == b"leaf %d" % index


def test_an_older_size_is_read_from_wider_tiles() -> None:
    files = build(700)
    for size in (1, 255, 256, 257, 512, 600, 699):
        before = Tree()
        for at in range(size):
            before.add(leaf_hash(b"leaf %d" % at))
        assert read_tree(files, size).root() == before.root()
        assert len(read_bundle(files, (size - 1) // 256, size)) == (size - 1) % 256 + 1


def test_a_range_of_entries_is_read_across_bundles() -> None:
    found = list(read_entries(build(700), 250, 515, 700))
    assert [index for index, _ in found] == list(range(250, 515))
    assert all(leaf == b"leaf %d" % index for index, leaf in found)
    assert list(read_entries(build(10), 8, 99, 10)) == [(8, b"leaf 8"), (9, b"leaf 9")]
    assert list(read_entries(build(10), 10, 99, 10)) == []


@given(st.lists(st.binary(max_size=300), max_size=40))
def test_bundles_go_round(leaves: list[bytes]) -> None:
    assert [bytes(leaf) for leaf in decode_bundle(encode_bundle(leaves), len(leaves))] == leaves
    with pytest.raises(TamperError):
        decode_bundle(encode_bundle(leaves), len(leaves) + 1)


def test_a_cut_bundle_is_refused_at_every_byte() -> None:
    data = encode_bundle([b"a", b"bb", b"ccc"])
    for length in range(len(data)):
        with pytest.raises(TamperError):
            decode_bundle(data[:length], 3)


def test_missing_and_short_tiles_are_named() -> None:
    files = build(300)
    data = files.files.pop("tile/0/000")
    with pytest.raises(TamperError, match="tile/0/000 is missing"):
        TileHashes(files, 300)(0, 0)
    files.files["tile/0/000"] = data[:-1]
    with pytest.raises(TamperError, match="8191 bytes"):
        TileHashes(files, 300)(0, 0)
    del files.files["tile/entries/001.p/44"]
    with pytest.raises(TamperError, match=r"tile/entries/001\.p/44 is missing"):
        read_bundle(files, 1, 300)


@pytest.fixture(params=["disk", "memory"])
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    source = {
        "checkpoint": b"c",
        "tile/0/000.p/7": b"seven",
        "tile/0/000.p/70": b"seventy",
        "tile/0/x001/000": b"full",
    }
    if request.param == "memory":
        return MemoryFiles(source)
    folder = Folder(tmp_path)
    for path, data in source.items():
        folder.write(path, data)
    folder.flush()
    return folder


def test_files_on_disk_and_in_memory_answer_alike(twin: Files) -> None:
    assert twin.read("checkpoint") == b"c" and twin.read("tile/0/x001/000") == b"full"
    assert twin.read("nothing") is None and twin.read("checkpoint/deeper") is None
    assert twin.names("tile/0") == ["000.p", "x001"] and twin.names("nothing") == []
    assert twin.names("") == [] or twin.names("tile") == ["0"]
    assert partial_widths(twin, "0", 0) == [7, 70]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("a/b", b"one")
    (tmp_path / "a" / "b.new").write_bytes(b"left by a crash")
    assert folder.names("a") == ["b"]
    folder.write("a/b", b"two")
    folder.flush()
    assert folder.read("a/b") == b"two" and sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b"]
    folder.remove("a/b")
    folder.remove("a/b")
    folder.remove_folder("a")
    assert not (tmp_path / "a").exists()
