"""Where a log's files are read from: a folder, a web server, or any URL that fsspec opens.

`open_files` gives the `audit.tile.Files` of a path. Executors call it as well as the driver, so a path must mean
the same log on every machine that takes part; that is the operator's business (docs/reports.md).
"""

from __future__ import annotations

from pathlib import Path

from audit.file_size import file_bytes_max, too_long
from audit.spark.http_files import HttpFiles, is_http
from audit.tile import CHECKPOINT_PATH, Files
from audit.tile_disk import Folder
from felix.errors import Code, RequestError


class RemoteFiles:
    """`audit.tile.Files` over fsspec: `s3://bucket/audit/log`, `hdfs://…`, `file:///…`."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise RequestError(
                f"{url} is a URL, and reading URLs needs fsspec, which is not installed.",
                code=Code.UNSUPPORTED,
                hint="Install it (pip install fsspec, and the package for the scheme, as s3fs for s3://).",
            ) from error
        try:
            try:
                # A log that is written has other files from one second to the next, and file systems share what they list within a process.
                self._system, self._root = url_to_fs(url, use_listings_cache=False)
            except TypeError:
                # One that has no such setting.
                self._system, self._root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise RequestError(
                f"{url} cannot be opened: {error}.",
                code=Code.UNSUPPORTED,
                hint="fsspec names the package that brings this scheme; install it on every machine of the job.",
            ) from error

    @property
    def folder(self) -> Path | None:
        """Where this is on this machine's disk."""
        protocol = self._system.protocol
        # A tuple, where a file system goes by several names.
        return (
            Path(self._root) if "file" in ((protocol,) if isinstance(protocol, str) else protocol) else None
        )

    def read(self, path: str) -> bytes | None:
        """The file's bytes, None where there is none. Raises TamperError of a longer one than any of its kind."""
        where, bytes_max = f"{self._root}/{path}", file_bytes_max(path)
        try:
            if bytes_max is None:
                return bytes(self._system.cat_file(where))
            data = bytes(self._system.cat_file(where, start=0, end=bytes_max + 1))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            # Some stores have no part of what is empty.
            if self._system.size(where) == 0:
                return b""
            raise
        if len(data) > bytes_max:
            raise too_long(path, bytes_max)
        return data

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty where there is none."""
        try:
            found = self._system.ls(f"{self._root}/{folder}", detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)


def open_files(path: str) -> Files:
    """The files of the log at `path`. Raises RequestError where a URL cannot be opened; reads nothing yet."""
    if "://" not in path:
        return Folder(Path(path))
    if is_http(path):
        return HttpFiles(path)
    remote = RemoteFiles(path)
    # A URL of a folder here: what is no file in it is known, and is not waited for.
    return remote if remote.folder is None else Folder(remote.folder)


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
