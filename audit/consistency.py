"""Whether a log's tree begins with another one, by a consistency proof (RFC 6962 section 2.1.2) that is made of its tiles and verified. Pure over `Files`.

Tiles say nothing by themselves: whoever serves a log may answer each reading otherwise. A root that is computed from tiles which were read for it is that of those tiles,
and nothing holds them to the tree that is verified. The proof does: no tiles, however often and differently they are served, make one that holds between two roots of
different histories. So whoever asks what a log's tree was at some size asks here, with the root that he holds the log to, and reads as often as he likes.
Callers: audit.keys_in_log, audit.proof, audit.verify, audit.spark.
"""

from __future__ import annotations

from audit.checkpoint import Checkpoint
from audit.merkle import consistency_proof, verify_consistency
from audit.tile import Files, TileHashes
from felix.errors import TamperError


def continues(files: Files, now: Checkpoint, size: int, root: bytes) -> bool:
    """Whether the tree of `now`, whose tiles these are, had this root at this size. Reads two tiles a level at most. Also False where tiles were changed.

    Raises TamperError where one is missing or too short.
    """
    if not 0 <= size <= now.size:
        return False
    proof = consistency_proof(size, now.size, TileHashes(files, now.size))
    try:
        verify_consistency(size, root, now.size, now.root, proof)
    except TamperError:
        return False
    return True
