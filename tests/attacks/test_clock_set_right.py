"""Nobody's keys: a clock that was ahead while records crossed is set right, and the grant is revoked. The order of the leaves says what
happened; that two times of one writer disagree is told, and makes no log wrong."""

from __future__ import annotations

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, INGRESS, files_of
from audit_log import TIME_MS, Link, trust
from signed_grants import grant_leaves, paper_leaf, signed_grant, standing

from audit.leaf import Leaf, Side
from audit.verify import TAKEN_LATE, TIME_BACK, TIME_BACK_MS, Report, verify_log
from policy.grant import StandingAction

DRAIN_MS = 10_000


def verified(side: Side, ahead_ms: int, *, behind: bool = False) -> Report:
    """A crossing `ahead_ms` too late by its leaf, and 1 s later the revocation; or in the other order."""
    link, signed = Link(), signed_grant()
    first = link.intent()
    crossed = first if side is Side.EGRESS else link.delivery(first)
    at = TIME_MS + 60_000
    late = [
        Leaf(msgspec.structs.replace(each.header, time_ms=at + ahead_ms), each.entries) for each in crossed
    ]
    revocation = standing(signed.grant, StandingAction.REVOKE, "us-east")
    revoke = paper_leaf(revocation, signed, side, at + 1_000, drain_until_ms=at + 1_000 + DRAIN_MS)
    leaves = [*grant_leaves(signed, side), *([revoke, *late] if behind else [*late, revoke])]
    return verify_log(files_of(EGRESS if side is Side.EGRESS else INGRESS, leaves), trust())


@pytest.mark.parametrize("side", list(Side))
def test_a_clock_that_was_set_right_before_a_revocation_makes_no_log_wrong(side: Side, tally: Tally) -> None:
    drained = 1_000 + DRAIN_MS
    for ahead_ms in (0, drained, drained + 1, 30_000, 300_000):
        report = verified(side, ahead_ms)
        assert report.ok, report.findings
        expected = [TIME_BACK] * (ahead_ms > TIME_BACK_MS + 1_000) + [TAKEN_LATE] * (ahead_ms > drained)
        assert [notice.name for notice in report.notices] == expected
        tally("clocks that were ahead", 1)


@pytest.mark.parametrize("side", list(Side))
def test_what_crosses_behind_the_leaf_is_found_whatever_its_time(side: Side, tally: Tally) -> None:
    for ahead_ms in (-300_000, -30_000, 0, 300_000):
        report = verified(side, ahead_ms, behind=True)
        assert any("revoked before" in finding.sentence for finding in report.findings)
        tally("crossings behind a revocation", 1)
