"""Documents in a log on disk: those that are too long for their leaf are in files beside it. Blocks.

Invariant: on return of `keep_document` the file is durable, name included, so a leaf may name it. Files are named by
their content: keeping one twice changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from hashlib import sha256

from audit.document_leaf import document_path, read_document, stands_beside
from audit.leaf import decode_leaf
from audit.merkle import TILE_WIDTH
from audit.tile import Files, read_entries
from audit.tile_disk import Folder
from felix.errors import FelixError

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
