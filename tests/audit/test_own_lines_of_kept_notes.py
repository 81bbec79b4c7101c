"""A cosigned note that is brought without some of the log's own lines costs the log nothing, whoever asks for those."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from audit_log import EGRESS_ORIGIN, Link, key, log_signer, region_bundle, witness_signer

from audit.checkpoint import Checkpoint, note_size
from audit.cosigned_notes import COSIGNED_PATHS, join, notes_at
from audit.leaf import Leaf
from audit.log_copy_disk import copy_log
from audit.note import Algorithm, NoteSigner, VerifierKey, encode_note, parse_note
from audit.proof import check_proof, prove
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.trust import Trust, witnesses_of
from audit.verify import Report, verify_log
from audit.witness_policy import WitnessPolicy, format_policy
from felix.errors import UnavailableError
from keys.bundle import AuditKey, RegionBundle
from keys.post_quantum import MlDsaKey

LOG = log_signer(EGRESS_ORIGIN)
LOG_PQ = NoteSigner.from_ml_dsa(EGRESS_ORIGIN, MlDsaKey.from_seed(b"q" * 32))
EU = witness_signer()
EU_PQ = NoteSigner.from_ml_dsa(EU.key.name, MlDsaKey.from_seed(b"e" * 32))
AP = witness_signer("ap-south.acme/witness")
STREAM = "acme/ops/departures"


def named(region: str, *more: AuditKey) -> RegionBundle:
    bundle = region_bundle(region)
    return msgspec.structs.replace(bundle, audit_keys=(*bundle.audit_keys, *more))


US = named("us-east", AuditKey(EGRESS_ORIGIN, "log", LOG_PQ.key.public, "ml-dsa-44"))
BUNDLES = [
    US,
    named("eu-west", AuditKey(EU.key.name, "cosigner", EU_PQ.key.public, "ml-dsa-44")),
    region_bundle("ap-south"),
]
TRUST = Trust.of(BUNDLES)
REGIONS = [TRUST.region(name) for name in TRUST.regions]
POST_QUANTUM = WitnessPolicy.parse(
    format_policy(
        [each for region in REGIONS for each in region.logs],
        {region.region: region.witnesses for region in REGIONS},
        post_quantum=True,
    ).encode()
)
ASKED = TRUST.under(POST_QUANTUM)
"""by an auditor who takes ML-DSA-44 lines of the log alone"""


class Log:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = Folder(path)
        self._link = Link()
        self.trail: Trail

    def open(self, signer: NoteSigner, *also: NoteSigner, earlier: tuple[VerifierKey, ...] = ()) -> Log:
        self.trail = Trail.open(
            self.path,
            signer,
            also=also,
            earlier=earlier,
            witnesses=witnesses_of(BUNDLES, "us-east"),
            settings=TrailSettings(checkpoint_interval_ms=3_600_000),
        )
        return self

    def put(self, leaves: list[Leaf]) -> None:
        ended = threading.Event()
        self.trail.append_nowait(leaves, lambda first, error: ended.set())
        assert ended.wait(30)

    def grow(self) -> bytes:
        if not self.trail.status().durable:
            self.put(self._link.agreement())
        intents = self._link.intent()
        self.put(intents)
        self.put([self._link.ack(intents)])
        return self.trail.publish()

    def bring(self, note: bytes, *by: NoteSigner, without: NoteSigner | None = None) -> None:
        self.trail.add_cosigned(cosigned(note, *by, without=without))

    def kept(self) -> list[tuple[int, bool, bool]]:
        """Sizes, and whether the log's lines stand there, by Ed25519 and by ML-DSA-44."""
        return [
            (each.checkpoint.size, LOG.key in keys, LOG_PQ.key in keys)
            for each in self.trail.checkpoints.cosigned()
            if (keys := {by.key for by in each.signed})
        ]


def cosigned(note: bytes, *by: NoteSigner, without: NoteSigner | None = None) -> bytes:
    parsed = parse_note(note)
    lines = [line for line in parsed.signatures if without is None or line.key_id != without.key.key_id] + [
        each.cosign(parsed.text, 1) for each in by
    ]
    return encode_note(parsed._replace(signatures=tuple(lines)))


def up_to(report: Report) -> int:
    assert report.ok, report.findings
    return report.cosigned_size


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "log")
    yield made
    made.trail.close()


