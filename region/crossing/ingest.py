"""Where bridged records come in: the destination's half of a crossing.

Per envelope, in this order (docs/bridges.md gives the same numbers):

1. the envelope decodes, within its limits;
2. the import grant holds now (asked for every envelope: a revocation stops the next one);
3. its first offset is the one after the last recorded; a range that was recorded is answered again, a later one
   is a gap and refused;
4. the agent signed it, and it opens under the transfer key of this link;
5. each of its records is what the grant's terms let cross (policy.inspection: headers, path and onward transfer, key, fields,
   payload, filter), and all of them fit the grant's budget; if the grant has a rate, it waits until the rate allows it. Then the
   grant must hold still, and the broker follow the region's documents;
6. its ACK leaves, with commitments that this side computed itself, are durable as a note beside the stream's log; then it is
   appended under this region's own key, with the source position in the same write;
7. the ACK leaves are durable in the ingress log; now the records can be read;
8. the signed receipt goes back.

A crash between 6 and 7 leaves records without their leaf, which nobody has read. When the stream is opened again, and before
anybody sees it, the broker writes the leaf from the note (`settle`, region.crossing.arrivals), whether the agent comes back or not.
The agent, who has no receipt, sends the range again; step 3 finds it among the newest appends, and it is answered.

Invariants: no receipt before the leaf is durable, no leaf before the append is, no record is read before its leaf is; positions
are contiguous; an agent can always send its newest ENVELOPES_MAX ranges again and get the same answer. An ingest stream reads
its position only when nothing of the streams before it is still on its way to the disk (`region.crossing.landings`): a recorded position is
never older than what will be appended. A range sent again is answered only where it is the one that landed. Memory: one window
per open stream, taken from the broker's ingest budget, in which unprocessed envelopes wait; before that, one request. Envelopes
of one stream are processed one after the other, in steps (region.crossing.inspected): other work runs after STEP_S, whatever an envelope
holds.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from audit.crossed import CROSSED_AHEAD, CROSSED_BEHIND_MAX, OffsetSet
from audit.leaf import (
    EMPTY_RANGE_BYTES,
    CommitmentKey,
    Committer,
    EncodedLeaf,
    Header,
    Kind,
    Side,
    encode_part,
)
from audit.position import LinkShard
from audit.receipt import Receipt, sign_receipt
from audit.stream_statement import StreamStatement, open_statement
from felix.batch import BRIDGED_EPOCH, Batch, decode_batch, plain_body
from felix.errors import (
    Code,
    CorruptionError,
    FelixError,
    LaterReleaseError,
    NotLeaderError,
    OffsetMismatchError,
    ProtocolError,
    RequestError,
    UnavailableError,
)
from felix.frames import CONTROL_BYTES_MAX, FRAME_HEADER_BYTES, Frame, FrameDecoder, FrameType, encode_frame
from felix.messages import IngestOpened, OpenIngest, decode_request, encode_error, encode_message
from felix.names import SpiffeId, StreamName
from felix.peer import Peer
from felix.provenance import path_sha256
from felix.session import CreditWindow
from felix.steps import Steps
from felix.tasks import TaskSet
from keys.hybrid import HybridKeyPair
from keys.link import commitment_secret
from keys.signing import SigningKey
from keys.transfer import (
    EnvelopeHeader,
    TransferKey,
    TransferScope,
    decode_envelope,
    open_transfer_key,
)
from policy.approval import CLOCK_SKEW_MS
from policy.grant import GrantError
from policy.inspection import Inspection
from policy.terms import GrantTerms
from policy.truncation import Live
from region.broker import Broker
from region.crossing.arrivals import LeafQueue, encode_arrival, notes_from, settle
from region.crossing.grant_meter import GrantMeter
from region.crossing.inspected import Inspected, inspect
from region.crossing.landings import Landing, Landings
from region.crossing.link_slot import (
    ENVELOPES_MAX,
    Landed,
    LinkRecord,
    Position,
    held_record,
    link_slot,
    old_slot,
)
from region.crossing.stated_link import StatedLink
from region.governance.service import Governance
from region.log.ahead import Note
from region.log.errors import StorageFailedError
from region.log.segment import ShardIdentity
from region.log.shard import Appended, ShardLog
from region.log.states import State
from region.metadata.records import StreamConfig
from region.ports import Ingesting
from region.streams.hosted import HostedStream

log = logging.getLogger("felix.region.ingest")

INGEST_WINDOW_BYTES: Final = 8 << 20
"""Envelopes of one link shard on the way without a receipt, in bytes."""

LEAVES_BYTES_MAX: Final = INGEST_WINDOW_BYTES
"""Leaves of one link shard's ranges that are on their way to the log. An envelope of 200 kB may have 4.4 MB of them, and they are held twice, once as the note beside the stream: of a window's envelopes, while
a disk stands still, 211 MB."""

STEP_S: Final = 0.005
"""How long a foreign envelope may hold the event loop before other work runs."""
STANDBY_S: Final = 10.0
"""How long a bridge that carries a shard may bring nothing new, while another one asks and its source has more, before that one takes over."""
SETTLED_S: Final = 10.0
"""How long a stream that is opened again waits for leaves that are on their way; then it is tried again later."""
HOLD_S: Final = 0.25
"""How soon an envelope that is held back to a rate looks whether it may still cross."""

CHECK_STEP_OFFSETS: Final = 4_096
"""Offsets of one step that are looked for among those that crossed: a millisecond."""

_RECEIPT: Final = struct.Struct(">Q")

T = TypeVar("T")


class IngestService:
    """Opens ingest streams. `import_key` opens what other regions seal to this one."""

    def __init__(
        self,
        broker: Broker,
        governance: Governance,
        landings: Landings,
        import_key: HybridKeyPair,
        receipt_key: SigningKey,
    ) -> None:
        self.broker = broker
        self.governance = governance
        self.import_key = import_key
        self.receipt_key = receipt_key
        self.landings = landings
        self._meters: dict[str, GrantMeter] = {}
        self.leaves = LeafQueue(governance.audit)
        self._identity = SpiffeId(broker.region, broker.mesh, "broker", broker.broker_id)

    async def settle(self, name: StreamName, shards: list[ShardLog], unsettled: Sequence[int] = ()) -> None:
        """Before anybody finds a stream's shards: what landed in them has its leaves; what may have landed in those that are `unsettled` is waited for. Raises what keeps the ingress log
        from taking them."""
        for number in unsettled:
            self.landings.in_doubt(name, number)
        # Where they were open before in this process: a leaf that is on its way is not in the log yet, and would be taken for missing.
        try:
            async with asyncio.timeout(SETTLED_S):
                await self.landings.settled(name)
        except TimeoutError:
            raise UnavailableError(f"What arrived in {name} waits for its audit leaves.") from None
        for shard in shards:
            await settle(shard, self.governance.arrivals, self.meter, self._identity)
        self.landings.opened(name, [shard.identity.shard for shard in shards])

    async def notes_from(self, shard: ShardIdentity, annotations: Mapping[int, bytes]) -> int | None:
        """From which offset on a copy keeps its notes: `arrivals.notes_from`."""
        return await notes_from(annotations, shard, self.governance.arrivals, self._identity)

    def close(self) -> None:
        """The broker stops."""
        self.leaves.close()

    def open(self, session: Ingesting, stream_id: int) -> IngestStream:
        """The role of a new ingest stream."""
        return IngestStream(self, session, stream_id)

    async def meter(self, grant: str) -> GrantMeter:
        """Use of a grant so far. What other brokers took under it since it was opened here before is in the log."""
        charged = await self.governance.arrivals.charged_bytes(grant)
        meter = self._meters.setdefault(grant, GrantMeter(charged))
        meter.hear(charged)
        return meter


class _Way(NamedTuple):
    """One envelope on its way through steps 6 to 8."""

    header: EnvelopeHeader
    digest: bytes
    size: int
    landed: Landed
    batch: Batch | None
    leaves: list[EncodedLeaf]
    entries_sha256: bytes
    path_sha256: bytes
    charge: int
    """of the grant's rate and budget, in bytes"""
    note: Note | None
    """its leaves beside the stream's log, until they are in the ingress log; None of a range that landed before"""


