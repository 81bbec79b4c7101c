"""Which signed documents have their leaf in this region's audit log, and how they get it. Once each, over restarts too.

Invariants: what is `in` the log has a durable leaf, and its file beside the log where it is too long for one; a document gets
one leaf, whoever delivers it and however often: the log itself says which ones it has, and the snapshot beside the region's
other copies is a cache that is used only if the log's tiles match it. Where they do not, the log was put back to a backup without the broker's other files: that is said
(`put_back`), over restarts, until the log is the one that the snapshot was made of. Documents that forbid (a revocation, a pause, a deny
entry), documents that lift these, and policies can be read from the log again: if store and copies were restored from a backup,
only the log still has them.

A leaf has the time of before it was appended. Where the append takes long, or nobody knows what became of it, it may stand, with that time, behind
which nothing may cross any more that it stops: `writing_ms` and `may_stand` say so.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from audit.checkpoint import Checkpoint, note_size
from audit.document_disk import read_documents
from audit.keys_in_log import KeysInLog, keys_of_log
from audit.leaf import Header, Kind, Leaf, read_header
from audit.note import parse_note
from audit.pin_leaf import is_pinned
from audit.tile import TileHashes, read_entries
from audit.trail import Trail
from audit.trust import Trust
from felix.errors import UnavailableError
from felix.news import News
from felix.runtime.port import Clock
from felix.runtime.real import REAL
from felix.storage.small_file import read_file, replace_durably
from keys.bundle import RegionBundle
from region.trust.changed_log_key import says_changed
from region.trust.signing_key_leaves import LoggedKey, LoggedKeys, Role, take

log = logging.getLogger("felix.region.governance")

KNOWN_MS_MAX: Final = 3_000
"""How old what a broker knows of a document without a leaf may be, and records still cross. With what its clock may be ahead of that of the broker with the
log, it stays below what verification allows (region.evidence.remote_audit)."""
SNAPSHOT_LEAVES: Final = 8_192
"""A start reads at most about so many leaves, and those of the minute before."""
RECENT_LEAVES: Final = 4_096
"""How far back a broker that goes on with the log looks for what may be asked again, because its answer was lost."""


LASTING: Final = frozenset((Kind.REVOKE, Kind.STANDING, Kind.DENY_ENTRY, Kind.POLICY))
"""Kinds of documents that must not be forgotten (region.trust.trust_store)."""


class _Logged(NamedTuple):
    """The documents of a log's leaves, by the SHA-256 of their files, and the leaves of those that last, of pins and of exports; the region's keys by their last leaves; and the ids in the leaves
    that say that the log's own keys were changed."""

    documents: set[bytes]
    lasting: dict[bytes, int]
    pins: dict[bytes, int]
    signing_keys: dict[Role, LoggedKey]
    exports: dict[bytes, int]
    log_keys: set[bytes]

    @classmethod
    def nothing(cls) -> _Logged:
        return cls(set(), {}, {}, {}, {}, set())


class _Snapshot(msgspec.Struct):
    size: int
    last_leaf_hash: bytes
    documents: list[bytes]
    lasting: dict[bytes, int] | None = None
    """none in a snapshot of version 0.1, which is not taken"""
    pins: dict[bytes, int] | None = None
    """none in a snapshot of a release that wrote no leaves of pins; it is not taken either"""
    signing_keys: dict[Role, LoggedKey] | None = None
    """none in a snapshot of a release that looked for no changes of keys; nor is that"""
    exports: dict[bytes, int] | None = None
    """none in a snapshot of a release that did not ask where exports have their leaves; nor is that"""
    log_keys: list[bytes] | None = None
    """none in a snapshot of a release that changed no keys of a log that has copies; nor is that"""
    was_size: int = 0
    was_last_leaf_hash: bytes = b""
    """of a log that was here before this one, and was longer or another one; 0 where there was none"""


class _Was(NamedTuple):
    size: int
    last_leaf_hash: bytes


