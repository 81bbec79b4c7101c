"""Streams' leaders as brokers name them: what is attached follows, and comes back when a leader is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from region_peer import until

from felix import routing
from felix.backoff import Backoff, BackoffPolicy
from felix.errors import FelixError, NotLeaderError, UnavailableError
from felix.names import StreamName
from felix.routing import Routes
from felix.runtime.real import REAL

ORDERS = StreamName.parse("acme/payments/orders")
FIRST, SECOND, THIRD = "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"


class Attached:
    """Counts how often it lost its link."""

    def __init__(self) -> None:
        self.downs = 0

    def link_down(self, error: FelixError) -> None:
        self.downs += 1


class Connection:
    """A connection that opens as soon as it is let."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.attached: list[Attached] = []
        self.may_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_closed = False

    def join(self, attachment: Attached) -> None:
        self.attached.append(attachment)

    def part(self, attachment: Attached) -> None:
        if attachment in self.attached:
            self.attached.remove(attachment)

    async def open(self) -> None:
        await self.may_open

    async def close(self) -> None:
        self.is_closed = True


class Client:
    """Routes of one client whose first connection is at FIRST."""

    def __init__(self) -> None:
        self.first = Connection(FIRST)
        self.here = FIRST
        self.made: list[Connection] = []
        self.routes = Routes[Attached](
            self.first, self._connect, BackoffPolicy(first_ms=1, ceiling_ms=1), REAL, lambda: self.here,
            known=[FIRST, SECOND, THIRD],
        )  # fmt: skip

    def _connect(self, address: str) -> Connection:
        self.made.append(Connection(address))
        return self.made[-1]

    def attached(self) -> Attached:
        found = Attached()
        self.routes.attach(found, ORDERS)
        return found

    def where(self, attachment: Attached) -> list[str]:
        return [each.address for each in (self.first, *self.made) if attachment in each.attached]


def led_by(address: str, epoch: int = 1, stream: str = str(ORDERS)) -> NotLeaderError:
    return NotLeaderError("Another leads.", stream=stream, leader="b", address=address, epoch=epoch)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made = Client()
    yield made
    await made.routes.close()


async def test_what_lives_on_a_stream_moves_to_its_leader_and_what_comes_later_begins_there(
    client: Client,
) -> None:
    before = client.attached()
    assert client.where(before) == [FIRST]
    client.routes.learned(led_by(SECOND), FIRST)
    assert client.where(before) == [SECOND] and before.downs == 1
    assert client.where(client.attached()) == [SECOND]
    client.routes.learned(led_by(SECOND), FIRST)
    assert before.downs == 1 and len(client.made) == 1


async def test_other_streams_stay_where_they_are(client: Client) -> None:
    held = client.attached()
    client.routes.learned(led_by(SECOND, stream="acme/payments/refunds"), FIRST)
    assert client.where(held) == [FIRST] and held.downs == 0


async def test_a_broker_that_has_not_heard_of_an_election_leads_nobody_back(client: Client) -> None:
    held = client.attached()
    client.routes.learned(led_by(SECOND, epoch=2), FIRST)
    client.routes.learned(led_by(THIRD, epoch=1), FIRST)
    assert client.where(held) == [SECOND]


async def test_the_supposed_leader_itself_is_believed_whatever_the_epoch(client: Client) -> None:
    held = client.attached()
    client.routes.learned(led_by(SECOND, epoch=5), FIRST)
    client.routes.learned(led_by(THIRD, epoch=1), SECOND)
    assert client.where(held) == [THIRD]


async def test_a_leader_where_the_first_connection_is_needs_no_other(client: Client) -> None:
    held = client.attached()
    client.routes.learned(led_by(SECOND), FIRST)
    client.routes.learned(led_by(FIRST, epoch=2), SECOND)
    assert client.where(held) == [FIRST] and len(client.made) == 1


