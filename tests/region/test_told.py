"""What is wrong is told as far as an answer has room for it."""

from __future__ import annotations

import msgspec

from felix.frames import CONTROL_BYTES_MAX
from felix.messages import RegionState
from region.session.told import SENTENCE_MAX, TOLD_BYTES_MAX, told

SHORT = [f"{number} is wrong." for number in range(100)]


def test_what_there_is_room_for_is_told_as_it_is() -> None:
    assert told([]) == [] and told(SHORT) == SHORT and told(["x" * SENTENCE_MAX]) == ["x" * SENTENCE_MAX]


def test_a_long_sentence_is_cut_and_keeps_no_other_from_being_told() -> None:
    assert told(["x" * 100_000, *SHORT]) == ["x" * (SENTENCE_MAX - 1) + "…", *SHORT]


def test_of_too_many_the_first_are_told_and_how_many_are_left() -> None:
    for letter in "xé😀":
        many = [letter * SENTENCE_MAX for _ in range(1_000)]
        found = told(many)
        assert found[:-1] == many[: len(found) - 1] and len(found) > 5
        assert found[-1] == f"{1_000 - len(found) + 1:,} more are not told here."
        assert sum(len(each.encode(errors="replace")) for each in found[:-1]) <= TOLD_BYTES_MAX


def test_an_answer_with_all_of_it_is_decoded() -> None:
    found = told(["\x1b" * SENTENCE_MAX for _ in range(1_000)])
    state = RegionState("r", "m", "b", 1, {}, "", 0, alarms=[*found, *found], remarks=found)
    data = msgspec.msgpack.encode(state)
    assert msgspec.msgpack.decode(data, type=RegionState) == state
    assert 2 * TOLD_BYTES_MAX < len(data) < CONTROL_BYTES_MAX * 2 // 3
