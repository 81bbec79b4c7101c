"""The audit log of a `ClusteredRegion`: leaves for it, who is home, and what each broker's copy has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from cluster.clustered_region import ClusteredRegion
from region_peer import until

from audit.checkpoint import note_size
from audit.leaf import Header, Kind, Leaf, Side
from audit.tile import read_entries
from audit.tile_disk import Folder
from audit.trail import Trail
from audit.trust import Trust
from audit.verify import verify_log
from felix.errors import UnavailableError
from region.trust.trusted_bundles import own_bundle


def key_leaf(number: int) -> Leaf:
    return Leaf(
        Header(
            kind=Kind.KEY,
            side=Side.INGRESS,
            time_ms=1_700_000_000_000 + number,
            source_region="us-east",
            destination_region="us-east",
            actor="spiffe://acme/us-east/service/probe",
            action="renewed",
            key_id=number.to_bytes(16, "big"),
        )
    )


async def home_of(region: ClusteredRegion) -> str:
    def homes() -> list[str]:
        return [name for name in region.nodes if region.clustered(name).has_audit_log]

    try:
        await until(lambda: len(homes()) == 1, 60)
    except TimeoutError:
        raise AssertionError("\n".join(["nobody is home", *states(region)])) from None
    return homes()[0]


def states(region: ClusteredRegion) -> Iterator[str]:
    """What each broker knows of the log, for whoever reads why a test failed."""
    for name in region.nodes:
        clustered = region.clustered(name)
        audit, replicas = clustered.audit, clustered.replicas
        if audit is None or replicas is None:
            continue
        work = [] if audit._work is None else [frame.f_lineno for frame in audit._work.get_stack()]
        yield f"{name}: {audit.trouble or 'no trouble'}, works at {work}"
        for shard, hosted in replicas.host._hosted.items():
            logs = {number: (log.commit, log.end) for number, log in hosted.core.replica.logs.items()}
            yield (
                f"  {hosted.core.leader.phase}, settling {hosted.is_settling}, led {list(hosted.led)}, broken {hosted.broken!r}, {logs}, "
                f"{clustered.member.mirror.view.shards.get(shard)}"
            )
    yield from (
        f"{task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks() if "long" in task.get_name()
    )


def log_of(region: ClusteredRegion, name: str) -> Folder:
    return Folder(region.folder.root / region.config.of_broker(name).data / "audit")


def verified(region: ClusteredRegion, name: str) -> list[bytes]:
    """The leaves of a broker's copy, which verifies by its files alone."""
    log = log_of(region, name)
    report = verify_log(log, Trust.of([own_bundle(region.folder, region.config)]), cosignatures_min=0)
    assert report.ok, report.findings
    return [bytes(leaf) for _, leaf in read_entries(log, 0, report.size, report.size)]


def trail_of(region: ClusteredRegion, name: str) -> Trail:
    return region.nodes[name].services.governance.trail


async def shows(region: ClusteredRegion, name: str, size: int) -> None:
    await until(lambda: note_size(trail_of(region, name).checkpoint()) == size, 60)


async def retried(attempt: Callable[[], Awaitable[int]]) -> int:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(UnavailableError):
                return await attempt()
            await asyncio.sleep(0.05)
