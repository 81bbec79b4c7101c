"""docs/operations.md names every key of region.yaml and every metric that a broker shows."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from region_home import running
from region_peer import client

from region.config import RegionConfig
from region.folder import RegionFolder

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def test_every_key_of_the_configuration_is_listed() -> None:
    words = set(re.findall(r"`([a-z_.]+)`", PAGE))
    for field in msgspec.structs.fields(RegionConfig):
        inner = getattr(field.type, "__struct_fields__", ())
        for key in inner:
            assert f"{field.name}.{key}" in words or key in words, f"{field.name}.{key}"
        assert inner or field.name in words, field.name


async def test_every_gauge_is_listed(tmp_path: Path) -> None:
    from region_home import make_region

    folder: RegionFolder = make_region(tmp_path, "us-east")
    async with running(folder) as node, client(folder) as region:
        await region.create_stream("acme/ops/crew")
        for name in node.gauges.values():
            assert f"felix_{name.removesuffix('_limit')}" in PAGE, name
        ((_, _, values),) = node.gauges.shards()
        for name in values:
            found = name.removesuffix("_limit")
            assert f"felix_shard_{found}" in PAGE or f"…_{found.split('_')[-1]}" in PAGE, name
