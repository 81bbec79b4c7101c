"""Streams made by their first use: where the namespace allows it, by who may use them, and not otherwise."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from region_home import running
from region_peer import client, take

import felix
from felix.errors import Code, RequestError, UnavailableError
from felix.settings import NamespaceSettings
from region.folder import RegionFolder
from region.node import Node

ME = "spiffe://us-east.acme/client/orders-svc"

pytestmark = pytest.mark.timeout(60)


async def test_the_first_use_makes_the_stream_with_the_namespaces_settings(
    operator: felix.RegionClient,
) -> None:
    settings = NamespaceSettings(auto_create=True, shards=3, retention_ms=60_000)
    await operator.put_namespace("acme/web", settings)
    assert await operator.list_namespaces() == {"acme/web": settings}
    assert await operator.stream("acme/web/clicks").publish(b"first", key=b"k") == 0
    state = await operator.describe_stream("acme/web/clicks")
    assert (state.shards, state.retention.age_ms) == (3, 60_000)
    async with operator.stream("acme/web/views").subscribe("earliest") as subscription:
        reading = asyncio.ensure_future(take(subscription, 1))
        await asyncio.sleep(0.05)
        await operator.stream("acme/web/views").publish(b"seen")
        assert [bytes(record.payload) for record in await reading] == [b"seen"]
    async with operator.transaction() as transaction:
        await transaction.publish("acme/web/orders", b"x")
    assert (await operator.describe_stream("acme/web/orders")).shards == 3


async def test_queues_and_caches_are_made_as_what_they_are(operator: felix.RegionClient) -> None:
    await operator.put_namespace("acme/web", NamespaceSettings(auto_create=True))
    await operator.queue("acme/web/jobs").put(b"job")
    assert (await operator.describe_stream("acme/web/jobs")).views.queue is not None
    await operator.cache("acme/web/sessions").put("k", b"v")
    assert (await operator.describe_stream("acme/web/sessions")).views.cache is not None


async def test_many_at_once_make_one(node: Node, operator: felix.RegionClient) -> None:
    await operator.put_namespace("acme/web", NamespaceSettings(auto_create=True))
    async with client(node.folder) as one, client(node.folder) as two:
        offsets = await asyncio.gather(
            *(region.stream("acme/web/clicks").publish(b"x") for region in (one, two) for _ in range(5))
        )
    assert sorted(offsets) == list(range(10))


async def test_without_the_right_or_the_namespaces_leave_nothing_is_made(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.put_namespace("acme/web", NamespaceSettings(auto_create=True))
    await operator.put_rights(ME, ["publish acme/web/mine", "publish acme/other/*"])
    async with client(node.folder, "orders-svc") as region:
        for name in ("acme/web/yours", "acme/other/mine"):
            with pytest.raises(RequestError) as refused:
                await region.stream(name).publish(b"x")
            assert refused.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        with pytest.raises(RequestError):
            await take(region.stream("acme/web/mine").subscribe("earliest"), 1)
        assert await region.stream("acme/web/mine").publish(b"x") == 0
        with pytest.raises(RequestError) as refused:
            await region.put_namespace("acme/web", NamespaceSettings())
        assert refused.value.code is Code.FORBIDDEN
    with pytest.raises(RequestError):
        await operator.describe_stream("acme/web/only-looked-at")
    assert [state.stream async for state in operator.list_streams()] == ["acme/web/mine"]


async def test_the_number_is_bounded_and_settings_are_checked(operator: felix.RegionClient) -> None:
    await operator.put_namespace("acme/web", NamespaceSettings(auto_create=True, streams_max=1))
    await operator.stream("acme/web/one").publish(b"x")
    request = felix.messages.Subscribe("acme/web/two", credit_bytes=2 << 20)
    with pytest.raises(UnavailableError, match="no more than 1"):
        await operator.request(request, timeout_s=1)
    for wrong in (
        NamespaceSettings(auto_create=True, shards=0),
        NamespaceSettings(auto_create=True, durability="paper"),
        NamespaceSettings(streams_max=0),
    ):
        with pytest.raises(RequestError) as refused:
            await operator.put_namespace("acme/web", wrong)
        assert refused.value.code is Code.CONFIG_INVALID
    for name in ("felix/system", "acme", "acme/UPPER"):
        with pytest.raises(RequestError):
            await operator.put_namespace(name, NamespaceSettings(auto_create=True))


async def test_what_is_made_elsewhere_takes_no_place_in_a_namespace(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.put_namespace("acme/web", NamespaceSettings(auto_create=True, streams_max=1))
    over = asyncio.Event()

    async def look_up() -> None:
        await over.wait()

    waiting = [asyncio.ensure_future(look_up()) for _ in range(3)]
    node.broker._making |= {
        felix.StreamName.parse(f"globex/ops/s{number}"): task for number, task in enumerate(waiting)
    }
    async with asyncio.timeout(30):
        assert await operator.stream("acme/web/one").publish(b"x") == 0
    over.set()
    await asyncio.gather(*waiting)


async def test_settings_outlast_a_restart_and_are_cleared(folder: RegionFolder, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data), client(folder) as region:
        await region.put_namespace("acme/web", NamespaceSettings(auto_create=True))
    async with running(folder, data=data), client(folder) as region:
        await region.stream("acme/web/one").publish(b"x")
        assert await region.delete_namespace("acme/web") == ""
        assert "had no settings" in await region.delete_namespace("acme/web")
        with pytest.raises(RequestError):
            await region.stream("acme/web/two").publish(b"x")
