"""How long a region's log has to be by the receipts that it gave: those of before the session, and no later one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from audit_log import REGION_ORIGIN, Link, log_signer

from audit.checkpoint import Checkpoint
from audit.leaf import Leaf, encode_leaf
from audit.merkle import Tree, inclusion_proof, leaf_hash
from audit.note import Note, encode_note
from bridge import receipted
from bridge.receipted import LATE_S, Receipted, Received, _has
from felix.errors import Code, CorruptionError, UnavailableError
from felix.messages import CheckpointAnswer


class Region:
    """A destination whose log has so many leaves in its checkpoint; receipts name the leaves in `received`, the newest last."""

    region = "eu-west"

    def __init__(self, size: int, received: list[int]) -> None:
        self.size, self.received = size, received
        self.asked = 0
        self._link = object()

    def link(self) -> object:
        return self._link

    def connection(self) -> Any:
        return SimpleNamespace(request=self._request)

    def begin_session(self) -> None:
        self._link = object()

    async def _request(self, message: object) -> Any:
        self.asked += 1
        return SimpleNamespace(size=self.size, leaf=None)


class Agent:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        self._receipted = Receipted(SimpleNamespace(clock=clock))  # type: ignore[arg-type]
        monkeypatch.setattr(
            receipted, "newest_receipt", lambda trail, ledger, region: self.region.received or None
        )
        monkeypatch.setattr(receipted, "_received", lambda trail, received: Received(received[-1], b""))
        self.region: Region

    async def look(self, region: Region) -> Code | None:
        self.region = region
        try:
            await self._receipted.check(region, None, None)  # type: ignore[arg-type]
        except (UnavailableError, CorruptionError) as error:
            return error.code
        return None


async def test_what_is_received_in_a_session_is_not_asked_for_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, region = Agent(monkeypatch), Region(0, [])
    assert await agent.look(region) is None
    region.received.append(7)
    assert await agent.look(region) is None and not region.asked
    region.begin_session()
    region.size = 8
    assert await agent.look(region) is None
    region.received.append(30)
    assert await agent.look(region) is None and region.asked == 1


async def test_a_checkpoint_that_is_late_is_waited_for_though_more_is_received_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, region = Agent(monkeypatch), Region(5, [7])
    for _ in range(5):
        assert await agent.look(region) is Code.UNAVAILABLE
        agent.now_s += 1
        # Always a second behind.
        region.received.append(region.received[-1] + 10)
    region.size = 8
    assert await agent.look(region) is None


async def test_a_log_that_stays_behind_was_put_back_until_the_link_with_the_receipt_is_found_truncated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, region = Agent(monkeypatch), Region(5, [3, 7])
    assert await agent.look(region) is Code.UNAVAILABLE
    agent.now_s += LATE_S
    assert await agent.look(region) is Code.ROLLED_BACK
    region.received.pop()
    assert await agent.look(region) is None


def shown(leaves: list[Leaf], index: int) -> CheckpointAnswer:
    """What a log of these leaves shows of one of them."""
    data = [encode_leaf(leaf) for leaf in leaves]
    hashes = [leaf_hash(each) for each in data]

    def root(first: int, size: int) -> bytes:
        tree = Tree()
        for each in hashes[first : first + size]:
            tree.add(each)
        return tree.root()

    text = Checkpoint(REGION_ORIGIN, len(data), root(0, len(data))).text()
    note = encode_note(Note(text, (log_signer(REGION_ORIGIN).sign(text),)))
    proof = inclusion_proof(index, len(data), lambda level, at: root(at << level, 1 << level))
    return CheckpointAnswer(note, len(data), leaf=data[index], leaf_proof=proof)


def test_a_log_has_a_leaf_where_it_is_the_one_and_is_included_in_the_checkpoint_that_is_shown() -> None:
    link, leaves = Link(), list[Leaf]()
    for _ in range(6):
        leaves += link.delivery(link.intent(3))
    answer, envelope = shown(leaves, 4), leaves[4].header.envelope_sha256
    assert _has(answer, Received(4, envelope))
    replace = msgspec.structs.replace
    another = shown([*leaves[:4], *link.delivery(link.intent(3)), leaves[5]], 4)
    for lie, received in (
        (another, Received(4, envelope)),
        # The right leaf, of which the tree that is shown has none.
        (replace(another, leaf=answer.leaf, leaf_proof=answer.leaf_proof), Received(4, envelope)),
        (answer, Received(3, envelope)),
        (replace(answer, size=answer.size + 1), Received(4, envelope)),
        (replace(answer, checkpoint=b"no note"), Received(4, envelope)),
        (replace(answer, leaf=b""), Received(4, envelope)),
        (replace(answer, leaf=b"no leaf"), Received(4, envelope)),
        (replace(answer, leaf_proof=[]), Received(4, envelope)),
    ):
        assert not _has(lie, received)
