"""The driver's part of verifying a log: signature, cosignatures, upper tiles, root. No Spark here.

A log is verified in these steps; the source (`audit.spark.source`) does 4 to 6 in the executors:

1. the checkpoint is signed by a log key that the caller trusts;
2. tiles of level 1 and up hash to their places, up to the checkpoint's root;
3. cosignatures of trusted regions and witnesses hold, as many as are asked for, the log's own region not counted; what
   they cosigned, and what they remember, is a prefix of this very tree;
4. each full tile of level 0 hashes to its place in level 1;
5. each leaf hashes to its place in level 0, and decodes;
6. each receipt in an egress log agrees with the leaf that carries it, and is signed by the region that it calls its
   destination.

Whether the leaves, authentic as they are, tell a consistent story is the reports' business (reconciliation,
exceptions): a log that was faithfully kept by a faulty bridge verifies, and its report says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from audit.checkpoint import Checkpoint, SignedCheckpoint
from audit.errors import RolledBackError
from audit.merkle import (
    HASH_BYTES,
    TILE_HEIGHT,
    TILE_WIDTH,
    complete_root,
    root_from_nodes,
    split_hashes,
)
from audit.note import VerifierKey, parse_note
from audit.spark.document import Cosigner
from audit.spark.files import open_files, read_checkpoint
from audit.tile import COSIGNED_PATH, WITNESSED_PATH, Files, TileHashes, read_tile, read_tree, tile_path
from audit.trust import COSIGNATURES_MIN, LogTrust, Trust
from felix.errors import CorruptionError, TamperError

STEPS: Final = (
    "The checkpoint's signature holds under the trusted key of the log.",
    "Tiles of level 1 and up hash to their places, up to the root in the checkpoint.",
    "Cosignatures of trusted regions or witnesses other than the log's own region hold, and what they cosigned is a prefix of this tree.",
    "Each full tile of level 0 hashes to its place in level 1.",
    "Each leaf hashes to its place in the tree, and decodes.",
)
RECEIPT_STEP: Final = (
    "Each receipt is signed by a trusted key of its destination region and agrees with its leaf."
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a log does not verify: which log, which leaf (where one can be named), and in words."""

    log: str
    leaf: int | None
    sentence: str


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """A log whose steps 1 to 3 hold."""

    path: str
    key: VerifierKey
    checkpoint: Checkpoint
    cosigners: tuple[Cosigner, ...]

    @property
    def key_sha256(self) -> str:
        """SHA-256 of the raw public key, lower-case hex."""
        return sha256(self.key.public).hexdigest()


def open_log(
    path: str,
    trust: Trust,
    cosignatures_min: int = COSIGNATURES_MIN,
    remembered: Sequence[bytes] = (),
) -> OpenedLog:
    """Steps 1 to 3. Raises TamperError or RolledBackError with what does not hold, RequestError without a log.

    `remembered`: checkpoints that witnesses keep; those of other logs are left aside.
    """
    files = open_files(path)
    data = read_checkpoint(files, path)
    origin = parse_note(data).text.partition("\n")[0]
    log = trust.log(origin)
    signed = log.open(data)
    key = signed.signed[0].key
    checkpoint = signed.checkpoint
    check_tree(files, checkpoint)
    notes = [
        log.open(held) for name in (WITNESSED_PATH, COSIGNED_PATH) if (held := files.read(name)) is not None
    ]
    cosigners = _cosigners(files, signed, notes, log)
    if log.policy is not None:
        missing = [log.missing(note.cosigned, cosignatures_min) for note in (*notes, signed)]
        if all(missing):
            raise TamperError(f"No checkpoint of {origin} has a quorum: {missing[-1]}.")
    elif len(cosigners) < cosignatures_min:
        raise TamperError(
            f"{len(cosigners)} trusted regions or witnesses other than {log.region} cosigned {origin}, "
            f"{cosignatures_min} are required."
        )
    for note in remembered:
        if parse_note(note).text.partition("\n")[0] == origin:
            _check_prefix(files, checkpoint, log.open(note).checkpoint)
    return OpenedLog(path, key, checkpoint, cosigners)


def _cosigners(
    files: Files, signed: SignedCheckpoint, before: Sequence[SignedCheckpoint], log: LogTrust
) -> tuple[Cosigner, ...]:
    newest: dict[str, Cosigner] = {}
    for note in (*before, signed):
        if not note.cosigned:
            continue
        _check_prefix(files, signed.checkpoint, note.checkpoint)
        counted = log.cosigners(note.cosigned)
        for by in note.cosigned:
            party = log.witnesses[by.key]
            if party in counted:
                newest[party] = Cosigner(party, note.checkpoint.size, by.time_s)
    return tuple(newest[name] for name in sorted(newest))


def _check_prefix(files: Files, whole: Checkpoint, cosigned: Checkpoint) -> None:
    if cosigned.size > whole.size:
        raise RolledBackError(
            f"The log {whole.origin} was rolled back: {cosigned.size} leaves were cosigned, its checkpoint has "
            f"{whole.size}."
        )
    if root_from_nodes(cosigned.size, TileHashes(files, whole.size)) != cosigned.root:
        raise RolledBackError(
            f"The log {whole.origin} is not the one that was cosigned: its first {cosigned.size} leaves have "
            "another root."
        )


def check_tree(files: Files, checkpoint: Checkpoint) -> None:
    """Step 2. Memory is one tile; reads a 256th of the level-0 tiles' bytes. Raises TamperError."""
    if read_tree(files, checkpoint.size).root() != checkpoint.root:
        raise TamperError(
            f"The tiles of {checkpoint.origin} do not hash to the root in its checkpoint of {checkpoint.size} leaves."
        )
    level = 1
    while (hashes := checkpoint.size >> TILE_HEIGHT * level) >= TILE_WIDTH:
        for index in range(hashes // TILE_WIDTH):
            tile = read_tile(files, level, index, checkpoint.size)
            above = read_tile(files, level + 1, index // TILE_WIDTH, checkpoint.size)
            at = index % TILE_WIDTH * HASH_BYTES
            if complete_root(split_hashes(tile)) != above[at : at + HASH_BYTES]:
                raise TamperError(
                    f"The tile {tile_path(level, index)} of {checkpoint.origin} does not hash to its place in level "
                    f"{level + 1}."
                )
        level += 1


def problem_of(path: str, error: CorruptionError) -> Problem:
    """The problem that an error of `open_log` stands for."""
    return Problem(path, None, error.sentence)
