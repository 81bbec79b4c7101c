"""The broker's own certificate: issued by the region's authority at each start, renewed in time while the broker serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from felix.expiry import ExpiryWatch, Life, until_text
from felix.identity import Identity
from felix.names import SpiffeId
from felix.transport.port import ServerTls
from keys.authority import RegionAuthority
from region.config import RegionConfig

log = logging.getLogger("felix.region.broker_certificate")

_ADVICE: Final = {
    "issuing": ": felix identity renew-issuing, where the root key is",
}
"""The hint for a certificate that is not renewed automatically."""


def server_names(config: RegionConfig) -> tuple[str, ...]:
    """What the broker's certificate carries."""
    return (f"{config.broker}.{config.region}.{config.mesh}", f"{config.region}.{config.mesh}")


class BrokerCertificate:
    """One per broker."""

    def __init__(
        self,
        config: RegionConfig,
        load: Callable[[], RegionAuthority],
        authority: RegionAuthority,
        certification: bytes,
        expiries: ExpiryWatch,
        now_ms: Callable[[], int],
    ) -> None:
        """`load` reads the authority again, in a thread; `authority` is what it is now. `certification`: certificates of an organisation,
        which follow the chain."""
        self._config = config
        self._load = load
        self._certification = certification
        self._expiries = expiries
        self._now_ms = now_ms
        self._identity = self._issue(authority)

    def _issue(self, authority: RegionAuthority) -> Identity:
        config = self._config
        identity = SpiffeId(config.region, config.mesh, "broker", config.broker)
        self._issued_ms = now_ms = self._now_ms()
        issued = authority.issue_identity(identity, now_ms, dns_names=server_names(config))
        see = self._expiries.see
        see(str(identity), "broker", Life(issued.not_before_ms, issued.not_after_ms))
        for kind, (start_ms, end_ms) in authority.lives().items():
            see(f"{authority.trust_domain} {kind} certificate", kind, Life(start_ms, end_ms))
        return issued

    @property
    def identity(self) -> Identity:
        """The broker's, as it is now."""
        return self._identity

    def tls(self) -> ServerTls:
        """What the broker listens with."""
        return ServerTls(self._identity.chain_pem + self._certification, self._identity.key_pem())

    def notice(self) -> None:
        """Say of all certificates that the broker saw when they near their end."""
        for each in self._expiries.notices(self._now_ms()):
            log.warning(
                "%s %s%s",
                each.name,
                until_text(each.life.not_after_ms, self._now_ms()),
                _ADVICE.get(each.kind, ""),
            )

    async def renew(self, take: Callable[[ServerTls], None]) -> None:
        """Issue the next one where it is due, and hand it to `take`. Whatever it raises may pass: a broker whose certificate ends is
        lost to its clients, so the caller tries again.

        One that was issued while the clock was ahead does not hold yet once that is right again: nobody would reach the broker until then."""
        now_ms = self._now_ms()
        was_ahead = now_ms < min(self._identity.not_before_ms, self._issued_ms)
        if was_ahead or self._identity.renewal_due(now_ms):
            # Read again: a renewed issuing certificate is taken without a restart.
            self._identity = self._issue(await asyncio.to_thread(self._load))
            take(self.tls())
