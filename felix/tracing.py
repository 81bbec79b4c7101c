"""Tracing: OpenTelemetry context in record headers, so that a trace goes on from publish through log and bridge.

Off unless somebody turns it on: `felix.connect(…, tracing=True)`, or `FELIX_TRACING=1`. Off, nothing of OpenTelemetry
is imported and a record costs one comparison. On, each record carries `traceparent` (and `tracestate` where there is one),
as in W3C Trace Context, section 3, in ASCII. Exporters and providers are the application's affair: this module
uses the OpenTelemetry API only, so without a provider nothing is recorded and nothing injected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

from felix.batch import Headers, Record
from felix.errors import Code, RequestError
from felix.extras import SDK, install_command

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind

TRACING_VARIABLE: Final = "FELIX_TRACING"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"


def tracing_wanted() -> bool:
    """The environment's setting, used if the caller gives none."""
    return os.environ.get(TRACING_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


class Tracing:
    """Puts the current span into headers, and takes it out of them. One per process will do: `tracing()`."""

    def __init__(self) -> None:
        """Raises RequestError(CONFIG_INVALID) where OpenTelemetry is not installed."""
        # Imported here, so that a process that does not trace does not load it.
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise RequestError(
                "Tracing was asked for, and OpenTelemetry is not installed.",
                code=Code.CONFIG_INVALID,
                hint=install_command(SDK, "tracing"),
            ) from error

        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("felix")

    def inject(self, headers: Headers | None) -> Headers | None:
        """The headers with the current span's context; unchanged where no span is current or they name one already."""
        if headers and TRACEPARENT in headers:
            return headers
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        if not carrier:
            return headers
        found = {name: value.encode("ascii") for name, value in carrier.items()}
        return {**headers, **found} if headers else found

    def extract(self, headers: Headers) -> Context | None:
        """The context that a record carries, None where it carries none."""
        parent = headers.get(TRACEPARENT)
        if parent is None:
            return None
        carrier = {TRACEPARENT: bytes(parent).decode("ascii", "replace")}
        if TRACESTATE in headers:
            carrier[TRACESTATE] = bytes(headers[TRACESTATE]).decode("ascii", "replace")
        return self._propagator.extract(carrier)

    @contextmanager
    def publishing(self, stream: str, region: str) -> Iterator[Span]:
        """A producer's span around a publish; it is current inside, so that `inject` finds it."""
        with self._span(f"publish {stream}", self._trace.SpanKind.PRODUCER, None, stream, region) as span:
            yield span

    @contextmanager
    def processing(self, record: Record, stream: str, region: str) -> Iterator[Span]:
        """A consumer's span around the handling of one record, a child of the span that published it."""
        context = self.extract(record.headers)
        with self._span(f"process {stream}", self._trace.SpanKind.CONSUMER, context, stream, region) as span:
            span.set_attribute("messaging.felix.offset", record.offset)
            yield span

    @contextmanager
    def _span(
        self, name: str, kind: SpanKind, context: Context | None, stream: str, region: str
    ) -> Iterator[Span]:
        # Names of attributes: OpenTelemetry semantic conventions for messaging spans.
        attributes = {
            "messaging.system": "felix",
            "messaging.destination.name": stream,
            "messaging.felix.region": region,
        }
        with self._tracer.start_as_current_span(
            name, context=context, kind=kind, attributes=attributes
        ) as span:
            yield span


@cache
def tracing() -> Tracing:
    """The process's tracing, made on first use."""
    return Tracing()
