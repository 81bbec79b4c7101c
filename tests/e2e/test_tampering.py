"""The logs of the whole mesh: counted, reported, proved; and every way of changing them found."""

from __future__ import annotations

import json
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from e2e.command_mesh import (
    BRIDGE,
    DESTINATION,
    MESH,
    SOURCE,
    CommandMesh,
    Said,
    felix_command,
    leaves_of,
    running_mesh,
    until,
)
from e2e.refusal import refusal_of
from shared_spark import report_command

from audit.checkpoint import Checkpoint
from audit.leaf import Kind, Leaf, decode_leaf, encode_leaf
from audit.merkle import Tree, leaf_hash
from audit.note import Algorithm, Note, NoteSigner, encode_note
from audit.origin import egress_origin
from audit.tile import bundle_path, decode_bundle, encode_bundle, tile_path
from cli.bridge import attempt
from felix.errors import Code
from felix.storage.begun import SUFFIX
from keys.key_file import load_signing_key

STORY, STANDING, SECRET = "acme/ops/story", "acme/ops/standing", "acme/ops/story-secret"
RECORDS = 200


class Told(NamedTuple):
    """Everything is down. `home` is whole, `before` an older copy of the egress log, `grant` that of STANDING."""

    mesh: CommandMesh
    home: Path
    before: Path
    grant: str


