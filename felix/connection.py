"""Connection: one region, reached and reached again; below client, publisher and subscription, above the link.

A `RegionConnection` is the actor: it makes links (felix.link), one after the other, with backoff, and tells its attachments (publishers and feeds)
when one stands and when it is gone.

Invariant: `link_up` and `link_down` alternate, `link_dead` comes last and once; all on the event loop.

Only felix/ itself and the bridge agent may use this module; applications use `felix.client`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from typing import Any, Final, Literal, TypeVar, get_args

import msgspec

from felix.address import Address
from felix.backoff import Backoff, BackoffPolicy
from felix.bounded import BoundedMap
from felix.errors import (
    Code,
    FelixError,
    NotLeaderError,
    ProtocolError,
    RequestError,
    UnavailableError,
)
from felix.identity import Binding, Identity, Proof, prove
from felix.link import Attachment, Link
from felix.messages import (
    AnswerT,
    Challenge,
    Goodbye,
    Limits,
    Repeatable,
    Request,
)
from felix.names import StreamName
from felix.profile import Credentials, Profile, load_credentials
from felix.relay import RelayPath
from felix.routing import ANSWER_S, ELSEWHERE_S, LEADERS_MAX, Routes
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.tasks import end_tasks
from felix.transport.port import (
    ClientTls,
    Engine,
    NobodyListensError,
    TransportLimits,
    engine_named,
)

CONNECT_TIMEOUT_S: Final = 10.0
"""Until the first session stands: covers a broker that is just starting, short enough for a person to wait."""
CLIENT_BYTES: Final = 8
"""Of a client's id: it is compared with those of the same identity or tenant alone."""
ATTEMPT_TIMEOUT_S: Final = 5.0
"""For one address, transport and session handshake together; then the next address is tried."""
REQUEST_TIMEOUT_S: Final = 30.0
"""A request with its answer, reconnects included."""
GOODBYE_DRAIN_S: Final = 5.0
"""How long answers are still awaited on a session that the broker asked to leave."""
GOODBYE_PAUSE_MS_MAX: Final = 60_000
"""However long a broker asks its clients to stay away, they look again after a minute."""
RELAY_AFTER_S: Final = 1.5
"""How long a leader's own address is tried before the first connection's broker is asked to relay: the second packet of a handshake whose first was
lost leaves after 1 s (RFC 9002, section 6.2.2), and has half a second to come back."""
RELAY_AGAIN_S: Final = 300.0
"""So long a leader that was reached through another broker is asked for there first: firewalls and port-forwards stay for the day."""
HOPS_MAX: Final = 2
"""Brokers that one request is sent on to before it pauses: two that name each other have not heard of the same election."""

Relaying = Literal["auto", "always", "never"]
"""Whether a leader is reached through the first connection's broker: where its own address does not answer, always, or not at all."""
RELAYING: Final[tuple[Relaying, ...]] = get_args(Relaying)

_log = logging.getLogger("felix.connection")

T = TypeVar("T")


class SessionInfo(msgspec.Struct, frozen=True):
    """The session that stands now: who answered, as whom we came, what is allowed."""

    session: str
    identity: str
    region: str
    mesh: str
    broker: str
    rights: tuple[str, ...]
    limits: Limits
    engine: str
    address: Address
    relayed_by: str = ""
    """the broker through which this one is reached, where it is not reached itself"""


def _is_of_cluster(error: UnavailableError) -> bool:
    """Whether a broker says that the request is another one's, so that it has done nothing."""
    return isinstance(error, NotLeaderError) and bool(error.stream or error.leader)


class _Lost:
    """Tells a client's routes when a link to a leader ends (Attachment)."""

    def __init__(self, routes: Routes[Attachment], address: str, leader: RegionConnection) -> None:
        self._routes, self._address, self._leader = routes, address, leader

    def link_up(self, link: Link) -> None: ...

    def link_down(self, error: FelixError) -> None:
        # Once all others on that link were told that it is down.
        asyncio.get_running_loop().call_soon(self._routes.lost, self._address, self._leader)

    def link_dead(self, error: FelixError) -> None:
        self.link_down(error)


