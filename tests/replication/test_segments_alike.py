"""Copies end their segments where their leader does, so that a segment of one is a segment of all."""

from __future__ import annotations

import pytest
from long_runs import count
from replication.replicated_region import NAMES, SimulatedRegion, play

from region.log.point import LogPoint


def segments_of(region: SimulatedRegion, name: str) -> list[tuple[LogPoint, LogPoint]]:
    """Closed segments of a broker's copy of the records."""
    log = region.running[name].host.disks(region.shards[0])[0].log
    return [(one.base_point, one.end_point) for one in log.segments[:-1]]


@pytest.mark.parametrize("seed", range(count(1, 60)))
def test_segments_of_copies_are_alike_over_failovers_and_catching_up(seed: int) -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        region.append_all_the_time()
        for _ in range(2):
            least = len(segments_of(region, NAMES[0])) + 2
            await region.until(
                lambda least=least: all(len(segments_of(region, name)) >= least for name in NAMES), 600
            )
            leader = region.leader(shard)
            assert leader is not None
            victim = leader.name if region.random.random() < 0.6 else region.random.choice(NAMES)
            region.kill(victim)
            before = region.acknowledged()
            await region.until(lambda before=before: region.acknowledged() > before + 30, 600)
            await region.start(victim)
        await region.no_more_appends()
        await region.well()
        region.check()
        first, *others = (set(segments_of(region, name)) for name in NAMES)
        alike = first.intersection(*others)
        # A cut at the very beginning of a segment parts one of them in two.
        assert len(alike) >= len(first) - 2 > 2, (first - alike, [other - first for other in others])

    play(scene, seed)
