"""Whoever signs the policy by which records cross says in it where the other region is, and the register names that country. What that region says itself is told beside it."""

from __future__ import annotations

import pytest
from attacks.conftest import Tally
from attacks.test_former_keys import log_of
from audit_log import INGRESS_ORIGIN, STREAM, Link, region_bundle

from audit.leaf import Side
from audit.proof import check_proof, prove
from audit.tile import MemoryFiles
from audit.trust import Trust
from audit.verify import PLACED_OTHERWISE, verify_log


def trusting(**countries: str) -> Trust:
    """Both regions' bundles, which name these countries."""
    return Trust.of(
        region_bundle(
            region,
            country=countries.get(region.partition("-")[0], {"us-east": "US", "eu-west": "IE"}[region]),
        )
        for region in ("us-east", "eu-west")
    )


def log_of_side(side: Side) -> MemoryFiles:
    link, arrived = Link(), Link()
    leaves = link.agreement(side)
    for _ in range(2):
        intents = link.intent()
        leaves += [*intents, link.ack(intents)] if side is Side.EGRESS else arrived.delivery(intents)
    return log_of(leaves) if side is Side.EGRESS else log_of(leaves, "us-east", origin=INGRESS_ORIGIN)


@pytest.mark.parametrize("side", Side)
def test_another_country_than_the_region_names_itself_is_told(side: Side, tally: Tally) -> None:
    files = log_of_side(side)
    assert not verify_log(files, trusting()).notices
    for countries in ({"eu": "BY"}, {"us": "CA"}, {"us": "CA", "eu": "BY"}):
        report = verify_log(files, trusting(**countries))
        assert report.ok, "whom to believe is for people to say"
        told = [notice for notice in report.notices if notice.name == PLACED_OTHERWISE]
        assert len(told) == len(countries)
        for notice, (region, by_policy) in zip(
            sorted(told, key=lambda each: each.sentence, reverse=True),
            sorted(((each, {"eu": "IE", "us": "US"}[each]) for each in countries), reverse=True),
            strict=True,
        ):
            assert (
                f"in {by_policy} by the policy" in notice.sentence
                and f"in {countries[region]} by" in notice.sentence
            )
            assert notice.records == 6
    tally("regions that another one's policy places elsewhere", 4)


def test_a_proof_tells_it_too() -> None:
    files = log_of_side(Side.EGRESS)
    proof = prove(files, trusting(), STREAM, 0, 0)
    approved = check_proof(proof, trusting()).approved
    assert approved is not None and not approved.placed_otherwise
    approved = check_proof(proof, trusting(eu="BY")).approved
    assert approved is not None and approved.destination_country == "IE"
    (said,) = approved.placed_otherwise
    assert said.startswith("eu-west is in IE") and "in BY by eu-west's own bundle" in said
