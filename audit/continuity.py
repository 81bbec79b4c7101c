"""What must hold across leaves, not only in each. Pure; fed with a log's leaves in order.

Rules, for each link shard (which names its destination stream) and stream incarnation (docs/audit.md, verification step 7):

- egress: every source offset from the first one on is accounted for exactly once and in order: listed in an
  INTENT, listed in a WITHHELD, or inside a GAP. WITHHELD leaves come before the INTENT leaves of their batch. A
  link may start anew further on only under another grant; what it left out is counted as skipped. Under another
  grant it may also begin again where batches announced under the one before have no ACK: those did not cross.
- egress: a GAP of a truncation accounts for nothing: it says of offsets that were accounted for that one end lost them;
- egress: an ACK answers exactly one INTENT batch: same envelope, same range, same number of records; and its receipt, where it
  says so, is for the very records that the INTENT lists.
- ingress: source offsets only grow, whichever bridge brings them; no record is appended twice.
- both, version 1: an INTENT or ingress ACK names a grant whose GRANT leaf stands earlier in the same log, with the same
  hash of terms, for its stream, bridge and regions, inside its window and not after its REVOKE. From version 2 on the
  signed documents decide: audit.agreement.

Memory is bounded: by link shards, by unanswered batches, by withheld records ahead of their INTENT.
Callers: audit.verify, audit.spark.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from audit.leaf import GapKind, Header, Kind, Leaf, Side, iter_entries
from audit.position import LINK_SHARDS_MAX, LinkShard, ShardName
from audit.receipt import read_unverified
from felix.errors import RequestError, TamperError
from felix.names import NamePattern, StreamName

if TYPE_CHECKING:
    from hashlib import _Hash

HELD_MAX: Final = 1 << 17
"""Withheld records whose place is not reached yet: two of the largest batches."""
UNANSWERED_MAX: Final = 1 << 18
"""Batches without an ACK in the whole log, about 300 bytes each."""
GRANTS_MAX: Final = 1 << 17


_ANSWERED: Final = ("incarnation", "source_epoch", "grant_id", "terms_hash", "destination_stream")
"""What an ACK, whose receipt the destination signed, repeats of its INTENT."""


class _Batch(NamedTuple):
    incarnation: bytes
    said: tuple[object, ...]
    first: int
    last: int
    records: int
    parts_missing: int
    entries: _Hash | bytes
    """SHA-256 of the entries of its parts: finished where none is missing"""


class _Grant(NamedTuple):
    stream: NamePattern
    destination_stream: str
    link: tuple[str, str, str]
    terms_hash: bytes
    not_before_ms: int
    expires_ms: int
    revoked: bool


@dataclass(slots=True)
class _Shard:
    following: int
    grant_id: str
    held: set[int] = field(default_factory=set)


class Continuity:
    """The state after the leaves applied so far."""

    def __init__(self) -> None:
        self._shards: dict[tuple[LinkShard, bytes], _Shard] = {}
        self._unanswered: dict[tuple[LinkShard, bytes], _Batch] = {}
        self._grants: dict[str, _Grant] = {}
        self.leaves: Counter[str] = Counter()
        """leaves by kind"""
        self.records: Counter[str] = Counter()
        """records by kind: INTENT, ACK, WITHHELD; GAP counts offsets"""
        self.skipped = 0
        """source offsets left out between two grants"""

    @property
    def unanswered(self) -> int:
        """Batches with an INTENT and no ACK. Not a mistake: they may be under way."""
        return len(self._unanswered)

    def forget(self) -> None:
        """Leaves could not be read: go on without conclusions from what is missing."""
        self._shards.clear()
        self._unanswered.clear()

    def apply(self, leaf: Leaf) -> list[str]:
        """Take the next leaf. Returns one sentence per rule that it breaks."""
        header, kind = leaf.header, leaf.header.kind
        self.leaves[kind.name] += 1
        match kind:
            case Kind.INTENT if header.side is Side.EGRESS:
                self.records["INTENT"] += header.records
                return self._grant_holds(leaf) + self._cover(leaf) + self._expect_ack(leaf)
            case Kind.WITHHELD:
                self.records["WITHHELD"] += header.records
                return self._hold(leaf)
            case Kind.GAP:
                return self._gap(header)
            case Kind.ACK if header.side is Side.EGRESS:
                self.records["ACK"] += header.records
                return self._answer(header)
            case Kind.ACK:
                self.records["ACK"] += header.records
                return self._grant_holds(leaf) + self._grow(header)
            case Kind.GRANT if leaf.version == 1:
                return self._grant(header)
            case Kind.REVOKE:
                grant = self._grants.get(header.grant_id)
                if grant is not None:
                    self._grants[header.grant_id] = grant._replace(revoked=True)
            case Kind.INTENT:
                return ["An INTENT stands in an ingress log."]
        return []

    # Grants

    def _grant(self, header: Header) -> list[str]:
        terms, known = header.terms, self._grants.get(header.grant_id)
        assert terms is not None
        if known is not None:
            if known.terms_hash != header.terms_hash:
                return [f"Grant {header.grant_id} appears with other terms than before."]
            return []
        if len(self._grants) >= GRANTS_MAX:
            return [f"More than {GRANTS_MAX} grants: not all can be checked."]
        try:
            stream = NamePattern(header.stream)
        except RequestError as error:
            return [f"Grant {header.grant_id}: {error.sentence}"]
        self._grants[header.grant_id] = _Grant(
            stream,
            header.destination_stream,
            (header.bridge, header.source_region, header.destination_region),
            header.terms_hash,
            terms.not_before_ms,
            terms.expires_ms,
            revoked=False,
        )
        return []

    def _grant_holds(self, leaf: Leaf) -> list[str]:
        header = leaf.header
        if leaf.version > 1:
            return []
        grant, what = self._grants.get(header.grant_id), f"{header.kind.name} under grant {header.grant_id}"
        if grant is None:
            return [f"{what}: no GRANT leaf stands before it."]
        if grant.terms_hash != header.terms_hash:
            return [f"{what}: its hash of terms is not the grant's."]
        if (header.bridge, header.source_region, header.destination_region) != grant.link:
            return [f"{what}: the grant is for another bridge, or between other regions."]
        if not _named(grant, header):
            return [f"{what}: the grant is for {grant.stream}, the leaf for {header.stream}."]
        if grant.revoked:
            return [f"{what}: the grant was revoked before."]
        if header.time_ms < grant.not_before_ms or (grant.expires_ms and header.time_ms >= grant.expires_ms):
            return [f"{what}: at {header.time_ms} ms it is outside the grant's window."]
        return []

    # Offsets

    def _shard(self, header: Header, link: LinkShard | None = None) -> _Shard | str:
        key = (link or LinkShard.of(header), header.incarnation)
        shard = self._shards.get(key)
        if shard is None:
            if len(self._shards) >= LINK_SHARDS_MAX:
                return f"More than {LINK_SHARDS_MAX} link shards: not all can be checked."
            assert header.first_offset is not None
            shard = self._shards[key] = _Shard(header.first_offset, header.grant_id)
        return shard

    def _start(self, shard: _Shard, header: Header) -> list[str]:
        """The range must begin where the last one ended; under another grant it may begin later."""
        first = header.first_offset
        assert first is not None
        if first < shard.following and header.grant_id != shard.grant_id and self._is_open(header, first):
            shard.following = first
            shard.held.clear()
            # What another grant begins again from there on is not answered any more.
            for key, batch in self._unanswered_of(header):
                if batch.first >= first:
                    del self._unanswered[key]
        if first > shard.following and not shard.held:
            missing = first - shard.following
            at, shard.following = shard.following, first
            if header.grant_id and header.grant_id != shard.grant_id:
                self.skipped += missing
            else:
                return [
                    f"{_name(header)}: offsets {at}..{first - 1} are neither crossed, withheld nor a gap."
                ]
        return []

    def _is_open(self, header: Header, first: int) -> bool:
        """Whether a batch that covers this offset was announced and has no ACK."""
        return any(batch.first <= first <= batch.last for _, batch in self._unanswered_of(header))

    def _unanswered_of(self, header: Header) -> list[tuple[tuple[LinkShard, bytes], _Batch]]:
        """The batches of a leaf's link shard and incarnation that have no ACK."""
        link = LinkShard.of(header)
        return [
            (key, batch)
            for key, batch in self._unanswered.items()
            if key[0] == link and batch.incarnation == header.incarnation
        ]

    def _cover(self, leaf: Leaf) -> list[str]:
        header = leaf.header
        shard = self._shard(header)
        if isinstance(shard, str):
            return [shard]
        mistakes = self._start(shard, header)
        shard.grant_id = header.grant_id
        first, last = header.first_offset, header.last_offset
        assert first is not None and last is not None
        if not shard.held and first == shard.following and header.records == last - first + 1:
            shard.following = last + 1
            return mistakes
        twice = 0
        for entry in iter_entries(leaf):
            _advance(shard)
            twice += entry.offset < shard.following
            if entry.offset > shard.following:
                mistakes.append(
                    f"{_name(header)}: offsets {shard.following}..{entry.offset - 1} inside the batch are neither "
                    "crossed nor withheld."
                )
            shard.following = max(shard.following, entry.offset + 1)
        _advance(shard)
        if twice:
            mistakes.append(
                f"{_name(header)}: {twice} records of {first}..{last} are accounted for a second time."
            )
        if shard.following <= last:
            mistakes.append(
                f"{_name(header)}: offsets {shard.following}..{last} at the batch's end are neither crossed nor withheld."
            )
            shard.following = last + 1
        shard.held = {offset for offset in shard.held if offset >= shard.following}
        return mistakes

    def _hold(self, leaf: Leaf) -> list[str]:
        header = leaf.header
        shard = self._shard(header)
        if isinstance(shard, str):
            return [shard]
        mistakes = self._start(shard, header)
        shard.grant_id = header.grant_id
        if len(shard.held) + leaf.entry_count > HELD_MAX:
            return [
                *mistakes,
                f"{_name(header)}: more than {HELD_MAX} records are withheld ahead of their INTENT.",
            ]
        twice = 0
        for entry in iter_entries(leaf):
            twice += entry.offset < shard.following or entry.offset in shard.held
            shard.held.add(entry.offset)
        _advance(shard)
        if twice:
            mistakes.append(f"{_name(header)}: {twice} withheld records are accounted for a second time.")
        shard.held = {offset for offset in shard.held if offset >= shard.following} if twice else shard.held
        return mistakes

    def _gap(self, header: Header) -> list[str]:
        shard = self._shard(header)
        if isinstance(shard, str):
            return [shard]
        first, last = header.first_offset, header.last_offset
        assert first is not None and last is not None
        if header.gap is GapKind.TRUNCATION and last < shard.following:
            # It was accounted for, and the source lost it afterwards: both stay true.
            self.records["TRUNCATED"] += last - first + 1
            return []
        self.records["GAP"] += last - first + 1
        mistakes = self._start(shard, header)
        if first < shard.following:
            mistakes.append(
                f"{_name(header)}: the gap {first}..{last} covers offsets that are accounted for already."
            )
        shard.following = max(shard.following, last + 1)
        return mistakes

    def _grow(self, header: Header) -> list[str]:
        # At the destination a shard has one place, whichever bridge brings it.
        shard = self._shard(header, LinkShard("", *ShardName.of(header)))
        if isinstance(shard, str):
            return [shard]
        first, last = header.first_offset, header.last_offset
        assert first is not None and last is not None
        twice = first < shard.following
        shard.following = max(shard.following, last + 1)
        return [f"{_name(header)}: offsets from {first} on were appended before."] if twice else []

    # Answers

    def _expect_ack(self, leaf: Leaf) -> list[str]:
        header = leaf.header
        key = (LinkShard.of(header), header.envelope_sha256)
        batch = self._unanswered.get(key)
        first, last = header.first_offset, header.last_offset
        assert first is not None and last is not None
        if batch is None and header.part == 0:
            if len(self._unanswered) >= UNANSWERED_MAX:
                return [f"More than {UNANSWERED_MAX} batches without an ACK: not all can be checked."]
            self._unanswered[key] = _Batch(
                header.incarnation,
                _answered(header),
                first,
                last,
                header.records,
                header.parts - 1,
                _added(sha256(), leaf, header.parts - 1),
            )
            return []
        if (
            batch is None
            or isinstance(batch.entries, bytes)
            or header.part != header.parts - batch.parts_missing
            or first != batch.last + 1
        ):
            return [
                f"{_name(header)}: part {header.part} of {header.parts} does not follow the part before it."
            ]
        self._unanswered[key] = batch._replace(
            last=last,
            records=batch.records + header.records,
            parts_missing=batch.parts_missing - 1,
            entries=_added(batch.entries, leaf, batch.parts_missing - 1),
        )
        return []

    def _answer(self, header: Header) -> list[str]:
        key = (LinkShard.of(header), header.envelope_sha256)
        batch = self._unanswered.pop(key, None)
        if batch is None:
            return [f"{_name(header)}: the ACK answers no INTENT, or one that was answered before."]
        said = (header.first_offset, header.last_offset, header.records, 0)
        if said != (batch.first, batch.last, batch.records, batch.parts_missing):
            return [
                f"{_name(header)}: the ACK says {header.records} records of {header.first_offset}.."
                f"{header.last_offset}, its INTENT {batch.records} of {batch.first}..{batch.last}."
            ]
        differing = [
            name
            for name, intent, ack in zip(_ANSWERED, batch.said, _answered(header), strict=True)
            if intent != ack
        ]
        if differing:
            return [f"{_name(header)}: the ACK differs from its INTENT in {', '.join(differing)}."]
        if isinstance(batch.entries, bytes) and not _is_for(header, batch.entries):
            return [f"{_name(header)}: the receipt in the ACK is for other records than its INTENT lists."]
        return []


def _added(state: _Hash, leaf: Leaf, parts_missing: int) -> _Hash | bytes:
    state.update(leaf.entries)
    return state if parts_missing else state.digest()


def _is_for(ack: Header, entries_sha256: bytes) -> bool:
    """Whether the receipt is for these records. That it reads, and who signed it, is asked elsewhere (step 8)."""
    try:
        return read_unverified(ack.receipt).is_for(entries_sha256)
    except TamperError:
        return True


def _answered(header: Header) -> tuple[object, ...]:
    return tuple(getattr(header, name) for name in _ANSWERED)


def _named(grant: _Grant, header: Header) -> bool:
    """True where the grant names the leaf's stream, and its name at the destination."""
    if grant.stream.is_exact:
        return (str(grant.stream), grant.destination_stream) == (header.stream, header.destination_stream)
    try:
        return (
            grant.stream.matches(StreamName.parse(header.stream))
            and header.stream == header.destination_stream
        )
    except RequestError:
        return False


def _advance(shard: _Shard) -> None:
    while shard.following in shard.held:
        shard.held.remove(shard.following)
        shard.following += 1


def _name(header: Header) -> str:
    return f"{header.stream} shard {header.shard} to {header.destination_region}"
