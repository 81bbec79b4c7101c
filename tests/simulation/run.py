"""Seeds by the thousand, from a command line: `make simulate`.

    python -m simulation.run [--seeds N] [--first M] [--world NAME] [--workers W] [--twins]

The seeds of all worlds are shared out among as many processes as there are processors. Prints how far it is and the rate, each seed
that fails, and of each world's smallest one what it did last and the least that still fails. Ends with 1 where one did.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Final

from simulation import cluster_twins
from simulation.cluster_checks import BrokenError
from simulation.cluster_world import simulate_cluster, simulate_cluster_or_explain
from simulation.doubt_world import DoubtWorld
from simulation.mesh_world import MeshWorld
from simulation.region_world import RegionWorld
from simulation.restored_world import RestoredWorld
from simulation.transfers import TransferWorld
from simulation.twins import TWINS, caught
from simulation.wire_world import WireRegionWorld
from simulation.world import FailedError, World, simulate, simulate_or_explain
from transport.wire_world import StoodStillError
from transport.wire_world import play as play_transport

WORLDS: Final[dict[str, type[World]]] = {
    "region": RegionWorld,
    "mesh": MeshWorld,
    "restored": RestoredWorld,
    "doubt": DoubtWorld,
    "transfers": TransferWorld,
    "wire": WireRegionWorld,
}
CLUSTER: Final = "cluster"
"""A world of cores alone (simulation.cluster_world)."""
TRANSPORT: Final = "transport"
"""The QUIC engines and their driver alone, over a kernel's UDP in memory (transport.wire_world)."""
SHARES: Final = {
    CLUSTER: 1, "region": 1, "mesh": 50, "restored": 100, "doubt": 100, "transfers": 10, "wire": 20, TRANSPORT: 10,
}  # fmt: skip
"""Of the seeds that are asked for, one in so many is of this world: a run of two regions takes twenty times as long as one of one."""
SLICE: Final = 100
"""Seeds of one region that a process takes at a time: some seconds."""
PROGRESS_S: Final = 30.0


@dataclass
class Tally:
    """What seeds of one world came to."""

    world: str
    seeds: int = 0
    events: int = 0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)
    """by seed, why"""

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.cpu_s += other.cpu_s
        self.counts += other.counts
        self.failed |= other.failed

    def __str__(self) -> str:
        counted = ", ".join(f"{what} {number}" for what, number in sorted(self.counts.items()))
        return (
            f"{self.world}: {self.seeds} seeds, {len(self.failed)} failed, "
            f"{self.cpu_s / max(1, self.seeds) * 1000:.0f} ms of processor time each; {self.events} events; {counted}"
        )


def play(name: str, seed: int) -> tuple[int, Mapping[str, int]]:
    """How many events a run had, and what it came to."""
    if name == CLUSTER:
        result = simulate_cluster(seed)
        return result.steps, result.counts
    if name == TRANSPORT:
        ran = play_transport(seed)
        return ran.counts["sent"], ran.counts
    outcome = simulate(seed, WORLDS[name])
    return len(outcome.noted), outcome.counts


def run(name: str, seeds: range) -> Tally:
    """These seeds, one after the other."""
    tally = Tally(name, len(seeds))
    begun_s = time.process_time()
    for seed in seeds:
        try:
            events, counts = play(name, seed)
        except FailedError as error:
            tally.failed[seed] = error.why
        except (BrokenError, StoodStillError) as error:
            tally.failed[seed] = str(error)
        except Exception as error:
            # A mistake of the product or of the simulator, which must not hide what the other seeds find.
            tally.failed[seed] = repr(error)
        else:
            tally.events += events
            tally.counts.update(counts)
    tally.cpu_s = time.process_time() - begun_s
    return tally


def slices(name: str, first: int, seeds: int) -> Iterator[range]:
    size = max(1, SLICE // SHARES[name])
    for at in range(first, first + seeds, size):
        yield range(at, min(at + size, first + seeds))


def run_all(asked: dict[str, int], first: int, workers: int) -> dict[str, Tally]:
    """So many seeds of each world, from `first` on."""
    tallies = {name: Tally(name) for name in asked}
    begun_s = told_s = time.monotonic()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        parts = [
            pool.submit(run, name, each)
            for name, seeds in asked.items()
            for each in slices(name, first, seeds)
        ]
        for part in as_completed(parts):
            found = part.result()
            tallies[found.world].add(found)
            for seed, why in found.failed.items():
                print(f"{found.world}, seed {seed}: {why}", flush=True)
            now_s = time.monotonic()
            if now_s - told_s >= PROGRESS_S or part is parts[-1]:
                told_s = now_s
                done = ", ".join(f"{name} {tally.seeds} of {asked[name]}" for name, tally in tallies.items())
                rate = sum(tally.seeds for tally in tallies.values()) / (now_s - begun_s)
                print(f"{done}; {rate:.1f} seeds a second", flush=True)
    return tallies


def explain(name: str, seed: int) -> None:
    """What a seed that failed did last, the least that still fails, and how to play it again."""
    try:
        if name == CLUSTER:
            simulate_cluster_or_explain(seed)
        elif name == TRANSPORT:
            play_transport(seed)
        else:
            simulate_or_explain(seed, WORLDS[name])
    except StoodStillError as error:
        print(error)
    except (BrokenError, FailedError) as error:
        print("\n".join([str(error), *error.__notes__]))
    except Exception:
        traceback.print_exc(file=sys.stdout)
    print(f"again: make simulate WORLD={name} FIRST={seed} SEEDS=1", flush=True)


def run_twins(world: str | None) -> int:
    """How many were missed."""
    looks: list[tuple[str, Callable[[], AssertionError | None]]] = []
    if world not in (CLUSTER, TRANSPORT):
        looks += [(twin.rule, partial(caught, twin, anew=True)) for twin in TWINS]
    if world in (None, CLUSTER):
        looks += [(twin.rule, partial(cluster_twins.caught, twin, anew=True)) for twin in cluster_twins.TWINS]
    missed = 0
    for rule, look in looks:
        error = look()
        missed += error is None
        told = (
            "NOT CAUGHT"
            if error is None
            else f"{error} (seed {error.seed})"
            if isinstance(error, BrokenError)
            else error
        )
        print(f'without "{rule}": {told}', flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs on simulated time, disks and network.")
    parser.add_argument(
        "--seeds", type=int, default=2_000, help="of one region; of the other worlds a part of it"
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--world", choices=sorted([*WORLDS, CLUSTER, TRANSPORT]), help="only this one, all seeds"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--twins", action="store_true", help="the rules that are switched off, instead")
    asked = parser.parse_args()
    if asked.twins:
        return int(run_twins(asked.world) > 0)
    seeds = (
        {asked.world: asked.seeds}
        if asked.world
        else {name: -(-asked.seeds // share) for name, share in SHARES.items()}
    )
    tallies = run_all(seeds, asked.first, asked.workers)
    for name, tally in tallies.items():
        print(tally, flush=True)
        if tally.failed:
            explain(name, min(tally.failed))
    return int(any(tally.failed for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
