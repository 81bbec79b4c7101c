"""`felix witness` and `--policy` as a person runs them; the witness serves in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from contextlib import chdir, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audit_log import (
    EGRESS_ORIGIN,
    POLICY_SEEDS,
    STREAM,
    egress_appends,
    key,
    log_signer,
    region_bundle,
    witness_signer,
)
from e2e.command_mesh import Said, environment
from typer.testing import CliRunner
from witness_logs import Log, body, post

from audit.note import (
    Algorithm,
    NoteSigner,
    VerifierKey,
    encode_note,
    parse_note,
    parse_signatures,
    verify_note,
)
from audit.submission import Submission
from audit.trail import Trail, TrailSettings
from audit.witness_client import WitnessTarget
from audit.witness_policy import WitnessPolicy
from audit.witness_sqlite import WitnessState
from cli.exits import exit_code
from cli.main import app
from felix.errors import FelixError
from keys.bundle import AuditKey, sign_bundle


class Served:
    """A witness's process. The port is what it says."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "cli.main",
                "witness",
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--dir",
                str(folder),
            ],
            env=environment(home),
            cwd=home,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        self.said = ""
        for line in self._process.stderr:
            self.said += line
            found = re.search(r"http://127\.0\.0\.1:(\d+)", self.said.replace("\n", ""))
            if found:
                self.port = int(found[1])
                return
        raise AssertionError(f"the witness ended: {self.said}")

    def end(self, number: int) -> int:
        assert self._process.stderr is not None
        self._process.send_signal(number)
        self._process.stderr.close()
        return self._process.wait(60)


def felix(home: Path, *words: str, code: int = 0) -> Said:
    """In this process: a command takes seconds to start, and only `serve` has to be one of its own."""
    with chdir(home):
        done = CliRunner().invoke(app, words, env={"FELIX_HOME": str(home)})
    error = done.exception
    if isinstance(error, FelixError):
        said = Said(exit_code(error), done.stdout, f"{done.stderr}{error.sentence} {error.hint}")
    else:
        assert error is None or isinstance(error, SystemExit), done.output
        said = Said(done.exit_code, done.stdout, done.stderr)
    assert said.code == code, said
    return said


def test_a_witness_is_made_told_of_a_log_served_killed_and_served_again(tmp_path: Path) -> None:
    log, folder = Log(), tmp_path / "w"
    said = felix(tmp_path, "witness", "init", "witness.example/w1", "--dir", str(folder)).out
    keys = [VerifierKey.parse(line) for line in said.split("\n") if line.startswith("witness.example/w1+")]
    assert len(keys) == 2
    felix(tmp_path, "witness", "init", "witness.example/w1", "--dir", str(folder), code=1)
    felix(tmp_path, "witness", "add-log", "nonsense", "--dir", str(folder), code=2)
    felix(tmp_path, "witness", "add-log", str(keys[0]), "--dir", str(folder), code=2)
    logs = tmp_path / "logs"
    logs.write_text(f"# anybody's\nlog {log.signer.key}\nlog {log.quantum.key}\nquorum none\n")
    said = felix(tmp_path, "witness", "add-log", "--from", str(logs), "--dir", str(folder)).out
    assert said == "log.example/1: cosigned from now on\n", "one line for a log, also of several keys"
    nowhere = felix(tmp_path, "witness", "list", "--dir", str(tmp_path / "nowhere"), code=1).err
    assert "felix witness init NAME --dir" in nowhere
    served = Served(tmp_path, folder)
    try:
        reply = post(served.port, log.request(0, 5))
        assert reply.status == 200
        assert (
            len(verify_note(parse_note(log.note(5))._replace(signatures=parse_signatures(reply.body)), keys))
            == 2
        )
        # A second log while it serves; a second server of the same state does not start.
        other = Log("log.example/2")
        assert post(served.port, other.request(0, 1)).status == 404
        felix(tmp_path, "witness", "add-log", str(other.signer.key), "--dir", str(folder))
        assert post(served.port, other.request(0, 1)).status == 200
        felix(tmp_path, "witness", "serve", "--dir", str(folder), "--listen", "127.0.0.1:0", code=1)
    finally:
        served.end(signal.SIGKILL)
    again = Served(tmp_path, folder)
    try:
        assert post(again.port, body(0, [], Log(word=b"fork").note(9))).body == b"5\n"
        assert post(again.port, log.request(5, 9)).status == 200
    finally:
        assert again.end(signal.SIGTERM) == 0
    assert "log.example/1" in felix(tmp_path, "witness", "list", "--dir", str(folder)).out
    (folder / "state.db").unlink()
    for words in (("serve", "--listen", "127.0.0.1:0"), ("list",), ("add-log", str(log.signer.key))):
        said = felix(tmp_path, "witness", *words, "--dir", str(folder), code=5).err
        assert "is lost" in said and "new witness" in said


