"""OpenLineage events of a report: a START and a COMPLETE per link, stream, terms and window.

Source: OpenLineage specification 2-0-2 (https://openlineage.io/spec/2-0-2/OpenLineage.json) and its facets schema
1-2-0, columnLineage 1-2-0, inputStatistics 1-0-0, outputStatistics 1-0-2, nominalTime 1-0-1, jobType 2-0-4.

- Dataset: namespace `felix://<region>`, name `tenant/namespace/name`.
- Job: namespace `felix://<source region>`, name `<bridge>/<stream>/to/<destination region>`.
- Run: its id is a UUID version 5 of the transfer's log, terms and window, so that the same report names the same run.
- `felix_transfer`, a run facet of our own with the transfer's legal terms and its evidence; its schema is
  docs/schemas/felix-transfer-run-facet-1-0-0.json.

Events are pure; `post` alone touches the network.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPException
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

from audit.spark.document import Report
from audit.spark.lineage import OTHER_FIELDS
from audit.spark.table import iso
from felix.errors import RequestError, UnavailableError
from felix.visible import visible_json
from policy.lineage import EFFECTS, Effect
from policy.transform import Action

PRODUCER: Final = "urn:felix:audit-report:1"
SCHEMA_URL: Final = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
TRANSFER_FACET: Final = "felix_transfer"
TRANSFER_SCHEMA_URL: Final = "urn:felix:facet:transfer-run:1-0-0"
ENDPOINT_PATH: Final = "/api/v1/lineage"
"""Where OpenLineage servers take events, if the URL names no path of its own."""
POST_TIMEOUT_S: Final = 10.0
"""One event is some kilobytes; a server that takes longer is not well."""

_FACETS: Final = "https://openlineage.io/spec/facets"
_UNKNOWN: Final = Effect("", "TRANSFORMATION", False)
"""Of a rule that a newer release knows."""


def _facet(schema_url: str, **content: Any) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": schema_url, **content}


def _named(facet: str, version: str) -> str:
    return f"{_FACETS}/{version}/{facet}.json#/$defs/{facet}"


def _schema(names: Iterable[str]) -> dict[str, Any]:
    fields = [{"name": name} for name in dict.fromkeys(names)]
    return {"schema": _facet(_named("SchemaDatasetFacet", "1-2-0"), fields=fields)} if fields else {}


def _transformation(action: str) -> dict[str, Any]:
    kind = action.partition(":")[0]
    effect = EFFECTS.get(kind, _UNKNOWN)
    return {
        "type": "DIRECT",
        "subtype": effect.subtype,
        "description": effect.word if kind == Action.KEEP else action,
        "masking": effect.masking,
    }


def _column_lineage(row: Mapping[str, Any], fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for field in fields:
        if field["output"] is None or field["field"] == OTHER_FIELDS:
            continue
        lines.setdefault(field["output"], {"inputFields": []})["inputFields"].append(
            {
                "namespace": f"felix://{row['source_region']}",
                "name": row["stream"],
                "field": field["field"],
                "transformations": [_transformation(field["action"])],
            }
        )
    if not lines:
        return {}
    return {"columnLineage": _facet(_named("ColumnLineageDatasetFacet", "1-2-0"), fields=lines)}


_TRANSFER_FIELDS: Final = (
    ("purpose", "purpose"), ("basis", "legalBasis"), ("article", "article"), ("mechanism", "mechanism"), ("reference", "reference"),
    ("assessment", "transferAssessment"), ("categories", "dataCategories"), ("data_subjects", "dataSubjects"),
    ("exporter", "exporter"), ("importer", "importer"), ("source_country", "sourceCountry"),
    ("destination_country", "destinationCountry"), ("owner", "owner"), ("approvers", "approvers"),
    ("onward", "onwardTransferAllowed"), ("filter", "filter"), ("grant_ids", "grants"), ("terms_hash", "termsHash"),
    ("policy_versions", "policyVersions"), ("bridge", "bridge"), ("withheld", "recordsWithheld"),
    ("denied", "attemptsDenied"), ("egress_log", "egressLog"), ("egress_checkpoint", "egressCheckpoint"),
    ("ingress_log", "ingressLog"), ("ingress_checkpoint", "ingressCheckpoint"), ("verification", "verification"),
    ("reconciliation", "reconciliation"),
)  # fmt: skip


def _transfer(row: Mapping[str, Any], fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = {to: row[name] for name, to in _TRANSFER_FIELDS if row[name] is not None}
    for name, to in (("not_before", "validFrom"), ("expires", "validUntil")):
        if row[name] is not None:
            content[to] = iso(row[name])
    content["fieldsDropped"] = [
        field["field"] for field in fields if field["output"] is None and field["field"] != OTHER_FIELDS
    ]
    others = [field["action"] for field in fields if field["field"] == OTHER_FIELDS]
    if others:
        content["otherFields"] = others[0]
    return {TRANSFER_FACET: _facet(TRANSFER_SCHEMA_URL, **content)}


def events(report: Report) -> list[dict[str, Any]]:
    """START and COMPLETE of every transfer of the register that read records, in the register's order."""
    by_transfer: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    key_names = ("source_region", "stream", "bridge", "destination_region", "terms_hash")
    for field in report.lineage.records():
        if field["part"] != "field":
            continue  # the facet is about the payload's fields
        by_transfer.setdefault(tuple(field[name] for name in key_names), []).append(field)
    made: list[dict[str, Any]] = []
    for row in report.register.records():
        if row["records"] or row["delivered"]:
            fields = by_transfer.get(tuple(row[name] for name in key_names), [])
            made += _run(row, fields)
    return made


