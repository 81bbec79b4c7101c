"""A modelled metadata store: etcd as its clients may meet it, on a world's time, at microseconds a request.

One linearizable history of revisions (the real compares and entries of region.metadata.transaction), leases, watches. What it does to
its clients: requests and answers take time and get lost; a request whose client has given up is applied late; members are cut off, with
the clients that hang on them; watches lag, each by itself, and never skip; leases end late, never early, by a clock of the store's own
rate; the store goes away as a whole, and comes back from a backup, at the backup's revision.

Passive: the world calls `run` up to its present time, and goes on at `next_ms`. Deterministic by the generator that is handed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from region.metadata.transaction import (
    Change,
    Compare,
    Delete,
    Entry,
    Event,
    Put,
    Snapshot,
    TransactResult,
    Write,
    check_transaction,
)


@dataclass(frozen=True)
class Unknown:
    """The client gave up waiting: it may have happened, may never, or may happen yet."""


@dataclass(frozen=True)
class LeaseLost:
    """A put named a lease that is gone, or a renewal did; nothing was written."""


@dataclass(frozen=True)
class Found:
    """Keys as they stood at `revision`."""

    entries: dict[str, Entry | None]
    revision: int


@dataclass(frozen=True)
class Granted:
    """A lease and its time to live."""

    lease: int
    ttl_ms: int


Answer = TransactResult | Found | Snapshot | Granted | LeaseLost | Unknown
Done = Callable[[Answer], None]


@dataclass
class StoreFaults:
    """How the store treats its clients, while the world wants it so. Chances are of one request."""

    delay_ms: tuple[int, int] = (1, 4)
    """a request's way, and an answer's"""
    lost: float = 0.0
    """the request never arrives"""
    unanswered: float = 0.0
    """the answer never arrives"""
    late: float = 0.0
    """the request waits in the store, until `late_ms` after its client has given up"""
    late_ms: tuple[int, int] = (1, 10_000)
    lag_ms: tuple[int, int] = (1, 4)
    """a watch's"""
    expiry_ms: tuple[int, int] = (0, 500)
    """how long after its end a lease is ended"""


@dataclass
class Watch:
    """A client's place in the history. It ends where the store goes back to before it: `lost` is called, once."""

    client: StoreClient
    prefixes: tuple[str, ...]
    position: int
    changed: Callable[[Change], None]
    lost: Callable[[], None]
    wakes: bool = False
    ended: bool = False


@dataclass
class _Lease:
    ttl_ms: int
    ends_ms: float
    keys: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Backup:
    """The store at one time."""

    entries: dict[str, Entry]
    revision: int
    ttls_ms: dict[int, int]


