"""The report as one HTML page: no script, no network, prints on A4, light and dark. Pure.

What lives here: `render(report)` and its parts. The page forbids itself every request (Content-Security-Policy) and
carries its style and pictures inside. Everything that comes out of a log is escaped: a log is evidence, not markup.
Same report, same bytes. Who may call: `audit.spark.report`, tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any, Final

from audit.spark import reconciliation
from audit.spark.document import STATEMENT, Report, VerifiedLog
from audit.spark.exceptions import BREACH, REFUSED
from audit.spark.figure import Flow, colour, count, flows_svg, size, time_svg
from audit.spark.lineage import OTHER_FIELDS
from audit.spark.markup import escape
from audit.spark.table import iso
from audit.spark.volumes import DAY_MS

ROWS_MAX: Final = 200
"""Rows of one table on the page; a person reads no more, and the files beside it hold them all."""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_EMPTY: Final = '<span class="quiet">–</span>'

_STATUS: Final = {
    reconciliation.RECONCILED: "good",
    reconciliation.OPEN: "warn",
    reconciliation.DIFFERS: "bad",
    reconciliation.ONE_SIDE: "info",
}
_ACTIONS: Final = {
    "keep": ("info", "kept"),
    "drop": ("bad", "dropped"),
    "mask": ("warn", "masked"),
    "hash": ("warn", "hashed"),
    "pseudonymize": ("good", "pseudonymized"),
}


def _action(action: str) -> tuple[str, str]:
    """Tone and words of what is done to a field; a mask says what it leaves readable."""
    kind, _, last = action.partition(":")
    tone, words = _ACTIONS.get(kind, ("info", action))
    return tone, f"{words} but for the last {last} characters" if last else words


def _text(value: Any) -> str:
    """Any cell as escaped text; a dash where there is nothing."""
    if value is None or value == "" or value == []:
        return _EMPTY
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return escape(", ".join(str(item) for item in value))
    return escape(f"{value:,}" if isinstance(value, int) else str(value))


def moment(time_ms: int | None) -> str:
    """A time for people, in UTC, to the second."""
    if not time_ms:
        return _EMPTY
    return f"{datetime.fromtimestamp(time_ms // 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _badge(kind: str, words: str) -> str:
    return f'<span class="badge {kind}">{escape(words)}</span>'


def _code(value: str | None, shown: int = 0) -> str:
    if not value:
        return _EMPTY
    if shown and len(value) > shown:
        return f'<code title="{escape(value)}">{escape(value[:shown])}…</code>'
    return f"<code>{escape(value)}</code>"


def _codes(values: Sequence[str] | None) -> str:
    return "<br>".join(_code(value) for value in values) if values else _EMPTY


def _link(row: dict[str, Any]) -> str:
    # A refused attempt may name no destination that could be known.
    to = escape(row["destination_region"] or "unknown")
    return f'<span class="nowrap">{escape(row["source_region"])} → {to}</span>'


def _bridge(spiffe: str | None) -> str:
    """The bridge's own name out of its SPIFFE id, for narrow places."""
    return (spiffe or "").rpartition("/")[2]


def _table(
    caption: str,
    headings: Sequence[tuple[str, bool]],
    rows: Iterable[Sequence[str]],
    note: str = "",
    foot: str = "",
) -> str:
    """A table of finished cells. `headings`: the words, and whether the column holds numbers."""
    head = "".join(
        f'<th scope="col"{" class=num" if number else ""}>{escape(words)}</th>' for words, number in headings
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=num' if number else ''}>{cell}</td>"
            for cell, (_, number) in zip(row, headings, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}{f" <span>{escape(note)}</span>" if note else ""}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}</table></div>"
    )


def _items(pairs: Sequence[tuple[str, str]], kind: str = "") -> str:
    inside = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f"<dl{f' class={kind}' if kind else ''}>{inside}</dl>"


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


def _stream_colours(report: Report) -> dict[str, int]:
    streams = sorted(
        {row["stream"] for row in report.register.records() if row["records"] or row["withheld"]}
    )
    return {stream: index for index, stream in enumerate(streams)}


