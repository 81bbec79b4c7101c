"""Two regions, of which the source is put back to an older copy while records cross: its streams alone, or all that its broker keeps.

Where the source no longer has what crossed, or the audit log that was cosigned, the link stops and says so, and nothing further arrives;
where it has both, everything crosses. Both audit logs that the crossing is in verify either way.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

from simulation.mesh_world import AGENT, BURST_MAX, ORDERLY_S, AgentHost, Departures, MeshWorld, folder_of
from simulation.script import Script, Step
from simulation.world import JOINS, RUN_S_MAX, InvariantError

SOURCE: Final = "us"
BURSTS: Final = 8
WITHIN_S: Final = 6.0
"""The copy is taken, and put back, within so long: publishing takes as long."""
KEPT: Final = {"streams": "data/streams", "everything": "data"}


class RestoredWorld(MeshWorld):
    """See the module."""

    bad_disks = 0.0

    @classmethod
    def draw(cls, random: Random) -> Script:
        restore = Step(
            "fault",
            random.choice(tuple(KEPT)),
            random.random() * WITHIN_S,
            SOURCE,
            random.random() * WITHIN_S,
        )
        pauses_s = (0.0, 0.5, 1.5)
        published = [
            Step(Departures.name, "publish", random.choice(pauses_s), number=random.randint(1, BURST_MAX))
            for _ in range(BURSTS)
        ]
        return (restore, Step(Departures.name, JOINS, 0.0), *published)

    async def fault(self, step: Step) -> None:
        """Put back a copy that was taken `lasts_s` before."""
        host, folder = self.hosts[SOURCE], folder_of("us-east").root / KEPT[step.what]
        copy = host.disk.copy(folder)
        await asyncio.sleep(step.lasts_s)
        host.crash(power=False)
        host.disk.put_back(folder, copy)
        host.boot()

    async def check(self) -> None:
        agent = self.hosts[AGENT]
        assert isinstance(agent, AgentHost)
        end = (await self.mesh.describe("us-east")).state[0].high_watermark
        source = self.mesh.numbers(await self.mesh.read("us-east", end))
        for _ in range(round(RUN_S_MAX / ORDERLY_S)):
            count = await self.mesh.arrived()
            arrived = self.mesh.numbers(await self.mesh.read("eu-west", count))
            await asyncio.sleep(ORDERLY_S)
            if arrived == source or agent.agent.not_ready():
                break
        stopped = agent.agent.not_ready()
        self.note(f"the source has {source}, the destination {arrived}: {stopped or 'all is well'}")
        if source[: len(arrived)] != arrived:
            self.count("lost at the source")
            if not stopped:
                raise InvariantError(
                    f"the source has {source}, the destination {arrived}, and nobody says so"
                )
        elif arrived != source and not stopped:
            raise InvariantError(f"the source has {source}, the destination {arrived}, and nothing crosses")
        if stopped:
            self.count("stopped")
        if await self.mesh.arrived() != len(arrived):
            raise InvariantError("something crossed although the link had stopped")
        self._check_logs(len(arrived))
