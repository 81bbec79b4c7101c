"""The etcd metadata store: for regions of several brokers. etcd v3 over gRPC, by way of aetcd's stubs.

aetcd's own client connects to one endpoint without TLS, and its watcher ends silently with its stream, so
this module drives the stubs itself:

- requests go to one endpoint at a time and move to the next when it does not answer;
- a write is sent once. Where its answer is lost, the caller gets OutcomeUnknownError, never a blind retry;
- a watch reconnects by itself, anywhere, and resumes at the revision after the last one it yielded. After each
  connect it asks whether that revision is still whole (etcd itself says nothing where the first missing event
  is a deletion at exactly the compacted revision);
- a member at which watches stand is compared with the others, so one that answers and hears of nothing new, as its disk hangs, is left;
- a watch that is quiet asks its member for progress, so one that hangs with its connections open is left soon, and
  with it whatever else waits for that member. Requests go to a silent member only where no other is left;
- every wait has a bound.

Sources: etcd v3.5 API reference (KV, Watch, Lease, Auth, Maintenance), "API guarantees".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import grpc  # type: ignore[import-untyped]
from aetcd import rpc

from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.runtime.real import REAL
from felix.tasks import end_tasks
from region.metadata.lease import lease_lost
from region.metadata.port import PAGE_BYTES_MAX, CompactedError, MetadataStore, OutcomeUnknownError
from region.metadata.transaction import (
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    Absent,
    Change,
    Compare,
    Entry,
    Event,
    ModRevision,
    Page,
    Put,
    TransactResult,
    Write,
    prefix_end,
)

CONNECT_MS: Final = 2_000
"""How long to look for an endpoint that takes a connection, all of them together."""
REQUEST_MS: Final = 6_000
"""How long one request may take, tries at several endpoints included: longer than an election of etcd's leader
with default settings."""
REQUEST_MS_MIN: Final = 100
REQUEST_MS_MAX: Final = 60_000
WATCH_OUTAGE_MS: Final = 10_000
"""How long a watch tries to reconnect before it tells its user that it is blind."""
ATTEMPT_MS: Final = 500
"""How long the first endpoint has for a request that may be sent again; each further one has twice as long. A lease of two seconds is renewed
three times: one renewal at a member that hangs leaves time for the next."""
WATCH_QUIET_MS: Final = 500
"""After so long without a word of its member a watch asks for progress. All watches at a member go by one answer."""
WATCH_ANSWER_MS: Final = 500
"""How long that member has to answer, and once more to answer anything at all. So a member that hangs is left after a second and a half, before
the shortest lease that etcd grants by default (2 s) has ended: whoever waits for its end sees it at another member."""
MEMBERS_LOOK_MS: Final = 5_000
"""How often each member that nothing is heard of otherwise is asked whether it is there."""
MEMBERS_LOOK_AGAIN_MS: Final = 1_000
"""The same while one is silent."""
MEMBER_ANSWER_MS: Final = 2_000
"""How long it may take to answer that."""
MEMBER_SILENT_MS: Final = 3_000
"""A person is told of a member that has been silent for so long: longer than one takes to restart on a quiet machine."""
MEMBERS_COMPARE_MS: Final = 1_000
"""How often the member at which watches stand is compared with another one: one whose disk hangs answers what it is asked, and hears of nothing new."""
MEMBER_BEHIND_MS: Final = 1_500
"""After so long without a revision that another member has, watches leave a member. One that is merely slow, or catches up, costs them a read."""
_RETRY_MS: Final = 50
_RETRY_MS_MAX: Final = 1_000
_MESSAGE_BYTES_MAX: Final = 2 * PAGE_BYTES_MAX
"""One answer of etcd. A page that would be larger is asked for again with fewer entries."""
_PAGE_ENTRIES: Final = PAGE_BYTES_MAX // (VALUE_BYTES_MAX + KEY_BYTES_MAX)
"""So many entries always fit, whatever their size."""
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),  # a dead peer is noticed; etcd refuses pings closer than 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name this also bounds one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # a write must not be sent twice behind our back
    ("grpc.use_local_subchannel_pool", 1),
)
_REQUIRE_LEADER: Final = ("hasleader", "true")
"""A member cut off from its cluster ends our streams instead of staying silent (clientv3.WithRequireLeader)."""
_ASK_PROGRESS: Final = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
_ASKED: Final = -1
"""The watch that an answer to it names."""

log = logging.getLogger("felix.region.metadata")

_boot_ms: Final = REAL.clock.boot_ms
_ENDPOINT: Final = re.compile(r"(?:(https?)://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})/?")
_BAD_VERSION: Final = re.compile(r"3\.5\.[0-2](?!\d)")


def known_bad_version(version: str) -> str | None:
    """A sentence that says why this etcd version must not hold a region's metadata, or None. For `felix doctor`.

    Source: etcd's announcement "v3.5 data inconsistency issue" (3.5.0 to 3.5.2, fixed in 3.5.3).
    """
    if not _BAD_VERSION.match(version):
        return None
    return (
        f"etcd {version} can lose consistency: after a crash under load a member may skip writes that the others "
        "have, and nothing reports it (etcd 3.5.0 to 3.5.2). Upgrade to etcd 3.5.3 or newer before this store "
        "matters."
    )


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """PEM files: the authority to trust (None: the system's), and our certificate and key where etcd asks for one."""

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """Where etcd is. Endpoints as `https://host:port`; `http://` only where TLS is not wanted, never mixed.
    `request_ms`: the time limit of one request, tries at several endpoints included."""

    endpoints: tuple[str, ...]
    tls: EtcdTls | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    request_ms: int = REQUEST_MS

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise _config("No etcd endpoint is given", "Name at least one, as in https://etcd-0:2379.")
        schemes = set()
        for endpoint in self.endpoints:
            match = _ENDPOINT.fullmatch(endpoint)
            if match is None or not 0 < int(match[3]) < 65_536:
                raise _config(
                    f"{endpoint!r} is not an etcd endpoint",
                    "Write it as https://host:port or http://host:port.",
                )
            schemes.add(match[1] or ("https" if self.tls else "http"))
        if len(schemes) > 1:
            raise _config("etcd endpoints mix http and https", "Use https for all of them.")
        if self.tls is not None and schemes == {"http"}:
            raise _config("TLS files are given, but the etcd endpoints are http", "Write them as https://….")
        if self.tls is not None and (self.tls.certificate is None) != (self.tls.key is None):
            raise _config("An etcd client certificate needs its key, and a key its certificate", "Give both.")
        if bool(self.user) != bool(self.password):
            raise _config("etcd credentials need a user and a password", "Give both or neither.")
        if not REQUEST_MS_MIN <= self.request_ms <= REQUEST_MS_MAX:
            raise _config(
                f"A time limit of {self.request_ms} ms for etcd requests is out of bounds",
                f"Choose {REQUEST_MS_MIN} to {REQUEST_MS_MAX} ms.",
            )

    @property
    def secure(self) -> bool:
        """Whether connections use TLS."""
        return self.tls is not None or self.endpoints[0].startswith("https://")

    def targets(self) -> list[str]:
        """`host:port` of each endpoint."""
        return [endpoint.split("://")[-1].rstrip("/") for endpoint in self.endpoints]


def _config(sentence: str, hint: str) -> RequestError:
    return RequestError(f"{sentence}.", code=Code.CONFIG_INVALID, hint=hint)


class _Endpoint:
    """One member's channel and stubs, the token it gave us, and since when it has been silent."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.target = target
        self.heard_ms = _boot_ms()
        """when it answered anything last"""
        self.asked_ms = 0
        """when a watch asked it for progress last"""
        self.silent_since_ms = 0
        """when it was asked first what it has not answered; 0 while it answers"""
        self.is_told = False
        """whether the log says that it is silent"""
        self.watches = 0
        """that stand there"""
        self.revision = 0
        """how far its store was when it was asked last"""
        self.lacks = 0
        """a revision of another member's that it did not have; 0: none is known"""
        self.lacks_since_ms = 0
        self.is_behind = False
        """whether it has lacked that for too long; watches stand elsewhere"""
        self._waiting: set[asyncio.Timeout] = set()
        if credentials is None:
            self.channel = rpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            self.channel = rpc.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel)
        self.auth = rpc.AuthStub(self.channel)
        self.maintenance = rpc.MaintenanceStub(self.channel)
        self.token = ""

    def heard(self) -> None:
        """It has answered."""
        self.heard_ms, self.silent_since_ms = _boot_ms(), 0

    def missed(self, since_ms: int) -> None:
        """What it was asked then it has not answered."""
        if not self.silent_since_ms and since_ms >= self.heard_ms:
            self.silent_since_ms = since_ms

    def leave(self) -> None:
        """It hangs: nobody waits for it any longer."""
        now = asyncio.get_running_loop().time()
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(now)

    @contextlib.asynccontextmanager
    async def within(self, limit_ms: int) -> AsyncGenerator[None, None]:
        """Wait for an answer. TimeoutError after `limit_ms`, or once it is known that the member hangs."""
        since_ms = _boot_ms()
        try:
            async with asyncio.timeout(limit_ms / 1_000) as limit:
                self._waiting.add(limit)
                try:
                    yield
                finally:
                    self._waiting.discard(limit)
        except TimeoutError:
            self.missed(since_ms)
            raise
        except rpc.AioRpcError as error:
            if _is_answer(error):
                self.heard()
            else:
                self.missed(since_ms)
            raise
        self.heard()

    async def status(self, limit_ms: int) -> Any:
        """What it says of itself, without asking other members. Raises AioRpcError, TimeoutError."""
        async with self.within(limit_ms):
            answer = await self.maintenance.Status(rpc.StatusRequest(), metadata=self.metadata())
        self.revision = answer.header.revision
        if self.revision >= self.lacks:
            self.caught_up()
        return answer

    def caught_up(self) -> None:
        """It has what others have, as far as is known."""
        if self.is_behind:
            log.warning("the member %s of the metadata store goes on", self.target)
        self.lacks, self.is_behind = 0, False

    def metadata(self, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        return (("token", self.token), *more) if self.token else more

    async def is_ready(self, deadline_ms: int) -> bool:
        """Connect if need be; False once the attempt failed or `deadline_ms` passed."""
        while True:
            state = self.channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                return True
            remaining = deadline_ms - _boot_ms()
            if remaining <= 0 or state in (
                grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                grpc.ChannelConnectivity.SHUTDOWN,
            ):
                return False
            try:
                async with asyncio.timeout(remaining / 1_000):
                    await self.channel.wait_for_state_change(state)
            except TimeoutError:
                return False


def _is_answer(error: Any) -> bool:
    """Whether the member itself said so, and not the connection to it."""
    return error.code() not in (
        rpc.StatusCode.UNAVAILABLE,
        rpc.StatusCode.DEADLINE_EXCEEDED,
        rpc.StatusCode.CANCELLED,
    ) or (error.details() or "").startswith("etcdserver: ")


def _entry(kv: Any) -> Entry:
    return Entry(kv.key.decode(errors="replace"), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _bounds(prefix: str) -> tuple[bytes, bytes]:
    """etcd's key and range_end for a prefix; two zero bytes stand for everything."""
    low = prefix.encode()
    return low or b"\0", prefix_end(low) or b"\0"


def _compare(compare: Compare) -> Any:
    key = compare.key.encode()
    if isinstance(compare, ModRevision):
        return rpc.Compare(
            key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=compare.revision
        )
    if isinstance(compare, Absent):
        return rpc.Compare(key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=0)
    return rpc.Compare(key=key, target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, value=compare.value)


def _write(write: Write) -> Any:
    if isinstance(write, Put):
        return rpc.RequestOp(
            request_put=rpc.PutRequest(key=write.key.encode(), value=write.value, lease=write.lease)
        )
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=write.key.encode()))


