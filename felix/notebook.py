"""Results of the client as HTML for notebooks: tables, and small pictures (inline SVG) of streams and links. Pure.

Jupyter asks a result for `_repr_html_`; messages, records and batches answer with what is made here. Every text comes
from somewhere else (a name, a reason, a payload), so each goes through `_text`: controls and format characters as escapes, then
escaped for HTML. Markup is written here alone, with no script, no style sheet and no address in it.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from felix.batch import Record
from felix.messages import LinkState, ShardState, StreamState
from felix.visible import visible

T = TypeVar("T")

ROWS_SHOWN_MAX: Final = 50
"""Of one table; a notebook keeps each output in its file."""
TEXT_SHOWN_MAX: Final = 160
"""Characters of one cell."""
BYTES_SHOWN_MAX: Final = 32
"""Of a payload or key that is no text."""
SHARDS_DRAWN_MAX: Final = 16
LINKS_DRAWN_MAX: Final = 12
LABEL_SHOWN_MAX: Final = 26
"""Characters of a label in a picture: what fits its box."""

_WORKING: Final = "active"
"""The state of a link that is drawn as a whole line; of any other, dashed."""
_CELL: Final = 'style="text-align:left"'


class Rows(list[T]):
    """A list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return rows_html(self)


def html_of(value: object) -> str:
    """One message, record or batch: a picture where there is one, and a table of its fields."""
    if isinstance(value, StreamState):
        return stream_svg(value) + _table(
            ["shard", "log start", "high watermark", "bytes"],
            [[shard.shard, shard.log_start, shard.high_watermark, shard.size_bytes] for shard in value.state],
            len(value.state),
        )
    if isinstance(value, LinkState):
        return rows_html([value])
    return _table(["field", "value"], list(_fields(value)), 0)


def rows_html(values: Sequence[object]) -> str:
    """Several values of one kind as one table, links with a picture above it."""
    shown = list(islice(values, ROWS_SHOWN_MAX))
    if not shown:
        return "<p>nothing</p>"
    first = shown[0]
    rows: Sequence[Sequence[object]]
    if isinstance(first, Record):
        heads = ["offset", "time", "key", "payload"]
        rows = [[r.offset, _time(r.timestamp_ms), r.key, r.payload] for r in shown if isinstance(r, Record)]
    elif isinstance(first, StreamState):
        heads = ["stream", "shards", "records", "bytes", "durability", "created"]
        rows = [_stream_row(state) for state in shown if isinstance(state, StreamState)]
    elif isinstance(first, LinkState):
        heads = ["stream", "shard", "from", "to", "state", "crossed", "withheld", "filtered", "lag", "reason"]
        links = [link for link in shown if isinstance(link, LinkState)]
        rows = [_link_row(link) for link in links]
        return links_svg(links) + _table(heads, rows, len(values))
    elif isinstance(first, msgspec.Struct):
        heads = [name for name, _ in _fields(first)]
        rows = [[field for _, field in _fields(value)] for value in shown]
    else:
        heads, rows = ["value"], [[value] for value in shown]
    return _table(heads, rows, len(values))


def stream_svg(stream: StreamState) -> str:
    """A bar for each shard: what the log holds now, on the line from offset 0 to the longest shard's end."""
    shards = stream.state[:SHARDS_DRAWN_MAX]
    longest = max((shard.high_watermark for shard in shards), default=0)
    height = 22 + 18 * len(shards)
    parts = [_svg_text(4, 14, stream.stream, weight="bold")]
    for row, shard in enumerate(shards):
        top = 24 + 18 * row
        start, end = (_scaled(offset, longest, 240) for offset in (shard.log_start, shard.high_watermark))
        parts += [
            _svg_text(4, top + 9, str(shard.shard)),
            f'<rect x="30" y="{top}" width="240" height="11" rx="2" fill="none" stroke="#8a8f98"></rect>',
            f'<rect x="{30 + start}" y="{top}" width="{max(end - start, 0)}" height="11" rx="2" fill="{_fill(shard)}"></rect>',
            _svg_text(278, top + 9, f"{shard.log_start:,} to {shard.high_watermark:,}"),
        ]
    return _svg(440, height, f"Stream {stream.stream}", parts)