def flights(first: int, count: int) -> list[bytes]:
    return [
        json.dumps(
            {"flight": number, "tailnum": f"N{number}"} if number % 10 else {"flight": number}
        ).encode()
        for number in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandMesh]:
    """A mesh of this file's own: it is taken down, and its logs are copied and spoilt."""
    with running_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def told(mesh: CommandMesh, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Two grants, one of them revoked mid-stream; a third stream is asked for under a grant that is not for it."""
    place = tmp_path_factory.mktemp("told")
    grants = {}
    for stream in (STORY, STANDING):
        mesh.create(stream)
        grants[stream] = mesh.prepare(stream)
        mesh.send(stream, flights(0, RECORDS))
    for stream in (STORY, STANDING):
        until(lambda name=stream: links_at(mesh, name) == RECORDS, f"everything of {stream} accounted for")  # type: ignore[misc]
    mesh.agent_down()
    before = Path(shutil.copytree(mesh.egress, place / "before"))
    mesh.agent_up()
    # A link that is in session is refused by the broker, which writes down why.
    mesh.link_state(STORY, "active")
    mesh.felix("bridge", "revoke", grants[STORY], "--reason", "the story ends", "--region", SOURCE)
    mesh.link_state(STORY, "stopped")
    for stream in (STORY, STANDING):
        mesh.send(stream, flights(RECORDS, 50))
    until(lambda: links_at(mesh, STANDING) == RECORDS + 50, "the rest of the standing grant's stream")
    mesh.leaf(mesh.egress, Kind.REVOKE, STORY)
    mesh.create(SECRET)
    for stream in (STORY, SECRET):
        refusal_of(mesh, attempt(SOURCE, BRIDGE, stream, grants[STANDING]))
    mesh.agent_down()
    mesh.down()
    return Told(mesh, mesh.home, before, grants[STANDING])


def links_at(mesh: CommandMesh, stream: str) -> int:
    """The next source offset of the stream's only shard."""
    return sum(link.position for link in mesh.links(stream))


def egress_of(home: Path) -> Path:
    return home / SOURCE / "bridges" / BRIDGE / "egress"


def ingress_of(home: Path) -> Path:
    return home / DESTINATION / "data" / "audit"


def logs_of(home: Path) -> list[Path]:
    """The mesh's logs: the bridge's, and those of both regions."""
    return [egress_of(home), ingress_of(home), home / SOURCE / "data" / "audit"]


@pytest.fixture
def copy(told: Told, tmp_path: Path) -> Path:
    """The whole home, to be spoilt."""
    return Path(shutil.copytree(told.home, tmp_path / "home"))


def verify(home: Path, log: Path, code: int) -> dict[str, Any]:
    said = felix_command(home, "audit", "verify", str(log), "--json", code=code)
    (report,) = said.json()["items"]
    assert report["ok"] is (code == 0)
    return dict(report)


# -- as they were written ------------------------------------------------------------------------------


def test_all_logs_verify_and_are_cosigned_by_the_other_region(told: Told) -> None:
    reports = felix_command(told.home, "audit", "verify", "--cosignatures", "1", "--json").json()["items"]
    assert {Path(report["path"]) for report in reports} >= set(logs_of(told.home))
    for report in reports:
        assert report["ok"], report["findings"]
        assert report["cosigned_size"] > 0
    shown = felix_command(told.home, "audit", "verify", str(egress_of(told.home))).out
    assert "verifies" in shown


# -- spoilt --------------------------------------------------------------------------------------------


class Bundle(NamedTuple):
    """The first entry bundle of a log, taken apart."""

    path: Path
    leaves: list[bytes]

    @classmethod
    def of(cls, log: Path) -> Bundle:
        width = min(256, size_of(log))
        path = log / bundle_path(0, width)
        return cls(path, [bytes(leaf) for leaf in decode_bundle(path.read_bytes(), width)])

    def write(self, leaves: list[bytes]) -> None:
        self.path.write_bytes(encode_bundle(leaves))


def size_of(log: Path) -> int:
    return int((log / "checkpoint").read_text().split("\n")[1])


SPOILT = 5
"""The leaf that is spoilt."""


def edit_leaf(log: Path) -> None:
    bundle = Bundle.of(log)
    leaf = bytearray(bundle.leaves[SPOILT])
    leaf[len(leaf) // 2] ^= 1
    bundle.write([*bundle.leaves[:SPOILT], bytes(leaf), *bundle.leaves[SPOILT + 1 :]])


def remove_leaf(log: Path) -> None:
    bundle = Bundle.of(log)
    bundle.write([*bundle.leaves[:SPOILT], *bundle.leaves[SPOILT + 1 :]])


def reorder_leaves(log: Path) -> None:
    bundle = Bundle.of(log)
    first, second = bundle.leaves[SPOILT : SPOILT + 2]
    bundle.write([*bundle.leaves[:SPOILT], second, first, *bundle.leaves[SPOILT + 2 :]])


def replace_leaf(log: Path) -> None:
    bundle = Bundle.of(log)
    bundle.write([*bundle.leaves[:SPOILT], bundle.leaves[SPOILT + 1], *bundle.leaves[SPOILT + 1 :]])


def truncate_leaves(log: Path) -> None:
    bundle = Bundle.of(log)
    bundle.path.write_bytes(bundle.path.read_bytes()[:-700])


def edit_tile(log: Path) -> None:
    path = log / tile_path(0, 0, min(256, size_of(log)))
    data = bytearray(path.read_bytes())
    data[SPOILT * 32 + 5] ^= 0x80
    path.write_bytes(data)


def edit_checkpoint(log: Path) -> None:
    origin, size, *rest = (log / "checkpoint").read_text().split("\n")
    (log / "checkpoint").write_text("\n".join([origin, str(int(size) - 1), *rest]))


def edit_wal(log: Path) -> None:
    path = sorted((log / "wal").iterdir())[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "steps", "leaf"),
    [
        (edit_leaf, {4, 6}, SPOILT),
        (remove_leaf, {3, 4}, None),
        (reorder_leaves, {4}, SPOILT),
        (replace_leaf, {4}, SPOILT),
        (truncate_leaves, {3}, None),
        (edit_tile, {4}, SPOILT),
        (edit_checkpoint, {1}, None),
        (edit_wal, {9}, None),
    ],
)
def test_what_was_changed_is_found_and_named(
    told: Told, copy: Path, spoil: Callable[[Path], None], steps: set[int], leaf: int | None
) -> None:
    log = egress_of(copy)
    spoil(log)
    report = verify(copy, log, 5)
    findings = report["findings"]
    assert {finding["step"] for finding in findings} & steps, findings
    if leaf is not None:
        assert leaf in {finding["leaf"] for finding in findings}
    said = felix_command(copy, "audit", "verify", str(log), code=5)
    assert "DOES NOT VERIFY" in said.out
    if leaf is not None:
        assert f"leaf {leaf}" in said.err


def test_a_log_that_was_put_back_is_found_by_the_cosigner_s_memory(told: Told, copy: Path) -> None:
    log = egress_of(copy)
    shutil.rmtree(log)
    shutil.copytree(told.before, log)
    report = verify(copy, log, 5)
    (finding,) = report["findings"]
    assert finding["step"] == 2
    assert "rolled back" in finding["sentence"]


def test_a_history_that_was_written_anew_with_the_log_s_own_key_is_found(told: Told, copy: Path) -> None:
    """Whoever has the agent's machine has its key; what the other region cosigned cannot be taken back."""
    log = egress_of(copy)
    signer = NoteSigner.from_key(
        egress_origin(SOURCE, MESH, BRIDGE),
        load_signing_key(copy / SOURCE / "identities" / f"{BRIDGE}.audit.pem"),
        Algorithm.ED25519,
    )
    leaves = [encode_leaf(leaf) for leaf in leaves_of(log)]
    spoilt = decode_leaf(leaves[SPOILT])
    header = msgspec.structs.replace(spoilt.header, time_ms=spoilt.header.time_ms + 1)
    leaves[SPOILT] = encode_leaf(Leaf(header, spoilt.entries))
    shutil.rmtree(log)
    tree = Tree()
    for leaf in leaves:
        for tile in tree.add(leaf_hash(leaf)):
            write(log / tile_path(tile.level, tile.number), tile.hashes)
    for tile in tree.partial_tiles():
        write(log / tile_path(tile.level, tile.number, tile.width), tile.hashes)
    for first in range(0, len(leaves), 256):
        part = leaves[first : first + 256]
        write(log / bundle_path(first // 256, len(part)), encode_bundle(part))
    text = Checkpoint(signer.key.name, len(leaves), tree.root()).text()
    write(log / "checkpoint", encode_note(Note(text, (signer.sign(text),))))
    report = verify(copy, log, 5)
    # Nobody but its keeper signed this history, and what was cosigned is another: but for that, it is a perfect log.
    assert {finding["step"] for finding in report["findings"]} == {1, 2}
    assert any("not those that were signed before" in finding["sentence"] for finding in report["findings"])


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_an_agent_does_not_cross_on_a_log_that_was_put_back_or_taken_away(told: Told, copy: Path) -> None:
    mesh = CommandMesh(copy)
    log = egress_of(copy)
    try:
        mesh.up()
        arrived = mesh.size(DESTINATION, STANDING)
        mesh.send(STANDING, flights(1_000, 20))
        for put_back in (True, False):
            shutil.rmtree(log)
            if put_back:
                shutil.copytree(told.before, log)
            else:
                # Else the agent takes its disk for not mounted, and waits (tests/storage/test_begun.py).
                log.parent.with_name(f"{log.parent.name}{SUFFIX}").unlink()
            mesh.agent_up()

            def reason(at: Path = mesh.agent_log) -> bool:
                links = mesh.links(STANDING)
                return bool(links) and links[0].state == "denied" and "rolled back" in links[0].reason

            until(reason, "a link that says why it stands still")
            said = mesh.felix("bridge", "status", "--region", SOURCE).out
            assert "denied" in said
            mesh.agent_down()
            assert mesh.size(DESTINATION, STANDING) == arrived
            mesh.down(SOURCE)  # its board of links begins anew
            mesh.up(SOURCE)
    finally:
        mesh.close()


# -- proofs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proof(told: Told, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proof") / "record.proof.json"
    felix_command(
        told.home, "audit", "prove", "--stream", STANDING, "--offset", "17", "--log", str(egress_of(told.home)),
        "--out", str(path),
    )  # fmt: skip
    return path


def check(told: Told, proof: Path, empty: Path, *more: str, code: int | None = 0) -> Said:
    """With nothing but the proof and the two public bundles: the home is an empty folder."""
    bundles = [str(told.home / region / "bundle.json") for region in (SOURCE, DESTINATION)]
    return felix_command(
        empty,
        "audit",
        "check-proof",
        str(proof),
        "--bundle",
        bundles[0],
        "--bundle",
        bundles[1],
        *more,
        code=code,
    )


def test_a_proof_holds_without_the_log(told: Told, proof: Path, tmp_path: Path) -> None:
    said = check(told, proof, tmp_path, "--cosignatures", "1", "--json").json()
    assert said["stream"] == STANDING
    assert check(told, proof, tmp_path, "--cosignatures", "2", code=5).err
    assert not list(tmp_path.iterdir())


def test_a_proof_that_was_changed_is_refused(told: Told, proof: Path, tmp_path: Path) -> None:
    path = tmp_path / "spoilt.json"
    for part, name in (
        ("", "format"), ("", "checkpoint"), ("record", "stream"), ("record", "offset"), ("intent", "index"),
        ("intent", "leaf"), ("intent", "path"), ("ack", "leaf"), ("ack", "path"),
    ):  # fmt: skip
        whole = json.loads(proof.read_bytes())
        held = whole[part] if part else whole
        value = held[name]
        if isinstance(value, str):
            middle = len(value) // 2
            held[name] = value[:middle] + ("A" if value[middle] != "A" else "B") + value[middle + 1 :]
        else:
            held[name] = value + 1_000 if isinstance(value, int) else value[1:]
        path.write_text(json.dumps(whole))
        said = check(told, path, tmp_path, code=None)
        assert said.code == 5, (part, name, said)
    path.write_bytes(proof.read_bytes()[:-200])
    assert check(told, path, tmp_path, code=5).err.startswith("felix: ")


def test_a_proof_does_not_hold_for_the_wrong_bundle(told: Told, proof: Path, tmp_path: Path) -> None:
    only = str(told.home / DESTINATION / "bundle.json")
    said = felix_command(tmp_path, "audit", "check-proof", str(proof), "--bundle", only, code=None)
    assert said.code in (3, 5)
    assert felix_command(tmp_path, "audit", "check-proof", str(proof), code=5).err


def test_what_did_not_cross_cannot_be_proved(told: Told) -> None:
    for stream, offset, words in ((STANDING, "10", ""), (STANDING, "99999", ""), (SECRET, "0", "")):
        said = felix_command(
            told.home, "audit", "prove", "--stream", stream, "--offset", offset, "--log", str(egress_of(told.home)),
            code=None,
        )  # fmt: skip
        assert said.code not in (0, 130)
        assert said.err.startswith("felix: ") and words in said.err


# -- the report ----------------------------------------------------------------------------------------


def count(log: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Header and number of entries of every leaf, by the layout that docs/audit.md gives: no code of Felix."""
    size = size_of(log)
    for number in range(-(-size // 256)):
        width = min(256, size - number * 256)
        name = log / "tile" / "entries" / f"{number:03d}"
        data = (name if width == 256 else name.with_name(f"{name.name}.p") / str(width)).read_bytes()
        at = 0
        while at < len(data):
            (length,) = struct.unpack_from(">H", data, at)
            leaf = data[at + 2 : at + 2 + length]
            at += 2 + length
            magic, version, reserved, header_bytes, entries = struct.unpack_from(">2sBBHH", leaf)
            assert (magic, version, reserved) == (b"FL", 2, 0)
            assert len(leaf) == 8 + header_bytes + 68 * entries
            yield msgspec.msgpack.decode(leaf[8 : 8 + header_bytes]), entries


INTENT, ACK, DENY, WITHHELD = 1, 2, 3, 4


def counted(logs: list[Path]) -> tuple[Counter[tuple[str, ...]], Counter[str]]:
    """Per day, stream and destination, and over all: what happened."""
    by_day: Counter[tuple[str, ...]] = Counter()
    totals: Counter[str] = Counter()
    for log in logs:
        for header, entries in count(log):
            kind, egress = header["kind"], header["side"] == "egress"
            records = header.get("records", 0)
            day = datetime.fromtimestamp(header["time_ms"] / 1000, UTC).strftime("%Y-%m-%d")
            place = (day, header.get("stream", ""), header["destination_region"])
            found: dict[str, int] = {}
            if kind == INTENT and egress:
                assert records == entries
                found = {"records": records, "record_bytes": header.get("record_bytes", 0)}
            elif kind == WITHHELD and egress:
                assert records == entries
                found = {"withheld": records}
            elif kind == DENY:
                found = {"denied": 1}
            elif kind == ACK:
                totals["acknowledged" if egress else "delivered"] += records
            for name, number in found.items():
                by_day[(*place, name)] += number
                totals[name] += number
    return +by_day, +totals


@pytest.fixture(scope="module")
def report(told: Told, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The command's report over the mesh's logs, and what report.json says."""
    out = tmp_path_factory.mktemp("report")
    logs = [word for log in logs_of(told.home) for word in ("--log", str(log))]
    said = Said(*report_command(spark, told.home, *logs, "--out", str(out), "--json"))
    assert said.code in (0, 10), said
    assert Path(said.json()["page"]).is_file()
    held: dict[str, Any] = json.loads((out / "report.json").read_bytes())
    assert said.json()["totals"] == held["totals"]
    assert held["totals"]["differences"] == held["totals"]["breaches"] == 0
    return out, held


@pytest.mark.spark
def test_spark_and_a_plain_count_of_the_files_agree(told: Told, report: tuple[Path, dict[str, Any]]) -> None:
    by_day, totals = counted(logs_of(told.home))
    said = report[1]
    for name in ("records", "record_bytes", "withheld", "denied", "acknowledged", "delivered"):
        assert said["totals"][name] == totals[name] > 0, name
    found: Counter[tuple[str, ...]] = Counter()
    for row in rows(report, "volumes"):
        for name in ("records", "record_bytes", "withheld", "denied"):
            found[row["day"], row["stream"] or "", row["destination_region"], name] += row[name]
    assert +found == by_day
    registered: Counter[str] = Counter()
    for row in rows(report, "register"):
        for name in ("records", "record_bytes", "withheld", "acknowledged", "delivered"):
            registered[name] += row[name]
    assert all(registered[name] == totals[name] for name in registered)
    print({name: totals[name] for name in sorted(totals)}, "over", len({key[1] for key in by_day}), "streams")


def rows(report: tuple[Path, dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """A table of the report, from its Parquet file."""
    from pyarrow import parquet

    found: list[dict[str, Any]] = parquet.read_table(report[0] / "tables" / f"{name}.parquet").to_pylist()
    return found


@pytest.mark.spark
def test_the_register_lists_transfers_and_the_exceptions_what_was_refused(
    told: Told, report: tuple[Path, dict[str, Any]]
) -> None:
    register = rows(report, "register")
    assert all(row["terms_found"] and row["basis"] == "scc" and row["purpose"] for row in register)
    assert {STORY, STANDING} <= {row["stream"] for row in register}
    assert SECRET not in {row["stream"] for row in register}, "an attempt is no transfer"
    tried = [row for row in rows(report, "exceptions") if row["stream"] == SECRET]
    assert [(row["severity"], row["grant_id"], row["action"]) for row in tried] == [
        ("refused", told.grant, "read")
    ]
    lent = [row for row in rows(report, "volumes") if row["stream"] == SECRET]
    assert lent and all(row["purpose"] is row["basis"] is None for row in lent)
    ended = [
        row
        for row in rows(report, "exceptions")
        if row["exception"] == "grant-ended" and row["stream"] == STORY
    ]
    assert ended and {row["sentence"] for row in ended} == {"the story ends"}
    codes = {row["code"] for row in rows(report, "exceptions") if row["stream"] == STORY}
    assert int(Code.GRANT_REVOKED) in codes


@pytest.mark.spark
def test_a_report_refuses_a_log_that_does_not_verify(
    told: Told, copy: Path, spark: Any, tmp_path: Path
) -> None:
    edit_leaf(egress_of(copy))
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.html").write_text("an earlier report")
    logs = [word for log in logs_of(copy)[:2] for word in ("--log", str(log))]
    said = Said(*report_command(spark, copy, *logs, "--out", str(out)))
    assert said.code == 20
    assert "No report was made" in said.err
    assert str(SPOILT) in said.err
    assert [path.name for path in out.iterdir()] == ["REFUSED-verification-failed.json"]
    refusal = json.loads((out / "REFUSED-verification-failed.json").read_bytes())
    assert refusal["refused"] is True
    assert SPOILT in {problem["leaf"] for problem in refusal["problems"]}


def test_a_checkpoint_of_a_stranger_is_refused_at_once(told: Told, copy: Path, tmp_path: Path) -> None:
    log = egress_of(copy)
    (log / "checkpoint").write_text((log / "checkpoint").read_text().replace("us-east.acme", "us-west.acme"))
    said = felix_command(copy, "audit", "verify", str(log), code=5)
    assert str(log) in said.out and "does not verify" in said.out, said.out
    assert "No bundle of 'us-west' is trusted" in said.err
    said = felix_command(copy, "audit", "report", "--log", str(log), "--out", str(tmp_path / "out"), code=20)
    assert "No report was made" in said.err
