"""One bridge of a region asks too often, or hangs up while a commit is waited for. The others of its region, and the broker, go on.

(a) A rogue bridge that brings junk, asks for checkpoints, or brings another's checkpoints keeps no honest one of its region from doing the
same, and all of a region together have a bound. (b) However often callers hang up, one thread is taken, and no more calls wait than
otherwise.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from attacks.conftest import Tally
from attacks.test_cosigned_by_one_of_many import EU, TWELVE_NAMES, World, world
from audit_log import log_signer, witness_signer

from audit.checkpoint import Checkpoint
from audit.merkle import EMPTY_ROOT
from audit.note import Note, encode_note, parse_note
from audit.witness import MemoryWitnessStore, Witness
from felix.bounded import BoundedMap
from felix.errors import Code, FelixError, TamperError, UnavailableError
from felix.names import SpiffeId
from felix.runtime.real import REAL
from region.evidence.witnessing import ASKERS_MAX, CHECKPOINTS_BURST, SHARES, WAITING_MAX, Witnessing

STEPS_PER_S = 20


class Clock:
    """Played."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def bridge(region: str, name: str) -> SpiffeId:
    return SpiffeId(region, "acme", "bridge", name)


def witnessing_of(it: World, clock: object) -> Witnessing:
    witness = Witness(witness_signer(), [], MemoryWitnessStore(), lambda: 1)
    return Witnessing(witness, it.trail, "us-east", clock, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("region", ["us-east", "eu-west"])
def test_a_bridge_that_brings_junk_keeps_no_cosignature_of_another_one_back(
    region: str, tmp_path: Path, tally: Tally
) -> None:
    """(a): 20 notes a second, for two minutes; the honest bridge brings one every 3 s, and asks for a checkpoint as often."""

    async def play(it: World) -> int:
        clock = Clock()
        witnessing = witnessing_of(it, clock)
        rogue, honest = bridge(region, "rogue"), bridge(region, "honest")
        refused = 0
        for step in range(120 * STEPS_PER_S):
            clock.now = step / STEPS_PER_S
            with pytest.raises(FelixError) as raised:
                await witnessing.put_cosignature(rogue, b"junk")
            refused += raised.value.code is Code.LIMIT_RATE
            try:
                await witnessing.checkpoint(rogue, 0)
            except UnavailableError:
                refused += 1
            if step % (3 * STEPS_PER_S) == 0:
                note = parse_note(it.grow())
                await witnessing.checkpoint(honest, 0)
                await witnessing.put_cosignature(
                    honest, encode_note(note.with_signatures([EU.cosign(note.text, 1)]))
                )
        assert it.trail.checkpoints.cosigned_size == it.trail.checkpoints.newest.size
        return refused

    with world(tmp_path, TWELVE_NAMES[:1]) as it:
        tally("calls of a rogue bridge beside an honest one", asyncio.run(play(it)))


def test_a_bridge_that_brings_the_log_of_another_one_keeps_nobody_from_cosigning_it(
    tally: Tally,
) -> None:
    """(a), where a region cosigns: the rogue brings the honest one's log."""
    log = log_signer()
    text = Checkpoint(log.key.name, 0, EMPTY_ROOT).text()
    note = encode_note(Note(text, (log.sign(text),)))

    async def play() -> int:
        clock = Clock()
        witness = Witness(witness_signer(), [log.key], MemoryWitnessStore(), lambda: 1)
        trail = SimpleNamespace(held_back=lambda: None)
        witnessing = Witnessing(witness, trail, "eu-west", clock, None)  # type: ignore[arg-type]
        refused = 0
        for step in range(60 * STEPS_PER_S):
            clock.now = step / STEPS_PER_S
            try:
                await witnessing.cosign(bridge("us-east", "rogue"), note, [])
            except UnavailableError:
                refused += 1
            if step % (3 * STEPS_PER_S) == 0:
                assert (await witnessing.cosign(bridge("us-east", "honest"), note, [])).size == 0
        return refused

    tally("checkpoints brought by a rogue bridge beside an honest one", asyncio.run(play()))


def test_all_bridges_of_a_region_together_have_a_bound_and_their_paces_take_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(a): a region makes itself as many bridges as it likes."""
    paces = list[BoundedMap[str, object]]()
    made: Callable[..., None] = BoundedMap.__init__

    def counted(bounded: BoundedMap[str, object], most: int, **rest: object) -> None:
        made(bounded, most, **rest)
        paces.append(bounded)

    async def play(it: World) -> int:
        monkeypatch.setattr(BoundedMap, "__init__", counted)
        witnessing = witnessing_of(it, Clock())
        taken = 0
        for number in range(ASKERS_MAX + 100):
            try:
                await witnessing.checkpoint(bridge("eu-west", f"b{number}"), 0)
                taken += 1
            except UnavailableError as error:
                assert error.retry_after_ms
        await witnessing.checkpoint(bridge("ap-south", "b"), 0)
        return taken

    with world(tmp_path, TWELVE_NAMES[:1]) as it:
        it.grow()
        assert asyncio.run(play(it)) == SHARES * CHECKPOINTS_BURST
    assert max(map(len, paces)) == ASKERS_MAX


def test_callers_that_hang_up_leave_one_thread_and_no_more_calls_than_may_wait(
    tmp_path: Path, tally: Tally
) -> None:
    """(b): the trail's lock is held, as while a commit is waited for."""

    async def play(it: World) -> int:
        witnessing = witnessing_of(it, REAL.clock)
        rogue, calls = bridge("ap-south", "rogue"), CHECKPOINTS_BURST - WAITING_MAX - 2
        note = parse_note(it.grow())
        good = encode_note(note.with_signatures([TWELVE_NAMES[0].cosign(note.text, 1)]))
        before = threading.active_count()
        with it.trail._cosigned_lock:
            for _ in range(calls):
                call = asyncio.ensure_future(witnessing.put_cosignature(rogue, good))
                await asyncio.sleep(0.01)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert threading.active_count() <= before + 1
            await asyncio.wait_for(asyncio.to_thread(lambda: None), 5)
            # The one whose thread runs counts still.
            crowd = [
                asyncio.ensure_future(witnessing.put_cosignature(rogue, good)) for _ in range(WAITING_MAX)
            ]
            await asyncio.sleep(0.01)
            (refused,) = (each for each in crowd if each.done())
            assert isinstance(refused.exception(), UnavailableError)
        done = await asyncio.gather(*crowd, return_exceptions=True)
        assert [each for each in done if each is not None] == [refused.exception()]
        # All is given back: the turn, and the places in the line.
        assert not witnessing._keeping.locked() and not witnessing._bringing._waiting
        assert it.trail.checkpoints.cosigned_size == it.trail.checkpoints.newest.size
        with pytest.raises(TamperError):
            await witnessing.put_cosignature(rogue, b"junk")
        assert not witnessing._keeping.locked() and not witnessing._bringing._waiting
        return calls

    with world(tmp_path, TWELVE_NAMES[:1]) as it:
        tally("calls whose callers hang up", asyncio.run(play(it)))
