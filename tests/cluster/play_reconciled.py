"""A region's etcd is put back to an older state, one of its brokers has had to begin with another folder since, and `felix region reconcile` is killed at random
moments, and run again until it ends.

    python -m cluster.play_reconciled FOLDER [--rounds N] [--seed S]

All that was acknowledged is there where a commit needs more copies than were lost; what may be lost has its mark, and one leaf in the audit log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

import psutil
from cluster.processes import kill, process_of, several
from cluster.test_reconcile import NAMES, publish, read, restore
from e2e.command_mesh import environment, felix_command
from etcd_process import etcd_binary
from region_peer import client as client_of
from region_peer import until

from audit.checkpoint import note_size
from audit.leaf import Kind, decode_header
from audit.tile import CHECKPOINT_PATH, read_entries
from audit.tile_disk import Folder
from audit.trust import Trust
from audit.verify import verify_log
from cli.several import ETCD_FOLDER, ETCD_PEER
from region.config import load_config
from region.folder import RegionFolder
from region.trust.trusted_bundles import own_bundle

ORDERS, QUICK, ALONE = "acme/ops/orders", "acme/ops/quick", "acme/ops/alone"
MOMENTS: Final = 14
"""About as many as a run has."""


def family(folder: RegionFolder) -> list[psutil.Process]:
    parent = psutil.Process(json.loads((folder.run / "broker.pid").read_text())["pid"])
    return [parent, *parent.children(recursive=True)]


async def up(folder: RegionFolder) -> None:
    await asyncio.to_thread(felix_command, folder.root.parent, "region", "up", "us-east", "--detach")


async def down(folder: RegionFolder, random: Random) -> None:
    """In order, or all killed at once."""
    processes = family(folder)
    if random.random() < 0.5:
        await asyncio.to_thread(felix_command, folder.root.parent, "region", "down", "us-east", code=None)
    else:
        for each in processes:
            each.kill()
    for each in psutil.wait_procs(processes, 60)[1]:
        each.kill()


def etcds(folder: RegionFolder) -> list[psutil.Process]:
    """That run from the region's folder."""
    place = str(folder.root / ETCD_FOLDER)
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if any(place in word for word in each.info["cmdline"] or ())
    ]


def end(folder: RegionFolder) -> None:
    """Whatever runs still of a play that failed."""
    with suppress(OSError, ValueError, KeyError, psutil.NoSuchProcess):
        for each in family(folder):
            each.kill()
    for each in etcds(folder):
        each.kill()


async def well(region: object) -> bool:
    return not (await region.describe()).alarms  # type: ignore[attr-defined]


async def play(home: Path, seed: int) -> str:
    folder = several(home, 3, lease="2s")
    try:
        return await played(folder, home, Random(seed))
    finally:
        end(folder)


