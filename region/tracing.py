"""OpenTelemetry in a broker: off unless region.yaml asks for it. Sets the process's tracer provider, once.

Trace context travels in record headers (felix.tracing). A broker that traces looks at the headers of a batch's first
record, and adds one span for its append: from the batch's arrival to its durability. One that does not trace looks at no
record at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from felix.batch import FLAG_HEADERS, Batch, decode_records
from felix.errors import Code, FelixError, RequestError
from felix.tracing import tracing
from region.config import RegionConfig
from region.log.shard import Appended, Done


class FileSpanExporter(SpanExporter):
    """One JSON object a line, appended to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(json.loads(span.to_json(indent=None))) + "\n" for span in spans)
        with self._lock:
            self._file.write(lines)
            self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


class AppendTracing:
    """Spans of appends, children of the publish that the batch's first record names."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._tracing = tracing()
        self._tracer = trace.get_tracer("felix.broker")

    def around(self, stream: str, batch: Batch, done: Done) -> Done:
        """`done`, with a span from now until it is called; itself where the batch carries no trace context."""
        if not batch.header.flags & FLAG_HEADERS:
            return done
        context = self._tracing.extract(next(decode_records(batch)).headers)
        if context is None:
            return done
        attributes: dict[str, str | int] = {
            "messaging.system": "felix",
            "messaging.destination.name": stream,
            "messaging.batch.message_count": batch.header.records,
            "messaging.felix.region": self._region,
            "messaging.felix.shard": batch.header.shard,
        }
        span = self._tracer.start_span(f"append {stream}", context, SpanKind.SERVER, attributes)

        def ended(result: Appended | FelixError) -> None:
            if isinstance(result, FelixError):
                span.set_status(StatusCode.ERROR, result.sentence)
            else:
                span.set_attribute("messaging.felix.offset", result.base_offset)
            span.end()
            done(result)

        return ended


def configure_tracing(config: RegionConfig, base: Path) -> Callable[[], None]:
    """Begin tracing as configured; returns what ends it. Raises RequestError(CONFIG_INVALID)."""
    settings = config.tracing
    if settings.exporter == "none":
        return lambda: None
    exporter: SpanExporter
    if settings.exporter == "file":
        exporter = FileSpanExporter(base / settings.path)
    else:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise RequestError(
                "tracing.exporter is otlp, and the exporter is not installed.",
                code=Code.CONFIG_INVALID,
                hint="Install it: pip install 'felix-mesh[tracing]'.",
            ) from error
        exporter = OTLPSpanExporter(endpoint=settings.endpoint or None)
    resource = Resource.create(
        {"service.name": "felix-broker", "service.instance.id": config.broker, "felix.region": config.region}
    )
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(settings.ratio)), resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider.shutdown