def _verdict(report: Report) -> tuple[str, str]:
    """The state of reconciliation in few words, and its colour."""
    statuses = {row["status"] for row in report.reconciliation.records()}
    if reconciliation.DIFFERS in statuses or report.totals.differences:
        return "bad", f"{count(report.totals.differences)} differences between the logs"
    if reconciliation.OPEN in statuses:
        return "warn", f"{count(report.totals.open)} batches open, the rest reconciled"
    if reconciliation.ONE_SIDE in statuses:
        return "warn", "One side only: nothing to reconcile with"
    return ("good", "Egress and ingress reconcile") if statuses else ("info", "Nothing to reconcile")


def _head(report: Report) -> str:
    totals = report.totals
    links = sorted({(row["source_region"], row["destination_region"]) for row in report.register.records()})
    route = "; ".join(f"{source} to {destination}" for source, destination in links) or "no links"
    logs = len(report.logs)
    badges = [
        _badge("good", f"{logs} audit {'log' if logs == 1 else 'logs'} verified"),
        _badge(*_verdict(report)),
    ]
    if totals.breaches:
        badges.append(_badge("bad", f"{count(totals.breaches)} crossings outside their terms"))
    return (
        '<header class="top"><div class="wrap"><p class="kicker">Felix transfer report</p>'
        f"<h1>Data transfers between regions</h1><p>{escape(route)} · {_window(report)}</p>"
        f'<div class="seal">{"".join(badges)}</div></div></header>'
        '<nav aria-label="Contents"><div class="wrap"><ul>'
        + "".join(
            f'<li><a href="#{name}">{words}</a></li>'
            for name, words in (
                ("summary", "Summary"), ("flows", "Flows and volumes"), ("register", "Transfer register"),
                ("reconciliation", "Reconciliation"), ("exceptions", "Exceptions"), ("lineage", "Lineage"),
                ("verification", "Verification"),
            )
        )
        + "</ul></div></nav>"
    )  # fmt: skip


def _card(name: str, value: str, note: str) -> str:
    return f'<div class="card"><div class="name">{name}</div><div class="value">{value}</div><div class="note">{note}</div></div>'


def _not_given(report: Report) -> str:
    """What the reader should know is missing, before any number."""
    missing = report.missing
    if not missing.counterparts and not missing.region_logs:
        return ""
    said = "".join(f"<li>{escape(each)}</li>" for each in (*missing.counterparts, *missing.region_logs))
    badge = _badge("warn" if missing.counterparts else "info", "Logs that were not given")
    return f'<div class="missing">{badge}<ul>{said}</ul></div>'


