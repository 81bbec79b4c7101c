"""One client's connection: which stream is what, who the client is, what it may do now.

The handshake and the control stream's frames are felix.session's; publishing, delivery and ingest are roles of
their own (region.session.publishing, region.delivery, region.crossing.ingest). This module routes bytes to them and ends what
is no longer allowed. Everything runs on the event loop; requests that wait run as tasks, a bounded number.

Invariants: before the client is authenticated only the control stream exists; an error that is the peer's ends
the session with a code and a sentence, never silently; nothing is left behind when the connection closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from felix.batch import BATCH_BYTES_MAX
from felix.errors import Code, FelixError, ProtocolError, RequestError, UnavailableError
from felix.frames import FRAME_HEADER_BYTES, FrameType
from felix.identity import NONCE_BYTES, Binding, Proof
from felix.messages import (
    Answer,
    Done,
    Goodbye,
    Limits,
    Message,
    OpenPublisher,
    OpenRelay,
    ReaderTraffic,
    RenewIdentity,
    Request,
    Subscribe,
    Subscribed,
    Throttled,
    Unsubscribe,
    Welcome,
    encode_error,
    encode_message,
    request_decoder,
)
from felix.names import SpiffeId, StreamName
from felix.peer import Peer
from felix.session import Authenticated, CreditGranted, CreditWindow, Requested, ServerSession, grant_frame
from felix.storage.port import has_failed, is_exhausted, is_full, lacks_resources
from felix.tasks import TaskSet
from felix.transport.port import Connection
from policy.access import Verb
from region.broker import Broker
from region.crossing.export import ExportService
from region.delivery import Subscription, resolve_starts, subscription_refusal
from region.exchange import OpenRole, PendingHandler, no_memory
from region.governance.service import Governance
from region.limits.quota import Account, Meter, Throttle
from region.ports import Role
from region.relay import RelayService
from region.session.audience import has_audience, request_name, require_audience
from region.session.publishing import PUBLISH_WINDOW_BYTES, PublishStream
from region.session.renewal import IdentityRenewal
from region.session.requests import Requests
from region.streams.hosted import FULL_AGAIN_MS

log = logging.getLogger("felix.region.session")

# Made here: shards and logs are opened on several threads, and msgspec learns a type at its first use, not safely on two.
request_decoder()

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""A peer that has not proved itself by then is sent away: pending handshakes stay bounded in time."""
REQUESTS_MAX: Final = 64
"""Requests of one session under way at once."""
SUBSCRIPTIONS_MAX: Final = 64
"""Below the transport's own limit of streams per connection, so that the refusal is ours and has a sentence."""
STREAMS_MAX: Final = 96
"""Client-opened streams of one session, for the same reason."""
PUBLISH_WINDOW_BYTES_MIN: Final = 2 * (FRAME_HEADER_BYTES + BATCH_BYTES_MAX)
"""A session's first window, and its only one once half of the budget is handed out: two of the largest batches."""
BACKLOG_BYTES_MAX: Final = 32 << 20
"""Bytes that wait for one peer. Delivery stops long before; what is beyond are answers and acknowledgements that
the peer asks for and does not read, and its session ends."""

THROTTLED_S_MIN: Final = 0.01
"""A client is notified of waits from this length on; shorter ones occur in every network."""
THROTTLED_EVERY_S: Final = 1.0
"""And no more often than this."""

TIMER_S_MAX: Final = 86_400.0
"""Timers are set for a day at most: event loops do not take arbitrarily long ones."""

REQUESTS_HELD_BYTES_MAX: Final = 1 << 20
"""Of requests that are not whole: four of the largest. A client sends them whole; QUIC cuts and delays only what is on its way."""

RIGHTLESS_BYTES_MAX: Final = 384 << 10
"""Bytes on the wire that a session may send in all whose identity has no right here and no grant in use: hours of an agent that
waits for its first grant, or a hundred documents. Fragments cost an engine up to 12 times as much (felix.transport.port), and a
broker has few such sessions (region.broker)."""

