"""Messages: the MessagePack bodies of control frames, as typed structs.

One union per frame type; `decode_*` validates types, lengths are bounded by the frame's limit (felix.frames) and by the field
limits named here. Unknown fields are ignored, so that a newer peer may say more; an unknown kind of message is a protocol error.
Bodies of signed documents are opaque bytes here: the code that acts on them verifies them (policy/, keys/, audit/).
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final, Generic, TypeVar, Union, get_args

import msgspec

from felix.errors import (
    Code,
    FelixError,
    NotLeaderError,
    OffsetMismatchError,
    ProtocolError,
    RequestError,
    error_for,
)
from felix.frames import CONTROL_BYTES_MAX, FrameType, encode_frame
from felix.quota import QuotaLimits
from felix.settings import (
    NO_VIEWS,
    CacheChange,
    Compaction,
    Deduplication,
    Durability,
    NamespaceSettings,
    Offload,
    QueueChange,
    Retention,
    SubscriptionChange,
    SubscriptionSettings,
    Views,
)
from felix.visible import visible

PROTOCOL_VERSIONS: Final = (2,)
"""Version 1 (release 0.1) is not spoken: its proof of identity was bound to a name that all brokers of a region share."""
PAGE_MAX: Final = 500
"""Entries in one page of a listing."""

NAME_CHARS_MAX: Final = 255
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Page = Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
ShardCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
"""As a broker says it: a client keeps something for each shard, and asks of each. A stream has 256 at most."""
GrantName = Annotated[str, msgspec.Meta(pattern=r"\Ag-[a-z2-7]{16}\Z")]
"""A grant's id: what does not look like one is no request, and nothing of it is kept."""
OptionalGrant = Annotated[str, msgspec.Meta(pattern=r"\A(g-[a-z2-7]{16})?\Z")]
RegionName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]
Revision = Annotated[bytes, msgspec.Meta(max_length=64)]
ClientId = Annotated[bytes, msgspec.Meta(max_length=16)]
Correlated = Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)]


class Message(msgspec.Struct, frozen=True, tag_field="is", omit_defaults=True):
    """Base of all messages; the field `is` says which."""

    def _repr_html_(self) -> str:
        """For notebooks."""
        from felix.notebook import html_of  # here: only a notebook asks

        return html_of(self)


AnswerT = TypeVar("AnswerT", bound=Message)


class Request(Message, Generic[AnswerT], frozen=True):
    """Base of all requests; `AnswerT` is the message that answers it. Who may ask stands in region/session/audience.py."""


class Repeatable(Request[AnswerT], Generic[AnswerT], frozen=True):
    """A request that may be carried out twice without harm: the client asks again where the answer was lost."""


# -- handshake, on the control stream ------------------------------------------------------------------


class ClientHello(Message, frozen=True, tag="client_hello"):
    """First frame of a session: what the client speaks, which region it means to reach, and 32 random bytes that make its
    proof one of this session alone. (`nonce` is empty in version 1, which is refused by its version.) `client`: the same in all sessions of one
    client, so that one with sessions at several brokers counts once where clients are limited; random, empty from who counts with each session."""

    versions: list[int]
    region: Name
    nonce: bytes = b""
    software: Name = ""
    features: list[Name] = []
    client: ClientId = b""


class Challenge(Message, frozen=True, tag="challenge"):
    """The broker that answers, and the nonce that the client signs."""

    version: int
    region: Name
    mesh: Name
    broker: Name
    nonce: bytes
    time_ms: int
    features: list[Name] = []


class Prove(Message, frozen=True, tag="prove"):
    """The client's identity: a certificate chain (PEM, leaf first) and a signature (felix.identity)."""

    chain_pem: bytes
    signature: bytes


class Limits(Message, frozen=True, tag="limits"):
    """This broker's limits for one session."""

    batch_bytes_max: int
    subscriptions_max: int
    streams_max: int
    requests_max: int
    relays_max: int = 0
    """connections to other brokers that it passes on for this identity at once; 0: none"""


class Welcome(Message, frozen=True, tag="welcome"):
    """The session stands. `publish_credit_bytes` is the first limit (see frames.Credit)."""

    session: Name
    identity: Name
    publish_credit_bytes: Natural
    limits: Limits
    rights: list[Text] = []


Handshake = ClientHello | Challenge | Prove | Welcome


# -- error and goodbye ---------------------------------------------------------------------------------


class ErrorBody(Message, frozen=True, tag="error"):
    """An answer of refusal; with correlation 0 it ends the session. `log_end` only with OFFSET_MISMATCH; the fields after it only with
    NOT_LEADER (felix.errors.NotLeaderError)."""

    code: int
    sentence: Text
    hint: Text = ""
    retry_after_ms: int | None = None
    log_end: int = -1
    stream: Name = ""
    leader: Name = ""
    address: Name = ""
    epoch: int = 0


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The broker is about to close: finish, and reconnect elsewhere or later."""

    reason: Text
    reconnect_after_ms: int = 0


# -- requests and answers, correlated ------------------------------------------------------------------


class CreateStream(Request["StreamState"], frozen=True, tag="create_stream"):
    """`replicas`: copies of each shard on as many brokers, 0: as the region has it. `min_in_sync`: how many of them have a record before it is
    acknowledged, where the others are away; 0: a majority. `acks`: of several copies, `quorum`: a record is acknowledged once all that are in
    sync have it, or `leader`: once it is durable on the leader; then its failure may lose what the others did not have yet."""

    stream: Name
    shards: int = 1
    durability: Durability = Durability()
    retention: Retention = Retention()
    ring_bytes: int = 0
    views: Views = NO_VIEWS
    replicas: int = 0
    min_in_sync: int = 0
    acks: Name = "quorum"


class AlterStream(Request["StreamState"], frozen=True, tag="alter_stream"):
    """Changes settings of a stream while it serves. What is None stays; `remove` names capabilities to take away:
    compaction, deduplication, offload; `queue` and `cache` are of a stream that is one, and name what of them is to be another;
    `replicas` and `min_in_sync` are of a stream of several copies, which are made or dropped after the answer.
    `incarnation`, where given, must be the stream's. Answered with its state."""

    stream: Name
    incarnation: bytes = b""
    retention: Retention | None = None
    compaction: Compaction | None = None
    deduplication: Deduplication | None = None
    offload: Offload | None = None
    remove: list[Name] = []
    queue: QueueChange | None = None
    cache: CacheChange | None = None
    replicas: int | None = None
    min_in_sync: int | None = None


