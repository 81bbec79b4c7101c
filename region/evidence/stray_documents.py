"""Files in the documents' folder beside the audit log that are no documents: half of one, or somebody else's. They stop nothing.

A document stands under its SHA-256 (audit.document_disk), so what else stands there is found by reading it. Whoever verifies the log takes such a
document for missing where a leaf names it; this says so before, to the operator. Reads files in threads; else on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from audit.document_disk import stray
from audit.document_leaf import DOCUMENTS_FOLDER
from audit.tile_disk import Folder
from felix.periodic import every
from felix.tasks import end_tasks

log = logging.getLogger("felix.region.audit_log")

READ_AT_ONCE: Final = 32
PAUSE_S: Final = 0.05
"""Between so many: a broker that starts has other work for its disk."""
AGAIN_S: Final = 60.0
"""How often those that were found are looked at again, until they are gone or right. The others are read at the next start."""
TOLD_MAX: Final = 8
"""Told one by one; of more, how many."""


class StrayDocuments:
    """One per broker. `folder` gives the log's folder."""

    def __init__(self, folder: Callable[[], Folder]) -> None:
        self._folder = folder
        self._found: dict[str, str] = {}
        self._work: asyncio.Task[None] | None = None

    @property
    def problems(self) -> list[str]:
        """A sentence for each, and what to do."""
        told = [sentence for _, sentence in sorted(self._found.items())]
        more = len(told) - TOLD_MAX
        return (
            told
            if more <= 0
            else [*told[:TOLD_MAX], f"{more} more files beside the audit log are no documents."]
        )

    def start(self) -> None:
        """Look at all of them, a few at a time."""
        self._work = asyncio.get_running_loop().create_task(self._run(), name="stray documents")

    async def close(self) -> None:
        """Look no more."""
        if self._work is not None:
            await end_tasks(self._work)

    async def _run(self) -> None:
        await self.look(await asyncio.to_thread(self._folder().names, DOCUMENTS_FOLDER))
        await every(
            AGAIN_S,
            lambda: self.look(tuple(self._found)),
            "files beside the audit log could not be looked at",
            log,
        )

    async def look(self, names: Sequence[str]) -> None:
        """At these files."""
        for begin in range(0, len(names), READ_AT_ONCE):
            some = names[begin : begin + READ_AT_ONCE]
            for name, sentence in (await asyncio.to_thread(self._read, some)).items():
                if sentence and name not in self._found:
                    log.error("%s", sentence)
                if sentence:
                    self._found[name] = sentence
                else:
                    self._found.pop(name, None)
            await asyncio.sleep(PAUSE_S)

    def _read(self, names: Iterable[str]) -> dict[str, str]:
        folder = self._folder()
        return {name: stray(folder, name) for name in names}
