"""`felix cache`: create, alter, put, get, delete, cas, incr, scan, watch, stats, list, drop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

import felix
from cli.exits import EXIT_NOT_FOUND
from cli.output import counted, data_value, iso, out, print_json, table, write_data, write_json_line
from cli.setting import IdentityOption, JsonOption, RegionOption, connect, read_file, reader_watched, run
from cli.stream import copies_said, format_durability, parse_durability
from felix.cache import Change, Entry
from felix.cache_messages import CacheStats
from felix.errors import Code, RequestError
from felix.messages import StreamState
from felix.settings import CACHE_BYTES_DEFAULT, CacheSettings
from felix.visible import visible
from policy.quantity import Duration, Size

"""The key is not in the cache, or (cas) not as it was expected."""

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="tenant/namespace/name, as in acme/web/sessions.")]
Key = Annotated[str, typer.Argument(help="The key, as text.")]
TtlOption = Annotated[
    str, typer.Option("--ttl", help="As in 90s or 12h; `forever`; left out: what the cache was made with.")
]
ValueArgument = Annotated[str | None, typer.Argument(help="The value, as text; left out with --file.")]
FileOption = Annotated[
    Path | None, typer.Option("--file", help="The value is this file's bytes; - is standard input.")
]


@app.command()
def create(
    name: Name,
    shards: Annotated[int, typer.Option(help="1 to 256; fixed for the cache's life.")] = 1,
    durability: Annotated[str, typer.Option(help="fsync, interval:50ms or ephemeral.")] = "fsync",
    size: Annotated[str, typer.Option(help="Memory per shard, as in 64MiB.")] = str(
        Size(CACHE_BYTES_DEFAULT)
    ),
    ttl: Annotated[
        str, typer.Option(help="Of values that are put without one, as in 12h. Default: without end.")
    ] = "",
    eviction: Annotated[
        str, typer.Option(help="When it is full: lru (the least recently used goes) or refuse.")
    ] = "lru",
    replicas: Annotated[
        int,
        typer.Option(
            help="Copies of each shard, on as many of the region's brokers. Default: as the region has it."
        ),
    ] = 0,
    min_in_sync: Annotated[
        int,
        typer.Option(
            help="With --replicas: how many copies a value is on at least before it is acknowledged. Default: a majority."
        ),
    ] = 0,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Create a cache."""
    settings = CacheSettings(int(Size.parse(size)), int(Duration.parse(ttl)) if ttl else 0, eviction)
    state = run(
        _create(
            region,
            identity,
            name,
            settings,
            shards,
            parse_durability(durability),
            replicas,
            min_in_sync,
        )
    )
    if json:
        print_json(state)
    else:
        out.print(
            f"{state.stream} is created, {counted(shards, 'shard')} of {Size.parse(size)}, {copies_said(state)}{durability}, eviction {eviction}, "
            f"ttl {ttl or 'none'}"
        )


