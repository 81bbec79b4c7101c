"""Brokers of one region on simulated time: registries and controllers over the metadata store's memory twin, which fails as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from felix.errors import Code, FelixError, UnavailableError
from felix.runtime.simulated import SimulatedLoop, simulated
from felix.storage.memory import MemoryDisk
from felix.tasks import end_tasks
from region.cluster.controller_service import ControllerService
from region.cluster.mirror import ClusterMirror
from region.cluster.node_file import NodeFile
from region.cluster.records import ClusterKeys, Health, decode_node, decode_pulse
from region.cluster.registration import Start
from region.cluster.registry import Address, Registry
from region.metadata.lease import Lease
from region.metadata.local import Batch
from region.metadata.memory import MemoryStore
from region.metadata.port import OutcomeUnknownError
from region.metadata.transaction import Compare, Page, TransactResult, Write

LEASE_MS = 5_000
KEYS = ClusterKeys("us-east")
FOLDER = Path("/data")


class Store(MemoryStore):
    """One that is away while the test wants it so, whose watches lag, or which loses answers: of requests that happened, or that did not."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__(runtime=simulated(loop, 1))
        self.is_away = False
        self.watches_lag = False
        self.loses: list[bool] = []
        self.meanwhile: list[Callable[[], Awaitable[None]]] = []
        """each is done once, while a transaction is under way"""

    def _check(self) -> None:
        if self.is_away:
            raise UnavailableError("The store is away.")

    async def _range(self, prefix: str, limit: int, after: str) -> Page:
        self._check()
        return await super()._range(prefix, limit, after)

    async def _transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        self._check()
        if self.meanwhile:
            await self.meanwhile.pop()()
        if self.loses:
            if self.loses.pop(0):
                await super()._transact(compares, writes)
            raise OutcomeUnknownError("The answer was lost.")
        return await super()._transact(compares, writes)

    async def _changes(self, prefix: str, from_revision: int) -> Batch:
        while self.watches_lag:  # noqa: ASYNC110 - no event is set for it
            await asyncio.sleep(0.01)
        return await super()._changes(prefix, from_revision)

    async def _lease_grant(self, ttl_ms: int) -> tuple[int, int]:
        self._check()
        return await super()._lease_grant(ttl_ms)

    async def _lease_renew(self, lease_id: int) -> int:
        self._check()
        return await super()._lease_renew(lease_id)


class Region:
    """The store, and a disk for each folder that brokers start from."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.store = Store(loop)
        self.disks: dict[str, MemoryDisk] = {}
        self.brokers: list[Broker] = []

    def broker(self, name: str = "b1", disk: str = "", lock: str = "", boot: str = "boot-1") -> Broker:
        """A process from a folder, by default the one of its name, under a lock that is as the folder."""
        made = Broker(self, name, disk or name, lock or disk or name, boot)
        self.brokers.append(made)
        return made

    def copy(self, disk: str, to: str) -> None:
        """A copy of a folder, as from a backup of its volume."""
        source, target = self.disks[disk], MemoryDisk()
        target.put_back(FOLDER, source.copy(FOLDER))
        self.disks[to] = target

    async def node(self, name: str = "b1") -> Any:
        entry = await self.store.get(KEYS.node(name))
        assert entry is not None
        return decode_node(entry.value, entry.key)

    async def pulse(self, name: str = "b1") -> int:
        entry = await self.store.get(KEYS.pulse(name))
        return 0 if entry is None else decode_pulse(entry.value, entry.key).pulse

    async def alive(self) -> list[str]:
        return [
            entry.key.removeprefix(KEYS.brokers)
            for entry in (await MemoryStore.load(self.store, KEYS.brokers)).entries
        ]

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(300):
            while not holds():  # noqa: ASYNC110 - no event is set for it
                await asyncio.sleep(0.05)


class Broker:
    """A process: its registry, and what it told."""

    def __init__(self, region: Region, name: str, disk: str, lock: str, boot: str) -> None:
        runtime = simulated(region.loop, 1)
        files = region.disks.setdefault(disk, MemoryDisk()).mount()
        files.make_folder(FOLDER)
        self.mirror = ClusterMirror(region.store, "us-east", runtime)
        self.registry = Registry(
            region.store,
            self.mirror,
            NodeFile(files, FOLDER, runtime.random),
            Start(broker=name, host="h1", boot=boot, lock=lock),
            Address("h1:7443", "h1:7443"),
            lease_ms=LEASE_MS,
            runtime=runtime,
        )
        self.ticks: asyncio.Task[None] | None = None
        self.leases: list[Lease | None] = []
        self.registry.on_lease(self.leases.append)
        self.controller = ControllerService(
            region.store,
            self.mirror,
            self.registry,
            lambda asked: None,
            lease_ms=LEASE_MS,
            runtime=runtime,
        )

    async def open(self, *, replace: bool = False) -> Registry:
        await self.mirror.start()
        await self.registry.open(replace=replace)
        return self.registry

    async def start(self, *, replace: bool = False) -> Registry:
        registry = await self.open(replace=replace)
        await registry.announce(Health(open=True))
        return registry

    async def govern(self) -> None:
        """Start, and take part in being the controller."""
        await self.start()
        self.ticks = asyncio.ensure_future(self.controller.run())

    async def die(self) -> None:
        """No word to anybody: nothing renews the lease."""
        for task in self.registry._tasks:
            task.cancel()
        if self.registry._lease is not None:
            self.registry._lease.lose("The process is gone.")
        self.registry._tasks = []
        await self.end()

    async def end(self) -> None:
        """Decide and follow nothing more."""
        if self.ticks is not None:
            await end_tasks(self.ticks)
        await self.controller.close()
        await self.mirror.close()

    async def refused(self, kind: type[FelixError], code: Code, *, replace: bool = False) -> FelixError:
        with pytest.raises(kind) as refused:
            await self.open(replace=replace)
        assert refused.value.code is code, refused.value
        return refused.value


def play(scene: Callable[[Region], Awaitable[None]], seed: int = 1) -> None:
    """Run a scene, and end what it started."""
    loop = SimulatedLoop(Random(seed))

    async def work() -> None:
        region = Region(loop)
        try:
            await scene(region)
        finally:
            region.store.is_away = False
            for broker in region.brokers:
                await broker.registry.close(in_order=False)
                await broker.mirror.close()
            await region.store.close()

    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
