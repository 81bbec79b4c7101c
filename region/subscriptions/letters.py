"""Dead letters of durable subscriptions in the queues that they lie in: whose they are, and how they are taken out.

A dead letter is a subscription's own by the producer id that it was appended under: no client may use it, and it stands for one incarnation of a stream,
one of its shards, and one of all subscriptions that ever had its name. Used by `store` and `redrive`, on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from felix.batch import Record, decode_batch, decode_header, decode_records
from felix.errors import Code, RequestError, UnavailableError
from felix.names import StreamName
from felix.settings import Retries
from region.broker import Broker
from region.gather import awaited
from region.log.companions import JournalKind
from region.log.ring import Entry
from region.log.shard import ShardLog
from region.metadata.catalog import Catalog
from region.queue.service import Queue, QueueService
from region.queue.shard import QueueShard
from region.streams.hosted import ELSEWHERE_RETRY_MS, HostedStream
from region.subscriptions.entries import Returning
from region.views.dead_letter import (
    DEAD_GONE,
    DEAD_OFFSET,
    as_given,
    dead_letter_name,
    entry_body,
    producer_of,
)


class Letter(NamedTuple):
    """A dead letter: where it lies, what it says, and the place of the record that it stands for."""

    record: Record
    shard: int
    offset: int

    def is_of(self, record: Record | None) -> bool:
        """Whether this is the record that it stands for. Where its log lost its end, others may stand in that place."""
        if record is None or bytes(record.key or b"") != bytes(self.record.key or b""):
            return False
        if DEAD_GONE in self.record.headers:
            # What it said did not fit beside its headers.
            return record.timestamp_ms <= self.record.timestamp_ms
        headers = as_given(self.record)
        return bytes(record.payload) == bytes(self.record.payload) and all(
            record.headers.get(name) == value for name, value in headers.items()
        )


class LetterQueues:
    """See the module."""

    def __init__(self, broker: Broker, catalog: Catalog, queues: QueueService) -> None:
        self._broker = broker
        self._catalog = catalog
        self._queues = queues

    async def of(self, stream: StreamName, retries: Retries) -> list[Queue]:
        """The queues that dead letters of a stream's subscription may lie in: where they go, and, if that is another, its own. Raises
        RequestError(UNSUPPORTED) where they go elsewhere than into a queue beside the stream, UnavailableError."""
        found: list[Queue] = []
        goes_to = dead_letter_name(stream, retries)
        for name in dict.fromkeys((goes_to, dead_letter_name(stream, Retries()))):
            held = self._broker.streams.get(name)
            if held is None:
                with suppress(RequestError):
                    held = await self._broker.find_stream(name)
            if held is None or (held.record.config.views.queue is None and name != goes_to):
                continue
            if held.record.config.views.queue is None:
                raise RequestError(
                    f"{name}, where dead letters of {stream} go, is no queue: which of them are done is not known.",
                    code=Code.UNSUPPORTED,
                    hint=f"Read them there: felix stream subscribe {name} --from earliest",
                )
            self._broker.check_dead_letters(stream, name)
            found.append(await self._queue(held))
        return found

    async def _queue(self, held: HostedStream) -> Queue:
        if held.elsewhere is not None:
            raise UnavailableError(
                f"{held.name} is not served by the broker that serves its subscription for now: {held.elsewhere.sentence}",
                retry_after_ms=ELSEWHERE_RETRY_MS,
            )
        return await self._queues.queue(held)

    # -- one subscription's ----------------------------------------------------------------------------

    def producers(self, stream: HostedStream, subscription: bytes, queue: StreamName) -> dict[int, int]:
        """Under which producer ids dead letters of the subscription come into the queue, each with the shard that they come from."""
        kind = JournalKind.SUBSCRIPTIONS
        return {
            producer_of(stream.incarnation, kind, number, str(queue), number, subscription): number
            for number in range(stream.shard_count)
        }

    def among(
        self, entries: Iterable[Entry], producers: dict[int, int], shard: QueueShard
    ) -> Iterator[Letter]:
        """Those of these producers that are not done."""
        for entry in entries:
            body = entry_body(entry)
            number = producers.get(decode_header(body).producer_id)
            for record in () if number is None else decode_records(decode_batch(body)):
                offset = record.headers.get(DEAD_OFFSET, b"")
                if number is not None and offset.isdigit() and not shard.is_done(record.offset):
                    yield Letter(record, number, int(offset))

    # -- taking them out -------------------------------------------------------------------------------

    async def remove(self, records: ShardLog, returning: Returning) -> None:
        """Take these out of their queue, durably, as far as they are in it. Those whose records retention took meanwhile from `records` stay. Raises why
        that cannot be done now."""
        name = StreamName.parse(returning.queue)
        held = self._broker.streams.get(name)
        if held is None or held.incarnation != returning.incarnation:
            if await self._is_deleted(name, returning.incarnation):
                return
            raise UnavailableError(f"{name} is not open yet.", retry_after_ms=ELSEWHERE_RETRY_MS)
        queue = await self._queue(held)
        shard = queue.shards[returning.shard]
        places = list(zip(returning.letters, returning.offsets, strict=True))
        shard.leave(letter for letter, offset in places if offset < records.log_start_offset)
        going = [letter for letter, offset in places if offset >= records.log_start_offset]
        await awaited(lambda done: shard.remove(going, done))

    async def _is_deleted(self, queue: StreamName, incarnation: bytes) -> bool:
        try:
            return bytes.fromhex((await self._catalog.describe_stream(queue)).incarnation) != incarnation
        except RequestError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return True

    def leave(self, returning: Returning) -> None:
        """Workers may have these again, as far as this broker has their queue open."""
        held = self._broker.streams.get(StreamName.parse(returning.queue))
        queue = None if held is None else self._queues.opened(held)
        if queue is not None and queue.stream.incarnation == returning.incarnation:
            queue.shards[returning.shard].leave(returning.letters)
