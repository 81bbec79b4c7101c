"""A table: texts that a foreign party, a tenant or a broker may choose, at each place where such a text is shown.

The places are found in the code: a test lists what writes to a standard stream and what makes a log handler, and fails for another one. Commands run in this process against a
broker whose answers have the text wherever an answer has one, in each form of output; what they print is scanned as bytes. Pages, files, metrics, log lines and errors follow.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from attacks.conftest import Tally
from attacks.hostile_broker import Said, hostile_broker, refusal, run_felix
from attacks.hostile_texts import TEXTS, filled, hidden_in, piles_in
from attacks.test_f17_display import hostile_report
from audit_log import TIME_MS, trust
from long_runs import count
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from region_home import copied, make_region
from signed_grants import signed_grant, signing_key

from audit.spark import openlineage, page
from audit.spark.document import as_json
from audit.spark.table import encode_csv
from cli import main as cli_main
from cli.console_view import encode_view, view_of
from cli.form import chosen as chosen_form
from cli.notify import Phase, encode_state
from cli.output import error_line
from cli.terms import confirm
from cli.untrust import _confirm as confirm_untrust
from felix.errors import Code, CorruptionError, FelixError, ProtocolError, RequestError, UnavailableError
from felix.messages import MeshPage, RegionState
from felix.notebook import html_of
from felix.runtime.real import now_ms
from felix.visible import MARKS_MAX, VisibleFormatter, in_ascii, spelled_out, visible, visible_json
from policy.grant import DenyEntry, GrantBook, Standing, StandingAction, sign_deny, sign_standing
from region.config import load_config
from region.folder import RegionFolder
from region.trust.offers import make_offer

SOURCE = Path(__file__).parents[2]
PACKAGES = ("audit", "bridge", "cli", "felix", "keys", "policy", "region")

COMMANDS = (
    "stream list", "stream describe acme/ops/a", "stream create acme/ops/a", "queue list", "queue describe acme/ops/a", "queue peek acme/ops/a",
    "subscription list", "subscription list acme/ops/a", "subscription describe acme/ops/a s", "cache list", "cache stats acme/ops/a",
    "namespace list", "namespace set acme/ops --auto-create", "namespace clear acme/ops", "quota list", "quota show acme", "quota clear acme", "identity list",
    "keys list", "bridge list", "bridge status", "bridge explain stream acme/ops/a --to eu-west", "region trust", "mesh", "top --once --interval 0.2",
)  # fmt: skip
"""Those that show what a region's broker answers, and end by themselves."""
FORMS = ("table", "wide", "json", "yaml", "name")
SURROGATES = ("lone surrogates",)
"""No frame holds them: the encoding of a message is UTF-8. They come with names of files and arguments."""
OVER_THE_WIRE = {name: text for name, text in TEXTS.items() if name not in SURROGATES}
BEGIN_CELLS = (
    "end of markup",
    "script",
    "attribute",
    "formula",
    "formula behind blanks",
    "minus",
    "blanks",
)
LONG = ("very long", "one long word")


def chosen(texts: dict[str, str], *, beside: tuple[str, ...] = (), long: bool = True) -> dict[str, str]:
    """In `make test` all in one, `beside` on their own, and with `long` a long word; each on its own in `make test-long`."""
    if count(0, 1):
        return texts
    found = {"all": " ".join(text for name, text in texts.items() if name not in LONG)}
    return found | {name: texts[name] for name in (*beside, *(LONG[1:] if long else ()))}


_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def found(to: Path) -> None:
        for region in ("us-east", "eu-west"):
            make_region(to, region)

    path = tmp_path_factory.mktemp("home")
    copied(found, path)
    return path


def holds(said: Said) -> None:
    """Nothing that was printed is obeyed, hides what stands beside it, or covers lines."""
    for data in (said.out, said.err):
        assert hidden_in(data) == set()
        assert piles_in(data.decode()) <= MARKS_MAX


