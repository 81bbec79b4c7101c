"""A broker's place in its cluster: registered in the metadata store, alive there under a lease, and fenced before that lease can have
ended for anybody else.

The decisions are `registration`'s; here they are carried out on a real store and a real folder, the file always first. `mirror` shows
how the others come and go.

Invariants:
- `may_answer` is false from `LEASE_MARGIN_MS` before the end of the lease, which is counted from before each renewal was sent, by a
  clock that runs while the machine sleeps: a process that was stopped finds itself fenced with its first look, before any task runs;
- of two processes under one name at most one is alive in the store, and which one is decided there; the other stops for good
  (`ended`), or is refused at its start;
- whoever lost its lease, or finds its record gone, is fenced first, and then announces itself again under the same registration.

Order: `open`; then the caller opens its logs; `announce`; and at the end, after everything was synced, `close`, also where one of
these failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from felix.errors import Code, CorruptionError, FelixError, RequestError, UnavailableError
from felix.periodic import every
from felix.runtime.port import Runtime
from felix.tasks import end_tasks
from region.cluster import registration
from region.cluster.audit_home import AuditHome
from region.cluster.mirror import ClusterMirror
from region.cluster.node_file import NodeFile
from region.cluster.records import BrokerRecord, Health, ShardId
from region.cluster.registration import LEASE_MARGIN_MS, PULSE_MS, FolderRecord, Start, Step, superseded
from region.cluster.transactions import Reason, Refusal
from region.metadata.lease import Lease
from region.metadata.port import MetadataStore
from region.metadata.transaction import Change, Snapshot

log = logging.getLogger("felix.region.cluster")

EXPIRY_SLACK_MS: Final = 2_000
"""How long after its time a store may still show what a lease held: etcd looks twice a second, and deletes by consensus."""
RETRY_MS: Final = 1_000
"""How soon a broker that is not alive in the store tries again."""
RETURN_MS: Final = 10_000
"""So soon after the store answers again every broker that lives is alive there again: a second between two tries, and one request."""
CATCH_UP_MS: Final = 30_000
"""How long the watch may take to show a broker its own registration; it takes milliseconds while the store answers."""
STOP_TRIES: Final = 3
"""For the mark of an end in order, where a pulse or a drain came between. Without it the next start counts as one after a crash."""
_Answer = TypeVar("_Answer")
_GONE_FOR_GOOD: Final = frozenset({Reason.SUPERSEDED, Reason.OLD_FOLDER, Reason.OTHER_FOLDER})
"""Reasons that do not go away with time: another process has the name, or has moved on with another copy of the folder."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a broker is reached, `host:port`, by clients and by its peers."""

    client: str
    peer: str


