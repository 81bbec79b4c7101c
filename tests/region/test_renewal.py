"""Identities that renew themselves: the rule, the request over a session, the file, and what is on the record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bridge_mesh import until
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from region_home import make_region, running
from region_peer import client

import felix
from audit.leaf import Kind, decode_leaf
from audit.tile import read_entries
from audit.tile_disk import Folder
from felix.certificate import RenewalTerms
from felix.connection import RegionConnection
from felix.errors import Code, RequestError
from felix.identity import Identity
from felix.identity_file import load_identity, save_identity
from felix.messages import IdentityRenewed, RenewIdentity
from felix.names import SpiffeId
from felix.peer import Peer
from felix.renewal import store_renewed
from felix.runtime.real import now_ms
from policy.quantity import Duration
from region.bootstrap import issue_identity
from region.config import IdentitiesConfig, KindConfig, load_config
from region.folder import RegionFolder
from region.node import Node
from region.session.renewal import RENEWALS_MAX, decide

DAY = 86_400_000
NOW = 1_800_000_000_000
SETTINGS = KindConfig()
KEY = ec.generate_private_key(ec.SECP256R1())


def csr(key: ec.EllipticCurvePrivateKey) -> bytes:
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, SHA256())
    return made.public_bytes(Encoding.DER)


# -- the rule ------------------------------------------------------------------------------------------


def peer(kind: str = "client", region: str = "us-east", **changes: Any) -> Peer:
    """Somebody with a certificate of 30 days, 20 of which are over; issued by hand 100 days ago."""
    held = Peer(
        SpiffeId(region, "acme", kind, "orders"),
        KEY.public_key(),
        NOW + 10 * DAY,
        NOW - 20 * DAY,
        RenewalTerms(NOW + 265 * DAY, 30 * DAY),
    )
    return replace(held, **changes)


def decided(
    held: Peer, settings: KindConfig | None = SETTINGS, now: int = NOW, has_right: bool = True
) -> Any:
    return decide(held, settings, now, region="us-east", has_right=has_right)


def test_a_due_identity_is_renewed_for_as_long_as_it_was_and_never_beyond_what_its_issuer_wrote() -> None:
    assert decided(peer()) == (30 * DAY, RenewalTerms(NOW + 265 * DAY, 30 * DAY))
    short = RenewalTerms(NOW + 265 * DAY, DAY)
    day = peer(not_before_ms=NOW - 20 * 3_600_000, not_after_ms=NOW + 4 * 3_600_000, renewal=short)
    assert decided(day) == (DAY, short)
    assert decided(peer(), KindConfig(lifetime=Duration(15 * DAY))).lifetime_ms == 15 * DAY
    late = peer(renewal=RenewalTerms(NOW + 12 * DAY, 30 * DAY))
    assert decided(late).lifetime_ms == 12 * DAY
    # Certificates of release 0.1 say nothing; they count from their own beginning.
    assert decided(peer(renewal=None)).terms == RenewalTerms(NOW + 345 * DAY, 30 * DAY)


@pytest.mark.parametrize(
    ("held", "how", "code", "why"),
    [
        (peer(region="eu-west", kind="bridge"), {}, Code.FORBIDDEN, "us-east does not renew"),
        (peer(), {"settings": None}, Code.FORBIDDEN, "does not renew"),
        (peer(), {"settings": KindConfig(renewable_for=Duration(0))}, Code.FORBIDDEN, "lets no client renew itself"),
        (peer(), {"has_right": False}, Code.FORBIDDEN, "has no right in us-east"),
        (peer(), {"now": NOW + 10 * DAY}, Code.IDENTITY_EXPIRED, "has expired"),
        (peer(), {"now": NOW - 6 * DAY}, Code.CONFLICT, "half of its life"),
        (peer(renewal=RenewalTerms(NOW + 10 * DAY, 30 * DAY)), {}, Code.FORBIDDEN, "any longer"),
        (peer(renewal=RenewalTerms(NOW - DAY, 30 * DAY)), {}, Code.FORBIDDEN, "any longer"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(held: Peer, how: dict[str, Any], code: Code, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        decided(held, **how)
    assert caught.value.code is code


# -- over a session ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RegionFolder:
    """A region that was founded 60 days ago, so that there can be identities of some age."""
    monkeypatch.setattr("region_home.now_ms", lambda: now_ms() - 60 * DAY)
    return make_region(tmp_path, "us-east")


@pytest.fixture
async def node(folder: RegionFolder) -> AsyncIterator[Node]:
    identities = IdentitiesConfig(operator=KindConfig(renewable_for=Duration(0)))
    save_identity(issued(folder, "operator", age_ms=25 * DAY, kind="operator"), folder.identity("operator"))
    async with running(folder, identities=identities) as made:
        yield made


def issued(folder: RegionFolder, name: str, age_ms: int, kind: str = "client", **more: Any) -> Identity:
    return issue_identity(folder, load_config(folder.config), kind, name, now_ms() - age_ms, **more)


async def kept_leaves(node: Node) -> list[Any]:
    """What the audit log holds; it is written into tiles with each checkpoint."""
    trail = node.folder.root / node.config.data / "audit"
    status = node.services.governance.trail.status
    await until(lambda: status().checkpoint == status().durable, "the checkpoint")
    size = status().durable
    return [decode_leaf(data).header for _, data in read_entries(Folder(trail), 0, size, size)]


async def test_a_client_renews_its_file_while_it_is_used_and_goes_on_with_the_new_certificate(
    node: Node, folder: RegionFolder
) -> None:
    old = issued(folder, "orders", age_ms=28 * DAY)
    path = folder.identity("orders")
    async with client(folder) as operator:
        await operator.create_stream("acme/ops/orders")
        await operator.put_rights(str(old.spiffe_id), ["publish acme/ops/orders"])
    profile = felix.load_profile("us-east", identity="orders", home=folder.root.parent)
    async with felix.connect(profile=profile) as orders:
        first = orders.session.session
        async with orders.stream("acme/ops/orders").publisher() as publisher:
            await publisher.publish(b"before")
            # Its last tenth has begun, so the session begins anew at once.
            await until(lambda: orders.is_connected and orders.session.session != first, "the new session")
            assert await publisher.publish(b"after") == 1
        new = load_identity(path)
        assert orders.connection.identity == new
    assert new.spiffe_id == old.spiffe_id and new.private_key != old.private_key
    assert new.not_after_ms > now_ms() + 29 * DAY and path.stat().st_mode & 0o777 == 0o600
    assert new.renewal is not None and old.renewal is not None
    assert new.renewal == old.renewal  # still from when it was issued by hand
    assert list(folder.identities.glob(".*")) == []
    (leaf,) = [each for each in await kept_leaves(node) if each.kind is Kind.KEY]
    assert (leaf.actor, leaf.action, len(leaf.key_id)) == (str(old.spiffe_id), "renewed", 16)
    assert node.broker.expiries.seconds_left(now_ms())["client"] > 29 * 86_400
    # Used again, it has nothing to renew.
    async with felix.connect(profile=profile) as orders:
        await orders.stream("acme/ops/orders").publish(b"again")
    assert load_identity(path).chain_pem == new.chain_pem


async def test_what_the_region_does_not_let_renew_stays_and_is_told_once(
    node: Node, folder: RegionFolder, caplog: pytest.LogCaptureFixture
) -> None:
    forbidden = issued(folder, "forbidden", age_ms=25 * DAY)
    fresh = issued(folder, "fresh", age_ms=DAY)
    async with client(folder) as operator:
        await operator.put_rights(str(fresh.spiffe_id), ["publish acme/ops/orders"])
    for name, code in (("operator", Code.FORBIDDEN), ("forbidden", Code.FORBIDDEN), ("fresh", Code.CONFLICT)):
        before = folder.identity(name).read_bytes()
        async with client(folder, name) as who:
            with pytest.raises(RequestError) as caught:
                await who.request(RenewIdentity(csr(KEY)))
            assert caught.value.code is code
        assert folder.identity(name).read_bytes() == before
    profile = felix.load_profile("us-east", identity="forbidden", home=folder.root.parent)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "felix.identity"):
        async with felix.connect(profile=profile):
            await until(lambda: caplog.messages, "the warning")
    assert f"{forbidden.spiffe_id} expires in 4d 23h, and could not be renewed" in caplog.messages[0]
    expiring = {each.name: each.stage for each in node.broker.expiries.expiring(now_ms(), 50)}
    assert str(forbidden.spiffe_id) in expiring and str(fresh.spiffe_id) not in expiring
    assert [each for each in await kept_leaves(node) if each.kind is Kind.KEY] == []


async def test_a_request_proves_its_key_and_one_certificate_is_renewed_so_often_and_no_more(
    node: Node, folder: RegionFolder
) -> None:
    old = issued(folder, "orders", age_ms=25 * DAY)
    async with client(folder) as operator:
        await operator.put_rights(str(old.spiffe_id), ["publish acme/ops/orders"])
    good = csr(KEY)
    orders = RegionConnection(felix.load_profile("us-east", identity="orders", home=folder.root.parent))
    await orders.open()
    try:
        for bad in (b"", b"no request", good[:-2] + bytes((good[-2] ^ 1, good[-1])), csr_on_other_curve()):
            with pytest.raises(RequestError) as caught:
                await orders.request(RenewIdentity(bad))
            assert caught.value.code is Code.IDENTITY_REFUSED
        answers = await asyncio.gather(*(orders.request(RenewIdentity(good)) for _ in range(RENEWALS_MAX)))
        for answer in answers:
            assert isinstance(answer, IdentityRenewed)
            Identity(old.spiffe_id, answer.chain_pem, KEY)
        with pytest.raises(RequestError, match="times already"):
            await orders.request(RenewIdentity(good))
    finally:
        await orders.close()
    assert sum(each.kind is Kind.KEY for each in await kept_leaves(node)) == RENEWALS_MAX


def csr_on_other_curve() -> bytes:
    return csr(ec.generate_private_key(ec.SECP384R1()))


# -- the file ------------------------------------------------------------------------------------------


def test_what_another_process_renewed_is_taken_and_a_key_in_its_own_file_stays(folder: RegionFolder) -> None:
    old = issued(folder, "orders", age_ms=25 * DAY)
    path = folder.identity("orders")
    theirs = issued(folder, "orders", age_ms=0)
    mine = issued(folder, "other", age_ms=0)
    assert store_renewed(mine, old, path).chain_pem == theirs.chain_pem
    assert load_identity(path).chain_pem == theirs.chain_pem
    chain, key = folder.root / "split.pem", folder.root / "split.key"
    chain.write_bytes(old.chain_pem)
    key.write_bytes(old.key_pem())
    key.chmod(0o600)
    renewed = replace(old, chain_pem=old.chain_pem + old.chain_pem[old.chain_pem.rindex(b"-----BEGIN") :])
    store_renewed(renewed, old, chain, key)
    assert chain.read_bytes() == renewed.chain_pem and key.read_bytes() == old.key_pem()


def test_lives_come_from_the_configuration_and_may_be_told_for_one_identity(folder: RegionFolder) -> None:
    config = msgspec.structs.replace(
        load_config(folder.config),
        identities=IdentitiesConfig(
            client=KindConfig(lifetime=Duration(2 * DAY), renewable_for=Duration(9 * DAY))
        ),
    )
    now = now_ms()
    usual = issue_identity(folder, config, "client", "usual", now)
    assert abs(usual.not_after_ms - now - 2 * DAY) <= 1000
    assert usual.renewal == RenewalTerms((now + 9 * DAY) // 1000 * 1000, 2 * DAY)
    own = issue_identity(
        folder, config, "client", "own", now, lifetime=timedelta(hours=1), renewable_for=timedelta(0)
    )
    assert own.renewal == RenewalTerms(now // 1000 * 1000, 3_600_000)
    broker = issue_identity(folder, config, "broker", "b9", now)
    assert broker.renewal is None
