"""`felix quota` against a running broker: set, shown beside use, cleared; what makes no sense is said in a sentence."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from region_home import make_region, running
from typer.testing import CliRunner, Result

import felix
from cli.main import app
from cli.quota import parse_limits, show_amount
from felix.errors import RequestError
from felix.quota import QuotaLimits


async def command(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(words))


async def test_quotas_are_set_shown_beside_their_use_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with running(make_region(tmp_path, "us-east")), felix.connect("us-east") as client:
        said = await command("quota", "set", "acme", "--publish-bytes", "10MiB/s", "--streams", "2")
        assert said.exit_code == 0, said.output
        assert "10 MiB/s" in said.stdout
        await client.create_stream("acme/ops/crew")
        await client.stream("acme/ops/crew").publish(b"x")
        said = await command("quota", "set", "acme", "--streams", "none", "--sessions", "5")
        shown = json.loads((await command("quota", "show", "acme", "--json")).stdout)["items"][0]
        named = {name: limit for name, limit in shown["limits"].items() if limit is not None}
        assert named == {"publish_bytes": 10 << 20, "streams": 0, "sessions": 5}
        assert (shown["used"]["streams"], shown["used"]["sessions"]) == (1, 1)
        for_people = (await command("quota", "show", "acme")).stdout
        assert "20 %" in for_people
        await command("quota", "set", "orders-svc", "--identity", "--requests", "100")
        listed = (await command("quota", "list")).stdout
        assert "spiffe://us-east.acme/client/orders-svc" in listed
        assert "requests 100/s" in listed
        assert "defaults count" in (await command("quota", "clear", "acme")).stdout
        assert "no quota of its own" in (await command("quota", "clear", "acme")).stdout
        (state,) = await client.list_quotas("tenant", "acme")
        assert state.limits == QuotaLimits()
        refused = await command("quota", "set", "orders-svc", "--identity", "--streams", "1")
        assert isinstance(refused.exception, RequestError)
        assert "Streams belong to a tenant" in refused.exception.hint


def test_limits_are_written_with_units_and_words() -> None:
    limits, unset = parse_limits(
        {
            "publish_bytes": "10MB/s",
            "stored_bytes": "5GiB",
            "sessions": "none",
            "streams": "default",
            "leases": "",
        }
    )
    assert limits == QuotaLimits(publish_bytes=10_000_000, stored_bytes=5 << 30, sessions=0)
    assert unset == ["streams"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("publish_bytes", "10"),
        ("publish_bytes", "10MB"),
        ("sessions", "many"),
        ("sessions", "-1"),
        ("sessions", "0"),
    ],
)
def test_what_is_no_limit_is_refused(name: str, text: str) -> None:
    with pytest.raises(RequestError):
        parse_limits({name: text})


def test_amounts_are_readable() -> None:
    assert show_amount("publish_bytes", 10 << 20) == "10 MiB/s"
    assert show_amount("stored_bytes", 1536) == "1.5 KiB"
    assert show_amount("requests", 1500) == "1,500/s"
    assert show_amount("sessions", 3) == "3"
