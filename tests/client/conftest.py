from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from client.scripted_broker import ScriptedBroker, ScriptedEngine, profile

import felix

ORDERS = "acme/payments/orders"


@pytest.fixture
def broker() -> ScriptedBroker:
    made = ScriptedBroker()
    made.create(ORDERS)
    return made


@pytest.fixture
async def region(broker: ScriptedBroker) -> AsyncIterator[felix.RegionClient]:
    async with connected(broker) as client:
        yield client
    broker.check()


def connected(broker: ScriptedBroker, **options: object) -> felix.RegionClient:
    """A client of the scripted broker, with waits that suit a test."""
    return felix.connect(
        profile=profile(),
        engine=ScriptedEngine(broker=broker),
        backoff=felix.BackoffPolicy(first_ms=1, ceiling_ms=4),
        **options,
    )


async def until(true: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Return once it is true."""
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 - what is waited for happens in plain attributes
            await asyncio.sleep(0.001)
