"""Spans of a broker's appends; off unless region.yaml asks for tracing (felix.telemetry).

Trace context travels in record headers (felix.tracing). A broker that traces looks at the headers of a batch's first
record, and adds one span for its append: from the batch's arrival to its durability. One that does not trace looks at no
record at all.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from felix.batch import FLAG_HEADERS, Batch, decode_records
from felix.errors import FelixError
from felix.tracing import tracing
from region.log.shard import Appended, Done


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
