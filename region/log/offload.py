"""Offload: what is known of segments that were copied to a store elsewhere. Pure; region.log.offloader does the work.

A closed segment is uploaded as it stands on disk, sealed; beside it goes a manifest that says what it is. The shard's
file `offloaded` says which segments are in the store, verified. Only of those may the local file go. What the log still
is does not depend on where its bytes are: an offloaded segment keeps its place among the others.

A log with copies has one such list for all of them (`OffloadList`): an object in the store, which never changes, and a pointer to it that
only the log's leader moves (`ListPointer`, in the shard's record). Each copy's file `offloaded` has what of it the copy's own segments are.

Invariants:
- an entry is in `segments` only after its bytes were read back from the store and compared;
- `begun` names an object before its upload begins, `pending_deletion` names objects before their segment is forgotten: nothing that
  was written to a store is ever without a name here, until it has been deleted there.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from felix.errors import CorruptionError
from region.log.epochs import EpochStart
from region.log.point import LogPoint
from region.log.segment import SEGMENT_SUFFIX, SegmentHeader, decode_segment_header

TagOf = Callable[[str, bytes], bytes]
"""What only who has the stream's key can say of bytes, for a purpose (region.log.seal.LogSeal.tag); empty of a log that is kept unsealed."""

OFFLOADED_NAME: Final = "offloaded"
FETCHED_SUFFIX: Final = ".fetched"
"""Of a local copy for reading; it may go at any time."""
MANIFEST_SUFFIX: Final = ".json"
MANIFEST_TAG: Final = "offload-manifest"
"""The purpose of a manifest's tag."""
LIST_PREFIX: Final = "list-"
_OBJECT: Final = re.compile(r"[0-9]{20}(?:-[0-9]{10})?\.seg|list-[0-9]{10}-[0-9a-f]{16}\.json")
_NAME: Final = re.compile(r"[0-9]{20}-([0-9]{10})\.seg(?:\.json)?|list-([0-9]{10})-[0-9a-f]{16}\.json")


class Offloaded(msgspec.Struct, frozen=True):
    """One segment in a store. `url` is the object's; `header` the segment's own; `sha256` of all its bytes, in hex."""

    url: str
    header: bytes
    next_offset: int
    segment_bytes: int
    last_time_ms: int
    sha256: str

    @property
    def segment_header(self) -> SegmentHeader:
        """Raises CorruptionError."""
        return decode_segment_header(self.header)[0]

    @property
    def base_offset(self) -> int:
        return self.segment_header.base_offset

    @property
    def base_note(self) -> int:
        """Position entries between the last batch before the segment and its beginning; 0 where its header does not say."""
        head = self.segment_header.head
        return head.note if head else 0

    @property
    def manifest_url(self) -> str:
        return self.url + MANIFEST_SUFFIX


class OffloadState(msgspec.Struct, frozen=True, array_like=True):
    """The payload of the file `offloaded`. `begun`: the object of an upload under way, empty without one; `pending_deletion`: objects
    that are to be deleted; `places`: the shard's in all stores that something was uploaded to, where histories that were given up may have left some."""

    segments: tuple[Offloaded, ...] = ()
    begun: str = ""
    pending_deletion: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    @property
    def urls(self) -> list[str]:
        """Every object that may exist, manifests left out."""
        return [*self.pending_deletion, *(one.url for one in self.segments), *filter(None, [self.begun])]

    @property
    def all_places(self) -> tuple[str, ...]:
        """`places`, and those of all that is named here: what a version wrote that noted none, or a leader told."""
        return tuple(dict.fromkeys((*self.places, *(url.rpartition("/")[0] for url in self.urls))))


class ListPointer(msgspec.Struct, frozen=True):
    """Which list of a log with copies is in force: its object, the SHA-256 of its bytes in hex, and the epoch of the leader that wrote it. `tag`,
    in hex, is made with the stream's key: a list is what brokers wrote, whoever may write the records."""

    url: str
    sha256: str
    epoch: int
    tag: str = ""

    @property
    def tagged(self) -> bytes:
        """What the tag is of."""
        return msgspec.json.encode((self.url, self.sha256, self.epoch))


class OffloadList(msgspec.Struct, frozen=True):
    """What of a log with copies is in a store, by base offset. Below `start` nothing is left. Entries may overlap where copies had segments
    of their own."""

    start: int = 0
    segments: tuple[Offloaded, ...] = ()
    version: int = 1

    def less(self, start: int) -> OffloadList:
        """Without what lies wholly below `start`: retention let go of it."""
        start = max(start, self.start)
        return OffloadList(start, tuple(one for one in self.segments if one.next_offset > start))

    def more(self, entries: Iterable[Offloaded]) -> OffloadList:
        """With these, which are verified."""
        known = {one.url: one for one in (*self.segments, *entries)}
        return OffloadList(
            self.start, tuple(sorted(known.values(), key=lambda one: (one.base_offset, one.url)))
        )

    def taken_over(self, own: Iterable[Offloaded], end: int) -> OffloadList:
        """As a new leader goes on from it, whose log ended at offset `end` when it was elected: with what its own copy knows (`own`) in
        place of a pointer that was lost or put back, and without what an unclean election gave up."""
        known = self.more(one for one in own if one.base_offset >= self.start)
        return OffloadList(self.start, tuple(one for one in known.segments if one.next_offset <= end))

    def between(self, start: LogPoint, end: int) -> tuple[Offloaded, ...] | None:
        """Segments that follow each other from `start` to offset `end`; None where it has no such."""
        before: dict[int, Offloaded] = {}
        for one in self.segments:
            is_first = (one.base_offset, one.base_note) == start
            if (is_first or one.base_offset in before) and one.next_offset <= end:
                before.setdefault(one.next_offset, one)
        chain: list[Offloaded] = []
        at = end
        while at != start.offset:
            if at not in before:
                return None
            chain.append(before[at])
            at = chain[-1].base_offset
        return tuple(reversed(chain))


