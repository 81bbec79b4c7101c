"""What must hold across leaves, as little scenarios: what a bridge writes passes, each deviation is named."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from audit_log import TIME_MS, Link, egress_appends
from signed_grants import signed_grant

from audit.continuity import Continuity
from audit.leaf import Header, Kind, Leaf, Side
from audit.legal_fields import legal_fields

TERMS = legal_fields(signed_grant().terms)


def mistakes(leaves: Sequence[Leaf]) -> list[str]:
    """Of leaves of version 1, whose grants are judged here; those of version 2 are audit.agreement's."""
    continuity = Continuity()
    return [sentence for leaf in leaves for sentence in apply(continuity, version_1(leaf))]


def apply(continuity: Continuity, leaf: Leaf) -> list[str]:
    """Take a leaf whose grant, of version 2, both regions signed."""
    return continuity.apply(leaf, sum(continuity.leaves.values()), lambda: True)


def version_1(leaf: Leaf) -> Leaf:
    """The leaf as version 1 had it, with a grant's terms in its leaf."""
    header: Header = leaf.header
    if header.kind is Kind.GRANT and header.terms is None:
        header = msgspec.structs.replace(header, terms=TERMS)
    return Leaf(header, leaf.entries, 1)


def with_header(leaf: Leaf, **change: object) -> Leaf:
    return Leaf(msgspec.structs.replace(leaf.header, **change), leaf.entries)


def test_what_a_bridge_writes_passes_and_is_counted() -> None:
    continuity = Continuity()
    for leaves in egress_appends(50):
        for leaf in leaves:
            assert apply(continuity, leaf) == []
    assert continuity.records == {"INTENT": 130, "WITHHELD": 20, "ACK": 130, "GAP": 10}
    assert continuity.accounts.unanswered == 0 and continuity.accounts.skipped == 0


def test_a_long_batch_in_parts_passes_and_a_missing_part_is_named() -> None:
    link = Link()
    grant, parts = link.grant(), link.intent(2_500, withhold=(0, 950, 2_499))
    ack = link.ack(parts)
    assert [leaf.header.kind.name for leaf in parts] == ["WITHHELD", "INTENT", "INTENT", "INTENT"]
    assert mistakes([grant, *parts, ack, *link.intent()]) == []
    found = mistakes([grant, *parts[:2], *parts[3:], ack])
    assert any("part 2 of 3 does not follow" in sentence for sentence in found)


def test_a_withheld_record_at_any_place_of_a_batch_is_accounted_for() -> None:
    for withhold in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)):
        link = Link()
        assert (
            mistakes([link.grant(), *link.intent(3, withhold), *link.intent(3, withhold), *link.intent()])
            == []
        )


def test_an_empty_batch_must_be_withheld_whole() -> None:
    link = Link()
    grant, (withheld, empty) = link.grant(), link.intent(3, (0, 1, 2))
    assert empty.header.records == 0
    ack = link.ack([empty])
    assert ack.header.destination_first_offset is None
    assert mistakes([grant, withheld, empty, ack]) == []
    found = mistakes([grant, empty, ack])
    assert len(found) == 1 and "offsets 0..2" in found[0]


def test_a_missing_batch_is_named() -> None:
    link = Link()
    leaves = [link.grant(), *link.intent(), *link.intent(), *link.intent()]
    found = mistakes([*leaves[:2], leaves[3]])
    assert found == [
        "acme/ops/departures shard 0 to eu-west: offsets 3..5 are neither crossed, withheld nor a gap."
    ]


def test_a_record_that_is_neither_crossed_nor_withheld_is_named() -> None:
    for at in (0, 1, 2):
        link = Link()
        grant, (withheld, *intent) = link.grant(), link.intent(3, (at,))
        assert withheld.header.kind is Kind.WITHHELD
        found = mistakes([grant, *intent, *link.intent()])
        assert len(found) == 1 and f"offsets {at}..{at} " in found[0], found


