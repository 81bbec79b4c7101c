"""Spans of crossings: from the announcement of an envelope to its receipt. Off unless bridge.yaml asks for tracing.

A crossing is a child of the publish that its first record with trace context names; whether trace context itself crosses
is for the grant to say (policy.transform).
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode

from felix.batch import Record
from felix.tracing import TRACEPARENT, tracing


class CrossingTracing:
    """Makes the spans of one agent."""

    def __init__(self) -> None:
        self._tracing = tracing()
        self._tracer = trace.get_tracer("felix.bridge")

    def begin(self, stream: str, from_region: str, to_region: str, records: Iterable[Record]) -> Span | None:
        """A span for one envelope with the source's records; None where none of them carries trace context."""
        traced = next((record for record in records if TRACEPARENT in record.headers), None)
        context = None if traced is None else self._tracing.extract(traced.headers)
        if traced is None or context is None:
            return None
        attributes: dict[str, str | int] = {
            "messaging.system": "felix",
            "messaging.destination.name": stream,
            "messaging.felix.region": from_region,
            "messaging.felix.destination_region": to_region,
            "messaging.felix.offset": traced.offset,
        }
        return self._tracer.start_span(f"cross {stream}", context, SpanKind.PRODUCER, attributes)

    @staticmethod
    def end(span: Span | None, problem: str = "") -> None:
        """The receipt came, or the session ended with `problem`."""
        if span is not None:
            if problem:
                span.set_status(StatusCode.ERROR, problem)
            span.end()
