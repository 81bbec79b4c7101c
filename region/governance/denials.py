"""Refusals that concern residency, and the DENY leaves that record them.

A peer that keeps asking cannot fill the log: the same refusal is one leaf in a while, and leaves about one peer, and about one other
region, are bounded; the next leaf says how many were left out. What stands in a leaf is what this region knows itself; a text that a
peer of another region chose stands there as its hash. Callers: region.governance.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from audit.leaf import Header, Kind, Leaf, Side
from felix.errors import FelixError, RequestError
from felix.names import SpiffeId, StreamName
from policy.grant import GrantBook, GrantError
from region.broker import Broker
from region.evidence.audit_port import AuditPort

log = logging.getLogger("felix.region.governance")

DENY_QUIET_MS: Final = 10_000
"""The same refusal to the same peer is one leaf in this time."""
DENY_LEAVES_MAX: Final = 20
"""Leaves about one peer in that time, however its refusals differ: nobody fills the log by asking for made-up grants."""
DENY_REGION_LEAVES_MAX: Final = 100
"""The same about all peers of one other region together: it may have as many identities as it likes."""
DENIED_PEERS_MAX: Final = 10_000
"""Peers whose refusals are remembered; then the one that was refused first is forgotten."""
SENTENCE_CHARS_MAX: Final = 1_900
"""Of a refusal in its leaf, what was left out besides."""
UNKNOWN_REGION: Final = "(unknown)"
"""The destination of an attempt without a grant."""


@dataclass(slots=True)
class _Denied:
    """Refusals of one peer since `begun_ms`: those that have a leaf, and the number of those that have none."""

    begun_ms: int
    written: set[tuple[str, str, str, int]] = field(default_factory=set)
    left_out: int = 0

    def is_due(
        self, refusal: tuple[str, str, str, int], now_ms: int, leaves_max: int = DENY_LEAVES_MAX
    ) -> bool:
        """True where this refusal gets a leaf."""
        # A wall clock that was set back since must not keep refusals out of the log until it is there again.
        if not 0 <= now_ms - self.begun_ms < DENY_QUIET_MS:
            self.begun_ms = now_ms
            self.written.clear()
        if refusal in self.written or len(self.written) >= leaves_max:
            self.left_out += 1
            return False
        self.written.add(refusal)
        return True


class Denials:
    """One per broker. `book` and `bundles` give what governance judges by now; `own` is the broker's region."""

    def __init__(
        self,
        broker: Broker,
        audit: AuditPort,
        own: str,
        book: Callable[[], GrantBook],
        bundles: Callable[[], Mapping[str, object]],
    ) -> None:
        self._broker, self._audit, self._own = broker, audit, own
        self._book, self._bundles = book, bundles
        self._peers: dict[SpiffeId, _Denied] = {}
        self._regions: dict[str, _Denied] = {}

    def denied(
        self,
        error: FelixError,
        *,
        actor: SpiffeId,
        action: str,
        stream: str = "",
        grant_id: str = "",
        from_region: str = "",
        to_region: str = "",
    ) -> FelixError:
        """Hand a DENY leaf for this refusal to the audit log, and give the refusal back.

        One leaf per actor, action, stream, grant and code in DENY_QUIET_MS, DENY_LEAVES_MAX of them per actor, and
        DENY_REGION_LEAVES_MAX of them for all of another region: a peer that keeps asking cannot fill the log, and its next
        leaf says how many refusals were left out.
        """
        now = self._broker.clock_ms()
        held = self._peers.get(actor)
        if held is None:
            if len(self._peers) >= DENIED_PEERS_MAX:
                del self._peers[next(iter(self._peers))]
            held = self._peers[actor] = _Denied(now)
        refusal = (action, stream, grant_id, int(error.code))
        if not held.is_due(refusal, now):
            return error
        if actor.region != self._own:
            theirs = self._regions.setdefault(actor.region, _Denied(now))
            if not theirs.is_due((f"{actor} {action}", *refusal[1:]), now, DENY_REGION_LEAVES_MAX):
                held.left_out += 1
                return error
        more = f" ({held.left_out} more refusals of this peer since its last entry.)" if held.left_out else ""
        held.left_out = 0
        own = self._own
        said = self._known_names(stream, grant_id, from_region, to_region)
        # The sentence may quote what was asked for; a peer of another region chooses more than these names.
        quotable = said == (stream, grant_id, from_region, to_region) and (
            actor.region == own or isinstance(error, GrantError)
        )
        sentence = error.sentence if quotable else f"It was refused with {error.code.name}."
        stream, grant_id, from_region, to_region = said
        header = Header(
            kind=Kind.DENY,
            side=Side.INGRESS if from_region else Side.EGRESS,
            time_ms=now,
            source_region=from_region or own,
            destination_region=own if from_region else to_region or UNKNOWN_REGION,
            stream=stream,
            grant_id=grant_id,
            actor=str(actor),
            action=action,
            rule=error.code.name.lower().replace("_", "-"),
            code=int(error.code),
            sentence=sentence[:SENTENCE_CHARS_MAX] + more,
        )
        self._write(Leaf(header))
        return error

    def _known_names(self, stream: str, grant_id: str, from_region: str, to_region: str) -> tuple[str, ...]:
        """The names of an attempt as a leaf may hold them: a name that this region does not know itself is replaced by its hash,
        because otherwise the caller could choose a text that is kept for ever.
        """
        try:
            view = self._book().get(grant_id, self._broker.clock_ms())
        except GrantError:
            view = None
        granted = set()
        if view is not None and view.export is not None:
            granted.add(view.export.terms.stream)
        if view is not None and view.accepted is not None:
            granted.add(view.accepted.stream)
        return (
            stream if stream in granted or self._hosts(stream) else _hashed(stream),
            grant_id if view is not None else _hashed(grant_id),
            from_region if from_region in self._bundles() else _hashed(from_region),
            to_region if to_region in self._bundles() else _hashed(to_region),
        )

    def _hosts(self, stream: str) -> bool:
        try:
            return self._broker.streams.get(StreamName.parse(stream)) is not None
        except RequestError:
            return False

    def _write(self, leaf: Leaf) -> None:
        """Append a leaf that nobody waits for. A log that takes no more is already an alarm of its own."""
        try:
            self._audit.append_nowait([leaf], lambda index, error: None)
        except FelixError as error:
            log.error("the audit log took no %s leaf: %s", leaf.header.kind.name, error)


def _hashed(text: str) -> str:
    """What stands in a leaf for a text that a peer chose; empty for none."""
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}" if text else ""
