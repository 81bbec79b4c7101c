"""Documents whose leaves wait for room on the disk of the audit log."""

from __future__ import annotations

import asyncio

import pytest
from audit_log import Link
from document_logs import opened

from audit.errors import AuditUnavailableError
from felix.storage.memory import MemoryDisk

WAIT_S = 30


async def test_a_document_that_waits_for_room_keeps_nobody_from_closing_and_no_other_waiting() -> None:
    disk, link = MemoryDisk(), Link()
    trail, logged = opened(disk)
    assert await logged.append(b"first", link.grant)
    await asyncio.to_thread(trail.publish)
    disk.room_bytes = 100
    async with asyncio.timeout(WAIT_S):
        waiting = asyncio.create_task(logged.append(b"second", link.grant))
        while trail.failure is None:  # noqa: ASYNC110 - what is waited for is not an event
            await asyncio.sleep(0.005)
        with pytest.raises(AuditUnavailableError, match="waits for room"):
            await logged.append(b"third", link.grant)
        assert not await logged.append(b"first", link.grant), "it stands"
        closing = asyncio.create_task(logged.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        trail.end_waiting()
        await closing
        with pytest.raises(AuditUnavailableError):
            await waiting
    await asyncio.to_thread(trail.close)
    disk.room_bytes = 1 << 30
    trail, logged = opened(disk)
    assert trail.status().size == 1
    assert await logged.append(b"second", link.grant)
    await logged.close()
    await asyncio.to_thread(trail.close)
