"""`felix stream`: create, list, describe, delete, publish, subscribe."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import typer

import felix
from cli.moments import parse_past, parse_time
from cli.output import (
    Printed,
    counted,
    data_value,
    iso,
    note,
    out,
    payload_value,
    print_json,
    styled,
    table,
    write_data,
    write_json_line,
)
from cli.setting import IdentityOption, JsonOption, RegionOption, connect, reader_watched, run
from felix.errors import Code, RequestError, UnavailableError
from felix.messages import ShardState, StreamState
from felix.runtime.real import now_ms
from felix.settings import Compaction, Deduplication, Offload, Views
from felix.tasks import end_tasks
from policy.quantity import Duration, Size

if TYPE_CHECKING:
    from felix.batch import Record
    from felix.subscription import Gap

app = typer.Typer(no_args_is_help=True)

RETENTION_HELP = (
    "Age, size per shard, or both: 7d,10GB; with acked, only what all durable subscriptions have acknowledged goes: "
    "1h,acked. Default: all stays."
)
Name = Annotated[str, typer.Argument(help="tenant/namespace/name, as in acme/ops/departures.")]


@app.command()
def create(
    name: Name,
    shards: Annotated[int, typer.Option(help="1 to 256; fixed for the stream's life.")] = 1,
    durability: Annotated[str, typer.Option(help="fsync, interval:50ms or ephemeral.")] = "fsync",
    retention: Annotated[str, typer.Option(help=RETENTION_HELP)] = "",
    compact: Annotated[bool, typer.Option("--compact", help="Keep the last record of every key.")] = False,
    tombstones: Annotated[str, typer.Option(help="With --compact: how long deletions stay, as in 24h.")] = "",
    lag: Annotated[str, typer.Option(help="With --compact: keep all that is younger, as in 10m.")] = "",
    offload: Annotated[
        str,
        typer.Option(
            help="Copy closed segments to this URL, which the region must allow, as in s3://bucket/felix."
        ),
    ] = "",
    local: Annotated[
        str, typer.Option(help="With --offload: keep so much of a shard here, as in 1GiB.")
    ] = "",
    ring: Annotated[str, typer.Option(help="Memory per shard of an ephemeral stream, as in 64MiB.")] = "",
    deduplicate: Annotated[
        str,
        typer.Option(help="Remember message ids for so long, as in 10m: a repeated record is not appended."),
    ] = "",
    deduplicate_ids: Annotated[
        int, typer.Option(help="With --deduplicate: remember at most so many ids per shard.")
    ] = Deduplication().ids_max,
    replicas: Annotated[
        int,
        typer.Option(
            help="Copies of each shard, on as many of the region's brokers. Default: as the region has it (felix region status)."
        ),
    ] = 0,
    min_in_sync: Annotated[
        int,
        typer.Option(
            help="With --replicas: how many copies a record is on at least before it is acknowledged. Default: a majority."
        ),
    ] = 0,
    acks: Annotated[
        str,
        typer.Option(
            help="With --replicas: quorum, acknowledged once every copy in sync has the record; or leader, once the leader has it on its disk: "
            "sooner, and what the others lack is lost if it fails."
        ),
    ] = "quorum",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Create a stream."""
    views = Views(
        compaction=parse_compaction(compact, tombstones, lag),
        offload=parse_offload(offload, local),
        deduplication=Deduplication(int(Duration.parse(deduplicate)), deduplicate_ids)
        if deduplicate
        else None,
    )
    state = run(
        _create(
            region,
            identity,
            name,
            shards,
            parse_durability(durability),
            parse_retention(retention),
            ring,
            views,
            replicas,
            min_in_sync,
            acks,
        )
    )
    if json:
        print_json(state)
    else:
        out.print(
            f"{state.stream} is created, {counted(shards, 'shard')}, {copies_said(state)}{durability}, incarnation {state.incarnation.hex()}"
        )


