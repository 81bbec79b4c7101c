"""`felix region up NAME --brokers N`: several brokers and their etcd as processes under one parent."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from cluster.processes import kill, own_places, process_of, running, several, write_cluster
from e2e.command_mesh import felix_command
from etcd_process import EtcdProcess, etcd_binary, running_etcd
from long_runs import count
from region_home import make_region
from region_peer import client, until

from cli import operate
from cli import several as cli_several
from cli.process import FAILURE
from cli.setting import run
from cli.several import (
    ETCD_FOLDER,
    Etcd,
    _Broker,
    _Child,
    _Family,
    are_all_here,
    make_cluster,
    scaled,
    start_etcd,
    was_retired,
)
from felix.address import Address
from felix.backoff import BackoffPolicy
from felix.client import RegionClient
from felix.errors import Code, RequestError, UnavailableError
from felix.messages import BrokerState, RegionState
from felix.names import StreamName
from felix.profile import load_profile
from felix.runtime.real import REAL
from felix.storage.disk import PRIVATE_FILES
from region.bootstrap import write_profile
from region.cluster.node_file import NAME as NODE
from region.cluster.node_file import NodeFile
from region.config import RegionConfig, load_config
from region.folder import RegionFolder

COUNT = 3
CONTROLLERS_KILLED = count(1, 50)


def free_address(port: int, taken: list[Address], kind: socket.SocketKind) -> Address:
    """The first that none of the others has."""
    while port in {address.port for address in taken}:
        port += 1
    return Address("127.0.0.1", port)


def test_brokers_and_an_etcd_of_their_own_are_written_down_once(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    made = make_cluster(folder, load_config(folder.config), COUNT, free_address)
    assert made == load_config(folder.config) == make_cluster(folder, made, COUNT, free_address)
    assert made.cluster is not None
    assert [each.id for each in made.cluster.brokers] == ["b1", "b2", "b3"]
    assert len({each.listen for each in made.cluster.brokers}) == COUNT
    assert made.metadata.kind == "etcd" and (folder.root / ETCD_FOLDER).is_dir()
    with pytest.raises(RequestError, match="names 3 brokers, and --brokers 2"):
        make_cluster(folder, made, 2, free_address)
    with pytest.raises(RequestError, match="says replicas: 0 of new streams, and --replicas 3"):
        make_cluster(folder, made, COUNT, free_address, 3)


def test_the_copies_of_new_streams_are_written_down_and_are_no_more_than_brokers(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    with pytest.raises(RequestError, match="replicas is 3, and there are 2 brokers"):
        make_cluster(folder, load_config(folder.config), 2, free_address, 3)
    made = make_cluster(folder, load_config(folder.config), COUNT, free_address, 3)
    assert made == load_config(folder.config) == make_cluster(folder, made, COUNT, free_address, 3)
    assert made.cluster is not None and made.cluster.replicas == 3


def test_an_etcd_that_is_named_is_used(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    text = folder.config.read_text().replace("kind: embedded", 'kind: etcd\n  endpoints: ["10.0.0.1:2379"]')
    folder.config.write_text(text)
    made = make_cluster(folder, load_config(folder.config), 2, free_address)
    assert made.metadata.endpoints == ("10.0.0.1:2379",) and not (folder.root / ETCD_FOLDER).exists()


def test_all_brokers_are_started_again_with_an_etcd_that_is_named_unless_one_is_this_machines(
    tmp_path: Path,
) -> None:
    folder = make_region(tmp_path, "us-east")
    with running_etcd(tmp_path) as etcd:
        endpoint = etcd.endpoint.removeprefix("http://")
        text = folder.config.read_text().replace("kind: embedded", f'kind: etcd\n  endpoints: ["{endpoint}"]')
        folder.config.write_text(text)
        for words in (("--brokers", "2"), ()):
            felix_command(tmp_path, "region", "up", "us-east", *words, "--detach")
            try:
                shown = felix_command(tmp_path, "region", "status", "us-east", "--json")
                brokers = json.loads(shown.out)["items"][0]["brokers"]
                assert [each["broker"] for each in brokers if each["address"]] == ["b1", "b2"], words
            finally:
                felix_command(tmp_path, "region", "down", "us-east")
    made = load_config(folder.config)
    assert are_all_here(folder, made) and made.cluster is not None
    elsewhere = msgspec.structs.replace(made.cluster.brokers[1], listen=Address("10.0.0.2", 7443))
    apart = msgspec.structs.replace(made.cluster, brokers=(made.cluster.brokers[0], elsewhere))
    assert not are_all_here(folder, msgspec.structs.replace(made, cluster=apart))
    folder.config.write_text(f"broker: b2\n{folder.config.read_text()}")
    assert not are_all_here(folder, load_config(folder.config))


def test_a_broker_that_is_started_by_itself_names_all_that_region_yaml_names_in_the_profile(
    tmp_path: Path,
) -> None:
    folder, places = make_region(tmp_path, "us-east"), own_places(2)
    with running_etcd(tmp_path) as etcd:
        write_cluster(folder, [etcd.endpoint.removeprefix("http://")], places)
        write_profile(folder, "us-east", "acme", Address("127.0.0.1", 9))
        felix_command(tmp_path, "region", "up", "us-east", "--broker", "b1", "--detach")
        try:
            assert load_profile("us-east", home=tmp_path).addresses == tuple(places.values())
        finally:
            felix_command(tmp_path, "region", "down", "us-east")


def test_a_region_that_one_broker_served_is_not_begun_anew(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    (folder.root / "data" / "streams").mkdir(parents=True)
    before = folder.config.read_text()
    with pytest.raises(RequestError, match="was served by one broker"):
        make_cluster(folder, load_config(folder.config), 2, free_address)
    assert folder.config.read_text() == before


class _Restless(_Broker):
    """Its process ends at once, until it is let stay."""

    stays = serving = False
    starts = 0

    async def start(self) -> None:
        self.starts += 1
        said = self._folder.run / "b1.log"
        self.serving = self.stays
        ends = f"import sys; print({FAILURE + 'There is no disk.'!r}); sys.exit(3)"
        stays = "import signal; signal.pause()"
        command = [sys.executable, "-S", "-c", stays if self.serving else ends]
        self.child = await _Child.start(command, "Broker b1", said)

    def _is_serving(self) -> bool:
        return self.serving


@pytest.mark.parametrize(
    ("on_the_path", "wheel", "warned"),
    [(None, "3.5.1", True), (None, "3.5.3", False), ("/bin/etcd", "3.5.1", False)],
)
def test_who_gets_an_etcd_that_can_lose_consistency_is_told(
    monkeypatch: pytest.MonkeyPatch, on_the_path: str | None, wheel: str, warned: bool
) -> None:
    monkeypatch.setattr(cli_several.shutil, "which", lambda name: on_the_path)
    monkeypatch.setattr(cli_several, "version", lambda name: wheel)
    assert ("Upgrade to etcd 3.5.3" in cli_several.etcd_warning()) is warned


async def test_a_broker_that_cannot_start_is_tried_more_seldom_and_spoken_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def at_once(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    caplog.set_level(logging.WARNING, "felix.cli.several")
    monkeypatch.setattr(cli_several, "LOG_BYTES_MAX", 40)
    policy = BackoffPolicy(first_ms=10, ceiling_ms=1_000)
    monkeypatch.setattr(cli_several, "RESTARTS", policy)
    broker = _Restless(RegionFolder.of("us-east", tmp_path), "b1")
    await broker.start()
    with monkeypatch.context() as quick:
        quick.setattr(asyncio, "sleep", at_once)
        keeping = asyncio.ensure_future(broker.keep())
        while broker.starts < 9:
            await sleep(0.01)
        broker.stays = True
        while not any("serves again" in record.message for record in caplog.records):
            await sleep(0.01)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    broker.child.process.kill()
    await broker.child.process.wait()
    said = [record.getMessage() for record in caplog.records]
    assert [each.split(";")[0] for each in said] == [
        "Broker b1 ended with 3 and is started again",
        "Broker b1 ended before it served: There is no disk. It is tried again until it serves, at most every 1 s",
        "Broker b1 serves again.",
    ]
    assert waits[0] <= policy.first_ms / 1_000 and max(waits) >= 0.5, "longer and longer"
    assert max(waits) <= policy.ceiling_ms / 1_000
    # What they said is bounded, too: the last part, and one before it.
    assert {each.name for each in broker.child.said.parent.iterdir()} == {"b1.log", "b1.log.1"}
    assert broker.child.said.stat().st_size < 80


class _Killed(_Restless):
    """It serves at once, and is killed whenever it has served for as long as it was waited for."""

    stays = True

    async def _settles(self, seconds: float) -> bool:
        settles = await super()._settles(seconds)
        self.child.process.kill()
        return settles


async def test_a_broker_that_serves_and_is_killed_again_and_again_is_started_again_each_time_as_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def at_once(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    policy = BackoffPolicy(first_ms=10, ceiling_ms=1_000)
    monkeypatch.setattr(cli_several, "RESTARTS", policy)
    broker = _Killed(RegionFolder.of("us-east", tmp_path), "b1")
    await broker.start()
    with monkeypatch.context() as quick:
        quick.setattr(asyncio, "sleep", at_once)
        keeping = asyncio.ensure_future(broker.keep())
        while broker.starts < 9:
            await sleep(0.01)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    with suppress(ProcessLookupError):  # it may be between two lives
        broker.child.process.kill()
    await broker.child.process.wait()
    assert len(waits) >= 8 and max(waits) <= policy.first_ms / 1_000


class _Idle(_Broker):
    """Its process does nothing, and the third one's cannot be started for want of memory, say."""

    fails = True

    async def start(self) -> None:
        if self._broker == "b3" and _Idle.fails:
            raise OSError("Cannot allocate memory")
        command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
        self.child = await _Child.start(
            command, self._broker, cli_several.log_file(self._folder, self._broker)
        )

    def _is_serving(self) -> bool:
        return True


