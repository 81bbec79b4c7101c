"""Proofs in the format of C2SP tlog-proof: one leaf is in one log, and witnesses have seen it. Pure over `Files`.

    c2sp.org/tlog-proof@v1
    extra <base64>
    index <leaf>
    <base64 of a hash>...

    <the checkpoint, verbatim>

Source: https://c2sp.org/tlog-proof. What stands in `extra` is not authenticated; ours is the leaf itself and the source
offset that is meant, so that its hash can be computed, and the inclusion proof then authenticates the leaf:
``felix/tlog-proof/1``, a zero byte, the offset (u64), the leaf's bytes. Tools that know nothing of Felix check the rest.
A crossing has two such proofs: of its INTENT leaf, and of its ACK leaf, which has the destination's receipt. The receipt is for
the records whose entries have the SHA-256 in it, so the ACK's proof has those entries, and the record is one of them:
``felix/tlog-proof/2``, a zero byte, the offset (u64), the leaf's length (u32), the leaf, the entries of the batch.
Where the receipt is under a key that ended since, the ACK's proof has besides its path under the root that the key's region names for its end (audit.keys_in_log):
``felix/tlog-proof/3``, a zero byte, the offset (u64), the leaf's length (u32), the leaf, the number of hashes (u8), the hashes, the entries of the batch.

Invariants: `decode_proof(encode_proof(p)) == p`, and a file has one reading; `check_leaf` holds for every proof that
`prove_leaves` makes from a log that verifies, under the same trust; one of an ACK shows that this record arrived, or says in `unsupported` that it does not. Callers: cli, tests.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Sequence
from hashlib import sha256
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from audit.agreement import VERSION_1_UNSUPPORTED
from audit.checkpoint import SignedCheckpoint
from audit.cosigned_times import dated_late
from audit.keys_in_log import keys_of_proof
from audit.leaf import ENTRY_BYTES, Entry, Header, Kind, Leaf, Side, decode_leaf, find_entry
from audit.merkle import HASH_BYTES, PROOF_HASHES_MAX, inclusion_proof, leaf_hash, verify_inclusion
from audit.note import encode_note
from audit.proof import (
    choose_checkpoint,
    cosigned_by,
    ends_shown,
    find_crossing,
    keys_of_files,
    path_under,
    read_checkpoints,
)
from audit.receipt import (
    WITHOUT_ENTRIES_UNSUPPORTED,
    WITHOUT_PATH_UNSUPPORTED,
    Receipt,
    differences,
    read_unverified,
)
from audit.tile import Files, TileHashes, read_entries
from audit.tree_head import decode_hash, parse_size
from audit.trust import COSIGNATURES_MIN, WHO_COSIGNED, Trust
from felix.errors import TamperError

FIRST_LINE: Final = "c2sp.org/tlog-proof@v1"
SUFFIX: Final = ".tlog-proof"
PROOF_BYTES_MAX: Final = 8 << 20
"""The entries of 65,536 records are 4.5 MB, and a third more as base64."""
WITHOUT_DOCUMENTS_UNSUPPORTED: Final = (
    "that both regions signed a grant with these terms, and that people approved it: the documents are in the other format",
)
_LEAF_ALONE: Final = b"felix/tlog-proof/1\0"
_WITH_ENTRIES: Final = b"felix/tlog-proof/2\0"
_BELOW_END: Final = b"felix/tlog-proof/3\0"
_OFFSET: Final = Struct(">Q")
_LENGTH: Final = Struct(">I")
_HASHES: Final = Struct(">B")
assert 1 << 8 * _HASHES.size > PROOF_HASHES_MAX


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


def prove_leaf(
    files: Files,
    signed: SignedCheckpoint,
    index: int,
    leaf: bytes,
    offset: int,
    entries: bytes = b"",
    below_end: Sequence[bytes] | None = None,
) -> bytes:
    """The proof that this leaf stands at this index under this checkpoint of the log. `entries`: of the batch, of which the leaf
    is the ACK; `below_end`: the path under the end of the key that signed its receipt. Raises TamperError where the log's files do not hold."""
    size = signed.checkpoint.size
    path = inclusion_proof(index, size, TileHashes(files, size))
    verify_inclusion(leaf_hash(leaf), index, size, path, signed.checkpoint.root)
    extra = _LEAF_ALONE + _OFFSET.pack(offset) + leaf
    sized = _OFFSET.pack(offset) + _LENGTH.pack(len(leaf)) + leaf
    if below_end is not None:
        extra = _BELOW_END + sized + _HASHES.pack(len(below_end)) + b"".join(below_end) + entries
    elif entries:
        extra = _WITH_ENTRIES + sized + entries
    return encode_proof(TlogProof(extra, index, tuple(path), encode_note(signed.note)))


