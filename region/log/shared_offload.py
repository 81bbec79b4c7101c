"""Offload of a log that has copies: what its leader does in a store, for all of them. Blocking.

One turn of the leader (region.log.maintenance), in this order, each step true by itself:

1. of a list that another leader wrote, go on from it (`taken_over`) under the own epoch;
2. upload closed segments that the list lacks, each under a name with the epoch, each read back (`Offloader`'s steps 2 to 4);
3. write the new list as an object that never changes, and move the pointer to it: a leader that was deposed moves none;
4. mark the own segments, and let local files go beyond what is kept;
5. delete in the store what the list before named and this one does not; once in an epoch and daily, what no list names, in each store that the log is known to have been in.

Invariants:
- nothing is deleted in the store before a list without it is in force, and nothing of a later epoch is deleted at all;
- an object that the list in force names, or one that may be in force, is not written again;
- what an upload leaves behind that comes to nothing is named by its epoch, and a later turn finds it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from felix.errors import CorruptionError, RequestError, UnavailableError
from felix.lazy_event import LazyThreadEvent
from felix.storage.port import Files
from region.log import fsspec_store as store
from region.log.compactor import WorkEndedError
from region.log.disk import DiskLog
from region.log.epochs import EpochStart
from region.log.offload import (
    ListPointer,
    Offloaded,
    OffloadList,
    OffloadState,
    TagOf,
    decode_list,
    encode_list,
    epoch_of,
    is_object,
    is_of_shard,
    list_name,
    object_name,
    object_url,
)
from region.log.offloader import delete_object, differs, upload
from region.log.segment_state import SegmentState
from region.log.store_calls import ended_by

UPLOADS_PER_LIST: Final = 16
"""Segments of one turn: what a leader that fails has uploaded in vain, and how often a list is written."""
TAG: Final = "offload-list"
"""The purpose of a list's tag."""
LIST_BYTES_MAX: Final = 64 << 20
"""Of a list, about 150,000 segments: nobody reads more into memory."""


def waiting(disk: DiskLog, below: int) -> list[SegmentState]:
    """Closed segments that are to be uploaded, oldest first: committed, and not in the store. Does not block."""
    return [
        one
        for one in disk.segments[:-1]
        if one.remote is None and one.header.span is None and one.next_offset <= below
    ]


class ForgedListError(CorruptionError):
    """A pointer or list that no broker of the region made for this shard. Nothing that it names was touched."""


class ReplacedListError(CorruptionError):
    """A list that another one took the place of: the metadata store was put back. What the copies know goes on."""


class SharedLists:
    """The lists of one shard: who may have written them, and where their objects may be. For any thread; all of it blocks.

    The pointer stands in the metadata store, whose administrator has no key and no store of segments. So it carries a tag under the stream's
    key; nothing is opened, let alone deleted, that is not tagged and below the shard's own place.
    """

    def __init__(
        self, place: str, tag: Callable[[str, bytes], bytes], end: LazyThreadEvent | None = None
    ) -> None:
        """`place`: the shard's, below any store (directory.shard_place). `tag`: as region.log.seal.LogSeal has it. Once `end` is set, nothing is read any
        more."""
        self._place = place
        self._end = end or LazyThreadEvent()
        self._tag = tag

    def read(self, pointer: ListPointer | None) -> OffloadList:
        """The list in force; an empty one where there is none yet. Raises UnavailableError, CorruptionError, ForgedListError, ReplacedListError, and
        as `tag`."""
        with ended_by(self._end):
            return OffloadList() if pointer is None else self._read(pointer)

    def _read(self, pointer: ListPointer) -> OffloadList:
        self._check_url(pointer.url)
        if not hmac.compare_digest(pointer.tag.encode(), self._tag(TAG, pointer.tagged).hex().encode()):
            raise _forged(self._place, "it does not carry the tag of a broker that has the stream's key")
        try:
            data = store.get_bytes(pointer.url, LIST_BYTES_MAX)
        except UnavailableError:
            base, _, name = pointer.url.rpartition("/")
            names = store.list_names(base)
            # Of a store that has nothing of the shard, it may be that it is not the store (a folder that is not mounted).
            if not names or name in names:
                raise
            raise ReplacedListError(
                f"The record of {self._place} names a list of offloaded segments that is not in the store any more: another one took its place.",
                hint="The metadata store was put back, or the object was deleted. The shard's leader writes a list of what its copy knows.",
            ) from None
        if len(data) > LIST_BYTES_MAX or hashlib.sha256(data).hexdigest() != pointer.sha256:
            raise CorruptionError(
                f"{pointer.url} is not the list of offloaded segments that was written there.",
                hint="The store's copy was changed. Restore the object; until then nothing more is offloaded, and nothing is deleted.",
            )
        listed = decode_list(data, pointer.url)
        for one in listed.segments:
            self._check_url(one.url)
        return listed

    def write(self, listed: OffloadList, base: str, epoch: int) -> ListPointer:
        """Write a list below `base`, and read it back; what is to point to it. Raises UnavailableError, and as `tag`."""
        data = encode_list(listed)
        sha256 = hashlib.sha256(data).hexdigest()
        bare = ListPointer(object_url(base, list_name(epoch, sha256)), sha256, epoch)
        pointer = msgspec.structs.replace(bare, tag=self._tag(TAG, bare.tagged).hex())
        store.put_bytes(data, pointer.url)
        if store.get_bytes(pointer.url, LIST_BYTES_MAX) != data:
            raise differs(pointer.url)
        return pointer

    def _check_url(self, url: str) -> None:
        try:
            store.check_parts(url)
        except (RequestError, ValueError) as error:
            raise _forged(self._place, f"it names {url[:100]!r}, which is no object") from error
        if not is_of_shard(url, self._place):
            raise _forged(self._place, f"it names {url[:100]!r}, which is no object of this shard's")


