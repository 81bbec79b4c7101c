"""`felix region reconcile`: a metadata store that was put back from a backup is made to fit what the brokers' folders have."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from cli.output import counted, err, iso, note, out, print_json
from cli.process import read_state
from cli.setting import JsonOption, choose_region, folder_of, read_file, run
from felix import __version__
from felix.errors import Code, RequestError, UnavailableError
from felix.files import PRIVATE, replace_file
from felix.runtime.real import REAL
from felix.storage.disk import PRIVATE_FILES, FileLock
from felix.storage.release_mark import is_later, require_release
from region.folder import RegionFolder

if TYPE_CHECKING:
    from region.config import RegionConfig
    from region.reconciliation import FolderReport, Plan

NEVER_KNOWN: Final = (
    "What nobody can tell: rights, quotas, subscriptions and settings of streams are those of the backup. Rights and grants that were taken away since are "
    "in force again, unless the audit log says so; a stream that was deleted since has its key again.",
)


def reconcile(
    name: Annotated[str, typer.Argument(help="The region.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be written, and lost.")
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(help="A broker whose folder will not be heard; say it for each."),
    ] = None,
    retired: Annotated[
        list[str] | None,
        typer.Option(
            help="A broker that was drained and retired since the backup, which no other broker's folder knows; say it for each."
        ),
    ] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Needed where something that was acknowledged may be lost.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Only write what this machine's folders have into this file, for --report on another machine."
        ),
    ] = None,
    report: Annotated[
        list[Path] | None, typer.Option(help="What --save wrote on another machine; say it for each.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make a metadata store that was put back from a backup fit what the brokers' folders have.

    No broker of the region may run. No folder is deleted, and no record cut: shards are led from the copies that have all that was
    acknowledged, in epochs above all that were seen.
    """
    region = choose_region(name)
    folder, config = folder_of(region)
    if config.cluster is None:
        raise RequestError(f"{region} has one broker, which fits its store by itself.", hint="Start it.")
    if read_state(folder.broker_pid) is not None:
        raise UnavailableError(f"{region} runs here.", hint=f"Stop it first: felix region down {region}.")
    with ExitStack() as held:
        reports = _heard(folder, config, held)
        if save is not None:
            replace_file(save, msgspec.json.encode(list(reports.values())), PRIVATE)
            out.print(f"{save} says what is in the data folders of {', '.join(reports) or 'no broker'}")
            return
        for path in report or ():
            reports |= _reported(path, reports)
        plan, is_written = run(
            _reconcile(
                folder,
                config,
                reports,
                without or [],
                retired or [],
                dry_run=dry_run,
                accept_loss=accept_loss,
            )
        )
    if json:
        print_json(_plain(plan), written=is_written)
    else:
        _print(region, plan, is_written=is_written)
    if not is_written and not dry_run:
        raise RequestError(
            f"Nothing was written: in {counted(len(plan.losses), 'case')} what was acknowledged may be lost, cannot be served, or comes back.",
            code=Code.CONFLICT,
            hint="Hear every folder, or put a newer backup back. If it is to be so all the same: --accept-loss.",
        )


def _heard(folder: RegionFolder, config: RegionConfig, held: ExitStack) -> dict[str, FolderReport]:
    """Of this machine's folders. Their locks are held until the end. Raises UnavailableError where a broker runs, or streams are not mounted."""
    from region.begun_folders import begun_folders
    from region.cluster.node_file import NAME
    from region.folder import STREAMS
    from region.inventory import take_inventory

    found = {}
    for file in sorted((folder.root / config.data).glob(f"*/{NAME}")):
        data = file.parent
        require_release(PRIVATE_FILES, data, __version__)
        # Copies that are not mounted would count as lost.
        for each in begun_folders(folder, msgspec.structs.replace(config, data=str(data), broker=data.name)):
            each.require()
        try:
            held.enter_context(FileLock(data / STREAMS))
        except RequestError as error:
            raise UnavailableError(error.sentence, hint=f"Stop broker {data.name} first.") from error
        note(f"reading the folder of {data.name}")
        told = take_inventory(config.region, data.name, data, REAL)
        if told is not None:
            found[data.name] = told
    return found


