"""Transactions under kills: writers that live through them and one that is killed itself put a record into each of three streams, or
into none.

Settled: every transaction that was committed stands in all three streams, once; one that was aborted stands in none; one of which nobody
was told, in all or in none.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

from soak.harness import Books, Worker

import felix

STREAMS = ("acme/soak/debits", "acme/soak/credits", "acme/soak/journal")
WRITERS = 3
ABORTED_EACH = 7
PACE_S = 0.005
TIMEOUT_S = 60.0


async def transfer(region: felix.RegionClient, name: bytes, *, wanted: bool) -> str:
    """One transaction over all streams; `wanted` False: aborted by its writer. How it ended: done, aborted or unknown."""
    transaction = region.transaction(timeout_s=TIMEOUT_S)
    try:
        await transaction.begin()
        for number, stream in enumerate(STREAMS):
            await transaction.publish(stream, name, key=b"%d%s" % (number, name))
        if not wanted:
            await transaction.abort()
            return "aborted"
    except felix.FelixError:
        # Nothing was committed, and nobody will: the broker drops what it does not hear of.
        return "aborted"
    try:
        await transaction.commit()
    except felix.UnavailableError:
        return "unknown"
    except felix.RequestError as error:
        # A broker that was killed has forgotten what was staged.
        return "unknown" if error.code is felix.Code.TRANSACTION_UNKNOWN else "aborted"
    return "done"


class TransactionPart:
    """See the module."""

    name = "transactions"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._ended: dict[bytes, str] = {}
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._worker: Worker | None = None

    async def start(self, region: felix.RegionClient) -> list[Worker]:
        for stream in STREAMS:
            await region.create_stream(stream, shards=2)
        self._tasks = [asyncio.ensure_future(self._write(region, who)) for who in range(WRITERS)]
        self._worker = Worker(self._home, "transaction_worker", "transfers")
        return [self._worker]

    def progress(self) -> int:
        for task in self._tasks:
            if task.done():
                task.result()
        return sum(how == "done" for how in self._ended.values())

    async def _write(self, region: felix.RegionClient, who: int) -> None:
        chance = Random(who)
        at = 0
        while not self._over.is_set():
            at += 1
            name = b"%d-%d" % (who, at)
            self._ended[name] = await transfer(region, name, wanted=chance.randrange(ABORTED_EACH) > 0)
            # A refusal may come without waiting for anything: nobody else's turn must hang on it.
            await asyncio.sleep(PACE_S)

    async def stop(self) -> None:
        self._over.set()
        async with asyncio.timeout(120):
            await asyncio.gather(*self._tasks)
        assert self._worker is not None
        await asyncio.to_thread(self._worker.end)

    async def settle(self, region: felix.RegionClient) -> Books:
        assert self._worker is not None
        ended = dict(self._ended)
        for line in self._worker.lines():
            how, name = line.split(" ")
            # What was begun and not ended before a kill may have been committed.
            ended[name.encode()] = "unknown" if how == "begun" else how
        held = [await _counted(region, stream) for stream in STREAMS]
        problems: list[str] = []
        for name, how in ended.items():
            times = [each.get(name, 0) for each in held]
            allowed = {"done": [[1] * 3], "aborted": [[0] * 3], "unknown": [[0] * 3, [1] * 3]}[how]
            if times not in allowed:
                problems.append(f"{name.decode()} is {how}, and stands {times} times in the streams")
        strangers = set().union(*held) - set(ended)
        if strangers:
            problems.append(f"{len(strangers)} records of nobody")
        counts = Counter(ended.values())
        return Books({**counts, "records": sum(each.total() for each in held)}, problems)


async def _counted(region: felix.RegionClient, stream: str) -> Counter[bytes]:
    total = sum(shard.high_watermark for shard in (await region.describe_stream(stream)).state)
    found: Counter[bytes] = Counter()
    async with region.stream(stream).subscribe("earliest", on_gap="raise") as reader:
        while found.total() < total:
            async for batch in reader.batches():
                found.update(map(bytes, batch.payloads()))
                if found.total() >= total:
                    break
    return found
