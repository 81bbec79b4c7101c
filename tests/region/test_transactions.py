"""Transactions of a broker: committed, aborted, fenced, timed out; over full disks, stopped shards and crashes at each step."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
import traceback
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from long_runs import count
from region_peer import until
from transaction_home import OTHER, OWNER, Home, payloads_of

from felix.batch import BRIDGED_EPOCH
from felix.errors import Code, RequestError, UnavailableError
from felix.names import StreamName
from felix.settings import Deduplication, Views
from felix.storage.disk import DiskFiles
from policy.quantity import Duration, Size
from region.config import LimitsConfig
from region.transactions import state
from region.transactions.open_transactions import OPEN_PER_IDENTITY_MAX
from region.transactions.positions import PARTS_PER_SHARD_MAX
from region.transactions.state import TransactionState
from region.views.journal import Journal

EXAMPLES = int(os.environ.get("FELIX_MODEL_EXAMPLES", count(10, 100)))
"""Runs of the model, 40 steps each; 260 are ten thousand steps and some minutes."""

pytestmark = pytest.mark.timeout(120 + 5 * EXAMPLES)

A, B = "acme/shop/orders", "acme/shop/payments"

Staged = list[tuple[int, int, bytes]]
"""Index, shard of the model, payload."""


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    made = Home(tmp_path)
    await made.open()
    await made.create(A, shards=2)
    await made.create(B)
    yield made
    await made.close(crash=made.crashed)


async def restart(home: Home, *, crash: bool = False) -> None:
    await home.close(crash=crash)
    await home.open()


async def test_nothing_is_seen_before_the_commit_and_all_of_it_after(home: Home) -> None:
    transaction = home.begin()
    home.stage(transaction, 0, A, b"a1", b"a2", shard=1)
    home.stage(transaction, 1, B, b"b1")
    await home.publish(B, b"other")
    assert (await home.records(A, 1), await home.records(B)) == ([], [b"other"])
    assert home.budgets.transactions.used_bytes > 0
    outcome = await home.coordinator.commit(OWNER, transaction, 2, home.clock)
    assert outcome.offsets == ((0,), (1,))
    assert (await home.records(A, 1), await home.records(B)) == ([b"a1", b"a2"], [b"other", b"b1"])
    assert home.budgets.transactions.used_bytes == 0
    again = await home.coordinator.commit(OWNER, transaction, 2, home.clock)
    assert again == outcome and not home.coordinator.may_be_decided(transaction)
    await restart(home)
    assert await home.coordinator.commit(OWNER, transaction, 2, home.clock) == outcome
    assert await home.records(B) == [b"other", b"b1"]


async def test_the_shards_of_a_transaction_show_it_in_one_turn(home: Home) -> None:
    seen: list[tuple[int, int, int]] = []
    shards = [home.shard(A, 0), home.shard(A, 1), home.shard(B)]

    def look() -> None:
        seen.append(tuple(shard.high_watermark for shard in shards))  # type: ignore[arg-type]

    for shard in shards:
        shard.subscribe_tail(look)
    for number in range(5):
        transaction = home.begin()
        home.stage(transaction, 0, A, b"%d" % number, shard=0)
        home.stage(transaction, 1, A, b"%d" % number, shard=1)
        home.stage(transaction, 2, B, b"%d" % number)
        commit = asyncio.ensure_future(home.coordinator.commit(OWNER, transaction, 3, home.clock))
        while not commit.done():
            look()
            await asyncio.sleep(0)
        await commit
    assert {(n, n, n) for n in range(6)} >= set(seen)
    assert seen[-1] == (5, 5, 5)


async def test_many_commits_at_once_are_applied_in_groups_and_in_order(home: Home) -> None:
    transactions = []
    for number in range(100):
        transaction = home.begin()
        home.stage(transaction, 0, A, b"%d" % number)
        home.stage(transaction, 1, B, b"%d" % number)
        transactions.append(transaction)
        if len(transactions) == OPEN_PER_IDENTITY_MAX - 4:
            await asyncio.gather(*(home.coordinator.commit(OWNER, t, 2, home.clock) for t in transactions))
            transactions.clear()
    await asyncio.gather(*(home.coordinator.commit(OWNER, t, 2, home.clock) for t in transactions))
    assert await home.records(A) == await home.records(B) == [b"%d" % n for n in range(100)]
    assert home.coordinator.applier.groups < 100


async def test_aborted_and_abandoned_ones_leave_nothing(home: Home) -> None:
    aborted, abandoned = home.begin(), home.begin(timeout_ms=30)
    home.stage(aborted, 0, A, b"no")
    home.stage(abandoned, 0, A, b"no")
    await home.coordinator.abort(OWNER, aborted)
    await home.coordinator.abort(OWNER, aborted)
    with pytest.raises(RequestError) as refused:
        await home.coordinator.commit(OWNER, aborted, 1, home.clock)
    assert refused.value.code is Code.TRANSACTION_ABORTED
    await until(lambda: not len(home.coordinator.open))
    with pytest.raises(RequestError, match="open for more than 30 ms"):
        home.stage(abandoned, 1, A, b"late")
    assert (home.coordinator.aborted, home.coordinator.open.timed_out) == (1, 1)
    assert home.budgets.transactions.used_bytes == 0
    assert await home.records(A) == []


async def test_a_newer_instance_aborts_what_the_older_has_open(home: Home) -> None:
    first = await home.coordinator.fence(OWNER, "billing")
    old = home.begin(transactional_id="billing", epoch=first)
    home.stage(old, 0, A, b"old")
    assert await home.coordinator.fence(OTHER, "billing") == 1, "another identity's id is another id"
    second = await home.coordinator.fence(OWNER, "billing")
    assert second == first + 1
    for attempt in (
        lambda: home.stage(old, 1, A, b"old"),
        lambda: home.begin(transactional_id="billing", epoch=first),
    ):
        with pytest.raises(RequestError) as fenced:
            attempt()
        assert fenced.value.code is Code.TRANSACTION_FENCED
    with pytest.raises(RequestError) as fenced:
        await home.coordinator.commit(OWNER, old, 1, home.clock)
    assert fenced.value.code is Code.TRANSACTION_FENCED
    await restart(home)
    with pytest.raises(RequestError, match="newer instance"):
        home.begin(transactional_id="billing", epoch=first)
    new = home.begin(transactional_id="billing", epoch=second)
    home.stage(new, 0, A, b"new")
    await home.coordinator.commit(OWNER, new, 1, home.clock)
    assert await home.records(A) == [b"new"]


async def test_limits_are_answers(home: Home) -> None:
    home.limits = LimitsConfig(transaction_bytes=Size(1 << 20), transaction_timeout=Duration(1_000))
    await restart(home)
    with pytest.raises(RequestError, match="1 to 1000 ms"):
        home.begin()
    transaction = home.begin(timeout_ms=1_000)
    with pytest.raises(RequestError, match="batches of this transaction are for shard 0"):
        for index in range(PARTS_PER_SHARD_MAX + 1):
            home.stage(transaction, index, B, b"x")
    with pytest.raises(RequestError, match="1048576 are allowed"):
        for index in range(PARTS_PER_SHARD_MAX, PARTS_PER_SHARD_MAX + 3):
            home.stage(transaction, index, A, b"x" * 500_000)
    with pytest.raises(RequestError, match="Index 99"):
        home.stage(transaction, 99, A, b"x")
    home.stage(transaction, 0, B, b"said again")
    with pytest.raises(UnavailableError, match="are open"):
        for _ in range(OPEN_PER_IDENTITY_MAX + 1):
            home.begin(timeout_ms=1_000)
    with pytest.raises(RequestError, match="nor brought by a bridge"):
        home.stage(transaction, 32, A, b"x", epoch=BRIDGED_EPOCH)
    with pytest.raises(RequestError, match="no shard 7"):
        home.stage(transaction, 32, A, b"x", shard=7)
    with pytest.raises(RequestError, match="16 bytes"):
        home.coordinator.open.begin(OTHER, b"short", 10, "", 0)


async def test_rights_are_asked_when_staged_and_again_at_the_commit(home: Home) -> None:
    home.broker.set_rights({str(OTHER): ["publish acme/shop/orders"]})
    transaction = home.begin(owner=OTHER)
    home.stage(transaction, 0, A, b"may", owner=OTHER)
    for wrong in (B, "acme/shop/none", "felix/system/transactions"):
        with pytest.raises(RequestError) as refused:
            home.stage(transaction, 1, wrong, b"may not", owner=OTHER)
        assert refused.value.code is Code.NOT_FOUND_OR_FORBIDDEN
    with pytest.raises(RequestError):
        home.stage(transaction, 1, A, b"another's", owner=OWNER)
    home.broker.set_rights({})
    with pytest.raises(RequestError) as refused:
        await home.coordinator.commit(OTHER, transaction, 1, home.clock)
    assert refused.value.code is Code.NOT_FOUND_OR_FORBIDDEN
    assert await home.records(A) == []


async def test_a_stream_made_anew_gets_nothing_of_the_old_one(home: Home) -> None:
    transaction = home.begin()
    home.stage(transaction, 0, B, b"old")
    hosted = home.streams.get(StreamName.parse(B))
    assert hosted is not None
    deleted = await home.catalog.delete_stream(
        hosted.name, incarnation=hosted.record.incarnation, deleted_ms=1
    )
    await home.streams.remove(hosted.name, deleted.incarnation)
    await home.create(B)
    with pytest.raises(RequestError) as refused:
        await home.coordinator.commit(OWNER, transaction, 1, home.clock)
    assert refused.value.code is Code.CONFLICT
    assert await home.records(B) == []


async def test_message_ids_count_in_transactions_too(home: Home) -> None:
    await home.create("acme/shop/once", views=Views(deduplication=Deduplication()))
    for expected in (((0,),), ((0,),)):
        transaction = home.begin()
        home.stage(transaction, 0, "acme/shop/once", b"one", headers={"felix.message-id": b"1"})
        outcome = await home.coordinator.commit(OWNER, transaction, 1, home.clock)
        assert outcome.offsets == expected
    assert await home.records("acme/shop/once") == [b"one"]


class Choosy(DiskFiles):
    """A disk that is full, or fails, for segments below some folders."""

    def __init__(self) -> None:
        self.full: set[str] = set()
        self.failing: set[str] = set()
        self.paths: dict[int, str] = {}

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        self.paths[descriptor] = str(path)
        return descriptor

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        path = self.paths[descriptor]
        if ".seg" in path:
            if any(each in path for each in self.full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if any(each in path for each in self.failing):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwritev(descriptor, buffers, position)


async def test_a_journal_that_could_not_be_read_is_read_before_anything_is_decided(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What opened its log did not read it: an empty state stood for what was decided, and nobody applied what was decided then."""
    replay, failed = Journal.replay, False

    async def fails_once(self: Journal) -> AsyncIterator[bytes]:
        nonlocal failed
        if not failed:
            failed = True
            raise UnavailableError("The disk does not answer.", code=Code.DISK_FULL)
        async for entry in replay(self):
            yield entry

    monkeypatch.setattr(Journal, "replay", fails_once)
    transaction = home.begin()
    home.stage(transaction, 0, B, b"b1")
    with pytest.raises(UnavailableError, match="does not answer"):
        await home.coordinator.commit(OWNER, transaction, 1, home.clock)
    again = home.begin()
    home.stage(again, 0, B, b"b2")
    outcome = await home.coordinator.commit(OWNER, again, 1, home.clock)
    assert outcome.offsets == ((0,),)
    assert await home.records(B) == [b"b2"]


