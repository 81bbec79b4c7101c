"""What is held, told and reported of links: of thousands that do not run little, and what did not change once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bridge.ledger import Ledger
from bridge.link_table import RESTING_S, LinkTable
from bridge.link_worker import LinkWorker
from bridge.plan import STEP_ROWS, Plan, PlannedLink, Verdict
from felix.messages import ShardState, StreamState
from felix.names import SpiffeId
from felix.settings import Durability, Retention

BRIDGE = SpiffeId.parse("spiffe://us-east.acme/bridge/us-to-eu")
GRANT = "g-aaaaaaaaaaaaaaaa"
EXPORT: Any = object()


def name(number: int) -> str:
    return f"acme/ops/s{number:03}"


def shards(stream: str, running: int, count: int, reason: str = "It waits.") -> tuple[PlannedLink, ...]:
    """A stream's rows, of which the first ones run."""
    return tuple(
        PlannedLink(
            GRANT, stream, shard, count, "eu-west", stream,
            *((Verdict.RUN, "") if shard < running else (Verdict.WAIT, reason)), 0, EXPORT,
        )
        for shard in range(count)
    )  # fmt: skip


def planned(*rows: tuple[PlannedLink, ...]) -> Plan:
    return {(each[0].grant, each[0].stream): each for each in rows}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> LinkTable:
    async def run(self: LinkWorker) -> None:
        while not self.is_leaving:
            self._planned.clear()
            await self._planned.wait()

    monkeypatch.setattr(LinkWorker, "run", run)
    runtime: Any = SimpleNamespace(clock=clock, random=None)
    context: Any = SimpleNamespace(
        bridge=BRIDGE,
        source=SimpleNamespace(region="us-east"),
        runtime=runtime,
        ledger=Ledger(),
        notice=lambda: "",
        clock_ms=lambda: 0,
    )
    return LinkTable(context, {})


async def ended(table: LinkTable) -> None:
    for worker in table.workers:
        worker.leave()
    await asyncio.gather(*table.running)


async def test_only_links_that_were_to_run_have_a_worker(table: LinkTable) -> None:
    rows = shards(name(1), 2, 200)
    state = ShardState(0, 0, 7, 7, 1)
    stream = StreamState(name(1), b"i" * 16, 200, Durability(), Retention(), 0, 0, [state] * 200)
    await table.tell(planned(rows), {name(1): stream})
    assert len(table.workers) == 2
    states = [state for state, _ in table.states()]
    assert [(each.shard, each.high_watermark) for each in states] == [(shard, 7) for shard in range(200)]
    assert {each.reason for each in states[2:]} == {"It waits."}
    assert table.counts() == (0, 200)
    assert table.find(GRANT, name(1), 1) is table.workers[1].stats
    assert table.find(GRANT, name(1), 199) is not None and table.find(GRANT, name(1), 200) is None
    await ended(table)


async def test_what_nobody_knows_of_a_link_is_not_said_to_be_nothing(table: LinkTable) -> None:
    """Under a pattern leaders are asked for the shards of links that run: of the others the stream alone is known, and may have any number of records."""
    state = ShardState(0, 3, 7, 7, 1)
    stream = StreamState(name(1), b"i" * 16, 3, Durability(), Retention(), 0, 0)
    await table.tell(planned(shards(name(1), 1, 3)), {name(1): stream})

    def said() -> list[tuple[int, int, int]]:
        return [(each.position, each.high_watermark, each.lag_records) for each, _ in table.states()]

    assert said() == [(-1, -1, -1)] * 3
    table.hear(msgspec.structs.replace(stream, state=[state] * 3))
    # It has not opened, so where the destination stands is not known.
    assert said() == [(-1, 7, -1), (-1, -1, -1), (-1, -1, -1)]
    await ended(table)


async def test_what_did_not_change_of_links_that_rest_is_reported_now_and_then(
    table: LinkTable, clock: Clock
) -> None:
    first, second = shards(name(1), 2, 100), shards(name(2), 0, 50)

    def reported(*, anew: bool = False) -> list[tuple[str, int]]:
        return [(each.stream, each.shard) for each in table.reports(anew=anew)]

    running = [(name(1), 0), (name(1), 1)]
    await table.tell(planned(first, second), {})
    assert len(reported(anew=True)) == 150
    assert reported() == running
    await table.tell(planned(first, shards(name(2), 0, 50, "It waits for something else.")), {})
    assert reported() == [*running, *((name(2), shard) for shard in range(50))]
    assert reported() == running
    assert len(reported(anew=True)) == 150, "a broker that began anew knows nothing"
    clock.now_s += RESTING_S
    assert len(reported()) == 150 and reported() == running
    await ended(table)


async def test_links_that_run_are_reported_however_many_others_there_are(
    table: LinkTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region shows so many links of one agent, and those that were reported last."""
    monkeypatch.setattr("bridge.link_table.REPORTED_MAX", 60)
    await table.tell(planned(shards(name(1), 0, 100), shards(name(9), 2, 2)), {})
    shown: dict[tuple[str, int], None] = {}
    for anew in (True, False, False):
        part = [(each.stream, each.shard) for each in table.reports(anew=anew)]
        assert part[:2] == [(name(9), 0), (name(9), 1)] and len(part) <= 60
        for each in part:
            shown.pop(each, None)
            shown[each] = None
        assert {(name(9), 0), (name(9), 1)} <= set(list(shown)[-60:])
    await ended(table)


async def test_a_link_that_is_back_while_it_ends_begins_in_a_later_round(table: LinkTable) -> None:
    plan = planned(shards(name(1), 2, 2))
    await table.tell(plan, {})
    before = table.workers
    await table.tell({}, {})
    assert all(worker.is_leaving for worker in before)
    await table.tell(plan, {})
    assert table.workers == before, "one worker of a link at a time"
    await asyncio.gather(*table.running)
    await table.tell(plan, {})
    assert len(table.workers) == 2 and not set(table.workers) & set(before)
    # A stream that is made anew with fewer shards.
    await table.tell(planned(shards(name(1), 1, 1)), {})
    assert sorted(worker.is_leaving for worker in table.workers) == [False, True]
    await ended(table)


async def test_a_link_that_was_held_back_hears_of_the_next_plan_though_it_says_what_the_one_before_did(
    table: LinkTable,
) -> None:
    """A pause was taken back before a plan was made of it."""
    plan = planned(shards(name(1), 1, 1))
    await table.tell(plan, {})
    table.hold_back(lambda row: row._replace(verdict=Verdict.PAUSE, reason="It is paused."))
    assert [worker.row.verdict for worker in table.workers] == [Verdict.PAUSE]
    await table.tell(plan, {})
    assert [worker.row.verdict for worker in table.workers] == [Verdict.RUN]
    table.hold_back(lambda row: None)
    await ended(table)


async def test_others_have_their_turn_while_a_plan_is_told(table: LinkTable) -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.ensure_future(take_turns())
    rows = [shards(name(number), 0, 256) for number in range(20)]
    await table.tell(planned(*rows), {})
    other.cancel()
    assert turns >= 20 * 256 // STEP_ROWS - 1
