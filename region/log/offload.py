"""Offload: what is known of segments that were copied to a store elsewhere. Pure; region.log.offloader does the work.

A closed segment is uploaded as it stands on disk, sealed; beside it goes a manifest that says what it is. The shard's
file `offloaded` says which segments are in the store, verified. Only of those may the local file go. What the log still
is does not depend on where its bytes are: an offloaded segment keeps its place among the others.

Invariants:
- an entry is in `segments` only after its bytes were read back from the store and compared;
- `begun` names an object before its upload begins, `pending_deletion` names objects before their segment is forgotten: nothing that
  was written to a store is ever without a name here, until it has been deleted there.
"""

from __future__ import annotations

from typing import Final

import msgspec

from felix.errors import CorruptionError
from region.log.epochs import EpochStart
from region.log.segment import SegmentHeader, decode_segment_header

OFFLOADED_NAME: Final = "offloaded"
FETCHED_SUFFIX: Final = ".fetched"
"""Of a local copy for reading; it may go at any time."""
MANIFEST_SUFFIX: Final = ".json"


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
    def manifest_url(self) -> str:
        return self.url + MANIFEST_SUFFIX


class OffloadState(msgspec.Struct, frozen=True, array_like=True):
    """The payload of the file `offloaded`. `begun`: the object of an upload under way, empty without one; `pending_deletion`: objects
    that are to be deleted."""

    segments: tuple[Offloaded, ...] = ()
    begun: str = ""
    pending_deletion: tuple[str, ...] = ()

    @property
    def urls(self) -> list[str]:
        """Every object that may exist, manifests left out."""
        return [*self.pending_deletion, *(one.url for one in self.segments), *filter(None, [self.begun])]


class Manifest(msgspec.Struct, frozen=True):
    """What stands beside an object: all that a lost local folder takes to be made anew."""

    segment: Offloaded
    epochs: tuple[EpochStart, ...]
    version: int = 1


def encode_offload(state: OffloadState) -> bytes:
    """The payload of the file."""
    return msgspec.msgpack.encode(state)


# Made here: shards and logs are opened on several threads, and msgspec learns a type at its first use, not safely on two.
_offload: Final = msgspec.msgpack.Decoder(OffloadState)
_manifest: Final = msgspec.json.Decoder(Manifest)


def decode_offload(payload: bytes) -> OffloadState:
    """Raises CorruptionError."""
    try:
        state = _offload.decode(payload)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"The list of offloaded segments does not decode: {error}.") from error
    for one in state.segments:
        decode_segment_header(one.header)
    return state


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes, url: str) -> Manifest:
    """Raises CorruptionError that names the object."""
    try:
        manifest = _manifest.decode(data)
        if manifest.version != 1:
            raise CorruptionError(f"it has version {manifest.version}, and 1 is known")
        decode_segment_header(manifest.segment.header)
    except (msgspec.MsgspecError, CorruptionError) as error:
        raise CorruptionError(f"The manifest {url} does not decode: {error}.") from error
    return manifest


def object_url(base: str, name: str) -> str:
    """The object `name` below a URL."""
    return f"{base.rstrip('/')}/{name}"
