"""Changing a region's policy key, its receipt key, or both: the ones before sign nothing any more, and count in each log up to where it was then. Blocks on
the disk.

Where a key ended stands in the bundle, log by log (keys.bundle.FormerKeys):

- of the logs of other regions that this one trusts: how far it has cosigned each, by what the witness of a broker remembers in its data folder;
- of its own logs: their last checkpoint.

Whoever has the former key can put nothing below that: the region would have to cosign, or sign, another history.

Order, so that a crash at any step leaves a region that goes on after the next call:

1. what the logs' ends are is read, and in a region's own log that one process writes a KEY leaf records the change;
2. the new keys are written beside the old ones; 3. the bundle names the new ones, and where the old ones ended; 4. the new keys take the old ones' place.

Between 3 and 4 no broker starts with a receipt key that has ended (`require_of_now`). Callers: cli.region, region.startup.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from audit.checkpoint import Checkpoint, SignedCheckpoint, open_checkpoint
from audit.note import parse_note
from audit.origin import Origin, region_origin
from audit.signer_disk import load_signers
from audit.tile import CHECKPOINT_PATH, COPIED_PATH
from audit.tile_disk import Folder
from audit.trail import Trail
from audit.trust import RegionTrust
from audit.witness import DiskWitnessStore
from felix.errors import Code, RequestError
from felix.files import PUBLIC, replace_file
from keys.bundle import FormerKeys, KeyEnd, RegionBundle, SignedBundle, decode_bundle, sign_bundle
from keys.key_file import load_signing_key, save_signing_key
from keys.signing import SigningKey
from region.config import RegionConfig
from region.folder import RegionFolder
from region.log_keys import append_changed
from region.trusted_bundles import pinned_bundles

Role = Literal["policy", "receipt"]
ROLES: Final[tuple[Role, ...]] = ("policy", "receipt")


class ChangedSigningKeys(NamedTuple):
    """The bundle that names the new keys, and where the ones before ended."""

    signed: SignedBundle
    ends: tuple[KeyEnd, ...]


def change_signing_keys(
    folder: RegionFolder,
    config: RegionConfig,
    now_ms: int,
    roles: Iterable[Role] = ROLES,
    *,
    checkpoints: Iterable[bytes] = (),
    without: Iterable[str] = (),
) -> ChangedSigningKeys:
    """Give the region new keys of these roles. Its brokers, and the agents whose logs lie in the folder, are stopped.

    `checkpoints`: the last ones of logs that lie elsewhere; of other regions' logs, as this one cosigned them. `without`: own logs that are gone, where nothing that the
    former keys signed counts. Raises RequestError where one of the own logs is not at hand, is being written (CONFLICT), or the bundle has no room.
    """
    bundle = decode_bundle(folder.bundle.read_bytes()).bundle
    chosen = [role for role in ROLES if role in set(roles)]
    if _begun(folder, bundle):
        _put_in_place(folder)
        last = bundle.former[-1].ends if bundle.former else ()
        return ChangedSigningKeys(decode_bundle(folder.bundle.read_bytes()), last)
    assert chosen, "at least one key is changed"
    for role in chosen:
        _require_in_place(folder, bundle, role)
    new = {role: SigningKey.generate() for role in chosen}
    given = [_given(folder, bundle, note) for note in checkpoints]
    ends = _largest(
        (
            *_own_ends(folder, config, bundle, given, set(without), new, now_ms),
            *_cosigned_ends(folder, config),
            *given,
        )
    )
    former = FormerKeys(
        policy_keys=bundle.policy_keys if "policy" in new else (),
        receipt_keys=bundle.receipt_keys if "receipt" in new else (),
        ends=ends,
    )
    changed = msgspec.structs.replace(
        bundle.with_former((*bundle.former, former)),
        issued_ms=max(now_ms, bundle.issued_ms + 1),
        **{f"{role}_keys": (key.verify_key.public,) for role, key in new.items()},
    )
    signed = sign_bundle(changed, new.get("policy") or load_signing_key(folder.policy_key))
    for role in ROLES:
        # Of a call that did not come as far as the bundle: nobody knows them.
        _new(_path(folder, role)).unlink(missing_ok=True)
    for role, key in new.items():
        save_signing_key(key, _new(_path(folder, role)))
    replace_file(folder.bundle, signed.encode(), PUBLIC)
    _put_in_place(folder)
    return ChangedSigningKeys(signed, ends)


def raise_ends(
    folder: RegionFolder, config: RegionConfig, now_ms: int, *, checkpoints: Iterable[bytes] = ()
) -> ChangedSigningKeys:
    """Have the keys that ended last count up to where other regions' logs are cosigned by now: what was on its way when they ended has its leaf behind the end.

    Whoever has the former keys and one of those logs' keys may have put something there meanwhile. Raises RequestError where no key ended, or nothing is cosigned further.
    """
    bundle = decode_bundle(folder.bundle.read_bytes()).bundle
    if not bundle.former:
        raise RequestError(f"No policy or receipt key of {bundle.region} has ended.", code=Code.NOT_FOUND)
    *earlier, last = bundle.former
    own = RegionTrust(bundle)
    measured = (*_cosigned_ends(folder, config), *(_given(folder, bundle, note) for note in checkpoints))
    others = [end for end in measured if Origin.parse(end.log).region != own.region]
    ends = _largest((*last.ends, *others))
    if ends == last.ends:
        raise RequestError(
            "No log of another region is cosigned further than where the keys ended.", code=Code.CONFLICT
        )
    raised = bundle.with_former((*earlier, msgspec.structs.replace(last, ends=ends)))
    raised = msgspec.structs.replace(raised, issued_ms=max(now_ms, bundle.issued_ms + 1))
    signed = sign_bundle(raised, load_signing_key(folder.policy_key))
    replace_file(folder.bundle, signed.encode(), PUBLIC)
    return ChangedSigningKeys(signed, ends)


def require_of_now(own: RegionBundle, receipt_key: SigningKey) -> None:
    """Raises RequestError(CONFIG_INVALID) where a broker has a receipt key that its region's bundle does not name: nobody takes what it signs."""
    if receipt_key.verify_key.public in own.receipt_keys:
        return
    has_ended = any(receipt_key.verify_key.public in keys.receipt_keys for keys in own.former)
    raise RequestError(
        f"The receipt key in this folder is one that {own.region} gave up."
        if has_ended
        else f"The receipt key in this folder is none that the bundle of {own.region} names.",
        code=Code.CONFIG_INVALID,
        hint="Put receipt.pem and bundle.json of one and the same time into the region's folder, the newest; where a change was cut off, run felix region "
        "change-signing-keys again.",
    )


