"""A stream of a region, as a client uses it: publish, subscribe, consume, and the durable subscriptions that it has.

Made by `RegionClient.stream`, and imported then: a client that only asks waits for none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal

from felix.batch import Headers, NewRecord
from felix.consumer import AckMode, Consumer, subscription_settings
from felix.errors import RequestError
from felix.messages import (
    AlterSubscription,
    CreateSubscription,
    DeleteSubscription,
    DescribeSubscription,
    Redriven,
    RedriveSubscription,
    SeekSubscription,
    StreamState,
    SubscriptionState,
)
from felix.names import StreamName
from felix.payload import MessageId, Payload, RecordKey
from felix.publisher import Publisher
from felix.publisher_core import (
    BATCH_BYTES_DEFAULT,
    BATCH_RECORDS_DEFAULT,
    BUFFER_BYTES_DEFAULT,
    DEADLINE_MS_DEFAULT,
    Acks,
    Receipt,
    Refusal,
)
from felix.settings import (
    NO_VIEWS,
    Durability,
    Retention,
    Retries,
    RetriesChange,
    SubscriptionChange,
    SubscriptionSettings,
    Views,
    milliseconds,
)
from felix.subscription import (
    CREDIT_BYTES_DEFAULT,
    EpochsRead,
    Gap,
    OnGap,
    StartAt,
    Subscription,
    start_message,
)

REDRIVE_PAGE: Final = 100
REDRIVE_PAGES_MAX: Final = 1 << 16
"""Of one redrive: more than any stream has dead letters."""
"""Dead letters in one request."""

if TYPE_CHECKING:
    from felix.client import RegionClient


class Stream:
    """One stream of a region. Cheap to make; two of one name share the publisher of `publish`."""

    __slots__ = ("_client", "name")

    def __init__(self, client: RegionClient, name: StreamName) -> None:
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"Stream({str(self.name)!r})"

    async def publish(
        self,
        payload: Payload,
        *,
        key: RecordKey | None = None,
        headers: Headers | None = None,
        shard: int | None = None,
        expected_offset: int | None = None,
        message_id: MessageId | None = None,
    ) -> int:
        """Publish one record and return its offset once the stream's durability holds for it.

        `shard` overrides what the key says. With `expected_offset` it is appended only where the log of its shard ends
        there; else OffsetMismatchError says where it ends, in `log_end`. `message_id`: where the stream deduplicates, a
        record whose id it remembers is not appended again, and the offset is that of the first one.
        Many at once share batches: `await asyncio.gather(*(stream.publish(p) for p in payloads))`. For streams of records,
        use `publisher`. Raises RequestError (no right, too large), UnavailableError after two minutes of trying.
        """
        publisher = await self._client._publisher(self.name)
        tracer = self._client._tracer()
        if tracer is None:
            return await publisher.publish(
                payload, key, headers, shard=shard, expected_offset=expected_offset, message_id=message_id
            )
        with tracer.publishing(str(self.name), self._client.session.region):
            return await publisher.publish(
                payload, key, headers, shard=shard, expected_offset=expected_offset, message_id=message_id
            )

    async def publish_nowait(
        self,
        payload: Payload,
        *,
        key: RecordKey | None = None,
        headers: Headers | None = None,
        message_id: MessageId | None = None,
    ) -> asyncio.Future[int]:
        """As `publish`, but returns once the record has joined its batch; the future gives the offset."""
        publisher = await self._client._publisher(self.name)
        return publisher.publish_nowait(payload, key, headers, message_id=message_id)

    async def _join(
        self, payload: Payload, *, key: RecordKey | None = None, headers: Headers | None = None
    ) -> asyncio.Future[int]:
        """As `publish_nowait`, but waits for room. For felix.queue."""
        publisher = await self._client._publisher(self.name)
        await publisher._ready_for_more()
        return publisher.publish_nowait(payload, key, headers)

    async def publish_many(
        self, payloads: Sequence[Payload], keys: Sequence[RecordKey | None] | None = None
    ) -> list[int]:
        """Publish many records and return their offsets in the order given, once all are acknowledged."""
        return await (await self._client._publisher(self.name)).publish_many(payloads, keys)

    async def publish_batch(
        self, records: Sequence[NewRecord], *, shard: int | None = None, expected_offset: int | None = None
    ) -> Receipt:
        """Publish records as one batch in one shard, wholly or not at all; with `expected_offset`, only where the log of
        the shard ends there."""
        publisher = await self._client._publisher(self.name)
        return await publisher.publish_batch(records, shard, expected_offset=expected_offset)

    def publisher(
        self,
        *,
        linger_ms: float = 0,
        batch_bytes: int = BATCH_BYTES_DEFAULT,
        batch_records: int = BATCH_RECORDS_DEFAULT,
        buffer_bytes: int = BUFFER_BYTES_DEFAULT,
        acks: Acks = "all",
        compress: int = 0,
        deadline_ms: int = DEADLINE_MS_DEFAULT,
        on_refused: Callable[[Refusal], None] | None = None,
    ) -> Publisher:
        """A publisher of its own, for throughput; use it as `async with`.

        A batch closes at `batch_bytes`, at `batch_records`, or `linger_ms` after its first record (0: at the end of the
        event loop iteration). `buffer_bytes` bounds what is not acknowledged; `deadline_ms` how long a batch is tried. `compress`: a
        level of zstd, 1 (also True) to 19, on the event loop (level 1: about 2 ms for a full MiB); what does not get smaller is left. `on_refused` is called with every batch that is given up.
        Raises RequestError(CONFIG_INVALID).
        """
        return Publisher(
            self._client.connection,
            self.name,
            producer_id=self._client._new_producer_id(),
            linger_ms=linger_ms,
            batch_bytes=batch_bytes,
            batch_records=batch_records,
            buffer_bytes=buffer_bytes,
            acks=acks,
            compress=compress,
            deadline_ms=deadline_ms,
            on_refused=on_refused,
            tracer=self._client._tracer(),
            made_as="queue" if self.name in self._client._queues else "",
        )

    def subscribe(
        self,
        start: StartAt = "latest",
        *,
        offsets: dict[int, int] | None = None,
        incarnation: bytes = b"",
        shards: Collection[int] | None = None,
        credit_bytes: int = CREDIT_BYTES_DEFAULT,
        on_gap: OnGap = "log",
        grant: str = "",
        epochs: EpochsRead | None = None,
    ) -> Subscription:
        """A subscription: an async iterator of records; `batches()` of it is the fast way.

        `start`: "earliest", "latest", an offset, or a time (with a time zone). `offsets` overrides it per shard, as in
        `Subscription.positions` of an earlier one; with its `incarnation`, a re-created stream is detected, and with its `epochs` a log that
        lost records since, or was put back.
        `shards`: only these; None: all. `credit_bytes` bounds what is held here unread. `on_gap`: see felix.subscription.
        `grant`: sealed batches under an export grant, for bridges. Raises RequestError(INVALID, CONFIG_INVALID) here, and
        what the broker refuses it with at the first record.
        """
        return Subscription(
            self._client.connection,
            self.name,
            start=start,
            offsets=offsets,
            incarnation=incarnation,
            shards=shards,
            credit_bytes=credit_bytes,
            on_gap=on_gap,
            grant=grant,
            epochs=epochs,
        )

    def consumer(
        self,
        name: str,
        *,
        start: Literal["earliest", "latest"] | None = None,
        ack_timeout: float | None = None,
        retries: Retries | None = None,
        unacked_max: int | None = None,
        inactive_ttl: float | None = None,
        exclusive: bool | None = None,
        settings: SubscriptionSettings | None = None,
        consumer: str = "",
        ack: AckMode = "explicit",
        credit_bytes: int = CREDIT_BYTES_DEFAULT,
        on_assigned: Callable[[int], None] | None = None,
        on_revoked: Callable[[int], None] | None = None,
        on_gap: Callable[[Gap], None] | None = None,
    ) -> Consumer:
        """A consumer of the durable subscription `name`; use it as `async with` (felix.consumer).

        Any of `start`, `ack_timeout` and `inactive_ttl` (seconds), `retries`, `unacked_max`, `exclusive`, or `settings` as a whole
        make the subscription where there is none; where there is, they must be the same. With none of them it must exist.
        `consumer`: a name for people, as `describe_subscription` shows it; host and process id where nothing is said. `ack`: "explicit", or "auto": a record is done when the next one is asked for.
        `on_assigned` and `on_revoked` are called with a shard that comes, or is gone; `on_gap` with what retention took.
        Raises RequestError(CONFIG_INVALID, NAME_INVALID).
        """
        return Consumer(
            self._client.connection,
            self.name,
            name,
            settings=settings
            or subscription_settings(start, ack_timeout, retries, unacked_max, inactive_ttl, exclusive),
            consumer=consumer,
            credit_bytes=credit_bytes,
            ack=ack,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            on_gap=on_gap,
        )

    async def create_subscription(
        self, name: str, settings: SubscriptionSettings | None = None, *, begin: int | datetime | None = None
    ) -> SubscriptionState:
        """A durable subscription, before its first consumer. `begin`: an offset, of all shards, or a time (with a time zone) from which
        on it gets records, instead of where `settings` say. Raises RequestError: ALREADY_EXISTS, CONFIG_INVALID, OFFSET_OUT_OF_RANGE;
        then there is none."""
        wanted = CreateSubscription(str(self.name), name, settings or SubscriptionSettings())
        start = None if begin is None else start_message(begin, None)
        state = await self._client.connection.request(wanted)
        if start is None:
            return state
        try:
            await self._client.connection.request(SeekSubscription(str(self.name), name, start, []))
        except RequestError:
            await self.delete_subscription(name)
            raise
        return state

    async def alter_subscription(
        self,
        name: str,
        *,
        ack_timeout: float | None = None,
        retries: RetriesChange | None = None,
        unacked_max: int | None = None,
        inactive_ttl: float | None = None,
    ) -> SubscriptionState:
        """Change its settings while its consumers go on; a setting that is None stays, and so do positions. Durations in seconds
        (`inactive_ttl` 0: never). Delivered records keep their ack timeout. Raises RequestError: NOT_FOUND, CONFIG_INVALID;
        FORBIDDEN for an identity that neither created it nor has the right `admin`.
        """
        change = SubscriptionChange(
            None if ack_timeout is None else milliseconds(ack_timeout),
            retries,
            unacked_max,
            None if inactive_ttl is None else milliseconds(inactive_ttl),
        )
        return await self._client.connection.request(AlterSubscription(str(self.name), name, change))

    async def subscriptions(self) -> list[SubscriptionState]:
        """The stream's durable subscriptions, without shards and consumers."""
        return [state async for state in self._client.list_subscriptions(str(self.name))]

    async def describe_subscription(self, name: str) -> SubscriptionState:
        """Its settings, positions, lag and consumers. Raises RequestError(NOT_FOUND)."""
        return await self._client.connection.request(DescribeSubscription(str(self.name), name))

    async def seek_subscription(
        self,
        name: str,
        start: StartAt = "latest",
        *,
        offsets: dict[int, int] | None = None,
        shards: Collection[int] | None = None,
    ) -> str:
        """Move its position, of all shards or of `shards`; `offsets` (by shard) alone move these. What its consumers have in hand
        no longer counts. Returns the broker's note. Raises RequestError: FORBIDDEN, OFFSET_OUT_OF_RANGE."""
        wanted = SeekSubscription(str(self.name), name, start_message(start, offsets), sorted(shards or ()))
        return (await self._client.connection.request(wanted)).note

    async def redrive_subscription(self, name: str, records: int = 0) -> Redriven:
        """Deliver its dead letters to it again, oldest first, up to `records` (0: all there are), and to none of the stream's other readers; attempts start at
        zero. Says how many, and how many stay. Those before an error are delivered. Raises RequestError: FORBIDDEN for an identity that neither
        created it nor has the right `admin`, UNSUPPORTED; UnavailableError."""
        redriven = gone = held = 0
        after = ""
        for _ in range(REDRIVE_PAGES_MAX):
            wanted = min(records - redriven, REDRIVE_PAGE) if records else REDRIVE_PAGE
            request = RedriveSubscription(str(self.name), name, wanted, after)
            page = await self._client.connection.request(request)
            redriven, gone, held = redriven + page.redriven, gone + page.gone, held + page.held
            if not page.next or (records and redriven >= records):
                return Redriven(redriven, gone, held, page.full)
            if page.next == after:
                break
            after = page.next
        raise RequestError(
            f"RedriveSubscription was answered with pages that do not go on, or do not end, after {redriven:,} dead letters.",
            hint="What was redriven stays so. No honest broker answers so: ask the region's operator.",
        )

    async def delete_subscription(self, name: str) -> None:
        """Its consumers end, its position is forgotten. Raises RequestError: NOT_FOUND, FORBIDDEN."""
        await self._client.connection.request(DeleteSubscription(str(self.name), name))

    async def create(
        self,
        *,
        shards: int = 1,
        durability: Durability | None = None,
        retention: Retention | None = None,
        ring_bytes: int = 0,
        views: Views = NO_VIEWS,
    ) -> StreamState:
        """As `RegionClient.create_stream`."""
        return await self._client.create_stream(
            self.name,
            shards=shards,
            durability=durability,
            retention=retention,
            ring_bytes=ring_bytes,
            views=views,
        )

    async def describe(self) -> StreamState:
        """As `RegionClient.describe_stream`."""
        return await self._client.describe_stream(self.name)

    async def delete(self, *, incarnation: bytes = b"") -> None:
        """As `RegionClient.delete_stream`."""
        await self._client.delete_stream(self.name, incarnation=incarnation)
