"""Quotas as pure values: buckets that go into debt, accounts, meters, limits that change while they are in use."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from felix.errors import Code, RequestError, UnavailableError
from felix.quota import LIMITS, QuotaLimits
from region.limits.quota import DEBT_S_MAX, IDLE_MAX, Meter, Quotas

ORDERS = "spiffe://us-east.acme/client/orders-svc"


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def quotas_of(clock: Clock, **limits: int) -> Quotas:
    """With these limits for the tenant acme."""
    quotas = Quotas(clock)
    quotas.set_limits({("tenant", "acme"): QuotaLimits(**limits)})
    return quotas


def meter_of(quotas: Quotas, tenant: str = "acme", identity: str = ORDERS) -> Meter:
    return quotas.use(quotas.enter(identity), tenant)


# -- publishing and delivery -----------------------------------------------------------------------------


def test_publishing_over_the_rate_waits_and_then_is_refused_until_the_debt_is_short(clock: Clock) -> None:
    meter = meter_of(quotas_of(clock, publish_bytes=1000))
    assert meter.published(1000, 10) is None, "a burst of a second passes"
    throttle = meter.published(2000, 10)
    assert throttle is not None
    assert (throttle.wait_s, throttle.limit, throttle.account.name) == (2.0, "publish_bytes", "acme")
    assert meter.refusal(1000) is None, "it can be waited for"
    meter.published(4000, 1)
    refusal = meter.refusal(1000)
    assert refusal is not None
    assert refusal.code is Code.LIMIT_RATE
    assert refusal.retry_after_ms == (6 - DEBT_S_MAX) * 1000
    assert "acme" in refusal.sentence and "felix quota" in refusal.hint
    clock.now += refusal.retry_after_ms / 1000
    assert meter.refusal(1000) is None
    clock.now += DEBT_S_MAX + 0.01
    assert meter.published(1, 1) is None


def test_records_are_limited_beside_bytes_and_the_longer_wait_counts(clock: Clock) -> None:
    meter = meter_of(quotas_of(clock, publish_bytes=1000, publish_records=10))
    throttle = meter.published(1500, 40)
    assert throttle is not None
    assert (throttle.limit, throttle.wait_s) == ("publish_records", 3.0)


def test_a_batch_that_was_not_appended_does_not_count(clock: Clock) -> None:
    quotas = quotas_of(clock, publish_bytes=1000, stored_bytes=10_000)
    meter = meter_of(quotas)
    meter.published(5000, 5)
    meter.not_published(5000, 5)
    account = quotas.find("tenant", "acme")
    assert account is not None
    assert (account.stored_bytes, account.totals["publish_bytes"]) == (0, 0)
    assert meter.published(1000, 1) is None


def test_an_identity_pays_beside_its_tenants_whoever_is_slower(clock: Clock) -> None:
    quotas = Quotas(clock)
    quotas.set_limits(
        {("identity", ORDERS): QuotaLimits(delivery_bytes=10), ("tenant", "acme"): QuotaLimits()}
    )
    meter = meter_of(quotas)
    other = meter_of(quotas, identity="spiffe://us-east.acme/client/other")
    meter.delivered(110, 1)
    other.delivered(110, 1)
    throttle = meter.delivery_throttle()
    assert throttle is not None and throttle.account.scope == "identity"
    assert throttle.wait_s == 10.0
    assert other.delivery_throttle() is None
    clock.now += 10
    assert meter.delivery_throttle() is None


def test_a_raised_limit_counts_at_once_and_a_debt_stays(clock: Clock) -> None:
    quotas = quotas_of(clock, delivery_bytes=10)
    meter = meter_of(quotas)
    meter.delivered(1010, 1)
    assert meter.delivery_throttle().wait_s == 100  # type: ignore[union-attr]
    quotas.set_limits({("tenant", "acme"): QuotaLimits(delivery_bytes=1000)})
    assert meter.delivery_throttle().wait_s == 1  # type: ignore[union-attr]
    quotas.set_limits({})
    assert meter.delivery_throttle() is None
    account = quotas.find("tenant", "acme")
    assert account is not None
    assert quotas.throttled_ms(account) == {}
    quotas.set_limits({("tenant", "acme"): QuotaLimits(delivery_bytes=5)})
    assert meter.delivery_throttle() is None, "a new limit begins with a burst"


def test_stored_bytes_grow_with_batches_and_are_put_right_by_the_sweep(clock: Clock) -> None:
    quotas = quotas_of(clock, stored_bytes=1000)
    meter = meter_of(quotas)
    meter.published(900, 1)
    refusal = meter.refusal(200)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_ms) == (Code.LIMIT_STORED, 1000)
    clock.now += 1
    quotas.sweep({"acme": 400})
    assert meter.refusal(200) is None
    account = quotas.find("tenant", "acme")
    assert account is not None
    assert account.used() == {"publish_bytes": 900, "publish_records": 1, "sessions": 1, "stored_bytes": 400}


# -- requests, and what is held --------------------------------------------------------------------------


def test_requests_are_refused_with_when_to_try_again(clock: Clock) -> None:
    meter = meter_of(quotas_of(clock, requests=2))
    assert [meter.requested(), meter.requested()] == [None, None]
    refusal = meter.requested()
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_ms) == (Code.LIMIT_RATE, 500)
    clock.now += 0.5
    assert meter.requested() is None


def test_what_is_held_is_counted_for_all_or_for_none(clock: Clock) -> None:
    quotas = Quotas(clock)
    quotas.set_limits(
        {("tenant", "acme"): QuotaLimits(leases=10), ("identity", ORDERS): QuotaLimits(leases=3)}
    )
    meter = meter_of(quotas)
    meter.hold("leases", 3)
    with pytest.raises(UnavailableError) as caught:
        meter.hold("leases")
    assert caught.value.code is Code.LIMIT_OPEN
    assert quotas.find("tenant", "acme").held["leases"] == 3  # type: ignore[union-attr]
    meter.release("leases", 2)
    meter.hold("leases")
    meter.close()
    meter.close()
    assert quotas.find("tenant", "acme").held["leases"] == 0  # type: ignore[union-attr]
    assert quotas.find("identity", ORDERS).held["leases"] == 0  # type: ignore[union-attr]


def test_sessions_of_a_tenant_are_those_that_use_its_streams(clock: Clock) -> None:
    quotas = quotas_of(clock, sessions=1)
    first, second = quotas.enter(ORDERS), quotas.enter(ORDERS)
    used = quotas.use(first, "acme")
    with pytest.raises(UnavailableError) as caught:
        quotas.use(second, "acme")
    assert caught.value.code is Code.LIMIT_SESSIONS
    quotas.use(second, "globex")
    used.close()
    quotas.use(second, "acme")
    assert quotas.find("identity", ORDERS).held["sessions"] == 2  # type: ignore[union-attr]


def test_an_exempt_identity_is_never_locked_out(clock: Clock) -> None:
    quotas = Quotas(clock, identity_default=QuotaLimits(sessions=1, requests=1), exempt=["operator"])
    meters = [quotas.enter("operator") for _ in range(5)]
    assert [meter.requested() for meter in meters] == [None] * 5
    quotas.enter(ORDERS)
    with pytest.raises(UnavailableError):
        quotas.enter(ORDERS)


def test_streams_of_a_tenant_are_counted_with_those_being_made(clock: Clock) -> None:
    quotas = quotas_of(clock, streams=2)
    quotas.check_stream("acme", 1)
    quotas.creating("acme", 1)
    with pytest.raises(UnavailableError) as caught:
        quotas.check_stream("acme", 1)
    assert caught.value.code is Code.LIMIT_STREAMS
    quotas.creating("acme", -1)
    quotas.check_stream("acme", 1)
    quotas.check_stream("globex", 100)


def test_idle_accounts_are_forgotten_those_in_use_are_not(clock: Clock) -> None:
    quotas = Quotas(clock)
    held = quotas.enter("held")
    for number in range(IDLE_MAX + 50):
        quotas.enter(f"identity-{number}").close()
    assert len(quotas) == IDLE_MAX + 1
    assert quotas.find("identity", "held") is not None
    assert quotas.find("identity", "identity-0") is None
    held.close()


# -- limits as values ------------------------------------------------------------------------------------


def test_an_account_that_is_forgotten_while_metrics_are_collected_ends_no_page(clock: Clock) -> None:
    """They are collected on another thread."""
    quotas = Quotas(clock)
    quotas.enter("first").close()
    accounts = quotas.accounts()
    for number in range(IDLE_MAX):
        quotas.enter(f"client-{number}").close()
    assert list(accounts) == []


def test_own_limits_stand_before_the_default_and_zero_is_without_bound() -> None:
    default = QuotaLimits(sessions=5, requests=100)
    found = QuotaLimits(sessions=0).in_force(default)
    assert (found.sessions, found.requests, found.streams) == (0, 100, 0)
    assert all(found.of(name) is not None for name in LIMITS)


def test_limits_change_one_by_one() -> None:
    old = QuotaLimits(sessions=5, requests=100)
    assert old.changed(QuotaLimits(streams=2), ["requests"]) == QuotaLimits(sessions=5, streams=2)
    with pytest.raises(RequestError, match="a limit 'colour'"):
        old.changed(QuotaLimits(), ["colour"])


@pytest.mark.parametrize(
    ("scope", "limits"),
    [("identity", QuotaLimits(streams=1)), ("tenant", QuotaLimits(sessions=-1)), ("planet", QuotaLimits())],
)
def test_what_cannot_be_a_quota_is_refused(scope: str, limits: QuotaLimits) -> None:
    with pytest.raises(RequestError):
        limits.check(scope)
