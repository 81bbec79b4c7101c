"""`python -m benchmarks.store_growth [STREAMS]`: what a shard with three copies takes of etcd and of its brokers, and what its election writes.

Three brokers and their etcd run as processes. Streams of one shard are made one after the other, then nobody does anything, then one broker is killed and
stays away until all is led by others. Counted are keys, bytes and revisions of etcd as its own API says them, and the brokers' memory and processor
time: counts hold on a busy machine, where times do not.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

import msgspec

import felix
from benchmarks.brokers import LOOK_S, Brokers, all_in_sync
from benchmarks.process_use import ProcessUse
from cli.benchmark.roles import bench_client
from felix.errors import FelixError
from region.config import load_config

BROKERS: Final = 3
IDLE_S: Final = 10.0
SETTLE_S: Final = 3.0
LEASE_MS: Final = 2_000


class StoreUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of etcd at one moment. `record_bytes`: keys and values as they stand; `file_bytes`: its database, with what compaction has not yet freed."""

    keys: int
    record_bytes: int
    revision: int
    file_bytes: int

    @classmethod
    def of(cls, brokers: Brokers) -> StoreUse:
        """As etcd's own API says it (its JSON gateway: /v3/kv/range, /v3/maintenance/status)."""
        url = f"http://{load_config(brokers.folder.config).metadata.endpoints[0]}/v3"
        every = base64.b64encode(b"\0").decode()
        held = _ask(f"{url}/kv/range", {"key": every, "range_end": every})
        records = [
            len(base64.b64decode(each["key"])) + len(base64.b64decode(each.get("value", "")))
            for each in held.get("kvs", [])
        ]
        return cls(
            keys=len(records),
            record_bytes=sum(records),
            revision=int(held["header"]["revision"]),
            file_bytes=int(_ask(f"{url}/maintenance/status", {})["dbSize"]),
        )


def _ask(url: str, body: dict[str, str]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _memory(brokers: Brokers) -> int:
    return sum(ProcessUse.of(brokers.pid_of(name)).private_bytes for name in brokers.names)


async def _leads(client: felix.RegionClient) -> dict[str, int]:
    while True:
        try:
            return {each.broker: each.leads for each in (await client.describe()).brokers}
        except FelixError:
            await asyncio.sleep(LOOK_S)


async def _measure(brokers: Brokers, streams: int) -> None:
    async with bench_client(brokers.home, "qh3") as client:
        names = [f"bench/cluster/of-{number:05d}" for number in range(streams + 1)]
        # What the first stream makes, such as keys, is not counted.
        await client.create_stream(names[0], replicas=BROKERS)
        await all_in_sync(client, names[0], BROKERS)
        await asyncio.sleep(SETTLE_S)
        before, memory = StoreUse.of(brokers), _memory(brokers)
        (cpu, etcd_cpu), at = brokers.cpu_s(), time.monotonic()
        await asyncio.sleep(IDLE_S)
        (cpu_idle, etcd_idle), elapsed = brokers.cpu_s(), time.monotonic() - at
        empty = StoreUse.of(brokers)
        print(
            f"idle with 1 stream: {(empty.revision - before.revision) / elapsed:.2f} writes a second, brokers {(cpu_idle - cpu) / elapsed:.1%} of a processor, etcd {(etcd_idle - etcd_cpu) / elapsed:.1%}"
        )
        at = time.monotonic()
        for name in names[1:]:
            await client.create_stream(name, replicas=BROKERS)
        made_s = time.monotonic() - at
        for name in names[1:]:
            await all_in_sync(client, name, BROKERS)
        await asyncio.sleep(SETTLE_S)
        full, grown = StoreUse.of(brokers), _memory(brokers) - memory
        print(
            f"{streams} streams of three copies: {made_s * 1e3 / streams:.0f} ms each; of each in etcd {(full.keys - empty.keys) / streams:.1f} keys, "
            f"{(full.record_bytes - empty.record_bytes) / streams:.0f} bytes, {(full.revision - empty.revision) / streams:.1f} writes; "
            f"{grown / streams / BROKERS / 1024:.1f} KiB of memory for each copy; etcd's file {full.file_bytes / (1 << 20):.1f} MiB"
        )
        (cpu, etcd_cpu), at = brokers.cpu_s(), time.monotonic()
        await asyncio.sleep(IDLE_S)
        (cpu_idle, etcd_idle), elapsed = brokers.cpu_s(), time.monotonic() - at
        idle = StoreUse.of(brokers)
        print(
            f"idle: {(idle.revision - full.revision) / elapsed:.2f} writes a second, brokers {(cpu_idle - cpu) / elapsed:.1%} of a processor, etcd {(etcd_idle - etcd_cpu) / elapsed:.1%}"
        )
        leads = await _leads(client)
        victim = max(leads, key=lambda name: leads[name])
        with brokers.nobody_starts_again():
            os.kill(brokers.pid_of(victim), signal.SIGKILL)
            at = time.monotonic()
            while (await _leads(client)).get(victim):  # noqa: ASYNC110 - nobody tells but the region's status
                await asyncio.sleep(LOOK_S)
            elected_s = time.monotonic() - at
            await asyncio.sleep(SETTLE_S)
            elected = StoreUse.of(brokers)
        print(
            f"a broker that led {leads[victim]} is killed: led by others after {elected_s:.1f} s (lease {LEASE_MS / 1e3:.0f} s); "
            f"{elected.revision - idle.revision} writes in all"
        )


def main() -> None:
    """Measure and print."""
    streams = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory(prefix="felix-bench-") as name:
        brokers = Brokers(Path(name), BROKERS, lease_ms=LEASE_MS)
        with brokers.running():
            asyncio.run(_measure(brokers, streams))


if __name__ == "__main__":
    main()
