"""The clocks of two brokers of one destination are apart: what its leader takes before it hears of a document's leaf, which has the other one's time, must not stand in
the log as if it had come long after."""

from __future__ import annotations

from attacks.conftest import Tally
from attacks.test_half_signed_again import again, agreements, crossing, take
from audit_log import TIME_MS
from signed_grants import paper_leaf, signed_grant

from audit.leaf import Side
from region.evidence.document_log import KNOWN_MS_MAX
from region.evidence.remote_audit import CLOCK_AHEAD_MS_MAX
from region.governance.leaves import LOOK_S
from region.replication.links import BEAT_MS, CLOCK_BEATS


def test_what_a_leader_takes_until_it_hears_of_a_leaf_stands_however_its_clock_may_be(tally: Tally) -> None:
    """It goes on by what it knew KNOWN_MS_MAX ago, sees within LOOK_S that it writes the log no more, and within CLOCK_BEATS that a clock was set."""
    heard_ms = KNOWN_MS_MAX + round(1_000 * LOOK_S)
    assert BEAT_MS * CLOCK_BEATS < KNOWN_MS_MAX
    signed = signed_grant()
    found = agreements(signed, Side.INGRESS)
    at = TIME_MS + 60_000
    take(found, paper_leaf(again(signed, "eu-west", 1, approvals=2), signed, Side.INGRESS, at))
    for ahead in (-60_000, 0, CLOCK_AHEAD_MS_MAX):
        assert found.judge(crossing(signed, Side.INGRESS, at + heard_ms + ahead)) == []
    # Further ahead it would be held against the log for ever.
    assert found.judge(crossing(signed, Side.INGRESS, at + 11_000))
    tally("leaders whose clocks are apart", 4)
