"""One trace from publish through append to the consumer, exported to a file by the broker's own exporter."""

import json
from pathlib import Path

import pytest
from opentelemetry import trace
from region_home import make_region, running

import felix
from felix.telemetry import TracingConfig, configure_tracing
from felix.tracing import tracing


async def test_publish_append_and_process_are_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    folder = make_region(tmp_path, "us-east")
    async with running(folder, tracing=TracingConfig(exporter="file", path="spans.jsonl")) as node:
        stop = configure_tracing(
            node.config.tracing, folder.root, service="felix-broker", instance="b1", region="us-east"
        )
        async with felix.connect("us-east", tracing=True) as client:
            await client.create_stream("acme/ops/traced")
            stream = client.stream("acme/ops/traced")
            with trace.get_tracer("test").start_as_current_span("request") as request:
                await stream.publish(b"hello")
            async for record in stream.subscribe("earliest"):
                with tracing().processing(record, "acme/ops/traced", "us-east"):
                    pass
                break
        stop()
    spans = [json.loads(line) for line in (folder.root / "spans.jsonl").read_text().splitlines()]
    ours = [s for s in spans if s["context"]["trace_id"] == f"0x{request.get_span_context().trace_id:032x}"]
    names = {span["name"]: span for span in ours}
    assert set(names) == {
        "request",
        "publish acme/ops/traced",
        "append acme/ops/traced",
        "process acme/ops/traced",
    }
    publish = names["publish acme/ops/traced"]["context"]["span_id"]
    assert names["append acme/ops/traced"]["parent_id"] == publish
    assert names["process acme/ops/traced"]["parent_id"] == publish
    assert names["append acme/ops/traced"]["attributes"]["messaging.felix.offset"] == 0
