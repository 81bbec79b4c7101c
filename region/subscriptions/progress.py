"""How far one durable subscription has come in one shard: what is acknowledged, out, to be delivered again, given up, given back.

A pure state machine. A method that changes what must survive a restart returns the entries for the journal; it has applied them
already. What is out, and where the next delivery begins, does not survive: after a restart, and whenever the shard changes hands,
delivery begins again at the committed offset, without what is acknowledged above it.

Invariants:
- all below `committed` is settled, the record at `committed` is not; ranges settled above it are in `settled`;
- a record is in at most one of: settled, out, unsent, waiting, dying, reserved, returning, back; all but settled ones above the committed
  offset are below `cursor` while somebody has the shard, or were before it changed hands, apart from those that are returning or back;
- a record that is not settled is never dropped: it is ahead of the cursor, out with a deadline, to be redelivered and not sent yet,
  waiting with a due time, dying, or returning, back;
- `generation` is 0 while nobody has the shard; else calls with another one are fenced;
- records out, unsent, and waiting below the cursor, are at most `unacked_max` and one batch;
- what is returning is delivered to nobody, and what is unseen to nobody yet: no acknowledgement of all up to an offset means it.

Times in ms, by the wall clock: where that is set, `clock_set` has to be told before anything else. An attempt begins when the record's batch is sent: from then on the ack timeout runs. It counts once it has failed: by
nack, by its ack timeout, or by the death of its consumer, which counts against the oldest record that it was sent and had not
acknowledged, since the others were only on their way to be worked on. A redelivery for which the consumer has given no credit is
no attempt, however long it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from felix.errors import Code, RequestError
from felix.ranges import RangeSet
from felix.settings import SubscriptionSettings
from region.log.epochs import EVERYTHING
from region.subscriptions.entries import (
    RANGES_MAX,
    Entry,
    Failed,
    Moved,
    Settled,
    clipped,
    pack,
    unpack,
)

GRAINS: Final = 16
"""Deadlines and due times that are closer than this part of their delay are treated as one, so that they stay few."""
REASON_CHARS_MAX: Final = 200
WAITING_MAX: Final = 1_024
"""Distinct kinds of waiting records (attempts, due time, reason) tracked; beyond it reasons are dropped, and due times are
bucketed.
"""
AT_ONCE_MS: Final = 1
"""Due since ever."""
DYING_MAX: Final = 256
"""Records under way to the dead-letter stream at a time, per shard."""

TIMED_OUT: Final = "not acknowledged in time"
CONSUMER_DIED: Final = "its consumer died"


@dataclass(slots=True)
class _Out:
    """Records with the owner, delivered for the `attempt`-th time."""

    attempt: int
    deadline_ms: int
    ranges: RangeSet


class _Kind(NamedTuple):
    """What waiting records have in common."""

    due_ms: int
    attempts: int
    reason: str
    is_own: bool = True
    """whether they have waited since this start: where the clock is set, their time moves with it; one that the journal says goes by the clock as it is"""


class Redelivered(NamedTuple):
    """Records to be delivered now, for the `attempt`-th time."""

    attempt: int
    ranges: list[tuple[int, int]]


class Dying(NamedTuple):
    """A record that had all its attempts."""

    offset: int
    attempts: int
    reason: str


@dataclass(slots=True)
class Progress:
    """See the module. `subscription`: the id that its entries carry."""

    subscription: bytes
    settings: SubscriptionSettings
    committed: int = 0
    settled: RangeSet = field(default_factory=RangeSet)
    cursor: int = 0
    generation: int = 0
    positioned: bool = False
    """False until a first position is known."""
    _out: list[_Out] = field(default_factory=list)
    _unsent: list[_Out] = field(default_factory=list)
    """Redeliveries that the owner has been told of and not been sent; the deadline is when that is noticed."""
    _waiting: dict[_Kind, RangeSet] = field(default_factory=dict)
    _dying: dict[int, Dying] = field(default_factory=dict)
    _reserved: dict[int, RangeSet] = field(default_factory=dict)
    """Records that a transaction acknowledges, by how often they had failed before."""
    _returning: RangeSet = field(default_factory=RangeSet)
    """Given back, while their dead letters are still in their queue."""
    _back: RangeSet = field(default_factory=RangeSet)
    """Given back since the owner has the shard: it is told of them as of redeliveries."""
    _unseen: RangeSet = field(default_factory=RangeSet)
    """Of those that were given back while somebody had the shard, what nobody has been sent since."""
    _assigned_at: int = 0
    """Where the owner's delivery began."""
    _left_out: RangeSet = field(default_factory=RangeSet)
    """What the owner was told to leave out, as it got the shard."""

    # -- what is so ------------------------------------------------------------------------------------

    @property
    def out_count(self) -> int:
        """Records with the owner."""
        return sum(out.ranges.count for out in self._out)

    @property
    def waiting_count(self) -> int:
        """Records that are to be delivered again, or to the dead-letter stream."""
        waiting = sum(ranges.count for ranges in self._waiting.values())
        waiting += self._back.count + self._returning.count
        return waiting + sum(out.ranges.count for out in self._unsent) + len(self._dying)

    @property
    def has_room(self) -> bool:
        """True while more records may be delivered for the first time."""
        back = sum(following - first for first, following in self._back.within(0, self.cursor))
        return self._room > back

    @property
    def _room(self) -> int:
        """So many more records may be with the owner."""
        waiting = sum(
            ranges.count
            if ranges.next <= self.cursor
            else sum(following - first for first, following in ranges.within(0, self.cursor))
            for ranges in self._waiting.values()
        )
        unsent = sum(out.ranges.count for out in self._unsent)
        return self.settings.unacked_max - self.out_count - unsent - waiting - len(self._dying)

    @property
    def is_reserved(self) -> bool:
        """Whether a transaction is being committed that acknowledges records here."""
        return any(self._reserved.values())

    def lag(self, high_watermark: int) -> int:
        """Records that are not settled."""
        return max(0, high_watermark - self.committed - self.settled.count)

    def skipped(self) -> RangeSet:
        """Offsets above the committed offset that the shard's next consumer must not hand out."""
        found = self.settled.copy()
        for first, following in self._held():
            found.add(first, following)
        return found

    def _held(self) -> Iterator[tuple[int, int]]:
        """Not settled, and not for the owner now: it waits, dies, or is part of a transaction."""
        for ranges in self._waiting.values():
            yield from ranges
        for offset in self._dying:
            yield offset, offset + 1
        for ranges in self._reserved.values():
            yield from ranges
        yield from self._returning
        yield from self._back

    def next_ms(self) -> int | None:
        """When `expire`, `held_up`, `again` or `give_up` have something to do; None: not by time alone."""
        times = [out.deadline_ms for out in (*self._out, *self._unsent)]
        if self._back_due():
            times.append(AT_ONCE_MS)
        times += [
            kind.due_ms
            for kind, ranges in self._waiting.items()
            if (
                len(self._dying) < DYING_MAX
                if self._is_dead(kind)
                else self.generation and ranges.first < self.cursor
            )
        ]
        return min(times, default=None)

    @property
    def is_back(self) -> bool:
        """Whether records that were given back wait until the owner has room for them."""
        return bool(self._back)

    def _back_due(self) -> list[tuple[int, int]]:
        """What was given back and can be sent to the owner now."""
        if not self._back or not self.has_begun:
            return []
        due, room = [], self._room
        for first, following in self._back.within(self.committed, self.cursor):
            if room <= 0:
                break
            due.append((first, min(following, first + room)))
            room -= following - first
        return due

    @property
    def has_begun(self) -> bool:
        """Whether the owner was sent anything since it has the shard. Its delivery may begin within a batch: what of that lies before is no redelivery."""
        return self.cursor > self._assigned_at

    def _is_dead(self, kind: _Kind) -> bool:
        attempts_max = self.settings.retries.attempts_max
        return bool(attempts_max) and kind.attempts >= attempts_max

    # -- the owner -------------------------------------------------------------------------------------

    def assign(self, generation: int) -> RangeSet:
        """The shard is somebody's; delivery begins at the committed offset. Returns what is to be left out of it."""
        assert not self.generation and not self._out and not self._unsent and generation
        self.generation = generation
        self.cursor = self._assigned_at = self.committed
        self._left_out = self.skipped()
        return self._left_out.copy()

    def release(self, now_ms: int, *, died: bool) -> list[Entry]:
        """The shard is nobody's. `died`: without a word, so that the oldest record that it had been sent had an attempt."""
        self.unsent(now_ms)
        outs, self._out = self._out, []
        self.generation = 0
        entries: list[Entry] = []
        if died and outs:
            oldest = min(outs, key=lambda out: out.ranges.first)
            first = oldest.ranges.first
            oldest.ranges.remove(first, first + 1)
            entries = self._fail([(first, first + 1)], oldest.attempt, now_ms, -1, CONSUMER_DIED)
        for out in outs:
            if out.attempt > 1 and out.ranges:
                # The journal knows these as waiting; only their attempts must not be forgotten here.
                self._wait(list(out.ranges), _Kind(now_ms, out.attempt - 1, ""))
        # The next delivery begins below them.
        self._back = RangeSet()
        self.cursor = self.committed
        return entries

    def fence(self, generation: int) -> RequestError | None:
        """Why a call of this generation is refused."""
        if generation and generation == self.generation:
            return None
        return RequestError(
            "The shard is no longer this consumer's.",
            code=Code.CONSUMER_FENCED,
            hint="Its records are redelivered to the shard's present consumer.",
        )

    # -- delivery --------------------------------------------------------------------------------------

    def delivered(self, base: int, following: int, now_ms: int) -> None:
        """A batch [base, following) was sent to the owner for the first time, from the cursor on."""
        cursor = self.cursor
        assert self.generation and following > cursor
        if base > cursor:
            # Compaction left a hole: what is not in the log needs no acknowledgement. It shows again after a restart.
            self._settle([(cursor, base)])
            cursor = base
        self.cursor = following
        # Where the batch begins below what is committed, its owner leaves that part out.
        fresh = RangeSet([(max(cursor, self.committed), following)])
        held_back = (*self._reserved.values(), *self._waiting.values(), self._returning, self._back)
        for held in (self.settled, *held_back):
            for first, after in held.within(cursor, following):
                fresh.remove(first, after)
        for offset in self._dying:
            fresh.remove(offset, offset + 1)
        if fresh:
            self._put(self._out, list(fresh), 1, now_ms)
        for each in fresh:
            self._unseen.remove(*each)

    def _put(self, outs: list[_Out], ranges: list[tuple[int, int]], attempt: int, now_ms: int) -> None:
        deadline_ms = _grained(now_ms, self.settings.ack_timeout_ms)
        for out in reversed(outs):
            if out.attempt == attempt and out.deadline_ms == deadline_ms:
                break
        else:
            out = _Out(attempt, deadline_ms, RangeSet())
            outs.append(out)
        for first, following in ranges:
            out.ranges.add(first, following)

    def redelivered(self, base: int, following: int, now_ms: int) -> list[Entry]:
        """The batch [base, following) was sent to the owner again; redeliveries are sent in the order of their offsets.

        What was to be sent before it and was not is no longer in the log (compaction), and needs no acknowledgement.
        """
        missing: list[tuple[int, int]] = []
        for out in self._unsent:
            missing += out.ranges.within(self.committed, base)
            sent = out.ranges.within(base, following)
            if sent:
                self._put(self._out, sent, out.attempt, now_ms)
                out.ranges.remove(base, following)
            for each in sent:
                self._unseen.remove(*each)
        self._drop_empty()
        return self._settled_entries(missing)

    def held_up(self, now_ms: int) -> bool:
        """True where a redelivery has not been sent for a whole ack timeout; the wait then begins anew."""
        late = [out for out in self._unsent if out.deadline_ms <= now_ms]
        if not late:
            return False
        self._unsent = [out for out in self._unsent if out.deadline_ms > now_ms]
        for out in late:
            self._put(self._unsent, list(out.ranges), out.attempt, now_ms)
        return True

    def unsent(self, now_ms: int) -> None:
        """The shard is revoked: what was to be delivered again and was not sent waits for the next owner; that was no attempt."""
        unsent, self._unsent = self._unsent, []
        for out in unsent:
            self._wait(list(out.ranges), _Kind(now_ms, out.attempt - 1, ""))

    def gone(self, following: int) -> list[Entry]:
        """The log begins at `following` by now: what lies before is settled, acknowledged or not."""
        self.cursor = max(self.cursor, following)
        if following <= self.committed:
            return []
        return self._settled_entries([(self.committed, following)])

    def renew(self, offset: int, now_ms: int) -> None:
        """Restart the ack timeout of the delivered records from `offset` on."""
        for out in [out for out in self._out if out.ranges.next > offset]:
            later = out.ranges.within(offset, out.ranges.next)
            out.ranges.remove(offset, out.ranges.next)
            self._put(self._out, later, out.attempt, now_ms)
        self._drop_empty()

    # -- the owner's calls, once not fenced ------------------------------------------------------------

    def up_to(self, through: int) -> list[tuple[int, int]]:
        """What an acknowledgement of all up to and including `through` means: not what was given back, and the owner has not been sent."""
        if through < self.committed:
            return []
        meant = RangeSet([(self.committed, through + 1)])
        for held in (self._returning, self._unseen):
            for each in held.within(self.committed, through + 1):
                meant.remove(*each)
        return list(meant)

    def check(self, ranges: Iterable[tuple[int, int]]) -> RequestError | None:
        """Why these records cannot be acknowledged: they were not delivered."""
        for _, following in ranges:
            if following > self.cursor:
                return RequestError(
                    f"Offset {following - 1} was not delivered to this consumer; delivery has come to {self.cursor}.",
                    code=Code.OFFSET_OUT_OF_RANGE,
                )
        return None

    def ack(self, ranges: Iterable[tuple[int, int]]) -> list[Entry]:
        """Settle these records. What is settled already, or part of a transaction, is left as it is."""
        return self._settled_entries(ranges)

    def nack(self, ranges: Iterable[tuple[int, int]], delay_ms: int, reason: str, now_ms: int) -> list[Entry]:
        """These records, as far as they are out, failed; again after `delay_ms` (-1: as the settings say)."""
        entries: list[Entry] = []
        for first, following in ranges:
            for out in self._out:
                failed = out.ranges.within(first, following)
                if failed:
                    for each in failed:
                        out.ranges.remove(*each)
                    entries += self._fail(failed, out.attempt, now_ms, delay_ms, reason[:REASON_CHARS_MAX])
        self._drop_empty()
        return entries

    # -- time ------------------------------------------------------------------------------------------

    def expire(self, now_ms: int) -> list[Entry]:
        """Fail the records that were not acknowledged in time. Empty if there were none."""
        late = [out for out in self._out if out.deadline_ms <= now_ms]
        self._out = [out for out in self._out if out.deadline_ms > now_ms]
        entries: list[Entry] = []
        for out in late:
            entries += self._fail(list(out.ranges), out.attempt, now_ms, -1, TIMED_OUT)
        return entries

    def clock_set(self, by_ms: int) -> list[Entry]:
        """The clock was set ahead, or, negative, back: what is out, and what waits since this start, keeps the time that is left of it."""
        for out in (*self._out, *self._unsent):
            out.deadline_ms += by_ms
        entries: list[Entry] = []
        waiting, self._waiting = self._waiting, {}
        for kind, ranges in waiting.items():
            if kind.is_own:
                kind = kind._replace(due_ms=kind.due_ms + by_ms)
                if kind.attempts:
                    # Whoever leads next goes by what the journal says.
                    entries += self._chunked(ranges, partial(self._failed, kind))
            held = self._waiting.setdefault(kind, RangeSet())
            for each in ranges:
                held.add(*each)
        return entries

    def again(self, now_ms: int) -> list[Redelivered]:
        """The records to redeliver to the owner now. `redelivered` says which have been sent."""
        if not self.generation:
            return []
        found: list[Redelivered] = []
        if back := self._back_due():
            for each in back:
                self._back.remove(*each)
            self._put(self._unsent, back, 1, now_ms)
            found.append(Redelivered(1, back))
        for kind in sorted(kind for kind in self._waiting if kind.due_ms <= now_ms):
            if self._is_dead(kind):
                continue
            ranges = self._waiting[kind]
            # Records that the cursor has not reached are reported when it reaches them: the owner recognises a redelivery by
            # that.
            due = ranges.within(self.committed, self.cursor)
            for each in due:
                ranges.remove(*each)
            if not ranges:
                del self._waiting[kind]
            if due:
                self._put(self._unsent, due, kind.attempts + 1, now_ms)
                found.append(Redelivered(kind.attempts + 1, due))
        return found

    def give_up(self, now_ms: int) -> list[Dying]:
        """Records that had all their attempts. Each is dying until it is `buried`."""
        found: list[Dying] = []
        for kind in [kind for kind in self._waiting if kind.due_ms <= now_ms and self._is_dead(kind)]:
            ranges = self._waiting[kind]
            while ranges and len(self._dying) < DYING_MAX:
                offset = ranges.first
                ranges.remove(offset, offset + 1)
                dying = self._dying[offset] = Dying(offset, kind.attempts, kind.reason)
                found.append(dying)
            if not ranges:
                del self._waiting[kind]
        return found

    def doom(self, offsets: Iterable[int]) -> None:
        """At replay: these records, of those that wait, are under way to the dead-letter stream."""
        for offset in offsets:
            for kind in list(self._waiting):
                ranges = self._waiting[kind]
                if offset in ranges:
                    ranges.remove(offset, offset + 1)
                    self._dying[offset] = Dying(offset, kind.attempts, kind.reason)
                    if not ranges:
                        del self._waiting[kind]

    def buried(self, offsets: Iterable[int]) -> None:
        """These records are in the dead-letter stream, which the journal knows by itself."""
        for offset in offsets:
            if offset in self._dying:
                self._settle([(offset, offset + 1)])

    # -- given back ------------------------------------------------------------------------------------

    def is_taken(self, offset: int) -> bool:
        """Whether a dead letter of this record cannot be given back now: it is on its way to the dead letters, or back, or part of a transaction."""
        taken = (self._returning, *self._reserved.values())
        return offset in self._dying or any(offset in ranges for ranges in taken)

    def fits(self, more: int) -> bool:
        """Whether one more record than these may be given back: each may part a range of what is acknowledged."""
        return len(self.settled) + more < RANGES_MAX

    def take_back(self, offsets: Iterable[int]) -> None:
        """These records are settled no more; they are delivered once they have `returned`. One that is out, waits, or is ahead of the owner's cursor is left as
        it is: it is delivered anyway."""
        for offset in offsets:
            if offset < self.committed:
                self.settled.add(offset, self.committed)
                self.committed = offset
            elif offset not in self.settled and (self._is_about(offset) or self.generation):
                continue
            self.settled.remove(offset, offset + 1)
            self._returning.add(offset, offset + 1)

    def settled_again(self, offsets: Iterable[int]) -> list[Entry]:
        """For a snapshot, behind a `Returning` that is under way: which of these are settled all the same, by an acknowledgement or a seek since it was written."""
        again = RangeSet()
        for offset in offsets:
            if offset < self.committed or offset in self.settled:
                again.add(offset, offset + 1)
        return list(self._chunked(again, lambda part: Settled(self.subscription, part)))

    def _is_about(self, offset: int) -> bool:
        """Whether the record is with the owner, or is to be delivered again or given up."""
        outs = (out.ranges for out in (*self._out, *self._unsent))
        held = (*outs, *self._waiting.values(), *self._reserved.values(), self._returning, self._back)
        return offset in self._dying or any(offset in ranges for ranges in held)

    def returned(self, offsets: Iterable[int]) -> None:
        """Their dead letters are gone: as far as they are returning still, they are delivered as for the first time."""
        for offset in offsets:
            if offset in self._returning:
                self._returning.remove(offset, offset + 1)
                # What its owner was not told to leave out comes to it as the cursor does.
                if self.generation and (offset < self.cursor or offset in self._left_out):
                    self._back.add(offset, offset + 1)
                    self._unseen.add(offset, offset + 1)

    # -- transactions ----------------------------------------------------------------------------------

    def reserve(self, ranges: list[tuple[int, int]]) -> RequestError | None:
        """Keep these records for a transaction that is about to be written. All of them, or an error and none."""
        if any(
            following > self.cursor
            or first < self.committed
            or self.settled.within(first, following)
            or any(held.within(first, following) for held in self._reserved.values())
            or any(first <= offset < following for offset in self._dying)
            or self._returning.within(first, following)
            for first, following in ranges
        ):
            return RequestError(
                "Records that the transaction acknowledges were settled otherwise, or never delivered to it.",
                code=Code.CONSUMER_FENCED,
                hint="Abort it: the records were dealt with elsewhere, or will be redelivered.",
            )
        for first, following in ranges:
            failed = [
                (out.attempt - 1, out.ranges.within(first, following)) for out in (*self._out, *self._unsent)
            ]
            failed += [(kind.attempts, held.within(first, following)) for kind, held in self._waiting.items()]
            failed.append((0, self._back.within(first, following)))
            for attempts, parts in failed:
                for part in parts:
                    self._reserved.setdefault(attempts, RangeSet()).add(*part)
            self._take_back(first, following)
            self._unseen.remove(first, following)
        return None

    def reserve_again(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Keep these, which were reserved before the journal was read back, as far as they are not settled."""
        if not self.positioned:
            return
        for first, following in ranges:
            for part in self.settled.missing(max(first, self.committed), following):
                fresh = RangeSet([part])
                for each in self._returning.within(*part):
                    fresh.remove(*each)
                for kind, held in self._waiting.items():
                    for each in held.within(*part):
                        fresh.remove(*each)
                        self._reserved.setdefault(kind.attempts, RangeSet()).add(*each)
                for each in fresh:
                    self._reserved.setdefault(0, RangeSet()).add(*each)
                self._take_back(*part)

    def unreserve(self, ranges: Iterable[tuple[int, int]], now_ms: int) -> None:
        """The transaction was not written: the records are delivered again."""
        for first, following in ranges:
            for attempts, held in list(self._reserved.items()):
                for each in held.within(first, following):
                    held.remove(*each)
                    self._wait([each], _Kind(now_ms, attempts, ""))
        self._drop_empty()

    # -- positions -------------------------------------------------------------------------------------

    def move(self, offset: int) -> list[Entry]:
        """All below `offset` counts as settled and nothing from it on. The shard is nobody's afterwards."""
        self._move(offset)
        return [Moved(self.subscription, offset)]

    def _move(self, offset: int) -> None:
        self.committed = self.cursor = offset
        self.settled = RangeSet()
        self.generation = 0
        self.positioned = True
        self._out.clear()
        self._unsent.clear()
        self._waiting.clear()
        self._dying.clear()
        self._reserved.clear()
        self._returning, self._back, self._unseen = RangeSet(), RangeSet(), RangeSet()

    # -- the journal -----------------------------------------------------------------------------------

    def replay(self, entry: Entry, end: int = EVERYTHING) -> None:
        """Apply one entry of an earlier life, as far as it speaks of offsets below `end`: what stood from there on is no more."""
        match entry:
            case Moved(offset=offset):
                self._move(min(offset, end))
            case Settled(distances=distances):
                self._settle(clipped(unpack(distances), end))
            case Failed():
                self._wait(
                    clipped(unpack(entry.distances), end),
                    _Kind(entry.due_ms, entry.attempts, entry.reason, is_own=False),
                )
            case _:
                raise AssertionError(entry)
        self.cursor = self.committed

    def snapshot(self) -> Iterator[Entry]:
        """Entries that make up what must survive."""
        if not self.positioned:
            return
        yield Moved(self.subscription, self.committed)
        yield from self._chunked(self.settled, lambda part: Settled(self.subscription, part))
        waiting = [(kind, ranges) for kind, ranges in self._waiting.items() if kind.attempts]
        outs = (*self._out, *self._unsent)
        waiting += [(_Kind(0, out.attempt - 1, ""), out.ranges) for out in outs if out.attempt > 1]
        waiting += [(_Kind(0, attempts, ""), held) for attempts, held in self._reserved.items() if attempts]
        waiting += [
            (_Kind(0, dying.attempts, dying.reason), RangeSet([(offset, offset + 1)]))
            for offset, dying in self._dying.items()
        ]
        for kind, ranges in waiting:
            yield from self._chunked(ranges, partial(self._failed, kind))

    def _failed(self, kind: _Kind, distances: list[int]) -> Failed:
        return Failed(self.subscription, kind.attempts, kind.due_ms, kind.reason, distances)

    @staticmethod
    def _chunked(ranges: Iterable[tuple[int, int]], make: Callable[[list[int]], Entry]) -> Iterator[Entry]:
        held = list(ranges)
        for at in range(0, len(held), RANGES_MAX):
            yield make(pack(held[at : at + RANGES_MAX]))

    # -- inside ----------------------------------------------------------------------------------------

    def _settled_entries(self, ranges: Iterable[tuple[int, int]]) -> list[Entry]:
        """Settle the offsets that are not settled yet, and return their journal entries."""
        fresh = RangeSet()
        for first, following in ranges:
            for each in self.settled.missing(max(first, self.committed), following):
                fresh.add(*each)
        if not fresh:
            return []
        self._settle(fresh)
        return list(self._chunked(fresh, lambda part: Settled(self.subscription, part)))

    def _settle(self, ranges: Iterable[tuple[int, int]]) -> None:
        for first, following in ranges:
            first = max(first, self.committed)
            if first >= following:
                continue
            self._take_back(first, following)
            for held in (*self._reserved.values(), self._returning, self._unseen):
                held.remove(first, following)
            for offset in [offset for offset in self._dying if first <= offset < following]:
                del self._dying[offset]
            self.settled.add(first, following)
        if self.settled and self.settled.first <= self.committed:
            first, following = next(iter(self.settled))
            self.settled.remove(first, following)
            self.committed = following

    def _take_back(self, first: int, following: int) -> None:
        """Out of what is out, what waits, and what is back."""
        self._back.remove(first, following)
        for out in (*self._out, *self._unsent):
            out.ranges.remove(first, following)
        for kind in list(self._waiting):
            ranges = self._waiting[kind]
            ranges.remove(first, following)
            if not ranges:
                del self._waiting[kind]
        self._drop_empty()

    def _drop_empty(self) -> None:
        if not all(out.ranges for out in self._out):
            self._out = [out for out in self._out if out.ranges]
        if not all(out.ranges for out in self._unsent):
            self._unsent = [out for out in self._unsent if out.ranges]
        if not all(self._reserved.values()):
            self._reserved = {attempts: held for attempts, held in self._reserved.items() if held}

    def _fail(
        self, ranges: list[tuple[int, int]], attempts: int, now_ms: int, delay_ms: int, reason: str
    ) -> list[Entry]:
        """These records had `attempts` in vain; again after `delay_ms` (-1: as the settings say), if at all."""
        if delay_ms < 0:
            delay_ms = self.settings.retries.delay_ms(attempts)
        due_ms = _grained(now_ms, delay_ms)
        if len(self._waiting) >= WAITING_MAX:
            due_ms = _coarse(now_ms, due_ms)
        kind = _Kind(due_ms, attempts, reason)
        if self._is_dead(kind):
            kind = kind._replace(due_ms=now_ms)
        self._wait(ranges, kind)
        return list(self._chunked(ranges, lambda part: self._failed(kind, part)))

    def _wait(self, ranges: list[tuple[int, int]], kind: _Kind) -> None:
        """These records, in nothing else that is for the owner, wait."""
        if len(self._waiting) >= WAITING_MAX:
            kind = kind._replace(reason="")
        for first, following in ranges:
            for each in self.settled.missing(max(first, self.committed), following):
                self._take_back(*each)
                # At replay: it was with the owner as it was given back, and the journal says of that only as it fails.
                self._returning.remove(*each)
                self._waiting.setdefault(kind, RangeSet()).add(*each)


def _grained(now_ms: int, delay_ms: int) -> int:
    """`delay_ms` from now, rounded up to a grain."""
    grain = max(1, delay_ms // GRAINS)
    return -(-(now_ms + delay_ms) // grain) * grain


def _coarse(now_ms: int, due_ms: int) -> int:
    """A time that is as far away as `due_ms`, or up to twice as far: of these there are few."""
    grain = 1 << max(0, (due_ms - now_ms).bit_length() - 1)
    return -(-due_ms // grain) * grain