async def test_a_broker_that_region_yaml_names_and_that_cannot_be_started_holds_up_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cli_several, "_Broker", _Idle)
    monkeypatch.setattr(cli_several, "FOLLOW_S", 0.01)
    monkeypatch.setattr(_Idle, "fails", True)
    folder = make_region(tmp_path, "us-east")
    config = make_cluster(folder, load_config(folder.config), 2, free_address)
    family = _Family(folder)
    await family.begin(["b1", "b2"])
    following = asyncio.ensure_future(family.follow())
    try:
        config = scaled(folder, config, 3, free_address)
        await until(lambda: "Cannot allocate memory" in caplog.text)
        config = scaled(folder, config, 1, free_address)
        await until(lambda: set(family._brokers) == {"b1"})
        monkeypatch.setattr(_Idle, "fails", False)
        scaled(folder, config, 3, free_address)
        await until(lambda: set(family._keeping) == {"b1", "b2", "b3"})
        children = [broker.child for broker in family._brokers.values()]
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await family.end()
    assert [child.process.returncode for child in children] == [-signal.SIGTERM] * 3


class _Slow(_Idle):
    """It runs, and b2 does not serve."""

    def _is_serving(self) -> bool:
        return self._broker != "b2"


async def test_a_broker_that_takes_too_long_is_named_while_the_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_several, "_Broker", _Slow)
    monkeypatch.setattr(cli_several, "OTHERS_S", 0.2)
    family = _Family(make_region(tmp_path, "us-east"))
    try:
        failed = await family.begin(["b1", "b2"])
        assert {name: each.sentence for name, each in failed.items()} == {
            "b2": "b2 did not serve within 0 s."
        }
        assert set(family._keeping) == {"b1", "b2"}
    finally:
        await family.end()


