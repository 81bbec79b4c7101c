"""What is left of a key on the disk, and what an audit log says of it."""

from __future__ import annotations

from pathlib import Path

from audit.leaf import Header, Kind, decode_leaf
from audit.tile import read_entries
from audit.tile_disk import Folder


def key_leaves(path: Path, action: str = "destroyed") -> list[Header]:
    """The KEY leaves of a log, by what happened."""
    folder = Folder(path)
    note = (path / "checkpoint").read_bytes()
    size = int(note.split(b"\n")[1])
    headers = (decode_leaf(bytes(data)).header for _, data in read_entries(folder, 0, size, size))
    return [header for header in headers if (header.kind, header.action) == (Kind.KEY, action)]


def scan(folder: Path, *wanted: bytes) -> tuple[int, list[str]]:
    """How many bytes all files of a folder have, and which of them have one of these."""
    scanned, found = 0, []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            scanned += len(data)
            found += [str(path.relative_to(folder)) for secret in wanted if secret in data]
    return scanned, found