def links_svg(links: Iterable[LinkState]) -> str:
    """An arrow for each stream between two regions: whole where it works, dashed where it does not."""
    drawn: dict[tuple[str, str, str], list[LinkState]] = {}
    for link in links:
        drawn.setdefault((link.from_region, link.to_region, link.stream), []).append(link)
    parts: list[str] = []
    kept = list(drawn.items())[:LINKS_DRAWN_MAX]
    for row, ((source, destination, stream), shards) in enumerate(kept):
        top = 6 + 46 * row
        works = all(link.state == _WORKING for link in shards)
        dash, colour = ("", "#2f7d4f") if works else (' stroke-dasharray="5 4"', "#b3541e")
        crossed = sum(link.crossed for link in shards)
        parts += [
            f'<rect x="2" y="{top}" width="120" height="34" rx="5" fill="none" stroke="#8a8f98"></rect>',
            f'<rect x="418" y="{top}" width="120" height="34" rx="5" fill="none" stroke="#8a8f98"></rect>',
            _svg_text(62, top + 21, source, anchor="middle"),
            _svg_text(478, top + 21, destination, anchor="middle"),
            f'<line x1="126" y1="{top + 17}" x2="406" y2="{top + 17}" stroke="{colour}" stroke-width="2"{dash}></line>',
            f'<polygon points="414,{top + 17} 404,{top + 12} 404,{top + 22}" fill="{colour}"></polygon>',
            _svg_text(266, top + 11, stream, anchor="middle"),
            _svg_text(266, top + 31, f"{shards[0].state}, {crossed:,} crossed", anchor="middle"),
        ]
    return _svg(540, 6 + 46 * len(kept), "Links between regions", parts)


# The rows


def _stream_row(state: StreamState) -> list[object]:
    records = sum(shard.high_watermark - shard.log_start for shard in state.state)
    size = sum(shard.size_bytes for shard in state.state)
    return [state.stream, state.shards, records, size, state.durability.kind, _time(state.created_ms)]


def _link_row(link: LinkState) -> list[object]:
    lag = link.lag_records if link.lag_records >= 0 else None
    counts = [link.crossed, link.withheld, link.filtered, lag]
    return [link.stream, link.shard, link.from_region, link.to_region, link.state, *counts, link.reason]


def _fields(value: object) -> Iterator[tuple[str, object]]:
    """Names and values, times as times."""
    if isinstance(value, Record):
        pairs: Iterable[tuple[str, Any]] = value._asdict().items()
    elif isinstance(value, msgspec.Struct):
        pairs = [(name, getattr(value, name)) for name in value.__struct_fields__]
    else:
        pairs = [("value", value)]
    for name, found in pairs:
        if isinstance(found, bytes) and not isinstance(value, Record):
            found = found.hex()  # an incarnation, an id
        is_time = name.endswith(("created_ms", "started_ms", "reported_ms", "timestamp_ms")) and found
        yield name.removesuffix("_ms") if is_time else name, _time(found) if is_time else found


# HTML


def _table(heads: Sequence[str], rows: Sequence[Iterable[object]], total: int) -> str:
    head = "".join(f"<th {_CELL}>{_text(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td {_CELL}>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    more = f"<p>the first {len(rows):,} of {total:,}</p>" if total > len(rows) else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _text(value: object, shown: int = TEXT_SHOWN_MAX) -> str:
    """A value as text in HTML, in an attribute too: nothing in it is markup, and nothing in it is hidden."""
    if value is None:
        text = ""
    elif isinstance(value, bool) or not isinstance(value, int | float | bytes | memoryview):
        text = str(value)
    elif isinstance(value, bytes | memoryview):
        text = _bytes(bytes(value))
    else:
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")
    text = visible(text[: shown + 1])  # escapes only make it longer
    return escape(text if len(text) <= shown else text[: shown - 1] + "…", quote=True)


def _bytes(data: bytes) -> str:
    begins = data[: 4 * TEXT_SHOWN_MAX]
    try:
        return getincrementaldecoder("utf-8")().decode(begins, final=len(begins) == len(data))
    except UnicodeDecodeError:
        return data[:BYTES_SHOWN_MAX].hex(" ") + (
            f" … ({len(data):,} bytes)" if len(data) > BYTES_SHOWN_MAX else ""
        )


def _time(ms: int) -> str:
    return (
        datetime.fromtimestamp(ms / 1000, UTC)
        .isoformat(sep=" ", timespec="milliseconds")
        .replace("+00:00", "Z")
    )


# SVG


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" fill="currentColor"'
        f' font-size="11" font-family="sans-serif"><title>{_text(title)}</title>{"".join(parts)}</svg>'
    )


def _svg_text(x: int, y: int, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    shown = LABEL_SHOWN_MAX * (2 if anchor == "start" else 1)
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{_text(text, shown)}</text>'


def _scaled(offset: int, longest: int, width: int) -> int:
    return round(width * min(offset, longest) / longest) if longest > 0 else 0


def _fill(shard: ShardState) -> str:
    return "#b3541e" if shard.stopped else "#3b6ea5"
