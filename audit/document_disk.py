"""Documents that are too long for their leaf, in files beside the log. Blocks.

Invariant: on return of `keep_document` the file is durable, name included, so a leaf may name it. Files are named by
their content: keeping one twice changes nothing.
"""

from __future__ import annotations

from hashlib import sha256

from audit.document_leaf import document_path, stands_beside
from audit.tile_disk import Folder


def keep_document(log: Folder, document: bytes) -> None:
    """Keep the document beside the log where it is too long for a leaf. Raises OSError."""
    if not stands_beside(document):
        return
    # The log's own belongs to the log's threads.
    folder = log.beside()
    # Written anew even where it is there: only this sync says that it is durable.
    folder.write(document_path(sha256(document).digest()), document)
    folder.flush()
