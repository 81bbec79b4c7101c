"""Orders become payments, payments become shipments, and the workers in between are killed (SIGKILL) at random.

python examples/demos/orders_pipeline.py [ORDERS [KILLS]]
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

from own_region import REGION, OwnRegion, Summary, say

import felix

ORDERS, PAYMENTS, SHIPMENTS = "acme/shop/orders", "acme/shop/payments", "acme/shop/shipments"
STAGES = {"payments": (ORDERS, PAYMENTS), "shipments": (PAYMENTS, SHIPMENTS)}
WORKERS = 2  # of each stage
SHARDS = 2
PREFETCH = 16
VISIBILITY_S = 1.0  # so much later what a killed worker held goes to another


async def work(home: Path, stage: str) -> None:
    """A worker: one result for each job. It may be killed between any two lines."""
    source, target = STAGES[stage]
    async with (
        felix.connect(profile=felix.load_profile(REGION, home=home)) as region,
        region.queue(source).consume(prefetch=PREFETCH) as jobs,
    ):
        async for job in jobs:
            order = json.loads(job.payload)
            # The result and the acknowledgement are one: both are there, or neither is, and then the job is redelivered.
            async with region.transaction() as transaction:
                await transaction.publish(target, json.dumps({**order, stage: "done"}).encode(), key=job.key)
                await transaction.acknowledge(job)


class Crew:
    """Worker processes, each started again when it was killed."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._workers = {(stage, n): self._start(stage) for stage in STAGES for n in range(WORKERS)}

    def _start(self, stage: str) -> "subprocess.Popen[bytes]":
        with (self._home / f"{stage}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, __file__, "--work", str(self._home), stage], stdout=log, stderr=log
            )

    def kill_one(self, chance: Random) -> str:
        """SIGKILL, and a new process in its place."""
        name = chance.choice(list(self._workers))
        self._end(self._workers[name])
        self._workers[name] = self._start(name[0])
        return name[0]

    def end(self) -> None:
        for worker in self._workers.values():
            self._end(worker)

    @staticmethod
    def _end(worker: "subprocess.Popen[bytes]") -> None:
        worker.kill()
        worker.wait()


async def records_of(region: felix.RegionClient, stream: str) -> list[dict[str, object]]:
    """Everything that was ever published there."""
    total = sum(shard.high_watermark for shard in (await region.describe_stream(stream)).state)
    found: list[dict[str, object]] = []
    async with region.stream(stream).subscribe("earliest", on_gap="raise") as subscription:
        async for batch in subscription.batches():
            found += [json.loads(bytes(payload)) for payload in batch.payloads()]
            if len(found) >= total:
                break
    return found


async def left(region: felix.RegionClient, queue: str) -> int:
    """Jobs that are not finished."""
    state = await region.queue(queue).describe()
    return state.ready + state.leased + state.delayed + state.waiting


async def run(own: OwnRegion, orders: int, kills: int) -> int:
    chance = Random(7)  # noqa: S311 - nothing secret
    summary = Summary(f"Orders, payments, shipments; workers killed {kills} times")
    async with own.connect() as region:
        for name in (ORDERS, PAYMENTS):
            await region.create_queue(name, visibility=VISIBILITY_S, attempts=0, retry=0.1, shards=SHARDS)
        await region.create_stream(SHIPMENTS, shards=SHARDS)
        placed = [
            {"order": n, "customer": f"c{n % 50}", "cents": chance.randrange(1, 10_000)}
            for n in range(orders)
        ]
        say(f"{orders:,} orders, {WORKERS} workers for each of {', '.join(STAGES)}")
        crew = Crew(own.home)
        try:
            queue = region.queue(ORDERS)
            await queue.put_many(
                [json.dumps(order).encode() for order in placed],
                [str(order["customer"]).encode() for order in placed],
            )
            shipped = [0]
            for number in range(kills):
                # Kills are spread over the work: so much is shipped before the next one.
                await reach(region, shipped, orders * number // (kills + 1))
                stage = await asyncio.to_thread(crew.kill_one, chance)
                say(f"SIGKILL {number + 1}: a worker of {stage}, with {shipped[0]:,} shipped")
            await reach(region, shipped, orders)
            async with asyncio.timeout(60):
                # What killed workers held comes back when its time is over, and is found to be done.
                while await left(region, ORDERS) + await left(region, PAYMENTS):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        finally:
            crew.end()
        paid, sent = await records_of(region, PAYMENTS), await records_of(region, SHIPMENTS)
        states = [await region.queue(name).describe() for name in (ORDERS, PAYMENTS)]

    cents = sum(int(order["cents"]) for order in placed)
    for what, found in (("payments", paid), ("shipments", sent)):
        summary.must(what, len(found), orders)
        summary.must(f"orders among the {what}", len({each["order"] for each in found}), orders)
        summary.must(f"cents in the {what}", sum(int(str(each["cents"])) for each in found), cents)
    for name, state in zip(("orders", "payments"), states, strict=True):
        summary.must(
            f"jobs left in the queue of {name}", state.ready + state.leased + state.delayed + state.waiting, 0
        )
        summary.must(f"dead letters of {name}", state.dead, 0)
        summary.figure(f"jobs of {name} that another worker did again", state.redelivered)
    return summary.end()


async def reach(region: felix.RegionClient, shipped: list[int], wanted: int) -> None:
    """Until so many shipments are recorded."""
    async with asyncio.timeout(240):
        while True:
            state = (await region.describe_stream(SHIPMENTS)).state
            shipped[0] = sum(shard.high_watermark for shard in state)
            if shipped[0] >= wanted:
                return
            await asyncio.sleep(0.05)


def main(orders: int = 1_000, kills: int = 10) -> int:
    with OwnRegion() as own:
        return asyncio.run(run(own, orders, kills))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        os.environ.pop("FELIX_HOME", None)
        asyncio.run(work(Path(sys.argv[2]), sys.argv[3]))
    else:
        sys.exit(main(*map(int, sys.argv[1:3])))
