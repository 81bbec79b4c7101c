"""Origins: what the audit logs and the witness of a region are called. Pure.

The name says whose it is: everything of a region is called `<region>.<mesh>/…`, and whoever reads a name asks that
region's bundle alone for the key (audit.trust).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from audit.leaf import Header, Kind, Side
from felix.errors import RequestError, TamperError
from felix.names import SpiffeId, parse_region, trust_domain

_ONE_REGION: Final = frozenset((Kind.KEY, Kind.SEAL, Kind.UNCLEAN))
"""Kinds that are about the log's own region alone."""


def region_origin(region: str, mesh: str) -> str:
    """The log that a region's brokers keep: ingress, denials, grants, policies, keys."""
    return f"{trust_domain(region, mesh)}/audit"


def egress_origin(region: str, mesh: str, bridge: str) -> str:
    """The egress log of one bridge of the region."""
    return f"{trust_domain(region, mesh)}/bridge/{bridge}"


def witness_name(region: str, mesh: str) -> str:
    """The name in the region's cosignatures."""
    return f"{trust_domain(region, mesh)}/witness"


class Origin(NamedTuple):
    """An origin, taken apart."""

    region: str
    mesh: str
    bridge: SpiffeId | None
    """whose egress log it is; None: the region's own log"""

    @property
    def text(self) -> str:
        """As it was parsed from."""
        if self.bridge is None:
            return region_origin(self.region, self.mesh)
        return egress_origin(self.region, self.mesh, self.bridge.name)

    def misplaced(self, header: Header) -> str:
        """Why a leaf has no place in this log, whatever else it says; or an empty string.

        A log speaks for its own region: as the source on its egress side, as the destination on its ingress side. A
        bridge's log is about that bridge's crossings alone, and they stand nowhere else. A region's keys are its own
        business: they stand in its own log, and concern no other region; so does what was exported from a log, and what its brokers gave up.
        """
        kind, egress = header.kind, header.side is Side.EGRESS
        crossing = kind in (Kind.INTENT, Kind.WITHHELD, Kind.GAP) or (kind is Kind.ACK and egress)
        if self.bridge is None and crossing:
            return f"{kind.name} of a bridge stands in the log of a region."
        other = not egress or header.bridge != str(self.bridge)
        if self.bridge is not None and (kind is Kind.ACK or crossing) and other:
            return f"{kind.name} of {header.bridge or 'no bridge'} stands in the log of {self.bridge}."
        if kind in (Kind.KEY, Kind.UNCLEAN) and self.bridge is not None:
            what = "keys" if kind is Kind.KEY else "unclean elections"
            return f"{kind.name} stands in the log of {self.bridge}; {what} stand in the log of their region."
        if crossing or kind in (Kind.ACK, Kind.DENY, *_ONE_REGION):
            own = header.source_region if egress else header.destination_region
            if own != self.region:
                return f"{kind.name} speaks for {own} as its own region in a log of {self.region}."
        if kind in _ONE_REGION and header.source_region != header.destination_region:
            return f"{kind.name} is between {header.source_region} and {header.destination_region}; it is one region's."
        return ""

    def require_place(self, header: Header, what: str) -> None:
        """Raises TamperError where this leaf is not this log's to say. `what`: which one, as the sentence names it."""
        if mistake := self.misplaced(header):
            raise TamperError(f"{what} is not that log's to say: {mistake}")

    @classmethod
    def parse(cls, origin: str) -> Origin:
        """Raises TamperError where no log of a region is called that."""
        domain, _, rest = origin.partition("/")
        parts = domain.split(".")
        try:
            if len(parts) == 2:
                region, mesh = map(parse_region, parts)
                if rest == "audit":
                    return cls(region, mesh, None)
                kind, _, name = rest.partition("/")
                if kind == "bridge":
                    return cls(region, mesh, SpiffeId(region, mesh, "bridge", name))
        except RequestError:
            pass
        raise TamperError(
            f"{origin[:200]!r} is not what an audit log of a region is called: expected <region>.<mesh>/audit or "
            "<region>.<mesh>/bridge/<name>."
        )
