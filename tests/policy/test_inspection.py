"""Inspection: what the transform lets cross passes, whatever the terms; what breaks a term does not."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_runs import count

from felix.batch import encode_headers
from felix.errors import RequestError
from policy.inspection import Inspection, OutsideTermsError
from policy.terms import Basis, GrantTerms
from policy.transform import (
    STEP_RULES,
    Action,
    Crossing,
    Encoding,
    FieldRule,
    Format,
    KeyRule,
    Missing,
    TransformSpec,
    build_spec,
    compile_transform,
)

SECRET = b"s" * 32
PATH = {"felix-path": b"us-east"}


def terms(spec: TransformSpec, **more: Any) -> GrantTerms:
    fields: dict[str, Any] = {
        "stream": "acme/ops/departures",
        "from_region": "us-east",
        "to_region": "eu-west",
        "bridge": "spiffe://us-east.acme/bridge/us-to-eu",
        "purpose": "analytics",
        "basis": Basis.SCC,
        "reference": "SCC-2026-014",
        "exporter": "Acme Inc",
        "importer": "Acme Ltd",
        "owner": "ops",
        "not_before": 0,
        "expires": 1,
        "transform": spec,
    }
    made = {name: value for name, value in {**fields, **more}.items() if name in GrantTerms.__struct_fields__}
    if "approvers" in GrantTerms.__struct_fields__:
        made["approvers"] = ("alice",)
    if "drawn_up_by" in GrantTerms.__struct_fields__:
        made["drawn_up_by"] = "spiffe://us-east.acme/operator/alice"
    return GrantTerms(**made)


NAMES = st.sampled_from(["a", "b", "c", "odd name"])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
RECORDS = st.dictionaries(NAMES, VALUES, max_size=4)
FIELDS = st.sampled_from(
    ["a", "b", "c", "a.b", "a.b.c", "b[]", "b[].a", "b[][]", "c.a", '"odd name"', "c.b[]"]
)


@st.composite
def specs(draw: st.DrawFn) -> TransformSpec:
    rules = []
    for field in draw(st.lists(FIELDS, max_size=4, unique=True)):
        do = draw(st.sampled_from(list(Action)))
        rules.append(
            FieldRule(
                field=field,
                do=do,
                missing=draw(st.sampled_from([None, Missing.OK, Missing.OK, Missing.WITHHOLD])),
                last=draw(st.sampled_from([0, 0, 1, 4])) if do is Action.MASK else 0,
                digest_bytes=draw(st.integers(8, 32)),
                encoding=draw(st.sampled_from(list(Encoding))),
            )
        )
    filters = [
        "",
        "",
        "exists(a)",
        "a == 1 or not exists(a)",
        'c != "x" or c == null',
        "b == null or exists(b)",
    ]
    try:
        return TransformSpec(
            fields=tuple(rules),
            filter=draw(st.sampled_from(filters)),
            key=draw(st.sampled_from(list(KeyRule))),
            headers=tuple(draw(st.sets(st.sampled_from(["note", "kind", "felix.tombstone"])))),
            trace=draw(st.booleans()),
        )
    except RequestError:
        return TransformSpec()


TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = st.dictionaries(
    st.sampled_from(["note", "kind", "felix.tombstone", "traceparent", "baggage"]),
    st.just(TRACE) | st.binary(max_size=9),
)


@settings(max_examples=count(200, 600), deadline=None)
@given(
    specs(), st.lists(st.tuples(RECORDS, st.none() | st.binary(min_size=1, max_size=9), HEADERS), max_size=6)
)
def test_what_the_transform_lets_cross_passes(
    spec: TransformSpec, records: list[tuple[dict[str, Any], bytes | None, dict[str, bytes]]]
) -> None:
    transform, inspection = compile_transform(spec, SECRET, "scope"), Inspection(terms(spec))
    for record, key, headers in records:
        for payload in (json.dumps(record).encode(), msgspec.json.encode(record), b""):
            found = transform.record(key, headers, payload)
            if isinstance(found, Crossing):
                inspection.record(found.key or b"", encode_headers({**found.headers, **PATH}), found.payload)


def refused(spec: TransformSpec, payload: bytes, key: bytes = b"", says: str = "", **more: Any) -> None:
    headers = more.pop("headers", encode_headers(PATH))
    with pytest.raises(OutsideTermsError, match=says or None):
        Inspection(terms(spec, **more)).record(key, headers, payload)


def rule(field: str, do: Action, **more: Any) -> TransformSpec:
    return TransformSpec(fields=(FieldRule(field=field, do=do, **more),))


@pytest.mark.parametrize(
    ("spec", "payload", "says"),
    [
        (rule("card", Action.DROP), b'{"card":1}', "drop"),
        (rule("id", Action.KEEP), b'{"id":1,"card":1}', "do not let cross"),
        (rule("id", Action.KEEP, missing=Missing.WITHHOLD), b"{}", "missing"),
        (rule("card", Action.MASK), b'{"card":"4111"}', "masked"),
        (rule("card", Action.MASK, last=4), b'{"card":"***41111"}', "masked"),
        (rule("card", Action.MASK, last=4), b'{"card":"***411"}', "masked"),
        (rule("card", Action.MASK), b"{}", "missing"),
        (rule("name", Action.HASH), b'{"name":"alice"}', "digest"),
        (rule("name", Action.HASH), b'{"name":"AAAAAAAAAAAAAAAAAAAAAB"}', "digest"),
        (
            rule("name", Action.PSEUDONYMIZE, encoding=Encoding.HEX),
            b'{"name":"' + b"A" * 32 + b'"}',
            "digest",
        ),
        (rule("items[].card", Action.DROP), b'{"items":[{"id":1},{"card":1}]}', "drop"),
        (rule("items[]", Action.DROP), b'{"items":[1]}', "drop"),
        (rule("items[].card", Action.DROP), b'{"items":{"card":1}}', "not a list"),
        (rule("a.b", Action.DROP), b'{"a":[1]}', "not an object"),
        (rule("a.b", Action.KEEP), b'{"a":{"b":1,"c":2}}', "do not let cross"),
        (TransformSpec(filter="a == 1"), b'{"a":2}', "filter"),
        (TransformSpec(filter="a == 1"), b"{}", "filter"),
        (TransformSpec(), b'{"a":1,"a":2}', "written"),
        (TransformSpec(), b'{"a": 1}', "written"),
        (TransformSpec(), b'{"a":1}\n', "written"),
        (TransformSpec(), b'{"a":"\\u0041"}', "written"),
        (TransformSpec(), b"[1]", "object"),
        (TransformSpec(), b"1", "object"),
        (TransformSpec(), b"\xff", "JSON"),
        (TransformSpec(), b'{"a":NaN}', "JSON"),
        (TransformSpec(), b"{" + b'"a":{' * 70 + b"}" * 70 + b"}", "nested"),
        (TransformSpec(), b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}", "JSON|nested"),
        (TransformSpec(), b"", "tombstone"),
    ],
)
def test_a_payload_that_breaks_a_term_does_not_pass(spec: TransformSpec, payload: bytes, says: str) -> None:
    refused(spec, payload, says=says)


def test_a_filter_over_what_does_not_cross_is_not_judged_here() -> None:
    spec = TransformSpec(filter="secret == 1", fields=(FieldRule(field="secret", do=Action.DROP),))
    Inspection(terms(spec)).record(b"", encode_headers(PATH), b"{}")


@pytest.mark.parametrize(
    ("rule_", "key", "passes"),
    [
        (KeyRule.DROP, b"k", False), (KeyRule.DROP, b"", True), (KeyRule.KEEP, b"k" * 4_096, True),
        (KeyRule.KEEP, b"k" * 4_097, False), (KeyRule.HASH, b"A" * 22, True), (KeyRule.HASH, b"A" * 21 + b"B", False),
        (KeyRule.HASH, b"A" * 21, False), (KeyRule.PSEUDONYMIZE, b"alice", False), (KeyRule.PSEUDONYMIZE, b"", True),
        (KeyRule.PSEUDONYMIZE, b"A" * 22 + b"\n", False),
    ],
)  # fmt: skip
def test_keys(rule_: KeyRule, key: bytes, passes: bool) -> None:
    spec = TransformSpec(key=rule_)
    if passes:
        Inspection(terms(spec)).record(key, encode_headers(PATH), b"{}")
    else:
        refused(spec, b"{}", key)


def twice() -> bytes:
    one = encode_headers(PATH)[2:]
    return b"\x00\x02" + one + one


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        (b"", "where it has been"),
        (b"\x00\x00", "where it has been"),
        (encode_headers({**PATH, "note": b""}), "do not name"),
        (encode_headers({**PATH, "felix.tombstone": b""}), "do not name"),
        (encode_headers({**PATH, "traceparent": TRACE}), "do not name"),
        (encode_headers({"Felix-Path": b"us-east"}), "do not name"),
        (encode_headers({"felix-path": b"ap-south"}), "comes from us-east"),
        (encode_headers({"felix-path": b"eu-west,us-east"}), "has been in eu-west"),
        (encode_headers({"felix-path": b"ap-south,us-east"}), "onward"),
        (twice(), "twice"),
    ],
)
def test_headers(headers: bytes, says: str) -> None:
    refused(TransformSpec(), b"{}", headers=headers, says=says)


def test_what_is_named_passes_and_a_trace_must_be_one() -> None:
    spec = TransformSpec(headers=("note", "felix.tombstone"), trace=True)
    inspection = Inspection(terms(spec, onward=True))
    for more in ({"note": b"x"}, {"felix.tombstone": b"deleted"}, {"traceparent": TRACE}, {"note": b"1"}):
        inspection.record(b"", encode_headers({**more, "felix-path": b"ap-south,us-east"}), b"{}")
    refused(spec, b"{}", headers=encode_headers({**PATH, "traceparent": b"00-x"}), says="traceparent")


def test_opaque_payloads_are_not_read() -> None:
    inspection = Inspection(terms(TransformSpec(format=Format.OPAQUE)))
    for payload in (b"", b"\xff", b"{"):
        inspection.record(b"A" * 22, encode_headers(PATH), payload)


@pytest.mark.parametrize(
    ("fields", "element", "count"),
    [
        (["a[]"], "AAAAAAAAAAAAAAAAAAAAAA", 16_000),
        (["a[][]"], ["AAAAAAAAAAAAAAAAAAAAAA"], 8_000),
        ([f"a[].b{number}" for number in range(250)], {}, 8_000),
        ([f"a[].b{number}" for number in range(120)], {"b7": "AAAAAAAAAAAAAAAAAAAAAA"}, 8_000),
    ],
)
def test_a_record_of_many_values_is_inspected_some_at_a_time(
    fields: list[str], element: Any, count: int
) -> None:
    spec = build_spec(pseudonymize=fields, missing=Missing.OK)
    data = json.dumps({"a": [element] * count}, separators=(",", ":")).encode()
    checked = Inspection(terms(spec)).steps(b"", encode_headers(PATH), data)
    assert sum(1 for _ in checked) >= count * len(fields) // (2 * STEP_RULES)
    wrong = (
        data.replace(b"]}", b",1]}") if not isinstance(element, dict) else data.replace(b"]}", b',{"b0":1}]}')
    )
    with pytest.raises(OutsideTermsError):
        Inspection(terms(spec)).record(b"", encode_headers(PATH), wrong)
