"""A region of several brokers for a measurement: brokers and etcd as processes of this machine, as `felix region up` starts them.

No process is left when `running` ends, whatever happened inside.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

import felix
from benchmarks.process_use import ProcessUse, children_of
from cli.benchmark.roles import REGION, found_bench_region
from cli.free_address import free_address
from cli.process import read_state, start_detached, stop
from cli.several import free_etcd, name_brokers
from felix.errors import FelixError, UnavailableError
from felix.profile import HOME_VARIABLE
from policy.quantity import Duration
from region.config import load_config
from region.folder import RegionFolder

WHAT: Final = "The measured region"
IN_SYNC_TIMEOUT_S: Final = 120.0
"""However slow the machine is: copies that are not in sync by then never will be."""
LOOK_S: Final = 0.05


@asynccontextmanager
async def in_time(what: str, seconds: float) -> AsyncIterator[None]:
    """Raises UnavailableError where a step, after which `what` is so, takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise UnavailableError(
            f"{what}: that was not so within {seconds:.0f} s.",
            hint="Try a quieter machine, another lease, or less of what is measured.",
        ) from None


class Brokers:
    """The brokers b1, b2 … of the measured region in `home`, which is founded here. `lease_ms` 0: as long as by default."""

    def __init__(self, home: Path, count: int, *, lease_ms: int = 0) -> None:
        self.home = home
        self.folder: RegionFolder = found_bench_region(home)
        made = name_brokers(
            self.folder,
            load_config(self.folder.config),
            "b1",
            count,
            free_address,
            etcd=free_etcd(free_address),
        )
        assert made.cluster is not None
        self.names = tuple(str(each.id) for each in made.cluster.brokers)
        if lease_ms:
            text = self.folder.config.read_text(encoding="utf-8")
            text = text.replace("\ncluster:\n", f"\ncluster:\n  lease: {Duration(lease_ms)}\n", 1)
            self.folder.config.write_text(text, encoding="utf-8")
        cluster = load_config(self.folder.config).cluster
        assert cluster is not None
        self.lease_ms = int(cluster.lease)

    @contextmanager
    def running(self) -> Iterator[None]:
        """All of it up, until the block ends. Raises UnavailableError where it does not come up, or does not stop."""
        folder = self.folder
        start_detached(
            ["--log-level", "info", "region", "up", REGION],
            folder.broker_pid,
            folder.broker_log,
            WHAT,
            f"felix region down {REGION}",
            environment={**os.environ, HOME_VARIABLE: str(self.home)},
        )
        try:
            yield
        finally:
            stop(folder.broker_pid, WHAT)

    @property
    def parent_pid(self) -> int:
        """The process that starts brokers again."""
        state = read_state(self.folder.broker_pid)
        assert state is not None
        return int(state["pid"])

    def pid_of(self, broker: str) -> int:
        """0 while it does not serve."""
        state = read_state(self.folder.pid_of(broker))
        return 0 if state is None else int(state["pid"])

    async def started_again(self, broker: str, pid: int) -> None:
        """Wait until a broker that was process `pid` serves as another one."""
        while self.pid_of(broker) in (0, pid):  # noqa: ASYNC110 - nobody tells but the file of another process
            await asyncio.sleep(LOOK_S)

    def cpu_s(self) -> tuple[float, float]:
        """Processor time so far of all brokers, and of their etcd."""
        pids = {self.pid_of(name) for name in self.names}
        (etcd,) = [pid for pid in children_of(self.parent_pid) if pid not in pids]
        return sum(ProcessUse.of(pid).cpu_s for pid in pids), ProcessUse.of(etcd).cpu_s

    @contextmanager
    def nobody_starts_again(self) -> Iterator[None]:
        """Until the block ends, a broker that is killed stays away, as with its machine."""
        parent = self.parent_pid
        os.kill(parent, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(parent, signal.SIGCONT)


async def all_in_sync(client: felix.RegionClient, stream: str, copies: int) -> None:
    """Wait until a stream of one shard has so many copies in sync. Raises UnavailableError."""
    try:
        async with asyncio.timeout(IN_SYNC_TIMEOUT_S):
            while True:
                with suppress(FelixError):
                    (state,) = (await client.describe_stream(stream)).state
                    if not state.stopped and len(state.in_sync) == copies:
                        return
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise UnavailableError(
            f"{stream} did not have {copies} copies in sync within {IN_SYNC_TIMEOUT_S:.0f} s.",
            hint="Try a quieter machine.",
        ) from None
