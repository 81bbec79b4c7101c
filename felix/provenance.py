"""Provenance: the regions a record has been in, carried in a record header from region to region. Pure.

The header's value is the regions in order, oldest first, joined by commas: `us-east,eu-west`. A bridge adds its
source region; a destination refuses a record that names it, so nothing goes in circles. It says something in a batch that a
bridge brought alone (`felix.batch.BatchHeader.is_bridged`): in any other the record's producer may have written it. What the records of one batch
have been in altogether (`PathUnion`) both ends of a bridge write into their audit logs.
"""

from __future__ import annotations

from collections.abc import Container
from hashlib import sha256
from typing import Final

from felix.errors import Code, RequestError
from felix.names import parse_region

PATH_HEADER: Final = "felix-path"
HOPS_MAX: Final = 16
"""Regions in one path: more hops than a mesh has regions is a mistake."""
UNION_REGIONS_MAX: Final = 64
"""Regions that the records of one batch have been in, all together: what a leaf lists of names (audit.leaf). Of more the agent makes two
batches; one record names HOPS_MAX at most."""


def check_own(headers: Container[str]) -> None:
    """The headers that a producer gives a record. Raises RequestError(INVALID) where they name regions, which bridges alone do."""
    if PATH_HEADER in headers:
        raise RequestError(
            f"The header {PATH_HEADER} is written by bridges; a producer does not set it.",
            hint="Leave it out where you publish what you read with its headers.",
        )


def parse_path(value: bytes) -> tuple[str, ...]:
    """The regions of a path. Raises RequestError(LOOP_REFUSED) for what is no path: it cannot be judged."""
    try:
        regions = tuple(parse_region(part) for part in value.decode("ascii").split(","))
    except (UnicodeDecodeError, RequestError) as error:
        raise RequestError(
            "A record's provenance cannot be read, so it cannot be known where it has been.",
            code=Code.LOOP_REFUSED,
            hint=f"Producers must not set the header {PATH_HEADER}.",
        ) from error
    if len(regions) > HOPS_MAX:
        raise RequestError(f"A record has been in {len(regions)} regions.", code=Code.LOOP_REFUSED)
    return regions


def encode_path(regions: tuple[str, ...]) -> bytes:
    """A path as a header's value."""
    return ",".join(regions).encode()


def path_sha256(regions: tuple[str, ...]) -> bytes:
    """SHA-256 of a path, or of a batch's regions, as a header's value; empty of none."""
    return sha256(encode_path(regions)).digest() if regions else b""


class PathUnion:
    """The regions that the records of one batch have been in: where all took one way that way, else all regions by name, the last one,
    which the records came from, at the end."""

    __slots__ = ("_all", "_first")

    def __init__(self) -> None:
        self._first: tuple[str, ...] = ()
        self._all: set[str] = set()
        """empty: all records took the first one's way"""

    def add(self, path: tuple[str, ...]) -> None:
        """Take a record's path, which ends where the others do. Raises RequestError(BATCH_TOO_LARGE) above UNION_REGIONS_MAX regions."""
        if path == self._first:
            return
        if not self._first:
            self._first = path
            return
        self._all.update(self._first, path)
        if len(self._all) > UNION_REGIONS_MAX:
            raise RequestError(
                f"The records of one batch have been in more than {UNION_REGIONS_MAX} regions.",
                code=Code.BATCH_TOO_LARGE,
                hint="A bridge agent of now sends such a batch in parts.",
            )

    @property
    def regions(self) -> tuple[str, ...]:
        """None where no record was taken."""
        if not self._all:
            return self._first
        last = self._first[-1]
        return (*sorted(self._all - {last}), last)
