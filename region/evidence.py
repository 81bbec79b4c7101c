"""The region's audit log and its witness, opened with the keys in the region's folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from audit.note import Algorithm, NoteSigner
from audit.origin import region_origin, witness_name
from audit.trail import Trail, TrailSettings
from audit.trust import RegionTrust, Trust
from audit.witness import Witness
from felix.runtime.port import Runtime
from felix.storage.port import Files
from keys.bundle import RegionBundle
from keys.key_file import load_ml_dsa_key, load_signing_key
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
    audit_key = load_signing_key(folder.audit_key)
    cosigned.move_in()
    cosigning_key = load_signing_key(folder.witness_key)
    witness = Witness(
        NoteSigner.from_key(witness_name(region, mesh), cosigning_key, Algorithm.COSIGNATURE),
        [key for bundle in known for key in RegionTrust(bundle).logs],
        cosigned,
        lambda: runtime.clock.now_ms() // 1000,
        also=_post_quantum(witness_name(region, mesh), folder.witness_ml_dsa_key),
    )
    signer = NoteSigner.from_key(region_origin(region, mesh), audit_key, Algorithm.ED25519)
    also = _post_quantum(region_origin(region, mesh), folder.audit_ml_dsa_key)
    trail = Trail.open(
        folder.root / config.data / name,
        signer,
        also=also,
        earlier=RegionTrust(own).earlier_keys(signer.key.name, (each.key for each in (signer, *also))),
        witnesses=[
            *Trust.of((*known, own)).witnesses_for(region),
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


def _post_quantum(name: str, path: Path) -> list[NoteSigner]:
    """The ML-DSA-44 signer whose key is in this file; none in a region that was founded before there were any."""
    return [NoteSigner.from_ml_dsa(name, load_ml_dsa_key(path))] if path.exists() else []
