"""When a client pings its server, and when it counts it as gone."""

from felix.transport.liveness import UNANSWERED_AFTER_REFUSAL_S, UNANSWERED_S, Liveness, Verdict


def test_a_server_that_said_nothing_to_what_was_sent_is_pinged_and_then_gone() -> None:
    liveness = Liveness(keepalive_s=0)
    assert liveness.look(10.5, heard_at=10.0, sent_at=10.2) is Verdict.WAIT
    assert liveness.look(11.0, heard_at=10.0, sent_at=10.2) is Verdict.PING
    liveness.pinged(11.0)
    assert liveness.look(11.0 + UNANSWERED_S - 0.1, heard_at=10.0, sent_at=11.0) is Verdict.WAIT
    liveness.pinged(15.0)
    assert liveness.look(11.0 + UNANSWERED_S, heard_at=10.0, sent_at=15.0) is Verdict.GONE


def test_an_answer_to_a_ping_begins_anew() -> None:
    liveness = Liveness(keepalive_s=0)
    liveness.pinged(11.0)
    assert liveness.look(30.0, heard_at=29.9, sent_at=29.8) is Verdict.WAIT
    assert liveness.look(31.0, heard_at=29.9, sent_at=30.0) is Verdict.PING


def test_after_a_refusal_an_answer_is_awaited_for_less_time() -> None:
    liveness = Liveness(keepalive_s=0)
    assert liveness.refused() is Verdict.PING
    assert liveness.refused() is Verdict.WAIT, "a second refusal says nothing new"
    liveness.pinged(11.0)
    assert liveness.look(11.0 + UNANSWERED_AFTER_REFUSAL_S, heard_at=10.0, sent_at=11.0) is Verdict.GONE


def test_silence_is_broken_where_the_connection_is_to_be_kept_up() -> None:
    assert Liveness(keepalive_s=0).look(100.0, heard_at=10.0, sent_at=10.0) is Verdict.WAIT
    kept = Liveness(keepalive_s=3.0)
    assert kept.look(12.9, heard_at=10.0, sent_at=10.0) is Verdict.WAIT
    assert kept.look(13.0, heard_at=10.0, sent_at=10.0) is Verdict.PING


def test_a_client_that_stood_still_does_not_hold_it_against_its_server() -> None:
    liveness = Liveness(keepalive_s=0)
    liveness.pinged(11.0)
    assert liveness.look(31.0, heard_at=10.0, sent_at=11.0, late_s=19.0) is Verdict.WAIT
    assert liveness.look(32.0, heard_at=10.0, sent_at=11.0) is Verdict.WAIT
    assert liveness.look(30.0 + UNANSWERED_S, heard_at=10.0, sent_at=11.0) is Verdict.GONE, (
        "what is left counts"
    )
    liveness = Liveness(keepalive_s=0)
    liveness.pinged(11.0)
    assert liveness.look(31.0, heard_at=31.0, sent_at=11.0, late_s=19.0) is Verdict.WAIT
    assert liveness.look(32.0, heard_at=31.0, sent_at=31.1) is Verdict.PING, "its answer had come meanwhile"
