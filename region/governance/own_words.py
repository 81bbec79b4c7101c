"""Words that this region signed under policy keys that it has no more: which of them count as accepted by their leaf. Pure.

The bundle says where a former key ended in the region's own audit log. A leaf behind that was written by a broker that had not heard of the change, or for whoever
has the key: it shows nothing. A key that the bundle does not name at all has no end; its words are taken as they were.
"""

from __future__ import annotations

from audit.origin import region_origin
from keys.bundle import RegionBundle
from policy.signed import SignedDocument, key_id


class OwnWords:
    """One per broker. `own`: the region's bundle, as this broker began with it."""

    def __init__(self, own: RegionBundle) -> None:
        self._region = own.region
        self._now = frozenset(map(key_id, own.policy_keys))
        log = region_origin(own.region, own.mesh)
        self._ends = {
            key_id(public): 0 if (end := former.end_in(log)) is None else end.size
            for former in own.former
            for public in former.policy_keys
        }

    def is_former(self, document: SignedDocument) -> bool:
        """Whether it is this region's word under a key that it has no more."""
        return document.region == self._region and document.key not in self._now

    def counts_by_leaf(self, document: SignedDocument, leaf: int | None) -> bool:
        """Whether its leaf, of this index (None: it is not known which), shows that it was accepted."""
        if not self.is_former(document) or (end := self._ends.get(document.key)) is None:
            return True
        return leaf is not None and leaf < end
