"""Positions and the range index: functions of the leaves, in order, and back from their bytes."""

from __future__ import annotations

import pytest
from audit_log import Link, egress_appends
from hypothesis import given
from hypothesis import strategies as st

from audit.leaf import GapKind, Kind, Side
from audit.position import UNANSWERED_MAX, Positions
from audit.range_index import ROW_BYTES, bundle_rows, bundles_indexed, candidate_bundles, cut_index
from felix.errors import CorruptionError


def test_a_snapshot_goes_round_at_every_leaf() -> None:
    positions, number = Positions(), 0
    link = Link()
    for leaves in egress_appends(30, link):
        for leaf in leaves:
            positions.apply(number, leaf.header)
            number += 1
        again, size, last = Positions.decode(positions.encode(number, b"h" * 32))
        assert (size, last) == (number, b"h" * 32)
        assert again.last_intent(link.key) == positions.last_intent(link.key)
        assert again.last_ack(link.key) == positions.last_ack(link.key)
        assert again.unanswered(link.key) == positions.unanswered(link.key)
        assert again.keys() == positions.keys()


def test_what_another_grant_announces_again_waits_for_no_answer_any_more() -> None:
    positions, link = Positions(), Link()
    for number in range(3):
        positions.apply(number, link.intent(3)[0].header)
    again = Link(grant_id="g-2")
    again.offset = 3
    (leaf,) = again.intent(6)
    positions.apply(3, leaf.header)
    waiting = [(each.grant_id, each.first_offset) for each in positions.unanswered(link.key)]
    assert waiting == [(link.grant_id, 0), ("g-2", 3)]
    # What another bridge brought of a batch: it waits for no answer, either.
    later = Link(grant_id="g-3")
    later.offset = 3
    positions.apply(4, later.gap(2, GapKind.ELSEWHERE).header)
    assert [each.first_offset for each in positions.unanswered(link.key)] == [0]


@given(st.binary(max_size=100))
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        Positions.decode(data)


def test_the_ingress_side_has_a_last_delivery() -> None:
    positions, link = Positions(), Link()
    for number in range(3):
        (leaf,) = link.delivery(link.intent())
        positions.apply(number, leaf.header)
    last = positions.last_ack(link.key)
    assert last is not None
    assert (last.first_offset, last.last_offset, last.destination_last_offset) == (6, 8, 8)
    assert positions.last_intent(link.key) is None and positions.unanswered(link.key) == ()


def test_too_many_unanswered_intents_are_refused_until_one_is_answered() -> None:
    positions, link = Positions(), Link()
    first = link.intent(1)
    positions.apply(0, first[0].header)
    for number in range(1, UNANSWERED_MAX):
        assert positions.refuses([first[0].header]) == ""
        positions.apply(number, link.intent(1)[0].header)
    assert "without an answer" in positions.refuses([link.intent(1)[0].header])
    batch = [leaf.header for leaf in link.intent(3, withhold=(1,))]
    assert batch[0].kind is Kind.WITHHELD and "without an answer" in positions.refuses(batch)
    assert positions.refuses([link.grant().header]) == ""
    positions.apply(UNANSWERED_MAX, link.ack(first).header)
    assert positions.refuses([link.intent(1)[0].header]) == ""


def test_the_index_names_the_bundles_that_may_hold_an_offset() -> None:
    link, other = Link(), Link(shard=1)
    bundles = [
        [*link.intent(10), *other.intent(5)],
        [link.grant()],
        [*link.intent(10), *link.delivery(other.intent(5))],
    ]
    index = b"".join(
        bundle_rows(number, [leaf.header for leaf in leaves]) for number, leaves in enumerate(bundles)
    )
    stream = bundles[0][0].header.stream
    assert bundles_indexed(index) == 3 and len(index) % ROW_BYTES == 0
    assert candidate_bundles(index, Kind.INTENT, stream, 0, 3) == [0]
    assert candidate_bundles(index, Kind.INTENT, stream, 0, 10) == [2]
    assert candidate_bundles(index, Kind.INTENT, stream, 0, 20) == []
    assert candidate_bundles(index, Kind.INTENT, stream, 1, 6) == []
    assert bundles[2][1].header.side is Side.INGRESS
    assert candidate_bundles(index, Kind.ACK, stream, 1, 6) == [2]
    assert candidate_bundles(index[:-1], Kind.ACK, stream, 1, 6) in ([], [2]), "a torn row is left out"
    assert bundles_indexed(cut_index(index, 2)) == 2 and cut_index(index, 9) == index
    assert bundles_indexed(index[ROW_BYTES * 2 + ROW_BYTES :]) == 0, "a hole is no index"
    assert bundles_indexed(b"") == 0
