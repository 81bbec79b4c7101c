"""One shard of a queue against a dictionary: whatever is asked in whatever order, with restarts and dead letters in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from long_runs import count, seeded
from region_home import make_region, running

from felix.batch import NewRecord, encode_batch
from felix.errors import FelixError, UnavailableError
from felix.names import StreamName
from felix.queue_messages import Job
from felix.settings import QueueSettings, Retries, Views
from region.metadata.records import StreamConfig
from region.node import Node
from region.queue.shard import QueueShard
from region.queue.state import Phase, Run
from region.views.dead_letter import DEAD_OFFSET, DELIVER_AT, read_records

STEPS_LEAST = count(1_500, 10_000)
SELDOM_LEAST = count(5, 20)
"""Of each operation; a purge is drawn seldom."""
POLL_S = 0.0005
"""Between looks at what is read from disk meanwhile: a loop that never rests takes the disk's threads their processor."""
ROUNDS_MOST = 20
ATTEMPTS = 3
RETRY_MS = 20_000
HOUR_MS = 3_600_000
KEYS = [None, b"a", b"b"]


@dataclass
class Known:
    """What the model knows of a record."""

    key: bytes | None
    priority: int
    due_ms: int
    token: int = 0
    refunds: int = 0
    leased: bool = False
    given_back: bool = False
    reserved: bool = False
    """for a transaction that is being committed"""
    is_own: bool = False
    """whether its time counts from a moment since the last restart: it moves with the clock"""
    is_free: bool = False
    """whether its time has come, wherever the clock is set afterwards"""
    done_by: int | None = None
    """the token that finished it; 0: none did"""

    @property
    def attempts(self) -> int:
        return self.token - self.refunds


@dataclass
class Place:
    """One node for all runs; each makes a queue of its own."""

    loop: asyncio.AbstractEventLoop
    node: Node
    now_ms: int
    ahead_ms: int = 0
    """by how much the wall clock is more than the one that cannot be set"""
    queues: int = 0
    steps: int = 0
    counted: dict[str, int] = field(default_factory=dict)


