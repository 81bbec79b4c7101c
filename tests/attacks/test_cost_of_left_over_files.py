"""A log's owner alone: files and leaves that cost nothing to write, and a verifier minutes to judge. What is read does not grow with their number."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_documents_of_one_grant import agreements
from audit_log import EGRESS_ORIGIN, Link, trust
from crossing_logs import write_log
from signed_grants import paper_leaf, policy_document, signed_grant, signing_key

from audit import agreement as agreement_module
from audit import wal_disk
from audit.file_size import BUNDLE_BYTES_MAX
from audit.leaf import Header, Leaf
from audit.tile import bundle_path
from audit.tile_disk import Folder
from audit.verify import PARTIAL_BUNDLES_READ, PARTIAL_FINDINGS_MAX, verify_log
from policy.signed import Purpose, sign

WIDTHS = range(1, 256)


class Counting(Folder):
    """A folder that counts what is read of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads = Counter[str]()

    def read(self, path: str) -> bytes | None:
        self.reads[path] += 1
        return super().read(path)

    @property
    def partial_bundles(self) -> int:
        return sum(count for path, count in self.reads.items() if "entries/" in path and ".p/" in path)


def appends(count: int) -> Iterator[list[Leaf]]:
    link = Link()
    yield link.agreement()
    for _ in range(count):
        intents = link.intent(1)
        yield [*intents, link.ack(intents)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of three full bundles and a part of one."""
    write_log(tmp_path / "log", EGRESS_ORIGIN, list(appends(3 * 128 + 40)), cosign=True)
    return tmp_path / "log"


def partial(log: Path, bundle: int, width: int) -> Path:
    path = log / bundle_path(bundle, width)
    path.parent.mkdir(exist_ok=True)
    return path


def test_partial_bundles_without_end_are_not_all_read(log: Path, tally: Tally) -> None:
    """Each as long as a full bundle, and nothing on the disk; then each a true part of the full one."""
    honest = Counting(log)
    assert verify_log(honest, trust()).ok
    for bundle in range(3):
        whole = (log / bundle_path(bundle)).read_bytes()
        for width in WIDTHS:
            path, end = partial(log, bundle, width), 0
            for _ in range(width):
                end += 2 + int.from_bytes(whole[end : end + 2])
            path.write_bytes(whole[:end])
    files = Counting(log)
    report = verify_log(files, trust())
    assert report.ok, report.findings
    assert "not compared" in report.steps[3].note
    assert files.partial_bundles <= honest.partial_bundles + 3 * PARTIAL_BUNDLES_READ
    tally("true partial bundles", 3 * len(WIDTHS))
    for bundle in range(3):
        for width in WIDTHS:
            path = partial(log, bundle, width)
            path.write_bytes(b"")
            os.truncate(path, BUNDLE_BYTES_MAX)
    files = Counting(log)
    report = verify_log(files, trust())
    assert {(found.step, found.path.partition(".p/")[2] != "") for found in report.findings} == {(4, True)}
    assert files.partial_bundles <= honest.partial_bundles + 3 * PARTIAL_BUNDLES_READ
    tally("sparse partial bundles", 3 * len(WIDTHS))


def test_partial_files_that_do_not_hold_are_not_looked_at_without_end(
    log: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr("audit.verify.PARTIAL_FINDINGS_MAX", PARTIAL_BUNDLES_READ + 1)
    for bundle in range(3):
        for width in WIDTHS[:8]:
            partial(log, bundle, width).write_bytes(b"another one")
    report = verify_log(Counting(log), trust())
    assert len(report.findings) == 2 * PARTIAL_BUNDLES_READ and PARTIAL_FINDINGS_MAX >= 64
    assert report.steps[3].note.startswith("16 partial files")
    tally("partial files that do not hold", 24)


@pytest.mark.parametrize("holds", [True, False])
def test_a_policy_that_is_named_again_and_again_is_read_once(
    holds: bool, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """Also one that does not hold, and one that its leaf misstates."""
    signed, found, opened = signed_grant(), agreements(), Counter[bytes]()
    real = agreement_module.open_policy

    def counted(document: object, *rest: object) -> object:
        opened[document.body] += 1  # type: ignore[attr-defined]
        return real(document, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(agreement_module, "open_policy", counted)
    documents = [policy_document("us-east", revision=number) for number in range(1, 9)]
    if not holds:
        key = signing_key("us-east")
        bad = [each.body.replace(b"revision: ", b"revisions: ") for each in documents]
        documents = [sign(Purpose.POLICY, "us-east", body, key) for body in bad]
    leaves = [paper_leaf(policy_document("us-east", revision=number), signed) for number in range(1, 9)]

    def load(header: Header) -> bytes | None:
        return files.get(header.document_sha256)

    files = {}
    for number, document in enumerate(documents):
        data = document.encode_file()
        digest = sha256(data).digest()
        files[digest] = data
        header = msgspec.structs.replace(leaves[number].header, document=b"", document_sha256=digest)
        leaves[number] = Leaf(header)
    for _ in range(5):
        for leaf in leaves:
            assert bool(found.take(0, leaf, load)) is not holds
            misstated = Leaf(msgspec.structs.replace(leaf.header, policy_version=99))
            assert found.take(0, misstated, load)
    assert set(opened.values()) == {1}
    tally("leaves that name a policy again", 5 * 2 * len(leaves))


@pytest.mark.parametrize(
    "overlaps", [b"FXwl" + bytes(4) + (65_535).to_bytes(4), b"FXwl"], ids=["whole", "first four"]
)
def test_what_looks_like_records_in_a_damaged_write_ahead_file_is_not_looked_at_without_end(
    log: Path, overlaps: bytes, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty million places in one file, each with as many bytes to be hashed as a leaf may have, and 64 files that are links to it."""
    looked, read_record = 0, wal_disk.read_record

    def counting(data: bytes, at: int) -> wal_disk.Record | None:
        nonlocal looked
        looked += 1
        return read_record(data, at)

    monkeypatch.setattr(wal_disk, "read_record", counting)
    monkeypatch.setattr(wal_disk, "LOOKS_MAX", 1_000)
    size = int((log / "checkpoint").read_text().split("\n")[1])
    (segment,) = (log / "wal").iterdir()
    whole = segment.read_bytes()
    segment.write_bytes(whole + overlaps * 5_000 + bytes(70_000))
    report = verify_log(Folder(log), trust(), cosignatures_min=0)
    assert looked < size + 1_100
    (found,) = report.findings
    assert found.step == 9 and "is damaged at byte" in found.sentence
    # A few, as a crash leaves them, are a torn tail.
    segment.write_bytes(whole + overlaps * 900 + bytes(70_000))
    assert verify_log(Folder(log), trust(), cosignatures_min=0).ok
    tally("places that look like records", 5_900)
