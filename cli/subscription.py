"""`felix subscription`: create, alter, list, describe, seek, redrive, delete, consume."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, Any

import typer

from cli.output import Printed, iso, note, out, print_json, styled, table
from cli.setting import IdentityOption, JsonOption, RegionOption, connect, reader_watched, run
from cli.stream import parse_start, write_record
from felix.batch import Record
from felix.errors import RequestError
from felix.messages import Redriven, SubscriptionState
from felix.settings import Retries, RetriesChange, SubscriptionSettings
from felix.visible import spelled_out
from policy.quantity import Duration

app = typer.Typer(no_args_is_help=True)

Stream = Annotated[str, typer.Argument(help="tenant/namespace/name, as in acme/ops/departures.")]
Name = Annotated[str, typer.Argument(help="The subscription's name, as in billing.")]
From = Annotated[
    str,
    typer.Option(
        "--from",
        help="Where it begins: earliest, latest, @offset, a time such as 2013-01-01T00:00Z, or so long ago, as in 2h.",
    ),
]
AckTimeout = Annotated[str, typer.Option(help="What is not acknowledged after so long is delivered again.")]
Attempts = Annotated[int, typer.Option(help="Deliveries before a record is a dead letter; 0: no bound.")]
RetryInterval = Annotated[str, typer.Option(help="Wait before the second delivery, doubled each time.")]
RetryIntervalMax = Annotated[str, typer.Option(help="The longest wait between two deliveries.")]
DeadLetter = Annotated[
    str, typer.Option(help="The dead-letter stream. Default: the stream's name and .dead.")
]
Unacked = Annotated[int, typer.Option(help="Records per shard with consumers at a time.")]
InactiveTtl = Annotated[
    str, typer.Option(help="Delete it after so long without a consumer, as in 7d. Default: never.")
]
Exclusive = Annotated[bool, typer.Option("--exclusive", help="One consumer has all shards, others stand by.")]


@app.command()
def create(
    stream: Stream,
    name: Name,
    from_: From = "latest",
    ack_timeout: AckTimeout = "30s",
    max_attempts: Attempts = 0,
    retry_interval: RetryInterval = "1s",
    retry_interval_max: RetryIntervalMax = "5m",
    dead_letter: DeadLetter = "",
    max_unacked: Unacked = 100_000,
    inactive_ttl: InactiveTtl = "",
    exclusive: Exclusive = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Create a durable subscription."""
    start = parse_start(from_)
    settings = SubscriptionSettings(
        start if isinstance(start, str) else "latest",
        int(Duration.parse(ack_timeout)),
        Retries(
            max_attempts,
            int(Duration.parse(retry_interval)),
            int(Duration.parse(retry_interval_max)),
            dead_letter,
        ),
        max_unacked,
        int(Duration.parse(inactive_ttl)) if inactive_ttl else 0,
        exclusive,
    )
    settings.check()
    state = run(_create(region, identity, stream, name, settings, None if isinstance(start, str) else start))
    if json:
        print_json(state)
    else:
        out.print(f"{state.name} of {state.stream} is created, from {from_}")


async def _create(
    region: str,
    identity: str,
    stream: str,
    name: str,
    settings: SubscriptionSettings,
    begin: int | datetime | None,
) -> SubscriptionState:
    async with connect(region, identity) as client:
        return await client.stream(stream).create_subscription(name, settings, begin=begin)


