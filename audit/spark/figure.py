"""Pictures for the page, as inline SVG: flows between regions, and volume over time. Pure.

Colours are CSS variables of the page (`--c0` …), so that light, dark and print need no second picture. Every picture
has a title and a description for those who do not see it; the tables beside it hold the same numbers.

Invariants: all text is escaped; coordinates are rounded to tenths, so that the same numbers give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from audit.spark.markup import escape

COLOURS: Final = 8
"""`--c0` to `--c7` in page.css; further streams share the last one."""

_WIDTH: Final = 1080.0
_NODE: Final = 14.0
_GAP: Final = 26.0
_FLOW_HEIGHT: Final = 230.0
_BAND_LEAST: Final = 2.0
"""A flow of one record among millions must still be seen."""


def colour(index: int) -> str:
    """The CSS colour of the stream with this index."""
    return f"var(--c{min(index, COLOURS - 1)})"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def count(value: int) -> str:
    """1234567 as 1,234,567."""
    return f"{value:,}"


def size(value: int) -> str:
    """Bytes for people, in powers of 1,024: 1.6 MiB."""
    amount, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{value} B" if unit == "B" else f"{amount:.1f} {unit}"


@dataclass(frozen=True, slots=True)
class Flow:
    """Records of one stream on their way. `target` None: they stayed behind."""

    source: str
    stream: str
    target: str | None
    records: int


_WITHHELD: Final = "withheld"


class _Column:
    """Nodes of one column of the flow picture, stacked; each gives out room for bands from its top."""

    def __init__(self, x: float, sums: Mapping[str, int], scale: float) -> None:
        self.x = x
        self.top: dict[str, float] = {}
        self.height: dict[str, float] = {}
        self._used: dict[str, dict[str, float]] = {"in": {}, "out": {}}
        y = 0.0
        for name, total in sums.items():
            self.top[name] = y
            self.height[name] = max(total * scale, _BAND_LEAST * 2)
            y += self.height[name] + _GAP
        self.total = max(0.0, y - _GAP)

    def shift(self, by: float) -> None:
        for name in self.top:
            self.top[name] += by

    def take(self, name: str, end: str, height: float) -> float:
        used = self._used[end].get(name, 0.0)
        self._used[end][name] = used + height
        return self.top[name] + used


def _sums(flows: Sequence[Flow], key: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    for flow in flows:
        name = getattr(flow, key) or _WITHHELD
        sums[name] = sums.get(name, 0) + flow.records
    return sums


def flows_svg(flows: Sequence[Flow], colours: Mapping[str, int], places: Mapping[str, str]) -> str:
    """Source regions, streams and destination regions, with bands as wide as the records that went that way.

    `places` are the countries under the regions' names; `colours` numbers the streams.
    """
    flows = [flow for flow in flows if flow.records > 0]
    if not flows:
        return ""
    whole = sum(flow.records for flow in flows)
    scale = _FLOW_HEIGHT / whole
    left, right = 150.0, _WIDTH - 190.0
    targets = _sums(flows, "target")
    if _WITHHELD in targets:
        targets[_WITHHELD] = targets.pop(_WITHHELD)
    columns = [
        _Column(left, _sums(flows, "source"), scale),
        _Column((left + right) / 2, _sums(flows, "stream"), scale),
        _Column(right, targets, scale),
    ]
    top = 44.0
    tallest = max(column.total for column in columns)
    for column in columns:
        column.shift(top + (tallest - column.total) / 2)
    bands: list[str] = []
    for flow in flows:
        width = max(flow.records * scale, _BAND_LEAST)
        paint = "var(--stay)" if flow.target is None else colour(colours.get(flow.stream, COLOURS - 1))
        target = flow.target or _WITHHELD
        for start, end, from_name, to_name in (
            (columns[0], columns[1], flow.source, flow.stream),
            (columns[1], columns[2], flow.stream, target),
        ):
            bands.append(
                _band(
                    start.x + _NODE, start.take(from_name, "out", width), end.x, end.take(to_name, "in", width), width,
                    paint, f"{flow.stream}: {count(flow.records)} records, {flow.source} to {target}",
                )
            )  # fmt: skip
    nodes: list[str] = []
    for place, column in enumerate(columns):
        sums = (_sums(flows, "source"), _sums(flows, "stream"), targets)[place]
        for name, total in sums.items():
            nodes.append(_node(place, column, name, total, places, colours))
    height = top + tallest + 24
    headings = "".join(
        f'<text class="soft" x="{_n(x)}" y="18" text-anchor="{anchor}">{words}</text>'
        for x, anchor, words in (
            (left + _NODE, "end", "From region"),
            ((left + right) / 2 + _NODE / 2, "middle", "Stream"),
            (right, "start", "To region"),
        )
    )
    said = "; ".join(
        f"{flow.stream} from {flow.source} "
        + (f"to {flow.target}" if flow.target else "withheld")
        + f": {count(flow.records)} records"
        for flow in flows
    )
    return (
        f'<svg viewBox="0 0 {_n(_WIDTH)} {_n(height)}" role="img" aria-labelledby="flows-title flows-said">'
        f'<title id="flows-title">Flows between regions</title><desc id="flows-said">{escape(said)}</desc>'
        f"{headings}{''.join(bands)}{''.join(nodes)}</svg>"
    )


def _band(x0: float, y0: float, x1: float, y1: float, width: float, paint: str, said: str) -> str:
    middle = (x0 + x1) / 2
    path = (
        f"M{_n(x0)},{_n(y0)}C{_n(middle)},{_n(y0)} {_n(middle)},{_n(y1)} {_n(x1)},{_n(y1)}"
        f"V{_n(y1 + width)}C{_n(middle)},{_n(y1 + width)} {_n(middle)},{_n(y0 + width)} {_n(x0)},{_n(y0 + width)}Z"
    )
    return f'<path d="{path}" style="fill:{paint}" fill-opacity=".42"><title>{escape(said)}</title></path>'


def _node(
    place: int,
    column: _Column,
    name: str,
    total: int,
    places: Mapping[str, str],
    colours: Mapping[str, int],
) -> str:
    y, height = column.top[name], column.height[name]
    paint = "var(--ink)"
    if place == 1:
        paint = colour(colours.get(name, COLOURS - 1))
    elif name == _WITHHELD and place == 2:
        paint = "var(--stay)"
    bar = f'<rect x="{_n(column.x)}" y="{_n(y)}" width="{_n(_NODE)}" height="{_n(height)}" rx="2" style="fill:{paint}"/>'
    numbers = f"{count(total)} records"
    middle = y + height / 2
    if place == 1:
        x = column.x + _NODE / 2
        return (
            f'{bar}<text class="strong halo" x="{_n(x)}" y="{_n(y - 8)}" text-anchor="middle">{escape(name)}'
            f'<tspan class="soft" dx="8" font-weight="400">{numbers}</tspan></text>'
        )
    x, anchor = (column.x - 10, "end") if place == 0 else (column.x + _NODE + 10, "start")
    shown = "Withheld (stayed)" if name == _WITHHELD and place == 2 else name
    country = places.get(name, "") if shown == name else ""
    return (
        f'{bar}<text class="strong halo" x="{_n(x)}" y="{_n(middle - 3)}" text-anchor="{anchor}">{escape(shown)}'
        + (f'<tspan class="soft" dx="6" font-weight="400">{escape(country)}</tspan>' if country else "")
        + f'</text><text class="soft halo" x="{_n(x)}" y="{_n(middle + 13)}" text-anchor="{anchor}">{numbers}</text>'
    )


_PLOT_LEFT: Final = 74.0
_PLOT_RIGHT: Final = _WIDTH - 10
_PLOT_TOP: Final = 14.0
_PLOT_BOTTOM: Final = 214.0
_TIME_LABELS_MAX: Final = 8


def nice_step(largest: int, steps: int = 4) -> int:
    """A round number (1, 2 or 5 times a power of ten) of which at most `steps` + 1 reach `largest`."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if step * factor * steps >= largest:
                return step * factor
        step *= 10


