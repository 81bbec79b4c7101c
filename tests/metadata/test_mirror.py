"""The catalog's mirror: always there, never a deletion missed, nothing lost because the store was away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from etcd_process import EtcdProcess

from felix.errors import UnavailableError
from felix.names import SpiffeId, StreamName
from felix.quota import QuotaLimits
from felix.settings import SubscriptionSettings
from policy.access import Verb, allowed
from region.metadata.catalog import Catalog
from region.metadata.embedded import EmbeddedStore
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.memory import MemoryStore
from region.metadata.mirror import CatalogMirror, MirrorChange
from region.metadata.records import Policy, StreamConfig, Subscription
from region.metadata.transaction import Absent, Delete, Put

PATIENCE_S = 120
ORDERS = StreamName.parse("acme/payments/orders")
CLIENT = SpiffeId.parse("spiffe://us-east.acme/client/orders-svc")


class Region:
    """A store, its catalog, a mirror of it, and what the mirror told."""

    def __init__(self, store: MemoryStore | EmbeddedStore) -> None:
        self.store = store
        self.catalog = Catalog(store, "us-east")
        self.mirror = CatalogMirror(store, "us-east")
        self.told: list[tuple[str, str, bool]] = []
        self.mirror.on_change(self._note)

    def _note(self, change: MirrorChange) -> None:
        self.told.append((change.section, change.name, change.is_gone))

    async def caught_up(self) -> None:
        """A write of ours has come back."""
        result = await self.store.transact([], [Put("/felix/1/us-east/brokers/b1", b"")])
        async with asyncio.timeout(PATIENCE_S):
            await self.mirror.wait_for(result.revision)

    async def create(self, name: StreamName, number: int = 1) -> None:
        await self.catalog.create_stream(name, StreamConfig(), incarnation=bytes([number] * 16), created_ms=1)


@pytest.fixture(params=["memory", "embedded"])
async def region(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Region]:
    store = (
        MemoryStore(history_events_max=20)
        if request.param == "memory"
        else await EmbeddedStore.open(tmp_path / "metadata.db", history_events_max=20)
    )
    made = Region(store)
    yield made
    await made.mirror.close()
    await store.close()


async def test_it_knows_what_was_there_and_what_comes(region: Region) -> None:
    await region.create(ORDERS)
    await region.catalog.change_rights(CLIENT, add=["publish acme/payments/*"])
    await region.mirror.start()
    mirror = region.mirror
    assert mirror.is_current and mirror.streams[ORDERS].config.shards == 1
    assert allowed(mirror.rights(CLIENT), Verb.PUBLISH, ORDERS)
    assert not mirror.rights(SpiffeId.parse("spiffe://us-east.acme/client/other"))
    await region.catalog.put_document("grants", "export", "g-1", b"grant")
    await region.catalog.put_policy(1, b"policy")
    await region.catalog.put_trusted("eu-west", b"bundle")
    await region.catalog.change_quota("acme", QuotaLimits(sessions=3))
    await region.caught_up()
    assert mirror.document("grants", "export", "g-1") == b"grant"
    assert mirror.documents("grants", "export") == {"g-1": b"grant"}
    assert mirror.policy == Policy(1, b"policy")
    assert mirror.trusted() == {"eu-west": b"bundle"} and mirror.quotas == {
        ("tenant", "acme"): QuotaLimits(sessions=3)
    }
    await region.catalog.change_rights(CLIENT, remove=["publish acme/payments/*"])
    await region.catalog.delete_stream(ORDERS, deleted_ms=2)
    await region.caught_up()
    assert not mirror.rights(CLIENT) and ORDERS not in mirror.streams
    assert list(mirror.deleted_streams) == ["01" * 16]
    assert region.told[:2] == [
        ("rights", "us-east.acme/client/orders-svc", False),
        ("streams", "acme/payments/orders", False),
    ]
    assert ("streams", "acme/payments/orders", True) in region.told


async def test_a_callback_sees_the_change_it_is_told_of_and_cannot_stop_the_mirror(region: Region) -> None:
    seen: list[bool] = []

    def look(change: MirrorChange) -> None:
        seen.append(ORDERS in region.mirror.streams)
        raise ValueError("a mistake of the callback's")

    end = region.mirror.on_change(look)
    await region.mirror.start()
    await region.create(ORDERS)
    await region.caught_up()
    assert seen == [True]
    end()
    await region.catalog.delete_stream(ORDERS, deleted_ms=2)
    await region.caught_up()
    assert seen == [True] and ORDERS not in region.mirror.streams


async def test_after_missing_history_it_finds_deletions_too(region: Region) -> None:
    """The mirror is kept from following until the store has forgotten what happened."""
    other = StreamName.parse("acme/ops/crew")
    await region.create(ORDERS, 1)
    await region.create(other, 2)
    await region.catalog.change_rights(CLIENT, add=["publish acme/payments/*"])
    await region.mirror.start()
    follower = region.mirror._follower
    await follower.close()
    await region.catalog.delete_stream(ORDERS, deleted_ms=2)
    await region.catalog.delete_rights(CLIENT)
    for number in range(50):
        await region.store.transact([], [Put("/elsewhere", str(number).encode())])
    region.told.clear()
    follower._task = asyncio.create_task(follower._follow())
    await region.caught_up()
    assert list(region.mirror.streams) == [other] and not region.mirror.rights(CLIENT)
    assert ("streams", "acme/payments/orders", True) in region.told
    assert not any(name == "acme/ops/crew" for _, name, _ in region.told), "what did not change is not told"


async def test_unreadable_records_grant_nothing_and_delete_nothing(region: Region) -> None:
    await region.create(ORDERS)
    await region.catalog.change_rights(CLIENT, add=["publish acme/payments/*"])
    await region.catalog.put_policy(1, b"policy")
    await region.mirror.start()
    keys = region.catalog.keys
    broken = [keys.stream(ORDERS), keys.rights(CLIENT), keys.policy_pointer()]
    await region.store.transact([], [Put(key, b"{") for key in broken])
    await region.caught_up()
    assert ORDERS in region.mirror.streams, "its data is still there"
    assert not region.mirror.rights(CLIENT) and region.mirror.policy is None
    assert sorted(region.mirror.faults) == sorted(broken)
    await region.catalog.set_rights(CLIENT, ["publish acme/payments/*"])
    await region.store.transact([], [Put(keys.rights(CLIENT), b'{"rights":["fly to the moon"]}')])
    await region.caught_up()
    assert not region.mirror.rights(CLIENT)
    await region.catalog.set_rights(CLIENT, ["publish acme/payments/*"])
    await region.caught_up()
    assert region.mirror.rights(CLIENT) and keys.rights(CLIENT) not in region.mirror.faults


@pytest.mark.parametrize("error", [ArithmeticError("a mistake"), UnavailableError("The store is away.")])
async def test_whatever_ends_a_watch_it_follows_again_and_says_that_it_does(
    region: Region, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also where nothing changes afterwards, and where the store was away when it was to be loaded again."""
    real_watch, real_load = region.store._watch, region.store.load
    failed = {"watch": 0, "load": 0}

    def watch(*arguments: object) -> object:
        if not failed["watch"]:
            failed["watch"] += 1
            raise error
        return real_watch(*arguments)  # type: ignore[arg-type]

    async def load(prefix: str) -> object:
        if failed["watch"] and not failed["load"]:
            failed["load"] += 1
            raise error
        return await real_load(prefix)

    monkeypatch.setattr(region.store, "_watch", watch)
    monkeypatch.setattr(region.store, "load", load)
    await region.mirror.start()
    async with asyncio.timeout(PATIENCE_S):
        while not (failed["load"] and region.mirror.is_current):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await region.create(ORDERS)
    await region.caught_up()
    assert ORDERS in region.mirror.streams