async def test_a_broker_that_names_nobody_for_a_while_is_left_for_the_profiles_next(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = client.attached()
    client.routes.learned(led_by(""), FIRST)
    assert client.where(held) == [FIRST], "an election may be under way"
    monkeypatch.setattr(routing, "ELSEWHERE_S", 0.0)
    client.routes.learned(led_by(""), FIRST)
    assert client.where(held) == [SECOND] and held.downs == 1
    client.routes.learned(led_by(""), SECOND)
    assert client.where(held) == [THIRD]
    client.routes.learned(led_by(""), THIRD)
    assert client.where(held) == [FIRST], "round and round"
    client.routes.learned(led_by(THIRD), FIRST)
    assert client.where(held) == [THIRD]


async def test_a_broker_that_names_one_who_does_not_answer_is_left_too(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "ELSEWHERE_S", 0.0)
    held = client.attached()
    client.routes.learned(led_by(SECOND), FIRST)
    client.routes._pauses.put(
        SECOND, (asyncio.get_running_loop().time() + 60, Backoff(BackoffPolicy(), REAL.random))
    )
    client.routes.lost(SECOND, client.made[0])
    client.routes._pauses.put(
        SECOND, (asyncio.get_running_loop().time() + 60, Backoff(BackoffPolicy(), REAL.random))
    )
    for _ in range(2):
        client.routes.learned(led_by(SECOND), FIRST)
    assert client.where(held) == [THIRD]


@pytest.mark.parametrize("was_open", [True, False])
async def test_what_loses_its_leader_asks_over_the_first_connection_and_may_come_back(
    client: Client, was_open: bool
) -> None:
    held = client.attached()
    client.routes.learned(led_by(SECOND), FIRST)
    lost = client.made[0]
    if was_open:
        lost.may_open.set_result(None)
        await asyncio.sleep(0)
        client.routes.lost(SECOND, lost)
    else:
        lost.may_open.set_exception(UnavailableError("Nobody listens."))
    await until(lambda: lost.is_closed)
    assert client.where(held) == [FIRST]

    def again() -> bool:
        # Not at once: an address that did not answer is left alone for a moment.
        client.routes.learned(led_by(SECOND), FIRST)
        if len(client.made) > 1 and not client.made[1].may_open.done():
            assert client.where(held) == [FIRST], "nobody waits for one who may be gone"
            client.made[1].may_open.set_result(None)
        return client.where(held) == [SECOND]

    await until(again)
    client.routes.lost(SECOND, lost)
    assert client.where(held) == [SECOND], "an old connection's end is none of the new one"


async def test_nobody_waits_at_the_first_connection_for_the_broker_that_fell_silent_on_another(
    client: Client,
) -> None:
    held = client.attached()
    client.routes.learned(led_by(SECOND), FIRST)
    client.made[0].may_open.set_result(None)
    client.here = SECOND
    await asyncio.sleep(0)
    client.routes.lost(SECOND, client.made[0])
    assert client.where(held) == [THIRD] and held.downs == 2


async def called_again(client: Client) -> Attached:
    """What is led by a broker that does not answer, and is called again. What asks it."""
    held = client.attached()
    client.routes.learned(led_by(SECOND), FIRST)
    client.made[0].may_open.set_exception(UnavailableError("Nobody listens."))
    await until(lambda: client.made[0].is_closed)

    def is_called() -> bool:
        client.routes.learned(led_by(SECOND), FIRST)
        return len(client.made) == 2

    await until(is_called)
    return held


async def test_who_answers_again_is_gone_to_at_once(client: Client) -> None:
    held = await called_again(client)
    assert client.where(held) == [FIRST], "who asks others meanwhile"
    client.made[1].may_open.set_result(None)
    await until(lambda: client.where(held) == [SECOND])


async def test_nobody_waits_for_long_at_an_address_that_was_never_called_before(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "ANSWER_S", 0.0)
    held, late = client.attached(), client.attached()
    client.routes.learned(led_by(SECOND), FIRST)
    assert client.where(held) == [SECOND]
    await until(lambda: client.where(held) == client.where(late) == [FIRST])
    client.routes.learned(led_by(SECOND), FIRST)
    assert client.where(held) == [FIRST] and len(client.made) == 1, "it is being called"
    client.routes.learned(led_by(THIRD, epoch=2), FIRST)
    assert client.where(held) == [THIRD], "whoever was elected meanwhile is heard of"
    client.made[1].may_open.set_result(None)
    client.routes.learned(led_by(SECOND, epoch=3), THIRD)
    await until(lambda: client.where(held) == [FIRST] or client.where(held) == [THIRD])
    client.made[0].may_open.set_result(None)
    await until(lambda: client.where(held) == client.where(late) == [SECOND])


async def test_who_is_elected_anew_is_called_at_once_however_long_it_did_not_answer(client: Client) -> None:
    held = client.attached()
    client.routes.learned(led_by(SECOND), FIRST)
    client.made[0].may_open.set_exception(UnavailableError("Nobody listens."))
    await until(lambda: client.made[0].is_closed)
    later = asyncio.get_running_loop().time() + 3_600
    client.routes._pauses.put(SECOND, (later, Backoff(BackoffPolicy(), REAL.random)))
    client.routes.learned(led_by(SECOND), FIRST)
    assert len(client.made) == 1
    client.routes.learned(led_by(SECOND, epoch=2), FIRST)
    client.made[1].may_open.set_result(None)
    await until(lambda: client.where(held) == [SECOND])


async def test_who_was_named_long_ago_takes_nobody_from_where_they_are_served(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await called_again(client)
    monkeypatch.setattr(routing, "FORGOTTEN_S", -1.0)
    client.made[1].may_open.set_result(None)
    await until(lambda: client.routes.at(SECOND) is client.made[1])
    assert client.where(held) == [FIRST]
    client.routes.learned(led_by(SECOND), FIRST)
    assert client.where(held) == [SECOND], "it was told so again"


async def test_what_is_detached_moves_no_more(client: Client) -> None:
    held = client.attached()
    client.routes.detach(held)
    client.routes.learned(led_by(SECOND), FIRST)
    assert client.where(held) == [] and held.downs == 0


@pytest.mark.parametrize(
    ("stream", "address"), [("no stream", SECOND), (str(ORDERS), ""), (str(ORDERS), "127.0.0.1:0")]
)
async def test_a_word_that_names_no_stream_or_no_address_changes_nothing(
    client: Client, stream: str, address: str
) -> None:
    held = client.attached()
    client.routes.learned(led_by(address, stream=stream), FIRST)
    assert client.where(held) == [FIRST] and not client.made
