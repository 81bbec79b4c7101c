"""What the coordinator of transactions asks of the leaders of the streams that they concern, and what those ask of it (region.copies.peer_requests).

Every request may be asked again. `incarnation` is the catalog's, in hex; `term` the epoch in which the coordinator leads.
"""

from __future__ import annotations

import msgspec

from region.copies.peer_requests import PeerRequest
from region.transactions.state import Part


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A batch for one shard, and how many of its transaction stand before it there."""

    part: Part
    before: int


class Acknowledged(msgspec.Struct, frozen=True, array_like=True):
    """What a view applies."""

    view: str
    body: bytes


class CheckLane(PeerRequest, frozen=True, tag="check_lane"):
    """Whether what is about to be committed can be appended to these shards: what is refused here is refused before the decision."""

    stream: str
    incarnation: str
    shards: list[int]


class LaneChecked(msgspec.Struct, frozen=True, array_like=True):
    """`newest`: the last transaction that one of the shards knows."""

    newest: int


class ApplyLane(PeerRequest, frozen=True, tag="apply_lane"):
    """Append, and hide until `ShowLane`; settle what is acknowledged. Committed, so not to be refused."""

    stream: str
    incarnation: str
    term: int
    number: int
    """the last transaction of the group"""
    parts: list[Placed]
    acknowledged: list[Acknowledged]


class LaneApplied(msgspec.Struct, frozen=True, array_like=True):
    """Offsets of each part, see `state.Applied.offsets`."""

    offsets: list[tuple[int, ...]]


class ShowLane(PeerRequest, frozen=True, tag="show_lane"):
    """Show what was applied up to a transaction."""

    stream: str
    incarnation: str
    number: int


class LaneShown(msgspec.Struct, frozen=True, array_like=True):
    pass


class PrepareAcknowledgements(PeerRequest, frozen=True, tag="prepare_acknowledgements"):
    """See to it that they can be applied; `ApplyLane` or `AbandonAcknowledgements` follows. `transaction`: its id."""

    stream: str
    view: str
    owner: str
    body: bytes
    transaction: bytes


class Prepared(msgspec.Struct, frozen=True, array_like=True):
    """What is to be applied, and the epoch in which it was prepared: a later leader knows nothing of it."""

    body: bytes
    epoch: int


class AbandonAcknowledgements(PeerRequest, frozen=True, tag="abandon_acknowledgements"):
    """They were not committed after all."""

    view: str
    body: bytes


class Abandoned(msgspec.Struct, frozen=True, array_like=True):
    pass


class AskDecision(PeerRequest, frozen=True, tag="ask_decision"):
    """Of the coordinator: whether a transaction is committed, or may be yet."""

    transaction: bytes


class Decision(msgspec.Struct, frozen=True, array_like=True):
    may_be: bool