# Made here: shards and logs are opened on several threads, and msgspec learns a type at its first use, not safely on two.
_snapshot: Final = msgspec.msgpack.Decoder(_Snapshot)


class DocumentLog:
    """One per broker, also where the log is another one's: then it knows what `learn` was told. `open` and `save` block."""

    def __init__(
        self,
        trail: Trail,
        path: Path,
        logged: _Logged,
        saved_to: int,
        read_to: int,
        clock: Clock,
        was: _Was | None = None,
    ) -> None:
        """`was`: the log that was here before, which this one does not continue."""
        self._was = was
        self._trail, self._path, self._clock = trail, path, clock
        self._documents, self._lasting, self._pins, self._signing_keys, self._exports, self._log_keys = logged
        self._saved_to, self._read_to = saved_to, read_to
        self._keys_read = dict(self._signing_keys)
        """as the leaves below `_read_to` have them"""
        self._key_leaves: list[tuple[int, Header]] = []
        """those appended here from `_read_to` on, with their indexes"""
        self._refreshing, self._keys_change = threading.Lock(), threading.Lock()
        self._writing: dict[bytes, int] = {}
        """documents whose leaf may stand: since when it was first appended (`Clock.boot_ms`), oldest first"""
        self._appending = asyncio.Lock()
        self._closed = False
        self.news = News()
        """told of each document that has its leaf"""

    @classmethod
    def open(cls, trail: Trail, path: Path, clock: Clock = REAL.clock) -> DocumentLog:
        """Read the log from where the snapshot at `path` ends."""
        trail.publish()
        size = trail.readable_size
        logged, start = _read_snapshot(trail, path, size)
        _read(trail, logged, start, size)
        found = cls(trail, path, logged, start, size, clock, _was(trail, path, size))
        if found.put_back:
            log.error("%s", found.put_back)
        return found

    @property
    def put_back(self) -> str:
        """A sentence where the log is not the one that this broker had, or is shorter; else empty. Of a log that has copies nothing is said: what one lacks comes from the others."""
        if self._was is None:
            return ""
        return (
            f"The audit log {self._trail.key.name} was put back to an older copy: this broker had one of {self._was.size:,} leaves, which this one does not continue. "
            "What stood behind the copy, as refusals, is in no log any more. Put the newest copy in its place (felix audit restore); where there is none, docs/operations.md says how to go on."
        )

    def refresh(self) -> int:
        """Take in what other brokers have written, up to the newest checkpoint; how many documents that were. Blocks. Where reading fails, nothing was
        taken in; it may be called on several threads."""
        with self._refreshing:
            size = self._trail.readable_size
            if size <= self._read_to:
                return 0
            # Each leaf of a key once, in order: one that was taken twice would give up the key that came after it.
            found = _Logged.nothing()._replace(signing_keys=dict(self._keys_read))
            _read(self._trail, found, self._read_to, size)
            new = len(found.documents - self._documents)
            for digest, index in found.lasting.items():
                self._lasting.setdefault(digest, index)
            self._pins |= found.pins
            for digest, index in found.exports.items():
                self._exports.setdefault(digest, index)
            self._documents |= found.documents
            self._log_keys |= found.log_keys
            with self._keys_change:
                self._read_to = size
                self._keys_read = dict(found.signing_keys)
                self._key_leaves = [each for each in self._key_leaves if each[0] >= size]
                for _, header in self._key_leaves:
                    take(found.signing_keys, header.action, header.key_id, header.time_ms)
                self._signing_keys = found.signing_keys
            return new

    def recent_keys(self) -> list[Header]:
        """The KEY leaves among the newest RECENT_LEAVES. Blocks."""
        size = self._trail.readable_size
        headers = (
            read_header(data)
            for _, data in read_entries(self._trail.files, max(0, size - RECENT_LEAVES), size, size)
        )
        return [header for header in headers if header is not None and header.kind is Kind.KEY]

    def forgotten(self, known: Iterable[bytes]) -> list[bytes]:
        """The documents of this log that last and are not among `known`, oldest first. Blocks."""
        digests = {sha256(document).digest() for document in known}
        return self._read_documents(
            {index for digest, index in self._lasting.items() if digest not in digests}
        )

    def lasting(self) -> Iterator[tuple[int, bytes]]:
        """The documents of this log that last, each with the index of its leaf, in its order. Blocks."""
        size = note_size(self._trail.publish())
        return read_documents(self._trail.files, set(self._lasting.values()), size)

    def exports(self) -> Iterator[tuple[int, bytes]]:
        """The exports of this log, each with the index of its leaf, in its order. Blocks."""
        size = note_size(self._trail.publish())
        return read_documents(self._trail.files, set(self._exports.values()), size)

    def keys_of(self, own: RegionBundle) -> KeysInLog:
        """Under which of the region's policy keys what stands in this log counts, leaf by leaf. Blocks."""
        checkpoint = Checkpoint.parse(parse_note(self._trail.publish()).text)
        return keys_of_log(Trust.of([own]), checkpoint, self._trail.files, {}, 0)

    def pins(self) -> list[bytes]:
        """This region's pins of others, oldest first, as far as this broker has the log. Blocks."""
        return self._read_documents(set(self._pins.values()))

    @property
    def signing_keys(self) -> LoggedKeys:
        """The region's policy and receipt keys since they were last changed, as far as this broker has the log."""
        return self._signing_keys

    def has_log_key(self, key_id: bytes) -> bool:
        """Whether a leaf says that this key signs the log, as far as this broker has it."""
        return key_id in self._log_keys

    async def append_key(self, leaf: Leaf) -> None:
        """Append the leaf of a changed key; durable on return. Raises as the log does."""
        index, header = await self._trail.append([leaf]), leaf.header
        if says_changed(header):
            self._log_keys.add(header.key_id)
        with self._keys_change:
            if index >= self._read_to:
                self._key_leaves.append((index, header))
                take(self._signing_keys, header.action, header.key_id, header.time_ms)

    def _read_documents(self, indexes: set[int]) -> list[bytes]:
        size = note_size(self._trail.publish())
        return [document for _, document in read_documents(self._trail.files, indexes, size)]

    def __contains__(self, digest: bytes) -> bool:
        """By the SHA-256 of the document's file."""
        return digest in self._documents

    def leaf_of(self, digest: bytes) -> int | None:
        """The index of the leaf of a document that lasts; None where it has none, or it is not known which."""
        return self._lasting.get(digest)

    def learn(self, digest: bytes, leaf: int | None = None) -> None:
        """A document has its durable leaf: here, or as the broker that has the log says. `leaf`: its index, of a document that lasts."""
        self._documents.add(digest)
        if leaf is not None:
            self._lasting.setdefault(digest, leaf)
        self._writing.pop(digest, None)
        self.news.tell()

    def lacks(self, digest: bytes) -> None:
        """The broker that has the log says that a document has no leaf, whatever was appended here."""
        self._writing.pop(digest, None)

    def may_stand(self, digest: bytes) -> bool:
        """Whether a document's leaf was appended here, and it is not known yet whether it stands."""
        return digest in self._writing

    def writing_ms(self) -> int:
        """For how long the oldest of such leaves was waited for; 0 where there is none."""
        oldest = next(iter(self._writing.values()), None)
        return 0 if oldest is None else self._clock.boot_ms() - oldest

    async def append(self, document: bytes, leaf: Callable[[], Leaf]) -> bool:
        """Append a document's leaf, made when its turn comes; durable on return. False where it stands in the log already."""
        if sha256(document).digest() in self._documents:
            return False
        failure = None if self._trail.copied else self._trail.failure
        if failure is not None:
            # Behind what waits for room on a full disk nobody waits, who can be told at once.
            raise failure.with_traceback(None)
        # The caller may be cancelled: an accepted leaf becomes durable all the same, and is recorded here.
        return await asyncio.shield(asyncio.ensure_future(self._append(document, leaf)))

    async def _append(self, document: bytes, leaf: Callable[[], Leaf]) -> bool:
        digest = sha256(document).digest()
        async with self._appending:
            if self._closed or digest in self._documents:
                return False
            await asyncio.to_thread(self._trail.keep_document, document)
            self._writing.setdefault(digest, self._clock.boot_ms())
            try:
                made = leaf()
                index = await self._trail.append([made])
            except UnavailableError:
                # It may stand all the same.
                raise
            except Exception:
                self.lacks(digest)
                raise
            self.learn(digest, index if made.header.kind in LASTING else None)
            if made.header.kind is Kind.GRANT:
                self._exports.setdefault(digest, index)
            return True

    async def close(self) -> None:
        """Finish the pending appends; accept no more."""
        async with self._appending:
            self._closed = True
        try:
            await asyncio.to_thread(self.save, at_once=True)
        except OSError as error:
            log.warning(
                "the next start reads more of the audit log: its snapshot could not be written (%s)", error
            )

    def save(self, *, at_once: bool = False) -> None:
        """Bring the snapshot up to the newest checkpoint, where it is far behind. Raises OSError, CorruptionError."""
        size = self._trail.readable_size
        if size > self._saved_to and (at_once or size - self._saved_to >= SNAPSHOT_LEAVES):
            # Read from the files again: the state in memory may be behind the checkpoint.
            logged, start = _read_snapshot(self._trail, self._path, size)
            _read(self._trail, logged, start, size)
            last = TileHashes(self._trail.files, size)(0, size - 1)
            files = self._trail.files.storage
            files.make_folder(self._path.parent)
            snapshot = _Snapshot(
                size,
                last,
                sorted(logged.documents),
                logged.lasting,
                logged.pins,
                logged.signing_keys,
                logged.exports,
                sorted(logged.log_keys),
                *(self._was or (0, b"")),
            )
            replace_durably(files, self._path, msgspec.msgpack.encode(snapshot))
            self._saved_to = size


