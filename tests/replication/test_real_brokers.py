"""The same brokers on real files, real QUIC and a real store: SQLite, and etcd. A leader that is gone is followed by another one."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest
from etcd_process import EtcdProcess, etcd_of_each_test
from ports import claim_port
from replication.replicated_region import NAMES, STREAM, Broker, Region

from felix.batch import NewRecord, encode_batch
from felix.errors import UnavailableError
from felix.runtime.real import REAL
from felix.storage.disk import DiskFiles
from felix.transport.port import engine_named
from region.cluster import registry as cluster_registry
from region.cluster.controller import StreamWish
from region.log.point import LogPoint
from region.metadata.embedded import EmbeddedStore
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.port import MetadataStore

__all__ = ["etcd_of_each_test"]  # the fixture


class FillingFiles(DiskFiles):
    """A disk that is full while it is said to be."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(descriptor, buffers, position)


class RealRegion(Region):
    """All in this process; a broker that is gone has said nothing to anybody, and synced nothing."""

    def __init__(self, store: MetadataStore, folder: Path) -> None:
        super().__init__(store, Random(1))
        self._addresses = {name: ("127.0.0.1", claim_port()) for name in NAMES}
        self.files = {name: FillingFiles() for name in NAMES}
        for name, machine in self.machines.items():
            machine.folder = folder / name

    async def start(self, *names: str) -> None:
        for name in names or NAMES:
            machine = self.machines[name]
            broker = Broker(
                machine,
                self.store,
                engine_named(),
                self.files[name],
                REAL,
                len(self.shards),
                self._addresses[name],
            )
            await broker.start()
            self.running[name] = broker
        wish = StreamWish(STREAM, "acme/test/orders", shards=len(self.shards), replicas=3, min=2)
        for broker in self.running.values():
            broker.controller.want([wish], {})

    async def end(self, name: str) -> None:
        await self.running.pop(name).close(in_order=False)


@pytest.fixture(params=["embedded", pytest.param("etcd", marks=pytest.mark.etcd)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MetadataStore]:
    async with AsyncExitStack() as stack:
        if request.param == "etcd":
            process: EtcdProcess = request.getfixturevalue("etcd")
            yield await stack.enter_async_context(await EtcdStore.open(EtcdConfig((process.endpoint,))))
        else:
            yield await stack.enter_async_context(await EmbeddedStore.open(tmp_path / "metadata.db"))


async def test_a_leader_that_is_gone_is_followed_and_comes_back_as_a_follower(
    store: MetadataStore, tmp_path: Path
) -> None:
    region = RealRegion(store, tmp_path)
    await region.start()
    await region.well()
    region.append_all_the_time()
    await region.until(lambda: region.acknowledged() > 30)
    leader = region.leader(region.shards[0])
    assert leader is not None
    await region.end(leader.name)
    before = region.acknowledged()
    await region.until(lambda: region.acknowledged() > before + 30)
    await region.start(leader.name)
    await region.no_more_appends()
    await region.well()
    region.check()
    await asyncio.gather(*(broker.close() for broker in region.running.values()))


async def test_a_leader_whose_disk_is_full_has_another_one_lead_and_follows_once_there_is_room(
    store: MetadataStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(cluster_registry, "PULSE_MS", 200)
    region = RealRegion(store, tmp_path)
    await region.start()
    await region.well()
    region.append_all_the_time()
    await region.until(lambda: region.acknowledged() > 30)
    leader = region.leader(region.shards[0])
    assert leader is not None
    region.files[leader.name].is_full = True
    await region.until(lambda: region.leader(region.shards[0]) not in (None, leader))
    before = region.acknowledged()
    await region.until(lambda: region.acknowledged() > before + 30)
    # By what is written first: records wait for room, and where a log's mark finds none the log is opened again, again and again.
    full = ("its disk is full", "No space left on device")
    await region.until(lambda: any(said in alarm for said in full for alarm in leader.host.alarms.values()))
    await asyncio.sleep(1)
    region.files[leader.name].is_full = False
    await region.no_more_appends()
    await region.well()
    await region.until(lambda: not leader.host.alarms)
    region.check()
    said = [record for record in caplog.records if "pulse" in record.getMessage()]
    assert [record.exc_info for record in said] == [None, None] and "tried again" in said[0].getMessage()
    assert "failed" not in " ".join(leader.host.alarms.values())
    await asyncio.gather(*(broker.close() for broker in region.running.values()))


async def test_a_deposed_leader_hears_nobody_until_what_a_thread_was_writing_is_told(tmp_path: Path) -> None:
    """An append is in a thread's hands when its leader gives up: the file has what the core does not know of yet."""
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        region = RealRegion(store, tmp_path)
        await region.start()
        await region.well()
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        hosted = leader.host._hosted[shard]
        disk = hosted.workers[0].disk.log
        begun, goes_on, write = Event(), Event(), disk.write

        def slow_write(*arguments: Any, **more: Any) -> None:
            begun.set()
            assert goes_on.wait(120)
            write(*arguments, **more)

        disk.write = slow_write  # type: ignore[method-assign]
        answer = asyncio.ensure_future(leader.append(shard, 0, encode_batch([NewRecord(b"late")])))
        await region.until(begun.is_set)
        waiting = asyncio.ensure_future(leader.append(shard, 0, encode_batch([NewRecord(b"behind")])))
        await asyncio.sleep(0)
        leader.host.give_up("drain")
        await region.until(lambda: region.leader(shard) not in (None, leader))
        new = region.leader(shard)
        assert new is not None
        await region.until(lambda: new.host.serves(shard))
        assert hosted.core.replica.logs[0].end == LogPoint(0)
        await region.until(lambda: (shard, 0) in new.logs)
        newer = asyncio.ensure_future(new.append(shard, 0, encode_batch([NewRecord(b"new")])))
        await region.until(lambda: new.host._hosted[shard].core.replica.logs[0].durable == LogPoint(1))
        goes_on.set()
        with pytest.raises(UnavailableError, match="may be in the log or not"):
            await answer
        with pytest.raises(UnavailableError, match="not written"):
            await waiting
        assert await newer == LogPoint(1)
        await region.well()
        region.check()
        assert not leader.host.alarms
        await asyncio.gather(*(broker.close() for broker in region.running.values()))
