"""Message ids against a model: what is left out, what it is answered with, across restarts, refusals and retries."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from log.building import IDENTITY, SMALL, FailingFiles, serving
from long_runs import count
from runtimes import with_wall

from felix.batch import (
    MESSAGE_ID_BYTES_MAX,
    MESSAGE_ID_HEADER,
    Batch,
    NewRecord,
    decode_batch,
    decode_records,
    encode_batch,
)
from felix.errors import Code, FelixError, OffsetMismatchError, RequestError, UnavailableError
from felix.settings import EPHEMERAL, Deduplication
from region.log.message_ids import Identified, MessageIds, sift
from region.log.shard import IDS_CLOCK_AHEAD_MS, Appended, ShardHooks, ShardLog, ShardSettings

pytestmark = pytest.mark.timeout(120)

WINDOW = Deduplication(window_ms=1_000, ids_max=8)
DEDUPLICATING = ShardSettings(deduplication=WINDOW)

Given = tuple[str, str | None]
"""A record as a test gives it: payload, message id."""


def batch_of(
    *records: Given, producer: int = 0, epoch: int = 0, sequence: int = 0, compress: bool = False
) -> Batch:
    return encode_batch(
        [
            NewRecord(payload.encode(), headers={MESSAGE_ID_HEADER: found.encode()} if found else None)
            for payload, found in records
        ],
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        compress=compress,
    )


async def payloads(shard: ShardLog) -> dict[int, str]:
    """Everything in the log, by offset."""
    found: dict[int, str] = {}
    offset = shard.log_start_offset
    while entries := await shard.read(offset, 10_000):
        for entry in entries:
            for record in decode_records(decode_batch(entry.data)):
                found[record.offset] = bytes(record.payload).decode()
        offset = entries[-1].next_offset
    return found


def offsets_of(answer: Appended, records: int) -> tuple[int, ...]:
    return answer.offsets or tuple(range(answer.base_offset, answer.base_offset + records))


async def test_a_batch_of_new_and_repeated_ids_is_answered_record_by_record(tmp_path: Path) -> None:
    async with serving(tmp_path, DEDUPLICATING) as shard:
        first = await shard.append(batch_of(("a", "1"), ("b", "2")))
        assert (first.base_offset, first.offsets) == (0, ())
        mixed = await shard.append(
            batch_of(("c", "3"), ("again", "2"), ("plain", None), ("d", "4"), ("twice", "3"), compress=True)
        )
        assert mixed.offsets == (2, 1, 3, 4, 2)
        repeated = await shard.append(batch_of(("x", "4"), ("y", "1")))
        assert (repeated.offsets, repeated.duplicate) == ((4, 0), True)
        assert await payloads(shard) == {0: "a", 1: "b", 2: "c", 3: "plain", 4: "d"}
        assert shard.counters.repeated_ids == 4


async def test_the_window_comes_back_from_the_log(tmp_path: Path) -> None:
    async with serving(tmp_path, DEDUPLICATING) as shard:
        for number in range(12):
            await shard.append(batch_of((f"{number}", f"id-{number}")))
        assert shard.message_ids == WINDOW.ids_max
    async with serving(tmp_path, DEDUPLICATING) as shard:
        assert shard.message_ids == WINDOW.ids_max
        assert (await shard.append(batch_of(("x", "id-4")))).offsets == (4,)
        assert (await shard.append(batch_of(("forgotten", "id-3")))).base_offset == 12


async def test_the_window_comes_back_by_a_clock_that_is_ahead_for_as_long_as_the_shard_is_opened(
    tmp_path: Path,
) -> None:
    clock = 1_000_000
    hooks = ShardHooks(runtime=with_wall(lambda: clock))
    async with serving(tmp_path, DEDUPLICATING, hooks) as shard:
        await shard.append(batch_of(("a", "1")))
    clock += 3_600_000
    async with serving(tmp_path, DEDUPLICATING, hooks) as shard:
        clock -= 3_600_000
        assert (await shard.append(batch_of(("again", "1")))).offsets == (0,)
        clock += WINDOW.window_ms + 1
        assert (await shard.append(batch_of(("later", "1")))).base_offset == 1
    # What nobody wrote to for longer is not read for ids.
    clock += 2 * IDS_CLOCK_AHEAD_MS
    async with serving(tmp_path, DEDUPLICATING, hooks) as shard:
        assert shard.message_ids == 0


async def test_a_stream_that_does_not_ask_looks_at_no_id(tmp_path: Path) -> None:
    async with serving(tmp_path) as shard:
        for number in range(3):
            assert (await shard.append(batch_of((f"{number}", "same")))).base_offset == number
        assert shard.message_ids == 0


async def test_a_repetition_waits_for_the_first_one_and_fails_with_it(tmp_path: Path) -> None:
    files = FailingFiles()
    async with serving(tmp_path, DEDUPLICATING, files=files) as shard:
        await shard.append(batch_of(("kept", "0")))
        files.room = 0
        both = await asyncio.gather(
            shard.append(batch_of(("a", "1"))), shard.append(batch_of(("a", "1"))), return_exceptions=True
        )
        assert [type(answer) for answer in both] == [UnavailableError, UnavailableError]
        files.room = None
        async with asyncio.timeout(120):
            while True:
                try:
                    again = await shard.append(batch_of(("a", "1"), ("kept", "0")))
                    break
                except UnavailableError as error:
                    assert error.code is Code.DISK_FULL
                    await asyncio.sleep(0.05)
        assert again.offsets == (1, 0)


async def test_an_impossible_id_is_refused_and_a_fenced_producer_stays_fenced(tmp_path: Path) -> None:
    async with serving(tmp_path, DEDUPLICATING) as shard:
        for wrong in ("x" * 65,):
            with pytest.raises(RequestError, match="65 bytes"):
                await shard.append(batch_of(("a", wrong)))
        await shard.append(batch_of(("a", "1"), producer=5, epoch=1))
        with pytest.raises(RequestError) as fenced:
            await shard.append(batch_of(("a", "1"), producer=5, epoch=0))
        assert fenced.value.code is Code.PRODUCER_FENCED


async def test_conditions_and_ids_together(tmp_path: Path) -> None:
    async with serving(tmp_path, DEDUPLICATING) as shard:
        await shard.append(batch_of(("a", "1")), expected_offset=0)
        assert (await shard.append(batch_of(("a", "1")), expected_offset=0)).offsets == (0,), "it is there"
        with pytest.raises(OffsetMismatchError):
            await shard.append(batch_of(("a", "1"), ("b", "2")), expected_offset=0)
        assert (await shard.append(batch_of(("a", "1"), ("b", "2")), expected_offset=1)).offsets == (0, 1)


async def test_an_ephemeral_shard_remembers_while_it_lives() -> None:
    chosen = ShardSettings(durability=EPHEMERAL, deduplication=WINDOW)
    async with serving(None, chosen) as shard:
        await shard.append(batch_of(("a", "1")))
        assert (await shard.append(batch_of(("a", "1"), ("b", None)))).offsets == (0, 1)


async def append_as_it_is(shard: ShardLog, annotation: bytes, message_id: str = "1") -> Appended:
    future: asyncio.Future[Appended | FelixError] = asyncio.get_running_loop().create_future()
    batch = batch_of(("a", message_id))
    shard.append_nowait(batch, future.set_result, annotation=annotation, slot=1, as_it_is=True)
    answer = await future
    assert isinstance(answer, Appended)
    return answer


async def test_an_annotation_is_kept_where_every_record_is_left_out(tmp_path: Path) -> None:
    async with serving(tmp_path, DEDUPLICATING) as shard:
        await shard.append(batch_of(("a", "1")), annotation=b"@1", slot=1)
        repeated = await shard.append(batch_of(("a", "1")), annotation=b"@2", slot=1)
        assert (repeated.offsets, shard.annotations[1], shard.log_end_offset) == ((0,), b"@2", 1)
    async with serving(tmp_path, DEDUPLICATING) as shard:
        assert (shard.annotations[1], shard.log_end_offset) == (b"@2", 1)


async def test_what_comes_over_a_border_is_appended_as_it_is_and_remembered(tmp_path: Path) -> None:
    async with serving(tmp_path, DEDUPLICATING) as shard:
        await append_as_it_is(shard, b"@1")
        assert (await append_as_it_is(shard, b"@2")).base_offset == 1
        assert (await shard.append(batch_of(("a", "1")))).offsets == (1,)


async def test_an_impossible_id_stops_nothing_that_comes_over_a_border(tmp_path: Path) -> None:
    """Its producer wrote into a stream that does not look at ids, and nothing else can be sent in its place."""
    async with serving(tmp_path, DEDUPLICATING) as shard:
        for number, wrong in enumerate(("x" * (MESSAGE_ID_BYTES_MAX + 1),) * 3):
            assert (await append_as_it_is(shard, b"@", wrong)).base_offset == number
        assert shard.message_ids == 0
        assert (await append_as_it_is(shard, b"@", "2")).base_offset == 3
        assert (await shard.append(batch_of(("a", "2")))).offsets == (3,)


def test_what_is_rolled_back_is_forgotten_and_pushed_nothing_out() -> None:
    window = MessageIds(Deduplication(1_000, 2))
    window.record([Identified(b"a", 0, 10), Identified(b"b", 1, 10)])
    window.settle(10)
    window.record([Identified(b"c", 2, 11)])
    window.rollback(2)
    assert [window.find(found, 11) for found in (b"a", b"b", b"c")] == [0, 1, None]
    assert window.find(b"a", 1_010) == 0 and window.find(b"a", 1_011) is None
    sifted = sift(batch_of(("x", "a"), producer=1, sequence=7), [b"a"], window, 2, 11)
    assert (sifted.batch, sifted.offsets) == (None, (0,))


class Sent(NamedTuple):
    """A batch that was answered, kept for a retry."""

    records: tuple[Given, ...]
    epoch: int
    sequence: int
    offsets: tuple[int, ...]
    end: int
    """Where the log ended before it."""


class ShardAgainstModel(RuleBasedStateMachine):
    """A producer with sequences and one without, ids from a small alphabet, a clock that the test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="felix-ids-"))
        self.loop = asyncio.new_event_loop()
        self.pool = ThreadPoolExecutor(2)
        self.clock = 10_000
        self.log: list[tuple[str, str | None, int]] = []
        self.epoch = self.sequence = 0
        self.sent: list[Sent] = []
        self.restarts = 0
        self.shard = self.run(self.open())

    def run(self, work: object) -> object:
        return self.loop.run_until_complete(work)

    async def open(self) -> ShardLog:
        return await ShardLog.open(
            self.folder,
            IDENTITY,
            ShardSettings(deduplication=WINDOW, segments=SMALL),
            ShardHooks(runtime=with_wall(lambda: self.clock)),
            commit_pool=self.pool,
            read_pool=self.pool,
        )

    def window(self) -> dict[str, int]:
        """The newest ids within the window, from the model's log alone."""
        with_id = [(found, at, time) for at, (_, found, time) in enumerate(self.log) if found is not None]
        held = [entry for entry in with_id if entry[2] + WINDOW.window_ms >= self.last_time]
        return {
            found: at for found, at, time in held[-WINDOW.ids_max :] if time + WINDOW.window_ms >= self.clock
        }

    @property
    def last_time(self) -> int:
        return self.log[-1][2] if self.log else 0

    def expected(self, records: tuple[Given, ...]) -> tuple[int, ...]:
        window = self.window()
        offsets = []
        for payload, found in records:
            if found is not None and found in window:
                offsets.append(window[found])
                continue
            if found is not None:
                window[found] = len(self.log)
            offsets.append(len(self.log))
            self.log.append((payload, found, self.clock))
        return tuple(offsets)

    records = st.lists(
        st.tuples(
            st.text("xyz", max_size=3), st.one_of(st.none(), st.sampled_from([f"i{n}" for n in range(14)]))
        ),
        min_size=1,
        max_size=6,
    ).map(tuple)

    @rule(records=records, compress=st.booleans())
    def publish_without_sequence(self, records: tuple[Given, ...], compress: bool) -> None:
        answer = self.run(self.shard.append(batch_of(*records, compress=compress)))
        assert offsets_of(answer, len(records)) == self.expected(records)

    @rule(records=records)
    def publish_with_sequence(self, records: tuple[Given, ...]) -> None:
        batch = batch_of(*records, producer=9, epoch=self.epoch, sequence=self.sequence)
        try:
            answer = self.run(self.shard.append(batch))
        except RequestError as error:
            # Only where what the producer sent last left no trace in the log, and a restart came in between.
            assert error.code is Code.SEQUENCE_GAP and self.restarts
            self.epoch, self.sequence = self.epoch + 1, 0
            self.sent.clear()
            batch = batch_of(*records, producer=9, epoch=self.epoch, sequence=self.sequence)
            answer = self.run(self.shard.append(batch))
        offsets, end = offsets_of(answer, len(records)), len(self.log)
        assert offsets == self.expected(records)
        self.sent.append(Sent(records, self.epoch, self.sequence, offsets, end))
        self.sequence += len(records)

    @rule(back=st.integers(1, 5))
    def retry(self, back: int) -> None:
        """A batch whose answer was lost is sent again: nothing is appended, and it is answered alike."""
        if len(self.sent) < back:
            return
        sent = self.sent[-back]
        batch = batch_of(*sent.records, producer=9, epoch=sent.epoch, sequence=sent.sequence)
        window, end = self.window(), len(self.log)
        known = all(
            found is None or window.get(found) == at
            for at, (_, found) in zip(sent.offsets, sent.records, strict=True)
        )
        if not known and not self.kept(sent):
            return  # nothing of it is in the log, and its ids have left the window: it is a new batch
        try:
            answer = self.run(self.shard.append(batch))
        except RequestError as error:
            assert error.code is Code.SEQUENCE_GAP and not self.kept(sent) and not known
            return
        assert self.shard.log_end_offset == end
        if known:
            assert offsets_of(answer, len(sent.records)) == sent.offsets

    def kept(self, sent: Sent) -> list[int]:
        """What of it is in the log."""
        return [at for at in sent.offsets if at >= sent.end]

    @rule(by=st.integers(1, 700))
    def time_passes(self, by: int) -> None:
        self.clock += by

    @rule(ahead_ms=st.sampled_from((0, 0, 3_600_000)))
    def restart(self, ahead_ms: int) -> None:
        """By a clock that is set right before the next append."""
        self.run(self.shard.close())
        self.restarts += 1
        self.clock += ahead_ms
        self.shard = self.run(self.open())
        self.clock -= ahead_ms

    @rule()
    def look(self) -> None:
        held = self.run(payloads(self.shard))
        assert held == {at: payload for at, (payload, _, _) in enumerate(self.log)}

    def teardown(self) -> None:
        self.look()
        self.run(self.shard.close())
        self.pool.shutdown()
        self.loop.close()
        shutil.rmtree(self.folder)


TestShardAgainstModel = ShardAgainstModel.TestCase
TestShardAgainstModel.settings = settings(max_examples=count(30, 80), stateful_step_count=40, deadline=None)
