"""Limits of several brokers: shares add up to the limit, go to who wants them, and no broker asks another before a use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import chain
from math import inf, isclose
from pathlib import Path

import pytest
from cluster.clustered_region import publishing, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from hypothesis import given
from hypothesis import strategies as st
from region_peer import until

from felix.errors import Code, UnavailableError
from felix.identity_file import load_identity
from felix.quota import QuotaLimits
from felix.runtime.real import now_ms
from region.bootstrap import issue_identity
from region.limits.quota import Account, Meter, Quotas
from region.limits.quota_shares import (
    ACCOUNTS_TOLD_MAX,
    CLIENTS_TOLD_MAX,
    FLOOR_PARTS,
    SILENT_S,
    Region,
    fair_shares,
)

__all__ = ["etcd_of_each_test"]  # the fixture

LIMIT = 1_000_000
NAMES = ("b1", "b2", "b3")
TICK_S = 0.05
"""Of the clock: a batch at a time at each broker that wants to publish."""
BATCH = 100_000


@given(st.lists(st.floats(0, 10) | st.just(inf), min_size=1, max_size=20))
def test_shares_add_up_to_the_limit_and_are_fair(wants: list[float]) -> None:
    shares = fair_shares(wants)
    assert isclose(sum(shares), 1)
    assert all(share >= 1 / (FLOOR_PARTS * len(wants)) - 1e-12 for share in shares)
    for want, share in zip(wants, shares, strict=True):
        for other, others in zip(wants, shares, strict=True):
            # Who wants no less gets no less; and nobody goes short beside one that has more than both could have.
            assert want < other or share >= others - 1e-9
    if sum(wants) <= 1:
        assert all(
            share >= want - 1e-9 or share >= 1 / len(wants) - 1e-9 or want <= share
            for want, share in zip(wants, shares, strict=True)
        )


class Brokers:
    """Three brokers' quotas on one clock, that tell each other each second unless they are cut off."""

    def __init__(self, **limits: int) -> None:
        self.now = 100.0
        self.cut: set[str] = set()
        self.quotas = {name: Quotas(lambda: self.now, QuotaLimits(**limits)) for name in NAMES}
        for name, quotas in self.quotas.items():
            quotas.region = Region(name)
            quotas.region.look(NAMES, self.now)
        self.meters: dict[str, Meter] = {}
        self.turn()

    def meter(self, name: str) -> Meter:
        if name not in self.meters:
            quotas = self.quotas[name]
            self.meters[name] = quotas.use(quotas.enter(f"client of {name}"), "acme")
        return self.meters[name]

    def account(self, name: str) -> Account:
        found = self.quotas[name].find("tenant", "acme")
        assert found is not None
        return found

    def turn(self) -> None:
        """Each measures and tells; what is told arrives after the tellers took their shares, as over a slow link."""
        said = {}
        for name, quotas in self.quotas.items():
            quotas.sweep({})
            accounts = [*chain(*quotas.parts())]
            said[name] = quotas.told(quotas.uses(accounts))
            assert quotas.region is not None
            quotas.region.look(NAMES, self.now)
            quotas.region.hear(name, said[name], self.now)
            quotas.take_shares(accounts)
        for name, quotas in self.quotas.items():
            for other in NAMES:
                if other != name and not self.cut & {name, other}:
                    assert quotas.region is not None
                    quotas.region.hear(other, said[other], self.now)

    def publish(self, seconds: int, busy: Sequence[str]) -> int:
        """Publish at these brokers as fast as they let; how many bytes they let through."""
        passed = 0
        for _ in range(seconds):
            for _ in range(round(1 / TICK_S)):
                for name in busy:
                    meter = self.meter(name)
                    if all(
                        not each.buckets or each.buckets["publish_bytes"].wait_s(self.now) == 0
                        for each in meter.accounts
                    ):
                        meter.published(BATCH, 1)
                        passed += BATCH
                self.now += TICK_S
            self.turn()
        return passed


