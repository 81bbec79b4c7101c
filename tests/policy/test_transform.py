from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_runs import count

import policy.transform as transform_module
from felix.errors import RequestError
from felix.steps import Steps
from policy.fieldpath import FieldPath
from policy.lineage import EFFECTS, field_lineage
from policy.transform import (
    LONG_DIGITS_MAX,
    LONG_NUMBER,
    RECORD_BYTES_MAX,
    STEP_RULES,
    VALUES_MAX,
    Action,
    Crossing,
    Encoding,
    FieldRule,
    FilteredOut,
    Format,
    KeyRule,
    Missing,
    TransformSpec,
    Withheld,
    build_spec,
    compile_transform,
)

KEY = bytes(range(32))
FLIGHT = {
    "year": 2013, "month": 1, "day": 1, "dep_time": 517, "carrier": "UA", "flight": 1545, "tailnum": "N14228",
    "origin": "EWR", "dest": "IAH", "hour": 5, "minute": 15, "time_hour": "2013-01-01T10:00:00Z",
}  # fmt: skip
DEPARTURES = build_spec(pseudonymize=["tailnum"], drop=["hour", "minute"])


def crossed(spec: TransformSpec, record: Any, scope: str = "eu-west analytics") -> Any:
    output = compile_transform(spec, KEY, scope)(json.dumps(record).encode())
    assert isinstance(output, bytes), output
    return json.loads(output)


def withheld(spec: TransformSpec, record: Any) -> str:
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    output = compile_transform(spec, KEY, "s")(data)
    assert isinstance(output, Withheld), output
    return output.reason


def test_a_departure_crosses_without_its_tail_number_and_two_fields() -> None:
    record = crossed(DEPARTURES, FLIGHT)
    assert "hour" not in record
    assert "minute" not in record
    assert record["tailnum"] != "N14228"
    assert len(record["tailnum"]) == 22
    assert {k: v for k, v in record.items() if k != "tailnum"} == {
        k: v for k, v in FLIGHT.items() if k not in ("tailnum", "hour", "minute")
    }


def test_pseudonyms_are_stable_and_do_not_join_across_scopes() -> None:
    first, again = crossed(DEPARTURES, FLIGHT), crossed(DEPARTURES, {**FLIGHT, "day": 2})
    elsewhere = crossed(DEPARTURES, FLIGHT, scope="ap-south analytics")
    assert first["tailnum"] == again["tailnum"] != elsewhere["tailnum"]
    hashing = build_spec(hash_=["tailnum"])
    assert crossed(hashing, FLIGHT)["tailnum"] == crossed(hashing, FLIGHT, scope="ap-south")["tailnum"]
    assert crossed(hashing, FLIGHT)["tailnum"] != first["tailnum"]


def test_another_region_key_gives_other_pseudonyms() -> None:
    data = json.dumps(FLIGHT).encode()
    one = compile_transform(DEPARTURES, KEY, "s")(data)
    assert one != compile_transform(DEPARTURES, bytes(32), "s")(data)


def test_the_pseudonym_is_the_documented_hmac() -> None:
    import hashlib
    import hmac
    from base64 import urlsafe_b64encode

    derived = hmac.new(KEY, b"felix/transform-pseudonym/1\0" + b"eu-west analytics", hashlib.sha256).digest()
    expected = (
        urlsafe_b64encode(hmac.new(derived, b"N14228", hashlib.sha256).digest()[:16]).rstrip(b"=").decode()
    )
    assert crossed(DEPARTURES, FLIGHT)["tailnum"] == expected


