"""The offloader: copies closed segments to a store, lets local files go, deletes what retention let go. Blocking.

The steps of one segment, each safe against a crash, in a thread of the broker's offload pool:

1. the object's name is written down as begun;
2. every entry of the local file is verified, then its bytes are uploaded as they are, sealed;
3. the object is read back: length and SHA-256 must be those that were uploaded;
4. its manifest is uploaded and read back;
5. the segment is written down as offloaded. From here on, and not before, its local file may go.

A crash before 5 repeats from 1. An object is named by its segment and by the epoch that the log is in: a log that was begun anew, or whose folder
was put back to a backup, is in an epoch of its own, and writes over nothing that another history has in the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import msgspec

from felix.bounded import BoundedMap
from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.lazy_event import LazyThreadEvent
from felix.rate import TokenBucket
from felix.runtime.port import Clock
from felix.storage.disk import DiskFiles
from felix.storage.port import Files
from felix.storage.small_file import TEMPORARY_SUFFIX, save_checked
from region.log import fsspec_store as store
from region.log.compactor import WorkEndedError
from region.log.disk import DiskLog
from region.log.epochs import EpochHistory, EpochStart
from region.log.offload import (
    MANIFEST_SUFFIX,
    OFFLOADED_NAME,
    Manifest,
    Offloaded,
    OffloadState,
    TagOf,
    base_offset_of,
    decode_manifest,
    encode_manifest,
    encode_offload,
    is_object_of,
    object_name,
    object_url,
)
from region.log.recovery import EPOCHS_NAME, encode_epochs
from region.log.segment import SEGMENT_SUFFIX, EntryDamagedError, ShardIdentity, decode_segment_header
from region.log.segment_scan import damaged, scan_file
from region.log.segment_state import SegmentState

RATE_BYTES: Final = 64 << 20
"""Moved per second unless the region says otherwise: uploads leave the network and the disk to the brokers' clients."""
HEADER_BYTES_MAX: Final = 64 << 10
"""Read for a segment's header: its names are shorter by far."""
FETCHED_BYTES_MAX: Final = 1 << 30
"""Of fetched segments on the local disk, per broker, unless the region says otherwise."""


@dataclass(slots=True)
class OffloadReport:
    """What one turn did, also one that failed in the middle."""

    uploaded: int = 0
    uploaded_bytes: int = 0
    dropped: int = 0
    deleted: int = 0


class Throttle:
    """Holds work to a rate, and ends it when asked to. One per piece of work."""

    def __init__(self, rate_bytes: int, end: LazyThreadEvent, clock: Clock) -> None:
        self._end = end
        self._clock_s = clock.monotonic
        self._rate = TokenBucket(rate_bytes, 0.0, self._clock_s())

    def __call__(self, moved: int) -> None:
        self._rate.charge(moved, now := self._clock_s())
        ahead_s = self._rate.wait_s(now)
        if self._end.wait(max(0.0, ahead_s)) if ahead_s > 0.001 else self._end.is_set():
            raise WorkEndedError


class FetchedCache:
    """Which fetched segments lie on the local disk; the least recently used go beyond `bytes_max`. For any thread.

    A file may go while it is being read: the reader asks for it again.
    """

    def __init__(self, bytes_max: int = FETCHED_BYTES_MAX, files: Files | None = None) -> None:
        self._files = files or DiskFiles()
        self._sizes: BoundedMap[Path, int] = BoundedMap(bytes_max, weigh=int, gone=self._remove)
        self._lock = Lock()

    @property
    def bytes_max(self) -> int:
        return self._sizes.most

    @property
    def held_bytes(self) -> int:
        """Of all files that lie there."""
        return self._sizes.weight

    def touch(self, path: Path) -> bool:
        """True where the file is there; it is then the most recently used."""
        with self._lock:
            return self._sizes.use(path) is not None

    def admit(self, path: Path, size: int) -> None:
        """Count a file that was fetched, and let others go; the newest always stays."""
        with self._lock:
            self._sizes.put(path, size)

    def drop(self, path: Path) -> None:
        """A file is no longer wanted."""
        with self._lock:
            self._remove(path, self._sizes.pop(path))

    def forget(self, folder: Path) -> None:
        """The files below a folder are no longer wanted."""
        with self._lock:
            for path in [path for path in self._sizes if folder in path.parents]:
                self._remove(path, self._sizes.pop(path))

    def _remove(self, path: Path, _: int | None) -> None:
        with suppress(OSError):
            self._files.remove(path)


