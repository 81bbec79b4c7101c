from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from approvers import approvals, approver, authority, roots, with_approvals
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from departures import DAY, terms
from hypothesis import given
from hypothesis import strategies as st

from felix.errors import Code
from felix.names import SpiffeId, StreamName
from policy.approval import Document, sign_approval
from policy.grant import (
    CODES,
    TRANSITIONS,
    Allowed,
    Attempt,
    DenyEntry,
    ExportGrant,
    GrantBook,
    GrantError,
    GrantEvent,
    GrantState,
    ImportGrant,
    Refusal,
    RefusalKind,
    Standing,
    StandingAction,
    advance,
    check_path,
    open_export,
    sign_deny,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.residency import ResidencyError, parse_policy
from policy.signed import NUMBER_MAX, Purpose, SignatureError, SignedDocument, canonical, raw_public_key, sign
from policy.terms import GrantTerms, grant_id
from policy.transform import build_spec

EXAMPLES = Path(__file__).parents[2] / "examples" / "regions"
US_POLICY = parse_policy((EXAMPLES / "residency.yaml").read_text(), "us.yaml")
EU_POLICY = parse_policy((EXAMPLES / "residency-eu-west.yaml").read_text(), "eu.yaml")
US_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
EU_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
BOB = "spiffe://eu-west.acme/operator/bob"
MALLORY = Ed25519PrivateKey.from_private_bytes(b"m" * 32)
TRUSTED = {"us-east": [raw_public_key(US_KEY)], "eu-west": [raw_public_key(EU_KEY)]}

NOW = 10 * DAY
TERMS = terms(not_before=DAY)
GRANT = grant_id(TERMS.hash())
EXPORT = sign_export(TERMS, US_POLICY, US_KEY, NOW)
IMPORT = sign_import(EXPORT, EU_POLICY, EU_KEY, TRUSTED, BOB, NOW)
ATTEMPT = Attempt(
    StreamName.parse("acme/ops/departures"),
    "us-east",
    "eu-west",
    SpiffeId.parse("spiffe://us-east.acme/bridge/us-to-eu"),
)


def book(*documents: Document) -> GrantBook:
    """All of them, and the approvals of their export grants besides."""
    return GrantBook(with_approvals(*documents), TRUSTED, roots())


def standing(
    action: StandingAction, sequence: int, region: str = "us-east", **changes: Any
) -> SignedDocument:
    body = Standing(
        grant=GRANT, action=action, region=region, sequence=sequence, at=NOW, by="alice", **changes
    )
    return sign_standing(body, US_KEY if region == "us-east" else EU_KEY)


def deny(sequence: int = 1, region: str = "us-east", **changes: Any) -> SignedDocument:
    fields: dict[str, Any] = {"streams": "acme/ops/departures", "peer": "*", "region": region}
    body = DenyEntry(**{**fields, "sequence": sequence, "at": NOW, "by": "alice", **changes})
    return sign_deny(body, US_KEY if region == "us-east" else EU_KEY)


def refusal(found: Allowed | Refusal) -> Refusal:
    assert isinstance(found, Refusal)
    return found


def test_two_halves_let_the_stream_cross_on_both_sides() -> None:
    for policy in (US_POLICY, EU_POLICY):
        found = book(EXPORT, IMPORT).check(ATTEMPT, policy, NOW)
        assert isinstance(found, Allowed)
        assert found.grant == GRANT
        assert found.terms == TERMS
        assert found.terms_hash == TERMS.hash()
        assert str(found.destination_stream) == "acme/ops/departures"
        assert found.accepted.accepted_by == BOB


# ---------------------------------------------------------------------------------------- every refusal

OTHER_TERMS = terms(not_before=DAY, purpose="other purpose")
FORGED_EXPORT = sign(Purpose.EXPORT, "us-east", EXPORT.body, MALLORY)
FORGED_IMPORT = sign(Purpose.IMPORT, "eu-west", IMPORT.body, MALLORY)
_half = msgspec.json.decode(IMPORT.body, type=ImportGrant)
MISMATCHED = sign(
    Purpose.IMPORT,
    "eu-west",
    canonical(msgspec.structs.replace(_half, terms_hash=OTHER_TERMS.hash().hex())),
    EU_KEY,
)
STRICTER = parse_policy(US_POLICY.text.replace("bases: [scc, adequacy]", "bases: [adequacy]"), "us.yaml")
DENYING = parse_policy(US_POLICY.text.replace("streams: [acme/ops/crew]", "streams: [acme/ops/*]"), "us.yaml")
_loose = US_POLICY.text.replace("lifetime: 90d", "lifetime: 90d\n    onward: true")
BUDGET_TERMS = terms(not_before=DAY, budget_bytes=1_000_000)
BUDGET = sign_export(BUDGET_TERMS, US_POLICY, US_KEY, NOW)
BUDGET_ID = grant_id(BUDGET_TERMS.hash())


@pytest.mark.parametrize(
    ("kind", "sentence", "arguments"),
    [
        (RefusalKind.NO_GRANT, "No grant lets acme/ops/departures cross from us-east to eu-west.", {"documents": ()}),
        (RefusalKind.NO_GRANT, "No grant lets acme/ops/crew cross from us-east to eu-west.", {"attempt": ATTEMPT._replace(stream=StreamName.parse("acme/ops/crew"))}),
        (RefusalKind.NO_GRANT, "No grant lets acme/ops/departures cross from eu-west to us-east.", {"attempt": ATTEMPT._replace(from_region="eu-west", to_region="us-east")}),
        (RefusalKind.IMPORT_MISSING, f"us-east offers acme/ops/departures under the grant {GRANT}, but eu-west has not accepted it.", {"documents": (EXPORT,)}),
        (RefusalKind.EXPORT_MISSING, f"eu-west accepted the grant {GRANT}, but there is no export grant by us-east.", {"documents": (IMPORT,)}),
        (RefusalKind.FORGED, "The grant for acme/ops/departures from us-east to eu-west is not believed. The document is signed with the key", {"documents": (FORGED_EXPORT, IMPORT)}),
        (RefusalKind.FORGED, "The grant for acme/ops/departures from us-east to eu-west is not believed. The document is signed with the key", {"documents": (EXPORT, FORGED_IMPORT)}),
        (RefusalKind.TERMS_MISMATCH, f"The two halves of the grant {GRANT} do not name the same terms.", {"documents": (EXPORT, MISMATCHED)}),
        (RefusalKind.WRONG_BRIDGE, f"The grant {GRANT} is for the bridge spiffe://us-east.acme/bridge/us-to-eu, not for spiffe://us-east.acme/bridge/other.", {"attempt": ATTEMPT._replace(bridge=SpiffeId.parse("spiffe://us-east.acme/bridge/other"))}),
        (RefusalKind.NOT_YET, f"The grant {GRANT} holds only from 1970-01-02T00:00:00Z.", {"now": DAY - 1}),
        (RefusalKind.EXPIRED, f"The grant {GRANT} expired at 1970-03-22T00:00:00Z.", {"now": 80 * DAY}),
        (RefusalKind.REVOKED, f"us-east revoked the grant {GRANT} at 1970-01-11T00:00:00Z (contract ended).", {"documents": (EXPORT, IMPORT, standing(StandingAction.REVOKE, 1, reason="contract ended."))}),
        (RefusalKind.REVOKED, f"eu-west revoked the grant {GRANT} at 1970-01-11T00:00:00Z.", {"documents": (EXPORT, IMPORT, standing(StandingAction.REVOKE, 1, "eu-west"))}),
        (RefusalKind.PAUSED, f"eu-west paused the grant {GRANT} at 1970-01-11T00:00:00Z.", {"documents": (EXPORT, IMPORT, standing(StandingAction.PAUSE, 1, "eu-west"))}),
        (RefusalKind.AGAINST_POLICY, f"The grant {GRANT} is against the policy of us-east, revision 1: The basis scc is not accepted here; adequacy would be. (rule departures-to-eu, us.yaml:31:5)", {"policy": STRICTER}),
        (RefusalKind.DENIED, f"The grant {GRANT} is against the policy of us-east, revision 1: acme/ops/departures must not leave for eu-west", {"policy": DENYING}),
        (RefusalKind.DENIED, "us-east denies that acme/ops/departures crosses from us-east to eu-west: audit.", {"documents": (EXPORT, IMPORT, deny(reason="audit"))}),
        (RefusalKind.DENIED, "eu-west denies that acme/ops/departures crosses from us-east to eu-west.", {"documents": (EXPORT, IMPORT, deny(region="eu-west", streams="acme/ops/*", peer="us-east"))}),
        (RefusalKind.BUDGET, f"The grant {BUDGET_ID} has used up its budget of 1MB: 1000001 bytes crossed.", {"documents": (BUDGET, sign_import(BUDGET, EU_POLICY, EU_KEY, TRUSTED, BOB, NOW)), "used": {BUDGET_ID: 1_000_001}}),
        (RefusalKind.LOOP, "The records have been in eu-west already; they do not return there.", {"attempt": ATTEMPT._replace(path=("eu-west", "us-east"))}),
        (RefusalKind.ONWARD, f"The records came from ap-south, and the grant {GRANT} does not allow onward transfer.", {"attempt": ATTEMPT._replace(path=("ap-south", "us-east"))}),
    ],
)  # fmt: skip
def test_every_refusal_has_its_own_sentence_and_code(
    kind: RefusalKind, sentence: str, arguments: dict[str, Any]
) -> None:
    found = refusal(
        book(*arguments.get("documents", (EXPORT, IMPORT))).check(
            arguments.get("attempt", ATTEMPT),
            arguments.get("policy", US_POLICY),
            arguments.get("now", NOW),
            arguments.get("used"),
        )
    )
    assert found.kind is kind
    assert found.sentence.startswith(sentence)
    assert found.hint
    assert found.error().code is found.code is CODES[kind]


def test_every_kind_of_refusal_has_a_code() -> None:
    assert set(CODES) == set(RefusalKind)


def test_the_budget_and_the_clock_hold_to_the_last_unit() -> None:
    half = sign_import(BUDGET, EU_POLICY, EU_KEY, TRUSTED, BOB, NOW)
    assert isinstance(book(BUDGET, half).check(ATTEMPT, US_POLICY, NOW, {BUDGET_ID: 999_999}), Allowed)
    assert isinstance(book(BUDGET, half).check(ATTEMPT, US_POLICY, NOW, {BUDGET_ID: 1_000_000}), Refusal)
    assert isinstance(book(EXPORT, IMPORT).check(ATTEMPT, US_POLICY, 80 * DAY - 1), Allowed)
    assert isinstance(book(EXPORT, IMPORT).check(ATTEMPT, US_POLICY, DAY), Allowed)


def test_onward_transfer_needs_the_grant_and_the_policy() -> None:
    policy = parse_policy(_loose, "us.yaml")
    eu = parse_policy(EU_POLICY.text.replace("lifetime: 90d", "lifetime: 90d\n    onward: true"), "eu.yaml")
    onward = sign_export(terms(not_before=DAY, onward=True), policy, US_KEY, NOW)
    half = sign_import(onward, eu, EU_KEY, TRUSTED, BOB, NOW)
    attempt = ATTEMPT._replace(path=("ap-south", "us-east"))
    assert isinstance(book(onward, half).check(attempt, policy, NOW), Allowed)
    assert refusal(book(onward, half).check(attempt, US_POLICY, NOW)).kind is RefusalKind.AGAINST_POLICY


def test_a_policy_change_stops_a_standing_grant_and_its_return_lets_it_go_on() -> None:
    standing_book = book(EXPORT, IMPORT)
    assert isinstance(standing_book.check(ATTEMPT, US_POLICY, NOW), Allowed)
    assert refusal(standing_book.check(ATTEMPT, STRICTER, NOW)).rule == "departures-to-eu"
    assert isinstance(standing_book.check(ATTEMPT, US_POLICY, NOW), Allowed)


def test_one_good_grant_suffices_beside_refused_ones() -> None:
    renewed = sign_export(terms(not_before=DAY, reference="SCC-2027-001"), US_POLICY, US_KEY, NOW)
    half = sign_import(renewed, EU_POLICY, EU_KEY, TRUSTED, BOB, NOW)
    revoked = standing(StandingAction.REVOKE, 1)
    found = book(EXPORT, IMPORT, revoked, renewed, half).check(ATTEMPT, US_POLICY, NOW)
    assert isinstance(found, Allowed)
    assert found.grant != GRANT


def test_of_several_refused_grants_the_one_that_came_furthest_tells_why() -> None:
    half_way = sign_export(terms(not_before=DAY, reference="R-2"), US_POLICY, US_KEY, NOW)
    found = refusal(book(half_way, EXPORT, IMPORT).check(ATTEMPT, US_POLICY, 81 * DAY))
    assert found.kind is RefusalKind.EXPIRED


def test_a_wildcard_grant_lets_each_stream_cross_under_its_own_name_but_not_the_denied_one() -> None:
    text = US_POLICY.text.replace(
        "    streams: [acme/ops/departures]      # of the class, only this stream\n", "    wildcards: true\n"
    )
    policy = parse_policy(text, "us.yaml")
    eu_text = EU_POLICY.text.replace("    streams: [acme/ops/departures]\n", "    wildcards: true\n")
    export = sign_export(terms(stream="acme/ops/*", wildcard=True), policy, US_KEY, NOW)
    both = book(export, sign_import(export, parse_policy(eu_text, "eu"), EU_KEY, TRUSTED, BOB, NOW))
    found = both.check(ATTEMPT._replace(stream=StreamName.parse("acme/ops/gates")), policy, NOW)
    assert isinstance(found, Allowed)
    assert str(found.destination_stream) == "acme/ops/gates"
    crew = both.check(ATTEMPT._replace(stream=StreamName.parse("acme/ops/crew")), policy, NOW)
    assert refusal(crew).kind is RefusalKind.DENIED
    assert (
        refusal(both.check(ATTEMPT._replace(stream=StreamName.parse("acme/hr/x")), policy, NOW)).kind
        is RefusalKind.NO_GRANT
    )


# --------------------------------------------------------------------------------------- making the halves


def test_a_grant_against_the_policy_cannot_be_made() -> None:
    with pytest.raises(ResidencyError, match="must be transformed with pseudonymize"):
        sign_export(terms(transform=build_spec()), US_POLICY, US_KEY, NOW)
    with pytest.raises(ResidencyError, match=r"crew rosters and duty hours do not leave the region"):
        sign_export(terms(stream="acme/ops/crew"), US_POLICY, US_KEY, NOW)
    with pytest.raises(GrantError, match="The terms expired at") as caught:
        sign_export(TERMS, US_POLICY, US_KEY, 80 * DAY)
    assert caught.value.code is Code.GRANT_EXPIRED
    with pytest.raises(GrantError, match="this region is eu-west"):
        sign_export(TERMS, EU_POLICY, EU_KEY, NOW)


def test_a_destination_accepts_only_what_is_for_it_genuine_and_within_its_own_policy() -> None:
    with pytest.raises(SignatureError):
        sign_import(FORGED_EXPORT, EU_POLICY, EU_KEY, TRUSTED, BOB, NOW)
    with pytest.raises(GrantError, match="is for eu-west; this region is us-east"):
        sign_import(EXPORT, US_POLICY, US_KEY, TRUSTED, BOB, NOW)
    with pytest.raises(GrantError, match="expired"):
        sign_import(EXPORT, EU_POLICY, EU_KEY, TRUSTED, BOB, 80 * DAY)
    strict = parse_policy(EU_POLICY.text.replace("bases: [scc, adequacy]", "bases: [bcr]"), "eu")
    with pytest.raises(ResidencyError, match="The basis scc is not accepted here"):
        sign_import(EXPORT, strict, EU_KEY, TRUSTED, BOB, NOW)


def test_an_export_grant_whose_hash_is_not_that_of_its_terms_is_refused_even_if_signed() -> None:
    body = msgspec.json.decode(EXPORT.body)
    body["terms"]["purpose"] = "something else"
    with pytest.raises(SignatureError, match="its id and terms hash are not those of the terms it carries"):
        open_export(sign(Purpose.EXPORT, "us-east", canonical(body), US_KEY), TRUSTED)


@pytest.mark.parametrize(
    "changes",
    [
        {"terms_hash": OTHER_TERMS.hash().hex()},
        {"stream": "acme/ops/crew"},
        {"destination_stream": "acme/ops/crew"},
        {"from_region": "ap-south", "bridge": "spiffe://ap-south.acme/bridge/us-to-eu"},
        {"bridge": "spiffe://us-east.acme/bridge/other"},
    ],
)
def test_halves_must_agree_in_everything_they_both_name(changes: dict[str, str]) -> None:
    half = sign(Purpose.IMPORT, "eu-west", canonical(msgspec.structs.replace(_half, **changes)), EU_KEY)
    found = refusal(book(EXPORT, half).check(ATTEMPT, US_POLICY, NOW))
    assert found.kind is RefusalKind.TERMS_MISMATCH
    assert isinstance(book(EXPORT, half, IMPORT).check(ATTEMPT, US_POLICY, NOW), Allowed)


def test_where_a_record_has_been_is_asked_for_each_record() -> None:
    for path, kind in (
        ((), None),
        (("us-east",), None),
        (("eu-west", "us-east"), RefusalKind.LOOP),
        (("ap-south",), RefusalKind.ONWARD),
    ):
        found = check_path(GRANT, TERMS, path)
        assert (found.kind if found else None) is kind
    assert check_path(GRANT, msgspec.structs.replace(TERMS, onward=True), ("ap-south", "us-east")) is None


def test_a_region_cannot_sign_for_another() -> None:
    moved = sign(Purpose.EXPORT, "eu-west", EXPORT.body, EU_KEY)
    with pytest.raises(SignatureError, match="An export grant for data of us-east is signed by eu-west"):
        open_export(moved, TRUSTED)
    wrong = book(sign(Purpose.IMPORT, "us-east", IMPORT.body, US_KEY), EXPORT)
    assert "signed by us-east" in wrong.problems[0].sentence
    assert refusal(wrong.check(ATTEMPT, US_POLICY, NOW)).kind is RefusalKind.FORGED


def test_no_byte_of_a_grant_file_can_be_changed() -> None:
    data = EXPORT.encode_file()
    for index in range(len(data)):
        edited = bytearray(data)
        edited[index] ^= 0x01
        with pytest.raises(SignatureError):
            open_export(SignedDocument.parse(bytes(edited)), TRUSTED)


def test_a_grant_file_and_its_token_are_the_same_grant() -> None:
    for form in (EXPORT.encode_file(), EXPORT.encode_token()):
        export = open_export(SignedDocument.parse(form), TRUSTED)
        assert isinstance(export, ExportGrant)
        assert export.terms == TERMS


# ------------------------------------------------------------------------------- standings and denies


def test_pause_and_resume_belong_to_the_region_that_paused() -> None:
    paused = [EXPORT, IMPORT, standing(StandingAction.PAUSE, 1), standing(StandingAction.PAUSE, 1, "eu-west")]
    assert refusal(book(*paused).check(ATTEMPT, US_POLICY, NOW)).kind is RefusalKind.PAUSED
    one_left = [*paused, standing(StandingAction.RESUME, 2)]
    assert "eu-west paused" in refusal(book(*one_left).check(ATTEMPT, US_POLICY, NOW)).sentence
    assert isinstance(
        book(*one_left, standing(StandingAction.RESUME, 2, "eu-west")).check(ATTEMPT, US_POLICY, NOW), Allowed
    )


def test_an_old_resume_cannot_be_played_again() -> None:
    documents = [EXPORT, IMPORT, standing(StandingAction.PAUSE, 3), standing(StandingAction.RESUME, 2)]
    assert refusal(book(*documents).check(ATTEMPT, US_POLICY, NOW)).kind is RefusalKind.PAUSED
    assert book(*documents).next_sequence(GRANT, "us-east", NOW) == NOW
    assert book().next_sequence(GRANT, "us-east", 0) == 1
    assert book(*documents).next_sequence(GRANT, "us-east", 0) == 4, "under a clock that went back"


def test_a_pause_outranks_a_resumption_of_the_highest_number() -> None:
    resumed = [EXPORT, IMPORT, standing(StandingAction.RESUME, NUMBER_MAX)]
    number = book(*resumed).next_sequence(GRANT, "us-east", NOW)
    paused = [*resumed, standing(StandingAction.PAUSE, number)]
    assert refusal(book(*paused).check(ATTEMPT, US_POLICY, NOW)).kind is RefusalKind.PAUSED


def test_revoked_stays_revoked_whatever_comes_later_or_in_which_order() -> None:
    later = [
        standing(StandingAction.RESUME, 9),
        standing(StandingAction.REVOKE, 2),
        standing(StandingAction.RESUME, 10),
    ]
    for order in (later, later[::-1]):
        assert (
            refusal(book(EXPORT, IMPORT, *order).check(ATTEMPT, US_POLICY, NOW)).kind is RefusalKind.REVOKED
        )


def test_a_forged_standing_or_deny_changes_nothing_and_is_reported() -> None:
    forged = [
        sign(Purpose.STANDING, "us-east", standing(StandingAction.REVOKE, 1).body, MALLORY),
        sign(Purpose.DENY, "us-east", deny().body, MALLORY),
        sign(Purpose.STANDING, "eu-west", standing(StandingAction.REVOKE, 1).body, EU_KEY),
        sign(Purpose.DENY, "eu-west", deny().body, EU_KEY),
        sign(Purpose.POLICY, "us-east", b"version: 1", US_KEY),
        sign(Purpose.EXPORT, "us-east", b'{"junk":1}', US_KEY),
    ]
    found = book(EXPORT, IMPORT, *forged)
    assert isinstance(found.check(ATTEMPT, US_POLICY, NOW), Allowed)
    assert sorted(map(repr, (problem.document for problem in found.problems))) == sorted(map(repr, forged))


def test_a_third_region_cannot_revoke_or_deny() -> None:
    trusted = {**TRUSTED, "ap-south": [raw_public_key(MALLORY)]}
    word = Standing(grant=GRANT, action=StandingAction.REVOKE, region="ap-south", sequence=1, at=NOW, by="m")
    no = DenyEntry(streams="*/*/*", peer="*", region="ap-south", sequence=1, at=NOW, by="m")
    found = GrantBook(
        with_approvals(EXPORT, IMPORT, sign_standing(word, MALLORY), sign_deny(no, MALLORY)), trusted, roots()
    )
    assert isinstance(found.check(ATTEMPT, US_POLICY, NOW), Allowed)
    assert found.get(GRANT, NOW).state is GrantState.ACTIVE


def test_a_deny_can_be_lifted_by_a_later_entry_only() -> None:
    lifted = [EXPORT, IMPORT, deny(1), deny(2, lifted=True)]
    assert isinstance(book(*lifted).check(ATTEMPT, US_POLICY, NOW), Allowed)
    assert book(*lifted).denies() == ()
    again = book(*lifted, deny(3))
    assert refusal(again.check(ATTEMPT, US_POLICY, NOW)).kind is RefusalKind.DENIED
    assert len(again.denies()) == 1
    assert again.next_deny_sequence("us-east", "acme/ops/departures", "*", NOW) == NOW
    assert again.next_deny_sequence("us-east", "acme/ops/departures", "*", 0) == 4


def test_a_deny_towards_one_region_leaves_others_alone() -> None:
    assert isinstance(book(EXPORT, IMPORT, deny(peer="ap-south")).check(ATTEMPT, US_POLICY, NOW), Allowed)
    assert isinstance(
        book(EXPORT, IMPORT, deny(streams="acme/ops/d")).check(ATTEMPT, US_POLICY, NOW), Allowed
    )


# -------------------------------------------------------------------------------------- lists and states


@pytest.mark.parametrize(
    ("documents", "now", "state"),
    [
        ((EXPORT,), NOW, GrantState.OFFERED),
        ((IMPORT,), NOW, GrantState.OFFERED),
        ((EXPORT, IMPORT), NOW, GrantState.ACTIVE),
        ((EXPORT, MISMATCHED), NOW, GrantState.OFFERED),
        ((EXPORT, IMPORT, standing(StandingAction.PAUSE, 1)), NOW, GrantState.PAUSED),
        ((EXPORT, IMPORT, standing(StandingAction.PAUSE, 1), standing(StandingAction.RESUME, 2)), NOW, GrantState.ACTIVE),
        ((EXPORT, IMPORT, standing(StandingAction.PAUSE, 1), standing(StandingAction.RESUME, 1, "eu-west")), NOW, GrantState.PAUSED),
        ((EXPORT, IMPORT, standing(StandingAction.REVOKE, 1)), NOW, GrantState.REVOKED),
        ((EXPORT, standing(StandingAction.REVOKE, 1)), 90 * DAY, GrantState.REVOKED),
        ((EXPORT, IMPORT), 80 * DAY, GrantState.EXPIRED),
        ((EXPORT,), 80 * DAY, GrantState.EXPIRED),
    ],
)  # fmt: skip
def test_a_grant_is_listed_in_its_state(
    documents: tuple[SignedDocument, ...], now: int, state: GrantState
) -> None:
    found = book(*documents)
    assert [view.state for view in found.list(now)] == [state]
    assert found.get(GRANT, now).state is state


def test_an_unknown_grant_is_said_to_be_unknown() -> None:
    with pytest.raises(GrantError, match="There is no grant g-unknown") as caught:
        book().get("g-unknown", NOW)
    assert caught.value.code is Code.GRANT_MISSING


@given(st.lists(st.sampled_from(list(GrantEvent)), max_size=8))
def test_final_states_are_final_and_nothing_is_active_that_was_not_accepted(events: list[GrantEvent]) -> None:
    state, accepted, ended = GrantState.OFFERED, False, None
    for event in events:
        state = advance(state, event)
        accepted = accepted or event is GrantEvent.COMPLETE
        if ended is not None:
            assert state is ended
        if state in (GrantState.REVOKED, GrantState.EXPIRED):
            ended = state
        if state in (GrantState.ACTIVE, GrantState.PAUSED):
            assert accepted
    assert {state for state, _ in TRANSITIONS} == {GrantState.OFFERED, GrantState.ACTIVE, GrantState.PAUSED}


def test_a_book_grows_as_a_new_value() -> None:
    small = book(EXPORT)
    large = small.including([IMPORT])
    assert refusal(small.check(ATTEMPT, US_POLICY, NOW)).kind is RefusalKind.IMPORT_MISSING
    assert isinstance(large.check(ATTEMPT, US_POLICY, NOW), Allowed)


def test_without_trusted_keys_nothing_is_believed() -> None:
    blind = GrantBook([EXPORT, IMPORT])
    assert refusal(blind.check(ATTEMPT, US_POLICY, NOW)).kind is RefusalKind.FORGED
    assert len(blind.problems) == 2


def test_terms_survive_the_journey_whole() -> None:
    assert isinstance(open_export(SignedDocument.parse(EXPORT.encode_token()), TRUSTED).terms, GrantTerms)


# ------------------------------------------------------------------------------------------------ approvals


def approved(*names: str, at: int = DAY, region: str = "us-east") -> tuple[Document, ...]:
    return tuple(sign_approval(TERMS.hash(), approver(name, region), at) for name in names)


def bare(*documents: Document) -> GrantBook:
    """Without the approvals that `book` adds."""
    return GrantBook(documents, TRUSTED, roots())


def test_each_side_needs_the_approvals_that_its_half_asks_for() -> None:
    here, there = approvals(TERMS.hash())
    for documents, lacking in (
        ((), "us-east: 0 of 1 (nobody has approved it), 1 missing. eu-west: 0 of 1"),
        ((here,), "eu-west: 0 of 1 (nobody has approved it), 1 missing."),
        ((there,), "us-east: 0 of 1 (nobody has approved it), 1 missing."),
    ):
        found = refusal(bare(EXPORT, IMPORT, *documents).check(ATTEMPT, None, NOW))
        assert (found.kind, found.code) == (RefusalKind.NOT_APPROVED, Code.NOT_APPROVED)
        assert lacking in found.sentence
        assert f"felix bridge approve {GRANT} --as NAME --region" in found.hint
        assert bare(EXPORT, IMPORT, *documents).get(GRANT, NOW).state is GrantState.OFFERED
    view = bare(EXPORT, IMPORT, here, there).get(GRANT, NOW)
    assert view.state is GrantState.ACTIVE
    assert [str(found) for found in view.approvals] == [
        "us-east: 1 of 1 (approved by dpo)",
        "eu-west: 1 of 1 (approved by dpo)",
    ]


def test_an_approval_that_is_dated_ahead_counts_from_then_on_whatever_was_asked_before() -> None:
    ahead = bare(EXPORT, IMPORT, *approvals(TERMS.hash(), 20 * DAY))
    for now, allowed in (
        (NOW, False),
        (20 * DAY, True),
        (20 * DAY - 300_001, False),
        (20 * DAY - 300_000, True),
    ):
        assert isinstance(ahead.check(ATTEMPT, US_POLICY, now), Allowed) is allowed, now


def test_of_two_approvals_by_one_person_the_earlier_one_counts_in_any_order() -> None:
    (early,), (late,), eu = approved("dpo"), approved("dpo", at=20 * DAY), approved("dpo", region="eu-west")
    for pair in ((early, late), (late, early)):
        held = bare(EXPORT, IMPORT, *pair, *eu)
        counted = held.approval(GRANT, SpiffeId("us-east", "acme", "approver", "dpo"))
        assert counted is not None and counted.at == DAY
        assert isinstance(held.check(ATTEMPT, US_POLICY, NOW), Allowed)
    assert refusal(bare(EXPORT, IMPORT, late, *eu).check(ATTEMPT, None, NOW)).kind is RefusalKind.NOT_APPROVED


def test_a_rule_counts_those_whom_it_names_and_separates() -> None:
    text = US_POLICY.text.replace(
        "    approvals: 1 ", "    approvals: 2\n    separate: true\n    approvers: [dpo, ciso, alice] ", 1
    )
    strict = parse_policy(text, "us.yaml")
    eu = approved("dpo", region="eu-west")
    assert isinstance(
        bare(EXPORT, IMPORT, *approved("dpo", "ciso"), *eu).check(ATTEMPT, strict, NOW), Allowed
    )
    for names, why in (
        (("dpo",), "1 of 2 (approved by dpo), 1 missing"),
        (("dpo", "dpo"), "1 of 2 (approved by dpo), 1 missing"),
        (("dpo", "alice"), "alice does not count: who drew a grant up or accepted it does not approve it"),
        (("dpo", "legal"), "legal does not count: the rule departures-to-eu does not name this approver"),
    ):
        found = refusal(bare(EXPORT, IMPORT, *approved(*names), *eu).check(ATTEMPT, strict, NOW))
        assert (found.kind, found.rule) == (RefusalKind.NOT_APPROVED, "departures-to-eu")
        assert why in found.sentence and "revision 1" in found.sentence
    # The destination's people: neither who drew it up nor who accepted.
    eu_strict = parse_policy(
        EU_POLICY.text.replace("approvals: 1", "approvals: 1\n    separate: true"), "eu.yaml"
    )
    here = approved("dpo")
    assert isinstance(bare(EXPORT, IMPORT, *here, *eu).check(ATTEMPT, eu_strict, NOW), Allowed)
    for name in ("bob", "alice"):
        found = refusal(
            bare(EXPORT, IMPORT, *here, *approved(name, region="eu-west")).check(ATTEMPT, eu_strict, NOW)
        )
        assert found.kind is RefusalKind.NOT_APPROVED


def test_a_policy_may_ask_for_nobody() -> None:
    nobody = US_POLICY.text.replace("    approvals: 1 ", "    approvals: 0 ", 1)
    export = sign_export(TERMS, parse_policy(nobody, "us"), US_KEY, NOW)
    half = sign_import(
        export,
        parse_policy(EU_POLICY.text.replace("approvals: 1", "approvals: 0"), "eu"),
        EU_KEY,
        TRUSTED,
        BOB,
        NOW,
    )
    assert isinstance(bare(export, half).check(ATTEMPT, None, NOW), Allowed)


def test_grants_of_the_first_version_are_said_to_be_out_of_date() -> None:
    body = msgspec.json.decode(EXPORT.body)
    del body["approvals"], body["separate"], body["terms"]["drawn_up_by"]
    body |= {"version": 1, "terms": body["terms"] | {"version": 1, "approvers": ["alice"]}}
    old = sign(Purpose.EXPORT, "us-east", canonical(body), US_KEY)
    found = refusal(bare(old).check(ATTEMPT, US_POLICY, NOW))
    assert found.kind is RefusalKind.OUTDATED
    assert (
        "made by Felix 0.1, where approvals were texts and not signatures; it is not in force any more"
        in found.sentence
    )


def test_of_halves_of_one_region_the_one_that_was_signed_last_holds_in_any_order() -> None:
    body = msgspec.json.decode(EXPORT.body, type=ExportGrant)
    again = sign(
        Purpose.EXPORT,
        "us-east",
        canonical(msgspec.structs.replace(body, approvals=3, signed_at=NOW + 1)),
        US_KEY,
    )
    for order in ((EXPORT, again), (again, EXPORT)):
        found = refusal(bare(*order, IMPORT, *approvals(TERMS.hash())).check(ATTEMPT, None, NOW))
        assert "us-east: 1 of 3" in found.sentence


def test_an_approver_of_another_mesh_or_region_counts_for_nobody() -> None:
    other = authority("us-east", "umbrella").issue_identity(
        SpiffeId("us-east", "umbrella", "approver", "dpo"), DAY // 2
    )
    foreign = sign_approval(TERMS.hash(), other, DAY)
    third = sign_approval(TERMS.hash(), approver("dpo", "ap-south"), DAY)
    trust = roots("us-east", "eu-west", "ap-south").trusting(authority("us-east", "umbrella").anchor())
    eu = approved("dpo", region="eu-west")
    held = GrantBook((EXPORT, IMPORT, foreign, third, *eu), TRUSTED, trust)
    assert not held.problems
    assert "us-east: 0 of 1" in refusal(held.check(ATTEMPT, None, NOW)).sentence
