"""A destination that dies on the way of a range, and an agent that makes the most of it.

Nothing may be in a stream that the ingress log does not account for, whatever the agent does then: it goes on behind the
range, comes back under another grant, or not at all. The disk is copied in the very moment of a kill (what a killed process
has written is what the next one finds), some of its last bytes are cut where power was lost, and the broker starts on the copy.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from bridge_mesh import Mesh, two_regions, until
from rogue_agent import RogueAgent, Wild, granted, rogue_agent

from audit.leaf import CommitmentKey, Committer, Entry, Kind, iter_entries
from audit.trail import Trail
from felix.errors import Code
from felix.names import StreamName
from felix.runtime.real import now_ms
from keys.link import commitment_secret
from policy.grant import Standing, StandingAction, sign_standing
from region.log.ahead import AHEAD_NAMES
from region.log.shard import ShardLog
from region.metadata.catalog import Catalog
from region.metadata.embedded import EmbeddedStore


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


def shard_of(mesh: Mesh, stream: str) -> ShardLog:
    hosted = mesh.nodes["eu-west"].broker.streams.get(StreamName.parse(stream))
    assert hosted is not None
    return hosted.shard(0)


def trail_of(mesh: Mesh) -> Trail:
    return mesh.nodes["eu-west"].services.governance.trail


def _copy(source: str, target: str) -> None:
    """Other threads go on: what one of them puts in another's place meanwhile is not there any more."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


def _copy_folder(source: Path, target: Path) -> None:
    """What a file points at is written before it, so it is copied after it: no kill leaves a checkpoint behind without its tiles."""
    audit = Path("data", "audit")
    (target / audit).mkdir(parents=True)
    _copy(str(source / audit / "checkpoint"), str(target / audit / "checkpoint"))

    def checkpoint(folder: str, names: list[str]) -> set[str]:
        return {"checkpoint"} if Path(folder) == source / audit else set()

    shutil.copytree(source, target, symlinks=True, copy_function=_copy, ignore=checkpoint, dirs_exist_ok=True)


class Kill:
    """The region's folder as it is when `step` was done `times`; the broker's thread stops there until the test lets it go."""

    def __init__(self, mesh: Mesh, times: int = 1) -> None:
        self.mesh, self.times = mesh, times
        self.copy = mesh.home / "killed"
        self.taken, self._go_on = threading.Event(), threading.Event()

    @contextmanager
    def after(self, owner: Any, step: str) -> Iterator[None]:
        real: Callable[..., Any] = getattr(owner, step)

        def stopping(*arguments: Any, **more: Any) -> Any:
            result = real(*arguments, **more)
            self.times -= 1
            if not self.times:
                _copy_folder(self.mesh.eu.root, self.copy)
                self.taken.set()
                self._go_on.wait(60)
            return result

        setattr(owner, step, stopping)
        try:
            yield
        finally:
            delattr(owner, step)
            self._go_on.set()

    async def restart(self) -> None:
        """Stop the broker, and start it on what it had when it was killed."""
        self._go_on.set()
        await self.mesh.stop("eu-west")
        shutil.rmtree(self.mesh.eu.root)
        self.copy.rename(self.mesh.eu.root)
        await self.mesh.start("eu-west")


def cut(folder: Path, names: str, count: int) -> None:
    """Power was lost: the newest of these files lacks its last bytes."""
    path = max(folder.glob(names))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - count)


async def accounted(mesh: Mesh, stream: str, sent: dict[int, Wild], *agents: RogueAgent) -> int:
    """The oracle: each record of the stream has one entry in one ACK leaf at its offset, with the commitment that the link's
    key gives for what the agent sent. Read from the stream and the log's files, not by what the broker remembers."""
    high = shard_of(mesh, stream).high_watermark
    records = await mesh.read("eu-west", high, stream)
    trail_of(mesh).publish()
    entries: dict[int, tuple[str, Entry]] = {}
    for leaf in mesh.leaves(mesh.ingress_folder, Kind.ACK):
        if leaf.header.stream != stream or leaf.header.destination_first_offset is None:
            continue
        for offset, entry in enumerate(iter_entries(leaf), leaf.header.destination_first_offset):
            assert offset not in entries, f"offset {offset} has two leaves"
            entries[offset] = (leaf.header.grant_id, entry)
    assert sorted(entries) == [record.offset for record in records] == list(range(high))
    committers = {
        agent.key.scope.grant_id: Committer(
            CommitmentKey(agent.key.key_id, commitment_secret(agent.key)),
            stream,
            agent.key.scope.incarnation,
            0,
        )
        for agent in agents
    }
    for record in records:
        grant, entry = entries[record.offset]
        wild = sent[entry.offset]
        assert bytes(record.payload) == wild.payload
        assert entry.commitment == committers[grant].commit(
            entry.offset, entry.time_ms, wild.key, wild.encoded_headers(), wild.payload
        )
    return high