class Offloader:
    """One turn over one shard. `base` is the shard's place in the store; `writer` is held for changes of the folder."""

    def __init__(
        self,
        disk: DiskLog,
        files: Files,
        base: str,
        local_bytes: int,
        *,
        writer: AbstractContextManager[object],
        pace: store.Pace,
        tag: TagOf,
    ) -> None:
        self._disk = disk
        self._files = files
        self._base = base
        self._local_bytes = local_bytes
        self._writer = writer
        self._pace = pace
        self._tag = tag
        self.report = OffloadReport()

    def run(self, below: int, epochs: Sequence[EpochStart], *, upload: bool) -> OffloadReport:
        """Delete what is pending deletion; upload what is closed and wholly below `below`, if asked; let local files go. A store that deletes
        nothing holds up no upload: it is told of at the end.

        Raises UnavailableError for the store, CorruptionError for a damaged local file, OSError; `report` has what was done until then.
        """
        disk, report = self._disk, self.report
        failure = self._delete_doomed(tuple(epochs), upload=upload)
        for segment in disk.segments[:-1] if upload else ():
            if segment.next_offset > below:
                break
            if segment.remote is None and segment.header.span is None:
                self._upload(segment, tuple(epochs))
                report.uploaded += 1
                report.uploaded_bytes += segment.segment_bytes
        report.dropped = drop_local(disk, self._writer, self._local_bytes) if upload else 0
        if failure is not None:
            raise failure
        return report

    def give_up(self) -> None:
        """The stream is not offloaded any more: an upload that was broken off is not gone on with, and its object is to be deleted. Raises OSError."""
        if self._disk.offload.begun:
            self._save(lambda state: _begin(state, ""))

    def _save(self, change: Callable[[OffloadState], OffloadState]) -> None:
        with self._writer:
            self._disk.save_offload(change(self._disk.offload))

    def _upload(self, segment: SegmentState, epochs: tuple[EpochStart, ...]) -> None:
        epoch = epochs[-1].epoch if epochs else 0
        url = object_url(self._base, object_name(segment.base_offset, epoch))
        self._save(lambda state: _begin(state, url))  # 1
        entry = upload(self._files, segment, url, epochs, self._pace, self._tag)  # 2 to 4
        with self._writer:  # 5
            self._disk.add_offloaded(segment, entry)

    def _delete_twins(self, base: str, epochs: tuple[EpochStart, ...]) -> None:
        """Of what retention let go of, objects that this history uploaded before its folder was put back: nothing else names them."""
        start = self._disk.start_offset
        for name in store.list_names(base):
            begin = base_offset_of(name.removesuffix(MANIFEST_SUFFIX))
            if not name.endswith(SEGMENT_SUFFIX + MANIFEST_SUFFIX) or begin is None or begin >= start:
                continue
            with suppress(CorruptionError):
                url = object_url(base, name)
                try:
                    found = store.get_bytes(url)
                except UnavailableError:
                    # A store may list for a while what was deleted just now.
                    if store.is_there(url):
                        raise
                    continue
                one = decode_manifest(found, url)
                ours = msgspec.structs.replace(one, epochs=epochs)
                if one.segment.next_offset <= start and epochs and _shares_history(one, ours):
                    delete_object(url.removesuffix(MANIFEST_SUFFIX))

    def _delete_doomed(self, epochs: tuple[EpochStart, ...], *, upload: bool) -> UnavailableError | None:
        """Delete what is pending deletion, as far as its stores do; what the first of them said that did not. Of a store that did not, no more is
        asked in this turn. An earlier object of a segment that is to be uploaded stays until that is done: it may be the only copy elsewhere."""
        failed: dict[str, UnavailableError] = {}
        deleted: set[str] = set()
        waiting = {
            one.base_offset
            for one in self._disk.segments
            if upload and one.remote is None and one.header.span is None
        }
        # The oldest first, as their names are in order: what is left whenever this ends has no hole.
        for url in sorted(self._disk.offload.pending_deletion):
            base, _, name = url.rpartition("/")
            if base in failed or base_offset_of(name) in waiting:
                continue
            try:
                delete_object(url)
            except UnavailableError as error:
                failed[base] = error
            else:
                deleted.add(url)
        try:
            for base in {url.rpartition("/")[0] for url in deleted}:
                self._delete_twins(base, epochs)
        except UnavailableError as error:
            failed.setdefault("", error)
        if deleted:
            self._save(
                lambda state: msgspec.structs.replace(
                    state, pending_deletion=tuple(url for url in state.pending_deletion if url not in deleted)
                )
            )
        self.report.deleted = len(deleted)
        return next(iter(failed.values()), None)