class Registry:
    """One broker's. `may_answer` and `refusal` may be called from every thread; the rest belongs to one event loop."""

    def __init__(
        self,
        store: MetadataStore,
        mirror: ClusterMirror,
        node_file: NodeFile,
        start: Start,
        address: Address,
        *,
        lease_ms: int,
        runtime: Runtime,
    ) -> None:
        self._store = store
        self._mirror = mirror
        self._node_file = node_file
        self._start = start
        self._address = address
        self._lease_ms = lease_ms
        self._clock = runtime.clock
        # One thread: of two writes of the file the later one stays.
        self._disk: Executor = runtime.pool(1, "felix-registry")
        self._file = FolderRecord(folder="")
        self._unsaved = ""
        """why the last pulse could not be written into the folder"""
        self._registered_revision = 0
        self._lease: Lease | None = None
        self._answered_ms = 0
        """when it answered last while there was no lease"""
        self._resumed_ms = 0
        """when it answered again after a lease was lost; 0 where none was"""
        self._is_announced = self._was_put = False
        self._health = Health()
        self._why = "it is not registered yet"
        self._ended: FelixError | None = None
        self._over = asyncio.Event()
        self._alive_revision = 0
        self._untold: Lease | None = None
        """a new lease that the watch has not shown yet"""
        self._was_fenced = False
        """whether others may have been elected in the place of this process"""
        self._announcing = asyncio.Lock()
        self._listeners: list[Callable[[Lease | None], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._folders: dict[str, str] = {}
        """of the brokers that are registered, as the watch has shown them"""
        mirror.on_change(self._look)
        mirror.on_change(self._note_brokers)

    # What it says

    @property
    def broker(self) -> str:
        """The broker's id."""
        return self._start.broker

    @property
    def registration(self) -> int:
        """The number of this start; 0 before `open`."""
        return self._file.registration if self._registered_revision else 0

    @property
    def registered_revision(self) -> int:
        """The store's revision that registered this start; 0 before `open`."""
        return self._registered_revision

    @property
    def folder(self) -> str:
        """The id of the broker's data folder."""
        return self._file.folder

    @property
    def audit(self) -> str:
        """Where the region's audit log is, as the data folder has it; empty where it does not know yet."""
        return self._file.audit

    async def remember_audit(self, where: str) -> None:
        """Have the data folder know where the region's audit log is. Raises OSError."""
        await self._save(msgspec.structs.replace(self._file, audit=where))

    @property
    def ended(self) -> FelixError | None:
        """Why this process can never be alive in the cluster again, or None. Whoever runs the broker ends it then."""
        return self._ended

    async def over(self) -> FelixError:
        """Wait until `ended` says why."""
        await self._over.wait()
        assert self._ended is not None
        return self._ended

    @property
    def is_beginning(self) -> bool:
        """Whether this process is registered, by all that is known last, and was never alive yet: no process of this broker is, and none that was registered before can be again."""
        if not self._registered_revision or self._was_put or self._ended is not None:
            return False
        node = self._mirror.view.nodes.get(self.broker)
        return node is None or node.registration <= self._file.registration

    def may_answer(self) -> bool:
        """Whether what rests on no commit may be answered now: no other broker can have been elected in our place.

        Not before the watch has shown that we are alive: whoever was elected while we were not stands before that, unless the store went back.
        """
        lease = self._lease
        return (
            self._is_announced
            and lease is not None
            and self._is_shown()
            and lease.remaining_ms() > LEASE_MARGIN_MS
        )

    def _is_shown(self) -> bool:
        """Whether what was elected while we were not alive is known. A store that went back may not know it: no lease that is taken after one
        was lost counts before the region is reconciled."""
        view = self._mirror.view
        if self._untold is not None and self._was_fenced and view.revision_of(view.keys.frozen):
            return False
        return view.revision >= self._alive_revision

    def refusal(self) -> UnavailableError | None:
        """The same, as what is answered instead."""
        if self.may_answer():
            return None
        return UnavailableError(
            f"Broker {self.broker} does not answer for its shards: its lease in the metadata store has ended, and others may lead them "
            f"({self._why}).",
            code=Code.NOT_LEADER,
            hint="Ask the region's other brokers. This one is back once the store answers it.",
            retry_after_ms=RETRY_MS,
        )

    def unanswered_ms(self) -> int:
        """For how long the store has answered this broker nothing; 0 while it answers. It is asked three times a lease, so this is known after two
        thirds of one."""
        lease = self._lease
        if lease is None:
            return 0
        silent_ms = self._clock.boot_ms() - max(lease.renewed_ms, self._answered_ms)
        return silent_ms if silent_ms > lease.ttl_ms * 2 // 3 else 0

    def is_returning(self) -> bool:
        """Whether the store has only just begun to answer again: who lost its lease meanwhile may live, and not be alive there yet."""
        lease = self._lease
        resumed_ms = max(self._resumed_ms, 0 if lease is None else lease.resumed_ms)
        return bool(resumed_ms) and self._clock.boot_ms() - resumed_ms < RETURN_MS

    def on_lease(self, listener: Callable[[Lease | None], None]) -> None:
        """Tell `listener` of each new lease that the broker is alive under, once the watch has shown that: what was elected while it was not
        alive is known by then. And None once the lease is lost, or may be."""
        self._listeners.append(listener)

    # A broker's life

    async def open(self, *, replace: bool = False) -> None:
        """Register, where need be after the lease of another process under this name has ended. The mirror must have been started.

        `replace`: this folder is new, and what was in the broker's former one is given up. Raises RequestError where the folder is not
        the broker's, or an older copy, UnavailableError(SERVED_ELSEWHERE) where another process is alive under the name,
        CorruptionError, OSError of the file and what the store raises.
        """
        self._file = await self._on_disk(self._node_file.load)
        waited_from_ms: int | None = None
        while True:
            step = registration.intend(self._mirror.view, self._file, self._start, replace=replace)
            if isinstance(step, Step):
                await self._save(step.file)
                result = await self._mirror.commit(step.transaction)
                if result is not None and result.succeeded:
                    break
                continue
            if not step.retry:
                raise _error(step)
            now_ms = self._clock.boot_ms()
            if waited_from_ms is None:
                waited_from_ms = now_ms
                log.info("waiting for a lease to end: %s", step.sentence)
            left_ms = waited_from_ms + self._silence_ms() - now_ms
            if left_ms <= 0:
                raise _error(step)
            revision = self._mirror.view.revision
            with suppress(TimeoutError):
                async with asyncio.timeout(left_ms / 1_000):
                    await self._mirror.until(lambda seen=revision: self._mirror.view.revision > seen)  # type: ignore[misc]
        await self._save(registration.registered(self._file))
        self._registered_revision = result.revision
        self._why = "it has not announced itself yet"

    async def announce(self, health: Health) -> None:
        """Be alive, from now until `close`: the broker may be elected. Its logs have been opened, and all that recovery kept is synced.

        Nothing may be followed or acknowledged on what was read before the broker was registered: first the watch reaches that.
        """
        assert self._registered_revision and not self._tasks
        try:
            async with asyncio.timeout(CATCH_UP_MS / 1_000):
                await self._mirror.until(lambda: self._mirror.view.revision >= self._registered_revision)
        except TimeoutError:
            raise UnavailableError(
                f"The watch of the metadata store has not shown the registration of broker {self.broker} for {CATCH_UP_MS} ms.",
                retry_after_ms=RETRY_MS,
            ) from None
        self._health = health
        await self._announce()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._keep(), name="cluster lease"),
            loop.create_task(
                every(PULSE_MS / 1_000, self._pulse, "raising the pulse failed", log), name="cluster pulse"
            ),
        ]

    async def tell(self, health: Health) -> None:
        """Say something else of this broker to the others; whoever is not alive now says it once it is. Raises what the store raises."""
        self._health = health
        if self._is_announced:
            await self._announce()

    async def sync_failed(self) -> None:
        """Write down that what was acknowledged without a sync may be gone. Before the leader's word that its copy failed. Raises
        OSError."""
        await self._save(registration.after_failed_sync(self._file))

    async def close(self, *, in_order: bool = True) -> None:
        """Let others take over at once. `in_order`: everything that was acknowledged is synced, and nothing more will be.

        Where the store does not answer, the lease ends by itself, and the next start counts as one after a crash.
        """
        await end_tasks(*self._tasks)
        self._tasks = []
        self._fence("the broker stops")
        try:
            if in_order and self._registered_revision and self._ended is None:
                with suppress(FelixError):
                    await self._stop()
            if self._lease is not None:
                with suppress(FelixError):
                    await self._lease.revoke()
        finally:
            self._disk.shutdown(wait=False)

    async def _stop(self) -> None:
        for _ in range(STOP_TRIES):
            step = registration.stop(self._mirror.view, self._file, self.broker)
            if isinstance(step, Refusal):
                return
            await self._save(step.file)
            result = await self._mirror.commit(step.transaction)
            if result is not None and result.succeeded:
                return

    # The lease

    async def _announce(self) -> None:
        """Put our record under the lease that we have, or under a new one."""
        async with self._announcing:
            lease, is_new = self._lease, False
            if lease is not None and lease.lost.is_set():
                # Whoever announces anew may be quicker than the task that waits for the loss.
                self._fence(lease.reason)
            if lease is None or not self._is_announced:
                had_one = lease is not None
                lease, is_new = await self._store.grant(self._lease_ms), True
                self._answered_ms = lease.renewed_ms
                if had_one:
                    self._resumed_ms = lease.renewed_ms
            self._was_put = True
            try:
                revision = await self._put(lease)
            except BaseException:
                if is_new:
                    # With what may have been bound to it by a request whose answer was lost.
                    with suppress(FelixError):
                        await lease.revoke()
                raise
            if is_new:
                self._alive_revision, self._untold = revision, lease
            self._lease, self._is_announced = lease, True
        # What the watch brought meanwhile was not looked at.
        self._look()

    async def _put(self, lease: Lease) -> int:
        """The revision that the record was written at."""
        while True:
            health = self._health
            record = BrokerRecord(
                registration=self._file.registration,
                folder=self._file.folder,
                lock=self._start.lock,
                host=self._start.host,
                client_address=self._address.client,
                peer_address=self._address.peer,
                lease_ms=lease.ttl_ms,
                health=health,
            )
            made = registration.announce(self._mirror.view, self._file, self.broker, record, lease.id)
            if isinstance(made, Refusal):
                self._refused(made)
                raise _error(made)
            result = await self._mirror.commit(made)
            if result is not None and result.succeeded and health == self._health:
                return result.revision

    async def _keep(self) -> None:
        """Announce ourselves again whenever the lease was lost, until this process cannot be alive in the cluster any more."""
        told = ""
        while self._ended is None:
            lease = self._lease
            assert lease is not None
            if self._is_announced:
                await lease.lost.wait()
                if lease is self._lease:
                    self._fence(lease.reason)
                    log.error("broker %s has lost its lease: %s", self.broker, lease.reason)
                continue
            try:
                await self._announce()
            except FelixError as error:
                self._why = error.sentence.removesuffix(".")
                if self._why != told:
                    told = self._why
                    log.error("broker %s is not alive in the cluster: %s", self.broker, error)
                await asyncio.sleep(RETRY_MS / 1_000)
                continue
            except Exception:
                # A broker that is fenced for ever by a mistake would never say so.
                log.exception("announcing broker %s failed", self.broker)
                await asyncio.sleep(RETRY_MS / 1_000)
                continue
            told = ""
            log.warning("broker %s is alive in the cluster again", self.broker)

    def _fence(self, why: str) -> None:
        if self._is_announced:
            self._is_announced, self._was_fenced = False, True
            self._why = why.removesuffix(".")
            self._untold = None
            self._tell(None)

    def _tell(self, lease: Lease | None) -> None:
        for listener in self._listeners:
            listener(lease)

    def _look(self, _: Snapshot | Change | None = None) -> None:
        """Whether what the records say of us is what we said."""
        if not self._is_announced or self._announcing.locked():
            return
        alive = self._mirror.view.alive.get(self.broker)
        refusal = superseded(self._mirror.view, self._file, self.broker)
        if refusal is not None:
            self._refused(refusal)
        elif alive is None or alive.registration != self._file.registration:
            self._give_up("Its record is gone from the metadata store.")
        elif self._untold is not None and self._is_shown():
            lease, self._untold = self._untold, None
            self._tell(lease)

    def _note_brokers(self, known: Snapshot | Change) -> None:
        """Have the file know, with the next pulse, who was retired. What a snapshot lacks may be lacking because the store went back."""
        keys = self._mirror.view.keys
        if isinstance(known, Change) and self._registered_revision:
            changed = {
                event.key.removeprefix(keys.nodes): event.entry is not None
                for event in known.events
                if event.key.startswith(keys.nodes)
            }
            self._file = registration.with_brokers(self._file, self._folders, changed)
            self._note_audit_copies(known)
        self._folders = {broker: node.folder for broker, node in self._mirror.view.nodes.items()}

    def _note_audit_copies(self, known: Change) -> None:
        """Have the file know, with the next pulse, whose copies of the audit log are in sync."""
        view, shard = self._mirror.view, self._audit_shard
        if shard is None or all(event.key != view.keys.shard(shard) for event in known.events):
            return
        if (record := view.shards.get(shard)) is not None:
            self._file = registration.with_audit_copies(self._file, record, view.nodes)

    @property
    def _audit_shard(self) -> ShardId | None:
        """None where the log is on one broker's disk, or this folder does not know yet."""
        if not self._file.audit:
            return None
        home = AuditHome.decode(self._file.audit, f"the folder of broker {self.broker}")
        return ShardId(home.incarnation, 0) if home.incarnation else None

    def _refused(self, refusal: Refusal) -> None:
        if refusal.reason in _GONE_FOR_GOOD and self._ended is None:
            self._ended = _error(refusal)
            self._over.set()
            log.critical("broker %s stops for good: %s", self.broker, refusal.sentence)
        self._give_up(refusal.sentence)

    def _give_up(self, why: str) -> None:
        """Be fenced, and let the lease end: what stands under it, if anything does, is nothing that we stand for."""
        self._fence(why)
        if self._lease is not None:
            self._lease.lose(why)

    async def _pulse(self) -> None:
        step = registration.raise_pulse(self._mirror.view, self._file, self.broker)
        if isinstance(step, Refusal):
            self._refused(step)
            return
        try:
            await self._save(step.file)
        except OSError as error:
            if (why := error.strerror or str(error)) != self._unsaved:
                self._unsaved = why
                log.error(
                    "the pulse of broker %s cannot be written into its folder: %s; it is tried again every %d s",
                    self.broker,
                    why,
                    PULSE_MS // 1_000,
                )
            return
        if self._unsaved:
            self._unsaved = ""
            log.warning("the pulse of broker %s is written into its folder again", self.broker)
        try:
            await self._mirror.commit(step.transaction)
        except FelixError as error:
            log.warning("the pulse of broker %s was not raised: %s", self.broker, error)

    # The folder

    async def _save(self, file: FolderRecord) -> None:
        # Known before it is written: whatever is written next has it, too.
        self._file = file
        await self._on_disk(lambda: self._node_file.save(file))

    async def _on_disk(self, work: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def _silence_ms(self) -> int:
        """How long whoever is alive under our name may say nothing before its record must be gone."""
        alive = self._mirror.view.alive.get(self.broker)
        return max(self._lease_ms, 0 if alive is None else alive.lease_ms) + EXPIRY_SLACK_MS


def _error(refusal: Refusal) -> FelixError:
    match refusal.reason:
        case Reason.STILL_ALIVE | Reason.OLD_BROKER:
            return UnavailableError(
                refusal.sentence,
                code=Code.SERVED_ELSEWHERE,
                hint="Two processes under one broker's name would answer for the same copies. Stop the other one first.",
            )
        case Reason.OLD_FOLDER | Reason.OLD_STORE:
            return CorruptionError(refusal.sentence, code=Code.ROLLED_BACK)
        case _:
            return RequestError(refusal.sentence, code=Code.CONFLICT)
