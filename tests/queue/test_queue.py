"""A queue through the SDK and a real broker: put, lease, acknowledge, give back, dead letters, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from ports import claim_port
from region_home import running
from region_peer import client, encode_request, raw_peer, until

import felix
from felix.address import Address
from felix.batch import NewRecord, decode_header, encode_batch
from felix.errors import Code, RequestError, UnavailableError
from felix.frames import FRAME_HEADER_BYTES, FrameType, encode_frame
from felix.messages import OpenPublisher
from felix.names import StreamName
from felix.queue import Job
from felix.queue_messages import Held, QueueState
from felix.quota import QuotaLimits
from felix.runtime.real import REAL
from region.folder import RegionFolder
from region.gather import Done
from region.node import Node
from region.queue.state import READY_MAX
from region.views.journal import Journal

pytestmark = pytest.mark.timeout(120)
JOBS = "acme/ops/jobs"


async def take(consumer: felix.QueueConsumer, count: int) -> list[Job]:
    found: list[Job] = []
    async with asyncio.timeout(120):
        while len(found) < count:
            found.append(await anext(consumer))
    return found


async def letters(queue: felix.Queue, count: int) -> None:
    """Wait until so many dead letters have landed."""
    async with asyncio.timeout(120):
        while (await queue.describe()).dead_lettered != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def state_of(queue: felix.Queue) -> tuple[int, int, int, int]:
    """Ready, leased, delayed, dead."""
    found: QueueState = await queue.describe()
    return found.ready, found.leased, found.delayed, found.dead


async def test_jobs_are_leased_and_gone_once_acknowledged(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"%d" % n for n in range(10)])
    assert await state_of(jobs) == (10, 0, 0, 0)
    leased = await jobs.lease(4)
    assert [job.payload for job in leased] == [b"0", b"1", b"2", b"3"]
    assert all(job.attempts == 1 for job in leased)
    assert await state_of(jobs) == (6, 4, 0, 0)
    await asyncio.gather(*(job.ack() for job in leased))
    assert await state_of(jobs) == (6, 0, 0, 0)
    assert [job.payload for job in await jobs.lease(100)] == [b"4", b"5", b"6", b"7", b"8", b"9"]
    assert await jobs.lease(100) == []


async def test_a_queue_that_nobody_has_leased_from_says_that_it_has_no_figures(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.create_queue(JOBS)
    await operator.create_stream("acme/ops/crew")

    def shown(name: str) -> dict[str, dict[str, float]]:
        return {
            stream: {each: value for each, value in values.items() if each.startswith("queue_")}
            for stream, _, values in node.gauges.shards()
            if stream == name
        }

    await operator.queue(JOBS).put(b"a")
    assert shown(JOBS) == {JOBS: {"queue_open": 0}}
    assert shown("acme/ops/crew") == {"acme/ops/crew": {}}
    await operator.queue(JOBS).lease(1)
    assert shown(JOBS)[JOBS]["queue_open"] == 1 and shown(JOBS)[JOBS]["queue_leased"] == 1


async def test_a_stream_that_is_named_for_dead_letters_is_not_said_to_lack_workers(
    node: Node, operator: felix.RegionClient
) -> None:
    morgue = "acme/ops/morgue"
    await operator.create_queue(morgue)
    await operator.create_queue(JOBS, attempts=1, dead_letter=morgue)
    jobs = operator.queue(JOBS)

    def shown(name: str, figure: str) -> float | None:
        (found,) = (values for stream, _, values in node.gauges.shards() if stream == name)
        return found.get(figure)

    assert shown(morgue, "queue_open") == 0
    await jobs.put(b"a")
    (job,) = await jobs.lease(1)
    await job.nack()
    await until(lambda: shown(JOBS, "queue_dead_lettered") == 1)
    assert shown(morgue, "queue_open") is None, "a dead letter waits for a person"
    await operator.queue(morgue).lease(1)
    assert shown(morgue, "queue_open") == 1


async def test_a_consumer_gets_what_comes_with_key_and_headers(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS, shards=3)
    jobs = operator.queue(JOBS)
    async with jobs.consume(prefetch=8) as consumer:
        for n in range(50):
            await jobs.put(b"%d" % n, key=b"k%d" % n, headers={"x": b"y"})
        seen = []
        while len(seen) < 50:
            (job,) = await take(consumer, 1)
            assert job.headers == {"x": b"y"} and job.key == b"k" + job.payload
            seen.append(int(job.payload))
            job.ack()
        assert sorted(seen) == list(range(50))
    assert await state_of(jobs) == (0, 0, 0, 0)


async def test_a_lease_that_waits_gets_what_comes_later(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    waiting = asyncio.ensure_future(jobs.lease(5, wait=20))
    await until(lambda: operator.queue(JOBS)._calls is not None)
    await jobs.put(b"late")
    assert [job.payload for job in await waiting] == [b"late"]


async def test_a_job_of_a_worker_that_hangs_is_seen_and_taken_back(operator: felix.RegionClient) -> None:
    """Its lease is extended for ever: whoever looks sees who has it and since when, and ends the lease by the handle."""
    await operator.create_queue(JOBS, visibility=0.3, retry=0)
    jobs = operator.queue(JOBS)
    await jobs.put(b"a")
    async with jobs.consume(prefetch=1, worker="scanner-3") as hangs, asyncio.timeout(60):
        job = await anext(hangs)
        await asyncio.sleep(1)  # three visibilities
        (found,) = await jobs.peek()
        assert (found.phase, found.worker, found.identity) == (
            "leased",
            "scanner-3",
            str(operator.session.identity),
        )
        assert 1_000 <= found.due_ms - found.leased_ms <= 60_000
        assert [each.name for each in (await jobs.describe()).workers] == ["scanner-3"]
        async with jobs.consume(prefetch=1) as other:
            held = [Held(found.job.shard, found.job.offset, 1, found.job.token)]
            assert await jobs.settle("nack", held, reason="it hangs") == []
            again = await anext(other)
            assert (again.payload, again.attempts) == (b"a", 2)
            await until(lambda: job.lost)
            await asyncio.sleep(0.5)  # some more heartbeats
            assert hangs.lost == 1
            (named,) = [each.name for each in (await jobs.describe()).workers if each.leased]
            assert named == REAL.process()
            await again.ack()
        with pytest.raises(RequestError) as refused:
            await job.ack()
        assert refused.value.code is Code.LEASE_LOST
        assert hangs.lost == 1


async def test_a_job_that_takes_too_long_is_not_extended_for_ever(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS, visibility=0.3, retry=0)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"a", b"b"])
    async with jobs.consume(prefetch=2, extend_for=0.6) as hangs, asyncio.timeout(60):
        job = await anext(hangs)
        async with jobs.consume(prefetch=1, extend_for=60) as other:
            again = await anext(other)
            # What waits here unseen is extended as before: it is not what hangs.
            assert (again.payload, again.attempts) == (b"a", 2)
            await again.ack()
        with pytest.raises(RequestError, match="lost"):
            await job.ack()
        await (await anext(hangs)).ack()
    with pytest.raises(RequestError, match="more than 0"):
        jobs.consume(extend_for=0)
    with pytest.raises(RequestError, match="256 characters"):
        jobs.consume(worker="w" * 256)


async def test_a_lease_that_ran_out_goes_to_another_and_is_refused_to_the_first(
    operator: felix.RegionClient,
) -> None:
    await operator.create_queue(JOBS, visibility=0.2)
    jobs = operator.queue(JOBS)
    await jobs.put(b"a")
    (first,) = await jobs.lease()
    (second,) = await jobs.lease(wait=20)
    assert (first.attempts, second.attempts) == (1, 2)
    with pytest.raises(RequestError) as refused:
        await first.ack()
    assert refused.value.code is Code.LEASE_LOST
    await second.ack()
    await second.ack()  # said again, by the same lease
    with pytest.raises(RequestError):
        await first.ack()
    assert await state_of(jobs) == (0, 0, 0, 0)


async def test_a_job_given_back_comes_again_after_its_delay_and_dies_with_its_reason(
    operator: felix.RegionClient,
) -> None:
    await operator.create_queue(JOBS, attempts=3, retry=0.01)
    jobs = operator.queue(JOBS)
    await jobs.put(b"a", key=b"k", headers={"x": b"1"})
    async with jobs.consume() as consumer:
        for attempt in (1, 2, 3):
            (job,) = await take(consumer, 1)
            assert job.attempts == attempt
            await job.nack(reason="no paper")
    dead = operator.queue(JOBS + ".dead")
    await letters(jobs, 1)
    assert await state_of(jobs) == (0, 0, 0, 1)
    (letter,) = await dead.lease(wait=20)
    assert (letter.payload, letter.key) == (b"a", b"k")
    assert letter.headers["felix.dead.reason"] == b"no paper" and letter.headers["x"] == b"1"
    assert letter.headers["felix.dead.attempts"] == b"3"


async def test_leaving_a_job_acknowledges_it_or_gives_it_back_with_the_reason(
    operator: felix.RegionClient,
) -> None:
    await operator.create_queue(JOBS, attempts=1)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"good", b"bad"])
    async with jobs.consume() as consumer:
        for job in await take(consumer, 2):
            try:
                async with job:
                    if job.payload == b"bad":
                        raise ValueError("it is bad")
            except ValueError:
                continue
    await letters(jobs, 1)
    (letter,) = await operator.queue(JOBS + ".dead").lease()
    assert letter.headers["felix.dead.reason"] == b"ValueError: it is bad"
    assert (await jobs.describe()).acked == 1


async def test_dead_letters_come_back_in_order_with_their_attempts_anew(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS, attempts=1)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"%d" % n for n in range(100)])
    for job in await jobs.lease(100):
        job.nack(reason="not today")
    await jobs.flush()
    assert await jobs.redrive(30) == 30
    assert await jobs.redrive() == 70
    assert await jobs.redrive() == 0
    back = await jobs.lease(100)
    assert [int(job.payload) for job in back] == list(range(100))
    assert {job.attempts for job in back} == {1} and back[0].headers == {}


async def test_delayed_records_wait_and_priorities_go_first(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.put(b"far", deliver_at=datetime.now(UTC) + timedelta(hours=1))
    await jobs.put(b"low", priority=0)
    await jobs.put(b"plain")
    await jobs.put(b"high", priority=9)
    await jobs.put(b"later", delay=1)  # last: each put waits for the disk
    assert [job.payload for job in await jobs.lease(10)] == [b"high", b"plain", b"low"]
    assert (await state_of(jobs))[2] == 2
    assert [job.payload for job in await jobs.lease(10, wait=20)] == [b"later"]


async def test_one_record_of_a_key_is_out_at_a_time_and_order_outlasts_retries(
    operator: felix.RegionClient,
) -> None:
    await operator.create_queue(JOBS, ordered_by_key=True, attempts=0, retry=0.01)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"%d" % n for n in range(60)], [b"k%d" % (n % 3) for n in range(60)])
    done: list[int] = []
    out: dict[bytes, int] = {}

    async def work(number: int) -> None:
        async with jobs.consume(prefetch=4) as consumer:
            async for job in consumer:
                assert job.key is not None
                out[job.key] = out.get(job.key, 0) + 1
                assert out[job.key] == 1, "another worker has one of this key"
                await asyncio.sleep(0.001)
                out[job.key] -= 1
                if job.attempts == 1 and int(job.payload) % 4 == 0:
                    job.nack()
                    continue
                done.append(int(job.payload))
                await job.ack()

    workers = [asyncio.ensure_future(work(number)) for number in range(3)]
    await until(lambda: len(done) == 60)
    for worker in workers:
        worker.cancel()
    for key in range(3):
        mine = [n for n in done if n % 3 == key]
        assert mine == sorted(mine)


async def test_workers_share_what_is_ready(operator: felix.RegionClient, folder: RegionFolder) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    async with jobs.consume(prefetch=100) as one, jobs.consume(prefetch=100) as other:
        await jobs.put_many([b"x"] * 100)
        await until(lambda: one.buffered + other.buffered == 100)
        assert min(one.buffered, other.buffered) >= 25
        found = await jobs.describe()
        assert sorted(worker.leased for worker in found.workers) == sorted([one.buffered, other.buffered])
    # What nobody looked at is ready again at once, and did not count.
    again = await jobs.lease(100, wait=5)
    assert len(again) == 100 and {job.attempts for job in again} == {1}


async def test_extended_leases_last_and_unextended_ones_do_not(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS, visibility=0.3)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"kept", b"left"])
    async with jobs.consume(prefetch=1) as consumer:
        (kept,) = await take(consumer, 1)
        (left,) = await jobs.lease(wait=5)
        (again,) = await jobs.lease(wait=20)
        assert again.payload == left.payload == b"left"
        await kept.ack()
        await again.extend(30)
        await asyncio.sleep(0.5)
        await again.ack()


async def test_leases_acknowledgements_and_attempts_outlast_a_restart(
    folder: RegionFolder, tmp_path: Path
) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data) as node, client(node.folder) as region:
        await region.create_queue(JOBS, retry=0.01)
        jobs = region.queue(JOBS)
        await jobs.put_many([b"%d" % n for n in range(20)])
        leased = await jobs.lease(10)
        await asyncio.gather(*(job.ack() for job in leased[:5]))
        await leased[5].nack(delay=0)
        kept = [Held(job.shard, job.offset, 1, job.token) for job in leased[6:8]]
    async with running(folder, data=data) as node, client(node.folder) as region:
        jobs = region.queue(JOBS)
        async with asyncio.timeout(120):
            while await state_of(jobs) != (11, 4, 0, 0):  # noqa: ASYNC110 - until the log is read ahead
                await asyncio.sleep(0.005)
        assert await jobs.settle("ack", kept) == []
        assert await jobs.settle("ack", kept) == []
        assert await jobs.settle("ack", [Held(0, 5, 1, 1)]) == [(0, 5)]
        rest = await jobs.lease(100)
        by_payload = {job.payload: job.attempts for job in rest}
        assert by_payload == {b"5": 2} | {b"%d" % n: 1 for n in range(10, 20)}


async def test_a_consumer_goes_on_over_a_restart_with_the_jobs_it_holds(
    folder: RegionFolder, tmp_path: Path
) -> None:
    data, port = str(tmp_path / "data"), claim_port()
    async with running(folder, data=data, listen=Address("127.0.0.1", port)) as node:
        region = client(node.folder)
        await region.open()
        await region.create_queue(JOBS)
        jobs = region.queue(JOBS)
        await jobs.put_many([b"%d" % n for n in range(40)])
        consumer = jobs.consume(prefetch=10)
        await consumer.open()
        held = await take(consumer, 5)
    async with running(folder, data=data, listen=Address("127.0.0.1", port)):
        for job in held:
            await job.ack()
        rest: list[Job] = []
        while len(rest) < 35:
            rest += await take(consumer, 1)
            rest[-1].ack()
        await consumer.close()
        assert sorted(int(job.payload) for job in (*held, *rest)) == list(range(40))
        assert {job.attempts for job in rest} == {1} and not consumer.lost
        assert await state_of(jobs) == (0, 0, 0, 0)
        await region.close()


async def test_what_the_journal_refuses_has_not_happened(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"a", b"b"])
    (held,) = await jobs.lease()
    stream = node.broker.streams.get(felix.StreamName.parse(JOBS))
    assert stream is not None
    shard = (await node.queues.queue(stream)).shards[0]
    companion = shard.actor.journal._log
    assert companion is not None
    companion._core.hold = UnavailableError("The disk is full.", code=Code.DISK_FULL)
    with pytest.raises(UnavailableError):
        await jobs.lease()
    acknowledging = held.ack()  # asked again until it is taken
    await asyncio.sleep(0.05)
    assert not acknowledging.done()
    companion._core.hold = None
    await acknowledging
    (other,) = await jobs.lease(wait=20)
    assert (other.payload, other.attempts) == (b"b", 1)
    await other.ack()
    assert await state_of(jobs) == (0, 0, 0, 0)


async def test_a_committed_job_that_the_journal_refuses_is_nobody_elses_until_it_is_taken(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.put(b"a")
    await jobs.lease(1, visibility=0.1)
    name = felix.StreamName.parse(JOBS)
    stream = node.broker.streams.get(name)
    assert stream is not None
    shard = (await node.queues.queue(stream)).shards[0]
    held = [Held(0, 0, 1, 1)]
    assert shard.reserve([(0, 1, 1)]) == []

    def refuse(entry: bytes, done: Done) -> None:
        done(UnavailableError("The disk is full.", code=Code.DISK_FULL))

    with monkeypatch.context() as patched:
        patched.setattr(shard.actor.journal, "append", refuse)
        with pytest.raises(UnavailableError):
            await node.queues.apply_acks(name, stream.incarnation, held, {})
    await until(lambda: not shard.actor.is_reloading and shard.actor.is_serving, 30)
    assert await jobs.lease(wait=1) == []
    await node.queues.apply_acks(name, stream.incarnation, held, {})
    assert await state_of(jobs) == (0, 0, 0, 0) and not shard._reserved


async def test_a_worker_whose_leases_the_journal_refused_gets_jobs_once_it_takes_them(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    name = felix.StreamName.parse(JOBS)
    stream = node.broker.streams.get(name)
    assert stream is not None
    shard = (await node.queues.queue(stream)).shards[0]
    refused = asyncio.Event()

    def refuse(entry: bytes, done: Done) -> None:
        def end() -> None:
            done(UnavailableError("The disk is full.", code=Code.DISK_FULL))
            refused.set()

        # As a disk does: by then more was shared out.
        asyncio.get_running_loop().call_later(0.05, end)

    async with jobs.consume(prefetch=1) as consumer:
        await jobs.put(b"first")
        await (await take(consumer, 1))[0].ack()
        with monkeypatch.context() as patched:
            patched.setattr(shard.actor.journal, "append", refuse)
            # Two: with all of its room taken, the worker leaves the line while more is ready.
            await jobs.put_many([b"a", b"b"])
        await refused.wait()
        for payload in (b"a", b"b"):
            async with asyncio.timeout(30):
                (job,) = await take(consumer, 1)
            assert job.payload == payload
            await job.ack()
    assert await state_of(jobs) == (0, 0, 0, 0)


@pytest.mark.parametrize("opened", [False, True])
async def test_what_is_ready_while_the_journal_takes_nothing_is_given_out_once_it_does(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    """`opened`: before that, as by an earlier worker."""
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    if opened:
        await jobs.describe()
    with monkeypatch.context() as patched:
        # As while the broker may not write: nobody says when it may again.
        held = UnavailableError("The broker may not write.")
        patched.setattr(Journal, "refusal", lambda self: self.lost or held)
        async with jobs.consume(prefetch=1) as consumer:
            working = asyncio.ensure_future(take(consumer, 1))
            await operator.stream(JOBS).publish(b"a")
            await asyncio.sleep(0.05)
            assert not working.done()
            patched.undo()
            async with asyncio.timeout(30):
                (job,) = await working
            assert job.payload == b"a"
            await job.ack()


async def test_workers_hold_no_more_than_their_quota(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"x"] * 20)
    await operator.put_quota("tenant", "acme", QuotaLimits(leases=5))
    async with jobs.consume(prefetch=50) as consumer:
        first = await take(consumer, 5)
        assert (await state_of(jobs))[1] == 5
        assert await jobs.lease(3) == []
        for job in first:
            job.ack()
        for job in await take(consumer, 5):
            job.ack()
        await consumer.flush()
        assert (await jobs.describe()).acked == 10


async def test_a_purge_ends_everything_also_what_is_out(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"x"] * 30)
    await jobs.put(b"later", delay=100)
    (out,) = await jobs.lease()
    assert await jobs.purge() == 31
    with pytest.raises(RequestError) as refused:
        await out.ack()
    assert refused.value.code is Code.LEASE_LOST
    assert await state_of(jobs) == (0, 0, 0, 0)
    await jobs.put(b"new")
    assert [job.payload for job in await jobs.lease(5, wait=5)] == [b"new"]


async def test_peeking_shows_what_each_record_is(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.put(b"out")
    await jobs.put(b"later", delay=100)
    await jobs.put(b"free", key=b"k")
    await jobs.lease()
    seen = await jobs.peek()
    assert [(each.job.payload, each.phase) for each in seen] == [
        (b"out", "leased"), (b"later", "delayed"), (b"free", "ready")
    ]  # fmt: skip
    assert seen[2].job.key == b"k"


async def test_records_of_plain_publishers_and_of_another_queue(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    async with operator.stream(JOBS).publisher(compress=True) as publisher:
        for n in range(100):
            await publisher.send(b"%d" % n * 50)
    assert len(await operator.queue(JOBS).lease(1000)) == 100
    await operator.create_stream("acme/ops/plain")
    with pytest.raises(RequestError) as refused:
        await operator.queue("acme/ops/plain").lease()
    assert refused.value.code is Code.UNSUPPORTED


async def test_a_batch_of_many_records_is_read_ahead_in_parts(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    async with operator.stream(JOBS).publisher(batch_records=30_000, batch_bytes=1 << 20) as publisher:
        await publisher.publish_batch([felix.NewRecord(b"%d" % n) for n in range(20_000)])
    stream = node.broker.streams.get(felix.StreamName.parse(JOBS))
    assert stream is not None
    seen: set[int] = set()
    async with jobs.consume(prefetch=2_000) as consumer:
        async for job in consumer:
            seen.add(int(job.payload))
            job.ack()
            assert (await node.queues.queue(stream)).shards[0].state.ready <= READY_MAX
            if len(seen) == 20_000:
                break
    assert await state_of(jobs) == (0, 0, 0, 0) and (await jobs.describe()).redelivered == 0


async def test_a_record_too_large_for_anybody_is_a_dead_letter(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    async with operator.stream(JOBS).publisher(compress=True, batch_bytes=1 << 20) as publisher:
        await publisher.publish_batch([felix.NewRecord(bytes(3 << 20)), felix.NewRecord(b"small")])
    jobs = operator.queue(JOBS)
    assert [job.payload for job in await jobs.lease(5, wait=5)] == [b"small"]
    await letters(jobs, 1)


async def test_the_log_is_trimmed_below_what_is_done(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    payload = bytes(200_000)
    shard = node.broker.streams.get(felix.StreamName.parse(JOBS)).shard(0)  # type: ignore[union-attr]
    async with jobs.consume(prefetch=100) as consumer:
        for _ in range(6):
            await jobs.put_many([payload] * 16)
            for job in await take(consumer, 16):
                job.ack()
        await consumer.flush()
        await until(lambda: shard.log_start_offset > 0)
    assert await state_of(jobs) == (0, 0, 0, 0)


async def test_an_ephemeral_queue_works_in_memory(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS, durability=felix.Durability("ephemeral"), attempts=1)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"a", b"b"])
    first, second = await jobs.lease(2)
    await first.ack()
    await second.nack()
    await letters(jobs, 1)
    assert [job.payload for job in await operator.queue(JOBS + ".dead").lease(wait=20)] == [b"b"]


@pytest.fixture
async def worker(node: Node) -> AsyncIterator[felix.RegionClient]:
    async with client(node.folder, identity="worker") as made:
        yield made


async def test_rights_are_asked_for_each_verb_and_live(
    operator: felix.RegionClient, worker: felix.RegionClient
) -> None:
    await operator.create_queue(JOBS)
    await operator.queue(JOBS).put_many([b"a", b"b", b"c"])
    mine = worker.queue(JOBS)
    with pytest.raises(RequestError) as hidden:
        await mine.lease()
    assert hidden.value.code is Code.NOT_FOUND_OR_FORBIDDEN
    identity = worker.session.identity
    await operator.put_rights(identity, [f"subscribe {JOBS}"])
    async with mine.consume(prefetch=1) as consumer:
        (job,) = await take(consumer, 1)
        await job.ack()
        for refused in (mine.purge(), mine.redrive(), mine.put(b"x")):
            with pytest.raises(RequestError) as forbidden:
                await refused
            assert forbidden.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        assert [shown.identity for shown in (await mine.describe()).workers] == [identity]
        await operator.put_rights(identity, [f"publish {JOBS}"])
        brought = await mine.describe()
        assert brought.ready + brought.leased == 2 and not brought.workers
        await operator.put_rights(identity, [])
        with pytest.raises(RequestError) as ended:
            while True:
                await anext(consumer)
        assert ended.value.code is Code.NOT_FOUND_OR_FORBIDDEN
    with pytest.raises(RequestError):
        await mine.lease()


async def test_dead_letters_go_nowhere_that_their_maker_may_not_write(
    operator: felix.RegionClient, worker: felix.RegionClient
) -> None:
    await operator.put_rights(worker.session.identity, ["admin acme/ops/*", "publish acme/ops/*"])
    with pytest.raises(RequestError) as refused:
        await worker.create_queue(JOBS, dead_letter="umbrella/ops/orders")
    assert refused.value.code is Code.NOT_FOUND_OR_FORBIDDEN
    with pytest.raises(RequestError):
        await worker.create_queue(JOBS, dead_letter=JOBS)
    with pytest.raises(RequestError):
        await worker.create_queue("acme/ops/" + "x" * 60)
    await worker.create_queue(JOBS, dead_letter="acme/ops/letters")
    await worker.delete_stream(JOBS)


async def test_redriving_from_dead_letters_that_are_deleted_meanwhile_is_answered(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.create_queue(JOBS, attempts=1)
    jobs = operator.queue(JOBS)
    await jobs.put(b"a")
    (job,) = await jobs.lease()
    job.nack()
    await letters(jobs, 1)
    dead = node.queues._queues[StreamName.parse(JOBS + ".dead")].shards[0]
    dead.dead.start = lambda: None  # type: ignore[method-assign]
    redriven = asyncio.ensure_future(jobs.redrive())
    await until(lambda: dead._coming_back)
    await operator.delete_stream(JOBS + ".dead")
    async with asyncio.timeout(120):
        with pytest.raises(UnavailableError) as closing:
            await redriven
    assert closing.value.code is Code.SHUTTING_DOWN
    assert await jobs.redrive() == 0


async def test_nobody_can_pass_a_batch_off_as_a_dead_letter_that_has_arrived(
    node: Node, operator: felix.RegionClient
) -> None:
    """Who may publish where dead letters go could else take the producer id and the sequence that the next one has."""
    await operator.create_queue(JOBS, attempts=1)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"a", b"b"])
    first, second = await jobs.lease(2)
    first.nack()
    await letters(jobs, 1)
    held = node.broker.streams.get(StreamName.parse(JOBS + ".dead"))
    assert held is not None
    (entry,) = await held.shard(0).read(0, 1)
    header = decode_header(entry.data, FRAME_HEADER_BYTES)
    forged = encode_batch(
        [NewRecord(b"forged")], producer_id=header.producer_id, base_sequence=header.base_sequence + 1
    )
    async with raw_peer(node.folder, node.address) as peer:
        stream = peer.open_stream()
        peer.send(encode_request(OpenPublisher(JOBS + ".dead"), 1), stream)
        await until(lambda: peer.answers(1))
        peer.send(encode_frame(FrameType.BATCH, forged.encode(), 2), stream)
        await until(lambda: peer.errors(2) or peer.of(FrameType.APPENDED))
        assert [error.code for error in peer.errors(2)] == [Code.BATCH_MALFORMED]
    second.nack()
    await letters(jobs, 2)
    assert [letter.payload for letter in await operator.queue(JOBS + ".dead").lease(10)] == [b"a", b"b"]


async def test_a_record_costs_no_look_at_every_worker_that_waits(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    waiting = [asyncio.ensure_future(jobs.lease(1, wait=60)) for _ in range(100)]
    await jobs.put(b"first")
    queue = node.queues._queues[StreamName.parse(JOBS)]
    await until(lambda: len(queue._line) == 99)
    asked: list[int] = []
    for taker in queue._line.values():
        taker.room = lambda room=taker.room: (asked.append(1), room())[1]  # type: ignore[method-assign,misc]
    for _ in range(50):
        await jobs.put(b"x")
    await until(lambda: len(queue._line) == 49)
    assert len(asked) <= 150, "not each of those who wait, with each record"
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
