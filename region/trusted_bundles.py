"""Bundles in a region's folder: its own, and those of other regions that an operator trusts, their fingerprints compared."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from felix.errors import Code, FelixError, RequestError
from keys.bundle import RegionBundle, SignedBundle, decode_bundle
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


def _trusted_files(folder: RegionFolder) -> list[tuple[Path, SignedBundle]]:
    return [(path, _read_bundle(path)) for path in sorted(folder.trusted.glob("*.json"))]


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
    """Other regions' bundles as an operator put them into the folder. Blocks."""
    return {signed.bundle.region: signed.bundle for _, signed in _trusted_files(folder)}


async def offer_bundles(folder: RegionFolder, catalog: Catalog, mirror: CatalogMirror) -> None:
    """Put into the catalog what it does not know yet: what was trusted while no broker ran."""
    for path, signed in await asyncio.to_thread(_trusted_files, folder):
        region = signed.bundle.region
        if not _is_newer(signed.bundle, mirror.trusted().get(region)):
            continue
        log.info("trusting %s, from %s", region, path)
        revision = await catalog.put_trusted(
            region, signed.encode(), revision=mirror.trusted_revision(region)
        )
        await mirror.wait_for(revision)


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
