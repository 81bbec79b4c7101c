"""Quotas: what each tenant and each identity may use of this broker, and what they use.

Rates are token buckets that may go into debt: arrivals are counted when they come, and a session in debt waits until time has
paid it. Publishing is delayed by withholding credit, delivery by waiting in the log, so nothing is lost. If the debt is longer
than DEBT_S_MAX, and for what cannot be slowed down (requests, sessions, streams, stored bytes …), the answer is a refusal with
the time after which to retry. Record counts come from batch headers.

`Quotas` holds an account per tenant and per identity; a `Meter` is what a session, a subscription or a view charges: the
accounts that one use concerns, together. Views take theirs from their exchange (region.exchange) and call `hold` and
`release` for leases and open transactions, `published` and `delivered` for records that come and go.

Pure but for the clock that is handed in (seconds, monotonic). Used on the event loop alone.

Invariants: a use is charged to every account of its meter or, refused, to none; what is held is given back once; accounts
in use are never forgotten, idle ones are beyond IDLE_MAX, the longest idle first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from felix.errors import Code, UnavailableError
from felix.quota import NO_LIMITS, RATES, QuotaLimits, Scope
from felix.rate import TokenBucket

BURST_S: Final = 1.0
"""The burst allowed after a pause, in seconds of the rate."""
DEBT_S_MAX: Final = 5.0
"""Longer than this nobody is only slowed down: batches are refused until the debt is shorter. It keeps a client from
escaping its debt by coming back with another session, and a wait shorter than any client's deadline."""
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
        "buckets", "debt_s", "held", "last", "limits", "name", "rates", "refused", "scope", "stored_bytes", "stored_limit",
        "totals", "users",
    )  # fmt: skip

    def __init__(self, scope: Scope, name: str) -> None:
        self.scope: Scope = scope
        self.name = name
        self.limits = NO_LIMITS.in_force(NO_LIMITS)
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

    def limit(self, limits: QuotaLimits, now: float) -> None:
        """These limits count from now on; a debt stays, at the new rate."""
        self.limits = limits
        self.stored_limit = self.limits.stored_bytes or 0
        for name in RATES:
            rate, held = self.limits.of(name), self.buckets.get(name)
            if not rate:
                if held is not None:
                    held.settle(now)
                    self.debt_s[name] = self.debt_s.get(name, 0.0) + held.debt_s
                    del self.buckets[name]
            elif held is None:
                self.buckets[name] = TokenBucket(rate, rate * BURST_S, now)
            else:
                held.alter(rate, rate * BURST_S, now)

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

    __slots__ = ("_closed", "_held", "_now", "_quotas", "_session_of", "accounts")

    def __init__(self, quotas: Quotas, accounts: tuple[Account, ...], now: Callable[[], float]) -> None:
        """The first account counts one session more. Raises UnavailableError(LIMIT_SESSIONS)."""
        first = accounts[0]
        _check_room(first, "sessions", 1)
        first.held["sessions"] += 1
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
        rates = [found.rate for a in self.accounts if (found := a.buckets.get("publish_bytes")) is not None]
        return min(rates, default=float("inf"))

    def refusal(self, size: int) -> UnavailableError | None:
        """Why `size` bytes may not be published now: no room left to store them, or a debt too long to wait for."""
        for account in self.accounts:
            if account.stored_limit and account.stored_bytes + size > account.stored_limit:
                return _refused(
                    account,
                    Code.LIMIT_STORED,
                    f"{account} stores {account.stored_bytes} bytes, and {account.stored_limit} are allowed.",
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
        self._session_of.held["sessions"] -= 1
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
        """All that are known now, tenants first, by name."""
        keys = sorted(self._accounts, key=lambda key: (key[0] != "tenant", key[1]))
        return (self._accounts[key] for key in keys)

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
        self._idle.pop(key, None)
        return account

    def idle(self, account: Account) -> None:
        """Nobody uses the account; it is kept for a while."""
        self._idle[account.scope, account.name] = None
        while len(self._idle) > IDLE_MAX:
            key, _ = self._idle.popitem(last=False)
            del self._accounts[key]

    def enter(self, identity: str) -> Meter:
        """The meter of a new session, which is one of its identity's sessions. Raises UnavailableError(LIMIT_SESSIONS)."""
        return self._meter((self._account("identity", identity),))

    def use(self, meter: Meter, tenant: str) -> Meter:
        """The meter of a session's use of one tenant's streams; counts as one of the tenant's sessions, and charges the
        session's identity as well. Raises UnavailableError(LIMIT_SESSIONS)."""
        return self._meter((self._account("tenant", tenant), *meter.accounts))

    def _meter(self, accounts: tuple[Account, ...]) -> Meter:
        try:
            return Meter(self, accounts, self._now)
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
            raise _refused(
                account,
                Code.LIMIT_STREAMS,
                f"{account} has {count + self._creating[tenant]} streams, and {limit} are allowed.",
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
    if limit and account.held[what] + amount > limit:
        raise _refused(
            account,
            _HELD_CODES[what],
            f"{account} has {account.held[what]} {what} open, and {limit} are allowed.",
            f"End some, or have {what} raised: felix quota set.",
            HELD_RETRY_MS,
        )


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