def _link_shard(scope: TransferScope) -> LinkShard:
    """The link as leaves name it."""
    return LinkShard(
        str(scope.bridge),
        scope.source_region,
        scope.destination_region,
        str(scope.stream),
        scope.shard,
        str(scope.destination),
    )


def _check_new(before: OffsetSet, offsets: Sequence[int]) -> Steps[bool]:
    """Raises RequestError(CONFLICT) for a record that crossed before a resend; True where none did."""
    for at in range(0, len(offsets), CHECK_STEP_OFFSETS):
        twice = next((offset for offset in offsets[at : at + CHECK_STEP_OFFSETS] if offset in before), None)
        if twice is not None:
            raise RequestError(
                f"The record at source offset {twice} crossed before; a resend is for those that stayed.",
                code=Code.CONFLICT,
            )
        yield
    return True


def _bridged(batch: Batch) -> Batch:
    """The batch under no producer's number, and marked as one whose records' paths were inspected here (`BatchHeader.is_bridged`)."""
    return batch.with_header(
        replace(batch.header, producer_id=0, producer_epoch=BRIDGED_EPOCH, base_sequence=0)
    )


class IngestStream:
    """One client-opened bidirectional stream: `open_ingest`, then envelopes; receipts go back."""

    def __init__(self, service: IngestService, session: Ingesting, stream_id: int) -> None:
        self._service = service
        self._session = session
        self._stream_id = stream_id
        self._decoder = FrameDecoder(frozenset({FrameType.REQUEST, FrameType.TRANSFER}))
        self._window = CreditWindow(INGEST_WINDOW_BYTES)
        self._opening: asyncio.Task[None] | None = None
        self._tasks = TaskSet()
        self._ended = False
        self._inbox: deque[Frame] = deque()
        self._work: asyncio.Task[None] | None = None
        self._unanswered = 0
        """envelopes that came and have no receipt"""
        self._in_flight = 0
        """of these, those that are being appended and logged"""
        self._leaf_bytes: dict[int, int] = {}
        """of their leaves, by the source offset at which the range begins"""
        self._passed = asyncio.Event()
        self._hosted: HostedStream
        self._shard: ShardLog
        self._key: TransferKey
        self._committer: Committer
        self._terms: GrantTerms
        self._inspection: Inspection
        self._meter: GrantMeter
        self._position = Position(0)
        self._logged_to = 0
        self._before = OffsetSet()
        """what crossed before a resend"""
        self._record: LinkRecord
        self._slot = 0
        self._old_slot = 0
        self._grant_id = ""
        self._landing: Landing | None = None
        self._taken_bytes = 0
        self._request_held = 0
        self._is_open = False
        self._refusal: FelixError | None = None
        """given once what was taken before it is answered"""

    # -- role ------------------------------------------------------------------------------------------

    def data(self, data: bytes, end: bool) -> None:
        for frame in self._decoder.feed(data):
            if frame.type is FrameType.REQUEST:
                request = decode_request(frame.body)
                if self._opening is not None or not isinstance(request, OpenIngest):
                    raise ProtocolError("An ingest stream begins with one OpenIngest.", code=Code.STATE)
                self._opening = asyncio.ensure_future(self._open(frame.correlation, request))
                continue
            if not self._is_open:
                raise ProtocolError("An envelope came before the ingest stream was opened.", code=Code.STATE)
            self._window.receive(FRAME_HEADER_BYTES + len(frame.body))
            self._take_in(frame)
        self._check_partial()
        if end:
            self._decoder.finish()
            # Both halves end, or the stream would keep its place among the session's for ever.
            self._send(b"", end=True)
            self._end()

    def _check_partial(self) -> None:
        """A frame counts while it comes in, not only once it is whole; before the opening, only a request may."""
        window, held = self._window, self._decoder.held_bytes
        limit = FRAME_HEADER_BYTES + CONTROL_BYTES_MAX
        request = 0 if self._is_open or self._ended else held
        self._session.hold_request(request - self._request_held)
        self._request_held = request
        if self._is_open:
            limit = window.announced_bytes - window.received_bytes
        if held > limit and not self._ended:
            raise ProtocolError(
                f"{held} bytes of a frame came where {limit} were granted.", code=Code.CREDIT_EXCEEDED
            )

    @property
    def meter(self) -> None:
        """What arrives is charged to its bridge alone."""

    def pump(self) -> None: ...

    def rights_changed(self) -> None:
        """Grants are asked for with every envelope; an idle stream learns here of a revocation, and that another broker leads its destination."""
        if not self._is_open or self._ended:
            return
        try:
            self._check_grant()
        except FelixError as error:
            self._refuse_next(error)
            return
        self._leave_led()

    def keeps_out(self, bridge: SpiffeId, incarnation: bytes, log_end: int) -> FelixError | None:
        """As `Replaceable`. Of one bridge the newest session counts: the one before it may be gone, and nobody knows yet."""
        scope = self._key.scope
        if bridge == scope.bridge:
            return None
        if not self._may_bring():
            return None
        has_all = self._is_open and incarnation == scope.incarnation and log_end <= self._position.next_offset
        if not has_all:
            # From now on, where nobody has asked since it brought something: until then it may have had all.
            now_s = asyncio.get_running_loop().time()
            if self._service.landings.waits_s(*self._place, scope.bridge, now_s) >= STANDBY_S:
                return None
        return UnavailableError(
            f"{scope.bridge} carries shard {scope.shard} of {scope.stream} at the moment; this bridge stands by.",
            code=Code.STANDBY,
            retry_after_ms=1000,
        )

    @property
    def _place(self) -> tuple[StreamName, int, int]:
        """Of its link shard, among the landings."""
        return self._hosted.name, self._key.scope.shard, self._slot

    def _may_bring(self) -> bool:
        """Whether its grant holds: an idle stream may not have been told yet that it ended."""
        if not self._is_open:
            return True
        try:
            self._check_grant()
        except FelixError:
            return False
        return True

    def replaced(self) -> None:
        """A newer ingest stream took over this link."""
        self._fail(UnavailableError("Another session took over this link.", code=Code.DISCONNECTED))

    def closed(self) -> None:
        self._end()

    # -- opening ---------------------------------------------------------------------------------------

    async def _open(self, correlation: int, request: OpenIngest) -> None:
        service, session = self._service, self._session
        broker = service.broker
        peer = session.peer
        assert peer is not None
        try:
            name = StreamName.parse(request.stream)
            terms = service.governance.check_import(peer.spiffe_id, request.grant, request.from_region, name)
            scope = TransferScope(
                request.from_region,
                broker.region,
                name,
                request.incarnation,
                terms.destination,
                request.shard,
                request.epoch,
                request.grant,
                terms.terms_hash,
                peer.spiffe_id,
            )
            receipt_keys = service.governance.trust_of(request.from_region).receipt_keys
            statement = open_statement(request.statement, receipt_keys)
            link = self._stated(request, statement)
            link.check()
            link.live()
            self._key = open_transfer_key(
                request.transfer_key, request.signature, scope, service.import_key, peer
            )
            self._hosted = await self._destination(terms.destination, request)
            self._shard = self._hosted.shard(request.shard)
            self._slot = link_slot(request.from_region, request.stream, request.shard)
            carrier = service.landings.carrier(*self._place)
            if carrier is not None:
                stands_by = carrier.keeps_out(peer.spiffe_id, request.incarnation, statement.log_end)
                if stands_by is not None:
                    raise stands_by
                if service.landings.is_settled(*self._place):
                    # It says already what it will say then: what is refused ends nobody's link.
                    self._recorded(link)
            self._take_window()
        except (UnavailableError, LaterReleaseError) as error:
            self._fail(error, correlation)
            return
        except FelixError as error:
            self._refuse(error, correlation, request)
            return
        except Exception as error:
            log.exception("opening an ingest stream failed")
            self._fail(FelixError(f"The broker failed: {type(error).__name__}."), correlation)
            return
        self._grant_id = request.grant
        self._landing = service.landings.claim(*self._place, self)
        await self._landing.settled.wait()
        self._landing.grant_id = self._grant_id
        try:
            # First what may refuse it: the other two may read the whole log, which no statement that is too old is to cost.
            link = self._stated(request, statement)
            self._record = self._recorded(link)
            self._before = await self._crossed_before(scope, link.lives)
            self._logged_to, brought = await service.governance.arrivals.arrived_below(
                scope.bridge, _link_shard(scope).shard_name, scope.incarnation
            )
            self._meter = await service.meter(request.grant)
        except UnavailableError as error:
            self._fail(error, correlation)
            return
        except FelixError as error:
            self._refuse(error, correlation, request)
            return
        self._position = self._record.position
        secret = CommitmentKey(self._key.key_id, commitment_secret(self._key))
        self._committer = Committer(secret, str(name), request.incarnation, request.shard)
        self._terms, self._inspection = terms.terms, Inspection(terms.terms)
        self._is_open = True
        session.widen()
        opened = self._told(
            IngestOpened(
                str(terms.destination),
                self._position.next_offset,
                INGEST_WINDOW_BYTES,
                ENVELOPES_MAX,
                self._logged_to,
                brought=brought,
            )
        )
        self._send(encode_message(FrameType.ANSWER, opened, correlation))

    async def _crossed_before(self, scope: TransferScope, lives: Sequence[Live]) -> OffsetSet:
        """After a resend: what arrived before, and must not again. Empty where nobody asked for one."""
        if not any(live.accepted is not None and live.accepted.is_resend for live in lives):
            return OffsetSet()
        return await self._service.governance.arrivals.crossed_before(
            scope.bridge, _link_shard(scope).shard_name, lives
        )

    def _told(self, opened: IngestOpened) -> IngestOpened:
        """With what crossed before a resend, from the oldest range on that may be sent again."""
        position, before = self._position, self._before
        if not before.next:
            return opened
        oldest = min((landed.source_base for landed in position.newest), default=position.next_offset)
        first = max(oldest, position.next_offset - CROSSED_BEHIND_MAX)
        end = position.next_offset + CROSSED_AHEAD
        return msgspec.structs.replace(
            opened,
            crossed_from=first,
            crossed=before.page(first, end - first),
            crossed_more=before.next > end,
        )

    def _stated(self, request: OpenIngest, statement: StreamStatement) -> StatedLink:
        """By the documents that are known now."""
        return StatedLink(request, statement, self._service.governance.book)

    def _recorded(self, link: StatedLink) -> LinkRecord:
        """Where the link stands here: what its slot holds, or where it begins. Raises as `StatedLink.go_on`."""
        annotations, request = self._shard.annotations, link.request
        held = held_record(annotations, self._slot, request.from_region, request.stream)
        # What was stated by a clock that was days ahead binds as if it were of now: else nothing crosses until that time has come.
        latest_ms = self._service.broker.clock_ms() + CLOCK_SKEW_MS
        if held is not None:
            return link.go_on(held, latest_ms)
        # Recorded by version 0.1; the next range migrates it.
        self._old_slot = old_slot(request.from_region, request.stream, request.incarnation, request.shard)
        return link.begin(latest_ms, annotations.get(self._old_slot))

    def _take_window(self) -> None:
        """Raises UnavailableError(LIMIT_MEMORY) where the broker's budget is handed out."""
        budget = self._service.broker.budgets.ingest
        if not budget.take(INGEST_WINDOW_BYTES):
            raise UnavailableError(
                f"The broker's ingest budget of {budget.limit_bytes} bytes is handed out.",
                code=Code.LIMIT_MEMORY,
                hint="Have limits.ingest_budget raised, or let fewer link shards cross at once.",
                retry_after_ms=1000,
            )
        self._taken_bytes = INGEST_WINDOW_BYTES

    async def _destination(self, name: StreamName, request: OpenIngest) -> HostedStream:
        """The stream that the import grant names; made like the source where it does not exist yet.

        Raises RequestError where nobody but the broker itself may write there.
        """
        self._service.broker.refuse_reserved(name.tenant)
        broker, config = self._service.broker, StreamConfig(shards=request.shards, replicas=0)
        config = broker.with_copies(config)
        if broker.streams.get(name) is None:
            broker.streams.check_foreign_room(name, config)
        hosted = await broker.ensure_stream(name, config)
        broker.require_led(hosted)
        if hosted.shard_count != request.shards:
            raise RequestError(
                f"{name} has {hosted.shard_count} shards and its source {request.shards}: keys would change "
                "their shard.",
                code=Code.CONFLICT,
                hint=f"Give the grant another destination name, or make {name} with {request.shards} shards.",
            )
        if hosted.ephemeral:
            raise RequestError(
                f"{name} is ephemeral: what crosses a border must be recorded where it arrives.",
                code=Code.UNSUPPORTED,
            )
        return hosted

    def _check_grant(self) -> int:
        """When it was that the grant let these records in. Raises the refusal."""
        peer = self._peer()
        scope = self._key.scope
        terms = self._service.governance.check_import(
            peer.spiffe_id, self._grant_id, scope.source_region, scope.stream
        )
        return terms.decided_ms

    def _check_followed(self) -> None:
        """Raises UnavailableError where this broker is cut off from the metadata store. What copies commit needs no lease; whether it may cross is known to those who
        follow the region's documents."""
        if cut_off := self._service.broker.fence():
            raise cut_off

    def _peer(self) -> Peer:
        assert self._session.peer is not None
        return self._session.peer

    # -- envelopes -------------------------------------------------------------------------------------

    def _take_in(self, frame: Frame) -> None:
        """An envelope came; it is dealt with after those before it."""
        if self._ended or self._refusal is not None:
            return
        if self._unanswered >= ENVELOPES_MAX:
            raise ProtocolError(
                f"More than {ENVELOPES_MAX} envelopes without a receipt.", code=Code.CREDIT_EXCEEDED
            )
        self._unanswered += 1
        self._inbox.append(replace(frame, body=memoryview(bytes(frame.body))))
        if self._work is None:
            self._work = asyncio.ensure_future(self._deal())

    async def _deal(self) -> None:
        """Envelopes one after the other, in the order in which they came, until there are none or one is refused."""
        try:
            while self._inbox and self._takes_more():
                await self._envelope(self._inbox.popleft())
        except ProtocolError as error:
            self._session.fail(error)
        except UnavailableError as error:
            self._fail(error)
        except FelixError as error:
            self._refuse_next(error)
        except Exception as error:
            log.exception("an envelope of %s could not be dealt with", self._key.scope)
            self._fail(FelixError(f"The broker failed: {type(error).__name__}.", code=Code.INTERNAL))
        finally:
            self._work = None

    def _takes_more(self) -> bool:
        return not self._ended and self._refusal is None

    async def _envelope(self, frame: Frame) -> None:
        size = FRAME_HEADER_BYTES + len(frame.body)
        envelope = decode_envelope(frame.body)  # 1
        self._check_grant()  # 2
        self._check_followed()
        header, position = envelope.header, self._position
        meter = self._session.meter_for("")
        over_quota = meter.refusal(size)
        if over_quota is not None:
            raise over_quota
        meter.published(size, header.next_offset - header.base_offset)
        again: Landed | None = None  # 3
        if header.base_offset != position.next_offset:
            again = position.find(header.base_offset)
            if header.base_offset > position.next_offset or again is None:
                raise RequestError(
                    f"The envelope begins at source offset {header.base_offset}; {position.next_offset} comes next.",
                    code=Code.POSITION_GAP,
                    hint="Open the ingest stream again, and go on from the position it answers.",
                )
        if again is None and header.base_offset < self._logged_to:
            raise CorruptionError(
                f"Source offsets below {self._logged_to} arrived before; they are gone from {self._hosted.name}.",
                code=Code.TRUNCATED,
                hint="An operator of the source decides: felix bridge resume GRANT --accept-truncation.",
            )
        leaf = self._leaf(header, envelope.hash)
        found = await self._stepped(  # 4, 5
            inspect(self._key, envelope, self._peer(), self._inspection, self._committer, leaf)
        )
        if found is None:
            return
        if header.base_offset < self._before.next and not await self._stepped(
            _check_new(self._before, found.offsets)
        ):
            return
        charge = found.size_bytes or EMPTY_RANGE_BYTES
        if not await self._turn(charge if again is None else 0) or not await self._leaf_room(found):
            return
        # From here to the append nothing waits: what is asked now is true then.
        self._check_followed()
        decided_ms = self._check_grant()
        landed = again or Landed(header.base_offset, self._shard.log_end_offset, found.records)
        if landed.records != found.records:
            raise RequestError(
                f"Source offsets {header.base_offset} to {header.last_offset} landed with {landed.records} records "
                f"and are sent again with {found.records}.",
                code=Code.CONFLICT,
            )
        if again is None:
            self._check_budget(charge)
            self._service.leaves.check_room()
        # Not the time now: the thread may have been taken away meanwhile, until the grant had ended.
        leaf = msgspec.structs.replace(leaf, time_ms=decided_ms, path=found.path)
        leaves = [encode_part(leaf, part, landed.first_offset) for part in found.parts]
        # Producers are numbered by the region that they publish in: an agent must not fence one here.
        batch = None if found.batch is None else _bridged(found.batch)
        way = _Way(
            header,
            envelope.hash,
            size,
            landed,
            batch,
            leaves,
            found.entries_sha256,
            path_sha256(found.path),
            charge,
            None,
        )
        self._landed_on().begin(header.base_offset)
        self._leaf_bytes[header.base_offset] = sum(len(leaf.data) for leaf in leaves)
        self._in_flight += 1
        if again is not None:
            self._logged_before(way)
            return
        arrival = encode_arrival(self._slot, landed, self._service.governance.audit, leaves)
        way = way._replace(note=self._shard.take_note(arrival))
        self._meter.take(way.charge)
        self._position = position.after(landed, header.next_offset)
        # What is sent again keeps no other bridge out.
        self._service.landings.brought(*self._place)
        record = self._record._replace(position=self._position)
        if landed.records:
            record = record._replace(epoch=header.epoch, read_to=header.next_offset)
        self._record = record
        self._shard.append_nowait(  # 6
            batch,
            partial(self._appended, way),
            annotation=record.encode(),
            slot=self._slot,
            # The leaves say where it lands; a view of the stream may append something first.
            expected_offset=landed.base_offset,
            note=way.note,
            # The source announced every record that crosses, one by one: none may be left out.
            as_it_is=True,
        )

    async def _stepped(self, steps: Steps[T]) -> T | None:
        """Run the steps; other work runs in between. None if the stream ended meanwhile."""
        now = asyncio.get_running_loop().time
        begun = now()
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                found: T = ended.value
                return found
            if now() - begun >= STEP_S:
                await asyncio.sleep(0)
                if not self._takes_more():
                    return None
                begun = now()

    async def _turn(self, size: int) -> bool:
        """Wait until the grant's rate lets so many bytes in. False where the stream ended meanwhile."""
        loop, rate = asyncio.get_running_loop(), self._terms.rate_bytes
        while wait_s := self._meter.wait_s(rate, loop.time()) if size else 0.0:
            await asyncio.sleep(min(wait_s, HOLD_S))
            if not self._takes_more():
                return False
        self._meter.spend(rate, size, loop.time())
        return True

    async def _leaf_room(self, found: Inspected) -> bool:
        """Wait until the leaves that are on their way leave room for this range's. False where the stream ended meanwhile."""
        size = sum(len(part.entries) for part in found.parts)
        while self._leaf_bytes and sum(self._leaf_bytes.values()) + size > LEAVES_BYTES_MAX:
            self._passed.clear()
            await self._passed.wait()
            if not self._takes_more():
                return False
        return True

    def _check_budget(self, size: int) -> None:
        budget = self._terms.budget_bytes
        self._meter.hear(self._service.governance.arrivals.charged_at_least(self._grant_id))
        if not self._meter.fits(budget, size):
            raise GrantError(
                f"The grant {self._grant_id} has a budget of {budget} bytes: {self._meter.taken_bytes} are charged, and the next "
                f"envelope counts {size}.",
                code=Code.BUDGET_EXHAUSTED,
                hint="Make a new grant with a new budget.",
            )

    def _pass(self, way: _Way) -> None:
        """The range is on its way no more: it is answered, or will not be."""
        self._landed_on().end(way.header.base_offset)
        self._leaf_bytes.pop(way.header.base_offset, None)
        self._passed.set()

    def _landed_on(self) -> Landing:
        assert self._landing is not None
        return self._landing

    def _leaf(self, header: EnvelopeHeader, digest: bytes) -> Header:
        """What the range's leaves say, but for what they list and where it landed."""
        scope = self._key.scope
        return Header(
            kind=Kind.ACK,
            side=Side.INGRESS,
            time_ms=self._service.broker.clock_ms(),
            source_region=scope.source_region,
            destination_region=scope.destination_region,
            bridge=str(scope.bridge),
            stream=str(scope.stream),
            destination_stream=str(scope.destination),
            shard=scope.shard,
            source_epoch=scope.epoch,
            incarnation=scope.incarnation,
            first_offset=header.base_offset,
            last_offset=header.last_offset,
            commitment_key_id=self._committer.key_id,
            grant_id=scope.grant_id,
            terms_hash=scope.terms_hash,
            envelope_sha256=digest,
        )

    def _appended(self, way: _Way, result: Appended | FelixError) -> None:
        if isinstance(result, FelixError):
            assert way.note is not None
            self._shard.release_note(way.note)
            self._meter.give_back(way.charge)
            if isinstance(result, StorageFailedError):
                self._in_doubt()
            if isinstance(result, OffsetMismatchError):
                result = UnavailableError("The append was moved; open the stream again.", retry_after_ms=50)
            self._lost(way, result)
            return
        if self._old_slot in self._shard.annotations:
            # The record that has just landed holds what stood there.
            self._shard.free_slot_nowait(self._old_slot, lambda freed: None)
        self._log(way)

    def _in_doubt(self) -> None:
        """The range may stand in the shard, and gets its leaf where that is opened again. Of a log with copies whoever leads next says so."""
        shard, hosted = self._shard, self._hosted
        # Of a stream whose records go nothing would end the doubt.
        if shard.state is State.FAILED and not shard.has_copies and not hosted.removed:
            self._service.landings.in_doubt(hosted.name, shard.identity.shard)

    def _log(self, way: _Way) -> None:
        """Step 7, and 8 after it."""
        self._service.broker.metrics.ingested_records += way.landed.records
        self._service.leaves.put(way.leaves, partial(self._logged, way))

    def _logged(self, way: _Way, index: int, error: Exception | None) -> None:
        if error is not None:
            # It landed, so it stays on its way until it is in the log: no later stream of the link begins before.
            self._break(error)
            return
        if way.note is not None:
            self._shard.release_note(way.note)
        try:
            self._answer(way, self._receipt(way, index))
        except Exception as failure:
            self._lost(way, failure)

    def _lost(self, way: _Way, error: Exception) -> None:
        """This range gets no answer; the agent opens a new stream and sends it again."""
        # A range that stayed on its way would keep every later stream of the link waiting.
        self._pass(way)
        self._break(error)

    def _break(self, error: Exception) -> None:
        """The stream ends. A refusal that waited for what was on its way is given now."""
        if not isinstance(error, FelixError):
            log.error("answering a range of %s failed", self._key.scope, exc_info=error)
            error = FelixError(f"The broker failed: {type(error).__name__}.", code=Code.INTERNAL)
        if self._refusal is not None and not self._ended:
            self._refuse(self._refusal)
        else:
            self._fail(error)

    def _logged_before(self, way: _Way) -> None:
        """The range landed before, and nothing of this shard is on its way to the log."""
        self._tasks.begin(self._again(way, self._answer_again(way)))

    async def _again(self, way: _Way, work: Awaitable[None]) -> None:
        """Run what answers a range that was sent again; whatever fails ends the stream, and frees the range."""
        try:
            await work
        except RequestError as error:
            self._pass(way)
            self._refuse(error)
        except Exception as error:
            self._lost(way, error)

    async def _answer_again(self, way: _Way) -> None:
        """Find the leaf's index in the ingress log and sign the same receipt again."""
        found = await self._service.governance.arrivals.find_ack(self._key.scope, way.header.base_offset)
        if found is None:
            await self._log_again(way)
        elif found.envelope_sha256 != way.digest:
            raise self._another(way)
        else:
            self._answer(way, self._receipt(way, found.leaf))

    async def _log_again(self, way: _Way) -> None:
        """A crash came between append and leaf in a version that kept no notes: the leaf is made now, if these are the records
        that landed."""
        landed, batch = way.landed, way.batch
        if batch is not None and landed.base_offset >= self._shard.log_start_offset:
            entries = await self._shard.read(landed.base_offset, 1)
            (frame,) = FrameDecoder().feed(entries[0].data)
            held = decode_batch(frame.body)
            if held.header.base_offset != landed.base_offset or plain_body(held) != plain_body(batch):
                raise self._another(way)
        # It was within the budget when it landed, and counts from here on.
        self._meter.take(way.charge)
        self._log(way)

    def _another(self, way: _Way) -> RequestError:
        header = way.header
        return RequestError(
            f"Source offsets {header.base_offset} to {header.last_offset} landed with another envelope than the one "
            "that is sent again.",
            code=Code.POSITION_GAP,
            hint="Open the ingest stream again, and go on from the position it answers.",
        )

    def _receipt(self, way: _Way, index: int) -> bytes:
        scope, header, landed = self._key.scope, way.header, way.landed
        receipt = Receipt(
            grant_id=scope.grant_id,
            terms_hash=scope.terms_hash,
            source_region=scope.source_region,
            destination_region=scope.destination_region,
            bridge=str(scope.bridge),
            stream=str(scope.stream),
            destination_stream=str(scope.destination),
            shard=scope.shard,
            source_epoch=scope.epoch,
            incarnation=scope.incarnation,
            first_offset=header.base_offset,
            last_offset=header.last_offset,
            records=landed.records,
            envelope_sha256=way.digest,
            destination_first_offset=landed.first_offset,
            destination_last_offset=landed.last_offset,
            ingress_origin=self._service.governance.trail.key.name,
            ingress_index=index,
            time_ms=self._service.broker.clock_ms(),
            entries_sha256=way.entries_sha256,
            path_sha256=way.path_sha256,
        )
        key = self._service.receipt_key
        return sign_receipt(receipt, key)

    def _answer(self, way: _Way, receipt: bytes) -> None:
        """Step 8: the position that is recorded now, and the receipt."""
        self._pass(way)
        self._in_flight -= 1
        self._unanswered -= 1
        self._window.finish(way.size)
        self._window.announce()
        self._send(encode_frame(FrameType.RECEIPT, _RECEIPT.pack(way.header.next_offset) + receipt))
        if self._in_flight:
            return
        if self._refusal is not None:
            self._refuse(self._refusal)
        else:
            self._leave_led()

    # -- endings ---------------------------------------------------------------------------------------

    def _send(self, data: bytes, *, end: bool = False) -> None:
        if not self._ended:
            self._session.send(self._stream_id, data, end=end)

    def _leave_led(self) -> None:
        """End where another broker leads the destination, once what was taken is answered: an idle stream would keep its window of this broker's
        budget until something crosses."""
        elsewhere = self._hosted.elsewhere
        if elsewhere is not None and not self._in_flight:
            self._fail(elsewhere)

    def _refuse_next(self, error: FelixError) -> None:
        """Take nothing more. What was taken before is answered first: a receipt that is lost now is never asked for."""
        if self._in_flight:
            self._refusal = error
        else:
            self._refuse(error)

    def _refuse(self, error: FelixError, correlation: int = 0, request: OpenIngest | None = None) -> None:
        """Refused: the agent gets the refusal, and the ingress log records it."""
        peer = self._peer()
        if request is not None:
            stream, region, grant = request.stream, request.from_region, request.grant
        else:
            stream, region, grant = str(self._key.scope.stream), self._key.scope.source_region, self._grant_id
        self._service.governance.denied(
            error, actor=peer.spiffe_id, action="deliver", stream=stream, grant_id=grant, from_region=region
        )
        self._fail(error, correlation)

    def _fail(self, error: FelixError, correlation: int = 0) -> None:
        if self._ended:
            return
        # The agent goes where it is sent, or stands by.
        is_usual = isinstance(error, NotLeaderError) or error.code is Code.STANDBY
        level = logging.INFO if is_usual else logging.WARNING
        log.log(level, "ingest of %s ends: %s", self._grant_id or "a link", error)
        self._service.broker.metrics.refused(error)
        self._send(encode_error(error, correlation), end=True)
        self._session.end_role(self)
        self._end()

    def _end(self) -> None:
        self._ended = True
        if (
            self._opening is not None
            and not self._opening.done()
            and self._opening is not asyncio.current_task()
        ):
            self._opening.cancel()
        self._is_open = False
        self._inbox.clear()
        if self._work is not None and self._work is not asyncio.current_task():
            # It waits before its append or not at all, so nothing is cut off.
            self._work.cancel()
        if self._landing is not None:
            self._landing.leave(self)
        self._service.broker.budgets.ingest.give(self._taken_bytes)
        self._taken_bytes = 0
        self._session.hold_request(-self._request_held)
        self._request_held = 0