def numbered(first: int, count: int) -> dict[int, Wild]:
    return {at: Wild(b'{"n":%d}' % at) for at in range(first, first + count)}


async def test_whatever_a_kill_leaves_every_record_has_its_leaf(
    mesh: Mesh, tally: Callable[[str, int], None]
) -> None:
    """The broker is killed at each step of one range; the agent is never seen again, goes on, or has another grant."""
    checked = 0
    for number, (step, then) in enumerate(
        (
            ("the note is on the disk", "gone"),
            ("the note is half on the disk", "goes on"),
            ("the records are written", "gone"),
            ("the records are written", "goes on"),
            ("the records are written", "other grant"),
            ("the records are half written", "goes on"),
            ("the leaf is on the disk", "goes on"),
        )
    ):
        stream = f"acme/ops/killed-{number}"
        grant = await granted(mesh, stream=stream)
        sent = numbered(0, 2)
        async with rogue_agent(mesh, grant, stream=stream) as agent:
            await agent.open()
            await agent.cross(list(sent.values()))
            shard, kill = shard_of(mesh, stream), Kill(mesh)
            assert shard._files is not None
            owner, name = {
                "note": (shard._files.ahead, "write"),
                "records": (shard._files.disk, "sync"),
                "leaf": (trail_of(mesh)._wal, "append"),
            }[step.split()[1]]
            sent |= numbered(2, 3)
            with kill.after(owner, name):
                agent.send([sent[at] for at in (2, 3, 4)])
                await until(kill.taken.is_set, f"the kill: {step}")
                # Nobody reads what has no leaf.
                assert shard.high_watermark == 2
            folder = kill.copy / shard._files.disk.folder.relative_to(mesh.eu.root)
            if "half" in step:
                cut(folder, *(("*.seg", 9) if "records" in step else (AHEAD_NAMES[0], 9)))
                (folder / "mark").unlink()
            await kill.restart()
        landed = "note" not in step and "half" not in step
        assert shard_of(mesh, stream).high_watermark == (5 if landed else 2), step
        charged = trail_of(mesh).positions.charged_bytes(grant[0])
        assert charged == sum(wild.size for at, wild in sent.items() if at < (5 if landed else 2)), step
        assert await accounted(mesh, stream, sent, agent) == (5 if landed else 2)
        checked += 1
        if then == "gone":
            continue
        if then == "other grant":
            grant = await granted(mesh, stream=stream)
        async with rogue_agent(mesh, grant, stream=stream) as again:
            position = (await again.open()).position
            assert position == (5 if landed else 2), "the range that landed is not asked for again"
            more = numbered(position, 4)
            await again.cross(list(more.values()))
            sent |= more
            assert await accounted(mesh, stream, sent, agent, again) == position + 4
        checked += 1
    await mesh.stop("eu-west")
    report = mesh.verify_ingress()
    assert report.ok, report
    tally("streams compared with the log after a kill", checked)


