"""A folder that a later release has used is left alone by an earlier one: by brokers and by agents."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from bridge_mesh import Mesh, until
from region_home import running, us_east
from region_peer import client

from felix.errors import Code, RequestError
from felix.storage.disk import PRIVATE_FILES
from felix.storage.release_mark import MARK, mark_release, require_release
from region.config import load_config
from region.node import Node


@pytest.mark.parametrize("later", ["0.3.0", "0.10.0", "1.0.0", "1.0.0rc1"])
def test_a_folder_of_a_later_minor_release_is_refused_and_stays_as_it_is(tmp_path: Path, later: str) -> None:
    mark_release(PRIVATE_FILES, tmp_path, "0.2.1")
    mark_release(PRIVATE_FILES, tmp_path, later)
    for call in (mark_release, require_release):
        with pytest.raises(RequestError, match=f"release {later} .* this is release 0.2.1") as refused:
            call(PRIVATE_FILES, tmp_path, "0.2.1")
        assert refused.value.code is Code.UNSUPPORTED and "Going back" in refused.value.hint
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(MARK, f"{later}\n")]


def test_patch_releases_come_and_go_and_later_minor_ones_take_over(tmp_path: Path) -> None:
    for release, marked in (("0.2.3", "0.2.3"), ("0.2.1", "0.2.3"), ("0.3.0.dev1", "0.3.0.dev1")):
        mark_release(PRIVATE_FILES, tmp_path, release)
        assert (tmp_path / MARK).read_text() == f"{marked}\n"


@pytest.mark.parametrize("mark", [b"", b"\xff\xfe\n", b"whatever\n"])
def test_what_is_no_release_is_none(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / MARK).write_bytes(mark)
    mark_release(PRIVATE_FILES, tmp_path, "0.1.0")
    assert (tmp_path / MARK).read_text() == "0.1.0\n"


def test_a_full_disk_keeps_no_process_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwritev", full)
    mark_release(PRIVATE_FILES, tmp_path, "0.1.0")
    assert list(tmp_path.iterdir()) == []


async def test_a_broker_starts_in_no_folder_that_a_later_release_has_served(tmp_path: Path) -> None:
    folder = us_east(tmp_path)
    async with running(folder), client(folder) as region:
        await region.create_stream("acme/ops/orders")
    mark = folder.root / "data" / MARK
    own = mark.read_text()
    mark.write_text("99.0.0\n")
    before = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}
    with pytest.raises(RequestError, match=r"release 99\.0\.0 of Felix"):
        await Node.start(folder, load_config(folder.config))
    after = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}
    changed = [path.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    # Which logs were closed in order is forgotten: the next start looks at them.
    assert set(changed) <= {"lock", "clean-stop"}, changed
    mark.write_text(own)
    async with running(folder), client(folder) as region:
        await region.stream("acme/ops/orders").publish(b"goes on")


async def test_an_agent_opens_no_log_that_a_later_release_has_written_and_says_so(tmp_path: Path) -> None:
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
        mark = mesh.egress_folder / MARK
        own = mark.read_text()
        mark.write_text("99.0.0\n")
        async with mesh.agent() as agent:
            await until(lambda: "99.0.0" in agent.not_ready(), "a reason")
            await until(lambda: any("99.0.0" in each.reason for each in agent.links()), "a reason of a link")
        mark.write_text(own)
        await mesh.publish([b'{"tailnum": "N2", "hour": 1, "minute": 1}'])
        async with mesh.agent():
            await until(lambda: _two(mesh), "two records")
    finally:
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)


async def _two(mesh: Mesh) -> bool:
    return await mesh.arrived() == 2
