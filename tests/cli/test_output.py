"""What programs read: real output of real commands, held to docs/schemas; failures, names, YAML, and values that are no text."""

from __future__ import annotations

import ast
import asyncio
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import msgspec
import pytest
import yaml
from e2e.command_mesh import POLICIES
from region_home import make_region, running
from typer.testing import CliRunner, Result

import felix
from cli.commands import COMMANDS
from cli.form import Form, read_off
from cli.kinds import KINDS
from cli.main import app, main
from cli.output import data_value, payload_value, plain
from felix.messages import LinkState
from policy.quantity import Duration

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/felix-output-1-0-0.json").read_text())
STREAM = "acme/ops/orders"

SCENARIO: Sequence[str] = (
    "stream create acme/ops/orders --compact",
    "stream list",
    "stream describe acme/ops/orders",
    "subscription create acme/ops/orders billing --from earliest",
    "subscription list",
    "subscription describe acme/ops/orders billing",
    "subscription redrive acme/ops/orders billing",
    "subscription consume acme/ops/orders billing --count 1",
    "stream subscribe acme/ops/orders --from earliest --until-end",
    "queue create acme/work/mails",
    "queue put acme/work/mails hello --key k",
    "queue peek acme/work/mails",
    "queue lease acme/work/mails",
    "queue describe acme/work/mails",
    "cache create acme/web/modes",
    "cache put acme/web/modes mode dark --ttl 1h",
    "cache get acme/web/modes mode",
    "cache incr acme/web/modes visits",
    "cache scan acme/web/modes",
    "cache watch acme/web/modes --until-ready",
    "cache stats acme/web/modes",
    "cache delete acme/web/modes mode",
    "identity issue dpo --kind approver",
    "identity allow orders-svc publish_acme/ops/*",
    "identity list",
    "namespace set acme/web",
    "namespace list",
    "quota list",
    "policy check policy.yaml",
    "policy apply policy.yaml",
    "policy show",
    "bridge allow stream acme/ops/orders --to eu-west --purpose p --basis scc --expires 30d --reference R --mask a:2 --importer Acme",
    "bridge approve GRANT --as dpo --yes",
    "bridge plan GRANT",
    "bridge deny stream acme/hr/*",
    "bridge list",
    "bridge show GRANT",
    "bridge explain stream acme/ops/orders --to eu-west",
    "bridge init --to eu-west --address 127.0.0.1:7444",
    "bridge status",
    "keys list",
    "region status",
    "region bundle",
    "region offer",
    "region trust",
    "top --interval 0.2",
    "mesh",
    "audit show",
    "audit verify --cosignatures 0",
    "use us-east",
)


@cache
def validators() -> Any:
    """What makes validators of the schema's parts. The schema itself is checked once, which costs most."""
    made = jsonschema.validators.validator_for(SCHEMA)
    made.check_schema(SCHEMA)
    return made


@cache
def definition(name: str) -> Any:
    """The validator of one of the schema's definitions."""
    return validators()({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})


def check(value: Any) -> None:
    """Held to the definition of its kind; a list, each of its items. Raises jsonschema.ValidationError."""
    kind = value["kind"]
    items = value.get("items", []) if kind.endswith("List") else []
    # The items one by one: an error then names the field, not every kind that an item is not.
    if kind.endswith("List"):
        definition("list").validate({**value, "items": []})
    else:
        definition(kind).validate(value)
    for item in items:
        assert f"{item['kind']}List" == kind
        check(item)


async def command(words: str, *form: str) -> Result:
    given = [word.replace("_acme", " acme") for word in words.split()]
    return await asyncio.to_thread(CliRunner().invoke, app, [*given, *form])


async def test_what_commands_print_is_what_the_schema_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(POLICIES["us-east"])
    grant, seen = "", set()
    async with running(make_region(tmp_path, "us-east")), felix.connect("us-east") as client:
        for words in SCENARIO:
            said = await command(words.replace("GRANT", grant), "-o", "json")
            assert said.exit_code == (3 if words.startswith("bridge explain") else 0), (
                f"{words}: {said.exception}"
            )
            printed = said.stdout
            lines = printed.splitlines() if printed.startswith('{"') else [printed]
            for line in lines:
                made = json.loads(line)
                check(made)
                seen.add(made["kind"].removesuffix("List"))
                grant = made.get("grant", grant) if made["kind"] == "GrantFile" else grant
            if words.startswith("stream create"):
                stream = client.stream(STREAM)
                await stream.publish(b'{"a": 12345}', key=b"k", headers={"h": b"\xff"})
                await stream.publish(b"\xff", key=b"\xff")
            if words == "bridge status":
                (agent,) = made["agents"]
                assert (agent["name"], agent["state"], agent["leads_to"]) == (
                    "us-east-to-eu-west",
                    "down",
                    ["eu-west"],
                )
                assert agent["identity"].endswith("/bridge/us-east-to-eu-west") and agent["not_after_ms"]
                assert made["expiring"] == [], "the identity was issued just now"
            if words == "stream list":
                await same_in_other_forms()
    assert set(SCHEMA["$defs"]) - seen == {
        "list", "agent", "expiring", "data", "Error", "ReportSummary", "Restoration", "CheckedProof",
        "Benchmark", "Finding", "WitnessedLog", "Segment", "ShardVerdict", "Broker", "ShardMoves",
    }, "other tests know these, or nothing is made here that would show them"  # fmt: skip


