"""All brokers were down, and one of them comes back without its shard's folder, or with that folder as it was earlier, or without a file of it; its
other files are whole. It leads nothing with what is left, and the others go on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from replication.replicated_region import LOGS, NAMES, REGION, SimulatedRegion, play

from felix.errors import RequestError, UnavailableError
from region.cluster.records import ClusterKeys, FrozenRecord, ShardId, encode
from region.metadata.transaction import Delete, Put
from region.replication import host
from region.replication.opening import CopyOpener

LEASES_END_S = 5
"""Twice as long as they hold: whoever comes first is elected at once."""


def folder_of(log: int) -> Path:
    return Path("/data") / f"s0-{log}"


async def some_are_acknowledged(region: SimulatedRegion, number: int) -> None:
    before = region.acknowledged()
    region.append_all_the_time(4)
    await region.until(lambda: region.acknowledged() >= before + number)


def lose_its_folder(region: SimulatedRegion, victim: str) -> None:
    files = region.machines[victim].disk.mount()
    for log in LOGS:
        files.remove_folder(folder_of(log))
    files.sync_folder(Path("/data"))
    region.machines[victim].disk.kill()


async def all_come_back(region: SimulatedRegion, first: str) -> None:
    """The one whose copy is not what it was comes first: it is the only one to be elected for a while."""
    async with asyncio.timeout(120):
        for name in (first, *(name for name in NAMES if name != first)):
            await region.start(name)


async def goes_on(region: SimulatedRegion, victim: str) -> None:
    before = region.acknowledged()
    await region.until(lambda: region.acknowledged() > before + 30)
    await region.no_more_appends()
    await region.well()
    region.check()


@pytest.mark.parametrize("victim", ["a", "c"])
@pytest.mark.parametrize("wait_s", [0, 5])
def test_a_copy_whose_folder_is_gone_leads_nothing_and_is_built_anew(victim: str, wait_s: int) -> None:
    async def scene(region: SimulatedRegion) -> None:
        await some_are_acknowledged(region, 12)
        await asyncio.sleep(wait_s)
        for name in NAMES:
            region.kill(name)
        await asyncio.sleep(LEASES_END_S)
        lose_its_folder(region, victim)
        await all_come_back(region, victim)
        await goes_on(region, victim)

    play(scene, 2)


@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_copy_that_was_put_back_as_it_was_earlier_leads_nothing(victim: str) -> None:
    async def scene(region: SimulatedRegion) -> None:
        await some_are_acknowledged(region, 12)
        await asyncio.sleep(2)
        region.kill(victim)
        files, earlier = region.machines[victim].disk.mount(), {}
        for log in LOGS:
            for name in files.names(folder_of(log)):
                descriptor = files.open(folder_of(log) / name, os.O_RDONLY)
                earlier[folder_of(log) / name] = files.pread(descriptor, files.size(descriptor), 0)
                files.close(descriptor)
        region.machines[victim].disk.kill()
        await region.start(victim)
        before = region.acknowledged()
        await region.until(lambda: region.acknowledged() > before + 60)
        await region.until(lambda: set(region.record(region.shards[0]).isr) == set(NAMES))  # type: ignore[union-attr]
        # What is known to be committed is a second old at most.
        await asyncio.sleep(3)
        for name in NAMES:
            region.kill(name)
        await asyncio.sleep(LEASES_END_S)
        files = region.machines[victim].disk.mount()
        for log in LOGS:
            files.remove_folder(folder_of(log))
            files.make_folder(folder_of(log))
            for path, data in earlier.items():
                if path.parent == folder_of(log):
                    descriptor = files.open(path, os.O_RDWR | os.O_CREAT)
                    files.pwritev(descriptor, [data], 0)
                    files.sync(descriptor)
                    files.close(descriptor)
            files.sync_folder(folder_of(log))
        files.sync_folder(Path("/data"))
        region.machines[victim].disk.kill()
        await all_come_back(region, victim)
        await goes_on(region, victim)

    play(scene, 2)


def test_where_the_word_comes_late_it_gives_up_what_it_was_elected_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CopyOpener, "leave_sets", AsyncMock())
    test_a_copy_whose_folder_is_gone_leads_nothing_and_is_built_anew("a", 0)


def test_in_a_frozen_region_it_is_refused_and_comes_back_once_the_region_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[UnavailableError] = []
    leave_sets = CopyOpener.leave_sets

    async def noted(opener: CopyOpener, shard: ShardId, *, if_alone: bool) -> None:
        try:
            await leave_sets(opener, shard, if_alone=if_alone)
        except UnavailableError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(CopyOpener, "leave_sets", noted)

    async def scene(region: SimulatedRegion) -> None:
        await some_are_acknowledged(region, 12)
        for name in NAMES:
            region.kill(name)
        await asyncio.sleep(LEASES_END_S)
        lose_its_folder(region, "a")
        key = ClusterKeys(REGION).frozen
        await region.store.transact([], [Put(key, encode(FrozenRecord("b", "the store went back"), key))])
        back = asyncio.ensure_future(all_come_back(region, "a"))
        await region.until(lambda: refused)
        await region.store.transact([], [Delete(key)])
        await back
        await goes_on(region, "a")

    play(scene, 2)
    assert "the region is frozen" in refused[0].sentence


def test_without_the_rule_an_empty_copy_is_elected_and_cuts_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A twin."""
    monkeypatch.setattr(host, "what_is_lost", lambda *_: "")
    with pytest.raises(RequestError, match="leaves a gap: 0 is next"):
        test_a_copy_whose_folder_is_gone_leads_nothing_and_is_built_anew("a", 0)