@pytest.mark.parametrize(
    ("spec", "record", "expected"),
    [
        (build_spec(keep=["a"]), {"a": 1, "b": 2}, {"a": 1}),
        (build_spec(keep=["a", "z"]), {"b": 2, "a": 1}, {"a": 1}),
        (build_spec(keep=["c.id"]), {"c": {"id": 1, "x": 2}, "b": 2}, {"c": {"id": 1}}),
        (build_spec(keep=["c"], drop=["c.x"]), {"c": {"id": 1, "x": 2}, "b": 2}, {"c": {"id": 1}}),
        (build_spec(keep=["a"], mask=["c.x"]), {"c": {"id": 1, "x": 2}, "a": 2}, {"a": 2, "c": {"x": "***"}}),
        (build_spec(keep=["a"], drop=["c.x"]), {"c": {"id": 1, "x": 2}, "a": 2}, {"a": 2}),
        (build_spec(drop=["c.x"]), {"c": {"id": 1, "x": 2}}, {"c": {"id": 1}}),
        (build_spec(drop=["c.x"]), {"c": None}, {"c": None}),
        (build_spec(drop=["c"]), {"c": {"id": 1}}, {}),
        (build_spec(drop=["c"]), {"a": 1}, {"a": 1}),
        (build_spec(keep=["i[].sku"]), {"i": [{"sku": 1, "p": 2}, {"p": 3}]}, {"i": [{"sku": 1}, {}]}),
        (build_spec(drop=["i[].p"]), {"i": [{"sku": 1, "p": 2}]}, {"i": [{"sku": 1}]}),
        (build_spec(drop=["i[]"]), {"i": [1, 2]}, {"i": []}),
        (build_spec(mask=["i[][].p"]), {"i": [[{"p": 1}], []]}, {"i": [[{"p": "***"}], []]}),
        (build_spec(mask=["t[]"]), {"t": ["x", None, {"y": 1}]}, {"t": ["***", "***", "***"]}),
        (build_spec(mask=["card:4"]), {"card": "4111111111111111"}, {"card": "***1111"}),
        (build_spec(mask=["card:4"]), {"card": 4111111111111111}, {"card": "***1111"}),
        (build_spec(mask=["card:4"]), {"card": "4111"}, {"card": "***"}),
        (build_spec(mask=["card:4"]), {"card": None}, {"card": "***"}),
        (build_spec(mask=["card"]), {"card": [1, 2]}, {"card": "***"}),
        (build_spec(pseudonymize=["a"]), {"a": None}, {"a": None}),
        (build_spec(drop=['"odd.name"']), {"odd.name": 1, "odd": {"name": 2}}, {"odd": {"name": 2}}),
        (build_spec(), {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
        (build_spec(pseudonymize=["a"], missing=Missing.OK), {"b": 1}, {"b": 1}),
    ],
)
def test_rules(spec: TransformSpec, record: Any, expected: Any) -> None:
    assert crossed(spec, record) == expected


def test_one_identifier_has_one_pseudonym_however_it_is_written() -> None:
    spec = build_spec(pseudonymize=["id"])
    assert len({crossed(spec, {"id": form})["id"] for form in (1545, 1545.0, "1545")}) == 1
    assert crossed(spec, {"id": 1.5})["id"] != crossed(spec, {"id": 1})["id"]


def test_digests_can_be_shorter_and_in_hex() -> None:
    rule = FieldRule(field="a", do=Action.HASH, digest_bytes=8, encoding=Encoding.HEX)
    assert len(crossed(TransformSpec(fields=(rule,)), {"a": "x"})["a"]) == 16


@pytest.mark.parametrize(
    ("spec", "record", "reason"),
    [
        (DEPARTURES, b"", "the record is not valid JSON."),
        (DEPARTURES, b"\xff\xfe", "the record is not valid JSON."),
        (DEPARTURES, b'{"tailnum":"\xff"}', "the record is not valid JSON."),
        (DEPARTURES, b'{"tailnum":"N1"', "the record is not valid JSON."),
        (DEPARTURES, b'{"tailnum":"N1"} x', "the record is not valid JSON."),
        (DEPARTURES, b'{"tailnum":NaN}', "the record is not valid JSON."),
        (DEPARTURES, b'{"tailnum":Infinity}', "the record is not valid JSON."),
        (DEPARTURES, b'{"tailnum":1e999}', "the record is not valid JSON."),
        (DEPARTURES, b'{"tailnum":"\\ud800"}', "the record is not valid JSON."),
        (DEPARTURES, [1], "the record is a list, not a JSON object."),
        (DEPARTURES, "text", "the record is a text, not a JSON object."),
        (DEPARTURES, b'{"tailnum":"N1","tailnum":"N2"}', "the record has the same key twice in one object."),
        (DEPARTURES, b'{"tailnum":"N1","a":{"b":1,"b":2}}', "the record has the same key twice in one object."),
        (DEPARTURES, b'{"tailnum":"N1","x":"\\u003a","tailnum":"N2"}', "the record has the same key twice in one object."),
        (DEPARTURES, b'{"tailnum":"N1","t\\u0061ilnum":"N2"}', "the record has the same key twice in one object."),
        (DEPARTURES, {"origin": "EWR"}, "tailnum is missing."),
        (DEPARTURES, {"tailnum": ["N1"]}, "tailnum holds a list, where its rule expects a text or a number."),
        (DEPARTURES, {"tailnum": {"n": 1}}, "tailnum holds an object, where its rule expects a text or a number."),
        (DEPARTURES, {"tailnum": True}, "tailnum holds true or false, where its rule expects a text or a number."),
        (build_spec(mask=["a:2"]), {"a": [1]}, "a holds a list, where its rule expects a text or a number."),
        (build_spec(drop=["c.id"]), {"c": "id=5"}, "c holds a text, where a rule expects an object."),
        (build_spec(drop=["c.id"]), {"c": [{"id": 5}]}, "c holds a list, where a rule expects an object."),
        (build_spec(drop=["i[].id"]), {"i": {"id": 5}}, "i holds an object, where a rule expects a list."),
        (build_spec(drop=["i[].id"]), {"i": [5]}, "i[] holds a number, where a rule expects an object."),
        (build_spec(hash_=["c.id"]), {"c": {}}, "c.id is missing."),
        (build_spec(hash_=["c.id"]), {}, "c is missing."),
        (build_spec(hash_=["c.id"]), {"c": None}, "c holds nothing, and a rule below it needs its field."),
        (build_spec(keep=["a"], missing=Missing.WITHHOLD), {"b": 1}, "a is missing."),
        (build_spec(keep=["a"], drop=["b"], missing=Missing.WITHHOLD), {"a": 1}, "b is missing."),
        (DEPARTURES, b"[" * 5000, "the record is nested deeper than 64 levels."),
        (build_spec(), b'{"a":' * 80 + b"1" + b"}" * 80, "the record is nested deeper than 64 levels."),
        (build_spec(), b" " * (RECORD_BYTES_MAX + 1), f"the record is {RECORD_BYTES_MAX + 1} bytes; {RECORD_BYTES_MAX} are allowed."),
        (build_spec(filter_="a > 1"), {"b": 1}, "the filter cannot be decided: it looks at a, and not all are as it expects."),
    ],
)  # fmt: skip
def test_what_cannot_be_transformed_is_withheld_with_its_reason(
    spec: TransformSpec, record: Any, reason: str
) -> None:
    assert withheld(spec, record) == reason


def test_a_record_that_grows_too_large_is_withheld() -> None:
    record = b'{"a":[' + b",".join([b'"x"'] * 16_000) + b'],"b":"' + b"y" * 700_000 + b'"}'
    assert "the transformed record is" in withheld(build_spec(hash_=["a[]"]), record)


def test_a_record_that_is_filtered_out_is_not_called_withheld_for_its_key() -> None:
    spec = build_spec(drop=["tailnum"], key=KeyRule.KEEP, filter_="distance > 5")
    transform = compile_transform(spec, KEY, "s")
    assert transform.record(b"N14228", {}, b'{"tailnum":"N14228","distance":1}') == FilteredOut()
    assert isinstance(transform.record(b"N14228", {}, b'{"tailnum":"N14228","distance":9}'), Withheld)


def test_a_number_of_thousands_of_digits_is_withheld() -> None:
    escaped = b'{"b":"\\u0041","a":' + b"9" * 5000 + b"}"
    assert isinstance(compile_transform(build_spec(), KEY, "s")(escaped), Withheld)
    assert isinstance(
        compile_transform(build_spec(hash_=["a"]), KEY, "s")(b'{"a":' + b"9" * 5000 + b"}"), Withheld
    )


def test_colons_inside_texts_are_not_mistaken_for_duplicates() -> None:
    record = {"time": "10:00:00", "a:b": {"c": "::"}, "u": "\u00e9:\u2028", "e": []}
    assert crossed(build_spec(), record) == record
    assert crossed(build_spec(), {"x": "\x01:"}) == {"x": "\x01:"}


def test_wide_records_are_not_mistaken_for_deep_ones() -> None:
    record = {"a": [[i] for i in range(500)]}
    assert crossed(build_spec(), record) == record


def test_a_filter_sees_the_record_before_the_rules() -> None:
    spec = build_spec(pseudonymize=["tailnum"], filter_='tailnum == "N14228" and distance > 1000')
    transform = compile_transform(spec, KEY, "s")
    assert isinstance(transform(b'{"tailnum":"N14228","distance":1400}'), bytes)
    assert transform(b'{"tailnum":"N14228","distance":1}') == FilteredOut()


# ------------------------------------------------------------------------------------------ keys and headers


def record_crossing(
    spec: TransformSpec, key: bytes | None, record: Any, headers: dict[str, bytes] | None = None
) -> Any:
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    return compile_transform(spec, KEY, "s").record(key, headers or {}, data)


def test_a_key_is_pseudonymized_unless_the_spec_says_otherwise() -> None:
    crossing = record_crossing(DEPARTURES, b"N14228", FLIGHT)
    assert crossing.key.decode() == json.loads(crossing.payload)["tailnum"]
    assert record_crossing(build_spec(key=KeyRule.DROP), b"k", {}).key is None
    assert record_crossing(build_spec(key=KeyRule.KEEP), b"k", {}).key == b"k"
    hashed = record_crossing(build_spec(key=KeyRule.HASH), b"k", {}).key
    assert len(hashed) == 22
    assert hashed != record_crossing(build_spec(), b"k", {}).key
    assert record_crossing(build_spec(), None, {}).key is None


@pytest.mark.parametrize(
    ("key", "shown_by"),
    [
        (b"N14228", "tailnum"),
        (b"UA-N14228-1", "tailnum"),
        (b"1545", None),
        (b"15", None),
        (b"\xff\xfe", None),
    ],
)
def test_a_kept_key_must_not_show_a_protected_value(key: bytes, shown_by: str | None) -> None:
    spec = build_spec(pseudonymize=["tailnum"], drop=["hour", "minute"], key=KeyRule.KEEP)
    crossing = record_crossing(spec, key, FLIGHT)
    if shown_by is None:
        assert crossing.key == key
    else:
        assert crossing == Withheld(
            f"the record's key shows the value of {shown_by}, whose rule is pseudonymize."
        )


def test_an_allowlist_protects_what_it_does_not_name_from_the_key_too() -> None:
    spec = build_spec(keep=["origin"], key=KeyRule.KEEP)
    assert record_crossing(spec, b"N14228", FLIGHT) == Withheld(
        "the record's key shows the value of a field that no rule keeps."
    )
    numbers = build_spec(hash_=["flight"], key=KeyRule.KEEP)
    assert isinstance(record_crossing(numbers, b"1545", FLIGHT), Withheld)


def test_a_kept_key_is_compared_with_fields_of_an_unexpected_shape_too() -> None:
    assert record_crossing(
        build_spec(keep=["b[]"], key=KeyRule.KEEP), b"secret", {"b": "secret"}
    ) == Withheld("the record's key shows the value of a field that no rule keeps.")


@pytest.mark.parametrize(
    ("spec", "record", "named"),
    [
        (build_spec(keep=["id"], key=KeyRule.KEEP), {"patient-4711": "shown"}, "a field that no rule keeps"),
        (build_spec(keep=["id"], key=KeyRule.KEEP), {"a": [{"patient-4711": "shown"}]}, "a field that no rule keeps"),
        (build_spec(drop=["by"], key=KeyRule.KEEP), {"by": {"patient-4711": "shown"}}, "by, whose rule is drop"),
        (build_spec(keep=["b.c"], key=KeyRule.KEEP), {"b": {"patient-4711": "shown", "c": 1}}, "a field that no rule keeps"),
    ],
)  # fmt: skip
def test_why_a_record_stays_names_no_field_that_only_the_record_names(
    spec: TransformSpec, record: dict[str, Any], named: str
) -> None:
    """It stands in the egress log for good, and who publishes chooses such names."""
    assert record_crossing(spec, b"shown", record) == Withheld(
        f"the record's key shows the value of {named}."
    )


def test_only_named_headers_cross() -> None:
    trace = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
    headers = {"kind": b"x", "secret": b"y", "traceparent": trace, "felix-path": b"us-east"}
    assert record_crossing(build_spec(), None, {}, headers).headers == {}
    assert record_crossing(build_spec(headers=["kind", "other"]), None, {}, headers).headers == {"kind": b"x"}
    assert record_crossing(build_spec(trace=True), None, {}, headers).headers == {"traceparent": trace}
    forged = {"traceparent": b"00-tail number N14228"}
    assert record_crossing(build_spec(trace=True), None, {}, forged).headers == {}


@pytest.mark.parametrize("name", ["traceparent", "tracestate", "baggage", "felix-path", "Felix-Path"])
def test_reserved_headers_cannot_be_named(name: str) -> None:
    with pytest.raises(RequestError, match="is not passed on by a rule"):
        build_spec(headers=[name])


@pytest.mark.parametrize(
    ("spec", "crosses"),
    [
        (DEPARTURES, True),
        (build_spec(drop=["a"], key=KeyRule.HASH, filter_="a == 1"), True),
        (build_spec(key=KeyRule.KEEP), True),
        (build_spec(key=KeyRule.KEEP, drop=["a"]), False),
        (build_spec(key=KeyRule.KEEP, filter_="a == 1"), False),
        (build_spec(key=KeyRule.DROP), False),
    ],
)
def test_a_tombstone_crosses_only_where_its_key_shows_nothing(spec: TransformSpec, crosses: bool) -> None:
    result = record_crossing(spec, b"k", b"")
    assert isinstance(result, Crossing if crosses else Withheld)
    assert isinstance(record_crossing(spec, None, b""), Withheld)


def test_opaque_payloads_cross_as_they_are_and_take_no_rules() -> None:
    spec = TransformSpec(format=Format.OPAQUE)
    assert record_crossing(spec, b"k", b"\x00\xff").payload == b"\x00\xff"
    assert compile_transform(spec, KEY, "s")(memoryview(b"\x00")) == b"\x00"
    with pytest.raises(RequestError, match="opaque payloads are not read"):
        TransformSpec(format=Format.OPAQUE, filter="a == 1")
    assert build_spec(opaque=True, headers=["felix.tombstone"]).format is Format.OPAQUE
    with pytest.raises(RequestError, match="opaque payloads are not read"):
        build_spec(opaque=True, drop=["a"])


# ------------------------------------------------------------------------------------------------ bad specs


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"drop": ["a"], "hash_": ["a"]}, "a has two rules."),
        ({"drop": ["a"], "keep": ["a"]}, "a has two rules."),
        ({"keep": ["a"], "hash_": ["a"]}, "a has two rules; it crosses by the other one"),
        ({"drop": ["a"], "keep": ["a.b"]}, "a has the rule drop, so no rule can apply below it"),
        ({"drop": ["a.b", "a[]"]}, "a[] takes for a list what another rule takes for an object"),
        ({"drop": ["a[]", "a.b"]}, "a.b takes for an object what another rule takes for a list"),
        ({"drop": ["a..b"]}, "is not a field path"),
        ({"drop": ['"a"']}, 'write the field "a" as a'),
        ({"drop": [".".join("a" * 17)]}, "is not a field path"),
        ({"mask": ["a:x"]}, "is not a field path"),
        ({"mask": ["a:99"]}, "last is 99; 0 to 8 are allowed"),
        ({"filter_": "a ="}, "The filter cannot be read at column 3"),
    ],
)
def test_rules_that_cannot_hold_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        build_spec(**arguments)
    assert sentence in str(caught.value)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(RequestError, match="at least 32 are needed"):
        compile_transform(DEPARTURES, b"short", "s")