class Model(RuleBasedStateMachine):
    place: ClassVar[Place]

    def run(self, work: Any) -> Any:
        return self.place.loop.run_until_complete(asyncio.wait_for(work, 120))

    def step(self, name: str) -> None:
        self.place.steps += 1
        self.place.counted[name] = self.place.counted.get(name, 0) + 1

    @property
    def now_ms(self) -> int:
        return self.place.now_ms + self.place.ahead_ms

    @initialize(ordered=st.booleans())
    def begin(self, ordered: bool) -> None:
        place = self.place
        place.queues += 1
        self.name = StreamName.parse(f"acme/ops/jobs{place.queues}")
        self.ordered = ordered
        retries = Retries(ATTEMPTS, RETRY_MS, RETRY_MS)
        views = Views(queue=QueueSettings(30_000, retries, ordered))
        self.run(place.node.broker.create_stream(self.name, StreamConfig(views=views)))
        self.records: dict[int, Known] = {}
        self.dead: list[int] = []
        self.open()

    def open(self) -> None:
        async def work() -> QueueShard:
            stream = self.place.node.broker.streams.get(self.name)
            assert stream is not None
            return (await self.place.node.queues.queue(stream)).shards[0]

        self.shard = self.run(work())

    def durably(self, decide: Any) -> Any:
        """Decide, and wait until it is durable and nothing is on its way to the dead letters."""

        async def work() -> Any:
            future = asyncio.get_running_loop().create_future()

            def done(error: FelixError | None) -> None:
                future.set_exception(error) if error is not None else future.set_result(None)

            found = decide(done)
            await future
            await self.shard.settle_dead()
            return found

        return self.run(work())

    # -- the model -------------------------------------------------------------------------------------

    def first_of_key(self, offset: int) -> bool:
        key = self.records[offset].key
        return not self.ordered or key is None or not any(
            other.key == key for at, other in self.records.items() if at < offset and other.done_by is None
        )  # fmt: skip

    def available(self) -> set[int]:
        return {
            offset
            for offset, known in self.records.items()
            if known.done_by is None
            and not known.leased
            and not known.reserved
            and (known.is_free or known.due_ms <= self.now_ms)
            and self.first_of_key(offset)
        }

    def expire(self) -> None:
        """Leases that have run out: free again, or dead with their last attempt."""
        for offset, known in sorted(self.records.items()):
            if known.leased and not known.reserved and known.due_ms <= self.now_ms:
                known.leased = False
                if known.attempts >= ATTEMPTS:
                    self.dead_letter(offset)

    def begins(self, known: Known, lasts_ms: int) -> None:
        known.due_ms, known.is_own, known.is_free = self.now_ms + lasts_ms, True, False

    def read_again(self) -> None:
        """What the journal says goes by the clock as it is now."""
        for known in self.records.values():
            known.is_own = known.is_free = False
            if known.token and not known.given_back and known.done_by is None and known.due_ms > self.now_ms:
                known.leased = True

    def dead_letter(self, offset: int) -> None:
        self.records[offset].leased = False
        self.records[offset].done_by = 0
        self.dead.append(offset)

    def holds(self, offset: int, token: int) -> bool:
        """Whether this lease may still settle the record, and no transaction is about to."""
        return not self.records[offset].reserved and self.is_newest(offset, token)

    def is_newest(self, offset: int, token: int) -> bool:
        known = self.records[offset]
        return known.done_by is None and known.token == token and token > 0 and not known.given_back

    def leases(self) -> list[tuple[int, int]]:
        return [
            (offset, token) for offset, known in self.records.items() for token in range(1, known.token + 1)
        ]

    def chosen(self, data: st.DataObject) -> list[tuple[int, int]]:
        """Leases that are or were: the newest ones as a rule, some older ones, too. None twice."""
        leases = self.leases()[-12:]
        picked = data.draw(
            st.lists(st.sampled_from(leases), min_size=1, max_size=6, unique_by=lambda each: each[0])
        )
        return picked

    @staticmethod
    def runs(picked: list[tuple[int, int]]) -> list[Run]:
        return [(offset, 1, token) for offset, token in picked]

    # -- what happens ----------------------------------------------------------------------------------

    @rule(
        some=st.lists(
            st.tuples(st.sampled_from(KEYS), st.sampled_from([None, 0, 9]), st.sampled_from([0, 0, 0, 10_000])),
            min_size=1,
            max_size=6,
        )
    )  # fmt: skip
    def put(self, some: list[tuple[bytes | None, int | None, int]]) -> None:
        self.step("put")
        new = []
        for key, priority, delay_ms in some:
            headers = {}
            if priority is not None:
                headers["felix.priority"] = b"%d" % priority
            due_ms = self.now_ms + delay_ms if delay_ms else 0
            if due_ms:
                headers[DELIVER_AT] = b"%d" % due_ms
            offset = len(self.records)
            self.records[offset] = Known(key, 4 if priority is None else priority, due_ms)
            new.append(NewRecord(b"%d" % offset, key, headers or None))
        self.run(self.shard.log.append(encode_batch(new)))

    @rule(records=st.integers(1, 8), visibility_ms=st.sampled_from([10_000, 30_000]))
    def lease(self, records: int, visibility_ms: int) -> None:
        self.step("lease")

        async def work() -> list[Job]:
            # As a worker would: what is being read from disk is waited for.
            while self.shard.is_reading or self.shard.state.head < self.shard.log.high_watermark:
                self.shard.sweep()
                await asyncio.sleep(POLL_S)
            self.shard._tick()  # leases that ran out before a replay
            await self.shard.settle_dead()
            found: list[Job] = []
            waiting: list[asyncio.Future[None]] = []
            while len(waiting) < records:
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

                def deliver(
                    leased: Any, count: int, size: int, future: asyncio.Future[None] = future
                ) -> None:
                    found.extend(leased.jobs)
                    future.set_result(None)

                # One at a time: a shard gives what it has taken apart, and reads on from disk behind it.
                if self.shard.take(
                    7, 1, 1 << 20, visibility_ms, deliver, at_least_one=True, taking=lambda count, size: None
                ):
                    waiting.append(future)
                elif not self.shard.is_reading:
                    break
                await asyncio.sleep(POLL_S if self.shard.is_reading else 0)
            await asyncio.gather(*waiting)
            return found

        free = self.available()
        jobs = self.run(work())
        offsets = [job.offset for job in jobs]
        assert set(offsets) <= free and len(set(offsets)) == len(offsets)
        assert len(offsets) == min(records, len(free))
        if offsets:
            left = free - set(offsets)
            least = min(self.records[offset].priority for offset in offsets)
            assert all(self.records[offset].priority <= least for offset in left), (
                "the highest priority goes first"
            )
        for job in jobs:
            known = self.records[job.offset]
            known.token += 1
            known.leased, known.given_back = True, False
            self.begins(known, visibility_ms)
            assert (job.token, job.attempts) == (known.token, known.attempts)
            assert (job.payload, job.key) == (b"%d" % job.offset, known.key)

    @precondition(lambda self: self.leases())
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        self.step("ack")
        picked = self.chosen(data)
        expected = []
        for offset, token in picked:
            known = self.records[offset]
            if self.is_newest(offset, token):
                known.done_by, known.leased, known.reserved = token, False, False
            elif known.done_by != token:
                expected.append(offset)
        assert self.durably(lambda done: self.shard.ack(self.runs(picked), done)) == expected

    @precondition(lambda self: self.leases())
    @rule(data=st.data(), delay_ms=st.sampled_from([None, 0, 10_000]))
    def nack(self, data: st.DataObject, delay_ms: int | None) -> None:
        self.step("nack")
        picked = self.chosen(data)
        expected = []
        for offset, token in picked:
            known = self.records[offset]
            if known.done_by is not None or known.token != token or known.reserved:
                expected.append(offset)
            elif known.given_back:
                continue
            elif known.attempts >= ATTEMPTS:
                self.dead_letter(offset)
            else:
                known.leased, known.given_back = False, True
                self.begins(known, RETRY_MS if delay_ms is None else delay_ms)
        assert (
            self.durably(lambda done: self.shard.nack(self.runs(picked), delay_ms, "why", done)) == expected
        )

    @precondition(lambda self: self.leases())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.step("release")
        picked = self.chosen(data)
        expected = []
        for offset, token in picked:
            known = self.records[offset]
            if known.done_by is not None or known.token != token or known.reserved:
                expected.append(offset)
            elif not known.given_back:
                known.refunds += 1
                known.leased, known.given_back = False, True
                self.begins(known, 0)
        assert self.durably(lambda done: self.shard.release(self.runs(picked), done)) == expected

    @precondition(lambda self: self.leases())
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        self.step("extend")
        picked = self.chosen(data)
        expected = []
        for offset, token in picked:
            known = self.records[offset]
            if self.is_newest(offset, token):
                known.leased = True
                self.begins(known, 30_000)
            else:
                expected.append(offset)
        assert self.durably(lambda done: self.shard.extend(self.runs(picked), 30_000, done)) == expected

    @precondition(lambda self: self.leases())
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.step("settle")
        picked = self.chosen(data)
        for offset, token in picked:
            known = self.records[offset]
            if known.done_by is None:
                known.done_by, known.leased, known.reserved = token, False, False
        self.durably(lambda done: self.shard.settle(self.runs(picked), done))

    @precondition(lambda self: self.leases())
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        """All of them, or none."""
        self.step("reserve")
        picked = self.chosen(data)
        lost = [offset for offset, token in picked if not self.holds(offset, token)]
        assert self.shard.reserve(self.runs(picked)) == lost
        for offset, _ in picked if not lost else ():
            self.records[offset].reserved = self.records[offset].leased = True

    @precondition(lambda self: any(known.reserved for known in self.records.values()))
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        self.step("unreserve")
        picked = self.chosen(data)
        for offset, token in picked:
            if self.is_newest(offset, token):
                self.records[offset].reserved = False
        self.expire()

        async def work() -> None:
            self.shard.unreserve(self.runs(picked))
            self.shard._tick()
            await self.shard.settle_dead()

        self.run(work())

    @rule(wait_ms=st.sampled_from([5_000, 10_000, 25_000]))
    def wait(self, wait_ms: int) -> None:
        self.step("wait")
        self.place.now_ms += wait_ms
        self.expire()

        async def work() -> None:
            while self.shard.is_reading or self.shard.state.head < self.shard.log.high_watermark:
                self.shard.sweep()
                await asyncio.sleep(POLL_S)
            self.shard._tick()
            await self.shard.settle_dead()

        self.run(work())

    @rule(by_ms=st.sampled_from([-HOUR_MS, HOUR_MS, -60_000, 60_000]))
    def set_clock(self, by_ms: int) -> None:
        self.wait(0)
        self.step("clock")
        for offset, known in self.records.items():
            is_due = known.due_ms <= self.now_ms and self.first_of_key(offset)
            known.is_free = known.is_free or is_due
            if known.is_own:
                known.due_ms += by_ms
        self.place.ahead_ms += by_ms
        self.wait(0)

    @rule()
    def restart(self) -> None:
        self.step("restart")
        streams = self.place.node.broker.streams

        async def work() -> None:
            stream = streams.get(self.name)
            assert stream is not None
            await streams._close(stream)
            await streams.open(stream.record)

        self.run(work())
        self.open()
        self.read_again()
        self.check()

    @rule()
    def snapshot(self) -> None:
        self.step("snapshot")

        async def work() -> None:
            journal = self.shard.actor.journal
            journal._begin_snapshot()
            if journal._snapshot_task is not None:
                await journal._snapshot_task

        self.run(work())

    @rule(often=st.integers(0, 9))
    def purge(self, often: int) -> None:
        if often:
            return
        self.step("purge")
        expected = 0
        for known in self.records.values():
            if known.done_by is None:
                expected += 1
                known.done_by, known.leased, known.reserved = 0, False, False
        assert self.durably(self.shard.purge) == expected

    @rule()
    def lose_the_journal(self) -> None:
        """As after a refused append: everything is replayed."""
        self.step("replay")

        async def work() -> None:
            self.shard.actor._reload(UnavailableError("refused"))
            while self.shard.actor.is_reloading:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(POLL_S)

        self.run(work())
        self.read_again()

    def check(self) -> None:
        state = self.shard.state
        end = self.shard.log.high_watermark
        assert end == len(self.records)
        open_ = [offset for offset, known in self.records.items() if known.done_by is None]
        assert state.left(end) == len(open_)
        assert [offset for offset in range(end) if offset not in state.done] == open_
        assert state.floor == (open_[0] if open_ else end)
        assert sum(state.counts) == len(state.tracked)
        for phase in Phase:
            assert state.counts[phase] == sum(record.phase is phase for record in state.tracked.values())

    def teardown(self) -> None:
        if not hasattr(self, "shard"):
            return
        self.check()
        dead = self.place.node.broker.streams.get(StreamName.parse(f"{self.name}.dead"))
        found: list[int] = []
        if dead is not None:
            log = dead.shard(0)
            records = self.run(read_records(log, range(log.high_watermark)))
            found = [int(record.headers[DEAD_OFFSET]) for record in records]
        assert found == self.dead, "each dead letter once, in the order of their deaths"

        async def work() -> None:
            streams = self.place.node.broker.streams
            for name in (self.name, StreamName.parse(f"{self.name}.dead")):
                stream = streams.get(name)
                if stream is not None:
                    await streams.remove(name, stream.record.incarnation)

        self.run(work())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    loop = asyncio.new_event_loop()
    context = running(make_region(tmp_path, "us-east"))
    node = loop.run_until_complete(context.__aenter__())
    made = Place(loop, node, 1_000_000_000_000)
    node.broker.clock_ms = lambda: made.now_ms + made.ahead_ms
    node.broker.boot_ms = lambda: made.now_ms
    try:
        yield made
    finally:
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.close()


@pytest.mark.timeout(600)
def test_thousands_of_steps_end_where_the_model_ends(place: Place) -> None:
    Model.place = place
    seldom = ("lease", "ack", "nack", "restart", "purge", "replay", "reserve", "unreserve", "clock")
    for number in range(ROUNDS_MOST):
        if place.steps >= STEPS_LEAST and min(place.counted.get(name, 0) for name in seldom) >= SELDOM_LEAST:
            break
        run_state_machine_as_test(
            seeded(Model, number),
            settings=settings(
                max_examples=STEPS_LEAST // 250 + 1, stateful_step_count=250, database=None, deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Stage.explicit, Stage.generate],
            ),
        )  # fmt: skip
    assert place.steps >= STEPS_LEAST
    assert min(place.counted.get(name, 0) for name in seldom) >= SELDOM_LEAST, place.counted
