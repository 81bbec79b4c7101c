"""A copy of a log in another folder, made while the log is written: for auditors, and for whoever keeps one elsewhere. Blocks.

Invariants:

- nothing is written that was not held to a checkpoint which the log signed: notes by their signatures and as beginnings of one tree, bundles by
  the tiles that hash to its root, documents by the hashes in their leaves. Tiles are computed from the leaves and not copied;
- an earlier copy is the beginning of what takes its place: its root comes out of the leaves before any file of it is replaced;
- the checkpoint comes after what it covers, which is durable by then, and what was cosigned after the checkpoint, as in the log itself. A copy that
  was broken off has the checkpoint of before, or none, and goes on;
- what was cosigned of the log stays: a note that covers less, or that fewer trusted cosigners signed, replaces none of the copy's own;
- one process at a time copies into a folder;
- what comes with a log for its writer alone (write-ahead file, index, positions, lock) is not copied.

A folder copied file by file has the checkpoint of one moment and the tiles of another. Callers: cli.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Final, NamedTuple

from audit.bundle_roots import BundleRoots, read_bundle_roots
from audit.checkpoint import Checkpoint
from audit.document_leaf import document_path, read_document
from audit.errors import RolledBackError
from audit.leaf import read_header
from audit.merkle import TILE_HEIGHT, TILE_WIDTH, Tile, Tree, edge_widths, leaf_hash, root_from_nodes
from audit.tile import (
    CHECKPOINT_PATH,
    COPIED_PATH,
    COSIGNED_PATH,
    WAL_FOLDER,
    WITNESSED_PATH,
    Files,
    TileHashes,
    bundle_path,
    encode_bundle,
    partial_widths,
    read_tree,
    tile_path,
)
from audit.tile_disk import Folder
from audit.trust import LogTrust, Trust
from felix.errors import Code, RequestError, TamperError, UnavailableError

LACKING_PATH: Final = "documents-lacking"
"""Of a copy: the hashes of documents that its log did not have either, a line each. They are asked for again with the next copy."""


class Copied(NamedTuple):
    """What a copy has now."""

    origin: str
    size: int
    before: int
    """leaves that it had"""
    missing: int
    """documents that the log does not have, either"""


def _say_nothing(_: int, __: int) -> None:
    return None


def copy_log(
    source: Files, target: Folder, trust: Trust, progress: Callable[[int, int], None] = _say_nothing
) -> Copied:
    """Copy the log at `source`, as of its checkpoint of now, into the folder, which is empty or has an earlier copy. `progress(leaves, of)`.

    Raises RequestError where there is no log, or the folder is a log's own, is copied into by another process, or has a log of other leaves;
    TamperError for what does not hold, of which nothing is written; OSError.
    """
    # Before the checkpoint: of an honest log what was cosigned is never ahead of it.
    noted = {
        path: data for path in (COSIGNED_PATH, WITNESSED_PATH) if (data := source.read(path)) is not None
    }
    data = source.read(CHECKPOINT_PATH)
    if data is None:
        raise RequestError(
            "There is no audit log: it has no checkpoint.",
            code=Code.NOT_FOUND,
            hint="Name the folder that holds `checkpoint` and `tile/`.",
        )
    log = trust.log_of(data)
    log.open(data)
    if target.names(WAL_FOLDER) or target.read(COPIED_PATH) is not None:
        raise RequestError(
            f"{target.path} is a log that is written, and no copy.",
            code=Code.CONFLICT,
            hint="Name another folder.",
        )
    try:
        lock = target.storage.lock(target.path)
    except UnavailableError as error:
        raise RequestError(
            f"Another process copies into {target.path} now.",
            code=Code.CONFLICT,
            hint="Wait until it has ended, and copy again where the log went on.",
        ) from error
    try:
        return _copy(source, target, log, noted, data, progress)
    finally:
        lock.release()


def _copy(
    source: Files,
    target: Folder,
    log: LogTrust,
    noted: Mapping[str, bytes],
    data: bytes,
    progress: Callable[[int, int], None],
) -> Copied:
    """With the folder's lock. `data`: the log's checkpoint; `noted`: what was cosigned before, by path."""
    checkpoint = log.open(data).checkpoint
    before = _before(target, log, checkpoint, source)
    lacking = _fetch_lacking(source, target)
    roots = read_bundle_roots(source, checkpoint.size, checkpoint.root)
    first = before.size // TILE_WIDTH
    tree = read_tree(target, first * TILE_WIDTH)
    for number in range(first, -(-checkpoint.size // TILE_WIDTH)):
        lacking |= _copy_bundle(source, target, roots, number, tree, before)
        progress(tree.size, checkpoint.size)
    for tile in tree.partial_tiles():
        target.write(tile_path(tile.level, tile.number, tile.width), tile.hashes)
    target.flush()
    if tree.root() != checkpoint.root:
        raise TamperError(
            f"The {checkpoint.size} leaves of {log.name} do not have the root that its checkpoint signs."
        )
    noted = _to_keep(target, log, noted)
    for note in noted.values():
        _require_beginning(target, log.open(note).checkpoint, checkpoint)
    if lacking or target.read(LACKING_PATH) is not None:
        target.write(LACKING_PATH, "".join(f"{each.hex()}\n" for each in sorted(lacking)).encode())
        target.flush()
    target.write(CHECKPOINT_PATH, data)
    target.flush()
    for path, note in noted.items():
        target.write(path, note)
    target.flush()
    _tidy(target, before.size, checkpoint.size)
    return Copied(log.name, checkpoint.size, before.size, len(lacking))


def _to_keep(target: Folder, log: LogTrust, noted: Mapping[str, bytes]) -> dict[str, bytes]:
    """What the copy is to have as cosigned, by path, of its own notes and those that the log serves: the newest one that was cosigned, and the
    newest of those with the most cosigners where that is another one. An own note that does not verify is none."""
    found = list[tuple[int, int, bytes]]()
    for path in (COSIGNED_PATH, WITNESSED_PATH, CHECKPOINT_PATH):
        own = target.read(path)
        try:
            if own is not None:
                found.append(_weighed(log, own))
        except TamperError:
            continue
    found += [_weighed(log, note) for note in noted.values()]
    cosigned = [each for each in found if each[1]]
    if not cosigned:
        return dict(noted)
    # Of equals the first: the copy's own.
    newest = max(cosigned, key=lambda each: each[:2])
    most = max(cosigned, key=lambda each: (each[1], each[0]))
    kept = {COSIGNED_PATH: newest[2]}
    if most[1] > newest[1] or WITNESSED_PATH in noted or target.read(WITNESSED_PATH) is not None:
        kept[WITNESSED_PATH] = most[2]
    return kept


def _weighed(log: LogTrust, note: bytes) -> tuple[int, int, bytes]:
    """A checkpoint's size, how many trusted cosigners signed it, and its note. Raises TamperError."""
    opened = log.open(note)
    return opened.checkpoint.size, len(log.cosigners(opened.cosigned)), note