async def _create(
    region: str,
    identity: str,
    name: str,
    shards: int,
    durability: felix.Durability,
    retention: felix.Retention,
    ring: str,
    views: Views,
    replicas: int,
    min_in_sync: int,
    acks: str,
) -> StreamState:
    async with connect(region, identity) as client:
        return await client.create_stream(
            name,
            shards=shards,
            durability=durability,
            retention=retention,
            ring_bytes=int(Size.parse(ring)) if ring else 0,
            views=views,
            replicas=replicas,
            min_in_sync=min_in_sync,
            acks=acks,
        )


def copies_said(state: StreamState) -> str:
    """How many copies a new stream has, before a comma; empty in a region of one broker."""
    if state.replicas > 1:
        return f"{state.replicas} copies (at least {state.min_in_sync} in sync), "
    return "one copy, " if any(shard.replicas for shard in state.state) else ""


def parse_durability(text: str) -> felix.Durability:
    """`fsync`, `interval:50ms`, `ephemeral`. Raises RequestError(INVALID)."""
    kind, _, rest = text.partition(":")
    if kind == "interval" and rest:
        return felix.Durability("interval", int(Duration.parse(rest)))
    if text in ("fsync", "ephemeral"):
        return felix.Durability(text)
    raise RequestError(f"{text!r} is not a durability.", hint="Use fsync, interval:50ms or ephemeral.")


def parse_retention(text: str) -> felix.Retention:
    """`7d`, `10GB`, `7d,10GB`, `7d,acked`. Raises RequestError(INVALID)."""
    age = size = 0
    acked = False
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if part == "acked":
            acked = True
        elif part.upper().endswith("B"):
            size = int(Size.parse(part))
        else:
            age = int(Duration.parse(part))
    return felix.Retention(age, size, acked)


def parse_compaction(wanted: bool, tombstones: str, lag: str) -> Compaction | None:
    """None where none is wanted. Raises RequestError(INVALID)."""
    if not wanted:
        if tombstones or lag:
            raise RequestError("--tombstones and --lag say how to compact.", hint="Give --compact as well.")
        return None
    plain = Compaction()
    return Compaction(
        int(Duration.parse(tombstones)) if tombstones else plain.tombstone_ms,
        int(Duration.parse(lag)) if lag else plain.lag_ms,
    )


def parse_offload(url: str, local: str) -> Offload | None:
    """None where none is wanted. Raises RequestError(INVALID)."""
    if not url:
        if local:
            raise RequestError(
                "--local says what stays here of what is offloaded.", hint="Give --offload as well."
            )
        return None
    return Offload(url, int(Size.parse(local))) if local else Offload(url)


