"""One broker serves a region at a time; who is dead for certain makes room at once, who may live is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from region_peer import until

from felix.errors import Code, UnavailableError
from felix.tasks import end_tasks
from region.metadata import registration
from region.metadata.memory import MemoryStore
from region.metadata.registration import Holder, Registration
from region.metadata.transaction import Put

LEASE_MS = 1_000
PATIENCE_S = 120
KEYS = "/felix/1/us-east/"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "EXPIRY_SLACK_MS", 200)
    monkeypatch.setattr(registration, "LOOK_MS", 10)
    monkeypatch.setattr(registration, "RETRY_MS", 10)


def holder(broker: str = "b1", lock: str = "here", lease_ms: int = LEASE_MS) -> Holder:
    return Holder(
        broker=broker, host="h", process=7, folder=f"/f/{lock}", lock=lock, lease_ms=lease_ms, since_ms=1
    )


async def register(store: MemoryStore, who: Holder) -> Registration:
    return await Registration.open(store, "us-east", who)


async def registered(store: MemoryStore) -> list[str]:
    return [entry.key.removeprefix(KEYS) for entry in (await store.load(KEYS + "brokers/")).entries]


@asynccontextmanager
async def kept(held: Registration) -> AsyncIterator[None]:
    task = asyncio.ensure_future(held.keep())
    try:
        yield
    finally:
        await end_tasks(task)


async def until_writing(held: Registration) -> None:
    await until(lambda: held.refusal() is None, PATIENCE_S)


async def lose(store: MemoryStore, held: Registration) -> None:
    """The store forgets the lease, and its holder hears of it."""
    assert held._lease is not None
    await store._lease_revoke(held._lease.id)
    held._lease.lose("The store forgot it.")


async def test_a_broker_with_another_lock_is_refused_with_the_name_of_the_one_that_serves() -> None:
    async with MemoryStore() as store:
        first = await register(store, holder())
        seconds = holder(lock="a copy"), holder("b2", "another"), holder("b2", "")
        for refused in await asyncio.gather(
            *(register(store, second) for second in seconds), return_exceptions=True
        ):
            assert isinstance(refused, UnavailableError) and refused.code is Code.SERVED_ELSEWHERE
            assert "broker b1 (process 7 on h, /f/here)" in refused.sentence
        assert first.refusal() is None and await registered(store) == ["brokers/b1"]


async def test_of_two_that_register_at_once_one_serves() -> None:
    async with MemoryStore() as store:
        results = await asyncio.gather(
            *(register(store, holder(f"b{n}", f"lock {n}")) for n in range(4)), return_exceptions=True
        )
        served = [result for result in results if isinstance(result, Registration)]
        refused = [result for result in results if isinstance(result, UnavailableError)]
        assert len(served) == 1 and len(refused) == 3
        assert {error.code for error in refused} == {Code.SERVED_ELSEWHERE}
        assert len(await registered(store)) == 1


async def test_whoever_holds_the_same_lock_is_let_in_at_once_also_under_another_name() -> None:
    async with MemoryStore() as store:
        # An hour: nobody who waits for it ends in time.
        await register(store, holder(lease_ms=3_600_000))
        async with asyncio.timeout(PATIENCE_S):
            second = await register(store, holder("renamed", lease_ms=3_600_000))
        assert second.refusal() is None and await registered(store) == ["brokers/renamed"]


async def test_a_broker_on_another_machine_is_let_in_once_the_lease_has_ended() -> None:
    async with MemoryStore() as store:
        first = await register(store, holder())
        assert first._lease is not None
        # As after a power cut: nobody renews it, and nobody revokes it.
        first._lease.lose("The machine is gone.")
        async with asyncio.timeout(PATIENCE_S):
            second = await register(store, holder(lock="another machine"))
        assert second.refusal() is None and first.refusal() is not None


async def test_one_that_stopped_in_order_makes_room_at_once() -> None:
    async with MemoryStore() as store:
        first = await register(store, holder(lease_ms=3_600_000))
        await first.close()
        async with asyncio.timeout(PATIENCE_S):
            second = await register(store, holder(lock="another", lease_ms=3_600_000))
        assert second.refusal() is None


async def test_an_entry_that_cannot_be_read_is_somebody_elses() -> None:
    async with MemoryStore() as store:
        await store.transact([], [Put(KEYS + "brokers/b9", b'{"later": 1}')])
        with pytest.raises(UnavailableError, match="brokers/b9") as refused:
            await register(store, holder())
        assert refused.value.code is Code.SERVED_ELSEWHERE


async def test_a_lost_lease_stops_the_writing_until_it_is_regained() -> None:
    async with MemoryStore() as store:
        held = await register(store, holder())
        async with kept(held):
            await lose(store, held)
            refused = held.refusal()
            assert refused is not None and refused.code is Code.NOT_LEADER
            await until_writing(held)
            entry = await store.get(KEYS + "brokers/b1")
            assert entry is not None and msgspec.json.decode(entry.value, type=Holder).process == 7


async def test_a_lost_lease_is_not_regained_while_another_broker_serves() -> None:
    async with MemoryStore() as store:
        first = await register(store, holder())
        await lose(store, first)
        second = await register(store, holder("b2", "another"))
        async with kept(first):
            await until(lambda: "broker b2" in str(first.refusal()), PATIENCE_S)
            assert second.refusal() is None
            await second.close()
            await until_writing(first)
        assert await registered(store) == ["brokers/b1"]
