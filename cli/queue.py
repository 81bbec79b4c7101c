"""`felix queue`: create queues, put jobs in, work on them, look at them, bring dead letters back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.exits import EXIT_FAILED
from cli.lines import LineParser
from cli.output import (
    Printed,
    counted,
    data_value,
    iso,
    note,
    out,
    payload_value,
    print_json,
    table,
    write_data,
    write_json_line,
)
from cli.publish import Summary, Tally, publish_lines
from cli.setting import (
    IdentityOption,
    JsonOption,
    RegionOption,
    Stop,
    connect,
    reader_watched,
    run,
    stop_signals,
)
from cli.stream import Name, copies_said, format_durability, parse_durability, parse_retention
from felix.errors import Code, RequestError
from felix.messages import StreamState
from felix.queue import Job, job_headers
from felix.queue_messages import Held, QueueState
from felix.settings import DEAD_SUFFIX
from felix.visible import spelled_out
from policy.quantity import Duration, Size

app = typer.Typer(no_args_is_help=True)

Handles = Annotated[
    list[str], typer.Argument(help="Jobs as `lease` names them: shard:offset:token, as in 0:17:1.")
]


@app.command()
def create(
    name: Name,
    visibility: Annotated[
        str, typer.Option(help="How long a lease lasts that asks for nothing else.")
    ] = "30s",
    attempts: Annotated[
        int, typer.Option(help="Deliveries before a record goes to the dead letters; 0: without bound.")
    ] = 5,
    retry: Annotated[
        str, typer.Option(help="Until a record that was given back is tried again; doubled each time.")
    ] = "1s",
    retry_max: Annotated[str, typer.Option(help="The longest such wait.")] = "5m",
    dead_letter: Annotated[str, typer.Option(help="The dead-letter stream. Default: NAME.dead.")] = "",
    ordered: Annotated[bool, typer.Option("--ordered", help="One record of a key is out at a time.")] = False,
    shards: Annotated[int, typer.Option(help="1 to 256; fixed for the queue's life.")] = 1,
    durability: Annotated[str, typer.Option(help="fsync, interval:50ms or ephemeral.")] = "fsync",
    retention: Annotated[
        str, typer.Option(help="When records go that nobody has finished: 7d,10GB. Default: never.")
    ] = "",
    ring: Annotated[str, typer.Option(help="Memory per shard of an ephemeral queue, as in 64MiB.")] = "",
    replicas: Annotated[
        int,
        typer.Option(
            help="Copies of each shard and of its leases, on as many of the region's brokers. Default: as the region has it."
        ),
    ] = 0,
    min_in_sync: Annotated[
        int,
        typer.Option(
            help="With --replicas: how many copies a job is on at least before it is acknowledged. Default: a majority."
        ),
    ] = 0,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Create a queue."""

    async def make() -> StreamState:
        async with connect(region, identity) as client:
            return await client.create_queue(
                name,
                visibility=int(Duration.parse(visibility)) / 1000,
                attempts=attempts,
                retry=int(Duration.parse(retry)) / 1000,
                retry_max=int(Duration.parse(retry_max)) / 1000,
                dead_letter=dead_letter,
                ordered_by_key=ordered,
                shards=shards,
                durability=parse_durability(durability),
                retention=parse_retention(retention),
                ring_bytes=int(Size.parse(ring)) if ring else 0,
                replicas=replicas,
                min_in_sync=min_in_sync,
            )

    state = run(make())
    if json:
        print_json(state)
    else:
        out.print(
            f"queue {state.stream} is created, {counted(state.shards, 'shard')}, {copies_said(state)}{format_durability(state)}"
        )


