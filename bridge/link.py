"""One link: one granted shard on its way to one region. Its state, and its window. Pure, without I/O or clock.

States of a link (TRANSITIONS is the table that the code runs on; docs/bridges.md prints it)::

    waiting ─allow▶ opening ─opened▶ active          hold, pause, end, refuse, lost and gap lead away from each
       ▲               │ ▲              │            of them; `stopped` is left only by another grant
       └────hold───────┘ └────lost──────┘

`SendWindow` is the part that decides: given what the destination has recorded, what the egress log accounts for and which
INTENTs have no answer, it says of each range of the source whether it is to cross, to be sent again as it was, or has
been dealt with; which envelopes may leave now; and which range a receipt answers.

Invariants of a `SendWindow`:
- ranges are contiguous, in order, and each is taken once;
- an envelope leaves only after its leaves are durable, in the order of the ranges, and within the credit given;
- a range whose leaves stand in the log is sent again as it was announced, byte for byte, or not at all;
- what was sent and has no answer is bounded by `envelopes_max` and `credit_bytes`; what waits besides, and what has no answer in the log, is of one batch
  more, and of that AHEAD_BYTES and one envelope.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from felix.errors import Code, CorruptionError, ProtocolError
from felix.frames import FRAME_HEADER_BYTES

AHEAD_BYTES: Final = 4 << 20
"""What one batch may make of envelopes that wait besides those that may be on the way: all of a batch without rules. A megabyte of short values, for which rules put long ones, becomes 35 MB that no frame makes
shorter, on each of 60 links."""


class LinkPhase(StrEnum):
    """Where a link stands; each has a reason beside it (LinkState.reason)."""

    WAITING = "waiting"
    """nothing may or can cross yet: a half of the grant, its beginning, a region or the audit log is missing"""
    OPENING = "opening"
    ACTIVE = "active"
    PAUSED = "paused"
    """one of the two regions paused the grant"""
    DENIED = "denied"
    """a region refused, and the link tries again; or a region's deny entry stands, until it is lifted"""
    GAP = "gap"
    """the source no longer has what comes next, or has less than what crossed"""
    TRUNCATED = "truncated"
    """what had crossed is gone at the source, or at the destination: an operator of the source decides"""
    STOPPED = "stopped"
    """the grant is revoked or expired, or its budget is used up"""


class LinkEvent(StrEnum):
    ALLOW = "allow"
    HOLD = "hold"
    OPENED = "opened"
    LOST = "lost"
    REFUSE = "refuse"
    GAP = "gap"
    TRUNCATE = "truncate"
    PAUSE = "pause"
    END = "end"


_P, _E = LinkPhase, LinkEvent
TRANSITIONS: Final[Mapping[tuple[LinkPhase, LinkEvent], LinkPhase]] = {
    **{(phase, _E.HOLD): _P.WAITING for phase in _P},
    **{(phase, _E.PAUSE): _P.PAUSED for phase in _P if phase is not _P.STOPPED},
    **{(phase, _E.END): _P.STOPPED for phase in _P},
    # A link that was denied, stands before a gap, or waits for a decision says so until it is open again.
    **{(phase, _E.ALLOW): _P.OPENING for phase in (_P.WAITING, _P.PAUSED, _P.ACTIVE, _P.STOPPED)},
    **{(phase, _E.OPENED): _P.ACTIVE for phase in (_P.OPENING, _P.DENIED, _P.GAP, _P.TRUNCATED)},
    **{(phase, _E.LOST): _P.WAITING for phase in (_P.OPENING, _P.ACTIVE, _P.DENIED, _P.GAP)},
    **{(phase, _E.REFUSE): _P.DENIED for phase in _P if phase is not _P.STOPPED},
    **{(phase, _E.GAP): _P.GAP for phase in (_P.OPENING, _P.ACTIVE, _P.WAITING, _P.DENIED)},
    **{(phase, _E.TRUNCATE): _P.TRUNCATED for phase in _P if phase is not _P.STOPPED},
}
"""What an event leads to; a pair that is not here leaves the phase as it is."""


