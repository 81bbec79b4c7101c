"""Rounds of faults of a disk below a broker whose metadata and keys are changed without a pause, by a client that writes down what it was told.

    python -m disks.play_broker FOLDER [--all] [--rounds N] [--seeds N] [--seed S]

The region's whole folder is on the disk (volatile_disk); calls of the embedded metadata store and of the key file (`--all`: of any file) fail, or hang. Then the disk is well again, and the broker has to go on by itself; or
it is killed, and in half of those the power goes. After each start, and in the end: streams, their settings, rights and quotas are what was acknowledged, or what was asked for later and
not answered; every record that was acknowledged is read once, so every key that sealed one is there. Exit code 1 where something did not hold. It needs gcc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from disks.play_store import drawn
from ports import claim_port
from region_process import fixed_region
from volatile_disk import VolatileDisk

import felix
from felix import Retention
from felix.client import RegionClient
from felix.errors import FelixError
from felix.profile import load_profile
from felix.quota import QuotaLimits

ROOT: Final = Path(__file__).parents[2]
AGAIN_S: Final = 60.0
BASES: Final = tuple(f"acme/ops/base{number}" for number in range(3))
PATHS: Final = (
    "metadata.db",
    "metadata.db",
    "metadata.db-wal",
    "metadata.db-wal",
    "metadata.db-shm",
    "keys.log",
    "keys.log",
    "keys.log",
)
GONE: Final = "gone"


class Told:
    """What of one thing is known: the last state that was acknowledged, and those asked for since."""

    def __init__(self) -> None:
        self.states: dict[str, list[str]] = {}

    def ask(self, name: str, state: str) -> None:
        self.states.setdefault(name, [GONE]).append(state)

    def settle(self, name: str) -> None:
        self.states[name] = self.states[name][-1:]

    def check(self, what: str, found: dict[str, str]) -> None:
        for name, states in self.states.items():
            assert found.get(name, GONE) in states, f"{what} {name} is {found.get(name, GONE)}, not {states}"
            self.states[name] = [found.get(name, GONE)]
        more = found.keys() - self.states.keys()
        assert not more, f"nobody made {what} {more}"


class BrokerPlay:
    def __init__(self, home: Path, seed: int, paths: Sequence[str] = PATHS) -> None:
        self.home = home
        self.paths = paths
        self.port = claim_port()
        home.mkdir(parents=True)
        self.folder = fixed_region(home / "felix", "us-east")
        text = re.sub(
            r"^health: .*$", f"health: 127.0.0.1:{self.port}", self.folder.config.read_text(), flags=re.M
        )
        self.folder.config.write_text(text)
        self.disk = VolatileDisk(self.folder.root, home / "aside", seed)
        self.chance = self.disk.random
        self.load_chance = random.Random(seed)
        self.profile = load_profile("us-east", home=home / "felix")
        self.counts: Counter[str] = Counter()
        self.streams, self.rights, self.quotas = Told(), Told(), Told()
        self.published: dict[str, list[int]] = {name: [] for name in BASES}
        self.maybe: dict[str, set[int]] = {name: set() for name in BASES}
        self.number = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.faulty = False
        self.log = home / "log"
        self.last_done_s = 0.0

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "disks.quick_broker", "region", "up", "us-east"],
                env=os.environ
                | self.disk.environment()
                | {"PYTHONPATH": os.pathsep.join(sys.path), "FELIX_HOME": str(self.home / "felix")},
                stdout=log, stderr=log, cwd=ROOT,
            )  # fmt: skip
        self.counts["started"] += 1

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def ready(self) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5):
                return ""
        except urllib.error.HTTPError as error:
            return str(json.loads(error.read())["reason"])
        except OSError as error:
            return str(error)

    async def asked(self, told: Told, name: str, state: str, work: Callable[[], Awaitable[Any]]) -> None:
        told.ask(name, state)
        try:
            async with asyncio.timeout(20):
                await work()
        except (FelixError, TimeoutError) as error:
            self.counts["not done"] += 1
            self.counts[f"not done: {getattr(error, 'code', 'timeout')!s}"] += 1
            await asyncio.sleep(0.05)
        else:
            told.settle(name)
            self.counts["done"] += 1
            self.last_done_s = time.monotonic()

    async def change(self, client: RegionClient) -> None:
        chance = self.load_chance
        self.number += 1
        hours = chance.randrange(1, 1_000)
        streams = [
            name for name, states in self.streams.states.items() if states != [GONE] and name not in BASES
        ]
        match chance.choice(("create", "alter", "delete", "rights", "rights", "quota", "quota", "rotate")):
            case "create" if len(streams) < 12:
                name = f"acme/ops/s{self.number}"
                await self.asked(
                    self.streams, name, str(hours),
                    lambda: client.create_stream(name, retention=Retention(age_ms=hours * 3_600_000)),
                )  # fmt: skip
            case "alter" if streams:
                name = chance.choice(streams)
                await self.asked(
                    self.streams, name, str(hours),
                    lambda: client.alter_stream(name, retention=Retention(age_ms=hours * 3_600_000)),
                )  # fmt: skip
            case "delete" if streams:
                name = chance.choice(streams)
                await self.asked(self.streams, name, GONE, lambda: client.delete_stream(name))
            case "rights":
                name = f"spiffe://us-east.acme/client/c{chance.randrange(8)}"
                right = f"publish acme/ops/x{hours}"
                await self.asked(self.rights, name, right, lambda: client.put_rights(name, [right]))
            case "quota":
                name = f"t{chance.randrange(8)}"
                limits = QuotaLimits(streams=hours)
                await self.asked(
                    self.quotas, name, str(hours), lambda: client.put_quota("tenant", name, limits)
                )
            case "rotate":
                with contextlib.suppress(FelixError, TimeoutError):
                    async with asyncio.timeout(20):
                        await client.rotate_keys("data")
            case _:
                pass

    async def load(self) -> None:
        async with felix.connect(profile=self.profile, connect_timeout_s=AGAIN_S) as client:
            for name in BASES:
                if name not in self.streams.states:
                    await client.create_stream(name)
                    self.streams.states[name] = ["0"]

            async def publish(name: str) -> None:
                stream = client.stream(name)
                while True:
                    self.number += 1
                    number = self.number
                    self.maybe[name].add(number)
                    try:
                        await stream.publish(b"%d" % number)
                    except FelixError:
                        self.counts["records not acknowledged"] += 1
                        await asyncio.sleep(0.1)
                    else:
                        self.maybe[name].discard(number)
                        self.published[name].append(number)
                        self.counts["records"] += 1
                    await asyncio.sleep(0.02)

            async def changes() -> None:
                while True:
                    await self.change(client)
                    await asyncio.sleep(0.005)

            async with asyncio.TaskGroup() as group:
                group.create_task(changes())
                for name in BASES:
                    group.create_task(publish(name))

    async def until_well(self, load: asyncio.Task[None]) -> None:
        """Something is changed again, and the broker says that it is ready."""
        begun, since = time.monotonic(), time.monotonic()
        records = self.counts["records"]
        while True:
            assert not load.done(), load
            assert self.process is not None
            if self.process.poll() is not None:
                self.counts["starts that failed"] += 1
                assert "went on" not in self.counts or self.is_starting, (
                    f"it ended: {self.log.read_text()[-3_000:]}"
                )
                self.start()
            reason = await asyncio.to_thread(self.ready)
            if not reason and self.last_done_s > begun + 0.1 and self.counts["records"] > records:
                self.is_starting = False
                return
            assert time.monotonic() - since < AGAIN_S, (
                f"it does not go on ({reason}): {self.log.read_text()[-3_000:]}"
            )
            await asyncio.sleep(0.05)

    is_starting = True

    async def judge(self) -> None:
        """With no load."""
        async with (
            asyncio.timeout(120),
            felix.connect(profile=self.profile, connect_timeout_s=AGAIN_S) as client,
        ):
            found = {}
            async for state in client.list_streams("acme/"):
                found[state.stream] = str(state.retention.age_ms // 3_600_000)
            self.streams.check("stream", found)
            rights = {
                name: each[0] for name, each in (await client.list_rights()).items() if "/client/c" in name
            }
            self.rights.check("rights of", rights)
            quotas = {
                each.name: str(each.limits.streams)
                for each in await client.list_quotas("tenant")
                if each.name[0] == "t"
            }
            self.quotas.check("quota of", quotas)
            for name in BASES:
                want = Counter(self.published[name])
                read: Counter[int] = Counter()
                end = (await client.describe_stream(name)).state[0].high_watermark
                assert end or not want, f"{name} is not served: {self.log.read_text()[-3_000:]}"
                if not end:
                    continue
                async with client.stream(name).subscribe(start="earliest") as records:
                    async for record in records:
                        read[int(record.payload)] += 1
                        if record.offset >= end - 1:
                            break
                missing = want - read
                more = {each for each in read - want if each not in self.maybe[name]}
                assert not missing and not more, f"{name}: missing {missing}, more {more}"

    async def run(self, rounds: int) -> None:
        chance = self.chance
        for _ in range(rounds):
            if self.process is None:
                self.start()
                self.is_starting = True
            load = asyncio.create_task(self.load())
            try:
                await self.until_well(load)
                self.disk.fail_each(drawn(chance, self.paths))
                await asyncio.sleep(chance.choice((0.1, 0.5, 1.5)))
                if chance.random() < 0.4:
                    self.disk.fail_each(drawn(chance, self.paths))
                    await asyncio.sleep(0.5)
                if goes_on := chance.random() < 0.6:
                    self.disk.heal()
                    await self.until_well(load)
                    self.counts["went on"] += 1
            finally:
                load.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await load
            if not goes_on or chance.random() < 0.5:
                self.kill()
                self.disk.heal()
                if chance.random() < 0.6:
                    self.disk.cut()
                    self.counts["power cuts"] += 1
                self.start()
                self.is_starting = True
            self.disk.heal()
            await self.wait_ready()
            await self.judge()
            self.counts["judged"] += 1
        self.counts["failed calls"] = len(self.disk.failed())

    async def wait_ready(self) -> None:
        limit = time.monotonic() + AGAIN_S
        while reason := await asyncio.to_thread(self.ready):
            assert self.process is not None and self.process.poll() is None, self.log.read_text()[-3_000:]
            assert time.monotonic() < limit, f"not ready: {reason}: {self.log.read_text()[-3_000:]}"
            await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--all", action="store_true", help="calls of all files fail")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args()
    total: Counter[str] = Counter()
    failed = 0
    for seed in range(told.seed, told.seed + told.seeds):
        play = BrokerPlay(told.folder / f"broker-{seed}", seed, ("-",) if told.all else PATHS)
        try:
            asyncio.run(play.run(told.rounds))
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {error!r}", flush=True)
        else:
            shutil.rmtree(play.home)
        finally:
            play.kill()
        total += play.counts
        print(seed, dict(play.counts), flush=True)
    print(dict(total), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
