"""Group commit: what is handed over on the loop is written by threads of a shared pool, a group at a time.

While one group is written and synced the next one gathers, so one sync serves all that waited. A thread goes on by itself while
there is more: it needs no iteration of the event loop in between, and stands at the back of the pool's queue, so that other shards have
their turn.

Invariants: one thread at a time has this log; groups are written and told in the order in which their items were handed over; after a
refusal nothing is written until `resume`. `put`, `start`, `drop` and `resume` are called on the loop, `write` in a thread. The lock here
is the whole of what the two share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from threading import Lock
from typing import Final

from felix.errors import FelixError
from felix.storage.port import is_exhausted, is_full
from region.log.core import Pending, WriteRefused, Written
from region.log.errors import StorageFailedError, disk_full, storage_error

GROUP_BYTES_MAX: Final = 8 << 20
"""Written before one sync: bounds how long the first of a group waits for the last."""


class GroupCommit:
    """One per durable shard. `write` writes a group and says how many ns its sync took; `tell` brings an event to the loop."""

    def __init__(
        self,
        pool: Executor,
        folder: Path,
        write: Callable[[Sequence[Pending]], int],
        tell: Callable[[Written | WriteRefused], None],
    ) -> None:
        self._pool = pool
        self._folder = folder
        self._write = write
        self._tell = tell
        # Shared with the thread that writes.
        self._lock = Lock()
        self._queue: list[Pending] = []
        self._writing = False
        self._halted = False
        # Without the lock: appending to a list is whole by itself, and who takes takes from the other end.
        self.put: Callable[[Pending], None] = self._queue.append
        """To be written behind what was put before, once `start` was called."""

    def start(self) -> None:
        """Write what waits, unless a thread is at it."""
        with self._lock:
            if self._writing or self._halted or not self._queue:
                return
            self._writing = True
        self._pool.submit(self._run)

    def drop(self) -> int:
        """Let go of what no thread has begun to write; how many."""
        with self._lock:
            waiting = len(self._queue)
            self._queue.clear()
        return waiting

    def resume(self) -> None:
        """Let go of what waits behind a refused group, and write again what comes from now on."""
        with self._lock:
            self._queue.clear()
            self._halted = False

    def _run(self) -> None:
        """In a thread: write one group, tell the loop, go on if there is more."""
        group: list[Pending] = []
        size = 0
        with self._lock:
            for item in self._queue:
                if group and size + item.size > GROUP_BYTES_MAX:
                    break
                group.append(item)
                size += item.size
            del self._queue[: len(group)]
            if not group:
                # What waited was dropped.
                self._writing = False
                return
        event: Written | WriteRefused
        try:
            event = Written(group, self._write(group))
        except StorageFailedError as error:
            event = WriteRefused(error, failed=True)
        except OSError as error:
            if is_full(error):
                event = WriteRefused(disk_full(), no_room=True)
            else:
                # Without descriptors nothing was written, as where the seal refuses.
                event = WriteRefused(storage_error(error, self._folder), failed=not is_exhausted(error))
        except FelixError as error:
            # The seal refused (a key is gone, a provider does not answer): nothing was written.
            event = WriteRefused(error)
        except Exception as error:
            event = WriteRefused(_bug(error), failed=True)
        with self._lock:
            self._halted = isinstance(event, WriteRefused)
            more = self._writing = bool(self._queue) and not self._halted
        self._tell(event)
        if more:
            self._pool.submit(self._run)


def _bug(error: Exception) -> FelixError:
    failure = FelixError(f"The shard stops: {type(error).__name__}: {error}.")
    failure.__cause__ = error
    return failure
