"""Verification for reports, without Spark: the driver's steps and the executors', over one folder at a time."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from audit_log import key, log_signer, region_bundle
from crossing_logs import EGRESS_ORIGIN, five_days, read_leaves, trust, write_log, write_world

from audit.keys_in_log import KeysInLog
from audit.leaf import Kind
from audit.merkle import leaf_hash
from audit.spark.files import open_files
from audit.spark.source import check_bundle, read_options
from audit.spark.verification import STORY_STEPS, keys_of, notes_of, open_log, problems_of, verify_whole
from audit.tile import decode_bundle, encode_bundle
from audit.tile_disk import Folder
from audit.trust import Trust
from audit.verify import FINDINGS_MAX, TITLES, verify_log
from audit.verify import Report as Findings
from felix.errors import CorruptionError, RequestError
from keys.bundle import AuditKey

pytest.importorskip("pyspark")


def problems(path: Path) -> list[str]:
    """Everything that the driver and the executors find in a log."""
    try:
        log = open_log(str(path), trust(), cosignatures_min=0)
    except CorruptionError as error:
        return [error.sentence]
    size = log.checkpoint.size
    return [
        found.problem
        for bundle in range(-(-size // 256))
        for found in check_bundle(
            open_files(str(path)), bundle, size, keys_of(log, trust()), log.bundles.of(bundle)
        )
        if found.problem
    ]


@pytest.fixture
def egress(logs: list[Path], tmp_path: Path) -> Path:
    """A copy of the egress log, to do harm to."""
    return Path(shutil.copytree(logs[0], tmp_path / "egress"))


def test_logs_as_they_were_written_hold(logs: list[Path]) -> None:
    assert [problems(path) for path in logs] == [[], []]


def test_cosigners_and_how_far_they_signed_are_known(logs: list[Path]) -> None:
    log = open_log(str(logs[0]), trust())
    assert [(by.name, by.size) for by in log.cosigners] == [("eu-west", log.checkpoint.size)]
    assert log.checkpoint.origin == EGRESS_ORIGIN


def edit_bundle(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    bundle = path / "tile/entries/000"
    bundle.write_bytes(
        encode_bundle(change([bytes(leaf) for leaf in decode_bundle(bundle.read_bytes(), 256)]))
    )


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def edit_leaf(path: Path) -> None:
    edit_bundle(path, lambda leaves: [*leaves[:100], flip(leaves[100], 60), *leaves[101:]])


def remove_leaf(path: Path) -> None:
    edit_bundle(path, lambda leaves: [*leaves[:100], *leaves[101:]])


def swap_leaves(path: Path) -> None:
    edit_bundle(path, lambda leaves: [*leaves[:100], leaves[101], leaves[100], *leaves[102:]])


def cut_bundle(path: Path) -> None:
    bundle = path / "tile/entries/000"
    bundle.write_bytes(bundle.read_bytes()[:-10])


def remove_bundle(path: Path) -> None:
    (path / "tile/entries/000").unlink()


def edit_tile(path: Path) -> None:
    tile = path / "tile/0/000"
    tile.write_bytes(flip(tile.read_bytes(), 40))


def edit_edge_tile(path: Path) -> None:
    tile = max((path / "tile/0/001.p").iterdir(), key=lambda found: int(found.name))
    tile.write_bytes(flip(tile.read_bytes(), 40))


def edit_upper_tile(path: Path) -> None:
    tile = max((path / "tile/1/000.p").iterdir(), key=lambda found: int(found.name))
    tile.write_bytes(flip(tile.read_bytes(), 3))


def edit_leaf_and_its_tile(path: Path) -> None:
    edit_leaf(path)
    tile = path / "tile/0/000"
    leaf = decode_bundle((path / "tile/entries/000").read_bytes(), 256)[100]
    data = tile.read_bytes()
    tile.write_bytes(data[: 100 * 32] + leaf_hash(leaf) + data[101 * 32 :])


def edit_checkpoint(path: Path) -> None:
    note = path / "checkpoint"
    origin, size, rest = note.read_text().split("\n", 2)
    note.write_text(f"{origin}\n{int(size) - 1}\n{rest}")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (edit_leaf, "Leaf 100 .* is not what was logged"),
        (remove_leaf, "Leaves 0 to 255: .*255 entries where 256 belong"),
        (swap_leaves, "Leaf 100 .* is not what was logged"),
        (cut_bundle, "Leaves 0 to 255: .*ends inside"),
        (remove_bundle, "Leaves 0 to 255: .*missing"),
        (edit_tile, "Leaves 0 to 255: .*does not hash to its place"),
        (edit_edge_tile, "root in its checkpoint"),
        (edit_upper_tile, "root in its checkpoint"),
        (edit_leaf_and_its_tile, "does not hash to its place in level 1"),
        (edit_checkpoint, "signature"),
    ],
)
def test_each_kind_of_harm_is_found(egress: Path, harm: Callable[[Path], None], says: str) -> None:
    harm(egress)
    (egress / "checkpoint.cosigned").unlink()
    found = problems(egress)
    assert found, "the harm went unnoticed"
    assert re.search(says, found[0]), found


def test_a_log_that_was_rolled_back_behind_its_cosigned_checkpoint_is_refused(tmp_path: Path) -> None:
    world = five_days(40)
    long, _ = write_world(tmp_path / "long", world)
    write_log(tmp_path / "short", EGRESS_ORIGIN, world.egress[:30])
    shutil.copy(long / "checkpoint.cosigned", tmp_path / "short")
    assert "rolled back" in problems(tmp_path / "short")[0]


def test_another_history_than_the_cosigned_one_is_refused(tmp_path: Path) -> None:
    world = five_days(40)
    write_log(tmp_path / "a", EGRESS_ORIGIN, world.egress[:20], cosign=True)
    write_log(tmp_path / "b", EGRESS_ORIGIN, [world.egress[0], *world.egress[2:40]])
    shutil.copy(tmp_path / "a" / "checkpoint.cosigned", tmp_path / "b")
    assert "not the one that was cosigned" in problems(tmp_path / "b")[0]


def test_a_log_of_an_unknown_region_is_not_trusted(logs: list[Path]) -> None:
    with pytest.raises(CorruptionError, match="No bundle of 'us-east' is trusted"):
        open_log(str(logs[0]), Trust())


def with_log_keys(*seeds: int) -> Trust:
    keys = tuple(AuditKey(EGRESS_ORIGIN, "log", key(seed).verify_key.public) for seed in seeds)
    return Trust.of([region_bundle("us-east", audit_keys=keys), region_bundle("eu-west")])


def test_a_key_of_the_same_name_that_did_not_sign_is_not_enough(logs: list[Path]) -> None:
    with pytest.raises(CorruptionError, match="is not signed by the log"):
        open_log(str(logs[0]), with_log_keys(9))


def test_a_log_whose_key_was_changed_verifies_whichever_key_is_named_first(logs: list[Path]) -> None:
    for seeds in ((9, 1), (1, 9)):
        assert open_log(str(logs[0]), with_log_keys(*seeds)).key == log_signer(EGRESS_ORIGIN).key


def test_a_receipt_by_a_key_of_another_region_is_a_problem(logs: list[Path]) -> None:
    files, size = open_files(str(logs[0])), open_log(str(logs[0]), trust()).checkpoint.size
    us, eu = map(region_bundle, ("us-east", "eu-west"))
    both = [
        msgspec.structs.replace(us, receipt_keys=eu.receipt_keys),
        region_bundle("eu-west", receipt_keys=us.receipt_keys),
    ]
    wrong = [
        each
        for each in check_bundle(files, 0, size, KeysInLog(Trust.of(both), EGRESS_ORIGIN))
        if each.problem
    ]
    acks = [leaf for leaf in read_leaves(logs[0])[:256] if leaf.header.kind is Kind.ACK]
    assert len(wrong) == len(acks) > 0 and "none of eu-west's receipt keys" in str(wrong[0].problem)
    assert not [each for each in check_bundle(files, 0, size) if each.problem]
    keys = KeysInLog(Trust.decode(trust().encode()), EGRESS_ORIGIN)
    assert not [each for each in check_bundle(files, 0, size, keys) if each.problem]


def test_a_folder_without_a_log_is_an_error_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no audit log") as refused:
        open_log(str(tmp_path), trust())
    assert "tile/" in refused.value.hint


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs the option 'path'"),
        ({"path": "p", "entreis": "true"}, "no option 'entreis'"),
        ({"path": "p", "entries": "yes"}, "expected true or false"),
        ({"path": "p", "tampered": "ignore"}, "expected fail or rows"),
        ({"path": "p", "size": "-1"}, "expected a number"),
        ({"path": "p", "bundles": "0"}, "expected a number, 1 or more"),
        ({"path": "p", "trust": "zz"}, "not what `Trust.encode` writes"),
    ],
)
def test_a_wrong_option_says_what_was_expected(options: dict[str, str], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_options(options)


def test_a_log_is_read_through_a_url_as_from_its_folder(logs: list[Path]) -> None:
    pytest.importorskip("fsspec")
    url = f"file://{logs[0]}"
    assert open_log(url, trust()).checkpoint == open_log(str(logs[0]), trust()).checkpoint
    with pytest.raises(RequestError, match="cannot be opened"):
        open_files("nosuch://bucket/log")


# The whole log, as `felix audit verify` does it


def test_a_report_finds_whatever_felix_audit_verify_finds(egress: Path) -> None:
    """The rows' own checks see a leaf; only the whole log in its order shows what is missing from the story."""
    log = open_log(str(egress), trust())
    found = verify_whole(log, trust(), 1, ())
    assert found.ok and problems_of(found) == [], found.findings[:3]
    assert [step.title for step in found.steps] == list(TITLES)
    edit_leaf(egress)
    ill = verify_whole(log, trust(), 1, ())
    plain = verify_log(Folder(egress), trust(), cosignatures_min=1)
    assert ill.findings == plain.findings != []
    assert {problem.sentence for problem in problems_of(ill)} == {
        finding.sentence for finding in plain.findings if finding.step not in STORY_STEPS
    }


