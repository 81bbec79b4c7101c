"""A queue's settings are altered while workers go on: no job is lost, and a restart keeps what was altered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from region_home import running
from region_peer import client, until

import felix
from felix.errors import Code, RequestError
from felix.queue import Job
from felix.settings import QueueChange, QueueSettings, Retries
from region.folder import RegionFolder
from region.node import Node
from region.queue.service import Queue

pytestmark = pytest.mark.timeout(120)
JOBS = "acme/ops/jobs"


def hosted(node: Node) -> Queue:
    return node.queues._queues[felix.StreamName.parse(JOBS)]


async def one(consumer: felix.QueueConsumer) -> Job:
    async with asyncio.timeout(120):
        return await anext(consumer)


async def leased(queue: felix.Queue) -> Job:
    (job,) = await queue.lease(1, wait=20)
    return job


async def test_a_consumer_that_stands_goes_by_the_new_visibility(
    operator: felix.RegionClient, node: Node
) -> None:
    await operator.create_queue(JOBS, visibility=60)
    jobs = operator.queue(JOBS)
    await jobs.put(b"held")
    async with jobs.consume() as consumer:
        held = await one(consumer)
        state = await jobs.alter(visibility=0.4)
        assert state.views.queue == QueueSettings(visibility_ms=400)
        await jobs.put(b"new")
        new = await one(consumer)
        record = hosted(node).shards[0].state
        due_ms = {offset: record.tracked[offset].due_ms for offset in (held.offset, new.offset)}
        # Both are extended, again and again, by the visibility that the queue has now.
        await until(lambda: all(record.tracked[offset].due_ms > due_ms[new.offset] for offset in due_ms))
        assert record.tracked[held.offset].due_ms < due_ms[held.offset]
        await until(lambda: record.tracked[new.offset].due_ms > due_ms[new.offset] + 800)
        assert (await jobs.describe()).redelivered == 0
        await asyncio.gather(held.ack(), new.ack())
    await jobs.put(b"by hand")
    first = await leased(jobs)
    assert (await leased(jobs)).offset == first.offset, "nobody extends it"


async def test_attempts_and_dead_letters_are_those_that_are_set_when_a_job_fails(
    operator: felix.RegionClient,
) -> None:
    await operator.create_queue(JOBS, attempts=5, retry=60)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"a", b"b"])
    for _ in range(2):
        for job in await jobs.lease(2):
            await job.nack(delay=0)
    await jobs.alter(attempts=3, dead_letter="acme/ops/morgue")
    # The third attempt is the last one now; where it goes was altered, too.
    first, second = await jobs.lease(2, wait=20)
    assert first.attempts == 3
    await first.nack()
    async with asyncio.timeout(120):
        while (await jobs.describe()).dead_lettered != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert (await jobs.describe()).dead_letter == "acme/ops/morgue"
    assert [each.job.payload for each in await operator.queue("acme/ops/morgue").peek()] == [b"a"]
    # With more attempts and a shorter wait, the other goes on.
    await jobs.alter(attempts=4, retry=0.01, dead_letter="")
    await second.nack()
    assert (await leased(jobs)).attempts == 4
    assert (await jobs.describe()).dead_letter == f"{JOBS}.dead"
    assert await jobs.redrive() == 0, "the old dead letters are where they were"
    await jobs.alter(dead_letter="acme/ops/morgue")
    assert await jobs.redrive() == 1


async def test_nothing_is_lost_while_settings_change_all_the_time(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS, shards=2, visibility=30)
    jobs = operator.queue(JOBS)
    count, seen = 600, set[bytes]()

    async def alter() -> None:
        turn = 0
        while len(seen) < count:
            turn += 1
            await jobs.alter(visibility=5 + turn % 40, attempts=turn % 3 * 4, retry=0.01)

    async def work() -> None:
        async with jobs.consume(prefetch=32) as consumer:
            while len(seen) < count:
                try:
                    async with asyncio.timeout(1):
                        job = await anext(consumer)
                except TimeoutError:
                    continue
                assert job.payload not in seen
                if int(job.payload) % 7 or job.attempts > 1:
                    await job.ack()
                    seen.add(job.payload)
                else:
                    await job.nack()

    async with asyncio.timeout(120):
        putting = jobs.put_many([b"%d" % n for n in range(count)])
        await asyncio.gather(alter(), work(), work(), putting)
    state = await jobs.describe()
    assert (state.ready, state.leased, state.delayed, state.dead) == (0, 0, 0, 0)


async def test_a_restart_keeps_what_was_altered_and_the_jobs(folder: RegionFolder, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data), client(folder) as region:
        await region.create_queue(JOBS, visibility=60)
        jobs = region.queue(JOBS)
        await jobs.put_many([b"a", b"b"])
        (first,) = await jobs.lease(1)
        await jobs.alter(visibility=0.3, attempts=9, retry=2, retry_max=4)
        await first.nack(delay=0)
    async with running(folder, data=data), client(folder) as region:
        state = await region.describe_stream(JOBS)
        assert state.views.queue == QueueSettings(300, Retries(9, 2_000, 4_000))
        jobs = region.queue(JOBS)
        assert sorted([(await leased(jobs)).payload, (await leased(jobs)).payload]) == [b"a", b"b"]


async def test_what_cannot_be_altered_is_refused_with_the_reason(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    await operator.create_stream("acme/ops/plain")
    jobs = operator.queue(JOBS)
    before = (await operator.describe_stream(JOBS)).views
    for changes, code in (
        ({"ordered_by_key": True}, Code.CONFIG_INVALID),
        ({"visibility": 0.001}, Code.CONFIG_INVALID),
        ({"retry": 900}, Code.CONFIG_INVALID),  # longer than the longest wait
        ({"dead_letter": JOBS}, Code.CONFIG_INVALID),
        ({"dead_letter": "nowhere"}, Code.NAME_INVALID),
    ):
        with pytest.raises(RequestError) as refused:
            await jobs.alter(**changes)  # type: ignore[arg-type]
        assert refused.value.code is code, changes
    with pytest.raises(RequestError, match="several workers"):
        await jobs.alter(ordered_by_key=True)
    with pytest.raises(RequestError) as refused:
        await operator.alter_stream("acme/ops/plain", queue=QueueChange(visibility_ms=500))
    assert refused.value.code is Code.UNSUPPORTED
    assert (await operator.describe_stream(JOBS)).views == before
    assert (await jobs.alter(ordered_by_key=False)).views == before, "as it is, is no change"


async def test_it_takes_the_right_admin_and_a_dead_letter_stream_publish(
    operator: felix.RegionClient, node: Node
) -> None:
    await operator.create_queue(JOBS)
    async with client(node.folder, "worker") as other:
        worker = other.session.identity
        await operator.put_rights(worker, [f"publish {JOBS}", f"subscribe {JOBS}"])
        with pytest.raises(RequestError) as refused:
            await other.queue(JOBS).alter(attempts=2)
        assert refused.value.code in (Code.FORBIDDEN, Code.NOT_FOUND_OR_FORBIDDEN)
        await operator.put_rights(worker, [f"admin {JOBS}"])
        await other.queue(JOBS).alter(attempts=2)
        with pytest.raises(RequestError):
            await other.queue(JOBS).alter(dead_letter="acme/ops/morgue")
        await operator.queue(JOBS).alter(dead_letter="acme/ops/morgue")
        await other.queue(JOBS).alter(attempts=3)  # what stands there already takes no right anew
        state = await operator.describe_stream(JOBS)
        assert state.views.queue == QueueSettings(retries=Retries(3, dead_letter="acme/ops/morgue"))
