"""Ordinary operation never breaks evidence: random sequences of what operators do leave logs that verify and reconcile.

One in every run, and a short one of regions with several brokers. `make ordinary SEQUENCES=500` plays so many, and a tenth as many of several brokers
(FELIX_ORDINARY_SEVERAL: so many), reports them all with Spark, and prints every seed that failed with its operations; `make ordinary SEQUENCES=1 SEED=17`
plays that one again. What failed is left in its folder.
It says how each sequence ended, and after each report the totals so far: a run that is cut off has shown what it played, and
`SEED` goes on from there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from etcd_process import etcd_binary
from ordinary import play
from ordinary.evidence import read_leaves, shown_losses
from ordinary.play import OPERATIONS, play_all
from ordinary.several import Several
from ordinary.world import World

from audit.leaf import Kind, Side
from audit.trust import Trust
from policy.grant import StandingAction

SEQUENCES = int(os.environ.get("FELIX_ORDINARY_SEQUENCES", "1"))
SEED = int(os.environ.get("FELIX_ORDINARY_SEED", "1"))
SEVERAL = int(os.environ.get("FELIX_ORDINARY_SEVERAL", (SEQUENCES + 9) // 10))
"""Sequences of regions with several brokers. Each costs what five of the others do."""
IS_LONG = "FELIX_ORDINARY_SEQUENCES" in os.environ
AT_ONCE = 4
"""Sequences side by side: each mostly waits."""
AT_ONCE_SEVERAL = 2
"""Of those with several brokers: up to eight processes each."""
STEPS_SEVERAL = 40 if IS_LONG else 6
PER_REPORT = 50
"""Sequences whose logs one report shows, 250 logs: a report costs about the same for one sequence as for these."""


class Tally:
    """What sequences did, what they left, and what does not hold about it."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.done: Counter[str] = Counter()
        self.leaves: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self.failed: dict[int, str] = {}
        self.played = 0
        self._began_s = time.monotonic()

    async def take(self, world: World, found: list[str]) -> None:
        self.played += 1
        self.done += world.counts
        self.leaves["alarms"] += world.alarms
        self.leaves["regions with losses to show"] += len(shown_losses(world))
        for path in world.logs().values():
            for leaf in read_leaves(path):
                header = leaf.header
                self.leaves[header.kind.name] += 1
                if header.kind in (Kind.INTENT, Kind.WITHHELD) or header.side is Side.INGRESS:
                    self.records[header.reason or header.kind.name] += header.records
                if header.kind is Kind.STANDING and header.action in (
                    StandingAction.RESEND,
                    StandingAction.ACCEPT_TRUNCATION,
                ):
                    self.leaves[header.action] += 1
        if found:
            self.fail(world, found)
        print(
            f"seed {world.number} {'FAILED' if found else 'holds'}: {self.played} of {self.wanted}, {self.pace()}",
            flush=True,
        )

    def fail(self, world: World, found: list[str]) -> None:
        lines = [f"seed {world.number}:", *found, f"left in {world.home}, after:", *world.history]
        self.failed[world.number] = "\n  ".join([*self.failed.get(world.number, "").splitlines(), *lines])
        print(self.failed[world.number], flush=True)

    def pace(self) -> str:
        minutes = (time.monotonic() - self._began_s) / 60
        return f"{len(self.failed)} failed, {self.played / minutes:.1f} per minute"

    def __str__(self) -> str:
        return (
            f"{self.played} sequences, {self.done.total()} operations, {self.pace()} {sorted(self.failed)}"
            f"\n  {dict(self.done)}\n  {dict(self.leaves)}\n  {dict(self.records)}"
        )