async def same_in_other_forms() -> None:
    as_json = json.loads((await command("stream list", "--json")).stdout)
    assert yaml.safe_load((await command("stream list", "-o", "yaml")).stdout) == as_json
    assert (await command("stream list", "-o", "name")).stdout == f"{STREAM}\n"
    assert as_json["items"][0]["durability"] == {"kind": "fsync", "interval_ms": 0}, (
        "defaults are written out"
    )
    assert len(as_json["items"][0]["incarnation"]) == 32, "hex, as text shows it"
    lines = (await command(f"stream subscribe {STREAM} --from earliest --until-end", "-o", "json")).stdout
    first, second = map(json.loads, lines.splitlines())
    assert (first["value"], first["encoding"], first["headers"]) == (
        {"a": 12345},
        "json",
        {"h": {"base64": "/w=="}},
    )
    assert (second["value"], second["encoding"], second["key"]) == ("/w==", "base64", {"base64": "/w=="})
    documents = (await command(f"stream subscribe {STREAM} --from earliest --until-end", "-o", "yaml")).stdout
    assert list(yaml.safe_load_all(documents)) == [first, second]


def test_a_link_is_what_the_schema_says() -> None:
    link = LinkState("g-a", STREAM, 0, "us-east", "eu-west", "spiffe://x", "active")
    check({"kind": "Link", **plain(link)})


@pytest.mark.parametrize(
    ("words", "code", "name"),
    [
        ("stream list --region mars", 1, "not-found"),
        ("stream list --colour", 2, "usage"),
        ("fly", 2, "usage"),
        ("cache get acme/web/modes", 2, "usage"),
    ],
)
def test_a_failure_is_an_object_on_standard_error(
    words: str, code: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    for form in ("json", "yaml", "name"):
        monkeypatch.setattr(sys, "argv", ["felix", *words.split(), "-o", form])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capfd.readouterr()
        made = json.loads(printed.err)
        check(made)
        assert printed.out == "" and (end.value.code, made["exit_code"], made["name"]) == (code, code, name)


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ("stream list", "table"),
        ("stream list --json", "json"),
        ("stream list -o yaml", "yaml"),
        ("stream list -oname", "name"),
        ("stream list --output=wide", "wide"),
        ("stream list -o loud", "table"),
        ("queue put a/b/c -- --json", "table"),
        ("stream list -o", "table"),
    ],
)
def test_the_form_is_read_off_the_words(words: str, form: Form) -> None:
    assert read_off(words.split()) == form


def test_every_kind_is_described_and_of_a_command() -> None:
    assert set(KINDS.values()) <= set(SCHEMA["$defs"])
    for words in KINDS:
        name, _, verb = words.partition(" ")
        commands = getattr(app_command(name), "commands", {})
        assert (verb in commands) if verb else not commands, words


def app_command(name: str) -> Any:
    from cli.commands import load

    assert name in COMMANDS
    return load(name)


class Colour(Enum):
    RED = "red"


class Pair(NamedTuple):
    left: int
    right: bytes


class Held(msgspec.Struct, omit_defaults=True, rename={"from_": "from"}):
    id: bytes
    key: bytes = b"k"
    from_: str = ""
    colour: Colour = Colour.RED


def test_values_become_objects_with_every_field() -> None:
    assert plain(Held(b"\x01\xff", b"\xff")) == {
        "id": "01ff",
        "key": {"base64": "/w=="},
        "from": "",
        "colour": "red",
    }
    assert plain({"pair": Pair(1, b"\x02"), "some": {3, 1}, "headers": {"a": b"b"}}) == {
        "pair": {"left": 1, "right": "02"}, "some": [1, 3], "headers": {"a": "b"},
    }  # fmt: skip
    assert plain([Duration.parse("90d"), True, 2, 0.5, None, Path("/x")]) == ["90d", True, 2, 0.5, None, "/x"]
    assert plain(datetime(2026, 1, 2, tzinfo=UTC)) == "2026-01-02T00:00:00+00:00"
    assert data_value(b"caf\xc3\xa9") == "café"
    assert payload_value(b"123") == {"encoding": "json", "value": 123}
    assert payload_value(b"{x") == {"encoding": "text", "value": "{x"}


def test_no_command_prints_two_lines_as_one_sentence() -> None:
    """A string that is printed is one line: a line break in it is shown as a backslash and an n."""
    found, looked = list[str](), 0
    for path in sorted((Path(__file__).parents[2] / "cli").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in ("print", "note", "styled"):
                looked += 1
                texts = (each.value for each in ast.walk(call) if isinstance(each, ast.Constant))
                found += [f"{path}:{call.lineno}" for text in texts if isinstance(text, str) and "\n" in text]
    assert looked > 200 and not found, found
