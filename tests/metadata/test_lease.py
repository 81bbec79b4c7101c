"""Leases: the holder stops before the store lets go."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtimes import with_boot

from felix.errors import RequestError, UnavailableError
from region.metadata.lease import Deadlines, Lease, LeaseLostError, lease_lost
from region.metadata.memory import MemoryStore
from region.metadata.transaction import Put

PATIENCE_S = 120


class Clock:
    """A clock that stands until it is told to go on."""

    now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


class Granter:
    """The store's side: answers renewals, or fails them as told."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.delay_ms = 0
        self.error: Exception | None = None
        self.revoked: list[int] = []

    async def renew(self, lease_id: int) -> int:
        self.clock.now_ms += self.delay_ms
        if self.error is not None:
            raise self.error
        return 3_000

    async def revoke(self, lease_id: int) -> None:
        self.revoked.append(lease_id)


def make(ttl_ms: int = 3_000) -> tuple[Clock, Granter, Lease]:
    clock = Clock()
    granter = Granter(clock)
    lease = Lease(7, ttl_ms, sent_ms=clock(), renew=granter.renew, revoke=granter.revoke, clock_ms=clock)
    return clock, granter, lease


async def test_time_is_counted_from_before_the_renewal_was_sent() -> None:
    clock, granter, lease = make()
    clock.now_ms += 1_000
    assert lease.remaining_ms() == 2_000
    granter.delay_ms = 900
    await lease.renew()
    assert lease.remaining_ms() == 2_100, "the answer took 900 ms; the store may count from before"
    clock.now_ms += 5_000
    assert lease.remaining_ms() == 0


async def test_a_lease_that_the_store_does_not_know_is_lost_for_good() -> None:
    _, granter, lease = make()
    granter.error = lease_lost(7)
    with pytest.raises(LeaseLostError):
        await lease.renew()
    granter.error = None
    assert lease.lost.is_set() and lease.remaining_ms() == 0 and "ran out" in lease.reason
    with pytest.raises(LeaseLostError):
        await lease.renew()
    await lease.revoke()
    assert granter.revoked == [], "nothing to give back"


async def test_a_keeper_that_cannot_reach_the_store_loses_the_lease_at_its_end() -> None:
    _, granter, lease = make(ttl_ms=1_000)
    granter.error, granter.delay_ms = UnavailableError("away"), 400
    lease.keep_alive()
    async with asyncio.timeout(PATIENCE_S):
        await lease.lost.wait()
    assert "No renewal reached the metadata store for 1000 ms" in lease.reason


async def test_losing_is_told_once_and_keeps_its_first_reason() -> None:
    _, granter, lease = make()
    await lease.revoke()
    lease.lose("another reason")
    assert granter.revoked == [7] and "revoked by its holder" in lease.reason


async def test_a_store_sweeps_by_its_clock_and_refuses_a_lease_that_just_ran_out() -> None:
    clock = Clock()
    async with MemoryStore(runtime=with_boot(clock)) as store:
        lease = await store.grant(60_000, keep=False)
        await store.transact([], [Put("/a", b"", lease=lease.id)])
        clock.now_ms += 60_000
        with pytest.raises(LeaseLostError):
            await store.transact([], [Put("/b", b"", lease=lease.id)])
        with pytest.raises(LeaseLostError):
            await lease.renew()
        assert await store.get("/b") is None


async def test_ttls_out_of_bounds_are_refused() -> None:
    async with MemoryStore() as store:
        for ttl_ms in (0, 999, 3_600_001):
            with pytest.raises(RequestError, match="1000 to 3600000"):
                await store.grant(ttl_ms)


@given(
    st.lists(
        st.tuples(st.sampled_from(["grant", "renew", "forget", "wait"]), st.integers(1, 50)), max_size=60
    )
)
def test_deadlines_agree_with_a_plain_reading(steps: list[tuple[str, int]]) -> None:
    deadlines, model, now = Deadlines(), dict[int, tuple[int, int]](), 0
    for step, number in steps:
        lease_id = number % 5
        if step == "wait":
            now += number
        elif step == "forget":
            assert deadlines.forget(lease_id) == (model.pop(lease_id, None) is not None)
        elif step == "grant" and lease_id not in model:
            deadlines.grant(lease_id, number, now)
            model[lease_id] = (number, now + number)
        elif step == "renew":
            if lease_id in model and now < model[lease_id][1]:
                assert deadlines.renew(lease_id, now) == model[lease_id][0]
                model[lease_id] = (model[lease_id][0], now + model[lease_id][0])
            else:
                with pytest.raises(LeaseLostError):
                    deadlines.renew(lease_id, now)
        assert set(deadlines.due(now)) == {i for i, (_, end) in model.items() if end <= now}
        assert deadlines.next_ms() == min((end for _, end in model.values()), default=None)
