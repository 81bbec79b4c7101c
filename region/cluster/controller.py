"""The controller of a region: one broker at a time places, elects, moves and removes shards, by transactions on the metadata store.

`ControllerCore` decides; whoever drives it hands in what happened (`step(event, now_ms)`) and does what comes back. Every broker has one.
It claims the controller's record in the store where no broker has it, and acts only while the store says that its term is the current one: each of
its transactions compares that. Pure: no clock, no chance (election ids are handed in), no store.

Invariants:
- of one shard at most one transaction is under way: nothing is decided on a record that a transaction of ours may be about to change;
- a leader that is merely absent is replaced only after a delay, because the store or the network may have been away for all brokers (`_holds`);
- once the store is known to have gone back to an earlier state, nothing is written but the mark that says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

import msgspec

from region.cluster import transactions
from region.cluster.election import LogEnd, has_yielded, longest, may_ask_for_ends
from region.cluster.membership import (
    has_arrived,
    is_enough,
    moves_leader_alone,
    place_of,
    without_replaced,
)
from region.cluster.placement import Planning, Site, Wish, of_equals, place
from region.cluster.records import ClusterKeys, ShardDurability, ShardId, ShardRecord
from region.cluster.transactions import (
    SHARDS_PER_TRANSACTION,
    Reason,
    Refusal,
    Transaction,
    leader_has_stopped,
)
from region.cluster.view import ClusterView
from region.metadata.records import REPLICAS_MAX
from region.metadata.transaction import Change, Entry, ModRevision, Put, Snapshot, TransactResult

TICK_MS: Final = 100
"""How often the core is to be stepped where nothing happens: what waits for a time is late by so much."""
TRANSACTIONS_MAX: Final = 4
"""Under way at once: 240 shards. More would only wait in the store."""
MOVES_PER_BROKER: Final = 2
"""Shards that a broker gets, or gives away, at once: each is copied over its disk and network beside its work."""
ASK_AGAIN_MS: Final = 1_000
"""How soon brokers are asked again how far their copies go."""
DECISIONS_MAX: Final = 2 * SHARDS_PER_TRANSACTION
"""Shards decided on in one step, for the same reason; the rest follows in the next."""
SHARD_SUBJECT: Final = "shard "
"""How the subject of an alarm begins that the controller alone raises."""
COPY_AWAITED_MS: Final = 60_000
"""A broker that is to get a copy, and has been gone for so long, gets it no more where others may have it: a restart takes less."""
PLAN_LOOKS: Final = 10_000
"""How far a plan goes on in one step (placement.Planning): some tens of milliseconds at most, so that leases are renewed beside
it. A region of some hundred shards is planned in one."""


@dataclass(frozen=True, slots=True)
class StreamWish:
    """What the catalog wants of a stream. `min` and `replicas` are resolved: never 0. `groups`: of streams that are placed with it (placement.Wish)."""

    incarnation: str
    stream: str
    shards: int
    replicas: int
    min: int
    durability: ShardDurability = "fsync"
    spread: bool = False
    groups: tuple[str, ...] = ()
    stays: bool = False
    """its copies cannot be moved"""
    in_memory: bool = False
    """nothing of it outlives its leader's process, so any other may go on once that has stopped"""


# What happens


@dataclass(frozen=True, slots=True)
class Loaded:
    """All records, before the first change, and whenever the watch could not go on."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Changed:
    """The next change of the watch."""

    change: Change


@dataclass(frozen=True, slots=True)
class Leased:
    """This broker has a new lease, and is announced under it."""

    lease: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """This broker's lease has ended, or may have."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The streams of the catalog, and of deleted ones the revision of their marks, by incarnation."""

    streams: tuple[StreamWish, ...]
    deleted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a transaction; None where it was lost."""

    id: int
    result: TransactResult | None


@dataclass(frozen=True, slots=True)
class Found:
    """Keys as they stood at a revision, as was asked; None where there was no answer."""

    id: int
    entries: Mapping[str, Entry | None] | None
    revision: int = 0


@dataclass(frozen=True, slots=True)
class EndTold:
    """How far a broker's copy of a shard goes."""

    shard: ShardId
    broker: str
    end: LogEnd


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Loaded | Changed | Leased | LeaseLost | Wanted | Answered | Found | EndTold | Tick

# What is to be done


@dataclass(frozen=True, slots=True)
class Transact:
    """Send a transaction; the answer comes as `Answered` with this id."""

    id: int
    transaction: Transaction


