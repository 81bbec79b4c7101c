"""A copy of a log in another folder, made while the log is written: for auditors, and for whoever keeps one elsewhere. Blocks.

Invariants:

- nothing is written that was not held to a checkpoint which the log signed: notes by their signatures and as beginnings of one tree, bundles by
  the tiles that hash to its root, documents by the hashes in their leaves. Tiles are computed from the leaves and not copied;
- an earlier copy is the beginning of what takes its place: its root comes out of the leaves before any file of it is replaced;
- the checkpoint comes after what it covers, which is durable by then, and what was cosigned after the checkpoint, as in the log itself. A copy that
  was broken off has the checkpoint of before, or none, and goes on;
- what was cosigned of the log stays: no cosignature that the copy has is lost, whatever the log serves later (`audit.cosigned_notes`);
- one process at a time copies into a folder;
- what comes with a log for its writer alone (write-ahead file, index, positions, lock) is not copied.

A folder copied file by file has the checkpoint of one moment and the tiles of another. Callers: cli.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Final, NamedTuple

from audit.bundle_roots import BundleRoots, read_bundle_roots
from audit.checkpoint import Checkpoint
from audit.cosigned_notes import COSIGNED_PATHS, choose, join, notes_at, stated
from audit.document_leaf import document_path, read_document
from audit.errors import RolledBackError
from audit.leaf import read_header
from audit.merkle import TILE_HEIGHT, TILE_WIDTH, Tile, Tree, edge_widths, leaf_hash, root_from_nodes
from audit.note import VerifierKey
from audit.tile import (
    CHECKPOINT_PATH,
    COPIED_PATH,
    COSIGNED_PATH,
    KEPT_PATH,
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
    unverified: frozenset[str]
    """names of keys that are not known here, whose cosignatures it has as they came"""
    let_go: frozenset[str]
    """and of whose cosignatures of before it has fewer"""


def _say_nothing(_: int, __: int) -> None:
    return None


def copy_log(
    source: Files,
    target: Folder,
    trust: Trust,
    progress: Callable[[int, int], None] = _say_nothing,
    witnesses: Iterable[VerifierKey] = (),
) -> Copied:
    """Copy the log at `source`, as of its checkpoint of now, into the folder, which is empty or has an earlier copy. `progress(leaves, of)`.
    `witnesses`: further keys whose cosignatures are held to what they are over, as those of the trusted regions are.

    Raises RequestError where there is no log, or the folder is a log's own, is copied into by another process, or has a log of other leaves;
    TamperError for what does not hold, of which nothing is written; OSError.
    """
    # Before the checkpoint: of an honest log what was cosigned is never ahead of it.
    noted = _notes(source, COSIGNED_PATHS)
    data = source.read(CHECKPOINT_PATH)
    if data is None:
        raise RequestError(
            "There is no audit log: it has no checkpoint.",
            code=Code.NOT_FOUND,
            hint="Name the folder that holds `checkpoint` and `tile/`.",
        )
    log = trust.log_of(data)
    more = {key: key.name for key in witnesses}
    log.open(data)
    # What a key signed that is not asked for now is kept, too.
    log = replace(log, keys=(*log.keys, *log.unlisted), unlisted=(), witnesses={**more, **log.witnesses})
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
    noted: Sequence[bytes],
    data: bytes,
    progress: Callable[[int, int], None],
) -> Copied:
    """With the folder's lock. `data`: the log's checkpoint; `noted`: what was cosigned before."""
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
    own = _own_notes(target)
    # All of them, also those that go: a note says more than who cosigned it, and of another history it is the proof.
    for said in stated(log, own, noted):
        _require_beginning(target, said, checkpoint)
    chosen = choose(log, own, (*noted, data))
    _sweep(target, before.size, checkpoint.size)
    if lacking or target.read(LACKING_PATH) is not None:
        target.write(LACKING_PATH, "".join(f"{each.hex()}\n" for each in sorted(lacking)).encode())
        target.flush()
    target.write(CHECKPOINT_PATH, data)
    target.flush()
    if chosen is not None:
        # All of them stand there before any is replaced.
        _put(target, {KEPT_PATH: join(dict.fromkeys((chosen.newest, chosen.most, *chosen.others)))})
        most = b"" if chosen.most == chosen.newest else chosen.most
        _put(target, {COSIGNED_PATH: chosen.newest, WITNESSED_PATH: most})
        _put(target, {KEPT_PATH: join(chosen.others)})
    _tidy(target, before.size, checkpoint.size)
    unverified, let_go = (frozenset(), frozenset()) if chosen is None else (chosen.unverified, chosen.let_go)
    return Copied(log.name, checkpoint.size, before.size, len(lacking), unverified, let_go)


def _notes(files: Files, paths: Iterable[str]) -> list[bytes]:
    """The notes at these paths. Raises TamperError."""
    found = list[bytes]()
    for path in paths:
        data = files.read(path)
        found += [] if data is None else notes_at(path, data).values()
    return found


def _own_notes(target: Folder) -> list[bytes]:
    """Those of the copy that is there. A list that cannot be read is not taken for an empty one: what stood in it alone would be lost."""
    try:
        return _notes(target, (*COSIGNED_PATHS, CHECKPOINT_PATH))
    except TamperError as error:
        raise TamperError(
            f"{KEPT_PATH} in {target.path} cannot be read. {error}",
            hint="Keep this copy, and copy into another folder.",
        ) from error


def _put(target: Folder, files: Mapping[str, bytes]) -> None:
    """Write these, durably, or remove those that are empty."""
    for path, data in files.items():
        if data:
            target.write(path, data)
        else:
            target.remove(path)
    target.flush()


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


def _sweep(target: Folder, before: int, now: int) -> None:
    """Remove partial files of what was copied and broken off: where the log was another one then, they are no part of this one."""
    for level in range(len(edge_widths(now))):
        held, wanted = before >> TILE_HEIGHT * level, now >> TILE_HEIGHT * level
        for number in range(held // TILE_WIDTH, wanted // TILE_WIDTH + 1):
            kept = {size - number * TILE_WIDTH for size in (held, wanted)}
            for width in partial_widths(target, str(level), number):
                if width not in kept:
                    target.remove(tile_path(level, number, width))
            for width in partial_widths(target, "entries", number) if not level else ():
                if width not in kept:
                    target.remove(bundle_path(number, width))


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
