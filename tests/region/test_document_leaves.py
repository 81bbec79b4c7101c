"""Leaves of documents on one of several brokers: what it knows of them, when it knows it, and who writes them by then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from audit_log import TIME_MS, log_signer, region_bundle
from bridge_mesh import until
from signed_grants import signed_grant

from audit.errors import AuditUnavailableError
from audit.leaf import Leaf
from audit.trail import Trail as RealTrail
from felix.errors import CorruptionError
from felix.names import SpiffeId, StreamName
from policy.grant import GrantBook
from region.evidence import document_log
from region.evidence.document_log import KNOWN_MS_MAX, DocumentLog
from region.governance import leaves as leaves_module
from region.governance.leaves import DocumentLeaves
from region.trust.held_document import digest_of
from region.trust.signing_key_leaves import KeyLeaf, LoggedKey, key_id_of

OPERATOR = SpiffeId("us-east", "acme", "operator", "alice")
DOCUMENT = signed_grant().export
DIGEST = digest_of(DOCUMENT)


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def boot_ms(self) -> int:
        return self.now_ms


class Trail:
    """Takes leaves, or keeps them waiting, or says that it is not known whether it took them."""

    copied = False
    failure = None

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.takes.set()
        self.is_lost = False
        self.leaves: list[Leaf] = []

    def keep_document(self, document: bytes) -> None:
        pass

    async def append(self, leaves: list[Leaf]) -> None:
        await self.takes.wait()
        if self.is_lost:
            raise AuditUnavailableError("It is not known.")
        self.leaves += leaves


class Others:
    """The other brokers: `answers` whether a leaf stands, to those that say that all has passed, and to those that do not."""

    def __init__(self) -> None:
        self.writes_here = False
        self.answers = {False: False, True: False}
        self.reached = asyncio.Event()
        self.reached.set()
        self.asked = {False: 0, True: 0}
        self.have_passed = asyncio.Event()

    async def all_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        if self.writes_here:
            await self.have_passed.wait()

    async def has_leaf(self, digest: bytes, *, passed: bool) -> bool:
        self.asked[passed] += 1
        await asyncio.sleep(0)
        await self.reached.wait()
        return self.answers[passed]

    def leaf_of(self, digest: bytes) -> int | None:
        return 7

    def written(self, digest: bytes) -> None:
        pass


class Broker:
    """The leaves of one broker, and what they are made of."""

    def __init__(self) -> None:
        self.clock, self.trail, self.others = Clock(), Trail(), Others()
        nothing = cast("Any", None)
        self.logged = DocumentLog(
            cast("Any", self.trail),
            nothing,
            cast("Any", (set(), {}, {}, {}, {}, set())),
            0,
            0,
            cast("Any", self.clock),
        )
        self.drained = asyncio.Event()
        self.drained.set()

        async def drain(stops: Callable[[str], bool], leads_to: Callable[[StreamName], bool]) -> None:
            await self.drained.wait()

        runtime = SimpleNamespace(clock=self.clock)
        broker = SimpleNamespace(broker_id="2", runtime=runtime, clock_ms=lambda: TIME_MS)
        self.leaves = DocumentLeaves(
            cast("Any", broker), region_bundle("us-east"), cast("Any", SimpleNamespace(failure=None)), self.logged, nothing,
            GrantBook, drain, lambda document: None, cast("Any", self.others), lambda: None, lambda digest: True,
        )  # fmt: skip
        self.leaves.look_compared()

    def stops_something(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the documents are."""
        monkeypatch.setattr(self.leaves, "_replaced_by", lambda document: "a-grant")


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    monkeypatch.setattr(leaves_module, "LOOK_S", 0.001)
    made = Broker()
    made.stops_something(monkeypatch)
    return made


async def test_who_put_a_document_is_forgotten_once_another_broker_has_written_its_leaf(
    broker: Broker,
) -> None:
    broker.others.answers = {False: True, True: True}
    broker.leaves.name_actor(DOCUMENT, OPERATOR)
    await broker.leaves.log(DOCUMENT)
    assert DIGEST in broker.logged and broker.leaves.is_current
    assert not broker.leaves._actors and not broker.leaves._lacked
    assert broker.logged.leaf_of(DIGEST) == 7, "as whoever wrote it said"


async def test_what_was_not_heard_for_too_long_lets_nothing_cross(broker: Broker) -> None:
    """The link was cut for a while: the leaf may stand, and what crosses under the half before would stand far behind it."""
    follows = asyncio.ensure_future(broker.leaves.log(DOCUMENT))
    await until(lambda: broker.others.asked[True] > 1, "that all has passed is said")
    assert broker.leaves.is_current
    broker.others.reached.clear()
    broker.clock.now_ms += KNOWN_MS_MAX
    assert broker.leaves.is_current
    broker.clock.now_ms += 1
    assert not broker.leaves.is_current
    broker.others.reached.set()
    await until(lambda: broker.leaves.is_current, "an answer to a question of now")
    broker.others.answers[True] = True
    await follows
    broker.clock.now_ms += 10 * KNOWN_MS_MAX
    assert broker.leaves.is_current, "nothing is waited for"


async def test_a_leaf_is_heard_of_while_what_the_document_stops_is_on_its_way(broker: Broker) -> None:
    """An earlier process of this broker has said that all has passed: the leaf does not wait for this one."""
    broker.drained.clear()
    follows = asyncio.ensure_future(broker.leaves.log(DOCUMENT))
    await until(lambda: broker.others.asked[False] > 3, "questions")
    assert not broker.others.asked[True]
    broker.others.answers[False] = True
    await follows
    assert DIGEST in broker.logged


