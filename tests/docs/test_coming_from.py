"""docs/coming-from.md names only commands, options, keyword arguments and configuration keys that there are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import typer

import felix
from cli import main
from felix.cache import Cache
from felix.client import RegionClient
from felix.consumer import Consumer
from felix.queue import Job, Queue
from felix.stream import Stream
from felix.transaction import Transaction
from region.config import StorageConfig, SubscriptionsConfig

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
FELIX = [
    code
    for row in re.findall(r"^\|.*\|$", PAGE, re.M)
    for code in re.findall(r"`([^`]+)`", row.split("|")[2])
]
PARTS = (RegionClient, Stream, Consumer, Queue, Job, Cache, Transaction)
METHODS = [
    (name, set(inspect.signature(getattr(part, name)).parameters))
    for part in PARTS
    for name in dir(part)
    if not name.startswith("_") and callable(getattr(part, name))
]


def test_the_page_speaks_of_felix() -> None:
    assert len(FELIX) > 60
    assert felix.connect


@pytest.mark.parametrize("words", [code for code in FELIX if code.startswith("felix ")])
def test_commands_and_options_exist(words: str) -> None:
    command = typer.main.get_command(main.app)
    said = words.split()[1:]
    while said and hasattr(command, "commands"):
        command = command.commands[said.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in said if word.startswith("--")} <= options


@pytest.mark.parametrize("code", [code for code in FELIX if re.match(r"[a-z_.]+\(.*\)$", code)])
def test_calls_and_their_arguments_exist(code: str) -> None:
    name, arguments = re.fullmatch(r"([a-z_.]+)\((.*)\)", code).groups()  # type: ignore[union-attr]
    wanted = set(re.findall(r"([a-z_]+)=", arguments))
    assert any(method == name.rpartition(".")[2] and wanted <= known for method, known in METHODS)


@pytest.mark.parametrize("code", [code for code in FELIX if re.fullmatch(r"[a-z_]+=(\".*\")?", code)])
def test_arguments_exist_somewhere(code: str) -> None:
    name = code.partition("=")[0]
    assert any(name in known for _, known in METHODS)


def test_configuration_keys_exist() -> None:
    assert "sweep_every" in StorageConfig.__struct_fields__
    assert "sweep_every" in SubscriptionsConfig.__struct_fields__
