"""Bundles in a region's folder: its own, and those of other regions that an operator trusts, their fingerprints compared."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterable
from pathlib import Path

from felix.errors import Code, FelixError, RequestError
from felix.files import PUBLIC, replace_file
from keys.bundle import RegionBundle, SignedBundle, decode_bundle
from keys.pin import SignedPin, continues, decode_pin, parse_pin, pin_over, read_unverified
from region.config import RegionConfig
from region.folder import RegionFolder
from region.metadata.catalog import Catalog
from region.metadata.mirror import CatalogMirror

log = logging.getLogger("felix.region.trusted_bundles")


def own_bundle(folder: RegionFolder, config: RegionConfig) -> RegionBundle:
    """The region's own bundle, from its folder. Blocks. Raises RequestError where it is not there, or of another region."""
    bundle = decode_bundle(_read(folder.bundle)).bundle
    if (bundle.region, bundle.mesh) != (config.region, config.mesh):
        raise RequestError(
            f"{folder.config} is for {config.region}.{config.mesh}, and {folder.bundle} for "
            f"{bundle.region}.{bundle.mesh}.",
            code=Code.WRONG_REGION,
            hint="Each region has a state folder of its own.",
        )
    return bundle


def trusted_files(folder: RegionFolder) -> list[SignedBundle]:
    """Other regions' bundles in the folder, as they were signed. Blocks. Raises RequestError, which names the file."""
    return [_read_bundle(path) for path in sorted(folder.trusted.glob("*.json"))]


def _read_bundle(path: Path) -> SignedBundle:
    """Raises RequestError, which names the file."""
    try:
        return decode_bundle(_read(path))
    except FelixError as error:
        raise RequestError(
            f"{path} is no bundle that can be trusted: {error.sentence}",
            code=error.code,
            hint="Take the file out of the folder, and trust that region's current bundle: felix region trust FILE.",
        ) from error


def pinned_bundles(folder: RegionFolder) -> dict[str, RegionBundle]:
    """Other regions' bundles as an operator compared and put them into the folder, without those whose trust was taken back. A file that was put back from a backup does not count over the pin
    beside it, as at brokers and agents (`keys.pin.pin_over`). Blocks."""
    return {name: bundle for name, bundle in _bundles(folder).items() if not is_withdrawn(folder, name)}


def former_bundles(folder: RegionFolder) -> dict[str, RegionBundle]:
    """Bundles of regions whose trust was taken back: what they signed until then verifies by them, and nothing else is done by them. Blocks."""
    return {name: bundle for name, bundle in _bundles(folder).items() if is_withdrawn(folder, name)}


def trusted_file(folder: RegionFolder, region: str) -> Path:
    """Where the folder has another region's bundle. Raises RequestError(NOT_FOUND) where it has none."""
    path = folder.trusted / f"{region}.json"
    if not path.exists():
        raise RequestError(
            f"{folder.root.name} trusts no region {region}: there is no {path}.",
            code=Code.NOT_FOUND,
            hint=f"Where its brokers trust it: felix region trust --region {folder.root.name} takes what they go by into this folder.",
        )
    return path


def _bundles(folder: RegionFolder) -> dict[str, RegionBundle]:
    files = {signed.bundle.region: signed for signed in trusted_files(folder)}
    if not files or not folder.bundle.exists():
        return {region: signed.bundle for region, signed in files.items()}
    own, found = decode_bundle(_read(folder.bundle)).bundle, dict[str, RegionBundle]()
    for region, signed in files.items():
        path = folder.pin(region)
        pin = pin_over(_read(path), signed, own) if path.exists() else None
        found[region] = signed.bundle if pin is None else pin.bundle
    return found


def is_withdrawn(folder: RegionFolder, region: str) -> bool:
    """Whether the folder's pin of a region says that it is not trusted any more, also where this region has changed its policy key since. Blocks."""
    pin = _parse_file(folder.pin(region))
    return pin is not None and pin.is_withdrawn


def signed_pins(folder: RegionFolder, own: RegionBundle) -> list[SignedPin]:
    """The signed pins in the folder that hold. Blocks."""
    found = (read_pin(folder, own, region) for region in _bundles(folder))
    return [pin for pin in found if pin is not None]


def _parse_file(path: Path) -> SignedPin | None:
    """A pin of this folder, whoever signed it; None where there is none that can be read."""
    try:
        return read_unverified(_read(path)) if path.exists() else None
    except FelixError:
        return None


