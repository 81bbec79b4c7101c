"""A proof of one record, where a party of the grant has said much more about it than is needed, or kept silent until another grant announced
the record again: an honest log has a proof of every record that crossed, and what `prove` writes, `check-proof` takes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from audit_log import trust
from crossing_logs import DEPARTURES, INCARNATION, SIGNED, START_MS, World, write_world
from signed_grants import (
    Signed,
    approver,
    deny_entry,
    paper_leaf,
    policy_document,
    signed_grant,
    signing_key,
    standing,
)

from audit.agreement import STANDING_GRACE_MS
from audit.leaf import Leaf
from audit.proof import APPROVALS_SHOWN, Proven, check_proof, prove
from audit.tile_disk import Folder
from audit.tlog_proof import check_leaf, prove_leaves
from audit.verify import verify_log
from felix.errors import Code, RequestError, TamperError
from policy.approval import sign_approval
from policy.grant import StandingAction
from policy.signed import Purpose, canonical, sign

S = SIGNED[DEPARTURES]


def egress_of(folder: Path, world: World, *, ok: bool = True) -> Folder:
    egress, _ = write_world(folder, world)
    assert verify_log(Folder(egress), trust()).ok is ok
    return Folder(egress)


def proven(log: Folder, offset: int, **which: Any) -> tuple[Proven, int]:
    """What a proof shows, and how many documents it carries."""
    data = prove(log, trust(), DEPARTURES, 0, offset, **which)
    return check_proof(data, trust()), len(json.loads(data)["documents"])


def paper(document: Any, time_ms: int = START_MS - 900) -> list[Leaf]:
    return [paper_leaf(document, S, time_ms=time_ms)]


def test_documents_without_end_keep_no_record_from_its_proof(tmp_path: Path, tally: Tally) -> None:
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    for number in range(150):
        action = StandingAction.PAUSE if number % 2 == 0 else StandingAction.RESUME
        world.egress.append(paper(standing(S.grant, action, "eu-west", number + 1)))
    at = S.approvals[0].claim.at
    for number in range(130):
        name = approver("eu-west", f"x{number}")
        world.egress.append(paper(sign_approval(S.terms.hash(), name, at - 200 + number)))
    world.batch(DEPARTURES, 0, START_MS + 20_000, 4, withheld=0.0)
    shown, documents = proven(egress_of(tmp_path, world), 2)
    assert shown.ack is not None and shown.approved is not None
    assert documents == 3 + APPROVALS_SHOWN == len(shown.approved.approvers) + 3
    assert any(each.startswith("spiffe://us-east") for each in shown.approved.approvers)
    tally("documents of one grant", 280)


def test_those_who_had_to_approve_are_among_those_who_are_shown(tmp_path: Path, tally: Tally) -> None:
    """Each side asks for four; those who approved first drew the grant up or accepted it, and do not count."""
    signed = signed_grant(4, True, stream=DEPARTURES, expires=S.terms.expires)
    world, granted = World(), World.granted
    world.granted = lambda stream, shard: granted(world, stream, shard) | of(signed)  # type: ignore[method-assign]
    world.grant(DEPARTURES, START_MS - 1_000, signed)
    at = signed.approvals[0].claim.at
    for region in ("us-east", "eu-west"):
        for name in ("alice", "bob", *(f"x{number}" for number in range(20))):
            early = sign_approval(signed.terms.hash(), approver(region, name), at - 50)
            late = sign_approval(signed.terms.hash(), approver(region, name), at + 50)
            said = early if name in ("alice", "bob") else late
            world.egress.append([paper_leaf(said, signed, time_ms=START_MS - 900)])
    world.batch(DEPARTURES, 0, START_MS + 20_000, 4, withheld=0.0, receipt=False, arrives=False)
    shown, documents = proven(egress_of(tmp_path, world), 2)
    assert shown.approved is not None and documents == 3 + APPROVALS_SHOWN
    for region in ("us-east", "eu-west"):
        found = {each.rpartition("/")[2] for each in shown.approved.approvers if f"//{region}" in each}
        assert len(found - {"alice", "bob"}) >= 4
    tally("approvals of one grant", 52)


def of(signed: Signed) -> dict[str, Any]:
    return {"grant_id": signed.grant, "terms_hash": signed.terms.hash()}


def test_what_was_announced_again_has_the_proof_of_what_counts(tmp_path: Path, tally: Tally) -> None:
    """The destination answered nothing until the grant was renewed; the agent announced the records again, under the new grant."""
    renewed = signed_grant(stream=DEPARTURES, purpose="renewed", expires=S.terms.expires)
    for answered in (True, False):
        world = World()
        world.grant(DEPARTURES, START_MS - 1_000)
        world.batch(DEPARTURES, 0, START_MS + 1_000, 10, withheld=0.0)
        world.batch(DEPARTURES, 0, START_MS + 2_000, 10, withheld=0.0, receipt=False, arrives=False)
        world.grant(DEPARTURES, START_MS + 3_000, renewed)
        world.granted = lambda stream, shard, w=world: World.granted(w, stream, shard) | of(renewed)  # type: ignore[method-assign, misc]
        world.offsets[DEPARTURES, 0] = 10
        world.batch(DEPARTURES, 0, START_MS + 4_000, 10, withheld=0.0, receipt=answered, arrives=answered)
        log = egress_of(tmp_path / str(answered), world)
        which: dict[str, Any]
        for which in ({}, {"destination_region": "eu-west", "incarnation": INCARNATION}):
            shown, _ = proven(log, 15, **which)
            assert shown.intent.grant_id == renewed.grant and (shown.ack is not None) is answered
            assert proven(log, 5, **which)[0].intent.grant_id == S.grant
        assert len(prove_leaves(log, trust(), DEPARTURES, 0, 15)) == 1 + answered
        # The one that counts no more can be had, where somebody asks for its leaf.
        first = next(at for at in range(30) if shows(log, 15, at))
        assert proven(log, 15, leaf=first)[0].intent.grant_id == S.grant
        (told,) = prove_leaves(log, trust(), DEPARTURES, 0, 15, leaf=first)
        assert check_leaf(told, trust()).index == first
        with pytest.raises(RequestError) as caught:
            prove(log, trust(), DEPARTURES, 0, 15, leaf=0)
        assert caught.value.code is Code.NOT_FOUND
        tally("records that were announced again", 10)


def shows(log: Folder, offset: int, leaf: int) -> bool:
    try:
        prove(log, trust(), DEPARTURES, 0, offset, leaf=leaf)
    except RequestError:
        return False
    return True


def test_what_was_on_its_way_when_a_half_asked_for_more_has_a_proof(tmp_path: Path, tally: Tally) -> None:
    stricter = msgspec.structs.replace(S.half, approvals=2, signed_at=S.half.signed_at + 1)
    document = sign(Purpose.IMPORT, "eu-west", canonical(stricter), signing_key("eu-west"))
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    world.egress.append(paper(document, START_MS))
    world.batch(
        DEPARTURES, 0, START_MS + STANDING_GRACE_MS - 1, 4, withheld=0.0, receipt=False, arrives=False
    )
    shown, documents = proven(egress_of(tmp_path / "soon", world), 1)
    assert shown.approved is not None and documents == 3 + len(S.approvals)
    world.batch(DEPARTURES, 0, START_MS + STANDING_GRACE_MS, 4, withheld=0.0, receipt=False, arrives=False)
    log = egress_of(tmp_path / "late", world, ok=False)
    with pytest.raises(TamperError, match="not approved"):
        prove(log, trust(), DEPARTURES, 0, 5)
    assert policy_document("us-east") == S.source_policy
    tally("crossings at the edge of the grace", 2)


def test_a_record_that_crossed_against_a_deny_entry_has_no_proof(tmp_path: Path, tally: Tally) -> None:
    """Deny entries name no grant: they are of all that they fit. What a third region says has no say here, whether it can be believed or not."""
    for region in ("us-east", "eu-west"):
        world = World()
        world.grant(DEPARTURES, START_MS - 1_000)
        world.egress.append(paper(deny_entry("acme/ops/*", region), START_MS))
        world.batch(
            DEPARTURES, 0, START_MS + STANDING_GRACE_MS - 1, 4, withheld=0.0, receipt=False, arrives=False
        )
        assert proven(egress_of(tmp_path / f"{region}-soon", world), 1)
        world.batch(
            DEPARTURES, 0, START_MS + STANDING_GRACE_MS, 4, withheld=0.0, receipt=False, arrives=False
        )
        log = egress_of(tmp_path / f"{region}-late", world, ok=False)
        with pytest.raises(TamperError, match=f"{region} denies"):
            prove(log, trust(), DEPARTURES, 0, 5)
        world.egress.append(paper(deny_entry("acme/ops/*", region, 2, lifted=True), START_MS + 20_000))
        world.batch(DEPARTURES, 0, START_MS + 20_001, 4, withheld=0.0, receipt=False, arrives=False)
        assert proven(egress_of(tmp_path / f"{region}-again", world, ok=False), 9)
        tally("records that crossed against a deny entry", 4)
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    world.egress.append(paper(deny_entry("acme/ops/*", "ap-south"), START_MS))
    world.batch(DEPARTURES, 0, START_MS + STANDING_GRACE_MS, 4, withheld=0.0, receipt=False, arrives=False)
    # Who checks need not know the keys of every region that the bridge also goes to.
    assert proven(egress_of(tmp_path / "third", world, ok=False), 1)