async def test_where_no_broker_starts_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_several, "_Broker", _Restless)
    family = _Family(make_region(tmp_path, "us-east"))
    with pytest.raises(UnavailableError, match="There is no disk"):
        await family.begin(["b1", "b2"])
    assert not family._keeping
    await family.end()


@pytest.mark.etcd
async def test_another_etcd_in_the_place_of_the_regions_own_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = several(tmp_path, 2)
    config = load_config(folder.config)
    (tmp_path / "other").mkdir()
    other = EtcdProcess(tmp_path / "other")
    other.endpoint = f"http://{config.metadata.endpoints[0]}"
    other.start()
    try:
        monkeypatch.setattr(cli_several, "OWN_ETCD_ENDS_S", 0.1)
        with pytest.raises(
            RequestError, match=r"where the etcd of us-east listens, is taken by process \d+ \(etcd\)"
        ) as refused:
            await start_etcd(folder, config)
        assert str(folder.config) in refused.value.hint
        # It is there a moment after nobody was.
        monkeypatch.setattr(Etcd, "require_address", _nothing)
        with pytest.raises(UnavailableError, match="The etcd of us-east ended before it served"):
            await start_etcd(folder, config)
    finally:
        other.stop()
    etcd = await start_etcd(folder, config)
    await etcd.end()


