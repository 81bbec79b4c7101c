"""What is done again and again goes on after a failure."""

from __future__ import annotations

import asyncio
import logging

import pytest

from felix.periodic import every
from felix.tasks import end_tasks


async def test_a_turn_that_fails_is_logged_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[int] = []
    over = asyncio.Event()

    async def turn() -> None:
        turns.append(len(turns))
        if len(turns) == 1:
            raise RuntimeError("once")
        over.set()

    log = logging.getLogger("felix.test")
    task = asyncio.ensure_future(every(0.0, turn, "the turn failed", log))
    async with asyncio.timeout(60):
        await over.wait()
    await end_tasks(task)
    assert [record.getMessage() for record in caplog.records if record.name == "felix.test"] == [
        "the turn failed"
    ]
    assert task.cancelled()
