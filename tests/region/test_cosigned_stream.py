"""What others cosigned of a region's own log, in the stream that its brokers copy: compared before it goes in, read in whatever order it stands, and
written again before it is let go of. The stream is played; the brokers' logs are real."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from audit_log import Link, log_signer, witness_signer

from audit.checkpoint import note_size
from audit.errors import AuditUnavailableError, RolledBackError
from audit.note import NoteSigner, encode_note, parse_note
from audit.trail import Trail, TrailSettings
from felix.batch import Batch, decode_payloads
from felix.errors import FelixError
from felix.runtime.real import REAL
from region.evidence import audit_log
from region.evidence.audit_log import CHECKPOINTS, CHECKPOINTS_BYTES, AuditLog, Leading, _Checkpoint

EU, AP, OUT = witness_signer(), witness_signer("ap-south.acme/witness", 7), witness_signer("w.example/w", 8)
ALL = (EU.key, AP.key, OUT.key)


class Stream:
    """Leaves, and the log of checkpoints as a broker that is home writes it."""

    def __init__(self) -> None:
        self.leaves: list[bytes] = []
        self.payloads: list[bytes] = []
        self.disk_bytes = self.begin = 0
        self.commits = asyncio.Event()
        """until it is set no checkpoint is committed; the order is that of the calls"""
        self.commits.set()

    @property
    def high_watermark(self) -> int:
        return len(self.payloads)

    async def append(self, batch: Batch) -> None:
        self.payloads += map(bytes, decode_payloads(batch))
        await self.commits.wait()

    async def trim(self, end: int) -> None:
        self.begin, self.disk_bytes = end, 0

    def put(self, note: bytes) -> None:
        """A cosigned note."""
        self.payloads.append(msgspec.msgpack.encode(_Checkpoint(note, True)))

    @property
    def cosigned(self) -> list[bytes]:
        """Cosigned notes that stand there."""
        found = [msgspec.msgpack.decode(each, type=_Checkpoint) for each in self.payloads[self.begin :]]
        return [each.note for each in found if each.cosigned]


class Broker(AuditLog):
    """One that has a copy."""

    def __init__(self, stream: Stream, path: Path, known: Iterable[Any] = ALL) -> None:
        self.stream, self.at = stream, stream.begin
        self.trail = Trail.open(
            path, log_signer(), witnesses=known, copied=True,
            settings=TrailSettings(checkpoint_interval_ms=3_600_000, checkpoint_leaves=1 << 30),
        )  # fmt: skip
        nothing = cast(Any, lambda *given: None)
        memory = SimpleNamespace(copied=dict, take_all=nothing)
        super().__init__(
            cast(Any, SimpleNamespace(incarnation="00" * 16, config=SimpleNamespace(min_in_sync=1))),
            cast(Any, SimpleNamespace(on_change=nothing)),
            nothing, self.trail, nothing, nothing, nothing,
            has_key=nothing, taken=nothing, refusal=nothing, see_log_key=nothing, may_sign=nothing, became_home=nothing, witnessed=cast(Any, memory), runtime=REAL,
        )  # fmt: skip
        self.leading = Leading(
            cast(Any, {CHECKPOINTS: stream}), REAL, cast(Any, memory), self._cosigned_notes
        )

    async def _payloads(self, kind: int) -> AsyncIterator[bytes]:
        while self.at < len(self.stream.payloads):
            self.at += 1
            yield self.stream.payloads[self.at - 1]

    async def follow(self) -> None:
        """Take what is committed."""
        await self._read_checkpoints()
        at = self.trail.status().durable
        if at < len(self.stream.leaves):
            self.trail.take(at, self.stream.leaves[at:])
            await asyncio.to_thread(self.trail.settled)
        if self._newest is not None:
            await asyncio.to_thread(self.trail.show, self._newest)
            self._newest = None
        await self._take_cosigned()

    async def lead(self) -> None:
        await self.follow()
        self.trail.lead(cast(Any, self))
        self.trail.admit()

    def append(self, first: int, leaves: Sequence[bytes], done: Callable[[FelixError | None], None]) -> None:
        assert first == len(self.stream.leaves)
        self.stream.leaves += leaves
        done(None)

    def keep_note(self, note: bytes) -> None:
        self.leading.keep_note(note)

    def keep_cosigned(self, note: bytes) -> None:
        self.leading.keep_cosigned(note)

    async def grow(self) -> bytes:
        await self.trail.append([Link().deny()])
        return await asyncio.to_thread(self.trail.publish)

    async def cosign(self, note: bytes, *by: NoteSigner) -> None:
        await asyncio.to_thread(self.trail.add_cosigned, cosigned(note, *by))

    async def let_go(self) -> None:
        """Of all that stands in the stream now."""
        self.stream.disk_bytes = CHECKPOINTS_BYTES + 1
        await self.leading.trim()
        assert self.stream.begin

    @property
    def kept(self) -> list[tuple[int, set[str]]]:
        held = self.trail.checkpoints.cosigned()
        return [(each.checkpoint.size, {by.key.name.split(".")[0] for by in each.cosigned}) for each in held]


def cosigned(note: bytes, *by: NoteSigner) -> bytes:
    parsed = parse_note(note)
    return encode_note(parsed.with_signatures([each.cosign(parsed.text, 1) for each in by]))


Make = Callable[..., Broker]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(stream: Stream, known: Iterable[Any] = ALL) -> Broker:
            broker = Broker(stream, tmp_path / str(next(numbers)), known)
            stack.enter_context(closing(broker.trail))
            return broker

        numbers = itertools.count()
        yield made


@contextmanager
def held_back(stream: Stream) -> Iterator[None]:
    stream.commits.clear()
    yield
    stream.commits.set()


async def test_an_older_cosigned_note_that_comes_later_is_not_committed_and_counts_nowhere(
    make: Make,
) -> None:
    stream = Stream()
    home, follower = make(stream), make(stream)
    await home.lead()
    old = await home.grow()
    new = await home.grow()
    await home.cosign(old, EU)
    await home.cosign(new, EU)
    committed = list(stream.payloads)
    for _ in range(3):
        await home.cosign(old, EU)
        await home.cosign(new, EU)
    assert stream.payloads == committed
    # By a home of a release that did not compare.
    stream.put(cosigned(old, EU))
    await follower.follow()
    assert home.kept == follower.kept == [(2, {"eu-west"})]


async def test_who_leads_next_has_all_that_was_cosigned_also_once_it_was_let_go_of(make: Make) -> None:
    stream = Stream()
    first, second, third = make(stream), make(stream), make(stream)
    await first.lead()
    notes = [await first.grow() for _ in range(3)]
    await first.cosign(notes[0], EU, AP, OUT)
    await first.cosign(notes[1], EU, AP)
    await first.cosign(notes[2], AP)
    every = [(3, {"ap-south"}), (2, {"eu-west", "ap-south"}), (1, {"eu-west", "ap-south", "w"})]
    assert first.kept == every
    await first.let_go()
    await second.follow()
    first.trail.follow()
    await second.lead()
    assert second.kept == every
    # The second one was not given any of them, and lets go of what the first one wrote.
    await second.grow()
    await second.let_go()
    third.at = stream.begin
    await third.follow()
    assert third.kept == every
    assert note_size(stream.cosigned[-1]) == 3, "for a release that goes by the last one"


@pytest.mark.parametrize("is_same", [True, False])
async def test_of_two_cosignatures_that_cross_none_is_lost(make: Make, is_same: bool) -> None:
    stream = Stream()
    home = make(stream)
    await home.lead()
    old, new = await home.grow(), await home.grow()
    with held_back(stream):
        crossing = [
            asyncio.create_task(home.cosign(new, EU)),
            asyncio.create_task(home.cosign(new if is_same else old, AP)),
        ]
        while not stream.cosigned:  # noqa: ASYNC110 - a thread gives it
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert len(stream.cosigned) == 1, "the second one waits to be compared with the first"
    await asyncio.gather(*crossing)
    every = [(2, {"eu-west", "ap-south"})] if is_same else [(2, {"eu-west"}), (1, {"ap-south"})]
    assert home.kept == every
    follower = make(stream)
    await follower.follow()
    assert follower.kept == every
    if is_same:
        # One record says all of it.
        late = make(Stream())
        late.stream.leaves = stream.leaves
        last = msgspec.msgpack.encode(_Checkpoint(stream.cosigned[-1], True))
        late.stream.payloads = [*(each for each in stream.payloads if not _is_cosigned(each)), last]
        await late.follow()
        assert late.kept == every


def _is_cosigned(payload: bytes) -> bool:
    return msgspec.msgpack.decode(payload, type=_Checkpoint).cosigned


@pytest.mark.parametrize("at_once", [2, 256])
async def test_in_whatever_order_they_are_read_the_same_are_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(audit_log, "COSIGNED_MAX", at_once)
    stream = Stream()
    home = make(stream)
    await home.lead()
    notes = [await home.grow() for _ in range(3)]
    brought = [
        cosigned(notes[0], EU, AP),
        cosigned(notes[1], EU),
        cosigned(notes[2], OUT),
        cosigned(notes[0], AP),
    ]
    for order in itertools.permutations(brought):
        # Before anything is shown there, so all of them are ahead of it.
        other = Stream()
        other.leaves, other.payloads = stream.leaves, list(stream.payloads)
        for note in order:
            other.put(note)
        reader = make(other)
        await reader.follow()
        assert reader.kept == [(3, {"w"}), (2, {"eu-west"}), (1, {"eu-west", "ap-south"})]


async def test_a_witness_that_is_known_only_later_has_cosigned_what_was_read_before(make: Make) -> None:
    stream = Stream()
    home = make(stream)
    await home.lead()
    note = await home.grow()
    await home.cosign(note, EU)
    new = make(stream, ())
    await new.follow()
    assert new.kept == []
    home.trail.follow()
    await new.lead()
    await new.grow()
    await new.let_go()
    new.trail.checkpoints.trust_witnesses(ALL)
    await new._take_cosigned()
    assert new.kept == [(1, {"eu-west"})]
    last = make(stream)
    last.at = stream.begin
    await last.follow()
    assert last.kept == [(1, {"eu-west"})]


async def test_a_broker_that_is_not_home_keeps_nothing_for_itself(make: Make) -> None:
    stream = Stream()
    home, other = make(stream), make(stream)
    await home.lead()
    note = await home.grow()
    await other.follow()
    with pytest.raises(AuditUnavailableError):
        await other.cosign(note, EU)
    await other.follow()
    assert other.kept == []


async def test_what_is_not_of_this_log_stops_nobody(make: Make) -> None:
    stream = Stream()
    home, follower = make(stream), make(stream)
    await home.lead()
    note = await home.grow()
    fork = parse_note(note).text.split("\n")
    fork[2] = "A" * 43 + "="
    text = "\n".join(fork)
    forged = parse_note(note)._replace(text=text, signatures=(log_signer().sign(text), EU.cosign(text, 1)))
    for each in (b"no note", encode_note(forged)):
        stream.put(each)
    await home.cosign(note, EU)
    with pytest.raises(RolledBackError):
        await asyncio.to_thread(home.trail.add_cosigned, encode_note(forged))
    await follower.follow()
    assert follower.kept == home.kept == [(1, {"eu-west"})]


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize(
    "what", ["no record", "no note", "no number", "too many digits", "unsigned", "of another log"]
)
async def test_what_is_no_checkpoint_of_the_log_stops_nobody(
    make: Make, what: str, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "OWN_MAX", 2, raising=False)
    stream = Stream()
    home, follower = make(stream), make(stream)
    await home.lead()
    note = await home.grow()
    await follower.follow()
    if behind:
        note = await home.grow()
    size = b"\n%d\n" % note_size(note)
    payload = {
        "no record": b"\xc1",
        "no note": msgspec.msgpack.encode(_Checkpoint(b"junk", False)),
        "no number": msgspec.msgpack.encode(_Checkpoint(note.replace(size, b"\nx\n", 1), False)),
        "too many digits": msgspec.msgpack.encode(_Checkpoint(b"x\n%s\n" % (b"9" * 9_999), False)),
        "unsigned": msgspec.msgpack.encode(_Checkpoint(note.replace(size, b"\n999999\n", 1), False)),
        "of another log": msgspec.msgpack.encode(
            _Checkpoint(note.replace(home.trail.key.name.encode(), b"us-east.acme/other", 1), False)
        ),
    }[what]
    for _ in range(3):
        stream.payloads.append(payload)
    if not behind:
        note = await home.grow()
    for each in (follower, make(stream)):
        await each.follow()
        assert each.trail.status().checkpoint == note_size(note)
    await follower.lead()
    await follower.grow()
    assert follower.trail.status().checkpoint == note_size(note) + 1
