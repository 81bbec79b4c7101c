"""`felix log` over what a broker wrote: structure, no contents, damage named; a whole region verified."""

import json
import shutil
from pathlib import Path

import pytest
from region_home import make_region, running
from typer.testing import CliRunner

import felix
from cli.exits import exit_code
from cli.main import app
from felix.errors import UnavailableError

SEGMENT = json.loads((Path(__file__).parents[2] / "docs/schemas/felix-output-1-0-0.json").read_text())[
    "$defs"
]["Segment"]


async def segment_of(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FELIX_HOME", str(home))
    folder = make_region(home, "us-east")
    async with running(folder), felix.connect("us-east") as client:
        await client.create_stream("acme/ops/inspected")
        for number in range(5):
            await client.stream("acme/ops/inspected").publish(f"secret-{number}".encode())
    (segment,) = (folder.root / "data" / "streams").glob("*/*/*.seg")
    return segment


async def test_a_segment_shows_its_structure_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = await segment_of(tmp_path, monkeypatch)
    answer = CliRunner().invoke(app, ["log", "inspect", str(segment), "--json"])
    assert answer.exit_code == 0
    shown = json.loads(answer.stdout)
    assert set(shown) == set(SEGMENT["required"]), "as its schema says"
    assert shown["stream"] == "acme/ops/inspected"
    assert shown["head"] == {"note": 0, "carried": 0}
    assert sum(entry["records"] for entry in shown["entries"]) == 5
    assert all(entry["flags"] == ["sealed"] for entry in shown["entries"])
    assert "secret" not in answer.stdout
    for_people = CliRunner().invoke(app, ["log", "inspect", str(segment)])
    assert for_people.exit_code == 0
    assert "acme/ops/inspected" in for_people.stdout


async def test_damage_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = await segment_of(tmp_path, monkeypatch)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    answer = CliRunner().invoke(app, ["log", "inspect", str(segment), "--json"])
    assert answer.exit_code == 5
    (damage,) = json.loads(answer.stdout)["damage"]
    assert damage["position"] < len(data) // 2 < damage["position"] + damage["length"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["log", "inspect", str(tmp_path / "some.txt")])
    assert "cannot be read" in str(answer.exception)
    (tmp_path / "some.txt").write_text("no segment")
    answer = CliRunner().invoke(app, ["log", "inspect", str(tmp_path / "some.txt")])
    assert answer.exit_code != 0
    assert "no segment file" in str(answer.exception)


async def test_a_region_is_verified_down_to_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = await segment_of(tmp_path, monkeypatch)
    answer = CliRunner().invoke(app, ["log", "verify", "--open", "--json"])
    assert answer.exit_code == 0, answer.output
    shown = json.loads(answer.stdout)
    assert shown["whole"] and [(one["records"], one["opened"]) for one in shown["items"]] == [(5, 5)]
    assert CliRunner().invoke(app, ["log", "verify", "--stream", "acme/ops/inspected"]).exit_code == 0
    nowhere = CliRunner().invoke(app, ["log", "verify", "--stream", "acme/ops/nowhere"])
    assert "no records of" in str(nowhere.exception)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    damaged = CliRunner().invoke(app, ["log", "verify", "--json"])
    assert damaged.exit_code == 5
    (finding,) = json.loads(damaged.stdout)["items"][0]["findings"]
    assert finding["file"] == str(segment) and finding["position"] <= len(data) // 2


async def test_a_shard_whose_folder_is_gone_is_damage_and_a_stream_that_is_gone_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = await segment_of(tmp_path, monkeypatch)
    for path, exits in ((segment.parent, 5), (segment.parent.parent, 0)):
        shutil.rmtree(path)
        answer = CliRunner().invoke(app, ["log", "verify", "--stream", "acme/ops/inspected", "--json"])
        assert answer.exit_code == exits, answer.output
        (verdict,) = json.loads(answer.stdout)["items"]
        (finding,) = verdict["findings"]
        assert finding["file"] == str(segment.parent) and finding["is_damage"] == (exits == 5)
        assert "nothing is left of it" in finding["what"]


async def test_a_running_broker_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with running(make_region(tmp_path, "us-east")):
        answer = CliRunner().invoke(app, ["log", "verify"])
        assert isinstance(answer.exception, UnavailableError)
        assert "in use by another process" in answer.exception.sentence and exit_code(answer.exception) == 4