@app.command()
def alter(
    name: Name,
    size: Annotated[
        str, typer.Option(help="Memory per shard, as in 64MiB; with less, the least recently used go.")
    ] = "",
    ttl: Annotated[
        str,
        typer.Option(help="Of values that are put without one from now on, as in 12h; none: without end."),
    ] = "",
    eviction: Annotated[
        str, typer.Option(help="When it is full: lru (the least recently used goes) or refuse.")
    ] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Change a cache's settings while it serves; what is not named stays as it is."""
    changes: dict[str, Any] = {
        "bytes_max": int(Size.parse(size)) if size else None,
        "ttl": felix.FOREVER if ttl == "none" else parse_ttl(ttl),
        "eviction": eviction or None,
    }
    if all(value is None for value in changes.values()):
        raise RequestError(
            "Nothing is to be changed.", hint="Name a setting; felix cache alter --help lists them."
        )
    state = run(_alter(region, identity, name, changes))
    if json:
        print_json(state)
        return
    settings = state.views.cache
    assert settings is not None
    out.print(
        f"{state.stream} is changed: {Size(settings.bytes_max)} per shard, eviction {settings.eviction}, "
        f"ttl {Duration(settings.ttl_ms) if settings.ttl_ms else 'none'}"
    )


async def _alter(region: str, identity: str, name: str, changes: dict[str, Any]) -> StreamState:
    async with connect(region, identity) as client:
        return await client.cache(name).alter(**changes)


async def _create(
    region: str,
    identity: str,
    name: str,
    settings: CacheSettings,
    shards: int,
    durability: felix.Durability,
    replicas: int,
    min_in_sync: int,
) -> StreamState:
    async with connect(region, identity) as client:
        cache = await client.create_cache(
            name,
            settings,
            shards=shards,
            durability=durability,
            replicas=replicas,
            min_in_sync=min_in_sync,
        )
        return await client.describe_stream(cache.name)


def parse_ttl(text: str) -> float | None:
    """Seconds, as the SDK takes them. Raises RequestError(INVALID)."""
    if not text:
        return None
    return felix.FOREVER if text == "forever" else int(Duration.parse(text)) / 1000


def read_value(text: str | None, file: Path | None) -> bytes:
    """The value that a command was given; an empty one is one. Raises RequestError where there is none, or two."""
    if (file is None) == (text is None):
        raise RequestError("A value is given either as an argument or with --file.")
    if text is not None:
        return text.encode()
    assert file is not None
    return sys.stdin.buffer.read() if str(file) == "-" else read_file(file, "The value")


@app.command()
def put(
    name: Name,
    key: Key,
    value: ValueArgument = None,
    file: FileOption = None,
    ttl: TtlOption = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Put a value under a key."""
    version = run(_put(region, identity, name, key, read_value(value, file), parse_ttl(ttl)))
    _say_version(json, name, key, version)


async def _put(region: str, identity: str, name: str, key: str, value: bytes, ttl: float | None) -> int:
    async with connect(region, identity) as client:
        return await client.cache(name).put(key, value, ttl=ttl)


def _say_version(as_json: bool, name: str, key: str, version: int) -> None:
    if as_json:
        print_json({"cache": name, "key": key, "version": version})
    else:
        out.print(f"{key} has version {version}")


@app.command()
def get(
    name: Name, key: Key, region: RegionOption = "", identity: IdentityOption = "", json: JsonOption = False
) -> None:
    """Write the value of a key to standard output, as it is; exit code 7 where it is not there."""
    entry = run(_get(region, identity, name, key))
    if entry is None:
        raise NotThereError(f"{key!r} is not in {name}.")
    if json:
        print_json(entry_row(key.encode(), entry))
        return
    write_data(entry.value, b"\n" if sys.stdout.isatty() else b"")
    sys.stdout.flush()


async def _get(region: str, identity: str, name: str, key: str) -> Entry | None:
    async with connect(region, identity) as client:
        return await client.cache(name).get(key)


class NotThereError(RequestError):
    """A key that is not in a cache, or not as it was expected."""

    default_code = Code.NOT_FOUND
    exit_code = EXIT_NOT_FOUND


@app.command()
def delete(
    name: Name,
    keys: Annotated[list[str], typer.Argument(help="The keys, as text.")],
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Delete keys; exit code 7 where none of them was there."""
    deleted = run(_delete(region, identity, name, keys))
    if json:
        print_json({"count": deleted})
    else:
        out.print(f"{deleted} of {len(keys)} keys deleted")
    if not deleted:
        raise typer.Exit(EXIT_NOT_FOUND)


async def _delete(region: str, identity: str, name: str, keys: list[str]) -> int:
    async with connect(region, identity) as client:
        return await client.cache(name).delete_many(keys)


@app.command()
def cas(
    name: Name,
    key: Key,
    value: ValueArgument = None,
    version: Annotated[
        int, typer.Option(help="The version that the key must have; 0: it must not be there.")
    ] = 0,
    file: FileOption = None,
    ttl: TtlOption = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Put a value where the key has a version (compare and set); exit code 7 where it has another."""
    found = run(_cas(region, identity, name, key, read_value(value, file), version, parse_ttl(ttl)))
    if found is None:
        raise NotThereError(
            f"{key!r} of {name} does not have version {version}; nothing was put.", code=Code.CONFLICT
        )
    _say_version(json, name, key, found)


async def _cas(
    region: str, identity: str, name: str, key: str, value: bytes, version: int, ttl: float | None
) -> int | None:
    async with connect(region, identity) as client:
        return await client.cache(name).compare_and_set(key, value, version=version, ttl=ttl)


@app.command()
def incr(
    name: Name,
    key: Key,
    by: Annotated[int, typer.Option(help="What is added; may be negative.")] = 1,
    ttl: TtlOption = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Add to the number under a key, and print it. The ttl counts where this makes the key."""
    number = run(_incr(region, identity, name, key, by, parse_ttl(ttl)))
    if json:
        print_json({"cache": name, "key": key, "value": number})
    else:
        out.print(str(number))


async def _incr(region: str, identity: str, name: str, key: str, by: int, ttl: float | None) -> int:
    async with connect(region, identity) as client:
        return await client.cache(name).increment(key, by, ttl=ttl)


def shown(data: bytes) -> str:
    """UTF-8 where it is, else hex after `0x`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"0x{data.hex()}"


def entry_row(key: bytes, entry: Entry) -> dict[str, Any]:
    """One entry for --json."""
    return {
        "key": data_value(key),
        "value": data_value(entry.value),
        "version": entry.version,
        "ttl": entry.ttl,
    }


@app.command()
def scan(
    name: Name,
    prefix: Annotated[str, typer.Argument(help="Only keys that begin so.")] = "",
    limit: Annotated[int, typer.Option(help="At most so many; 0: all.")] = 0,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """List keys with their values; with --json one object a line."""
    rows = run(_scan(region, identity, name, prefix, limit, json))
    if not json:
        table(
            f"{name}{f', keys that begin with {prefix}' if prefix else ''}",
            ["key", "value", "bytes#", "version#", "ttl#"],
            rows,
        )


async def _scan(
    region: str, identity: str, name: str, prefix: str, limit: int, as_json: bool
) -> list[list[object]]:
    rows: list[list[object]] = []
    printed = 0
    async with connect(region, identity) as client:
        async for key, entry in client.cache(name).scan(prefix):
            if as_json:
                write_json_line(entry_row(key, entry))
            else:
                ttl = "" if entry.ttl is None else f"{entry.ttl:,.1f} s"
                text = shown(entry.value)
                rows.append(
                    [
                        shown(key),
                        text if len(text) <= 60 else text[:59] + "…",
                        len(entry.value),
                        entry.version,
                        ttl,
                    ]
                )
            printed += 1
            if printed == limit:
                break
    sys.stdout.flush()
    return rows


@app.command()
def watch(
    name: Name,
    prefix: Annotated[str, typer.Argument(help="Only keys that begin so.")] = "",
    key: Annotated[str, typer.Option(help="Only this key.")] = "",
    resume: Annotated[str, typer.Option(help="Go on after this position, as --json printed it.")] = "",
    count: Annotated[int, typer.Option(help="End after so many changes; 0: go on.")] = 0,
    until_ready: Annotated[
        bool, typer.Option("--until-ready", help="End once the state has been told.")
    ] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Print the state, `ready`, then every change as it comes; with --json one object a line, with its position."""
    run(_watch(region, identity, name, prefix, key, resume, count, until_ready, json))


async def _watch(
    region: str,
    identity: str,
    name: str,
    prefix: str,
    key: str,
    resume: str,
    count: int,
    until_ready: bool,
    as_json: bool,
) -> None:
    printed = 0
    async with connect(region, identity) as client:
        watching = client.cache(name).watch(key=key or None, prefix=prefix, resume=resume or None)
        async with reader_watched(), watching:
            async for change in watching:
                _print_change(change, as_json)
                printed += change.kind not in ("reset", "ready")
                if printed == count > 0 or (until_ready and change.kind == "ready"):
                    return


def _print_change(change: Change, as_json: bool) -> None:
    if as_json:
        write_json_line(
            {
                "change": change.kind,
                "key": data_value(change.key) if change.key else None,
                "version": change.version,
                "value": None if change.value is None else data_value(change.value),
                "expires_at_ms": change.expires_at_ms or None,
                "position": str(change.position) if change.position is not None else None,
            }
        )
    elif change.key:
        value = "" if change.value is None else f"  {shown(change.value)}"
        # One change is one line, also in a pipe.
        sys.stdout.write(visible(f"{change.kind:8}{change.version:>10,}  {shown(change.key)}{value}") + "\n")
    else:
        sys.stdout.write(f"{change.kind}\n")
    sys.stdout.flush()


@app.command()
def stats(
    name: Name, region: RegionOption = "", identity: IdentityOption = "", json: JsonOption = False
) -> None:
    """Show what the broker counts of a cache since it began to serve it."""
    found = run(_stats(region, identity, name))
    rows = msgspec.structs.asdict(found)
    asked = found.hits + found.misses
    rows["hit_ratio"] = found.hits / asked if asked else 0.0
    if json:
        print_json({"cache": name, **rows})
        return
    table(
        name,
        ["", ""],
        [
            [what.replace("_", " "), f"{value:.1%}" if what == "hit_ratio" else value]
            for what, value in rows.items()
        ],
    )


async def _stats(region: str, identity: str, name: str) -> CacheStats:
    async with connect(region, identity) as client:
        return await client.cache(name).stats()


@app.command("list")
def list_(
    prefix: Annotated[str, typer.Argument(help="Only names that begin so.")] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """List the caches that this identity may see."""
    states = run(_list(region, identity, prefix))
    if json:
        print_json(states)
        return
    table(
        "Caches",
        ["cache", "shards#", "durability", "memory per shard", "ttl", "eviction", "created"],
        [
            [
                state.stream,
                state.shards,
                format_durability(state),
                str(Size(cache.bytes_max)),
                str(Duration(cache.ttl_ms)) if cache.ttl_ms else "none",
                cache.eviction,
                iso(state.created_ms),
            ]
            for state in states
            if (cache := state.views.cache) is not None
        ],
    )


async def _list(region: str, identity: str, prefix: str) -> list[StreamState]:
    async with connect(region, identity) as client:
        return [state async for state in client.list_streams(prefix) if state.views.cache is not None]


@app.command()
def drop(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Delete a cache and everything in it. This cannot be undone."""
    state = run(_describe(region, identity, name))
    if state.views.cache is None:
        raise RequestError(
            f"{name} is a stream, and no cache.",
            code=Code.UNSUPPORTED,
            hint="Delete it with `felix stream delete`.",
        )
    if not yes:
        typer.confirm(f"Delete the cache {name} and all its keys?", abort=True, err=True)
    run(_drop(region, identity, name, state.incarnation))
    out.print(f"{name} is deleted")


async def _describe(region: str, identity: str, name: str) -> StreamState:
    async with connect(region, identity) as client:
        return await client.describe_stream(name)


async def _drop(region: str, identity: str, name: str, incarnation: bytes) -> None:
    async with connect(region, identity) as client:
        await client.delete_stream(name, incarnation=incarnation)
