"""Contexts that no two meanings share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.context import bind, purpose_prefix

PURPOSES = st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True)
PARTS = st.lists(st.binary(max_size=12), max_size=4)


def test_the_layout_is_the_documented_one() -> None:
    assert purpose_prefix("receipt") == b"felix/receipt/1\0"
    assert bind("x", b"ab", "é", 7) == (
        b"felix/x/1\0\0\0\0\x02ab\0\0\0\x02\xc3\xa9\0\0\0\x08" + (7).to_bytes(8, "big")
    )


@given(PURPOSES, PARTS, PURPOSES, PARTS)
def test_different_parts_or_purposes_never_give_the_same_bytes(
    purpose: str, parts: list[bytes], other: str, others: list[bytes]
) -> None:
    same = (purpose, parts) == (other, others)
    assert (bind(purpose, *parts) == bind(other, *others)) == same


@given(st.lists(st.binary(max_size=5), min_size=2, max_size=3))
def test_moving_a_byte_between_parts_changes_the_context(parts: list[bytes]) -> None:
    joined = b"".join(parts)
    assert bind("x", joined) != bind("x", *parts)


@pytest.mark.parametrize("purpose", ["", "Receipt", "a/b", "a\0", "1a", "a" * 33])
def test_a_purpose_is_a_short_word(purpose: str) -> None:
    with pytest.raises(AssertionError):
        purpose_prefix(purpose)
