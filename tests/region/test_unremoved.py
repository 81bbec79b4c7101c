"""A stream is deleted while the disk does not remove its records: it is deleted all the same, and they go by themselves once the disk works."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from region_home import running, us_east
from region_peer import client, until

from felix import RequestError
from region.folder import RegionFolder
from region.streams import follower as stream_follower

ORDERS = "acme/ops/orders"


@pytest.fixture
def folder(tmp_path: Path) -> RegionFolder:
    return us_east(tmp_path)


class Disk:
    """Calls that fail while it is broken."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.is_broken = False

    def fails(self, module: Any, name: str, at: Callable[[str], bool]) -> None:
        real = getattr(module, name)

        def call(path: Any, *rest: Any, **more: Any) -> Any:
            told = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else f"{path} {rest[:1]}"
            if self.is_broken and at(told):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *rest, **more)

        self._patch.setattr(module, name, call)


@pytest.mark.parametrize("what", ["rename", "sync", "remove"])
async def test_records_that_the_disk_does_not_remove_go_once_it_works(
    folder: RegionFolder, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(stream_follower, "RETRY_S", 0.1)
    streams, disk = folder.root / "data" / "streams", Disk(monkeypatch)

    def left() -> list[str]:
        return [path.name for path in streams.iterdir() if path.is_dir()]

    async with running(folder) as node, client(folder) as region:
        await region.create_stream(ORDERS)
        await region.stream(ORDERS).publish(b"record")
        if what == "rename":
            for name in ("rename", "replace"):
                disk.fails(os, name, lambda path: ".deleted" in path)
        elif what == "sync":
            disk.fails(os, "fsync", lambda path: path == str(streams))
        else:
            disk.fails(shutil, "rmtree", lambda path: ".deleted" in path)
        disk.is_broken = True
        said = await region.delete_stream(ORDERS)
        assert "is deleted. Its records are not removed from the disk yet" in said
        assert "is destroyed" in said, "nobody reads them, wherever they are"
        with pytest.raises(RequestError, match="There is no stream"):
            await region.describe_stream(ORDERS)
        assert len(left()) == 1
        (problem,) = node.broker.streams.disks.problems()
        assert f"the records of {ORDERS}, which is deleted, are not removed" in problem
        # Another one of the name is nothing to them.
        await region.create_stream(ORDERS)
        disk.is_broken = False
        await until(lambda: len(left()) == 1 and not node.broker.streams.disks.problems())
        async with client(folder) as other:
            await other.stream(ORDERS).publish(b"new")
            assert (await other.describe_stream(ORDERS)).state[0].high_watermark == 1


async def test_a_broker_starts_on_a_disk_that_does_not_remove_what_was_deleted(
    folder: RegionFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_follower, "RETRY_S", 0.1)
    streams, disk = folder.root / "data" / "streams", Disk(monkeypatch)
    for name in ("rename", "replace"):
        disk.fails(os, name, lambda path: ".deleted" in path)
    async with running(folder), client(folder) as region:
        await region.create_stream(ORDERS)
        await region.stream(ORDERS).publish(b"record")
        disk.is_broken = True
        await region.delete_stream(ORDERS)
    async with running(folder) as node:
        assert node.broker.streams.disks.unremoved
        disk.is_broken = False
        await until(lambda: not node.broker.streams.disks.unremoved)
    assert not [path.name for path in streams.iterdir() if path.is_dir()]
