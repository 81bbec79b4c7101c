"""Reads of a whole log that a bridge can ask for, again and again."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from audit_log import INGRESS_ORIGIN, STREAM, log_signer
from bridge_mesh import until

from audit.crossed import OffsetSet
from audit.position import ShardName
from audit.trail import Trail
from policy.truncation import Live
from region.evidence.crossed_reader import CrossedReader

LIVES = (Live(b"1" * 16, None),)


async def test_whoever_opens_again_and_again_costs_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, begun, go_on = [0], list[ShardName](), threading.Event()

    def slow(leaves: object, name: ShardName, lives: object) -> OffsetSet:
        under_way[0] += 1
        assert under_way[0] == 1
        begun.append(name)
        assert go_on.wait(30)
        under_way[0] -= 1
        return OffsetSet()

    monkeypatch.setattr("region.evidence.crossed_reader.crossed_before", slow)
    trail = Trail.open(tmp_path, log_signer(INGRESS_ORIGIN))
    monkeypatch.setattr("region.evidence.crossed_reader.REST", 0)
    reader = CrossedReader(trail)
    names = [ShardName("us-east", "eu-west", STREAM, shard, STREAM) for shard in range(2)]
    for name in names * 4:
        waiting = asyncio.ensure_future(reader.read("one", name, LIVES))
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    await until(lambda: begun, "the first read")
    last = [asyncio.ensure_future(reader.read("one", name, LIVES)) for name in names]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*last)
    assert begun == names
    await reader.close()
    await asyncio.to_thread(trail.close)


async def test_whoever_asks_for_many_reads_keeps_nobody_else_waiting_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = list[str](), threading.Event()

    def slow(leaves: object, name: ShardName, lives: object) -> OffsetSet:
        begun.append(name.stream)
        assert go_on.wait(30)
        return OffsetSet()

    monkeypatch.setattr("region.evidence.crossed_reader.crossed_before", slow)
    monkeypatch.setattr("region.evidence.crossed_reader.REST", 0)
    trail = Trail.open(tmp_path, log_signer(INGRESS_ORIGIN))
    reader = CrossedReader(trail)
    greedy = [ShardName("us-east", "eu-west", "acme/ops/greedy", shard, STREAM) for shard in range(20)]
    asked = [asyncio.ensure_future(reader.read("one", name, LIVES)) for name in greedy]
    await until(lambda: begun, "the first read")
    other = asyncio.ensure_future(
        reader.read("two", ShardName("us-east", "eu-west", STREAM, 0, STREAM), LIVES)
    )
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(other, *asked)
    assert begun[:2] == ["acme/ops/greedy", STREAM] and len(begun) == 21
    await reader.close()
    await asyncio.to_thread(trail.close)


async def test_a_bridge_rests_longer_than_its_reads_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trail = Trail.open(tmp_path, log_signer(INGRESS_ORIGIN))
    reader, now, slept = CrossedReader(trail), [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def to_thread(run: object) -> OffsetSet:
        now[0] += 2.0
        return OffsetSet()

    monkeypatch.setattr("region.evidence.crossed_reader.asyncio.sleep", sleep)
    monkeypatch.setattr("region.evidence.crossed_reader.asyncio.to_thread", to_thread)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    for shard in range(2):
        await reader.read("one", ShardName("us-east", "eu-west", STREAM, shard, STREAM), LIVES)
    await reader.read("two", ShardName("us-east", "eu-west", STREAM, 0, STREAM), LIVES)
    assert slept == [0.0, 6.0, 0.0]
    monkeypatch.undo()
    await reader.close()
    await asyncio.to_thread(trail.close)
