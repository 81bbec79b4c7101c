"""Accounting: every source offset of an egress log stands in it once, as crossed, withheld or gone. Pure; fed with leaves in order.

Each link shard (which names its destination stream) is accounted for by itself, in each incarnation of its stream, from the
first offset that a leaf names. What is below `following` is accounted for; the rules (docs/decisions/0075):

1. A *batch* is one envelope's leaves: its WITHHELD leaves, then all parts of its INTENT, under one grant and of one range. Every
   offset of the range is listed in them once. Nothing else of the shard stands inside a batch. A batch that the log's end
   cuts off is no mistake.
2. A GAP accounts for its range. A GAP of a truncation accounts for nothing: what crossed did cross. Nor does an INTENT without
   records that no WITHHELD leaf precedes: it moves the destination's position over what has its leaves, and no answer.
3. A batch or a GAP begins at `following`. It may begin further on under another grant than the leaf before it; what it leaves out
   is counted as skipped.
4. Under another grant it may begin *again* at the first offset of a batch without an ACK, or of a GAP, where nothing from there on has one. That batch
   and all that follows it, GAPs too, count no more, and have no ACK any more. Nothing is cut in two. Under the same grant a GAP of what another bridge
   brought (`elsewhere`) may begin so, too: it takes the place of the batches and GAPs that lie in it, each whole, and of no others.
5. What begins further on or again stands under a grant that both regions signed in the log before it (`agreed`).
6. An ACK answers exactly one batch: same envelope, range and number of records; its receipt, where it says so, is for the very
   records that the INTENT lists; and both say that these had been in the same regions, where both say it.

Who reads reports is told which leaves count no more (`announced_again`) and which batches nobody asks for any more
(`followed`): `audit.spark.begun_again` makes no rule of its own.

Memory is bounded: by shards, by batches without an ACK, by records withheld ahead of their INTENT. Each leaf costs no more than its own
entries, whatever stands before it. Callers: audit.continuity.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from audit.largest import Largest
from audit.leaf import GapKind, Header, Leaf, iter_entries
from audit.places import Places
from audit.position import LINK_SHARDS_MAX, LinkShard
from audit.receipt import read_unverified
from felix.errors import TamperError

if TYPE_CHECKING:
    from hashlib import _Hash

HELD_MAX: Final = 1 << 17
"""Withheld records whose place is not reached yet: two of the largest batches."""
UNANSWERED_MAX: Final = 1 << 18
"""Batches without an ACK in the whole log, about 500 bytes each."""
BATCH_LEAVES_MAX: Final = 4_096
"""Leaves of one batch: they are one append (`audit.trail`)."""
ANNOUNCED_AGAIN_MAX: Final = 1 << 20
"""Leaves that count no more, of a whole log; and so many batches that nobody asks for."""
SKIPS_MAX: Final = 1_000
"""Places where offsets were left out that are told one by one, the widest."""
PRUNED_FROM: Final = 64
"""Ranges that an ACK lies behind are forgotten once there are so many, and more of them than of others."""

Agreed = Callable[[], bool]
"""Whether both regions signed the grant of a leaf before it. Asked only where something depends on it."""

_ANSWERED: Final = ("incarnation", "source_epoch", "grant_id", "terms_hash", "destination_stream")
"""What an ACK, whose receipt the destination signed, repeats of its INTENT."""


class AnnouncedAgain(NamedTuple):
    """A leaf that counts no more. `envelope_sha256`: of its batch; empty of a GAP."""

    leaf: int
    envelope_sha256: bytes


class Skipped(NamedTuple):
    """Source offsets that are in no leaf: under another grant the link began further on, with this leaf."""

    leaf: int
    first: int
    last: int


class _Batch(NamedTuple):
    said: tuple[object, ...]
    first: int
    last: int
    records: int
    parts_missing: int
    entries: _Hash | bytes
    """SHA-256 of the entries of its parts: finished where none is missing"""
    intent_leaf: int
    """of its first part"""
    path: tuple[str, ...]


@dataclass(slots=True)
class _Unit:
    """A batch or a GAP that accounts for a range."""

    first: int
    last: int
    grant_id: str
    leaves: list[int]
    envelope: bytes = b""
    """empty: a GAP, or a batch whose INTENT has not come"""


@dataclass(slots=True)
class _Open:
    """A batch whose leaves have not all come."""

    unit: _Unit
    held: set[int] = field(default_factory=set)
    """withheld records whose place is not reached"""
    reach: int = -1
    """the last offset that its WITHHELD leaves name"""
    envelope: bytes = b""
    """empty until its INTENT comes"""
    below: int = 0
    """where what is accounted for ends, if the batch begins below that and nobody was told yet"""

    def list(self, header: Header, index: int) -> list[str]:
        """Remember that this leaf is one of the batch's."""
        if len(self.unit.leaves) >= BATCH_LEAVES_MAX:
            return [
                f"{_name(header)}: the batch that begins at {self.unit.first} has more than {BATCH_LEAVES_MAX} leaves."
            ]
        self.unit.leaves.append(index)
        return []