def test_no_region_makes_a_log_fail_by_leaving_out_one_of_its_lines(log: Log, tmp_path: Path) -> None:
    log.open(LOG, LOG_PQ)
    first = log.grow()
    log.bring(first, EU, EU_PQ)
    older = log.grow()
    log.grow()
    log.bring(older, AP, without=LOG_PQ)
    assert log.kept() == [(note_size(older), True, True), (note_size(first), True, True)]
    assert up_to(verify_log(log.files, ASKED)) == note_size(first)
    older = log.grow()
    log.grow()
    log.bring(older, EU, without=LOG)
    before = Trust.of([region_bundle("us-east"), *BUNDLES[1:]])
    assert up_to(verify_log(log.files, before)) == note_size(older), "by the bundle of before ML-DSA-44"
    for trust in (ASKED, before):
        assert check_proof(prove(log.files, trust, STREAM, 0, 1), trust)
    copy_log(log.files, Folder(tmp_path / "copy"), ASKED)
    assert up_to(verify_log(Folder(tmp_path / "copy"), ASKED)) == note_size(first)


def test_a_note_that_an_older_key_alone_signed_counts_for_nothing_and_is_compared(
    log: Log, tmp_path: Path
) -> None:
    """ap-south cosigned while the log had its first key alone, and never again."""
    from audit.spark.verification import open_log

    log.open(LOG)
    old = cosigned(log.grow(), EU, AP)
    log.trail.add_cosigned(old)
    log.trail.close()
    log.open(LOG, LOG_PQ)
    log.grow()
    newest = log.grow()
    for path in COSIGNED_PATHS:
        assert log.files.read(path) in (None, old)
    report = verify_log(log.files, ASKED)
    assert [found.step for found in report.findings] == [1], "nothing that counts is there"
    log.files.write("checkpoint.witnessed", cosigned(newest, EU, EU_PQ))
    assert up_to(verify_log(log.files, ASKED)) == note_size(newest)
    assert up_to(verify_log(log.files, ASKED, remembered=[old])) == note_size(newest)
    assert open_log(str(log.path), ASKED, remembered=[old]).checkpoint.size == note_size(newest)
    assert check_proof(prove(log.files, ASKED, STREAM, 0, 1), ASKED)
    copy = Folder(tmp_path / "copy")
    copy_log(log.files, copy, ASKED)
    assert up_to(verify_log(copy, ASKED)) == note_size(newest)
    assert old in [
        note for path in COSIGNED_PATHS for note in notes_at(path, copy.read(path) or b"").values()
    ]
    # What it says of the tree holds the log to it.
    text = replace(ASKED.log(EGRESS_ORIGIN).open_kept(old).checkpoint, root=bytes(32)).text()
    other = encode_note(parse_note(old)._replace(text=text, signatures=(LOG.sign(text), AP.cosign(text, 1))))
    report = verify_log(log.files, ASKED, remembered=[other])
    assert [found.step for found in report.findings] == [2]
    stranger = NoteSigner.from_key(EGRESS_ORIGIN, key(77), Algorithm.ED25519)
    unsigned = encode_note(parse_note(old)._replace(signatures=(stranger.sign(parse_note(old).text),)))
    assert not verify_log(log.files, ASKED, remembered=[unsigned]).ok
    # And the log puts its newer key's line there with the next one.
    log.bring(newest, AP)
    log.trail.close()
    log.open(LOG, LOG_PQ)
    assert all(ed and ml for _, ed, ml in log.kept())


def test_a_note_whose_lines_cannot_be_put_back_takes_the_place_of_none(log: Log) -> None:
    """The log changed its keys, and the one that was left out is gone."""
    log.open(LOG, LOG_PQ)
    first, older, last = log.grow(), log.grow(), log.grow()
    log.bring(first, EU)
    log.trail.close()
    ended = tuple(replace(each.key, to_size=note_size(last)) for each in (LOG, LOG_PQ))
    log.open(NoteSigner.from_key(EGRESS_ORIGIN, key(78), Algorithm.ED25519), earlier=ended)
    log.bring(older, EU, AP, without=LOG_PQ)
    assert log.kept() == [(note_size(older), True, False), (note_size(first), True, True)]
    log.bring(older, EU)
    assert log.kept() == [(note_size(older), True, True)], "what was left out came by another way"


def test_keys_that_do_not_sign_now_keep_nobodys_cosignature_away(log: Log) -> None:
    def refuses(message: bytes) -> bytes:
        raise UnavailableError("The key service does not answer.")

    log.open(LOG, LOG_PQ)
    first, older, last = log.grow(), log.grow(), log.grow()
    log.bring(first, EU)
    log.trail.close()
    log.open(LOG, replace(LOG_PQ, sign_message=refuses))
    log.bring(older, EU, AP, without=LOG_PQ)
    assert log.kept() == [(note_size(older), True, False), (note_size(first), True, True)]
    log.trail.close()
    log.open(LOG, LOG_PQ)
    log.bring(last, EU)
    assert log.kept() == [(note_size(last), True, True), (note_size(older), True, True)]


