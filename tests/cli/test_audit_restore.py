"""`felix audit copy`, a lost disk, `felix audit restore`: the region goes on with its own log."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from audit_log import Link
from region_home import make_region, running
from small_disk import small_disk
from typer.testing import CliRunner

from audit.tile import CHECKPOINT_PATH
from audit.tile_disk import Folder
from audit.witness import DiskWitnessStore
from cli.exits import exit_code
from cli.main import app
from felix.errors import FelixError
from felix.runtime.real import now_ms
from keys.bundle import decode_bundle
from region.bootstrap import trust_region
from region.config import load_config
from region.folder import RegionFolder
from region.trust.signing_keys import change_signing_keys


def felix(home: Path, *words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, words)], env={"FELIX_HOME": str(home)})
    if isinstance(done.exception, FelixError):
        return exit_code(done.exception), str(done.exception)
    return done.exit_code, " ".join(done.output.split())


async def leaves(folder: RegionFolder) -> int:
    """How many the log has, once its broker has written one more."""
    async with running(folder) as node:
        trail = node.services.governance.witnessing._trail
        await trail.append([Link().deny()])
        return trail.status().durable


def test_a_region_goes_on_with_its_log_from_a_copy(tmp_path: Path) -> None:
    us, eu = make_region(tmp_path, "us-east"), make_region(tmp_path, "eu-west")
    before = asyncio.run(leaves(us))
    log, copy = us.root / "data" / "audit", tmp_path / "copy"
    code, said = felix(tmp_path, "audit", "copy", log, copy)
    assert code == 0, said
    shutil.rmtree(log)
    code, said = felix(tmp_path, "audit", "restore", copy, eu.root / "data" / "audit")
    assert (
        code == 1 and "is the place of the log eu-west.acme/audit" in said and not (eu.root / "data").exists()
    )
    code, said = felix(tmp_path, "audit", "restore", copy, log)
    assert code == 0 and "us-east.acme/audit" in said, said
    assert asyncio.run(leaves(us)) == before + 1
    code, said = felix(tmp_path, "audit", "verify", log, "--cosignatures", 0)
    assert code == 0, said


def test_where_a_disk_is_mounted_a_log_is_restored_by_way_of_another_folder(tmp_path: Path) -> None:
    us = make_region(tmp_path, "us-east")
    log, copy, other = us.root / "data" / "audit", tmp_path / "copy", tmp_path / "other"
    log.mkdir(parents=True)
    with small_disk(log, "16m"):
        before = asyncio.run(leaves(us))
        assert felix(tmp_path, "audit", "copy", log, copy)[0] == 0
    with small_disk(log, "16m"):
        (log / "lost+found").mkdir()
        code, said = felix(tmp_path, "audit", "restore", copy, log)
        assert code == 1 and f"A disk is mounted at {log}" in said, said
        assert [path.name for path in log.iterdir()] == ["lost+found"]
        # As the hint says.
        shutil.copytree(log, other)
        code, said = felix(tmp_path, "audit", "restore", copy, other)
        assert code == 0, said
        (log / "lost+found").rmdir()
        shutil.copytree(other, log, dirs_exist_ok=True)
        assert asyncio.run(leaves(us)) == before + 1


def test_a_region_of_this_machine_that_cosigned_more_is_asked(tmp_path: Path) -> None:
    us, eu = make_region(tmp_path, "us-east"), make_region(tmp_path, "eu-west")
    asyncio.run(leaves(us))
    log, copy = us.root / "data" / "audit", tmp_path / "copy"
    assert felix(tmp_path, "audit", "copy", log, copy)[0] == 0
    asyncio.run(leaves(us))
    note = Folder(log).read(CHECKPOINT_PATH)
    assert note is not None and note != Folder(copy).read(CHECKPOINT_PATH)
    DiskWitnessStore(eu.root / "data" / "witness").swap("us-east.acme/audit", None, note)
    shutil.rmtree(log)
    code, said = felix(tmp_path, "audit", "restore", copy, log)
    assert code == 5 and "signed before" in said, said


def test_a_copy_of_before_the_logs_keys_were_changed_is_not_put_in_its_place(tmp_path: Path) -> None:
    """What its keys of now sign there holds nowhere."""
    us = make_region(tmp_path, "us-east")
    before = asyncio.run(leaves(us))
    log, copy = us.root / "data" / "audit", tmp_path / "copy"
    assert felix(tmp_path, "audit", "copy", log, copy)[0] == 0
    code, said = felix(tmp_path, "region", "change-log-keys", "--region", "us-east")
    assert code == 0, said
    shutil.rmtree(log)
    code, said = felix(tmp_path, "audit", "restore", copy, log)
    assert code == 5 and f"would have {before} leaves, and its keys were changed at" in said, said
    assert Folder(log).read(CHECKPOINT_PATH) is None


def test_a_folder_that_trusts_an_earlier_bundle_than_its_broker_verifies_nothing_by_it(
    tmp_path: Path,
) -> None:
    """Compared on another machine, or put back from a backup: keys that were given up since would count here."""
    us, eu = make_region(tmp_path, "us-east"), make_region(tmp_path, "eu-west")
    asyncio.run(leaves(us))
    other = tmp_path / "elsewhere"
    shutil.move(us.root, other / "us-east")
    us = RegionFolder(other / "us-east")

    def compare() -> None:
        assert trust_region(eu, decode_bundle(us.bundle.read_bytes()), now_ms()) is not None
        asyncio.run(leaves(eu))

    compare()
    log = us.root / "data" / "audit"
    verify = ("audit", "verify", log, "--cosignatures", 0)
    assert felix(tmp_path, *verify)[0] == 0
    shutil.copytree(eu.trusted, tmp_path / "trusted")
    change_signing_keys(us, load_config(us.config), now_ms())
    compare()
    assert felix(tmp_path, *verify)[0] == 0
    shutil.rmtree(eu.trusted)
    shutil.copytree(tmp_path / "trusted", eu.trusted)
    code, said = felix(tmp_path, *verify)
    assert code == 1 and "goes by a later bundle of us-east" in said and "felix region trust" in said, said
    assert felix(tmp_path, *verify, "--bundle", us.bundle)[0] == 0

    async def taken() -> tuple[int, str]:
        async with running(eu):
            return await asyncio.to_thread(felix, tmp_path, "region", "trust", "--region", "eu-west")

    code, said = asyncio.run(taken())
    assert code == 0, said
    assert felix(tmp_path, *verify)[0] == 0
