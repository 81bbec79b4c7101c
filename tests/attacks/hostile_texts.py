"""Texts that a party may choose to have a terminal, a log, a page or a reader do what it wants, and answers of a broker that hold them in every place."""

from __future__ import annotations

import re
import types
import typing
import unicodedata
from enum import Enum
from typing import Annotated, Any, Final, Literal, Union

TEXTS: Final[dict[str, str]] = {
    "clears the screen": "\x1b[2J\x1b[1;1Hcleared",
    "colours": "\x1b[8mgone\x1b[0m",
    "moves up": "a\x1b[1A\x1b[2Kb",
    "link of OSC 8": "\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "clipboard of OSC 52": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "title of OSC 0": "\x1b]0;title\x07",
    "C1 CSI": "\x9b31mred\x9b0m",
    "C1 OSC": "\x9d0;title\x9c",
    "C1 NEL": "a\x85b",
    "carriage return": "over\rwritten",
    "backspace": "bad\x08\x08\x08good",
    "bell and delete": "a\x07b\x7f",
    "NUL": "nul\x00byte",
    "forged log line": "x\n2026-01-01 00:00:00,000 ERROR   felix: forged",
    "forged row": "x\n  approved by    everybody",
    "tab": "a\tb",
    "line separator": "a\u2028b",
    "paragraph separator": "a\u2029b",
    "override": "\u202etxt.exe\u202c",
    "isolate": "\u2066a\u2067b\u2069",
    "marks of direction": "a\u200eb\u200fc\u061c",
    "zero width": "a\u200bb\u200cc\u200dd\u2060e\ufeff",
    "soft hyphen": "a\u00adb",
    "piled marks": "a" + 40 * "\u0335\u0301",
    "tags": "tag\U000e0041\U000e0042\U000e007f",
    "filler": "a\u3164\u115f\uffa0\u2800b",
    "ignorable, not assigned": "a\U000e0fff\ufff0b",
    "lone surrogates": "a\udcffb\ud800c\udfff",
    "noncharacter": "a\ufffe\uffff\U0010ffffb",
    "private use": "a\ue000\U000f0000b",
    "not assigned": "a\u0378b",
    "markup of rich": "[bold red]x[/][conceal]y",
    "end of markup": "[/x]",
    "emoji code": ":warning:",
    "script": "<script>alert(1)</script>",
    "attribute": "\" onmouseover='x' <img src=x onerror=alert(1)>",
    "entities": "&lt;b&gt;&amp;&#x1b;",
    "template": "{{ 7*7 }}{% raw %}${x}",
    "formula": "=HYPERLINK(0)",
    "formula behind blanks": " \t@SUM(1)",
    "minus": "-1+cmd|' /C calc'!A0",
    "JSON": '","x":"',
    "YAML": "a: &b [*c]\n--- !!python/object:x",
    "label of a metric": 'a"} 1\nfelix_up{x="\\',
    "format": "%s %(message)s %d {0}",
    "blanks": "a" + 60 * " " + "kind  ACK",
    "blanks that are none of ASCII": "a" + 60 * "\u00a0" + "kind\u3000\u3000ACK",
    "Cyrillic": "\u0410\u0441me",
    "full width": "\uff21\uff43me",
    "letters of the right": "\u05d0\u05d1 1 2 \u0627",
    "very long": "long " * 800,
    "one long word": "x" * 4096,
}  # fmt: skip
HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def hidden_in(data: bytes, allowed: str = "\n") -> set[str]:
    """Characters that a reader does not see, or a terminal obeys. The bytes must be UTF-8."""
    return {
        f"U+{ord(one):04X}"
        for one in set(data.decode())
        if unicodedata.category(one) in HIDDEN and one not in allowed
    }


def piles_in(text: str) -> int:
    """Marks on one letter, where it has the most."""
    marks = "".join(one for one in set(text) if unicodedata.category(one)[0] == "M")
    return max(map(len, re.findall(f"[{re.escape(marks)}]+", text)), default=0) if marks else 0


NAMES: Final[dict[str, str]] = {
    "stream": "acme/ops/departures", "queue": "acme/ops/jobs", "cache": "acme/ops/gates", "region": "us-east", "from_region": "us-east", "to_region": "eu-west",
    "identity": "spiffe://us-east.acme/client/a", "bridge": "spiffe://us-east.acme/bridge/b", "grant": "g-aaaaaaaaaaaaaaaa", "scope": "tenant",
    "namespace": "acme/ops", "next": "", "after": "", "origin": "us-east.acme/log", "streams": "acme/*/*",
    "destination_stream": "acme/ops/departures", "dead_letter": "acme/ops/jobs.dead", "country": "US", "peer": "*", "durability": "fsync", "stage": "due",
}  # fmt: skip
"""Names that the client takes apart, and where a list ends: what is none of this kind is refused before it is shown."""


def filled(kind: Any, text: str, name: str = "", *, names: bool) -> Any:
    """A value of this type with the text in each string of it; `names`: names are names."""
    origin, given = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return filled(given[0], text, name, names=names)
    if origin in (Union, types.UnionType):
        return filled(next(each for each in given if each is not type(None)), text, name, names=names)
    if origin is Literal:
        return given[0]
    if origin in (list, tuple):
        return origin([filled(given[0], text, name, names=names)] * 2)
    if origin is dict or (origin is not None and issubclass(origin, typing.Mapping)):
        return {filled(given[0], text, name, names=names): filled(given[1], text, name, names=names)}
    if kind is str:
        return NAMES[name] if name in ("next", "after") or (names and name in NAMES) else text
    if kind is bytes:
        return b"\x01" * 16
    if kind in (int, float, bool):
        return kind(name != "more")
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    hints = typing.get_type_hints(kind, include_extras=True)
    return kind(**{field: filled(hints[field], text, field, names=names) for field in kind.__struct_fields__})
