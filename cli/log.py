"""`felix log`: look at segment files. They need no broker, and show no contents: records are sealed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from cli.output import err, iso, out, print_json, table
from cli.setting import JsonOption, read_file
from felix.errors import RequestError
from region.log.inspect import DamageLine, EntryLine, inspect_entries
from region.log.segment import SEGMENT_SUFFIX, decode_segment_header

app = typer.Typer(help="Segment files of the log.", no_args_is_help=True)

EXIT_DAMAGED: Final = 5


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
    if segment.suffix != SEGMENT_SUFFIX:
        raise RequestError(f"{segment} is no segment file.", hint=f"Their names end in {SEGMENT_SUFFIX}.")
    data = read_file(segment, "The segment")
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
                "entries": [line._asdict() for line in entries],
                "damage": [line._asdict() for line in damaged],
            }
        )
    else:
        records = sum(line.records for line in entries)
        out.print(
            f"[bold]{identity.stream}[/] shard {identity.shard} of {identity.region}, incarnation "
            f"{identity.incarnation.hex()}, from offset {header.base_offset}, made {iso(header.created_ms)}"
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
                markup=False,
            )
    if damaged:
        raise typer.Exit(EXIT_DAMAGED)
