"""Which leaves have a place in which log."""

from __future__ import annotations

import pytest

from audit.leaf import Header, Kind, Side
from audit.origin import Origin

OWN, BRIDGE = Origin.parse("us-east.felix/audit"), Origin.parse("us-east.felix/bridge/out")


def of(kind: Kind, source: str, destination: str, side: Side = Side.INGRESS) -> Header:
    return Header(kind=kind, side=side, time_ms=1, source_region=source, destination_region=destination)


@pytest.mark.parametrize("side", Side)
def test_keys_and_seals_stand_in_the_log_of_their_region_and_concern_no_other(side: Side) -> None:
    for kind in (Kind.KEY, Kind.SEAL, Kind.UNCLEAN):
        assert OWN.misplaced(of(kind, "us-east", "us-east", side)) == ""
        for source, destination in (("us-east", "eu-west"), ("eu-west", "us-east"), ("eu-west", "eu-west")):
            assert kind.name in OWN.misplaced(of(kind, source, destination, side))
    assert BRIDGE.misplaced(of(Kind.SEAL, "us-east", "us-east", side)) == ""
    assert "keys stand in the log of their region" in BRIDGE.misplaced(
        of(Kind.KEY, "us-east", "us-east", side)
    )
    assert "unclean elections stand in the log of their region" in BRIDGE.misplaced(
        of(Kind.UNCLEAN, "us-east", "us-east", side)
    )
