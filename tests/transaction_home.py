"""Transactions over real logs without a network: a broker's parts, opened and closed as a node does, and crashed on purpose."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from runtimes import with_wall

from felix.address import Address
from felix.batch import Batch, NewRecord, decode_batch, decode_records, encode_batch
from felix.frames import FRAME_HEADER_BYTES
from felix.names import SpiffeId, StreamName
from felix.storage.disk import DiskFiles
from felix.storage.port import Files
from felix.transaction_messages import TRANSACTIONS_STREAM
from felix.transport.port import TransportLimits
from region.broker import Broker
from region.config import LimitsConfig, RegionConfig
from region.limits.budget import Budgets
from region.log.directory import LogDirectory
from region.log.ring import Entry
from region.log.shard import ShardLog
from region.metadata.catalog import Catalog
from region.metadata.memory import MemoryStore
from region.metadata.records import StreamConfig
from region.streams.table import StreamTable
from region.transactions.coordinator import Coordinator

OWNER = SpiffeId("us-east", "acme", "operator", "operator")
OTHER = SpiffeId("us-east", "acme", "client", "other")


def payloads_of(entry: Entry) -> list[bytes]:
    """Of one entry as it is delivered."""
    return [bytes(record.payload) for record in decode_records(decode_batch(entry.data[FRAME_HEADER_BYTES:]))]


class Plain:
    """A stream that is kept unsealed: what the seal does is the keyring's tests."""

    def seal(self, batch: Batch) -> Batch:
        return batch

    def open_batch(self, batch: Batch) -> Batch:
        return batch

    def commitment(self) -> bytes:
        return b""

    def tag(self, purpose: str, data: bytes) -> bytes:
        return b""


class Crash(Exception):
    """The process ends here."""


@dataclass
class Home:
    """What outlives a process: the metadata store and the folder. `open` is a start, `close` a stop or a crash."""

    folder: Path
    files: Files = field(default_factory=DiskFiles)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    store: MemoryStore = field(default_factory=MemoryStore)
    crash_at: tuple[str, int] | None = None
    crashed: bool = False
    clock: int = 1_700_000_000_000

    async def open(self) -> None:
        self.crashed = False
        config = RegionConfig(
            region="us-east",
            mesh="acme",
            country="US",
            listen=Address("127.0.0.1", 0),
            operators=["operator"],
        )
        config = msgspec.structs.replace(config, limits=self.limits)
        self.budgets = Budgets()
        self.directory = LogDirectory(self.folder / "streams", "us-east", files=self.files)
        self.streams = StreamTable(self.directory, self.budgets.ring, lambda *_: Plain())
        self.catalog = Catalog(self.store, "us-east")
        self.broker = Broker(
            config,
            streams=self.streams,
            catalog=self.catalog,
            budgets=self.budgets,
            transport_limits=TransportLimits(),
            runtime=with_wall(lambda: self.clock),
        )
        self.coordinator = Coordinator(self.broker, {}, step=self._step)
        found = {record.name: record for record in await self.catalog.list_streams()}
        system = found.pop(str(TRANSACTIONS_STREAM), None)
        if system is not None:
            await self.streams.open(system)
        await self.coordinator.start(self.streams)
        for record in found.values():
            await self.streams.open(record)
        await self.coordinator.started()

    def _step(self, step: str) -> None:
        if self.crash_at is None or self.crashed:
            return
        name, left = self.crash_at
        if name == step:
            self.crash_at = (name, left - 1)
            if left <= 1:
                self.crash_at = None
                self.crashed = True
                raise Crash(step)

    async def close(self, *, crash: bool = False) -> None:
        if not crash:
            await self.coordinator.close()
        elif self.coordinator.applier.task is not None:
            self.coordinator.applier.task.cancel()
        await self.streams.close()
        await self.directory.close()

    async def create(self, name: str, shards: int = 1, **config: object) -> None:
        await self.broker.create_stream(StreamName.parse(name), StreamConfig(shards=shards, **config))  # type: ignore[arg-type]

    def shard(self, name: str, number: int = 0) -> ShardLog:
        hosted = self.streams.get(StreamName.parse(name))
        assert hosted is not None
        return hosted.shard(number)

    async def records(self, name: str, number: int = 0) -> list[bytes]:
        """What a reader sees."""
        shard = self.shard(name, number)
        found: list[bytes] = []
        offset = shard.log_start_offset
        while offset < shard.high_watermark:
            for entry in await shard.read(offset, 1 << 20):
                found += payloads_of(entry)
                offset = entry.next_offset
        return found

    async def publish(self, name: str, *payloads: bytes, shard: int = 0) -> None:
        await self.shard(name, shard).append(
            encode_batch([NewRecord(each) for each in payloads], shard=shard)
        )

    # -- a client's calls

    def begin(
        self, *, owner: SpiffeId = OWNER, timeout_ms: int = 30_000, transactional_id: str = "", epoch: int = 0
    ) -> bytes:
        made = os.urandom(16)
        self.coordinator.open.begin(owner, made, timeout_ms, transactional_id, epoch)
        return made

    def stage(
        self, transaction: bytes, index: int, name: str, *payloads: bytes, shard: int = 0, owner: SpiffeId = OWNER,
        headers: dict[str, bytes] | None = None, epoch: int = 0,
    ) -> None:  # fmt: skip
        records = [NewRecord(each, None, headers) for each in payloads]
        batch = encode_batch(records, shard=shard, producer_epoch=epoch)
        self.coordinator.open.stage(owner, transaction, index, name, b"", batch.encode())
