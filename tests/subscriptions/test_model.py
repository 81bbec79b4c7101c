"""Durable subscriptions against a simple model: thousands of steps of consumers that come, work, fail, stall, die and leave, seeks,
redrives, also such as are held up by the queue of the dead letters, journals that are written anew, transactions and restarts. Real journals, real logs, real delivery; only the wire and the clock are the test's."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from long_runs import count, seeded
from runtimes import with_wall
from slow_runs import only_slow

from felix.batch import Batch, NewRecord, decode_header, encode_batch
from felix.consumer_messages import Nack, ShardAck, SubscriptionAcks
from felix.errors import Code, FelixError, UnavailableError
from felix.frames import FrameDecoder, FrameType, decode_gap
from felix.messages import CreateSubscription, RedriveSubscription
from felix.names import SpiffeId, StreamName
from felix.ranges import RangeSet
from felix.settings import Durability, Retries, SubscriptionSettings
from felix.transport.port import TransportLimits
from region.broker import Broker
from region.config import RegionConfig
from region.delivery import Subscription
from region.limits.budget import Budgets
from region.limits.quota import Throttle
from region.log.directory import LogDirectory
from region.log.shard import Appended, ShardLog
from region.metadata.catalog import Catalog
from region.metadata.memory import MemoryStore
from region.metadata.mirror import CatalogMirror
from region.metadata.records import StreamConfig
from region.queue.service import QueueService
from region.streams.table import StreamTable
from region.subscriptions import redrive, returns
from region.subscriptions.entries import Returning
from region.subscriptions.progress import Redelivered
from region.subscriptions.service import SubscriptionService
from region.subscriptions.subscription import DurableSubscription
from region.views.dead_letter import read_records

# Thousands of syncs, and each takes its time on a slow disk.
pytestmark = pytest.mark.timeout(900)

ORDERS = StreamName.parse("acme/payments/orders")
OPERATOR = SpiffeId.parse("spiffe://us-east.acme/operator/operator")
SHARDS = 3
ACK_TIMEOUT_MS = 20_000_000
"""Longer than all the waits of an example: `stall` alone takes as long."""
UNACKED_MAX = 40
ATTEMPTS_MAX = (1, 2, 4)
"""With one, dead letters are many."""
DELAY_MS = 100
EXAMPLES = 10
"""Of a round: some 3,500 steps. Rounds are played until there are enough."""
ROUNDS_MOST = 40
STEPS = 400
STEPS_LEAST = count(3_000, 20_000)
STEPS_LEAST_SLOW = 10_000
STEPS_FOR_A_RESTART = 500
"""At most: that many restarts are among them at least."""

T = TypeVar("T")


class PlainSeal:
    """Records at rest as they are: sealing is tested elsewhere."""

    def seal(self, batch: Batch) -> Batch:
        return batch

    def open_batch(self, batch: Batch) -> Batch:
        return batch

    def commitment(self) -> bytes:
        return bytes(32)

    def tag(self, purpose: str, data: bytes) -> bytes:
        return b""


class Player:
    """A consumer: real delivery into it, and what a client makes of the frames (felix.consumer does the same)."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.identity: SpiffeId = OPERATOR
        self.ended = False
        self.takes = True
        """False while its connection takes nothing."""
        self.generations: dict[int, int] = {}
        self.positions: dict[int, int] = {}
        self.skips: dict[int, RangeSet] = {}
        self.again: dict[int, dict[int, int]] = {}
        self.held: dict[int, dict[int, int]] = {}
        """Records handed out and not dealt with, by shard: their attempts."""
        self.draining: set[int] = set()
        self.decoder = FrameDecoder()
        subscription = world.subscription
        meter = world.broker.quotas.use(world.meter, ORDERS.tenant)
        meter.hold("subscriptions")
        self.delivery = Subscription(
            world.broker, self, 0, 0, subscription.stream, {}, 1 << 40, None, meter, subscription
        )  # fmt: skip
        self.number = subscription.join(self)
        subscription.enter(self.number)

    # region.ports.DeliverySink

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        for frame in self.decoder.feed(data):
            if frame.type is FrameType.GAP:
                gap = decode_gap(frame.body)
                raise AssertionError(f"nothing is deleted here: {gap}")
            header = decode_header(frame.body)
            self.batch(header.shard, header.base_offset, header.next_offset)

    def may_send(self) -> bool:
        return self.takes

    def settle_delivery(self) -> int:
        return 0

    def throttled(self, throttle: Throttle) -> None:
        raise AssertionError(throttle)

    def drop_subscription(self, number: int) -> None:
        raise AssertionError("delivery failed")

    # what a client does

    def batch(self, shard: int, base: int, following: int) -> None:
        if following <= self.positions[shard]:
            for offset in [n for n in self.again[shard] if base <= n < following]:
                self.hand_out(shard, offset, self.again[shard].pop(offset))
            return
        first, self.positions[shard] = max(base, self.positions[shard]), following
        for offset in range(first, following):
            if offset not in self.skips[shard]:
                self.hand_out(shard, offset, 1)

    def hand_out(self, shard: int, offset: int, attempt: int) -> None:
        try:
            self.world.handed_out(self, shard, offset, attempt)
        except AssertionError as error:
            # Delivery goes on without it, and the event loop logs it: the step must not.
            self.world.broken = self.world.broken or error
            raise
        self.held[shard][offset] = attempt

    # region.subscriptions.subscription.Member

    def assigned(self, shard: int, generation: int, position: int, skip: RangeSet) -> None:
        assert shard not in self.generations
        self.generations[shard] = generation
        self.positions[shard] = position
        self.skips[shard] = skip.copy()
        self.again[shard] = {}
        self.held[shard] = {}
        self.delivery.take_up(shard, position)
        self.wake()

    def revoked(self, shard: int, generation: int, drain_ms: int) -> None:
        assert self.generations[shard] == generation
        if self.delivery.delivers(shard):
            self.delivery.let_go(shard)
        if drain_ms:
            self.draining.add(shard)
            self.again[shard].clear()
        else:
            self.forget(shard)

    def redelivered(self, shard: int, generation: int, again: Redelivered) -> None:
        assert self.generations[shard] == generation
        for first, following in again.ranges:
            for offset in range(first, following):
                self.again[shard][offset] = again.attempt
        self.delivery.redelivery(shard, again.ranges)
        self.wake()

    def wake(self) -> None:
        asyncio.get_running_loop().call_soon(self.delivery.pump)

    def dismiss(self, error: FelixError) -> None:
        self.delivery.close()

    def forget(self, shard: int) -> None:
        self.draining.discard(shard)
        if self.delivery.delivers(shard):
            self.delivery.let_go(shard)
        for held in (self.generations, self.positions, self.skips, self.again, self.held):
            held.pop(shard, None)  # type: ignore[attr-defined]


