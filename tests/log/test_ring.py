"""The ring: bounded by bytes and count, contiguous, and honest about what it no longer holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from region.log.ring import Entry, Ring


def entry(base: int, records: int, size: int, time_ms: int = 0) -> Entry:
    return Entry(base, base + records, time_ms, bytes(size))


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 400)), max_size=80),
    st.integers(1, 1_500),
    st.integers(1, 12),
)
def test_bounds_hold_after_every_append_and_the_newest_is_always_there(
    batches: list[tuple[int, int]], bytes_max: int, entries_max: int
) -> None:
    ring = Ring(100, bytes_max=bytes_max, entries_max=entries_max)
    held: list[Entry] = []
    for records, size in batches:
        one = entry(ring.next_offset, records, size)
        ring.append(one)
        held.append(one)
        while len(held) > 1 and (sum(len(e.data) for e in held) > bytes_max or len(held) > entries_max):
            held.pop(0)
        assert ring.bytes_held == sum(len(e.data) for e in held)
        assert len(ring) == len(held) <= entries_max
        assert ring.bytes_held <= max(bytes_max, size)
        assert (ring.first_offset, ring.next_offset) == (held[0].base_offset, one.next_offset)
        assert ring.read(ring.first_offset, 10**9) == held
    for offset in range(ring.first_offset, ring.next_offset):
        found = ring.read(offset, 1)
        assert found is not None and len(found) == 1
        assert found[0].base_offset <= offset < found[0].next_offset


def test_read_stops_at_max_bytes_but_gives_at_least_one() -> None:
    ring = Ring()
    for base in range(5):
        ring.append(entry(base, 1, 100))
    assert [e.base_offset for e in ring.read(1, 250) or []] == [1, 2]
    assert [e.base_offset for e in ring.read(1, 1) or []] == [1]
    assert ring.read(5, 1) == []


def test_too_old_and_not_yet_there_are_none_and_the_first_held_is_named() -> None:
    ring = Ring(bytes_max=250)
    for base in range(5):
        ring.append(entry(base, 1, 100))
    assert ring.first_offset == 3
    assert ring.read(2, 100) is None
    assert ring.read(6, 100) is None


def test_times() -> None:
    ring = Ring()
    for base, time_ms in enumerate((10, 10, 20, 40)):
        ring.append(entry(base, 1, 1, time_ms))
    assert [ring.offset_for_time(at) for at in (0, 10, 11, 20, 41)] == [0, 0, 2, 2, 4]
    ring.evict_before(20)
    assert ring.first_offset == 2
    ring.evict_before(10**9)
    assert (len(ring), ring.first_offset, ring.next_offset, ring.bytes_held) == (0, 4, 4, 0)
    ring.append(entry(4, 2, 1, 50))
    assert ring.offset_for_time(45) == 4


def test_truncation_goes_back_to_a_batch_or_to_nothing() -> None:
    ring = Ring()
    for base in (0, 10, 20):
        ring.append(entry(base, 10, 5))
    ring.truncate(25)
    assert (ring.next_offset, ring.bytes_held, len(ring)) == (20, 10, 2)
    ring.append(entry(20, 1, 5))
    ring.truncate(0)
    assert (len(ring), ring.first_offset, ring.next_offset) == (0, 0, 0)
