"""A change of a region's signing keys that was cut off: the bundle of it (`new.bundle.json`), and the new keys, lie beside those of now. Blocks on the disk.

Until `felix region change-signing-keys` has finished it, or begun it anew, nobody else signs the region's bundle: what the finish puts in its place is the bundle as it was when the change
began, and what was named meanwhile would be named no more. Callers: region.signing_keys, and whoever else signs the bundle.
"""

from __future__ import annotations

from pathlib import Path

from felix.errors import Code, RequestError
from keys.bundle import RegionBundle, SignedBundle, decode_bundle
from keys.key_file import load_signing_key
from region.folder import RegionFolder
from region.signing_key_leaves import Role


def signing_key_path(folder: RegionFolder, role: Role) -> Path:
    return folder.policy_key if role == "policy" else folder.receipt_key


def new_path(path: Path) -> Path:
    return path.with_name(f"new.{path.name}")


def has_begun(folder: RegionFolder, bundle: RegionBundle) -> bool:
    """Whether the bundle names new keys already that do not lie in place yet."""
    return any(
        new_path(path).exists() and load_signing_key(new_path(path)).verify_key.public in publics
        for path, publics in (
            (folder.policy_key, bundle.policy_keys),
            (folder.receipt_key, bundle.receipt_keys),
        )
    )


def planned(folder: RegionFolder) -> SignedBundle | None:
    """The bundle of a change that was cut off, with the keys that it names beside the old ones."""
    path = new_path(folder.bundle)
    signed = decode_bundle(path.read_bytes()) if path.exists() else None
    return signed if signed is not None and has_begun(folder, signed.bundle) else None


def require_none_begun(folder: RegionFolder, bundle: RegionBundle) -> None:
    """Before this bundle is changed and signed. Raises RequestError(CONFLICT) where a change of signing keys was cut off."""
    if planned(folder) is not None or has_begun(folder, bundle):
        raise RequestError(
            f"A change of the signing keys of {bundle.region} was cut off: its bundle ({new_path(folder.bundle).name}) or its new keys lie beside those of now in {folder.root}. What were "
            "named in bundle.json now would be lost once it is finished.",
            code=Code.CONFLICT,
            hint=f"Finish it first: felix region change-signing-keys --region {bundle.region}. It goes on where the change was cut off, or begins anew where nothing of it was told yet. "
            "Then run this again.",
        )
