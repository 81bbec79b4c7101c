"""`felix keys`: list, rotate and destroy keys. Their bytes never leave the broker."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.output import iso, out, print_json, table
from cli.setting import IdentityOption, JsonOption, RegionOption, choose_region, connect, run
from felix.messages import KeyState

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_(
    stream: Annotated[str, typer.Option(help="Only the keys of this stream.")] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """List keys by level and state."""
    keys = run(_list(region, identity, stream))
    if json:
        print_json([{**_row(key), "id": key.id.hex()} for key in keys])
        return
    table(
        f"Keys of {choose_region(region)}",
        ["level", "id", "state", "stream", "shard#", "epoch#", "since"],
        [
            [
                key.level,
                key.id.hex(),
                key.state,
                key.stream,
                None if key.shard < 0 else key.shard,
                None if key.epoch < 0 else key.epoch,
                iso(key.created_ms),
            ]
            for key in keys
        ],
    )


def _row(key: KeyState) -> dict[str, object]:
    return {
        "level": key.level,
        "state": key.state,
        "stream": key.stream,
        "shard": key.shard,
        "epoch": key.epoch,
        "since": iso(key.created_ms),
    }


async def _list(region: str, identity: str, stream: str) -> list[KeyState]:
    async with connect(region, identity) as client:
        return await client.list_keys(stream)


@app.command()
def rotate(
    level: Annotated[
        str, typer.Argument(help="data: the next batch of each shard takes a fresh key. root: rewrap.")
    ] = "data",
    stream: Annotated[str, typer.Option(help="data: only this stream.")] = "",
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Rotate keys while the region runs; data is not touched."""
    out.print(run(_rotate(region, identity, level, stream)))


async def _rotate(region: str, identity: str, level: str, stream: str) -> str:
    async with connect(region, identity) as client:
        return await client.rotate_keys(level, stream)


@app.command("destroy-retired-roots")
def destroy_retired_roots(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Destroy the root keys that rotations retired. Older backups of key files and of etcd open nothing from then on."""
    if not yes:
        typer.confirm(
            "Destroy the retired root keys? Backups of keys and metadata from before the last rotation open nothing any more.",
            abort=True,
            err=True,
        )
    out.print(run(_destroy_retired_roots(region, identity)))


async def _destroy_retired_roots(region: str, identity: str) -> str:
    async with connect(region, identity) as client:
        return await client.destroy_retired_roots()