def upload(
    files: Files,
    segment: SegmentState,
    url: str,
    epochs: tuple[EpochStart, ...],
    pace: store.Pace,
    tag: TagOf,
) -> Offloaded:
    """Copy a closed segment to the object `url`, with its manifest: both are read back and are what was written. `tag`: for the manifest.

    Raises UnavailableError for the store, CorruptionError for a damaged local file, OSError, and as `tag`.
    """
    _verify(files, segment, pace)
    sent = store.put_file(files, segment.path, url, pace)
    if sent.size != segment.segment_bytes:
        raise damaged(segment.path, sent.size, segment.base_offset, "the file has another length than it had")
    if store.digest_of(url, pace) != sent:
        raise differs(url)
    header = segment.header.encode()
    entry = Offloaded(
        url, header, segment.next_offset, segment.segment_bytes, segment.last_time_ms, sent.sha256
    )
    manifest = encode_manifest(Manifest(entry, epochs).with_tag(tag))
    store.put_bytes(manifest, entry.manifest_url)
    if store.get_bytes(entry.manifest_url) != manifest:
        raise differs(entry.manifest_url)
    return entry


def _verify(files: Files, segment: SegmentState, pace: store.Pace) -> None:
    position = segment.start
    descriptor = files.open(segment.path, os.O_RDONLY)
    try:
        for entry in scan_file(
            files, descriptor, segment.header, segment.start, segment.segment_bytes, verify_bodies=True
        ):
            position = entry.end
            pace(0)
    except EntryDamagedError as error:
        raise damaged(segment.path, position, segment.base_offset, str(error)) from error
    finally:
        files.close(descriptor)


def _begin(state: OffloadState, url: str) -> OffloadState:
    """An upload begins, or none where `url` is empty. What was begun before and is not gone on with is there for nothing: its segment is gone, or has
    another object. What is begun once more is not to be deleted."""
    left = [one for one in (*state.pending_deletion, state.begun) if one not in ("", url)]
    return msgspec.structs.replace(state, begun=url, pending_deletion=tuple(dict.fromkeys(left)))


def drop_local(disk: DiskLog, writer: AbstractContextManager[object], local_bytes: int) -> int:
    """Let local files of offloaded segments go beyond `local_bytes`; how many. Raises OSError."""
    dropped = 0
    while (oldest := disk.droppable(local_bytes)) is not None:
        with writer:
            disk.drop_local(oldest)
        dropped += 1
    return dropped


def delete_object(url: str) -> None:
    """An object and its manifest; the manifest first, so that no object is told of that is not there."""
    store.delete(url + MANIFEST_SUFFIX)
    store.delete(url)


def fetch(files: Files, entry: Offloaded, target: Path, cache: FetchedCache, pace: store.Pace) -> None:
    """Bring a segment back for reading, whole and compared. Raises UnavailableError, CorruptionError, OSError."""
    aside = target.with_name(target.name + TEMPORARY_SUFFIX)
    try:
        found = store.get_file(files, entry.url, aside, pace)
        _compare(entry, found)
        files.rename(aside, target)
    finally:
        with suppress(OSError):
            files.remove(aside)
    cache.admit(target, entry.segment_bytes)


