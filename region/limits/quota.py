"""Quotas: what each tenant and each identity may use of the region, and what they use here.

Rates are token buckets that may go into debt: arrivals are counted when they come, and a session in debt waits until time has
paid it. Publishing is delayed by withholding credit, delivery by waiting in the log, so nothing is lost. If the debt is longer
than DEBT_S_MAX, and for what cannot be slowed down (requests, sessions, streams, stored bytes …), the answer is a refusal with
the time after which to retry. Record counts come from batch headers.

`Quotas` holds an account per tenant and per identity; a `Meter` is what a session, a subscription or a view charges: the
accounts that one use concerns, together. Views take theirs from their exchange (region.exchange) and call `hold` and
`release` for leases and open transactions, `published` and `delivered` for records that come and go.

Of several brokers each has a share of every rate, and counts what the others said last that they hold (region.limits.quota_shares); they are taken anew
once a second (region.quota_exchange). A use is judged here at once.

Pure but for the clock that is handed in (seconds, monotonic). Used on the event loop alone.

Invariants: a use is charged to every account of its meter or, refused, to none; what is held is given back once; accounts
in use are never forgotten, idle ones are beyond IDLE_MAX, the longest idle first.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final

from msgspec.structs import replace

from felix.errors import Code, UnavailableError
from felix.quota import NO_LIMITS, RATES, QuotaLimits, Scope
from felix.rate import TokenBucket
from region.limits.quota_shares import ACCOUNTS_TOLD_MAX, CLIENTS_TOLD_MAX, Region, Use

BURST_S: Final = 1.0
"""The burst allowed after a pause, in seconds of the rate."""
DEBT_S_MAX: Final = 5.0
"""Longer than this nobody is only slowed down: batches are refused until the debt is shorter. It keeps a client from
escaping its debt by coming back with another session, and a wait shorter than any client's deadline."""
ROSE: Final = 1.25
"""What waits for a rate looks anew once this broker's share of it is so many times what it was."""
PART_ACCOUNTS: Final = 200
"""Accounts that are looked at in one iteration of the event loop: some two milliseconds."""
IDLE_MAX: Final = 4_096
"""Accounts kept of tenants and identities that have nothing open; forgetting one forgives a debt of seconds."""
STORED_RETRY_MS: Final = 1_000
"""As often as stored bytes are measured (region.node)."""
HELD_RETRY_MS: Final = 1_000
"""Resources may be freed at any time, and a retry is cheap."""

_HELD_CODES: Final = {
    "sessions": Code.LIMIT_SESSIONS,
    "subscriptions": Code.LIMIT_SUBSCRIPTIONS,
    "transactions": Code.LIMIT_OPEN,
    "leases": Code.LIMIT_OPEN,
}


