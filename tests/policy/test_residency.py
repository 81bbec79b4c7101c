from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from departures import DAY, terms
from hypothesis import given, settings
from hypothesis import strategies as st

from felix.errors import Code
from felix.names import NamePattern, StreamName
from policy.documents import ConfigError
from policy.residency import (
    REASONS_TOLD,
    Decision,
    Question,
    ResidencyError,
    ResidencyPolicy,
    check_successor,
    decide,
    open_policy,
    parse_policy,
    sign_policy,
)
from policy.signed import Purpose, SignatureError, SignedDocument, raw_public_key, sign
from policy.terms import Basis
from policy.transform import Format, KeyRule, TransformSpec, build_spec

EXAMPLES = Path(__file__).parents[2] / "examples" / "regions"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
TRUSTED = {"us-east": [raw_public_key(KEY)]}

HEAD = """\
version: 1
name: test
revision: 3
region: us-east
regions:
  us-east: {country: US, jurisdiction: US}
  us-west: {country: US, jurisdiction: US}
  eu-west: {country: IE, jurisdiction: EU}
  eu-north: {country: "NO", jurisdiction: EEA}
"""
"""Nine lines; what a test adds begins on line 10."""


PART = st.builds(lambda stem, end: stem + end or "a", st.text("ab", max_size=3), st.sampled_from(["", "*"]))
PATTERNS = st.tuples(PART, PART, PART).map("/".join)


def policy(text: str) -> ResidencyPolicy:
    return parse_policy(HEAD + text, "p.yaml")


def example(name: str) -> ResidencyPolicy:
    return parse_policy((EXAMPLES / name).read_text(), name)


def ask(
    found: ResidencyPolicy,
    stream: str,
    to: str = "eu-west",
    *,
    source: str = "us-east",
    now: int = 0,
    **changes: Any,
) -> Decision:
    name = StreamName.parse(stream) if "*" not in stream else NamePattern(stream)
    changes.setdefault("wildcard", "*" in stream)
    agreed = terms(
        stream=stream, to_region=to, from_region=source, bridge=f"spiffe://{source}.acme/bridge/b", **changes
    )
    return decide(found, Question(name, source, to, agreed), now)


# --------------------------------------------------------------------------------------------- the examples


def test_the_examples_let_departures_cross_and_nothing_else() -> None:
    for name in ("residency.yaml", "residency-eu-west.yaml"):
        assert ask(example(name), "acme/ops/departures").allowed
        assert not ask(example(name), "acme/ops/crew").allowed
        assert not ask(example(name), "acme/hr/people").allowed
        assert not ask(example(name), "acme/ops/departures", transform=build_spec()).allowed
    assert ask(example("residency.yaml"), "acme/ops/crew").denied


def test_a_decision_names_its_rule_and_where_it_stands() -> None:
    allowed = ask(example("residency.yaml"), "acme/ops/departures")
    assert allowed.rule == "departures-to-eu"
    assert list(map(str, allowed.reasons)) == [
        "acme/ops/departures is operational data, and may leave for eu-west. "
        "(rule departures-to-eu, residency.yaml:31:5)"
    ]
    denied = ask(example("residency.yaml"), "acme/ops/crew")
    assert list(map(str, denied.reasons)) == [
        "acme/ops/crew must not leave for eu-west: crew rosters and duty hours do not leave the region. "
        "(rule crew-stays, residency.yaml:59:5)"
    ]
    assert denied.error().code is Code.RESIDENCY_DENIED


def test_without_terms_the_answer_says_what_a_grant_would_need() -> None:
    name = StreamName.parse("acme/hr/headcount")
    answer = decide(example("residency.yaml"), Question(name, "us-east", "eu-west"), 0)
    assert answer.allowed
    assert [reason.sentence for reason in answer.reasons] == [
        "acme/hr/headcount is personal data, and may leave for eu-west.",
        "A grant needs one of these bases: scc or bcr.",
        "Its purpose must be workforce-planning.",
        "It must drop name, email, or protect better.",
        "It must pseudonymize employee.id, or protect better.",
        "It may last 30 days.",
        "It needs 2 approvals, by others than who drew it up or accepted it.",
        "It must name a transfer assessment.",
    ]