@app.command()
def alter(
    name: Name,
    retention: Annotated[str, typer.Option(help=f"{RETENTION_HELP} none: without bound.")] = "",
    compact: Annotated[
        bool | None, typer.Option("--compact/--no-compact", help="Keep the last record of every key, or all.")
    ] = None,
    tombstones: Annotated[str, typer.Option(help="With --compact: how long deletions stay, as in 24h.")] = "",
    lag: Annotated[str, typer.Option(help="With --compact: keep all that is younger, as in 10m.")] = "",
    offload: Annotated[
        str, typer.Option(help="Copy closed segments to this URL from now on; none: no more.")
    ] = "",
    local: Annotated[
        str, typer.Option(help="With --offload: keep so much of a shard here, as in 1GiB.")
    ] = "",
    deduplicate: Annotated[
        str, typer.Option(help="Remember message ids for so long, as in 10m; none: do not.")
    ] = "",
    deduplicate_ids: Annotated[
        int, typer.Option(help="With --deduplicate: remember at most so many ids per shard.")
    ] = Deduplication().ids_max,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="So many copies of each shard, from 2 on; they are made or dropped while it serves."
        ),
    ] = None,
    min_in_sync: Annotated[
        int | None,
        typer.Option(
            help="On how many copies a record is at least before it is acknowledged; 0: a majority."
        ),
    ] = None,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Change a stream's settings while it serves; what is not named stays as it is.

    What compaction has removed does not come back when it is switched off.
    """
    remove = [] if compact is not False else ["compaction"]
    deduplication = None
    if offload == "none":
        remove.append("offload")
    if deduplicate == "none":
        remove.append("deduplication")
    elif deduplicate:
        deduplication = Deduplication(int(Duration.parse(deduplicate)), deduplicate_ids)
    changes: dict[str, Any] = {
        "retention": parse_retention("" if retention == "none" else retention) if retention else None,
        "compaction": parse_compaction(compact is True, tombstones, lag),
        "deduplication": deduplication,
        "offload": parse_offload("" if offload == "none" else offload, local),
        "remove": remove,
        "replicas": replicas,
        "min_in_sync": min_in_sync,
    }
    if not any(changes.values()) and min_in_sync is None:
        raise RequestError(
            "Nothing is to be changed.", hint="Name a setting; felix stream alter --help lists them."
        )
    state = run(_alter(region, identity, name, changes))
    if json:
        print_json(state)
    else:
        changed = [f"retention {format_retention(state)}", *view_texts(state)]
        if replicas and state.replicas <= 1:
            changed.append("one copy")
        out.print(f"{state.stream} is changed: {'; '.join(changed)}")


async def _alter(region: str, identity: str, name: str, changes: dict[str, Any]) -> StreamState:
    async with connect(region, identity) as client:
        return await client.alter_stream(name, **changes)


@app.command("list")
def list_(
    prefix: Annotated[str, typer.Argument(help="Only names that begin so.")] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """List the streams that this identity may see."""
    states = run(_list(region, identity, prefix))
    if json:
        print_json(states)
        return
    table(
        "Streams",
        ["stream", "shards#", "durability", "records#", "bytes#", "created"],
        [
            [
                state.stream,
                state.shards,
                format_durability(state),
                sum(shard.high_watermark - shard.log_start for shard in state.state),
                sum(shard.size_bytes for shard in state.state),
                iso(state.created_ms),
            ]
            for state in states
        ],
    )


async def _list(region: str, identity: str, prefix: str) -> list[StreamState]:
    async with connect(region, identity) as client:
        return [state async for state in client.list_streams(prefix)]


def format_durability(state: StreamState) -> str:
    """As it was given to `create`."""
    durability = state.durability
    return f"interval:{durability.interval_ms}ms" if durability.kind == "interval" else durability.kind


def format_retention(state: StreamState) -> str:
    """As it was given to `create`; none where nothing bounds it."""
    retention = state.retention
    kept = [str(Duration(retention.age_ms))] if retention.age_ms else []
    kept += [str(Size(retention.size_bytes))] if retention.size_bytes else []
    kept += ["acked"] if retention.acked else []
    return ",".join(kept) or "none"


def format_views(state: StreamState) -> str:
    """The stream's further capabilities, each after two spaces; empty for a plain log."""
    return "".join(f"  {part}" for part in view_texts(state))


def view_texts(state: StreamState) -> list[str]:
    """The stream's further capabilities, one by one."""
    views, parts = state.views, list[str]()
    if (compaction := views.compacted) is not None:
        lag = f", lag {Duration(compaction.lag_ms)}" if compaction.lag_ms else ""
        parts.append(f"compacted (tombstones {Duration(compaction.tombstone_ms)}{lag})")
    if (offload := views.offload) is not None:
        parts.append(f"offloaded to {offload.url}, {Size(offload.local_bytes)} per shard stay")
    if (deduplication := views.deduplication) is not None:
        window = Duration(deduplication.window_ms)
        parts.append(f"message ids remembered for {window}, {deduplication.ids_max:,} per shard")
    if state.replicas > 1:
        acks = ", acknowledged by the leader alone" if state.acks == "leader" else ""
        parts.append(f"{state.replicas} copies, at least {state.min_in_sync} in sync{acks}")
    return parts


