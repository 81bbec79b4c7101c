"""A region endpoint: one of the agent's regions, kept connected for as long as the agent runs.

The connection beneath resumes by itself; here it is also made anew where it gave up, and it always says why there is
no session, for the links that wait for one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from audit.trust import RegionTrust
from felix.backoff import Backoff, BackoffPolicy
from felix.connection import RegionConnection
from felix.errors import Code, FelixError, UnavailableError
from felix.identity import Identity
from felix.link import Link
from felix.profile import Profile
from felix.runtime.port import Runtime
from felix.tasks import end_tasks
from felix.transport.port import Engine
from keys.bundle import RegionBundle

log = logging.getLogger("felix.bridge.endpoint")

_AGAIN: Final = BackoffPolicy(first_ms=200, ceiling_ms=10_000)


class RegionEndpoint:
    """One region as the agent sees it. `bundle` holds its keys, `trust` what they may be used for; `connection` is None until the first session."""

    def __init__(
        self, profile: Profile, bundle: RegionBundle, engine: Engine | None, runtime: Runtime, *, is_own: bool
    ) -> None:
        """`is_own`: the agent's own region. Another one leads the agent only to brokers at the addresses of `profile`."""
        self.profile = profile
        self.bundle = bundle
        self.trust = RegionTrust(bundle)
        self.reason = f"There is no session with {profile.region} yet."
        self._connection: RegionConnection | None = None
        self._engine = engine
        self._runtime = runtime
        self._is_own = is_own
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def region(self) -> str:
        return self.profile.region

    @property
    def is_up(self) -> bool:
        """True while a session stands."""
        return self._connection is not None and self._connection.link is not None

    def start(self) -> None:
        """Begin to connect, and go on for ever."""
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"endpoint-{self.region}")

    def connection(self) -> RegionConnection:
        """The connection, while a session stands. Raises UnavailableError with the reason where none does."""
        if self._connection is None or self._connection.link is None:
            raise UnavailableError(self.reason, code=Code.DISCONNECTED, retry_after_ms=200)
        return self._connection

    def link(self) -> Link:
        """The session's link. Raises UnavailableError with the reason where none stands."""
        link = self.connection().link
        assert link is not None
        return link

    def take_identity(self, identity: Identity, bundle: RegionBundle) -> None:
        """A renewed certificate or bundle: the next session comes with it, and the next one is now."""
        self.bundle = bundle
        self.trust = RegionTrust(bundle)
        self.profile = replace(self.profile, identity=identity, authority=bundle.root_pem.encode())
        if self._connection is not None:
            self._connection.take_profile(self.profile)

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
        if self._connection is not None:
            await self._connection.close()

    async def _keep(self) -> None:
        backoff = Backoff(_AGAIN, self._runtime.random)
        while True:
            connection = RegionConnection(
                self.profile, engine=self._engine, runtime=self._runtime, profile_only=not self._is_own
            )
            self._over.clear()
            try:
                await connection.open()
            except FelixError as error:
                self.reason = str(error)
                log.warning("%s cannot be reached: %s", self.region, error)
                await connection.close()
                await asyncio.sleep(backoff.next_ms(error.retry_after_ms) / 1000)
                continue
            except Exception as error:
                # Too many open files, or a mistake of ours: nobody else would begin a session again.
                self.reason = f"{self.region} cannot be reached: {type(error).__name__}: {error}"
                log.error("%s", self.reason, exc_info=not isinstance(error, OSError))
                await connection.close()
                await asyncio.sleep(backoff.next_ms() / 1000)
                continue
            backoff.reset()
            self._connection = connection
            connection.attach(self)
            await self._over.wait()
            self._connection = None
            await connection.close()
            await asyncio.sleep(backoff.next_ms() / 1000)

    # -- felix.link.Attachment -------------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        self.reason = ""
        log.info("a session with %s stands", self.region)

    def link_down(self, error: FelixError) -> None:
        self.reason = f"The session with {self.region} was lost: {error.sentence}"
        log.info("%s", self.reason)

    def link_dead(self, error: FelixError) -> None:
        self.reason = str(error)
        self._over.set()
