"""The clock of a lone broker, or of all of three, is an hour behind or ahead, and jumps while they serve and are killed, under clients that check.

    python -m cluster.play_clock FOLDER [--rounds N] [--seed S] [--brokers 1] [--founded HOURS]

What the clock costs is documented (docs/clusters.md, Clocks), and some of it is met here as well: where a broker is started while it is ahead, records of half an hour go. `--founded`: how many hours ago the region was founded, by a right clock; with 0 no certificate holds by a clock that is behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import cluster.members
import cluster.view_load
from cluster import failing_syncs
from cluster.history import RULES, History
from cluster.load import Load, stored_in
from cluster.members import serving
from cluster.played_broker import AHEAD_BY, set_clock
from cluster.view_load import ViewLoad
from etcd_process import running_etcd
from ports import claim_port
from region_home import make_region
from region_peer import client
from region_process import BrokerProcess

import felix
from felix.errors import FelixError
from felix.settings import SubscriptionSettings
from region.folder import RegionFolder

HOUR_MS = 3_600_000
STREAM, VIEWS = "acme/ops/orders", ("acme/ops/jobs", "acme/ops/events", "acme/ops/prices")
IDS, LATER = "acme/ops/ids", "acme/ops/later"
KEPT = "acme/ops/kept"
"""Records that are to be kept for half an hour, and a subscription that nobody reads, which is to stay as long."""
KEPT_MS = HOUR_MS // 2
SWEPT = "storage: {sweep_every: 200ms}\nsubscriptions: {sweep_every: 200ms}\n"


def program(home: Path) -> Path:
    """`cluster.played_broker`, for processes that do not know this folder."""
    made = home / "program.py"
    tests = Path(__file__).parents[1]
    made.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(tests)!r})\nrunpy.run_module('cluster.played_broker', run_name='__main__', alter_sys=False)\n"
    )
    return made


class Lone:
    """One broker."""

    def __init__(self, home: Path, founded_ms: int | None) -> None:
        self.folder = make_region(home, "us-east", at_ms=founded_ms)
        place = f"127.0.0.1:{claim_port()}"
        self.folder.config.write_text(self.folder.config.read_text().replace("127.0.0.1:0", place) + SWEPT)
        self.places = {"b1": place}
        profile = json.loads(self.folder.profile.read_text())
        profile["addresses"] = [place]
        self.folder.profile.write_text(json.dumps(profile))
        self.running: dict[str, BrokerProcess] = {}
        self.program = program(home)

    async def start(self, *names: str) -> None:
        self.running["b1"] = BrokerProcess(self.folder, self.folder.root.parent, self.program)
        await asyncio.to_thread(self.running["b1"].wait)

    def kill(self, name: str) -> None:
        self.running.pop(name).kill()


async def ids(region: felix.RegionClient, counts: Counter[str]) -> None:
    """Each id twice, soon after each other, for ever: it is there once, where no clock jumped in between."""
    number = 0
    while True:
        number += 1
        try:
            first = await region.stream(IDS).publish(b"%d" % number, message_id=f"id{number}")
            again = await region.stream(IDS).publish(b"%d" % number, message_id=f"id{number}")
            counts["ids once" if first == again else "ids twice"] += 1
        except FelixError as error:
            counts[f"ids {error.code.name}"] += 1
        await asyncio.sleep(0.05)


async def delayed(region: felix.RegionClient, counts: Counter[str], put: dict[bytes, float]) -> None:
    number = 0
    while True:
        number += 1
        try:
            payload = b"later %d" % number
            await region.queue(LATER).put(payload, delay=1)
            put[payload] = time.monotonic()
        except FelixError as error:
            counts[f"later {error.code.name}"] += 1
        await asyncio.sleep(0.1)


async def worked(region: felix.RegionClient, counts: Counter[str], done: Counter[bytes]) -> None:
    while True:
        try:
            async with region.queue(LATER).consume(prefetch=4) as worker:
                async for job in worker:
                    await job.ack()
                    done[bytes(job.payload)] += 1
        except FelixError as error:
            counts[f"worker {error.code.name}"] += 1
            await asyncio.sleep(0.1)


class Views(ViewLoad):
    """What is broken is told at once."""

    def _comes(self, record: felix.ConsumerRecord) -> None:
        before = len(self.broken)
        super()._comes(record)
        if len(self.broken) > before:
            print(f"  {time.monotonic():.2f} {self.broken[-1]}: {record}", flush=True)


@asynccontextmanager
async def judged(views: ViewLoad, region: felix.RegionClient) -> AsyncIterator[None]:
    """What stands still is told."""
    try:
        yield
    except TimeoutError:
        waits = views._put - views.done.keys() - views._unsure
        print(
            "  jobs that wait:",
            sorted(waits)[:5],
            len(waits),
            "records:",
            sorted(views._published - views._came)[:5],
            flush=True,
        )
        print("  queue:", await region.queue(VIEWS[0]).describe(), flush=True)
        for each in await region.queue(VIEWS[0]).peek(5):
            print("   ", each, flush=True)
        print(
            "  subscription:",
            await region.stream(VIEWS[1]).describe_subscription("crew"),
            time.time(),
            flush=True,
        )
        raise


async def play(home: Path, seed: int, rounds: int, brokers: int, founded_h: float, pause_s: float) -> None:
    random, counts = Random(seed), Counter[str]()
    cluster.view_load.WAIT_S = 45.0  # type: ignore[misc]
    clock = home / "clock"
    os.environ[AHEAD_BY] = str(clock)
    os.environ[failing_syncs.TOLD_BY] = str(home / "syncs")
    set_clock(clock, 0)
    founded = round(time.time() * 1000 - founded_h * HOUR_MS)
    with ExitStack() as kept:
        async with AsyncExitStack() as stack:
            if brokers == 1:
                members = Lone(home, founded)
                await members.start("b1")
                stack.callback(lambda: [members.kill(name) for name in list(members.running)])
            else:
                (home / "etcd").mkdir()
                etcd = kept.enter_context(running_etcd(home / "etcd"))
                made, written = cluster.members.make_region, cluster.members.write_cluster
                cluster.members.make_region = lambda *of: made(*of, at_ms=founded)  # type: ignore[assignment]

                def swept(folder: RegionFolder, *of: Any, **more: Any) -> None:
                    written(folder, *of, **more)
                    folder.config.write_text(folder.config.read_text() + SWEPT)

                cluster.members.write_cluster = swept  # type: ignore[assignment]
                members = await stack.enter_async_context(  # type: ignore[assignment]
                    serving(home, etcd, brokers, lease_s=2, program=program(home))
                )
            one, other, third = [await stack.enter_async_context(client(members.folder)) for _ in range(3)]
            copies = min(brokers, 3)
            await one.create_stream(STREAM, replicas=copies)
            await one.create_stream(
                IDS,
                replicas=copies,
                views=felix.Views(deduplication=felix.Deduplication(window_ms=600_000, ids_max=10_000)),
            )
            await one.create_queue(LATER, replicas=copies, visibility=30)
            await one.create_stream(KEPT, replicas=copies, retention=felix.Retention(age_ms=KEPT_MS))
            await one.stream(KEPT).create_subscription("idle", SubscriptionSettings(inactive_ttl_ms=KEPT_MS))
            await one.stream(KEPT).publish_many([b"%d" % each for each in range(10)])
            history, views = History(), Views(*VIEWS, replicas=copies)
            load = Load(one, STREAM, history, pause_s=0.02)
            put: dict[bytes, float] = {}
            done = Counter[bytes]()
            tasks = [
                asyncio.ensure_future(each)
                for each in (ids(third, counts), delayed(third, counts, put), worked(other, counts, done))
            ]
            offset, was_started_ahead = 0, False
            async with load.going_on(writers=2, readers=1), judged(views, one), views.going_on(one, other):
                for number in range(rounds):
                    what = random.choice(("jump", "jump", "kill", "quiet"))
                    if what == "jump":
                        offset = random.choice([each for each in (-HOUR_MS, 0, HOUR_MS) if each != offset])
                        set_clock(clock, offset)
                    elif what == "kill":
                        name = random.choice(list(members.running))
                        members.kill(name)
                        await members.start(name)
                        was_started_ahead = was_started_ahead or offset > 0
                    counts[what] += 1
                    print(
                        f"  {number}: {what}, {offset // 60_000} min, {len(history.acknowledged)} records, {views}, {len(put)} later, {sum(done.values())} done, {dict(counts)}",
                        flush=True,
                    )
                    await asyncio.sleep(pause_s * random.uniform(0.25, 1))
                set_clock(clock, 0)
                print("  the clock is right", flush=True)
                await load.goes_on(50)
                await views.goes_on(20)
                await asyncio.sleep(12)
                waits = put.keys() - done.keys()
                print(f"  of {len(put)} delayed jobs {len(waits)} wait", flush=True)
                for each in tasks:
                    if each.done():
                        each.result()
            for each in tasks:
                each.cancel()
            await views.check(one)
            kept = (await one.describe_stream(KEPT)).state[0]
            assert was_started_ahead or kept.log_start == 0, kept
            assert [each.name for each in await one.stream(KEPT).subscriptions()] == ["idle"]
            stored = await stored_in(one, STREAM)
            broken = [
                f"{name}: {what}"
                for name, rule in RULES.items()
                for what in list(rule(history, stored))[:3]
                if name not in ("silent",)
            ]
            assert not broken, broken
            twice = {payload for payload, count in done.items() if count > 1}
            assert not twice, twice
            print(
                f"seed {seed} holds: {len(stored)} records, {views}, {sum(done.values())} delayed jobs, {dict(counts)}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--founded", type=float, default=3.0)
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between what happens, at most")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True)
    asyncio.run(play(asked.folder, asked.seed, asked.rounds, asked.brokers, asked.founded, asked.pause))
    return 0


if __name__ == "__main__":
    sys.exit(main())
