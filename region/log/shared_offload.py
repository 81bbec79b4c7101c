"""Offload of a log that has copies: what its leader does in a store, for all of them. Blocking.

One turn of the leader (region.log.maintenance), in this order, each step true by itself:

1. of a list that another leader wrote, go on from it (`taken_over`) under the own epoch;
2. upload closed segments that the list lacks, each under a name with the epoch, each read back (`Offloader`'s steps 2 to 4);
3. write the new list as an object that never changes, and move the pointer to it: a leader that was deposed moves none;
4. mark the own segments, and let local files go beyond what is kept;
5. delete in the store what the list before named and this one does not; once in an epoch and daily, what no list names.

Invariants:
- nothing is deleted in the store before a list without it is in force, and nothing of a later epoch is deleted at all;
- what an upload leaves behind that comes to nothing is named by its epoch, and a later turn finds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

from felix.errors import CorruptionError
from felix.storage.port import Files
from region.log import fsspec_store as store
from region.log.disk import DiskLog
from region.log.epochs import EpochStart
from region.log.offload import (
    MANIFEST_SUFFIX,
    ListPointer,
    Offloaded,
    OffloadList,
    decode_list,
    encode_list,
    epoch_of,
    list_name,
    object_name,
    object_url,
)
from region.log.offloader import delete_object, upload
from region.log.segment_state import SegmentState

UPLOADS_PER_LIST: Final = 16
"""Segments of one turn: what a leader that fails has uploaded in vain, and how often a list is written."""
LIST_BYTES_MAX: Final = 64 << 20
"""Of a list, about 150,000 segments: nobody reads more into memory."""


def waiting(disk: DiskLog, below: int) -> list[SegmentState]:
    """Closed segments that are to be uploaded, oldest first: committed, and not in the store. Does not block."""
    return [
        one
        for one in disk.segments[:-1]
        if one.remote is None and one.header.span is None and one.next_offset <= below
    ]


def read_list(pointer: ListPointer | None) -> OffloadList:
    """The list in force; an empty one where there is none yet. Raises UnavailableError, CorruptionError."""
    if pointer is None:
        return OffloadList()
    data = store.get_bytes(pointer.url)
    if len(data) > LIST_BYTES_MAX or hashlib.sha256(data).hexdigest() != pointer.sha256:
        raise CorruptionError(
            f"{pointer.url} is not the list of offloaded segments that was written there.",
            hint="The store's copy was changed. Restore the object; until then nothing more is offloaded, and nothing is deleted.",
        )
    return decode_list(data, pointer.url)


def write_list(listed: OffloadList, base: str, epoch: int) -> ListPointer:
    """Write a list below `base`; what is to point to it. Raises UnavailableError."""
    data = encode_list(listed)
    sha256 = hashlib.sha256(data).hexdigest()
    pointer = ListPointer(object_url(base, list_name(epoch, sha256)), sha256, epoch)
    store.put_bytes(data, pointer.url)
    return pointer


def upload_segments(
    files: Files,
    segments: Iterable[SegmentState],
    base: str,
    epoch: int,
    epochs: Sequence[EpochStart],
    pace: store.Pace,
) -> list[Offloaded]:
    """Step 2. Raises as `offloader.upload`."""
    return [
        upload(files, one, object_url(base, object_name(one.base_offset, epoch)), tuple(epochs), pace)
        for one in segments
    ]


def delete_unlisted(before: OffloadList, old: ListPointer | None, now: OffloadList) -> int:
    """Step 5, of what one turn took out of the list; how many segments. `old`: the pointer that was replaced."""
    kept = {one.url for one in now.segments}
    gone = [one.url for one in before.segments if one.url not in kept]
    for url in gone:
        delete_object(url)
    if old is not None:
        store.delete(old.url)
    return len(gone)


def delete_orphans(listed: OffloadList, pointer: ListPointer, base: str) -> int:
    """Step 5, of what leaders up to this epoch left behind below `base`; how many objects."""
    kept = (
        {one.url for one in listed.segments} | {one.manifest_url for one in listed.segments} | {pointer.url}
    )
    count = 0
    for name in store.list_names(base):
        url, epoch = object_url(base, name), epoch_of(name)
        if epoch is not None and epoch <= pointer.epoch and url not in kept:
            store.delete(url)
            count += 1
    return count


def delete_all(urls: Iterable[str]) -> None:
    """Delete these objects, and all that stands beside them in their shard's place: of a stream that was deleted."""
    urls = list(urls)
    for url in urls:
        delete_object(url)
    for base in {url.rpartition("/")[0] for url in urls}:
        for name in store.list_names(base):
            if epoch_of(name) is not None or name.endswith(MANIFEST_SUFFIX):
                store.delete(object_url(base, name))
