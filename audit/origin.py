"""Origins: what the audit logs and witnesses of a region are called, and their keys as its bundle gives them. Pure."""

from __future__ import annotations

from audit.note import Algorithm, VerifierKey
from felix.errors import Code, RequestError
from felix.names import trust_domain
from keys.bundle import RegionBundle
from keys.signing import VerifyKey


def region_origin(region: str, mesh: str) -> str:
    """The log that a region's brokers keep: ingress, denials, grants, policies, keys."""
    return f"{trust_domain(region, mesh)}/audit"


def egress_origin(region: str, mesh: str, bridge: str) -> str:
    """The egress log of one bridge of the region."""
    return f"{trust_domain(region, mesh)}/bridge/{bridge}"


def witness_name(region: str, mesh: str) -> str:
    """The name in the region's cosignatures."""
    return f"{trust_domain(region, mesh)}/witness"


def log_keys(bundle: RegionBundle) -> list[VerifierKey]:
    """The keys of every log of the region, a log's Ed25519 key before its ML-DSA-44 one."""
    return _keys(bundle, "log", Algorithm.ED25519)


def log_key(bundle: RegionBundle, origin: str) -> tuple[VerifierKey, ...]:
    """The keys of one of the region's logs. Raises RequestError(NOT_FOUND)."""
    found = tuple(key for key in log_keys(bundle) if key.name == origin)
    if not found:
        raise RequestError(
            f"The bundle of {bundle.region} names no key for the audit log {origin!r}.",
            code=Code.NOT_FOUND,
            hint="Take the region's newest bundle; it names the logs of all its bridges.",
        )
    return found


def witness_keys(bundle: RegionBundle) -> list[VerifierKey]:
    """The keys under which the region cosigns."""
    return _keys(bundle, "cosigner", Algorithm.COSIGNATURE)


def _keys(bundle: RegionBundle, role: str, ed25519: Algorithm) -> list[VerifierKey]:
    found = [
        VerifierKey(key.name, ed25519 if key.algorithm == "ed25519" else Algorithm.ML_DSA_44, key.public)
        for key in bundle.audit_keys
        if key.role == role
    ]
    return sorted(found, key=lambda key: key.algorithm.is_post_quantum)


def receipt_keys(bundle: RegionBundle) -> dict[bytes, bytes]:
    """The region's receipt keys by key id, as audit.receipt asks for them."""
    return {VerifyKey(public).key_id: public for public in bundle.receipt_keys}
