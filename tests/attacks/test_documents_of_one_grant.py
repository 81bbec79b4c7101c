"""Documents without end, or that fit nothing, about one grant: one region signs them, an honest agent and an honest broker write them down, and
the other region's log must go on verifying, its revocation count, and its verification end.

The bounds are lowered here; what decides is asked of the same documents with bounds that are not reached.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from attacks.chance import Chance
from attacks.conftest import Tally
from audit_log import BRIDGE, EGRESS_ORIGIN, INGRESS_ORIGIN, STREAM, TIME_MS, Link, trust
from egress_documents import egress_documents
from signed_grants import (
    HOUR_MS,
    Signed,
    approver,
    deny_entry,
    grant_leaves,
    paper_leaf,
    policy_document,
    signed_grant,
    signing_key,
    standing,
)

from audit import agreement as agreement_module
from audit import words as words_module
from audit.agreement import STANDING_GRACE_MS, Agreements
from audit.leaf import Header, Kind, Leaf, Side
from audit.origin import Origin
from audit.signed_leaf import signed_leaf
from audit.words import Words
from bridge import documents as documents_module
from policy.approval import APPROVERS_MAX, Document, sign_approval
from policy.grant import GrantBook, Rank, StandingAction
from policy.residency import APPROVALS_MAX
from policy.signed import Purpose, SignedDocument, canonical, sign

PAUSE, RESUME, REVOKE = StandingAction.PAUSE, StandingAction.RESUME, StandingAction.REVOKE
PER_GRANT_BEFORE = 1_024
"""Documents of one grant, beyond which a log did not verify."""


def load(header: Header) -> bytes | None:
    return header.document


def agreements(side: Side = Side.EGRESS) -> Agreements:
    return Agreements(trust(), Origin.parse(EGRESS_ORIGIN if side is Side.EGRESS else INGRESS_ORIGIN))


def take(found: Agreements, *leaves: Leaf) -> None:
    for leaf in leaves:
        assert found.take(0, leaf, load) == []


def crossing(signed: Signed, time_ms: int) -> Header:
    changes: dict[str, Any] = {
        "grant_id": signed.grant,
        "terms_hash": signed.terms.hash(),
        "time_ms": time_ms,
    }
    return msgspec.structs.replace(
        Link().header(Kind.INTENT, Side.EGRESS), first_offset=0, last_offset=0, **changes
    )


def leaf_of(document: Document, signed: Signed) -> Leaf:
    """As the agent writes it."""
    return signed_leaf(
        document, own_region="us-east", time_ms=TIME_MS, actor=BRIDGE, terms=signed.terms, side=Side.EGRESS
    )


def test_pauses_without_end_hide_no_revocation_and_make_no_log_wrong(tally: Tally) -> None:
    signed, found, late = signed_grant(), agreements(), TIME_MS + HOUR_MS
    take(found, *grant_leaves(signed))
    count = PER_GRANT_BEFORE + 20
    for number in range(count):
        action = RESUME if number % 2 and number < 100 else PAUSE
        take(found, paper_leaf(standing(signed.grant, action, "eu-west", number + 1), signed))
    assert "eu-west paused" in found.judge(crossing(signed, late))[0]
    take(found, paper_leaf(standing(signed.grant, RESUME, "eu-west", count + 1), signed))
    assert found.judge(crossing(signed, late)) == []
    take(found, paper_leaf(standing(signed.grant, REVOKE, "us-east", 1), signed))
    assert "revoked before" in found.judge(crossing(signed, late))[0]
    assert found.revocations(signed.grant) == (0,)
    tally("pauses of one grant", count)


def test_a_pause_that_is_written_down_again_and_again_counts_from_its_first_leaf_on(tally: Tally) -> None:
    """An agent that goes on under a paused grant writes the pause's leaf anew before each grace is over."""
    signed, found = signed_grant(), agreements()
    take(found, *grant_leaves(signed))
    pause = standing(signed.grant, PAUSE, "eu-west")
    for number in range(5):
        at = TIME_MS + number * (STANDING_GRACE_MS - 1)
        take(found, paper_leaf(pause, signed, time_ms=at))
        assert bool(found.judge(crossing(signed, at))) is (number > 1)
    tally("leaves of one pause", 5)


@pytest.mark.parametrize("bound", [2, 3, 1_000])
def test_of_words_without_end_the_one_that_holds_is_the_one_that_holds(
    bound: int, monkeypatch: pytest.MonkeyPatch, chance: Chance, tally: Tally
) -> None:
    """Against all that was said. Where the bound is reached, nothing is stopped that was not, and the newest word counts."""
    monkeypatch.setattr(words_module, "STOPS_MAX", bound)
    random = chance(7 * bound)
    for _ in range(400):
        words, said = Words[int](), list[tuple[Rank, int, bool, int]]()
        for number in range(random.randrange(1, 12)):
            stops = random.random() < 0.7
            rank = (random.randrange(8), stops, bytes([number]))
            said.append((rank, random.randrange(20), stops, number))
            words.take(rank, said[-1][1], number, stops=stops)
            for until_ms in range(-1, 21):
                counting = [each for each in said if not each[2] or each[1] <= until_ms]
                newest = max(counting, default=None)
                expected = newest[3] if newest is not None and newest[2] else None
                found = words.stop(until_ms)
                if bound == 1_000 or until_ms == 20:
                    assert found == expected, (said, until_ms)
                else:
                    assert found is None or expected is not None, (said, until_ms)
    tally("words that were said", 400)


