"""The clocks of two brokers of one destination are apart: what its leader takes before it hears of a document's leaf, which has the other one's time, must not stand in
the log as if it had come long after."""

from __future__ import annotations

from attacks.conftest import Tally
from attacks.test_half_signed_again import again, agreements, crossing, take
from audit_log import TIME_MS
from signed_grants import paper_leaf, signed_grant

from audit.leaf import Side
from region.remote_audit import CLOCK_AHEAD_MS_MAX
from region.replication.links import BEAT_MS, CLOCK_BEATS, SILENT_MS


def test_what_a_leader_takes_until_it_hears_of_a_leaf_stands_however_its_clock_may_be(tally: Tally) -> None:
    """Where its link is cut it goes on for SILENT_MS, and a clock that was just set is seen within CLOCK_BEATS."""
    heard_ms = SILENT_MS + BEAT_MS * CLOCK_BEATS
    signed = signed_grant()
    found = agreements(signed, Side.INGRESS)
    at = TIME_MS + 60_000
    take(found, paper_leaf(again(signed, "eu-west", 1, approvals=2), signed, Side.INGRESS, at))
    for ahead in (-60_000, 0, CLOCK_AHEAD_MS_MAX):
        assert found.judge(crossing(signed, Side.INGRESS, at + heard_ms + ahead)) == []
    # Further ahead it would be held against the log for ever.
    assert found.judge(crossing(signed, Side.INGRESS, at + 11_000))
    tally("leaders whose clocks are apart", 4)
