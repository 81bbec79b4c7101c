"""A region of several brokers that a sequence plays: each broker is a process of its own, started by the real command, and their etcd one beside them.

Nobody starts a broker again but the sequence. Whatever changes region.yaml counts for a broker at its next start, as with `felix region up --broker`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

import msgspec
from bridge_mesh import until
from e2e.command_mesh import felix_command
from etcd_process import etcd_binary
from ports import claim_port
from region_process import ROOT
from warm.process import WarmProcess

from cli.process import read_state
from cli.several import ETCD_FOLDER, ETCD_PEER, make_cluster, scaled, start_etcd
from felix.address import Address
from region.cluster.records import ClusterKeys, ShardRecord
from region.config import RegionConfig, load_config
from region.folder import RegionFolder

BROKERS: Final = 3
LEASE_S: Final = 10
"""Longer than by default: on a busy machine a process stands still for seconds."""
START_S: Final = 120.0


def free_address(port: int, taken: list[Address], kind: socket.SocketKind) -> Address:
    """As the commands ask for one."""
    return Address("127.0.0.1", claim_port())


class Cluster:
    """The brokers of one region. `running` are those that run; `away` those that somebody took down, and that are to come back."""

    def __init__(self, folder: RegionFolder) -> None:
        self.folder = folder
        self.running: dict[str, WarmProcess] = {}
        self.away: set[str] = set()
        self.drained: set[str] = set()
        self.retired: set[str] = set()
        """Those that were gone for good at some time."""
        self._etcd: Any = None

    @property
    def region(self) -> str:
        return self.folder.root.name

    @property
    def config(self) -> RegionConfig:
        return load_config(self.folder.config)

    @property
    def names(self) -> list[str]:
        """Of all that region.yaml names."""
        assert self.config.cluster is not None
        return [str(each.id) for each in self.config.cluster.brokers]

    @property
    def addresses(self) -> tuple[str, ...]:
        assert self.config.cluster is not None
        return tuple(str(each.listen) for each in self.config.cluster.brokers)

    @property
    def snapshot(self) -> Path:
        """Of the etcd; beside the region."""
        return self.folder.root.parent / f"snapshot-{self.region}"

    def data(self, broker: str) -> Path:
        return self.folder.root / "data" / broker

    def make(self) -> None:
        """Of a region that was founded and never served: with so many brokers, and as many copies of each stream."""
        make_cluster(self.folder, self.config, BROKERS, free_address, BROKERS)
        self.set_lease()

    def set_lease(self) -> None:
        text = self.folder.config.read_text()
        self.folder.config.write_text(text.replace("cluster:\n", f"cluster:\n  lease: {LEASE_S}s\n", 1))

    # -- processes -------------------------------------------------------------------------------------

    async def start_all(self) -> None:
        await self.start_etcd()
        names = [name for name in self.names if name not in self.away]
        # The first one makes the audit log.
        await self.start(names[0])
        for name in names[1:]:
            self.begin(name)
        for name in names[1:]:
            await self.serves(name)

    async def stop_all(self) -> None:
        for name in list(self.running):
            await self.stop(name)
        await self.stop_etcd()

    async def end(self) -> None:
        """Whatever runs, by force."""
        for name in list(self.running):
            await self.kill(name)
        await self.stop_etcd()

    async def start_etcd(self) -> None:
        self._etcd = await start_etcd(self.folder, self.config)

    async def stop_etcd(self) -> None:
        if self._etcd is not None:
            await self._etcd.end()
            self._etcd = None

    async def start(self, name: str, *words: str) -> None:
        self.begin(name, *words)
        await self.serves(name)

    def begin(self, name: str, *words: str) -> None:
        home = self.folder.root.parent
        environment = {**os.environ, "FELIX_HOME": str(home), "PYTHONPATH": str(ROOT)}
        command = ("--log-level", "info", "region", "up", self.region, "--broker", name, *words)
        with self.log(name).open("ab") as log:
            self.running[name] = WarmProcess("felix", *command, env=environment, cwd=ROOT, log=log)

    def log(self, name: str) -> Path:
        return self.folder.run / f"{name}.test.log"

    async def serves(self, name: str) -> None:
        """Wait until it does. Raises AssertionError where it ends."""
        process = self.running[name]

        def is_up() -> bool:
            said = read_state(self.folder.pid_of(name))
            if said is not None and said.get("pid") == process.pid and "address" in said:
                return True
            if process.poll() is not None:
                self.running.pop(name)
                words = self.log(name).read_text()[-3_000:]
                raise AssertionError(f"{name} of {self.region} did not come up: {words}")
            return False

        await until(is_up, f"{name} of {self.region}", START_S)
        self.away.discard(name)

    async def stop(self, name: str) -> None:
        """SIGTERM."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, START_S)
        assert code in (0, -signal.SIGTERM), f"{name} of {self.region} ended with {code}: {self.log(name)}"

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self.running.pop(name)
        process.kill()
        await asyncio.to_thread(process.wait, START_S)

    def scale(self, count: int) -> None:
        """In region.yaml."""
        scaled(self.folder, self.config, count, free_address)

    # -- the store -------------------------------------------------------------------------------------

    async def ctl(self, *words: str) -> str:
        """etcdctl."""
        tool = etcd_binary("etcdctl")
        assert tool is not None
        endpoint = self.config.metadata.endpoints[0]
        command = [tool, f"--endpoints={endpoint}", *words]
        done = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        return done.stdout.decode()

    async def shards(self) -> list[ShardRecord]:
        """All records of shards."""
        told = await self.ctl("get", "--prefix", ClusterKeys(self.region).shards, "--print-value-only")
        return [msgspec.json.decode(line, type=ShardRecord) for line in told.splitlines() if line]

    async def is_in_sync(self) -> bool:
        """Whether every shard has all of its copies in sync, and nothing moves."""
        return all(set(each.isr) == set(each.replicas) and not each.target for each in await self.shards())

    async def save_store(self) -> None:
        """A snapshot, as docs/clusters.md has it."""
        await self.ctl("snapshot", "save", str(self.snapshot))

    async def put_store_back(self) -> str:
        """The store has what it had at the snapshot, and then fits what the brokers' folders have; no broker runs. What the command said."""
        await self.stop_etcd()
        data, tool = self.folder.root / ETCD_FOLDER / "data", etcd_binary("etcdutl")
        assert tool is not None
        shutil.rmtree(data)
        words = [
            f"--data-dir={data}",
            f"--name={self.region}",
            f"--initial-cluster={self.region}={ETCD_PEER}",
            f"--initial-advertise-peer-urls={ETCD_PEER}",
        ]
        command = [tool, "snapshot", "restore", str(self.snapshot), *words]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        told = await asyncio.to_thread(
            felix_command, self.folder.root.parent, "region", "reconcile", self.region, "--accept-loss"
        )
        return told.out + told.err