def _summary(report: Report) -> str:
    totals = report.totals
    rows = report.reconciliation.records()
    covered = sum(row["covered"] for row in rows)
    gap = sum(row["gap"] for row in rows)
    crossed = sum(row["crossed"] for row in rows)
    withheld = sum(row["withheld"] for row in rows)
    passed_by = sum(row["passed_by"] for row in rows)
    delivered = sum(row["delivered"] for row in rows)
    transfers = [row for row in report.register.records() if row["terms_hash"]]
    cards = "".join(
        (
            _card("Records crossed", count(totals.records), f"{size(totals.record_bytes)}"),
            _card(
                "Records delivered", count(totals.delivered), f"{count(totals.acknowledged)} with a receipt"
            ),
            _card("Records withheld", count(totals.withheld), "stayed in their region"),
            _card("Attempts denied", count(totals.denied), "refused by a rule, nothing moved"),
            _card("Transfers", count(len(transfers)), "streams under their own terms"),
            _card("Differences", count(totals.differences), f"{count(totals.open)} open"),
            _card("Outside terms", count(totals.breaches), "crossings that terms do not allow"),
            _card(
                "Audit leaves",
                count(sum(log.size for log in report.logs)),
                f"in {len(report.logs)} verified logs",
            ),
        )
    )

    def term(value: int, words: str) -> str:
        return f"<div><b>{count(value)}</b><span>{words}</span></div>"

    parts = [
        term(covered, "source offsets accounted for"),
        '<div class="sign">=</div>',
        term(crossed, "crossed"),
    ]
    parts += ['<div class="sign">+</div>', term(withheld, "withheld")]
    if passed_by:
        parts += ['<div class="sign">+</div>', term(passed_by, "passed by in a resend")]
    if gap:
        parts += ['<div class="sign">+</div>', term(gap, "in declared gaps")]
    rest = covered - crossed - withheld - passed_by - gap
    if rest > 0:
        parts += ['<div class="sign">+</div>', term(rest, "unaccounted")]
    elif rest < 0:
        parts += ['<div class="sign">−</div>', term(-rest, "announced more than once")]
    equations = f'<div class="equation">{"".join(parts)}</div>'
    if any(row["status"] != reconciliation.ONE_SIDE for row in rows):
        equal = '<div class="sign">=</div>' if crossed == delivered else '<div class="sign">≠</div>'
        equations += (
            f'<div class="equation">{term(crossed, "crossed")}{equal}{term(delivered, "delivered")}</div>'
        )
    heading = "Accounting" if _verdict(report)[0] == "bad" else "Every record is accounted for"
    accounting = (
        f'<h3>{heading}</h3><p class="lead">Over the whole logs, whatever the window.</p>'
        f'<div class="equations">{equations}</div>'
    )
    return (
        '<section id="summary" aria-labelledby="summary-h"><h2 id="summary-h">Summary</h2>'
        f'<p class="lead">What crossed a border in the window asked for ({_asked(report)}), under which approval, and whether '
        "both sides&rsquo; signed logs say the same.</p>"
        f'<p class="statement">{escape(STATEMENT)}</p>{_not_given(report)}<div class="cards">{cards}</div>'
        f"{accounting if rows else ''}</section>"
    )


def _flows(report: Report, colours: dict[str, int]) -> str:
    places: dict[str, str] = {}
    flows: list[Flow] = []
    for row in report.register.records():
        for region, country in (
            ("source_region", "source_country"),
            ("destination_region", "destination_country"),
        ):
            if row[country]:
                places[row[region]] = row[country]
        flows.append(Flow(row["source_region"], row["stream"], row["destination_region"], row["records"]))
        if row["withheld"]:
            flows.append(Flow(row["source_region"], row["stream"], None, row["withheld"]))
    picture = flows_svg(flows, colours, places)
    legend = "".join(
        f'<li><span class="swatch" style="background:{colour(index)}"></span>{escape(stream)}</li>'
        for stream, index in colours.items()
    )
    if any(flow.target is None for flow in flows):
        legend += '<li><span class="swatch" style="background:var(--stay)"></span>withheld</li>'
    label = _label(report)
    unit = "day" if report.bucket_ms >= DAY_MS else "hour"
    body = (
        f"<figure>{picture}<figcaption>Records by region and stream. Band widths are in proportion to records; "
        f"the thinnest are widened to be seen.</figcaption></figure>"
        f'<h3>Records per {unit}</h3><figure><ul class="legend">{legend}</ul>'
        f"{time_svg(report.time_line, report.bucket_ms, colours, label)}"
        f"<figcaption>Records per {unit} (UTC), crossed by stream, and withheld on top.</figcaption></figure>"
        if picture
        else "<p>Nothing crossed and nothing was withheld in the window.</p>"
    )
    rows = [
        (
            f'<span class="nowrap">{escape(row["day"])}</span>', _link(row),
            _text(row["stream"]), _text(row["purpose"]), _text(row["basis"]), count(row["records"]),
            f'<span title="{row["record_bytes"]} bytes">{size(row["record_bytes"])}</span>', count(row["withheld"]),
            count(row["denied"]),
        )
        for row in report.volumes.records()[:ROWS_MAX]
    ]  # fmt: skip
    total = report.volumes.total
    foot = (
        '<tfoot><tr><th scope="row" colspan="5">Total</th>'
        f'<td class="num">{count(total("records"))}</td><td class="num">{size(total("record_bytes"))}</td>'
        f'<td class="num">{count(total("withheld"))}</td><td class="num">{count(total("denied"))}</td></tr></tfoot>'
    )
    table = _table(
        "Volumes by day",
        (
            ("Day (UTC)", False), ("Link", False), ("Stream", False), ("Purpose", False), ("Basis", False),
            ("Records", True), ("Bytes", True), ("Withheld", True), ("Denied", True),
        ),
        rows,
        _shown(len(report.volumes.rows)),
        foot,
    )  # fmt: skip
    return (
        '<section id="flows" aria-labelledby="flows-h"><h2 id="flows-h">Flows and volumes</h2>'
        f"{body}<h3>By day, purpose and basis</h3>{table if rows else '<p>No volumes in the window.</p>'}</section>"
    )


