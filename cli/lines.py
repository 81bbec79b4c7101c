"""Records from lines: how standard input or a file becomes what `felix stream publish` and `felix queue put` send.

A line ends with LF or CR LF, which are no part of the record; the last one may lack it. A blank line is no record, and
is counted. A line number counts every line of the input, from 1, so that it is the one an editor shows.

Invariants: lines are the same however the input is cut into reads; a line longer than LINE_BYTES_MAX is never held whole.
`LineSplitter` and `LineParser` are pure; `InputReader` reads, in a thread, never on the event loop.
"""

from __future__ import annotations

import asyncio
import os
import select
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, Self

import msgspec

from cli.exits import EXIT_FAILED
from felix.batch import BATCH_BYTES_MAX, KEY_BYTES_MAX, Headers, NewRecord
from felix.errors import RequestError
from felix.payload import with_message_id

READ_BYTES: Final = 128 * 1024
"""Read at a time: about a batch. A pipe gives what is there, 64 KiB at most, so a lone line never waits for more."""
LINE_BYTES_MAX: Final = BATCH_BYTES_MAX
"""No record is longer than a batch, so a longer line need not be kept to be refused."""
LONG_LINE_SHOWN_BYTES: Final = 1_024
"""What is kept of a line that is too long, to be found again by."""


class LongLine(NamedTuple):
    """A line that cannot be a record: its first bytes, and how many it has."""

    head: bytes
    size: int


Line = bytes | LongLine


class InvalidLineError(RequestError):
    """A line that is no record, and why: the rest of a sentence, as in "has a field 'id' that is null"."""

    exit_code = EXIT_FAILED
    """The command was right; what it was given to publish is not."""

    def __init__(self, number: int, why: str, hint: str = "") -> None:
        super().__init__(f"Line {number} {why}.", hint=hint)
        self.number = number
        self.why = why


class LineSplitter:
    """Bytes in, whole lines out, without their ends."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def pending_bytes(self) -> int:
        """Of the line whose end has not come yet."""
        return self._size

    def feed(self, data: bytes) -> list[Line]:
        """The lines that end in `data`."""
        first, *rest = data.split(b"\n")
        self._add(first)
        if not rest:
            return []
        lines: list[Line] = [self._take()]
        last = rest.pop()
        lines += map(_line, rest)
        self._add(last)
        return lines

    def finish(self) -> list[Line]:
        """The last line, where it has no end."""
        return [self._take()] if self._size else []

    def _add(self, piece: bytes) -> None:
        if not piece:
            return
        self._size += len(piece)
        if self._size > LINE_BYTES_MAX:
            self._pieces = [b"".join((*self._pieces, piece))[:LONG_LINE_SHOWN_BYTES]]
        else:
            self._pieces.append(piece)

    def _take(self) -> Line:
        line, size = b"".join(self._pieces), self._size
        self._pieces, self._size = [], 0
        return LongLine(line, size) if size > LINE_BYTES_MAX else line.removesuffix(b"\r")


def _line(raw: bytes) -> Line:
    if len(raw) > LINE_BYTES_MAX:
        return LongLine(raw[:LONG_LINE_SHOWN_BYTES], len(raw))
    return raw.removesuffix(b"\r")


class LineParser:
    """A record of each line, with the key and the message id that its fields say, and the same headers on each."""

    def __init__(self, key_field: str = "", id_field: str = "", headers: Headers | None = None) -> None:
        self._key_field = key_field
        self._id_field = id_field
        self._headers = headers
        self._decoder = msgspec.json.Decoder(dict[str, Any])

    def parse(self, number: int, line: Line) -> NewRecord | None:
        """None for a blank line. Raises InvalidLineError."""
        if isinstance(line, LongLine):
            raise InvalidLineError(number, f"has {line.size:,} bytes, and {LINE_BYTES_MAX:,} are allowed")
        if not line:
            return None
        if not self._key_field and not self._id_field:
            return NewRecord(line, None, self._headers)
        try:
            fields = self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidLineError(number, f"is not a JSON object: {error}".rstrip(".")) from error
        key = self._field(fields, self._key_field, number, "--key-field") if self._key_field else None
        if key is not None and len(key) > KEY_BYTES_MAX:
            raise InvalidLineError(
                number, f"has a key, in its field {self._key_field!r}, of {len(key):,} bytes, and "
                f"{KEY_BYTES_MAX:,} are allowed"
            )  # fmt: skip
        if not self._id_field:
            return NewRecord(line, key, self._headers)
        message_id = self._field(fields, self._id_field, number, "--message-id")
        try:
            return NewRecord(line, key, with_message_id(self._headers, message_id))
        except RequestError as error:
            raise InvalidLineError(
                number, f"has no message id in its field {self._id_field!r}: {error.sentence}".rstrip(".")
            ) from error

    def _field(self, fields: dict[str, Any], name: str, number: int, option: str) -> bytes:
        value = fields.get(name)
        if value is None:
            why = f"has a field {name!r} that is null" if name in fields else f"has no field {name!r}"
            raise InvalidLineError(
                number,
                why,
                f"Leave {option} away, correct the line, or collect such lines with --skip-invalid FILE.",
            )
        return value.encode() if isinstance(value, str) else msgspec.json.encode(value)


class InputReader:
    """Reads a file or a pipe in a thread of its own, only when asked: nothing is read ahead of what is published.

    `stop` ends a read that waits; what was read before is not lost by it.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        try:
            self._file: int | None = source.fileno()
        except (OSError, ValueError):
            self._file = None  # not a file of the operating system: it never waits
        self._stopped = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="felix-input")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.shutdown()
        os.close(self._wake_read)
        os.close(self._wake_write)

    @property
    def stopped(self) -> bool:
        """True once `stop` was called: the end is not the input's."""
        return self._stopped

    def stop(self) -> None:
        """Let reads give nothing from now on. May be called from a signal handler of the event loop."""
        if not self._stopped:
            self._stopped = True
            os.write(self._wake_write, b"!")

    async def read(self) -> bytes:
        """What is there, at most READ_BYTES; empty at the end, or once stopped. Raises RequestError where it cannot be read."""
        if self._stopped:
            return b""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._read)
        except OSError as error:
            raise RequestError(f"The input cannot be read on: {error.strerror or error}.") from error

    def _read(self) -> bytes:
        if self._file is None:
            return self._source.read(READ_BYTES)
        waiting = select.poll()
        waiting.register(self._file, select.POLLIN)
        waiting.register(self._wake_read, select.POLLIN)
        while True:
            ready = {file for file, _ in waiting.poll()}
            if self._wake_read in ready:
                return b""
            try:
                return os.read(self._file, READ_BYTES)
            except BlockingIOError:
                continue  # somebody else who shares the pipe was quicker
