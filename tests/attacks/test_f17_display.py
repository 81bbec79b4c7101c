"""F17: text that somebody else chose must not be obeyed by the terminal, the log or the page that shows it.

The finding: a refused `open_ingest` puts its grant's text into a DENY leaf, and `felix audit show` crashed on `[/x]`, would
have hidden rows by `[conceal]`, and let ESC [2J reach the terminal. Tried here: hostile text in every text field of leaves,
through `felix audit show` on a pipe, on a terminal and as JSON; through every way the command line prints; through log lines;
and in every cell of a report, as page, CSV, JSON and lineage. The bytes that come out are scanned, and counted.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from audit_log import Link, log_signer, trust
from rich.live import Live

from audit.leaf import Kind, Leaf
from audit.spark import exceptions, lineage, openlineage, page, reconciliation, register, volumes
from audit.spark.document import Cosigner, Missing, Report, Totals, VerifiedLog, as_json
from audit.spark.table import Table, Type, encode_csv, from_rows
from audit.trail import Trail, TrailSettings
from cli import output
from cli.top import _Section
from cli.top import _table as top_table
from felix.visible import VisibleFormatter, visible_json

HOSTILE = (
    "[/x]",
    "[conceal]gone[/conceal]",
    "[bold red]markup[/]",
    ":warning:",
    "\x1b[2J\x1b[1;1Hcleared",
    "\x1b]52;c;cm0gLXJmIC8=\x07",
    "\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31mC1",
    "\x9d0;title\x9c",
    "over\rwritten",
    "forged\n2026-01-01 ERROR felix: line",
    "bell\x07back\x08\x08delete\x7f",
    "\u202etxt.exe\u202c",
    "\u2066isolate\u2069 \u200bzero\u200d\ufeff",
    "line\u2028paragraph\u2029",
    "tag\U000e0041\U000e007f",
    "<script>alert(1)</script>",
    "\" onmouseover='x' <img src=x>&amp;",
    "=HYPERLINK(0)",
    " \t\n@SUM(1)",
    "nul\x00byte",
)
HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
DUMB = {"TERM": "dumb", "COLUMNS": "240"}
"""A terminal for which rich writes no styles: any ESC in the output came out of data."""


def hidden_in(data: bytes, allowed: str = "\n") -> set[str]:
    return {
        f"U+{ord(one):04X}"
        for one in data.decode()
        if unicodedata.category(one) in HIDDEN and one not in allowed
    }


def hostile_log(folder: Path) -> int:
    """A log whose DENY, REVOKE and WITHHELD-like leaves hold hostile text wherever a leaf holds text."""
    link, trail = (
        Link(),
        Trail.open(
            folder,
            log_signer(),
            settings=TrailSettings(checkpoint_interval_ms=3_600_000, checkpoint_leaves=1 << 30),
        ),
    )
    ended = threading.Semaphore(0)
    leaves = [[link.grant()]]
    for text in HOSTILE:
        deny = link.header(
            Kind.DENY, actor=text, action=text, rule=text, code=501, sentence=text, stream=text, grant_id=text,
            source_region=text, destination_region=text, destination_stream=text, bridge=text,
        )  # fmt: skip
        leaves += [[Leaf(deny)], [Leaf(link.header(Kind.KEY, key_id=b"k" * 16, action=text, grant_id=text))]]
    for each in leaves:
        trail.append_nowait(each, lambda *_: ended.release())
    for _ in leaves:
        assert ended.acquire(timeout=60)
    trail.publish()
    trail.close()
    return len(leaves)


def felix(*arguments: str, terminal: bool, home: Path) -> tuple[int, bytes]:
    """The command as a process of its own; with `terminal`, its output goes to a pseudo-terminal."""
    command = [sys.executable, "-m", "cli.main", *arguments]
    environment = {**os.environ, **DUMB, "FELIX_HOME": str(home)}
    if not terminal:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65_536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    # The terminal's driver makes CR LF of LF.
    return process.wait(timeout=120), b"".join(parts).replace(b"\r\n", b"\n")


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_audit_show_prints_hostile_leaves_and_nothing_in_them_is_obeyed(
    tmp_path: Path, tally: Callable[[str, int], None], terminal: bool
) -> None:
    log, scanned = tmp_path / "log", 0
    count = hostile_log(log)
    for more in ([], ["--json"]):
        code, said = felix("audit", "show", str(log), "--last", "0", *more, terminal=terminal, home=tmp_path)
        assert code == 0, said.decode(errors="replace")[-2000:]
        assert hidden_in(said) == set()
        scanned += len(said)
    rows = json.loads(said)["items"]
    assert len(rows) == count
    assert {row["sentence"] for row in rows if row["type"] == "DENY"} == set(HOSTILE), (
        "JSON says what the leaf says"
    )
    code, said = felix("audit", "verify", str(log), terminal=terminal, home=tmp_path)
    assert hidden_in(said) == set() and code not in (0, 1), (
        "no bundle is trusted here, and that is said in order"
    )
    tally("bytes of output scanned", scanned + len(said))


def test_whatever_the_command_line_prints_is_plain_text(
    capsysbinary: pytest.CaptureFixture[bytes], tally: Callable[[str, int], None]
) -> None:
    for text in HOSTILE:
        output.out.print(f"name {text} end")
        output.err.print(text, style="bold red")
        output.note(text)
        output.out.print(output.styled((text, "bold"), text))
        output.table(text, [text, "plain#"], [[text, 1], [text, None]])
        output.out.print(top_table(_Section(text, ["a", "b#"], [[text, 1]], ()), 5, None))
        output.print_json({text: text})
        output.write_json_line([text])
        with output.progress() as bar:
            bar.add_task(text, total=1)
        with Live(output.styled(text), console=output.out.console, auto_refresh=False):
            pass
    said = capsysbinary.readouterr()
    assert hidden_in(said.out) == set() and hidden_in(said.err) == set()
    shown = said.out.decode()
    for text in ("[/x]", "[conceal]gone[/conceal]", ":warning:", r"\x1b[2J", r"\x9b31mC1", r"forged\n2026"):
        assert shown.count(text) >= 5, f"{text} is shown as it is"
    tally("bytes of output scanned", len(said.out) + len(said.err))


def test_a_log_line_is_one_line_whatever_a_stranger_sent(tally: Callable[[str, int], None]) -> None:
    sink = io.StringIO()
    handler = logging.StreamHandler(sink)
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logger = logging.getLogger("felix.test.f17")
    logger.propagate = False
    logger.addHandler(handler)
    try:
        for text in HOSTILE:
            logger.warning("refused a link from %s", text)
    finally:
        logger.removeHandler(handler)
    said = sink.getvalue()
    assert said.count("\n") == len(HOSTILE) and hidden_in(said.encode()) == set()
    tally("bytes of output scanned", len(said))


def test_the_command_line_logs_through_that_formatter(tmp_path: Path) -> None:
    script = (
        "import logging, sys; sys.argv = ['felix', 'doctor', '--json']\n"
        "import cli.main\n"
        "try: cli.main.main()\n"
        "except SystemExit: pass\n"
        "logging.getLogger('felix').error('from %s', '\\n\\x1b[2J')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "FELIX_HOME": str(tmp_path)}, capture_output=True, timeout=120, check=False
    )  # fmt: skip
    assert rb"from \n\x1b[2J" in done.stderr and b"\x1b" not in done.stderr


# Reports


OWN_WORDS = {
    "verification": "verified", "reconciliation": "reconciled", "status": "differs", "severity": "breach",
    "action": "mask", "day": "2026-01-01", "incarnation": "ab" * 16,
}  # fmt: skip
"""Columns whose values are this program's own words, in every table."""