def _label(report: Report) -> Callable[[int], str]:
    """The words for a bucket of the time line. Made one by one: two leaves may lie thousands of years apart."""
    words = "%b %d" if report.bucket_ms >= DAY_MS else "%b %d, %H:00"
    return lambda start: f"{datetime.fromtimestamp(start // 1000, UTC):{words}}"


def _shown(rows: int) -> str:
    return f"the first {ROWS_MAX} of {count(rows)} rows; the files hold all" if rows > ROWS_MAX else ""


def _register(report: Report, colours: dict[str, int]) -> str:
    rows = report.register.records()
    overview = _table(
        "All transfers",
        (
            ("Stream", False), ("Link", False), ("Purpose", False), ("Basis, article, reference", False),
            ("Records", True), ("Bytes", True), ("Withheld", True), ("Denied", True), ("Reconciliation", False),
        ),
        [
            (
                f"<strong>{_text(row['stream'])}</strong>",
                _link(row),
                _text(row["purpose"]),
                _legal(row),
                count(row["records"]),
                size(row["record_bytes"]),
                count(row["withheld"]),
                count(row["denied"]),
                _state(row),
            )
            for row in rows[:ROWS_MAX]
        ],
        _shown(len(rows)),
    )  # fmt: skip
    details = "".join(
        _transfer(number, row, colours)
        for number, row in enumerate((row for row in rows if row["terms_hash"]), start=1)
        if number <= ROWS_MAX
    )
    return (
        '<section id="register" aria-labelledby="register-h"><h2 id="register-h">Transfer register</h2>'
        '<p class="lead">One entry per stream, link and set of terms. Purpose, basis, article, reference, categories, '
        "entities, countries and approvers are what the signed grants say; none is inferred.</p>"
        f"{overview if rows else '<p>No transfers in the window.</p>'}{details}</section>"
    )


def _legal(row: dict[str, Any]) -> str:
    if not row["terms_hash"]:
        return '<span class="quiet">no grant</span>'
    if row["unsigned"]:
        return _badge("warn", "not signed")
    if not row["terms_found"]:
        return _badge("bad", "no signed terms")
    parts = [row["basis"], row["article"], row["reference"]]
    return "<br>".join(escape(part) for part in parts if part)


def _state(row: dict[str, Any]) -> str:
    if not row["terms_hash"]:
        return _badge("info", "nothing moved")
    return _badge(_STATUS.get(row["reconciliation"], "info"), row["reconciliation"] or "–")


def _no_terms(row: dict[str, Any]) -> str:
    """In place of legal fields, where no signed documents give them."""
    if not row["unsigned"]:
        return f"<p>{_badge('bad', 'No signed, accepted and approved grant stands in these logs')}</p>"
    claims = "".join(f"<li>{escape(claim)}</li>" for claim in row["unsigned"])
    return (
        f"<p>{_badge('warn', 'Claims that nobody signed')} Leaves of version 1 say this of the terms. No signature over any of "
        f'it was checked.</p><ul class="quiet">{claims}</ul>'
    )


