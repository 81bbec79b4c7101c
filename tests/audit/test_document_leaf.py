"""Document leaves: inline where short, beside the log where long, and never another document than the named one."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from audit.document_disk import keep_document
from audit.document_leaf import DOCUMENT_FILE_BYTES_MAX, document_leaf, document_path, read_document
from audit.leaf import DOCUMENT_BYTES_MAX, Kind, Leaf, Side, decode_leaf, encode_leaf
from audit.tile_disk import Folder
from felix.errors import RequestError, TamperError


def leaf(document: bytes) -> Leaf:
    return document_leaf(
        Kind.ACCEPT,
        document,
        side=Side.EGRESS,
        time_ms=5,
        actor="spiffe://us-east.acme/bridge/us-to-eu",
        source_region="us-east",
        destination_region="eu-west",
        grant_id="g-1",
        terms_hash=b"t" * 32,
    )


@pytest.mark.parametrize("size", [1, DOCUMENT_BYTES_MAX, DOCUMENT_BYTES_MAX + 1, DOCUMENT_FILE_BYTES_MAX])
def test_a_document_is_read_again_wherever_it_stands(tmp_path: Path, size: int) -> None:
    document = b"d" * size
    keep_document(Folder(tmp_path), document)
    keep_document(Folder(tmp_path), document)
    header = decode_leaf(encode_leaf(leaf(document))).header
    assert read_document(header, Folder(tmp_path)) == document
    beside = size > DOCUMENT_BYTES_MAX
    assert (header.document == b"") is beside
    assert (tmp_path / document_path(sha256(document).digest())).is_file() is beside


def test_a_file_that_holds_something_else_is_found_and_one_that_is_missing_is_none(tmp_path: Path) -> None:
    document = b"d" * (DOCUMENT_BYTES_MAX + 1)
    header = leaf(document).header
    assert read_document(header, Folder(tmp_path)) is None
    keep_document(Folder(tmp_path), document)
    (tmp_path / document_path(header.document_sha256)).write_bytes(document[:-1])
    with pytest.raises(TamperError):
        read_document(header, Folder(tmp_path))


@pytest.mark.parametrize("size", [0, DOCUMENT_FILE_BYTES_MAX + 1])
def test_no_document_and_too_long_a_document_have_no_leaf(size: int) -> None:
    with pytest.raises(RequestError, match="cannot be audited"):
        leaf(b"d" * size)