def texts_in(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for each in value:
                yield from texts_in(each)
        case dict():
            for name, each in value.items():
                yield from texts_in(name)
                yield from texts_in(each)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_answer_of_a_broker_is_obeyed_by_a_terminal(
    home: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally, command: str
) -> None:
    ran = 0
    for form in FORMS:
        texts = chosen(OVER_THE_WIRE, long=form == "table")
        with hostile_broker(monkeypatch, "plain"):
            plain = run_felix(monkeypatch, home, *command.split(), "-o", form)
        for name, text in texts.items():
            with hostile_broker(monkeypatch, text):
                said = run_felix(monkeypatch, home, *command.split(), "-o", form)
            holds(said)
            assert said.code == plain.code, (form, name, said.err[-500:])
            told = said.out.decode()
            if form == "name":
                assert told.count("\n") == plain.out.count(b"\n"), name
            if form in ("json", "yaml") and b"plain" in plain.out:
                found = json.loads(told) if form == "json" else yaml.load(told, _YAML)
                assert any(text in each for each in texts_in(found)), (form, name)
            ran += 1
    tally("runs of commands against a broker of such texts", ran)


def rows_at_the_edge(said: bytes, width: int = 80) -> set[str]:
    """What a person takes for the names of rows on a screen: some words that begin at the left edge, a wide gap, and more words."""
    screen = (
        line[at : at + width]
        for line in said.decode().split("\n")
        for at in range(0, max(1, len(line)), width)
    )
    return {found[1] for line in screen if (found := re.match(r"\s{0,4}(\S+(?:\s\S+)*)\s{2,}\S", line))}


@pytest.mark.parametrize("command", ["bridge status", "bridge explain stream acme/ops/a --to eu-west", "mesh", "queue describe acme/ops/a", "queue peek acme/ops/a", "subscription describe acme/ops/a s"])  # fmt: skip
def test_no_sentence_of_others_looks_like_a_row(
    home: Path, monkeypatch: pytest.MonkeyPatch, command: str, tally: Tally
) -> None:
    for blank in (" ", "\u00a0", "\u2003", "\u3000", "\u3164"):
        for begins in (0, 4, 12, 22):
            text = ("paused".ljust(80 - begins) + "  forged row".ljust(24) + "yes").replace(" ", blank)
            with hostile_broker(monkeypatch, text):
                said = run_felix(monkeypatch, home, *command.split())
            for found in map(rows_at_the_edge, (said.out, said.err)):
                assert "forged row" not in {re.sub(r"\s", " ", each) for each in found}, (begins, blank)
    tally("sentences that go on like a row", 20)


@pytest.mark.parametrize("form", FORMS)
def test_no_refusal_is_obeyed(home: Path, monkeypatch: pytest.MonkeyPatch, form: str, tally: Tally) -> None:
    texts = OVER_THE_WIRE if form == "table" else chosen(OVER_THE_WIRE)
    for text in texts.values():
        with hostile_broker(monkeypatch, text, refuses=True):
            said = run_felix(monkeypatch, home, "stream", "list", "-o", form)
        holds(said)
        assert said.err.count(b"\n") == (1 if form in ("json", "yaml", "name") else 3)
        if form == "table":
            assert spelled_out(visible(text[:100])).encode() in said.err
    tally("refusals shown", len(texts))


def test_what_the_sdk_raises_can_be_logged_as_it_is(tally: Tally) -> None:
    """A program prints an error, or logs it by its own formatter."""
    for text in OVER_THE_WIRE.values():
        error = refusal(text)
        assert str(error) == f"{visible(text[:4000])} {visible(text[:4000])}".rstrip() and error.told
        assert hidden_in(str(error).encode(), allowed="") == set()
    tally("refusals raised by the SDK", len(OVER_THE_WIRE))


# Arguments and files

AS_ARGUMENTS = (
    "clears the screen",
    "forged log line",
    "override",
    "lone surrogates",
    "end of markup",
    "JSON",
    "format",
)


@pytest.mark.parametrize("words", ["X", "--X", "stream describe X", "stream list X", "stream list --region X", "audit show X", "audit verify X", "audit check-proof X", "audit show --kind X",
    "bridge submit X", "bridge explain stream X --to X", "region status X", "policy check X", "use X", "witness serve X", "log verify X", "_complete X"])  # fmt: skip
def test_no_argument_is_obeyed(home: Path, monkeypatch: pytest.MonkeyPatch, words: str, tally: Tally) -> None:
    """A name of a file that came from elsewhere is an argument, too, and need not be UTF-8."""
    ran = 0
    for name, text in TEXTS.items():
        # No file has so long a name, and no argument has a NUL.
        if name in (*LONG, "NUL") or name not in (AS_ARGUMENTS if count(1, 0) else TEXTS):
            continue
        for form in ("table", "json"):
            given = [word.replace("X", text) for word in words.split()]
            said = run_felix(monkeypatch, home, *given, "-o", form)
            holds(said)
            assert said.code >= 0
            if form == "json" and said.err:
                json.loads(said.err.splitlines()[-1])
            ran += 1
    tally("arguments", ran)


def test_errors_of_each_family_are_one_line_of_json(tally: Tally) -> None:
    for text in TEXTS.values():
        line = error_line(text, text, "x", 1, 1)
        assert hidden_in(line, allowed="") == set()
        assert json.loads(line)["sentence"] == text.encode(errors="backslashreplace").decode()
    tally("errors as JSON", len(TEXTS))


@pytest.mark.parametrize("family", [RequestError, UnavailableError, ProtocolError, CorruptionError])
def test_errors_of_each_family_are_lines_of_ours(
    family: type[FelixError], home: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    for text in TEXTS.values():

        def fail(text: str = text, **_: Any) -> None:
            raise family(text, code=Code.INVALID, hint=text)

        monkeypatch.setattr("cli.main.app.__call__", fail, raising=False)
        with monkeypatch.context() as patch:
            patch.setattr(cli_main.main, "__defaults__", (fail,))
            said = run_felix(monkeypatch, home, "stream", "list")
        holds(said)
        assert said.err.count(b"\n") == 3 and said.err.startswith(b"felix: ")
    tally("errors for people", len(TEXTS))


# Log lines, metrics, notices


def test_a_log_line_is_one_line(tally: Tally) -> None:
    sink = io.StringIO()
    handler = logging.StreamHandler(sink)
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logger = logging.getLogger("felix.test.places")
    logger.propagate = False
    logger.addHandler(handler)
    begins = 0
    try:
        for text in TEXTS.values():
            logger.warning("refused %s", text)
            logger.error("%s", RequestError(text, hint=text))
            try:
                raise ValueError(text)
            except ValueError:
                logger.exception("failed on %s", text)
            begins += 3
    finally:
        logger.removeHandler(handler)
    said = sink.getvalue()
    assert hidden_in(said.encode()) == set() and piles_in(said) <= MARKS_MAX
    lines = [line for line in said.split("\n") if line and not line.startswith((" ", "Traceback"))]
    assert len(lines) == begins
    tally("log lines", begins)


def test_a_label_of_a_metric_is_one_label(tally: Tally) -> None:
    """Names are of ASCII, but for those that an operator gives to witnesses."""
    for name, text in OVER_THE_WIRE.items():
        registry = CollectorRegistry()

        class One:
            def collect(self, text: str = text) -> Iterable[GaugeMetricFamily]:
                gauge = GaugeMetricFamily("felix_x", "X.", labels=["witness"])
                gauge.add_metric([text], 1)
                yield gauge

        registry.register(One())  # type: ignore[arg-type]
        (family,) = text_string_to_metric_families(generate_latest(registry).decode())
        assert [dict(each.labels) for each in family.samples] == [{"witness": text}], name
    tally("labels of metrics", len(OVER_THE_WIRE))


def test_a_status_of_a_service_is_one_line(tally: Tally) -> None:
    for text in TEXTS.values():
        sent = encode_state(Phase.SERVING, text, watched=True)
        assert sent.count(b"\n") == 2 and hidden_in(sent) == set()
    tally("messages to a service manager", len(TEXTS))


# Pages and files


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, tuple(name for name, _ in attrs)))


