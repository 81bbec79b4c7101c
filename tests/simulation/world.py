"""Machines on simulated time, disks and network, clients that use them, and what chance does to both.

A run has a script (simulation.script), drawn from its seed. Faults come one after the other, may overlap, and all end. Then clients
must come to their end; then every machine loses its power once more, starts from what its disk kept, and everything that was
promised is looked at.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path as FilePath
from random import Random
from typing import ClassVar, Final, Self

from simulation.script import Script, Step, shrink

from felix.errors import FelixError
from felix.runtime.simulated import WORK_S_MAX, SimulatedClock, SimulatedLoop, Standstill, simulated
from felix.storage.memory import MemoryDisk, MemoryFiles
from felix.transport.memory import MemoryEngine, MemoryNetwork, Path
from felix.transport.port import Engine
from region.limits.budget import Budget

START_MS: Final = 1_800_000_000_000
FAULTS_MAX: Final = 5
HANGS_S: Final = 0.9
"""At most; two may come after each other, and no consumer may be taken for one that does not acknowledge, nor a worker for one that does not finish."""
RUN_S_MAX: Final = 600.0
"""Of simulated time: five times what a publisher tries for."""
JOINS: Final = "joins"
"""What a client's first step is."""
AGAIN_S: Final = 0.5
AGAIN_S_MAX: Final = 32.0
"""A process that could not start is started again: after twice as long each time, as supervisors do."""
EVENTS_SHOWN: Final = 60
SHRINK_TRIES_MAX: Final = 150

QUIET_CALLS: Final = frozenset({"exists", "size", "free_bytes", "is_folder", "pread", "names", "close"})
"""Of a disk: they change nothing, so a run's events are told without them."""


Noted = tuple[float, tuple[object, ...]]
"""When something happened, and the parts of the line that says so."""


class InvariantError(AssertionError):
    """What the product promises did not hold."""


