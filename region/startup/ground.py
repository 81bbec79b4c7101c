"""What the rest of a broker stands on: its data folder, what its process may open, and who the region is."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from felix import __version__
from felix.runtime.port import Runtime
from felix.storage.begun import BegunFolder
from felix.storage.disk import PRIVATE_FILES, SHARED_FILES
from felix.storage.port import Files
from felix.storage.release_mark import mark_release
from felix.transport.port import Engine
from keys.authority import RegionAuthority, load_authority
from keys.bundle import RegionBundle
from keys.certification import load_certification
from keys.keyring import Keyring, open_keyring
from region.begun_folders import begun_folders
from region.cluster.clocks import RegionClock
from region.cluster.node_file import NAME as NODE_FILE
from region.config import RegionConfig
from region.folder import STREAMS, RegionFolder
from region.log.directory import LogDirectory
from region.log.open_logs import OpenLogs, logs_max_of, raise_files_limit, relays_max_of
from region.metadata.port import MetadataStore
from region.startup.store import served_by_several
from region.trust.trusted_bundles import own_bundle

log = logging.getLogger("felix.region.startup")

SWITCH_S: Final = 0.0005
"""How long a thread may hold the interpreter while another wants it. Python's own 5 ms is what the event loop would wait for each thread
that seals and writes a noisy tenant's batches; measured with `python -m benchmarks fairness`."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a broker runs on beside its runtime. What is left out is this machine's, as the configuration says."""

    files: Files = PRIVATE_FILES
    """for the logs of streams, and what is remembered beside them"""
    evidence: Files = SHARED_FILES
    """for the audit log, and what is cosigned"""
    engine: Engine | None = None
    store: MetadataStore | None = None
    open_keys: Callable[..., Keyring] = open_keyring
    """called as `keys.keyring.open_keyring` is"""


THIS_MACHINE: Final = Machine()


@dataclass(frozen=True, slots=True)
class Ground:
    """`stack`: what is opened goes there at once, and is closed in the reverse order."""

    folder: RegionFolder
    config: RegionConfig
    runtime: Runtime
    machine: Machine
    stack: AsyncExitStack
    data: Path
    """the broker's data folder"""
    begun: list[BegunFolder]
    """what may lie on disks of its own; remembered once the audit log is open"""
    open_logs: OpenLogs
    relays_max: int
    """connections that are carried to other brokers"""
    streams_clock: RegionClock
    """of several brokers; `streams_runtime` goes by it"""
    streams_runtime: Runtime
    directory: LogDirectory
    own: RegionBundle
    issuing: RegionAuthority
    certification: bytes

    def authority(self) -> RegionAuthority:
        """The region's certificate authority, as its folder has it now. Blocks."""
        return load_authority(self.folder.authority, self.config.region, self.config.mesh)


async def open_ground(
    folder: RegionFolder, config: RegionConfig, runtime: Runtime, machine: Machine, stack: AsyncExitStack
) -> Ground:
    """Lock the data folder and read whose it is. Raises RequestError where several brokers serve the region, or a disk is not mounted."""
    data = folder.root / config.data
    if config.cluster is None:
        # Before anything is made: a lock or a store of its own would stand where those of the region stood.
        await asyncio.to_thread(_refuse_folders, data, config.region)
    begun = begun_folders(folder, config, machine.files, machine.evidence)
    for each in begun:
        await asyncio.to_thread(each.require)
    machine.files.make_folder(data)
    sys.setswitchinterval(SWITCH_S)
    open_logs, relays_max = _process_limits(config, machine)
    storage = config.storage
    streams_clock = RegionClock(runtime.clock)
    streams_runtime = (
        runtime if config.cluster is None else msgspec.structs.replace(runtime, clock=streams_clock)
    )
    directory = LogDirectory(
        data / STREAMS,
        config.region,
        offload_rate_bytes=storage.offload_rate,
        fetched_bytes_max=storage.offload_cache,
        files=machine.files,
        runtime=streams_runtime,
    )
    stack.push_async_callback(directory.close)
    if config.cluster is None:
        # Again, now that nobody can turn it into a region of several meanwhile.
        await asyncio.to_thread(_refuse_folders, data, config.region)
    issuing = await asyncio.to_thread(load_authority, folder.authority, config.region, config.mesh)
    certification = await asyncio.to_thread(load_certification, folder.authority)
    own = await asyncio.to_thread(own_bundle, folder, config)
    # Nothing is written before that: from here on an earlier release has no business in the folder.
    await asyncio.to_thread(mark_release, machine.files, data, __version__)
    return Ground(
        folder, config, runtime, machine, stack, data, begun, open_logs, relays_max, streams_clock, streams_runtime,
        directory, own, issuing, certification,
    )  # fmt: skip


def _process_limits(config: RegionConfig, machine: Machine) -> tuple[OpenLogs, int]:
    """What the process may open: logs, and how many connections it carries to other brokers."""
    files_max = raise_files_limit()
    # On a simulated network there are no sockets.
    relays_wanted = 0 if config.cluster is None or machine.engine is not None else config.limits.relays
    relays_max = relays_max_of(relays_wanted, files_max)
    if relays_max < relays_wanted:
        log.warning(
            "limits.relays is %d, and this broker carries %d connections to others at most: it may open %d files (raise the hard limit, ulimit -Hn).",
            relays_wanted, relays_max, files_max,
        )  # fmt: skip
    return OpenLogs(logs_max_of(files_max - relays_max)), relays_max


def _refuse_folders(data: Path, region: str) -> None:
    """Raises RequestError where folders of several brokers are here, which have the region's records. Blocks."""
    if any(data.glob(f"*/{NODE_FILE}")):
        raise served_by_several(region)
