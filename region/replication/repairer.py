"""Damaged segments of the copies at one broker: found by a read or by the scrub, and written anew from a copy that is in sync. Event loop only.

What a copy is asked for are committed frames, which are the same on every copy in sync, whoever leads: so a leader repairs its own as a follower
does. Of a log that was compacted frames are not all there, and each copy's files are its own: it is copied as a whole from the leader, and a
leader hands over first.

Invariants:
- bytes that do not hold are given to nobody; whoever wants them waits for the repair, REPAIR_WAIT_S at most, or is told that no copy has them;
- what holds of a segment stays, and each part of it that is lost is filled by whoever has it: one copy goes on where another one stopped. What nobody
  has stays as it is on the disk, and its offsets alone are refused;
- one segment is repaired at a time, from one answer at a time, and a copy that takes longer than it may, or answers what it should not, is
  asked after the others from then on: no copy keeps another one from being asked;
- what a copy says of itself moves no leadership and lets go of no log, unless the stream is compacted and no copy says anything else;
- damage stops nothing else: the copy goes on leading or following, and what it acknowledges is what it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import cycle
from typing import Final, NamedTuple, Protocol, TypeVar

from felix.errors import Code, CorruptionError, FelixError, UnavailableError
from felix.runtime.port import Runtime
from felix.storage.port import Files, is_full
from felix.tasks import TaskSet
from region.cluster.records import ShardId
from region.log.compactor import WorkEndedError
from region.log.disk_reader import read_repaired
from region.log.errors import SegmentDamagedError
from region.log.frame import Frame
from region.log.point import LogPoint
from region.log.scrub import Scrub
from region.log.segment import parse_segment_name
from region.log.segment_check import SegmentCheck
from region.log.segment_repair import SegmentRepair
from region.log.segment_state import SegmentState
from region.log.segment_survey import LostPart
from region.replication.disk import ReplicaDisk

log = logging.getLogger("felix.region.replication")

REPAIR_WAIT_S: Final = 10.0
"""A reader waits so long for what it reads to be repaired: a segment of 256 MiB takes a few seconds; then it is told to come again."""
REPAIR_AGAIN_S: Final = 10.0
"""What no copy could give is asked for again after this: another one may be in sync by then."""
REPAIR_SOON_S: Final = 0.25
"""So soon again where it only waits for a commit, or for the segment to be closed."""
FETCH_BYTES: Final = 1 << 20
"""Frames asked of a copy at once."""
FROM_ONE_S: Final = 10.0
"""A copy has so long to give a segment, and as long as FROM_ONE_RATE takes for its bytes."""
FROM_ONE_RATE: Final = 4 << 20
"""Bytes a second; of the largest segments it makes a minute."""
PARTS_MISSED_MAX: Final = 64
"""Parts of a segment that nobody can give are asked for in one attempt; in the next one those behind them."""
TOLD_EVERY: Final = 360
"""Of attempts that somebody refuses, which come every REPAIR_AGAIN_S, one is told in an hour; of the first ones more (`is_told`)."""
OFFSETS_SHOWN_MAX: Final = 3
"""Ranges that a sentence names."""
SCRUB_SHARE: Final = 0.1
"""Of a thread's time that the scrub takes at most: lone records of 100 bytes cost a core 30 ms for a megabyte, and publishers come first."""
SCRUB_LOOK_S: Final = 60.0
"""Where there is nothing to look at, it is looked again after this."""

_T = TypeVar("_T")


class Wanted(NamedTuple):
    """What is asked of another copy: frames of a log of a shard from `begin` on, none that ends behind `end`."""

    shard: ShardId
    number: int
    begin: LogPoint
    end: LogPoint
    with_annotations: bool


class Fetched(NamedTuple):
    """What another copy has from a point on: the annotations in force there, where they were asked for, and frames."""

    annotations: dict[int, bytes]
    frames: Sequence[Frame]


class Source(Protocol):
    """How another broker is asked for frames of its copy (region.copies.copied_frames)."""

    async def fetch(self, peer: str, wanted: Wanted) -> Fetched:
        """Committed frames, about FETCH_BYTES. Raises what the other refuses it with:
        RequestError(UNSUPPORTED) where its own were compacted; UnavailableError."""


class _NoSource:
    """Nobody is asked."""

    async def fetch(self, peer: str, wanted: Wanted) -> Fetched:
        raise UnavailableError(f"Broker {peer} is not asked for copies of segments.")


