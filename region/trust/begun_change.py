"""Who changes a region's bundle does so alone, and not beside a change of signing keys that was cut off. Blocks on the disk.

Of a change that was cut off, its bundle (`new.bundle.json`) and the new keys lie beside those of now. Until `felix region change-signing-keys` has finished it, or begun it anew, nobody else signs the region's bundle: what the finish puts in its place is the bundle as it was when the change
began, and what was named meanwhile would be named no more. Callers: region.trust.signing_keys, and whoever else signs the bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from felix.errors import Code, RequestError, UnavailableError
from felix.files import remove_staged, sync_folder
from felix.storage.disk import FileLock
from keys.bundle import RegionBundle, SignedBundle, decode_bundle
from keys.key_file import load_signing_key
from region.folder import RegionFolder
from region.trust.signing_key_leaves import ROLES, Role, keys_of_now

P = ParamSpec("P")
T = TypeVar("T")


def changes_bundle(
    command: Callable[Concatenate[RegionFolder, P], T],
) -> Callable[Concatenate[RegionFolder, P], T]:
    """Of a command that reads the folder's bundle and puts another in its place: it raises RequestError(CONFLICT) where one runs already, so that neither
    puts back what the other has changed."""

    @wraps(command)
    def alone(folder: RegionFolder, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            lock = FileLock(folder.root)
        except UnavailableError as error:
            raise RequestError(
                f"Another command changes {folder.bundle}. {error.sentence}",
                code=Code.CONFLICT,
                hint="Run this again once that one has ended.",
            ) from error
        with lock:
            return command(folder, *args, **kwargs)

    return alone


def signing_key_path(folder: RegionFolder, role: Role) -> Path:
    return folder.policy_key if role == "policy" else folder.receipt_key


def new_path(path: Path) -> Path:
    return path.with_name(f"new.{path.name}")


def put_in_place(paths: Iterable[Path]) -> None:
    """Private keys that lie beside these (`new_path`) take their places, which is durable when this returns. Of the ones before nothing is left in these folders, nor of a
    call that was cut off as it wrote."""
    folders: dict[Path, None] = {}
    for path in paths:
        if new_path(path).exists():
            _move(new_path(path), path)
        for each in (path, new_path(path)):
            remove_staged(each)
        folders[path.parent] = None
    for folder in folders:
        sync_folder(folder)


def _move(path: Path, place: Path) -> None:
    path.replace(place)


def holds_key_of_now(folder: RegionFolder, bundle: RegionBundle, role: Role) -> bool:
    """Whether the folder's key of this role is one that the bundle names."""
    return load_signing_key(signing_key_path(folder, role)).verify_key.public in keys_of_now(bundle, role)


def has_begun(folder: RegionFolder, bundle: RegionBundle) -> bool:
    """Whether the bundle names new keys already that do not lie in place yet."""
    return any(
        path.exists() and load_signing_key(path).verify_key.public in keys_of_now(bundle, role)
        for role in ROLES
        for path in (new_path(signing_key_path(folder, role)),)
    )


def written(folder: RegionFolder) -> SignedBundle | None:
    """The bundle that a change put beside that of now, whether or not the keys that it names are there."""
    path = new_path(folder.bundle)
    return decode_bundle(path.read_bytes()) if path.exists() else None


def planned(folder: RegionFolder) -> SignedBundle | None:
    """The bundle of a change that was cut off, with the keys that it names beside the old ones."""
    signed = written(folder)
    return signed if signed is not None and has_begun(folder, signed.bundle) else None


def is_in_place(folder: RegionFolder, bundle: RegionBundle) -> bool:
    """Whether a change was cut off where nothing was left to do but to remove its bundle from beside the one in place."""
    path = new_path(folder.bundle)
    return (
        path.exists()
        and path.read_bytes() == folder.bundle.read_bytes()
        and all(holds_key_of_now(folder, bundle, role) for role in ROLES)
    )


def require_none_begun(folder: RegionFolder, bundle: RegionBundle) -> None:
    """Before this bundle is changed and signed. Raises RequestError(CONFLICT) where a change of signing keys was cut off."""
    plan = written(folder)
    if has_begun(folder, bundle) or (plan is not None and plan.bundle.issued_ms > bundle.issued_ms):
        raise RequestError(
            f"A change of the signing keys of {bundle.region} was cut off: its bundle ({new_path(folder.bundle).name}) or its new keys lie beside those of now in {folder.root}. What were "
            "named in bundle.json now would be lost once it is finished.",
            code=Code.CONFLICT,
            hint=f"Finish it first: felix region change-signing-keys --region {bundle.region}. It goes on where the change was cut off, or begins anew where nothing of it was told yet. "
            "Then run this again.",
        )
