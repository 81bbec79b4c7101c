"""What is opened again when an error of the disk has stopped it."""

from __future__ import annotations

import asyncio
from random import Random

from felix.reopening import REOPEN_MS_MAX, REOPEN_MS_MIN
from felix.runtime.simulated import SimulatedLoop, simulated
from region.log.reopener import Reopener, Tried


def test_tries_come_after_the_pauses_that_were_named_one_at_a_time_until_it_is_open() -> None:
    loop = SimulatedLoop(Random(1))
    runtime = simulated(loop, 1_700_000_000_000)
    outcomes = [*([Tried.FAILED] * 9), Tried.NOT_YET, Tried.OPENED]
    tries: list[tuple[int, int]] = []

    async def attempt(key: str) -> Tried:
        assert key == "orders"
        tries.append((runtime.clock.boot_ms(), reopener.next_pause_s(key)))
        reopener.failed(key)
        return outcomes[len(tries) - 1]

    async def scene() -> None:
        began = runtime.clock.boot_ms()
        reopener.failed("orders")
        reopener.failed("orders")
        assert reopener.is_waiting("orders") and not tries
        await asyncio.sleep(3 * 3_600)
        assert not reopener.is_waiting("orders")
        at = [time - began for time, _ in tries]
        pauses = [later - earlier for earlier, later in zip([0, *at], at, strict=False)]
        wanted = [min(REOPEN_MS_MAX, REOPEN_MS_MIN << n) for n in range(10)]
        assert [round(pause, -2) for pause in pauses] == [*wanted, 100]
        assert [said for _, said in tries[:9]] == [pause // 1_000 for pause in wanted[1:]]
        assert reopener.opened == 1
        await reopener.close()

    reopener: Reopener[str] = Reopener(runtime, attempt)
    loop.run_until_complete(scene())
    loop.close()


def test_what_is_gone_is_not_tried_and_begins_anew_if_it_fails_again() -> None:
    loop = SimulatedLoop(Random(2))
    runtime = simulated(loop, 1_700_000_000_000)
    tries: list[int] = []

    async def attempt(_: str) -> Tried:
        tries.append(runtime.clock.boot_ms())
        return Tried.FAILED if len(tries) < 4 else Tried.OVER

    async def scene() -> None:
        reopener.failed("orders")
        await asyncio.sleep(20)
        assert len(tries) == 2
        await reopener.forget("orders")
        await asyncio.sleep(3_600)
        assert len(tries) == 2 and not reopener.is_waiting("orders")
        began = runtime.clock.boot_ms()
        reopener.failed("orders")
        await asyncio.sleep(3_600)
        assert [round(time - began, -2) for time in tries[2:]] == [REOPEN_MS_MIN, 3 * REOPEN_MS_MIN]
        assert not reopener.is_waiting("orders") and not reopener.opened

    reopener: Reopener[str] = Reopener(runtime, attempt)
    loop.run_until_complete(scene())
    loop.close()
