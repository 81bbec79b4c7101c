"""A region of three brokers is backed up while it serves, one broker after the other as docs/clusters.md says, while leaders change; then all of it is put back.

    python -m cluster.play_backup FOLDER [--rounds N] [--seed S]

Run it in namespaces of its own, as cluster.play_faults. What was acknowledged before the backup began has to be there, once and in each writer's order; jobs and
records that were done with before have not to come again; all copies are in sync, and the region goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

from cluster.audit_load import AuditLoad
from cluster.history import RULES
from cluster.load import Load, stored_in
from cluster.play_faults import BROKERS, GOES_ON, LEASE_S, QUEUE, STREAM, TOGETHER, VIEWS, Play
from cluster.view_load import SUBSCRIPTION
from e2e.command_mesh import command, environment
from region_peer import client

from felix.errors import FelixError

JUDGED: Final = ("hole", "doubled", "invented", "reordered", "skipped")
"""Rules of histories that hold of a region that was put back, too."""


class Backup:
    """One region, backed up and put back."""

    def __init__(self, home: Path, seed: int) -> None:
        self.play = Play(home, seed)
        self.kept = home / "backup"
        self.kept.mkdir()

    async def run(self) -> None:
        play = self.play
        play.etcd.start()
        await play.etcd.serves()
        play.start()
        await play.serve()
        async with AsyncExitStack() as stack:
            play.region = await stack.enter_async_context(client(play.folder))
            one, other, writer = [await stack.enter_async_context(client(play.folder)) for _ in range(3)]
            for stream in (STREAM, *TOGETHER):
                await play.region.create_stream(
                    stream, replicas=3 if stream == STREAM else play.random.choice((1, 2, 3))
                )
            play.load = Load(play.region, STREAM, play.history, pause_s=0.01)
            going = AsyncExitStack()
            await going.enter_async_context(play.views.going_on(one, other))
            await going.enter_async_context(play.transactions.going_on([writer]))
            await going.enter_async_context(play.audit.going_on(play.region))
            await going.enter_async_context(play.load.going_on(writers=2, readers=1))
            await play.load.goes_on(GOES_ON)
            await play.views.goes_on(10)
            await play.transactions.goes_on(3)
            await play.audit.goes_on(2)
            await self.backed_up()
            await play.load.goes_on(GOES_ON)
            print(
                f"  backed up at {self.acknowledged} records, {len(self.done)} jobs, {len(self.read)} read, {self.documents} documents",
                flush=True,
            )
            # What is answered from now on is lost, and its writers with it.
            for load in (play.load, play.views, play.transactions, play.audit):
                for name in ("_work", "_tasks", "_begun", "_writers"):
                    tasks = getattr(load, name, None)
                    if not isinstance(tasks, (list, asyncio.Task)):
                        continue
                    for task in [tasks] if isinstance(tasks, asyncio.Task) else tasks:
                        task.cancel()
            with contextlib.suppress(BaseException):
                async with asyncio.timeout(5):
                    await going.aclose()
        await self.put_back()
        await self.judge()

    async def backed_up(self) -> None:
        """Nothing is moved meanwhile: a copy that moves may be in no folder."""
        play, random = self.play, self.play.random
        self.acknowledged = len(play.history.acknowledged)
        self.done, self.read, self.documents = (
            dict(play.views.done),
            set(play.views.read),
            len(play.audit.taken),
        )
        self.put = set(play.views._put)
        going = asyncio.ensure_future(self.leaders_change())
        steps: list[Callable[[], Awaitable[None]]] = [
            partial(self.copied, name) for name in random.sample(BROKERS, 3)
        ]
        # One that is newer than a folder fits no folder.
        steps.insert(0, self.snapshot)
        for step in steps:
            await step()
            await asyncio.sleep(random.random())
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)

    async def leaders_change(self) -> None:
        """Copies stay where they are; who leads does not."""
        play, random = self.play, self.play.random
        while True:
            await asyncio.sleep(3 * random.random())
            machine = play.brokers[random.choice(BROKERS)]
            machine.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep((LEASE_S + 1) * random.choice((0.2, 1)))
            finally:
                machine.signal(signal.SIGCONT)

    async def copied(self, name: str) -> None:
        machine = self.play.brokers[name]
        if self.play.random.random() < 0.3:
            machine.kill()
        else:
            await asyncio.to_thread(machine.stop)
        await asyncio.to_thread(shutil.copytree, machine.folder, self.kept / name, dirs_exist_ok=True)
        await self.play.start_again(name)
        async with asyncio.timeout(120):
            await self.play.load.goes_on(20)

    async def snapshot(self) -> None:
        endpoint = f"--endpoints={self.play.etcd.endpoints[0]}"
        await asyncio.to_thread(self.play.etcd.ctl, endpoint, "snapshot", "save", str(self.kept / "snapshot"))

    async def put_back(self) -> None:
        play = self.play
        for name, machine in play.brokers.items():
            await asyncio.to_thread(machine.stop)
            for path in machine.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            await asyncio.to_thread(shutil.copytree, self.kept / name, machine.folder, dirs_exist_ok=True)
        await asyncio.to_thread(play.etcd.put_back, self.kept / "snapshot")
        await play.etcd.serves()
        said = await asyncio.to_thread(
            subprocess.run,
            command("region", "reconcile", "us-east"),
            env=environment(play.home),
            capture_output=True,
            text=True,
        )
        assert said.returncode == 0, said.stdout + said.stderr
        await play.start_again()

    async def judge(self) -> None:
        play = self.play
        async with client(play.folder) as region:
            play.region = region
            problems = [""]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(90):
                    while problems:
                        await asyncio.sleep(0.5)
                        with contextlib.suppress(FelixError):
                            problems = (await region.describe()).alarms
            assert not problems, problems
            stored = await stored_in(region, STREAM)
            broken = [
                f"{name}: {what}" for name in JUDGED for what in list(RULES[name](play.history, stored))[:3]
            ]
            there = {(each.writer, each.number): each.offset for each in stored}
            broken += [
                f"lost: {told}"
                for told in play.history.acknowledged[: self.acknowledged]
                if there.get((told.writer, told.number)) != told.offset
            ][:3]
            left = {bytes(each.job.payload) for each in await region.queue(QUEUE).peek(1_000)}
            if again := left & self.done.keys():
                broken.append(f"{len(again)} jobs were done before and are there: {sorted(again)[:3]}")
            async with region.stream(VIEWS[1]).consumer(SUBSCRIPTION) as consumer:
                state = await region.stream(VIEWS[1]).describe_subscription(SUBSCRIPTION)
                for _ in range(sum(each.lag_records for each in state.shards)):
                    async with asyncio.timeout(60):
                        record = await anext(consumer)
                    if bytes(record.payload) in self.read:
                        broken.append(f"{bytes(record.payload)!r} was read for good and comes again")
            await region.stream(STREAM).publish(b"w9:0")
            async with region.transaction() as tx:
                for stream in TOGETHER:
                    await tx.publish(stream, b"on")
            audit = AuditLoad(play.folder)
            async with audit.going_on(region):
                await audit.goes_on(1)
            audit.taken = [*play.audit.taken[: self.documents], *audit.taken]
            await audit.check([machine.folder / "audit" for machine in play.brokers.values()])
            assert not broken, broken
            print(f"  {len(stored)} records stand, alarms {(await region.describe()).alarms}")


def main() -> int:
    parser = argparse.ArgumentParser(description="A region is backed up while it serves, and put back.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    backup = Backup(asked.folder, asked.seed)
    try:
        asyncio.run(backup.run())
    finally:
        for machine in backup.play.brokers.values():
            machine.go_on()
    print(f"seed {asked.seed} holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
