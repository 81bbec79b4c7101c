"""Proofs in the format of C2SP tlog-proof: one leaf is in one log, and witnesses have seen it. Pure over `Files`.

    c2sp.org/tlog-proof@v1
    extra <base64>
    index <leaf>
    <base64 of a hash>...

    <the checkpoint, verbatim>

Source: https://c2sp.org/tlog-proof. What stands in `extra` is not authenticated; ours is the leaf itself and the source
offset that is meant, so that its hash can be computed, and the inclusion proof then authenticates the leaf:
``felix/tlog-proof/1``, a zero byte, the offset (u64), the leaf's bytes. Tools that know nothing of Felix check the rest.
A crossing has two such proofs: of its INTENT leaf, and of its ACK leaf, which has the destination's receipt.

Invariants: `decode_proof(encode_proof(p)) == p`, and a file has one reading; `check_leaf(prove_leaf(…), …)` holds for every
leaf under the checkpoint. Callers: cli, tests.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from audit.checkpoint import SignedCheckpoint
from audit.leaf import Entry, Header, Kind, Leaf, Side, decode_leaf, find_entry
from audit.merkle import PROOF_HASHES_MAX, inclusion_proof, leaf_hash, verify_inclusion
from audit.note import encode_note
from audit.proof import choose_checkpoint, cosigned_by, find_crossing, read_checkpoints
from audit.receipt import Receipt, differences
from audit.tile import Files, TileHashes
from audit.tree_head import decode_hash, parse_size
from audit.trust import COSIGNATURES_MIN, Trust
from felix.errors import TamperError

FIRST_LINE: Final = "c2sp.org/tlog-proof@v1"
SUFFIX: Final = ".tlog-proof"
PROOF_BYTES_MAX: Final = 1 << 20
_EXTRA_MAGIC: Final = b"felix/tlog-proof/1\0"
_OFFSET: Final = Struct(">Q")


class TlogProof(NamedTuple):
    """The parts of a file. `extra` is None where the line is missing."""

    extra: bytes | None
    leaf_index: int
    path: tuple[bytes, ...]
    checkpoint: bytes


def encode_proof(proof: TlogProof) -> bytes:
    """The file's bytes."""
    lines = [FIRST_LINE]
    if proof.extra is not None:
        lines.append(f"extra {b64encode(proof.extra).decode()}")
    lines.append(f"index {proof.leaf_index}")
    lines += [b64encode(hash_).decode() for hash_ in proof.path]
    return "\n".join([*lines, "", ""]).encode() + proof.checkpoint


def decode_proof(data: bytes) -> TlogProof:
    """Read a file; nothing is verified. Raises TamperError where it is not such a proof."""
    if len(data) > PROOF_BYTES_MAX:
        raise TamperError(f"A proof file of {len(data)} bytes is over the limit of {PROOF_BYTES_MAX}.")
    head, blank, checkpoint = data.partition(b"\n\n")
    try:
        first, *lines = head.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise TamperError("The lines of a tlog-proof before its checkpoint are not ASCII.") from error
    if first != FIRST_LINE or not blank:
        raise TamperError(
            f"A tlog-proof begins with the line {FIRST_LINE} and has an empty line before its checkpoint."
        )
    extra: bytes | None = None
    if lines and lines[0].startswith("extra "):
        extra = _decode_extra(lines.pop(0)[6:])
    word, _, number = lines.pop(0).partition(" ") if lines else ("", "", "")
    index = parse_size(number)
    if word != "index" or index is None:
        raise TamperError("A tlog-proof has a line `index <leaf>` before its hashes.")
    if len(lines) > PROOF_HASHES_MAX:
        raise TamperError(f"A tlog-proof of {len(lines)} hashes is none.")
    path = []
    for line in lines:
        hash_ = decode_hash(line)
        if hash_ is None:
            raise TamperError(f"{line[:60]!r} is not a hash of 32 bytes in base64.")
        path.append(hash_)
    return TlogProof(extra, index, tuple(path), checkpoint)


def _decode_extra(text: str) -> bytes:
    try:
        extra = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        extra = b""
    if b64encode(extra).decode() != text:
        raise TamperError("The extra data of the tlog-proof are not base64.")
    return extra


def is_tlog_proof(data: bytes) -> bool:
    """True where the first line says so."""
    return data.startswith(FIRST_LINE.encode() + b"\n")


