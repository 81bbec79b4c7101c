"""What a broker counts, as Prometheus metrics (felix.health serves them).

Counters are plain integers on the hot path; the collector reads them when it is asked. Metric names are in
docs/operations.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from felix.errors import Code, FelixError
from felix.frames import GapReason
from felix.quota import RATES
from region.limits.quota import Quotas

TENANTS_MAX: Final = 100
"""Tenants that metrics name; the rest are summed up as `other`, so that names which clients choose make no end of series."""
OTHER: Final = "other tenants"


class BrokerMetrics:
    """The broker's own counters; gauges are asked for when they are read."""

    __slots__ = (
        "authenticated", "delivered_batches", "delivered_bytes", "delivered_records", "gaps", "ingested_records",
        "refusals",
    )  # fmt: skip

    def __init__(self) -> None:
        self.delivered_records = 0
        self.delivered_batches = 0
        self.delivered_bytes = 0
        self.ingested_records = 0
        self.authenticated = 0
        # Each at 0 from the start: the increase of a series that begins with its first event is none.
        self.gaps: Counter[str] = Counter({reason.name.lower(): 0 for reason in GapReason})
        self.refusals: Counter[str] = Counter({code.name.lower(): 0 for code in Code})

    def delivered(self, records: int, size: int) -> None:
        self.delivered_records += records
        self.delivered_batches += 1
        self.delivered_bytes += size

    def gap(self, reason: GapReason) -> None:
        self.gaps[reason.name.lower()] += 1

    def refused(self, error: FelixError) -> None:
        self.refusals[error.code.name.lower()] += 1


class BrokerCollector(Collector):
    """Converts counters and gauges to Prometheus families when they are scraped.

    `gauges` returns name → value; a name may carry labels as `name{key="value"}` does not: per-shard figures
    come as separate families from `shards`.
    """

    def __init__(
        self,
        metrics: BrokerMetrics,
        gauges: Callable[[], dict[str, float]],
        shards: Callable[[], Iterable[tuple[str, int, dict[str, float]]]],
        quotas: Quotas,
        lags: Callable[[], Iterable[tuple[str, str, int]]],
        expiries: Callable[[], dict[str, float]],
    ) -> None:
        """`lags`: stream, durable subscription, records behind; already bounded in number. `expiries`: seconds by kind."""
        self._metrics = metrics
        self._gauges = gauges
        self._shards = shards
        self._quotas = quotas
        self._lags = lags
        self._expiries = expiries

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, value in (
            ("felix_delivered_records", "Records sent to subscribers.", metrics.delivered_records),
            ("felix_delivered_batches", "Batches sent to subscribers.", metrics.delivered_batches),
            ("felix_delivered_bytes", "Bytes sent to subscribers.", metrics.delivered_bytes),
            ("felix_ingested_records", "Records that came in over bridges.", metrics.ingested_records),
            ("felix_sessions_authenticated", "Sessions let in.", metrics.authenticated),
        ):
            yield CounterMetricFamily(name, text, value)
        refusals = CounterMetricFamily("felix_refusals", "Answers of refusal, by code.", labels=["code"])
        for code, count in list(metrics.refusals.items()):
            refusals.add_metric([code], count)
        yield refusals
        gaps = CounterMetricFamily("felix_gaps", "Gap notices sent, by reason.", labels=["reason"])
        for reason, count in list(metrics.gaps.items()):
            gaps.add_metric([reason], count)
        yield gaps
        for name, gauge in self._gauges().items():
            yield GaugeMetricFamily(f"felix_{name}", name.replace("_", " ") + ".", gauge)
        expiries = GaugeMetricFamily(
            "felix_identity_expiry_seconds",
            "Until the first certificate of a kind ends, of those that somebody came with; below 0 once it has.",
            labels=["kind"],
        )
        for kind, seconds in self._expiries().items():
            expiries.add_metric([kind], seconds)
        yield expiries
        yield from self._tenants()
        lags = GaugeMetricFamily(
            "felix_subscription_lag_records",
            "Records behind, of the durable subscriptions that are furthest behind.",
            labels=["stream", "subscription"],
        )
        for stream, subscription, records in self._lags():
            lags.add_metric([stream, subscription], records)
        yield lags
        families: dict[str, GaugeMetricFamily] = {}
        for stream, shard, values in self._shards():
            for name, gauge in values.items():
                family = families.get(name)
                if family is None:
                    text = f"{name.replace('_', ' ')}, per shard."
                    family = GaugeMetricFamily(f"felix_shard_{name}", text, labels=["stream", "shard"])
                    families[name] = family
                family.add_metric([stream, str(shard)], gauge)
        yield from families.values()

    def _tenants(self) -> Iterator[Metric]:
        """What tenants did, were slowed down and refused; those with limits of their own are named first."""
        quotas = self._quotas
        tenants = [account for account in quotas.accounts() if account.scope == "tenant"]
        tenants.sort(key=lambda account: not quotas.own_limits("tenant", account.name).named)
        totals: Counter[tuple[str, str]] = Counter()
        slowed: dict[tuple[str, str], float] = {}
        refused: Counter[tuple[str, str]] = Counter()
        for place, account in enumerate(tenants):
            name = account.name if place < TENANTS_MAX else OTHER
            for what in RATES:
                totals[name, what] += account.totals[what]
            for what, ms in quotas.throttled_ms(account).items():
                slowed[name, what] = slowed.get((name, what), 0.0) + ms / 1000
            for code, count in list(account.refused.items()):
                refused[name, code] += count
        used = CounterMetricFamily(
            "felix_tenant_used", "Bytes, records and requests of a tenant.", labels=["tenant", "limit"]
        )
        for key, value in totals.items():
            used.add_metric(key, value)
        yield used
        throttled = CounterMetricFamily(
            "felix_tenant_throttled_seconds", "Time in which a rate was used up.", labels=["tenant", "limit"]
        )
        for key, seconds in slowed.items():
            throttled.add_metric(key, seconds)
        yield throttled
        refusals = CounterMetricFamily(
            "felix_tenant_refused", "Refusals by a quota, by code.", labels=["tenant", "code"]
        )
        for key, value in refused.items():
            refusals.add_metric(key, value)
        yield refusals
