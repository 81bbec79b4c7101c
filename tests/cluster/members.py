"""Brokers of one region as processes that nobody starts again: each with a folder of its own, as on a machine of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from etcd_process import EtcdProcess
from ports import claim_port
from region_home import make_region
from region_process import BrokerProcess

from felix.address import Address
from region.bootstrap import write_profile
from region.cluster.records import ShardRecord
from region.folder import RegionFolder

REGION = "us-east"


class Members:
    """`folder` has the profile of clients, which names every broker."""

    def __init__(self, home: Path, etcd: EtcdProcess, count: int, *, lease_s: int) -> None:
        self._etcd = etcd
        self.folder: RegionFolder = make_region(home / "clients", REGION)
        ports = {f"b{number}": claim_port() for number in range(1, count + 1)}
        text = self.folder.config.read_text().replace(
            "kind: embedded", f'kind: etcd\n  endpoints: ["{etcd.endpoint.removeprefix("http://")}"]'
        )
        text += f"cluster:\n  lease: {lease_s}s\n  brokers:\n"
        text += "".join(f'    - {{id: {name}, listen: "127.0.0.1:{port}"}}\n' for name, port in ports.items())
        self._folders: dict[str, RegionFolder] = {}
        for name in ports:
            root = home / name / REGION
            shutil.copytree(self.folder.root, root)
            self._folders[name] = RegionFolder(root)
            self._folders[name].config.write_text(text.replace("broker: b1\n", f"broker: {name}\n", 1))
        write_profile(self.folder, REGION, "acme", *(Address("127.0.0.1", port) for port in ports.values()))
        self.running: dict[str, BrokerProcess] = {}

    async def start(self, *names: str) -> None:
        """Start these; returns once they serve."""
        for name in names:
            folder = self._folders[name]
            self.running[name] = BrokerProcess(folder, folder.root.parent)
        for name in names:
            await asyncio.to_thread(self.running[name].wait)

    def kill(self, name: str) -> None:
        """SIGKILL, for good."""
        self.running.pop(name).kill()

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        os.kill(self.running[name].process.pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        os.kill(self.running[name].process.pid, signal.SIGCONT)

    def records(self, stream: str) -> list[ShardRecord]:
        """Of the stream's shards, as they stand in the store."""
        told = self._etcd.ctl("get", "--prefix", f"/felix/1/{REGION}/shards/", "--print-value-only")
        found = [msgspec.json.decode(line, type=ShardRecord) for line in told.splitlines() if line]
        return [record for record in found if record.stream == stream]

    def leader(self, stream: str) -> str:
        """The broker that leads all of a stream's shards; empty while none does."""
        leaders = {record.leader for record in self.records(stream) if record.yielded is None}
        return leaders.pop() if len(leaders) == 1 else ""

    def is_well(self, *streams: str) -> bool:
        """Whether each of these is led by one broker, and all that run are in sync."""
        return all(
            self.leader(stream) in self.running
            and all(set(record.isr) == set(self.running) for record in self.records(stream))
            for stream in streams
        )


@asynccontextmanager
async def serving(
    home: Path, etcd: EtcdProcess, count: int = 3, *, lease_s: int = 2
) -> AsyncIterator[Members]:
    """All of them, until the block ends."""
    members = Members(home, etcd, count, lease_s=lease_s)
    try:
        await members.start(*members._folders)
        yield members
    finally:
        for name in list(members.running):
            members.kill(name)
