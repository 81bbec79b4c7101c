"""The segment format: round trips, every flipped bit found, nothing decodes under another salt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log.building import IDENTITY, batch_of, placed

from felix.errors import CorruptionError
from region.log.segment import (
    EntryDamagedError,
    EntryIncompleteError,
    Head,
    Kind,
    SegmentHeader,
    ShardIdentity,
    decode_entry,
    decode_segment_header,
    encode_entry_header,
    find_entries,
    scan_window,
    segment_name,
)

SALT = 0x0123_4567_89AB_CDEF


def entry_bytes(payload: bytes, base_offset: int, *, annotation: bytes = b"", synced_to: int = 0) -> bytes:
    batch = placed(batch_of(payload), base_offset, epoch=2)
    head = encode_entry_header(
        Kind.BATCH,
        base_offset=base_offset,
        leader_epoch=2,
        synced_to=synced_to,
        batch_length=batch.header.total_length,
        slot=5,
        annotation=annotation,
        salt=SALT,
    )
    return head + batch.encode()


def decode(data: bytes, *, salt: int = SALT) -> object:
    return decode_entry(data, 0, at=1_000, salt=salt, shard=IDENTITY.shard, verify_body=True)


@given(
    base=st.integers(0, 2**63),
    created=st.integers(0, 2**62),
    salt=st.integers(0, 2**64 - 1),
    commitment=st.binary(max_size=256),
    shard=st.integers(0, 2**32 - 1),
    head=st.none() | st.builds(Head, st.integers(0, 2**32 - 1), st.integers(0, 384)),
)
def test_segment_header_round_trip(
    base: int, created: int, salt: int, commitment: bytes, shard: int, head: Head | None
) -> None:
    header = SegmentHeader(
        ShardIdentity("us-east", "a/b/c", bytes(16), shard), base, created, salt, commitment, head=head
    )
    data = header.encode()
    assert decode_segment_header(data + b"more") == (header, len(data))


def test_every_flipped_bit_of_a_segment_header_is_found() -> None:
    data = SegmentHeader(IDENTITY, 7, 8, SALT, b"commitment").encode()
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(CorruptionError):
            decode_segment_header(flipped)
    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            decode_segment_header(data[:length])


@given(
    payload=st.binary(max_size=300),
    annotation=st.binary(max_size=1_024),
    base_offset=st.integers(0, 2**63 - 2),
)
def test_entry_round_trip(payload: bytes, annotation: bytes, base_offset: int) -> None:
    data = entry_bytes(payload, base_offset, annotation=annotation, synced_to=99)
    entry = decode_entry(data + b"FE", 0, at=1_000, salt=SALT, shard=IDENTITY.shard, verify_body=True)
    assert (entry.position, entry.end) == (1_000, 1_000 + len(data))
    assert (entry.base_offset, entry.next_offset) == (base_offset, base_offset + 1)
    assert (entry.annotation, entry.slot, entry.synced_to, entry.leader_epoch) == (annotation, 5, 99, 2)


def test_every_flipped_bit_of_an_entry_is_found() -> None:
    data = entry_bytes(b"payload", 3, annotation=b"position")
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(EntryDamagedError):
            decode(bytes(flipped))


def test_every_shorter_entry_is_incomplete() -> None:
    data = entry_bytes(b"payload", 3, annotation=b"position")
    for length in range(len(data)):
        with pytest.raises(EntryIncompleteError) as incomplete:
            decode(data[:length])
        assert length < incomplete.value.needed <= len(data)


def test_entry_of_another_segment_does_not_decode() -> None:
    with pytest.raises(EntryDamagedError, match="checksum"):
        decode(entry_bytes(b"payload", 3), salt=SALT + 1)


def test_scan_gives_every_entry_before_the_damage_and_find_those_behind() -> None:
    parts = [entry_bytes(b"%d" % number, number) for number in range(5)]
    damaged = bytearray(b"".join(parts))
    damaged[len(parts[0]) + len(parts[1]) + 10] ^= 1
    scan = scan_window(damaged, at=0, salt=SALT, shard=IDENTITY.shard, verify_body=True)
    assert [entry.base_offset for entry in scan.entries] == [0, 1]
    assert scan.stopped is not None
    behind = find_entries(damaged, at=0, salt=SALT, shard=IDENTITY.shard, whole=True)
    assert [entry.base_offset for entry in behind] == [0, 1, 3, 4]


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_no_entry(data: bytes) -> None:
    with pytest.raises(EntryDamagedError):
        decode(b"FE\x01" + data)
    assert find_entries(data, at=0, salt=SALT, shard=3, whole=False) == []


def test_segment_names_sort_as_their_offsets() -> None:
    offsets = [0, 9, 10, 2**40, 2**63]
    assert sorted(map(segment_name, offsets)) == [segment_name(offset) for offset in offsets]