async def test_a_full_disk_under_the_journal_leaves_it_open_to_be_asked_again(tmp_path: Path) -> None:
    files = Choosy()
    home = Home(tmp_path, files)
    await home.open()
    await home.create(A)
    warm = home.begin()
    home.stage(warm, 0, A, b"warm")
    await home.coordinator.commit(OWNER, warm, 1, home.clock)
    transaction = home.begin()
    home.stage(transaction, 0, A, b"a")
    files.full.add("felix~system~transactions")
    with pytest.raises(UnavailableError) as refused:
        await home.coordinator.commit(OWNER, transaction, 1, home.clock)
    assert refused.value.code is Code.DISK_FULL
    assert await home.records(A) == [b"warm"]
    files.full.clear()
    async with asyncio.timeout(120):
        while True:
            try:
                outcome = await home.coordinator.commit(OWNER, transaction, 1, home.clock)
                break
            except UnavailableError:
                await asyncio.sleep(0.05)
    assert outcome.offsets == ((1,),)
    assert await home.records(A) == [b"warm", b"a"]
    await home.close()


async def test_a_full_target_holds_the_others_until_it_has_room(tmp_path: Path) -> None:
    files = Choosy()
    home = Home(tmp_path, files)
    await home.open()
    await home.create(A)
    await home.create(B)
    transaction = home.begin()
    home.stage(transaction, 0, A, b"a")
    home.stage(transaction, 1, B, b"b")
    files.full.add("payments")
    commit = asyncio.ensure_future(home.coordinator.commit(OWNER, transaction, 2, home.clock))
    await until(lambda: home.shard(A).log_end_offset)
    await asyncio.sleep(0.2)
    assert not commit.done() and await home.records(A) == [], "half of it is there, and nobody sees it"
    files.full.clear()
    assert (await commit).offsets == ((0,), (0,))
    assert (await home.records(A), await home.records(B)) == ([b"a"], [b"b"])
    await home.close()