@app.command()
def alter(
    name: Name,
    visibility: Annotated[
        str, typer.Option(help="How long a lease lasts that asks for nothing else, from now on.")
    ] = "",
    attempts: Annotated[
        int | None,
        typer.Option(help="Deliveries before a record goes to the dead letters; 0: without bound."),
    ] = None,
    retry: Annotated[
        str, typer.Option(help="Until a record that was given back is tried again; doubled each time.")
    ] = "",
    retry_max: Annotated[str, typer.Option(help="The longest such wait.")] = "",
    dead_letter: Annotated[
        str, typer.Option(help="Where dead letters go from now on; default: to NAME.dead again.")
    ] = "",
    ordered: Annotated[
        bool | None, typer.Option("--ordered/--unordered", help="Cannot be another than it was created with.")
    ] = None,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Change a queue's settings while workers go on; what is not named stays as it is."""
    changes: dict[str, Any] = {
        "visibility": int(Duration.parse(visibility)) / 1000 if visibility else None,
        "attempts": attempts,
        "retry": int(Duration.parse(retry)) / 1000 if retry else None,
        "retry_max": int(Duration.parse(retry_max)) / 1000 if retry_max else None,
        "dead_letter": ("" if dead_letter == "default" else dead_letter) if dead_letter else None,
        "ordered_by_key": ordered,
    }
    if all(value is None for value in changes.values()):
        raise RequestError(
            "Nothing is to be changed.", hint="Name a setting; felix queue alter --help lists them."
        )

    async def change() -> StreamState:
        async with connect(region, identity) as client:
            return await client.queue(name).alter(**changes)

    state = run(change())
    if json:
        print_json(state)
        return
    settings = state.views.queue
    assert settings is not None
    retries = settings.retries
    out.print(
        f"queue {state.stream} is changed: visibility {Duration(settings.visibility_ms)}, attempts "
        f"{retries.attempts_max or 'without bound'}, retries after {Duration(retries.interval_ms)} to "
        f"{Duration(retries.interval_ms_max)}, dead letters to {retries.dead_letter or f'{state.stream}.dead'}"
    )


@app.command("list")
def list_(
    prefix: Annotated[str, typer.Argument(help="Only names that begin so.")] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """List the queues that this identity may see."""

    async def find() -> list[StreamState]:
        async with connect(region, identity) as client:
            return [state async for state in client.list_streams(prefix) if state.views.queue is not None]

    states = run(find())
    if json:
        print_json(states)
        return
    rows = []
    for state in states:
        settings = state.views.queue
        assert settings is not None
        attempts = settings.retries.attempts_max
        rows.append(
            [
                state.stream,
                state.shards,
                format_durability(state),
                str(Duration(settings.visibility_ms)),
                attempts or "any",
                settings.ordered_by_key,
                iso(state.created_ms),
            ]
        )
    table(
        "Queues",
        ["queue", "shards#", "durability", "visibility#", "attempts#", "ordered", "created"],
        rows,
    )


@app.command()
def describe(
    name: Name, region: RegionOption = "", identity: IdentityOption = "", json: JsonOption = False
) -> None:
    """Show what is ready, leased, delayed and dead, the oldest record's age, rates, and who works."""

    async def look() -> QueueState:
        async with connect(region, identity) as client:
            return await client.queue(name).describe()

    state = run(look())
    if json:
        print_json(state)
        return
    table(
        f"Queue {state.queue}",
        ["", ""],
        [
            ["ready", state.ready],
            ["leased", state.leased],
            ["delayed", state.delayed],
            ["behind their key", state.waiting],
            [f"dead ({state.dead_letter})", state.dead],
            ["oldest", _age(state.oldest_ms) if state.oldest_ms else "-"],
            ["in, a second", state.in_rate],
            ["out, a second", state.out_rate],
            ["acknowledged since the start", state.acked],
            ["delivered again", state.redelivered],
            ["given up", state.dead_lettered],
        ],
    )
    if state.workers:
        table(
            "Workers",
            ["worker", "identity", "leased#", "pushed to"],
            [
                [spelled_out(worker.name), worker.identity, worker.leased, worker.granted]
                for worker in state.workers
            ],
        )


@app.command()
def put(
    name: Name,
    payload: Annotated[
        str | None, typer.Argument(help="The job's payload; left out: one job a line of --file.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="One job a line; standard input, as it comes, if left out.", dir_okay=False),
    ] = None,
    key: Annotated[str, typer.Option(help="The key of PAYLOAD.")] = "",
    key_field: Annotated[str, typer.Option(help="The JSON field of a line that becomes its key.")] = "",
    delay: Annotated[str, typer.Option(help="Not before so long, as in 10m.")] = "",
    priority: Annotated[int | None, typer.Option(help="0 to 9; the highest goes first. Default: 4.")] = None,
    skip_invalid: Annotated[
        Path | None,
        typer.Option(
            help="Go on after a line that cannot be a job; it is added to this file, with its number and the reason."
        ),
    ] = None,
    from_line: Annotated[
        int, typer.Option(min=1, help="Leave out the lines before this one, as after an end that named it.")
    ] = 1,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Put jobs into a queue, one a line as they come, and wait until they are as durable as it is."""
    if payload is None:
        parser = LineParser(key_field, headers=job_headers(None, delay=_seconds(delay), priority=priority))
        publish_lines(
            name,
            file,
            parser,
            {},
            skip_invalid=skip_invalid,
            from_line=from_line,
            noun="job",
            region=region,
            identity=identity,
            as_json=json,
        )
        return
    if file is not None:
        raise RequestError("Give the payload or a file, not both.")
    job = payload.encode()
    tally, began = Tally(0), time.monotonic()

    async def put_one() -> None:
        async with connect(region, identity) as client, client.stream(name).publisher() as publisher:
            tally.publish(1, len(job), publisher)
            headers = job_headers(None, delay=_seconds(delay), priority=priority)
            await publisher.send(job, key.encode() or None, headers)
            await publisher.flush()
            tally.progress = publisher.progress

    run(put_one())
    if json:
        print_json(Summary(name, tally, time.monotonic() - began).row())
    else:
        out.print(f"1 job is in {name}")


def _seconds(delay: str) -> float:
    return int(Duration.parse(delay)) / 1000 if delay else 0.0


@app.command()
def consume(
    name: Name,
    exec_: Annotated[
        str,
        typer.Option(
            "--exec",
            help="Run this with the payload on its standard input; exit code 0 acknowledges the job, another gives it back.",
        ),
    ] = "",
    count: Annotated[int, typer.Option(help="End after so many jobs; 0: go on.")] = 0,
    workers: Annotated[int, typer.Option(help="With --exec: so many at a time.")] = 1,
    prefetch: Annotated[int, typer.Option(help="Jobs that are here and not finished, at most.")] = 64,
    visibility: Annotated[str, typer.Option(help="How long a lease lasts. Default: as the queue says.")] = "",
    extend_for: Annotated[
        str,
        typer.Option(
            help="A job that takes longer, as in 1h, is not extended any more: another worker gets it. Default: no bound."
        ),
    ] = "",
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when nothing is ready.")] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Work on jobs: print each and acknowledge it, or run a command for each.

    Leases are extended for as long as this runs, or as --extend-for says.
    """
    if count < 0 or workers < 1:
        raise RequestError("--count is 0 or more, --workers 1 or more.")
    run(
        _consume(
            region, identity, name, exec_, count, workers, prefetch, visibility, extend_for, until_empty, json
        )
    )


async def _consume(
    region: str,
    identity: str,
    name: str,
    command: str,
    count: int,
    workers: int,
    prefetch: int,
    visibility: str,
    extend_for: str,
    until_empty: bool,
    as_json: bool,
) -> None:
    stop = stop_signals()
    done = failed = begun = 0
    printed = Printed("A job that was not printed is not acknowledged, and is redelivered.")
    async with connect(region, identity) as client:
        queue = client.queue(name)
        # Not more than is to be worked on: what is left over would come back as if it had been looked at.
        consumer = queue.consume(
            prefetch=min(prefetch, count) if count else prefetch,
            visibility=int(Duration.parse(visibility)) / 1000 if visibility else None,
            extend_for=int(Duration.parse(extend_for)) / 1000 if extend_for else None,
        )

        commands = _Commands(command)
        at_work: set[asyncio.Future[None]] = set()

        async def work() -> None:
            nonlocal done, failed, begun
            me = asyncio.current_task()
            assert me is not None
            while not stop.is_set() and not (count and begun >= count):
                begun += 1
                try:
                    job = await anext(consumer)
                except StopAsyncIteration:
                    return
                if not command:
                    # Printed first: a job that could not be printed is not done, and is redelivered.
                    with printed.told():
                        _print_job(job, as_json=as_json)
                        printed.add(job.shard, job.offset)
                        printed.flush()
                    job.ack()
                    done += 1
                    continue
                at_work.add(me)
                code, said = await asyncio.to_thread(commands.run, job)
                at_work.discard(me)
                if not code:
                    job.ack()
                    done += 1
                elif stop.again.is_set():
                    # Ended by whoever ended this: it says nothing of the job.
                    job.release()
                else:
                    failed += 1
                    why = f"exit code {code}{': ' if said else ''}{said}"
                    note(f"job {_handle(job)}: {why}")
                    job.nack(reason=why)

        async def watch_empty() -> None:
            while True:
                await asyncio.sleep(0.2)
                state = await queue.describe()
                if not state.ready and not state.leased and not consumer.buffered:
                    return

        async with reader_watched() if not command else nullcontext(), consumer:
            working = [asyncio.ensure_future(work()) for _ in range(workers if command else 1)]
            ends: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(stop.wait()),
                asyncio.gather(*working),
            ]
            if until_empty:
                ends.append(asyncio.ensure_future(watch_empty()))
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    await _finished(at_work, stop, commands)
            except asyncio.CancelledError:
                for task in (*ends, *working):
                    task.cancel()
                raise
            for task in (*ends, *working):
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception() or AssertionError
                task.cancel()
            with suppress(asyncio.CancelledError):
                await ends[1]
        lost = consumer.lost
    sys.stdout.flush()
    if command or not as_json:
        note(f"{_counted(done, 'job', 'jobs')} done, {failed:,} given back, {lost:,} lost to other workers")
    if stop.is_set():
        raise typer.Exit(stop.exit_code)
    if failed and not done:
        raise typer.Exit(EXIT_FAILED)


async def _finished(at_work: Iterable[asyncio.Future[None]], stop: Stop, commands: _Commands) -> None:
    """Once the commands that run have ended, each for its job; a second signal ends them."""
    waiting: set[asyncio.Future[Any]] = set(at_work)
    if not waiting:
        return
    name = signal.Signals(stop.number).name
    note(f"{name}: waiting for {counted(len(waiting), 'command')} to end; once more to end what runs")
    again = asyncio.ensure_future(stop.again.wait())
    while waiting and not again.done():
        _, waiting = await asyncio.wait({*waiting, again}, return_when=asyncio.FIRST_COMPLETED)
        waiting.discard(again)
    again.cancel()
    if waiting:
        commands.end()
        await asyncio.wait(waiting)


class _Commands:
    """What `--exec` runs, for each job in a thread. In a session of its own, so that Ctrl-C reaches this process alone, which ends them if need be."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, job: Job) -> tuple[int, str]:
        """The command's exit code, and the end of what it said on standard error."""
        environment = {
            **os.environ,
            "FELIX_JOB_ATTEMPTS": str(job.attempts),
            "FELIX_JOB_SHARD": str(job.shard),
            "FELIX_JOB_OFFSET": str(job.offset),
            "FELIX_JOB_KEY": (job.key or b"").decode(errors="replace").replace("\0", ""),
        }
        process = subprocess.Popen(  # noqa: S602 - the user's own command line, as a shell reads it
            self._command,
            shell=True,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._running.add(process)
        try:
            _, said = process.communicate(job.payload)
        finally:
            self._running.discard(process)
        return process.returncode, said.decode(errors="replace").strip()[-400:]

    def end(self) -> None:
        """SIGTERM to all that run, and to what they have started."""
        for process in tuple(self._running):
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


@app.command()
def lease(
    name: Name,
    records: Annotated[int, typer.Option("--records", "-n", help="At most so many.")] = 1,
    wait: Annotated[str, typer.Option(help="Wait so long for the first, as in 20s.")] = "",
    visibility: Annotated[
        str, typer.Option(help="How long the lease lasts. Default: as the queue says.")
    ] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Lease jobs, and print each with the handle that `ack` and `nack` take."""

    async def get() -> list[Job]:
        async with connect(region, identity) as client:
            return await client.queue(name).lease(
                records,
                wait=int(Duration.parse(wait)) / 1000 if wait else 0,
                visibility=int(Duration.parse(visibility)) / 1000 if visibility else None,
            )

    for job in run(get()):
        if json:
            _print_job(job, as_json=True)
        else:
            write_data(_handle(job).encode() + b"\t" + job.payload, b"\n")
    sys.stdout.flush()


@app.command()
def ack(name: Name, jobs: Handles, region: RegionOption = "", identity: IdentityOption = "") -> None:
    """Acknowledge leased jobs, whoever leased them: they are done."""
    _settle(region, identity, name, "ack", jobs)


@app.command()
def nack(
    name: Name,
    jobs: Handles,
    delay: Annotated[str, typer.Option(help="Not again before so long. Default: as the queue says.")] = "",
    reason: Annotated[str, typer.Option(help="For the dead letters, should it be the last attempt.")] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Give leased jobs back, whoever leased them, to be tried again."""
    delay_s = int(Duration.parse(delay)) / 1000 if delay else None
    _settle(region, identity, name, "nack", jobs, delay=delay_s, reason=reason)


def _settle(
    region: str,
    identity: str,
    name: str,
    verb: str,
    handles: list[str],
    *,
    delay: float | None = None,
    reason: str = "",
) -> None:
    held = [_parse_handle(text) for text in handles]

    async def settle() -> list[tuple[int, int]]:
        async with connect(region, identity) as client:
            return await client.queue(name).settle(verb, held, delay=delay, reason=reason)

    lost = run(settle())
    if lost:
        names = ", ".join(f"{shard}:{offset}" for shard, offset in lost)
        raise RequestError(
            f"The leases of {names} are lost: they ran out and another worker got the jobs, or the records are done.",
            code=Code.LEASE_LOST,
            hint="Lease with a longer --visibility.",
        )


@app.command()
def peek(
    name: Name,
    records: Annotated[int, typer.Option("--records", "-n", help="At most so many.")] = 10,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Show the first records that are not done, without leasing them: of a leased one the handle, who has it, and since when."""

    async def look() -> list[Any]:
        async with connect(region, identity) as client:
            return await client.queue(name).peek(records)

    found = run(look())
    if json:
        print_json([_queue_record(each) for each in found])
        return
    table(
        f"First records of {name}",
        [
            "shard#",
            "offset#",
            "state",
            "attempts#",
            "job",
            "worker",
            "since",
            "until",
            "published",
            "key",
            "payload",
        ],
        [
            [
                each.job.shard,
                each.job.offset,
                each.phase,
                each.job.attempts,
                _handle(each.job) if each.phase == "leased" else "",
                spelled_out(each.worker),
                iso(each.leased_ms) if each.leased_ms else "",
                iso(each.due_ms) if each.phase in ("leased", "delayed") else "",
                iso(each.job.timestamp_ms),
                _short(each.job.key or b""),
                _short(each.job.payload),
            ]
            for each in found
        ],
    )


@app.command()
def redrive(
    name: Name,
    records: Annotated[int, typer.Option("--records", "-n", help="At most so many; 0: all.")] = 0,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Bring dead letters back into the queue they came from, oldest first; their attempts start at zero."""

    async def bring() -> int:
        async with connect(region, identity) as client:
            try:
                return await client.queue(name).redrive(records)
            except RequestError as error:
                if error.code is not Code.UNSUPPORTED:
                    raise
                raise RequestError(
                    f"{name} is no queue: dead letters of a stream belong to its durable subscriptions.",
                    code=Code.UNSUPPORTED,
                    hint=f"Name the one that is to get them again: felix subscription redrive {name} NAME",
                ) from error

    count = run(bring())
    if not count and name.endswith(DEAD_SUFFIX):
        source = name.removesuffix(DEAD_SUFFIX)
        note(
            f"{name} holds dead letters of others: name the queue they came from (felix queue redrive {source}), or the durable "
            f"subscription (felix subscription redrive {source} NAME)."
        )
    _say_count(count, f"{_counted(count, 'dead letter is', 'dead letters are')} back in {name}", json)


@app.command()
def purge(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Drop everything that is in a queue now, also what workers hold."""
    if not yes:
        typer.confirm(f"Drop everything in {name}?", abort=True, err=True)

    async def drop() -> int:
        async with connect(region, identity) as client:
            return await client.queue(name).purge()

    count = run(drop())
    _say_count(count, f"{_counted(count, f'record of {name} is', f'records of {name} are')} dropped", json)


@app.command()
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Delete a queue and its records; its dead letters stay."""
    if not yes:
        typer.confirm(f"Delete {name} and its records?", abort=True, err=True)

    async def end() -> None:
        async with connect(region, identity) as client:
            await client.queue(name).delete()

    run(end())
    out.print(f"{name} is deleted")


# -- words ---------------------------------------------------------------------------------------------


def _say_count(count: int, sentence: str, as_json: bool) -> None:
    if as_json:
        print_json({"count": count})
    else:
        out.print(sentence)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _age(ms: int) -> str:
    """In the two largest units that count: 740ms, 14s, 3m 20s, 2h 5m, 4d 1h."""
    if ms < 1_000:
        return f"{ms}ms"
    units = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
    seconds = ms // 1_000
    parts: list[str] = []
    for unit, size in units:
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count}{unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def _queue_record(found: Any) -> dict[str, Any]:
    job = found.job
    return {
        "shard": job.shard,
        "offset": job.offset,
        "phase": found.phase,
        "attempts": job.attempts,
        "job": _handle(job) if found.phase == "leased" else None,
        "identity": found.identity,
        "worker": found.worker,
        "leased_ms": found.leased_ms,
        "due_ms": found.due_ms,
        "time_ms": job.timestamp_ms,
        "key": data_value(job.key) if job.key else None,
        "headers": {name: data_value(value) for name, value in job.headers.items()},
        **payload_value(job.payload),
    }


def _handle(job: Job) -> str:
    return f"{job.shard}:{job.offset}:{job.token}"


def _parse_handle(text: str) -> Held:
    """Raises RequestError."""
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 18 for part in parts):
        raise RequestError(
            f"{text!r} is no handle of a job.",
            hint="It is shard:offset:token, as felix queue lease and felix queue peek print it.",
        )
    shard, offset, token = map(int, parts)
    return Held(shard, offset, 1, token)


def _print_job(job: Job, *, as_json: bool) -> None:
    if not as_json:
        write_data(job.payload, b"\n")
        return
    row: dict[str, Any] = {
        "job": _handle(job),
        "attempts": job.attempts,
        "time": iso(job.timestamp_ms),
        "key": data_value(job.key) if job.key else None,
        "headers": {name: data_value(value) for name, value in job.headers.items()},
        **payload_value(job.payload),
    }
    write_json_line(row)


def _short(data: bytes) -> str:
    text = data[:61].decode(errors="replace")
    return text if len(data) <= 60 else text[:60] + "…"
