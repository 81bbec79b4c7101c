"""A region that is made on a disk without room: nothing is left of it, and it can be made once there is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cli.main import app
from felix.address import Address
from felix.errors import Code, RequestError, UnavailableError
from region.bootstrap import found_region
from region.folder import RegionFolder


def found(folder: RegionFolder) -> None:
    found_region(
        folder,
        region="eu-west",
        mesh="acme",
        country="DE",
        jurisdiction="EU",
        entity="Acme Ltd.",
        listen=Address("127.0.0.1", 7443),
        health=None,
        now_ms=1_800_000_000_000,
    )


def test_a_region_that_found_no_room_leaves_nothing_and_is_made_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file it was for which there was none."""
    sync, left = os.fsync, [0]

    def full(descriptor: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    folder, tries = RegionFolder(tmp_path / "eu-west"), 0
    monkeypatch.setattr("os.fsync", full)
    while True:
        tries += 1
        left[0] = tries
        try:
            found(folder)
            break
        except (OSError, UnavailableError) as error:
            # A root key says so itself.
            assert (
                error.code is Code.DISK_FULL
                if isinstance(error, UnavailableError)
                else error.errno == errno.ENOSPC
            )
            assert not list(folder.root.iterdir()), tries
    assert tries > 20
    assert folder.bundle.exists()


def test_what_somebody_else_founds_at_the_same_time_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RegionFolder(tmp_path / "eu-west")
    sync, begun = os.fsync, [False]

    def beaten(descriptor: int) -> None:
        """The other one comes in between, and is quicker."""
        if not begun[0]:
            begun[0] = True
            folder.bundle.write_bytes(b"theirs")
        sync(descriptor)

    monkeypatch.setattr("os.fsync", beaten)
    with pytest.raises(RequestError, match="exists already"):
        found(folder)
    assert begun[0] and folder.bundle.read_bytes() == b"theirs"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_authority_that_the_disk_does_not_take_is_no_authority_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder, rename = RegionFolder(tmp_path / "eu-west"), Path.rename

    def fails(path: Path, target: Path) -> Path:
        if target == folder.authority:
            raise OSError(number, os.strerror(number), str(path))
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)):
        patch.setattr(Path, "rename", fails)
        found(folder)
    assert not list(folder.root.iterdir())
    found(folder)


def test_what_an_init_that_was_killed_left_is_told_from_a_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    folder = RegionFolder(tmp_path / "eu-west")
    found(folder)
    words = ["region", "init", "eu-west", "--mesh", "acme"]
    with pytest.raises(RequestError, match="There is a region eu-west already"):
        app(words, standalone_mode=False)
    folder.config.unlink()
    folder.profile.unlink()
    with pytest.raises(RequestError, match="was cut off there") as refused:
        app(words, standalone_mode=False)
    assert "remove the folder" in refused.value.hint
