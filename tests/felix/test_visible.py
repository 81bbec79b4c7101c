"""Text made safe to show: what a terminal obeys is seen, all other text is as it was."""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from felix.visible import VisibleFormatter, in_ascii, is_plain, is_visible, spelled_out, visible, visible_json

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))


def test_of_all_of_unicode_no_control_or_format_character_is_left() -> None:
    shown = visible("".join(map(chr, range(sys.maxunicode + 1))))
    assert not {unicodedata.category(one) for one in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert is_visible(shown)


def test_escapes_are_those_that_people_know() -> None:
    assert visible("a\x1b[2J\n\r\t\x9b\u202e\U000e0041") == r"a\x1b[2J\n\r\t\x9b\u202e\U000e0041"
    assert visible("a\nb\x07", keep="\n") == "a\nb\\x07"


def test_names_of_people_and_places_stay_as_they_are() -> None:
    for text in ("Łódź", "東京", "القاهرة", "naïve [bold] \\x1b", "100\u00a0€", "🛫 07:15"):
        assert visible(text) == text and is_visible(text)


def test_letters_without_ink_are_escapes() -> None:
    assert visible("a\u3164\u115f\uffa0\u2800\u034fb") == r"a\u3164\u115f\uffa0\u2800\u034fb"
    assert visible_json('"\u3164"'.encode()) == rb'"\u3164"'


IGNORED_AND_UNASSIGNED = (
    (0x2065, 0x2065), (0xFFF0, 0xFFF8), (0xE0000, 0xE0000), (0xE0002, 0xE001F), (0xE0080, 0xE00FF), (0xE01F0, 0xE0FFF),
)  # fmt: skip
"""DerivedCoreProperties.txt of Unicode 16: Default_Ignorable_Code_Point of the category Cn, which fonts show as nothing."""


def test_what_fonts_show_as_nothing_is_shown_also_where_no_character_is_assigned_yet() -> None:
    tried = [chr(each) for first, last in IGNORED_AND_UNASSIGNED for each in range(first, last + 1)]
    assert len(tried) == 3_769
    for one in tried:
        number = f"\\u{ord(one):04x}" if ord(one) < 0x10000 else f"\\U{ord(one):08x}"
        assert not is_visible(one) and visible(f"a{one}b") == spelled_out(f"a{one}b") == f"a{number}b"
        assert json.loads(visible_json(json.dumps(one, ensure_ascii=False).encode())) == one


def test_what_is_spelled_out_has_single_blanks_between_words_alone() -> None:
    assert spelled_out(" a  b\u00a0c d ") == r"\x20a \x20b\xa0c d\x20"
    assert spelled_out("Zu\u0308rich") == "Zu\u0308rich"
    assert spelled_out("z" + 4 * "\u0301") == "z\u0301\u0301\\u0301\\u0301"


@given(ANY_TEXT)
def test_nothing_that_is_spelled_out_has_a_gap(text: str) -> None:
    shown = spelled_out(text)
    assert is_visible(shown) and shown == shown.strip() and "  " not in shown
    assert not {one for one in shown if one.isspace()} - {" "}


ESCAPE = re.compile(r"\\(?:[nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def read_back(shown: str) -> str:
    return ESCAPE.sub(lambda found: ast.literal_eval(f'"{found[0]}"'), shown)


@given(ANY_TEXT | st.text(st.sampled_from("\\xnrtuU05caf\x1b\u202e\u00a0 \u0301а")))
def test_no_two_texts_are_spelled_out_alike(text: str) -> None:
    assert read_back(spelled_out(text)) == text
    shown = in_ascii(text)
    assert read_back(shown) == text and shown.isascii() and shown.isprintable()


def test_a_backslash_that_reads_as_an_escape_is_one() -> None:
    assert spelled_out("a\x1b") == r"a\x1b" and spelled_out(r"a\x1b") == r"a\x5cx1b"
    assert spelled_out(r"C:\files\new and \d+") == r"C:\files\x5cnew and \d+"


def test_letters_that_look_like_others_are_not_plain() -> None:
    for text in ("Acme Inc", "naïve Straße, Île-de-France", r"C:\a [x] {y} ~", ""):
        assert is_plain(text), text
    for text in (
        "\u0410cme", "\uff21cme", "e\u0301", "\u212a", "a\ufe0f", "\u2014", "\u00d7", "a\u00a0b", "\U0001d400", "\u0131", "\u2215", "\ue000", "\u0378",
        "東京", "Łódź",
    ):  # fmt: skip
        assert not is_plain(text), ascii(text)
    assert in_ascii("\u0410cme é") == r"\u0410cme \xe9"


def test_marks_piled_on_a_letter_are_escapes_wherever_text_is_shown() -> None:
    pile = "a" + 20 * "\u0335"
    assert visible(pile) == "a" + 4 * "\u0335" + 16 * r"\u0335" and not is_visible(pile)
    assert visible_json(f'"{pile}"'.encode()).decode() == f'"{visible(pile)}"'
    for text in ("בְּרֵאשִׁ֖ית", "บ้านที่", "ཧཱུྃ", "👩🏽‍".rstrip("\u200d"), "1\ufe0f\u20e3"):
        assert visible(text) == text


@given(ANY_TEXT)
def test_what_is_visible_stays_so(text: str) -> None:
    assert visible(visible(text)) == visible(text)
    assert is_visible(visible(text))


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text())))
def test_json_decodes_to_the_same_values_and_holds_nothing_hidden(value: dict[str, object]) -> None:
    data = visible_json(json.dumps(value, ensure_ascii=False, indent=1).encode())
    assert json.loads(data) == value
    assert is_visible(data.decode().replace("\n", ""))


def test_one_log_record_is_one_line_and_a_traceback_cannot_pass_for_a_record() -> None:
    formatter = VisibleFormatter("%(levelname)s %(name)s: %(message)s")
    record = logging.LogRecord(
        "felix", logging.WARNING, "", 0, "from %s", ("x\nERROR felix: forged \x1b[2J",), None
    )
    assert formatter.format(record) == r"WARNING felix: from x\nERROR felix: forged \x1b[2J"
    try:
        raise ValueError("bad\nERROR felix: forged \x1b[2J")
    except ValueError:
        record.exc_info = sys.exc_info()
    lines = formatter.format(record).split("\n")
    assert sum(not line.startswith((" ", "Traceback")) for line in lines) == 1
    assert "\x1b" not in "".join(lines)


def test_blanks_of_egyptian_are_escapes_and_capital_letters_of_an_escape_are_told_apart() -> None:
    assert visible("a\U00013441\U00013442\U0001343fb") == r"a\U00013441\U00013442\U0001343fb"
    assert spelled_out("a\u200b") != spelled_out(r"a\u200B") == r"a\x5cu200B"
    assert in_ascii(r"\U0001F6EB") == r"\x5cU0001F6EB"
