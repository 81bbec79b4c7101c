"""One shard of a queue, as a state machine: which records are ready, leased, delayed, done. Pure: time comes in, entries come out.

A decision (`lease`, `ack`, `nack`, `release`, `extend`, `purge`) changes the state at once and returns the journal entry of the
change; `apply` applies such an entry again, at replay. What the journal does not hold (a record's key, its priority, its
publication time) comes from the log: `take_up` is called for every record, in order of offsets, from the floor on.

What a record may be, and what moves it::

    READY    taken up and free                       lease → LEASED
    WAITING  behind another record of its key        the other is done or dead → READY or DELAYED
    DELAYED  not before its time                     tick → READY
    LEASED   with a worker, until its time           ack → done; nack → DELAYED; release → READY; tick → READY or MOVING
    MOVING   on its way to the dead letters          landed → done

Invariants:
- the lease token of a record grows by one with every lease; a journal entry records it before the lease is handed out;
- a record is settled by the token of its newest lease alone, also after that lease has run out, as long as nobody else got it;
- with `ordered_by_key`, of the records of one key only the first that is not done or dead is ever READY, DELAYED or LEASED;
- `done` and the tracked records never overlap; everything below `head` is one or the other; ranges are bounded by the records;
- a record that is reserved stays LEASED by the token that it has until `unreserve` or the end of it: no time frees it, and its lease is
  neither given back nor reserved again;
- every other record that is LEASED or DELAYED, and was taken up, stands in a timer of its time.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import count
from typing import Final, NamedTuple

import msgspec

from felix.errors import CorruptionError
from felix.ranges import RangeSet
from felix.settings import VISIBILITY_MS_MAX, QueueSettings
from region.log.epochs import EVERYTHING
from region.views.wall_clock import SET_MS

READY_MAX: Final = 4_096
"""Read ahead of the workers: enough for many of them with long prefetches, a few ms of work to take up."""
TRACKED_MAX: Final = 200_000
"""Records of a shard that are known one by one: ready, leased, delayed. With more of them no further are taken up."""
RECORD_BYTES: Final = 320
"""About what one of them takes in memory."""
SETS_MAX: Final = 64
"""So many settings of the clock are known of records that are not taken up: of more, a delay counts from the time that the record has."""
FINISHED_MAX: Final = 16_384
"""Records that took more than one lease and are done, of which the last token is remembered to answer a repeated ack."""
PRIORITIES: Final = 10
PRIORITY_DEFAULT: Final = 4
TIMERS_SLACK: Final = 4_096
"""Entries of timers that no longer count are let stand until there are this many more than those that do."""
RUNS_PER_ENTRY: Final = 12_000
"""Three numbers of at most nine bytes each: an entry stays well below what the journal takes."""

Run = tuple[int, int, int]
"""First offset, how many, and a token (or another number of each of them)."""


class Phase(IntEnum):
    """See the module."""

    READY = 0
    WAITING = 1
    DELAYED = 2
    LEASED = 3
    MOVING = 4


class Kind(IntEnum):
    """What an entry says of its runs. `at_ms` where it says `at`."""

    DONE = 0
    LEASED = 1
    """until `at`"""
    DELAYED = 2
    """given back, not before `at`; the token stays"""
    RELEASED = 3
    """given back without having counted"""
    PURGED = 4
    """everything below the end of the run"""
    FLOOR = 5
    """in a snapshot: `at` is the floor, the runs are done"""
    REFUNDS = 6
    """in a snapshot: leases that did not count"""
    FINISHED = 7
    """in a snapshot: done, and by which token"""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """An entry of the journal. `runs`: first offset, count and token, one after the other."""

    kind: int
    runs: list[int]
    at_ms: int = 0


class Told(msgspec.Struct, frozen=True, array_like=True):
    """The same, as it is read: with `epochs` (region.views.history) it changes nothing itself, and says of which records the entries behind it speak. An
    earlier release passes them by."""

    kind: int
    runs: list[int]
    at_ms: int = 0
    epochs: list[int] = []


class Delay(NamedTuple):
    """When a record is to be leased first: not before `at_ms`, and not before `delay_ms` after it was published. 0: at once."""

    at_ms: int
    delay_ms: int


NO_DELAY: Final = Delay(0, 0)


class Spent(NamedTuple):
    """A record that had all its attempts."""

    offset: int
    attempts: int


class Tracked:
    """A record that is neither done nor only in the log."""

    __slots__ = (
        "due_ms", "is_delayed", "is_own", "key", "leased_ms", "loaded", "offset", "open", "phase", "priority", "refunds", "reserved", "time_ms", "token", "worker",
    )  # fmt: skip

    def __init__(self, offset: int, phase: Phase) -> None:
        self.offset = offset
        self.phase = phase
        self.time_ms = 0
        self.priority = PRIORITY_DEFAULT
        self.key: bytes | None = None
        self.token = 0
        self.refunds = 0
        self.due_ms = 0
        self.worker = 0
        self.leased_ms = 0
        """When the newest lease began; 0 where that was before this start."""
        self.is_delayed = False
        """Whether it was put to come so long after `time_ms`, and was never leased."""
        self.is_own = False
        """Whether `due_ms` counts from a moment since this start (a lease, or its extension; what was given back; a delay): where the clock is set, it moves with it.
        What log or journal say of before, and a time of the day that was asked for, go by the clock as it is."""
        self.open = False
        """True while the newest lease may still settle it."""
        self.reserved = False
        """True while a transaction that acknowledges it may be decided, or is and has not settled it yet. In memory alone."""
        self.loaded = False
        """True once the record was read from the log; a replay names records before that."""

    @property
    def attempts(self) -> int:
        """Leases that counted."""
        return self.token - self.refunds


def runs_of(numbers: Iterable[tuple[int, int]]) -> list[int]:
    """Pairs of offset and token as runs, one number after the other. Offsets may come in any order."""
    runs: list[int] = []
    first = end = token = -1
    for offset, each in numbers:
        if offset == end and each == token:
            end += 1
            continue
        if end > first:
            runs += (first, end - first, token)
        first, end, token = offset, offset + 1, each
    if end > first:
        runs += (first, end - first, token)
    return runs


def triples(runs: Sequence[int]) -> Iterator[Run]:
    """The runs of an entry."""
    numbers = iter(runs)
    return zip(numbers, numbers, numbers, strict=True)


_encoder: Final = msgspec.msgpack.Encoder()
NOTHING: Final = _encoder.encode(Entry(Kind.DONE, []))
"""An entry that changes nothing: durable once all before it are."""
_decoder: Final = msgspec.msgpack.Decoder(Told)


def preface(epochs: list[int]) -> bytes:
    """An entry that says of which records those behind it speak."""
    return _encoder.encode(Told(Kind.DONE, [], 0, epochs))


def clipped(runs: Iterable[Run], end: int) -> list[Run]:
    """What of the runs is below `end`."""
    return [(first, min(count, end - first), token) for first, count, token in runs if first < end]


class QueueState:
    """See the module."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.done = RangeSet()
        self.own_from = 0
        """Records from here on were published since this start."""
        self.known_end = EVERYTHING
        """At replay: the next entries name records that are no more from here on."""
        self.head = 0
        """The next offset to pass to `take_up`."""
        self.tracked: dict[int, Tracked] = {}
        self.counts = [0] * len(Phase)
        self.leased_by: Counter[int] = Counter()
        """Leases of each worker."""
        self._ready: list[deque[int]] = [deque() for _ in range(PRIORITIES)]
        self._timers: list[tuple[int, int, list[int]]] = []
        self._timed = 0
        self._timer_numbers = count()
        self._keys: dict[bytes, deque[int]] = {}
        self._finished: dict[int, int] = {}
        self._set_since: list[tuple[int, int]] = []
        """By how much the clock was set once the records below an offset, of those that are not taken up, had been published; the newest last."""

    # -- stats -----------------------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """Every record below is done."""
        return self.done.end_of(0)

    @property
    def ready(self) -> int:
        """Records that may be leased now, of those taken up."""
        return self.counts[Phase.READY]

    @property
    def wants_more(self) -> bool:
        """Whether the next records of the log should be taken up: not one by one, but where half of what is read ahead is gone."""
        return 2 * self.counts[Phase.READY] < READY_MAX and len(self.tracked) < TRACKED_MAX

    @property
    def oldest_ms(self) -> int:
        """When the oldest record that is not done was published; 0 where that is not known or there is none."""
        first = self.tracked.get(self.floor)
        return first.time_ms if first is not None else 0

    def left(self, end: int) -> int:
        """Records below `end`, the log's end, that are not done."""
        return end - self.done.count

    # -- what the log tells ----------------------------------------------------------------------------

    def take_up_run(self, end: int, time_ms: int, now_ms: int) -> None:
        """Records from `head` to before `end` that have neither priority, delay nor (with ordered_by_key) key."""
        tracked, ready, fresh = self.tracked, self._ready[PRIORITY_DEFAULT], 0
        offset = self.head
        while offset < end:
            skipped = self.done.end_of(offset)
            if skipped > offset:
                offset = skipped
                continue
            stop = self.done.start_after(offset)
            for each in range(offset, end if stop is None else min(end, stop)):
                if each in tracked:
                    self._take_up(each, time_ms, PRIORITY_DEFAULT, NO_DELAY, None, now_ms)
                    continue
                record = Tracked(each, Phase.READY)
                record.time_ms, record.loaded = time_ms, True
                tracked[each] = record
                ready.append(each)
                fresh += 1
            offset = end if stop is None else min(end, stop)
        self.counts[Phase.READY] += fresh
        self.head = max(self.head, end)

    def take_up(
        self, offset: int, time_ms: int, priority: int, wanted: Delay, key: bytes | None, now_ms: int
    ) -> None:
        """The record at `head`: its priority, not before when, and its key where keys count."""
        assert offset >= self.head
        self.skip(offset)
        if offset not in self.done:
            self._take_up(offset, time_ms, priority, wanted, key, now_ms)
        self.head = offset + 1

    def _take_up(
        self, offset: int, time_ms: int, priority: int, wanted: Delay, key: bytes | None, now_ms: int
    ) -> None:
        record = self.tracked.get(offset)
        if record is None:
            record = Tracked(offset, Phase.WAITING)
            began_ms = time_ms + self._set_since_published(offset)
            if began_ms > now_ms + SET_MS:
                # Nothing is published later than now: a time that says so is of a clock that was ahead.
                began_ms = now_ms
            delayed_ms = began_ms + wanted.delay_ms if wanted.delay_ms else 0
            record.due_ms = max(wanted.at_ms, delayed_ms)
            record.is_delayed = delayed_ms > wanted.at_ms
            record.is_own = record.is_delayed and (offset >= self.own_from or began_ms == now_ms)
            self.tracked[offset] = record
            self.counts[Phase.WAITING] += 1
        record.time_ms, record.priority, record.loaded = time_ms, priority, True
        if record.phase is Phase.MOVING:
            return
        if key is not None:
            record.key = key
            line = self._keys.get(key)
            if line is not None and self._first(line, key) is not None:
                line.append(offset)
                if record.phase is not Phase.LEASED:
                    self._set(record, Phase.WAITING)
                    return
            else:
                self._keys[key] = deque((offset,))
        if record.phase is Phase.LEASED:
            if record.due_ms > now_ms + VISIBILITY_MS_MAX:
                # Longer than any lease is: the clock that gave it its time was wrong, or this one is.
                record.due_ms = now_ms + self.settings.visibility_ms
            self._time(record.due_ms, [offset])
        else:
            self._free(record, now_ms)

    def _set_since_published(self, offset: int) -> int:
        """By how much the clock was set since the record was published; 0 of one that was before this start."""
        if not self._set_since or offset < self.own_from:
            return 0
        self._set_since = [each for each in self._set_since if each[0] > self.head]
        return sum(by_ms for end, by_ms in self._set_since if offset < end)

    def skip(self, offset: int) -> list[int]:
        """The log has nothing below `offset` that was not taken up: what retention removed is done. The records so lost that
        were not taken up are those from `head` on."""
        if offset <= self.head:
            return []
        lost = []
        for each in (
            list(self.tracked) if len(self.tracked) < offset - self.head else range(self.head, offset)
        ):
            record = self.tracked.get(each)
            if record is not None and self.head <= each < offset and record.phase is not Phase.MOVING:
                self._forget(record)
                lost.append(each)
        moving = sorted(each for each, record in self.tracked.items() if self.head <= each < offset)
        start = self.head
        for each in moving:
            self.done.add(start, each)
            start = each + 1
        self.done.add(start, offset)
        self.head = offset
        return lost

    def lose(self, offset: int, now_ms: int) -> bytes:
        """A record that was taken up can no longer be read: it is done."""
        record = self.tracked[offset]
        self._finish(record, 0, now_ms)
        return self._entry(Kind.DONE, [offset, 1, 0])

    # -- leasing ---------------------------------------------------------------------------------------

    def next_ready(self) -> Tracked | None:
        """The record that is to be leased next: of the highest priority, the one that has been ready for longest."""
        if not self.counts[Phase.READY]:
            return None
        tracked = self.tracked
        for line in reversed(self._ready):
            while line:
                record = tracked.get(line[0])
                if record is not None and record.phase is Phase.READY:
                    return record
                line.popleft()  # it was settled, purged or moved where it stood
        raise AssertionError("a ready record stands in no line")

    def lease(self, record: Tracked, until_ms: int, worker: int, now_ms: int) -> None:
        """Lease the record that `next_ready` gave; `leased` then makes the entry of all that were."""
        self._ready[record.priority].popleft()
        counts = self.counts
        counts[Phase.READY] -= 1
        counts[Phase.LEASED] += 1
        record.phase = Phase.LEASED
        record.token += 1
        record.due_ms = until_ms
        record.worker = worker
        record.leased_ms = now_ms
        record.is_own, record.is_delayed, record.open = True, False, True

    def leased(self, records: Sequence[Tracked], until_ms: int, worker: int) -> bytes:
        """The entry of what was leased, all until the same time and by one worker."""
        self.leased_by[worker] += len(records)
        self._time(until_ms, [record.offset for record in records])
        return self._entry(
            Kind.LEASED, runs_of((record.offset, record.token) for record in records), until_ms
        )

    # -- settling --------------------------------------------------------------------------------------

    def ack(self, runs: Iterable[Run], now_ms: int) -> tuple[bytes | None, list[int]]:
        """Records are done. The entry, where there is one to write, and the offsets of which the lease was lost."""
        found: list[tuple[int, int]] = []
        lost: list[int] = []
        tracked = self.tracked
        for first, number, token in runs:
            for offset in range(first, first + number):
                record = tracked.get(offset)
                if record is None:
                    if not self._was_done(offset, token):
                        lost.append(offset)
                elif record.token == token and record.open:
                    self._finish(record, token, now_ms)
                    found.append((offset, token))
                else:
                    lost.append(offset)
        return (self._entry(Kind.DONE, runs_of(found)) if found else None), lost

    def settle(self, runs: Iterable[Run], now_ms: int) -> bytes | None:
        """Records are done, regardless of who holds them now: a transaction that acknowledged them is committed."""
        found: list[tuple[int, int]] = []
        for first, number, token in runs:
            for offset in range(first, first + number):
                record = self.tracked.get(offset)
                if record is not None and record.phase is not Phase.MOVING:
                    self._finish(record, token, now_ms)
                    found.append((offset, token))
        return self._entry(Kind.DONE, runs_of(found)) if found else None

    def reserve(self, runs: Sequence[Run]) -> list[int]:
        """Keep records for a transaction that is about to be decided. The offsets that these tokens hold no lease of, or another transaction
        keeps; then nothing is kept."""
        found: list[Tracked] = []
        lost: list[int] = []
        for first, number, token in runs:
            for offset in range(first, first + number):
                record = self.tracked.get(offset)
                if record is None or record.token != token or not record.open or record.reserved:
                    lost.append(offset)
                else:
                    found.append(record)
        if not lost:
            for record in found:
                # Also a lease that has run out, where nobody else got the record.
                self._lease_again(record, record.due_ms, record.worker)
                record.reserved = True
        return lost

    def unreserve(self, runs: Iterable[Run]) -> None:
        """The transaction was not decided: their leases run out at their time again."""
        kept: list[int] = []
        for first, number, token in runs:
            for offset in range(first, first + number):
                record = self.tracked.get(offset)
                if record is not None and record.token == token and record.reserved:
                    record.reserved = False
                    kept.append(offset)
        self._time_each(kept)

    def nack(
        self, runs: Iterable[Run], delay_ms: int | None, now_ms: int
    ) -> tuple[list[bytes], list[int], list[Spent]]:
        """Records are given back, for after `delay_ms` (None: what the attempts so far ask for). The entries, the offsets of
        which the lease was lost, and the records that had all their attempts, in order: they are MOVING, and for the caller to
        move."""
        lost: list[int] = []
        spent: list[Spent] = []
        due: dict[int, list[tuple[int, int]]] = {}
        retries = self.settings.retries
        for first, number, token in runs:
            for offset in range(first, first + number):
                record = self.tracked.get(offset)
                if record is None or record.token != token or record.reserved:
                    lost.append(offset)
                elif not record.open:
                    continue  # given back before, by this lease
                elif retries.attempts_max and record.attempts >= retries.attempts_max:
                    spent.append(Spent(offset, record.attempts))
                    self._bury(record, now_ms)
                else:
                    wait_ms = retries.delay_ms(record.attempts) if delay_ms is None else delay_ms
                    self._give_back(record, now_ms + wait_ms, now_ms)
                    due.setdefault(record.due_ms, []).append((offset, token))
        entries = [self._entry(Kind.DELAYED, runs_of(some), at_ms) for at_ms, some in due.items()]
        return entries, lost, spent

    def release(self, runs: Iterable[Run], now_ms: int) -> tuple[bytes | None, list[int]]:
        """Records are given back that no worker looked at: at once, and the lease does not count as an attempt."""
        found: list[tuple[int, int]] = []
        lost: list[int] = []
        for first, number, token in runs:
            for offset in range(first, first + number):
                record = self.tracked.get(offset)
                if record is None or record.token != token or record.reserved:
                    lost.append(offset)
                elif record.open:
                    record.refunds += 1
                    self._give_back(record, now_ms, now_ms, first=True)
                    found.append((offset, token))
        return (self._entry(Kind.RELEASED, runs_of(found), now_ms) if found else None), lost

    def extend(self, runs: Iterable[Run], until_ms: int) -> tuple[bytes | None, list[int]]:
        """Leases go on until `until_ms`; also one that has run out, where nobody else got the record."""
        found: list[tuple[int, int]] = []
        lost: list[int] = []
        for first, number, token in runs:
            for offset in range(first, first + number):
                record = self.tracked.get(offset)
                if record is None or record.token != token or not record.open:
                    lost.append(offset)
                else:
                    self._lease_again(record, until_ms, record.worker)
                    record.is_own = True
                    found.append((offset, token))
        if not found:
            return None, lost
        self._time_each(offset for offset, _ in found)
        return self._entry(Kind.LEASED, runs_of(found), until_ms), lost

    def purge(self, end: int, now_ms: int) -> tuple[bytes, int]:
        """Everything below `end` is done, regardless of who holds it, except for records on their way to the dead letters.
        Returns the entry, and the number of records removed.
        """
        before = self.left(end)
        self._purge(end)
        return self._entry(Kind.PURGED, [0, end, 0]), before - self.left(end)

    # -- time ------------------------------------------------------------------------------------------

    @property
    def next_due_ms(self) -> int | None:
        """When `tick` has something to do; earlier at most."""
        return self._timers[0][0] if self._timers else None

    def tick(self, now_ms: int) -> list[Spent]:
        """Free what is due: delayed records, leases that ran out. Returns the records that had all their attempts, in order of
        offsets: they are MOVING. Nothing is written: the time of a lease stands in its entry."""
        spent: list[Spent] = []
        attempts_max = self.settings.retries.attempts_max
        while self._timers and self._timers[0][0] <= now_ms:
            due_ms, _, offsets = heapq.heappop(self._timers)
            self._timed -= len(offsets)
            for offset in offsets:
                record = self.tracked.get(offset)
                if record is None or record.due_ms != due_ms or record.reserved:
                    continue
                if record.phase is Phase.DELAYED:
                    self._free(record, now_ms)
                elif record.phase is Phase.LEASED:
                    if attempts_max and record.attempts >= attempts_max:
                        spent.append(Spent(offset, record.attempts))
                        self._bury(record, now_ms)
                    else:
                        self._free(record, now_ms)
        spent.sort()
        return spent

    def clock_set(self, by_ms: int, now_ms: int, end: int) -> list[int]:
        """The clock was set ahead, or, negative, back, to `now_ms`: what lasts since this start has the time that is left of it, also in records below `end`,
        published before, that are taken up later. To be told before anything else is decided by the clock as it is now. The offsets of those whose `times` are for who leads next."""
        if end > max(self.head, self.own_from):
            self._set_since = [*self._set_since[1 - SETS_MAX :], (end, by_ms)]
        moved = []
        for record in self.tracked.values():
            if record.phase is Phase.MOVING:
                continue
            if record.is_own:
                record.due_ms += by_ms
                if record.leased_ms:
                    record.leased_ms += by_ms
                moved.append(record)
            elif record.is_delayed and record.time_ms > now_ms + SET_MS:
                # Nothing was published later than now.
                record.due_ms += now_ms - record.time_ms
                record.is_own = True
                moved.append(record)
        if moved:
            self._renew_timers()
        return sorted(record.offset for record in moved if record.token)

    def times(self, offsets: Sequence[int]) -> list[bytes]:
        """Until when these are leased or delayed by now, of those that still are."""
        records = [self.tracked[offset] for offset in offsets if offset in self.tracked]
        return self._held(record for record in records if record.token and record.phase is not Phase.MOVING)

    # -- dead letters ----------------------------------------------------------------------------------

    def bury(self, offsets: Iterable[int], now_ms: int) -> None:
        """These records are on their way elsewhere."""
        for offset in offsets:
            record = self.tracked.get(offset)
            if record is None:
                if offset in self.done:
                    continue
                record = self._track(offset)
            if record.phase is not Phase.MOVING:
                self._bury(record, now_ms)

    def unbury(self, offsets: Iterable[int], now_ms: int) -> None:
        """They stay after all."""
        for offset in offsets:
            record = self.tracked.get(offset)
            if record is not None and record.phase is Phase.MOVING:
                record.due_ms, record.is_own = 0, False
                if record.loaded:
                    # While it was moving, its key, if it has one, went on without it: it queues up behind the key's other
                    # records.
                    if record.key is not None:
                        line = self._keys.get(record.key)
                        if line is not None and self._first(line, record.key) is not None:
                            line.append(offset)
                            self._set(record, Phase.WAITING)
                            continue
                        self._keys[record.key] = deque((offset,))
                    self._free(record, now_ms)
                else:
                    self._set(record, Phase.DELAYED)

    def landed(self, offsets: Iterable[int], now_ms: int) -> None:
        """They stand where they were moved to: here they are done."""
        for offset in offsets:
            record = self.tracked.get(offset)
            if record is not None:
                self._finish(record, 0, now_ms)
            else:
                self.done.add(offset, offset + 1)

    def remove(self, offsets: Iterable[int], now_ms: int) -> bytes | None:
        """These are done, whoever holds them: what they were moved here for is done elsewhere. The entry, where there is one to write."""
        found = [offset for offset in offsets if offset not in self.done]
        self.landed(found, now_ms)
        return self._entry(Kind.DONE, runs_of((offset, 0) for offset in found)) if found else None

    # -- the journal -----------------------------------------------------------------------------------

    def apply(
        self, data: bytes, now_ms: int, shared_end: Callable[[list[int]], int] = lambda epochs: EVERYTHING
    ) -> None:
        """Take in an entry at replay; nothing has been taken up yet. `shared_end`: up to where the records are those that these epochs had. Raises
        CorruptionError."""
        try:
            entry = _decoder.decode(data)
            if entry.epochs:
                self.known_end = shared_end(entry.epochs)
            kind, end = Kind(entry.kind), self.known_end
            runs = clipped(triples(entry.runs), end)
        except (msgspec.MsgspecError, ValueError, UnicodeDecodeError) as error:
            raise CorruptionError(f"A queue's journal entry cannot be read: {error}.") from error
        if kind is Kind.FLOOR:
            self.done.add(0, min(entry.at_ms, end))
            for first, number, _ in runs:
                self.done.add(first, first + number)
        elif kind is Kind.PURGED:
            for first, count, _ in runs:
                self._purge(first + count)
        else:
            for first, number, token in runs:
                for offset in range(first, first + number):
                    self._apply(kind, offset, token, entry.at_ms, now_ms)
        self.head = self.floor

    def _apply(self, kind: Kind, offset: int, token: int, at_ms: int, now_ms: int) -> None:
        if kind is Kind.FINISHED:
            self._remember(offset, token)
            return
        record = self.tracked.get(offset)
        if kind is Kind.DONE:
            if record is not None:
                self._finish(record, token, now_ms)
            elif offset not in self.done:
                self.done.add(offset, offset + 1)
                if token != 1:
                    self._remember(offset, token)
            return
        if record is None:
            if offset in self.done:
                return  # an entry that stands in its snapshot already
            record = self._track(offset)
        if kind is Kind.REFUNDS:
            record.refunds = token
            return
        record.token = token
        if kind is Kind.LEASED:
            self._lease_again(record, at_ms, 0)
        else:
            if kind is Kind.RELEASED:
                record.refunds += 1
            record.due_ms, record.open = at_ms, False
            self._set(record, Phase.DELAYED)

    def entries(self) -> list[bytes]:
        """The whole state as entries."""
        floor = self.floor
        above = [number for start, end in self.done if start > floor for number in (start, end - start, 0)]
        found = [self._entry(Kind.FLOOR, [], floor)]
        found += self._entries(Kind.FLOOR, above, floor)
        found += self._entries(Kind.FINISHED, runs_of(sorted(self._finished.items())), 0)
        leased = [record for _, record in sorted(self.tracked.items()) if record.token]
        found += self._held(leased)
        refunds = [(record.offset, record.refunds) for record in leased if record.refunds]
        found += self._entries(Kind.REFUNDS, runs_of(refunds), 0)
        return found

    def _held(self, records: Iterable[Tracked]) -> list[bytes]:
        """Until when these, which have been leased, are leased or delayed."""
        held: dict[tuple[Kind, int], list[tuple[int, int]]] = {}
        for record in records:
            # An expired lease is still a lease here: its time shows that it expired.
            kind = Kind.LEASED if record.open else Kind.DELAYED
            held.setdefault((kind, record.due_ms), []).append((record.offset, record.token))
        return [
            entry
            for (kind, at_ms), some in held.items()
            for entry in self._entries(kind, runs_of(some), at_ms)
        ]

    def _entries(self, kind: Kind, runs: list[int], at_ms: int) -> Iterator[bytes]:
        for at in range(0, len(runs), 3 * RUNS_PER_ENTRY):
            yield self._entry(kind, runs[at : at + 3 * RUNS_PER_ENTRY], at_ms)

    @staticmethod
    def _entry(kind: Kind, runs: list[int], at_ms: int = 0) -> bytes:
        return _encoder.encode(Entry(kind, runs, at_ms))

    # -- moving between phases -------------------------------------------------------------------------

    def _track(self, offset: int) -> Tracked:
        record = Tracked(offset, Phase.DELAYED)
        self.tracked[offset] = record
        self.counts[Phase.DELAYED] += 1
        return record

    def _set(self, record: Tracked, phase: Phase) -> None:
        old = record.phase
        if old is Phase.LEASED:
            self._left_worker(record)
        self.counts[old] -= 1
        self.counts[phase] += 1
        record.phase = phase

    def _left_worker(self, record: Tracked) -> None:
        worker = record.worker
        if self.leased_by[worker] <= 1:
            del self.leased_by[worker]
        else:
            self.leased_by[worker] -= 1

    def _free(self, record: Tracked, now_ms: int, *, first: bool = False) -> None:
        """READY, or DELAYED until its time."""
        if record.phase is not Phase.LEASED and record.due_ms > now_ms:
            self._set(record, Phase.DELAYED)
            self._time(record.due_ms, [record.offset])
            return
        self._set(record, Phase.READY)
        line = self._ready[record.priority]
        if first:
            line.appendleft(record.offset)
        else:
            line.append(record.offset)

    def _give_back(self, record: Tracked, due_ms: int, now_ms: int, *, first: bool = False) -> None:
        record.due_ms, record.is_own, record.open = due_ms, True, False
        self._set(record, Phase.DELAYED)
        if record.loaded:
            self._free(record, now_ms, first=first)

    def _lease_again(self, record: Tracked, until_ms: int, worker: int) -> None:
        if record.phase is not Phase.LEASED:
            self._set(record, Phase.LEASED)
            record.worker = worker
            self.leased_by[worker] += 1
        record.due_ms, record.open = until_ms, True

    def _finish(self, record: Tracked, token: int, now_ms: int) -> None:
        """Done, by the lease `token` (0: by none)."""
        offset = record.offset
        if record.phase is Phase.LEASED:
            self._left_worker(record)
        self.counts[record.phase] -= 1
        del self.tracked[offset]
        self.done.add(offset, offset + 1)
        if token != 1 and record.token:
            self._remember(offset, token)
        if record.key is not None and record.phase is not Phase.MOVING:
            self._next_of_key(record, now_ms)

    def _forget(self, record: Tracked) -> None:
        if record.phase is Phase.LEASED:
            self._left_worker(record)
        self.counts[record.phase] -= 1
        del self.tracked[record.offset]

    def _bury(self, record: Tracked, now_ms: int) -> None:
        self._set(record, Phase.MOVING)
        record.open = False
        if record.key is not None:
            self._next_of_key(record, now_ms)

    def _first(self, line: deque[int], key: bytes) -> Tracked | None:
        """The first record of a key that is neither done nor moving."""
        while line:
            record = self.tracked.get(line[0])
            if record is not None and record.phase is not Phase.MOVING and record.key == key:
                return record
            line.popleft()
        return None

    def _next_of_key(self, record: Tracked, now_ms: int) -> None:
        key = record.key
        assert key is not None
        line = self._keys.get(key)
        if line is None:
            return
        following = self._first(line, key)
        if following is None:
            del self._keys[key]
        elif following.phase is Phase.WAITING:
            self._free(following, now_ms)

    def _purge(self, end: int) -> None:
        start = self.floor
        for offset, record in sorted(self.tracked.items()):
            if offset >= end:
                break
            if record.phase is Phase.MOVING:
                self.done.add(start, offset)
                start = offset + 1
                continue
            self._forget(record)
            if record.token:
                self._remember(offset, 0)
        self.done.add(start, end)
        self.head = max(self.head, end)
        for key, line in list(self._keys.items()):
            following = self._first(line, key)
            if following is None:
                del self._keys[key]
            elif following.phase is Phase.WAITING:
                self._free(following, following.due_ms)

    def _remember(self, offset: int, token: int) -> None:
        self._finished.pop(offset, None)
        self._finished[offset] = token
        if len(self._finished) > FINISHED_MAX:
            del self._finished[next(iter(self._finished))]

    def _was_done(self, offset: int, token: int) -> bool:
        """Whether it was this lease that finished the record, as far as that is still known."""
        return offset in self.done and self._finished.get(offset, 1) == token

    # -- timers ----------------------------------------------------------------------------------------

    def _time(self, due_ms: int, offsets: list[int]) -> None:
        heapq.heappush(self._timers, (due_ms, next(self._timer_numbers), offsets))
        self._timed += len(offsets)
        live = self.counts[Phase.LEASED] + self.counts[Phase.DELAYED]
        if self._timed > 2 * live + TIMERS_SLACK:
            self._renew_timers()

    def _time_each(self, offsets: Iterable[int]) -> None:
        """Timers for records by their own times; those not taken up get theirs then."""
        due: dict[int, list[int]] = {}
        for offset in offsets:
            record = self.tracked[offset]
            if record.loaded:
                due.setdefault(record.due_ms, []).append(offset)
        for at_ms, some in due.items():
            self._time(at_ms, some)

    def _renew_timers(self) -> None:
        due: dict[int, list[int]] = {}
        for offset, record in self.tracked.items():
            if record.loaded and record.phase in (Phase.LEASED, Phase.DELAYED):
                due.setdefault(record.due_ms, []).append(offset)
        self._timers = [(at_ms, next(self._timer_numbers), some) for at_ms, some in due.items()]
        heapq.heapify(self._timers)
        self._timed = sum(len(some) for _, _, some in self._timers)
