"""Where a log's files are read from: a folder, or any URL that fsspec opens.

`open_files` gives the `audit.tile.Files` of a path. Executors call it as well as the driver, so a path must mean
the same log on every machine that takes part; that is the operator's business (docs/reports.md).
"""

from __future__ import annotations

from pathlib import Path

from audit.tile import CHECKPOINT_PATH, Files
from audit.tile_disk import Folder
from felix.errors import Code, RequestError


class RemoteFiles:
    """`audit.tile.Files` over fsspec: `s3://bucket/audit/log`, `hdfs://…`, `file:///…`."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise RequestError(
                f"{url} is a URL, and reading URLs needs fsspec, which is not installed.",
                code=Code.UNSUPPORTED,
                hint="Install it (pip install fsspec, and the package for the scheme, as s3fs for s3://).",
            ) from error
        try:
            self._system, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise RequestError(
                f"{url} cannot be opened: {error}.",
                code=Code.UNSUPPORTED,
                hint="fsspec names the package that brings this scheme; install it on every machine of the job.",
            ) from error

    def read(self, path: str) -> bytes | None:
        """The file's bytes, None where there is none."""
        try:
            return bytes(self._system.cat_file(f"{self._root}/{path}"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty where there is none."""
        try:
            found = self._system.ls(f"{self._root}/{folder}", detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)


def open_files(path: str) -> Files:
    """The files of the log at `path`. Raises RequestError where a URL cannot be opened; reads nothing yet."""
    return RemoteFiles(path) if "://" in path else Folder(Path(path))


def read_checkpoint(files: Files, path: str) -> bytes:
    """The checkpoint's bytes. Raises RequestError(NOT_FOUND) where there is none, with what to do."""
    data = files.read(CHECKPOINT_PATH)
    if data is None:
        raise RequestError(
            f"{path} holds no audit log: there is no file {CHECKPOINT_PATH!r} in it.",
            code=Code.NOT_FOUND,
            hint="Name the folder of one log: the one with `checkpoint` and `tile/` in it.",
        )
    return data
