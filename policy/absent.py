"""Fields that a transform names and no record has: most likely written wrong. Pure.

Such a field keeps every record from crossing (a rule fails closed), or lets none through a filter; the position moves on all the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from policy.fieldpath import EACH, PARTS_MAX, FieldPath
from policy.predicate import parse_predicate, paths
from policy.transform import Format, TransformSpec

FIELDS_MAX: Final = 5_000
"""Different fields of a sample; more are not looked at."""
LIKE: Final = 0.6
"""How alike two names are before one is offered for the other (difflib's ratio)."""


class Absent(NamedTuple):
    """A field that no record has; `like` is the one that is written most like it, or empty."""

    field: str
    like: str

    def __str__(self) -> str:
        hint = f" Did you mean {self.like}?" if self.like else ""
        return f"No record of the sample has the field {self.field}.{hint}"


def absent_fields(spec: TransformSpec, payloads: Iterable[bytes]) -> tuple[Absent, ...]:
    """The fields that `spec` names and none of these payloads has, in the order in which it names them. None where no payload
    is a JSON object, and for payloads that are not read."""
    if spec.format is Format.OPAQUE:
        return ()
    found: dict[FieldPath, None] = {}
    for payload in payloads:
        try:
            value = msgspec.json.decode(payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            continue
        if isinstance(value, dict):
            for path in _paths(value, ()):
                if len(found) >= FIELDS_MAX:
                    break
                found[path] = None
    if not found:
        return ()
    known = {str(path): None for path in found}
    wanted = dict.fromkeys(_named(spec))
    return tuple(Absent(str(path), _like(str(path), known)) for path in wanted if path not in found)


def _named(spec: TransformSpec) -> Iterator[FieldPath]:
    for rule in spec.fields:
        yield FieldPath.parse(rule.field)
    if spec.filter:
        yield from paths(parse_predicate(spec.filter))


def _like(name: str, known: Iterable[str]) -> str:
    by_case = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(name.casefold(), by_case, n=1, cutoff=LIKE)
    return by_case[found[0]] if found else ""


def _paths(value: Any, parts: tuple[str, ...]) -> Iterator[FieldPath]:
    """Of every field in a decoded payload, also those that lists and objects stand in."""
    if len(parts) >= PARTS_MAX:
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            if name != EACH:
                yield FieldPath((*parts, name))
                yield from _paths(inner, (*parts, name))
    elif isinstance(value, list):
        if value and parts:
            yield FieldPath((*parts, EACH))
        for inner in value:
            yield from _paths(inner, (*parts, EACH))
