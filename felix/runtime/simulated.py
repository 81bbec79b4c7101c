"""A loop on which time costs nothing and chance is a seed: whole processes run in one, and a run replays exactly.

- Time stands still while anything is ready, then jumps to the next timer. Where nothing is ready and no timer is set, or where
  something is always ready, the run has stalled, which is an error of the simulated program.
- Callbacks run in asyncio's order, which code may rely on. What no order is promised for is drawn: when blocking work is done,
  what the network does (felix.transport.memory), what a loss of power leaves (felix.storage.memory).
- Blocking work, of `SimulatedPool`s and of `asyncio.to_thread`, runs in the loop, after a wait.
- Whatever is started inside `process` belongs to it, by its context; `end` is its crash: nothing of it runs any more, not even
  its `finally` blocks.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from heapq import heappop, heappush
from typing import Any, Final, ParamSpec, TypeVar

from felix.runtime.port import Random, Runtime, Step

WORK_S_MAX: Final = 0.002
"""The longest that blocking work waits for a thread, unless the loop is configured otherwise: about a sync on a quick disk."""
ITERATIONS_MAX: Final = 20_000
"""Loop iterations at one moment of simulated time: a program that needs more is in an endless loop."""
STEPS_MAX: Final = 10
"""Steps of a worker that are done at once for somebody who waits: nothing else happens meanwhile, so more would change nothing."""
TO_THREAD_MAX: Final = 8
"""Threads of `asyncio.to_thread`, as on a machine of four cores."""

P = ParamSpec("P")
T = TypeVar("T")

_process: Final = contextvars.ContextVar[str]("simulated process", default="")


class StalledError(AssertionError):
    """All tasks wait and no event is left that could wake one; or some task never waits."""


class _Handle(asyncio.TimerHandle):
    """A callback that is due, at once or later. asyncio's own handles check for debugging and for other loops, which takes as long
    as the callback."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: Any) -> None:
        self._when = when
        self._callback, self._args = callback, args
        self._loop = loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False
        self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = None, ()