async def test_ordinary_operation_never_breaks_evidence(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tally = await play_and_report(
        tmp_path, SEQUENCES, request, lambda seeds, home, tell: play_all(seeds, home, AT_ONCE, tell)
    )
    assert tally.records["INTENT"] or not SEQUENCES, "nothing crossed: these sequences show nothing"
    if SEQUENCES >= 100:
        assert set(tally.done) == {operation.__name__ for operation in OPERATIONS}, (
            "some operation was never drawn"
        )


@pytest.mark.etcd
async def test_ordinary_operation_of_several_brokers_never_breaks_evidence(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    tally = await play_and_report(
        tmp_path,
        SEVERAL,
        request,
        lambda seeds, home, tell: play_all(seeds, home, AT_ONCE_SEVERAL, tell, Several, STEPS_SEVERAL),
    )
    assert tally.records["INTENT"] or not SEVERAL, "nothing crossed: these sequences show nothing"


Tell = Callable[[World, list[str]], Awaitable[None]]


async def play_and_report(
    home: Path,
    count: int,
    request: pytest.FixtureRequest,
    play_some: Callable[[list[int], Path, Tell], Awaitable[None]],
) -> Tally:
    """Play so many sequences, from the first seed on, and report them if it is a long run. Fails with what does not hold."""
    tally = Tally(count)
    report: Report | None = request.getfixturevalue("report") if IS_LONG and count else None
    for first in range(SEED, SEED + count, PER_REPORT):
        seeds = list(range(first, min(first + PER_REPORT, SEED + count)))
        folder, worlds = home / str(first), list[World]()

        async def tell(world: World, found: list[str], worlds: list[World] = worlds) -> None:
            worlds.append(world)
            await tally.take(world, found)
            if not found:
                await asyncio.to_thread(world.keep_logs_alone)

        await play_some(seeds, folder, tell)
        if report is not None:
            sound = [world for world in worlds if world.number not in tally.failed]
            for world, wrong in report(sound, folder / "report").items():
                tally.fail(world, wrong)
        for world in worlds:
            if world.number not in tally.failed:
                shutil.rmtree(world.home)
        print(f"seeds {SEED} to {seeds[-1]}: {tally}", flush=True)
    assert not tally.failed, "\n".join(tally.failed.values())
    return tally


async def test_a_sequence_that_does_not_go_on_says_where_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never_ends(self: World) -> None:
        await asyncio.Event().wait()

    async def begins(self: World, operations: object, steps: int) -> None:
        self.history.append("create: a stream")
        await never_ends(self)

    monkeypatch.setattr(World, "play", begins)
    monkeypatch.setattr(play, "STEP_S", 0.05)
    told: list[tuple[World, list[str]]] = []

    async def tell(world: World, found: list[str]) -> None:
        told.append((world, found))

    await play.play_all([7, 8], tmp_path, 2, tell)
    assert sorted(world.number for world, _ in told) == [7, 8]
    for world, (sentence, stacks) in told:
        assert sentence.startswith("did not go on for") and world.history == ["create: a stream"]
        assert stacks.count("never_ends") == 1, "the stacks of this sequence alone, down to where it waits"


Report = Callable[[list[World], Path], dict[World, list[str]]]


@pytest.fixture
def report(spark: Any) -> Report:
    """What the report says that does not hold about the logs of these sequences, in one job. It must show what a log lost for good."""
    from audit.spark.report import run_report

    def made(worlds: list[World], out: Path) -> dict[World, list[str]]:
        logs = [path for world in worlds for path in world.logs().values()]
        trust = Trust.of(world.bundle(region) for world in worlds for region in world.names)
        result = run_report(logs, out, trust=trust, session=spark, cosignatures_min=0)
        shown = result.report
        wrong = [row for row in shown.findings.records() if row["status"] == "differs"]
        wrong += [
            row for row in shown.reconciliation.records() if row["status"] == "differs" or row["unaccounted"]
        ]
        wrong += [row for row in shown.exceptions.records() if row["severity"] == "breach"]
        # What arrived behind the end of an egress log stays open for a while: a newer copy of that log may announce it.
        opened = [row for row in shown.findings.records() if row["status"] == "open"]
        told = [str(row) for row in wrong], [str(row) for row in opened]
        return {world: found for world in worlds if (found := _amiss(world, *told))}

    return made


def _amiss(world: World, wrong: list[str], opened: list[str]) -> list[str]:
    """Of what a report calls wrong: what this sequence lost nothing for, and what it lost that the report shows neither so nor as open."""
    lost = shown_losses(world)
    ours = [row for row in wrong if any(region in row for region in world.names)]
    amiss = [f"reported: {row}" for row in ours if not any(region in row for region in lost)]
    return amiss + [
        f"not reported: what the log of {region} lost"
        for region in sorted(lost)
        if not any(region in row for row in [*ours, *opened])
    ]
