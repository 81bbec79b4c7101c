"""An outside witness on a disk that fails: what SQLite remembers of a change that failed is not taken for what is stored."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from disks.play_store import ROOT, WitnessPlay
from volatile_disk import VolatileDisk

from audit.witness_sqlite import WitnessState, init_witness

PROGRAM = """
import sys
from pathlib import Path
from disks.witness_writer import Algorithm, Held, NoteSigner, SigningKey, UnavailableError, WitnessState, root_of

folder, told = Path(sys.argv[1]), Path(sys.argv[2])
state = WitnessState.open(folder, serve=True)
state.add_log("log.example", NoteSigner.from_key("log.example", SigningKey.generate(), Algorithm.ED25519).key)
state.advance("log.example", Held(0, None), 10, root_of(10), b"note")
told.with_suffix(".new").replace(told)
try:
    state.advance("log.example", Held(10, root_of(10)), 20, root_of(20), b"note")
except UnavailableError as error:
    print(error.sentence)
log = state.log("log.example")
print(log.held.size)
state.advance("log.example", Held(10, root_of(10)), 30, root_of(30), b"note")
print(state.log("log.example").held.size)
"""


@pytest.mark.fault
def test_a_change_that_was_refused_is_not_shown_where_the_page_cache_forgot_the_journal(
    tmp_path: Path,
) -> None:
    """SQLite undoes a change by what it reads from its journal; a file system may give it what was there before."""
    folder = tmp_path / "disk" / "witness"
    init_witness(folder, "witness.example")
    disk = VolatileDisk(tmp_path / "disk", tmp_path / "aside", 1, drops=100, forgets=100)
    disk.fail("sync", "state.db-journal", errno.EIO)
    disk.told_by.rename(disk.told_by.with_suffix(".new"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(disk.told_by)],
        env=os.environ | disk.environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    refused, size, after = done.stdout.splitlines()
    assert "cannot be used now" in refused and (size, after) == ("10", "30")


@pytest.mark.fault
def test_each_call_may_fail_once_and_nothing_that_was_stored_is_forgotten(tmp_path: Path) -> None:
    play = WitnessPlay(tmp_path, 3)
    try:
        play.start()
        play.until_done()
        for call in ("sync", "write", "read", "open", "remove", "truncate"):
            for path in ("state.db", "state.db-journal"):
                play.disk.fail(call, path, errno.EIO, times=2)
                time.sleep(0.05)
                play.disk.heal()
                play.until_done()
        assert play.judge.starts == 1 and len(play.disk.failed()) >= 8
        play.end()
        play.disk.cut()
        play.finish()
    finally:
        play.kill()


@pytest.mark.fault
def test_what_was_cosigned_with_too_many_open_files_is_not_undone_by_a_journal_that_comes_back(
    tmp_path: Path,
) -> None:
    """SQLite takes the sync of a folder that it cannot open for done."""
    folder = tmp_path / "disk" / "witness"
    init_witness(folder, "witness.example")
    for seed in range(6):
        disk = VolatileDisk(tmp_path / "disk", tmp_path / f"aside{seed}", seed)
        disk.fail("open", "disk/witness$", errno.EMFILE, times=1_000)
        disk.told_by.rename(disk.told_by.with_suffix(".new"))
        done = subprocess.run(
            [sys.executable, "-c", EXHAUSTED, str(folder), str(disk.told_by)],
            env=os.environ | disk.environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        disk.cut()
        state = WitnessState.open(folder)
        try:
            log = state.log("log.example")
            assert log is not None and str(log.held.size) == done.stdout.split()[-1], done.stdout
        finally:
            state.close()


EXHAUSTED = """
import os, sys
from pathlib import Path
from disks.witness_writer import Algorithm, Held, NoteSigner, SigningKey, UnavailableError, WitnessState, root_of

folder, told = Path(sys.argv[1]), Path(sys.argv[2])
state = WitnessState.open(folder, serve=True)
if state.log("log.example") is None:
    state.add_log("log.example", NoteSigner.from_key("log.example", SigningKey.generate(), Algorithm.ED25519).key)
size = state.log("log.example").held.size
for number in range(20):
    if number == 10:
        told.with_suffix(".new").replace(told)
    try:
        held = state.log("log.example").held
        state.advance("log.example", held, held.size + 1, root_of(held.size + 1), b"note")
    except UnavailableError:
        continue
    size = held.size + 1
print(size, flush=True)
os._exit(0)
"""
