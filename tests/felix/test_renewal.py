"""A client that stays open for many lives of its certificate, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from client.conftest import until
from cryptography import x509
from runtimes import with_wall

import felix.renewal
from felix.connection import RegionConnection
from felix.errors import Code, RequestError
from felix.identity import Identity, parse_identity
from felix.identity_file import load_identity, save_identity
from felix.messages import IdentityRenewed, RenewIdentity
from felix.names import SpiffeId
from felix.profile import Profile
from felix.renewal import IdentityKeeper, request_renewal
from felix.runtime.port import Runtime
from keys.authority import create_authority

NOW = 1_800_000_000_000
DAY = 86_400_000
AUTHORITY = create_authority("us-east", "acme", NOW - DAY)
WHO = SpiffeId("us-east", "acme", "client", "orders")


class Connection:
    """What the keeper needs of a connection: each session reads the identity anew, as from a file."""

    def __init__(self, identity: Identity, runtime: Runtime) -> None:
        self.runtime = runtime
        self.profile = Profile(
            region="us-east",
            mesh="acme",
            addresses=("127.0.0.1:1",),
            authority=AUTHORITY.anchor().root_pem,
            identity=identity,
        )
        self.identity = identity
        self.sessions = 1

    def begin_anew(self, why: str) -> None:
        held = cast(Identity, self.profile.identity)
        self.identity = parse_identity(held.chain_pem + held.key_pem())
        self.sessions += 1


async def test_each_life_is_renewed_at_two_thirds_and_its_session_made_anew_before_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = NOW
    refused = False
    renewals = 0

    async def renew(
        connection: Any, held: Identity, root: bytes, clock_ms: Callable[[], int], **how: Any
    ) -> Identity:
        nonlocal renewals
        if refused:
            raise RequestError("Not today.", code=Code.FORBIDDEN)
        renewals += 1
        return AUTHORITY.issue_identity(WHO, clock_ms())

    monkeypatch.setattr(felix.renewal, "request_renewal", renew)
    monkeypatch.setattr(felix.renewal, "WAIT_S_MAX", 0.005)
    monkeypatch.setattr(felix.renewal, "AGAIN_S_MAX", 0.005)
    monkeypatch.setattr(felix.renewal, "AGAIN_S_MIN", 0.005)
    connection = Connection(AUTHORITY.issue_identity(WHO, now), with_wall(lambda: now))
    keeper = IdentityKeeper(cast(RegionConnection, connection))
    keeper.start()
    try:
        # A certificate of 30 days is renewed after 20; the session of the one before it ends 27 days after that one began.
        for life, early in ((1, 19), (2, 12), (3, 12)):
            now += early * DAY
            await asyncio.sleep(0.02)
            assert (renewals, connection.sessions) == (life - 1, life)
            now += 2 * DAY
            await until(lambda life=life: renewals == life)
            assert connection.sessions == life
            now += 7 * DAY
            await until(lambda life=life: connection.sessions == life + 1)
        refused = True
        now += 14 * DAY
        await until(lambda: "could not be renewed" in caplog.text)
        now += 7 * DAY
        await until(lambda: caplog.text.count("could not be renewed") == 2)
        assert "expires in 2d" in caplog.text
        refused = False
        await until(lambda: renewals == 4)
    finally:
        await keeper.close()


async def test_a_certificate_that_was_issued_long_after_it_was_asked_for_is_taken() -> None:
    """As where no broker served meanwhile: it does not hold at the time of the question."""
    now, life = NOW, timedelta(minutes=1)

    class Slow:
        async def request(self, asked: RenewIdentity) -> IdentityRenewed:
            nonlocal now
            now += 18_000
            key = x509.load_der_x509_csr(asked.csr).public_key()
            return IdentityRenewed(AUTHORITY.issue(WHO, cast(Any, key), now, lifetime=life))

    old = AUTHORITY.issue_identity(WHO, NOW - 42_000, lifetime=life)
    root = AUTHORITY.anchor().root_pem
    renewed = await request_renewal(cast(RegionConnection, Slow()), old, root, lambda: now)
    assert NOW < renewed.not_before_ms <= now


async def test_a_renewed_identity_that_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the next process found the old one there, after its end."""
    now, fails = NOW, True

    async def renew(
        connection: Any, held: Identity, root: bytes, clock_ms: Callable[[], int], **how: Any
    ) -> Identity:
        return AUTHORITY.issue_identity(WHO, clock_ms())

    def store(renewed: Identity, *rest: Any, write: Any = felix.renewal.store_renewed) -> Any:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(renewed, *rest)

    monkeypatch.setattr(felix.renewal, "request_renewal", renew)
    monkeypatch.setattr(felix.renewal, "store_renewed", store)
    monkeypatch.setattr(felix.renewal, "WAIT_S_MAX", 0.005)
    monkeypatch.setattr(felix.renewal, "STORE_AGAIN_S", 0.005)
    old, path = AUTHORITY.issue_identity(WHO, now), tmp_path / "orders.pem"
    save_identity(old, path)
    connection = Connection(old, with_wall(lambda: now))
    connection.profile = replace(connection.profile, identity=path)
    keeper = IdentityKeeper(cast(RegionConnection, connection))
    keeper.start()
    try:
        for life in (1, 2):
            fails = True
            now += 21 * DAY
            await until(lambda life=life: caplog.text.count("is kept in memory alone") == life)
            assert isinstance(connection.profile.identity, Identity)
            before = load_identity(path)
            fails = False
            await until(lambda before=before: load_identity(path) != before)
            await until(lambda: connection.profile.identity == path)
            connection.identity = load_identity(path)
    finally:
        await keeper.close()


async def test_a_client_that_closes_waits_for_a_renewal_that_it_began_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def renew(
        connection: Any, held: Identity, root: bytes, clock_ms: Callable[[], int], **how: Any
    ) -> Identity:
        asked.set()
        await answer.wait()
        return AUTHORITY.issue_identity(WHO, clock_ms())

    monkeypatch.setattr(felix.renewal, "request_renewal", renew)
    # Whoever waited for more than the renewal would wait for ever.
    monkeypatch.setattr(felix.renewal, "CLOSE_S", 3_600.0)
    old = AUTHORITY.issue_identity(WHO, NOW)
    connection = Connection(old, with_wall(lambda: NOW + 21 * DAY))
    keeper = IdentityKeeper(cast(RegionConnection, connection))
    keeper.start()
    await asked.wait()
    closing = asyncio.create_task(keeper.close())
    await asyncio.sleep(0)
    answer.set()
    async with asyncio.timeout(120):
        await closing
    assert connection.profile.identity != old