class DeleteStream(Request["Done"], frozen=True, tag="delete_stream"):
    """Deletes the stream and its records. `incarnation`, where given, must be the stream's."""

    stream: Name
    incarnation: bytes = b""


class DescribeStream(Repeatable["StreamState"], frozen=True, tag="describe_stream"):
    stream: Name


class ListStreams(Repeatable["StreamPage"], frozen=True, tag="list_streams"):
    """`brief`: without the state of shards, of which a stream may have 256."""

    prefix: Name = ""
    after: Name = ""
    limit: Page = 100
    brief: bool = False


class ShardState(Message, frozen=True, tag="shard"):
    """Offsets in records. `stopped` says why the shard does not serve, empty where it does. Of a region of several brokers, `leader`: the one
    that leads it; `replicas`: those that have copies; `in_sync`: those that have all that was acknowledged. Another broker than the leader
    does not know the offsets, and answers 0 for them and for `leader_epoch`, which is higher where a shard is led. `unclean`: the last epoch
    that began from a copy that may have lacked what was acknowledged; 0: none did. `size_bytes`: what is on the disk, or in memory;
    `store_only_bytes`: what is in a store and not there as well; `segments`: of both."""

    shard: int
    log_start: int
    high_watermark: int
    log_end: int
    leader_epoch: int
    size_bytes: int = 0
    segments: int = 0
    stopped: Text = ""
    leader: Name = ""
    replicas: list[Name] = []
    in_sync: list[Name] = []
    unclean: int = 0
    store_only_bytes: int = 0

    @property
    def is_told(self) -> bool:
        """Whether who answered serves the shard; if not, its offsets may be 0 and say nothing. Only where no leader is named, as in a region of one
        broker, an epoch of 0 is that of a log to which nothing was written yet."""
        return not self.stopped and (self.leader_epoch > 0 or not self.leader)


class StreamState(Message, frozen=True, tag="stream"):
    stream: Name
    incarnation: bytes
    shards: ShardCount
    durability: Durability
    retention: Retention
    ring_bytes: int
    created_ms: int
    state: list[ShardState] = []
    views: Views = NO_VIEWS
    replicas: int = 1
    min_in_sync: int = 0
    acks: Name = "quorum"


class StreamPage(Message, frozen=True, tag="stream_page"):
    streams: list[StreamState]
    more: bool = False


class OpenPublisher(Request["PublisherOpened"], frozen=True, tag="open_publisher"):
    """First frame of a publish stream. `acks` is `all` (what the stream's durability says) or `none`. `made_as`: what a stream
    is that this first use makes (its namespace allowing): empty for a plain one, or queue."""

    stream: Name
    acks: Name = "all"
    made_as: Name = ""


class PublisherOpened(Message, frozen=True, tag="publisher_opened"):
    """`in_flight`: how many batches of one shard may wait for their acknowledgement; brokers before 0.2 remember 32, and do not say."""

    shards: ShardCount
    incarnation: bytes
    in_flight: Natural = 31


class Start(Message, frozen=True, tag="start"):
    """`kind` is earliest, latest, offset (`value` in records) or time (`value` in ms since the epoch).

    `offsets`, where given, overrides it per shard: a resuming subscriber says where it stands; `epochs`, of these shards, the newest
    leader epochs of the batches before that, each with the offset from which on it read them: where this log parts below `offsets` from the one that it read, it
    begins there.
    """

    kind: Name = "latest"
    value: Natural = 0
    offsets: dict[int, int] = {}
    epochs: dict[int, list[tuple[int, int]]] = {}


class Subscribe(Request["Subscribed"], frozen=True, tag="subscribe"):
    """Asks for an event stream. `grant`, where given, asks for sealed batches under that export grant."""

    stream: Name
    start: Start = Start()
    shards: list[int] = []
    credit_bytes: Natural = 0
    incarnation: bytes = b""
    grant: OptionalGrant = ""


class Subscribed(Message, frozen=True, tag="subscribed"):
    """Also the first frame on the event stream itself, so that the client knows whose it is."""

    subscription: Correlated
    stream: Name
    incarnation: bytes
    starts: dict[int, int]


class Unsubscribe(Request["Done"], frozen=True, tag="unsubscribe"):
    subscription: Correlated


class PutRights(Repeatable["Done"], frozen=True, tag="put_rights"):
    """Replaces the rights of an identity; an empty list takes all of them away, at once. `held`: only where it has these so far, or what is asked for
    already; else CONFLICT."""

    identity: Name
    rights: list[Text]
    held: list[Text] | None = None


class ListRights(Repeatable["RightsPage"], frozen=True, tag="list_rights"):
    after: Name = ""
    limit: Page = 100


class RightsPage(Message, frozen=True, tag="rights_page"):
    rights: dict[str, list[str]]
    more: bool = False


