"""The driver's part of verifying a log: signature, cosignatures, upper tiles, root. No Spark here.

A log is verified in these steps; the source (`audit.spark.source`) does 4 to 6 in the executors:

1. the checkpoint is signed by a log key that the caller trusts;
2. tiles of level 1 and up hash to their places, up to the checkpoint's root;
3. cosignatures of trusted witnesses hold, and what they cosigned is a prefix of this very tree;
4. each full tile of level 0 hashes to its place in level 1;
5. each leaf hashes to its place in level 0, and decodes;
6. each receipt in an egress log agrees with the leaf that carries it, and is signed by a trusted receipt key, if
   the caller has any.

Whether the leaves, authentic as they are, tell a consistent story is the reports' business (reconciliation,
exceptions): a log that was faithfully kept by a faulty bridge verifies, and its report says what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from audit.checkpoint import Checkpoint, SignedCheckpoint, open_checkpoint
from audit.errors import RolledBackError
from audit.merkle import (
    HASH_BYTES,
    TILE_HEIGHT,
    TILE_WIDTH,
    complete_root,
    root_from_nodes,
    split_hashes,
)
from audit.note import Algorithm, VerifierKey, parse_note
from audit.spark.document import Cosigner
from audit.spark.files import open_files, read_checkpoint
from audit.tile import COSIGNED_PATH, Files, TileHashes, read_tile, read_tree, tile_path
from felix.errors import CorruptionError, TamperError

STEPS: Final = (
    "The checkpoint's signature holds under the trusted key of the log.",
    "Tiles of level 1 and up hash to their places, up to the root in the checkpoint.",
    "Cosignatures of trusted witnesses hold, and what they cosigned is a prefix of this tree.",
    "Each full tile of level 0 hashes to its place in level 1.",
    "Each leaf hashes to its place in the tree, and decodes.",
)
RECEIPT_STEP: Final = "Each receipt is signed by a trusted key of the destination and agrees with its leaf."
NO_RECEIPT_STEP: Final = "Each receipt agrees with its leaf. Its signature was not checked: no receipt key of the destination was given."


@dataclass(frozen=True, slots=True)
class Trust:
    """The keys that the reader of a report trusts, however they reached them.

    `logs` sign checkpoints, `witnesses` cosign them; `receipt_keys` are Ed25519 public bytes by 16-byte key id.
    Empty `logs` trust nothing, and no report can be made.
    """

    logs: tuple[VerifierKey, ...]
    witnesses: tuple[VerifierKey, ...] = ()
    receipt_keys: Mapping[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def parse(cls, vkeys: tuple[str, ...], receipt_keys: Mapping[bytes, bytes] | None = None) -> Trust:
        """Keys as text (vkeys): those of the cosignature type are witnesses, the others logs.

        Raises RequestError for text that is no verifier key.
        """
        keys = [VerifierKey.parse(text) for text in vkeys]
        return cls(
            tuple(key for key in keys if key.algorithm is Algorithm.ED25519),
            tuple(key for key in keys if key.algorithm is Algorithm.COSIGNATURE),
            dict(receipt_keys or {}),
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


def open_log(path: str, trust: Trust) -> OpenedLog:
    """Steps 1 to 3. Raises TamperError or RolledBackError with what does not hold, RequestError without a log."""
    files = open_files(path)
    data = read_checkpoint(files, path)
    origin = parse_note(data).text.partition("\n")[0]
    keys = [key for key in trust.logs if key.name == origin]
    if not keys:
        raise TamperError(
            f"The log at {path} says it is {origin[:200]!r}, and no trusted key has that name.",
            hint="Give the log's verifier key, as its region published it.",
        )
    signed = _open_with_any(data, keys, trust)
    key = keys[0] if len(keys) == 1 else next(each for each in keys if _signs(data, each, trust))
    checkpoint = signed.checkpoint
    check_tree(files, checkpoint)
    cosigners = _cosigners(files, signed, key, trust)
    return OpenedLog(path, key, checkpoint, cosigners)


def _signs(data: bytes, key: VerifierKey, trust: Trust) -> bool:
    try:
        open_checkpoint(data, key, trust.witnesses)
    except TamperError:
        return False
    return True


def _open_with_any(data: bytes, keys: list[VerifierKey], trust: Trust) -> SignedCheckpoint:
    """A log whose key was changed has two keys of one name; one of them must hold."""
    for key in keys[:-1]:
        if _signs(data, key, trust):
            return open_checkpoint(data, key, trust.witnesses)
    return open_checkpoint(data, keys[-1], trust.witnesses)


def _cosigners(
    files: Files, signed: SignedCheckpoint, key: VerifierKey, trust: Trust
) -> tuple[Cosigner, ...]:
    newest: dict[str, Cosigner] = {}
    notes = [signed]
    if (data := files.read(COSIGNED_PATH)) is not None:
        notes.insert(0, open_checkpoint(data, key, trust.witnesses))
    for note in notes:
        if not note.cosigned:
            continue
        _check_prefix(files, signed.checkpoint, note.checkpoint)
        for by in note.cosigned:
            newest[by.key.name] = Cosigner(by.key.name, note.checkpoint.size, by.time_s)
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
