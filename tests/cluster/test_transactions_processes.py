"""Transactions over streams of three brokers that are processes: the coordinator and the leaders of streams are killed, and stand still for longer
than their leases, under load. Each transaction is whole or not there, as its writer was told.

FELIX_FAULT_ROUNDS (`make faults ROUNDS=n`): how often each of these happens, with 100 transactions in each. Otherwise the transactions that real
brokers carry on stand in test_transactions_over_brokers.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import pytest
from cluster.members import Members, serving
from cluster.transaction_history import Outcome, Place, Record, TransactionHistory
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import client, until

import felix
from felix.errors import Code, FelixError

__all__ = ["etcd_of_each_test"]  # the fixture

ROUNDS = int(os.environ.get("FELIX_FAULT_ROUNDS", "0"))
pytestmark = [
    pytest.mark.etcd,
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="signals of Linux"),
    pytest.mark.skipif(not ROUNDS, reason="make faults runs this"),
]
SYSTEM = "felix/system/transactions"
STREAMS = ("acme/ops/a", "acme/ops/b", "acme/ops/c")
SHARDS = 2
LEASE_S = 2
WRITERS = 4
TRANSACTIONS_EACH = 100
"""In each round, before the next one begins."""


class Load:
    """Writers, each on a client of its own, until `stop`."""

    def __init__(self, seed: int) -> None:
        self.history = TransactionHistory()
        self._random = random.Random(seed)
        self._stopped = False

    @property
    def committed(self) -> int:
        return sum(each is Outcome.COMMITTED for each in self.history.outcomes.values())

    def stop(self) -> None:
        self._stopped = True

    async def write(self, region: felix.RegionClient, writer: str) -> None:
        number = 0
        while not self._stopped:
            await self._one(region, (writer, number))
            number += 1

    async def _one(self, region: felix.RegionClient, key: tuple[str, int]) -> None:
        history = self.history
        places = [
            (self._random.choice(STREAMS), self._random.randrange(SHARDS))
            for _ in range(self._random.randint(1, 5))
        ]
        history.sizes[key] = len(places)
        history.outcomes[key] = Outcome.UNKNOWN
        tx = region.transaction(timeout_s=30)
        handles: list[felix.TransactionRecord] = []
        try:
            await tx.begin()
            for index, (stream, shard) in enumerate(places):
                handles.append(await tx.publish(stream, Record(*key, index).encode(), shard=shard))
        except FelixError:
            history.outcomes[key] = Outcome.ABORTED  # it was never asked to commit
            return
        while not self._stopped:
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


async def killed(members: Members, stream: str) -> None:
    """Who leads it is gone while others go on."""
    leader = await members.leader(stream)
    members.kill(leader)
    await until(lambda: members.is_led_by_another(stream, leader))


async def frozen(members: Members, stream: str) -> None:
    """Who leads it stands still until another one leads, and then goes on as if it led."""
    leader = await members.leader(stream)
    members.freeze(leader)
    await until(lambda: members.is_led_by_another(stream, leader))
    members.thaw(leader)


async def test_each_transaction_is_whole_or_not_there_whoever_is_lost(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    load = Load(int(os.environ.get("FELIX_FAULT_SEED", "1")))
    chance = random.Random(1)
    async with serving(tmp_path, etcd, lease_s=LEASE_S) as members, client(members.folder) as region:
        for name in STREAMS:
            await region.create_stream(name, replicas=3, shards=SHARDS)
        async with region.transaction() as tx:
            await tx.publish(STREAMS[0], Record("first", 0, 0).encode())
        load.history.sizes["first", 0] = 1
        clients = [client(members.folder) for _ in range(WRITERS)]
        for each in clients:
            await each.__aenter__()
        writers = [
            asyncio.ensure_future(load.write(each, f"w{number}")) for number, each in enumerate(clients)
        ]
        try:
            for _ in range(ROUNDS):
                for fault in (killed, frozen):
                    for target in (SYSTEM, chance.choice(STREAMS)):
                        await until(lambda: members.is_well(SYSTEM, *STREAMS))
                        enough = load.committed + TRANSACTIONS_EACH // 4
                        await until(lambda enough=enough: load.committed >= enough)  # type: ignore[misc]
                        await fault(members, target)
                        for name in ("b1", "b2", "b3"):
                            if name not in members.running:
                                await members.start(name)
            await until(lambda: members.is_well(SYSTEM, *STREAMS))
            enough = load.committed + TRANSACTIONS_EACH
            await until(lambda: load.committed >= enough)
            load.stop()
            await asyncio.gather(*writers)
        finally:
            for writer in writers:
                writer.cancel()
            await asyncio.wait(writers)
            for each in clients:
                await each.close()
        # All that was decided is applied once a later one is.
        async with region.transaction() as tx:
            for name in STREAMS:
                for shard in range(SHARDS):
                    await tx.publish(
                        name, Record("last", 0, STREAMS.index(name) * SHARDS + shard).encode(), shard=shard
                    )
        load.history.sizes["last", 0] = len(STREAMS) * SHARDS
        stored: dict[Place, Record] = {}
        for name in STREAMS:
            for each in (await region.describe_stream(name)).state:
                async with region.stream(name).subscribe(start="earliest", shards=[each.shard]) as records:
                    async for record in records:
                        place = Place(name, each.shard, record.offset)
                        stored[place] = Record.decode(bytes(record.payload))
                        if record.offset == each.high_watermark - 1:
                            break
    outcomes = list(load.history.outcomes.values())
    print(
        f"{len(outcomes)} transactions: {load.committed} committed, {outcomes.count(Outcome.ABORTED)} aborted, "
        f"{outcomes.count(Outcome.UNKNOWN)} unknown; {4 * ROUNDS} faults"
    )
    load.history.check(stored)
