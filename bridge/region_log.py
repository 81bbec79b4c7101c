"""A region's own audit log, between that region and another one that cosigns it.

That a witness has cosigned a checkpoint does not say that the log has its lines: whoever brought it there, a bridge of a third region or one that
ended in between, may have brought none of them back, or one alone. So what the log itself shows counts. Caller: bridge.agent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from audit.checkpoint import Checkpoint
from audit.errors import RolledBackError
from audit.note import Note, VerifierKey, check_note, encode_note, parse_note
from audit.origin import region_origin
from bridge.endpoint import RegionEndpoint
from bridge.history import require_continued
from felix.errors import Code, CorruptionError, FelixError, UnavailableError
from felix.messages import Cosign, GetCheckpoint, PutCosignature, Witnessed, WitnessedSize

RACES_MAX: Final = 3
"""So often in one look a checkpoint is brought that others bring at the same time. To overtake it each time, the log must have made another one."""

Brought = dict[tuple[str, str], str]
"""By log and witness: the last checkpoint, a note's text, that the witness was asked to cosign, all of whose answer the log has kept. A bundle may name
keys that its region does not sign with: it is not asked for them again and again."""


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


def has_lines(note: Note, keys: Iterable[VerifierKey]) -> bool:
    """Whether each of these keys has cosigned the note, by a line on it that holds; of no keys, none has."""
    asked = set(keys)
    return bool(asked) and asked <= {by.key for by in check_note(note, asked).verified if by.time_s}


async def cosign_region_log(of: RegionEndpoint, witness: RegionEndpoint, mesh: str, brought: Brought) -> None:
    """Have `witness` cosign what is new in the log of `of`, and whatever of its lines is not there. Raises CorruptionError where it says that the log
    is another one, UnavailableError(CONFLICT) where others were first RACES_MAX times."""
    way = (region_origin(of.region, mesh), witness.region)
    known = await _known(of, witness, mesh)
    for _ in range(RACES_MAX):
        answer = await of.connection().request(GetCheckpoint(known.size))
        if not answer.size:
            return
        note = parse_note(answer.checkpoint)
        if answer.size == known.size and (
            brought.get(way) == note.text or has_lines(note, witness.trust.witnesses)
        ):
            return
        # The others' lines are nothing to the witness.
        bare = note.signed_by(Checkpoint.parse(note.text).origin)
        try:
            cosigned = await witness.connection().request(Cosign(encode_note(bare), answer.proof))
        except FelixError as error:
            if not isinstance(error, CorruptionError) and error.code is not Code.CONFLICT:
                raise
            before, known = known, await _known(of, witness, mesh)
            if known.size == before.size:
                raise
            # Somebody else brought a checkpoint of the same log meanwhile, so the proof began where the witness no longer stands.
            continue
        if cosigned.cosigned:
            # Refused or lost, it is brought at the next look: the line is still not there.
            await of.connection().request(PutCosignature(cosigned.cosigned))
        brought[way] = note.text
        return
    raise UnavailableError(
        f"{witness.region} has cosigned further leaves of the audit log of {of.region} each time that its cosignature was to be brought.",
        code=Code.CONFLICT,
    )


async def _known(of: RegionEndpoint, witness: RegionEndpoint, mesh: str) -> Witnessed:
    return await witness.connection().request(WitnessedSize(region_origin(of.region, mesh)))
