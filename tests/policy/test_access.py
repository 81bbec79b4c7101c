from __future__ import annotations

import pytest

from felix.errors import Code, RequestError
from felix.names import SpiffeId, StreamName
from policy.access import (
    RIGHTS_PER_IDENTITY_MAX,
    Right,
    Rights,
    Verb,
    allowed,
    not_found_or_forbidden,
    parse_rights,
)

ORDERS = SpiffeId.parse("spiffe://us-east.acme/client/orders-svc")
OTHER = SpiffeId.parse("spiffe://us-east.acme/client/other")


@pytest.mark.parametrize(
    ("right", "verb", "name", "expected"),
    [
        ("publish acme/payments/*", Verb.PUBLISH, "acme/payments/orders", True),
        ("publish acme/payments/*", Verb.SUBSCRIBE, "acme/payments/orders", False),
        ("publish acme/payments/*", Verb.PUBLISH, "acme/ops/orders", False),
        ("publish acme/payments/*", Verb.PUBLISH, "acmee/payments/orders", False),
        ("bridge-read acme/ops/departures", Verb.BRIDGE_READ, "acme/ops/departures", True),
        ("bridge-read acme/ops/departures", Verb.BRIDGE_READ, "acme/ops/departures2", False),
        ("admin acme/*/*", Verb.PUBLISH, "acme/ops/x", False),
        ("publish,subscribe acme/ops/*", Verb.SUBSCRIBE, "acme/ops/x", True),
        ("publish, subscribe acme/ops/*", Verb.PUBLISH, "acme/ops/x", True),
    ],
)
def test_a_right_allows_its_verbs_on_its_names_only(
    right: str, verb: Verb, name: str, expected: bool
) -> None:
    rights = Rights().granting(ORDERS, parse_rights(right))
    assert rights.allows(ORDERS, verb, StreamName.parse(name)) is expected
    assert not rights.allows(OTHER, verb, StreamName.parse(name))


def test_emptiness_refuses() -> None:
    for verb in Verb:
        assert not Rights().allows(ORDERS, verb, StreamName.parse("acme/ops/x"))
        assert not allowed((), verb, StreamName.parse("acme/ops/x"))


def test_rights_are_given_and_taken_as_new_tables() -> None:
    both = Rights().granting(ORDERS, parse_rights("publish,subscribe acme/ops/*"))
    less = both.revoking(ORDERS, parse_rights("publish acme/ops/*"))
    name = StreamName.parse("acme/ops/x")
    assert both.allows(ORDERS, Verb.PUBLISH, name)
    assert not less.allows(ORDERS, Verb.PUBLISH, name)
    assert less.allows(ORDERS, Verb.SUBSCRIBE, name)
    assert both.revoking(ORDERS).by_identity == {}


def test_a_table_survives_being_stored() -> None:
    rights = Rights().granting(ORDERS, parse_rights("publish,subscribe acme/ops/*"))
    stored = rights.encode()
    assert stored == {str(ORDERS): ["publish acme/ops/*", "subscribe acme/ops/*"]}
    assert Rights.decode(stored).encode() == stored


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("publsh acme/ops/*", "did you mean publish?"),
        ("publish", "expected a verb and a name pattern"),
        ("publish acme/ops", "expected tenant/namespace/name"),
        ("publish, acme/ops/*", "'' is not a verb"),
        ("", "expected a verb and a name pattern"),
        ("publish acme/ops/* more", "expected a verb and a name pattern"),
        ("publish " + "a" * 5000, "expected a verb and a name pattern"),
    ],
)
def test_a_right_that_cannot_be_read_says_why(text: str, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_rights(text)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_too_many_rights_are_refused() -> None:
    many = [
        Right(Verb.PUBLISH, parse_rights(f"publish acme/ops/n{i}")[0].pattern)
        for i in range(RIGHTS_PER_IDENTITY_MAX + 1)
    ]
    with pytest.raises(RequestError, match="257 rights; 256 are allowed"):
        Rights().granting(ORDERS, many)


def test_unknown_and_forbidden_are_one_answer() -> None:
    error = not_found_or_forbidden(Verb.SUBSCRIBE, StreamName.parse("acme/ops/crew"))
    assert error.code is Code.NOT_FOUND_OR_FORBIDDEN
    assert str(error) == (
        "There is no stream acme/ops/crew that this identity may use with subscribe. "
        "Check the name, or ask the region's operator for the right."
    )
