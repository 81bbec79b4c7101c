"""Documents in a log on disk: those that are too long for their leaf are in files beside it. Blocks.

Invariant: on return of `keep_document` the file is durable, name included, so a leaf may name it. Files are named by
their content: keeping one twice changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from hashlib import sha256
from typing import Final

from audit.document_leaf import DOCUMENTS_FOLDER, document_path, read_document, stands_beside
from audit.leaf import decode_leaf
from audit.merkle import TILE_WIDTH
from audit.tile import Files, read_entries
from audit.tile_disk import Folder
from felix.errors import FelixError, TamperError

_HEX: Final = frozenset("0123456789abcdef")

log = logging.getLogger("felix.audit.documents")


def keep_document(folder: Folder, document: bytes) -> None:
    """Keep the document beside the log where it is too long for a leaf. Raises OSError."""
    if not stands_beside(document):
        return
    # The log's own belongs to the log's threads.
    beside = folder.beside()
    # Written anew even where it is there: only this sync says that it is durable.
    beside.write(document_path(sha256(document).digest()), document)
    beside.flush()


def read_named(folder: Folder, name: str) -> bytes | None:
    """The document in the file of this name beside the log; None where there is none: no file, a longer one, or of other content than it says. Raises
    OSError."""
    try:
        data = folder.read(f"{DOCUMENTS_FOLDER}/{name}")
    except TamperError:
        return None
    return data if data is not None and sha256(data).hexdigest() == name else None


def stray(folder: Folder, name: str) -> str:
    """What a person has to know of the file of this name beside the log, where it is no document; else empty. Whoever verifies takes the document
    for missing, where a leaf names it."""
    path = f"{DOCUMENTS_FOLDER}/{name}"
    try:
        data = folder.read(path)
    except (TamperError, OSError) as error:
        what = error.sentence.removesuffix(".") if isinstance(error, TamperError) else str(error)
    else:
        if data is None or (digest := sha256(data).hexdigest()) == name:
            return ""
        what = f"It has {len(data)} bytes, and SHA-256 {digest}"
    if len(name) == 64 and set(name) <= _HEX:
        return (
            f"{path} in the audit log's folder is not the document that its name says. {what}. A leaf that names it lacks its document: bring the "
            "file back from a copy of the log, or from another broker's."
        )
    return f"{path} in the audit log's folder is no document of the log. {what}. Find out who put it there, and move it away."


def read_documents(files: Files, indexes: Collection[int], size: int) -> Iterator[tuple[int, bytes]]:
    """The documents of these leaves of a log of `size` leaves, in its order, each with its leaf's index. Those that cannot be had are left
    out, with a line for the operator. Each bundle of leaves is read once, however many of its documents are asked for."""
    for number in sorted({index // TILE_WIDTH for index in indexes}):
        for index, data in read_entries(files, number * TILE_WIDTH, (number + 1) * TILE_WIDTH, size):
            if index not in indexes:
                continue
            try:
                document = read_document(decode_leaf(data).header, files)
            except FelixError as error:
                log.error("the document of leaf %d cannot be read: %s", index, error)
                continue
            if document is None:
                log.error("the document of leaf %d is not beside the log", index)
                continue
            yield index, document