def _forged(place: str, why: str) -> ForgedListError:
    return ForgedListError(
        f"The record of {place} names a list of offloaded segments that no broker of this region wrote for it: {why}.",
        hint="Somebody changed the metadata store, or put another shard's record there. Nothing of what it names was touched.",
    )


def gone_below(below: int, own: Iterable[Offloaded]) -> int:
    """Up to which offset, at most `below`, what one copy knows to be in the store is gone from it: what retention let go of under another leader.
    Raises UnavailableError."""
    gone = 0
    for one in sorted(own, key=lambda one: one.base_offset):
        if one.next_offset > below or store.is_there(one.url):
            break
        gone = one.next_offset
    return gone


def upload_segments(
    files: Files,
    segments: Iterable[SegmentState],
    base: str,
    epoch: int,
    epochs: Sequence[EpochStart],
    pace: store.Pace,
    tag: TagOf,
) -> tuple[list[Offloaded], UnavailableError | None]:
    """Step 2. What was uploaded, and what the store said that took no more: of one that fails now and then, each turn has what it did take. Raises
    as `offloader.upload` for all else."""
    entries: list[Offloaded] = []
    for one in segments:
        url = object_url(base, object_name(one.base_offset, epoch))
        try:
            entries.append(upload(files, one, url, tuple(epochs), pace, tag))
        except WorkEndedError:
            raise
        except UnavailableError as error:
            return entries, error
    return entries, None


def delete_unlisted(before: OffloadList, old: ListPointer | None, now: OffloadList) -> int:
    """Step 5, of what one turn took out of the list; how many segments. `old`: the pointer that was replaced. A store that does not delete holds up no
    other one, and is told of at the end: raises UnavailableError."""
    kept = {one.url for one in now.segments}
    gone = [one.url for one in before.segments if one.url not in kept]
    failed: dict[str, UnavailableError] = {}
    for delete, urls in ((delete_object, gone), (store.delete, [old.url] if old is not None else [])):
        for url in urls:
            base = url.rpartition("/")[0]
            if base in failed:
                continue
            try:
                delete(url)
            except UnavailableError as error:
                failed[base] = error
    for failure in failed.values():
        raise failure
    return len(gone)


def delete_orphans(listed: OffloadList, pointer: ListPointer, places: Iterable[str]) -> int:
    """Step 5, of what leaders up to this epoch left behind in the shard's `places` in stores; how many objects. A store that does not delete holds up no
    other one, and is told of at the end: raises UnavailableError."""
    kept = (
        {one.url for one in listed.segments} | {one.manifest_url for one in listed.segments} | {pointer.url}
    )
    count = 0
    failure: UnavailableError | None = None
    for base in places:
        try:
            for name in store.list_names(base):
                url, epoch = object_url(base, name), epoch_of(name)
                if epoch is not None and epoch <= pointer.epoch and url not in kept:
                    store.delete(url)
                    count += 1
        except UnavailableError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return count


def delete_all(state: OffloadState) -> tuple[OffloadState, UnavailableError | None]:
    """Delete all objects that are known, and all that brokers have put beside them in their shard's place, of whichever history: of a stream that was
    deleted. A store that does not holds up no other one, and no more is asked of it: what is left, to go on from, and what the first of them said.
    """
    deleted: set[str] = set()
    failure: UnavailableError | None = None
    for base in state.all_places:
        try:
            for url in state.urls:
                if url.rpartition("/")[0] == base:
                    delete_object(url)
                    deleted.add(url)
            for name in store.list_names(base):
                if is_object(name):
                    store.delete(object_url(base, name))
        except UnavailableError as error:
            failure = failure or error
    left = OffloadState(
        tuple(one for one in state.segments if one.url not in deleted),
        "" if state.begun in deleted else state.begun,
        tuple(url for url in state.pending_deletion if url not in deleted),
        state.all_places,
    )
    return left, failure
