"""Figures: percentiles, medians and spread. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)


class Spread(msgspec.Struct, frozen=True):
    """One figure over all repeats, in the order measured."""

    median: float
    low: float
    high: float
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """At least one value."""
        return cls(median(values), min(values), max(values), list(values))


class Latency(msgspec.Struct, frozen=True):
    """Percentiles of one repeat, in µs; weighted by records."""

    p50_us: float
    p90_us: float
    p99_us: float
    p999_us: float
    max_us: float
    samples: int

    @classmethod
    def of(cls, times_ns: Sequence[int]) -> Latency | None:
        """None where there are no samples."""
        if not times_ns:
            return None
        ordered = sorted(times_ns)
        p50, p90, p99, p999 = (percentile(ordered, share) / 1e3 for share in PERCENTILES)
        return cls(p50, p90, p99, p999, ordered[-1] / 1e3, len(ordered))


class LatencySpread(msgspec.Struct, frozen=True):
    """Percentiles over all repeats, in µs."""

    p50_us: Spread
    p90_us: Spread
    p99_us: Spread
    p999_us: Spread
    samples: int

    @classmethod
    def of(cls, repeats: Sequence[Latency | None]) -> LatencySpread | None:
        """None where no repeat has any."""
        found = [each for each in repeats if each is not None]
        if not found:
            return None
        return cls(
            Spread.of([each.p50_us for each in found]),
            Spread.of([each.p90_us for each in found]),
            Spread.of([each.p99_us for each in found]),
            Spread.of([each.p999_us for each in found]),
            sum(each.samples for each in found),
        )


def percentile(ordered: Sequence[int], share: float) -> int:
    """The nearest-rank percentile of sorted values; `share` in percent."""
    return ordered[min(len(ordered) - 1, max(0, -int(-len(ordered) * share // 100) - 1))]


def rate_per_second(events: Sequence[tuple[int, int]], warm_share: float) -> float:
    """Records per second from (time in ns, records) in the order of time, the first `warm_share` of records left out.

    0 where the events do not span any time.
    """
    whole = sum(count for _, count in events)
    seen = at = 0
    while at < len(events) - 1 and seen < whole * warm_share:
        seen += events[at][1]
        at += 1
    begun = events[at - 1][0] if at else (events[0][0] if events else 0)
    elapsed_ns = events[-1][0] - begun if events else 0
    return (whole - seen) / elapsed_ns * 1e9 if elapsed_ns > 0 else 0.0
