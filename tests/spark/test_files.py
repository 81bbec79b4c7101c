"""The files of a log behind a URL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry

from audit.spark.files import open_files


class Keeping(LocalFileSystem):  # type: ignore[misc]
    """Keeps what it has listed, as those of S3, GCS, Azure and FTP do."""

    protocol = "keeping"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("keeping://").rstrip("/")

    def ls(self, path: str, detail: bool = False, **_: object) -> list[Any]:
        if (found := self._ls_from_cache(path)) is None:
            self.dircache[path] = found = super().ls(path, detail=True)
        return found if detail else [each["name"] for each in found]


class WithoutSettings(Keeping):
    """Takes no settings at all."""

    def __init__(self) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    fsspec.register_implementation("keeping", Keeping, clobber=True)
    yield
    _registry.pop("keeping", None)


def test_a_log_that_goes_on_is_listed_anew_each_time(tmp_path: Path) -> None:
    folder = tmp_path / "tile/entries/000.p"
    folder.mkdir(parents=True)
    (folder / "7").write_bytes(b"")
    url = f"keeping://{tmp_path}"
    # Somebody else in this process, who lets it keep what it lists.
    system, root = fsspec.core.url_to_fs(url)
    assert len(system.ls(f"{root}/tile/entries/000.p")) == 1
    files = open_files(url)
    assert files.names("tile/entries/000.p") == ["7"]
    (folder / "9").write_bytes(b"")
    assert len(system.ls(f"{root}/tile/entries/000.p")) == 1
    assert files.names("tile/entries/000.p") == ["7", "9"]
    assert open_files(url).names("tile/entries/000.p") == ["7", "9"]


def test_a_file_system_that_has_no_such_setting_is_opened_as_it_is(tmp_path: Path) -> None:
    fsspec.register_implementation("keeping", WithoutSettings, clobber=True)
    (tmp_path / "checkpoint").write_bytes(b"c")
    assert open_files(f"keeping://{tmp_path}").read("checkpoint") == b"c"