async def test_a_target_that_fails_stops_loudly_and_has_its_part_before_it_serves_again(
    tmp_path: Path,
) -> None:
    files = Choosy()
    home = Home(tmp_path, files)
    await home.open()
    await home.create(A)
    await home.create(B)
    transaction = home.begin()
    home.stage(transaction, 0, A, b"a")
    home.stage(transaction, 1, B, b"b")
    files.failing.add("payments")
    with pytest.raises(UnavailableError, match="is committed, and a shard") as owed:
        await home.coordinator.commit(OWNER, transaction, 2, home.clock)
    assert owed.value.code is Code.SHARD_STOPPED
    assert home.coordinator.owed_count == 1
    with pytest.raises(UnavailableError):
        home.shard(B).read_hot(0, 10)
    later = home.begin()
    home.stage(later, 0, A, b"later")
    await home.coordinator.commit(OWNER, later, 1, home.clock)
    files.failing.clear()
    await restart(home)
    assert (await home.records(A), await home.records(B)) == ([b"a", b"later"], [b"b"])
    assert (await home.coordinator.commit(OWNER, transaction, 2, home.clock)).offsets[1] == (0,)
    assert home.coordinator.owed_count == 0
    await home.close()


@pytest.mark.parametrize(
    "step", [("committed", 1), ("appended", 1), ("appended", 2), ("appended", 3), ("applied", 1)]
)
async def test_a_crash_at_each_step_is_made_good_at_the_next_start(home: Home, step: tuple[str, int]) -> None:
    await home.publish(A, b"before")
    transaction = home.begin()
    home.stage(transaction, 0, A, b"a0", shard=0)
    home.stage(transaction, 1, A, b"a1", shard=1)
    home.stage(transaction, 2, B, b"b0")
    home.crash_at = step
    commit = asyncio.ensure_future(home.coordinator.commit(OWNER, transaction, 3, home.clock))
    await until(lambda: home.crashed)
    commit.cancel()
    await restart(home, crash=True)
    assert [await home.records(A, 0), await home.records(A, 1), await home.records(B)] == [
        [b"before", b"a0"],
        [b"a1"],
        [b"b0"],
    ]
    outcome = await home.coordinator.commit(OWNER, transaction, 3, home.clock)
    assert outcome.offsets == ((1,), (0,), (0,))
    await restart(home)
    assert await home.records(B) == [b"b0"], "applied once, however often it starts"


