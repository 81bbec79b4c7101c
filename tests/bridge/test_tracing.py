"""One trace from a publish in one region through the crossing to the consumer in the other."""

import json
from pathlib import Path

from bridge_mesh import STREAM, flight, two_regions, until
from opentelemetry import trace

import felix
from felix.telemetry import TracingConfig, configure_tracing
from felix.tracing import tracing
from policy.transform import build_spec


async def test_a_trace_spans_both_regions_where_the_grant_lets_it(tmp_path: Path) -> None:
    spans = tmp_path / "spans.jsonl"
    config = TracingConfig(exporter="file", path=str(spans))
    stop = configure_tracing(config, tmp_path, service="test", instance="one", region="us-east")
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.grant(transform=build_spec(pseudonymize=["tailnum"], trace=True))
        async with mesh.agent(tracing=config), mesh.operator("us-east") as plain:
            assert plain.session.region == "us-east"
            async with felix.connect(profile=mesh.profile("us-east"), tracing=True) as client:
                with trace.get_tracer("test").start_as_current_span("request") as request:
                    await client.stream(STREAM).publish(flight(7))
            await mesh.crossed(1)
            (record,) = await mesh.read("eu-west", 1)
            with tracing().processing(record, STREAM, "eu-west"):
                pass
    await until(lambda: spans.exists(), "the span file")
    stop()
    trace_id = f"0x{request.get_span_context().trace_id:032x}"
    found = [json.loads(line) for line in spans.read_text().splitlines()]
    ours = {span["name"]: span for span in found if span["context"]["trace_id"] == trace_id}
    publish = ours[f"publish {STREAM}"]["context"]["span_id"]
    assert ours[f"cross {STREAM}"]["parent_id"] == publish
    assert ours[f"cross {STREAM}"]["attributes"]["messaging.felix.destination_region"] == "eu-west"
    assert ours[f"cross {STREAM}"]["status"]["status_code"] == "UNSET"
    assert ours[f"process {STREAM}"]["parent_id"] == publish
