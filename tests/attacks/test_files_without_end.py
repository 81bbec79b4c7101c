"""A log's owner alone: files of a terabyte that take no room, pipes in their place. None is read, none is waited for, each is a finding."""

from __future__ import annotations

import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from attacks.conftest import Tally
from audit_log import EGRESS_ORIGIN, Link, trust
from crossing_logs import write_log

from audit.document_leaf import document_path
from audit.file_size import BUNDLE_BYTES_MAX, file_bytes_max
from audit.leaf import Kind, Leaf
from audit.spark.files import open_files
from audit.spark.verification import open_log
from audit.tile import Files, bundle_path, decode_bundle, encode_bundle, tile_path
from audit.tile_disk import Folder
from audit.verify import Report, verify_log
from felix.errors import TamperError

MIB = 1 << 20
MEMORY = 64 * MIB
DOCUMENT = b"d" * 30_000
PATHS = {
    "checkpoint": 1,
    "checkpoint.cosigned": 2,
    "checkpoint.witnessed": 2,
    tile_path(0, 0, 5): 4,
    bundle_path(0, 5): 3,
    bundle_path(0, 3): 4,
    "wal/00000000000000000000.wal": 9,
    document_path(sha256(DOCUMENT).digest()): 10,
}
"""A file of each kind, and the step that finds it."""


def sparse(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


MADE: tuple[Callable[[Path], None], ...] = (sparse, pipe, folder, circle, device)


@contextmanager
def bounded() -> Iterator[None]:
    """Whoever waits for the other end of a pipe is woken; whoever reads a terabyte is told how much."""

    def woken(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, woken)
    signal.alarm(60)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of five leaves; the first one's document stands beside it."""
    path, link = tmp_path_factory.mktemp("log"), Link()
    leaves = [leaf for leaf in link.agreement() if leaf.header.kind is not Kind.POLICY][:4]
    beside = dict(_fields(leaves[0]), document=b"", document_sha256=sha256(DOCUMENT).digest())
    write_log(path, EGRESS_ORIGIN, [[Leaf(type(leaves[0].header)(**beside)), *leaves]], cosign=True)
    return path


def _fields(leaf: Leaf) -> dict[str, object]:
    return {name: getattr(leaf.header, name) for name in leaf.header.__struct_fields__}


def steps(report: Report) -> set[tuple[int, str]]:
    return {(found.step, found.sentence) for found in report.findings}


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_what_cannot_be_a_file_of_a_log_is_a_finding(
    made: Callable[[Path], None], log: Path, tally: Tally
) -> None:
    (log / "documents").mkdir(exist_ok=True)
    whole = steps(verify_log(Folder(log), trust(), cosignatures_min=0))
    for path, step in PATHS.items():
        place = log / path
        place.parent.mkdir(exist_ok=True)
        kept = place.read_bytes() if place.exists() else None
        place.unlink(missing_ok=True)
        made(place)
        try:
            for files in (Folder(log), open_files(log.as_uri())):
                with bounded():
                    report = verify_log(files, trust(), cosignatures_min=0)
                told = [sentence for number, sentence in steps(report) - whole if number == step]
                assert any("more than" in said or "is not a file" in said for said in told), (
                    path,
                    report.findings,
                )
            if path.startswith("checkpoint") or path == tile_path(0, 0, 5):
                with bounded(), pytest.raises(TamperError, match=r"more than|is not a file"):
                    open_log(str(log), trust(), cosignatures_min=0)
        finally:
            place.rmdir() if made is folder else place.unlink()
            if kept is not None:
                place.write_bytes(kept)
    assert steps(verify_log(Folder(log), trust(), cosignatures_min=0)) == whole
    tally("files that cannot be a log's", len(PATHS))


def test_what_is_read_at_a_url_ends_where_a_file_must(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    most = file_bytes_max("checkpoint")
    assert most is not None
    files: Files = open_files("memory://log")
    for size in (0, 1, most, most + 1, 1000 * most):
        system.pipe_file("/log/checkpoint", bytes(size))
        if size <= most:
            assert files.read("checkpoint") == bytes(size)
            continue
        with pytest.raises(TamperError, match="more than"):
            files.read("checkpoint")
    assert files.read("checkpoint.cosigned") is None
    system.rm("/log", recursive=True)


def test_a_bundle_of_empty_entries_is_given_up_where_it_has_too_many() -> None:
    assert len(decode_bundle(encode_bundle([b""] * 256), 256)) == 256
    with bounded(), pytest.raises(TamperError, match="more than the 256 entries"):
        decode_bundle(bytes(BUNDLE_BYTES_MAX), 256)
