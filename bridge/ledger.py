"""The ledger: what the egress log says of grants and of how far each shard is accounted for. Pure.

Derived from leaf headers, in the log's order, and from nothing else; a snapshot is a shortcut. It answers what
`audit.position` does not: whether a grant's terms stand in the log, how much of its budget crossed, and up to which
source offset every record is accounted for, also where none of them crossed.

Invariants: the state is a function of the headers applied, in order; `Ledger.decode(l.encode(…))` gives it back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from audit.crossed import CROSSED_BEFORE
from audit.leaf import GapKind, Header, Kind, Side
from audit.position import Crossing, LinkShard
from audit.stream_statement import Span
from felix.errors import Code, CorruptionError, RequestError

NOTHING: Final = hashlib.sha256(b"").digest()
"""What an INTENT names as its source batch that carries no records over a gap."""
SPANS_MAX: Final = 64
"""Epochs of one shard that are remembered: where more were read since a copy was made that is put back, all crosses again."""
GAPS_MAX: Final = 4_096
"""Ranges that are gaps, and behind which nothing was answered, remembered of one shard: as many as there may be INTENTs without an answer."""
WORDS: Final = frozenset((Kind.GRANT, Kind.ACCEPT, Kind.STANDING, Kind.REVOKE, Kind.DENY_ENTRY))
"""Kinds of documents that count until a later word of the same region does (bridge.said)."""
TRUNCATED_MAX: Final = 64
"""Ranges found gone that are remembered of one shard; the log has them all."""


class GrantAccount(msgspec.Struct):
    """One grant: does its GRANT leaf stand in the log, its REVOKE, and what crossed under it."""

    granted: bool = False
    revoked: bool = False
    charged_bytes: int = 0
    """of its budget"""
    crossed_records: int = 0


class ShardAccount(msgspec.Struct):
    """One shard of one incarnation: every offset below `accounted_to` has its leaf."""

    grant_id: str
    accounted_to: int
    read: list[Span]
    """of the newest epochs, oldest first, how far batches were read, here or by another bridge; other gaps come from no epoch, and move only `accounted_to`"""
    crossed: int = 0
    """records with a receipt"""
    withheld: int = 0
    filtered: int = 0
    gaps: int = 0
    """offsets that could not be read"""
    truncated: list[tuple[int, int]] = []
    """ranges that are accounted for and were found gone afterwards: first and last offset"""
    gap_ranges: list[tuple[int, int]] = []
    """first and last offset of each gap behind which nothing was answered"""

    def known_to(self, position: int, announced: Iterable[Crossing]) -> int:
        """Where another grant, which goes on at `position`, begins: there or below, so that it cuts in two no gap, and no batch of
        these, which were announced and have no answer. Above what is accounted for, where that ends."""
        units = [*self.gap_ranges, *((each.first_offset, each.last_offset) for each in announced)]
        return min([self.accounted_to, *(first for first, last in units if first < position <= last)])

    def brought_from(self, position: int, brought: int, announced: Iterable[Crossing]) -> int:
        """Where that begins which another bridge brought up to `position`, under the grant that is accounted for: with the first of these, which were announced and have no answer, that
        this bridge did not bring (its own ranges go to `brought`), or where what is accounted for ends. Raises RequestError(CONFLICT) where `position` cuts one of them, or a gap, in two."""
        others = [
            (each.first_offset, each.last_offset)
            for each in announced
            if each.grant_id == self.grant_id and each.first_offset >= brought
        ]
        for first, last in (*others, *self.gap_ranges):
            if first < position <= last:
                raise RequestError(
                    f"The destination goes on at offset {position}, and the egress log has {first} to {last} in one piece: this link cannot go on under this grant.",
                    code=Code.CONFLICT,
                    hint="Revoke the grant, and make a new one for this bridge.",
                )
        return min([self.accounted_to, *(first for first, _ in others if first < position)])

    def has_gap(self, first: int, last: int) -> None:
        """These offsets are not there to be announced."""
        del self.gap_ranges[: 1 - GAPS_MAX]
        self.gap_ranges.append((first, last))

    def has_read(self, span: Span) -> None:
        """A batch up to there was read."""
        if not self.read or self.read[-1].epoch < span.epoch:
            del self.read[: 1 - SPANS_MAX]
            self.read.append(span)
        elif self.read[-1].epoch == span.epoch:
            self.read[-1] = Span(span.epoch, max(span.read_to, self.read[-1].read_to))


class ShardKey(NamedTuple):
    """A shard of a link, in one incarnation of its stream."""

    link: LinkShard
    incarnation: bytes


class _Shard(msgspec.Struct):
    key: ShardKey
    account: ShardAccount


class _Snapshot(msgspec.Struct):
    size: int
    last_leaf_hash: bytes
    grants: dict[str, GrantAccount]
    shards: list[_Shard]
    documents: list[bytes]
    words: dict[bytes, int] | None = None
    """none in a snapshot of an earlier version, which is not taken"""


# Made here: shards and logs are opened on several threads, and msgspec learns a type at its first use, not safely on two.
_snapshot: Final = msgspec.msgpack.Decoder(_Snapshot)


class Ledger:
    """The accounts after the headers applied so far."""

    def __init__(self) -> None:
        self._grants: dict[str, GrantAccount] = {}
        self._shards: dict[ShardKey, ShardAccount] = {}
        self._links: dict[LinkShard, dict[bytes, ShardAccount]] = {}
        """the same accounts by link and incarnation: each link asks for its own every second"""
        self.documents: set[bytes] = set()
        """SHA-256 of each signed document that has a leaf"""
        self.words: dict[bytes, int] = {}
        """of those that a later word may replace, their leaves, as far as the log was read from its files"""

    def apply(self, header: Header, index: int | None = None) -> None:
        """Take the next leaf's header into account; `index`: its place, where that is known."""
        if header.document_sha256:
            self.documents.add(header.document_sha256)
            if index is not None and header.kind in WORDS:
                self.words.setdefault(header.document_sha256, index)
        match header.kind:
            case Kind.GRANT:
                self._grant(header.grant_id).granted = True
            case Kind.REVOKE:
                self._grant(header.grant_id).revoked = True
            case Kind.INTENT | Kind.WITHHELD | Kind.GAP if header.side is Side.EGRESS:
                self._cover(header)
            case Kind.ACK if header.side is Side.EGRESS:
                account = self._shards.get(ShardKey(LinkShard.of(header), header.incarnation))
                if account is not None:
                    account.crossed += header.records
                    account.gap_ranges = [
                        each for each in account.gap_ranges if each[1] > (header.last_offset or 0)
                    ]

    def _grant(self, grant_id: str) -> GrantAccount:
        return self._grants.setdefault(grant_id, GrantAccount())

    def _cover(self, header: Header) -> None:
        assert header.last_offset is not None and header.first_offset is not None
        key = ShardKey(LinkShard.of(header), header.incarnation)
        account = self._shards.get(key)
        after = header.last_offset + 1
        if account is not None and header.gap is GapKind.TRUNCATION and after <= account.accounted_to:
            del account.truncated[: 1 - TRUNCATED_MAX]
            account.truncated.append((header.first_offset, header.last_offset))
            return
        if account is None:
            account = self._shards[key] = ShardAccount(header.grant_id, after, [])
            self._links.setdefault(key.link, {})[key.incarnation] = account
        elif account.grant_id != header.grant_id:
            # Another grant may begin again where the one before it was not answered any more.
            account.grant_id, account.accounted_to = header.grant_id, after
            account.gap_ranges = [each for each in account.gap_ranges if each[1] < header.first_offset]
        else:
            account.accounted_to = max(account.accounted_to, after)
        if header.kind is Kind.GAP:
            # What another bridge brought takes the place of gaps in it.
            account.gap_ranges = [
                each
                for each in account.gap_ranges
                if header.gap is not GapKind.ELSEWHERE or not header.first_offset <= each[0] < after
            ]
            account.has_gap(header.first_offset, header.last_offset)
            if header.gap is GapKind.ELSEWHERE and header.source_epoch:
                account.has_read(Span(header.source_epoch, after))
        elif header.source_batch_sha256 != NOTHING:
            account.has_read(Span(header.source_epoch, after))
        if header.kind is Kind.INTENT:
            grant = self._grant(header.grant_id)
            grant.crossed_records += header.records
            grant.charged_bytes += header.charged_bytes
        elif header.kind is Kind.WITHHELD and header.reason != CROSSED_BEFORE:
            account.withheld += header.records
            account.filtered += header.records if header.reason == "filtered" else 0
        elif header.kind is Kind.GAP and header.gap is not GapKind.ELSEWHERE:
            account.gaps += after - header.first_offset

    def grant(self, grant_id: str) -> GrantAccount:
        """What is known of a grant; an empty account where nothing is."""
        return self._grants.get(grant_id) or GrantAccount()

    def shard(self, link: LinkShard, incarnation: bytes) -> ShardAccount | None:
        """How far a shard is accounted for, None where no leaf of it stands here."""
        return self._shards.get(ShardKey(link, incarnation))

    def sums(self, link: LinkShard) -> tuple[int, int, int]:
        """Records with a receipt, withheld and filtered of a link's shard, under all its incarnations."""
        found = self.incarnations(link).values()
        return (
            sum(each.crossed for each in found),
            sum(each.withheld for each in found),
            sum(each.filtered for each in found),
        )

    def incarnations(self, link: LinkShard) -> dict[bytes, ShardAccount]:
        """Every incarnation of a link's shard that has leaves."""
        return dict(self._links.get(link, {}))

    def encode(self, size: int, last_leaf_hash: bytes) -> bytes:
        """A snapshot after `size` leaves, the last of which has this hash."""
        shards = [_Shard(key, account) for key, account in self._shards.items()]
        return msgspec.msgpack.encode(
            _Snapshot(size, last_leaf_hash, self._grants, shards, sorted(self.documents), self.words)
        )

    @classmethod
    def decode(cls, data: bytes) -> tuple[Ledger, int, bytes]:
        """Ledger, size and last leaf hash of a snapshot. Raises CorruptionError; the caller then reads the log anew."""
        try:
            snapshot = _snapshot.decode(data)
        except msgspec.MsgspecError as error:
            raise CorruptionError(f"The snapshot of the ledger does not decode: {error}.") from error
        if snapshot.words is None:
            raise CorruptionError("The snapshot of the ledger is of an earlier version.")
        ledger = cls()
        ledger._grants, ledger.words = snapshot.grants, snapshot.words
        ledger.documents = set(snapshot.documents)
        ledger._shards = {each.key: each.account for each in snapshot.shards}
        for each in snapshot.shards:
            ledger._links.setdefault(each.key.link, {})[each.key.incarnation] = each.account
        return ledger, snapshot.size, snapshot.last_leaf_hash
