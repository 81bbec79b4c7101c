"""Crossing: what becomes of one sealed batch of the source on its way over the border. Pure, and the heart of it.

Steps, with the numbers of docs/bridges.md:

5. the sealed batch is opened with its data key;
6. each record is judged by where it has been, then by the grant's filter and field rules; what does not cross is
   withheld, with the reason;
7. what crosses is encoded anew, with its path of regions, and sealed for the destination;
8. its leaves are made: WITHHELD for what stays, INTENT for what crosses.

Invariants:
- the same batch under the same `Route` gives the same envelopes, byte for byte, whatever the time: a retry repeats
  itself. Only leaves carry the time;
- what a leaf commits to and counts are the bytes that stand in the envelope's batch: key, headers (path and trace
  included) and payload; nothing is encoded a second time for it;
- every record of the batch is in exactly one leaf, or in none where the batch was cut below `first_offset`;
- it fails closed: a record, or a whole batch, that cannot be read is withheld;
- one batch makes one envelope; only where that would pass the wire's limit is it halved, always in the same places.

A batch of a kilobyte on the wire may hold 65,536 records, or two million values that rules are applied to: what is done for each of them is a generator,
which `finished` runs through at once, and a link step by step, so that nobody else of the agent waits for it. A step takes a few
milliseconds, within a record of many values, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from audit.crossed import CROSSED_BEFORE, OffsetSet
from audit.leaf import (
    CommitmentKey,
    Committer,
    EncodedLeaf,
    GapKind,
    Header,
    Kind,
    Leaf,
    LeafPart,
    Side,
    encode_part,
    iter_leaf_parts,
    iter_packed,
    pack_entries,
)
from felix.batch import (
    FLAG_ZSTD,
    HEADERS_MAX,
    KEY_BYTES_MAX,
    OFFSET_MAX,
    Batch,
    BatchHeader,
    Buffer,
    Columns,
    NewRecord,
    Parts,
    Record,
    batch_steps,
    decode_batch,
    decode_columns,
    decode_records,
    encode_parts,
)
from felix.errors import Code, RequestError
from felix.identity import Identity
from felix.provenance import HOPS_MAX, PATH_HEADER, PathUnion, encode_path, parse_path
from felix.steps import Steps
from keys.envelope import SEALABLE_BYTES_MAX, DataKey, open_batch
from keys.link import LinkSecrets, commitment_secret
from keys.transfer import TransferKey, TransferScope, seal_envelope
from policy.grant import ExportGrant, RefusalKind, check_path
from policy.terms import GrantTerms, pseudonym_scope
from policy.transform import Crossing, Transform, Withheld, compile_transform

TRANSFORM_FAILED: Final = "transform-failed"
FILTERED: Final = "filtered"
LOOP: Final = "loop"
ONWARD: Final = "onward"
PATH_UNKNOWN: Final = "path-unknown"
"""It has a path, and no bridge brought it: a producer's word, from which neither region's log may be written."""
NO_BRIDGE: Final = "It names regions that it came through, and no bridge brought it here."
REASONS: Final = (TRANSFORM_FAILED, FILTERED, LOOP, ONWARD, PATH_UNKNOWN, CROSSED_BEFORE)
"""Why records stay, in the order in which their leaves stand."""
_CODES: Final = {
    TRANSFORM_FAILED: Code.TRANSFORM_FAILED,
    LOOP: Code.LOOP_REFUSED,
    ONWARD: Code.RESIDENCY_DENIED,
    PATH_UNKNOWN: Code.LOOP_REFUSED,
}
_TOO_LARGE: Final = (Code.BATCH_TOO_LARGE, Code.ENVELOPE_INVALID)
STEP_RECORDS: Final = 64
"""Records of one step: a few milliseconds, whatever is done for each, unless they are long. A record may have 64 headers."""
STEP_BYTES: Final = 2_048
"""Bytes of payloads after which a step ends that applies rules, however few records they are: a value may take two bytes, and ten microseconds."""

T = TypeVar("T")

SENTENCE_CHARS_MAX: Final = 500
"""Of the first record's reason, in a WITHHELD leaf."""


def compile_terms(terms: GrantTerms, secrets: LinkSecrets) -> Transform:
    """The grant's transform under the link's own field secret."""
    return compile_transform(terms.transform, secrets.fields, pseudonym_scope(terms))


