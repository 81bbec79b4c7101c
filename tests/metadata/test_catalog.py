"""Streams, rights and signed documents in the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.names import SpiffeId, StreamName
from felix.quota import QuotaLimits
from felix.settings import Durability, Retention, Retries, SubscriptionSettings
from region.cluster.records import ClusterKeys, FrozenRecord, encode
from region.metadata.catalog import Catalog, StreamsFullError
from region.metadata.memory import MemoryStore
from region.metadata.port import OutcomeUnknownError
from region.metadata.records import Policy, StreamConfig, Subscription
from region.metadata.transaction import Compare, Delete, Entry, Put, TransactResult, Write

ORDERS = StreamName.parse("acme/payments/orders")
CLIENT = SpiffeId.parse("spiffe://us-east.acme/client/orders-svc")


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(MemoryStore(), "us-east")


class Forgetful(MemoryStore):
    """A store whose answers to writes are lost, before or after the write was made."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[str] = []

    async def _transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        loss = self.losses.pop(0) if self.losses else ""
        result = await super()._transact(compares, writes) if loss != "before" else None
        if loss or result is None:
            raise OutcomeUnknownError("The answer was lost.")
        return result


async def create(catalog: Catalog, name: StreamName, number: int = 1, **settings: object) -> str:
    made = await catalog.create_stream(
        name,
        StreamConfig(**settings),  # type: ignore[arg-type]
        incarnation=bytes([number] * 16),
        created_ms=1_700_000_000_000,
    )
    return made.incarnation


class Slow(MemoryStore):
    """A store that others write to between any two requests."""

    async def _get(self, key: str) -> Entry | None:
        await asyncio.sleep(0)
        return await super()._get(key)

    async def _transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        await asyncio.sleep(0)
        return await super()._transact(compares, writes)


async def test_of_brokers_that_make_streams_at_once_as_many_succeed_as_there_may_be() -> None:
    store = Slow()
    brokers = [Catalog(store, "us-east") for _ in range(3)]

    async def make(number: int) -> str:
        name = StreamName.parse(f"acme/{('ops', 'ops', 'web')[number // 3 % 3]}/s{number}")
        most = {"acme/": 6} | ({"acme/ops/": 4} if name.namespace == "ops" else {})
        try:
            made = await brokers[number % 3].create_stream(
                name, StreamConfig(), incarnation=bytes([number] * 16), created_ms=1, most=most
            )
        except StreamsFullError as full:
            assert full.code is Code.LIMIT_STREAMS and full.count == most[full.prefix]
            return ""
        return made.name

    made = [name for name in await asyncio.gather(*(make(number) for number in range(24))) if name]
    assert sorted(made) == sorted(stream.name for stream in await brokers[0].list_streams())
    assert len(made) == 6 and sum(name.startswith("acme/ops/") for name in made) <= 4
    # What is there is there, also where nothing more may be; and what goes makes room.
    with pytest.raises(RequestError) as caught:
        await brokers[0].create_stream(
            StreamName.parse(made[0]),
            StreamConfig(),
            incarnation=bytes([99] * 16),
            created_ms=1,
            most={"acme/": 6},
        )
    assert caught.value.code is Code.ALREADY_EXISTS
    await brokers[1].delete_stream(StreamName.parse(made[0]), deleted_ms=1)
    assert await make(24)
    assert not await make(25)


async def test_a_stream_is_created_once_described_listed_changed_and_deleted(catalog: Catalog) -> None:
    await create(catalog, ORDERS, shards=4)
    with pytest.raises(RequestError, match="already exists") as caught:
        await create(catalog, ORDERS, 2)
    assert caught.value.code is Code.ALREADY_EXISTS
    for name in ("acme/ops/crew", "acme/payments/cards", "globex/a/b"):
        await create(catalog, StreamName.parse(name), 3 + len(name))
    assert [stream.name for stream in await catalog.list_streams("acme/payments/")] == [
        "acme/payments/cards",
        "acme/payments/orders",
    ]
    stream = await catalog.describe_stream(ORDERS)
    assert (stream.incarnation, stream.config.shards) == ("01" * 16, 4)
    changed = await catalog.update_stream(
        ORDERS,
        StreamConfig(
            shards=4, durability=Durability("interval", 50), retention=Retention(age_ms=604_800_000)
        ),
    )
    assert changed.revision > stream.revision and changed.incarnation == stream.incarnation
    assert await catalog.describe_stream(ORDERS) == changed
    mark = await catalog.delete_stream(ORDERS, deleted_ms=5)
    assert await catalog.deleted_streams() == [mark] and mark.incarnation == "01" * 16
    with pytest.raises(RequestError) as caught:
        await catalog.describe_stream(ORDERS)
    assert caught.value.code is Code.NOT_FOUND