@app.command()
def alter(
    stream: Stream,
    name: Name,
    ack_timeout: Annotated[
        str, typer.Option(help="What is not acknowledged after so long is delivered again, from now on.")
    ] = "",
    max_attempts: Annotated[
        int | None, typer.Option(help="Deliveries before a record is a dead letter; 0: no bound.")
    ] = None,
    retry_interval: Annotated[
        str, typer.Option(help="Wait before the second delivery, doubled each time.")
    ] = "",
    retry_interval_max: Annotated[str, typer.Option(help="The longest wait between two deliveries.")] = "",
    dead_letter: Annotated[
        str,
        typer.Option(help="The dead-letter stream from now on; default: the stream's name and .dead again."),
    ] = "",
    max_unacked: Annotated[
        int | None, typer.Option(help="Records per shard with consumers at a time.")
    ] = None,
    inactive_ttl: Annotated[
        str, typer.Option(help="Delete it after so long without a consumer, as in 7d; none: never.")
    ] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Change a subscription's settings while its consumers go on; what is not named stays, its positions do, too."""
    retries = RetriesChange(
        max_attempts,
        int(Duration.parse(retry_interval)) if retry_interval else None,
        int(Duration.parse(retry_interval_max)) if retry_interval_max else None,
        ("" if dead_letter == "default" else dead_letter) if dead_letter else None,
    )
    ttl_ms = 0 if inactive_ttl in ("", "none") else int(Duration.parse(inactive_ttl))
    changes: dict[str, Any] = {
        "ack_timeout": int(Duration.parse(ack_timeout)) / 1000 if ack_timeout else None,
        "retries": retries if retries != RetriesChange() else None,
        "unacked_max": max_unacked,
        "inactive_ttl": ttl_ms / 1000 if inactive_ttl else None,
    }
    if all(value is None for value in changes.values()):
        raise RequestError(
            "Nothing is to be changed.", hint="Name a setting; felix subscription alter --help lists them."
        )
    state = run(_alter(region, identity, stream, name, changes))
    if json:
        print_json(state)
    else:
        out.print(f"{state.name} of {state.stream} is changed: {format_settings(state)}")


async def _alter(
    region: str, identity: str, stream: str, name: str, changes: dict[str, Any]
) -> SubscriptionState:
    async with connect(region, identity) as client:
        return await client.stream(stream).alter_subscription(name, **changes)


def format_settings(state: SubscriptionState) -> str:
    """The alterable settings, in one line."""
    settings = state.settings
    retries = settings.retries
    ttl = f", deleted after {Duration(settings.inactive_ttl_ms)} unused" if settings.inactive_ttl_ms else ""
    return (
        f"ack timeout {Duration(settings.ack_timeout_ms)}, attempts {retries.attempts_max or 'without bound'}, retries "
        f"after {Duration(retries.interval_ms)} to {Duration(retries.interval_ms_max)}, {settings.unacked_max:,} records "
        f"out at a time{ttl}"
    )


@app.command("list")
def list_(
    stream: Annotated[str, typer.Argument(help="Only of this stream.")] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """List the durable subscriptions of streams that this identity may subscribe to."""
    states = run(_list(region, identity, stream))
    if json:
        print_json(states)
        return
    table(
        "Durable subscriptions",
        ["stream", "name", "ack timeout", "attempts#", "redelivered#", "dead#", "creator", "created"],
        [
            [
                s.stream,
                s.name,
                str(Duration(s.settings.ack_timeout_ms)),
                s.settings.retries.attempts_max,
                "" if s.leader else s.redelivered,
                "" if s.leader else s.dead,
                s.creator.rpartition("/")[2],
                iso(s.created_ms),
            ]
            for s in states
        ],
    )


async def _list(region: str, identity: str, stream: str) -> list[SubscriptionState]:
    async with connect(region, identity) as client:
        return [state async for state in client.list_subscriptions(stream)]


@app.command()
def describe(
    stream: Stream,
    name: Name,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Show a subscription's settings, its position and lag per shard, and its consumers."""
    state = run(_describe(region, identity, stream, name))
    if json:
        print_json(state)
        return
    out.print(
        styled(
            (spelled_out(state.name), "bold"),
            f" of {state.stream}, by {spelled_out(state.creator)}, since {iso(state.created_ms)}",
        )
    )
    out.print(format_settings(state))
    out.print(
        f"{state.redelivered:,} redelivered, {state.dead:,} dead letters, {state.skipped:,} taken by retention"
    )
    table(
        "Shards",
        [
            "shard#",
            "committed#",
            "next offset#",
            "lag#",
            "lag bytes#",
            "lag ms#",
            "unacked#",
            "waiting#",
            "consumer",
        ],
        [
            [
                s.shard,
                s.committed,
                s.high_watermark,
                s.lag_records,
                s.lag_bytes,
                s.lag_ms,
                s.unacked,
                s.waiting,
                spelled_out(s.consumer),
            ]
            for s in state.shards
        ],
    )
    table(
        "Consumers",
        ["consumer", "identity", "state", "shards"],
        [[spelled_out(c.name), c.identity, c.state, ", ".join(map(str, c.shards))] for c in state.consumers],
    )


async def _describe(region: str, identity: str, stream: str, name: str) -> SubscriptionState:
    async with connect(region, identity) as client:
        return await client.stream(stream).describe_subscription(name)


@app.command()
def seek(
    stream: Stream,
    name: Name,
    to: Annotated[
        str,
        typer.Argument(
            help="earliest, latest, @offset, a time such as 2013-01-01T00:00Z, or so long ago, as in 2h."
        ),
    ],
    shard: Annotated[list[int] | None, typer.Option(help="Only this shard; may be repeated.")] = None,
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Move a subscription's position. What its consumers have in hand no longer counts."""
    out.print(run(_seek(region, identity, stream, name, to, shard)))


async def _seek(region: str, identity: str, stream: str, name: str, to: str, shards: list[int] | None) -> str:
    start = parse_start(to)
    async with connect(region, identity) as client:
        return await client.stream(stream).seek_subscription(
            name,
            start,
            shards=shards,
        )


@app.command()
def redrive(
    stream: Stream,
    name: Name,
    records: Annotated[int, typer.Option("--records", "-n", help="At most so many; 0: all.")] = 0,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Deliver dead letters to the subscription that gave them up again, oldest first; their attempts start at zero."""
    done = run(_redrive(region, identity, stream, name, records))
    if json:
        print_json({"redriven": done.redriven, "gone": done.gone, "held": done.held, "full": done.full})
        return
    out.print(f"{_letters(done.redriven)} delivered to {name} of {stream} again")
    if done.gone:
        note(f"{_letters(done.gone)} left where they lie: {stream} does not have their records any more.")
    if done.held:
        note(f"{_letters(done.held)} left where they lie: a worker or a transaction holds them.")
    if done.full:
        note(f"{name} takes no more before some are acknowledged: run it again then.")


def _letters(count: int) -> str:
    return "1 dead letter is" if count == 1 else f"{count:,} dead letters are"


async def _redrive(region: str, identity: str, stream: str, name: str, records: int) -> Redriven:
    async with connect(region, identity) as client:
        return await client.stream(stream).redrive_subscription(name, records)


@app.command()
def delete(
    stream: Stream,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Delete a subscription and its position; the stream's records stay."""
    if not yes:
        typer.confirm(f"Delete the subscription {name} of {stream}, and its position?", abort=True, err=True)
    run(_delete(region, identity, stream, name))
    out.print(f"{name} of {stream} is deleted")


async def _delete(region: str, identity: str, stream: str, name: str) -> None:
    async with connect(region, identity) as client:
        await client.stream(stream).delete_subscription(name)


@app.command()
def consume(
    stream: Stream,
    name: Name,
    from_: Annotated[
        str, typer.Option("--from", help="earliest or latest: make the subscription where there is none.")
    ] = "",
    count: Annotated[int, typer.Option(help="End after so many records; 0: go on.")] = 0,
    wait: Annotated[
        str, typer.Option(help="End once nothing came for so long, as in 2s. Default: go on.")
    ] = "",
    no_ack: Annotated[bool, typer.Option("--no-ack", help="Only look: acknowledge nothing.")] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Print records and acknowledge each once it is printed; with --json one object a line."""
    if from_ not in ("", "earliest", "latest"):
        raise RequestError(f"{from_!r} is no place to begin.", hint="Use earliest or latest.")
    idle_s = int(Duration.parse(wait)) / 1000 if wait else None
    run(_consume(region, identity, stream, name, from_, count, idle_s, not no_ack, json))


async def _consume(
    region: str,
    identity: str,
    stream: str,
    name: str,
    start: str,
    count: int,
    idle_s: float | None,
    acknowledge: bool,
    as_json: bool,
) -> None:
    printed = Printed("What was not printed is not acknowledged, and is redelivered.")
    settings = SubscriptionSettings(start) if start else None
    async with connect(region, identity) as client:
        orders = client.stream(stream)
        async with (
            reader_watched(),
            orders.consumer(name, settings=settings, on_gap=lambda gap: note(f"gap: {gap}")) as consumer,
        ):
            while not count or printed.records < count:
                try:
                    async with asyncio.timeout(idle_s):
                        record = await anext(consumer)
                except (TimeoutError, StopAsyncIteration):
                    break
                plain = Record(record.offset, record.timestamp_ms, record.key, record.headers, record.payload)
                with printed.told():
                    write_record(plain, record.shard, as_json=as_json)
                    printed.add(record.shard, record.offset)
                    printed.flush()
                if acknowledge:
                    await consumer.ack(record)
