"""The states of a grant. TRANSITIONS is the table that the code runs on::

    offered ──complete──▶ active ◀──pause/resume──▶ paused
       └──────────── revoke, expire ──────────────▶ revoked, expired   (final)

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class GrantState(StrEnum):
    OFFERED = "offered"
    ACTIVE = "active"
    PAUSED = "paused"
    REVOKED = "revoked"
    EXPIRED = "expired"


class GrantEvent(StrEnum):
    COMPLETE = "complete"
    """both halves are there, and on each side the approvals that they ask for"""
    PAUSE = "pause"
    RESUME = "resume"
    REVOKE = "revoke"
    EXPIRE = "expire"


TRANSITIONS: Final[Mapping[tuple[GrantState, GrantEvent], GrantState]] = {
    (GrantState.OFFERED, GrantEvent.COMPLETE): GrantState.ACTIVE,
    (GrantState.ACTIVE, GrantEvent.PAUSE): GrantState.PAUSED,
    (GrantState.PAUSED, GrantEvent.RESUME): GrantState.ACTIVE,
    (GrantState.OFFERED, GrantEvent.REVOKE): GrantState.REVOKED,
    (GrantState.ACTIVE, GrantEvent.REVOKE): GrantState.REVOKED,
    (GrantState.PAUSED, GrantEvent.REVOKE): GrantState.REVOKED,
    (GrantState.OFFERED, GrantEvent.EXPIRE): GrantState.EXPIRED,
    (GrantState.ACTIVE, GrantEvent.EXPIRE): GrantState.EXPIRED,
    (GrantState.PAUSED, GrantEvent.EXPIRE): GrantState.EXPIRED,
}
"""What is not in the table leaves the state as it is: `revoked` and `expired` are final."""


def advance(state: GrantState, event: GrantEvent) -> GrantState:
    """The state after an event."""
    return TRANSITIONS.get((state, event), state)
