"""Disks that are full for a while, on either side of the border: nothing leaves unannounced or arrives unlogged, and all of it goes on by itself."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from bridge_mesh import STREAM, WAIT_S, Mesh, flight, two_regions, until
from slow_runs import only_slow

from bridge.agent import Agent
from felix.storage.disk import DiskFiles


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


class Full:
    """Folders in which no write finds room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: tuple[Path, ...] = ()
        self.refused = 0
        write = DiskFiles.pwritev

        def pwritev(
            files: DiskFiles, descriptor: int, buffers: Sequence[bytes | memoryview], position: int
        ) -> int:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if any(path.is_relative_to(folder) for folder in self.folders):
                self.refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write(files, descriptor, buffers, position)

        monkeypatch.setattr(DiskFiles, "pwritev", pwritev)


async def test_brokers_and_an_agent_stop_while_what_they_write_waits_for_room(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a broker was asked for is in its store, and gets its leaf at the next start."""
    full = Full(monkeypatch)
    await mesh.create()
    await mesh.grant()
    async with mesh.agent() as agent:
        await mesh.publish([flight(number) for number in range(100)])
        await crossed(agent, 100)
        full.folders = (mesh.egress_folder, mesh.ingress_folder, mesh.us.root / "data" / "audit")
        denied = [asyncio.create_task(mesh.deny(region, STREAM)) for region in ("us-east", "eu-west")]
        await mesh.publish([flight(number) for number in range(100, 200)])
        await until(lambda: full.refused > 6, "writes that found no room")
        await until(
            lambda: all(mesh.documents(region, "deny") for region in mesh.nodes), "denials that are stored"
        )
    async with asyncio.timeout(WAIT_S):
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
    await asyncio.gather(*denied, return_exceptions=True)
    full.folders = ()
    for region in ("us-east", "eu-west"):
        await mesh.start(region)
    async with mesh.agent() as agent:
        await until(
            lambda: bool(agent.links()) and agent.links()[0].state == "denied", "a link that is denied"
        )
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    for report in (mesh.verify_egress(), mesh.verify_ingress()):
        assert report.ok, report.findings


async def crossed(agent: Agent, offset: int) -> None:
    await until(lambda: bool(agent.links()) and agent.links()[0].position == offset, f"position {offset}")


@pytest.mark.parametrize(
    ("where", "restarted"),
    [
        pytest.param("egress", "", marks=only_slow),
        ("destination", ""),
        pytest.param("source", "", marks=only_slow),
        ("everywhere", ""),
        ("egress", "eu-west"),
        pytest.param("source", "eu-west", marks=only_slow),
    ],
)
async def test_links_go_on_by_themselves_once_there_is_room(
    mesh: Mesh, where: str, restarted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`restarted`: meanwhile, so that the session ends in which something was announced that waits for room."""
    full = Full(monkeypatch)
    logs = {
        "egress": mesh.egress_folder,
        "destination": mesh.ingress_folder,
        "source": mesh.us.root / "data" / "audit",
    }
    await mesh.create()
    await mesh.grant()
    async with mesh.agent() as agent:
        await mesh.publish([flight(number) for number in range(100)])
        await crossed(agent, 100)
        full.folders = tuple(logs.values()) if where == "everywhere" else (logs[where],)
        await mesh.publish([flight(number) for number in range(100, 200)], batch=5)
        if where != "source":
            # A source's own log has nothing to write of a crossing.
            await until(lambda: full.refused > 3, "writes that found no room")
        if restarted:
            await mesh.stop(restarted)
            await mesh.start(restarted)
            await until(
                lambda: agent.links()[0].state != "active" or where == "source", "a session that ended"
            )
        if where == "egress":
            assert "waits for room" in agent.not_ready()
            assert await mesh.arrived() == 100, "nothing leaves before it is announced durably"
        held = agent.links()[0]
        assert not any(word in held.reason for word in ("TAMPERED", "is not the one that the"))
        full.folders = ()
        await crossed(agent, 200)
        assert mesh.numbers(await mesh.read("eu-west", 200)) == list(range(200))
        await until(lambda: agent.not_ready() == "", "an agent that is ready")
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    assert mesh.reconcile() == 200
    egress, ingress = mesh.verify_egress(), mesh.verify_ingress()
    assert egress.ok, egress.findings
    assert ingress.ok, ingress.findings
    assert egress.unanswered == 0
