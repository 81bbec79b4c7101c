"""An exchange whose other end is the test: how calls under way end when the exchange does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from felix.backoff import BackoffPolicy
from felix.cache_messages import Get
from felix.connection import RegionConnection
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.exchange import Exchange
from felix.frames import FrameDecoder, FrameType
from felix.messages import Done, OpenCache, encode_error, encode_message
from felix.runtime.real import REAL


class OneLink:
    """A connection with one link, and what was sent on it."""

    def __init__(self) -> None:
        self.link = self
        self.policy, self.runtime, self.request_timeout_s = BackoffPolicy(), REAL, 30.0
        self.profile = SimpleNamespace(region="us-east")
        self.sent: list[Any] = []

    def attach(self, exchange: Exchange) -> None:
        exchange.link_up(cast(Any, self))

    def detach(self, exchange: Exchange) -> None: ...

    def open_exchange(self, exchange: Exchange) -> int:
        return 4

    def close_exchange(self, stream_id: int) -> None: ...

    def send_exchange(self, stream_id: int, data: bytes) -> None:
        self.sent += FrameDecoder(frozenset(FrameType)).feed(data)


async def a_call_under_way() -> tuple[Exchange, asyncio.Future[Any]]:
    link = OneLink()
    exchange = Exchange(cast(RegionConnection, link), lambda: OpenCache("acme/web/sessions"), bytes)
    exchange.link_up(cast(Any, link))
    exchange.exchange_data(encode_message(FrameType.ANSWER, Done(), link.sent[0].correlation), end=False)
    assert exchange.is_open
    call = asyncio.ensure_future(exchange.call(Get(b"k"), again=False))
    await asyncio.sleep(0)
    assert link.sent[1].type is FrameType.CALL
    return exchange, call


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (RequestError("You may not.", code=Code.NOT_FOUND_OR_FORBIDDEN), Code.NOT_FOUND_OR_FORBIDDEN),
        (UnavailableError("It moves.", code=Code.UNAVAILABLE), Code.DISCONNECTED),
    ],
)
async def test_a_call_fails_with_what_ended_its_exchange_for_good_or_with_an_unknown_outcome(
    ended: FelixError, told: Code
) -> None:
    exchange, call = await a_call_under_way()
    exchange.exchange_data(encode_error(ended), end=True)
    with pytest.raises(FelixError) as failed:
        await call
    assert failed.value.code is told
    assert exchange.is_over is isinstance(ended, RequestError)
    if exchange.is_over:
        with pytest.raises(RequestError, match="You may not"):
            await exchange.call(Get(b"k"), again=True)
    exchange.close()