@dataclass(slots=True)
class _Shard:
    following: int
    grant_id: str
    answered_to: int = 0
    """nothing that begins below is announced again: something that ends there was answered"""
    open: _Open | None = None
    units: list[_Unit] = field(default_factory=list)
    """what accounts for offsets, in order, from `answered_to` on or earlier; no two share an offset"""
    batches: dict[bytes, _Batch] = field(default_factory=dict)
    """without an ACK, by envelope"""
    empty: list[tuple[int, bytes]] = field(default_factory=list)
    """last offset and envelope of batches that account for nothing and have no ACK, in order"""
    current: deque[bytes] = field(default_factory=deque)
    """envelopes that were announced since the grant changed, or another bridge took over behind them, in order"""

    def answered(self, batch: _Batch, envelope: bytes) -> None:
        """A batch has its ACK."""
        self.answered_to = max(self.answered_to, batch.last + 1)
        at = bisect_left(self.empty, (batch.last, envelope))
        if self.empty[at : at + 1] == [(batch.last, envelope)]:
            del self.empty[at]
        behind = bisect_left(self.units, self.answered_to, key=_last)
        if behind > PRUNED_FROM and 2 * behind > len(self.units):
            del self.units[:behind]
        if len(self.current) > PRUNED_FROM + 2 * len(self.batches):
            self.current = deque(each for each in self.current if each in self.batches)


