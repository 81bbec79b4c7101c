"""A broker as a process: it is opened (region.startup), listens, does its periodic work, and closes in the reverse order.

Invariants: what was opened is closed, whatever fails; a stop answers what is under way first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Final

from audit.trail_reopening import LOOK_S, TrailReopening
from felix.address import Address
from felix.errors import FelixError
from felix.health import HealthServer
from felix.messages import Goodbye
from felix.periodic import every
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.structs import prepare_structs
from felix.tasks import end_tasks
from felix.told import Told
from felix.transport.driver import check_address
from felix.transport.port import Listener, engine_named
from region.broker_certificate import server_names
from region.config import RegionConfig
from region.copies.replicas import Replicas
from region.folder import RegionFolder
from region.gauges import BrokerGauges
from region.metrics import BrokerCollector
from region.replication.links import PEER_ALPN
from region.session.client_session import ClientSession
from region.startup.broker import Parts, open_broker
from region.startup.ground import THIS_MACHINE, Machine

log = logging.getLogger("felix.region.node")

OFFLOAD_CHECK_S: Final = 1.0
"""How often the broker looks whether segments are to be offloaded."""
OFFLOAD_CHECKS_PER_DELETION: Final = 60
"""Objects of deleted streams that a store did not delete are asked for again so seldom."""
COMPACT_CHECK_S: Final = 5.0
"""How often the broker looks whether a compacted stream's shards are worth a pass."""
MEASURE_S: Final = 1.0
"""How often the broker looks what is used and stored; rates are over this long."""
RENEW_CHECK_S: Final = 60.0
"""How often the broker looks whether its certificate is due for renewal."""
LEAVE_MS: Final = 500
"""Clients are told to leave, and have this long before their connections close."""