async def test_a_stream_created_again_is_another_one(catalog: Catalog) -> None:
    old = await create(catalog, ORDERS, 1)
    await catalog.delete_stream(ORDERS, deleted_ms=5)
    with pytest.raises(RequestError) as caught:
        await create(catalog, ORDERS, 1)
    assert caught.value.code is Code.CONFLICT, "an incarnation is never used again"
    assert await create(catalog, ORDERS, 2) != old
    with pytest.raises(RequestError, match="deleted and created again"):
        await catalog.delete_stream(ORDERS, incarnation=old, deleted_ms=6)


async def test_no_stream_is_created_while_the_store_is_known_to_have_gone_back(catalog: Catalog) -> None:
    await create(catalog, ORDERS, 1)
    frozen = ClusterKeys("us-east").frozen
    await catalog.store.transact(
        [], [Put(frozen, encode(FrozenRecord("b1", "it knows an earlier start"), frozen))]
    )
    later = StreamName.parse("acme/payments/later")
    with pytest.raises(UnavailableError, match="went back to an earlier state"):
        await create(catalog, later, 2)
    with pytest.raises(RequestError, match="already exists"):
        await create(catalog, ORDERS, 3)
    assert [stream.name for stream in await catalog.list_streams()] == [str(ORDERS)]
    await catalog.store.transact([], [Delete(frozen)])
    await create(catalog, later, 2)


async def test_many_creators_of_one_name_make_one_stream(catalog: Catalog) -> None:
    outcomes = await asyncio.gather(
        *(create(catalog, ORDERS, number) for number in range(1, 20)), return_exceptions=True
    )
    made = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert [made] == [[(await catalog.describe_stream(ORDERS)).incarnation]]


async def test_the_record_can_be_read_by_people(catalog: Catalog) -> None:
    await create(catalog, ORDERS, shards=2, durability=Durability("interval", 50))
    entry = await catalog.store.get("/felix/1/us-east/streams/acme/payments/orders")
    assert entry is not None
    assert entry.value == (
        b'{"name":"acme/payments/orders","incarnation":"01010101010101010101010101010101",'
        b'"created_ms":1700000000000,"config":{"shards":2,"durability":{"kind":"interval","interval_ms":50},'
        b'"retention":{},"ring_bytes":67108864,"views":{},"former_cache":{},"dead_letter_by":"","replicas":1,"min_in_sync":0,"acks":"quorum"}}'
    )


