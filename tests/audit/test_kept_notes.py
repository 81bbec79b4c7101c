"""Which cosigned checkpoints are kept (audit.kept_notes)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.kept_notes import Cosigned, keep, least, party_of
from audit.note import Algorithm

PARTIES = "abcdef"


def note(size: int, who: str) -> Cosigned[str]:
    """Cosigned by these; a capital letter with an ML-DSA-44 key."""
    by = frozenset(
        (each.lower(), Algorithm.ML_DSA_44 if each.isupper() else Algorithm.COSIGNATURE) for each in who
    )
    return Cosigned(size, by, f"{size} {who}")


def shown(kept: list[Cosigned[str]]) -> list[str]:
    return [each.note for each in kept]


some_notes = st.lists(
    st.builds(note, st.integers(1, 30), st.text(PARTIES + PARTIES.upper(), max_size=6)), max_size=20
)


@given(some_notes, st.randoms())
def test_no_set_of_parties_loses_its_largest_note_and_the_order_makes_no_difference(
    found: list[Cosigned[str]], random: Random
) -> None:
    kept = keep(found, 64)
    for each in found:
        if each.by:
            assert any(other.size >= each.size and other.by >= each.by for other in kept)
    other = list(found)
    random.shuffle(other)
    assert {(each.size, each.by) for each in keep(other, 64)} == {(each.size, each.by) for each in kept}
    one_by_one = list[Cosigned[str]]()
    for each in other:
        one_by_one = keep((*one_by_one, each), 64)
    assert {(each.size, each.by) for each in one_by_one} == {(each.size, each.by) for each in kept}


def test_a_newer_note_of_one_party_stands_for_its_own_alone() -> None:
    assert shown(keep([note(5, "ab"), note(9, "c"), note(7, "c"), note(4, "b"), note(8, "")], 64)) == [
        "9 c", "5 ab",
    ]  # fmt: skip


def test_a_note_without_the_ml_dsa_line_does_not_stand_for_one_with_it() -> None:
    assert shown(keep([note(5, "aA"), note(9, "a")], 64)) == ["9 a", "5 aA"]


@given(some_notes, some_notes)
def test_what_is_not_whole_takes_no_place_of_what_is(
    whole: list[Cosigned[str]], others: list[Cosigned[str]]
) -> None:
    partial = [replace(each, is_whole=False) for each in others]
    for at_most in (4, 64):
        kept = keep((*partial, *whole), at_most)
        assert [each for each in kept if each.is_whole] == keep(whole, at_most)
        assert len(kept) <= at_most and kept == sorted(kept, key=lambda each: -each.size)
    for each in partial:
        assert not each.by or any(other.size >= each.size and other.by >= each.by for other in kept)


def test_six_parties_have_room_for_all_of_their_sets() -> None:
    sets = [who for n in range(1, 7) for who in itertools.combinations(PARTIES, n)]
    found = [note(100 - at, "".join(who)) for at, who in enumerate(sets)]
    assert len(keep(found, 64)) == 63


def test_beyond_the_room_goes_what_the_fewest_cosigned_and_never_the_newest_of_a_party() -> None:
    found = [note(9, "a"), note(8, "ab"), note(7, "bc"), note(6, "ac"), note(5, "abc"), note(4, "abcd")]
    assert shown(keep(found, 5)) == ["9 a", "8 ab", "7 bc", "5 abc", "4 abcd"]
    gone = least(keep([note(9, "a"), note(8, "b")], 64))
    assert gone is None, "each is the newest of a party"
    assert shown(keep([note(9, "a"), note(8, "b"), note(7, "c")], 2)) == ["9 a", "8 b"]


@pytest.mark.parametrize(
    ("name", "party"),
    [
        ("ap-south.acme/witness", "ap-south.acme"),
        ("ap-south.acme/bridge/b/w12", "ap-south.acme"),
        ("witness.example/w1", "witness.example/w1"),
        ("witness.example/w2", "witness.example/w2"),
        ("acme/w", "acme/w"),
        (".acme/w", ".acme/w"),
        ("a.b.acme/w", "a.b.acme/w"),
        ("ap-south.acme", "ap-south.acme"),
    ],
)
def test_a_region_is_one_party_under_all_of_its_names(name: str, party: str) -> None:
    assert party_of(name, "us-east.acme/bridge/us-to-eu") == party
