"""The data folder: names, one process at a time, deletion on request only."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log.building import batch_of

from felix.errors import FelixError, RequestError, UnavailableError
from felix.names import StreamName
from felix.settings import EPHEMERAL
from felix.storage.disk import FileLock
from region.log.directory import LogDirectory, StoredStream, folder_name, parse_folder_name
from region.log.shard import ShardHooks, ShardLog, ShardSettings

NAME = StreamName.parse("acme/payments/orders")
FIRST, SECOND = bytes(16), bytes(range(16))

parts = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)


@given(st.builds(StreamName, parts, parts, parts), st.binary(min_size=16, max_size=16))
def test_folder_names_round_trip_and_stay_in_their_folder(name: StreamName, incarnation: bytes) -> None:
    text = folder_name(name, incarnation)
    assert parse_folder_name(text) == (name, incarnation)
    assert len(text) <= 255 and "/" not in text and not text.startswith(".")


@given(st.text(max_size=60))
def test_other_folders_are_not_taken_for_streams(text: str) -> None:
    parsed = parse_folder_name(text)
    assert parsed is None or folder_name(*parsed) == text


async def test_shards_are_opened_listed_closed_and_deleted(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path, "us-east")
    for incarnation, shard in ((FIRST, 0), (FIRST, 1), (SECOND, 0)):
        log = await directory.open_shard(NAME, incarnation, shard, ShardSettings(), ShardHooks())
        await log.append(batch_of(b"kept"))
    await directory.open_shard(NAME, SECOND, 1, ShardSettings(durability=EPHEMERAL), ShardHooks())
    with pytest.raises(RequestError):
        await directory.open_shard(NAME, FIRST, 0, ShardSettings(), ShardHooks())
    assert len(directory.shards) == 4
    both = await asyncio.gather(
        *(directory.open_shard(NAME, FIRST, 2, ShardSettings(), ShardHooks()) for _ in range(2)),
        return_exceptions=True,
    )
    assert [type(one) for one in both] == [ShardLog, RequestError], "opened once, even at the same time"
    await directory.close_shard(NAME, FIRST, 1)
    await directory.close()

    directory = LogDirectory(tmp_path, "us-east")
    assert directory.stored() == [StoredStream(NAME, FIRST, (0, 1, 2)), StoredStream(NAME, SECOND, (0,))]
    log = await directory.open_shard(NAME, FIRST, 0, ShardSettings(), ShardHooks())
    assert log.high_watermark == 1
    await directory.delete_stream(NAME, FIRST)
    assert directory.stored() == [StoredStream(NAME, SECOND, (0,))]
    await directory.delete_stream(NAME, FIRST)
    await directory.close()


async def test_deletion_that_a_crash_interrupted_is_finished_and_foreign_folders_are_left_alone(
    tmp_path: Path,
) -> None:
    half, foreign = f"{folder_name(NAME, FIRST)}.deleted", "notes.deleted"
    make_folders(tmp_path, half, foreign)
    await LogDirectory(tmp_path, "us-east").close()
    assert folders(tmp_path) == [foreign]


def make_folders(data: Path, *names: str) -> None:
    for name in names:
        (data / name).mkdir()


def folders(data: Path) -> list[str]:
    return [path.name for path in data.iterdir() if path.is_dir()]


async def test_another_region_does_not_open_the_folder(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path, "us-east")
    await directory.open_shard(NAME, FIRST, 0, ShardSettings(), ShardHooks())
    await directory.close()
    directory = LogDirectory(tmp_path, "eu-west")
    with pytest.raises(FelixError, match="belongs to"):
        await directory.open_shard(NAME, FIRST, 0, ShardSettings(), ShardHooks())
    await directory.close()


def test_second_process_is_refused_by_name_of_the_first(tmp_path: Path) -> None:
    holder = "import sys; from pathlib import Path; from felix.storage.disk import FileLock;"
    holder += "lock = FileLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        with pytest.raises(UnavailableError, match=f"pid {child.pid}"):
            FileLock(tmp_path)
    finally:
        child.kill()
        child.communicate()
    with FileLock(tmp_path), pytest.raises(UnavailableError, match=f"pid {os.getpid()}"):
        FileLock(tmp_path)
    FileLock(tmp_path).release()
