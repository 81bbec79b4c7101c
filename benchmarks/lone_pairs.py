"""Latency of lone records in two trees, asked by turns: `python -m benchmarks.lone_pairs OTHER`, where OTHER is the folder of another checkout.

For a machine that is busy with other things, where a latency means nothing by itself and the ratio of two that were taken within a second does. Both
trees have a broker, a publisher and a subscriber up at once, each a process; in every round one is asked and then the other, in turns first. What
is printed are medians over rounds, and the median and the quartiles of the ratios of each round, this tree over the other one. Two equal trees show what a ratio is worth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Final, NamedTuple

PAYLOAD: Final = b"x" * 248
"""Behind eight bytes of time: 256 in all."""
WARM: Final = 100
"""Records before the first round."""
ROLES: Final = ("broker", "subscriber", "publisher")


# What runs in a tree; only what both of them have may be used.


def _runner(loop: str) -> asyncio.Runner:
    if loop == "uvloop":
        import uvloop

        return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


def _used_us() -> int:
    """Processor time of this process."""
    return time.process_time_ns() // 1000


def _say(*words: object) -> None:
    print(*words, flush=True)


async def broker(home: Path, kind: str, engine: str) -> None:
    """Found a region and serve it until the pipe is closed."""
    import msgspec

    import felix
    from cli.benchmark.roles import RING_BYTES, bench_client, found_bench_region, serving
    from region.config import load_config

    lines = await _lines()
    folder = found_bench_region(home)
    async with serving(folder, msgspec.structs.replace(load_config(folder.config), engine=engine)):
        async with bench_client(home, engine) as client:
            ring_bytes = RING_BYTES if kind == "ephemeral" else 0
            await client.create_stream(
                "bench/lone/records", durability=felix.Durability(kind, 0), ring_bytes=ring_bytes
            )
        _say("ready")
        while await lines.readline():
            _say(_used_us())


async def publisher(home: Path, kind: str, engine: str, pace_s: float = 0.0) -> None:
    """Publish as many as a line says, one at a time; the microseconds of each acknowledgement."""
    from cli.benchmark.roles import bench_client

    lines = await _lines()
    async with (
        bench_client(home, engine) as client,
        client.stream("bench/lone/records").publisher() as stream,
    ):
        _say("ready")
        while line := await lines.readline():
            used, took = _used_us(), []
            for _ in range(int(line)):
                begun = time.monotonic_ns()
                await stream.publish(begun.to_bytes(8, "big") + PAYLOAD)
                took.append((time.monotonic_ns() - begun) // 1000)
                if pace_s:
                    await asyncio.sleep(pace_s)
            _say(_used_us() - used, *took)


async def subscriber(home: Path, kind: str, engine: str) -> None:
    """Receive as many as a line says; the microseconds of each, from its making."""
    from cli.benchmark.roles import bench_client

    lines = await _lines()
    async with (
        bench_client(home, engine) as client,
        client.stream("bench/lone/records").subscribe("latest") as stream,
    ):
        records = aiter(stream)
        _say("ready")
        while line := await lines.readline():
            used, took = _used_us(), []
            for _ in range(int(line)):
                record = await anext(records)
                took.append((time.monotonic_ns() - int.from_bytes(record.payload[:8], "big")) // 1000)
            _say(_used_us() - used, *took)


def work(options: argparse.Namespace) -> None:
    """One process of one tree."""
    publish = partial(publisher, pace_s=options.pace_ms / 1000)
    roles: dict[str, Callable[[Path, str, str], Coroutine[object, object, None]]]
    roles = {"broker": broker, "publisher": publish, "subscriber": subscriber}
    with _runner(options.loop) as runner:
        runner.run(roles[options.role](options.home, options.kinds, options.engine))


# What asks them.


class Round(NamedTuple):
    """Median microseconds in one tree."""

    acknowledged: float
    delivered: float
    broker: float
    """Of its processor, for a record; so the others."""
    publisher: float
    subscriber: float


class Tree:
    """One checkout, with its three processes."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._options = options
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, home: Path, kind: str) -> None:
        """Bring up its processes; `end` also where this raises."""
        home.mkdir()
        asked = self._options
        options = [
            "--kinds",
            kind,
            "--engine",
            asked.engine,
            "--loop",
            asked.loop,
            "--pace-ms",
            str(asked.pace_ms),
        ]
        for role in ROLES:
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).resolve()),
                    "--role",
                    role,
                    "--home",
                    str(home),
                    *options,
                ],
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": str(self._folder)},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._processes.append(process)
            if _line(process) != "ready":
                raise SystemExit(f"the {role} of {self._folder} did not start")

    def ask(self, count: int) -> Round:
        """Publish and receive `count` records."""
        serving, reading, writing = self._processes
        used = self._told(serving)[0]
        for process in (reading, writing):
            _tell(process, count)
        received, sent = _answer(reading), _answer(writing)
        broker_us = self._told(serving)[0] - used
        return Round(
            median(sent[1:]), median(received[1:]), broker_us / count, sent[0] / count, received[0] / count
        )

    @staticmethod
    def _told(process: subprocess.Popen[str]) -> list[int]:
        _tell(process, 0)
        return _answer(process)

    def end(self) -> None:
        """Clients first."""
        for process in reversed(self._processes):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