class Node:
    """One broker that serves. Made by `start`, ended by `stop`."""

    def __init__(
        self,
        folder: RegionFolder,
        config: RegionConfig,
        runtime: Runtime,
        parts: Parts,
        listener: Listener,
        stack: AsyncExitStack,
    ) -> None:
        self.folder = folder
        self.config = config
        self.broker = parts.broker
        self.services = parts.services
        self.caches = parts.caches
        self.queues = parts.queues
        self.subscriptions = parts.subscriptions
        self.transactions = parts.transactions
        self.listener = listener
        self.gauges = BrokerGauges(
            parts.broker,
            parts.directory,
            parts.services.governance,
            parts.caches,
            parts.queues,
            parts.subscriptions,
            parts.transactions,
            listener,
            parts.services.relays,
            self._not_ready,
        )
        self.health: HealthServer | None = None
        """where one is configured"""
        self._parts = parts
        self._now_ms = runtime.clock.now_ms
        self._stack = stack
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        folder: RegionFolder,
        config: RegionConfig,
        runtime: Runtime = REAL,
        machine: Machine = THIS_MACHINE,
        *,
        replace_folder: bool = False,
    ) -> Node:
        """Open everything and listen. What was opened before a failure is closed again. `replace_folder`: as `open_broker` has it."""
        prepare_structs()
        stack = AsyncExitStack()
        try:
            if replace_folder and machine.engine is None:
                # The former folder is given up as this one is opened: not by a broker that cannot serve then.
                await check_address(config.listen.host, config.listen.port)
            parts = await open_broker(folder, config, runtime, machine, stack, replace_folder=replace_folder)
            engine = machine.engine or engine_named(config.engine or None)
            listener = await engine.listen(
                config.listen.host,
                config.listen.port,
                parts.certificate.tls(),
                lambda: ClientSession(parts.services),
                parts.broker.transport_limits,
                others={} if parts.peers is None else {PEER_ALPN: parts.peers.links.accept},
            )
            node = cls(folder, config, runtime, parts, listener, stack)
            stack.push_async_callback(node._leave)
            node._serve()
            if parts.clustered is not None:
                await parts.clustered.member.announce()
            if parts.peers is not None:
                parts.peers.replicas.start()
                stack.push_async_callback(node._hand_on, parts.peers.replicas)
        except BaseException:
            await stack.aclose()
            raise
        log.info("broker %s of %s serves at %s", config.broker, config.region, node.address)
        return node

    @property
    def address(self) -> Address:
        """Where clients reach the broker; the real port where 0 was asked."""
        return Address(*self.listener.address)

    @property
    def server_names(self) -> tuple[str, ...]:
        """What the broker's certificate carries."""
        return server_names(self.config)

    # -- while it serves -------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Show how the broker is, and begin what goes on beside sessions."""
        config, parts = self.config, self._parts
        if config.health is not None:
            collector = BrokerCollector(
                self.broker.metrics,
                self.gauges.values,
                self.gauges.shards,
                self.broker.quotas,
                self.subscriptions.lags,
                lambda: self.broker.expiries.seconds_left(self._now_ms()),
            )
            self.health = HealthServer(
                config.health.host, config.health.port, collector, self._not_ready, self._not_in_sync
            )
            self._stack.push_async_callback(asyncio.to_thread, self.health.close)
        self._stack.push_async_callback(self._stop_tasks)
        self._repeat()
        self._spawn(parts.follower.run())
        if parts.registration is not None:
            self._spawn(parts.registration.keep())

    def _not_ready(self) -> str:
        """Why the broker does not serve; asked from another thread."""
        if self.broker.leaving:
            return "the broker is shutting down"
        own_files = self.broker.own_files
        assert own_files is not None
        return self._parts.may_not_write() or own_files.not_ready()

    def _not_in_sync(self) -> str:
        """Why the broker does not serve, or lacks something that others have; asked from another thread."""
        clustered = self._parts.clustered
        return self._not_ready() or ("" if clustered is None else clustered.out_of_sync())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def _stop_tasks(self) -> None:
        await end_tasks(*self._tasks)
        await self._parts.streams.maintenance.close()

    def _repeat(self) -> None:
        """Start the periodic work. If a run fails by a bug, quotas use their last known values, logs stay as they were, and the
        other streams are still processed.
        """
        storage, parts = self.config.storage, self._parts
        streams, certificate = parts.streams, parts.certificate
        certificate.notice()

        snapshot_told = Told(self.broker.runtime.clock.monotonic)

        async def measure() -> None:
            self.broker.sweep()
            try:
                await asyncio.to_thread(self.services.governance.logged.save)
            except OSError as error:
                # It is tried each second, and saves a start reading alone.
                if snapshot_told.begins():
                    log.warning("the snapshot of the audit log's documents could not be written: %s", error)
            else:
                snapshot_told.ends()

        async def retain() -> None:
            self.subscriptions.hold_all()
            await streams.maintenance.sweep(await parts.retention_clock.now_ms())
            await parts.directory.remember_begun()

        async def compact() -> None:
            await streams.maintenance.compact(self.broker.streams_ms())
            if parts.peers is not None:
                await parts.peers.replicas.compact()

        async def offload() -> None:
            await streams.maintenance.offload(self.broker.streams_ms(), storage.offload_allow)

        async def follow_offload() -> None:
            if parts.peers is not None:
                await parts.peers.replicas.offload()

        async def delete() -> None:
            await asyncio.to_thread(parts.directory.retry_deletions)

        async def renew() -> None:
            try:
                await certificate.renew(self.listener.renew)
            finally:
                certificate.notice()

        for period_s, turn, failure in (
            (MEASURE_S, measure, "what is in use could not be measured"),
            (
                self.config.subscriptions.sweep_every / 1000,
                self.subscriptions.sweep,
                "inactive subscriptions could not be looked at",
            ),
            (storage.sweep_every / 1000, retain, "retention could not be applied"),
            (COMPACT_CHECK_S, compact, "streams could not be compacted"),
            (OFFLOAD_CHECK_S, offload, "segments could not be offloaded"),
            (OFFLOAD_CHECK_S, follow_offload, "copies could not be told of offloaded segments"),
            (
                OFFLOAD_CHECK_S * OFFLOAD_CHECKS_PER_DELETION,
                delete,
                "objects of deleted streams could not be deleted",
            ),
            (RENEW_CHECK_S, renew, "the broker's certificate could not be renewed"),
        ):
            self._spawn(every(period_s, turn, failure, log))
        assert self.broker.own_files is not None
        self._spawn(
            every(LOOK_S, self.broker.own_files.look, "the broker's own files could not be looked at", log)
        )
        if not (trail := self.services.governance.trail).copied:
            reopening = TrailReopening(trail, self.broker.runtime.clock)

            async def open_again() -> None:
                if reopening.is_due():
                    await asyncio.to_thread(reopening.open)

            self._spawn(every(LOOK_S, open_again, "the audit log could not be looked at", log))

    # -- stop ------------------------------------------------------------------------------------------

    async def _hand_on(self, replicas: Replicas) -> None:
        """Before anything is closed: who publishes goes on at the next leader before this broker says goodbye."""
        self.broker.leaving = True
        clustered = self._parts.clustered
        if clustered is not None and clustered.audit is not None:
            await clustered.audit.checkpoint()
        await replicas.give_up()

    async def _leave(self) -> None:
        self.broker.leaving = True
        self.services.governance.watch.close()
        for session in list(self.broker.sessions):
            session.leave(Goodbye(f"Broker {self.config.broker} is shutting down.", LEAVE_MS))
        if self.broker.sessions:
            await asyncio.sleep(LEAVE_MS / 1000)
        await self.listener.close("the broker is shutting down")

    async def ended(self) -> FelixError:
        """Wait until this broker can never serve again, whatever is tried: another process has its place in the cluster, or its keys were given up. Why."""
        over = [asyncio.ensure_future(self.services.governance.keys_ended())]
        if (clustered := self._parts.clustered) is not None:
            over.append(asyncio.ensure_future(clustered.member.ended()))
        try:
            done, _ = await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            await end_tasks(*over)

    async def stop(self) -> None:
        """Close everything, with every acknowledgement kept. Safe to call twice."""
        await self._stack.aclose()
        log.info("broker %s of %s stopped", self.config.broker, self.config.region)
