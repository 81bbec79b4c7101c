"""A document's leaf waits, at the broker with the audit log, until the region's other brokers have let pass what the document stops
(`governance.leaves.Neighbours`). Event loop only; `region.evidence.audit_server` says what the others told.

Invariant: what is remembered of documents and of who asked for them is bounded (PASSED_REMEMBERED_MAX): what is forgotten is said again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from felix.bounded import BoundedMap
from felix.errors import FelixError
from felix.names import StreamName
from felix.news import News
from region.evidence.audit_requests import AGAIN_S, STREAMS_MAX, PassedTold, StreamsPassed
from region.evidence.remote_audit import RemoteLeaves

log = logging.getLogger("felix.region.audit")

PASSED_REMEMBERED_MAX: Final = 20_000
"""Documents that wait for their leaf, of which is known which brokers have let pass what they stop; and as many, which brokers asked."""
SILENT_S: Final = 60.0
"""A broker that is reached asks every second for the leaf of a document that it has seen; as long as a policy's leaf waits (governance.leaves)."""
LOOK_S: Final = 5.0
"""How often is looked whether a broker that is waited for is back."""


class HomeLeaves:
    """The broker with the log: a document's leaf waits until the others have let pass what it stops (governance.leaves.Neighbours)."""

    writes_here: Final = True

    def __init__(
        self,
        own: str,
        brokers: Callable[[], Mapping[str, str]],
        streams_of: Callable[[str], Iterable[StreamName]],
        is_up: Callable[[str], bool],
        copied: Callable[[Callable[[StreamName], bool]], Mapping[StreamName, str]],
        ask: Callable[[str, StreamsPassed], Awaitable[PassedTold]],
    ) -> None:
        """`brokers`: every broker of the region, with the address of each that is alive. `streams_of`: those of which a broker's disk may have
        records without a leaf, and no other one's. `is_up`: whether a link to one stands. `copied`: of the streams that are asked for those with several
        copies, each with the broker that leads it, or none. `ask` asks a broker, which may be this one."""
        self._own = own
        self._copied = copied
        self._ask = ask
        self._brokers = brokers
        self._streams_of = streams_of
        self._is_up = is_up
        self._passed: BoundedMap[bytes, set[str]] = BoundedMap(PASSED_REMEMBERED_MAX)
        self._asked: BoundedMap[bytes, dict[str, float]] = BoundedMap(PASSED_REMEMBERED_MAX)
        """when each broker asked last for a document's leaf, by the loop's clock"""
        self._news = News()

    def heard(self, digests: Iterable[bytes], broker: str, *, passed: bool) -> None:
        """Another broker has seen these documents, and lets pass what they stop; `passed`: at it nothing is on its way any more that they stop."""
        # What is forgotten for another is said again: whoever asked asks until the leaf stands.
        now, is_news = asyncio.get_running_loop().time(), False
        for digest in digests:
            asked = self._asked.use(digest)
            if asked is None:
                self._asked.put(digest, {broker: now})
            else:
                asked[broker] = now
            if passed:
                held = self._passed.use(digest) or set()
                if broker not in held:
                    held.add(broker)
                    self._passed.put(digest, held)
                    is_news = True
        if is_news:
            self._news.tell()

    def written(self, digest: bytes) -> None:
        """It has its leaf."""
        self._passed.pop(digest)
        self._asked.pop(digest)

    async def all_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        """Wait for every other broker that is alive, or has a stream in which that may have arrived: it writes the leaves that a crash left there,
        or a disk that is full, and behind a revocation these would be held against the log for ever. One that is reached and has not asked for the leaf for
        SILENT_S has not seen the document; it is waited for where it has such a stream, unless another document has taken the place of this one in the
        store: then it never will."""
        await self._all_brokers_passed(digest, leads_to, is_stored)
        await self._all_copied_passed(digest, leads_to, is_stored)

    async def _all_copied_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        """The same of streams with copies: whoever leads one says so while it does. What its leader of before had taken has its leaf before the stream is
        served again."""
        told, now = False, asyncio.get_running_loop().time
        silent_from = now() + SILENT_S
        copied = self._copied(leads_to)
        while copied:
            led, wanted, unknown = defaultdict[str, list[str]](list), set(copied), set[str]()
            for name, leader in sorted(copied.items()):
                led[leader].append(str(name))
            for leader, names in led.items():
                if not leader or not self._is_up(leader):
                    continue
                with suppress(FelixError):
                    answer = await self._ask(leader, StreamsPassed(digest, names[:STREAMS_MAX]))
                    wanted -= {StreamName.parse(name) for name in answer.streams}
                    if not answer.known and not is_stored():
                        unknown.update(names)
            if not wanted:
                return
            if now() >= silent_from:
                if unseen := sorted(name for name in wanted if str(name) in unknown):
                    log.warning(
                        "a document's leaf no longer waits for %s, whose leader knows nothing of it", ", ".join(map(str, unseen[:3]))
                    )  # fmt: skip
                    wanted.difference_update(unseen)
                elif not told:
                    log.warning(
                        "a document's leaf waits for %s, where records may have arrived without a leaf: have it served again, or delete it",
                        ", ".join(map(str, sorted(wanted)[:3])),
                    )  # fmt: skip
                    told = True
            await asyncio.sleep(AGAIN_S)
            copied = self._copied(wanted.__contains__)

    async def _all_brokers_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        told, now = False, asyncio.get_running_loop().time
        began = now()

        def may_not_see(broker: str) -> bool:
            asked = (self._asked.use(digest) or {}).get(broker, began)
            return (
                self._is_up(broker)
                and now() - asked >= SILENT_S
                and not (is_stored() and any(map(leads_to, self._streams_of(broker))))
            )

        while missing := self._missing(digest, leads_to):
            gone = sorted(broker for broker in missing if not self._brokers().get(broker))
            if gone and not told:
                log.warning(
                    "a document's leaf waits for broker %s, which is not there and may have records without a leaf: start it, or delete its streams",
                    ", ".join(gone),
                )  # fmt: skip
                told = True
            if not gone and all(map(may_not_see, missing)):
                log.warning(
                    "a document's leaf no longer waits for broker %s, which says nothing of it",
                    ", ".join(missing),
                )
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.following.wait()

    def _missing(self, digest: bytes, leads_to: Callable[[StreamName], bool]) -> list[str]:
        passed = self._passed.use(digest) or set()
        return [
            broker
            for broker, address in self._brokers().items()
            if broker != self._own
            and broker not in passed
            and (address or any(map(leads_to, self._streams_of(broker))))
        ]

    async def has_leaf(self, digest: bytes, *, passed: bool) -> bool | None:
        """Never asked here."""
        raise AssertionError("the log is here")

    def leaf_of(self, digest: bytes) -> int | None:
        """Nobody else says it."""
        return None


class MovingLeaves:
    """`governance.leaves.Neighbours` where brokers copy the log, and any of them may go on with it."""

    def __init__(self, here: HomeLeaves, elsewhere: RemoteLeaves, is_home: Callable[[], bool]) -> None:
        self._here, self._elsewhere, self._is_home = here, elsewhere, is_home

    @property
    def writes_here(self) -> bool:
        return self._is_home()

    async def all_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        """As whoever writes leaves does."""
        if self._is_home():
            await self._here.all_passed(digest, leads_to, is_stored)

    async def has_leaf(self, digest: bytes, *, passed: bool) -> bool | None:
        """As the broker that is home says."""
        return await self._elsewhere.has_leaf(digest, passed=passed)

    def leaf_of(self, digest: bytes) -> int | None:
        """As the broker that is home said."""
        return self._elsewhere.leaf_of(digest)

    def written(self, digest: bytes) -> None:
        """It has its leaf."""
        self._here.written(digest)
