"""Accepted truncations: the chain of incarnations follows from the documents alone."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from departures import DAY, terms

from policy.grant import ExportGrant, GrantBook, Standing, StandingAction, sign_standing
from policy.signed import Purpose, SignatureError, SignedDocument, canonical, decode_body, sign
from policy.terms import GrantTerms, grant_id
from policy.truncation import Accepted, Truncation, chain, other_chain

OWN = bytes(range(16))
STREAM = "acme/ops/departures"
KEYS = {region: Ed25519PrivateKey.generate() for region in ("us-east", "eu-west")}
TERMS = terms(not_before=DAY)
GRANT = grant_id(TERMS.hash())
TRUSTED = {region: (key.public_key().public_bytes_raw(),) for region, key in KEYS.items()}


def exported(granted: GrantTerms) -> SignedDocument:
    body = ExportGrant(
        grant=grant_id(granted.hash()),
        terms=granted,
        terms_hash=granted.hash().hex(),
        approvals=0,
        separate=False,
        policy_revision=1,
        policy_hash="0" * 64,
        signed_at=DAY,
    )
    return sign(Purpose.EXPORT, "us-east", canonical(body), KEYS["us-east"])


EXPORT = exported(TERMS)


def accepted(ended: bytes, offset: int, at: int, region: str = "us-east") -> Standing:
    cut = Truncation(stream=STREAM, shard=0, incarnation=ended.hex(), epoch=7, offset=offset)
    return Standing(
        grant=GRANT,
        action=StandingAction.ACCEPT_TRUNCATION,
        region=region,
        sequence=1,
        at=at,
        by="alice",
        truncation=cut,
    )


def derived(standing: Standing) -> bytes:
    assert isinstance(standing.truncation, Truncation)
    return Accepted(standing.truncation, standing.region, standing.at).incarnation


def signed(standing: Standing) -> SignedDocument:
    return sign_standing(standing, KEYS[standing.region])


def test_a_stream_crosses_under_its_own_incarnation_until_a_truncation_is_accepted() -> None:
    book = GrantBook([EXPORT], TRUSTED)
    assert book.live_incarnation(GRANT, STREAM, 0, OWN) == (OWN, None)
    book = book.including([signed(accepted(OWN, 5, 100))])
    live = book.live_incarnation(GRANT, STREAM, 0, OWN)
    assert live.incarnation != OWN
    assert live.accepted is not None and live.accepted.truncation.offset == 5
    assert book.live_incarnation(GRANT, STREAM, 1, OWN) == (OWN, None), "another shard"
    renewed = terms(not_before=DAY, purpose="planning")
    elsewhere = terms(not_before=DAY, to_region="ap-south")
    book = book.including([exported(renewed), exported(elsewhere)])
    assert book.live_incarnation(grant_id(renewed.hash()), STREAM, 0, OWN) == live, "a grant renewed"
    assert book.live_incarnation(grant_id(elsewhere.hash()), STREAM, 0, OWN) == (OWN, None), "elsewhere"
    assert book.live_incarnation(GRANT, STREAM, 0, bytes(16)) == (bytes(16), None), "the stream made anew"


def test_who_crosses_under_a_later_grant_learns_of_what_was_accepted_under_an_earlier_one() -> None:
    later = terms(not_before=DAY, bridge="spiffe://us-east.acme/bridge/another")
    others = {
        "elsewhere": terms(not_before=DAY, to_region="ap-south"),
        "under another name": terms(not_before=DAY, destination_stream="acme/ops/departures2"),
    }
    book = GrantBook([EXPORT, *map(exported, (later, *others.values()))], TRUSTED)
    assert book.cut_under({grant_id(later.hash())}) == set(), "nothing was accepted yet"
    book = book.including([signed(accepted(OWN, 5, 100))])
    assert book.cut_under({GRANT}) == book.cut_under({grant_id(later.hash())}) == {GRANT}
    for name, other in others.items():
        assert book.cut_under({grant_id(other.hash())}) == set(), name
    whole = terms(not_before=DAY, stream="acme/ops/*", wildcard=True)
    kept = terms(not_before=DAY, destination_stream=STREAM)
    under_kept = msgspec.structs.replace(accepted(OWN, 5, 100), grant=grant_id(kept.hash()))
    wide = GrantBook([*map(exported, (whole, kept)), signed(under_kept)], TRUSTED)
    assert wide.cut_under({grant_id(whole.hash())}) == {grant_id(kept.hash())}, "a pattern"
    assert book.cut_under({"g-unknown"}) == book.cut_under(()) == set()


def test_the_chain_is_the_same_whatever_order_documents_come_in() -> None:
    first = accepted(OWN, 5, 100)
    second = accepted(derived(first), 8, 200)
    third = accepted(derived(second), 8, 300)
    rival = accepted(OWN, 3, 99)
    documents = [signed(each) for each in (first, second, third, rival)]
    for begun, lives in (((), rival), ((derived(first),), third), ((derived(rival), derived(second)), third)):
        found = {
            GrantBook([EXPORT, *order], TRUSTED).incarnations(GRANT, STREAM, 0, OWN, begun)[-1].incarnation
            for order in permutations(documents)
        }
        assert found == {derived(lives)}, "what was said first, or what crossed under"
    assert derived(second) != derived(third), "the same offset, lost twice"


def test_a_word_of_the_destination_holds_only_where_something_crossed_under_it() -> None:
    alone, after = accepted(OWN, 0, 50, "eu-west"), accepted(derived(accepted(OWN, 0, 50, "eu-west")), 9, 60)
    book = GrantBook([EXPORT, signed(alone), signed(after)], TRUSTED)
    assert book.live_incarnation(GRANT, STREAM, 0, OWN) == (OWN, None)
    assert book.incarnations(GRANT, STREAM, 0, OWN, (OWN,))[-1] == (OWN, None)
    for begun in (derived(alone), derived(after)):
        lives = book.incarnations(GRANT, STREAM, 0, OWN, (begun,))
        assert [live.incarnation for live in lives] == [OWN, derived(alone), derived(after)]
    later = accepted(OWN, 4, 900)
    book = book.including([signed(later)])
    assert book.live_incarnation(GRANT, STREAM, 0, OWN).incarnation == derived(later)


def tried(documents: list[Standing], begun: tuple[bytes, ...], until: Standing | None = None) -> list[bytes]:
    """What a bridge whose log has these incarnations goes by, where the destination refuses all but the last."""
    accepted = GrantBook([EXPORT, *map(signed, documents)], TRUSTED).accepted_truncations(GRANT, STREAM, 0)
    lives = chain(OWN, accepted, "us-east", begun)
    found: list[bytes] = []
    while lives:
        found.append(lives[-1].incarnation)
        if until is not None and found[-1] == derived(until):
            break
        lives = other_chain(lives, accepted, "us-east", begun, found)
    return found


def test_what_the_log_has_is_not_left_for_another_word_and_behind_it_each_is_tried() -> None:
    first, rival = accepted(OWN, 5, 100), accepted(OWN, 4, 101)
    second, other = accepted(derived(first), 8, 200), accepted(derived(first), 7, 300)
    foreign = accepted(derived(first), 0, 1, "eu-west")
    words = [first, rival, second, other, foreign]
    for begun in ((OWN,), (OWN, derived(first))):
        assert tried(words, begun, other) == [derived(second), derived(other)]
    assert tried(words, (OWN, derived(first))) == [derived(second), derived(other)]
    assert tried(words, (OWN,)) == [derived(second), derived(other), derived(rival)]
    assert tried(words, ()) == [derived(second), derived(foreign), derived(other), derived(rival)]
    assert tried(words, (OWN, derived(first), derived(other))) == [derived(other)]
    assert tried([first, foreign], (OWN, derived(first))) == [derived(first)]
    assert tried([first, foreign], ()) == [derived(first), derived(foreign)], "a bridge that knows nothing"


def test_a_document_of_a_region_that_did_not_sign_it_counts_for_nothing() -> None:
    forged = accepted(OWN, 5, 100)
    document = sign(Purpose.STANDING, "us-east", canonical(forged), KEYS["eu-west"])
    book = GrantBook([EXPORT, document], TRUSTED)
    assert book.problems
    assert book.live_incarnation(GRANT, STREAM, 0, OWN) == (OWN, None)


def test_a_truncation_of_no_stream_keeps_nobody_from_the_documents() -> None:
    """A region may sign any text. One that is no stream's name is not believed, whatever grant it speaks of, known or not."""
    for grant in (GRANT, f"g-{16 * 'a'}"):
        body = msgspec.json.decode(canonical(accepted(OWN, 5, 100)))
        body["grant"], body["truncation"]["stream"] = grant, "no stream"
        document = sign(Purpose.STANDING, "us-east", canonical(body), KEYS["us-east"])
        book = GrantBook([EXPORT, document, signed(accepted(OWN, 5, 100))], TRUSTED)
        assert [problem.document for problem in book.problems] == [document]
        assert book.cut_under({GRANT}) == {GRANT}


