"""What a broker counts, as Prometheus metrics, and its health page.

Counters are plain integers on the hot path; the collector reads them when it is asked. Metric names are in
docs/operations.md. The HTTP server is the prometheus-client's, on a thread of its own: it reads numbers and
never calls into the broker.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from felix.errors import Code, FelixError, RequestError
from felix.frames import GapReason


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
        self.gaps: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def delivered(self, records: int, size: int) -> None:
        self.delivered_records += records
        self.delivered_batches += 1
        self.delivered_bytes += size

    def gap(self, reason: GapReason) -> None:
        self.gaps[reason.name.lower()] += 1

    def refused(self, error: FelixError) -> None:
        self.refusals[error.code.name.lower()] += 1


class BrokerCollector(Collector):
    """Turns counters and gauges into Prometheus families when they are scraped.

    `gauges` returns name → value; a name may carry labels as `name{key="value"}` does not: per-shard figures
    come as separate families from `shards`.
    """

    def __init__(
        self,
        metrics: BrokerMetrics,
        gauges: Callable[[], dict[str, float]],
        shards: Callable[[], Iterable[tuple[str, int, dict[str, float]]]],
    ) -> None:
        self._metrics = metrics
        self._gauges = gauges
        self._shards = shards

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


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = 10
    """Seconds without a word after which a scraper's connection, and its thread, end."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


class HealthServer:
    """`/metrics`, `/livez` (the process answers) and `/readyz` (it serves), each with its reason."""

    def __init__(self, host: str, port: int, collector: Collector, ready: Callable[[], str]) -> None:
        """`ready` returns why the broker does not serve, or an empty string. Raises RequestError: port in use."""
        registry = CollectorRegistry()
        registry.register(collector)
        metrics = make_wsgi_app(registry)

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "")
            if path == "/metrics":
                page: Iterable[bytes] = metrics(environ, start_response)
                return page
            if path in ("/livez", "/readyz"):
                reason = ready() if path == "/readyz" else ""
                status = "503 Service Unavailable" if reason else "200 OK"
                body = json.dumps({"ok": not reason, "reason": reason}).encode()
                start_response(status, [("Content-Type", "application/json")])
                return [body + b"\n"]
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"Felix: /metrics, /livez or /readyz\n"]

        try:
            self._server = make_server(host, port, app, _Server, _Quiet)
        except OSError as error:
            raise RequestError(
                f"The health address {host}:{port} cannot be used: {error.strerror or error}.",
                code=Code.CONFIG_INVALID,
                hint="Set another one with `health:` in region.yaml, or an empty one for none.",
            ) from error
        self.address = (host, self._server.server_port)
        self._thread = Thread(target=self._server.serve_forever, name="felix-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and join the thread."""
        self._server.shutdown()
        self._thread.join(timeout=5)
        self._server.server_close()
