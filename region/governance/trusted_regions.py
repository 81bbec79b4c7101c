"""The regions that this one trusts now, by their bundles in the metadata store, and those that it believed once.

Whose bundle a region is by, people compare; what stands in the store is believed only by one of these, the later before the earlier:
1. a pin in the store that this region's own policy key signed (keys.pin): every broker of the region believes the same;
2. without one, a bundle that an operator put into this broker's folder;
3. what this broker believed before its restart.

What this broker believes by a pin it keeps with that pin, as it was signed: so it can put it back where the store has an earlier one or none.

A pin may say that a region is trusted no more (`withdrawn`): then its bundle stays known, for what it forbade, and it is none of `bundles`: nobody of it comes in,
and nothing that it signs allows anything, until a later pin is compared.

Invariants: a bundle gives way only to a later pin, to one that an operator put into the folder of a region without a signed pin, or to its own successor
(keys.bundle.check_update); no pin gives way to an earlier one, also over a restart (region.trust.trust_store), save that one under a policy
key which this region gave up gives way to any that was compared under a key of now; of two pins of one number with bundles of which none follows the
other the one holds that stands first in the region's audit log, which nobody can put back, and without the log that which was believed first; the region's own bundle is never read from the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from audit.note import VerifierKey
from audit.trust import RegionTrust, check_cosigner_keys, parties_of, witnesses_of
from felix.errors import Code, FelixError, RequestError
from felix.peer import TrustBundle
from felix.runtime.real import now_ms
from keys.bundle import (
    RegionBundle,
    SignedBundle,
    check_bundle,
    check_not_ahead,
    check_update,
    decode_bundle,
)
from keys.pin import UNCOMPARED, SignedPin, decode_pin
from region.metadata.mirror import CatalogMirror
from region.trust.trust_store import Memory

log = logging.getLogger("felix.region.governance")


class Believed(msgspec.Struct, frozen=True):
    """The bundle of a region that this broker goes by. `number`: of the signed pin that it rests on; 0 without one. `pin`: that pin; None where
    a release kept the number alone. `is_former`: no policy key that this region has now is known to have signed it, so its number says nothing."""

    bundle: RegionBundle
    number: Annotated[int, msgspec.Meta(ge=0)] = 0
    pin: SignedPin | None = None
    is_former: bool = False

    @classmethod
    def by(cls, pin: SignedPin) -> Believed:
        return cls(pin.bundle, pin.pin.number, pin)

    @property
    def is_withdrawn(self) -> bool:
        """Whether an operator took the trust back; also by a key that this region gave up since."""
        return self.pin is not None and self.pin.is_withdrawn

    @property
    def present(self) -> SignedPin | None:
        """The pin, where others of this region believe it, too."""
        return None if self.is_former else self.pin

    def gives_way(self, pin: SignedPin) -> bool:
        """Whether a pin under a policy key of now was signed after what this rests on. It is later than any under a key given up, whose numbers a
        thief of that may have chosen; but what people compared gives way only to what they compared."""
        if self.is_former:
            is_the_same = pin.bundle == self.bundle and not self.is_withdrawn
            return pin.pin.number > UNCOMPARED or self.number <= UNCOMPARED or is_the_same
        return pin.pin.number > self.number


class _StoredPin(NamedTuple):
    """What the store has as a region's pin. `pin`: None where it does not hold."""

    data: bytes
    pin: SignedPin | None


_decoder: Final = msgspec.json.Decoder(dict[str, Believed])


