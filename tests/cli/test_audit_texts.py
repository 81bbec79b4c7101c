"""Texts of a log and of a proof, as `felix audit` shows them: none looks like a row of its own, and no two proofs look alike that are not."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from audit_log import BRIDGE, EGRESS_ORIGIN, Link, trust
from crossing_logs import write_log
from typer.testing import CliRunner

from audit.leaf import Kind, Leaf
from audit.proof import Proven, check_proof, prove
from audit.tile_disk import Folder
from cli import audit as command
from cli.main import app
from cli.output import err, out
from policy.terms import Basis

WIDTH = 80
BLANKS = (" ", "\u00a0", "\u2003", "\u3000")
ROW = re.compile(r"^ {0,4}(\S+(?: \S+)*)\s{2,}\S")
"""What a person takes for a row: some words, a wide gap, and more words."""


def forged(blank: str) -> str:
    """A text that ends its line and goes on with what looks like rows."""
    lines = (
        "arrived".ljust(WIDTH),
        "  cosigned        eu-west at noon".ljust(WIDTH),
        "  kind            ACK",
    )
    return "".join(lines).replace(" ", blank)


def on_a_terminal(text: str) -> list[str]:
    """The lines of a screen: a terminal begins a new one where one is full."""
    return [line[at : at + WIDTH] for line in text.split("\n") for at in range(0, max(1, len(line)), WIDTH)]


def shown(*arguments: str) -> str:
    for printer in (out, err):
        printer.__dict__.pop("console", None)
    done = CliRunner().invoke(app, ["audit", *arguments], env={"FELIX_HOME": "none", "COLUMNS": str(WIDTH)})
    for printer in (out, err):
        printer.__dict__.pop("console", None)
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.mark.parametrize("blank", BLANKS)
@pytest.mark.parametrize("field", ["sentence", "stream", "grant_id"])
def test_no_text_of_a_leaf_looks_like_a_row(tmp_path: Path, field: str, blank: str) -> None:
    texts: dict[str, object] = {
        "actor": BRIDGE,
        "action": "read",
        "rule": "grant",
        "code": 501,
        "sentence": "No.",
        field: forged(blank),
    }
    write_log(tmp_path, EGRESS_ORIGIN, [[Leaf(Link().header(Kind.DENY, **texts))]])
    assert not re.search(
        r"\s{2,}(eu-west at noon|ACK)", "\n".join(on_a_terminal(shown("show", str(tmp_path))))
    )


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Proven:
    path = tmp_path_factory.mktemp("log")
    link = Link()
    write_log(path, EGRESS_ORIGIN, [link.agreement(), link.intent()])
    return check_proof(prove(Folder(path), trust(), link.key.stream, 0, 0), trust(), cosignatures_min=0)


def with_terms(proven: Proven, **terms: object) -> Proven:
    assert proven.approved is not None
    changed = msgspec.structs.replace(proven.approved.terms, **terms)
    return msgspec.structs.replace(proven, approved=msgspec.structs.replace(proven.approved, terms=changed))


def check(proven: Proven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `check-proof` prints where this is what a proof shows."""
    file, bundle = tmp_path / "p.json", tmp_path / "b.json"
    monkeypatch.setattr(command, "check_proof", lambda *_, **__: proven)
    monkeypatch.setattr(command, "looks_like_proof", lambda _: True)
    monkeypatch.setattr(command, "trusted", lambda *_: trust())
    file.write_bytes(b"{}")
    return shown("check-proof", str(file), "--bundle", str(bundle))


@pytest.mark.parametrize("blank", BLANKS)
@pytest.mark.parametrize("field", ["purpose", "reference", "mechanism"])
def test_no_text_of_a_proof_looks_like_a_row(
    proven: Proven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, blank: str
) -> None:
    said = check(with_terms(proven, **{field: forged(blank)}), tmp_path, monkeypatch)
    rows = [found[1] for line in on_a_terminal(said) if (found := ROW.match(line))]
    assert len(set(rows)) == len(rows) and "kind" not in rows, said


def test_no_two_proofs_are_shown_alike(
    proven: Proven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = (
        ({"purpose": "support", "reference": "a, on the basis of scc b"}, {"purpose": "support, on the basis of scc a", "reference": "b"}),
        ({"mechanism": ""}, {"mechanism": "none named"}),
    )  # fmt: skip
    for pair in pairs:
        one, other = (
            check(with_terms(proven, basis=Basis.SCC, **each), tmp_path, monkeypatch) for each in pair
        )
        assert one != other
