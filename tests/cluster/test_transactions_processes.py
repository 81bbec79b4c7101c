"""Transactions over streams of three brokers that are processes: the coordinator and the leaders of streams are killed, and stand still for longer
than their leases, under load. Each transaction is whole or not there, as its writer was told.

FELIX_FAULT_ROUNDS (`make faults ROUNDS=n`): how often each of these happens, with 100 transactions in each. Otherwise the transactions that real
brokers carry on stand in test_transactions_over_brokers.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from cluster.members import Members, serving
from cluster.transaction_history import Record
from cluster.transaction_load import TransactionLoad
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import client, until

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
    load = TransactionLoad(STREAMS, SHARDS, int(os.environ.get("FELIX_FAULT_SEED", "1")))
    chance = random.Random(1)
    async with serving(tmp_path, etcd, lease_s=LEASE_S) as members, client(members.folder) as region:
        for name in STREAMS:
            await region.create_stream(name, replicas=3, shards=SHARDS)
        async with region.transaction() as tx:
            await tx.publish(STREAMS[0], Record("first", 0, 0).encode())
        load.history.sizes["first", 0] = 1
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(client(members.folder)) for _ in range(WRITERS)]
            async with load.going_on(clients):
                for _ in range(ROUNDS):
                    for fault in (killed, frozen):
                        for target in (SYSTEM, chance.choice(STREAMS)):
                            await until(lambda: members.is_well(SYSTEM, *STREAMS))
                            await load.goes_on(TRANSACTIONS_EACH // 4)
                            await fault(members, target)
                            for name in ("b1", "b2", "b3"):
                                if name not in members.running:
                                    await members.start(name)
                await until(lambda: members.is_well(SYSTEM, *STREAMS))
                await load.goes_on(TRANSACTIONS_EACH)
        print(f"{load}; {4 * ROUNDS} faults")
        await load.check(region)
