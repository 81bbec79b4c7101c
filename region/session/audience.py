"""Which class of identity may make which request: one table. Pure.

Identities come in five classes that can open sessions. The table says, per request, which of them may make it at all, and
whether the caller also needs some right of this region. It is consulted once, before any part of the request is carried out or
stored; the request's handler then checks rights on names, grants and operators' permissions.

Invariants: a request without a row is nobody's; a class without a mark has no answer but the refusal; a bridge of another region
has exactly the rows of `FOREIGN_BRIDGE`: records under a grant, signed documents, checkpoints and their cosignatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from felix.errors import Code, RequestError
from felix.messages import (
    AlterStream,
    AlterSubscription,
    Cosign,
    CreateStream,
    CreateSubscription,
    DeleteNamespace,
    DeleteQuota,
    DeleteStream,
    DeleteSubscription,
    DescribeMesh,
    DescribeRegion,
    DescribeStream,
    DescribeSubscription,
    DescribeTraffic,
    DestroyRetiredRoots,
    DrainBroker,
    ExplainCrossing,
    GetCheckpoint,
    GetDataKey,
    GetLinkSecret,
    GetStreamStatement,
    ListDocuments,
    ListKeys,
    ListLinks,
    ListNamespaces,
    ListQuotas,
    ListRights,
    ListStreams,
    ListSubscriptions,
    Message,
    OpenCache,
    OpenConsumer,
    OpenIngest,
    OpenPublisher,
    OpenQueue,
    OpenRelay,
    OpenTransactions,
    PutCosignature,
    PutDocument,
    PutNamespace,
    PutQuota,
    PutRights,
    RebalanceShards,
    RecoverShard,
    RedriveSubscription,
    RenewIdentity,
    ReportLinks,
    RetireBroker,
    RotateKeys,
    SeekSubscription,
    StopRebalancing,
    Subscribe,
    Unsubscribe,
    WatchCache,
    WitnessedSize,
)
from felix.names import SpiffeId


class Audience(StrEnum):
    """Classes of identities, as a region sees them. An identity in none of them gets no session."""

    CLIENT = "client"
    OPERATOR = "operator"
    BROKER = "broker"
    """holds no session in this version: it asks nothing"""
    BRIDGE = "bridge"
    """a bridge of this region: it takes records out"""
    FOREIGN_BRIDGE = "bridge of another region"
    """it brings records in"""


class Row(NamedTuple):
    """Who may ask one request. `by_right`: only with some right in this region, whatever it is."""

    audiences: frozenset[Audience]
    by_right: bool = False


_PEOPLE: Final = frozenset({Audience.CLIENT, Audience.OPERATOR})
"""Applications and operators: rights on names decide, and the right to operate."""
_SOURCE: Final = frozenset({Audience.BRIDGE})
_READERS: Final = _PEOPLE | _SOURCE
_BORDER: Final = frozenset({Audience.OPERATOR, Audience.CLIENT, Audience.BRIDGE, Audience.FOREIGN_BRIDGE})
"""What two regions need of each other; an operator's hand may carry it, too."""

AUDIENCES: Final[Mapping[type[Message], Row]] = {
    CreateStream: Row(_PEOPLE),
    AlterStream: Row(_PEOPLE),
    DeleteStream: Row(_PEOPLE),
    DescribeStream: Row(_READERS),
    ListStreams: Row(_READERS),
    OpenPublisher: Row(_PEOPLE),
    Subscribe: Row(_READERS),
    Unsubscribe: Row(_READERS),
    DescribeTraffic: Row(_PEOPLE),
    DescribeMesh: Row(_PEOPLE),
    ExplainCrossing: Row(_PEOPLE),
    PutRights: Row(_PEOPLE),
    ListRights: Row(_PEOPLE),
    PutQuota: Row(_PEOPLE),
    DeleteQuota: Row(_PEOPLE),
    ListQuotas: Row(_READERS),
    PutNamespace: Row(_PEOPLE),
    DeleteNamespace: Row(_PEOPLE),
    ListNamespaces: Row(_PEOPLE),
    ListKeys: Row(_PEOPLE),
    RotateKeys: Row(_PEOPLE),
    DestroyRetiredRoots: Row(_PEOPLE),
    DrainBroker: Row(_PEOPLE),
    RebalanceShards: Row(_PEOPLE),
    StopRebalancing: Row(_PEOPLE),
    RecoverShard: Row(_PEOPLE),
    RetireBroker: Row(_PEOPLE),
    DescribeRegion: Row(_PEOPLE),
    ListLinks: Row(_PEOPLE),
    CreateSubscription: Row(_PEOPLE),
    AlterSubscription: Row(_PEOPLE),
    DescribeSubscription: Row(_PEOPLE),
    ListSubscriptions: Row(_PEOPLE),
    SeekSubscription: Row(_PEOPLE),
    RedriveSubscription: Row(_PEOPLE),
    DeleteSubscription: Row(_PEOPLE),
    OpenConsumer: Row(_PEOPLE, by_right=True),
    OpenCache: Row(_PEOPLE, by_right=True),
    WatchCache: Row(_PEOPLE, by_right=True),
    OpenQueue: Row(_PEOPLE, by_right=True),
    OpenTransactions: Row(_PEOPLE, by_right=True),
    OpenRelay: Row(_PEOPLE, by_right=True),
    RenewIdentity: Row(_READERS),
    ReportLinks: Row(_SOURCE),
    GetDataKey: Row(_SOURCE),
    GetLinkSecret: Row(_SOURCE),
    GetStreamStatement: Row(_SOURCE),
    OpenIngest: Row(frozenset({Audience.FOREIGN_BRIDGE})),
    PutDocument: Row(_BORDER),
    ListDocuments: Row(_BORDER),
    Cosign: Row(_BORDER),
    WitnessedSize: Row(_BORDER),
    GetCheckpoint: Row(_BORDER),
    PutCosignature: Row(_BORDER),
}
"""The whole list; docs/bridges.md prints it, and a test holds the two together."""

_NOBODY: Final = Row(frozenset())


def audience_of(identity: SpiffeId, region: str) -> Audience | None:
    """The class of an identity in this region; None for one that is in none of them."""
    if identity.region != region:
        return Audience.FOREIGN_BRIDGE if identity.kind == "bridge" else None
    try:
        return Audience(identity.kind)
    except ValueError:
        return None


def has_audience(identity: SpiffeId, request: type[Message], region: str) -> bool:
    """Whether the identity's class may ask this, with some right or without."""
    return audience_of(identity, region) in AUDIENCES.get(request, _NOBODY).audiences


def request_name(request: type[Message]) -> str:
    """A request's name on the wire."""
    return str(request.__struct_config__.tag)


def require_audience(identity: SpiffeId, request: type[Message], region: str, *, has_right: bool) -> None:
    """Raises RequestError(FORBIDDEN) unless the identity's class may ask this, and RequestError(NOT_FOUND_OR_FORBIDDEN), as for
    a name that it may not use, where it needs a right. `has_right`: it has some right here."""
    row, audience = AUDIENCES.get(request, _NOBODY), audience_of(identity, region)
    if audience is None or audience not in row.audiences:
        raise RequestError(
            f"A {audience or 'stranger'} may not ask for {request_name(request)}.",
            code=Code.FORBIDDEN,
            hint="docs/bridges.md has the table of who may ask what.",
        )
    if row.by_right and not has_right:
        raise RequestError(
            f"{identity} has no right in {region}, and {request_name(request)} is for those who have one.",
            code=Code.NOT_FOUND_OR_FORBIDDEN,
            hint="Have an operator give it one: felix identity allow.",
        )