def test_a_second_intent_for_a_record_is_named() -> None:
    link = Link()
    grant, first = link.grant(), link.intent()
    again = with_header(first[0], envelope_sha256=b"2" * 32)
    assert any("second time" in sentence for sentence in mistakes([grant, *first, again]))
    link = Link()
    grant, (withheld, intent) = link.grant(), link.intent(3, (1,))
    assert any("second time" in sentence for sentence in mistakes([grant, withheld, withheld, intent]))
    assert any("second time" in sentence for sentence in mistakes([grant, withheld, intent, withheld]))


def test_a_gap_over_accounted_offsets_is_named() -> None:
    link = Link()
    leaves = [link.grant(), *link.intent()]
    link.offset = 1
    assert any("accounted for already" in sentence for sentence in mistakes([*leaves, link.gap(5)]))


@pytest.mark.parametrize(
    "change", [{"records": 2}, {"last_offset": 3}, {"first_offset": 1}, {"envelope_sha256": b"x" * 32}]
)
def test_an_ack_that_answers_no_intent_is_named(change: dict[str, object]) -> None:
    link = Link()
    grant, intent = link.grant(), link.intent()
    found = mistakes([grant, *intent, with_header(link.ack(intent), **change)])
    assert len(found) == 1 and "ACK" in found[0]


def test_an_ack_answers_once_and_after_its_intent() -> None:
    link = Link()
    grant, intent = link.grant(), link.intent()
    ack = link.ack(intent)
    assert mistakes([grant, *intent, ack]) == []
    assert len(mistakes([grant, *intent, ack, ack])) == 1
    assert len(mistakes([grant, ack, *intent])) == 1


def test_acks_may_come_in_another_order_than_intents() -> None:
    link = Link()
    grant, first, second = link.grant(), link.intent(), link.intent()
    assert mistakes([grant, *first, *second, link.ack(second), link.ack(first)]) == []


@pytest.mark.parametrize(
    ("grants", "says"),
    [
        ([], "no GRANT leaf"),
        ([{"grant_id": "g-2"}], "no GRANT leaf"),
        ([{"terms_hash": b"x" * 32}], "hash of terms"),
        ([{"stream": "acme/ops/crew"}], "the grant is for acme/ops/crew"),
        ([{"destination_stream": "acme/ops/crew"}], "the grant is for"),
        ([{"stream": "acme/hr/*"}], "the grant is for acme/hr/*"),
        ([{"stream": "acme"}], "not a name pattern"),
        ([{"bridge": "spiffe://us-east.acme/bridge/other"}], "another bridge"),
        ([{"destination_region": "apac"}], "between other regions"),
        ([{"terms": msgspec.structs.replace(TERMS, expires_ms=TIME_MS)}], "outside the grant's window"),
        (
            [{"terms": msgspec.structs.replace(TERMS, not_before_ms=TIME_MS * 2)}],
            "outside the grant's window",
        ),
        ([{}, {"terms_hash": b"x" * 32}], "other terms than before"),
    ],
)
def test_an_intent_without_a_grant_that_holds_is_named(grants: list[dict[str, object]], says: str) -> None:
    link = Link()
    leaves = [with_header(link.grant(), **change) for change in grants]
    assert any(says in sentence for sentence in mistakes([*leaves, *link.intent()]))


def test_a_wildcard_grant_covers_the_streams_that_it_matches() -> None:
    link = Link()
    wide = with_header(link.grant(), stream="acme/ops/*", destination_stream="acme/ops/*")
    assert mistakes([wide, *link.intent()]) == []
    renamed = with_header(link.intent()[0], destination_stream="acme/ops/other")
    assert "the grant is for" in mistakes([wide, renamed])[0]


def test_nothing_crosses_after_a_revocation_but_answers_still_come() -> None:
    link = Link()
    grant, intent = link.grant(), link.intent()
    assert mistakes([grant, *intent, link.revoke(), link.ack(intent)]) == []
    assert "revoked before" in mistakes([grant, link.revoke(), *intent])[0]
    assert "revoked before" in mistakes([grant, link.revoke(), grant, *intent])[0]


