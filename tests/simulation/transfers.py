"""One broker whose transactions take a job from a queue and publish into two streams: jobs that were put stand in both, once, and are done."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import ClassVar

from simulation.clients import (
    AGAIN_S,
    JOBS,
    PAUSES_S,
    QUEUE,
    STREAMS,
    VISIBILITY_S,
    WORKERS,
    RegionUser,
)
from simulation.region_world import RegionWorld
from simulation.script import Step
from simulation.world import Client, InvariantError, World

import felix
from felix.client import RegionClient
from felix.errors import FelixError, RequestError
from felix.queue import Job
from felix.settings import Views
from felix.transaction import Transaction

LEFT, RIGHT = "acme/payments/left", "acme/payments/right"
LOOKS = 3
"""A transaction that could not be committed in so many tries is left to itself: whether it is there the streams tell."""


class Transfers(RegionUser):
    """Puts jobs, and has two workers do each in one transaction. What the queue knows as done stands in both streams, in one order, and nothing stands
    there twice."""

    name: ClassVar[str] = "transfers"
    stream: ClassVar[str] = QUEUE

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.put: set[int] = set()
        self.committed: set[int] = set()

    @classmethod
    def draw(cls, random: Random) -> list[Step]:
        return [
            Step(cls.name, "put", random.choice(PAUSES_S), number=number) for number in range(1, JOBS + 1)
        ]

    async def use(self, region: RegionClient) -> None:
        queue = region.queue(QUEUE)
        working = [asyncio.create_task(self._work(region, queue)) for _ in range(WORKERS)]
        try:
            for step in self.steps:
                await asyncio.sleep(step.after_s)
                try:
                    await queue.put(b"%d" % step.number)
                except FelixError as error:
                    self.world.note(f"job {step.number} not put: {error.code.name}")
                else:
                    self.put.add(step.number)
            while await self._left(queue):
                for task in working:
                    if task.done():
                        task.result()
                await asyncio.sleep(AGAIN_S)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

    async def _left(self, queue: felix.Queue) -> bool:
        try:
            state = await queue.describe()
        except FelixError:
            return True
        return bool(state.ready or state.leased or state.delayed or state.waiting)

    async def _work(self, region: RegionClient, queue: felix.Queue) -> None:
        while True:
            try:
                async with queue.consume(visibility=VISIBILITY_S, prefetch=3) as consumer:
                    async for job in consumer:
                        await self._transfer(region, job)
            except FelixError as error:
                self.world.note(f"a worker is refused: {error.code.name}")
                await asyncio.sleep(AGAIN_S)

    async def _transfer(self, region: RegionClient, job: Job) -> None:
        number = int(bytes(job.payload))
        transaction = region.transaction()
        try:
            await transaction.begin()
            for stream in (LEFT, RIGHT):
                await transaction.publish(stream, b"%d" % number)
            await transaction.acknowledge(job)
            await self._commit(transaction)
        except FelixError as error:
            self.world.note(f"{number} by lease {job.token} is not committed: {error.code.name}")
            job.release()
            await asyncio.sleep(AGAIN_S)
            return
        self.world.note(f"{number} by lease {job.token} is committed")
        self.world.count("transfers")
        if number in self.committed:
            raise InvariantError(f"job {number} was committed twice")
        self.committed.add(number)

    async def _commit(self, transaction: Transaction) -> None:
        for _ in range(LOOKS):
            try:
                await transaction.commit()
                return
            except RequestError:
                raise
            except FelixError as error:
                self.world.note(f"a commit is not answered: {error.code.name}")
                why = error
                await asyncio.sleep(AGAIN_S)
        raise why

    async def look(self, region: RegionClient) -> None:
        left, right = [await self._stored(region.stream(each)) for each in (LEFT, RIGHT)]
        if left != right:
            raise InvariantError(f"one stream has {left}, the other {right}")
        if twice := [number for number, times in Counter(left).items() if times > 1]:
            raise InvariantError(f"twice: {twice}")
        if missing := {*self.put, *self.committed} - set(left):
            raise InvariantError(f"put, or committed, and not there: {sorted(missing)}")

    async def _stored(self, stream: felix.Stream) -> list[int]:
        found: list[int] = []
        end = (await stream.describe()).state[0].high_watermark
        if end:
            async with stream.subscribe("earliest") as subscription:
                async for record in subscription:
                    found.append(int(bytes(record.payload)))
                    if record.offset >= end - 1:
                        break
        return found


class TransferWorld(RegionWorld):
    """See the module."""

    kinds = (Transfers,)
    bad_disks = 1.0
    streams: ClassVar[dict[str, Views]] = {QUEUE: STREAMS[QUEUE], LEFT: Views(), RIGHT: Views()}

    @classmethod
    def party(cls, random: Random) -> list[type[Client]]:
        return [Transfers]
