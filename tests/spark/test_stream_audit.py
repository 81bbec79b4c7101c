"""The query of docs/spark.md that joins a stream with the audit log of a link, after a real crossing."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from bridge_mesh import STREAM, Mesh, flight, two_regions

from felix.names import SpiffeId
from felix.runtime.real import now_ms
from region.bootstrap import issue_identity
from region.config import load_config

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
WANTED = "N14242"


def example() -> str:
    (found,) = re.findall(
        r"^```python\n(import felix\.spark\n\nfelix\.spark\.register\(spark\)\n\nleaves.*?)^```",
        PAGE.read_text(),
        re.S | re.M,
    )
    return str(found)


async def crossing(mesh: Mesh) -> None:
    """Thirty flights cross; ten more are published behind the bridge's back."""
    await mesh.create(shards=1)
    await mesh.grant()
    issue_identity(mesh.us, load_config(mesh.us.config), "client", "auditor", now_ms())
    async with mesh.operator("us-east") as client:
        await client.put_rights(
            str(SpiffeId("us-east", "acme", "client", "auditor")), [f"subscribe {STREAM}"]
        )
    await mesh.publish([flight(number % 15) for number in range(30)])
    async with mesh.agent():
        await mesh.crossed(30)
    await mesh.publish([flight(number) for number in range(10, 20)])


async def test_every_record_of_one_aircraft_is_told_with_where_it_went_and_why(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with two_regions(tmp_path) as mesh:
        await crossing(mesh)
        names: dict[str, Any] = {"spark": spark, "egress": str(mesh.egress_folder)}
        text = example().replace(
            '.option("identity"', f'.option("home", {str(tmp_path)!r}).option("identity"'
        )

        def ask() -> list[Any]:
            exec(compile(text, str(PAGE), "exec"), names)
            rows: list[Any] = names["found"].collect()
            return rows

        rows = await asyncio.to_thread(ask)
    assert [(row["offset"], row["destination_region"]) for row in rows] == [
        (14, "eu-west"),
        (29, "eu-west"),
        (34, None),
    ]
    for row in rows[:2]:
        assert (row["purpose"], row["basis"], row["reference"]) == ("analytics", "scc", "SCC-2026-014")
        assert row["crossed"] is not None
    assert rows[2]["basis"] is None
