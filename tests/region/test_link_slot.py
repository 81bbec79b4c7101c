"""What a destination's shard remembers of a link: codec, names, and what version 0.1 wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.errors import Code, CorruptionError, RequestError
from region.crossing.link_slot import (
    ENVELOPES_MAX,
    Landed,
    LinkRecord,
    Position,
    held_record,
    link_slot,
    old_slot,
)
from region.log.segment import ANNOTATION_BYTES_MAX

U64 = st.integers(0, (1 << 64) - 1)
LANDED = st.builds(Landed, U64, U64, st.integers(0, (1 << 32) - 1))
POSITIONS = st.builds(Position, U64, st.lists(LANDED, max_size=ENVELOPES_MAX).map(tuple))
NAMES = st.text("abz09._-/", max_size=191)
ID16 = st.binary(min_size=16, max_size=16)
RECORDS = st.builds(
    LinkRecord, NAMES.map(lambda name: name[:63]), NAMES, ID16, ID16, U64, st.integers(0, (1 << 32) - 1), U64, POSITIONS
)  # fmt: skip


@given(RECORDS)
def test_a_record_reads_as_it_was_written_and_fits_an_annotation(record: LinkRecord) -> None:
    encoded = record.encode()
    assert LinkRecord.decode(encoded) == record
    assert len(encoded) <= ANNOTATION_BYTES_MAX


@given(
    st.builds(Position, st.integers(0, (1 << 63) - 1), st.lists(LANDED, max_size=ENVELOPES_MAX).map(tuple))
)
def test_a_position_of_version_0_1_is_never_taken_for_a_record(position: Position) -> None:
    assert LinkRecord.decode(position.encode()) is None


@given(RECORDS, st.data())
def test_a_record_that_is_cut_off_raises(record: LinkRecord, data: st.DataObject) -> None:
    encoded = record.encode()
    cut = encoded[: data.draw(st.integers(4, len(encoded) - 1))]
    with pytest.raises(CorruptionError):
        LinkRecord.decode(cut)


def test_a_slot_is_of_the_link_and_holds_its_name() -> None:
    slot = link_slot("us-east", "acme/ops/departures", 0)
    assert slot != link_slot("us-east", "acme/ops/departures", 1)
    assert slot != link_slot("us-west", "acme/ops/departures", 0)
    assert old_slot("us-east", "acme/ops/departures", bytes(16), 0) != old_slot(
        "us-east", "acme/ops/departures", b"i" * 16, 0
    )
    record = LinkRecord("us-east", "acme/ops/departures", b"i" * 16, b"i" * 16, 1, 1, 5, Position(5))
    annotations = {slot: record.encode()}
    assert held_record(annotations, slot, "us-east", "acme/ops/departures") == record
    with pytest.raises(RequestError) as met:
        held_record(annotations, slot, "us-east", "acme/ops/crew")
    assert met.value.code is Code.CONFLICT
