"""Pins: whose bundles the agent's own region goes by, as its operator compared and signed them on whichever machine.

The region's brokers list them; the agent takes those that hold by the region's own bundle, and are later than what its machine has, into the folder
where `felix region trust` would put them. So no pin gives way to an earlier one here either, whatever a broker lists, also over a restart, and where the bundle's file beside it is put back. Where the folder cannot be written to, they count until the agent ends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from felix.connection import RegionConnection
from felix.errors import FelixError
from felix.files import PUBLIC, replace_file
from felix.page import document_pages
from keys.bundle import RegionBundle, SignedBundle, decode_bundle
from keys.pin import SignedPin, continues, decode_pin, decode_pins, pin_over

log = logging.getLogger("felix.bridge.pins")

PINS_MAX: Final = 1_000
"""Regions that a broker lists pins of, and that are looked at."""


async def list_pins(connection: RegionConnection) -> dict[str, bytes]:
    """What a broker of the agent's own region lists, by region; nothing is verified yet. Raises what it is refused with, UnavailableError."""
    found: dict[str, bytes] = {}
    async for page in document_pages(connection, "pin"):
        found |= page.documents
        if len(found) >= PINS_MAX:
            break
    return found


class Pins:
    """One agent's."""

    def __init__(self, trusted: Mapping[str, Path]) -> None:
        """`trusted`: the file with each destination's bundle."""
        self._trusted = trusted
        self._unkept: dict[str, SignedPin] = {}
        """what is newer than the folder, which cannot be written to"""
        self._told: set[bytes] = set()
        """signatures of pins that conflict with what the machine has"""

    def take(self, found: Mapping[str, bytes], own: RegionBundle) -> bool:
        """Take in what a broker listed; whether there was something later. Blocks."""
        taken = False
        for region, pin in decode_pins(
            {name: found[name] for name in self._trusted if name in found}, own
        ).items():
            held = self._held(region, own)
            if held is not None and held.is_at_least(pin):
                self._tell_conflict(region, held, pin)
                continue
            if pin.is_withdrawn:
                log.warning(
                    "%s does not trust %s any more: nothing crosses; take it out of this bridge's destinations",
                    own.region,
                    region,
                )
            else:
                log.info("%s is trusted as %s compared it last", region, own.region)
            try:
                _keep(pin, self._trusted[region])
            except OSError as error:
                log.warning(
                    "the pin of %s cannot be kept in %s: %s", region, self._trusted[region].parent, error
                )
                self._unkept[region] = pin
            else:
                self._unkept.pop(region, None)
            taken = True
        return taken

    def _tell_conflict(self, region: str, held: SignedPin, pin: SignedPin) -> None:
        """Once for each pin: the agent goes on with what its machine has."""
        if held == pin or pin.signature in self._told or not held.conflicts_with(pin):
            return
        self._told.add(pin.signature)
        log.error(
            "the brokers have a pin of %s with another bundle than this machine, and neither was compared later. Where the policy key of %s is: "
            "felix region trust FILE --fingerprint …",
            region,
            pin.pin.by,
        )

    def newest(self, region: str, bundle: RegionBundle) -> RegionBundle:
        """The bundle to go by, where the region's file has this one."""
        pin = self._unkept.get(region)
        return bundle if pin is None else pin.bundle

    def _held(self, region: str, own: RegionBundle) -> SignedPin | None:
        if region in self._unkept:
            return self._unkept[region]
        return _read(self._trusted[region], own)


def later_pin(path: Path, signed: SignedBundle, own: RegionBundle) -> SignedPin | None:
    """The pin beside the file at `path`, where that counts and not `signed`, which the file has (`keys.pin.pin_over`), whoever put the file back (from a backup, or by a script that
    copies it at each start) or changed it. Blocks. It writes nothing: `felix region trust` may be about to."""
    try:
        return pin_over(_beside(path).read_bytes(), signed, own)
    except OSError:
        return None


def _read(path: Path, own: RegionBundle) -> SignedPin | None:
    """The pin beside a bundle's file; None where none holds."""
    try:
        return decode_pin(_beside(path).read_bytes(), own)
    except (OSError, FelixError):
        return None


def _beside(path: Path) -> Path:
    return path.with_suffix(".pin")


def _keep(pin: SignedPin, path: Path) -> None:
    if not _is_followed(pin.bundle, path):
        replace_file(path, pin.pin.bundle.encode(), PUBLIC)
    replace_file(_beside(path), pin.encode(), PUBLIC)


def _is_followed(bundle: RegionBundle, path: Path) -> bool:
    """Whether the file has this bundle, or what may follow it without comparing."""
    try:
        return continues(bundle, decode_bundle(path.read_bytes()))
    except (OSError, FelixError):
        return False
