"""`felix identity` for programs and people on other machines: a folder to be copied there, and keys that never leave where they were made."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from region_process import BrokerProcess, fixed_region
from typer.testing import CliRunner, Result

import felix.sync
from cli.main import app
from felix.errors import Code, FelixError, RequestError

ORDERS = "acme/payments/orders"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home of a region that serves."""
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    broker = BrokerProcess(fixed_region(tmp_path), tmp_path)
    broker.wait()
    try:
        yield tmp_path
    finally:
        broker.kill()


def command(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def request_of(folder: Path, name: str, curve: str = "P-256") -> tuple[Path, Path]:
    """A key and a request for a certificate, as openssl makes them."""
    key, request = folder / f"{name}.key", folder / f"{name}.csr"
    made = ["genpkey", "-algorithm", "EC", "-pkeyopt", f"ec_paramgen_curve:{curve}", "-out", str(key)]
    for words in (made, ["req", "-new", "-key", str(key), "-subj", f"/CN={name}", "-out", str(request)]):
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    return key, request


def test_a_program_on_another_machine_comes_with_the_folder_that_was_made_for_it(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = tmp_path_factory.mktemp("away") / "home"
    done = command("identity", "issue", "orders-svc", "--allow", f"publish {ORDERS}", "--home", str(away))
    assert done.exit_code == 0 and f"Copy {away} to its machine" in done.stdout, done.output
    command("stream", "create", ORDERS)
    files = {str(each.relative_to(away)) for each in away.rglob("*") if each.is_file()}
    assert files == {
        f"us-east/{each}" for each in ("profile.json", "bundle.json", "identities/orders-svc.pem")
    }
    assert (away / "us-east/identities/orders-svc.pem").stat().st_mode & 0o777 == 0o600
    shutil.move(home / "us-east" / "identities", home / "us-east" / "not-here")
    monkeypatch.setenv("FELIX_HOME", str(away))
    with felix.sync.connect("us-east") as region:
        assert region.session.identity.endswith("client/orders-svc")
        assert region.stream(ORDERS).publish(b"x") == 0
    findings = json.loads(command("doctor", "--json").stdout)["items"]
    said = [(each["state"], each["found"]) for each in findings if each["what"] == "region us-east"]
    assert [state for state, _ in said] == ["ok", "ok"] and "lets" in said[1][1]


def test_a_key_that_was_made_elsewhere_stays_there(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = tmp_path_factory.mktemp("machine")
    key, request = request_of(machine, "app")
    words = ("identity", "issue", "app", "--request", str(request), "--allow", f"publish {ORDERS}")
    refused = command(*words)
    assert isinstance(refused.exception, RequestError) and "--home" in refused.exception.hint
    done = command(*words, "--home", str(machine / "home"))
    assert done.exit_code == 0 and "app.key" in done.stdout, done.output
    assert not (home / "us-east/identities/app.pem").exists()
    command("stream", "create", ORDERS)
    monkeypatch.setenv("FELIX_HOME", str(machine / "home"))
    chain = machine / "home/us-east/identities/app.pem"
    assert b"PRIVATE KEY" not in chain.read_bytes()
    with pytest.raises(RequestError, match="has no private key") as alone:
        felix.sync.connect("us-east").__enter__()
    assert "app.key" in alone.value.hint
    key.chmod(0o600)
    key.rename(chain.with_suffix(".key"))
    with felix.sync.connect("us-east") as region:
        assert region.session.identity.endswith("client/app")
        assert region.stream(ORDERS).publish(b"x") == 0


def test_what_cannot_be_requested_is_refused_with_the_way_on(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    machine = tmp_path_factory.mktemp("machine")
    _, request = request_of(machine, "app")
    _, other_curve = request_of(machine, "far", "P-384")
    broken = machine / "broken.csr"
    broken.write_bytes(request.read_bytes().replace(b"M", b"N", 5))

    def refusal(*words: str, to: Path = machine / "home") -> FelixError:
        done = command("identity", "issue", *words, "--home", str(to))
        assert isinstance(done.exception, FelixError), done.output
        return done.exception

    assert refusal("x", "--kind", "bridge", "--request", str(request)).code is Code.UNSUPPORTED
    assert "openssl genpkey" in refusal("x", "--request", str(other_curve)).hint
    assert refusal("x", "--request", str(broken)).code is Code.IDENTITY_REFUSED
    assert refusal("x", "--request", str(request), to=home).code is Code.CONFLICT
    assert command("identity", "issue", "alice", "--home", str(machine / "home")).exit_code == 0
    assert refusal("alice", "--kind", "approver", "--request", str(request)).code is Code.ALREADY_EXISTS