class SimulatedLoop(asyncio.BaseEventLoop):
    """See the module. Not for sockets, pipes or signals."""

    _stopping: bool

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.work_s_max = WORK_S_MAX
        """The longest that blocking work which is begun from now on waits: more is a slow disk."""
        self._now_s = 0.0
        self._iterations = 0
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        """a heap, by the time and then by who asked first"""
        self._asked = 0
        self._ended: set[str] = set()
        self._begun: list[asyncio.Task[Any]] = []
        self._to_thread: dict[str, SimulatedPool] = {}
        """by process: the threads of one that ends go with it"""
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    # -- time ------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        """Everything that is ready now, in the order in which it was asked for. What that asks for is the next iteration's."""
        ready, timers, ended = self._ready, self._timers, self._ended
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise StalledError(f"at {self._now_s:.6f} s nothing is ready and no timer is set")
            if timers[0][0] > self._now_s:
                self._now_s = timers[0][0]
                self._iterations = 0
        self._iterations += 1
        if self._iterations > ITERATIONS_MAX:
            raise StalledError(f"at {self._now_s:.6f} s something is ready for ever")
        while timers and timers[0][0] <= self._now_s:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            context = handle._context
            if handle._cancelled or context.get(_process, "") in ended:
                continue
            try:
                context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler(
                    {
                        "message": f"a callback failed: {handle._callback}",
                        "exception": error,
                        "handle": handle,
                    }
                )

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(0.0, callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _Handle(when, callback, args, self, context)
        self._asked += 1
        heappush(self._timers, (when, self._asked, handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    # -- processes -------------------------------------------------------------------------------------

    @contextmanager
    def process(self, name: str) -> Iterator[None]:
        """Tasks started inside this block belong to this process."""
        assert name not in self._ended, (
            "a process that ended does not come back; give the next one another name"
        )
        token = _process.set(name)
        try:
            yield
        finally:
            _process.reset(token)

    def end(self, name: str) -> None:
        """A process ends at this moment."""
        self._ended.add(name)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **more: Any
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coroutine, loop=loop, **more)
        # Kept: a coroutine that is collected runs its `finally` blocks, and a crash runs none.
        self._begun.append(task)
        return task

    def close(self) -> None:
        """Let go of what was left. Coroutines that are ended here ask for the loop that they run in."""
        asyncio._set_running_loop(self)
        try:
            for task in self._begun:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with suppress(BaseException):
                        task.get_coro().close()
        finally:
            asyncio._set_running_loop(None)
        self._begun.clear()
        self._timers.clear()
        super().close()

    def _check_closed(self) -> None:
        """An object collected after the end may still schedule a callback; it never runs."""

    # -- blocking work ---------------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> asyncio.Future[Any]:
        if executor is None:
            executor = self._to_thread.setdefault(_process.get(), SimulatedPool(self, TO_THREAD_MAX))
        if not isinstance(executor, SimulatedPool):
            # One that hands its work to a pool of this runtime.
            return asyncio.wrap_future(executor.submit(func, *args), loop=self)
        # Nothing comes from another thread, so that no second future need carry it over.
        future: asyncio.Future[Any] = self.create_future()
        executor.add(future, partial(contextvars.copy_context().run, func, *args))
        return future


class Standstill:
    """Of all blocking work of a machine, as where its disk does not answer."""

    def __init__(self) -> None:
        self._is_there = 0
        self._waiting: list[Callable[[], object]] = []

    def begin(self) -> None:
        """No work is begun from now on, until `end` was called as often."""
        self._is_there += 1

    def end(self) -> None:
        """What waits goes on."""
        self._is_there -= 1
        if not self._is_there:
            waiting, self._waiting = self._waiting, []
            for go_on in waiting:
                go_on()

    def holds(self, work: Callable[[], None], loop: SimulatedLoop) -> bool:
        """Whether `work` is to wait; the loop calls it later then, unless its process has ended."""
        if self._is_there:
            self._waiting.append(partial(loop.call_soon, work, context=contextvars.copy_context()))
        return bool(self._is_there)


class SimulatedPool(Executor):
    """So many workers; each takes the oldest piece of work and does it, in one step, after a wait by chance."""

    def __init__(self, loop: SimulatedLoop, workers: int, standstill: Standstill | None = None) -> None:
        self._loop = loop
        self._workers = workers
        self._standstill = standstill or Standstill()
        self._coming = 0
        """workers that will take something"""
        self._queue: deque[tuple[Future[Any] | asyncio.Future[Any], Callable[[], object]]] = deque()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self.add(future, partial(contextvars.copy_context().run, fn, *args, **kwargs))
        return future

    def add(self, future: Future[Any] | asyncio.Future[Any], work: Callable[[], object]) -> None:
        """The future has what the work comes to."""
        self._queue.append((future, work))
        self._begin()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Queued work is done at once, or cancelled."""
        while self._queue:
            future, work = self._queue.popleft()
            if cancel_futures:
                future.cancel()
            else:
                _do(future, work)

    def _begin(self) -> None:
        while self._coming < min(self._workers, len(self._queue)):
            self._coming += 1
            self._loop.call_later(self._loop.random.random() * self._loop.work_s_max, self._work)

    def _work(self) -> None:
        if self._standstill.holds(self._work, self._loop):
            return
        self._coming -= 1
        if self._queue:
            _do(*self._queue.popleft())
        self._begin()


def _do(future: Future[Any] | asyncio.Future[Any], work: Callable[[], object]) -> None:
    if (
        future.cancelled()
        if isinstance(future, asyncio.Future)
        else not future.set_running_or_notify_cancel()
    ):
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class SimulatedWorker:
    """Runs its steps in the loop, each after a random wait; a caller that waits for them has them run at once."""

    def __init__(self, loop: SimulatedLoop, step: Step, standstill: Standstill | None = None) -> None:
        self._loop = loop
        self._step = step
        self._standstill = standstill or Standstill()
        self._due: asyncio.TimerHandle | None = None
        self._soon = False
        self._ended = False

    def start(self) -> None:
        self.wake()

    def wake(self) -> None:
        if not self._soon and not self._ended:
            self._soon = True
            self._call_later(self._loop.random.random() * self._loop.work_s_max)

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        for _ in range(STEPS_MAX):
            if condition() or self._ended:
                break
            self._run()
        return condition()

    def join(self) -> None:
        for _ in range(STEPS_MAX):
            self._run()
        assert self._ended, "the last step must have been asked for"

    def _call_later(self, after_s: float) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = self._loop.call_later(after_s, self._come)

    def _come(self) -> None:
        if not self._standstill.holds(self._come, self._loop):
            self._run()

    def _run(self) -> None:
        if self._ended:
            return
        self._soon = False
        pause_s = self._step()
        if pause_s is None:
            self._ended = True
        elif pause_s < math.inf and not self._soon:
            self._call_later(max(0.0, pause_s))


class SimulatedClock:
    """`felix.runtime.port.Clock` by the loop's time."""

    def __init__(self, loop: SimulatedLoop, start_ms: int) -> None:
        self._loop = loop
        self.start_ms = start_ms
        """The wall clock when the loop began; a change of it is a jump of the clock."""

    def now_ms(self) -> int:
        return self.start_ms + int(self._loop.time() * 1_000)

    def monotonic(self) -> float:
        return self._loop.time()

    def monotonic_ns(self) -> int:
        return int(self._loop.time() * 1e9)

    def boot_ms(self) -> int:
        return int(self._loop.time() * 1_000)


def _ask(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, timeout_s: float) -> T:
    """At once: the work may let others go first, who do not, but wait for nobody."""
    try:
        while True:
            waits_for = work.send(None)
            assert waits_for is None, "blocking work waits for something that only the loop could bring"
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]


def simulated(loop: SimulatedLoop, start_ms: int, standstill: Standstill | None = None) -> Runtime:
    """A runtime on this loop; its chance is the loop's. `standstill`: of all its blocking work."""
    return Runtime(
        SimulatedClock(loop, start_ms),
        loop.random,
        lambda workers, _: SimulatedPool(loop, workers, standstill),
        lambda step, _: SimulatedWorker(loop, step, standstill),
        _ask,
    )
