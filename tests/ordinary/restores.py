"""Restores, each by the steps that docs/operations.md and the runbooks give: a broker's streams, its metadata, its audit log, all of
its data, an agent's folder; and what follows where no newest copy of a log is left: another bridge, another region.

What a log loses for good is noted as lost (`World.lost`): the logs of the others show it. Whatever else does not agree fails
the sequence.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from ordinary.evidence import only_in, size_of
from ordinary.world import World

from audit import log_copy_disk
from audit.errors import RolledBackError
from audit.log_copy_disk import Copied
from audit.log_restore_disk import restore_log
from audit.origin import egress_origin, region_origin
from audit.tile_disk import Folder
from audit.verify import verify_log
from felix.errors import FelixError

ALARM_S: Final = 10.0
"""How long links may take to open, under a log that was put back, until the operator has seen what they say."""
NO_ALARM_S: Final = 1.0
"""The same where no grant is known under which they would."""


async def back_up(world: World) -> str | None:
    """A cold copy of a broker's data."""
    if not world.alone:
        return None
    region = world.random.choice(world.alone)
    kept = world.home / f"backup-{region}"
    await world.stop(region)
    await _copy(_data(world, region), kept)
    await world.start(region)
    world.backups[region] = kept
    return region


async def back_up_agent(world: World) -> str | None:
    """A cold copy of an agent's folder."""
    source = world.random.choice(world.sources)
    origin, kept = _egress(world, source), world.home / f"backup-{world.bridges[source]}-{source}"
    await world.stop_agent(source)
    await _copy(world.egress_log(source).parent, kept)
    await world.start_agent(source)
    world.backups[origin] = kept
    return source


async def restore_streams(world: World) -> str | None:
    """What stands on a broker's disk of the streams that are in its backup is what stood there then."""
    region = _backed_up(world)
    if region is None:
        return None
    streams = _data(world, region) / "streams"
    await world.stop(region)
    restored = 0
    for old in sorted((world.backups[region] / "streams").iterdir()):
        # A stream that was deleted since stays deleted: its folder is named by its incarnation.
        if old.is_dir() and (streams / old.name).exists():
            await _copy(old, streams / old.name)
            restored += 1
    await world.start(region)
    return f"{restored} streams of {region}"


async def restore_metadata(world: World) -> str | None:
    """By docs/metadata.md: stop, move the database away, put the copy in its place, start."""
    region = _backed_up(world)
    if region is None:
        return None
    await world.stop(region)
    for old in _data(world, region).glob("metadata.db*"):
        old.unlink()
    for kept in world.backups[region].glob("metadata.db*"):
        shutil.copy2(kept, _data(world, region))
    await world.start(region)
    return region


async def restore_audit_log(world: World) -> str | None:
    """A region's audit log alone."""
    region = _backed_up(world)
    return None if region is None else await _restore_with_log(world, region, "audit")


async def restore_broker(world: World) -> str | None:
    """All that a broker has on its disk, by the runbook for a lost disk."""
    region = _backed_up(world)
    return None if region is None else await _restore_with_log(world, region, "")


async def _restore_with_log(world: World, region: str, part: str) -> str:
    origin, log = region_origin(region, "acme"), world.audit_log(region)
    older, newest = world.backups[region] / "audit", world.home / f"newest-{region}"
    await world.stop_agents()
    await world.stop(region)
    await _copy(log, newest)
    await _copy(world.backups[region] / part, _data(world, region) / part)
    said = f"{part or 'all'} of {region}, {size_of(older)} of {size_of(newest)} leaves"
    if size_of(older) < world.keys_begin(origin):
        said += await _refused(world, said, world.start(region))
        await _copy(newest, log)
        await world.start(region)
        await world.start_agents()
        return f"{said}: the newest copy was put back"
    await world.start(region)
    knowing = _knowing(world, origin, size_of(older))
    if not knowing:
        # Nobody was told of more: the region goes on from there.
        world.lost |= only_in(newest, older)
        await world.start_agents()
        return f"{said}; nobody cosigned more"
    if world.random.random() < 0.5:
        await world.start_agents()
        world.forked.add(origin)
        said += f"; {await _see_alarm(world, lambda one, other: region in (one, other) and bool({one, other} & knowing))}"
        await world.stop_agents()
    await world.stop(region)
    world.lost |= only_in(log, newest)
    await _copy(newest, log)
    await world.start(region)
    await world.start_agents()
    return f"{said}; {', '.join(sorted(knowing))} cosigned more: the newest copy was put back"


