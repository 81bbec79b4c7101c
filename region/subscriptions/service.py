"""The subscription service: every durable subscription of this broker, from the catalog to its consumers, and the requests about them.

The catalog's definitions for a stream hosted here are loaded with the stream: a store per shard, a `DurableSubscription` per
name. Definitions outlive their stream: if it is created again, they start from the beginning in it.

Invariants: a subscription is used only once its first positions are durable; a record that is not settled by every subscription is
known here, also before all are loaded (`hold`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Final

import msgspec

from felix.batch import BATCH_BYTES_MAX, decode_header
from felix.consumer_messages import SubscriptionAcks, decode_call
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.frames import FRAME_HEADER_BYTES
from felix.messages import (
    AlterSubscription,
    CreateSubscription,
    DeleteSubscription,
    DescribeSubscription,
    Done,
    ListSubscriptions,
    OpenConsumer,
    ReaderTraffic,
    Redriven,
    RedriveSubscription,
    SeekSubscription,
    Start,
    Subscribe,
    SubscriptionPage,
    SubscriptionState,
)
from felix.names import SpiffeId, StreamName, parse_subscription
from felix.settings import SubscriptionSettings, altered
from felix.tasks import TaskSet
from policy.access import Verb
from region.broker import Broker
from region.delivery import resolve_starts
from region.exchange import Exchange
from region.gather import Done as Written
from region.gather import Gather, ignore
from region.metadata import records
from region.metadata.catalog import Catalog
from region.metadata.mirror import CatalogMirror, MirrorChange
from region.ports import Exchanging, Role
from region.queue.service import QueueService
from region.streams.hosted import ELSEWHERE_RETRY_MS, HostedStream
from region.subscriptions.consumer import Consumer
from region.subscriptions.letters import LetterQueues
from region.subscriptions.redrive import Redrive
from region.subscriptions.reservations import Reservations
from region.subscriptions.store import SubscriptionStore
from region.subscriptions.subscription import Counts, DurableSubscription, ranges_of
from region.views.dead_letter import dead_letter_name

log = logging.getLogger("felix.region.subscriptions")

CREDIT_BYTES_MIN: Final = FRAME_HEADER_BYTES + BATCH_BYTES_MAX
"""With less, a consumer could not take every batch."""
SUBSCRIPTIONS_MAX: Final = 1_000
"""Durable subscriptions of one stream: each has its state in memory, and a part of every look at the stream."""
LABELLED_MAX: Final = 100
"""Subscriptions with metrics of their own; those with the largest lag. All count in the sums."""
MIRROR_S: Final = 10.0


class _Loaded:
    """What is loaded for one incarnation of a stream."""

    __slots__ = ("by_name", "is_closed", "loading", "stores", "stream")

    def __init__(self, stream: HostedStream) -> None:
        self.stream = stream
        self.stores: list[SubscriptionStore] = []
        self.by_name: dict[str, DurableSubscription] = {}
        self.loading = asyncio.Lock()
        self.is_closed = False


class SubscriptionService:
    """See the module. One per broker; `start`, then `close`."""

    def __init__(self, broker: Broker, catalog: Catalog, mirror: CatalogMirror, queues: QueueService) -> None:
        """`queues`: of the same broker, which dead letters lie in."""
        self._broker = broker
        self._catalog = catalog
        self._mirror = mirror
        self._held: dict[StreamName, _Loaded] = {}
        self._generation = 0
        self._counts = Counts()
        self._reservations = Reservations()
        self._letters = LetterQueues(broker, catalog, queues)
        self._redrive = Redrive(self._letters)
        self._tasks = TaskSet()
        self._unfollow: Callable[[], None] | None = None
        self._closed = False
        broker.streams.on_change(self._stream_changed)

    # -- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load what is defined for the streams that are hosted, and follow the catalog from here on."""
        self._unfollow = self._mirror.on_change(self._changed)
        for name in {StreamName.parse(held.stream) for held in self._mirror.subscriptions.values()}:
            await self._load_quietly(name)

    async def close(self) -> None:
        self._closed = True
        if self._unfollow is not None:
            self._unfollow()
        await self._tasks.end()

    def _changed(self, change: MirrorChange) -> None:
        if change.section == "subscriptions":
            name = StreamName.parse(change.name.rpartition("/")[0])
        elif change.section == "streams" and not change.is_gone:
            name = StreamName.parse(change.name)
        else:
            return
        self._spawn(self._load_quietly(name))

    def _stream_changed(self, stream: HostedStream) -> None:
        """A stream came, or this broker leads it now: load what is defined for it."""
        if not stream.deleted and stream.elsewhere is None and any(self._definitions(stream.name)):
            self._spawn(self._load_quietly(stream.name))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._closed:
            work.close()
            return
        self._tasks.begin(work)

    async def _load_quietly(self, name: StreamName) -> None:
        stream = self._broker.streams.get(name)
        if stream is None or stream.elsewhere is not None:
            return
        try:
            await self._load(stream)
        except FelixError as error:
            log.error("durable subscriptions of %s do not serve: %s", name, error)
        except Exception:
            log.exception("durable subscriptions of %s could not be loaded", name)

    # -- loading ---------------------------------------------------------------------------------------

    def _definitions(self, name: StreamName) -> Iterator[records.Subscription]:
        return iter(list(self._mirror.subscriptions_of(str(name)).values()))

    async def _load(self, stream: HostedStream) -> _Loaded:
        """Everything that is defined for the stream, ready to be used. Raises what opening the journals raises, NotLeaderError where
        another broker leads it."""
        if (elsewhere := stream.elsewhere) is not None:
            raise elsewhere
        held = self._held.get(stream.name)
        if held is None or held.stream is not stream:
            held = self._held[stream.name] = _Loaded(stream)
            stream.closing.append(lambda held=held: self._close_stream(held))  # type: ignore[misc]
        async with held.loading:
            if held.is_closed:
                raise stream.elsewhere or UnavailableError(
                    f"The subscriptions of {stream.name} were closed while they were opened.",
                    retry_after_ms=ELSEWHERE_RETRY_MS,
                )
            defined = {definition.name: definition for definition in self._definitions(stream.name)}
            for subscription in list(held.by_name.values()):
                now = defined.get(subscription.definition.name)
                if now is None or now.id != subscription.definition.id:
                    await self._drop(held, subscription)
            if defined and not held.stores:
                await self._open_stores(held)
            for definition in defined.values():
                known = held.by_name.get(definition.name)
                if known is None:
                    await self._take(held, definition)
                else:
                    known.alter(definition)
        return held

    async def _open_stores(self, held: _Loaded) -> None:
        stream = held.stream
        made: list[SubscriptionStore] = []
        for number in range(stream.shard_count):
            store = SubscriptionStore(
                self._broker,
                stream,
                number,
                lambda: {bytes.fromhex(each.id): each for each in self._definitions(stream.name)},
                self._reservations,
                lambda error: self._lost(held, error),
                lambda subscription, count: self._landed(held, subscription, count),
                self._letters,
                lambda subscription, number: self._returned(held, subscription, number),
            )
            try:
                await store.open()
            except BaseException:
                for opened in made:
                    await opened.abandon()
                raise
            made.append(store)
        held.stores = made

    async def _take(self, held: _Loaded, definition: records.Subscription) -> None:
        """Give a definition its place; its first positions are durable once this returns."""
        stream = held.stream
        if definition.incarnation != stream.record.incarnation:
            log.info("%s of %s begins anew: the stream was created again", definition.name, stream.name)
            definition = await self._catalog.move_subscription(definition, stream.record.incarnation)
        subscription = DurableSubscription(
            self._broker, stream, definition, held.stores, self._next_generation, self._counts
        )
        starts: dict[int, int] = {}
        for number in range(len(held.stores)):
            if not subscription.progress(number).positioned:
                shard = stream.shard(number)
                earliest = definition.settings.start == "earliest"
                starts[number] = shard.log_start_offset if earliest else shard.high_watermark
        await subscription.position(starts)
        held.by_name[definition.name] = subscription

    def _next_generation(self) -> int:
        self._generation = max(self._generation + 1, self._broker.clock_ms())
        return self._generation

    # -- trouble and endings ---------------------------------------------------------------------------

    def _lost(self, held: _Loaded, error: FelixError) -> None:
        """The store is reloading its journal; consumers must reconnect."""
        again = UnavailableError(
            f"A position of {held.stream.name} could not be written: {error.sentence}",
            code=error.code if isinstance(error, UnavailableError) else Code.UNAVAILABLE,
            hint=error.hint,
            retry_after_ms=error.retry_after_ms or 500,
        )
        for subscription in held.by_name.values():
            subscription.dismiss(again)

    def _landed(self, held: _Loaded, subscription: bytes, count: int) -> None:
        for each in held.by_name.values():
            if each.id == subscription:
                each.buried(count)

    def _returned(self, held: _Loaded, subscription: bytes, number: int) -> None:
        for each in held.by_name.values():
            if each.id == subscription:
                each.returned(number)

    async def _drop(self, held: _Loaded, subscription: DurableSubscription) -> None:
        held.by_name.pop(subscription.definition.name, None)
        subscription.close(
            RequestError(
                f"The subscription {subscription.definition.name} of {held.stream.name} was deleted.",
                code=Code.NOT_FOUND,
            )
        )
        for store in held.stores:
            store.drop(subscription.id, ignore)

    async def _close_stream(self, held: _Loaded) -> None:
        why: FelixError = RequestError(f"The stream {held.stream.name} was deleted.", code=Code.NOT_FOUND)
        if self._broker.leaving:
            why = UnavailableError(
                "The broker is shutting down.", code=Code.SHUTTING_DOWN, retry_after_ms=500
            )
        elif not held.stream.deleted:
            why = held.stream.elsewhere or why
        # What is being loaded is closed with the rest; who waits for it is told.
        held.is_closed = True
        async with held.loading:
            for subscription in held.by_name.values():
                subscription.close(why)
            for store in held.stores:
                await store.close()
        if self._held.get(held.stream.name) is held:
            del self._held[held.stream.name]

    # -- consumers -------------------------------------------------------------------------------------

    def open(self, session: Exchanging, stream_id: int) -> Role:
        """The role of a new consumer's exchange."""
        return Exchange(
            self._broker, session, stream_id, lambda exchange: Consumer(exchange, self._opening), decode_call
        )

    async def _opening(self, identity: SpiffeId, request: OpenConsumer) -> tuple[DurableSubscription, bool]:
        name = StreamName.parse(request.stream)
        parse_subscription(request.name)
        self._broker.require(identity, Verb.SUBSCRIBE, name)
        stream = self._broker.use_stream(name)
        self._broker.require_led(stream)
        if request.credit_bytes < CREDIT_BYTES_MIN:
            raise RequestError(
                f"A consumer with {request.credit_bytes} bytes of credit could not take every batch.",
                hint=f"Grant at least {CREDIT_BYTES_MIN} bytes.",
            )
        held = await self._load(stream)
        found = held.by_name.get(request.name)
        if found is not None:
            if request.settings is not None and request.settings != found.definition.settings:
                raise RequestError(
                    f"The subscription {request.name} of {name} has other settings than this consumer asks for.",
                    code=Code.CONFLICT,
                    hint="Describe it and use its settings, give no settings, or delete it and create it again.",
                )
            return found, False
        if request.settings is None:
            raise _none(name, request.name)
        try:
            return await self._create(identity, stream, request.name, request.settings), True
        except RequestError as error:
            if error.code is not Code.ALREADY_EXISTS:
                raise
        # Of several first consumers one made it.
        return await self._opening(identity, request)

    async def _create(
        self, identity: SpiffeId, stream: HostedStream, name: str, settings: SubscriptionSettings
    ) -> DurableSubscription:
        settings.check()
        if stream.record.config.views.queue is not None or stream.record.config.views.cache is not None:
            raise RequestError(
                f"{stream.name} is a queue or a cache; it has no durable subscriptions.",
                code=Code.UNSUPPORTED,
                hint="Lease from a queue, watch a cache.",
            )
        self._check_dead_letters(identity, stream.name, settings)
        if len(self._mirror.subscriptions_of(str(stream.name))) >= SUBSCRIPTIONS_MAX:
            raise UnavailableError(
                f"{stream.name} has {SUBSCRIPTIONS_MAX} durable subscriptions, the most that are allowed.",
                code=Code.LIMIT_SUBSCRIPTIONS,
                hint="Delete those that nobody uses, or give them an inactive_ttl.",
            )
        made = await self._catalog.create_subscription(
            records.Subscription(
                stream=str(stream.name),
                name=name,
                id=self._broker.runtime.random.randbytes(records.SUBSCRIPTION_ID_BYTES).hex(),
                incarnation=stream.record.incarnation,
                creator=str(identity),
                created_ms=self._broker.clock_ms(),
                settings=settings,
            )
        )
        await self._seen(made.revision)
        held = await self._load(stream)
        found = held.by_name.get(name)
        if found is None:
            raise UnavailableError(f"The subscription {name} of {stream.name} was deleted just now.")
        return found

    async def _seen(self, revision: int) -> None:
        try:
            async with asyncio.timeout(MIRROR_S):
                await self._mirror.wait_for(revision)
        except TimeoutError:
            raise UnavailableError(
                f"The subscription is written, and this broker has not taken it over in {MIRROR_S:.0f} s.",
                hint="It serves once the metadata store answers again.",
            ) from None

    # -- requests on the control stream ----------------------------------------------------------------

    async def create(self, identity: SpiffeId, request: CreateSubscription) -> SubscriptionState:
        """Raises RequestError: ALREADY_EXISTS, CONFIG_INVALID, UNSUPPORTED, NOT_FOUND_OR_FORBIDDEN."""
        name = StreamName.parse(request.stream)
        parse_subscription(request.name)
        self._broker.require(identity, Verb.SUBSCRIBE, name)
        stream = await self._broker.find_to_use(name)
        self._broker.require_led(stream)
        try:
            made = await self._create(identity, stream, request.name, request.settings)
        except RequestError as error:
            if error.code is not Code.ALREADY_EXISTS:
                raise
            raise RequestError(
                f"The subscription {request.name} of {name} already exists.",
                code=Code.ALREADY_EXISTS,
                hint="Describe it to see its settings, and alter what is to be another.",
            ) from error
        return made.describe(await self._lag_ms(made))

    async def describe(self, identity: SpiffeId, request: DescribeSubscription) -> SubscriptionState:
        """Raises RequestError: NOT_FOUND; UnavailableError while a journal is read again."""
        found = await self._find(identity, request.stream, request.name)
        ages = await self._lag_ms(found)
        if (unread := found.unread()) is not None:
            raise unread
        return found.describe(ages)

    async def page(self, identity: SpiffeId, request: ListSubscriptions) -> SubscriptionPage:
        """Those of streams that the asker may subscribe to or administer, in order of `stream name`."""
        if request.stream:
            self._require_seeing(identity, StreamName.parse(request.stream))
        found: list[SubscriptionState] = []
        more = False
        for key, definition in sorted(
            (f"{each.stream} {each.name}", each) for each in self._mirror.subscriptions.values()
        ):
            name = StreamName.parse(definition.stream)
            if (
                key <= request.after
                or request.stream not in ("", definition.stream)
                or not self._sees(identity, name)
            ):
                continue
            if len(found) == request.limit:
                more = True
                break
            held = self._held.get(name)
            loaded = held.by_name.get(definition.name) if held is not None else None
            found.append(
                loaded.describe()
                if loaded is not None
                else _described(definition, self._broker.kept_elsewhere(name))
            )
        return SubscriptionPage(found, more)

    async def seek(self, identity: SpiffeId, request: SeekSubscription) -> Done:
        """Raises RequestError: FORBIDDEN, OFFSET_OUT_OF_RANGE."""
        found = await self._find(identity, request.stream, request.name)
        self._require_owner(identity, found)
        stream = found.stream
        wanted = Subscribe(request.stream, request.start, request.shards, incarnation=stream.incarnation)
        if request.start.offsets and not request.shards:
            # Offsets by shard say themselves which shards are meant.
            wanted = Subscribe(
                request.stream,
                Start(request.start.kind, request.start.value, request.start.offsets),
                sorted(request.start.offsets),
                incarnation=stream.incarnation,
            )
        starts = await resolve_starts(stream, wanted)
        await found.position(
            {number: max(offset, stream.shard(number).log_start_offset) for number, offset in starts.items()}
        )
        return Done(
            f"{request.name} goes on from {', '.join(f'{n}: {o}' for n, o in sorted(starts.items()))}."
        )

    async def redrive(self, identity: SpiffeId, request: RedriveSubscription) -> Redriven:
        """Raises RequestError: NOT_FOUND, FORBIDDEN, UNSUPPORTED; UnavailableError while what was begun before cannot be finished."""
        found = await self._find(identity, request.stream, request.name)
        self._require_owner(identity, found)
        return await self._redrive.page(found, request)

    async def alter(self, identity: SpiffeId, request: AlterSubscription) -> SubscriptionState:
        """Raises RequestError: NOT_FOUND, FORBIDDEN, CONFIG_INVALID."""
        found = await self._find(identity, request.stream, request.name)
        self._require_owner(identity, found)

        def change(held: records.Subscription) -> records.Subscription:
            new = altered(held.settings, request.change)
            new.check()
            named_by = held.dead_letter_by
            if request.change.retries is not None:
                self._check_dead_letters(identity, found.stream.name, new)
                named_by = str(identity)
            return msgspec.structs.replace(held, settings=new, dead_letter_by=named_by)

        definition = await self._catalog.alter_subscription(found.definition, change)
        # Before it counts: what is read back from a journal goes by what the mirror says.
        await self._seen(definition.revision)
        found.alter(definition)
        return found.describe(await self._lag_ms(found))

    def _check_dead_letters(
        self, identity: SpiffeId, stream: StreamName, settings: SubscriptionSettings
    ) -> None:
        """Raises RequestError where they have no place to go, or none that the asker may write to."""
        if not settings.retries.attempts_max:
            return
        dead = dead_letter_name(stream, settings.retries)
        if dead == stream:
            raise RequestError(
                f"Dead letters of {dead} would go into it again.",
                code=Code.CONFIG_INVALID,
                hint="Name another stream, or leave the name away.",
            )
        if settings.retries.dead_letter:
            self._broker.require(identity, Verb.PUBLISH, dead)
            self._broker.check_dead_letters(stream, dead)

    async def delete(self, identity: SpiffeId, request: DeleteSubscription) -> Done:
        """Raises RequestError: NOT_FOUND, FORBIDDEN."""
        found = await self._find(identity, request.stream, request.name)
        self._require_owner(identity, found)
        await self._delete(found)
        return Done(f"{request.name} of {request.stream} is deleted.")

    async def _delete(self, found: DurableSubscription) -> None:
        await self._seen(await self._catalog.delete_subscription(found.definition))
        held = self._held.get(found.stream.name)
        if held is not None:
            async with held.loading:
                if held.by_name.get(found.definition.name) is found:
                    await self._drop(held, found)

    async def _find(self, identity: SpiffeId, stream: str, name: str) -> DurableSubscription:
        stream_name = StreamName.parse(stream)
        parse_subscription(name)
        self._require_seeing(identity, stream_name)
        hosted = await self._broker.find_stream(stream_name)
        self._broker.require_led(hosted)
        held = await self._load(hosted)
        found = held.by_name.get(name)
        if found is None:
            raise _none(stream_name, name)
        return found

    def _sees(self, identity: SpiffeId, stream: StreamName) -> bool:
        """Whoever administers a stream sees to its subscriptions without the right to read its records."""
        return any(self._broker.allows(identity, verb, stream) for verb in (Verb.SUBSCRIBE, Verb.ADMIN))

    def _require_seeing(self, identity: SpiffeId, stream: StreamName) -> None:
        if not self._sees(identity, stream):
            self._broker.require(identity, Verb.SUBSCRIBE, stream)

    def _require_owner(self, identity: SpiffeId, found: DurableSubscription) -> None:
        if str(identity) == found.definition.creator:
            return
        if not self._broker.allows(identity, Verb.ADMIN, found.stream.name):
            raise RequestError(
                f"{found.definition.name} of {found.stream.name} was made by {found.definition.creator}.",
                code=Code.FORBIDDEN,
                hint="Its creator, or an identity with the right admin on the stream, may change it.",
            )

    async def _lag_ms(self, found: DurableSubscription) -> dict[int, int]:
        """How old the oldest record is that is not settled, by shard; 0 where there is none."""
        ages: dict[int, int] = {}
        for number in range(found.stream.shard_count):
            shard = found.stream.shard(number)
            offset = max(found.progress(number).committed, shard.log_start_offset)
            if offset >= shard.high_watermark:
                continue
            try:
                entries = await shard.read(offset, 1)
            except FelixError:
                continue  # retention was faster; it is not known
            if entries:
                header = decode_header(entries[0].data, FRAME_HEADER_BYTES)
                ages[number] = max(0, self._broker.streams_ms() - header.append_time_ms)
        return ages

    # -- what is swept ---------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Delete subscriptions that had no consumer for their `inactive_ttl_ms`."""
        for held in list(self._held.values()):
            for subscription in list(held.by_name.values()):
                ttl_ms = subscription.definition.settings.inactive_ttl_ms
                # Asked of each: where the clock was set, it goes on from there.
                now_ms = subscription.now_ms()
                if not ttl_ms or subscription.consumer_count or now_ms - subscription.active_ms < ttl_ms:
                    continue
                try:
                    await self._delete(subscription)
                except FelixError as error:
                    log.warning("an inactive subscription stays: %s", error)
                    continue
                log.info(
                    "%s of %s is deleted: it had no consumer for %d s",
                    subscription.definition.name,
                    held.stream.name,
                    ttl_ms // 1000,
                )

    # -- what the log may let go -----------------------------------------------------------------------

    def hold(self, stream: HostedStream, shard: int) -> int | None:
        """The lowest committed offset of the shard's durable subscriptions; None where it has none. Where some are not loaded
        yet, the log's start: nothing may go."""
        held = self._held.get(stream.name)
        loaded = held.by_name if held is not None and held.stream is stream else {}
        lowest: int | None = None
        for definition in self._definitions(stream.name):
            found = loaded.get(definition.name)
            if found is None or found.refusal() is not None:
                return stream.shard(shard).log_start_offset
            committed = found.durable(shard)
            lowest = committed if lowest is None else min(lowest, committed)
        return lowest

    def hold_all(self) -> None:
        """Tell every shard that asks for it how far it may let go; called before retention is applied."""
        for stream in self._broker.streams.maintenance.retaining():
            for shard in stream.serving:
                shard.hold_from(self.hold(stream, shard.identity.shard))

    # -- transactions ----------------------------------------------------------------------------------

    async def ready(self, acks: Sequence[SubscriptionAcks]) -> FelixError | None:
        """Load what these are about, for a broker that has just started."""
        for each in acks:
            stream = self._broker.streams.get(StreamName.parse(each.stream))
            if stream is not None:
                try:
                    await self._load(stream)
                except FelixError as error:
                    return error
        return None

    def identified(self, acks: SubscriptionAcks) -> SubscriptionAcks:
        """With which stream, and subscription, of these names it is."""
        acks = msgspec.structs.replace(acks, incarnation=b"", subscription="", epochs={})
        found = self._loaded(acks)
        if found is None:
            return acks
        return msgspec.structs.replace(
            acks,
            incarnation=found.stream.incarnation,
            subscription=found.definition.id,
            epochs=found.epochs_of(acks.acks),
        )

    def check(self, acks: Sequence[SubscriptionAcks]) -> FelixError | None:
        """Keep what a transaction that is about to be written acknowledges: all of it, or an error and nothing of it.

        Followed by `apply` once it is written, or `abandon` where it is not. CONSUMER_FENCED where a generation is an old one, or
        a record was settled otherwise.
        """
        kept: list[SubscriptionAcks] = []
        for each in acks:
            found = self._loaded(each)
            error = (
                _none(StreamName.parse(each.stream), each.name) if found is None else found.reserve(each.acks)
            )
            if error is not None:
                self.abandon(kept)
                return error
            kept.append(each)
        return None

    def apply(self, acks: Sequence[SubscriptionAcks], done: Written) -> None:
        """Settle what a written transaction acknowledges; once more does no harm. `done` once all is durable.

        Entries of a subscription that was deleted or restarted count as done, also where another one has its name.
        """
        gather = Gather(done)
        for each in acks:
            found = self._loaded(each)
            if found is None:
                self._forget(each)
                continue
            refused = found.refusal()
            if refused is not None:
                gather.part()(refused)
            else:
                found.settle(each.acks, gather.part(), each.epochs)
        gather.asked()

    def abandon(self, acks: Sequence[SubscriptionAcks]) -> None:
        """The transaction was not written: what was kept is delivered again. Also where nothing can be decided now: the journal knows nothing of it."""
        for each in acks:
            found = self._loaded(each)
            if found is not None:
                found.unreserve(each.acks)
            else:
                self._forget(each)

    def _forget(self, acks: SubscriptionAcks) -> None:
        """What was reserved of a subscription that is not open here."""
        subscription = bytes.fromhex(acks.subscription)
        for each in acks.acks:
            self._reservations.remove(acks.incarnation, each.shard, subscription, ranges_of(each, 0))

    def _loaded(self, acks: SubscriptionAcks) -> DurableSubscription | None:
        held = self._held.get(StreamName.parse(acks.stream))
        found = None if held is None else held.by_name.get(acks.name)
        # What an earlier version wrote does not say which one it is.
        if found is None or not acks.incarnation:
            return found
        is_it = (found.stream.incarnation, found.definition.id) == (acks.incarnation, acks.subscription)
        return found if is_it else None

    # -- stats -----------------------------------------------------------------------------------------

    def _all(self) -> Iterator[DurableSubscription]:
        for held in list(self._held.values()):
            yield from list(held.by_name.values())

    def gauges(self) -> dict[str, float]:
        """Sums over all durable subscriptions; what is counted since the start, also of those that are gone: it never falls."""
        lag = out = consumers = count = 0
        for each in self._all():
            count += 1
            consumers += each.consumer_count
            try:
                behind, unacked = each.stats()
            except FelixError:
                continue  # a shard that does not serve
            lag += behind
            out += unacked
        return {
            "durable_subscriptions": count,
            "consumers": consumers,
            "consumer_lag_records": lag,
            "consumer_unacked_records": out,
            "consumer_redelivered_records": self._counts.redelivered,
            "consumer_dead_records": self._counts.dead,
            "consumer_skipped_records": self._counts.skipped,
        }

    def traffic(self) -> list[ReaderTraffic]:
        """Every durable subscription as one reader, under its own name."""
        found: list[ReaderTraffic] = []
        for each in self._all():
            try:
                lag = each.stats()[0]
            except FelixError:
                continue  # a shard that does not serve
            found.append(
                ReaderTraffic(
                    "durable",
                    each.definition.name,
                    str(each.stream.name),
                    f"{each.consumer_count} consumers",
                    lag_records=lag,
                    waits="" if each.consumer_count or not lag else "consumer",
                )
            )
        return found

    def lags(self) -> list[tuple[str, str, int]]:
        """Stream, subscription and lag in records, of the LABELLED_MAX that are furthest behind."""
        found: list[tuple[str, str, int]] = []
        for each in self._all():
            try:
                found.append((str(each.stream.name), each.definition.name, each.stats()[0]))
            except FelixError:
                continue
        return sorted(found, key=lambda entry: -entry[2])[:LABELLED_MAX]


def _described(definition: records.Subscription, leader: str) -> SubscriptionState:
    """Of a subscription whose stream is not served here now. `leader`: of several brokers the one that has its records."""
    return SubscriptionState(
        definition.stream,
        definition.name,
        definition.settings,
        definition.creator,
        definition.created_ms,
        bytes.fromhex(definition.incarnation),
        leader=leader,
    )


def _none(stream: StreamName, name: str) -> RequestError:
    return RequestError(
        f"There is no subscription {name} of {stream}.",
        code=Code.NOT_FOUND,
        hint="Create it, or open the consumer with settings.",
    )
