"""Redrive: dead letters of a durable subscription are given back to it, oldest first, in pages.

The stream is read by others, too, so nothing is published: the record that a dead letter stands for, which is in the stream still, is delivered to this
subscription once more, with no attempt counted (region.subscriptions.returns). A dead letter whose record is gone stays where it is, and so does one that a
worker has leased. Invariant: between looking whether a dead letter and its record are free, and keeping both, nothing else runs.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from felix.batch import Record, decode_batch, decode_records
from felix.errors import RequestError, UnavailableError
from felix.messages import Redriven, RedriveSubscription
from region.gather import Gather, resolving
from region.log.errors import OffsetOutOfRangeError
from region.log.shard import ShardLog
from region.queue.service import Queue
from region.queue.shard import QueueShard
from region.subscriptions.entries import Returning
from region.subscriptions.letters import Letter, LetterQueues
from region.subscriptions.subscription import DurableSubscription
from region.views.dead_letter import entry_body

READ_BYTES: Final = 128 << 10
"""Of dead letters at a time."""
PAGE_BYTES: Final = 8 << 20
"""Of dead letters, others' among them, and of the batches that their records lie in, looked at for one page: some 100 ms, and 1 s of small records. Others are
served in between, after each such batch and each READ_BYTES."""
SETTLE_WAIT_S: Final = 5.0
"""How long is waited for what is on its way to the dead letters: a full disk must not hold it up for ever."""
RETURN_WAIT_S: Final = 20.0
"""The same of what is on its way back."""


class _Place(NamedTuple):
    """Where a page begins: behind the dead letters before this one."""

    queue: str = ""
    shard: int = 0
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> _Place:
        """Raises RequestError(INVALID)."""
        queue, *numbers = text.split(" ")
        if not text:
            return cls()
        if len(numbers) != 2 or not all(each.isdecimal() and len(each) <= 18 for each in numbers):
            raise RequestError(
                f"{text!r} is no place that a page of a redrive ended at.", hint="Begin without one."
            )
        return cls(queue, int(numbers[0]), int(numbers[1]))

    def __str__(self) -> str:
        return f"{self.queue} {self.shard} {self.offset}"


class _Records:
    """Records by their places. The batch that was read last is kept: dead letters mostly lie as their records do."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._shard = -1
        self._batch: list[Record] = []

    async def at(self, shard: ShardLog, offset: int) -> Record | None:
        """None where the log does not hold it. Raises what reading a log raises."""
        batch = self._batch if self._shard == shard.identity.shard else []
        if not batch or not batch[0].offset <= offset <= batch[-1].offset:
            batch = await self._read(shard, offset)
            self._shard, self._batch = shard.identity.shard, batch
        at = bisect_left(batch, offset, key=lambda record: record.offset)
        return batch[at] if at < len(batch) and batch[at].offset == offset else None

    async def _read(self, shard: ShardLog, offset: int) -> list[Record]:
        await asyncio.sleep(0)  # what is in memory is read without any wait
        if not shard.log_start_offset <= offset < shard.high_watermark:
            return []
        try:
            entries = await shard.read(offset, 1)
        except OffsetOutOfRangeError:
            return []  # retention was faster
        self.bytes_read += sum(len(entry.data) for entry in entries)
        return list(decode_records(decode_batch(entry_body(entries[0])))) if entries else []


class _Page:
    """What a page has come to."""

    def __init__(self, records: int) -> None:
        self.left = records
        self.bytes_read = 0
        self.redriven = self.gone = self.held = 0
        self.full = False
        self.records = _Records()

    @property
    def has_read_enough(self) -> bool:
        return self.bytes_read + self.records.bytes_read >= PAGE_BYTES

    @property
    def is_over(self) -> bool:
        return self.left <= 0 or self.has_read_enough or self.full

    def answer(self, after: _Place | None) -> Redriven:
        following = "" if after is None or self.full else str(after)
        return Redriven(self.redriven, self.gone, self.held, self.full, following)


