"""Brokers on one etcd: a second one is refused, and one that etcd does not know any more writes nothing until it does."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from audit_log import Link
from etcd_process import EtcdProcess
from region_home import running
from region_peer import client, take, until
from region_process import BrokerProcess, fixed_region

from audit.errors import AuditUnavailableError
from felix import Code, UnavailableError
from felix.names import StreamName
from policy.quantity import Duration
from region.config import MetadataConfig
from region.folder import RegionFolder

pytestmark = pytest.mark.etcd
CREW = "acme/ops/crew"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    folder = tmp_path / "etcd"
    folder.mkdir()
    process = EtcdProcess(folder)
    process.start()
    try:
        yield process
    finally:
        process.stop()


async def test_a_second_broker_is_refused_and_one_that_etcd_forgot_writes_nothing_until_it_is_back(
    etcd: EtcdProcess, tmp_path: Path
) -> None:
    folder = fixed_region(tmp_path)
    metadata = MetadataConfig(kind="etcd", endpoints=(etcd.endpoint,), lease=Duration(2_000))
    async with running(folder, metadata=metadata) as node, client(folder) as region:
        await region.create_stream(CREW)
        stream = region.stream(CREW)
        await stream.publish(b"before")
        hosted = node.broker.streams.get(StreamName.parse(CREW))
        assert hosted is not None
        shard, trail = hosted.serving[0], node.services.governance.trail

        copied = tmp_path / "copy" / folder.root.name
        await asyncio.to_thread(shutil.copytree, folder.root, copied)
        with pytest.raises(UnavailableError, match="Another broker serves us-east: broker b1") as refused:
            async with running(RegionFolder(copied), metadata=metadata):
                pass
        assert refused.value.code is Code.SERVED_ELSEWHERE

        etcd.freeze()
        await until(lambda: shard.held_back() is not None, 120)
        with pytest.raises(UnavailableError, match="another broker may serve us-east") as unwritten:
            await shard.append(None, annotation=b"x")
        assert unwritten.value.code is Code.NOT_LEADER
        assert isinstance(trail.failure, AuditUnavailableError), "nothing crosses"
        with pytest.raises(AuditUnavailableError, match="another broker may serve us-east"):
            await trail.append([Link().grant()])
        assert "another broker may serve" in node._parts.may_not_write()
        async with stream.subscribe("earliest") as reader:
            assert [bytes(record.payload) for record in await take(reader, 1)] == [b"before"], "reads go on"
        waiting = asyncio.ensure_future(stream.publish(b"after"))

        etcd.thaw()
        await asyncio.wait_for(waiting, 60)
        assert trail.failure is None and not node._parts.may_not_write()
        async with stream.subscribe("earliest") as reader:
            assert [bytes(record.payload) for record in await take(reader, 2)] == [b"before", b"after"]


async def test_the_same_folder_is_let_in_at_once_after_a_kill(etcd: EtcdProcess, tmp_path: Path) -> None:
    # A lease of an hour: a broker that waited for it would not come up in time.
    folder = fixed_region(tmp_path)
    etcd_settings = f"kind: etcd\n  endpoints: ['{etcd.endpoint}']\n  lease: 1h"
    folder.config.write_text(folder.config.read_text().replace("kind: embedded", etcd_settings))
    broker = BrokerProcess(folder, tmp_path)
    try:
        await asyncio.to_thread(broker.wait)
        broker.kill()
        broker = BrokerProcess(folder, tmp_path)
        await asyncio.to_thread(broker.wait)
    finally:
        broker.kill()