def _transfer(number: int, row: dict[str, Any], colours: dict[str, int]) -> str:
    place = colours.get(row["stream"])
    swatch = "" if place is None else f'<span class="swatch" style="background:{colour(place)}"></span>'
    legal = [
        ("Purpose", _text(row["purpose"])),
        ("Legal basis", _text(row["basis"])),
        ("Article", _text(row["article"])),
        ("Mechanism", _text(row["mechanism"])),
        ("Reference", _text(row["reference"])),
        ("Transfer assessment", _text(row["assessment"])),
        ("Data categories", _text(row["categories"])),
        ("Data subjects", _text(row["data_subjects"])),
        ("Exporter", _text(row["exporter"])),
        ("Importer", _text(row["importer"])),
        ("Owner", _text(row["owner"])),
        ("Drawn up by", _text(row["drawn_up_by"])),
        ("Approved by", _text(row["approvers"])),
        ("Accepted by", _text(row["accepted_by"])),
        ("Valid from (UTC)", moment(row["not_before"])),
        ("Valid until (UTC)", moment(row["expires"])),
        ("Filter", _code(row["filter"])),
        ("Record key", _text(row["key_rule"])),
        ("Headers that cross", _text([*(row["headers"] or []), *(["traceparent"] if row["trace"] else [])])),
        ("Format", _text(row["format"])),
        ("Onward transfer", "allowed" if row["onward"] else "not allowed"),
        ("Names by pattern", _text(row["wildcard"])),
    ]
    moved = [
        ("First crossing (UTC)", moment(row["first_time"])),
        ("Last crossing (UTC)", moment(row["last_time"])),
        ("Size", f"{size(row['record_bytes'])} ({count(row['record_bytes'])} bytes)"),
        ("Records crossed", count(row["records"])),
        ("With a receipt", count(row["acknowledged"])),
        ("Delivered", count(row["delivered"])),
        ("Withheld", count(row["withheld"])),
        ("Attempts denied", count(row["denied"])),
        ("Source offsets", _codes(row["offsets"])),
    ]
    proof = [
        ("Bridge", _code(row["bridge"])),
        ("Grants", _codes(row["grant_ids"])),
        ("Policy version", _text(row["policy_versions"])),
        ("Egress log", f"{_text(row['egress_log'])}<br>leaves {_text(row['egress_leaves'])}"),
        ("Ingress log", f"{_text(row['ingress_log'])}<br>leaves {_text(row['ingress_leaves'])}"),
        ("Cosigned by", _text(sorted({*(row["egress_cosigners"] or []), *(row["ingress_cosigners"] or [])}))),
        ("Source keys", _codes(row["source_key_ids"])),
        ("Destination keys", _codes(row["destination_key_ids"])),
        ("Commitment keys", _codes(row["commitment_key_ids"])),
    ]
    hashes = [
        ("Terms hash", _code(row["terms_hash"])),
        ("Policy hash", _codes(row["policy_hashes"])),
        ("Egress checkpoint (size, root)", _code(row["egress_checkpoint"])),
        ("Ingress checkpoint (size, root)", _code(row["ingress_checkpoint"])),
    ]
    route = f"{row['source_region']}{_in(row['source_country'])} → {row['destination_region']}{_in(row['destination_country'])}"
    return (
        f'<article class="transfer" aria-labelledby="t{number}"><h3 id="t{number}"><span>{swatch}{number}. {_text(row["stream"])} '
        f'<span class="quiet">{escape(route)}</span></span>{_state(row)}</h3>'
        + (_items(legal) if row["terms_found"] else _no_terms(row))
        + f'<div class="part">What moved</div>{_items(moved)}<div class="part">Evidence</div>{_items(proof)}'
        + f"{_items(hashes, 'wide')}</article>"
    )


def _in(country: str | None) -> str:
    return f" ({country})" if country else ""


def _as_named(row: dict[str, Any]) -> str:
    """The stream, and its name at the destination where that is another one."""
    stream, arrives = row["stream"], row["destination_stream"]
    return _text(stream) + (f" as {_text(arrives)}" if arrives and arrives != stream else "")


