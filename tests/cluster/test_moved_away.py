"""What is left on a broker of a shard that its record names it for no more: what goes, and what does not yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from felix.bounded import BoundedMap
from felix.names import StreamName
from region.cluster.records import ShardId, ShardRecord
from region.copies.replicas import Replicas
from region.log.companions import RECORDS

STREAM = "acme/ops/orders"
SHARD = ShardId("ab" * 16, 0)
RECORD = ShardRecord(
    stream=STREAM, epoch=3, election="0" * 16, leader="b1", replicas=("b1", "b2"), isr={"b1": 1, "b2": 1}, min=2
)  # fmt: skip


class Leftover:
    """The copies of a broker, b3, that found something of the shard when it started."""

    def __init__(self) -> None:
        self.revisions: dict[str, int] = {}
        self.deleted: list[Path] = []
        keys = SimpleNamespace(frozen="frozen")
        view = SimpleNamespace(
            keys=keys, shards={SHARD: RECORD}, revision_of=lambda key: self.revisions.get(key, 0)
        )
        replicas: Any = Replicas.__new__(Replicas)
        replicas._member = SimpleNamespace(broker="b3", mirror=SimpleNamespace(view=view))
        replicas.host = SimpleNamespace(replica=lambda shard: None, shards=[])
        replicas._folders = SimpleNamespace(
            copies=Path("/copies"), shard_folder=self._folder, delete_copy=self._delete
        )
        replicas._changing = {}
        replicas._found, replicas._adopted, replicas._wanted = {SHARD}, set(), set()
        replicas._forgotten = BoundedMap(1)
        replicas._compact_after_ms, replicas._offload_after_ms, replicas._offload_seen = {}, {}, {}
        self.replicas = replicas

    @staticmethod
    def _folder(name: StreamName, incarnation: bytes, number: int) -> Path:
        return Path("/streams") / str(number)

    async def _delete(self, folders: Sequence[Path], kept: Sequence[Path]) -> None:
        self.deleted += folders

    async def look(self) -> None:
        stream = SimpleNamespace(name=STREAM, incarnation=SHARD.incarnation, config=SimpleNamespace(shards=1))
        await self.replicas._open_copies(stream, (RECORDS,))


async def test_nothing_is_deleted_while_the_region_is_frozen() -> None:
    """Its store was put back from before the shard moved here: those that the record names may have none of it any more."""
    left = Leftover()
    left.revisions["frozen"] = 9
    await left.look()
    assert not left.deleted
    assert left.replicas._wanted == {STREAM}, "it is looked at again"
    left.revisions.clear()
    await left.look()
    assert left.deleted


async def test_a_copy_that_is_open_stays_where_it_has_seen_that_the_store_went_back() -> None:
    left = Leftover()
    host = left.replicas.host
    fence = SimpleNamespace(frozen="the store was at revision 9 and is at 5: it went back")
    host.replica = lambda shard: SimpleNamespace(fence=fence)
    host.is_used, host.plans = lambda shard: False, lambda shard: []

    async def remove(shard: ShardId) -> None:
        host.replica = lambda shard: None

    host.remove = remove
    await left.look()
    assert host.replica(SHARD) is not None
    fence.frozen = ""
    left.replicas._compact_after_ms[SHARD] = left.replicas._offload_after_ms[SHARD] = 60_000
    await left.look()
    assert host.replica(SHARD) is None, "it has moved away"
    assert not left.replicas._compact_after_ms and not left.replicas._offload_after_ms, "when it comes again"


async def test_a_damaged_log_that_was_set_aside_goes_with_the_copy() -> None:
    left = Leftover()
    await left.look()
    assert {path.name for path in left.deleted} == {"0", "0.damaged"}
