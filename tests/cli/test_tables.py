"""Every table of every command at 80 and 120 columns, with long ids and large figures: nothing is cut, nothing is broken."""

import ast
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from cli.form import chosen
from cli.output import Printer, table
from cli.tables import fitted
from cli.top import BudgetStats, CacheStats, ReaderStats, StreamStats, TopStats, picture
from felix.messages import LinkState

CLI = Path(__file__).parents[2] / "cli"
FIGURE = f"{123_456_789_012:,}"
IDS = (
    "g-abcdefghijklmnop",
    "acme/operations-of-the-north/departures-and-arrivals",
    "2026-11-22T07:10:25Z",
    "f" * 64,
)
SENTENCE = "The source refused it, since its grant has expired and nobody has renewed it."


def tables() -> list[tuple[str, list[str]]]:
    """The columns of every call of `table`, read from the commands' source."""
    found = []
    for path in sorted(CLI.glob("*.py")):
        text = path.read_text()
        # Parsed where the word stands: each test process does it.
        for node in ast.walk(ast.parse(text)) if "table(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "table":
                columns = node.args[1]
                if isinstance(columns, ast.List) and all(
                    isinstance(each, ast.Constant) for each in columns.elts
                ):
                    names = [each.value for each in columns.elts if isinstance(each, ast.Constant)]
                    found.append((f"{path.stem}:{node.lineno}", [str(name) for name in names]))
    return found


TABLES = tables()


def drawn(made: RenderableType, width: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width).print(made, soft_wrap=isinstance(made, Text))
    return text.getvalue().splitlines()


def test_there_are_tables() -> None:
    assert len(TABLES) > 25


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(("where", "columns"), TABLES, ids=[where for where, _ in TABLES])
def test_no_figure_and_no_id_is_cut_in_any_table(where: str, columns: list[str], width: int) -> None:
    cells = [
        FIGURE
        if column.endswith("#")
        else SENTENCE
        if column in ("reason", "note", "purpose", "says")
        else IDS[at % 3]
        for at, column in enumerate(columns)
    ]
    shown = drawn(fitted("Title", columns, [[Text(cell) for cell in cells]] * 2, width), width)
    whole = "\n".join(shown)
    for cell in cells:
        for word in cell.split():
            assert whole.count(word) >= 2, f"{where}: {word} is cut or broken:\n{whole}"
    assert all(cell_len(line) <= width for line in shown), whole


def test_rows_become_blocks_only_where_they_do_not_fit() -> None:
    columns = ["grant", "stream", "records#", "reason"]
    row = [Text(IDS[0]), Text(IDS[1]), Text(FIGURE), Text(SENTENCE)]
    assert "┏" in drawn(fitted("T", columns, [row], 120), 120)[1]
    blocks = drawn(fitted("T", columns, [row], 80), 80)
    assert blocks[0] == "T" and blocks[1].split() == ["grant", IDS[0]] and f"records  {FIGURE}" in blocks[3]
    assert "┏" in drawn(fitted("T", columns, [row], None), 400)[1], "as wide as it is with -o wide"
    narrow = drawn(
        fitted("T", ["", ""], [[Text("hash"), Text(IDS[3])], [Text("why"), Text(SENTENCE)]], 40), 40
    )
    assert any(IDS[3] in line for line in narrow), "a long id has its line for itself, and keeps it whole"


def test_a_wide_table_is_whole_where_the_terminal_is_narrow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("cli.output.out", Printer(stderr=False))
    monkeypatch.setattr(chosen, "form", "wide")
    table("Title", ["grant", "stream", "records#", "reason"], [[IDS[0], IDS[1], FIGURE, SENTENCE]])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 6, "a title, a header and one row"
    assert all(each in shown[4] for each in (IDS[0], IDS[1], FIGURE, SENTENCE))


@given(
    st.lists(st.lists(st.text("ab 1,", max_size=60), min_size=3, max_size=3), max_size=4),
    st.integers(20, 160),
)
def test_whatever_the_words_none_is_broken(rows: list[list[str]], width: int) -> None:
    columns = ["a name", "count#", "text"]
    whole = "\n".join(
        drawn(fitted("", columns, [[Text(cell) for cell in row] for row in rows], width), width)
    )
    for row in rows:
        for cell in row:
            for word in cell.split():
                assert word in whole


def test_top_fits_a_small_screen_and_cuts_no_figure() -> None:
    stream, link = (
        IDS[1],
        LinkState(IDS[0], IDS[1], 0, "us-east", "eu-west", "b", "active", SENTENCE, lag_records=10**9),
    )
    found = TopStats(
        region="us-east", broker="b1", interval_s=1, sessions=1234, sessions_limit=4096, subscriptions=99, in_records=1e6,
        in_bytes=5e8, out_records=1e6, out_bytes=5e8, stored_bytes=10**13,
        budgets=[BudgetStats(name, 10**8, 10**9) for name in ("publish", "ingest", "delivery", "catch_up", "ring")],
        streams=[
            StreamStats(
                stream=f"{stream}-{number}", shards=256, in_records=123_456, in_bytes=987_654_321, out_records=123_456,
                out_bytes=987_654_321, readers=99, lag_records=10_000_000 + number, stored_bytes=10**12, held_bytes=0,
                pending_bytes=0, stopped=3,
            )
            for number in range(20)
        ],
        readers=[
            ReaderStats(
                kind="subscription", name="s/1", stream=stream, identity="orders-svc", records=1e5, bytes=1e8,
                lag_records=10_820 + number, waits="credit",
            )
            for number in range(20)
        ],
        caches=[
            CacheStats(
                cache="acme/web/sessions", keys=10**7, size_bytes=10**9, bytes_limit=10**10, gets=123_456, hit_ratio=0.5,
                evicted=7, expired=8, watches=9,
            )
        ],
        throttled=[], links=[link],
    )  # fmt: skip
    shown = drawn(picture(found, 15, 80, 24), 80)
    whole = "\n".join(shown)
    assert len(shown) <= 24 and all(cell_len(line) <= 80 for line in shown), whole
    assert "10,000,000" in whole and "10,820" in whole and "1,000,000,000" in whole and "…" not in whole, (
        whole
    )
    assert all(title in whole for title in ("Streams", "Readers", "Caches", "Links")), whole
    assert "more columns where it is wider" in whole
    assert "records/s in" in "\n".join(drawn(picture(found, 15, 200, 60), 200))
