"""The modelled store keeps what etcd promises, and does to its clients what etcd may do."""

from __future__ import annotations

from random import Random

import pytest
from simulation.store_model import Answer, Granted, LeaseLost, StoreModel, Unknown

from region.metadata.memory import MemoryStore
from region.metadata.transaction import (
    Absent,
    Change,
    Compare,
    Delete,
    ModRevision,
    Put,
    Snapshot,
    TransactResult,
    ValueIs,
    Write,
)


def answers(store: StoreModel, until_ms: float = 60_000) -> None:
    store.run(store.now_ms + until_ms)


def either(key: str, value: bytes) -> list[Write]:
    return [Put(key, value), Delete(key)]


async def test_it_answers_every_transaction_as_the_memory_store_does() -> None:
    random, model = Random(1), StoreModel(Random(2))
    async with MemoryStore() as store:
        for _ in range(300):
            keys = random.sample(["a", "b", "c"], k=2)
            possible: list[Compare] = [
                Absent(keys[0]),
                ModRevision(keys[0], random.randint(0, model.revision)),
                ValueIs(keys[0], b"%d" % random.randint(0, 2)),
            ]
            compare = random.choice(possible)
            writes = [random.choice(either(key, b"%d" % random.randint(0, 2))) for key in keys]
            compares = [compare] if random.random() < 0.7 else []
            assert model.transact(compares, writes) == await store.transact(compares, writes)
        assert tuple(model.entries[key] for key in sorted(model.entries)) == (await store.load("")).entries


def test_a_watch_lags_and_skips_nothing() -> None:
    store = StoreModel(Random(3))
    store.faults.lag_ms = (0, 5_000)
    found: list[Change] = []
    client = store.client("a")
    client.watch(("k/",), 2, found.append, lambda: pytest.fail("lost"))
    for number in range(50):
        store.transact([], [Put("k/1", b"%d" % number), Put(f"other/{number}", b"")])
        store.run(store.now_ms + 10)
    assert len(found) < 50
    client.cut_in = True
    answers(store)
    seen = len(found)
    assert seen < 50
    client.heal()
    answers(store)
    assert [change.events[0].entry.value for change in found if change.events[0].entry] == [
        b"%d" % n for n in range(50)
    ]


def test_a_swap_is_applied_after_its_client_has_given_up_and_read_the_same_revision() -> None:
    store = StoreModel(Random(4))
    store.transact([], [Put("k", b"old")])
    revision = store.entries["k"].mod_revision
    store.faults.late = 1.0
    told: list[Answer] = []
    client = store.client("a")
    client.transact([ModRevision("k", revision)], [Put("k", b"new")], told.append)
    store.run(StoreModel.REQUEST_TIMEOUT_MS)
    assert told == [Unknown()] and store.entries["k"].mod_revision == revision
    answers(store)
    assert store.entries["k"].value == b"new" and told == [Unknown()] and store.applied_late == 1


def test_what_waits_with_a_cut_off_member_is_applied_when_it_is_back() -> None:
    applied = set()
    for seed in range(20):
        store = StoreModel(Random(seed))
        store.isolate(1)
        told: list[Answer] = []
        store.client("a", member=1).transact([], [Put("k", b"1")], told.append)
        other: list[Answer] = []
        store.client("b", member=0).transact([], [Put("o", b"1")], other.append)
        answers(store)
        assert told == [Unknown()] and other == [TransactResult(True, 2)] and "k" not in store.entries
        store.heal()
        answers(store)
        applied.add("k" in store.entries)
    assert applied == {True, False}


@pytest.mark.parametrize("rate", [0.99, 1.01])
def test_a_lease_ends_late_by_the_stores_clock_and_takes_its_keys(rate: float) -> None:
    store = StoreModel(Random(5), clock_rate=rate)
    told: list[Answer] = []
    client = store.client("a")
    client.grant(5_000, told.append)
    store.run(10)
    assert isinstance(told[0], Granted)
    granted_ms = store.now_ms
    store.transact([], [Put("k", b"", told[0].lease)])
    while "k" in store.entries:
        store.run(store.now_ms + 1)
    assert 5_000 / rate - 10 <= store.now_ms - granted_ms <= 5_000 / rate + 501
    client.renew(told[0].lease, told.append)
    answers(store)
    assert told[1] == LeaseLost() == store.transact([], [Put("k", b"", told[0].lease)])


def test_a_store_without_a_majority_answers_nobody_and_ends_no_lease() -> None:
    store = StoreModel(Random(6))
    told: list[Answer] = []
    client = store.client("a")
    client.grant(1_000, told.append)
    store.run(10)
    store.transact([], [Put("k", b"", 1)])
    store.stop()
    client.read(["k"], told.append)
    answers(store)
    assert told[1:] == [Unknown()] and "k" in store.entries
    store.heal()
    answers(store)
    assert "k" not in store.entries


def test_a_store_that_is_put_back_loses_what_came_after_and_says_so_to_its_watchers() -> None:
    store = StoreModel(Random(7))
    store.transact([], [Put("k", b"1")])
    backup = store.backup()
    for number in range(5):
        store.transact([], [Put("k", b"%d" % (2 + number))])
    lost: list[bool] = []
    client = store.client("a")
    client.watch(("k",), store.revision + 1, lambda change: pytest.fail("changed"), lambda: lost.append(True))
    store.restore(backup)
    told: list[Answer] = []
    client.load(("k",), told.append)
    answers(store)
    assert lost == [True] and isinstance(told[0], Snapshot)
    assert told[0].revision == 2 and told[0].entries[0].value == b"1"


def test_the_same_seed_does_the_same() -> None:
    def play(seed: int) -> list[object]:
        store = StoreModel(Random(seed))
        store.faults.lost = store.faults.unanswered = store.faults.late = 0.2
        found: list[object] = []
        clients = [store.client(name, member) for member, name in enumerate("abc")]
        for number in range(60):
            client = clients[number % 3]
            revision = store.entries["k"].mod_revision if "k" in store.entries else 0
            client.transact([ModRevision("k", revision)], [Put("k", b"%d" % number)], found.append)
            store.run(store.now_ms + 50)
        answers(store)
        return [*found, store.revision]

    assert play(8) == play(8) != play(9)
