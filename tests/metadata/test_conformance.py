"""What every metadata store promises, told once and run against all three."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from etcd_process import EtcdProcess, etcd

from felix.errors import Code, RequestError, UnavailableError
from region.metadata.embedded import EmbeddedStore
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.lease import LeaseLostError
from region.metadata.memory import MemoryStore
from region.metadata.port import CompactedError, MetadataStore
from region.metadata.transaction import (
    KEY_BYTES_MAX,
    OPERATIONS_MAX,
    VALUE_BYTES_MAX,
    Absent,
    Change,
    Delete,
    ModRevision,
    Put,
    ValueIs,
)

__all__ = ["etcd"]  # the fixture, by its name

PATIENCE_S = 120
HISTORY_EVENTS = 40


class Bench:
    """A store under test and how its surroundings fail."""

    def __init__(self, kind: str, folder: Path, etcd_process: EtcdProcess | None) -> None:
        self.kind = kind
        self.folder = folder
        self.etcd = etcd_process
        self.prefix = f"/t/{uuid.uuid4().hex}/"
        self.store: MetadataStore

    async def open(self) -> MetadataStore:
        if self.etcd is not None:
            return await EtcdStore.open(EtcdConfig((self.etcd.endpoint,)))
        if self.kind == "embedded":
            return await EmbeddedStore.open(self.folder / "metadata.db", history_events_max=HISTORY_EVENTS)
        return MemoryStore(history_events_max=HISTORY_EVENTS)

    async def reconnect(self) -> None:
        """The store goes away and comes back with what it had."""
        if self.etcd is not None:
            await asyncio.to_thread(self.etcd.kill)
            await asyncio.to_thread(self.etcd.start)
        elif self.kind == "embedded":
            await self.store.close()
            self.store = await self.open()

    async def compact(self) -> None:
        """Let the history up to now be forgotten."""
        revision = (await self.store.range(self.prefix)).revision
        if self.etcd is not None:
            await asyncio.to_thread(self.etcd.ctl, "compact", str(revision))
        else:
            for number in range(HISTORY_EVENTS + HISTORY_EVENTS // 10 + 1):
                await self.store.transact([], [Put("/elsewhere", str(number).encode())])

    def key(self, name: str) -> str:
        return self.prefix + name


@pytest.fixture(params=["memory", "embedded", pytest.param("etcd", marks=pytest.mark.etcd)])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    process = request.getfixturevalue("etcd") if request.param == "etcd" else None
    made = Bench(request.param, tmp_path, process)
    made.store = await made.open()
    try:
        yield made
    finally:
        await made.store.close()


async def take(store: MetadataStore, prefix: str, from_revision: int, count: int) -> list[Change]:
    """The next `count` changes."""
    found: list[Change] = []
    async with asyncio.timeout(PATIENCE_S), aclosing(store.watch(prefix, from_revision)) as changes:
        while len(found) < count:
            found.append(await anext(changes))
    return found


async def test_what_was_put_is_got_and_counts_its_revisions(bench: Bench) -> None:
    key = bench.key("a")
    assert await bench.store.get(key) is None
    first = await bench.store.transact([], [Put(key, b"1")])
    second = await bench.store.transact([], [Put(key, b"2")])
    assert first.succeeded and second.revision == first.revision + 1
    entry = await bench.store.get(key)
    assert entry is not None
    assert (entry.value, entry.create_revision, entry.mod_revision) == (b"2", first.revision, second.revision)
    gone = await bench.store.transact([], [Delete(key)])
    assert await bench.store.get(key) is None
    assert (await bench.store.transact([], [Delete(key)])).revision == gone.revision, "nothing changed"
    empty = await bench.store.transact([], [Put(key, b"")])
    entry = await bench.store.get(key)
    assert entry is not None and entry.value == b"" and entry.create_revision == empty.revision


async def test_each_compare_holds_when_it_should_and_only_then(bench: Bench) -> None:
    there, missing = bench.key("there"), bench.key("missing")
    revision = (await bench.store.transact([], [Put(there, b"v")])).revision
    for compare, holds in [
        (ModRevision(there, revision), True),
        (ModRevision(there, revision - 1), False),
        (ModRevision(there, 0), False),
        (ModRevision(missing, 0), True),
        (Absent(missing), True),
        (Absent(there), False),
        (ValueIs(there, b"v"), True),
        (ValueIs(there, b"w"), False),
        (ValueIs(missing, b""), False),
    ]:
        result = await bench.store.transact([compare], [])
        assert result == type(result)(holds, revision), compare


async def test_of_many_writers_exactly_one_wins(bench: Bench) -> None:
    key = bench.key("controller")
    results = await asyncio.gather(
        *(bench.store.transact([Absent(key)], [Put(key, str(n).encode())]) for n in range(20))
    )
    winners = [n for n, result in enumerate(results) if result.succeeded]
    assert len(winners) == 1
    entry = await bench.store.get(key)
    assert entry is not None and entry.value == str(winners[0]).encode()


async def test_concurrent_increments_by_compare_and_swap_lose_none(bench: Bench) -> None:
    key = bench.key("counter")
    await bench.store.transact([], [Put(key, b"0")])

    async def increment(times: int) -> None:
        done = 0
        while done < times:
            entry = await bench.store.get(key)
            assert entry is not None
            swap = await bench.store.transact(
                [ModRevision(key, entry.mod_revision)], [Put(key, str(int(entry.value) + 1).encode())]
            )
            done += swap.succeeded

    await asyncio.gather(*(increment(5) for _ in range(5)))
    entry = await bench.store.get(key)
    assert entry is not None and entry.value == b"25"


async def test_a_transaction_happens_whole_or_not_at_all(bench: Bench) -> None:
    a, b, c = bench.key("a"), bench.key("b"), bench.key("c")
    start = (await bench.store.transact([], [Put(a, b"1")])).revision
    refused = await bench.store.transact([ValueIs(a, b"1"), Absent(a)], [Put(b, b"x"), Delete(a)])
    assert not refused.succeeded and refused.revision == start
    assert await bench.store.get(b) is None and await bench.store.get(a) is not None
    made = await bench.store.transact([ValueIs(a, b"1"), Absent(b)], [Put(b, b"x"), Put(c, b"y"), Delete(a)])
    [change] = await take(bench.store, bench.prefix, made.revision, 1)
    assert made.succeeded and change.revision == made.revision
    assert {event.key: event.entry and event.entry.value for event in change.events} == {
        a: None,
        b: b"x",
        c: b"y",
    }


async def test_a_range_is_paged_in_byte_order_and_keeps_to_its_prefix(bench: Bench) -> None:
    names = sorted(["a", "a/b", "a0", "a-", "ä", "z", "漢"], key=str.encode)
    for name in names:
        await bench.store.transact([], [Put(bench.key(name), name.encode())])
    await bench.store.transact([], [Put(bench.prefix[:-1] + "0", b"the next prefix")])
    found: list[str] = []
    after = ""
    while True:
        page = await bench.store.range(bench.prefix, limit=3, after=after)
        found += [entry.value.decode() for entry in page.entries]
        if not page.more:
            break
        assert len(page.entries) == 3
        after = page.entries[-1].key
    assert found == names
    assert not (await bench.store.range(bench.prefix, after=bench.prefix + "\U0010ffff")).entries
    snapshot = await bench.store.load(bench.prefix + "a")
    assert [entry.value for entry in snapshot.entries] == [b"a", b"a-", b"a/b", b"a0"]


async def test_a_page_of_large_values_is_cut_short_not_refused(bench: Bench) -> None:
    value = bytes(VALUE_BYTES_MAX)
    for number in range(18):
        await bench.store.transact([], [Put(bench.key(f"{number:02}"), value)])
    page = await bench.store.range(bench.prefix)
    assert page.more and page.entries
    snapshot = await bench.store.load(bench.prefix)
    assert [entry.key for entry in snapshot.entries] == [bench.key(f"{number:02}") for number in range(18)]
    first = snapshot.entries[0].mod_revision
    changes = await take(bench.store, bench.prefix, first, 18)
    assert [change.revision for change in changes] == list(range(first, first + 18))
    for entry in snapshot.entries:
        await bench.store.transact([], [Delete(entry.key)])


async def test_what_is_too_large_is_refused_with_the_bound(bench: Bench) -> None:
    key = bench.key("k")
    for writes, bound in [
        ([Put(key, bytes(VALUE_BYTES_MAX + 1))], str(VALUE_BYTES_MAX)),
        ([Put("k" * (KEY_BYTES_MAX + 1), b"")], str(KEY_BYTES_MAX)),
        ([Put(bench.key(str(n)), b"") for n in range(OPERATIONS_MAX + 1)], str(OPERATIONS_MAX)),
        ([Put(bench.key(str(n)), bytes(700_000)) for n in range(2)], "1310720"),
        ([Put(key, b""), Delete(key)], "twice"),
        ([Put("", b"")], "empty"),
        ([Put("a\nb", b"")], "control character"),
    ]:
        with pytest.raises(RequestError, match=bound) as caught:
            await bench.store.transact([], writes)
        assert caught.value.code is Code.INVALID
    assert not (await bench.store.range(bench.prefix)).entries
    longest = bench.prefix + "k" * (KEY_BYTES_MAX - len(bench.prefix))
    await bench.store.transact([], [Put(longest, bytes(VALUE_BYTES_MAX))])
    entry = await bench.store.get(longest)
    assert entry is not None and len(entry.value) == VALUE_BYTES_MAX
    many = [Put(bench.key(f"m{n}"), b"") for n in range(OPERATIONS_MAX)]
    assert (await bench.store.transact([Absent(put.key) for put in many], many)).succeeded


async def test_a_watch_tells_the_past_then_the_present_in_order(bench: Bench) -> None:
    first = (await bench.store.transact([], [Put(bench.key("0"), b"")])).revision
    await bench.store.transact([], [Put("/elsewhere", b"")])
    await bench.store.transact([], [Put(bench.key("1"), b"")])
    watching = asyncio.create_task(take(bench.store, bench.prefix, first, 5))
    await asyncio.sleep(0.05)
    for name in ("2", "3"):
        await bench.store.transact([], [Put(bench.key(name), b"")])
    await bench.store.transact([], [Delete(bench.key("2"))])
    changes = await watching
    assert [(event.key, event.entry is None) for change in changes for event in change.events] == [
        (bench.key("0"), False),
        (bench.key("1"), False),
        (bench.key("2"), False),
        (bench.key("3"), False),
        (bench.key("2"), True),
    ]
    revisions = [change.revision for change in changes]
    assert revisions == sorted(set(revisions)) and revisions[0] == first


async def test_a_watch_goes_on_after_the_store_was_away_without_missing_or_repeating(bench: Bench) -> None:
    written = [(await bench.store.transact([], [Put(bench.key(f"{n}"), b"")])).revision for n in range(3)]
    seen = [change.revision for change in await take(bench.store, bench.prefix, written[0], 2)]
    await bench.reconnect()
    written += [(await bench.store.transact([], [Put(bench.key(f"{n}"), b"")])).revision for n in range(3, 6)]
    seen += [change.revision for change in await take(bench.store, bench.prefix, seen[-1] + 1, 4)]
    assert seen == written


async def test_a_watch_from_a_forgotten_revision_says_so(bench: Bench) -> None:
    first = (await bench.store.transact([], [Put(bench.key("a"), b"1")])).revision
    await bench.store.transact([], [Delete(bench.key("a"))])
    await bench.compact()
    with pytest.raises(CompactedError) as caught:
        await take(bench.store, bench.prefix, first, 1)
    assert "Load the prefix again" in str(caught.value)
    snapshot = await bench.store.load(bench.prefix)
    await bench.store.transact([], [Put(bench.key("b"), b"")])
    [change] = await take(bench.store, bench.prefix, snapshot.revision + 1, 1)
    assert change.events[0].key == bench.key("b")


async def test_a_watch_begins_exactly_where_it_was_asked_to_or_not_at_all(bench: Bench) -> None:
    await bench.compact()
    for number in range(3):
        await bench.store.transact([], [Put(bench.key(str(number)), b"")])
    current = (await bench.store.range(bench.prefix)).revision
    refused, begun = [], []
    for start in range(max(1, current - 60), current + 1):
        try:
            [change] = await take(bench.store, "", start, 1)
            assert change.revision == start
            begun.append(start)
        except CompactedError:
            refused.append(start)
    assert refused and begun and max(refused) < min(begun) <= current - 2


async def test_a_watch_of_a_revision_never_made_says_so(bench: Bench) -> None:
    page = await bench.store.range(bench.prefix)
    with pytest.raises(CompactedError):
        await take(bench.store, bench.prefix, page.revision + 100, 1)


async def test_a_watch_of_a_quiet_prefix_survives_compaction(bench: Bench) -> None:
    start = (await bench.store.range(bench.prefix)).revision
    watching = asyncio.create_task(take(bench.store, bench.prefix, start + 1, 1))
    await asyncio.sleep(0.1)
    await bench.compact()
    await bench.store.transact([], [Put(bench.key("late"), b"")])
    [change] = await watching
    assert change.events[0].key == bench.key("late")


async def test_a_lease_that_nobody_renews_takes_its_keys_along(bench: Bench) -> None:
    lease = await bench.store.grant(1_000, keep=False)
    bound = [bench.key("broker"), bench.key("controller")]
    revision = (await bench.store.transact([], [Put(key, b"", lease=lease.id) for key in bound])).revision
    stays = bench.key("stays")
    await bench.store.transact([], [Put(stays, b"", lease=lease.id)])
    await bench.store.transact([], [Put(stays, b"")])
    entry = await bench.store.get(bound[0])
    assert entry is not None and entry.lease == lease.id
    changes = await take(bench.store, bench.prefix, revision, 4)
    assert sorted(event.key for event in changes[-1].events if event.entry is None) == bound
    assert await bench.store.get(stays) is not None
    assert lease.remaining_ms() == 0
    with pytest.raises(LeaseLostError):
        await lease.renew()
    assert lease.lost.is_set()
    with pytest.raises(LeaseLostError):
        await bench.store.transact([], [Put(bound[0], b"", lease=lease.id)])


async def test_a_kept_lease_outlives_its_ttl_until_it_is_revoked(bench: Bench) -> None:
    # Long enough that a busy machine renews it in time.
    lease = await bench.store.grant(2_500)
    key = bench.key("broker")
    await bench.store.transact([], [Put(key, b"", lease=lease.id)])
    await asyncio.sleep(lease.ttl_ms * 1.3 / 1_000)
    assert await bench.store.get(key) is not None
    assert not lease.lost.is_set() and lease.remaining_ms() > 0
    await lease.revoke()
    assert await bench.store.get(key) is None
    assert lease.lost.is_set() and lease.remaining_ms() == 0


async def test_a_closed_store_answers_nothing_and_ends_its_watches_and_leases(bench: Bench) -> None:
    lease = await bench.store.grant(5_000)
    watching = asyncio.create_task(take(bench.store, bench.prefix, 1, 1_000))
    await asyncio.sleep(0.05)
    await bench.store.close()
    with pytest.raises((UnavailableError, CompactedError)):
        await watching
    assert lease.lost.is_set()
    with pytest.raises(UnavailableError) as caught:
        await bench.store.get("a")
    assert caught.value.code is Code.SHUTTING_DOWN
