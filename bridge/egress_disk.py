"""The egress log on disk, as the agent keeps it: the trail, and the ledger that is derived from it. Blocks.

Invariants: the ledger in memory is that of every leaf accepted; the snapshot beside the log is that of durable leaves,
and is taken only where the log's own tiles say that it is of this log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from audit.checkpoint import note_size
from audit.document_disk import read_documents
from audit.leaf import read_header
from audit.note import NoteSigner, VerifierKey
from audit.tile import TileHashes, read_entries
from audit.trail import Trail
from audit.unjudged import Unjudged
from bridge.ledger import Ledger
from felix import __version__
from felix.errors import CorruptionError, FelixError
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.storage.begun import BegunFolder
from felix.storage.disk import SHARED_FILES
from felix.storage.port import Files
from felix.storage.release_mark import mark_release, require_release
from policy.approval import Document, parse_document

log = logging.getLogger("felix.bridge.egress")

SNAPSHOT_PATH: Final = "ledger"
SNAPSHOT_LEAVES: Final = 8_192
"""A restart reads at most about so many leaves for the ledger."""
_LOST: Final = "Where it is lost for good, the bridge needs a new identity, a new log, and grants for it (docs/operations.md, When a region's audit log is gone for good)."


def open_egress(
    path: Path,
    signer: NoteSigner,
    witnesses: Iterable[VerifierKey],
    also: Iterable[NoteSigner] = (),
    earlier: Iterable[VerifierKey] = (),
    *,
    memory: Path | None = None,
    files: Files = SHARED_FILES,
    runtime: Runtime = REAL,
) -> tuple[Trail, Ledger]:
    """Open or begin the log. `memory`: the file that remembers its folder (felix.storage.begun). Raises as `Trail.open` does, RequestError(UNSUPPORTED) where a later release has written it, and
    UnavailableError where its folder is not the one that was begun."""
    begun = None if memory is None else BegunFolder(files, path, memory, _LOST)
    if begun is not None:
        begun.require()
    require_release(files, path, __version__)
    trail = Trail.open(
        path, signer, also=also, earlier=earlier, witnesses=witnesses, files=files, runtime=runtime
    )
    try:
        mark_release(files, path, __version__)
        if begun is not None:
            begun.remember(runtime.random)
        ledger = read_ledger(trail)
    except BaseException:
        trail.close()
        raise
    return trail, ledger


def read_ledger(trail: Trail) -> Ledger:
    """Of all that is durable. Raises as `Trail.publish`."""
    size = note_size(trail.publish())
    ledger, at = _snapshot(trail, size)
    _read(trail, ledger, at, size)
    return ledger


def read_words(trail: Trail, ledger: Ledger) -> list[Document]:
    """The documents of the leaves that `ledger.words` names, in the log's order; those that cannot be read are left out, as by whoever
    verifies."""
    size, found = note_size(trail.checkpoint()), list[Document]()
    for index, document in read_documents(trail.files, set(ledger.words.values()), size):
        try:
            found.append(parse_document(document))
        except FelixError as error:
            log.error("the document of leaf %d cannot be read: %s", index, error)
    return found


def _read(trail: Trail, ledger: Ledger, start: int, size: int) -> None:
    unjudged = Unjudged(trail.key.name)
    for number, leaf in read_entries(trail.files, start, size, size):
        header = read_header(leaf)
        try:
            if header is not None:
                ledger.apply(header, number)
        except Exception as error:
            # It stands in the log for good: the others are read all the same.
            unjudged.sentence(error, f"Leaf {number}")


def _snapshot(trail: Trail, size: int) -> tuple[Ledger, int]:
    data = trail.files.read(SNAPSHOT_PATH)
    if data is not None:
        try:
            ledger, at, last = Ledger.decode(data)
            if 0 < at <= size and TileHashes(trail.files, size)(0, at - 1) == last:
                return ledger, at
        except CorruptionError:
            pass  # a shortcut that does not hold is not taken
    return Ledger(), 0


def save_ledger(trail: Trail, *, at_once: bool = False) -> int:
    """Bring the snapshot up to the newest checkpoint, where it is far behind. Returns the leaves it covers."""
    size = note_size(trail.checkpoint())
    ledger, at = _snapshot(trail, size)
    if size > at and (at_once or size - at >= SNAPSHOT_LEAVES):
        _read(trail, ledger, at, size)
        # The trail's own belongs to the trail's threads.
        trail.files.beside().write(
            SNAPSHOT_PATH, ledger.encode(size, TileHashes(trail.files, size)(0, size - 1))
        )
        return size
    return at