class EtcdStore(MetadataStore):
    """Open with `await EtcdStore.open(config)`, which needs no endpoint to be up yet."""

    def __init__(self, config: EtcdConfig, endpoints: list[_Endpoint]) -> None:
        super().__init__("etcd at " + ", ".join(config.endpoints), REAL.clock)
        self._config = config
        self._endpoints = endpoints
        self._current = 0
        begin = asyncio.get_running_loop().create_task
        self._looking = [
            begin(self._look_at_members(), name="members of the metadata store"),
            begin(self._compare_members(), name="revisions of the metadata store"),
        ]

    @classmethod
    async def open(cls, config: EtcdConfig) -> Self:
        """Prepare the channels. Raises RequestError(CONFIG_INVALID) where a TLS file cannot be read."""
        credentials = None
        if config.secure:
            tls = config.tls or EtcdTls()
            try:
                pem = [
                    None if path is None else await asyncio.to_thread(path.read_bytes)
                    for path in (tls.authority, tls.key, tls.certificate)
                ]
            except OSError as error:
                raise _config(
                    f"A TLS file for etcd cannot be read: {error}", "Check its path and rights."
                ) from error
            credentials = grpc.ssl_channel_credentials(*pem)
        return cls(config, [_Endpoint(target, credentials) for target in config.targets()])

    async def versions(self) -> dict[str, str]:
        """The etcd version of each endpoint that answers, by endpoint; see `known_bad_version`."""
        self._check_open()
        found: dict[str, str] = {}
        for name, endpoint in zip(self._config.endpoints, self._endpoints, strict=True):
            if await endpoint.is_ready(_boot_ms() + CONNECT_MS):
                with contextlib.suppress(rpc.AioRpcError, FelixError):
                    await self._authenticate(endpoint)
                    status = await endpoint.maintenance.Status(
                        rpc.StatusRequest(),
                        metadata=endpoint.metadata(),
                        timeout=self._config.request_ms / 1_000,
                    )
                    found[name] = status.version
        if not found:
            raise self._unavailable("none of its endpoints answers")
        return found

    # Members

    def silent_members(self) -> dict[str, int]:
        if len(self._endpoints) == 1:
            # That the store does not answer says it all.
            return {}
        now_ms = _boot_ms()
        return {
            name: silent_ms
            for name, endpoint in zip(self._config.endpoints, self._endpoints, strict=True)
            if endpoint.silent_since_ms
            and (silent_ms := now_ms - endpoint.silent_since_ms) >= MEMBER_SILENT_MS
        }

    async def _look_at_members(self) -> None:
        """Ask those that nobody asks otherwise, until the store is closed: whoever counts on three wants to know of the first that is away."""
        while True:
            is_whole = not any(endpoint.silent_since_ms for endpoint in self._endpoints)
            await asyncio.sleep((MEMBERS_LOOK_MS if is_whole else MEMBERS_LOOK_AGAIN_MS) / 1_000)
            await asyncio.gather(*map(self._look_at, self._endpoints))

    async def _look_at(self, endpoint: _Endpoint) -> None:
        if endpoint.silent_since_ms or _boot_ms() - endpoint.heard_ms >= MEMBERS_LOOK_MS:
            with contextlib.suppress(rpc.AioRpcError, TimeoutError):
                await endpoint.status(MEMBER_ANSWER_MS)
        since_ms = endpoint.silent_since_ms
        if since_ms and not endpoint.is_told and _boot_ms() - since_ms >= MEMBER_SILENT_MS:
            endpoint.is_told = True
            log.warning("the member %s of the metadata store does not answer", endpoint.target)
        elif endpoint.is_told and not since_ms:
            endpoint.is_told = False
            log.warning("the member %s of the metadata store answers again", endpoint.target)

    async def _compare_members(self) -> None:
        """Until the store is closed: the member at which watches stand, with one of the others after the other."""
        for turn in itertools.count():
            await asyncio.sleep(MEMBERS_COMPARE_MS / 1_000)
            for watched in [each for each in self._endpoints if each.watches]:
                others = [
                    each for each in self._endpoints if each is not watched and not each.silent_since_ms
                ]
                if others:
                    with contextlib.suppress(rpc.AioRpcError, TimeoutError):
                        await self._compare(watched, others[turn % len(others)])

    async def _compare(self, watched: _Endpoint, other: _Endpoint) -> None:
        """Raises AioRpcError, TimeoutError."""
        before = other.revision
        await other.status(WATCH_ANSWER_MS)
        if other.revision < before:
            # The store was put back: what any of them had before says nothing.
            for each in self._endpoints:
                each.caught_up()
        lacks, since_ms = watched.lacks, watched.lacks_since_ms
        if not lacks:
            if watched.revision >= other.revision:
                return
            # It may just not have been asked for a while.
            lacks, since_ms = other.revision, _boot_ms()
            watched.lacks, watched.lacks_since_ms = lacks, since_ms
        await watched.status(WATCH_ANSWER_MS)
        if watched.lacks == lacks and not watched.is_behind and _boot_ms() - since_ms >= MEMBER_BEHIND_MS:
            log.warning(
                "the member %s of the metadata store is at revision %d, and %s has had %d for %d ms: watches leave it",
                watched.target, watched.revision, other.target, lacks, _boot_ms() - since_ms,
            )  # fmt: skip
            watched.is_behind = True
            watched.leave()

    # Requests

    def _unavailable(self, why: str, code: Code = Code.UNAVAILABLE) -> UnavailableError:
        return UnavailableError(
            f"The metadata store does not answer: {why}.",
            code=code,
            hint=f"Check that etcd runs, has a leader and can be reached at {', '.join(self._config.endpoints)}"
            + (", and that both sides trust each other's certificates." if self._config.secure else "."),
            retry_after_ms=_RETRY_MS_MAX,
        )

    def _check_cancelled(self) -> None:
        """gRPC cancels the callers of a channel that we closed; that is an error of theirs only if they were asked."""
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            self._check_open()

    async def _connect(self, deadline_ms: int) -> _Endpoint:
        """An endpoint that takes a connection, the last good one first. Raises UnavailableError after CONNECT_MS,
        or at the deadline."""
        deadline_ms = min(deadline_ms, _boot_ms() + CONNECT_MS)
        share_ms = max(_RETRY_MS, CONNECT_MS // len(self._endpoints))
        while True:
            self._check_open()
            for _ in self._endpoints:
                endpoint, asked_ms = self._endpoints[self._current], _boot_ms()
                if await endpoint.is_ready(min(deadline_ms, asked_ms + share_ms)):
                    return endpoint
                endpoint.missed(asked_ms)
                self._next(endpoint)
            if _boot_ms() >= deadline_ms:
                raise self._unavailable("none of its endpoints takes a connection")
            await asyncio.sleep(_RETRY_MS / 1_000)

    def _next(self, failed: _Endpoint) -> None:
        """Go on at the one behind it, past those that are silent unless all are."""
        if self._endpoints[self._current] is failed:
            count = len(self._endpoints)
            others = [(self._current + step) % count for step in range(1, count)]
            answering = [
                at
                for at in others
                if not (self._endpoints[at].silent_since_ms or self._endpoints[at].is_behind)
            ]
            self._current = [*answering, *others, self._current][0]

    async def _authenticate(self, endpoint: _Endpoint) -> None:
        if not self._config.user or endpoint.token:
            return
        try:
            answer = await endpoint.auth.Authenticate(
                rpc.AuthenticateRequest(name=self._config.user, password=self._config.password),
                timeout=self._config.request_ms / 1_000,
            )
        except rpc.AioRpcError as error:
            if error.code() is rpc.StatusCode.INVALID_ARGUMENT:
                raise RequestError(
                    f"etcd refused the user {self._config.user!r}: {error.details()}.",
                    code=Code.IDENTITY_REFUSED,
                    hint="Check the user and the password in the region's configuration.",
                ) from error
            raise
        endpoint.token = answer.token

    async def _ask(
        self,
        send: Callable[[_Endpoint], Awaitable[Any]],
        *,
        once: bool = False,
        expected: rpc.StatusCode | None = None,
    ) -> Any:
        """Send a request to one endpoint after the other until one answers. `once`: it must not be sent twice.
        `expected`: a refusal that the caller wants to see as it is, as AioRpcError."""
        deadline_ms = _boot_ms() + self._config.request_ms
        # Half of the time for one endpoint at most, so that a member that hangs leaves time for another.
        patience_ms = min(ATTEMPT_MS, self._config.request_ms // 2)
        while True:
            endpoint = await self._connect(deadline_ms)
            remaining_ms = max(1, deadline_ms - _boot_ms())
            attempt_ms = remaining_ms if once else min(remaining_ms, patience_ms)
            patience_ms *= 2
            sent = never_sent = False
            asked_ms = _boot_ms()
            try:
                async with endpoint.within(attempt_ms):
                    await self._authenticate(endpoint)
                    sent = True
                    return await send(endpoint)
            except rpc.AioRpcError as error:
                failed: Exception = error
                why = error.details() or error.code().name
                if self._token_refused(error, endpoint) and _boot_ms() < deadline_ms:
                    continue
                if error.code() is expected:
                    raise
                self._raise_if_final(error)
                never_sent = why.startswith("failed to connect")
            except TimeoutError as error:
                failed, why = error, f"no answer in {_boot_ms() - asked_ms} ms"
            except asyncio.CancelledError:
                self._check_cancelled()
                raise
            self._next(endpoint)
            if once and sent and not never_sent:
                raise OutcomeUnknownError(
                    f"The answer of the metadata store to a write was lost ({endpoint.target}: {why}); "
                    "it may have happened or not.",
                    hint="Read what is there before writing again. Endpoints: "
                    + ", ".join(self._config.endpoints),
                    retry_after_ms=_RETRY_MS_MAX,
                ) from failed
            if _boot_ms() + _RETRY_MS >= deadline_ms:
                raise self._unavailable(f"{endpoint.target}: {why}") from failed
            await asyncio.sleep(_RETRY_MS / 1_000)

    def _token_refused(self, error: rpc.AioRpcError, endpoint: _Endpoint) -> bool:
        """etcd's tokens run out and end with its process; then a new one is asked for."""
        details = error.details() or ""
        refused = bool(endpoint.token) and (
            error.code() is rpc.StatusCode.UNAUTHENTICATED
            or "invalid auth token" in details
            or "revision of auth store is old" in details
            or "revision in header is old" in details
        )
        if refused:
            endpoint.token = ""
        return refused

    def _raise_if_final(self, error: rpc.AioRpcError) -> None:
        """Raise what another endpoint would answer alike; return for what another attempt may cure."""
        details = error.details() or ""
        match error.code():
            case rpc.StatusCode.UNAVAILABLE | rpc.StatusCode.DEADLINE_EXCEEDED | rpc.StatusCode.CANCELLED:
                return
            case rpc.StatusCode.UNKNOWN | rpc.StatusCode.INTERNAL | rpc.StatusCode.ABORTED:
                return
            case rpc.StatusCode.RESOURCE_EXHAUSTED if "space exceeded" in details:
                raise UnavailableError(
                    "etcd refuses writes: its database has reached its quota.",
                    code=Code.DISK_FULL,
                    hint="Compact and defragment it, then clear the alarm (etcdctl alarm disarm).",
                    retry_after_ms=_RETRY_MS_MAX,
                ) from error
            case rpc.StatusCode.RESOURCE_EXHAUSTED:
                raise self._unavailable(details, Code.LIMIT_RATE) from error
            case rpc.StatusCode.PERMISSION_DENIED | rpc.StatusCode.UNAUTHENTICATED:
                raise RequestError(
                    f"etcd does not let this broker do that: {details}.",
                    code=Code.FORBIDDEN,
                    hint="Give its user a role with read and write on the prefix /felix/1/ (docs/metadata.md).",
                ) from error
            case _ if "user name is empty" in details:
                raise RequestError(
                    "etcd asks for credentials and none are configured.",
                    code=Code.IDENTITY_REFUSED,
                    hint="Give the user and the password in the region's configuration.",
                ) from error
            case _:
                raise RequestError(f"etcd refused a request: {details or error.code().name}.") from error

    async def _get(self, key: str) -> Entry | None:
        request = rpc.RangeRequest(key=key.encode())
        answer = await self._ask(lambda at: at.kv.Range(request, metadata=at.metadata()))
        return _entry(answer.kvs[0]) if answer.kvs else None

    async def _range(self, prefix: str, limit: int, after: str) -> Page:
        low, high = _bounds(prefix)
        if after and after.encode() >= low:
            low = after.encode() + b"\0"
            if high != b"\0" and low >= high:
                high = low + b"\0"  # etcd refuses an empty range; this one holds no key we could have written
        while True:
            request = rpc.RangeRequest(key=low, range_end=high, limit=limit)
            try:
                answer = await self._ask(
                    lambda at, request=request: at.kv.Range(request, metadata=at.metadata()),  # type: ignore[misc]
                    expected=rpc.StatusCode.RESOURCE_EXHAUSTED,
                )
            except rpc.AioRpcError as error:
                if limit <= _PAGE_ENTRIES:  # so few always fit: it is etcd that is short of something
                    self._raise_if_final(error)
                limit = max(_PAGE_ENTRIES, limit // 4)
                continue
            return Page(tuple(map(_entry, answer.kvs)), answer.header.revision, more=answer.more)

    async def _transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        request = rpc.TxnRequest(compare=map(_compare, compares), success=map(_write, writes))
        try:
            answer = await self._ask(
                lambda at: at.kv.Txn(request, metadata=at.metadata()),
                once=bool(writes),
                expected=rpc.StatusCode.NOT_FOUND,
            )
        except rpc.AioRpcError as error:
            leases = [write.lease for write in writes if isinstance(write, Put) and write.lease]
            raise lease_lost(leases[0] if leases else 0) from error
        return TransactResult(answer.succeeded, answer.header.revision)

    # Watches

    async def _watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]:
        silent_since_ms: int | None = None
        retry_ms, patience_ms = _RETRY_MS, WATCH_QUIET_MS
        while True:
            failed: Exception
            try:
                stream = self._watch_once(prefix, from_revision, min(patience_ms, self._config.request_ms))
                patience_ms *= 2
                async with contextlib.aclosing(stream):
                    async for change in stream:
                        silent_since_ms, retry_ms, patience_ms = None, _RETRY_MS, WATCH_QUIET_MS
                        from_revision = change.revision + 1
                        if change.events:
                            yield change
                failed = self._unavailable("it ended a watch")
            except UnavailableError as error:
                failed = error
            except rpc.AioRpcError as error:
                self._raise_if_final(error)
                failed = error
            except TimeoutError as error:
                failed = error
            self._check_open()
            now_ms = _boot_ms()
            silent_since_ms = now_ms if silent_since_ms is None else silent_since_ms
            if now_ms - silent_since_ms >= WATCH_OUTAGE_MS:
                raise self._unavailable(f"a watch could not be resumed for {WATCH_OUTAGE_MS} ms") from failed
            await asyncio.sleep(retry_ms / 1_000)
            retry_ms = min(_RETRY_MS_MAX, 2 * retry_ms)

    async def _watch_once(
        self, prefix: str, from_revision: int, patience_ms: int
    ) -> AsyncGenerator[Change, None]:
        """One connection's worth of a watch, that has `patience_ms` to begin. A change without events only says how far the store is."""
        low, high = _bounds(prefix)
        endpoint = await self._connect(_boot_ms() + self._config.request_ms)
        endpoint.watches += 1
        try:
            async with endpoint.within(patience_ms):
                await self._authenticate(endpoint)
            call = endpoint.watch.Watch(metadata=endpoint.metadata(_REQUIRE_LEADER))
            try:
                async with endpoint.within(patience_ms):
                    await call.write(
                        rpc.WatchRequest(
                            create_request=rpc.WatchCreateRequest(
                                key=low,
                                range_end=high,
                                start_revision=from_revision,
                                progress_notify=True,
                                fragment=True,
                            )
                        )
                    )
                    answer = await call.read()
                self._check_watch(answer, from_revision)
                if not answer.created:
                    return
                await self._check_history(low, from_revision)
                yield Change(from_revision - 1, ())
                held: list[Any] = []
                answers = _Answers(endpoint, call)
                while True:
                    answer = await answers.next()
                    self._check_watch(answer, from_revision)
                    if answer.watch_id == _ASKED:
                        # A sign of life and no more: before etcd 3.5.8 it may come before events of its revision.
                        continue
                    held.extend(answer.events)
                    if answer.fragment:
                        # A revision may go on in the next fragment; only whole ones are passed on.
                        last = held[-1].kv.mod_revision
                        whole = [event for event in held if event.kv.mod_revision != last]
                        held = held[len(whole) :]
                    else:
                        whole, held = held, []
                    for change in _changes(whole):
                        yield change
                    if not answer.events and not answer.fragment and answer.header.revision >= from_revision:
                        yield Change(answer.header.revision, ())
            finally:
                call.cancel()
        except asyncio.CancelledError:
            self._check_cancelled()
            raise
        except (rpc.AioRpcError, TimeoutError) as error:
            if not (isinstance(error, rpc.AioRpcError) and self._token_refused(error, endpoint)):
                self._next(endpoint)
            raise
        finally:
            endpoint.watches -= 1

    def _check_watch(self, answer: Any, from_revision: int) -> None:
        if answer is grpc.aio.EOF:
            raise self._unavailable("it ended a watch")
        if answer.compact_revision:
            raise CompactedError(
                f"etcd compacted its history up to revision {answer.compact_revision}; "
                f"a watch from {from_revision} would miss changes.",
                hint="Load the prefix again and watch from the revision of what was loaded.",
            )
        if answer.canceled:
            if "permission denied" in answer.cancel_reason:
                raise RequestError(
                    f"etcd does not let this broker watch: {answer.cancel_reason}.",
                    code=Code.FORBIDDEN,
                    hint="Give its user a role with read and write on the prefix /felix/1/ (docs/metadata.md).",
                )
            raise self._unavailable(f"it cancelled a watch ({answer.cancel_reason})")

    async def _check_history(self, key: bytes, from_revision: int) -> None:
        """Raises CompactedError unless the revision before `from_revision` can still be read. `key`: any that
        our user may read."""
        if from_revision <= 1:
            return
        request = rpc.RangeRequest(key=key, revision=from_revision - 1, count_only=True)
        try:
            await self._ask(
                lambda at: at.kv.Range(request, metadata=at.metadata()), expected=rpc.StatusCode.OUT_OF_RANGE
            )
        except rpc.AioRpcError as error:
            raise CompactedError(
                f"etcd does not have its history from revision {from_revision} on ({error.details()}).",
                hint="Load the prefix again and watch from the revision of what was loaded.",
            ) from error

    # Leases

    async def _lease_grant(self, ttl_ms: int) -> tuple[int, int]:
        request = rpc.LeaseGrantRequest(TTL=-(-ttl_ms // 1_000))
        # A grant whose answer was lost binds nothing and runs out; asking again is harmless.
        answer = await self._ask(lambda at: at.lease.LeaseGrant(request, metadata=at.metadata()))
        return answer.ID, answer.TTL * 1_000

    async def _lease_renew(self, lease_id: int) -> int:
        self._check_open()

        async def renew(at: _Endpoint) -> Any:
            call = at.lease.LeaseKeepAlive(metadata=at.metadata(_REQUIRE_LEADER))
            try:
                await call.write(rpc.LeaseKeepAliveRequest(ID=lease_id))
                return await call.read()
            finally:
                call.cancel()

        answer = await self._ask(renew)
        if answer is grpc.aio.EOF:
            raise self._unavailable("it ended a lease's renewal")
        if answer.TTL <= 0:
            raise lease_lost(lease_id)
        return int(answer.TTL) * 1_000

    async def _lease_revoke(self, lease_id: int) -> None:
        self._check_open()
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._ask(
                lambda at: at.lease.LeaseRevoke(request, metadata=at.metadata()),
                expected=rpc.StatusCode.NOT_FOUND,
            )
        except rpc.AioRpcError:
            return  # it is gone already

    async def _close(self) -> None:
        await end_tasks(*self._looking)
        for endpoint in self._endpoints:
            await endpoint.channel.close(grace=None)


class _Answers:
    """The answers of one watch, that asks for progress while it is quiet."""

    def __init__(self, endpoint: _Endpoint, call: Any) -> None:
        self._endpoint = endpoint
        self._call = call

    async def next(self) -> Any:
        """The next one, also to what was asked. Raises AioRpcError, and TimeoutError where the member hangs."""
        # A read that is cancelled ends its watch, so it is not waited for with a timeout.
        reading = asyncio.ensure_future(self._call.read())
        try:
            asked_ms, wait_ms = 0, WATCH_QUIET_MS
            while not await _ends_within(wait_ms, reading):
                if self._endpoint.is_behind:
                    raise TimeoutError
                if asked_ms > self._endpoint.heard_ms:
                    # A watch that catches up need not answer, nor one from a revision that is not there yet.
                    await self._ask_otherwise(reading)
                asked_ms = await self._ask()
                wait_ms = (
                    WATCH_ANSWER_MS if asked_ms else self._endpoint.heard_ms + WATCH_QUIET_MS - _boot_ms()
                )
            answer = reading.result()
        finally:
            if not reading.cancel() and not reading.cancelled():
                reading.exception()
        if answer is not grpc.aio.EOF:
            self._endpoint.heard()
        return answer

    async def _ask(self) -> int:
        """Ask for progress, unless another watch just did. When; 0 where the member has just been heard of."""
        endpoint, now_ms = self._endpoint, _boot_ms()
        if now_ms - endpoint.heard_ms < WATCH_QUIET_MS:
            return 0
        if now_ms - endpoint.asked_ms >= WATCH_ANSWER_MS:
            endpoint.asked_ms = now_ms
            async with asyncio.timeout(WATCH_ANSWER_MS / 1_000):
                await self._call.write(_ASK_PROGRESS)
        return now_ms

    async def _ask_otherwise(self, reading: asyncio.Future[Any]) -> None:
        """The watch says nothing: whether its member does. Raises TimeoutError where nothing comes, also to the watch."""
        asking = asyncio.ensure_future(self._endpoint.status(WATCH_ANSWER_MS))
        try:
            await asyncio.wait((asking, reading), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                try:
                    await asking
                except TimeoutError:
                    if not reading.done():
                        self._endpoint.leave()
                        raise
                except rpc.AioRpcError as error:
                    if not _is_answer(error):
                        raise
        finally:
            if not asking.cancel() and not asking.cancelled():
                asking.exception()


async def _ends_within(limit_ms: int, waiting: asyncio.Future[Any]) -> bool:
    """Whether it ends in time; it is not cancelled where it does not."""
    done, _ = await asyncio.wait((waiting,), timeout=max(0, limit_ms) / 1_000)
    return bool(done)


def _changes(events: list[Any]) -> list[Change]:
    """Events in order, gathered by revision."""
    changes: list[Change] = []
    for event in events:
        key, revision = event.kv.key.decode(errors="replace"), event.kv.mod_revision
        ours = Event(key, _entry(event.kv) if event.type == rpc.Event.PUT else None)
        if changes and changes[-1].revision == revision:
            changes[-1] = Change(revision, (*changes[-1].events, ours))
        else:
            changes.append(Change(revision, (ours,)))
    return changes
