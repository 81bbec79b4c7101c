"""One durable subscription at work: its consumers, who has which shard, what is due, what they ask for.

It joins the pure parts (`progress`, `group`) with the stores that keep them and the consumers that are notified. Nothing here
reads a record: consumers deliver whole batches through region.delivery, and say what they have delivered.

Invariants:
- an acknowledgement is answered once it is durable;
- a consumer's notifications of a shard come in this order: assigned, redeliveries, revoked; each with the generation of that
  assignment;
- a generation is above every earlier one of this broker and of those before it (it is no less than the time in ms).
On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from felix.consumer_messages import Nack, ShardAck
from felix.errors import FelixError, RequestError, UnavailableError
from felix.messages import ConsumerState, SubscriptionShard, SubscriptionState
from felix.names import SpiffeId
from felix.ranges import RangeSet, pairs
from region.broker import Broker
from region.gather import Done, Gather, ignore, resolving
from region.metadata.records import Subscription
from region.streams.hosted import HostedStream
from region.subscriptions.entries import Entry, Returning, clipped
from region.subscriptions.group import Group, Step
from region.subscriptions.progress import Progress, Redelivered
from region.subscriptions.store import SubscriptionStore
from region.views.due import DueTimer
from region.views.history import known_end, told
from region.views.wall_clock import WallClock

log = logging.getLogger("felix.region.subscriptions")

DRAIN_MS_MAX: Final = 30_000
"""How long a consumer may finish what it has in hand of a shard that goes to another; less where the ack timeout is."""
RETRY_MS: Final = 100
"""After what the journal could not take."""
TICK_S_MIN: Final = 0.002
"""Due work that must wait (its shard is being reassigned) is checked again after this, not at once."""
NO_EPOCHS: Final[Mapping[int, Sequence[int]]] = MappingProxyType({})


class Member(Protocol):
    """What a subscription asks of a consumer."""

    name: str

    @property
    def identity(self) -> SpiffeId: ...

    def assigned(self, shard: int, generation: int, position: int, skip: RangeSet) -> None:
        """The shard is the consumer's; deliver it from `position` on."""

    def revoked(self, shard: int, generation: int, drain_ms: int) -> None:
        """Deliver nothing more of it; it is to be given back, or with 0 is gone already."""

    def redelivered(self, shard: int, generation: int, again: Redelivered) -> None:
        """Deliver these once more."""

    def altered(self, ack_timeout_ms: int) -> None:
        """The ack timeout is another."""

    def wake(self) -> None:
        """There is room for more."""

    def dismiss(self, error: FelixError) -> None:
        """The consumer ends."""


@dataclass(slots=True)
class Counts:
    """What became of records since the start: of one subscription, or of all that a broker has had, those that are gone included."""

    redelivered: int = 0
    dead: int = 0
    skipped: int = 0