class ProvenLeaf(msgspec.Struct, frozen=True):
    """What such a proof shows, once checked."""

    kind: str
    index: int
    offset: int
    """the source offset that it is about"""
    entry: Entry | None
    """the record's; None in the proof of an ACK whose receipt does not say which records it is for"""
    header: Header
    version: int
    """of the leaf's format"""
    receipt: Receipt | None
    origin: str
    size: int
    """leaves that the checkpoint covers"""
    cosigned: tuple[tuple[str, int], ...]
    """regions and outside witnesses, with the POSIX seconds of their cosignature"""
    unsupported: tuple[str, ...] = ()
    """what it does not show: that the grant is one, and which records of its range a receipt of before is for"""


def check_leaf(data: bytes, trust: Trust, *, cosignatures_min: int = COSIGNATURES_MIN) -> ProvenLeaf:
    """Verify a proof file without the log; the steps are those of the specification. Raises TamperError."""
    proof = decode_proof(data)
    # 1. The leaf, from the extra data, and its hash.
    leaf_data, offset, below_end, entries = _read_extra(proof.extra)
    # 2. The checkpoint is signed by a key of the log that its origin names.
    log = trust.log_of(proof.checkpoint)
    signed = log.open(proof.checkpoint)
    # 3. Enough of those who are trusted have cosigned it.
    missing = log.missing(signed.cosigned, cosignatures_min)
    if missing:
        raise TamperError(
            f"The proof's checkpoint is not cosigned as required: {missing}.", hint=WHO_COSIGNED
        )
    # 4. The leaf is in its tree, and the log's to say.
    checkpoint = signed.checkpoint
    verify_inclusion(
        leaf_hash(leaf_data), proof.leaf_index, checkpoint.size, proof.path, checkpoint.root, "The leaf"
    )
    leaf = decode_leaf(leaf_data)
    header = leaf.header
    log.origin.require_place(header, f"The proof's leaf {proof.leaf_index}")
    if (
        header.kind not in (Kind.INTENT, Kind.ACK)
        or header.side is not Side.EGRESS
        or not _covers(leaf, offset)
    ):
        raise TamperError(
            f"The proof's leaf {proof.leaf_index} is no INTENT and no ACK of the record at offset {offset}."
        )
    # 5. The receipt in an ACK is the destination's, says the same, and is for this record among others.
    receipt: Receipt | None = None
    listed: Leaf = leaf
    unsupported: tuple[str, ...] = WITHOUT_DOCUMENTS_UNSUPPORTED
    if leaf.version == 1:
        unsupported += VERSION_1_UNSUPPORTED
    if header.kind is Kind.ACK:
        # A region cosigns no two histories of a log: of one that it cosigned, what stands below the end of its former key counts. Else the path shows it.
        shown = {}
        if below_end is not None:
            shown[proof.leaf_index] = ends_shown(trust, log.name, proof.leaf_index, leaf_data, below_end)
        keys = keys_of_proof(trust, log.name, checkpoint.size, checkpoint.root, signed.seen_by, shown)
        receipt = keys.open_receipt(header.receipt, proof.leaf_index)
        differing = differences(receipt, header)
        if differing:
            raise TamperError(f"The proof's receipt and ACK differ in {', '.join(differing)}.")
        listed = Leaf(header, entries)
        if not receipt.entries_sha256:
            unsupported += WITHOUT_ENTRIES_UNSUPPORTED
    if not (header.path if receipt is None else receipt.path_sha256):
        unsupported += WITHOUT_PATH_UNSUPPORTED
    if receipt is None and below_end is not None:
        raise TamperError("The proof carries a path that no receipt is for.")
    if header.kind is Kind.INTENT or receipt is None or not receipt.entries_sha256:
        if entries:
            raise TamperError("The proof carries entries that no receipt is for.")
    elif len(entries) % ENTRY_BYTES or receipt.entries_sha256 != sha256(entries).digest():
        raise TamperError("The proof's receipt is for other records than the proof lists.")
    elif find_entry(listed, offset) is None:
        raise TamperError(f"The proof's receipt is not for the record at offset {offset}: it stayed.")
    cosigned = cosigned_by(log, signed)
    unsupported += dated_late(cosigned, header.time_ms)
    return ProvenLeaf(
        header.kind.name,
        proof.leaf_index,
        offset,
        find_entry(listed, offset),
        header,
        leaf.version,
        receipt,
        checkpoint.origin,
        checkpoint.size,
        cosigned,
        unsupported,
    )


