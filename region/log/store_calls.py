"""Calls of a store's library, each with an end. Blocking, for any thread; region.log.fsspec_store alone calls this, and who runs its work says until when (`ended_by`).

A library may wait for its store without an end: for a peer that accepts a connection and never answers, or for a file server's folder. So each step of a call runs in a
thread beside the one that calls, which waits for it no longer than STALLED_S, and no longer than its own work is wanted.

Invariants:
- a step that did not come back is left alone with its thread; the process ends without it;
- until it has come back, nothing else changes the same object: what it did late would undo what was done since;
- a store that left a step without an answer is asked nothing but by one probe at a time, until it answers: only the first caller waits for it;
- threads have a bound: LEFT_MAX for the steps that one store left without an answer, and for its probes about a hundred in a year of silence.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, local
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar
from urllib.parse import urlsplit

from felix.errors import UnavailableError
from felix.lazy_event import LazyThreadEvent
from region.log.compactor import WorkEndedError

log = logging.getLogger("felix.region.log")

P = ParamSpec("P")
T = TypeVar("T")

STALLED_S: Final = 60.0
"""A step moves 5 MiB at most: a store that takes longer than this for it is of no use."""
WHOLE_S: Final = 300.0
"""The same of a step that takes all there is: the names of 300,000 objects, page by page, a list of 64 MiB, or the end of an object, with which some file
systems begin to bring it over."""
LOOK_S: Final = 0.25
"""How often a thread that waits for a step looks whether its work is still wanted."""
PROBE_S: Final = 10.0
"""A store that answers a probe within this time, whatever it says, is there again."""
PROBE_PAUSE_S_MAX: Final = 600.0
"""Between two probes, at first none: each that never comes back keeps a thread."""
PROBES_HUNG: Final = 16
PROBE_SHARE: Final = 8
"""With so many probes that did not come back, the next one waits for this part of the time that the store has been silent, if that is longer."""
LEFT_MAX: Final = 64
"""Steps of one store that did not come back: each keeps a thread, and one that writes 6 MiB. With so many, nothing more is asked before one comes back."""
LEFT_AT_ONCE: Final = 8
"""So many steps, about, are under way when a store falls silent. One that answers probes and leaves more than these rests ever longer before it is asked
again."""
LOCAL_PARTS: Final = 2
"""Folders of a path that tell which store it is of, on this machine: one of two mounts may hang."""


class _Answer(NamedTuple):
    found: Any = None
    error: BaseException | None = None


def _serve(steps: SimpleQueue[Callable[[], Any] | None], answers: SimpleQueue[_Answer]) -> None:
    while (step := steps.get()) is not None:
        try:
            answer = _Answer(step())
        except BaseException as error:
            answer = _Answer(error=error)
        # Neither holds what it was about until the next one.
        del step
        answers.put(answer)
        del answer


class _Worker:
    """A thread that does what one other thread asks, one step after the other: libraries keep their connections by thread."""

    def __init__(self) -> None:
        self.steps: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.answers: SimpleQueue[_Answer] = SimpleQueue()
        Thread(target=_serve, args=(self.steps, self.answers), name="log-store", daemon=True).start()

    def __del__(self) -> None:
        self.steps.put(None)


_mine: Final = local()
"""Of each thread: its worker, and each event that ends the work that it is about."""
_lock: Final = Lock()
_silent: Final[dict[str, Event]] = {}
"""Stores that left a step without an answer; each event is set once it answers."""
_changing: Final[Counter[str]] = Counter()
"""Objects that a step which did not come back may still change."""
_left: Final[Counter[str]] = Counter()
"""Of each store: steps that nobody waits for any more, and that have not come back."""
_overdue: Final[Counter[str]] = Counter()
"""Those of them that took longer than they may."""
_probing: Final[Counter[str]] = Counter()
"""Of each store: probes that have not come back."""


@contextmanager
def ended_by(end: LazyThreadEvent) -> Iterator[None]:
    """Once `end` is set, or what ends this thread's work besides, calls of stores in this thread raise WorkEndedError instead of waiting on."""
    before = _ends()
    _mine.ends = (*before, end)
    try:
        yield
    finally:
        _mine.ends = before