class Accounts:
    """The shards of a log after the leaves applied so far."""

    def __init__(self) -> None:
        self._shards: dict[tuple[LinkShard, bytes], _Shard] = {}
        self.places = Places(LINK_SHARDS_MAX)
        """of link shards, each in each incarnation of its stream: those that have one are accounted for"""
        self.unanswered = 0
        """batches with an INTENT and no ACK; not a mistake: they may be under way"""
        self.skipped = 0
        """source offsets left out between two grants"""
        self.skips = Largest[Skipped](SKIPS_MAX)
        """where they are"""
        self.announced_again: list[AnnouncedAgain] = []
        self.followed: list[int] = []
        """first INTENT leaves of batches without an ACK behind which another grant, or another bridge, took over: nobody asks for their receipts"""

    def forget(self) -> None:
        """Leaves could not be read: go on without conclusions from what is missing."""
        self._shards.clear()
        self.unanswered = 0

    def forget_shard(self, header: Header) -> None:
        """As `forget`, of the shard that a leaf is about."""
        shard = self._shards.pop((LinkShard.of(header), header.incarnation), None)
        self.unanswered -= 0 if shard is None else len(shard.batches)

    # Leaves

    def intent(self, leaf: Leaf, index: int, agreed: Agreed) -> list[str]:
        """Take an INTENT leaf. Returns one sentence per rule that it breaks."""
        header = leaf.header
        shard = self._shard(header, index)
        if isinstance(shard, str):
            return [shard]
        first, last = _range(header)
        open_, mistakes = shard.open, list[str]()
        if header.part:
            batch = shard.batches.get(header.envelope_sha256)
            if (
                open_ is None
                or batch is None
                or isinstance(entries := batch.entries, bytes)
                or not _goes_on(open_, batch, header)
            ):
                mistakes.append(
                    f"{_name(header)}: part {header.part} of {header.parts} does not follow the part before it."
                )
                open_ = None
            else:
                shard.batches[header.envelope_sha256] = batch._replace(
                    last=last,
                    records=batch.records + header.records,
                    parts_missing=batch.parts_missing - 1,
                    entries=_added(entries, leaf, batch.parts_missing - 1),
                )
        elif open_ is not None and (open_.envelope or not _is_of(open_, header) or first != open_.unit.first):
            open_ = None
        if open_ is None:
            mistakes += _leave(shard, header)
            if not header.records and header.parts == 1:
                return mistakes + self._move(shard, leaf, index)
            mistakes += self._begin(shard, header, index, agreed)
            open_ = _open(shard, header)
        if not header.part:
            mistakes += self._announce(shard, leaf, index)
        open_.envelope = open_.unit.envelope = header.envelope_sha256
        mistakes += open_.list(header, index)
        mistakes += _cross(shard, open_, leaf)
        if header.part == header.parts - 1:
            if open_.below:
                mistakes.append(
                    f"{_name(header)}: the batch begins at {open_.unit.first}, and offsets below {open_.below} are accounted for already."
                )
            if open_.reach > last:
                mistakes.append(
                    f"{_name(header)}: offsets up to {open_.reach} are withheld of a batch that ends at {last}."
                )
            shard.open = None
        return mistakes

    def withheld(self, leaf: Leaf, index: int, agreed: Agreed) -> list[str]:
        """Take a WITHHELD leaf. Returns one sentence per rule that it breaks."""
        header = leaf.header
        shard = self._shard(header, index)
        if isinstance(shard, str):
            return [shard]
        first, last = _range(header)
        open_, mistakes = shard.open, list[str]()
        if open_ is None or open_.envelope or not _is_of(open_, header) or first < open_.unit.first:
            mistakes += _leave(shard, header)
            mistakes += self._begin(shard, header, index, agreed)
            open_ = _open(shard, header)
        open_.reach = max(open_.reach, last)
        mistakes += open_.list(header, index)
        if len(open_.held) + leaf.entry_count > HELD_MAX:
            return [
                *mistakes,
                f"{_name(header)}: more than {HELD_MAX} records are withheld ahead of their INTENT.",
            ]
        twice = 0
        for entry in iter_entries(leaf):
            if entry.offset < shard.following or entry.offset in open_.held:
                twice += 1
            else:
                open_.held.add(entry.offset)
        _advance(shard, open_)
        if twice:
            open_.below = 0
            mistakes.append(f"{_name(header)}: {twice} withheld records are accounted for a second time.")
        return mistakes

    def gap(self, header: Header, index: int, agreed: Agreed) -> list[str]:
        """Take a GAP leaf that accounts for offsets. Returns one sentence per rule that it breaks."""
        shard = self._shard(header, index)
        if isinstance(shard, str):
            return [shard]
        first, last = _range(header)
        mistakes = _leave(shard, header)
        unit = _Unit(first, last, header.grant_id, [index])
        if header.gap is GapKind.ELSEWHERE and header.grant_id and header.grant_id == shard.grant_id:
            self._settle(shard, first, last)
            if first < shard.following and agreed() and self._replace(shard, unit):
                shard.following = max(shard.following, last + 1)
                return mistakes + self._too_many()
        mistakes += self._begin(shard, header, index, agreed)
        if first < shard.following:
            mistakes.append(
                f"{_name(header)}: the gap {first}..{last} covers offsets that are accounted for already."
            )
        elif len(shard.units) >= UNANSWERED_MAX:
            mistakes.append(f"More than {UNANSWERED_MAX} ranges behind an ACK: not all can be checked.")
        else:
            shard.units.append(unit)
        shard.following = max(shard.following, last + 1)
        return mistakes

    def answer(self, header: Header) -> list[str]:
        """Take an ACK leaf. Returns one sentence per rule that it breaks."""
        shard = self._shards.get((LinkShard.of(header), header.incarnation))
        batch = None if shard is None else shard.batches.pop(header.envelope_sha256, None)
        if shard is None or batch is None:
            return [f"{_name(header)}: the ACK answers no INTENT, or one that was answered before."]
        self.unanswered -= 1
        shard.answered(batch, header.envelope_sha256)
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
        if batch.path and header.path and batch.path != header.path:
            return [
                f"{_name(header)}: its INTENT says that the records had been in {', '.join(batch.path)}, the ACK in {', '.join(header.path)}."
            ]
        return []

    # Where a range begins

    def _shard(self, header: Header, index: int) -> _Shard | str:
        key = (LinkShard.of(header), header.incarnation)
        shard = self._shards.get(key)
        if shard is None:
            if self.places.number(key, index) is None:
                return f"More than {LINK_SHARDS_MAX} link shards: not all can be checked."
            shard = self._shards[key] = _Shard(_range(header)[0], header.grant_id)
        return shard

    def _begin(self, shard: _Shard, header: Header, index: int, agreed: Agreed) -> list[str]:
        """Rules 3 to 5: `following` is where this range begins, unless that is accounted for and may not be announced again."""
        first, mistakes = _range(header)[0], list[str]()
        another = bool(header.grant_id) and header.grant_id != shard.grant_id
        if first < shard.following and another and agreed() and self._again(shard, header.grant_id, first):
            shard.following = first
            mistakes += self._too_many()
        if first > shard.following:
            at, shard.following = shard.following, first
            if another and agreed():
                self.skipped += first - at
                self.skips.add(first - at, Skipped(index, at, first - 1))
            else:
                mistakes.append(
                    f"{_name(header)}: offsets {at}..{first - 1} are neither crossed, withheld nor a gap."
                )
        self._go_on_under(shard, header.grant_id)
        return mistakes

    def _again(self, shard: _Shard, grant_id: str, first: int) -> bool:
        """Whether a grant may announce again what begins here; then it is as if nothing had been announced from here on."""
        at = bisect_left(shard.units, first, key=_first)
        if at == len(shard.units) or first < shard.answered_to:
            return False
        if shard.units[at].first != first or shard.units[at].grant_id == grant_id:
            return False
        self._count_no_more(shard, at, len(shard.units))
        del shard.units[at:]
        while shard.empty and shard.empty[-1][0] >= first:
            self._forget_empty(shard, shard.empty.pop()[1])
        return True

    def _replace(self, shard: _Shard, gap: _Unit) -> bool:
        """Whether a GAP of what another bridge brought takes the place of what was announced in it under the same grant; then that counts no more."""
        at = bisect_left(shard.units, gap.first, key=_first)
        end = bisect_right(shard.units, gap.last, key=_first)
        if at == end or gap.first < shard.answered_to:
            return False
        if shard.units[at].first != gap.first or shard.units[end - 1].last > gap.last:
            return False
        self._count_no_more(shard, at, end)
        shard.units[at:end] = [gap]
        from_, to = (bisect_left(shard.empty, (last, b"")) for last in (gap.first, gap.last + 1))
        for _, envelope in shard.empty[from_:to]:
            self._forget_empty(shard, envelope)
        del shard.empty[from_:to]
        return True

    def _count_no_more(self, shard: _Shard, at: int, end: int) -> None:
        """These units."""
        for unit in shard.units[at:end]:
            self.announced_again += (AnnouncedAgain(leaf, unit.envelope) for leaf in unit.leaves)
            if shard.batches.pop(unit.envelope, None) is not None:
                self.unanswered -= 1

    def _forget_empty(self, shard: _Shard, envelope: bytes) -> None:
        batch = shard.batches.pop(envelope, None)
        if batch is not None:
            self.unanswered -= 1
            self.announced_again.append(AnnouncedAgain(batch.intent_leaf, envelope))

    def _too_many(self) -> list[str]:
        if len(self.announced_again) <= ANNOUNCED_AGAIN_MAX:
            return []
        del self.announced_again[ANNOUNCED_AGAIN_MAX:]
        return [f"More than {ANNOUNCED_AGAIN_MAX} leaves were announced again: not all are told."]

    def _settle(self, shard: _Shard, first: int, last: int) -> None:
        """Another bridge took over behind what this one announced below `first`: nobody asks for the receipts that it lacks, since the destination remembers the newest ranges
        alone. What lies behind `last` is sent again."""
        while shard.current:
            batch = shard.batches.get(shard.current[0])
            if batch is not None and batch.first > last:
                return
            if batch is not None and batch.first < first:
                self.followed.append(batch.intent_leaf)
            shard.current.popleft()

    def _go_on_under(self, shard: _Shard, grant_id: str) -> None:
        if not grant_id or grant_id == shard.grant_id:
            return
        shard.grant_id = grant_id
        left = (shard.batches.get(envelope) for envelope in shard.current)
        self.followed += (batch.intent_leaf for batch in left if batch is not None)
        shard.current.clear()

    def _move(self, shard: _Shard, leaf: Leaf, index: int) -> list[str]:
        """An envelope without records, of which none was withheld: all its range has leaves."""
        header = leaf.header
        (first, last), mistakes = _range(header), list[str]()
        self._go_on_under(shard, header.grant_id)
        if first < shard.answered_to:
            mistakes.append(
                f"{_name(header)}: an envelope without records goes back to {first}, below what was answered."
            )
        if last >= shard.following:
            mistakes.append(
                f"{_name(header)}: offsets {shard.following}..{last} of an envelope without records are neither crossed, withheld "
                "nor a gap."
            )
            shard.following = last + 1
        mistakes += self._announce(shard, leaf, index)
        if not mistakes:
            insort(shard.empty, (last, header.envelope_sha256))
        return mistakes

    def _announce(self, shard: _Shard, leaf: Leaf, index: int) -> list[str]:
        """The first part of a batch's INTENT: an ACK is due."""
        header = leaf.header
        first, last = _range(header)
        if header.envelope_sha256 in shard.batches:
            return [f"{_name(header)}: the envelope of {first}..{last} was announced before, and has no ACK."]
        if self.unanswered >= UNANSWERED_MAX:
            return [f"More than {UNANSWERED_MAX} batches without an ACK: not all can be checked."]
        missing = header.parts - 1
        shard.batches[header.envelope_sha256] = _Batch(
            _answered(header),
            first,
            last,
            header.records,
            missing,
            _added(sha256(), leaf, missing),
            index,
            header.path,
        )
        shard.current.append(header.envelope_sha256)
        self.unanswered += 1
        return []