async def played(folder: RegionFolder, home: Path, random: Random) -> str:
    data, snapshot = folder.root / ETCD_FOLDER / "data", home / "snapshot"
    endpoint = load_config(folder.config).metadata.endpoints[0]
    await up(folder)
    async with client_of(folder) as region:
        await region.create_stream(ORDERS, replicas=3)
        await region.create_stream(QUICK, replicas=3, min_in_sync=1)
        await region.create_stream(ALONE, replicas=1)
        for stream in (ORDERS, QUICK, ALONE):
            await publish(region, stream, 0, 5)
        tool = etcd_binary("etcdctl")
        assert tool is not None
        words = [tool, f"--endpoints={endpoint}", "snapshot", "save", str(snapshot)]
        await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True)
        for broker in random.sample(NAMES, 2):
            await kill(folder, broker)
        for stream in (ORDERS, QUICK):
            await publish(region, stream, 5, 10)
    lost = random.choice((*NAMES, ""))
    await down(folder, random)
    if lost:
        shutil.rmtree(folder.root / "data" / lost)
        # The others serve, and beside them it begins anew.
        await asyncio.to_thread(felix_command, home, "region", "up", "us-east", "--detach", code=(0, 4))
        await asyncio.to_thread(
            felix_command,
            home,
            "region",
            "up",
            "us-east",
            "--broker",
            lost,
            "--replace-folder",
            "--detach",
            code=(0, 4),
        )
        async with client_of(folder) as region:
            if random.random() < 0.5:

                async def is_back() -> bool:
                    (state,) = (await region.describe_stream(ORDERS)).state
                    return len(state.in_sync) == 3

                await until(is_back)
            await publish(region, ORDERS, 10, 12)
        await down(folder, random)
        pids = [process_of(folder, lost)]
        for pid in filter(None, pids):
            os.kill(pid, signal.SIGKILL)
    count = 12 if lost else 10
    shutil.rmtree(data)
    words = [f"--data-dir={data}", "--name=us-east", f"--initial-cluster=us-east={ETCD_PEER}"]
    restore(snapshot, *words, f"--initial-advertise-peer-urls={ETCD_PEER}")
    runs, said = [], ""
    for _ in range(random.randint(1, 4)):
        moment = random.randint(1, MOMENTS)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "cluster.killed_reconciling", str(moment), "--accept-loss"],
            env=environment(home, PYTHONPATH=os.environ["PYTHONPATH"]), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        runs.append(moment if done.returncode < 0 else f"{moment}:{done.returncode}")
        if random.random() < 0.3:
            for each in etcds(folder):
                each.kill()
    for _ in range(5):
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "cluster.killed_reconciling", "0", "--accept-loss"],
            env=environment(home, PYTHONPATH=os.environ["PYTHONPATH"]), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        said = done.stdout + done.stderr
        if done.returncode == 0:
            break
        runs.append(said[-200:])
        await asyncio.sleep(1)
    assert done.returncode == 0, (runs, said)
    await up(folder)
    try:
        async with client_of(folder) as region:
            await until(lambda: well(region)) if not lost else None
            state = {}
            for stream in (ORDERS, QUICK, ALONE):
                (state[stream],) = (await region.describe_stream(stream)).state
            assert await read(region, ORDERS, count) == list(range(count))
            await publish(region, ORDERS, count, count + 2)
            assert await read(region, ORDERS, count + 2) == list(range(count + 2))
            end = state[QUICK].high_watermark
            quick = await read(region, QUICK, end) if end else []
            assert quick == list(range(end)) and (end == 10 or lost), quick
            if lost:
                assert state[QUICK].unclean, (
                    "one of its copies is lost, and one is enough for an acknowledgement"
                )
            marks = {stream: each.unclean for stream, each in state.items() if each.unclean}

            async def leaves() -> bool:
                found = Counter[tuple[str, int]]()
                for name in NAMES:
                    log = Folder(folder.root / "data" / name / "audit")
                    note = log.read(CHECKPOINT_PATH)
                    size = 0 if note is None else note_size(note)
                    here = Counter(
                        (header.stream, header.source_epoch)
                        for _, entry in read_entries(log, 0, size, size)
                        if (header := decode_header(entry)).kind is Kind.UNCLEAN
                    )
                    assert all(number == 1 for number in here.values()), here
                    found |= here
                return marks.items() <= dict(found.keys()).items()

            await until(leaves)
            trust = Trust.of([own_bundle(folder, load_config(folder.config))])
            for name in NAMES:
                log = Folder(folder.root / "data" / name / "audit")
                if log.read(CHECKPOINT_PATH) is not None:
                    report = verify_log(log, trust, cosignatures_min=0)
                    assert report.ok, report.findings
    finally:
        processes = family(folder) + etcds(folder)
        await asyncio.to_thread(felix_command, home, "region", "down", "us-east", code=None)
        for each in psutil.wait_procs(processes, 60)[1]:
            each.kill()
    return f"lost {lost or 'nothing'}, killed at {runs}, marks {marks}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for seed in range(asked.seed, asked.seed + asked.rounds):
        home, began = asked.folder / str(seed), time.monotonic()
        home.mkdir(parents=True)
        print(
            f"seed {seed} holds: {asyncio.run(play(home, seed))}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
