"""FairScheduler: a tenant with much to do delays another by one turn at most; places come back whatever happens to who waited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from region.limits.budget import Budget
from region.scheduler import TURNS_AT_ONCE, FairScheduler, Gate, Rotation


@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_a_tenant_is_passed_at_most_once_by_each_other(arrivals: list[str]) -> None:
    rotation: Rotation[tuple[str, int]] = Rotation()
    for number, tenant in enumerate(arrivals):
        rotation.put(tenant, (tenant, number))
    order = [rotation.take() for _ in range(len(rotation))]
    assert not rotation
    assert sorted(order, key=lambda item: item[1]) == list(zip(arrivals, range(len(arrivals)), strict=True))
    for tenant in "abc":
        own = [number for name, number in order if name == tenant]
        assert own == sorted(own), "first come, first served within a tenant"
        places = [place for place, (name, _) in enumerate(order) if name == tenant]
        assert all(after - before <= 3 for before, after in pairwise(places))


def test_a_quiet_tenant_has_its_turn_after_one_of_each_other() -> None:
    later: list[Callable[[], None]] = []
    turns = FairScheduler(later.append)
    done: list[str] = []

    def noisy(left: int) -> None:
        done.append("noisy")
        if left:
            turns.ask("noisy", lambda: noisy(left - 1))

    for _ in range(20):
        turns.ask("noisy", lambda: noisy(3))
    later.pop()()
    assert len(done) == TURNS_AT_ONCE, "the loop looks at its sockets in between"
    turns.ask("quiet", lambda: done.append("quiet"))
    while later:
        later.pop()()
    assert done.index("quiet") <= TURNS_AT_ONCE + 1
    assert len(done) == 81


async def test_places_go_from_tenant_to_tenant_and_come_back() -> None:
    budget = Budget("catch_up", 2)
    gate = Gate(2, lambda: budget.take(1), lambda: budget.give(1))
    order: list[str] = []
    most = 0

    async def read(tenant: str) -> None:
        nonlocal most
        async with gate.place(tenant):
            most = max(most, budget.used_bytes)
            order.append(tenant)
            await asyncio.sleep(0)

    work = [asyncio.ensure_future(read("noisy")) for _ in range(20)]
    await asyncio.sleep(0)
    work.append(asyncio.ensure_future(read("quiet")))
    gone = [asyncio.ensure_future(read("noisy")) for _ in range(5)]
    await asyncio.sleep(0)
    for each in gone:
        each.cancel()
    await asyncio.gather(*work, *gone, return_exceptions=True)
    assert order.index("quiet") <= 6
    assert (order.count("noisy"), most, budget.used_bytes) == (20, 2, 0)


async def test_a_place_that_is_freed_elsewhere_is_noticed() -> None:
    budget = Budget("catch_up", 1)
    assert budget.take(1)
    gate = Gate(4, lambda: budget.take(1), lambda: budget.give(1))
    entered = asyncio.Event()

    async def read() -> None:
        async with gate.place("quiet"):
            entered.set()

    work = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    assert not entered.is_set()
    budget.give(1)
    await asyncio.wait_for(entered.wait(), 20)
    await work
    assert budget.used_bytes == 0


async def test_who_is_cancelled_with_a_place_in_hand_gives_it_back() -> None:
    budget = Budget("catch_up", 1)
    gate = Gate(1, lambda: budget.take(1), lambda: budget.give(1))
    release = asyncio.Event()

    async def hold() -> None:
        async with gate.place("a"):
            await release.wait()

    first, second = asyncio.ensure_future(hold()), asyncio.ensure_future(hold())
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert budget.used_bytes == 0
    async with gate.place("b"):
        assert budget.used_bytes == 1
