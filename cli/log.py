"""`felix log`: look at segment files, and verify all of them. No broker is needed, and no contents are shown."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.exits import EXIT_DAMAGED
from cli.output import counted, err, iso, note, out, print_json, progress, styled, table
from cli.setting import JsonOption, RegionOption, folder_of, read_file
from felix import __version__
from felix.errors import Code, RequestError, UnavailableError
from felix.names import StreamName
from felix.storage.disk import DiskFiles, FileLock
from felix.storage.release_mark import require_release
from keys.keyring import Keyring, open_keyring
from keys.shared import RegionKeys, SharedKeyring, open_stored
from region.folder import RegionFolder
from region.log.begun_shards import give_leave, missing_shards
from region.log.companions import RECORDS, JournalKind, kind_of, shard_of
from region.log.directory import (
    StoredStream,
    folder_name,
    offload_base,
    parse_folder_name,
    shard_folder,
    stored_streams,
)
from region.log.fsspec_store import check_url, list_names
from region.log.inspect import DamageLine, EntryLine, inspect_entries
from region.log.offload import object_url
from region.log.offloader import Gap, History, Restoration, check_object, is_lost
from region.log.segment import SEGMENT_SUFFIX, ShardIdentity, decode_segment_header
from region.log.verify import Finding, ShardVerdict, shard_bytes, verify_shard
from region.streams.sealing import KeyringSeal

if TYPE_CHECKING:
    from region.config import RegionConfig

app = typer.Typer(no_args_is_help=True)


def _data(config: RegionConfig) -> str:
    """The data folder of the broker that this configuration is of; of several, the one that `broker` names."""
    return config.data if config.cluster is None else config.of_broker(config.broker).data


def _open_keys(streams: Path, folder: RegionFolder, config: RegionConfig) -> Keyring | SharedKeyring:
    """The keys of the logs in `streams`: of several brokers, each has copies of those that it shares beside them."""
    if config.cluster is None:
        return open_keyring(folder.keys, config.region)
    return open_stored(streams.parent / "keys", folder.keys, config.region)


@app.command()
def verify(
    region: RegionOption = "",
    stream: Annotated[str, typer.Option(help="Only this stream; else all that have a folder.")] = "",
    shard: Annotated[int, typer.Option(help="Only this shard and its journals; -1: all.")] = -1,
    data: Annotated[
        Path | None, typer.Option(help="A copy of a region's data/streams, instead of its own.")
    ] = None,
    unseal: Annotated[
        bool, typer.Option("--open", help="Also unseal every batch with the region's keys.")
    ] = False,
    remote: Annotated[
        bool, typer.Option("--remote", help="Also read every offloaded segment in its store, and compare it.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check every byte of a region's records at rest, journals included; exit code 5 where something is damaged.

    The broker must not run (4 where it does). Nothing is changed. What a crash may leave is noted and no damage.
    """
    folder, config = folder_of(region)
    streams = data or folder.root / _data(config) / "streams"
    wanted = StreamName.parse(stream) if stream else None
    if not streams.is_dir():
        raise RequestError(f"There is no folder {streams}.", code=Code.NOT_FOUND)
    # Who does not know what a later release wrote would call it damaged.
    require_release(DiskFiles(), streams.parent, __version__)
    with ExitStack() as held:
        if os.access(streams, os.W_OK):
            try:
                held.enter_context(FileLock(streams))
            except RequestError as error:
                raise UnavailableError(
                    error.sentence, hint="Stop the broker, or verify a copy with --data."
                ) from error
        gone = _gone(streams)
        lost = {(one.incarnation, one.shard) for one in gone}
        shards = [
            (stored, number)
            for stored in stored_streams(streams, DiskFiles())
            for number in stored.shards
            if wanted in (None, stored.name)
            and shard in (-1, shard_of(number))
            and (stored.incarnation.hex(), number) not in lost
        ]
        gone = [
            one
            for one in gone
            if wanted in (None, StreamName.parse(one.stream)) and shard in (-1, shard_of(one.shard))
        ]
        if not shards and not gone and wanted is not None:
            raise RequestError(f"There are no records of {wanted} in {streams}.", code=Code.NOT_FOUND)
        keyring = None
        if unseal:
            keyring = _open_keys(streams, folder, config)
            held.callback(keyring.close)
        verdicts = _verify_all(streams, config.region, shards, keyring, remote=remote) + gone
    if json:
        print_json(verdicts, whole=all(verdict.is_whole for verdict in verdicts))
    else:
        _print_verdicts(verdicts, unsealed=unseal)
    if not all(verdict.is_whole for verdict in verdicts):
        raise typer.Exit(EXIT_DAMAGED)