async def test_who_has_the_log_no_more_says_what_has_passed_to_the_broker_that_has_it(broker: Broker) -> None:
    """It waited for the others, one of which is gone."""
    broker.others.writes_here = True
    writes = asyncio.ensure_future(broker.leaves.log(DOCUMENT))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not broker.trail.leaves and not writes.done()
    broker.others.writes_here = False
    broker.others.answers[True] = True
    await writes
    assert broker.others.asked[True] == 1 and not broker.trail.leaves


async def test_who_follows_writes_the_leaf_once_it_goes_on_with_the_log(broker: Broker) -> None:
    follows = asyncio.ensure_future(broker.leaves.log(DOCUMENT))
    await until(lambda: broker.others.asked[True] > 1, "that all has passed is said")
    broker.others.writes_here = True
    await asyncio.sleep(0.01)
    assert not follows.done(), "it waits for the others"
    broker.others.have_passed.set()
    await follows
    assert len(broker.trail.leaves) == 1 and broker.leaves.is_current


async def test_while_a_leaf_takes_long_to_be_written_nothing_crosses(broker: Broker) -> None:
    """It has its time already; so, too, where nobody knows what became of it."""
    broker.others.writes_here = True
    broker.others.have_passed.set()
    broker.trail.takes.clear()
    writes = asyncio.ensure_future(broker.leaves.log(DOCUMENT))
    await until(lambda: broker.logged.may_stand(DIGEST), "that it is being written")
    assert broker.leaves.is_current
    broker.clock.now_ms += KNOWN_MS_MAX + 1
    assert not broker.leaves.is_current
    broker.trail.is_lost = True
    broker.trail.takes.set()
    with pytest.raises(AuditUnavailableError):
        await writes
    assert not broker.leaves.is_current
    broker.trail.is_lost = False
    await broker.leaves.log(DOCUMENT)
    assert broker.leaves.is_current and len(broker.trail.leaves) == 1


async def test_what_another_broker_has_not_in_the_log_is_not_waited_for_any_more(broker: Broker) -> None:
    broker.others.writes_here = True
    broker.others.have_passed.set()
    broker.trail.is_lost = True
    with pytest.raises(AuditUnavailableError):
        await broker.leaves.log(DOCUMENT)
    broker.others.writes_here = False
    broker.clock.now_ms += KNOWN_MS_MAX + 1
    assert not broker.leaves.is_current
    follows = asyncio.ensure_future(broker.leaves.log(DOCUMENT))
    await until(lambda: broker.leaves.is_current, "the other's word")
    broker.others.answers = {False: True, True: True}
    await follows


async def test_a_document_that_two_follow_is_waited_for_until_both_have_ended(broker: Broker) -> None:
    first, second = (asyncio.ensure_future(broker.leaves.log(DOCUMENT)) for _ in range(2))
    await until(lambda: broker.others.asked[True] > 3, "questions of both")
    first.cancel()
    await asyncio.wait((first,))
    broker.others.reached.clear()
    broker.clock.now_ms += 2 * KNOWN_MS_MAX
    assert not broker.leaves.is_current
    broker.others.answers = {False: True, True: True}
    broker.others.reached.set()
    await second
    assert broker.leaves.is_current


async def test_a_refresh_that_fails_half_way_gives_up_no_key_that_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the log that lacks a file yet, over two changes of the region's policy key."""
    first, second, third = (key_id_of(bytes([number]) * 32) for number in (1, 2, 3))
    trail = RealTrail.open(tmp_path / "audit", log_signer("us-east.acme/audit"))
    documents = DocumentLog.open(trail, tmp_path / "snapshot")
    for change in ((first, second), (second, third)):
        for word, key_id in zip(("ended", "changed"), change, strict=True):
            await trail.append([KeyLeaf("policy", cast("Any", word), key_id).leaf("us-east", 5)])
    await trail.append([KeyLeaf("receipt", "ended", first).leaf("us-east", 5)])
    trail.publish()
    whole, reads = document_log.read_entries, 0

    def broken(*of: Any) -> Iterator[tuple[int, bytes]]:
        nonlocal reads
        reads += 1
        for index, data in whole(*of):
            if reads < 5 and index == reads:
                raise CorruptionError("It is not there yet.")
            yield index, data

    monkeypatch.setattr(document_log, "read_entries", broken)
    for _ in range(4):
        with pytest.raises(CorruptionError):
            documents.refresh()
    documents.refresh()
    assert documents.signing_keys["policy"] == LoggedKey(third, 5, (first, second))
    # What is appended here is known at once, and stands once after the next reading, too.
    fourth = key_id_of(bytes([4]) * 32)
    for word, key_id in (("ended", third), ("changed", fourth)):
        await documents.append_key(KeyLeaf("policy", cast("Any", word), key_id).leaf("us-east", 6))
    known = LoggedKey(fourth, 6, (first, second, third))
    assert documents.signing_keys["policy"] == known
    trail.publish()
    documents.refresh()
    assert documents.signing_keys["policy"] == known
    await documents.close()
    assert DocumentLog.open(trail, tmp_path / "snapshot").signing_keys["policy"] == known
    await asyncio.to_thread(trail.close)