class StoreModel:
    """The store. Times in ms of the world, which only ever go forward."""

    REQUEST_TIMEOUT_MS = 2_000
    """A client gives up waiting for an answer."""

    def __init__(self, random: Random, *, members: int = 3, clock_rate: float = 1.0) -> None:
        """`clock_rate`: the store's ms for each of the world's; its leases end by that."""
        self.random = random
        self.faults = StoreFaults()
        self.entries: dict[str, Entry] = {}
        self.revision = 1
        self.history: list[Change] = []
        self.members = members
        self.cut: set[int] = set()
        self.now_ms = 0.0
        self.applied_late = 0
        self.wrote: Callable[[str, Mapping[str, Entry | None]], None] = lambda client, before: None
        """called at each transaction of a client that happened, with what stood under the keys that it wrote"""
        self._rate = clock_rate
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self._watches: list[Watch] = []
        self._waiting: dict[int, list[Callable[[], None]]] = {}

    # The world's side

    def client(self, name: str, member: int = 0) -> StoreClient:
        """A client that hangs on one member."""
        return StoreClient(self, name, member % self.members)

    def next_ms(self) -> float | None:
        """When something happens next; None while nothing does."""
        return self._heap[0][0] if self._heap else None

    def run(self, now_ms: float) -> None:
        """Let everything happen that is due by `now_ms`."""
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            at, _, happens = heapq.heappop(heap)
            self.now_ms = max(self.now_ms, at)
            happens()
        self.now_ms = max(self.now_ms, now_ms)

    def isolate(self, member: int) -> None:
        """Cut a member off from the others: what its clients ask waits with it."""
        self.cut.add(member)

    def heal(self, member: int | None = None) -> None:
        """Bring a member (or all) back: what waited is applied now, however long ago its clients gave up; or was lost with the
        connection."""
        for back in list(self.cut) if member is None else [member]:
            self.cut.discard(back)
            for request in self._waiting.pop(back, []):
                if self.random.random() < 0.7:
                    self._at(self._draw(self.faults.delay_ms), request)
        for watch in self._watches:
            self._wake(watch)

    @property
    def is_up(self) -> bool:
        """Whether a majority of the members is together."""
        return 2 * (self.members - len(self.cut)) > self.members

    def stop(self) -> None:
        """Cut off all members: the store answers nobody."""
        self.cut.update(range(self.members))

    def backup(self) -> Backup:
        """The store as it is now."""
        return Backup(
            dict(self.entries), self.revision, {key: lease.ttl_ms for key, lease in self._leases.items()}
        )

    def restore(self, backup: Backup) -> None:
        """The store is what it was at the backup, its revision, too; its leases begin anew. Requests under way are lost."""
        self.entries, self.revision = dict(backup.entries), backup.revision
        self.history.clear()
        self._waiting.clear()
        self._leases.clear()
        self._heap.clear()
        for lease, ttl_ms in backup.ttls_ms.items():
            self._begin_lease(lease, ttl_ms)
            self._leases[lease].keys = {key for key, entry in self.entries.items() if entry.lease == lease}
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.ended = True
            self._at(self._draw(self.faults.lag_ms), watch.lost)

    def transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult | LeaseLost:
        """A transaction, now; for worlds that set the scene."""
        check_transaction(compares, writes)
        if any(
            isinstance(write, Put) and write.lease and write.lease not in self._leases for write in writes
        ):
            return LeaseLost()
        succeeded = all(compare.holds(self.entries.get(compare.key)) for compare in compares)
        if succeeded:
            self._write(writes)
        return TransactResult(succeeded, self.revision)

    # Inside

    def _at(self, delay_ms: float, happens: Callable[[], None]) -> None:
        self._made += 1
        heapq.heappush(self._heap, (self.now_ms + delay_ms, self._made, happens))

    def _draw(self, between: tuple[int, int]) -> float:
        low, high = between
        return low + self.random.random() * (high - low)

    def _write(self, writes: Sequence[Write]) -> None:
        revision, events = self.revision + 1, []
        for write in writes:
            key, old = write.key, self.entries.get(write.key)
            if old is not None and old.lease in self._leases:
                self._leases[old.lease].keys.discard(key)
            if isinstance(write, Put):
                entry = Entry(
                    key, write.value, revision if old is None else old.create_revision, revision, write.lease
                )
                self.entries[key] = entry
                if write.lease:
                    self._leases[write.lease].keys.add(key)
                events.append(Event(key, entry))
            elif old is not None:
                del self.entries[key]
                events.append(Event(key, None))
        if events:
            self.revision = revision
            self.history.append(Change(revision, tuple(events)))
            for watch in self._watches:
                self._wake(watch)

    def _begin_lease(self, lease: int, ttl_ms: int) -> None:
        self._leases[lease] = _Lease(ttl_ms, 0)
        self._renew(lease)

    def _renew(self, lease: int) -> Granted | LeaseLost:
        held = self._leases.get(lease)
        if held is None:
            return LeaseLost()
        held.ends_ms = self.now_ms + held.ttl_ms / self._rate
        self._at(
            held.ends_ms - self.now_ms + self._draw(self.faults.expiry_ms), lambda: self._expire(lease, held)
        )
        return Granted(lease, held.ttl_ms)

    def _expire(self, lease: int, held: _Lease) -> None:
        if self._leases.get(lease) is not held or held.ends_ms > self.now_ms:
            return
        if not self.is_up:
            # A store without a majority ends no lease; a new leader of it begins them all anew.
            self._renew(lease)
            return
        self._revoke(lease)

    def _revoke(self, lease: int) -> None:
        held = self._leases.pop(lease, None)
        if held is not None and held.keys:
            self._write([Delete(key) for key in sorted(held.keys)])

    def _wake(self, watch: Watch) -> None:
        if not watch.wakes and not watch.ended:
            watch.wakes = True
            self._at(self._draw(self.faults.lag_ms), lambda: self._deliver(watch))

    def _deliver(self, watch: Watch) -> None:
        watch.wakes = False
        if watch.ended or watch.client.member in self.cut or watch.client.is_cut:
            return
        # A piece at a time: what comes after may come much later.
        end = min(len(self.history), watch.position + 1 + int(self.random.random() * 8))
        while watch.position < end and not watch.ended:
            change = self.history[watch.position]
            watch.position += 1
            events = tuple(event for event in change.events if event.key.startswith(watch.prefixes))
            if events:
                watch.changed(Change(change.revision, events))
        if watch.position < len(self.history):
            self._wake(watch)