def test_a_log_that_grows_meanwhile_is_held_to_the_checkpoint_that_was_read(egress: Path) -> None:
    log = open_log(str(egress), trust())
    (egress / "checkpoint").write_bytes(b"something newer")
    assert verify_whole(log, trust(), 1, ()).ok
    assert not verify_log(Folder(egress), trust(), cosignatures_min=1).ok


def test_a_log_that_is_cosigned_while_it_is_opened_was_not_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = five_days().egress
    write_log(tmp_path / "log", EGRESS_ORIGIN, leaves[:-2], cosign=True)
    write_log(tmp_path / "later", EGRESS_ORIGIN, leaves, cosign=True)

    class Going(Folder):
        def read(self, path: str) -> bytes | None:
            found = super().read(path)
            if path == "checkpoint":
                shutil.copytree(tmp_path / "later", tmp_path / "log", dirs_exist_ok=True)
            return found

    monkeypatch.setattr("audit.spark.verification.open_files", lambda path: Going(Path(path)))
    log = open_log(str(tmp_path / "log"), trust())
    newest = open_log(str(tmp_path / "log"), trust())
    assert log.checkpoint.size < newest.checkpoint.size
    assert problems_of(verify_whole(log, trust(), 1, ())) == []


def test_what_somebody_remembers_is_asked_for_of_its_own_log_alone(egress: Path, logs: list[Path]) -> None:
    notes = [(path / "checkpoint").read_bytes() for path in logs]
    log = open_log(str(egress), trust(), remembered=notes)
    assert notes_of(notes, log.checkpoint.origin) == (notes[0],)
    assert verify_whole(log, trust(), 1, notes[:1]).ok


