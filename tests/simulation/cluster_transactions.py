"""Transactions over the brokers of the simulated cluster: whoever leads one shard coordinates, its journal is that shard's second log, and the
other shards are streams that transactions write into (lanes).

A model of region.transactions.coordinator, lane_applier and lanes around their pure parts: rounds, positions, the journal's entries and state.
Decisions and batches are frames of the real cores. Not modelled: acknowledgements, what is hidden from readers, refusals before the decision.

What is promised (18): a batch stands in a shard once its decision is committed, in the order of the decisions, each once; who is told that a
transaction is committed finds it whole, and of one that is told as aborted nothing is ever there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from simulation.cluster_checks import BrokenError

from felix.errors import CorruptionError
from region.cluster.assignments import Assignments
from region.cluster.records import ShardId
from region.cluster.view import ClusterView
from region.log.point import LogPoint
from region.replication.core import ReplicaCore
from region.replication.messages import Frame
from region.transactions.lane_applier import TOGETHER_S
from region.transactions.positions import compare, encode_positions, newest, placings
from region.transactions.rounds import Apply, Conclude, Effect, Rounds, Show, Wait
from region.transactions.state import (
    Applied,
    Committed,
    Entry,
    Part,
    Transaction,
    TransactionState,
)

if TYPE_CHECKING:
    from simulation.cluster_world import ClusterWorld, Machine

RECORDS, JOURNAL = 0, 1
ENTRY_BYTES: Final = 100
LANES: Final = 2
WRITERS: Final = 2
PARTS_MAX: Final = 3
TOGETHER_MS: Final = int(TOGETHER_S * 1_000)
ASKED_AGAIN_MS: Final = 700
"""A leader that has not answered for so long is asked again, or the next one."""
PATIENCE_MS: Final = 900
"""And so is a coordinator by a writer."""
LOST: Final = 0.1
"""Of so many answers a writer hears nothing, while there are faults."""
GIVEN_UP: Final = 0.25
"""Of so many transactions without an answer the writer asks that they are aborted."""
INTRUSIONS: Final = (1_500, 4_000, 6_500)
"""When a broker that does not coordinate, or does no more, has a leader append what was never decided."""

Offsets = tuple[tuple[int, ...], ...]
Told = Literal["begun", "committed", "aborted"]
Answer = Callable[[Told, Offsets], None]


class Entered(NamedTuple):
    """A frame of the journal: an entry, as the coordinator of a term wrote it."""

    term: int
    serial: int
    entry: Entry


class Batch(NamedTuple):
    """A frame of a lane: a part, and the annotation that was written with it."""

    number: int
    part: int
    annotation: bytes


def is_coordinator(view: ClusterView, journal: ShardId, peer: str, term: int) -> bool:
    """N6: whether the records say that this broker coordinates, in this epoch."""
    leader = Assignments(view, "", lambda: 0).leader(journal.incarnation, journal.number)
    return leader is not None and (leader.broker, leader.epoch) == (peer, term)


def may_tell(core: ReplicaCore, now: int) -> bool:
    """Who does not know a transaction says that nothing of it is there only where no other broker can have decided it."""
    return core.leader.may_answer(now)


def is_decided(core: ReplicaCore, point: LogPoint) -> bool:
    """A decision counts once it is committed."""
    return core.leader.commits and core.replica.logs[JOURNAL].commit >= point


def owed(state: TransactionState) -> list[Transaction]:
    """What a coordinator begins with."""
    return state.owed


class Coordinator:
    """One term."""

    def __init__(self, play: Transactions, machine: Machine, term: int) -> None:
        self.play, self.machine, self.term = play, machine, term
        self.life = machine.life
        self.state = TransactionState()
        self.rounds = Rounds()
        self.held: dict[int, Transaction] = {}
        self._offsets: dict[int, dict[int, tuple[int, ...]]] = {}
        self._late: set[str] = set()
        """lanes that fell behind in this term"""
        self._serial = 0
        self._tries: Counter[tuple[str, int]] = Counter()
        self._open: set[bytes] = set()
        self._deciding: deque[tuple[LogPoint, Transaction]] = deque()
        self._waiting: dict[bytes, list[Answer]] = {}
        self.ceased = False
        for frame in machine.disk.log(play.journal, JOURNAL).frames:
            if isinstance(frame.body, Entered):
                self.state.apply(frame.body.entry)

    def begin(self) -> None:
        for transaction in owed(self.state):
            self._enqueue(transaction)

    @property
    def core(self) -> ReplicaCore:
        return self.machine.cores[self.play.journal]

    @property
    def is_over(self) -> bool:
        return self.ceased or self.machine.life != self.life

    # -- what writers ask ------------------------------------------------------------------------------

    def open(self, id_: bytes, answer: Answer) -> None:
        self._open.add(id_)
        answer("begun", ())

    def commit(self, id_: bytes, parts: Sequence[tuple[str, int]], answer: Answer) -> None:
        found = self.state.find(id_)
        if found is not None:
            if found.offsets is not None:
                answer("committed", found.offsets)
            else:
                self._waiting.setdefault(id_, []).append(answer)
        elif id_ in self._open:
            if self.core.leader.may_append():
                self._open.discard(id_)
                self._waiting[id_] = [answer]
                self._decide(id_, parts)
        elif may_tell(self.core, self.play.world.local(self.machine)):
            answer("aborted", ())

    def abort(self, id_: bytes, answer: Answer) -> None:
        if self.state.find(id_) is None and may_tell(self.core, self.play.world.local(self.machine)):
            self._open.discard(id_)
            answer("aborted", ())

    def _decide(self, id_: bytes, parts: Sequence[tuple[str, int]]) -> None:
        number = self.state.next_number
        entries: list[Entry] = [
            Part(number, index, lane, b"", shard, b"") for index, (lane, shard) in enumerate(parts)
        ]
        entries.append(Committed(number, id_, "writer", self.play.world.now, len(parts), 0))
        end = self._write(entries)
        found = self.state.find(id_)
        assert found is not None
        self._deciding.append((end, found))
        self.stepped()

    def _write(self, entries: Sequence[Entry]) -> LogPoint:
        """Into the journal; where its last entry ends."""
        prev = self.machine.disk.log(self.play.journal, JOURNAL).end
        frames = []
        for at, entry in enumerate(entries):
            self._serial += 1
            self.state.apply(entry)
            body = Entered(self.term, self._serial, entry)
            frames.append(Frame(self.term, LogPoint(prev.offset + at + 1), ENTRY_BYTES, body))
        self.play.world.write(self.machine, self.play.journal, JOURNAL, tuple(frames))
        return frames[-1].end

    def stepped(self) -> None:
        """What was decided, and is committed now, is carried out."""
        while self._deciding and not self.is_over and is_decided(self.core, self._deciding[0][0]):
            self._enqueue(self._deciding.popleft()[1])

    # -- what it has leaders do ------------------------------------------------------------------------

    def _enqueue(self, transaction: Transaction) -> None:
        number = transaction.committed.number
        self.held[number], self._offsets[number] = transaction, {}
        lanes: dict[str, Counter[int]] = {}
        for part in transaction.parts:
            lanes.setdefault(part.stream, Counter())[part.shard] += 1
        self._carry_out(self.rounds.commit(number, lanes))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Apply(lane, numbers):
                    self._apply(lane, numbers)
                case Show(lane, number):
                    self._show(lane, number)
                case Wait(round_):
                    self._later(TOGETHER_MS, lambda round_=round_: self._waited(round_))  # type: ignore[misc]
                case Conclude(number):
                    self._conclude(number)

    def _later(self, delay_ms: int, happens: Callable[[], None]) -> None:
        self.play.world.on(self.machine, delay_ms, lambda: None if self.is_over else happens())

    def _waited(self, round_: int) -> None:
        effects = self.rounds.waited(round_)
        self._late |= self.rounds.behind
        self.play.world.counts["lanes behind"] += len(self.rounds.behind)
        self._carry_out(effects)

    def _apply(self, lane: str, numbers: Sequence[int]) -> None:
        parts = [part for number in numbers for part in self.held[number].parts if part.stream == lane]

        def applied(offsets: Sequence[tuple[int, ...]]) -> None:
            for part, each in zip(parts, offsets, strict=True):
                self._offsets[part.number][part.index] = each
            self._carry_out(self.rounds.applied(lane))

        self._ask(lane, parts, numbers[-1], applied)

    def _show(self, lane: str, number: int) -> None:
        for each in self.held.values():
            if each.committed.number <= number and any(part.stream == lane for part in each.parts):
                self.play.is_whole(each, {*self._late, *self.rounds.behind})
        self._later(1, lambda: self._carry_out(self.rounds.shown(lane)))

    def _ask(
        self, lane: str, parts: Sequence[Part], number: int, done: Callable[[Sequence[tuple[int, ...]]], None]
    ) -> None:
        """Of its leader, until it answers; only the answer to the last try counts."""
        self._tries[lane, number] += 1
        mine = self._tries[lane, number]
        play, shard = self.play, self.play.lanes[lane]

        def answered(offsets: Sequence[tuple[int, ...]]) -> None:
            if not self.is_over and self._tries[lane, number] == mine:
                self._tries[lane, number] += 1
                done(offsets)

        def again() -> None:
            if self._tries[lane, number] == mine:
                self._ask(lane, parts, number, done)

        leader = Assignments(self.machine.view, "", lambda: 0).leader(shard.incarnation, shard.number)
        if leader is not None and leader.broker in play.world.by_name:
            other = play.world.by_name[leader.broker]
            play.tell(
                self.machine,
                other,
                lambda: play.asked(other, lane, self.machine, self.term, parts, answered),
            )
        self._later(ASKED_AGAIN_MS, again)

    def _conclude(self, number: int) -> None:
        transaction, offsets = self.held.pop(number), self._offsets.pop(number)
        made = Applied(number, tuple(offsets[part.index] for part in transaction.parts))
        id_ = transaction.committed.id
        if self.core.leader.may_append():
            self._write([made])
        else:
            self.state.apply(made)
        for answer in self._waiting.pop(id_, ()):
            answer("committed", made.offsets)


class Request(NamedTuple):
    """What a leader of a lane is asked to append."""

    peer: Machine
    term: int
    parts: Sequence[Part]
    answer: Callable[[Sequence[tuple[int, ...]]], None]


class LaneLeader:
    """One process of a broker as the leader of one lane: one request at a time, the next one once the last one is committed."""

    def __init__(self, play: Transactions, machine: Machine, lane: str) -> None:
        self.play, self.machine, self.lane = play, machine, lane
        self.shard = play.lanes[lane]
        self._asked: deque[Request] = deque()
        self._placed: tuple[Request, LogPoint, list[tuple[int, ...]]] | None = None

    def ask(self, asked: Request) -> None:
        self._asked.append(asked)
        self.stepped()

    def deposed(self) -> None:
        self._asked.clear()
        self._placed = None

    def stepped(self) -> None:
        """Answer what is committed, and go on."""
        core = self.machine.cores[self.shard]
        while self._placed is not None or self._asked:
            if self._placed is None:
                self._place(core, self._asked.popleft())
                continue
            asked, point, offsets = self._placed
            if not core.leader.commits or core.replica.logs[RECORDS].commit < point:
                return
            self._placed = None
            self.play.tell(self.machine, asked.peer, partial(asked.answer, offsets))

    def _place(self, core: ReplicaCore, asked: Request) -> None:
        if not core.leader.may_append():
            return
        if not is_coordinator(self.machine.view, self.play.journal, asked.peer.name, asked.term):
            self.play.world.counts["requests refused"] += 1
            return
        log = self.machine.disk.log(self.shard, RECORDS)
        annotation = next(
            (frame.body.annotation for frame in reversed(log.frames) if isinstance(frame.body, Batch)), b""
        )
        found = compare(annotation, placings(asked.parts))
        end, positions, frames = log.end, list(found.positions), []
        for part in found.missing:
            positions.append((part.number, end.offset))
            found.placed[part.number, part.index] = (end.offset,)
            end = LogPoint(end.offset + 1)
            body = Batch(part.number, part.index, encode_positions(positions))
            frames.append(Frame(core.leader.epoch, end, ENTRY_BYTES, body))
        self._placed = (asked, end, [found.placed[part.number, part.index] for part in asked.parts])
        if frames:
            self.play.world.write(self.machine, self.shard, RECORDS, tuple(frames))


class Writer:
    """A client: one transaction after the other, each until it is told what became of it."""

    def __init__(self, play: Transactions, name: str) -> None:
        self.play, self.name = play, name
        self.random = Random(f"writer {play.world.seed} {name}")
        self.count = 0
        self.id = b""
        self.does: Literal["begin", "commit", "abort"] = "begin"
        self._parts: list[tuple[str, int]] = []
        self._asked = 0
        self._next()

    @property
    def waits(self) -> bool:
        """Whether a transaction may be committed of which it was not told what became."""
        return self.does != "begin"

    def _next(self) -> None:
        self.count += 1
        self.id = f"{self.name} {self.count}".encode()
        self.does = "begin"
        lanes = list(self.play.lanes)
        self._parts = [(self.random.choice(lanes), 0) for _ in range(self.random.randint(1, PARTS_MAX))]

    def drive(self) -> None:
        """Ask whoever may coordinate."""
        world, machine = self.play.world, self._whom()
        if world.calm and not self.waits:
            return
        self._asked += 1
        mine, id_ = self._asked, self.id

        def answer(told: Told, offsets: Offsets) -> None:
            if world.calm or self.random.random() >= LOST:
                world.later(2, lambda: self._told(mine, told, offsets))

        def arrives() -> None:
            coordinator = self.play.coordinators.get(machine.name)
            if coordinator is not None and not coordinator.is_over:
                if self.does == "begin":
                    coordinator.open(id_, answer)
                elif self.does == "commit":
                    coordinator.commit(id_, self._parts, answer)
                else:
                    coordinator.abort(id_, answer)

        if machine.up:
            world.on(machine, 2, lambda: arrives() if mine == self._asked else None)

        def silence() -> None:
            if mine == self._asked:
                if self.does == "begin":
                    self._next()
                elif not world.calm:
                    self.does = "abort" if self.random.random() < GIVEN_UP else "commit"
                else:
                    self.does = "commit"
                self.drive()

        world.later(PATIENCE_MS, silence)

    def _whom(self) -> Machine:
        world = self.play.world
        leader = world.record(self.play.journal).leader
        if leader and self.random.random() < 0.7:
            return world.by_name[leader]
        return self.random.choice(world.machines)

    def _told(self, asked: int, told: Told, offsets: Offsets) -> None:
        if asked != self._asked:
            return
        self._asked += 1
        pause = 0
        if told == "begun":
            self.does = "commit"
        else:
            self.play.told(self.id, told, offsets)
            self._next()
            pause = self.random.choice((0, 100, 400))
        self.play.world.later(1 + pause, self.drive)


class Transactions:
    """All of one run: who coordinates and leads, and what is looked at."""

    def __init__(self, world: ClusterWorld, shards: Sequence[ShardId]) -> None:
        self.world = world
        self.journal = shards[0]
        self.lanes = {f"lane{number}": shard for number, shard in enumerate(shards[1 : LANES + 1])}
        self.by_shard = {shard: lane for lane, shard in self.lanes.items()}
        self.random = Random(f"transactions {world.seed}")
        self.coordinators: dict[str, Coordinator] = {}
        self.leaders: dict[tuple[str, int, ShardId], LaneLeader] = {}
        self.writers = [Writer(self, f"w{number}") for number in range(WRITERS)]
        self.state = TransactionState()
        """by what is committed of the journal"""
        self.wanted: dict[str, list[tuple[int, int]]] = {lane: [] for lane in self.lanes}
        self.placed: dict[str, list[tuple[int, int]]] = {lane: [] for lane in self.lanes}
        self.committed_ids: set[bytes] = set()
        self.aborted: set[bytes] = set()

    def begin(self) -> None:
        for number, writer in enumerate(self.writers):
            self.world.later(800 + 90 * number, writer.drive)
        for at in INTRUSIONS:
            self.world.later(at, self._intrude)

    # -- brokers ---------------------------------------------------------------------------------------

    def stepped(self, machine: Machine, shard: ShardId, core: ReplicaCore) -> None:
        """A core has done a step."""
        leads = machine.up and core.leader.commits and core.leader.may_append()
        if shard == self.journal:
            coordinator = self.coordinators.get(machine.name)
            if coordinator is not None and (
                coordinator.is_over or not core.leader.commits or core.leader.epoch != coordinator.term
            ):
                coordinator.ceased = True
                del self.coordinators[machine.name]
                coordinator = None
            if coordinator is not None:
                coordinator.stepped()
            elif leads:
                self.world.counts["terms"] += 1
                self.coordinators[machine.name] = made = Coordinator(self, machine, core.leader.epoch)
                made.begin()
        elif (leader := self.leaders.get((machine.name, machine.life, shard))) is not None:
            if core.leader.commits:
                leader.stepped()
            else:
                leader.deposed()

    def asked(
        self,
        machine: Machine,
        lane: str,
        peer: Machine,
        term: int,
        parts: Sequence[Part],
        answer: Callable[[Sequence[tuple[int, ...]]], None],
    ) -> None:
        """A leader is asked to append."""
        key = (machine.name, machine.life, self.lanes[lane])
        if self.lanes[lane] in machine.cores and machine.cores[self.lanes[lane]].leader.may_append():
            leader = self.leaders.setdefault(key, LaneLeader(self, machine, lane))
            leader.ask(Request(peer, term, parts, answer))

    def tell(self, machine: Machine, other: Machine, happens: Callable[[], None]) -> None:
        """A request between brokers, or an answer: as messages of cores, it is lost, late or comes twice."""
        world, random = self.world, self.random
        if other is machine:
            world.on(machine, 1, happens)
            return
        if (machine.index, other.index) in world.cut or random.random() < world.loss:
            return
        delay = world.delay_ms + (random.randint(1, 400) if random.random() < world.shuffle else 0)
        life = other.life

        def arrive() -> None:
            if other.life == life and (machine.index, other.index) not in world.cut:
                world.on(other, 0, happens)

        world.later(delay, arrive)
        if random.random() < world.doubles:
            world.later(delay + random.randint(1, 800), arrive)

    def _intrude(self) -> None:
        """Another broker, or the coordinator of an earlier term, asks for what was never decided."""
        record = self.world.record(self.journal)
        lane, shard = self.random.choice(list(self.lanes.items()))
        found = self.world.leader_of(shard)
        peer = self.random.choice(self.world.machines)
        if found is None or self.world.is_reconciling:
            return
        machine, _ = found
        # Where the record names nobody (its leader has left the sets), whoever hears of that later still does who led.
        term = record.epoch - (record.leader in ("", peer.name))
        frames = machine.disk.log(shard, RECORDS).frames
        annotation = next(
            (frame.body.annotation for frame in reversed(frames) if isinstance(frame.body, Batch)), b""
        )
        part = Part(newest(annotation) + 1, 0, lane, b"", 0, b"")
        self.tell(peer, machine, lambda: self.asked(machine, lane, peer, term, [part], lambda offsets: None))

    # -- what is looked at -----------------------------------------------------------------------------

    def committed(self, shard: ShardId, number: int, frames: Sequence[Frame]) -> None:
        """These frames are committed."""
        if (shard, number) == (self.journal, JOURNAL):
            for frame in frames:
                if isinstance(frame.body, Entered):
                    self._decided(frame.body.entry)
        elif number == RECORDS and (lane := self.by_shard.get(shard)) is not None:
            wanted, placed = self.wanted[lane], self.placed[lane]
            for frame in frames:
                if isinstance(frame.body, Batch):
                    at = (frame.body.number, frame.body.part)
                    if len(placed) == len(wanted):
                        raise BrokenError(f"18: {at} stands in {lane}, and was not decided")
                    if wanted[len(placed)] != at:
                        raise BrokenError(
                            f"18: {at} stands in {lane}, where {wanted[len(placed)]} is to stand"
                        )
                    placed.append(at)

    def _decided(self, entry: Entry) -> None:
        if isinstance(entry, Committed):
            if entry.id in self.aborted:
                raise BrokenError(f"18: {entry.id!r} is committed, and was told as aborted")
            if entry.id in self.committed_ids:
                raise BrokenError(f"18: {entry.id!r} is committed twice")
            self.committed_ids.add(entry.id)
            self.world.counts["transactions"] += 1
        try:
            self.state.apply(entry)
        except CorruptionError as error:
            raise BrokenError(f"18: {error}") from error
        if isinstance(entry, Committed):
            found = self.state.find(entry.id)
            assert found is not None
            for part in found.parts:
                self.wanted[part.stream].append((part.number, part.index))

    def told(self, id_: bytes, told: Told, offsets: Offsets) -> None:
        """A writer is told what became of a transaction."""
        self.world.counts[f"told {told}"] += 1
        if told == "aborted":
            if id_ in self.committed_ids:
                raise BrokenError(f"18: {id_!r} is told as aborted, and is committed")
            self.aborted.add(id_)
            return
        found = self.state.find(id_)
        if found is None:
            raise BrokenError(f"18: {id_!r} is told as committed, and is not")
        self.is_placed(found.committed.number, id_)

    def is_placed(self, number: int, id_: bytes) -> None:
        for lane, wanted in self.wanted.items():
            missing = [at for at in wanted[len(self.placed[lane]) :] if at[0] == number]
            if missing:
                raise BrokenError(f"18: {id_!r} is told as committed, and {lane} lacks {missing}")

    def is_whole(self, transaction: Transaction, late: set[str]) -> None:
        """A part is shown once all others are there, but those of lanes that fell behind."""
        for part in transaction.parts:
            if part.stream not in late and (part.number, part.index) not in self.placed[part.stream]:
                raise BrokenError(f"18: {part} is not there, and another part of its transaction is shown")

    def why_not_well(self) -> str:
        """Who waits, in the end."""
        waiting = [writer.name for writer in self.writers if writer.waits]
        if waiting:
            return f"writers {waiting} wait"
        found = self.coordinators.get(self.world.record(self.journal).leader)
        if found is None or found.is_over:
            return "nobody coordinates"
        return f"transactions {list(found.held)} are not applied" if found.held else ""

    def what_is_missing(self, vacant: Collection[ShardId]) -> str:
        """What was decided and is not in its lane. Not where nobody can lead: a lane that is led by nobody takes nothing, and of a journal nobody
        carries out what it owes. Each other lane gets its own without them."""
        if self.journal in vacant:
            return ""
        for lane, wanted in self.wanted.items():
            missing = wanted[len(self.placed[lane]) :]
            if missing and self.lanes[lane] not in vacant:
                return f"{lane} lacks {missing}, which were decided"
        return ""

    def finish(self, vacant: Collection[ShardId]) -> None:
        """All is served: what was decided is whole."""
        if missing := self.what_is_missing(vacant):
            raise BrokenError(f"18: {missing}")
        if self.state.owed:
            self.world.counts["owed in the end"] += len(self.state.owed)
