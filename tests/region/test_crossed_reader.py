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
from region.crossed_reader import CrossedReader

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

    monkeypatch.setattr("region.crossed_reader.crossed_before", slow)
    trail = Trail.open(tmp_path, log_signer(INGRESS_ORIGIN))
    reader = CrossedReader(trail)
    names = [ShardName("us-east", "eu-west", STREAM, shard, STREAM) for shard in range(2)]
    for name in names * 4:
        waiting = asyncio.ensure_future(reader.read(name, LIVES))
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    await until(lambda: begun, "the first read")
    last = [asyncio.ensure_future(reader.read(name, LIVES)) for name in names]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*last)
    assert begun == names
    await reader.close()
    await asyncio.to_thread(trail.close)
