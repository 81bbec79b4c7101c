"""The client over the real engines: the scripted broker behind a real listener, each engine as client to each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from client.conftest import ORDERS
from client.scripted_broker import BrokerSession, ScriptedBroker, profile, server_tls

import felix
from felix import Code, RequestError, UnavailableError
from felix.transport.port import ENGINE_NAMES, engine_named

PAIRS = [(client, server) for client in ENGINE_NAMES for server in ENGINE_NAMES]


@asynccontextmanager
async def served(broker: ScriptedBroker, engine: str) -> AsyncIterator[str]:
    """The scripted broker behind a listener; its address."""
    listener = await engine_named(engine).listen("127.0.0.1", 0, server_tls(), lambda: BrokerSession(broker))
    try:
        yield f"127.0.0.1:{listener.address[1]}"
    finally:
        await listener.close()


def client_of(address: str, engine: str) -> felix.RegionClient:
    return felix.connect(
        profile=profile(address),
        engine=engine_named(engine),
        backoff=felix.BackoffPolicy(first_ms=1, ceiling_ms=20),
    )


@pytest.mark.parametrize(("client", "server"), PAIRS)
async def test_records_go_round_through_crashes(client: str, server: str) -> None:
    broker = ScriptedBroker(publish_credit_bytes=1 << 20)
    log = broker.create(ORDERS, shards=2)
    payloads = [random.randbytes(random.randrange(500)) + b"%d" % i for i in range(6_000)]
    found: list[bytes] = []

    async def consume(region: felix.RegionClient) -> None:
        async with region.stream(ORDERS).subscribe("earliest", credit_bytes=2 << 20) as subscription:
            async for batch in subscription.batches():
                found.extend(map(bytes, batch.payloads()))
                if len(found) >= len(payloads):
                    return

    async with asyncio.timeout(120), served(broker, server) as address, client_of(address, client) as region:
        consumer = asyncio.create_task(consume(region))
        async with region.stream(ORDERS).publisher(batch_bytes=8 * 1024) as publisher:
            for at in range(0, len(payloads), 1_000):
                await publisher.send_many(payloads[at : at + 1_000])
                if at in (2_000, 4_000):
                    broker.session.drop()
        await consumer
        assert region.session.engine == client
        assert region.reconnects >= 1
    broker.check()
    assert sorted(found) == sorted(payloads)
    assert sorted(log.payloads(0) + log.payloads(1)) == sorted(payloads)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_a_refused_identity_is_told_as_such(engine: str) -> None:
    broker = ScriptedBroker(region="eu-west")
    async with served(broker, engine) as address:
        with pytest.raises(RequestError) as caught:
            await client_of(address, engine).open()
    assert caught.value.code is Code.WRONG_REGION


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_nobody_there(engine: str) -> None:
    async with served(ScriptedBroker(), engine) as address:
        pass
    with pytest.raises(UnavailableError, match="felix region up"):
        await felix.connect(
            profile=profile(address), engine=engine_named(engine), connect_timeout_s=0.3
        ).open()
