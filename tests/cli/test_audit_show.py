"""`felix audit show` of a folder that anybody may have written: it verifies nothing, and ends with a sentence whatever stands there."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_log import EGRESS_ORIGIN, REGION_ORIGIN, egress_appends, log_signer
from crossing_logs import write_log
from typer.testing import CliRunner

from audit.leaf import Leaf
from audit.note import Note, encode_note
from audit.unclean_leaf import UncleanElection, unclean_leaf
from cli.main import app
from felix.errors import FelixError


def show(log: Path, *more: str) -> str:
    done = CliRunner().invoke(app, ["audit", "show", str(log), *more], env={"FELIX_HOME": str(log / "none")})
    if done.exception is not None:
        raise done.exception
    return " ".join(done.output.split())


@pytest.mark.parametrize(
    "text",
    [
        "us-east.acme/audit\n",
        "us-east.acme/audit\nmany\nAAAA\n",
        "us-east.acme/audit\n-1\n47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\n",
        f"us-east.acme/audit\n{'9' * 5_000}\n47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\n",
        "\n",
    ],
)
def test_a_checkpoint_that_is_none_is_refused_in_words(tmp_path: Path, text: str) -> None:
    note = Note(text, (log_signer(EGRESS_ORIGIN).sign(text),))
    (tmp_path / "checkpoint").write_bytes(encode_note(note))
    with pytest.raises(FelixError, match=r"[Cc]heckpoint"):
        show(tmp_path)


def test_the_newest_leaves_are_shown_however_many_there_are(tmp_path: Path) -> None:
    write_log(tmp_path, EGRESS_ORIGIN, egress_appends(10))
    count = int((tmp_path / "checkpoint").read_text().split("\n")[1])
    assert show(tmp_path, "--last", "1").count(" ACK ") == 1
    assert (
        show(tmp_path, "--last", "0").count(" ACK ")
        == show(tmp_path, "--last", str(count)).count(" ACK ")
        == 10
    )
    assert "Invalid value" in _usage(tmp_path, "--last", "-1")


def _usage(log: Path, *more: str) -> str:
    done = CliRunner().invoke(app, ["audit", "show", str(log), *more], env={"FELIX_HOME": str(log / "none")})
    assert done.exit_code == 2
    return done.output


def test_an_unclean_election_is_told_by_its_statement_and_not_by_the_sentence_beside_it(
    tmp_path: Path,
) -> None:
    said = UncleanElection(
        stream="acme/ops/orders", incarnation="ab" * 16, shard=3, epoch=9, election="0a", cause="recovered", leader="b2",
        given_up=("b1", "b3"),
    )  # fmt: skip
    leaf = unclean_leaf(said, region="us-east", time_ms=5, writer="spiffe://us-east.acme/broker/b1")
    fields = {name: getattr(leaf.header, name) for name in leaf.header.__struct_fields__}
    other = Leaf(type(leaf.header)(**(fields | {"sentence": "Nothing was lost."})))
    write_log(tmp_path, REGION_ORIGIN, [[other]])
    assert "Given up: b1, b3." in show(tmp_path) and "Nothing was lost" not in show(tmp_path)