@dataclass(frozen=True, slots=True)
class Find:
    """Read keys, linearizable; they come as `Found` with this id."""

    id: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskEnds:
    """Ask brokers how far their copies of a shard go."""

    shard: ShardId
    brokers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something needs a person; `sentence` is empty once it does not any more."""

    subject: str
    sentence: str


Action = Transact | Find | AskEnds | Alarm


@dataclass(slots=True)
class _Flight:
    """A transaction under way, then the reading of what it compared. Without shards: the beginning of a term, or the mark of a store that went back."""

    transaction: Transaction
    shards: tuple[ShardId, ...]


class ControllerCore:
    """One broker's part in being the controller. `elections`: fresh election ids, 64 random bits in hex."""

    def __init__(self, keys: ClusterKeys, broker: str, lease_ms: int, elections: Iterator[str]) -> None:
        self.view = ClusterView(keys)
        self._broker = broker
        self._lease_ms = lease_ms
        self._elections = elections
        self._actions: list[Action] = []
        self._loaded = False
        self._lease = 0
        self._leased_ms = 0
        self._bid_ms = 0
        self._term = 0
        self._stalled_ms: int | None = None
        self._flights: dict[int, _Flight] = {}
        self._made = 0
        self._busy: set[ShardId] = set()
        self._due: set[ShardId] = set()
        self._alone: set[ShardId] = set()
        self._known: dict[ShardId, tuple[int, str]] = {}
        self._gone_ms: dict[str, int] = {}
        self._wishes: dict[str, StreamWish] = {}
        self._deleted: Mapping[str, int] = {}
        self._ends: dict[ShardId, dict[str, LogEnd]] = {}
        self._asked_ms: dict[ShardId, int] = {}
        self._ending = 0
        """the transaction that says that a rebalancing is over"""
        self._absent: frozenset[str] = frozenset()
        """brokers that get no copy any more which was on its way there"""
        self._moving: set[ShardId] = set()
        self._unplaced: set[ShardId] = set()
        self._placing: dict[ShardId, tuple[str, ...]] = {}
        """where new shards are to be, as transactions that are under way say"""
        self._leaving: set[ShardId] = set()
        self._units: dict[str, list[StreamWish]] = {}
        """streams that are to have one leader for all of their shards, by what they have in common"""
        self._apart: set[str] = set()
        """of which somebody may lead what another one is to lead"""
        self._under_way: set[ShardId] = set()
        self._survey = True
        self._sites: tuple[Site, ...] = ()
        self._planning: Planning | None = None
        self._wants_step = False
        self._planned: dict[ShardId, tuple[str, ...]] | None = None
        self._went_back = ""
        self._alarms: dict[str, str] = {}

    @property
    def term(self) -> int:
        """The term in which this broker is the controller, as far as it knows; 0 where it is not."""
        return self._term

    def planning(self) -> Planning:
        """A plan of where everything should be, by what is known now; nothing is done by it. A stream stays that has a shard which nobody leads: there is nobody
        to copy from."""
        wishes = [
            _placed_wish(wish, stays=wish.stays or self._has_vacant(wish))
            for wish in self._wishes.values()
            if wish.incarnation not in self._deleted
        ]
        return Planning(
            self._sites_now(),
            wishes,
            {shard: self._place_of(record) for shard, record in self.view.shards.items()},
        )

    @property
    def rebalances(self) -> bool:
        """Whether an operator wants each broker to have its share, and something may be left to move."""
        return self.view.rebalance is not None and self._ending not in self._flights

    @property
    def wants_step(self) -> bool:
        """Whether the next step is to follow soon, once others had their turn: this one ended before all was decided."""
        return self._wants_step

    def silent_ms(self, broker: str, now_ms: int) -> int:
        """For how long a broker surely has had no lease: since this process saw it go."""
        gone_ms = self._gone_ms.get(broker)
        return 0 if gone_ms is None else now_ms - gone_ms

    def step(self, event: Event, now_ms: int) -> list[Action]:
        """What is to be done now that `event` has happened. `now_ms` never falls."""
        self._actions = []
        self._wants_step = False
        match event:
            case Loaded(snapshot):
                self._load(snapshot, now_ms)
            case Changed(change):
                self.view.apply(change)
                self._noticed([event.key for event in change.events], now_ms)
            case Leased(lease):
                self._lease, self._leased_ms = lease, now_ms
            case LeaseLost():
                self._lease = 0
            case Wanted(streams, deleted):
                self._want(streams, deleted)
            case Answered(id_, result):
                self._answered(id_, result, now_ms)
            case Found(id_, entries, revision):
                self._found(id_, entries, revision, now_ms)
            case EndTold(shard, broker, end):
                self._ends.setdefault(shard, {})[broker] = end
                self._due.add(shard)
            case Tick():
                pass
        if self._loaded:
            self._note_absent(now_ms)
            self._act(now_ms)
        return self._actions

    # What is known

    def _want(self, streams: Collection[StreamWish], deleted: Mapping[str, int]) -> None:
        self._units = {}
        for wish in streams:
            if not wish.spread:
                self._units.setdefault(_unit(wish), []).append(wish)
        self._apart.update(self._units)
        marks = {incarnation for incarnation, _ in self._deleted.items() ^ deleted.items()}
        if marks:
            self._due.update(shard for shard in self.view.shards if shard.incarnation in marks)
        before, self._wishes = self._wishes, {wish.incarnation: wish for wish in streams}
        self._deleted = deleted
        changed = marks | (before.keys() - self._wishes.keys())
        changed |= {
            wish.incarnation
            for wish in streams
            if (held := before.get(wish.incarnation)) is not wish and held != wish
        }
        if changed:
            self._drop_plan()
        for incarnation in changed:
            shards = max(
                wishes[incarnation].shards if incarnation in wishes else 0
                for wishes in (before, self._wishes)
            )
            for number in range(shards):
                shard = ShardId(incarnation, number)
                self._note_place(shard, self.view.shards.get(shard))

    def _load(self, snapshot: Snapshot, now_ms: int) -> None:
        before = self.view.revision
        # Answers that are still to come may be of a store that is not the one of today.
        self._flights.clear()
        self._busy.clear()
        self.view.load(snapshot)
        if self._loaded and snapshot.revision < before:
            self._went_back = f"the store is at revision {snapshot.revision} and was at {before}"
        for shard in [
            known for known in self._known if not self.view.revision_of(self.view.keys.shard(known))
        ]:
            # One that was deleted in order has its mark.
            if shard.incarnation in self._wishes and shard.incarnation not in self._deleted:
                self._went_back = f"the record of shard {shard.incarnation}/{shard.number} is gone"
            self._known.pop(shard)
        self._loaded = True
        self._drop_plan()
        self._noticed([entry.key for entry in snapshot.entries], now_ms)
        self._noticed_brokers(now_ms)
        self._due.update(self.view.shards)
        self._note_places()

    def _noticed(self, keys: Iterable[str], now_ms: int) -> None:
        """These records may have changed."""
        names = self.view.keys
        brokers: set[str] = set()
        for key in keys:
            self._alarm(key, self.view.unreadable.get(key, ""))
            if key == names.rebalance:
                self._survey = True
            elif key.startswith(names.shards) and key not in self.view.unreadable:
                self._noticed_shard(names.shard_of(key))
            elif key.startswith((names.nodes, names.brokers)):
                brokers.add(key.rpartition("/")[2])
        if brokers:
            self._noticed_brokers(now_ms)
            self._due.update(
                shard for shard, record in self.view.shards.items() if not brokers.isdisjoint(_named(record))
            )

    def _noticed_shard(self, shard: ShardId) -> None:
        record = self.view.shards.get(shard)
        self._due.add(shard)
        self._survey = True
        self._note_place(shard, record)
        if record is None:
            for table in (self._known, self._ends, self._asked_ms):
                table.pop(shard, None)
            return
        known = self._known.get(shard)
        if known is not None and transactions.went_back(known, record):
            self._went_back = (
                f"{record.stream} shard {shard.number} is in epoch {record.epoch} (election {record.election}) and was in "
                f"epoch {known[0]} (election {known[1]})"
            )
            return
        self._known[shard] = record.epoch, record.election

    def _noticed_brokers(self, now_ms: int) -> None:
        for broker in self.view.nodes:
            if broker in self.view.alive:
                self._gone_ms.pop(broker, None)
            else:
                self._gone_ms.setdefault(broker, now_ms)
        sites = self._sites_now()
        if sites != self._sites:
            self._sites = sites
            self._drop_plan()
            self._note_places()

    def _note_absent(self, now_ms: int) -> None:
        absent = frozenset(
            broker for broker, gone_ms in self._gone_ms.items() if now_ms - gone_ms >= COPY_AWAITED_MS
        )
        if absent != self._absent:
            self._absent = absent
            self._drop_plan()
            self._note_places()

    def _place_of(self, record: ShardRecord) -> tuple[str, ...]:
        """Where a shard is, or is on its way to; without brokers that are gone, and have nothing of it yet."""
        gone = self._absent - {*record.replicas, *record.members()} if record.target else frozenset()
        place = tuple(broker for broker in place_of(record) if broker not in gone)
        return place or place_of(msgspec.structs.replace(record, target=()))

    # What is under way

    def _send(self, transaction: Transaction, shards: tuple[ShardId, ...] = ()) -> None:
        self._made += 1
        self._flights[self._made] = _Flight(transaction, shards)
        self._busy.update(shards)
        self._actions.append(Transact(self._made, transaction))

    def _answered(self, id_: int, result: TransactResult | None, now_ms: int) -> None:
        flight = self._flights.get(id_)
        if flight is None:
            return
        if result is None or not result.succeeded:
            self._actions.append(
                Find(id_, tuple(dict.fromkeys(compare.key for compare in flight.transaction.compares)))
            )
            return
        self._stalled_ms = None
        written = {
            write.key: Entry(write.key, write.value, result.revision, result.revision, write.lease)
            if isinstance(write, Put)
            else None
            for write in flight.transaction.writes
        }
        self._land(id_)
        self._alone.difference_update(flight.shards)
        self._absorb(written, result.revision, now_ms)

    def _found(
        self, id_: int, entries: Mapping[str, Entry | None] | None, revision: int, now_ms: int
    ) -> None:
        flight = self._flights.get(id_)
        if flight is None:
            return
        self._land(id_)
        if entries is None:
            return
        if len(flight.shards) > 1:
            self._set_apart(flight, entries)
        self._absorb(entries, revision, now_ms)

    def _set_apart(self, flight: _Flight, entries: Mapping[str, Entry | None]) -> None:
        """Of many shards whose transaction failed, what has changed goes alone from now on; the rest is sent again without it."""
        expected = {
            compare.key: compare.revision
            for compare in flight.transaction.compares
            if isinstance(compare, ModRevision)
        }
        for shard in flight.shards:
            key = self.view.keys.shard(shard)
            entry = entries.get(key)
            if expected.get(key, 0) != (0 if entry is None else entry.mod_revision):
                self._alone.add(shard)

    def _land(self, id_: int) -> None:
        flight = self._flights.pop(id_)
        self._survey = True
        self._busy.difference_update(flight.shards)
        self._due.update(flight.shards)
        # Where it failed, no record of theirs need have changed.
        for incarnation in {shard.incarnation for shard in flight.shards}:
            self._ask_apart(incarnation)

    def _absorb(self, entries: Mapping[str, Entry | None], revision: int, now_ms: int) -> None:
        self.view.absorb(entries, revision)
        self._noticed(entries, now_ms)

    # What is to be done

    def _act(self, now_ms: int) -> None:
        view = self.view
        self._enter_term()
        frozen = view.unreadable.get(view.keys.frozen, "") if view.frozen is None else view.frozen.why
        self._alarm("frozen", frozen or self._went_back)
        if self._went_back:
            self._say_went_back()
            return
        if not self._lease:
            return
        if not self._term:
            self._bid(now_ms)
            return
        if frozen:
            return
        parts = self._decisions(now_ms)
        self._dispatch(parts)
        self._watch_progress(now_ms)

    def _enter_term(self) -> None:
        view = self.view
        controller = view.controller
        is_ours = (
            controller is not None
            and controller.broker == self._broker
            and controller.registration == view.brokers.registration(self._broker)
            and self._lease != 0
        )
        term = view.revision_of(view.keys.controller) if is_ours else 0
        if term and term != self._term:
            self._stalled_ms = None
            self._survey = True
            self._due.update(view.shards)
        if self._term and not term:
            # Whoever is the controller now decides on the shards, and says what becomes of them.
            for subject in [each for each in self._alarms if each.startswith(SHARD_SUBJECT)]:
                self._alarm(subject, "")
        self._term = term

    def _bid(self, now_ms: int) -> None:
        is_free = not self.view.revision_of(self.view.keys.controller)
        if is_free and now_ms >= self._bid_ms and not self._flights:
            made = transactions.begin_term(self.view, self._broker, self._lease)
            if isinstance(made, Transaction):
                self._send(made)

    def _say_went_back(self) -> None:
        if self.view.revision_of(self.view.keys.frozen):
            # It is said; whoever reconciles the region removes the mark, and what is known then is what counts.
            self._went_back = ""
            self._known = {
                shard: (record.epoch, record.election) for shard, record in self.view.shards.items()
            }
        elif not self._flights:
            self._send(transactions.freeze(self.view, self._broker, self._went_back[:500]))

    def _decisions(self, now_ms: int) -> list[tuple[ShardId, Transaction]]:
        parts: list[tuple[ShardId, Transaction]] = []
        # More than can be sent now would be decided again, and otherwise, when it can.
        room = min((TRANSACTIONS_MAX - len(self._flights)) * SHARDS_PER_TRANSACTION, DECISIONS_MAX)
        for shard in sorted(self._due - self._busy):
            if len(parts) >= room:
                self._wants_step = room > 0
                break
            part = self._decide(shard, now_ms)
            if part is not None:
                parts.append((shard, part))
            elif not self._waits(shard):
                self._due.discard(shard)
        parts += self._placements(room - len(parts))
        parts += self._gatherings({shard for shard, _ in parts}, room - len(parts))
        parts += self._moves({shard for shard, _ in parts})
        return parts

    def _decide(self, shard: ShardId, now_ms: int) -> Transaction | None:
        """The next transaction for one shard, or None where nothing is to be done, or not yet."""
        view, record = self.view, self.view.shards.get(shard)
        if record is None:
            self._alarm(_subject(shard), "")
            return None
        if shard.incarnation in self._deleted:
            mark = _deleted_key(view.keys, shard)
            return transactions.remove(view, shard, mark, self._deleted[shard.incarnation])
        made: Transaction | Refusal = Refusal(Reason.CHANGED, "")
        if leader_has_stopped(view, record):
            if self._holds(record, now_ms):
                return None
            wish = self._wishes.get(shard.incarnation)
            if wish is not None and wish.in_memory:
                made = self._begin_anew(shard)
            else:
                made = transactions.elect(view, shard, next(self._elections))
                if isinstance(made, Refusal):
                    made = self._elect_longest(shard, now_ms)
        elif has_arrived(record):
            made = transactions.arrive(view, shard)
        if isinstance(made, Refusal) and without_replaced(record, view.nodes) != record:
            made = transactions.take_out_replaced(view, shard)
        # One that is about to be led needs nobody.
        is_led = bool(record.leader) or isinstance(made, Transaction)
        self._alarm(_subject(shard), "" if is_led else transactions.why_vacant(view, shard))
        return made if isinstance(made, Transaction) else None

    def _begin_anew(self, shard: ShardId) -> Transaction | Refusal:
        """Where a shard that is in memory alone goes on: with its broker if that is back, else with any other; all shards of a stream with one."""
        view, first = self.view, ShardId(shard.incarnation, 0)
        alive = view.brokers.registrations()
        usable = [broker for broker in alive if not view.nodes[broker].drain] or list(alive)
        if shard != first and first in self._busy:
            return Refusal(Reason.CHANGED, "", retry=True)
        led = view.shards.get(first)
        if led is not None and not leader_has_stopped(view, led):
            broker = led.leader
        elif view.shards[shard].replicas[0] in usable:
            broker = view.shards[shard].replicas[0]
        elif usable:
            broker = of_equals(usable, shard.incarnation)
        else:
            return Refusal(Reason.NOBODY_ELIGIBLE, "", retry=True)
        return transactions.begin_anew(view, shard, broker, next(self._elections))

    def _elect_longest(self, shard: ShardId, now_ms: int) -> Transaction | Refusal:
        view, record = self.view, self.view.shards[shard]
        if not may_ask_for_ends(record, view.brokers):
            return Refusal(Reason.NOBODY_ELIGIBLE, "", retry=True)
        members = tuple(record.members())
        ends = self._ends.get(shard, {})
        winner = members[0] if len(members) == 1 else longest(record, ends, view.brokers)
        if winner:
            return transactions.elect_longest(view, shard, winner, next(self._elections), ends.get(winner))
        if now_ms >= self._asked_ms.get(shard, -ASK_AGAIN_MS) + ASK_AGAIN_MS:
            self._asked_ms[shard] = now_ms
            self._actions.append(AskEnds(shard, members))
        return Refusal(Reason.NO_REPORT, "", retry=True)

    def _waits(self, shard: ShardId) -> bool:
        """Whether time alone may change what is to be done for a shard: an absent leader is given some, or ends are to be asked again."""
        record = self.view.shards.get(shard)
        if record is None or not leader_has_stopped(self.view, record):
            return False
        return bool(record.leader) or may_ask_for_ends(record, self.view.brokers)

    def _holds(self, record: ShardRecord, now_ms: int) -> bool:
        """Whether an absent leader gets more time to come back: where it was not the leader that went, but the store or the network.

        Not for one that yielded, was started again or stopped in order: those have stopped for certain, and by themselves.
        """
        node = self.view.nodes.get(record.leader)
        is_absent = bool(record.leader) and not has_yielded(record) and record.leader not in self.view.alive
        if not is_absent or (node is not None and node.clean == node.registration):
            return False
        return now_ms < max(self._held_by_own_lease(), self._held_by_others(now_ms))

    def _held_by_own_lease(self) -> int:
        """Who has just got its own lease (again) was away itself, and so may have been the others. Once the store has answered it for a whole lease,
        whoever is still absent is so for a reason of its own."""
        return self._leased_ms + self._lease_ms

    def _held_by_others(self, now_ms: int) -> int:
        """More than half of the brokers do not die within one lease."""
        recent = [
            gone_ms
            for broker, gone_ms in self._gone_ms.items()
            if now_ms - gone_ms < self._lease_ms and not self._has_left(broker)
        ]
        before = len(self.view.alive) + len(recent)
        return max(recent) + self._lease_ms if 2 * len(recent) > before else 0

    def _has_left(self, broker: str) -> bool:
        node = self.view.nodes[broker]
        return node.clean == node.registration

    def _placements(self, room: int) -> list[tuple[ShardId, Transaction]]:
        """New shards."""
        view = self.view
        # A record that cannot be read is there all the same.
        new = [
            shard
            for shard in sorted(self._unplaced - self._busy)
            if not view.revision_of(view.keys.shard(shard))
        ]
        if not new or room <= 0:
            return []
        registrations = view.brokers.registrations()
        places = self._places_of({shard.incarnation for shard in new[:room]})
        parts = []
        for shard in new[:room]:
            wish, replicas = self._wishes[shard.incarnation], places[shard]
            replicas = tuple(broker for broker in replicas if broker in registrations)
            if not replicas:
                continue
            record = ShardRecord(
                stream=wish.stream,
                epoch=1,
                election=next(self._elections),
                leader=replicas[0],
                replicas=replicas,
                isr={broker: registrations[broker] for broker in replicas},
                min=wish.min,
                durability=wish.durability,
            )
            self._placing[shard] = replicas
            parts.append((shard, transactions.place(view, shard, record, _deleted_key(view.keys, shard))))
        return parts

    def _places_of(self, incarnations: Set[str]) -> dict[ShardId, tuple[str, ...]]:
        """Where the shards of these streams are to be that are nowhere yet."""
        shards = self.view.shards
        self._placing = {
            shard: replicas
            for shard, replicas in self._placing.items()
            if shard in self._busy and shard not in shards
        }
        current = {shard: place_of(record) for shard, record in shards.items()}
        wishes = [self._wishes[incarnation] for incarnation in sorted(incarnations)]
        groups: set[str] = set()
        while more := {group for wish in wishes for group in wish.groups} - groups:
            groups |= more
            wishes = [
                wish
                for wish in self._wishes.values()
                if wish.incarnation in incarnations or not groups.isdisjoint(wish.groups)
            ]
        wanted = [
            _placed_wish(wish, stays=wish.stays) for wish in wishes if wish.incarnation not in self._deleted
        ]
        return place(self._sites_now(), wanted, current | self._placing)

    def _gatherings(self, taken: set[ShardId], room: int) -> list[tuple[ShardId, Transaction]]:
        """One leader for all shards with copies that are to have one: after an election each may have another, as not every copy of each
        was in sync."""
        parts: list[tuple[ShardId, Transaction]] = []
        for unit in sorted(self._apart):
            if len(parts) >= room:
                break
            # As they are placed (placement._joined): what is planned apart would else be taken back and forth.
            by_place: dict[tuple[frozenset[str], int], list[ShardId]] = {}
            for wish in self._units.get(unit, ()):
                for number in range(wish.shards):
                    shard = ShardId(wish.incarnation, number)
                    if (record := self.view.shards.get(shard)) is not None:
                        by_place.setdefault((frozenset(record.replicas), wish.replicas), []).append(shard)
            shards = [shard for found in by_place.values() for shard in found]
            if not (self._busy.isdisjoint(shards) and taken.isdisjoint(shards)):
                # What is under way says more; its answer brings the next step.
                continue
            # What there is no room for follows then, too; whoever was said to lead the others is to lead it.
            self._apart.discard(unit)
            parts += [part for found in by_place.values() for part in self._gathered(found)]
        return parts[: max(0, room)]

    def _gathered(self, shards: list[ShardId]) -> list[tuple[ShardId, Transaction]]:
        """Moves of leaders alone, so that one broker leads all of these; none while that cannot be said: the next change brings the question
        again."""
        view = self.view
        records = [view.shards[shard] for shard in shards]
        if any(
            leader_has_stopped(view, record) or (record.target and not moves_leader_alone(record))
            for record in records
        ):
            return []
        leads = Counter(record.leader for record in records)
        if len(leads) == 1 and not any(record.target for record in records):
            return []
        registrations = view.brokers.registrations()
        replicas = records[0].replicas
        wanted = max(
            (
                broker
                for broker in replicas
                if not view.nodes[broker].drain
                and all(record.isr.get(broker) == registrations.get(broker, -1) for record in records)
            ),
            # Whoever it was said of already, so that it ends; then whoever leads the most.
            key=lambda broker: (
                sum(record.target[:1] == (broker,) for record in records),
                leads[broker],
                -replicas.index(broker),
            ),
            default="",
        )
        if not wanted:
            return []
        target = (wanted, *(broker for broker in replicas if broker != wanted))
        parts = []
        for shard, record in zip(shards, records, strict=True):
            if (record.leader, record.replicas, record.target) != (wanted, target, ()):
                made = transactions.move(view, shard, target)
                if isinstance(made, Transaction):
                    parts.append((shard, made))
        return parts

    def _moves(self, taken: set[ShardId]) -> list[tuple[ShardId, Transaction]]:
        """Targets for shards on drained brokers, with too few copies, or that a rebalancing moves."""
        view = self.view
        if not self._survey:
            return []
        rebalances = self.rebalances
        if not (rebalances or self._leaving) or self._moving & self._busy:
            self._survey = bool(self._moving & self._busy)
            return []
        places = self._plan()
        if places is None:
            return []
        # What nobody leads is not on its way: it keeps nothing else from moving.
        under_way = [view.shards[shard] for shard in self._under_way if not self._is_vacant(shard)]
        # One whose new copies are there copies nothing more: it may wait for another one, whose broker is away.
        copied = [record for record in under_way if not {*record.target} <= {*record.replicas, *record.isr}]
        gets = [broker for record in copied for broker in record.target if broker not in record.replicas]
        gives = [broker for record in copied for broker in record.replicas if broker not in record.target]
        parts, is_left = [], bool(under_way)
        ready: dict[str, bool] = {}
        leaving = self._leaving_together()
        for shard in sorted(view.shards if rebalances else leaving):
            record, target = view.shards[shard], places.get(shard, ())
            if place_of(record) == target or (record.target and shard not in self._leaving):
                continue
            if self._is_vacant(shard) or not is_enough(record, target):
                continue
            is_left = True
            target = self._with_newcomers(record, self._step_to(shard, target, places, ready))
            if place_of(record) == target:
                continue
            new = [broker for broker in target if broker not in record.replicas]
            old = [broker for broker in record.replicas if broker not in target]
            # One that is under way, and goes elsewhere now, is counted already; where nothing is copied there is nothing to count.
            if (
                new
                and not record.target
                and (
                    any(gets.count(broker) >= MOVES_PER_BROKER for broker in new)
                    or any(gives.count(broker) >= MOVES_PER_BROKER for broker in old)
                )
            ):
                continue
            if shard in self._busy or shard in taken:
                continue
            made = transactions.move(view, shard, target)
            if isinstance(made, Transaction):
                if shard not in leaving:
                    made = transactions.while_rebalancing(view, made)
                parts.append((shard, made))
                gets += new
                gives += old if new else []
        if rebalances and not is_left:
            # A plan moves no more than one broker's share. Where this one moved something, another may go on.
            assert self._planning is not None
            before = self._planning.current
            rebalances = any(
                place != before.get(shard) and is_enough(view.shards[shard], place)
                for shard, place in places.items()
                if shard in view.shards
            )
            self._drop_plan()
            if not rebalances:
                self._send(
                    transactions.join([transactions.in_term(view, self._term), transactions.rebalanced(view)])
                )
                self._ending = self._made
        self._survey = bool(parts) or rebalances
        self._moving = {shard for shard, _ in parts}
        return parts

    def _step_to(
        self,
        shard: ShardId,
        target: tuple[str, ...],
        places: Mapping[ShardId, tuple[str, ...]],
        ready: dict[str, bool],
    ) -> tuple[str, ...]:
        """How far a shard goes now that is to go to `target`. Of shards that one broker leads none hands over to another broker before all have
        their copies there: until then the leader stays, or nobody would lead all of them while the others are copied."""
        wish = self._wishes[shard.incarnation]
        unit, record = _unit(wish), self.view.shards[shard]
        if wish.spread or not record.leader or record.leader == target[0]:
            return target
        if unit not in ready:
            shards = [
                ShardId(each.incarnation, number)
                for each in self._units.get(unit, ())
                for number in range(each.shards)
            ]
            ready[unit] = len(shards) == 1 or all(
                set(places.get(each, ())) <= set(held.replicas)
                for each in shards
                if (held := self.view.shards.get(each)) is not None
            )
        staged = (record.leader, *(broker for broker in target if broker != record.leader))
        return target if ready[unit] or len(staged) > REPLICAS_MAX else staged

    def _leaving_together(self) -> set[ShardId]:
        """What leaves, with the shards that one broker is to lead with it: those may have been moved apart, as by a drain that was ended half way, and the leader
        goes only once all are where they are to be (`_step_to`)."""
        units = {
            _unit(wish)
            for incarnation in {shard.incarnation for shard in self._leaving}
            if (wish := self._wishes.get(incarnation)) is not None and not wish.spread
        }
        together = {
            shard
            for unit in units
            for each in self._units.get(unit, ())
            for number in range(each.shards)
            if (shard := ShardId(each.incarnation, number)) in self.view.shards
        }
        return together | self._leaving

    def _with_newcomers(self, record: ShardRecord, target: tuple[str, ...]) -> tuple[str, ...]:
        """A move that is under way may not end, as where a broker is gone that it leads to. Copies that are in sync by it already go along, as members of the
        sets, and leave with the next move."""
        alive = self.view.alive
        newcomers = [
            broker
            for broker in record.members()
            if broker in alive and broker not in record.replicas and broker not in target
        ]
        wider = (*target, *newcomers)
        return wider if len(wider) <= REPLICAS_MAX else target

    def _plan(self) -> dict[ShardId, tuple[str, ...]] | None:
        """Where everything is to be, by what is known; None while that is being worked out, for as many steps as it takes."""
        if self._planning is None:
            self._planning = self.planning()
        if self._planned is None:
            self._planned = self._planning.advance(PLAN_LOOKS)
            self._wants_step = self._planned is None
        return self._planned

    def _drop_plan(self) -> None:
        self._planning = self._planned = None
        self._survey = True

    def _sites_now(self) -> tuple[Site, ...]:
        registrations = self.view.brokers.registrations()
        return tuple(
            Site(broker, node.host, node.zone, drain=node.drain, alive=broker in registrations)
            for broker, node in sorted(self.view.nodes.items())
        )

    def _note_places(self) -> None:
        """Brokers or wishes are others now: which shards are to be placed, and which to be moved?"""
        self._unplaced = {
            shard
            for wish in self._wishes.values()
            if wish.incarnation not in self._deleted
            for number in range(wish.shards)
            if (shard := ShardId(wish.incarnation, number)) not in self.view.shards
        }
        self._under_way = {shard for shard, record in self.view.shards.items() if record.target}
        self._leaving = {
            shard for shard, record in self.view.shards.items() if self._is_leaving(shard, record)
        }

    def _is_leaving(self, shard: ShardId, record: ShardRecord) -> bool:
        """Whether a shard is, or is on its way, to too few brokers, to too many, or to one that is drained."""
        nodes, wish = self.view.nodes, self._wishes.get(shard.incarnation)
        if wish is None or wish.stays:
            return False
        place = self._place_of(record)
        usable = sum(broker in nodes and not nodes[broker].drain for broker in self.view.alive)
        return (
            place != place_of(record)
            or len(place) > wish.replicas
            or len(place) < min(wish.replicas, usable)
            or any(broker in nodes and nodes[broker].drain for broker in place)
        )

    def _ask_apart(self, incarnation: str) -> None:
        """A stream's shards may have several leaders."""
        wish = self._wishes.get(incarnation)
        if wish is not None and not wish.spread:
            self._apart.add(_unit(wish))

    def _note_place(self, shard: ShardId, record: ShardRecord | None) -> None:
        """A shard may be elsewhere, or gone. A plan that is being carried out is right as long as nobody else moves anything."""
        wish = self._wishes.get(shard.incarnation)
        self._ask_apart(shard.incarnation)
        for table, holds in (
            (self._under_way, record is not None and record.target != ()),
            (self._leaving, record is not None and self._is_leaving(shard, record)),
        ):
            if holds:
                table.add(shard)
            else:
                table.discard(shard)
        if record is not None:
            self._unplaced.discard(shard)
        elif wish is not None and shard.incarnation not in self._deleted and shard.number < wish.shards:
            self._unplaced.add(shard)
        else:
            self._unplaced.discard(shard)
        if self._planning is not None:
            place = () if record is None else self._place_of(record)
            planned = None if self._planned is None else self._planned.get(shard, ())
            # On its way there the leader may go along first (`_step_to`).
            step = place if planned and set(place) == {*planned, *place[:1]} else planned
            if place not in (self._planning.current.get(shard, ()), planned, step):
                self._drop_plan()

    def _dispatch(self, parts: list[tuple[ShardId, Transaction]]) -> None:
        common = transactions.in_term(self.view, self._term)
        lonely = [(shard, part) for shard, part in parts if shard in self._alone]
        rest = [(shard, part) for shard, part in parts if shard not in self._alone]
        ready, at = [], 0
        for count, made in transactions.batches([part for _, part in rest], common):
            ready.append((made, tuple(shard for shard, _ in rest[at : at + count])))
            at += count
        ready += [(transactions.join([common, part]), (shard,)) for shard, part in lonely]
        for made, shards in ready:
            if len(self._flights) < TRANSACTIONS_MAX:
                self._send(made, shards)
                continue
            # Decided again once an answer made room.
            for incarnation in {shard.incarnation for shard in shards}:
                self._ask_apart(incarnation)

    def _watch_progress(self, now_ms: int) -> None:
        """A controller that gets nothing done for a lease makes room for another."""
        if not self._flights:
            self._stalled_ms = None
        elif self._stalled_ms is None:
            self._stalled_ms = now_ms
        elif now_ms - self._stalled_ms >= self._lease_ms:
            self._stalled_ms = now_ms
            self._bid_ms = now_ms + self._lease_ms
            self._send(transactions.resign(self.view, self._term))

    def _is_vacant(self, shard: ShardId) -> bool:
        """Whether nobody leads a shard, nor is about to."""
        return _subject(shard) in self._alarms

    def _has_vacant(self, wish: StreamWish) -> bool:
        return any(self._is_vacant(ShardId(wish.incarnation, number)) for number in range(wish.shards))

    def _alarm(self, subject: str, sentence: str) -> None:
        if subject.startswith(SHARD_SUBJECT) and (subject in self._alarms) != bool(sentence):
            self._drop_plan()
        if self._alarms.get(subject, "") != sentence:
            self._actions.append(Alarm(subject, sentence))
            self._alarms[subject] = sentence
        if not sentence:
            self._alarms.pop(subject, None)


def _unit(wish: StreamWish) -> str:
    """What streams that are to be led by one broker have in common: the largest group that each is in, else it is alone."""
    return wish.groups[-1] if wish.groups else wish.incarnation


def _placed_wish(wish: StreamWish, *, stays: bool) -> Wish:
    return Wish(wish.incarnation, wish.shards, wish.replicas, wish.spread, wish.groups, stays)


def _named(record: ShardRecord) -> tuple[str, ...]:
    """All brokers that may matter to what is decided on a shard."""
    return (record.leader, *record.replicas, *record.target)


def _subject(shard: ShardId) -> str:
    return f"{SHARD_SUBJECT}{shard.incarnation}/{shard.number}"


def _deleted_key(keys: ClusterKeys, shard: ShardId) -> str:
    return f"{keys.prefix}deleted/{shard.incarnation}"
