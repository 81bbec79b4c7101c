"""Leaves: what one entry of an audit log says, and its bytes. Pure.

One leaf stands for one batch that crossed (or did not), or for one event around crossings. It never holds
a payload, nor a plain hash of one: only commitments under a key that can be destroyed.

Layout, big-endian (docs/audit.md)::

    0  magic "FL"        2
    2  version           1    2; leaves of version 1 are still read
    3  reserved          1    zero
    4  header length     2
    6  entries           2
    8  header            MessagePack map, field names as in `Header`, defaults left out
    …  entries           68 bytes each: offset u64, time_ms i64, size u32, commitment 32, key tag 16

Which leaves a link writes, and in which order (the verifier holds a log to this):

- egress, per batch: WITHHELD leaves for the records that stay, then INTENT leaves for those that cross, and
  once the destination answered, one ACK with its receipt. A batch that is too long for one leaf is split:
  each part covers its own range, the ranges follow each other without a gap, `part` counts from 0.
- ingress, per batch: ACK leaves with the same entries as the INTENT, and the destination's offsets.
- entries commit to key, headers, payload and time of a record *as it crosses* (after transforms), under the link's
  commitment key, which both sides hold; so the two logs' entries are equal byte for byte. A WITHHELD entry commits to
  the record as it was, under a key of its own, which the destination cannot derive.
- an envelope of which every record was withheld still moves the destination's position: its INTENT and ACK cover
  the range and have no records, no entries and no destination offsets.
- a GAP leaf covers source offsets that nobody can read any more;
- a document leaf (`DOCUMENT_KINDS`) carries a signed document, or names it by its hash where it stands in a file beside
  the log (audit.document_leaf);
- an UNCLEAN leaf, in a region's own log, says that acknowledged records of one of its shards may be lost (audit.unclean_leaf).

Version 1 committed to payloads alone, counted them in `payload_bytes`, had no kinds above SEAL and kept a grant's
terms in its leaf. Its leaves may stand before those of version 2 in one log, and are never written any more.

Invariants: `decode_leaf(encode_leaf(leaf)) == leaf`, and `encode_leaf` has tried it before it returns: what is written
can be read; a leaf has at most 65,535 bytes (the entry bundle of C2SP
tlog-tiles counts lengths in 16 bits); entries are in ascending order of offset inside the leaf's range; whatever
a kind needs is there (`REQUIRED`); a name stands once in a header (`names_stand_once`). Bytes that do not hold raise CorruptionError; a leaf that cannot be made
raises RequestError. Callers: bridge (egress), region ingest (ingress), audit.*, audit.spark.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum, StrEnum
from hashlib import blake2b, sha256
from typing import Annotated, Any, Final, NamedTuple, Protocol

import msgspec

from audit.unjudged import Unjudged
from felix.batch import OFFSET_MAX, Parts, encode_headers
from felix.errors import LATER_RELEASE, CorruptionError, RequestError, of_later_release, why_undecoded
from felix.names import parse_region

LEAF_BYTES_MAX: Final = 65_535
"""C2SP tlog-tiles: an entry bundle prefixes each entry with a 16-bit length."""
HEADER_BYTES_MAX: Final = 60_000
"""Room for a signed document; a crossing's header has some 800 bytes."""
ENTRY_BYTES: Final = 68
COMMITMENT_BYTES: Final = 32
TAG_BYTES: Final = 16
INCARNATION_BYTES: Final = 16
KEY_ID_BYTES: Final = 16
SHA256_BYTES: Final = 32
COMMITMENT_SECRET_BYTES: Final = 32
DOCUMENT_BYTES_MAX: Final = 24_000
"""A signed document as it stands in the leaf; a longer one stands in a file beside the log (audit.document_leaf)."""

EMPTY_RANGE_BYTES: Final = 256
"""What a range without bytes of records counts towards a grant's rate and budget: it crosses all the same, and is a leaf in both logs for ever."""

VERSION: Final = 2
"""Of every leaf that is made now."""
_VERSIONS: Final = (1, VERSION)
_PREFIX: Final = struct.Struct(">2sBBHH")
_ENTRY: Final = struct.Struct(">QqI32s16s")
_OFFSET: Final = struct.Struct(">Q")
_MAGIC: Final = b"FL"
assert _ENTRY.size == ENTRY_BYTES

Buffer = bytes | bytearray | memoryview