# --------------------------------------------------------------------------------------------- the decisions

RULES = """\
classes:
  operational: {streams: [acme/ops/*]}
  health: {streams: [acme/*/med-*]}
  telemetry: {streams: [acme/iot/*]}
exports:
  - name: ops
    classes: [operational]
    to: {jurisdictions: [EU, US]}
    bases: [scc, same-jurisdiction]
    purposes: [analytics]
    transforms: [{do: pseudonymize, fields: [tailnum]}, {do: drop, fields: [pay.sum]}]
    assessment: true
    approvals: 2
    lifetime: 90d
  - name: iot
    classes: [telemetry]
    to: {regions: [eu-west]}
    bases: [not-personal]
    wildcards: true
    onward: true
    opaque: true
    keys: [keep]
    headers: [kind]
    trace: true
    lifetime: 365d
deny:
  - {name: no-secret, streams: [acme/*/secret], because: it is secret}
  - {name: no-iot-x, streams: [acme/iot/x*], to: {regions: [eu-west]}, because: not there}
"""

GOOD: dict[str, Any] = {
    "transform": build_spec(pseudonymize=["tailnum"], drop=["pay"]),
    "transfer_assessment": "TIA-1",
}
IOT: dict[str, Any] = {
    "basis": Basis.NOT_PERSONAL,
    "transform": TransformSpec(format=Format.OPAQUE, key=KeyRule.KEEP),
}


@pytest.mark.parametrize(
    ("stream", "to", "changes"),
    [
        ("acme/ops/a", "eu-west", GOOD),
        ("acme/ops/a", "us-west", {**GOOD, "basis": Basis.SAME_JURISDICTION}),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": build_spec(drop=["tailnum", "pay.sum"])}),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": build_spec(mask=["tailnum"], drop=["pay"])}),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": build_spec(keep=["origin"])}),
        (
            "acme/ops/a",
            "eu-west",
            {**GOOD, "transform": build_spec(keep=["pay.id"], pseudonymize=["tailnum"])},
        ),
        ("acme/iot/a", "eu-west", IOT),
        ("acme/iot/t*", "eu-west", IOT),
        ("acme/iot/a", "eu-west", {**IOT, "onward": True, "expires": 365 * DAY}),
        (
            "acme/iot/a",
            "eu-west",
            {**IOT, "transform": build_spec(key=KeyRule.KEEP, headers=["kind"], trace=True)},
        ),
    ],
)
def test_terms_that_satisfy_a_rule_are_allowed(stream: str, to: str, changes: dict[str, Any]) -> None:
    answer = ask(policy(RULES), stream, to, **changes)
    assert answer.allowed, list(map(str, answer.reasons))


