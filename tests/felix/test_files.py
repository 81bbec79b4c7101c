"""Small files: whole or not at all, and private where they must be."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from felix import files
from felix.errors import Code, RequestError
from felix.files import PUBLIC, create_file, read_file, remove_staged, replace_file, write_output


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_modes_are_as_asked_whatever_the_users_mask_is(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        create_file(tmp_path / "private", b"1")
        create_file(tmp_path / "public", b"2", PUBLIC)
    finally:
        os.umask(before)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "public").stat().st_mode & 0o777 == 0o644


def test_creating_never_overwrites_and_leaves_nothing_behind(tmp_path: Path) -> None:
    create_file(tmp_path / "f", b"old")
    with pytest.raises(RequestError) as caught:
        create_file(tmp_path / "f", b"new")
    assert caught.value.code is Code.ALREADY_EXISTS
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


def test_replacing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file(tmp_path / "f", b"old")
    replace_file(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"

    def failing(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        replace_file(tmp_path / "f", b"newer")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert names(tmp_path) == ["f"]


def test_reading_refuses_what_is_missing_open_too_large_or_no_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for missing in (path, path / "below"):
        with pytest.raises(RequestError, match="the thing") as caught:
            read_file(missing, "the thing")
        assert caught.value.code is Code.NOT_FOUND
    with pytest.raises(RequestError, match="is a folder"):
        read_file(tmp_path, "the thing")
    create_file(path, b"12345")
    assert read_file(path, "the thing", bytes_max=5, private=True) == b"12345"
    with pytest.raises(RequestError, match="more than 4 bytes"):
        read_file(path, "the thing", bytes_max=4)
    path.chmod(0o640)
    assert read_file(path, "the thing") == b"12345"
    with pytest.raises(RequestError, match="mode 0640") as caught:
        read_file(path, "the thing", private=True)
    assert caught.value.code is Code.FORBIDDEN


def test_a_device_is_no_plain_file() -> None:
    with pytest.raises(RequestError, match="not a plain file"):
        read_file(Path("/dev/null"), "the thing")


def test_a_full_disk_is_said_of_the_file_that_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_output(Path("/dev/full"), b"x")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/identity\.pem'"):
        create_file(tmp_path / "identity.pem", b"x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_rename_that_failed_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "identity.pem"
    replace_file(path, b"old")

    def fails(source: Path, target: Path) -> Path:
        raise OSError(number, os.strerror(number), str(source))

    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)):
        patch.setattr(Path, "replace", fails)
        replace_file(path, b"new")
    assert names(tmp_path) == ["identity.pem"] and path.read_bytes() == b"old"


def test_what_a_killed_writer_left_of_a_file_is_removed_and_nothing_of_another_one(tmp_path: Path) -> None:
    left = [".key[1].pem.12.0a1b2c3d.new", ".key[1].pem.13.0a1b2c3d.new"]
    others = [".key1.pem.12.0a1b2c3d.new", ".new.key[1].pem.12.0a1b2c3d.new", "key[1].pem"]
    for name in (*left, *others):
        (tmp_path / name).write_bytes(b"key")
    remove_staged(tmp_path / "key[1].pem")
    assert names(tmp_path) == sorted(others)
