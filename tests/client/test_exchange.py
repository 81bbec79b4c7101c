"""An exchange whose other end is the test: how calls under way end when the exchange does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from felix.backoff import BackoffPolicy
from felix.cache_messages import Get
from felix.connection import RegionConnection
from felix.errors import Code, FelixError, NotLeaderError, RequestError, UnavailableError
from felix.exchange import Exchange
from felix.frames import FrameDecoder, FrameType
from felix.messages import Done, OpenCache, encode_error, encode_message
from felix.names import StreamName
from felix.runtime.real import REAL


class OneLink:
    """A connection with one link, and what was sent on it."""

    def __init__(self) -> None:
        self.link = self
        self.exchange: Exchange
        self.policy, self.runtime, self.request_timeout_s = BackoffPolicy(), REAL, 30.0
        self.profile = SimpleNamespace(region="us-east")
        self.sent: list[Any] = []
        self.closed: list[int] = []
        self.is_usable = True
        self.leads_on: list[NotLeaderError] = []
        self.following: OneLink | None = None
        """where an exchange is moved that asked the wrong broker"""

    def attach(self, exchange: Exchange, stream: StreamName | None = None) -> None:
        exchange.link_up(cast(Any, self))

    def detach(self, exchange: Exchange) -> None: ...

    def open_exchange(self, exchange: Exchange) -> int:
        return 4

    def close_exchange(self, stream_id: int) -> None:
        self.closed.append(stream_id)

    def moved(self, error: NotLeaderError) -> None:
        self.leads_on.append(error)
        if self.following is not None:
            self.exchange.link_down(error)
            self.exchange.link_up(cast(Any, self.following))

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


def elsewhere(address: str = "127.0.0.1:7444") -> NotLeaderError:
    return NotLeaderError("It is led elsewhere.", stream="acme/web/sessions", leader="b2", address=address)


def opened(exchange: Exchange, link: OneLink) -> None:
    answer = encode_message(FrameType.ANSWER, Done(), link.sent[-1].correlation)
    exchange.exchange_data(answer, end=False)


def made() -> tuple[Exchange, OneLink]:
    link = OneLink()
    exchange = Exchange(cast(RegionConnection, link), lambda: OpenCache("acme/web/sessions"), bytes)
    link.exchange = exchange
    return exchange, link


async def test_an_exchange_opens_at_the_leader_that_the_first_broker_names_and_leaves_nothing_behind() -> (
    None
):
    exchange, first = made()
    leader = first.following = OneLink()
    exchange.link_up(cast(Any, first))
    exchange.exchange_data(encode_error(elsewhere(), first.sent[0].correlation), end=True)
    assert [error.address for error in first.leads_on] == ["127.0.0.1:7444"] and first.closed == [4]
    assert len(leader.sent) == 1, "asked at once"
    opened(exchange, leader)
    assert exchange.is_open
    # The route changes while the old link stands: what is open there is closed.
    exchange.link_down(elsewhere())
    assert leader.closed == [4] and not exchange.is_open
    exchange.close()


async def test_brokers_that_name_each_other_are_not_asked_in_a_circle() -> None:
    exchange, first = made()
    other = OneLink()
    other.exchange = exchange
    first.following, other.following = other, first
    exchange.link_up(cast(Any, first))
    asked = 0
    while exchange._link is not None and asked < 20:
        at = cast(OneLink, exchange._link)
        asked += 1
        exchange.exchange_data(encode_error(elsewhere(), at.sent[-1].correlation), end=True)
    assert asked == 3, "then it pauses"
    exchange.close()


async def test_what_a_broker_refuses_that_does_not_lead_is_asked_again_and_what_it_may_not_answer_is_not() -> (
    None
):
    exchange, link = made()
    exchange.link_up(cast(Any, link))
    opened(exchange, link)
    call = asyncio.ensure_future(exchange.call(Get(b"k"), again=False))
    await asyncio.sleep(0)
    exchange.exchange_data(encode_error(elsewhere(""), link.sent[-1].correlation), end=False)
    while len(link.sent) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    lease = NotLeaderError("It has no lease.", retry_after_ms=500)
    exchange.exchange_data(encode_error(lease, link.sent[-1].correlation), end=False)
    with pytest.raises(UnavailableError, match="not answered") as unknown:
        await call
    assert (unknown.value.code, unknown.value.retry_after_ms) == (Code.DISCONNECTED, 500)
    exchange.close()
