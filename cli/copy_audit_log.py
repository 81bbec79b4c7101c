"""`felix region copy-audit-log`: the audit log on one broker's disk becomes one that several brokers copy (region.evidence.copying_audit_log)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from cli.output import out
from cli.process import read_state
from cli.setting import choose_region, folder_of, run
from felix import __version__
from felix.errors import Code, RequestError, UnavailableError
from felix.runtime.real import REAL
from felix.storage.disk import PRIVATE_FILES, FileLock
from felix.storage.release_mark import require_release
from region.folder import RegionFolder

if TYPE_CHECKING:
    from region.config import RegionConfig
    from region.evidence.copying_audit_log import Plan


def copy_audit_log(
    name: Annotated[
        str, typer.Argument(help="The region; the broker that has the audit log must not run.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
) -> None:
    """Have several brokers copy an audit log that is on one broker's disk, as after `felix region to-cluster`.

    It stays the same log: its leaves, checkpoints, keys and cosignatures. Run it on the machine of the broker that has it. That broker finishes it once
    it is started; `felix region status` says how far it is.
    """
    region = choose_region(name)
    folder, config = folder_of(region)
    if config.cluster is None:
        raise RequestError(
            f"{region} has one broker.",
            code=Code.CONFLICT,
            hint="Turn it into one of several first: felix region to-cluster.",
        )
    if read_state(folder.broker_pid) is not None:
        if run(_is_copied(folder, config)):
            out.print(f"Brokers copy the audit log of {region} already.")
            return
        raise UnavailableError(f"{region} runs here.", hint=f"Stop it first: felix region down {region}.")
    plan = run(_copy(folder, config, dry_run=dry_run))
    if plan is None:
        out.print(f"Brokers copy the audit log of {region} already.")
        return
    would = "would" if dry_run else "will"
    out.print(
        f"The audit log of {region}, with {plan.leaves:,} leaves, is on the disk of broker {plan.broker} alone."
    )
    out.print(
        f"Once it starts, broker {plan.broker} {would} write them into felix/system/audit, of which {plan.replicas} brokers {would} have copies. "
        "Nothing crosses until it has; there is no way back."
    )
    if not dry_run:
        out.print(
            f"Start it: felix region up {region} --detach. Brokers that run already: restart them, one after the other."
        )


async def _is_copied(folder: RegionFolder, config: RegionConfig) -> bool:
    """Whether it was done before, of a region that runs here; what is recorded tells."""
    from region.evidence.copying_audit_log import where
    from region.startup.store import open_store

    async with AsyncExitStack() as stack:
        store = await open_store(folder, config, REAL)
        stack.push_async_callback(store.close)
        return (await where(store, config.region)).stream is not None


async def _copy(folder: RegionFolder, config: RegionConfig, *, dry_run: bool) -> Plan | None:
    """What was planned or done; None where it was done before."""
    from cli.several import ETCD_FOLDER, start_etcd
    from region.evidence.copying_audit_log import copy_audit_log as copy
    from region.evidence.copying_audit_log import where
    from region.folder import STREAMS
    from region.startup.store import open_store
    from region.trust.trusted_bundles import own_bundle

    async with AsyncExitStack() as stack:
        if (folder.root / ETCD_FOLDER).is_dir():
            stack.push_async_callback((await start_etcd(folder, config)).end)
        store = await open_store(folder, config, REAL)
        stack.push_async_callback(store.close)
        home = await where(store, config.region)
        if home.stream is not None:
            return None
        data = folder.root / config.of_broker(home.broker).data
        if data.is_dir():
            require_release(PRIVATE_FILES, data, __version__)
            try:
                stack.enter_context(FileLock(data / STREAMS))
            except RequestError as error:
                raise UnavailableError(error.sentence, hint=f"Stop broker {home.broker} first.") from error
        return await copy(store, folder, config, own_bundle(folder, config), REAL, dry_run=dry_run)
