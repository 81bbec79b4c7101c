"""One of several brokers is the controller, by a key in the store; whoever it is, shards are placed, and led again when brokers die."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cluster.samples import STREAM
from cluster.simulated_brokers import KEYS, LEASE_MS, Broker, Region, play
from etcd_process import EtcdProcess, etcd
from region_peer import until

from felix.runtime.real import REAL
from felix.storage.disk import DiskFiles
from felix.tasks import end_tasks
from region.cluster.controller import StreamWish
from region.cluster.controller_service import ControllerService
from region.cluster.mirror import ClusterMirror
from region.cluster.node_file import NodeFile
from region.cluster.records import Health, ShardRecord
from region.cluster.registration import Start
from region.cluster.registry import Address, Registry
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.memory import MemoryStore
from region.metadata.transaction import Change, Put, Snapshot

__all__ = ["etcd"]  # the fixture, by its name

SHARDS = 12
WISH = StreamWish(STREAM, "acme/payments/orders", shards=SHARDS, replicas=3, min=2, spread=True)
DELETED = f"{KEYS.prefix}deleted/{STREAM}"


def shards(broker: Broker) -> list[ShardRecord]:
    return [record for _, record in sorted(broker.mirror.view.shards.items())]


def controllers(region: Region) -> list[Broker]:
    return [broker for broker in region.brokers if broker.controller.term]


async def governed(region: Region, names: str = "abc") -> None:
    """Brokers that want one stream, whose shards are placed."""
    for name in names:
        await region.broker(name).govern()
    for broker in region.brokers:
        broker.controller.want([WISH], {})
    await region.until(lambda: all(len(shards(broker)) == SHARDS for broker in region.brokers))


def test_one_broker_is_the_controller_and_places_every_shard_once() -> None:
    async def scene(region: Region) -> None:
        await governed(region)
        assert len(controllers(region)) == 1
        records = shards(region.brokers[0])
        assert {record.epoch for record in records} == {1} and len(
            {record.election for record in records}
        ) == 12
        leaders = [record.leader for record in records]
        assert sorted(leaders.count(name) for name in "abc") == [4, 4, 4]

    for seed in range(4):
        play(scene, seed)


def test_whoever_is_the_controller_may_die_and_what_it_led_is_led_again_once() -> None:
    async def scene(region: Region) -> None:
        await governed(region, "abcd")
        (controller,) = controllers(region)
        name, term = controller.registry.broker, controller.controller.term
        led = [record for record in shards(controller) if record.leader == name]
        await controller.die()
        region.brokers.remove(controller)
        witness = region.brokers[0]
        await region.until(lambda: all(record.leader != name for record in shards(witness)))
        (successor,) = controllers(region)
        assert successor.controller.term > term
        epochs = [record.epoch for record in shards(witness)]
        assert sum(epoch > 1 for epoch in epochs) == len(led) and epochs.count(1) == SHARDS - len(led)

    for seed in range(4):
        play(scene, seed)


def test_a_store_that_is_away_and_comes_back_has_nobody_replaced() -> None:
    async def scene(region: Region) -> None:
        await governed(region)
        region.store.is_away = True
        await region.until(lambda: not any(broker.registry.may_answer() for broker in region.brokers))
        await asyncio.sleep(60)
        region.store.is_away = False
        await region.until(lambda: all(broker.registry.may_answer() for broker in region.brokers))
        await asyncio.sleep(3 * LEASE_MS / 1_000)
        assert {record.epoch for record in shards(region.brokers[0])} == {1} and len(controllers(region)) == 1

    play(scene)


@pytest.mark.parametrize("happened", [True, False])
def test_a_lost_answer_is_followed_by_reading_and_never_by_a_second_election(happened: bool) -> None:
    async def scene(region: Region) -> None:
        await governed(region, "abcd")
        (controller,) = controllers(region)
        victim = next(broker for broker in region.brokers if broker is not controller)
        name = victim.registry.broker
        await victim.die()
        region.brokers.remove(victim)
        await region.until(lambda: name not in controller.mirror.view.alive or region.store.loses)
        region.store.loses = [happened] * 3
        await region.until(lambda: all(record.leader != name for record in shards(controller)))
        elected = {(record.epoch, record.election) for record in shards(controller)}
        assert max(elected)[0] > 1
        await asyncio.sleep(1)
        assert {(record.epoch, record.election) for record in shards(controller)} == elected

    play(scene)


def test_a_controller_that_was_stopped_in_order_is_followed_at_once() -> None:
    async def scene(region: Region) -> None:
        await governed(region)
        (controller,) = controllers(region)
        await controller.registry.close()
        began = region.loop.time()
        await region.until(lambda: [one for one in controllers(region) if one is not controller])
        assert region.loop.time() - began < LEASE_MS / 1_000 / 2

    play(scene)


def test_shards_of_a_deleted_stream_are_forgotten_and_not_placed_again() -> None:
    async def scene(region: Region) -> None:
        await governed(region)
        mark = (await region.store.transact([], [Put(DELETED, b"{}")])).revision
        for broker in region.brokers:
            broker.controller.want([WISH], {STREAM: mark})
        await region.until(lambda: not any(shards(broker) for broker in region.brokers))
        await asyncio.sleep(1)
        assert (await MemoryStore.load(region.store, KEYS.shards)).entries == ()

    play(scene)


def test_a_drained_brokers_shards_are_given_targets_and_an_alarm_ends_with_its_reason() -> None:
    async def scene(region: Region) -> None:
        await governed(region, "abcd")
        (controller,) = controllers(region)
        victim = next(broker for broker in region.brokers if broker is not controller)
        entry = await region.store.get(KEYS.node(victim.registry.broker))
        assert entry is not None
        await region.store.transact([], [Put(entry.key, entry.value[:-1] + b',"drain":true}')])
        await region.until(lambda: any(record.target for record in shards(controller)))
        moving = [record for record in shards(controller) if record.target]
        assert all(victim.registry.broker not in record.target for record in moving)
        await region.store.transact([], [Put(KEYS.frozen, b"no record")])
        await region.until(lambda: "frozen" in controller.controller.alarms)

    play(scene)


class Process:
    """A broker on a store of its own way to etcd."""

    def __init__(self, store: EtcdStore, name: str, folder: Path) -> None:
        folder.mkdir()
        self.mirror = ClusterMirror(store, "us-east", REAL)
        self.registry = Registry(
            store,
            self.mirror,
            NodeFile(DiskFiles(), folder, REAL.random),
            Start(broker=name, host=f"h-{name}", boot="boot-1", lock=name),
            Address("h1:7443", "h1:7443"),
            lease_ms=2_000,
            runtime=REAL,
        )
        self.controller = ControllerService(
            store, self.mirror, self.registry, lambda asked: None, lease_ms=2_000, runtime=REAL
        )

    @property
    def records(self) -> list[ShardRecord]:
        return list(self.mirror.view.shards.values())


@asynccontextmanager
async def process(config: EtcdConfig, name: str, folder: Path) -> AsyncIterator[Process]:
    async with await EtcdStore.open(config) as store:
        made = Process(store, name, folder)
        await made.mirror.start()
        await made.registry.open()
        await made.registry.announce(Health(open=True))
        ticks = asyncio.ensure_future(made.controller.run())
        try:
            yield made
        finally:
            await end_tasks(ticks)
            await made.controller.close()
            await made.registry.close()
            await made.mirror.close()


@pytest.mark.etcd
async def test_on_etcd_each_of_three_controllers_that_stop_is_followed_and_no_epoch_has_two_leaders(
    etcd: EtcdProcess, tmp_path: Path
) -> None:
    config = EtcdConfig((etcd.endpoint,))
    everywhere = replace(WISH, replicas=4)
    elections: dict[tuple[object, int], set[str]] = {}
    async with AsyncExitStack() as stack:
        watcher = await stack.enter_async_context(process(config, "w", tmp_path / "w"))

        def note(_: Snapshot | Change) -> None:
            for shard, record in watcher.mirror.view.shards.items():
                elections.setdefault((shard, record.epoch), set()).add(f"{record.leader} {record.election}")

        watcher.mirror.on_change(note)
        stacks: dict[str, AsyncExitStack] = {}
        running: dict[str, Process] = {"w": watcher}
        for name in "abc":
            stacks[name] = await stack.enter_async_context(AsyncExitStack())
            running[name] = await stacks[name].enter_async_context(process(config, name, tmp_path / name))
        for one in running.values():
            one.controller.want([everywhere], {})
        await until(lambda: len(watcher.records) == SHARDS)
        for name in "abc":
            await until(lambda: any(one.controller.term for one in running.values()))
            del running[name]
            await stacks[name].aclose()
            await until(
                lambda gone=name: all(record.leader not in ("", gone) for record in watcher.records)  # type: ignore[misc]
            )
        assert {record.leader for record in watcher.records} == {"w"}
        assert all(len(found) == 1 for found in elections.values())
        assert all(record.isr["w"] == 1 for record in watcher.records)
        assert max(Counter(shard for shard, _ in elections).values()) <= 4
