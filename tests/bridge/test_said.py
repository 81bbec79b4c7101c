"""What an egress log says of a region that changed its policy key."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from signed_grants import signed_grant

from bridge.said import Said
from keys.signing import SigningKey
from policy.grant import (
    DenyEntry,
    ExportGrant,
    ImportGrant,
    Standing,
    StandingAction,
    sign_deny,
    sign_standing,
)
from policy.signed import Purpose, SignedDocument, canonical, decode_body, sign
from policy.signed_again import accepted_by
from policy.truncation import Truncation

HIGHEST = (1 << 53) - 1


def word(what: str, key: SigningKey, number: int, *, stops: bool) -> SignedDocument:
    if what == "deny":
        entry = DenyEntry(
            streams="acme/ops/*", peer="*", region="eu-west", sequence=number, at=1, by="a", lifted=not stops
        )
        return sign_deny(entry, key.private_key)
    action = StandingAction.PAUSE if stops else StandingAction.RESUME
    standing = Standing(
        grant="g-aaaaaaaaaaaaaaaa", action=action, region="eu-west", sequence=number, at=1, by="a"
    )
    return sign_standing(standing, key.private_key)


@pytest.mark.parametrize("what", ["stand", "deny"])
def test_a_word_under_a_former_key_keeps_none_under_the_next_from_its_leaf(what: str) -> None:
    former, new, said = SigningKey.generate(), SigningKey.generate(), Said()
    said.take(word(what, former, HIGHEST, stops=True))
    lifts, stops = word(what, new, 1, stops=False), word(what, new, 2, stops=True)
    assert said.current([lifts]) == {lifts}
    said.take(lifts)
    assert said.current([lifts, stops]) == {stops}
    said.take(stops)
    assert stops in said.beside([lifts]), "where a region lists the earlier one alone"


def test_where_a_link_went_on_is_known_whichever_key_signed_it_and_whatever_is_listed() -> None:
    said, ended = Said(), bytes(16)
    cut = Truncation(stream="acme/ops/a", shard=0, incarnation=ended.hex(), epoch=1, offset=5)
    accepted = Standing(
        grant="g-aaaaaaaaaaaaaaaa",
        action=StandingAction.ACCEPT_TRUNCATION,
        region="us-east",
        sequence=1,
        at=1,
        by="a",
        truncation=cut,
    )
    resend = replace(accepted, action=StandingAction.RESEND)
    for key, standing in ((SigningKey.generate(), accepted), (SigningKey.generate(), resend)):
        said.take(sign_standing(standing, key.private_key))
    said.take(word("stand", SigningKey.generate(), 1, stops=True))
    assert said.derived == {accepted_by(each).incarnation: ended for each in (accepted, resend)}


SIGNED = signed_grant()


def half(side: str, key: SigningKey, at: int) -> SignedDocument:
    """The grant's half of that side, signed at that time (ms)."""
    body: ExportGrant | ImportGrant
    if side == "export":
        body = decode_body(SIGNED.export, ExportGrant, Purpose.EXPORT)
        return sign(Purpose.EXPORT, "us-east", canonical(replace(body, signed_at=at)), key.private_key)
    body = decode_body(SIGNED.accepted, ImportGrant, Purpose.IMPORT)
    return sign(Purpose.IMPORT, "eu-west", canonical(replace(body, signed_at=at)), key.private_key)


@pytest.mark.parametrize("side", ["export", "import"])
def test_a_half_under_a_former_key_keeps_none_under_the_next_from_its_leaf(side: str) -> None:
    former, new, said = SigningKey.generate(), SigningKey.generate(), Said()
    said.take(half(side, former, HIGHEST))
    again, later = half(side, new, 1), half(side, new, 2)
    assert said.current([again]) == {again}
    said.take(again)
    assert said.current([again, later]) == {later}
    said.take(later)
    assert later in said.beside([again]), "where a region lists the earlier one alone"
    assert again not in said.beside([later])


@pytest.mark.parametrize("side", ["export", "import"])
def test_of_two_keys_of_now_the_higher_half_counts_whichever_is_listed(side: str) -> None:
    one, other, said = SigningKey.generate(), SigningKey.generate(), Said()
    strict, lax = half(side, one, 2), half(side, other, 1)
    said.take(strict)
    assert said.beside([lax]) == [strict]
    said.take(lax)
    assert said.beside([strict]) == []
    assert said.beside([]) == [], "without a half that is listed there is no grant"
