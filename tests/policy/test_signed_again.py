"""Which accepted truncations and resends are signed again for a grant, and for which grant where theirs has ended."""

from __future__ import annotations

from itertools import permutations

from departures import DAY, terms
from msgspec.structs import replace

from policy.grant import Standing, StandingAction
from policy.signed_again import accepted_by, carried_by, words_again
from policy.terms import GrantTerms
from policy.truncation import Truncation

OWN = bytes(range(16))
STREAM = "acme/ops/departures"
BEFORE, NOW = "g-" + "a" * 16, "g-" + "b" * 16
TERMS = terms(not_before=DAY)


def word(at: int, offset: int = 5, grant: str = BEFORE, ended: bytes = OWN, **changes: object) -> Standing:
    cut = Truncation(stream=STREAM, shard=0, incarnation=ended.hex(), epoch=7, offset=offset)
    made = Standing(
        grant=grant,
        action=StandingAction.ACCEPT_TRUNCATION,
        region=TERMS.from_region,
        sequence=1,
        at=at,
        by="alice",
        truncation=cut,
    )
    return replace(made, **changes)


def pattern_of(stream: str) -> GrantTerms:
    return terms(not_before=DAY, stream=stream, destination_stream=stream, wildcard=True)


def test_what_was_accepted_under_a_grant_that_has_ended_is_said_again_of_the_one_that_carries_its_link() -> (
    None
):
    grants = {BEFORE: TERMS, NOW: replace(TERMS, purpose="renewed")}
    one, resend = word(10), word(20, 0, action=StandingAction.RESEND)
    for words in permutations((resend, one)):
        assert words_again(NOW, grants, words) == [
            (replace(one, grant=NOW), BEFORE),
            (replace(resend, grant=NOW), BEFORE),
        ]
        again = [accepted_by(each).incarnation for each, _ in words_again(NOW, grants, words)]
        assert again == [accepted_by(one).incarnation, accepted_by(resend).incarnation], "the same begin"


def test_all_that_end_one_incarnation_are_and_one_that_was_signed_again_before_is_once() -> None:
    grants = {BEFORE: TERMS, NOW: TERMS}
    first, second = word(10), word(20, 9)
    again = words_again(NOW, grants, [second, word(10, grant=NOW), first])
    assert [each for each, _ in again] == [replace(first, grant=NOW), replace(second, grant=NOW)]
    left = words_again(NOW, grants, [first, second], {accepted_by(first).incarnation})
    assert [each for each, _ in left] == [replace(second, grant=NOW)]


def test_of_another_link_another_region_or_terms_that_are_not_known_nothing_is_said_again() -> None:
    for other in (
        replace(TERMS, destination_stream="acme/ops/arrivals"),
        replace(TERMS, to_region="ap-south"),
        replace(TERMS, stream="acme/ops/arrivals"),
    ):
        assert not words_again(NOW, {BEFORE: other, NOW: TERMS}, [word(10)])
        assert not words_again(NOW, {BEFORE: TERMS, NOW: other}, [word(10)])
        assert not carried_by(BEFORE, {BEFORE: TERMS, NOW: other}, [word(10)])
    assert not words_again(NOW, {NOW: TERMS}, [word(10)])
    assert not words_again(NOW, {BEFORE: TERMS, NOW: TERMS}, [word(10, region=TERMS.to_region)])


def test_a_pattern_and_one_name_are_of_one_link_where_the_stream_arrives_as_the_same() -> None:
    pattern, one = pattern_of("acme/ops/*"), terms(not_before=DAY, destination_stream=STREAM)
    for before, now in permutations((pattern, one)):
        grants = {BEFORE: before, NOW: now}
        assert [each.grant for each, _ in words_again(NOW, grants, [word(10)])] == [NOW]
        assert carried_by(BEFORE, grants, [word(10)]) == [NOW]
    renamed = {BEFORE: pattern, NOW: replace(one, destination_stream="acme/ops/arrivals")}
    assert not words_again(NOW, renamed, [word(10)]) and not carried_by(BEFORE, renamed, [word(10)])
    # Of a pattern under which nothing was accepted, one of the same name.
    assert carried_by(BEFORE, {BEFORE: pattern, NOW: replace(pattern, purpose="renewed")}, []) == [NOW]
    assert not carried_by(BEFORE, {BEFORE: pattern, NOW: one}, [])