def _compare(entry: Offloaded, found: store.Digest) -> None:
    if found != store.Digest(entry.segment_bytes, entry.sha256):
        raise CorruptionError(
            f"{entry.url} has {found.size} bytes with SHA-256 {found.sha256}; {entry.segment_bytes} bytes with "
            f"{entry.sha256} were uploaded.",
            hint="The store's copy was changed. Restore the object; local data is not concerned.",
        )


def check_object(entry: Offloaded) -> None:
    """Read an offloaded segment and compare it. Raises CorruptionError, UnavailableError."""
    _compare(entry, store.digest_of(entry.url))


class Gap(NamedTuple):
    """Offsets that no object has, from `first` to before `next`, with objects before and behind them."""

    first: int
    next: int


class History(NamedTuple):
    """What a store has of a log of which no more was offloaded than this: its newest epoch, and the offset behind its newest segment."""

    epoch: int
    end: int


@dataclass(frozen=True, slots=True)
class RestoredShard:
    """What a shard has again: its offsets from `start` to before `end`, the last of which was appended at `last_time_ms`. `untagged`: so many of
    its manifests nobody vouches for. `others`: what else the store has of the log, newest first, as where it was begun anew in the place of one that was lost. `gaps`: what is missing below `start`, where
    that was accepted: what the store has before them is left out."""

    segments: int
    start: int
    end: int
    last_time_ms: int
    untagged: int
    history: History
    others: tuple[History, ...]
    gaps: tuple[Gap, ...]


def is_lost(folder: Path, files: Files) -> bool:
    """Whether a shard's folder has no segment: it is not there, or a restoration of it was broken off."""
    return not files.is_folder(folder) or not any(
        name.endswith(SEGMENT_SUFFIX) for name in files.names(folder)
    )


class Restoration:
    """A lost shard's folder is made anew from the manifests below `base`, so that the broker can serve it.

    The newest offloaded segment is brought back as the one to be written to, the others stay where they are. What was
    appended after it is gone, and its offsets will be given to other records, under a new leader epoch.

    A manifest counts where it carries a tag of who has the stream's key (`tag`): whoever keeps the store can leave the newest ones out, and change
    none. `unverified`: also where it carries no tag at all, as those of before. `epoch`: which of several histories, where there are some, by its newest epoch; None: the
    newest. `accept_gap`: where offsets are missing, the log begins behind the last of them. Nothing is written before `begin`. From then on the folder is of a shard that no broker serves, until `finish` is done; broken off, it
    is done again from the start.

    Raises RequestError: CONFLICT where the folder has segments, NOT_FOUND where the store has none, INVALID where manifests have no tag;
    CorruptionError, UnavailableError, and as `tag`.
    """

    def __init__(
        self,
        base: str,
        folder: Path,
        identity: ShardIdentity,
        files: Files,
        tag: TagOf,
        *,
        unverified: bool = False,
        epoch: int | None = None,
        accept_gap: bool = False,
    ) -> None:
        if not is_lost(folder, files):
            raise RequestError(
                f"{folder} has segments: it is not lost.",
                code=Code.CONFLICT,
                hint="Move it away first, if it is to be made anew.",
            )
        self._folder = folder
        self._files = files
        histories = _histories(_manifests_at(base, identity, tag, unverified=unverified))
        known = [_history_of(one) for one in histories]
        epochs = [one.epoch for one in known]
        if len(known) == 1:
            epoch = None
        elif epoch is not None and epoch not in epochs:
            raise RequestError(
                f"There is no history of epoch {epoch} at {base}.",
                code=Code.NOT_FOUND,
                hint=f"There are those of {', '.join(map(str, epochs))}.",
            )
        at = 0 if epoch is None else epochs.index(epoch)
        self._manifests = _chain(histories[at])
        self._gaps = _gaps_below(self._manifests[0].segment.base_offset, histories[at])
        if self._gaps and not accept_gap:
            raise _gap_left(self._gaps, base)
        self._history = known.pop(at)
        self._others = tuple(known)
        self._newest_epoch = max(epochs)

    def begin(self) -> None:
        """From here on the shard counts as one that is in the store and not here. Raises OSError."""
        files, folder, newest = self._files, self._folder, self._manifests[-1]
        files.make_folder(folder)
        # First of all: recovery does not let a log begin anew beside it.
        url = newest.segment.url
        state = OffloadState(
            tuple(one.segment for one in self._manifests[:-1]), begun=url, places=(url.rpartition("/")[0],)
        )
        save_checked(files, folder / OFFLOADED_NAME, encode_offload(state))
        history = EpochHistory(list(newest.epochs))
        history.begin(self._newest_epoch + 1, newest.segment.next_offset)
        save_checked(files, folder / EPOCHS_NAME, encode_epochs(history))
        files.sync_folder(folder.parent)

    def finish(self) -> RestoredShard:
        """Bring the newest segment. Raises CorruptionError where it is not what its manifest says, UnavailableError, OSError."""
        files, folder, newest = self._files, self._folder, self._manifests[-1].segment
        # The segment last: without it the folder still counts as lost.
        target = folder / f"{newest.base_offset:020d}{SEGMENT_SUFFIX}"
        aside = target.with_name(target.name + TEMPORARY_SUFFIX)
        _compare(newest, store.get_file(files, newest.url, aside))
        _check_end(files, aside, newest)
        descriptor = files.open(aside, os.O_RDWR)
        try:
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        files.rename(aside, target)
        files.sync_folder(folder)
        files.sync_folder(folder.parent)
        return RestoredShard(
            len(self._manifests),
            self._manifests[0].segment.base_offset,
            newest.next_offset,
            newest.last_time_ms,
            sum(not one.tag for one in self._manifests),
            self._history,
            self._others,
            self._gaps,
        )


