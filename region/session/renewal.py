"""Identities that renew themselves: a session asks for the next certificate of the identity that it was proved with.

What must hold, in this order, each refusal with its own sentence (`decide`, pure):

1. the identity is one of this region, of a kind that its configuration lets renew itself (`identities.<kind>.renewable_for`);
2. it has some right here: what was forbidden is not renewed, however long its certificate still holds;
3. its certificate holds, and at least half of its life is over;
4. the time until which it may renew itself (its issuer wrote it into the certificate) lies behind what it has.

The session proves the old key, the request the new one. The new certificate has the same name, says the same about renewal, and holds as
long as its predecessor, at most as long as the configuration says, and never beyond the time in 4. It is given out only once the region's
audit log has it (KEY leaf, action `renewed`). It is issued by the region's issuing key; the root key is not needed and not read.

So a thief can renew a stolen key until its rights are removed, and no longer than the region lets any identity go without being
issued by hand. One certificate is answered with RENEWALS_MAX new ones, which bounds what a session can write into the audit log.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final, NamedTuple

from cryptography.hazmat.primitives import serialization

from felix.bounded import BoundedMap
from felix.certificate import RenewalTerms
from felix.errors import Code, RequestError
from felix.expiry import Life, until_text
from felix.messages import IdentityRenewed, RenewIdentity
from felix.names import SpiffeId
from felix.peer import Peer
from keys.authority import RegionAuthority
from keys.identity_request import requested_key
from region.broker import Broker
from region.config import KindConfig

log = logging.getLogger("felix.region.renewal")

RENEWALS_MAX: Final = 16
"""Of one certificate: several processes may share a file, and an answer may be lost; more is somebody who fills the audit log."""
ANSWERED_MAX: Final = 4_096
"""Certificates whose renewals are counted; the oldest is forgotten first."""
GAIN_MS_MIN: Final = 1_000
"""Certificates count in seconds: one that ends no later is none to give out."""
KEY_ID_BYTES: Final = 16


class Decision(NamedTuple):
    """What the new certificate says."""

    lifetime_ms: int
    terms: RenewalTerms


def decide(peer: Peer, settings: KindConfig | None, now_ms: int, *, region: str, has_right: bool) -> Decision:
    """Whether a proved identity is given its next certificate, and for how long. Raises RequestError(FORBIDDEN, IDENTITY_EXPIRED, CONFLICT)."""
    who = peer.spiffe_id
    if who.region != region or settings is None:
        raise _refused(f"{region} does not renew {who}.", f"Identities of {who.region} are renewed there.")
    issue = f"Have it issued again: felix identity issue {who.name} --kind {who.kind} --region {region}."
    if not settings.renewable_for:
        raise _refused(f"{region} lets no {who.kind} renew itself.", issue)
    if not has_right:
        raise _refused(f"{who} has no right in {region}, and is not renewed.", issue)
    if now_ms >= peer.not_after_ms:
        raise RequestError(f"The certificate of {who} has expired.", code=Code.IDENTITY_EXPIRED, hint=issue)
    life_ms = peer.not_after_ms - peer.not_before_ms
    if now_ms < peer.not_before_ms + life_ms // 2:
        raise RequestError(
            f"The certificate of {who} is not due for renewal before half of its life is over.",
            code=Code.CONFLICT,
        )
    # Certificates of release 0.1 say nothing of renewal: they count from when they were issued.
    terms = peer.renewal or RenewalTerms(peer.not_before_ms + settings.renewable_for, life_ms)
    lifetime_ms = min(terms.lifetime_ms, settings.lifetime, terms.until_ms - now_ms)
    if now_ms + lifetime_ms < peer.not_after_ms + GAIN_MS_MIN:
        raise _refused(f"{who} may not renew itself any longer than it holds.", issue)
    return Decision(lifetime_ms, RenewalTerms(terms.until_ms, min(terms.lifetime_ms, settings.lifetime)))


def _refused(sentence: str, hint: str) -> RequestError:
    return RequestError(sentence, code=Code.FORBIDDEN, hint=hint)


class IdentityRenewal:
    """Answers `renew_identity`. `authority` reads the issuing key, and blocks; `record` writes the audit log's KEY leaf."""

    def __init__(
        self,
        broker: Broker,
        authority: Callable[[], RegionAuthority],
        record: Callable[[SpiffeId, bytes, str], Awaitable[None]],
    ) -> None:
        self._broker = broker
        self._authority = authority
        self._record = record
        self._answered: BoundedMap[tuple[SpiffeId, int], int] = BoundedMap(ANSWERED_MAX)

    async def renew(self, peer: Peer, request: RenewIdentity) -> IdentityRenewed:
        """Raises what `decide` and `requested_key` raise, UnavailableError where the audit log cannot be written."""
        broker, who = self._broker, peer.spiffe_id
        settings = broker.config.identities.of(who.kind)
        now_ms = broker.clock_ms()
        decision = decide(peer, settings, now_ms, region=broker.region, has_right=broker.has_right(who))
        key = requested_key(request.csr)
        self._count(peer)
        authority = await asyncio.to_thread(self._authority)
        chain = authority.issue(
            who,
            key,
            now_ms,
            lifetime=timedelta(milliseconds=decision.lifetime_ms),
            renewal=decision.terms,
        )
        public = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        await self._record(who, hashlib.sha256(public).digest()[:KEY_ID_BYTES], "renewed")
        life = Life(now_ms, now_ms + decision.lifetime_ms)
        broker.expiries.see(str(who), who.kind, life)
        log.info("%s renewed itself, and %s", who, until_text(life.not_after_ms, now_ms))
        return IdentityRenewed(chain)

    def _count(self, peer: Peer) -> None:
        """Raises RequestError(CONFLICT) where one certificate is renewed again and again."""
        which = (peer.spiffe_id, peer.not_after_ms)
        count = (self._answered.look(which) or 0) + 1
        self._answered.put(which, min(count, RENEWALS_MAX))
        if count > RENEWALS_MAX:
            raise RequestError(
                f"This certificate of {peer.spiffe_id} was renewed {RENEWALS_MAX} times already.",
                code=Code.CONFLICT,
                hint="Use one of the new ones.",
            )
