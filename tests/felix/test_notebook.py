"""Results as HTML: tables and pictures, in which no text from outside is markup or hidden."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.batch import Record
from felix.messages import LinkState, RegionState, ShardState, StreamState
from felix.notebook import ROWS_SHOWN_MAX, TEXT_SHOWN_MAX, Rows, html_of, links_svg, rows_html, stream_svg
from felix.settings import Durability, Retention
from felix.visible import is_visible

HOSTILE = (
    '<script>alert(1)</script>"><img src=x onerror=alert(1)>',
    "' style='background:url(//x)",
    "</text></svg><iframe>",
    "a\u202eb\x1b[2J\x00c",
    "&lt;b&gt;",
)
TAGS = {"table", "thead", "tbody", "tr", "th", "td", "p", "svg", "title", "rect", "line", "polygon", "text"}
ATTRIBUTES = {
    "style", "viewbox", "width", "height", "role", "fill", "font-size", "font-family", "font-weight", "x", "y", "rx",
    "x1", "x2", "y1", "y2", "stroke", "stroke-width", "stroke-dasharray", "points", "text-anchor",
}  # fmt: skip


class Page(HTMLParser):
    """What a browser would make of it: tags and attributes in the order they come, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS and {name for name, _ in attrs} <= ATTRIBUTES, (tag, attrs)
        assert all(value == "text-align:left" for name, value in attrs if name == "style")
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert is_visible(data), data
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)


def stream(text: str = "acme/a/b", shards: int = 2, stopped: str = "") -> StreamState:
    state = [ShardState(n, 10 * n, 100, 100, 1, stopped=stopped) for n in range(shards)]
    return StreamState(text, b"\xff" * 16, shards, Durability(), Retention(), 0, 1_700_000_000_000, state)


def link(text: str = "active", **fields: Any) -> LinkState:
    names = {"stream": text, "from_region": text, "to_region": text, "state": text, "reason": text, **fields}
    return LinkState(grant=text, shard=0, bridge=text, **names)


def every(text: str) -> list[str]:
    record = Record(
        7, 1_700_000_000_000, text.encode("utf-8", "surrogatepass"), {text: b"x"}, memoryview(b"\xfe" * 99)
    )
    region = RegionState(text, text, text, 1, {text: 1.5})
    found: list[Any] = [record, stream(text, stopped=text), link(text), region]
    return [html_of(one) for one in found] + [rows_html([one]) for one in found] + [rows_html([text])]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_outside_is_text(text: str) -> None:
    for html in every(text):
        Page(html)


@given(st.text())
def test_no_text_becomes_markup_or_hides(text: str) -> None:
    for html in every(text):
        Page(html)


def test_a_short_text_is_shown_as_it_is() -> None:
    assert "<b> & \"c\" 'd'" in "".join(Page(rows_html([link("<b> & \"c\" 'd'")])).texts)


def test_a_long_text_is_cut_and_bytes_that_are_no_text_are_hex() -> None:
    for payload in ("é".encode() * 100_000, b"x" * 1_000_000):
        (*_, found) = Page(html_of(Record(0, 1, None, {}, payload))).texts
        assert len(found) == TEXT_SHOWN_MAX and found.endswith("…")
    assert "fe 00 … (" not in html_of(Record(0, 1, None, {}, b"\xfe\x00"))
    assert "fe fe" in html_of(Record(0, 1, b"\xfe" * 40, {}, b"")) and "(40 bytes)" in html_of(
        Record(0, 1, b"\xfe" * 40, {}, b"")
    )


def test_a_stream_is_a_bar_for_each_shard_from_its_start_to_its_end() -> None:
    picture = stream_svg(stream())
    assert '<rect x="30" y="24" width="240" height="11" rx="2" fill="#3b6ea5">' in picture
    assert '<rect x="54" y="42" width="216" height="11" rx="2" fill="#3b6ea5">' in picture
    assert "10 to 100" in picture
    assert 'fill="#b3541e"' in stream_svg(stream(stopped="disk full")) and "#b3541e" not in picture
    assert stream_svg(stream(shards=0)).count("<rect") == 0


def test_a_link_is_a_whole_arrow_while_it_works_and_dashed_otherwise() -> None:
    regions = {"from_region": "us-east", "to_region": "eu-west", "stream": "acme/a/b"}
    works = links_svg([link("active", crossed=5, **regions), link("active", crossed=7, **regions)])
    assert works.count("<line") == 1 and "dasharray" not in works and "active, 12 crossed" in works
    assert "dasharray" in links_svg([link("active", **regions), link("denied", **regions)])


def test_a_long_list_says_how_much_of_it_is_shown() -> None:
    rows = Rows([stream()] * (ROWS_SHOWN_MAX + 9))
    page = Page(rows._repr_html_())
    assert page.tags.count("tr") == ROWS_SHOWN_MAX + 1
    assert f"the first {ROWS_SHOWN_MAX} of {ROWS_SHOWN_MAX + 9}" in page.texts
    assert rows == [stream()] * len(rows), "a list like any other"
    assert Page(Rows()._repr_html_()).texts == ["nothing"]