@app.command()
def restore(
    stream: Annotated[str, typer.Argument(help="tenant/namespace/name.")],
    url: Annotated[str, typer.Argument(help="The URL that the stream was offloaded to.")],
    incarnation: Annotated[
        str, typer.Option(help="Which incarnation, in hex; needed where the store has several.")
    ] = "",
    unverified: Annotated[
        bool,
        typer.Option(
            "--unverified",
            help="Also believe manifests without a tag, which versions before wrote: who keeps the store could have changed them.",
        ),
    ] = False,
    epoch: Annotated[
        int,
        typer.Option(
            help="Where the store has several histories of a shard: the one whose newest epoch this is; -1: the newest.",
        ),
    ] = -1,
    accept_gap: Annotated[
        bool,
        typer.Option(
            "--accept-gap",
            help="Where offsets are missing in the store: begin the shard behind the last of them, and leave out what stands before.",
        ),
    ] = False,
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Rebuild a stream's lost folder from its offloaded segments. The broker must not run; the region's keys are needed.

    What was written after the newest offloaded segment is lost, and its offsets will be given to other records: tell the
    stream's consumers. Where each shard ends is told: whoever keeps the store can leave the newest segments out, and change none. Shards that have records here stay as they are. Broken off, it is run again; until it is done,
    no broker serves what is not whole.
    """
    folder, config = folder_of(region)
    streams = folder.root / _data(config) / "streams"
    require_release(DiskFiles(), streams.parent, __version__)
    name = StreamName.parse(stream)
    check_url(url)
    found = [
        parsed[1]
        for each in list_names(object_url(url, config.region))
        if (parsed := parse_folder_name(each)) is not None and parsed[0] == name
    ]
    if len(found) > 1:
        # Where a store has folders, that of a stream which was deleted stays, with nothing in it.
        found = [
            one for one in found if _has_objects(object_url(url, f"{config.region}/{folder_name(name, one)}"))
        ]
    chosen = [one for one in found if incarnation in ("", one.hex())]
    if len(chosen) != 1:
        known = ", ".join(one.hex() for one in found) or "none"
        raise RequestError(
            f"{url} has {len(chosen)} incarnations of {name} that were meant; there: {known}.",
            code=Code.NOT_FOUND,
            hint="Name one with --incarnation." if chosen else "",
        )
    rows = []
    others: list[tuple[int, History]] = []
    gaps: list[tuple[int, tuple[Gap, ...], int]] = []
    files = DiskFiles()
    with FileLock(streams), closing(_open_keys(streams, folder, config)) as keyring:
        base = object_url(url, f"{config.region}/{folder_name(name, chosen[0])}")
        numbers = sorted(int(each) for each in list_names(base) if each.isdecimal())
        targets = {number: shard_folder(streams, name, chosen[0], number) for number in numbers}
        lost = [number for number in numbers if is_lost(targets[number], files)]
        restorations = {}
        # Where nothing is lost, the first one says so.
        for number in lost or numbers[:1]:
            identity = ShardIdentity(config.region, str(name), chosen[0], number)
            tag = KeyringSeal(keyring, name, chosen[0], number).tag
            restorations[number] = Restoration(
                offload_base(url, identity),
                targets[number],
                identity,
                files,
                tag,
                unverified=unverified,
                epoch=None if epoch < 0 else epoch,
                accept_gap=accept_gap,
            )
        # All of them are known not to be whole before the first one is: no broker begins one anew beside it, whenever this is broken off.
        for restoration in restorations.values():
            restoration.begin()
        for number, restoration in restorations.items():
            restored = restoration.finish()
            if restored.gaps:
                gaps.append((number, restored.gaps, restored.start))
            others += [(number, one) for one in restored.others]
            rows.append(
                {
                    "shard": number,
                    "segments": restored.segments,
                    "first_offset": restored.start,
                    "next_offset": restored.end,
                    "last_time": iso(restored.last_time_ms),
                    "untagged": restored.untagged,
                    "epoch": restored.history.epoch,
                    "gaps": [one._asdict() for one in restored.gaps],
                    "other_histories": [one._asdict() for one in restored.others],
                    "folder": str(targets[number]),
                }
            )
        # What views noted beside the records is in no store.
        journals = [
            number
            for place, number in missing_shards(files, streams)
            if place == folder_name(name, chosen[0])
            and kind_of(number) != RECORDS
            and shard_of(number) in restorations
        ]
        for number in journals:
            give_leave(files, shard_folder(streams, name, chosen[0], number))
    if journals:
        note(
            f"What is not in the store begins anew: {', '.join(map(_shard_name, journals))}. Jobs that were done, or records that were acknowledged, are given out again."
        )
    kept = [number for number in numbers if number not in restorations]
    if json:
        print_json({"stream": str(name), "incarnation": chosen[0].hex(), "shards": rows, "kept": kept})
    else:
        out.print(f"{name}, incarnation {chosen[0].hex()}: {len(rows)} shards are there again")
        table(
            "",
            [
                "shard#",
                "segments#",
                "first offset#",
                "next offset#",
                "last record",
                "untagged#",
                "epoch#",
                "folder",
            ],
            [[value for key, value in row.items() if key not in ("gaps", "other_histories")] for row in rows],
        )
        if kept:
            out.print(
                f"Left as they are, since they have records here: {', '.join(f'shard {number}' for number in kept)}."
            )
        for number, restored_gaps, start in gaps:
            missing = ", ".join(f"{gap.first:,} to {gap.next - 1:,}" for gap in restored_gaps)
            out.print(
                f"Of shard {number} offsets {missing} are missing: it begins at {start:,}. What the store has before is left there, and goes with retention or the stream."
            )
        for number, other in others:
            out.print(
                f"Of shard {number} the store has another history besides, to before offset {other.end:,}: --epoch {other.epoch} restores that one."
            )
        out.print(
            "Compare each end with what consumers and bridges had: newer segments that somebody took out of the store cannot be seen here."
        )


def _has_objects(base: str) -> bool:
    """Whether a store has anything of an incarnation. Raises UnavailableError."""
    return any(list_names(object_url(base, each)) for each in list_names(base))


def _gone(streams: Path) -> list[ShardVerdict]:
    """The shards that were begun, and of which nothing is left. What a crash left of the memory of a deleted stream is noted, and no damage."""
    found = []
    for place, number in missing_shards(DiskFiles(), streams):
        parsed = parse_folder_name(place)
        if parsed is None:
            continue
        stays = (streams / place).is_dir()
        what = "the shard was begun, and nothing is left of it" + (
            "" if stays else "; nor of the stream's folder: the stream may have been deleted"
        )
        finding = Finding(str(streams / place / f"{number:05d}"), 0, -1, what, is_damage=stays)
        found.append(ShardVerdict(str(parsed[0]), parsed[1].hex(), number, findings=[finding]))
    return found


def _verify_all(
    streams: Path,
    region: str,
    shards: list[tuple[StoredStream, int]],
    keyring: RegionKeys | None,
    *,
    remote: bool,
) -> list[ShardVerdict]:
    verdicts = []
    with progress(counted=False) as shown:
        folders = [
            shard_folder(streams, stored.name, stored.incarnation, number) for stored, number in shards
        ]
        task = shown.add_task("Verifying", total=sum(map(shard_bytes, folders)))
        for (stored, number), folder in zip(shards, folders, strict=True):
            shown.update(task, description=f"{stored.name} {_shard_name(number)}")
            seal = keyring and KeyringSeal(keyring, stored.name, stored.incarnation, number)
            verdict = verify_shard(
                folder,
                ShardIdentity(region, str(stored.name), stored.incarnation, number),
                open_batch=seal.open_batch if seal else None,
                progress=lambda size: shown.advance(task, size),
                check_object=check_object if remote else None,
            )
            verdicts.append(verdict)
    return verdicts


def _shard_name(number: int) -> str:
    """`3`, or `3 queue` for the journal of a view beside it."""
    kind, shard = kind_of(number), shard_of(number)
    return f"{shard} {JournalKind(kind).name.lower()}" if kind in set(JournalKind) else str(number)


def _print_verdicts(verdicts: list[ShardVerdict], *, unsealed: bool) -> None:
    table(
        "Shards",
        [
            "stream",
            "shard",
            "first offset#",
            "next offset#",
            "segments#",
            "compacted#",
            "offloaded#",
            "batches#",
            "records#",
            "bytes#",
        ]
        + (["opened#"] if unsealed else [])
        + ["state"],
        [
            [
                one.stream,
                _shard_name(one.shard),
                one.log_start,
                one.log_end,
                one.segments,
                one.compacted_segments,
                one.offloaded_segments,
                one.batches,
                one.records,
                one.segment_bytes,
                *([one.opened] if unsealed else []),
                "damaged" if not one.is_whole else "whole, with notes" if one.findings else "whole",
            ]
            for one in verdicts
        ],
    )
    for one in verdicts:
        for finding in one.findings:
            where = f"{finding.file} at {finding.position:,}"
            where += f" (offset {finding.offset})" if finding.offset >= 0 else ""
            err.print(
                f"{'damaged' if finding.is_damage else 'note'}: {where}: {finding.what}",
                style="red" if finding.is_damage else None,
            )
        if one.findings_left_out:
            err.print(
                f"{one.findings_left_out:,} more findings in {one.stream} {_shard_name(one.shard)}",
            )


@app.command()
def inspect(
    segment: Annotated[
        Path, typer.Argument(help="A segment file, data/streams/<stream>/<shard>/<offset>.seg.")
    ],
    last: Annotated[int, typer.Option(help="So many entries from the end; 0: all.")] = 20,
    json: JsonOption = False,
) -> None:
    """Show a segment's structure without its contents; exit code 5 where something in it is damaged.

    A file that a broker is writing to may end in the middle of an entry.
    """
    if segment.is_file() and segment.suffix != SEGMENT_SUFFIX:
        raise RequestError(f"{segment} is no segment file.", hint=f"Their names end in {SEGMENT_SUFFIX}.")
    data = read_file(segment, "The segment", None)
    header, _ = decode_segment_header(data)
    lines = list(inspect_entries(data))
    damaged = [line for line in lines if isinstance(line, DamageLine)]
    entries = [line for line in lines if isinstance(line, EntryLine)]
    identity = header.identity
    if json:
        print_json(
            {
                "region": identity.region,
                "stream": identity.stream,
                "incarnation": identity.incarnation.hex(),
                "shard": identity.shard,
                "base_offset": header.base_offset,
                "created_ms": header.created_ms,
                "compacted": header.span._asdict() if header.span else None,
                "head": header.head._asdict() if header.head else None,
                "entries": [line._asdict() for line in entries],
                "damage": [line._asdict() for line in damaged],
            }
        )
    else:
        records = sum(line.records for line in entries)
        out.print(
            styled(
                (str(identity.stream), "bold"),
                f" shard {_shard_name(identity.shard)} of {identity.region}, incarnation "
                f"{identity.incarnation.hex()}, from offset {header.base_offset}, made {iso(header.created_ms)}",
            )
        )
        if (head := header.head) and (head.note or head.carried):
            out.print(
                f"begins behind {counted(head.note, 'position')}, with copies of {counted(head.carried, 'annotation')}"
            )
        if span := header.span:
            out.print(
                f"compacted: stands for offsets {header.base_offset} to {span.end_offset - 1} with {span.records:,} records "
                f"in {span.batches:,} batches, generation {span.generation}"
            )
        out.print(f"{len(data):,} bytes, {len(entries):,} entries, {records:,} records")
        table(
            "",
            ["at#", "bytes#", "offset#", "records#", "epoch#", "appended", "flags", "key", "annotation#"],
            [
                [
                    line.position,
                    line.length,
                    line.base_offset,
                    line.records,
                    line.leader_epoch,
                    iso(line.append_time_ms),
                    " ".join(line.flags),
                    line.key_id,
                    line.annotation_length or None,
                ]
                for line in entries[-last if last else 0 :]
            ],
        )
        for line in damaged:
            err.print(
                f"damaged: {line.length:,} bytes at {line.position:,}: {line.reason}",
                style="red",
            )
    if damaged:
        raise typer.Exit(EXIT_DAMAGED)
