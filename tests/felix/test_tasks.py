"""Ending tasks that take a cancellation for somebody else's."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import pytest

from felix.tasks import TaskSet, end_tasks


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_task_that_loses_its_first_cancellation_ends_all_the_same() -> None:
    rounds = 0

    async def keeps_on() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            with suppress(asyncio.CancelledError):
                await forever()
            if rounds >= 3:
                await forever()

    task = asyncio.create_task(keeps_on())
    await asyncio.sleep(0)
    await end_tasks(task, again_s=0.01)
    assert task.cancelled() and rounds == 3


async def test_what_a_task_raises_is_logged_and_raised_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise OSError("the disk is gone")

    tasks = [asyncio.create_task(fails(), name="reader"), asyncio.create_task(forever())]
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        await end_tasks(*tasks)
    assert [record.message for record in caplog.records] == ["reader ended with an error"]
    assert tasks[1].cancelled()


async def test_a_cancellation_of_the_caller_is_the_callers() -> None:
    never = asyncio.Event()

    async def stubborn() -> None:
        while not never.is_set():
            with suppress(asyncio.CancelledError):
                await never.wait()

    inner = asyncio.create_task(stubborn())
    outer = asyncio.create_task(end_tasks(inner))
    await asyncio.sleep(0.01)
    outer.cancel()
    await asyncio.wait([outer])
    assert outer.cancelled()
    never.set()
    inner.cancel()
    await asyncio.wait([inner])


async def test_a_set_of_tasks_ends_those_that_begin_while_others_end() -> None:
    tasks, ended = TaskSet(), list[str]()

    async def last() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("last")

    async def first() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("first")
            tasks.begin(last())
            await asyncio.sleep(0)

    tasks.begin(first())
    await asyncio.sleep(0)
    await tasks.end()
    assert ended == ["first", "last"]
    await tasks.end()
