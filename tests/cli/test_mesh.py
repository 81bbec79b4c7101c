"""`felix mesh`: one map of what regions answer, drawn in 80 columns; and who may see it, asked of brokers that work."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bridge_mesh import STREAM, Mesh, flight, until
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

import felix
from cli.main import app
from cli.mesh import picture
from cli.mesh_map import SILENT_AFTER_MS, MeshMap, Survey, draw_map
from cli.top import Sample
from felix.errors import Code, RequestError
from felix.messages import (
    AuditLog,
    Cosigner,
    Denial,
    DescribeMesh,
    GrantSummary,
    KnownRegion,
    LinkState,
    MeshPage,
    PutRights,
    RegionState,
    StreamTraffic,
)
from felix.runtime.real import now_ms
from policy.grant import StandingAction
from region.bootstrap import issue_identity
from region.config import load_config

GRANT = "g-aaaaaaaaaaaaaaaa"
NOW = 1_800_000_000_000
LONG = "/".join(("x" * 63, "y" * 63, "z" * 63))


def link(**changes: Any) -> LinkState:
    made = LinkState(
        GRANT,
        STREAM,
        0,
        "us-east",
        "eu-west",
        "b",
        "active",
        lag_records=2,
        lag_ms=5,
        crossed=7,
        reported_ms=NOW,
    )
    return msgspec.structs.replace(made, **changes)  # fmt: skip


def survey(region: str, grant: GrantSummary | None = None, links: list[LinkState] | None = None) -> Survey:
    sample = Sample(0.0, RegionState(region, "acme", "b1", 0, {}), [StreamTraffic(STREAM, 1)], [], [], links or [])  # fmt: skip
    known = [KnownRegion("eu-west", "acme", "IE", "EU"), KnownRegion("us-east", "acme", "US", "US")]
    log = AuditLog(f"{region}.acme/region", True, 9, b"r" * 32, 8, [Cosigner("witness", NOW)])
    page = MeshPage(known, [grant] if grant else [], [Denial("acme/hr/*", region, "*", "people")], [log])
    return Survey(region, "", NOW, sample, page)


def granted(state: str = "active", **changes: Any) -> GrantSummary:
    made = GrantSummary(GRANT, STREAM, "us-east", "eu-west", state, STREAM, "", NOW)
    return msgspec.structs.replace(made, **changes)


def state_of(found: MeshMap) -> tuple[str, str]:
    (crossing,) = found.crossings
    return crossing.state, crossing.reason


def test_both_sides_of_a_grant_are_one_crossing() -> None:
    shards = [link(), link(shard=1, state="waiting", reason="its beginning is missing", lag_ms=9)]
    found = draw_map([survey("eu-west", granted()), survey("us-east", granted(), shards)])
    (crossing,) = found.crossings
    assert (crossing.shards, crossing.lag_records, crossing.lag_ms, crossing.crossed) == (2, 4, 9, 14)
    assert state_of(found) == ("waiting", "its beginning is missing"), "one shard that stands is what counts"
    assert crossing.told_by == ["eu-west", "us-east"]
    assert [each.state for each in found.regions] == ["up", "up"] and found.name == "acme"


def test_an_active_grant_says_when_nobody_carries_it() -> None:
    assert state_of(draw_map([survey("us-east", granted())]))[0] == "no-agent"
    old = link(reported_ms=NOW - SILENT_AFTER_MS - 1)
    assert state_of(draw_map([survey("us-east", granted(), [old])]))[0] == "silent"
    # The destination has no reports: it is not its to say that there is no agent.
    assert state_of(draw_map([survey("eu-west", granted())])) == ("active", "")


def test_regions_that_differ_are_both_told() -> None:
    found = draw_map([survey("eu-west", granted("paused")), survey("us-east", granted(), [link()])])
    assert state_of(found) == ("active", "eu-west has it as paused")
    assert draw_map([survey("us-east", granted(), [link(lag_records=-1)])]).crossings[0].lag_records == -1


@pytest.mark.parametrize("state", ["revoked", "expired"])
def test_under_a_grant_that_has_ended_nothing_is_behind(state: str) -> None:
    stopped = link(state="stopped", lag_records=3_053, lag_ms=2_302_300)
    found = draw_map([survey("us-east", granted(state), [stopped])])
    (crossing,) = found.crossings
    assert (crossing.state, crossing.lag_records, crossing.lag_ms, crossing.crossed) == (state, -1, -1, 7)
    shown = io.StringIO()
    for tree in picture(found):
        Console(file=shown, width=120).print(tree)
    assert "7 crossed under all grants of the stream" in shown.getvalue() and "behind" not in shown.getvalue()


def test_who_does_not_answer_stays_on_the_map() -> None:
    down = Survey("eu-west", "Nobody listens there.")
    found = draw_map([survey("us-east", granted(), [link()]), down])
    assert [(each.region, each.state) for each in found.regions] == [("eu-west", "down"), ("us-east", "up")]
    assert [each.state for each in draw_map([survey("us-east")]).regions] == ["known", "up"]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_tree_fits_and_loses_nothing(width: int) -> None:
    hostile = granted("offered", stream=LONG, reason="[bold]waits\x1b[31m for \u202e" + "w" * 90)
    shown = io.StringIO()
    for tree in picture(draw_map([survey("us-east", hostile, [link()]), survey("eu-west")])):
        Console(file=shown, width=width, markup=False, highlight=False).print(tree)
    lines = shown.getvalue().splitlines()
    assert all(cell_len(line) <= width for line in lines)
    packed = "".join(line.strip(" │├└─┣┗━┃") for line in lines)
    for word in (LONG, "[bold]waits", "\\x1b[31m", "w" * 90, GRANT, "witness"):
        assert word in packed.replace(" ", ""), word
    assert "\x1b" not in shown.getvalue() and "\u202e" not in shown.getvalue()


async def test_the_mesh_is_what_brokers_answer_and_observers_see_what_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    mesh = Mesh.make(tmp_path)
    for folder in (mesh.us, mesh.eu):
        issue_identity(folder, load_config(folder.config), "client", "watcher", now_ms())
    await mesh.start("us-east")
    await mesh.start("eu-west")
    try:
        await mesh.enact_policies()
        await mesh.create()
        grant = await mesh.grant()
        await mesh.deny("us-east", "acme/hr/*")
        await mesh.publish([flight(number) for number in range(20)])
        async with mesh.agent():
            await mesh.crossed(20)

            async def told() -> Any:
                said = await asyncio.to_thread(CliRunner().invoke, app, ["mesh", "-o", "json"])
                made = json.loads(said.stdout)
                (crossing,) = made["crossings"]
                own = [log for region in made["regions"] for log in region["logs"] if log["own"]]
                done = crossing["crossed"] == 20 and crossing["state"] == "active"
                return made if done and all(log["cosigners"] for log in own) else None

            made = await until(told, "a map with all that crossed, and both logs cosigned")
        assert made["crossings"][0]["grant"] == grant and made["crossings"][0]["told_by"] == ["eu-west", "us-east"]  # fmt: skip
        assert [each["state"] for each in made["regions"]] == ["up", "up"]
        assert [each["streams"] for each in made["denials"]] == ["acme/hr/*"]
        assert any(not log["own"] and log["size"] for each in made["regions"] for log in each["logs"])
        await mesh.stand("us-east", grant, StandingAction.PAUSE)
        await rights(mesh)
    finally:
        await mesh.stop("us-east")
        await mesh.stop("eu-west")
    said = await asyncio.to_thread(CliRunner().invoke, app, ["mesh"])
    assert said.exit_code == 0 and "down" in said.stdout


async def rights(mesh: Mesh) -> None:
    """An observer sees what its pattern covers, and can do nothing else; whoever has another right sees nothing."""
    watcher = "spiffe://us-east.acme/client/watcher"
    async with mesh.operator("us-east") as operator, felix.connect("us-east", identity="watcher") as client:
        for none in ([], [f"subscribe,publish,admin {STREAM}"]):
            await operator.request(PutRights(watcher, none))
            for ask in (client.describe, client.stream_traffic, client.list_links, client.describe_mesh):
                with pytest.raises(RequestError) as caught:
                    await ask()
                assert caught.value.code is Code.FORBIDDEN
        await operator.put_rights(watcher, ["observe other/*/*"])
        page = await client.describe_mesh()
        assert not page.grants and not page.denials and not await client.list_links()
        assert (await client.stream_traffic())[1] == [] and len(page.regions) == 2 and page.logs[0].own
        await operator.put_rights(watcher, ["observe acme/*/*"])
        page = await client.describe_mesh()
        assert [(each.state, each.reason) for each in page.grants] == [("paused", "paused by us-east")]
        assert page.denials and await client.list_links() and (await client.stream_traffic())[1]
        assert [each async for each in client.list_streams()] == []
        for refused in (client.list_rights, client.list_keys, client.list_quotas):
            with pytest.raises(RequestError):
                await refused()
        with pytest.raises(RequestError):
            await client.describe_stream(STREAM)
        with pytest.raises(RequestError):
            await client.request(DescribeMesh("secrets"))
