"""`felix namespace`: namespaces whose streams are made by their first use."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.output import counted, out, plain, print_json, table
from cli.setting import IdentityOption, JsonOption, RegionOption, connect, run
from cli.stream import parse_durability, parse_retention
from felix.errors import Code, RequestError
from felix.settings import NamespaceSettings
from policy.quantity import Duration, Size

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="tenant/namespace, as in acme/web.")]


@app.command("set")
def set_(
    name: Name,
    auto_create: Annotated[
        bool, typer.Option(help="Make a stream by its first use; --no-auto-create: not any more.")
    ] = True,
    shards: Annotated[int, typer.Option(help="Of each stream made so.")] = 1,
    durability: Annotated[str, typer.Option(help="fsync, interval:50ms or ephemeral.")] = "fsync",
    retention: Annotated[str, typer.Option(help="Age, size per shard, or both: 7d,10GB. Default: all.")] = "",
    streams_max: Annotated[int, typer.Option(help="No more are made where there are so many.")] = (
        NamespaceSettings().streams_max
    ),
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Let the namespace's streams be made by their first use, and say how."""
    kept, durable = parse_retention(retention), parse_durability(durability)
    settings = NamespaceSettings(
        auto_create=auto_create,
        shards=shards,
        durability=durable.kind,
        interval_ms=durable.interval_ms,
        retention_ms=kept.age_ms,
        retention_bytes=kept.size_bytes,
        streams_max=streams_max,
    )

    async def work() -> None:
        async with connect(region, identity) as client:
            await client.put_namespace(name, settings)

    run(work())
    out.print(f"{name}: {describe(settings)}")


def describe(settings: NamespaceSettings) -> str:
    """One line."""
    if not settings.auto_create:
        return "streams are created by hand"
    durability = (
        f"interval:{settings.interval_ms}ms" if settings.durability == "interval" else settings.durability
    )
    kept = [str(Duration(settings.retention_ms))] if settings.retention_ms else []
    kept += [str(Size(settings.retention_bytes))] if settings.retention_bytes else []
    return (
        f"streams are made by their first use: {counted(settings.shards, 'shard')}, {durability}, retention "
        f"{', '.join(kept) or 'none'}, at most {settings.streams_max} of them"
    )


async def _all(region: str, identity: str) -> dict[str, NamespaceSettings]:
    async with connect(region, identity) as client:
        return await client.list_namespaces()


@app.command()
def show(
    name: Name, region: RegionOption = "", identity: IdentityOption = "", json: JsonOption = False
) -> None:
    """Show what is set for a namespace."""
    settings = run(_all(region, identity)).get(name)
    if settings is None:
        raise RequestError(f"Nothing is set for {name}.", code=Code.NOT_FOUND)
    if json:
        print_json({"name": name, **plain(settings)})
    else:
        out.print(f"{name}: {describe(settings)}")


@app.command("list")
def list_(region: RegionOption = "", identity: IdentityOption = "", json: JsonOption = False) -> None:
    """List namespaces with settings of their own."""
    found = run(_all(region, identity))
    if json:
        print_json([{"name": name, **plain(found[name])} for name in sorted(found)])
    else:
        table(
            "Namespaces", ["namespace", "settings"], [[name, describe(found[name])] for name in sorted(found)]
        )


@app.command()
def clear(name: Name, region: RegionOption = "", identity: IdentityOption = "") -> None:
    """Take a namespace's settings away: streams are created by hand again. Those that are there stay."""

    async def work() -> str:
        async with connect(region, identity) as client:
            return await client.delete_namespace(name)

    out.print(run(work()) or f"{name} has no settings any more")