@pytest.mark.parametrize(
    ("stream", "to", "changes", "sentence"),
    [
        ("acme/zz/a", "eu-west", GOOD, "acme/zz/a has no class in the policy, and what has no class does not cross."),
        ("acme/ops/a", "mars", GOOD, "The policy does not know the region mars."),
        ("acme/ops/a", "eu-north", GOOD, "acme/ops/a is operational data, and no rule lets that leave for eu-north."),
        ("acme/ops/med-1", "eu-west", GOOD, "acme/ops/med-1 is health data, and no rule lets that leave for eu-west."),
        ("acme/ops/a", "eu-west", {**GOOD, "basis": Basis.BCR}, "The basis bcr is not accepted here; scc or same-jurisdiction would be."),
        ("acme/ops/a", "eu-west", {**GOOD, "basis": Basis.SAME_JURISDICTION}, "The basis same-jurisdiction does not hold between US and EU."),
        ("acme/ops/a", "eu-west", {**GOOD, "purpose": "fun"}, "The purpose 'fun' is not accepted here; analytics would be."),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": build_spec(drop=["pay"])}, "The field tailnum must be transformed with pseudonymize; the terms have keep."),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": build_spec(drop=["pay"], hash_=["tailnum"])}, "must be transformed with pseudonymize; the terms have hash."),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": build_spec(drop=["pay"], mask=["tailnum:4"])}, "must be transformed with pseudonymize; the terms have mask."),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": build_spec(drop=["tailnum", "pay.other"])}, "The field pay.sum must be transformed with drop; the terms have keep."),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": TransformSpec(format=Format.OPAQUE)}, "Payloads must not cross unread; the format must be json."),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": build_spec(pseudonymize=["tailnum"], drop=["pay"], key=KeyRule.KEEP)}, "The record key must not cross with the rule keep; pseudonymize or hash or drop would be accepted."),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": build_spec(pseudonymize=["tailnum"], drop=["pay"], headers=["kind"])}, "The header kind must not cross; none may."),
        ("acme/ops/a", "eu-west", {**GOOD, "transform": build_spec(pseudonymize=["tailnum"], drop=["pay"], trace=True)}, "Trace context must not cross."),
        ("acme/ops/*", "eu-west", GOOD, "A wildcard is not accepted here; grant each stream by its exact name."),
        ("acme/ops/a", "eu-west", {**GOOD, "onward": True}, "Onward transfer is not accepted here."),
        ("acme/ops/a", "eu-west", {**GOOD, "transfer_assessment": ""}, "The terms must name a transfer assessment."),
        ("acme/ops/a", "eu-west", {**GOOD, "expires": 91 * DAY}, "A grant of 91 days is too long; 90 days are allowed."),
        ("acme/ops/secret", "eu-west", GOOD, "acme/ops/secret must not leave for eu-west: it is secret."),
        ("acme/iot/x1", "eu-west", IOT, "acme/iot/x1 must not leave for eu-west: not there."),
        ("acme/iot/x*", "eu-west", IOT, "acme/iot/x* must not leave for eu-west: not there."),
        ("acme/*/a", "eu-west", IOT, "acme/*/a has no class in the policy"),
        ("acme/iot/m*", "eu-west", IOT, "acme/iot/m* is health data, and no rule lets that leave for eu-west."),
    ],
)  # fmt: skip
def test_each_way_to_fall_short_has_its_own_sentence(
    stream: str, to: str, changes: dict[str, Any], sentence: str
) -> None:
    answer = ask(policy(RULES), stream, to, **changes)
    assert not answer.allowed
    assert any(sentence in reason.sentence for reason in answer.reasons), list(map(str, answer.reasons))


@settings(max_examples=200, deadline=None)
@given(
    classes=st.lists(st.lists(PATTERNS, min_size=1, max_size=4), min_size=1, max_size=5),
    stream=st.tuples(*[st.text("ab", min_size=1, max_size=3)] * 3).map("/".join),
    denied=st.booleans(),
)
def test_a_stream_by_its_name_is_decided_as_the_pattern_that_is_this_name(
    classes: list[list[str]], stream: str, denied: bool
) -> None:
    """Names are looked up, patterns are searched for."""
    named = {f"c{number}": {"description": "x", "streams": found} for number, found in enumerate(classes)}
    deny = "[{name: stop, classes: [c0], because: audit under way}]"
    held = policy(f"classes: {json.dumps(named)}\ndeny: {deny if denied else []}\n")
    by_name, by_pattern = (
        decide(held, Question(asked, "us-east", "eu-west"), 0)
        for asked in (StreamName.parse(stream), NamePattern(stream))
    )
    assert by_name == by_pattern


def test_an_empty_policy_allows_nothing() -> None:
    answer = ask(policy(""), "acme/ops/a", **GOOD)
    assert not answer.allowed
    assert "has no class in the policy" in answer.reasons[0].sentence
    only_class = policy("classes: {all: {streams: ['*/*/*']}}")
    assert not ask(only_class, "acme/ops/a", **GOOD).allowed


def test_of_hundreds_of_reasons_a_sentence_has_the_first_few() -> None:
    classes = {f"c{number}": {"description": "x", "streams": ["acme/ops/*"]} for number in range(300)}
    answer = ask(policy(f"classes: {json.dumps(classes)}"), "acme/ops/a", **GOOD)
    assert len(answer.reasons) == 300
    assert answer.sentence.startswith(str(answer.reasons[0]))
    assert answer.sentence.endswith(f"And {300 - REASONS_TOLD} more.")
    assert answer.error().sentence == answer.sentence