def prove_leaf(files: Files, signed: SignedCheckpoint, index: int, leaf: bytes, offset: int) -> bytes:
    """The proof that this leaf stands at this index under this checkpoint of the log. Raises TamperError where the
    log's files do not hold."""
    size = signed.checkpoint.size
    path = inclusion_proof(index, size, TileHashes(files, size))
    verify_inclusion(leaf_hash(leaf), index, size, path, signed.checkpoint.root)
    extra = _EXTRA_MAGIC + _OFFSET.pack(offset) + leaf
    return encode_proof(TlogProof(extra, index, tuple(path), encode_note(signed.note)))


class ProvenLeaf(msgspec.Struct, frozen=True):
    """What such a proof shows, once checked."""

    kind: str
    index: int
    offset: int
    """the source offset that it is about"""
    entry: Entry | None
    """the record's, where the leaf has entries"""
    header: Header
    receipt: Receipt | None
    origin: str
    size: int
    """leaves that the checkpoint covers"""
    cosigned: tuple[tuple[str, int], ...]
    """regions and outside witnesses, with the POSIX seconds of their cosignature"""


def check_leaf(data: bytes, trust: Trust, *, cosignatures_min: int = COSIGNATURES_MIN) -> ProvenLeaf:
    """Verify a proof file without the log; the steps are those of the specification. Raises TamperError."""
    proof = decode_proof(data)
    # 1. The leaf, from the extra data, and its hash.
    leaf_data, offset = _read_extra(proof.extra)
    # 2. The checkpoint is signed by a key of the log that its origin names.
    log = trust.log_of(proof.checkpoint)
    signed = log.open(proof.checkpoint)
    # 3. Enough of those who are trusted have cosigned it.
    missing = log.missing(signed.cosigned, cosignatures_min)
    if missing:
        raise TamperError(f"The proof's checkpoint is not cosigned as required: {missing}.")
    # 4. The leaf is in its tree.
    checkpoint = signed.checkpoint
    verify_inclusion(
        leaf_hash(leaf_data), proof.leaf_index, checkpoint.size, proof.path, checkpoint.root, "The leaf"
    )
    leaf = decode_leaf(leaf_data)
    header = leaf.header
    if (
        header.kind not in (Kind.INTENT, Kind.ACK)
        or header.side is not Side.EGRESS
        or not _covers(leaf, offset)
    ):
        raise TamperError(
            f"The proof's leaf {proof.leaf_index} is no INTENT and no ACK of the record at offset {offset}."
        )
    # 5. The receipt in an ACK is the destination's, and says the same.
    receipt: Receipt | None = None
    if header.kind is Kind.ACK:
        receipt = trust.open_receipt(header.receipt)
        differing = differences(receipt, header)
        if differing:
            raise TamperError(f"The proof's receipt and ACK differ in {', '.join(differing)}.")
    return ProvenLeaf(
        header.kind.name,
        proof.leaf_index,
        offset,
        find_entry(leaf, offset),
        header,
        receipt,
        checkpoint.origin,
        checkpoint.size,
        cosigned_by(log, signed),
    )


def _read_extra(extra: bytes | None) -> tuple[bytes, int]:
    start = len(_EXTRA_MAGIC) + _OFFSET.size
    if extra is None or not extra.startswith(_EXTRA_MAGIC) or len(extra) <= start:
        raise TamperError("The tlog-proof does not carry a leaf of Felix in its extra data.")
    return extra[start:], _OFFSET.unpack_from(extra, len(_EXTRA_MAGIC))[0]


def _covers(leaf: Leaf, offset: int) -> bool:
    first, last = leaf.header.first_offset, leaf.header.last_offset
    if first is None or last is None or not first <= offset <= last:
        return False
    return leaf.header.kind is Kind.ACK or find_entry(leaf, offset) is not None


def prove_leaves(
    files: Files, trust: Trust, stream: str, shard: int, offset: int, *, destination_region: str = ""
) -> list[bytes]:
    """The proofs of the record's INTENT leaf and, where there is one, of its ACK leaf, under one checkpoint. Errors as
    audit.proof.prove."""
    checkpoints = read_checkpoints(files, trust)
    intent, ack = find_crossing(files, checkpoints[0], stream, shard, offset, destination_region)
    found = [intent] if ack is None else [intent, ack]
    chosen = choose_checkpoint(checkpoints, 1 + max(index for index, _, _ in found), trust)
    return [prove_leaf(files, chosen, index, data, offset) for index, _, data in found]