class Account:
    """One tenant or one identity: its limits, its buckets, what it holds, and what it has done since the start."""

    __slots__ = (
        "buckets", "clients", "clients_elsewhere", "debt_s", "elsewhere", "held", "is_limited", "last", "limits", "name", "rates", "refused", "scope", "shares", "stored_bytes",
        "stored_limit", "told_debt_s", "told_refused", "totals", "users", "was_share",
    )  # fmt: skip

    def __init__(self, scope: Scope, name: str) -> None:
        self.scope: Scope = scope
        self.name = name
        self.limits = NO_LIMITS.in_force(NO_LIMITS)
        self.is_limited = False
        self.buckets: dict[str, TokenBucket] = {}
        self.totals: Counter[str] = Counter()
        self.rates: dict[str, float] = {}
        self.last: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.stored_bytes = 0
        self.stored_limit = 0
        self.debt_s: dict[str, float] = {}
        """Of rates that are limited no more."""
        self.users = 0
        self.shares: dict[str, float] = {}
        """this broker's part of each limited rate, where it is one of several"""
        self.was_share: dict[str, float] = {}
        """what it would have been a turn ago"""
        self.elsewhere: Mapping[str, int] = {}
        """what other brokers hold; of sessions, beyond one of each of `clients_elsewhere`"""
        self.clients: Counter[bytes] = Counter()
        """sessions here, by the ids of their clients, where those have one"""
        self.clients_elsewhere: frozenset[bytes] = frozenset()
        self.told_debt_s: dict[str, float] = {}
        self.told_refused = 0

    def limit(self, limits: QuotaLimits, now: float) -> None:
        """These limits count from now on; a debt stays, at the new rate."""
        self.limits = limits
        self.is_limited = any(limits.named.values())
        self.stored_limit = self.limits.stored_bytes or 0
        for name in RATES:
            limit, held = self.limits.of(name), self.buckets.get(name)
            rate = (limit or 0) * self.shares.get(name, 1.0)
            # A broker's share of few requests is still one at a time.
            burst = max(rate * BURST_S, 1.0)
            if not rate:
                if held is not None:
                    held.settle(now)
                    self.debt_s[name] = self.debt_s.get(name, 0.0) + held.debt_s
                    del self.buckets[name]
            elif held is None:
                self.buckets[name] = TokenBucket(rate, burst, now)
            else:
                held.alter(rate, burst, now)

    def use(self, now: float) -> Use | None:
        """What the other brokers are to know of it, since the last time this was called; None where nothing limited is used."""
        rates: dict[str, float] = {}
        for name in self.buckets:
            owed, before = self.throttled_s(name, now), self.told_debt_s.get(name, 0.0)
            self.told_debt_s[name] = owed
            refused = self.refused["limit_rate"] > self.told_refused if name == "requests" else False
            if owed > before or refused:
                rates[name] = math.inf
            elif used := self.rates.get(name):
                rates[name] = used
        self.told_refused = self.refused["limit_rate"]
        held = {name: count for name, count in self.held.items() if count and self.limits.of(name)}
        if self.stored_limit and self.stored_bytes:
            held["stored_bytes"] = self.stored_bytes
        clients = list(self.clients) if "sessions" in held else []
        return Use(self.scope, self.name, rates, held, clients) if rates or held else None

    def take_shares(self, region: Region, now: float, *, at_once: bool) -> bool:
        """Its part of each rate, as the brokers told; whether one rose by much. What rises does so a turn later than it falls elsewhere, but `at_once` for
        an account that is new here."""
        key = self.scope, self.name
        self.elsewhere, self.clients_elsewhere = region.elsewhere(key), region.clients_elsewhere(key)
        rose, shares = False, dict[str, float]()
        for name in RATES:
            if limit := self.limits.of(name):
                found = region.share(key, name, limit)
                shares[name] = found if at_once else min(found, self.was_share.get(name, found))
                rose = rose or shares[name] > ROSE * self.shares.get(name, 1.0)
                self.was_share[name] = found
        if shares != self.shares:
            self.shares = shares
            self.limit(self.limits, now)
        return rose

    def throttled_s(self, name: str, now: float) -> float:
        """Seconds since the start in which this rate was used up."""
        bucket = self.buckets.get(name)
        before = self.debt_s.get(name, 0.0)
        if bucket is None:
            return before
        bucket.settle(now)
        return before + bucket.debt_s

    def measure(self, passed_s: float) -> None:
        """Units per second since the last time this was called, `passed_s` ago."""
        totals, last = self.totals, self.last
        self.rates = {name: (totals[name] - last[name]) / passed_s for name in RATES if totals[name]}
        self.last = Counter(totals)

    def amount_elsewhere(self, what: str) -> int:
        """How much of it other brokers say that they hold; of sessions, those of clients that have none here."""
        amount = self.elsewhere.get(what, 0)
        if what == "sessions" and self.clients_elsewhere:
            amount += len(self.clients_elsewhere) - sum(
                client in self.clients_elsewhere for client in self.clients
            )
        return amount

    def used(self) -> dict[str, float]:
        """What is used, by the limits' names: rates per second as last measured, the rest as it is now."""
        found: dict[str, float] = {name: round(rate, 1) for name, rate in self.rates.items() if rate}
        found |= {name: count for name, count in self.held.items() if count}
        if self.stored_bytes:
            found["stored_bytes"] = self.stored_bytes
        return found

    def __str__(self) -> str:
        return f"{self.scope} {self.name}"


@dataclass(frozen=True, slots=True)
class Throttle:
    """Who waits for what, and how long: the longest wait of several."""

    wait_s: float
    account: Account
    limit: str