async def test_with_many_ranges_on_their_way_each_has_its_leaf_once(mesh: Mesh) -> None:
    """Two links into streams of their own, 12 ranges each; the log takes none of them before the kill."""
    grants = [await granted(mesh, stream=f"acme/ops/many-{number}") for number in range(2)]
    sent = numbered(0, 12)
    agents: list[RogueAgent] = []
    async with (
        rogue_agent(mesh, grants[0], stream="acme/ops/many-0") as one,
        rogue_agent(mesh, grants[1], stream="acme/ops/many-1") as two,
    ):
        agents = [one, two]
        for agent in agents:
            await agent.open()
        kill = Kill(mesh)
        with kill.after(trail_of(mesh)._wal, "append"):
            for at, wild in sent.items():
                for agent in agents:
                    agent.send([wild], base=at)
            for number in range(2):
                await until(
                    lambda number=number: shard_of(mesh, f"acme/ops/many-{number}").durable_offset == 12,
                    "12 records",
                )
            await until(kill.taken.is_set, "the kill")
            # What the killed broker had written by now, but for the audit log, which had got no further.
            for folder in mesh.eu.root.glob("data/streams/*many*"):
                shutil.copytree(folder, kill.copy / folder.relative_to(mesh.eu.root), dirs_exist_ok=True)
        await kill.restart()
    for number, agent in enumerate(agents):
        assert await accounted(mesh, f"acme/ops/many-{number}", sent, agent) == 12
    # Once more, from the same notes: what is done is not done again.
    await mesh.stop("eu-west")
    await mesh.start("eu-west")
    for number, agent in enumerate(agents):
        assert await accounted(mesh, f"acme/ops/many-{number}", sent, agent) == 12
    await mesh.stop("eu-west")
    assert mesh.verify_ingress().ok


async def test_a_revocation_that_came_meanwhile_stands_behind_what_a_crash_had_kept_from_the_log(
    mesh: Mesh,
) -> None:
    """The grant was revoked in the store while the broker was down: the range had landed before, and both logs verify."""
    stream = "acme/ops/revoked"
    grant, sent = await granted(mesh, stream=stream), numbered(0, 3)
    async with rogue_agent(mesh, grant, stream=stream) as agent:
        await agent.open()
        await agent.cross([sent[0]])
        shard, kill = shard_of(mesh, stream), Kill(mesh)
        assert shard._files is not None
        with kill.after(shard._files.disk, "sync"):
            agent.send([sent[1], sent[2]])
            await until(kill.taken.is_set, "the kill")
        body = Standing(
            grant=grant[0], action=StandingAction.REVOKE, region="eu-west", sequence=1, at=now_ms(), by="a"
        )
        document = sign_standing(body, mesh.key("eu-west")).encode_file()
        store = await EmbeddedStore.open(kill.copy / "data" / "metadata.db")
        await Catalog(store, "eu-west").put_document("revocations", "state", f"{grant[0]}.r", document)
        await store.close()
        await kill.restart()
    trail = trail_of(mesh)
    await until(lambda: trail.status().durable == trail.status().size, "the leaves")

    def kinds() -> list[str]:
        trail.publish()
        return [
            leaf.header.kind.name
            for leaf in mesh.leaves(mesh.ingress_folder, Kind.ACK, Kind.REVOKE)
            if leaf.header.grant_id == grant[0]
        ]

    await until(lambda: "REVOKE" in kinds(), "the revocation's leaf")
    assert kinds() == ["ACK", "ACK", "REVOKE"]
    await mesh.stop("eu-west")
    report = mesh.verify_ingress()
    assert report.ok, report.findings


async def test_a_log_that_takes_no_leaf_is_asked_until_it_does_and_nobody_reads_meanwhile(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent leaves at once; what it brought stays unread, and so does what the region's own people publish behind it. Of another
    stream nothing is taken while too many leaves wait."""
    stream, behind = "acme/ops/refusing", "acme/ops/behind"
    grant, sent = await granted(mesh, stream=stream), numbered(0, 3)
    grant_behind = await granted(mesh, stream=behind)
    trail = trail_of(mesh)

    def full(*_: object) -> int:
        raise OSError("no")

    with monkeypatch.context() as patch:
        async with rogue_agent(mesh, grant, stream=stream) as agent:
            await agent.open()
            await agent.cross([sent[0]])
            patch.setattr(trail, "append_nowait", full)
            agent.send([sent[1], sent[2]])
            await until(lambda: shard_of(mesh, stream).durable_offset == 3, "the append")
        assert shard_of(mesh, stream).high_watermark == 1
        patch.setattr("region.crossing.arrivals.WAITING_BYTES_MAX", 1)
        async with rogue_agent(mesh, grant_behind, stream=behind) as agent_behind:
            await agent_behind.open()
            error = await agent_behind.refused([sent[0]])
        assert error.code is Code.LIMIT_MEMORY
        assert shard_of(mesh, behind).log_end_offset == 0
    await until(lambda: shard_of(mesh, stream).high_watermark == 3, "the leaf")
    assert await accounted(mesh, stream, sent, agent) == 3
