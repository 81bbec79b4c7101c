"""Text from outside, made safe to show: in a terminal, in a log line, on a page. Pure.

A name, a sentence or a key that somebody else chose may hold characters that a terminal obeys (ESC [2J clears it), that
start a line of their own in a log, or that turn the reading direction of what follows. `visible` writes each of them as
a backslash escape, so that it is seen and does nothing. All other text stays as it is, backslashes included.

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
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _escape(character: str) -> str:
    number = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def is_visible(text: str) -> bool:
    """True where `visible` would change nothing."""
    return text.isprintable() or not any(unicodedata.category(one) in _HIDDEN for one in text)


def visible(text: str, keep: str = "") -> str:
    """The text with every control and format character as an escape: `\\n`, `\\x1b`, `\\u202e`. `keep` are left."""
    if text.isprintable():
        return text
    return "".join(
        _escape(one) if unicodedata.category(one) in _HIDDEN and one not in keep else one for one in text
    )


_IN_JSON: Final = re.compile(r"[^\x00-\x7e]")


def visible_json(data: bytes) -> bytes:
    """JSON text (UTF-8) with such characters as JSON's own escapes: it decodes to the same values.

    An encoder has escaped what lies below U+0020 inside strings already; line feeds and blanks between are JSON's own.
    """
    if data.isascii() and b"\x7f" not in data:
        return data
    return _IN_JSON.sub(_json_escape, data.decode()).encode()


def _json_escape(match: re.Match[str]) -> str:
    one = match.group()
    if unicodedata.category(one) not in _HIDDEN:
        return one
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