@app.command()
def describe(
    name: Name, region: RegionOption = "", identity: IdentityOption = "", json: JsonOption = False
) -> None:
    """Show a stream's settings, and the offsets of each shard."""
    state = run(_describe(region, identity, name))
    if json:
        print_json(state)
        return
    out.print(
        styled(
            (state.stream, "bold"),
            f"  {format_durability(state)}  retention {format_retention(state)}{format_views(state)}",
        )
    )
    out.print(f"incarnation {state.incarnation.hex()}, created {iso(state.created_ms)}")
    table(
        "Shards",
        ["shard#", "first offset#", "next offset#", "epoch#", "bytes#", "segments#", "state"],
        [
            [
                s.shard,
                s.log_start,
                s.high_watermark,
                s.leader_epoch,
                s.size_bytes,
                s.segments,
                format_state(s),
            ]
            for s in state.state
        ],
    )


def format_state(shard: ShardState) -> str:
    """What is wrong first, then where its copies are."""
    missing = [broker for broker in shard.replicas if broker not in shard.in_sync]
    parts = [shard.stopped or (f"led by {shard.leader}" if shard.leader else "serving")]
    if missing:
        parts.insert(0, f"not in sync: {', '.join(missing)}")
    if shard.replicas:
        parts.append(f"copies on {', '.join(shard.replicas)}")
    if shard.unclean:
        parts.append(f"may lack what was acknowledged before epoch {shard.unclean:,}")
    return "; ".join(parts)


UNLED_S: Final = 2.0
"""How often `describe` asks whether a stream has a leader while it waits for its answer: one that died is named until its lease ends."""


async def _describe(region: str, identity: str, name: str) -> StreamState:
    async with connect(region, identity) as client:
        described = asyncio.ensure_future(client.describe_stream(name))
        try:
            while not (await asyncio.wait({described}, timeout=UNLED_S))[0]:
                # Nobody answers for a shard that nobody leads. Why, every broker knows.
                if (unled := await _unled(client, name)) is not None:
                    return unled
            return await described
        finally:
            # One that was awaited has told of its error already.
            if not described.done():
                await end_tasks(described)


async def _unled(client: felix.RegionClient, name: str) -> StreamState | None:
    """The stream, as the broker that answers knows it, where one of its shards is led by nobody."""
    async for state in client.list_streams(name):
        if state.stream == name:
            return state if any(shard.stopped and not shard.leader for shard in state.state) else None
    return None


@app.command()
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Delete a stream and its records, and destroy its key. This cannot be undone."""
    try:
        state = run(_describe(region, identity, name))
    except RequestError as error:
        if error.code is not Code.NOT_FOUND_OR_FORBIDDEN:
            raise
        # Describing asks for any right, deleting for another than to subscribe.
        sentence = f"There is no stream {name} that this identity may delete."
        raise RequestError(sentence, code=error.code, hint=error.hint) from error
    records = sum(shard.high_watermark - shard.log_start for shard in state.state)
    if not yes:
        typer.confirm(f"Delete {name} and its {records:,} records?", abort=True, err=True)
    said = run(_delete(region, identity, name, state.incarnation))
    out.print(f"{name} and its {records:,} records are deleted")
    if key := said.removeprefix(f"{name} and its records are deleted.").strip():
        out.print(key)


async def _delete(region: str, identity: str, name: str, incarnation: bytes) -> str:
    async with connect(region, identity) as client:
        return await client.delete_stream(name, incarnation=incarnation)


# -- subscribe -----------------------------------------------------------------------------------------


@app.command()
def subscribe(
    name: Name,
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            help=(
                "earliest, latest, @offset, a time such as 2013-01-01T00:00Z, or so long ago, as in 2h. Default: latest; earliest with "
                "--until and --until-end."
            ),
        ),
    ] = "",
    shard: Annotated[list[int] | None, typer.Option(help="Only this shard; may be repeated.")] = None,
    count: Annotated[int, typer.Option(help="End after so many records; 0: go on.")] = 0,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="End where the stream ended at the start.")
    ] = False,
    until: Annotated[
        str,
        typer.Option(
            help="Only records from before this time, or from before so long ago, as in 10m; ends there."
        ),
    ] = "",
    key: Annotated[str, typer.Option(help="Only records with this key.")] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Print records as they come; with --json one object a line, with offset, time, key and headers."""
    wanted = _Wanted(key.encode() or None, parse_past(until, now_ms()) if until else None, count)
    until_end = until_end or bool(until)
    start = parse_start(from_ or ("earliest" if until_end else "latest"))
    run(_subscribe(region, identity, name, start, shard, wanted, until_end, json))