class DurableSubscription:
    """See the module. `stores` are in order of their shards; `total` counts for all subscriptions of the broker."""

    def __init__(
        self,
        broker: Broker,
        stream: HostedStream,
        definition: Subscription,
        stores: Sequence[SubscriptionStore],
        next_generation: Callable[[], int],
        total: Counts,
    ) -> None:
        self.stream = stream
        self.definition = definition
        self.id = bytes.fromhex(definition.id)
        self._counts = Counts()
        self._counted = self._counts, total
        self._clock = WallClock(broker.streams_ms, broker.boot_ms, self._clock_set)
        self.active_ms = broker.streams_ms()
        """When there was a consumer for the last time; the start of the broker where there was none since."""
        self._broker = broker
        self._stores = stores
        self._next_generation = next_generation
        settings = definition.settings
        self._drain_ms = min(settings.ack_timeout_ms, DRAIN_MS_MAX)
        self._group = self._new_group()
        self._members: dict[int, Member] = {}
        self._signs_ms: dict[int, int] = {}
        self._last_member = 0
        self._timer = DueTimer(self._tick, lambda: broker.streams_ms(), least_s=TICK_S_MIN)
        self._over: FelixError | None = None
        """Why it is closed."""
        self.redriving = asyncio.Lock()
        """Held by whoever gives dead letters back: one at a time."""

    def _new_group(self) -> Group:
        return Group(len(self._stores), drain_ms=self._drain_ms, exclusive=self.definition.settings.exclusive)

    def alter(self, definition: Subscription) -> None:
        """Go by other settings from now on, where the definition is a newer one; what is out keeps its time."""
        if definition.id != self.definition.id or definition.revision <= self.definition.revision:
            return
        settings, before = definition.settings, self.definition.settings
        self.definition = definition
        if self._over is not None or settings == before:
            return
        self._drain_ms = self._group.drain_ms = min(settings.ack_timeout_ms, DRAIN_MS_MAX)
        for store in self._stores:
            store.alter(self.id, settings)
        for member in self._members.values():
            if settings.ack_timeout_ms != before.ack_timeout_ms:
                member.altered(settings.ack_timeout_ms)
            member.wake()
        self._arm()

    def progress(self, shard: int) -> Progress:
        return self._stores[shard].progress(self.id)

    def durable(self, shard: int) -> int:
        """The committed offset that no crash takes back."""
        return self._stores[shard].durable(self.id)

    def refusal(self) -> FelixError | None:
        """Why nothing can be decided now."""
        if self._over is not None:
            return self._over
        for store in self._stores:
            refused = store.refusal()
            if refused is not None:
                return refused
        return None

    def unread(self) -> FelixError | None:
        """Why its positions are not known now."""
        return next((why for store in self._stores if (why := store.unread()) is not None), None)

    def now_ms(self) -> int:
        """The time by which all here goes. Where the clock was set since the last look, what lasts has the time that is left of it."""
        return self._clock.now_ms()

    def _clock_set(self, by_ms: int) -> None:
        self.active_ms += by_ms
        self._signs_ms = {number: sign_ms + by_ms for number, sign_ms in self._signs_ms.items()}
        self._group.clock_set(by_ms)
        for number, store in enumerate(self._stores):
            entries = self.progress(number).clock_set(by_ms)
            if entries and store.refusal() is None:
                self._write(number, entries)
        self._timer.cancel()
        self._arm()

    # -- consumers -------------------------------------------------------------------------------------

    @property
    def consumer_count(self) -> int:
        return len(self._members)

    def join(self, member: Member) -> int:
        """Add a consumer; it is notified of its shards before this returns. Returns its number."""
        self._last_member += 1
        number = self._last_member
        self._members[number] = member
        self._signs_ms[number] = self.now_ms()
        return number

    def enter(self, number: int) -> None:
        """The consumer that joined can be notified of its shards now."""
        self._group.join(number)
        self._rebalance()

    def leave(self, number: int, *, died: bool) -> None:
        """The consumer is gone; what it had goes to others."""
        if self._members.pop(number, None) is None:
            return
        self._signs_ms.pop(number, None)
        now_ms = self.active_ms = self.now_ms()
        if number not in self._group.members:
            return
        for shard in self._group.leave(number):
            self._write(shard, self.progress(shard).release(now_ms, died=died))
        self._rebalance()

    def released(self, number: int, shard: int, generation: int) -> None:
        """The consumer gave a shard back. Raises RequestError(CONSUMER_FENCED)."""
        progress = self._owned(number, shard, generation)
        self._group.released(number, shard)
        self._write(shard, progress.release(self.now_ms(), died=False))
        self._rebalance()

    def _owned(self, number: int, shard: int, generation: int) -> Progress:
        """Raises RequestError(CONSUMER_FENCED)."""
        self._sign(number)
        refused = self._fence(number, shard, generation)
        if refused is not None:
            raise refused
        return self.progress(shard)

    def _fence(self, number: int, shard: int, generation: int) -> RequestError | None:
        if not 0 <= shard < len(self._stores):
            return RequestError(f"{self.stream.name} has no shard {shard}.")
        refused = self.progress(shard).fence(generation)
        if refused is None and self._group.owners.get(shard) != number:
            refused = self.progress(shard).fence(0)
        return refused

    def _rebalance(self) -> None:
        now_ms = self.now_ms()
        for step, shard, number in self._group.rebalance(now_ms):
            member, progress = self._members[number], self.progress(shard)
            generation = progress.generation
            match step:
                case Step.ASSIGN:
                    self._assign(member, shard)
                case Step.REVOKE:
                    progress.unsent(now_ms)
                    member.revoked(shard, generation, self._drain_ms)
                case Step.FENCE:
                    self._write(shard, progress.release(now_ms, died=False))
                    member.revoked(shard, generation, 0)
        self._arm()

    def _assign(self, member: Member, shard: int) -> None:
        progress = self.progress(shard)
        generation = self._next_generation()
        skip = progress.assign(generation)
        member.assigned(shard, generation, progress.committed, skip)

    # -- calls -----------------------------------------------------------------------------------------

    def ack(
        self, number: int, acks: Sequence[ShardAck], done: Callable[[FelixError | None, list[int]], None]
    ) -> None:
        """Settle records; `done` with the shards that were fenced, once the others are durable.

        Raises RequestError(OFFSET_OUT_OF_RANGE), with nothing done; ProtocolError(FRAME_MALFORMED).
        """
        fenced: list[int] = []
        work: list[tuple[int, list[tuple[int, int]]]] = []
        for each in acks:
            if self._fence(number, each.shard, each.generation) is not None:
                fenced.append(each.shard)
                continue
            progress = self.progress(each.shard)
            ranges = pairs(each.ranges) + progress.up_to(each.through)
            refused = progress.check(ranges)
            if refused is not None:
                raise refused
            work.append((each.shard, ranges))
        self._sign(number)
        gather = Gather(lambda error: done(error, fenced))
        for shard, ranges in work:
            progress = self.progress(shard)
            had_room = progress.has_room
            self._stores[shard].write(progress.ack(ranges), gather.part())
            if not had_room:
                self._wake(shard)
        gather.asked()

    def nack(self, number: int, call: Nack, done: Done) -> None:
        """Records failed; again later. Raises RequestError(CONSUMER_FENCED)."""
        progress = self._owned(number, call.shard, call.generation)
        entries = progress.nack(pairs(call.ranges), call.delay_ms, call.reason, self.now_ms())
        self._stores[call.shard].write(entries, done)
        self._arm()

    def renew(self, number: int, shard: int, generation: int, offset: int) -> None:
        """Restart the whole ack timeout of the delivered records from `offset` on. Raises RequestError(CONSUMER_FENCED)."""
        now_ms = self.now_ms()
        self._owned(number, shard, generation).renew(offset, now_ms)
        if self._is_sooner(now_ms):
            self._arm()

    def _sign(self, number: int) -> None:
        """The consumer works."""
        self._signs_ms[number] = self.now_ms()
        if number in self._group.members and self._group.resume(number):
            asyncio.get_running_loop().call_soon(self._tick)

    def _wake(self, shard: int) -> None:
        owner = self._group.owners.get(shard)
        if owner is not None and owner in self._members:
            asyncio.get_running_loop().call_soon(self._members[owner].wake)
            if self.progress(shard).is_back:
                self._arm()

    # -- delivery, told by the consumer that does it ---------------------------------------------------

    def may_deliver(self, shard: int) -> bool:
        return self.progress(shard).has_room

    def wanted_from(self, shard: int, offset: int) -> int:
        progress = self.progress(shard)
        return progress.settled.end_of(max(offset, progress.committed))

    def delivered(self, shard: int, base_offset: int, next_offset: int) -> None:
        progress = self.progress(shard)
        now_ms = self.now_ms()
        progress.delivered(base_offset, next_offset, now_ms)
        if not self._timer.due_ms or progress.waiting_count or self._is_sooner(now_ms):
            self._arm()

    def redelivered_batch(self, shard: int, base_offset: int, next_offset: int) -> None:
        now_ms = self.now_ms()
        self._write(shard, self.progress(shard).redelivered(base_offset, next_offset, now_ms))
        if not self._timer.due_ms or self._is_sooner(now_ms):
            self._arm()

    def _is_sooner(self, now_ms: int) -> bool:
        """Whether what goes out now is due before what is waited for: only after the ack timeout was altered."""
        return now_ms + self.definition.settings.ack_timeout_ms < self._timer.due_ms

    def gone(self, shard: int, next_offset: int) -> None:
        progress = self.progress(shard)
        skipped = sum(
            following - first
            for first, following in progress.settled.missing(progress.committed, next_offset)
        )
        for counts in self._counted:
            counts.skipped += skipped
        self._write(shard, progress.gone(next_offset))

    # -- time ------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Be called when the next thing is due."""
        times = [self._group.next_ms(), *(self.progress(n).next_ms() for n in range(len(self._stores)))]
        if self._over is None:
            self._timer.arm(min((each for each in times if each is not None), default=0))

    def _tick(self) -> None:
        if self._over is not None:
            return
        self._timer.cancel()
        if self.refusal() is not None:
            self._timer.arm(self.now_ms() + RETRY_MS)
            return
        now_ms = self.now_ms()
        for shard in range(len(self._stores)):
            self._look_at(shard, now_ms)
        self._rebalance()

    def _look_at(self, shard: int, now_ms: int) -> None:
        progress = self.progress(shard)
        owner = self._group.owners.get(shard)
        expired = progress.expire(now_ms)
        self._write(shard, expired)
        silent_ms = self.definition.settings.ack_timeout_ms
        if (
            (progress.held_up(now_ms) or expired)
            and owner is not None
            and self._signs_ms[owner] + silent_ms <= now_ms
        ):
            self._group.stall(owner)
        dying = progress.give_up(now_ms)
        if dying:
            self._stores[shard].bury(self.id, dying)
        if owner is None or shard in self._group.draining:
            return
        for again in progress.again(now_ms):
            redelivered = sum(following - first for first, following in again.ranges)
            for counts in self._counted:
                counts.redelivered += redelivered
            self._members[owner].redelivered(shard, progress.generation, again)

    def buried(self, records: int) -> None:
        """So many records are dead letters now."""
        for counts in self._counted:
            counts.dead += records
        for member in self._members.values():
            asyncio.get_running_loop().call_soon(member.wake)
        self._arm()

    # -- dead letters that are given back --------------------------------------------------------------

    def give_back(self, shard: int, returning: Returning, done: Done) -> None:
        """Deliver these records again, once their dead letters are out of their queue; `done` then, or why that is not known. Whoever calls has asked
        `refusal`, and of each record `Progress.is_taken`."""
        self._stores[shard].give_back(returning, done)
        self._arm()

    def returned(self, shard: int) -> None:
        """Records of the shard are to be delivered as for the first time."""
        progress, owner = self.progress(shard), self._group.owners.get(shard)
        if owner is not None and not progress.has_begun and shard not in self._group.draining:
            # Nothing is out, so nothing is fenced by it.
            member, generation = self._members[owner], progress.generation
            self._write(shard, progress.release(self.now_ms(), died=False))
            member.revoked(shard, generation, 0)
            self._assign(member, shard)
        self._wake(shard)
        self._arm()

    @property
    def is_returning(self) -> bool:
        """Whether dead letters are on their way back."""
        return any(store.is_returning(self.id) for store in self._stores)

    async def settle_dead(self) -> None:
        """Return once what is on its way to the dead letters, or back, has arrived."""
        for store in self._stores:
            await store.settle_dead(self.id)

    # -- positions -------------------------------------------------------------------------------------

    async def position(self, starts: dict[int, int]) -> None:
        """Start at these offsets, by shard; the shard's consumer is fenced and gets the shard again. Durable once this
        returns. Raises UnavailableError while a transaction is being committed that acknowledged records of these shards: it would settle them after the
        move, too.
        """
        refused = self.refusal()
        if refused is not None:
            raise refused.with_traceback(None)
        if any(self.progress(shard).is_reserved for shard in starts):
            raise UnavailableError(
                f"A transaction that acknowledges records for {self.definition.name} is being committed.",
                hint="Try again: it is over soon. A stream of the transaction that no broker leads holds it up.",
                retry_after_ms=RETRY_MS,
            )
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gather = Gather(resolving(written))
        for shard, offset in starts.items():
            progress = self.progress(shard)
            owner, generation = self._group.owners.get(shard), progress.generation
            self._stores[shard].write(progress.move(offset), gather.part())
            if owner is None:
                continue
            member = self._members[owner]
            member.revoked(shard, generation, 0)
            if shard in self._group.draining:
                self._group.released(owner, shard)
            else:
                self._assign(member, shard)
        self._rebalance()
        gather.asked()
        await written

    # -- transactions ----------------------------------------------------------------------------------

    def reserve(self, acks: Sequence[ShardAck]) -> FelixError | None:
        """Keep what a transaction acknowledges: all of it, or an error and nothing."""
        refused = self.refusal()
        if refused is not None:
            return refused
        kept: list[tuple[Progress, list[tuple[int, int]]]] = []
        # All of them first: one that is malformed must leave nothing kept.
        wanted = [RangeSet(pairs(each.ranges)) for each in acks]
        for each, ranges in zip(acks, wanted, strict=True):
            if not 0 <= each.shard < len(self._stores):
                error: FelixError | None = RequestError(f"{self.stream.name} has no shard {each.shard}.")
            else:
                progress = self.progress(each.shard)
                if each.through >= 0:
                    # Named by itself, so that what is settled already is refused rather than passed over.
                    ranges.add(each.through, each.through + 1)
                    for first, following in progress.up_to(each.through - 1):
                        for part in progress.settled.missing(first, following):
                            ranges.add(*part)
                error = progress.fence(each.generation) or progress.reserve(list(ranges))
            if error is not None:
                for held, reserved in kept:
                    held.unreserve(reserved, self.now_ms())
                self._arm()
                return error
            kept.append((progress, list(ranges)))
        for each, (_, reserved) in zip(acks, kept, strict=True):
            self._stores[each.shard].reserved(self.id, reserved)
        return None

    def epochs_of(self, acks: Iterable[ShardAck]) -> dict[int, list[int]]:
        """By shard, what `settle` is told of the records that these acknowledge. A shard that there is not, or that does not serve, is refused by `reserve`."""
        known = (each.shard for each in acks if 0 <= each.shard < len(self._stores))
        logs = ((number, self._stores[number].records()) for number in known)
        return {number: told(log) for number, log in logs if log is not None}

    def settle(
        self, acks: Sequence[ShardAck], done: Done, epochs: Mapping[int, Sequence[int]] = NO_EPOCHS
    ) -> None:
        """Settle the records that a written transaction acknowledges; idempotent. `done` is called once it is durable. `epochs`: by shard, those that the records had: what
        was lost since is not settled in what stands in its place."""
        gather = Gather(done)
        for each in acks:
            progress, records = self.progress(each.shard), self._stores[each.shard].records()
            if records is None:
                gather.part()(UnavailableError(f"Shard {each.shard} of {self.stream.name} does not serve."))
                continue
            ranges, end = ranges_of(each, progress.committed), known_end(records, epochs.get(each.shard))
            meant = pairs(each.ranges) + progress.up_to(each.through)
            entries = progress.ack(clipped(meant, end))
            progress.unreserve(ranges, self.now_ms())
            self._stores[each.shard].write(entries, self._settled(each, gather.part()))
            self._wake(each.shard)
        gather.asked()

    def _settled(self, ack: ShardAck, done: Done) -> Done:
        def settled(error: FelixError | None) -> None:
            # Where the journal refused it, it is asked again: nobody else gets the records meanwhile.
            if error is None:
                self._stores[ack.shard].unreserved(self.id, ranges_of(ack, 0))
            done(error)

        return settled

    def unreserve(self, acks: Sequence[ShardAck]) -> None:
        """The transaction was not written: its records are redelivered."""
        for each in acks:
            progress = self.progress(each.shard)
            self._stores[each.shard].unreserved(self.id, ranges_of(each, 0))
            progress.unreserve(ranges_of(each, progress.committed), self.now_ms())
        self._arm()

    # -- what is so ------------------------------------------------------------------------------------

    def describe(self, lag_ms: dict[int, int] | None = None) -> SubscriptionState:
        """As clients see it; without shards and consumers where `lag_ms`, by shard, is None."""
        definition = self.definition
        detail = lag_ms is not None
        return SubscriptionState(
            definition.stream,
            definition.name,
            definition.settings,
            definition.creator,
            definition.created_ms,
            self.stream.incarnation,
            [self._describe_shard(n, (lag_ms or {}).get(n, -1)) for n in range(len(self._stores)) if detail],
            [self._describe_member(*each) for each in self._members.items() if detail],
            self._counts.redelivered,
            self._counts.dead,
            self._counts.skipped,
        )

    def _describe_shard(self, number: int, lag_ms: int) -> SubscriptionShard:
        progress, shard = self.progress(number), self._stores[number].shard
        lag = progress.lag(shard.high_watermark)
        held = shard.high_watermark - shard.log_start_offset
        owner = self._group.owners.get(number)
        return SubscriptionShard(
            number,
            self.durable(number),
            shard.high_watermark,
            self._members[owner].name if owner is not None else "",
            progress.settled.count,
            progress.out_count,
            progress.waiting_count,
            lag,
            (shard.disk_bytes or shard.ring_bytes) * min(lag, held) // held if held else 0,
            lag_ms if lag else 0,
        )

    def _describe_member(self, number: int, member: Member) -> ConsumerState:
        shards = self._group.of(number)
        state = "active" if shards else "standby"
        if self._group.members.get(number):
            state = "stalled"
        return ConsumerState(number, member.name, str(member.identity), state, shards)

    def stats(self) -> tuple[int, int]:
        """Records not settled, and records out, over all shards."""
        lag = out = 0
        for number, store in enumerate(self._stores):
            progress = self.progress(number)
            lag += progress.lag(store.shard.high_watermark)
            out += progress.out_count
        return lag, out

    # -- endings ---------------------------------------------------------------------------------------

    def dismiss(self, error: FelixError) -> None:
        """Every consumer ends, with this error; the subscription stays. What they had is nobody's."""
        members, self._members = self._members, {}
        self._group = self._new_group()
        now_ms = self.active_ms = self.now_ms()
        for number in range(len(self._stores)):
            progress = self.progress(number)
            if progress.generation:
                self._write(number, progress.release(now_ms, died=False))
        for member in members.values():
            member.dismiss(error)

    def close(self, why: FelixError) -> None:
        """It is deleted, or its stream is closed: every consumer ends with this error, and whoever comes later."""
        self.dismiss(why)
        self._over = why
        self._timer.cancel()

    def _write(self, shard: int, entries: Iterable[Entry]) -> None:
        """Entries that nobody waits for."""
        self._stores[shard].write(entries, ignore)


def ranges_of(ack: ShardAck, committed: int) -> list[tuple[int, int]]:
    """What is acknowledged, as ranges. Raises ProtocolError(FRAME_MALFORMED)."""
    ranges = pairs(ack.ranges)
    if ack.through + 1 > committed:
        ranges.append((committed, ack.through + 1))
    return ranges