class Redrive:
    """See the module."""

    def __init__(self, letters: LetterQueues) -> None:
        self._letters = letters

    async def page(self, found: DurableSubscription, request: RedriveSubscription) -> Redriven:
        """Give some of the dead letters back, those that are just on their way there included. Raises what opening their queues and reading logs raises,
        UnavailableError."""
        at = _Place.parse(request.after)
        page = _Page(request.records)
        async with found.redriving:
            if not request.after:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SETTLE_WAIT_S):
                        await found.settle_dead()
            queues = await self._letters.of(found.stream.name, found.definition.settings.retries)
            names = [str(queue.stream.name) for queue in queues]
            for queue in queues[names.index(at.queue) if at.queue in names else 0 :]:
                name = str(queue.stream.name)
                at = at if at.queue == name else _Place(name)
                for shard in queue.shards[at.shard :]:
                    offset = await self._shard(
                        found, queue, shard, at.offset if at.shard == shard.number else 0, page
                    )
                    if page.is_over:
                        return page.answer(_Place(name, shard.number, offset))
        return page.answer(None)

    async def _shard(
        self, found: DurableSubscription, queue: Queue, shard: QueueShard, offset: int, page: _Page
    ) -> int:
        """Those of one shard of a queue, from `offset` on. Returns where it has come to."""
        producers = self._letters.producers(found.stream, found.id, queue.stream.name)
        offset, end = max(offset, shard.state.floor), shard.log.high_watermark
        while offset < end and not page.is_over:
            await asyncio.sleep(0)
            offset = max(offset, shard.log.log_start_offset)
            try:
                entries = await shard.log.read(offset, READ_BYTES)
            except OffsetOutOfRangeError:
                continue  # what was done there was let go of
            chosen: list[Letter] = []
            for entry in entries:
                if len(chosen) >= page.left or page.has_read_enough:
                    break
                if entry.next_offset > offset:
                    for letter in self._letters.among([entry], producers, shard):
                        if letter.is_of(
                            await page.records.at(found.stream.shard(letter.shard), letter.offset)
                        ):
                            chosen.append(letter)
                        else:
                            page.gone += 1
                    offset = entry.next_offset
                    page.bytes_read += len(entry.data)
            await self._give_back(found, queue, shard, chosen, page)
        return offset

    async def _give_back(
        self,
        found: DurableSubscription,
        queue: Queue,
        shard: QueueShard,
        letters: Sequence[Letter],
        page: _Page,
    ) -> None:
        if not letters:
            return
        if found.is_returning:
            raise _on_their_way(found)
        shard.check()
        refused = found.refusal()
        if refused is not None:
            raise refused.with_traceback(None)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        over.add_done_callback(_heard)  # also where nobody waits for it any more
        gather = Gather(resolving(over))
        for number in sorted({letter.shard for letter in letters}):
            free = self._free(found, shard, [each for each in letters if each.shard == number], page)
            if not free:
                continue
            shard.keep([each.record.offset for each in free])
            returning = Returning(
                found.id,
                str(queue.stream.name),
                queue.stream.incarnation,
                shard.number,
                [each.record.offset for each in free],
                [each.offset for each in free],
            )
            found.give_back(number, returning, gather.part())
            page.redriven += len(free)
            page.left -= len(free)
        gather.asked()
        try:
            async with asyncio.timeout(RETURN_WAIT_S):
                await asyncio.shield(over)
        except TimeoutError:
            raise _on_their_way(found) from None

    def _free(
        self, found: DurableSubscription, shard: QueueShard, letters: Sequence[Letter], page: _Page
    ) -> list[Letter]:
        """Which of these, all of one shard of the stream, can be given back now; the others are counted."""
        records, progress = found.stream.shard(letters[0].shard), found.progress(letters[0].shard)
        free: list[Letter] = []
        seen: set[int] = set()
        for letter in letters:
            if letter.offset < records.log_start_offset:
                page.gone += 1
            elif not progress.fits(len(free)):
                page.full = True
                break
            elif shard.is_done(letter.record.offset):
                continue
            elif (
                letter.offset in seen
                or progress.is_taken(letter.offset)
                or not shard.is_free(letter.record.offset)
            ):
                page.held += 1
            else:
                seen.add(letter.offset)
                free.append(letter)
        return free


def _heard(over: asyncio.Future[None]) -> None:
    if not over.cancelled():
        over.exception()


def _on_their_way(found: DurableSubscription) -> UnavailableError:
    return UnavailableError(
        f"Dead letters of {found.definition.name} of {found.stream.name} are still on their way back: they cannot be taken out of their queue yet.",
        hint="Try again: they come back by themselves, and none twice. The broker's log says what holds them up.",
        retry_after_ms=1_000,
    )
