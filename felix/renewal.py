"""An identity's next certificate: asked for over a session that the present one proves, checked, and put where the present one is.

Invariants: a file holds the old identity or the new one, whole, at any time (mode 0600, synced, renamed into place); what another process
wrote there meanwhile is taken, not overwritten; where the key lies in a file of its own, it stays, and only the chain is new.

`request_renewal` and `store_renewed` are for the owner of an identity (the bridge agent); `IdentityKeeper` keeps that of a
client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from felix.connection import RegionConnection
from felix.errors import Code, FelixError, RequestError
from felix.expiry import Life, Stage, stage_of, until_text
from felix.files import PUBLIC, replace_file
from felix.identity import Identity
from felix.identity_file import load_identity, save_identity
from felix.messages import RenewIdentity
from felix.profile import identity_files, load_credentials
from felix.tasks import end_tasks

_log: Final = logging.getLogger("felix.identity")

AGAIN_S_MIN: Final = 1.0
AGAIN_S_MAX: Final = 3_600.0
"""Between tries: a twentieth of the time that is left, within these bounds; what is refused today may be allowed tomorrow."""
CLOSE_S: Final = 3.0
"""How long a client that closes waits for a renewal that it began."""
STORE_AGAIN_S: Final = 60.0
"""Between tries to write a renewed identity into its file, which failed: whoever starts next finds the old one there."""
WAIT_S_MAX: Final = 3_600.0
"""Clocks are set and machines sleep: the time is looked at again so often."""


async def request_renewal(
    connection: RegionConnection,
    identity: Identity,
    root_pem: bytes,
    clock_ms: Callable[[], int],
    *,
    same_key: bool = False,
) -> Identity:
    """The next identity of the one that `connection` came with, verified under the region's root. `clock_ms`: the answer may come long after it was asked for,
    and the certificate hold from then on alone.

    Raises what the broker refuses it with, RequestError(IDENTITY_REFUSED) where what it gave is not what was asked for.
    """
    # Here: a client seldom renews, and all of X.509 takes long to import.
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    from felix.peer import TrustAnchor, TrustBundle, verify_chain

    key = identity.private_key if same_key else ec.generate_private_key(ec.SECP256R1())
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, SHA256())
    answer = await connection.request(RenewIdentity(csr.public_bytes(serialization.Encoding.DER)))
    who = identity.spiffe_id
    renewed = Identity(who, answer.chain_pem, key)
    verify_chain(
        answer.chain_pem, TrustBundle([TrustAnchor(who.region, who.mesh, root_pem)]), clock_ms(), (who.kind,)
    )
    if renewed.not_after_ms <= identity.not_after_ms:
        raise RequestError(
            f"The certificate that the broker gave {who} ends no later than the old one.",
            code=Code.IDENTITY_REFUSED,
        )
    return renewed


def store_renewed(
    renewed: Identity, replaced: Identity, certificate: Path, key: Path | None = None
) -> Identity:
    """Put a renewed identity into its file, and return the one that is there. Blocks on the disk.

    Another process may have been quicker: what is there and is not `replaced` stays. Raises RequestError, OSError.
    """
    there = load_identity(certificate, key)
    if there.chain_pem != replaced.chain_pem and there.spiffe_id == replaced.spiffe_id:
        return there
    if key is None:
        save_identity(renewed, certificate)
    else:
        replace_file(certificate, renewed.chain_pem, PUBLIC)
    return renewed


class IdentityKeeper:
    """Renews the identity of a client's connection while the client is open, and says early where that is not possible.

    A short-lived client renews when it is used, once two thirds of the life are over. One that stays open renews at that time,
    and its session is replaced before the old certificate expires.
    """

    def __init__(
        self,
        connection: RegionConnection,
    ) -> None:
        self._connection = connection
        self._clock_ms = connection.runtime.clock.now_ms
        self._task: asyncio.Task[None] | None = None
        self._renewing = self._closing = False
        self._told: tuple[int, Stage] | None = None
        self._unwritten: Callable[[], Identity] | None = None
        """Writes the renewed identity into its file: it is in memory alone"""
        self._file: Path | None = None
        """where that is, while the profile has what is in memory"""

    def start(self) -> None:
        """Begin; the connection is open."""
        self._task = asyncio.get_running_loop().create_task(self._keep(), name="felix-identity")

    async def close(self) -> None:
        """Wait a moment for a renewal that is under way, then end."""
        if self._task is None:
            return
        self._closing = True
        if self._renewing:
            await asyncio.wait([self._task], timeout=CLOSE_S)
        await end_tasks(self._task)

    async def _keep(self) -> None:
        identity = self._connection.identity
        while identity is not None and not self._closing:
            await self._until(identity.renewal_due_ms)
            self._renewing = True
            held = identity
            try:
                identity = await self._renew(held)
            except (FelixError, OSError) as error:
                self._tell(held, error)
                if self._closing:
                    return
                self._renewing = False
                left_s = (held.not_after_ms - self._clock_ms()) / 1000
                await asyncio.sleep(min(max(left_s / 20, AGAIN_S_MIN), AGAIN_S_MAX))
                identity = self._connection.identity
                continue
            if self._closing:
                return
            self._renewing = False
            await self._begin_anew(held)

    async def _until(self, time_ms: int) -> None:
        while (wait_ms := time_ms - self._clock_ms()) > 0:
            longest_s = WAIT_S_MAX if self._unwritten is None else STORE_AGAIN_S
            await asyncio.sleep(min(wait_ms / 1000, longest_s))
            await self._write_again()

    async def _write_again(self) -> None:
        if (write := self._unwritten) is None:
            return
        try:
            await asyncio.to_thread(write)
        except (OSError, FelixError) as error:
            _log.info("the renewed identity cannot be written yet: %s", error)
        else:
            assert self._file is not None
            self._connection.profile = replace(self._connection.profile, identity=self._file)
            self._unwritten = self._file = None
            _log.info("the renewed identity is written")

    async def _renew(self, held: Identity) -> Identity:
        connection = self._connection
        profile = connection.profile
        credentials = await asyncio.to_thread(load_credentials, profile)
        if credentials.identity.not_after_ms > held.not_after_ms:
            return credentials.identity  # somebody else has renewed it
        file = self._file if isinstance(profile.identity, Identity) else profile.identity
        certificate, key = (None, None) if file is None else identity_files(file)
        try:
            renewed = await request_renewal(
                connection, held, credentials.root_pem, self._clock_ms, same_key=key is not None
            )
        except FelixError:
            credentials = await asyncio.to_thread(load_credentials, profile)
            if credentials.identity.not_after_ms > held.not_after_ms:
                return credentials.identity  # meanwhile
            raise
        if certificate is not None:
            write = partial(store_renewed, renewed, held, certificate, key)
            try:
                stored = await asyncio.to_thread(write)
            except (OSError, FelixError) as error:
                self._unwritten, self._file = write, file
                _log.warning(
                    "the renewed identity %s cannot be written to %s, is kept in memory alone, and is tried again: %s",
                    held.spiffe_id, certificate, error,
                )  # fmt: skip
            else:
                if self._file is not None:
                    connection.profile = replace(profile, identity=self._file)
                    self._unwritten = self._file = None
                return stored
        connection.profile = replace(profile, identity=renewed)
        return renewed

    async def _begin_anew(self, replaced: Identity) -> None:
        """A session ends with its certificate. Well before that, the next one is made, with the new certificate."""
        latest_ms = replaced.not_after_ms - (replaced.not_after_ms - replaced.not_before_ms) // 10
        await self._until(latest_ms)
        if self._connection.identity == replaced:
            self._connection.begin_anew("its certificate was renewed")

    def _tell(self, identity: Identity, error: FelixError | OSError) -> None:
        """Logs a warning once when renewal is due and once near the end; every other failure at a lower level."""
        now_ms = self._clock_ms()
        stage = stage_of(Life(identity.not_before_ms, identity.not_after_ms), now_ms)
        if self._told == (identity.not_after_ms, stage):
            _log.info("%s was not renewed: %s", identity.spiffe_id, error)
            return
        self._told = (identity.not_after_ms, stage)
        _log.warning(
            "%s %s, and could not be renewed: %s",
            identity.spiffe_id, until_text(identity.not_after_ms, now_ms), error,
        )  # fmt: skip
