"""Any sequence of operations, several at once, does what a plain dictionary would have done."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from long_runs import count

from region.metadata.embedded import EmbeddedStore
from region.metadata.local import LocalStore
from region.metadata.memory import MemoryStore
from region.metadata.transaction import Absent, Compare, Delete, Entry, ModRevision, Put, ValueIs, Write

KEYS = ("/a", "/a/b", "/a0", "/b", "/b/ä")
HISTORY = 10_000

keys = st.sampled_from(KEYS)
values = st.sampled_from([b"", b"1", b"2", b"\x00\xff"])
compares = st.lists(
    st.one_of(
        st.builds(Absent, keys),
        st.builds(ValueIs, keys, values),
        st.builds(ModRevision, keys, st.integers(0, 12)),
    ),
    max_size=2,
)
writes = st.lists(
    st.one_of(st.builds(Put, keys, values), st.builds(Delete, keys)), max_size=4, unique_by=lambda w: w.key
)


class Model:
    """A dictionary and the list of what happened to it."""

    def __init__(self) -> None:
        self.revision = 1
        self.entries: dict[str, Entry] = {}
        self.history: list[tuple[int, dict[str, Entry | None]]] = []

    def apply(self, compares: Sequence[Compare], writes: Sequence[Write]) -> bool:
        if not all(compare.holds(self.entries.get(compare.key)) for compare in compares):
            return False
        events: dict[str, Entry | None] = {}
        for write in writes:
            old = self.entries.get(write.key)
            if isinstance(write, Put):
                created = old.create_revision if old else self.revision + 1
                events[write.key] = Entry(write.key, write.value, created, self.revision + 1)
            elif old is not None:
                events[write.key] = None
        for key, entry in events.items():
            if entry is None:
                del self.entries[key]
            else:
                self.entries[key] = entry
        if events:
            self.revision += 1
            self.history.append((self.revision, events))
        return True


class StoreMachine(RuleBasedStateMachine):
    """Rules against a store; `make` opens it in a folder."""

    make: Callable[[Path], Any]
    reopens = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="felix-metadata-"))
        self.runner = asyncio.Runner()
        self.model = Model()
        self.store: LocalStore = self.runner.run(type(self).make(self.folder))

    def teardown(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    @rule(compares=compares, writes=writes)
    def transact(self, compares: list[Compare], writes: list[Write]) -> None:
        result = self.runner.run(self.store.transact(compares, writes))
        assert result.succeeded == self.model.apply(compares, writes)
        assert result.revision == self.model.revision

    @rule(transactions=st.lists(st.tuples(compares, writes), min_size=2, max_size=5))
    def transact_at_once(self, transactions: list[tuple[list[Compare], list[Write]]]) -> None:
        """Their outcome is that of one after the other, in the order of their revisions."""

        async def together() -> list[Any]:
            return await asyncio.gather(*(self.store.transact(*transaction) for transaction in transactions))

        results = self.runner.run(together())
        pending = list(zip(results, transactions, strict=True))
        # These stores serve in the order of asking; another order would have to show in the revisions.
        assert [result.revision for result, _ in pending] == sorted(result.revision for result, _ in pending)
        for result, transaction in pending:
            assert result.succeeded == self.model.apply(*transaction)
            assert result.revision == self.model.revision

    @rule(prefix=st.sampled_from(["", "/a", "/a/", "/b/", "/c"]), limit=st.integers(1, 6))
    def read_pages(self, prefix: str, limit: int) -> None:
        async def pages() -> list[Entry]:
            found: list[Entry] = []
            while True:
                page = await self.store.range(prefix, limit=limit, after=found[-1].key if found else "")
                found += page.entries
                assert page.revision == self.model.revision and len(page.entries) <= limit
                if not page.more:
                    return found

        expected = [
            entry
            for key, entry in sorted(self.model.entries.items(), key=lambda item: item[0].encode())
            if key.startswith(prefix)
        ]
        assert self.runner.run(pages()) == expected

    @rule(prefix=st.sampled_from(["", "/a", "/b"]), back=st.integers(0, 10))
    def watch(self, prefix: str, back: int) -> None:
        start = max(1, self.model.revision - back)
        expected = []
        for revision, events in self.model.history:
            under = {key: entry for key, entry in events.items() if key.startswith(prefix)}
            if revision >= start and under:
                expected.append((revision, under))

        async def read() -> list[tuple[int, dict[str, Entry | None]]]:
            found = []
            async with aclosing(self.store.watch(prefix, start)) as changes:
                while len(found) < len(expected):
                    change = await anext(changes)
                    found.append((change.revision, {event.key: event.entry for event in change.events}))
            return found

        assert self.runner.run(read()) == expected

    @precondition(lambda self: self.reopens)
    @rule()
    def reopen(self) -> None:
        self.runner.run(self.store.close())
        self.store = self.runner.run(type(self).make(self.folder))

    @invariant()
    def every_key_is_as_modelled(self) -> None:
        async def read() -> dict[str, Entry]:
            return {key: entry for key in KEYS if (entry := await self.store.get(key)) is not None}

        assert self.runner.run(read()) == self.model.entries


class MemoryMachine(StoreMachine):
    @staticmethod
    async def make(folder: Path) -> MemoryStore:
        return MemoryStore(history_events_max=HISTORY)


class EmbeddedMachine(StoreMachine):
    reopens = True

    @staticmethod
    async def make(folder: Path) -> EmbeddedStore:
        return await EmbeddedStore.open(folder / "metadata.db", history_events_max=HISTORY)


MACHINE = settings(stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
MemoryMachine.TestCase.settings = settings(MACHINE, max_examples=count(25, 60))
EmbeddedMachine.TestCase.settings = settings(MACHINE, max_examples=count(10, 20))
TestMemory = MemoryMachine.TestCase
TestEmbedded = EmbeddedMachine.TestCase
