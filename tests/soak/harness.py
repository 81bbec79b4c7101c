"""The soak: a broker and workers are killed (SIGKILL) under load, over and over; each part keeps books, and settles them at the end.

A part is one capability under load (streams, queues, cache, transactions): clients in this process, which live through all kills, and
workers, which are processes of their own and are killed as the broker is. A worker writes what it was told into a file, one line by one
`write`, before it goes on: a SIGKILL of the process cannot take that back.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from long_runs import IS_LONG
from region_peer import client
from region_process import ROOT, BrokerProcess, fixed_region
from warm.process import WarmProcess

import felix
from region.folder import RegionFolder

IS_SOAK = IS_LONG or "FELIX_SOAK_KILLS" in os.environ


def load(quick: int, soaking: int) -> int:
    """How much of something: in `make test`, where what piles up is mostly waited for, and in `make soak`."""
    return soaking if IS_SOAK else quick


STEP = range(load(5, 20), load(20, 60))
"""How far each part gets between two kills."""
PROGRESS_S = 120.0
"""What each part has for going on after a kill: many times what a broker takes to start on a busy machine."""


class Books(NamedTuple):
    """What a part found at the end: figures to print, and what is wrong."""

    figures: dict[str, int]
    problems: list[str]


class Worker:
    """A worker process: `python <module>.py HOME JOURNAL WORDS…`, started again after each kill."""

    def __init__(self, home: Path, module: str, name: str, *words: str) -> None:
        self._home = home
        self._module = module
        self._words = words
        self.name = name
        self.journal = home / f"{name}.journal"
        self.journal.touch()
        self.kills = 0
        self._size = 0
        self.process = self._start()

    def _start(self) -> WarmProcess:
        environment = {
            **os.environ,
            "FELIX_HOME": str(self._home),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        }
        script = Path(__file__).with_name(f"{self._module}.py")
        words = (str(self._home), str(self.journal), *self._words)
        with (self._home / f"{self.name}.log").open("ab") as log:
            return WarmProcess(script, *words, env=environment, cwd=ROOT, log=log)

    def kill_and_restart(self) -> None:
        """SIGKILL, and a new process that goes on with the same journal."""
        self.check()
        self.end()
        self.kills += 1
        self._size = self.journal.stat().st_size
        self.process = self._start()

    @property
    def is_at_work(self) -> bool:
        """True once it has written something since its last start."""
        return self.journal.stat().st_size > self._size

    def end(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        """A worker never ends by itself."""
        if self.process.poll() is not None:
            said = (self._home / f"{self.name}.log").read_text()[-3000:]
            raise AssertionError(f"{self.name} ended by itself:\n{said}")

    def lines(self) -> list[str]:
        """What it has written; a line that a kill cut short does not count."""
        text = self.journal.read_text()
        return text[: text.rfind("\n") + 1].splitlines()


class Part(Protocol):
    """One capability under load."""

    name: str

    async def start(self, region: felix.RegionClient) -> list[Worker]:
        """Begin the load; its workers are returned, for the killing."""

    def progress(self) -> int:
        """Grows while the part gets on. Raises where something has failed for good."""

    async def stop(self) -> None:
        """End the load in order; everything stands."""

    async def settle(self, region: felix.RegionClient) -> Books:
        """Compare what was promised with what is there."""


class Journal:
    """A worker's end of its file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, line: str) -> None:
        """One line, in one write."""
        os.write(self._file, line.encode() + b"\n")


async def soak(home: Path, kills: int, parts: list[Part], *, seed: int = 11) -> dict[str, dict[str, int]]:
    """Kill so often; the figures of each part. Raises AssertionError with every problem that a part found."""
    folder: RegionFolder = fixed_region(home)
    chance = Random(seed)
    broker = BrokerProcess(folder, home)
    workers: list[Worker] = []
    broker_kills = 0
    begun = time.monotonic()
    try:
        await asyncio.to_thread(broker.wait)
        async with client(folder) as region:
            for part in parts:
                workers += await part.start(region)
            # Half of the kills are the broker's: it is what all parts rest on.
            victims = [number % 2 == 0 or not workers for number in range(kills)]
            chance.shuffle(victims)
            for is_broker in victims:
                # Each part is seen to get on between two kills, so that none is only ever recovering.
                before = [part.progress() for part in parts]
                wanted = [reached + chance.choice(STEP) for reached in before]
                await _get_on(parts, wanted, workers)
                if is_broker:
                    broker.kill()
                    broker = BrokerProcess(folder, home)
                    broker_kills += 1
                    await asyncio.to_thread(broker.wait)
                else:
                    await asyncio.to_thread(chance.choice(workers).kill_and_restart)
            await _get_on(parts, [part.progress() + STEP[-1] for part in parts], workers)
            for part in parts:
                await part.stop()
            figures = {"kills": {"broker": broker_kills, "workers": sum(worker.kills for worker in workers)}}
            problems: list[str] = []
            for part in parts:
                books = await part.settle(region)
                figures[part.name] = books.figures
                problems += [f"{part.name}: {problem}" for problem in books.problems]
        figures["kills"]["seconds"] = round(time.monotonic() - begun)
        assert not problems, f"after {kills} kills: {problems}; {figures}"
        return figures
    except BaseException:
        print(broker.said())
        raise
    finally:
        for worker in workers:
            worker.end()
        broker.kill()


async def _get_on(parts: list[Part], wanted: list[int], workers: list[Worker]) -> None:
    limit = time.monotonic() + PROGRESS_S
    while True:
        reached = [part.progress() for part in parts]
        for worker in workers:
            worker.check()
        if all(at >= enough for at, enough in zip(reached, wanted, strict=True)) and all(
            worker.is_at_work for worker in workers
        ):
            return
        if time.monotonic() > limit:
            stuck = [
                f"{part.name} at {at} of {enough}"
                for part, at, enough in zip(parts, reached, wanted, strict=True)
                if at < enough
            ] + [worker.name for worker in workers if not worker.is_at_work]
            raise AssertionError(f"nothing got on for {PROGRESS_S:.0f} s: {stuck}")
        await asyncio.sleep(0.01)


def duplicates(values: list[str] | list[int] | list[bytes]) -> int:
    """How many are there more than once."""
    return len(values) - len(set(values))
