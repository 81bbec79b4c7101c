"""A region's audit log as its bridges see it: compared with what another region cosigned, and brought to be cosigned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from audit_log import Link, log_signer, witness_signer

from audit.checkpoint import Checkpoint, note_size
from audit.errors import RolledBackError
from audit.merkle import Tree, consistency_proof, leaf_hash
from audit.note import Note, NoteSigner, encode_note, parse_note
from audit.trail import Trail
from audit.witness import MemoryWitnessStore, Witness
from bridge.agent import Agent
from bridge.failpoint import Failpoints
from bridge.region_log import RACES_MAX, Brought, check_region_log, cosign_region_log
from felix.errors import Code, FelixError, UnavailableError
from felix.messages import (
    CheckpointAnswer,
    Cosign,
    Done,
    GetCheckpoint,
    PutCosignature,
    Witnessed,
    WitnessedSize,
)
from keys.post_quantum import MlDsaKey

EU = witness_signer()
EU_PQ = NoteSigner.from_ml_dsa(EU.key.name, MlDsaKey.from_seed(b"e" * 32))


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
    """What a broker answers: the owner of a log, the witness of one, or both. `meanwhile` happens before a cosignature, and may be another thing each time."""

    def __init__(self, name: str, log: Log | None = None, signers: tuple[NoteSigner, ...] = (EU,)) -> None:
        self.region, self.log = name, log
        self.kept: list[bytes] = []
        self.cosigned = 0
        self.refuses: FelixError | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self.trust = SimpleNamespace(witnesses=tuple(each.key for each in signers))
        self.memory = Witness(
            signers[0], [log_signer().key], MemoryWitnessStore(), lambda: 1_760_000_000, also=signers[1:]
        )

    def connection(self) -> Any:
        return SimpleNamespace(request=self.request)

    def remember(self, log: Log) -> bytes:
        last = self.memory.last(log.signer.key.name)
        answer = log.answer(0 if last is None else last.size)
        return self.memory.cosign(answer.checkpoint, answer.proof)

    def _with_kept_lines(self, answer: CheckpointAnswer) -> CheckpointAnswer:
        note = parse_note(answer.checkpoint)
        same = [each for kept in self.kept if (each := parse_note(kept)).text == note.text]
        lines = [line for each in same for line in each.signatures]
        return msgspec.structs.replace(answer, checkpoint=encode_note(note.with_signatures(lines)))

    async def request(self, message: object) -> object:
        if isinstance(message, WitnessedSize):
            note = self.memory.last_note(log_signer().key.name)
            return Witnessed(0) if note is None else Witnessed(note_size(note), note)
        if isinstance(message, GetCheckpoint):
            assert self.log is not None
            return self._with_kept_lines(self.log.answer(message.from_size))
        if isinstance(message, PutCosignature):
            if self.refuses is not None:
                raise self.refuses
            self.kept.append(message.cosigned)
            return Done()
        assert isinstance(message, Cosign)
        self.meanwhile()
        self.cosigned += 1
        assert {line.name for line in parse_note(message.checkpoint).signatures} == {log_signer().key.name}
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


async def look(owner: Region, witness: Region, brought: Brought) -> None:
    await cosign_region_log(owner, witness, "acme", brought)  # type: ignore[arg-type]


def shown(owner: Region) -> list[tuple[int, int]]:
    """Of each that was brought, its size, and how many have cosigned it."""
    return [(note_size(each), len(parse_note(each).signatures) - 1) for each in owner.kept]


@pytest.mark.parametrize("other", [9, 12, 15])
async def test_a_checkpoint_that_another_agent_brought_in_the_same_moment_is_brought_again_at_once(
    other: int,
) -> None:
    """The witness went on to `other` leaves between the question how far it is and the checkpoint of 12. Nobody brings the log that cosignature."""
    owner, witness = Region("us-east", Log("leaf", 12)), Region("eu-west")
    witness.remember(Log("leaf", 7))

    def meanwhile() -> None:
        owner.log = Log("leaf", max(12, other))
        witness.remember(Log("leaf", other))
        witness.meanwhile = lambda: None

    witness.meanwhile = meanwhile
    await look(owner, witness, {})
    assert shown(owner) == [(max(12, other), 1)]


async def test_who_is_overtaken_each_time_says_so_and_stops() -> None:
    owner, witness, sizes = Region("us-east", Log("leaf", 12)), Region("eu-west"), iter(range(13, 99))

    def meanwhile() -> None:
        owner.log = Log("leaf", next(sizes))
        witness.remember(owner.log)

    witness.meanwhile = meanwhile
    with pytest.raises(UnavailableError, match="eu-west has cosigned further leaves") as raised:
        await look(owner, witness, {})
    assert raised.value.code is Code.CONFLICT and witness.cosigned == RACES_MAX


async def test_a_cosignature_that_nobody_brought_back_is_brought_and_then_not_again() -> None:
    owner, witness, brought = Region("us-east", Log("leaf", 12)), Region("eu-west"), Brought()
    witness.remember(Log("leaf", 12))
    await look(owner, witness, brought)
    assert shown(owner) == [(12, 1)] and witness.cosigned == 1
    for known in (brought, Brought()):
        await look(owner, witness, known)
    assert witness.cosigned == 1, "the line is there, whoever looks"


async def test_one_line_of_a_witness_does_not_stand_for_its_others() -> None:
    owner, witness = Region("us-east", Log("leaf", 12)), Region("eu-west", signers=(EU, EU_PQ))
    note = parse_note(witness.remember(Log("leaf", 12)))
    owner.kept.append(
        encode_note(
            note._replace(
                signatures=tuple(line for line in note.signatures if line.key_id != EU_PQ.key.key_id)
            )
        )
    )
    await look(owner, witness, {})
    assert shown(owner) == [(12, 1), (12, 2)]
    await look(owner, witness, {})
    assert witness.cosigned == 1


async def test_a_line_that_does_not_hold_stands_for_none() -> None:
    owner, witness = Region("us-east", Log("leaf", 12)), Region("eu-west")
    note = parse_note(witness.remember(Log("leaf", 12)))
    forged = [line._replace(data=bytes(len(line.data))) for line in note.signatures]
    owner.kept.append(encode_note(note._replace(signatures=(note.signatures[0], *forged[1:]))))
    await look(owner, witness, {})
    assert witness.cosigned == 1


async def test_a_cosignature_that_is_not_taken_is_brought_at_the_next_look() -> None:
    owner, witness, brought = Region("us-east", Log("leaf", 12)), Region("eu-west"), Brought()
    owner.refuses = UnavailableError("It was asked to keep cosignatures too often.", code=Code.LIMIT_RATE)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await look(owner, witness, brought)
    owner.refuses = None
    await look(owner, witness, brought)
    assert shown(owner) == [(12, 1)] and witness.cosigned == 3


async def test_a_key_that_a_bundle_names_and_nobody_signs_with_is_asked_for_once_a_checkpoint() -> None:
    owner, witness, brought = Region("us-east", Log("leaf", 12)), Region("eu-west"), Brought()
    witness.trust.witnesses = (EU.key, EU_PQ.key)
    for _ in range(3):
        await look(owner, witness, brought)
    assert witness.cosigned == 1
    owner.log = Log("leaf", 16)
    for _ in range(3):
        await look(owner, witness, brought)
    assert witness.cosigned == 2 and shown(owner) == [(12, 1), (16, 1)]


async def test_a_log_that_is_another_one_is_an_alarm_each_time() -> None:
    owner, witness = Region("us-east", Log("again", 12, shared=5)), Region("eu-west")
    witness.remember(Log("leaf", 7, shared=5))
    for _ in range(2):
        with pytest.raises(RolledBackError, match="does not show that its 12 leaves continue the 7"):
            await look(owner, witness, {})


async def test_a_log_with_another_root_at_the_size_that_was_cosigned_is_an_alarm() -> None:
    owner, witness = Region("us-east", Log("again", 12, shared=5)), Region("eu-west")
    witness.remember(Log("leaf", 12, shared=5))
    with pytest.raises(RolledBackError, match="two roots for 12 leaves"):
        await look(owner, witness, {})


async def test_an_egress_log_gets_what_of_its_cosignature_somebody_left_out(tmp_path: Path) -> None:
    """The agent ended after the witness had cosigned, or another one brought one line of two; and the bundle names a key that nobody signs with."""
    with closing(Trail.open(tmp_path, log_signer(), witnesses=[EU.key, EU_PQ.key])) as trail:
        ended = threading.Event()
        trail.append_nowait([Link().grant()], lambda first, error: ended.set())
        assert ended.wait(30)
        agent, witness = object.__new__(Agent), Region("eu-west", signers=(EU, EU_PQ))
        agent.context = SimpleNamespace(trail=trail, failpoints=Failpoints())  # type: ignore[assignment]
        agent._brought = {}
        note = parse_note(witness.memory.cosign(trail.publish(), []))
        lines = tuple(line for line in note.signatures if line.key_id != EU_PQ.key.key_id)
        trail.add_cosigned(encode_note(note._replace(signatures=lines)))
        for former in ((), (witness_signer("us-east.acme/witness").key,)):
            witness.trust.witnesses = (EU.key, EU_PQ.key, *former)
            for _ in range(2):
                await agent._cosign_egress(witness, False)  # type: ignore[arg-type]
            assert witness.cosigned == 1
            (held,) = trail.checkpoints.cosigned()
            assert {by.key for by in held.cosigned} == {EU.key, EU_PQ.key}
