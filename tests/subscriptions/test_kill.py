"""Brokers and consumers are killed (SIGKILL) at work: nothing is lost, and what was acknowledged does not come again."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from region_peer import client, until
from region_process import ROOT, BrokerProcess, fixed_region

import felix

ORDERS = "acme/payments/orders"
BROKER_KILLS = int(os.environ.get("FELIX_DURABLE_KILLS", "1"))
CONSUMER_KILLS = 2 * BROKER_KILLS
CONSUMERS = 2
BEHIND_MAX = 400
"""Records that are not acknowledged yet: consumers acknowledge one at a time, and what is left at the end is waited for."""

pytestmark = pytest.mark.timeout(600)


def start_consumer(home: Path, report: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable, "-m", "tests.subscriptions.consuming_child", str(home), "us-east", ORDERS, "billing", str(report)
    ]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def acknowledged(report: Path) -> int:
    return report.read_text().count(" acked ") if report.exists() else 0


async def test_kills_of_brokers_and_consumers_lose_nothing(tmp_path: Path) -> None:
    folder = fixed_region(tmp_path)
    chance = random.Random(5)
    broker = BrokerProcess(folder, tmp_path)
    report = tmp_path / "report"
    consumers: list[subprocess.Popen[bytes]] = []
    killed: list[int] = []
    try:
        await asyncio.to_thread(broker.wait)
        async with client(folder) as region:
            await region.create_stream(ORDERS, shards=3)
            orders = region.stream(ORDERS)
            await orders.create_subscription("billing", felix.SubscriptionSettings("earliest"))
            published: set[bytes] = set()
            over = asyncio.Event()

            async def publish() -> None:
                number = 0
                async with orders.publisher(deadline_ms=300_000) as publisher:
                    while not over.is_set():
                        if len(published) > acknowledged(report) + BEHIND_MAX:
                            await asyncio.sleep(0.05)
                            continue
                        payloads = [b"%d" % (number + n) for n in range(10)]
                        await publisher.publish_batch([felix.NewRecord(each) for each in payloads])
                        published.update(payloads)
                        number += 10
                        await asyncio.sleep(0.005)

            publishing = asyncio.ensure_future(publish())
            consumers = [start_consumer(tmp_path, report) for _ in range(CONSUMERS)]
            kills = ["broker"] * BROKER_KILLS + ["consumer"] * CONSUMER_KILLS
            chance.shuffle(kills)
            for what in kills:
                enough = acknowledged(report) + 20 + chance.randrange(60)
                await until(lambda enough=enough: acknowledged(report) >= enough, 90)  # type: ignore[misc]
                killed.append(time.monotonic_ns())
                if what == "broker":
                    broker.kill()
                    broker = BrokerProcess(folder, tmp_path)
                    await asyncio.to_thread(broker.wait)
                else:
                    victim = consumers.pop(0)
                    victim.kill()
                    victim.wait()
                    consumers.append(start_consumer(tmp_path, report))
            over.set()
            async with asyncio.timeout(90):
                await publishing
                while True:
                    state = await orders.describe_subscription("billing")
                    if not sum(shard.lag_records for shard in state.shards):
                        break
                    await asyncio.sleep(0.05)
            for each in consumers:
                each.kill()
                each.wait()
        lines = [line.split(" ", 2) for line in report.read_text().splitlines() if line.endswith("'")]
        got = {payload for _, what, payload in lines if what == "got"}
        assert {repr(payload) for payload in published} <= got, "nothing is lost"
        done: dict[str, int] = {}
        for time_ns, what, payload in lines:
            if what == "acked":
                done.setdefault(payload, int(time_ns))
        # What was on its way to one consumer when another one's acknowledgement was taken may still be read; over a kill, nothing comes again.
        for time_ns, what, payload in lines:
            if what == "got" and payload in done:
                between = [when for when in killed if done[payload] < when < int(time_ns)]
                assert not between, "what was acknowledged came again"
    finally:
        for each in consumers:
            each.kill()
        broker.kill()