def test_a_copy_keeps_a_note_with_a_line_of_the_log_that_a_larger_one_has_not(
    log: Log, tmp_path: Path
) -> None:
    """The log's owner leaves it out, and serves the larger note alone."""
    log.open(LOG, LOG_PQ)
    copy = Folder(tmp_path / "copy")
    first = log.grow()
    log.bring(first, EU, EU_PQ)
    copy_log(log.files, copy, TRUST)
    older = log.grow()
    log.grow()
    served = cosigned(older, EU, EU_PQ, without=LOG_PQ)
    log.files.write("checkpoint.cosigned", served)
    copy_log(log.files, copy, TRUST)
    assert up_to(verify_log(copy, ASKED)) == note_size(first)
    assert up_to(verify_log(copy, TRUST)) == note_size(older)


class Dies(BaseException):
    pass


@pytest.mark.parametrize("at", range(6))
def test_what_was_cosigned_is_there_whenever_the_writer_dies(
    log: Log, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A note of the list becomes the one with the most cosigners, and that one goes to the list."""
    strangers = [
        NoteSigner.from_key(f"{name}.example/w", key(33 + n), Algorithm.COSIGNATURE)
        for n, name in enumerate("uvw")
    ]
    more = [each.key for each in strangers]

    def kept() -> set[tuple[int, str]]:
        return {
            (each.checkpoint.size, by.key.name)
            for each in log.trail.checkpoints.cosigned()
            for by in each.cosigned
        }

    log.open(LOG).trail.checkpoints.trust_witnesses(more)
    first, second, third = log.grow(), log.grow(), log.grow()
    log.bring(first, *strangers)
    log.bring(third, EU)
    log.bring(second, EU, AP)
    before, write, left = kept(), Folder.write, [at]

    def dying(folder: Folder, path: str, data: bytes) -> None:
        if path.startswith("checkpoint.") and not left[0]:
            raise Dies
        left[0] -= path.startswith("checkpoint.")
        write(folder, path, data)

    monkeypatch.setattr(Folder, "write", dying)
    with contextlib.suppress(Dies):
        log.bring(second, strangers[0], strangers[1])
    monkeypatch.setattr(Folder, "write", write)
    log.trail.close()
    log.open(LOG).trail.checkpoints.trust_witnesses(more)
    assert before <= kept(), "each of them, or the same with more"


def test_lines_that_are_put_back_say_no_time(log: Log) -> None:
    """A larger checkpoint was signed before: with the present time, a monitor would take it for a log that was rolled back."""
    log.open(LOG, LOG_PQ)
    older, newer = log.grow(), log.grow()
    log.bring(older, AP, without=LOG_PQ)
    log.bring(newer, AP, EU, without=LOG_PQ)
    times = {
        each.checkpoint.size: [by.time_s for by in each.signed if by.key == LOG_PQ.key]
        for each in log.trail.checkpoints.cosigned()
    }
    assert times[note_size(newer)] != [0], "the log's own note of the newest one is there"
    log.bring(older, AP, EU, EU_PQ, without=LOG_PQ)
    (again,) = (each for each in log.trail.checkpoints.cosigned() if each.checkpoint.size == note_size(older))
    assert [by.time_s for by in again.signed if by.key == LOG_PQ.key] == [0]
    assert up_to(verify_log(log.files, ASKED)) == note_size(older), "it verifies as any other"


@pytest.mark.parametrize("knows", [True, False])
def test_a_line_of_a_key_that_is_not_known_yet_does_not_stand_for_another_one(log: Log, knows: bool) -> None:
    """A log opens before it knows whom its region trusts: the smaller note alone has eu-west's ML-DSA-44 line."""
    log.open(LOG, LOG_PQ)
    first = log.grow()
    log.bring(first, EU, EU_PQ)
    log.bring(log.grow(), EU)
    log.trail.close()
    known = witnesses_of(BUNDLES, "us-east")
    log.trail = Trail.open(
        log.path,
        LOG,
        also=[LOG_PQ],
        witnesses=known if knows else (),
        settings=TrailSettings(checkpoint_interval_ms=3_600_000),
    )
    log.trail.checkpoints.trust_witnesses(known)
    log.bring(log.grow(), AP)
    assert up_to(verify_log(log.files, ASKED)) == note_size(first)


def test_who_cosigned_beside_one_that_is_known_counts_once_it_is_known(log: Log) -> None:
    """Read from the copies' stream by a broker that knows eu-west alone."""
    log.open(LOG)
    note = cosigned(log.grow(), EU, AP)
    log.trail.close()
    log.trail = Trail.open(log.path, LOG, witnesses=[EU.key])
    assert log.trail.take_cosigned([note]) == [note]
    log.trail.checkpoints.trust_witnesses([AP.key])
    assert log.trail.take_cosigned([note]) == []
    (kept,) = log.trail.checkpoints.cosigned()
    assert {by.key for by in kept.cosigned} == {EU.key, AP.key}


def test_lines_of_keys_that_are_not_known_have_a_bound_beside_those_that_are(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ap-south cosigned with another key each time what eu-west cosigned, too."""
    monkeypatch.setattr("audit.checkpoint_disk.KEPT_MAX", 4)
    log.open(LOG)
    ever_other = [NoteSigner.from_key(AP.key.name, key(100 + n), Algorithm.COSIGNATURE) for n in range(9)]
    notes = [cosigned(log.grow(), EU, each) for each in ever_other]
    log.trail.close()
    log.trail = Trail.open(log.path, LOG, witnesses=[EU.key])
    assert log.trail.checkpoints.covering(notes) == notes[:-6:-1]
    assert len(log.trail.take_cosigned(notes)) == 4


def test_a_region_that_is_not_known_yet_is_one_party_under_all_its_names(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines tell notes apart, and make no more of it than one: it takes no place of a quorum."""
    monkeypatch.setattr("audit.checkpoint_disk.KEPT_MAX", 4)
    names = [
        NoteSigner.from_key(f"ap-south.acme/w{n}", key(100 + n), Algorithm.COSIGNATURE) for n in range(12)
    ]
    outside = NoteSigner.from_key("witness.example/w1", key(33), Algorithm.COSIGNATURE)
    log.open(LOG)
    notes = [cosigned(log.grow(), EU, outside), cosigned(log.grow(), EU), cosigned(log.grow(), outside)]
    notes += [cosigned(log.grow(), *names[4 * n : 4 * n + 4]) for n in range(3)]
    log.trail.close()
    log.files.write("checkpoint.cosigned", notes[-1])
    log.files.write("checkpoint.kept", join(notes))
    log.trail = Trail.open(log.path, LOG)
    assert [each.checkpoint.size for each in log.trail.checkpoints.cosigned()] == [
        note_size(notes[at]) for at in (5, 2, 1, 0)
    ]


Files = dict[str, bytes]
Claims = set[tuple[int, frozenset[str]]]


def claims(files: Files) -> Claims:
    """Of each note in these files, its size, and who cosigned it."""
    found = [parse_note(note) for path, data in files.items() for note in notes_at(path, data).values()]
    return {
        (Checkpoint.parse(note.text).size, frozenset(line.name for line in note.signatures)) for note in found
    }


def after_power_failure(files: Files, done: list[tuple[str, bytes]]) -> Iterator[Files]:
    """What may be there: of the renames since the folder was last synced, of each name any, whatever became of the others."""
    for at in range(len(done) + 1):
        synced = max((n for n in range(at) if not done[n][0]), default=0)
        durable = files | {path: data for path, data in done[:synced] if path}
        pending = [each for each in done[synced:at] if each[0]]
        paths = sorted({path for path, _ in pending})
        choices = [
            [durable.get(path, b""), *(data for name, data in pending if name == path)] for path in paths
        ]
        for chosen in itertools.product(*choices):
            yield {
                path: data for path, data in (durable | dict(zip(paths, chosen, strict=True))).items() if data
            }


def test_what_was_cosigned_is_there_whenever_power_fails(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    done, strange = (
        list[tuple[str, bytes]](),
        NoteSigner.from_key("u.example/w", key(33), Algorithm.COSIGNATURE),
    )
    write, flush = Folder.write, Folder.flush

    def recorded_write(folder: Folder, path: str, data: bytes) -> None:
        write(folder, path, data)
        if path in COSIGNED_PATHS:
            done.append((path, data))

    def recorded_flush(folder: Folder) -> None:
        flush(folder)
        done.append(("", b""))

    log.open(LOG).trail.checkpoints.trust_witnesses([strange.key])
    notes = [log.grow() for _ in range(12)]
    chosen = Random(7)
    # The one with the most cosigners goes to the place of one that a newer note stands for, which is not there yet.
    brought = [(notes[0], [EU]), (notes[1], [AP, strange]), (notes[2], [EU, AP])]
    brought += [
        (notes[chosen.randint(0, 3 + at // 5)], chosen.sample([EU, AP, strange], chosen.randint(1, 3)))
        for at in range(40)
    ]
    monkeypatch.setattr(Folder, "write", recorded_write)
    monkeypatch.setattr(Folder, "flush", recorded_flush)
    states = 0
    for note, by in brought:
        before: Files = {path: data for path in COSIGNED_PATHS if (data := log.files.read(path))}
        done.clear()
        log.bring(note, *by)
        for files in after_power_failure(before, done):
            states += 1
            there = claims(files)
            for size, who in claims(before):
                assert any(size <= other and who <= others for other, others in there)
    assert states > 100
