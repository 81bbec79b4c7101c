"""Ordinary operation never breaks evidence: random sequences of what operators do leave logs that verify and reconcile.

A few in every run. `make ordinary SEQUENCES=500` plays so many, reports them all with Spark, and prints every seed that
failed with its operations; `make ordinary SEQUENCES=1 SEED=17` plays that one again.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ordinary.world import OPERATIONS, World, play_all, read_leaves

from audit.leaf import Kind, Side
from audit.trust import Trust
from policy.grant import StandingAction

SEQUENCES = int(os.environ.get("FELIX_ORDINARY_SEQUENCES", "2"))
SEED = int(os.environ.get("FELIX_ORDINARY_SEED", "1"))
IS_LONG = "FELIX_ORDINARY_SEQUENCES" in os.environ
AT_ONCE = 4
"""Sequences side by side: each mostly waits."""
PER_REPORT = 20
"""Sequences whose logs one report shows: a hundred logs."""


class Tally:
    """What sequences did, what they left, and what does not hold about it."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.leaves: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self.failed: dict[int, str] = {}

    async def take(self, world: World, found: list[str]) -> None:
        self.done += world.counts
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

    def fail(self, world: World, found: list[str]) -> None:
        lines = [f"seed {world.number}:", *found, "after:", *world.history]
        self.failed[world.number] = "\n  ".join(lines)
        print(self.failed[world.number], flush=True)


async def test_ordinary_operation_never_breaks_evidence(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tally, seeds = Tally(), list(range(SEED, SEED + SEQUENCES))
    report: Callable[[list[World], Path], list[str]] | None = (
        request.getfixturevalue("report") if IS_LONG else None
    )
    for at in range(0, len(seeds), PER_REPORT):
        home, worlds = tmp_path / str(at), []

        async def tell(world: World, found: list[str], worlds: list[World] = worlds) -> None:
            worlds.append(world)
            await tally.take(world, found)

        await play_all(seeds[at : at + PER_REPORT], home, AT_ONCE, tell)
        if report is not None:
            sound = [world for world in worlds if world.number not in tally.failed]
            for sentence in report(sound, home / "report"):
                tally.failed[-at - 1] = f"the report of seeds {[world.number for world in sound]}: {sentence}"
            print(
                f"seeds to {seeds[at : at + PER_REPORT][-1]}: {len(tally.failed)} failed; {dict(tally.records)}",
                flush=True,
            )
        shutil.rmtree(home)
    print(
        f"{SEQUENCES} sequences from seed {SEED}: {dict(tally.done)}, {dict(tally.leaves)}, {dict(tally.records)}"
    )
    assert not tally.failed, "\n".join(tally.failed.values())
    assert tally.records["INTENT"], "nothing crossed: these sequences show nothing"
    if SEQUENCES >= 100:
        assert set(tally.done) == set(OPERATIONS), "some operation was never drawn"


@pytest.fixture
def report(spark: Any) -> Callable[[list[World], Path], list[str]]:
    """What the report says that does not hold about the logs of these sequences, in one job."""
    from audit.spark.report import run_report

    def made(worlds: list[World], out: Path) -> list[str]:
        logs = [path for world in worlds for path in world.logs().values()]
        trust = Trust.of(world.bundle(region) for world in worlds for region in world.regions)
        result = run_report(logs, out, trust=trust, session=spark, cosignatures_min=0)
        shown = result.report
        wrong = [str(row) for row in shown.findings.records() if row["status"] == "differs"]
        wrong += [
            str(row)
            for row in shown.reconciliation.records()
            if row["status"] == "differs" or row["unaccounted"]
        ]
        wrong += [str(row) for row in shown.exceptions.records() if row["severity"] == "breach"]
        return wrong

    return made
