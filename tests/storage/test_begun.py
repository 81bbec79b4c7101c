"""A folder that was begun is not begun anew where its disk is not mounted, or another one is: by brokers and by agents."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import pytest
from bridge_mesh import Mesh, until
from region_home import running, us_east
from region_peer import client

from felix.errors import UnavailableError
from felix.storage.begun import MARK, BegunFolder
from felix.storage.disk import PRIVATE_FILES
from region.config import load_config
from region.folder import RegionFolder
from region.node import Node


def _begun(folder: Path) -> BegunFolder:
    return BegunFolder(PRIVATE_FILES, folder / "disk", folder / "disk.begun", "All is lost.")


def _remembered(folder: Path) -> BegunFolder:
    begun = _begun(folder)
    begun.path.mkdir()
    begun.remember(random.Random(1))
    (begun.path / "records").write_bytes(b"1")
    begun.require()
    return begun


@pytest.mark.parametrize("below", [None, (), ("lock", "lost+found")])
def test_an_empty_folder_that_was_begun_is_refused(tmp_path: Path, below: tuple[str, ...] | None) -> None:
    begun = _remembered(tmp_path)
    begun.path.rename(tmp_path / "away")
    if below is not None:
        begun.path.mkdir()
        for name in below:
            (begun.path / name).touch()
    with pytest.raises(UnavailableError, match="is empty, and was not") as refused:
        begun.require()
    assert refused.value.hint.endswith("All is lost.")
    # Whoever wants to begin anew does this.
    begun.memory.unlink()
    begun.require()


def test_another_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    begun = _remembered(tmp_path)
    begun.path.rename(tmp_path / "away")
    begun.path.mkdir()
    BegunFolder(PRIVATE_FILES, begun.path, tmp_path / "other", "").remember(random.Random(2))
    with pytest.raises(UnavailableError, match="is not the folder that was used here before"):
        begun.require()
    (begun.path / MARK).unlink()
    begun.path.rmdir()
    (tmp_path / "away").rename(begun.path)
    begun.require()


def test_what_an_earlier_release_left_is_taken_and_remembered(tmp_path: Path) -> None:
    begun = _remembered(tmp_path)
    own = begun.memory.read_text()
    (begun.path / MARK).unlink()
    begun.require()
    begun.remember(random.Random(3))
    assert (begun.path / MARK).read_text() == own
    # The memory alone is of before, as from a backup.
    begun.memory.unlink()
    begun.require()
    begun.remember(random.Random(4))
    assert begun.memory.read_text() == own


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_takes_no_memory_keeps_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, "no")

    begun = _begun(tmp_path)
    begun.path.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("os.pwritev", refuse)
        begun.remember(random.Random(1))
    assert not begun.memory.exists()
    begun.require()
    begun.remember(random.Random(1))
    assert begun.memory.read_text() == (begun.path / MARK).read_text()


@pytest.mark.parametrize("name", ["data", "data/streams", "data/audit"])
async def test_a_region_does_not_begin_anew_in_a_folder_that_is_not_mounted(
    tmp_path: Path, name: str
) -> None:
    folder = us_east(tmp_path)
    async with running(folder), client(folder) as region:
        await region.create_stream("acme/ops/orders")
        await region.stream("acme/ops/orders").publish(b"one")
    place = folder.root / name
    away = place.rename(tmp_path / "away")
    place.mkdir()
    before = _all_of(folder)
    with pytest.raises(UnavailableError, match=f"{place} is empty, and was not") as refused:
        await Node.start(folder, load_config(folder.config))
    assert _all_of(folder) == before
    assert ("remove" in refused.value.hint) == (name == "data/streams")
    place.rmdir()
    away.rename(place)
    async with running(folder), client(folder) as region:
        assert await region.stream("acme/ops/orders").publish(b"two") == 1


@pytest.mark.parametrize("names", [("streams",), ("audit",), ("audit", "streams")])
async def test_folders_that_disks_of_their_own_are_mounted_at_are_no_data_folder(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    folder = us_east(tmp_path)
    async with running(folder), client(folder) as region:
        await region.create_stream("acme/ops/orders")
        await region.stream("acme/ops/orders").publish(b"one")
    place = folder.root / "data"
    away = place.rename(tmp_path / "away")
    for name in names:
        # The disk of that one is there.
        shutil.copytree(away / name, place / name)
    before = _all_of(folder)
    with pytest.raises(UnavailableError, match=f"data is empty but for {' and '.join(names)}, and was not"):
        await Node.start(folder, load_config(folder.config))
    assert _all_of(folder) == before
    shutil.rmtree(place)
    away.rename(place)
    async with running(folder), client(folder) as region:
        assert await region.stream("acme/ops/orders").publish(b"two") == 1


def _all_of(folder: RegionFolder) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}


async def test_an_agent_waits_for_the_disk_of_its_log(tmp_path: Path) -> None:
    mesh = Mesh.make(tmp_path)
    for region in ("us-east", "eu-west"):
        await mesh.start(region)
    try:
        await mesh.enact_policies()
        await mesh.create()
        await mesh.grant()
        await mesh.publish([b'{"tailnum": "N1", "hour": 1, "minute": 1}'])
        async with mesh.agent():
            await until(lambda: mesh.arrived(), "a record")
        away = mesh.egress_folder.rename(tmp_path / "away")
        mesh.egress_folder.mkdir()
        await mesh.publish([b'{"tailnum": "N2", "hour": 1, "minute": 1}'])
        async with mesh.agent() as agent:
            await until(lambda: "is empty, and was not" in agent.not_ready(), "a reason")
            assert list(mesh.egress_folder.iterdir()) == []
            # Mounted while it runs.
            mesh.egress_folder.rmdir()
            away.rename(mesh.egress_folder)
            await until(lambda: _two(mesh), "two records")
    finally:
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)


async def _two(mesh: Mesh) -> bool:
    return await mesh.arrived() == 2
