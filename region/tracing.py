"""OpenTelemetry in a broker: off unless region.yaml asks for it. Sets the process's tracer provider, once."""

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

from felix.errors import Code, RequestError
from region.config import RegionConfig


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
