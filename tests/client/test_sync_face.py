"""felix.sync has everything that the asynchronous client has, with the same parameters, and is what sdk/sync_face.py writes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import felix
import felix.sync

ROOT = Path(__file__).parents[2]


def _program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sync_face", ROOT / "sdk" / "sync_face.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["sync_face"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROGRAM = _program()
FACES: tuple[Any, ...] = PROGRAM.FACES


def _public(found: type) -> dict[str, Any]:
    return {
        name: value for name, value in vars(found).items() if not name.startswith("_") and _is_called(value)
    }


def _is_called(value: Any) -> bool:
    return isinstance(value, property) or inspect.isfunction(value)


def _origin(face: Any) -> type:
    return getattr(importlib.import_module(f"felix.{face.module}"), face.name)  # type: ignore[no-any-return]


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [
        (name, parameter.kind, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    ]


def test_the_file_is_what_the_program_writes() -> None:
    assert Path(felix.sync.__file__).read_text() == PROGRAM.generated(), "run `make sync`"


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_nothing_is_missing_and_every_signature_is_the_same(face: Any) -> None:
    twin, origin = getattr(felix.sync, face.twin), _origin(face)
    left_out = PROGRAM.LEFT_OUT[face.name]
    assert set(left_out) <= set(_public(origin)), "what is left out exists"
    for name, member in _public(origin).items():
        if name in left_out:
            assert not hasattr(twin, name) and left_out[name]
            continue
        same = inspect.getattr_static(twin, name)
        assert isinstance(member, property) == isinstance(same, property), name
        if isinstance(member, property):
            continue
        here, there = _parameters(same), _parameters(member)
        if (name, twin) in ADDED:
            assert here == [*there, ("timeout_s", inspect.Parameter.POSITIONAL_OR_KEYWORD, None)]
        else:
            assert here == there, f"{face.twin}.{name}"


ADDED = {("next_batch", felix.sync.SyncSubscription), ("changes", felix.sync.SyncWatch)}
"""A thread cannot be cancelled while it waits: it says how long."""


def test_connect_takes_what_felix_connect_takes() -> None:
    assert _parameters(felix.sync.connect) == _parameters(felix.connect)
