"""A region's pin of another one: the bundle that its operator compared, signed with this region's own policy key.

It stands in the metadata store, where every broker of the region reads it: whom a region trusts is compared once, and whoever
administers the store can add nobody (region.governance.trusted_regions). A later one that is `withdrawn` ends the trust: it names the bundle by which
what the other region signed until then still verifies. The file is JSON as a bundle is. The signature is Ed25519, for
the purpose `region-pin`, over the body as JSON with sorted names. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Final, Literal

import msgspec

from felix.errors import Code, FelixError, RequestError, TamperError, of_later_release
from felix.names import trust_domain
from keys.bundle import BUNDLE_BYTES_MAX, RegionBundle, SignedBundle, check_holds, check_update
from keys.signing import SIGNATURE_BYTES, SigningKey, VerifyKey

PIN_BYTES_MAX: Final = 2 * BUNDLE_BYTES_MAX
"""A bundle, laid out for people with more white space, and some lines beside it."""
NUMBER_MAX: Final = (1 << 53) - 1
UNCOMPARED: Final = 1
"""The number of a pin of what was trusted before there were pins: below that of whatever people compared since."""
_PURPOSE: Final = "region-pin"


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the region `by` of `mesh` compared. Of two pins of one region under policy keys that `by` has now the later holds: that with the
    higher `number`, in milliseconds since 1970; 1 where nobody compared when it was signed. The numbers of a key that it gave up count no more."""

    format: Literal[1, 2] = 1
    by: str
    mesh: str
    number: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    bundle: SignedBundle
    withdrawn: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """of format 2: the region is not trusted from here on, until it is compared again"""

    def __post_init__(self) -> None:
        if (self.format == 2) != (self.withdrawn is True):
            raise ValueError("a pin of format 2 is withdrawn, and no other one is")

    def signed_bytes(self) -> bytes:
        """What the signature is over."""
        return msgspec.json.encode(self, order="sorted")


class SignedPin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pin and the signature of a policy key of the region that compared."""

    pin: Pin
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    @property
    def bundle(self) -> RegionBundle:
        """What is pinned."""
        return self.pin.bundle.bundle

    @property
    def is_withdrawn(self) -> bool:
        """Whether it says that the region is not trusted any more."""
        return self.pin.withdrawn is True

    def holds_under(self, policy_keys: Iterable[bytes]) -> bool:
        """Whether one of these public keys signed it."""
        message = self.pin.signed_bytes()
        return any(VerifyKey(public).holds(_PURPOSE, message, self.signature) for public in policy_keys)

    def is_at_least(self, other: SignedPin) -> bool:
        """Whether the other one was signed no later than this. Both hold under policy keys that the region has now."""
        return self.pin.number >= other.pin.number

    def conflicts_with(self, other: SignedPin) -> bool:
        """Whether neither is later, as of two that nobody compared, and yet they pin bundles of which none follows the other without comparing, or one of them
        ends the trust. Both hold under policy keys that the region has now, and are of one region."""
        mine, theirs = self.pin.bundle, other.pin.bundle
        if self.pin.number != other.pin.number:
            return False
        return self.is_withdrawn != other.is_withdrawn or not (
            continues(mine.bundle, theirs) or continues(theirs.bundle, mine)
        )

    def encode(self) -> bytes:
        """The file, laid out for people."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


_decoder: Final = msgspec.json.Decoder(SignedPin)


def sign_pin(pin: Pin, policy_key: SigningKey) -> SignedPin:
    """With the policy key of the region that compared. Raises RequestError where nobody could read it."""
    signed = SignedPin(pin, policy_key.sign(_PURPOSE, pin.signed_bytes()))
    _decode(signed.encode())
    return signed


def decode_pin(data: bytes, own: RegionBundle) -> SignedPin:
    """A pin that this region signed, of another one of its mesh. Raises RequestError for its shape or whose it is, TamperError for a
    signature."""
    signed = parse_pin(data, own.region, own.mesh)
    if not signed.holds_under(own.policy_keys):
        raise not_signed(signed)
    return signed


