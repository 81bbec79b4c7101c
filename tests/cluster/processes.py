"""A region of several brokers as processes: its configuration, with ports of a test's own, and the processes by broker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from e2e.command_mesh import felix_command
from ports import claim_port
from region_home import make_region
from region_peer import until

from cli.process import read_state
from cli.several import ETCD_FOLDER
from felix.address import Address
from region.bootstrap import write_profile
from region.config import load_config
from region.folder import RegionFolder


def several(home: Path, count: int, *, lease: str = "", founded: RegionFolder | None = None) -> RegionFolder:
    """A region whose brokers and etcd have ports of this test's own. `founded`: one that is there; else us-east is founded."""
    folder = make_region(home, "us-east") if founded is None else founded
    write_cluster(folder, [f"127.0.0.1:{claim_port()}"], own_places(count), lease=lease)
    (folder.root / ETCD_FOLDER).mkdir()
    return folder


def own_places(count: int) -> dict[str, str]:
    """Brokers b1, b2 … on ports of this test's own."""
    return {f"b{number}": f"127.0.0.1:{claim_port()}" for number in range(1, count + 1)}


def write_cluster(
    folder: RegionFolder, endpoints: Sequence[str], places: Mapping[str, str], *, lease: str = ""
) -> None:
    """Write the etcd's endpoints and where each broker listens into a region's configuration, and into its clients' profile."""
    text = folder.config.read_text().replace(
        "kind: embedded", f"kind: etcd\n  endpoints: {json.dumps(list(endpoints))}"
    )
    text += "cluster:\n" + (f"  lease: {lease}\n" if lease else "") + "  brokers:\n"
    text += "".join(f'    - {{id: {name}, listen: "{place}"}}\n' for name, place in places.items())
    folder.config.write_text(text)
    write_profile(folder, folder.root.name, "acme", *map(Address.parse, places.values()))


def process_of(folder: RegionFolder, broker: str) -> int:
    """The process id of a broker; 0 while it does not run."""
    state = read_state(folder.pid_of(broker))
    return 0 if state is None else int(state["pid"])


@asynccontextmanager
async def running(folder: RegionFolder) -> AsyncIterator[None]:
    """All of it up; in the end every process is gone."""
    home, name = folder.root.parent, folder.root.name
    await asyncio.to_thread(felix_command, home, "region", "up", name, "--detach")
    parent = psutil.Process(json.loads((folder.run / "broker.pid").read_text())["pid"])
    family = [parent, *parent.children(recursive=True)]
    try:
        yield
    finally:
        family += parent.children(recursive=True)
        await asyncio.to_thread(felix_command, home, "region", "down", name, code=None)
        for process in (await asyncio.to_thread(psutil.wait_procs, family, 60))[1]:
            process.kill()


async def kill(folder: RegionFolder, broker: str) -> None:
    """SIGKILL; returns once its parent has started it again."""
    pid = process_of(folder, broker)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: process_of(folder, broker) not in (0, pid))


def only_through(folder: RegionFolder, broker: str) -> None:
    """The region's profile names this broker alone."""
    place = load_config(folder.config).of_broker(broker).own_place
    assert place is not None
    write_profile(folder, "us-east", "acme", place.client_address)
