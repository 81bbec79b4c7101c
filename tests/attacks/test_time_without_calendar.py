"""A signed time that no calendar has: one region dates its word after the year 9999, and everybody who reads it has to tell that time.

A pause of one grant, so dated, ended the verification of every log that has its leaf, and the planning of an agent for all its grants.
Whoever judges says what he would have said of any other time.
"""

from __future__ import annotations

import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, files_of
from audit_log import BRIDGE, STREAM, TIME_MS, Link, trust
from signed_grants import deny_entry, paper_leaf, signed_grant, standing

from audit.leaf import TIME_MS_MAX
from audit.verify import verify_log
from bridge.plan import Verdict, plan_links
from felix.messages import StreamState
from felix.names import SpiffeId
from felix.settings import Durability, Retention
from policy.grant import GrantBook, StandingAction
from policy.quantity import AFTER_CALENDAR
from policy.signed import NUMBER_MAX

AFTER = (TIME_MS_MAX + 1, NUMBER_MAX)
FORBIDDEN = {StandingAction.PAUSE: "paused", StandingAction.REVOKE: "revoked", StandingAction.RESUME: ""}


@pytest.mark.parametrize("at", AFTER)
@pytest.mark.parametrize("region", ["us-east", "eu-west"])
def test_a_log_with_a_word_of_no_calendar_is_verified(region: str, at: int, tally: Tally) -> None:
    for action, word in FORBIDDEN.items():
        link = Link()
        said = paper_leaf(standing(link.signed.grant, action, region, at=at), link.signed, time_ms=TIME_MS)
        link.time_ms += 60_000
        papers, intents = link.agreement(), link.intent()
        report = verify_log(files_of(EGRESS, [*papers, said, *intents, link.ack(intents)]), trust())
        assert [word in found.sentence for found in report.findings] == ([True] if word else []), action
        if action is StandingAction.PAUSE:
            assert AFTER_CALENDAR in report.findings[0].sentence
    tally("words of no calendar in a log", len(FORBIDDEN))


@pytest.mark.parametrize("at", AFTER)
def test_a_grant_with_a_word_of_no_calendar_keeps_no_other_from_being_planned(at: int, tally: Tally) -> None:
    ill, well = signed_grant(), signed_grant(stream="acme/ops/other")
    late = signed_grant(stream="acme/ops/late", not_before=at - 1, expires=at)
    streams = {
        name: StreamState(name, b"i" * 16, 1, Durability(), Retention(), 0, 0)
        for name in (STREAM, "acme/ops/other", "acme/ops/late")
    }
    for action, verdict in ((StandingAction.PAUSE, Verdict.PAUSE), (StandingAction.REVOKE, Verdict.STOP)):
        documents = [
            each for signed in (ill, well, late) for each in (signed.export, signed.accepted, *signed.approvals)
        ]  # fmt: skip
        documents += [standing(ill.grant, action, "eu-west", at=at), deny_entry("acme/hr/*", at=at)]
        book = GrantBook(documents, trust().policy_keys, trust().anchors)
        rows = plan_links(book, SpiffeId.parse(BRIDGE), streams, ["eu-west"], TIME_MS)
        verdicts = {row.grant: row.verdict for row in rows}
        assert verdicts == {ill.grant: verdict, well.grant: Verdict.RUN, late.grant: Verdict.WAIT}
        rows = plan_links(book, SpiffeId.parse(BRIDGE), streams, ["eu-west"], at + 1)
        assert {row.verdict for row in rows} == {Verdict.STOP}
        tally("plans with a word of no calendar", 2)