def test_another_grant_may_start_further_on_and_what_it_skips_is_counted() -> None:
    link = Link()
    leaves = [link.grant(), *link.intent()]
    link.offset, link.grant_id = 103, "g-2"
    continuity = Continuity()
    found = [s for leaf in [*leaves, link.grant(), *link.intent()] for s in apply(continuity, leaf)]
    assert found == [] and continuity.accounts.skipped == 100
    assert continuity.accounts.skips.in_order() == [(3, 3, 102)]


def test_another_grant_may_announce_again_what_had_no_answer_and_nothing_else() -> None:
    link = Link()
    answered = link.intent(3)
    leaves = [link.grant(), *answered, link.ack(answered), *link.intent(3)]
    again = Link(grant_id="g-2")
    again.offset = again.destination_offset = 3
    # Another grant has another transfer key, so the same range makes another envelope.
    intents = [with_header(leaf, envelope_sha256=bytes([at]) * 32) for at, leaf in enumerate(again.intent(3))]
    under_another = [again.grant(), *intents, *again.intent(3)]
    assert mistakes([*leaves, *under_another]) == []
    late = link.ack(leaves[-1:])
    assert mistakes([*leaves, late]) == []
    (sentence,) = mistakes([*leaves, *under_another, late])
    assert "answers no INTENT" in sentence
    link.offset = 3
    assert any("second time" in sentence for sentence in mistakes([*leaves, *link.intent(3)]))
    early = Link(grant_id="g-2")
    assert any("second time" in sentence for sentence in mistakes([*leaves, early.grant(), *early.intent(3)]))


def test_another_incarnation_starts_anew() -> None:
    link = Link()
    leaves = [link.grant(), *link.intent()]
    link.offset = 0
    (again,) = link.intent()
    assert mistakes([*leaves, with_header(again, incarnation=b"2" * 16, envelope_sha256=b"2" * 32)]) == []


def test_the_ingress_side_appends_each_record_once() -> None:
    link = Link()
    grant = link.grant(Side.INGRESS)
    batches = [link.delivery(link.intent(3, withhold)) for withhold in ((), (1,), (0, 1, 2), ())]
    leaves = [leaf for batch in batches for leaf in batch]
    assert [leaf.header.records for leaf in leaves] == [3, 2, 0, 3]
    assert mistakes([grant, *leaves]) == []
    assert any("appended before" in sentence for sentence in mistakes([grant, *leaves, leaves[0]]))
    assert any("no GRANT" in sentence for sentence in mistakes(leaves))


def test_the_ingress_side_appends_each_record_once_whichever_bridge_brings_it() -> None:
    leaves = Link().delivery(Link().intent())
    other = [with_header(leaf, bridge="spiffe://us-east.acme/bridge/other") for leaf in leaves]
    continuity = Continuity()
    assert apply(continuity, leaves[0]) == []
    assert any("appended before" in sentence for sentence in apply(continuity, other[0]))


def test_an_intent_in_an_ingress_log_is_named() -> None:
    link = Link()
    assert mistakes([with_header(link.intent()[0], side=Side.INGRESS)]) == [
        "An INTENT stands in an ingress log."
    ]


def test_a_stream_that_crosses_under_two_names_is_accounted_for_under_each() -> None:
    link = Link()
    grant, first = link.grant(), link.intent()
    ack = link.ack(first)
    other = with_header(first[0], destination_stream="acme/ops/copy", envelope_sha256=b"c" * 32)
    continuity = Continuity()
    assert [said for leaf in (grant, *first, ack, other) for said in apply(continuity, leaf)] == []
    assert continuity.accounts.unanswered == 1
    (twice,) = apply(continuity, with_header(other, envelope_sha256=b"d" * 32))
    assert "3 records of 0..2 are accounted for a second time" in twice
