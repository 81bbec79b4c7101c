"""The page and its pictures: escaped, self-contained, opened in a real browser."""

from __future__ import annotations

import re
import shutil
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from crossing_logs import CREW, DEPARTURES, ORDERS, Made

from audit.leaf import TIME_MS_MAX
from audit.spark import exceptions, lineage, reconciliation, register, volumes
from audit.spark.document import Cosigner, Missing, Report, Totals, VerifiedLog
from audit.spark.figure import Flow, count, flows_svg, nice_step, size, time_svg
from audit.spark.page import moment, render
from audit.spark.report import LINKS_MAX, _first
from audit.spark.table import Column, Table, Type
from audit.spark.volumes import DAY_MS, bucket_ms, pictured
from policy.quantity import AFTER_CALENDAR

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """Notes elements, attributes and whether every element is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.headings: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(self.open[-1])
        self.text.append(data)


@pytest.fixture(scope="module")
def page(five: Made) -> str:
    return five.result.page.read_text()


@pytest.fixture(scope="module")
def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


@pytest.mark.spark
def test_the_page_is_what_the_report_renders(five: Made, page: str) -> None:
    assert render(five.result.report) == page


@pytest.mark.spark
def test_the_page_asks_nobody_for_anything(page: str, read: Reader) -> None:
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base"} & set(read.tags)
    assert {value[0] for _, name, value in read.attributes if name == "href"} == {"#"}
    assert not [name for _, name, _ in read.attributes if name.startswith("on") or name == "src"]
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page


@pytest.mark.spark
def test_what_a_log_says_is_text_and_never_markup(page: str, read: Reader) -> None:
    assert "<script" not in page
    assert "Acme Europe B.V. <script>alert(1)</script>" in "".join(read.text)


@pytest.mark.spark
def test_the_page_can_be_read_without_seeing_it(read: Reader) -> None:
    assert read.tags.count("h1") == 1 and ("html", "lang", "en") in read.attributes
    order = [int(heading[1]) for heading in read.headings]
    assert all(after - before <= 1 for before, after in pairwise(order))
    assert read.tags.count("caption") == read.tags.count("table") > 5
    assert all(
        value in ("col", "row") for tag, name, value in read.attributes if (tag, name) == ("th", "scope")
    )
    assert read.tags.count("th") == sum(
        1 for tag, name, _ in read.attributes if (tag, name) == ("th", "scope")
    )
    images = [value for tag, name, value in read.attributes if (tag, name) == ("svg", "role")]
    assert images == ["img"] * read.tags.count("svg") == ["img", "img"]
    assert read.tags.count("desc") == 2
    anchors = {value for _, name, value in read.attributes if name == "id"}
    assert {value[1:] for _, name, value in read.attributes if name == "href"} <= anchors


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_text_stands_out_from_its_ground_in_light_and_dark() -> None:
    style = (Path(__file__).resolve().parents[2] / "audit/spark/page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in style.split(":root {")[1:3]
    )
    for colours in (light, dark):
        for ink in ("ink", "soft", "good", "bad", "warn", "info"):
            for ground in ("paper", "ground"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
        for bar in (*(f"c{n}" for n in range(8)), "stay"):
            assert contrast(colours[bar], colours["paper"]) >= 2.4, bar


# In a browser


OWN_HOSTS = (b"google", b"gvt1.com", b"gstatic.com")
"""What the browser asks for by itself (the time, updates), whatever it shows. It gets no answer either."""


class Proxy:
    """Accepts connections and answers none: whatever the browser asks for over the network comes here."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                line = self.request.recv(4_096).partition(b"\r\n")[0]
                if not any(host in line for host in OWN_HOSTS):
                    proxy.asked.append(line)

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    server = Proxy()
    yield server
    server.close()


def browse(file: Path, folder: Path, proxy: Proxy, *how: str) -> str:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium on this machine")
    said = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
            f"--proxy-server=127.0.0.1:{proxy.port}", "--proxy-bypass-list=<-loopback>",
            f"--user-data-dir={folder / 'profile'}", *how, file.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return said.stdout


@pytest.mark.spark
@pytest.mark.browser
def test_a_browser_shows_the_page_and_asks_nobody(five: Made, tmp_path: Path, proxy: Proxy) -> None:
    shown = browse(five.result.page, tmp_path, proxy, "--dump-dom")
    totals = five.result.report.totals
    for words in (
        "Data transfers between regions", "2 audit logs verified", "Egress and ingress reconcile", DEPARTURES, ORDERS, CREW,
        f"{totals.records:,}", f"{totals.withheld:,}", "SCC-2026-014", "pseudonymized", "not a statement",
        *(log.root for log in five.result.report.logs),
    ):  # fmt: skip
        assert words in shown, words
    assert "<script" not in shown
    assert not any(host.decode() in shown for host in OWN_HOSTS)
    assert proxy.asked == []