class World:
    """A broker without a wire, its players, and the model: what is settled, and how often each record has failed."""

    def __init__(self, folder: Path, attempts_max: int) -> None:
        self.folder = folder
        self.attempts_max = attempts_max
        self.store = MemoryStore()
        self.now_ms = 1_000_000_000
        self.ahead_ms = 0
        """by how much the wall clock is more than the one that cannot be set"""
        self.ends = [0] * SHARDS
        self.settled: list[set[int]] = [set() for _ in range(SHARDS)]
        self.failures: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self.given: list[set[int]] = [set() for _ in range(SHARDS)]
        """Given back, and not handed out since."""
        self.returning: list[set[int]] = [set() for _ in range(SHARDS)]
        """On their way back while their dead letters cannot be taken out: delivered to nobody."""
        self.removable = asyncio.Event()
        self.removable.set()
        self.giving: set[tuple[int, int]] = set()
        """Records that may come at any time, as they are being given back."""
        self.players: list[Player] = []
        self.made = 0
        self.handed = 0
        self.broken: AssertionError | None = None
        """The first thing handed out that the model does not allow."""

    async def start(self) -> None:
        catalog = Catalog(self.store, "us-east")
        self.mirror = CatalogMirror(self.store, "us-east")
        await self.mirror.start()
        budgets = Budgets()
        self.directory = LogDirectory(self.folder, "us-east")
        streams = StreamTable(self.directory, budgets.ring, lambda *_: PlainSeal())
        self.broker = Broker(
            RegionConfig(region="us-east", mesh="acme", country="US"),
            streams=streams,
            catalog=catalog,
            budgets=budgets,
            transport_limits=TransportLimits(),
            runtime=with_wall(lambda: self.now_ms + self.ahead_ms),
        )
        self.broker.boot_ms = lambda: self.now_ms
        self.meter = self.broker.quotas.enter(str(OPERATOR))
        self.queues = QueueService(self.broker)
        self.service = SubscriptionService(self.broker, catalog, self.mirror, self.queues)
        letters = self.service._letters
        remove = letters.remove

        async def remove_once_possible(records: ShardLog, returning: Returning) -> None:
            if not self.removable.is_set():
                raise UnavailableError("The queue's disk is full.")
            await remove(records, returning)

        letters.remove = remove_once_possible  # type: ignore[method-assign]
        config = StreamConfig(shards=SHARDS, durability=Durability())
        if self.made or self.ends != [0] * SHARDS:
            for record in list(self.mirror.streams.values()):
                await streams.open(record)
            await self.service.start()
        else:
            await self.broker.create_stream(ORDERS, config)
            await self.service.start()
            retries = Retries(attempts_max=self.attempts_max, interval_ms=DELAY_MS, interval_ms_max=DELAY_MS)
            wanted = SubscriptionSettings("earliest", ACK_TIMEOUT_MS, retries, UNACKED_MAX)
            await self.service.create(OPERATOR, CreateSubscription(str(ORDERS), "billing", wanted))
        self.made += 1
        self.subscription: DurableSubscription = self.service._held[ORDERS].by_name["billing"]

    async def stop(self) -> None:
        self.broker.leaving = True
        for player in self.players:
            self.subscription.leave(player.number, died=False)
            player.delivery.close()
        self.players.clear()
        await self.service.close()
        await self.queues.close()
        await self.broker.streams.close()
        await self.directory.close()
        await self.mirror.close()

    # -- the model --------------------------------------------------------------------------------------

    def handed_out(self, player: Player, shard: int, offset: int, attempt: int) -> None:
        self.handed += 1
        if (shard, offset) in self.giving:
            self.giving.discard((shard, offset))
            self.settled[shard].discard(offset)
        assert offset not in self.settled[shard], "what is settled does not come again"
        assert offset not in self.returning[shard], (
            "what is on its way back comes once its dead letter is gone"
        )
        failures = self.failures[shard].get(offset, 0)
        assert attempt == failures + 1, (shard, offset, attempt, failures)
        assert attempt <= self.attempts_max
        assert self.subscription.progress(shard).generation == player.generations[shard]
        for other in self.players:
            assert offset not in other.held.get(shard, {}), "one consumer at a time has a record"
        self.given[shard].discard(offset)

    def settle(self, shard: int, offset: int) -> None:
        self.settled[shard].add(offset)
        self.failures[shard].pop(offset, None)
        self.given[shard].discard(offset)
        self.returning[shard].discard(offset)

    def fail(self, shard: int, offset: int) -> None:
        self.failures[shard][offset] = self.failures[shard].get(offset, 0) + 1

    async def bury(self) -> bool:
        """Records that had all their attempts land among the dead letters. Returns whether there were any."""
        dead = [
            (shard, offset)
            for shard in range(SHARDS)
            for offset, count in self.failures[shard].items()
            if count >= self.attempts_max
        ]
        if not dead:
            return False
        self.subscription._tick()
        async with asyncio.timeout(120):
            for shard, offset in dead:
                while not self.is_settled(shard, offset):  # noqa: ASYNC110 - nobody announces it
                    await asyncio.sleep(0.001)
                self.settle(shard, offset)
        return True

    async def letters(self) -> dict[int, tuple[int, int]]:
        """The dead letters that are not done, by their offsets: for which record of which shard each stands."""
        held = self.broker.streams.get(StreamName.parse(f"{ORDERS}.dead"))
        if held is None:
            return {}
        (shard,) = (await self.queues.queue(held)).shards
        wanted = [
            n for n in range(shard.log.log_start_offset, shard.log.high_watermark) if not shard.is_done(n)
        ]
        found: dict[int, tuple[int, int]] = {}
        for record in await read_records(shard.log, wanted):
            assert record is not None
            place = int(record.headers["felix.dead.shard"]), int(record.headers["felix.dead.offset"])
            found[record.offset] = place
        return found

    async def redrive(self, records: int) -> None:
        before = await self.letters()
        wanted = RedriveSubscription(str(ORDERS), "billing", records)
        self.giving = set(before.values())
        redriven = await self.service.redrive(OPERATOR, wanted)
        after = await self.letters()
        self.giving.clear()
        gone = [before[offset] for offset in before if offset not in after]
        assert redriven.redriven == len(gone) and not redriven.gone and not redriven.full
        global given
        given += len(gone)
        if len(gone) < records:
            assert redriven.held == len(after)
            assert set(after.values()) <= set(gone), "one of several dead letters of a record at a time"
        for number, offset in gone:
            if offset in self.settled[number]:
                self.settled[number].discard(offset)
                self.given[number].add(offset)
            elif offset in self.subscription.progress(number)._unseen:
                # A seek had brought it before it was given back, and nobody was sent it since.
                self.given[number].add(offset)

    async def hold_up(self, records: int) -> None:
        """A redrive whose dead letters cannot be taken out for now."""
        self.removable.clear()
        with suppress(UnavailableError), pytest.MonkeyPatch.context() as patch:
            patch.setattr(redrive, "RETURN_WAIT_S", 0.01)
            await self.service.redrive(OPERATOR, RedriveSubscription(str(ORDERS), "billing", records))
        for shard, offset in self.pending():
            if offset in self.settled[shard]:
                self.settled[shard].discard(offset)
                self.returning[shard].add(offset)
            elif offset in self.on_their_way(shard):
                # Nobody has the shard.
                self.returning[shard].add(offset)

    def pending(self) -> list[tuple[int, int]]:
        return [
            (shard, offset)
            for shard, store in enumerate(self.subscription._stores)
            for each in store._returns.values()
            for returning in each.pending
            for offset in returning.offsets
        ]

    def on_their_way(self, shard: int) -> set[int]:
        return {n for low, high in self.subscription.progress(shard)._returning for n in range(low, high)}

    async def let_go(self) -> None:
        """They can be taken out again."""
        before, pending = await self.letters(), self.pending()
        for shard in range(SHARDS):
            self.given[shard] |= self.returning[shard]
            self.returning[shard].clear()
        self.removable.set()
        async with asyncio.timeout(120):
            while self.subscription.is_returning:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.0005)
        after = await self.letters()
        gone = [before[offset] for offset in before if offset not in after]
        assert sorted(gone) == sorted(pending)
        global given, held_up
        given += len(gone)
        held_up += len(gone)

    async def write_anew(self) -> None:
        for store in self.subscription._stores:
            assert store._actor is not None
            journal = store._actor.journal
            await journal.settled()
            journal._begin_snapshot()
            if journal._snapshot_task is not None:
                await journal._snapshot_task

    def is_settled(self, shard: int, offset: int) -> bool:
        progress = self.subscription.progress(shard)
        return offset < progress.committed or offset in progress.settled

    def check(self) -> None:
        for shard in range(SHARDS):
            progress, settled = self.subscription.progress(shard), self.settled[shard]
            committed = next(n for n in range(self.ends[shard] + 1) if n not in settled)
            assert progress.committed == committed
            assert {n for low, high in progress.settled for n in range(low, high)} == {
                n for n in settled if n > committed
            }
            out = sum(len(player.held.get(shard, {})) for player in self.players)
            assert out <= UNACKED_MAX + 8, "one batch more, at most"
        if self.players:
            owned = sorted(shard for player in self.players for shard in player.generations)
            assert owned == list(range(SHARDS)), "every shard has one consumer"

    async def quiet(self) -> None:
        """Let everything that is on its way arrive."""
        await self.arrived()
        if await self.bury():
            await self.arrived()

    def under_way(self) -> bool:
        """Records count as delivered to a player that does not have them in hand yet."""
        if self.broken is not None:
            raise self.broken
        return any(
            player.delivery._catching_up is not None or (player.takes and any(player.again.values()))
            for player in self.players
        )

    async def decides(self) -> None:
        """While a journal's folder is changed, which takes a slow disk its time, nobody's time is over: `stall` would count what does
        not happen."""
        async with asyncio.timeout(120):
            while self.subscription.refusal() is not None:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.0005)

    async def arrived(self) -> None:
        """What is read from disk takes its time."""
        async with asyncio.timeout(120):
            while True:
                for _ in range(8):
                    await asyncio.sleep(0)
                if not self.under_way():
                    return
                await asyncio.sleep(0.0005)


