"""What the commands print: tables for people on standard output, JSON with `--json`, notices on standard error.

Most of what is printed was written by somebody else: names, sentences of refusals, headers, keys. So nothing that is
printed is read as markup, a string is one line, and control and format characters are shown as escapes
(`felix.visible`). `SafeConsole` sees to it, whatever is printed; what a command wants bold it says with `styled`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from felix.errors import RequestError
from felix.visible import visible, visible_json

if TYPE_CHECKING:
    from rich.progress import Progress

PIPE_COLUMNS: Final = 200
"""Where output goes into a file or a pipe there is no terminal to fit."""


class SafeConsole(Console):
    """A console for text from outside: no markup, no emoji codes, and nothing that a terminal would obey.

    Styles are ours: they come as `Text`, `style=` or a table's own. A string that is printed is one line.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich prints, strings as plain text."""
        plain = (Text(visible(each)) if isinstance(each, str) else each for each in objects)
        super().print(*plain, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of anything printed, each without a character that a terminal would obey."""
        for segment in super().render(renderable, options):
            # Control segments are rich's own (move the cursor, clear a line): data never makes one.
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(visible(segment.text, keep="\n"), segment.style)


def _console(*, stderr: bool) -> SafeConsole:
    stream = sys.stderr if stderr else sys.stdout
    return SafeConsole(stderr=stderr, width=None if stream.isatty() else PIPE_COLUMNS)


out = _console(stderr=False)
err = _console(stderr=True)


def styled(*parts: str | tuple[str, str]) -> Text:
    """A line of parts, some as (text, style): `styled(("acme/ops", "bold"), " is deleted")`."""
    made = Text()
    for part in parts:
        text, style = part if isinstance(part, tuple) else (part, "")
        made.append(visible(text), style)
    return made


def verdict(holds: bool, good: str, bad: str) -> tuple[str, str]:
    """A part of `styled`: `good` in green, `bad` in red."""
    return (good, "green") if holds else (bad, "bold red")


def print_json(value: Any) -> None:
    """One JSON document. Structs become objects, bytes base64 (msgspec), times stay numbers."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.buffer.write(visible_json(text) + b"\n")
    sys.stdout.flush()


def write_json_line(value: Any) -> None:
    """One JSON value on a line of standard output; the caller flushes."""
    sys.stdout.buffer.write(visible_json(msgspec.json.encode(value)) + b"\n")


def write_data(data: bytes, end: bytes = b"") -> None:
    """Somebody's payload on standard output: as it is into a file or a pipe, with escapes on a terminal."""
    if sys.stdout.isatty():
        data = visible(data.decode(errors="backslashreplace"), keep="\n\t").encode()
    sys.stdout.buffer.write(data + end)


class Printed:
    """What a command that prints records has surely brought out, so that it can say so where the output ends early."""

    def __init__(self, hint: str) -> None:
        """`hint` says what becomes of records that are not printed."""
        self.records = 0
        self._through: dict[int, int] = {}
        self._waiting: list[tuple[int, int]] = []
        self._hint = hint

    def add(self, shard: int, offset: int) -> None:
        """This record was written; it counts once `flush` has returned."""
        self._waiting.append((shard, offset))

    def flush(self) -> None:
        """Bring out what was written."""
        sys.stdout.flush()
        self.records += len(self._waiting)
        self._through.update(self._waiting)
        self._waiting.clear()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Around writing: where it fails, RequestError says how far it came. A reader who has left stays a BrokenPipeError."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            places = ", ".join(
                f"shard {shard} through offset {at}" for shard, at in sorted(self._through.items())
            )
            raise RequestError(
                f"Standard output cannot be written: {error.strerror or error}. {self.records:,} records were printed"
                f"{f' ({places})' if places else ''}.",
                hint=self._hint,
            ) from error


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for people; columns that end in `#` are numbers and stand to the right. A cell is plain text, or `Text`."""
    made = Table(title=visible(title), title_justify="left", header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(
            column.rstrip("#"), justify="right" if column.endswith("#") else "left", overflow="fold"
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(visible(format_cell(cell))) for cell in row))
    out.print(made)


def format_cell(value: object) -> str:
    """Text as it is, numbers with thousands separators, nothing for None."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def iso(time_ms: int) -> str:
    """ISO 8601 in UTC, to the second; empty for 0."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if time_ms else ""


def progress(*, counted: bool = True) -> Progress:
    """A progress bar on standard error; nothing at all where that is no terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()]
    if counted:
        columns.append(MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=err, disable=not sys.stderr.isatty())


def note(text: str) -> None:
    """A line on standard error."""
    err.print(text)
