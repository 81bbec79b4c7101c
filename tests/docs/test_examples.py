"""The files under examples/ are read by the code that reads such files, and say what they claim to."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from bridge.config import BridgeConfig
from bridge.config import load_config as load_bridge
from policy.residency import parse_policy
from region.config import RegionConfig, load_config

REGIONS = Path(__file__).parents[2] / "examples" / "regions"


@pytest.mark.parametrize("name", ["us-east", "eu-west"])
def test_configurations_load(name: str) -> None:
    assert load_config(REGIONS / f"{name}.yaml").region == name


def test_the_first_example_has_every_key_with_its_default() -> None:
    shown = yaml.safe_load((REGIONS / "us-east.yaml").read_text())
    assert set(shown) == set(RegionConfig.__struct_fields__)
    least = msgspec.structs.asdict(load_config(REGIONS / "us-east.yaml"))
    given = {"region", "mesh", "country", "entity"}
    for field in msgspec.structs.fields(RegionConfig):
        if field.name not in given:
            assert least[field.name] == field.default, field.name
    for part in ("audit", "tracing", "limits"):
        held: Any = least[part]
        assert set(shown[part]) == set(held.__struct_fields__), part


def test_the_bridge_example_has_every_key_with_its_default() -> None:
    path = REGIONS / "us-east-to-eu-west.yaml"
    shown, held = yaml.safe_load(path.read_text()), msgspec.structs.asdict(load_bridge(path))
    assert set(shown) == set(BridgeConfig.__struct_fields__)
    for field in msgspec.structs.fields(BridgeConfig):
        if not field.required:
            assert held[field.name] == field.default, field.name
    for part in ("limits", "tracing"):
        assert set(shown[part]) == set(held[part].__struct_fields__), part
    (destination,) = shown["destinations"]
    assert set(destination) == set(held["destinations"][0].__struct_fields__)


@pytest.mark.parametrize("name", ["residency.yaml", "residency-eu-west.yaml"])
def test_policies_hold(name: str) -> None:
    assert parse_policy((REGIONS / name).read_text(), name).file.revision == 1


def test_every_file_is_in_the_index() -> None:
    named = set(re.findall(r"^\| `([\w.-]+)` \|", (REGIONS / "README.md").read_text(), re.M))
    assert named == {path.name for path in REGIONS.iterdir()} - {"README.md"}
