"""Answers of a hostile or newer broker of the own region: no command and no call of the SDK goes on for ever, keeps what such a broker makes up without a bound, or ends with a
traceback. Listings are held to their end by `tests/felix/test_page.py`."""

from __future__ import annotations

import types
import typing
from enum import Enum
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Annotated, Any, Final, Literal, Union

import msgspec
import pytest
from attacks import hostile_broker
from attacks.chance import Chance
from attacks.conftest import Tally
from attacks.hostile_broker import run_felix
from attacks.hostile_texts import NAMES
from attacks.test_texts_at_places import COMMANDS
from long_runs import count
from region_home import copied, make_region

from felix import cache_messages as wire
from felix.cache import Cache
from felix.errors import RequestError
from felix.messages import CacheOpened, ConsumerOpened, PublisherOpened, QueueOpened, Redriven, StreamState
from felix.names import StreamName
from felix.runtime.real import REAL
from felix.stream import Stream

STRINGS: Final = ("", "x", "\u0416\x1b[2J", "acme/ops/a", "a/b/c/d", "\u202e", "due", "x" * 250, "0", "spiffe://us-east.acme/client/a")  # fmt: skip
NUMBERS: Final = (0, 1, -1, 2, 255, 256, 1 << 31, 1 << 53, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
FLOATS: Final = (0.0, 1.0, -1.0, float("inf"), float("nan"), 1e308)


def made_up(kind: Any, drawn: Random, name: str = "") -> Any:
    """A value of this type, of what nobody expects there; pages end."""
    origin, given = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return made_up(given[0], drawn, name)
    if origin in (Union, types.UnionType):
        return made_up(drawn.choice(given), drawn, name)
    if kind is types.NoneType:
        return None
    if origin is Literal:
        return drawn.choice(given)
    if origin in (list, tuple):
        return origin([made_up(given[0], drawn, name) for _ in range(drawn.choice((0, 1, 1, 2, 3)))])
    if origin is dict or (origin is not None and issubclass(origin, typing.Mapping)):
        return {made_up(given[0], drawn, name): made_up(given[1], drawn, name) for _ in range(drawn.choice((0, 1, 2)))}  # fmt: skip
    if kind is str:
        if name == "next":
            return ""
        return NAMES[name] if name in NAMES and drawn.random() < 0.5 else drawn.choice(STRINGS)
    if kind is bytes:
        return drawn.choice((b"", b"\x01" * 16, b"\xff" * 3, b"x" * 100))
    if kind is bool:
        return name != "more" and drawn.random() < 0.5
    if kind in (int, float):
        return drawn.choice(NUMBERS if kind is int else FLOATS)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return drawn.choice(list(kind))
    hints = typing.get_type_hints(kind, include_extras=True)
    for _ in range(100):
        made = kind(**{field: made_up(hints[field], drawn, field) for field in kind.__struct_fields__})
        try:
            # As the client decodes it.
            return msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=kind)
        except (msgspec.MsgspecError, OverflowError):
            continue
    raise AssertionError(f"nothing that is a {kind.__name__} was drawn")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home")
    copied(lambda to: make_region(to, "us-east"), path)
    return path


@pytest.mark.parametrize("command", [each for each in COMMANDS if not each.startswith("top")])
def test_no_command_ends_with_a_traceback_whatever_a_broker_answers(
    home: Path, monkeypatch: pytest.MonkeyPatch, command: str, chance: Chance, tally: Tally
) -> None:
    drawn = chance(265)
    monkeypatch.setattr(hostile_broker, "filled", lambda kind, *_, **__: made_up(kind, drawn))
    tries = count(2, 200)
    for number in range(tries):
        with hostile_broker.hostile_broker(monkeypatch, ""):
            form = ("table", "json")[number % 2]
            said = run_felix(monkeypatch, home, *command.split(), "-o", form)
        assert said.code >= 0
    tally("answers that a broker made up", tries)


def test_a_look_in_which_another_broker_answers_ends_with_a_sentence(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, number = Random(1), 0

    def filled(kind: Any, *_: object, **__: object) -> Any:
        nonlocal number
        made = made_up(kind, drawn)
        if "broker" in kind.__struct_fields__:
            number += 1
            made = msgspec.structs.replace(made, broker=f"b{number}", brokers=[])
        return made

    monkeypatch.setattr(hostile_broker, "filled", filled)
    with hostile_broker.hostile_broker(monkeypatch, ""):
        said = run_felix(monkeypatch, home, "top", "--once", "--interval", "0.2")
    assert said.code > 0 and b"Another broker of the region answered" in said.err


STREAM = StreamName.parse("acme/ops/a")


@pytest.mark.parametrize("ends", [False, True])
async def test_a_redrive_whose_pages_do_not_go_on_or_do_not_end_is_refused(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("felix.stream.REDRIVE_PAGES_MAX", 20)
    asked = 0

    async def request(_: object) -> Redriven:
        nonlocal asked
        asked += 1
        return Redriven(1, next="0 5" if ends else f"0 {asked}")

    client: Any = SimpleNamespace(connection=SimpleNamespace(request=request))
    with pytest.raises(RequestError, match="do not go on"):
        await Stream(client, STREAM).redrive_subscription("s")
    assert asked <= 20


async def test_a_scan_whose_pages_do_not_go_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(*_: object) -> wire.Page:
        return wire.Page([(b"a", 1, b"x", 0)], 1, True)

    async def shards(_: Cache) -> int:
        return 1

    monkeypatch.setattr(Cache, "_call", call)
    monkeypatch.setattr(Cache, "shards", shards)
    connection: Any = SimpleNamespace(runtime=REAL)
    found = 0
    with pytest.raises(RequestError, match="does not go on"):
        async for _ in Cache(connection, STREAM).scan():
            found += 1
            assert found < 10


@pytest.mark.parametrize("kind", [StreamState, PublisherOpened, QueueOpened, CacheOpened, ConsumerOpened])
@pytest.mark.parametrize("shards", [-1, 1 << 17, (1 << 63) - 1])
def test_no_broker_has_a_client_keep_something_for_shards_without_end(kind: Any, shards: int) -> None:
    made = made_up(kind, Random(5))
    assert 0 <= made.shards <= 256
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(
            msgspec.msgpack.encode(msgspec.structs.replace(made, shards=shards)), type=kind
        )
