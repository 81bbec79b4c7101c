"""Opening the logs of a broker's copies, and closing them, on threads; and taking a copy that lost what it had out of its shard's sets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from felix.errors import CorruptionError, FelixError, UnavailableError
from felix.runtime.port import Runtime
from felix.storage.port import Files
from region.cluster.mirror import ClusterMirror
from region.cluster.records import ShardId
from region.cluster.transactions import leave_sets
from region.log.open_logs import OpenLogs
from region.replication.disk import ReplicaDisk, set_aside
from region.replication.hosted import RETRY_MS, Hosted, ShardPlan

log = logging.getLogger("felix.region.replication")


class CopyOpener:
    """Of broker `broker`. `pool`: where copies are opened; `closing_pool`: where they are closed. Event loop only."""

    def __init__(
        self,
        broker: str,
        mirror: ClusterMirror,
        *,
        files: Files,
        runtime: Runtime,
        open_logs: OpenLogs,
        pool: Executor,
        closing_pool: Executor,
    ) -> None:
        self._broker, self._mirror = broker, mirror
        self._files, self._runtime, self._open_logs = files, runtime, open_logs
        self._pool, self._closing_pool = pool, closing_pool

    async def open(self, plan: ShardPlan, *, anew: bool = False) -> dict[int, ReplicaDisk]:
        """The logs of a copy by number; all that they then hold is on the disk. `anew`: those that are damaged are set aside, and begun anew.
        What was opened is closed where nobody waits for it any more. Raises CorruptionError, OSError."""
        opening = asyncio.get_running_loop().run_in_executor(
            self._pool, partial(self._open_logs_of, plan, anew=anew)
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            with suppress(OSError, FelixError):
                await self.abandon(await opening)
            raise

    async def abandon(self, disks: Mapping[int, ReplicaDisk]) -> None:
        """Close logs that nobody uses, and sync nothing."""
        for disk in disks.values():
            await asyncio.get_running_loop().run_in_executor(self._closing_pool, disk.abandon)

    async def close(self, hosted: Hosted, why: str, *, in_order: bool) -> None:
        """End what is under way for a copy, and close its logs. `in_order`: all that they hold is synced, where their disks take it."""
        if hosted.is_abandoned:
            return
        for worker in hosted.workers.values():
            worker.halt(why)
        for worker in hosted.workers.values():
            await worker.idle()
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._closing_pool, worker.disk.close if in_order else worker.disk.abandon
                )
            except (OSError, FelixError) as error:
                log.warning("closing log %s: %s", worker.disk.plan.folder, error)

    async def leave_sets(self, shard: ShardId, *, if_alone: bool) -> None:
        """Be no member of the shard's sets, so that nobody elects this broker for what it had. `if_alone`: also where nobody else is left.

        Raises UnavailableError where the region is frozen, and what the store raises.
        """
        while True:
            view = self._mirror.view
            made = leave_sets(view, shard, self._broker, if_alone=if_alone) if shard in view.shards else None
            if made is None:
                return
            if view.revision_of(view.keys.frozen):
                # Nothing that is said of a shard is taken before that ends.
                raise UnavailableError(
                    f"Shard {shard.number} counts on what broker {self._broker} has not any more, and its record cannot be changed: the region is frozen.",
                    hint="Its copy here is opened once the region is not frozen any more; felix region status shows why it is.",
                    retry_after_ms=RETRY_MS,
                )
            result = await self._mirror.commit(made)
            if result is not None and result.succeeded:
                log.error("shard %s: broker %s has left its in-sync set", shard, self._broker)
                return

    def _make_lasting(self, folder: Path) -> None:
        """A folder in the place of one that is gone, perhaps with its stream's: no crash takes its name back."""
        self._files.make_folder(folder)
        for above in (folder.parent, folder.parent.parent):
            self._files.sync_folder(above)

    def _open_logs_of(self, plan: ShardPlan, *, anew: bool) -> dict[int, ReplicaDisk]:
        disks: dict[int, ReplicaDisk] = {}
        open_log = partial(
            ReplicaDisk.open, files=self._files, runtime=self._runtime, open_logs=self._open_logs
        )
        try:
            for each in plan.logs:
                if each.gone is not None:
                    if not anew:
                        raise each.gone
                    self._make_lasting(each.folder)
                    each = replace(each, gone=None)
                try:
                    disks[each.number] = open_log(each)
                except CorruptionError as error:
                    if not anew:
                        raise
                    aside = set_aside(self._files, each)
                    log.error(
                        "shard %s: %s It is kept in %s until the copy is in sync again.",
                        plan.shard,
                        error.sentence,
                        aside,
                    )
                    disks[each.number] = open_log(each)
        except BaseException:
            for disk in disks.values():
                disk.abandon()
            raise
        return disks


def what_is_lost(plan: ShardPlan, disks: Mapping[int, ReplicaDisk]) -> str:
    """What a copy has not any more that was acknowledged here; empty where it has all."""
    for number, disk in disks.items():
        if disk.is_anew:
            return f"log {number} is gone from this broker's disk, and is built anew from the shard's leader"
        # What `interval` had not synced may be gone after a power cut: that is judged by the broker's start.
        if disk.is_short and plan.durability == "fsync":
            return (
                f"log {number} on this broker's disk ends before what it had acknowledged, as an older copy does; "
                "it is made equal to that of the shard's leader"
            )
    return ""
