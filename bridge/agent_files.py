"""What an agent reads from disk: its identity and keys, the bundles of the regions that it is to reach, the policy of a quorum.

Read when it starts, and again to take what was renewed or changed (bridge.renewal).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from audit.quorum import Quorum
from audit.trust import RegionTrust
from audit.witness_config import QuorumConfig
from audit.witness_policy import WitnessPolicy
from bridge.config import BridgeConfig, BridgePaths
from bridge.pins import later_pin
from felix.errors import Code, FelixError, RequestError
from felix.files import PUBLIC, replace_file
from felix.identity import Identity
from felix.identity_file import load_identity
from felix.names import SpiffeId, trust_domain
from felix.profile import Profile
from keys.bundle import RegionBundle, SignedBundle, decode_bundle
from keys.hybrid import HybridKeyPair
from keys.key_file import load_key_pair, load_ml_dsa_key, load_signing_key
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey


class AgentFiles(NamedTuple):
    """What an agent reads from disk when it starts."""

    identity: Identity
    handoff: HybridKeyPair
    egress_key: SigningKey
    egress_ml_dsa_key: MlDsaKey | None
    bundles: dict[str, RegionBundle]
    own: SignedBundle
    """of its own region, which is among them"""
    unpinned: tuple[str, ...]
    """a sentence for each bundle's file in whose place another one counts"""


def load_files(config: BridgeConfig, paths: BridgePaths, own: SignedBundle | None = None) -> AgentFiles:
    """Read and check them. `own`: the bundle of its own region to go by, whatever the folder has. Blocks. Raises RequestError with the file that is missing or wrong."""
    identity = load_identity(paths.identity)
    wanted = SpiffeId(config.source, config.mesh, "bridge", config.name)
    if identity.spiffe_id != wanted:
        raise RequestError(
            f"{paths.identity} is of {identity.spiffe_id}; this bridge is {wanted}.", code=Code.CONFIG_INVALID
        )
    unpinned = list[str]()
    if own is None:
        own = _load_bundle(paths.bundle, config.source, config.mesh)
        held = _held_bundle(config, paths)
        if held is not None and held.bundle.issued_ms > own.bundle.issued_ms:
            own = held
            unpinned.append(
                f"{paths.bundle} is of before the bundle of {config.source} that this agent went by last, which counts: put the newest one there. "
                f"If none was newer, remove {paths.bundle_held}."
            )
    bundles = {config.source: own.bundle}
    for region, path in paths.trusted.items():
        signed = _load_bundle(path, region, config.mesh)
        pin = later_pin(path, signed, own.bundle)
        bundles[region] = signed.bundle if pin is None else pin.bundle
        if pin is not None:
            unpinned.append(
                f"{path} has another bundle of {region} than was compared last, which is pinned beside it and counts: take that one, or trust this one "
                f"where the policy key of {config.source} is (felix region trust FILE --fingerprint …)."
            )
    named = bool(config.egress_ml_dsa_key)
    ml_dsa_key = (
        load_ml_dsa_key(paths.egress_ml_dsa_key) if named or paths.egress_ml_dsa_key.exists() else None
    )
    return AgentFiles(
        identity,
        load_key_pair(paths.handoff_key),
        load_signing_key(paths.egress_key),
        ml_dsa_key,
        bundles,
        own,
        tuple(unpinned),
    )


def keep_own(paths: BridgePaths, own: SignedBundle) -> None:
    """Remember which bundle of its own region the agent goes by: none of before takes its place, as where a backup or a script puts one back. No pin stands
    beside that, and by one of before the pins of others would not hold. Blocks. Raises OSError."""
    data = own.encode()
    try:
        if paths.bundle_held.read_bytes() == data:
            return
    except FileNotFoundError:
        pass
    paths.bundle_held.parent.mkdir(parents=True, exist_ok=True)
    replace_file(paths.bundle_held, data, PUBLIC)


def _held_bundle(config: BridgeConfig, paths: BridgePaths) -> SignedBundle | None:
    """What the agent went by last; None where nothing says that."""
    try:
        return _load_bundle(paths.bundle_held, config.source, config.mesh)
    except FelixError:
        return None


def load_quorum(config: BridgeConfig, base: Path, own: RegionBundle) -> Quorum:
    """The quorum that nothing crosses without. `own`: of the region whose log it is. Blocks. Raises RequestError."""
    wanted = config.require_quorum
    assert wanted is not None
    return Quorum(load_policy(wanted, base, own), wanted.max_lag)


def load_policy(wanted: QuorumConfig, base: Path, own: RegionBundle) -> WitnessPolicy:
    """Its policy, as the file has it now. Blocks. Raises RequestError."""
    policy = wanted.load(base)
    check_quorum(policy, own)
    return policy


def check_quorum(policy: WitnessPolicy, own: RegionBundle) -> None:
    """That no witness of the policy is the own region's, by its name or by any key of the region. Raises RequestError."""
    domain, held = f"{trust_domain(own.region, own.mesh)}/", RegionTrust(own).public_keys
    for key in policy.witness_keys:
        if key.name.startswith(domain) or key.public in held:
            told = "a witness" if key.name.startswith(domain) else "whose key is one"
            raise RequestError(
                f"The policy of require_quorum names {key.name}, {told} of the region whose log it is.",
                code=Code.CONFIG_INVALID,
                hint="A region does not vouch for itself; name other regions' witnesses, or outside ones.",
            )


def _load_bundle(path: Path, region: str, mesh: str) -> SignedBundle:
    try:
        signed = decode_bundle(path.read_bytes())
    except OSError as error:
        raise RequestError(
            f"The bundle of {region} cannot be read from {path}: {error.strerror or error}.",
            code=Code.NOT_FOUND,
            hint="Have that region export its bundle, and trust it with `felix region trust`.",
        ) from error
    bundle = signed.bundle
    if (bundle.region, bundle.mesh) != (region, mesh):
        raise RequestError(f"{path} is the bundle of {bundle.region}.{bundle.mesh}, not of {region}.{mesh}.")
    return signed


def region_profile(
    bundle: RegionBundle, addresses: tuple[str, ...], server_name: str, identity: Identity, engine: str
) -> Profile:
    """How a region of this bundle is reached."""
    return Profile(
        region=bundle.region,
        mesh=bundle.mesh,
        addresses=addresses,
        authority=bundle.root_pem.encode(),
        identity=identity,
        server_name=server_name,
        engine=engine,
    )
