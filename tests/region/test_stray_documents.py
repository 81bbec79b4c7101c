"""What stands beside a region's audit log, or among its documents in the stream, and is no document: it stops nobody, and is told of."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from bridge_mesh import until
from region_home import make_region, running

from audit.document_leaf import DOCUMENT_FILE_BYTES_MAX, document_path, read_document
from audit.leaf import LEAF_BYTES_MAX, Header, Kind, Side
from audit.tile_disk import Folder
from felix.errors import CorruptionError, TamperError
from region.evidence import audit_log
from region.evidence.audit_log import DOCUMENTS, LEAVES, AuditLog, _Part, _parts
from region.evidence.stray_documents import TOLD_MAX, StrayDocuments
from region.log.point import LogPoint

DOCUMENT = b"a document" * 5_000


def beside(root: Path) -> Path:
    (folder := root / "documents").mkdir(parents=True, exist_ok=True)
    return folder


async def test_what_is_no_document_is_told_of_until_it_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, strays = beside(tmp_path), StrayDocuments(lambda: Folder(tmp_path))
    right, half = folder / sha256(DOCUMENT).hexdigest(), folder / sha256(b"another").hexdigest()
    right.write_bytes(DOCUMENT)
    half.write_bytes(b"anot")
    (folder / "notes.txt").write_bytes(b"hello")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "large").write_bytes(bytes(DOCUMENT_FILE_BYTES_MAX + 1))
    names = Folder(tmp_path).names("documents")
    await strays.look(names)
    told = "\n".join(strays.problems)
    assert len(strays.problems) == 5 and right.name not in told
    assert half.name in told and "lacks its document" in told
    assert sha256(b"hello").hexdigest() in told and "move it away" in told
    assert caplog.text.count("documents/notes.txt") == 1
    await strays.look(names)
    assert caplog.text.count("documents/notes.txt") == 1, "said once"
    half.write_bytes(b"another")
    (folder / "notes.txt").unlink()
    await strays.look(names)
    assert len(strays.problems) == 3


async def test_many_of_them_are_counted(tmp_path: Path) -> None:
    for number in range(TOLD_MAX + 3):
        (beside(tmp_path) / f"x{number:02}").write_bytes(b"x")
    strays = StrayDocuments(lambda: Folder(tmp_path))
    await strays.look(Folder(tmp_path).names("documents"))
    assert len(strays.problems) == TOLD_MAX + 1 and strays.problems[-1].startswith("3 more files")


def test_who_verifies_takes_it_for_missing(tmp_path: Path) -> None:
    digest = sha256(DOCUMENT).digest()
    (beside(tmp_path) / digest.hex()).write_bytes(DOCUMENT[:100])
    header = Header(
        kind=Kind.POLICY, side=Side.EGRESS, time_ms=1, source_region="a", destination_region="a", document_sha256=digest
    )  # fmt: skip
    with pytest.raises(TamperError, match="does not hold the document"):
        read_document(header, Folder(tmp_path))


async def test_a_broker_starts_beside_them_and_its_status_says_so(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "eu-west")
    async with running(folder):
        pass
    (beside(folder.root / "data" / "audit") / ("ab" * 32)).write_bytes(b"half")
    async with running(folder) as node:
        await until(lambda: bool(node.services.governance.problems), "what `felix region status` shows")
        (problem,) = node.services.governance.problems
        assert "ab" * 32 in problem


# -- of a log that brokers copy --------------------------------------------------------------------------


class Reading(AuditLog):
    """What a broker reads of the documents, and nothing else of the log. `batches`: of leaves that are committed, by their first."""

    def __init__(self, root: Path, *payloads: bytes) -> None:
        self._trail: Any = SimpleNamespace(files=Folder(root))
        self._parts, self._long, self._has_unread = {}, None, False
        self.payloads = payloads
        self.batches: dict[int, list[bytes]] = {}
        self._host: Any = SimpleNamespace(committed=lambda shard, kind: LogPoint(self.end()))
        self._shard: Any = None
        self._newest = None

    def end(self) -> int:
        return max((first + len(leaves) for first, leaves in self.batches.items()), default=0)

    async def _payloads(self, kind: int):  # type: ignore[no-untyped-def]
        assert kind == DOCUMENTS
        for payload in self.payloads:
            yield payload

    async def _append_around(self, index: int) -> int:
        return max(first for first in self.batches if first <= index)

    async def _read(self, kind: int, begin: LogPoint) -> list[tuple[int, list[bytes]]]:
        assert kind == LEAVES
        return [each for each in sorted(self.batches.items()) if each[0] >= begin.offset]


GARBAGE = {
    "no MessagePack": b"\xc1",
    "another shape": msgspec.msgpack.encode([1, 2]),
    "no parts": msgspec.msgpack.encode(_Part(bytes(32), 0, 0, b"")),
    "too many parts": msgspec.msgpack.encode(_Part(bytes(32), 0, 1_000, b"")),
    "a part behind the last": msgspec.msgpack.encode(_Part(bytes(32), 5, 2, b"")),
    "a part before the first": msgspec.msgpack.encode(_Part(bytes(32), -1, 2, b"")),
    "parts of something else": msgspec.msgpack.encode(_Part(bytes(32), 0, 1, b"x")),
    "leaves that are none": _parts(b"\xc1 no list", 7)[0],
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_a_record_of_the_documents_that_is_none_is_skipped(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    long = msgspec.msgpack.encode([b"1", b"2"])
    reading = Reading(tmp_path, GARBAGE[what], *_parts(DOCUMENT, -1), GARBAGE[what], *_parts(long, 3))
    await reading._read_documents()
    assert (tmp_path / document_path(sha256(DOCUMENT).digest())).read_bytes() == DOCUMENT
    assert reading._long == (3, [b"1", b"2"]) and reading._has_unread
    assert "is skipped" in caplog.text


async def test_what_stands_in_a_documents_place_is_replaced_by_it_and_what_is_no_file_stops_nothing(
    tmp_path: Path,
) -> None:
    other = b"another document" * 5_000
    path = beside(tmp_path) / sha256(DOCUMENT).hexdigest()
    path.write_bytes(b"half")
    (beside(tmp_path) / sha256(other).hexdigest()).mkdir()
    await Reading(tmp_path, *_parts(other, -1), *_parts(DOCUMENT, -1))._read_documents()
    assert path.read_bytes() == DOCUMENT


async def test_a_log_that_may_end_amid_an_append_whose_rest_cannot_be_read_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(tmp_path, GARBAGE["no MessagePack"])
    monkeypatch.setattr(reading, "_take_shown", reading._read_documents, raising=False)

    async def take_leaves(end: int) -> None:
        taken.append(end)

    monkeypatch.setattr(reading, "_take_leaves", take_leaves, raising=False)
    taken: list[int] = []
    signed = 2
    reading._trail.checkpoint = lambda: b""
    reading._trail.status = lambda: SimpleNamespace(durable=signed)
    monkeypatch.setattr(audit_log, "note_size", lambda note: signed)
    full = audit_log.BATCH_BYTES - LEAF_BYTES_MAX + 1
    reading.batches = {0: [b"a", b"b"], 2: [b"c"]}
    await reading._catch_up(SimpleNamespace())  # type: ignore[arg-type]
    assert taken == [3], "a small batch is the last of its append"
    reading.batches[2] = [bytes(full)]
    with pytest.raises(CorruptionError, match="whose rest cannot be read"):
        await reading._catch_up(SimpleNamespace())  # type: ignore[arg-type]
    signed = 3
    await reading._catch_up(SimpleNamespace())  # type: ignore[arg-type]
    assert taken == [3, 3], "what is signed is whole"
