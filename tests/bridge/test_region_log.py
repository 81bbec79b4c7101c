"""A region's audit log as its bridges see it: compared with what another region cosigned, and brought to be cosigned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from audit_log import REGION_ORIGIN, Link, log_signer, witness_signer

from audit.checkpoint import Checkpoint, note_size
from audit.errors import RolledBackError
from audit.merkle import Tree, consistency_proof, leaf_hash
from audit.note import Note, NoteSigner, Signature, encode_note, parse_note
from audit.trail import Trail
from audit.witness import DiskWitnessStore, MemoryWitnessStore, Witness
from bridge.cosigning import Cosigning
from bridge.failpoint import Failpoints
from bridge.region_log import RACES_MAX, Askings, check_region_log, cosign_region_log
from felix.errors import Code, FelixError, TamperError, UnavailableError
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
LOGS = [log_signer(REGION_ORIGIN).key, log_signer().key]


class Log:
    """Leaves `word 0`, `word 1`, … behind `shared` leaves that every log here has."""

    def __init__(self, word: str, size: int, shared: int = 0) -> None:
        self.signer = log_signer(REGION_ORIGIN)
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
        self.keeps = True
        self.answers: Callable[[bytes], bytes] = lambda cosigned: cosigned
        self.meanwhile: Callable[[], None] = lambda: None
        self.trust = SimpleNamespace(witnesses=tuple(each.key for each in signers))
        self.memory = Witness(signers[0], LOGS, MemoryWitnessStore(), lambda: 1_760_000_000, also=signers[1:])

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
            note = self.memory.last_note(message.origin)
            return Witnessed(0) if note is None else Witnessed(note_size(note), note)
        if isinstance(message, GetCheckpoint):
            assert self.log is not None
            return self._with_kept_lines(self.log.answer(message.from_size))
        if isinstance(message, PutCosignature):
            if self.refuses is not None:
                raise self.refuses
            if self.keeps:
                self.kept.append(message.cosigned)
            return Done()
        assert isinstance(message, Cosign)
        self.meanwhile()
        self.cosigned += 1
        asked = parse_note(message.checkpoint)
        own = Checkpoint.parse(asked.text).origin
        assert {line.name for line in asked.signatures} == {own}, "others' lines are nothing to it"
        note = self.memory.cosign(message.checkpoint, message.proof)
        return Witnessed(note_size(note), self.answers(note))


async def check(log: Log, cosigned: Log) -> None:
    witness = Region("eu-west")
    witness.remember(cosigned)
    await check_region_log(Region("us-east", log), witness, "acme", MemoryWitnessStore())  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [7, 8, 20])
async def test_a_log_that_continues_what_was_cosigned_is_taken(size: int) -> None:
    await check(Log("leaf", size), cosigned=Log("leaf", 7))


@pytest.mark.parametrize("size", [6, 7, 8, 20])
async def test_a_log_that_was_put_back_is_found_however_far_it_has_grown_since(size: int) -> None:
    with pytest.raises(RolledBackError, match=r"audit log of us-east.*rolled back") as found:
        await check(Log("again", size, shared=5), cosigned=Log("leaf", 7, shared=5))
    assert found.value.code is Code.ROLLED_BACK


async def test_a_log_of_which_nothing_was_cosigned_is_taken() -> None:
    await check_region_log(Region("us-east", Log("leaf", 3)), Region("eu-west"), "acme", MemoryWitnessStore())  # type: ignore[arg-type]


@pytest.mark.parametrize("grown", [5, 7, 8, 20])
@pytest.mark.parametrize("forgets", ["all", "the last"])
async def test_what_a_region_forgot_that_it_cosigned_the_bridge_remembers(
    grown: int, forgets: str, tmp_path: Path
) -> None:
    """Both were put back to a backup: the log, and what the other region remembers of it. The log that went on is taken."""
    store = DiskWitnessStore(tmp_path / "regions")
    log, witness = Log("leaf", 7, shared=5), Region("eu-west")
    await cosign_region_log(Region("us-east", log), witness, "acme", {}, 0, store)  # type: ignore[arg-type]
    forgetful = Region("eu-west")
    if forgets == "the last":
        forgetful.remember(Log("leaf", 5, shared=5))
    await check_region_log(Region("us-east", Log("leaf", 9, shared=5)), forgetful, "acme", store)  # type: ignore[arg-type]
    back = Log("again", grown, shared=5)
    if grown > 7:
        forgetful.remember(back)
    with pytest.raises(RolledBackError, match="eu-west cosigned 7 leaves of the audit log of us-east"):
        await check_region_log(Region("us-east", back), forgetful, "acme", store)  # type: ignore[arg-type]
    # An agent that begins with a log that is cosigned already remembers it, too; and nothing smaller later.
    late = MemoryWitnessStore()
    for size in (7, 6):
        owner, other = Region("us-east", Log("leaf", size, shared=5)), Region("eu-west")
        owner.kept.append(other.remember(owner.log))  # type: ignore[arg-type]
        await cosign_region_log(owner, other, "acme", {}, 0, late)  # type: ignore[arg-type]
        assert note_size(late.last("us-east.acme/audit eu-west") or b"") == 7


async def look(owner: Region, witness: Region, askings: Askings, now_ms: int = 0) -> None:
    await cosign_region_log(owner, witness, "acme", askings, now_ms, MemoryWitnessStore())  # type: ignore[arg-type]


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
    owner, witness, askings = Region("us-east", Log("leaf", 12)), Region("eu-west"), Askings()
    witness.remember(Log("leaf", 12))
    await look(owner, witness, askings)
    assert shown(owner) == [(12, 1)] and witness.cosigned == 1
    for known in (askings, Askings()):
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
    owner, witness, askings = Region("us-east", Log("leaf", 12)), Region("eu-west"), Askings()
    owner.refuses = UnavailableError("It was asked to keep cosignatures too often.", code=Code.LIMIT_RATE)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await look(owner, witness, askings)
    owner.refuses = None
    await look(owner, witness, askings)
    assert shown(owner) == [(12, 1)] and witness.cosigned == 3


async def failures(
    owner: Region, witness: Region, askings: Askings, until_s: int, from_s: int = 0
) -> list[str]:
    """What each look says, every 3 s."""
    found = []
    for now_s in range(from_s, until_s, 3):
        try:
            await look(owner, witness, askings, now_s * 1000)
            found.append("")
        except FelixError as error:
            found.append(error.sentence)
    return found


async def test_a_key_of_a_bundle_that_gives_no_line_is_a_failure_at_each_look_and_is_asked_for_at_a_pace() -> (
    None
):
    owner, witness, askings = Region("us-east", Log("leaf", 12)), Region("eu-west"), Askings()
    witness.trust.witnesses = (EU.key, EU_PQ.key)
    found = await failures(owner, witness, askings, 600)
    assert all(f"{EU_PQ.key.key_id.hex()} (ML-DSA-44)" in each for each in found)
    assert not any(EU.key.key_id.hex() in each for each in found), "that one is there"
    assert witness.cosigned == 3 + 49, "after 0, 3 and 9 s, and then each 12 s"
    # The next checkpoint gets at once what lines there are.
    owner.log = Log("leaf", 16)
    assert await failures(owner, witness, askings, 3) != [""]
    assert shown(owner)[-1] == (16, 1) and witness.cosigned == 53
    # The region signs with both now.
    witness.memory = Witness(EU, LOGS, witness.memory._store, lambda: 1, also=[EU_PQ])
    assert (await failures(owner, witness, askings, 9))[1:] == ["", ""]
    assert shown(owner)[-1] == (16, 2) and witness.cosigned == 54


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (lambda first, now: b"", "answered without a cosignature"),
        (lambda first, now: first, "answered with another checkpoint"),
        (lambda first, now: b"no note", "signed note"),
        (lambda first, now: encode_note(parse_note(now).signed_by("nobody")._replace(signatures=forged(now))),
         "without a line that holds of"),
    ],
)  # fmt: skip
async def test_what_is_no_cosignature_of_this_checkpoint_is_a_failure(
    answers: Callable[[bytes, bytes], bytes], says: str
) -> None:
    owner, witness, askings = Region("us-east", Log("leaf", 7)), Region("eu-west"), Askings()
    first = witness.remember(Log("leaf", 7))
    owner.log = Log("leaf", 12)
    witness.answers = lambda now: answers(first, now)
    found = await failures(owner, witness, askings, 600)
    assert all(says in each for each in found) and witness.cosigned == 3 + 49
    witness.answers = lambda now: now
    assert (await failures(owner, witness, askings, 666, from_s=600))[-1] == "" and shown(owner)[-1] == (
        12,
        1,
    )


def forged(cosigned: bytes) -> tuple[Signature, ...]:
    lines = parse_note(cosigned).signatures
    return tuple(
        line._replace(data=bytes(len(line.data))) if line.name == EU.key.name else line for line in lines
    )


async def test_a_log_that_takes_cosignatures_and_shows_none_is_a_failure() -> None:
    owner, witness, askings = Region("us-east", Log("leaf", 12)), Region("eu-west"), Askings()
    owner.keeps = False
    found = await failures(owner, witness, askings, 600)
    assert found[0] == "", "whether it kept what it took, it shows at the next look"
    assert all("took the cosignature of eu-west, and shows no line" in each for each in found[1:])
    assert witness.cosigned == 1 + 3 + 48
    owner.keeps = True
    assert (await failures(owner, witness, askings, 666, from_s=600))[-1] == ""


@pytest.mark.parametrize("wrong", ["line", "origin", "size"])
async def test_a_checkpoint_without_a_line_of_its_log_is_refused_before_a_witness_is_asked(
    wrong: str,
) -> None:
    owner, witness = Region("us-east", Log("leaf", 12)), Region("eu-west")
    answer = Log("leaf", 12).answer(0)
    note = parse_note(answer.checkpoint)
    if wrong == "line":
        strange = tuple(line._replace(name="someone") for line in note.signatures)
        answer = msgspec.structs.replace(answer, checkpoint=encode_note(note._replace(signatures=strange)))
    elif wrong == "origin":
        text = note.text.replace("us-east", "ap-south")
        answer = msgspec.structs.replace(answer, checkpoint=encode_note(note._replace(text=text)))
    else:
        answer = msgspec.structs.replace(answer, size=11)
    owner.log.answer = lambda from_size: answer  # type: ignore[union-attr, method-assign]
    with pytest.raises(TamperError, match=r"gave one that is not of 1[12] leaves"):
        await look(owner, witness, {})
    assert not witness.cosigned


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


def cosigning_of(trail: Trail, now: Sequence[float] = (0.0,)) -> Cosigning:
    """Of an agent that has this log; `now`: the monotonic clock."""
    context: Any = SimpleNamespace(
        trail=trail,
        failpoints=Failpoints(),
        require_whole=lambda region: None,
        monotonic_ms=lambda: int(now[0] * 1000),
    )
    nobody: Any = None
    return Cosigning(context, {}, "acme", nobody, nobody, nobody)


async def test_an_egress_log_gets_what_of_its_cosignature_somebody_left_out(tmp_path: Path) -> None:
    """The agent ended after the witness had cosigned, or another one brought one line of two."""
    with closing(Trail.open(tmp_path, log_signer(), witnesses=[EU.key, EU_PQ.key])) as trail:
        ended = threading.Event()
        trail.append_nowait([Link().grant()], lambda first, error: ended.set())
        assert ended.wait(30)
        cosigning, witness = cosigning_of(trail), Region("eu-west", signers=(EU, EU_PQ))
        note = parse_note(witness.memory.cosign(trail.publish(), []))
        lines = tuple(line for line in note.signatures if line.key_id != EU_PQ.key.key_id)
        trail.add_cosigned(encode_note(note._replace(signatures=lines)))
        witness.trust.witnesses = (EU.key, EU_PQ.key)
        for _ in range(2):
            await cosigning._cosign_egress(witness, False)  # type: ignore[arg-type]
            assert witness.cosigned == 1
            (held,) = trail.checkpoints.cosigned()
            assert {by.key for by in held.cosigned} == {EU.key, EU_PQ.key}


def one_line(cosigned: bytes) -> bytes:
    note = parse_note(cosigned)
    return encode_note(
        note._replace(signatures=tuple(line for line in note.signatures if line.key_id != EU_PQ.key.key_id))
    )


@pytest.mark.parametrize(
    ("answers", "says", "kept"),
    [
        (lambda now: b"", "answered without a cosignature", 0),
        (one_line, f"{EU_PQ.key.key_id.hex()} \\(ML-DSA-44\\)", 1),
    ],
)
async def test_an_egress_log_that_lacks_a_line_after_the_answer_is_a_failure_until_it_has_it(
    tmp_path: Path, answers: Callable[[bytes], bytes], says: str, kept: int
) -> None:
    now = [0.0]
    with closing(Trail.open(tmp_path, log_signer(), witnesses=[EU.key, EU_PQ.key])) as trail:
        ended = threading.Event()
        trail.append_nowait([Link().grant()], lambda first, error: ended.set())
        assert ended.wait(30)
        cosigning, witness = cosigning_of(trail, now), Region("eu-west", signers=(EU, EU_PQ))
        witness.answers = answers
        for now[0] in range(0, 60, 3):
            with pytest.raises(TamperError, match=says):
                await cosigning._cosign_egress(witness, False)  # type: ignore[arg-type]
        assert witness.cosigned == 7, "after 0, 3 and 9 s, and then each 12 s"
        assert sum(len(each.cosigned) for each in trail.checkpoints.cosigned()) == kept
        witness.answers = lambda now: now
        now[0] = 999
        await cosigning._cosign_egress(witness, False)  # type: ignore[arg-type]
        (held,) = trail.checkpoints.cosigned()
        assert {by.key for by in held.cosigned} == {EU.key, EU_PQ.key}
