"""Places: who gets in beside whom."""

from __future__ import annotations

from random import Random

import pytest

from felix.names import SpiffeId
from region.streams.places import FOREIGN_PER_IDENTITY, Places, places_of, refusal


def bridge(name: str, region: str = "eu-west") -> SpiffeId:
    return SpiffeId(region, "acme", "bridge", name)


OWN = SpiffeId("us-east", "acme", "client", "orders")
ALICE = SpiffeId("us-east", "acme", "operator", "alice")


def asked(places: Places, taken: list[SpiffeId], asking: SpiffeId, quota: int | None = None) -> str:
    return refusal(places, "us-east", taken, asking, is_operator=asking.kind == "operator", quota=quota)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 6, 31, 32, 64, 4096, 100_000])
def test_shares_leave_room_for_everybody(limit: int) -> None:
    places = places_of(limit)
    assert 1 <= places.foreign_per_region <= places.foreign <= max(1, limit // 4)
    assert places.operators == (0 if limit < 4 else max(1, limit // 32))
    assert places.operators + places.foreign <= max(1, limit)


def test_a_bridge_has_few_and_its_quota_says_otherwise() -> None:
    places = places_of(4096)
    held = [bridge("a")] * FOREIGN_PER_IDENTITY
    assert "has 4 sessions of spiffe://eu-west.acme/bridge/a" in asked(places, held, bridge("a"))
    assert not asked(places, held, bridge("b"))
    assert not asked(places, held, bridge("a"), quota=9)
    assert not asked(places, held, bridge("a"), quota=0)
    assert "has 2 sessions of" in asked(places, held[:2], bridge("a"), quota=2)
    assert "of region eu-west" in asked(places, [bridge("x")] * 16, bridge("a"), quota=0)
    assert not asked(places, [bridge("x")] * 16, bridge("a", "ap-south"))


def test_whoever_comes_in_whatever_order_an_operator_and_own_people_get_in() -> None:
    """Random arrivals until nobody else gets in: other regions never have more than their share, operators always a place."""
    chance = Random(18)
    crowd = [
        OWN,
        *(bridge(str(n), region) for n in range(9) for region in ("eu-west", "ap-south", "sa-east")),
    ]
    for _ in range(300):
        places = places_of(chance.choice((4, 5, 8, 40, 100)))
        taken: list[SpiffeId] = []
        for _ in range(3 * places.limit):
            who = chance.choice(crowd)
            if not asked(places, taken, who, chance.choice((None, 0, 50))):
                taken.append(who)
        foreign = [each for each in taken if each.region != "us-east"]
        assert len(foreign) <= places.foreign
        assert len(taken) <= places.limit - places.operators
        for _ in range(places.operators):
            assert not asked(places, taken, ALICE)
            taken.append(ALICE)
        while len(taken) < places.limit:
            taken.append(ALICE)
        assert "the most that are allowed" in asked(places, taken, ALICE)
