"""Proof files: that one record crossed, under which grant, and that the destination has it. Pure over `Files`.

A proof is one JSON document that stands by itself: the INTENT leaf that lists the record, the ACK leaf with the
destination's receipt and, where the batch stands in several INTENT leaves, the others of them (the receipt is for the records of all), the leaves of the signed documents that it crossed under (both halves of the grant, approvals, the
source's policy), all with their inclusion paths, and the checkpoint with its signatures. `check_proof`
needs trusted keys and nothing else. A record whose batch has no ACK yet has a proof of its INTENT alone.

Not shown: that nothing else stands in the log. A revocation before the record is for whoever has the log to find.
A record in a leaf of version 1 has a proof of format 1, without documents; it says what it does not show.
Where a document or the receipt is under a key that ended since, the proof is of format 3: beside its inclusion path such a leaf has the one under the root that the key's
region names for its end (audit.keys_in_log).

Invariants: `check_proof(prove(…), …)` holds for every record that the checkpoint covers; any change of the
document that changes its meaning is refused, but that whoever hands it on may leave the receipt out: what is left proves the INTENT alone, and says nothing of an answer. Callers: cli, tests.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import chain
from typing import Annotated, Final, NamedTuple

import msgspec

from audit.agreement import VERSION_1_UNSUPPORTED, Agreements
from audit.checkpoint import Checkpoint, SignedCheckpoint
from audit.consistency import continues
from audit.cosigned_notes import COSIGNED_PATHS, notes_at
from audit.cosigned_times import dated_late
from audit.document_leaf import DOCUMENT_FILE_BYTES_MAX, read_document
from audit.keys_in_log import KeysInLog, keys_of_log, keys_of_proof
from audit.leaf import (
    DOCUMENT_KINDS,
    CommitmentKey,
    Committer,
    Entry,
    Header,
    Kind,
    Leaf,
    Side,
    SourceRecord,
    decode_leaf,
    find_entry,
    payload_commitment,
    read_header,
)
from audit.merkle import (
    HASH_BYTES,
    PROOF_HASHES_MAX,
    TILE_HEIGHT,
    TILE_WIDTH,
    Tree,
    inclusion_proof,
    leaf_hash,
    verify_inclusion,
)
from audit.note import encode_note
from audit.origin import Origin
from audit.range_index import candidate_bundles
from audit.receipt import (
    WITHOUT_ENTRIES_UNSUPPORTED,
    WITHOUT_PATH_UNSUPPORTED,
    Receipt,
    differences,
    read_unverified,
)
from audit.tile import (
    CHECKPOINT_PATH,
    Files,
    TileHashes,
    read_bundle,
    read_entries,
)
from audit.trust import COSIGNATURES_MIN, WHO_COSIGNED, Ending, LogTrust, Trust
from felix.batch import encode_headers
from felix.errors import Code, RequestError, TamperError
from felix.provenance import PATH_HEADER, parse_path
from policy.approval import parse_document
from policy.grant import check_path
from policy.terms import GrantTerms

FORMAT: Final = "felix/proof/2"
FORMAT_3: Final = "felix/proof/3"
"""With leaves under keys that ended since."""
FORMAT_1: Final = "felix/proof/1"
"""Without documents: of records in leaves of version 1."""
PROOF_BYTES_MAX: Final = 8 << 20
"""A grant's documents are some 50 kB; a policy of the largest size, as base64, has 1.4 MB."""
DOCUMENTS_MAX: Final = 128
"""Document leaves of one proof: both halves, policies, and the approvals that two sides may ask for, several times over."""
APPROVALS_SHOWN: Final = 24
"""Approvals that a proof is made with, where the crossing rests on fewer: more than two sides ask for. A chain has some 3 kB."""

PARTS_MAX: Final = 128
"""INTENT leaves of one batch: 65,536 records of 68 bytes take 70."""

