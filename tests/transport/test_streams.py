"""Which streams of a connection are open, and what waits to leave on them."""

import pytest

from felix.errors import Code, UnavailableError
from felix.transport.streams import RECEIVING, SENDING, STOPPED, STREAMS_SLACK, Outbox, StreamTable

BIDIRECTIONAL, OUR_UNIDIRECTIONAL, THEIR_UNIDIRECTIONAL = 0, 2, 3
"""Ids as a client sees them (RFC 9000, section 2.1); the next of a kind is 4 more."""


def test_a_stream_is_forgotten_once_both_directions_have_ended() -> None:
    table = StreamTable(1, is_client=True)
    table.opened(BIDIRECTIONAL)
    table.opened(OUR_UNIDIRECTIONAL)
    assert table.states == {BIDIRECTIONAL: SENDING | RECEIVING, OUR_UNIDIRECTIONAL: SENDING}
    table.end_sending(BIDIRECTIONAL)
    table.end_sending(OUR_UNIDIRECTIONAL)
    assert table.states == {BIDIRECTIONAL: RECEIVING}
    table.end_receiving(BIDIRECTIONAL)
    assert table.states == {}


def test_we_open_as_many_of_a_kind_as_the_limit_says_and_one_more_once_one_has_ended() -> None:
    table = StreamTable(1, is_client=True)
    table.opened(OUR_UNIDIRECTIONAL)
    table.check_room(bidirectional=True)
    with pytest.raises(UnavailableError) as caught:
        table.check_room(bidirectional=False)
    assert caught.value.code is Code.LIMIT_SUBSCRIPTIONS
    table.end_sending(OUR_UNIDIRECTIONAL)
    table.check_room(bidirectional=False)


def test_streams_of_the_peer_are_taken_up_as_far_as_the_slack_and_ours_never() -> None:
    table = StreamTable(2, is_client=True)
    assert not table.take_up(BIDIRECTIONAL), "one of ours, which has ended"
    for number in range(STREAMS_SLACK * 2):
        assert table.take_up(THEIR_UNIDIRECTIONAL + 4 * number)
    with pytest.raises(UnavailableError):
        table.take_up(THEIR_UNIDIRECTIONAL + 4 * STREAMS_SLACK * 2)
    table.end_receiving(THEIR_UNIDIRECTIONAL)
    assert table.take_up(THEIR_UNIDIRECTIONAL + 4 * STREAMS_SLACK * 2)


def test_what_the_peer_wants_no_more_of_is_open_until_we_end_it() -> None:
    table = StreamTable(1, is_client=False)
    assert table.take_up(BIDIRECTIONAL) and table.stop(BIDIRECTIONAL)
    assert table.states[BIDIRECTIONAL] == SENDING | RECEIVING | STOPPED
    table.end_sending(BIDIRECTIONAL)
    assert table.states[BIDIRECTIONAL] == RECEIVING and not table.stop(BIDIRECTIONAL)


def test_what_was_sent_leaves_in_order_by_the_streams_that_were_first_sent_on() -> None:
    outbox = Outbox()
    outbox.put(4, b"ab", False)
    outbox.put(0, b"x", False)
    outbox.put(4, b"c", True)
    outbox.put(8, b"dropped", False)
    assert outbox.drop(8) and not outbox.drop(8) and outbox.held_bytes == 4
    assert list(outbox.take().items()) == [(4, ([b"ab", b"c"], True)), (0, ([b"x"], False))]
    assert not outbox.pending and outbox.held_bytes == 0 and not outbox.take()
