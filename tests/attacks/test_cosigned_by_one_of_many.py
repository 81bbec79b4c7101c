"""One region that cosigns as it may, many times, under many names, with many keys, does not cost a log what others have cosigned.

(a) A newer note that it cosigned alone leaves a quorum of others where it is, and ends no round. (b) Its lines leave room on a note. (c) It
does not keep anybody from copying the log. (d) What it brings again is not written, and it is held to a pace.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from attacks.conftest import Tally
from audit_log import EGRESS_ORIGIN, POLICY_SEEDS, Link, key, log_signer, region_bundle, witness_signer

from audit.checkpoint import note_size
from audit.kept_notes import party_of
from audit.leaf import Leaf
from audit.log_copy_disk import copy_log
from audit.note import Algorithm, NoteSigner, encode_note, parse_note
from audit.tile import CHECKPOINT_PATH
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.trust import Trust, witnesses_of
from audit.verify import Report, verify_log
from audit.witness import MemoryWitnessStore, Witness
from audit.witness_policy import WitnessPolicy
from felix.errors import Code, UnavailableError
from felix.names import SpiffeId
from felix.runtime.real import REAL
from keys.bundle import AuditKey, RegionBundle, decode_bundle, sign_bundle
from keys.post_quantum import MlDsaKey
from region.evidence.witnessing import CHECKPOINTS_BURST, WAITING_MAX, Witnessing

EU = witness_signer()
OUTSIDE = NoteSigner.from_key("witness.example/w1", key(33), Algorithm.COSIGNATURE)
QUORUM = WitnessPolicy.parse(
    f"witness eu {EU.key}\nwitness o {OUTSIDE.key}\ngroup both all eu o\nquorum both\n".encode()
)
TWELVE_NAMES = [
    NoteSigner.from_key(f"ap-south.acme/w{n}", key(100 + n), Algorithm.COSIGNATURE) for n in range(12)
]
TWELVE_KEYS = [
    NoteSigner.from_key("ap-south.acme/witness", key(100 + n), Algorithm.COSIGNATURE) for n in range(12)
]


def ap_south(signers: list[NoteSigner]) -> RegionBundle:
    """The bundle of ap-south, which names all of these its witnesses."""
    keys = tuple(
        AuditKey(
            each.key.name,
            "cosigner",
            each.key.public,
            "ml-dsa-44" if each.key.algorithm.is_post_quantum else "ed25519",
        )
        for each in signers
    )
    bundle = region_bundle("ap-south", audit_keys=keys)
    return decode_bundle(sign_bundle(bundle, key(POLICY_SEEDS["ap-south"])).encode()).bundle


class World:
    """An egress log of us-east that grows, with eu-west, an outside witness, and ap-south with these keys."""

    def __init__(self, path: Path, ap: list[NoteSigner]) -> None:
        self.bundles = [region_bundle("us-east"), region_bundle("eu-west"), ap_south(ap)]
        self.path = path
        self.trail = self.open()
        self._link = Link()
        self._put(self._link.agreement())

    def open(self) -> Trail:
        trail = Trail.open(
            self.path,
            log_signer(EGRESS_ORIGIN),
            witnesses=(*witnesses_of(self.bundles, "us-east"), OUTSIDE.key),
            settings=TrailSettings(checkpoint_interval_ms=3_600_000),
        )
        trail.checkpoints.expect_cosigners(3)
        return trail

    def _put(self, leaves: list[Leaf]) -> None:
        ended = threading.Event()
        self.trail.append_nowait(leaves, lambda first, error: ended.set())
        assert ended.wait(30)

    def grow(self) -> bytes:
        intents = self._link.intent()
        self._put(intents)
        self._put([self._link.ack(intents)])
        return self.trail.publish()

    def cosign(self, note: bytes, *by: NoteSigner, time_s: int = 1) -> None:
        parsed = parse_note(note)
        self.trail.add_cosigned(
            encode_note(parsed.with_signatures([each.cosign(parsed.text, time_s) for each in by]))
        )

    def judged(self, policy: WitnessPolicy = QUORUM) -> Report:
        return verify_log(Folder(self.path), Trust.of(self.bundles[:2]).under(policy))


@contextmanager
def world(path: Path, ap: list[NoteSigner]) -> Iterator[World]:
    made = World(path, ap)
    try:
        yield made
    finally:
        made.trail.close()


@pytest.mark.parametrize("names", [1, 12])
def test_a_quorum_that_was_reached_stays_however_many_names_a_third_region_has(
    tmp_path: Path, names: int
) -> None:
    with world(tmp_path, TWELVE_NAMES) as it:
        for _ in range(3):
            note = it.grow()
            for by in (EU, OUTSIDE):
                it.cosign(note, by)
            before = it.judged()
            newer = it.grow()
            it.cosign(newer, *TWELVE_NAMES[:names])
            it.cosign(newer, EU)
            it.cosign(it.grow(), *TWELVE_NAMES[:1])
            after = it.judged()
            assert before.ok and after.ok and after.cosigned_size == before.cosigned_size == note_size(note)
        it.trail.close()
        it.trail = it.open()
        assert {note_size(note)} < {held.checkpoint.size for held in it.trail.checkpoints.cosigned()}


def test_notes_that_are_kept_besides_are_there_when_the_log_is_opened_again(tmp_path: Path) -> None:
    """Three of which none stands for another: more than the two files of one note hold."""
    with world(tmp_path, TWELVE_NAMES) as it:
        third = TWELVE_NAMES[0]
        notes = [it.grow() for _ in range(4)]
        for note, by in zip(notes, [(EU, OUTSIDE, third), (EU, OUTSIDE), (EU, third), (third,)], strict=True):
            it.cosign(note, *by)
        sizes = [note_size(note) for note in reversed(notes)]
        for _ in range(2):
            assert [held.checkpoint.size for held in it.trail.checkpoints.cosigned()] == sizes
            assert it.judged().cosigned_size == note_size(notes[1])
            it.trail.close()
            it.trail = it.open()
        it.cosign(it.grow(), EU, OUTSIDE, third)
        assert len(it.trail.checkpoints.cosigned()) == 1, "the newest says it all"


def test_witnesses_that_are_known_only_later_have_kept_their_place(tmp_path: Path) -> None:
    """A broker opens its log before it has read whom it trusts."""
    with world(tmp_path, TWELVE_NAMES) as it:
        note = it.grow()
        it.cosign(note, EU, OUTSIDE)
        it.trail.close()
        it.trail = Trail.open(
            tmp_path,
            log_signer(EGRESS_ORIGIN),
            witnesses=[TWELVE_NAMES[0].key],
            settings=TrailSettings(checkpoint_interval_ms=3_600_000),
        )
        it.cosign(it.grow(), TWELVE_NAMES[0])
        assert it.judged().cosigned_size == note_size(note)
        it.trail.checkpoints.trust_witnesses([EU.key, OUTSIDE.key])
        assert {by.key.name for held in it.trail.checkpoints.cosigned() for by in held.cosigned} == {
            EU.key.name, OUTSIDE.key.name, TWELVE_NAMES[0].key.name,
        }  # fmt: skip


def test_one_region_ends_no_round_by_its_names_nor_by_what_it_says_it_has(tmp_path: Path) -> None:
    with world(tmp_path, TWELVE_NAMES) as it:
        it.grow()
        it.trail.checkpoints.offer_newest()
        offered = it.trail.checkpoints.offer()
        it.cosign(offered, *TWELVE_NAMES)
        newest = it.grow()
        assert it.trail.checkpoints.offer(at_least=note_size(offered) + 1) == newest
        assert note_size(it.trail.checkpoints.offer()) == note_size(offered)
        it.cosign(offered, EU)
        assert note_size(it.trail.checkpoints.offer()) == note_size(offered)
        it.cosign(offered, OUTSIDE)
        assert it.trail.checkpoints.offer() == newest, "all three have cosigned"


def test_long_lines_of_one_region_leave_room_for_others(tmp_path: Path) -> None:
    name = f"ap-south.acme/{'w' * 200}"
    long = [NoteSigner.from_ml_dsa(name, MlDsaKey.from_seed(bytes([n]) * 32)) for n in range(28)]
    with world(tmp_path, long) as it:
        note = it.grow()
        for at in range(0, len(long), 7):
            it.cosign(note, *long[at : at + 7])
        held = Folder(tmp_path).read(CHECKPOINT_PATH) or b""
        assert len(held) < 12_000
        it.cosign(note, EU, OUTSIDE)
        assert it.judged().cosigned_size == note_size(note)


def test_lines_that_are_left_out_when_a_note_is_brought_cost_none_that_are_kept(tmp_path: Path) -> None:
    """The ML-DSA-44 lines, of the log and of eu-west: whoever demands those has them still."""
    quantum = NoteSigner.from_ml_dsa(EGRESS_ORIGIN, MlDsaKey.from_seed(b"q" * 32))
    eu = NoteSigner.from_ml_dsa(EU.key.name, MlDsaKey.from_seed(b"e" * 32))
    trail = Trail.open(
        tmp_path, log_signer(EGRESS_ORIGIN), also=[quantum], witnesses=[EU.key, eu.key],
        settings=TrailSettings(checkpoint_interval_ms=3_600_000),
    )  # fmt: skip

    def grow() -> bytes:
        ended = threading.Event()
        trail.append_nowait([Link().deny()], lambda first, error: ended.set())
        assert ended.wait(30)
        return trail.publish()

    def bring(data: bytes, *by: NoteSigner, without: NoteSigner) -> None:
        note = parse_note(data)
        lines = [each for each in note.signatures if each.key_id != without.key.key_id]
        lines += [each.cosign(note.text, 1) for each in by if each is not without]
        trail.add_cosigned(encode_note(note._replace(signatures=tuple(lines))))

    def sizes(*wanted: NoteSigner) -> list[int]:
        held = trail.checkpoints.cosigned()
        ids = {each.key.key_id for each in wanted}
        return [
            each.checkpoint.size for each in held if ids <= {line.key_id for line in each.note.signatures}
        ]

    notes = [grow() for _ in range(3)]
    bring(notes[0], EU, eu, without=TWELVE_KEYS[0])
    bring(notes[1], EU, eu, without=quantum)
    assert sizes() == sizes(EU, eu, quantum) == [2], "the log puts its own lines back"
    bring(notes[2], EU, eu, without=eu)
    assert sizes(EU) == [3, 2] and sizes(EU, eu) == [2]
    bring(notes[2], EU, eu, without=quantum)
    assert sizes() == sizes(EU, eu, quantum) == [3], "the log has its own lines of the newest"
    trail.close()


def test_a_copy_is_not_stopped_by_a_region_that_cosigns_with_ever_other_keys(tmp_path: Path) -> None:
    source, copy = tmp_path / "log", Folder(tmp_path / "copy")
    with world(source, TWELVE_KEYS) as it:
        trust = Trust.of(it.bundles)
        eu = Witness(EU, [it.trail.key], MemoryWitnessStore(), lambda: 1)
        size = 0
        for chosen in itertools.islice(itertools.combinations(TWELVE_KEYS, 6), 80):
            note = it.grow()
            proof = it.trail.checkpoints.consistency_proof(size, note_size(note)) if size else []
            it.trail.add_cosigned(eu.cosign(note, proof))
            size = note_size(note)
            it.cosign(note, *chosen)
            copy_log(Folder(source), copy, trust)
        report = verify_log(copy, trust)
        assert report.ok and report.cosigned_size == size
        assert set(report.cosigners) == {"eu-west", "ap-south"}


ROGUE = SpiffeId("ap-south", "acme", "bridge", "rogue")
OWN = SpiffeId("us-east", "acme", "bridge", "us-to-eu")


def test_what_is_brought_again_is_not_written_and_bringing_has_a_pace(
    tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[str]()
    write, flush = Folder.write, Folder.flush

    def write_counted(folder: Folder, path: str, data: bytes) -> None:
        written.append(path)
        write(folder, path, data)

    def flush_counted(folder: Folder) -> None:
        written.append("flush")
        flush(folder)

    with world(tmp_path, TWELVE_NAMES) as it:
        older, note = it.grow(), it.grow()
        for each in (older, note):
            it.cosign(each, EU, TWELVE_NAMES[0])
        held = Folder(tmp_path).read("checkpoint.cosigned") or b""
        monkeypatch.setattr(Folder, "write", write_counted)
        monkeypatch.setattr(Folder, "flush", flush_counted)
        for again in (held, older, note):
            it.cosign(again, EU, time_s=2)
        it.cosign(older, TWELVE_NAMES[0])
        assert not written

        async def bring() -> tuple[int, list[UnavailableError]]:
            witnessing = Witnessing(
                Witness(witness_signer(), [], MemoryWitnessStore(), lambda: 1), it.trail, "us-east",
                REAL.clock, None,
            )  # fmt: skip
            taken, refused = 0, list[UnavailableError]()
            for _ in range(5 * CHECKPOINTS_BURST):
                try:
                    await witnessing.put_cosignature(ROGUE, held)
                    taken += 1
                except UnavailableError as error:
                    refused.append(error)
            together = [witnessing.put_cosignature(OWN, held) for _ in range(CHECKPOINTS_BURST)]
            assert not any(await asyncio.gather(*together)), "the region's own bridges are not held up by it"
            other = [
                witnessing.put_cosignature(SpiffeId("eu-west", "acme", "bridge", "b"), held)
                for _ in range(WAITING_MAX + 1)
            ]
            crowd = await asyncio.gather(*other, return_exceptions=True)
            assert [isinstance(each, UnavailableError) for each in crowd].count(True) == 1
            return taken, refused

        taken, refused = asyncio.run(bring())
        assert CHECKPOINTS_BURST <= taken <= CHECKPOINTS_BURST + 5
        assert {error.code for error in refused} == {Code.LIMIT_RATE}
        assert all(error.retry_after_ms for error in refused) and not written
        tally("cosignatures that were brought again", taken + len(refused))


def test_who_cosigned_is_counted_as_a_verifier_counts(tmp_path: Path) -> None:
    """By names here, by bundles there: the same parties."""
    with world(tmp_path, TWELVE_NAMES) as it:
        trust = Trust.of(it.bundles, [OUTSIDE.key]).log(EGRESS_ORIGIN)
        for key_, party in trust.witnesses.items():
            assert party_of(key_.name, EGRESS_ORIGIN).removesuffix(".acme") == party
