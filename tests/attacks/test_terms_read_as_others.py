"""Who draws a grant up alone: texts of its terms that a terminal shows as rows of their own, or as nothing. Whoever approves reads each row once, and what it says."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

import pytest
from attacks.chance import Chance
from attacks.conftest import Tally
from rich.cells import cell_len

from cli.form import chosen
from cli.output import out
from cli.terms import show_terms, terms_rows
from policy.grant_documents import ExportGrant
from policy.terms import Basis, GrantTerms, grant_id
from policy.transform import build_spec

WIDTH = 80
BLANKS = tuple(chr(each) for each in range(0x3001) if unicodedata.category(chr(each)) == "Zs")
NO_INK = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u2800\u3164\uffa0"


def terms(**texts: object) -> GrantTerms:
    fields: dict[str, object] = {
        "stream": "acme/*/*", "wildcard": True, "from_region": "us-east", "to_region": "eu-west", "bridge": "spiffe://us-east.acme/bridge/b",
        "purpose": "support", "basis": Basis.SCC, "reference": "SCC-1", "exporter": "Acme Inc", "importer": "Acme SA", "owner": "ops",
        "drawn_up_by": "spiffe://us-east.acme/operator/kim", "not_before": 1, "expires": 1 << 40, "onward": True,
    }  # fmt: skip
    return GrantTerms(**{**fields, **texts})  # type: ignore[arg-type]


def export(of: GrantTerms) -> ExportGrant:
    return ExportGrant(
        grant=grant_id(of.hash()), terms_hash=of.hash().hex(), terms=of, approvals=2, separate=True, policy_revision=1, policy_hash="0" * 64,
        signed_at=1,
    )  # fmt: skip


def on_a_terminal(text: str) -> Iterator[str]:
    """The lines of a screen: a terminal begins a new one where one is full."""
    for line in text.split("\n"):
        shown, width = "", 0
        for character in line:
            width += cell_len(character)
            if width > WIDTH:
                yield shown
                shown, width = "", cell_len(character)
            shown += character
        yield shown


def rows(lines: Iterator[str]) -> list[str]:
    """Names of what a person takes for rows: some words, a wide gap, and more words."""
    found = []
    for line in lines:
        plain = "".join(" " if each.isspace() or each in NO_INK else each for each in line)
        name, gap, value = plain.strip().partition("  ")
        if gap and value and len(plain) - len(plain.lstrip()) <= 4:
            found.append(name)
    return found


def shown(of: GrantTerms, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    out.__dict__.pop("console", None)
    show_terms(export(of))
    out.__dict__.pop("console", None)
    return capsys.readouterr().out


def forged(first: str, lines: list[str], blank: str, begins: int) -> str:
    """A text that, from column `begins` of a screen on, ends this row and continues with others."""
    text = first.ljust(WIDTH - begins) + "".join(line.ljust(WIDTH) for line in lines)
    return text.rstrip().replace(" ", blank)


def test_no_text_of_the_terms_looks_like_rows(
    tally: Tally, chance: Chance, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {name for name, _ in terms_rows(terms())} | {"approvals there", "policy there"}
    fakes = ["  wildcard".ljust(22) + "no", "  onward".ljust(22) + "no"]
    letters = (*BLANKS, *NO_INK, " ", " ", "a", "\u0301", "│", "東")
    tries = [forged("support", fakes, blank, begins) for blank in (*BLANKS, *NO_INK) for begins in (4, 22)]
    drawn = chance(246)
    tries += ["".join(drawn.choices(letters, k=drawn.randint(1, 256))) for _ in range(100)]
    for text in tries:
        for field in ("purpose", "mechanism", "owner", "categories"):
            value: object = (text,) * 3 if field == "categories" else text
            found = rows(on_a_terminal(shown(terms(**{field: value}), capsys, monkeypatch)))
            assert len(set(found)) == len(found) and set(found) <= ours, (field, ascii(text))
    tally("texts made to look like rows of their own", 4 * len(tries))


def test_what_is_named_is_told_from_what_is_not() -> None:
    said = dict(terms_rows(terms(mechanism="none named", transform=build_spec(headers=["none"]))))
    assert (said["mechanism"], said["assessment"], str(said["headers"])) == (
        '"none named"',
        "none named",
        '"none"',
    )
    assert dict(terms_rows(terms()))["headers"] == "none"
    for text in ("naïve Straße", "support (24/7)"):
        assert str(dict(terms_rows(terms(purpose=text)))["purpose"]) == text
    for text, as_ascii in (
        ("Łódź, 東京 und Zürich", r"\u0141\xf3d\u017a, \u6771\u4eac und Z\xfcrich"),
        ("🛫 07:15", r"\U0001f6eb 07:15"),
    ):
        assert str(dict(terms_rows(terms(purpose=text)))["purpose"]) == f"{text}\nthat is, {as_ascii}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"exporter": "Acme → Evil", "importer": "SA"}, {"exporter": "Acme", "importer": "Evil → SA"}),
        ({"categories": ("contact, health",)}, {"categories": ("contact", "health")}),
        ({"transform": build_spec(headers=["a, b"])}, {"transform": build_spec(headers=["a", "b"])}),
        ({"purpose": "support\u200b"}, {"purpose": r"support\u200b"}),
        ({"categories": ("\u0430", r"that is, \u0430")}, {"categories": ("\u0430",)}),
        ({"mechanism": '"none named"'}, {"mechanism": "none named"}),
        ({"mechanism": '""none named""'}, {"mechanism": '"none named"'}),
        ({"transform": build_spec(headers=['"none"'])}, {"transform": build_spec(headers=["none"])}),
    ],
)
def test_no_two_terms_are_shown_alike(one: dict[str, object], other: dict[str, object]) -> None:
    assert rows_of(terms(**one)) != rows_of(terms(**other))


@pytest.mark.parametrize("form", ["table", "wide"])
def test_a_long_text_is_told_from_two(
    form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """What goes on in another line is told from another category, and from what stands below letters that may look like others."""
    monkeypatch.setattr(chosen, "form", form)
    for first in range(20, 75):
        one, two = "x" * first, "health and that of relatives"
        assert _printed((f"{one} {two}",), capsys, monkeypatch) != _printed((one, two), capsys, monkeypatch)
    purpose = f"\u0410cme Inc, {'of the data ' * 5}that is, Acme Inc"
    said = shown(terms(purpose=purpose), capsys, monkeypatch)
    assert not re.search(r"^ {18,20}that is, Acme", said, re.MULTILINE)
    tally("long texts that could be two", 55)


def _printed(
    categories: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    said = shown(terms(categories=categories), capsys, monkeypatch)
    return re.sub(r"[0-9a-f]{64}|g-[a-z2-7]{16}", "", said)


def rows_of(of: GrantTerms) -> list[tuple[str, str]]:
    """As `terms_rows`, but for the hash, which nobody reads."""
    return [(name, str(value)) for name, value in terms_rows(of) if name != "terms hash"]


LOOK_ALIKE = (
    ("Acme", "\u0410cme"), ("Acme", "\uff21cme"), ("Zürich", "Zu\u0308rich"), ("Acme", "Acme\ufe0f"), ("K", "\u212a"), ("a-b", "a\u2010b"), ("1", "\uff11"),
    ("Acme", "\U0001d400cme"), ("\ue000", "\ue001"), ("a/b", "a\u2215b"), ("\u015f", "\u0219"), ("\u0378", "\u0379"), ("\u05d0b", "b\u05d0"),
)  # fmt: skip
SIGNED_TEXTS = (
    "purpose",
    "mechanism",
    "reference",
    "transfer_assessment",
    "categories",
    "exporter",
    "importer",
    "owner",
    "headers",
    "field",
)


@pytest.mark.parametrize("field", SIGNED_TEXTS)
def test_letters_that_look_like_others_are_told_apart_where_people_sign(field: str, tally: Tally) -> None:
    """What a font draws alike differs in letters of ASCII."""

    def with_text(text: str) -> GrantTerms:
        match field:
            case "categories":
                return terms(categories=(text,))
            case "headers":
                return terms(transform=build_spec(headers=[text]))
            case "field":
                is_bare = re.fullmatch(r"[A-Za-z][A-Za-z-]*", text) is not None
                return terms(transform=build_spec(drop=[text if is_bare else f'"{text}"']))
        return terms(**{field: text})

    for one, other in LOOK_ALIKE:
        ascii_alone = [
            [(name, "".join(filter(str.isascii, value))) for name, value in rows_of(with_text(text))]
            for text in (one, other)
        ]
        assert ascii_alone[0] != ascii_alone[1], (one, other)
    tally("pairs of texts that look alike where people sign", len(LOOK_ALIKE))
