"""The regions that this one trusts now, by their bundles in the metadata store, and those that it believed once.

Whose bundle a region is by, people compare; what stands in the store is believed only by one of these, the later before the earlier:
1. a pin in the store that this region's own policy key signed (keys.pin): every broker of the region believes the same;
2. without one, a bundle that an operator put into this broker's folder;
3. what this broker believed before its restart.

Invariants: a bundle gives way only to a later pin, to one that an operator put into the folder of a region without a signed pin, or to its own successor
(keys.bundle.check_update); no pin gives way to an earlier one, also over a restart (region.trust_store); the region's own bundle is never read
from the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Final

import msgspec

from audit.note import VerifierKey
from audit.trust import RegionTrust, check_cosigner_keys, parties_of, witnesses_of
from felix.errors import Code, FelixError, RequestError
from felix.peer import TrustBundle
from keys.bundle import RegionBundle, SignedBundle, check_bundle, check_update, decode_bundle
from keys.pin import SignedPin, decode_pin
from region.metadata.mirror import CatalogMirror
from region.trust_store import Memory

log = logging.getLogger("felix.region.governance")


class Believed(msgspec.Struct, frozen=True):
    """The bundle of a region that this broker goes by. `number`: of the signed pin that it rests on; 0 without one."""

    bundle: RegionBundle
    number: Annotated[int, msgspec.Meta(ge=0)] = 0


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
    ) -> None:
        """`pinned` reads other regions' bundles that an operator put into this region's folder, their fingerprints compared.
        `follow_logs` is told the audit logs of each region that is trusted. `memory` keeps what is believed, `kept` is what it kept before: None
        where a release has served here that kept nothing, whose belief is taken over once. `witnesses`: all that cosign this region's log, outside ones
        among them. `signed`: the pins in this region's folder."""
        self.own = own
        self.bundles: dict[str, RegionBundle] = {own.region: own}
        """this region's and those it trusts, by region"""
        self.trust = TrustBundle()
        """of these bundles, once the catalog was read"""
        self.problems: dict[str, str] = {}
        """what a person has to do about regions that the store names and nobody compared, by region"""
        self._mirror = mirror
        self._pinned = pinned
        self._memory = memory
        self._is_first_after_update = kept is None
        self._kept = _decode(kept or b"")
        self._believed = dict(self._kept)
        for region, bundle in pinned().items():
            if not self._number_of(region):
                self._believed[region] = Believed(bundle)
        for pin in signed:
            # In this broker's own folder: the store may have an earlier one.
            if self.is_later(pin):
                self._believed[pin.bundle.region] = Believed(pin.bundle, pin.pin.number)
        self._pins: dict[str, bytes] = {}
        """those that were read, as they stand in the store"""
        self._follow_logs = follow_logs
        self._witnesses = witnesses

    def read(self) -> None:
        """Take in the pins and bundles that the store holds now."""
        self._read_pins()
        self.bundles = self._read_bundles()
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
        for region, data in self._mirror.pins().items():
            if self._pins.get(region) == data:
                continue
            self._pins[region] = data
            try:
                pin = decode_pin(data, self.own)
                if pin.bundle.region != region:
                    raise RequestError(f"It is of {pin.bundle.region}.")
                RegionTrust(pin.bundle)
            except FelixError as error:
                log.error("the pin of %s in the metadata store is not believed: %s", region, error)
                continue
            if self.is_later(pin):
                self._believed[region] = Believed(pin.bundle, pin.pin.number)
            elif pin.pin.number < self._number_of(region):
                log.error(
                    "the metadata store holds an earlier pin of %s than before; it changes nothing", region
                )

    def _read_bundles(self) -> dict[str, RegionBundle]:
        """Bundles of the regions that the store trusts; what was believed before gives way only to its own successor."""
        bundles, problems = {self.own.region: self.own}, {}
        for region, data in self._mirror.trusted().items():
            if region == self.own.region:
                log.error("the metadata store holds a bundle of %s itself; it is not believed", region)
                continue
            believed = self._believed.get(region)
            held = None if believed is None else believed.bundle
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
                RegionTrust(bundle)
                if held is None:
                    log.warning(
                        "%s is trusted as before the update; have it pinned: felix region trust FILE", region
                    )
                held = bundle
                self._believed[region] = Believed(bundle, self._number_of(region))
            except FelixError as error:
                log.error("the bundle of %s in the metadata store is not believed: %s", region, error)
            if held is not None:
                bundles[region] = held
                self._follow_logs(RegionTrust(held).logs)
        for region, problem in problems.items():
            if region not in self.problems:
                log.error("%s", problem)
        self.problems = problems
        return bundles

    def check_update(self, held: RegionBundle, signed: SignedBundle) -> None:
        """That this bundle may take the place of the one that is held without people comparing it. Raises RequestError, TamperError."""
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
        return pin.pin.number > self._number_of(pin.bundle.region)

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


def _decode(kept: bytes) -> dict[str, Believed]:
    """What was kept; nothing where it cannot be read: then the pins and the folder count alone."""
    try:
        return _decoder.decode(kept) if kept else {}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.error("what was kept of the regions that were trusted cannot be read: %s", error)
        return {}


def _nobody_compared(region: str, own: str) -> str:
    return (
        f"The metadata store has a bundle of {region} that nobody compared for {own}, so {region} is not trusted here. Where {own}'s policy key is: "
        f"felix region trust FILE --region {own}, with {region}'s offer or bundle.json, and its fingerprint."
    )
