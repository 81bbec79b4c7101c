"""Waiting for changes of documents: a bridge agent lists its documents once, and is then notified of changes.

A revision is a digest of all that an identity may list now, so it is the same after a restart of the broker and at every broker,
and a change of documents that the identity may not list wakes its wait only briefly. A wait ends when the revision differs from
the known one; the caller then lists again.

What an identity is shown is found once for each change, however many pages and waits ask for it.

Invariants: a change that came after a revision was given is never missed, however late it is waited for; a wait ends after
WAIT_MS_MAX at the latest, at once when the broker stops, and holds nothing but its place among the session's requests.
On the event loop.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from felix.bounded import BoundedMap
from felix.names import SpiffeId
from felix.news import News

WAIT_MS_MAX: Final = 20_000
"""Shorter than a client waits for any answer (felix.connection), so that an unchanged revision is an answer and not a timeout."""
COLLECT_S: Final = 0.02
"""Documents arrive in bursts, a grant with its approvals: listeners are notified once per burst."""
REVISIONS_KEPT_MAX: Final = 1_000
"""Revisions of as many identities are kept until the next change, so that many waits of one cost what one does."""

NAMES_OF_ANYBODY: Final = 100
"""As so many names counts each identity: also of one that is shown nothing something is kept."""
NAMES_KEPT_MAX: Final = 100_000
"""Names of documents that are kept in order for the next page, of all identities: 25 MB. What is shown to an identity with more is kept alone."""


class _Listed(NamedTuple):
    """What an identity is shown, by kind: the names in order, and the documents."""

    names: Mapping[str, Sequence[str]]
    documents: Mapping[str, Mapping[str, bytes]]

    def weight(self) -> int:
        return NAMES_OF_ANYBODY + sum(map(len, self.names.values()))


class DocumentWatch:
    """One per broker. `shown`: all documents that an identity may list, by kind and id."""

    def __init__(self, shown: Callable[[SpiffeId], Mapping[str, Mapping[str, bytes]]]) -> None:
        self._shown = shown
        self._revisions: dict[SpiffeId, bytes] = {}
        self._listed: BoundedMap[SpiffeId, _Listed] = BoundedMap(NAMES_KEPT_MAX, weigh=_Listed.weight)
        self._news = News()
        self._closed = False

    def changed(self) -> None:
        """Documents, or what is believed of them, may be others now."""
        self._revisions.clear()
        self._listed.clear()
        self._news.tell()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds that only a change can bring about. Bound it with a timeout."""
        await self._news.until(holds)

    def close(self) -> None:
        """The broker is about to stop: answer all waiting callers."""
        self._closed = True
        self.changed()

    def revision(self, identity: SpiffeId) -> bytes:
        """Of what this identity is shown now. Raises what listing them raises."""
        found = self._revisions.get(identity)
        if found is None:
            digest = sha256()
            listed = self._of(identity)
            for kind, documents in sorted(listed.documents.items()):
                for name in listed.names[kind]:
                    for part in (kind.encode(), name.encode(), documents[name]):
                        digest.update(len(part).to_bytes(4))
                        digest.update(part)
            found = digest.digest()[:16]
            if len(self._revisions) < REVISIONS_KEPT_MAX:
                self._revisions[identity] = found
        return found

    def behind(
        self, identity: SpiffeId, kind: str, after: str, limit: int
    ) -> tuple[list[tuple[str, bytes]], int]:
        """The documents of a kind behind this name, in order, at most `limit`; and how many there are behind it. Raises what listing
        them raises."""
        listed = self._of(identity)
        names, documents = listed.names.get(kind, ()), listed.documents.get(kind, {})
        at = bisect_right(names, after)
        return [(name, documents[name]) for name in names[at : at + limit]], len(names) - at

    def _of(self, identity: SpiffeId) -> _Listed:
        found = self._listed.use(identity)
        if found is None:
            documents = self._shown(identity)
            found = _Listed({kind: sorted(held) for kind, held in documents.items()}, documents)
            self._listed.put(identity, found)
        return found

    async def wait(self, identity: SpiffeId, known: bytes, wait_ms: int) -> None:
        """Return once the identity's revision is not `known`, or after so many ms. Raises what listing raises."""
        try:
            async with asyncio.timeout(min(wait_ms, WAIT_MS_MAX) / 1000):
                while not self._closed:
                    following = self._news.following
                    if self.revision(identity) != known:
                        return
                    await following.wait()
                    await asyncio.sleep(COLLECT_S)
        except TimeoutError:
            return
