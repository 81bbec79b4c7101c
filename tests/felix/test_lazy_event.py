"""felix.lazy_event: waiting is as with asyncio's own event, and nothing is held while nobody waits."""

from __future__ import annotations

import asyncio

from felix.lazy_event import LazyEvent


async def test_one_that_is_set_is_not_waited_for() -> None:
    event = LazyEvent(is_set=True)
    await event.wait()
    assert event.is_set() and event._waited_for is None


async def test_all_who_wait_are_woken_though_it_is_cleared_at_once() -> None:
    event = LazyEvent()
    waiting = [asyncio.ensure_future(event.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    event.set()
    event.clear()
    later = asyncio.ensure_future(event.wait())
    await asyncio.gather(*waiting)
    assert not later.done() and not event.is_set()
    event.set()
    await later
    assert event._waited_for is None


async def test_one_who_gives_up_takes_nobody_else_along() -> None:
    event = LazyEvent()
    first, second = (asyncio.ensure_future(event.wait()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not second.done()
    event.set()
    await second
