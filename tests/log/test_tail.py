"""Followers of a tail are told together, once, and none keeps another waiting."""

from __future__ import annotations

import asyncio

from region.log.tail import Tail


async def test_followers_are_told_once_however_often_it_is_asked_for_and_until_they_leave() -> None:
    told: list[str] = []
    failed: list[str] = []
    tail = Tail(asyncio.get_running_loop(), lambda what, error: failed.append(f"{what}: {error}"))

    def wrong() -> None:
        raise ValueError("mine")

    ends = [tail.follow(wrong), tail.follow(lambda: told.append("a")), tail.follow(lambda: told.append("b"))]
    tail.wake_soon()
    tail.wake_soon()
    assert not told
    await asyncio.sleep(0)
    assert told == ["a", "b"] and failed == ["A follower of the tail failed: mine"]
    ends[1]()
    ends[1]()
    tail.wake()
    assert told == ["a", "b", "b"]
