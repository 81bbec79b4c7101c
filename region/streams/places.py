"""Places: how the sessions that a broker allows are shared out, so that nobody takes all of them. Pure.

The region's own people come first: identities of other regions have at most a part of the places, each region and each identity
of them a few, and the last places are kept for operators, who must get in to put things right.

Invariants: an operator is refused only where every place is taken; with at least four places, identities of other regions never
have more than a quarter of them (one at least), and the region's own have the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from felix.names import SpiffeId

FOREIGN_PART: Final = 4
"""Identities of other regions have one place of so many: bridges, which need one each, and one while another ends."""
FOREIGN_PER_REGION: Final = 16
"""Of one other region: its bridges. It has an operator of its own to ask why it needs more."""
FOREIGN_PER_IDENTITY: Final = 4
"""Of one bridge: an agent has one session here, and others while the broker has not noticed that earlier ones are gone. One more
takes the place of the one that was silent longest (`Broker.admit`), unless a quota (`sessions`, felix quota set) says how many."""
OPERATORS_PART: Final = 32
"""One place of so many is kept for operators, from four places on one at least."""


class Places(NamedTuple):
    """How many places there are for whom."""

    limit: int
    foreign: int
    foreign_per_region: int
    operators: int


def places_of(limit: int) -> Places:
    """The shares of `limits.sessions`."""
    foreign = max(1, limit // FOREIGN_PART)
    operators = max(1, limit // OPERATORS_PART) if limit >= FOREIGN_PART else 0
    return Places(limit, foreign, min(foreign, FOREIGN_PER_REGION), operators)


def refusal(
    places: Places,
    region: str,
    taken: Iterable[SpiffeId],
    asking: SpiffeId,
    *,
    is_operator: bool,
    quota: int | None,
) -> str:
    """Why `asking` has no place beside those who have one; empty where it has. `quota`: the sessions that its own quota says,
    0 for without bound, None for none."""
    held = list(taken)
    if len(held) >= places.limit:
        return f"has {places.limit} sessions, the most that are allowed"
    if not is_operator and len(held) >= places.limit - places.operators:
        return f"has {len(held)} of {places.limit} sessions, and keeps {places.operators} for operators"
    if asking.region == region:
        return ""
    foreign = [each for each in held if each.region != region]
    theirs = [each for each in foreign if each.region == asking.region]
    most = FOREIGN_PER_IDENTITY if quota is None else quota
    if most and sum(each == asking for each in theirs) >= most:
        return f"has {most} sessions of {asking}, the most that are allowed to it"
    if len(theirs) >= places.foreign_per_region:
        return f"has {len(theirs)} sessions of region {asking.region}, the most that are allowed to another region"
    if len(foreign) >= places.foreign:
        return f"has {len(foreign)} sessions of other regions, the most that are allowed to them"
    return ""
