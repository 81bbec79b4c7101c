"""Changing the key with which a region cosigns other regions' logs. Blocks on the disk.

What the witness remembers of each log goes on: it is bound to no key, so under the new one nothing is cosigned that the old one's checkpoints do not lead to. The bundle names the
new keys in place of the old ones: a witness's key has no end, since a cosignature says nothing of what the witness has cosigned besides; what it counted for, the new key's next
cosignature of the same log does. Keys of both algorithms are changed at once: a thief who could read one file could read the other.

Order, so that a crash at any step leaves a region that goes on after the next call: 1. the new keys are written beside the old ones; 2. the bundle names them; 3. they take the old
ones' place. Callers: cli.region, region.governance.
"""

from __future__ import annotations

import msgspec

from audit.note import VerifierKey
from audit.origin import witness_name
from audit.trust import RegionTrust
from felix.files import PUBLIC, replace_file
from keys.bundle import AuditKey, RegionBundle, SignedBundle, decode_bundle, sign_bundle
from keys.key_file import load_signing_key, save_ml_dsa_key, save_signing_key
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey
from region.config import RegionConfig
from region.folder import RegionFolder
from region.trust.begun_change import changes_bundle, new_path, put_in_place, require_none_begun


@changes_bundle
def change_witness_key(folder: RegionFolder, config: RegionConfig, now_ms: int) -> SignedBundle:
    """Give the region's witness new keys; brokers cosign with them from their next start on. The bundle that names them; that of a call that was cut off, where there was one.
    Raises RequestError where the bundle has no room, or a change of signing keys was cut off (CONFLICT)."""
    signed = decode_bundle(folder.bundle.read_bytes())
    bundle = signed.bundle
    places = (folder.witness_ml_dsa_key, folder.witness_key)
    if not _begun(bundle, folder):
        require_none_begun(folder, bundle)
        name = witness_name(config.region, config.mesh)
        new, new_ml_dsa = SigningKey.generate(), MlDsaKey.generate()
        kept = (key for key in bundle.audit_keys if key.role != "cosigner")
        changed = msgspec.structs.replace(
            bundle,
            issued_ms=max(now_ms, bundle.issued_ms + 1),
            audit_keys=(
                *kept,
                AuditKey(name, "cosigner", new.verify_key.public),
                AuditKey(name, "cosigner", new_ml_dsa.public, "ml-dsa-44"),
            ),
        )
        signed = sign_bundle(changed, load_signing_key(folder.policy_key))
        for path in places:
            # Of a call that did not come as far as the bundle: nobody knows them.
            new_path(path).unlink(missing_ok=True)
        save_signing_key(new, new_path(folder.witness_key))
        save_ml_dsa_key(new_ml_dsa, new_path(folder.witness_ml_dsa_key))
        replace_file(folder.bundle, signed.encode(), PUBLIC)
    put_in_place(places)
    return signed


def unnamed(own: RegionBundle, key: VerifierKey) -> str:
    """A sentence where a broker cosigns with a key that its region's bundle does not name; else nothing."""
    if any(each.public == key.public for each in RegionTrust(own).witnesses):
        return ""
    return (
        f"The witness key with which this broker cosigns is none that the bundle of {own.region} in this folder names, so its cosignatures count nowhere. Put witness.pem, witness.mldsa.pem and "
        "bundle.json of one and the same time into the region's folder, the newest, and start the broker again; where a change was cut off, run felix region change-witness-key again first."
    )


def _begun(bundle: RegionBundle, folder: RegionFolder) -> bool:
    """Whether the bundle names new keys already that do not lie in place yet. The Ed25519 key is put in place last."""
    path = new_path(folder.witness_key)
    return path.exists() and load_signing_key(path).verify_key.public in {
        key.public for key in bundle.audit_keys if key.role == "cosigner"
    }
