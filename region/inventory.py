"""What the data folder of one of several brokers has, told while no broker serves from it (region.reconciliation.FolderReport).

Every log is opened as a broker opens it: recovered, and what is told of it is on the disk first. The caller holds the folder's lock
(`felix.storage.disk.FileLock` of its `streams`). Every call blocks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from audit.checkpoint import note_size
from audit.leaf import read_header
from audit.tile import CHECKPOINT_PATH, read_entries
from audit.tile_disk import Folder
from felix import __version__
from felix.errors import CorruptionError, TamperError
from felix.names import StreamName
from felix.runtime.port import Runtime
from felix.storage.disk import PRIVATE_FILES, boot_id
from felix.storage.port import Files
from felix.storage.small_file import load_checked
from region.cluster.node_file import NodeFile
from region.cluster.records import ShardId
from region.folder import AUDIT, STREAMS
from region.log.clean_stop import CLEAN_STOP_NAME
from region.log.companions import kind_of, log_number, shard_of
from region.log.directory import COPIES, parse_folder_name, shard_folder
from region.log.disk import DiskLog
from region.log.open_logs import OpenLogs
from region.log.point import LogPoint
from region.log.segment import SEGMENT_SUFFIX, ShardIdentity
from region.reconciliation import AuditTold, FolderReport, LogTold, ShardTold
from region.replication.disk import (
    COPY_SUFFIX,
    ELECTIONS_NAME,
    OLD_SUFFIX,
    LogPlan,
    ReplicaDisk,
    kept_name,
    parse_kept_name,
    rewrite_unsynced,
)


def take_inventory(
    region: str, broker: str, data: Path, runtime: Runtime, files: Files = PRIVATE_FILES
) -> FolderReport | None:
    """What the folder has; None where no broker was ever registered from it. Raises CorruptionError where its file `node` cannot be read,
    OSError."""
    file = NodeFile(files, data, runtime.random).load()
    if not max(file.registration, file.intended):
        return None
    if files.exists(data / STREAMS / CLEAN_STOP_NAME):
        # It says what was not opened since.
        files.remove(data / STREAMS / CLEAN_STOP_NAME)
        files.sync_folder(data / STREAMS)
    return FolderReport(
        region=region,
        broker=broker,
        folder=file.folder,
        registration=file.registration,
        intended=file.intended,
        pulse=file.pulse,
        host=socket.gethostname(),
        boot=boot_id(),
        version=__version__,
        made_ms=runtime.clock.now_ms(),
        shards=tuple(_shards(region, data, runtime, files)),
        audit=file.audit,
        retired=file.retired,
        audit_copies=file.audit_copies,
        audit_epoch=file.audit_epoch,
        audit_log=_audit_log(data / AUDIT),
    )


def _shards(region: str, data: Path, runtime: Runtime, files: Files) -> Iterator[ShardTold]:
    kept = _kept(data / COPIES, files)
    for place in sorted(files.names(data / STREAMS)) if files.exists(data / STREAMS) else ():
        parsed = parse_folder_name(place)
        if parsed is None or not files.is_folder(data / STREAMS / place):
            continue
        name, incarnation = parsed
        # Of a copy that was being replaced there may be the old log alone.
        numbers = sorted(
            {
                int(stem)
                for each in files.names(data / STREAMS / place)
                if (stem := each.removesuffix(OLD_SUFFIX).removesuffix(COPY_SUFFIX)).isdecimal()
            }
        )
        for shard in sorted({shard_of(number) for number in numbers}):
            kinds = {kind_of(number) for number in numbers if shard_of(number) == shard}
            told = ShardTold(stream=str(name), incarnation=incarnation.hex(), number=shard)
            # Of a log whose folder is lost: what was committed of it.
            kinds |= kept.pop(ShardId(told.incarnation, shard), set())
            try:
                logs = tuple(
                    log
                    for kind in sorted(kinds)
                    if (log := _log(region, data, name, incarnation, shard, kind, runtime, files)) is not None
                )
            except CorruptionError as error:
                yield msgspec.structs.replace(told, damaged=error.sentence)
            else:
                yield msgspec.structs.replace(told, logs=logs)
    yield from _lost(data / COPIES, kept, files)


def _log(
    region: str,
    data: Path,
    name: StreamName,
    incarnation: bytes,
    shard: int,
    kind: int,
    runtime: Runtime,
    files: Files,
) -> LogTold | None:
    number = log_number(kind, shard)
    folder = shard_folder(data / STREAMS, name, incarnation, number)
    identity = ShardIdentity(region, str(name), incarnation, number)
    plan = LogPlan(kind, folder, identity, kept_in=data / COPIES)
    if files.exists(folder / ELECTIONS_NAME) or files.exists(plan.kept_file):
        disk = ReplicaDisk.open(plan, files=files, runtime=runtime)
        told = disk.beginning()
        disk.close()
        last = told.history.last
        return LogTold(
            kind=kind,
            epoch=last.epoch,
            election=last.election,
            end=told.end,
            kept=told.kept,
            starts=told.history.starts,
        )
    if not files.exists(folder) or not any(each.endswith(SEGMENT_SUFFIX) for each in files.names(folder)):
        return None
    rewrite_unsynced(files, folder)
    log, _ = DiskLog.open(
        folder, identity, now_ms=runtime.clock.now_ms(), files=files, runtime=runtime, open_logs=OpenLogs()
    )
    end, epoch = log.end_point, log.epochs.current
    log.close()
    return LogTold(kind=kind, epoch=epoch, end=end)


def _kept(copies: Path, files: Files) -> dict[ShardId, set[int]]:
    """The logs whose commit point is known here: their kinds, by shard."""
    kept: dict[ShardId, set[int]] = {}
    for name in files.names(copies) if files.exists(copies) else ():
        if (parsed := parse_kept_name(name)) is not None:
            shard, kind = parsed
            kept.setdefault(shard, set()).add(kind)
    return kept


def _lost(copies: Path, kept: Mapping[ShardId, set[int]], files: Files) -> Iterator[ShardTold]:
    """Copies of which nothing is there but what was committed."""
    for shard, kinds in sorted(kept.items()):
        logs = [
            LogTold(kind=kind, kept=msgspec.json.decode(payload, type=LogPoint))
            for kind in sorted(kinds)
            if (payload := load_checked(files, copies / kept_name(shard, kind))) is not None
        ]
        if logs:
            yield ShardTold(stream="", incarnation=shard.incarnation, number=shard.number, logs=tuple(logs))


def _audit_log(folder: Path) -> AuditTold:
    """What the audit log in this folder says, as far as its newest checkpoint."""
    files = Folder(folder)
    size = 0
    try:
        if (note := files.read(CHECKPOINT_PATH)) is None:
            return AuditTold()
        size = note_size(note)
        documents = {
            header.document_sha256.hex(): header.kind.name
            for _, data in read_entries(files, 0, size, size)
            if (header := read_header(data)) is not None and header.document_sha256
        }
    except TamperError as error:
        # The stream that has the leaves may be whole, and its broker writes these files again from there.
        return AuditTold(signed=size, damaged=error.sentence)
    return AuditTold(signed=size, documents=documents)