class Host:
    """A machine with a disk and a clock, and the one process that is kept running on it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.disk = MemoryDisk()
        self.disk.on_call = self._on_call
        self.standstill = Standstill()
        """of whatever blocks, in the processes of this machine"""
        self.runtime = simulated(world.loop, START_MS, self.standstill)
        self.boots = 0
        self.syncs_fail = 0
        """so many faults that make them fail are under way"""
        self.next_syncs_fail: list[int] = []
        """each with the next error; what is synced afterwards is"""
        self.failed_once: list[FilePath] = []
        """files and folders of which a sync failed so"""
        self.why = ""
        """the last start failed for this reason"""
        self.again_s = AGAIN_S
        """after which the next one that fails is repeated"""
        self._runs = False
        self._up = asyncio.Event()

    async def serve(self) -> None:
        """Start the process from what the disk has; returns once it serves."""
        raise NotImplementedError

    def keep_folder(self, folder: FilePath) -> None:
        """The folder was there before the run, and is durable."""
        files = self.disk.mount()
        files.make_folder(folder)
        for each in folder.parents:
            files.sync_folder(each)

    def mount(self) -> MemoryFiles:
        return self.disk.mount(self.world.files)

    @property
    def process(self) -> str:
        return f"{self.name} {self.boots}"

    def boot(self) -> None:
        """Start the process where none runs."""
        if self._runs:
            return
        self.boots += 1
        self._runs = True
        self.world.note(f"{self.name} starts")
        with self.world.loop.process(self.process):
            self.world.loop.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            await self.serve()
        except (FelixError, OSError) as error:
            self.why = str(error)
            self.world.note(f"{self.name} cannot start: {error}")
            self.crash(power=False)
            self.later(self.again_s)
            self.again_s = min(2 * self.again_s, AGAIN_S_MAX)
            return
        except Exception as error:
            # A mistake, which no other start would do without.
            self.why = repr(error)
            raise
        self.why, self.again_s = "", AGAIN_S
        self.world.note(f"{self.name} serves")
        self._up.set()

    def later(self, after_s: float) -> None:
        """Start after so long."""
        self.world.loop.call_later(after_s, self.boot, context=Context())

    def budgets(self) -> Iterable[Budget]:
        """What the process that runs bounds its buffers by."""
        return ()

    def check_limits(self) -> None:
        """No buffer holds more than it may. Raises InvariantError."""
        for budget in self.budgets():
            if not 0 <= budget.used_bytes <= budget.limit_bytes:
                raise InvariantError(
                    f"{self.name} holds {budget.used_bytes} of {budget.limit_bytes} bytes of {budget.name}"
                )

    def crash(self, *, power: bool) -> None:
        """The process ends at this moment, perhaps with its machine."""
        self.check_limits()
        self.world.note(f"{self.name} loses its {'power' if power else 'process'}")
        self._runs = False
        self._up.clear()
        self.world.loop.end(self.process)
        self.world.network.crash(self.name)
        if power:
            self.disk.lose_power(self.world.random)
        else:
            self.disk.kill()

    async def up(self) -> None:
        """Wait until it serves. Raises InvariantError where it does not come about."""
        try:
            async with asyncio.timeout(RUN_S_MAX):
                await self._up.wait()
        except TimeoutError:
            raise InvariantError(f"{self.name} does not start: {self.why}") from None

    def comes_back(self, path: FilePath) -> bool:
        """Whether the process goes on by itself after a sync of this file has failed once."""
        return False

    def _on_call(self, call: str, path: FilePath) -> None:
        if call == "sync" and self.syncs_fail:
            self.world.note(self.name, call, path, "fails")
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if call in ("sync", "sync_folder") and self.next_syncs_fail:
            error = self.next_syncs_fail.pop()
            self.failed_once.append(path)
            self.world.note(self.name, call, path, "fails once:", os.strerror(error))
            raise OSError(error, os.strerror(error), str(path))
        if call not in QUIET_CALLS:
            self.world.note(self.name, call, path)


class Client:
    """Somebody who uses what the world serves, and knows what he was promised."""

    name: ClassVar[str]

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = [step for step in world.script if step.who == self.name and step.what != JOINS]

    @classmethod
    def draw(cls, random: Random) -> list[Step]:
        """What it is to do."""
        return []

    async def run(self) -> None:
        """Do it, until the end."""
        raise NotImplementedError

    async def check(self) -> None:
        """All faults have ended, and everything was started anew. Raises InvariantError."""


class World:
    """One run."""

    faults: ClassVar[tuple[str, ...]] = (
        "power", "power", "kill", "part", "deaf", "path", "full", "sync", "clock", "slow",
    )  # fmt: skip
    bad_disks: ClassVar[float] = 0.2
    """In so many seeds a sync fails once and the next ones do not, or a disk does not answer for a while."""
    jumps_ms: ClassVar[tuple[int, ...]] = (-60_000, -1, 1_000, 86_400_000)
    """Of a wall clock."""
    files: ClassVar[type[MemoryFiles]] = MemoryFiles

    def __init__(self, seed: int, loop: SimulatedLoop, script: Script) -> None:
        self.seed, self.loop, self.script = seed, loop, script
        self.random = loop.random
        self.network = MemoryNetwork(self.random)
        self.noted: list[Noted] = []
        self.hosts: dict[str, Host] = {}
        self.clients: list[Client] = []
        self.counts: dict[str, int] = {}
        """What the run came to, by what is counted."""

    kinds: ClassVar[tuple[type[Client], ...]] = ()
    """Of clients."""

    @property
    def joining(self) -> list[type[Client]]:
        """Who takes part in this run."""
        names = {step.who for step in self.script if step.what == JOINS}
        return [kind for kind in self.kinds if kind.name in names]

    @classmethod
    def party(cls, random: Random) -> list[type[Client]]:
        """Who takes part in a run: often one or two, which is quick, sometimes all."""
        return random.sample(cls.kinds, random.choice((1, 1, 2, 2, len(cls.kinds))))

    @classmethod
    def targets(cls) -> tuple[str, ...]:
        """Hosts that faults happen to."""
        raise NotImplementedError

    @classmethod
    def draw(cls, random: Random) -> Script:
        """What a run is to do."""
        steps = [cls._draw_fault(random) for _ in range(random.randint(1, FAULTS_MAX))]
        for kind in cls.party(random):
            steps += [Step(kind.name, JOINS, 0.0), *kind.draw(random)]
        return tuple(steps)

    @classmethod
    def _draw_fault(cls, random: Random) -> Step:
        # Most often while something is on its way.
        after_s = random.choice((0.002, 0.02, 0.5)) * random.random()
        what, where = random.choice(cls.faults), random.choice(cls.targets())
        lasts_s = random.choice((0.01, 0.2, 1.0)) * random.random()
        if what in ("part", "deaf") and random.random() < 0.3:
            lasts_s = 40.0
        return Step("fault", what, after_s, where, lasts_s, random.getrandbits(8))

    @classmethod
    def make_loop(cls, random: Random) -> SimulatedLoop:
        """What a run runs on."""
        return SimulatedLoop(random)

    def engine(self, host: str) -> Engine:
        """By which the processes of a host speak with others."""
        return MemoryEngine(self.network, host)

    def make(self) -> Iterable[Host]:
        """The machines."""
        raise NotImplementedError

    async def begin(self) -> None:
        """Prepare what clients use. No fault has happened yet."""

    def note(self, *event: object) -> None:
        """Parts of one line, made into one only where somebody reads it; a path is told by its last name."""
        self.noted.append((self.loop.time(), event))

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    # -- the run ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        self.network.path = self.random.choice((Path(), Path(0.0005, 0.002), Path(0.01, 0.05, 0.1)))
        for host in self.make():
            self.hosts[host.name] = host
            host.boot()
            await host.up()
        await self.begin()
        self.clients = [kind(self) for kind in self.joining]
        with self.loop.process("clients"):
            working = [asyncio.create_task(client.run(), name=client.name) for client in self.clients]
        await self._all([*working, asyncio.create_task(self._play_faults())])
        for host in self.hosts.values():
            host.crash(power=True)
        for host in self.hosts.values():
            host.boot()
        for host in self.hosts.values():
            await host.up()
        await self.check()

    async def _all(self, tasks: list[asyncio.Task[None]]) -> None:
        done, waiting = await asyncio.wait(tasks, timeout=RUN_S_MAX, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            error = task.exception()
            if isinstance(error, FelixError):
                raise InvariantError(f"{task.get_name()} cannot go on: {error}") from error
            if error is not None:
                raise error
        if waiting:
            names = sorted(task.get_name() for task in waiting)
            raise InvariantError(f"not served any more, although the faults have ended: {', '.join(names)}")

    async def check(self) -> None:
        """Everything that was promised. Raises InvariantError."""
        for client in self.clients:
            try:
                async with asyncio.timeout(RUN_S_MAX):
                    await client.check()
            except TimeoutError:
                raise InvariantError(f"{client.name} is not served after a start") from None
            except FelixError as error:
                raise InvariantError(f"{client.name} is not served after a start: {error}") from error
        for host in self.hosts.values():
            host.check_limits()

    # -- faults ----------------------------------------------------------------------------------------

    async def _play_faults(self) -> None:
        playing: list[asyncio.Task[None]] = []
        for step in self.script:
            if step.who == "fault":
                await asyncio.sleep(step.after_s)
                self.note(f"fault: {step}")
                playing.append(asyncio.create_task(self.fault(step)))
        await asyncio.gather(*playing)
        self.network.heal()
        self.network.path = Path()
        self.loop.work_s_max = WORK_S_MAX

    def peers(self, name: str) -> list[str]:
        """Whom this host talks with."""
        raise NotImplementedError

    async def fault(self, step: Step) -> None:
        host = self.hosts[step.where]
        peers = self.peers(host.name)
        peer = peers[step.number % len(peers)]
        match step.what:
            case "part":
                self.network.part(peer, host.name)
                await asyncio.sleep(step.lasts_s)
                self.network.heal()
            case "deaf":
                # One direction only: what one says is heard, what the other says is not.
                one, other = (peer, host.name) if step.number & 128 else (host.name, peer)
                self.network.part(one, other, both=False)
                await asyncio.sleep(step.lasts_s)
                self.network.heal()
            case "path":
                self.network.path = Path(0.001, 0.005, 0.2) if step.number & 1 else Path()
            case "full":
                taken_bytes = max(0, host.disk.room_bytes - 300 * (step.number & 1))
                host.disk.room_bytes -= taken_bytes
                await asyncio.sleep(step.lasts_s)
                host.disk.room_bytes += taken_bytes
            case "sync":
                host.syncs_fail += 1
                await asyncio.sleep(step.lasts_s)
                host.syncs_fail -= 1
                # What could not be synced has stopped, or nothing was synced meanwhile: an operator starts the process again.
                host.crash(power=bool(step.number & 1))
                host.later(step.lasts_s)
            case "sync once":
                host.next_syncs_fail.append(errno.EIO if step.number & 2 else errno.ENOSPC)
                await asyncio.sleep(step.lasts_s)
                host.next_syncs_fail.clear()
                failed, host.failed_once = host.failed_once, []
                if step.number & 4 and all(map(host.comes_back, failed)):
                    self.count("left to itself", bool(failed))
                    return
                # Whatever went on goes on with a disk that has not got all that was written. Then an operator starts anew what has stopped.
                host.crash(power=bool(step.number & 1))
                host.later(0.1)
            case "hang":
                host.standstill.begin()
                await asyncio.sleep(step.lasts_s)
                host.standstill.end()
            case "clock":
                clock = host.runtime.clock
                assert isinstance(clock, SimulatedClock)
                clock.start_ms += self.jumps_ms[step.number % len(self.jumps_ms)]
            case "slow":
                before_s, self.loop.work_s_max = self.loop.work_s_max, 0.1
                await asyncio.sleep(step.lasts_s)
                self.loop.work_s_max = before_s
            case how:
                host.crash(power=how == "power")
                host.later(step.lasts_s)


def told(noted: Iterable[Noted]) -> list[str]:
    """A line of each."""
    return [
        f"{at_s:.6f} {' '.join(part.name if isinstance(part, FilePath) else str(part) for part in parts)}"
        for at_s, parts in noted
    ]


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    counts: dict[str, int]
    noted: list[Noted]

    @property
    def events(self) -> list[str]:
        """What happened, in order."""
        return told(self.noted)

    @property
    def digest(self) -> str:
        """Of all that happened, in order: the same of every run of one seed."""
        return hashlib.sha256("\n".join(self.events).encode()).hexdigest()


class FailedError(AssertionError):
    """A seed that breaks a promise: why, what it did last, and the least that still breaks it."""

    def __init__(self, seed: int, world: str, why: str, events: list[str], script: Script) -> None:
        super().__init__(f"{world}, seed {seed}: {why}")
        self.why = why
        self.events = events
        self.script = script

    def with_script(self, script: Script, why: str) -> Self:
        """The same, told with the smallest script."""
        steps = "\n".join(str(step) for step in script)
        self.add_note("the last events:\n" + "\n".join(self.events[-EVENTS_SHOWN:]))
        self.add_note(f"the least that breaks it ({why}):\n{steps}")
        return self


def script_of(seed: int, world: type[World]) -> Script:
    """What this seed's run does. Drawn from a chance of its own: leaving a step out changes no other step."""
    script = world.draw(Random(f"{world.__name__} {seed}"))
    # From another chance, so that seeds without these are what they were before there were any.
    random = Random(f"{world.__name__} {seed} bad disks")
    if random.random() < world.bad_disks:
        steps = list(script)
        for _ in range(random.randint(1, 2)):
            at = random.randint(0, sum(step.who == "fault" for step in script))
            after_s = random.choice((0.002, 0.02, 0.5)) * random.random()
            what, where = random.choice(("sync once", "hang")), random.choice(world.targets())
            lasts_s = random.choice((0.1, HANGS_S)) * random.random()
            steps.insert(at, Step("fault", what, after_s, where, lasts_s, random.getrandbits(8)))
        script = tuple(steps)
    return script