def test_approvers_without_end_change_nothing(
    monkeypatch: pytest.MonkeyPatch, chance: Chance, tally: Tally
) -> None:
    """Any number of people of the other region, in any order: who decides is the same as where all of them are held."""
    assert APPROVERS_MAX >= APPROVALS_MAX + 2, "those who drew up and accepted a grant may not count"
    names = ["bob", "alice", *(f"x{number}" for number in range(12))]
    random, tried = chance(11), 0
    for needed, separate in ((1, False), (2, True), (4, True)):
        signed = signed_grant(needed, separate)
        own = [each for each in signed.approvals if each.region == "us-east"]
        for _ in range(6):
            asked = []
            for name in random.sample(names, 10):
                at = TIME_MS + random.choice((-HOUR_MS + 5, 0, 600_000, 10**7))
                asked.append(sign_approval(signed.terms.hash(), approver("eu-west", name), at))
            decided = []
            for bound in (needed + 2, 1_000):
                monkeypatch.setattr(agreement_module, "APPROVERS_MAX", bound)
                found = agreements()
                take(found, *grant_leaves(signed._replace(approvals=())))
                take(found, *(leaf_of(each, signed) for each in own))
                answers = []
                for each in asked:
                    take(found, leaf_of(each, signed))
                    answers.append(
                        [bool(found.judge(crossing(signed, TIME_MS + later))) for later in (0, 10**8)]
                    )
                decided.append(answers)
                held = sum(len(each) for each in found._grants[signed.grant].approved.values())
                assert held <= len(own) + bound
            assert decided[0] == decided[1]
            tried += len(asked)
    tally("people who approved", tried)