class PutQuota(Repeatable["QuotaState"], frozen=True, tag="put_quota"):
    """Sets the limits that `limits` names, of a tenant or an identity (`scope`), and takes away those in `unset`; they count
    at once. An identity's name is its SPIFFE id."""

    scope: Name
    name: Name
    limits: QuotaLimits
    unset: list[Name] = []


class DeleteQuota(Request["Done"], frozen=True, tag="delete_quota"):
    """The region's defaults count from now on."""

    scope: Name
    name: Name


class ListQuotas(Repeatable["QuotaPage"], frozen=True, tag="list_quotas"):
    """Tenants and identities that have limits, or have used this broker lately; tenants first. `scope` and `name` narrow the
    list.
    """

    scope: Name = ""
    name: Name = ""
    skip: Natural = 0
    limit: Page = 100
    after: Text = ""


class QuotaState(Message, frozen=True, tag="quota"):
    """Limits and use of one tenant or identity at one broker: its own `limits`, what counts (`in_force`, 0 without bound), what
    is `used` (rates per second, as last measured), how long it was slowed down and how often refused, since the start."""

    scope: Name
    name: Name
    limits: QuotaLimits
    in_force: QuotaLimits
    used: dict[str, float] = {}
    throttled_ms: dict[str, int] = {}
    refused: dict[str, int] = {}


class QuotaPage(Message, frozen=True, tag="quota_page"):
    quotas: list[QuotaState]
    more: bool = False
    next: Text = ""


class Throttled(Message, frozen=True, tag="throttled"):
    """From the broker, under correlation 0: whose `limit` (of so many `per_second`) makes this session wait, and how long."""

    scope: Name
    name: Name
    limit: Name
    per_second: int
    wait_ms: int


class PutDocument(Request["Done"], frozen=True, tag="put_document"):
    """A signed document for the region: `kind` is export, import, standing, deny, policy or bundle."""

    kind: Name
    body: bytes


class ListDocuments(Repeatable["DocumentPage"], frozen=True, tag="list_documents"):
    """With `wait_ms` it is answered once the revision of all that the asker may list, of any kind, is not `known`, or after that
    time. A broker that knows neither field answers at once and gives no revision."""

    kind: Name
    after: Name = ""
    limit: Page = 100
    known: Revision = b""
    wait_ms: Natural = 0


class DocumentPage(Message, frozen=True, tag="document_page"):
    """`revision`: on the first page, what to wait for a change of."""

    documents: dict[str, bytes]
    more: bool = False
    revision: Revision = b""


class ListKeys(Repeatable["KeyPage"], frozen=True, tag="list_keys"):
    """`stream`, where given, narrows the list; `skip` keys of it were seen on earlier pages."""

    stream: Name = ""
    skip: Natural = 0
    limit: Page = 100
    after: Text = ""


class KeyState(Message, frozen=True, tag="key"):
    id: bytes
    level: Name
    state: Name
    created_ms: int
    stream: Name = ""
    shard: int = -1
    epoch: int = -1


class KeyPage(Message, frozen=True, tag="key_page"):
    keys: list[KeyState]
    more: bool = False
    next: Text = ""


class DrainBroker(Request["Done"], frozen=True, tag="drain_broker"):
    """Has the copies of one of several brokers moved to others, and places nothing more there; with `drain` false, no longer. Refused with CONFLICT where copies
    would have nowhere to go once the brokers of `beside` are drained, too; with `partly` they stay."""

    broker: Name
    drain: bool = True
    partly: bool = False
    beside: list[Name] = []


class RetireBroker(Request["Done"], frozen=True, tag="retire_broker"):
    """One of several brokers is gone for good: nothing waits for it any more. No shard may name it, and it may not be alive."""

    broker: Name


class RecoverShard(Request["Done"], frozen=True, tag="recover_shard"):
    """Has `broker` lead a shard that nobody may lead by rule, although its copy may lack what was committed. `lost`: the brokers whose copies
    are given up, all that are away and may have more than it, or would be cut; one that is alive and has more refuses it. `powered_off`: they surely run no more, so that none can still commit."""

    stream: Name
    shard: int
    broker: Name
    lost: list[Name] = []
    powered_off: bool = False


class RebalanceShards(Request["ShardMoves"], frozen=True, tag="rebalance_shards"):
    """Moves copies until each broker has its share. `dry_run`: only says what would move first. The controller answers it. `since`: what the answer to an
    earlier one gave as its `revision`."""

    dry_run: bool = False
    since: Natural = 0


class StopRebalancing(Repeatable["ShardMoves"], frozen=True, tag="stop_rebalancing"):
    """Ends what `rebalance_shards` began: what has not begun to move stays where it is, and what moves arrives. Any of several brokers answers it. `since`: as there."""

    since: Natural = 0


class ShardMove(Message, frozen=True, tag="shard_move"):
    """The brokers that have copies of a shard, the leader first, and those that are to have them."""

    stream: Name
    shard: int
    now: list[Name]
    then: list[Name]


class ShardMoves(Message, frozen=True, tag="shard_moves"):
    """`total`: how many shards are to move that do not yet; of them, `moves` are listed. `under_way`: shards that move. `unled`: shards that nobody can lead,
    which are in neither, and stay until somebody does. `moved`: shards whose move was seen to end after the revision `since`, each once. `revision`: of what
    this answer knows; 0 from a broker of an earlier release. `is_asked`: whether somebody's word to move copies stood as this was asked; also true from a broker
    of an earlier release, which does not say."""

    moves: list[ShardMove]
    total: int
    under_way: int = 0
    unled: int = 0
    moved: int = 0
    revision: int = 0
    is_asked: bool = True


