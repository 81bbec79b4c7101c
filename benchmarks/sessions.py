"""The measurement of many sessions that do nothing: what each costs one broker, which lets in as many as there are.

Clients in one process open their sessions a few at once, prove who they are, and stay. Then nobody asks anything, and the broker's memory and
wake-ups are counted; keep-alives go on, as they do in earnest. A sample asks something in the end, and must be answered.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.process_use import ProcessUse
from benchmarks.shards import ENGINE, SETTLE_S, WHOLE_TIMEOUT_S, idle_use, sample_of, served
from cli.benchmark.measurement import Machine, machine
from cli.benchmark.processes import Processes, next_message
from cli.benchmark.roles import bench_client, found_bench_region
from felix.errors import FelixError
from region.streams.places import OPERATORS_PART

AT_ONCE: Final = 16
"""Sessions that are being opened at any moment."""
FILES_PER_SESSION: Final = 2
"""A socket and its company, in the process of the clients."""


class SessionsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `sample`: sessions that ask something in the end; `idle_s`: how long wake-ups are counted."""

    sessions: int = 5_000
    sample: int = 100
    idle_s: float = 10.0


class SessionsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks sessions --json` prints. `refused`: why no more were opened; `unanswered`: of the sample."""

    kind: str
    machine: Machine
    plan: SessionsPlan
    seconds: float
    opened: int
    open_cpu_s: float
    refused: str
    bytes_per_session: float
    wakeups_per_s: float
    idle_cpu_share: float
    asked: int
    unanswered: int


class Opened(msgspec.Struct, frozen=True):
    """How many sessions are open, and why there are no more."""

    count: int
    refused: str


class Ask(msgspec.Struct, frozen=True):
    """Let so many sessions ask something."""

    sample: int


async def clients(pipe: Pipe, home: Path, count: int) -> None:
    """Open sessions and answer Opened; then Ask, with how many were not answered, until the parent is done."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count * FILES_PER_SESSION:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[Any] = []
    refusals: list[str] = []
    async with AsyncExitStack() as stack:

        async def open_some(numbers: Iterator[int]) -> None:
            for _ in numbers:
                try:
                    held.append(await stack.enter_async_context(bench_client(home, ENGINE)))
                except (FelixError, OSError) as error:
                    refusals.append(f"{type(error).__name__}: {error}")
                if refusals:
                    return

        numbers = iter(range(count))
        await asyncio.gather(*(open_some(numbers) for _ in range(AT_ONCE)))
        pipe.send(Opened(len(held), refusals[0] if refusals else ""))
        while (command := await next_message(pipe)) is not None:
            assert isinstance(command, Ask)
            answered = 0
            for at in sample_of(len(held), command.sample):
                try:
                    await held[at].describe()
                    answered += 1
                except FelixError:
                    continue
            pipe.send(command.sample - answered)


def measure_sessions(
    plan: SessionsPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> SessionsReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for minutes.

    Raises UnavailableError where a process fails or does not finish.
    """
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as name,
        Processes(begun + WHOLE_TIMEOUT_S, what="The measurement of sessions") as processes,
    ):
        home = Path(name)
        found_bench_region(home)
        broker = processes.start(served, home, plan.sessions * (OPERATORS_PART + 1) // OPERATORS_PART)
        processes.answer(broker)
        pid = processes.pid_of(broker)
        time.sleep(SETTLE_S)
        empty = ProcessUse.of(pid)
        said(f"{plan.sessions} sessions are opened")
        users = processes.start(clients, home, plan.sessions)
        opened: Opened = processes.answer(users)
        full = ProcessUse.of(pid)
        said(f"{opened.count} sessions do nothing")
        wakeups, cpu_share = idle_use(pid, plan.idle_s)
        idle = ProcessUse.of(pid)
        asked = min(plan.sample, opened.count)
        users.send(Ask(asked))
        unanswered: int = processes.answer(users)
    return SessionsReport(
        kind="sessions",
        machine=machine(),
        plan=plan,
        seconds=time.monotonic() - begun,
        opened=opened.count,
        open_cpu_s=full.cpu_s - empty.cpu_s,
        refused=opened.refused,
        bytes_per_session=(idle.private_bytes - empty.private_bytes) / max(1, opened.count),
        wakeups_per_s=wakeups,
        idle_cpu_share=cpu_share,
        asked=asked,
        unanswered=unanswered,
    )
