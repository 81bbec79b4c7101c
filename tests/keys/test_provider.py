"""What every key provider keeps to: one suite for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from felix.errors import RequestError, TamperError
from keys.errors import KeyScopeError, KeyUnknownError
from keys.file_provider import FileKeyProvider
from keys.key_id import KeyKind, check_key_id, new_key_id
from keys.provider import KeyProvider, MemoryKeyProvider

Make = Callable[[str], KeyProvider]


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "memory":
        return MemoryKeyProvider
    return lambda region: FileKeyProvider(tmp_path / region / "roots", region)


def test_what_a_root_wraps_it_unwraps(make: Make) -> None:
    provider = make("us-east")
    root = provider.create_root()
    check_key_id(root, "us-east", KeyKind.ROOT)
    wrapped = provider.wrap(root, b"s" * 32, b"context")
    assert b"s" * 32 not in wrapped
    assert provider.wrap(root, b"s" * 32, b"context") != wrapped
    assert provider.unwrap(root, wrapped, b"context") == b"s" * 32


def test_another_root_another_context_or_changed_bytes_are_refused(make: Make) -> None:
    provider = make("us-east")
    root, other = provider.create_root(), provider.create_root()
    wrapped = provider.wrap(root, b"s" * 32, b"context")
    with pytest.raises(TamperError):
        provider.unwrap(other, wrapped, b"context")
    with pytest.raises(TamperError):
        provider.unwrap(root, wrapped, b"another")
    for at in range(len(wrapped)):
        with pytest.raises(TamperError):
            provider.unwrap(root, wrapped[:at] + bytes([wrapped[at] ^ 1]) + wrapped[at + 1 :], b"context")
    for length in range(len(wrapped)):
        with pytest.raises(TamperError):
            provider.unwrap(root, wrapped[:length], b"context")


def test_roots_are_listed_until_they_are_destroyed(make: Make) -> None:
    provider = make("us-east")
    assert provider.root_key_ids() == []
    roots = sorted(provider.create_root() for _ in range(3))
    assert provider.root_key_ids() == roots
    wrapped = provider.wrap(roots[0], b"s" * 32, b"")
    provider.destroy(roots[0])
    provider.destroy(roots[0])
    assert provider.root_key_ids() == roots[1:]
    with pytest.raises(KeyUnknownError, match="not in this region's key provider"):
        provider.unwrap(roots[0], wrapped, b"")
    with pytest.raises(KeyUnknownError):
        provider.wrap(roots[0], b"s" * 32, b"")


def test_ids_of_another_region_or_kind_are_refused_before_anything_else(make: Make) -> None:
    provider = make("us-east")
    provider.create_root()
    for foreign in (
        new_key_id("eu-west", KeyKind.ROOT, b"r" * 11),
        new_key_id("us-east", KeyKind.STREAM, b"r" * 11),
    ):
        for call in (
            lambda key_id: provider.wrap(key_id, b"", b""),
            lambda key_id: provider.unwrap(key_id, b"", b""),
            provider.destroy,
        ):
            with pytest.raises(KeyScopeError):
                call(foreign)
    with pytest.raises(RequestError):
        provider.wrap(b"short", b"", b"")
    assert len(provider.root_key_ids()) == 1
    assert provider.region == "us-east"


# -- files ---------------------------------------------------------------------------------------------


def test_file_roots_survive_the_process_in_private_files(tmp_path: Path) -> None:
    provider = FileKeyProvider(tmp_path / "roots", "us-east")
    root = provider.create_root()
    wrapped = provider.wrap(root, b"s" * 32, b"c")
    (path,) = (tmp_path / "roots").iterdir()
    assert path.name == f"{root.hex()}.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    again = FileKeyProvider(tmp_path / "roots", "us-east")
    assert again.unwrap(root, wrapped, b"c") == b"s" * 32
    again.destroy(root)
    assert list((tmp_path / "roots").iterdir()) == []


def test_a_root_file_that_is_open_changed_cut_or_renamed_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "roots"
    root = FileKeyProvider(folder, "us-east").create_root()
    path = folder / f"{root.hex()}.key"
    data = path.read_bytes()
    path.chmod(0o644)
    with pytest.raises(RequestError, match="chmod 600"):
        FileKeyProvider(folder, "us-east").wrap(root, b"", b"")
    path.chmod(0o600)
    for changed in (
        data[:-1],
        data + b"\0",
        b"",
        *(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))),
    ):
        path.write_bytes(changed)
        with pytest.raises(TamperError, match="does not hold root key"):
            FileKeyProvider(folder, "us-east").wrap(root, b"", b"")
    path.write_bytes(data)
    other = new_key_id("us-east", KeyKind.ROOT, b"o" * 11)
    path.rename(folder / f"{other.hex()}.key")
    with pytest.raises(TamperError):
        FileKeyProvider(folder, "us-east").wrap(other, b"", b"")


def test_other_files_in_the_folder_are_no_roots(tmp_path: Path) -> None:
    provider = FileKeyProvider(tmp_path, "us-east")
    (tmp_path / "notes.key").write_text("nothing")
    (tmp_path / f"{new_key_id('eu-west', KeyKind.ROOT, b'r' * 11).hex()}.key").write_text("foreign")
    assert provider.root_key_ids() == []
