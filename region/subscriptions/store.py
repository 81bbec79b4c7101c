"""The subscription store: the SUBSCRIPTIONS journal of one shard, with the progress of every durable subscription that its stream has.

It opens the journal, brings the state back, writes entries, and after a refused write brings the state back once more. Dead letters
of each subscription are carried here, too, since they are journaled here.

Invariants: nothing is decided while `refusal` says why; code that changes a `Progress` passes its entries to `write` in the same
event loop iteration; after `lost` was called every `Progress` taken before is void. On the event loop; used by `service` alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from felix.errors import Code, FelixError, UnavailableError
from felix.settings import SubscriptionSettings
from region.broker import Broker
from region.gather import Done
from region.log.companions import JournalKind
from region.log.epochs import EVERYTHING
from region.log.shard import ShardLog
from region.metadata.records import Subscription
from region.streams.hosted import HostedStream
from region.subscriptions.entries import Dropped, Entry, Letter, Returned, Returning, decode, encode
from region.subscriptions.letters import LetterQueues
from region.subscriptions.progress import Dying, Progress
from region.subscriptions.reservations import Reservations
from region.subscriptions.returns import Returns
from region.views.actor import ViewActor
from region.views.dead_letter import DeadLetters, Move, Origin
from region.views.history import shared_end, told

log = logging.getLogger("felix.region.subscriptions")

RELOAD_S: Final = 0.2
"""Between tries to read a journal back that refused a write."""
SETTLE_LOOK_S: Final = 0.005


class SubscriptionStore:
    """See the module. `open`, then use, then `close`."""

    def __init__(
        self,
        broker: Broker,
        stream: HostedStream,
        number: int,
        definitions: Callable[[], Mapping[bytes, Subscription]],
        reservations: Reservations,
        lost: Callable[[FelixError], None],
        landed: Callable[[bytes, int], None],
        letters: LetterQueues,
        returned: Callable[[bytes, int], None],
    ) -> None:
        """`definitions`: the stream's subscriptions by id. `lost`: a write was refused. `landed`: so many records of the
        subscription are dead letters now. `returned`: of this shard, some are to be delivered again. `reservations`: of this broker."""
        self._broker = broker
        self._stream = stream
        self._number = number
        self._definitions = definitions
        self._reservations = reservations
        self._lost = lost
        self._landed = landed
        self._letter_queues = letters
        self._returned = returned
        self._actor: ViewActor | None = None
        self._held: dict[bytes, Progress] = {}
        self._writes: dict[bytes, int] = {}
        """by subscription: so many writes are under way"""
        self._durable: dict[bytes, int] = {}
        """by subscription: the committed offset as the last write left it that is durable"""
        self._letters: dict[bytes, DeadLetters] = {}
        self._returns: dict[bytes, Returns] = {}
        self._known_end = EVERYTHING
        """at replay: the next entries name records that are no more from here on"""

    @property
    def shard(self) -> ShardLog:
        """The log that the positions count in. Raises why it does not serve."""
        return self._stream.shard(self._number)

    def records(self) -> ShardLog | None:
        """The same; None while it does not serve. Once it does, the journal is read again."""
        with suppress(FelixError):
            return self.shard
        return None

    async def open(self) -> None:
        """Bring the state back. Raises what opening and reading a log raises; then it can be tried again with another store."""
        companion = await self._broker.streams.open_companion(self._stream, self._companion)
        name = f"Shard {self._number} of the subscriptions of {self._stream.name}"
        self._actor = ViewActor(name, self, companion, RELOAD_S)
        try:
            await self._actor.open()
        except BaseException:
            await self.abandon()
            raise

    async def abandon(self) -> None:
        """Close it and its journal's log while the stream goes on."""
        await self.close()
        await self._broker.streams.close_companion(self._stream, self._companion)

    @property
    def _companion(self) -> int:
        return JournalKind.SUBSCRIPTIONS.number(self._number)

    # What its actor asks (region.views.actor.View).

    def begin(self) -> None:
        for letters in self._letters.values():
            letters.reset()
        self._held.clear()
        # New objects: a write that is still to be refused belongs to the previous state.
        self._writes, self._durable = {}, {}
        self._letters.clear()
        for returns in self._returns.values():
            returns.stop()
        self._returns.clear()
        self._known_end = EVERYTHING

    def replay(self, data: bytes) -> None:
        entry = decode(data)
        if isinstance(entry, Dropped) and entry.epochs:
            records = self.records()
            self._known_end = EVERYTHING if records is None else shared_end(records, entry.epochs)
        elif isinstance(entry, Dropped):
            self._forget(entry.subscription)
        elif isinstance(entry, Letter):
            letters, progress = self._letters_of(entry.subscription), self.progress(entry.subscription)
            if letters is None:
                return
            over, landed = letters.apply(entry.entry, self._known_end)
            if over is not None and landed:
                progress.buried(over.held)
            elif over is None:
                for move in letters.pending:
                    progress.doom(move.held)
        elif isinstance(entry, Returning | Returned):
            progress, returns = self.progress(entry.subscription), self._returns_of(entry.subscription)
            if isinstance(entry, Returned):
                progress.returned(returns.take_returned().offsets)
            else:
                progress.take_back(returns.take(entry, self._known_end).offsets)
        else:
            self.progress(entry.subscription).replay(entry, self._known_end)

    def replayed(self) -> None:
        definitions = self._definitions()
        for subscription, ranges in self._reservations.of(self._stream.incarnation, self._number):
            if subscription in definitions:
                self.progress(subscription).reserve_again(ranges)
        for subscription in self._held:
            self._settled(subscription)
        for letters in self._letters.values():
            letters.start()
        for subscription, returns in self._returns.items():
            if subscription in definitions:
                returns.start()

    def preface(self) -> bytes | None:
        records = self.records()
        return None if records is None else encode(Dropped(b"", told(records)))

    def entries(self) -> Iterator[bytes]:
        for subscription, progress in self._held.items():
            yield from map(encode, progress.snapshot())
            letters = self._letters.get(subscription)
            if letters is not None:
                for entry in letters.entries():
                    yield encode(Letter(subscription, entry))
            returns = self._returns.get(subscription)
            for returning in () if returns is None else returns.pending:
                yield encode(returning)
                # Taking it in makes these unsettled, which they may have ceased to be.
                yield from map(encode, progress.settled_again(returning.offsets))

    def lost(self, error: FelixError) -> None:
        self._lost(error)

    def resumed(self) -> None:
        """Nothing to do: consumers that were told of the loss reconnect."""

    # For users of the store.

    def progress(self, subscription: bytes) -> Progress:
        """How far the subscription of this id has come."""
        held = self._held.get(subscription)
        if held is None:
            definition = self._definitions().get(subscription)
            settings = SubscriptionSettings() if definition is None else definition.settings
            held = self._held[subscription] = Progress(subscription, settings)
        return held

    def durable(self, subscription: bytes) -> int:
        """The committed offset of this subscription that is durable: it may be reported, and entries below it deleted."""
        committed = self.progress(subscription).committed
        return (
            min(committed, self._durable.get(subscription, 0)) if subscription in self._writes else committed
        )

    def _settled(self, subscription: bytes) -> None:
        """Where nothing of it is under way, all that is applied is durable."""
        if subscription in self._held and subscription not in self._writes:
            self._durable[subscription] = self._held[subscription].committed

    # -- transactions ----------------------------------------------------------------------------------

    def reserved(self, subscription: bytes, ranges: Iterable[tuple[int, int]]) -> None:
        """A transaction that is being committed acknowledges these, until `unreserved`."""
        self._reservations.add(self._stream.incarnation, self._number, subscription, ranges)

    def unreserved(self, subscription: bytes, ranges: Iterable[tuple[int, int]]) -> None:
        """It was not committed, or they are settled, durably."""
        self._reservations.remove(self._stream.incarnation, self._number, subscription, ranges)

    # -- writing ---------------------------------------------------------------------------------------

    def refusal(self) -> FelixError | None:
        """Why nothing may be decided now."""
        if self._actor is None:
            return UnavailableError(
                f"Positions in shard {self._number} of {self._stream.name} are being read.",
                code=Code.UNAVAILABLE,
                retry_after_ms=200,
            )
        return self._actor.refusal()

    def unread(self) -> FelixError | None:
        """Why how far subscriptions have come is not known now. Where it only cannot change, as on a full disk, None."""
        actor = self._actor
        return None if actor is not None and actor.is_whole and actor.journal.lost is None else self.refusal()

    def write(self, entries: Iterable[Entry], done: Done) -> None:
        """Write entries of one subscription that are applied already; `done` once all are durable, or refused. It may be called at
        once. Without entries it comes behind what was written before: an acknowledgement that is repeated is no more durable than the first one."""
        assert self._actor is not None
        entries = list(entries)
        if not entries:
            self._actor.write((), done)
            return
        subscription = entries[0].subscription
        committed = self._held[subscription].committed if subscription in self._held else 0
        writes, durable = self._writes, self._durable
        writes[subscription] = writes.get(subscription, 0) + 1

        def written(error: FelixError | None) -> None:
            writes[subscription] -= 1
            if not writes[subscription]:
                del writes[subscription]
            if error is None and subscription in self._held:
                durable[subscription] = committed
                self._settled(subscription)
            done(error)

        self._actor.write([encode(entry) for entry in entries], written)

    # -- dead letters ----------------------------------------------------------------------------------

    def bury(self, subscription: bytes, dying: Iterable[Dying]) -> None:
        """Carry these records, which are dying by their `Progress`, to the subscription's dead letters."""
        letters = self._letters_of(subscription)
        if letters is None:
            return
        by_reason: dict[str, list[Dying]] = {}
        for each in dying:
            by_reason.setdefault(each.reason, []).append(each)
        for reason, some in by_reason.items():
            letters.send([each.offset for each in some], [each.attempts for each in some], reason)

    def _letters_of(self, subscription: bytes) -> DeadLetters | None:
        """None where the subscription is no longer defined."""
        letters = self._letters.get(subscription)
        definition = self._definitions().get(subscription)
        if letters is None and definition is not None:

            def append(data: bytes, done: Done) -> None:
                self.write([Letter(subscription, data)], done)

            def landed(move: Move) -> None:
                if subscription not in self._held:
                    return  # deleted meanwhile
                self._held[subscription].buried(move.held)
                self._settled(subscription)
                self._landed(subscription, len(move.offsets))

            letters = self._letters[subscription] = DeadLetters(
                self._broker,
                self._stream,
                self.shard,
                JournalKind.SUBSCRIPTIONS,
                append,
                landed,
                lambda move: None,
                Origin(definition.name, subscription, definition.settings.retries),
                lambda: self._dead_letters_named_by(subscription),
            )
        return letters

    def give_back(self, returning: Returning, done: Done) -> None:
        """Deliver these records again, once their dead letters are out of their queue. `done` then, or why that is not known."""
        self.progress(returning.subscription).take_back(returning.offsets)
        self._returns_of(returning.subscription).begin(returning, done)

    def _returns_of(self, subscription: bytes) -> Returns:
        returns = self._returns.get(subscription)
        if returns is None:

            def returned(returning: Returning) -> None:
                self.progress(subscription).returned(returning.offsets)
                self._returned(subscription, self._number)

            returns = self._returns[subscription] = Returns(
                subscription,
                f"{self._stream.name}, shard {self._number}",
                lambda entry, done: self.write([entry], done),
                lambda returning: self._letter_queues.remove(self.shard, returning),
                self._letter_queues.leave,
                returned,
            )
        return returns

    async def settle_dead(self, subscription: bytes) -> None:
        """Return once what is on its way to the subscription's dead letters, or back, has arrived."""
        while self._is_moving(subscription):  # noqa: ASYNC110 - nobody else asks
            await asyncio.sleep(SETTLE_LOOK_S)

    def _is_moving(self, subscription: bytes) -> bool:
        letters = self._letters.get(subscription)
        return self.is_returning(subscription) or (letters is not None and any(letters.pending))

    def is_returning(self, subscription: bytes) -> bool:
        """Whether dead letters of the subscription are on their way back."""
        returns = self._returns.get(subscription)
        return returns is not None and any(returns.pending)

    def _dead_letters_named_by(self, subscription: bytes) -> str:
        definition = self._definitions().get(subscription)
        return "" if definition is None else definition.dead_letter_by or definition.creator

    def alter(self, subscription: bytes, settings: SubscriptionSettings) -> None:
        """The subscription has other settings."""
        self.progress(subscription).settings = settings
        letters = self._letters.get(subscription)
        if letters is not None:
            letters.alter(settings.retries)

    # -- endings ---------------------------------------------------------------------------------------

    def drop(self, subscription: bytes, done: Done) -> None:
        """The subscription was deleted."""
        self._forget(subscription)
        self.write([Dropped(subscription)], done)

    def _forget(self, subscription: bytes) -> None:
        self._held.pop(subscription, None)
        self._durable.pop(subscription, None)
        letters = self._letters.pop(subscription, None)
        if letters is not None:
            letters.stop()
        returns = self._returns.pop(subscription, None)
        if returns is not None:
            returns.stop()

    async def close(self) -> None:
        """Write what waits; nothing is decided afterwards."""
        for letters in self._letters.values():
            letters.stop()
        for returns in self._returns.values():
            returns.stop()
        if self._actor is not None:
            await self._actor.close()