def parse_pin(data: bytes, region: str, mesh: str) -> SignedPin:
    """A pin by this region, of another one of its mesh, of which the bundle holds. Whether the region's policy key signed the pin is for the caller to
    ask. Raises RequestError for its shape or whose it is, TamperError for the bundle's signature."""
    # 1. the shape
    signed = _decode(data)
    # 2. whose it is, and of whom
    pin, bundle = signed.pin, signed.bundle
    if (pin.by, pin.mesh) != (region, mesh):
        raise RequestError(
            f"A pin by {trust_domain(pin.by, pin.mesh)}; this is {trust_domain(region, mesh)}.",
            code=Code.WRONG_REGION,
        )
    if bundle.region == region or bundle.mesh != mesh:
        raise RequestError(
            f"{region} pins other regions of mesh {mesh}, not {trust_domain(bundle.region, bundle.mesh)}.",
            code=Code.WRONG_REGION,
        )
    # 3. the bundle's own signature
    check_holds(pin.bundle)
    return signed


def read_unverified(data: bytes) -> SignedPin:
    """A pin by its shape alone, whoever signed it. Raises RequestError."""
    return _decode(data)


def not_signed(pin: SignedPin) -> TamperError:
    """Nobody knows who signed it."""
    return TamperError(
        f"The pin of {pin.bundle.region} is not signed by a policy key of {pin.pin.by}.",
        hint=f"Where that key was changed, trust {pin.bundle.region} again: felix region trust FILE. Else find out who wrote it.",
    )


def decode_pins(found: Mapping[str, bytes], own: RegionBundle) -> dict[str, SignedPin]:
    """Of the pins that a broker of this region lists, by region, those that hold."""
    pins = {}
    for region, data in found.items():
        with suppress(RequestError, TamperError):
            pin = decode_pin(data, own)
            if pin.bundle.region == region:
                pins[region] = pin
    return pins


def decode_logged(found: Iterable[bytes], own: RegionBundle) -> list[SignedPin]:
    """Of the pins of this region that its audit log has, those that hold: the region may have had another policy key."""
    pins = []
    for data in found:
        with suppress(RequestError, TamperError):
            pins.append(decode_pin(data, own))
    return pins


def continues(bundle: RegionBundle, signed: SignedBundle) -> bool:
    """Whether this is that bundle, or what may follow it without comparing."""
    try:
        if signed.bundle != bundle:
            check_update(bundle, signed)
    except FelixError:
        return False
    return True


def pin_over(data: bytes, signed: SignedBundle, own: RegionBundle) -> SignedPin | None:
    """The pin that stands beside a bundle's file, where that counts and not `signed`, which the file has: people compared another bundle, which `signed` does not follow. So brokers
    go by it. Of a region that nobody compared yet the later bundle counts, and so it does beside a pin under a key that this region gave up: no broker takes such a pin any more, and
    what it shows in this folder is that there was a later bundle. None where no pin of that region holds, or the file's counts."""
    try:
        pin = parse_pin(data, own.region, own.mesh)
    except FelixError:
        return None
    is_former = not pin.holds_under(own.policy_keys)
    if is_former and not pin.holds_under(key for keys in own.former for key in keys.policy_keys):
        return None
    if pin.bundle.region != signed.bundle.region or continues(pin.bundle, signed):
        return None
    if (is_former or pin.pin.number == UNCOMPARED) and signed.bundle.issued_ms > pin.bundle.issued_ms:
        return None
    return pin


def _decode(data: bytes) -> SignedPin:
    """Raises RequestError where it has not the shape of a pin."""
    if len(data) > PIN_BYTES_MAX:
        raise RequestError(f"A pin of {len(data)} bytes; {PIN_BYTES_MAX} are allowed.")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(
            f"This is not a region's pin: {error}.", code=Code.INVALID, hint=of_later_release(error)
        ) from error