class Manifest(msgspec.Struct, frozen=True):
    """What stands beside an object: all that a lost local folder takes to be made anew. `tag`, in hex, is made with the stream's key: a manifest
    is what a broker wrote, whoever may write the store. Those of before have none."""

    segment: Offloaded
    epochs: tuple[EpochStart, ...]
    version: int = 1
    tag: str = ""

    def with_tag(self, tag: TagOf) -> Manifest:
        """Raises as `tag`."""
        return msgspec.structs.replace(self, tag=self._tag(tag))

    def has_tag_of(self, tag: TagOf) -> bool:
        """Whether it carries the tag of who has the stream's key. Raises as `tag`."""
        return bool(self.tag) and hmac.compare_digest(self.tag.encode(), self._tag(tag).encode())

    def _tag(self, tag: TagOf) -> str:
        return tag(MANIFEST_TAG, msgspec.json.encode((self.segment, self.epochs, self.version))).hex()


def encode_offload(state: OffloadState) -> bytes:
    """The payload of the file."""
    return msgspec.msgpack.encode(state)


# Made here: shards and logs are opened on several threads, and msgspec learns a type at its first use, not safely on two.
_offload: Final = msgspec.msgpack.Decoder(OffloadState)
_list: Final = msgspec.json.Decoder(OffloadList)
_manifest: Final = msgspec.json.Decoder(Manifest)


def decode_offload(payload: bytes) -> OffloadState:
    """Raises CorruptionError."""
    try:
        state = _offload.decode(payload)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"The list of offloaded segments does not decode: {error}.") from error
    for one in state.segments:
        _check(one)
    return state


def _check(one: Offloaded) -> None:
    """Raises CorruptionError where a segment ends before it begins, or its header does not decode."""
    if one.next_offset < one.base_offset:
        raise CorruptionError(f"{one.url} ends at {one.next_offset}, before it begins.")


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes, url: str) -> Manifest:
    """Raises CorruptionError that names the object."""
    try:
        manifest = _manifest.decode(data)
        if manifest.version != 1:
            raise CorruptionError(f"it has version {manifest.version}, and 1 is known")
        _check(manifest.segment)
    except (msgspec.MsgspecError, CorruptionError) as error:
        raise CorruptionError(f"The manifest {url} does not decode: {error}.") from error
    return manifest


def encode_list(listed: OffloadList) -> bytes:
    """JSON."""
    return msgspec.json.encode(listed)


def decode_list(data: bytes, url: str) -> OffloadList:
    """Raises CorruptionError that names the object."""
    try:
        listed = _list.decode(data)
        if listed.version != 1:
            raise CorruptionError(f"it has version {listed.version}, and 1 is known")
        for one in listed.segments:
            _check(one)
    except (msgspec.MsgspecError, CorruptionError) as error:
        raise CorruptionError(f"The list of offloaded segments {url} does not decode: {error}.") from error
    return listed


def object_name(base_offset: int, epoch: int) -> str:
    """Of a segment that is offloaded in `epoch`: no history of the log but this one writes over it."""
    return f"{base_offset:020d}-{epoch:010d}{SEGMENT_SUFFIX}"


def list_name(epoch: int, sha256: str) -> str:
    """Of a list, by its content."""
    return f"{LIST_PREFIX}{epoch:010d}-{sha256[:16]}{MANIFEST_SUFFIX}"


def epoch_of(name: str) -> int | None:
    """Of the leader that wrote an object of a log with copies, or its manifest; None for another object."""
    match = _NAME.fullmatch(name)
    return int(match[1] or match[2]) if match else None


def base_offset_of(name: str) -> int | None:
    """Of the segment that an object of this name is; None for another object."""
    return int(name[:20]) if _OBJECT.fullmatch(name) and name.endswith(SEGMENT_SUFFIX) else None


def is_object(name: str) -> bool:
    """Whether a broker gives such a name to what it puts into a shard's place: a segment, its manifest, or a list."""
    return any(_OBJECT.fullmatch(each) for each in (name, name.removesuffix(MANIFEST_SUFFIX)))


def is_object_of(name: str, base_offset: int) -> bool:
    """Whether a segment that begins at this offset is given such a name, or its manifest."""
    return bool(_OBJECT.fullmatch(name.removesuffix(MANIFEST_SUFFIX))) and name.startswith(
        f"{base_offset:020d}"
    )


def is_of_shard(url: str, place: str) -> bool:
    """Whether this is a URL that a broker gives an object of the shard with this place (`directory.shard_place`), in whatever store."""
    base, _, name = url.rpartition("/")
    return base.endswith("/" + place) and bool(_OBJECT.fullmatch(name))


def object_url(base: str, name: str) -> str:
    """The object `name` below a URL."""
    return f"{base.rstrip('/')}/{name}"
