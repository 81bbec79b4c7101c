"""A leaf whose judgement fails as nobody foresaw: it is told, the log does not pass, and everything else is judged all the same.

For each kind of leaf and each question that the verification asks of it an exception is raised there, in our own code; then in what a
report makes of leaves, of grants and of compared records, and in what a broker or an agent reads of its own log when it starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, INGRESS, LOGS, ORIGINS, REGION, files_of, world
from audit_log import EGRESS_ORIGIN, egress_appends, log_signer, trust
from crossing_logs import DEPARTURES, ORDERS, START_MS, World, write_log, write_world
from slow_runs import only_slow

import audit.unclean_leaf
import audit.verify
from audit.agreement import Agreements
from audit.checkpoint import note_size
from audit.continuity import Continuity
from audit.crossed import Crossed
from audit.leaf import Header, Kind, Leaf, decode_leaf
from audit.origin import Origin
from audit.position import Positions
from audit.tile import MemoryFiles
from audit.trail import Trail
from audit.trust import Trust
from audit.verify import verify_log
from bridge.egress_disk import open_egress
from bridge.ledger import Ledger


class BoomError(Exception):
    """Nobody foresaw it. It quotes what a leaf says: \x1b[2J."""


def failing(
    real: Callable[..., Any], told: Callable[..., Header | None], leaf: Leaf, raised: list[int]
) -> Any:
    """`real`, which fails where it is asked about this leaf."""

    def asked(*args: Any, **more: Any) -> Any:
        if told(*args) == leaf.header:
            raised.append(1)
            raise BoomError("\x1b[2J")
        return real(*args, **more)

    return asked


QUESTIONS: dict[str, tuple[int, Any, str, Callable[..., Header | None]]] = {
    "read": (6, audit.verify, "decode_leaf", lambda data: decode_leaf(data).header),
    "place": (6, Origin, "misplaced", lambda _, header: header),
    "unclean": (6, audit.unclean_leaf, "mistake", lambda header: header),
    "document": (10, Agreements, "take", lambda _, __, leaf, ___: leaf.header),
    "terms": (7, Agreements, "judge", lambda _, header: header),
    "named": (7, Agreements, "named", lambda _, header: header),
    "accounted": (7, Continuity, "apply", lambda _, leaf, *__: leaf.header),
    "again": (7, Crossed, "take", lambda _, leaf: leaf.header),
    "receipt": (8, audit.verify, "differences", lambda _, header: header),
}  # fmt: skip
"""What is asked of a leaf: the step, and whose answer it is."""


@pytest.mark.parametrize("log", LOGS)
def test_what_fails_at_one_leaf_is_told_of_it_and_stops_nothing(
    log: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tally: Tally
) -> None:
    leaves = dict(world())[log]
    files = files_of(log, leaves)
    kinds = {leaf.header.kind: index for index, leaf in enumerate(leaves)}
    asked = set[str]()
    for kind, index in kinds.items():
        for name, (step, owner, method, told) in QUESTIONS.items():
            raised: list[int] = []
            with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
                caplog.clear()
                real = getattr(owner, method)
                patch.setattr(owner, method, failing(real, told, leaves[index], raised))
                report = verify_log(files, trust())
            if not raised:
                assert report.ok
                continue
            asked.add(name)
            assert not report.ok
            told_of = [(found.step, found.sentence) for found in report.findings if found.leaf == index]
            assert any(
                (at, f"Leaf {index} could not be judged: BoomError." in sentence) == (step, True)
                for at, sentence in told_of
            ), (kind.name, name, told_of)
            # Nobody's mistake hides here, and what a leaf says moves no terminal.
            assert "test_unjudged.py" in caplog.text and "\x1b" not in caplog.text
            signed = [
                leaf.header.document_sha256 != b"" and leaf.header.kind is not Kind.UNCLEAN for leaf in leaves
            ]
            assert report.steps[5].checked == len(leaves) and report.steps[9].checked == sum(signed) - (
                name == "read" and signed[index]
            )
            tally(f"{log}: questions that failed at a leaf", 1)
    assert (
        asked
        == {
            EGRESS: set(QUESTIONS) - {"unclean"},
            INGRESS: set(QUESTIONS) - {"named", "receipt", "unclean"},
            REGION: set(QUESTIONS) - {"terms", "named", "receipt"},
        }[log]
    )
    assert set(Kind) == {leaf.header.kind for name in LOGS for leaf in dict(world())[name]}


def test_what_the_storage_raises_is_no_leafs_fault() -> None:
    files = files_of(EGRESS, dict(world())[EGRESS])
    leaf = next(leaf for leaf in dict(world())[EGRESS] if leaf.header.kind is Kind.POLICY)

    def read(header: Header, _: Any) -> bytes | None:
        if header == leaf.header:
            raise OSError(5, "Input/output error")
        return header.document

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit.verify, "read_document", read)
        with pytest.raises(OSError, match="Input/output"):
            verify_log(files, trust())


def small_world() -> World:
    world = World()
    for stream in (DEPARTURES, ORDERS):
        world.grant(stream, START_MS - 1_000)
        for shard in (0, 1):
            world.batch(stream, shard, START_MS + 1_000 + shard, 20, withheld=0.0)
    return world


@only_slow
@pytest.mark.spark
def test_a_report_is_made_and_says_so(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from audit.spark import report as report_module
    from audit.spark.report import EXIT_DIFFERENCES, run_report
    from audit.spark.verification import verify_whole

    made = small_world()
    logs = write_world(tmp_path, made)
    target = next(
        leaf for append in made.egress for leaf in append if leaf.header.kind is Kind.INTENT and leaf.header.stream == ORDERS
    )  # fmt: skip

    def here(_: Any, logs: Any, trusted: Trust, *more: Any) -> Any:
        # In this process, where the mistake is made.
        with monkeypatch.context() as patch:
            fails = failing(Continuity.apply, lambda _, leaf, *__: leaf.header, target, [])
            patch.setattr(Continuity, "apply", fails)
            return [verify_whole(log, trusted, more[0], ()) for log in logs]

    monkeypatch.setattr(report_module, "verify_all", here)
    result = run_report(logs, tmp_path / "out", trust=trust(), session=spark)
    assert result.exit_code == EXIT_DIFFERENCES and result.report.totals.records == 80
    breaches = [row for row in result.report.exceptions.records() if row["severity"] == "breach"]
    assert {(row["exception"], row["stream"]) for row in breaches} == {("rule-broken", ORDERS)}
    assert any("could not be judged: BoomError" in row["sentence"] for row in breaches)
    states = {(row["stream"], row["shard"]): row["status"] for row in result.report.reconciliation.records()}
    assert states == {
        (DEPARTURES, 0): "reconciled", (DEPARTURES, 1): "reconciled", (ORDERS, 0): "differs", (ORDERS, 1): "reconciled",
    }  # fmt: skip


def test_a_leaf_of_which_no_row_can_be_made_is_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyspark")
    import pyarrow as pa

    from audit.spark import source
    from audit.spark.files import open_files
    from felix.errors import TamperError

    logs = write_world(tmp_path, small_world())
    settings = source.read_options({"path": str(logs[0]), "tampered": "rows"})
    files, size = open_files(str(logs[0])), int((logs[0] / "checkpoint").read_text().split("\n")[1])
    whole = list(source.check_bundle(files, 0, size))
    assert len(whole) == size and not any(found.problem for found in whole)
    target = next(found.leaf for found in whole if found.leaf and found.leaf.header.kind is Kind.ACK)
    index = next(found.leaf_index for found in whole if found.leaf == target)
    for method, told in (
        ("decode_leaf", lambda data: decode_leaf(data).header),
        ("differences", lambda _, header: header),
        ("leaf_row", lambda leaf: leaf.header),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(source, method, failing(getattr(source, method), told, target, []))
            found = source.check_bundle(files, 0, size)
            rows = [source._judged("o", each, settings, source.BatchDigests()) for each in found]
        assert [row["leaf_index"] for row in rows] == list(range(size))
        problems = {row["leaf_index"]: row["problem"] for row in rows if row["problem"]}
        assert set(problems) == {index} and "could not be judged: BoomError" in problems[index], method
    # A value without room in its column: of the bundle's rows that one alone is lost.
    schema = pa.schema([("log", "string"), ("leaf_index", "int64"), ("code", "int32"), ("problem", "string")])
    given: list[dict[str, Any]] = [{"log": "o", "leaf_index": at, "code": 1 << 7 * at} for at in range(6)]
    made = source._batch(given, schema, settings).to_pylist()
    assert [row["leaf_index"] for row in made] == list(range(6))
    assert [bool(row["problem"]) for row in made] == [False] * 5 + [True]
    with pytest.raises(TamperError, match="could not be judged"):
        source._batch(given, schema, settings._replace(as_rows=False))


def test_a_grant_that_cannot_be_judged_gives_no_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    from audit.spark.agreements import rows_of

    leaves = list(enumerate(dict(world())[EGRESS]))
    (row,) = rows_of(EGRESS_ORIGIN, leaves, MemoryFiles({}), trust()).terms

    def fails(*_: Any) -> Any:
        raise BoomError

    for method, told in (("agreement", 1), ("take", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(Agreements, method, fails)
            read = rows_of(EGRESS_ORIGIN, leaves, MemoryFiles({}), trust())
        assert read.terms == [] and len(read.unjudged) == told
        assert all((log, leaf) == (ORIGINS[EGRESS], row[8]) for log, leaf, _ in read.unjudged)


def _header_of(*args: object) -> Header | None:
    """None for a leaf that was given up before."""
    return next((arg for arg in args if isinstance(arg, Header)), None)


@pytest.mark.parametrize("kind", [Kind.INTENT, Kind.ACK, Kind.GRANT])
def test_a_log_opens_whatever_one_of_its_leaves_does_to_what_reads_it_again(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appends = list(egress_appends(6))
    write_log(tmp_path / "log", EGRESS_ORIGIN, appends)
    for hint in ("positions", "ledger"):
        (tmp_path / "log" / hint).unlink(missing_ok=True)
    target = next(leaf for append in appends for leaf in append if leaf.header.kind is kind)
    for owner, method in ((Positions, "apply"), (Ledger, "apply")):
        raised: list[int] = []
        with monkeypatch.context() as patch:
            fails = failing(getattr(owner, method), _header_of, target, raised)
            patch.setattr(owner, method, fails)
            trail, ledger = open_egress(tmp_path / "log", log_signer(EGRESS_ORIGIN), [])
        assert raised and note_size(trail.checkpoint()) == sum(map(len, appends))
        assert (trail.positions.unreadable != ()) == (owner is Positions)
        assert ledger.documents
        trail.close()
        for hint in ("positions", "ledger"):
            (tmp_path / "log" / hint).unlink(missing_ok=True)
    again = Trail.open(tmp_path / "log", log_signer(EGRESS_ORIGIN))
    assert again.positions.unreadable == ()
    again.close()
