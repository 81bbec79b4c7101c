"""A repair and the scrub beside what else happens to a log: each test holds one of them up where the two meet."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event, current_thread, main_thread

import pytest
from replication.sealed import IDENTITY, entry, position

from felix.errors import Code, CorruptionError, ProtocolError, RequestError, UnavailableError
from felix.runtime.real import REAL
from felix.storage.memory import MemoryDisk, MemoryFiles
from region.cluster.records import ShardId
from region.log.compactor import WorkEndedError
from region.log.errors import SegmentDamagedError
from region.log.frame import Frame
from region.log.point import LogPoint
from region.log.scrub import Scrub
from region.log.segment_limits import SegmentLimits
from region.log.segment_scan import scan_file
from region.replication import repairer
from region.replication.disk import LogPlan, ReplicaDisk
from region.replication.history import EpochStart
from region.replication.repairer import Fetched, Repairer, Wanted

SHARD = ShardId("ab" * 16, 0)
PLAN = LogPlan(0, Path("/shard"), IDENTITY, SegmentLimits(segment_bytes_max=900))


def replica(files: MemoryFiles) -> ReplicaDisk:
    found = ReplicaDisk.open(PLAN, files=files)
    starts = (EpochStart(1, f"{1:016x}", LogPoint(0)),)
    for at in range(40):
        found.write(found.log.end_point, [entry(at, 1, payload=b"." * 60)], starts, now_ms=1_000)
    found.sync()
    return found


class Copies:
    """A copy here, and one of the same log elsewhere, which is asked: both have it all committed."""

    def __init__(self) -> None:
        self.is_compacted_elsewhere = self.is_compacted = False
        self.peers = ["b"]
        self.asked: list[str] = []
        self.copied_anew = self.handed_over = 0
        self.disk = MemoryDisk()
        self.files = self.disk.mount()
        self.here = replica(self.files)
        self.other = replica(MemoryDisk().mount())

    @property
    def shards(self) -> list[ShardId]:
        return [SHARD]

    def disks(self, shard: ShardId) -> dict[int, ReplicaDisk]:
        return {0: self.here}

    def committed(self, shard: ShardId, number: int) -> LogPoint:
        return self.here.log.end_point

    def in_sync(self, shard: ShardId) -> list[str]:
        return self.peers

    def hand_over(self, shard: ShardId) -> None:
        self.handed_over += 1

    def is_copying(self, shard: ShardId, number: int) -> bool:
        return False

    def is_in_sync(self, shard: ShardId) -> bool:
        return True

    def may_be_compacted(self, shard: ShardId, number: int) -> bool:
        return self.is_compacted

    def copy_anew(self, shard: ShardId, number: int) -> bool:
        self.copied_anew += 1
        return True

    async def fetch(self, peer: str, wanted: Wanted) -> Fetched:
        self.asked.append(peer)
        if self.is_compacted_elsewhere:
            raise RequestError("It was compacted.", code=Code.UNSUPPORTED)
        log = self.other.log
        annotations = log.annotations_at(wanted.begin) if wanted.with_annotations else {}
        return Fetched(annotations, log.read_frames(wanted.begin, 300, wanted.end, is_guessed=True))

    def damage(self) -> SegmentDamagedError:
        """The first segment's, as whoever reads finds it."""
        segment = self.here.log.segments[0]
        self.disk.flip(segment.path, (segment.start + 20) * 8)
        return SegmentDamagedError(segment.path, segment.start, 0, "a bit flipped")


@dataclass
class Asked:
    copies: Copies
    repairs: Repairer
    alarms: list[str]


@contextmanager
def repairing(scrub: Scrub | None = None) -> Iterator[Asked]:
    """To be used on the loop; who uses it closes the repairer."""
    copies, alarms = Copies(), list[str]()
    with ThreadPoolExecutor(4) as pool:
        yield Asked(
            copies,
            Repairer(
                copies, copies, files=copies.files, pool=pool, scrub_pool=pool, runtime=REAL, scrub=scrub,
                alarm=lambda shard, sentence, is_over: alarms.append(sentence),
            ),
            alarms,
        )  # fmt: skip


def is_aside(path: Path) -> bool:
    return path.suffix == ".tmp"