Text = Annotated[str, msgspec.Meta(max_length=512)]
SENTENCE_CHARS_MAX: Final = 2_048
Sentence = Annotated[str, msgspec.Meta(max_length=SENTENCE_CHARS_MAX)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)]
TIME_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999: no calendar that a report writes goes further, and one leaf must not keep a report from being made."""
Moment = Annotated[int, msgspec.Meta(ge=0, le=TIME_MS_MAX)]
Small = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
"""What stands in a column of 32 bits in reports."""
Digest = Annotated[bytes, msgspec.Meta(max_length=SHA256_BYTES)]
Id16 = Annotated[bytes, msgspec.Meta(max_length=16)]
Texts = Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]


class Kind(IntEnum):
    """What a leaf says. Numbers are part of the format and never reused."""

    INTENT = 1
    """egress: these records are about to cross"""
    ACK = 2
    """egress: the destination has them, with its receipt; ingress: they were appended here"""
    DENY = 3
    """an attempt was refused"""
    WITHHELD = 4
    """records of a granted stream that stay: a transform failed, or the filter excludes them"""
    GAP = 5
    """source offsets that cannot be read any more"""
    GRANT = 6
    """a grant took effect: the source's half, which states its terms"""
    REVOKE = 7
    """a grant ended before its time"""
    POLICY = 8
    """another version of the residency policy is in force"""
    KEY = 9
    """a key was made, rotated or destroyed"""
    SEAL = 10
    """a file was exported from this log; its hash"""
    ACCEPT = 11
    """the destination accepted a grant: its import grant"""
    APPROVE = 12
    """one approver signed a grant's terms"""
    STANDING = 13
    """a grant was paused or resumed"""
    DENY_ENTRY = 14
    """a region denied streams to or from another, or lifted that"""
    UNCLEAN = 15
    """a shard of the region is led from a copy that may lack what was acknowledged (audit.unclean_leaf)"""


DOCUMENT_KINDS: Final = frozenset(
    (Kind.GRANT, Kind.ACCEPT, Kind.APPROVE, Kind.STANDING, Kind.DENY_ENTRY, Kind.REVOKE, Kind.POLICY)
)
"""Kinds that are about a signed document."""


class Side(StrEnum):
    """Which of a link's two logs the leaf stands in."""

    EGRESS = "egress"
    INGRESS = "ingress"


class GapKind(StrEnum):
    """Why source offsets are missing."""

    RETENTION = "retention"
    TRUNCATION = "truncation"
    COMPACTION = "compaction"
    INCARNATION = "incarnation"
    """the stream was deleted and made again; the range is in the old incarnation"""
    ELSEWHERE = "elsewhere"
    """the destination says that it has them: another bridge brought them, and this log knows nothing of it"""


class FieldLineage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One field of the payload: `action` is keep, drop, mask (`mask:4` where four characters at the end stay readable), hash or
    pseudonymize."""

    field: Text
    action: Text
    output: Text = ""
    """the field's name at the destination; empty: the same"""


class Terms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The legal fields of a grant. Leaves of version 1 state them themselves; those of version 2 never do, and who reads them
    takes the fields from the signed document (audit.legal_fields)."""

    purpose: Text
    basis: Text
    """adequacy, scc, bcr, code-of-conduct, certification, derogation … as the policy names it"""
    article: Text
    """the article it rests on, as in "GDPR 46(2)(c)" """
    mechanism: Text = ""
    """which one exactly: the module of the clauses, the decision, the derogation's letter"""
    reference: Text
    """the contract or decision, as in SCC-2026-014"""
    assessment: Text = ""
    """the transfer impact assessment's reference"""
    categories: Texts = ()
    data_subjects: Texts = ()
    exporter: Text = ""
    importer: Text = ""
    source_country: Text = ""
    destination_country: Text = ""
    owner: Text = ""
    approvers: Texts = ()
    not_before_ms: Natural = 0
    expires_ms: Natural = 0
    lineage: tuple[FieldLineage, ...] = ()
    """what becomes of each field, in the transform's order"""
    keep_others: bool = True
    """fields that `lineage` does not name cross unchanged; False: they are dropped"""
    filter: Sentence = ""
    wildcard: bool = False
    onward: bool = False
    rate_bytes_per_second: Natural = 0
    budget_bytes: Natural = 0
    """0: no limit"""


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a leaf says about its batch or event. Offsets in records, times in ms since the Unix epoch.

    An empty bytes field and an empty string mean "not applicable"; offsets that do not apply are None.
    """

    kind: Kind
    side: Side
    time_ms: Moment
    """when the leaf was made, by the clock of whoever made it"""
    source_region: Text
    destination_region: Text
    bridge: Text = ""
    """the bridge's SPIFFE id"""
    stream: Text = ""
    destination_stream: Text = ""
    shard: Small = 0
    source_epoch: Natural = 0
    """the source shard's leader epoch, to which the transfer key is bound; UNCLEAN: the one that began so"""
    incarnation: Id16 = b""
    """the source stream's incarnation id"""
    first_offset: Offset | None = None
    last_offset: Offset | None = None
    """the source offsets covered, both ends included; records withheld lie inside"""
    destination_first_offset: Offset | None = None
    destination_last_offset: Offset | None = None
    records: Natural = 0
    """INTENT, ACK, WITHHELD: how many records; an egress ACK, which has no entries, counts those of its batch"""
    payload_bytes: Natural = 0
    """version 1: payload bytes of the records listed"""
    record_bytes: Natural = 0
    """from version 2: bytes of key, encoded headers and payload of the records listed, together"""
    part: Small = 0
    parts: Small = 1
    source_key_id: Id16 = b""
    destination_key_id: Id16 = b""
    """the destination's import key (egress), the key it sealed with (ingress)"""
    commitment_key_id: Id16 = b""
    grant_id: Text = ""
    terms_hash: Digest = b""
    policy_version: Natural = 0
    policy_hash: Digest = b""
    source_batch_sha256: Digest = b""
    """of the batch as it stands sealed in the source's log"""
    envelope_sha256: Digest = b""
    """of the transfer envelope as sent"""
    attempt: Small = 0
    """ACK: which send was answered, from 1"""
    path: Texts = ()
    """the regions the records have been in, in order (provenance): names of regions, that of the source last"""
    receipt: Annotated[bytes, msgspec.Meta(max_length=4_096)] = b""
    """egress ACK: the destination's signed receipt (audit.receipt)"""
    actor: Text = ""
    """DENY, KEY and documents: who (SPIFFE id); for a document who put it, not who signed it"""
    action: Text = ""
    """DENY: what was tried; KEY: made, rotated, destroyed, pinned; STANDING: pause, resume; UNCLEAN: recover-shard, reconcile, elect-longest"""
    rule: Text = ""
    """DENY: the rule that refused"""
    code: Small = 0
    """DENY, WITHHELD: felix.errors.Code"""
    sentence: Sentence = ""
    """DENY, REVOKE …: the sentence for a person"""
    reason: Text = ""
    """WITHHELD: transform-failed, filtered …"""
    gap: GapKind | None = None
    key_id: Id16 = b""
    """KEY: which"""
    terms: Terms | None = None
    """version 1, GRANT: what the leaf itself says of the terms"""
    document: Annotated[bytes, msgspec.Meta(max_length=DOCUMENT_BYTES_MAX)] = b""
    """`DOCUMENT_KINDS`: the signed document, where it is short enough to stand here; UNCLEAN: the statement, which nobody signed"""
    document_sha256: Digest = b""
    """from version 2: of the signed document, wherever it stands"""
    drain_until_ms: Moment = 0
    """REVOKE: nothing that was taken later than this stands before the leaf, and nothing at all behind it (docs/audit.md)"""
    seal_file: Text = ""
    seal_sha256: Digest = b""

    @property
    def listed_bytes(self) -> int:
        """Bytes of the records listed, as the leaf's version counts them."""
        return self.record_bytes or self.payload_bytes

    @property
    def charged_bytes(self) -> int:
        """What rate and budget of the grant are charged for this leaf of a range."""
        return self.listed_bytes or EMPTY_RANGE_BYTES


