"""The simulated loop: time that jumps, work that is drawn, processes that end without a word."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from felix.runtime.real import REAL
from felix.runtime.simulated import TO_THREAD_MAX, SimulatedLoop, StalledError, simulated


def run(seed: int, work: Coroutine[Any, Any, Any], loop: SimulatedLoop | None = None) -> Any:
    loop = loop or SimulatedLoop(Random(seed))
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def test_time_stands_still_while_there_is_work_and_jumps_to_the_next_timer() -> None:
    loop = SimulatedLoop(Random(1))
    clock = simulated(loop, 1_000_000).clock

    async def work() -> list[tuple[float, int, int]]:
        found = []
        for wait_s in (0, 3_600.5, 86_400 * 30):
            await asyncio.sleep(wait_s)
            found.append((clock.monotonic(), clock.now_ms(), clock.boot_ms()))
        return found

    times = run(1, work(), loop)
    assert [monotonic for monotonic, _, _ in times] == pytest.approx([0, 3_600.5, 2_595_600.5])
    assert [now for _, now, _ in times] == [1_000_000, 4_600_500, 2_596_600_500]


def test_a_run_in_which_everybody_waits_says_so() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StalledError, match="nothing is ready"):
        run(1, wait())


def test_a_run_in_which_somebody_never_waits_says_so() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110 - it never waits
            await asyncio.sleep(0)

    async def begin_again() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_later(0.0, again)

        again()
        await asyncio.Event().wait()

    for work in (spin(), begin_again()):
        with pytest.raises(StalledError, match="ready for ever"):
            run(1, work)


def test_timers_of_one_moment_run_in_the_order_in_which_they_were_set() -> None:
    async def order() -> list[int]:
        ran: list[int] = []
        at_s = asyncio.get_running_loop().time() + 1.0
        for number in range(20):
            asyncio.get_running_loop().call_at(at_s, ran.append, number)
        await asyncio.sleep(2.0)
        return ran

    assert run(1, order()) == list(range(20))


def test_work_of_several_threads_ends_in_an_order_that_the_seed_says() -> None:
    async def order() -> tuple[int, ...]:
        done: list[int] = []
        await asyncio.gather(*(asyncio.to_thread(done.append, number) for number in range(6)))
        return tuple(done)

    orders = {seed: run(seed, order()) for seed in range(12)}
    assert all(run(seed, order()) == found for seed, found in orders.items())
    assert len({run(seed, times()) for seed in range(12)}) == 12


async def times() -> float:
    await asyncio.to_thread(lambda: None)
    return asyncio.get_running_loop().time()


def test_a_pool_of_one_thread_does_its_work_in_turn_and_gives_back_what_it_raises() -> None:
    for seed in range(6):
        loop = SimulatedLoop(Random(seed))
        pool = simulated(loop, 0).pool(1, "one")
        done: list[int] = []

        async def work(loop: SimulatedLoop = loop, pool: Any = pool, done: list[int] = done) -> None:
            await asyncio.gather(*(loop.run_in_executor(pool, done.append, number) for number in range(9)))
            assert done == list(range(9))
            with pytest.raises(ZeroDivisionError):
                await loop.run_in_executor(pool, lambda: 1 // 0)
            pool.submit(done.append, 9)
            pool.submit(done.append, 10)
            pool.shutdown()
            assert done[9:] == [9, 10], "a shutdown waits for what is queued"

        run(seed, work(), loop)


def test_a_process_that_ends_does_nothing_more() -> None:
    loop = SimulatedLoop(Random(1))
    done: list[str] = []

    async def live(name: str) -> None:
        try:
            while True:
                done.append(name)
                await asyncio.sleep(1)
                asyncio.get_running_loop().call_later(0.1, done.append, f"{name} later")
                await asyncio.to_thread(done.append, f"{name} thread")
        finally:
            done.append(f"{name} cleaned up")

    async def work() -> None:
        for name in ("one", "two"):
            with loop.process(name):
                asyncio.create_task(live(name)).add_done_callback(lambda _: None)
        await asyncio.sleep(1.001)
        loop.end("one")
        before = len(done)
        await asyncio.sleep(3)
        assert "two later" in done and not any("one" in each for each in done[before:])
        with pytest.raises(AssertionError), loop.process("one"):
            pass
        loop.end("two")

    run(1, work(), loop)


def test_the_threads_of_a_process_that_ends_go_with_it() -> None:
    loop = SimulatedLoop(Random(1))

    async def run() -> str:
        for number in range(TO_THREAD_MAX + 1):
            with loop.process(f"crashed {number}"):
                loop.create_task(asyncio.to_thread(str))
            await asyncio.sleep(0)
            loop.end(f"crashed {number}")
        with loop.process("next"):
            return await loop.create_task(asyncio.to_thread(lambda: "done"))

    assert loop.run_until_complete(run()) == "done"
    loop.close()


@pytest.mark.parametrize("kind", ["thread", "simulated"])
def test_a_worker_does_its_steps_until_the_last_one(kind: str) -> None:
    loop = SimulatedLoop(Random(1))
    runtime = REAL if kind == "thread" else simulated(loop, 0)
    done: list[int] = []
    asked = 0

    def step() -> float | None:
        if len(done) < asked:
            done.append(len(done))
        return None if asked < 0 else math.inf

    worker = runtime.worker(step, "counts")
    worker.start()
    for asked in (1, 2, 3):
        worker.wake()
        assert worker.wait(lambda: len(done) == asked, 30)  # noqa: B023 - called before the next round
    assert not worker.wait(lambda: False, 0.01)
    asked = -1
    worker.wake()
    worker.join()
    assert done == [0, 1, 2]
    assert not worker.wait(lambda: False, 30), "nobody waits for a step that does not come"
    loop.close()
