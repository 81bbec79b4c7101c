"""Disks that fail for a moment, under an agent in a process of its own and under the destination's audit log: both go on by themselves, and each record crosses once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from bridge_mesh import Mesh, flight, two_regions, until
from failing_disk import TOLD_BY
from ports import claim_port
from warm.commands import warm_script

import felix.reopening
from felix.storage.disk import DiskFiles

STEP = 40


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.grant()
        yield mesh


class Crossing:
    """So many records have been published, and all of them are to be at the destination."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.published = mesh, 0

    async def publish(self) -> None:
        await self.mesh.publish([flight(self.published + at) for at in range(STEP)], batch=5)
        self.published += STEP

    async def all_there(self) -> None:
        await self.mesh.crossed(self.published)

    async def answered(self) -> None:
        """All of them have their receipts: records arrive before their leaves are durable, and an agent that ends in between leaves them to the next one."""
        async with self.mesh.operator("us-east") as operator:

            async def found() -> bool:
                links = await operator.list_links()
                return [each.position for each in links] == [self.published]

            await until(found, f"a receipt for each of {self.published} records")

    async def judge(self) -> None:
        """Both regions have stopped, or are about to."""
        mesh = self.mesh
        assert await mesh.arrived() == self.published
        found = mesh.numbers(await mesh.read("eu-west", self.published))
        assert found == list(range(self.published))
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
        assert mesh.reconcile() == self.published
        egress, ingress = mesh.verify_egress(), mesh.verify_ingress()
        assert egress.ok, egress.findings
        assert ingress.ok, ingress.findings
        assert egress.unanswered == 0


class AgentProcess:
    """An agent, and the file that tells it what of its disk fails."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._told = mesh.home / "faults"
        self._health = f"127.0.0.1:{claim_port()}"
        self.said = mesh.home / "agent.out"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        config = self._mesh.write_config()
        config.write_text(f"{config.read_text()}health: {self._health}\n")
        tests = Path(__file__).parents[1]
        with self.said.open("ab") as said:
            self._process = await asyncio.create_subprocess_exec(
                *warm_script(Path(__file__).with_name("failing_agent.py"), str(config)),
                env={**os.environ, TOLD_BY: str(self._told), "PYTHONPATH": f"{tests.parent}:{tests}"},
                stdin=asyncio.subprocess.PIPE,
                stderr=said,
            )

    async def stop(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await self._process.wait()

    def tell(self, *faults: dict[str, Any]) -> None:
        beside = self._told.with_suffix(".new")
        beside.write_text("".join(json.dumps(fault) + "\n" for fault in faults))
        beside.replace(self._told)

    async def not_ready(self) -> str:
        def ask() -> str:
            try:
                with urllib.request.urlopen(f"http://{self._health}/readyz", timeout=5) as page:
                    return str(json.loads(page.read())["reason"])
            except urllib.error.HTTPError as error:
                return str(json.loads(error.read())["reason"])
            except OSError:
                return "it does not answer"

        return await asyncio.to_thread(ask)

    async def says(self, text: str) -> None:
        async def found() -> bool:
            return text in await self.not_ready()

        await until(found, f"an agent that is not ready, since {text!r}")

    async def is_ready(self) -> None:
        async def ready() -> bool:
            return not await self.not_ready()

        await until(ready, "an agent that is ready")


@pytest.mark.fault
async def test_an_agent_whose_disk_fails_for_a_moment_goes_on_by_itself(mesh: Mesh) -> None:
    crossing, agent = Crossing(mesh), AgentProcess(mesh)
    agent.tell({"call": "open", "path": "/egress/checkpoint", "error": "EIO", "times": 1})
    await agent.start()
    try:
        await crossing.publish()
        await crossing.all_there()
        assert "cannot be opened: [Errno 5]" in agent.said.read_text()
        # The log's own folders: one whose cosigned checkpoint cannot be kept says so, and goes on.
        for fault in (
            {"call": "sync", "path": "/egress/wal/"},
            {"call": "sync_folder", "path": "/egress/tile/"},
        ):
            agent.tell({**fault, "error": "EIO", "times": 1})
            # Looked for from now on: it goes on by itself soon, and on a busy machine the publishing may take longer.
            await asyncio.gather(crossing.publish(), agent.says("has stopped"))
            await crossing.all_there()
            await agent.is_ready()
        egress, elsewhere = mesh.egress_folder, mesh.egress_folder.with_name("elsewhere")
        egress.rename(elsewhere)
        await crossing.publish()
        await agent.says("not the folder that was opened")
        assert not egress.exists(), "nothing is written where it was"
        elsewhere.rename(egress)
        await crossing.all_there()
        await crossing.answered()
        await agent.is_ready()
    finally:
        code = await agent.stop()
    assert code == 0, agent.said.read_text()[-2000:]
    assert "Traceback" not in agent.said.read_text()
    await crossing.judge()


async def test_a_region_whose_audit_log_cannot_be_synced_once_goes_on_by_itself(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had landed by then gets its leaves, and what comes again its answer."""
    monkeypatch.setattr(felix.reopening, "REOPEN_MS_MIN", 300)
    fails = 0

    def is_over() -> bool:
        return not fails

    sync = DiskFiles.sync

    def failing(files: DiskFiles, descriptor: int) -> None:
        nonlocal fails
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if fails and path.is_relative_to(mesh.ingress_folder) and path.suffix == ".wal":
            fails -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        sync(files, descriptor)

    monkeypatch.setattr(DiskFiles, "sync", failing)
    crossing = Crossing(mesh)
    async with mesh.agent():
        for _ in range(2):
            await crossing.publish()
            await crossing.all_there()
            fails = 1
            await crossing.publish()
            await until(is_over, "a call that failed")
            await crossing.all_there()
        await crossing.answered()
    await crossing.judge()


async def test_a_link_that_opens_while_the_agents_own_files_do_not_answer_is_refused_by_nobody(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = True
    opened = DiskFiles.open

    def failing(files: DiskFiles, path: Path, flags: int) -> int:
        if fails and path.parent.name == "regions":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opened(files, path, flags)

    monkeypatch.setattr(DiskFiles, "open", failing)
    crossing = Crossing(mesh)
    async with mesh.agent() as agent:
        await crossing.publish()

        def says_so() -> bool:
            return any("own files do not answer" in link.reason for link in agent.links())

        await until(says_so, "a link that says why")
        assert agent.links()[0].state != "denied"
        fails = False
        await crossing.all_there()
    await crossing.judge()
