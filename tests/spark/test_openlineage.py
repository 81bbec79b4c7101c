"""OpenLineage events: valid by the published specification, stable, and posted over a real connection.

Validity is checked twice, by material that is not ours: the classes of the `openlineage-python` package, which its
project generates from the published schemas, decode every event strictly (a field that is missing, unknown or of another
type is refused); and, where the variable OPENLINEAGE_SPEC names a folder with the project's `spec/`, its JSON schemas do.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from crossing_logs import DEPARTURES, ORDERS, Made, count_files
from referencing import Registry, Resource
from slow_runs import only_slow
from spark.lineage_endpoint import Again, Endpoint

from audit.spark import openlineage
from audit.spark.openlineage import TRANSFER_FACET, check_url, encode, events, post
from felix.errors import RequestError, UnavailableError

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(five: Made) -> list[dict[str, Any]]:
    return events(five.result.report)


def decode(kind: Any, value: Any, where: str, classes: dict[str, Any]) -> None:
    """Decode `value` as `kind`, strictly. Raises AssertionError naming the place, or what the class itself raises."""
    import attr

    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            assert type(None) in inside, f"{where} is null"
            return
        (kind,) = (each for each in inside if each is not type(None))
        return decode(kind, value, where, classes)
    if origin is list:
        assert isinstance(value, list), where
        for at, item in enumerate(value):
            decode(inside[0], item, f"{where}[{at}]", classes)
    elif origin is dict:
        assert isinstance(value, dict), where
        for name, item in value.items():
            # Facets are told apart by name; a prefix marks those that are not the specification's.
            assert name in classes or "_" in name or inside[1] not in classes.values(), (
                f"{where}.{name} is unknown"
            )
            decode(classes.get(name, inside[1]), item, f"{where}.{name}", classes)
    elif attr.has(kind):
        assert isinstance(value, dict), where
        hints = typing.get_type_hints(kind)
        fields = {field.name: field for field in attr.fields(kind)}
        is_facet = "_producer" in fields
        assert is_facet or set(value) <= set(fields), f"{where} has unknown {set(value) - set(fields)}"
        needed = {name for name, field in fields.items() if field.default is attr.NOTHING}
        assert needed | ({"_producer", "_schemaURL"} if is_facet else set()) <= set(value), (
            f"{where}: {needed}"
        )
        for name in set(value) & set(fields):
            decode(hints[name], value[name], f"{where}.{name}", classes)
        given = {name: value[name] for name in set(value) & set(fields) if fields[name].init}
        built = kind(**{name.lstrip("_"): item for name, item in given.items()})
        if is_facet and where.rpartition(".")[2] in classes:
            assert value["_schemaURL"] == built._schemaURL, f"{where} is of another version"
    elif isinstance(kind, type) and kind.__module__ != "builtins":
        kind(value)  # an enumeration
    else:
        assert isinstance(value, kind) and not (kind is int and isinstance(value, bool)), (
            f"{where}: {value!r}"
        )


def test_every_event_decodes_as_the_project_s_own_classes(made: list[dict[str, Any]]) -> None:
    base = pytest.importorskip("openlineage.client.generated.base")
    from openlineage.client.generated import (
        column_lineage_dataset,
        input_statistics_input_dataset,
        job_type_job,
        nominal_time_run,
        output_statistics_output_dataset,
        schema_dataset,
    )

    classes = {
        "schema": schema_dataset.SchemaDatasetFacet,
        "columnLineage": column_lineage_dataset.ColumnLineageDatasetFacet,
        "inputStatistics": input_statistics_input_dataset.InputStatisticsInputDatasetFacet,
        "outputStatistics": output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet,
        "nominalTime": nominal_time_run.NominalTimeRunFacet,
        "jobType": job_type_job.JobTypeJobFacet,
    }
    for event in made:
        decode(base.RunEvent, event, "event", classes)
        assert event["schemaURL"] == base.RunEvent._get_schema()
    broken = json.loads(json.dumps(made[1]))
    del broken["outputs"][0]["outputFacets"]["outputStatistics"]["_producer"]
    with pytest.raises(AssertionError, match="outputStatistics"):
        decode(base.RunEvent, broken, "event", classes)


def test_every_event_is_valid_by_the_published_json_schemas(made: list[dict[str, Any]]) -> None:
    folder = os.environ.get("OPENLINEAGE_SPEC")
    if not folder:
        pytest.skip("OPENLINEAGE_SPEC names no folder with the project's spec/")
    schemas = [json.loads(path.read_text()) for path in sorted(Path(folder).rglob("*.json"))]
    published = {schema["$id"]: schema for schema in schemas if "$id" in schema}
    registry: Registry[Any] = Registry().with_resources(
        (name, Resource.from_contents(schema)) for name, schema in published.items()
    )

    def check(value: Any, reference: str) -> None:
        validator = jsonschema.Draft202012Validator({"$ref": reference}, registry=registry)
        validator.validate(value)

    for event in made:
        check(event, event["schemaURL"])
        facets = {**event["run"]["facets"], **event["job"]["facets"]}
        for dataset in (*event["inputs"], *event["outputs"]):
            facets |= dataset["facets"] | dataset.get("inputFacets", {}) | dataset.get("outputFacets", {})
            for name, facet in facets.items():
                if name != TRANSFER_FACET:
                    assert facet["_schemaURL"].partition("#")[0] in published, name
                    check(facet, facet["_schemaURL"])


def test_our_own_facet_is_as_its_documented_schema_says(made: list[dict[str, Any]]) -> None:
    schema = json.loads((ROOT / "docs/schemas/felix-transfer-run-facet-1-0-0.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for event in made:
        facet = event["run"]["facets"][TRANSFER_FACET]
        jsonschema.Draft202012Validator(schema).validate(facet)
        assert facet["_schemaURL"] == schema["$id"]
    departures = next(event for event in made if event["inputs"][0]["name"] == DEPARTURES)
    facet = departures["run"]["facets"][TRANSFER_FACET]
    assert (facet["legalBasis"], facet["reference"]) == ("scc", "SCC-2026-014")
    assert facet["fieldsDropped"] == ["crew"] and facet["otherFields"] == "keep"


def test_each_transfer_starts_and_completes_as_one_run(made: list[dict[str, Any]], five: Made) -> None:
    counts = count_files(*five.logs)
    assert len(made) == 4
    for start, complete in zip(made[::2], made[1::2], strict=True):
        assert (start["eventType"], complete["eventType"]) == ("START", "COMPLETE")
        assert start["run"]["runId"] == complete["run"]["runId"]
        assert datetime.fromisoformat(start["eventTime"]) < datetime.fromisoformat(complete["eventTime"])
        (source,), (target,) = complete["inputs"], complete["outputs"]
        assert (source["namespace"], target["namespace"]) == ("felix://us-east", "felix://eu-west")
        stream = source["name"]
        assert complete["job"] == start["job"]
        assert complete["job"]["name"] == f"us-to-eu/{stream}/to/eu-west"
        read = source["inputFacets"]["inputStatistics"]["rowCount"]
        assert read == counts["crossed"][stream] + counts["withheld"][stream]
        written = target["outputFacets"]["outputStatistics"]
        assert (written["rowCount"], written["size"]) == (
            counts["delivered"][stream],
            counts["bytes"][stream],
        )


def test_columns_say_where_they_come_from_and_whether_they_are_masked(made: list[dict[str, Any]]) -> None:
    target = next(event for event in made if event["inputs"][0]["name"] == ORDERS)["outputs"][0]
    fields = [field["name"] for field in target["facets"]["schema"]["fields"]]
    assert fields == ["amount", "customer", "card"], "fields of the payload: keys and headers are no columns"
    lines = target["facets"]["columnLineage"]["fields"]
    assert set(lines) == {"amount", "card", "customer"}
    (card,), (amount,) = lines["card"]["inputFields"], lines["amount"]["inputFields"]
    assert card["transformations"][0]["masking"] is True
    assert amount["field"] == "amount" and amount["transformations"][0]["masking"] is False


def test_the_file_is_one_event_per_line(made: list[dict[str, Any]], five: Made) -> None:
    lines = (five.result.out / "lineage.ndjson").read_bytes()
    assert lines == encode(made)
    assert [json.loads(line) for line in lines.splitlines()] == made


# Posting


@only_slow
def test_a_report_is_written_even_if_nobody_takes_its_lineage(again: Again) -> None:
    assert "answered 503" in str(again.error)
    assert (again.out / "report.html").exists()
    assert [json.loads((again.out / "lineage.ndjson").read_text().splitlines()[0])] == again.bodies


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    yield server
    server.close()


def test_events_arrive_in_order_at_the_usual_path(made: list[dict[str, Any]], endpoint: Endpoint) -> None:
    assert post(made, endpoint.url) == len(made)
    assert endpoint.bodies == made
    assert set(endpoint.paths) == {"/api/v1/lineage"}
    post(made[:1], f"{endpoint.url}/own/path")
    assert endpoint.paths[-1] == "/own/path"


@pytest.mark.parametrize("status", [500, 404, 302])
def test_an_endpoint_that_does_not_take_them_is_an_error_with_how_far_it_went(
    made: list[dict[str, Any]], status: int
) -> None:
    server = Endpoint(status)
    try:
        with pytest.raises(UnavailableError, match=f"answered {status} after 0 of 4"):
            post(made, server.url)
        assert len(server.bodies) == 1, "a redirect must not be followed"
    finally:
        server.close()


def test_an_endpoint_that_speaks_no_http_is_an_error(made: list[dict[str, Any]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"220 mail.example.org ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UnavailableError, match="did not take the lineage after 0 of"):
            post(made, f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=30)
        thread.join()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_an_endpoint_that_trickles_its_answer_is_left_in_time(
    made: list[dict[str, Any]], head: bytes
) -> None:
    left = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                while not left.wait(0.05):
                    connection.sendall(head or b"H")
                    head_sent = head.startswith(b"HTTP/1.1 200")
                    while head_sent and not left.wait(0.05):
                        connection.sendall(b"x")

        thread = threading.Thread(target=answer)
        thread.start()
        watchdog = threading.Timer(30, left.set)
        watchdog.start()
        try:
            with pytest.raises(UnavailableError, match=r"0 of 4 events: no whole answer came within 0\.5 s"):
                post(made, f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.5)
            assert not left.is_set()
        finally:
            watchdog.cancel()
            left.set()
            thread.join()


def test_nobody_listening_is_an_error(made: list[dict[str, Any]], endpoint: Endpoint) -> None:
    url = endpoint.url
    endpoint.server.socket.close()
    with pytest.raises(UnavailableError, match="did not take the lineage"):
        post(made, url, timeout_s=5)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host", "localhost:5000", "file:///etc/passwd", "http://", "http://[::1", "http://host:port/", "http://host:99999/",
        "http://host:0/", "http://.../", "http://" + "a" * 300, "http://host/p\u00e4th", "http://host/a b",
        "http://name:word@host/", "http://host/#part",
    ],
)  # fmt: skip
def test_only_http_urls_are_endpoints(url: str) -> None:
    with pytest.raises(RequestError, match="no OpenLineage endpoint"):
        check_url(url)
    assert openlineage.check_url("https://lineage.example/") == "https://lineage.example/api/v1/lineage"
    assert check_url("http://h\u00f6st/") == "http://h\u00f6st/api/v1/lineage"
    assert check_url("http://[::1]:5000?key=1") == "http://[::1]:5000/api/v1/lineage?key=1"
