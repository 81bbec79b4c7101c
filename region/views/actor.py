"""A view at work: what a queue's shard and a shard's subscriptions have in common around their own pure state.

A view decides by its state alone, and hands the entry to its actor, which writes it into the journal and answers once it is as
durable as the stream. The actor brings the state back when it is opened, and again after the journal refused an entry: what was
decided on it is not there, so nothing is served until the state is that of the journal.

Invariants:
- nothing is decided while `refusal` says why; a refused entry is reported to its view (`lost`) before its waiting caller gets
  the error;
- entries are answered in the order in which they were written; of several at once the last one answers for all; a decision that needed none, since an
  earlier one had made it already, is answered behind all that was written before it;
- `begin`, every `replay`, `replayed` come in this order, and nothing else of the view is called between them;
- before the first entry after a replay, and at the beginning of each snapshot, stands what `preface` gives.
On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from felix.errors import Code, FelixError, UnavailableError
from region.gather import Done, ignore
from region.log.shard import ShardLog
from region.views.journal import Journal

log = logging.getLogger("felix.region.views")

JOURNAL_LOOK_MS: Final = 100
"""How often is looked whether a journal takes entries again that does not say when."""


class View(Protocol):
    """What an actor asks of its view."""

    def begin(self) -> None:
        """The journal is about to be replayed: the state is empty from here on, and what waits on the old one is over."""

    def replay(self, entry: bytes) -> None:
        """Take in an entry. Raises CorruptionError."""

    def replayed(self) -> None:
        """The state is whole."""

    def preface(self) -> bytes | None:
        """An entry that says of which records those behind it speak (region.views.history); None while those are not served."""

    def entries(self) -> Iterable[bytes]:
        """The whole state as entries."""

    def lost(self, error: FelixError) -> None:
        """An entry was refused; the journal is about to be read again."""

    def resumed(self) -> None:
        """After `lost` it was; the view serves again."""


class ViewActor:
    """See the module. `open`, then use, then `close`."""

    def __init__(self, name: str, view: View, companion: ShardLog | None, again_s: float) -> None:
        """`name` begins a sentence about the view. `companion`: the journal's log, None where the stream is ephemeral. `again_s`: how
        long after a replay that failed it is tried again."""
        self.name = name
        self.journal = Journal(companion, self._snapshot)
        self._view = view
        self._prefaced = False
        self._again_s = again_s
        self._opened = False
        self._whole = False
        self._serving = False
        self._closed = False
        self._reloading: asyncio.Task[None] | None = None
        self._behind: list[Done] | None = None
        """who is answered with the newest entry that is under way; None where none is"""

    # -- life ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Bring the state back. Raises what reading the journal raises, CorruptionError."""
        await self._replay()
        self._opened = self._serving = True

    async def _replay(self) -> None:
        self._prefaced = False
        self._view.begin()
        async for entry in self.journal.replay():
            self._view.replay(entry)
        self._view.replayed()
        self._whole = True

    async def close(self) -> None:
        """Write what waits; nothing is decided any more."""
        self._closed = True
        self._serving = False
        if self._reloading is not None:
            self._reloading.cancel()
        await self.journal.close()

    @property
    def is_serving(self) -> bool:
        """False before it was opened, while the journal is read again, and once it is closed."""
        return self._serving

    @property
    def is_whole(self) -> bool:
        """Whether the state is that of the journal, also while nothing can be decided on it, as on a full disk."""
        return self._whole and not self._closed

    @property
    def is_reloading(self) -> bool:
        """True while the journal is read again."""
        return self._reloading is not None

    def refusal(self) -> FelixError | None:
        """Why nothing may be decided now. Where the journal is to be read again, that begins."""
        if self._closed:
            return UnavailableError(f"{self.name} is closing.", code=Code.SHUTTING_DOWN)
        why = self.journal.refusal()
        if self._serving and self.journal.lost is None:
            return why
        if self._opened:
            # In an event loop iteration of its own: the caller is in the middle of a decision.
            asyncio.get_running_loop().call_soon(self._reload_if_lost)
        return UnavailableError(
            f"{self.name} reads its journal again" + (f": {why}" if why is not None else "."),
            retry_after_ms=100,
        )

    # -- writing ---------------------------------------------------------------------------------------

    def append(self, entry: bytes, done: Done) -> None:
        """Write an entry that the view has applied; `done` once it is durable, or why it is not. It may be called at once."""
        behind: list[Done] = []

        def noticed(error: FelixError | None) -> None:
            if self._behind is behind:
                self._behind = None
            if error is not None:
                self._reload(error)
            for each in (done, *behind):
                each(error)

        if self._reloading is not None:
            # Decisions that were made on the lost state. Nothing of them is written, so none may be told that it is.
            refusal = self.refusal()
            assert refusal is not None, "nothing is served while the journal is read again"
            done(refusal)
        else:
            self._preface()
            self._behind = behind
            self.journal.append(entry, noticed)

    def _preface(self) -> None:
        if not self._prefaced and (preface := self._view.preface()) is not None:
            self._prefaced = True
            self.journal.append(preface, ignore)

    def _snapshot(self) -> Iterable[bytes]:
        preface = self._view.preface()
        return [*([] if preface is None else [preface]), *self._view.entries()]

    def write(self, entries: Sequence[bytes], done: Done) -> None:
        """Write some; `done` once all are durable, or why they are not. Without any it is called once what was written before is durable: the decision may have
        been made by an entry that is not yet."""
        if not entries:
            if self._behind is not None:
                self._behind.append(done)
            else:
                done(self.refusal() if self._reloading is not None else None)
            return
        if self._reloading is None:
            self._preface()
            # Appends of a journal are answered in order: with the last, all are durable.
            for entry in entries[:-1]:
                self.journal.append(entry, ignore)
        self.append(entries[-1], done)

    # -- reading again ---------------------------------------------------------------------------------

    def _reload_if_lost(self) -> None:
        if self.journal.lost is not None:
            self._reload(self.journal.lost)

    def _reload(self, error: FelixError) -> None:
        if self._reloading is None and not self._closed:
            self._serving = self._whole = False
            self._reloading = asyncio.ensure_future(self._read_again())
            self._view.lost(error)

    async def _read_again(self) -> None:
        said = ""
        try:
            while True:
                try:
                    await self._replay()
                    await self._wait_for_journal()
                    break
                except FelixError as error:
                    if str(error) != said:
                        # Tried several times a second for as long as a log does not serve.
                        said = str(error)
                        log.error("%s does not serve: %s", self.name, error)
                    await asyncio.sleep(self._again_s)
        finally:
            self._reloading = None
        # Only now: what is decided while this task still stands is refused (`append`), whatever the journal says by then.
        self._serving = True
        self._view.resumed()

    async def _wait_for_journal(self) -> None:
        """Until it takes entries: a decision that it refuses at once would bring the next replay at once, and so on."""
        while (refusal := self.journal.refusal()) is not None:
            if self.journal.lost is not None:
                raise self.journal.lost
            retry_ms = refusal.retry_after_ms if isinstance(refusal, UnavailableError) else None
            await asyncio.sleep((retry_ms or JOURNAL_LOOK_MS) / 1000)
