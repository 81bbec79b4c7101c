"""Commands that write into the folders of processes which are stopped, or judge them, say so where a later release has used them, and change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster.processes import several
from e2e.command_mesh import felix_command
from region_home import make_region, running
from region_peer import client

from felix.storage.release_mark import MARK

LATER = "99.0.0 of Felix, and this is release"
ORDERS = "acme/ops/orders"


def files_below(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


async def test_no_offline_command_touches_the_folder_of_a_later_release(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    async with running(folder), client(folder) as region:
        await region.create_stream(ORDERS)
        await region.stream(ORDERS).publish(b"x")
    (folder.root / "data" / MARK).write_text("99.0.0\n")
    egress = folder.bridges / "us-to-eu" / "egress"
    egress.mkdir(parents=True)
    (egress / MARK).write_text("99.0.0\n")
    copy = tmp_path / "copy"
    copy.mkdir()
    before = files_below(folder.root)
    for words in (
        ("log", "verify", "--region", "us-east"),
        ("log", "restore", ORDERS, f"file://{copy}", "--region", "us-east"),
        ("region", "to-cluster", "us-east"),
        ("region", "change-log-keys", "--region", "us-east"),
        ("region", "change-log-keys", "--region", "us-east", "--bridge", "us-to-eu"),
        ("audit", "restore", str(copy), str(folder.root / "data" / "audit")),
        ("audit", "restore", str(copy), str(egress)),
    ):
        said = felix_command(tmp_path, *words, code=1)
        assert LATER in said.err, (words, said)
        assert files_below(folder.root) == before, words


def test_no_folder_or_report_of_a_later_release_is_reconciled(tmp_path: Path) -> None:
    folder = several(tmp_path, 3)
    for name in ("b1", "b2", "b3"):
        data = folder.root / "data" / name
        data.mkdir(parents=True)
        (data / "node").write_bytes(b"of a later one")
        (data / MARK).write_text("99.0.0\n")
    assert LATER in felix_command(tmp_path, "region", "reconcile", "us-east", "--dry-run", code=1).err
    assert (
        LATER
        in felix_command(
            tmp_path, "region", "reconcile", "us-east", "--save", str(tmp_path / "here.json"), code=1
        ).err
    )
    for name in ("b1", "b2", "b3"):
        (folder.root / "data" / name / "node").unlink()
    told = {
        "region": "us-east", "broker": "b2", "folder": "ab" * 16, "registration": 1, "intended": 1, "pulse": 1, "host": "h", "boot": "b",
        "version": "99.0.0", "made_ms": 1,
    }  # fmt: skip
    (tmp_path / "b2.json").write_text(json.dumps([told]))
    words = ("region", "reconcile", "us-east", "--report", str(tmp_path / "b2.json"))
    assert LATER in felix_command(tmp_path, *words, code=1).err


@pytest.mark.etcd
async def test_the_audit_log_of_a_later_release_is_not_made_one_of_copies(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    async with running(folder):
        pass
    felix_command(tmp_path, "region", "to-cluster", "us-east")
    mark = folder.root / "data" / "b1" / MARK
    assert mark.exists(), "what was converted is left alone by an earlier release"
    mark.write_text("99.0.0\n")
    assert LATER in felix_command(tmp_path, "region", "copy-audit-log", "us-east", code=1).err
