"""The metadata store of a region whose brokers are stopped: asked, and told, by commands that change the region's keys. Where it is an etcd of the region alone, it runs meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, TypeVar

from cli.setting import run
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
    """As `region.log_keys.StoppedRegion`."""

    def __init__(self, folder: RegionFolder, config: RegionConfig) -> None:
        self._folder, self._config = folder, config

    def require_stopped(self) -> None:
        from region.log_key_store import require_stopped

        lease = 0 if (cluster := self._config.cluster) is None else cluster.lease
        run(
            with_store(
                self._folder,
                self._config,
                lambda store: require_stopped(store, self._config.region, lease),
                STORE_S + lease / 1_000,
            )
        )

    def successor(self, own: RegionBundle) -> bytes | None:
        from region.log_key_store import told_successor
        from region.metadata.catalog import Catalog

        async def ask(store: MetadataStore) -> bytes | None:
            return await told_successor(Catalog(store, self._config.region), own)

        return run(with_store(self._folder, self._config, ask, STORE_S))

    def tell_ended(self, own: RegionBundle, key: SigningKey, successor: bytes, *, anew: bool) -> None:
        from region.log_key_store import tell_ended
        from region.metadata.catalog import Catalog

        async def tell(store: MetadataStore) -> None:
            await tell_ended(Catalog(store, self._config.region), own, key, successor, now_ms(), anew=anew)

        run(with_store(self._folder, self._config, tell, STORE_S))


async def with_store(
    folder: RegionFolder,
    config: RegionConfig,
    ask: Callable[[MetadataStore], Awaitable[T]],
    timeout_s: float,
) -> T:
    """Ask the metadata store of a region whose brokers are stopped; where it is an etcd of this region alone, it runs meanwhile. Raises UnavailableError where it does not answer in time,
    and as `ask`."""
    from cli.several import ETCD_FOLDER, start_etcd
    from region.startup import open_store

    try:
        async with asyncio.timeout(timeout_s), AsyncExitStack() as stack:
            if (folder.root / ETCD_FOLDER).is_dir():
                stack.push_async_callback((await start_etcd(folder, config)).end)
            store = await open_store(folder, config, REAL)
            stack.push_async_callback(store.close)
            return await ask(store)
    except TimeoutError:
        raise UnavailableError(f"The metadata store has not answered for {timeout_s:.0f} s.") from None