def test_a_cosignature_that_only_a_witness_remembers_counts_for_a_report_as_for_verify(egress: Path) -> None:
    """The log was put back from a backup that has none of its own."""
    note = (egress / "checkpoint").read_bytes()
    assert note == (egress / "checkpoint.cosigned").read_bytes()
    (egress / "checkpoint.cosigned").unlink()
    text, signatures = note.split(b"\n\n")
    own = [line for line in signatures.splitlines() if EGRESS_ORIGIN.encode() in line]
    (egress / "checkpoint").write_bytes(b"\n\n".join((text, b"\n".join((*own, b"")))))
    with pytest.raises(CorruptionError, match="0 trusted regions or witnesses"):
        open_log(str(egress), trust())
    assert not verify_log(Folder(egress), trust()).ok
    log = open_log(str(egress), trust(), remembered=[note])
    plain = verify_log(Folder(egress), trust(), remembered=[note])
    assert plain.ok and {each.name: each.size for each in log.cosigners} == plain.cosigners
    assert verify_whole(log, trust(), 1, [note]).ok


def test_no_finding_hides_behind_a_thousand_others() -> None:
    report = Findings("us-east.acme/audit")
    for number in range(FINDINGS_MAX + 5):
        report.find(7, f"rule {number}", leaf=number)
    assert problems_of(report) == []
    report.find(8, "A receipt's signature does not hold.", leaf=7)
    (problem,) = problems_of(report)
    assert problem.sentence.startswith("Every delivery has its receipt: 1 findings")
