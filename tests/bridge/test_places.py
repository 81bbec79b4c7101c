"""Places are shared out among the patterns that grants name, and among the streams of a pattern."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bridge.places import Place, Places, Turns


def given_of(asked: list[Place]) -> list[Place]:
    return [place for place in asked if place.given.is_set()]


def test_a_pattern_that_has_none_comes_before_the_second_of_another() -> None:
    places = Places(2)
    asked = [places.ask("a", f"s{number}") for number in range(4)]
    alone = places.ask("b", "s")
    assert given_of([*asked, alone]) == asked[:2]
    places.leave(asked[0])
    assert alone.given.is_set() and not asked[2].given.is_set()
    places.leave(alone)
    assert asked[2].given.is_set()


def test_streams_of_a_pattern_take_turns_and_links_of_a_stream_keep_their_order() -> None:
    places = Places(1)
    held = places.ask("g", "x")
    many = [places.ask("g", "x") for _ in range(3)]
    other = places.ask("g", "y")
    order = []
    for _ in range(4):
        places.leave(held)
        (held,) = [place for place in (*many, other) if place.given.is_set() and place not in order]
        order.append(held)
    assert order == [many[0], other, many[1], many[2]]


def test_who_waits_no_more_is_passed_by() -> None:
    places = Places(1)
    held, gone, next_ = (places.ask("g", "x") for _ in range(3))
    places.leave(gone)
    places.leave(held)
    assert (gone.given.is_set(), next_.given.is_set()) == (False, True)


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 5)), max_size=60),
)
def test_so_many_at_once_and_nobody_waits_beside_a_free_one(
    count: int, steps: list[tuple[int, int, int]]
) -> None:
    places, here, seen = Places(count), list[Place](), list[Place]()
    turns: dict[str, list[str]] = {}
    """since a pattern that has none has been waiting: the others that were given one"""
    for pattern, stream, leaves in steps:
        if leaves > 2 and here:
            places.leave(here.pop(leaves % len(here)))
        else:
            here.append(places.ask(f"p{pattern}", f"s{stream}"))
        given, waiting = given_of(here), [place for place in here if not place.given.is_set()]
        assert len(given) == min(count, len(here))
        of_stream: dict[tuple[str, str], list[bool]] = {}
        for place in here:
            of_stream.setdefault((place.pattern, place.stream), []).append(place.given.is_set())
        assert all(before >= after for held in of_stream.values() for before, after in pairwise(held))
        new = [place.pattern for place in given if place not in seen]
        seen += [place for place in given if place not in seen]
        lacking = {place.pattern for place in waiting} - {place.pattern for place in given}
        turns = {each: [*turns.get(each, ()), *(new if each in turns else ())] for each in lacking}
        assert all(max(Counter(held).values(), default=0) <= 1 for held in turns.values())


async def test_however_many_take_turns_the_loop_goes_on_after_one_share_of_work() -> None:
    """Each batch is worked on within a share, so nobody gives way in between; all of them together would hold the loop."""
    turns, shares, iterations = Turns(4.0), list[int](), 0

    async def work(number: int) -> None:
        for _ in range(5):
            place = turns.ask(f"p{number % 3}", f"s{number}")
            await place.given.wait()
            shares.append(iterations)
            turns.leave(place, 1.0)

    async def beside() -> None:
        nonlocal iterations
        while True:
            await asyncio.sleep(0)
            iterations += 1

    other = asyncio.ensure_future(beside())
    await asyncio.gather(*(work(number) for number in range(40)))
    other.cancel()
    assert len(shares) == 200 and max(Counter(shares).values()) <= 5


async def test_who_waits_for_a_turn_no_more_is_passed_by_and_a_turn_that_was_left_is_given_once() -> None:
    turns = Turns(1.0)
    first, gone, second = (turns.ask("p", "s") for _ in range(3))
    turns.leave(gone, 0.0)
    turns.leave(first, 2.0)
    assert not second.given.is_set(), "the loop goes on first"
    await asyncio.sleep(0)
    assert second.given.is_set() and not gone.given.is_set()
    turns.leave(second, 0.5)
    assert turns.ask("q", "s").given.is_set()
