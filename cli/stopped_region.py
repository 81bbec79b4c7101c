"""The metadata store of a region whose brokers are stopped: asked, and told, by commands that change the region's keys. Where it is an etcd of the region alone, it runs meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, Self, TypeVar

from felix.errors import UnavailableError
from felix.runtime.real import REAL, now_ms
from region.folder import RegionFolder

if TYPE_CHECKING:
    from keys.bundle import RegionBundle
    from keys.signing import SigningKey
    from region.config import RegionConfig
    from region.metadata.port import MetadataStore

T = TypeVar("T")
STORE_S: Final = 20.0
"""How long a command waits for the metadata store, an etcd of the region's own started for it."""


class StoppedRegion:
    """As `region.trust.log_keys.StoppedRegion`, while it is entered. An etcd of the region's own is started once, before the store's client is: a process that has one does not start others well."""

    def __init__(self, folder: RegionFolder, config: RegionConfig) -> None:
        self._folder, self._config = folder, config
        self._runner: asyncio.Runner | None = None
        """once the store was asked: of a log that one process writes, or a bridge's, it never is"""
        self._opened = AsyncExitStack()
        self._store: MetadataStore | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is None:
            return
        try:
            self._runner.run(self._opened.aclose())
        finally:
            self._runner.close()

    def require_stopped(self) -> None:
        from region.trust.log_key_store import require_stopped

        lease = 0 if (cluster := self._config.cluster) is None else cluster.lease
        self._ask(lambda store: require_stopped(store, self._config.region, lease), STORE_S + lease / 1_000)

    def successor(self, own: RegionBundle) -> bytes | None:
        from region.metadata.catalog import Catalog
        from region.trust.log_key_store import told_successor

        return self._ask(lambda store: told_successor(Catalog(store, self._config.region), own))

    def tell_ended(self, own: RegionBundle, key: SigningKey, successor: bytes, *, anew: bool) -> None:
        from region.metadata.catalog import Catalog
        from region.trust.log_key_store import tell_ended

        self._ask(
            lambda store: tell_ended(
                Catalog(store, self._config.region), own, key, successor, now_ms(), anew=anew
            )
        )

    def _ask(self, ask: Callable[[MetadataStore], Awaitable[T]], timeout_s: float = STORE_S) -> T:
        async def answer() -> T:
            async with asyncio.timeout(timeout_s):
                if self._store is None:
                    self._store = await _open(self._folder, self._config, self._opened)
                return await ask(self._store)

        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            return self._runner.run(answer())
        except TimeoutError:
            raise _silent(timeout_s) from None


async def _open(folder: RegionFolder, config: RegionConfig, stack: AsyncExitStack) -> MetadataStore:
    from cli.several import ETCD_FOLDER, start_etcd
    from region.startup.store import open_store

    if (folder.root / ETCD_FOLDER).is_dir():
        stack.push_async_callback((await start_etcd(folder, config)).end)
    store = await open_store(folder, config, REAL)
    stack.push_async_callback(store.close)
    return store


def _silent(timeout_s: float) -> UnavailableError:
    return UnavailableError(f"The metadata store has not answered for {timeout_s:.0f} s.")


async def with_store(
    folder: RegionFolder,
    config: RegionConfig,
    ask: Callable[[MetadataStore], Awaitable[T]],
    timeout_s: float,
) -> T:
    """Ask the metadata store of a region whose brokers are stopped; where it is an etcd of this region alone, it runs meanwhile. Raises UnavailableError where it does not answer in time,
    and as `ask`."""
    try:
        async with asyncio.timeout(timeout_s), AsyncExitStack() as stack:
            return await ask(await _open(folder, config, stack))
    except TimeoutError:
        raise _silent(timeout_s) from None