def _manifests_at(base: str, identity: ShardIdentity, tag: TagOf, *, unverified: bool) -> list[Manifest]:
    manifests = []
    for name in store.list_names(base):
        if name.endswith(SEGMENT_SUFFIX + MANIFEST_SUFFIX):
            url = object_url(base, name)
            manifest = decode_manifest(store.get_bytes(url), url)
            one, header = manifest.segment, manifest.segment.segment_header
            # What is read, and deleted later, is the object beside which it stands: whoever keeps the store chooses no other.
            if (
                (header.identity, one.manifest_url) != (identity, url)
                or not is_object_of(name, header.base_offset)
                or one.next_offset <= header.base_offset
            ):
                raise CorruptionError(f"{url} is about {header.identity} at {one.url[:200]}.")
            if manifest.tag and not manifest.has_tag_of(tag):
                raise CorruptionError(
                    f"The manifest {url} was not written by a broker that has the stream's key.",
                    hint="Somebody changed the store, or the region's keys are not those that the stream was written with. Nothing was restored.",
                )
            manifests.append(manifest)
    if not manifests:
        raise RequestError(f"There is no offloaded segment at {base}.", code=Code.NOT_FOUND)
    if (untagged := sum(not one.tag for one in manifests)) and not unverified:
        raise RequestError(
            f"{untagged} of {len(manifests)} manifests at {base} carry no tag: nobody can tell whether the store's administrator changed them.",
            code=Code.INVALID,
            hint="Versions before tags wrote such. Restore with --unverified if you trust the store, and compare the end that is told.",
        )
    return manifests


def _check_end(files: Files, path: Path, entry: Offloaded) -> None:
    """That a segment ends at the offset that its manifest states. Raises CorruptionError."""
    descriptor = files.open(path, os.O_RDONLY)
    try:
        header, start = decode_segment_header(files.pread(descriptor, HEADER_BYTES_MAX, 0))
        end = header.base_offset
        for each in scan_file(files, descriptor, header, start, entry.segment_bytes, verify_bodies=True):
            end = each.next_offset
    except EntryDamagedError as error:
        raise CorruptionError(f"{entry.url} is damaged: {error}.") from error
    finally:
        files.close(descriptor)
    if (header.identity, header.base_offset, end) != (
        entry.segment_header.identity,
        entry.base_offset,
        entry.next_offset,
    ):
        raise CorruptionError(
            f"{entry.url} has offsets {header.base_offset} to {end - 1}; its manifest states {entry.base_offset} to {entry.next_offset - 1}.",
            hint="Somebody changed the store. The shard still counts as lost: restore the objects first.",
        )