def _was(trail: Trail, path: Path, size: int) -> _Was | None:
    """The log of the snapshot, or the one before that, where this one does not continue it."""
    if trail.copied:
        return None
    try:
        held = _snapshot.decode(read_file(trail.files.storage, path) or b"")
    except (OSError, msgspec.MsgspecError):
        return None
    was = _Was(held.size, held.last_leaf_hash)
    if held.was_size:
        was = _Was(held.was_size, held.was_last_leaf_hash)
    if not was.size or (
        was.size <= size and TileHashes(trail.files, size)(0, was.size - 1) == was.last_leaf_hash
    ):
        return None
    return was


def _read(trail: Trail, logged: _Logged, start: int, size: int) -> None:
    for index, data in read_entries(trail.files, start, size, size):
        header = read_header(data)
        if header is not None and header.document_sha256:
            logged.documents.add(header.document_sha256)
            if header.kind in LASTING:
                logged.lasting.setdefault(header.document_sha256, index)
            elif header.kind is Kind.GRANT:
                logged.exports.setdefault(header.document_sha256, index)
            elif is_pinned(header):
                logged.pins.setdefault(header.document_sha256, index)
        elif header is not None and header.kind is Kind.KEY:
            take(logged.signing_keys, header.action, header.key_id, header.time_ms)
            if says_changed(header):
                logged.log_keys.add(header.key_id)


def _read_snapshot(trail: Trail, path: Path, size: int) -> tuple[_Logged, int]:
    try:
        held = _snapshot.decode(read_file(trail.files.storage, path) or b"")
        if (
            held.lasting is not None
            and held.pins is not None
            and held.signing_keys is not None
            and held.exports is not None
            and held.log_keys is not None
            and 0 < held.size <= size
            and TileHashes(trail.files, size)(0, held.size - 1) == held.last_leaf_hash
        ):
            logged = _Logged(
                set(held.documents),
                held.lasting,
                held.pins,
                held.signing_keys,
                held.exports,
                set(held.log_keys),
            )
            return logged, held.size
    except (OSError, msgspec.MsgspecError):
        pass  # a shortcut that is not there, or does not hold, is not taken
    return _Logged.nothing(), 0