async def _nothing(_: object) -> None:
    pass


@pytest.mark.etcd
@pytest.mark.fault
async def test_brokers_whose_folder_is_lost_or_older_keep_the_others_from_nothing_and_get_new_ones(
    tmp_path: Path,
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    folder = several(tmp_path, COUNT)
    data = folder.root / "data"

    async def up(*words: str, code: int = 0) -> str:
        said = await asyncio.to_thread(
            felix_command, tmp_path, "region", "up", "us-east", *words, "--detach", code=code
        )
        return " ".join(said.err.split())

    async with running(folder), client(folder) as operator:
        await operator.create_stream("acme/ops/orders", replicas=3)
        await operator.stream("acme/ops/orders").publish(b"x")
    for broker in ("b1", "b2", "b3"):
        shutil.copytree(data / broker, tmp_path / "older" / broker)
    await up()
    parent = psutil.Process(json.loads((folder.run / "broker.pid").read_text())["pid"])
    family = [parent, *parent.children(recursive=True)]
    async with client(folder) as operator:
        await until(lambda: all_are_in_sync(operator))
        brokers = (await operator.describe()).brokers
    # Two folders are lost of three copies, of which two are enough: the third stays eligible where it led nothing. A leader that is back before the leases of
    # the others have ended is followed by one of these, which could commit without it.
    survivor = next(each.broker for each in brokers if not each.leads and not each.has_audit_log)
    lost, old = (each.broker for each in brokers if each.broker != survivor)
    # Killed all at once: whoever is stopped in order last would be the only one known to have all that is committed.
    # The parent is suspended first: it would start them again, and its death has the kernel ask them to stop in order.
    parent.suspend()
    for process in reversed(family):
        process.kill()
    assert not (await asyncio.to_thread(psutil.wait_procs, family, 60))[1]
    # The machine comes back without one folder, and with a backup of another.
    shutil.rmtree(data / lost)
    shutil.rmtree(data / old)
    (tmp_path / "older" / old).rename(data / old)
    said = await up("--broker", lost, "--replace-folder", code=4)
    assert "The etcd of us-east does not run" in said and "felix region up us-east" in said
    said = await up(code=4)
    parent = psutil.Process(json.loads((folder.run / "broker.pid").read_text())["pid"])
    family = [parent, *parent.children(recursive=True)]
    try:
        assert (
            f"Broker {lost} had another data folder" in said and f"--broker {lost} --replace-folder" in said
        )
        assert (
            f"The data folder of broker {old} is an older copy" in said
            and "move this one out of data/" in said
        )
        assert "The other brokers serve" in said
        assert [each.broker for each in brokers if process_of(folder, each.broker) > 0] == [survivor]
        await asyncio.to_thread(felix_command, tmp_path, "region", "ready", "us-east", code=4)
        (data / old).rename(tmp_path / "older" / old)
        for broker in (lost, old):
            await up("--broker", broker, "--replace-folder")
        async with client(folder) as operator:
            assert await operator.stream("acme/ops/orders").publish(b"y") == 1
            await until(lambda: all_are_in_sync(operator))
        strays = [psutil.Process(process_of(folder, broker)) for broker in (lost, old)]
        assert parent not in {each.parent() for each in strays}
        # Whoever started it, it is of this machine's set: started again where it ends, and stopped with the others.
        strays[0].kill()
        await until(lambda: process_of(folder, lost) not in (0, strays[0].pid))
        assert psutil.Process(process_of(folder, lost)).parent() == parent
        family += [*strays, *parent.children(recursive=True)]
    finally:
        await asyncio.to_thread(felix_command, tmp_path, "region", "down", "us-east", code=None)
        left = (await asyncio.to_thread(psutil.wait_procs, family, 60))[1]
        for process in left:
            process.kill()
    assert not left
    async with running(folder):
        pass


@pytest.mark.etcd
@pytest.mark.fault
@pytest.mark.timeout(1800)
async def test_the_controller_is_killed_and_every_stream_stays_where_it_was_led_once_per_epoch(
    tmp_path: Path,
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    folder = several(tmp_path, COUNT)
    felix_command(tmp_path, "region", "up", "us-east", "--detach")
    parent = psutil.Process(json.loads((folder.run / "broker.pid").read_text())["pid"])
    family = [parent, *parent.children(recursive=True)]
    try:
        async with client(folder) as operator:
            names = [f"acme/ops/s{number}" for number in range(2 * COUNT)]
            for name in names:
                await operator.create_stream(name)
                assert await operator.stream(name).publish(b"before") == 0
            state = await operator.describe()
            before = leaders(state)
            assert sorted(before.values()) == [2, 2, 2]
            epochs = await epochs_of(operator, names)
            for number in range(1, CONTROLLERS_KILLED + 1):
                state = await operator.describe()
                (killed,) = (each.broker for each in state.brokers if each.is_controller)
                await kill(folder, killed)
                for name in names:
                    async with operator.stream(name).publisher() as publisher:
                        assert await publisher.publish(b"after") == number
                now = await epochs_of(operator, names)
                # The two that the killed broker led were elected once more; the number of an epoch is drawn by chance.
                assert sorted(now[name] > epochs[name] for name in names) == [False] * 4 + [True] * 2
                assert leaders(await operator.describe()) == before
                epochs = now
        felix_command(tmp_path, "region", "down", "us-east")
        for broker in before:
            streams = folder.root / "data" / broker / "streams"
            felix_command(tmp_path, "log", "verify", "--open", "--data", str(streams))
    finally:
        felix_command(tmp_path, "region", "down", "us-east", code=None)
        left = psutil.wait_procs(family, timeout=60)[1]
        for process in left:
            process.kill()
    assert not left


async def all_are_in_sync(operator: RegionClient) -> bool:
    """Of the three brokers' audit log and one stream of three copies."""
    return [each.in_sync for each in (await operator.describe()).brokers] == [2, 2, 2]


async def epochs_of(operator: RegionClient, names: list[str]) -> dict[str, int]:
    return {
        name: (await operator.describe_stream(StreamName.parse(name))).state[0].leader_epoch for name in names
    }


def leaders(state: RegionState) -> dict[str, int]:
    return {each.broker: each.leads for each in state.brokers}


def test_brokers_are_added_behind_the_others_and_taken_from_the_end(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    two = make_cluster(folder, load_config(folder.config), 2, free_address)
    four = scaled(folder, two, 4, free_address)
    assert four == load_config(folder.config) and four.cluster is not None and two.cluster is not None
    assert [each.id for each in four.cluster.brokers] == ["b1", "b2", "b3", "b4"]
    assert four.cluster.brokers[:2] == two.cluster.brokers
    assert len({each.listen for each in four.cluster.brokers}) == 4
    assert scaled(folder, four, 2, free_address) == two == load_config(folder.config)
    # b3 was served, and retired: it has its folder still.
    (folder.root / "data" / "b3").mkdir(parents=True)
    (folder.root / "data" / "b3" / NODE).touch()
    after = scaled(folder, two, 3, free_address)
    assert after.cluster is not None and [each.id for each in after.cluster.brokers] == ["b1", "b2", "b4"]
    scaled(folder, after, 2, free_address)
    with pytest.raises(RequestError, match="was changed meanwhile"):
        scaled(folder, after, 4, free_address)
    folder.config.write_text(folder.config.read_text().replace("- {id: b2", "-  {id: b2"))
    with pytest.raises(RequestError, match="are not written as"):
        scaled(folder, load_config(folder.config), 3, free_address)


def test_of_two_that_add_brokers_at_once_one_chooses_their_addresses(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    two = make_cluster(folder, load_config(folder.config), 2, free_address)
    other: list[RegionConfig | RequestError] = []

    def scale_as_well() -> None:
        try:
            other.append(scaled(folder, two, 3, lambda port, taken, kind: Address("127.0.0.1", port + 900)))
        except RequestError as error:
            other.append(error)

    beside = threading.Thread(target=scale_as_well)

    def slowly(port: int, taken: list[Address], kind: socket.SocketKind) -> Address:
        if not beside.ident:
            beside.start()
            beside.join(0.5)
        return Address("127.0.0.1", port + 800)

    assert scaled(folder, two, 3, slowly) == load_config(folder.config)
    beside.join()
    (found,) = other
    assert isinstance(found, RequestError) and found.code is Code.CONFLICT


def test_no_broker_is_drained_where_new_streams_have_more_copies_than_brokers_would_be_left(
    tmp_path: Path,
) -> None:
    folder = make_region(tmp_path, "us-east")
    three = make_cluster(folder, load_config(folder.config), 3, free_address, replicas=3)
    said = felix_command(tmp_path, "region", "scale", "2", code=1)
    assert "gives new streams 3 copies" in said.err and "to 2 or less" in said.err
    assert load_config(folder.config) == three


@pytest.mark.etcd
async def test_a_region_that_runs_gets_a_broker_more_and_gives_it_up_drained_and_retired(
    tmp_path: Path,
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    folder = several(tmp_path, 2)
    async with running(folder):
        async with client(folder) as operator:
            await operator.create_stream("acme/ops/orders", replicas=2)
            await operator.stream("acme/ops/orders").publish(b"x")
        said = await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "3")
        assert "us-east has 3 brokers" in said.out
        async with client(folder) as operator:
            assert [each.broker for each in (await operator.describe()).brokers] == ["b1", "b2", "b3"]
            await operator.alter_stream("acme/ops/orders", replicas=3)

            async def has_a_copy() -> bool:
                state = await operator.describe()
                return [each.copies for each in state.brokers if each.broker == "b3"] == [1]

            await until(has_a_copy)
            await operator.alter_stream("acme/ops/orders", replicas=2)
            await operator.stream("acme/ops/orders").publish(b"y")
            await operator.drain_broker("b2")
        # Two copies of the stream, and of the audit log, have nowhere to go while one broker may have some: nothing is begun.
        for words in (("scale", "2"), ("drain", "b3", "us-east"), ("drain", "b3", "--region", "us-east")):
            said = await asyncio.to_thread(felix_command, tmp_path, "region", *words, code=1)
            refused = " ".join(said.err.split())
            assert (
                "acme/ops/orders needs 2 copies and 1 broker may have one; the audit log needs 2" in refused
            )
            assert "Have 4 brokers first" in refused and "felix region undrain b2" in refused
        said = await asyncio.to_thread(
            felix_command, tmp_path, "region", "drain", "b3", "us-east", "--partly", code=4
        )
        assert "stay on b3: too few other brokers may have them" in " ".join(said.err.split())
        async with client(folder) as operator:
            state = await operator.describe()
            assert [(each.is_drained, each.bound > 0) for each in state.brokers][2] == (True, True)
        await asyncio.to_thread(felix_command, tmp_path, "region", "undrain", "b3", "us-east")
        await asyncio.to_thread(felix_command, tmp_path, "region", "undrain", "b2")
        said = await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "2")
        assert "b3 is drained, stopped and retired" in said.out
        async with client(folder) as operator:
            assert [each.broker for each in (await operator.describe()).brokers] == ["b1", "b2"]
            assert await operator.stream("acme/ops/orders").publish(b"z") == 2
            # Ended before it retired what it had drained and stopped: repeated, it goes on.
            await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "3")
            (_, _, added) = [each.broker for each in (await operator.describe()).brokers]
            await operator.drain_broker(added)
            config, with_retired = load_config(folder.config), folder.config.read_text()
            scaled(folder, config, 2, free_address)

            async def has_stopped() -> bool:
                return not (await operator.describe()).brokers[-1].address

            await until(has_stopped)
            shown = await asyncio.to_thread(felix_command, tmp_path, "region", "status", "us-east")
            assert f"`felix region retire {added}`" in " ".join(shown.out.split())
            said = await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "2")
            assert f"{added}: retired" in said.err and "us-east has 2 brokers" in said.out
            assert [each.broker for each in (await operator.describe()).brokers] == ["b1", "b2"]
            # An older region.yaml is put back, which names the broker that was retired: it does not start, and goes away again.
            folder.config.write_text(with_retired)

            async def is_refused() -> bool:
                text = await asyncio.to_thread(felix_command, tmp_path, "region", "status", "us-east")
                return f"Broker {added} ended here: The metadata store does not know broker" in " ".join(
                    text.out.split()
                )

            await until(is_refused)
            said = await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "3")
            assert f"{added} is not alive" in said.err
            data = folder.root / "data"
            await until(lambda: was_retired(data, added))
            # Where nobody has it that it was retired, the store may have gone back, and what it has may be all that there is.
            node = NodeFile(PRIVATE_FILES, data / added, REAL.random)
            retired = node.load()
            node.save(msgspec.structs.replace(retired, folder="f" * len(retired.folder)))
            said = await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "2", code=1)
            assert "nobody knows that it was retired" in " ".join(said.err.split())
            assert added in folder.config.read_text()
            node.save(retired)
            said = await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "2")
            assert f"{added} is taken out of region.yaml" in said.out
            shown = await asyncio.to_thread(felix_command, tmp_path, "region", "status", "us-east")
            assert "problem" not in shown.out


