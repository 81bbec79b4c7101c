"""What an egress log says of a region that changed its policy key."""

from __future__ import annotations

import pytest

from bridge.said import Said
from keys.signing import SigningKey
from policy.grant import DenyEntry, Standing, StandingAction, sign_deny, sign_standing
from policy.signed import SignedDocument

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
