"""A region's audit log as its bridges see it: compared with what another region cosigned, and brought to be cosigned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from audit_log import log_signer, witness_signer

from audit.checkpoint import Checkpoint, note_size
from audit.errors import RolledBackError
from audit.merkle import Tree, consistency_proof, leaf_hash
from audit.note import Note, encode_note
from audit.witness import MemoryWitnessStore, Witness
from bridge.region_log import check_region_log, cosign_region_log
from felix.errors import Code
from felix.messages import (
    CheckpointAnswer,
    Cosign,
    Done,
    GetCheckpoint,
    PutCosignature,
    Witnessed,
    WitnessedSize,
)


class Log:
    """Leaves `word 0`, `word 1`, … behind `shared` leaves that every log here has."""

    def __init__(self, word: str, size: int, shared: int = 0) -> None:
        self.signer = log_signer()
        words = ["shared"] * shared + [word] * (size - shared)
        self.hashes = [leaf_hash(f"{each} {at}".encode()) for at, each in enumerate(words)]

    def root(self, first: int, size: int) -> bytes:
        tree = Tree()
        for each in self.hashes[first : first + size]:
            tree.add(each)
        return tree.root()

    def answer(self, from_size: int) -> CheckpointAnswer:
        size = len(self.hashes)
        text = Checkpoint(self.signer.key.name, size, self.root(0, size)).text()
        node = lambda level, index: self.root(index << level, 1 << level)  # noqa: E731
        proof = consistency_proof(from_size, size, node) if 0 < from_size <= size else []
        return CheckpointAnswer(encode_note(Note(text, (self.signer.sign(text),))), size, proof)


class Region:
    """What a broker answers: the owner of a log, the witness of one, or both. `meanwhile` happens before a cosignature."""

    def __init__(self, name: str, log: Log | None = None) -> None:
        self.region, self.log = name, log
        self.kept: list[bytes] = []
        self.meanwhile: Log | None = None
        self.memory = Witness(
            witness_signer(), [log_signer().key], MemoryWitnessStore(), lambda: 1_760_000_000
        )

    def connection(self) -> Any:
        return SimpleNamespace(request=self.request)

    def remember(self, log: Log) -> None:
        last = self.memory.last(log.signer.key.name)
        answer = log.answer(0 if last is None else last.size)
        self.memory.cosign(answer.checkpoint, answer.proof)

    async def request(self, message: object) -> object:
        if isinstance(message, WitnessedSize):
            note = self.memory.last_note(log_signer().key.name)
            return Witnessed(0) if note is None else Witnessed(note_size(note), note)
        if isinstance(message, GetCheckpoint):
            assert self.log is not None
            return self.log.answer(message.from_size)
        if isinstance(message, PutCosignature):
            self.kept.append(message.cosigned)
            return Done()
        assert isinstance(message, Cosign)
        if self.meanwhile is not None:
            self.remember(self.meanwhile)
        note = self.memory.cosign(message.checkpoint, message.proof)
        return Witnessed(note_size(note), note)


async def check(log: Log, cosigned: Log) -> None:
    witness = Region("eu-west")
    witness.remember(cosigned)
    await check_region_log(Region("us-east", log), witness, "acme")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [7, 8, 20])
async def test_a_log_that_continues_what_was_cosigned_is_taken(size: int) -> None:
    await check(Log("leaf", size), cosigned=Log("leaf", 7))


@pytest.mark.parametrize("size", [6, 7, 8, 20])
async def test_a_log_that_was_put_back_is_found_however_far_it_has_grown_since(size: int) -> None:
    with pytest.raises(RolledBackError, match=r"audit log of us-east.*rolled back") as found:
        await check(Log("again", size, shared=5), cosigned=Log("leaf", 7, shared=5))
    assert found.value.code is Code.ROLLED_BACK


async def test_a_log_of_which_nothing_was_cosigned_is_taken() -> None:
    await check_region_log(Region("us-east", Log("leaf", 3)), Region("eu-west"), "acme")  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [9, 12, 15])
async def test_two_agents_that_bring_one_log_at_the_same_time_are_no_alarm(other: int) -> None:
    """The witness went on to `other` leaves between the question how far it is and the checkpoint of 12."""
    owner, witness = Region("us-east", Log("leaf", 12)), Region("eu-west")
    witness.remember(Log("leaf", 7))
    witness.meanwhile = Log("leaf", other)
    await cosign_region_log(owner, witness, "acme")  # type: ignore[arg-type]
    assert owner.kept == []
    witness.meanwhile, owner.log = None, Log("leaf", 16)
    await cosign_region_log(owner, witness, "acme")  # type: ignore[arg-type]
    assert [note_size(each) for each in owner.kept] == [16]


async def test_a_log_that_is_another_one_is_an_alarm_each_time() -> None:
    owner, witness = Region("us-east", Log("again", 12, shared=5)), Region("eu-west")
    witness.remember(Log("leaf", 7, shared=5))
    for _ in range(2):
        with pytest.raises(RolledBackError, match="does not show that its 12 leaves continue the 7"):
            await cosign_region_log(owner, witness, "acme")  # type: ignore[arg-type]
