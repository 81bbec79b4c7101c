"""What one region can do to the links of others: by not answering, and by signing without end."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from signed_grants import deny_entry

from audit.errors import AuditUnavailableError
from audit.witness import MemoryWitnessStore
from bridge.cosigning import Cosigning
from bridge.documents import EgressDocuments, Paper
from bridge.ledger import Ledger
from bridge.link_worker import LinkWorker
from bridge.reasons import Reasons
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.runtime.real import REAL
from felix.tasks import end_tasks


async def no_receipts(endpoint: object) -> None:
    """The log of a region has all that it gave receipts for."""


def cosigning_of(source: SimpleNamespace, *others: SimpleNamespace) -> Cosigning:
    """Of an agent whose log nobody looks at."""
    context: Any = SimpleNamespace(
        source=source, trail=None, monotonic_ms=lambda: int(REAL.clock.monotonic() * 1000)
    )
    endpoints: Any = {each.region: each for each in (source, *others)}
    return Cosigning(
        context,
        endpoints,
        "acme",
        MemoryWitnessStore(),
        no_receipts,
        Reasons(logging.getLogger("felix.bridge.agent")),
    )


async def test_a_region_that_does_not_answer_keeps_no_other_from_cosigning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, bool]] = []

    async def cosign(_: Cosigning, witness: Any, final: bool) -> None:
        asked.append((witness.region, final))
        if witness.region == "ap-south":
            await asyncio.Event().wait()

    monkeypatch.setattr(Cosigning, "_cosign_egress", cosign)
    monkeypatch.setattr("bridge.cosigning.COSIGN_WAIT_S", 0.001)
    cosigning = cosigning_of(
        SimpleNamespace(is_up=False, region="us-east"),
        *(SimpleNamespace(is_up=True, region=region) for region in ("ap-south", "eu-west")),
    )
    for _ in range(3):
        await cosigning.round()
    assert asked == [("ap-south", False), *[("eu-west", False)] * 3]
    final = asyncio.ensure_future(cosigning.round(final=True))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(asked[4:]) == [("ap-south", True), ("eu-west", True)]
    final.cancel()
    await asyncio.wait([final])
    await cosigning.close()


async def test_a_log_that_cannot_be_cosigned_keeps_no_other_from_it_and_who_is_crowded_out_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """eu-west does not know the egress log, and its own log is asked to keep too many cosignatures; us-east's goes on."""
    asked = list[str]()
    fails: dict[str, FelixError] = {
        "egress": RequestError("The log is not one that is cosigned here.", code=Code.NOT_FOUND),
        "eu-west": UnavailableError("eu-west was asked too often.", code=Code.LIMIT_RATE),
    }

    async def cosign(what: str) -> None:
        asked.append(what)
        if what in fails:
            raise fails[what]

    monkeypatch.setattr(Cosigning, "_cosign_egress", lambda *_: cosign("egress"))
    monkeypatch.setattr("bridge.cosigning.cosign_region_log", lambda of, *_: cosign(of.region))
    cosigning = cosigning_of(
        *(SimpleNamespace(is_up=True, region=region) for region in ("us-east", "eu-west"))
    )
    await cosigning.round()
    assert asked == ["egress", "eu-west", "us-east"]
    (said,) = cosigning.troubles()
    assert "not one that is cosigned here" in said and "asked too often" in said
    fails["eu-west"] = UnavailableError("The session was lost.", code=Code.DISCONNECTED)
    del fails["egress"]
    await cosigning.round()
    assert "asked too often" in cosigning.troubles()[0], "nothing is known that is better"
    fails.clear()
    await cosigning.round()
    assert not cosigning.troubles()


async def test_an_answer_that_nobody_thought_of_keeps_no_other_log_from_being_cosigned_and_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[str]()

    async def cosign(what: str) -> None:
        asked.append(what)
        if what != "us-east":
            raise AssertionError(f"{what} said what no region says")

    monkeypatch.setattr(Cosigning, "_cosign_egress", lambda *_: cosign("egress"))
    monkeypatch.setattr("bridge.cosigning.cosign_region_log", lambda of, *_: cosign(of.region))
    cosigning = cosigning_of(
        *(SimpleNamespace(is_up=True, region=region) for region in ("us-east", "eu-west"))
    )
    await cosigning.round()
    assert asked == ["egress", "eu-west", "us-east"]
    for word in ("egress said", "eu-west said", "has failed for"):
        assert word in cosigning.troubles()[0]


