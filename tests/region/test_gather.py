"""One answer for the parts of a call: once, after the last part, with the first error."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from felix.errors import FelixError
from region.gather import Done, Gather, awaited, resolving


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_answer_comes_once_after_the_last_part(order: tuple[int, ...]) -> None:
    answers: list[FelixError | None] = []
    gather = Gather(answers.append)
    parts = [gather.part() for _ in order]
    # The first is answered while others are still being asked for.
    parts[order[0]](None)
    gather.asked()
    for at in order[1:]:
        assert not answers
        parts[at](None)
    assert answers == [None]


def test_parts_that_are_done_at_once_do_not_answer_before_all_were_asked_for() -> None:
    answers: list[FelixError | None] = []
    gather = Gather(answers.append)
    gather.part()(None)
    gather.part()(None)
    assert not answers
    gather.asked()
    assert answers == [None]


def test_without_parts_the_answer_comes_when_all_were_asked_for() -> None:
    answers: list[FelixError | None] = []
    Gather(answers.append).asked()
    assert answers == [None]


def test_of_several_errors_the_first_is_told() -> None:
    answers: list[FelixError | None] = []
    gather = Gather(answers.append)
    first, second, third = FelixError("first"), FelixError("second"), gather.part()
    gather.part()(first)
    gather.part()(second)
    gather.asked()
    third(None)
    assert answers == [first]


async def test_what_is_awaited_is_raised_or_returns() -> None:
    await awaited(lambda done: done(None))
    held: list[Done] = []
    waiting = asyncio.ensure_future(awaited(held.append))
    await asyncio.sleep(0)
    held[0](FelixError("no room"))
    with pytest.raises(FelixError, match="no room"):
        await waiting


async def test_an_answer_for_somebody_who_is_gone_is_dropped() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done = resolving(future)
    future.cancel()
    done(None)
    done(FelixError("late"))
    assert future.cancelled()
