"""A region forbids thousands of streams that never crossed: what a report compares with an arrival is what was said about it."""

from __future__ import annotations

from attacks.chance import properties
from attacks.conftest import Tally
from audit_log import REGION_ORIGIN
from hypothesis import given
from hypothesis import strategies as st

from audit.agreement import Stop
from audit.spark.stops import Words, key_of
from felix.names import NamePattern, StreamName

WORDS = 10_000
GRANT = "g-aaaaaaaaaaaaaaaa"


def denied(streams: str, peer: str = "") -> Stop:
    return Stop(0, "denied", "", streams, peer, 0, None)


def paused(grant: str) -> Stop:
    return Stop(0, "paused", grant, "", "", 0, None)


def test_an_arrival_is_compared_with_the_words_about_it_alone(tally: Tally) -> None:
    about = (denied("acme/ops/*"), denied("acme/ops/departures", "eu-west"), paused(GRANT))
    others = [denied(f"acme/x/s{number}") for number in range(WORDS)]
    others += [paused(f"g-{number}") for number in range(WORDS)]
    others.append(denied("acme/ops/departures", "ap-south"))
    words = Words({REGION_ORIGIN: (*others, *about)})
    place = ("us-east", "eu-west", "acme/ops/departures", GRANT)
    assert sorted(words.keys(*place)) == sorted(map(key_of, about))
    assert words.keys("us-east", "eu-west", "acme/y/departures", "g-none") == []
    assert words.keys("eu-west", "us-east", "acme/ops/departures", GRANT) == []
    tally("words about other streams", len(others))


def test_a_leaf_that_names_nothing_or_no_stream_is_about_nothing(tally: Tally) -> None:
    words = Words({REGION_ORIGIN: (denied("*/*/*"), paused(GRANT))})
    for stream in (None, "", "acme", "a/b/c/d", "acme/ops/*", "\x00/b/c", "acme//x"):
        assert words.keys("us-east", "eu-west", stream, None) == []
        assert words.keys(None, None, stream, GRANT) == []
        assert words.keys("us-east", None, stream, GRANT) == [GRANT]
        tally("leaves that name no stream", 1)


_PART = st.sampled_from(["a", "ab", "abc", "b"])
_PATTERN = st.tuples(*[st.one_of(_PART, st.just("*"), _PART.map(lambda part: f"{part}*"))] * 3).map("/".join)


@properties
@given(
    st.lists(st.tuples(_PATTERN, st.sampled_from(["", "eu-west", "ap-south"]))),
    st.tuples(_PART, _PART, _PART),
)
def test_a_key_is_found_where_the_pattern_fits(
    entries: list[tuple[str, str]], parts: tuple[str, ...]
) -> None:
    name = "/".join(parts)
    words = Words({REGION_ORIGIN: tuple(denied(*entry) for entry in entries)})
    fit = {
        key_of(denied(pattern, peer))
        for pattern, peer in entries
        if NamePattern(pattern).matches(StreamName.parse(name)) and peer in ("", "eu-west")
    }
    found = words.keys("us-east", "eu-west", name, "")
    assert set(found) == fit and len(found) == len(fit)