@pytest.mark.parametrize("busy", [("b1",), ("b1", "b3"), NAMES], ids=len)
def test_a_tenant_gets_its_rate_wherever_it_publishes(busy: Sequence[str]) -> None:
    brokers = Brokers(publish_bytes=LIMIT)
    brokers.publish(10, busy)
    passed = brokers.publish(20, busy)
    assert 0.93 * 20 * LIMIT <= passed <= 1.05 * 20 * LIMIT


def test_load_that_moves_between_brokers_gets_its_rate_and_a_bounded_excess() -> None:
    brokers = Brokers(publish_bytes=LIMIT)
    brokers.publish(10, NAMES)
    passed, moves = 0, 6
    for number in range(moves):
        passed += brokers.publish(10, [NAMES[number % 3]])
    # Each move costs the two turns until shares have followed, and gives one burst at the next broker.
    assert 0.65 * moves * 10 * LIMIT <= passed <= moves * (10 + 1) * LIMIT * 1.05


def test_brokers_that_do_not_hear_each_other_have_even_shares() -> None:
    brokers = Brokers(publish_bytes=LIMIT)
    brokers.publish(10, ["b1"])
    assert brokers.account("b1").shares["publish_bytes"] > 0.9
    brokers.cut = {"b2"}
    brokers.publish(int(SILENT_S) + 2, NAMES)
    assert {name: brokers.account(name).shares["publish_bytes"] for name in NAMES} == dict.fromkeys(
        NAMES, 1 / 3
    )
    passed = brokers.publish(20, NAMES)
    assert 0.93 * 20 * LIMIT <= passed <= 1.05 * 20 * LIMIT


def test_what_is_held_is_counted_over_all_brokers() -> None:
    brokers = Brokers(sessions=3, subscriptions=2, stored_bytes=100)
    brokers.meter("b1").hold("subscriptions", 2)
    brokers.meter("b2")
    brokers.turn()
    brokers.turn()
    with pytest.raises(
        UnavailableError,
        match=r"has 2 subscriptions open \(2 of them at other brokers, as those say\), and 2 are",
    ) as refused:
        brokers.meter("b3").hold("subscriptions")
    assert refused.value.code is Code.LIMIT_SUBSCRIPTIONS
    brokers.turn()
    brokers.turn()
    quotas = brokers.quotas["b1"]
    with pytest.raises(UnavailableError, match="has 3 sessions open"):
        quotas.use(quotas.enter("one more"), "acme")
    brokers.meter("b1").release("subscriptions")
    brokers.turn()
    brokers.turn()
    brokers.meter("b3").hold("subscriptions")
    assert quotas.used(brokers.account("b1"))["sessions"] == 3


def test_a_client_with_sessions_at_several_brokers_is_one_client_of_its_tenant_and_identity() -> None:
    brokers = Brokers(sessions=2)
    b1, b2, b3 = (brokers.quotas[name] for name in NAMES)
    for quotas in (b1, b2, b3):
        quotas.set_limits({("identity", "ann"): QuotaLimits(sessions=2)})
    b1.use(b1.enter("ann", b"first"), "acme")
    b2.use(b2.enter("ann", b"second"), "acme")
    brokers.turn()
    brokers.turn()
    # Each may have one at each broker.
    b2.use(b2.enter("ann", b"first"), "acme")
    for client in (b"first", b"second"):
        b3.use(b3.enter("ann", client), "acme")
    brokers.turn()
    brokers.turn()
    for quotas in (b1, b2, b3):
        for account in (quotas.find("tenant", "acme"), quotas.find("identity", "ann")):
            assert account is not None and quotas.used(account)["sessions"] == 2
    # A third client has none, nor a second session of one where two are.
    for quotas, client in ((b1, b"third"), (b3, b"first"), (b1, b"")):
        with pytest.raises(UnavailableError, match="Identity ann has 2 sessions open") as refused:
            quotas.enter("ann", client)
        assert refused.value.code is Code.LIMIT_SESSIONS