def hostile_table(name: str, columns: Any, texts: tuple[str, ...], *, own: tuple[str, ...]) -> Table:
    rows = []
    for text in texts:
        row: dict[str, Any] = {}
        for column in columns:
            match column.type:
                case Type.COUNT:
                    row[column.name] = 7
                case Type.TIME:
                    row[column.name] = 1_760_000_000_000
                case Type.FLAG:
                    row[column.name] = True
                case Type.LIST:
                    row[column.name] = [text, text]
                case _:
                    row[column.name] = OWN_WORDS[column.name] if column.name in own else text
        rows.append(row)
    return from_rows(name, name, columns, rows)


def hostile_report(texts: tuple[str, ...] = HOSTILE) -> Report:
    logs = tuple(
        VerifiedLog(text, "egress", 1, "00", text, "00", (Cosigner(text, 1, 1),), 1, (text,))
        for text in texts
    )
    own = ("verification", "reconciliation", "status", "severity")
    return Report(
        since_ms=None, until_ms=None, first_ms=1_760_000_000_000, last_ms=1_760_000_900_000, logs=logs,
        register=hostile_table("register", register.COLUMNS, texts, own=own),
        reconciliation=hostile_table("reconciliation", reconciliation.COLUMNS, texts, own=(*own, "incarnation")),
        findings=hostile_table("findings", reconciliation.FINDING_COLUMNS, texts, own=own),
        exceptions=hostile_table("exceptions", exceptions.COLUMNS, texts, own=own),
        volumes=hostile_table("volumes", volumes.COLUMNS, texts, own=("day",)),
        lineage=hostile_table("lineage", lineage.COLUMNS, texts, own=("action",)),
        totals=Totals(**dict.fromkeys(Totals.__slots__, 7)),
        missing=Missing(texts, texts, (), texts),
        bucket_ms=3_600_000,
        time_line=tuple((1_760_000_000_000, text, 1, 1, 1) for text in texts),
        left_off={},
    )  # fmt: skip


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name == "src"], attrs


def test_a_report_of_hostile_text_is_inert_on_the_page_and_in_every_file(
    tally: Callable[[str, int], None],
) -> None:
    report, scanned = hostile_report(), 0
    html = page.render(report)
    reader = Elements()
    reader.feed(html)
    assert "script" not in reader.seen and "img" not in reader.seen
    assert hidden_in(html.encode()) == set()
    scanned += len(html)
    for table in report.tables:
        text = encode_csv(table)
        assert hidden_in(text.encode(), allowed="\r\n") == set()
        for row in csv.reader(io.StringIO(text, newline="")):
            assert not [cell for cell in row if re.match(r"\s*[=+\-@]", cell)], row
        scanned += len(text)
    whole = visible_json((json.dumps(as_json(report), ensure_ascii=False, indent=1) + "\n").encode())
    assert hidden_in(whole) == set() and json.loads(whole) == as_json(report)
    events = openlineage.encode(openlineage.events(report))
    assert hidden_in(events) == set()
    tally("bytes of output scanned", scanned + len(whole) + len(events))


def test_the_log_that_was_shown_is_a_real_one(tmp_path: Path) -> None:
    from audit.tile_disk import Folder
    from audit.verify import verify_log

    hostile_log(tmp_path / "log")
    report = verify_log(Folder(tmp_path / "log"), trust(), cosignatures_min=0)
    assert report.leaves["DENY"] == len(HOSTILE)