def read_pin(folder: RegionFolder, own: RegionBundle, region: str) -> SignedPin | None:
    """The signed pin of a region in the folder; None where there is none that holds. Blocks."""
    path = folder.pin(region)
    try:
        return decode_pin(_read(path), own) if path.exists() else None
    except FelixError as error:
        log.error("%s is not believed: %s", path, error)
        return None


def is_pinned_before(folder: RegionFolder, own: RegionBundle, region: str) -> bool:
    """Whether the folder has no pin of a region under a policy key that this one has now, after it changed its own, so that people have to compare
    again: the pin is under another one, or was never here. Blocks."""
    path = folder.pin(region)
    try:
        pin = parse_pin(_read(path), own.region, own.mesh) if path.exists() else None
    except FelixError:
        pin = None
    if pin is None:
        return any(former.policy_keys for former in own.former)
    # A bundle need not name all keys that were given up (--drop-earliest).
    return not pin.holds_under(own.policy_keys)


def keep_pin(folder: RegionFolder, pin: SignedPin) -> None:
    """Store a pin that was signed elsewhere, and its bundle, unless what may follow that is there. Blocks."""
    path = folder.trusted / f"{pin.bundle.region}.json"
    if not _is_followed(pin.bundle, path.read_bytes() if path.exists() else None):
        replace_file(path, pin.pin.bundle.encode(), PUBLIC)
    replace_file(folder.pin(pin.bundle.region), pin.encode(), PUBLIC)


async def offer_bundles(
    pins: Iterable[SignedPin], bundles: Iterable[SignedBundle], catalog: Catalog, mirror: CatalogMirror
) -> None:
    """Put into the catalog what it does not know yet, or not any more: `pins` that it lacks, never an earlier one than this broker goes by; and `bundles`,
    which this broker believes, where the catalog's are older."""
    for pin in pins:
        log.info("pinning %s: the metadata store has no pin of it, or an earlier one", pin.bundle.region)
        await _offer(put_pin(pin, catalog, mirror), mirror)
    for signed in bundles:
        region = signed.bundle.region
        if _is_newer(signed.bundle, mirror.trusted().get(region)):
            log.info("trusting %s, from the region's folder", region)
            put = catalog.put_trusted(region, signed.encode(), revision=mirror.trusted_revision(region))
            await _offer(put, mirror)


async def _offer(put: Coroutine[None, None, int], mirror: CatalogMirror) -> None:
    try:
        await mirror.wait_for(await put)
    except RequestError as error:
        if error.code not in (Code.CONFLICT, Code.ALREADY_EXISTS):
            raise
        # What the store has then is judged as it comes.
        log.info("another broker was first: %s", error.sentence)


async def put_pin(pin: SignedPin, catalog: Catalog, mirror: CatalogMirror) -> int:
    """Put a verified pin into the catalog, then its bundle, unless a successor that needs no comparing stands there; of one that ends the trust, take
    the bundle out. Returns the revision that has both. Raises RequestError(CONFLICT)."""
    region, held = pin.bundle.region, mirror.trusted()
    revision = await catalog.put_pin(region, pin.encode(), revision=mirror.pin_revision(region))
    if pin.is_withdrawn:
        # Brokers of an earlier release cannot read the pin, and trust nobody whose bundle is not there.
        await catalog.delete_trusted(region)
        return revision
    if not _is_followed(pin.bundle, held.get(region)):
        bundle = pin.pin.bundle.encode()
        revision = await catalog.put_trusted(region, bundle, revision=mirror.trusted_revision(region))
    return revision


def number_of(data: bytes | None, own: RegionBundle) -> int:
    """Of the pin that the store holds; 0 where none holds."""
    try:
        return 0 if data is None else decode_pin(data, own).pin.number
    except FelixError:
        return 0


def _is_followed(bundle: RegionBundle, held: bytes | None) -> bool:
    """Whether what is held is this bundle, or what may follow it."""
    try:
        return held is not None and continues(bundle, decode_bundle(held))
    except FelixError:
        return False


def _is_newer(bundle: RegionBundle, held: bytes | None) -> bool:
    """Whether to write this bundle to the store. An unreadable bundle in the store does not prevent it."""
    try:
        return held is None or bundle.issued_ms > decode_bundle(held).bundle.issued_ms
    except FelixError:
        return True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {error.strerror or error}.",
            code=Code.NOT_FOUND,
            hint="Make the region first: felix region init NAME --mesh MESH.",
        ) from error
