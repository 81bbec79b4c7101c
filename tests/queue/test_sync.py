"""The synchronous face of queues, from a thread of its own."""

from __future__ import annotations

import asyncio

import pytest

import felix
import felix.sync
from felix.errors import Code, RequestError
from region.node import Node

JOBS = "acme/ops/jobs"


def work(profile: felix.Profile) -> None:
    with felix.sync.connect(profile=profile) as region:
        region.create_queue(JOBS, attempts=2, retry=0, visibility=20)
        jobs = region.queue(JOBS)
        jobs.put(b"first", key=b"k", priority=9, headers={"x": b"y"})
        jobs.put_many([b"a", b"b", b"c"])
        (job,) = jobs.lease()
        assert (job.payload, job.key, job.headers["x"], job.attempts) == (b"first", b"k", b"y", 1)
        job.extend(30)
        job.ack()
        assert [each.job.payload for each in jobs.peek()] == [b"a", b"b", b"c"]
        with jobs.consume(prefetch=2) as consumer:
            seen: dict[bytes, int] = {}
            for job in consumer:
                seen[job.payload] = seen.get(job.payload, 0) + 1
                try:
                    with job:
                        if job.payload == b"b":
                            raise ValueError("no")
                except ValueError:
                    pass
                if seen == {b"a": 1, b"b": 2, b"c": 1}:
                    break
            with pytest.raises(TimeoutError):
                consumer.next_job(timeout_s=0.01)
        assert jobs.redrive() == 1
        (again,) = jobs.lease(wait=5)
        again.nack(reason="once more")
        with pytest.raises(RequestError) as refused:
            again.ack()
        assert refused.value.code is Code.LEASE_LOST
        jobs.put(b"in a transaction")
        (job,) = jobs.lease(wait=5)
        done = region.create_stream("acme/ops/done").stream
        with region.transaction() as transaction:
            transaction.publish(done, b"it was")
            transaction.acknowledge(job)
        assert region.describe_stream(done).state[0].high_watermark == 1 and job.settled
        altered = jobs.alter(visibility=7, attempts=3).views.queue
        assert altered is not None and (altered.visibility_ms, altered.retries.attempts_max) == (7_000, 3)
        assert jobs.purge() == 1 and jobs.describe().ready == 0
        jobs.delete()


async def test_a_thread_works_on_a_queue(node: Node) -> None:
    profile = felix.load_profile(node.folder.root.name, home=node.folder.root.parent)
    await asyncio.to_thread(work, profile)
