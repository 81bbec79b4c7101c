"""What the parts of a link share: with all links of its agent, and from one session to the next. Values; callers: the link's parts and the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from audit.errors import AuditUnavailableError
from audit.leaf import EncodedLeaf, Leaf
from audit.position import LinkShard
from audit.trail import Trail
from bridge.config import LimitsConfig
from bridge.endpoint import RegionEndpoint
from bridge.failpoint import Failpoints
from bridge.ledger import Ledger
from bridge.link import LinkEvent
from bridge.places import Places, Turns
from bridge.plan import PlannedLink
from bridge.tracing import CrossingTracing
from felix.errors import CorruptionError, FelixError
from felix.identity import Identity
from felix.messages import CutState, ShardState, StreamState
from felix.names import SpiffeId
from felix.rate import TokenBucket
from felix.runtime.port import Runtime
from keys.hybrid import HybridKeyPair

LARGE_BYTES: Final = 256 << 10
"""Bytes of an uncompressed batch above which it is a large one. By rules that make long texts of short values it may become 13 times as long."""
LARGE_AT_ONCE: Final = 2
"""Large batches that all links of an agent work on at once: 52 MB each, and as much again while it is encoded."""

STEP_S: Final = 0.005
"""How long the work on batches, all links' together, may hold the event loop before everybody else has their turn."""


@dataclass(slots=True)
class LinkContext:
    """What all links of an agent share. `trail` is None until the egress log is open."""

    bridge: SpiffeId
    identity: Identity
    handoff: HybridKeyPair
    source: RegionEndpoint
    limits: LimitsConfig
    failpoints: Failpoints
    runtime: Runtime
    log_grant: Callable[[PlannedLink], Awaitable[None]]
    check_history: Callable[[RegionEndpoint], Awaitable[None]]
    check_receipts: Callable[[RegionEndpoint], Awaitable[None]]
    require_allowed: Callable[[PlannedLink, int], None]
    tracing: CrossingTracing | None = None
    held: Callable[[], str] = lambda: ""
    """why nothing new may cross though the grants allow it: no quorum of witnesses"""
    notice: Callable[[], str] = lambda: ""
    """what people should know besides: witnesses that are behind"""
    trail: Trail | None = None
    trail_reason: str = "The egress log is not open yet."
    ledger: Ledger = field(default_factory=Ledger)
    derived: Mapping[bytes, bytes] = field(default_factory=dict)
    """of the words in the egress log on where links go on: by the incarnation that each begins the one that it ends (bridge.said)"""
    rates: dict[str, TokenBucket | None] = field(default_factory=dict)
    brought_more: dict[LinkShard, CorruptionError] = field(default_factory=dict)
    """of links of which the destination says that this bridge brought more than the egress log announced"""
    large: Places = field(default_factory=lambda: Places(LARGE_AT_ONCE))
    turns: Turns = field(default_factory=lambda: Turns(STEP_S))
    """to work on batches"""

    def clock_ms(self) -> int:
        return self.runtime.clock.now_ms()

    def monotonic_ms(self) -> int:
        return int(self.runtime.clock.monotonic() * 1000)

    def require_whole(self, region: str, link: LinkShard | None = None) -> None:
        """Raises CorruptionError(ROLLED_BACK) where the region says so of another link: nothing crosses to it by any, and nothing is cosigned there any more, so that the log's
        newest copy can be put back. `link`: the one that asks by itself."""
        if link not in self.brought_more:
            for other, error in self.brought_more.items():
                if other.destination_region == region:
                    raise CorruptionError(error.sentence, code=error.code, hint=error.hint)

    def open_trail(self) -> Trail:
        """Raises AuditUnavailableError where there is none: then nothing crosses."""
        if self.trail is None:
            raise AuditUnavailableError(self.trail_reason, retry_after_ms=500)
        return self.trail

    def append(
        self, leaves: Sequence[Leaf | EncodedLeaf], done: Callable[[int, FelixError | None], None]
    ) -> None:
        """Accept leaves; `done` is called on the loop once they are durable. Raises AuditUnavailableError."""
        self.open_trail().append_nowait(leaves, done, asyncio.get_running_loop())
        for leaf in leaves:
            self.ledger.apply(leaf.header)


@dataclass(slots=True)
class LinkStats:
    """What a link counts; offsets in records, times in ms; -1: not known yet."""

    crossed: int = 0
    withheld: int = 0
    filtered: int = 0
    gaps: int = 0
    envelopes: int = 0
    resent: int = 0
    sessions: int = 0
    denied: int = 0
    position: int = -1
    high_watermark: int = -1
    lag_bytes: int = -1
    answered_append_ms: int = 0
    stands_by: bool = False
    """whether another bridge carries the shard, by what the destination said last"""


@dataclass(slots=True)
class LinkMemory:
    """What a link remembers from one session to the next, beside what stands in the egress log."""

    stats: LinkStats = field(default_factory=LinkStats)
    alarm: str = ""
    truncation: str = ""
    """what the source or the destination no longer has, until the link is opened behind it"""
    cut: CutState | None = None
    """What an operator is to decide about, while the link is truncated."""
    incarnation: bytes = b""
    """that the link crosses under, or crossed when it last opened"""
    not_there: set[bytes] = field(default_factory=set)
    """incarnations by which the destination does not go on: of two words that end one, another bridge may have carried under either"""
    high: dict[bytes, int] = field(default_factory=dict)
    """the source's newest high watermarks, by incarnation"""
    ask_again: bool = True
    """whether the destination may still be asked for receipts of what landed"""
    kept: int = 0
    """records that stayed since one crossed"""
    kept_for: str = ""
    """why the newest of them did"""


class Link(Protocol):
    """The link, as its session sees it."""

    row: PlannedLink
    """the newest row of the plan; it may change at any time"""
    reason: str

    @property
    def link_shard(self) -> LinkShard:
        """The link's name in the egress log."""

    @property
    def is_leaving(self) -> bool:
        """Whether what is on the way is to be finished, and nothing begun."""

    def take_shard(self, stream: StreamState, state: ShardState) -> None:
        """What the source says of the shard."""

    def step(self, event: LinkEvent, reason: str, code: int = 0) -> None:
        """This happened, and what is to be said of it."""

    def crossed(self) -> None:
        """A receipt held."""
