"""What goes wrong around a broker: ports in use, locks, damaged segments, full disks; and what it says of itself."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
import pytest
from ports import claim_port
from region_home import forget_other_data, make_region, running
from region_peer import batch_frame, client, raw_peer, take, until
from small_disk import fill, small_disk

import felix
from felix import Code, Durability, RequestError, Retention, UnavailableError
from felix.address import Address
from felix.errors import AddressInUseError
from felix.messages import OpenPublisher
from region.config import load_config
from region.folder import RegionFolder
from region.node import Node

CREW = "acme/ops/crew"
OTHER = "acme/ops/plan"


def fetch(node: Node, path: str) -> tuple[int, str]:
    assert node.health is not None
    host, port = node.health.address
    try:
        with urlopen(f"http://{host}:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


async def figures(node: Node) -> dict[str, float]:
    status, page = await asyncio.to_thread(fetch, node, "/metrics")
    assert status == 200
    found = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


async def test_metrics_show_what_is_used_beside_what_is_allowed(folder: RegionFolder, tmp_path: Path) -> None:
    async with (
        running(folder, data=str(tmp_path / "data"), health=Address("127.0.0.1", 0)) as node,
        client(folder) as region,
    ):
        assert await asyncio.to_thread(fetch, node, "/livez") == (200, '{"ok": true, "reason": ""}\n')
        assert (await asyncio.to_thread(fetch, node, "/readyz"))[0] == 200
        assert (await asyncio.to_thread(fetch, node, "/other"))[0] == 404
        await region.create_stream(CREW, shards=2)
        await region.stream(CREW).publish_many([b"x"] * 100)
        async with region.stream(CREW).subscribe("earliest") as reader:
            await take(reader, 100)
            found = await figures(node)
        with suppress(RequestError):
            await region.describe_stream("acme/ops/crow")
        for name in ("publish_bytes", "delivery_bytes", "catch_up_bytes", "ring_bytes", "sessions"):
            assert 0 <= found[f"felix_{name}"] <= found[f"felix_{name}_limit"]
        assert found["felix_sessions"] == 1
        assert found["felix_subscriptions"] == 1
        assert found["felix_delivered_records_total"] == 100
        shards = [found[f'felix_shard_appended_records{{shard="{n}",stream="{CREW}"}}'] for n in (0, 1)]
        assert sum(shards) == 100
        for name in ("ring_bytes", "pending_bytes"):
            label = f'{{shard="0",stream="{CREW}"}}'
            assert found[f"felix_shard_{name}{label}"] <= found[f"felix_shard_{name}_limit{label}"]
        assert (await figures(node))['felix_refusals_total{code="not_found_or_forbidden"}'] == 1
        node.broker.leaving = True
        status, body = await asyncio.to_thread(fetch, node, "/readyz")
        assert (status, json.loads(body)["reason"]) == (503, "the broker is shutting down")
        assert (await asyncio.to_thread(fetch, node, "/livez"))[0] == 200


async def test_ports_in_use_are_said_so_and_leave_nothing(folder: RegionFolder, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    port = claim_port()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(RequestError, match=f"Cannot listen on 127.0.0.1:{port}") as caught:
            async with running(folder, data=data, listen=Address("127.0.0.1", port)):
                pass
        assert caught.value.hint
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        health = Address("127.0.0.1", other.getsockname()[1])
        with pytest.raises(AddressInUseError) as clash:
            async with running(folder, data=data, health=health):
                pass
        assert (clash.value.address, clash.value.transport) == (str(health), "TCP")
    async with running(folder, data=data), client(folder) as region:
        await region.create_stream(CREW)


async def test_two_brokers_cannot_share_a_folder(folder: RegionFolder, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data) as node, client(folder) as region:
        config = msgspec.structs.replace(node.config, listen=Address("127.0.0.1", 0))
        with pytest.raises(UnavailableError, match=f"in use by another process, pid {os.getpid()}") as caught:
            await Node.start(folder, config)
        assert caught.value.code is Code.CONFLICT
        await region.create_stream(CREW)


async def test_a_flipped_bit_stops_its_shard_and_no_other(folder: RegionFolder, tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running(folder, data=str(data)), client(folder) as region:
        await region.create_stream(CREW, shards=2)
        async with region.stream(CREW).publisher() as publisher:
            for shard in (0, 1):
                for _ in range(20):
                    await publisher.publish_batch([felix.NewRecord(bytes(1000))], shard)
    (segment,) = (data / "streams").glob("*/00000/*.seg")
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    segment.write_bytes(damaged)
    async with (
        running(folder, data=str(data), health=Address("127.0.0.1", 0)) as node,
        client(folder) as region,
    ):
        state = await region.describe_stream(CREW)
        assert segment.name in state.state[0].stopped
        assert not state.state[1].stopped
        found = await figures(node)
        assert found[f'felix_shard_stopped{{shard="0",stream="{CREW}"}}'] == 1
        assert found[f'felix_shard_stopped{{shard="1",stream="{CREW}"}}'] == 0
        async with region.stream(CREW).subscribe("earliest", shards=[1]) as reader:
            assert len(await take(reader, 20)) == 20
        publisher = region.stream(CREW).publisher(deadline_ms=500)
        await publisher.open()
        await publisher.publish_batch([felix.NewRecord(b"x")], 1)
        with pytest.raises(UnavailableError):
            await publisher.publish_batch([felix.NewRecord(b"x")], 0)
        publisher.abort()
        with pytest.raises(UnavailableError, match="does not serve") as caught:
            async with region.stream(CREW).subscribe("earliest", shards=[0]) as reader:
                await take(reader, 1)
        assert caught.value.code is Code.SHARD_STOPPED


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "24m") as folder:
        yield folder


async def test_a_full_disk_refuses_writes_and_serves_reads(folder: RegionFolder, disk: Path) -> None:
    async with running(folder, data=str(disk / "data")) as node, client(folder) as region:
        await region.create_stream(CREW)
        written = 0
        refusals: list[felix.FelixError] = []
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(10 << 20))
        publisher = region.stream(CREW).publisher(deadline_ms=700)
        await publisher.open()
        async with asyncio.timeout(120):
            while not refusals:
                try:
                    await publisher.publish(bytes(500_000))
                    written += 1
                except UnavailableError as error:
                    refusals.append(error)
        publisher.abort()
        assert refusals[0].code in (Code.DISK_FULL, Code.TIMEOUT)
        async with raw_peer(folder, node.address) as peer:
            stream = peer.open_stream()
            await peer.ask(OpenPublisher(CREW), 1, stream)
            peer.send(batch_frame([bytes(900_000)], 2), stream)
            await until(lambda: peer.errors(2))
            (refusal,) = peer.errors(2)
            assert refusal.code is Code.DISK_FULL
            assert isinstance(refusal, UnavailableError)
            assert refusal.hint or refusal.retry_after_ms
        assert written > 4
        async with region.stream(CREW).subscribe("earliest") as reader:
            assert len(await take(reader, written)) == written
        refused = (await region.describe()).gauges
        assert refused["sessions"] == 1
        ballast.unlink()
        async with region.stream(CREW).publisher(deadline_ms=30_000) as again:
            offset = await again.publish(b"there is room")
        assert offset >= written
        async with region.stream(CREW).subscribe(offset) as reader:
            assert bytes((await take(reader, 1))[0].payload) == b"there is room"


async def test_on_a_full_disk_streams_are_altered_and_deleted_which_makes_room(
    folder: RegionFolder, disk: Path
) -> None:
    async with running(folder, data=str(disk / "data")) as node, client(folder) as region:
        await region.create_stream(CREW)
        await region.create_stream(OTHER)
        async with region.stream(CREW).publisher() as publisher:
            for _ in range(8):
                await publisher.publish(bytes(500_000))
        fill(disk)
        publisher = region.stream(OTHER).publisher(deadline_ms=700)
        await publisher.open()
        with pytest.raises(UnavailableError):
            for _ in range(200):
                await publisher.publish(bytes(100_000))
        publisher.abort()
        for hours in range(1, 200):
            changed = await region.alter_stream(CREW, retention=Retention(age_ms=hours * 3_600_000))
        assert changed.retention.age_ms == 199 * 3_600_000
        await region.delete_stream(CREW)
        async with region.stream(OTHER).publisher(deadline_ms=30_000) as again:
            assert await again.publish(b"there is room") >= 0
        assert node.address
    async with running(folder, data=str(disk / "data")), client(folder) as region:
        assert [state.stream async for state in region.list_streams()] == [OTHER]


CANARY = b"canary:7f3a9c51-de41-4b0e-9f64-4f3d0c5a11aa"
"""In every record of the stream; longer than base64 can hide at any of its three alignments."""


def traces(data: bytes) -> bool:
    """The canary in any of the forms in which somebody might have written it."""
    forms = [CANARY, CANARY.hex().encode(), CANARY.hex().upper().encode()]
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + CANARY)
        forms.append(encoded[4:-4])
        forms.append(base64.urlsafe_b64encode(bytes(shift) + CANARY)[4:-4])
    return any(form in data for form in forms)


async def test_keys_rotate_under_load_and_nothing_is_ever_written_in_the_clear(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    count = 1500
    async with running(folder), client(folder) as region, client(folder) as operator:
        await region.create_stream(CREW, shards=2)
        await region.create_stream("acme/ops/often", durability=Durability("interval", 20))
        readers = [region.stream(name).subscribe("earliest") for name in (CREW, "acme/ops/often")]

        async def publish(name: str) -> None:
            async with region.stream(name).publisher(batch_records=20) as publisher:
                for at in range(count):
                    await publisher.send(CANARY + b" %d" % at, CANARY + b"%d" % (at % 7), {"h": CANARY})
                    if not at % 20:
                        await asyncio.sleep(0.001)

        async def rotate() -> None:
            for at in range(6):
                await asyncio.sleep(0.02)
                await operator.rotate_keys("data" if at % 3 else "root")

        outcome = await asyncio.gather(
            publish(CREW), publish("acme/ops/often"), rotate(), *(take(reader, count) for reader in readers)
        )
        for records in outcome[3:]:
            assert records is not None
            assert len({bytes(record.payload) for record in records}) == count
        for reader in readers:
            await reader.close()
        keys = await operator.list_keys()
        assert sum(key.level == "root" for key in keys) >= 2
        assert len([key for key in keys if key.level == "data"]) > 3
        scanned, files = scan(folder.root)
    async with running(folder), client(folder) as region:
        async with region.stream(CREW).subscribe("earliest") as reader:
            again = await take(reader, count)
        assert {bytes(record.payload) for record in again} == {CANARY + b" %d" % n for n in range(count)}
    after, _ = scan(folder.root)
    assert scanned > 2 * count * len(CANARY)
    assert after >= scanned // 2
    assert files > 10
    assert traces(b"x" + CANARY)
    assert traces(base64.b64encode(b"ab" + CANARY + b"c"))


def scan(root: Path) -> tuple[int, int]:
    """Bytes and files looked through; none may hold a canary."""
    size = files = 0
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            assert not traces(data), path
            size += len(data)
            files += 1
    return size, files


async def test_a_broker_stopped_twice_leaves_no_task_behind(folder: RegionFolder, tmp_path: Path) -> None:
    config = msgspec.structs.replace(load_config(folder.config), data=str(tmp_path / "data"))
    forget_other_data(folder, config)
    node = await Node.start(folder, config)
    await node.stop()
    await node.stop()
    await until(lambda: not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()])


@pytest.mark.parametrize(
    ("number", "why", "code"),
    [
        (errno.ENOSPC, "disk is full", Code.DISK_FULL),
        (errno.EIO, "disk failed", Code.UNAVAILABLE),
        (errno.EMFILE, "too many files open", Code.UNAVAILABLE),
    ],
)
async def test_a_request_that_the_disk_does_not_answer_is_told_so_and_logged_once(
    folder: RegionFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    why: str,
    code: Code,
) -> None:
    async def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/data/file")

    async with running(folder, data=str(tmp_path / "data")) as node, client(folder) as region:
        with monkeypatch.context() as patched:
            patched.setattr(node.broker.catalog, "create_stream", full)
            for _ in range(3):
                with pytest.raises(UnavailableError, match=why) as caught:
                    await region.create_stream(CREW)
                assert caught.value.code is code
                assert caught.value.retry_after_ms
        await region.create_stream(CREW)
    said = [each for each in caplog.records if "for want of the disk" in each.getMessage()]
    assert len(said) == 1
    assert not any(each.exc_info for each in caplog.records)
