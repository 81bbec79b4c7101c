"""A region's own audit log, between that region and another one that cosigns it.

That a witness has cosigned a checkpoint does not say that the log has its lines: whoever brought it there, a bridge of a third region or one that
ended in between, may have brought none of them back, or one alone. So what the log itself shows counts.

The agent keeps the newest checkpoint of each log that it had cosigned, by the region that did (`shown`, a `WitnessStore`): a region that is put back to a backup has forgotten what
it cosigned, and the other one's log may be put back as well. Caller: bridge.agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from audit.asked import REGION_PAUSE_MS_MAX, Asked, answered_note, name_keys
from audit.checkpoint import Checkpoint, claimed_size
from audit.errors import RolledBackError
from audit.note import Note, VerifierKey, check_note, encode_note, parse_note
from audit.origin import region_origin
from audit.witness import WitnessStore
from bridge.endpoint import RegionEndpoint
from bridge.history import require_continued
from felix.errors import Code, CorruptionError, FelixError, TamperError, UnavailableError
from felix.messages import CheckpointAnswer, Cosign, GetCheckpoint, PutCosignature, Witnessed, WitnessedSize

RACES_MAX: Final = 3
"""So often in one look a checkpoint is brought that others bring at the same time. To overtake it each time, the log must have made another one."""

Askings = dict[tuple[str, str], Asked]
"""By log and witness."""


async def check_region_log(
    of: RegionEndpoint, witness: RegionEndpoint, mesh: str, shown: WitnessStore
) -> None:
    """Raises RolledBackError where `witness` cosigned what is not in the log of `of`, by what it says and by what is kept here. Blocks for the files in a thread."""
    known = await _known(of, witness, mesh)
    kept = await asyncio.to_thread(shown.last, _kept_as(of, witness, mesh))
    remembered = {known.size: known.cosigned} if known.size else {}
    if kept is not None and (size := claimed_size(kept)) and _text(kept) != _text(remembered.get(size, b"")):
        await _require_has(of, witness, size, kept)
    for size, note in remembered.items():
        await _require_has(of, witness, size, note)


async def _require_has(of: RegionEndpoint, witness: RegionEndpoint, size: int, note: bytes) -> None:
    """`note`: empty where a witness of an earlier release does not say what it cosigned."""
    answer = await of.connection().request(GetCheckpoint(size))
    hint = (
        f"Have {of.region} restore its log's newest copy; nothing crosses until then. Where there is none, "
        "docs/operations.md says how to go on."
    )
    if answer.size < size:
        raise RolledBackError(
            f"{witness.region} cosigned {size} leaves of the audit log of {of.region}, which has {answer.size}: it "
            "was rolled back.",
            hint=hint,
        )
    if note:
        log = f"the audit log of {of.region}"
        require_continued(note, answer.checkpoint, answer.proof, log=log, witness=witness.region, hint=hint)


def _text(note: bytes) -> bytes:
    return note.partition(b"\n\n")[0]


def _kept_as(of: RegionEndpoint, witness: RegionEndpoint, mesh: str) -> str:
    return f"{region_origin(of.region, mesh)} {witness.region}"


def _keep(shown: WitnessStore, name: str, note: bytes) -> None:
    """Remember what was cosigned, if it goes further. Blocks. Raises OSError."""
    before = shown.last(name)
    if before is None or claimed_size(before) < claimed_size(note):
        shown.swap(name, before, note)


def lacking_lines(note: Note, keys: Iterable[VerifierKey]) -> tuple[VerifierKey, ...]:
    """Of these keys, those that have no line on the note that holds."""
    asked = tuple(dict.fromkeys(keys))
    there = {by.key for by in check_note(note, asked).verified if by.time_s}
    return tuple(key for key in asked if key not in there)


def _shown(answer: CheckpointAnswer, of: str, origin: str) -> tuple[Note, Note]:
    """The checkpoint that a region answered with, whole and with the log's own lines alone. Raises TamperError where it is not one of that log, or has no line of it: what
    a witness would refuse is not brought to it. Whether the line holds is the witness's to say, who has the log's keys of today."""
    note = parse_note(answer.checkpoint)
    checkpoint, bare = Checkpoint.parse(note.text), note.signed_by(origin)
    if checkpoint.origin != origin or checkpoint.size != answer.size or not bare.signatures:
        raise TamperError(
            f"{of} was asked for the checkpoint of its audit log, and gave one that is not of {answer.size} leaves of {origin} "
            "with a line of that log."
        )
    return note, bare


async def cosign_region_log(
    of: RegionEndpoint,
    witness: RegionEndpoint,
    mesh: str,
    askings: Askings,
    now_ms: int,
    shown: WitnessStore,
) -> None:
    """Have `witness` cosign what is new in the log of `of`, and whatever of its lines is not there. `now_ms`: of a clock that does not go back. Raises CorruptionError where
    it says that the log is another one, TamperError where the log still lacks a line of a key of the witness, at each look until it has all;
    UnavailableError(CONFLICT) where others were first RACES_MAX times."""
    origin, keys = region_origin(of.region, mesh), witness.trust.witnesses
    log = f"the audit log of {of.region}"
    asked = askings.setdefault((origin, witness.region), Asked(REGION_PAUSE_MS_MAX))
    known = await _known(of, witness, mesh)
    for _ in range(RACES_MAX):
        answer = await of.connection().request(GetCheckpoint(known.size))
        if not answer.size:
            return
        note, bare = _shown(answer, of.region, origin)
        lacking = lacking_lines(note, keys)
        if answer.size == known.size and keys and not lacking:
            await asyncio.to_thread(_keep, shown, _kept_as(of, witness, mesh), encode_note(bare))
            asked.stands()
            return
        if (failure := asked.failure(note.text, now_ms)) is not None:
            raise failure.with_traceback(None)
        try:
            # The others' lines are nothing to the witness.
            cosigned = await witness.connection().request(Cosign(encode_note(bare), answer.proof))
        except FelixError as error:
            if not isinstance(error, CorruptionError) and error.code is not Code.CONFLICT:
                raise
            before, known = known, await _known(of, witness, mesh)
            if known.size == before.size:
                raise
            # Somebody else brought a checkpoint of the same log meanwhile, so the proof began where the witness no longer stands.
            continue
        try:
            given = answered_note(cosigned.cosigned, note.text, log, witness.region)
            # Refused or lost, it is brought at the next look: the line is still not there.
            await of.connection().request(PutCosignature(cosigned.cosigned))
            if left := lacking_lines(given, lacking):
                raise TamperError(
                    f"{witness.region} was asked to cosign {log}, and answered without a line that holds of {name_keys(left)}, which its bundle names."
                )
            if lacking and asked.was_brought(note.text):
                raise TamperError(
                    f"The audit log of {of.region} took the cosignature of {witness.region}, and shows no line of {name_keys(lacking)}."
                )
        except FelixError as error:
            if not isinstance(error, UnavailableError):
                asked.failed(note.text, error, now_ms)
            raise
        asked.brought(note.text)
        await asyncio.to_thread(_keep, shown, _kept_as(of, witness, mesh), encode_note(bare))
        return
    raise UnavailableError(
        f"{witness.region} has cosigned further leaves of the audit log of {of.region} each time that its cosignature was to be brought.",
        code=Code.CONFLICT,
    )


async def _known(of: RegionEndpoint, witness: RegionEndpoint, mesh: str) -> Witnessed:
    return await witness.connection().request(WitnessedSize(region_origin(of.region, mesh)))