@dataclass(frozen=True, slots=True)
class Route:
    """One shard of a link in one source epoch: keys, rules, and what every leaf of it says.

    - `template` is of the same link, shard, epoch and grant as `key.scope`.
    """

    key: TransferKey
    agent: Identity = field(repr=False)
    terms: GrantTerms
    transform: Transform = field(repr=False)
    template: Header = field(repr=False)
    committer: Committer = field(repr=False)
    withheld: Committer = field(repr=False)
    """for records that stay: its key is not derived from the transfer key, which the destination has"""
    own_path: bytes

    @classmethod
    def of(
        cls,
        export: ExportGrant,
        scope: TransferScope,
        secrets: LinkSecrets,
        transform: Transform,
        agent: Identity,
        import_key: bytes,
    ) -> Route:
        """`import_key`: the destination's public import key; its hash names it in leaves."""
        key = secrets.transfer_key(scope)
        stream = str(scope.stream)
        committer = Committer(
            CommitmentKey(key.key_id, commitment_secret(key)), stream, scope.incarnation, scope.shard
        )
        withheld = Committer(
            CommitmentKey(*secrets.withheld_key(scope)), stream, scope.incarnation, scope.shard
        )
        template = Header(
            kind=Kind.INTENT,
            side=Side.EGRESS,
            time_ms=0,
            source_region=scope.source_region,
            destination_region=scope.destination_region,
            bridge=str(scope.bridge),
            stream=stream,
            destination_stream=str(scope.destination),
            shard=scope.shard,
            source_epoch=scope.epoch,
            incarnation=scope.incarnation,
            destination_key_id=hashlib.sha256(import_key).digest()[:16],
            commitment_key_id=key.key_id,
            grant_id=scope.grant_id,
            terms_hash=scope.terms_hash,
            policy_version=export.policy_revision,
            policy_hash=bytes.fromhex(export.policy_hash),
        )
        return cls(
            key,
            agent,
            export.terms,
            transform,
            template,
            committer,
            withheld,
            encode_path((scope.source_region,)),
        )


class OpenedBatch(NamedTuple):
    """A batch of the source, opened. `records` is None where its body is no body: then all of it is withheld."""

    header: BatchHeader
    sha256: bytes
    key_id: bytes
    records: Sequence[Record] | None
    problem: str
    plain: Batch


class Staying(NamedTuple):
    """Records that do not cross for one reason, as they were; `sentence` says why the first of them does not."""

    reason: str
    sentence: str
    records: list[Record]


class SortedBatch(NamedTuple):
    """What crosses, transformed, with source offsets and times; and what stays."""

    opened: OpenedBatch
    crossing: list[Record]
    staying: tuple[Staying, ...]


class SealedRange(NamedTuple):
    """One envelope and what its leaves are made of. Offsets with both ends included."""

    first_offset: int
    last_offset: int
    records: int
    record_bytes: int
    """of keys, encoded headers and payloads, as they cross"""
    envelope: bytes
    envelope_sha256: bytes
    path: tuple[str, ...]
    """the regions that the crossing records have been in, this one last; empty where nothing crosses"""
    sorted: SortedBatch
    crossing: list[Record]
    parts: Parts | None
    """the crossing records as they stand in the envelope's batch; None where nothing crosses"""

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1


class Packed(NamedTuple):
    """What a range's leaves list, taken apart as leaves hold it."""

    entries_sha256: bytes
    """of the packed entries of what crosses"""
    crossing: tuple[LeafPart, ...]
    """one without entries where nothing does"""
    staying: tuple[tuple[Staying, tuple[LeafPart, ...]], ...]


def open_sealed(body: bytes | memoryview, data_key: DataKey) -> Steps[OpenedBatch]:
    """Step 5. Raises TamperError where the batch is not what was sealed, RequestError(BATCH_MALFORMED) for no batch.

    A body that decrypts and is no list of records is its producer's fault: the batch is withheld, and nothing raises.
    """
    sealed = decode_batch(body)
    digest = hashlib.sha256(body).digest()
    plain = open_batch(data_key, sealed)
    records: list[Record] | None
    yield
    try:
        records, problem = (yield from _listed(decode_records(plain))), ""
    except RequestError as error:
        records, problem = None, error.sentence
    return OpenedBatch(plain.header, digest, sealed.header.key_id, records, problem, plain)


def _listed(items: Iterable[T]) -> Steps[list[T]]:
    """All of them, some at a time."""
    found, left = list[T](), iter(items)
    while some := list(islice(left, STEP_RECORDS)):
        found += some
        yield
    return found