async def test_a_repair_that_is_ended_lets_go_of_its_file_once_nothing_writes_to_it_any_more() -> None:
    with repairing() as asked:
        writes, may_go_on, calls = Event(), Event(), list[str]()

        def held_up(name: str, path: Path) -> None:
            if is_aside(path) and name == "pwritev":
                writes.set()
                may_go_on.wait()
                calls.append("written")
            elif is_aside(path) and name == "close":
                calls.append("closed")

        asked.copies.disk.on_call = held_up
        asked.repairs.note(SHARD, 0, asked.copies.damage())
        await asyncio.to_thread(writes.wait)
        closing = asyncio.create_task(asked.repairs.close())
        for _ in range(100):
            await asyncio.sleep(0)
        may_go_on.set()
        await closing
        assert "closed" not in calls[:-1] and calls[-1] == "closed"
        assert not any(map(is_aside, asked.copies.disk.files()))


async def test_a_repair_waits_for_no_pass_of_compaction() -> None:
    with repairing() as asked:
        damage = asked.repairs.note(SHARD, 0, asked.copies.damage())
        assert damage is not None
        with asked.copies.here._compacting:
            await damage.news.wait()
        assert damage.is_over and asked.repairs.repaired == 1
        assert asked.copies.here.log.read(0, 100, 1)
        await asked.repairs.close()


async def test_a_repair_that_is_done_after_its_log_was_closed_changes_nothing() -> None:
    with repairing() as asked:
        here, segment = asked.copies.here, asked.copies.here.log.segments[0]
        asked.copies.damage()
        repair = here.begin_repair(segment)
        repair.survey()
        while repair.part:
            repair.take(asked.copies.other.log.read_frames(repair.reached, 300, segment.end_point), {})
        here.close()
        with pytest.raises(WorkEndedError):
            here.finish_repair(repair)
        repair.abandon()
        with pytest.raises(SegmentDamagedError):
            here.log.read(0, 100, 1)


async def test_a_reader_of_a_log_that_is_copied_as_a_whole_is_told_to_come_again() -> None:
    with repairing() as asked:
        asked.copies.is_compacted_elsewhere = asked.copies.is_compacted = True
        with pytest.raises(UnavailableError, match="are being copied") as told:
            await asked.repairs.repair(SHARD, 0, asked.copies.damage())
        assert told.value.retry_after_ms
        await asked.repairs.close()


async def test_a_repair_for_which_there_is_no_room_leaves_no_file_open() -> None:
    with repairing() as asked:
        opened = list[Path]()
        closed = list[Path]()

        def full(name: str, path: Path) -> None:
            if not is_aside(path):
                return
            if name == "open":
                opened.append(path)
            elif name == "close":
                closed.append(path)
            elif name == "pwritev":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        asked.copies.disk.on_call = full
        damage = asked.repairs.note(SHARD, 0, asked.copies.damage())
        assert damage is not None
        await damage.news.wait()
        assert damage.why == "the disk is full" and "the disk is full" in asked.alarms[0]
        assert opened and closed == opened
        assert not any(map(is_aside, asked.copies.disk.files()))
        await asked.repairs.close()


async def test_a_segment_that_is_cut_while_the_scrub_looks_at_it_is_not_damaged() -> None:
    with repairing(Scrub(every_ms=1)) as asked:
        here = asked.copies.here
        last = here.log.segments[-2]
        cut = LogPoint(last.base_offset + 2)

        def cut_first(name: str, path: Path) -> None:
            if name == "pread" and path == last.path and current_thread() is not main_thread():
                asked.copies.disk.on_call = None
                here.cut(cut)

        asked.copies.disk.on_call = cut_first
        asked.repairs.start()
        while not asked.repairs.rounds:  # noqa: ASYNC110 - counted by the scrub, which tells nobody
            await asyncio.sleep(0.001)
        assert here.log.end_point == cut, "it was looked at"
        await asked.repairs.close()
        assert not asked.repairs.found and not asked.alarms


async def no_answer(peer: str, wanted: Wanted) -> Fetched:
    await asyncio.Event().wait()
    raise AssertionError


async def refused_answer(peer: str, wanted: Wanted) -> Fetched:
    raise ProtocolError(f"Broker {peer} tells of an annotation in slot -1.", code=Code.FRAME_MALFORMED)


async def says_compacted(peer: str, wanted: Wanted) -> Fetched:
    raise RequestError("It was compacted.", code=Code.UNSUPPORTED)