class Meter:
    """The accounts that one use concerns; charge it for what it does, and `close` it at the end."""

    __slots__ = ("_closed", "_held", "_now", "_quotas", "_session_of", "accounts", "client")

    def __init__(
        self, quotas: Quotas, accounts: tuple[Account, ...], now: Callable[[], float], client: bytes = b""
    ) -> None:
        """The first account counts one session more; none, where the same `client` (an id; empty: unknown) has one at another broker: it goes on here, also
        where the limit was lowered since. Raises UnavailableError(LIMIT_SESSIONS)."""
        first = accounts[0]
        if client not in first.clients_elsewhere or client in first.clients:
            _check_room(first, "sessions", 1)
        first.held["sessions"] += 1
        if client:
            first.clients[client] += 1
        self.client = client
        self.accounts = accounts
        self._session_of = first
        self._quotas = quotas
        self._now = now
        self._held: Counter[str] = Counter()
        self._closed = False
        for account in accounts:
            account.users += 1

    # -- publishing ------------------------------------------------------------------------------------

    @property
    def publish_rate(self) -> float:
        """Bytes per second that may be published; infinite without a limit."""
        rates = [limit for a in self.accounts if (limit := a.limits.of("publish_bytes"))]
        return min(rates, default=float("inf"))

    def refusal(self, size: int) -> UnavailableError | None:
        """Why `size` bytes may not be published now: no room left to store them, or a debt too long to wait for."""
        for account in self.accounts:
            stored = account.stored_bytes + account.elsewhere.get("stored_bytes", 0)
            if account.stored_limit and stored + size > account.stored_limit:
                return _refused(
                    account,
                    Code.LIMIT_STORED,
                    f"{account} stores {stored} bytes{_of_others(account, 'stored_bytes')}, and {account.stored_limit} are allowed.",
                    "Shorten a retention, delete streams, or have stored_bytes raised: felix quota set.",
                    STORED_RETRY_MS,
                )
            if account.buckets:
                throttle = _waits((account,), _PUBLISH, self._now())
                if throttle is not None and throttle.wait_s > DEBT_S_MAX:
                    return _over_rate(throttle, throttle.wait_s - DEBT_S_MAX)
        return None

    def published(self, size: int, records: int) -> Throttle | None:
        """Count a batch that was let in; how long its credit is to be withheld, None where not at all."""
        limited = False
        for account in self.accounts:
            totals = account.totals
            totals["publish_bytes"] += size
            totals["publish_records"] += records
            account.stored_bytes += size
            if account.buckets:
                limited = True
                _charge(account, "publish_bytes", size, self._now())
                _charge(account, "publish_records", records, self._now())
        return _waits(self.accounts, _PUBLISH, self._now()) if limited else None

    def not_published(self, size: int, records: int) -> None:
        """The batch was not appended after all: as if it had not come."""
        for account in self.accounts:
            account.totals["publish_bytes"] -= size
            account.totals["publish_records"] -= records
            account.stored_bytes = max(0, account.stored_bytes - size)
            _charge(account, "publish_bytes", -size, self._now())
            _charge(account, "publish_records", -records, self._now())

    # -- delivery --------------------------------------------------------------------------------------

    def delivery_throttle(self) -> Throttle | None:
        """How long nothing may be delivered; None where something may."""
        for account in self.accounts:
            if account.buckets:
                return _waits(self.accounts, _DELIVERY, self._now())
        return None

    def delivery_refusal(self) -> UnavailableError | None:
        """Why nothing may be sent that was asked for just now, and cannot wait here."""
        throttle = self.delivery_throttle()
        return None if throttle is None else _over_rate(throttle, throttle.wait_s)

    def delivered(self, size: int, records: int) -> None:
        """Count what was sent."""
        for account in self.accounts:
            totals = account.totals
            totals["delivery_bytes"] += size
            totals["delivery_records"] += records
            if account.buckets:
                _charge(account, "delivery_bytes", size, self._now())
                _charge(account, "delivery_records", records, self._now())

    # -- requests, and what is held --------------------------------------------------------------------

    def requested(self) -> UnavailableError | None:
        """Count one request; why it is refused, where it is (then it counts for nobody)."""
        for account in self.accounts:
            bucket = account.buckets.get("requests") if account.buckets else None
            if bucket is not None:
                wait_s = bucket.lack_s(1, self._now())
                if wait_s:
                    return _over_rate(Throttle(wait_s, account, "requests"), wait_s)
        for account in self.accounts:
            account.totals["requests"] += 1
            bucket = account.buckets.get("requests") if account.buckets else None
            if bucket is not None:
                bucket.level -= 1
        return None

    def hold(self, what: str, amount: int = 1) -> None:
        """Hold so many more subscriptions, transactions or leases. Raises UnavailableError with the limit's code, and holds none then."""
        for account in self.accounts:
            _check_room(account, what, amount)
        for account in self.accounts:
            account.held[what] += amount
        self._held[what] += amount

    def release(self, what: str, amount: int = 1) -> None:
        """Let go of what was held; after `close`, nothing is left to let go."""
        if self._closed:
            return
        assert self._held[what] >= amount, what
        self._held[what] -= amount
        for account in self.accounts:
            account.held[what] -= amount

    def close(self) -> None:
        """Let go of everything. Safe to call twice."""
        if self._closed:
            return
        for what, amount in self._held.items():
            for account in self.accounts:
                account.held[what] -= amount
        self._closed = True
        first = self._session_of
        first.held["sessions"] -= 1
        if self.client:
            first.clients[self.client] -= 1
            if not first.clients[self.client]:
                del first.clients[self.client]
        for account in self.accounts:
            account.users -= 1
            if not account.users:
                self._quotas.idle(account)