def sort_records(opened: OpenedBatch, route: Route, before: OffsetSet | None = None) -> Steps[SortedBatch]:
    """Step 6. `before`: source offsets that crossed before a resend, and stay."""
    header = opened.header
    staying: dict[str, Staying] = {}
    if opened.records is None:
        lost = [
            Record(header.base_offset + at, header.append_time_ms, None, {}, b"")
            for at in range(header.records)
        ]
        held = Staying(TRANSFORM_FAILED, f"The whole batch cannot be read. {opened.problem}", lost)
        return SortedBatch(opened, [], (held,))

    def stay(reason: str, sentence: str, record: Record) -> None:
        held = staying.get(reason)
        if held is None:
            held = staying[reason] = Staying(reason, sentence[:SENTENCE_CHARS_MAX], [])
        held.records.append(record)

    crossing: list[Record] = []
    transform, own_path = route.transform.steps, route.own_path
    plain_headers: Mapping[str, bytes] = {PATH_HEADER: own_path}
    stepped = 0
    for at, record in enumerate(opened.records, 1):
        stepped += len(record.payload)
        if at % STEP_RECORDS == 0 or stepped >= STEP_BYTES:
            stepped = 0
            yield
        if before is not None and record.offset in before:
            stay(CROSSED_BEFORE, "It crossed before the resend.", record)
            continue
        path = own_path
        if record.headers and PATH_HEADER in record.headers:
            found = _extend_path(record, route) if header.is_bridged else (PATH_UNKNOWN, NO_BRIDGE)
            if isinstance(found, tuple):
                stay(*found, record)
                continue
            path = found
        result = yield from transform(record.key, record.headers, record.payload)
        if isinstance(result, Crossing):
            headers = plain_headers
            if result.headers or path is not own_path:
                headers = {**result.headers, PATH_HEADER: path}
            if problem := _too_many_or_long(result.key, headers):
                stay(TRANSFORM_FAILED, problem, record)
                continue
            crossing.append(
                Record(record.offset, record.timestamp_ms, result.key or None, headers, result.payload)
            )
        elif isinstance(result, Withheld):
            stay(TRANSFORM_FAILED, result.reason, record)
        else:
            stay(FILTERED, "The grant's filter excludes it.", record)
    ordered = tuple(staying[reason] for reason in REASONS if reason in staying)
    return SortedBatch(opened, crossing, ordered)


def _too_many_or_long(key: Buffer | None, headers: Mapping[str, bytes]) -> str:
    """Why no batch has this record as it would cross, or nothing. A broker reads no body, so a publisher may have put into one what no client encodes."""
    if len(headers) > HEADERS_MAX:
        return f"It would cross with {len(headers)} headers; {HEADERS_MAX} are allowed."
    if key is not None and len(key) > KEY_BYTES_MAX:
        return f"Its key has {len(key)} bytes; {KEY_BYTES_MAX} are allowed."
    return ""


def _extend_path(record: Record, route: Route) -> bytes | tuple[str, str]:
    """The record's path with this region added, or the reason and sentence why it must stay."""
    scope = route.key.scope
    try:
        path = parse_path(record.headers[PATH_HEADER])
    except RequestError as error:
        return LOOP, error.sentence
    refusal = check_path(scope.grant_id, route.terms, path)
    if refusal is not None:
        return (LOOP if refusal.kind is RefusalKind.LOOP else ONWARD), refusal.sentence
    longer = (*path, scope.source_region)
    if len(longer) > HOPS_MAX:
        return (
            LOOP,
            f"The record has been in {len(path)} regions; {HOPS_MAX} are the most that a path can name.",
        )
    return encode_path(longer)


def seal_ranges(sorted_: SortedBatch, route: Route, first_offset: int = 0) -> Steps[list[SealedRange]]:
    """Step 7: usually one range. Records below `first_offset` are left out: they are at the destination already."""
    header = sorted_.opened.header
    last = header.next_offset - 1
    ranges = yield from _seal(sorted_, route, header.base_offset, last, sorted_.crossing)
    kept = [found for found in ranges if found.last_offset >= first_offset]
    if kept and kept[0].first_offset < first_offset:
        # Only where a source's log, or a link, begins inside a batch.
        cut = [record for record in kept[0].crossing if record.offset >= first_offset]
        kept[:1] = yield from _seal(sorted_, route, first_offset, kept[0].last_offset, cut)
    return kept