class Entry(NamedTuple):
    """One record as a leaf mentions it."""

    offset: int
    time_ms: int
    size: int
    """bytes of key, encoded headers and payload (version 1: of the payload)"""
    commitment: bytes
    tag: bytes
    """keyed tag of the record key; zero bytes where the record has none"""


class Leaf(msgspec.Struct, frozen=True):
    """A header and its entries, packed as they stand in the log."""

    header: Header
    entries: bytes = b""
    version: int = VERSION

    @property
    def entry_count(self) -> int:
        """How many records the leaf lists one by one."""
        return len(self.entries) // ENTRY_BYTES


_RANGE: Final = ("first_offset", "last_offset")
_CROSSING: Final = (
    "bridge",
    "stream",
    "destination_stream",
    "incarnation",
    *_RANGE,
    "grant_id",
    "terms_hash",
)

REQUIRED: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.INTENT: (*_CROSSING, "envelope_sha256", "source_batch_sha256", "commitment_key_id"),
    Kind.ACK: (*_CROSSING, "envelope_sha256"),
    Kind.DENY: ("actor", "action", "rule", "code", "sentence"),
    Kind.WITHHELD: (
        "bridge",
        "stream",
        "incarnation",
        *_RANGE,
        "grant_id",
        "records",
        "reason",
        "commitment_key_id",
    ),
    Kind.GAP: ("bridge", "stream", "incarnation", *_RANGE, "gap"),
    Kind.GRANT: (
        "grant_id",
        "terms_hash",
        "bridge",
        "stream",
        "destination_stream",
        "actor",
        "document_sha256",
    ),
    Kind.ACCEPT: ("grant_id", "terms_hash", "actor", "document_sha256"),
    Kind.APPROVE: ("grant_id", "terms_hash", "actor", "document_sha256"),
    Kind.STANDING: ("grant_id", "action", "actor", "document_sha256"),
    Kind.DENY_ENTRY: ("actor", "document_sha256"),
    Kind.REVOKE: ("grant_id", "actor", "document_sha256"),
    Kind.POLICY: ("policy_version", "policy_hash", "actor", "document_sha256"),
    Kind.KEY: ("key_id", "action"),
    Kind.SEAL: ("seal_file", "seal_sha256"),
    Kind.UNCLEAN: ("stream", "incarnation", "source_epoch", "actor", "action", "document", "document_sha256"),
}
"""Fields that a leaf of this kind must have (neither empty nor None nor 0)."""

_REQUIRED_1: Final[dict[Kind, tuple[str, ...]]] = {
    **{kind: names for kind, names in REQUIRED.items() if kind <= Kind.SEAL and kind not in DOCUMENT_KINDS},
    Kind.GRANT: ("grant_id", "terms_hash", "terms", "bridge", "stream", "destination_stream", "actor"),
    Kind.REVOKE: ("grant_id", "actor"),
    Kind.POLICY: ("policy_version", "policy_hash", "actor"),
}
"""The same for version 1, which had no kinds but these."""

