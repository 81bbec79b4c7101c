"""Rebalancings are begun, ended and begun anew by two operators, beside drains and brokers that are killed, over real processes.

    python -m cluster.play_stops FOLDER [--rounds N] [--seed S]

Once `felix region rebalance --stop` has returned, nothing begins to move but what leaves drained brokers, until somebody asks again; a drain that goes on ends; the next word evens all
out; and one writer and reader go on through everything.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final

from cluster.history import RULES, History
from cluster.load import Load, stored_in
from cluster.members import Members
from cluster.played import play_as_asked
from e2e.command_mesh import command, environment
from etcd_process import EtcdProcess, running_etcd
from region_peer import client

from felix.errors import FelixError
from region.cluster.records import ShardRecord

STREAMS: Final = 12
WAIT_S: Final = 180.0
STREAM_BYTES: Final = 1 << 20
COPY_RATE: Final = "1MiB"


class Play:
    def __init__(self, members: Members, etcd: EtcdProcess, seed: int) -> None:
        self.members, self.etcd, self.random = members, etcd, Random(seed)
        self.counts = Counter[str]()
        self.drained = ""

    async def run(self, *words: str, timeout_s: float = WAIT_S) -> str:
        process = await asyncio.create_subprocess_exec(
            *command("region", *words), env=environment(self.members.folder.root.parent), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )  # fmt: skip
        async with asyncio.timeout(timeout_s):
            return (await process.communicate())[0].decode()

    async def moving(self) -> dict[str, tuple[str, ...]]:
        """By stream, where it goes."""
        return {
            stream: record.target
            for stream, some in (await self.members.records()).items()
            for record in some
            if record.target
        }

    async def replicas(self) -> dict[str, ShardRecord]:
        return {stream: some[0] for stream, some in (await self.members.records()).items()}

    async def round(self, number: int) -> None:
        members, random = self.members, self.random
        what = random.choice(("stop", "stop", "stop twice", "stop beside begin", "stop beside kill"))
        self.counts[what] += 1
        begun = asyncio.ensure_future(self.run("rebalance", "us-east", "--wait", "60s"))
        if not self.drained and random.random() < 0.4:
            self.drained = random.choice(list(members.places))
            self.counts["drain"] += 1
            draining = asyncio.ensure_future(self.run("drain", self.drained, "--wait", "0s"))
        else:
            draining = None
        await asyncio.sleep(random.uniform(0.3, 2.5))
        killed = ""
        if what == "stop beside kill":
            killed = random.choice(list(members.running))
            members.kill(killed)
        stops = [self.run("rebalance", "us-east", "--stop") for _ in range(2 if what == "stop twice" else 1)]
        other = (
            asyncio.ensure_future(self.run("rebalance", "us-east", "--wait", "60s"))
            if what == "stop beside begin"
            else None
        )
        said = await asyncio.gather(*stops)
        if draining is not None:
            await draining
        for each in said:
            assert "rebalancing is" in each.lower() or "no rebalancing" in each.lower() or killed, each
        if what not in ("stop beside begin",) and not killed:
            # What begins to move from here on is what leaves a drained broker.
            before = await self.moving()
            until = time.monotonic() + random.uniform(1, 5)
            while time.monotonic() < until:
                now = await self.moving()
                for stream, target in now.items():
                    if before.get(stream) == target:
                        continue
                    record = (await self.replicas())[stream]
                    assert self.drained and (
                        self.drained in record.replicas or self.drained not in record.target
                    ), f"{stream} began to move to {target} after the word was taken back: {record}"
                before |= now
                await asyncio.sleep(0.05)
            self.counts["looked"] += 1
        if killed:
            await asyncio.sleep(random.uniform(0, 3))
            await members.start(killed)
        if other is not None:
            await other
            await self.run("rebalance", "us-east", "--stop")
        out = await begun
        self.counts["begun: " + ("ended" if "was ended before" in out else "done" if "moved" in out or "nothing moves" in out else "else")] += 1  # fmt: skip
        if self.drained and random.random() < 0.5:
            await self.run("undrain", self.drained)
            self.drained = ""
        print(
            f"  {number}: {what} {killed} drained {self.drained or '-'}: {' | '.join(each.strip().splitlines()[0][:110] for each in said if each.strip())}",
            flush=True,
        )

    async def even(self) -> None:
        if self.drained:
            await self.run("undrain", self.drained)
        async with asyncio.timeout(WAIT_S):
            while True:
                with suppress(FelixError, TimeoutError):
                    out = await self.run("rebalance", "us-east", "--wait", "60s")
                    if "nothing moves" in out:
                        break
                await asyncio.sleep(0.5)
        assert not await self.moving()
        counts = Counter(broker for record in (await self.replicas()).values() for broker in record.replicas)
        assert max(counts.values()) - min(counts.values()) <= 1 + len(counts), counts
        print(f"  copies: {dict(counts)}", flush=True)


@asynccontextmanager
async def slowly_copying(folder: Path, etcd: EtcdProcess) -> AsyncIterator[Members]:
    """Four brokers, whose copies take a second or two each."""
    members = Members(folder, etcd, 4, lease_s=2)
    for each in members._folders.values():
        each.config.write_text(each.config.read_text() + f"storage: {{copy_rate: {COPY_RATE}}}\n")
    try:
        await members.start(*members._folders)
        yield members
    finally:
        for name in list(members.running):
            members.kill(name)


async def play(folder: Path, rounds: int, seed: int) -> None:
    (folder / "etcd").mkdir(parents=True)
    with running_etcd(folder / "etcd") as etcd:
        async with slowly_copying(folder, etcd) as members:
            made = Play(members, etcd, seed)
            async with client(members.folder) as region:
                for number in range(STREAMS):
                    stream = f"acme/ops/s{number}"
                    await region.create_stream(stream, replicas=2)
                    await region.stream(stream).publish_many([bytes(STREAM_BYTES // 20)] * 20)
                await region.create_stream("acme/ops/orders", replicas=3)
                history = History()
                load = Load(region, "acme/ops/orders", history, pause_s=0.02)
                async with load.going_on(writers=1, readers=1):
                    # Uneven: two brokers are emptied.
                    for name in ("b3", "b4"):
                        await made.run("drain", name, "--wait", "60s")
                        await made.run("undrain", name)
                    for number in range(rounds):
                        await made.round(number)
                    await made.even()
                    await load.goes_on(20)
                stored = await stored_in(region, "acme/ops/orders")
                broken = [
                    f"{name}: {what}"
                    for name, rule in RULES.items()
                    for what in list(rule(history, stored))[:3]
                ]
                assert not [each for each in broken if not each.startswith("silent")], broken
            print(f"seed {seed} holds: {len(stored)} records, {dict(made.counts)}", flush=True)


if __name__ == "__main__":
    sys.exit(play_as_asked(play, __doc__, rounds=6))
