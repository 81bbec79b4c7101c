"""A region's own audit log, between that region and another one that cosigns it."""

from __future__ import annotations

from audit.errors import RolledBackError
from audit.origin import region_origin
from bridge.endpoint import RegionEndpoint
from bridge.history import require_continued
from felix.errors import CorruptionError
from felix.messages import Cosign, GetCheckpoint, PutCosignature, Witnessed, WitnessedSize


async def check_region_log(of: RegionEndpoint, witness: RegionEndpoint, mesh: str) -> None:
    """Raises RolledBackError where `witness` cosigned what is not in the log of `of`."""
    known = await _known(of, witness, mesh)
    if not known.size:
        return
    answer = await of.connection().request(GetCheckpoint(known.size))
    hint = (
        f"Have {of.region} restore its log's newest copy; nothing crosses until then. Where there is none, "
        "docs/operations.md says how to go on."
    )
    if answer.size < known.size:
        raise RolledBackError(
            f"{witness.region} cosigned {known.size} leaves of the audit log of {of.region}, which has {answer.size}: it "
            "was rolled back.",
            hint=hint,
        )
    if known.cosigned:
        log = f"the audit log of {of.region}"
        require_continued(
            known.cosigned, answer.checkpoint, answer.proof, log=log, witness=witness.region, hint=hint
        )


async def cosign_region_log(of: RegionEndpoint, witness: RegionEndpoint, mesh: str) -> None:
    """Have `witness` cosign what is new in the log of `of`. Raises CorruptionError where it says that the log is another one."""
    known = await _known(of, witness, mesh)
    answer = await of.connection().request(GetCheckpoint(known.size))
    if not answer.size or answer.size == known.size:
        return
    try:
        cosigned = await witness.connection().request(Cosign(answer.checkpoint, answer.proof))
    except CorruptionError:
        now = await _known(of, witness, mesh)
        if now.size != known.size:
            # The other region's agent brought a checkpoint of the same log meanwhile, so the proof began where the witness no
            # longer stands. The next turn asks from there.
            return
        raise
    if cosigned.cosigned:
        await of.connection().request(PutCosignature(cosigned.cosigned))


async def _known(of: RegionEndpoint, witness: RegionEndpoint, mesh: str) -> Witnessed:
    return await witness.connection().request(WitnessedSize(region_origin(of.region, mesh)))
