"""Which shards of a data folder were closed in order: all that they hold is on the disk, and a start need not sync it again.

The file `clean-stop` is written when the folder is closed, after the last shard, and taken away, durably, before the next shard is opened:
while anybody may write it is not there, so a crash leaves none. It names the shards one by one. One that was not closed in order, or not even
opened since a crash, is not among them.

It counts for the folder that it was written in alone: a copy, such as one put back from a backup, may be in the page cache only. What is put
into a shard's folder by hand while the broker is stopped is found where it changes the last segment; who puts anything else there takes
`clean-stop` away. Blocking: where a folder is opened and closed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from felix.storage.port import Files
from felix.storage.small_file import load_checked, save_checked

CLEAN_STOP_NAME: Final = "clean-stop"


class _CleanStop(msgspec.Struct, array_like=True):
    place: str
    shards: list[str]


_decoder: Final = msgspec.msgpack.Decoder(_CleanStop)


def _place(lock_identity: str) -> str:
    """Which folder it is, also after the machine was started again; empty where the system does not say."""
    return lock_identity.partition(":")[2] or lock_identity


def take_clean_stop(files: Files, data: Path, lock_identity: str) -> set[str]:
    """The shards that the last stop closed in order. From now on they are so no longer. Raises OSError."""
    payload = load_checked(files, data / CLEAN_STOP_NAME)
    if payload is None:
        return set()
    files.remove(data / CLEAN_STOP_NAME)
    files.sync_folder(data)
    try:
        found = _decoder.decode(payload)
    except msgspec.DecodeError:
        return set()
    return set(found.shards) if found.place and found.place == _place(lock_identity) else set()


def save_clean_stop(files: Files, data: Path, lock_identity: str, shards: Iterable[str]) -> None:
    """Nobody writes here any more, and all that these shards hold is on the disk. Raises OSError."""
    stop = _CleanStop(_place(lock_identity), sorted(shards))
    save_checked(files, data / CLEAN_STOP_NAME, msgspec.msgpack.encode(stop))
