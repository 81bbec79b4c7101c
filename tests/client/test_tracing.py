"""Tracing: context in record headers when on, nothing when off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from client.conftest import ORDERS, connected
from client.scripted_broker import ScriptedBroker
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import felix
from felix.tracing import TRACEPARENT, Tracing, tracing, tracing_wanted


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """A provider of this test alone, in the process's tracing."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing(), "_tracer", provider.get_tracer("felix"))
    yield exporter
    provider.shutdown()


async def test_a_trace_goes_from_publish_to_consumer(
    broker: ScriptedBroker, spans: InMemorySpanExporter
) -> None:
    async with asyncio.timeout(120), connected(broker, tracing=True) as region:
        orders = region.stream(ORDERS)
        await orders.publish(b"x", headers={"mine": b"1"})
        record = await anext(orders.subscribe("earliest"))
        assert set(record.headers) == {"mine", TRACEPARENT}
        with tracing().processing(record, ORDERS, "us-east") as span:
            span.add_event("handled")
    published, processed = spans.get_finished_spans()
    assert (published.name, processed.name) == (f"publish {ORDERS}", f"process {ORDERS}")
    assert processed.parent is not None
    assert processed.parent.span_id == published.context.span_id
    assert processed.context.trace_id == published.context.trace_id
    assert (published.kind, processed.kind) == (trace.SpanKind.PRODUCER, trace.SpanKind.CONSUMER)


async def test_off_nothing_is_added(broker: ScriptedBroker, spans: InMemorySpanExporter) -> None:
    async with connected(broker) as region:
        await region.stream(ORDERS).publish(b"x")
        record = await anext(region.stream(ORDERS).subscribe("earliest"))
    assert record.headers == {}
    assert not spans.get_finished_spans()


def test_off_opentelemetry_is_not_even_imported() -> None:
    script = "import felix, felix.sync, sys; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_context_that_is_there_is_kept_and_none_adds_none() -> None:
    one = Tracing()
    assert one.inject(None) is None
    headers = {TRACEPARENT: b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"}
    assert one.inject(headers) is headers
    assert one.extract({}) is None
    assert one.extract({TRACEPARENT: b"\xff nonsense"}) is not None


@pytest.mark.parametrize(("text", "wanted"), [("1", True), ("on", True), ("", False), ("0", False)])
def test_the_environment_may_turn_it_on(monkeypatch: pytest.MonkeyPatch, text: str, wanted: bool) -> None:
    monkeypatch.setenv("FELIX_TRACING", text)
    assert tracing_wanted() is wanted
    with pytest.raises(felix.RequestError):
        felix.connect()
