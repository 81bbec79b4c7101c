"""Rules of the protocols that can be switched off, one by one. A simulator that does not notice is none: some seed of the standard
run has to fail without each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from simulation.mesh_world import AGENT, MeshWorld
from simulation.region_world import RegionWorld
from simulation.restored_world import RestoredWorld
from simulation.switching import missed, patched
from simulation.world import FailedError, World, simulate

from audit import opening
from audit.trail import Trail
from audit.wal_disk import Recovery
from bridge import link_opening
from felix.batch import Batch
from felix.storage.memory import MemoryFiles
from keys.envelope import BatchSealer
from policy.grant import GrantBook, Standing, StandingAction
from region.cache.state import CacheState
from region.crossing import stated_link
from region.gather import Done, ignore
from region.limits.budget import Budget
from region.log import recovery
from region.log.producers import Decision, ProducerTable, Verdict
from region.queue.state import QueueState
from region.subscriptions.progress import Progress
from region.views.actor import ViewActor
from region.views.journal import Journal

SEEDS_MAX: Final = 2_000
"""So many seeds of one region may pass before a rule that is switched off must have been missed: what `make test` plays."""
MESH_SEEDS_MAX: Final = 500
"""And of two."""


class Twin(NamedTuple):
    """A world without one rule. `off` switches it off, until the patch is undone. `seed` missed it when it was last looked for
    (`make simulate TWINS=1`): it is tried first, which only saves time. None: it takes longer to find than a test may, so that only `make simulate TWINS=1` looks."""

    rule: str
    seed: int | None
    world: type[World]
    off: Callable[[pytest.MonkeyPatch], None]


class UnsyncedFiles(MemoryFiles):
    """Says that bytes are on the disk, and has not put them there."""

    def sync(self, descriptor: int) -> None:
        self.size(descriptor)


class UnsyncedNames(MemoryFiles):
    """Never makes a name durable."""

    def sync_folder(self, folder: Path) -> None:
        self.names(folder)


def answer_first(self: Journal, entry: bytes, done: Done, *, append: Any = Journal.append) -> None:
    """Says that a view's decision is kept, and keeps it later."""
    done(None)
    append(self, entry, ignore)


def confirm_unwritten(patch: pytest.MonkeyPatch) -> None:
    """A view decides once its journal was read again, and before that takes entries: what it decides until then is written nowhere."""
    replay, append = ViewActor._replay, ViewActor.append

    async def replay_and_serve(self: ViewActor) -> None:
        await replay(self)
        self._serving = True

    def append_or_forget(self: ViewActor, entry: bytes, done: Done) -> None:
        if self._reloading is not None:
            done(self.refusal())
        else:
            append(self, entry, done)

    patch.setattr(ViewActor, "_replay", replay_and_serve)
    patch.setattr(ViewActor, "append", append_or_forget)


def accept(self: ProducerTable, *asked: object, **more: object) -> Decision:
    """Takes a batch that was sent again for another one."""
    return Decision(Verdict.ACCEPT)


def lease_anew(self: QueueState, *asked: Any, lease: Any = QueueState.lease) -> None:
    """Gives each lease of a job the first one's token."""
    tracked = asked[0]
    lease(self, *asked)
    tracked.token = 1


class FallingAgentWorld(MeshWorld):
    """The agent's machine alone loses power. Among all faults of all machines the moment between an envelope and its INTENT is met by one seed in 130, here by one
    in 20: a remembered seed passes once the agent takes another turn anywhere, and another one is soon found."""

    faults = ("power",)

    @classmethod
    def targets(cls) -> tuple[str, ...]:
        return (AGENT,)


def tell_first(origin: str) -> Callable[..., int]:
    """Says that leaves are durable, and makes them so later: in the logs whose origin has this in it."""

    def append_nowait(
        self: Trail, leaves: Any, done: Any, loop: Any = None, *, append: Any = Trail.append_nowait
    ) -> int:
        if origin not in self.key.name:
            index: int = append(self, leaves, done, loop)
            return index
        first: int = append(self, leaves, lambda *_: None)
        asyncio.get_running_loop().call_soon(done, first, None)
        return first

    return append_nowait


def stand(self: GrantBook, standing: Standing, signer: str, *, take: Any = GrantBook._stand) -> None:
    """Believes every standing but a revocation."""
    if standing.action is not StandingAction.REVOKE:
        take(self, standing, signer)


def settle_lightly(self: Recovery, *, settle: Any = Recovery.settle) -> None:
    """Takes what it read for durable once a sync has returned."""
    self._unsure = None
    settle(self)


def seal_anew(self: BatchSealer, batch: Batch, *, seal: Any = BatchSealer.seal) -> Batch:
    """Seals each batch with the first one's nonce."""
    self.batches = 0
    sealed: Batch = seal(self, batch)
    return sealed


def compare_nothing(patch: pytest.MonkeyPatch) -> None:
    """Neither side compares the epochs that a source states with those that were read."""
    for module in (stated_link, link_opening):
        patch.setattr(module, "cut_of", lambda *_: None)


TWINS: Final = (
    Twin("answer after the sync", 1, RegionWorld, patched(RegionWorld, "files", UnsyncedFiles)),
    Twin("a file's name is durable", 0, RegionWorld, patched(RegionWorld, "files", UnsyncedNames)),
    Twin("producers' sequences are compared", 86, RegionWorld, patched(ProducerTable, "decide", accept)),
    Twin(
        "recovery writes again what a failed sync may have left to the page cache",
        130,
        RegionWorld,
        patched(recovery, "write_again", lambda *_: None),
    ),
    Twin(
        "a view answers once its journal is durable", 0, RegionWorld, patched(Journal, "append", answer_first)
    ),
    Twin("a view confirms nothing that is not written", 187, RegionWorld, confirm_unwritten),
    Twin(
        "each lease of a job has a token of its own", 0, RegionWorld, patched(QueueState, "lease", lease_anew)
    ),
    Twin(
        "a subscription's position is read back", 0, RegionWorld, patched(Progress, "replay", lambda *_: None)
    ),
    Twin(
        "a cache's operation that is repeated is recognised",
        1247,
        RegionWorld,
        patched(CacheState, "repeated", lambda *_: None),
    ),
    Twin(
        "what a call took of a buffer is given back", 0, RegionWorld, patched(Budget, "give", lambda *_: None)
    ),
    Twin(
        "an INTENT is durable before its envelope is sent",
        12,
        FallingAgentWorld,
        patched(Trail, "append_nowait", tell_first("/bridge/")),
    ),
    Twin(
        "an audit log's folder is durable before its first leaf",
        1,
        MeshWorld,
        patched(opening, "FOLDERS_ABOVE", 0),
    ),
    Twin(
        "an audit log writes again what a failed sync may have left to the page cache",
        73,
        MeshWorld,
        patched(Recovery, "settle", settle_lightly),
    ),
    Twin("a source's epochs are compared when a link opens", 5, RestoredWorld, compare_nothing),
    Twin("a nonce is used once", 0, MeshWorld, patched(BatchSealer, "seal", seal_anew)),
    Twin("a revoked grant is none", 2, MeshWorld, patched(GrantBook, "_stand", stand)),
)


def caught(twin: Twin, *, anew: bool = False) -> FailedError | None:
    """A seed that fails without the rule; `anew`: the first one."""
    seeds_max = SEEDS_MAX if twin.world is RegionWorld else MESH_SEEDS_MAX
    return missed(twin, lambda seed: simulate(seed, twin.world), FailedError, seeds_max, anew=anew)