async def restore_agent(world: World) -> str | None:
    """An agent's folder, or its egress log alone."""
    sources = [source for source in world.sources if _egress(world, source) in world.backups]
    if not sources:
        return None
    source = world.random.choice(sources)
    origin, log = _egress(world, source), world.egress_log(source)
    kept, newest = world.backups[origin], world.home / f"newest-{world.bridges[source]}-{source}"
    part = world.random.choice(("", "egress"))
    await world.stop_agent(source)
    await _copy(log.parent, newest)
    await _copy(kept / part, log.parent / part)
    said = f"{part or 'all'} of {origin}, {size_of(kept / 'egress')} of {size_of(newest / 'egress')} leaves"
    if size_of(kept / "egress") < world.keys_begin(origin):
        await world.start_agent(source)
        said += await _waiting(world, said, source)
        await world.stop_agent(source)
        await _copy(newest, log.parent)
        await world.start_agent(source)
        return f"{said}: the newest copy was put back"
    knowing = _knowing(world, origin, size_of(kept / "egress"))
    await world.start_agent(source)
    if not knowing:
        world.lost |= only_in(newest / "egress", kept / "egress")
        return f"{said}; nobody cosigned more"
    world.forked.add(origin)
    said += f"; {await _see_alarm(world, lambda one, other: one == source and other in knowing)}"
    await world.stop_agent(source)
    world.lost |= only_in(log, newest / "egress")
    await _copy(newest, log.parent)
    await world.start_agent(source)
    return f"{said}; {', '.join(sorted(knowing))} cosigned more: the newest copy was put back"


async def _refused(world: World, what: str, start: Awaitable[None]) -> str:
    """What a log's writer says of a copy of before its keys were changed, with which it must not go on."""
    try:
        await start
    except FelixError as error:
        return f"; refused: {error.sentence}"
    world.wrong.append(f"a log of before its keys were changed was opened: {what}")
    return "; opened"


async def _waiting(world: World, what: str, source: str) -> str:
    """The same of an agent, which waits for a log that it may open."""
    loop = asyncio.get_running_loop()
    end = loop.time() + ALARM_S
    while "its keys were changed at" not in (why := world.agents[source].not_ready()):
        if loop.time() > end:
            world.wrong.append(
                f"an agent does not say that its log is of before its keys were changed: {what}; {why}"
            )
            break
        await asyncio.sleep(0.05)
    return f"; it waits: {why}"


async def copy_log(world: World) -> str | None:
    """`felix audit copy` of a log that is written, into the folder of its last copy."""
    origin, _ = world.random.choice(written(world))
    made = await _copy_log(world, origin)
    return f"{origin}, {made.size} leaves, {made.size - made.before} of them new"


async def restore_copy(world: World) -> str | None:
    """A log's disk is lost, or its files are damaged, or it only seems so; `felix audit restore` puts a copy back: one of some time ago, of just before
    its owner stopped, or of just after. What it refuses because more was signed comes back by the newest folder, as a disk does from a repair."""
    origin, log = world.random.choice(written(world))
    of = world.random.choice(("before", "running", "stopped"))
    harm = world.random.choice(("lost", "damaged", "whole"))
    if of == "before" and origin not in world.copies:
        return None
    region, source = owner(world, origin)
    if of == "running":
        await _copy_log(world, origin)
    await (world.stop_agent(source) if source else world.stop(region))
    if of == "stopped":
        await _copy_log(world, origin)
    copy = world.copies[origin]
    newest = world.home / f"newest-{copy.name}"
    await _copy(log, newest)
    if harm == "lost":
        await asyncio.to_thread(shutil.rmtree, log)
    elif harm == "damaged":
        for path in log.glob("tile/**/*"):
            if path.is_file() and world.random.random() < 0.5:
                path.write_bytes(path.read_bytes()[:-1])
    said = f"{origin}, {harm}, {size_of(copy)} of {size_of(newest)} leaves, copied {of}"
    known = [int(note.split(b"\n", 2)[1]) for note in world.notes_of(origin)]
    known += [world.keys_begin(origin), *([] if harm == "lost" else [size_of(newest)])]
    try:
        made = await asyncio.to_thread(
            restore_log, Folder(copy), log, world.trust, world.notes_of(origin), origin=origin
        )
    except RolledBackError as error:
        if max(known, default=0) <= size_of(copy):
            world.wrong.append(f"a copy was refused though nobody knows of more: {said}: {error}")
        await _copy(newest, log)
        said += "; more was signed: the newest folder was put back"
    else:
        if max(known, default=0) > size_of(copy):
            world.wrong.append(f"a copy was put back though more was signed: {said}")
        report = await asyncio.to_thread(
            verify_log, Folder(log), world.trust, origin=origin, cosignatures_min=0, remembered=world.notes_of(origin)
        )  # fmt: skip
        world.wrong += [f"{said}, put back: {found.sentence}" for found in report.findings]
        if made.missing:
            world.wrong.append(f"{said}, put back: {made.missing} documents are missing")
        if made.replaced is not None:
            await asyncio.to_thread(shutil.rmtree, made.replaced)
        world.lost |= only_in(newest, copy)
        said += "; it was put back"
    await (world.start_agent(source) if source else world.start(region))
    return said


