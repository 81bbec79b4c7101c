"""Offload through a real broker: allowed places only, sealed, read back, altered, deleted, restored."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import msgspec
import pytest
from region_home import make_region, running
from region_peer import client, until
from typer.testing import CliRunner

import felix
from cli.main import app
from felix.errors import Code, RequestError
from felix.runtime.real import now_ms
from felix.settings import Offload, Views
from region.config import StorageConfig
from region.folder import RegionFolder
from region.log import fsspec_store as store
from region.log.offload import decode_manifest, encode_manifest
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardLog
from region.node import Node
from region.streams import settings as stream_settings

ROLLS = "acme/ops/rolls"


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_settings, "OFFLOADED_SEGMENTS", SegmentLimits(segment_bytes_max=3_000))


async def fill(region: felix.RegionClient, first: int, count: int) -> None:
    rolls = region.stream(ROLLS)
    for begin in range(first, first + count, 10):
        # One group after the other: a segment ends between two.
        await asyncio.gather(*(rolls.publish(b"secret %d" % at * 10) for at in range(begin, begin + 10)))


async def read_all(region: felix.RegionClient, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with asyncio.timeout(120), region.stream(ROLLS).subscribe("earliest", on_gap="raise") as reader:
        async for record in reader:
            found.append(bytes(record.payload))
            if len(found) == count:
                break
    return found


def expected(count: int) -> list[bytes]:
    return [b"secret %d" % at * 10 for at in range(count)]


def shard_of(node: Node) -> ShardLog:
    (shard,) = node.broker.stream(felix.StreamName.parse(ROLLS)).serving
    return shard


def files_below(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


async def test_a_stream_lives_in_two_places_and_is_read_as_one(folder: RegionFolder, tmp_path: Path) -> None:
    place = tmp_path / "store"
    url = f"file://{place}"
    storage = StorageConfig(offload_allow=(url,))
    data = str(tmp_path / "data")
    async with running(folder, data=data, storage=storage) as node, client(folder) as region:
        await region.create_stream(ROLLS, views=Views(offload=Offload(f"{url}/rolls", 0)))
        await fill(region, 0, 300)
        await until(
            lambda: shard_of(node).counters.offloaded_segments == shard_of(node).segment_count - 1 > 3
        )
        assert shard_of(node).offload_waiting_bytes == 0
        # Local is the last segment, in the store are all the others, which have most of the bytes.
        await until(lambda: shard_of(node).disk_bytes < shard_of(node).store_only_bytes)
        (told,) = (await region.describe_stream(ROLLS)).state
        assert told.store_only_bytes == sum(path.stat().st_size for path in place.rglob("*.seg"))
    uploaded = files_below(place)
    assert uploaded and all(b"secret" not in path.read_bytes() for path in uploaded), "sealed, as on the disk"
    async with running(folder, data=data, storage=storage) as node, client(folder) as region:
        await fill(region, 300, 50)
        assert await read_all(region, 350) == expected(350)
        assert shard_of(node).counters.fetched_segments > 0
        await region.alter_stream(ROLLS, remove=["offload"])
        await fill(region, 350, 100)
        assert shard_of(node).offload_waiting_bytes == 0 and not shard_of(node).offload_due(now_ms())
        assert await read_all(region, 450) == expected(450), "what is there is still read"
        await region.delete_stream(ROLLS)
        await until(lambda: not files_below(place))


async def test_a_place_that_the_region_does_not_allow_is_refused(
    folder: RegionFolder, tmp_path: Path
) -> None:
    allowed = StorageConfig(offload_allow=(f"file://{tmp_path}/mine",))
    data = str(tmp_path / "data")
    async with running(folder, data=data, storage=allowed) as node, client(folder) as region:
        for url in (
            f"file://{tmp_path}/mine-too",
            f"file://{tmp_path}/mine/../theirs",
            "memory://anywhere",
            "rubbish",
        ):
            with pytest.raises(RequestError) as refused:
                await region.create_stream(ROLLS, views=Views(offload=Offload(url, 0)))
            assert refused.value.code in (Code.FORBIDDEN, Code.CONFIG_INVALID), url
        await region.create_stream(ROLLS)
        with pytest.raises(RequestError) as refused:
            await region.alter_stream(ROLLS, offload=Offload("memory://anywhere", 0))
        assert refused.value.code is Code.FORBIDDEN
        await region.alter_stream(ROLLS, offload=Offload(f"file://{tmp_path}/mine/a", 0))
    async with running(folder, data=data) as node, client(folder) as region:
        await fill(region, 0, 200)
        await until(lambda: node.broker.streams.maintenance.offload_refused > 0)
        assert not (tmp_path / "mine").exists(), "what is not allowed any more does not leave"


async def test_a_lost_folder_is_restored_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    folder = make_region(tmp_path, "us-east")
    url = f"file://{tmp_path}/store"
    storage = StorageConfig(offload_allow=(url,))
    async with running(folder, storage=storage) as node, client(folder) as region:
        await region.create_stream(ROLLS, views=Views(offload=Offload(url, 0)))
        await fill(region, 0, 200)
        await region.stream(ROLLS).create_subscription("crew")
        await until(lambda: shard_of(node).segment_count > 3 and not shard_of(node).offload_waiting_bytes)
        last = shard_of(node)._files.disk.segments[-1].base_offset  # type: ignore[union-attr]
        before = shard_of(node).epochs.current
    lost = folder.root / "data" / "streams"

    def run(*words: str) -> tuple[int, str]:
        answer = CliRunner().invoke(app, list(words))
        return answer.exit_code, answer.stdout or str(answer.exception)

    code, said = run("log", "verify", "--open", "--remote", "--json")
    assert code == 0 and json.loads(said)["items"][0]["objects_compared"] > 2
    assert "is not lost" in run("log", "restore", ROLLS, url)[1]
    shutil.rmtree(next(path for path in lost.iterdir() if path.is_dir()))
    manifest = max((tmp_path / "store").rglob("*.seg.json"))
    written = manifest.read_bytes()
    changed = msgspec.structs.replace(
        one := decode_manifest(written, ""), segment=msgspec.structs.replace(one.segment, next_offset=10**6)
    )
    manifest.write_bytes(encode_manifest(changed))
    for words in ((), ("--unverified",)):
        assert "not written by a broker" in run("log", "restore", ROLLS, url, *words)[1]
    manifest.write_bytes(written)
    # What is left of one that was deleted names none that could be meant.
    stored = manifest.parents[1]
    (stored.parent / f"{stored.name.rpartition('~')[0]}~{'0' * 32}" / "00000").mkdir(parents=True)
    code, said = run("log", "restore", ROLLS, url, "--json")
    (shard,) = json.loads(said)["shards"]
    assert code == 0 and (shard["first_offset"], shard["next_offset"], shard["untagged"]) == (0, last, 0)
    assert shard["gaps"] == []
    # The same with a gap, which somebody has to accept.
    shutil.rmtree(next(path for path in lost.iterdir() if path.is_dir()))
    (middle,) = sorted((tmp_path / "store").rglob("*.seg.json"))[1:2]
    aside, begin = middle.read_bytes(), int(middle.name[:20])
    middle.unlink()
    assert "are missing at" in run("log", "restore", ROLLS, url)[1]
    code, said = run("log", "restore", ROLLS, url, "--accept-gap", "--json")
    (shard,) = json.loads(said)["shards"]
    assert code == 0 and shard["gaps"] == [{"first": begin, "next": shard["first_offset"]}]
    shutil.rmtree(next(path for path in lost.iterdir() if path.is_dir()))
    middle.write_bytes(aside)
    assert run("log", "restore", ROLLS, url)[0] == 0
    assert run("log", "verify", "--open", "--remote")[0] == 0
    async with running(folder, storage=storage) as node, client(folder) as region:
        assert await read_all(region, last) == expected(last)
        assert shard_of(node).epochs.current > before
        await fill(region, last, 20)
        assert await read_all(region, last + 20) == expected(last + 20)
        # What a subscription had noted is in no store: it begins anew, and serves.
        async with region.stream(ROLLS).consumer("crew") as consumer:
            assert await consumer.ack(await anext(consumer))
        assert not node.broker.streams.disks.problems()
    assert store.list_names(f"file://{tmp_path}/nowhere") == []


async def test_a_restoration_that_ends_between_two_shards_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    folder = make_region(tmp_path, "us-east")
    url = f"file://{tmp_path}/store"
    storage = StorageConfig(offload_allow=(url,))
    async with running(folder, storage=storage) as node, client(folder) as region:
        await region.create_stream(ROLLS, shards=3, views=Views(offload=Offload(url, 0)))
        rolls = region.stream(ROLLS)
        for begin in range(0, 600, 30):
            await asyncio.gather(
                *(rolls.publish(b"secret %d" % at * 10, key=b"%d" % at) for at in range(begin, begin + 30))
            )
        stream = node.broker.stream(felix.StreamName.parse(ROLLS))
        await until(
            lambda: all(one.segment_count > 2 and not one.offload_waiting_bytes for one in stream.serving)
        )
    (held,) = (path for path in (folder.root / "data" / "streams").iterdir() if "rolls" in path.name)
    stored = files_below(tmp_path / "store")
    for number in (1, 2):
        shutil.rmtree(held / f"{number:05d}")
    kept = {path: path.read_bytes() for path in files_below(held / "00000")}

    def run(*words: str) -> tuple[int, str]:
        answer = CliRunner().invoke(app, list(words))
        return answer.exit_code, answer.stdout or str(answer.exception)

    # Of the oldest but one nothing tells any more: what is missing is named, and what to do.
    (middle,) = sorted((tmp_path / "store").rglob("00001/*.json"))[1:2]
    told = middle.read_bytes()
    middle.unlink()
    code, said = run("log", "restore", ROLLS, url)
    assert code != 0 and "are missing at" in said and not (held / "00001").exists()
    middle.write_bytes(told)
    newest = max((tmp_path / "store").rglob("00002/*.seg"))
    newest.rename(tmp_path / "away")
    code, said = run("log", "restore", ROLLS, url)
    assert code != 0 and "does not do what it was asked" in said
    assert (held / "00001").exists() and not list((held / "00002").glob("*.seg"))
    async with running(folder, storage=storage) as node, client(folder) as region:
        # What is not whole is not begun anew, and nothing of it is in the way of the next attempt.
        serving = node.broker.stream(felix.StreamName.parse(ROLLS)).serving
        assert sorted(one.identity.shard for one in serving) == [0, 1]
    assert not list((held / "00002").glob("*.seg"))
    (tmp_path / "away").rename(newest)
    code, said = run("log", "restore", ROLLS, url, "--json")
    told = json.loads(said)
    assert code == 0 and [one["shard"] for one in told["shards"]] == [2] and told["kept"] == [0, 1]
    assert run("log", "verify", "--open", "--remote")[0] == 0
    assert set(stored) <= set(files_below(tmp_path / "store"))
    assert all(path.read_bytes() == data for path, data in kept.items() if path.suffix == ".seg")
    async with running(folder, storage=storage) as node:
        assert len(node.broker.stream(felix.StreamName.parse(ROLLS)).serving) == 3
