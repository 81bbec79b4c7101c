"""Output of the commands: tables for people, objects for programs, notices on standard error.

Most of what is printed was written by somebody else: names, sentences of refusals, headers, keys. So nothing that is
printed is read as markup, a string is one line, and control and format characters are shown as escapes
(`felix.visible`). `cli.safe_console` sees to it, whatever is printed; what a command wants bold it says with `styled`.

Objects have one shape in every command (docs/schemas/felix-output-1-0-0.json, cli.kinds): `kind` says what it is, a list is
`{"kind": "<Kind>List", "items": [...]}`, a kind that the thing has of its own is its `type`, every field is there, also with
its default, ids and hashes are hex, times are milliseconds (`_ms`) or ISO 8601, and what somebody published is text where
it is UTF-8, else `{"base64": ...}`.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cli.exits import UnwritableError
from cli.form import chosen
from cli.kinds import DATA_FIELDS, kind_of, name_in
from felix.collector import collector_paused
from felix.storage.port import has_failed, is_full
from felix.visible import visible, visible_json

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

    from cli.safe_console import SafeConsole

PIPE_COLUMNS: Final = 200
"""Where output goes into a file or a pipe there is no terminal to fit; COLUMNS says another width."""


class Printer:
    """Prints for people, on one of the standard streams. rich is imported with the first line: who prints data alone does not wait for it."""

    def __init__(self, *, stderr: bool) -> None:
        self._stderr = stderr

    @cached_property
    def console(self) -> SafeConsole:
        """The console behind it, for what draws on one by itself."""
        with collector_paused():
            from cli.safe_console import SafeConsole

        stream = sys.stderr if self._stderr else sys.stdout
        columns = os.environ.get("COLUMNS", "")
        wide = int(columns) if columns.isdecimal() and int(columns) else PIPE_COLUMNS
        return SafeConsole(stderr=self._stderr, width=None if stream.isatty() else wide)

    def print(self, *objects: Any, **options: Any) -> None:
        """As `SafeConsole.print`."""
        self.console.print(*objects, **options)

    def print_wide(self, made: Table, width: int) -> None:
        """Print a table of this width, also where the terminal is narrower. rich takes no width above its console's."""
        from cli.safe_console import SafeConsole

        SafeConsole(stderr=self._stderr, width=max(width, self.console.width)).print(made, crop=False)


out = Printer(stderr=False)
err = Printer(stderr=True)


def styled(*parts: str | tuple[str, str]) -> Text:
    """A line of parts, some as (text, style): `styled(("acme/ops", "bold"), " is deleted")`."""
    from rich.text import Text

    made = Text()
    for part in parts:
        text, style = part if isinstance(part, tuple) else (part, "")
        made.append(visible(text), style)
    return made


def verdict(holds: bool, good: str, bad: str) -> tuple[str, str]:
    """A part of `styled`: `good` in green, `bad` in red."""
    return (good, "green") if holds else (bad, "bold red")


def print_json(value: Any, *, kind: str = "", **more: Any) -> None:
    """Print a command's result in the requested form; `more` is added next to the items of a list.

    A sequence becomes a list of objects, anything else one object. `kind`: what they are, where the command's words do not say it.
    """
    chosen.printed = True
    kind = kind or kind_of(chosen.command)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [_object(kind, each) for each in value]
        whole = {"kind": f"{kind}List", **{name: plain(each) for name, each in more.items()}, "items": items}
    else:
        whole = _object(kind, value)
        whole |= {name: plain(each) for name, each in more.items()}
        items = [whole]
    if chosen.form == "name":
        for item in items:
            sys.stdout.write(visible(str(name_in(item))) + "\n")
    elif chosen.form == "yaml":
        sys.stdout.write(_yaml(whole))
    else:
        sys.stdout.buffer.write(visible_json(msgspec.json.format(_json(whole), indent=2)) + b"\n")
    sys.stdout.flush()


def write_json_line(value: Any) -> None:
    """One object of many, as they come: a line of JSON, a document of YAML, or a name. The caller flushes."""
    chosen.printed = True
    made = _object(kind_of(chosen.command), value)
    if chosen.form == "name":
        sys.stdout.write(visible(str(name_in(made))) + "\n")
    elif chosen.form == "yaml":
        sys.stdout.write("---\n" + _yaml(made))
    else:
        sys.stdout.buffer.write(visible_json(_json(made)) + b"\n")


def print_done() -> None:
    """Print the sentences of a command that returns no data, as an object."""
    values = {
        name: plain(value)
        for name, value in chosen.arguments.items()
        if isinstance(value, str | int | list | Path)
    }
    print_json({"command": chosen.command, "arguments": values, "said": chosen.sentences})


def error_line(
    sentence: str, hint: str, name: str, number: int, exit_code: int, retry_after_ms: int | None = None
) -> bytes:
    """A failure as one line of JSON: programs that read JSON get it on standard error, too."""
    made = {
        "kind": "Error",
        "name": name,
        "code": number,
        "sentence": sentence,
        "hint": hint,
        "retry_after_ms": retry_after_ms,
        "exit_code": exit_code,
    }
    return visible_json(_json(made))