class RotateKeys(Request["Done"], frozen=True, tag="rotate_keys"):
    """`level` is data or root; `stream`, where given, narrows a data rotation."""

    level: Name
    stream: Name = ""


class DestroyRetiredRoots(Request["Done"], frozen=True, tag="destroy_retired_roots"):
    """Destroys the root keys that rotations retired: what is wrapped under them in older copies and backups opens no more."""


class RenewIdentity(Repeatable["IdentityRenewed"], frozen=True, tag="renew_identity"):
    """Asks for the next certificate of the identity that this session is of. `csr` is a PKCS #10 request (RFC 2986, DER), signed with the key
    that is to be certified: it proves the new key, the session proves the old one. Names in it are not read."""

    csr: Annotated[bytes, msgspec.Meta(max_length=2048)]


class IdentityRenewed(Message, frozen=True, tag="identity_renewed"):
    """The certificate chain, PEM, leaf first. The old certificate holds as long as it says."""

    chain_pem: bytes


class DescribeRegion(Repeatable["RegionState"], frozen=True, tag="describe_region"):
    pass


class ExpiryState(Message, frozen=True, tag="expiry"):
    """A certificate in the last third of its life: an identity's by its SPIFFE id, or one of the region itself. `stage` is due, urgent (the
    last tenth) or expired."""

    name: Name
    kind: Name
    not_after_ms: int
    stage: Name


class BrokerState(Message, frozen=True, tag="broker"):
    """One of a region's several brokers. `address`: where clients reach it, empty while it is not alive. `leads`: streams that it leads,
    whether it is alive or not. `is_controller`: it places and elects. `has_audit_log`: it writes the region's audit log. `copies`: shards of
    streams that it has a copy of, or is to get, but those of `alone`: streams whose only copy it has, and which cannot be moved
    (offloaded or fed by another region). `in_sync`: of these copies, those in the in-sync sets. `lag_records`: how many records they lack in all, as those leaders say that answer soon. `is_drained`: it gets nothing, and its copies move away. `bound`: of
    its copies, while it is drained, those that stay because too few other brokers may have one."""

    broker: Name
    address: Name = ""
    leads: int = 0
    is_controller: bool = False
    has_audit_log: bool = False
    copies: int = 0
    alone: int = 0
    is_drained: bool = False
    in_sync: int = 0
    lag_records: int = 0
    bound: int = 0


class RegionState(Message, frozen=True, tag="region"):
    """Gauges of one broker, by name; each limit follows the gauge that it limits (docs/operations.md). `expiring`: the
    certificates that end first, of those that are near their end. `bridges`: the region's own that have a session with this
    broker. `brokers`: all of them, as the one that answers knows, where there are several. `alarms`: what is wrong, as it
    knows, the most serious first; `remarks`: what is as an operator has it, such as a broker that is drained. `replicas`: copies of a new stream that does not say how many, where there are several brokers. `moving`: shards
    whose copies are on their way to other brokers.
    """

    region: Name
    mesh: Name
    broker: Name
    started_ms: int
    gauges: dict[str, float]
    audit_origin: Name = ""
    audit_size: int = 0
    expiring: list[ExpiryState] = []
    bridges: list[Name] = []
    brokers: list[BrokerState] = []
    alarms: list[Text] = []
    replicas: int = 0
    moving: int = 0
    remarks: list[Text] = []


class DescribeTraffic(Repeatable["TrafficPage"], frozen=True, tag="describe_traffic"):
    """Traffic of this broker: of `what` (streams, readers or caches), those whose stream begins with `prefix`. Counters
    count since the broker's start; two requests give rates.
    """

    what: Name
    prefix: Name = ""
    skip: Natural = 0
    limit: Page = 100
    after: Text = ""


class StreamTraffic(Message, frozen=True, tag="stream_traffic"):
    """Of one stream, all shards together. `held_bytes`: in memory; `pending_bytes`: appended and not yet durable; `stopped`:
    shards that do not serve."""

    stream: Name
    shards: int
    published_records: int = 0
    published_bytes: int = 0
    delivered_records: int = 0
    delivered_bytes: int = 0
    stored_bytes: int = 0
    held_bytes: int = 0
    pending_bytes: int = 0
    stopped: int = 0


class ReaderTraffic(Message, frozen=True, tag="reader_traffic"):
    """One reader of a stream: a subscription, or a view's consumers. `name` is its own among those of a `kind`; `lag_records`:
    readable and not yet sent, or of a view, not done; `waits`: for credit, quota, connection, memory or a consumer, empty where it does not
    wait. For a view, `identity` says how many consumers it has."""

    kind: Name
    name: Name
    stream: Name
    identity: Name = ""
    delivered_records: int = 0
    delivered_bytes: int = 0
    lag_records: int = 0
    waits: Name = ""


class CacheTraffic(Message, frozen=True, tag="cache_traffic"):
    """The size of one cache, over all its shards, and its counters since the broker began to serve it."""

    stream: Name
    keys: int
    size_bytes: int
    bytes_limit: int
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    expired: int = 0
    watches: int = 0


class TrafficPage(Message, frozen=True, tag="traffic_page"):
    """`time_ms`: when it was counted, by the broker's clock."""

    time_ms: int
    streams: list[StreamTraffic] = []
    readers: list[ReaderTraffic] = []
    caches: list[CacheTraffic] = []
    more: bool = False
    next: Text = ""


class DescribeMesh(Repeatable["MeshPage"], frozen=True, tag="describe_mesh"):
    """The mesh as this region knows it: of `what` (regions, grants, denials or logs)."""

    what: Name
    skip: Natural = 0
    limit: Page = 100
    after: Text = ""