def test_an_empty_destination_matches_nothing() -> None:
    nowhere = RULES.replace("to: {jurisdictions: [EU, US]}", "to: {}")
    assert not ask(policy(nowhere), "acme/ops/a", **GOOD).allowed


def test_deny_wins_over_a_rule_that_allows() -> None:
    text = RULES + "  - {name: stop, classes: [operational], because: audit under way}\n"
    answer = ask(policy(text), "acme/ops/a", **GOOD)
    assert (answer.allowed, answer.rule, answer.denied) == (False, "stop", True)


def test_a_policy_speaks_for_its_own_region_only() -> None:
    answer = ask(policy(RULES), "acme/ops/a", "eu-north", source="eu-west", **GOOD)
    assert answer.reasons[0].sentence == (
        "The policy of us-east does not speak for a crossing from eu-west to eu-north."
    )


def test_exports_do_not_let_anything_in_and_imports_nothing_out() -> None:
    assert not ask(policy(RULES), "acme/ops/a", "us-east", source="eu-west", **GOOD).allowed
    imports = policy(RULES.replace("exports:", "imports:").replace("    to:", "    from:").split("deny:")[0])
    assert ask(imports, "acme/ops/a", "us-east", source="eu-west", **GOOD).allowed
    assert not ask(imports, "acme/ops/a", **GOOD).allowed


def test_a_policy_holds_within_its_dates_only() -> None:
    dated = policy("valid_from: 2026-01-01\nvalid_until: 2027-01-01\n" + RULES)
    begin, end = 1_767_225_600_000, 1_798_761_600_000
    assert (
        "in force only from 2026-01-01T00:00:00Z"
        in ask(dated, "acme/ops/a", now=begin - 1, **GOOD).reasons[0].sentence
    )
    assert ask(dated, "acme/ops/a", now=begin, **GOOD).allowed
    assert ask(dated, "acme/ops/a", now=end - 1, **GOOD).allowed
    assert (
        "was valid until 2027-01-01T00:00:00Z"
        in ask(dated, "acme/ops/a", now=end, **GOOD).reasons[0].sentence
    )