async def of_another_segment(peer: str, wanted: Wanted) -> Fetched:
    return Fetched({}, [entry(wanted.begin.offset + 5, 1)])


@pytest.mark.parametrize("ill", [no_answer, refused_answer, says_compacted, of_another_segment])
async def test_whatever_one_copy_answers_another_one_is_asked_and_first_from_then_on(
    ill: Callable[[str, Wanted], Awaitable[Fetched]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repairer, "FROM_ONE_S", 0.2)
    with repairing() as asked:
        copies = asked.copies
        copies.peers, honest = ["ill", "honest"], copies.fetch

        async def fetch(peer: str, wanted: Wanted) -> Fetched:
            if peer == "ill":
                copies.asked.append(peer)
                return await ill(peer, wanted)
            return await honest(peer, wanted)

        monkeypatch.setattr(copies, "fetch", fetch)
        for times in (1, 2):
            damage = asked.repairs.note(SHARD, 0, copies.damage())
            assert damage is not None
            await damage.news.wait()
            assert damage.is_over and asked.repairs.repaired == times
        assert copies.asked.count("ill") == 1 and not copies.copied_anew and not asked.alarms
        await asked.repairs.close()


@pytest.mark.parametrize("is_compacted", [False, True])
async def test_a_copy_that_says_that_it_was_compacted_has_no_log_copied_while_another_one_says_otherwise(
    is_compacted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where the stream is not compacted, whoever says so."""
    with repairing() as asked:
        copies = asked.copies
        copies.peers, copies.is_compacted = ["ill", "busy"] if is_compacted else ["ill"], is_compacted

        async def fetch(peer: str, wanted: Wanted) -> Fetched:
            if peer == "ill":
                return await says_compacted(peer, wanted)
            raise UnavailableError("It is busy.")

        monkeypatch.setattr(copies, "fetch", fetch)
        damage = asked.repairs.note(SHARD, 0, copies.damage())
        assert damage is not None
        await damage.news.wait()
        assert not damage.is_over and not damage.is_copied and not copies.copied_anew and asked.alarms
        await asked.repairs.close()


def hurt(disk: MemoryDisk, replica: ReplicaDisk, *numbers: int) -> None:
    """Flip a bit in these batches of the first segment, which are as long as each other."""
    segment = replica.log.segments[0]
    each = (segment.segment_bytes - segment.start) // (segment.next_offset - segment.base_offset)
    for number in numbers:
        disk.flip(segment.path, (segment.start + number * each + 20) * 8)


class Elsewhere:
    """Two more copies, which have damage of their own."""

    def __init__(self, copies: Copies) -> None:
        copies.peers = ["b", "c"]
        self.disks = {name: MemoryDisk() for name in copies.peers}
        self.replicas = {name: replica(disk.mount()) for name, disk in self.disks.items()}

    def hurt(self, name: str, *numbers: int) -> None:
        hurt(self.disks[name], self.replicas[name], *numbers)

    async def fetch(self, peer: str, wanted: Wanted) -> Fetched:
        log = self.replicas[peer].log
        annotations = log.annotations_at(wanted.begin) if wanted.with_annotations else {}
        return Fetched(annotations, log.read_frames(wanted.begin, 300, wanted.end, is_guessed=True))


async def test_copies_that_are_each_damaged_elsewhere_repair_one_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The damage here spans two batches, of which each other copy has another one."""
    with repairing() as asked:
        copies, others = asked.copies, Elsewhere(asked.copies)
        monkeypatch.setattr(copies, "fetch", others.fetch)
        others.hurt("b", 1)
        others.hurt("c", 2)
        hurt(copies.disk, copies.here, 0, 1, 2)
        segment = copies.here.log.segments[0]
        await asked.repairs.repair(
            SHARD, 0, SegmentDamagedError(segment.path, segment.start, 0, "a bit flipped")
        )
        assert asked.repairs.repaired == 1 and not asked.alarms
        read = copies.here.log.read_frames(segment.base_point, 1 << 20, segment.end_point)
        whole = copies.other.log.read_frames(segment.base_point, 1 << 20, segment.end_point)
        assert len(read) == len(whole) and all(map(Frame.stands_as, read, whole))
        await asked.repairs.close()


async def test_what_no_copy_has_is_refused_alone_and_filled_once_one_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repairer, "REPAIR_AGAIN_S", 0.01)
    with repairing() as asked:
        copies, others = asked.copies, Elsewhere(asked.copies)
        monkeypatch.setattr(copies, "fetch", others.fetch)
        others.hurt("b", 0, 2)
        others.hurt("c", 2)
        hurt(copies.disk, copies.here, 0, 2)
        log, segment = copies.here.log, copies.here.log.segments[0]

        async def read(offset: int) -> int:
            """Up to where batches come from here."""
            found = await asked.repairs.reading(
                SHARD,
                0,
                lambda: log.read(offset, 1 << 20, segment.next_offset, around_damage=True),
                asked.repairs._pool,
            )
            return found[-1].header.next_offset

        with pytest.raises(CorruptionError, match="Offsets 2 to 2 of shard 0 cannot be read"):
            await read(2)
        assert "offsets 2 to 2 of log 0" in asked.alarms[-1]
        assert (await read(0), await read(1), await read(3)) == (2, 2, segment.next_offset)
        damage = asked.repairs.note(SHARD, 0, SegmentDamagedError(segment.path, 0, 2, ""))
        assert damage is not None and not damage.is_over
        others.hurt("b", 2)
        while asked.repairs.damaged:  # noqa: ASYNC110 - its news were told already
            await asyncio.sleep(0.01)
        assert asked.repairs.repaired == 1 and await read(0) == segment.next_offset
        await asked.repairs.close()


async def test_the_log_says_of_what_nobody_gives_once_an_attempt_and_then_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(repairer, "REPAIR_AGAIN_S", 0.0)
    with repairing() as asked:
        copies, others = asked.copies, Elsewhere(asked.copies)
        monkeypatch.setattr(copies, "fetch", others.fetch)
        others.hurt("b", 2)
        others.hurt("c", 2)
        hurt(copies.disk, copies.here, 2)
        segment = copies.here.log.segments[0]
        damage = asked.repairs.note(SHARD, 0, SegmentDamagedError(segment.path, segment.start, 0, "a bit"))
        assert damage is not None
        while damage.refused < 20:  # noqa: ASYNC110 - no event is set for it
            await asyncio.sleep(0.01)
        await asked.repairs.close()
        told = [each.message for each in caplog.records if "not every broker can give" in each.message]
        until = damage.refused
        assert len(told) == sum(map(repairer.is_told, range(1, until + 1))) == until.bit_length()
        assert all("b: " in each and "c: " in each for each in told)


def test_what_fails_every_ten_seconds_is_told_at_last_once_in_an_hour() -> None:
    told = [attempt for attempt in range(1, 8_640) if repairer.is_told(attempt)]
    assert told[:5] == [1, 2, 4, 8, 16]
    assert len(told) < 24 + 14 and max(after - before for before, after in pairwise(told)) == 360


async def test_a_copy_that_guessed_wrongly_before_a_part_that_nobody_has_still_gives_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_position(files: MemoryFiles) -> ReplicaDisk:
        found = ReplicaDisk.open(PLAN, files=files)
        starts = (EpochStart(1, f"{1:016x}", LogPoint(0)),)
        for at in range(12):
            found.write(found.log.end_point, [entry(at, 1, payload=b"." * 60)], starts, now_ms=1_000)
            if at == 1:
                found.write(found.log.end_point, [position(2, 1, b"position", 1)], starts, now_ms=1_000)
        found.sync()
        return found

    def flip(disk: MemoryDisk, of: ReplicaDisk, *numbers: int) -> None:
        """In the heads of these entries, counted as they stand in the file."""
        segment = of.log.segments[0]
        file = of.log._files.open(segment.path, os.O_RDONLY)
        entries = scan_file(
            of.log._files, file, segment.header, segment.start, segment.segment_bytes, verify_bodies=False
        )
        for at in [each.position for number, each in enumerate(entries) if number in numbers]:
            disk.flip(segment.path, (at + 6) * 8)

    monkeypatch.setattr(sys.modules[__name__], "replica", with_position)
    monkeypatch.setattr(repairer, "REPAIR_AGAIN_S", 0.01)
    with repairing() as asked:
        copies, others = asked.copies, Elsewhere(asked.copies)
        monkeypatch.setattr(copies, "fetch", others.fetch)
        # Nobody has the position, and b, which lacks what stands in front of it as well, cannot know of it. It has batch 3.
        flip(copies.disk, copies.here, 2, 4)
        flip(others.disks["b"], others.replicas["b"], 1, 2)
        flip(others.disks["c"], others.replicas["c"], 2, 4)
        segment = copies.here.log.segments[0]
        damage = asked.repairs.note(
            SHARD, 0, SegmentDamagedError(segment.path, segment.start, 0, "a bit flipped")
        )
        assert damage is not None
        async with asyncio.timeout(30):
            while len(damage.parts) != 1:  # noqa: ASYNC110 - each attempt is news of its own
                await asyncio.sleep(0.01)
        (frame,) = copies.here.log.read_frames(LogPoint(3), 1, segment.end_point)
        assert frame.base_offset == 3
        await asked.repairs.close()


def unread(copies: Copies, path: Path) -> None:
    """The disk does not give this file, until another one takes its place."""

    def on_call(name: str, of: Path) -> None:
        if name == "rename" and path.name in of.name:
            copies.disk.on_call = None
        elif name == "pread" and of == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(of))

    copies.disk.on_call = on_call