async def test_what_was_not_committed_before_a_crash_is_known_not_to_be(home: Home) -> None:
    transaction = home.begin()
    home.stage(transaction, 0, A, b"a")
    await restart(home, crash=True)
    with pytest.raises(RequestError, match=r"was aborted.*Nothing of it is in any stream") as refused:
        await home.coordinator.commit(OWNER, transaction, 1, home.clock)
    assert refused.value.code is Code.TRANSACTION_ABORTED


def test_a_forgotten_outcome_says_that_nobody_knows() -> None:
    held = TransactionState(outcomes_max=2)
    for number in range(1, 5):
        held.apply(state.Part(number, 0, A, b"i", 0, b""))
        held.apply(state.Committed(number, b"%d" % number, "me", 100 + number, 1, 0))
        held.apply(state.Applied(number, ((number,),)))
    assert [held.find(b"%d" % n) is not None for n in range(1, 5)] == [False, False, True, True]
    assert held.forgotten_ms == 102
    again = TransactionState(outcomes_max=2)
    for entry in held.snapshot():
        again.apply(state.decode(entry))
    assert (again.forgotten_ms, again.next_number, again.find(b"3")) == (102, 5, again.find(b"3"))
    assert again.owed == [] and len(again) == 2


async def test_an_unknown_outcome_says_so(home: Home) -> None:
    home.coordinator.state.forgotten_ms = home.clock
    with pytest.raises(RequestError) as unknown:
        await home.coordinator.commit(OWNER, os.urandom(16), 1, home.clock - 1)
    assert unknown.value.code is Code.TRANSACTION_UNKNOWN


