from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.names import NamePattern, StreamName
from policy.pattern import PatternSet, covers, overlap

_part = st.sampled_from(["a", "ab", "abc", "b", "*", "a*", "ab*", "b*"])
_pattern = st.tuples(_part, _part, _part).map("/".join).map(NamePattern)
_names = [
    StreamName(x, y, z)
    for x in ("a", "ab", "abc", "b", "c")
    for y in ("ab", "b")
    for z in ("a", "ab", "b", "c")
]


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("acme/*/*", "acme/ops/*", True),
        ("acme/ops/*", "acme/ops/crew", True),
        ("acme/ops/crew", "acme/ops/*", False),
        ("acme/ops/c*", "acme/ops/crew*", True),
        ("acme/ops/crew*", "acme/ops/c*", False),
        ("acme/ops/crew", "acme/ops/crew", True),
    ],
)
def test_covering(wide: str, narrow: str, expected: bool) -> None:
    assert covers(NamePattern(wide), NamePattern(narrow)) is expected


@given(_pattern, _pattern)
def test_covering_and_overlapping_agree_with_what_the_patterns_match(
    one: NamePattern, other: NamePattern
) -> None:
    both = [name for name in _names if one.matches(name) and other.matches(name)]
    if covers(one, other):
        assert all(one.matches(name) for name in _names if other.matches(name))
    if both:
        assert overlap(one, other)
    if not overlap(one, other):
        assert not both
    assert overlap(one, other) == overlap(other, one)


@given(st.lists(_pattern, max_size=6))
def test_a_set_of_patterns_matches_what_one_of_them_does(patterns: list[NamePattern]) -> None:
    held = PatternSet()
    for pattern in patterns:
        held.add(pattern)
    for name in _names:
        assert held.matches(name) is any(pattern.matches(name) for pattern in patterns)
