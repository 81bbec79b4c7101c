"""Changes of a region's signing keys, by the steps of docs/runbooks/changed-signing-keys.md: planned, at once, on a machine that has a copy of the log alone, and with a lost bundle."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable
from typing import Final

from ordinary.evidence import size_of
from ordinary.world import World
from typer.testing import CliRunner

from audit import log_copy_disk
from audit.origin import egress_origin, region_origin
from audit.tile_disk import Folder
from cli.bridge import app as bridge
from felix.address import Address
from felix.errors import Code, FelixError, RequestError
from felix.page import list_documents
from felix.runtime.real import now_ms
from policy.signed import SignedDocument
from region.bootstrap import write_profile
from region.config import RegionConfig, load_config
from region.folder import RegionFolder
from region.trust.signing_key_leaves import ROLES, Role
from region.trust.signing_keys import change_signing_keys, raise_ends

COSIGNED_S: Final = 60.0
"""How long other regions' logs may take to be cosigned as far as they are; a link that stands still for good brings nothing."""
_COMMANDS: Final = asyncio.Lock()
"""A command takes the region's folder from the environment, which sequences side by side share."""


async def change_signing_keys_(world: World) -> str | None:
    """New keys of a region; the others compare and trust it again, what stands is signed again, and the ends are raised to where the others' logs are cosigned then."""
    # An end in a log that goes on no more, or of which an older copy went on, may be one that no verifier can find there any more.
    regions = [] if world.ended or world.forked or world.lost else world.alone
    if not regions:
        return None
    region, how = world.random.choice(regions), world.random.choice(("planned", "at once", "copy", "lost"))
    roles: tuple[Role, ...] = world.random.choice((ROLES, ROLES, ("policy",), ("receipt",)))
    folder = world.folder(region)
    config = load_config(folder.config)
    if how == "planned":
        await _cosigned(world, region)
    await world.stop_agents()
    await world.stop(region)
    # What was copied before the keys ended is not put back afterwards: it does not reach the end.
    world.backups.clear()
    world.copies.clear()
    try:
        said = await asyncio.to_thread(_change, world, folder, config, how, roles)
    except RequestError as error:
        await world.start(region)
        await world.start_agents()
        if error.code is not Code.CONFLICT or "no leaf of yet" not in error.sentence:
            raise
        return f"{region}, {how}: refused, its words have no leaf yet"
    await world.start(region)
    await world.exchange_bundles()
    if "policy" in roles:
        await world.apply_policy(region)
        said += await _sign_again(world, region)
    await world.start_agents()
    said += await _raise(world, region, folder, config)
    return f"{region}, {how}, {' and '.join(roles)}: {said}"


def _change(world: World, folder: RegionFolder, config: RegionConfig, how: str, roles: Iterable[Role]) -> str:
    say_again = world.random.random() < 0.5
    if how in ("planned", "at once"):
        ends = change_signing_keys(folder, config, now_ms(), roles, say_again=say_again).ends
        return f"ends in {len(ends)} logs"
    notes = [
        note
        for origin, path in world.logs().items()
        if origin.startswith(f"{config.region}.") and (note := Folder(path).read("checkpoint")) is not None
    ]
    without = [
        egress_origin(config.region, "acme", name)
        for name in [world.bridges.get(config.region, "")]
        if name and not (world.egress_log(config.region) / "checkpoint").exists()
    ]
    elsewhere = RegionFolder(world.home / "elsewhere" / config.region)
    shutil.rmtree(elsewhere.root, ignore_errors=True)
    shutil.copytree(folder.root, elsewhere.root, ignore=shutil.ignore_patterns("data", "bridges", "run"))
    own = region_origin(config.region, "acme")
    if how == "copy":
        copy = elsewhere.root / "copy"
        log_copy_disk.copy_log(Folder(world.audit_log(config.region)), Folder(copy), world.trust)
        given = [note for note in notes if not note.startswith(own.encode())]
        change_signing_keys(elsewhere, config, now_ms(), roles, checkpoints=given, without=without, log=copy)
        _bring(elsewhere, folder)
        return "beside a copy of the log"
    # The keys of a change that nobody used are lost, with the bundle that names them.
    change_signing_keys(folder, config, now_ms(), roles, without=without, say_again=True)
    _bring(elsewhere, folder)
    changed = change_signing_keys(folder, config, now_ms(), roles, checkpoints=notes, lost_bundle=True)
    return f"after a lost bundle, ends in {len(changed.ends)} logs"