def time_svg(
    buckets: Sequence[tuple[int, str, int, int, int]],
    width_ms: int,
    colours: Mapping[str, int],
    label: Callable[[int], str],
) -> str:
    """Records per bucket as stacked bars: each stream's crossed records, and on top what was withheld.

    `buckets` are (start ms, stream, records, bytes, withheld); `label` gives the words for a start. Empty where they count no record.
    """
    if not any(records or withheld for _, _, records, _, withheld in buckets):
        return ""
    first, last = buckets[0][0], buckets[-1][0]
    slots = (last - first) // width_ms + 1
    sums: dict[int, int] = {}
    for start, _, records, _, withheld in buckets:
        sums[start] = sums.get(start, 0) + records + withheld
    step = nice_step(max(sums.values()))
    highest = -(-max(sums.values()) // step) * step
    tall = (_PLOT_BOTTOM - _PLOT_TOP) / highest
    slot = (_PLOT_RIGHT - _PLOT_LEFT) / slots
    bar = min(max(slot * 0.78, 1.0), 64.0)
    out = [
        f'<svg viewBox="0 0 {_n(_WIDTH)} 250" role="img" aria-labelledby="time-title time-said">'
        '<title id="time-title">Records over time</title><desc id="time-said">'
        + escape("; ".join(f"{label(start)}: {count(total)} records" for start, total in sums.items())[:4000])
        + "</desc>"
    ]
    for value in range(0, highest + 1, step):
        y = _PLOT_BOTTOM - value * tall
        out.append(
            f'<line class="grid" x1="{_n(_PLOT_LEFT)}" x2="{_n(_PLOT_RIGHT)}" y1="{_n(y)}" y2="{_n(y)}"/>'
            f'<text class="soft" x="{_n(_PLOT_LEFT - 10)}" y="{_n(y + 4)}" text-anchor="end">{count(value)}</text>'
        )
    reached: dict[int, float] = {}
    for what in ("crossed", "withheld"):
        for start, stream, records, _, withheld in buckets:
            amount = records if what == "crossed" else withheld
            if not amount:
                continue
            height = max(amount * tall, 0.8)
            y = reached.get(start, _PLOT_BOTTOM) - height
            reached[start] = y
            x = _PLOT_LEFT + (start - first) // width_ms * slot + (slot - bar) / 2
            paint = "var(--stay)" if what == "withheld" else colour(colours.get(stream, COLOURS - 1))
            said = f"{label(start)}: {stream}, {count(amount)} records {what}"
            out.append(
                f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(bar)}" height="{_n(height)}" style="fill:{paint}">'
                f"<title>{escape(said)}</title></rect>"
            )
    every = -(-slots // _TIME_LABELS_MAX)
    for place in range(0, slots, every):
        x = _PLOT_LEFT + place * slot + slot / 2
        out.append(
            f'<text class="soft" x="{_n(x)}" y="236" text-anchor="middle">{escape(label(first + place * width_ms))}</text>'
        )
    out.append("</svg>")
    return "".join(out)