def _read_extra(extra: bytes | None) -> tuple[bytes, int, tuple[bytes, ...] | None, bytes]:
    """The leaf, the offset that is meant, the path under the end of the receipt's key, if it is there, and the entries of the batch."""
    start = len(_LEAF_ALONE) + _OFFSET.size
    magic = b"" if extra is None else extra[: len(_LEAF_ALONE)]
    known = (_LEAF_ALONE, _WITH_ENTRIES, _BELOW_END)
    if extra is None or magic not in known or len(extra) <= start + _LENGTH.size:
        raise TamperError("The tlog-proof does not carry a leaf of Felix in its extra data.")
    (offset,) = _OFFSET.unpack_from(extra, len(magic))
    if magic == _LEAF_ALONE:
        return extra[start:], offset, None, b""
    end = start + _LENGTH.size + _LENGTH.unpack_from(extra, start)[0]
    leaf, rest = extra[start + _LENGTH.size : end], extra[end:]
    if not rest:
        raise TamperError("The tlog-proof says that it carries more than a leaf, and does not.")
    if magic == _WITH_ENTRIES:
        return leaf, offset, None, rest
    (hashes,) = _HASHES.unpack_from(rest)
    entries_at = _HASHES.size + hashes * HASH_BYTES
    if hashes > PROOF_HASHES_MAX or entries_at > len(rest):
        raise TamperError("The tlog-proof says that it carries a path under the end of a key, and does not.")
    path = (rest[at : at + HASH_BYTES] for at in range(_HASHES.size, entries_at, HASH_BYTES))
    return leaf, offset, tuple(path), rest[entries_at:]


def _covers(leaf: Leaf, offset: int) -> bool:
    first, last = leaf.header.first_offset, leaf.header.last_offset
    if first is None or last is None or not first <= offset <= last:
        return False
    return leaf.header.kind is Kind.ACK or find_entry(leaf, offset) is not None


def prove_leaves(
    files: Files,
    trust: Trust,
    stream: str,
    shard: int,
    offset: int,
    *,
    destination_region: str = "",
    leaf: int | None = None,
) -> list[bytes]:
    """The proofs of the record's INTENT leaf and, where there is one, of its ACK leaf, under one checkpoint. Errors as
    audit.proof.prove."""
    checkpoints = read_checkpoints(files, trust)
    intent, ack = find_crossing(files, checkpoints[0], stream, shard, offset, destination_region, leaf=leaf)
    if ack is None:
        chosen = choose_checkpoint(checkpoints, 1 + intent[0], trust)
        return [prove_leaf(files, chosen, intent[0], intent[2], offset)]
    index, data, receipt = ack[0], ack[2], ack[1].header.receipt
    keys = keys_of_files(files, checkpoints, trust)
    ended = keys.ending_of_receipt(receipt)
    below_end = None if ended is None else path_under(files, index, data, ended)
    # Without the path, the region whose key it was must have seen the checkpoint.
    seen_by = "" if ended is None or below_end is not None else ended.region
    chosen = choose_checkpoint(checkpoints, 1 + max(intent[0], index), trust, seen_by)
    if keys.is_of_former_key(receipt):
        # Where it counts for nothing, whoever makes the proof hears of it, not whoever is given it.
        shown = {} if ended is None or below_end is None else {index: [(ended.size, ended.root)]}
        size, root = chosen.checkpoint.size, chosen.checkpoint.root
        keys_of_proof(trust, chosen.checkpoint.origin, size, root, chosen.seen_by, shown).open_receipt(
            receipt, index
        )
    entries = b""
    if read_unverified(receipt).entries_sha256:
        entries = _entries(files, chosen, intent[0], intent[1].header)
    return [
        prove_leaf(files, chosen, intent[0], intent[2], offset),
        prove_leaf(files, chosen, index, data, offset, entries, below_end),
    ]


def _entries(files: Files, signed: SignedCheckpoint, index: int, intent: Header) -> bytes:
    """What all INTENT leaves of the batch list: they were appended together."""
    first = index - intent.part
    leaves = read_entries(files, first, first + intent.parts, signed.checkpoint.size)
    return b"".join(decode_leaf(data).entries for _, data in leaves)
