"""The measurement of many shards that do nothing: what each costs one broker at its default limits.

Streams of one shard are made, some at once, until there are as many as asked for. Each quarter is timed, with the broker's own processor time
beside it, so that what grows with the number of streams shows. Then nobody does anything, and the broker's wake-ups are counted.
A record goes into each of a sample of shards, the broker stops and starts again on what it has, the sample is read back, and written once more.
Then the broker is killed and starts again, and the sample is read back once more.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import msgspec

import felix
from benchmarks.process_use import ProcessUse
from cli.benchmark.measurement import Machine, machine
from cli.benchmark.processes import Processes, next_message
from cli.benchmark.roles import REGION, bench_client, found_bench_region, serving
from felix.errors import FelixError
from region.config import load_config
from region.folder import RegionFolder

STEPS: Final = 4
"""Parts that the making is timed in."""
AT_ONCE: Final = 16
"""Streams that are being made at any moment."""
SETTLE_S: Final = 2.0
"""What was begun by the making is over."""
WHOLE_TIMEOUT_S: Final = 1_800.0
ENGINE: Final = "qh3"


class ShardsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `sample`: shards that are written and read; `idle_s`: how long wake-ups are counted."""

    shards: int = 10_000
    sample: int = 200
    idle_s: float = 10.0


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the making: the number of shards after it, and what it took."""

    shards: int
    seconds: float
    broker_cpu_s: float


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to a clean end (0: it was killed), from the start of a new process until it serves, and its processor time meanwhile."""

    stop_s: float
    start_s: float
    start_cpu_s: float


class ShardsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks shards --json` prints. `refused`: why no more were made; `lost`: records of the sample that were not
    found as they were written."""

    kind: str
    machine: Machine
    plan: ShardsPlan
    seconds: float
    made: list[Made]
    refused: str
    bytes_per_shard: float
    files: int
    wakeups_per_s: float
    wakeups_per_s_empty: float
    idle_cpu_share: float
    restart: Restart
    killed: Restart
    restarted_bytes_per_shard: float
    restarted_shards: int
    """the fewest that came back from a stop, or from being killed"""
    checked: int
    lost: int

    @property
    def is_whole(self) -> bool:
        """Every shard came back each time, and of the sample every record."""
        return not self.lost and self.restarted_shards == self.made[-1].shards


async def served(pipe: Pipe, home: Path, sessions: int = 0) -> None:
    """A region's broker on what is in `home`; answers once it serves, and once more when it has stopped as it was told to. `sessions`:
    how many it lets in, where that is more than by default."""
    folder = RegionFolder.of(REGION, home)
    config = load_config(folder.config)
    limits = msgspec.structs.replace(config.limits, sessions=max(sessions, config.limits.sessions))
    config = msgspec.structs.replace(config, limits=limits)
    async with serving(folder, config):
        pipe.send(None)
        await next_message(pipe)
    pipe.send(None)


def measure_shards(
    plan: ShardsPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> ShardsReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for minutes.

    Raises UnavailableError where a process fails or does not finish.
    """
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as name,
        Processes(begun + WHOLE_TIMEOUT_S, what="The measurement of shards") as processes,
    ):
        home = Path(name)
        found_bench_region(home)
        first = _start(processes, home)
        pid = processes.pid_of(first)
        said("an empty broker does nothing")
        empty_wakeups, _ = idle_use(pid, plan.idle_s)
        empty = ProcessUse.of(pid)
        made, refused = asyncio.run(_make_all(home, plan.shards, pid, said))
        count = made[-1].shards
        said(f"{count} shards do nothing")
        wakeups, cpu_share = idle_use(pid, plan.idle_s)
        idle = ProcessUse.of(pid)
        sample = sample_of(count, plan.sample)
        asyncio.run(_write(home, sample, "before"))
        said("the broker stops")
        at = time.monotonic()
        first.send(None)
        processes.answer(first)
        stop_s = time.monotonic() - at
        said("the broker starts again")
        second, restart = _restart(processes, home, stop_s)
        restarted = ProcessUse.of(processes.pid_of(second))
        restarted_shards = asyncio.run(_count(home))
        lost = asyncio.run(_read(home, sample, ["before"]))
        asyncio.run(_write(home, sample, "after"))
        lost += asyncio.run(_read(home, sample, ["before", "after"]))
        said("the broker is killed, and starts again")
        processes.kill(second)
        third, killed = _restart(processes, home, 0.0)
        restarted_shards = min(restarted_shards, asyncio.run(_count(home)))
        lost += asyncio.run(_read(home, sample, ["before", "after"]))
        third.send(None)
        processes.answer(third)
    return ShardsReport(
        kind="shards",
        machine=machine(),
        plan=plan,
        seconds=time.monotonic() - begun,
        made=made,
        refused=refused,
        bytes_per_shard=(idle.private_bytes - empty.private_bytes) / max(1, count),
        files=idle.files,
        wakeups_per_s=wakeups,
        wakeups_per_s_empty=empty_wakeups,
        idle_cpu_share=cpu_share,
        restart=restart,
        killed=killed,
        restarted_bytes_per_shard=(restarted.private_bytes - empty.private_bytes) / max(1, count),
        restarted_shards=restarted_shards,
        checked=3 * len(sample),
        lost=lost,
    )


def sample_of(count: int, wanted: int) -> list[int]:
    """Numbers of streams, spread evenly over `count`."""
    wanted = min(count, wanted)
    return [at * count // wanted for at in range(wanted)]


def _start(processes: Processes, home: Path) -> Any:
    pipe = processes.start(served, home)
    processes.answer(pipe)
    return pipe


def _restart(processes: Processes, home: Path, stop_s: float) -> tuple[Any, Restart]:
    at = time.monotonic()
    pipe = _start(processes, home)
    start_s = time.monotonic() - at
    use = ProcessUse.of(processes.pid_of(pipe))
    return pipe, Restart(stop_s=stop_s, start_s=start_s, start_cpu_s=use.cpu_s)


def idle_use(pid: int, seconds: float) -> tuple[float, float]:
    """Wake-ups per second, and the share of one processor, of a broker that nobody asks anything."""
    time.sleep(SETTLE_S)
    before, at = ProcessUse.of(pid), time.monotonic()
    time.sleep(seconds)
    after, elapsed = ProcessUse.of(pid), time.monotonic() - at
    return (after.wakeups - before.wakeups) / elapsed, (after.cpu_s - before.cpu_s) / elapsed


def _stream(number: int) -> str:
    return f"bench/shards/of-{number:05d}"


async def _make_all(home: Path, shards: int, pid: int, said: Callable[[str], None]) -> tuple[list[Made], str]:
    """Make the streams, each part timed; and why it ended early, if it did."""
    made: list[Made] = []
    total = 0
    async with bench_client(home, ENGINE) as client:
        for step in range(STEPS):
            numbers = iter(range(total, shards * (step + 1) // STEPS))
            refusals: list[str] = []
            at, used = time.monotonic(), ProcessUse.of(pid).cpu_s

            async def make(numbers: Any = numbers, refusals: list[str] = refusals) -> int:
                count = 0
                for number in numbers:
                    try:
                        await client.create_stream(_stream(number), shards=1)
                    except FelixError as error:
                        refusals.append(f"{error.code.name}: {error.sentence}")
                        return count
                    count += 1
                return count

            total += sum(await asyncio.gather(*(make() for _ in range(AT_ONCE))))
            said(f"{total} of {shards} shards are made")
            made.append(
                Made(
                    shards=total,
                    seconds=time.monotonic() - at,
                    broker_cpu_s=ProcessUse.of(pid).cpu_s - used,
                )
            )
            if refusals:
                return made, refusals[0]
    return made, ""


def _payload(number: int, when: str) -> bytes:
    return f"{when} {number}".encode()


async def _write(home: Path, sample: list[int], when: str) -> None:
    async with bench_client(home, ENGINE) as client:
        for number in sample:
            await client.stream(_stream(number)).publish(_payload(number, when))


async def _count(home: Path) -> int:
    async with bench_client(home, ENGINE) as client:
        return sum([state.shards async for state in client.list_streams("bench/shards/")])


async def _read(home: Path, sample: list[int], when: list[str]) -> int:
    """How many of the sample's streams do not hold just what was written."""
    wrong = 0
    async with bench_client(home, ENGINE) as client:
        for number in sample:
            wanted = [_payload(number, each) for each in when]
            wrong += await _held(client, number, len(wanted)) != wanted
    return wrong


async def _held(client: felix.RegionClient, number: int, count: int) -> list[bytes]:
    held: list[bytes] = []
    try:
        async with asyncio.timeout(30), client.stream(_stream(number)).subscribe("earliest") as records:
            async for record in records:
                held.append(bytes(record.payload))
                if len(held) == count:
                    break
    except (TimeoutError, FelixError):
        pass
    return held