@pytest.mark.spark
@pytest.mark.browser
def test_the_watch_on_the_browser_sees_a_request(tmp_path: Path, proxy: Proxy) -> None:
    """The test above means something: a page that does ask is noticed."""
    asking = tmp_path / "asking.html"
    asking.write_text('<img src="http://picture.example/a.png">')
    browse(asking, tmp_path, proxy, "--dump-dom")
    assert any(b"picture.example" in line for line in proxy.asked)


@pytest.mark.spark
@pytest.mark.browser
def test_the_page_prints(five: Made, tmp_path: Path, proxy: Proxy) -> None:
    target = tmp_path / "report.pdf"
    browse(five.result.page, tmp_path, proxy, f"--print-to-pdf={target}")
    data = target.read_bytes()
    assert data.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", data)) >= 3


# Pictures


def test_numbers_are_for_people() -> None:
    assert (count(1_234_567), size(999), size(1_536), size(3 << 20)) == (
        "1,234,567",
        "999 B",
        "1.5 KiB",
        "3.0 MiB",
    )


@pytest.mark.parametrize(
    ("largest", "step"), [(1, 1), (4, 1), (5, 2), (9, 5), (2_000, 500), (336_776, 100_000)]
)
def test_the_axis_steps_are_round_and_few(largest: int, step: int) -> None:
    assert nice_step(largest) == step
    assert step * 4 >= largest


def numbers(svg: str) -> list[float]:
    return [float(found) for found in re.findall(r' (?:x|y|width|height)="([^"]*)"', svg)]


def test_flows_are_drawn_in_proportion_and_inside_the_picture() -> None:
    flows = [Flow("us", "a/b/c", "eu", 900), Flow("us", "a/b/d", "eu", 90), Flow("us", "a/b/d", None, 10)]
    svg = flows_svg(flows, {"a/b/c": 0, "a/b/d": 1}, {"us": "US", "eu": "NL & <co>"})
    assert "NL &amp; &lt;co&gt;" in svg and "Withheld (stayed)" in svg
    assert flows_svg([], {}, {}) == flows_svg([Flow("a", "b", "c", 0)], {}, {}) == ""
    assert min(numbers(svg)) >= 0
    heights = [float(found) for found in re.findall(r'<rect [^>]*height="([^"]*)"', svg)]
    assert heights[1] == pytest.approx(heights[0] * 0.9, abs=0.2)


def test_bars_stand_on_the_axis_and_inside_the_picture() -> None:
    buckets: list[tuple[int, str, int, int, int]] = [
        (0, "s", 10, 1, 2),
        (0, "t", 5, 1, 0),
        (2 * DAY_MS, "s", 7, 1, 0),
    ]
    labels = {0: "one", DAY_MS: "two", 2 * DAY_MS: "three"}
    svg = time_svg(buckets, DAY_MS, {"s": 0, "t": 1}, labels.__getitem__)
    assert svg.count("<rect") == 4 and ">two</text>" in svg
    assert min(numbers(svg)) >= 0
    assert time_svg([], DAY_MS, {}, str) == time_svg([(0, "s", 0, 0, 0)], DAY_MS, {"s": 0}, str) == ""


def test_many_bars_have_few_labels() -> None:
    buckets: list[tuple[int, str, int, int, int]] = [(day * DAY_MS, "s", 1, 1, 0) for day in range(365)]
    labels: dict[int, Any] = {day * DAY_MS: f"day {day}" for day in range(365)}
    assert time_svg(buckets, DAY_MS, {}, labels.__getitem__).count("day ") - 2 * 365 <= 8


def test_a_time_that_a_witness_chose_is_told_whatever_it_is() -> None:
    assert moment(1_760_054_400_999) == "2025-10-10 00:00:00" and moment(TIME_MS_MAX) == "9999-12-31 23:59:59"
    assert {moment(each) for each in (TIME_MS_MAX + 1, 1 << 72)} == {AFTER_CALENDAR}
    assert "–" in moment(None) and moment(0) == moment(None)


HOSTILE = '<script>alert(1)</script>" onload="x\u202e\x1b[31m'