def _reconciliation(report: Report) -> str:
    rows = report.reconciliation.records()
    table = _table(
        "Egress against ingress, per shard",
        (
            ("Stream", False), ("Link", False), ("Shard", True), ("Offsets", True), ("Covered", True), ("Crossed", True),
            ("Withheld", True), ("Passed by", True), ("Gap", True), ("Receipts", True), ("Delivered", True), ("Status", False),
        ),
        [
            (
                _as_named(row), _link(row), count(row["shard"]),
                f"{_text(row['first_offset'])}–{_text(row['last_offset'])}", count(row["covered"]), count(row["crossed"]),
                count(row["withheld"]), count(row["passed_by"]), count(row["gap"]), count(row["acknowledged"]), count(row["delivered"]),
                _badge(_STATUS[row["status"]], row["status"]),
            )
            for row in rows[:ROWS_MAX]
        ],
        _shown(len(rows)),
    )  # fmt: skip
    found = report.findings.records()
    if found:
        more = len(found) + report.left_out
        findings = _table(
            "Differences and open batches",
            (
                ("Status", False), ("Finding", False), ("Stream", False), ("Shard", True), ("Offsets", True),
                ("Records", True), ("Leaves", False), ("In words", False),
            ),
            [
                (
                    _badge(_STATUS[row["status"]], row["status"]), f'<span class="nowrap">{escape(row["finding"])}</span>',
                    _as_named(row), _text(row["shard"]),
                    f"{_text(row['first_offset'])}–{_text(row['last_offset'])}", _text(row["records"]),
                    f'<span class="nowrap">egress {_text(row["egress_leaf"])}<br>ingress {_text(row["ingress_leaf"])}</span>', _text(row["sentence"]),
                )
                for row in found[:ROWS_MAX]
            ],
            _shown(more),
        )  # fmt: skip
    else:
        findings = "<p>No differences, no gaps without a leaf that declares them, no duplicates.</p>"
    return (
        '<section id="reconciliation" aria-labelledby="reconciliation-h"><h2 id="reconciliation-h">Reconciliation</h2>'
        '<p class="lead">Both sides&rsquo; logs, held against each other over their whole length: every announced batch needs a '
        "receipt and an arrival with the same records under the same commitments, and every source offset an account.</p>"
        f"<p>{_badge(*_verdict(report))}</p>{table if rows else ''}<h3>Findings</h3>{findings}</section>"
    )


def _exceptions(report: Report) -> str:
    rows = report.exceptions.records()
    colours = {BREACH: "bad", REFUSED: "warn"}
    table = _table(
        "Events, alike ones together",
        (
            ("Severity", False), ("Exception", False), ("Stream", False), ("Link", False), ("In words", False),
            ("Events", True), ("Records", True), ("First and last (UTC)", False), ("Leaves", False),
        ),
        [
            (
                _badge(colours.get(row["severity"], "info"), row["severity"]), escape(row["exception"]), _text(row["stream"]),
                _link(row),
                _text(row["sentence"]) + (f'<br><span class="quiet">by {escape(_bridge(row["actor"]))}</span>' if row["actor"] else ""),
                count(row["events"]), count(row["records"]),
                f'<span class="nowrap">{moment(row["first_time"])}</span><br><span class="nowrap">{moment(row["last_time"])}</span>',
                f'<span class="nowrap">{_text(row["first_leaf"])}–{_text(row["last_leaf"])}</span>',
            )
            for row in rows[:ROWS_MAX]
        ],
        _shown(len(rows)),
    )  # fmt: skip
    return (
        '<section id="exceptions" aria-labelledby="exceptions-h"><h2 id="exceptions-h">Exceptions</h2>'
        '<p class="lead"><strong>breach</strong>: a crossing that its own terms do not allow. <strong>refused</strong>: a control '
        "worked and nothing moved. <strong>notice</strong>: allowed, and worth knowing.</p>"
        f"{table if rows else '<p>None.</p>'}</section>"
    )


def _field(row: dict[str, Any]) -> str:
    """Which part of a record a row of the lineage is about."""
    if row["part"] == "key":
        return "<em>the record's key</em>"
    if row["field"] == OTHER_FIELDS:
        rest = {"header": "all other headers", "payload": "the payload, unread"}
        return f"<em>{rest.get(row['part'], 'all other fields')}</em>"
    return _code(row["field"]) + (' <span class="quiet">header</span>' if row["part"] == "header" else "")


