"""A broker as a member of its region's cluster: registered, alive, with its part in being the controller, and what it leads.

Order: `open`, before anything is opened that others may have, too; `follow` the catalog; listen; `announce`; then elections come, told
to whoever asked by `on_assigned`. At the end, after all logs are closed, `close`.

Invariant: nothing of a shard is answered that `refusal` does not allow: it is asked before each append, each acknowledgement and each
word about where a log ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self

from felix.errors import Code, CorruptionError, FelixError, RequestError, UnavailableError
from felix.runtime.port import Runtime
from felix.tasks import end_tasks
from keys.signing import VerifyKey
from region.cluster.assignments import Assignments
from region.cluster.audit_home import AuditHome
from region.cluster.controller import AskEnds, StreamWish
from region.cluster.controller_service import ControllerService
from region.cluster.mirror import ClusterMirror
from region.cluster.node_file import NodeFile
from region.cluster.records import ELECTION_CHARS, Health, ShardId
from region.cluster.registration import Start
from region.cluster.registry import Address, Registry
from region.metadata.lease import Lease
from region.metadata.port import MetadataStore
from region.metadata.records import INCARNATION_BYTES, Stream, min_in_sync
from region.metadata.transaction import Absent, Change, Put, Snapshot

log = logging.getLogger("felix.region.cluster")

WANT_PAUSES: Final = 10
"""After a look at all streams the next one waits so many times as long as it took: a tenth of the event loop at most."""


class Catalogued(NamedTuple):
    """The streams of the catalog, of deleted ones the revision of their marks, by incarnation, the groups of those that are to be
    placed with others, by name, and whether the only copy of a stream cannot be moved."""

    streams: Iterable[Stream]
    deleted: Mapping[str, int]
    groups: Mapping[str, tuple[str, ...]]
    stays: Callable[[Stream], bool]


class ClusterMember:
    """One broker's. `refusal` may be called from every thread; the rest belongs to one event loop."""

    def __init__(self, store: MetadataStore, region: str, start: Start, runtime: Runtime) -> None:
        self._store = store
        self._region = region
        self._start = start
        self._runtime = runtime
        self._mirror = ClusterMirror(store, region, runtime)
        self._registry: Registry
        self._controller: ControllerService
        self.assignments: Assignments
        self.audit = AuditHome("")
        """where the audit log is"""
        self._log_keys: tuple[VerifyKey, ...] = ()
        self._known_audit = ""
        """the same, as the data folder knows it; empty where it does not"""
        self._listeners: list[Callable[[str], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._catalog: Callable[[], Catalogued] | None = None
        self._system: list[Stream] = []
        """streams that are placed, and stand in no catalog"""
        self._wanting: asyncio.TimerHandle | None = None
        self._want_not_before = 0.0
        self._leaders_since, self._leaders_since_ms = 0, 0
        """the view's, and when this process heard of it"""
        self._wishes: dict[str, tuple[Stream, tuple[str, ...], bool, StreamWish]] = {}
        """what was wanted of each stream, and what it was made of: most streams are as they were"""

    @classmethod
    async def open(
        cls,
        store: MetadataStore,
        region: str,
        start: Start,
        node_file: NodeFile,
        address: Address,
        *,
        lease_ms: int,
        audit_copies: int,
        log_keys: Sequence[VerifyKey] = (),
        runtime: Runtime,
        replace: bool = False,
    ) -> Self:
        """Register. `audit_copies`: how many brokers are to have the audit log, where nobody has it yet. `log_keys`: Ed25519 keys that sign it, or did.
        `replace`: as `Registry.open`; refused with
        RequestError(CONFLICT) for a broker whose disk alone has the audit log. Raises as `Registry.open`, and
        CorruptionError where the record of the audit log cannot be read, is gone, or is another one than this folder knows."""
        member = cls(store, region, start, runtime)
        mirror = member._mirror
        registry = member._registry = Registry(
            store, mirror, node_file, start, address, lease_ms=lease_ms, runtime=runtime
        )
        member._controller = ControllerService(
            store, mirror, registry, member._ask_ends, lease_ms=lease_ms, runtime=runtime
        )
        member.assignments = Assignments(mirror.view, start.broker, lambda: registry.registration)
        mirror.on_change(member._changed)
        try:
            await mirror.start()
            if replace:
                await member._refuse_second_history()
            member._known_audit = (await asyncio.to_thread(node_file.load)).audit
            member._log_keys = tuple(log_keys)
            # Before it is registered: the first broker of a region finds no other.
            member.audit = await member._claim_audit(audit_copies)
            await registry.open(replace=replace)
            if registry.audit != member.audit.encode():
                await registry.remember_audit(member.audit.encode())
        except BaseException:
            await member.close(in_order=False)
            raise
        if (stream := member.audit.stream) is not None:
            member._system.append(stream)
        return member

    async def _refuse_second_history(self) -> None:
        entry = await self._store.get(self._mirror.view.keys.audit_home)
        if entry is not None and self._alone_has_audit(self.broker, AuditHome.of(entry)):
            raise RequestError(
                f"Broker {self.broker} has the region's audit log in its data folder: with an empty one it would begin a second history.",
                code=Code.CONFLICT,
                hint="Put its folder back, or at least a backup of the folder audit in it.",
            )

    def alone_has_audit(self, broker: str) -> bool:
        """Whether no other broker than this one has all of the audit log."""
        return self._alone_has_audit(broker, self.audit)

    def _alone_has_audit(self, broker: str, home: AuditHome) -> bool:
        if home.before is None or home.before.broker != broker:
            return home.broker == broker
        record = self._mirror.view.shards.get(ShardId(home.incarnation, 0))
        # The audit log's home asks for more copies than one once all of what the disk had is in the stream.
        return record is None or record.min < 2 or record.members().keys() <= {broker}

    async def _claim_audit(self, copies: int) -> AuditHome:
        """Where the audit log is; a new one for the first broker of a region. What the store lost is put back as this folder knows it. Raises
        CorruptionError where it does not, and there were others: who administers the store could have a second history begun."""
        key = self._mirror.view.keys.audit_home
        while True:
            entry = await self._store.get(key)
            if entry is not None:
                break
            nodes = sorted(self._mirror.view.nodes)
            if nodes and not self._known_audit:
                raise CorruptionError(
                    f"The metadata store does not say where the region's audit log is ({key}), though {', '.join(nodes)} have been brokers there.",
                    code=Code.ROLLED_BACK,
                    hint="Start one of these first, with the data folder that it had: it knows. A log that begins anew would be a second history.",
                )
            incarnation = self._runtime.random.randbytes(INCARNATION_BYTES).hex()
            home = AuditHome("", incarnation, copies, self._runtime.clock.now_ms())
            where = (self._known_audit or home.encode()).encode()
            await self._store.transact([Absent(key)], [Put(key, where)])
        found = AuditHome.of(entry)
        known = self._known_audit
        if known and known != found.encode() and not found.follows(known, self._region, self._log_keys):
            raise CorruptionError(
                f"The metadata store names another audit log ({found.encode()}) than broker {self.broker} knows ({known}): it was changed "
                "there, or put back.",
                code=Code.ROLLED_BACK,
                hint="Run `felix region copy-audit-log` again where the log is, if it did not end; else stop every broker, and run `felix region reconcile`."
                if AuditHome.decode(known, "The data folder").continues(found.encode())
                else "Find out who wrote the key audit_home, and delete it: the broker puts it back. A log that begins anew would be a second history.",
            )
        return found

    # What it says

    @property
    def broker(self) -> str:
        """This broker's id."""
        return self._start.broker

    @property
    def controller(self) -> str:
        """The broker that is the controller; empty while none is."""
        record = self._mirror.view.controller
        return "" if record is None else record.broker

    @property
    def controls(self) -> ControllerService:
        """This broker's part in being the controller."""
        return self._controller

    @property
    def alarms(self) -> dict[str, str]:
        """What needs a person, by subject, where this broker is the controller."""
        return dict(self._controller.alarms)

    @property
    def brokers(self) -> dict[str, str]:
        """Every broker that was ever registered, with the address of each that is alive."""
        view = self._mirror.view
        return {broker: self.assignments.address(broker) for broker in sorted(view.nodes)}

    @property
    def mirror(self) -> ClusterMirror:
        """The cluster's records, as this broker knows them."""
        return self._mirror

    @property
    def registry(self) -> Registry:
        """This broker's registration and lease."""
        return self._registry

    @property
    def region(self) -> str:
        """The region's name."""
        return self._region

    def unanswered(self) -> tuple[int, int]:
        """For how long the metadata store has answered this broker nothing, in ms, and since when (wall clock, ms); 0 and 0 while it answers."""
        silent_ms = self._registry.unanswered_ms()
        return (silent_ms, self._runtime.clock.now_ms() - silent_ms) if silent_ms else (0, 0)

    def silent_members(self) -> dict[str, int]:
        """Members of the metadata store that do not answer this broker, by name, and for how long in ms."""
        return self._store.silent_members()

    def may_be_out_of_date(self) -> bool:
        """Whether what is known of the other brokers may be from before: the store cannot be asked, cannot be followed, or has only just begun to
        answer again."""
        registry = self._registry
        return bool(registry.unanswered_ms()) or registry.is_returning() or not self._mirror.is_current

    def leaders_stand_ms(self) -> int:
        """For how long this process has not heard that a shard has another leader."""
        return self._runtime.clock.boot_ms() - self._leaders_since_ms

    def refusal(self) -> UnavailableError | None:
        """Why this broker may not answer for what it leads now, or None."""
        return self._registry.refusal()

    @property
    def is_beginning(self) -> bool:
        """Whether this process is registered, and was never alive yet: no process of this broker is, and none that was registered before can be again."""
        return self._registry.is_beginning

    def on_assigned(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each stream whose leader may be another one now."""
        self._listeners.append(listener)

    def on_lease(self, listener: Callable[[], object]) -> None:
        """Call `listener` whenever this broker is alive under a new lease."""

        def changed(lease: Lease | None) -> None:
            if lease is not None:
                listener()

        self._registry.on_lease(changed)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what a change of the records brings about. Bound it with a timeout."""
        await self._mirror.until(holds)

    # Its life

    def follow(self, catalog: Callable[[], Catalogued]) -> None:
        """Place what `catalog` says, now and after each `catalog_changed`."""
        self._catalog = catalog
        self._want()

    def catalog_changed(self) -> None:
        """Streams came, went or changed. Soon looked at: each look is at all of them, so many changes share one."""
        if self._wanting is None:
            loop = asyncio.get_running_loop()
            self._wanting = loop.call_at(max(loop.time(), self._want_not_before), self._want)

    def _want(self) -> None:
        loop = asyncio.get_running_loop()
        began, self._wanting = loop.time(), None
        assert self._catalog is not None
        streams, deleted, groups, stays = self._catalog()
        before, self._wishes = self._wishes, {}
        for stream in self._system + list(streams):
            of, held, is_fixed = groups.get(stream.name, ()), before.get(stream.incarnation), stays(stream)
            is_same = held is not None and held[0] is stream and held[1:3] == (of, is_fixed)
            self._wishes[stream.incarnation] = (
                held if held and is_same else (stream, of, is_fixed, _wish(stream, of, stays=is_fixed))
            )
        self._controller.want([wish for *_, wish in self._wishes.values()], deleted)
        ended = loop.time()
        self._want_not_before = ended + WANT_PAUSES * (ended - began)

    def election_id(self) -> str:
        """A fresh one, for an election by an operator."""
        return self._runtime.random.randbytes(ELECTION_CHARS // 2).hex()

    async def announce(self) -> None:
        """Be alive: the broker listens, and may be elected from now on. Raises what the store raises."""
        await self._registry.announce(Health(open=True))
        self._tasks.append(
            asyncio.get_running_loop().create_task(self._controller.run(), name="cluster controller")
        )

    async def ended(self) -> FelixError:
        """Wait until this process can never be alive in the cluster again; why."""
        return await self._registry.over()

    async def close(self, *, in_order: bool = True) -> None:
        """Let others take over at once. `in_order`: all that was acknowledged is on the disk, and the logs are closed."""
        if self._wanting is not None:
            self._wanting.cancel()
        await end_tasks(*self._tasks)
        await self._controller.close()
        await self._registry.close(in_order=in_order)
        await self._mirror.close()

    # What it hears

    def _changed(self, known: Snapshot | Change) -> None:
        view = self._mirror.view
        if view.leaders_since != self._leaders_since:
            self._leaders_since, self._leaders_since_ms = view.leaders_since, self._runtime.clock.boot_ms()
        keys = [event.key for event in known.events] if isinstance(known, Change) else None
        if keys is None:
            shards = list(view.shards)
        else:
            shards = [view.keys.shard_of(key) for key in keys if key.startswith(view.keys.shards)]
        for name in {view.shards[shard].stream for shard in shards if shard in view.shards}:
            for listener in self._listeners:
                listener(name)

    def _ask_ends(self, asked: AskEnds) -> None:
        # Of one copy alone nothing is asked: it is the longest.
        log.error(
            "%s has copies at %s, which cannot be asked how far they go.",
            asked.shard,
            ", ".join(asked.brokers),
        )


def _wish(stream: Stream, groups: tuple[str, ...], *, stays: bool) -> StreamWish:
    kind = stream.config.durability.kind
    return StreamWish(
        stream.incarnation,
        stream.name,
        stream.config.shards,
        stream.config.replicas,
        min_in_sync(stream.config),
        "fsync" if kind == "fsync" else "interval",
        groups=groups,
        stays=stays,
        in_memory=kind == "ephemeral",
    )
