"""A log that its owner serves, written anew below the end of a former key: whoever asks what it was at that end is answered as by the honest one.

The thief has eu-west's former keys and every key of us-east's logs, and a witness cosigns that never saw the honest history. The server knows what each
reading is for, which is more than any could: it answers rightly where the end's root is asked, and by the forged log otherwise; or each single reading rightly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from attacks.conftest import Tally
from attacks.test_former_keys import (
    FORMER,
    NEW_RECEIPT_KEY,
    WHAT,
    end,
    ended,
    rewritten,
    root_of,
    stolen,
    story,
    under,
)
from audit_log import EGRESS_ORIGIN, RECEIPT_KEY, STREAM, TIME_MS, Link, key, log_signer, region_bundle
from signed_grants import opened_policy, paper_leaf, policy_document, signed_grant, signing_key
from slow_runs import only_slow

import audit.spark.agreements as agreements
import audit.spark.report as reports
import audit.spark.verification as verification
from audit.checkpoint import Checkpoint
from audit.keys_in_log import KeysInLog
from audit.leaf import Kind, Leaf, encode_leaf
from audit.merkle import TILE_WIDTH, Tree, leaf_hash
from audit.note import Algorithm, Note, NoteSigner, encode_note, parse_note
from audit.proof import find_crossing, keys_of_files, prove, read_checkpoints
from audit.spark.exceptions import BREACH
from audit.tile import CHECKPOINT_PATH, WAL_FOLDER, Files, MemoryFiles, bundle_path, encode_bundle, tile_path
from audit.tlog_proof import prove_leaves
from audit.trust import Trust
from audit.verify import verify_log
from audit.wal_disk import encode_append, segment_name
from audit.witness_policy import WitnessPolicy
from felix.errors import TamperError
from keys.bundle import KeyEnd
from policy.grant import Standing, StandingAction, sign_export, sign_standing
from region.evidence.document_log import DocumentLog, _Logged

WITNESS: Final = NoteSigner.from_key("witness.example", key(77), Algorithm.COSIGNATURE)
THIEF: Final = FORMER.verify_key.public


def written(leaves: Sequence[Leaf]) -> MemoryFiles:
    """The log with these leaves, signed by its key and cosigned by the outside witness."""
    data, tree, found = [encode_leaf(leaf) for leaf in leaves], Tree(), dict[str, bytes]()
    tiles = [tile for each in data for tile in tree.add(leaf_hash(each))]
    for tile in (*tiles, *tree.partial_tiles()):
        found[tile_path(tile.level, tile.number, tile.width)] = tile.hashes
    for number, at in enumerate(range(0, len(data), TILE_WIDTH)):
        part = data[at : at + TILE_WIDTH]
        found[bundle_path(number, len(part))] = encode_bundle(part)
    text = Checkpoint(EGRESS_ORIGIN, len(data), tree.root()).text()
    lines = (log_signer(EGRESS_ORIGIN).sign(text), WITNESS.cosign(text, TIME_MS // 1000 + 3_600))
    return MemoryFiles(found | {CHECKPOINT_PATH: encode_note(Note(text, lines))})


class Served:
    """The forged log; tiles of the honest one, as wide, at those readings that `rightly` names, by number."""

    def __init__(self, forged: Files, honest: Files, rightly: Callable[[int], bool]) -> None:
        self._forged, self._honest, self._rightly = forged, honest, rightly
        self.readings = 0

    def read(self, path: str) -> bytes | None:
        if not path.startswith("tile/") or path.startswith("tile/entries"):
            return self._forged.read(path)
        self.readings += 1
        return (self._honest if self._rightly(self.readings - 1) else self._forged).read(path)

    def names(self, folder: str) -> list[str]:
        return self._forged.names(folder)


def where_the_end_is_asked(_: int) -> bool:
    frame = sys._getframe(1)
    while (above := frame.f_back) is not None:
        if "keys_of_log" in frame.f_code.co_qualname or frame.f_code.co_name == "_has_passed":
            return True
        frame = above
    return False


def longer(leaves: list[Leaf], size: int) -> list[Leaf]:
    """The honest log, so much longer: its tiles are as wide as the forged one's."""
    more = [*leaves, *(leaf for _ in range(size) for leaf in Link().intent())]
    return more[:size]


def trusting(at: KeyEnd, kind: str = "policy") -> Trust:
    bundles = [ended(at), region_bundle("us-east")]
    if kind == "policy":
        policy = WitnessPolicy.parse(f"witness w {WITNESS.key}\nquorum w\n".encode())
        return Trust.of(bundles).under(policy)
    return Trust.of(bundles, [WITNESS.key])