def test_a_client_that_was_let_in_goes_on_at_other_brokers_where_its_limit_was_lowered() -> None:
    brokers = Brokers(sessions=2)
    b1, b2, _ = (brokers.quotas[name] for name in NAMES)
    for client in (b"first", b"second"):
        b1.use(b1.enter("ann", client), "acme")
    brokers.turn()
    brokers.turn()
    for quotas in brokers.quotas.values():
        quotas.set_limits({("tenant", "acme"): QuotaLimits(sessions=1)})
    b2.use(b2.enter("ann", b"first"), "acme")
    with pytest.raises(UnavailableError, match="has 2 sessions open"):
        b2.use(b2.enter("ann", b"third"), "acme")


def test_clients_that_are_not_named_count_with_each_session() -> None:
    brokers = Brokers()
    for quotas in brokers.quotas.values():
        quotas.set_limits({("identity", "ann"): QuotaLimits(sessions=3)})
    b1, b2, b3 = (brokers.quotas[name] for name in NAMES)
    b1.enter("ann")
    b2.enter("ann")
    b2.enter("ann", b"named")
    brokers.turn()
    brokers.turn()
    with pytest.raises(UnavailableError, match="has 3 sessions open"):
        b3.enter("ann")
    b3.enter("ann", b"named")


def test_of_so_many_clients_those_of_accounts_with_few_are_named_and_of_further_accounts_each_session_counts() -> (
    None
):
    brokers = Brokers()
    quotas = brokers.quotas["b1"]
    quotas.set_limits({("identity", name): QuotaLimits(sessions=CLIENTS_TOLD_MAX) for name in ("ann", "bob")})
    for number in range(CLIENTS_TOLD_MAX):
        quotas.enter("ann", b"%d" % number)
    quotas.enter("bob", b"one")
    told = {use.name: use for use in quotas.told(quotas.uses(chain(*quotas.parts())))}
    assert told["bob"].clients == [b"one"] and not told["ann"].clients
    assert told["ann"].held == {"sessions": CLIENTS_TOLD_MAX}


def test_a_client_that_has_gone_is_told_of_no_more() -> None:
    brokers = Brokers(sessions=1)
    b1, b2, _ = (brokers.quotas[name] for name in NAMES)
    meter = b1.use(b1.enter("ann", b"first"), "acme")
    brokers.turn()
    brokers.turn()
    with pytest.raises(UnavailableError, match="has 1 sessions open"):
        b2.use(b2.enter("bob", b"second"), "acme")
    meter.close()
    assert not brokers.account("b1").clients
    brokers.turn()
    brokers.turn()
    b2.use(b2.enter("bob", b"second"), "acme")


def test_what_is_stored_where_nobody_uses_it_counts_too() -> None:
    brokers = Brokers(stored_bytes=100)
    brokers.quotas["b2"].sweep({"acme": 90})
    (use,) = brokers.quotas["b2"].told([])
    held = brokers.quotas["b1"].region
    assert held is not None
    held.hear("b2", [use], brokers.now)
    refused = brokers.meter("b1").refusal(20)
    assert (
        refused is not None
        and refused.code is Code.LIMIT_STORED
        and refused.sentence
        == ("Tenant acme stores 90 bytes (90 of them at other brokers, as those say), and 100 are allowed.")
    )
    assert brokers.meter("b1").refusal(10) is None
    # Of who may store what it likes nothing is told, nor of more than are told of.
    brokers.quotas["b2"].set_limits({("tenant", "acme"): QuotaLimits(stored_bytes=0)})
    brokers.quotas["b2"].sweep({"acme": 90} | {f"t{number}": 1 for number in range(ACCOUNTS_TOLD_MAX)})
    told = brokers.quotas["b2"].told([])
    assert len(told) == ACCOUNTS_TOLD_MAX and "acme" not in {use.name for use in told}


def test_few_requests_are_still_let_through_one_at_a_time() -> None:
    brokers = Brokers(requests=10)
    assert all(brokers.meter(name).requested() is None for name in NAMES)