class RegionConnection:
    """The actor that keeps one region connected."""

    def __init__(
        self,
        profile: Profile,
        *,
        engine: Engine | None = None,
        transport_limits: TransportLimits | None = None,
        backoff: BackoffPolicy | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        wait_for_broker: bool = True,
        runtime: Runtime = REAL,
        first: RegionConnection | None = None,
        profile_only: bool = False,
        relay: Relaying = "never",
    ) -> None:
        """`wait_for_broker`: False raises at once, in `open`, if no process listens at any address of the profile. `first`: the client's
        first connection, where this one is to a leader; None: it is the first. `profile_only`: a broker that names
        another one's address is followed only to an address of the profile. `relay`: whether the first connection's broker carries
        those to leaders."""
        self.profile = profile
        self._wait_for_broker = wait_for_broker
        self.request_timeout_s = request_timeout_s
        self.runtime = runtime
        self.policy = backoff or BackoffPolicy()
        self.reconnects = 0
        self._engine = engine
        self._limits = transport_limits or TransportLimits()
        self._connect_timeout_s = connect_timeout_s
        self._addresses = cycle(profile.parsed_addresses())
        self._attachments: dict[Attachment, None] = {}
        self._link: Link | None = None
        self._linked = asyncio.Event()
        self._info: SessionInfo | None = None
        self.identity: Identity | None = None
        """As whom the newest session came; None before the first."""
        self._dead: FelixError | None = None
        self._task: asyncio.Task[None] | None = None
        self._first = first
        self._relay = relay
        self._client = b""
        self._relayed: BoundedMap[str, float] = BoundedMap(LEADERS_MAX)
        """leaders' addresses that did not answer, until when they are asked for through this connection first"""
        self._failed: BoundedMap[str, FelixError] = BoundedMap(LEADERS_MAX)
        """why no session stands with brokers that were tried, by address; of the first connection for all"""
        known = [str(address) for address in profile.parsed_addresses()]
        self._routes: Routes[Attachment] = (
            first._routes
            if first is not None
            else Routes(
                self,
                self._to_leader,
                self.policy,
                runtime,
                self._address,
                (lambda address: address in known) if profile_only else (lambda address: True),
                known=known,
                with_broker=lambda: "" if self._info is None else self._info.broker,
            )
        )

    # -- life -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect for the first time.

        Raises UnavailableError where no address answers in time, RequestError where identity, region or profile are
        wrong, ProtocolError where the peer does not speak this protocol.
        """
        assert self._task is None, "a connection is opened once"
        loop = asyncio.get_running_loop()
        if self._engine is None:
            self._engine = engine_named(self.profile.engine or None)
        link = await self._establish(loop.time() + self._connect_timeout_s)
        self._task = loop.create_task(self._run(link), name=f"felix-{self.profile.region}")

    async def close(self) -> None:
        """End the connection; every waiting caller gets an error. Idempotent."""
        try:
            if self._first is None:
                await self._routes.close()
        finally:
            self._die(
                UnavailableError(
                    f"The connection to region {self.profile.region} was closed by this client.",
                    code=Code.DISCONNECTED,
                )
            )
            if self._task is not None:
                # Also where whoever closes is cancelled meanwhile.
                self._task.cancel()
            if self._link is not None:
                self._link.close()
        if self._task is not None:
            await end_tasks(self._task)
        link = self._link
        if link is not None:
            link.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await link.connection.wait_closed()

    @property
    def session(self) -> SessionInfo:
        """The newest session, also while a new one is being made. Raises UnavailableError before the first."""
        if self._info is None:
            raise UnavailableError(
                "There is no session yet.", code=Code.DISCONNECTED, hint="Use `async with felix.connect(…)`."
            )
        return self._info

    @property
    def link(self) -> Link | None:
        """The link that stands, if one does."""
        return self._link if self._link is not None and self._link.is_usable else None

    def attach(self, attachment: Attachment, stream: StreamName | None = None) -> None:
        """Tell it of links from now on; of the present one at once. `stream`: what it lives on; where the region has several brokers,
        it is told of links to that stream's leader."""
        if stream is None:
            self.join(attachment)
        else:
            self._routes.attach(attachment, stream)

    def detach(self, attachment: Attachment) -> None:
        self._routes.detach(attachment)
        self.part(attachment)

    def join(self, attachment: Attachment) -> None:
        """As `attach`, for the links of this connection itself."""
        if self._dead is not None:
            attachment.link_dead(self._dead)
            return
        self._attachments[attachment] = None
        if self.link is not None:
            attachment.link_up(self.link)

    def part(self, attachment: Attachment) -> None:
        """As `detach`, for this connection itself."""
        self._attachments.pop(attachment, None)

    def _address(self) -> str:
        return "" if self._info is None else str(self._info.address)

    def _client_id(self, nonce: bytes) -> bytes:
        """The same on all links of this client, to whichever brokers: the beginning of the first nonce that it drew."""
        first = self._first or self
        first._client = first._client or nonce[:CLIENT_BYTES]
        return first._client

    def _to_leader(self, address: str) -> RegionConnection:
        """A connection to one broker of the region, as this one is made."""
        leader = RegionConnection(
            replace(self.profile, addresses=(address,)),
            engine=self._engine,
            transport_limits=self._limits,
            backoff=self.policy,
            connect_timeout_s=ATTEMPT_TIMEOUT_S,
            request_timeout_s=self.request_timeout_s,
            wait_for_broker=False,
            runtime=self.runtime,
            first=self,
            relay=self._relay,
        )
        leader.join(_Lost(self._routes, address, leader))
        return leader

    @property
    def why_unreached(self) -> str:
        """Why a broker was not reached when it was tried last, as a sentence; empty where all were. A refusal is told before a silence: it is what
        somebody can put right."""
        failed = list((self._first or self)._failed.items())
        if not failed:
            return ""
        address, error = next(
            (each for each in reversed(failed) if not isinstance(each[1], UnavailableError)), failed[-1]
        )
        return f"Of the broker at {address}: {error.sentence}"

    # -- requests -------------------------------------------------------------------------------------

    async def request(self, request: Request[AnswerT], *, timeout_s: float | None = None) -> AnswerT:
        """One request and its answer, within `timeout_s` (None: the connection's own).

        A request that was not yet sent waits for a link. If its answer was lost, it is retried if it is idempotent, else it
        raises UnavailableError(DISCONNECTED): the outcome is unknown. Raises the broker's refusal.
        """
        limit_s = self.request_timeout_s if timeout_s is None else timeout_s
        backoff = Backoff(self.policy, self.runtime.random)
        last: FelixError | None = None
        try:
            async with asyncio.timeout(limit_s):
                asked, hops = self, 0
                unled_s: float | None = None
                while True:
                    try:
                        link = await (self._wait_for_link() if asked is self else asked._soon())
                        return await link.ask(request)
                    except UnavailableError as error:
                        if self._dead is not None:
                            raise
                        last = error
                        elsewhere = self._led_elsewhere(error)
                        if elsewhere is not None and elsewhere is not asked and hops < HOPS_MAX:
                            asked, hops = elsewhere, hops + 1
                            continue
                        if not (isinstance(request, Repeatable) or _is_of_cluster(error)):
                            raise self._unknown_outcome(request, error) from error
                        unled_s = self.runtime.clock.boot_ms() / 1000 if unled_s is None else unled_s
                        beside = self._beside(asked, error, unled_s)
                        asked, hops = beside or self, 0
                    await asyncio.sleep(backoff.after_ms(last) / 1000)
        except TimeoutError:
            why = last.sentence if last else "No broker answered."
            if self.link is None or isinstance(last, NotLeaderError):
                why = f"{why} {self.why_unreached}".rstrip()
            raise UnavailableError(
                f"{type(request).__name__} was not answered by region {self.profile.region} within {limit_s:g} s. {why}",
                code=Code.TIMEOUT,
                hint="Is the region up? `felix region status` tells."
                if isinstance(request, Repeatable)
                else "Whether it was carried out is not known; look before asking again.",
            ) from last

    async def at_leader(self, stream: StreamName, use: Callable[[Link], Awaitable[T]]) -> T:
        """What `use` does on a link to the broker that leads a stream: for what lives on one link, and ends with it.

        Raises what `use` raises, but follows NotLeaderError; UnavailableError where no link stands in time."""
        reach = self._routes.reach(stream)
        asked, hops = reach if isinstance(reach, RegionConnection) else self, 0
        while True:
            try:
                async with asyncio.timeout(self.request_timeout_s):
                    link = await asked._wait_for_link()
            except TimeoutError:
                raise UnavailableError(
                    f"No session with {', '.join(asked.profile.addresses)} of region {self.profile.region} stands. {self.why_unreached}".rstrip(),
                    code=Code.TIMEOUT,
                ) from None
            try:
                return await use(link)
            except NotLeaderError as error:
                elsewhere = self._led_elsewhere(error)
                if elsewhere is None or elsewhere is asked or hops >= HOPS_MAX:
                    raise
                asked, hops = elsewhere, hops + 1

    def take_profile(self, profile: Profile) -> None:
        """Go on with another certificate or authority: every session begins anew, now."""
        self.profile = profile
        for each in (self, *self._routes.leaders()):
            assert isinstance(each, RegionConnection)
            if each is not self:
                each.profile = replace(profile, addresses=each.profile.addresses)
            if each.link is not None:
                each.link.close()

    def _led_elsewhere(self, error: FelixError) -> RegionConnection | None:
        """The connection to the broker that a refusal names."""
        if not isinstance(error, NotLeaderError) or not error.address:
            return None
        if not self._routes.may_call(error.address):
            raise UnavailableError(
                f"{self.profile.region} names its broker {error.leader} at {error.address}, which is none of the addresses given for it.",
                code=Code.NOT_LEADER,
                hint=f"Add {error.address} to the addresses of {self.profile.region}, if its operators say so.",
                retry_after_ms=1_000,
            ) from error
        reach = self._routes.at(error.address, error.leader)
        return reach if isinstance(reach, RegionConnection) else None

    def _beside(self, asked: RegionConnection, error: FelixError, since_s: float) -> RegionConnection | None:
        """Another broker, where the one asked has named nobody for a while: it may be cut off from those who know."""
        if (
            not isinstance(error, NotLeaderError)
            or self.runtime.clock.boot_ms() / 1000 - since_s < ELSEWHERE_S
        ):
            return None
        reach = self._routes.beside(asked._address())
        return reach if isinstance(reach, RegionConnection) else None

    def _unknown_outcome(self, request: Request[Any], error: UnavailableError) -> UnavailableError:
        if error.code is not Code.DISCONNECTED:
            return error
        return UnavailableError(
            f"The connection to region {self.profile.region} was lost before {type(request).__name__} was answered.",
            code=Code.DISCONNECTED,
            hint="Whether it was carried out is not known; look (describe, list) before asking again.",
        )

    async def _wait_for_link(self) -> Link:
        while True:
            if self._dead is not None:
                raise self._dead
            if self.link is not None:
                return self.link
            self._linked.clear()
            await self._linked.wait()

    async def _soon(self) -> Link:
        """The link to a leader. Raises NotLeaderError where it does not stand within ANSWER_S, or cannot: nothing was asked, and another broker may be
        elected meanwhile."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._wait_for_link()
        except (TimeoutError, UnavailableError) as error:
            at = self.profile.addresses[0]
            raise NotLeaderError(f"The broker at {at} has not answered.", leader=at) from error

    # -- the actor ------------------------------------------------------------------------------------

    async def _run(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(self.policy, self.runtime.random)
        while True:
            began = loop.time()
            await link.leave_asked.wait()
            pause_ms = 0
            if link.leaving is not None and not link.is_over:
                # So long that broker is away; the next address is another's.
                pause_ms = link.leaving.reconnect_after_ms if len(self.profile.addresses) == 1 else 0
                _log.info("the session with %s ends: %s", self.profile.region, link.leaving.reason)
                await self._let_finish(link)
                link.close()
            # A session that falls as soon as it stands must not be made again in a tight circle.
            if (loop.time() - began) * 1000 >= self.policy.ceiling_ms:
                backoff.reset()
            await asyncio.sleep(backoff.next_ms(min(pause_ms, GOODBYE_PAUSE_MS_MAX)) / 1000)
            try:
                link = await self._establish(None)
            except FelixError as error:
                self._die(error)
                return
            self.reconnects += 1

    def begin_anew(self, why: str) -> None:
        """Reconnect, as when a broker leaves: pending answers are still awaited, and everything open resumes."""
        link = self.link
        if link is not None:
            link.leave(Goodbye(f"{why}: the session begins anew", 0))

    async def _let_finish(self, link: Link) -> None:
        deadline = asyncio.get_running_loop().time() + GOODBYE_DRAIN_S
        while link.waits and not link.is_over and asyncio.get_running_loop().time() < deadline:
            await asyncio.wait([link.over], timeout=0.02)

    async def _establish(self, deadline: float | None) -> Link:
        """A link that stands. Tries address after address; without a deadline, for as long as it takes."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(self.policy, self.runtime.random)
        tried = deserted = 0
        expired: dict[Address, RequestError] = {}
        while True:
            address = next(self._addresses)
            tried += 1
            expired.pop(address, None)
            timeout_s = ATTEMPT_TIMEOUT_S
            if deadline is not None:
                # Of brokers that are silent none takes the time of those behind it.
                untried = len(self.profile.addresses) - (tried - 1) % len(self.profile.addresses)
                timeout_s = min(timeout_s, max(0.05, (deadline - loop.time()) / untried))
            error: FelixError
            try:
                return await self._try(address, timeout_s)
            except UnavailableError as caught:
                error = caught
                deserted = deserted + 1 if isinstance(caught, NobodyListensError) else 0
            except ProtocolError as caught:
                # A handshake that was too slow may be quick the next time; anything else will be wrong again.
                if caught.code is not Code.HANDSHAKE_TIMEOUT:
                    raise
                error = caught
            except RequestError as caught:
                # It may be that broker's clock that is wrong: what most brokers say is believed.
                if caught.code is not Code.IDENTITY_EXPIRED:
                    raise
                deserted = 0
                expired[address] = error = caught
                if 2 * len(expired) > len(self.profile.addresses):
                    raise
            except FelixError:
                raise
            except Exception as caught:
                if deadline is not None:
                    raise
                # No thread could be started, say. Whatever lives on this region waits for a link, and nobody else makes one.
                _log.exception("an attempt to connect to %s:%d failed", *address)
                error = UnavailableError(f"The attempt failed: {type(caught).__name__}: {caught}.")
            if deadline is None and tried % len(self.profile.addresses):
                continue
            if deadline is not None and not self._wait_for_broker and deserted >= len(self.profile.addresses):
                raise UnavailableError(
                    f"No broker of region {self.profile.region} listens at {', '.join(self.profile.addresses)} (UDP).",
                    hint=f"Start it with `felix region up {self.profile.region}`, or check the addresses.",
                    retry_after_ms=error.retry_after_ms,
                ) from error
            _log.info("%s:%d of %s: %s", *address, self.profile.region, error.sentence)
            if deadline is not None and tried % len(self.profile.addresses):
                continue
            wait_s = backoff.next_ms(error.retry_after_ms) / 1000
            if deadline is not None and loop.time() + wait_s >= deadline:
                if expired:
                    raise next(iter(expired.values()))
                raise UnavailableError(
                    f"No broker of region {self.profile.region} answered at {', '.join(self.profile.addresses)} within "
                    f"{self._connect_timeout_s:g} s: {error.sentence}",
                    code=error.code,
                    hint=f"Start it with `felix region up {self.profile.region}`, or check the addresses.",
                    retry_after_ms=error.retry_after_ms,
                ) from error
            await asyncio.sleep(wait_s)

    async def _try(self, address: Address, timeout_s: float) -> Link:
        """As `_attempt`, and note why it failed (`why_unreached`)."""
        failed = (self._first or self)._failed
        try:
            link = await self._attempt(address, timeout_s)
        except FelixError as error:
            failed.put(str(address), error)
            raise
        failed.pop(str(address))
        return link

    async def _attempt(self, address: Address, timeout_s: float) -> Link:
        assert self._engine is not None
        # Read at each connect, off the loop, so that a renewed certificate is used without a restart.
        credentials = await asyncio.to_thread(load_credentials, self.profile)
        link = Link(
            region=self.profile.region,
            prove=lambda challenge, binding: self._prove(credentials, challenge, binding),
            limits=self._limits,
            random=self.runtime.random,
            over=self._link_over,
            moved=lambda error: self._routes.learned(error, str(address)),
            is_of_several=self._first is not None or len(self.profile.addresses) > 1,
            client=self._client_id,
        )
        tls = ClientTls(credentials.root_pem, self.profile.tls_name)
        try:
            async with asyncio.timeout(timeout_s):
                relayed_by = await self._dial(address, tls, link, timeout_s)
                established = await link.established
        except TimeoutError:
            error = UnavailableError(f"{address} did not answer within {timeout_s:.1f} s.", code=Code.TIMEOUT)
            link.fail(error)
            raise error from None
        except FelixError:
            raise
        except BaseException:
            link.close()
            raise
        welcome, challenge = established
        self._info = SessionInfo(
            welcome.session, welcome.identity, challenge.region, challenge.mesh, challenge.broker,
            tuple(welcome.rights), welcome.limits, link.connection.engine_name, address, relayed_by,
        )  # fmt: skip
        self._link = link
        self.identity = credentials.identity
        if link.is_over:
            raise UnavailableError("The session ended as soon as it stood.", code=Code.DISCONNECTED)
        for attachment in list(self._attachments):
            attachment.link_up(link)
        self._linked.set()
        return link

    async def _dial(self, address: Address, tls: ClientTls, link: Link, timeout_s: float) -> str:
        """Connect `link` to an address, itself or through the first connection's broker; that broker's id, empty where it is not needed."""
        loop, first = asyncio.get_running_loop(), self._first
        until = loop.time() + timeout_s
        if first is None or self._relay == "never" or not first._may_relay:
            await self._dial_directly(address, tls, link, timeout_s)
            return ""
        name = str(address)
        if self._relay == "always" or loop.time() < (first._relayed.use(name) or 0.0):
            try:
                return await self._dial_through(first, address, tls, link, until)
            except (UnavailableError, RequestError):
                first._relayed.pop(name)
                if self._relay == "always":
                    raise
            await self._dial_directly(address, tls, link, max(0.05, until - loop.time()))
            return ""
        try:
            await self._dial_directly(address, tls, link, min(RELAY_AFTER_S, timeout_s / 2))
            return ""
        except FelixError as error:
            # Whoever answers at an address that a firewall or NAT takes elsewhere may be anybody; nothing but a TLS hello was said.
            failed = error
        try:
            by = await self._dial_through(first, address, tls, link, until)
        except RequestError:
            raise failed from None
        first._relayed.put(name, loop.time() + RELAY_AGAIN_S)
        _log.info("%s of %s is reached through %s: %s", address, self.profile.region, by, failed.sentence)
        return by

    async def _dial_directly(self, address: Address, tls: ClientTls, link: Link, timeout_s: float) -> None:
        assert self._engine is not None
        await self._engine.connect(address.host, address.port, tls, link, self._limits, timeout=timeout_s)

    async def _dial_through(
        self, first: RegionConnection, address: Address, tls: ClientTls, link: Link, until: float
    ) -> str:
        assert self._engine is not None
        if first.link is None:
            raise UnavailableError(
                f"No session stands that could carry one to {address}.", code=Code.DISCONNECTED
            )
        path = RelayPath(first.link)
        await path.open(str(address))
        left_s = max(0.05, until - asyncio.get_running_loop().time())
        await self._engine.connect(
            address.host, address.port, tls, link, self._limits, timeout=left_s, path=path
        )
        return first.session.broker

    @property
    def _may_relay(self) -> bool:
        """Whether this connection's broker carries others."""
        return self.link is not None and self.session.limits.relays_max > 0

    def _prove(self, credentials: Credentials, challenge: Challenge, binding: Binding) -> Proof:
        if challenge.mesh != self.profile.mesh:
            raise RequestError(
                f"Asked for mesh {self.profile.mesh!r} and reached {challenge.mesh!r}; nothing was sent there.",
                code=Code.WRONG_REGION,
                hint="Check the addresses in the profile.",
            )
        return prove(credentials.identity, binding)

    def _link_over(self, link: Link, error: FelixError) -> None:
        if link is not self._link:
            return
        for attachment in list(self._attachments):
            attachment.link_down(error)

    def _die(self, error: FelixError) -> None:
        if self._dead is not None:
            return
        self._dead = error
        attachments, self._attachments = list(self._attachments), {}
        for attachment in attachments:
            attachment.link_dead(error)
        self._linked.set()