def _lineage(report: Report) -> str:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in report.lineage.records():
        key = tuple(
            row[name]
            for name in ("source_region", "stream", "bridge", "destination_region", "destination_stream")
        )
        groups.setdefault((*key, row["terms_hash"], row["records"]), []).append(row)
    parts = []
    for (source, stream, bridge, target, arrived, _, records), rows in groups.items():
        fields = _table(
            f"Fields of {stream}",
            (("Field", False), ("What is done", False), ("Field at the destination", False)),
            [
                (
                    _field(row),
                    _badge(*_action(row["action"])),
                    '<span class="quiet">does not cross</span>'
                    if row["output"] is None
                    else "<em>unchanged</em>"
                    if row["output"] == OTHER_FIELDS
                    else _code(row["output"]),
                )
                for row in rows
            ],
        )
        parts.append(
            f'<div class="route"><div>{_text(stream)}<small>{_text(source)}</small></div><div class="to" aria-hidden="true">→</div>'
            f'<div>{escape(_bridge(bridge))}<small>bridge, {count(records)} records</small></div><div class="to" aria-hidden="true">→'
            f"</div><div>{_text(arrived)}<small>{_text(target)}</small></div></div>{fields}"
        )
    return (
        '<section id="lineage" aria-labelledby="lineage-h"><h2 id="lineage-h">Lineage</h2>'
        '<p class="lead">From source stream over the bridge to the destination, field by field, as the signed terms state it. The '
        "same is in <code>lineage.ndjson</code> as OpenLineage events.</p>"
        f"{''.join(parts) or '<p>Nothing crossed in the window.</p>'}</section>"
    )


def _log(log: VerifiedLog) -> str:
    cosigned = (
        "<br>".join(
            f"{escape(by.name)}, {count(by.size)} leaves"
            + (f", {moment(by.time_s * 1000)} UTC" if by.time_s is not None else "")
            for by in log.cosigners
        )
        or "nobody"
    )
    return (
        f'<article class="transfer"><h3><span>{escape(log.origin)} <span class="quiet">{escape(log.side)} log</span></span>'
        f"{_badge('good', 'verified')}</h3>"
        + _items(
            (
                ("Leaves", count(log.size)),
                ("Cosigned by", cosigned),
                ("Receipts with a checked signature", count(log.receipts)),
            )
        )
        + _items(
            (
                ("Root hash of the tree", _code(log.root)),
                ("Key of the checkpoint", _code(log.key)),
                ("SHA-256 of the public key", _code(log.key_sha256)),
            ),
            "wide",
        )
        + '<div class="part">What was checked</div><ol class="steps">'
        + "".join(f"<li>{escape(step)}</li>" for step in log.steps)
        + "</ol></article>"
    )


def _verification(report: Report) -> str:
    return (
        '<section id="verification" aria-labelledby="verification-h"><h2 id="verification-h">Verification</h2>'
        '<p class="lead">No report is made of a log that does not verify. Whoever holds the logs can repeat every step, without '
        "trusting either region or this page.</p>"
        f"{''.join(_log(log) for log in report.logs)}"
        "<h3>Check it yourself</h3><pre>felix audit verify PATH             # each log, offline, from its files alone\n"
        "felix audit report --log PATH… --out DIR   # the same logs give the same bytes\n"
        "sha256sum --check SHA256SUMS        # the files beside this page</pre></section>"
    )


def render(report: Report) -> str:
    """The whole page."""
    colours = _stream_colours(report)
    style = resources.files("audit.spark").joinpath("page.css").read_text("utf-8")
    body = "".join(
        (
            _summary(report), _flows(report, colours), _register(report, colours), _reconciliation(report),
            _exceptions(report), _lineage(report), _verification(report),
        )
    )  # fmt: skip
    title = f"Felix transfer report, {iso(report.first_ms) or 'no crossings'}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{_head(report)}"
        f'<main class="wrap">{body}</main><footer class="wrap"><p>{escape(STATEMENT)}</p></footer></body></html>\n'
    )