def _reported(path: Path, known: dict[str, FolderReport]) -> dict[str, FolderReport]:
    from region.reconciliation import FolderReport

    try:
        told = msgspec.json.decode(read_file(path, "The file", None), type=list[FolderReport])
    except msgspec.MsgspecError as error:
        raise RequestError(
            f"{path} is not what `felix region reconcile --save` writes: {error}.", code=Code.CONFIG_INVALID
        ) from error
    if twice := sorted(each.broker for each in told if each.broker in known):
        raise RequestError(
            f"The folder of {twice[0]} is told of twice.", hint="A broker has one data folder."
        )
    if later := sorted(each.version for each in told if is_later(each.version, __version__)):
        raise RequestError(
            f"{path} was written by release {later[-1]} of Felix, and this is release {__version__}: it may say what this one passes over.",
            code=Code.UNSUPPORTED,
            hint="Run the command with the release that the brokers run, on each machine.",
        )
    for each in told:
        # A store that went back does not know whether the broker has run since.
        note(
            f"the folder of {each.broker} is taken as it was at {iso(each.made_ms)} ({path}); if it was served since, make the file again"
        )
    return {each.broker: each for each in told}


async def _reconcile(
    folder: RegionFolder,
    config: RegionConfig,
    reports: dict[str, FolderReport],
    without: Sequence[str],
    retired: Sequence[str],
    *,
    dry_run: bool,
    accept_loss: bool,
) -> tuple[Plan, bool]:
    """The plan, and whether it was carried out."""
    from cli.several import ETCD_FOLDER, start_etcd
    from region.reconciling import Reconciler
    from region.startup.store import open_store

    assert config.cluster is not None
    is_here = (folder.root / ETCD_FOLDER).is_dir()
    async with AsyncExitStack() as stack:
        if is_here:
            stack.push_async_callback((await start_etcd(folder, config)).end)
        store = await open_store(folder, config, REAL)
        stack.push_async_callback(store.close)
        reconciler = Reconciler(store, config.region, REAL, note)
        stack.push_async_callback(reconciler.close)
        await reconciler.open()
        configured = [str(each.id) for each in config.cluster.brokers]
        # Where all run on this machine, the store knows of each that was ever started.
        is_known = is_here and not reconciler.is_empty
        expected = [] if is_known else configured
        plan = await reconciler.plan(reports, expected, without, retired, configured)
        is_to_be = not dry_run and (accept_loss or not plan.losses)
        if is_to_be:
            await reconciler.write(plan)
        return plan, is_to_be


def _plain(plan: Plan) -> dict[str, Any]:
    return {
        "brokers": {broker: node.registration for broker, node in sorted(plan.nodes.items())},
        "shards": [
            {
                "stream": each.after.stream,
                "shard": each.shard.number,
                "epoch_before": 0 if each.before is None else each.before.epoch,
                "epoch": each.after.epoch,
                "copies": list(each.copies),
                "changes": each.changes,
            }
            for each in plan.shards
        ],
        "retired": plan.retired,
        "notes": plan.notes,
        "losses": plan.losses,
    }


def _print(region: str, plan: Plan, *, is_written: bool) -> None:
    changed = [each for each in plan.shards if each.changes]
    would = "was" if is_written else "would be"
    out.print(f"heard: {', '.join(sorted(plan.nodes)) or 'no folder'}")
    out.print(
        f"{counted(len(changed), 'shard')} of {len(plan.shards)} {would} given an epoch above all that were seen"
    )
    for each in changed:
        whose = f"from {', '.join(each.copies)}" if each.copies else "led by nobody"
        before = "no record" if each.before is None else f"epoch {each.before.epoch}"
        out.print(
            f"  {each.after.stream} shard {each.shard.number}: {before}, then {each.after.epoch}; {whose}"
        )
    for sentence in (*plan.notes, *NEVER_KNOWN):
        out.print(sentence)
    for sentence in plan.losses:
        err.print(f"lost: {sentence}", style="bold red", markup=False)
    if is_written:
        out.print(f"{region} is reconciled; start its brokers: felix region up {region}")
