"""F20: any bridge may ask for checkpoints, and bring checkpoints to be cosigned, without end; each forced tiles, a
checkpoint and syncs of the disk.

The asker is a foreign bridge with its own identity; it asks as fast as it can while the region's log takes leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from audit_log import Link, log_signer, witness_signer

from audit.checkpoint import Checkpoint
from audit.merkle import EMPTY_ROOT
from audit.note import Note, encode_note
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.witness import MemoryWitnessStore, Witness
from felix.errors import Code, FelixError
from felix.messages import CheckpointAnswer
from felix.names import SpiffeId
from felix.runtime.real import REAL
from region.evidence.witnessing import CHECKPOINTS_BURST, COSIGNATURES_BURST, WAITING_MAX, Witnessing

Tally = Callable[[str, int], None]
ROGUE = SpiffeId("us-east", "acme", "bridge", "rogue")
OTHER = SpiffeId("ap-south", "acme", "bridge", "honest")


def test_asking_for_checkpoints_forces_none_and_is_refused_beyond_a_burst(
    tmp_path: Path, tally: Tally, attack_scale: int
) -> None:
    written: list[str] = []

    async def ask() -> tuple[int, int]:
        trail = Trail.open(
            tmp_path,
            log_signer(),
            settings=TrailSettings(checkpoint_interval_ms=3_600_000, checkpoint_leaves=1 << 30),
        )
        witnessing = Witnessing(
            Witness(witness_signer(), [], MemoryWitnessStore(), lambda: 1), trail, "eu-west", REAL.clock, None
        )
        own = Folder.write

        def write(self: Folder, path: str, data: bytes) -> None:
            written.append(path)
            own(self, path, data)

        Folder.write = write  # type: ignore[method-assign]
        answered = refused = 0
        try:
            for _ in range(300 * attack_scale):
                await trail.append([Link().grant()])
                try:
                    answer = await witnessing.checkpoint(ROGUE, 0)
                except FelixError as error:
                    assert error.code is Code.LIMIT_RATE and error.retry_after_ms
                    refused += 1
                else:
                    assert isinstance(answer, CheckpointAnswer) and answer.size == 0
                    answered += 1
            forced = [path for path in written if path == "checkpoint" or ".p/" in path]
            assert forced == [], "no question made the log write partial tiles or a checkpoint"
            await witnessing.checkpoint(OTHER, 0)
        finally:
            Folder.write = own  # type: ignore[method-assign]
            await asyncio.to_thread(trail.close)
        return answered, refused

    answered, refused = asyncio.run(ask())
    # The bucket fills by one a second while the questions run, however slow the machine is.
    assert answered >= CHECKPOINTS_BURST and refused > 0
    tally("questions for a checkpoint refused", refused)


def test_bringing_checkpoints_is_bounded_per_log_and_asker(
    tmp_path: Path, tally: Tally, attack_scale: int
) -> None:
    log = log_signer()
    text = Checkpoint(log.key.name, 0, EMPTY_ROOT).text()
    note = encode_note(Note(text, (log.sign(text),)))
    put: list[str] = []

    class Counting(MemoryWitnessStore):
        def swap(self, origin: str, before: bytes | None, note: bytes) -> None:
            put.append(origin)
            super().swap(origin, before, note)

    async def bring() -> tuple[int, int, int]:
        witnessing = Witnessing(
            Witness(witness_signer(), [log.key], Counting(), lambda: 1),
            SimpleNamespace(held_back=lambda: None),  # type: ignore[arg-type]
            "eu-west",
            REAL.clock,
            None,
        )
        at_once = await asyncio.gather(
            *(witnessing.cosign(ROGUE, note, []) for _ in range(COSIGNATURES_BURST)), return_exceptions=True
        )
        waited = sum(isinstance(each, FelixError) for each in at_once)
        refused = 0
        for _ in range(200 * attack_scale):
            try:
                await witnessing.cosign(ROGUE, note, [])
            except FelixError as error:
                assert error.code is Code.LIMIT_RATE
                refused += 1
        await witnessing.cosign(OTHER, note, [])
        return len(at_once), waited, refused

    sent, waited, refused = asyncio.run(bring())
    assert waited == sent - WAITING_MAX and refused > 0
    assert put == [log.key.name], "the same checkpoint is written down once"
    tally("checkpoints brought too often", waited + refused)