def _json(value: Any) -> bytes:
    """As JSON. What stands in a name of a file or an argument for bytes that are not UTF-8 has no form in it, and is written out: `\\udcff`."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(value))


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_encodable(name): _encodable(each) for name, each in value.items()}
        case list():
            return [_encodable(each) for each in value]
    return value


def _object(kind: str, value: Any) -> dict[str, Any]:
    made = plain(value)
    if not isinstance(made, dict):
        return {"kind": kind, "name": made}
    if "kind" in made:
        made = {("type" if name == "kind" else name): each for name, each in made.items()}
    return {"kind": kind, **made}


def plain(value: Any, *, data: bool = False) -> Any:
    """A value as objects, lists, text and numbers. `data`: bytes in it are what somebody published, not an id."""
    match value:
        case None | bool() | str():
            return value.value if isinstance(value, Enum) else value
        case Enum():
            return value.value
        case int() | float():
            # Durations, sizes and rates are written as people write them.
            return str(value) if type(value) not in (int, float) else value
        case bytes() | bytearray() | memoryview():
            return data_value(bytes(value)) if data else bytes(value).hex()
        case msgspec.Struct():
            names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
            return {written: plain(getattr(value, name), data=name in DATA_FIELDS) for name, written in names}
        case dict():
            return {
                str(plain(key)): plain(each, data=data or str(key) in DATA_FIELDS)
                for key, each in value.items()
            }
        case tuple() if hasattr(value, "_fields") and type(value).__str__ is object.__str__:
            return {name: plain(getattr(value, name), data=name in DATA_FIELDS) for name in value._fields}
        case tuple() if hasattr(value, "_fields"):
            return str(value)
        case list() | tuple():
            return [plain(each, data=data) for each in value]
        case set() | frozenset():
            return sorted((plain(each) for each in value), key=str)
        case _ if is_dataclass(value) and type(value).__str__ is object.__str__:
            return {
                each.name: plain(getattr(value, each.name), data=each.name in DATA_FIELDS)
                for each in fields(value)
            }
        case datetime():
            return value.isoformat()
    return str(value)


def data_value(data: bytes) -> str | dict[str, str]:
    """Somebody's bytes: text where they are UTF-8, else `{"base64": ...}`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def payload_value(data: bytes) -> dict[str, Any]:
    """A payload as `value`, and `encoding` that says how it stands there: json, text or base64."""
    try:
        return {"encoding": "json", "value": msgspec.json.decode(data)}
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = data_value(data)
        return (
            {"encoding": "text", "value": found}
            if isinstance(found, str)
            else {"encoding": "base64", "value": found["base64"]}
        )


def _yaml(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1 << 16)
    if visible(text, keep="\n") == text:
        return str(text)
    # Where a terminal would obey something, every character outside ASCII is written as YAML's own escape.
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=False, width=1 << 16))


def write_data(data: bytes, end: bytes = b"") -> None:
    """Somebody's payload on standard output: as it is into a file or a pipe, with escapes on a terminal."""
    if sys.stdout.isatty():
        data = visible(data.decode(errors="backslashreplace"), keep="\n\t").encode()
    sys.stdout.buffer.write(data + end)


class Printed:
    """The records that a command has certainly written out, so that it can report them if the output ends early."""

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
        """Around writing: where it fails, UnwritableError says how far it came. A reader who has left stays a BrokenPipeError."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            places = ", ".join(
                f"shard {shard} through offset {at}" for shard, at in sorted(self._through.items())
            )
            raise UnwritableError(
                f"Standard output cannot be written: {error.strerror or error}. {self.records:,} records were printed"
                f"{f' ({places})' if places else ''}.",
                hint=self._hint,
            ) from error


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for people, fitted to the terminal (cli.tables); columns that end in `#` are figures and stand to the right.

    A cell is plain text, or `Text`. Where the columns have no names, a row is a name and a value.
    """
    if chosen.is_data:
        return
    with collector_paused():
        from rich.table import Table

        from cli.tables import EDGE_COLUMNS, fitted

    cells = [[cell_text(cell) for cell in row] for row in rows]
    width = None if chosen.form == "wide" else out.console.width
    made = fitted(visible(title), columns, cells, width)
    if width is None and isinstance(made, Table):
        out.print_wide(
            made, sum(column.width or 0 for column in made.columns) + EDGE_COLUMNS * len(columns) - 1
        )
    else:
        out.print(made)


def cell_text(cell: object) -> Text:
    """The content of a cell: a number, or a text, made one line."""
    from rich.text import Text

    return cell if isinstance(cell, Text) else Text(visible(format_cell(cell)))


def lines(parts: Iterable[str]) -> Text:
    """A cell of several lines, each a text of its own."""
    from rich.text import Text

    return Text("\n".join(visible(part) for part in parts))


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


def counted(number: int, what: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def iso(time_ms: int) -> str:
    """ISO 8601 in UTC, to the second; empty for 0. What others signed may state a time that no calendar has."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if time_ms else ""
    except (ValueError, OverflowError, OSError):
        return "after the year 9999"


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
    return Progress(*columns, TimeElapsedColumn(), console=err.console, disable=not sys.stderr.isatty())


def note(text: str) -> None:
    """A line on standard error; lost where that is a file on a full disk, or a terminal that has gone: no process ends for want of it."""
    try:
        err.print(text)
    except OSError as error:
        if not is_full(error) and not has_failed(error):
            raise
