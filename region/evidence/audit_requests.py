"""What brokers ask each other about the region's audit log, and answer: messages of `region.copies.peer_requests`. Values only.

The side that asks is `region.evidence.remote_audit`, the one that answers `region.evidence.audit_server`; `StreamsPassed` goes the other way, from the broker with the log
(`region.evidence.home_leaves`) to whoever leads a stream.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from audit.crossed import Page
from audit.position import ShardName
from felix.messages import LOGGED_UNTOLD
from policy.truncation import Live
from region.copies.peer_requests import PeerRequest
from region.evidence.arrival_index import Place
from region.evidence.audit_port import FoundAck

AGAIN_S: Final = 0.2
"""How soon is tried again what was refused, lost, or not passed yet."""
DIGESTS_MAX: Final = 1_000
"""Documents of one question."""
STREAMS_MAX: Final = 1_000
"""Streams of one question."""

_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class AppendLeaves(PeerRequest, frozen=True, tag="append_leaves"):
    """Groups of leaves, each whole or not at all. `since`: none of them stands below this index. `again`: they may have been asked for before."""

    groups: list[list[bytes]]
    since: int
    again: bool


class LeavesAppended(msgspec.Struct, frozen=True, array_like=True):
    """The index of each group's first leaf; which groups were not there before; the log's size; the bytes that arrived under each grant of these
    groups, whoever brought them."""

    indexes: list[int]
    missing: list[int]
    size: int
    charged: dict[str, int] = {}


class FindAck(PeerRequest, frozen=True, tag="find_ack"):
    """Which ACK leaf begins at a source offset (region.evidence.arrival_index.Place)."""

    place: Place


class AckFound(msgspec.Struct, frozen=True, array_like=True):
    """`found` is None where there is none."""

    found: FoundAck | None


class ArrivedBelow(PeerRequest, frozen=True, tag="arrived_below"):
    """Below which source offset a shard arrived under an incarnation."""

    bridge: str
    name: ShardName
    incarnation: bytes


class CrossedBefore(PeerRequest, frozen=True, tag="crossed_before"):
    """What arrived of a shard before the newest of `lives` began, from a chunk of offsets on: a page of it."""

    bridge: str
    name: ShardName
    lives: list[Live]
    chunk: int


class OffsetsTold(msgspec.Struct, frozen=True, array_like=True):
    page: Page


class ChargedBytes(PeerRequest, frozen=True, tag="charged_bytes"):
    """Bytes that arrived under a grant."""

    grant: str


class NumberTold(msgspec.Struct, frozen=True, array_like=True):
    number: int
    brought: int = LOGGED_UNTOLD
    """of what arrived below an offset, how far the ranges of the bridge that asks go; a broker of before does not say"""


class AwaitLeaves(PeerRequest, frozen=True, tag="await_leaves"):
    """Which of these documents have their leaf. `passed`: what each of them stops, and was taken before at the asker, has its leaves; then the
    answer waits for FOLLOW_S at most."""

    digests: Annotated[list[_Digest], msgspec.Meta(max_length=DIGESTS_MAX)]
    passed: bool


class StreamsPassed(PeerRequest, frozen=True, tag="streams_passed"):
    """Into which of these streams, of several copies each, nothing is on its way any more that a document stops, as who leads them says."""

    digest: _Digest
    streams: Annotated[list[str], msgspec.Meta(max_length=STREAMS_MAX)]


class PassedTold(msgspec.Struct, frozen=True, array_like=True):
    """`known`: whether the document is judged by there; `streams`: those that are served there, all that arrived before with its leaf."""

    known: bool
    streams: list[str]


class LeavesStand(msgspec.Struct, frozen=True, array_like=True):
    """The documents that have their leaf, and those whose leaf is being written: it may stand already. `leaves`: by document the index of its leaf,
    of those that forbid or lift; none by a broker of an earlier release."""

    digests: list[bytes]
    writing: list[bytes] = []
    leaves: dict[bytes, int] = {}