NO_SOURCE: Final = _NoSource()


class Copies(Protocol):
    """What is needed of the host."""

    @property
    def shards(self) -> list[ShardId]: ...

    def disks(self, shard: ShardId) -> dict[int, ReplicaDisk]:
        """The logs of a copy here, by number; none where there is none."""

    def committed(self, shard: ShardId, number: int) -> LogPoint: ...

    def in_sync(self, shard: ShardId) -> list[str]:
        """The other brokers whose copies are in sync, the leader first."""

    def is_copying(self, shard: ShardId, number: int) -> bool:
        """Whether the log is about to be begun anew with what its leader has."""

    def is_in_sync(self, shard: ShardId) -> bool:
        """Whether the copy here is."""

    def may_be_compacted(self, shard: ShardId, number: int) -> bool:
        """Whether copies of the log are compacted, or this one was."""

    def hand_over(self, shard: ShardId) -> None:
        """The disk takes no repair: where this broker leads, it lets another one lead; not again and again."""

    def copy_anew(self, shard: ShardId, number: int) -> bool:
        """Have the whole log copied from its leader, which is another one soon where this broker leads; False where nobody has another copy."""


def _offsets(begin: int, end: int) -> str:
    return f"{begin} to {end - 1}" if begin < end else f"between {begin - 1} and {begin}"


def is_told(attempt: int) -> bool:
    """Whether the log says what came of an attempt, counted from 1 on: the first, the second, the fourth and so on, and one in an hour."""
    return attempt & (attempt - 1) == 0 or attempt % TOLD_EVERY == 0


class Outcome(Enum):
    """What came of one attempt at a repair."""

    REPAIRED = "repaired"
    GONE = "the log has the segment no more"
    SOON = "it has to be committed, and the segment closed, first"
    LATER = "nobody could give it"
    COPIED = "the whole log is being copied"


