"""Provenance: the regions a record has been in, carried in a record header from region to region. Pure.

The header's value is the regions in order, oldest first, joined by commas: `us-east,eu-west`. A bridge adds its
source region; a destination refuses a record that names it, so nothing goes in circles.
"""

from __future__ import annotations

from typing import Final

from felix.errors import Code, RequestError
from felix.names import parse_region

PATH_HEADER: Final = "felix-path"
HOPS_MAX: Final = 16
"""Regions in one path: more hops than a mesh has regions is a mistake."""


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