def hostile_report(status: str, **more: Any) -> Report:
    """One row in each table, whose every text is hostile, but for the words that Felix itself chooses."""

    def table(name: str, columns: tuple[Column, ...], **own: Any) -> Table:
        made: dict[Type, Any] = {
            Type.TEXT: HOSTILE, Type.COUNT: 7, Type.TIME: 1_700_000_000_000, Type.FLAG: True, Type.LIST: [HOSTILE, HOSTILE],
        }  # fmt: skip
        row = {column.name: own.get(column.name, made[column.type]) for column in columns}
        return Table(name, name, columns, (tuple(row.values()),))

    log = VerifiedLog(
        HOSTILE, HOSTILE, 7, HOSTILE, HOSTILE, HOSTILE, (Cosigner(HOSTILE, 5, 1_700_000_000),), 3, (HOSTILE,)
    )
    return Report(
        None, 1_700_000_000_000, 1_700_000_000_000, 1_700_000_000_000, (log,),
        table("register", register.COLUMNS, **more),
        table("reconciliation", reconciliation.COLUMNS, status=status),
        table("findings", reconciliation.FINDING_COLUMNS, status="open"),
        table("exceptions", exceptions.COLUMNS),
        table("volumes", volumes.COLUMNS),
        table("lineage", lineage.COLUMNS, action="mask:4"),
        Totals(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), DAY_MS, ((1_700_000_000_000 // DAY_MS * DAY_MS, HOSTILE, 1, 2, 3),),
        Missing((HOSTILE,), (HOSTILE,)), {"findings": 1},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "more"),
    [
        ("reconciled", {}),
        ("differs", {"unsigned": [HOSTILE], "terms_found": False}),
        ("open", {"unsigned": [], "terms_found": False}),
        ("one side only", {"terms_hash": None, "destination_region": None}),
    ],
)
def test_no_text_of_a_log_becomes_markup_wherever_it_stands(status: str, more: dict[str, Any]) -> None:
    made = render(hostile_report(status, **more))
    reader = Reader()
    reader.feed(made)
    assert reader.open == [] and "script" not in reader.tags
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]
    assert "\u202e" not in made and "\x1b" not in made
    shown = "".join(reader.text)
    assert shown.count("<script>alert(1)</script>") > 40 and "&lt;" not in shown


def test_no_two_lists_are_shown_alike() -> None:
    """Categories and headers are texts that whoever drew a grant up chose: one with a comma is not two."""
    for name in ("categories", "data_subjects", "headers"):
        pages = {
            render(hostile_report("reconciled", **{name: each}))
            for each in (
                ["contact, health"],
                ["contact", "health"],
                ["contact<br>health"],
                ["contact\nhealth"],
            )
        }
        assert len(pages) == 4, name


def test_a_page_stays_short_whatever_a_log_names() -> None:
    """Tables have 100,000 rows, and each may be of a stream and a region of its own, with lists as long as its log."""
    count = 3_000
    few = hostile_report("differs", terms_found=False, unsigned=[])
    columns = [column.name for column in register.COLUMNS]
    (row,) = few.register.records()
    rows = [
        row
        | {
            "stream": f"acme/ops/s{at}",
            "destination_region": f"r{at}",
            "records": at,
            "terms_hash": f"{at:064x}",
        }
        for at in range(count)
    ]
    rows[0] |= {"grant_ids": [f"g-{at}" for at in range(count)], "records": count * count}
    many = replace(few.register, rows=tuple(tuple(each[name] for name in columns) for each in rows))
    (line,) = few.lineage.records()
    routes = tuple(
        tuple((line | {"stream": f"acme/ops/s{at}"})[column.name] for column in lineage.COLUMNS)
        for at in range(count)
    )
    page = render(replace(few, register=many, lineage=replace(few.lineage, rows=routes)))
    reader = Reader()
    reader.feed(page)
    assert reader.open == [] and len(page) < 3_000_000
    said = "".join(reader.text)
    assert "other streams" in said and "other regions" in said
    assert f"and {count - 50:,} more" in said and f"The first 200 of {count:,} routes" in said
    heights = [
        float(value.split()[3]) for tag, name, value in reader.attributes if (tag, name) == ("svg", "viewbox")
    ]
    assert max(heights) < 2_000


def test_bars_are_wider_where_leaves_lie_thousands_of_years_apart() -> None:
    assert (bucket_ms(0, 4 * DAY_MS), bucket_ms(0, 4 * DAY_MS + 1), bucket_ms(0, 1_000 * DAY_MS)) == (
        DAY_MS // 24,
        DAY_MS,
        DAY_MS,
    )
    assert TIME_MS_MAX // bucket_ms(0, TIME_MS_MAX) <= 1_000
    assert pictured([{"stream": f"s{at}", "records": at, "withheld": 0} for at in range(40)]) == sorted(
        f"s{at}" for at in range(16, 40)
    )


def test_of_regions_that_a_report_lacks_as_many_are_named_as_are_read() -> None:
    told = _first([str(at) for at in range(LINKS_MAX + 7)], "{:,} further")
    assert len(told) == LINKS_MAX + 1 and told[-1] == "7 further"
    assert _first(["one"], "{:,} further") == ("one",)