def _open(shard: _Shard, header: Header) -> _Open:
    """A batch begins here. One that may not is no range that another grant could announce again."""
    first, last = _range(header)
    open_ = shard.open = _Open(_Unit(first, last, header.grant_id, []))
    if first == shard.following:
        shard.units.append(open_.unit)
    elif first < shard.following:
        open_.below = shard.following
    return open_


def _leave(shard: _Shard, header: Header) -> list[str]:
    """A leaf that is none of its own stands inside the open batch, if there is one: what is withheld of it has no place."""
    open_, shard.open = shard.open, None
    if open_ is None:
        return []
    if shard.units and shard.units[-1] is open_.unit:
        shard.units.pop()
    return [
        f"{_name(header)}: a leaf of another range stands inside the batch that begins at {open_.unit.first}."
    ]


def _is_of(open_: _Open, header: Header) -> bool:
    return open_.unit.grant_id == header.grant_id


def _goes_on(open_: _Open, batch: _Batch, header: Header) -> bool:
    """Whether this part of an INTENT is the next one of the open batch."""
    return (
        open_.envelope == header.envelope_sha256
        and _is_of(open_, header)
        and header.path == batch.path
        and header.part == header.parts - batch.parts_missing
        and header.first_offset == batch.last + 1
    )


def _cross(shard: _Shard, open_: _Open, leaf: Leaf) -> list[str]:
    """Account for the records that an INTENT leaf lists, and for those that were withheld before them."""
    header, mistakes = leaf.header, list[str]()
    first, last = _range(header)
    open_.unit.last = max(open_.unit.last, last)
    if not open_.held and first == shard.following and header.records == last - first + 1:
        shard.following = last + 1
        return mistakes
    twice = 0
    for entry in iter_entries(leaf):
        _advance(shard, open_)
        if entry.offset < shard.following:
            twice += 1
            continue
        if entry.offset > shard.following:
            mistakes.append(
                f"{_name(header)}: offsets {shard.following}..{entry.offset - 1} inside the batch are neither "
                "crossed nor withheld."
            )
        shard.following = entry.offset + 1
    _advance(shard, open_)
    if twice:
        open_.below = 0
        mistakes.append(
            f"{_name(header)}: {twice} records of {first}..{last} are accounted for a second time."
        )
    if shard.following <= last:
        mistakes.append(
            f"{_name(header)}: offsets {shard.following}..{last} at the batch's end are neither crossed nor withheld."
        )
        shard.following = last + 1
    # A place was passed over: what was withheld there was told with the hole.
    if open_.held and mistakes:
        open_.held = {offset for offset in open_.held if offset >= shard.following}
    return mistakes


def _advance(shard: _Shard, open_: _Open) -> None:
    while shard.following in open_.held:
        open_.held.remove(shard.following)
        shard.following += 1


def _first(unit: _Unit) -> int:
    return unit.first


def _last(unit: _Unit) -> int:
    return unit.last


def _range(header: Header) -> tuple[int, int]:
    assert header.first_offset is not None and header.last_offset is not None
    return header.first_offset, header.last_offset


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


def _name(header: Header) -> str:
    return f"{header.stream} shard {header.shard} to {header.destination_region}"