def _run(row: Mapping[str, Any], fields: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    begins, ends = iso(row["first_time"]), iso(row["last_time"])
    bridge = (row["bridge"] or "bridge").rpartition("/")[2]
    log = row["egress_checkpoint"] or row["ingress_checkpoint"]
    run_id = uuid5(NAMESPACE_URL, "\n".join(map(str, (log, row["stream"], row["terms_hash"], begins, ends))))
    nominal = _facet(_named("NominalTimeRunFacet", "1-0-1"), nominalStartTime=begins, nominalEndTime=ends)
    run = {
        "runId": str(run_id),
        "facets": {"nominalTime": nominal, **_transfer(row, fields)},
    }
    job = {
        "namespace": f"felix://{row['source_region']}",
        "name": f"{bridge}/{row['stream']}/to/{row['destination_region']}",
        "facets": {
            "jobType": _facet(
                _named("JobTypeJobFacet", "2-0-4"),
                processingType="BATCH",
                integration="FELIX",
                jobType="TRANSFER",
            )
        },
    }
    source = {
        "namespace": f"felix://{row['source_region']}",
        "name": row["stream"],
        "facets": _schema(field["field"] for field in fields if field["field"] != OTHER_FIELDS),
    }
    target = {
        "namespace": f"felix://{row['destination_region']}",
        "name": row["destination_stream"] or row["stream"],
        "facets": {
            **_schema(field["output"] for field in fields if field["output"] not in (None, OTHER_FIELDS)),
            **_column_lineage(row, fields),
        },
    }
    sent = row["records"] or row["delivered"]
    read = {
        "inputStatistics": _facet(
            _named("InputStatisticsInputDatasetFacet", "1-0-0"), rowCount=sent + row["withheld"]
        )
    }
    written = {
        "outputStatistics": _facet(
            _named("OutputStatisticsOutputDatasetFacet", "1-0-2"),
            rowCount=row["delivered"] or row["acknowledged"],
            size=row["record_bytes"],
        )
    }
    base = {"producer": PRODUCER, "schemaURL": SCHEMA_URL, "run": run, "job": job}
    return [
        {"eventType": "START", "eventTime": begins, **base, "inputs": [source], "outputs": [target]},
        {
            "eventType": "COMPLETE",
            "eventTime": ends,
            **base,
            "inputs": [{**source, "inputFacets": read}],
            "outputs": [{**target, "outputFacets": written}],
        },
    ]


def encode(made: Sequence[Mapping[str, Any]]) -> bytes:
    """One event per line."""
    return b"".join(_line(event) + b"\n" for event in made)


def _line(event: Mapping[str, Any]) -> bytes:
    return visible_json(json.dumps(event, ensure_ascii=False).encode())


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, and lineage would go where nobody said."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def check_url(url: str) -> str:
    """The URL that events are posted to. Raises RequestError unless it is http or https with a host."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        is_one = (
            parts.scheme in ("http", "https") and bool(host) and "@" not in parts.netloc and parts.port != 0
        )
        # As http.client takes them.
        is_one = (
            is_one and not re.search(r"[^!-~]", parts.path + parts.query) and not re.search(r"[#\s]", url)
        )
    except ValueError:
        is_one = False
    if not is_one:
        raise RequestError(
            f"{url!r} is no OpenLineage endpoint: expected http(s)://host[:port][/path].",
            hint="Give neither a user nor a fragment, and write other characters of a path as %C3%A4.",
        )
    return url if parts.path.strip("/") else parts._replace(path=ENDPOINT_PATH).geturl()


def _in_time(opener: urllib.request.OpenerDirector, request: urllib.request.Request, timeout_s: float) -> int:
    """The status that a request is answered with. Raises OSError, HTTPException; also where that takes longer than `timeout_s`, however the endpoint
    spends it: the timeout of a socket is for each read, and bytes may trickle in for ever. A thread that waits for those is left behind."""
    answered: SimpleQueue[int | Exception] = SimpleQueue()

    def ask() -> None:
        try:
            try:
                with opener.open(request, timeout=timeout_s) as answer:
                    answered.put(answer.status)
            except urllib.error.HTTPError as error:
                answered.put(error.code)
                error.close()
        except Exception as error:
            answered.put(error)

    Thread(target=ask, name="felix-lineage", daemon=True).start()
    try:
        status = answered.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError(f"no whole answer came within {timeout_s:g} s") from None
    if isinstance(status, Exception):
        raise status
    return status


def post(made: Sequence[Mapping[str, Any]], url: str, timeout_s: float = POST_TIMEOUT_S) -> int:
    """Post each event as JSON, in order. Returns how many.

    Raises UnavailableError at the first that is not taken, saying how many were; posting again is harmless, because
    run ids do not change.
    """
    endpoint = check_url(url)
    opener = urllib.request.build_opener(_NoRedirect)
    for number, event in enumerate(made):
        request = urllib.request.Request(  # noqa: S310  # check_url allows http and https alone
            endpoint,
            data=_line(event),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            status = _in_time(opener, request, timeout_s)
        except (HTTPException, OSError) as error:
            # An endpoint that speaks something else ends in the former; a URLError is one of the latter, and has its reason.
            reason = getattr(error, "reason", error)
            raise UnavailableError(
                f"{endpoint} did not take the lineage after {number} of {len(made)} events: {reason}.",
                hint="The report is written; its lineage.ndjson can be posted later.",
            ) from error
        if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            raise UnavailableError(
                f"{endpoint} answered {status} after {number} of {len(made)} events.",
                hint="The report is written; its lineage.ndjson can be posted later.",
            )
    return len(made)
