"""Brokers of a cluster on real stores: SQLite, and an etcd that is killed, frozen and put back from a backup."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from etcd_process import EtcdProcess, etcd
from region_peer import until

from felix.errors import Code, UnavailableError
from felix.runtime.real import REAL
from felix.storage.disk import DiskFiles
from region.cluster import registry as registry_module
from region.cluster.mirror import ClusterMirror
from region.cluster.node_file import NodeFile
from region.cluster.records import Health
from region.cluster.registration import Start
from region.cluster.registry import Address, Registry
from region.metadata.embedded import EmbeddedStore
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.port import MetadataStore

__all__ = ["etcd"]  # the fixture, by its name

LEASE_MS = 2_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "EXPIRY_SLACK_MS", 1_000)
    monkeypatch.setattr(registry_module, "RETRY_MS", 50)
    # Copies of a folder are made here that are to be as good as the folder.
    monkeypatch.setattr(registry_module, "PULSE_MS", 3_600_000)


class Broker:
    """A broker's registry, and what it knows of the others."""

    def __init__(self, store: MetadataStore, region: str, name: str, folder: Path, lock: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.mirror = ClusterMirror(store, region, REAL)
        self.registry = Registry(
            store,
            self.mirror,
            NodeFile(DiskFiles(), folder, REAL.random),
            Start(broker=name, host="h1", boot="boot-1", lock=lock or str(folder)),
            Address("h1:7443", "h1:7443"),
            lease_ms=LEASE_MS,
            runtime=REAL,
        )

    @property
    def sees(self) -> dict[str, int]:
        return self.mirror.view.brokers.registrations()


@asynccontextmanager
async def alive(
    store: MetadataStore, region: str, name: str, folder: Path, lock: str = "", *, in_order: bool = True
) -> AsyncIterator[Broker]:
    broker = Broker(store, region, name, folder, lock)
    await broker.mirror.start()
    try:
        await broker.registry.open()
        await broker.registry.announce(Health(open=True))
        yield broker
    finally:
        await broker.registry.close(in_order=in_order)
        await broker.mirror.close()


async def started_again(process: EtcdProcess, store: MetadataStore) -> None:
    """Until the store has a connection to it, too."""
    await asyncio.to_thread(process.start)
    async with asyncio.timeout(120):
        while True:
            with suppress(UnavailableError):
                await store.range("/felix/1/", limit=1)
                return
            await asyncio.sleep(0.05)


@pytest.fixture(params=["embedded", pytest.param("etcd", marks=pytest.mark.etcd)])
async def stores(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[MetadataStore, MetadataStore]]:
    """Two ways to one store: of two processes with etcd, within one with SQLite."""
    async with AsyncExitStack() as stack:
        if request.param == "etcd":
            config = EtcdConfig((request.getfixturevalue("etcd").endpoint,))
            pair = [await stack.enter_async_context(await EtcdStore.open(config)) for _ in range(2)]
            yield pair[0], pair[1]
        else:
            store = await stack.enter_async_context(await EmbeddedStore.open(tmp_path / "metadata.db"))
            yield store, store


async def test_brokers_see_each_other_come_stop_and_come_back(
    stores: tuple[MetadataStore, MetadataStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "PULSE_MS", 100)
    async with alive(stores[0], "us-east", "b1", tmp_path / "b1") as first:
        async with alive(stores[1], "us-east", "b2", tmp_path / "b2") as second:
            await until(lambda: first.sees == second.sees == {"b1": 1, "b2": 1})
            await until(lambda: first.registry.may_answer() and second.registry.may_answer())
            await until(
                lambda: (
                    [b for b, record in first.mirror.view.pulses.items() if record.pulse >= 2] == ["b1", "b2"]
                )
            )
        await until(lambda: first.sees == {"b1": 1})
        assert first.mirror.view.nodes["b2"].clean == 1
        async with alive(stores[1], "us-east", "b2", tmp_path / "b2", lock="another machine"):
            await until(lambda: first.sees == {"b1": 1, "b2": 2})


@pytest.mark.etcd
async def test_a_second_process_under_one_name_is_refused_and_takes_over_once_the_lease_has_ended(
    etcd: EtcdProcess, tmp_path: Path
) -> None:
    config = EtcdConfig((etcd.endpoint,))
    async with (
        await EtcdStore.open(config) as store,
        await EtcdStore.open(config) as other,
        alive(store, "eu-west", "b1", tmp_path / "b1", in_order=False) as first,
    ):
        shutil.copytree(tmp_path / "b1", tmp_path / "copy")
        with pytest.raises(UnavailableError, match="alive on h1") as refused:
            async with alive(other, "eu-west", "b1", tmp_path / "copy"):
                pass
        assert refused.value.code is Code.SERVED_ELSEWHERE
        await until(first.registry.may_answer)
        # It hangs: nothing is renewed, and nothing said.
        for task in first.registry._tasks:
            task.cancel()
        assert first.registry._lease is not None
        first.registry._lease.lose("It hangs.")
        async with alive(other, "eu-west", "b1", tmp_path / "copy") as second:
            await until(lambda: second.sees == {"b1": 2})
            assert not first.registry.may_answer()


@pytest.mark.etcd
@pytest.mark.fault
async def test_an_etcd_that_is_killed_and_restarted_keeps_the_brokers_and_one_that_hangs_fences_them(
    tmp_path: Path,
) -> None:
    process = EtcdProcess(tmp_path)
    process.start()
    try:
        config = EtcdConfig((process.endpoint,), request_ms=500)
        async with (
            await EtcdStore.open(config) as store,
            await EtcdStore.open(config) as other,
            alive(store, "us-east", "b1", tmp_path / "b1") as first,
        ):
            process.kill()
            await started_again(process, other)
            # Its watch goes on: it sees one that comes only now.
            async with alive(other, "us-east", "b2", tmp_path / "b2"):
                await until(lambda: first.sees == {"b1": 1, "b2": 1} and first.registry.may_answer())
                process.freeze()
                await until(lambda: not first.registry.may_answer())
                assert first.sees == {"b1": 1, "b2": 1}, "nobody can have been told that it is gone"
                refused = first.registry.refusal()
                assert refused is not None and refused.code is Code.NOT_LEADER
                process.thaw()
                await until(lambda: first.registry.may_answer() and first.sees == {"b1": 1, "b2": 1})
                assert first.registry.registration == 1
    finally:
        process.stop()


@pytest.mark.etcd
@pytest.mark.fault
async def test_r10_an_etcd_that_was_put_back_from_a_backup_is_known_by_the_folders(tmp_path: Path) -> None:
    process = EtcdProcess(tmp_path)
    process.start()
    try:
        async with await EtcdStore.open(EtcdConfig((process.endpoint,), request_ms=500)) as store:
            async with alive(store, "us-east", "b1", tmp_path / "b1"):
                pass
            process.kill()
            shutil.copytree(tmp_path / "data", tmp_path / "backup")
            await started_again(process, store)
            async with alive(store, "us-east", "b1", tmp_path / "b1") as broker:
                assert broker.registry.registration == 2
                process.kill()
                shutil.rmtree(tmp_path / "data")
                shutil.move(tmp_path / "backup", tmp_path / "data")
                await asyncio.to_thread(process.start)
                await until(lambda: "older than the data folder" in str(broker.registry.refusal()))
                assert "b1" not in broker.sees
    finally:
        process.stop()