RIGHTLESS_REQUESTS_MAX: Final = 16
"""Requests of such a session under way at once: their answers, of at most 256 KiB each, are what it can make a broker hold."""
RIGHTLESS_BACKLOG_BYTES_MAX: Final = 2 << 20
"""And bytes that wait for it: some answers of a listing, which it asked for and does not read."""

_CLOSE_GRACE_S: Final = 0.2
"""Time for the last error frame to leave before the connection closes."""


@dataclass(frozen=True, slots=True)
class Services:
    """What a session's requests and streams are handed to; made by the node, one per broker."""

    broker: Broker
    verify: Callable[[Proof, Binding], Peer]
    """who a client is"""
    governance: Governance
    export: ExportService
    requests: Requests
    renewal: IdentityRenewal
    exchanges: Mapping[type[Message], OpenRole]
    """Roles of bidirectional streams, by the request that opens them."""
    relays: RelayService


class ClientSession:
    """A transport handler; one object per connection."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.broker = services.broker
        self.connection: Connection | None = None
        self.identity: SpiffeId | None = None
        self.peer: Peer | None = None
        self.publish_window = CreditWindow(0)
        self.subscriptions: dict[int, Subscription] = {}
        self.ended = False
        self.name = self.broker.runtime.random.randbytes(8).hex()
        self._control_stream: int | None = None
        self._roles: dict[int, Role | None] = {}
        self._tasks = TaskSet()
        self._publish_taken = 0
        self._publish_partial = 0
        self._delivery_charged = 0
        self._next_subscription = 1
        self._standing: Meter | None = None
        self._meters: dict[str, Meter] = {}
        self._withheld: list[tuple[float, int]] = []
        self._release: asyncio.TimerHandle | None = None
        self._publish_idle = True
        self._told_throttled_s = 0.0
        self._refused_by_disk: set[str] = set()
        """requests that found no room on the disk, as far as it was said"""
        self._timeout: asyncio.TimerHandle | None = None
        self._is_wide = False
        self._control_held = 0
        self._requests_held = 0
        """Bytes of requests that are not whole, of the control stream and of streams that are being opened."""
        self._control: ServerSession

    # -- transport handler -----------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self.connection = connection
        broker = self.broker
        self._control = ServerSession(
            region=broker.region,
            mesh=broker.mesh,
            broker=broker.broker_id,
            nonce=broker.runtime.random.randbytes(NONCE_BYTES),
            leaf_sha256=connection.server_leaf_sha256,
            verify=self.services.verify,
        )
        broker.sessions.add(self)
        loop = asyncio.get_running_loop()
        self._timeout = loop.call_later(HANDSHAKE_TIMEOUT_S, self._handshake_timeout)

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        if self.ended:
            return
        try:
            if stream_id == self._control_stream:
                self._control_data(data, end)
            else:
                self._role_data(stream_id, data, end)
            self._check_backlog()
        except FelixError as error:
            self.fail(error)

    def _role_data(self, stream_id: int, data: bytes, end: bool) -> None:
        role = self._roles.get(stream_id)
        if role is None and stream_id not in self._roles:
            role = self._open_role(stream_id, data, end)
        # A role that we ended is None: what is still under way for it is of no use.
        if role is not None:
            role.data(data, end)
        if end:
            self._roles.pop(stream_id, None)
            self._leave_tenants()

    def _check_backlog(self) -> None:
        connection = self.connection
        limit = BACKLOG_BYTES_MAX if self._is_wide else RIGHTLESS_BACKLOG_BYTES_MAX
        if connection is not None and connection.backlog_bytes() > limit:
            raise UnavailableError(
                f"More than {limit} bytes wait for this client, which asks and does not read.",
                code=Code.LIMIT_MEMORY,
                hint="Read what was asked for before asking for more.",
            )

    def stream_reset(self, stream_id: int, code: int) -> None:
        if stream_id == self._control_stream:
            self.fail(ProtocolError("The client reset its control stream.", code=Code.STATE))
            return
        role = self._roles.pop(stream_id, None)
        if role is not None:
            role.closed()
            self._leave_tenants()
        if not stream_id & 2:
            # Its other half is ours to end: an open one would keep its place among the session's streams.
            with contextlib.suppress(ValueError):
                self.send(stream_id, b"", end=True)

    def drained(self) -> None:
        self.pump()

    def closed(self, code: int, reason: str) -> None:
        self.ended = True
        for timer in (self._timeout, self._release):
            if timer is not None:
                timer.cancel()
        self._tasks.cancel()
        for role in self._roles.values():
            if role is not None:
                role.closed()
        self._roles.clear()
        for subscription in list(self.subscriptions.values()):
            subscription.close()
        self.subscriptions.clear()
        for meter in self._meters.values():
            meter.close()
        if self._standing is not None:
            self._standing.close()
        budgets = self.broker.budgets
        budgets.publish.give(self._publish_taken)
        budgets.delivery.give(self._delivery_charged)
        budgets.exchange.give(self._requests_held)
        self._publish_taken = self._delivery_charged = self._requests_held = 0
        self.broker.session_closed(self)

    # -- control stream --------------------------------------------------------------------------------

    def _open_role(self, stream_id: int, data: bytes, end: bool) -> Role | None:
        bidirectional = not stream_id & 2
        if self._control_stream is None:
            if not bidirectional:
                raise ProtocolError("The first stream of a session is the control stream.", code=Code.STATE)
            self._control_stream = stream_id
            self._control_data(data, end)
            return None
        if not self._control.established:
            raise ProtocolError("A second stream came before the handshake was done.", code=Code.STATE)
        refusal: UnavailableError | None = None
        if sum(role is not None for role in self._roles.values()) >= STREAMS_MAX:
            refusal = UnavailableError(
                f"This session has {STREAMS_MAX} streams open, the most that are allowed.",
                code=Code.LIMIT_MEMORY,
                hint="Close publishers, watches, workers and consumers that are no longer used: one that is merely dropped stays open.",
            )

        def admit(asked: type[Message]) -> None:
            if refusal is not None:
                raise refusal
            self._admit(asked)

        role: Role = (
            PendingHandler(self, stream_id, self.services.exchanges, admit, self._become)
            if bidirectional
            else PublishStream(self.broker, self, refusal or self._not_admitted(OpenPublisher))
        )
        self._roles[stream_id] = role
        return role

    def _admit(self, asked: type[Message]) -> None:
        """The one place where it is decided who may ask what at all. Raises RequestError(FORBIDDEN); what a bridge
        asks beyond its part is also written to the audit log. Of several brokers each also refuses what is not its own: NotLeaderError,
        RequestError(UNSUPPORTED)."""
        identity, broker = self.identity, self.broker
        assert identity is not None
        try:
            require_audience(identity, asked, broker.region, has_right=broker.has_right(identity))
        except RequestError as error:
            if identity.kind == "bridge":
                self.services.governance.denied(
                    error,
                    actor=identity,
                    action=f"ask for {request_name(asked)}",
                    from_region=identity.region if identity.region != broker.region else "",
                )
            raise
        if broker.clustered is not None:
            refused = broker.clustered.refusal(asked)
            if refused is not None:
                raise refused

    def _not_admitted(self, asked: type[Message]) -> RequestError | UnavailableError | None:
        try:
            self._admit(asked)
        except (RequestError, UnavailableError) as error:
            return error
        return None

    def _become(self, stream_id: int, role: Role) -> None:
        self._roles[stream_id] = role

    def _control_data(self, data: bytes, end: bool) -> None:
        events = self._control.receive(data, self.broker.clock_ms())
        if self.identity is not None:
            held = self._control.held_bytes
            self.hold_request(held - self._control_held)
            self._control_held = held
        for event in events:
            if isinstance(event, Requested):
                self._request(event.correlation, event.request)
            elif isinstance(event, CreditGranted):
                subscription = self.subscriptions.get(event.subscription)
                if subscription is not None:
                    subscription.credit(event.limit_bytes)
            elif isinstance(event, Authenticated):
                self._welcome(event.peer)
        self.flush_control()
        if end:
            self.close(0, "the client closed its control stream")

    def _welcome(self, peer: Peer) -> None:
        broker, identity = self.broker, peer.spiffe_id
        broker.admit(self, peer)
        hello = self._control.hello
        assert hello is not None
        self._standing = broker.quotas.enter(str(identity), hello.client)
        self.publish_window = CreditWindow(PUBLISH_WINDOW_BYTES_MIN)
        self.identity, self.peer = identity, peer
        if self._timeout is not None:
            self._timeout.cancel()
        # A session ends when the proof it rests on does.
        left_s = max(0.0, (peer.not_after_ms - broker.clock_ms()) / 1000)
        self._timeout = asyncio.get_running_loop().call_later(min(left_s, TIMER_S_MAX), self._identity_ended)
        self._open_windows()
        relays = self.services.relays
        may_relay = has_audience(identity, OpenRelay, broker.region)
        limits = Limits(
            BATCH_BYTES_MAX,
            SUBSCRIPTIONS_MAX,
            STREAMS_MAX,
            self._requests_max,
            relays.most_of_identity if may_relay else 0,
        )
        rights = broker.rights_of(identity)
        credit = self.publish_window.window_bytes
        self._control.welcome(Welcome(self.name, str(identity), credit, limits, rights))
        log.info("session of %s from %s", identity, self.connection and self.connection.peer_address)

    def _open_windows(self) -> None:
        """Let the connection's windows follow what its identity may do: one that may do nothing yet has little."""
        assert self.identity is not None
        if self.connection is None:
            return
        self._is_wide = self._is_wide or self.broker.has_right(self.identity)
        self.connection.admit(0 if self._is_wide else RIGHTLESS_BYTES_MAX)

    def widen(self) -> None:
        """A grant lets this session bring in records: it has the full windows from now on."""
        self._is_wide = True
        self._open_windows()

    def _handshake_timeout(self) -> None:
        self.fail(
            UnavailableError(
                f"The handshake was not done after {HANDSHAKE_TIMEOUT_S:.0f} s.", code=Code.HANDSHAKE_TIMEOUT
            )
        )

    def _identity_ended(self) -> None:
        assert self.peer is not None
        left_s = (self.peer.not_after_ms - self.broker.clock_ms()) / 1000
        if left_s > 0:
            self._timeout = asyncio.get_running_loop().call_later(
                min(left_s, TIMER_S_MAX), self._identity_ended
            )
            return
        self.fail(
            RequestError(
                f"The certificate of {self.identity} has expired.",
                code=Code.IDENTITY_EXPIRED,
                hint="Renew the identity and connect again.",
            )
        )

    def send_control(self, data: bytes) -> None:
        """Bytes of whole frames, after what was queued before."""
        if self._control_stream is not None:
            self.send(self._control_stream, data)

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Bytes for one stream; dropped where the session or its connection is over, since nobody hears them."""
        connection = self.connection
        if connection is not None and not self.ended and not connection.is_closed:
            connection.send(stream_id, data, end=end)

    def flush_control(self) -> None:
        data = self._control.take_output()
        if data:
            self.send_control(data)

    def send_publish_credit(self) -> None:
        """Tell the client how far it may publish now."""
        self.send_control(grant_frame(0, self.publish_window.announce()))

    def reserve_publishing(self, *, wide: bool) -> None:
        """Take this session's publish window out of the broker's budget, once. Raises UnavailableError(LIMIT_MEMORY)."""
        self._publish_idle = False
        if self._publish_taken:
            return
        budget = self.broker.budgets.publish
        plenty = wide and budget.used_bytes + PUBLISH_WINDOW_BYTES <= budget.limit_bytes // 2
        # Granted credit cannot be revoked: a window that was once large stays large.
        window = max(PUBLISH_WINDOW_BYTES if plenty else 0, self.publish_window.window_bytes)
        if not budget.take(window):
            raise UnavailableError(
                f"The broker's publish budget of {budget.limit_bytes} bytes is handed out.",
                code=Code.LIMIT_MEMORY,
                hint="Publish over fewer sessions, or have limits.publish_budget raised.",
                retry_after_ms=1000,
            )
        self._publish_taken = window
        if window > self.publish_window.window_bytes:
            self.publish_window.window_bytes = window
            self.send_publish_credit()

    def publisher_closed(self, role: Role, partial: int) -> None:
        """A publish stream is over; with the last one, the window goes back into the budget."""
        self._publish_partial -= partial
        others = any(isinstance(each, PublishStream) and each is not role for each in self._roles.values())
        if not others:
            self._publish_idle = True
            self._return_window()

    def _return_window(self) -> None:
        """Nobody publishes any more, and nothing is held."""
        if self._publish_idle and not self.publish_window.held_bytes:
            self.broker.budgets.publish.give(self._publish_taken)
            self._publish_taken = 0

    def finish_batch(self, size: int, due_s: float) -> None:
        """A batch is dealt with: its credit goes back, now (0) or at this time of the loop's clock."""
        if due_s and not self.ended:
            heapq.heappush(self._withheld, (due_s, size))
            self._arm_release()
        else:
            self.publish_window.finish(size)
        if self._publish_idle:
            self._return_window()

    def _arm_release(self) -> None:
        if self._release is None and self._withheld:
            self._release = asyncio.get_running_loop().call_at(self._withheld[0][0], self._release_due)

    def _release_due(self) -> None:
        """Give credit back that a used-up rate has withheld."""
        self._release = None
        now, window = asyncio.get_running_loop().time(), self.publish_window
        released = False
        while self._withheld and self._withheld[0][0] <= now:
            window.finish(heapq.heappop(self._withheld)[1])
            released = True
        if released:
            self.send_publish_credit()
        if self._publish_idle:
            self._return_window()
        self._arm_release()

    def traffic(self) -> list[ReaderTraffic]:
        """What every subscription has been sent, and what it waits for."""
        return [
            each.traffic(f"{self.name}/{number}", str(self.identity))
            for number, each in self.subscriptions.items()
        ]

    def quotas_changed(self) -> None:
        """Limits changed: work that waits for a rate continues, and waits again if it must."""
        if self._release is not None:
            self._release.cancel()
            self._withheld = [(0.0, size) for _, size in self._withheld]
            self._release_due()
        self.pump()

    def is_charged_to(self, accounts: Collection[Account]) -> bool:
        """Whether anything of it counts for one of these."""
        standing = () if self._standing is None else self._standing.accounts
        meters = (standing, *(meter.accounts for meter in self._meters.values()))
        return any(account in accounts for held in meters for account in held)

    def throttled(self, throttle: Throttle) -> None:
        """Tell the client why it is slow, now and then."""
        now = asyncio.get_running_loop().time()
        if throttle.wait_s < THROTTLED_S_MIN or now < self._told_throttled_s + THROTTLED_EVERY_S:
            return
        self._told_throttled_s = now
        account, limit = throttle.account, throttle.limit
        rate = account.limits.of(limit) or 0
        self.answer(0, Throttled(account.scope, account.name, limit, rate, int(throttle.wait_s * 1000)))

    def meter_of(self, tenant: str) -> Meter:
        """What a use of this tenant's streams is charged to; made with the first use, which makes this session one of the
        tenant's. Raises UnavailableError(LIMIT_SESSIONS)."""
        meter = self._meters.get(tenant)
        if meter is None:
            assert self._standing is not None
            meter = self._meters[tenant] = self.broker.quotas.use(self._standing, tenant)
        return meter

    def meter_for(self, stream: str) -> Meter:
        """As `meter_of`, by the stream's name; the identity's own meter where it has no stream of that name."""
        assert self._standing is not None
        assert self.identity is not None
        name = StreamName.parse(stream) if stream else None
        if name is None or self.broker.streams.get(name) is None or not self.broker.sees(self.identity, name):
            return self._standing
        return self.meter_of(name.tenant)

    def hold_request(self, change: int) -> None:
        """Bytes of requests that are not whole yet: of the broker's `exchange` budget, and few of one session.

        Raises UnavailableError(LIMIT_MEMORY), which ends the session.
        """
        budget = self.broker.budgets.exchange
        if change > 0:
            if self._requests_held + change > REQUESTS_HELD_BYTES_MAX:
                raise UnavailableError(
                    f"Requests of this session that are not whole hold {REQUESTS_HELD_BYTES_MAX} bytes, the most that are "
                    "allowed.",
                    code=Code.LIMIT_MEMORY,
                    hint="Send a request whole before the next one is begun.",
                    retry_after_ms=1000,
                )
            if not budget.take(change):
                raise no_memory(self.broker)
        else:
            budget.give(-change)
        self._requests_held += change

    def hold_partial(self, change: int) -> None:
        """Bytes of incomplete batches, which count against the credit before they are whole.

        Raises ProtocolError(CREDIT_EXCEEDED).
        """
        self._publish_partial += change
        window = self.publish_window
        if window.received_bytes + self._publish_partial > window.announced_bytes:
            raise ProtocolError(
                f"{window.received_bytes + self._publish_partial} bytes were sent where {window.announced_bytes} "
                "were granted.",
                code=Code.CREDIT_EXCEEDED,
            )

    # -- requests --------------------------------------------------------------------------------------

    @property
    def _requests_max(self) -> int:
        return REQUESTS_MAX if self._is_wide else RIGHTLESS_REQUESTS_MAX

    def _request(self, correlation: int, request: Request[Any]) -> None:
        if isinstance(request, OpenPublisher) or type(request) in self.services.exchanges:
            raise ProtocolError(
                f"{type(request).__name__} is the first frame of a stream of its own.", code=Code.STATE
            )
        refused = self._not_admitted(type(request))
        if refused is not None:
            self.refuse(correlation, refused)
            return
        if isinstance(request, Unsubscribe):
            subscription = self.subscriptions.pop(request.subscription, None)
            if subscription is not None:
                subscription.finish()
                self._leave_tenants()
            self.answer(correlation, Done())
            return
        if len(self._tasks) >= self._requests_max:
            self.refuse(
                correlation,
                UnavailableError(
                    f"{self._requests_max} requests of this session are under way, the most that are allowed.",
                    code=Code.LIMIT_RATE,
                    retry_after_ms=50,
                ),
            )
            return
        assert self._standing is not None
        refusal = self._standing.requested()
        if refusal is not None:
            self.refuse(correlation, refusal)
            return
        self._tasks.begin(self._answer(correlation, request))

    async def _answer(self, correlation: int, request: Request[Any]) -> None:
        assert self.identity is not None
        try:
            if isinstance(request, Subscribe):
                await self._subscribe(correlation, request)
            elif isinstance(request, RenewIdentity):
                # It is about the certificate that this session was proved with.
                assert self.peer is not None
                self.answer(correlation, await self.services.renewal.renew(self.peer, request))
            else:
                self.answer(correlation, await self.services.requests.answer(self.identity, request))
        except FelixError as error:
            self.refuse(correlation, error)
        except Exception as error:
            if isinstance(error, OSError) and (lacks_resources(error) or has_failed(error)):
                self._refuse_disk(correlation, type(request).__name__, error)
                return
            log.exception("request %s failed", type(request).__name__)
            self.refuse(
                correlation, FelixError(f"The broker failed: {type(error).__name__}.", code=Code.INTERNAL)
            )

    def _refuse_disk(self, correlation: int, request: str, error: OSError) -> None:
        """For what could not be read or written. It is asked again and again, and said once."""
        if request not in self._refused_by_disk:
            self._refused_by_disk.add(request)
            log.error("request %s could not be answered for want of the disk: %s", request, error)
        code = Code.DISK_FULL if is_full(error) else Code.UNAVAILABLE
        if is_full(error):
            why, hint = "The broker's disk is full", "Make room, and ask again."
        elif is_exhausted(error):
            why, hint = (
                "The broker has too many files open",
                "Let it open more (LimitNOFILE= of its service, ulimit -n), and ask again.",
            )
        else:
            why, hint = "The broker's disk failed", "Look after the disk, and ask again."
        self.refuse(
            correlation,
            UnavailableError(
                f"{why}: what was asked for is not done, or not all of it.",
                code=code,
                hint=hint,
                retry_after_ms=FULL_AGAIN_MS,
            ),
        )

    def answer(self, correlation: int, answer: Answer) -> None:
        self.send_control(encode_message(FrameType.ANSWER, answer, correlation))

    def refuse(self, correlation: int, error: FelixError) -> None:
        """An answer of refusal. A refused residency request is also written to the audit log."""
        self.broker.metrics.refused(error)
        self.send_control(encode_error(error, correlation))

    async def _subscribe(self, correlation: int, request: Subscribe) -> None:
        if len(self.subscriptions) >= SUBSCRIPTIONS_MAX:
            raise UnavailableError(
                f"This session has {SUBSCRIPTIONS_MAX} subscriptions, the most that are allowed.",
                code=Code.LIMIT_SUBSCRIPTIONS,
                hint="Open another session, or end a subscription.",
            )
        name = StreamName.parse(request.stream)
        broker = self.broker
        assert self.identity is not None
        if request.grant:
            reader = self.services.export.reader(self.identity, name, request.grant)
        else:
            broker.require(self.identity, Verb.SUBSCRIBE, name)
            reader = None
        stream = broker.stream(name) if reader is not None else broker.use_stream(name)
        least = FRAME_HEADER_BYTES + BATCH_BYTES_MAX
        if request.credit_bytes < least:
            raise RequestError(
                f"A subscription with {request.credit_bytes} bytes of credit could not take every batch.",
                hint=f"Grant at least {least} bytes.",
            )
        broker.require_led(stream)
        starts = await resolve_starts(stream, request)
        if self.ended or self.connection is None or self.connection.is_closed:
            return
        # It may have been deleted, or the right taken away, while the start was looked up.
        refusal = subscription_refusal(broker, self.identity, stream, reader)
        if refusal is not None:
            raise refusal
        broker.require_led(stream)
        number = self._next_subscription
        self._next_subscription += 1
        meter = self.meter_of(name.tenant)
        meter.hold("subscriptions")
        subscribed = Subscribed(number, str(name), stream.incarnation, starts)
        event_stream = self.connection.open_stream(bidirectional=False)
        subscription = Subscription(
            broker, self, number, event_stream, stream, starts, request.credit_bytes, reader, meter
        )
        self.subscriptions[number] = subscription
        self.answer(correlation, subscribed)
        self.send(event_stream, encode_message(FrameType.ANSWER, subscribed, correlation))
        subscription.start()

    # -- delivery --------------------------------------------------------------------------------------

    def may_send(self) -> bool:
        """True while this connection and the broker's delivery budget take more. Settles the budget first."""
        connection = self.connection
        if self.ended or connection is None or connection.is_closed:
            return False
        backlog = self.settle_delivery()
        budget = self.broker.budgets.delivery
        if backlog >= self.broker.transport_limits.backlog_high_bytes:
            return False  # `drained` comes
        if self._delivery_charged < backlog or budget.used_bytes >= budget.limit_bytes:
            budget.refused += 1
            self.broker.delivery_waits(self)
            return False
        return True

    def settle_delivery(self) -> int:
        """Charge the budget with what now waits for this peer, as far as it reaches. Returns what waits."""
        connection = self.connection
        budget = self.broker.budgets.delivery
        backlog = connection.backlog_bytes() if connection is not None and not self.ended else 0
        budget.give(self._delivery_charged)
        self._delivery_charged = min(backlog, budget.limit_bytes - budget.used_bytes)
        taken = budget.take(self._delivery_charged)
        assert taken
        return backlog

    def pump(self) -> None:
        """Send what every subscription may now."""
        for subscription in list(self.subscriptions.values()):
            subscription.pump()
        for role in list(self._roles.values()):
            if role is not None:
                role.pump()

    # -- endings ---------------------------------------------------------------------------------------

    def rights_changed(self) -> None:
        """This identity's rights have changed: end at once what they no longer allow."""
        assert self.identity is not None, "asked of sessions that are authenticated"
        if not self.services.governance.trusts(self.identity.region):
            self.fail(
                RequestError(
                    f"{self.broker.region} does not trust {self.identity.region} any more.",
                    code=Code.WRONG_REGION,
                    hint=f"Ask the operator of {self.broker.region}.",
                )
            )
            return
        if not self._is_wide:
            self._open_windows()
        for stream_id, role in list(self._roles.items()):
            if role is not None:
                role.rights_changed()
                if self._roles.get(stream_id) is None:
                    role.closed()
        for number, subscription in list(self.subscriptions.items()):
            error = subscription.refusal()
            if error is not None:
                del self.subscriptions[number]
                subscription.fail(error)
        self._leave_tenants()

    def _leave_tenants(self) -> None:
        """Of one of several brokers: a session counts for a tenant while it uses a stream of it here. What moves away with its leader counts where that
        is, and clients keep their sessions for what comes back: two sessions of each would be held, or the second refused."""
        if self.broker.clustered is None or not self._meters:
            return
        used = {
            each.meter
            for each in (*self.subscriptions.values(), *self._roles.values())
            if each is not None and each.meter is not None
        }
        for tenant, meter in list(self._meters.items()):
            if meter not in used:
                del self._meters[tenant]
                meter.close()

    @property
    def subscription_count(self) -> int:
        """Subscriptions that are open."""
        return len(self.subscriptions)

    def drop_subscription(self, number: int) -> None:
        """The subscription has ended by itself."""
        self.subscriptions.pop(number, None)
        self._leave_tenants()

    def end_role(self, role: Role) -> None:
        """The role is over; bytes that still come for it are ignored."""
        for stream_id, held in self._roles.items():
            if held is role:
                self._roles[stream_id] = None
                self._leave_tenants()
                return

    def fail(self, error: FelixError) -> None:
        """Tell the peer what is wrong, then close."""
        if self.ended:
            return
        self.broker.metrics.refused(error)
        log.info("session of %s ends: %s %s", self.identity, error.code.name, error)
        self.flush_control()
        self.send_control(encode_error(error))
        self._close_soon(int(error.code), error.sentence)

    def leave(self, goodbye: Goodbye) -> None:
        """The broker is about to stop; the client should reconnect."""
        self.send_control(encode_message(FrameType.GOODBYE, goodbye))

    @property
    def heard_at(self) -> float:
        return self.connection.heard_at if self.connection is not None else 0.0

    def superseded(self) -> None:
        """A newer session of the same identity takes this one's place."""
        self.fail(
            UnavailableError(
                f"A newer session of {self.identity} took this one's place.",
                code=Code.LIMIT_SESSIONS,
                hint="Run one agent for one identity, or have the limit raised: felix quota set.",
                retry_after_ms=5000,
            )
        )

    def close(self, code: int, reason: str) -> None:
        if not self.ended:
            self._close_soon(code, reason)

    def _close_soon(self, code: int, reason: str) -> None:
        self.ended = True
        connection = self.connection
        if connection is not None:
            asyncio.get_running_loop().call_later(_CLOSE_GRACE_S, connection.close, code, reason[:200])
