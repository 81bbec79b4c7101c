"""A region of three brokers and an etcd as processes under one parent, on ports of a test's own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from e2e.command_mesh import felix_command
from ports import claim_port
from region_home import make_region
from region_peer import until

from cli.process import read_state
from cli.several import ETCD_FOLDER, pid_file
from felix.address import Address
from felix.messages import RegionState
from region.bootstrap import write_profile
from region.config import load_config
from region.folder import RegionFolder

COUNT = 3


def several(home: Path) -> RegionFolder:
    """A region whose brokers and etcd have ports of this test's own."""
    folder = make_region(home, "us-east")
    text = folder.config.read_text().replace(
        "kind: embedded", f'kind: etcd\n  endpoints: ["127.0.0.1:{claim_port()}"]'
    )
    ports = [claim_port() for _ in range(COUNT)]
    text += "cluster:\n  brokers:\n" + "".join(
        f'    - {{id: b{number + 1}, listen: "127.0.0.1:{port}"}}\n' for number, port in enumerate(ports)
    )
    folder.config.write_text(text)
    (folder.root / ETCD_FOLDER).mkdir()
    write_profile(folder, "us-east", "acme", *(Address("127.0.0.1", port) for port in ports))
    return folder


@asynccontextmanager
async def running(folder: RegionFolder) -> AsyncIterator[None]:
    """All of it up; in the end everything is down."""
    home = folder.root.parent
    await asyncio.to_thread(felix_command, home, "region", "up", "us-east", "--detach")
    parent = psutil.Process(json.loads((folder.run / "broker.pid").read_text())["pid"])
    family = [parent, *parent.children(recursive=True)]
    try:
        yield
    finally:
        await asyncio.to_thread(felix_command, home, "region", "down", "us-east", code=None)
        left = await asyncio.to_thread(psutil.wait_procs, family, 60)
        for process in left[1]:
            process.kill()
    assert not left[1]


def only_through(folder: RegionFolder, broker: str) -> None:
    """The region's profile names this broker alone."""
    place = load_config(folder.config).of_broker(broker).own_place
    assert place is not None
    write_profile(folder, "us-east", "acme", place.client_address)


def process_of(folder: RegionFolder, broker: str) -> int:
    state = read_state(pid_file(folder, broker))
    return 0 if state is None else int(state["pid"])


async def kill(folder: RegionFolder, broker: str) -> None:
    """SIGKILL; returns once its parent has started it again."""
    pid = process_of(folder, broker)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: process_of(folder, broker) not in (0, pid))


def leaders(state: RegionState) -> dict[str, int]:
    return {each.broker: each.leads for each in state.brokers}