class TrustedRegions:
    """One per broker. Made from what the region's folder holds and this broker kept; `read` takes in what the store trusts."""

    def __init__(
        self,
        own: RegionBundle,
        mirror: CatalogMirror,
        pinned: Callable[[], Mapping[str, RegionBundle]],
        follow_logs: Callable[[Iterable[VerifierKey]], None],
        memory: Memory,
        kept: bytes | None = b"",
        witnesses: Callable[[], Iterable[VerifierKey]] = tuple,
        signed: Iterable[SignedPin] = (),
        logged: Iterable[SignedPin] = (),
        clock_ms: Callable[[], int] = now_ms,
    ) -> None:
        """`pinned` reads other regions' bundles that an operator put into this region's folder, their fingerprints compared.
        `follow_logs` is told the audit logs of each region that is trusted. `memory` keeps what is believed, `kept` is what it kept before: None
        where a release has served here that kept nothing, whose belief is taken over once. `witnesses`: all that cosign this region's log, outside ones
        among them. `signed`: the pins in this region's folder; `logged`: those in its audit log, oldest first. Both hold. `clock_ms`: no successor is believed that is issued in the future."""
        self.own = own
        self.bundles: dict[str, RegionBundle] = {own.region: own}
        """this region's and those it trusts, by region"""
        self.trust = TrustBundle()
        """of these bundles, once the catalog was read"""
        self.problems: dict[str, str] = {}
        """what a person has to do about regions that the store names and nobody compared, or of which it has an earlier pin, by region"""
        self._mirror = mirror
        self._pinned = pinned
        self._memory = memory
        self._is_first_after_update = kept is None
        self._clock_ms = clock_ms
        self._kept = _decode(kept or b"", own)
        self._believed = dict(self._kept)
        for region, bundle in pinned().items():
            if not self._number_of(region):
                self._believed[region] = Believed(bundle)
        self._in_folder = {pin.bundle.region: pin for pin in signed}
        for pin in self._in_folder.values():
            # In this broker's own folder: the store may have an earlier one.
            self._take(pin)
        self._take_logged(logged)
        self._pins: dict[str, _StoredPin] = {}
        """by region, as they stand in the store"""
        self._encoded: dict[bytes, bytes] = {}
        """pins as they are listed, by signature: every bridge lists them at each change"""
        self._follow_logs = follow_logs
        self._witnesses = witnesses

    def read(self) -> None:
        """Take in the pins and bundles that the store holds now."""
        self._read_pins()
        self.bundles, problems = self._read_bundles()
        problems |= self._lagging_pins() | self._conflicting_pins()
        for region, problem in problems.items():
            if self.problems.get(region) != problem:
                log.error("%s", problem)
        self.problems = problems
        self.trust = TrustBundle(bundle.anchor() for bundle in self.bundles.values())
        if self._believed != self._kept or self._is_first_after_update:
            self._kept = dict(self._believed)
            self._memory.keep_trusted(msgspec.json.encode(self._kept))
        self._is_first_after_update = False

    def witnesses(self) -> Iterable[VerifierKey]:
        """Those that cosign this region's log."""
        return witnesses_of(self.bundles.values(), self.own.region)

    def _number_of(self, region: str) -> int:
        """Of the signed pin that what is believed of a region rests on; 0 without one."""
        held = self._believed.get(region)
        return 0 if held is None else held.number

    def _read_pins(self) -> None:
        """What this region's own policy key signed takes the place of whatever was believed before, but never of a later pin's."""
        before, self._pins = self._pins, {}
        for region, data in self._mirror.pins().items():
            held = before.get(region)
            # Verified once.
            stored = held if held is not None and held.data == data else self._read_pin(region, data)
            self._pins[region] = stored
            if stored.pin is not None and stored is not held:
                self._take(stored.pin)

    def _read_pin(self, region: str, data: bytes) -> _StoredPin:
        try:
            pin = decode_pin(data, self.own)
            if pin.bundle.region != region:
                raise RequestError(f"It is of {pin.bundle.region}.")
            RegionTrust(pin.bundle)
        except FelixError as error:
            log.error("the pin of %s in the metadata store is not believed: %s", region, error)
            return _StoredPin(data, None)
        return _StoredPin(data, pin)

    def _take(self, pin: SignedPin) -> None:
        """A pin that holds, where it is later than what is believed."""
        region = pin.bundle.region
        held = self._believed.get(region)
        if held is not None and held.pin is None and held.number == pin.pin.number > UNCOMPARED:
            # The very one whose number an earlier release kept; its bundle may have followed since.
            self._believed[region] = msgspec.structs.replace(held, pin=pin, is_former=False)
        elif self.is_later(pin):
            self._believed[region] = Believed.by(pin)

    def _take_logged(self, pins: Iterable[SignedPin]) -> None:
        """Those of the audit log, oldest first: the later holds, and of those that conflict the first."""
        firsts: dict[tuple[str, int], SignedPin] = {}
        for pin in pins:
            self._take(pin)
            firsts.setdefault((pin.bundle.region, pin.pin.number), pin)
        for (region, number), first in firsts.items():
            held = self.pin_of(region)
            if held is not None and held.pin.number == number and held.conflicts_with(first):
                self._believed[region] = Believed.by(first)

    def _is_behind(self, region: str, held: Believed) -> bool:
        """Whether a broker that begins anew would believe by the store an earlier pin than this one does, or none."""
        there = self._stored_pin(region)
        if there is None:
            return held.number > 0
        same = (held.bundle, None if held.pin is None else held.pin.bundle)
        is_earlier = held.is_former or there.pin.number < held.number
        is_same = there.bundle in same and there.is_withdrawn == held.is_withdrawn
        return is_earlier and not held.gives_way(there) and not is_same

    def _stored_pin(self, region: str) -> SignedPin | None:
        stored = self._pins.get(region)
        return None if stored is None else stored.pin

    def lacking(self, files: Iterable[SignedBundle]) -> tuple[list[SignedPin], list[SignedBundle]]:
        """Of what this broker goes by, the pins that the store has not, nor the like; and the bundles of `files`, those in the region's folder. Once
        `read` took in what the store holds."""
        pins = [
            pin
            for region, held in self._believed.items()
            if (pin := held.present) is not None and self._is_behind(region, held)
        ]
        return pins, [signed for signed in files if self._goes_by(signed)]

    def _goes_by(self, signed: SignedBundle) -> bool:
        """Whether this broker believes a bundle, or would if it came."""
        held = self._believed.get(signed.bundle.region)
        if held is not None and held.is_withdrawn:
            return False
        try:
            if held is not None and held.bundle != signed.bundle:
                self.check_update(held.bundle, signed)
        except FelixError:
            return False
        return held is not None

    def pins(self) -> dict[str, bytes]:
        """The pins of other regions, by region: as this broker believes them, else as they stand in the store."""
        held = {region: pin for region, each in self._believed.items() if (pin := each.present) is not None}
        self._encoded = {
            pin.signature: self._encoded.get(pin.signature) or pin.encode() for pin in held.values()
        }
        return self._mirror.pins() | {region: self._encoded[pin.signature] for region, pin in held.items()}

    def pins_of_all(self) -> list[SignedPin]:
        """Those by which this broker believes other regions."""
        return [pin for held in self._believed.values() if (pin := held.present) is not None]

    def remember(self, pins: Iterable[SignedPin]) -> bool:
        """Take the pins of the region's audit log that hold, oldest first; whether something else is believed now."""
        before = dict(self._believed)
        self._take_logged(pins)
        return self._believed != before

    def pin_of(self, region: str) -> SignedPin | None:
        """The pin by which this broker believes a region; None where it goes by none of a policy key of now."""
        held = self._believed.get(region)
        return None if held is None else held.present

    @property
    def withdrawn(self) -> frozenset[str]:
        """Regions whose trust an operator took back."""
        return frozenset(region for region, held in self._believed.items() if held.is_withdrawn)

    def _lagging_pins(self) -> dict[str, str]:
        """What a person has to know about regions of which the store has an earlier pin, or none any more."""
        named = self._mirror.trusted().keys() | self._pins.keys()
        return {
            region: _earlier_pin(region, self.own.region, held, self._stored_pin(region))
            for region, held in self._believed.items()
            if region in named and self._is_behind(region, held)
        }

    def _conflicting_pins(self) -> dict[str, str]:
        """What a person has to know about regions of which the store or this broker's folder has another pin that is neither earlier nor later."""
        problems = {}
        for pin in self.pins_of_all():
            region = pin.bundle.region
            for where, other in (
                ("The metadata store", self._stored_pin(region)),
                ("This broker's folder", self._in_folder.get(region)),
            ):
                if other is not None and other != pin and pin.conflicts_with(other):
                    problems[region] = _conflicting_pin(region, self.own.region, where)
                    break
        return problems

    def _read_bundles(self) -> tuple[dict[str, RegionBundle], dict[str, str]]:
        """Bundles of the regions that the store trusts; what was believed before gives way only to its own successor. And the problems of those that
        nobody compared."""
        bundles, problems = {self.own.region: self.own}, {}
        for region, data in self._mirror.trusted().items():
            if region == self.own.region:
                log.error("the metadata store holds a bundle of %s itself; it is not believed", region)
                continue
            believed = self._believed.get(region)
            if believed is not None and believed.is_withdrawn:
                continue
            held = None if believed is None else believed.bundle
            trust: RegionTrust | None = None
            try:
                signed = decode_bundle(data)
                bundle = signed.bundle
                if bundle.region != region:
                    raise RequestError(f"It is of {bundle.region}.")
                if held is None and not self._is_first_after_update:
                    problems[region] = _nobody_compared(region, self.own.region)
                    continue
                if held is not None and held != bundle and not self.is_pinned(bundle):
                    self.check_update(held, signed)
                trust = RegionTrust(bundle)
                if held is None:
                    log.warning(
                        "%s is trusted as before the update; have it pinned: felix region trust FILE", region
                    )
                held = bundle
                self._believed[region] = (
                    Believed(bundle) if believed is None else msgspec.structs.replace(believed, bundle=bundle)
                )
            except FelixError as error:
                log.error("the bundle of %s in the metadata store is not believed: %s", region, error)
            if held is not None:
                bundles[region] = held
                self._follow_logs((trust or RegionTrust(held)).logs)
        return bundles, problems

    def check_update(self, held: RegionBundle, signed: SignedBundle) -> None:
        """That this bundle may take the place of the one that is held without people comparing it. Raises RequestError, TamperError."""
        check_not_ahead(signed.bundle, self._clock_ms())
        believed = {region: each.bundle for region, each in self._believed.items()} | self.bundles
        others = (bundle for region, bundle in believed.items() if region != held.region)
        check_update(held, signed, parties_of(others, self._witnesses()))

    def check_new(self, signed: SignedBundle) -> None:
        """That none of its keys can be taken for another one of it, and no other region that is trusted here has a key of one of its
        witnesses. Raises RequestError."""
        bundle = signed.bundle
        check_bundle(signed, self.bundles.get(bundle.region))
        others = (held for region, held in self.bundles.items() if region != bundle.region)
        check_cosigner_keys(map(RegionTrust, (*others, bundle)))

    def is_pinned(self, bundle: RegionBundle) -> bool:
        """True where an operator put this very bundle into the region's folder, whatever was trusted before, and no pin is signed."""
        return not self._number_of(bundle.region) and self._pinned().get(bundle.region) == bundle

    def is_later(self, pin: SignedPin) -> bool:
        """Whether a pin, which holds, was signed after the one that this broker goes by."""
        held = self._believed.get(pin.bundle.region)
        return held is None or held.gives_way(pin)

    def policy_keys(self) -> dict[str, tuple[bytes, ...]]:
        return {region: bundle.policy_keys for region, bundle in self.bundles.items()}

    def believed_policy_keys(self) -> dict[str, tuple[bytes, ...]]:
        """Those of every region that was believed once: what it forbade then is not forgotten when its bundle is taken away."""
        believed = {region: each.bundle.policy_keys for region, each in self._believed.items()}
        return believed | self.policy_keys()

    def of(self, region: str) -> RegionTrust:
        """The signing keys of a trusted region. Raises RequestError(NOT_FOUND)."""
        bundle = self.bundles.get(region)
        if bundle is None:
            raise RequestError(f"The region {region} is not trusted here.", code=Code.NOT_FOUND)
        return RegionTrust(bundle)