def _seal(
    sorted_: SortedBatch, route: Route, first: int, last: int, crossing: list[Record]
) -> Steps[list[SealedRange]]:
    source = sorted_.opened.header
    try:
        path = _regions(crossing)
        yield
        parts = (yield from _encode_parts(crossing)) if crossing else None
        batch = (yield from _encode(source, parts)) if parts is not None else None
        yield
        envelope = seal_envelope(
            route.key,
            route.agent,
            base_offset=first,
            last_offset=last,
            batch=batch,
            source_offsets=[record.offset for record in crossing],
        )
    except RequestError as error:
        if error.code not in _TOO_LARGE or not crossing:
            raise
        # A transform may lengthen records, and a source batch may be as long as the wire takes; and its records may have been in more
        # regions than a leaf names.
        if first == last:
            failed = _failed(sorted_, crossing, error.sentence)
            staying = (*sorted_.staying, failed)
            return (yield from _seal(sorted_._replace(staying=staying), route, first, last, []))
        middle = (first + last) // 2
        low = [record for record in crossing if record.offset <= middle]
        high = [record for record in crossing if record.offset > middle]
        before = yield from _seal(sorted_, route, first, middle, low)
        return before + (yield from _seal(sorted_, route, middle + 1, last, high))
    size = parts.size_bytes if parts is not None else 0
    return [
        SealedRange(
            first, last, len(crossing), size, envelope.encode(), envelope.hash, path, sorted_, crossing, parts
        )
    ]


def _regions(crossing: list[Record]) -> tuple[str, ...]:
    """Where these records have been, all together, each by its path as it crosses."""
    union = PathUnion()
    for path in {record.headers[PATH_HEADER] for record in crossing}:
        union.add(parse_path(path))
    return union.regions


def _failed(sorted_: SortedBatch, records: list[Record], sentence: str) -> Staying:
    """A single record that is too large once it is transformed stays, as it was."""
    offsets = {record.offset for record in records}
    originals = [record for record in sorted_.opened.records or () if record.offset in offsets]
    return Staying(TRANSFORM_FAILED, sentence[:SENTENCE_CHARS_MAX], originals)


def _encode_parts(crossing: list[Record]) -> Steps[Parts]:
    """As `encode_parts` of them all."""
    payloads, keys, headers = list[Buffer](), list[Buffer](), list[Buffer]()
    for at in range(0, len(crossing), STEP_RECORDS):
        some = crossing[at : at + STEP_RECORDS]
        parts = encode_parts([NewRecord(each.payload, each.key, each.headers) for each in some])  # type: ignore[arg-type]
        payloads += parts.payloads
        keys += parts.keys or [b""] * len(some)
        headers += parts.headers or [b""] * len(some)
        yield
    return Parts(payloads, keys if any(keys) else None, headers if any(headers) else None)


def _encode(source: BatchHeader, parts: Parts) -> Steps[Batch]:
    """Raises RequestError(BATCH_TOO_LARGE) for a batch that the destination could not seal: it would refuse it for ever."""
    batch = yield from batch_steps(parts, shard=source.shard, compress=bool(source.flags & FLAG_ZSTD))
    if batch.header.body_length > SEALABLE_BYTES_MAX:
        raise RequestError(
            f"A batch of {batch.header.total_length} bytes leaves the destination no room for its seal.",
            code=Code.BATCH_TOO_LARGE,
        )
    # The destination's leaves name the source's append time, which it learns from here.
    return batch.with_header(replace(batch.header, append_time_ms=source.append_time_ms))


def range_entries(sealed: SealedRange, route: Route, *, withheld: bool = True) -> Steps[Packed]:
    """The entries of its leaves. `withheld`: also of those of what stays, which are made once."""
    opened, crossing = sealed.sorted.opened, b""
    if sealed.parts is not None:
        offsets = [record.offset for record in sealed.crossing]
        packed = iter_packed(offsets, opened.header.append_time_ms, sealed.parts, route.committer)
        crossing = b"".join((yield from _listed(packed)))
    staying = []
    for held in sealed.sorted.staying if withheld else ():
        records = [
            record for record in held.records if sealed.first_offset <= record.offset <= sealed.last_offset
        ]
        if records:
            yield
            entries = yield from _withheld_entries(opened, records, route.withheld)
            header = _withheld_header(sealed, held, route, OFFSET_MAX)
            staying.append((held, (yield from _parts(header, entries))))
    parts, digest = (yield from _parts(_intent_header(sealed, route, OFFSET_MAX), crossing)), hashlib.sha256()
    for part in parts:
        digest.update(part.entries)
        yield
    return Packed(digest.digest(), parts, tuple(staying))