class ExplainCrossing(Repeatable["CrossingExplained"], frozen=True, tag="explain_crossing"):
    """May this stream cross between these regions now, one of which this is, and why?"""

    stream: Name
    source: RegionName
    destination: RegionName


class ApprovalTally(Message, frozen=True, tag="approval_tally"):
    """How far one region's approvals of a grant have come. `not_counted`: who signed, and why that does not count."""

    region: Name
    needed: Natural
    approved: list[Name] = []
    missing: Natural = 0
    not_counted: list[tuple[Name, Text]] = []


class CrossingExplained(Message, frozen=True, tag="crossing_explained"):
    """The broker's own decision. `refused` is the kind of its refusal, `sentence` says it; `grant` is the one that it is about."""

    crosses: bool
    policy_allows: bool
    rule: Text = ""
    reasons: list[Text] = []
    refused: Name = ""
    sentence: Text = ""
    grant: Name = ""
    grant_state: Name = "none"
    approvals: list[ApprovalTally] = []


class KnownRegion(Message, frozen=True, tag="known_region"):
    """This region, or one whose bundle it trusts; what stands here is what that region signed of itself."""

    region: Name
    mesh: Name
    country: Name = ""
    jurisdiction: Name = ""


class GrantSummary(Message, frozen=True, tag="grant_summary"):
    """One grant in this region's grant book. `state` is offered, active, paused, revoked or expired; `reason` says what an
    offered one waits for, and who paused a paused one.
    """

    grant: Name
    stream: Name
    from_region: Name
    to_region: Name
    state: Name
    destination_stream: Name = ""
    reason: Text = ""
    expires_ms: int = 0


class Denial(Message, frozen=True, tag="denial"):
    """A deny entry that stands: `region` says that `streams` do not cross to `peer` or from it; `*` is every region."""

    streams: Name
    region: Name
    peer: Name
    reason: Text = ""
    at_ms: int = 0


class Cosigner(Message, frozen=True, tag="cosigner"):
    """A witness whose cosignature was verified, and when it says that it cosigned; 0 where that is not kept."""

    name: Name
    time_ms: int = 0


class AuditLog(Message, frozen=True, tag="audit_log"):
    """An audit log: this region's `own`, at its last checkpoint, or one that it cosigns, as far as it has. `cosigned_size`: leaves of
    the newest checkpoint of it that is cosigned, by `cosigners`."""

    origin: Name
    own: bool
    size: int
    root: bytes
    cosigned_size: int = 0
    cosigners: list[Cosigner] = []


class MeshPage(Message, frozen=True, tag="mesh_page"):
    regions: list[KnownRegion] = []
    grants: list[GrantSummary] = []
    denials: list[Denial] = []
    logs: list[AuditLog] = []
    more: bool = False
    next: Text = ""


class CutState(Message, frozen=True, tag="cut"):
    """The cut that an operator accepts with `felix bridge resume --accept-truncation`: the incarnation that ends, and the epoch
    and source offset from which the link continues.
    """

    incarnation: bytes
    epoch: int
    offset: int


class LinkState(Message, frozen=True, tag="link"):
    """One shard of one link, as its agent last said. Lag in records, bytes and ms; position, high watermark and lag are -1 where they are not known."""

    grant: Name
    stream: Name
    shard: int
    from_region: Name
    to_region: Name
    bridge: Name
    state: Name
    reason: Text = ""
    position: int = 0
    high_watermark: int = 0
    lag_records: int = -1
    lag_bytes: int = -1
    lag_ms: int = -1
    crossed: int = 0
    """since the link has its log, under all grants into this stream; as are the next two"""
    withheld: int = 0
    """for a reason; what the filter left out is counted apart"""
    filtered: int = 0
    reported_ms: int = 0
    cut: CutState | None = None
    """where `state` is truncated"""
    incarnation: bytes = b""
    """under which the shard crosses, which differs from the stream's own after an accepted truncation or a resend; empty while unknown"""


class ReportLinks(Repeatable["Done"], frozen=True, tag="report_links"):
    """From a bridge agent to the broker of its own region, for `felix bridge status`."""

    links: list[LinkState]


class ListLinks(Repeatable["LinkPage"], frozen=True, tag="list_links"):
    skip: Natural = 0
    limit: Page = 100
    after: Text = ""


class LinkPage(Message, frozen=True, tag="link_page"):
    links: list[LinkState]
    more: bool = False
    next: Text = ""


class GetDataKey(Repeatable["DataKeySealed"], frozen=True, tag="get_data_key"):
    """From a bridge agent: the data key of sealed batches, sealed to `public_key` (keys.handoff). `shard`, `epoch`: of the batch, where a key is
    derived from its place."""

    grant: GrantName
    stream: Name
    key: bytes
    public_key: bytes
    shard: Natural = 0
    epoch: Natural = 0


class DataKeySealed(Message, frozen=True, tag="data_key_sealed"):
    sealed: bytes
    region: Name
    stream: Name
    incarnation: bytes
    shard: int
    epoch: int


class GetLinkSecret(Request["LinkSecretSealed"], frozen=True, tag="get_link_secret"):
    """From a bridge agent: the secrets of one grant (transfer, commitment, pseudonyms), sealed to `public_key`."""

    grant: GrantName
    stream: Name
    public_key: bytes


class LinkSecretSealed(Message, frozen=True, tag="link_secret_sealed"):
    sealed: bytes


class GetStreamStatement(Request["StreamStated"], frozen=True, tag="get_stream_statement"):
    """From a bridge agent: the region's signed word on what a shard of a granted stream is (audit.stream_statement)."""

    grant: GrantName
    stream: Name
    shard: Natural