class TransactionsAgainstModel(RuleBasedStateMachine):
    """Several producers, transactions and plain publishes over three shards; crashes at any step, full stops, restarts."""

    SHARDS = ((A, 0), (A, 1), (B, 0))

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="felix-tx-"))
        self.loop = asyncio.new_event_loop()
        self.home = Home(self.folder)
        self.count = 0
        self.open: list[tuple[bytes, Staged]] = []
        self.model: list[list[bytes]] = [[], [], []]
        self.staged: list[Staged] = []
        self.seen: set[bytes] = set()
        self.seen_from: dict[tuple[str, int], int] = {}
        self.run(self._create())

    def run(self, work: object) -> object:
        return self.loop.run_until_complete(work)

    async def _create(self) -> None:
        await self.home.open()
        await self.home.create(A, shards=2)
        await self.home.create(B)
        await self._watch()

    async def _watch(self) -> None:
        """Read what is there, and follow from there on."""
        for name, shard in self.SHARDS:
            self.seen.update(await self.home.records(name, shard))
            self.seen_from[name, shard] = self.home.shard(name, shard).high_watermark
        self._look()
        for name, shard in self.SHARDS:
            self.home.shard(name, shard).subscribe_tail(self._look)

    def _look(self) -> None:
        """Whenever a reader hears of something, every transaction is there wholly or not at all."""
        for name, shard in self.SHARDS:
            log = self.home.shard(name, shard)
            for entry in log.read_hot(max(self.seen_from[name, shard], log.log_start_offset), 1 << 20) or []:
                self.seen.update(payloads_of(entry))
        for staged in self.staged:
            there = sum(payload in self.seen for _, _, payload in staged)
            assert there in (0, len(staged)), "a part of a transaction was seen"

    @rule()
    def begin(self) -> None:
        if len(self.open) < 5:
            staged: Staged = []
            self.staged.append(staged)
            self.open.append((self.run(self._begin()), staged))

    async def _begin(self) -> bytes:
        return self.home.begin()

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 4), shard=st.integers(0, 2), records=st.integers(1, 3))
    def stage(self, which: int, shard: int, records: int) -> None:
        transaction, staged = self.open[which % len(self.open)]
        if len(staged) >= 20:
            return
        name, number = self.SHARDS[shard]
        payloads = []
        for _ in range(records):
            self.count += 1
            payloads.append(b"%d" % self.count)
        index = len({at for at, _, _ in staged})
        self.run(self._stage(transaction, index, name, number, payloads))
        staged += [(index, shard, payload) for payload in payloads]

    async def _stage(
        self, transaction: bytes, index: int, name: str, number: int, payloads: list[bytes]
    ) -> None:
        self.home.stage(transaction, index, name, *payloads, shard=number)
        self.home.stage(transaction, index, name, *payloads, shard=number)  # a lost answer, asked again

    @rule(shard=st.integers(0, 2))
    def publish(self, shard: int) -> None:
        name, number = self.SHARDS[shard]
        self.count += 1
        payload = b"%d" % self.count
        self.run(self.home.publish(name, payload, shard=number))
        self.model[shard].append(payload)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 4))
    def abort(self, which: int) -> None:
        transaction, _ = self.open.pop(which % len(self.open))

        self.run(self.home.coordinator.abort(OWNER, transaction))

    @precondition(lambda self: self.open)
    @rule(many=st.integers(1, 5))
    def commit(self, many: int) -> None:
        """Several at once: their order in the shards is that of their commits."""
        chosen, self.open = self.open[:many], self.open[many:]

        async def work() -> list[object]:
            return await asyncio.gather(
                *(self._commit(transaction, staged) for transaction, staged in chosen)
            )

        outcomes = self.run(work())
        for (_, staged), outcome in zip(chosen, outcomes, strict=True):
            self._expect(staged, outcome)

    async def _commit(self, transaction: bytes, staged: Staged) -> object:
        return await self.home.coordinator.commit(
            OWNER, transaction, len({at for at, _, _ in staged}), self.home.clock
        )

    def _expect(self, staged: Staged, outcome: object) -> None:
        for _, shard, payload in staged:
            self.model[shard].append(payload)
        firsts: dict[int, tuple[int, bytes]] = {}
        for index, shard, payload in staged:
            firsts.setdefault(index, (shard, payload))
        offsets = outcome.offsets  # type: ignore[attr-defined]
        assert len(offsets) == len(firsts)
        for index, (shard, payload) in firsts.items():
            if offsets[index][0] >= 0:
                assert self.model[shard][offsets[index][0]] == payload

    @precondition(lambda self: self.open)
    @rule(
        step=st.sampled_from(["committed", "appended", "applied"]),
        after=st.integers(1, 4),
        many=st.integers(1, 3),
    )
    def crash(self, step: str, after: int, many: int) -> None:
        """Commit some, and crash on the way, or after it; what was open is lost, what was decided is not."""
        chosen, rest = self.open[:many], self.open[many:]
        self.open = []

        async def work() -> list[object]:
            self.home.crash_at = (step, after)
            commits = [asyncio.ensure_future(self._commit(t, staged)) for t, staged in chosen]
            await until(lambda: self.home.crashed or all(commit.done() for commit in commits))
            for commit in commits:
                commit.cancel()
            await asyncio.gather(*commits, return_exceptions=True)
            self.home.crash_at = None
            await self.home.close(crash=True)
            await self.home.open()
            await self._watch()
            return await asyncio.gather(
                *(self._commit(t, staged) for t, staged in chosen), return_exceptions=True
            )

        self.loop.set_exception_handler(lambda *_: None)
        outcomes = self.run(work())
        decided = True
        for (_, staged), outcome in zip(chosen, outcomes, strict=True):
            if isinstance(outcome, RequestError):
                assert outcome.code is Code.TRANSACTION_ABORTED
                decided = decided and not staged  # an empty one leaves nothing to be remembered
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            if staged:
                assert decided, "a later commit cannot be there without the earlier one"
            self._expect(staged, outcome)
        for transaction, _ in rest:
            with pytest.raises(RequestError):
                self.run(self._commit(transaction, []))

    @rule()
    def restart(self) -> None:
        async def work() -> None:
            await self.home.close()
            await self.home.open()
            await self._watch()

        self.open = []
        self.run(work())

    @rule()
    def read(self) -> None:
        for expected, (name, number) in zip(self.model, self.SHARDS, strict=True):
            assert self.run(self.home.records(name, number)) == expected

    def teardown(self) -> None:
        self.read()
        self.run(self.home.close())
        self.loop.close()
        shutil.rmtree(self.folder)