# ------------------------------------------------------------------------------------------- plan and lineage


def test_a_plan_shows_each_field_before_and_after() -> None:
    spec = build_spec(pseudonymize=["c.id"], drop=["c.mail"], mask=["card:4"])
    record = {"c": {"id": "anna", "mail": "a@b"}, "card": "4111111111111111", "t": ["x"], "e": {}}
    plan = compile_transform(spec, KEY, "s").plan(b"k", {}, json.dumps(record).encode())
    assert plan.outcome == "crosses"
    fields = {field.path: field for field in plan.fields}
    assert fields["c.id"].action is Action.PSEUDONYMIZE
    assert fields["c.id"].after not in (None, '"anna"')
    assert fields["c.mail"][1:] == (Action.DROP, '"a@b"', None)
    assert fields["card"][1:] == (Action.MASK, '"4111111111111111"', '"***1111"')
    assert fields["t[0]"][1:] == (Action.KEEP, '"x"', '"x"')
    assert fields["e"][1:] == (Action.KEEP, "{}", "{}")
    assert plan.key not in (None, b"k")


def test_a_plan_says_why_nothing_crosses() -> None:
    plan = compile_transform(DEPARTURES, KEY, "s").plan(None, {}, b'{"x":1}')
    assert (plan.outcome, plan.reason) == ("withheld", "tailnum is missing.")
    assert compile_transform(DEPARTURES, KEY, "s").plan(None, {}, b"junk").fields == ()
    filtered = compile_transform(build_spec(filter_="x == 2"), KEY, "s").plan(None, {}, b'{"x":1}')
    assert (filtered.outcome, filtered.reason) == ("filtered", "the filter excludes it: x == 2")