async def test_a_retention_written_by_release_0_1_is_read(catalog: Catalog) -> None:
    written = (
        b'{"name":"acme/payments/orders","incarnation":"01010101010101010101010101010101","created_ms":1,'
        b'"config":{"retention":{"age_ms":60000,"bytes":10000000,"acked":true}}}'
    )
    key = "/felix/1/us-east/streams/acme/payments/orders"
    await catalog.store.transact([], [Put(key, written)])
    kept = Retention(age_ms=60_000, size_bytes=10_000_000, acked=True)
    stream = await catalog.describe_stream(ORDERS)
    assert stream.config.retention == kept
    await catalog.update_stream(ORDERS, msgspec.structs.replace(stream.config, ring_bytes=1 << 20))
    entry = await catalog.store.get(key)
    assert (
        entry is not None
        and b'"retention":{"age_ms":60000,"size_bytes":10000000,"acked":true}' in entry.value
    )
    assert (await catalog.describe_stream(ORDERS)).config.retention == kept


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"shards": 0}, "0 shards; 1 to 256"),
        ({"shards": 257}, "257 shards"),
        ({"durability": Durability("interval", 0)}, "interval of 0 ms; 1 to 60000 ms"),
        ({"durability": Durability("interval", 60_001)}, "interval of 60001 ms"),
        ({"durability": Durability("fsync", 5)}, "fsync has no interval"),
        ({"durability": Durability("sometimes")}, "'sometimes'; it is fsync, interval or ephemeral"),
        ({"retention": Retention(age_ms=9)}, "retention of 9 ms; at least 10"),
        ({"retention": Retention(acked=True)}, "retention acked without an age or a size"),
        ({"retention": Retention(age_ms=-1)}, "retention of -1 ms"),
        ({"retention": Retention(size_bytes=1)}, "retention of 1 bytes per shard; at least 1048576"),
        ({"ring_bytes": 1}, "a ring of 1 bytes"),
    ],
)
async def test_settings_out_of_bounds_are_refused_with_the_bound(
    catalog: Catalog, settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        await create(catalog, ORDERS, **settings)
    assert caught.value.code is Code.CONFIG_INVALID and str(ORDERS) in str(caught.value)
    assert not await catalog.list_streams()


async def test_what_existing_data_does_not_survive_cannot_be_changed(catalog: Catalog) -> None:
    await create(catalog, ORDERS, shards=2)
    with pytest.raises(RequestError, match="cannot get 3"):
        await catalog.update_stream(ORDERS, StreamConfig(shards=3))
    with pytest.raises(RequestError, match="cannot change from fsync to ephemeral"):
        await catalog.update_stream(ORDERS, StreamConfig(shards=2, durability=Durability("ephemeral")))


async def test_a_damaged_record_is_named(catalog: Catalog) -> None:
    key = "/felix/1/us-east/streams/acme/payments/orders"
    for value in (
        b"{",
        b"\xff",
        b'{"name":"acme/payments/other","incarnation":"' + b"0" * 32 + b'","created_ms":1,"config":{}}',
        b'{"name":"acme/payments/orders","incarnation":"00","created_ms":1,"config":{}}',
        b'{"name":"acme/payments/orders","incarnation":"'
        + b"0" * 32
        + b'","created_ms":1,"config":{"shards":0}}',
    ):
        await catalog.store.transact([], [Put(key, value)])
        with pytest.raises(CorruptionError, match=key):
            await catalog.describe_stream(ORDERS)


async def test_rights_are_checked_added_and_taken_away(catalog: Catalog) -> None:
    assert await catalog.rights(CLIENT) == ()
    await catalog.change_rights(CLIENT, add=["publish,subscribe acme/payments/*"])
    now = await catalog.change_rights(
        CLIENT, add=["publish acme/ops/crew"], remove=["subscribe acme/payments/*"]
    )
    assert now == ("publish acme/ops/crew", "publish acme/payments/*")
    assert await catalog.list_rights() == {CLIENT: now}
    with pytest.raises(RequestError):
        await catalog.change_rights(CLIENT, add=["own everything"])
    assert await catalog.rights(CLIENT) == now
    assert await catalog.set_rights(CLIENT, []) == ()
    assert await catalog.delete_rights(CLIENT) and not await catalog.delete_rights(CLIENT)


async def test_rights_that_cannot_be_read_are_none_to_who_replaces_what_it_has_read(catalog: Catalog) -> None:
    await catalog.store.transact([], [Put(catalog.keys.rights(CLIENT), b"{")])
    with pytest.raises(RequestError, match="changed meanwhile"):
        await catalog.set_rights(CLIENT, ["publish acme/ops/*"], ["publish acme/ops/crew"])
    await catalog.set_rights(CLIENT, ["publish acme/ops/*"], [])
    assert await catalog.rights(CLIENT) == ("publish acme/ops/*",)


async def test_concurrent_changes_of_rights_lose_none(catalog: Catalog) -> None:
    await asyncio.gather(*(catalog.change_rights(CLIENT, add=[f"publish acme/ops/s{n}"]) for n in range(10)))
    assert len(await catalog.rights(CLIENT)) == 10


async def test_documents_are_kept_as_signed_and_replaced_only_when_seen(catalog: Catalog) -> None:
    written = await catalog.put_document("grants", "export", "g-1", b"\x00signed")
    again = await catalog.put_document("grants", "export", "g-1", b"\x00signed")
    assert again == written, "the same again is no error"
    with pytest.raises(RequestError) as caught:
        await catalog.put_document("grants", "export", "g-1", b"other")
    assert caught.value.code is Code.ALREADY_EXISTS
    replaced = await catalog.put_document("grants", "export", "g-1", b"other", revision=written.revision)
    with pytest.raises(RequestError) as caught:
        await catalog.put_document("grants", "export", "g-1", b"third", revision=written.revision)
    assert caught.value.code is Code.CONFLICT
    await catalog.put_document("revocations", "import", "g-1", b"r")
    assert await catalog.list_documents("grants", "export") == [replaced]
    assert await catalog.document("grants", "import", "g-1") is None
    for document_id in ("", "a/b", "x" * 129, "../x"):
        with pytest.raises(RequestError, match="is not a document id"):
            await catalog.put_document("grants", "export", document_id, b"")


async def test_policy_versions_only_grow_and_stay_readable(catalog: Catalog) -> None:
    assert await catalog.policy() is None
    await catalog.put_policy(1, b"one")
    await catalog.put_policy(1, b"one")
    await catalog.put_policy(3, b"three")
    assert await catalog.policy() == Policy(3, b"three")
    assert await catalog.policy_version(1) == Policy(1, b"one")
    for version, document in ((3, b"other"), (2, b"two")):
        with pytest.raises(RequestError, match="version 3 already is") as caught:
            await catalog.put_policy(version, document)
        assert caught.value.code is Code.CONFLICT
    await catalog.store.transact([], [Delete(catalog.keys.policy_version(3))])
    with pytest.raises(CorruptionError):
        await catalog.policy()


async def test_bundles_and_quotas(catalog: Catalog) -> None:
    revision = await catalog.put_trusted("eu-west", b"bundle")
    await catalog.put_trusted("eu-west", b"renewed", revision=revision)
    assert await catalog.trusted() == {"eu-west": b"renewed"}
    assert await catalog.delete_trusted("eu-west")
    identity = SpiffeId.parse("spiffe://us-east.acme/client/orders-svc")
    assert await catalog.change_quota("acme", QuotaLimits(sessions=3, streams=2)) == QuotaLimits(
        sessions=3, streams=2
    )
    assert await catalog.change_quota("acme", QuotaLimits(sessions=4), ["streams"]) == QuotaLimits(sessions=4)
    assert await catalog.change_quota(identity, QuotaLimits(requests=9)) == QuotaLimits(requests=9)
    for holder, limits in (("a/b", QuotaLimits()), (identity, QuotaLimits(streams=1))):
        with pytest.raises(RequestError):
            await catalog.change_quota(holder, limits)
    assert await catalog.delete_quota("acme") and not await catalog.delete_quota("acme")
    assert await catalog.delete_quota(identity)


@pytest.mark.parametrize("loss", ["before", "after"])
async def test_a_lost_answer_neither_doubles_nor_hides_a_change(loss: str) -> None:
    store = Forgetful()
    catalog = Catalog(store, "us-east")

    store.losses = [loss]
    try:
        await create(catalog, ORDERS)
    except RequestError:
        assert loss == "before"
        await create(catalog, ORDERS)
    store.losses = [loss]
    assert await catalog.change_rights(CLIENT, add=["publish acme/ops/crew"]) == ("publish acme/ops/crew",)
    store.losses = [loss]
    try:
        await catalog.put_policy(1, b"one")
    except OutcomeUnknownError:
        assert loss == "before"
        await catalog.put_policy(1, b"one")
    store.losses = [loss]
    try:
        await catalog.delete_stream(ORDERS, deleted_ms=1)
    except OutcomeUnknownError:
        assert loss == "before"
        await catalog.delete_stream(ORDERS, deleted_ms=1)
    assert len(await catalog.deleted_streams()) == 1
    assert await catalog.policy() == Policy(1, b"one")


def billing(number: int = 1, name: str = "billing") -> Subscription:
    return Subscription(
        stream=str(ORDERS),
        name=name,
        id=bytes([number] * 8).hex(),
        incarnation="00" * 16,
        creator=str(CLIENT),
        created_ms=1_700_000_000_000,
        settings=SubscriptionSettings("earliest", retries=Retries(attempts_max=3)),
    )


async def test_a_subscription_is_created_once_moved_to_another_incarnation_and_deleted(
    catalog: Catalog,
) -> None:
    made = await catalog.create_subscription(billing())
    assert await catalog.create_subscription(billing()) == made, "the same again is no other"
    with pytest.raises(RequestError) as caught:
        await catalog.create_subscription(billing(2))
    assert caught.value.code is Code.ALREADY_EXISTS
    await catalog.create_subscription(billing(3, "audit"))
    moved = await catalog.move_subscription(made, "11" * 16)
    assert moved.incarnation == "11" * 16 and moved.settings == made.settings
    assert [held.name for held in await catalog.subscriptions(str(ORDERS))] == ["audit", "billing"]
    with pytest.raises(RequestError) as caught:
        await catalog.delete_subscription(billing(2))
    assert caught.value.code is Code.NOT_FOUND, "another one under its name stays"
    await catalog.delete_subscription(moved)
    assert [held.name for held in await catalog.subscriptions()] == ["audit"]
    with pytest.raises(RequestError):
        await catalog.move_subscription(made, "22" * 16)


@pytest.mark.parametrize("name", ["", "Billing", "a/b", "x" * 64])
async def test_a_subscription_has_a_name_that_is_one_part(catalog: Catalog, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        await catalog.create_subscription(billing(name=name))
    assert caught.value.code is Code.NAME_INVALID