@pytest.mark.etcd
async def test_a_broker_that_has_copies_still_is_not_stopped_by_a_scale_that_does_not_wait(
    tmp_path: Path,
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    folder = several(tmp_path, 3)
    async with running(folder), client(folder) as operator:
        # One copy each, on every broker.
        names = [f"acme/ops/s{number}" for number in range(9)]
        for name in names:
            await operator.create_stream(name)
            await operator.stream(name).publish(b"x")
        said = await asyncio.to_thread(
            felix_command, tmp_path, "region", "scale", "2", "--wait", "0s", code=4
        )
        assert "b3 is being drained, and has still" in " ".join(said.err.split())
        config = load_config(folder.config)
        assert config.cluster is not None and len(config.cluster.brokers) == 3
        # Another operator ends it while it waits.
        waiting = asyncio.ensure_future(
            asyncio.to_thread(felix_command, tmp_path, "region", "drain", "b3", code=(0, 1))
        )

        async def is_drained() -> bool:
            return (await operator.describe()).brokers[2].is_drained

        await until(is_drained)
        await operator.drain_broker("b3", drain=False)
        ended = await waiting
        assert "b3 is drained: no copies" in ended.out or "b3 may have copies again" in " ".join(
            ended.err.split()
        )
        await operator.drain_broker("b3")
        said = await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "3")
        assert "b3 is drained and may have no copies" in " ".join(said.err.split())
        said = await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "2")
        assert "b3 is drained, stopped and retired" in said.out
        for name in names:
            assert await operator.stream(name).publish(b"y") == 1


