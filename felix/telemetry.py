"""Where a process's traces go: the configuration of its OpenTelemetry exporter, off unless it is set.

Brokers and bridge agents use it. Applications that use the SDK
bring a provider of their own (felix.tracing).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal

import msgspec
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from felix.errors import Code, RequestError
from felix.extras import MESH, install_command


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`none`, `file` (JSON lines in `path`, relative to the configuration's folder) or `otlp` (to `endpoint`).

    `ratio` of the traces that begin here are kept; one that began elsewhere is kept as its beginning says.
    """

    exporter: Literal["none", "file", "otlp"] = "none"
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] = "traces.jsonl"
    endpoint: str = ""
    ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


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


def configure_tracing(
    config: TracingConfig, base: Path, *, service: str, instance: str, region: str
) -> Callable[[], None]:
    """Begin tracing as configured; returns what ends it. A provider that the process has already is joined.

    Raises RequestError(CONFIG_INVALID).
    """
    if config.exporter == "none":
        return lambda: None
    exporter: SpanExporter
    if config.exporter == "file":
        exporter = FileSpanExporter(base / config.path)
    else:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise RequestError(
                "tracing.exporter is otlp, and the exporter is not installed.",
                code=Code.CONFIG_INVALID,
                hint=install_command(MESH, "tracing"),
            ) from error
        exporter = OTLPSpanExporter(endpoint=config.endpoint or None)
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        resource = Resource.create(
            {"service.name": service, "service.instance.id": instance, "felix.region": region}
        )
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(config.ratio)), resource=resource)
        trace.set_tracer_provider(provider)
    processor = BatchSpanProcessor(exporter)
    provider.add_span_processor(processor)
    return processor.shutdown
