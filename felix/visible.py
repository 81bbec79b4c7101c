"""Text from outside, made safe to show: in a terminal, in a log line, on a page. Pure.

A name, a sentence or a key that somebody else chose may hold characters that a terminal obeys (ESC [2J clears it), that
start a line of their own in a log, that turn the reading direction of what follows, that are letters without ink, or marks piled on one letter. `visible` writes each of them as
a backslash escape, so that it is seen and does nothing. All other text stays as it is, backslashes included. Blanks are such text; where what stands beside or below
a text is told by its place alone, `spelled_out` shows them, too. Letters that look like others are left as they are; where people sign, `in_ascii` stands beside them.

Who may call: any code that shows text. Not for data that a program reads: that keeps its bytes.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from typing import Final

_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode's categories of controls (C0, DEL, C1), of format characters (direction, joiners, tags), of surrogates that
belong to nothing, and of line and paragraph separators."""
_NOT_ASSIGNED: Final = (
    range(0x2065, 0x2066), range(0xFFF0, 0xFFF9), range(0xE0000, 0xE0001), range(0xE0002, 0xE0020),
    range(0xE0080, 0xE0100), range(0xE01F0, 0xE1000), range(0x13439, 0x13440),
)  # fmt: skip
"""Code points without a character, which Unicode keeps for such as are not shown (Default_Ignorable_Code_Point): fonts show nothing for them. And format characters of Egyptian that are newer than
the tables of some Python releases."""
_NO_INK: Final = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0\U00013441\U00013442\U00016fe4\U0001d159"
) | {chr(each) for some in _NOT_ASSIGNED for each in some}
"""Letters, marks and symbols that show nothing: fillers, joiners, vowels that are not written, blanks of Egyptian (letters, by Unicode), the Braille pattern and the notehead without a dot. How wide they are is another matter in each terminal.
Selectors of variants stay: they belong to emoji."""
MARKS_MAX: Final = 4
"""Marks on one letter, as scripts have them: Hebrew of the Bible, stacks of Tibetan. More of them cover the lines above and below."""
_MARKS_SIGNED_MAX: Final = 2
"""As most scripts have them, where people sign."""
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPE: Final = re.compile(r"\\(?:[nrt]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})")
"""What `_escape` writes, and what people read as that: it writes small letters."""


def _escape(character: str) -> str:
    number = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN or character in _NO_INK


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] == "M"


def is_visible(text: str) -> bool:
    """True where `visible` would change nothing."""
    if text.isascii():
        return text.isprintable()
    return not any(map(_is_hidden, text)) and not _is_piled(text)


def _is_piled(text: str) -> bool:
    """Whether a letter in it has more marks than `MARKS_MAX`."""
    marks = 0
    for one in text:
        marks = marks + 1 if _is_mark(one) else 0
        if marks > MARKS_MAX:
            return True
    return False


def visible(text: str, keep: str = "") -> str:
    """The text with every control and format character as an escape: `\\n`, `\\x1b`, `\\u202e`; and what has no ink, or is piled on a letter. `keep` are left."""
    if is_visible(text):
        return text
    shown: list[str] = []
    marks = 0
    for one in text:
        marks = marks + 1 if not one.isascii() and _is_mark(one) else 0
        shown.append(_escape(one) if marks > MARKS_MAX or (_is_hidden(one) and one not in keep) else one)
    return "".join(shown)


def spelled_out(text: str) -> str:
    """As `visible`, for people who sign what they read: besides, no blank but single ones between words is left, and no more marks on a letter than most scripts have. So nothing of the text
    stands anywhere but behind what is before it. A backslash that reads as an escape is written as one, so that no two texts are shown alike."""
    shown: list[str] = []
    marks, before = 0, " "
    last = len(text) - 1
    for at, one in enumerate(text):
        marks = marks + 1 if _is_mark(one) else 0
        is_blank = unicodedata.category(one) == "Zs"
        is_odd = is_blank and (one != " " or before == " " or at == last)
        is_odd = is_odd or (one == "\\" and _ESCAPE.match(text, at) is not None)
        shown.append(_escape(one) if is_odd or marks > _MARKS_SIGNED_MAX or _is_hidden(one) else one)
        before = " " if is_blank else one
    return "".join(shown)


def is_plain(text: str) -> bool:
    """True where each letter is the one that it looks like: of ASCII, or with an accent as one character of Latin-1 (`é`, `ß`). Others may look like those (`А` of Cyrillic, `ａ` of
    full width, `e` with an accent of its own, a dash), and a person who reads them cannot tell."""
    return all(one.isascii() or ("\u00c0" <= one <= "\u00ff" and one.isalpha()) for one in text)


def in_ascii(text: str) -> str:
    """The text spelled out, and each character that is not of ASCII as an escape: no two texts are shown alike, whatever the font."""
    return "".join(one if one.isascii() else _escape(one) for one in spelled_out(text))


_IN_JSON: Final = re.compile(r"[^\x00-\x7e]+")


def visible_json(data: bytes) -> bytes:
    """JSON text (UTF-8) with such characters as JSON's own escapes: it decodes to the same values.

    An encoder has escaped what lies below U+0020 inside strings already; line feeds and blanks between are JSON's own.
    """
    if data.isascii() and b"\x7f" not in data:
        return data
    return _IN_JSON.sub(_json_escapes, data.decode()).encode()


def _json_escapes(match: re.Match[str]) -> str:
    text = match.group()
    if is_visible(text):
        return text
    shown: list[str] = []
    marks = 0
    for one in text:
        marks = marks + 1 if _is_mark(one) else 0
        shown.append(_json_escape(one) if marks > MARKS_MAX or _is_hidden(one) else one)
    return "".join(shown)


def _json_escape(one: str) -> str:
    units = one.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


class VisibleFormatter(logging.Formatter):
    """A formatter of log lines: one record is one line, whatever was in its message. A traceback keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback's lines below it."""
        return visible(super().format(record), keep="\n")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message's part of the line."""
        return visible(super().formatMessage(record))

    def formatException(self, ei: object) -> str:
        """Indented, so that no line of an exception's text can pass for a record."""
        return super().formatException(ei).replace("\n", "\n    ")  # type: ignore[arg-type]