_DIGESTS: Final = (
    "terms_hash",
    "policy_hash",
    "source_batch_sha256",
    "envelope_sha256",
    "seal_sha256",
    "document_sha256",
)
_IDS: Final = ("incarnation", "source_key_id", "destination_key_id", "commitment_key_id", "key_id")


def _header_mistake(header: Header, version: int) -> str:
    """What does not hold about a header alone, or an empty string."""
    kind = header.kind
    required = (REQUIRED if version > 1 else _REQUIRED_1).get(kind)
    if required is None:
        return f"version {version} has no kind {kind.name}"
    for name in required:
        value = getattr(header, name)
        if not value and not (name.endswith("_offset") and value == 0):
            return f"a leaf of kind {kind.name} needs {name}"
    for name in _DIGESTS:
        if len(getattr(header, name)) not in (0, SHA256_BYTES):
            return f"{name} is not {SHA256_BYTES} bytes"
    for name in _IDS:
        if len(getattr(header, name)) not in (0, KEY_ID_BYTES):
            return f"{name} is not {KEY_ID_BYTES} bytes"
    first, last = header.first_offset, header.last_offset
    if (first is None) != (last is None) or (first is not None and last is not None and first > last):
        return f"the offset range {first}..{last} is no range"
    to_first, to_last = header.destination_first_offset, header.destination_last_offset
    if (to_first is None) != (to_last is None) or (
        to_first is not None and to_last is not None and to_first > to_last
    ):
        return f"the destination offset range {to_first}..{to_last} is no range"
    if kind is Kind.ACK and (to_first is None) != (header.records == 0):
        return "an ACK has destination offsets if and only if it has records"
    if not header.part < header.parts:
        return f"part {header.part} of {header.parts}"
    if header.path and (mistake := _path_mistake(header)):
        return mistake
    if version == 1:
        return "version 1 has no record_bytes" if header.record_bytes else ""
    if header.payload_bytes:
        return f"version {version} has no payload_bytes"
    if header.terms is not None:
        return f"version {version} has no terms beside the signed document"
    if header.document and sha256(header.document).digest() != header.document_sha256:
        return "its document is not the one that document_sha256 names"
    return ""


def _path_mistake(header: Header) -> str:
    """A text that is no region's name could stand for several: a receipt commits to the names joined by commas."""
    try:
        for region in header.path:
            parse_region(region)
    except RequestError:
        return "its path has what is no region's name"
    return "" if header.path[-1] == header.source_region else "its path does not end in the source region"


def _entries_mistake(leaf: Leaf) -> str:
    """What does not hold about a leaf's entries, whose header holds; or an empty string."""
    header, count = leaf.header, len(leaf.entries) // ENTRY_BYTES
    kind = header.kind
    if len(leaf.entries) % ENTRY_BYTES:
        return f"{len(leaf.entries)} bytes of entries are not a multiple of {ENTRY_BYTES}"
    listed = kind in (Kind.INTENT, Kind.WITHHELD) or (kind is Kind.ACK and header.side is Side.INGRESS)
    if not listed:
        return f"a leaf of kind {kind.name} lists no records" if count else ""
    if count != header.records:
        return f"{count} entries where the header says {header.records} records"
    first, last = header.first_offset, header.last_offset
    assert first is not None and last is not None
    before, size = first - 1, 0
    for offset, _, entry_size, _, _ in _ENTRY.iter_unpack(leaf.entries):
        if offset <= before:
            return f"entry {offset} is out of order or outside {first}..{last}"
        before = offset
        size += entry_size
    if before > last:
        return f"entry {before} is outside {first}..{last}"
    said = header.payload_bytes if leaf.version == 1 else header.record_bytes
    if size != said:
        return f"{size} bytes in entries where the header says {said}"
    return ""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Header)


def encode_leaf(leaf: Leaf) -> bytes:
    """The leaf's bytes, as they stand in the log and are hashed into the tree.

    They are decoded before they are returned. Raises RequestError(INVALID) where the leaf lacks what its kind needs, does
    not come back as it is, or is over `LEAF_BYTES_MAX`.
    """
    return _encode_checked(leaf, entries_checked=False)


def _encode_checked(leaf: Leaf, *, entries_checked: bool) -> bytes:
    data, mistake = b"", ""
    try:
        data = _encode(leaf)
        if len(data) > LEAF_BYTES_MAX:
            mistake = f"it has {len(data)} bytes, {LEAF_BYTES_MAX} are allowed"
        elif _decode(data) != (leaf.version, leaf.header, len(data) - len(leaf.entries)):
            mistake = "it would be read as another one"
        elif not entries_checked:
            mistake = _entries_mistake(leaf)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, struct.error) as error:
        mistake = f"it cannot be encoded: {error}"
    except CorruptionError as error:
        mistake = f"it could not be read again: {error.sentence}"
    if mistake:
        raise RequestError(f"This audit leaf cannot be written: {mistake}.")
    return data


class EncodedLeaf(NamedTuple):
    """A leaf as it will stand in a log, encoded ahead of its append: on another thread, or before what it is about."""

    header: Header
    data: bytes


def encode_for_log(leaf: Leaf) -> EncodedLeaf:
    """As `encode_leaf`, for a leaf that is new: one of an earlier version is refused, too."""
    if leaf.version != VERSION:
        raise RequestError(f"A new audit leaf is of version {VERSION}, not {leaf.version}.")
    return EncodedLeaf(leaf.header, encode_leaf(leaf))


