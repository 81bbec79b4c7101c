"""The report as one HTML page: no script, no network, prints on A4, light and dark. Pure.

What lives here: `render(report)`, and what its template (page.html) asks for. The page forbids itself every request
(Content-Security-Policy) and carries its style and pictures inside. Jinja escapes everything that is put into the template, and
`visible` shows its control and format characters as escapes: a log is evidence, not markup. Only pictures are markup already.
Same report, same bytes. Who may call: `audit.spark.report`, tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from audit.spark import reconciliation
from audit.spark.document import STATEMENT, Report
from audit.spark.exceptions import BREACH, REFUSED
from audit.spark.figure import Flow, colour, count, flows_svg, size, time_svg
from audit.spark.lineage import OTHER_FIELDS
from audit.spark.table import iso
from audit.spark.volumes import DAY_MS, OTHER_STREAMS, PICTURED_MAX, pictured
from felix.visible import visible
from policy.lineage import EFFECTS
from policy.quantity import AFTER_CALENDAR
from policy.transform import Action

ROWS_MAX: Final = 200
"""Rows of one table on the page; a person reads no more, and the files beside it hold them all."""
ITEMS_MAX: Final = 50
"""Of one list in a cell, likewise."""
OTHER_REGIONS: Final = "other regions"
_EMPTY: Final = Markup('<span class="quiet">–</span>')

_STATUS: Final = {
    reconciliation.RECONCILED: "good",
    reconciliation.OPEN: "warn",
    reconciliation.DIFFERS: "bad",
    reconciliation.VERSION_1: "bad",
    reconciliation.ONE_SIDE: "info",
}
_SEVERITY: Final = {BREACH: "bad", REFUSED: "warn"}
_TONES: Final[Mapping[str, str]] = {Action.KEEP: "info", Action.DROP: "bad", Action.PSEUDONYMIZE: "good"}
"""Of rules; the others change a value, and are `warn`."""


def _action(action: str) -> tuple[str, str]:
    """Tone and words of what is done to a field; a mask says what it leaves readable."""
    kind, _, last = action.partition(":")
    if kind not in EFFECTS:
        return "info", action
    words = EFFECTS[kind].word
    return _TONES.get(kind, "warn"), f"{words} but for the last {last} characters" if last else words


def _cell(value: Any) -> str:
    """Any value of a table as text; a dash where there is nothing."""
    if value is None or value == "" or value == []:
        return _EMPTY
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        # A line for each: whatever stood between two could be in one of them.
        told = Markup("<br>").join(visible(str(item)) for item in value[:ITEMS_MAX])
        more = len(value) - ITEMS_MAX
        return told + (
            Markup('<br><span class="quiet">and {:,} more</span>').format(more) if more > 0 else ""
        )
    return f"{value:,}" if isinstance(value, int) else str(value)


def moment(time_ms: int | None) -> str:
    """A time for people, in UTC, to the second; in words where no calendar has it."""
    if not time_ms:
        return _EMPTY
    told = iso(time_ms)
    assert told is not None
    return told if told == AFTER_CALENDAR else told[:19].replace("T", " ")


def _own_name(spiffe: str | None) -> str:
    """The last part of a SPIFFE id, for narrow places."""
    return (spiffe or "").rpartition("/")[2]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _shown(value: Any) -> Any:
    """What stands in the template for a value: markup as it is, text without characters that hide or reorder others."""
    return value if isinstance(value, Markup) else visible(str(value))


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=PackageLoader("audit.spark", ""),
    )
    environment.filters |= {
        "action": _action, "cell": _cell, "colour": colour, "count": count, "counted": _counted, "iso": iso, "moment": moment,
        "own_name": _own_name, "size": size,
    }  # fmt: skip
    return environment.get_template("page.html")


def _window(report: Report) -> str:
    if report.first_ms is None:
        return "no crossings in the window"
    return f"{moment(report.first_ms)} to {moment(report.last_ms)} UTC"


def _asked(report: Report) -> str:
    if report.since_ms is None and report.until_ms is None:
        return "all that the logs hold"
    since = f"from {moment(report.since_ms)}" if report.since_ms is not None else "from the beginning"
    until = f"until before {moment(report.until_ms)}" if report.until_ms is not None else "until the end"
    return f"{since} {until} UTC"


def _route(report: Report) -> str:
    links = {
        (row["source_region"], row["destination_region"] or "unknown") for row in report.register.records()
    }
    told = [f"{source} to {destination}" for source, destination in sorted(links)[:PICTURED_MAX]]
    more = [f"{len(links) - PICTURED_MAX:,} more"] if len(links) > PICTURED_MAX else []
    return "; ".join((*told, *more)) or "no links"


def _stream_colours(report: Report) -> dict[str, int]:
    """Of the streams that pictures tell apart."""
    return {stream: index for index, stream in enumerate(pictured(report.register.records()))}


def _verdict(report: Report) -> tuple[str, str]:
    """The state of reconciliation in few words, and its colour."""
    statuses = {row["status"] for row in report.reconciliation.records()}
    if reconciliation.DIFFERS in statuses or report.totals.differences:
        return "bad", f"{count(report.totals.differences)} differences between the logs"
    if any(log.is_of_version_1 for log in report.logs):
        return "bad", "Of version 0.1: cannot support under which terms, by whose approval, or when"
    if report.left_off:
        return "warn", "Not whole: more rows than a report lists"
    if reconciliation.OPEN in statuses:
        return "warn", f"{count(report.totals.open)} batches open, the rest reconciled"
    if reconciliation.ONE_SIDE in statuses:
        return "warn", "One side only: nothing to reconcile with"
    return ("good", "Egress and ingress reconcile") if statuses else ("info", "Nothing to reconcile")


def _flows(report: Report, colours: Collection[str]) -> tuple[list[Flow], dict[str, str]]:
    """What crossed and what stayed, and the country of each region. Streams that are not among `colours` are one, and so are regions beyond as many."""
    rows = report.register.records()
    sources, targets = (pictured(rows, f"{side}_region") for side in ("source", "destination"))
    sums: dict[tuple[str, str, str | None], int] = {}
    places: dict[str, str] = {}
    for row in rows:
        for side in ("source", "destination"):
            if row[f"{side}_country"]:
                places[row[f"{side}_region"]] = row[f"{side}_country"]
        source = row["source_region"] if row["source_region"] in sources else OTHER_REGIONS
        stream = row["stream"] if row["stream"] in colours else OTHER_STREAMS
        target = row["destination_region"] if row["destination_region"] in targets else OTHER_REGIONS
        sums[source, stream, target] = sums.get((source, stream, target), 0) + row["records"]
        if row["withheld"]:
            sums[source, stream, None] = sums.get((source, stream, None), 0) + row["withheld"]
    return [Flow(*ends, records) for ends, records in sums.items()], places


def _label(report: Report) -> Callable[[int], str]:
    """The words for a bucket of the time line. Made one by one: two leaves may lie thousands of years apart."""
    words = "%b %d" if report.bucket_ms >= DAY_MS else "%b %d, %H:00"
    return lambda start: f"{datetime.fromtimestamp(start // 1000, UTC):{words}}"


def _unit(bucket_ms: int) -> str:
    """What one bar of the time line is of."""
    days = bucket_ms // DAY_MS
    return f"{days:,} days" if days > 1 else "day" if days else "hour"


def _routes(report: Report) -> list[list[dict[str, Any]]]:
    """The lineage's rows by the route and the terms that they are of."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    names = (
        "source_region", "stream", "bridge", "destination_region", "destination_stream", "terms_hash", "records"
    )  # fmt: skip
    for row in report.lineage.records():
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def render(report: Report) -> str:
    """The whole page."""
    colours = _stream_colours(report)
    flows, places = _flows(report, colours)
    register = report.register.records()
    return _template().render(
        report=report,
        statement=STATEMENT,
        style=Markup(_style()),  # noqa: S704 - our own
        empty=_EMPTY,
        rows_max=ROWS_MAX,
        status_tone=_STATUS,
        severity_tone=_SEVERITY,
        other_fields=OTHER_FIELDS,
        one_side=reconciliation.ONE_SIDE,
        route=_route(report),
        window=_window(report),
        asked=_asked(report),
        verdict=_verdict(report),
        colours=colours,
        flows_picture=Markup(flows_svg(flows, colours, places)),  # noqa: S704 - audit.spark.figure escapes its text
        time_picture=Markup(time_svg(report.time_line, report.bucket_ms, colours, _label(report))),  # noqa: S704
        some_stayed=any(flow.target is None for flow in flows),
        unit=_unit(report.bucket_ms),
        other_streams=OTHER_STREAMS,
        has_other_streams=any(flow.stream == OTHER_STREAMS and flow.records for flow in flows),
        items_max=ITEMS_MAX,
        volumes=report.volumes.records(),
        volumes_total=report.volumes.total,
        register=register,
        transfers=[row for row in register if row["terms_hash"]],
        shards=report.reconciliation.records(),
        findings=report.findings.records(),
        exceptions=report.exceptions.records(),
        routes=_routes(report),
    )


@cache
def _style() -> str:
    return resources.files("audit.spark").joinpath("page.css").read_text("utf-8")
