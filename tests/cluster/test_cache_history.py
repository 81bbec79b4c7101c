"""The judge of a cache takes a history in which nothing went wrong, and refuses each of these by the name of the rule."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from cluster.cache_history import RULES, CacheHistory, Got, Swap

KEY = "k"


def good() -> CacheHistory:
    """a, b and c are stored one after the other, each over the one before, under 1, 4 and 9; d is refused beside b. Each is found before the next one."""
    history = CacheHistory()
    for number, (version, expected) in enumerate(((1, 0), (4, 1), (9, 4))):
        at = 10.0 * number
        history.got.append(Got(KEY, at, at + 1, expected, b"" if not number else b"abc"[number - 1 : number]))
        history.swaps.append(Swap(KEY, at + 2, at + 3, expected, b"abc"[number : number + 1], version))
    history.swaps.append(Swap(KEY, 12.5, 14.0, 1, b"d", None))
    history.got.append(Got(KEY, 40.0, 41.0, 9, b"c"))
    return history


BAD: dict[str, tuple[str, Callable[[CacheHistory], object]]] = {}


def bad(rule: str) -> Callable[[Callable[[CacheHistory], object]], Callable[[CacheHistory], object]]:
    def named(spoil: Callable[[CacheHistory], object]) -> Callable[[CacheHistory], object]:
        BAD[spoil.__name__] = (rule, spoil)
        return spoil

    return named


@bad("invented")
def what_nobody_wrote_is_found(history: CacheHistory) -> None:
    history.got.append(Got(KEY, 50.0, 51.0, 12, b"e"))


@bad("invented")
def what_was_refused_is_found(history: CacheHistory) -> None:
    history.got.append(Got(KEY, 50.0, 51.0, 12, b"d"))


@bad("two values")
def two_brokers_store_under_one_version(history: CacheHistory) -> None:
    history.swaps.append(Swap(KEY, 22.0, 23.5, 4, b"e", 9))


@bad("written twice")
def what_was_asked_again_is_stored_again(history: CacheHistory) -> None:
    history.got.append(Got(KEY, 50.0, 51.0, 12, b"c"))


@bad("forked")
def two_are_stored_over_one(history: CacheHistory) -> None:
    history.swaps[3] = history.swaps[3]._replace(version=6)


@bad("not compared")
def something_is_stored_over_what_is_gone(history: CacheHistory) -> None:
    history.swaps.append(Swap(KEY, 42.0, 43.0, 4, b"e", 12))


@bad("not compared")
def something_is_stored_below_what_it_was_compared_with(history: CacheHistory) -> None:
    history.swaps.append(Swap(KEY, 2.5, 43.0, 30, b"e", 12))


@bad("goes back")
def an_old_leader_answers_a_get(history: CacheHistory) -> None:
    history.got.append(Got(KEY, 24.0, 25.0, 4, b"b"))


@bad("goes back")
def what_was_stored_is_lost(history: CacheHistory) -> None:
    history.got[-1] = Got(KEY, 40.0, 41.0, 4, b"b")


@bad("goes back")
def a_key_is_gone(history: CacheHistory) -> None:
    history.got.append(Got(KEY, 50.0, 51.0, 0, b""))


@bad("goes back")
def a_get_finds_less_than_the_one_before(history: CacheHistory) -> None:
    """The write has no answer yet."""
    history.swaps.append(Swap(KEY, 42.0, math.inf, 9, b"e", 0))
    history.got += [Got(KEY, 43.0, 44.0, 12, b"e"), Got(KEY, 45.0, 46.0, 9, b"c")]


@bad("goes back")
def something_is_stored_before_what_was_told(history: CacheHistory) -> None:
    history.swaps[1] = Swap(KEY, 32.0, 33.0, 1, b"b", 4)


@bad("refused in vain")
def nothing_else_stood_there(history: CacheHistory) -> None:
    history.swaps.append(Swap(KEY, 42.0, 43.0, 9, b"e", None))


@bad("refused in vain")
def the_first_write_is_refused(history: CacheHistory) -> None:
    history.swaps.append(Swap(KEY, 0.0, 1.0, 0, b"e", None))


def test_a_history_in_which_nothing_went_wrong_is_taken() -> None:
    good().check()


def test_what_was_never_answered_may_be_stored_or_not() -> None:
    history = good()
    history.swaps.append(Swap(KEY, 42.0, math.inf, 9, b"e", 0))
    history.check()
    history.swaps.append(Swap(KEY, 44.0, 45.0, 9, b"f", None))
    history.check()
    history.got.append(Got(KEY, 46.0, 47.0, 12, b"e"))
    history.check()


def test_what_runs_at_the_same_time_may_be_found_or_not() -> None:
    history = good()
    history.got += [Got(KEY, 22.5, 23.5, 4, b"b"), Got(KEY, 22.6, 23.4, 9, b"c")]
    history.check()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_refused_by_name(name: str) -> None:
    rule, spoil = BAD[name]
    history = good()
    spoil(history)
    with pytest.raises(AssertionError) as told:
        history.check()
    assert rule in [line.split(":")[0] for line in str(told.value).splitlines()]


def test_every_rule_has_a_history_that_breaks_it() -> None:
    assert {rule for rule, _ in BAD.values()} == set(RULES)