def elements(html: str) -> list[tuple[str, tuple[str, ...]]]:
    reader = Elements()
    reader.feed(html)
    return reader.seen


def test_a_report_has_the_same_elements_and_cells_whatever_its_logs_say(tally: Tally) -> None:
    short = {name: text for name, text in OVER_THE_WIRE.items() if "long" not in name}
    # What a cell of a spreadsheet begins with, and what ends an element, stand at the beginning.
    texts = chosen(short, beside=BEGIN_CELLS, long=False)
    plain = hostile_report(("plain",))
    plain_page = elements(page.render(plain))
    cells = 0
    for name, text in texts.items():
        report = hostile_report((text,))
        html = page.render(report)
        assert hidden_in(html.encode()) == set() and piles_in(html) <= MARKS_MAX
        assert {tag for tag, _ in elements(html)} == {tag for tag, _ in plain_page}, name
        assert not [
            one
            for one in elements(html)
            if "script" in one[0] or any(each.startswith("on") for each in one[1])
        ]
        for table, other in zip(report.tables, plain.tables, strict=True):
            written = encode_csv(table)
            assert hidden_in(written.encode(), allowed="\r\n") == set()
            rows = list(csv.reader(io.StringIO(written, newline="")))
            assert [len(row) for row in rows] == [
                len(row) for row in csv.reader(io.StringIO(encode_csv(other), newline=""))
            ]
            assert not [cell for row in rows for cell in row if re.match(r"\s*[=+\-@]", cell)], name
            cells += sum(map(len, rows))
        whole = visible_json(json.dumps(as_json(report), ensure_ascii=False).encode())
        assert hidden_in(whole) == set() and json.loads(whole) == as_json(report)
        events = openlineage.events(report)
        lines = openlineage.encode(events)
        assert hidden_in(lines) == set() and lines.count(b"\n") == len(events)
        assert [json.loads(line) for line in lines.split(b"\n") if line] == events
    tally("cells of reports", cells)


