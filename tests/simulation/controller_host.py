"""Drives a `ControllerCore` over a modelled store, as the broker's actor would over a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulation.store_model import Answer, Found, StoreClient, Watch

from region.cluster import controller
from region.cluster.controller import Action, Alarm, AskEnds, ControllerCore, Event, Find, Transact
from region.cluster.records import ClusterKeys
from region.metadata.transaction import Change, Snapshot, TransactResult


def watched(keys: ClusterKeys) -> tuple[str, ...]:
    """Everything that a `ClusterView` knows of."""
    return (
        keys.nodes, keys.brokers, keys.pulses, keys.shards, keys.controller, keys.frozen, keys.rebalance, keys.alone,
    )  # fmt: skip


class ControllerHost:
    """One process's controller. `ask_ends` is called where it wants to know how far copies go."""

    def __init__(
        self,
        client: StoreClient,
        keys: ClusterKeys,
        broker: str,
        lease_ms: int,
        elections: Iterator[str],
        ask_ends: Callable[[AskEnds], None] = lambda asked: None,
    ) -> None:
        self.core = ControllerCore(keys, broker, lease_ms, elections)
        self.client = client
        self.alarms: dict[str, str] = {}
        self.sent: list[Transact] = []
        self.is_dead = False
        self._keys = keys
        self._ask_ends = ask_ends
        self._watch: Watch | None = None
        self._load()

    def step(self, event: Event) -> None:
        """Let it happen, and do what follows."""
        if not self.is_dead:
            for action in self.core.step(event, int(self.client.store.now_ms)):
                self._do(action)

    def die(self) -> None:
        """The process is gone; what it sent may still happen."""
        self.is_dead = True
        if self._watch is not None:
            self.client.end(self._watch)

    def _do(self, action: Action) -> None:
        match action:
            case Transact(id_, made):
                self.sent.append(action)
                self.client.transact(made.compares, made.writes, lambda answer: self._answered(id_, answer))
            case Find(id_, keys):
                self.client.read(keys, lambda answer: self._found(id_, answer))
            case AskEnds():
                self._ask_ends(action)
            case Alarm(subject, sentence):
                self.alarms[subject] = sentence
                if not sentence:
                    del self.alarms[subject]

    def _answered(self, id_: int, answer: Answer) -> None:
        self.step(controller.Answered(id_, answer if isinstance(answer, TransactResult) else None))

    def _found(self, id_: int, answer: Answer) -> None:
        if isinstance(answer, Found):
            self.step(controller.Found(id_, answer.entries, answer.revision))
        else:
            self.step(controller.Found(id_, None))

    def _load(self) -> None:
        if not self.is_dead:
            self.client.load(watched(self._keys), self._loaded)

    def _loaded(self, answer: Answer) -> None:
        if self.is_dead:
            return
        if not isinstance(answer, Snapshot):
            self._load()
            return
        self.step(controller.Loaded(answer))
        self._watch = self.client.watch(watched(self._keys), answer.revision + 1, self._changed, self._load)

    def _changed(self, change: Change) -> None:
        self.step(controller.Changed(change))