def _encode(leaf: Leaf) -> bytes:
    head = _encoder.encode(leaf.header)
    if len(head) > HEADER_BYTES_MAX:
        raise ValueError(f"its header has {len(head)} bytes, {HEADER_BYTES_MAX} are allowed")
    return _PREFIX.pack(_MAGIC, leaf.version, 0, len(head), leaf.entry_count) + head + leaf.entries


_unjudged: Final = Unjudged("reading a log again")


def decode_header(data: Buffer) -> Header:
    """The header alone, for scans. Everything is checked but the entries. Raises CorruptionError."""
    return _decode(data)[1]


def leaf_version(data: Buffer) -> int:
    """The version that a leaf says it has, whatever else it is; 0 of fewer bytes than any has."""
    return data[2] if len(data) >= _PREFIX.size else 0


def read_header(data: Buffer) -> Header | None:
    """As `decode_header`; None where the leaf cannot be read. For those who must go on: a log's verifier reports it."""
    try:
        return decode_header(data)
    except CorruptionError:
        return None
    except Exception as error:
        _unjudged.sentence(error, "A leaf")
        return None


def decode_leaf(data: Buffer) -> Leaf:
    """One whole leaf, nothing after it, everything checked. Raises CorruptionError."""
    version, header, entries_at = _decode(data)
    leaf = Leaf(header, bytes(memoryview(data)[entries_at:]), version)
    mistake = _entries_mistake(leaf)
    if mistake:
        raise CorruptionError(f"An audit leaf does not hold: {mistake}.")
    return leaf


def _decode(data: Buffer) -> tuple[int, Header, int]:
    """Version, header, and where the entries begin."""
    if not _PREFIX.size <= len(data) <= LEAF_BYTES_MAX:
        raise CorruptionError(f"{len(data)} bytes are not an audit leaf.")
    magic, version, reserved, header_length, entries = _PREFIX.unpack_from(data, 0)
    if magic != _MAGIC or version not in _VERSIONS or reserved:
        raise CorruptionError(
            f"An audit leaf starts with {magic!r} version {version}; {_MAGIC!r} with versions 1 and {VERSION} is read.",
            hint=LATER_RELEASE if magic == _MAGIC and version > VERSION else "",
        )
    entries_at = _PREFIX.size + header_length
    if header_length > HEADER_BYTES_MAX or len(data) != entries_at + entries * ENTRY_BYTES:
        raise CorruptionError(
            f"An audit leaf of {len(data)} bytes says it has a header of {header_length} and {entries} entries."
        )
    try:
        header = _decoder.decode(memoryview(data)[_PREFIX.size : entries_at])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptionError(
            f"An audit leaf's header does not decode: {why_undecoded(error)}.", hint=of_later_release(error)
        ) from error
    mistake = _header_mistake(header, version)
    if not mistake and not names_stand_once(memoryview(data)[_PREFIX.size : entries_at], header):
        mistake = "its header has a name twice"
    if mistake:
        raise CorruptionError(f"An audit leaf does not hold: {mistake}.")
    return version, header, entries_at


def names_stand_once(data: Buffer, value: msgspec.Struct) -> bool:
    """Whether each name stands once in every map of the MessagePack of which `value` was decoded, as MessagePack's shortest text. Of a name
    that stands twice one reader takes the first, another the last."""
    # The order of names is free, and so is a default that is spelled out: the struct's own encoding is only the usual case.
    return _encoder.encode(value) == data or _have_names_once(memoryview(data))


_RAW_MAP: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_RAW_ARRAY: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_MAP_HEADS: Final = {**dict.fromkeys(range(0x80, 0x90), 1), 0xDE: 3, 0xDF: 5}
"""The first byte of a map (MessagePack specification, map format family) to the bytes before its entries."""
_ARRAY_HEADS: Final = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))


def _have_names_once(data: memoryview) -> bool:
    """Of one value that a struct's decoder took, so that it is as deep as the struct is."""
    if data[0] in _ARRAY_HEADS:
        return all(_have_names_once(memoryview(each)) for each in _RAW_ARRAY.decode(data))
    if data[0] not in _MAP_HEADS:
        return True
    entries = _RAW_MAP.decode(data)
    size = sum(len(_encoder.encode(name)) + memoryview(each).nbytes for name, each in entries.items())
    return _MAP_HEADS[data[0]] + size == len(data) and all(
        _have_names_once(memoryview(each)) for each in entries.values()
    )


def iter_entries(leaf: Leaf) -> Iterator[Entry]:
    """The leaf's entries, in order of offset."""
    for fields in _ENTRY.iter_unpack(leaf.entries):
        yield Entry(*fields)


def find_entry(leaf: Leaf, offset: int) -> Entry | None:
    """The entry of the record with this source offset, by bisection."""
    low, high = 0, leaf.entry_count
    while low < high:
        middle = (low + high) // 2
        (found,) = _OFFSET.unpack_from(leaf.entries, middle * ENTRY_BYTES)
        if found == offset:
            return Entry(*_ENTRY.unpack_from(leaf.entries, middle * ENTRY_BYTES))
        if found < offset:
            low = middle + 1
        else:
            high = middle
    return None


