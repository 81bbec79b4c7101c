"""Access: which stream of which region Spark reads or writes, as whom, and the one connection that a task has.

A Spark job is a client like any other: it comes with an identity of its own, whose rights the broker checks, and it
reaches the one region that it names. What travels in plans, tasks and checkpoints is names and paths; identity files are
read on the machine that connects, when it connects.

`RegionThread` is the one connection of a task or of a streaming query's driver: a thread with an event loop, so that the
session is kept alive while Spark is busy elsewhere. It belongs to the process that opened it and is never pickled.

Who may call: `audit.spark.stream_reader`, `audit.spark.stream_writer`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

import felix
from felix.errors import FelixError

ANSWER_TIMEOUT_S: Final = 60.0
"""For a session to stand, and for a request to be answered: longer than a broker's restart, since a task that gives up
costs more than one that waits, and a local Spark does not try it again."""
STOP_TIMEOUT_S: Final = 5.0
"""How long `close` waits for the session to say goodbye, and for its thread to end."""

T = TypeVar("T")


class Access(NamedTuple):
    """Who comes, and for what. `identity` and `home` are empty where the machine's own defaults count."""

    region: str
    stream: str
    identity: str = ""
    home: str = ""

    def profile(self) -> felix.Profile:
        """The profile on this machine. Blocks on the disk. Raises what `felix.load_profile` raises."""
        home = Path(self.home).expanduser() if self.home else None
        return felix.load_profile(self.region, identity=self.identity, home=home)


class RegionThread:
    """A session with a region, on a loop in a thread of its own. Used as `with`, or `open` and `close`."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="felix-spark", daemon=True)
        self._client: felix.RegionClient | None = None

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Connect. Raises what `felix.connect` and `felix.load_profile` raise; the thread has ended then."""
        self._thread.start()
        try:
            client = felix.connect(
                profile=self._access.profile(),
                connect_timeout_s=ANSWER_TIMEOUT_S,
                request_timeout_s=ANSWER_TIMEOUT_S,
            )
            self.run(client.open())
        except BaseException:
            self._stop()
            raise
        self._client = client

    @property
    def client(self) -> felix.RegionClient:
        """The client; for coroutines that `run` runs."""
        assert self._client is not None, "the thread is not open"
        return self._client

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and wait for it. Raises what it raises."""
        return self.result(self.start(work))

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it on the loop; the future is for `result`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def result(self, pending: Future[T]) -> T:
        """Wait for what `start` began. Raises what it raised."""
        try:
            return pending.result()
        except FelixError as error:
            # Spark shows the whole way that an error took; of ours, the sentence is what a person needs.
            raise error.with_traceback(None) from None
        except BaseException:
            pending.cancel()
            raise

    def close(self) -> None:
        """End the session and the thread. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            pending = asyncio.run_coroutine_threadsafe(client.close(), self._loop)
            # How the goodbye went changes nothing for what was read or acknowledged before it.
            with suppress(FelixError, TimeoutError, CancelledError):
                pending.result(STOP_TIMEOUT_S)
            pending.cancel()
        self._stop()

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S)
