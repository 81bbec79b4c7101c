"""Leaves of pins: that this region's operator compared another region's bundle stands in the region's own audit log. Pure.

Such a leaf is of the kind KEY, `pinned`, and has the pin (keys.pin) as its document. The leaf repeats what finds it, and what people compare: the id of
that region's first policy key, and the bundle's fingerprint. Whoever verifies holds it to the pin, and the pin to the region's policy keys (audit.agreement);
it believes no bundle for it.

Callers: region (which writes them), audit.agreement.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final

from audit.document_leaf import stands_beside
from audit.leaf import KEY_ID_BYTES, Header, Kind, Leaf, Side
from keys.bundle import RegionBundle
from keys.pin import SignedPin

PINNED: Final = "pinned"
"""The action of such a leaf."""
WITHDRAWN: Final = "pin-withdrawn"
"""And of one whose pin ends the trust."""
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{4}(?: [0-9a-f]{4})+")


def is_pinned(header: Header) -> bool:
    """Whether the leaf has a pin: it says that a bundle was compared, or that its region is not trusted any more."""
    return header.kind is Kind.KEY and header.action in (PINNED, WITHDRAWN)


def pin_leaf(pin: SignedPin, *, time_ms: int, actor: str) -> Leaf:
    """The leaf of a pin, in the log of the region that compared. `actor`: who put it (SPIFFE id)."""
    bundle, document = pin.bundle, pin.encode()
    said = "is not trusted any more; it was" if pin.is_withdrawn else "is trusted"
    return Leaf(
        Header(
            kind=Kind.KEY,
            side=Side.INGRESS,
            time_ms=time_ms,
            source_region=pin.pin.by,
            destination_region=pin.pin.by,
            actor=actor,
            action=_action(pin),
            key_id=_key_id(bundle),
            sentence=f"{bundle.region} {said} by the bundle with the fingerprint {bundle.fingerprint()}.",
            document=b"" if stands_beside(document) else document,
            document_sha256=sha256(document).digest(),
        )
    )


def differences(header: Header, pin: SignedPin) -> list[str]:
    """In what a leaf differs from its pin. Of its sentence the fingerprint counts, and no other may stand there."""
    bundle = pin.bundle
    found = [] if header.key_id == _key_id(bundle) else ["key_id"]
    if header.action != _action(pin):
        found.append("action")
    if _FINGERPRINT.findall(header.sentence) != [bundle.fingerprint()]:
        found.append("the fingerprint in its sentence")
    return found


def _action(pin: SignedPin) -> str:
    return WITHDRAWN if pin.is_withdrawn else PINNED


def _key_id(bundle: RegionBundle) -> bytes:
    return sha256(bundle.policy_keys[0]).digest()[:KEY_ID_BYTES]
