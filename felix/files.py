"""Small files on disk: written whole or not at all, and private ones read only where they are private.

Invariants: after `create_file` or `replace_file` returns, the file has its whole content through a crash, since
file and folder are synced before and after the rename; a private file has mode 0600 from its first byte on.
Every call here blocks on the disk: never on an event loop. Errors name the file and say what to do.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from felix.errors import Code, RequestError
from felix.runtime.real import REAL

PRIVATE: Final = 0o600
PUBLIC: Final = 0o644
SMALL_BYTES_MAX: Final = 1 << 20
"""Keys, certificates and bundles are a few KiB; whatever is larger is another file by mistake."""


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError the file's name where the system gives none, as where a disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_output(path: Path, data: bytes) -> None:
    """Write what a user asked for at a path of theirs, which may be a pipe or a device. Raises OSError, which names the path."""
    with naming(path):
        path.write_bytes(data)


def stage_file(path: Path, data: bytes, mode: int = PRIVATE) -> Path:
    """Write the new content of `path` to a synced file next to it; `commit_file` renames it. Leaves nothing if it fails."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{REAL.random.randbytes(4).hex()}.new")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    return beside


def remove_staged(path: Path) -> None:
    """Remove what writers of this file left beside it that were cut off, for callers who know that nobody writes it now: of a private key it is a copy."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        with suppress(FileNotFoundError):
            left.unlink()


def commit_file(staged: Path, path: Path) -> None:
    """Put a staged file in place of `path`, in one step. After an OSError it is not known which of the two is there; beside it is left nothing that can be removed."""
    try:
        staged.replace(path)
    except OSError:
        with suppress(OSError):
            staged.unlink()
        raise
    sync_folder(path.parent)


def create_file(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Write a file that must not exist yet. Raises RequestError(ALREADY_EXISTS); the old one stays as it was."""
    beside = stage_file(path, data, mode)
    try:
        # A link, unlike a rename, fails where the name is taken.
        path.hardlink_to(beside)
    except FileExistsError:
        raise RequestError(
            f"{path} exists already and is not overwritten.",
            code=Code.ALREADY_EXISTS,
            hint="Move it away first if it is no longer needed.",
        ) from None
    finally:
        beside.unlink()
    sync_folder(path.parent)


def replace_file(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Write a file, or put new content in place of the old in one step."""
    commit_file(stage_file(path, data, mode), path)


def read_file(path: Path, what: str, *, bytes_max: int = SMALL_BYTES_MAX, private: bool = False) -> bytes:
    """The whole file; `what` says in an error what the file should have been ("the identity of orders-svc").

    Raises RequestError: NOT_FOUND where there is none, FORBIDDEN where this user may not read it, or where it is
    private and others may, CONFIG_INVALID where it is no plain file or over `bytes_max`.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise RequestError(f"{path}, {what}, is not a plain file.", code=Code.CONFIG_INVALID)
            if private and status.st_mode & 0o077:
                raise RequestError(
                    f"{path}, {what}, is private but has mode {stat.S_IMODE(status.st_mode):04o}: others may use it.",
                    code=Code.FORBIDDEN,
                    hint=f"If nobody has read it, run: chmod 600 {path}. If somebody may have, replace it.",
                )
            data = file.read(bytes_max + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"{path}, {what}, does not exist.", code=Code.NOT_FOUND, hint="Check the path, or make it first."
        ) from None
    except IsADirectoryError:
        raise RequestError(f"{path}, {what}, is a folder, not a file.", code=Code.CONFIG_INVALID) from None
    except PermissionError:
        raise RequestError(
            f"{path}, {what}, cannot be read by this user.",
            code=Code.FORBIDDEN,
            hint="Run as the user who owns it.",
        ) from None
    if len(data) > bytes_max:
        raise RequestError(f"{path}, {what}, has more than {bytes_max} bytes.", code=Code.CONFIG_INVALID)
    return data