def _chain(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Those of one history that follow each other up to the newest, oldest first, from as far back as there are: a segment may have been uploaded twice,
    and copies may have ended theirs at other offsets."""
    best: dict[int, tuple[int, Manifest]] = {}
    before: dict[str, Manifest] = {}
    # None ends before it begins, so what one goes on from comes earlier.
    for one in sorted(manifests, key=lambda one: (one.segment.base_offset, one.segment.url)):
        begin, end = one.segment.base_offset, one.segment.next_offset
        start = begin
        if begin in best:
            start, before[one.segment.url] = best[begin]
        if end not in best or start <= best[end][0]:
            best[end] = (start, one)
    chain = [best[max(best)][1]]
    while (earlier := before.get(chain[-1].segment.url)) is not None:
        chain.append(earlier)
    return chain[::-1]


def _gaps_below(start: int, manifests: Sequence[Manifest]) -> tuple[Gap, ...]:
    """Which offsets are missing before a chain that begins at `start`, from the oldest object on."""
    gaps: list[Gap] = []
    reached: int | None = None
    for one in sorted((one.segment for one in manifests), key=lambda one: one.base_offset):
        if one.base_offset >= start:
            break
        if reached is not None and one.base_offset > reached:
            gaps.append(Gap(reached, one.base_offset))
        reached = max(reached or 0, one.next_offset)
    if reached is not None and reached < start:
        gaps.append(Gap(reached, start))
    return tuple(gaps)


def _gap_left(gaps: Sequence[Gap], base: str) -> CorruptionError:
    missing = ", ".join(f"{one.first} to {one.next - 1}" for one in gaps[-5:])
    return CorruptionError(
        f"Offsets {missing} are missing at {base}.",
        hint=f"Nothing was restored. Put the missing objects back if a copy of the store has them. If retention had let go of all below {gaps[-1].next}, or it can be done without: "
        f"--accept-gap begins the log at offset {gaps[-1].next}. What stands before stays in the store until retention or the stream's deletion takes it: copy it away first if it is needed.",
    )


def _newest_epoch(manifest: Manifest) -> int:
    return manifest.epochs[-1].epoch if manifest.epochs else 0


def _history_of(manifests: Sequence[Manifest]) -> History:
    return History(max(map(_newest_epoch, manifests)), max(one.segment.next_offset for one in manifests))


def _histories(manifests: Sequence[Manifest]) -> list[list[Manifest]]:
    """The manifests by the histories that they are of, the newest first: one may be of several. Where a log was put back to a backup, begun anew, or an
    unclean election gave its end up, segments of before are left in the store, behind where the two part. No epoch is given twice: the newest one
    that anybody wrote down tells."""
    histories: list[list[Manifest]] = []
    left = list(manifests)
    while left:
        last = max(left, key=_newest_epoch)
        histories.append([one for one in manifests if _shares_history(one, last)])
        left = [one for one in left if one is not last and not _shares_history(one, last)]
    return histories


def _shares_history(one: Manifest, last: Manifest) -> bool:
    """Whether the epochs that began in `one`'s segment and before it are those of `last`. A long history forgets its oldest ones, and a manifest may
    have none: what it does not say speaks against nobody."""
    if not one.epochs or not last.epochs:
        return True
    first = max(one.epochs[0].epoch, last.epochs[0].epoch)
    end = one.segment.next_offset
    known, lasting = (
        [start for start in each.epochs if start.epoch >= first and start.start_offset < end]
        for each in (one, last)
    )
    return known == lasting


def differs(url: str) -> UnavailableError:
    """For an object that is not what was written there."""
    return UnavailableError(
        f"What was read back from {url} is not what was written.",
        hint="The store changes what it keeps; nothing local was deleted.",
        retry_after_ms=1_000,
    )