@pytest.mark.etcd
async def test_a_scale_that_is_repeated_waits_for_the_brokers_that_the_first_one_wrote_down(
    tmp_path: Path,
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    folder = several(tmp_path, 2)
    async with running(folder), client(folder) as operator:
        # As one that was killed once it had written region.yaml.
        scaled(folder, load_config(folder.config), 3, free_address)
        await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "3")
        assert [bool(each.address) for each in (await operator.describe()).brokers] == [True] * 3


@pytest.mark.etcd
async def test_a_scale_says_at_once_that_another_one_took_back_the_broker_that_it_waits_for(
    tmp_path: Path,
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    folder = several(tmp_path, 2)

    def brokers() -> int:
        cluster = load_config(folder.config).cluster
        assert cluster is not None
        return len(cluster.brokers)

    async with running(folder):
        waiting = asyncio.ensure_future(
            asyncio.to_thread(felix_command, tmp_path, "region", "scale", "3", "--wait", "20s", code=None)
        )
        await until(lambda: brokers() == 3)
        # As the `felix region scale 2` of another operator does, to whose region b3 has not come yet.
        scaled(folder, load_config(folder.config), 2, free_address)
        said = await waiting
        assert said.code == 1
        assert "b3 will not start" in said.err and "was changed meanwhile" in " ".join(said.err.split())


async def test_a_broker_that_one_answer_does_not_know_yet_is_not_taken_for_retired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one may come from a broker that has not heard of it, as where its member of etcd is slow."""
    monkeypatch.setattr(operate, "LOOK_S", 0.0)
    told: list[list[BrokerState]] = [[], [BrokerState("b4")], [BrokerState("b4", is_drained=True)]]

    class Region:
        async def describe(self) -> RegionState:
            brokers = told[0] if len(told) == 1 else told.pop(0)
            return RegionState("us-east", "acme", "b1", 0, {}, brokers=brokers)

    (found,) = await operate._still_drained(Region(), ["b4"])  # type: ignore[arg-type]
    assert found.is_drained
    told[0] = []
    with pytest.raises(RequestError, match="b4 is no broker of us-east any more"):
        await operate._still_drained(Region(), ["b4"])  # type: ignore[arg-type]


async def test_what_another_scale_has_retired_first_is_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Region:
        """As one that hears only later that b3 is retired."""

        async def describe(self) -> RegionState:
            return RegionState("us-east", "acme", "b1", 0, {}, brokers=[BrokerState("b3", "")])

        async def retire_broker(self, broker: str) -> None:
            asked.append(broker)
            raise RequestError(f"Broker {broker} was never registered, or was retired.", code=answer)

    @asynccontextmanager
    async def connected(*_: object) -> AsyncIterator[Region]:
        yield Region()

    monkeypatch.setattr(operate, "connect", connected)
    answer = Code.NOT_FOUND
    await operate._gone("us-east", "", ["b3", "b4"], 1_000)
    assert asked == ["b3"]
    answer = Code.CONFLICT  # it has copies again, say
    with pytest.raises(RequestError):
        await operate._gone("us-east", "", ["b3"], 1_000)


@pytest.mark.etcd
async def test_who_drains_what_another_scale_has_retired_meanwhile_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    folder = several(tmp_path, 3)
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))

    async def finish_beside_another(*_: object) -> list[str]:
        said = await asyncio.to_thread(felix_command, tmp_path, "region", "scale", "2")
        assert "b3 is drained, stopped and retired" in said.out
        return []

    monkeypatch.setattr(operate, "_finish", finish_beside_another)
    async with running(folder), client(folder) as operator:
        # Both have read that there are three. Whom the second drains is no broker any more, and few know yet that it was retired.
        with pytest.raises(RequestError, match=r"region.yaml was changed meanwhile"):
            await asyncio.to_thread(operate.scale, 2, "us-east", "1m", "", "")
        with pytest.raises(RequestError, match="somebody retired it meanwhile"):
            await operate._still_drained(operator, ["b3"])


@pytest.mark.etcd
@pytest.mark.fault
async def test_the_regions_own_etcd_that_is_killed_is_started_again_and_status_says_so_until_it_answers(
    tmp_path: Path,
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    folder = several(tmp_path, 2, lease="2s")
    async with running(folder):
        parent = psutil.Process(json.loads((folder.run / "broker.pid").read_text())["pid"])
        async with client(folder) as operator:
            await operator.create_stream("acme/ops/orders")

            async def problems() -> list[str]:
                return (await operator.describe()).alarms

            async def has_none() -> bool:
                return not await problems()

            async def is_told() -> bool:
                return (await problems())[:1] != [] and "metadata store has not answered" in (
                    await problems()
                )[0]

            await until(has_none)
            shown = await asyncio.to_thread(felix_command, tmp_path, "region", "status", "us-east", "--json")
            pids = {each["broker"]: each["pid"] for each in json.loads(shown.out)["items"][0]["brokers"]}
            assert {psutil.Process(pid).parent() for pid in pids.values()} == {parent} and len(pids) == 2
            own_etcd(parent).suspend()
            await until(is_told)
            told = await asyncio.to_thread(felix_command, tmp_path, "region", "status", "us-east")
            first = " ".join(told.out.split())
            assert first.startswith("problem: The metadata store has not answered broker b")
            before = own_etcd(parent)
            before.kill()
            await until(lambda: (found := etcd_of(parent)) is not None and found != before)
            await until(has_none)
            assert await operator.stream("acme/ops/orders").publish(b"after") == 0
            await operator.create_stream("acme/ops/more")
        said = folder.run / "broker.log"
        assert "The etcd of us-east ended with -9 and is started again" in said.read_text()
        # Said once it has served for a while, which brokers do not wait for.
        await until(lambda: "The etcd of us-east serves again." in said.read_text())


def own_etcd(parent: psutil.Process) -> psutil.Process:
    found = etcd_of(parent)
    assert found is not None
    return found


def etcd_of(parent: psutil.Process) -> psutil.Process | None:
    """Of the children of `felix region up` the etcd; None while it does not run."""
    for child in parent.children():
        try:
            if child.name() == "etcd" and child.status() != psutil.STATUS_ZOMBIE:
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def test_a_process_that_is_made_collects_no_garbage_of_ours_before_it_is_another_program(
    tmp_path: Path,
) -> None:
    """Seen with a command that asked the region's etcd several times: what it had asked the first one with was collected there, and waited for ever for a thread that only we had."""
    seen, is_now = tmp_path / "seen", True

    def look() -> None:
        if is_now:
            with seen.open("a") as file:
                file.write(f"{gc.isenabled()} ")

    os.register_at_fork(after_in_child=look)

    async def make() -> None:
        children = await asyncio.gather(
            *(_Child.start([sys.executable, "-c", ""], "Nothing", tmp_path / f"{at}.log") for at in range(2))
        )
        for child in children:
            await child.process.wait()

    run(make())  # on the event loop of commands, which does not see to that itself
    is_now = False
    assert seen.read_text() == "False False " and gc.isenabled()
