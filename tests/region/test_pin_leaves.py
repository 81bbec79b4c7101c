"""Leaves of pins and of changed keys, which nobody asks for again: they are tried until the audit log takes them."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from audit_log import Link
from document_logs import opened

from audit.position import Positions
from audit.trail import Trail
from felix.storage.memory import MemoryDisk
from region.evidence.document_log import DocumentLog
from region.governance import pin_leaves
from region.governance.pin_leaves import PinLeaves, until_taken

WAIT_S = 30


def writing(trail: Trail, logged: DocumentLog) -> asyncio.Task[bool]:
    link = Link()
    return asyncio.ensure_future(
        until_taken(lambda: logged.append(b"a pin", link.grant), "a pin", trail, lambda: True)
    )


async def until_stopped(trail: Trail) -> None:
    async with asyncio.timeout(WAIT_S):
        while trail.stopped is None:  # noqa: ASYNC110 - what is waited for is not an event
            await asyncio.sleep(0.005)


async def test_a_leaf_is_tried_until_a_log_whose_disk_failed_is_open_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pin_leaves, "AGAIN_S", 0.01)
    disk = MemoryDisk()
    trail, logged = opened(disk)

    def fail(call: str, path: Path) -> None:
        if call == "sync" and path.suffix == ".wal":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    disk.on_call = fail
    taking = writing(trail, logged)
    await until_stopped(trail)
    await asyncio.sleep(0.1)
    assert not taking.done()
    disk.on_call = None
    await asyncio.to_thread(trail.reopen)
    async with asyncio.timeout(WAIT_S):
        assert await taking
    assert trail.status().durable == 1
    await logged.close()
    await asyncio.to_thread(trail.close)


async def test_a_leaf_is_given_up_where_the_log_takes_nothing_before_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trail, logged = opened(MemoryDisk())

    def mistaken(*_: object) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(Positions, "apply", mistaken)
    taking = writing(trail, logged)
    async with asyncio.timeout(WAIT_S):
        assert not await taking
    assert trail.is_over and not trail.may_reopen
    monkeypatch.undo()
    await asyncio.to_thread(trail.close)


async def test_a_broker_that_lost_the_log_as_it_wrote_a_pin_s_leaf_does_not_wait_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing would cross there before a restart: nobody tells it of that leaf, which is another broker's to write now."""
    monkeypatch.setattr(pin_leaves, "AGAIN_S", 0.01)
    disk, home = MemoryDisk(), True
    trail, logged = opened(disk)
    broker: Any = SimpleNamespace(broker_id="b1")
    leaves = PinLeaves(broker, "us-east", "acme", trail, logged, lambda: home)
    monkeypatch.setattr(leaves, "_leaf", lambda pin: Link().grant())

    def fail(call: str, path: Path) -> None:
        if call == "sync" and path.suffix == ".wal":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    disk.on_call = fail
    pin: Any = SimpleNamespace(
        signature=b"signed", encode=lambda: b"a pin", bundle=SimpleNamespace(region="eu-west")
    )
    leaves.log_soon([pin])
    await until_stopped(trail)
    await asyncio.sleep(0.1)
    assert logged.writing_ms(), "it may stand"
    home = False
    await leaves.wait(pin)
    assert not logged.writing_ms()
    disk.on_call = None
    await asyncio.to_thread(trail.close)