TestTransactionsAgainstModel = TransactionsAgainstModel.TestCase
TestTransactionsAgainstModel.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)


async def test_a_client_that_leaves_while_it_is_decided_leaves_it_decided(home: Home) -> None:
    transaction = home.begin()
    home.stage(transaction, 0, A, b"a")
    commit = asyncio.ensure_future(home.coordinator.commit(OWNER, transaction, 1, home.clock))
    await asyncio.sleep(0)
    commit.cancel()
    await asyncio.gather(commit, return_exceptions=True)
    async with asyncio.timeout(120):
        assert (await home.coordinator.commit(OWNER, transaction, 1, home.clock)).offsets == ((0,),)
    assert await home.records(A) == [b"a"]


async def test_a_client_that_goes_while_it_fences_keeps_nobody_waiting(home: Home) -> None:
    """Its answer has nowhere to go; those whose entries were written with its own still hear of theirs."""
    await home.coordinator.fence(OWNER, "first")
    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    leaving = asyncio.ensure_future(home.coordinator.fence(OWNER, "worker"))
    staying = asyncio.ensure_future(home.coordinator.fence(OWNER, "other"))
    await asyncio.sleep(0)
    leaving.cancel()
    async with asyncio.timeout(120):
        assert await staying == 1
        assert await home.coordinator.fence(OWNER, "worker") == 2
        transaction = home.begin()
        home.stage(transaction, 0, A, b"a1")
        await home.coordinator.commit(OWNER, transaction, 1, home.clock)
        await home.coordinator.close()
    assert reports == []


