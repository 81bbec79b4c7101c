"""Writers of transactions over several streams that go on whatever happens, and note what they were told (cluster.transaction_history)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cluster.transaction_history import Outcome, Place, Record, TransactionHistory

import felix
from felix.errors import Code, FelixError

RECORDS_MAX = 5
"""Of one transaction."""
TIMEOUT_S = 30
WAIT_S = 120.0
"""Longest wait for something that must happen; only a failing run waits this long."""


class TransactionLoad:
    """`pause_s`: what a writer waits between two transactions."""

    def __init__(self, streams: Sequence[str], shards: int, seed: int, *, pause_s: float = 0.0) -> None:
        self.history = TransactionHistory()
        self._streams = streams
        self._shards = shards
        self._pause_s = pause_s
        self._random = random.Random(seed)
        self._is_over = False
        self._writers: list[asyncio.Task[None]] = []

    @property
    def committed(self) -> int:
        """Transactions whose writer was told so."""
        return sum(each is Outcome.COMMITTED for each in self.history.outcomes.values())

    def __str__(self) -> str:
        told = list(self.history.outcomes.values())
        return (
            f"{len(told)} transactions: {self.committed} committed, {told.count(Outcome.ABORTED)} aborted, "
            f"{told.count(Outcome.UNKNOWN)} unknown"
        )

    @asynccontextmanager
    async def going_on(self, clients: Sequence[felix.RegionClient]) -> AsyncIterator[None]:
        """Until the block ends: one writer on each client."""
        self._writers = [
            asyncio.ensure_future(self._write(each, f"w{number}")) for number, each in enumerate(clients)
        ]
        try:
            yield
            self._is_over = True
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*self._writers)
        finally:
            for writer in self._writers:
                writer.cancel()
            await asyncio.gather(*self._writers, return_exceptions=True)

    async def goes_on(self, transactions: int) -> None:
        """So many more are committed."""
        enough = self.committed + transactions
        async with asyncio.timeout(WAIT_S):
            while self.committed < enough:
                for writer in self._writers:
                    if writer.done():
                        writer.result()
                await asyncio.sleep(0.02)

    async def check(self, region: felix.RegionClient) -> None:
        """Hold what writers were told against what stands in the streams, once nobody writes."""
        # All that was decided is applied once a later one is.
        places = [(stream, shard) for stream in self._streams for shard in range(self._shards)]
        async with region.transaction() as tx:
            for index, (stream, shard) in enumerate(places):
                await tx.publish(stream, Record("last", 0, index).encode(), shard=shard)
        self.history.sizes["last", 0] = len(places)
        stored: dict[Place, Record] = {}
        for stream in self._streams:
            for each in (await region.describe_stream(stream)).state:
                async with region.stream(stream).subscribe(start="earliest", shards=[each.shard]) as records:
                    async for record in records:
                        place = Place(stream, each.shard, record.offset)
                        stored[place] = Record.decode(bytes(record.payload))
                        if record.offset == each.high_watermark - 1:
                            break
        self.history.check(stored)

    async def _write(self, region: felix.RegionClient, writer: str) -> None:
        number = 0
        while not self._is_over:
            await self._one(region, (writer, number))
            number += 1
            await asyncio.sleep(self._pause_s)

    async def _one(self, region: felix.RegionClient, key: tuple[str, int]) -> None:
        history = self.history
        places = [
            (self._random.choice(self._streams), self._random.randrange(self._shards))
            for _ in range(self._random.randint(1, RECORDS_MAX))
        ]
        history.sizes[key] = len(places)
        history.outcomes[key] = Outcome.UNKNOWN
        tx = region.transaction(timeout_s=TIMEOUT_S)
        handles: list[felix.TransactionRecord] = []
        try:
            await tx.begin()
            for index, (stream, shard) in enumerate(places):
                handles.append(await tx.publish(stream, Record(*key, index).encode(), shard=shard))
        except FelixError:
            history.outcomes[key] = Outcome.ABORTED  # it was never asked to commit
            return
        while not self._is_over:
            try:
                await tx.commit()
            except FelixError as error:
                if error.code is Code.TRANSACTION_ABORTED:
                    history.outcomes[key] = Outcome.ABORTED
                    return
                if error.code is Code.TRANSACTION_UNKNOWN or not isinstance(error, felix.UnavailableError):
                    return
                continue
            history.outcomes[key] = Outcome.COMMITTED
            for index, handle in enumerate(handles):
                if handle.offset >= 0:
                    place = Place(str(handle.stream), handle.shard, handle.offset)
                    history.told[Record(*key, index)] = place
            return