Base64 = Annotated[str, msgspec.Meta(max_length=100_000)]
"""Of a leaf, or a hash."""
DocumentBase64 = Annotated[str, msgspec.Meta(max_length=DOCUMENT_FILE_BYTES_MAX * 4 // 3 + 4)]


Path = Annotated[tuple[Base64, ...], msgspec.Meta(max_length=PROOF_HASHES_MAX)]


class _Included(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    index: Annotated[int, msgspec.Meta(ge=0)]
    leaf: Base64
    path: Path
    ended_path: Path | None = None
    """the path under the root at which the key ended that signed what is in it; None: it did not end"""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stream: str
    shard: Annotated[int, msgspec.Meta(ge=0)]
    offset: Annotated[int, msgspec.Meta(ge=0)]


class _Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    record: _Record
    checkpoint: str
    intent: _Included
    ack: _Included | None
    documents: Annotated[tuple[_Included, ...], msgspec.Meta(max_length=DOCUMENTS_MAX)] = ()
    """leaves of signed documents, in order; all before the INTENT"""
    parts: Annotated[tuple[_Included, ...], msgspec.Meta(max_length=PARTS_MAX)] = ()
    """the other INTENT leaves of the batch, in order; none where the receipt does not say which records it is for"""
    beside: dict[str, DocumentBase64] = {}
    """documents that are too long for their leaf, by SHA-256 in hex"""


_FIELDS: Final = tuple(f'"{name}"'.encode() for name in ("format", "checkpoint", "intent"))
"""What every proof file contains. More than one, so that none is hidden by changing one character."""


class Approved(msgspec.Struct, frozen=True):
    """Under which approval the record crossed: signed, verified, and in the log before it."""

    terms: GrantTerms
    approvers: tuple[str, ...]
    """SPIFFE ids, of both sides"""
    accepted_by: str
    """SPIFFE id of the destination's operator"""
    source_country: str
    destination_country: str
    """by the source's signed policy"""
    placed_otherwise: tuple[str, ...]
    """a sentence for each of the two regions that says itself that it is in another country"""
    policy_revision: int
    """of the source's policy, under which it offered the grant"""
    allowed_by_revision: int
    """the one that lets the record cross: the same, or a later one, which was in force by then"""


class Proven(msgspec.Struct, frozen=True):
    """What a proof shows, once checked."""

    stream: str
    shard: int
    offset: int
    entry: Entry
    intent: Header
    intent_index: int
    intent_version: int
    """of its leaf's format; with version 1 nothing is shown of key and headers"""
    approved: Approved | None
    """None where the proof is of format 1"""
    unsupported: tuple[str, ...]
    """what it does not show: a proof of format 1, or a receipt without a hash of the records"""
    ack: Header | None
    ack_index: int | None
    receipt: Receipt | None
    origin: str
    size: int
    """leaves that the checkpoint covers"""
    cosigned: tuple[tuple[str, int], ...]
    """regions and outside witnesses, with the POSIX seconds of their cosignature; the log's own region never counts"""


def prove(
    files: Files,
    trust: Trust,
    stream: str,
    shard: int,
    offset: int,
    *,
    destination_region: str = "",
    incarnation: bytes = b"",
    leaf: int | None = None,
) -> bytes:
    """The proof file for the record at this source offset, from an egress log's files.

    Where the offset crossed to several regions, or in several incarnations of the stream, the caller says which, or in which leaf it
    is announced. What is returned was checked, but for its cosignatures and receipt.
    Raises RequestError(NOT_FOUND | CONFLICT), TamperError where the log's files do not hold.
    """
    checkpoints = read_checkpoints(files, trust)
    (index, intent, data), ack = find_crossing(
        files, checkpoints[0], stream, shard, offset, destination_region, incarnation, leaf
    )
    # A cosigned checkpoint proves more; the newest one is for what lies behind it.
    needed = 1 + (index if ack is None else max(index, ack[0]))
    chosen = choose_checkpoint(checkpoints, needed, trust, _must_have_seen(checkpoints, trust, intent.header))
    keys = keys_of_files(files, checkpoints, trust)
    papers, beside = _papers(files, chosen, trust, keys, index, intent) if intent.version > 1 else ((), {})
    receipt = None
    if ack is not None:
        ended = keys.ending_of_receipt(ack[1].header.receipt) if intent.version > 1 else None
        receipt = _include(files, chosen, ack[0], ack[2], ended)
    has_ended = any(each is not None and each.ended_path is not None for each in (receipt, *papers))
    document = _Proof(
        FORMAT_1 if intent.version == 1 else FORMAT_3 if has_ended else FORMAT,
        _Record(stream, shard, offset),
        _note_text(chosen),
        _include(files, chosen, index, data),
        receipt,
        papers,
        () if ack is None else _parts(files, chosen, index, intent, ack[1].header),
        beside,
    )
    made = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    proof = _parse(made)
    if intent.version > 1:
        log = trust.log(chosen.checkpoint.origin)
        _approved(proof, chosen, trust, _keys_of_proof(proof, chosen, trust), log, intent)
    return made


def _must_have_seen(checkpoints: Sequence[SignedCheckpoint], trust: Trust, header: Header) -> str:
    """The other region of a crossing where a key of it ended further on than this copy of the log goes: no path to that end can be carried."""
    newest, other = checkpoints[0].checkpoint, header.destination_region
    ends = (ending for ending in trust.endings(newest.origin) if ending.region == other)
    return other if any(ending.size > newest.size for ending in ends) else ""


def keys_of_files(files: Files, checkpoints: Sequence[SignedCheckpoint], trust: Trust) -> KeysInLog:
    """Under which keys what stands in the log verifies, of which the newest checkpoint was held to the leaves (`find_crossing`)."""
    newest = checkpoints[0].checkpoint
    seen: dict[str, int] = {}
    for held in checkpoints:
        for region in held.seen_by:
            seen[region] = max(seen.get(region, 0), held.checkpoint.size)
    return keys_of_log(trust, newest, files, seen, newest.size)


Found = tuple[int, Leaf, bytes]
"""A leaf with its index and bytes."""


def find_crossing(
    files: Files,
    newest: SignedCheckpoint,
    stream: str,
    shard: int,
    offset: int,
    destination_region: str = "",
    incarnation: bytes = b"",
    leaf: int | None = None,
) -> tuple[Found, Found | None]:
    """The INTENT leaf that lists this record (`leaf`: this one), and the ACK leaf that answers it. Goes through the whole log: its index is
    its owner's word. Raises RequestError(NOT_FOUND | CONFLICT), TamperError."""
    about = _go_through(
        files, newest.checkpoint, Wanted(stream, shard, offset, destination_region, incarnation)
    )
    intents = [
        found
        for found in about[Kind.INTENT]
        if leaf in (None, found[0]) and find_entry(found[1], offset) is not None
    ]
    if not intents:
        withheld = any(find_entry(found, offset) for _, found, _ in about[Kind.WITHHELD])
        raise RequestError(
            f"No record {offset} of {stream} shard {shard} crossed, as far as the log's checkpoint goes"
            + (": it was withheld." if withheld else "."),
            code=Code.NOT_FOUND,
            hint="`felix audit show` lists what crossed.",
        )
    if len({_crossing_of(found.header) for _, found, _ in intents}) > 1:
        choices = ", ".join(
            f"{found.header.destination_region} (incarnation {found.header.incarnation.hex()}, leaf {at})"
            for at, found, _ in intents
        )
        raise RequestError(
            f"Record {offset} of {stream} shard {shard} crossed more than once: to {choices}.",
            code=Code.CONFLICT,
            hint="Say to which region, or which leaf.",
        )
    acks: dict[bytes, Found] = {}
    for found in about[Kind.ACK]:
        if _crossing_of(found[1].header) == _crossing_of(intents[0][1].header):
            acks.setdefault(found[1].header.envelope_sha256, found)
    # What was announced again, under another grant, counts once (audit.accounting): where it was answered, else where it was last.
    answered = [found for found in intents if found[1].header.envelope_sha256 in acks]
    intent = (answered or intents)[-1]
    return intent, acks.get(intent[1].header.envelope_sha256)


def _crossing_of(header: Header) -> tuple[str, str, str, bytes]:
    """Within one link and incarnation a record crosses once."""
    return header.destination_region, header.destination_stream, header.bridge, header.incarnation


def read_checkpoints(files: Files, trust: Trust) -> list[SignedCheckpoint]:
    """The log's checkpoints: the newest, and those that were cosigned. Raises RequestError(NOT_FOUND), TamperError."""
    data = files.read(CHECKPOINT_PATH)
    if data is None:
        raise RequestError("There is no audit log here: the checkpoint is missing.", code=Code.NOT_FOUND)
    log = trust.log_of(data)
    newest = log.open(data)
    others = [
        log.open_kept(note)
        for path in COSIGNED_PATHS
        if (held := files.read(path)) is not None
        for note in notes_at(path, held).values()
    ]
    # What none of the keys asked for signed proves nothing.
    return [
        newest,
        *(held for held in others if held.signed and held.checkpoint.size <= newest.checkpoint.size),
    ]


def choose_checkpoint(
    checkpoints: list[SignedCheckpoint], needed: int, trust: Trust, seen_by: str = ""
) -> SignedCheckpoint:
    """Of those with so many leaves the one that proves most: a quorum, then that this region has seen it, if one is named, then cosigners, then size."""
    log = trust.log(checkpoints[0].checkpoint.origin)

    def worth(held: SignedCheckpoint) -> tuple[bool, bool, int, int]:
        enough = not log.missing(held.cosigned, COSIGNATURES_MIN)
        return enough, seen_by in held.seen_by, len(log.cosigners(held.cosigned)), held.checkpoint.size

    return max((held for held in checkpoints if held.checkpoint.size >= needed), key=worth)


def _papers(
    files: Files, signed: SignedCheckpoint, trust: Trust, keys: KeysInLog, intent_index: int, intent: Leaf
) -> tuple[tuple[_Included, ...], dict[str, str]]:
    """The document leaves before the INTENT that it rests on, and the documents that stand beside the log. However many the log has of
    the grant: what later ones have replaced, and who says no more than was asked for, is left out.

    Raises TamperError where they do not hold, or do not let it cross.
    """
    header, size = intent.header, signed.checkpoint.size
    agreements = Agreements(trust, Origin.parse(signed.checkpoint.origin), keys)
    problems: list[str] = []
    tree = Tree()
    for at, data in read_entries(files, 0, intent_index, size):
        tree.add(leaf_hash(data))
        found = read_header(data)
        if found is None or found.kind not in DOCUMENT_KINDS:
            continue
        is_policy = found.kind is Kind.POLICY and found.source_region == header.source_region
        if is_policy or found.kind is Kind.DENY_ENTRY or found.grant_id == header.grant_id:
            if found.document_sha256 and not found.document and read_document(found, files) is None:
                # It may be what forbids the crossing.
                raise TamperError(
                    f"The document of leaf {at}, {found.kind.name}, is not beside the log: what let the record cross cannot be told without it.",
                    hint="Get the file from the log's region, or a copy of the log that has it, and run `felix audit verify` on that.",
                )
            problems += agreements.take(at, decode_leaf(data), lambda header: read_document(header, files))
    # Who serves the log may leave out here what was there when it was gone through.
    if not continues(files, signed.checkpoint, intent_index, tree.root()):
        raise TamperError(
            f"The {intent_index} leaves before the INTENT are not those under the checkpoint: the log changed meanwhile, or is served differently.",
            hint="Run `felix audit verify` on the log.",
        )
    # What does not hold is not believed, and may be of others: it is told where the crossing lacks something.
    if refused := agreements.judge(header):
        raise TamperError((problems or refused)[0], hint="Run `felix audit verify` on the log.")
    beside: dict[str, str] = {}
    papers: list[_Included] = []
    for at in agreements.rests_on(header, APPROVALS_SHOWN):
        ((_, data),) = read_entries(files, at, at + 1, size)
        found = decode_leaf(data).header
        document = read_document(found, files)
        if document is not None and not found.document:
            beside[found.document_sha256.hex()] = b64encode(document).decode()
        ended = None
        if keys.has_endings and document is not None:
            ended = keys.ending_of_document(parse_document(document))
        papers.append(_include(files, signed, at, bytes(data), ended))
    return tuple(papers), beside


def _parts(
    files: Files, signed: SignedCheckpoint, index: int, intent: Leaf, ack: Header
) -> tuple[_Included, ...]:
    """The other INTENT leaves of the batch, where the receipt is for the records of all of them."""
    if intent.header.parts == 1 or not read_unverified(ack.receipt).entries_sha256:
        return ()
    first = index - intent.header.part
    leaves = read_entries(files, first, first + intent.header.parts, signed.checkpoint.size)
    return tuple(_include(files, signed, at, bytes(data)) for at, data in leaves if at != index)


def _note_text(signed: SignedCheckpoint) -> str:
    return encode_note(signed.note).decode()


def _include(
    files: Files, signed: SignedCheckpoint, index: int, data: bytes, ended: Ending | None = None
) -> _Included:
    """`ended`: where the key ended under which it stands there."""
    size = signed.checkpoint.size
    path = inclusion_proof(index, size, TileHashes(files, size))
    verify_inclusion(leaf_hash(data), index, size, path, signed.checkpoint.root)
    included = _Included(index, b64encode(data).decode(), _encode_path(path))
    under = None if ended is None else path_under(files, index, data, ended)
    return included if under is None else msgspec.structs.replace(included, ended_path=_encode_path(under))


def path_under(files: Files, index: int, data: bytes, ended: Ending) -> list[bytes] | None:
    """The leaf's inclusion path under the root at which a key ended. None: it does not stand there, or this is a copy of the log that does not reach so far; then the region's
    cosignature must stand on the checkpoint."""
    if index >= ended.size:
        return None
    try:
        path = inclusion_proof(index, ended.size, TileHashes(files, ended.size))
        verify_inclusion(leaf_hash(data), index, ended.size, path, ended.root)
    except TamperError:
        return None
    return path


def _encode_path(path: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(b64encode(hash_).decode() for hash_ in path)


class Wanted(NamedTuple):
    """A record, and of which crossings of it: empty `destination_region` and `incarnation` are any."""

    stream: str
    shard: int
    offset: int
    destination_region: str = ""
    incarnation: bytes = b""

    def is_in(self, header: Header) -> bool:
        """Whether the leaf's source range covers it."""
        first, last = header.first_offset, header.last_offset
        return (
            (header.stream, header.shard) == (self.stream, self.shard)
            and first is not None
            and last is not None
            and first <= self.offset <= last
            and self.destination_region in ("", header.destination_region)
            and self.incarnation in (b"", header.incarnation)
        )


def find_leaves(
    files: Files, size: int, index: bytes | None, kind: Kind, side: Side, wanted: Wanted
) -> Iterator[Found]:
    """Leaves of this kind and side that cover the record, of a log that the caller writes: found by its `index`, and in the last bundle; None:
    there is none, and all of it is gone through.

    `size` is that of a checkpoint. What the index leaves out is not found, so nobody else's is asked. Blocks on the disk.
    """
    full, bundles = size >> TILE_HEIGHT, -(-size // TILE_WIDTH)
    named: Iterable[int] = range(full)
    if index is not None:
        found = candidate_bundles(index, kind, wanted.stream, wanted.shard, wanted.offset)
        named = (number for number in found if number < full)
    for number in chain(named, range(full, bundles)):
        for at, data in enumerate(read_bundle(files, number, size), number * TILE_WIDTH):
            header = read_header(data)
            if header is not None and (header.kind, header.side) == (kind, side) and wanted.is_in(header):
                yield at, decode_leaf(data), bytes(data)


def _go_through(files: Files, checkpoint: Checkpoint, wanted: Wanted) -> dict[Kind, list[Found]]:
    """All egress leaves that say what became of the record, by kind. Raises TamperError unless what was read is what the checkpoint signs: what
    is not there did not cross."""
    found: dict[Kind, list[Found]] = {Kind.INTENT: [], Kind.ACK: [], Kind.WITHHELD: []}
    tree = Tree()
    for at, data in read_entries(files, 0, checkpoint.size, checkpoint.size):
        tree.add(leaf_hash(data))
        header = read_header(data)
        if header is None or header.kind not in found or header.side is not Side.EGRESS:
            continue
        if wanted.is_in(header):
            found[header.kind].append((at, decode_leaf(data), bytes(data)))
    if tree.root() != checkpoint.root:
        raise TamperError(
            f"The {checkpoint.size} leaves do not have the root that the checkpoint signs.",
            hint="Run `felix audit verify` on the log.",
        )
    return found


def check_proof(
    data: bytes,
    trust: Trust,
    *,
    cosignatures_min: int = COSIGNATURES_MIN,
) -> Proven:
    """Verify a proof file without the log. The steps are those of docs/audit.md, "Checking a proof".

    `trust`: the bundles of the source region, of its witnesses and, where the proof has an ACK, of the destination.
    Raises TamperError where anything does not hold.
    """
    # 1. The document is a proof.
    proof = _parse(data)
    record = proof.record
    # 2. The checkpoint is signed by the log's key, and cosigned by enough others than its own region.
    checkpoint = proof.checkpoint.encode()
    log = trust.log_of(checkpoint)
    signed = log.open(checkpoint)
    missing = log.missing(signed.cosigned, cosignatures_min)
    if missing:
        raise TamperError(
            f"The proof's checkpoint is not cosigned as required: {missing}.", hint=WHO_COSIGNED
        )
    # 3. The INTENT leaf is in the tree, of a log that may say it, and lists the record.
    intent = _included(proof.intent, signed, "The INTENT leaf")
    header = intent.header
    log.origin.require_place(header, "The proof's INTENT")
    entry = find_entry(intent, record.offset)
    if (header.kind, header.side) != (Kind.INTENT, Side.EGRESS) or entry is None:
        raise TamperError(
            f"The proof's leaf {proof.intent.index} is no INTENT that lists record {record.offset}."
        )
    if (header.stream, header.shard) != (record.stream, record.shard):
        raise TamperError(
            f"The proof's INTENT is of {header.stream} shard {header.shard}, not of {record.stream}."
        )
    # 4. The documents are in the tree before it, signed by whom they must be, and let the record cross.
    keys = _keys_of_proof(proof, signed, trust)
    has_documents = proof.format != FORMAT_1
    approved = _approved(proof, signed, trust, keys, log, intent) if has_documents else None
    if approved is None and intent.version > 1:
        raise TamperError(
            f"A proof of the format {FORMAT_1} shows a leaf of version {intent.version}: its documents are left out."
        )
    # 5. The ACK leaf is in the tree, after the INTENT, and answers it.
    ack = None if proof.ack is None else _ack(proof.ack, signed, proof.intent.index, header)
    if ack is not None and approved is not None:
        strayed = check_path(ack.grant_id, approved.terms, ack.path)
        if strayed is not None:
            raise TamperError(f"The proof's ACK does not hold under its grant: {strayed.sentence}")
    # 6. The receipt in it is signed by the destination, and says the same.
    receipt: Receipt | None = None
    if ack is not None:
        assert proof.ack is not None
        receipt = keys.open_receipt(ack.receipt, proof.ack.index)
        differing = differences(receipt, ack)
        if differing:
            raise TamperError(f"The proof's receipt and ACK differ in {', '.join(differing)}.")
    # 7. It is for the records that the batch's INTENT leaves list, this one among them.
    unsupported: tuple[str, ...] = () if approved is not None else VERSION_1_UNSUPPORTED
    if receipt is not None and not receipt.entries_sha256:
        unsupported += WITHOUT_ENTRIES_UNSUPPORTED
    if not (header.path if receipt is None else receipt.path_sha256):
        unsupported += WITHOUT_PATH_UNSUPPORTED
    cosigned = cosigned_by(log, signed)
    unsupported += dated_late(cosigned, header.time_ms, None if ack is None else ack.time_ms)
    batch = _batch(proof.parts, signed, proof.intent.index, intent) if proof.parts else [intent]
    if receipt is None or not receipt.entries_sha256:
        if proof.parts:
            raise TamperError("The proof carries parts of a batch that no receipt is for.")
    elif [leaf.header.part for leaf in batch] != list(range(header.parts)):
        raise TamperError("The proof's receipt is for a batch of which it does not carry every INTENT leaf.")
    elif not receipt.is_for(sha256(b"".join(leaf.entries for leaf in batch)).digest()):
        raise TamperError("The proof's receipt is for other records than its INTENT lists.")
    return Proven(
        record.stream,
        record.shard,
        record.offset,
        entry,
        header,
        proof.intent.index,
        intent.version,
        approved,
        unsupported,
        ack,
        None if proof.ack is None else proof.ack.index,
        receipt,
        signed.checkpoint.origin,
        signed.checkpoint.size,
        cosigned,
    )


def _batch(parts: Sequence[_Included], signed: SignedCheckpoint, index: int, intent: Leaf) -> list[Leaf]:
    """All INTENT leaves of a batch, in order: they were appended together, so each has the place that its number says."""
    leaves = {intent.header.part: intent}
    first, before = index - intent.header.part, -1
    for included in parts:
        leaf = _included(included, signed, f"Leaf {included.index}")
        header = leaf.header
        differing = [name for name in _OF_BATCH if getattr(header, name) != getattr(intent.header, name)]
        if (
            differing
            or included.index != first + header.part
            or header.part in leaves
            or header.part < before
        ):
            raise TamperError(f"Leaf {included.index} of the proof is no part of the batch of its INTENT.")
        leaves[header.part], before = leaf, header.part
    return [leaves[part] for part in sorted(leaves)]


def _keys_of_proof(proof: _Proof, signed: SignedCheckpoint, trust: Trust) -> KeysInLog:
    """Under which keys the proof's leaves verify. Raises TamperError where a leaf is said to stand under the end of a key, and does not."""
    shown: dict[int, tuple[tuple[int, bytes], ...]] = {}
    checkpoint = signed.checkpoint
    for included in (*proof.documents, *([] if proof.ack is None else [proof.ack])):
        if included.ended_path is None:
            continue
        leaf, path = _decode_included(included, included.ended_path, f"Leaf {included.index}")
        shown[included.index] = ends_shown(trust, checkpoint.origin, included.index, leaf, path)
    return keys_of_proof(trust, checkpoint.origin, checkpoint.size, checkpoint.root, signed.seen_by, shown)


def ends_shown(
    trust: Trust, origin: str, index: int, leaf: bytes, path: Sequence[bytes]
) -> tuple[tuple[int, bytes], ...]:
    """The ends of keys in this log, by size and root, below which this path shows the leaf. Raises TamperError where it shows none."""
    ends = {(ending.size, ending.root) for ending in trust.endings(origin)}
    found = tuple(end for end in ends if _is_under(leaf, index, end, path))
    if not found:
        raise TamperError(
            f"Leaf {index} of the proof is said to stand below the end of a key, and no trusted bundle names an end in this log "
            "under which it does.",
            hint="A region has changed its keys since its bundle here was issued: give its current one. Or the proof was forged.",
        )
    return found


def _is_under(leaf: bytes, index: int, end: tuple[int, bytes], path: Sequence[bytes]) -> bool:
    size, root = end
    try:
        verify_inclusion(leaf_hash(leaf), index, size, path, root)
    except TamperError:
        return False
    return True


def _approved(
    proof: _Proof, signed: SignedCheckpoint, trust: Trust, keys: KeysInLog, log: LogTrust, intent: Leaf
) -> Approved:
    agreements = Agreements(trust, log.origin, keys)
    try:
        beside = {digest: b64decode(text, validate=True) for digest, text in proof.beside.items()}
    except ValueError as error:
        raise TamperError(f"A document of the proof is not base64: {error}.") from error
    if any(b64encode(data).decode() != proof.beside[digest] for digest, data in beside.items()):
        raise TamperError("A document of the proof is not base64 in its one spelling.")
    used: set[str] = set()

    def load(header: Header) -> bytes | None:
        digest = header.document_sha256.hex()
        if not header.document:
            used.add(digest)
        return header.document or beside.get(digest)

    before = -1
    for included in proof.documents:
        if not before < included.index < proof.intent.index:
            raise TamperError("The proof's documents do not stand in order before its INTENT.")
        before = included.index
        leaf = _included(included, signed, f"Leaf {included.index}")
        problems = agreements.take(included.index, leaf, load)
        if problems or leaf.header.kind not in DOCUMENT_KINDS:
            raise TamperError(
                problems[0] if problems else f"Leaf {included.index} of the proof is of no document."
            )
    if used != set(beside):
        raise TamperError("The proof carries documents that none of its leaves names.")
    problems = agreements.judge(intent.header)
    found = agreements.agreement(intent.header.grant_id, intent.header.time_ms)
    if problems or found is None:
        raise TamperError(
            problems[0] if problems else "The proof's documents are no agreement of two regions."
        )
    terms = found.terms
    return Approved(
        terms,
        found.approvers,
        found.accepted_by,
        found.place(terms.from_region)[0],
        found.place(terms.to_region)[0],
        agreements.placed_otherwise(intent.header),
        found.export.policy_revision,
        agreements.lets(intent.header).revision,
    )


def cosigned_by(log: LogTrust, signed: SignedCheckpoint) -> tuple[tuple[str, int], ...]:
    """Who cosigned, and when at the latest."""
    times: dict[str, int] = {}
    for by in signed.cosigned:
        party = log.witnesses[by.key]
        times[party] = max(times.get(party, 0), by.time_s or 0)
    return tuple((party, times[party]) for party in log.cosigners(signed.cosigned))


def check_record(proven: Proven, key: CommitmentKey, record: SourceRecord) -> None:
    """Check that this record is the one committed to, by whoever holds the commitment key. Raises TamperError.

    `record` is as it crossed: its time at the source, key, headers in their order (with `felix-path`) and payload. Its
    offset is the proof's and not looked at. A leaf of version 1 says something about the payload alone.
    """
    header, entry = proven.intent, proven.entry
    if proven.intent_version == 1:
        found = payload_commitment(
            key, header.stream, header.incarnation, header.shard, proven.offset, record.payload
        )
    else:
        committer = Committer(key, header.stream, header.incarnation, header.shard)
        headers = encode_headers(record.headers) if record.headers else b""
        found = committer.commit(
            proven.offset, record.timestamp_ms, record.key or b"", headers, record.payload
        )
    if header.commitment_key_id != key.key_id or found != entry.commitment:
        raise TamperError(f"That record is not the one that crossed as record {proven.offset}.")
    way = record.headers.get(PATH_HEADER)
    if way is not None and header.path and not {*_regions(way)} <= {*header.path}:
        raise TamperError(
            f"That record had been in regions that its INTENT does not name: {', '.join(header.path)} are named."
        )


def _regions(way: bytes) -> tuple[str, ...]:
    try:
        return parse_path(way)
    except RequestError as error:
        raise TamperError(error.sentence) from error


def looks_like_proof(data: bytes) -> bool:
    """False where a file is something else altogether, so that nobody takes the wrong file for a proof that was changed."""
    return any(name in data for name in _FIELDS)


def _once(pairs: list[tuple[str, object]]) -> None:
    """A name that stands twice in one object has two readings: whoever takes the first is shown another record than was checked."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise TamperError(f"The proof says twice what its {twice[:40]!r} is.")


def _parse(data: bytes) -> _Proof:
    if len(data) > PROOF_BYTES_MAX:
        raise TamperError(f"A proof file of {len(data)} bytes is over the limit of {PROOF_BYTES_MAX}.")
    try:
        proof = msgspec.json.decode(data, type=_Proof)
        json.loads(data, object_pairs_hook=_once)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TamperError(f"That is not a proof file: {error}.") from error
    if proof.format not in (FORMAT, FORMAT_1, FORMAT_3) or (
        proof.format == FORMAT_1 and (proof.documents or proof.beside)
    ):
        raise TamperError(
            f"A proof of the format {proof.format[:40]!r}; this version reads {FORMAT}, {FORMAT_3}, and {FORMAT_1} without documents."
        )
    shown = [proof.ack, *proof.documents]
    has_ended = any(each is not None and each.ended_path is not None for each in shown)
    elsewhere = any(each.ended_path is not None for each in (proof.intent, *proof.parts))
    if elsewhere or has_ended != (proof.format == FORMAT_3):
        raise TamperError(
            f"Only a proof of the format {FORMAT_3} shows leaves under keys that ended, and each of that format does: of documents, or of the receipt."
        )
    return proof


def _decode_included(included: _Included, encoded: Sequence[str], what: str) -> tuple[bytes, list[bytes]]:
    """The leaf, and this path of it. Raises TamperError."""
    try:
        data = b64decode(included.leaf, validate=True)
        path = [b64decode(hash_, validate=True) for hash_ in encoded]
    except ValueError as error:
        raise TamperError(f"{what} of the proof is not base64: {error}.") from error
    canonical = b64encode(data).decode() == included.leaf and all(
        b64encode(found).decode() == hash_ for found, hash_ in zip(path, encoded, strict=True)
    )
    if not canonical or any(len(hash_) != HASH_BYTES for hash_ in path):
        raise TamperError(f"{what} of the proof has a path that is not made of {HASH_BYTES}-byte hashes.")
    return data, path


def _included(included: _Included, signed: SignedCheckpoint, what: str) -> Leaf:
    data, path = _decode_included(included, included.path, what)
    verify_inclusion(
        leaf_hash(data), included.index, signed.checkpoint.size, path, signed.checkpoint.root, what
    )
    return decode_leaf(data)


_OF_CROSSING: Final = (
    "bridge",
    "source_region",
    "destination_region",
    "stream",
    "shard",
    "incarnation",
    "source_epoch",
    "grant_id",
    "terms_hash",
    "destination_stream",
    "envelope_sha256",
)
"""What every leaf of one crossing says alike."""
_OF_BATCH: Final = ("kind", "side", "parts", "source_batch_sha256", "commitment_key_id", *_OF_CROSSING)


def _ack(included: _Included, signed: SignedCheckpoint, intent_index: int, intent: Header) -> Header:
    ack = _included(included, signed, "The ACK leaf").header
    differing = [name for name in _OF_CROSSING if getattr(ack, name) != getattr(intent, name)]
    if (ack.kind, ack.side) != (Kind.ACK, Side.EGRESS) or included.index <= intent_index or differing:
        raise TamperError(f"The proof's leaf {included.index} is no ACK of its INTENT.")
    if not _answers_range(ack, intent):
        raise TamperError("The proof's ACK does not cover the range of its INTENT.")
    if ack.path and intent.path and ack.path != intent.path:
        raise TamperError("The proof's INTENT says that the records had been in other regions than its ACK.")
    # The other parts of a split batch are not here; what they must list has to fit between the ranges.
    elsewhere = _offsets(ack) - _offsets(intent)
    if not 0 <= ack.records - intent.records <= elsewhere:
        raise TamperError(
            f"The proof's INTENT lists {intent.records} records, its ACK is for {ack.records} of the whole batch."
        )
    return ack


def _offsets(header: Header) -> int:
    assert header.first_offset is not None and header.last_offset is not None
    return header.last_offset - header.first_offset + 1


def _answers_range(ack: Header, intent: Header) -> bool:
    """Whether the ACK's range is that of the batch: it begins with the first part and ends with the last."""
    first, last, start, end = intent.first_offset, intent.last_offset, ack.first_offset, ack.last_offset
    assert first is not None and last is not None and start is not None and end is not None
    begins = start == first if intent.part == 0 else start < first
    ends = end == last if intent.part == intent.parts - 1 else last < end
    return begins and ends