class CommitmentKey(NamedTuple):
    """A key to commit to records under. Destroy `secret`, and the commitments say nothing."""

    key_id: bytes
    """16 bytes"""
    secret: bytes
    """32 bytes"""


class Committer:
    """Commitments and tags for one stream's shard under one commitment key.

    BLAKE2b in its keyed mode (RFC 7693), 256 bits, one person string per use:

    - commitment = BLAKE2b-256(key, "felix/record/2", context ‖ offset u64 ‖ time_ms i64 ‖ u32 length of the key ‖ u32 length
      of the headers ‖ key ‖ headers ‖ payload), context = u16 length ‖ stream ‖ incarnation ‖ shard u32. The headers are the
      bytes that stand in the batch's body. Offset and context keep equal records apart.
    - tag = BLAKE2b-128(key, "felix/key/1", u16 length ‖ stream ‖ record key). Equal record keys of one stream have
      equal tags, in every shard, so that a key's records can be found by whoever holds the commitment key.
    """

    __slots__ = ("_record", "_tag", "key_id")

    def __init__(self, key: CommitmentKey, stream: str, incarnation: bytes, shard: int) -> None:
        self.key_id = key.key_id
        self._record = _keyed(key, b"felix/record/2", COMMITMENT_BYTES, _context(stream, incarnation, shard))
        self._tag = _keyed(key, b"felix/key/1", TAG_BYTES, _named(stream))

    def commit(self, offset: int, time_ms: int, key: Buffer, headers: Buffer, payload: Buffer) -> bytes:
        """The 32-byte commitment to a record at this source offset; `headers` as encoded, no key and no headers are empty."""
        state = self._record.copy()
        state.update(b"".join((_BEFORE.pack(offset, time_ms, len(key), len(headers)), key, headers, payload)))
        return state.digest()

    def tag(self, key: Buffer | None) -> bytes:
        """The 16-byte tag of a record key; zero bytes for no key."""
        if not key:
            return _NO_TAG
        state = self._tag.copy()
        state.update(key)
        return state.digest()


def payload_commitment(
    key: CommitmentKey, stream: str, incarnation: bytes, shard: int, offset: int, payload: Buffer
) -> bytes:
    """What leaves of version 1 commit to: BLAKE2b-256(key, "felix/payload/1", context ‖ offset u64 ‖ payload)."""
    state = _keyed(key, b"felix/payload/1", COMMITMENT_BYTES, _context(stream, incarnation, shard))
    state.update(_OFFSET.pack(offset))
    state.update(payload)
    return state.digest()


_NO_TAG: Final = bytes(TAG_BYTES)
_BEFORE: Final = struct.Struct(">QqII")


def _keyed(key: CommitmentKey, person: bytes, size: int, context: bytes) -> blake2b:
    if len(key.secret) != COMMITMENT_SECRET_BYTES or len(key.key_id) != KEY_ID_BYTES:
        raise RequestError("A commitment key has a 16-byte id and a 32-byte secret.")
    return blake2b(context, key=key.secret, digest_size=size, person=person)


def _named(stream: str) -> bytes:
    name = stream.encode()
    return struct.pack(">H", len(name)) + name


def _context(stream: str, incarnation: bytes, shard: int) -> bytes:
    if len(incarnation) != INCARNATION_BYTES:
        raise RequestError(f"An incarnation id has {INCARNATION_BYTES} bytes, this one {len(incarnation)}.")
    return _named(stream) + incarnation + struct.pack(">I", shard)


