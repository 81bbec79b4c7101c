"""What must hold across leaves, not only in each. Pure; fed with a log's leaves in order.

Rules, for each link shard (which names its destination stream) and stream incarnation (docs/audit.md, verification step 7):

- egress: every source offset is accounted for once, in order, and an ACK answers one batch: `audit.accounting`.
- ingress: source offsets only grow, whichever bridge brings them; no record is appended twice.
- both, version 1: what accounts for source offsets, and an ingress ACK, names a grant whose GRANT leaf stands earlier in the same log, with
  the same hash of terms, for its stream, bridge and regions; an INTENT or ACK lies inside its window and not after its REVOKE. From
  version 2 on the signed documents decide: audit.agreement.

Memory is bounded: by link shards, by what `audit.accounting` holds, by grants.
Callers: audit.verify, audit.spark.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Final, NamedTuple

from audit.accounting import Accounts, Agreed
from audit.allowance import Allowed
from audit.leaf import GapKind, Header, Kind, Leaf, Side
from audit.places import Places
from audit.position import LINK_SHARDS_MAX, LinkShard, ShardName
from felix.errors import RequestError
from felix.names import NamePattern, StreamName

GRANTS_MAX: Final = 1 << 17


class _Grant(NamedTuple):
    stream: NamePattern
    destination_stream: str
    link: tuple[str, str, str]
    terms_hash: bytes
    not_before_ms: int
    expires_ms: int
    allowed: Allowed
    revoked: bool


class Continuity:
    """The state after the leaves applied so far."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self._arrived: dict[tuple[ShardName, bytes], int] = {}
        self._arrivals = Places(LINK_SHARDS_MAX)
        self._grants: dict[str, _Grant] = {}
        self.leaves: Counter[str] = Counter()
        """leaves by kind"""
        self.records: Counter[str] = Counter()
        """records by kind: INTENT, ACK, WITHHELD; GAP and TRUNCATED count offsets"""
        self._miscounted: dict[tuple[Side, int], int] = {}

    def forget(self) -> None:
        """Leaves could not be read: go on without conclusions from what is missing."""
        self.accounts.forget()
        self._arrived.clear()

    def forget_shard(self, header: Header) -> None:
        """As `forget`, of the shard that a leaf is about."""
        self.accounts.forget_shard(header)
        self._arrived.pop((ShardName.of(header), header.incarnation), None)

    def apply(self, leaf: Leaf, index: int, agreed: Agreed) -> list[str]:
        """Take the next leaf. Returns one sentence per rule that it breaks. `agreed` says of version 2 whether both regions signed
        the leaf's grant before it; of version 1 that is asked here."""
        header, kind = leaf.header, leaf.header.kind
        self.leaves[kind.name] += 1
        match kind:
            case Kind.INTENT if header.side is Side.EGRESS:
                self.records["INTENT"] += header.records
                found = self._grant_holds(leaf)
                return found + self._account(leaf, index, agreed)
            case Kind.WITHHELD:
                self.records["WITHHELD"] += header.records
                return self._grant_named(leaf) + self._account(leaf, index, agreed)
            case Kind.GAP:
                assert header.first_offset is not None and header.last_offset is not None
                if header.gap is GapKind.TRUNCATION:
                    # It was accounted for, and one end lost it afterwards: both stay true.
                    self.records["TRUNCATED"] += header.last_offset - header.first_offset + 1
                    return []
                self.records["GAP"] += header.last_offset - header.first_offset + 1
                return self._grant_named(leaf) + self._account(leaf, index, agreed)
            case Kind.ACK if header.side is Side.EGRESS:
                self.records["ACK"] += header.records
                return self._account(leaf, index, agreed)
            case Kind.ACK:
                self.records["ACK"] += header.records
                return self._grant_holds(leaf) + self._grow(header, index)
            case Kind.GRANT if leaf.version == 1:
                return self._grant(header)
            case Kind.REVOKE:
                grant = self._grants.get(header.grant_id)
                if grant is not None:
                    self._grants[header.grant_id] = grant._replace(revoked=True)
            case Kind.INTENT:
                return ["An INTENT stands in an ingress log."]
        return []

    def _account(self, leaf: Leaf, index: int, agreed: Agreed) -> list[str]:
        if leaf.version == 1:
            agreed = partial(self._is_named, leaf)
        accounts, mistakes = self.accounts, list[str]()
        match leaf.header.kind:
            case Kind.INTENT:
                mistakes = accounts.intent(leaf, index, agreed)
            case Kind.WITHHELD:
                mistakes = accounts.withheld(leaf, index, agreed)
            case Kind.GAP:
                mistakes = accounts.gap(leaf.header, index, agreed)
            case Kind.ACK:
                mistakes = accounts.answer(leaf.header)
        if mistakes:
            self.miscount(leaf.header, index)
        return mistakes

    def place(self, header: Header, index: int) -> int | None:
        """The place of the link shard that a leaf is about; None: the log has more of them than are counted."""
        if header.side is Side.EGRESS:
            return self.accounts.places.number((LinkShard.of(header), header.incarnation), index)
        # At the destination a shard has one place, whichever bridge brings it.
        return self._arrivals.number((ShardName.of(header), header.incarnation), index)

    @property
    def miscounted(self) -> list[int]:
        """Of each link shard that is counted the first leaf with which source offsets are not accounted for as they must be: no number of
        them in one shard hides another's."""
        return sorted(self._miscounted.values())

    @property
    def uncounted_from(self) -> int | None:
        """The first leaf about a link shard that is not counted. No leaf before it is about one of those."""
        return min(
            (at for at in (self.accounts.places.beyond, self._arrivals.beyond) if at is not None),
            default=None,
        )

    def miscount(self, header: Header, index: int) -> None:
        """Remember that with this leaf source offsets are not accounted for as they must be."""
        number = self.place(header, index)
        if number is not None:
            self._miscounted.setdefault((header.side, number), index)

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
            Allowed(terms.budget_bytes, terms.rate_bytes_per_second),
            revoked=False,
        )
        return []

    def _grant_named(self, leaf: Leaf) -> list[str]:
        """What keeps the grant that a leaf names from being one that stands before it and is for this link and stream."""
        header = leaf.header
        if leaf.version > 1 or not header.grant_id:
            return []
        grant, what = self._grants.get(header.grant_id), f"{header.kind.name} under grant {header.grant_id}"
        if grant is None:
            return [f"{what}: no GRANT leaf stands before it."]
        if header.terms_hash not in (grant.terms_hash, b""):
            return [f"{what}: its hash of terms is not the grant's."]
        if (header.bridge, header.source_region, header.destination_region) != grant.link:
            return [f"{what}: the grant is for another bridge, or between other regions."]
        if not _named(grant, header):
            return [f"{what}: the grant is for {grant.stream}, the leaf for {header.stream}."]
        return []

    def _is_named(self, leaf: Leaf) -> bool:
        return not self._grant_named(leaf)

    def _grant_holds(self, leaf: Leaf) -> list[str]:
        header = leaf.header
        if leaf.version > 1:
            return []
        if found := self._grant_named(leaf):
            return found
        grant, what = self._grants[header.grant_id], f"{header.kind.name} under grant {header.grant_id}"
        if grant.revoked:
            return [f"{what}: the grant was revoked before."]
        if header.time_ms < grant.not_before_ms or (grant.expires_ms and header.time_ms >= grant.expires_ms):
            return [f"{what}: at {header.time_ms} ms it is outside the grant's window."]
        return []

    def allowed(self, header: Header) -> Allowed | None:
        """What the terms that a GRANT leaf of version 1 states allow altogether; None where it is not the grant of this leaf."""
        grant = self._grants.get(header.grant_id)
        return grant.allowed if grant is not None and grant.terms_hash == header.terms_hash else None

    # Arrivals

    def _grow(self, header: Header, index: int) -> list[str]:
        key = (ShardName.of(header), header.incarnation)
        if key not in self._arrived and self.place(header, index) is None:
            return [f"More than {LINK_SHARDS_MAX} link shards: not all can be checked."]
        first, last = header.first_offset, header.last_offset
        assert first is not None and last is not None
        following = self._arrived.get(key, first)
        self._arrived[key] = max(following, last + 1)
        if first < following:
            return [
                f"{header.stream} shard {header.shard} to {header.destination_region}: offsets from {first} on were appended before."
            ]
        return []


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