def test_only_an_acceptance_names_a_truncation_and_it_neither_pauses_nor_resumes() -> None:
    cut = accepted(OWN, 5, 100).truncation
    with pytest.raises(ValueError, match="accept-truncation"):
        Standing(
            grant=GRANT,
            action=StandingAction.PAUSE,
            region="us-east",
            sequence=1,
            at=1,
            by="a",
            truncation=cut,
        )
    with pytest.raises(ValueError, match="accept-truncation"):
        Standing(
            grant=GRANT, action=StandingAction.ACCEPT_TRUNCATION, region="us-east", sequence=1, at=1, by="a"
        )
    book = GrantBook([signed(accepted(OWN, 5, 100))], TRUSTED)
    assert book.next_sequence(GRANT, "us-east", 0) == 1


def test_a_standing_of_version_0_1_still_reads_as_it_was_signed() -> None:
    pause = Standing(grant=GRANT, action=StandingAction.PAUSE, region="us-east", sequence=1, at=1, by="alice")
    assert b"truncation" not in canonical(pause)
    assert decode_body(signed(pause), Standing, Purpose.STANDING) == pause
    body = canonical(accepted(OWN, 5, 100)).replace(b'"shard":0', b'"shard":-1')
    with pytest.raises(SignatureError):
        decode_body(sign(Purpose.STANDING, "us-east", body, KEYS["us-east"]), Standing, Purpose.STANDING)


def test_what_a_bridge_carries_is_what_names_it_in_any_half() -> None:
    other = terms(not_before=DAY, bridge="spiffe://us-east.acme/bridge/another", to_region="ap-south")
    book = GrantBook([EXPORT, exported(other)], TRUSTED)
    for each in (book, GrantBook([EXPORT], TRUSTED).including([exported(other)])):
        assert each.carried_by(terms().bridge) == ({GRANT}, {"us-east", "eu-west"})
        assert each.carried_by(other.bridge) == ({grant_id(other.hash())}, {"us-east", "ap-south"})
        assert each.carried_by("spiffe://us-east.acme/bridge/nobody") == (frozenset(), frozenset())
    assert book.changed([EXPORT], ()).carried_by(terms().bridge).grants == frozenset()