async def test_a_mirror_of_a_closed_store_keeps_what_it_knows(region: Region) -> None:
    await region.create(ORDERS)
    await region.mirror.start()
    await region.store.close()
    async with asyncio.timeout(PATIENCE_S):
        while region.mirror.is_current:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert ORDERS in region.mirror.streams
    with pytest.raises(UnavailableError):
        await CatalogMirror(region.store, "us-east").start()


@pytest.mark.etcd
@pytest.mark.fault
async def test_it_follows_an_etcd_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path)
    etcd.start()
    try:
        async with await EtcdStore.open(EtcdConfig((etcd.endpoint,))) as store:
            catalog, mirror = Catalog(store, "us-east"), CatalogMirror(store, "us-east")
            await mirror.start()
            await catalog.create_stream(ORDERS, StreamConfig(), incarnation=bytes(16), created_ms=1)
            await asyncio.to_thread(etcd.kill)
            await asyncio.to_thread(etcd.start)
            await catalog.delete_stream(ORDERS, deleted_ms=2)
            result = await store.transact(
                [Absent("/felix/1/us-east/rights/x")], [Delete("/x"), Put("/felix/1/us-east/rights/x", b"")]
            )
            async with asyncio.timeout(PATIENCE_S):
                await mirror.wait_for(result.revision)
            assert not mirror.streams and "/felix/1/us-east/rights/x" in mirror.faults
            await mirror.close()
    finally:
        etcd.stop()


async def test_durable_subscriptions_come_and_go(region: Region) -> None:
    made = Subscription(
        stream=str(ORDERS),
        name="billing",
        id="01" * 8,
        incarnation="00" * 16,
        creator=str(CLIENT),
        created_ms=1,
        settings=SubscriptionSettings(),
    )
    await region.mirror.start()
    made = await region.catalog.create_subscription(made)
    await region.caught_up()
    assert region.mirror.subscriptions == {f"{ORDERS}/billing": made}
    await region.catalog.delete_subscription(made)
    await region.caught_up()
    assert not region.mirror.subscriptions


async def test_the_subscriptions_of_a_stream_are_found_without_those_of_others(region: Region) -> None:
    await region.mirror.start()
    other = StreamName.parse("acme/payments/orders-eu")
    for stream in (ORDERS, other):
        await region.create(stream)
        for name in ("billing", "audit"):
            await region.catalog.create_subscription(
                Subscription(
                    stream=str(stream),
                    name=name,
                    id=bytes(8).hex(),
                    incarnation=bytes(16).hex(),
                    creator=str(CLIENT),
                    created_ms=1,
                    settings=SubscriptionSettings(),
                )
            )
    await region.caught_up()
    mine = region.mirror.subscriptions_of(str(ORDERS))
    assert sorted(mine) == ["audit", "billing"] and {each.stream for each in mine.values()} == {str(ORDERS)}
    for name in ("billing", "audit"):
        await region.catalog.delete_subscription(mine[name])
        await region.caught_up()
    assert not region.mirror.subscriptions_of(str(ORDERS))
    assert len(region.mirror.subscriptions_of(str(other))) == 2