def _tell(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{count}\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _answer(process: subprocess.Popen[str]) -> list[int]:
    return [int(word) for word in _line(process).split()]


def asked(this: Tree, other: Tree, kind: str, options: argparse.Namespace) -> Iterator[tuple[Round, Round]]:
    """Rounds of both trees; each set has processes of its own, since two of the same code differ by some of a hundred, too."""
    for at in range(options.sets):
        order = (this, other) if at % 2 else (other, this)
        with tempfile.TemporaryDirectory(prefix="felix-bench-") as home, contextlib.ExitStack() as stack:
            for place, tree in enumerate(order):
                stack.callback(tree.end)
                tree.start(Path(home) / str(place), kind)
            for tree in order:
                tree.ask(WARM)
            for turn in range(options.rounds):
                found = {tree: tree.ask(options.count) for tree in (order if turn % 2 else reversed(order))}
                yield found[this], found[other]


def told(what: str, this: list[float], other: list[float]) -> str:
    """One line: medians, and the ratios of the rounds."""
    low, middle, high = quantiles([mine / theirs for mine, theirs in zip(this, other, strict=True)], n=4)
    return f"{what:30} {median(other):7.0f} {median(this):7.0f}   {middle:.3f} ({low:.3f} - {high:.3f})"


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lone_pairs")
    parser.add_argument("other", nargs="?", type=Path, help="another checkout")
    parser.add_argument("--kinds", default="fsync,ephemeral", help="durabilities")
    parser.add_argument("--engine", default="qh3")
    parser.add_argument("--loop", default="uvloop", choices=("uvloop", "asyncio"))
    parser.add_argument("--sets", type=int, default=6, help="times that all processes are started")
    parser.add_argument("--rounds", type=int, default=4, help="of each set")
    parser.add_argument("--count", type=int, default=100, help="records of each round and tree")
    parser.add_argument("--pace-ms", type=float, default=0.0, help="from an answer to the next record")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        work(options)
        return
    if options.other is None:
        parser.error("name another checkout")
    trees = Tree(Path(__file__).resolve().parent.parent, options), Tree(options.other.resolve(), options)
    rounds = options.sets * options.rounds
    print(f"{'':30} {'other':>7} {'this':>7}   this of other, {rounds} rounds of {options.count} (quartiles)")
    for kind in options.kinds.split(","):
        found = list(asked(*trees, kind, options))
        for place, what in enumerate(Round._fields):
            columns = [[pair[side][place] for pair in found] for side in (0, 1)]
            print(told(f"{kind}, {what} (us)", *columns), flush=True)


if __name__ == "__main__":
    main()
