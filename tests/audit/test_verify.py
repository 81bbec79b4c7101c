"""Verification: a log as it was written passes; every kind of tampering is found, each byte of each file in turn."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from audit_log import (
    EGRESS_ORIGIN,
    INGRESS_ORIGIN,
    Link,
    egress_appends,
    key,
    log_signer,
    payload,
    receipt_for,
    region_bundle,
    trust,
    witness_signer,
)
from long_runs import count

from audit.checkpoint import Checkpoint, open_checkpoint
from audit.copied_disk import become_copied
from audit.leaf import Kind, Leaf, Side, decode_leaf, encode_leaf
from audit.merkle import Tree, leaf_hash
from audit.note import Note, encode_note
from audit.tile import MemoryFiles, bundle_path, decode_bundle, encode_bundle, tile_path
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.trust import Trust
from audit.verify import TITLES, Report, verify_log
from audit.witness import MemoryWitnessStore, Witness
from keys.bundle import AuditKey

SIGNER, WITNESS = log_signer(), witness_signer()
QUIET = TrailSettings(checkpoint_interval_ms=3_600_000)


def write(path: Path, appends: list[list[Leaf]], cosign_at: int | None = None, origin: str = "") -> Witness:
    """A log with these appends; the checkpoint after `cosign_at` of them, and the last one, are cosigned."""
    signer = log_signer(origin) if origin else SIGNER
    witness = Witness(WITNESS, [signer.key], MemoryWitnessStore(), lambda: 1_760_000_000)
    trail = Trail.open(path, signer, witnesses=[witness.key], settings=QUIET)
    for at, leaves in enumerate(appends):
        ended = threading.Event()
        trail.append_nowait(leaves, lambda first, error, ended=ended: ended.set())  # type: ignore[misc]
        if at + 1 == cosign_at or at + 1 == len(appends):
            assert ended.wait(30)
            note = trail.publish()
            last, size = witness.last(signer.key.name), open_checkpoint(note, signer.key).checkpoint.size
            if cosign_at is not None:
                trail.add_cosigned(
                    witness.cosign(note, trail.checkpoints.consistency_proof(last.size if last else 0, size))
                )
    trail.close()
    return witness


def verify(files: Folder | MemoryFiles, **more: object) -> Report:
    arguments = {"trust": trust(), "cosignatures_min": 1} | more
    return verify_log(files, **arguments)  # type: ignore[arg-type]


def in_memory(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in ("lock", "index", "positions")
    }


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Some hundred leaves of every kind that a link writes, one full bundle and a partial one, cosigned twice."""
    path = tmp_path_factory.mktemp("log")
    write(path, list(egress_appends(160)), cosign_at=100)
    files = in_memory(path)
    report = verify(MemoryFiles(files))
    assert report.ok, report.findings
    assert 300 < report.size < 512 and report.cosigned_size == report.size
    return files


def steps_of(report: Report) -> set[int]:
    return {finding.step for finding in report.findings}


def test_a_log_as_written_passes_every_step(log: dict[str, bytes]) -> None:
    progress: list[tuple[int, int]] = []
    report = verify(MemoryFiles(log), progress=lambda done, size: progress.append((done, size)))
    assert report.ok and [step.title for step in report.steps] == list(TITLES)
    assert all(step.checked for step in report.steps)
    assert report.cosigned_by == ("eu-west",) and report.uncovered == 0
    assert report.records["INTENT"] == report.records["ACK"] and report.unanswered == 0
    assert report.leaves["INTENT"] + report.leaves["WITHHELD"] > 160 and report.leaves["DENY"] == 4
    assert progress == [(256, report.size), (report.size, report.size)]


COSIGNATURE = "— eu-west".encode()
"""A line of a note begins so."""


