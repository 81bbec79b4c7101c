"""Changes of the keys of audit logs, by the steps of docs/operations.md and docs/runbooks/leaked-log-key.md, with the real command: planned, and where the keys before are lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random
from typing import Final

from e2e.command_mesh import Said, felix_command
from ordinary.restores import owner, written
from ordinary.several import END_S, Several
from ordinary.world import World

from audit.origin import region_origin

_ANEW_S: Final = 1.0
"""A command that is refused, since a broker that was killed may be alive still, is run again so often."""


async def change_log_keys_(world: World) -> str | None:
    """New keys of a region's own log that one broker writes, or of a bridge's. The others compare the bundle at once, or once the writer has gone on for a while."""
    origins = [(origin, log) for origin, log in written(world) if origin not in world.forked]
    if not origins:
        return None
    origin, log = world.random.choice(origins)
    region, source = owner(world, origin)
    await (world.stop_agent(source) if source else world.stop(region))
    words = _words(source or region, world.bridges[source] if source else "")
    folder = world.folder(source or region)
    keys = (
        (folder.egress_key(world.bridges[source]), folder.egress_ml_dsa_key(world.bridges[source]))
        if source
        else (folder.audit_key, folder.audit_ml_dsa_key)
    )
    how = _lose(world.random, keys)
    words += ["--lost-keys"] if how else []
    is_away = world.random.random() < 0.2
    if is_away:
        # The log lies elsewhere while its keys are changed: on the disk of the machine that had it.
        elsewhere = world.home / "elsewhere-log"
        await asyncio.to_thread(os.replace, log, elsewhere)
        words += ["--log", str(elsewhere)]
    ended = await asyncio.to_thread(felix_command, world.home, *words, code=None)
    if is_away:
        await asyncio.to_thread(os.replace, elsewhere, log)
    said = f"{origin}, {how or 'planned'}{', its log elsewhere' if is_away else ''}: {_told(world, words, ended)}"
    await (world.start_agent(source) if source else world.start(region))
    return f"{said}; {await _compare(world)}"


async def change_copied_log_keys(world: Several) -> str | None:
    """The same of the own log of a region of several brokers, all of which are stopped, in order or not."""
    cluster = world.pick(
        lambda cluster: (
            cluster.region not in world.with_log and region_origin(cluster.region, "acme") not in world.forked
        )
    )
    if cluster is None:
        return None
    region = cluster.region
    how = _lose(world.random, (cluster.folder.audit_key, cluster.folder.audit_ml_dsa_key))
    words = [*_words(region, ""), *(["--lost-keys"] if how else [])]
    killed = world.random.random() < 0.3
    await world.leave(region)
    if killed:
        for name in list(cluster.running):
            await cluster.kill(name)
    await cluster.stop_all()
    ended = await _run(world.home, words)
    cluster.away.clear()
    said = f"{region}, {how or 'planned'}{', killed' if killed else ''}: {_told(world, words, ended)}"
    await cluster.start_all()
    return f"{said}; {await _compare(world)}"


async def change_witness_key_(world: World) -> str | None:
    """New keys with which a region cosigns others' logs: its broker and its bridge take them at their next start."""
    if not world.alone:
        return None
    region = world.random.choice(world.alone)
    await world.stop_agent(region)
    await world.stop(region)
    words = ["region", "change-witness-key", "--region", region]
    ended = await asyncio.to_thread(felix_command, world.home, *words, code=None)
    if ended.code:
        world.wrong.append(f"{' '.join(words)} ended with {ended.code}: {ended.out} {ended.err}")
    await world.start(region)
    if region in world.sources:
        await world.start_agent(region)
    return f"{region}; {await _compare(world)}"


def _words(region: str, bridge: str) -> list[str]:
    return ["region", "change-log-keys", "--region", region, *(["--bridge", bridge] if bridge else [])]


def _lose(random: Random, keys: tuple[Path, Path]) -> str:
    """Delete one of the keys, or both, or none; which."""
    lost = random.choice(((), (), keys, keys[:1], keys[1:]))
    for key in lost:
        key.unlink()
    return f"{' and '.join(key.name for key in lost)} lost" if lost else ""


async def _run(home: Path, words: list[str]) -> Said:
    """Until no broker that was killed is taken for one that is alive."""
    loop = asyncio.get_running_loop()
    end = loop.time() + END_S
    while True:
        ended = await asyncio.to_thread(felix_command, home, *words, code=None)
        if not ended.code or loop.time() > end:
            return ended
        await asyncio.sleep(_ANEW_S)


def _told(world: World, words: list[str], ended: Said) -> str:
    """What the command said. It is never refused where the log is whole."""
    if ended.code:
        world.wrong.append(f"{' '.join(words)} ended with {ended.code}: {ended.out} {ended.err}")
        return f"refused: {ended.err}"
    return next(line for line in ended.out.splitlines() if "sign up to" in line).partition("; ")[0]


async def _compare(world: World) -> str:
    if world.random.random() < 0.5:
        await world.settle(0.7)
        await world.exchange_bundles()
        return "compared later"
    await world.exchange_bundles()
    return "compared at once"