def forgeries() -> list[tuple[str, MemoryFiles, MemoryFiles, KeyEnd]]:
    """What was put below the end: the forged log, the honest one, and where the keys ended."""
    found = []
    for what in WHAT:
        forged = rewritten(what)
        found.append((what, written(forged), written(longer(story().leaves, len(forged))), end()))
    return found


def large(what: str) -> tuple[list[Leaf], list[Leaf], KeyEnd]:
    """The leaves of such logs of three bundles, with the end in the third."""
    link, size = Link(), 600
    leaves = [*link.agreement()]
    at = len(leaves)
    while len(leaves) < size:
        intents = link.intent()
        leaves += [*intents, under(RECEIPT_KEY, link.ack(intents))]
    before, tail = leaves[:size], list[Leaf]()
    while len(tail) < 60:
        intents = link.intent()
        tail += [*intents, under(NEW_RECEIPT_KEY, link.ack(intents))]
    forged = [*before[:at], *stolen(what), *before[at:], *tail]
    return forged, [*before, *tail], KeyEnd(EGRESS_ORIGIN, size, root_of(before))


# -- audit.verify ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["policy", "witness"])
def test_no_answer_makes_a_log_verify_that_was_written_anew_below_an_end(kind: str, tally: Tally) -> None:
    for what, forged, honest, at in forgeries():
        trusted = trusting(at, kind)
        assert not verify_log(forged, trusted).ok, what
        served = Served(forged, honest, where_the_end_is_asked)
        assert not verify_log(served, trusted).ok, what
        for right in range(served.readings):
            assert not verify_log(Served(forged, honest, lambda n, right=right: n == right), trusted).ok, what
        tally("logs written anew that were served rightly once", served.readings + 1)


@pytest.mark.parametrize("what", ["half", "pause", "policy"])
def test_nor_one_of_several_bundles(what: str, tally: Tally) -> None:
    forged_leaves, leaves, at = large(what)
    forged, honest = written(forged_leaves), written(longer(leaves, len(forged_leaves)))
    trusted = trusting(at, "witness")
    served = Served(forged, honest, where_the_end_is_asked)
    assert not verify_log(served, trusted).ok
    for first in range(served.readings):
        assert not verify_log(
            Served(forged, honest, lambda n, first=first: n in (first, first + 1)), trusted
        ).ok
    tally("logs written anew that were served rightly once", served.readings + 1)


def test_the_end_of_a_large_log_is_asked_with_few_readings() -> None:
    """Beside one tile for each bundle, and one above them: nothing is read whole a second time."""
    _, leaves, at = large("half")
    honest = written(leaves)
    without, served = Served(honest, honest, bool), Served(honest, honest, bool)
    assert verify_log(served, trusting(at)).ok
    verify_log(without, Trust.of(map(region_bundle, ("eu-west", "us-east")), [WITNESS.key]))
    assert served.readings - without.readings <= 2 * 2


def test_the_write_ahead_file_is_held_to_the_root(tally: Tally) -> None:
    """Its leaves are compared with tiles: with those of another log they agree, too."""
    leaves = story().leaves
    other = [*leaves[:-1], *longer([], 1)]
    honest, lying = written(leaves), written(other)
    segment = f"{WAL_FOLDER}/{segment_name(0)}"
    for each, told in ((honest, leaves), (lying, other)):
        each.files[segment] = encode_append([encode_leaf(leaf) for leaf in told], 0, 0)
    trusted = trusting(end())
    report = verify_log(honest, trusted)
    assert report.ok and report.steps[8].checked == len(leaves)

    def in_step_9(_: int) -> bool:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name != "_segment":
            frame = frame.f_back
        return frame.f_code.co_name == "_segment"

    honest.files[segment] = lying.files[segment]
    report = verify_log(Served(honest, lying, in_step_9), trusted)
    assert [(each.step, each.path) for each in report.findings] == [(9, WAL_FOLDER)]
    assert "served differently" in report.findings[0].sentence
    tally("write-ahead files of another log", 1)


# -- the report --------------------------------------------------------------------------------------------


def counts_the_thief(keys: KeysInLog) -> bool:
    at = len(Link().agreement())
    return THIEF in keys.policy_keys_at(at)["eu-west"] or THIEF in keys.policy_keys_at(0)["eu-west"]


