"""This machine's information about another region: its addresses, and the entity that runs it."""

from __future__ import annotations

from cli.setting import known_regions
from felix.errors import Code, RequestError
from felix.profile import load_profile
from region.folder import RegionFolder


def addresses_of(folder: RegionFolder, region: str) -> tuple[str, ...]:
    """Where another region is reached: as its profile on this machine says, else as its offer does. Raises
    RequestError(NOT_FOUND) where neither is there, with what is missing."""
    from region.trust.offers import kept_offer

    if region in known_regions():
        return load_profile(region).addresses
    offer = kept_offer(folder, region)
    if offer is not None:
        return offer.addresses
    here = folder.root.name
    trusted = (folder.trusted / f"{region}.json").exists()
    known = (
        f"{here} trusts {region}, but was not told where it is"
        if trusted
        else f"{here} does not know {region} yet"
    )
    raise RequestError(
        f"{known}.",
        code=Code.NOT_FOUND,
        hint=f"Have its operator send you the file of `felix region offer`, and take it: felix region trust {region}.offer.",
    )


def entity_of(folder: RegionFolder, region: str) -> str:
    """The legal entity that runs another region, as its offer, or its configuration on this machine, says; else empty."""
    from region.config import load_config
    from region.trust.offers import kept_offer

    offer = kept_offer(folder, region)
    if offer is not None and offer.entity:
        return offer.entity
    return load_config(RegionFolder.of(region).config).entity if region in known_regions() else ""