def test_lineage_says_what_becomes_of_each_field() -> None:
    spec = build_spec(
        pseudonymize=["tailnum"], drop=["hour"], mask=["c.card"], hash_=["c.id"], filter_="distance > 5"
    )
    lineage = field_lineage(spec, ["origin", "c.name"])
    assert {field.field: EFFECTS[field.action] for field in lineage.fields} == {
        "tailnum": ("pseudonymized", "MASKING", True),
        "hour": ("dropped", "TRANSFORMATION", False),
        "c.card": ("masked", "MASKING", True),
        "c.id": ("hashed", "HASHING", True),
        "origin": ("kept", "IDENTITY", False),
        "c.name": ("kept", "IDENTITY", False),
    }
    assert lineage.others_kept
    allow = field_lineage(build_spec(keep=["a", "c.id"]), ["b", "c", "c.x", "a.deep"])
    assert [field.told for field in allow.fields] == ["keep", "keep", "drop", "keep", "drop", "keep"]
    assert not allow.others_kept


def test_every_rule_has_words_and_a_name_for_its_kind() -> None:
    assert set(EFFECTS) == set(Action)


# ----------------------------------------------------------------------------------------------- properties

_names = st.sampled_from(["a", "b", "c", "tailnum"])
_secret = st.integers(0, 10**6).map(lambda n: f"SECRET{n:07d}")
_value = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | _secret,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=10,
)
_path = st.sampled_from(["a", "b", "tailnum", "a.b", "a.c", "b[]", "b[].a", "c[].b", "c[][]", "tailnum.a.b"])
_rules = st.lists(
    st.builds(
        lambda field, do, missing: FieldRule(field=field, do=do, missing=missing),
        _path, st.sampled_from(list(Action)), st.sampled_from([None, *Missing]),
    ),
    max_size=4, unique_by=lambda rule: rule.field,
)  # fmt: skip


