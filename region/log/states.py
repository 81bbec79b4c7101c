"""The states of a shard and what moves between them, as a table."""

from __future__ import annotations

from enum import Enum
from typing import Final


class State(Enum):
    """FULL still reads; FAILED and STOPPED do nothing."""

    OPENING = "opening"
    SERVING = "serving"
    FULL = "full"
    FAILED = "failed"
    STOPPED = "stopped"


class Event(Enum):
    """What happened to a shard."""

    OPENED = "opened"
    NO_ROOM = "no room"
    ROOM = "room"
    FAILURE = "failure"
    CLOSED = "closed"


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.OPENING, Event.OPENED): State.SERVING,
    (State.OPENING, Event.FAILURE): State.FAILED,
    (State.SERVING, Event.NO_ROOM): State.FULL,
    (State.SERVING, Event.FAILURE): State.FAILED,
    (State.SERVING, Event.CLOSED): State.STOPPED,
    (State.FULL, Event.NO_ROOM): State.FULL,
    (State.FULL, Event.ROOM): State.SERVING,
    (State.FULL, Event.FAILURE): State.FAILED,
    (State.FULL, Event.CLOSED): State.STOPPED,
    (State.FAILED, Event.NO_ROOM): State.FAILED,
    (State.FAILED, Event.FAILURE): State.FAILED,
    (State.FAILED, Event.CLOSED): State.STOPPED,
    (State.STOPPED, Event.FAILURE): State.STOPPED,
    (State.STOPPED, Event.CLOSED): State.STOPPED,
}