def _before(target: Folder, log: LogTrust, now: Checkpoint, source: Files) -> Checkpoint:
    """The checkpoint of the copy that is there; one of no leaf where there is none."""
    data = target.read(CHECKPOINT_PATH)
    if data is None:
        return Checkpoint(log.name, 0, Tree().root())
    before = log.open(data).checkpoint
    if read_tree(target, before.size).root() != before.root:
        raise TamperError(
            f"The tiles in {target.path} do not hash to the root in its checkpoint. Copy into another folder."
        )
    # The log's own tiles say so, which nothing holds to its root: enough to refuse before anything is read. `_copy_bundle` asks the leaves.
    _require_beginning(source, before, now)
    return before


def _require_beginning(files: Files, before: Checkpoint, now: Checkpoint) -> None:
    """Raises RolledBackError where the tree of `now`, whose tiles these are, did not have this root at that size."""
    if before.size > now.size:
        raise RolledBackError(
            f"The log {now.origin} was rolled back, or is an older copy: {before.size} leaves were signed before, now there are {now.size}."
        )
    if before.size and root_from_nodes(before.size, TileHashes(files, now.size)) != before.root:
        raise _another(before)


def _copy_bundle(
    source: Files, target: Folder, roots: BundleRoots, number: int, tree: Tree, before: Checkpoint
) -> set[bytes]:
    """One bundle into the copy and the tree, with the documents that its leaves name. Returns the hashes of those that are not there. Raises
    RolledBackError, and has written nothing, where the copy of before was of other leaves."""
    held = _held(target, roots, number)
    leaves = roots.read_bundle(source, number) if held is None else held
    full: list[Tile] = []
    for leaf in leaves:
        full += tree.add(leaf_hash(leaf))
        if tree.size == before.size and tree.root() != before.root:
            raise _another(before)
    if held is None:
        target.write(bundle_path(number, len(leaves)), encode_bundle([bytes(leaf) for leaf in leaves]))
    for tile in full:
        target.write(tile_path(tile.level, tile.number), tile.hashes)
    missing = set[bytes]()
    for leaf in leaves:
        header = read_header(leaf)
        if header is None or header.document or not header.document_sha256:
            continue
        document = read_document(header, source)
        if document is None:
            missing.add(header.document_sha256)
        elif target.read(document_path(header.document_sha256)) != document:
            target.write(document_path(header.document_sha256), document)
    return missing


def _another(before: Checkpoint) -> RolledBackError:
    return RolledBackError(
        f"The log {before.origin} is another one: its first {before.size} leaves are not those that were signed before."
    )


def _fetch_lacking(source: Files, target: Folder) -> set[bytes]:
    """Documents that were not there when the leaf was copied that names them: fetch those that are there now. Returns the hashes of the others."""
    lacking = set[bytes]()
    try:
        digests = [bytes.fromhex(line.decode()) for line in (target.read(LACKING_PATH) or b"").split()]
    except ValueError as error:
        raise TamperError(
            f"{LACKING_PATH} in {target.path} is no list of hashes. Copy into another folder."
        ) from error
    for digest in digests:
        document = source.read(document_path(digest))
        if document is None or sha256(document).digest() != digest:
            lacking.add(digest)
        else:
            target.write(document_path(digest), document)
    return lacking


def _held(target: Folder, roots: BundleRoots, number: int) -> list[memoryview] | None:
    """The leaves of a full bundle that a copy which was broken off has already."""
    if target.read(bundle_path(number)) is None:
        return None
    try:
        return roots.read_bundle(target, number)
    except TamperError:
        return None


def _tidy(target: Folder, before: int, now: int) -> None:
    """Remove what wider files replaced since the copy of before. Losing this does no harm."""
    number, kept = before // TILE_WIDTH, now - before // TILE_WIDTH * TILE_WIDTH
    for width in partial_widths(target, "entries", number):
        if width != kept:
            target.remove(bundle_path(number, width))
    for level, width in enumerate(edge_widths(before)):
        at = before >> TILE_HEIGHT * (level + 1)
        if width and width != (now >> TILE_HEIGHT * level) - at * TILE_WIDTH:
            target.remove(tile_path(level, at, width))