def bytes_of(copies: Copies, path: Path) -> bytes:
    descriptor = copies.files.open(path, os.O_RDONLY)
    try:
        return copies.files.pread(descriptor, copies.files.size(descriptor), 0)
    finally:
        copies.files.close(descriptor)


async def test_what_the_disk_does_not_give_is_written_anew_from_another_copy() -> None:
    with repairing() as asked:
        copies, segment = asked.copies, asked.copies.here.log.segments[1]
        was = bytes_of(copies, segment.path)
        unread(copies, segment.path)
        with pytest.raises(SegmentDamagedError) as found:
            copies.here.log.read(segment.base_offset, 100, segment.next_offset)
        await asked.repairs.repair(SHARD, 0, found.value)
        assert copies.here.log.read(segment.base_offset, 100, segment.next_offset)
        assert bytes_of(copies, segment.path) == was
        await asked.repairs.close()


async def test_the_scrub_finds_what_the_disk_does_not_give() -> None:
    with repairing(Scrub(every_ms=1)) as asked:
        segment = asked.copies.here.log.segments[1]
        unread(asked.copies, segment.path)
        asked.repairs.start()
        while not asked.repairs.repaired:  # noqa: ASYNC110 - counted by the repairer, which tells nobody
            await asyncio.sleep(0.001)
        assert asked.copies.here.log.read(segment.base_offset, 100, segment.next_offset)
        await asked.repairs.close()


