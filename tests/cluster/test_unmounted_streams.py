"""A broker whose folder of streams is not mounted does not start, so that nobody follows its empty copies."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.clustered_region import serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import payloads

from felix.errors import UnavailableError
from region.inventory import STREAMS
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
        await region.start(*others)
        async with region.client(others[0]) as client:
            assert await payloads(client, STREAM, 20) == wanted
        place.rmdir()
        away.rename(place)
        await region.start(leader)
        async with region.client(leader) as client:
            await region.in_sync(leader, STREAM)
            assert await payloads(client, STREAM, 20) == wanted
