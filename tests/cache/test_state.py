"""A cache's state read from its log is the one that stood while the log was written: with evictions, whoever wrote, and after
compaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st
from long_runs import count

from felix.errors import UnavailableError
from felix.settings import CACHE_BYTES_MIN, CacheSettings
from region.cache.records import Change, Reason
from region.cache.state import CacheState, Entry, entry_bytes
from region.limits.budget import Budget

SETTINGS = CacheSettings(bytes_max=CACHE_BYTES_MIN)
BUDGET_BYTES = 16 * CACHE_BYTES_MIN
KEYS = [b"key-%d" % number for number in range(12)]
SIZES = [30, 120_000, 200_000, 350_000]
TURN_BYTES = 1_000
"""Of evictions staged at a time for records of others: less than all of them, so that some wait."""

Log = list[tuple[int, Change]]


class Shard:
    """A state, and the log that it writes and follows, in memory. Offsets grow by one."""

    def __init__(self) -> None:
        self.state = CacheState(SETTINGS, Budget("cache", BUDGET_BYTES))
        self.log: Log = []
        self.durable = 0

    def write(self, changes: list[Change]) -> int:
        base = len(self.log)
        self.log += enumerate(changes, base)
        return base

    def flush(self) -> None:
        """Append what is staged, in one batch."""
        if self.state.open.changes:
            staged = self.state.take_open()
            base = self.write([change for _, change in staged.changes])
            self.state.appended(staged, base, len(self.log))

    def put(self, key: bytes, size: int) -> None:
        value = bytes(size)
        # It is refused where what is on its way takes all there is: that cannot be evicted yet.
        with suppress(UnavailableError):
            self.state.make_room(key, value)
            self.state.put(key, value, 0)

    def publish(self, key: bytes, size: int, reason: Reason) -> None:
        """Somebody else's record, behind what was decided before it."""
        self.flush()
        change = Change(key, bytes(size) if reason is Reason.PUT else b"", 0, reason)
        base = self.write([change])
        self.state.foreign([(base, change)], base, len(self.log))

    def sync(self) -> None:
        self.flush()
        self.state.settle(len(self.log))
        self.durable = len(self.log)
        self.state.relieve(TURN_BYTES)

    def settle(self) -> None:
        """Sync until nothing is left to be written."""
        self.sync()
        while self.state.open.changes:
            self.sync()


def read(log: Log) -> CacheState:
    """The state of a broker that starts with this log."""
    state = CacheState(SETTINGS, Budget("cache", BUDGET_BYTES))
    for offset, change in log:
        state.load(change, offset + 1)
    state.loaded()
    return state


def held(state: CacheState) -> dict[bytes, Entry]:
    return dict(state.entries)


def compacted(log: Log, below: int) -> Log:
    """Without records below `below` that a later one there supersedes, and without tombstones there."""
    last = {change.key: offset for offset, change in log[:below]}
    return [
        (offset, change)
        for offset, change in log
        if offset >= below or (last[change.key] == offset and change.reason is Reason.PUT)
    ]


def steps() -> Iterator[st.SearchStrategy[tuple[object, ...]]]:
    keys, sizes = st.sampled_from(KEYS), st.sampled_from(SIZES)
    yield st.tuples(st.just("put"), keys, sizes)
    yield st.tuples(st.just("put many"), st.lists(keys, unique=True, min_size=2, max_size=6), sizes)
    yield st.tuples(st.just("get"), keys)
    yield st.tuples(st.just("delete"), keys)
    yield st.tuples(
        st.just("publish"), keys, sizes, st.sampled_from([Reason.PUT, Reason.PUT, Reason.DELETED])
    )
    yield st.tuples(st.just("sync"))


@settings(max_examples=count(150, 3_000), deadline=None)
@given(plan=st.lists(st.one_of(*steps()), min_size=10, max_size=120), part=st.floats(0, 1))
def test_the_state_read_from_the_log_is_the_one_that_wrote_it(
    plan: list[tuple[object, ...]], part: float
) -> None:
    shard = Shard()
    for step in plan:
        match step:
            case ("put", bytes(key), int(size)):
                shard.put(key, size)
            case ("put many", list(keys), int(size)):
                for each in keys:
                    shard.put(each, size)
            case ("get", bytes(key)):
                shard.state.get(key, 0)
            case ("delete", bytes(key)):
                shard.state.delete(key, 0)
            case ("publish", bytes(key), int(size), Reason() as reason):
                shard.publish(key, size, reason)
            case _:
                shard.sync()
        # A broker that is killed now starts with what is durable, whatever waits to be evicted.
        if step == ("sync",):
            assert held(read(shard.log[: shard.durable])) == held(shard.state)
    shard.settle()
    for log in (shard.log, compacted(shard.log, int(part * len(shard.log)))):
        again = read(log)
        assert held(again) == held(shard.state)
        assert again.size_bytes == shard.state.size_bytes == again.coming_bytes <= SETTINGS.bytes_max
        assert again.size_bytes == sum(entry_bytes(key, each.value) for key, each in again.entries.items())
        assert not again.relieve(TURN_BYTES), "nothing is left to be evicted"


def test_a_value_that_was_read_is_still_there_after_a_restart_although_the_cache_was_too_full_for_a_moment() -> (
    None
):
    shard = Shard()
    shard.put(b"oldest", 30)
    for number in range(2):
        shard.put(b"large-%d" % number, 450_000)
    shard.sync()
    assert shard.state.get(b"oldest", 0) is not None
    # Beyond its size, until the least recently used is evicted: that is not the oldest, which was read.
    shard.publish(b"published", 450_000, Reason.PUT)
    shard.settle()
    assert set(shard.state.entries) == {b"oldest", b"large-1", b"published"}
    assert held(read(shard.log)) == held(shard.state)
