"""Of several brokers: one whose folder of streams is not mounted does not start, so that nobody follows its empty copies; nor does one that alone has the audit log, where that is not. And no command takes an
empty folder for what was in it."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster.audited import verified
from cluster.clustered_region import serving
from cluster.test_copying_audit_log import LEAVES, copied, one_disk
from etcd_process import EtcdProcess, etcd_of_each_test
from ports import claim_port
from region_home import make_region, running
from region_peer import client, payloads
from small_disk import small_disk

from cli.conversion import convert
from cli.reconcile import _heard
from felix.address import Address
from felix.errors import RequestError, UnavailableError
from region.config import load_config
from region.folder import AUDIT, STREAMS
from region.node import Node

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd
STREAM = "acme/ops/orders"


async def test_a_folder_of_streams_that_is_not_mounted_is_no_copy(tmp_path: Path, etcd: EtcdProcess) -> None:
    wanted = [b"%d" % number for number in range(20)]
    async with serving(tmp_path, etcd, 3) as region:
        async with region.client("b1") as client:
            await client.create_stream(STREAM, replicas=3)
            for payload in wanted:
                await client.stream(STREAM).publish(payload)
            await region.in_sync("b1", STREAM)
        leader = region.leader("b1", STREAM)
        others = [name for name in region.names if name != leader]
        await region.stop(*others)
        await region.stop(leader)
        config = region.config.of_broker(leader)
        place = region.folder.root / config.data / STREAMS
        away = place.rename(tmp_path / "away")
        place.mkdir()
        with pytest.raises(UnavailableError, match=f"{place} is empty, and was not") as refused:
            await Node.start(region.folder, config)
        assert f"--broker {leader} --replace-folder" in refused.value.hint
        with ExitStack() as held, pytest.raises(UnavailableError, match=f"{place} is empty, and was not"):
            _heard(region.folder, region.config, held)
        await region.start(*others)
        async with region.client(others[0]) as client:
            assert await payloads(client, STREAM, 20) == wanted
        place.rmdir()
        away.rename(place)
        await region.start(leader)
        async with region.client(leader) as client:
            await region.in_sync(leader, STREAM)
            assert await payloads(client, STREAM, 20) == wanted


async def test_an_audit_log_that_one_broker_alone_has_is_not_begun_anew_and_no_empty_folder_is_signed_for_it(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with one_disk(tmp_path, etcd) as region:
        place = region.folder.root / region.config.of_broker("b1").data / AUDIT
        away = place.rename(tmp_path / "away")
        place.mkdir()
        for starts in (region.start("b1"), copied(region, etcd), copied(region, etcd, dry_run=True)):
            with pytest.raises(UnavailableError, match=f"{place} is empty, and was not"):
                await starts
        # With a release of before, nobody remembers it.
        memory = place.with_name("audit.begun")
        told = memory.read_text()
        memory.unlink()
        with pytest.raises(RequestError, match="There is no audit log in"):
            await copied(region, etcd)
        memory.write_text(told)
        assert list(place.iterdir()) == []
        place.rmdir()
        away.rename(place)
        assert (await copied(region, etcd)).leaves == LEAVES
        await region.start("b1")
        await region.stop()
        assert len(verified(region, "b1")) == LEAVES


@pytest.mark.parametrize("name", ["data", "data/streams", "data/audit"])
async def test_a_region_is_not_converted_while_a_folder_of_it_is_not_mounted(
    tmp_path: Path, name: str
) -> None:
    folder = make_region(tmp_path, "us-east")
    config = load_config(folder.config)
    async with running(folder), client(folder) as region:
        await region.create_stream(STREAM)
        await region.stream(STREAM).publish(b"0")
    place = folder.root / name
    away = place.rename(tmp_path / "away")
    (place / "streams" if name == "data" else place).mkdir(parents=True)
    with pytest.raises(UnavailableError, match=f"{place} is empty"):
        await convert(folder, config, Address("127.0.0.1", claim_port()))
    assert not (folder.root / "data" / config.broker).exists()
    shutil.rmtree(place)
    away.rename(place)
    async with running(folder), client(folder) as region:
        assert await payloads(region, STREAM, 1) == [b"0"]


async def test_a_region_is_not_converted_while_a_disk_is_mounted_in_its_data_folder(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    config = load_config(folder.config)
    place = folder.root / "data" / "streams"
    place.mkdir(parents=True)
    with small_disk(place, "64m"):
        async with running(folder), client(folder) as region:
            await region.create_stream(STREAM)
            await region.stream(STREAM).publish(b"0")
        with pytest.raises(RequestError, match=f"A disk is mounted at {place}"):
            await convert(folder, config, Address("127.0.0.1", claim_port()))
        assert not (folder.root / "data" / config.broker).exists()
        async with running(folder), client(folder) as region:
            assert await payloads(region, STREAM, 1) == [b"0"]
