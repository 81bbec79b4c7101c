"""Brokers of one region as processes that nobody starts again: each with a folder of its own, as on a machine of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from cluster.processes import own_places, write_cluster
from etcd_process import EtcdProcess
from region_home import make_region
from region_process import BrokerProcess

from region.cluster.records import ShardRecord
from region.folder import RegionFolder

REGION = "us-east"


class Members:
    """`folder` has the profile of clients, which names every broker; `places` where each listens."""

    def __init__(
        self,
        home: Path,
        etcd: EtcdProcess,
        count: int,
        *,
        lease_s: int,
        others: Sequence[EtcdProcess] = (),
        program: str | Path = "felix",
    ) -> None:
        """`others`: more members of the etcd. `program`: what each broker is, a script that ends in the command."""
        self._etcd = etcd
        self._program = program
        self.folder: RegionFolder = make_region(home / "clients", REGION)
        self.places = places = own_places(count)
        endpoints = [each.endpoint.removeprefix("http://") for each in (etcd, *others)]
        write_cluster(self.folder, endpoints, places, lease=f"{lease_s}s")
        text = self.folder.config.read_text()
        self._folders: dict[str, RegionFolder] = {}
        for name in places:
            root = home / name / REGION
            shutil.copytree(self.folder.root, root)
            self._folders[name] = RegionFolder(root)
            self._folders[name].config.write_text(text.replace("broker: b1\n", f"broker: {name}\n", 1))
        self.running: dict[str, BrokerProcess] = {}

    async def start(self, *names: str) -> None:
        """Start these; returns once they serve."""
        for name in names:
            folder = self._folders[name]
            self.running[name] = BrokerProcess(folder, folder.root.parent, self._program)
        for name in names:
            await asyncio.to_thread(self.running[name].wait)

    def ask_at(self, etcd: EtcdProcess) -> None:
        """Read records at this member of the etcd from now on."""
        self._etcd = etcd

    def kill(self, name: str) -> None:
        """SIGKILL, for good."""
        self.running.pop(name).kill()

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        os.kill(self.running[name].process.pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        os.kill(self.running[name].process.pid, signal.SIGCONT)

    async def records(self) -> dict[str, list[ShardRecord]]:
        """Of all shards by stream, as they stand in the store."""
        found: dict[str, list[ShardRecord]] = {}
        for record in await asyncio.to_thread(shard_records, self._etcd, REGION):
            found.setdefault(record.stream, []).append(record)
        return found

    async def leader(self, stream: str) -> str:
        """The broker that leads all of a stream's shards; empty while none does."""
        return _leader((await self.records()).get(stream, []))

    async def is_led_by_another(self, stream: str, than: str) -> bool:
        """Whether one broker leads all of a stream's shards, and not this one."""
        return await self.leader(stream) not in ("", than)

    async def is_well(self, *streams: str) -> bool:
        """Whether each of these is led by one broker, and all that run are in sync."""
        records, running = await self.records(), set(self.running)
        return all(
            _leader(records.get(stream, [])) in running
            and all(set(record.isr) == running for record in records[stream])
            for stream in streams
        )


def shard_records(etcd: EtcdProcess, region: str) -> list[ShardRecord]:
    """Of all shards of a region, as they stand in its store."""
    told = etcd.ctl("get", "--prefix", f"/felix/1/{region}/shards/", "--print-value-only")
    return [msgspec.json.decode(line, type=ShardRecord) for line in filter(None, told.splitlines())]


def _leader(records: list[ShardRecord]) -> str:
    leaders = {record.leader for record in records if record.yielded is None}
    return leaders.pop() if len(leaders) == 1 else ""


@asynccontextmanager
async def serving(
    home: Path,
    etcd: EtcdProcess,
    count: int = 3,
    *,
    lease_s: int = 2,
    others: Sequence[EtcdProcess] = (),
    program: str | Path = "felix",
) -> AsyncIterator[Members]:
    """All of them, until the block ends."""
    members = Members(home, etcd, count, lease_s=lease_s, others=others, program=program)
    try:
        await members.start(*members._folders)
        yield members
    finally:
        for name in list(members.running):
            members.kill(name)
