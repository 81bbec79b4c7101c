"""A loop on which time costs nothing and chance is a seed: whole processes run in one, and a run replays exactly.

- Time stands still while anything is ready, then jumps to the next timer. Where nothing is ready and no timer is set, or where
  something is always ready, the run has stalled, which is an error of whoever is simulated.
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
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from typing import Any, Final, ParamSpec, TypeVar

from felix.runtime.port import Random, Runtime, Step

WORK_S_MAX: Final = 0.002
"""The longest that blocking work waits for its turn, unless the loop is told otherwise: about a sync on a quick disk."""
ITERATIONS_MAX: Final = 20_000
"""Iterations of the loop at one moment: whoever needs more goes round in circles."""
STEPS_MAX: Final = 10
"""Steps of a worker that are done at once for somebody who waits: nothing else happens meanwhile, so more would change nothing."""
TO_THREAD_MAX: Final = 8
"""Threads of `asyncio.to_thread`, as on a machine of four cores."""

P = ParamSpec("P")
T = TypeVar("T")

_process: Final = contextvars.ContextVar[str]("simulated process", default="")


class StalledError(AssertionError):
    """Everybody waits, and nothing is left that could wake anybody; or nobody ever waits."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """See the module. Not for sockets, pipes or signals."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.work_s_max = WORK_S_MAX
        """The longest that blocking work which is begun from now on waits: more is a slow disk."""
        self._now_s = 0.0
        self._iterations = 0
        self._selector = _Selector(self)
        self._ended: set[str] = set()
        self._begun: list[asyncio.Task[Any]] = []
        self._to_thread: dict[str, SimulatedPool] = {}
        """by process: the threads of one that ends go with it"""
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    # -- time ------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def pass_time(self, timeout_s: float | None) -> None:
        """Nothing is ready until then; None: for ever."""
        if timeout_s is None:
            raise StalledError(f"at {self._now_s:.6f} s nothing is ready and no timer is set")
        self._now_s += timeout_s
        self._iterations = 0

    def stand_still(self) -> None:
        """Something is ready."""
        self._iterations += 1
        if self._iterations > ITERATIONS_MAX:
            raise StalledError(f"at {self._now_s:.6f} s something is ready for ever")

    def _process_events(self, event_list: object) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """There is nobody to wake: no other thread."""

    # -- processes -------------------------------------------------------------------------------------

    @contextmanager
    def process(self, name: str) -> Iterator[None]:
        """What is started in here is of this process."""
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

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return super().call_soon(self._of_process(callback, context), *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return super().call_soon_threadsafe(self._of_process(callback, context), *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return super().call_at(when, self._of_process(callback, context), *args, context=context)

    def _of_process(self, callback: Callable[..., object], context: contextvars.Context | None) -> Any:
        name = _process.get() if context is None else context.get(_process, "")
        if not name:
            return callback

        def run(*args: object) -> None:
            if name not in self._ended:
                callback(*args)

        return run

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **more: Any
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coroutine, loop=loop, **more)
        # Kept: a coroutine that is collected runs its `finally` blocks, and a crash runs none.
        self._begun.append(task)
        return task

    def close(self) -> None:
        """Let go of what was left."""
        for task in self._begun:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with suppress(BaseException):
                    task.get_coro().close()
        self._begun.clear()
        super().close()

    def _check_closed(self) -> None:
        """What is collected after the end may still ask for a callback; it never comes."""

    # -- blocking work ---------------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> asyncio.Future[Any]:
        if executor is None:
            executor = self._to_thread.setdefault(_process.get(), SimulatedPool(self, TO_THREAD_MAX))
        assert isinstance(executor, SimulatedPool), "a pool of this runtime"
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)


class _Selector(selectors.BaseSelector):
    """What the loop waits with: here waiting is what passes time."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._loop.pass_time(timeout)
        else:
            self._loop.stand_still()
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise NotImplementedError

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        raise NotImplementedError

    def get_map(self) -> Any:
        return {}


class SimulatedPool(Executor):
    """So many workers; each takes the oldest piece of work and does it, in one step, after a wait by chance."""

    def __init__(self, loop: SimulatedLoop, workers: int) -> None:
        self._loop = loop
        self._idle = workers
        self._queue: deque[tuple[Future[Any], Callable[[], object]]] = deque()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        context = contextvars.copy_context()
        self._queue.append((future, lambda: context.run(fn, *args, **kwargs)))
        self._begin()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What is queued is done at once, or cancelled."""
        while self._queue:
            future, work = self._queue.popleft()
            if cancel_futures:
                future.cancel()
            else:
                _do(future, work)

    def _begin(self) -> None:
        while self._idle and self._queue:
            self._idle -= 1
            self._loop.call_later(self._loop.random.random() * self._loop.work_s_max, self._work)

    def _work(self) -> None:
        self._idle += 1
        if self._queue:
            _do(*self._queue.popleft())
        self._begin()


def _do(future: Future[Any], work: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class SimulatedWorker:
    """Does its steps in the loop, each after a wait by chance; whoever waits for them has them done at once."""

    def __init__(self, loop: SimulatedLoop, step: Step) -> None:
        self._loop = loop
        self._step = step
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
        self._due = self._loop.call_later(after_s, self._run)

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


def simulated(loop: SimulatedLoop, start_ms: int) -> Runtime:
    """A runtime on this loop; its chance is the loop's."""
    return Runtime(
        SimulatedClock(loop, start_ms),
        loop.random,
        lambda workers, _: SimulatedPool(loop, workers),
        lambda step, _: SimulatedWorker(loop, step),
        _ask,
    )