def test_a_witness_takes_no_ended_key_of_a_log_from_a_list(tmp_path: Path) -> None:
    """A thief of the ended key would have another history cosigned, and the honest log none of its own any more."""
    base = region_bundle("us-east")
    old, new = (NoteSigner.from_key(EGRESS_ORIGIN, key(seed), Algorithm.ED25519).key for seed in (50, 51))
    others = tuple(each for each in base.audit_keys if each.name != EGRESS_ORIGIN)
    changed = (
        AuditKey(EGRESS_ORIGIN, "log", old.public, to_size=5),
        AuditKey(EGRESS_ORIGIN, "log", new.public, from_size=5),
    )
    bundle = sign_bundle(
        msgspec.structs.replace(base, audit_keys=(*others, *changed)), key(POLICY_SEEDS["us-east"])
    )
    (tmp_path / "bundle").write_bytes(bundle.encode())
    felix(tmp_path, "witness", "init", "w.example/1", "--dir", "w")
    logs = tmp_path / "logs"
    logs.write_text(felix(tmp_path, "audit", "policy", "--bundle", "bundle").out)
    assert (
        f"# ended at 5 leaves, which a policy cannot say: for verifiers, and not for a witness\nlog {old}"
        in logs.read_text()
    )
    assert WitnessPolicy.parse(logs.read_bytes()).log_keys.count(old) == 1, "a verifier asks for it"
    for more in ((), ("--in-place",)):
        said = felix(tmp_path, "witness", "add-log", "--from", "logs", "--dir", "w", *more, code=1).err
        assert "felix audit policy --signing" in " ".join(said.split())
    assert felix(tmp_path, "witness", "list", "--dir", "w", "-o", "name").out.strip() == ""
    logs.write_text(felix(tmp_path, "audit", "policy", "--signing", "--bundle", "bundle").out)
    assert str(old) not in logs.read_text()
    felix(tmp_path, "witness", "add-log", "--from", "logs", "--dir", "w")
    state = WitnessState.open(tmp_path / "w")
    with closing(state):
        known = state.log(EGRESS_ORIGIN)
    assert known is not None and known.keys == (new,)


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An egress log that eu-west and an outside witness cosigned, and the bundles, as files."""
    home = tmp_path_factory.mktemp("evidence")
    said = felix(home, "witness", "init", "witness.example/w1", "--dir", "w").out
    keys = tuple(
        VerifierKey.parse(line) for line in said.split("\n") if line.startswith("witness.example/w1+")
    )
    log, eu = log_signer(), witness_signer()
    felix(home, "witness", "add-log", str(log.key), "--dir", "w")
    trail = Trail.open(
        home / "log", log, witnesses=[eu.key, *keys], settings=TrailSettings(checkpoint_interval_ms=3_600_000)
    )
    with closing(trail):
        for leaves in egress_appends(20):
            ended = threading.Event()
            trail.append_nowait(leaves, lambda first, error, ended=ended: ended.set())  # type: ignore[misc]
            assert ended.wait(30)
        note = parse_note(trail.publish())
        trail.add_cosigned(encode_note(note.with_signatures([eu.cosign(note.text, 1_760_000_000)])))
        served = Served(home, home / "w")
        try:
            Submission(trail, WitnessTarget(f"http://127.0.0.1:{served.port}", keys)).submit()
        finally:
            served.end(signal.SIGTERM)
    bundles = []
    for region, seed in (("us-east", 8), ("eu-west", 10)):
        path = home / f"{region}.json"
        path.write_bytes(sign_bundle(region_bundle(region), key(seed)).encode())
        bundles += ["--bundle", str(path)]
    return {"home": home, "bundles": bundles, "keys": keys}


def test_a_policy_is_printed_edited_and_asked_for(evidence: dict[str, Any]) -> None:
    home, bundles, keys = evidence["home"], evidence["bundles"], evidence["keys"]
    text = felix(home, "audit", "policy", *bundles).out
    (home / "regions.policy").write_text(text)
    (home / "outside.policy").write_text(
        "".join(f"witness w{at} {key}\n" for at, key in enumerate(keys))
        + "group both all w0 w1\nquorum both\n"
    )
    stranger = VerifierKey("nobody.example/w", keys[0].algorithm, key(99).verify_key.public)
    (home / "stranger.policy").write_text(f"witness w {stranger}\nquorum w\n")
    (home / "broken.policy").write_text("quorum w\n")
    proofs = felix(home, "audit", "prove", "--stream", STREAM, "--offset", "0", "--log", "log", "--out", "p.tlog-proof",
                   "--format", "tlog-proof", *bundles)  # fmt: skip
    assert (home / "p.tlog-proof").exists() and (home / "p.ack.tlog-proof").exists(), proofs
    for name in ("p.tlog-proof", "p.ack.tlog-proof"):
        assert f"felix audit check-proof {name} --bundle" in proofs.out, (
            "the command names a file that is there"
        )
    felix(
        home,
        "audit",
        "prove",
        "--stream",
        STREAM,
        "--offset",
        "0",
        "--log",
        "log",
        "--out",
        "p.json",
        *bundles,
    )
    checks = [["audit", "verify", "log"], *(["audit", "check-proof", name] for name in
              ("p.tlog-proof", "p.ack.tlog-proof", "p.json"))]  # fmt: skip
    for check in checks:
        for policy, code in (("regions", 0), ("outside", 0), ("stranger", 5), ("broken", 1)):
            felix(home, *check, *bundles, "--policy", f"{policy}.policy", code=code)
    broken = felix(home, "audit", "verify", "log", *bundles, "--policy", "broken.policy", code=1).err
    assert "broken.policy: Line 1 of the policy" in broken
    alone = felix(home, "audit", "check-proof", "p.json", *bundles[:2], code=5).err
    assert "the bundle of each region with --bundle" in alone, "who has not the cosigner's bundle is told so"
    said = felix(home, "audit", "verify", "log", *bundles, "--policy", "stranger.policy", code=5)
    assert "no quorum" in said.err.replace("\n", " ") or "a quorum" in said.err.replace("\n", " ")
    assert felix(home, "audit", "policy", "--post-quantum", *bundles).out == "quorum none\n", (
        "no such keys here"
    )