# -------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RULES.replace("classes: [telemetry]", "classes: [telemetri]"), "p.yaml:25:15: exports[1].classes[0]: telemetri is not a class of this policy; did you mean telemetry?"),
        (RULES.replace("regions: [eu-west]}\n    bases", "regions: [eu-wset]}\n    bases"), "exports[1].to.regions[0]: eu-wset is not a region of this policy; did you mean eu-west?"),
        (RULES.replace("[EU, US]", "[UE]"), "UE is not a jurisdiction of this policy's regions"),
        (RULES.replace("name: iot", "name: ops"), "p.yaml:24:5: a second rule named ops; the first is on line 15."),
        (RULES.replace("bases: [not-personal]", "bases: []"), "exports[1].bases: expected at least 1 entries, found 0."),
        (RULES.replace("bases: [scc,", "bases: [ssc,"), "exports[0].bases[0]: expected one of adequacy"),
        (RULES.replace("lifetime: 90d", "lifetime: 90"), "'90' is not a duration"),
        (RULES.replace("    lifetime: 90d\n", ""), "exports[0]: the key lifetime is missing; expected a duration."),
        (RULES.replace("approvals: 2", "approvals: 9"), "exports[0].approvals"),
        (RULES.replace("approvals: 2", "approvals: 2\n    approvers: [dpo]"), "2 approvals are asked of 1 named approvers"),
        (RULES.replace("approvals: 2", "approvals: 2\n    approvers: [Dpo, ciso]"), "exports[0].approvers[0]"),
        (RULES.replace("do: drop", "do: keep"), "keep cannot be required"),
        (RULES.replace("fields: [tailnum]", "fields: [a..b]"), "'a..b' is not a field path"),
        (RULES.replace(", because: it is secret", ""), "deny[0]: the key because is missing; expected a text."),
        ("deny:\n  - {name: x, because: y}\n", "deny[0]: a deny rule names streams or classes."),
        ("regoins: {}\n", "p.yaml:10:1: regoins: unknown key 'regoins'; did you mean regions?"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_policy_says_where_it_is(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(text)
    assert expected in str(caught.value)


def test_a_country_is_a_code_and_norway_is_one() -> None:
    assert policy("").file.regions["eu-north"].country == "NO"
    with pytest.raises(ConfigError, match=r"p\.yaml:6:22"):
        parse_policy(HEAD.replace("country: US", "country: USA", 1), "p.yaml")


# ------------------------------------------------------------------------------------------------ signatures


def test_a_signed_policy_opens_to_the_text_that_was_signed() -> None:
    signed = sign_policy(example("residency.yaml"), KEY)
    opened = open_policy(SignedDocument.parse(signed.encode_file()), TRUSTED, "us-east")
    assert opened.text == (EXAMPLES / "residency.yaml").read_text()
    assert opened.hash == example("residency.yaml").hash


def test_an_edited_policy_is_refused_even_where_only_a_comment_changed() -> None:
    data = sign_policy(policy(RULES + "# as agreed\n"), KEY).encode_file()
    with pytest.raises(SignatureError, match="does not hold"):
        open_policy(SignedDocument.parse(data.replace(b"as agreed", b"as Agreed")), TRUSTED, "p")


def test_a_region_cannot_sign_the_policy_of_another() -> None:
    eu = sign_policy(policy(RULES), KEY)
    trusted = {"eu-west": TRUSTED["us-east"]}
    moved = SignedDocument(eu.purpose, "eu-west", eu.key, eu.body, eu.signature)
    with pytest.raises(SignatureError, match="The policy is for us-east, but eu-west signed it"):
        open_policy(moved, trusted, "p")


HIDDEN = {
    "a line that ends in a comment": ("# Reviewed.\u2028valid_until: 2099-01-01\n", "\\u2028"),
    "the same, as in IBM's text": ("# Reviewed.\x85valid_until: 2099-01-01\n", "\\x85"),
    "a paragraph": ("# Reviewed.\u2029valid_until: 2099-01-01\n", "\\u2029"),
    "a carriage return": ("# Reviewed.\rvalid_until: 2099-01-01\n", "\\r"),
    "a turned direction": ("# \u202egnihtyna\n", "\\u202e"),
    "a joiner in a text": ("classes: {ops: {streams: [acme/ops/*], description: a\u200bb}}\n", "\\u200b"),
    "marks that cover other lines": ("# a" + 9 * "\u0335" + "\n", "\\u0335"),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_a_policy_with_what_an_editor_does_not_show_is_not_signed(what: str) -> None:
    """In YAML 1.1 the line ends there, and the comment with it; in 1.2 it does not. What stands in a log is read as it was."""
    text, told = HIDDEN[what]
    hidden = policy(text)
    with pytest.raises(ResidencyError, match="Line 10 of the policy of us-east") as caught:
        sign_policy(hidden, KEY)
    assert caught.value.code is Code.CONFIG_INVALID and f" {told}:" in caught.value.sentence
    document = sign(Purpose.POLICY, "us-east", hidden.text.encode(), KEY)
    assert open_policy(document, TRUSTED, "a log").text == hidden.text
    sign_policy(policy("# Reviewed,\tby all.\r\ndeny: []\n"), KEY)


def test_an_older_revision_cannot_take_the_place_of_a_newer_one() -> None:
    current = policy(RULES)
    check_successor(current, current)
    check_successor(current, parse_policy(current.text.replace("revision: 3", "revision: 4"), "p"))
    for same_or_older in ("revision: 2", "revision: 3 "):
        with pytest.raises(ResidencyError, match="the one in force has revision 3"):
            check_successor(current, parse_policy(current.text.replace("revision: 3", same_or_older), "p"))
    with pytest.raises(ResidencyError, match="this region is us-east"):
        check_successor(current, example("residency-eu-west.yaml"))