@dataclass(eq=False, slots=True)
class Damage:
    """A damaged segment of a log here, until it is repaired."""

    shard: ShardId
    number: int
    segment: SegmentState
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """set once it is over, or there is a reason why it is not"""
    why: str = ""
    """why the last attempt came to nothing; empty before that"""
    is_copied: bool = False
    """whether that is because the whole log is copied"""
    is_over: bool = False
    parts: list[LostPart] = field(default_factory=list)
    """which of it nobody could give; empty before the first attempt has ended"""
    missed: int = 0
    """how many of these were asked for since the first of them was; they are asked for again after the others"""
    refused: int = 0
    """attempts in which somebody could not give something"""
    is_unread: bool = False
    """whether that is because the disk does not give it: it may yet, so nothing is put in its place before all of it is there"""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Which offsets are damaged: from one, and before another."""
        if not self.parts:
            return [(self.segment.base_offset, self.segment.next_offset)]
        found = list[tuple[int, int]]()
        for part in self.parts:
            begin, end = part.begin.offset, part.next_offset
            if found and found[-1][1] == begin:
                found[-1] = found[-1][0], end
            else:
                found.append((begin, end))
        return found

    @property
    def offsets(self) -> str:
        """Which are damaged, as a sentence has them."""
        shown = [_offsets(*one) for one in self.ranges]
        more = len(shown) - OFFSETS_SHOWN_MAX
        return ", ".join(shown[:OFFSETS_SHOWN_MAX]) + (f" and {more} more ranges" if more > 0 else "")

    def offsets_at(self, position: int) -> str | None:
        """Those around this byte of its file that nobody could give; None where there is none."""
        part = next((one for one in self.parts if one.position <= position < one.end), None)
        if part is None:
            return None if self.parts else self.offsets
        at = part.begin.offset
        return next(_offsets(begin, end) for begin, end in self.ranges if begin <= at <= end)

    def is_being_copied(self) -> UnavailableError:
        """The answer to a reader that need not wait for more than time."""
        return UnavailableError(
            f"Offsets {self.offsets} of shard {self.shard.number} are damaged on this broker, and are being "
            "copied from another one.",
            retry_after_ms=int(REPAIR_SOON_S * 1_000),
        )


_HAS_NOT: Final = frozenset({Code.CORRUPTION, Code.OFFSET_OUT_OF_RANGE})
"""A copy that answers with one of these does not have what it was asked for, and may have something else of the segment."""


class _Asked:
    """Who is asked in one attempt, and what became of it."""

    def __init__(self, damage: Damage, segment: SegmentState, peers: Sequence[str]) -> None:
        self.damage = damage
        self.peers = peers
        self.left_s = dict.fromkeys(peers, FROM_ONE_S + segment.segment_bytes / FROM_ONE_RATE)
        """how long each is waited for yet"""
        self.out = set[str]()
        """who is asked no more"""
        self.failed: dict[str, FelixError] = {}
        """who refused something, and what it said first"""
        self.refused: list[FelixError] = []
        self.missed = 0
        """parts that nobody could give"""


class Repairer:
    """See the module. `start` once the host has; `close` before it does."""

    def __init__(
        self,
        copies: Copies,
        source: Source,
        *,
        files: Files,
        pool: Executor,
        scrub_pool: Executor,
        runtime: Runtime,
        scrub: Scrub | None,
        alarm: Callable[[ShardId, str, Callable[[], bool]], None],
    ) -> None:
        """`pool`: of the threads that read and write segments; `scrub_pool`: that look at them. `alarm`: tells a person of something, until what is given says that it is over."""
        self.repaired = 0
        """segments"""
        self.found = 0
        """damaged segments"""
        self.checked_bytes = 0
        """by the scrub"""
        self.rounds = 0
        """in which the scrub has looked at every closed segment"""
        self._round_bytes = self._round_done = 0
        self._copies = copies
        self._source = source
        self._files = files
        self._pool = pool
        self._scrub_pool = scrub_pool
        self._runtime = runtime
        self._scrub_settings = scrub
        self._alarm = alarm
        self._damaged: dict[tuple[ShardId, int, int, int], Damage] = {}
        self._failed: dict[str, int] = {}
        """how often a broker was asked in vain since it last gave what it was asked for"""
        self._one = asyncio.Lock()
        self._tasks = TaskSet()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    def start(self) -> None:
        """Look at closed segments from now on."""
        if self._scrub_settings is not None:
            self._tasks.begin(self._scrub(self._scrub_settings), name="scrub")

    async def close(self) -> None:
        """Do nothing more. What was not repaired is found again."""
        self._is_closed = True
        await self._tasks.end()

    @property
    def damaged(self) -> int:
        """Segments that are damaged and not repaired yet. From every thread."""
        return len(self._damaged)

    @property
    def progress(self) -> float:
        """How much of the copies here the scrub has looked at in this round, 0 to 1. From every thread."""
        return min(1.0, self._round_done / self._round_bytes) if self._round_bytes else 1.0

    # What readers ask

    def note(self, shard: ShardId, number: int, found: SegmentDamagedError) -> Damage | None:
        """A segment is damaged: it is being repaired from now on. None where the log does not have it any more."""
        place = parse_segment_name(found.path.name)
        disk = self._copies.disks(shard).get(number)
        if place is None or disk is None or self._is_closed or disk.plan.folder != found.path.parent:
            return None
        key = shard, number, *place
        damage = self._damaged.get(key)
        if damage is None:
            segment = disk.segment_at(*place)
            if segment is None:
                return None
            damage = self._damaged[key] = Damage(shard, number, segment)
            self.found += 1
            log.error("shard %s: %s It is repaired from another copy.", shard, found.sentence)
            self._tasks.begin(self._repair_until_done(key, damage), name="repair")
        return damage

    async def repair(self, shard: ShardId, number: int, found: SegmentDamagedError) -> None:
        """Return once it was repaired, or let go of. Raises UnavailableError where that takes longer than REPAIR_WAIT_S; CorruptionError where no
        copy in sync has what it held."""
        damage = self.note(shard, number, found)
        if damage is None:
            # Cut, compacted or let go of meanwhile: there is something else to be read.
            await asyncio.sleep(0)
            return
        has_waited = not damage.why
        try:
            async with asyncio.timeout(REPAIR_WAIT_S):
                while not damage.is_over and not damage.why:
                    await damage.news.wait()
        except TimeoutError:
            raise damage.is_being_copied() from None
        if damage.is_over:
            return
        if damage.is_copied:
            raise damage.is_being_copied()
        offsets = damage.offsets_at(found.position)
        if offsets is None:
            if has_waited:
                # What the reader found was filled, and something else of the segment was not.
                return
            raise damage.is_being_copied()
        raise CorruptionError(
            f"Offsets {offsets} of shard {shard.number} cannot be read: they are damaged on this broker's "
            f"disk, and no copy in sync could give them ({damage.why}).",
            hint="They are asked for again every ten seconds: start the brokers that have other copies, or read on behind them. "
            "All else of the shard is served.",
        )

    async def reading(self, shard: ShardId, number: int, read: Callable[[], _T], pool: Executor) -> _T:
        """What `read` returns, done in a thread, once what it finds damaged is repaired. Raises as `read` and `repair` do."""
        return await read_repaired(
            lambda: self._loop.run_in_executor(pool, read), partial(self.repair, shard, number)
        )

    # Repairs

    async def _repair_until_done(self, key: tuple[ShardId, int, int, int], damage: Damage) -> None:
        told = ""
        try:
            while True:
                outcome, why = await self._attempt(damage)
                if outcome in (Outcome.REPAIRED, Outcome.GONE):
                    break
                if outcome is not Outcome.SOON and told != damage.offsets:
                    told = damage.offsets
                    self._tell(damage, why)
                if outcome is not Outcome.SOON:
                    damage.why, damage.is_copied = why, outcome is Outcome.COPIED
                    damage.news.set()
                await asyncio.sleep(REPAIR_SOON_S if outcome is Outcome.SOON else REPAIR_AGAIN_S)
            if outcome is Outcome.REPAIRED:
                self.repaired += 1
                log.error(
                    "shard %s: offsets %s of log %d were damaged, and are repaired",
                    damage.shard,
                    damage.offsets,
                    damage.number,
                )
        finally:
            damage.is_over = True
            damage.news.set()
            del self._damaged[key]

    def _tell(self, damage: Damage, why: str) -> None:
        self._alarm(
            damage.shard,
            f"offsets {damage.offsets} of log {damage.number} are damaged on its disk, and could not be repaired "
            f"from a copy in sync yet ({why})",
            lambda: damage.is_over,
        )

    async def _attempt(self, damage: Damage) -> tuple[Outcome, str]:
        async with self._one:
            disk, segment = self._copies.disks(damage.shard).get(damage.number), damage.segment
            if disk is None or not any(one is segment for one in disk.log.segments):
                return Outcome.GONE, ""
            if self._copies.is_copying(damage.shard, damage.number):
                return Outcome.SOON, ""
            if segment.header.span is not None:
                if await self._holds(segment):
                    return Outcome.REPAIRED, ""
                return self._copy_anew(damage, "it was compacted")
            try:
                if not await self._run(disk.close_active, segment):
                    return Outcome.SOON, ""
                if segment.end_point > self._copies.committed(damage.shard, damage.number):
                    return Outcome.SOON, ""
                return await self._from_others(damage, disk, segment)
            except WorkEndedError:
                return Outcome.SOON, ""
            except OSError as error:
                if is_full(error):
                    return Outcome.LATER, "the disk is full"
                self._copies.hand_over(damage.shard)
                return Outcome.LATER, f"the disk: {error}"
            except FelixError as error:
                return Outcome.LATER, error.sentence.rstrip(".")

    async def _holds(self, segment: SegmentState) -> bool:
        """Whether all of it can be read by now: the disk did not give it for a moment."""
        check = SegmentCheck(self._files, segment)
        try:
            while not await self._run(check.step):
                pass
        except (SegmentDamagedError, OSError):
            return False
        return True

    def _copy_anew(self, damage: Damage, why: str) -> tuple[Outcome, str]:
        if self._copies.copy_anew(damage.shard, damage.number):
            return Outcome.COPIED, f"{why}, and the log is copied as a whole from its leader"
        return Outcome.LATER, "no other copy is in sync"

    async def _from_others(
        self, damage: Damage, disk: ReplicaDisk, segment: SegmentState
    ) -> tuple[Outcome, str]:
        """Fill each part that is lost from whoever has it, and put what was filled in its place."""
        peers = sorted(self._copies.in_sync(damage.shard), key=lambda peer: self._failed.get(peer, 0))
        asked = _Asked(damage, segment, peers)
        repair = disk.begin_repair(segment, damage.parts)
        known, skipped = bool(damage.parts), damage.missed
        try:
            if known and damage.is_unread and await self._run(repair.gives_parts):
                known, skipped = False, 0
            if not known:
                await self._run(repair.survey)
            for _ in range(skipped):
                await self._run(repair.leave)
            while repair.part is not None:
                if asked.missed < PARTS_MISSED_MAX and await self._fill(repair, asked):
                    continue
                asked.missed += asked.missed < PARTS_MISSED_MAX
                await self._run(repair.leave)
            damage.is_unread = repair.unread is not None or (known and damage.is_unread)
            if not repair.left or (repair.is_changed and not damage.is_unread):
                try:
                    if not await self._run(disk.finish_repair, repair):
                        return Outcome.GONE, ""
                except FelixError:
                    damage.parts, damage.missed = [], 0
                    raise
        finally:
            self._tell_refused(asked)
            with suppress(OSError):
                await self._run(repair.abandon)
        if repair.unread is not None and not damage.parts:
            log.error("shard %s: %s is not read whole: %s", damage.shard, segment.path, repair.unread)
        damage.parts = repair.left
        damage.missed = skipped + asked.missed if asked.missed == PARTS_MISSED_MAX else 0
        if damage.missed >= len(damage.parts):
            damage.missed = 0
        if not repair.left:
            return Outcome.REPAIRED, ""
        if (
            asked.refused
            and not repair.filled
            and all(error.code == Code.UNSUPPORTED for error in asked.refused)
            and self._copies.may_be_compacted(damage.shard, damage.number)
        ):
            return self._copy_anew(damage, "it was compacted elsewhere")
        why = asked.refused[-1].sentence.rstrip(".") if asked.refused else "no other copy is in sync"
        return Outcome.LATER, why

    async def _fill(self, repair: SegmentRepair, asked: _Asked) -> bool:
        """Whether the part was filled. Where what several copies gave does not fit, each of them is asked first in turn: one of them alone may have given
        something else."""
        part, misfits = repair.part, set[str]()
        for first in asked.peers:
            order = [first, *(peer for peer in asked.peers if peer != first)]
            is_fitting = await self._fill_around(order, misfits, repair, asked)
            if repair.part is not part:
                return True
            if is_fitting:
                return False
        return False

    async def _fill_around(
        self, order: Sequence[str], misfits: set[str], repair: SegmentRepair, asked: _Asked
    ) -> bool:
        """Ask these for the part, around, until it is filled or none of them has more: one may go on again behind what another one filled. False where what
        they gave does not fit, and was thrown away; `misfits`: who gave such a thing alone."""
        part, gave, missed = repair.part, set[str](), 0
        for peer in cycle(order):
            if missed == len(order):
                break
            missed += 1
            if peer in asked.out or peer in misfits:
                continue
            begun = repair.reached
            try:
                await self._give(peer, repair, asked)
            except WorkEndedError:
                raise
            except FelixError as error:
                self._refused(peer, asked, error)
                if repair.reached != begun:
                    gave.add(peer)
                    missed = 0
                if error.code == Code.CONFLICT:
                    if not gave - {peer}:
                        # Of this part alone: it may have guessed, and has the next one.
                        misfits.add(peer)
                    if repair.part is not None:
                        await self._run(repair.reset)
                    return False
                if error.code not in _HAS_NOT:
                    asked.out.add(peer)
            if repair.part is not part:
                break
        return True

    def _refused(self, peer: str, asked: _Asked, error: FelixError) -> None:
        asked.refused.append(error)
        if peer not in asked.failed:
            asked.failed[peer] = error
            self._failed[peer] = self._failed.get(peer, 0) + 1

    def _tell_refused(self, asked: _Asked) -> None:
        """In one line who could not give something: of the first attempts each, then rarely."""
        damage = asked.damage
        if asked.failed:
            damage.refused += 1
            if is_told(damage.refused):
                said = "; ".join(f"{peer}: {error.sentence}" for peer, error in asked.failed.items())
                log.warning(
                    "shard %s: not every broker can give what is damaged here of log %d (attempt %d): %s",
                    damage.shard,
                    damage.number,
                    damage.refused,
                    said,
                )

    async def _give(self, peer: str, repair: SegmentRepair, asked: _Asked) -> None:
        """Take what a peer has of the part. Raises what it refuses the rest with; UnavailableError where it takes too long."""
        part, damage = repair.part, asked.damage
        while repair.part is part:
            begin, with_annotations = repair.reached, repair.wants_annotations
            wanted = Wanted(damage.shard, damage.number, begin, repair.limit, with_annotations)
            asked_s = self._loop.time()
            try:
                async with asyncio.timeout(asked.left_s[peer]):
                    fetched = await self._source.fetch(peer, wanted)
            except TimeoutError:
                raise UnavailableError(f"Broker {peer} takes too long to give it.") from None
            finally:
                asked.left_s[peer] -= self._loop.time() - asked_s
            await self._run(repair.take, fetched.frames, fetched.annotations)
            if (
                repair.part is part
                and repair.reached == begin
                and repair.wants_annotations == with_annotations
            ):
                raise UnavailableError(f"Broker {peer} has no more of it.", code=Code.OFFSET_OUT_OF_RANGE)
        if peer not in asked.failed:
            self._failed.pop(peer, None)

    async def _run(self, work: Callable[..., _T], *arguments: object) -> _T:
        """What `work` returns, done in a thread; it has ended on return, also where this is cancelled: two threads never have one file."""
        done = self._loop.run_in_executor(self._pool, work, *arguments)
        cancelled: asyncio.CancelledError | None = None
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            if not done.cancelled():
                done.exception()
            raise cancelled
        return done.result()

    # The scrub

    async def _scrub(self, settings: Scrub) -> None:
        while True:
            begun = self._runtime.clock.boot_ms()
            if await self._look_at_all(settings):
                self.rounds += 1
                left_ms = settings.every_ms - (self._runtime.clock.boot_ms() - begun)
                await asyncio.sleep(max(SCRUB_LOOK_S, left_ms / 1_000))
            else:
                await asyncio.sleep(SCRUB_LOOK_S)

    async def _look_at_all(self, settings: Scrub) -> int:
        """Each segment that is closed now, once. How many there were."""
        todo = [
            (shard, number, segment)
            for shard in self._copies.shards
            for number, disk in self._copies.disks(shard).items()
            for segment in disk.log.segments[:-1]
            if segment.is_local
        ]
        self._round_bytes, self._round_done = sum(segment.segment_bytes for *_, segment in todo), 0
        for shard, number, segment in todo:
            before = self._round_done
            try:
                await self._look_at(shard, number, segment, settings.rate_bytes)
            except FelixError as error:
                log.error("shard %s: the scrub of log %d: %s", shard, number, error)
            except OSError as error:
                log.error(
                    "shard %s: the scrub cannot read %s: %s", shard, segment.path, error.strerror or error
                )
            self._round_done = before + segment.segment_bytes
        for shard in self._copies.shards:
            for disk in self._copies.disks(shard).values():
                with suppress(OSError, FelixError):
                    for path in await self._loop.run_in_executor(self._scrub_pool, disk.rewrite_small_files):
                        log.error("shard %s: %s was damaged, and is written again", shard, path)
                    if self._copies.is_in_sync(shard):
                        await self._loop.run_in_executor(self._scrub_pool, disk.forget_damaged)
        return len(todo)

    async def _look_at(self, shard: ShardId, number: int, segment: SegmentState, rate_bytes: int) -> None:
        check, size, done = SegmentCheck(self._files, segment), segment.segment_bytes, False

        def is_there() -> bool:
            """Whether the log still has the segment as it was: neither let go of, nor compacted, nor cut and perhaps written to again."""
            disk = self._copies.disks(shard).get(number)
            return (
                disk is not None
                and segment.is_local
                and segment.segment_bytes == size
                and any(one is segment for one in disk.log.segments[:-1])
            )

        while not done and is_there():
            at = check.position
            begun_s = self._runtime.clock.monotonic()
            try:
                done = await self._loop.run_in_executor(self._scrub_pool, check.step)
            except (FileNotFoundError, SegmentDamagedError) as error:
                # Of a segment that went meanwhile that is no damage.
                if is_there():
                    if not isinstance(error, SegmentDamagedError):
                        error = SegmentDamagedError(segment.path, 0, segment.base_offset, "it is gone")
                    self.note(shard, number, error)
                return
            looked = check.position - at
            self.checked_bytes += looked
            self._round_done += looked
            took_s = self._runtime.clock.monotonic() - begun_s
            await asyncio.sleep(max(looked / rate_bytes, took_s * (1 / SCRUB_SHARE - 1)))
