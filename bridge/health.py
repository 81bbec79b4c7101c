"""What an agent counts, as Prometheus metrics (docs/bridges.md lists them). Reads numbers, calls nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from audit.submission import SubmissionStatus
from audit.trail import TrailStatus
from bridge.link_context import LinkStats
from felix.messages import LinkState

_COUNTERS: Final = (
    ("crossed_records", "crossed", "Records that the destination has, with its receipt."),
    ("withheld_records", "withheld", "Records that stay: filtered, failed closed, loops, onward."),
    ("filtered_records", "filtered", "Of those, the ones that the grant's filter excludes."),
    ("gap_offsets", "gaps", "Source offsets that could not be read any more."),
    ("envelopes", "envelopes", "Envelopes sent, those sent again included."),
    ("envelopes_resent", "resent", "Envelopes sent again after a restart."),
    ("sessions", "sessions", "Times that the link was opened."),
    ("denials", "denied", "Refusals, as many as have a DENY leaf."),
)
_GAUGES: Final = (
    ("position", "position", "The source offset that crosses next; -1: not known."),
    ("high_watermark", "high_watermark", "The source's high watermark; -1: not known."),
    (
        "lag_records",
        "lag_records",
        "Records that are still to cross; -1: not known, the grant has ended, or another bridge carries.",
    ),
    ("lag_bytes", "lag_bytes", "The same in bytes, by their share of the shard; -1: not known."),
    (
        "lag_ms",
        "lag_ms",
        "How long the oldest record that waits has waited, at most; 0 where none does; -1: as above.",
    ),
)
_WITNESS_GAUGES: Final = (
    ("leaves", "size", "Leaves of the egress log that an outside witness has cosigned."),
    ("lag_ms", "lag_ms", "For how long there has been a leaf that it has not cosigned."),
    ("failures", "failures", "Failures since it last cosigned."),
)
_LABELS: Final = ("grant", "stream", "shard", "destination")


class AgentCollector(Collector):
    """Asks the agent's links when it is scraped."""

    def __init__(
        self,
        links: Callable[[], Sequence[tuple[LinkState, LinkStats]]],
        trail: Callable[[], TrailStatus | None],
        log_failed: Callable[[], bool],
        regions: Callable[[], dict[str, bool]],
        witnesses: Callable[[], Sequence[SubmissionStatus]],
        uncosigned_ms: Callable[[], dict[str, int]],
        quorum_lag_ms: Callable[[], int | None],
        expiry_s: Callable[[], float],
    ) -> None:
        self._links, self._trail, self._log_failed, self._regions = links, trail, log_failed, regions
        self._witnesses, self._uncosigned_ms, self._quorum_lag_ms = witnesses, uncosigned_ms, quorum_lag_ms
        self._expiry_s = expiry_s

    def collect(self) -> Iterator[Metric]:
        links = self._links()
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(f"felix_bridge_{name}", text, labels=_LABELS)
            for state, stats in links:
                counter.add_metric(_labels(state), getattr(stats, field))
            yield counter
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(f"felix_bridge_{name}", text, labels=_LABELS)
            for state, _ in links:
                gauge.add_metric(_labels(state), getattr(state, field))
            yield gauge
        phases = GaugeMetricFamily(
            "felix_bridge_link", "1 for the state that a link is in.", labels=[*_LABELS, "state"]
        )
        for state, _ in links:
            phases.add_metric([*_labels(state), state.state], 1)
        yield phases
        standing_by = GaugeMetricFamily(
            "felix_bridge_stands_by",
            "1 while another bridge carries the link, as the destination says.",
            labels=_LABELS,
        )
        for state, stats in links:
            standing_by.add_metric(_labels(state), float(stats.stands_by))
        yield standing_by
        sessions = GaugeMetricFamily("felix_bridge_session", "1 while a session stands.", labels=["region"])
        for region, is_up in self._regions().items():
            sessions.add_metric([region], float(is_up))
        yield sessions
        yield GaugeMetricFamily(
            "felix_bridge_identity_expiry_seconds", "Until the agent's certificate ends.", self._expiry_s()
        )
        yield from self._witnessing()
        status = self._trail()
        if status is not None:
            for name, value in (
                ("audit_leaves", status.durable),
                ("audit_checkpoint_leaves", status.checkpoint),
                ("audit_cosigned_leaves", status.cosigned),
                ("audit_pending_bytes", status.pending_bytes),
            ):
                yield GaugeMetricFamily(f"felix_bridge_{name}", f"{name.replace('_', ' ')}.", value)
        yield GaugeMetricFamily(
            "felix_bridge_audit_failed",
            "1 while the egress log takes no leaves, or cannot be opened.",
            float(self._log_failed()),
        )

    def _witnessing(self) -> Iterator[Metric]:
        statuses = self._witnesses()
        for name, field, text in _WITNESS_GAUGES:
            gauge = GaugeMetricFamily(f"felix_bridge_witness_{name}", text, labels=["witness"])
            for each in statuses:
                gauge.add_metric([each.witness], getattr(each, field))
            yield gauge
        failed = GaugeMetricFamily(
            "felix_bridge_cosigning_failed_ms",
            "For how long cosigning with a region has failed; 0: it does not.",
            labels=["region"],
        )
        for region, failed_ms in self._uncosigned_ms().items():
            failed.add_metric([region], failed_ms)
        yield failed
        lag_ms = self._quorum_lag_ms()
        if lag_ms is not None:
            yield GaugeMetricFamily(
                "felix_bridge_quorum_lag_ms", "For how long a leaf has had no quorum of witnesses.", lag_ms
            )


def _labels(state: LinkState) -> list[str]:
    return [state.grant, state.stream, str(state.shard), state.to_region]
