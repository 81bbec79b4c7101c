"""What goes by a path into a folder that a process has locked goes there, or nowhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from felix.storage.disk import DiskFiles
from felix.storage.held import HeldFiles
from felix.storage.memory import MemoryDisk
from felix.storage.port import Files

CALLS: dict[str, Callable[[Files, Path], object]] = {
    "open": lambda files, folder: files.close(files.open(folder / "kept", os.O_RDONLY)),
    "make": lambda files, folder: files.close(files.open(folder / "new", os.O_RDWR | os.O_CREAT)),
    "sync_folder": lambda files, folder: files.sync_folder(folder),
    "names": lambda files, folder: files.names(folder),
    "make_folder": lambda files, folder: files.make_folder(folder / "made" / "below"),
    "rename": lambda files, folder: files.rename(folder / "kept", folder / "kept"),
    "remove": lambda files, folder: files.remove(folder / "gone"),
    "remove_folder": lambda files, folder: files.remove_folder(folder / "none"),
}


def filled(files: Files, folder: Path) -> None:
    files.make_folder(folder)
    descriptor = files.open(folder / "kept", os.O_RDWR | os.O_CREAT)
    files.pwritev(descriptor, (b"kept",), 0)
    files.close(descriptor)


@pytest.mark.parametrize("is_mounted_over", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_done_in_another_folder(
    call: str, on_disk: bool, is_mounted_over: bool, tmp_path: Path
) -> None:
    plain: Files = DiskFiles() if on_disk else MemoryDisk().mount()
    home = tmp_path if on_disk else Path("/home")
    folder, beside, away = home / "held", home / "beside", home / "away"
    filled(plain, folder)
    filled(plain, beside)
    lock = plain.lock(folder)
    files = HeldFiles(plain, lock, folder)
    CALLS[call](files, folder)
    open_before = files.open(folder / "kept", os.O_RDWR)
    plain.rename(folder, away)
    if is_mounted_over:
        # An older copy, for example.
        filled(plain, folder)
    there = plain.names(folder) if is_mounted_over else []
    with pytest.raises(OSError, match="not the one that was opened") as refused:
        CALLS[call](files, folder)
    assert refused.value.errno == errno.ESTALE
    assert plain.exists(folder) is is_mounted_over
    assert (plain.names(folder) if is_mounted_over else []) == there
    # Elsewhere, and where it was opened, nothing is held up.
    CALLS[call](files, beside)
    assert files.pwritev(open_before, (b"more",), 4) == 4
    files.close(open_before)
    if is_mounted_over:
        plain.remove_folder(folder)
    plain.rename(away, folder)
    CALLS[call](files, folder)
    lock.release()


def test_what_is_made_as_the_folder_goes_is_not_believed(tmp_path: Path) -> None:
    folder, away = tmp_path / "held", tmp_path / "away"
    plain = DiskFiles()
    filled(plain, folder)
    lock = plain.lock(folder)
    files = HeldFiles(plain, lock, folder)

    class Going(DiskFiles):
        """The folder goes behind the look before."""

        def open(self, path: Path, flags: int) -> int:
            folder.rename(away)
            folder.mkdir()
            return super().open(path, flags)

    files._files = Going()
    held = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not the one that was opened"):
        files.open(folder / "new", os.O_RDWR | os.O_CREAT)
    assert len(os.listdir("/proc/self/fd")) == held, "it was let go of"
    lock.release()
