"""Rights while sessions stand: taken away and given at once; streams that are deleted and made anew."""

from __future__ import annotations

import asyncio
import time

import pytest
from region_peer import client, encode_request, raw_peer, take, until

import felix
from cli.grants import add_right
from felix import Code, RequestError
from felix.messages import PutRights, Start, Subscribe
from region.node import Node

CREW = "acme/ops/crew"
SVC = "spiffe://us-east.acme/client/orders-svc"


async def ended(reader: felix.Subscription) -> felix.FelixError:
    with pytest.raises(felix.FelixError) as caught:
        async with asyncio.timeout(120):
            while True:
                await anext(reader)
    return caught.value


async def test_rights_come_and_go_without_a_new_session(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    async with client(node.folder, "orders-svc") as svc:
        stream = svc.stream(CREW)
        for _ in range(3):
            with pytest.raises(RequestError) as caught:
                await stream.publish(b"refused")
            assert caught.value.code is Code.NOT_FOUND_OR_FORBIDDEN
            await operator.put_rights(SVC, [f"publish,subscribe {CREW}"])
            # Given: at once, on the session that stands.
            await stream.publish(b"taken")
            reader = stream.subscribe("earliest")
            await take(reader, 1)
            begun = time.monotonic()
            await operator.put_rights(SVC, [])
            error = await ended(reader)
            assert error.code is Code.NOT_FOUND_OR_FORBIDDEN
            with pytest.raises(RequestError):
                await stream.publish(b"refused")
            assert time.monotonic() - begun < 10
        assert svc.reconnects == 0
        assert (await operator.describe_stream(CREW)).state[0].high_watermark == 3


async def test_an_operator_s_answer_means_that_it_holds(node: Node, operator: felix.RegionClient) -> None:
    """No window between the answer and the effect."""
    await operator.create_stream(CREW)
    async with client(node.folder, "orders-svc") as svc:
        for _ in range(30):
            await operator.put_rights(SVC, [f"subscribe {CREW}"])
            await svc.describe_stream(CREW)
            await operator.put_rights(SVC, [])
            with pytest.raises(RequestError):
                await svc.describe_stream(CREW)


async def test_of_two_who_change_the_same_rights_the_later_one_is_told(
    node: Node, operator: felix.RegionClient
) -> None:
    first, second = [f"subscribe {CREW}"], [f"publish {CREW}"]
    await operator.put_rights(SVC, first, held=[])
    await operator.put_rights(SVC, first, held=[])  # as where the answer was lost
    for wanted in (second, []):
        with pytest.raises(RequestError, match="changed meanwhile") as caught:
            await operator.put_rights(SVC, wanted, held=[*second, f"observe {CREW}"])
        assert caught.value.code is Code.CONFLICT
    assert (await operator.list_rights())[SVC] == first
    await operator.put_rights(SVC, [*first, *second], held=first)
    await operator.put_rights(SVC, [], held=[*second, *first])
    await operator.put_rights(SVC, [], held=first)
    assert SVC not in await operator.list_rights()


async def test_who_adds_a_right_beside_others_takes_none_of_theirs(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of many `felix bridge allow` at once for one bridge."""
    monkeypatch.setenv("FELIX_HOME", str(node.folder.root.parent))
    bridge = "spiffe://us-east.acme/bridge/us-to-eu"
    wanted = sorted(f"bridge-read acme/ops/s{number}" for number in range(8))
    await asyncio.gather(*(add_right("us-east", bridge, right) for right in wanted))
    assert (await operator.list_rights())[bridge] == wanted


async def test_a_right_that_goes_while_a_start_is_looked_up(node: Node, operator: felix.RegionClient) -> None:
    """Whatever the order, nobody without the right keeps a subscription."""
    await operator.create_stream(CREW)
    await operator.stream(CREW).publish_many([b"%d" % n for n in range(200)])
    svc = felix.load_identity(node.folder.identity("orders-svc"))
    for at in range(20):
        await operator.put_rights(SVC, [f"subscribe {CREW}"])
        async with raw_peer(node.folder, node.address, identity=svc) as peer:
            for n in range(1, 10):
                peer.send(encode_request(Subscribe(CREW, Start("time", n), credit_bytes=2 << 20), n))
            if at % 2:
                await asyncio.sleep(0)
            await operator.request(PutRights(SVC, []))
            await until(
                lambda peer=peer: len(peer.errors()) + sum(map(bool, map(peer.answers, range(1, 10)))) >= 9
            )  # type: ignore[misc]
            for session in node.broker.sessions:
                if str(session.identity) == SVC:
                    assert not session.subscriptions


async def test_a_deleted_stream_ends_its_subscriptions_and_comes_back_as_another(
    node: Node, operator: felix.RegionClient
) -> None:
    first = await operator.create_stream(CREW)
    async with client(node.folder) as other:
        publisher = other.stream(CREW).publisher()
        await publisher.open()
        await publisher.publish(b"old")
        reader = operator.stream(CREW).subscribe("earliest")
        await take(reader, 1)
        await operator.delete_stream(CREW, incarnation=first.incarnation)
        error = await ended(reader)
        assert error.code is Code.NOT_FOUND
        with pytest.raises(RequestError) as caught:
            await publisher.publish(b"nowhere")
        assert caught.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        second = await operator.create_stream(CREW)
        assert second.incarnation != first.incarnation
        with pytest.raises(RequestError) as caught:
            await operator.delete_stream(CREW, incarnation=first.incarnation)
        assert caught.value.code is Code.CONFLICT
        async with other.stream(CREW).publisher() as again:
            assert await again.publish(b"new") == 0
        async with other.stream(CREW).subscribe(
            "earliest", offsets={0: 1}, incarnation=first.incarnation
        ) as resumed:
            assert bytes((await take(resumed, 1))[0].payload) == b"new"
        assert not list((node.folder.root / node.config.data).rglob("*.deleted*"))


async def test_only_an_operator_changes_rights(node: Node) -> None:
    async with client(node.folder, "orders-svc") as svc:
        with pytest.raises(RequestError) as caught:
            await svc.put_rights(SVC, [f"publish {CREW}"])
        assert caught.value.code is Code.FORBIDDEN
        with pytest.raises(RequestError) as caught:
            await svc.list_rights()
        assert caught.value.code is Code.FORBIDDEN