@pytest.mark.etcd
async def test_brokers_tell_each_other_and_a_publisher_gets_most_of_its_limit_at_one_of_them(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 2) as region, region.client("b1") as client:
        await client.put_quota("tenant", "acme", QuotaLimits(publish_records=5))
        await client.create_stream("acme/ops/orders")
        await until(lambda: len(list(region.nodes["b1"].broker.streams)) == 1)

        def shares() -> dict[str, float]:
            found = {}
            for name, node in region.nodes.items():
                account = node.broker.quotas.find("tenant", "acme")
                if account is not None and "publish_records" in account.shares:
                    found[name] = account.shares["publish_records"]
            return found

        async with publishing(client, "acme/ops/orders"):
            await until(lambda: shares().get(region.leader("b1", "acme/ops/orders"), 0) > 0.9, 60)
        # Whatever the other one tells, together they have the limit.
        await until(lambda: sum(shares().values()) < 1.1, 60)


@pytest.mark.etcd
async def test_a_stream_that_moves_takes_its_clients_sessions_along(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """As many clients as the tenant may have sessions: where their stream moved from, they stay connected, and none of them is a session of the tenant any more."""
    stream = "acme/ops/orders"
    async with serving(tmp_path, etcd, 3) as region, region.client("b1") as operator:
        await operator.create_stream(stream)
        await operator.put_quota("tenant", "acme", QuotaLimits(sessions=3))
        leader = region.leader("b1", stream)
        async with AsyncExitStack() as clients:
            publisher, reader, consumer = [
                (await clients.enter_async_context(region.client(leader))).stream(stream) for _ in range(3)
            ]
            read = aiter(reader.subscribe("earliest"))
            durable = await clients.enter_async_context(consumer.consumer("crew", start="earliest"))
            for number in range(2):
                await publisher.publish(b"%d" % number)
                assert (await anext(read)).payload == b"%d" % number
                record = await anext(durable)
                assert record.payload == b"%d" % number and await durable.ack(record)
                if not number:
                    await region.drain(leader)
                    await until(lambda: region.leader("b1", stream) not in ("", leader), 60)
            held = {name: node.broker.quotas.find("tenant", "acme") for name, node in region.nodes.items()}
            sessions = {
                name: account.held["sessions"] for name, account in held.items() if account is not None
            }
            assert sessions.get(leader, 0) == 0 and sum(sessions.values()) == 3


@pytest.mark.etcd
async def test_an_identity_that_may_have_one_session_uses_streams_of_three_brokers(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """Its one client has a session at each leader. Another client of it has none, at whichever broker, until the first one has gone."""
    async with serving(tmp_path, etcd, 3) as region, region.client("b1") as operator:
        streams = [f"acme/ops/s{number}" for number in range(3)]
        for stream in streams:
            await operator.create_stream(stream, replicas=1)
        leaders = {region.leader("b1", stream) for stream in streams}
        assert leaders == set(region.names)
        issue_identity(region.folder, region.config, "client", "ann", now_ms())
        ann = str(load_identity(region.folder.identity("ann")).spiffe_id)
        await operator.put_rights(ann, ["publish acme/ops/*"])
        await operator.put_quota("identity", ann, QuotaLimits(sessions=1))
        await operator.put_quota("tenant", "acme", QuotaLimits(sessions=1))

        def sessions() -> dict[str, float]:
            found = {}
            for name, node in region.nodes.items():
                account = node.broker.quotas.find("tenant", "acme")
                if account is not None:
                    found[name] = node.broker.quotas.used(account).get("sessions", 0)
            return found

        async with region.client("b1", identity="ann") as first, AsyncExitStack() as publishers:
            for stream in streams:
                publisher = await publishers.enter_async_context(first.stream(stream).publisher())
                await publisher.publish(b"1")
            await until(lambda: sessions() == dict.fromkeys(region.names, 1.0))
            for name in region.names:
                with pytest.raises(UnavailableError, match="1 sessions open"):
                    async with region.client(name, identity="ann", connect_timeout_s=0.2):
                        pass
        async with region.client("b2", identity="ann") as second:
            for stream in streams:
                await second.stream(stream).publish(b"2")