def test_a_view_of_the_console_and_a_notebook_hold_nothing_that_is_obeyed(tally: Tally) -> None:
    from cli.mesh_map import Survey
    from cli.top import Sample

    for text in OVER_THE_WIRE.values():
        mesh = filled(MeshPage, text, names=True)
        state = filled(RegionState, text, names=True)
        survey = Survey("us-east", text, 1, Sample(1.0, state, [], [], [], [], []), mesh)
        data = encode_view(view_of([survey], [survey], 1))
        assert data.count(b"\n") == 0 and hidden_in(data) == set() and piles_in(data.decode()) <= MARKS_MAX
        assert all(hidden_in(each.encode(), allowed="") == set() for each in texts_in(json.loads(data)))
        for value in (mesh, state):
            html = html_of(value)
            assert hidden_in(html.encode()) == set() and "<script" not in html and "<img" not in html
            assert piles_in(html) <= MARKS_MAX
    tally("views of the console and of notebooks", 3 * len(OVER_THE_WIRE))


# What people sign


def test_each_text_is_told_from_each_other_where_people_sign(tally: Tally) -> None:
    """Also by who reads ASCII alone."""
    assert len({in_ascii(text) for text in TEXTS.values()}) == len(TEXTS)
    assert len({spelled_out(text) for text in TEXTS.values()}) == len(TEXTS)
    escaped = {spelled_out(visible(text)) for text in TEXTS.values() if visible(text) != text}
    assert escaped.isdisjoint(spelled_out(text) for text in TEXTS.values())
    tally("texts compared where people sign", len(TEXTS) * (len(TEXTS) - 1) // 2)


SIGNED = {
    name: text
    for name, text in OVER_THE_WIRE.items()
    if len(text) <= 512 and not re.search(r"[\x00-\x1f\x7f]", text)
}
"""Those that a signed document may hold (`policy.terms`)."""


def book_of(text: str) -> GrantBook:
    """A grant that another region drew up, paused and denied, with this text wherever there is one."""
    signed = signed_grant(1, purpose=text, mechanism=text, reference=text, categories=(text,), exporter=text, importer=text, owner=text, transfer_assessment=text)  # fmt: skip
    paused = sign_standing(
        Standing(grant=signed.grant, action=StandingAction.PAUSE, region="us-east", sequence=1, at=TIME_MS, by="alice", reason=text),
        signing_key("us-east"),
    )  # fmt: skip
    denied = sign_deny(DenyEntry(streams="acme/*/*", peer="*", region="us-east", sequence=1, at=TIME_MS, by="alice", reason=text), signing_key("us-east"))  # fmt: skip
    return GrantBook((signed.export, signed.accepted, paused, denied), trust().policy_keys)


def test_documents_of_another_region_are_told_apart_and_not_obeyed(
    home: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    seen: dict[str, str] = {}
    all_in_one = " ".join(SIGNED.values())
    parts = {f"all, {at}": all_in_one[at : at + 256].strip() for at in range(0, len(all_in_one), 256)}
    seen_in_all_forms = SIGNED.keys() if count(0, 1) else parts.keys()
    for name, text in (SIGNED | parts).items():
        book = book_of(text)

        async def fetched(*_: object, book: GrantBook = book) -> GrantBook:
            return book

        monkeypatch.setattr("cli.bridge.fetch_book", fetched)
        (view,) = book.list(TIME_MS)
        shown = ""
        for words in (("list",), ("show", view.grant)):
            for form in ("table", "json") if name in seen_in_all_forms else ("table",):
                if words == ("list",) and name not in seen_in_all_forms:
                    continue
                with hostile_broker(monkeypatch, "plain"):
                    said = run_felix(monkeypatch, home, "bridge", *words, "-o", form)
                assert said.code == 0, said.err
                holds(said)
                if form == "table":
                    assert not {"kind", "\u00a0kind"} & rows_at_the_edge(said.out), name
                    shown = said.out.decode()
        # A font may draw two letters alike, and never two of ASCII.
        shown = re.sub(r"g-[a-z2-7]{16}|[0-9a-f]{64}|[^\x20-\x7e]", "", shown)
        assert shown not in seen, (name, seen.get(shown))
        seen[shown] = name
    tally("documents of another region", len(SIGNED))


def test_an_offer_of_another_region_is_told_apart_and_not_obeyed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """Whoever reads it has a pin signed, after he compared a fingerprint that stands among its rows."""
    eu = RegionFolder.of("eu-west", home)
    config = load_config(eu.config)
    seen: dict[str, str] = {}
    texts = {name: text for name, text in OVER_THE_WIRE.items() if len(text) <= 255}
    for number in range(0, 60, 6):
        texts[f"a row of its own, {number}"] = (
            "Acme".ljust(number).replace(" ", "\u00a0")
            + "\u00a0\u00a0fingerprint\u00a0\u00a0"
            + 3 * "0000\u00a0"
        )
    for name, text in texts.items():
        signed = make_offer(
            eu, msgspec.structs.replace(config, entity=text), ["eu.example.org:7444"], text, now_ms()
        )
        (tmp_path / "offer").write_bytes(signed.encode())
        said = run_felix(monkeypatch, home, "region", "trust", str(tmp_path / "offer"), "--offline")
        assert said.code and b"Nobody compared" in said.err
        holds(said)
        found = [
            line for line in said.out.decode().split("\n") if re.match(r"\s{0,4}fingerprint\s{2,}", line)
        ]
        screen = rows_at_the_edge(said.out)
        assert len(found) == 1 and not {each for each in screen if "fingerprint" in each} - {"fingerprint"}, (
            name
        )
        shown = re.sub(r"[^\x20-\x7e]|\d\d:\d\d:\d\dZ", "", said.out.decode())
        assert shown not in seen, (name, seen.get(shown))
        seen[shown] = name
    tally("offers of another region", len(texts))


class Person(io.StringIO):
    """Sits at a terminal, and says yes to whatever is asked."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("form", ["json", "yaml", "name"])
def test_nobody_is_asked_to_sign_what_the_output_does_not_show(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """With an output for programs no row is printed before the question, and no fingerprint."""
    eu = RegionFolder.of("eu-west", home)
    signed = make_offer(eu, load_config(eu.config), ["eu.example.org:7444"], "", now_ms())
    (tmp_path / "offer").write_bytes(signed.encode())
    monkeypatch.setattr("sys.stdin", Person("y\ny\n"))
    said = run_felix(
        monkeypatch, home, "region", "trust", str(tmp_path / "offer"), "--offline", "-o", form, terminal=True
    )
    assert said.code and b"Nobody compared" in said.err
    assert not (RegionFolder.of("us-east", home).trusted / "eu-west.json").exists()
    monkeypatch.setattr(chosen_form, "form", form)
    with pytest.raises(RequestError, match="nothing is shown before"):
        confirm("Sign these terms?", yes=False)
    confirm("Sign these terms?", yes=True)
    us = load_config(RegionFolder.of("us-east", home).config)
    with pytest.raises(RequestError, match="nothing is shown before"):
        confirm_untrust(us, "eu-west", 1, yes=False)
    confirm_untrust(us, "eu-west", 1, yes=True)


def test_what_others_wrote_into_a_file_is_data_in_a_pipe_and_escapes_on_a_terminal(
    home: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """A key of another region's bundle has a name of its choice."""
    texts = chosen(OVER_THE_WIRE)
    for text in texts.values():
        monkeypatch.setattr("cli.audit.format_policy", lambda *_, text=text, **__: f"log {text}\n")
        assert run_felix(monkeypatch, home, "audit", "policy").out == f"log {text}\n".encode()
        said = run_felix(monkeypatch, home, "audit", "policy", terminal=True)
        assert hidden_in(said.out, allowed="\n\t") == set() and piles_in(said.out.decode()) <= MARKS_MAX
    tally("files on a terminal", len(texts))


# The places, from the code

WRITES = {
    "cli/cache.py": 2, "cli/completion.py": 2, "cli/main.py": 3, "cli/output.py": 7,
}  # fmt: skip
"""Calls that write to a standard stream by another way than `cli.output` and `cli.safe_console`."""


def writes(path: Path) -> int:
    found = 0
    text = path.read_text()
    if not re.search(r"\bprint\(|sys\.std|echo\b|warn\(|print_exc", text):
        return 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
            is_write = called == "print" or re.fullmatch(
                r"sys\.std(out|err)(\.buffer)?\.write(lines)?", called
            )
            found += bool(is_write) or called in (
                "typer.echo",
                "typer.secho",
                "click.echo",
                "warnings.warn",
                "traceback.print_exc",
            )
    return found


def test_nothing_else_writes_to_a_standard_stream_and_one_formatter_writes_log_lines(tally: Tally) -> None:
    found, consoles, handlers = {}, [], []
    modules = [path for package in PACKAGES for path in sorted((SOURCE / package).rglob("*.py"))]
    for path in modules:
        name = str(path.relative_to(SOURCE))
        if name.startswith("cli/benchmark/"):
            continue
        if number := writes(path):
            found[name] = number
        text = path.read_text()
        consoles += (
            [name]
            if re.search(r"\bConsole\(|from rich\.console import .*Console\b|rich\.print", text)
            else []
        )
        handlers += (
            [name] if re.search(r"basicConfig\(|StreamHandler\(|FileHandler\(|\.addHandler\(", text) else []
        )
    assert found == WRITES
    assert consoles == ["cli/safe_console.py"] and handlers == ["cli/main.py"]
    tally("modules looked through for places", len(modules))