def _ends() -> tuple[LazyThreadEvent, ...]:
    ends: tuple[LazyThreadEvent, ...] = getattr(_mine, "ends", ())
    return ends


def _is_over() -> bool:
    return any(end.is_set() for end in _ends())


def store_of(url: str) -> str:
    """Which store an object is of, as far as that says which ones fail together."""
    parts = urlsplit(url)
    local_parts = () if parts.netloc else parts.path.strip("/").split("/")[:LOCAL_PARTS]
    # What stands before an @ may be a secret.
    return "/".join((f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", *local_parts))


def silent_stores() -> list[str]:
    """The stores that this process waits for, sorted."""
    with _lock:
        return sorted({*_silent, *(store for store, count in _left.items() if count >= LEFT_MAX)})


def silence_problems() -> list[str]:
    """What that means, in one line each."""
    with _lock:
        silent, overdue = sorted(_silent), sorted(_overdue.items())
        stopped = {store for store, count in _left.items() if count >= LEFT_MAX}
    return [
        f"The store {store} takes what it is asked and does not answer: segments wait to be copied there, and records that are only there cannot be read. It is asked again by itself."
        for store in silent
        if store not in stopped
    ] + [
        f"{'1 call' if count == 1 else f'{count:,} calls'} of the store {store} {'has' if count == 1 else 'have'} not come back: "
        + (
            "it is asked nothing more before one does."
            if store in stopped
            else "what may yet be changed so waits, and in the same stream what stands behind it."
        )
        + " If the store's library never gives up, restart the broker."
        for store, count in sorted({**dict.fromkeys(stopped, LEFT_MAX), **dict(overdue)}.items())
        if store in stopped or store not in silent
    ]


def changes_below(url: str) -> bool:
    """Whether a step that did not come back may still change something below a URL."""
    with _lock:
        return any(each.startswith(url.rstrip("/") + "/") for each in _changing)


class StoreCall:
    """One call: its steps, of which the next one begins when the one before has come back. Raises UnavailableError, at once, where its store is silent,
    and WorkEndedError."""

    def __init__(self, url: str, probe: Callable[[], object], *, changes: bool) -> None:
        """`changes`: the object of that URL. `probe` asks the store anything."""
        self._url = url
        self._store = store_of(url)
        self._probe = probe
        self._changes = changes
        self._opened: Any = None
        self._is_left = False
        if _is_over():
            raise WorkEndedError
        with _lock:
            if self._store in _silent:
                raise _stalled(self._store)
            if _left[self._store] >= LEFT_MAX:
                raise UnavailableError(
                    f"{LEFT_MAX} calls of {self._store} have not come back",
                    hint="It is asked nothing more before one of them does. If the store's library never gives them up, restart the broker.",
                )
            if changes and url in _changing:
                raise UnavailableError(
                    "an earlier call that changes this object has not come back",
                    hint="It is waited for, since it may yet be done. If the store's library never gives it up, restart the broker.",
                )

    def do(self, step: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What a step gives, or raises. Raises UnavailableError where it does not come back, WorkEndedError where nobody waits for it any more."""
        return self._within(STALLED_S, partial(step, *args, **kwargs))

    def do_whole(self, step: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The same, of a step that takes all there is."""
        return self._within(WHOLE_S, partial(step, *args, **kwargs))

    def _within(self, limit_s: float, step: Callable[[], T]) -> T:
        worker: _Worker | None = getattr(_mine, "worker", None)
        if worker is None:
            worker = _mine.worker = _Worker()
        worker.steps.put(step)
        waited_s = 0.0
        while True:
            try:
                answer = worker.answers.get(timeout=min(LOOK_S, limit_s))
            except Empty:
                waited_s += min(LOOK_S, limit_s)
            except BaseException:
                # As of a person who interrupts a command.
                self._leave(worker)
                raise
            else:
                if answer.error is not None:
                    raise answer.error
                found: T = answer.found
                return found
            if _is_over():
                self._leave(worker)
                raise WorkEndedError
            if waited_s >= limit_s:
                self._leave(worker, is_overdue=True)
                _falls_silent(self._store, self._probe, limit_s)
                raise _stalled(self._store)

    @contextmanager
    def opened(self, open_file: Callable[[], Any]) -> Iterator[Any]:
        """A file of the store, closed at the end."""
        self._opened = file = self.do(open_file)
        try:
            yield file
        finally:
            if not self._is_left:
                (self.do_whole if self._changes else self.do)(file.close)

    def _leave(self, worker: _Worker, *, is_overdue: bool = False) -> None:
        """The step under way is waited for no more."""
        self._is_left = True
        _mine.worker = None
        opened, store = self._opened, self._store
        counted = [(_left, store)]
        if is_overdue:
            counted.append((_overdue, store))
        if self._changes:
            counted.append((_changing, self._url))
        with _lock:
            for counts, key in counted:
                counts[key] += 1

        def come_back() -> None:
            answer = worker_answers.get_nowait()
            for each in (opened, answer.found):
                with suppress(Exception):
                    each.close()
            for counts, key in counted:
                _count_down(counts, key)
            if answer.error is None:
                _answers(store)

        worker_answers = worker.answers
        worker.steps.put(come_back)


def _stalled(store: str) -> UnavailableError:
    return UnavailableError(
        f"{store} took what it was asked and does not answer; it is asked again once it answers a probe"
    )


def _count_down(counts: Counter[str], key: str) -> None:
    with _lock:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]


def _falls_silent(store: str, probe: Callable[[], object], waited_s: float) -> None:
    with _lock:
        if store in _silent:
            return
        answered = _silent[store] = Event()
    log.warning(
        "%s has not answered for %.0f s: it is asked nothing until it answers a probe", store, waited_s
    )
    try:
        Thread(target=_ask, args=(store, probe, answered), name="log-store-probe", daemon=True).start()
    except RuntimeError:
        # There is no room for a thread: the next call finds out by itself.
        _answers(store)
        raise


def _answers(store: str) -> None:
    with _lock:
        answered = _silent.pop(store, None)
    if answered is not None:
        answered.set()
        log.info("%s answers again", store)


def _ask(store: str, probe: Callable[[], object], answered: Event) -> None:
    """Until the store answers: a step that was left alone may come back as well."""
    with _lock:
        rest_s = PROBE_S * ((1 << _left[store] // LEFT_AT_ONCE) - 1)
    pause_s, silent_s = min(rest_s, PROBE_PAUSE_S_MAX), 0.0
    while not answered.wait(pause_s):
        done = Event()
        with suppress(RuntimeError):
            # Without room for a thread it is asked later.
            Thread(target=_ask_once, args=(store, probe, done), name="log-store-probe", daemon=True).start()
        if done.wait(PROBE_S):
            _answers(store)
            return
        silent_s += pause_s + PROBE_S
        pause_s = min(max(PROBE_S, 2 * pause_s), PROBE_PAUSE_S_MAX)
        with _lock:
            is_many = _probing[store] >= PROBES_HUNG
        if is_many:
            pause_s = max(pause_s, silent_s / PROBE_SHARE)


def _ask_once(store: str, probe: Callable[[], object], done: Event) -> None:
    with _lock:
        _probing[store] += 1
    try:
        probe()
    except Exception:
        # Said within its time, an error is an answer; later it is what the library makes of none.
        done.set()
    else:
        done.set()
        _answers(store)
    finally:
        _count_down(_probing, store)
