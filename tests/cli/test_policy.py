"""`felix policy`: what is said of a policy beside what it says."""

from __future__ import annotations

from audit_log import region_bundle
from bridge_mesh import POLICIES

from cli.policy import placed_otherwise
from policy.residency import parse_policy


def test_a_region_that_the_policy_places_in_another_country_than_its_bundle_is_named() -> None:
    policy = parse_policy(POLICIES["us-east"], "us-east.yaml")
    bundles = {name: region_bundle(name) for name in ("us-east", "eu-west")}
    assert not placed_otherwise(policy, bundles)
    assert not placed_otherwise(policy, {}), "of whom nothing is known, nothing is said"
    (said,) = placed_otherwise(policy, bundles | {"eu-west": region_bundle("eu-west", country="BY")})
    assert "eu-west is in IE" in said and "in BY" in said