class StreamStated(Message, frozen=True, tag="stream_stated"):
    statement: bytes


class OpenIngest(Request["IngestOpened"], frozen=True, tag="open_ingest"):
    """First frame of an ingest stream at the destination: which link, its transfer key (keys.transfer), and the source
    region's signed statement of what the shard is (audit.stream_statement).

    `shards` is how many the source stream has; `incarnation` the one that the shard crosses under: the stream's own, or the
    one that an accepted truncation began.
    """

    grant: GrantName
    from_region: RegionName
    stream: Name
    shard: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    shards: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    incarnation: bytes
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    transfer_key: bytes
    signature: bytes
    statement: bytes


LOGGED_UNTOLD: Final = -1
"""What is read of a broker that does not say how far its ingress log goes: no offset."""
Logged = Annotated[int, msgspec.Meta(ge=LOGGED_UNTOLD, le=(1 << 63) - 1)]


class IngestOpened(Message, frozen=True, tag="ingest_opened"):
    """`position` is the source offset that comes next: after the last one recorded here; for a link that has none yet, where
    the source's log begins, or where a truncation was accepted.

    Without a receipt, at most `credit_bytes` of TRANSFER frames and `envelopes_max` of them may be on the way.
    """

    destination: Name
    position: Natural
    credit_bytes: int
    envelopes_max: int
    logged: Logged = LOGGED_UNTOLD
    """source offsets below stand in the ingress log; where that is more than `position`, records are gone here. LOGGED_UNTOLD: a broker of before does not say"""
    crossed_from: Natural = 0
    crossed: bytes = b""
    """after a resend: a bit for each source offset from `crossed_from` on, lowest first, set where the record crossed before and
    must not cross again
    """
    crossed_more: bool = False
    """beyond these bits other records crossed, too: open again there"""
    brought: Logged = LOGGED_UNTOLD
    """source offsets below, as far as this bridge itself brought them, stand in the ingress log: what lies between it and `position` came by another one. As `logged`
    where a broker does not say"""


class OpenQueue(Request["QueueOpened"], frozen=True, tag="open_queue"):
    """First frame of a queue's exchange; what follows is in felix.queue_messages. `worker` is a name for people."""

    stream: Name
    worker: Name = ""


class QueueOpened(Message, frozen=True, tag="queue_opened"):
    """`visibility_ms`: how long a lease lasts that asks for nothing else."""

    shards: ShardCount
    incarnation: bytes
    visibility_ms: int
    ordered_by_key: bool = False


class OpenCache(Request["CacheOpened"], frozen=True, tag="open_cache"):
    """First frame of an exchange of calls to a cache (felix.cache_messages)."""

    stream: Name


class CacheOpened(Message, frozen=True, tag="cache_opened"):
    """`shards`: a key's is the hash of it. `now_ms` is the broker's clock, which times of expiry are by. `epochs`: of a watch, per shard, the newest
    leader epochs of its log, each with the offset at which it begins; the last is that of what comes from now on."""

    incarnation: bytes
    shards: ShardCount
    now_ms: int
    epochs: dict[int, list[tuple[int, int]]] = {}


class WatchCache(Request["CacheOpened"], frozen=True, tag="watch_cache"):
    """First frame of an exchange that follows one `key` of a cache, or all keys that begin with `prefix`.

    `offsets` (with their `incarnation`) resumes: per shard, the first offset not seen yet; `epochs`, what the watch that came there was told of them. `coalesce`:
    of values of a key that are sent together, the last one is enough. At most `credit_bytes` are sent before more is granted (CREDIT).
    """

    stream: Name
    prefix: bytes = b""
    key: bytes = b""
    incarnation: bytes = b""
    offsets: dict[int, Natural] = {}
    coalesce: bool = False
    credit_bytes: Natural = 0
    epochs: dict[int, list[tuple[int, int]]] = {}


class Cosign(Request["Witnessed"], frozen=True, tag="cosign"):
    """Asks this region to cosign another region's checkpoint (a signed note), given a consistency proof."""

    checkpoint: bytes
    proof: list[bytes]


class WitnessedSize(Repeatable["Witnessed"], frozen=True, tag="witnessed_size"):
    """Asks how far this region has cosigned an origin."""

    origin: Name


class Witnessed(Message, frozen=True, tag="witnessed"):
    """How far the origin is cosigned here. `cosigned`: the log's checkpoint note of that size, after `cosign` with the new
    cosignature on it."""

    size: int
    cosigned: bytes = b""


class GetCheckpoint(Repeatable["CheckpointAnswer"], frozen=True, tag="get_checkpoint"):
    """Asks for the checkpoint of this region's own audit log that witnesses are shown now, and its proof from `from_size`. `leaf`: from a bridge, one that a receipt
    names to it; LOGGED_UNTOLD: none."""

    from_size: Natural = 0
    leaf: Logged = LOGGED_UNTOLD


class CheckpointAnswer(Message, frozen=True, tag="checkpoint"):
    """`checkpoint`: a signed note, with the cosignatures that the region keeps of it. `leaf`: that was asked for, where the checkpoint covers it, as it stands in the log, with its proof of
    inclusion; empty where that is none which the bridge brought; None where none was asked for, or a broker of before does not say."""

    checkpoint: bytes
    size: int
    proof: list[bytes] = []
    leaf: bytes | None = None
    leaf_proof: list[bytes] = []


class PutCosignature(Request["Done"], frozen=True, tag="put_cosignature"):
    """Brings this region's checkpoint, a signed note, back with another region's cosignature on it."""

    cosigned: bytes


