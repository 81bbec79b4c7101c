"""The region's audit log and its witness, opened with the keys in the region's folder."""

from __future__ import annotations

import logging
from collections.abc import Callable

from audit.note import Algorithm
from audit.origin import region_origin, witness_name
from audit.signer_disk import load_signers
from audit.trail import Trail, TrailSettings
from audit.trust import RegionTrust, witnesses_of
from audit.witness import Witness
from felix.runtime.port import Runtime
from felix.storage.port import Files
from keys.bundle import RegionBundle
from region.config import RegionConfig
from region.folder import RegionFolder
from region.trusted_bundles import pinned_bundles
from region.witness_memory import WitnessMemory

log = logging.getLogger("felix.region.evidence")


def open_evidence(
    folder: RegionFolder,
    config: RegionConfig,
    own: RegionBundle,
    cosigned: WitnessMemory,
    refusal: Callable[[], str],
    *,
    name: str,
    files: Files,
    runtime: Runtime,
    copied: bool = False,
) -> tuple[Witness, Trail]:
    """Blocks. `name`: of the log's folder. `refusal`: why nothing may be signed now, or an empty string; asked from other threads. `copied`: several brokers have copies of the log. Of other regions only the pinned
    ones are known yet; governance adds those that the store names rightly.
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
    trail = Trail.open(
        folder.root / config.data / name,
        signers[0],
        also=signers[1:],
        earlier=RegionTrust(own).earlier_keys(signers[0].key.name, (each.key for each in signers)),
        witnesses=[
            *witnesses_of((*known, own), region),
            *(key for each in config.audit.witnesses for key in each.target(folder.root).keys),
        ],
        settings=TrailSettings(checkpoint_interval_ms=config.audit.checkpoint_every),
        refusal=refusal,
        files=files,
        runtime=runtime,
        copied=copied,
    )
    if trail.recovered is not None:
        log.warning("audit log: %s", trail.recovered)
    return witness, trail
