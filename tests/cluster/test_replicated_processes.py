"""A stream with three copies, on three brokers that are processes: its leader is killed, or stands still for longer than its lease, or all
brokers are killed at once. What was acknowledged is never lost and never stands twice. Beside it one with a single copy, which leaves a broker that is
killed meanwhile.

FELIX_FAULT_ROUNDS (`make faults ROUNDS=n`): how often each of these happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from cluster.history import History
from cluster.load import Load, stored_in
from cluster.processes import process_of, running, several
from etcd_process import etcd_binary
from region_peer import client, until

import felix
from felix.errors import FelixError
from region.folder import RegionFolder

STREAM = "acme/ops/orders"
SINGLE = "acme/ops/single"
NAMES = ("b1", "b2", "b3")
LEASE_S = 2
ROUNDS = int(os.environ.get("FELIX_FAULT_ROUNDS", "1"))
GOES_ON = 200
"""Acknowledgements after a fault, before the next one."""
SINGLE_GOES_ON = 50


async def state_of(operator: felix.RegionClient) -> felix.messages.ShardState | None:
    try:
        return (await operator.describe_stream(STREAM)).state[0]
    except FelixError:
        return None


async def leader_of(operator: felix.RegionClient, folder: RegionFolder) -> str:
    """The broker that leads, by the region's status: who leads one stream more than none."""
    found = ""
    while not found:
        with contextlib.suppress(FelixError):
            found = next((each.broker for each in (await operator.describe()).brokers if each.leads), "")
        await asyncio.sleep(0.05)
    return found


async def all_in_sync(operator: felix.RegionClient) -> None:
    async with asyncio.timeout(120):
        while True:
            state = await state_of(operator)
            if state is not None and not state.stopped and sorted(state.in_sync) == sorted(NAMES):
                return
            await asyncio.sleep(0.1)


async def kill_leader(operator: felix.RegionClient, folder: RegionFolder) -> None:
    name = await leader_of(operator, folder)
    pid = process_of(folder, name)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: process_of(folder, name) not in (0, pid), 60)


async def stop_leader(operator: felix.RegionClient, folder: RegionFolder) -> None:
    """It stands still for longer than its lease, and then goes on as if it led."""
    pid = process_of(folder, await leader_of(operator, folder))
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(LEASE_S + 1)
    finally:
        os.kill(pid, signal.SIGCONT)


async def kill_all(operator: felix.RegionClient, folder: RegionFolder) -> None:
    before = {name: process_of(folder, name) for name in NAMES}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    await until(lambda: all(process_of(folder, name) not in (0, pid) for name, pid in before.items()), 60)


async def holders(operator: felix.RegionClient) -> list[str]:
    """The brokers that have a copy of the stream of one, as whoever leads it says."""
    while True:
        with contextlib.suppress(FelixError):
            state = (await operator.describe_stream(SINGLE)).state[0]
            if not state.stopped and state.in_sync:
                return state.replicas
        await asyncio.sleep(0.05)


async def only_elsewhere(operator: felix.RegionClient, before: str) -> None:
    async with asyncio.timeout(120):
        while True:
            now = await holders(operator)
            if len(now) == 1 and before not in now:
                return
            await asyncio.sleep(0.1)


async def the_only_copy_moves(operator: felix.RegionClient, folder: RegionFolder) -> None:
    """It leaves a broker that is drained, while that one, or the one that gets it, is killed."""
    history = History()
    await operator.create_stream(SINGLE, replicas=1)
    load = Load(operator, SINGLE, history)
    async with load.going_on(readers=1):
        await load.goes_on(SINGLE_GOES_ON)
        for kills_its_holder in (True, False)[: min(ROUNDS, 2)] * ROUNDS:
            (before,) = await holders(operator)
            await operator.drain_broker(before)
            killed = before if kills_its_holder else next(name for name in NAMES if name != before)
            pid = process_of(folder, killed)
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid, killed=killed: process_of(folder, killed) not in (0, pid), 60)
            await only_elsewhere(operator, before)
            await load.goes_on(SINGLE_GOES_ON)
            await operator.drain_broker(before, drain=False)
            await all_in_sync(operator)
    history.check(await stored_in(operator, SINGLE))


@pytest.mark.etcd
@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="signals of Linux")
async def test_what_is_acknowledged_outlives_every_leader_once_and_in_order(tmp_path: Path) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    history = History()
    pauses: list[float] = []
    folder = several(tmp_path, len(NAMES), lease=f"{LEASE_S}s")
    async with running(folder), client(folder) as operator:
        await operator.create_stream(STREAM, replicas=3)
        await all_in_sync(operator)
        load = Load(operator, STREAM, history)
        async with load.going_on(readers=2):
            await load.goes_on(GOES_ON)
            for fault in (kill_leader, stop_leader, kill_all) * ROUNDS:
                began = time.monotonic()
                await fault(operator, folder)
                await load.goes_on(GOES_ON)
                pauses.append(time.monotonic() - began)
                await all_in_sync(operator)
        history.check(await stored_in(operator, STREAM))
        await the_only_copy_moves(operator, folder)
        print(f"{len(history.acknowledged)} acknowledged; from each fault to {GOES_ON} more: {pauses}")