def written(world: World) -> list[tuple[str, Path]]:
    """The logs of one writer each that go on, with their folders."""
    own = [(region_origin(region, "acme"), world.audit_log(region)) for region in world.alone]
    return own + [(_egress(world, source), world.egress_log(source)) for source in world.sources]


def owner(world: World, origin: str) -> tuple[str, str]:
    """The region whose broker writes a log, or the source whose agent does."""
    for region in world.alone:
        if region_origin(region, "acme") == origin:
            return region, ""
    return "", next(source for source in world.sources if _egress(world, source) == origin)


async def _copy_log(world: World, origin: str) -> Copied:
    region, source = owner(world, origin)
    log = world.egress_log(source) if source else world.audit_log(region)
    to = world.home / f"copy-{source or region}-{world.bridges[source] if source else 'audit'}"
    while True:
        try:
            made = await asyncio.to_thread(log_copy_disk.copy_log, Folder(log), Folder(to), world.trust)
        except RolledBackError:
            # The log was put back since, or went on from less: the copy of before is another history's, or longer.
            await asyncio.to_thread(shutil.rmtree, to)
            continue
        world.copies[origin] = to
        return made


async def replace_bridge(world: World) -> str | None:
    """Of an agent's log there is only an older copy: another bridge with an identity and a log of its own, and grants for
    it (`allow`, `renew`). The old copy is kept."""
    sources = [source for source in world.sources if _egress(world, source) in world.backups]
    if not sources:
        return None
    source = world.random.choice(sources)
    origin, log = _egress(world, source), world.egress_log(source)
    older = world.backups.pop(origin) / "egress"
    await world.stop_agent(source)
    world.lost |= only_in(log, older)
    await _copy(older, log)
    world.ended[origin] = log
    world.bridges[source] = f"carrier-{len(world.ended) + 1}"
    await asyncio.to_thread(world.issue, source, "bridge", world.bridges[source])
    await world.exchange_bundles()
    await world.admit_bridge(source)
    await world.start_agent(source)
    return f"{source} goes on with {world.bridges[source]}"


async def replace_region(world: World) -> str | None:
    """Of a region's audit log there is only an older copy: a region under another name, with an authority and a log of its own,
    and grants for it (`allow`). The old copy is kept."""
    region = _backed_up(world)
    if region is None:
        return None
    place, log = world.regions.index(region), world.audit_log(region)
    older = world.backups.pop(region) / "audit"
    await world.stop_agents()
    await world.stop(region)
    world.lost |= only_in(log, older)
    await _copy(older, log)
    world.ended[region_origin(region, "acme")] = log
    again = f"{region.split('-')[0]}{len(world.ended) + 1}-{world.number}"
    if region in world.bridges:
        world.ended[_egress(world, region)] = world.egress_log(region)
        world.bridges[again] = "carrier"
    world.regions[place] = again
    await asyncio.to_thread(world.found, again)
    await world.start(again)
    await world.exchange_bundles()
    await world.apply_policies()
    if again in world.sources:
        await world.admit_bridge(again)
    await world.start_agents()
    return f"{region} goes on as {again}"


async def _see_alarm(world: World, crosses: Callable[[str, str], bool]) -> str:
    """What links say that cross under a log of which their other end knows more than stands in it. None of them may be active."""
    granted = any(
        grant.accepted
        and grant.approved
        and not grant.revoked
        and crosses(grant.terms.from_region, grant.terms.to_region)
        for grant in world.grants
    )
    loop = asyncio.get_running_loop()
    end = loop.time() + (ALARM_S if granted else NO_ALARM_S)
    while loop.time() < end:
        for agent in world.agents.values():
            for link in agent.links():
                if not crosses(link.from_region, link.to_region):
                    continue
                if link.state == "active":
                    world.wrong.append(f"a link is active, though a log was rolled back: {link}")
                    return "a link is active"
                if "rolled back" in link.reason:
                    world.alarms += 1
                    return f"{link.from_region} to {link.to_region}: {link.reason}"
        await asyncio.sleep(0.05)
    return "no link asked"


def _knowing(world: World, origin: str, size: int) -> set[str]:
    """The regions that cosigned more of a log."""
    return {
        region
        for region in world.regions
        for note in world.notes_of(origin, region)
        if int(note.split(b"\n", 2)[1]) > size
    }


def _backed_up(world: World) -> str | None:
    regions = [region for region in world.alone if region in world.backups]
    return world.random.choice(regions) if regions else None


def _egress(world: World, source: str) -> str:
    return egress_origin(source, "acme", world.bridges[source])


def _data(world: World, region: str) -> Path:
    return world.folder(region).root / "data"


async def _copy(of: Path, to: Path) -> None:
    """The folder takes the place of whatever stands there."""
    await asyncio.to_thread(shutil.rmtree, to, ignore_errors=True)
    await asyncio.to_thread(shutil.copytree, of, to)