def _decode(kept: bytes, own: RegionBundle) -> dict[str, Believed]:
    """What was kept; nothing where it cannot be read: then the pins and the folder count alone."""
    try:
        believed = _decoder.decode(kept) if kept else {}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.error("what was kept of the regions that were trusted cannot be read: %s", error)
        return {}
    return {
        region: msgspec.structs.replace(held, is_former=held.number > 0 and not _holds(held.pin, own))
        for region, held in believed.items()
    }


def _holds(pin: SignedPin | None, own: RegionBundle) -> bool:
    """Whether others would believe a pin that was kept: this region may have another policy key now."""
    try:
        return pin is not None and bool(decode_pin(pin.encode(), own))
    except FelixError:
        return False


def _nobody_compared(region: str, own: str) -> str:
    return (
        f"The metadata store has a bundle of {region} that nobody compared for {own}, so {region} is not trusted here. Where {own}'s policy key is: "
        f"felix region trust FILE --region {own}, with {region}'s offer or bundle.json, and its fingerprint."
    )


def _conflicting_pin(region: str, own: str, where: str) -> str:
    return (
        f"{where} has a pin of {region} with another bundle than this broker believes, and neither was compared later. Where {own}'s policy key is: "
        f"felix region trust FILE --region {own} --fingerprint …, with the bundle that {region}'s operator has now."
    )


def _earlier_pin(region: str, own: str, held: Believed, there: SignedPin | None) -> str:
    what = (
        f"The metadata store has no pin of {region}, which this broker believes by one: a broker that begins anew would not trust it."
        if there is None
        else f"The metadata store has an earlier pin of {region} than this broker believes: a broker that begins anew would go by that."
    )
    if held.present is None:
        return f"{what} Where {own}'s policy key is: felix region trust FILE --region {own} --fingerprint …."
    return f"{what} This one puts the later one back when it starts, and so does, where that was signed: felix region trust --region {own}."
