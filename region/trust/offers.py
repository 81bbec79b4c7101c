"""The offer that a region makes, and those of other regions that it keeps beside their trusted bundles. Blocks on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from felix.address import Address
from felix.errors import Code, FelixError, RequestError
from felix.files import PUBLIC, replace_file
from felix.profile import load_profile, parse_address
from keys.bundle import decode_bundle
from keys.key_file import load_signing_key
from keys.offer import RegionOffer, SignedOffer, decode_offer, sign_offer
from region.config import RegionConfig
from region.folder import RegionFolder


def make_offer(
    folder: RegionFolder, config: RegionConfig, addresses: Sequence[str], contact: str, now_ms: int
) -> SignedOffer:
    """The region's offer as of now. `addresses`: how it is reached from elsewhere; empty: where its broker listens.
    `contact`: whom to ask; empty: as the configuration says.

    Raises RequestError(CONFIG_INVALID) where the broker listens at every address of its machine, which says none.
    """
    return sign_offer(
        RegionOffer(
            issued_ms=now_ms,
            addresses=tuple(str(parse_address(address)) for address in addresses)
            or _listening(folder, config),
            entity=config.entity,
            contact=contact or config.contact,
            bundle=decode_bundle(folder.bundle.read_bytes()),
        ),
        load_signing_key(folder.policy_key),
    )


def _listening(folder: RegionFolder, config: RegionConfig) -> tuple[str, ...]:
    if config.cluster is not None and not any(
        _is_everywhere(each.client_address) for each in config.cluster.brokers
    ):
        # Each leads some of the streams: another region's bridges go to each of them, and to no other address.
        return tuple(str(each.client_address) for each in config.cluster.brokers)
    if _is_everywhere(config.listen):
        raise RequestError(
            f"{config.region} listens at {config.listen}: that is every address of its machine, and says none.",
            code=Code.CONFIG_INVALID,
            hint=f"Say how others reach it: --address {config.region}.example.org:{config.listen.port or 7443}.",
        )
    # Where the port is any free one, the broker writes into the profile which it took.
    return (
        load_profile(config.region, home=folder.root.parent).addresses
        if not config.listen.port
        else (str(config.listen),)
    )


def _is_everywhere(address: Address) -> bool:
    try:
        return ip_address(address.host).is_unspecified
    except ValueError:
        return False


def is_of_this_machine(address: Address) -> bool:
    """Whether nobody on another machine can reach it."""
    try:
        return ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


def keep_offer(folder: RegionFolder, signed: SignedOffer) -> None:
    """Keep another region's offer, in place of an earlier one."""
    path = folder.offer(signed.offer.bundle.bundle.region)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    replace_file(path, signed.encode(), PUBLIC)


def kept_offer(folder: RegionFolder, region: str) -> RegionOffer | None:
    """What another region said of itself; None where nothing is kept that a policy key signed that is trusted now."""
    try:
        trusted = decode_bundle((folder.trusted / f"{region}.json").read_bytes()).bundle
        signed = decode_offer(folder.offer(region).read_bytes())
    except (OSError, FelixError):
        return None
    return signed.offer if signed.is_by(trusted) else None
