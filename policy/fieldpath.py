"""Paths to fields of a JSON record: `tailnum`, `customer.id`, `items[].sku`, `"odd.name"[]`.

Invariants: a `FieldPath` has 1 to `PARTS_MAX` parts and starts with a name; `str()` parses back to itself.
A part is a member's name, or `EACH` for "every element of this list".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from felix.errors import RequestError

EACH: Final = "[]"
"""The part that stands for every element of a list. A member cannot have this name: `[` needs quotes,
and the one quoted name that would collide is refused."""
PARTS_MAX: Final = 16
"""Deeper rules than this have not been seen, and the compiled transform recurses once for each part."""
TEXT_CHARS_MAX: Final = 256

PART_PATTERN: Final = r'[A-Za-z_][A-Za-z0-9_-]*|"[^"\\\x00-\x1f]+"'
_PART: Final = re.compile(rf"({PART_PATTERN})((?:\[\])*)", re.ASCII)
_BARE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class FieldPath:
    """Where in a record a rule applies."""

    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RequestError(INVALID) with what was expected."""
        parts: list[str] = []
        at = 0
        while at < len(text) <= TEXT_CHARS_MAX:
            found = _PART.match(text, at)
            if found is None:
                break
            name = found[1].strip('"')
            if name == EACH:
                break
            parts.append(name)
            parts.extend(EACH for _ in range(len(found[2]) // 2))
            at = found.end()
            if at == len(text):
                if len(parts) > PARTS_MAX:
                    break
                return cls(tuple(parts))
            if text[at] != ".":
                break
            at += 1
        shown = text if len(text) <= 60 else text[:60] + "…"
        raise RequestError(
            f"{shown!r} is not a field path: expected names joined by dots, [] for each element of a list, "
            f'and quotes around names with other characters, as in customer.id, items[].sku or "odd name"; '
            f"at most {PARTS_MAX} parts."
        )

    def __str__(self) -> str:
        text = ""
        for part in self.parts:
            if part == EACH:
                text += part
            else:
                text += ("." if text else "") + (part if _BARE.fullmatch(part) else f'"{part}"')
        return text
