"""The regions that this one trusts now, by their bundles in the metadata store, and those that it believed once.

Invariants: a bundle gives way only to one that its own policy key signed, or to one that an operator put into the region's folder; the
region's own is never read from the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from audit.note import VerifierKey
from audit.trust import RegionTrust, check_cosigner_keys, parties_of, witnesses_of
from felix.errors import Code, FelixError, RequestError
from felix.peer import TrustBundle
from keys.bundle import RegionBundle, SignedBundle, check_bundle, check_update, decode_bundle
from region.metadata.mirror import CatalogMirror

log = logging.getLogger("felix.region.governance")


class TrustedRegions:
    """One per broker. Made from what the region's folder holds; `read` takes in what the store trusts."""

    def __init__(
        self,
        own: RegionBundle,
        mirror: CatalogMirror,
        pinned: Callable[[], Mapping[str, RegionBundle]],
        follow_logs: Callable[[Iterable[VerifierKey]], None],
        witnesses: Callable[[], Iterable[VerifierKey]] = tuple,
    ) -> None:
        """`pinned` reads other regions' bundles that an operator put into this region's folder, their fingerprints compared.
        `follow_logs` is told the audit logs of each region that is trusted. `witnesses`: all that cosign this region's log, outside ones
        among them."""
        self.own = own
        self.bundles: dict[str, RegionBundle] = {own.region: own}
        """this region's and those it trusts, by region"""
        self.trust = TrustBundle()
        """of these bundles, once the catalog was read"""
        self._mirror = mirror
        self._pinned = pinned
        self._believed = dict(pinned())
        self._follow_logs = follow_logs
        self._witnesses = witnesses

    def read(self) -> None:
        """Take in the bundles that the store holds now."""
        self.bundles = self._read_bundles()
        self.trust = TrustBundle(bundle.anchor() for bundle in self.bundles.values())

    def witnesses(self) -> Iterable[VerifierKey]:
        """Those that cosign this region's log."""
        return witnesses_of(self.bundles.values(), self.own.region)

    def _read_bundles(self) -> dict[str, RegionBundle]:
        """Bundles of the regions that the store trusts; what was believed before gives way only to its own successor."""
        bundles = {self.own.region: self.own}
        for region, data in self._mirror.trusted().items():
            if region == self.own.region:
                log.error("the metadata store holds a bundle of %s itself; it is not believed", region)
                continue
            held = self._believed.get(region)
            try:
                signed = decode_bundle(data)
                bundle = signed.bundle
                if bundle.region != region:
                    raise RequestError(f"It is of {bundle.region}.")
                if held is not None and held != bundle and not self.is_pinned(bundle):
                    self.check_update(held, signed)
                logs = RegionTrust(bundle).logs
                held = self._believed[region] = bundle
                self._follow_logs(logs)
            except FelixError as error:
                log.error("the bundle of %s in the metadata store is not believed: %s", region, error)
            if held is not None:
                bundles[region] = held
        return bundles

    def check_update(self, held: RegionBundle, signed: SignedBundle) -> None:
        """That this bundle may take the place of the one that is held without people comparing it. Raises RequestError, TamperError."""
        believed = {**self._believed, **self.bundles}
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
        """True where an operator put this very bundle into the region's folder, whatever was trusted before."""
        return self._pinned().get(bundle.region) == bundle

    def policy_keys(self) -> dict[str, tuple[bytes, ...]]:
        return {region: bundle.policy_keys for region, bundle in self.bundles.items()}

    def believed_policy_keys(self) -> dict[str, tuple[bytes, ...]]:
        """Those of every region that was believed once: what it forbade then is not forgotten when its bundle is taken away."""
        believed = {region: bundle.policy_keys for region, bundle in self._believed.items()}
        return believed | self.policy_keys()

    def of(self, region: str) -> RegionTrust:
        """The signing keys of a trusted region. Raises RequestError(NOT_FOUND)."""
        bundle = self.bundles.get(region)
        if bundle is None:
            raise RequestError(f"The region {region} is not trusted here.", code=Code.NOT_FOUND)
        return RegionTrust(bundle)