def values_at(value: Any, parts: tuple[str, ...]) -> list[Any]:
    """An independent reading of a path: every value it leads to."""
    if not parts:
        return [value]
    if parts[0] == "[]":
        return (
            [found for part in value for found in values_at(part, parts[1:])]
            if isinstance(value, list)
            else []
        )
    return values_at(value[parts[0]], parts[1:]) if isinstance(value, dict) and parts[0] in value else []


def texts(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return {text for part in parts for text in texts(part)}


@settings(max_examples=count(150, 400), deadline=None)
@given(_rules, st.dictionaries(_names, _value, max_size=4), st.sampled_from(list(KeyRule)), st.booleans())
def test_no_protected_value_ever_appears_in_what_crosses(
    rules: list[FieldRule], record: dict[str, Any], key_rule: KeyRule, pick_key: bool
) -> None:
    try:
        spec = TransformSpec(fields=tuple(rules), key=key_rule)
    except RequestError:
        return
    protected = {
        text
        for rule in rules if rule.do is not Action.KEEP
        for value in values_at(record, FieldPath.parse(rule.field).parts)
        for text in texts(value)
    }  # fmt: skip
    everything = texts(record)
    if spec.is_allowlist:
        kept = {
            text
            for rule in rules if rule.do is Action.KEEP
            for value in values_at(record, FieldPath.parse(rule.field).parts)
            for text in texts(value)
        }  # fmt: skip
        protected |= everything - kept
    # A value that also stands in a field nobody protects may cross there; only those that do not are looked for.
    shown_elsewhere = {text for text in everything if json.dumps(record).count(text) > 1}
    key = sorted(everything)[0].encode() if everything and pick_key else b"order-1"
    result = compile_transform(spec, KEY, "s").record(key, {}, json.dumps(record).encode())
    if isinstance(result, Crossing):
        out = result.payload + (result.key or b"")
        for text in protected - shown_elsewhere:
            assert text.encode() not in out
    else:
        assert isinstance(result, Withheld)
        assert "SECRET" not in result.reason


@settings(max_examples=300, deadline=None)
@given(_rules, st.dictionaries(_names, _value, max_size=4))
def test_plan_lineage_and_transform_agree(rules: list[FieldRule], record: dict[str, Any]) -> None:
    try:
        spec = TransformSpec(fields=tuple(rules))
    except RequestError:
        return
    plan = compile_transform(spec, KEY, "s").plan(None, {}, json.dumps(record).encode())
    if plan.outcome == "crosses":
        for field in plan.fields:
            if field.action is Action.KEEP:
                assert field.after == field.before
            elif field.action is Action.DROP:
                assert field.after is None or field.path.endswith("]")


@settings(max_examples=500, deadline=None)
@given(
    st.binary(max_size=200)
    | st.text(alphabet='{}[]":,0123456789.eE-+tnulfrasi\\ \x00é', max_size=80).map(str.encode)
)
def test_any_bytes_cross_transformed_or_are_withheld(data: bytes) -> None:
    spec = build_spec(pseudonymize=["a"], drop=["t"], missing=Missing.OK, filter_="not exists(n) or n > 1")
    transform = compile_transform(spec, KEY, "s")
    for result in (transform(data), transform(memoryview(data))):
        if isinstance(result, bytes):
            assert isinstance(msgspec.json.decode(result), dict)
        else:
            assert isinstance(result, Withheld | FilteredOut)
    assert isinstance(transform.record(data, {}, data), Crossing | Withheld | FilteredOut)
    transform.plan(data, {}, data)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.text(max_size=3), st.text(alphabet='a:"\\{}é\u2028\x01', max_size=6), max_size=4),
    st.booleans(),
)
def test_the_duplicate_check_is_exact(record: dict[str, str], ascii_only: bool) -> None:
    data = json.dumps(record, ensure_ascii=ascii_only).encode()
    transform = compile_transform(build_spec(), KEY, "s")
    assert isinstance(transform(data), bytes)
    if record:
        name = json.dumps(next(iter(record)), ensure_ascii=not ascii_only)
        doubled = data[:-1] + f', {name}: "x"}}'.encode()
        assert transform(doubled) == Withheld("the record has the same key twice in one object.")


