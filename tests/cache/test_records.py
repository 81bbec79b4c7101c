"""What records do, and the records that do it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from felix.batch import NewRecord, encode_batch
from region.cache.records import Change, Reason, decode_changes, encode_changes

KEYS = st.binary(min_size=1, max_size=40)
PUTS = st.builds(
    Change,
    KEYS,
    st.binary(max_size=60),
    st.integers(0, 1 << 45),
    st.just(Reason.PUT),
    st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)),
)
TOMBSTONES = st.builds(
    Change,
    KEYS,
    st.just(b""),
    st.just(0),
    st.sampled_from([Reason.DELETED, Reason.EXPIRED, Reason.EVICTED]),
    st.just(b""),
)


@given(st.lists(st.one_of(PUTS, TOMBSTONES), min_size=1, max_size=20), st.sampled_from([0, 60_000]))
def test_changes_come_back_from_their_records(changes: list[Change], ttl_ms: int) -> None:
    batch = encode_changes(changes, default_ttl=ttl_ms > 0)
    assert decode_changes(batch, ttl_ms) == list(enumerate(changes))


def test_records_of_others_count_by_key_headers_and_the_caches_ttl() -> None:
    batch = encode_batch(
        [
            NewRecord(b"1", b"a"),
            NewRecord(b"no key"),
            NewRecord(b"2", b"b", {"felix.expires-at": b"0"}),
            NewRecord(b"3", b"c", {"felix.expires-at": b"soon"}),
            NewRecord(b"4", b"d", {"felix.expires-at": b"9" * 30}),
            NewRecord(b"", b"e", {"felix.tombstone": b"anything"}),
            NewRecord(b"6", b"f", {"other": b"x"}),
        ]
    )
    batch = batch.with_header(replace(batch.header, append_time_ms=1_000, base_offset=10))
    assert decode_changes(batch, 500) == [
        (10, Change(b"a", b"1", 1_500, Reason.PUT)),
        (12, Change(b"b", b"2", 0, Reason.PUT)),
        (13, Change(b"c", b"3", 1_500, Reason.PUT)),
        (14, Change(b"d", b"4", 1_500, Reason.PUT)),
        (15, Change(b"e", b"", 0, Reason.DELETED)),
        (16, Change(b"f", b"6", 1_500, Reason.PUT)),
    ]
