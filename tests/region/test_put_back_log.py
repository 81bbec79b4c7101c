"""A region's audit log that is put back to an older copy, with nobody else who knows of the newer one: its own broker says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from audit_log import REGION_ORIGIN, Link, log_signer

from audit.trail import Trail
from region.evidence.document_log import DocumentLog


class Home:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.link = Link()

    async def run(self, leaves: int) -> str:
        """A broker's life: open, write so many leaves, end. What it says of the log as it opens."""
        trail = Trail.open(self.path / "audit", log_signer(REGION_ORIGIN))
        logged = DocumentLog.open(trail, self.path / "governance" / "logged")
        said = logged.put_back
        for _ in range(leaves):
            await trail.append([self.link.deny()])
        trail.publish()
        await logged.close()
        trail.close()
        return said

    def keep(self) -> None:
        shutil.copytree(self.path / "audit", self.path / "kept")

    def put_back(self) -> None:
        shutil.move(self.path / "audit", self.path / "newest")
        shutil.copytree(self.path / "kept", self.path / "audit")


@pytest.mark.parametrize("more", [0, 3, 20])
async def test_it_is_said_until_the_newest_copy_is_there(tmp_path: Path, more: int) -> None:
    """Also once the older copy has grown as long as the newest one, or longer."""
    home = Home(tmp_path)
    assert not await home.run(5)
    home.keep()
    assert not await home.run(7)
    home.put_back()
    for _ in range(3):
        assert "had one of 12 leaves" in await home.run(more)
    shutil.rmtree(tmp_path / "audit")
    shutil.move(tmp_path / "newest", tmp_path / "audit")
    assert not await home.run(1)
    assert not await home.run(0)


async def test_a_snapshot_of_an_earlier_release_and_one_that_cannot_be_read_say_nothing(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path)
    await home.run(5)
    path = tmp_path / "governance" / "logged"
    path.write_bytes(b"no snapshot")
    assert not await home.run(1)
    assert path.read_bytes() != b"no snapshot"
    path.unlink()
    assert not await home.run(1)