def stepped(steps: Steps[Any], count: Callable[[], int]) -> tuple[Any, int, int]:
    """What they end with; how many there are, and the most that one of them does by `count`."""
    done, longest, number = count(), 0, 0
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value, number + 1, max(longest, count() - done)
        done, longest, number = count(), max(longest, count() - done), number + 1


MANY = {
    "numbers": (["a[]"], {"a": list(range(VALUES_MAX - 2))}),
    "lists of one": (["a[][]"], {"a": [[number] for number in range(VALUES_MAX // 2 - 2)]}),
    "lists in lists": (["a[][][]"], {"a": [[list(range(600)) for _ in range(5)] for _ in range(5)]}),
    "objects of many fields": (
        [f"a[].b{number}" for number in range(120)],
        {"a": [{f"b{number}": number for number in range(120)} for _ in range(130)]},
    ),
    "objects in objects": (
        [f"a[].b.c{number}" for number in range(120)],
        {"a": [{"b": {f"c{number}": number for number in range(120)}} for _ in range(130)]},
    ),
    "a list in each of many": (["a[].b[]"], {"a": [{"b": list(range(60))} for _ in range(260)]}),
}


@pytest.mark.parametrize("what", MANY)
def test_a_record_of_many_values_is_changed_some_at_a_time(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 kB hold 16,384 values; whoever runs the steps has other work."""
    fields, record = MANY[what]
    digests, digest = 0, transform_module._Hmac.digest

    def counted(self: Any, message: bytes) -> bytes:
        nonlocal digests
        digests += 1
        return digest(self, message)

    monkeypatch.setattr(transform_module._Hmac, "digest", counted)
    transform = compile_transform(build_spec(hash_=fields), KEY, "s")
    data = json.dumps(record).encode()
    result, steps, longest = stepped(transform.steps(None, {}, data), lambda: digests)
    assert digests > VALUES_MAX * 0.45
    assert longest <= 2 * STEP_RULES
    assert steps >= digests // (2 * STEP_RULES)
    # However it is stepped through, and as by single values.
    monkeypatch.setattr(transform_module, "STEP_RULES", 1 << 30)
    assert transform(data) == result.payload
    for value in (0, 59):
        single = crossed(build_spec(hash_=["a"]), {"a": value})["a"]
        assert json.dumps(single).encode() in result.payload


def test_rules_that_find_nothing_in_many_elements_are_applied_some_at_a_time() -> None:
    fields = [f"a[].b{number}" for number in range(250)]
    data = b'{"a":[' + b",".join([b"{}"] * (VALUES_MAX // 2 - 2)) + b"]}"
    for spec in (build_spec(keep=fields), build_spec(hash_=fields, missing=Missing.OK)):
        _, steps, _ = stepped(compile_transform(spec, KEY, "s").steps(None, {}, data), int)
        # Of an allowlist nothing is to be done but to look for what it names.
        assert steps >= (VALUES_MAX // 4 - 100 if spec.fields[0].do is Action.HASH else 20)


def test_a_kept_key_is_compared_with_many_values_some_at_a_time() -> None:
    values = [f"x{number:05}" for number in range(16_000)]
    transform = compile_transform(build_spec(drop=["a"], key=KeyRule.KEEP), KEY, "s")
    data = json.dumps({"a": values}).encode()
    _, steps, _ = stepped(transform.steps(b"k" * 4_096, {}, data), int)
    assert steps > len(values) // STEP_RULES
    assert isinstance(transform.record(values[-1].encode(), {}, data), Withheld)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers(-9, 9) | st.text("ab", max_size=3),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=20,
    ),
    st.sampled_from(["a[]", "a[][]", "a[].b", "a[].b[]", "a.b[].c"]),
    st.sampled_from(list(Action)),
    st.integers(1, 5),
)
def test_steps_change_nothing_about_the_result(value: Any, path: str, do: Action, step: int) -> None:
    spec = TransformSpec(fields=(FieldRule(field=path, do=do, missing=Missing.OK),))
    transform, data = compile_transform(spec, KEY, "s"), json.dumps({"a": value, "c": value}).encode()
    whole = transform(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform_module, "STEP_RULES", step)
        patch.setattr(transform_module, "STEP_BYTES", 1)
        assert transform(data) == whole


def test_numbers_without_end_are_not_read() -> None:
    """One of 4,000 digits takes 80 microseconds to read and 200 to write, and a record holds 260."""
    long, transform = b"9" * 4_000, compile_transform(build_spec(), KEY, "s")
    few = b'{"a":[' + b",".join([long] * (LONG_DIGITS_MAX // 4_000)) + b"]}"
    assert transform(few) == few
    assert transform(few.replace(b"]}", b"," + long + b"]}")) == Withheld(
        "the record has more than 65536 digits in numbers of 400 and more."
    )
    short = b'{"a":[' + b",".join([b"9" * (LONG_NUMBER - 1)] * 2_000) + b"]}"
    assert transform(short) == short
    for text in (b'"' + long * 40 + b'"', b'"\\"' + long * 40 + b'"', b'"\\\\",' + b'"' + long * 40 + b'"'):
        payload = b'{"a":[' + text + b"]}"
        assert transform(payload) == payload
    fraction = b'{"a":[' + b",".join([b"0." + long] * 200) + b"]}"
    assert isinstance(transform(fraction), Withheld)
