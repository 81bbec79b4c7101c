"""Names: what is accepted comes back as it was written, everything else is refused with a sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.errors import Code, RequestError
from felix.names import NamePattern, SpiffeId, StreamName, parse_region, shard_for_key

PART = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)


@given(PART, PART, PART)
def test_a_stream_name_parses_back_to_itself(tenant: str, namespace: str, name: str) -> None:
    parsed = StreamName.parse(f"{tenant}/{namespace}/{name}")
    assert parsed == StreamName(tenant, namespace, name)
    assert StreamName.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a/b",
        "a/b/c/d",
        "A/b/c",
        "a//c",
        "-a/b/c",
        "a/b/c\n",
        "a/b/" + "c" * 64,
        "a/b/ü",
        "../b/c",
        "a/b/*",
    ],
)
def test_what_is_no_stream_name_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        StreamName.parse(text)
    assert refused.value.code is Code.NAME_INVALID
    assert "expected" in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("acme/payments/*", "acme/payments/orders", True),
        ("acme/payments/*", "acme/paymentsx/orders", False),
        ("acme/*/orders", "acme/web/orders", True),
        ("acme/pay*/orders", "acme/payments/orders", True),
        ("acme/payments/orders", "acme/payments/orders", True),
        ("acme/payments/orders", "acme/payments/orders2", False),
        ("*/*/*", "any/thing/atall", True),
        ("acme/*/*", "acme2/a/b", False),
    ],
)
def test_patterns(pattern: str, name: str, matches: bool) -> None:
    assert NamePattern(pattern).matches(StreamName.parse(name)) is matches


@pytest.mark.parametrize("text", ["*", "a/*", "a/**/c", "a/*b/c", "a/b/c/d", "A/*/*"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        NamePattern(text)


@given(PART)
def test_identities_parse_back(name: str) -> None:
    identity = SpiffeId("us-east", "acme", "client", name)
    assert SpiffeId.parse(str(identity)) == identity


@pytest.mark.parametrize(
    "text",
    [
        "spiffe://us-east/client/a", "spiffe://us-east.acme/root/a", "http://us-east.acme/client/a",
        "spiffe://us-east.acme/client/a/b", "spiffe://us-east.acme/client/", "spiffe://us-east.acme.x/client/a",
    ],
)  # fmt: skip
def test_what_is_no_identity_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        SpiffeId.parse(text)


@pytest.mark.parametrize("text", ["us-east", "a", "eu-west-1"])
def test_regions(text: str) -> None:
    assert parse_region(text) == text


@pytest.mark.parametrize("text", ["", "-a", "a-", "US", "a.b", "a" * 64])
def test_what_is_no_region_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_region(text)


def test_the_shard_of_a_key_is_part_of_the_protocol() -> None:
    # XXH3-64, seed 0 (its own vector: the empty input gives 2d06800538d394c2). A change breaks every client.
    assert [shard_for_key(key, 16) for key in (b"", b"7", b"orders", bytes(64))] == [2, 10, 11, 14]
