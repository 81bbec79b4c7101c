"""Transactions through the SDK: against a broker in this process, over lost connections, and over brokers that are killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from long_runs import count
from region_home import running
from region_peer import client, take, until
from region_process import BrokerProcess, fixed_region

import felix
import felix.sync
from felix.errors import Code, RequestError, UnavailableError
from felix.names import StreamName
from felix.provenance import PATH_HEADER
from felix.quota import QuotaLimits
from felix.transaction_messages import Stage, StageAcknowledgement
from region.folder import RegionFolder
from region.node import Node
from region.transactions.coordinator import Coordinator

A, B = "acme/shop/orders", "acme/shop/payments"

pytestmark = pytest.mark.timeout(120)


async def payloads(region: felix.RegionClient, name: str) -> list[bytes]:
    state = await region.describe_stream(name)
    total = sum(shard.high_watermark for shard in state.state)
    return [bytes(record.payload) for record in await take(region.stream(name).subscribe("earliest"), total)]


async def test_a_block_commits_or_aborts(operator: felix.RegionClient) -> None:
    await operator.create_stream(A, shards=3)
    await operator.create_stream(B)
    async with operator.transaction() as transaction:
        records = [await transaction.publish(A, b"%d" % n, key=b"%d" % n) for n in range(50)]
        last = await transaction.publish(B, b"last")
        with pytest.raises(RequestError, match="not committed"):
            _ = last.offset
        assert await payloads(operator, B) == []
    assert last.offset == 0
    assert {(record.shard, record.offset) for record in records} == {
        (shard.shard, offset)
        for shard in (await operator.describe_stream(A)).state
        for offset in range(shard.high_watermark)
    }
    with pytest.raises(ValueError, match="no"):
        async with operator.transaction(compress=True) as transaction:
            await transaction.publish(B, b"not this one")
            raise ValueError("no")
    assert await payloads(operator, B) == [b"last"]
    with pytest.raises(RequestError, match="not open"):
        await transaction.publish(B, b"late")


async def test_a_record_of_a_transaction_names_no_regions(operator: felix.RegionClient) -> None:
    await operator.create_stream(B)
    async with operator.transaction() as transaction:
        with pytest.raises(RequestError, match="written by bridges"):
            await transaction.publish(B, b"no", headers={PATH_HEADER: b"ap-south"})
        await transaction.publish(B, b"yes")
    assert await payloads(operator, B) == [b"yes"]


async def test_records_of_a_received_batch_are_published_with_their_keys(
    operator: felix.RegionClient,
) -> None:
    """Payloads and keys of a batch are views: consume, transform and produce need no copy of their own."""
    await operator.create_stream(A)
    await operator.create_stream(B)
    await operator.create_queue("acme/shop/review")
    await operator.stream(A).publish_many([b"a", b"b"], [b"1", b"2"])
    async with operator.stream(A).consumer("copy", start="earliest") as consumer, asyncio.timeout(60):
        batch = await anext(consumer.batches())
        records = list(batch.records())
        assert [type(record.key) for record in records] == [memoryview, memoryview]
        async with operator.transaction() as transaction:
            for record in records:
                await transaction.publish(B, record.payload, key=record.key)
            await transaction.acknowledge(batch, consumer=consumer)
        async with operator.stream(B).publisher() as publisher:
            for record in records:
                await publisher.send(record.payload, record.key)
            await publisher.send_many([records[0].payload], [records[0].key])
        await operator.queue("acme/shop/review").put(records[0].payload, key=records[0].key)
        with pytest.raises(RequestError, match="A key is bytes, not str"):
            await operator.stream(B).publish(b"c", key="3")  # type: ignore[arg-type]
    stored = await take(operator.stream(B).subscribe("earliest"), 5)
    assert [bytes(record.key or b"") for record in stored] == [b"1", b"2", b"1", b"2", b"1"]
    (job,) = await operator.queue("acme/shop/review").lease()
    assert job.key == b"1"


async def test_more_than_a_batch_of_each_shard(operator: felix.RegionClient) -> None:
    await operator.create_stream(A)
    async with operator.transaction() as transaction:
        for n in range(40):
            await transaction.publish(A, b"%02d" % n + b"x" * 100_000)
        offsets = await transaction.commit()
    assert offsets == list(range(40))
    with pytest.raises(RequestError, match="8388608 are allowed"):
        async with operator.transaction() as transaction:
            for _ in range(100):
                await transaction.publish(A, b"x" * 100_000)
    assert (await operator.describe_stream(A)).state[0].high_watermark == 40


@pytest.mark.parametrize("is_carried_out", [False, True])
@pytest.mark.parametrize("unanswered", range(3))
async def test_a_commit_that_is_asked_again_has_what_was_staged_without_an_answer(
    operator: felix.RegionClient, unanswered: int, is_carried_out: bool
) -> None:
    """The broker may have it, or not: it is asked again under its number, before anything else."""
    await operator.create_stream(A)
    await operator.create_stream(B)
    await operator.create_queue("acme/shop/review")
    await operator.queue("acme/shop/review").put(b"work")
    (job,) = await operator.queue("acme/shop/review").lease(visibility=300)
    transaction = operator.transaction()
    call, staged = transaction._transactions.call, 0

    async def called(message: Any, timeout_s: float | None = None) -> Any:
        nonlocal staged
        is_staged = isinstance(message, Stage | StageAcknowledgement)
        staged += is_staged
        if is_staged and staged == unanswered + 1:
            if is_carried_out:
                await call(message, timeout_s)
            raise UnavailableError("It was not answered.", code=Code.TIMEOUT)
        return await call(message, timeout_s)

    transaction._transactions = SimpleNamespace(call=called, new_id=None)  # type: ignore[assignment]
    await transaction.begin()
    first = await transaction.publish(A, b"order")
    second = await transaction.publish(B, b"payment")
    await transaction.acknowledge(job)
    with pytest.raises(UnavailableError):
        await transaction.commit()
    assert await transaction.commit() == [0, 0] == [first.offset, second.offset]
    assert (await payloads(operator, A), await payloads(operator, B)) == ([b"order"], [b"payment"])
    assert (await operator.queue("acme/shop/review").describe()).leased == 0


@pytest.mark.parametrize("is_carried_out", [False, True])
async def test_a_publish_that_was_not_answered_takes_no_earlier_record_along(
    operator: felix.RegionClient, is_carried_out: bool
) -> None:
    await operator.create_stream(A)
    transaction = operator.transaction()
    call, fails = transaction._transactions.call, True

    async def called(message: Any, timeout_s: float | None = None) -> Any:
        if isinstance(message, Stage) and fails:
            if is_carried_out:
                await call(message, timeout_s)
            raise UnavailableError("It was not answered.", code=Code.TIMEOUT)
        return await call(message, timeout_s)

    transaction._transactions = SimpleNamespace(call=called, new_id=None)  # type: ignore[assignment]
    await transaction.begin()
    await transaction.publish(A, b"0" + b"x" * 400_000)
    for _ in range(3):
        with pytest.raises(UnavailableError):
            await transaction.publish(A, b"1" + b"x" * 400_000)
    fails = False
    for number in (1, 2):
        await transaction.publish(A, b"%d" % number + b"x" * 400_000)
    assert await transaction.commit() == [0, 1, 2]
    assert [payload[:1] for payload in await payloads(operator, A)] == [b"0", b"1", b"2"]


async def test_a_transaction_of_which_a_part_was_refused_is_not_committed_without_it(
    operator: felix.RegionClient,
) -> None:
    await operator.create_stream(A)
    await operator.create_stream(B)
    async with operator.transaction() as transaction:
        await transaction.publish(A, b"order")
        await transaction.publish(B, b"payment")
        await operator.delete_stream(A)
        for _ in range(2):
            with pytest.raises(RequestError):
                await transaction.commit()
        await transaction.abort()
    assert await payloads(operator, B) == []


async def test_a_lost_connection_changes_nothing(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(A)
    async with client(node.folder) as region:
        for number in range(20):
            async with region.transaction() as transaction:
                await transaction.publish(A, b"%d" % number)
                if number % 3 == 0:
                    link = region.connection.link
                    assert link is not None
                    asyncio.get_running_loop().call_later(0.001 * (number % 5), link.connection.close)
        assert region.reconnects >= 3
    assert await payloads(operator, A) == [b"%d" % n for n in range(20)]


async def test_a_client_that_leaves_as_its_connection_closes_leaves_in_order(
    node: Node, operator: felix.RegionClient
) -> None:
    """The transport is closed before the session hears of it: what was open has nothing left to say."""
    await operator.create_stream(A)
    async with client(node.folder) as region:
        async with region.transaction() as transaction:
            await transaction.publish(A, b"1")
        link = region.connection.link
        assert link is not None
        link.connection.close()
    assert await payloads(operator, A) == [b"1"]


async def test_an_instance_that_was_replaced_is_told_so(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(A)
    async with client(node.folder) as old, client(node.folder) as new:
        left = old.transaction(transactional_id="billing")
        await left.begin()
        await left.publish(A, b"old")
        async with new.transaction(transactional_id="billing") as transaction:
            await transaction.publish(A, b"new")
        with pytest.raises(RequestError) as fenced:
            await left.commit()
        assert fenced.value.code is Code.TRANSACTION_FENCED
        with pytest.raises(RequestError, match="newer instance"):
            async with old.transaction(transactional_id="billing"):
                pass
    assert await payloads(operator, A) == [b"new"]


async def test_the_reserved_tenant_is_nobodys(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(A)
    async with operator.transaction() as transaction:
        await transaction.publish(A, b"x")
    assert len(node.broker.streams) == 2, "the system stream is there"
    assert [state.stream async for state in operator.list_streams()] == [A]
    name = "felix/system/transactions"
    for refused in (
        operator.create_stream("felix/mine/x"),
        operator.describe_stream(name),
        operator.delete_stream(name),
        operator.stream(name).publish(b"x"),
        anext(operator.stream(name).subscribe("earliest")),
        operator.put_rights("spiffe://us-east.acme/client/orders-svc", ["publish felix/*/*"]),
    ):
        with pytest.raises(RequestError) as error:
            await refused
        assert error.value.code in (Code.FORBIDDEN, Code.NOT_FOUND_OR_FORBIDDEN)


async def test_the_synchronous_face(folder: RegionFolder, node: Node) -> None:
    def work() -> None:
        profile = felix.load_profile("us-east", home=folder.root.parent)
        with felix.sync.connect(profile=profile) as region:
            region.create_stream(A)
            with region.transaction() as transaction:
                record = transaction.publish(A, b"one")
            assert record.offset == 0

    await asyncio.to_thread(work)


async def test_a_restart_keeps_the_outcome(folder: RegionFolder, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data), client(folder) as region:
        await region.create_stream(A)
        transaction = region.transaction()
        await transaction.begin()
        await transaction.publish(A, b"x")
        assert await transaction.commit() == [0]
    async with running(folder, data=data) as node, client(folder) as region:
        found = node.transactions.state.find(transaction.id)
        assert found is not None and found.offsets == ((0,),)
        assert await payloads(region, A) == [b"x"]


async def test_a_first_transaction_that_nobody_answered_does_not_spoil_those_that_follow(
    tmp_path: Path,
) -> None:
    folder = fixed_region(tmp_path)
    data = str(tmp_path / "data")
    async with AsyncExitStack() as first:
        await first.enter_async_context(running(folder, data=data))
        async with client(folder, request_timeout_s=2.0) as region:
            await region.create_stream(A)
            await first.aclose()
            with pytest.raises(UnavailableError):
                await region.transaction().begin()
            async with running(folder, data=data):
                await until(lambda: region.is_connected)
                async with region.transaction() as transaction:
                    await transaction.publish(A, b"after all")
                assert await payloads(region, A) == [b"after all"]


async def test_brokers_killed_under_transactions_leave_each_once_or_not_at_all(tmp_path: Path) -> None:
    """SIGKILL at any moment: after the journal, between two shards, before the journal says that it is done."""
    kills, producers = count(2, 5), 3
    folder = fixed_region(tmp_path)
    chance = random.Random(5)
    broker = BrokerProcess(folder, tmp_path)
    try:
        await asyncio.to_thread(broker.wait)
        async with client(folder) as region:
            await region.create_stream(A, shards=2)
            await region.create_stream(B)
            committed: dict[bytes, tuple[int, int]] = {}
            aborted = 0
            over = asyncio.Event()

            async def produce(who: int) -> None:
                nonlocal aborted
                number = 0
                while not over.is_set():
                    payload = b"%d %d" % (who, number)
                    try:
                        async with region.transaction() as transaction:
                            first = await transaction.publish(A, payload, shard=number % 2)
                            await transaction.publish(A, payload + b" other", shard=1 - number % 2)
                            second = await transaction.publish(B, payload)
                    except RequestError as error:
                        # Certain: nothing of it is anywhere, so it is said again.
                        assert error.code is Code.TRANSACTION_ABORTED, error
                        aborted += 1
                        continue
                    committed[payload] = (first.offset, second.offset)
                    number += 1

            working = [asyncio.ensure_future(produce(who)) for who in range(producers)]
            for _ in range(kills):
                enough = len(committed) + 20 + chance.randrange(60)
                await until(
                    lambda enough=enough: len(committed) >= enough or any(t.done() for t in working), 60
                )  # type: ignore[misc]
                await asyncio.sleep(chance.random() * 0.01)
                broker.kill()
                broker = BrokerProcess(folder, tmp_path)
                await asyncio.to_thread(broker.wait)
            over.set()
            async with asyncio.timeout(120):
                await asyncio.gather(*working)
            in_a, in_b = await payloads(region, A), await payloads(region, B)
        assert len(set(in_a)) == len(in_a) and len(set(in_b)) == len(in_b), "nothing is there twice"
        assert {p for p in in_a if not p.endswith(b"other")} == set(in_b) == set(committed)
        assert {p.removesuffix(b" other") for p in in_a if p.endswith(b"other")} == set(in_b)
        for payload, (_, offset) in committed.items():
            assert offset < 0 or in_b[offset] == payload
        for who in range(producers):
            order = [int(p.split()[1]) for p in in_b if p.startswith(b"%d " % who)]
            assert order == list(range(len(order)))
        assert aborted < len(committed)
    finally:
        broker.kill()


async def test_jobs_and_what_was_made_of_them_are_one_step(operator: felix.RegionClient) -> None:
    await operator.create_stream(A)
    await operator.create_queue("acme/shop/jobs")
    jobs = operator.queue("acme/shop/jobs")
    for number in range(6):
        await jobs.put(b"%d" % number)
    done = 0
    async with asyncio.timeout(120):
        async for job in jobs.consume(visibility=20):
            try:
                async with operator.transaction() as transaction:
                    await transaction.publish(A, b"made of " + job.payload)
                    await transaction.acknowledge(job)
                    if job.payload in (b"1", b"4") and job.attempts == 1:
                        raise ValueError("this time it fails")
            except ValueError:
                continue
            done += 1
            if done == 6:
                break
    assert sorted(await payloads(operator, A)) == [b"made of %d" % n for n in range(6)]
    state = await jobs.describe()
    assert (state.ready, state.leased) == (0, 0)


async def test_a_lease_that_was_lost_lets_the_commit_fail(operator: felix.RegionClient) -> None:
    await operator.create_stream(A)
    await operator.create_queue("acme/shop/jobs")
    jobs = operator.queue("acme/shop/jobs")
    await jobs.put(b"job")
    (job,) = await jobs.lease(1, visibility=0.2)
    await asyncio.sleep(0.4)
    (again,) = await jobs.lease(1, visibility=20, wait=10)
    assert again.attempts == 2
    transaction = operator.transaction()
    await transaction.begin()
    await transaction.publish(A, b"no")
    await transaction.acknowledge(job)
    with pytest.raises(RequestError) as lost:
        await transaction.commit()
    assert lost.value.code is Code.LEASE_LOST
    assert await payloads(operator, A) == []
    await again.ack()


class SlowDisk:
    """What coordinators decide is not written before `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[Callable[[], None]] | None = []
        write = Coordinator._write

        def slowly(coordinator: Coordinator, journal: Any, *rest: Any) -> None:
            def append(data: bytes, done: Callable[[Any], None]) -> None:
                def written(error: Any) -> None:
                    if self.waiting is None:
                        done(error)
                    else:
                        self.waiting.append(lambda: done(error))

                journal.append(data, written)

            slow: Any = SimpleNamespace(append=append)
            write(coordinator, slow, *rest)

        monkeypatch.setattr(Coordinator, "_write", slowly)

    def go_on(self) -> None:
        assert self.waiting
        waiting, self.waiting = self.waiting, None
        for done in waiting:
            done()


@pytest.mark.parametrize("again", ["in another transaction", "after a heartbeat"])
async def test_a_job_that_a_transaction_is_about_to_acknowledge_is_nobody_elses(
    operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """The decision is on its way to a slow disk meanwhile."""
    await operator.create_stream(A)
    await operator.create_queue("acme/shop/jobs")
    jobs = operator.queue("acme/shop/jobs")
    await jobs.put(b"job")
    (job,) = await jobs.lease(1, visibility=20, wait=20)
    disk = SlowDisk(monkeypatch)
    first, second = operator.transaction(timeout_s=60), operator.transaction(timeout_s=60)
    for transaction in (first, second):
        await transaction.begin()
        await transaction.publish(A, b"done")
        await transaction.acknowledge(job)
    commit = asyncio.ensure_future(first.commit())
    await until(lambda: bool(disk.waiting), 30)
    if again == "in another transaction":
        with pytest.raises(RequestError, match="is being committed") as lost:
            await second.commit()
    else:
        await second.abort()
        await job.extend(0.1)
        assert await jobs.lease(1, wait=1) == []
        with pytest.raises(RequestError) as lost:
            await job.nack()
    assert lost.value.code is Code.LEASE_LOST
    disk.go_on()
    await commit
    assert await payloads(operator, A) == [b"done"]
    state = await jobs.describe()
    assert (state.ready, state.leased) == (0, 0)


async def test_what_a_transaction_acknowledges_stays_its_own_while_positions_are_read_back(
    operator: felix.RegionClient, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision is on its way to a slow disk meanwhile."""
    for name in (A, B):
        await operator.create_stream(name)
    await operator.stream(A).publish_many([b"%d" % number for number in range(4)])
    settings = felix.SubscriptionSettings(start="earliest")
    disk = SlowDisk(monkeypatch)
    transaction = operator.transaction(timeout_s=60)
    async with operator.stream(A).consumer("billing", settings=settings) as consumer:
        records = [await anext(consumer) for _ in range(4)]
        await transaction.begin()
        await transaction.publish(B, b"made of 0 and 2")
        for record in (records[0], records[2]):
            await transaction.acknowledge(record, consumer=consumer)
        commit = asyncio.ensure_future(transaction.commit())
        await until(lambda: bool(disk.waiting), 30)
    (store,) = node.subscriptions._held[StreamName.parse(A)].stores
    assert store._actor is not None
    await store._actor.open()
    with pytest.raises(UnavailableError, match="is being committed"):
        await operator.stream(A).seek_subscription("billing", "earliest")
    async with operator.stream(A).consumer("billing") as consumer:
        assert [bytes((await anext(consumer)).payload) for _ in range(2)] == [b"1", b"3"]
        other = operator.transaction(timeout_s=60)
        await other.begin()
        await other.acknowledge(records[0], consumer=consumer)
        with pytest.raises(RequestError) as refused:
            await other.commit()
        assert refused.value.code is Code.CONSUMER_FENCED
    disk.go_on()
    await commit
    assert not [*node.subscriptions._reservations.of(store._stream.incarnation, 0)]
    async with operator.stream(A).consumer("billing") as consumer:
        assert [bytes((await anext(consumer)).payload) for _ in range(2)] == [b"1", b"3"]


async def test_consumed_records_and_what_was_made_of_them_are_one_step(operator: felix.RegionClient) -> None:
    await operator.create_stream(A, shards=2)
    await operator.create_stream(B)
    for number in range(20):
        await operator.stream(A).publish(b"%d" % number, key=b"%d" % number)
    failed: set[bytes] = set()
    settings = felix.SubscriptionSettings(start="earliest", ack_timeout_ms=500)
    async with asyncio.timeout(120):
        made = 0
        while made < 20:
            async with operator.stream(A).consumer("billing", settings=settings) as consumer:
                async for record in consumer:
                    payload = bytes(record.payload)
                    try:
                        async with operator.transaction() as transaction:
                            await transaction.publish(B, payload)
                            await transaction.acknowledge(record, consumer=consumer)
                            if int(payload) % 7 == 3 and payload not in failed:
                                failed.add(payload)
                                raise ValueError("this time it fails")
                    except ValueError:
                        continue
                    except RequestError as error:
                        assert error.code is Code.CONSUMER_FENCED
                        continue
                    made += 1
                    if made == 20:
                        break
    assert sorted(await payloads(operator, B), key=int) == [b"%d" % n for n in range(20)]


async def test_open_transactions_count_in_quotas(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(A)
    me = "spiffe://us-east.acme/client/orders-svc"
    await operator.put_rights(me, [f"publish {A}"])
    await operator.put_quota("identity", me, QuotaLimits(transactions=1))
    async with client(node.folder, "orders-svc") as region:
        async with region.transaction() as transaction:
            await transaction.publish(A, b"one")
            second = region.transaction()
            refused = asyncio.ensure_future(second.begin())
            await until(lambda: node.broker.metrics.refusals.get(Code.LIMIT_OPEN.name.lower()))
            assert not refused.done(), "it is asked again until there is room"
        await refused
        await second.publish(A, b"two")
        assert await second.commit() == [1]


@pytest.mark.parametrize("anew", ["stream", "subscription"])
async def test_what_a_transaction_acknowledges_is_no_record_of_another_of_that_name(
    operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch, anew: str
) -> None:
    """It is deleted and made again while the decision is on its way to a slow disk."""
    from_the_start = felix.SubscriptionSettings(start="earliest")
    await operator.create_stream(A)
    await operator.create_stream(B)
    for number in range(5):
        await operator.stream(A).publish(b"%d" % number)
    await operator.stream(A).create_subscription("crew", from_the_start)
    async with operator.stream(A).consumer("crew") as consumer:
        records = [await anext(consumer) for _ in range(5)]
        disk = SlowDisk(monkeypatch)
        transaction = operator.transaction(timeout_s=60)
        await transaction.begin()
        await transaction.publish(B, b"made of them")
        for record in records:
            await transaction.acknowledge(record, consumer=consumer)
        commit = asyncio.ensure_future(transaction.commit())
        await until(lambda: bool(disk.waiting), 30)
    if anew == "stream":
        await operator.delete_stream(A)
        await operator.create_stream(A)
        async with operator.stream(A).publisher() as publisher:
            for number in range(5):
                await publisher.publish(b"new %d" % number)
    else:
        await operator.stream(A).delete_subscription("crew")
        await operator.stream(A).create_subscription("crew", from_the_start)
    disk.go_on()
    await commit
    async with asyncio.timeout(60), operator.stream(A).consumer("crew") as consumer:
        found = [(await anext(consumer)).payload for _ in range(5)]
    assert [bytes(payload) for payload in found] == await payloads(operator, A)