async def test_what_the_disk_does_not_give_for_a_while_and_nobody_else_has_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repairer, "REPAIR_AGAIN_S", 0.001)
    with repairing() as asked:
        copies, segment = asked.copies, asked.copies.here.log.segments[1]
        was, tries = bytes_of(copies, segment.path), Counter[str]()
        copies.peers = []

        def on_call(name: str, of: Path) -> None:
            if of == segment.path:
                tries[name] += 1
                if name == "pread":
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(of))

        copies.disk.on_call = on_call
        with pytest.raises(SegmentDamagedError) as found:
            copies.here.log.read(segment.base_offset, 100, segment.next_offset)
        with pytest.raises(CorruptionError, match="no copy in sync could give them"):
            await asked.repairs.repair(SHARD, 0, found.value)
        before = tries["open"]
        while tries["open"] < before + 5:  # noqa: ASYNC110 - of its disk alone
            await asyncio.sleep(0.001)
        # What is lost was found once: since then it was only looked whether the disk gives it.
        assert tries["pread"] - before < 40
        copies.disk.on_call = None
        assert bytes_of(copies, segment.path) == was
        while asked.repairs.damaged:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert bytes_of(copies, segment.path) == was and not any(map(is_aside, copies.disk.files()))
        await asked.repairs.close()


async def test_where_the_disk_takes_no_repair_another_copy_is_led() -> None:
    with repairing() as asked:

        def broken(name: str, path: Path) -> None:
            if is_aside(path) and name == "pwritev":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

        asked.copies.disk.on_call = broken
        damage = asked.repairs.note(SHARD, 0, asked.copies.damage())
        assert damage is not None
        await damage.news.wait()
        assert asked.copies.handed_over == 1 and "Input/output" in damage.why
        await asked.repairs.close()