def simulate(seed: int, world: type[World], script: Script | None = None) -> Outcome:
    """One run. Raises FailedError; what is not a broken promise, as it is."""
    # Cycles are collected when nothing of the run is left but those, and only its own: of all that was imported there is nothing
    # to collect, and looking at it takes a fifth of a run.
    collects = gc.isenabled()
    gc.disable()
    # Coroutines that a crash left where they were cannot clean up.
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        return _simulate(seed, world, script)
    finally:
        if collects:
            gc.collect(0)
            gc.enable()
        sys.unraisablehook = before


def _simulate(seed: int, world: type[World], script: Script | None) -> Outcome:
    loop = world.make_loop(Random(seed))
    # What nobody waits for any more, where a run ends before its clients do.
    loop.set_exception_handler(lambda *_: None)
    # Lost connections and torn tails are what is simulated.
    before, logging.root.manager.disable = logging.root.manager.disable, logging.CRITICAL
    made = world(seed, loop, script_of(seed, world) if script is None else script)
    try:
        loop.run_until_complete(made.run())
        made.count("starts", sum(host.boots for host in made.hosts.values()))
        return Outcome(seed, made.counts, made.noted)
    except AssertionError as error:
        raise FailedError(seed, world.__name__, str(error), told(made.noted), made.script) from error
    except BaseException as error:
        error.add_note(f"seed {seed}; the last events:\n" + "\n".join(told(made.noted[-EVENTS_SHOWN:])))
        raise
    finally:
        with suppress(Exception):
            loop.close()
        logging.root.manager.disable = before


def simulate_or_explain(seed: int, world: type[World]) -> Outcome:
    """The same; of a seed that fails the least that still fails is looked for, and told."""
    try:
        return simulate(seed, world)
    except FailedError as error:
        failed, why = error, error.why

    def fails(script: Script) -> bool:
        nonlocal why
        try:
            simulate(seed, world, script)
        except FailedError as error:
            why = error.why
            return True
        return False

    script = shrink(failed.script, fails, SHRINK_TRIES_MAX)
    raise failed.with_script(script, why)
