"""What an agent reads from disk: its identity and keys, the bundles of the regions that it is to reach, the policy of a quorum.

Read when it starts, and again to take what was renewed (bridge.renewal).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from audit.quorum import Quorum
from audit.trust import RegionTrust
from audit.witness_policy import WitnessPolicy
from bridge.config import BridgeConfig, BridgePaths
from felix.errors import Code, RequestError
from felix.identity import Identity
from felix.identity_file import load_identity
from felix.names import SpiffeId, trust_domain
from felix.profile import Profile
from keys.bundle import RegionBundle, decode_bundle
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


def load_files(config: BridgeConfig, paths: BridgePaths) -> AgentFiles:
    """Read and check them. Blocks. Raises RequestError with the file that is missing or wrong."""
    identity = load_identity(paths.identity)
    wanted = SpiffeId(config.source, config.mesh, "bridge", config.name)
    if identity.spiffe_id != wanted:
        raise RequestError(
            f"{paths.identity} is of {identity.spiffe_id}; this bridge is {wanted}.", code=Code.CONFIG_INVALID
        )
    bundles = {
        region: _load_bundle(path, region, config.mesh)
        for region, path in ((config.source, paths.bundle), *paths.trusted.items())
    }
    named = bool(config.egress_ml_dsa_key)
    ml_dsa_key = (
        load_ml_dsa_key(paths.egress_ml_dsa_key) if named or paths.egress_ml_dsa_key.exists() else None
    )
    return AgentFiles(
        identity, load_key_pair(paths.handoff_key), load_signing_key(paths.egress_key), ml_dsa_key, bundles
    )


def load_quorum(config: BridgeConfig, base: Path, own: RegionBundle) -> Quorum:
    """The quorum that nothing crosses without. `own`: of the region whose log it is. Blocks. Raises RequestError."""
    wanted = config.require_quorum
    assert wanted is not None
    policy = wanted.load(base)
    check_quorum(policy, own)
    return Quorum(policy, wanted.max_lag)


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


def _load_bundle(path: Path, region: str, mesh: str) -> RegionBundle:
    try:
        bundle = decode_bundle(path.read_bytes()).bundle
    except OSError as error:
        raise RequestError(
            f"The bundle of {region} cannot be read from {path}: {error.strerror or error}.",
            code=Code.NOT_FOUND,
            hint="Have that region export its bundle, and trust it with `felix region trust`.",
        ) from error
    if (bundle.region, bundle.mesh) != (region, mesh):
        raise RequestError(f"{path} is the bundle of {bundle.region}.{bundle.mesh}, not of {region}.{mesh}.")
    return bundle


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