class StoreClient:
    """One process's way to the store. `cut_out`: what it sends is lost; `cut_in`: what is sent to it is."""

    def __init__(self, store: StoreModel, name: str, member: int) -> None:
        self.store = store
        self.name = name
        self.member = member
        self.cut_out = False
        self.cut_in = False

    @property
    def is_cut(self) -> bool:
        """Whether nothing comes to it."""
        return self.cut_in

    def transact(self, compares: Sequence[Compare], writes: Sequence[Write], done: Done) -> None:
        """Answers TransactResult, LeaseLost or Unknown."""
        store = self.store

        def transacted() -> TransactResult | LeaseLost:
            before = {write.key: store.entries.get(write.key) for write in writes}
            answer = store.transact(compares, writes)
            if isinstance(answer, TransactResult) and answer.succeeded:
                store.wrote(self.name, before)
            return answer

        self._ask(transacted, done)

    def read(self, keys: Sequence[str], done: Done) -> None:
        """Linearizable. Answers Found or Unknown."""
        store = self.store
        self._ask(lambda: Found({key: store.entries.get(key) for key in keys}, store.revision), done)

    def load(self, prefixes: tuple[str, ...], done: Done) -> None:
        """Everything under the prefixes, linearizable. Answers Snapshot or Unknown."""
        store = self.store

        def found() -> Snapshot:
            entries = sorted(key for key in store.entries if key.startswith(prefixes))
            return Snapshot(tuple(store.entries[key] for key in entries), store.revision)

        self._ask(found, done)

    def grant(self, ttl_ms: int, done: Done) -> None:
        """A new lease. Answers Granted or Unknown; its time counts from before it was asked for."""
        store = self.store

        def granted() -> Granted:
            lease, store._next_lease = store._next_lease, store._next_lease + 1
            store._begin_lease(lease, ttl_ms)
            return Granted(lease, ttl_ms)

        self._ask(granted, done)

    def renew(self, lease: int, done: Done) -> None:
        """Answers Granted, LeaseLost or Unknown."""
        self._ask(lambda: self.store._renew(lease), done)

    def revoke(self, lease: int, done: Done) -> None:
        """Answers LeaseLost, for it is gone, or Unknown."""

        def revoked() -> LeaseLost:
            self.store._revoke(lease)
            return LeaseLost()

        self._ask(revoked, done)

    def watch(
        self,
        prefixes: tuple[str, ...],
        from_revision: int,
        changed: Callable[[Change], None],
        lost: Callable[[], None],
    ) -> Watch:
        """Every change under the prefixes from the revision on, in order, each once, until `lost`: then load again."""
        store = self.store
        position = len(store.history)
        while position and store.history[position - 1].revision >= from_revision:
            position -= 1
        first = store.history[position].revision if position < len(store.history) else store.revision + 1
        watch = Watch(self, prefixes, position, changed, lost)
        if from_revision > store.revision + 1 or first > from_revision:
            watch.ended = True
            store._at(store._draw(store.faults.lag_ms), lost)
            return watch
        store._watches.append(watch)
        store._wake(watch)
        return watch

    def end(self, watch: Watch) -> None:
        """Nobody looks any more, as where a process dies."""
        watch.ended = True
        if watch in self.store._watches:
            self.store._watches.remove(watch)

    def heal(self) -> None:
        """The ways in and out are open again."""
        self.cut_in = self.cut_out = False
        for watch in self.store._watches:
            if watch.client is self:
                self.store._wake(watch)

    def _ask(self, asked: Callable[[], Answer], done: Done) -> None:
        store, faults, random = self.store, self.store.faults, self.store.random
        answered = False

        def answer(found: Answer) -> None:
            nonlocal answered
            if not answered:
                answered = True
                done(found)

        def arrive() -> None:
            if self.member in store.cut or not store.is_up:
                store._waiting.setdefault(self.member, []).append(apply)
            else:
                apply()

        def apply() -> None:
            if answered:
                store.applied_late += 1
            found = asked()
            if not (self.cut_in or random.random() < faults.unanswered):
                store._at(store._draw(faults.delay_ms), lambda: back(found))

        def back(found: Answer) -> None:
            if not self.cut_in:
                answer(found)

        timeout_ms = store.REQUEST_TIMEOUT_MS
        store._at(timeout_ms, lambda: answer(Unknown()))
        if self.cut_out or random.random() < faults.lost:
            return
        late = random.random() < faults.late
        delay = timeout_ms + store._draw(faults.late_ms) if late else store._draw(faults.delay_ms)
        store._at(delay, arrive)