def test_one_changed_bit_in_any_file_is_found(log: dict[str, bytes]) -> None:
    """Every file; in each, bytes at a stride and both ends; in `make test-long` every one of the small ones."""
    assert {path.split("/")[0] for path in log} == {"checkpoint", "checkpoint.cosigned", "tile", "wal"}
    for path, data in log.items():
        stride = (
            count(5, 1)
            if len(data) < 300
            else count(21, 7)
            if path.startswith("checkpoint")
            else max(1, len(data) // count(8, 30))
        )
        for at in sorted({*range(0, len(data), stride), 1, len(data) - 1}):
            changed = bytearray(data)
            changed[at] ^= 1 << at % 8
            report = verify(MemoryFiles(log | {path: bytes(changed)}))
            if report.ok:
                # A cosignature whose key is not known any more is ignored, as the specification asks, and not counted.
                assert path.startswith("checkpoint") and at >= data.index(COSIGNATURE), f"{path}, byte {at}"
                assert path != "checkpoint" or not report.cosigned_by


def test_any_file_removed_is_found(log: dict[str, bytes]) -> None:
    for path in log:
        files = {name: data for name, data in log.items() if name != path}
        report = verify(MemoryFiles(files))
        if path == "checkpoint.cosigned":
            # The last checkpoint is cosigned itself, so this one is not missed.
            assert report.ok
        elif path.startswith("wal/"):
            # An exported copy has no write-ahead file; the report says so.
            assert report.ok and "there is none" in report.steps[8].note
        elif ".p/" in path and is_superseded(path, log):
            assert report.ok, (path, report.findings)
        else:
            assert not report.ok, path


def is_superseded(path: str, log: dict[str, bytes]) -> bool:
    """A partial file of an older checkpoint, which nothing needs any more."""
    size = open_checkpoint(log["checkpoint"], SIGNER.key).checkpoint.size
    return path not in (tile_path(0, 1, size - 256), bundle_path(1, size - 256), tile_path(1, 0, 1))


def test_any_file_cut_short_is_found(log: dict[str, bytes]) -> None:
    for path, data in log.items():
        for length in {0, 1, len(data) // 2, len(data) - 1}:
            assert not verify(MemoryFiles(log | {path: data[:length]})).ok, (path, length)


def leaves_of(log: dict[str, bytes]) -> list[bytes]:
    size = open_checkpoint(log["checkpoint"], SIGNER.key).checkpoint.size
    leaves = decode_bundle(log[bundle_path(0)], 256) + decode_bundle(
        log[bundle_path(1, size - 256)], size - 256
    )
    return [bytes(leaf) for leaf in leaves]


def with_leaves(log: dict[str, bytes], leaves: list[bytes], *, tiles: bool, signed: bool) -> dict[str, bytes]:
    """The log rewritten around other leaves: bundles always, tiles and the log's own signature where asked for."""
    files = {path: data for path, data in log.items() if path.startswith("checkpoint")}
    if not tiles:
        files |= {
            path: data for path, data in log.items() if path.startswith("tile/") and "entries" not in path
        }
    tree = Tree()
    for leaf in leaves:
        for tile in tree.add(leaf_hash(leaf)):
            if tiles:
                files[tile_path(tile.level, tile.number)] = tile.hashes
    for tile in tree.partial_tiles():
        if tiles:
            files[tile_path(tile.level, tile.number, tile.width)] = tile.hashes
    for at in range(0, len(leaves), 256):
        part = leaves[at : at + 256]
        files[bundle_path(at // 256, len(part))] = encode_bundle(part)
    if signed:
        text = Checkpoint(SIGNER.key.name, tree.size, tree.root()).text()
        files["checkpoint"] = encode_note(Note(text, (SIGNER.sign(text),)))
    return files


def edited(leaves: list[bytes]) -> list[bytes]:
    leaf = decode_leaf(leaves[10])
    return [
        *leaves[:10],
        encode_leaf(Leaf(msgspec.structs.replace(leaf.header, time_ms=5), leaf.entries)),
        *leaves[11:],
    ]


TAMPERINGS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "edited": edited,
    "removed": lambda leaves: [*leaves[:10], *leaves[11:]],
    "reordered": lambda leaves: [*leaves[:10], leaves[11], leaves[10], *leaves[12:]],
    "truncated": lambda leaves: leaves[:-1],
    "inserted": lambda leaves: [*leaves[:10], leaves[5], *leaves[10:]],
}


@pytest.mark.parametrize("name", TAMPERINGS)
@pytest.mark.parametrize("tiles", [False, True])
def test_a_rewritten_log_is_found(log: dict[str, bytes], name: str, tiles: bool) -> None:
    files = with_leaves(log, TAMPERINGS[name](leaves_of(log)), tiles=tiles, signed=False)
    report = verify(MemoryFiles(files))
    assert not report.ok
    if name == "edited":
        first = report.findings[0]
        assert (first.step, first.leaf) == ((4, 10) if not tiles else (7, 10)) or 5 in steps_of(report)


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_log_rewritten_and_signed_again_by_its_own_key_is_found_by_the_cosigner(
    log: dict[str, bytes], name: str
) -> None:
    files = with_leaves(log, TAMPERINGS[name](leaves_of(log)), tiles=True, signed=True)
    report = verify(MemoryFiles(files))
    assert 2 in steps_of(report) or 1 in steps_of(report)
    # Without the cosigned file next to it, what the cosigner remembers still tells.
    del files["checkpoint.cosigned"]
    report = verify(MemoryFiles(files), remembered=[log["checkpoint.cosigned"]], cosignatures_min=0)
    assert 2 in steps_of(report), report.findings


def test_a_rollback_to_an_older_honest_state_is_found(tmp_path: Path) -> None:
    appends = list(egress_appends(60))
    witness = write(tmp_path / "now", appends, cosign_at=50)
    write(tmp_path / "older", appends[:40])
    remembered = witness.last_note(SIGNER.key.name)
    assert remembered is not None
    report = verify(Folder(tmp_path / "older"), remembered=[remembered], cosignatures_min=0)
    assert steps_of(report) == {2} and "rolled back" in report.findings[0].sentence
    assert verify(Folder(tmp_path / "older"), cosignatures_min=0).ok, "alone it looks whole: hence cosigners"


def test_notes_of_other_logs_are_left_aside_and_one_of_this_log_counts_wherever_it_stands(
    log: dict[str, bytes],
) -> None:
    other = log["checkpoint"].replace(EGRESS_ORIGIN.encode(), b"another.acme/audit")
    assert verify(MemoryFiles(log), remembered=[other, b"no note"]).ok
    larger = Checkpoint(EGRESS_ORIGIN, 1_000_000, b"r" * 32).text()
    note = encode_note(Note(larger, (SIGNER.sign(larger, 1),)))
    report = verify(MemoryFiles(log), remembered=[other, note])
    assert steps_of(report) == {2} and "rolled back" in report.findings[0].sentence


def test_an_edited_tile_is_named(log: dict[str, bytes]) -> None:
    data = bytearray(log["tile/0/000"])
    data[5 * 32] ^= 1
    report = verify(MemoryFiles(log | {"tile/0/000": bytes(data)}))
    finding = report.findings[0]
    assert (finding.step, finding.leaf, finding.path) == (4, 5, "tile/0/000")
    assert 5 not in steps_of(report), "the entries still give the root, so it is the tile that was edited"


def test_a_missing_bundle_is_named_and_the_rest_still_checked(log: dict[str, bytes]) -> None:
    files = {path: data for path, data in log.items() if path != "tile/entries/000"}
    report = verify(MemoryFiles(files))
    assert (report.findings[0].step, report.findings[0].leaf) == (3, 0)
    assert steps_of(report) == {3, 7}, "the second bundle's grants are in the missing one"


def test_without_a_checkpoint_nothing_is_concluded(log: dict[str, bytes]) -> None:
    files = {path: data for path, data in log.items() if path != "checkpoint"}
    report = verify(MemoryFiles(files))
    assert [finding.sentence for finding in report.findings] == ["The checkpoint is missing."]
    assert all("not checked" in step.note for step in report.steps[1:])


def test_another_log_key_or_too_few_witnesses_is_found(log: dict[str, bytes]) -> None:
    (us, eu), seed9 = map(region_bundle, ("us-east", "eu-west")), key(9).verify_key.public
    others = region_bundle("us-east", audit_keys=(AuditKey(SIGNER.key.name, "log", seed9),))
    assert steps_of(verify(MemoryFiles(log), trust=Trust.of([others, eu]))) == {1}
    assert steps_of(verify(MemoryFiles(log), trust=Trust())) == {1}
    assert steps_of(verify(MemoryFiles(log), trust=Trust.of([us]))) == {1, 7, 8, 10}
    assert steps_of(verify(MemoryFiles(log), cosignatures_min=2)) == {1}
    assert steps_of(verify(MemoryFiles(log), origin=INGRESS_ORIGIN)) == {1}


def test_receipts_hold_under_keys_of_their_destination_alone(log: dict[str, bytes]) -> None:
    us, eu = map(region_bundle, ("us-east", "eu-west"))
    theirs, other = eu.receipt_keys, (key(15).verify_key.public,)
    swapped = [
        msgspec.structs.replace(us, receipt_keys=theirs),
        msgspec.structs.replace(eu, receipt_keys=other),
    ]
    assert verify(MemoryFiles(log), trust=Trust.of([us, eu])).ok
    assert steps_of(verify(MemoryFiles(log), trust=Trust.of(swapped))) == {8}
    assert steps_of(verify(MemoryFiles(log), trust=Trust.of([us]), cosignatures_min=0)) == {7, 8, 10}


def test_a_log_that_breaks_the_rules_between_leaves_is_found_though_every_hash_holds(tmp_path: Path) -> None:
    link = Link()
    grant, first, second = link.agreement(), link.intent(), link.intent()
    ack = link.ack(first)
    forged = Leaf(msgspec.structs.replace(ack.header, receipt=receipt_for(link.ack(second).header, second)))
    bare = Leaf(msgspec.structs.replace(ack.header, receipt=b""))
    cases: dict[str, tuple[list[Leaf], set[int]]] = {
        "a missing batch": ([*grant, *first, *link.intent()], {7}),
        "an intent twice": ([*grant, *first, *first], {7}),
        "an ack of nothing": ([*grant, ack], {7}),
        "no grant": (first, {7}),
        "another batch's receipt": ([*grant, *first, forged], {7, 8}),
        "no receipt": ([*grant, *first, bare], {8}),
    }
    for at, (leaves, steps) in enumerate(cases.values()):
        write(tmp_path / str(at), [leaves])
        report = verify(Folder(tmp_path / str(at)), cosignatures_min=0)
        assert steps_of(report) == steps, report.findings
        assert report.findings[0].leaf is not None


def test_an_ingress_log_verifies(tmp_path: Path) -> None:
    link = Link()
    appends = [link.agreement(Side.INGRESS)]
    for at in range(30):
        delivered = link.delivery(link.intent(3, withhold=(1,) if at % 3 else ()))
        appends.append(delivered)
    write(tmp_path, appends, origin=INGRESS_ORIGIN)
    report = verify_log(Folder(tmp_path), trust(), cosignatures_min=0)
    assert report.ok and report.records["ACK"] == 10 * 3 + 20 * 2


def test_a_torn_tail_behind_the_checkpoint_is_no_finding(tmp_path: Path) -> None:
    write(tmp_path, list(egress_appends(5)))
    (segment,) = (tmp_path / "wal").iterdir()
    with segment.open("ab") as file:
        file.write(b"FXwl and then the power went")
    report = verify(Folder(tmp_path), cosignatures_min=0)
    assert report.ok and "unfinished append" in report.steps[8].note


def test_leaves_that_no_checkpoint_covers_are_counted(tmp_path: Path) -> None:
    trail = Trail.open(tmp_path / "live", SIGNER, settings=QUIET)
    for leaves in egress_appends(5):
        ended = threading.Event()
        trail.append_nowait(leaves, lambda first, error, ended=ended: ended.set())  # type: ignore[misc]
        assert ended.wait(30)
    shutil.copytree(tmp_path / "live", tmp_path / "copy")
    trail.close()
    report = verify(Folder(tmp_path / "copy"), cosignatures_min=0)
    assert report.ok and report.size == 0 and report.uncovered == 16


def test_no_payload_and_no_plain_hash_of_one_is_in_any_file(tmp_path: Path) -> None:
    from hashlib import blake2b, sha256

    write(tmp_path, list(egress_appends(20)))
    everything = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    for offset in range(60):
        plain = payload(offset)
        assert plain not in everything
        for digest in (sha256(plain).digest(), blake2b(plain, digest_size=32).digest()):
            assert digest not in everything and digest[:16] not in everything
    assert b"key-" not in everything


def test_the_findings_of_a_log_that_is_all_wrong_are_bounded(log: dict[str, bytes]) -> None:
    files = dict(log)
    leaves = [leaf[:-1] + bytes([leaf[-1] ^ 1]) for leaf in leaves_of(log)] * 2
    tree = Tree()
    for leaf in leaves:
        tree.add(leaf_hash(leaf))
    files = with_leaves(log, leaves, tiles=True, signed=True)
    report = verify(MemoryFiles(files))
    assert not report.ok and len(report.findings) <= 1_000
    assert len(report.findings) + report.left_off == sum(step.findings for step in report.steps)


def test_kinds_are_all_in_the_sample(log: dict[str, bytes]) -> None:
    kinds = {decode_leaf(leaf).header.kind for leaf in leaves_of(log)}
    papers = {Kind.POLICY, Kind.GRANT, Kind.ACCEPT, Kind.APPROVE}
    assert kinds == {Kind.INTENT, Kind.ACK, Kind.WITHHELD, Kind.GAP, Kind.DENY} | papers


class Going(Folder):
    """The folder of a log that goes on while it is read: `then` is called once, before or behind the first access to `at`."""

    def __init__(self, path: Path, at: str, then: Callable[[], None], *, behind: bool = False) -> None:
        super().__init__(path)
        self._at, self._then, self._behind = at, [then], behind

    def _go_on(self, path: str) -> None:
        if path == self._at and self._then:
            self._then.pop()()

    def read(self, path: str) -> bytes | None:
        if not self._behind:
            self._go_on(path)
        data = super().read(path)
        if self._behind:
            self._go_on(path)
        return data

    def names(self, folder: str) -> list[str]:
        if not self._behind:
            self._go_on(folder)
        found = super().names(folder)
        if self._behind:
            self._go_on(folder)
        return found


class Kept:
    """An open log that is cosigned at each checkpoint."""

    def __init__(self, path: Path, appends: list[list[Leaf]]) -> None:
        self._appends = iter(appends)
        self._witness = Witness(WITNESS, [SIGNER.key], MemoryWitnessStore(), lambda: 1_760_000_000)
        settings = TrailSettings(
            checkpoint_interval_ms=3_600_000, checkpoint_leaves=1 << 30, segment_bytes_max=16 << 10
        )
        self.trail = Trail.open(path, SIGNER, witnesses=[self._witness.key], settings=settings)

    def go_on(self, appends: int) -> None:
        ended = threading.Semaphore(0)
        for appended in range(1, appends + 1):
            self.trail.append_nowait(next(self._appends), lambda first, error: ended.release())
            # A segment is as long as what is synced at once makes it: a few appends.
            if appended % 10 == 0 or appended == appends:
                for _ in range(appended % 10 or 10):
                    assert ended.acquire(timeout=60)
        note, last = self.trail.publish(), self._witness.last(SIGNER.key.name)
        size = open_checkpoint(note, SIGNER.key).checkpoint.size
        proof = self.trail.checkpoints.consistency_proof(last.size if last else 0, size)
        self.trail.add_cosigned(self._witness.cosign(note, proof))


@pytest.mark.parametrize("at", ["checkpoint", "checkpoint.cosigned"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_log_that_is_cosigned_while_it_is_verified_was_not_rolled_back(
    tmp_path: Path, at: str, behind: bool
) -> None:
    log = Kept(tmp_path, list(egress_appends(20)))
    log.go_on(10)
    report = verify(Going(tmp_path, at, lambda: log.go_on(5), behind=behind))
    log.trail.close()
    assert report.ok, report.findings


@pytest.mark.parametrize("behind", [False, True])
def test_segments_that_full_bundles_replaced_while_the_log_was_verified_are_not_missed(
    tmp_path: Path, behind: bool
) -> None:
    log = Kept(tmp_path, list(egress_appends(400)))
    log.go_on(60)
    before = Folder(tmp_path).names("wal")
    report = verify(Going(tmp_path, "wal", lambda: log.go_on(340), behind=behind))
    log.trail.close()
    assert report.ok, report.findings
    # All that were there are gone, and those that follow begin behind the checkpoint that was read.
    assert not {*before} & {*Folder(tmp_path).names("wal")}
    assert int(Folder(tmp_path).names("wal")[0][:20]) > report.size


@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize("read", [0, -1])
def test_a_write_ahead_log_that_goes_while_it_is_read_is_missed_unless_the_log_became_a_copy(
    tmp_path: Path, read: int, is_copied: bool
) -> None:
    log = Kept(tmp_path, list(egress_appends(80)))
    log.go_on(60)
    log.trail.close()
    note = Folder(tmp_path).read("checkpoint")
    assert note is not None
    checkpoint = open_checkpoint(note, SIGNER.key).checkpoint
    names = sorted(Folder(tmp_path).names("wal"))

    def go() -> None:
        if is_copied:
            become_copied(tmp_path, checkpoint.size, checkpoint.root)
            return
        for name in names:
            (tmp_path / "wal" / name).unlink()

    report = verify(Going(tmp_path, f"wal/{names[read]}", go))
    assert report.ok == is_copied, report.findings
    assert is_copied or "the checkpoint covers" in report.findings[0].sentence


def test_a_partial_bundle_that_is_replaced_while_it_is_compared_is_no_finding(tmp_path: Path) -> None:
    log = Kept(tmp_path, list(egress_appends(60)))
    for _ in range(3):
        log.go_on(5)
    partials = "tile/entries/000.p"
    oldest = Folder(tmp_path).names(partials)[0]

    def go_on() -> None:
        for _ in range(4):
            log.go_on(5)

    report = verify(Going(tmp_path, f"{partials}/{oldest}", go_on))
    log.trail.close()
    assert report.ok, report.findings
    assert oldest not in Folder(tmp_path).names(partials)


def test_segments_that_begin_behind_the_checkpoint_of_a_log_that_does_not_go_on_are_missed(
    tmp_path: Path,
) -> None:
    log = Kept(tmp_path, list(egress_appends(400)))
    log.go_on(60)
    note = Folder(tmp_path).read("checkpoint")
    assert note is not None
    log.go_on(340)
    log.trail.close()
    files = in_memory(tmp_path)
    files["checkpoint"] = files["checkpoint.cosigned"] = note
    assert 9 in steps_of(verify(MemoryFiles(files)))
