"""Plays sequences side by side, each within its time."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from pathlib import Path
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from ordinary import key_changes, log_key_changes, restores
from ordinary.evidence import findings
from ordinary.several import OF_SEVERAL, Several
from ordinary.world import STEPS, Operation, World

OPERATIONS: Final[dict[Operation, float]] = {
    World.create: 2, World.delete: 1.5, World.publish: 9, World.settle: 5, World.allow: 4, World.accept: 1, World.approve: 1.5,
    World.accept_again: 1, World.allow_again: 0.7, World.change_policy: 0.7, World.renew: 2.5, World.pause: 1, World.resume: 1.5, World.revoke: 1, World.resend: 2, World.accept_truncation: 4,
    World.deny: 0.7, World.lift: 1.5, World.restart_broker: 1, World.restart_agent: 1, World.renew_identity: 0.5,
    restores.back_up: 1.2, restores.back_up_agent: 0.6, restores.restore_streams: 2, restores.restore_metadata: 0.7,
    restores.restore_audit_log: 0.7, restores.restore_broker: 0.7, restores.restore_agent: 0.7, restores.replace_bridge: 0.3,
    restores.replace_region: 0.2, restores.copy_log: 0.7, restores.restore_copy: 1.4, key_changes.change_signing_keys_: 1,
    log_key_changes.change_log_keys_: 2, log_key_changes.change_witness_key_: 0.5,
}  # fmt: skip
"""What may be done in a step, and how often beside the others; one that finds nothing to do is drawn again."""
SEVERAL: Final[dict[Operation, float]] = {
    **{operation: weight / 2 for operation, weight in OPERATIONS.items()},
    World.publish: 9, World.settle: 5,
    **cast("dict[Operation, float]", {**OF_SEVERAL, log_key_changes.change_copied_log_keys: 2}),
}  # fmt: skip
"""The same where regions have several brokers: half of what is done is done to those."""
STEP_S: Final = 300.0
"""A step takes less than a second on a quiet machine, and the start or the end a few. At the lowest priority beside twenty other processes whole
sequences took five minutes, so the limit is on the time without a step."""
END_S: Final = 30.0
"""How long one that does not go on may take to be cancelled, and how long the loop may stand still besides."""

_PLAYING: ContextVar[int] = ContextVar("seed", default=0)


async def play_all(
    seeds: list[int],
    home: Path,
    at_once: int,
    tell: Callable[[World, list[str]], Awaitable[None]],
    make: type[World] = World,
    steps: int = STEPS,
) -> None:
    """Play sequences side by side; `tell` hears of each as it ends, with what it left that does not hold."""
    gate = asyncio.Semaphore(at_once)
    seed_of = _follow_tasks()

    async def one(seed: int) -> None:
        async with gate:
            world = make(home / str(seed), seed)
            await tell(world, await _play(world, seed_of, steps))

    async with asyncio.TaskGroup() as group:
        for seed in seeds:
            group.create_task(one(seed))


async def _play(world: World, seed_of: WeakKeyDictionary[asyncio.Task[Any], int], steps: int) -> list[str]:
    _PLAYING.set(world.number)
    task = asyncio.create_task(world.play(SEVERAL if isinstance(world, Several) else OPERATIONS, steps))
    try:
        while not task.done():
            before = len(world.history)
            blocked = threading.Timer(STEP_S + END_S, _give_up, (world,))
            blocked.daemon = True
            blocked.start()
            await asyncio.wait({task}, timeout=STEP_S)
            blocked.cancel()
            if not task.done() and len(world.history) == before:
                stacks = _stacks([each for each in asyncio.all_tasks() if seed_of.get(each) == world.number])
                task.cancel()
                await asyncio.wait({task}, timeout=END_S)
                return [
                    f"did not go on for {STEP_S:.0f} s, in {world.doing or 'its start or its end'}",
                    stacks,
                ]
        task.result()
        return await asyncio.to_thread(findings, world)
    except Exception:
        return [f"ended in {world.doing or 'its start or its end'}: {traceback.format_exc()}"]


def _follow_tasks() -> WeakKeyDictionary[asyncio.Task[Any], int]:
    """Which sequence each task from now on belongs to: the one whose task made it."""
    seed_of: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()

    def make(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context)  # type: ignore[arg-type]
        seed_of[task] = _PLAYING.get()
        return task

    asyncio.get_running_loop().set_task_factory(make)  # type: ignore[arg-type]
    return seed_of


def _stacks(tasks: list[asyncio.Task[Any]]) -> str:
    """Where each task waits, down to what it waits for: a task's own stack ends with its outermost frame."""
    lines = []
    for task in tasks:
        lines.append(f"{task.get_name()}:")
        waits: Any = task.get_coro()
        while waits is not None:
            frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
            lines.append(
                f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
                if frame
                else f"  {waits!r}"
            )
            waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)
    return "\n".join(lines)


def _give_up(world: World) -> None:
    """The loop itself stands still: nothing in this process can go on."""
    print(
        f"seed {world.number}: the loop stands still in {world.doing}, after:",
        *world.history,
        sep="\n  ",
        flush=True,
    )
    for thread, frame in sys._current_frames().items():
        print(f"thread {thread}:", *traceback.format_stack(frame), sep="\n", flush=True)
    os._exit(1)
