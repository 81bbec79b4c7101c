"""felix.lazy_event: waiting is as with asyncio's own event, and nothing is held while nobody waits."""

from __future__ import annotations

import asyncio
import threading

from felix.lazy_event import LazyEvent, LazyThreadEvent


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


def test_threads_that_wait_are_woken_and_those_that_come_later_do_not_wait() -> None:
    event = LazyThreadEvent()
    assert not event.wait(0.0) and not event.is_set()
    woken = list[bool]()
    threads = [threading.Thread(target=lambda: woken.append(event.wait(30.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    event.set()
    for thread in threads:
        thread.join()
    assert woken == [True] * 3 and event.wait(30.0) and event.is_set() and event._waited_for is None
