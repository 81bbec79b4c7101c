"""Late news for tests, to find those that take what one broker has changed for what another one knows already: `make test SLOW_NEWS=300`.

What etcd tells its watchers comes later, in the processes that run tests (conftest.py) and in commands that are forked (warm/server.py).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

SLOW_NEWS_MS = "TESTS_SLOW_NEWS_MS"
"""By how many milliseconds a change that is watched for is heard of later at most, a third of it at least. Without FELIX_, as slow_disk.SLOW_DISK_MS is."""


def hear_late() -> None:
    """Let watches in this process, and in what it forks, bring what they bring later, where that is asked for."""
    most_s = float(os.environ.get(SLOW_NEWS_MS) or 0) / 1000
    if most_s:
        from region.metadata.etcd import EtcdStore

        EtcdStore._watch = _later(EtcdStore._watch, most_s)  # type: ignore[method-assign]


def _later(watch: Callable[..., AsyncGenerator[Any, None]], most_s: float) -> Callable[..., Any]:
    chance = random.Random()

    async def watched_later(*arguments: Any) -> AsyncGenerator[Any, None]:
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()

        async def listen() -> None:
            async with aclosing(watch(*arguments)) as changes:
                async for change in changes:
                    heard.put_nowait((loop.time() + chance.uniform(most_s / 3, most_s), change))

        listening = loop.create_task(listen())
        listening.add_done_callback(lambda _: heard.put_nowait((0, None)))
        try:
            while True:
                due, change = await heard.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if change is None:
                    await listening
                    return
                yield change
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    return watched_later
