"""A broker whose metadata store or key file stands on a disk that fails for a moment: what goes on, what is told, and that nobody has to restart it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sqlite3
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from region_home import running, us_east
from region_peer import client, until

import felix.reopening
import region.node
from felix.address import Address
from felix.errors import UnavailableError
from region.metadata.embedded import EmbeddedStore
from region.node import Node

CREW, PLAN = "acme/ops/crew", "acme/ops/plan"
HEALTH = Address("127.0.0.1", 0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(felix.reopening, "REOPEN_MS_MIN", 1_500)
    monkeypatch.setattr(region.node, "LOOK_S", 0.05)


def store_of(node: Node) -> EmbeddedStore:
    files = node.broker.own_files
    assert files is not None and isinstance(files._store, EmbeddedStore)
    return files._store


async def page(node: Node, path: str) -> str:
    assert node.health is not None
    host, port = node.health.address

    def read() -> str:
        try:
            with urlopen(f"http://{host}:{port}{path}", timeout=20) as answer:
                return str(answer.read().decode())
        except HTTPError as error:
            return str(error.read().decode())

    return await asyncio.to_thread(read)


async def why_not_ready(node: Node) -> str:
    return str(json.loads(await page(node, "/readyz"))["reason"])


async def metric(node: Node, name: str) -> float:
    return next(
        float(line.rpartition(" ")[2])
        for line in (await page(node, "/metrics")).splitlines()
        if line.startswith(f"felix_{name} ")
    )


def disk_error(_: object = None) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    raise error


async def test_streams_go_on_while_the_metadata_store_is_stopped_and_it_is_told_until_it_is_open_again(
    tmp_path: Path,
) -> None:
    folder = us_east(tmp_path)
    async with running(folder, health=HEALTH) as node, client(folder) as region:
        await region.create_stream(CREW)
        crew = region.stream(CREW)
        await crew.publish(b"1")
        assert not await why_not_ready(node) and not await metric(node, "metadata_failed")
        with pytest.raises(UnavailableError):
            await store_of(node)._in_worker(disk_error)
        for told in (await why_not_ready(node), *(await region.describe()).alarms):
            assert "metadata.db" in told and "opened again by itself" in told and "disk I/O error" in told
        assert await metric(node, "metadata_failed") == 1
        await crew.publish(b"2")
        with pytest.raises(UnavailableError) as refused:
            await region.create_stream(PLAN)
        assert refused.value.retry_after_ms
        await until(lambda: store_of(node).opened_again)
        await region.create_stream(PLAN)
        await region.delete_stream(CREW)
        assert not await why_not_ready(node) and not (await region.describe()).alarms
        assert (await metric(node, "metadata_failed"), await metric(node, "metadata_opened_again")) == (0, 1)
    async with running(folder), client(folder) as region:
        assert [each.stream async for each in region.list_streams()] == [PLAN]


async def test_a_metadata_store_that_waits_for_its_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("felix.storage.disk_waits.HUNG_S", 0.2)
    folder, goes_on = us_east(tmp_path), threading.Event()
    async with running(folder, health=HEALTH) as node, client(folder) as region:
        hanging = asyncio.ensure_future(store_of(node)._in_worker(lambda _: goes_on.wait()))
        making = asyncio.ensure_future(region.create_stream(CREW))
        await until(lambda: store_of(node).hung())
        assert "waits for its disk" in await why_not_ready(node)
        assert "waits for its disk" in " ".join((await region.describe()).alarms)
        assert await metric(node, "metadata_failed") == 1
        await until(lambda: "waits for its disk" in caplog.text)
        goes_on.set()
        await hanging
        await making
        assert not await why_not_ready(node)
        await until(lambda: "answers again" in caplog.text)


async def test_publishers_wait_while_the_key_file_takes_no_keys_and_go_on_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fails = us_east(tmp_path), 0

    def fdatasync(file: int, sync=os.fdatasync) -> None:  # type: ignore[no-untyped-def]
        nonlocal fails
        if fails and os.readlink(f"/proc/self/fd/{file}").endswith("keys.log"):
            fails -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(file)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    async with running(folder, health=HEALTH) as node, client(folder) as region:
        await region.create_stream(CREW)
        crew = region.stream(CREW)
        await crew.publish(b"1")
        await region.rotate_keys("data")
        fails = 1
        publishing = asyncio.ensure_future(crew.publish(b"2"))
        await until(lambda: not fails)
        await until(lambda: node.broker.own_files and node.broker.own_files.problems())
        for told in (await why_not_ready(node), *(await region.describe()).alarms):
            assert "keys.log" in told and "written anew by itself" in told
        assert await metric(node, "keys_failed") == 1
        with pytest.raises(UnavailableError):
            await region.rotate_keys("root")
        assert not publishing.done()
        await publishing
        assert not await why_not_ready(node)
        assert (await metric(node, "keys_failed"), await metric(node, "keys_opened_again")) == (0, 1)
        await region.rotate_keys("root")
        await crew.publish(b"3")
    async with running(folder), client(folder) as region:
        records = []
        async with region.stream(CREW).subscribe(start="earliest") as read:
            async for record in read:
                records.append(record.payload)
                if len(records) == 3:
                    break
        assert records == [b"1", b"2", b"3"]
