"""A region lists a word for a moment, long enough for its leaf in the agent's egress log, and lists it no more. Or it puts another half in its
place that was signed in the same ms. Whoever verifies the log asks of each crossing what stands there; so does the agent, over restarts too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from attacks.conftest import Tally
from attacks.test_half_signed_again import again, crossing
from audit_log import BRIDGE, EGRESS_ORIGIN, STREAM, TIME_MS, log_signer, trust
from egress_documents import egress_documents
from signed_grants import deny_entry, grant_leaves, paper_leaf, signed_grant, standing

from audit.agreement import STANDING_GRACE_MS, read_agreements
from audit.leaf import Leaf, Side
from audit.origin import Origin
from bridge import said as said_module
from bridge.document_sync import missing
from bridge.documents import EgressDocuments
from bridge.egress_disk import open_egress, read_words, save_ledger
from bridge.said import Said
from felix.names import SpiffeId, StreamName
from policy.approval import Document
from policy.grant import Allowed, Attempt, ExportGrant, GrantBook, StandingAction, half_rank
from policy.signed import Purpose, SignedDocument, decode_body

SIGNED = signed_grant()
LISTED = (SIGNED.export, SIGNED.accepted, *SIGNED.approvals)
WORDS: dict[str, Document] = {
    "stricter acceptance": again(SIGNED, "eu-west", 1, approvals=2),
    "stricter export": again(SIGNED, "us-east", 1, approvals=2),
    "pause": standing(SIGNED.grant, StandingAction.PAUSE, "eu-west"),
    "deny entry": deny_entry("acme/ops/*", region="eu-west"),
    "revocation": standing(SIGNED.grant, StandingAction.REVOKE, "eu-west"),
}
LATER = {
    "stricter acceptance": again(SIGNED, "eu-west", 2),
    "stricter export": again(SIGNED, "us-east", 2),
    "pause": standing(SIGNED.grant, StandingAction.RESUME, "eu-west", sequence=2),
    "deny entry": deny_entry("acme/ops/*", region="eu-west", sequence=2, lifted=True),
}
"""What takes the place of each of them."""
OTHERS: list[dict[str, str]] = [
    {"stream": "acme/ops/other"},
    {"destination_stream": "acme/ops/elsewhere"},
    {"bridge": "spiffe://us-east.acme/bridge/other"},
    {"terms_hash": "ab" * 32},
    {"from_region": "ap-south"},
]
"""What another acceptance of this grant may accept."""
ATTEMPT = Attempt(StreamName.parse(STREAM), "us-east", "eu-west", SpiffeId.parse(BRIDGE), ("us-east",))


def lets(documents: list[Document]) -> bool:
    book = GrantBook(documents, trust().policy_keys, trust().anchors)
    return isinstance(book.check(ATTEMPT, None, TIME_MS), Allowed)


def allows(documents: EgressDocuments, *listed: Document) -> bool:
    """Whether the agent lets cross where the regions list these."""
    book = documents.counting(GrantBook(listed, trust().policy_keys, trust().anchors))
    return isinstance(book.check(ATTEMPT, None, TIME_MS), Allowed)


def forged(document: SignedDocument) -> SignedDocument:
    return replace(document, signature=bytes(64))


@pytest.mark.parametrize("what", WORDS)
def test_a_word_that_is_listed_no_more_counts_as_the_log_says(what: str, tally: Tally) -> None:
    word, said = WORDS[what], Said()
    assert lets([*LISTED, *said.beside(LISTED)])
    said.take(word)
    assert not lets([*LISTED, *said.beside(LISTED)])
    assert said.beside([*LISTED, word]) == [], "what is listed is not said twice"
    # The verifier judges so as well: that is why.
    leaves = [*grant_leaves(SIGNED), paper_leaf(word, SIGNED)]
    found, problems = read_agreements(
        trust(), Origin.parse(EGRESS_ORIGIN), enumerate(leaves), lambda header: header.document
    )
    late = crossing(SIGNED, Side.EGRESS, TIME_MS + 2 * STANDING_GRACE_MS)
    assert problems == [] and found.judge(late)
    tally("words that are listed no more", 1)


@pytest.mark.parametrize("what", LATER)
def test_a_forged_later_word_hides_none_that_the_log_has(what: str, tally: Tally) -> None:
    documents, later = egress_documents(), LATER[what]
    documents.said.take(WORDS[what])
    assert not allows(documents, *LISTED)
    assert allows(documents, *LISTED, later), "a genuine one takes its place"
    assert not allows(documents, *LISTED, forged(later))
    tally("forged later words", 1)


def test_a_forged_half_brings_none_back_that_is_listed_no_more() -> None:
    documents = egress_documents()
    for half in (SIGNED.export, SIGNED.accepted):
        documents.said.take(half)
    assert allows(documents, *LISTED)
    assert not allows(documents, *LISTED[1:], forged(again(SIGNED, "us-east", -1)))


def test_a_later_word_takes_its_place_and_a_half_without_a_listed_one_makes_no_grant() -> None:
    said = Said()
    said.take(WORDS["pause"])
    resumed = standing(SIGNED.grant, StandingAction.RESUME, "eu-west", sequence=2)
    assert said.beside([resumed]) == [] and lets([*LISTED, resumed, *said.beside([*LISTED, resumed])])
    said.take(resumed)
    assert lets([*LISTED, *said.beside(LISTED)])
    said.take(WORDS["stricter acceptance"])
    assert WORDS["stricter acceptance"] not in said.beside([SIGNED.export])
    said.take(SIGNED.accepted)
    assert WORDS["stricter acceptance"] in said.beside([SIGNED.accepted]), "an older one changes nothing"


@pytest.mark.parametrize("limit", ["words", "bytes"])
def test_what_one_region_says_has_its_own_bound_and_pushes_nothing_out(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [deny_entry(f"acme/x/{number}", region="eu-west") for number in range(9)]
    if limit == "words":
        monkeypatch.setattr(said_module, "WORDS_MAX", 3)
    else:
        monkeypatch.setattr(said_module, "BYTES_MAX", 3 * len(entries[0].encode_file()))
    said, taken = Said(), list[Document]()
    for entry in entries:
        if said.has_room(entry):
            said.take(entry)
            taken.append(entry)
    assert taken == entries[:3] and set(said.beside([])) == set(taken)
    lifted = deny_entry("acme/x/0", region="eu-west", sequence=2)
    assert said.has_room(lifted) is (limit == "words") or len(lifted.encode_file()) <= len(
        entries[0].encode_file()
    )
    assert said.has_room(WORDS["revocation"]), "one for each grant"
    assert said.has_room(deny_entry("acme/ops/own", region="us-east")), "nobody takes another's room"


async def test_what_stands_in_the_log_is_read_again_at_the_next_start(tmp_path: Path) -> None:
    leaves: list[Leaf] = [paper_leaf(word, SIGNED) for word in WORDS.values()]
    trail, _ = open_egress(tmp_path / "egress", log_signer(), [])
    await trail.append([*grant_leaves(SIGNED), *leaves])
    trail.close()
    for saved in (False, True, True):
        trail, ledger = open_egress(tmp_path / "egress", log_signer(), [])
        words = read_words(trail, ledger)
        assert [word for word in words if word in WORDS.values()] == list(WORDS.values())
        assert not lets([*LISTED, *words])
        if not saved:
            save_ledger(trail, at_once=True)
        trail.close()


def test_no_leaf_is_made_of_a_word_that_a_later_one_took_the_place_of(tally: Tally) -> None:
    """The verifier forgets liftings first: an entry that was lifted before would stand against whatever crosses."""
    entry = deny_entry("acme/ops/*", region="eu-west")
    lifted = deny_entry("acme/ops/*", region="eu-west", sequence=2, lifted=True)
    said = Said()
    assert said.current([entry, *LISTED]) == {entry, *LISTED}
    assert said.current([entry, lifted, *LISTED]) == {lifted, *LISTED}
    said.take(lifted)
    assert said.current([entry, *LISTED]) == set(LISTED)
    assert lets([*LISTED, entry, *said.beside([*LISTED, entry])]), "nor does it stop the link"
    said.take(WORDS["stricter acceptance"])
    assert SIGNED.accepted not in said.current(LISTED)
    tally("words that a later one took the place of", 2)


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_an_acceptance_of_something_else_takes_no_other_ones_place(
    other: dict[str, str], tally: Tally
) -> None:
    """Signed later than all others, it keeps the right one from no leaf, and a stricter one that has its leaf from counting."""
    odd, said = again(SIGNED, "eu-west", 9, **other), Said()
    assert said.current([odd, *LISTED]) == {odd, *LISTED}
    said.take(WORDS["stricter acceptance"])
    listed = [odd, *LISTED]
    assert lets(listed) and not lets([*listed, *said.beside(listed)])
    tally("acceptances of something else", 1)


def test_no_half_is_brought_that_does_not_take_the_held_ones_place(tally: Tally) -> None:
    one, other = sorted(
        (again(SIGNED, "us-east", 0, approvals=count) for count in (2, 3)),
        key=lambda each: half_rank(decode_body(each, ExportGrant, Purpose.EXPORT)),
    )
    files = [{"export": {SIGNED.grant: each.encode_file()}} for each in (one, other)]
    assert missing(files[1], files[0], "us-east", "eu-west", trust().policy_keys) == [
        ("export", SIGNED.grant)
    ]
    assert missing(files[0], files[1], "us-east", "eu-west", trust().policy_keys) == []
    assert missing(files[0], files[0], "us-east", "eu-west", trust().policy_keys) == []
    assert missing(
        files[0], {"export": {SIGNED.grant: b"no document"}}, "us-east", "eu-west", trust().policy_keys
    )
    tally("halves of the same time", 2)