class SourceRecord(Protocol):
    """What is committed to: `felix.batch.Record` is one. `offset` is the source's."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp_ms(self) -> int: ...
    @property
    def key(self) -> bytes | memoryview | None: ...
    @property
    def headers(self) -> Mapping[str, bytes]: ...
    @property
    def payload(self) -> bytes | memoryview: ...


def pack_entries(records: Iterable[SourceRecord], committer: Committer) -> bytes:
    """Entries for these records, in the given order (ascending offsets), 68 bytes each."""
    pack, commit, tag = _ENTRY.pack, committer.commit, committer.tag
    packed = []
    for record in records:
        offset, time_ms, key, payload = record.offset, record.timestamp_ms, record.key or b"", record.payload
        headers = encode_headers(record.headers) if record.headers else b""
        size = len(key) + len(headers) + len(payload)
        packed.append(pack(offset, time_ms, size, commit(offset, time_ms, key, headers, payload), tag(key)))
    return b"".join(packed)


def pack_parts(offsets: Iterable[int], time_ms: int, parts: Parts, committer: Committer) -> bytes:
    """As `pack_entries`, from records as a batch's body has them: nothing is encoded again.

    `offsets`: the source's, one per record, ascending; all records of a batch have one time.
    """
    return b"".join(iter_packed(offsets, time_ms, parts, committer))


class Rows(Protocol):
    """Records as a body has them: `felix.batch.Parts` and `Columns` are."""

    def rows(self) -> Iterator[tuple[Buffer, Buffer, Buffer]]:
        """Key, encoded headers and payload of each."""


def iter_packed(offsets: Iterable[int], time_ms: int, parts: Rows, committer: Committer) -> Iterator[bytes]:
    """`pack_parts`, entry by entry, for who must not do it all at once."""
    pack, before, join = _ENTRY.pack, _BEFORE.pack, b"".join
    record, key_tag = committer._record.copy, committer.tag
    tags: dict[bytes, bytes] = {}
    for offset, (key, headers, payload) in zip(offsets, parts.rows(), strict=False):
        state = record()
        state.update(join((before(offset, time_ms, len(key), len(headers)), key, headers, payload)))
        tag = _NO_TAG
        if key:
            # Few keys have many records in one batch, and a tag costs as much as a commitment.
            plain = bytes(key)
            known = tags.get(plain)
            tag = tags[plain] = key_tag(plain) if known is None else known
        yield pack(offset, time_ms, len(key) + len(headers) + len(payload), state.digest(), tag)


def intent_leaves(header: Header, records: Iterable[SourceRecord], committer: Committer) -> list[Leaf]:
    """INTENT (or ingress ACK, or WITHHELD) leaves for a batch, split so that each fits into an entry bundle.

    `header` describes the batch: kind, both offset ranges, the envelope …; records, record_bytes, part, parts and
    commitment_key_id are filled in here. Each part covers its own source range; together they cover the
    header's range exactly. Destination offsets are shared out one per record. No records make one leaf without
    entries (nothing of the range crosses). Raises RequestError(INVALID) where the header has no range.
    """
    return split_leaves(
        msgspec.structs.replace(header, commitment_key_id=committer.key_id), pack_entries(records, committer)
    )


def split_leaves(header: Header, entries: bytes) -> list[Leaf]:
    """As `intent_leaves`, for entries that are packed already.

    Destination offsets must be as many as the entries, where they are given.
    """
    parts = list(iter_leaf_parts(header, entries))
    to_first, count = header.destination_first_offset, len(entries) // ENTRY_BYTES
    if to_first is not None and count and header.destination_last_offset != to_first + count - 1:
        raise RequestError(
            f"{count} records cannot have the destination offsets {to_first}..{header.destination_last_offset}."
        )
    return [part_leaf(header, part, to_first) for part in parts]


class LeafPart(NamedTuple):
    """What one leaf of a batch lists: a part of its entries, checked, and the source range that they cover."""

    part: int
    parts: int
    first_offset: int
    last_offset: int
    records: int
    records_before: int
    """in the parts before"""
    record_bytes: int
    entries: bytes


def iter_leaf_parts(header: Header, entries: bytes) -> Iterator[LeafPart]:
    """Entries split so that each part fits into a leaf with this header; their order and their sizes are checked.

    No entries make one part without any. Raises RequestError(INVALID) where the header has no range or an entry lies
    outside of it.
    """
    if len(entries) % ENTRY_BYTES or header.first_offset is None or header.last_offset is None:
        raise RequestError("A leaf that lists records needs whole entries and an offset range.")
    head = len(
        _encoder.encode(
            msgspec.structs.replace(
                header,
                records=1 << 62,
                record_bytes=1 << 62,
                part=1 << 16,
                parts=1 << 16,
                first_offset=OFFSET_MAX,
                last_offset=OFFSET_MAX,
                destination_first_offset=OFFSET_MAX,
                destination_last_offset=OFFSET_MAX,
            )
        )
    )
    room = (LEAF_BYTES_MAX - _PREFIX.size - min(head, HEADER_BYTES_MAX)) // ENTRY_BYTES
    count = len(entries) // ENTRY_BYTES
    parts = max(1, -(-count // room))
    first = header.first_offset
    for part in range(parts):
        chunk = entries[part * room * ENTRY_BYTES : (part + 1) * room * ENTRY_BYTES]
        before, size = first - 1, 0
        for offset, _, entry_size, _, _ in _ENTRY.iter_unpack(chunk):
            if offset <= before:
                raise RequestError(f"Entry {offset} is out of order, or outside of its range.")
            before = offset
            size += entry_size
        last = header.last_offset if part == parts - 1 else before
        if before > header.last_offset:
            raise RequestError(f"Entry {before} is outside of its range.")
        yield LeafPart(part, parts, first, last, len(chunk) // ENTRY_BYTES, part * room, size, chunk)
        first = last + 1


def part_leaf(header: Header, part: LeafPart, destination_first_offset: int | None) -> Leaf:
    """One of a batch's leaves. `destination_first_offset`: of the batch's first record, where there is one."""
    to_first = destination_first_offset
    if to_first is not None:
        to_first = to_first + part.records_before if part.records else None
    own = msgspec.structs.replace(
        header,
        first_offset=part.first_offset,
        last_offset=part.last_offset,
        destination_first_offset=to_first,
        destination_last_offset=None if to_first is None else to_first + part.records - 1,
        records=part.records,
        record_bytes=part.record_bytes,
        part=part.part,
        parts=part.parts,
    )
    return Leaf(own, part.entries)


def encode_part(header: Header, part: LeafPart, destination_first_offset: int | None) -> EncodedLeaf:
    """As `encode_for_log` of `part_leaf`, without looking at the entries again: `iter_leaf_parts` has."""
    leaf = part_leaf(header, part, destination_first_offset)
    return EncodedLeaf(leaf.header, _encode_checked(leaf, entries_checked=True))


LEAF_COLUMNS: Final[tuple[tuple[str, str], ...]] = (
    ("kind", "string"),  # the name of the Kind
    ("side", "string"),
    ("time_ms", "bigint"),
    ("source_region", "string"),
    ("destination_region", "string"),
    ("bridge", "string"),
    ("stream", "string"),
    ("destination_stream", "string"),
    ("shard", "int"),
    ("source_epoch", "bigint"),
    ("incarnation", "string"),  # lower-case hex, as all ids and digests
    ("first_offset", "bigint"),
    ("last_offset", "bigint"),
    ("destination_first_offset", "bigint"),
    ("destination_last_offset", "bigint"),
    ("records", "bigint"),
    ("record_bytes", "bigint"),  # of version 1: payload bytes
    ("part", "int"),
    ("parts", "int"),
    ("source_key_id", "string"),
    ("destination_key_id", "string"),
    ("commitment_key_id", "string"),
    ("grant_id", "string"),
    ("terms_hash", "string"),
    ("policy_version", "bigint"),
    ("policy_hash", "string"),
    ("source_batch_sha256", "string"),
    ("envelope_sha256", "string"),
    ("attempt", "int"),
    ("path", "array<string>"),
    ("receipt", "binary"),
    ("actor", "string"),
    ("action", "string"),
    ("rule", "string"),
    ("code", "int"),
    ("sentence", "string"),
    ("reason", "string"),
    ("gap", "string"),
    ("key_id", "string"),
    ("document", "binary"),
    ("document_sha256", "string"),
    ("seal_file", "string"),
    ("seal_sha256", "string"),
    ("purpose", "string"),  # from here: GRANT of version 1 only, what the leaf says of the terms
    ("basis", "string"),
    ("article", "string"),
    ("mechanism", "string"),
    ("reference", "string"),
    ("assessment", "string"),
    ("categories", "array<string>"),
    ("data_subjects", "array<string>"),
    ("exporter", "string"),
    ("importer", "string"),
    ("source_country", "string"),
    ("destination_country", "string"),
    ("owner", "string"),
    ("approvers", "array<string>"),
    ("not_before_ms", "bigint"),
    ("expires_ms", "bigint"),
    ("lineage", "array<struct<field:string,action:string,output:string>>"),
    ("keep_others", "boolean"),
    ("filter", "string"),
    ("wildcard", "boolean"),
    ("onward", "boolean"),
    ("rate_bytes_per_second", "bigint"),
    ("budget_bytes", "bigint"),
    ("version", "int"),  # of the leaf's format
    (
        "entries_sha256",
        "string",
    ),  # leaves with entries: SHA-256 of them as packed; equal on both sides of a link
)
"""The columns of `leaf_row`, in order, with their Spark SQL types. Empty and absent values are null."""

_TERMS_FROM: Final = [name for name, _ in LEAF_COLUMNS].index("purpose")
_HEADER_NAMES: Final = tuple(name for name, _ in LEAF_COLUMNS[:_TERMS_FROM])
_TERMS_NAMES: Final = tuple(name for name, _ in LEAF_COLUMNS[_TERMS_FROM:-2])
_NO_TERMS: Final = dict.fromkeys(_TERMS_NAMES)
_HEX_NAMES: Final = frozenset((*_DIGESTS, *_IDS))
_ZERO_IS_NULL: Final = frozenset(("code", "attempt", "policy_version"))


def leaf_row(leaf: Leaf) -> dict[str, Any]:
    """A flat row, one value per column of `LEAF_COLUMNS`, in that order.

    Ids and digests are lower-case hex; text that is empty, bytes that are empty and what does not apply are None;
    counts are numbers always; lists are lists; `lineage` is a list of (field, action, output) tuples.
    """
    header, row = leaf.header, {}
    for name in _HEADER_NAMES:
        value = getattr(header, name)
        if name in _HEX_NAMES:
            value = value.hex() or None
        elif name == "kind":
            value = value.name
        elif name == "path":
            value = list(value)
        elif name == "record_bytes":
            value = header.listed_bytes
        elif value in ("", b"") or (name in _ZERO_IS_NULL and not value):
            value = None
        elif isinstance(value, StrEnum):
            value = value.value
        row[name] = value
    row |= _NO_TERMS if header.terms is None else _terms_row(header.terms)
    row["version"] = leaf.version
    row["entries_sha256"] = sha256(leaf.entries).hexdigest() if leaf.entries else None
    return row


def _terms_row(terms: Terms) -> dict[str, Any]:
    row = {}
    for name in _TERMS_NAMES:
        value = getattr(terms, name)
        if name == "lineage":
            value = [(item.field, item.action, item.output or item.field) for item in terms.lineage]
        elif isinstance(value, tuple):
            value = list(value)
        elif value == "":
            value = None
        row[name] = value
    return row


ENTRY_COLUMNS: Final[tuple[tuple[str, str], ...]] = (
    ("offset", "bigint"),
    ("time_ms", "bigint"),
    ("size", "int"),
    ("commitment", "binary"),
    ("tag", "binary"),
)
"""The fields of `Entry` as Spark SQL columns. Sizes stay far below 2^31 (felix.batch.PLAIN_BYTES_MAX)."""
