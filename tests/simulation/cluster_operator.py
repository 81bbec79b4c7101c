"""What operators do beside faults: brokers drained and let in again, copies evened out, streams given more of them or fewer, and a broker that is gone for
good and retired. The words are given by the transactions of the product; the controllers carry them out, by the catalog's wishes, which each hears late.

In the end every word is carried out: a drained broker has nothing, each stream has as many copies as it is to have, and nothing is said to be under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

from simulation.store_model import Answer

from region.cluster import draining, registration, transactions
from region.cluster.controller import StreamWish, Wanted
from region.cluster.records import ShardId
from region.cluster.transactions import Refusal, Transaction
from region.cluster.view import ClusterView
from region.metadata.transaction import Snapshot, TransactResult

if TYPE_CHECKING:
    from simulation.cluster_world import ClusterWorld, Fault, Machine

WORDS: Final = {"drain": 5, "undrain": 4, "rebalance": 4, "alter": 3, "controller": 4, "gone": 1}
SHARDS_TOGETHER: Final = 2
"""Of the first stream."""
AGAIN_MS: Final = 300
TRIES_MAX: Final = 20

Made = Callable[[ClusterView], Transaction | Refusal | None]


def shards_of(count: int) -> list[ShardId]:
    """So many shards, two of them of each stream."""
    return [
        ShardId(f"{number // SHARDS_TOGETHER + 1:032x}", number % SHARDS_TOGETHER) for number in range(count)
    ]


class Operator:
    """Of one run."""

    def __init__(self, world: ClusterWorld) -> None:
        self.world = world
        self.random = Random(f"operator {world.seed}")
        minimum = world.scene.minimum
        streams = sorted({shard.incarnation for shard in world.shards})
        self.wishes = {
            incarnation: StreamWish(
                incarnation,
                f"acme/test/orders{number}",
                shards=sum(shard.incarnation == incarnation for shard in world.shards),
                replicas=self.random.randint(minimum, 3),
                min=minimum,
                spread=self.random.random() < 0.3,
            )
            for number, incarnation in enumerate(streams)
        }
        self.gone: Machine | None = None
        self.is_retired = False
        self._word: dict[str, int] = {}
        """by broker, how many words were given of it: an older one is not repeated"""

    @property
    def wanted(self) -> Wanted:
        return Wanted(tuple(self.wishes.values()), {})

    # -- words -----------------------------------------------------------------------------------------

    def asks(self, fault: Fault) -> None:
        """Give a word, or what becomes of a broker beside it."""
        world, machine = self.world, self.world.machines[fault.where]
        match fault.what:
            case "drain" | "undrain":
                self._drain(machine.name, on=fault.what == "drain", partly=False)
            case "rebalance":
                self._say("rebalanced", lambda view: transactions.rebalance(view, "operator"))
            case "alter":
                self._alter(fault.number)
            case "controller":
                self._end_controller(fault)
            case "gone":
                # With a minimum of one, what an election leaves may be on the broker that is lost next, as the docs say.
                if self.gone is None and world.scene.minimum > 1 and world.checks.may_replace(machine):
                    self._lose(machine, fault)

    def _drain(self, broker: str, *, on: bool, partly: bool) -> None:
        """As `Clustered.drain`: refused where copies would have nowhere to go."""
        if self.gone is not None and broker == self.gone.name:
            # A refusal must not take the place of the word that lets it go.
            if not on:
                return
            partly = True
        self._word[broker] = number = self._word.get(broker, 0) + 1

        def made(view: ClusterView) -> Transaction | Refusal | None:
            if self._word[broker] != number:
                return None
            if on and not partly and draining.bound(view, {broker}):
                self.world.counts["drains refused"] += 1
                return None
            return registration.drain(view, broker, on=on)

        self._say("drained" if on else "undrained", made)

    def _say(self, what: str, made: Made, tries: int = TRIES_MAX) -> None:
        """Read, and write; again where that did not succeed, or nobody knows."""
        world = self.world

        def again() -> None:
            if tries:
                world.later(AGAIN_MS, lambda: self._say(what, made, tries - 1))

        def loaded(answer: Answer) -> None:
            if not isinstance(answer, Snapshot):
                again()
                return
            view = ClusterView(world.keys)
            view.load(answer)
            found = made(view)
            if isinstance(found, Transaction):
                world.operator.transact(found.compares, found.writes, done)
            elif found is not None:
                again()

        def done(answer: Answer) -> None:
            if isinstance(answer, TransactResult) and answer.succeeded:
                world.note("the operator:", what)
                world.counts[what] += 1
            else:
                again()

        world.operator.load((world.keys.prefix,), loaded)

    def _alter(self, number: int) -> None:
        """Another number of copies, of which each controller hears at another time."""
        world = self.world
        incarnation = sorted(self.wishes)[number % len(self.wishes)]
        copies = self.random.randint(world.scene.minimum, 3)
        world.note("the operator wants", copies, "copies of", incarnation[-1])
        world.counts["altered"] += 1
        self.wishes[incarnation] = replace(self.wishes[incarnation], replicas=copies)
        for machine in world.machines:
            if machine.up:
                world.on(machine, self.random.randint(1, 400), lambda machine=machine: self.tell(machine))  # type: ignore[misc]

    def tell(self, machine: Machine) -> None:
        """What the catalog wants, as it is now."""
        self.world.steer(machine, self.wanted)

    def _end_controller(self, fault: Fault) -> None:
        """Beside a word: whoever carries it out is killed a moment later."""
        world = self.world
        if fault.number & 1:
            self._say("rebalanced", lambda view: transactions.rebalance(view, "operator"))

        def end() -> None:
            for machine in world.machines:
                if (
                    machine.up
                    and machine.controller is not None
                    and machine.controller.term
                    and not world.calm
                ):
                    world.counts["controllers ended"] += 1
                    world.crash(machine, power=bool(fault.number & 2))
                    world.start_after(machine, fault.lasts_ms)
                    return

        world.later(50 + fault.number % 700, end)

    def _lose(self, machine: Machine, fault: Fault) -> None:
        """It never comes back. After a while somebody lets the others have copies, and drains it."""
        world, self.gone = self.world, machine
        world.note(machine.name, "is gone for good")
        world.counts["gone"] += 1
        world.crash(machine, power=True)

        def drain() -> None:
            for other in world.machines:
                if other is not machine:
                    self._drain(other.name, on=False, partly=True)
            self._drain(machine.name, on=True, partly=True)

        world.later(200 + fault.lasts_ms, drain)

    # -- the end ---------------------------------------------------------------------------------------

    def why_not_well(self) -> str:
        """What a word asked for, and is not so; empty where all is done."""
        world, view = self.world, self.view()
        if view.rebalance is not None:
            return "a rebalancing is still under way"
        usable = {broker for broker in view.alive if not view.nodes[broker].drain}
        for shard, record in view.shards.items():
            wanted = min(self.wishes[shard.incarnation].replicas, len(usable))
            if not {*record.replicas} <= usable or len(record.replicas) != wanted:
                return f"{shard} is at {record.replicas}, and {wanted} of {sorted(usable)} are to have it"
        if self.gone is not None and not self.is_retired:
            made = registration.retire(view, self.gone.name)
            if isinstance(made, Refusal):
                return made.sentence
            answer = world.store.transact(made.compares, made.writes)
            assert isinstance(answer, TransactResult) and answer.succeeded
            self.is_retired = True
        return ""

    def view(self) -> ClusterView:
        """What the store has."""
        entries, view = self.world.store.entries, ClusterView(self.world.keys)
        view.load(Snapshot(tuple(entries[key] for key in sorted(entries)), self.world.store.revision))
        return view