class Quotas:
    """The accounts of one broker, and the limits that the configuration and the catalog give them."""

    def __init__(
        self,
        now: Callable[[], float],
        tenant_default: QuotaLimits = NO_LIMITS,
        identity_default: QuotaLimits = NO_LIMITS,
        exempt: Collection[str] = (),
    ) -> None:
        """`exempt` identities have no limits of their own, so that somebody can always lift one."""
        self._now = now
        self._exempt = frozenset(exempt)
        self._defaults: dict[Scope, QuotaLimits] = {"tenant": tenant_default, "identity": identity_default}
        self._own: dict[tuple[Scope, str], QuotaLimits] = {}
        self._accounts: dict[tuple[Scope, str], Account] = {}
        self._idle: OrderedDict[tuple[Scope, str], None] = OrderedDict()
        self._stored: dict[str, int] = {}
        self._creating: Counter[str] = Counter()
        self._measured_at = now()
        self.region: Region | None = None
        """what the other brokers told, of one of several"""

    # -- limits ----------------------------------------------------------------------------------------

    def set_limits(self, own: dict[tuple[Scope, str], QuotaLimits]) -> None:
        """These are the limits of tenants and identities that have their own; they count at once."""
        changed = {key for key in {*own, *self._own} if own.get(key) != self._own.get(key)}
        self._own = own
        for key in changed:
            account = self._accounts.get(key)
            if account is not None:
                self._limit(account)

    def _limit(self, account: Account) -> None:
        account.limit(self.limits(account.scope, account.name), self._now())
        if self.region is not None:
            account.take_shares(self.region, self._now(), at_once=True)

    # -- several brokers -------------------------------------------------------------------------------

    @property
    def are_limited(self) -> bool:
        """Whether anybody has a limit."""
        return any(each.named for each in (*self._defaults.values(), *self._own.values()))

    def parts(self) -> Iterator[list[Account]]:
        """The accounts that have limits, so many at a time that nothing waits long for what is done with them."""
        limited = [account for account in self._accounts.values() if account.is_limited]
        for begin in range(0, len(limited), PART_ACCOUNTS):
            yield limited[begin : begin + PART_ACCOUNTS]

    def uses(self, accounts: Iterable[Account]) -> list[Use]:
        """What the other brokers are to know of these. Once a second, after `sweep`."""
        now = self._now()
        return [use for each in accounts if each.users and (use := each.use(now)) is not None]

    def told(self, uses: list[Use]) -> list[Use]:
        """What is told, of all that is used and of what is stored where nobody uses it: ACCOUNTS_TOLD_MAX accounts, those that wait first, and
        CLIENTS_TOLD_MAX clients, of those accounts first that have fewest."""
        if len(uses) > ACCOUNTS_TOLD_MAX:
            uses = sorted(uses, key=lambda use: -max(use.rates.values(), default=0.0))[:ACCOUNTS_TOLD_MAX]
        if sum(len(use.clients) for use in uses) > CLIENTS_TOLD_MAX:
            # Who has many does not take their place from all the others.
            uses = sorted(uses, key=lambda use: len(use.clients))
            counts = accumulate(len(use.clients) for use in uses)
            uses = [
                use if count <= CLIENTS_TOLD_MAX else replace(use, clients=[])
                for use, count in zip(uses, counts, strict=True)
            ]
        keys = {(use.scope, use.name) for use in uses}
        stored = (
            Use("tenant", name, {}, {"stored_bytes": size})
            for name, size in self._stored.items()
            if size and ("tenant", name) not in keys and self._limits_stored(name)
        )
        return [*uses, *islice(stored, ACCOUNTS_TOLD_MAX - len(uses))]

    def _limits_stored(self, tenant: str) -> bool:
        """Whether `limits` bound what it stores; without a value of all limits, for each tenant, each second."""
        own = self.own_limits("tenant", tenant).stored_bytes
        return bool(self._defaults["tenant"].stored_bytes if own is None else own)

    def take_shares(self, accounts: Iterable[Account]) -> list[Account]:
        """Their shares anew, as the brokers told; those of which one rose by much, whose waits are shorter now."""
        if (region := self.region) is None:
            return []
        now = self._now()
        return [each for each in accounts if each.take_shares(region, now, at_once=False)]

    def used(self, account: Account) -> dict[str, float]:
        """What is used of the region, as far as the other brokers tell of it: of what is limited."""
        found = account.used()
        if self.region is not None:
            key = account.scope, account.name
            held = {what: account.amount_elsewhere(what) for what in {*account.elsewhere, "sessions"}}
            for name, amount in (*held.items(), *self.region.rates_elsewhere(key).items()):
                if amount:
                    found[name] = round(found.get(name, 0) + amount, 1)
        return found

    def own_limits(self, scope: Scope, name: str) -> QuotaLimits:
        """What the catalog says of it."""
        return self._own.get((scope, name), NO_LIMITS)

    def limits(self, scope: Scope, name: str) -> QuotaLimits:
        """What counts for it."""
        if scope == "identity" and name in self._exempt:
            return NO_LIMITS.in_force(NO_LIMITS)
        return self.own_limits(scope, name).in_force(self._defaults[scope])

    # -- accounts --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._accounts)

    def accounts(self) -> Iterator[Account]:
        """All that are known now, tenants first, by name. From every thread: one that is forgotten meanwhile is left out."""
        keys = sorted(list(self._accounts), key=lambda key: (key[0] != "tenant", key[1]))  # noqa: C414 - copied in one step
        return (account for key in keys if (account := self._accounts.get(key)) is not None)

    def known(self) -> list[tuple[Scope, str]]:
        """Who has an account or limits of their own; tenants first, by name."""
        keys = {*self._accounts, *self._own}
        return sorted(keys, key=lambda key: (key[0] != "tenant", key[1]))

    def find(self, scope: Scope, name: str) -> Account | None:
        """The account, where there is one."""
        return self._accounts.get((scope, name))

    def throttled_ms(self, account: Account) -> dict[str, int]:
        """How long each rate of it was used up, since the start; what never was is left out."""
        now = self._now()
        found = {name: int(account.throttled_s(name, now) * 1000) for name in (*_PUBLISH, *_DELIVERY)}
        return {name: value for name, value in found.items() if value}

    def _account(self, scope: Scope, name: str) -> Account:
        key = (scope, name)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(scope, name)
            if scope == "tenant":
                account.stored_bytes = self._stored.get(name, 0)
            self._limit(account)
        elif not account.users and self.region is not None:
            account.take_shares(self.region, self._now(), at_once=True)
        self._idle.pop(key, None)
        return account

    def idle(self, account: Account) -> None:
        """Nobody uses the account; it is kept for a while."""
        self._idle[account.scope, account.name] = None
        while len(self._idle) > IDLE_MAX:
            key, _ = self._idle.popitem(last=False)
            del self._accounts[key]

    def enter(self, identity: str, client: bytes = b"") -> Meter:
        """The meter of a new session of this client, which is one of its identity's sessions. Raises UnavailableError(LIMIT_SESSIONS)."""
        return self._meter((self._account("identity", identity),), client)

    def use(self, meter: Meter, tenant: str) -> Meter:
        """The meter of a session's use of one tenant's streams; counts as one of the tenant's sessions, and charges the
        session's identity as well. Raises UnavailableError(LIMIT_SESSIONS)."""
        return self._meter((self._account("tenant", tenant), *meter.accounts), meter.client)

    def _meter(self, accounts: tuple[Account, ...], client: bytes) -> Meter:
        try:
            return Meter(self, accounts, self._now, client)
        except UnavailableError:
            if not accounts[0].users:
                self.idle(accounts[0])
            raise

    # -- streams and what they store -------------------------------------------------------------------

    def check_stream(self, tenant: str, count: int) -> None:
        """Raises UnavailableError(LIMIT_STREAMS) where the tenant has as many streams (`count`) as it may."""
        account = self._account("tenant", tenant)
        if not account.users:
            self.idle(account)
        limit = account.limits.streams
        if limit and count + self._creating[tenant] >= limit:
            raise self.streams_refused(tenant, count + self._creating[tenant])

    def streams_refused(self, tenant: str, count: int) -> UnavailableError:
        """What is answered where the tenant has so many streams and may have no more."""
        account = self._account("tenant", tenant)
        if not account.users:
            self.idle(account)
        return _refused(
            account,
            Code.LIMIT_STREAMS,
            f"{account} has {count} streams, and {account.limits.streams} are allowed.",
            "Delete some, or have streams raised: felix quota set.",
            STORED_RETRY_MS,
        )

    def creating(self, tenant: str, change: int) -> None:
        """A stream of the tenant is being made (+1), or that is over (-1)."""
        self._creating[tenant] += change
        if not self._creating[tenant]:
            del self._creating[tenant]

    def sweep(self, stored: dict[str, int]) -> None:
        """Once a second: take over what the logs really hold, by tenant, and measure rates."""
        self._stored = stored
        now = self._now()
        passed = max(1e-3, now - self._measured_at)
        self._measured_at = now
        for account in self._accounts.values():
            if account.scope == "tenant":
                account.stored_bytes = stored.get(account.name, 0)
            account.measure(passed)


