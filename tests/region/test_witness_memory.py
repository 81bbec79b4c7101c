"""A witness's memory in the metadata store, and beside it in files: whichever of the two is put back, no history is signed a second time."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from audit_log import EGRESS_ORIGIN, colliding, witness_signer
from region_home import make_region, running
from version_0_1 import lay_out
from witness_logs import Log

from audit.note import Algorithm, NoteSigner, VerifierKey
from audit.witness import DiskWitnessStore, ForkError, Witness
from felix.batch import Batch, decode_payloads
from felix.errors import Code, FelixError, TamperError, UnavailableError
from felix.runtime.real import REAL
from region.evidence.audit_log import CHECKPOINTS, CHECKPOINTS_BYTES, AuditLog, Leading, _Checkpoint
from region.evidence.witness_memory import WitnessMemory
from region.metadata.memory import MemoryStore
from region.metadata.port import OutcomeUnknownError
from region.metadata.records import Keys
from region.metadata.transaction import Delete, Put, TransactResult

NOW_S = 1_760_000_000


class Broker:
    """What cosigns in one broker's process."""

    def __init__(self, store: MemoryStore, folder: Path, log: Log, *others: Log) -> None:
        self.memory = WitnessMemory(store, "eu-west", DiskWitnessStore(folder))
        known = [each.signer.key for each in (log, *others)]
        self.witness = Witness(witness_signer(), known, self.memory, lambda: NOW_S)
        self.memory.keys_of = self.witness.keys_of
        self.origin = log.origin

    async def cosign(self, log: Log, size: int, old: int = 0) -> bytes:
        log.head(size)
        proof = log.proof(old, size) if old else []
        return await asyncio.to_thread(self.witness.cosign, log.note(size), proof)

    async def size(self) -> int:
        last = await asyncio.to_thread(self.witness.last, self.origin)
        return last.size if last else 0


class Stream:
    """The stream of the audit log, which brokers lead in turn."""

    def __init__(self) -> None:
        self.notes: list[bytes] = []
        self.answers = True
        self.commits = True

    def lead(self, broker: Broker) -> None:
        for note in self.notes:
            broker.memory.take(note)
        broker.memory.copies = Led(self, broker.memory)


class Led:
    """The stream as its home writes it."""

    def __init__(self, stream: Stream, memory: WitnessMemory) -> None:
        self.stream, self.memory = stream, memory
        self.notes: dict[str, bytes] = {}

    def given(self, origin: str) -> bytes | None:
        return self.notes.get(origin)

    def copy(self, origin: str, before: bytes | None, note: bytes) -> None:
        assert before == (self.notes.get(origin) or self.memory.copied().get(origin))
        self.notes[origin] = note
        if self.stream.commits:
            self.stream.notes.append(note)
        if not self.stream.answers:
            raise UnavailableError("The answer was lost.")


def parting(at: int) -> tuple[Log, Log]:
    """A log, and another history of it behind so many leaves."""
    log, fork = Log(), Log()
    log.head(at)
    fork.head(at)
    fork.word = b"fork"
    return log, fork


