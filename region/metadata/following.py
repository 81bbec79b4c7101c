"""Following the records under one prefix of the metadata store: the loop of every mirror of them.

Invariants: what is applied goes on where the mirror stands, without a gap: after a watch that cannot be resumed, all is loaded first;
whatever fails is said and tried again, after waits that grow; only `close` ends it. One event loop, no locks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Final

from felix.backoff import Backoff, BackoffPolicy
from felix.errors import FelixError
from felix.runtime.port import Random
from felix.tasks import end_tasks
from region.metadata.port import CompactedError, MetadataStore
from region.metadata.transaction import Change

log = logging.getLogger("felix.region.metadata")

RETRY: Final = BackoffPolicy(first_ms=100, ceiling_ms=5_000)
"""Between tries to reach a store that is away; etcd's own watch tries more often inside of each."""


class Follower:
    """Keeps a mirror up to date. `is_current`: False from a failure on until all was loaded, or a change came."""

    def __init__(
        self,
        what: str,
        store: MetadataStore,
        prefix: str,
        random: Random,
        *,
        revision: Callable[[], int],
        load: Callable[[], Awaitable[None]],
        apply: Callable[[Change], None],
        loads_after_each: bool = False,
    ) -> None:
        """`what` is followed, as its log has it. `revision`: where the mirror stands; `load` takes over all that the store holds, `apply` the
        next change. `loads_after_each`: also where the watch could go on, for a mirror that must know that it is current: a watch that
        is quiet proves nothing."""
        self.is_current = False
        self._what = what
        self._store = store
        self._prefix = prefix
        self._backoff = Backoff(RETRY, random)
        self._revision, self._load, self._apply = revision, load, apply
        self._loads_after_each = loads_after_each
        self._must_load = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load everything, then follow in the background. Raises UnavailableError."""
        assert self._task is None
        await self._load_all()
        self._task = asyncio.get_running_loop().create_task(self._follow(), name=f"follower of {self._what}")

    async def close(self) -> None:
        """Follow no more."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks(task)
        self.is_current = False

    async def _follow(self) -> None:
        while True:
            try:
                if self._must_load:
                    await self._load_all()
                changes = self._store.watch(self._prefix, self._revision() + 1)
                async with aclosing(changes):
                    async for change in changes:
                        self.is_current = True
                        self._backoff.reset()
                        self._apply(change)
            except CompactedError as error:
                log.warning("%s: loading all again: %s", self._what, error)
                self._must_load = True
            except FelixError as error:
                log.warning("%s cannot be followed: %s", self._what, error)
                self.is_current = False
                self._must_load |= self._loads_after_each
            except Exception:
                # A mirror that ended without a word would never hear of a revocation, nor see another broker go.
                log.exception("Following %s failed", self._what)
                self.is_current = False
                self._must_load = True
            if self._must_load:
                await self._try_load()
            await asyncio.sleep(self._backoff.next_ms() / 1_000)

    async def _load_all(self) -> None:
        await self._load()
        self.is_current = True
        self._must_load = False

    async def _try_load(self) -> None:
        try:
            await self._load_all()
        except FelixError as error:
            self.is_current = False
            log.warning("%s cannot be loaded: %s", self._what, error)
        except Exception:
            self.is_current = False
            log.exception("Loading %s failed", self._what)