def _path(folder: RegionFolder, role: Role) -> Path:
    return folder.policy_key if role == "policy" else folder.receipt_key


def _new(path: Path) -> Path:
    return path.with_name(f"new.{path.name}")


def _begun(folder: RegionFolder, bundle: RegionBundle) -> bool:
    """Whether the bundle names new keys already that do not lie in place yet."""
    return any(
        _new(path).exists() and load_signing_key(_new(path)).verify_key.public in publics
        for path, publics in (
            (folder.policy_key, bundle.policy_keys),
            (folder.receipt_key, bundle.receipt_keys),
        )
    )


def _put_in_place(folder: RegionFolder) -> None:
    for role in ROLES:
        path = _path(folder, role)
        if _new(path).exists():
            _new(path).replace(path)


def _require_in_place(folder: RegionFolder, bundle: RegionBundle, role: Role) -> None:
    path = _path(folder, role)
    public = load_signing_key(path).verify_key.public
    if public not in (bundle.policy_keys if role == "policy" else bundle.receipt_keys):
        raise RequestError(
            f"The bundle of {bundle.region} names another {role} key than {path} holds.", code=Code.CONFLICT
        )


def _end(signed: SignedCheckpoint) -> KeyEnd:
    checkpoint = signed.checkpoint
    return KeyEnd(checkpoint.origin, checkpoint.size, checkpoint.root)


def _largest(ends: Iterable[KeyEnd]) -> tuple[KeyEnd, ...]:
    """Of each log the largest, in the order of their names; of one without leaves nothing is said. Raises RequestError(CONFLICT) where two of one size differ."""
    found: dict[str, KeyEnd] = {}
    for end in ends:
        held = found.setdefault(end.log, end)
        if held.size == end.size and held.root != end.root:
            raise RequestError(
                f"Two roots are known of the first {end.size} leaves of {end.log}.",
                code=Code.CONFLICT,
                hint="Somebody wrote another history of this log; see docs/audit.md before you go on.",
            )
        if end.size > held.size:
            found[end.log] = end
    return tuple(found[log] for log in sorted(found) if found[log].size)