def advance(phase: LinkPhase, event: LinkEvent) -> LinkPhase:
    """The phase after an event."""
    return TRANSITIONS.get((phase, event), phase)


class Todo(StrEnum):
    """What is to be done with a range of the source."""

    CROSS = "cross"
    """leaves first, then the envelope"""
    RESEND = "resend"
    """its leaves stand in the log; the envelope again, as it was"""
    SKIP = "skip"
    """the destination has it, and its receipt is in the log, or none is due"""


class Announced(NamedTuple):
    """An INTENT without an answer: its range, and the hash of the envelope that it names."""

    first_offset: int
    last_offset: int
    envelope_sha256: bytes


class Leap(NamedTuple):
    """A gap of the source: the first offset that an empty envelope must cover, and the first that a GAP leaf must
    (what was announced before has its leaf); `announced` is the INTENT that begins at the former, if there is one."""

    cover_first: int
    leaf_first: int
    announced: Announced | None


@dataclass(slots=True, eq=False)
class OnTheWay:
    """One envelope between its leaves and its receipt. Offsets of the source, both included."""

    first_offset: int
    last_offset: int
    records: int
    envelope: bytes
    envelope_sha256: bytes
    entries_sha256: bytes
    """of the packed entries of what crosses: the receipt must be for these records"""
    path: tuple[str, ...]
    """the regions that they have been in"""
    is_again: bool
    is_durable: bool = False
    is_sent: bool = False

    @property
    def frame_bytes(self) -> int:
        return FRAME_HEADER_BYTES + len(self.envelope)


