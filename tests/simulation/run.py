"""Seeds by the thousand, from a command line: `make simulate`.

    python -m simulation.run [--seeds N] [--first M] [--world NAME] [--twins]

Prints the rate, and of each seed that fails what it did last and the least that still fails. Ends with 1 where one did.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Final

from simulation.mesh_world import MeshWorld
from simulation.region_world import RegionWorld
from simulation.restored_world import RestoredWorld
from simulation.twins import TWINS, caught
from simulation.world import FailedError, World, simulate_or_explain

WORLDS: Final[dict[str, type[World]]] = {
    "mesh": MeshWorld,
    "region": RegionWorld,
    "restored": RestoredWorld,
}


def run(name: str, first: int, seeds: int) -> int:
    """How many of them failed."""
    begun_s, failed, events, counts = time.process_time(), 0, 0, dict[str, int]()
    for seed in range(first, first + seeds):
        try:
            outcome = simulate_or_explain(seed, WORLDS[name])
        except FailedError as error:
            failed += 1
            print("\n".join([str(error), *error.__notes__]), flush=True)
            continue
        events += len(outcome.noted)
        for what, number in outcome.counts.items():
            counts[what] = counts.get(what, 0) + number
    took_s = time.process_time() - begun_s
    print(
        f"{name}: {seeds} seeds from {first} on, {failed} failed, {took_s / seeds * 1000:.0f} ms of processor time each; "
        f"{events} events; " + ", ".join(f"{what} {number}" for what, number in sorted(counts.items())),
        flush=True,
    )
    return failed


def run_twins() -> int:
    """How many were missed."""
    missed = 0
    for twin in TWINS:
        error = caught(twin, anew=True)
        missed += error is None
        print(f'without "{twin.rule}": {error if error is not None else "NOT CAUGHT"}', flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs on simulated time, disks and network.")
    parser.add_argument("--seeds", type=int, default=2_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--world", choices=sorted(WORLDS), help="only this one")
    parser.add_argument("--twins", action="store_true", help="the rules that are switched off, instead")
    asked = parser.parse_args()
    if asked.twins:
        return int(run_twins() > 0)
    worlds = [asked.world] if asked.world else sorted(WORLDS)
    return int(sum(run(name, asked.first, asked.seeds) for name in worlds) > 0)


if __name__ == "__main__":
    sys.exit(main())