class CreateSubscription(Request["SubscriptionState"], frozen=True, tag="create_subscription"):
    """A durable subscription of a stream, by name."""

    stream: Name
    name: Name
    settings: SubscriptionSettings = SubscriptionSettings()


class DescribeSubscription(Repeatable["SubscriptionState"], frozen=True, tag="describe_subscription"):
    stream: Name
    name: Name


class ListSubscriptions(Repeatable["SubscriptionPage"], frozen=True, tag="list_subscriptions"):
    """Durable subscriptions of one stream, or with an empty `stream` of all that the asker may see. `after` is
    `stream name`, as the last entry of the page before."""

    stream: Name = ""
    after: Annotated[str, msgspec.Meta(max_length=512)] = ""
    limit: Page = 100


class SeekSubscription(Request["Done"], frozen=True, tag="seek_subscription"):
    """Move the committed offset, per shard or of all; what is out is fenced. `offsets` of `start` overrides per shard."""

    stream: Name
    name: Name
    start: Start
    shards: list[int] = []


class RedriveSubscription(Request["Redriven"], frozen=True, tag="redrive_subscription"):
    """Delivers dead letters of a durable subscription to it again, oldest first, up to `records` of them. `after`: the `next` of the page before."""

    stream: Name
    name: Name
    records: Page = 100
    after: Annotated[str, msgspec.Meta(max_length=512)] = ""


class AlterSubscription(Request["SubscriptionState"], frozen=True, tag="alter_subscription"):
    """Changes settings of a durable subscription while it serves; positions and consumers stay. Answered with its state."""

    stream: Name
    name: Name
    change: SubscriptionChange


class DeleteSubscription(Request["Done"], frozen=True, tag="delete_subscription"):
    stream: Name
    name: Name


class Redriven(Message, frozen=True, tag="redriven"):
    """Of a durable subscription's dead letters: `redriven` are delivered again. Of those that were looked at, `gone` stay since the stream does not have their
    records any more, and `held` since a worker has them or a transaction acknowledges the record. `full`: more are given back once the subscription has
    acknowledged some. `next`: where the next page begins, empty where there is none."""

    redriven: int
    gone: int = 0
    held: int = 0
    full: bool = False
    next: Text = ""


class SubscriptionShard(Message, frozen=True, tag="subscription_shard"):
    """One shard of a durable subscription. `consumer` is its consumer, empty for none. `acknowledged` is the number of
    acknowledged records above `committed`; `lag_bytes` is an estimate; -1 if unknown.
    """

    shard: int
    committed: int
    high_watermark: int
    consumer: Text = ""
    acknowledged: int = 0
    unacked: int = 0
    waiting: int = 0
    lag_records: int = 0
    lag_bytes: int = -1
    lag_ms: int = -1


class ConsumerState(Message, frozen=True, tag="consumer"):
    """One consumer of a durable subscription: `state` is active, standby or stalled."""

    member: int
    name: Name
    identity: Name
    state: Name
    shards: list[int] = []


class SubscriptionState(Message, frozen=True, tag="subscription"):
    """Counters are since the broker started. `leader`: the broker that has shards, consumers and counters, where another one answered, which
    knows none of them."""

    stream: Name
    name: Name
    settings: SubscriptionSettings
    creator: Name
    created_ms: int
    incarnation: bytes
    shards: list[SubscriptionShard] = []
    consumers: list[ConsumerState] = []
    redelivered: int = 0
    dead: int = 0
    skipped: int = 0
    leader: Name = ""


class SubscriptionPage(Message, frozen=True, tag="subscription_page"):
    subscriptions: list[SubscriptionState]
    more: bool = False


class OpenConsumer(Request["ConsumerOpened"], frozen=True, tag="open_consumer"):
    """First frame of a consumer's exchange. With `settings` the subscription is made where there is none, and else must have
    these. `consumer` is a name for people. `incarnation` is what the consumer has read of before, empty for none."""

    stream: Name
    name: Name
    credit_bytes: Natural
    settings: SubscriptionSettings | None = None
    consumer: Name = ""
    incarnation: bytes = b""


class ConsumerOpened(Message, frozen=True, tag="consumer_opened"):
    """`member` is this consumer's number. Shards are given with events (felix.consumer_messages)."""

    member: int
    incarnation: bytes
    shards: ShardCount
    settings: SubscriptionSettings
    created: bool = False


class PutNamespace(Request["Done"], frozen=True, tag="put_namespace"):
    """Sets how a namespace (`tenant/namespace`) treats streams that do not exist; counts at once."""

    namespace: Name
    settings: NamespaceSettings


class DeleteNamespace(Request["Done"], frozen=True, tag="delete_namespace"):
    """Streams of the namespace are created by hand from now on; those that are there stay."""

    namespace: Name


class ListNamespaces(Request["NamespacePage"], frozen=True, tag="list_namespaces"):
    after: Name = ""
    limit: Page = 100


class NamespacePage(Message, frozen=True, tag="namespace_page"):
    namespaces: dict[str, NamespaceSettings]
    more: bool = False


class OpenTransactions(Request["TransactionsOpened"], frozen=True, tag="open_transactions"):
    """First frame of an exchange for transactions (felix.transaction_messages)."""


class TransactionsOpened(Message, frozen=True, tag="transactions_opened"):
    """This broker's limits: the longest timeout, bytes of one transaction, open ones of one identity."""

    timeout_ms_max: int
    bytes_max: int
    open_max: int


class OpenRelay(Request["RelayOpened"], frozen=True, tag="open_relay"):
    """First frame of a stream that carries the datagrams of a connection to another broker of the region (DATAGRAMS, both ways).

    `address`: where clients reach that broker, as NOT_LEADER names it; no other address leads anywhere.
    """

    address: Name


