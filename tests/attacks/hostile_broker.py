"""A broker that answers each question with texts of its own choice, for commands that run in this process."""

from __future__ import annotations

import io
import logging
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from attacks.hostile_texts import filled

import felix.messages
from cli.main import main
from cli.output import err, out
from felix import RegionClient
from felix.cache import Cache
from felix.cache_messages import CacheStats
from felix.errors import Code, FelixError, RequestError
from felix.frames import FRAME_HEADER_BYTES
from felix.messages import Request, decode_error, encode_error
from felix.queue import Queue
from felix.queue_messages import Peeked, QueueState
from felix.runtime.real import REAL


class Said(NamedTuple):
    """What a command printed, and how it ended."""

    code: int
    out: bytes
    err: bytes


def answer_type(request: type[Request[Any]]) -> Any:
    """Which message answers a request."""
    for base in getattr(request, "__orig_bases__", ()):
        for given in typing.get_args(base):
            return given if isinstance(given, type) else getattr(felix.messages, given.__forward_arg__)
    raise AssertionError(request)


def refusal(text: str) -> FelixError:
    """As a broker's refusal comes over the wire."""
    frame = encode_error(RequestError(text, code=Code.FORBIDDEN, hint=text), 1)
    return decode_error(memoryview(frame)[FRAME_HEADER_BYTES:])


class Connection:
    """In place of the client's: the answers are filled with one text."""

    runtime = REAL

    def __init__(self, text: str, *, refuses: bool) -> None:
        self._text, self._refuses = text, refuses

    async def request(self, request: Any, *, timeout_s: float | None = None) -> Any:
        if self._refuses:
            raise refusal(self._text)
        return filled(answer_type(type(request)), self._text, names=True)

    async def call(self, message: Any, **_: Any) -> Any:
        """Of a queue or a cache."""
        if self._refuses:
            raise refusal(self._text)
        kinds = {"Describe": QueueState, "Peek": Peeked, "Stats": CacheStats}
        return filled(kinds[type(message).__name__], self._text, names=True)


@contextmanager
def hostile_broker(monkeypatch: pytest.MonkeyPatch, text: str, *, refuses: bool = False) -> Iterator[None]:
    """Whatever is asked of a region is answered with this text."""
    connection = Connection(text, refuses=refuses)

    async def opened(self: RegionClient) -> None:
        self._connection = connection  # type: ignore[assignment]

    async def closed(self: RegionClient, *_: object) -> None:
        pass

    async def called(self: Any, message: Any, **options: Any) -> Any:
        return await connection.call(message, **options)

    async def cached(self: Any, _key: bytes, message: Any) -> Any:
        return await connection.call(message)

    with monkeypatch.context() as patch:
        patch.setattr(RegionClient, "open", opened)
        patch.setattr(RegionClient, "_close", closed)
        patch.setattr(Queue, "_call", called)
        patch.setattr(Cache, "_call", cached)
        yield


class _Terminal(io.TextIOWrapper):
    """A standard stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_felix(
    monkeypatch: pytest.MonkeyPatch, home: Path, *words: str, columns: int = 80, terminal: bool = False
) -> Said:
    """A command line, in this process. Raises what it would end with a traceback for."""
    kind = _Terminal if terminal else io.TextIOWrapper
    streams = [kind(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    handlers = logging.root.handlers[:]
    for printer in (out, err):
        printer.__dict__.pop("console", None)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["felix", *words])
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        patch.setenv("FELIX_HOME", str(home))
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("FELIX_REGION", "us-east")
        patch.setattr("cli.main._take_closed_streams", lambda: None)
        patch.setattr("signal.signal", lambda *_: None)
        patch.setattr("gc.freeze", lambda: None)
        code = -1
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            logging.root.handlers[:] = handlers
            for printer in (out, err):
                printer.__dict__.pop("console", None)
    return Said(code, *(each.buffer.getvalue() for each in streams))  # type: ignore[attr-defined]