def _bring(of: RegionFolder, to: RegionFolder) -> None:
    shutil.copytree(of.secrets, to.secrets, dirs_exist_ok=True)
    shutil.copy(of.bundle, to.bundle)


async def _sign_again(world: World, region: str) -> str:
    """Each half of the region's that may stand, with the truncations of its links."""
    folder, done, refused = world.folder(region), 0, 0
    address = Address.parse(world.addresses(region)[0])
    write_profile(folder, region, "acme", address)
    for grant in world.grants:
        terms = grant.terms
        if region != terms.from_region and not (region == terms.to_region and grant.accepted):
            continue
        command = ["sign-again", grant.body.grant, "--yes", "--region", region]
        async with _COMMANDS:
            before = os.environ.get("FELIX_HOME")
            os.environ["FELIX_HOME"] = str(world.home)
            try:
                ended = await asyncio.to_thread(CliRunner().invoke, bridge, command)
            finally:
                os.environ.pop("FELIX_HOME")
                if before is not None:
                    os.environ["FELIX_HOME"] = before
        if isinstance(ended.exception, FelixError):
            refused += 1
        elif ended.exit_code:
            world.wrong.append(f"{' '.join(command)}: {ended.output} {ended.exception!r}")
        else:
            done += 1
            if region == terms.from_region:
                grant.export = await _export_of(world, region, grant.body.grant)
    return f"; {done} halves signed again, {refused} refused"


async def _export_of(world: World, region: str, grant: str) -> SignedDocument:
    held = await list_documents(await world.client(region), "export")
    return SignedDocument.parse(held[grant])


async def _raise(world: World, region: str, folder: RegionFolder, config: RegionConfig) -> str:
    """What was on its way when the keys ended has its leaf behind the end: the ends go as far as the others' logs are cosigned now."""
    is_cosigned = await _cosigned(world, region)
    await world.stop_agents()
    await world.stop(region)
    try:
        raised = await asyncio.to_thread(raise_ends, folder, config, now_ms())
        said = f"ends raised in {len(raised.ends)} logs"
    except RequestError as error:
        if error.code is not Code.CONFLICT:
            raise
        said = "no end is raised"
    await world.start(region)
    await world.exchange_bundles()
    await world.start_agents()
    return f"; {said}{'' if is_cosigned else ', not all is cosigned'}"


async def _cosigned(world: World, region: str) -> bool:
    """Wait until the region has cosigned the logs that its bridges' and the others' agents bring it, as far as these are now."""
    # With what was written since their last checkpoints.
    trails = [node.services.governance.trail for node in world.nodes.values()]
    trails += [trail for agent in world.agents.values() if (trail := agent.context.trail) is not None]
    for trail in trails:
        await asyncio.to_thread(trail.publish)
    # Also those of which it has cosigned nothing yet: what they have of this region's would have no end in them.
    wanted = {
        origin: size
        for origin, path in world.logs().items()
        if not origin.startswith(f"{region}.") and (size := size_of(path))
    }
    loop = asyncio.get_running_loop()
    end = loop.time() + COSIGNED_S
    while loop.time() < end:
        if all(
            any(int(note.split(b"\n", 2)[1]) >= size for note in world.notes_of(origin, region))
            for origin, size in wanted.items()
        ):
            return True
        await asyncio.sleep(0.1)
    return False
