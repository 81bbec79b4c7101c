"""The region's audit log and its witness, opened with the keys in the region's folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from audit.checkpoint import claimed_size, note_size, open_checkpoint
from audit.note import Algorithm, VerifierKey, parse_note, unbounded
from audit.origin import region_origin, witness_name
from audit.signer_disk import load_signers
from audit.tile import CHECKPOINT_PATH
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.trust import RegionTrust, witnesses_of
from audit.witness import Witness
from felix.errors import Code, RequestError, TamperError
from felix.runtime.port import Runtime
from felix.storage.port import Files
from keys.bundle import RegionBundle
from region.config import RegionConfig
from region.evidence.witness_memory import WitnessMemory
from region.folder import RegionFolder
from region.trust.changed_log_key import STALE_HINT
from region.trust.trusted_bundles import pinned_bundles

log = logging.getLogger("felix.region.evidence")


def open_evidence(
    folder: RegionFolder,
    config: RegionConfig,
    own: RegionBundle,
    cosigned: WitnessMemory,
    refusal: Callable[[], str],
    unsigned: Callable[[], str],
    *,
    name: str,
    files: Files,
    runtime: Runtime,
    copied: bool = False,
) -> tuple[Witness, Trail]:
    """Blocks. `name`: of the log's folder. `refusal` and `unsigned`: as `Trail.open`; asked from other threads. `copied`: several brokers have copies of the log. Of other regions only the pinned
    ones are known yet; governance adds those that the store names rightly. Raises as `Trail.open`; RequestError(CONFIG_INVALID) where the newest checkpoint of a copy is of before a change of
    the log's keys, or after it, and the keys here are not.
    """
    region, mesh = config.region, config.mesh
    known = list(pinned_bundles(folder).values())
    cosigned.move_in()
    cosigner, *also = load_signers(
        witness_name(region, mesh), folder.witness_key, folder.witness_ml_dsa_key, Algorithm.COSIGNATURE
    )
    witness = Witness(
        cosigner,
        [key for bundle in known for key in RegionTrust(bundle).logs],
        cosigned,
        lambda: runtime.clock.now_ms() // 1000,
        also=also,
    )
    cosigned.keys_of = witness.keys_of
    signers = load_signers(region_origin(region, mesh), folder.audit_key, folder.audit_ml_dsa_key)
    earlier = RegionTrust(own).earlier_keys(signers[0].key.name, (each.key for each in signers))
    if copied:
        _require_of_these_keys(
            Folder(folder.root / config.data / name, files), (*(each.key for each in signers), *earlier), own
        )
    trail = Trail.open(
        folder.root / config.data / name,
        signers[0],
        also=signers[1:],
        earlier=earlier,
        witnesses=[
            *witnesses_of((*known, own), region),
            *(key for each in config.audit.witnesses for key in each.target(folder.root).keys),
        ],
        settings=TrailSettings(checkpoint_interval_ms=config.audit.checkpoint_every),
        refusal=refusal,
        unsigned=unsigned,
        files=files,
        runtime=runtime,
        copied=copied,
    )
    if trail.recovered is not None:
        log.warning("audit log: %s", trail.recovered)
    return witness, trail


def _require_of_these_keys(copy: Folder, keys: tuple[VerifierKey, ...], own: RegionBundle) -> None:
    """Raises RequestError(CONFIG_INVALID) where the newest checkpoint of a broker's copy is one that the log's keys were not changed by, or that these are of before: what to do says neither the
    note nor its signature. Whatever else is wrong with it, whoever opens the copy says."""
    note = copy.read(CHECKPOINT_PATH)
    if note is None or not claimed_size(note) or _opens(note, keys):
        return
    region = own.region
    if _opens(note, unbounded(keys)):
        signed = {by.key for by in open_checkpoint(note, unbounded(keys)).signed}
        # Of several changes, the one at which this copy was not at hand.
        end = max(key.to_size or 0 for key in keys if key in signed)
        raise RequestError(
            f"The copy of the audit log of {region} in {copy.path} has a checkpoint of {note_size(note):,} leaves under keys that sign up to {end:,}: when the log's keys were changed, this copy was "
            "not at hand, nor its checkpoint.",
            code=Code.CONFIG_INVALID,
            hint="This broker does not go on with the log. Move that folder aside and keep it, then start the broker: the leaves come from the others' copies. Whoever was shown that checkpoint has "
            "one that holds nowhere any more; docs/runbooks/leaked-log-key.md says what follows.",
        )
    names = {(key.name, key.key_id) for key in keys}
    with suppress(TamperError):
        lines = parse_note(note).signatures
        if any(line.name == keys[0].name and (line.name, line.key_id) not in names for line in lines):
            raise RequestError(
                f"The newest checkpoint of the audit log of {region} in {copy.path} was signed with a key that bundle.json in this folder does not name: the file is of before a change of the log's "
                "keys, or somebody else has signed that checkpoint.",
                code=Code.CONFIG_INVALID,
                hint=f"{STALE_HINT} Where nobody changed the log's keys: felix audit verify, and docs/runbooks/leaked-log-key.md.",
            )


def _opens(note: bytes, keys: tuple[VerifierKey, ...]) -> bool:
    try:
        open_checkpoint(note, keys)
    except TamperError:
        return False
    return True
