"""A store whose calls wait for as long as a test wants: `hanging://`, in memory besides."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

SCHEME = "hanging"


class HangingFiles(MemoryFileSystem):  # type: ignore[misc]
    """What is in `held` does not come back before it is taken out again: of all objects, or of those whose path has this in it."""

    protocol = SCHEME
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    held: ClassVar[dict[str, str]] = {}
    waiting: ClassVar[Counter[str]] = Counter()
    changed = threading.Condition()

    @classmethod
    def wait(cls, call: str, path: str) -> None:
        with cls.changed:
            cls.waiting[call] += 1
            cls.changed.notify_all()
            while call in cls.held and cls.held[call] in path:
                cls.changed.wait()
            cls.waiting[call] -= 1
            cls.changed.notify_all()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.wait("makedirs", path)
        super().makedirs(path, exist_ok)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self.wait("write" if "w" in mode else "read", path)
        found = super()._open(path, mode, **kwargs)
        return _Reader(found, path) if mode == "rb" else found

    def info(self, path: str, **kwargs: Any) -> Any:
        self.wait("info", path)
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self.wait("ls", path)
        return super().ls(path, detail, **kwargs)

    def rm_file(self, path: str) -> None:
        self.wait("delete", path)
        if self._strip_protocol(path) not in self.store:
            raise FileNotFoundError(path)
        super()._rm(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self.wait("read", path)
        with super()._open(path, "rb") as file:
            found: bytes = file.read()
        return found[start:end]


class _Reader:
    """The body of an object, which may come to a halt."""

    def __init__(self, file: MemoryFile, path: str) -> None:
        self._file, self._path = file, path

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, most: int) -> bytes:
        HangingFiles.wait("body", self._path)
        found: bytes = self._file.read(most)
        return found

    def close(self) -> None:
        """Nothing to let go of."""


ALL = ("makedirs", "write", "read", "body", "info", "ls", "delete")


@contextmanager
def hanging(*calls: str, path: str = "") -> Iterator[None]:
    """Meanwhile these calls do not come back; afterwards all of them do."""
    with HangingFiles.changed:
        HangingFiles.held.update(dict.fromkeys(calls or ALL, path))
    try:
        yield
    finally:
        with HangingFiles.changed:
            HangingFiles.held.clear()
            HangingFiles.changed.notify_all()


def objects() -> list[str]:
    """Paths of all that there is."""
    return sorted(HangingFiles.store)


def clear() -> None:
    """Begin with nothing."""
    HangingFiles.held.clear()
    HangingFiles.store.clear()
    HangingFiles.pseudo_dirs[:] = [""]


fsspec.register_implementation(SCHEME, HangingFiles, clobber=True)
