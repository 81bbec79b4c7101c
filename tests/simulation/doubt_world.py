"""Two regions and their bridge, of which the destination's disk fails in the middle of an arrival, and again while the stream is opened, as a grant is revoked or paused.

What was being written then may be in the stream, or not, and has no leaf. Held to what simulation.mesh_world holds: no arrival stands behind the leaf of what had ended its grant.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import ClassVar, Final, NamedTuple

from simulation.mesh_world import AGENT, REGIONS, Departures, MeshWorld
from simulation.script import Script, Step
from simulation.world import JOINS, Host

DOUBTED: Final = "eu"
"""The destination's host."""
HAPPENS_S: Final = 30.0
"""A write that is to fail and does not come by then fails no more."""
OPENING: Final = ("open", "names", "pwritev", "sync", "sync_folder", "rename", "pread")
FEW: Final = {errno.EMFILE: ("open", "names"), errno.ENOSPC: ("open", "pwritev", "sync_folder", "rename")}
"""What may fail so; an error of the disk comes of any call."""
PUBLISHED: Final = 14


class Doubt(NamedTuple):
    """One fault, drawn from a step's number."""

    call: str
    passed: int
    """so many of these calls go well first"""
    error: int
    """of the openings"""
    fails: int
    """so many calls of openings"""
    governs_after_s: float
    what: str
    region: str
    restarts: str
    restarts_after_s: float
    lasts_s: float

    @classmethod
    def drawn(cls, number: int) -> Doubt:
        random = Random(number)
        return cls(
            random.choice(("sync", "pwritev")),
            random.randrange(3),
            random.choice((errno.EIO, errno.ENOSPC, errno.EMFILE)),
            random.choice((0, 1, 2, 4, 8)),
            random.choice((0.0, 0.01, 1.0, 4.9, 5.2)),
            random.choice(("revoke", "revoke", "pause")),
            random.choice(("eu-west", "eu-west", "us-east")),
            random.choice(("", "", "", "kill", "power")),
            random.choice((0.0, 0.5, 5.5, 7.0)),
            random.choice((0.0, 2.0, 7.0)),
        )


@dataclass
class Failing:
    """What the disk does to the logs of streams."""

    host: Host
    writes: Doubt | None = None
    passed: int = 0
    openings: Doubt | None = None
    left: int = 0

    def __post_init__(self) -> None:
        self.failed = asyncio.Event()
        self._on_call = self.host.disk.on_call
        self.host.disk.on_call = self.on_call

    def on_call(self, call: str, path: Path) -> None:
        if "streams" in path.parts:
            self._write(call, path)
            self._open(call, path)
        assert self._on_call is not None
        self._on_call(call, path)

    def _write(self, call: str, path: Path) -> None:
        doubt = self.writes
        if doubt is None or call != doubt.call or ".seg" not in path.name:
            return
        if self.passed < doubt.passed:
            self.passed += 1
            return
        self.writes = None
        self.host.world.loop.call_soon(self.failed.set)
        self._fail(errno.EIO, call, path, "failed writes")

    def _open(self, call: str, path: Path) -> None:
        doubt = self.openings
        if doubt is None or not self.left or call not in FEW.get(doubt.error, OPENING):
            return
        if self.host.world.random.random() < 0.5:
            self.left -= 1
            self._fail(doubt.error, call, path, "failed openings")

    def _fail(self, error: int, call: str, path: Path, counted: str) -> None:
        self.host.world.note(self.host.name, call, path, "fails:", os.strerror(error))
        self.host.world.count(counted)
        raise OSError(error, os.strerror(error), str(path))


class DoubtWorld(MeshWorld):
    """See the module."""

    bad_disks: ClassVar[float] = 0.0
    failing: Failing

    @classmethod
    def draw(cls, random: Random) -> Script:
        steps: list[Step] = []
        for _ in range(random.randint(1, 3)):
            after_s = random.choice((0.002, 0.3, 3.0)) * random.random()
            steps.append(Step("fault", "doubt", after_s, DOUBTED, number=random.getrandbits(30)))
            if random.random() < 0.2:
                what = random.choice(("power", "kill", "hang", "full"))
                where, lasts_s = random.choice((*REGIONS.values(), AGENT)), 0.8 * random.random()
                steps.append(Step("fault", what, 6 * random.random(), where, lasts_s, random.getrandbits(8)))
        steps.append(Step(Departures.name, JOINS, 0.0))
        for _ in range(PUBLISHED):
            pause_s = random.choice((0.0, 0.05, 1.0, 5.0))
            steps.append(Step(Departures.name, "publish", pause_s, number=random.randint(1, 4)))
        return tuple(steps)

    def make(self) -> Iterable[Host]:
        for host in super().make():
            if host.name == DOUBTED:
                self.failing = Failing(host)
            yield host

    async def fault(self, step: Step) -> None:
        if step.what != "doubt":
            await super().fault(step)
            return
        doubt, failing = Doubt.drawn(step.number), self.failing
        failing.writes, failing.passed = doubt, 0
        failing.failed.clear()
        try:
            async with asyncio.timeout(HAPPENS_S):
                await failing.failed.wait()
        except TimeoutError:
            failing.writes = None
            return
        failing.openings, failing.left = doubt, doubt.fails
        restarting = asyncio.ensure_future(self._restart(doubt))
        await asyncio.sleep(doubt.governs_after_s)
        departures = next(each for each in self.clients if isinstance(each, Departures))
        await departures.govern(Step(Departures.name, doubt.what, 0.0, doubt.region))
        await restarting
        await asyncio.sleep(doubt.lasts_s)
        failing.openings = None

    async def _restart(self, doubt: Doubt) -> None:
        if not doubt.restarts:
            return
        await asyncio.sleep(doubt.restarts_after_s)
        host = self.hosts[DOUBTED]
        host.crash(power=doubt.restarts == "power")
        host.later(0.2)