def parse_start(text: str) -> Literal["earliest", "latest"] | int | datetime:
    """What the SDK takes as a start. Raises RequestError(INVALID)."""
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if text.startswith("@") and text[1:].isdecimal():
        return int(text[1:])
    try:
        return datetime.fromtimestamp(parse_time(text, now_ms()) / 1000, UTC)
    except RequestError as error:
        raise RequestError(
            f"{text!r} is no place to start.",
            hint="Use earliest, latest, @offset as in @1200, a time as in 2013-01-01T00:00Z, or so long ago, as in 2h.",
        ) from error


class _Wanted(NamedTuple):
    """Of the records that come, those that are to be printed."""

    key: bytes | None
    until_ms: int | None
    records_max: int
    """0: all"""


async def _subscribe(
    region: str,
    identity: str,
    name: str,
    start: Any,
    shards: list[int] | None,
    wanted: _Wanted,
    until_end: bool,
    as_json: bool,
) -> None:
    printed = Printed("Go on behind it with --shard and --from @OFFSET.")
    given = 0
    async with connect(region, identity) as client:
        ends: dict[int, int] = {}
        if until_end:
            state = await client.describe_stream(name)
            unknown = [each for each in shards or () if not 0 <= each < state.shards]
            if unknown:
                raise RequestError(f"{name} has no shard {unknown[0]}: it has {state.shards}, from 0 on.")
            untold = [s for s in state.state if not s.is_told and (not shards or s.shard in shards)]
            if untold:
                raise UnavailableError(
                    f"Nobody said where shard {untold[0].shard} of {name} ends: {format_state(untold[0])}.",
                    code=Code.SHARD_STOPPED,
                    hint="Try again: a restart and an election take seconds. Else `felix region status` says what is wrong.",
                )
            ends = {
                s.shard: s.high_watermark
                for s in state.state
                if s.high_watermark > s.log_start and (not shards or s.shard in shards)
            }
        subscription = client.stream(name).subscribe(start, shards=shards, on_gap=_say_gap)
        async with reader_watched(), subscription:
            with printed.told():
                stands = subscription.positions
                ends = {shard: end for shard, end in ends.items() if stands.get(shard, 0) < end}
                if until_end and not ends:
                    return
                async for batch in subscription.batches():
                    for record in batch.records():
                        if until_end and batch.shard not in ends:
                            break  # of a shard that is done, while another one is not
                        past = wanted.until_ms is not None and record.timestamp_ms >= wanted.until_ms
                        if not past and (wanted.key is None or record.key == wanted.key):
                            write_record(record, batch.shard, as_json=as_json)
                            printed.add(batch.shard, record.offset)
                            given += 1
                        if past or record.offset + 1 >= ends.get(batch.shard, 1 << 62):
                            del ends[batch.shard]
                        if (wanted.records_max and given == wanted.records_max) or (until_end and not ends):
                            printed.flush()
                            return
                    # The reader of a pipe gets each batch when it comes.
                    printed.flush()


def _say_gap(gap: Gap) -> None:
    note(f"gap: {gap}")


def write_record(record: Record, shard: int, *, as_json: bool) -> None:
    """One record on standard output: its payload and a line feed, or an object."""
    payload = bytes(record.payload)
    if not as_json:
        write_data(payload, b"\n")
        return
    row: dict[str, Any] = {
        "shard": shard,
        "offset": record.offset,
        "time": datetime.fromtimestamp(record.timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds"),
        "key": data_value(bytes(record.key)) if record.key else None,
        "headers": {header: data_value(bytes(value)) for header, value in record.headers.items()},
        **payload_value(payload),
    }
    write_json_line(row)