def _parts(header: Header, entries: bytes) -> Steps[tuple[LeafPart, ...]]:
    """`header`: of a time that takes as much room as any."""
    found = []
    for part in iter_leaf_parts(header, entries):
        found.append(part)
        yield
    return tuple(found)


def range_leaves(sealed: SealedRange, packed: Packed, route: Route, time_ms: int) -> list[EncodedLeaf]:
    """Step 8: WITHHELD leaves, then INTENT leaves, which list these entries. Where nothing crosses, the one INTENT lists no records."""
    leaves: list[EncodedLeaf] = []
    for held, parts in packed.staying:
        header = _withheld_header(sealed, held, route, time_ms)
        leaves += [encode_part(header, part, None) for part in parts]
    header = _intent_header(sealed, route, time_ms)
    return leaves + [encode_part(header, part, None) for part in packed.crossing]


def _common_header(sealed: SealedRange, route: Route, time_ms: int) -> Header:
    opened = sealed.sorted.opened
    return msgspec.structs.replace(
        route.template,
        time_ms=time_ms,
        first_offset=sealed.first_offset,
        last_offset=sealed.last_offset,
        source_key_id=opened.key_id,
        source_batch_sha256=opened.sha256,
    )


def _withheld_header(sealed: SealedRange, held: Staying, route: Route, time_ms: int) -> Header:
    return msgspec.structs.replace(
        _common_header(sealed, route, time_ms),
        kind=Kind.WITHHELD,
        commitment_key_id=route.withheld.key_id,
        reason=held.reason,
        code=int(_CODES.get(held.reason, 0)),
        sentence=held.sentence,
    )


def _intent_header(sealed: SealedRange, route: Route, time_ms: int) -> Header:
    common = _common_header(sealed, route, time_ms)
    return msgspec.structs.replace(common, envelope_sha256=sealed.envelope_sha256, path=sealed.path)


def _withheld_entries(opened: OpenedBatch, records: list[Record], committer: Committer) -> Steps[bytes]:
    """What stays is committed to as it stands in the source's batch. Of a batch that cannot be read nothing is known."""
    if opened.records is None:
        made = list[bytes]()
        for at in range(0, len(records), STEP_RECORDS):
            made.append(pack_entries(records[at : at + STEP_RECORDS], committer))
            yield
        return b"".join(made)
    offsets = [record.offset for record in records]
    columns = decode_columns(opened.plain)
    yield
    chosen = _Chosen(columns, opened.header.base_offset, frozenset(offsets))
    yield
    packed = iter_packed(offsets, opened.header.append_time_ms, chosen, committer)
    return b"".join((yield from _listed(packed)))


class _Chosen(NamedTuple):
    """Of a batch the records at these offsets, one after the other: nothing is made of them all."""

    columns: Columns
    base: int
    offsets: frozenset[int]

    def rows(self) -> Iterator[tuple[Buffer, Buffer, Buffer]]:
        rows = enumerate(self.columns.rows(), self.base)
        return (row for offset, row in rows if offset in self.offsets)


def seal_nothing(route: Route, first_offset: int, last_offset: int) -> tuple[bytes, bytes]:
    """An envelope that carries no records, so that the destination's position moves; and its hash."""
    envelope = seal_envelope(
        route.key,
        route.agent,
        base_offset=first_offset,
        last_offset=last_offset,
        batch=None,
        source_offsets=(),
    )
    return envelope.encode(), envelope.hash


def nothing_leaf(
    route: Route, first_offset: int, last_offset: int, envelope_sha256: bytes, time_ms: int
) -> Leaf:
    """The INTENT of such an envelope. There is no batch to name, so its hash is that of no bytes."""
    return Leaf(
        msgspec.structs.replace(
            route.template,
            time_ms=time_ms,
            first_offset=first_offset,
            last_offset=last_offset,
            source_batch_sha256=hashlib.sha256(b"").digest(),
            envelope_sha256=envelope_sha256,
        )
    )


def gap_leaf(template: Header, gap: GapKind, first_offset: int, last_offset: int, time_ms: int) -> Leaf:
    """Source offsets that nobody can read any more."""
    return Leaf(
        msgspec.structs.replace(
            template,
            kind=Kind.GAP,
            time_ms=time_ms,
            first_offset=first_offset,
            last_offset=last_offset,
            gap=gap,
            destination_key_id=b"",
            commitment_key_id=b"",
        )
    )
