"""Looks for needles in whatever a region, a log or a wire holds: as they are, as hex, and as base64 at any alignment."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

FORM_CHARS_MIN = 12
"""What is left of a needle in base64 must be long enough not to be there by chance."""


def forms(needle: bytes) -> set[bytes]:
    """Every way in which the needle is looked for. It has 12 bytes at least, so that none of them is a coincidence."""
    assert len(needle) >= FORM_CHARS_MIN, needle
    found = {needle, needle.hex().encode(), needle.hex().upper().encode()}
    for shift in range(3):
        # The characters that depend on what stands before and after the needle are left off.
        encoded = base64.b64encode(bytes(shift) + needle)
        first = -(-shift * 8 // 6)
        kept = encoded.rstrip(b"=")[first : (shift + len(needle)) * 8 // 6]
        assert len(kept) >= FORM_CHARS_MIN
        found |= {kept, kept.translate(bytes.maketrans(b"+/", b"-_"))}
    return found


class Scanner:
    """Counts what it looked at in `bytes_seen`; `find` says which needles are where."""

    def __init__(self, needles: Mapping[str, bytes]) -> None:
        self._names = {form: name for name, needle in needles.items() for form in forms(needle)}
        self._pattern = re.compile(b"|".join(re.escape(form) for form in self._names))
        self.bytes_seen = 0
        self.files_seen = 0

    def find(self, data: bytes, where: str) -> set[tuple[str, str]]:
        """(needle, place) of each needle in these bytes."""
        self.bytes_seen += len(data)
        return {(self._names[hit], where) for hit in set(self._pattern.findall(data))}

    def find_in_files(self, *places: Path) -> set[tuple[str, str]]:
        """The same for every file at or below these places, and for the files' names."""
        found: set[tuple[str, str]] = set()
        for place in places:
            assert place.exists(), place
            for path in [place] if place.is_file() else sorted(place.rglob("*")):
                found |= self.find(str(path.relative_to(place.parent)).encode(), f"the name of {path}")
                if path.is_file():
                    self.files_seen += 1
                    found |= self.find(path.read_bytes(), str(path))
        return found

    def find_in_datagrams(self, datagrams: Iterable[bytes]) -> set[tuple[str, str]]:
        """The same for each datagram."""
        found: set[tuple[str, str]] = set()
        for number, data in enumerate(datagrams):
            found |= self.find(data, f"datagram {number}")
        return found