def test_no_answer_makes_the_report_count_the_former_key(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    for what, forged, honest, at in forgeries():
        trusted = trusting(at)

        def serve(rightly: Callable[[int], bool], forged: Files = forged, honest: Files = honest) -> Served:
            served = Served(forged, honest, rightly)
            monkeypatch.setattr(verification, "open_files", lambda path: served)
            return served

        def read(trusted: Trust = trusted) -> tuple[bool, bool]:
            """Whether the log verifies, and whether its register counts what the thief signed."""
            try:
                log = verification.open_log("s3://bucket/log", trusted)
            except TamperError:
                return False, False
            is_whole = verification.verify_whole(log, trusted, 1, ()).ok
            return is_whole, counts_the_thief(verification.keys_of(log, trusted))

        served = serve(where_the_end_is_asked)
        assert read() == (False, False), what
        readings = served.readings
        for right in range(readings):
            serve(lambda n, right=right: n == right)
            assert read() == (False, False), what
        tally("logs written anew that were served rightly once", readings + 1)


def test_nor_the_rows_that_are_read_with_keys(tally: Tally) -> None:
    pytest.importorskip("pyspark")
    from audit.spark.source import _keys as keys_of_rows
    from audit.spark.source import check_bundle

    what, forged, honest, at = forgeries()[-1]
    assert what == "receipt"
    checkpoint = Checkpoint.parse(parse_note(forged.read(CHECKPOINT_PATH) or b"").text)
    served = Served(forged, honest, where_the_end_is_asked)
    keys = keys_of_rows(served, checkpoint, Trust.decode(trusting(at).encode()))
    wrong = [each.problem for each in check_bundle(served, 0, checkpoint.size, keys) if each.problem]
    assert wrong and all("nothing shows that these are the leaves" in each for each in wrong)
    tally("rows of a log that was written anew", len(wrong))


@only_slow
@pytest.mark.spark
@pytest.mark.parametrize("what", ["half", "receipt"])
def test_a_report_takes_no_terms_and_no_receipt_from_it(
    what: str, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """eu-west accepted nothing, or has not got the records. Spark reads the forged log; the driver, and whoever verifies, is served."""
    forged_leaves, honest_leaves = rewritten("receipt"), story().before
    if what == "half":
        link = Link()
        honest_leaves = [leaf for leaf in link.agreement() if leaf.header.kind is not Kind.ACCEPT]
        intents = link.intent()
        forged_leaves = [*honest_leaves[:-1], *stolen("half"), honest_leaves[-1], *intents]
        forged_leaves.append(under(NEW_RECEIPT_KEY, link.ack(intents)))
    forged = written(forged_leaves)
    honest = written(longer([*honest_leaves], len(forged_leaves)))
    trusted = trusting(KeyEnd(EGRESS_ORIGIN, len(honest_leaves), root_of(honest_leaves)))
    for name, data in forged.files.items():
        path = tmp_path / "log" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    served = Served(forged, honest, where_the_end_is_asked)

    def verify_all(_: Any, logs: Sequence[verification.OpenedLog], *__: Any) -> list[Any]:
        return [verification.verify_whole(log, trusted, 1, ()) for log in logs]

    monkeypatch.setattr(verification, "open_files", lambda path: served)
    monkeypatch.setattr(reports, "verify_all", verify_all)
    run = lambda: reports.run_report(  # noqa: E731
        [tmp_path / "log"], tmp_path / "report", trust=trusted, session=spark
    )
    if what == "receipt":
        with pytest.raises(TamperError, match="nothing shows that these are the leaves"):
            run()
    else:
        report = run().report
        assert not any(row["terms_found"] for row in report.register.records())
        assert any(row["severity"] == BREACH for row in report.exceptions.records())
    assert served.readings
    tally("reports of a log that was written anew", 1)


# -- proofs, and what a region signs again -------------------------------------------------------------------


def test_nor_whoever_makes_a_proof(tally: Tally) -> None:
    for what, forged, honest, at in forgeries():
        trusted = trusting(at)
        served = Served(forged, honest, where_the_end_is_asked)
        checkpoints = read_checkpoints(served, trusted)
        find_crossing(served, checkpoints[0], STREAM, 0, 0)
        assert not counts_the_thief(keys_of_files(served, checkpoints, trusted)), what
        with pytest.raises(TamperError):
            prove(served, trusted, STREAM, 0, 0)
        with pytest.raises(TamperError, match=r"nothing shows|gave up"):
            prove_leaves(served, trusted, STREAM, 0, 0)
        tally("proofs from a log that was written anew", 2)


def test_a_proof_is_made_of_the_documents_that_were_gone_through(tally: Tally) -> None:
    """eu-west paused the grant, and a record crossed. At the second reading of the leaves another one stands in the pause's place."""
    link, signed = Link(), signed_grant()
    agreement = link.agreement()
    word = Standing(
        grant=signed.grant, action=StandingAction.PAUSE, region="eu-west", sequence=1, at=TIME_MS, by="bob"
    )
    pause = paper_leaf(sign_standing(word, FORMER.private_key), signed)
    link.time_ms += 600_000
    intents = link.intent()
    ack = link.ack(intents)
    paused = written([*agreement, pause, *intents, ack])
    hidden = written([*agreement, agreement[-1], *intents, ack])
    trusted = Trust.of(map(region_bundle, ("eu-west", "us-east")), [WITNESS.key])
    with pytest.raises(TamperError, match="paused"):
        prove(paused, trusted, STREAM, 0, 0)

    class SecondTime(MemoryFiles):
        readings = 0

        def read(self, path: str) -> bytes | None:
            if path.startswith("tile/entries"):
                self.readings += 1
                # At first it is gone through.
                return (paused if self.readings != 2 else hidden).read(path)
            return super().read(path)

    with pytest.raises(TamperError, match="served differently"):
        prove(SecondTime(paused.files), trusted, STREAM, 0, 0)
    tally("proofs of documents that were served otherwise", 1)


def test_nor_the_region_that_signs_again_what_its_log_has(tmp_path: Path, tally: Tally) -> None:
    for what, forged, honest, at in forgeries():
        for rightly in (where_the_end_is_asked, bool):
            served = Served(forged, honest, rightly)
            note = forged.read(CHECKPOINT_PATH)
            trail = SimpleNamespace(
                publish=lambda note=note: note, files=served, key=log_signer(EGRESS_ORIGIN).key
            )
            logged = DocumentLog(
                cast(Any, trail), tmp_path / "none", _Logged.nothing(), 0, 0, cast(Any, None)
            )
            assert not counts_the_thief(logged.keys_of(ended(at))), what
    note = written(story().leaves)
    trail = SimpleNamespace(publish=lambda: note.read(CHECKPOINT_PATH), files=note)
    logged = DocumentLog(cast(Any, trail), tmp_path / "none", _Logged.nothing(), 0, 0, cast(Any, None))
    assert counts_the_thief(logged.keys_of(ended(end()))), "of the honest log it counts"
    tally("logs written anew from which a region would sign again", 2 * len(WHAT))


# -- documents that stand beside a log --------------------------------------------------------------------------


def moved_to_canada() -> tuple[list[Leaf], dict[str, bytes]]:
    """A crossing under us-east's second policy, which says that us-east lies in Canada, and is so long that it stands beside the log: leaves and files."""
    link, signed = Link(), signed_grant()
    policy = policy_document("us-east", revision=2, country="CA", more_streams=900)
    leaf = paper_leaf(policy, signed)
    assert not leaf.header.document
    half = sign_export(signed.terms, opened_policy(policy), signing_key("us-east"), TIME_MS)
    accepted = paper_leaf(half, signed, policy_version=2, policy_hash=opened_policy(policy).hash)
    agreement, intents = link.agreement(), link.intent()
    leaves = [*agreement, leaf, accepted, *intents, link.ack(intents)]
    return leaves, {f"documents/{leaf.header.document_sha256.hex()}": policy.encode_file()}


def test_no_proof_is_made_without_a_document_that_may_forbid_the_crossing(tally: Tally) -> None:
    leaves, beside = moved_to_canada()
    trusted = Trust.of(map(region_bundle, ("eu-west", "us-east")), [WITNESS.key])
    prove(MemoryFiles(written(leaves).files | beside), trusted, STREAM, 0, 0)
    with pytest.raises(TamperError, match="is not beside the log"):
        prove(written(leaves), trusted, STREAM, 0, 0)
    tally("proofs without a document beside the log", 1)


@only_slow
@pytest.mark.spark
def test_no_report_is_made_of_documents_that_were_served_to_the_verification_alone(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """The register would name another country than the policy that let the records cross, and nothing would be wrong."""
    leaves, beside = moved_to_canada()
    trusted = Trust.of(map(region_bundle, ("eu-west", "us-east")), [WITNESS.key])
    for name, data in (written(leaves).files | beside).items():
        path = tmp_path / "log" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def run(out: str) -> reports.ReportResult:
        return reports.run_report([tmp_path / "log"], tmp_path / out, trust=trusted, session=spark)

    (row,) = run("honest").report.register.records()
    assert (row["source_country"], row["source_jurisdiction"]) == ("CA", "CA")
    really = agreements.open_files

    class Withheld:
        def __init__(self, path: str) -> None:
            self.files = really(path)

        def read(self, path: str) -> bytes | None:
            return None if path.startswith("documents/") else self.files.read(path)

    monkeypatch.setattr(agreements, "open_files", Withheld)
    with pytest.raises(TamperError, match="Other documents held"):
        run("withheld")
    # Where the verification did not have it either, the report says so.
    for name in beside:
        (tmp_path / "log" / name).unlink()
    found = run("lost").report.exceptions.records()
    assert any("neither in the leaf nor beside" in str(row["sentence"]) for row in found)
    tally("reports of documents that were served once", 2)