async def test_documents_that_another_region_signs_without_end_wait_for_their_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.documents.FOREIGN_BURST", 3)
    now, ledger, logged = [0.0], Ledger(), list[str]()
    context: Any = SimpleNamespace(
        runtime=SimpleNamespace(clock=SimpleNamespace(monotonic=lambda: now[0])),
        source=SimpleNamespace(region="us-east"),
        ledger=ledger,
    )

    async def append(_: EgressDocuments, paper: Paper) -> bool:
        ledger.documents.add(paper.digest)
        logged.append(paper.document.region)
        return True

    monkeypatch.setattr(EgressDocuments, "_append", append)
    documents = EgressDocuments(context)
    signers = ["eu-west"] * 10 + ["us-east"] * 10 + ["ap-south"]
    documents._papers = tuple(
        Paper(deny_entry(f"acme/ops/s{number}", region), b"", b"%d" % number)
        for number, region in enumerate(signers)
    )
    assert await documents.log(lambda grant: False) == 3 + 10 + 1
    assert not documents.is_waiting, "what may not be written now is not asked for again at once"
    assert await documents.log(lambda grant: False) == 0
    now[0] += 60
    assert await documents.log(lambda grant: False) == 1
    assert logged.count("eu-west") == 4


async def test_a_document_of_which_no_leaf_can_be_made_keeps_none_behind_it_from_its_leaf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, tried = Ledger(), list[bytes]()
    context: Any = SimpleNamespace(
        runtime=SimpleNamespace(clock=SimpleNamespace(monotonic=lambda: 0.0)),
        source=SimpleNamespace(region="us-east"),
        ledger=ledger,
    )

    async def append(_: EgressDocuments, paper: Paper) -> bool:
        tried.append(paper.digest)
        if paper.digest == b"1":
            raise RequestError("bridge has 600 characters; 512 are allowed.")
        ledger.documents.add(paper.digest)
        return True

    monkeypatch.setattr(EgressDocuments, "_append", append)
    documents = EgressDocuments(context)
    documents._papers = tuple(
        Paper(deny_entry("acme/ops/*", "eu-west"), b"", digest) for digest in (b"0", b"1", b"2")
    )
    assert await documents.log(lambda grant: False) == 2
    assert not documents.is_waiting and not await documents.log(lambda grant: False)
    assert tried == [b"0", b"1", b"2"], "it is not tried again while it is listed"


class Silent:
    """A session whose destination does not answer."""

    def __init__(self, *_: object) -> None:
        self.window = None
        self.failed: list[FelixError] = []

    async def run(self, *_: object) -> None:
        await asyncio.Event().wait()

    def fail(self, error: FelixError) -> None:
        self.failed.append(error)

    def close(self) -> None:
        """There is nothing to close."""


async def test_a_region_that_does_not_answer_keeps_no_log_from_being_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All links end before it is; a request waits for up to half a minute, and one follows another."""
    monkeypatch.setattr("bridge.link_worker.LinkSession", Silent)
    monkeypatch.setattr("bridge.link_worker.INTERRUPT_S", 0.01)
    nothing: Any = SimpleNamespace(link=lambda: None)
    context: Any = SimpleNamespace(open_trail=lambda: None, source=nothing, runtime=REAL)
    row: Any = SimpleNamespace()
    worker = LinkWorker(context, nothing, row)
    stopped = UnavailableError("The egress log has stopped.")
    for _ in range(2):
        opening = asyncio.ensure_future(worker._open(row))
        await asyncio.sleep(0)
        assert worker.in_session
        async with asyncio.timeout(10):
            await worker.interrupt(stopped)
        assert not worker.in_session
        with pytest.raises(UnavailableError, match="has stopped"):
            await opening
    # An agent that ends is not an interrupted link.
    opening = asyncio.ensure_future(worker._open(row))
    await asyncio.sleep(0)
    await end_tasks(opening)
    assert opening.cancelled() and not worker.in_session
    await worker.interrupt(stopped)


async def test_a_document_whose_file_was_written_while_the_log_was_opened_again_gets_no_leaf_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would stand behind what the new ledger is read from, and get another one."""
    trail: Any = SimpleNamespace(files=None)
    context: Any = SimpleNamespace(
        runtime=REAL,
        source=SimpleNamespace(region="us-east"),
        bridge="a bridge",
        clock_ms=lambda: 1,
        ledger=Ledger(),
        trail=trail,
        failpoints=SimpleNamespace(at=lambda _: None),
    )

    def open_trail() -> Any:
        if context.trail is None:
            raise AuditUnavailableError("The egress log has stopped.")
        return context.trail

    def keep(*_: object) -> None:
        context.trail = None

    context.open_trail = open_trail
    monkeypatch.setattr("bridge.documents.keep_document", keep)
    monkeypatch.setattr("bridge.documents.signed_leaf", lambda *_, **__: SimpleNamespace(header=None))
    documents = EgressDocuments(context)
    document: Any = SimpleNamespace()
    with pytest.raises(AuditUnavailableError):
        await documents._append(Paper(document, b"file", b"digest"))