class RelayOpened(Message, frozen=True, tag="relay_opened"):
    """Datagrams pass from now on, of `datagram_bytes` at most towards `broker`."""

    broker: Name
    datagram_bytes: int


class Done(Message, frozen=True, tag="done"):
    """Carried out; `note` says what a person should know of it."""

    note: Text = ""


Answer = Message
"""The answer that a request names, or a notice of the broker's (Throttled)."""


def _answers() -> dict[type[Request[Any]], type[Message]]:
    """The answer of each request, by its base: `Request["Done"]` is answered with a Done."""
    found: dict[type[Request[Any]], type[Message]] = {}
    for base in (Request, Repeatable):
        for request in base.__subclasses__():
            if request is not Repeatable:
                (answer,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
                found[request] = globals()[answer.__forward_arg__]
    return found


ANSWERS: Final[Mapping[type[Request[Any]], type[Message]]] = _answers()
"""Every request there is, and what it is answered with."""


_encoder: Final = msgspec.msgpack.Encoder()
_handshake_decoder: Final = msgspec.msgpack.Decoder(Handshake)
_answer_decoder: Final = msgspec.msgpack.Decoder(Union[tuple({*ANSWERS.values(), Throttled})])  # noqa: UP007
_error_decoder: Final = msgspec.msgpack.Decoder(ErrorBody)
_goodbye_decoder: Final = msgspec.msgpack.Decoder(Goodbye)

T = TypeVar("T")


def encode_message(type_: FrameType, message: Message, correlation: int = 0) -> bytes:
    """A whole control frame. Raises RequestError(INVALID) where something in the message cannot be written."""
    return encode_frame(type_, _encode(message), correlation)


def _encode(message: Message) -> bytes:
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        # A whole number of more than 64 bits, say, or text with half a surrogate pair.
        raise RequestError(f"This {type(message).__name__} cannot be sent: {error}.") from error


def encode_call(call: Message, correlation: int) -> bytes:
    """The frame of a call on an exchange. Raises RequestError(INVALID) where something in it is not as a broker takes it: that would end
    the session, for all who use it."""
    return encode_frame(FrameType.CALL, _checked(call), correlation)


def _checked(message: Message) -> bytes:
    """It is decoded as its receiver will: msgspec holds no field to its bounds before."""
    body = _encode(message)
    try:
        msgspec.msgpack.decode(body, type=type(message))
    except msgspec.ValidationError as error:
        raise RequestError(f"This {type(message).__name__} cannot be sent: {error}.") from error
    return body


def encode_request(request: Message, correlation: int) -> bytes:
    """A request's whole frame. Raises RequestError: FRAME_TOO_LARGE, for which a broker would end the session; INVALID where something in
    it is not as a broker takes it, for which it would end the session, too."""
    body = _checked(request)
    if len(body) > CONTROL_BYTES_MAX:
        raise RequestError(
            f"A {type(request).__name__} of {len(body)} bytes is larger than a request may be: {CONTROL_BYTES_MAX} bytes.",
            code=Code.FRAME_TOO_LARGE,
            hint="Ask for less at once.",
        )
    return encode_frame(FrameType.REQUEST, body, correlation)


def _decode(decoder: Any, body: memoryview, what: str) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"A malformed {what}: {error}.", code=Code.FRAME_MALFORMED) from error


def decode_handshake(body: memoryview) -> Handshake:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    message: Handshake = _decode(_handshake_decoder, body, "handshake message")
    return message


@cache
def request_decoder() -> Any:
    """Of all requests: brokers ask for it when they are loaded. It takes milliseconds, and clients read no requests."""
    return msgspec.msgpack.Decoder(Union[tuple(ANSWERS)])  # noqa: UP007 - a union of what is in the table


def decode_request(body: memoryview) -> Request[Any]:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    message: Request[Any] = _decode(request_decoder(), body, "request")
    return message


def decode_answer(body: memoryview) -> Answer:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    message: Answer = _decode(_answer_decoder, body, "answer")
    return message


def decode_goodbye(body: memoryview) -> Goodbye:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    message: Goodbye = _decode(_goodbye_decoder, body, "goodbye")
    return msgspec.structs.replace(message, reason=visible(message.reason))


def encode_error(error: FelixError, correlation: int = 0) -> bytes:
    """An ERROR frame that says what `error` says."""
    log_end = error.log_end if isinstance(error, OffsetMismatchError) else -1
    body = ErrorBody(int(error.code), error.sentence[:4000], error.hint[:4000], error.retry_after_ms, log_end)
    if isinstance(error, NotLeaderError):
        body = msgspec.structs.replace(
            body, stream=error.stream, leader=error.leader, address=error.address, epoch=error.epoch
        )
    return encode_message(FrameType.ERROR, body, correlation)


def decode_error(body: memoryview) -> FelixError:
    """The error that a peer's ERROR frame stands for. Raises ProtocolError(FRAME_MALFORMED)."""
    found: ErrorBody = _decode(_error_decoder, body, "error")
    # A program prints or logs an error as it comes: nothing in a peer's words is obeyed there, or begins a line.
    found = msgspec.structs.replace(found, sentence=visible(found.sentence), hint=visible(found.hint))
    error = error_for(found.code, found.sentence, found.hint, found.retry_after_ms, found.log_end)
    if found.code == Code.NOT_LEADER:
        error = NotLeaderError(
            found.sentence,
            hint=found.hint,
            retry_after_ms=found.retry_after_ms,
            stream=found.stream,
            leader=found.leader,
            address=found.address,
            epoch=found.epoch,
        )
    error.told = True
    return error
