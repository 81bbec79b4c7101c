"""A bridge of a third region has a region's log cosigned first, and brings the log nothing of it, or not all of it. The log gets all lines all the same.

It needs no grant: whoever is trusted may ask how far a witness is, take the log's checkpoint, and have it cosigned. The witness then has that size.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attacks.conftest import Tally
from attacks.test_one_bridge_of_a_region import Clock, bridge
from audit_log import REGION_ORIGIN, Link, log_signer, witness_signer

from audit.checkpoint import note_size
from audit.note import NoteSigner, encode_note, parse_note
from audit.trail import Trail
from audit.witness import MemoryWitnessStore, Witness
from bridge.region_log import Askings, cosign_region_log
from felix.errors import FelixError, UnavailableError
from felix.messages import Cosign, GetCheckpoint, PutCosignature, Witnessed, WitnessedSize
from felix.names import SpiffeId
from keys.post_quantum import MlDsaKey
from region.evidence.witnessing import Witnessing

EU = witness_signer()
EU_PQ = NoteSigner.from_ml_dsa(EU.key.name, MlDsaKey.from_seed(b"e" * 32))
ROGUES = 4


class End:
    """A region as one bridge sees it."""

    def __init__(self, region: str, witnessing: Witnessing, actor: SpiffeId) -> None:
        self.region, self._witnessing, self._actor = region, witnessing, actor
        self.trust = SimpleNamespace(witnesses=(EU.key, EU_PQ.key))

    def connection(self) -> Any:
        return SimpleNamespace(request=self.request)

    async def request(self, message: object) -> Any:
        if isinstance(message, WitnessedSize):
            note = self._witnessing.witness.last_note(message.origin)
            return Witnessed(0) if note is None else Witnessed(note_size(note), note)
        if isinstance(message, GetCheckpoint):
            return await self._witnessing.checkpoint(self._actor, message.from_size)
        if isinstance(message, Cosign):
            return await self._witnessing.cosign(self._actor, message.checkpoint, message.proof)
        assert isinstance(message, PutCosignature)
        return await self._witnessing.put_cosignature(self._actor, message.cosigned)


async def take(of: End, witness: End, *, brings_one_line: bool) -> bool:
    """What the rogue does, as an agent would; what it gets it keeps, or brings eu-west's Ed25519 line alone. Whether it was first."""
    known = await witness.request(WitnessedSize(REGION_ORIGIN))
    answer = await of.request(GetCheckpoint(known.size))
    if answer.size == known.size:
        return False
    cosigned = parse_note((await witness.request(Cosign(answer.checkpoint, answer.proof))).cosigned)
    if brings_one_line:
        lines = tuple(line for line in cosigned.signatures if line.key_id != EU_PQ.key.key_id)
        await of.request(PutCosignature(encode_note(cosigned._replace(signatures=lines))))
    return True


@pytest.mark.parametrize("brings_one_line", [False, True])
def test_a_cosignature_that_a_third_region_keeps_to_itself_is_brought(
    tmp_path: Path, brings_one_line: bool, tally: Tally
) -> None:
    def append() -> None:
        ended = threading.Event()
        trail.append_nowait([Link().grant()], lambda first, error: ended.set())
        assert ended.wait(30)
        trail.publish()

    async def play() -> int:
        clock, askings, taken = Clock(), Askings(), 0
        own = Witness(witness_signer("us-east.acme/witness"), [], MemoryWitnessStore(), lambda: 1)
        us = Witnessing(own, trail, "us-east", clock, None)  # type: ignore[arg-type]
        memory = Witness(EU, [trail.key], MemoryWitnessStore(), lambda: 1, also=[EU_PQ])
        writes = SimpleNamespace(held_back=lambda: None)
        eu = Witnessing(memory, writes, "eu-west", clock, None)  # type: ignore[arg-type]

        def ends(actor: SpiffeId) -> tuple[End, End]:
            return End("us-east", us, actor), End("eu-west", eu, actor)

        rogues = [ends(bridge("ap-south", f"rogue{n}")) for n in range(ROGUES)]
        honest = ends(bridge("us-east", "us-to-eu"))
        for turn in range(20):
            clock.now = 3.0 * turn
            append()
            for rogue in rogues:
                try:
                    taken += await take(*rogue, brings_one_line=brings_one_line)
                except FelixError as error:
                    assert isinstance(error, UnavailableError), "no more than its pace"
            await cosign_region_log(*honest, "acme", askings, int(clock.now * 1000), MemoryWitnessStore())  # type: ignore[arg-type]
            newest = trail.checkpoints.cosigned()[0]
            assert newest.checkpoint == trail.checkpoints.newest
            assert {by.key for by in newest.cosigned} == {EU.key, EU_PQ.key}
        return taken

    log = log_signer(REGION_ORIGIN)
    with closing(Trail.open(tmp_path, log, witnesses=[EU.key, EU_PQ.key])) as trail:
        tally("cosignatures that a third region had first", asyncio.run(play()))
