"""How far a log is cosigned may be asked by every bridge, as often as it likes: what that costs, and what it does not cost others."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from audit_log import Link, key, witness_signer
from document_logs import opened

from audit.checkpoint import Checkpoint
from audit.merkle import EMPTY_ROOT, leaf_hash
from audit.note import Algorithm, Note, NoteSigner, encode_note
from audit.trail import TrailSettings
from audit.witness import MemoryWitnessStore, Witness
from felix.errors import UnavailableError
from felix.names import SpiffeId
from felix.runtime.real import REAL
from felix.storage.memory import MemoryDisk
from region.evidence.witnessing import READS_AT_ONCE, Witnessing

ORIGINS = [f"us-east.acme/bridge/b{number}" for number in range(8)]
BRIDGE = SpiffeId("us-east", "acme", "bridge", "b0")


def log_signer(origin: str) -> NoteSigner:
    return NoteSigner.from_key(origin, key(100 + ORIGINS.index(origin)), Algorithm.ED25519)


def checkpoint(signer: NoteSigner, size: int) -> bytes:
    root = leaf_hash(b"leaf") if size else EMPTY_ROOT
    text = Checkpoint(signer.key.name, size, root).text()
    return encode_note(Note(text, (signer.sign(text),)))


class Store(MemoryWitnessStore):
    """Counts who reads, and lets nobody go before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.goes = threading.Event()
        self.goes.set()

    def last(self, origin: str) -> bytes | None:
        self.reads.append(origin)
        found = super().last(origin)
        assert self.goes.wait(30)
        return found


def made() -> tuple[Store, Witnessing]:
    store = Store()
    witness = Witness(witness_signer(), [log_signer(each).key for each in ORIGINS], store, lambda: 1)
    trail = SimpleNamespace(held_back=lambda: None)
    return store, Witnessing(witness, trail, "eu-west", REAL.clock, None)  # type: ignore[arg-type]


async def test_logs_that_are_not_cosigned_here_cost_no_thread_and_no_memory() -> None:
    store, witnessing = made()
    for number in range(10_000):
        assert (await witnessing.witnessed_size(f"x.acme/{number}")).size == 0
    assert not store.reads and not witnessing._reads._turns


async def test_a_store_that_is_slow_takes_no_more_threads_however_many_ask() -> None:
    store, witnessing = made()
    store.goes.clear()
    before = threading.active_count()
    asked = [asyncio.ensure_future(witnessing.witnessed_size(ORIGINS[at % 8])) for at in range(4_000)]
    async with asyncio.timeout(120):
        while len(store.reads) < READS_AT_ONCE:  # noqa: ASYNC110 - threads give it
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert len(store.reads) == READS_AT_ONCE and threading.active_count() <= before + READS_AT_ONCE
    await asyncio.wait_for(asyncio.to_thread(lambda: None), 5)
    for each in asked[::2]:
        each.cancel()
    await asyncio.sleep(0)
    store.goes.set()
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert {each.size for each in done[1::2] if not isinstance(each, BaseException)} == {0}
    assert len(store.reads) == len(ORIGINS)
    assert not witnessing._reads._waiting


async def test_an_agent_that_opens_a_thousand_links_is_never_refused() -> None:
    store, witnessing = made()
    await witnessing.cosign(BRIDGE, checkpoint(log_signer(ORIGINS[0]), 1), [])
    store.reads.clear()
    done = await asyncio.gather(*(witnessing.witnessed_size(ORIGINS[0]) for _ in range(1_000)))
    assert {each.size for each in done} == {1} and len(store.reads) == 1


async def test_nobody_is_answered_with_what_was_true_before_the_question() -> None:
    store, witnessing = made()
    signer = log_signer(ORIGINS[0])
    await witnessing.cosign(BRIDGE, checkpoint(signer, 0), [])
    store.goes.clear()
    early = asyncio.ensure_future(witnessing.witnessed_size(ORIGINS[0]))
    await asyncio.sleep(0.1)
    store._notes[ORIGINS[0]] = checkpoint(signer, 1)
    late = asyncio.ensure_future(witnessing.witnessed_size(ORIGINS[0]))
    await asyncio.sleep(0)
    store.goes.set()
    assert ((await early).size, (await late).size) == (0, 1)


async def test_a_store_that_fails_is_told_to_all_and_asked_again() -> None:
    store, witnessing = made()
    store.last = lambda origin: 1 // 0  # type: ignore[method-assign, assignment]
    done = await asyncio.gather(
        *(witnessing.witnessed_size(ORIGINS[0]) for _ in range(5)), return_exceptions=True
    )
    assert all(isinstance(each, ZeroDivisionError) for each in done)
    del store.last
    assert (await witnessing.witnessed_size(ORIGINS[0])).size == 0


async def test_who_has_a_receipt_is_shown_a_checkpoint_of_its_leaf_or_told_that_there_is_none_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A smaller one, with nothing beside it, would say that the log was put back."""
    monkeypatch.setattr("region.evidence.witnessing.COVER_S", 0.2)
    disk = MemoryDisk()
    trail, logged = opened(disk)
    trail._settings = TrailSettings(checkpoint_interval_ms=3_600_000)
    bridge = SpiffeId("us-east", "acme", "bridge", "us-to-eu")
    witness = Witness(witness_signer(), [], MemoryWitnessStore(), lambda: 1)
    witnessing = Witnessing(witness, trail, "eu-west", REAL.clock, None)
    link = Link()

    def full(call: str, path: Path) -> None:
        if call == "open" and "tile" in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    disk.on_call = full
    await logged.append(b"first", link.grant)
    assert trail.status().durable == 1
    refused = await asyncio.gather(
        *(witnessing.checkpoint(bridge, 1, 0) for _ in range(4)), return_exceptions=True
    )
    assert all(isinstance(each, UnavailableError) for each in refused), refused
    disk.on_call = None
    async with asyncio.timeout(30):
        while trail.failure is not None:  # noqa: ASYNC110 - what is waited for is not an event
            await asyncio.sleep(0.05)
    assert (await witnessing.checkpoint(bridge, 1, 0)).size == 1
    await logged.append(b"second", link.grant)
    # Of a leaf that no checkpoint has, and of none, as before.
    assert (await witnessing.checkpoint(bridge, 1)).size == 1
    assert (await witnessing.checkpoint(bridge, 1, 7)).size == 1
    assert (await witnessing.checkpoint(bridge, 2, 1)).size == 2
    await logged.close()
    await asyncio.to_thread(trail.close)
