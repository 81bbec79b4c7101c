"""The sparse index: floor search, round trip, and None for whatever is not whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from region.log.index import INDEX_INTERVAL_BYTES, SparseIndex, decode_index

steps = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 100_000), st.integers(0, 50)), min_size=1, max_size=60
)


def built(parts: list[tuple[int, int, int]]) -> tuple[SparseIndex, list[tuple[int, int, int]]]:
    index = SparseIndex(1_000, 80)
    offset, position, time_ms = 1_000, 80, 5_000
    entries = []
    for records, length, later in parts:
        time_ms += later
        index.add(offset, offset + records, position, position + length, time_ms)
        entries.append((offset, position, time_ms))
        offset, position = offset + records, position + length
    return index, entries


@given(steps)
def test_search_starts_at_or_before_the_place_and_not_far_from_it(parts: list[tuple[int, int, int]]) -> None:
    index, entries = built(parts)
    for offset, position, time_ms in entries:
        start = index.position_for_offset(offset)
        assert start <= position < start + INDEX_INTERVAL_BYTES + 100_000
        first = next(place for _, place, when in entries if when >= time_ms)
        assert index.position_for_time(time_ms) <= first


@given(steps)
def test_round_trip_and_every_flipped_byte_is_found(parts: list[tuple[int, int, int]]) -> None:
    index, _ = built(parts)
    data = index.encode()
    again = decode_index(data, base_offset=1_000, segment_bytes=index.segment_bytes, start=80)
    assert again is not None and again.encode() == data
    assert (again.offsets, again.positions, again.times) == (index.offsets, index.positions, index.times)
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        assert decode_index(flipped, base_offset=1_000, segment_bytes=index.segment_bytes, start=80) is None
        assert decode_index(data[:at], base_offset=1_000, segment_bytes=index.segment_bytes, start=80) is None


def test_index_of_another_segment_or_length_is_not_taken() -> None:
    index, _ = built([(1, 100, 0)])
    assert decode_index(index.encode(), base_offset=999, segment_bytes=180, start=80) is None
    assert decode_index(index.encode(), base_offset=1_000, segment_bytes=181, start=80) is None