def test_deny_entries_without_end_are_their_own_regions_loss(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(words_module, "DENIED_MAX", 8)
    signed, late = signed_grant(), TIME_MS + STANDING_GRACE_MS + 1
    found = agreements()
    take(found, *grant_leaves(signed), paper_leaf(deny_entry("acme/ops/*"), signed))
    for number in range(40):
        other = deny_entry(f"acme/ops/other{number}", "eu-west", lifted=number % 2 == 0)
        take(found, paper_leaf(other, signed))
        assert "us-east denies" in found.judge(crossing(signed, late))[0]
    take(found, paper_leaf(deny_entry("acme/ops/*", sequence=2, lifted=True), signed))
    assert found.judge(crossing(signed, late)) == []
    # What counts is what was said last; what was lifted is forgotten before what stands.
    take(found, paper_leaf(deny_entry(STREAM, "eu-west"), signed))
    for number in range(40):
        take(found, paper_leaf(deny_entry(f"acme/ops/more{number}", "eu-west", lifted=True), signed))
    assert "eu-west denies" in found.judge(crossing(signed, late))[0]
    tally("deny entries of another stream", 80)


def test_policies_without_end_leave_the_one_that_a_half_was_made_under(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(agreement_module, "POLICIES_MAX", 6)
    signed, found = signed_grant(), agreements()
    take(found, *grant_leaves(signed))
    for revision in range(2, 40):
        # The newest asks for more than the grant has.
        take(found, paper_leaf(policy_document("us-east", 3, revision=revision), signed))
        assert len(found._policies["us-east"]) <= 6
        assert found.judge(crossing(signed, TIME_MS)) == []
    tally("policies of one region", 38)


def other_acceptances(signed: Signed) -> list[SignedDocument]:
    """What the destination signs under this grant's id, and what another region of the mesh does."""
    changes: list[dict[str, Any]] = [
        {"stream": "acme/ops/other", "destination_stream": "acme/ops/other"},
        {"destination_stream": "acme/ops/elsewhere"},
        {"bridge": "spiffe://us-east.acme/bridge/other"},
        {"terms_hash": "ab" * 32},
        {"from_region": "ap-south", "bridge": "spiffe://ap-south.acme/bridge/us-to-eu"},
        {"to_region": "ap-south", "accepted_by": "spiffe://ap-south.acme/operator/eve"},
    ]
    bodies = [
        msgspec.structs.replace(signed.half, signed_at=signed.half.signed_at + 9, **each) for each in changes
    ]
    return [
        sign(Purpose.IMPORT, body.to_region, canonical(body), signing_key(body.to_region)) for body in bodies
    ]


@pytest.mark.parametrize("first", [False, True])
def test_an_acceptance_that_fits_nothing_makes_no_log_wrong(
    first: bool, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """Before the right one and behind it; before the export is known, and more of them than are held."""
    monkeypatch.setattr(agreement_module, "ACCEPTANCES_MAX", 3)
    signed = signed_grant()
    odd = [leaf_of(each, signed) for each in other_acceptances(signed)]
    everyone = trust("us-east", "eu-west", "ap-south")
    policy, export, *rest = grant_leaves(signed)
    for leaves in (
        [policy, *odd, export, *rest] if first else [policy, export, *rest, *odd],
        [policy, export, *odd, *rest],
    ):
        found = Agreements(everyone, Origin.parse(EGRESS_ORIGIN))
        take(found, *leaves)
        assert found.judge(crossing(signed, TIME_MS)) == []
        agreed = found.agreement(signed.grant)
        assert agreed is not None and agreed.accepted == signed.half
    alone = Agreements(everyone, Origin.parse(EGRESS_ORIGIN))
    take(alone, policy, export, *rest[1:], *odd)
    assert "no ACCEPT leaf" in alone.judge(crossing(signed, TIME_MS))[0]
    tally("acceptances of something else", len(odd))


def papers_of(signed: Signed, *more: Document) -> set[Document]:
    """Of which documents an honest agent writes leaves, where the destination lists these besides."""
    keys, anchors = trust("us-east", "eu-west", "ap-south").policy_keys, trust().anchors
    documents = [signed.export, signed.accepted, *signed.approvals, *more]
    egress = egress_documents()
    listed = {str(number): each.encode_file() for number, each in enumerate(documents)}
    asyncio.run(egress.read({"eu-west": {"deny": listed}}, keys, anchors))
    return {paper.document for paper in egress._papers}


def test_one_person_who_approves_without_end_takes_no_other_persons_leaf(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """Two people of the destination must approve. One of them signs more approvals than are held, each dated before the other's."""
    monkeypatch.setattr(documents_module, "APPROVERS_MAX", 4)
    signed = signed_grant(2)
    at = signed.approvals[0].claim.at
    many = [
        sign_approval(signed.terms.hash(), approver("eu-west", "dpo"), at - 100 + number)
        for number in range(12)
    ]
    papers = papers_of(signed, *many)
    own = [each for each in signed.approvals if each.region == "us-east"]
    other = [each for each in signed.approvals if each.claim.approver.endswith("dpo1")]
    assert papers == {signed.export, signed.accepted, *own, *other, many[0]}
    found = agreements()
    take(
        found,
        paper_leaf(signed.source_policy, signed),
        leaf_of(signed.export, signed),
        leaf_of(signed.accepted, signed),
    )
    take(found, *(leaf_of(each, signed) for each in papers - {signed.export, signed.accepted}))
    assert found.judge(crossing(signed, TIME_MS)) == []
    tally("approvals of one person", len(many))


def test_an_agent_writes_down_what_has_a_say_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    signed = signed_grant()
    rest = {signed.export, signed.accepted, *signed.approvals}
    odd = other_acceptances(signed)
    strangers = [standing(signed.grant, action, "ap-south") for action in (PAUSE, REVOKE)]
    assert papers_of(signed, *odd, *strangers) == rest
    alone = signed_grant(purpose="elsewhere")
    assert papers_of(signed, alone.accepted, standing(alone.grant, PAUSE, "eu-west")) == rest
    monkeypatch.setattr(documents_module, "APPROVERS_MAX", 3)
    later = [
        sign_approval(signed.terms.hash(), approver("eu-west", f"x{number}"), TIME_MS + number)
        for number in range(6)
    ]
    assert papers_of(signed, *reversed(later)) == {*rest, *later[:2]}
    tally("documents that have no say", len(odd) + len(strangers) + len(later))


def test_words_and_crossings_in_turns_make_no_book_anew(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """What a log costs grows with its leaves, however many deny entries and grants there are."""
    made: list[int] = []

    class Counted(GrantBook):
        def __init__(self, documents: Any = (), *rest: Any, **more: Any) -> None:
            given = list(documents)
            made.append(len(given))
            super().__init__(given, *rest, **more)

    monkeypatch.setattr(agreement_module, "GrantBook", Counted)
    grants = [signed_grant(purpose=f"p{number}") for number in range(4)]
    found, rounds = agreements(), 60
    for signed in grants:
        take(found, *grant_leaves(signed))
    for number in range(rounds):
        signed = grants[number % len(grants)]
        take(found, paper_leaf(deny_entry(f"acme/ops/s{number}"), signed))
        take(found, paper_leaf(standing(signed.grant, RESUME, "us-east", number + 1), signed))
        for each in grants:
            assert found.judge(crossing(each, TIME_MS + 10**6)) == []
    assert made == [len(grant_leaves(grants[0])) - 1] * len(grants)
    tally("crossings between words", rounds * len(grants))
