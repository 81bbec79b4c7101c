"""The disk that tests fail: what a sync brought there is there, whatever failed before, once it was written again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from volatile_disk import VolatileDisk

PROGRAM = """
import os, random, sys
from pathlib import Path

folder, aside, chance = Path(sys.argv[1]), Path(sys.argv[2]), random.Random(1)
file = os.open(folder / "file", os.O_RDWR | os.O_CREAT, 0o600)
on_disk = aside / "blocks" / str(os.fstat(file).st_ino)
failed, lost, data = 0, 0, bytearray()

def written(part, at):
    # As logs write, and as key files and SQLite do.
    return os.pwritev(file, [part], at) if chance.random() < 0.5 else os.pwrite(file, part, at)

for number in range(500):
    if chance.random() < 0.2:
        (aside / "new").write_text("sync file 5 0 1 0\\n")
        (aside / "new").replace(aside / "faults")
    part = os.urandom(chance.choice((50, 175, 300, 5_000)))
    written(part, len(data))
    data += part
    while True:
        try:
            os.fdatasync(file)
            break
        except OSError:
            failed += 1
            # Nothing came of it: a later sync brings no more of it to the disk.
            os.fdatasync(file)
            lost += on_disk.read_bytes() != data
            written(bytes(data), 0)
    assert on_disk.read_bytes() == data, number
    if len(data) > 100_000:
        os.ftruncate(file, 0)
        data.clear()
print(failed, lost)
"""


@pytest.mark.fault
def test_what_a_failed_sync_dropped_comes_to_the_disk_only_if_it_is_written_again(tmp_path: Path) -> None:
    disk = VolatileDisk(tmp_path / "disk", tmp_path / "aside", 1)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(disk.folder), str(disk.aside)],
        env=os.environ | disk.environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    failed, lost = map(int, done.stdout.split())
    assert failed >= 50 and lost >= failed // 4