class SendWindow:
    """The ranges of one shard, from where the destination stands."""

    def __init__(
        self,
        *,
        position: int,
        accounted_to: int | None,
        unanswered: Iterable[Announced],
        envelopes_max: int,
        credit_bytes: int,
        ask_again: bool = True,
    ) -> None:
        """`position`: what the destination answered. `accounted_to`: of this grant in the egress log, None where it
        has none. `ask_again`: whether receipts of what has landed are asked for once more.

        Raises CorruptionError(ROLLED_BACK) where the destination has more than this log accounts for: one that says whose work that is had its leaf before.
        """
        if accounted_to is not None and position > accounted_to:
            raise CorruptionError(
                f"The destination has recorded offsets up to {position}, and the egress log accounts for those below "
                f"{accounted_to} only.",
                code=Code.ROLLED_BACK,
                hint="The destination does not say which bridge brought them. If another one carried the stream meanwhile, under a grant of its own, upgrade the destination; or revoke this grant, "
                "and make a new one for this bridge. Else the egress log was rolled back, or another agent works under this grant: find out which.",
            )
        self.position = position
        """the source offset that the destination expects next, receipts included"""
        self._landed_to = position
        self._accounted_to = self._announced_to = position if accounted_to is None else accounted_to
        self._unanswered = {
            each.first_offset: each
            for each in unanswered
            if each.first_offset >= position or (ask_again and each.last_offset < position)
        }
        self._next = min((position, *self._unanswered))
        self._envelopes_max, self._credit_bytes = envelopes_max, credit_bytes
        self._on_the_way: deque[OnTheWay] = deque()
        self._bytes = 0

    @property
    def next_offset(self) -> int:
        """The source offset that is to be read next."""
        return self._next

    @property
    def accounted_to(self) -> int:
        """Every offset below has its leaf, or will have it before it leaves."""
        return self._accounted_to

    @property
    def envelopes(self) -> int:
        """On the way, or waiting for their leaves."""
        return len(self._on_the_way)

    @property
    def has_room(self) -> bool:
        """True while another batch may be begun.

        Nothing new is announced before all that was announced earlier is answered: so however often an agent dies,
        no more is without an answer than the destination remembers.
        """
        if self._next >= self._announced_to and any(each.is_again for each in self._on_the_way):
            return False
        return self.envelopes < self._envelopes_max and self._bytes < self._credit_bytes

    @property
    def is_crowded(self) -> bool:
        """True while no more of a batch that has been begun may be put here: what waits is held in memory."""
        return self._bytes >= self._credit_bytes + AHEAD_BYTES

    @property
    def is_empty(self) -> bool:
        """True where nothing is on the way."""
        return not self._on_the_way

    def is_new(self, last_offset: int) -> bool:
        """Whether a range up to here was not announced yet: `judge` says CROSS, and goes on behind it."""
        return last_offset >= self._accounted_to

    def judge(self, first_offset: int, last_offset: int) -> Todo:
        """What is to be done with this range, and go on behind it.

        Raises ProtocolError where it does not follow on the last one.
        """
        if first_offset != self._next:
            raise ProtocolError(
                f"The source delivered offset {first_offset} where {self._next} comes next.", code=Code.STATE
            )
        self._next = last_offset + 1
        if last_offset < self._landed_to:
            return Todo.RESEND if first_offset in self._unanswered else Todo.SKIP
        if last_offset < self._accounted_to:
            return Todo.RESEND
        if first_offset < self._accounted_to:
            raise CorruptionError(
                f"The egress log accounts for offsets below {self._accounted_to}, in the middle of the batch "
                f"{first_offset} to {last_offset}.",
                hint="The source's batches are not those that were read before: was its log restored?",
            )
        self._accounted_to = last_offset + 1
        return Todo.CROSS

    def leap(self, next_offset: int) -> Leap | None:
        """The source no longer has what comes before `next_offset`; go on there.

        None where the destination has all of it.
        """
        if next_offset <= self._next:
            return None
        cover = max(self._next, self._landed_to)
        leaf = max(cover, self._accounted_to)
        announced = self._unanswered.get(cover)
        for first in [first for first in self._unanswered if first < next_offset]:
            del self._unanswered[first]
        self._next = next_offset
        self._accounted_to = max(self._accounted_to, next_offset)
        return Leap(cover, leaf, announced) if cover < next_offset else None

    def put(self, range_: OnTheWay) -> None:
        """An envelope was made. Raises CorruptionError where it is not the one that its INTENT announced."""
        announced = self._unanswered.pop(range_.first_offset, None)
        if range_.is_again and (announced is None or announced.envelope_sha256 != range_.envelope_sha256):
            raise CorruptionError(
                f"The envelope of offsets {range_.first_offset} to {range_.last_offset} is not the one that the "
                "egress log announced; it is not sent.",
                code=Code.TAMPERED,
                hint="Finish the announced envelopes with the release that made them, or renew the grant.",
            )
        self._on_the_way.append(range_)
        self._bytes += range_.frame_bytes

    def durable(self, range_: OnTheWay) -> None:
        """Its leaves are durable, now or since before."""
        range_.is_durable = True

    def sendable(self) -> list[OnTheWay]:
        """The envelopes that may leave now, in order; each is given once. One batch may have made more than may be on the way, and those wait."""
        found = list[OnTheWay]()
        sent = [each.frame_bytes for each in self._on_the_way if each.is_sent]
        left, sent_bytes = self._envelopes_max - len(sent), sum(sent)
        for each in self._on_the_way:
            if each.is_sent:
                continue
            fits = sent_bytes + each.frame_bytes <= self._credit_bytes or not sent_bytes
            if not each.is_durable or not fits or len(found) == left:
                break
            each.is_sent = True
            sent_bytes += each.frame_bytes
            found.append(each)
        return found

    def answered(self, next_offset: int) -> OnTheWay:
        """The range that a receipt with this position is for. Raises ProtocolError where none was sent."""
        for each in self._on_the_way:
            if each.is_sent and each.last_offset + 1 == next_offset:
                self._on_the_way.remove(each)
                self._bytes -= each.frame_bytes
                self.position = max(self.position, next_offset)
                return each
        raise ProtocolError(
            f"The destination answers for offsets up to {next_offset}, which were not sent.", code=Code.STATE
        )


class Denials:
    """Which refusals are worth a leaf: the first, and each that differs from the one before."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[int, str] | None = None

    def is_new(self, code: int, sentence: str) -> bool:
        """True where this refusal is not the same as the last one; it is then."""
        if self._last == (code, sentence):
            return False
        self._last = (code, sentence)
        return True

    def forget(self) -> None:
        """Something went through: the same refusal is news again."""
        self._last = None