steps = 0
handed = 0
given = 0
held_up = 0
restarts = 0


class DurableAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="felix-durable-"))
        self.loop = asyncio.new_event_loop()

    @initialize(attempts_max=st.sampled_from(ATTEMPTS_MAX))
    def begin(self, attempts_max: int) -> None:
        self.world = World(self.folder, attempts_max)
        self.run(self.world.start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def step(self, work: Coroutine[Any, Any, None]) -> None:
        global steps
        steps += 1

        async def whole() -> None:
            # The subscription's own timer may have fired while the last step ended: the model counts what is in hand.
            if self.world.under_way():
                await self.world.arrived()
            await self.world.decides()
            await work
            await self.world.quiet()
            self.world.check()

        self.run(whole())

    def player(self, number: int) -> Player:
        return self.world.players[number % len(self.world.players)]

    def record(self, number: int) -> tuple[Player, int, int] | None:
        """One record that somebody has in hand."""
        found = [
            (player, shard, offset)
            for player in self.world.players
            for shard, held in player.held.items()
            for offset in held
        ]
        return found[number % len(found)] if found else None

    @rule(shard=st.integers(0, SHARDS - 1), count=st.integers(1, 8))
    def publish(self, shard: int, count: int) -> None:
        async def work() -> None:
            future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            batch = encode_batch([NewRecord(b"r") for _ in range(count)])
            self.world.subscription.stream.shard(shard).append_nowait(batch, future.set_result)
            assert isinstance(await future, Appended)
            self.world.ends[shard] += count

        self.step(work())

    @precondition(lambda self: len(self.world.players) < 5)
    @rule()
    def join(self) -> None:
        async def work() -> None:
            # Appended first: it is told its shards while it joins.
            made = Player.__new__(Player)
            self.world.players.append(made)
            made.__init__(self.world, "player")  # type: ignore[misc]

        self.step(work())

    @precondition(lambda self: self.world.players)
    @rule(number=st.integers(0, 99), died=st.booleans())
    def leave(self, number: int, died: bool) -> None:
        async def work() -> None:
            player = self.player(number)
            self.world.players.remove(player)
            player.delivery.close()
            if died:
                for shard, held in player.held.items():
                    if held:
                        self.world.fail(shard, min(held))
            self.world.subscription.leave(player.number, died=died)

        self.step(work())

    @rule(numbers=st.lists(st.integers(0, 999), min_size=1, max_size=6))
    def ack(self, numbers: list[int]) -> None:
        async def work() -> None:
            for number in numbers:
                found = self.record(number)
                if found is None:
                    return
                player, shard, offset = found
                await self.acknowledge(
                    player, ShardAck(shard, player.generations[shard], [offset, offset + 1])
                )
                player.held[shard].pop(offset)
                self.world.settle(shard, offset)

        self.step(work())

    async def acknowledge(self, player: Player, ack: ShardAck) -> None:
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

        def done(error: FelixError | None, fenced: list[int]) -> None:
            assert error is None
            future.set_result(fenced)

        self.world.subscription.ack(player.number, [ack], done)
        assert await future == []

    @rule(number=st.integers(0, 999))
    def ack_through(self, number: int) -> None:
        async def work() -> None:
            found = self.record(number)
            if found is None:
                return
            player, shard, through = found
            # What is below and not in hand (it waits for its next attempt) counts as done, too, but for what was given back and nobody was sent.
            given = self.world.given[shard] | self.world.returning[shard]
            await self.acknowledge(player, ShardAck(shard, player.generations[shard], through=through))
            for offset in range(through + 1):
                if offset in given:
                    continue
                self.world.settle(shard, offset)
                player.held[shard].pop(offset, None)
                player.again[shard].pop(offset, None)

        self.step(work())

    @rule(number=st.integers(0, 999), delay=st.sampled_from([-1, 0, 50]))
    def nack(self, number: int, delay: int) -> None:
        async def work() -> None:
            found = self.record(number)
            if found is None:
                return
            await self.fail(*found, delay)

        self.step(work())

    async def fail(self, player: Player, shard: int, offset: int, delay: int) -> None:
        future: asyncio.Future[FelixError | None] = asyncio.get_running_loop().create_future()
        player.held[shard].pop(offset)
        self.world.fail(shard, offset)
        call = Nack(shard, player.generations[shard], [offset, offset + 1], delay, "no")
        self.world.subscription.nack(player.number, call, future.set_result)
        assert await future is None

    @precondition(lambda self: self.world.players)
    @rule(number=st.integers(0, 99), shard=st.integers(0, SHARDS - 1))
    def acknowledge_too_late(self, number: int, shard: int) -> None:
        async def work() -> None:
            told: list[tuple[FelixError | None, list[int]]] = []
            player = self.player(number)
            stale = ShardAck(shard, player.generations.get(shard, 7) - 1, [0, 1])
            self.world.subscription.ack(player.number, [stale], lambda *each: told.append(each))
            assert told == [(None, [shard])]

        self.step(work())

    @rule()
    def give_back(self) -> None:
        async def work() -> None:
            for player in self.world.players:
                for shard in list(player.draining):
                    generation = player.generations[shard]
                    player.forget(shard)
                    self.world.subscription.released(player.number, shard, generation)

        self.step(work())

    @rule(by_ms=st.sampled_from([10, 60, 110, 40_000]))
    def wait(self, by_ms: int) -> None:
        async def work() -> None:
            self.world.now_ms += by_ms
            self.world.subscription._tick()

        self.step(work())

    @rule(by_ms=st.sampled_from([-2 * ACK_TIMEOUT_MS, 2 * ACK_TIMEOUT_MS, -20_000, 20_000]))
    def set_clock(self, by_ms: int) -> None:
        """Nobody has less time, or more, for that."""

        async def work() -> None:
            self.world.ahead_ms += by_ms
            self.world.subscription._tick()

        self.step(work())

    @rule()
    def stall(self) -> None:
        """Nobody acknowledges anything for longer than the ack timeout."""

        async def work() -> None:
            self.world.now_ms += 2 * ACK_TIMEOUT_MS
            for player in self.world.players:
                for shard, held in player.held.items():
                    for offset in held:
                        self.world.fail(shard, offset)
                    held.clear()
            self.world.subscription._tick()

        self.step(work())

    @precondition(lambda self: self.world.players)
    @rule(number=st.integers(0, 99))
    def take_nothing_or_go_on(self, number: int) -> None:
        """What cannot be sent is no attempt, however long that lasts."""

        async def work() -> None:
            player = self.player(number)
            player.takes = not player.takes
            player.wake()

        self.step(work())

    @rule(shard=st.integers(0, SHARDS - 1), part=st.floats(0, 1))
    def seek(self, shard: int, part: float) -> None:
        async def work() -> None:
            offset = round(self.world.ends[shard] * part)
            self.world.settled[shard] = set(range(offset))
            self.world.failures[shard].clear()
            self.world.given[shard].clear()
            self.world.returning[shard].clear()
            await self.world.subscription.position({shard: offset})

        self.step(work())

    @precondition(lambda self: self.world.removable.is_set())
    @rule(records=st.sampled_from([1, 3, 500]))
    def redrive(self, records: int) -> None:
        self.step(self.world.redrive(records))

    @precondition(lambda self: self.world.removable.is_set())
    @rule(records=st.sampled_from([1, 3, 500]))
    def hold_up(self, records: int) -> None:
        self.step(self.world.hold_up(records))

    @precondition(lambda self: not self.world.removable.is_set())
    @rule(often=st.integers(0, 3))
    def let_go(self, often: int) -> None:
        if not often:
            self.step(self.world.let_go())

    @rule()
    def write_anew(self) -> None:
        self.step(self.world.write_anew())

    @rule(
        numbers=st.lists(st.integers(0, 999), min_size=1, max_size=4),
        records=st.sampled_from([0, 1, 500]),
        held=st.booleans(),
    )
    def spoil(self, numbers: list[int], records: int, held: bool) -> None:
        """Some records fail until they are dead letters, of which some are given back at once, or once they can be taken out."""

        async def work() -> None:
            if not self.world.players:
                await self.join_one()
                await self.world.quiet()
            for number in numbers:
                found = self.record(number)
                while found is not None:
                    player, shard, offset = found
                    await self.fail(player, shard, offset, 0)
                    await self.world.quiet()
                    self.world.subscription._tick()
                    await self.world.quiet()
                    found = next(
                        (
                            (each, shard, offset)
                            for each in self.world.players
                            if offset in each.held.get(shard, ())
                        ),
                        None,
                    )
            if not records:
                return
            if not self.world.removable.is_set():
                await self.world.let_go()
            await (self.world.hold_up(records) if held else self.world.redrive(records))

        self.step(work())

    @rule(numbers=st.lists(st.integers(0, 999), min_size=1, max_size=4), written=st.booleans())
    def transact(self, numbers: list[int], written: bool) -> None:
        async def work() -> None:
            first = self.record(numbers[0])
            if first is None:
                return
            player, shard, _ = first
            offsets = sorted({list(player.held[shard])[n % len(player.held[shard])] for n in numbers})
            ranges = [edge for offset in offsets for edge in (offset, offset + 1)]
            acks = SubscriptionAcks(
                str(ORDERS), "billing", [ShardAck(shard, player.generations[shard], ranges)]
            )
            service = self.world.service
            assert service.check([acks]) is None
            for offset in offsets:
                player.held[shard].pop(offset)
            refused = service.check([acks])
            assert refused is not None and refused.code is Code.CONSUMER_FENCED, "kept for one alone"
            if not written:
                # They come again, and it was no failure of theirs.
                service.abandon([acks])
                self.world.subscription._tick()
                return
            for _ in range(2):
                future: asyncio.Future[FelixError | None] = asyncio.get_running_loop().create_future()
                service.apply([acks], future.set_result)
                assert await future is None
            for offset in offsets:
                self.world.settle(shard, offset)

        self.step(work())

    @precondition(lambda self: self.world.made < 12)
    @rule(often=st.integers(0, 3))
    def restart(self, often: int) -> None:
        if often:
            return
        global restarts
        restarts += 1

        async def work() -> None:
            pending = set(self.world.pending())
            await self.world.stop()
            await self.world.start()
            assert set(self.world.pending()) == pending
            for shard, returning in enumerate(self.world.returning):
                found = self.world.on_their_way(shard)
                # What a seek had brought back already comes only now, too, as nobody has the shard.
                assert found >= returning and all((shard, offset) in pending for offset in found - returning)
                assert not found & self.world.settled[shard]
                returning |= found

        self.step(work())

    def teardown(self) -> None:
        """Nothing is lost: one consumer that acknowledges gets everything that is not settled."""
        global handed

        async def finish() -> None:
            world = self.world
            if not world.removable.is_set():
                await world.let_go()
            for player in world.players:
                world.subscription.leave(player.number, died=False)
                player.delivery.close()
            world.players.clear()
            # What waited before a restart goes by the clock, wherever it was set since.
            world.ahead_ms += 100 * ACK_TIMEOUT_MS
            await self.join_one()
            async with asyncio.timeout(120):
                while any(len(world.settled[n]) < world.ends[n] for n in range(SHARDS)):
                    world.now_ms += DELAY_MS * 2
                    world.subscription._tick()
                    await world.quiet()
                    for player in world.players:
                        for shard, held in player.held.items():
                            for offset in list(held):
                                ack = ShardAck(shard, player.generations[shard], [offset, offset + 1])
                                await self.acknowledge(player, ack)
                                held.pop(offset)
                                world.settle(shard, offset)
            world.check()
            await world.stop()

        try:
            self.run(finish())
        finally:
            handed += self.world.handed
            self.loop.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    async def join_one(self) -> None:
        made = Player.__new__(Player)
        self.world.players.append(made)
        made.__init__(self.world, "last")  # type: ignore[misc]


@pytest.mark.parametrize("least", [STEPS_LEAST, pytest.param(STEPS_LEAST_SLOW, marks=only_slow)])
def test_thousands_of_steps_never_differ_from_the_model(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "RETRY_S_MIN", 0.001)
    monkeypatch.setattr(returns, "RETRY_S_MAX", 0.001)
    restarts_least = least // STEPS_FOR_A_RESTART
    for number in range(ROUNDS_MOST):
        if steps >= least and restarts >= restarts_least and handed >= least // 2:
            break
        run_state_machine_as_test(
            seeded(DurableAgainstModel, number),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=[Phase.generate],
            ),
        )
    assert steps >= least
    assert restarts >= restarts_least and handed >= least // 2
    assert given >= least // 50 and held_up >= least // 100
