"""Seeds of `simulation.world`: what is acknowledged stays through crashes, losses of power, partitions and slow paths.

`make simulate SEEDS=n FIRST=m` runs n of them from m on. `FELIX_SIMULATION_SEEDS`, `FELIX_SIMULATION_FIRST`: the same here.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from simulation.world import InvariantError, World, simulate

from region.log import recovery
from region.log.producers import Decision, ProducerTable, Verdict
from region.storage.memory import MemoryFiles

SEEDS = int(os.environ.get("FELIX_SIMULATION_SEEDS", "40"))
FIRST = int(os.environ.get("FELIX_SIMULATION_FIRST", "0"))
TWIN_SEEDS_MAX = 100
"""So many seeds may pass before a broken rule must have been found."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    # Lost connections and torn tails are what is simulated.
    caplog.set_level("CRITICAL", "felix")


def test_what_is_acknowledged_stays_whatever_happens(capsys: pytest.CaptureFixture[str]) -> None:
    begun, acknowledged, starts, events = time.perf_counter(), 0, 0, 0
    for seed in range(FIRST, FIRST + SEEDS):
        outcome = simulate(seed)
        acknowledged += outcome.acknowledged
        starts += outcome.starts
        events += len(outcome.events)
    took_s = time.perf_counter() - begun
    with capsys.disabled():
        print(
            f"\n{SEEDS} seeds from {FIRST} on in {took_s:.1f} s ({SEEDS / took_s:.0f} a second): {acknowledged} records "
            f"acknowledged, {starts} starts of a broker, {events} events"
        )
    assert acknowledged and starts > 2 * SEEDS


def test_a_seed_replays_exactly() -> None:
    for seed in range(4):
        first, second = simulate(seed), simulate(seed)
        assert first.events == second.events
    assert simulate(0).digest != simulate(1).digest


class UnsyncedFiles(MemoryFiles):
    """Acknowledges before the bytes are on the disk."""

    def sync(self, descriptor: int) -> None:
        self.size(descriptor)


class UnsyncedNames(MemoryFiles):
    """Never makes a name durable."""

    def sync_folder(self, folder: Path) -> None:
        self.names(folder)


def accept(self: ProducerTable, *asked: object, **more: object) -> Decision:
    """Takes a batch that was sent again for another one."""
    return Decision(Verdict.ACCEPT)


@pytest.mark.parametrize("files", [UnsyncedFiles, UnsyncedNames])
def test_a_disk_that_is_not_waited_for_is_found(files: type[MemoryFiles]) -> None:
    class Careless(World):
        def mount(self) -> MemoryFiles:
            return self.disk.mount(files)

    assert found(Careless)


def test_batches_that_are_taken_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProducerTable, "decide", accept)
    assert found(World)


def test_a_recovery_that_trusts_the_page_cache_after_a_failed_sync_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "write_again", lambda *_: None)
    assert found(World)


def found(world: type[World]) -> bool:
    """Whether some seed breaks a promise."""
    for seed in range(TWIN_SEEDS_MAX):
        try:
            simulate(seed, world)
        except InvariantError:
            return True
    return False
