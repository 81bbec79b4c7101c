"""The checkpoints of other logs that this region has cosigned: in the metadata store, and in files of the broker's folder.

The store alone has room for one memory of a region, whichever broker cosigns: a note takes the place of the one that was read, or not at
all. The files are for the day on which the store is put back to an earlier state. Each of the two is held to the other, and the one that knows
more counts, so an older copy of either does not let a witness sign a history a second time.

Called in threads, never on the event loop: each call waits for the store. A swap whose outcome is unknown is an error: nothing is signed, and
the next call reads again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from hashlib import sha256
from typing import Any, Final, TypeVar

from audit.checkpoint import Checkpoint
from audit.note import parse_note
from audit.witness import DiskWitnessStore, ForkError, superseded
from felix.errors import TamperError, UnavailableError
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from region.metadata.port import MetadataStore
from region.metadata.records import Keys
from region.metadata.transaction import Entry, ModRevision, Put

log = logging.getLogger("felix.region.witness")

ANSWER_S: Final = 30.0
"""The store's own limits are shorter; beyond this the broker is going down."""

_T = TypeVar("_T")


class WitnessMemory:
    """A `WitnessStore` (audit.witness). Made on the event loop that the metadata store belongs to."""

    def __init__(
        self, store: MetadataStore, region: str, files: DiskWitnessStore, runtime: Runtime = REAL
    ) -> None:
        self._store = store
        self._keys = Keys(region)
        self._files = files
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()

    def move_in(self) -> None:
        """Bring what the files know, and the store does not, into the store: what Felix 0.1 remembered, or what a store that was put back lost.

        Raises UnavailableError. A file that holds no checkpoint, or contradicts the store, stays, and stops the cosigning of its log alone.
        """
        for held in self._files.notes():
            try:
                origin = _head(held).origin
                entry, note = self._newest(origin)
            except (TamperError, ForkError) as error:
                log.error("what was cosigned last of a log is not known: %s", error)
                continue
            if entry is None or entry.value != note:
                self._put(origin, entry, note)

    def last(self, origin: str) -> bytes | None:
        """The note that knows most; the file's where the store does not answer, for `swap` asks again. Raises ForkError where store and file
        contradict each other: the log signed both."""
        try:
            _, note = self._newest(origin)
        except UnavailableError:
            return self._files.last(origin)
        return note

    def swap(self, origin: str, before: bytes | None, note: bytes) -> None:
        """Replace `before`; on the disk of the store and of the broker on return. Raises UnavailableError."""
        entry, held = self._newest(origin)
        if held != before:
            raise superseded(origin)
        self._put(origin, entry, note)
        self._files.swap(origin, self._files.last(origin), note)

    def _put(self, origin: str, entry: Entry | None, note: bytes | None) -> None:
        assert note is not None
        key = self._key(origin)
        compare = ModRevision(key, entry.mod_revision if entry else 0)
        if not self._await(self._store.transact([compare], [Put(key, note)])).succeeded:
            raise superseded(origin)

    def _newest(self, origin: str) -> tuple[Entry | None, bytes | None]:
        """The store's entry, and the note that knows most of the store's and the file's."""
        entry, filed = self._await(self._store.get(self._key(origin))), self._files.last(origin)
        if entry is None or filed is None or entry.value == filed:
            return entry, entry.value if entry else filed
        stored, local = _head(entry.value), _head(filed)
        if stored.size == local.size and stored.root != local.root:
            raise ForkError(
                f"The log {origin} has two roots for {local.size} leaves, and both were cosigned here.",
                entry.value,
                filed,
            )
        if local.size > stored.size:
            log.warning(
                "the metadata store remembers %d leaves of %s, this broker %d: the store was put back to an earlier state",
                stored.size,
                origin,
                local.size,
            )
            return entry, filed
        return entry, entry.value

    def _key(self, origin: str) -> str:
        return self._keys.witness(sha256(origin.encode()).hexdigest())

    def _await(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            answer: _T = self._runtime.ask(work, self._loop, ANSWER_S)
            return answer
        except TimeoutError as error:
            raise UnavailableError("The metadata store does not answer.") from error


def _head(note: bytes) -> Checkpoint:
    return Checkpoint.parse(parse_note(note).text)