def file_of(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


async def test_what_was_cosigned_is_in_the_store_and_in_the_folder(tmp_path: Path) -> None:
    store, log = MemoryStore(), Log()
    await Broker(store, tmp_path / "a", log).cosign(log, 10)
    assert await Broker(store, tmp_path / "lost", log).size() == 10, "the folder is gone, the store remembers"
    assert await Broker(MemoryStore(), tmp_path / "a", log).size() == 10


async def test_an_old_file_put_back_does_not_roll_the_witness_back(tmp_path: Path) -> None:
    store, log = MemoryStore(), Log()
    broker = Broker(store, tmp_path, log)
    await broker.cosign(log, 10)
    old = file_of(tmp_path).read_bytes()
    await broker.cosign(log, 20, 10)
    file_of(tmp_path).write_bytes(old)
    again = Broker(store, tmp_path, log)
    await asyncio.to_thread(again.memory.move_in)
    assert await again.size() == 20
    with pytest.raises(ForkError):
        await again.cosign(Log(word=b"fork"), 15, 10)
    await again.cosign(log, 30, 20)
    assert b"\n30\n" in file_of(tmp_path).read_bytes(), "the file has caught up"


async def test_an_old_store_put_back_does_not_roll_the_witness_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, old = Log(), MemoryStore()
    await Broker(old, tmp_path / "copy", log).cosign(log, 10)
    await Broker(MemoryStore(), tmp_path / "a", log).cosign(log, 20)
    broker = Broker(old, tmp_path / "a", log)
    with caplog.at_level(logging.WARNING):
        assert await broker.size() == 20
    assert "was put back to an earlier state" in caplog.text
    with pytest.raises(ForkError):
        await broker.cosign(Log(word=b"fork"), 15, 10)
    await asyncio.to_thread(broker.memory.move_in)
    assert await Broker(old, tmp_path / "lost", log).size() == 20, "and the store knows it again"


async def test_two_brokers_with_one_store_cosign_one_history(tmp_path: Path) -> None:
    store, log = MemoryStore(), Log()
    first, second = Broker(store, tmp_path / "a", log), Broker(store, tmp_path / "b", log)
    fork = Log(word=b"fork")
    results = await asyncio.gather(first.cosign(log, 20), second.cosign(fork, 25), return_exceptions=True)
    refused = [one for one in results if isinstance(one, FelixError)]
    assert len(refused) == 1, "not both, and not none"
    if refused[0].code is Code.CONFLICT:
        with pytest.raises(ForkError):
            await (second if results[1] is refused[0] else first).cosign(
                fork if results[1] is refused[0] else log, 30
            )


async def test_store_and_file_that_contradict_each_other_stop_the_cosigning(tmp_path: Path) -> None:
    store, log, fork = MemoryStore(), Log(), Log(word=b"fork")
    await Broker(store, tmp_path / "a", log).cosign(log, 10)
    await Broker(MemoryStore(), tmp_path / "b", log).cosign(fork, 10)
    both = Broker(store, tmp_path / "b", log)
    await asyncio.to_thread(both.memory.move_in)
    with pytest.raises(ForkError, match="two roots for 10 leaves"):
        await both.cosign(log, 20, 10)


@pytest.mark.parametrize("applied", [True, False])
async def test_nothing_is_signed_where_nobody_knows_whether_it_is_remembered(
    tmp_path: Path, applied: bool
) -> None:
    class Silent(MemoryStore):
        """Loses the answer to the first write."""

        silent = True

        async def transact(self, compares: object, writes: object) -> TransactResult:
            if not self.silent:
                return await super().transact(compares, writes)  # type: ignore[arg-type]
            self.silent = False
            if applied:
                await super().transact(compares, writes)  # type: ignore[arg-type]
            raise OutcomeUnknownError("The answer was lost.")

    store, log = Silent(), Log()
    broker = Broker(store, tmp_path, log)
    with pytest.raises(OutcomeUnknownError):
        await broker.cosign(log, 10)
    assert await broker.size() == (10 if applied else 0)
    await broker.cosign(log, 10)
    assert await broker.size() == 10
    with pytest.raises(ForkError):
        await broker.cosign(Log(word=b"fork"), 10)


async def test_with_the_store_away_nothing_new_is_cosigned_and_the_last_note_is_still_shown(
    tmp_path: Path,
) -> None:
    store, log = MemoryStore(), Log()
    broker = Broker(store, tmp_path, log)
    await broker.cosign(log, 10)
    await store.close()
    assert await broker.size() == 10
    with pytest.raises(UnavailableError):
        await broker.cosign(log, 20, 10)
    assert await broker.size() == 10


async def test_a_damaged_file_is_no_memory_of_nothing(tmp_path: Path) -> None:
    store, log = MemoryStore(), Log()
    broker = Broker(store, tmp_path, log)
    await broker.cosign(log, 10)
    file_of(tmp_path).write_bytes(b"torn")
    again = Broker(store, tmp_path, log)
    await asyncio.to_thread(again.memory.move_in)
    with pytest.raises(TamperError):
        await again.cosign(log, 20, 10)


async def test_a_region_of_version_0_1_takes_its_memory_into_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = DiskWitnessStore(lay_out(tmp_path) / "us-east" / "data" / "witness")
    (note,) = held.notes()
    origin = note.decode().partition("\n")[0]
    monkeypatch.setenv("FELIX_HOME", str(tmp_path / "new"))
    folder = make_region(tmp_path / "new", "us-east")
    old = DiskWitnessStore(folder.root / "data" / "witness")
    old.swap(origin, None, note)
    async with running(folder):
        pass
    file_of(folder.root / "data" / "witness").unlink()
    async with running(folder) as node:
        assert node.services.governance.witnessing.witness.origins == []
        known = node.services.governance.witnessing.witness.last_note
        assert await asyncio.to_thread(known, origin) == note


@pytest.mark.parametrize("is_deleted", [False, True], ids=["an-earlier-note", "deleted"])
@pytest.mark.parametrize("who", ["the-same", "another"])
async def test_no_home_signs_a_second_history_when_the_stores_record_is_put_back(
    tmp_path: Path, is_deleted: bool, who: str
) -> None:
    store, stream = MemoryStore(), Stream()
    log, fork = parting(3)
    first, second = Broker(store, tmp_path / "a", log), Broker(store, tmp_path / "b", log)
    stream.lead(first)
    await first.cosign(log, 3)
    key = Keys("eu-west").witness(sha256(log.origin.encode()).hexdigest())
    early = await store.get(key)
    assert early is not None
    await first.cosign(log, 6, 3)
    await store.transact([], [Delete(key) if is_deleted else Put(key, early.value)])
    home = first
    if who == "another":
        home = second
        stream.lead(second)
    for old in (0, 3):
        with pytest.raises(ForkError):
            await home.cosign(fork, 6, old)
    assert (
        await home.size() == 6
        and b"\n6\n" in file_of(tmp_path / "b" if home is second else tmp_path / "a").read_bytes()
    )
    await home.cosign(log, 6)
    again = await store.get(key)
    assert again is not None and b"\n6\n" in again.value, "the store knows it again"


async def test_a_note_of_another_history_that_is_put_into_the_store_does_not_count(tmp_path: Path) -> None:
    store, stream = MemoryStore(), Stream()
    log, fork = parting(3)
    home = Broker(store, tmp_path, log)
    stream.lead(home)
    await home.cosign(log, 6)
    key = Keys("eu-west").witness(sha256(log.origin.encode()).hexdigest())
    await store.transact([], [Put(key, fork.note(8))])
    assert await home.size() == 6
    with pytest.raises(ForkError):
        await home.cosign(fork, 9, 8)
    await home.cosign(log, 7, 6)


@pytest.mark.parametrize("commits", [True, False])
async def test_nothing_is_signed_or_replaced_that_the_copies_may_or_may_not_have(
    tmp_path: Path, commits: bool
) -> None:
    store, stream = MemoryStore(), Stream()
    log, fork = parting(3)
    home, later = Broker(store, tmp_path / "a", log), Broker(store, tmp_path / "b", log)
    stream.lead(home)
    await home.cosign(log, 3)
    stream.answers, stream.commits = False, commits
    with pytest.raises(UnavailableError):
        await home.cosign(log, 6, 3)
    stream.answers = stream.commits = True
    with pytest.raises(ForkError):
        # A shorter one: if both were in the stream, nobody could tell which of them was signed.
        await home.cosign(fork, 5, 3)
    stream.lead(later)
    assert await later.size() == (6 if commits else 3)
    await home.cosign(log, 6)
    assert stream.notes[-1] == log.note(6)


async def test_what_a_folder_alone_remembers_is_to_be_brought_into_the_stream(tmp_path: Path) -> None:
    log, stream = Log(), Stream()
    await Broker(MemoryStore(), tmp_path, log).cosign(log, 10)
    home = Broker(MemoryStore(), tmp_path, log)
    stream.lead(home)
    assert home.memory.uncopied() == [log.note(10)]
    await home.cosign(log, 10)
    assert stream.notes == [log.note(10)], "and is, at the latest before it is signed again"
    assert home.memory.uncopied() == []


async def test_a_file_and_a_stream_that_contradict_each_other_stop_the_cosigning_and_nothing_else(
    tmp_path: Path,
) -> None:
    log, fork = parting(3)
    await Broker(MemoryStore(), tmp_path, log).cosign(log, 6)
    store, stream = MemoryStore(), Stream()
    stream.notes = [fork.note(6)]
    home = Broker(store, tmp_path, log)
    stream.lead(home)
    for each in (log, fork):
        with pytest.raises(ForkError, match="two roots for 6 leaves") as refused:
            await home.cosign(each, 7, 6)
        assert {refused.value.cosigned, refused.value.offered} == {log.note(6), fork.note(6)}


# -- while the stream lets go of checkpoints -----------------------------------------------------------

OWN = b"own.example/log\n9\nx\n"


class Checkpoints:
    """The log of checkpoints, as a broker that is home writes it."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.disk_bytes = 0
        self.begin = 0
        self.commits = asyncio.Event()
        """until it is set nothing is committed; the order is that of the calls"""
        self.commits.set()

    @property
    def high_watermark(self) -> int:
        return len(self.payloads)

    async def append(self, batch: Batch) -> None:
        self.payloads += map(bytes, decode_payloads(batch))
        await self.commits.wait()

    async def trim(self, end: int) -> None:
        self.begin, self.disk_bytes = end, 0

    def put(self, note: bytes) -> None:
        self.payloads.append(msgspec.msgpack.encode(_Checkpoint(note, True, witnessed=True)))

    def lead(self, broker: Broker) -> Leading:
        leading = Leading(cast(Any, {CHECKPOINTS: self}), REAL, broker.memory)
        broker.memory.copies = cast(Any, SimpleNamespace(given=leading.given, copy=leading.keep_witnessed))
        return leading


class Reading(AuditLog):
    """A broker's reading of that log, from one place on."""

    def __init__(self, checkpoints: Checkpoints, broker: Broker) -> None:
        trail = SimpleNamespace(
            checkpoint=lambda: OWN,
            checkpoints=SimpleNamespace(read=lambda note: note),
            status=lambda: SimpleNamespace(durable=0),
            check_continues=lambda note: None,
        )
        nothing = cast(Any, lambda *given: None)
        super().__init__(
            cast(Any, SimpleNamespace(incarnation="00" * 16, config=SimpleNamespace(min_in_sync=1))),
            cast(Any, SimpleNamespace(on_change=nothing)),
            nothing, cast(Any, trail), nothing, nothing, nothing,
            has_key=nothing, taken=nothing, refusal=nothing, see_log_key=nothing, may_sign=nothing, became_home=nothing, witnessed=broker.memory, runtime=REAL,
        )  # fmt: skip
        self.checkpoints, self.at = checkpoints, 0

    async def _payloads(self, kind: int) -> AsyncIterator[bytes]:
        end = len(self.checkpoints.payloads)
        for payload in self.checkpoints.payloads[self.at : end]:
            yield payload
        self.at = end


async def test_a_checkpoint_that_is_cosigned_while_others_are_let_go_of_is_the_last_one_of_its_log(
    tmp_path: Path,
) -> None:
    store, checkpoints = MemoryStore(), Checkpoints()
    log, fork = parting(10)
    other = Log("log.example/0", seed=2)
    home, follower = (Broker(store, tmp_path / name, other, log) for name in "ab")
    leading = checkpoints.lead(home)
    await asyncio.to_thread(leading.keep_note, OWN)
    await home.cosign(other, 5)
    await home.cosign(log, 10)
    await asyncio.to_thread(leading.keep_cosigned, OWN + b"1")
    before = len(checkpoints.payloads)
    checkpoints.disk_bytes = CHECKPOINTS_BYTES + 1
    checkpoints.commits.clear()
    letting_go = asyncio.create_task(leading.trim())
    while len(checkpoints.payloads) == before:  # noqa: ASYNC110
        await asyncio.sleep(0)
    cosigning = asyncio.create_task(home.cosign(log, 20, 10))
    cosigned = asyncio.create_task(asyncio.to_thread(leading.keep_cosigned, OWN + b"2"))
    async with asyncio.timeout(30):
        while len(checkpoints.payloads) < before + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not cosigning.done(), "it is given to the stream, and not committed"
    checkpoints.commits.set()
    await asyncio.gather(letting_go, cosigning, cosigned)
    assert checkpoints.begin == before, "all before is let go of"
    left = [msgspec.msgpack.decode(each, type=_Checkpoint) for each in checkpoints.payloads[before:]]
    assert [each.note for each in left if each.witnessed and each.note.startswith(log.origin.encode())] == [
        log.note(20), log.note(20),
    ]  # fmt: skip
    assert [each.note for each in left if each.cosigned and not each.witnessed] == [OWN + b"2", OWN + b"2"]
    reading = Reading(checkpoints, follower)
    reading.at = before
    await reading._read_checkpoints()
    checkpoints.lead(follower)
    assert await follower.size() == 5 and follower.memory.copied()[log.origin] == log.note(20)
    with pytest.raises(ForkError):
        await follower.cosign(fork, 20, 10)


async def test_of_two_notes_of_one_log_the_larger_counts_wherever_it_stands(tmp_path: Path) -> None:
    store, checkpoints = MemoryStore(), Checkpoints()
    log, fork = parting(10)
    broker = Broker(store, tmp_path, log)
    for size in (10, 20, 10):
        checkpoints.put(log.note(size))
    await Reading(checkpoints, broker)._read_checkpoints()
    broker.memory.take(log.note(10))
    assert broker.memory.copied() == {log.origin: log.note(20)}
    assert file_of(tmp_path).read_bytes() == log.note(20)
    checkpoints.lead(broker)
    with pytest.raises(ForkError):
        await broker.cosign(fork, 20, 10)
    await broker.cosign(log, 21, 20)


@pytest.mark.parametrize("to_size", [None, 15])
async def test_two_roots_for_one_size_in_the_stream_are_found_in_one_reading(
    tmp_path: Path, to_size: int | None
) -> None:
    """Also where the log's region says by now that the key had ended before."""
    log, fork = parting(10)
    checkpoints, broker = Checkpoints(), Broker(MemoryStore(), tmp_path, log)
    key = log.signer.key
    broker.memory.keys_of = lambda _: (VerifierKey(key.name, key.algorithm, key.public, 0, to_size),)
    for each in (log, fork):
        checkpoints.put(each.note(20))
    await Reading(checkpoints, broker)._read_checkpoints()
    checkpoints.lead(broker)
    with pytest.raises(ForkError, match="two roots for 20 leaves") as refused:
        await broker.cosign(log, 21, 20)
    assert {refused.value.cosigned, refused.value.offered} == {log.note(20), fork.note(20)}


def changed(log: Log, line: int, text: bytes) -> bytes:
    """A note of 10 leaves with another line, under the log's signature of the true one."""
    lines = log.note(10).split(b"\n")
    lines[line] = text
    return b"\n".join(lines)


FORGED = {
    "garbage": lambda log: b"garbage",
    "empty": lambda log: b"",
    "not-utf-8": lambda log: b"\xff\xfe\n1\nx\n\n",
    "of-another-log": lambda log: changed(log, 0, b"log.example/9"),
    "another-root": lambda log: changed(log, 2, b64encode(bytes(32))),
    "a-larger-size": lambda log: changed(log, 1, b"1099511627776"),
}
UNKNOWN = {"by-another-key": lambda log: Log(word=b"fork", seed=9).note(10)}
"""Whose signature cannot be refuted here."""


@pytest.mark.parametrize("what", sorted(FORGED.keys() - {"of-another-log"}))
@pytest.mark.parametrize("is_apart", [False, True], ids=["in-one-reading", "in-the-next-one"])
async def test_a_record_of_the_stream_that_is_no_note_of_its_log_is_skipped(
    tmp_path: Path, what: str, is_apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints()
    log, fork = parting(10)
    broker = Broker(MemoryStore(), tmp_path, log)
    reading = Reading(checkpoints, broker)
    checkpoints.put(log.note(10))
    if is_apart:
        await reading._read_checkpoints()
    checkpoints.put(FORGED[what](log))
    await reading._read_checkpoints()
    assert "is skipped" in caplog.text
    checkpoints.put(log.note(11))
    await reading._read_checkpoints()
    assert broker.memory.copied() == {log.origin: log.note(11)}, "what follows it is taken"
    checkpoints.lead(broker)
    with pytest.raises(ForkError):
        await broker.cosign(fork, 12, 10)
    await broker.cosign(log, 20, 11)


async def test_a_note_in_the_stream_by_a_key_that_is_not_known_here_yet_is_not_forgotten(
    tmp_path: Path,
) -> None:
    log, later = Log(), Log(seed=3)
    broker = Broker(MemoryStore(), tmp_path, log)
    broker.memory.take(log.note(10))
    broker.memory.take(later.note(20))
    assert broker.memory.copied() == {log.origin: later.note(20)}
    stream = Stream()
    broker.memory.copies = Led(stream, broker.memory)
    with pytest.raises(TamperError):
        await broker.cosign(log, 11, 10)
    broker.witness.follow([later.signer.key])
    await broker.cosign(later, 21, 20)


# -- what stands in the store -------------------------------------------------------------------------


@pytest.mark.parametrize("what", [*FORGED, *UNKNOWN])
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_whatever_stands_in_the_store_decides_nothing_and_is_written_over_once_the_stream_has_a_note(
    tmp_path: Path, what: str, is_restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store, stream, log = MemoryStore(), Stream(), Log()
    home = Broker(store, tmp_path, log)
    stream.lead(home)
    await home.cosign(log, 10)
    key = Keys("eu-west").witness(sha256(log.origin.encode()).hexdigest())
    await store.transact([], [Put(key, (FORGED | UNKNOWN)[what](log))])
    if is_restarted:
        home = Broker(store, tmp_path, log)
        await asyncio.to_thread(home.memory.move_in)
        stream.lead(home)
    assert await home.size() == 10
    assert "which counts" in caplog.text
    await home.cosign(log, 20, 10)
    entry = await store.get(key)
    assert entry is not None and entry.value == log.note(20)


@pytest.mark.parametrize("what", [*FORGED, *UNKNOWN])
async def test_of_one_broker_a_record_that_its_log_did_not_sign_is_no_fork_and_cannot_be_believed(
    tmp_path: Path, what: str
) -> None:
    store, log = MemoryStore(), Log()
    broker = Broker(store, tmp_path, log)
    await broker.cosign(log, 10)
    key = Keys("eu-west").witness(sha256(log.origin.encode()).hexdigest())
    await store.transact([], [Put(key, (FORGED | UNKNOWN)[what](log))])
    with pytest.raises(TamperError, match=r"metadata store .* cannot be believed"):
        await broker.cosign(log, 20, 10)
    await store.transact([], [Delete(key)])
    await broker.cosign(log, 20, 10)


async def test_a_note_is_tried_with_each_key_of_its_name_and_id(tmp_path: Path) -> None:
    """Two of a log's keys have one id; which its region names first decides nothing about what was cosigned."""
    log = Log(EGRESS_ORIGIN)
    signers = [
        NoteSigner.from_key(EGRESS_ORIGIN, each, Algorithm.ED25519) for each in colliding(EGRESS_ORIGIN)
    ]
    keys = tuple(signer.key for signer in signers)
    for at, known in enumerate((keys, keys[::-1])):
        for number, log.signer in enumerate(signers):
            broker = Broker(MemoryStore(), tmp_path / f"{at}{number}", log)
            broker.memory.keys_of = lambda origin, known=known: known  # type: ignore[misc]
            broker.memory.take(log.note(9))
            assert broker.memory.copied() == {EGRESS_ORIGIN: log.note(9)}


async def test_two_roots_of_a_log_whose_key_is_not_known_are_not_called_a_fork(tmp_path: Path) -> None:
    store, log, fork = MemoryStore(), Log(), Log(word=b"fork")
    await Broker(store, tmp_path / "a", log).cosign(log, 10)
    await Broker(MemoryStore(), tmp_path / "b", log).cosign(fork, 10)
    broker = Broker(store, tmp_path / "b", Log("log.example/0", seed=2))
    with pytest.raises(TamperError, match="no key of the log is known"):
        await asyncio.to_thread(broker.memory.last, log.origin)
