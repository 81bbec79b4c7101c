"""A region's offer: one signed file with all that another organisation needs to exchange data with it.

It holds the region's bundle, where its brokers are reached, the legal entity that runs it and whom to ask, as the region itself
states. The file is JSON as a bundle is. The signature is Ed25519, for the purpose `region-offer`, over the body as JSON with
sorted names, and made by a policy key that the bundle inside names: it shows that the offer is that region's, once people
compared the bundle's fingerprint (keys.bundle). Pure.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from felix.address import Address
from felix.errors import Code, RequestError, TamperError
from felix.profile import ADDRESSES_MAX, parse_address
from keys.bundle import BUNDLE_BYTES_MAX, RegionBundle, SignedBundle, check_holds
from keys.signing import SIGNATURE_BYTES, SigningKey, VerifyKey

OFFER_BYTES_MAX: Final = 2 * BUNDLE_BYTES_MAX
"""A bundle, laid out for people with more white space, and some lines beside it."""
LINE_CHARACTERS_MAX: Final = 255
_PURPOSE: Final = "region-offer"

Line = Annotated[str, msgspec.Meta(max_length=LINE_CHARACTERS_MAX)]


class RegionOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a region says of itself. `entity`: its legal name, `contact`: whom to ask; empty where it does not say."""

    format: Literal[1] = 1
    issued_ms: Annotated[int, msgspec.Meta(ge=0)]
    addresses: Annotated[tuple[Line, ...], msgspec.Meta(min_length=1, max_length=ADDRESSES_MAX)]
    entity: Line = ""
    contact: Line = ""
    bundle: SignedBundle

    def signed_bytes(self) -> bytes:
        """What the signature is over."""
        return msgspec.json.encode(self, order="sorted")

    def parsed_addresses(self) -> list[Address]:
        """Raises RequestError(CONFIG_INVALID)."""
        return [parse_address(address) for address in self.addresses]


class SignedOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An offer and the signature of a policy key of its region."""

    offer: RegionOffer
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    def encode(self) -> bytes:
        """The file, laid out for people."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def is_by(self, bundle: RegionBundle) -> bool:
        """Whether a policy key of this bundle signed it: that of the region as it is trusted, say."""
        held = self.offer.bundle.bundle
        message = self.offer.signed_bytes()
        return (held.region, held.mesh) == (bundle.region, bundle.mesh) and any(
            VerifyKey(public).holds(_PURPOSE, message, self.signature) for public in bundle.policy_keys
        )


_decoder: Final = msgspec.json.Decoder(SignedOffer)


def sign_offer(offer: RegionOffer, policy_key: SigningKey) -> SignedOffer:
    """Raises RequestError, TamperError where it would not hold as a file."""
    return decode_offer(SignedOffer(offer, policy_key.sign(_PURPOSE, offer.signed_bytes())).encode())


def is_offer(data: bytes) -> bool:
    """Whether a file says that it is an offer; a bundle does not."""
    try:
        return "offer" in msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


def decode_offer(data: bytes) -> SignedOffer:
    """An offer that holds, the bundle in it, too. Raises RequestError for its shape, TamperError for a signature."""
    if len(data) > OFFER_BYTES_MAX:
        raise RequestError(f"An offer of {len(data)} bytes; {OFFER_BYTES_MAX} are allowed.")
    try:
        signed = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(
            f"This is not a region's offer: {error}.",
            code=Code.INVALID,
            hint="Have that region write it again: felix region offer.",
        ) from error
    check_holds(signed.offer.bundle)
    signed.offer.parsed_addresses()
    bundle = signed.offer.bundle.bundle
    if not signed.is_by(bundle):
        raise TamperError(
            f"The offer of {bundle.region} is not signed by one of its own policy keys: it was changed.",
            hint="Get it again from that region, and compare its fingerprint.",
        )
    return signed
