"""The publisher of the synchronous client keeps the order of its records, whoever hands them over: the linger, or the caller."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pytest

from felix.batch import NewRecord
from felix.blocking import Background, GatheringPublisher
from felix.errors import RequestError, UnavailableError


class Full:
    """What stands in the place of a publisher: `room` says when it takes the next record."""

    is_over = False

    def __init__(self) -> None:
        self.room = asyncio.Event()
        self.waits = threading.Event()
        self.given: list[bytes] = []
        self.wrong: dict[bytes, Exception] = {}

    async def _check(self) -> None:
        pass

    async def _give(self, payload: bytes, key: Any, headers: Any) -> None:
        self.waits.set()
        await self.room.wait()
        if payload in self.wrong:
            raise self.wrong[payload]
        self.given.append(payload)
        await asyncio.sleep(0)

    async def publish(self, payload: bytes, *more: Any, **options: Any) -> int:
        await self._give(payload, None, None)
        return len(self.given)

    async def publish_many(self, payloads: list[bytes], keys: Any) -> list[int]:
        return [await self.publish(payload) for payload in payloads]

    async def publish_batch(self, records: list[NewRecord], shard: Any, *, expected_offset: Any) -> None:
        for record in records:
            await self._give(record.payload, None, None)

    async def flush(self) -> None:
        pass

    close = flush


@contextmanager
def gathering(
    *, linger_ms: float, batch_records: int, has_room: bool = True
) -> Iterator[tuple[Background, Full, Any]]:
    """What collects, over what stands in the place of a publisher. `has_room`: whether that takes records from the beginning."""
    background, inner = Background(), Full()
    if has_room:
        background.loop.call_soon_threadsafe(inner.room.set)
    try:
        yield (
            background,
            inner,
            GatheringPublisher(
                background,
                inner,  # type: ignore[arg-type]
                linger_ms=linger_ms,
                batch_bytes=1 << 20,
                batch_records=batch_records,
            ),
        )
    finally:
        background.stop()


@pytest.mark.parametrize("end", ["flush", "close", "full"])
def test_records_that_the_linger_hands_over_stay_before_those_of_the_next_batch(end: str) -> None:
    with gathering(linger_ms=1, batch_records=100, has_room=False) as (background, inner, made):
        for number in range(50):
            made.send(b"%d" % number)
        assert inner.waits.wait(60), "the linger has ended, and there is no room"
        last = threading.Thread(target=lambda: made.send(b"last") if end == "full" else getattr(made, end)())
        for number in range(50, 149):
            made.send(b"%d" % number)
        last.start()
        background.loop.call_soon_threadsafe(inner.room.set)
        last.join(60)
        assert inner.given[:149] == [b"%d" % number for number in range(149)], (
            "and all of it is given by then"
        )


@pytest.mark.parametrize("how", ["publish", "publish_many", "publish_batch"])
def test_what_is_published_behind_what_is_collected_stands_behind_it(how: str) -> None:
    with gathering(linger_ms=0, batch_records=100) as (_, inner, made):
        last: dict[str, Any] = {
            "publish": b"last", "publish_many": [b"last"], "publish_batch": [NewRecord(b"last")]
        }  # fmt: skip
        made.send(b"0")
        made.send(b"1")
        getattr(made, how)(last[how])
        assert inner.given == [b"0", b"1", b"last"]


def test_a_record_that_made_a_batch_full_is_not_given_where_an_earlier_error_is_raised_although_the_linger_ends() -> (
    None
):
    with gathering(linger_ms=1, batch_records=3) as (_, inner, made):
        error = UnavailableError("It was given up.")

        async def check() -> None:
            # Long enough for the linger to end, and to hand over what it finds.
            await asyncio.sleep(0.05)
            raise error

        inner._check = check  # type: ignore[method-assign]
        made.send(b"0")
        made.send(b"1")
        with pytest.raises(UnavailableError, match="given up"):
            made.send(b"2")
        made.flush()
        assert inner.given == [b"0", b"1"]


def interrupted(background: Background, call: Callable[[], Any]) -> None:
    """The call, in a thread that Ctrl-C interrupts while it waits (Background.call)."""
    waiting: list[Any] = []
    run, is_begun = asyncio.run_coroutine_threadsafe, threading.Event()

    def begun(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        waiting.append(run(work, loop))
        is_begun.set()
        return waiting[0]

    asyncio.run_coroutine_threadsafe = begun  # type: ignore[assignment]
    try:
        thread = threading.Thread(target=lambda: _cancelled(call))
        thread.start()
        assert is_begun.wait(60)
    finally:
        asyncio.run_coroutine_threadsafe = run
    # What was asked is under way.
    background.run(lambda: None)
    waiting[0].cancel()
    thread.join(60)
    background.run(lambda: None)


def _cancelled(call: Callable[[], Any]) -> None:
    with pytest.raises(CancelledError):
        call()


@pytest.mark.parametrize("how", ["flush", "close", "publish", "send"])
def test_what_is_collected_is_given_although_the_caller_is_interrupted_while_it_waits(how: str) -> None:
    with gathering(linger_ms=0, batch_records=51, has_room=False) as (background, inner, made):
        for number in range(50):
            made.send(b"%d" % number)
        last = [b"last"] if how in ("publish", "send") else []
        interrupted(background, lambda: getattr(made, how)(*last))
        made.send(b"50")
        background.loop.call_soon_threadsafe(inner.room.set)
        made.flush()
        assert inner.given == [b"%d" % number for number in range(51)], "and what was interrupted is not"


def test_an_error_is_not_lost_where_who_would_be_told_it_is_interrupted() -> None:
    with gathering(linger_ms=1, batch_records=100) as (background, inner, made):
        inner.wrong[b"0"] = RequestError("It cannot be.")
        acknowledged = asyncio.Event()

        async def flush() -> None:
            await acknowledged.wait()

        inner.flush = flush  # type: ignore[method-assign]
        made.send(b"0")
        interrupted(background, made.flush)
        background.loop.call_soon_threadsafe(acknowledged.set)
        with pytest.raises(RequestError, match="cannot be"):
            made.flush()
        made.flush()


@pytest.mark.parametrize("error", [RequestError("It cannot be."), TypeError("a header that is no bytes")])
@pytest.mark.parametrize("linger_ms", [0, 50])
def test_a_record_that_cannot_be_takes_none_along(error: Exception, linger_ms: int) -> None:
    with gathering(linger_ms=linger_ms, batch_records=10) as (_, inner, made):
        inner.wrong[b"3"] = error
        raised = 0
        for number in range(30):
            try:
                made.send(b"%d" % number)
            except type(error):
                raised += 1
                made.send(b"%d" % number)
        try:
            made.flush()
        except type(error):
            raised += 1
        assert raised == 1 and inner.given == [b"%d" % number for number in range(30) if number != 3]


def test_what_stays_collected_behind_a_record_that_cannot_be_lingers_no_longer() -> None:
    with gathering(linger_ms=60_000, batch_records=10) as (_, inner, made):
        inner.wrong[b"3"] = RequestError("It cannot be.")
        for number in range(9):
            made.send(b"%d" % number)
        made._linger_s = 0.001
        with pytest.raises(RequestError, match="cannot be"):
            made.send(b"9")
        for _ in range(6_000):
            if len(inner.given) == 8:
                break
            threading.Event().wait(0.01)
        assert inner.given == [b"%d" % number for number in range(9) if number != 3]


def test_what_is_given_up_has_ended_once_the_thread_stops() -> None:
    """As where Ctrl-C comes while it connects: a task that is left behind is a warning on the terminal."""
    background = Background()
    ended = threading.Event()

    async def connect() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            ended.set()

    waiting = asyncio.run_coroutine_threadsafe(connect(), background.loop)
    background.run(lambda: None)
    waiting.cancel()
    background.stop()
    assert ended.is_set() and not background.is_alive


@pytest.mark.parametrize("when", ["as it comes", "once it has come"])
def test_what_comes_as_the_caller_is_interrupted_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    background = Background()
    heard: list[str] = []
    goes_on = threading.Event()

    async def take() -> str:
        if when == "as it comes":
            # The cancellation comes in the event loop iteration in which it ends.
            asyncio.get_running_loop().call_soon(goes_on.set)
        return "record"

    def interrupted(future: Any, timeout: float | None = None) -> Any:
        if when == "once it has come":
            concurrent.futures.wait([future])
        raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(concurrent.futures.Future, "result", interrupted)
            background.call(take(), unheard=heard.append)
        background.run(lambda: None)
        # Where it had not begun, it is cancelled and gives nothing.
        assert heard == ["record"] or (when == "as it comes" and not goes_on.is_set())
    finally:
        background.stop()