def _check_room(account: Account, what: str, amount: int) -> None:
    limit = account.limits.of(what)
    held = account.held[what] + account.amount_elsewhere(what)
    if limit and held + amount > limit:
        raise _refused(
            account,
            _HELD_CODES[what],
            f"{account} has {held} {what} open{_of_others(account, what)}, and {limit} are allowed.",
            f"End some, or have {what} raised: felix quota set.",
            HELD_RETRY_MS,
        )


def _of_others(account: Account, what: str) -> str:
    """How much of it other brokers say that they hold: this one takes their word."""
    amount = account.amount_elsewhere(what)
    return f" ({amount} of them at other brokers, as those say)" if amount else ""


_PUBLISH: Final = ("publish_bytes", "publish_records")
_DELIVERY: Final = ("delivery_bytes", "delivery_records")


def _charge(account: Account, name: str, amount: int, now: float) -> None:
    bucket = account.buckets.get(name)
    if bucket is not None:
        bucket.charge(amount, now)


def _waits(accounts: tuple[Account, ...], names: tuple[str, ...], now: float) -> Throttle | None:
    """The longest wait among these rates."""
    longest: Throttle | None = None
    for account in accounts:
        for name in names:
            bucket = account.buckets.get(name)
            wait_s = bucket.wait_s(now) if bucket is not None else 0.0
            if wait_s > 0 and (longest is None or wait_s > longest.wait_s):
                longest = Throttle(wait_s, account, name)
    return longest


def _over_rate(throttle: Throttle, wait_s: float) -> UnavailableError:
    account, limit = throttle.account, throttle.limit
    return _refused(
        account,
        Code.LIMIT_RATE,
        f"{account} is over its {limit.replace('_', ' ')} of {account.limits.of(limit)} per second.",
        f"Slow down, or have {limit} raised: felix quota set.",
        max(1, int(wait_s * 1000)),
    )


def _refused(account: Account, code: Code, sentence: str, hint: str, retry_ms: int) -> UnavailableError:
    account.refused[code.name.lower()] += 1
    return UnavailableError(sentence[0].upper() + sentence[1:], code=code, hint=hint, retry_after_ms=retry_ms)