async def test_one_identity_makes_nobody_elses_instances_old(home: Home) -> None:
    """However many transactional ids one identity has, what is known of another's stays."""
    mine = await home.coordinator.fence(OTHER, "billing")
    for number in range(state.FENCES_MAX + 1):
        home.coordinator.state.apply(state.Fenced(str(OWNER), f"id-{number}", 1))
    assert home.coordinator.state.epoch(str(OTHER), "billing") == mine
    held = TransactionState()
    for entry in home.coordinator.state.snapshot():
        held.apply(state.decode(entry))
    assert held.epoch(str(OTHER), "billing") == mine
    assert held.epoch(str(OWNER), f"id-{state.FENCES_MAX}") == 1
    assert held.epoch(str(OWNER), "id-0") == 0, "of its own, the one unused for longest goes"


async def test_asking_for_an_ended_transaction_again_and_again_costs_no_memory(home: Home) -> None:
    aborted = home.begin()
    await home.coordinator.abort(OWNER, aborted)
    lengths: set[int] = set()
    for _ in range(20):
        with pytest.raises(RequestError) as refused:
            home.stage(aborted, 0, A, b"late")
        with pytest.raises(RequestError):
            await home.coordinator.commit(OWNER, aborted, 0, home.clock)
        lengths.add(len(list(traceback.walk_tb(refused.value.__traceback__))))
    assert len(lengths) == 1
