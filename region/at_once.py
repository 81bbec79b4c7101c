"""Some things at once: the same work over many items, a bounded number of them at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def at_once(limit: int, work: Callable[[T], Awaitable[object]], items: Iterable[T]) -> None:
    """`work` on every item, begun in their order, at most `limit` at a time. An error of one keeps none from being worked on; the first
    is raised in the end."""
    waiting = list(items)
    left = iter(waiting)
    errors: list[BaseException] = []

    async def take() -> None:
        for item in left:
            try:
                await work(item)
            except Exception as error:
                errors.append(error)

    if len(waiting) == 1:
        await take()
    else:
        await asyncio.gather(*(take() for _ in range(min(limit, len(waiting)))))
    if errors:
        raise errors[0]
