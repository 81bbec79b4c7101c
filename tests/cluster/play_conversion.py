"""A region of one broker becomes one of three under its clients, who go on throughout, with kills beside each step.

    python -m cluster.play_conversion FOLDER [--rounds N] [--seed S]

Each round is a region of its own. Writers, readers, transactions, a queue, a durable subscription, a cache and an operator who signs documents begin with the
one broker. It is stopped or killed; `felix region to-cluster` is killed before some of its writes and run again; the brokers are three, streams get three copies,
and so does the audit log; each broker is killed once. In the end the histories are judged (cluster.history and its siblings).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import psutil
from cluster.audit_load import AuditLoad
from cluster.history import History
from cluster.load import Load, stored_in
from cluster.processes import kill
from cluster.test_to_cluster import convert_killed
from cluster.transaction_load import TransactionLoad
from cluster.view_load import ViewLoad
from e2e.command_mesh import command, environment, felix_command
from region_peer import client, until
from region_process import fixed_region

import felix
from region.folder import RegionFolder

STREAM: Final = "acme/ops/orders"
TOGETHER: Final = ("acme/ops/together0", "acme/ops/together1")
VIEWS: Final = ("acme/ops/jobs", "acme/ops/read", "acme/ops/prices")
ALL: Final = (STREAM, *TOGETHER, *VIEWS)
BROKERS: Final = ("b1", "b2", "b3")
WRITES: Final = 160
"""Of a conversion, about."""
GOES_ON: Final = 40
PAUSE_S: Final = 0.01
WAIT_S: Final = 120.0


class Conversion:
    """One region."""

    def __init__(self, home: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.home = home
        self.folder: RegionFolder = fixed_region(home)
        self.history = History()
        self.transactions = TransactionLoad(TOGETHER, 1, seed, pause_s=0.05)
        self.views = ViewLoad(*VIEWS, replicas=0)
        self.audit = AuditLoad(self.folder)
        self.load: Load
        self.region: felix.RegionClient
        self.parent: psutil.Process

    async def felix(self, *words: str) -> str:
        """What a command says, which ends well."""
        return (await asyncio.to_thread(felix_command, self.home, *words)).out

    async def goes_on(self, what: str) -> None:
        try:
            await self.load.goes_on(GOES_ON)
            await self.transactions.goes_on(3)
            await self.views.goes_on(10)
            await self.audit.goes_on(1)
        except (TimeoutError, AssertionError) as error:
            raise AssertionError(f"after {what}: {error!r}") from error
        print(f"  {what}", flush=True)

    async def killed_at_times(self, *words: str, most_s: float) -> None:
        """A command that is killed after a moment, or had ended by then."""
        process = await asyncio.to_thread(
            subprocess.Popen,
            command(*words),
            env=environment(self.home),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await asyncio.sleep(most_s * self.random.random())
        process.kill()
        await asyncio.to_thread(process.wait)

    async def up(self) -> None:
        """All of the region's processes serve."""
        await self.felix("region", "up", "us-east", "--detach")
        self.parent = psutil.Process(json.loads((self.folder.run / "broker.pid").read_text())["pid"])

    async def down(self) -> None:
        """All of them have ended."""
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [self.parent, *self.parent.children(recursive=True)]
        await asyncio.to_thread(felix_command, self.home, "region", "down", "us-east", code=None)
        for process in (await asyncio.to_thread(psutil.wait_procs, family, WAIT_S))[1]:
            process.kill()

    async def in_sync(self) -> None:
        async def all_are() -> bool:
            try:
                states = [state for each in ALL for state in (await self.region.describe_stream(each)).state]
            except felix.FelixError:
                return False
            return all(not each.stopped and sorted(each.in_sync) == list(BROKERS) for each in states)

        await until(all_are, WAIT_S)

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.down)
            await self.up()
            self.region, writer, one, other = [
                await stack.enter_async_context(client(self.folder)) for _ in range(4)
            ]
            for stream in (STREAM, *TOGETHER):
                await self.region.create_stream(stream)
            self.load = Load(self.region, STREAM, self.history, pause_s=PAUSE_S)
            async with (
                self.views.going_on(one, other),
                self.load.going_on(writers=2, readers=1),
                self.transactions.going_on([writer]),
                self.audit.going_on(self.region),
            ):
                await self.goes_on("one broker")
                if self.random.random() < 0.5:
                    self.parent.kill()
                await self.down()
                await asyncio.sleep(self.random.random())
                for _ in range(self.random.randrange(4)):
                    await asyncio.to_thread(convert_killed, self.home, self.random.randrange(1, WRITES))
                await asyncio.to_thread(convert_killed, self.home, 0)
                await self.up()
                await self.goes_on("of several, with one")
                if self.random.random() < 0.5:
                    await kill(self.folder, "b1")
                    await self.goes_on("b1 was killed")
                await self.killed_at_times("region", "scale", "3", "--region", "us-east", most_s=4)
                await self.felix("region", "scale", "3", "--region", "us-east")
                for stream in ALL:
                    await self.region.alter_stream(stream, replicas=3)
                if self.random.random() < 0.5:
                    await asyncio.sleep(self.random.random())
                    await kill(self.folder, self.random.choice(BROKERS))
                await self.in_sync()
                await self.goes_on("three copies")
                for name in self.random.sample(BROKERS, 2):
                    await kill(self.folder, name)
                    await self.goes_on(f"{name} was killed")
                await self.down()
                await self.killed_at_times("region", "copy-audit-log", "us-east", most_s=2)
                await self.felix("region", "copy-audit-log", "us-east")
                await self.up()
                for name in self.random.sample(BROKERS, 3):
                    await asyncio.sleep(2 * self.random.random())
                    await kill(self.folder, name)
                    await self.goes_on(f"the audit log is copied, {name} was killed")
                await self.in_sync()
            self.history.check(await stored_in(self.region, STREAM))
            await self.transactions.check(self.region)
            await self.views.check(self.region)
            await self.audit.check([self.folder.root / "data" / name / "audit" for name in BROKERS])
            print(
                f"  {len(self.history.acknowledged)} acknowledged, {self.transactions}; {self.views}; {self.audit}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="A region of one broker becomes one of three under load.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for number in range(asked.rounds):
        seed = asked.seed + number
        print(f"{number + 1}/{asked.rounds}, seed {seed}", flush=True)
        asyncio.run(Conversion(asked.folder / str(seed), seed).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