def _own_ends(
    folder: RegionFolder,
    config: RegionConfig,
    bundle: RegionBundle,
    given: list[KeyEnd],
    without: set[str],
    new: dict[Role, SigningKey],
    now_ms: int,
) -> list[KeyEnd]:
    """The last checkpoints of the region's own log and of its bridges' logs."""
    known, found = {end.log for end in given} | without, []
    origins = dict.fromkeys(key.name for key in bundle.audit_keys if key.role == "log")
    for origin in origins:
        if origin in known:
            continue
        bridge = Origin.parse(origin).bridge
        if bridge is None:
            # Of several brokers' copies the one that goes furthest.
            paths = [folder.root / data / "audit" for data in config.data_folders]
            keys = (folder.audit_key, folder.audit_ml_dsa_key)
        else:
            paths = [folder.bridge(bridge.name) / "egress"]
            keys = (folder.egress_key(bridge.name), folder.egress_ml_dsa_key(bridge.name))
        notes = [
            note
            for path in paths
            if path.is_dir() and (note := _last_note(path, origin, keys, bundle, new, now_ms)) is not None
        ]
        if not notes and (bridge is None or not folder.bridge(bridge.name).is_dir()):
            raise RequestError(
                f"The log {origin} is not here: what the keys signed counts up to its last checkpoint.",
                code=Code.NOT_FOUND,
                hint=f"Give that checkpoint's file with --checkpoint, or say --without {origin} where the log is gone, or was never written.",
            )
        log_keys = RegionTrust(bundle).log_keys(origin)
        found += [_end(open_checkpoint(note, log_keys)) for note in notes]
    return found


def _last_note(
    path: Path,
    origin: str,
    keys: tuple[Path, Path],
    bundle: RegionBundle,
    new: dict[Role, SigningKey],
    now_ms: int,
) -> bytes | None:
    """The last checkpoint of a log that lies here; of one that one process writes, over all that it has. None: it has none."""
    log = Folder(path)
    if log.read(CHECKPOINT_PATH) is None:
        return None
    if log.read(COPIED_PATH) is not None:
        return log.read(CHECKPOINT_PATH)
    signers = load_signers(origin, *keys)
    earlier = RegionTrust(bundle).earlier_keys(origin, (signer.key for signer in signers))
    trail = Trail.open(path, signers[0], also=signers[1:], earlier=earlier)
    try:
        if origin == region_origin(bundle.region, bundle.mesh):
            for role, key in new.items():
                append_changed(trail, bundle.region, key, now_ms, f"The region's {role} key was changed.")
        return trail.publish()
    finally:
        trail.close()


def _cosigned_ends(folder: RegionFolder, config: RegionConfig) -> list[KeyEnd]:
    """How far the brokers whose data folders lie here have cosigned the logs of the regions that are trusted."""
    trusted = {region: RegionTrust(bundle) for region, bundle in pinned_bundles(folder).items()}
    named = {key.name: region for region, own in trusted.items() for key in own.logs}
    found = []
    for data in config.data_folders:
        path = folder.root / data / "witness"
        for note in DiskWitnessStore(path).notes() if path.is_dir() else ():
            origin = Checkpoint.parse(parse_note(note).text).origin
            if origin in named:
                found.append(_end(open_checkpoint(note, trusted[named[origin]].log_keys(origin))))
    return found


def _given(folder: RegionFolder, bundle: RegionBundle, note: bytes) -> KeyEnd:
    """A checkpoint that somebody brought: of an own log, or of another region's, cosigned by this one. Raises RequestError, TamperError."""
    origin = Checkpoint.parse(parse_note(note).text).origin
    own = RegionTrust(bundle)
    region = Origin.parse(origin).region
    if region == own.region:
        return _end(open_checkpoint(note, own.log_keys(origin)))
    other = pinned_bundles(folder).get(region)
    if other is None:
        raise RequestError(f"{region} is not trusted here, whose log {origin} is.", code=Code.NOT_FOUND)
    signed = open_checkpoint(note, RegionTrust(other).log_keys(origin), own.witnesses)
    if not signed.cosigned:
        raise RequestError(
            f"The checkpoint of {origin} is not cosigned by {own.region}.",
            hint="The key ends where this region has cosigned the log: nobody can put a leaf below that.",
        )
    return _end(signed)
